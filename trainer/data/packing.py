"""Packs documents into rows so that rows are as full as possible and no document is split."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def best_fit(lengths: NDArray[np.int64], room: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the documents grouped by row, and the offsets where each row starts in that list, plus its end.

    The longest documents are placed first, each into the fullest row that still has room for it (best fit decreasing:
    Johnson 1973, "Near-optimal bin packing algorithms").  Deterministic.  No document may be empty or longer than
    `room`, the length of a row.
    """
    rows_with: list[list[int]] = [[] for _ in range(room + 1)]  # by the room left in them
    left = 0  # bit n is set if a row has room for exactly n
    row_of = np.empty(len(lengths), np.int64)
    num_rows = 0
    longest_first = np.argsort(-lengths, kind="stable")
    for document, length in zip(longest_first.tolist(), lengths[longest_first].tolist(), strict=True):
        able = left >> length
        if able:
            space = length + (able & -able).bit_length() - 1
            row = rows_with[space].pop()
            if not rows_with[space]:
                left ^= 1 << space
        else:
            space, row, num_rows = room, num_rows, num_rows + 1
        row_of[document] = row
        if space > length:
            rows_with[space - length].append(row)
            left |= 1 << (space - length)
    order = np.argsort(row_of, kind="stable")
    return order, np.searchsorted(row_of[order], np.arange(num_rows + 1))
