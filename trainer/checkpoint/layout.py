"""Layout of a checkpoint: which bytes of which file hold each chunk of each tensor, stored as compact JSON.

DCP's metadata holds the same information as a pickle, where a single flipped bit once caused an allocation of 20 GB.
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
from trainer.checkpoint.chunk_table import Boxes, Ints, Rows, Runs, at, from_runs, rows_of, to_runs

Tensors = Mapping[str, torch.Tensor]
"""Tensors by key: DTensors, of which each rank holds a shard, or plain tensors that are the same on all ranks."""


@dataclass(frozen=True)
class Chunk:
    """A box of one tensor, and the position of its bytes in a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    """Start of DCP's item, which is a `torch.save` archive inside the file."""
    length: int
    data_start: int
    """Start of the tensor's raw bytes."""


class Chunks:
    """The chunks of one tensor, stored as runs.  `Chunk` objects are created on access."""

    def __init__(self, files: Sequence[str], columns: Sequence[Runs]) -> None:
        """columns: file number, offset along each dimension, size along each dimension, start, length, data start."""
        self._files, self.columns = files, columns
        self._num_dims = (len(columns) - 4) // 2

    @classmethod
    def of(cls, files: Sequence[str], table: Rows) -> Chunks:
        """Build the chunks from a table with one row per chunk."""
        return cls(files, [to_runs(column) for column in table.T])

    def __len__(self) -> int:
        return sum(self.columns[0][2::3])

    def __iter__(self) -> Iterator[Chunk]:
        return self._made(np.column_stack([from_runs(runs) for runs in self.columns]))

    def meeting(self, offsets: Ints, sizes: Ints) -> list[Chunk]:
        """Return the chunks that overlap a box."""
        spans = tuple(map(tuple, self.columns[1 : 1 + 2 * self._num_dims]))
        found = _meeting(spans, offsets, sizes) if spans else range(len(self))
        return list(self._made(np.array([[at(runs, row) for runs in self.columns] for row in found], dtype=np.int64)))

    def _made(self, rows: Rows) -> Iterator[Chunk]:
        n = self._num_dims
        for file, *numbers in rows.tolist():
            yield Chunk(tuple(numbers[:n]), tuple(numbers[n : 2 * n]), self._files[file], *numbers[2 * n :])


@lru_cache(maxsize=1024)
def _meeting(spans: tuple[Runs, ...], offsets: Ints, sizes: Ints) -> tuple[int, ...]:
    """Return the rows of the boxes that overlap a given box.  spans: offsets of the boxes, then their sizes.

    Cached: tensors of the same shape, such as a parameter of every layer and its two moments, have the same boxes.
    """
    columns = np.stack([from_runs(runs) for runs in spans])
    starts, extents = np.split(columns, 2)
    first, last = np.transpose([offsets]), np.transpose([np.add(offsets, sizes)])
    meets = np.maximum(starts, first) < np.minimum(starts + extents, last)
    return tuple(np.flatnonzero(meets.all(axis=0)).tolist())


@dataclass
class StoredTensor:
    """One stored tensor: its dtype, shape and chunks."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: Chunks

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


Layout = dict[str, StoredTensor]
"""Every stored tensor by key."""


@dataclass(frozen=True)
class ReadRequest:
    """One read of a rank: a box within a chunk, and the tensor to read it into."""

    chunk: Chunk
    dtype: torch.dtype
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    target: torch.Tensor


@dataclass(frozen=True)
class Box:
    """A contiguous part of one tensor, as one rank holds or writes it."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class PlannedTensor:
    """The planned chunks of one tensor: offsets and sizes, one row per chunk, in ascending order."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: Rows
    sizes: Rows

    def num_missing(self, offsets: Rows, sizes: Rows) -> int:
        """Return how many planned chunks are missing from the given ones."""
        if np.array_equal(offsets, self.offsets) and np.array_equal(sizes, self.sizes):
            return 0
        wanted, found = (
            {tuple(row) for row in np.column_stack(columns).tolist()}
            for columns in ((self.offsets, self.sizes), (offsets, sizes))
        )
        return len(wanted - found)


@dataclass(frozen=True)
class WrittenChunks:
    """The chunks in one rank's file, as columns: boxes, and the position of each (start, length, data start)."""

    file: str
    boxes: Boxes
    places: Rows


@dataclass
class WriteResult:
    """What one rank wrote: its chunks, with the key of each tensor, and the checksums of its file."""

    file: str
    blocks: Blocks
    chunks: list[tuple[str, Chunk]]

    @property
    def num_bytes(self) -> int:
        return sum(length for length, _ in self.blocks)

    @property
    def placed(self) -> WrittenChunks:
        """The part that rank 0 needs for the layout.  The checksums are stored in a separate file."""
        boxes = Boxes.of((key, chunk.offsets, chunk.sizes) for key, chunk in self.chunks)
        places = rows_of([(chunk.start, chunk.length, chunk.data_start) for _, chunk in self.chunks], 3, 0)
        return WrittenChunks(self.file, boxes, places)


def layout_of(planned: Mapping[str, PlannedTensor], placed: Sequence[WrittenChunks]) -> Layout:
    """Return the layout of all ranks' files.  Raises ValueError if a planned chunk was not written."""
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
        layout[key] = StoredTensor(tensor.dtype, tensor.shape, Chunks.of(files, table))
    return layout


def layout_to_json(layout: Layout, files: Sequence[str]) -> str:
    """Serialize a layout for `layout_from_json`, one short row per tensor.  files: in the order of the file numbers."""
    tensors = {key: [str(t.dtype).removeprefix("torch."), t.shape, t.chunks.columns] for key, t in layout.items()}
    return json.dumps({"files": files, "tensors": tensors}, separators=(",", ":"))


def layout_from_json(text: bytes | str) -> Layout:
    """Parse a layout written by `layout_to_json`, in the current format or in format 2."""
    content = json.loads(text)
    if not isinstance(content.get("tensors"), dict):
        return _layout_of_rows(content)
    files = content["files"]
    return {
        key: StoredTensor(getattr(torch, dtype), tuple(shape), Chunks(files, columns))
        for key, (dtype, shape, columns) in content["tensors"].items()
    }


def _layout_of_rows(content: Mapping[str, Any]) -> Layout:
    """Parse the layout of checkpoint format 2, with one row per chunk: offsets, sizes, file and three positions."""
    files = list(dict.fromkeys(chunk[2] for *_, chunks in content.values() for chunk in chunks))
    numbers = {file: number for number, file in enumerate(files)}
    layout: Layout = {}
    for key, (dtype, shape, chunks) in content.items():
        rows = [(numbers[file], *offsets, *sizes, *places) for offsets, sizes, file, *places in chunks]
        table = rows_of(rows, 4 + 2 * len(shape), 0)
        layout[key] = StoredTensor(getattr(torch, dtype), tuple(shape), Chunks.of(files, table))
    return layout
