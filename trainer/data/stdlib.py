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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from trainer.data.build import Build
from trainer.data.progress import ByteProgress
from trainer.data.records import Piece
from trainer.data.shards import ShardInfo, ShardWriter
from trainer.data.source import Split
from trainer.data.tokenizer import Tokenizer
from trainer.errors import setting_error

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


class StdlibBuild(Build):
    """The shards of the source code of the running interpreter's standard library, one document per file.

    It is the same on all ranks that use the same Python installation.  Tests, the `encodings` package and the topics of
    `help()` (`pydoc_data`) are excluded.  About one file in twenty is held out, chosen by a hash of its relative path.

    Raises UserError if either split has no files, as with a Python that comes without source files.
    """

    content = "tokenized text"

    def __init__(self, tokenizer: Tokenizer, folder: Path | None = None) -> None:
        self.tokenizer = tokenizer
        self._folder = folder or Path(sysconfig.get_path("stdlib"))
        self._sources = find_source_files(self._folder)
        if not all(self._names_in(split) for split in ("train", "eval")):
            rule = f"this Python has no source files of its standard library in {self._folder}"
            raise setting_error("data.source", "stdlib", rule, "synthetic")

    @property
    def files(self) -> list[str]:
        """The paths of the files; see `Build.files`."""
        return [str(self._folder / source.name) for source in self._sources]

    @property
    def pieces(self) -> list[Piece]:
        """A single piece, which has no parts that `records` could read."""
        return [Piece((), sum(source.num_bytes for source in self._sources))]

    @property
    def name(self) -> str:
        """See `Build.name`.  Sizes and modification times stand for the files' contents."""
        identity = json.dumps([ShardInfo.format, sys.version, str(self._folder), self.tokenizer.name, self._sources])
        return f"stdlib-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"

    def write(
        self, piece: Piece, train: ShardWriter, held_out: ShardWriter, progress: ByteProgress
    ) -> Mapping[str, Any]:
        """Write all files; see `Build.write`."""
        writers: dict[Split, ShardWriter] = {"train": train, "eval": held_out}
        for split, writer in writers.items():
            for text in self.documents(split):
                writer.write(self.tokenizer.encode(text), len(text))
                writer.end_document()
                progress.add(len(text))
        return {}

    def documents(self, split: Split) -> Iterator[bytes]:
        """Yield the contents of a split's files, in the order of their names."""
        for name in self._names_in(split):
            try:
                yield (self._folder / name).read_bytes()
            except OSError as error:
                rule = f"{error.filename} cannot be read ({error.strerror})"
                raise setting_error("data.source", "stdlib", rule, "synthetic") from error

    def _names_in(self, split: Split) -> list[str]:
        return [source.name for source in self._sources if _is_held_out(source.name) == (split == "eval")]


def _is_held_out(name: str) -> bool:
    return hashlib.sha256(name.encode()).digest()[0] % 20 == 0


def gzip_bits_per_byte(text: bytes) -> float:
    """Return the size of `text` compressed with `gzip -9`, in bits per byte of `text`."""
    return 8 * len(gzip.compress(text, 9, mtime=0)) / len(text)
