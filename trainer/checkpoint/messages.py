"""What ranks tell each other through torch.distributed.checkpoint (DCP): small messages as bytes, and errors as text.

DCP pickles what its callbacks return and raise.  Messages are therefore packed into bytes, which cost nothing to
unpickle, and errors carry nothing but their message.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from trainer.checkpoint.storage import Damaged, describe
from trainer.errors import is_disk_full

Arrays = Mapping[str, np.ndarray[Any, Any]]


def pack(header: Mapping[str, Any], arrays: Arrays | None = None) -> bytes:
    """Return a header of JSON values and some arrays of numbers as compressed bytes."""
    arrays = arrays or {}
    described = {name: [array.dtype.str, array.shape] for name, array in arrays.items()}
    text = json.dumps([header, described], separators=(",", ":")).encode()
    content = [np.ascontiguousarray(array).tobytes() for array in arrays.values()]
    return zlib.compress(b"".join([len(text).to_bytes(8, "little"), text, *content]), level=1)


def unpack(message: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
    """Return the header and the arrays that `pack` was given."""
    content = zlib.decompress(message)
    position = 8 + int.from_bytes(content[:8], "little")
    header, described = json.loads(content[8:position])
    arrays = {}
    for name, (dtype, shape) in described.items():
        count = int(np.prod(shape, dtype=np.int64))
        arrays[name] = np.frombuffer(content, dtype, count, position).reshape(shape)
        position += arrays[name].nbytes
    return header, arrays


class CheckpointError(RuntimeError):
    """Raised if a rank cannot save or load a checkpoint.  DCP raises it on all ranks, inside a CheckpointException."""

    # DCP pickles the frames of an error's traceback.  Before torch 2.12 that failed on Python 3.13, and the other ranks
    # waited for the error until their group's timeout.  This traceback is always empty.
    __traceback__ = property(lambda self: None, lambda self, traceback: None)  # type: ignore[assignment]


class UnsavableState(CheckpointError):
    """Raised if the state cannot be saved at all, which is the user's mistake: trying again does not help."""


class DiskFull(CheckpointError):
    """Raised if the disk is full."""


class DamagedCheckpoint(CheckpointError):
    """Raised if a checkpoint is damaged; an older one may be good."""


@contextlib.contextmanager
def as_checkpoint_error(context: str = "") -> Iterator[None]:
    """Raise any exception of the block as a CheckpointError.  context: put in front of the message."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # any error: an exception of a library may not survive pickling
        is_full = isinstance(error, OSError) and is_disk_full(error)
        kind = DamagedCheckpoint if isinstance(error, Damaged) else DiskFull if is_full else CheckpointError
        raise kind(f"{context}{describe(error)}") from None


def describe_failures(failures: Mapping[int, Any]) -> str:
    """Return the failures of a CheckpointException as one message, in which equal ones are merged.

    failures: (exception, frames) of each rank that failed.
    """
    ranks: dict[str, list[int]] = {}
    for rank, (error, _) in sorted(failures.items()):
        ranks.setdefault(str(error) or repr(error), []).append(rank)
    return "; ".join(
        f"rank{'s' * (len(failed) > 1)} {', '.join(map(str, failed))}: {error}" for error, failed in ranks.items()
    )
