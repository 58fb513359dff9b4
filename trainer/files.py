"""Files that survive a crash: a reader finds the old content or the new, never a part."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

try:
    from isal.isal_zlib import crc32 as crc32  # the same sum: 26 GB/s, where this machine's zlib does 6
except ImportError:  # no wheel for this machine
    from zlib import crc32 as crc32


def find_folder(path: str | os.PathLike[str]) -> Path | None:
    """Return the folder or file that a path, or a URL file://..., names; None for what is on no file system."""
    text = os.fspath(path).removeprefix("file://")
    return None if "://" in text else Path(text).absolute()


LARGEST_JSON = 16 << 20
"""Bytes of a JSON file that comes with a model, its tokenizer apart.  Real ones have a few megabytes at most."""


def read_json(path: Path, largest: int = LARGEST_JSON) -> Any:
    """Return what a JSON file from elsewhere holds.

    Raises OSError, and ValueError for what is not JSON, or is JSON that two readers would understand differently or
    that takes too much to read: a key given twice, a file of more than `largest` bytes, a hundred thousand brackets.
    """
    if (size := path.stat().st_size) > largest:
        raise ValueError(f"it has {size / 2**20:.0f} MiB, more than the {largest / 2**20:.0f} that are read")
    return parse_json(path.read_bytes())


def parse_json(content: bytes) -> Any:
    """Return what JSON from elsewhere holds; see `read_json`.  Raises ValueError."""
    try:
        return json.loads(content.decode("utf-8"), object_pairs_hook=_without_repetition)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8: {error.reason} at byte {error.start}") from error


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"it has {twice!r} twice")
    return found


def link_outside(folder: Path, name: str) -> Path | None:
    """Return where a file of a folder really is, if a link leads out of the folder; None if it stays inside.

    In a hub's cache (models--*/snapshots/*/file -> ../../blobs/*) the links into its own blobs are inside.
    """
    real, inside = Path(os.path.realpath(folder / name)), [Path(os.path.realpath(folder))]
    if inside[0].parent.name == "snapshots":
        inside.append(inside[0].parent.parent / "blobs")
    return None if any(real.is_relative_to(each) for each in inside) else real


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


def sync_folder(path: Path) -> None:
    """Flush a folder's entries to disk: what makes new names and renames in it last."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
