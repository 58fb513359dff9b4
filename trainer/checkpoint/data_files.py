"""Writes and reads data files: one per rank, with the bytes of its chunks.

A data file has the format of torch.distributed.checkpoint's `FileSystemWriter`, so that torch's `FileSystemReader` can
read it: each chunk is an archive of `torch.save`.  In addition, checksums are computed during the write, the positions
of the raw bytes are noted, and data is read from there directly into the target tensors.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trainer.checkpoint.layout import Boxes, Chunk, ReadRequest, StoredTensor, TensorBox, Tensors, WrittenChunks
from trainer.checkpoint.messages import CheckpointError
from trainer.checkpoint.storage import BlockReader, Blocks, BlockWriter, Damaged, Storage
from trainer.model.parameters import local

# ---------------------------------------------------------------------------------------------------------------
# Writing


@dataclass
class WrittenFile:
    """A data file that has been written: its checksums, and its chunks with their keys, in the order of the file."""

    name: str
    blocks: Blocks
    chunks: list[tuple[str, Chunk]]

    @property
    def num_bytes(self) -> int:
        return sum(length for length, _ in self.blocks)

    @property
    def columns(self) -> WrittenChunks:
        """The columns that rank 0 needs for the layout.  The checksums are stored in a separate file."""
        boxes = Boxes.of((key, chunk.offsets, chunk.sizes) for key, chunk in self.chunks)
        positions = np.array([(c.start, c.length, c.data_start) for _, c in self.chunks], dtype=np.int64).reshape(-1, 3)
        return WrittenChunks(self.name, boxes, positions)


def write_data_file(
    storage: Storage,
    name: str,
    parts: Iterable[tuple[TensorBox, torch.Tensor | memoryview]],
    limits: Mapping[str, float],
    throttle: Callable[[float], None] | None = None,
) -> WrittenFile:
    """Write the data file `name` and flush it to disk.  No collective.

    parts: each box, and the tensor with its data, which may be a DTensor or on a GPU; or the bytes of an object.
    limits: the magnitude limit of each weight, by key.
    throttle: called after each large block with the seconds that it took.

    Raises OSError, and ValueError for a weight that is not finite or reaches its limit.
    """
    writer = BlockWriter(storage.create(name), throttle)
    chunks = []
    scratch = np.empty(0, dtype=np.uint8)
    torch_computes_crc32 = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)  # torch's checksums are redundant: each block has one
    try:
        for box, data in parts:
            if isinstance(data, memoryview):
                start = writer.tell()
                writer.write(data)
                chunks.append((box.key, Chunk(box.offsets, box.sizes, name, start, len(data), start)))
                continue
            if data.layout != torch.strided:
                raise ValueError(f"{box.key} is a tensor of layout {data.layout}, which is not stored; make it dense")
            data = local(data.detach()).resolve_conj().resolve_neg()
            is_plain = data.device.type == "cpu" and data.is_contiguous()
            if not is_plain or data.untyped_storage().nbytes() != data.nbytes:  # torch.save writes entire storages
                if scratch.nbytes < data.nbytes:
                    scratch = np.empty(data.nbytes, dtype=np.uint8)
                data = views_of(scratch, {box.key: data})[box.key].copy_(data)
            check = _sanity_check(box.key, data.dtype, limits[box.key]) if box.key in limits else None
            chunks.append((box.key, _write_chunk(writer, name, box, data, check)))
    finally:
        torch.serialization.set_crc32_options(torch_computes_crc32)
        writer.close()
    return WrittenFile(name, writer.blocks, chunks)


def check_is_plain(name: str, pickled: io.BytesIO) -> None:
    """Raise CheckpointError unless `torch.load` can load an object without running code.  Rewinds the file."""
    pickled.seek(0)
    try:
        torch.load(pickled, weights_only=True)
    except Exception:  # torch raises several kinds
        raise CheckpointError(
            f"{name} is an object that only a pickle can hold, and pickles could run any code: store a tensor, number, "
            "text, or a list or dictionary of these instead, or leave it out of the state dict"
        ) from None
    pickled.seek(0)


def padded_bytes(tensor: torch.Tensor) -> int:
    """Return how many bytes of the buffer `views_of` uses for a tensor."""
    return -(-tensor.numel() * tensor.element_size() // 64) * 64


def views_of(buffer: np.ndarray[Any, Any], tensors: Tensors) -> dict[str, torch.Tensor]:
    """Return views of `buffer` with the dtypes and shapes of `tensors`.

    Each has its own storage, since `torch.save` writes entire storages.
    """
    views, start = {}, 0
    for key, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        content = torch.from_numpy(buffer[start : start + size]) if size else torch.empty(0, dtype=torch.uint8)
        views[key] = content.view(tensor.dtype).view(tensor.shape)
        start += padded_bytes(tensor)
    return views


def _write_chunk(
    writer: BlockWriter,
    name: str,
    box: TensorBox,
    tensor: torch.Tensor,
    check: Callable[[memoryview], None] | None,
) -> Chunk:
    locator = _DataLocator(writer, tensor, check)
    start = writer.tell()
    torch.save(tensor, locator)  # type: ignore[arg-type]  # torch.save only calls write
    if locator.error is not None:
        raise locator.error
    assert locator.data_start is not None or not tensor.nbytes, "torch.save writes a tensor's bytes in one piece"
    return Chunk(box.offsets, box.sizes, name, start, writer.tell() - start, locator.data_start or start)


class _DataLocator:
    """Forwards the output of `torch.save`, notes where the tensor's raw bytes start, and checks them."""

    def __init__(self, writer: BlockWriter, tensor: torch.Tensor, check: Callable[[memoryview], None] | None) -> None:
        self._writer = writer
        self._address = tensor.data_ptr()
        self._num_bytes = tensor.nbytes
        self._check = check
        self.error: ValueError | None = None
        """The error that the check raised."""
        self.data_start: int | None = None

    def write(self, data: Any) -> int:
        if len(data) == self._num_bytes and np.frombuffer(data, dtype=np.uint8).ctypes.data == self._address:
            self.data_start = self._writer.tell()
            if self._check is not None:
                return self._write_checked(data, self._check)
        return self._writer.write(data)

    def _write_checked(self, data: Any, check: Callable[[memoryview], None]) -> int:
        def inspect(content: memoryview) -> None:
            try:
                check(content)
            except ValueError as error:  # raised here, it would be masked by torch's error about the file
                self.error = error

        previous, self._writer.inspect = self._writer.inspect, inspect
        try:
            return self._writer.write(data)
        finally:
            self._writer.inspect = previous

    def flush(self) -> None: ...


_EXPONENTS = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00}
"""Masks of the exponent bits."""
_FLOATS = {torch.float32: np.float32, torch.float64: np.float64}


def _sanity_check(key: str, dtype: torch.dtype, limit: float) -> Callable[[memoryview], None] | None:
    """Return a function that checks a weight's bytes; None for integers.

    The check raises ValueError if a value is not finite or reaches `limit` in magnitude.  It uses numpy in the writing
    thread, because torch would start OpenMP threads that compete with the training step.
    """

    def check(content: memoryview) -> None:
        if dtype in _FLOATS:
            values = np.frombuffer(content, dtype=_FLOATS[dtype])
            largest = float(np.maximum(values.max(), -values.min()))
        else:  # numpy has no bfloat16: the exponent alone rounds down to a power of two, and turns NaN into inf
            exponent = int((np.frombuffer(content, dtype=np.uint16) & _EXPONENTS[dtype]).max())
            largest = torch.tensor(exponent, dtype=torch.int16).view(dtype).item()
        if not np.isfinite(largest):
            raise ValueError(f"{key} has non-finite values; such weights are never published")
        if largest >= limit:
            raise ValueError(
                f"{key} holds values of {largest:.1e}, which is implausible; such weights are never published"
            )

    return check if dtype in _FLOATS or dtype in _EXPONENTS else None


# ---------------------------------------------------------------------------------------------------------------
# Reading


class ChunkReader:
    """Reads chunks, or boxes within chunks, from the data files of one checkpoint."""

    _NUM_THREADS = 2
    """The threads take turns on the blocks of a file: one waits for the disk while the other computes a checksum.  With
    one tensor per thread, which defeats the kernel's read-ahead, reading took 1.3 to 3 times as long."""
    _BYTES_IN_FLIGHT = 64 << 20
    """Limit on the bytes of reads that have started but not finished."""

    def __init__(self, storage: Storage, blocks: Mapping[str, Blocks], check: bool = True) -> None:
        self._storage = storage
        self._blocks = blocks
        self._check = check
        self._open_files: dict[str, BlockReader] = {}

    def read_all(self, requests: Iterable[ReadRequest]) -> None:
        """Fill the target of each request, in the order in which the chunks lie in the files."""
        in_flight: deque[_PendingRead] = deque()
        with ThreadPoolExecutor(self._NUM_THREADS) as threads:
            try:
                for request in sorted(requests, key=lambda request: (request.chunk.file, request.chunk.start)):
                    if request.target.numel():
                        in_flight.append(self._start_read(threads, request))
                    while sum(reading.num_bytes for reading in in_flight) > self._BYTES_IN_FLIGHT:
                        in_flight.popleft().finish()
                for reading in in_flight:
                    reading.finish()
            except BaseException:
                threads.shutdown(wait=True, cancel_futures=True)
                raise

    def _start_read(self, threads: ThreadPoolExecutor, request: ReadRequest) -> _PendingRead:
        """Start reading, directly into the target if the target has the same memory layout."""
        chunk, target = request.chunk, request.target
        offsets, sizes = request.offsets, request.sizes
        reads_full_rows = sizes[1:] == chunk.sizes[1:]
        row_bytes = int(np.prod(chunk.sizes[1:], dtype=np.int64)) * request.dtype.itemsize
        start = chunk.data_start + (offsets[0] * row_bytes if reads_full_rows and offsets else 0)
        is_same_layout = target.device.type == "cpu" and target.dtype == request.dtype and target.is_contiguous()
        is_direct = reads_full_rows and is_same_layout
        buffer = target if is_direct else torch.empty(sizes if reads_full_rows else chunk.sizes, dtype=request.dtype)
        jobs = [threads.submit(read) for read in self._open_file(chunk.file).reads(_bytes_of(buffer), start)]
        if is_direct:
            return _PendingRead(jobs, None, None, buffer.nbytes)
        box = () if reads_full_rows else tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
        return _PendingRead(jobs, buffer[box], target, buffer.nbytes)

    def _open_file(self, name: str) -> BlockReader:
        if name not in self._open_files:
            if name not in self._blocks:
                raise Damaged(f"{self._storage}/{name}: is not in the manifest")
            self._open_files[name] = BlockReader(self._storage, name, self._blocks[name], self._check)
        return self._open_files[name]

    def read_rows(self, chunk: Chunk, start: int, rows: torch.Tensor) -> None:
        """Read rows of one chunk, starting at row `start`."""
        position = chunk.data_start + start * (rows.nbytes // len(rows) if rows.ndim else 0)
        self._open_file(chunk.file).read_into(_bytes_of(rows), position)

    def close(self) -> None:
        for reader in self._open_files.values():
            reader.close()


@dataclass(frozen=True)
class _PendingRead:
    """A read, in progress, of a box within a chunk."""

    jobs: Sequence[Future[None]]
    source: torch.Tensor | None
    """Intermediate buffer, if the data is not read directly into the target."""
    target: torch.Tensor | None
    """Where `finish` copies `source` to; None if the data is read directly into the target."""
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
    num_rows = stored.shape[0] if stored.shape else 1
    stop = num_rows if stop is None else stop
    result = torch.empty((stop - start, *stored.shape[1:]) if stored.shape else (), dtype=stored.dtype)
    reader = ChunkReader(storage, blocks)
    try:
        offsets = (start, *(0 for _ in stored.shape[1:])) if stored.shape else ()
        for chunk in stored.chunks.overlapping(offsets, tuple(result.shape)):
            chunk_start = chunk.offsets[0] if chunk.offsets else 0
            chunk_stop = chunk_start + (chunk.sizes[0] if chunk.sizes else 1)
            low, high = max(start, chunk_start), min(stop, chunk_stop)
            rows = torch.empty((high - low, *chunk.sizes[1:]) if stored.shape else (), dtype=stored.dtype)
            reader.read_rows(chunk, low - chunk_start, rows)
            corner = (low - start, *chunk.offsets[1:])
            box = tuple(slice(o, o + n) for o, n in zip(corner, rows.shape, strict=True)) if stored.shape else ()
            result[box].copy_(rows)
    finally:
        reader.close()
    return result
