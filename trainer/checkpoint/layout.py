"""Layout of a checkpoint: the chunks of every tensor, as a few runs of JSON each.

DCP's own metadata says the same as a pickle, of which one flipped bit took 20 GB of memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from trainer.checkpoint.blocks import Blocks
from trainer.checkpoint.columns import Boxes, Ints, Rows, Runs, at, from_runs, rows_of, to_runs

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


class Chunks:
    """The chunks of one tensor, as runs.  A chunk becomes an object when it is asked for."""

    def __init__(self, files: Sequence[str], columns: Sequence[Runs]) -> None:
        """columns: number of the file, offset along each dimension, size along each, start, length, start of data."""
        self._files, self.columns = files, columns
        self._num_dims = (len(columns) - 4) // 2

    @classmethod
    def of(cls, files: Sequence[str], table: Rows) -> Chunks:
        """Return those of a table, a row for each chunk."""
        return cls(files, [to_runs(column) for column in table.T])

    def __len__(self) -> int:
        return sum(self.columns[0][2::3])

    def __iter__(self) -> Iterator[Chunk]:
        return self._made(np.column_stack([from_runs(runs) for runs in self.columns]))

    def meeting(self, offsets: Ints, sizes: Ints) -> list[Chunk]:
        """Return those that have an element in common with a box."""
        spans = tuple(map(tuple, self.columns[1 : 1 + 2 * self._num_dims]))
        found = _meeting(spans, offsets, sizes) if spans else range(len(self))
        return list(self._made(np.array([[at(runs, row) for runs in self.columns] for row in found], dtype=np.int64)))

    def _made(self, rows: Rows) -> Iterator[Chunk]:
        n = self._num_dims
        for file, *numbers in rows.tolist():
            yield Chunk(tuple(numbers[:n]), tuple(numbers[n : 2 * n]), self._files[file], *numbers[2 * n :])


@lru_cache(maxsize=1024)
def _meeting(spans: tuple[Runs, ...], offsets: Ints, sizes: Ints) -> tuple[int, ...]:
    """Return the rows of boxes that have an element in common with one; spans: their offsets, then their sizes.

    Remembered: tensors of one shape, of all blocks and both moments, have the same boxes.
    """
    columns = np.stack([from_runs(runs) for runs in spans])
    starts, extents = np.split(columns, 2)
    first, last = np.transpose([offsets]), np.transpose([np.add(offsets, sizes)])
    meets = np.maximum(starts, first) < np.minimum(starts + extents, last)
    return tuple(np.flatnonzero(meets.all(axis=0)).tolist())


@dataclass
class Stored:
    """One tensor as it is stored."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: Chunks

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
    """One tensor before it is written: offsets and sizes of its chunks, a row each, in ascending order."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: Rows
    sizes: Rows

    def num_missing(self, offsets: Rows, sizes: Rows) -> int:
        """Return how many of the chunks are not among those given."""
        if np.array_equal(offsets, self.offsets) and np.array_equal(sizes, self.sizes):
            return 0
        wanted, found = (
            {tuple(row) for row in np.column_stack(columns).tolist()}
            for columns in ((self.offsets, self.sizes), (offsets, sizes))
        )
        return len(wanted - found)


@dataclass(frozen=True)
class Placed:
    """The chunks in one rank's file, as columns: boxes, and where each lies (start, length, start of data)."""

    file: str
    boxes: Boxes
    places: Rows


@dataclass
class Written:
    """The result of one rank's writing: its chunks by the tensor's key, and the checksums of its file."""

    file: str
    blocks: Blocks
    chunks: list[tuple[str, Chunk]]

    @property
    def num_bytes(self) -> int:
        return sum(length for length, _ in self.blocks)

    @property
    def placed(self) -> Placed:
        """The part that rank 0 must know; the checksums stand in a file of their own."""
        boxes = Boxes.of((key, chunk.offsets, chunk.sizes) for key, chunk in self.chunks)
        places = rows_of([(chunk.start, chunk.length, chunk.data_start) for _, chunk in self.chunks], 3, 0)
        return Placed(self.file, boxes, places)


def layout_of(planned: Mapping[str, Planned], placed: Sequence[Placed]) -> Layout:
    """Return the layout of all ranks' files.  Raises ValueError unless every planned chunk has been written."""
    files = [part.file for part in placed]
    boxes = Boxes.joined([part.boxes for part in placed])
    numbers = boxes.numbers({key: number for number, key in enumerate(planned)})
    of_files = np.repeat(np.arange(len(placed)), [len(part.boxes) for part in placed])
    order = np.lexsort((of_files, numbers))
    bounds = np.searchsorted(numbers[order], np.arange(len(planned) + 1)).tolist()
    places = np.concatenate([part.places for part in placed])
    layout: Layout = {}
    for (key, tensor), start, stop in zip(planned.items(), bounds, bounds[1:], strict=False):
        own, width = order[start:stop], len(tensor.shape)
        offsets, sizes = boxes.offsets[own, :width], boxes.sizes[own, :width]
        if missing := tensor.num_missing(offsets, sizes):
            raise ValueError(f"{key}: {missing} of its {len(tensor.offsets)} chunks have not been written")
        table = np.column_stack((of_files[own], offsets, sizes, places[own]))
        layout[key] = Stored(tensor.dtype, tensor.shape, Chunks.of(files, table))
    return layout


def layout_to_json(layout: Layout, files: Sequence[str]) -> str:
    """Return a layout as `layout_from_json` reads it: one short row a tensor.  files: as its chunks number them."""
    tensors = {key: [str(t.dtype).removeprefix("torch."), t.shape, t.chunks.columns] for key, t in layout.items()}
    return json.dumps({"files": files, "tensors": tensors}, separators=(",", ":"))


def layout_from_json(text: bytes | str) -> Layout:
    """Return the layout that `layout_to_json` has written, now or before there were runs."""
    content = json.loads(text)
    if not isinstance(content.get("tensors"), dict):
        return _layout_of_rows(content)
    files = content["files"]
    return {
        key: Stored(getattr(torch, dtype), tuple(shape), Chunks(files, columns))
        for key, (dtype, shape, columns) in content["tensors"].items()
    }


def _layout_of_rows(content: Mapping[str, Any]) -> Layout:
    """Return the layout of checkpoint format 2, which has a row for each chunk: offsets, sizes, file, three places."""
    files = list(dict.fromkeys(chunk[2] for *_, chunks in content.values() for chunk in chunks))
    numbers = {file: number for number, file in enumerate(files)}
    layout: Layout = {}
    for key, (dtype, shape, chunks) in content.items():
        rows = [(numbers[file], *offsets, *sizes, *places) for offsets, sizes, file, *places in chunks]
        table = rows_of(rows, 4 + 2 * len(shape), 0)
        layout[key] = Stored(getattr(torch, dtype), tuple(shape), Chunks.of(files, table))
    return layout
