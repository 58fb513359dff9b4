"""The source code of Python's standard library, as training data that require no download."""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from trainer.data.cache import get_or_build
from trainer.data.shards import Shard, ShardInfo, ShardWriter
from trainer.data.tokenizer import Tokenizer
from trainer.errors import setting_error

Split: TypeAlias = Literal["train", "eval"]

_EXCLUDED_FOLDERS = frozenset(
    ["test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages", "dist-packages", "__pycache__"]
)


class SourceFile(NamedTuple):
    """A source file.  Its size and modification time are used to detect changes."""

    name: str
    """Path relative to the library's folder, with `/` as separator."""
    num_bytes: int
    mtime_ns: int


@functools.cache  # a training process looks them up several times
def find_source_files(folder: Path) -> tuple[SourceFile, ...]:
    """Return the source files in `folder`, at any depth except in excluded or linked subfolders, sorted by name."""
    return tuple(sorted(_walk(str(folder), "")))


def _walk(folder: str, prefix: str) -> Iterator[SourceFile]:
    entries: list[os.DirEntry[str]] = []
    with contextlib.suppress(OSError):  # an unreadable folder counts as empty
        entries = list(os.scandir(folder))
    for entry in entries:
        if entry.is_dir():
            if entry.name not in _EXCLUDED_FOLDERS and not entry.is_symlink():
                yield from _walk(entry.path, f"{prefix}{entry.name}/")
        elif entry.name.endswith(".py"):
            stat = entry.stat()
            yield SourceFile(prefix + entry.name, stat.st_size, stat.st_mtime_ns)


class StdlibCorpus:
    """The source code of the running interpreter's standard library.

    It is the same on all ranks that use the same Python installation.  Tests, the `encodings` package and the topics of
    `help()` (`pydoc_data`) are excluded.  About one file in twenty is held out, chosen by a hash of its relative path.

    Raises UserError if either split has no files, as with a Python that comes without source files.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or Path(sysconfig.get_path("stdlib"))
        self._files = find_source_files(self._folder)
        if not all(self._names_in(split) for split in ("train", "eval")):
            rule = f"this Python has no source files of its standard library in {self._folder}"
            raise setting_error("data.source", "stdlib", rule, "synthetic")

    def documents(self, split: Split) -> list[bytes]:
        """Return the contents of a split's files, in the order of their names."""
        try:
            return [(self._folder / name).read_bytes() for name in self._names_in(split)]
        except OSError as error:
            rule = f"{error.filename} cannot be read ({error.strerror})"
            raise setting_error("data.source", "stdlib", rule, "synthetic") from error

    def shard(self, split: Split, tokenizer: Tokenizer, cache_dir: str | None) -> Shard:
        """Return the tokenized split, one document per file, from the cache; see `get_or_build`."""

        def build(folder: Path) -> None:
            writer = ShardWriter(folder / "text.bin", tokenizer)
            try:
                for text in self.documents(split):
                    writer.write(tokenizer.encode(text), len(text))
                    writer.end_document()
                writer.close()
                writer.publish()
            finally:
                writer.discard()

        def load(folder: Path) -> Shard:
            shard = Shard(folder / "text.bin")
            shard.verify()
            return shard

        # All that the tokens depend on, with sizes and modification times in place of the files' contents.
        identity = json.dumps([ShardInfo.format, sys.version, str(self._folder), tokenizer.name, self._files])
        name = f"stdlib-{hashlib.sha256(identity.encode()).hexdigest()[:16]}-{split}"
        return get_or_build(cache_dir, name, "tokenized text", build, load)

    def _names_in(self, split: Split) -> list[str]:
        return [file.name for file in self._files if _is_held_out(file.name) == (split == "eval")]


def _is_held_out(name: str) -> bool:
    return hashlib.sha256(name.encode()).digest()[0] % 20 == 0


def gzip_bits_per_byte(text: bytes) -> float:
    """Return the size of `text` compressed with `gzip -9`, in bits per byte of `text`."""
    return 8 * len(gzip.compress(text, 9, mtime=0)) / len(text)
