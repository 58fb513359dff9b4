"""Writes the small files of a checkpoint, and reads them back before anything relies on them."""

from __future__ import annotations

from collections.abc import Mapping

from trainer.checkpoint.storage import Storage
from trainer.files import crc32


def check_visible(folder: Storage, name: str, size: int, rank: int) -> None:
    """Raise OSError unless rank 0 sees a file that another rank wrote, with the right size."""
    try:
        found = folder.size(name)
    except FileNotFoundError:
        raise OSError(
            f"{folder}/{name}, which rank {rank} has written, cannot be seen by rank 0: checkpoints need a folder "
            "shared by all nodes (run.dir, or checkpoint.dir)"
        ) from None
    if found != size:
        raise OSError(f"{folder}/{name}: rank {rank} has written {size} bytes, rank 0 sees {found}")


def write_files(folder: Storage, contents: Mapping[str, bytes]) -> dict[str, tuple[int, int]]:
    """Write small files and read each back, since storage may report success and keep only a part.

    Returns their sizes and checksums.  Raises OSError.
    """
    for name, data in contents.items():
        file = folder.create(name)
        try:
            file.write(data)
        finally:
            file.close()
        kept = folder.read(name)
        if kept != data:
            raise OSError(f"{folder}/{name}: the storage has kept {_part(kept, data)}, but reported no error")
    return {name: (len(data), crc32(data)) for name, data in contents.items()}


def _part(kept: bytes, data: bytes) -> str:
    return f"{len(kept)} of {len(data)} bytes" if len(kept) != len(data) else "other bytes"
