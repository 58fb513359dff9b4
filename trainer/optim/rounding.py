"""Stochastic rounding to bfloat16, from random bits that a mesh cannot change.

A bfloat16 has 8 bits: a step of less than half the distance to the next one, some 1/500 of the weight, is lost when
it is rounded to the nearest.  Rounded up or down at random, with the probability that makes the mean exact, it is kept
on average.  The bits are those of a hash of where an element is and when, not of a generator with a state: every rank
draws for its own elements what any other rank would have drawn for them, and a resumed run draws what the first one
would have.  Knows no optimizer and no DTensor.

Sources: Gupta et al. 2015, "Deep Learning with Limited Numerical Precision", arXiv:1502.02551; Zamirai et al. 2020,
"Revisiting BFloat16 Training", arXiv:2010.06192; for bits that are a function of a counter, Salmon et al. 2011,
"Parallel Random Numbers: As Easy as 1, 2, 3".
"""

from __future__ import annotations

import torch

_GOLDEN = 0x9E3779B9 - 2**32


def mix(words: torch.Tensor) -> torch.Tensor:
    """Return a hash of each int32: a bijection in which each bit of the input changes each of the output half the time.

    Products wrap around.  The constants are `lowbias32` of C. Wellons' hash prospector,
    https://nullprogram.com/blog/2018/07/31/.
    """
    words = (words ^ _shifted(words, 16)) * 0x7FEB352D
    words = (words ^ _shifted(words, 15)) * (0x846CA68B - 2**32)
    return words ^ _shifted(words, 16)


def _shifted(words: torch.Tensor, by: int) -> torch.Tensor:
    """Return int32 shifted to the right with zeros coming in: torch's own shift copies the sign."""
    return (words >> by) & ((1 << (32 - by)) - 1)


def keys_of(seeds: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """Return the key of each parameter's bits: int32, from its seed (int32) and the number of the step."""
    return mix(mix(seeds) + steps.to(torch.int32) * _GOLDEN)


def random_bits(origin: torch.Tensor, count: int) -> torch.Tensor:
    """Return 32 random bits for each of `count` elements that follow each other in a tensor: int32 of shape (count,).

    `origin`: int32, the key, and the place in the whole tensor, row by row, of the first of them.  Places wrap around.
    """
    places = origin[1] + torch.arange(count, dtype=torch.int32, device=origin.device)
    return mix((places * _GOLDEN) ^ origin[0])


def round_stochastically(values: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Return float32 `values` as bfloat16: the number below or the one above, so that the mean is the value.

    `bits`: int32, of which the lower 16 are used.  What bfloat16 can represent stays as it is, and so do infinities and
    what is no number; past the largest number lies infinity, as in rounding to the nearest.  Denormal numbers are no
    exception: there, too, a number and the next differ by one in the upper half of the word.
    """
    # Of a float32 the upper half is the bfloat16 towards zero, the lower half the share of the way to the next.
    rounded = ((values.view(torch.int32) + (bits & 0xFFFF)) & -0x10000).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)
