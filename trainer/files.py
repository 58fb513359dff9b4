"""Files that survive a crash: a reader finds the old content or the new, never a part."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    from isal.isal_zlib import crc32 as crc32  # the same sum: 26 GB/s, where this machine's zlib does 6
except ImportError:  # no wheel for this machine
    from zlib import crc32 as crc32


def find_folder(path: str | os.PathLike[str]) -> Path | None:
    """Return the folder or file that a path, or a URL file://..., names; None for what is on no file system."""
    text = os.fspath(path).removeprefix("file://")
    return None if "://" in text else Path(text).absolute()


def write_atomically(path: Path, text: str) -> None:
    """Write `text` under another name, flush it to disk, and rename it to `path`; if that fails, nothing is left."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write_and_sync(partial, text)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give the name of another file to write; after the block it is flushed to disk and renamed to `path`.

    If the block raises, it is removed, and what was at `path` stays.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield partial
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_and_sync(path: Path, text: str) -> None:
    """Write `text` and flush it to disk."""
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def append_and_sync(path: Path, text: str) -> None:
    """Append `text` and flush it to disk."""
    with open(path, "a") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def content_of(descriptor: int) -> bytes:
    """Return all that an open file holds.  It can be read even after its name was deleted."""
    pieces, start = [], 0
    while piece := os.pread(descriptor, 1 << 20, start):
        pieces.append(piece)
        start += len(piece)
    return b"".join(pieces)


def sync_folder(path: Path) -> None:
    """Flush a folder's entries to disk: what makes new names and renames in it last."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
