"""Finds the files that match a path, folder or glob, opens them, and counts or rejects bad documents.

To find files, this module reads only names, sizes, modification times, and the first bytes of index and .json files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import glob
import io
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TypeAlias

from trainer.data.former_records import NO_RECORDS, RECORD_SUFFIXES, is_record_file
from trainer.errors import UserError, setting_error

if TYPE_CHECKING:
    from trainer.data.shards import ShardManifest

Kind: TypeAlias = Literal["text", "jsonl", "records", "parquet", "arrow", "tokens"]
"""How a file is read: `records` are .json, .csv and .tsv files; `tokens` are other trainers' token files."""

Compression: TypeAlias = Literal["", "gz", "zst"]

_PROSE_SUFFIXES = ".txt .md .markdown .rst .tex .org .adoc .html .htm .xml"

_CODE_SUFFIXES = (
    ".py .pyi .c .h .cc .cpp .cxx .hh .hpp .cu .cuh .m .mm .rs .go .java .kt .kts .scala .swift .cs .fs .js .jsx .mjs "
    ".ts .tsx .rb .php .pl .pm .lua .r .jl .hs .ml .mli .ex .exs .erl .clj .lisp .el .scm .sh .bash .zsh .sql .css "
    ".vue .proto .cmake .asm .s .f90 .f .zig .nim .dart .v .vhd .sv"
)

_KIND_BY_SUFFIX: dict[str, Kind] = {
    **dict.fromkeys((*_PROSE_SUFFIXES.split(), *_CODE_SUFFIXES.split()), "text"),
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    **dict.fromkeys(RECORD_SUFFIXES, "records"),
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".bin": "tokens",
}

_COMPRESSION_BY_SUFFIX: dict[str, Compression] = {".gz": "gz", ".zst": "zst"}

_COMPRESSIBLE_KINDS = ("text", "jsonl", "records")

SUPPORTED_SUFFIXES = (
    ".txt, .md, .jsonl, .json, .csv, a source-code suffix (each also with .gz or .zst), .parquet, .arrow, or .bin "
    "(from another trainer)"
)
"""The most common types of files that a local path may name, as listed in error messages and help text."""

DOCUMENT_SUFFIXES = (
    ".txt, .md, .jsonl, .json, .csv, a source-code suffix (each also with .gz or .zst), .parquet or .arrow"
)
"""The most common types of document files, as read from local folders and from datasets on the Hub."""

URL_SUFFIXES = (
    ".txt, .md, .jsonl, .csv, a source-code suffix (each also with .gz or .zst), .json.gz, .json.zst, .parquet or "
    ".arrow"
)
"""The most common types of document files that a URL may name.  At a URL, an uncompressed .json file is a manifest."""

MEGATRON_MAGIC = b"MMIDIDX\0\0"
"""The first bytes of Megatron's index files."""


@dataclass(frozen=True)
class InputFile:
    """A file of documents or tokens.

    size: in bytes.
    mtime_ns: the modification time in nanoseconds; 0 for files that are downloaded.
    key: the setting that names the file, for messages.
    checksum: the checksum of the content, if known without reading the file, otherwise "".  A known checksum identifies
        the file in place of its path.
    """

    path: str
    kind: Kind
    compression: Compression
    size: int
    mtime_ns: int
    key: str
    checksum: str = ""

    @classmethod
    def from_path(cls, path: str, key: str) -> InputFile | None:
        """Return a description of the file at `path`, or None if its kind is not supported.

        A .json file without records is not supported.  Raises UserError that names the setting `key` if a file of a
        supported kind does not exist or cannot be accessed.
        """
        kind_and_compression = kind_of(path)  # a link's own name counts: the target's may have no suffix
        if kind_and_compression is None:
            return None
        kind, compression = kind_and_compression
        try:
            if kind == "records" and not is_record_file(path):
                return None
            stat = os.stat(path)
        except OSError as error:
            raise setting_error(key, path, f"cannot be read ({error.strerror})") from error
        return cls(path, kind, compression, stat.st_size, stat.st_mtime_ns, key)


def kind_of(path: str) -> tuple[Kind, Compression] | None:
    """Return the kind and the compression of a file, judging by its name; None if its kind is not supported."""
    stem, suffix = os.path.splitext(path.lower())
    compression = _COMPRESSION_BY_SUFFIX.get(suffix, "")
    kind = _KIND_BY_SUFFIX.get(os.path.splitext(stem)[1] if compression else suffix)
    if kind is None or (compression and kind not in _COMPRESSIBLE_KINDS):
        return None
    return kind, compression


def find_inputs(values: Iterable[str], key: str) -> list[InputFile]:
    """Return the files that `values` (paths, folders or globs) match, without duplicates, in the same order.

    A folder means all supported files in it except token files, at any depth and in sorted order.  A folder saved by
    `datasets` means its `train` split.  Raises UserError that names the setting `key` if a value names no such file.
    """
    inputs: dict[str, InputFile] = {}
    for value in values:
        for match in _find_matches(value, key):
            files = list(_list_inputs(match, key))
            if not files:
                if os.path.isdir(match):
                    rule = f"has no file that ends in {DOCUMENT_SUFFIXES}"
                else:
                    is_json = kind_of(match) == ("records", "")
                    rule = NO_RECORDS if is_json else f"its name must end in {SUPPORTED_SUFFIXES}"
                raise setting_error(key, match, rule, fix='write each document as one line of .jsonl: {"text": "..."}')
            inputs.update((os.path.realpath(file.path), file) for file in files)
    return list(inputs.values())


def _find_matches(value: str, key: str) -> list[str]:
    """Return the files and folders that `value`, a path or glob, matches.  Raises UserError if there are none."""
    pattern = os.path.expanduser(value)
    matches = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
    if matches:
        return [os.path.abspath(match) for match in matches]
    if "://" in value:
        fix = "fetch it, and give the folder that contains it"
        raise setting_error(key, value, "is not on a local file system", fix=fix)
    if value.startswith("[") and value.endswith("]"):
        fix = "give several files as a folder or a glob, several sources as a mapping: {web: PATH, code: PATH}"
        raise setting_error(key, value, "is read as one path, and there is no such file", fix=fix)
    parent = Path(pattern).parent
    names = sorted(path.name for path in parent.glob("[!.]*"))
    candidates = [
        name for name in names if (parent / name).is_dir() or name.endswith(".bin") or kind_of(name) is not None
    ]
    similar = difflib.get_close_matches(Path(pattern).name, candidates, n=1, cutoff=0.7)
    rule = "no such file or folder, and no match for it as a glob"
    if similar:
        raise setting_error(key, value, rule, meant=parent / similar[0])
    searched_from = "" if os.path.isabs(pattern) else f", looked up from {Path.cwd()}"
    raise setting_error(key, value, rule, fix=f"give an existing file, folder or glob{searched_from}")


def _list_inputs(path: str, key: str) -> Iterator[InputFile]:
    if not os.path.isdir(path):
        file = InputFile.from_path(path, key)
        if file is not None and (file.kind != "tokens" or is_foreign_token_file(path)):
            yield file
        return
    for inner_path in _walk(dataset_folder(path, key)):
        file = InputFile.from_path(inner_path, key)
        if file is not None and file.kind != "tokens":  # a .bin file may be anything, unless the user named it
            yield file


def is_foreign_token_file(path: str) -> bool:
    """Return whether a .bin file comes from another trainer: no .json or .idx file of this project is next to it."""
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
    """Return the files in a folder, at any depth, sorted by path; hidden files and folders are skipped."""
    paths = []
    for subfolder, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths += [os.path.join(subfolder, name) for name in names if not name.startswith(".")]
    return sorted(paths)


def dataset_folder(folder: str, key: str) -> str:
    """Return the folder with the records: `folder`, or its subfolder `train` if `datasets` has saved splits there.

    Raises UserError if there are splits, but no `train` split.
    """
    if not os.path.isfile(os.path.join(folder, "dataset_dict.json")):
        return folder
    train_folder = os.path.join(folder, "train")
    if os.path.isdir(train_folder):
        return train_folder
    splits = sorted(entry.path for entry in os.scandir(folder) if entry.is_dir())
    raise setting_error(
        key, folder, "has no `train` split; give the folder of another split", example=next(iter(splits), None)
    )


# ---------------------------------------------------------------------------------------------------------------
# Reading files, decompressed


BLOCK_BYTES = 1 << 20
"""Number of bytes read at once."""

READ_ERRORS = (OSError, EOFError, zlib.error)
"""Exceptions that opening or reading a missing or corrupt file may raise, whether or not it is compressed."""


def open_stream(file: InputFile) -> BinaryIO:
    """Open a file for reading its decompressed content.  Opening and reading may raise one of READ_ERRORS."""
    if file.compression == "gz":
        import gzip  # slow to import: only when needed

        return io.BufferedReader(gzip.open(file.path), BLOCK_BYTES)
    if file.compression == "zst":
        return io.BufferedReader(_ZstFile(file), BLOCK_BYTES)
    return open(file.path, "rb")


def seek_to(file: BinaryIO, position: int) -> None:
    """Advance a newly opened file to a position in its decompressed content."""
    if file.seekable():
        file.seek(position)
        return
    while position and (block := file.read(min(BLOCK_BYTES, position))):
        position -= len(block)


def complete_utf8_length(text: bytes) -> int:
    """Return the number of leading bytes of `text` that form complete UTF-8 characters."""
    for num_trailing in range(1, min(4, len(text)) + 1):
        byte = text[-num_trailing]
        if byte < 0x80:
            break
        if byte >= 0xC0:
            character_length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(text) - num_trailing if num_trailing < character_length else len(text)
    return len(text)


class _ZstFile(io.RawIOBase):
    """The decompressed content of a file of Zstandard frames.  Raises OSError if the file is truncated or corrupt."""

    def __init__(self, file: InputFile) -> None:
        try:
            import zstandard
        except ImportError as error:
            rule = "needs the `zstandard` library"
            raise setting_error(file.key, file.path, rule, fix="pip install 'meshtrainer[data]'") from error
        self._error = zstandard.ZstdError
        self._new_frame: Any = zstandard.ZstdDecompressor().decompressobj
        self._file = open(file.path, "rb")  # noqa: SIM115
        self._frame: Any = self._new_frame()
        self._compressed = self._decompressed = b""
        self._is_in_frame = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._decompressed and self._read_more():
            pass
        content, self._decompressed = self._decompressed[: len(buffer)], self._decompressed[len(buffer) :]
        buffer[: len(content)] = content
        return len(content)

    def _read_more(self) -> bool:
        """Decompress the next block; return False at the end of the file."""
        if self._frame.eof:
            self._compressed, self._frame = self._frame.unused_data, self._new_frame()
        compressed = self._compressed or self._file.read(1 << 17)
        if not compressed:
            if self._is_in_frame:
                raise OSError("the compressed data is truncated")
            return False
        self._compressed = b""
        try:
            self._decompressed = self._frame.decompress(compressed)
        except self._error as error:
            raise OSError(str(error)) from error
        self._is_in_frame = not self._frame.eof
        return True

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


# ---------------------------------------------------------------------------------------------------------------
# Documents that cannot be read


MAX_LISTED_PLACES = 20
"""Maximum number of bad documents whose locations are kept.  All bad documents are counted."""


@dataclass(frozen=True)
class SettingNames:
    """Names of the settings in messages: configuration keys, or a command's arguments."""

    inputs: str = "data.path"
    text_key: str = "data.text_key"
    bad: str = "data.bad"
    holdout: str = "data.holdout"
    tokenizer: str = "data.tokenizer"
    folder: str = "data.cache_dir"
    bos: str = "data.bos"


@dataclass
class DocumentCounts:
    """How many documents were read or rejected.

    documents: number of documents that were read.
    empty: number of these documents that are empty.
    bad: number of documents that could not be read.
    places: messages about the first few bad documents, with their locations.
    cut_off: messages about the first few files that could not be read to their end.  Each counts as one bad document.
    """

    documents: int = 0
    empty: int = 0
    bad: int = 0
    places: list[str] = field(default_factory=list)
    cut_off: list[str] = field(default_factory=list)

    @classmethod
    def from_manifest(cls, manifest: ShardManifest) -> DocumentCounts:
        """Return the counts stored in a manifest."""
        names = [declared.name for declared in dataclasses.fields(cls)]
        return cls(**{name: manifest.notes[name] for name in names if name in manifest.notes})

    def add(self, other: DocumentCounts) -> None:
        """Add the counts of `other`."""
        self.documents += other.documents
        self.empty += other.empty
        self.bad += other.bad
        self.places += other.places[: MAX_LISTED_PLACES - len(self.places)]
        self.cut_off += other.cut_off[: MAX_LISTED_PLACES - len(self.cut_off)]


class BadDocuments:
    """Rejects or counts documents that cannot be read.

    limit: the value of `data.bad`: `error` (raise an error at the first one), `skip` (skip them all), or the maximum
        fraction of documents to skip, which `check_limit` enforces after all have been read.
    """

    def __init__(self, limit: str, keys: SettingNames) -> None:
        self.keys, self._limit = keys, limit
        self.tally = DocumentCounts()

    def reject(self, key: str, value: object, rule: str, **advice: Any) -> None:
        """Count a bad document or, if the limit is `error`, raise UserError.  Arguments as for `setting_error`."""
        if self._limit == "error":
            advice = {name: text for name, text in advice.items() if text not in (None, "")}
            fix = f"{self.keys.bad}=skip skips unreadable documents and counts them"
            raise setting_error(key, value, rule, **(advice or {"fix": fix}))
        self.tally.bad += 1
        if len(self.tally.places) < MAX_LISTED_PLACES:
            self.tally.places.append(str(setting_error(key, value, rule)))

    def reject_file(self, value: str, rule: str, **advice: Any) -> None:
        """Count a file that cannot be read to its end as one bad document; raise UserError unless the limit is `skip`.

        A fraction cannot be enforced, since the number of documents in the file is unknown.
        """
        fix = f"{self.keys.bad}=skip skips the whole file; a fraction applies to documents only"
        as_fraction = setting_error(self.keys.inputs, value, rule, fix=fix)
        if self._limit not in ("error", "skip"):
            raise as_fraction
        self.reject(self.keys.inputs, value, rule, **advice)
        if len(self.tally.cut_off) < MAX_LISTED_PLACES:
            self.tally.cut_off.append(str(as_fraction))


_CHAT_KEYS = (
    {"messages"},
    {"conversations"},
    {"instruction", "output"},
    {"prompt", "completion"},
    {"prompt", "chosen", "rejected"},
)
"""Sets of keys that identify a record as a conversation or a preference pair."""


def chat_advice(names: Iterable[str], keys: SettingNames) -> str:
    """Return advice if records with the keys `names` are chats rather than text, otherwise ""."""
    if not any(chat <= {*names} for chat in _CHAT_KEYS):
        return ""
    if keys.inputs.startswith("data."):
        return "these records are chats, not text: set data.source=chat, or use recipe=sft model.path=FOLDER"
    return "these records are chats, which need no preparation: give the file to a run with data.source=chat"


def parse_limit(setting: str, key: str) -> float:
    """Parse `data.bad` into the allowed fraction of bad documents: 0 for `error`, 1 for `skip`.  Raises UserError."""
    named_limits: Mapping[str, float] = {"error": 0.0, "skip": 1.0}
    if setting in named_limits:
        return named_limits[setting]
    with contextlib.suppress(ValueError):
        if 0 < (fraction := float(setting)) < 1:
            return fraction
    rule = "must be error, skip, or the fraction of documents that may be skipped, between 0 and 1"
    raise setting_error(key, setting, rule, example="0.001")


def check_limit(tally: DocumentCounts, setting: str, keys: SettingNames) -> None:
    """Raise UserError if the limit does not allow the documents that were skipped, perhaps under an earlier limit.

    setting: the value of `data.bad`.
    """
    allowed = parse_limit(setting, keys.bad)
    if tally.cut_off and 0 < allowed < 1:
        raise UserError(tally.cut_off[0])
    fraction = tally.bad / max(1, tally.bad + tally.documents)
    if tally.bad and fraction > allowed:
        examples = "\n  ".join(tally.places[:5])
        rule = f"{tally.bad:,} of {tally.bad + tally.documents:,} documents cannot be read\n  {examples}"
        must_skip = fraction >= 0.5 or tally.cut_off
        raise setting_error(keys.bad, setting, rule, "skip" if must_skip else f"{fraction * 1.01:.2g}")


def describe_bad_documents(tally: DocumentCounts) -> str:
    """Return a message about the bad documents, or ""."""
    if not tally.bad:
        return ""
    total = tally.bad + tally.documents
    examples = "".join(f"\n  {error.splitlines()[0]}" for error in tally.places[:5])
    more = "\n  ..." if tally.bad > 5 else ""
    return f"{tally.bad:,} of {total:,} documents cannot be read and were skipped:{examples}{more}"
