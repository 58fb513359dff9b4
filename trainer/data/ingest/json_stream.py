"""Reads the text from a JSON line that is too long to hold in memory, piece by piece."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import BinaryIO

from trainer.data.ingest.streams import BLOCK, complete_utf8_length

MAX_OTHER_BYTES = 1 << 26
"""Maximum bytes of a line besides its text."""

_COMPLETE = re.compile(
    rb'(?:[^"\\]+'
    rb"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|\\u(?![dD][89abAB])[0-9a-fA-F]{4}"
    rb'|\\["\\/bfnrt])*'
)
"""Matches the longest prefix of a string's content that does not end within an escape or a surrogate pair."""

_LONGEST_ESCAPE = 12


class BadLine(Exception):
    """A line whose text cannot be read; the message says why."""


def read_text_value(file: BinaryIO, key: str) -> Iterator[bytes]:
    """Yield, in UTF-8 pieces, the text under `key` of the JSON object in the next line of `file`.

    Raises BadLine or UnicodeDecodeError as soon as an error is found; the caller must then discard the pieces yielded
    before.
    """
    line = _Line(file)
    remainder = bytearray()  # the line, with its text left out
    depth, name, was_found = 0, "", False
    while True:
        between = line.read_until(b'"')
        remainder += between
        depth += sum(map(between.count, (b"{", b"["))) - sum(map(between.count, (b"}", b"]")))
        if not between.endswith(b'"'):
            break
        if depth == 1 and name == key and between[:-1].strip() == b":":
            if was_found:
                raise BadLine(f"has two values for {key}")
            was_found = True
            yield from line.read_string()
            remainder += b'"'
            continue
        content = b"".join(line.read_raw_string())
        remainder += content + b'"'
        name = _decode(content).decode() if len(content) < BLOCK else ""
        if len(remainder) > MAX_OTHER_BYTES:
            raise BadLine(f"holds more than {MAX_OTHER_BYTES >> 20} MB besides its text")
    _check(bytes(remainder), key, was_found)


def _check(remainder: bytes, key: str, was_found: bool) -> None:
    """Raise BadLine unless `remainder`, a line with its text left out, is a JSON object that has the text."""
    try:
        record = json.loads(remainder)
    except (ValueError, RecursionError) as error:
        raise BadLine(f"is not JSON ({error})") from error
    if not isinstance(record, dict):
        raise BadLine(f"must be a JSON object, not {type(record).__name__}")
    if not was_found:
        raise BadLine(f"has no text under {key}; its keys: {', '.join(record) or 'none'}")


class _Line:
    """The bytes of a line, read on demand."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._held, self._is_all = file, b"", False

    def read_until(self, mark: bytes) -> bytes:
        """Return the bytes up to and including `mark`, or to the end of the line if `mark` does not occur."""
        found = bytearray()
        while (place := self._held.find(mark)) < 0:
            found += self._held
            self._held = b""
            if not self._read_more():
                return bytes(found)
            if len(found) > MAX_OTHER_BYTES:
                raise BadLine(f"holds more than {MAX_OTHER_BYTES >> 20} MB besides its text")
        found += self._held[: place + 1]
        self._held = self._held[place + 1 :]
        return bytes(found)

    def read_raw_string(self) -> Iterator[bytes]:
        """Yield the content of a string with its escapes, and consume its closing quote."""
        while True:
            end = _complete_prefix(self._held)
            if end < len(self._held) and self._held[end] == 0x22:
                yield self._held[:end]
                self._held = self._held[end + 1 :]
                return
            end = complete_utf8_length(self._held[:end])
            if end:
                yield self._held[:end]
                self._held = self._held[end:]
            elif len(self._held) >= _LONGEST_ESCAPE:
                raise BadLine("is not valid Unicode or JSON (invalid escape)")
            if not self._read_more():
                raise BadLine("is not JSON (it ends within a string)")

    def read_string(self) -> Iterator[bytes]:
        """Yield the decoded content of a string as UTF-8, and consume its closing quote."""
        return (piece for piece in map(_decode, self.read_raw_string()) if piece)

    def _read_more(self) -> bool:
        if self._is_all:
            return False
        block = self._file.read(BLOCK)
        end = block.find(b"\n")
        self._is_all = end >= 0 or not block
        self._held += block if end < 0 else block[:end]
        return True


def _complete_prefix(content: bytes) -> int:
    found = _COMPLETE.match(content)
    return found.end() if found else 0


def _decode(content: bytes) -> bytes:
    """Decode the escapes of a JSON string's content; returns UTF-8."""
    try:
        return str(json.loads(f'"{content.decode()}"')).encode()
    except UnicodeDecodeError:
        raise
    except UnicodeEncodeError as error:
        raise BadLine(f"is not valid Unicode ({error.reason})") from error
    except ValueError as error:
        raise BadLine(f"is not JSON ({error})") from error
