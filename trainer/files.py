"""Files that survive a crash: a reader finds the old content or the new, never a part."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trainer.errors import TORCH_SAVE_ERRORS, UserError, is_disk_full, setting_error
from trainer.stopping import partial_file

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
        if is_disk_full(error, path, num_bytes):
            raise _no_room(setting, path, num_bytes, free) from error
        if isinstance(error, RuntimeError) and any(words in str(error) for words in TORCH_SAVE_ERRORS):
            reason = str(error).partition("\n")[0]
            fix = "check that storage, or give another path"
            raise setting_error(setting, path, f"cannot be written ({reason})", fix=fix) from error
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
