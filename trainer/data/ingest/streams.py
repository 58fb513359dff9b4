"""Opens files as streams of decompressed bytes."""

from __future__ import annotations

import gzip
import io
import zlib
from typing import Any, BinaryIO

from trainer.data.ingest.inputs import InputFile
from trainer.errors import setting_error

BLOCK = 1 << 20
"""Bytes to read at a time."""

READ_ERRORS = (OSError, EOFError, zlib.error)
"""Errors that reading a damaged file raises, compressed or not."""


def open_stream(each: InputFile) -> BinaryIO:
    """Open a file for reading, decompressed.  Opening or reading it may raise one of `READ_ERRORS`."""
    if each.compression == "gz":
        return io.BufferedReader(gzip.open(each.path), BLOCK)
    if each.compression == "zst":
        return io.BufferedReader(_ZstFile(each), BLOCK)
    return open(each.path, "rb")


def seek_to(file: BinaryIO, position: int) -> None:
    """Advance a newly opened file to a position in its decompressed content."""
    if file.seekable():
        file.seek(position)
        return
    while position and (block := file.read(min(BLOCK, position))):
        position -= len(block)


def complete_utf8_length(text: bytes) -> int:
    """Return the number of leading bytes of `text` that form complete UTF-8 characters."""
    for back in range(1, min(4, len(text)) + 1):
        first = text[-back]
        if first < 0x80:
            break
        if first >= 0xC0:
            needed = 2 if first < 0xE0 else 3 if first < 0xF0 else 4
            return len(text) - back if back < needed else len(text)
    return len(text)


class _ZstFile(io.RawIOBase):
    """The decompressed content of a file of Zstandard frames.  Truncation and other damage raise OSError."""

    def __init__(self, each: InputFile) -> None:
        try:
            import zstandard
        except ImportError as error:
            rule = "needs the library `zstandard`"
            raise setting_error(each.key, each.path, rule, fix="pip install 'meshtrainer[data]'") from error
        self._error = zstandard.ZstdError
        self._new: Any = zstandard.ZstdDecompressor().decompressobj
        self._file = open(each.path, "rb")  # noqa: SIM115
        self._frame: Any = self._new()
        self._packed = self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready and self._read_more():
            pass
        found, self._ready = self._ready[: len(buffer)], self._ready[len(buffer) :]
        buffer[: len(found)] = found
        return len(found)

    def _read_more(self) -> bool:
        """Decompress the next block; returns False at the end of the file."""
        if self._frame.eof:
            self._packed, self._frame = self._frame.unused_data, self._new()
        packed = self._packed or self._file.read(1 << 17)
        if not packed:
            if self._has_begun:
                raise OSError("the compressed data is truncated")
            return False
        self._packed, self._has_begun = b"", True
        try:
            self._ready = self._frame.decompress(packed)
        except self._error as error:
            raise OSError(str(error)) from error
        self._has_begun = not self._frame.eof
        return True

    _has_begun = False
    """True inside a frame."""

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()
