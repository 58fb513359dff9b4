"""Files that survive a crash: a reader finds the old content or the new, never a part."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer.stopping import partial_file

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
    with partial_file(path.with_name(f".{path.name}.{os.getpid()}")) as partial:
        write_and_sync(partial, text)
        os.replace(partial, path)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give the name of another file to write; after the block it is flushed to disk and renamed to `path`.

    If the block raises, it is removed, and what was at `path` stays.
    """
    with partial_file(path.with_name(f".{path.name}.{os.getpid()}")) as partial:
        yield partial
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)


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


CHECKSUM = "crc32"
"""The key of a JSON object's own checksum."""


def with_checksum(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON object with a checksum of its own, which `checked` compares."""
    return {**content, CHECKSUM: _checksum_of(content)}


def checked(content: Any) -> dict[str, Any]:
    """Return a JSON object that was read from a file, without its checksum.  Raises ValueError if that is wrong.

    Files of earlier versions have none.
    """
    if not isinstance(content, dict):
        raise ValueError("it is not a JSON object")
    rest = {name: value for name, value in content.items() if name != CHECKSUM}
    if CHECKSUM in content and content[CHECKSUM] != _checksum_of(rest):
        raise ValueError("its checksum is wrong")
    return rest


def _checksum_of(content: Mapping[str, Any]) -> str:
    return f"{crc32(json.dumps(content, sort_keys=True, separators=(',', ':')).encode()):08x}"


def sync_folder(path: Path) -> None:
    """Flush a folder's entries to disk: what makes new names and renames in it last."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
