"""Chooses a writer for each box among the ranks that hold a copy of it, and balances the load.

DCP's planner compares objects for this, which takes some 16 seconds for a 70B model on 512 ranks, while all ranks wait.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainer.checkpoint.chunk_table import Boxes, Rows
from trainer.checkpoint.layout import PlannedTensor, Tensors


def choose_writers(held: Sequence[Boxes], tensors: Tensors) -> tuple[list[Rows], dict[str, PlannedTensor]]:
    """Return which of its boxes each rank writes (one bool mask per rank), and the planned chunks of each tensor.

    held: the boxes that each rank holds.  Raises ValueError unless the boxes cover every tensor without overlap.
    """
    boxes = Boxes.joined(held)
    numbers = boxes.numbers({key: number for number, key in enumerate(tensors)})
    ranks = np.repeat(np.arange(len(held)), [len(own) for own in held])
    rows = np.column_stack((numbers, boxes.offsets, boxes.sizes))
    order = np.lexsort((ranks, *reversed(rows.T)))
    is_first = np.ones(len(order), dtype=bool)
    is_first[1:] = (np.diff(rows[order], axis=0) != 0).any(axis=1)

    itemsizes = np.array([tensor.element_size() for tensor in tensors.values()], dtype=np.int64)
    writes = np.zeros(len(order), dtype=bool)
    starts = np.flatnonzero(is_first)
    num_bytes = boxes.sizes[order[starts]].prod(axis=1) * itemsizes[numbers[order[starts]]]
    writes[order[starts + _chosen(ranks[order], starts, num_bytes, len(held))]] = True
    ends = np.cumsum([len(own) for own in held])[:-1]
    return np.split(writes, ends), _planned(rows[order[starts]], tensors)


def _chosen(ranks: Rows, starts: Rows, num_bytes: Rows, num_ranks: int) -> Rows:
    """Return the index of each box's writer among its holders: the holder with the fewest bytes so far.

    ranks: the holders of all boxes, concatenated; those of box i begin at starts[i].
    """
    chosen = np.zeros(len(starts), dtype=np.int64)
    counts = np.diff(np.append(starts, len(ranks)))
    if (counts <= 1).all():
        return chosen
    loads = [0] * num_ranks
    for number, start in enumerate(starts.tolist()):
        holders = ranks[start : start + counts[number]].tolist()
        writer = min(holders, key=loads.__getitem__)
        loads[writer] += int(num_bytes[number])
        chosen[number] = holders.index(writer)
    return chosen


def _planned(rows: Rows, tensors: Tensors) -> dict[str, PlannedTensor]:
    """Return the planned chunks of each tensor.  rows: tensor number, offsets and sizes of each box, sorted."""
    width = (rows.shape[1] - 1) // 2
    bounds = np.searchsorted(rows[:, 0], np.arange(len(tensors) + 1)).tolist()
    planned = {}
    for (key, tensor), start, stop in zip(tensors.items(), bounds, bounds[1:], strict=False):
        own, shape = rows[start:stop], tuple(tensor.shape)
        offsets, sizes = own[:, 1 : 1 + len(shape)], own[:, 1 + width : 1 + width + len(shape)]
        _check_coverage(key, shape, offsets, sizes)
        planned[key] = PlannedTensor(tensor.dtype, shape, offsets, sizes)
    return planned


def _check_coverage(key: str, shape: tuple[int, ...], offsets: Rows, sizes: Rows) -> None:
    """Raise ValueError unless the boxes cover a tensor.  DCP checks this only for several ranks, and never on load."""
    filled, numel = int(sizes.prod(axis=1).sum()), int(np.prod(shape, dtype=np.int64))
    if filled != numel:
        raise ValueError(f"{key}: the ranks hold {filled} of its {numel} elements")
    if (offsets + sizes > shape).any() or _overlap(offsets, sizes):
        raise ValueError(f"{key}: the ranks hold parts of it that overlap or lie outside of it")


def _overlap(offsets: Rows, sizes: Rows) -> bool:
    """Return whether any two boxes overlap.  offsets: in ascending order."""
    if len(offsets) < 2:
        return False
    if not (offsets[:, 1:] != 0).any():  # sharded along dim 0 only: compare neighbors
        return bool((offsets[1:, 0] < offsets[:-1, 0] + sizes[:-1, 0]).any())
    stops = offsets + sizes
    meets = (offsets[:, None] < stops[None]).all(axis=2) & (offsets[None] < stops[:, None]).all(axis=2)
    return bool(np.triu(meets, k=1).any())
