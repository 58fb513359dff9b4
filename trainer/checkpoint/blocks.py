"""Files with a checksum per block, computed during the write, so that any part can be read and verified.

Without checksums, 169 of 200 random bit flips in a torch.distributed.checkpoint data file load silently as wrong
values.  Here a file is a sequence of blocks of at most `BLOCK_BYTES`, each with its CRC-32, and a reader verifies every
block that it touches.  CRC-32 detects every single-bit error and every burst of up to 32 bits.  It protects against
accidental corruption, not against tampering.
"""

from __future__ import annotations

import bisect
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

from trainer.checkpoint.storage import ReadableFile, Storage, WritableFile
from trainer.files import crc32

BLOCK_BYTES = 4 << 20
_WRITE_BYTES, _READ_BYTES = 128 << 10, 512 << 10
"""Bytes processed at a time: data that fits in a core's cache is read from memory once, although it is inspected,
checksummed and copied.  Writing 1.2 GB took 0.9 s this way and 3.8 s in pieces of 4 MiB; reading took 0.33 s and
0.48 s."""

Blocks = Sequence[Sequence[int]]
"""(length, CRC-32) of each block of a file, in order."""


class Damaged(Exception):
    """Raised if stored bytes differ from the bytes that were written.  The message names the file."""


class BlockWriter:
    """Writes a file sequentially and computes its block checksums.

    A large write (the bytes of a tensor) starts a new block, so that tensors are aligned with blocks.  Small writes in
    between are collected into one block.  `throttle` is called after each large block with the seconds that it took, so
    that a background writer can pause.
    """

    LARGE = 4096
    """Writes of at least this many bytes start their own block; collected blocks stay smaller."""

    def __init__(self, file: WritableFile, throttle: Callable[[float], None] | None = None) -> None:
        self._file, self._throttle = file, throttle
        self.blocks: list[tuple[int, int]] = []
        self._position = 0
        self._small_bytes, self._small_crc = 0, 0
        self.inspect: Callable[[memoryview], None] = _not_at_all
        """Called with all data before it is written.  `write` raises whatever this raises."""

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if len(view) < self.LARGE:
            self.inspect(view)
            if self._small_bytes + len(view) >= self.LARGE:
                self._end_small()
            self._small_crc = crc32(view, self._small_crc)
            self._small_bytes += len(view)
            self._file.write(view)
        else:
            self._end_small()
            for start in range(0, len(view), BLOCK_BYTES):
                self._write_block(view[start : start + BLOCK_BYTES])
        self._position += len(view)
        return len(view)

    def _write_block(self, block: memoryview) -> None:
        crc, started = 0, time.perf_counter()
        for start in range(0, len(block), _WRITE_BYTES):
            part = block[start : start + _WRITE_BYTES]
            self.inspect(part)
            crc = crc32(part, crc)
            self._file.write(part)
        self.blocks.append((len(block), crc))
        if self._throttle is not None:
            self._throttle(time.perf_counter() - started)

    def tell(self) -> int:
        return self._position

    def flush(self) -> None:
        """Do nothing: no data is buffered."""

    def close(self) -> None:
        self._end_small()
        self._file.close()

    def _end_small(self) -> None:
        if self._small_bytes:
            self.blocks.append((self._small_bytes, self._small_crc))
            self._small_bytes, self._small_crc = 0, 0


def _not_at_all(part: memoryview) -> None:
    """Inspect nothing."""


def checksum_of(blocks: Blocks) -> int:
    """Return the CRC-32 of a list of blocks."""
    return crc32(repr([tuple(block) for block in blocks]).encode())


class BlockReader:
    """Reads parts of a file and verifies every block that it touches, unless `checksums` is False."""

    def __init__(self, storage: Storage, name: str, blocks: Blocks, checksums: bool = True) -> None:
        self.name, self._checksums = f"{storage}/{name}", checksums
        self._blocks = blocks
        self._starts = [0, *accumulate(length for length, _ in blocks)]
        self._source: ReadableFile = storage.open(name)
        self._scratch = threading.local()

    def close(self) -> None:
        self._source.close()

    def read_into(self, buffer: memoryview, start: int) -> None:
        """Fill `buffer` with the bytes from position `start` on.  Raises Damaged or OSError."""
        for read_part in self.parts(buffer, start):
            read_part()

    def parts(self, buffer: memoryview, start: int) -> Iterator[Callable[[], None]]:
        """Yield callables that fill `buffer` from `start` on, one block each, in order.  Any thread may call them."""
        number, done = bisect.bisect_right(self._starts, start) - 1, 0
        while done < len(buffer):
            length = self._blocks[number][0]
            skipped = start + done - self._starts[number]
            wanted = min(length - skipped, len(buffer) - done)
            yield partial(self._read_part, number, skipped, buffer[done : done + wanted])
            done += wanted
            number += 1

    def check(self, small_only: bool = False) -> None:
        """Read and verify all blocks; with `small_only`, only those that hold no tensor data."""
        for number, (length, _) in enumerate(self._blocks):
            if not (small_only and length >= BlockWriter.LARGE):
                self._read_block(number, self._own_scratch()[:length])

    def _read_part(self, number: int, skipped: int, part: memoryview) -> None:
        length = self._blocks[number][0]
        if not self._checksums:
            self._source.read_into(part, self._starts[number] + skipped)
        elif len(part) == length:
            self._read_block(number, part)
        else:
            block = self._own_scratch()[:length]
            self._read_block(number, block)
            part[:] = block[skipped : skipped + len(part)]

    def _read_block(self, number: int, buffer: memoryview) -> None:
        crc = 0
        for start in range(0, len(buffer), _READ_BYTES):
            part = buffer[start : start + _READ_BYTES]
            self._source.read_into(part, self._starts[number] + start)
            crc = crc32(part, crc)
        if crc != self._blocks[number][1]:
            first, last = self._starts[number], self._starts[number + 1] - 1
            raise Damaged(f"{self.name}: the checksum of bytes {first} to {last} differs")

    def _own_scratch(self) -> memoryview:
        """Return this thread's scratch buffer for one block."""
        if not hasattr(self._scratch, "memory"):
            self._scratch.memory = memoryview(bytearray(max((length for length, _ in self._blocks), default=0)))
        memory: memoryview = self._scratch.memory
        return memory
