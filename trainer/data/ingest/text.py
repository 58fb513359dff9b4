"""Reads documents from text files, one per file, and from JSONL files, one per line.

Readers yield lists of UTF-8 documents.  A document too long to hold in memory is yielded as a `LongDocument`, which
re-reads the file whenever its text is needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from typing import Any, BinaryIO, Protocol, TypeAlias

from trainer.data.ingest.fast_json import loads
from trainer.data.ingest.inputs import InputFile
from trainer.data.ingest.json_stream import BadLine, read_text_value
from trainer.data.ingest.report import BadDocuments, chat_advice
from trainer.data.ingest.streams import BLOCK, READ_ERRORS, complete_utf8_length, open_stream, seek_to
from trainer.errors import nearest

MAX_IN_MEMORY_BYTES = 1 << 22
"""Maximum bytes of a line or text file that is held in memory at once."""


class LongDocument(Protocol):
    """A document too long to hold in memory."""

    def pieces(self) -> Iterator[bytes]:
        """Yield the text in pieces of a few kB to a few MB, each of them valid UTF-8.

        Raises BadLine or UnicodeDecodeError if the text is invalid, and one of `READ_ERRORS` if the file cannot be
        read.
        """
        ...

    def reject(self, error: Exception, bad: BadDocuments) -> None:
        """Report that the document cannot be read."""
        ...


DocumentBatch: TypeAlias = "list[bytes] | LongDocument"


def read_texts(inputs: Iterable[InputFile], bad: BadDocuments) -> Iterator[DocumentBatch]:
    """Yield the documents of text files, one per file."""
    found: list[bytes] = []
    held = 0
    for each in inputs:
        try:
            with closing(open_stream(each)) as file:
                content = file.read(MAX_IN_MEMORY_BYTES + 1)
            content.decode()
        except UnicodeDecodeError as error:
            if len(content) <= MAX_IN_MEMORY_BYTES:
                _LongTextFile(each).reject(error, bad)
                continue
        except READ_ERRORS as error:
            _LongTextFile(each).reject(error, bad)
            continue
        if len(content) > MAX_IN_MEMORY_BYTES:
            yield found
            found, held = [], 0
            yield _LongTextFile(each)
            continue
        found.append(content)
        held += len(content)
        if held > BLOCK:
            yield found
            found, held = [], 0
    yield found


@dataclass(frozen=True)
class _LongTextFile:
    """A text file that is too long to hold in memory."""

    input: InputFile

    def pieces(self) -> Iterator[bytes]:
        with closing(open_stream(self.input)) as file:
            pending = b""
            while block := file.read(BLOCK):
                pending += block
                end = complete_utf8_length(pending)
                pending[:end].decode()
                yield pending[:end]
                pending = pending[end:]
            pending.decode()
            if pending:
                yield pending

    def reject(self, error: Exception, bad: BadDocuments) -> None:
        reject_file(self.input, error, bad)


def reject_file(each: InputFile, error: Exception, bad: BadDocuments) -> None:
    """Report that a file cannot be read."""
    if isinstance(error, UnicodeDecodeError):
        bad.reject(bad.keys.inputs, each.path, f"is not UTF-8 ({error.reason})", fix="convert it to UTF-8")
    else:
        why = getattr(error, "strerror", None) or error
        bad.reject_file(each.path, f"cannot be read to its end ({why})")


# ---------------------------------------------------------------------------------------------------------------
# JSONL


def read_lines(
    each: InputFile, start: int, stop: int | None, text_key: str, bad: BadDocuments
) -> Iterator[DocumentBatch]:
    """Yield the documents of the lines that begin at a byte position from `start` (inclusive) to `stop` (exclusive)."""
    try:
        with closing(open_stream(each)) as file:
            for position, lines in _blocks(file, start, stop):
                if lines is None:
                    yield _LongLine(each, position, text_key)
                    continue
                yield _Lines(each, position, lines, text_key, bad).documents()
    except READ_ERRORS as error:
        reject_file(each, error, bad)


def _blocks(file: BinaryIO, start: int, stop: int | None) -> Iterator[tuple[int, bytes | None]]:
    """Yield blocks of complete lines with their byte positions; None in place of a line too long to hold in memory."""
    position, pending = start, b""
    if start:
        seek_to(file, start - 1)
        position, pending = _skip_line(file, start - 1, stop)
    while stop is None or position < stop:
        block = file.read(BLOCK)
        pending += block
        end = (
            pending.find(b"\n", stop - 1 - position) + 1 if stop is not None and stop - position <= len(pending) else 0
        )
        is_last = end > 0
        end = end or pending.rfind(b"\n") + 1 or (0 if block else len(pending))
        if end:
            yield position, pending[:end]
            position, pending = position + end, pending[end:]
        elif len(pending) > MAX_IN_MEMORY_BYTES:
            yield position, None
            position, pending = _skip_line(file, position + len(pending), None)
        if is_last or not block:
            return


def _skip_line(file: BinaryIO, position: int, stop: int | None) -> tuple[int, bytes]:
    """Skip to the next line; returns its position and the part already read, which is empty if the line begins beyond
    `stop`.
    """
    while (stop is None or position < stop) and (block := file.read(BLOCK)):
        end = block.find(b"\n") + 1
        if end:
            return position + end, block[end:]
        position += len(block)
    return position, b""


@dataclass(frozen=True)
class _Lines:
    """A block of complete lines that begins at byte `position` of a file."""

    input: InputFile
    position: int
    content: bytes
    text_key: str
    bad: BadDocuments

    def documents(self) -> list[bytes]:
        """Return the texts of the lines; lines without one are reported as bad."""
        content = self.content.removeprefix(b"\xef\xbb\xbf") if self.position == 0 else self.content
        found, key = [], self.text_key
        for number, line in enumerate(content.split(b"\n")):
            if not line or line.isspace():
                continue
            try:
                found.append(loads(line)[key].encode())
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                text = self._read_slowly(line, number)
                if text is not None:
                    found.append(text)
        return found

    def _read_slowly(self, line: bytes, number: int) -> bytes | None:
        """Return the text of a line that orjson rejects, if Python's parser accepts it; otherwise report the line as
        bad.
        """
        try:
            decoded = line.decode()
        except UnicodeDecodeError as error:
            rule = f"is not UTF-8 ({error.reason}, line {self._first_line + number})"
            self.bad.reject(self.bad.keys.inputs, self.input.path, rule, fix="convert it to UTF-8")
            return None
        try:
            return bytes(json.loads(decoded)[self.text_key].encode())
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            _reject_line(decoded, f"{self.input.path}:{self._first_line + number}", self.text_key, self.bad)
            return None

    @cached_property
    def _first_line(self) -> int:
        """The 1-based number of the first line."""
        return line_number(self.input, self.position)


def line_number(each: InputFile, position: int) -> int:
    """Return the 1-based number of the line that begins at byte `position` of a file's content."""
    number = 1
    with closing(open_stream(each)) as file:
        while position > 0 and (block := file.read(min(BLOCK, position))):
            number += block.count(b"\n")
            position -= len(block)
    return number


def _reject_line(line: str, place: str, text_key: str, bad: BadDocuments) -> None:
    """Report why a line has no text."""
    keys = bad.keys
    try:
        record: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        bad.reject(keys.inputs, place, f"is not JSON ({error})")
        return
    if not isinstance(record, dict):
        bad.reject(keys.inputs, place, f"must be a JSON object, not {type(record).__name__}")
    elif text_key not in record:
        rule = f"{place} has no such key; its keys: {', '.join(record) or 'none'}"
        fix = chat_advice(record, keys)
        legal = None if fix else nearest(text_key, record) or (*record, None)[0]
        bad.reject(keys.text_key, text_key, rule, legal=legal, fix=fix)
    elif record[text_key] is None:
        bad.reject(keys.inputs, place, f"has no text: its {text_key!r} is null")
    elif not isinstance(record[text_key], str):
        strings = [key for key, value in record.items() if isinstance(value, str)]
        rule = f"at {place} it is not text but {type(record[text_key]).__name__}"
        fix = chat_advice(record, keys)
        bad.reject(keys.text_key, text_key, rule, legal=None if fix else next(iter(strings), None), fix=fix)
    else:
        bad.reject(keys.inputs, place, "is not valid Unicode (surrogates not allowed)")


@dataclass(frozen=True)
class _LongLine:
    """A line of a JSONL file that begins at byte `position`."""

    input: InputFile
    position: int
    text_key: str

    def pieces(self) -> Iterator[bytes]:
        with closing(open_stream(self.input)) as file:
            seek_to(file, self.position)
            yield from read_text_value(file, self.text_key)

    def reject(self, error: Exception, bad: BadDocuments) -> None:
        if isinstance(error, READ_ERRORS):
            reject_file(self.input, error, bad)
            return
        place = f"{self.input.path}:{line_number(self.input, self.position)}"
        bad.reject(bad.keys.inputs, place, str(error) if isinstance(error, BadLine) else f"is not UTF-8 ({error})")
