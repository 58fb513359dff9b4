"""Splits the input into units, which depend on the input alone, so that the shards do not depend on the number of
processes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainer.data.ingest.inputs import InputFile
from trainer.data.ingest.records import split_row_groups

MIN_UNIT_BYTES, MAX_UNIT_BYTES, TARGET_NUM_UNITS = 1 << 24, 1 << 28, 4096
"""Minimum and maximum bytes of input per unit, and the number of units to aim for within these limits."""

MAX_FILES_PER_UNIT = 4096
"""Maximum number of small files in a unit."""


@dataclass(frozen=True)
class BuildUnit:
    """One or more files, or a part of one file.

    `start` and `stop` are bytes of a JSONL file or row groups of a parquet file; 0 and None for complete files.  `size`
    is the approximate number of input bytes.
    """

    inputs: tuple[InputFile, ...]
    size: int
    start: int = 0
    stop: int | None = None


def split_into_units(inputs: Sequence[InputFile]) -> list[BuildUnit]:
    """Split files into units, in the order of their documents."""
    total = sum(each.size for each in inputs)
    return list(_split_inputs(inputs, min(MAX_UNIT_BYTES, max(MIN_UNIT_BYTES, total // TARGET_NUM_UNITS))))


def _split_inputs(inputs: Sequence[InputFile], size: int) -> Iterator[BuildUnit]:
    group: list[InputFile] = []
    for each in inputs:
        if len(group) == MAX_FILES_PER_UNIT or _size_of(group) + each.size > size:
            yield from _group(group)
            group = []
        if each.size > size and each.kind in ("jsonl", "parquet") and not each.compression:
            yield from _split_file(each, size)
        else:
            group.append(each)
    yield from _group(group)


def _group(inputs: Sequence[InputFile]) -> Iterator[BuildUnit]:
    if inputs:
        yield BuildUnit(tuple(inputs), _size_of(inputs))


def _split_file(each: InputFile, size: int) -> Iterator[BuildUnit]:
    if each.kind == "parquet":
        for start, stop, num_bytes in split_row_groups(each, size):
            yield BuildUnit((each,), num_bytes, start, stop)
        return
    count = -(-each.size // size)
    borders = [each.size * number // count for number in range(count + 1)]
    for start, stop in itertools.pairwise(borders):
        yield BuildUnit((each,), stop - start, start, stop)


def _size_of(inputs: Sequence[InputFile]) -> int:
    return sum(each.size for each in inputs)
