"""Records in JSON files that are not JSONL, and in CSV files, one after another in little memory.

A .json file holds records if it is an array of objects, or has one object after another.  Other JSON files, such as a
model's settings or the metadata of shards, are none.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

_HEAD_BYTES = 4096
"""How many bytes from the start of a file are inspected."""

_BLOCK = 1 << 20

RECORD_SUFFIXES = (".json", ".csv", ".tsv")


class BadRecord(ValueError):
    """A file cannot be read on; the message says why."""


def is_record_file(path: str | Path) -> bool:
    """Return whether a .json, .csv or .tsv file holds records; compressed ones are taken to do so."""
    name = str(path).lower()
    if name.removesuffix(".gz").removesuffix(".zst") != name:
        return name.removesuffix(".gz").removesuffix(".zst").endswith(RECORD_SUFFIXES)
    if name.endswith((".csv", ".tsv")):
        return True
    try:
        with open(path, "rb") as opened:
            head = opened.read(_HEAD_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip()
    except OSError:
        return False
    return name.endswith(".json") and re.match(rb"\[\s*[{\]]|\{[^\n]*\}[ \t\r]*\n\s*\{", head) is not None


def records_in(name: str, file: TextIO) -> Iterator[tuple[int, Any]]:
    """Yield the records of an open file with their numbers, counted from 1.

    name: that of the file, which tells the kind.

    Raises BadRecord where the file cannot be read on, and UnicodeDecodeError.
    """
    stem = name.lower().removesuffix(".gz").removesuffix(".zst")
    return _in_csv(file, "\t" if stem.endswith(".tsv") else ",") if stem.endswith((".csv", ".tsv")) else _in_json(file)


def _in_json(file: TextIO) -> Iterator[tuple[int, Any]]:
    decoder = json.JSONDecoder()
    held, at, number, is_all = "", 0, 0, False
    num_open = 0  # brackets of arrays that have begun and not ended
    while True:
        separators = held[at : _SEPARATORS.match(held, at).end()]  # type: ignore[union-attr]
        num_open += separators.count("[") - separators.count("]")
        at += len(separators)
        try:
            if at < len(held):
                record, end = decoder.raw_decode(held, at)
                number, at = number + 1, end
                yield number, record
                continue
        except json.JSONDecodeError as error:
            if is_all:
                raise BadRecord(f"record {number + 1} is not JSON ({error.msg})") from error
        except RecursionError as error:
            raise BadRecord(f"record {number + 1} is nested too deeply") from error
        if is_all and num_open > 0:
            raise BadRecord(f"the array does not end: the file is cut off after record {number}")
        if is_all:
            return
        block = file.read(max(_BLOCK, len(held) - at))
        held, at, is_all = held[at:] + block, 0, not block


_SEPARATORS = re.compile(r"[\s,\[\]]*")
"""What separates the records: the commas of an array, or line ends.  A record itself is an object."""


def _in_csv(file: TextIO, delimiter: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    csv.field_size_limit(1 << 31)
    rows = csv.reader(file, delimiter=delimiter, strict=True)
    try:
        names = next(rows, None)
        for number, row in enumerate(rows, 1):
            if names is None or not row:
                continue
            if len(row) != len(names):
                raise BadRecord(f"row {number} has {len(row)} fields, the header has {len(names)}")
            yield number, dict(zip(names, row, strict=True))
    except csv.Error as error:
        raise BadRecord(f"line {rows.line_num} is not CSV ({error})") from error
