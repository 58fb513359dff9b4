"""Files that survive a crash: a reader finds the old content or the new, never a part."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trainer.errors import UserError, is_full, setting_error

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


@contextmanager
def making(setting: str, path: Path, num_bytes: int = 0) -> Iterator[None]:
    """Write what is asked for at `path`, a file or a folder, inside the block; `num_bytes` is how much at least.

    Raises UserError, named `setting`, if the disk has no room for it, at once or in the middle.  If the block raises,
    folders that were made on the way to `path` are removed again, unless there is something in them.
    """
    missing = [folder for folder in (path, *path.absolute().parents) if not folder.exists()]
    free = free_bytes(path)
    if free < num_bytes:
        raise _no_room(setting, path, num_bytes, free)
    try:
        yield
    except BaseException as error:
        for folder in missing:
            with suppress(OSError):
                folder.rmdir()
        if is_full(error):
            raise _no_room(setting, path, num_bytes, free) from error
        raise


def free_bytes(path: Path) -> int:
    """Return how much room there is on the disk of `path`, which need not exist."""
    return shutil.disk_usage(next(folder for folder in (path, *path.absolute().parents) if folder.exists())).free


def readable_size(num_bytes: int) -> str:
    """Return a size in GiB, or in MiB where it is small."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**28 else f"{num_bytes / 2**20:.1f} MiB"


def _no_room(setting: str, path: Path, num_bytes: int, free: int) -> UserError:
    needs = f"needs {readable_size(num_bytes)}, " if num_bytes else ""
    rule = f"cannot be written (No space left on device): {needs}{readable_size(free)} were free"
    return setting_error(setting, path, rule, fix="free some space there, or give a path on another disk")


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
