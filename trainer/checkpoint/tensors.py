"""Writes sharded tensors to files and reads them back, on any mesh.

The files have the format of DCP's (torch.distributed.checkpoint's) `FileSystemWriter`, so that its `FileSystemReader`
and other tools can read them.  In addition, checksums are computed during the write, the layout is stored as JSON, and
data is read directly into the target tensors.

The plan of which rank writes what is made once.  It stays valid while the tensors keep their names, shapes and
placements.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from trainer.checkpoint.layout import (
    Box,
    Boxes,
    Chunk,
    Layout,
    PlannedTensor,
    ReadRequest,
    StoredTensor,
    Tensors,
    WriteResult,
    choose_writers,
)
from trainer.checkpoint.storage import BlockReader, Blocks, BlockWriter, Damaged, Storage
from trainer.distributed.channel import Channel
from trainer.errors import print_stderr
from trainer.model.parameters import local


def signature_of(tensors: Tensors) -> tuple[Any, ...]:
    """Return the properties of the tensors that a plan depends on."""
    return tuple(
        (key, t.dtype, tuple(t.shape), (t.placements, tuple(t.device_mesh.shape)) if isinstance(t, DTensor) else None)
        for key, t in tensors.items()
    )


class SavePlans:
    """The chunks that each rank writes, planned once and reused until the tensors change."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._signature: tuple[Any, ...] | None = None
        self.boxes: list[Box] = []
        """The boxes that this rank writes."""
        self.planned: dict[str, PlannedTensor] = {}
        """The planned chunks of every tensor.  On rank 0 only."""

    def is_stale(self, tensors: Tensors) -> bool:
        return signature_of(tensors) != self._signature

    @property
    def num_bytes(self) -> int:
        """Number of tensor bytes that this rank writes."""
        return sum(torch.Size(box.sizes).numel() * box.dtype.itemsize for box in self.boxes)

    def make(self, tensors: Tensors) -> None:
        """Make a new plan.  Raises on all ranks if any rank fails.

        Collectives: two small messages, a gather of all boxes to rank 0 (0.1 MB per rank for a 70B model on 512 ranks),
        and a scatter of the result.
        """

        def find_own() -> list[Box]:
            from trainer.checkpoint.dcp import held_boxes

            # Rank 0 writes what is the same on all ranks.
            return held_boxes({k: t for k, t in tensors.items() if isinstance(t, DTensor) or self._channel.is_main})

        own = self._channel.agreed(find_own)
        held = self._channel.gather_to_main(Boxes.of((box.key, box.offsets, box.sizes) for box in own))
        masks, self.planned = self._channel.agreed(lambda: choose_writers(held, tensors) if held else ([], {}))
        self.boxes = [box for box, writes in zip(own, self._channel.scatter(masks), strict=True) if writes]
        self._signature = signature_of(tensors)


class Staging:
    """Host memory for a copy of the data that this rank writes, reused by every save.

    It is one buffer, page-locked if the device is a GPU, so that copies run at full speed.  The first save pays for
    allocating it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer, self._is_locked = np.empty(0, dtype=np.uint8), False

    def copy(self, tensors: Tensors, boxes: Iterable[Box]) -> dict[str, torch.Tensor]:
        """Return CPU copies of this rank's parts of the tensors in `boxes`.  Earlier copies are overwritten."""
        parts = {box.key: local(tensors[box.key]) for box in boxes}
        with torch.no_grad():
            copies = _views(self._buffer_for(parts), parts)
            for key, part in parts.items():
                copies[key].copy_(part, non_blocking=True)
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
        return copies

    def _buffer_for(self, parts: Tensors) -> np.ndarray[Any, Any]:
        needed = sum(_padded(part) for part in parts.values())
        if needed > self._buffer.nbytes:
            self._unlock()
            self._buffer = np.empty(0, dtype=np.uint8)  # free it before the larger one is allocated
            self._buffer = np.zeros(needed, dtype=np.uint8)
            if self._device.type == "cuda":
                self._is_locked = self._lock()
        return self._buffer

    def _lock(self) -> bool:
        """Page-lock the buffer.  torch's own pinned allocator would round its size up to a power of two."""
        cudart: Any = torch.cuda.cudart()
        try:
            torch.cuda.check_error(cudart.cudaHostRegister(self._buffer.ctypes.data, self._buffer.nbytes, 0))
        except RuntimeError as error:
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=self._device)  # clears CUDA's last error, which the next kernel would report
            print_stderr(
                f"warning: {self._buffer.nbytes / 2**30:.2f} GiB of host memory cannot be page-locked "
                f"({str(error).splitlines()[0]}): training pauses for longer while a save is copied"
            )
            return False
        return True

    def _unlock(self) -> None:
        if self._is_locked:
            self._is_locked = False
            cudart: Any = torch.cuda.cudart()
            torch.cuda.check_error(cudart.cudaHostUnregister(self._buffer.ctypes.data))


def _padded(tensor: torch.Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // 64) * 64


def _views(buffer: np.ndarray[Any, Any], like: Tensors) -> dict[str, torch.Tensor]:
    """Return tensors over parts of `buffer`, each with its own storage, since `torch.save` writes entire storages."""
    views, start = {}, 0
    for key, tensor in like.items():
        size = tensor.numel() * tensor.element_size()
        part = torch.from_numpy(buffer[start : start + size]) if size else torch.empty(0, dtype=torch.uint8)
        views[key] = part.view(tensor.dtype).view(tensor.shape)
        start += _padded(tensor)
    return views


def write_tensors(
    storage: Storage,
    rank: int,
    boxes: Sequence[Box],
    tensors: Tensors,
    limits: Mapping[str, float],
    throttle: Callable[[float], None] | None = None,
) -> WriteResult | None:
    """Write this rank's chunks into one file and flush it to disk; return None if it has no chunks.  No collective.

    `tensors` are staged copies or the live tensors, which are then copied one by one during the write.  `throttle` is
    called after each block with the seconds that the block took.  Raises OSError, and ValueError for a weight that is
    not finite or reaches its magnitude limit.
    """
    if not boxes:
        return None
    name = f"__{rank}_0.distcp"
    writer = BlockWriter(storage.create(name), throttle)
    chunks = []
    scratch = np.empty(0, dtype=np.uint8)
    has_own_checksums = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)  # torch's checksums are redundant: each block has one
    try:
        for box in boxes:
            part = tensors[box.key]
            if isinstance(part, DTensor) or part.untyped_storage().nbytes() != part.nbytes or part.device.type != "cpu":
                part = local(part.detach())
                if scratch.nbytes < part.nbytes:
                    scratch = np.empty(part.nbytes, dtype=np.uint8)
                part = _views(scratch, {box.key: part})[box.key].copy_(part)
            look = _sanity_check(box.key, part.dtype, limits[box.key]) if box.key in limits else None
            chunks.append((box.key, _write_chunk(writer, name, box, part, look)))
    finally:
        torch.serialization.set_crc32_options(has_own_checksums)
        writer.close()
    return WriteResult(name, writer.blocks, chunks)


def _write_chunk(
    writer: BlockWriter,
    name: str,
    box: Box,
    part: torch.Tensor,
    look: Callable[[memoryview], None] | None,
) -> Chunk:
    locator = _DataLocator(writer, part, look)
    start = writer.tell()
    torch.save(part, locator)  # type: ignore[arg-type]  # torch.save only calls write
    if locator.error is not None:
        raise locator.error
    assert locator.data_start is not None or not part.nbytes, "torch.save writes a tensor's bytes in one piece"
    return Chunk(box.offsets, box.sizes, name, start, writer.tell() - start, locator.data_start or start)


class _DataLocator:
    """Forwards the output of `torch.save`, and notes where the tensor's raw bytes begin."""

    def __init__(self, writer: BlockWriter, tensor: torch.Tensor, look: Callable[[memoryview], None] | None) -> None:
        self._writer, self._address, self._bytes = writer, tensor.data_ptr(), tensor.nbytes
        self._look = look
        self.error: ValueError | None = None
        self.data_start: int | None = None

    def write(self, data: Any) -> int:
        if len(data) == self._bytes and np.frombuffer(data, dtype=np.uint8).ctypes.data == self._address:
            self.data_start = self._writer.tell()
            if self._look is not None:
                return self._write_inspected(data, self._look)
        return self._writer.write(data)

    def _write_inspected(self, data: Any, look: Callable[[memoryview], None]) -> int:
        def note(part: memoryview) -> None:
            try:
                look(part)
            except ValueError as error:  # raised here, it would be masked by torch's error about the file
                self.error = error

        before, self._writer.inspect = self._writer.inspect, note
        try:
            return self._writer.write(data)
        finally:
            self._writer.inspect = before

    def flush(self) -> None: ...


_EXPONENTS = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00}
_FLOATS = {torch.float32: np.float32, torch.float64: np.float64}


def _sanity_check(key: str, dtype: torch.dtype, limit: float) -> Callable[[memoryview], None] | None:
    """Return a check of a weight's bytes; None for integers.

    The check raises ValueError if a value is not finite or reaches `limit` in magnitude.  It uses numpy in the writing
    thread, because torch would start OpenMP threads that compete with the training step.
    """

    def look(part: memoryview) -> None:
        largest = _largest(part, dtype)
        if not np.isfinite(largest):
            raise ValueError(f"{key} has non-finite values; such weights are never published")
        if largest >= limit:
            raise ValueError(
                f"{key} holds values of {largest:.1e}, which is implausible; such weights are never published"
            )

    return look if dtype in _FLOATS or dtype in _EXPONENTS else None


def _largest(part: memoryview, dtype: torch.dtype) -> float:
    """Return the largest magnitude, rounded down to a power of two for 16-bit dtypes; NaN or inf if there is one."""
    if dtype in _FLOATS:
        values = np.frombuffer(part, dtype=_FLOATS[dtype])
        return float(np.maximum(values.max(), -values.min()))
    exponent = int((np.frombuffer(part, dtype=np.uint16) & _EXPONENTS[dtype]).max())
    return torch.tensor(exponent, dtype=torch.int16).view(dtype).item()


# ---------------------------------------------------------------------------------------------------------------
# Reading


def read_tensors(
    storage: Storage, layout: Layout, blocks: Mapping[str, Blocks], targets: Tensors, check: bool = True
) -> None:
    """Read this rank's parts of `targets` (DTensors of any mesh, or plain tensors) in place, and verify them.

    No collective.  Raises Damaged or OSError; some targets may then have been overwritten.
    """
    from trainer.checkpoint.dcp import load

    reader = _ChunkReader(storage, blocks, check)
    try:
        load(targets, layout, reader)
    finally:
        reader.close()


class _ChunkReader:
    """Reads parts of chunks from the files of one checkpoint."""

    _NUM_THREADS = 2
    """The threads take the blocks of a file in turn: one waits for the disk while the other computes a checksum.  With
    whole tensors per thread, which defeats the kernel's read-ahead, reading took 1.3 to 3 times as long."""
    _WAITING_BYTES = 64 << 20
    """Limit of the data in flight: reads that have started and are not yet finished."""

    def __init__(self, storage: Storage, blocks: Mapping[str, Blocks], check: bool = True) -> None:
        self._place, self._blocks, self._check = storage, blocks, check
        self._open: dict[str, BlockReader] = {}

    def read_parts(self, parts: Iterable[ReadRequest]) -> None:
        """Fill the targets, in file order."""
        waiting: deque[_Reading] = deque()
        with ThreadPoolExecutor(self._NUM_THREADS) as threads:
            try:
                for part in sorted(parts, key=lambda part: (part.chunk.file, part.chunk.start)):
                    if part.target.numel():
                        waiting.append(self._begin(threads, part))
                    while sum(reading.num_bytes for reading in waiting) > self._WAITING_BYTES:
                        waiting.popleft().finish()
                for reading in waiting:
                    reading.finish()
            except BaseException:
                threads.shutdown(wait=True, cancel_futures=True)
                raise

    def _begin(self, threads: ThreadPoolExecutor, part: ReadRequest) -> _Reading:
        """Start reading a part of a chunk, directly into the target if the target has the same memory layout."""
        chunk, target = part.chunk, part.target
        rows_only = part.sizes[1:] == chunk.sizes[1:]
        row_bytes = int(np.prod(chunk.sizes[1:], dtype=np.int64)) * part.dtype.itemsize
        start = chunk.data_start + (part.offsets[0] * row_bytes if rows_only and part.offsets else 0)
        fits = rows_only and target.device.type == "cpu" and target.dtype == part.dtype and target.is_contiguous()
        buffer = target if fits else torch.empty(part.sizes if rows_only else chunk.sizes, dtype=part.dtype)
        jobs = [threads.submit(read) for read in self._file(chunk.file).parts(_bytes_of(buffer), start)]
        if fits:
            return _Reading(jobs, None, None, buffer.nbytes)
        box = () if rows_only else tuple(slice(o, o + n) for o, n in zip(part.offsets, part.sizes, strict=True))
        return _Reading(jobs, buffer[box], target, buffer.nbytes)

    def _file(self, name: str) -> BlockReader:
        if name not in self._open:
            if name not in self._blocks:
                raise Damaged(f"{self._place}/{name}: is not in the manifest")
            self._open[name] = BlockReader(self._place, name, self._blocks[name], self._check)
        return self._open[name]

    def read_rows(self, chunk: Chunk, start: int, rows: torch.Tensor) -> None:
        """Read rows of one chunk, from row `start` on."""
        position = chunk.data_start + start * (rows.nbytes // len(rows) if rows.ndim else 0)
        self._file(chunk.file).read_into(_bytes_of(rows), position)

    def close(self) -> None:
        for reader in self._open.values():
            reader.close()


@dataclass(frozen=True)
class _Reading:
    """A read in progress of a part of a chunk."""

    jobs: Sequence[Future[None]]
    source: torch.Tensor | None
    """Intermediate buffer, if the data is not read directly into the target."""
    target: torch.Tensor | None
    num_bytes: int

    def finish(self) -> None:
        for job in self.jobs:
            job.result()
        if self.source is not None and self.target is not None:
            self.target.copy_(self.source)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.flatten().view(torch.uint8).numpy())  # type: ignore[arg-type]


def read_rows(
    storage: Storage, stored: StoredTensor, blocks: Mapping[str, Blocks], start: int = 0, stop: int | None = None
) -> torch.Tensor:
    """Return rows [start, stop) along dim 0 of one tensor, all by default, on the CPU.  Raises Damaged or OSError."""
    rows = stored.shape[0] if stored.shape else 1
    stop = rows if stop is None else stop
    out = torch.empty((stop - start, *stored.shape[1:]) if stored.shape else (), dtype=stored.dtype)
    reader = _ChunkReader(storage, blocks)
    try:
        for chunk in stored.chunks.meeting(*_box_of_rows(stored.shape, start, stop)):
            first = chunk.offsets[0] if chunk.offsets else 0
            height = chunk.sizes[0] if chunk.sizes else 1
            low, high = max(start, first), min(stop, first + height)
            whole = torch.empty((high - low, *chunk.sizes[1:]) if stored.shape else (), dtype=stored.dtype)
            reader.read_rows(chunk, low - first, whole)
            offsets, sizes = (low - start, *chunk.offsets[1:]), tuple(whole.shape)
            box = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True)) if stored.shape else ()
            out[box].copy_(whole)
    finally:
        reader.close()
    return out


def _box_of_rows(shape: tuple[int, ...], start: int, stop: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the offsets and sizes of rows [start, stop) of a tensor."""
    return ((start, *(0 for _ in shape[1:])), (stop - start, *shape[1:])) if shape else ((), ())
