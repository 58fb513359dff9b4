"""Reads records from .json, .csv and .tsv files one at a time, so that memory use does not grow with the file size.

A .json file holds records if it is an array of objects, or has several lines with one object each.  Other JSON files,
such as a model's configuration or a shard's metadata, hold none.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

_HEAD_BYTES = 4096
"""Number of bytes to inspect at the start of a file."""

_BLOCK_CHARS = 1 << 20
"""Minimum number of characters to read at once."""

RECORD_SUFFIXES = (".json", ".csv", ".tsv")


NO_RECORDS = "holds no records: a .json file must be an array of objects, or have several lines with one object each"
"""What error messages say about a .json file without records."""


class BadRecord(ValueError):
    """The rest of a file cannot be read; the message says why."""


def is_record_file(path: str | Path) -> bool:
    """Return whether a .json, .csv or .tsv file holds records.

    An uncompressed .json file is judged by its first _HEAD_BYTES.  Compressed .json files and all .csv and .tsv files
    are assumed to hold records.  Returns False for any other suffix.  Raises OSError if a .json file cannot be read.
    """
    name = str(path).lower()
    if name.removesuffix(".gz").removesuffix(".zst") != name:
        return name.removesuffix(".gz").removesuffix(".zst").endswith(RECORD_SUFFIXES)
    if not name.endswith(".json"):
        return name.endswith(RECORD_SUFFIXES)
    with open(path, "rb") as file:
        return holds_records(file.read(_HEAD_BYTES))


def holds_records(content: bytes) -> bool:
    """Return whether a .json file holds records, judging by the first _HEAD_BYTES of its content."""
    head = content[:_HEAD_BYTES].removeprefix(b"\xef\xbb\xbf").lstrip()
    return re.match(rb"\[\s*[{\]]|\{[^\n]*\}[ \t\r]*\n\s*\{", head) is not None


def records_in(name: str, file: TextIO) -> Iterator[tuple[int, Any]]:
    """Yield (number, record) for each record of an open file, numbered from 1; in CSV, blank lines count too.

    name: the name of the file, whose suffix determines the format: CSV for .csv and .tsv, otherwise JSON.

    Raises BadRecord or UnicodeDecodeError if the rest of the file cannot be read.
    """
    stem = name.lower().removesuffix(".gz").removesuffix(".zst")
    if not stem.endswith((".csv", ".tsv")):
        return _read_json(file)
    return _read_csv(file, "\t" if stem.endswith(".tsv") else ",")


def _read_json(file: TextIO) -> Iterator[tuple[int, Any]]:
    decoder = json.JSONDecoder()
    text, position, number, is_at_end = "", 0, 0, False
    num_open = 0  # unclosed array brackets
    while True:
        separators = text[position : _SEPARATORS.match(text, position).end()]  # type: ignore[union-attr]
        num_open += separators.count("[") - separators.count("]")
        position += len(separators)
        try:
            if position < len(text):
                record, end = decoder.raw_decode(text, position)
                number, position = number + 1, end
                yield number, record
                continue
        except json.JSONDecodeError as error:
            if is_at_end:
                raise BadRecord(f"record {number + 1} is not JSON ({error.msg})") from error
        except RecursionError as error:
            raise BadRecord(f"record {number + 1} is nested too deeply") from error
        if is_at_end and num_open > 0:
            raise BadRecord(f"the array does not end: the file is cut off after record {number}")
        if is_at_end:
            return
        block = file.read(max(_BLOCK_CHARS, len(text) - position))
        text, position, is_at_end = text[position:] + block, 0, not block


_SEPARATORS = re.compile(r"[\s,\[\]]*")
"""Matches the text between two records: white space, and the commas and brackets of an array."""


def _read_csv(file: TextIO, delimiter: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    csv.field_size_limit(1 << 31)
    rows = csv.reader(file, delimiter=delimiter, strict=True)
    try:
        names = next(rows, None)
        for number, row in enumerate(rows, 1):
            if names is None or not row:
                continue
            if len(row) != len(names):
                raise BadRecord(f"row {number} has {len(row)} fields, but the header has {len(names)}")
            yield number, dict(zip(names, row, strict=True))
    except csv.Error as error:
        raise BadRecord(f"line {rows.line_num} is not CSV ({error})") from error
