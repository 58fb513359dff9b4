"""Eight-bit optimizer moments: one-byte codes, with one scale per block of elements.

A block is a part of one row of a parameter.  With these moments, rows are never divided among ranks, so neither codes
nor scales depend on the mesh.  A value is proportional to a power of its code, so that small values keep a precision of
a few percent even in a block with large ones.  Relative errors matter because a step of Adam divides one moment by the
root of the other.  With stochastic rounding, a value becomes one of the two nearest codes at random, so that it is
exact on average (except for the smallest squares, see `SQUARE`).

Source: Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization", arXiv:2110.02861, with a different code
and with blocks that do not cross rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX_BLOCK, _MIN_BLOCK = 256, 16
"""Largest and smallest number of elements that share a scale."""


def block_length(shape: torch.Size | tuple[int, ...]) -> int | None:
    """Return the number of elements per block for a parameter of this shape; None if its moments stay in float32.

    It is the largest divisor of the row length that is at most 256.  The moments of vectors stay in float32.  So do
    the moments of matrices whose divisor is below 16, since the scales would take up too much memory.
    """
    if len(shape) < 2 or not shape[-1]:
        return None
    length = next(size for size in range(min(MAX_BLOCK, shape[-1]), 0, -1) if shape[-1] % size == 0)
    return length if length >= _MIN_BLOCK else None


@dataclass(frozen=True)
class Code:
    """A one-byte code: the value of code q is the block's scale times (q / largest) ** power."""

    dtype: torch.dtype
    power: int
    smallest: int
    """Smallest magnitude of a nonzero value's code."""

    @property
    def largest(self) -> int:
        return torch.iinfo(self.dtype).max

    def decode(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Return float32 values of shape (blocks, length) for codes of the same shape and scales (blocks,)."""
        return self._value(codes.float()) * scales[:, None]

    def _value(self, codes: torch.Tensor) -> torch.Tensor:
        fraction = codes / self.largest
        return fraction.abs() ** self.power * fraction.sign()

    def encode(self, values: torch.Tensor, bits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the codes and scales of float32 values of shape (blocks, length).

        bits: int32 of the same shape; the lower 16 bits of each number determine whether its value is rounded up.
        """
        scales = values.abs().amax(dim=1)
        magnitude = values.abs() / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
        low = (magnitude ** (1 / self.power) * self.largest).floor().clamp(max=self.largest - 1)
        below, above = self._value(low), self._value(low + 1)
        # The root is inexact, so the magnitude may lie slightly outside [below, above]; the nearer end is then used.
        is_up = (bits & 0xFFFF).float() / 0x10000 < (magnitude - below) / (above - below)
        code = (low + is_up).clamp(min=self.smallest)
        code = torch.where(values == 0, 0, code)
        return (code * values.sign()).to(self.dtype), scales


MEAN = Code(torch.int8, power=3, smallest=0)
"""The code for the mean of gradients: a sign and 127 magnitudes, or zero."""
SQUARE = Code(torch.uint8, power=4, smallest=1)
"""The code for the mean of squared gradients.  It never rounds a nonzero value to zero, since steps are divided by its
root."""
