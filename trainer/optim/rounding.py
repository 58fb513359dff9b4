"""Stochastic rounding to bfloat16, with random bits that do not depend on the mesh.

A bfloat16 has 8 bits of precision: an update of less than half the distance to the next number, about 1/500 of the
weight, is lost when rounding to nearest.  Rounding up or down at random, with the probability that makes the mean
exact, preserves it on average.  The bits are a hash of the element's position and the step, not the output of a
stateful generator: every rank draws the same bits for an element, and a resumed run draws the same bits as an
uninterrupted one.  Independent of optimizers and DTensors.

Sources: Gupta et al. 2015, "Deep Learning with Limited Numerical Precision", arXiv:1502.02551; Zamirai et al. 2020,
"Revisiting BFloat16 Training", arXiv:2010.06192; for bits that are a function of a counter, Salmon et al. 2011,
"Parallel Random Numbers: As Easy as 1, 2, 3".
"""

from __future__ import annotations

import torch

_GOLDEN = 0x9E3779B9 - 2**32


def mix(words: torch.Tensor) -> torch.Tensor:
    """Return a hash of each int32: a bijection in which each input bit flips each output bit with probability one half.

    Products wrap around.  The constants are `lowbias32` of C.  Wellons' hash prospector,
    https://nullprogram.com/blog/2018/07/31/.
    """
    words = (words ^ _shift_right(words, 16)) * 0x7FEB352D
    words = (words ^ _shift_right(words, 15)) * (0x846CA68B - 2**32)
    return words ^ _shift_right(words, 16)


def _shift_right(words: torch.Tensor, by: int) -> torch.Tensor:
    """Logical right shift of int32; torch's own shift is arithmetic."""
    return (words >> by) & ((1 << (32 - by)) - 1)


def keys_of(seeds: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """Return the key of each parameter's bits (int32) from its seed (int32) and the step number."""
    return mix(mix(seeds) + steps.to(torch.int32) * _GOLDEN)


def random_bits(origin: torch.Tensor, count: int) -> torch.Tensor:
    """Return 32 random bits for each of `count` consecutive elements of a tensor: int32 of shape (count,).

    `origin`: int32, the key, and the row-major position of the first element in the full tensor.  Positions wrap
    around.
    """
    places = origin[1] + torch.arange(count, dtype=torch.int32, device=origin.device)
    return mix((places * _GOLDEN) ^ origin[0])


def round_stochastically(values: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Round float32 `values` to bfloat16, up or down, so that the expected result is the value.

    `bits`: int32, of which the lower 16 are used.  Values that bfloat16 can represent do not change, nor do infinities
    and NaN; values beyond the largest finite number may round to infinity, as when rounding to nearest.  Denormals need
    no special case: there, too, consecutive numbers differ by one in the upper half of the word.
    """
    # The upper half of a float32 is the value truncated to bfloat16; the lower half is the fraction to the next one.
    rounded = ((values.view(torch.int32) + (bits & 0xFFFF)) & -0x10000).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)
