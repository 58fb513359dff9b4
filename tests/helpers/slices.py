"""Packed documents, attention by the formula, and slices of sequences as ranks of a context group hold them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from trainer.config.parallel import Slices

LENGTHS = [[5, 1, 10, 16], [32], [1, 1, 30], [20, 12]]
"""Lengths of the documents in each row of a batch."""

TINY = [[1] * 16, [2] * 8]


def numbers(lengths: list[list[int]]) -> torch.Tensor:
    """Return the batch's `documents`; any numbers are valid if neighbors differ."""
    rows = [[7 * (i % 2) for i, length in enumerate(row) for _ in range(length)] for row in lengths]
    return torch.tensor(rows, dtype=torch.int32)


def spans(lengths: list[list[int]]) -> Iterator[tuple[int, slice]]:
    """Yield the row and the tokens of each document."""
    for row, of_row in enumerate(lengths):
        for end, length in zip(itertools.accumulate(of_row), of_row, strict=True):
            yield row, slice(end - length, end)


def inputs(lengths: list[list[int]], heads: int = 4, of_keys: int = 2) -> list[torch.Tensor]:
    """Return queries, keys and values."""
    generator = torch.Generator().manual_seed(0)
    shape = (len(lengths), heads, sum(lengths[0]), 8)
    made = [torch.randn(shape, generator=generator) for _ in range(3)]
    return [
        tensor[:, :num].clone().requires_grad_() for tensor, num in zip(made, (heads, of_keys, of_keys), strict=True)
    ]


def slices_of(count: int, method: str, seq_len: int = 32) -> list[Slices]:
    return [Slices(number, count, method, seq_len) for number in range(count)]


def part_of(slices: Slices, tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Return what a rank has of a tensor of the whole sequence."""
    return torch.cat([tensor.narrow(dim, start, stop - start) for start, stop in slices.pieces], dim)
