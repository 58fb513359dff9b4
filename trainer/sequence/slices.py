"""The slices of sequences that this process's models are called with, under context parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import torch

from trainer.config import RunConfig, Slices, find_slices
from trainer.distributed.world import World

_current: Slices | None = None
"""Not a context variable, since autograd recomputes activations in its own threads."""


def current_slices() -> Slices | None:
    """Return the current slices; None if models are called with full sequences."""
    return _current


def slice_sequences(config: RunConfig, world: World) -> None:
    """Call the models of this process with slices of sequences from now on, if `mesh.context` says so.

    Opens the process group of the ranks that share sequences.  Called by all ranks.
    """
    global _current
    _current = find_slices(config, world.rank)
    if _current is not None:
        _current = replace(_current, group=world.open_context(_current.count))


def forget_slices() -> None:
    """Call the models of this process with full sequences again."""
    global _current
    _current = None


@contextmanager
def sliced(slices: Slices | None) -> Iterator[None]:
    """Set the current slices inside the block; None for full sequences."""
    global _current
    before, _current = _current, slices
    try:
        yield
    finally:
        _current = before


def whole() -> AbstractContextManager[None]:
    """Call models with full sequences inside the block, even if training uses slices."""
    return sliced(None)


def take_slice(slices: Slices, tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's slice of a tensor (B, T) or (T,)."""
    return torch.cat([tensor[..., start:stop] for start, stop in slices.pieces], -1)
