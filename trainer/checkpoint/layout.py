"""Layout of a checkpoint: the chunks of every tensor, as a line of JSON each.

DCP's own metadata says the same as a pickle, of which one flipped bit took 20 GB of memory.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from trainer.checkpoint.blocks import Blocks

Tensors = Mapping[str, torch.Tensor]
"""Tensors by key: DTensors, of which each rank holds a shard, or plain ones, the same on all ranks."""


@dataclass(frozen=True)
class Chunk:
    """A box of one tensor, and the bytes of a file that hold it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    """Where the item of DCP begins, a file of `torch.save` within the file."""
    length: int
    data_start: int
    """Where the tensor's own bytes begin."""


@dataclass
class Stored:
    """One tensor as it is stored."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: list[Chunk]

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


Layout = dict[str, Stored]
"""Every stored tensor by key."""


@dataclass(frozen=True)
class Part:
    """One read of a rank: a box of a chunk, by its place in the chunk, and the tensor where it belongs."""

    chunk: Chunk
    dtype: torch.dtype
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    target: torch.Tensor


@dataclass(frozen=True)
class Box:
    """The part of one tensor that one rank writes."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Planned:
    """One tensor before it is written: offsets and sizes of each of its chunks."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: frozenset[tuple[tuple[int, ...], tuple[int, ...]]]


@dataclass
class Written:
    """The result of one rank's writing: its chunks by the tensor's key, and the checksums of its file."""

    file: str
    blocks: Blocks
    chunks: list[tuple[str, Chunk]]

    @property
    def num_bytes(self) -> int:
        return sum(length for length, _ in self.blocks)

    def without_checksums(self) -> Written:
        """Return what rank 0 must know; the checksums stand in a file of their own."""
        return dataclasses.replace(self, blocks=())


def layout_of(planned: Mapping[str, Planned], written: Iterable[Written]) -> Layout:
    """Return the layout of all ranks' files.  Raises ValueError unless every planned chunk has been written."""
    layout: Layout = {key: Stored(tensor.dtype, tensor.shape, []) for key, tensor in planned.items()}
    for part in written:
        for key, chunk in part.chunks:
            layout[key].chunks.append(chunk)
    for key, tensor in planned.items():
        missing = tensor.boxes - {(chunk.offsets, chunk.sizes) for chunk in layout[key].chunks}
        if missing:
            raise ValueError(f"{key}: {len(missing)} of its {len(tensor.boxes)} chunks have not been written")
    return layout


def layout_to_json(layout: Layout) -> str:
    """Return a layout as `layout_from_json` reads it: one short row a tensor."""
    rows = {
        key: [str(t.dtype).removeprefix("torch."), t.shape, [dataclasses.astuple(chunk) for chunk in t.chunks]]
        for key, t in layout.items()
    }
    return json.dumps(rows, separators=(",", ":"))


def layout_from_json(text: bytes | str) -> Layout:
    """Return the layout that `layout_to_json` has written."""
    return {
        key: Stored(
            getattr(torch, dtype),
            tuple(shape),
            [Chunk(tuple(offsets), tuple(sizes), *where) for offsets, sizes, *where in chunks],
        )
        for key, (dtype, shape, chunks) in json.loads(text).items()
    }
