"""The slices that models of this process hold of their sequences, if they do not hold all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import torch

from trainer.config import RunConfig, Slices, find_slices
from trainer.distributed.world import World

_current: Slices | None = None
"""Not a context variable: autograd recomputes activations in threads of its own."""


def current_slices() -> Slices | None:
    """Return the slices that models hold of their sequences; None where they hold all of them."""
    return _current


def slice_sequences(config: RunConfig, world: World) -> None:
    """Have the models of this process hold slices of their sequences from now on, as `mesh.context` says.

    Opens the process group of the ranks that share sequences.  Called by all ranks.
    """
    global _current
    _current = find_slices(config, world.rank)
    if _current is not None:
        _current = replace(_current, group=world.open_context(_current.count))


def forget_slices() -> None:
    """Have the models of this process hold whole sequences again."""
    global _current
    _current = None


@contextmanager
def sliced(slices: Slices | None) -> Iterator[None]:
    """Have models inside the block hold these slices of their sequences, or all of them."""
    global _current
    before, _current = _current, slices
    try:
        yield
    finally:
        _current = before


def whole() -> AbstractContextManager[None]:
    """Have models inside the block be called with whole sequences, whatever slices a step is trained in."""
    return sliced(None)


def take(slices: Slices, tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's slice of a tensor (B, T) or (T,)."""
    return torch.cat([tensor[..., start:stop] for start, stop in slices.pieces], -1)
