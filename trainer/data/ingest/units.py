"""Splits the input into units, which depend on the input alone, so that the shards do not depend on the number of
processes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainer.data.ingest.inputs import Input
from trainer.data.ingest.records import group_row_groups

SMALLEST, LARGEST, MOST = 1 << 24, 1 << 28, 4096
"""Minimum and maximum bytes of input per unit, and the number of units to aim for within these limits."""

MOST_FILES = 4096
"""Maximum number of small files in a unit."""


@dataclass(frozen=True)
class Unit:
    """One or more files, or a part of one file.

    `start` and `stop` are bytes of a JSONL file or row groups of a parquet file; 0 and None for complete files.  `size`
    is the approximate number of input bytes.
    """

    inputs: tuple[Input, ...]
    size: int
    start: int = 0
    stop: int | None = None


def plan(inputs: Sequence[Input]) -> list[Unit]:
    """Split files into units, in the order of their documents."""
    total = sum(each.size for each in inputs)
    return list(_cut(inputs, min(LARGEST, max(SMALLEST, total // MOST))))


def _cut(inputs: Sequence[Input], size: int) -> Iterator[Unit]:
    together: list[Input] = []
    for each in inputs:
        if len(together) == MOST_FILES or _size_of(together) + each.size > size:
            yield from _together(together)
            together = []
        if each.size > size and each.kind in ("jsonl", "parquet") and not each.packing:
            yield from _parts(each, size)
        else:
            together.append(each)
    yield from _together(together)


def _together(inputs: Sequence[Input]) -> Iterator[Unit]:
    if inputs:
        yield Unit(tuple(inputs), _size_of(inputs))


def _parts(each: Input, size: int) -> Iterator[Unit]:
    if each.kind == "parquet":
        for start, stop, num_bytes in group_row_groups(each, size):
            yield Unit((each,), num_bytes, start, stop)
        return
    count = -(-each.size // size)
    borders = [each.size * number // count for number in range(count + 1)]
    for start, stop in itertools.pairwise(borders):
        yield Unit((each,), stop - start, start, stop)


def _size_of(inputs: Sequence[Input]) -> int:
    return sum(each.size for each in inputs)
