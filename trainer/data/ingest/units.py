"""Units: pieces of the input that depend on the input alone, so that any number of processes makes the same shards."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainer.data.ingest.inputs import Input
from trainer.data.ingest.records import group_row_groups

SMALLEST, LARGEST, MOST = 1 << 24, 1 << 28, 4096
"""Bytes of input in a unit: as many as make MOST units, within these limits."""

MOST_FILES = 4096
"""Files of a unit, where they are small."""


@dataclass(frozen=True)
class Unit:
    """Files, or a part of one: `start` to `stop` are bytes of a JSONL file, or row groups of a parquet file; 0 and None
    where the files are whole.  `size` is about how many bytes of input there are.
    """

    inputs: tuple[Input, ...]
    size: int
    start: int = 0
    stop: int | None = None


def plan(inputs: Sequence[Input]) -> list[Unit]:
    """Return the units that files are cut into, in the order of their documents."""
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
