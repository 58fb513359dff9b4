"""Layout of a checkpoint: which bytes of which file hold each chunk of each tensor, and which rank writes the chunk.

The layout is stored as compact JSON.  On request, it is also stored as the `.metadata` of torch.distributed.checkpoint
(DCP), for torch's own reader (see `torch_metadata`).

Chunk offsets and sizes are kept in integer columns, with one row per chunk, instead of one object per chunk.  A 70B
model and its optimizer moments have 1.1 million chunks on 512 ranks.  As objects, these take a gigabyte of memory and
ten seconds to build; as columns, tens of megabytes and well under a second.  A column is stored as a few runs
(arithmetic progressions), since equal shards have equal sizes, evenly spaced offsets and the same position in each
rank's file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from trainer.checkpoint.storage import Damaged
from trainer.model.parameters import local

# ---------------------------------------------------------------------------------------------------------------
# Columns of integers

IntArray = np.ndarray[Any, Any]
"""An int64 array of shape (rows, columns), or (rows,) for a single column."""
Runs = Sequence[int]
"""A column as arithmetic progressions: the first value, step and length of each progression, in one flat list."""
Ints = tuple[int, ...]


def to_runs(column: IntArray) -> list[int]:
    """Compress a column into runs; `from_runs` is the inverse."""
    steps = np.diff(column)
    changes = [*(np.flatnonzero(np.diff(steps)) + 1).tolist(), len(steps)]  # where the step changes
    runs: list[int] = []
    start = change = 0
    while start < len(column):
        while change < len(changes) - 1 and changes[change] <= start:
            change += 1
        stop = min(len(column), max(start, changes[change]) + 1)
        runs += (int(column[start]), int(steps[start]) if stop - start > 1 else 0, stop - start)
        start = stop
    return runs


def from_runs(runs: Runs) -> IntArray:
    """Expand runs into the column that `to_runs` compressed."""
    values = [first + step * np.arange(n) for first, step, n in zip(runs[::3], runs[1::3], runs[2::3], strict=True)]
    return np.concatenate(values) if values else np.empty(0, dtype=np.int64)


def value_at(runs: Runs, row: int) -> int:
    """Return the value of a compressed column in one row.  Raises IndexError if there is no such row."""
    for first, step, count in zip(runs[::3], runs[1::3], runs[2::3], strict=True):
        if row < count:
            return first + step * row
        row -= count
    raise IndexError(row)


def padded_rows(tuples: Sequence[Ints], width: int, padding: int) -> IntArray:
    """Return one row per tuple, padded to `width` with the value `padding`."""
    flat = chain.from_iterable((*row, *(padding,) * (width - len(row))) for row in tuples)
    return np.fromiter(flat, dtype=np.int64, count=len(tuples) * width).reshape(len(tuples), width)


@dataclass(frozen=True)
class Boxes:
    """A table of boxes from many tensors, one box per row, in the form in which ranks send their boxes to rank 0.

    All boxes are padded to the largest number of dimensions: a missing dimension has offset 0 and size 1.
    """

    keys: Sequence[str]
    offsets: IntArray
    sizes: IntArray

    @classmethod
    def of(cls, boxes: Iterable[tuple[str, Ints, Ints]]) -> Boxes:
        """Build the table from (key, offsets, sizes) tuples."""
        keys, offsets, sizes = [list(column) for column in zip(*boxes, strict=True)] or ([], [], [])
        width = max(map(len, sizes), default=0)
        return cls(keys, padded_rows(offsets, width, 0), padded_rows(sizes, width, 1))

    @classmethod
    def concatenate(cls, tables: Sequence[Boxes]) -> Boxes:
        """Return one table with the rows of all `tables`."""
        width = max((table.sizes.shape[1] for table in tables), default=0)

        def padded(all_rows: Sequence[IntArray], padding: int) -> IntArray:
            padded_tables = [np.pad(r, ((0, 0), (0, width - r.shape[1])), constant_values=padding) for r in all_rows]
            return np.concatenate(padded_tables) if padded_tables else np.empty((0, width), np.int64)

        keys = [key for table in tables for key in table.keys]
        return cls(keys, padded([table.offsets for table in tables], 0), padded([table.sizes for table in tables], 1))

    def __len__(self) -> int:
        return len(self.keys)

    def of_tensor(self, rows: IntArray, num_dims: int) -> tuple[IntArray, IntArray]:
        """Return offsets and sizes of some rows, all of one tensor, without padding."""
        if not len(rows):  # an empty tensor, which may have more dimensions than the table
            return np.empty((0, num_dims), np.int64), np.empty((0, num_dims), np.int64)
        return self.offsets[rows, :num_dims], self.sizes[rows, :num_dims]

    def tensor_indices(self, keys: Iterable[str]) -> IntArray:
        """Return the index of each box's key in `keys`.  Raises ValueError if a key is not in `keys`."""
        indices = {key: index for index, key in enumerate(keys)}
        try:
            return np.fromiter(map(indices.__getitem__, self.keys), dtype=np.int64, count=len(self.keys))
        except KeyError as error:
            raise ValueError(f"{error.args[0]}: not all ranks hold this tensor") from None


# ---------------------------------------------------------------------------------------------------------------
# Chunks and tensors

Tensors = Mapping[str, torch.Tensor]
"""Tensors by key: DTensors, or plain tensors that are the same on all ranks."""


@dataclass(frozen=True)
class Chunk:
    """A stored box of one tensor, and where its bytes are in a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    """Where the chunk's `torch.save` archive (an item, in DCP's terms) starts in the file."""
    length: int
    """Size of that archive in bytes."""
    data_start: int
    """Where the tensor's raw bytes start in the file."""


class Chunks:
    """The chunks of one tensor, stored as runs.  `Chunk` objects are created on access."""

    def __init__(self, files: Sequence[str], columns: Sequence[Runs]) -> None:
        """columns: file index, offset along each dimension, size along each dimension, start, length, data start."""
        self._files, self.columns = files, columns
        self._num_dims = (len(columns) - 4) // 2

    @classmethod
    def of(cls, files: Sequence[str], table: IntArray) -> Chunks:
        """Build the chunks from a table with one row per chunk."""
        return cls(files, [to_runs(column) for column in table.T])

    def __len__(self) -> int:
        return sum(self.columns[0][2::3])

    def __iter__(self) -> Iterator[Chunk]:
        return self._chunks_of(np.column_stack([from_runs(runs) for runs in self.columns]))

    def overlapping(self, offsets: Ints, sizes: Ints) -> list[Chunk]:
        """Return the chunks that overlap a box."""
        box_runs = tuple(map(tuple, self.columns[1 : 1 + 2 * self._num_dims]))
        rows = _overlapping_rows(box_runs, offsets, sizes) if box_runs else range(len(self))
        return list(
            self._chunks_of(np.array([[value_at(runs, row) for runs in self.columns] for row in rows], dtype=np.int64))
        )

    def _chunks_of(self, rows: IntArray) -> Iterator[Chunk]:
        n = self._num_dims
        for file, *numbers in rows.tolist():
            yield Chunk(tuple(numbers[:n]), tuple(numbers[n : 2 * n]), self._files[file], *numbers[2 * n :])


@lru_cache(maxsize=1024)
def _overlapping_rows(box_runs: tuple[Runs, ...], offsets: Ints, sizes: Ints) -> tuple[int, ...]:
    """Return the rows of the boxes that overlap a given box.

    box_runs: the offsets of all boxes along each dimension, then their sizes along each, as runs.

    Cached: tensors of the same shape, such as a parameter of every layer and its two moments, have the same boxes.
    """
    box_starts, box_sizes = np.split(np.stack([from_runs(runs) for runs in box_runs]), 2)
    start, stop = np.transpose([offsets]), np.transpose([np.add(offsets, sizes)])
    overlaps = np.maximum(box_starts, start) < np.minimum(box_starts + box_sizes, stop)
    return tuple(np.flatnonzero(overlaps.all(axis=0)).tolist())


@dataclass
class StoredTensor:
    """One stored tensor: its dtype, shape and chunks."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: Chunks
    is_object: bool = False
    """True for an object other than a tensor, which torch's own planner stores as bytes, in a single chunk."""

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


Layout = dict[str, StoredTensor]
"""Every stored tensor by key."""


def part_of_layout(layout: Layout, part: str) -> dict[str, StoredTensor]:
    """Return the tensors of one part of the state, by their keys within the part."""
    return {key.removeprefix(f"{part}."): stored for key, stored in layout.items() if key.startswith(f"{part}.")}


@dataclass(frozen=True)
class ReadRequest:
    """One read by a rank: a box within a chunk, and the tensor to read it into."""

    chunk: Chunk
    dtype: torch.dtype
    offsets: tuple[int, ...]
    """Start of the box within the chunk."""
    sizes: tuple[int, ...]
    target: torch.Tensor
    """The destination, of shape `sizes`."""


@dataclass(frozen=True)
class TensorBox:
    """A rectangular region of one tensor, as held or written by one rank."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype


def local_boxes(tensors: Tensors) -> list[TensorBox]:
    """Return this rank's boxes of `tensors`: the local shard of a DTensor, all of a plain tensor.  No collective."""
    # Imported here because it pulls in some 70 modules (2.5 MiB, 0.05 s).
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), is_coordinator=True)
    boxes = []
    for item in planner.create_local_plan().items:
        data = item.tensor_data
        assert data is not None
        boxes.append(
            TensorBox(item.index.fqn, tuple(data.chunk.offsets), tuple(data.chunk.sizes), data.properties.dtype)
        )
    return boxes


def plan_reads(targets: Tensors, layout: Layout) -> list[ReadRequest]:
    """Return the reads that fill this rank's parts of `targets` (DTensors of any mesh, or plain tensors).

    Each target has the shape of its stored tensor.  No collective.  Raises Damaged if the stored chunks do not cover
    a part, which torch.distributed.checkpoint does not check.
    """
    requests = []
    for box in local_boxes(targets):
        stored, target, num_missing = layout[box.key], local(targets[box.key].detach()), np.prod(box.sizes)
        for chunk in stored.chunks.overlapping(box.offsets, box.sizes):
            starts = np.maximum(box.offsets, chunk.offsets)
            sizes = np.minimum(np.add(box.offsets, box.sizes), np.add(chunk.offsets, chunk.sizes)) - starts
            within_chunk, within_target = starts - chunk.offsets, starts - box.offsets
            overlap = tuple(slice(start, start + size) for start, size in zip(within_target, sizes, strict=True))
            requests.append(
                ReadRequest(chunk, stored.dtype, tuple(within_chunk.tolist()), tuple(sizes.tolist()), target[overlap])
            )
            num_missing -= np.prod(sizes)
        if num_missing:
            raise Damaged(f"{box.key}: the chunks in the checkpoint do not cover it")
    return requests


@dataclass(frozen=True)
class PlannedTensor:
    """The planned chunks of one tensor: offsets and sizes, one row per chunk, in ascending order."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: IntArray
    sizes: IntArray
    is_object: bool = False


@dataclass(frozen=True)
class WrittenChunks:
    """The chunks in one rank's data file, as columns."""

    file: str
    boxes: Boxes
    positions: IntArray
    """Start, length and data start of each chunk in the file."""


def layout_of(planned: Mapping[str, PlannedTensor], written: Sequence[WrittenChunks]) -> Layout:
    """Return the layout of all ranks' files.  Raises ValueError unless exactly the planned chunks were written."""
    files = [chunks.file for chunks in written]
    boxes = Boxes.concatenate([chunks.boxes for chunks in written])
    tensor_indices = boxes.tensor_indices(planned)
    file_indices = np.repeat(np.arange(len(written)), [len(chunks.boxes) for chunks in written])
    order = np.lexsort((*reversed(boxes.offsets.T), tensor_indices))
    bounds = np.searchsorted(tensor_indices[order], np.arange(len(planned) + 1)).tolist()
    positions = np.concatenate([chunks.positions for chunks in written]) if written else np.empty((0, 3), np.int64)
    layout: Layout = {}
    for (key, tensor), start, stop in zip(planned.items(), bounds, bounds[1:], strict=False):
        rows, num_dims = order[start:stop], len(tensor.shape)
        offsets, sizes = boxes.of_tensor(rows, num_dims)
        if not (np.array_equal(offsets, tensor.offsets) and np.array_equal(sizes, tensor.sizes)):
            raise ValueError(f"{key}: {len(rows)} chunks were written, which are not the {len(tensor.offsets)} planned")
        table = np.column_stack((file_indices[rows], offsets, sizes, positions[rows]))
        layout[key] = StoredTensor(tensor.dtype, tensor.shape, Chunks.of(files, table), tensor.is_object)
    return layout


_OBJECT = "object"
"""Written in place of the dtype of an object that is not a tensor."""


def layout_to_json(layout: Layout, files: Sequence[str], paths: Mapping[str, Sequence[str | int]]) -> str:
    """Serialize a layout for `layout_from_json`.

    files: in the order of the file indices.
    paths: the path of each key in the nested state dict; torch's own tools need it to rebuild that state dict.
    """
    tensors = {key: [_dtype_name(stored), stored.shape, stored.chunks.columns] for key, stored in layout.items()}
    return json.dumps({"files": files, "tensors": tensors, "paths": paths}, separators=(",", ":"))


def _dtype_name(stored: StoredTensor) -> str:
    return _OBJECT if stored.is_object else str(stored.dtype).removeprefix("torch.")


def layout_from_json(text: bytes | str) -> Layout:
    """Parse a layout that `layout_to_json` has serialized."""
    content = json.loads(text)
    layout: Layout = {}
    for key, (dtype_name, shape, columns) in content["tensors"].items():
        is_object = dtype_name == _OBJECT
        dtype = torch.uint8 if is_object else getattr(torch, dtype_name)
        layout[key] = StoredTensor(dtype, tuple(shape), Chunks(content["files"], columns), is_object)
    return layout


def paths_from_json(text: bytes | str) -> dict[str, tuple[str | int, ...]]:
    """Return the `paths` that `layout_to_json` was given."""
    return {key: tuple(path) for key, path in json.loads(text)["paths"].items()}


# ---------------------------------------------------------------------------------------------------------------
# Which rank writes which box


def boxes_to_write(tensors: Tensors) -> list[TensorBox]:
    """Return the boxes that this rank writes, so that each box is written by exactly one of the ranks that hold it.

    The ranks that hold the same boxes share the work: the largest box comes first, and each goes to the rank that has
    the fewest bytes so far.  Every rank derives this from meshes and placements, without a message.  Plain tensors are
    the same on all ranks, and rank 0 writes them.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    keys_by_holders: dict[tuple[int, ...], list[str]] = {}
    for key, tensor in tensors.items():
        keys_by_holders.setdefault(_holders_of(tensor), []).append(key)
    written_here = set()
    for holders, keys in keys_by_holders.items():
        if rank not in holders:
            continue
        num_bytes = {key: local(tensors[key].detach()).nbytes for key in keys}
        loads = dict.fromkeys(holders, 0)
        for key in sorted(keys, key=lambda key: (-num_bytes[key], key)):
            writer = min(holders, key=loads.__getitem__)
            loads[writer] += num_bytes[key]
            if writer == rank and num_bytes[key]:
                written_here.add(key)
    return local_boxes({key: tensor for key, tensor in tensors.items() if key in written_here})


def _holders_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the ranks that hold the same box of a tensor as this rank, in ascending order; rank 0 for a plain one."""
    if not isinstance(tensor, DTensor):
        return (0,)
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:  # this rank is not in the mesh
        return ()
    same_box = tuple(
        slice(None) if placement.is_replicate() else index
        for index, placement in zip(coordinate, tensor.placements, strict=True)
    )
    return tuple(sorted(tensor.device_mesh.mesh[same_box].flatten().tolist()))


def planned_tensors(boxes_by_rank: Sequence[Boxes], tensors: Tensors) -> dict[str, PlannedTensor]:
    """Return the planned chunks of each tensor.

    boxes_by_rank: the boxes that each rank writes.

    Raises ValueError unless the boxes cover every tensor exactly once.
    """
    boxes = Boxes.concatenate(boxes_by_rank)
    tensor_indices = boxes.tensor_indices(tensors)
    order = np.lexsort((*reversed(boxes.offsets.T), tensor_indices))
    bounds = np.searchsorted(tensor_indices[order], np.arange(len(tensors) + 1)).tolist()
    planned = {}
    for (key, tensor), start, stop in zip(tensors.items(), bounds, bounds[1:], strict=False):
        rows, shape = order[start:stop], tuple(tensor.shape)
        offsets, sizes = boxes.of_tensor(rows, len(shape))
        # DCP checks that the boxes cover the tensor only when saving from several ranks, and never on load.
        num_written, numel = int(sizes.prod(axis=1).sum()), int(np.prod(shape, dtype=np.int64))
        if num_written != numel:
            raise ValueError(f"{key}: the ranks write {num_written} of its {numel} elements")
        if (offsets + sizes > shape).any() or _any_overlap(offsets, sizes):
            raise ValueError(f"{key}: the ranks write parts of it that overlap or lie outside of it")
        planned[key] = PlannedTensor(tensor.dtype, shape, offsets, sizes)
    return planned


def _any_overlap(offsets: IntArray, sizes: IntArray) -> bool:
    """Return whether any two boxes overlap.  offsets: in ascending order."""
    if len(offsets) < 2:
        return False
    if not (offsets[:, 1:] != 0).any():  # sharded along dim 0 only: compare neighbors
        return bool((offsets[1:, 0] < offsets[:-1, 0] + sizes[:-1, 0]).any())
    stops = offsets + sizes
    overlaps = (offsets[:, None] < stops[None]).all(axis=2) & (offsets[None] < stops[:, None]).all(axis=2)
    return bool(np.triu(overlaps, k=1).any())
