"""Finds the input files that a path, folder or glob names, and what they contain.

Only names, sizes and times are read here, and the first bytes of an index.
"""

from __future__ import annotations

import difflib
import glob
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from trainer.data.json_files import json_advice
from trainer.errors import setting_error

Kind: TypeAlias = Literal["text", "jsonl", "parquet", "arrow", "tokens"]
Compression: TypeAlias = Literal["", "gz", "zst"]

_PROSE = ".txt .md .markdown .rst .tex .org .adoc .html .htm .xml"
_CODE = (
    ".py .pyi .c .h .cc .cpp .cxx .hh .hpp .cu .cuh .m .mm .rs .go .java .kt .kts .scala .swift .cs .fs .js .jsx .mjs "
    ".ts .tsx .rb .php .pl .pm .lua .r .jl .hs .ml .mli .ex .exs .erl .clj .lisp .el .scm .sh .bash .zsh .sql .css "
    ".vue .proto .cmake .asm .s .f90 .f .zig .nim .dart .v .vhd .sv"
)
_KINDS: dict[str, Kind] = {
    **dict.fromkeys((*_PROSE.split(), *_CODE.split()), "text"),
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".bin": "tokens",
}
_COMPRESSIONS: dict[str, Compression] = {".gz": "gz", ".zst": "zst"}
_COMPRESSIBLE = ("text", "jsonl")

SUPPORTED_SUFFIXES = (
    ".txt, .jsonl, .parquet, .arrow, .md, source code; .gz and .zst of text and of .jsonl; .bin of other trainers"
)
"""The supported kinds of files, for messages."""


MEGATRON_MAGIC = b"MMIDIDX\0\0"
"""The first bytes of Megatron's index files."""


@dataclass(frozen=True)
class InputFile:
    """A file of documents: `size` in bytes, `mtime_ns` its modification time in ns.

    `key` is the setting that named the file, for messages.
    """

    path: str
    kind: Kind
    compression: Compression
    size: int
    mtime_ns: int
    key: str

    @classmethod
    def of(cls, path: str, key: str) -> InputFile | None:
        """Describe the file at `path`, or return None if its kind is not supported.  Raises UserError, naming `key`, if
        it is gone.
        """
        found = kind_of(path)  # by the given name: a link's target may have no telling suffix
        if found is None:
            return None
        try:
            stat = os.stat(path)
        except OSError as error:
            raise setting_error(key, path, f"cannot be read ({error.strerror})") from error
        return cls(path, *found, stat.st_size, stat.st_mtime_ns, key)


def kind_of(path: str) -> tuple[Kind, Compression] | None:
    """Return the kind of a file, by its name, and its compression; None if it holds no documents."""
    stem, suffix = os.path.splitext(path.lower())
    compression = _COMPRESSIONS.get(suffix, "")
    kind = _KINDS.get(os.path.splitext(stem)[1] if compression else suffix)
    if kind is None or (compression and kind not in _COMPRESSIBLE):
        return None
    return kind, compression


_LINE = '{"text": "..."}'


def find_inputs(settings: Iterable[str], key: str) -> list[InputFile]:
    """Return the files that paths, folders and globs name, without duplicates, in the order of `settings`.

    A folder means all files in it, at any depth, in sorted order; a folder saved by `datasets` means the records of its
    `train` split.  Raises UserError, naming the setting `key`.
    """
    found: dict[str, InputFile] = {}
    for setting in settings:
        for match in _match(setting, key):
            inside = list(_list_inputs(match, key))
            if not inside:
                files = _walk(match) if os.path.isdir(match) else [match]
                if (advice := next(filter(None, map(json_advice, files)), None)) is not None:
                    raise setting_error(
                        key, match, f"a file in it {advice[0]}" if os.path.isdir(match) else advice[0], fix=advice[1]
                    )
                rule = (
                    f"has no file that ends in {SUPPORTED_SUFFIXES}"
                    if os.path.isdir(match)
                    else _unsupported_suffix(match)
                )
                raise setting_error(key, match, rule, fix=f"write each document as one line of .jsonl: {_LINE}")
            found.update((os.path.realpath(each.path), each) for each in inside)
    return list(found.values())


def _unsupported_suffix(path: str) -> str:
    return f"its name must end in {SUPPORTED_SUFFIXES}"


def _match(setting: str, key: str) -> list[str]:
    """Return the files and folders that a setting names.  Raises UserError if there are none."""
    pattern = os.path.expanduser(setting)
    matches = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
    if matches:
        return [os.path.abspath(match) for match in matches]
    if "://" in setting:
        fix = "fetch it, and give the folder that contains it"
        raise setting_error(key, setting, "is not on a local file system", fix=fix)
    if setting.startswith("[") and setting.endswith("]"):
        fix = "give several files as a folder or a glob, several sources as a mapping: {web: PATH, code: PATH}"
        raise setting_error(key, setting, "is read as one path, and there is no such file", fix=fix)
    parent = Path(pattern).parent
    names = sorted(path.name for path in parent.glob("[!.]*"))
    candidates = [
        name for name in names if (parent / name).is_dir() or name.endswith(".bin") or kind_of(name) is not None
    ]
    meant = difflib.get_close_matches(Path(pattern).name, candidates, n=1, cutoff=0.7)
    rule = "no such file or folder, and no match for it as a glob"
    if meant:
        raise setting_error(key, setting, rule, meant=parent / meant[0])
    begins = "" if os.path.isabs(pattern) else f", looked up from {Path.cwd()}"
    raise setting_error(key, setting, rule, fix=f"give an existing file, folder or glob{begins}")


def _list_inputs(path: str, key: str) -> Iterator[InputFile]:
    if not os.path.isdir(path):
        found = InputFile.of(path, key)
        if found is not None and (found.kind != "tokens" or is_foreign_token_file(path)):
            yield found
        return
    for inside in _walk(dataset_folder(path, key)):
        found = InputFile.of(inside, key)
        if found is not None and found.kind != "tokens":  # a .bin file may be anything, unless the user named it
            yield found


def is_foreign_token_file(path: str) -> bool:
    """Return whether a .bin file comes from another trainer: it has neither our metadata nor our index next to it."""
    stem = path.removesuffix(".bin")
    if os.path.exists(f"{stem}.json"):
        return False
    return not os.path.exists(f"{stem}.idx") or is_megatron(path)


def is_megatron(path: str) -> bool:
    """Return whether a .bin file has a Megatron index next to it."""
    try:
        with open(f"{path.removesuffix('.bin')}.idx", "rb") as file:
            return file.read(len(MEGATRON_MAGIC)) == MEGATRON_MAGIC
    except OSError:
        return False


def _walk(folder: str) -> list[str]:
    """Return the files in a folder, at any depth, sorted by path, without hidden ones."""
    found = []
    for inside, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [os.path.join(inside, name) for name in names if not name.startswith(".")]
    return sorted(found)


def dataset_folder(folder: str, key: str) -> str:
    """Return the folder that holds the records: the `train` split if `datasets` has saved several.

    Raises UserError if there are splits, but none of that name.
    """
    if not os.path.isfile(os.path.join(folder, "dataset_dict.json")):
        return folder
    inside = os.path.join(folder, "train")
    if os.path.isdir(inside):
        return inside
    splits = sorted(entry.path for entry in os.scandir(folder) if entry.is_dir())
    raise setting_error(
        key, folder, "has no split `train`; give the folder of the split", example=next(iter(splits), None)
    )
