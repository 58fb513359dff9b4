"""Chooses how a parameter is divided among the ranks of the shard axis, and computes where each rank's shard lies.

This is pure arithmetic on shapes; the planner and Muon use it too.  `trainer.model.shard` passes the choice on to FSDP,
which makes the shards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from trainer.config.parallel import MAX_COPIES
from trainer.config.schema import RunConfig

Box = tuple[tuple[int, int], ...]
"""A part of a tensor: [start, stop) along each dimension."""

_MAX_PADDING = 1 / 8
"""Dimension 0 is divided if padding adds at most this fraction to it, since dividing another dimension costs a copy."""


@dataclass(frozen=True)
class Division:
    """How a tensor is divided among `copies` x `parts` x `group` ranks of the shard axis.

    Dimension `group_dim` is divided among the ranks of an expert- or tensor-parallel group: `group` consecutive ranks.
    Then dimension `dim` of each piece is divided among `parts` consecutive groups.  If `copies` is above 1, the tensor
    is a stack (N, rows, columns) of fewer matrices than there are ranks, and every `parts` consecutive ranks hold all
    of it.
    """

    dim: int = 0
    parts: int = 1
    group: int = 1
    group_dim: int = 0
    copies: int = 1

    def box(self, shape: Sequence[int], rank: int) -> Box:
        """Return the part that rank `rank` of the shard axis holds.  Dimensions are divided as in `torch.chunk`."""
        group, rank_in_group = divmod(rank, self.group)
        box = [(0, size) for size in shape] or [(0, 1)]
        box[self.group_dim] = chunk_of(box[self.group_dim], rank_in_group, self.group)
        box[self.dim] = chunk_of(box[self.dim], group % self.parts, self.parts)
        return tuple(box)

    def unsharded_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of what the first rank of a group uses in computations: its part of the tensor."""
        sizes = list(shape) or [1]
        sizes[self.group_dim] = -(-sizes[self.group_dim] // self.group)
        return tuple(sizes)

    def gathered_numel(self, shape: Sequence[int]) -> int:
        """Return the number of elements that this rank gathers, including padding to shards of equal size."""
        sizes = list(self.unsharded_shape(shape))
        sizes[self.dim] = -(-sizes[self.dim] // self.parts) * self.parts
        return math.prod(sizes)


def chunk_of(span: tuple[int, int], index: int, num_chunks: int) -> tuple[int, int]:
    """Split the range [start, stop) into `num_chunks` as `torch.chunk` does, and return chunk `index`."""
    start, stop = span
    size = -(-(stop - start) // num_chunks)
    return min(stop, start + index * size), min(stop, start + (index + 1) * size)


def choose_dim(shape: Sequence[int], parts: int, num_dims: int, max_padding: float = _MAX_PADDING) -> int:
    """Return the dimension of a tensor to divide into `parts`: one of the first `num_dims`.

    This is dimension 0, whose shards FSDP pads to equal sizes, if padding adds at most `max_padding` of its size.
    Otherwise, for example with more parts than rows, it is the first later dimension that divides evenly, as FSDP
    requires.  Without such a dimension, dimension 0 is padded.
    """
    if not shape or shape[0] == 0 or -(-shape[0] // parts) * parts <= (1 + max_padding) * shape[0]:
        return 0
    later = range(1, min(num_dims, len(shape)))
    return next((dim for dim in later if shape[dim] and shape[dim] % parts == 0), 0)


def choose_copies(shape: Sequence[int], parts: int, num_dims: int) -> int:
    """Return the number of copies in which `parts` ranks hold a stack (N, rows, columns, ...) of whole matrices.

    The result is 1 unless `parts` is a multiple of N and larger than N, and above 1.  If another dimension divides
    evenly, which costs time instead of memory, there are at most `MAX_COPIES`.
    """
    if len(shape) < 3 or num_dims < 2 or not 1 < shape[0] < parts or parts % shape[0]:
        return 1
    copies = parts // shape[0]
    return copies if copies <= MAX_COPIES or choose_dim(shape, parts, num_dims) == 0 else 1


def divides_evenly(shape: Sequence[int], shard: int, expert: int, num_dims: int) -> bool:
    """Return whether the parts of all ranks have equal sizes, as expert parallelism requires."""
    division = divide(shape, shard, expert, 0, num_dims)
    return math.prod(shape) == division.gathered_numel(shape) * expert


def divide(shape: Sequence[int], shard: int, group: int, group_dim: int, num_dims: int) -> Division:
    """Return the division of a parameter of `shape` among `shard` ranks.

    group: number of consecutive ranks that first divide its dimension `group_dim`; 1 if none do.
    """
    parts = shard // group
    if group == 1:
        copies = choose_copies(shape, parts, num_dims)
        if copies > 1:
            return Division(0, parts // copies, copies=copies)
        return Division(choose_dim(shape, parts, num_dims), parts)
    undivided = Division(parts=parts, group=group, group_dim=group_dim)
    dim = choose_dim(undivided.unsharded_shape(shape), parts, num_dims, max_padding=0)
    return replace(undivided, dim=dim)


def num_dims_to_divide(shape: Sequence[int], config: RunConfig, reshard: bool | int) -> int:
    """Return the number of leading dimensions of a parameter that may be divided.

    With an integer `reshard`, FSDP can only divide the first dimension.  The last dimension is not divided if the
    optimizer keeps state per row or per block of a row.
    """
    if not isinstance(reshard, bool):
        return 1
    optim = config.optim
    needs_rows = optim.state_dtype == "int8" or optim.muon.variant == "normuon"
    return len(shape) - 1 if needs_rows else len(shape)
