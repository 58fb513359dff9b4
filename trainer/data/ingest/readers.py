"""Reads documents from text, JSONL, JSON, CSV, parquet and Arrow files, and tokens from token files.

Document readers yield lists of documents, each as UTF-8 bytes.  A text file or JSONL line too long to hold in memory is
yielded as a `LongDocument`, which reads the file again whenever its text is needed.  Readers of other trainers' token
files yield `TokenChunk`s.
"""

from __future__ import annotations

import importlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from io import TextIOWrapper
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trainer.data.former_records import BadRecord, records_in
from trainer.data.ingest.inputs import (
    BLOCK_BYTES,
    MEGATRON_MAGIC,
    READ_ERRORS,
    BadDocuments,
    InputFile,
    SettingNames,
    chat_advice,
    complete_utf8_length,
    is_megatron,
    open_stream,
    seek_to,
)
from trainer.data.shards import find_dtype
from trainer.data.tokenizer import Tokenizer
from trainer.errors import nearest, setting_error

MAX_IN_MEMORY_BYTES = 1 << 22
"""Maximum bytes of a text file or (approximately) a JSONL line to hold in memory; longer ones are read in pieces."""


class LongDocument(ABC):
    """A document too long to hold in memory."""

    @abstractmethod
    def pieces(self) -> Iterator[bytes]:
        """Yield the text in pieces of at most a few MB, each valid UTF-8.

        Raises BadLine or UnicodeDecodeError if the text is invalid, or one of READ_ERRORS if the file cannot be read.
        """

    @abstractmethod
    def reject(self, error: Exception, bad: BadDocuments) -> None:
        """Report to `bad` that the document cannot be read.

        error: the exception that `pieces` raised.
        """


DocumentBatch: TypeAlias = "list[bytes] | LongDocument"
"""Any number of documents as UTF-8 bytes, or a single document that is too long to hold in memory."""


# ---------------------------------------------------------------------------------------------------------------
# Text files


def read_texts(inputs: Iterable[InputFile], bad: BadDocuments) -> Iterator[DocumentBatch]:
    """Yield the documents of text files, one per file."""
    documents: list[bytes] = []
    num_bytes = 0
    for input_file in inputs:
        try:
            with closing(open_stream(input_file)) as file:
                content = file.read(MAX_IN_MEMORY_BYTES + 1)
            content.decode()
        except UnicodeDecodeError as error:
            if len(content) <= MAX_IN_MEMORY_BYTES:
                reject_file(input_file, error, bad)
                continue
        except READ_ERRORS as error:
            reject_file(input_file, error, bad)
            continue
        if len(content) > MAX_IN_MEMORY_BYTES:
            yield documents
            documents, num_bytes = [], 0
            yield _LongTextFile(input_file)
            continue
        documents.append(content)
        num_bytes += len(content)
        if num_bytes > BLOCK_BYTES:
            yield documents
            documents, num_bytes = [], 0
    yield documents


@dataclass(frozen=True)
class _LongTextFile(LongDocument):
    """A text file that is too long to hold in memory."""

    input: InputFile

    def pieces(self) -> Iterator[bytes]:
        with closing(open_stream(self.input)) as file:
            pending = b""
            while block := file.read(BLOCK_BYTES):
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


def reject_file(input_file: InputFile, error: Exception, bad: BadDocuments) -> None:
    """Report that a file cannot be read."""
    if isinstance(error, UnicodeDecodeError):
        bad.reject(bad.keys.inputs, input_file.path, f"is not UTF-8 ({error.reason})", fix="convert it to UTF-8")
    else:
        reason = getattr(error, "strerror", None) or error
        bad.reject_file(input_file.path, f"cannot be read to its end ({reason})")


# ---------------------------------------------------------------------------------------------------------------
# JSONL


def read_lines(
    input_file: InputFile, start: int, stop: int | None, text_key: str, bad: BadDocuments
) -> Iterator[DocumentBatch]:
    """Yield the documents in the lines that start at byte positions from `start` (inclusive) to `stop` (exclusive)."""
    try:
        with closing(open_stream(input_file)) as file:
            for position, lines in _line_blocks(file, start, stop):
                if lines is None:
                    yield _LongLine(input_file, position, text_key)
                    continue
                yield _Lines(input_file, position, lines, text_key, bad).documents()
    except READ_ERRORS as error:
        reject_file(input_file, error, bad)


def _line_blocks(file: BinaryIO, start: int, stop: int | None) -> Iterator[tuple[int, bytes | None]]:
    """Yield (byte position, block of complete lines); the block is None for a line too long to hold in memory."""
    position, pending = start, b""
    if start:
        seek_to(file, start - 1)
        position, pending = _skip_line(file, start - 1, stop)
    while stop is None or position < stop:
        block = file.read(BLOCK_BYTES)
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
    """Skip to the next line.

    Returns its position and the bytes that have already been read from there on.  If no line starts before `stop`, the
    returned position is `stop` or later.
    """
    while (stop is None or position < stop) and (block := file.read(BLOCK_BYTES)):
        end = block.find(b"\n") + 1
        if end:
            return position + end, block[end:]
        position += len(block)
    return position, b""


@dataclass(frozen=True)
class _Lines:
    """A block of complete lines that starts at byte `position` of a file."""

    input: InputFile
    position: int
    content: bytes
    text_key: str
    bad: BadDocuments

    def documents(self) -> list[bytes]:
        """Return the texts of the lines, except blank ones; report lines without text as bad documents."""
        content = self.content.removeprefix(b"\xef\xbb\xbf") if self.position == 0 else self.content
        documents, key = [], self.text_key
        for number, line in enumerate(content.split(b"\n")):
            if not line or line.isspace():
                continue
            try:
                documents.append(load_json(line)[key].encode())
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                text = self._read_with_json(line, number)
                if text is not None:
                    documents.append(text)
        return documents

    def _read_with_json(self, line: bytes, number: int) -> bytes | None:
        """Return the text of a line, parsed with Python's `json`, which accepts some lines that orjson rejects.

        If this fails too, reports the line and returns None.
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


def line_number(input_file: InputFile, position: int) -> int:
    """Return the 1-based number of the line that starts at byte `position` of a file's content."""
    number = 1
    with closing(open_stream(input_file)) as file:
        while position > 0 and (block := file.read(min(BLOCK_BYTES, position))):
            number += block.count(b"\n")
            position -= len(block)
    return number


def _reject_line(line: str, location: str, text_key: str, bad: BadDocuments) -> None:
    """Report why a line has no text."""
    try:
        record: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        bad.reject(bad.keys.inputs, location, f"is not JSON ({error})")
        return
    _reject_record(record, location, text_key, bad)


def _reject_record(record: Any, location: str, text_key: str, bad: BadDocuments) -> None:
    """Report why a record has no text."""
    keys = bad.keys
    if not isinstance(record, dict):
        bad.reject(keys.inputs, location, f"must be a JSON object, not {type(record).__name__}")
    elif text_key not in record:
        rule = f"{location} has no such key; its keys: {', '.join(record) or 'none'}"
        fix = chat_advice(record, keys)
        legal = None if fix else nearest(text_key, record) or (*record, None)[0]
        bad.reject(keys.text_key, text_key, rule, legal=legal, fix=fix)
    elif record[text_key] is None:
        bad.reject(keys.inputs, location, f"has no text: its {text_key!r} is null")
    elif not isinstance(record[text_key], str):
        strings = [key for key, value in record.items() if isinstance(value, str)]
        rule = f"at {location} it is not text but {type(record[text_key]).__name__}"
        fix = chat_advice(record, keys)
        bad.reject(keys.text_key, text_key, rule, legal=None if fix else next(iter(strings), None), fix=fix)
    else:
        bad.reject(keys.inputs, location, "is not valid Unicode (surrogates not allowed)")


@dataclass(frozen=True)
class _LongLine(LongDocument):
    """A line of a JSONL file that starts at byte `position`."""

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
        location = f"{self.input.path}:{line_number(self.input, self.position)}"
        bad.reject(bad.keys.inputs, location, str(error) if isinstance(error, BadLine) else f"is not UTF-8 ({error})")


# ---------------------------------------------------------------------------------------------------------------
# JSON arrays and CSV


def read_record_file(
    input_file: InputFile, start: int, stop: int | None, text_key: str, bad: BadDocuments
) -> Iterator[list[bytes]]:
    """Yield the documents of a JSON array or CSV file in batches.  `start` and `stop` are ignored."""
    documents: list[bytes] = []
    num_bytes = 0
    try:
        with closing(open_stream(input_file)) as file, TextIOWrapper(file, "utf-8-sig", newline="") as text:
            for number, record in records_in(input_file.path, text):
                value = record.get(text_key) if isinstance(record, dict) else None
                try:
                    content = value.encode()  # type: ignore[union-attr]
                except (AttributeError, UnicodeEncodeError):
                    _reject_record(record, f"{input_file.path}:{number}", text_key, bad)
                    continue
                documents.append(content)
                num_bytes += len(content)
                if num_bytes > BLOCK_BYTES:
                    yield documents
                    documents, num_bytes = [], 0
    except BadRecord as error:
        bad.reject_file(input_file.path, str(error))
    except (UnicodeDecodeError, *READ_ERRORS) as error:
        reject_file(input_file, error, bad)
    yield documents


# ---------------------------------------------------------------------------------------------------------------
# Reading the text of a very long JSONL line piece by piece


MAX_OTHER_BYTES = 1 << 26
"""Maximum number of bytes in a line, not counting its text."""

_COMPLETE_ESCAPES = re.compile(
    rb'(?:[^"\\]+'
    rb"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|\\u(?![dD][89abAB])[0-9a-fA-F]{4}"
    rb'|\\["\\/bfnrt])*'
)
"""Matches the longest prefix of a string's content that does not end within an escape or a surrogate pair."""

_LONGEST_ESCAPE = 12
"""Number of bytes of the longest escape, a surrogate pair."""


class BadLine(Exception):
    """The text of a line cannot be read; the message says why."""


def read_text_value(file: BinaryIO, key: str) -> Iterator[bytes]:
    """Yield, in UTF-8 pieces, the text under `key` in the JSON object on the next line of `file`.

    Raises BadLine or UnicodeDecodeError when an error is found; the caller must then discard all earlier pieces.
    """
    line = _LineReader(file)
    remainder = bytearray()  # the line without its text
    depth, name, has_text = 0, "", False
    while True:
        text = line.read_until(b'"')
        remainder += text
        depth += sum(map(text.count, (b"{", b"["))) - sum(map(text.count, (b"}", b"]")))
        if not text.endswith(b'"'):
            break
        if depth == 1 and name == key and text[:-1].strip() == b":":
            if has_text:
                raise BadLine(f"has two values for {key}")
            has_text = True
            yield from filter(None, map(_decode_escapes, line.read_raw_string()))
            remainder += b'"'
            continue
        content = b"".join(line.read_raw_string())
        remainder += content + b'"'
        name = _decode_escapes(content).decode() if len(content) < BLOCK_BYTES else ""
        if len(remainder) > MAX_OTHER_BYTES:
            raise BadLine(f"holds more than {MAX_OTHER_BYTES >> 20} MB besides its text")
    _check_remainder(bytes(remainder), key, has_text)


def _check_remainder(remainder: bytes, key: str, has_text: bool) -> None:
    """Raise BadLine unless `remainder`, a line without its text, is a JSON object and the text was found."""
    try:
        record = json.loads(remainder)
    except (ValueError, RecursionError) as error:
        raise BadLine(f"is not JSON ({error})") from error
    if not isinstance(record, dict):
        raise BadLine(f"must be a JSON object, not {type(record).__name__}")
    if not has_text:
        raise BadLine(f"has no text under {key}; its keys: {', '.join(record) or 'none'}")


class _LineReader:
    """The bytes of a line, read on demand."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._buffer, self._is_at_end = file, b"", False

    def read_until(self, delimiter: bytes) -> bytes:
        """Return the bytes up to and including `delimiter`, or up to the end of the line if it does not occur."""
        content = bytearray()
        while (position := self._buffer.find(delimiter)) < 0:
            content += self._buffer
            self._buffer = b""
            if not self._read_more():
                return bytes(content)
            if len(content) > MAX_OTHER_BYTES:
                raise BadLine(f"holds more than {MAX_OTHER_BYTES >> 20} MB besides its text")
        content += self._buffer[: position + 1]
        self._buffer = self._buffer[position + 1 :]
        return bytes(content)

    def read_raw_string(self) -> Iterator[bytes]:
        """Yield the content of a string without decoding its escapes, and consume its closing quote."""
        while True:
            complete = _COMPLETE_ESCAPES.match(self._buffer)
            end = complete.end() if complete else 0
            if end < len(self._buffer) and self._buffer[end] == 0x22:
                yield self._buffer[:end]
                self._buffer = self._buffer[end + 1 :]
                return
            end = complete_utf8_length(self._buffer[:end])
            if end:
                yield self._buffer[:end]
                self._buffer = self._buffer[end:]
            elif len(self._buffer) >= _LONGEST_ESCAPE:
                raise BadLine("is not valid Unicode or JSON (invalid escape)")
            if not self._read_more():
                raise BadLine("is not JSON (it ends within a string)")

    def _read_more(self) -> bool:
        if self._is_at_end:
            return False
        block = self._file.read(BLOCK_BYTES)
        end = block.find(b"\n")
        self._is_at_end = end >= 0 or not block
        self._buffer += block if end < 0 else block[:end]
        return True


def _decode_escapes(content: bytes) -> bytes:
    """Decode the escapes of a JSON string's content, and return the string as UTF-8."""
    try:
        return str(json.loads(f'"{content.decode()}"')).encode()
    except UnicodeDecodeError:
        raise
    except UnicodeEncodeError as error:
        raise BadLine(f"is not valid Unicode ({error.reason})") from error
    except ValueError as error:
        raise BadLine(f"is not JSON ({error})") from error


# ---------------------------------------------------------------------------------------------------------------
# Reading and writing JSON with orjson, which is several times as fast, or with Python's `json` if it is not installed


try:
    orjson: Any = importlib.import_module("orjson")
except ImportError:
    orjson = None


def load_json(content: bytes) -> Any:
    """Parse UTF-8 JSON.  Raises ValueError."""
    return json.loads(content.decode()) if orjson is None else orjson.loads(content)


def dump_json(value: Any) -> str:
    """Serialize a value as JSON."""
    return json.dumps(value) if orjson is None else orjson.dumps(value).decode()


# ---------------------------------------------------------------------------------------------------------------
# Tables, read with pyarrow: parquet files, and Arrow files saved by `datasets`


ROWS_PER_BATCH = 128
"""Number of rows of a parquet file to decode at once."""


def split_row_groups(input_file: InputFile, size: int) -> Iterator[tuple[int, int | None, int]]:
    """Split a parquet file into ranges of row groups, each of about `size` bytes on disk; yields (start, stop, bytes).

    For an invalid parquet file, yields a single range; the file is rejected when it is read.
    """
    try:
        with _open_parquet(input_file) as file:
            metadata = file.metadata
    except (OSError, _import_pyarrow(input_file).ArrowException):
        yield 0, None, input_file.size
        return
    first, num_bytes = 0, 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        num_bytes += sum(group.column(column).total_compressed_size for column in range(group.num_columns))
        if num_bytes >= size or number + 1 == metadata.num_row_groups:
            yield first, number + 1, num_bytes
            first, num_bytes = number + 1, 0


def read_table(
    input_file: InputFile, start: int, stop: int | None, text_key: str, bad: BadDocuments
) -> Iterator[list[bytes]]:
    """Yield the texts in the column `text_key` of a table.

    start, stop: the range of row groups to read from a parquet file; ignored for Arrow files.
    """
    arrow = _import_pyarrow(input_file)
    try:
        for first, column in _table_columns(input_file, start, stop, text_key, bad):
            texts = _as_bytes(arrow, column)
            if texts is None:
                rule = f"in {input_file.path} it is not text but {column.type}"
                fix = chat_advice([text_key], bad.keys) or "give a text column"
                raise setting_error(bad.keys.text_key, text_key, rule, fix=fix)
            yield _column_texts(arrow, texts, input_file, first, bad)
    except (OSError, arrow.ArrowException) as error:
        bad.reject_file(input_file.path, f"cannot be read to its end ({error})")


def _table_columns(
    input_file: InputFile, start: int, stop: int | None, text_key: str, bad: BadDocuments
) -> Iterator[tuple[int, Any]]:
    """Yield the column `text_key` in batches, each with the 1-based number of its first row in the file."""
    row = 1
    if input_file.kind == "parquet":
        with _open_parquet(input_file) as file:
            _check_column(input_file, file.schema_arrow.names, text_key, bad)
            row += sum(file.metadata.row_group(number).num_rows for number in range(start))
            groups = range(start, file.num_row_groups if stop is None else stop)
            for batch in file.iter_batches(ROWS_PER_BATCH, list(groups), [text_key], use_threads=False):
                yield row, batch.column(batch.schema.names.index(text_key))  # "a.b" also matches `b` in a struct `a`
                row += len(batch)
        return
    arrow = _import_pyarrow(input_file)
    with arrow.OSFile(input_file.path) as stored:
        schema, batches = _open_arrow(arrow, stored)
        _check_column(input_file, schema.names, text_key, bad)
        for batch in batches:
            yield row, batch.column(schema.names.index(text_key))
            row += len(batch)


def _as_bytes(arrow: Any, column: Any) -> Any:
    """Return a text column as bytes, which may be invalid UTF-8, or None if the column is not text.

    Raises ArrowInvalid if the column's offsets are invalid.
    """
    types = arrow.types
    if types.is_dictionary(column.type):
        values = _as_bytes(arrow, column.dictionary)
        if values is None:
            return None
        return arrow.DictionaryArray.from_arrays(column.indices, values).dictionary_decode()
    if types.is_string_view(column.type) or types.is_binary_view(column.type):
        column = column.view(arrow.binary_view())
        column.validate(full=True)
        return column.cast(arrow.large_binary())
    if types.is_large_string(column.type) or types.is_large_binary(column.type):
        binary = column.view(arrow.large_binary())
    elif types.is_string(column.type) or types.is_binary(column.type):
        binary = column.view(arrow.binary())
    else:
        return None
    binary.validate(full=True)
    return binary


def _column_texts(arrow: Any, column: Any, input_file: InputFile, first: int, bad: BadDocuments) -> list[bytes]:
    """Return the texts of a column of bytes; nulls and invalid UTF-8 are counted as bad documents."""
    try:
        column.view(arrow.large_string() if arrow.types.is_large_binary(column.type) else arrow.string()).validate(
            full=True
        )
        is_valid = True
    except arrow.ArrowInvalid:
        is_valid = False
    texts: list[bytes] = []
    for row, text in enumerate(column.to_pylist(), first):
        if text is None:
            bad.reject(bad.keys.inputs, f"{input_file.path}, row {row}", "has no text")
        else:
            try:
                if not is_valid:
                    text.decode()
                texts.append(text)
            except UnicodeDecodeError:
                bad.reject(bad.keys.inputs, f"{input_file.path}, row {row}", "is not UTF-8")
    return texts


def _check_column(input_file: InputFile, names: list[str], text_key: str, bad: BadDocuments) -> None:
    """Raise UserError if the table lacks the column."""
    if text_key not in names:
        rule = f"{input_file.path} has no such column; its columns: {', '.join(names) or 'none'}"
        if fix := chat_advice(names, bad.keys):
            raise setting_error(bad.keys.text_key, text_key, rule, fix=fix)
        raise setting_error(bad.keys.text_key, text_key, rule, nearest(text_key, names) or (*names, None)[0])


def _open_parquet(input_file: InputFile) -> Any:
    """Open a parquet file.  Raises OSError or ArrowException."""
    _import_pyarrow(input_file)
    import pyarrow.parquet

    return pyarrow.parquet.ParquetFile(input_file.path, memory_map=False, pre_buffer=False, buffer_size=1 << 20)


def _open_arrow(arrow: Any, file: Any) -> tuple[Any, Iterator[Any]]:
    """Return the schema and the record batches of an Arrow file, which may be in the file format or the stream format.

    `datasets` writes the stream format.
    """
    is_indexed = file.read(6) == b"ARROW1"
    file.seek(0)
    if not is_indexed:
        stream = arrow.ipc.open_stream(file)
        return stream.schema, iter(stream)
    table = arrow.ipc.open_file(file)
    return table.schema, map(table.get_batch, range(table.num_record_batches))


def _import_pyarrow(input_file: InputFile) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError as error:
        fix = "pip install 'meshtrainer[data]'"
        raise setting_error(input_file.key, input_file.path, "needs the `pyarrow` library", fix=fix) from error
    return pyarrow


# ---------------------------------------------------------------------------------------------------------------
# Token files from other trainers (nanoGPT, llm.c, modded-nanogpt, Megatron), used unchanged
#
# nanoGPT's files are plain uint16 tokens.  The files of llm.c and modded-nanogpt have a header with the number of
# tokens.  In all of these, the tokenizer's end token separates documents.  Megatron's NAME.idx, next to NAME.bin,
# records the boundaries of sequences and documents.  None of these formats records which tokenizer was used.


_MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}

_HEADER_BYTES = 256 * 4

_HEADER_DTYPES = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
"""The dtype of the tokens in files with a header, by the header's first two integers: magic number and version."""

_CHUNK_TOKENS = 1 << 20
"""Number of tokens read at once."""


@dataclass(frozen=True)
class TokenChunk:
    """Consecutive tokens of a file.

    ends: the offsets in `ids` at which documents end (exclusive).
    """

    ids: NDArray[np.integer[Any]]
    ends: NDArray[np.int64]


def check_tokens(inputs: Sequence[InputFile], tokenizer: Tokenizer, bos: bool | None, keys: SettingNames) -> None:
    """Raise UserError if there are token files, unless `data.tokenizer` is set and `data.bos` is not."""
    token_files = [input_file.path for input_file in inputs if input_file.kind == "tokens"]
    if token_files and tokenizer.name == "bytes":
        rule = f"{token_files[0]} does not say which tokenizer made its tokens"
        raise setting_error(keys.tokenizer, "bytes", rule, example="gpt2/tokenizer.json")
    if token_files and bos is not None:
        rule = f"the tokens of {token_files[0]} are used unchanged"
        raise setting_error(keys.bos, bos, rule, fix=f"leave {keys.bos} out")


def read_tokens(input_file: InputFile, tokenizer: Tokenizer, keys: SettingNames) -> Iterator[TokenChunk]:
    """Yield the tokens of a file.

    Raises UserError if the file cannot be read or has ids outside the vocabulary of `tokenizer`.
    """
    try:
        read = _read_megatron if is_megatron(input_file.path) else _read_plain_tokens
        for tokens in read(input_file, tokenizer):
            is_invalid = (tokens.ids < 0) | (tokens.ids >= tokenizer.vocab_size)
            if is_invalid.any():
                invalid_id, vocab_size = tokens.ids[is_invalid.argmax()], tokenizer.vocab_size
                rule = f"{input_file.path} holds the id {invalid_id}, but the tokenizer's ids are below {vocab_size}"
                fix = "set the tokenizer that produced the tokens"
                raise setting_error(keys.tokenizer, tokenizer.name.partition(":")[0], rule, fix=fix)
            yield tokens
    except OSError as error:
        raise setting_error(input_file.key, input_file.path, f"cannot be read ({error.strerror})") from error


def _read_plain_tokens(input_file: InputFile, tokenizer: Tokenizer) -> Iterator[TokenChunk]:
    """Yield the tokens of a file without an index, in which each end token ends a document."""
    dtype, start = _token_layout(input_file, tokenizer)
    for ids, is_last in _token_chunks(input_file, dtype, start):
        ends = np.flatnonzero(ids == tokenizer.end_id) + 1
        if is_last and (not len(ends) or ends[-1] < len(ids)):
            ends = np.append(ends, len(ids))  # the last document has no end token
        yield TokenChunk(ids, ends)


def _token_layout(input_file: InputFile, tokenizer: Tokenizer) -> tuple[np.dtype[Any], int]:
    """Return the dtype of a file's tokens, and the byte offset at which they start."""
    header = np.fromfile(input_file.path, "<i4", 3)
    dtype = _HEADER_DTYPES.get(tuple(header[:2].tolist())) if len(header) == 3 else None
    if dtype is None:
        plain_dtype = np.promote_types(find_dtype(tokenizer.vocab_size), "u2")
        problem = f"its size is not a multiple of {plain_dtype.itemsize} bytes"
        _check_complete(input_file, input_file.size % plain_dtype.itemsize == 0, problem)
        return plain_dtype.newbyteorder("<"), 0
    expected = _HEADER_BYTES + int(header[2]) * np.dtype(dtype).itemsize
    problem = f"it has {input_file.size} bytes, but its header says {expected}"
    _check_complete(input_file, input_file.size == expected, problem)
    return np.dtype(dtype), _HEADER_BYTES


def _read_megatron(input_file: InputFile, tokenizer: Tokenizer) -> Iterator[TokenChunk]:
    dtype, document_ends = _read_megatron_index(input_file)
    position = 0
    for ids, _ in _token_chunks(input_file, dtype, 0):
        first, last = np.searchsorted(document_ends, [position, position + len(ids)], side="right")
        yield TokenChunk(ids, document_ends[first:last] - position)
        position += len(ids)


def _read_megatron_index(input_file: InputFile) -> tuple[np.dtype[Any], NDArray[np.int64]]:
    """Return the dtype of a Megatron file's tokens, and the positions at which documents end."""
    content = Path(input_file.path.removesuffix(".bin") + ".idx").read_bytes()
    version = np.frombuffer(content, "<u8", 1, len(MEGATRON_MAGIC))[0] if len(content) >= 34 else 0
    code = content[17] if version == 1 else 0
    _check_complete(input_file, code in _MEGATRON_DTYPES, "its .idx has an unknown Megatron version or type")
    dtype = np.dtype(_MEGATRON_DTYPES[code])
    num_sequences, num_documents = np.frombuffer(content, "<u8", 2, 18).tolist()
    expected = 34 + 12 * num_sequences + 8 * num_documents
    _check_complete(input_file, len(content) >= expected, f"its .idx has {len(content)} bytes and needs {expected}")
    lengths = np.frombuffer(content, "<i4", num_sequences, 34).astype(np.int64)
    pointers = np.frombuffer(content, "<i8", num_sequences, 34 + 4 * num_sequences)
    documents = np.frombuffer(content, "<i8", num_documents, 34 + 12 * num_sequences)
    ends = np.concatenate([[0], np.cumsum(lengths)])
    has_all_bytes = ends[-1] * dtype.itemsize == input_file.size
    is_contiguous = has_all_bytes and np.array_equal(pointers, ends[:-1] * dtype.itemsize)
    _check_complete(input_file, bool(is_contiguous), "its .idx does not cover all of its bytes in order")
    _check_complete(input_file, bool(np.all((documents >= 0) & (documents <= num_sequences))), "its .idx is damaged")
    return dtype, np.unique(ends[np.append(documents, num_sequences)])[1:]


def _token_chunks(input_file: InputFile, dtype: np.dtype[Any], start: int) -> Iterator[tuple[NDArray[Any], bool]]:
    """Yield (ids, is_last) for each chunk of the file, from byte `start` on."""
    num_left = (input_file.size - start) // dtype.itemsize
    with open(input_file.path, "rb") as file:
        file.seek(start)
        while num_left:
            ids = np.fromfile(file, dtype, min(_CHUNK_TOKENS, num_left))
            _check_complete(input_file, len(ids) > 0, "it is truncated")
            num_left -= len(ids)
            yield ids, num_left == 0


def _check_complete(input_file: InputFile, is_complete: bool, problem: str) -> None:
    if not is_complete:
        raise setting_error(input_file.key, input_file.path, f"is not a complete token file: {problem}")
