"""Skips ahead in torch's CPU random number generator (MT19937) without drawing the skipped numbers.

The generator is linear over GF(2): the state after d words is the polynomial t^d, modulo the generator's characteristic
polynomial, applied to the current state.  This takes milliseconds for any distance, plus a fraction of a second the
first time that a distance is used.

Sources: Matsumoto and Nishimura 1998, "Mersenne Twister"; Haramoto et al. 2008, "Efficient Jump Ahead for F2-Linear
Random Number Generators".
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt
import torch

_WORDS, _MIDDLE, _LOW_BITS, _TWIST = 624, 397, 31, 0x9908B0DF
_DEGREE = 32 * _WORDS - _LOW_BITS
_LEFT, _NEXT, _STATE = slice(8, 12), slice(16, 24), slice(24, 24 + 8 * _WORDS)
"""Slices of torch's `Generator.get_state()`: number of words left plus one, index of the next word, the words."""

Words = npt.NDArray[np.uint32]


def skip_words(generator: torch.Generator, count: int) -> None:
    """Advance `generator` by `count` words: one for each uniform or normal float32."""
    if not count:
        return
    state = generator.get_state().numpy().copy()
    num_used = _WORDS + 1 - int(state[_LEFT].view(np.int32)[0])
    distance = num_used + count - _WORDS
    if distance < 0:
        torch.empty(count, dtype=torch.float32).uniform_(generator=generator)
        return
    words = state[_STATE].view(np.uint64)
    words[:] = _skip_ahead(words.astype(np.uint32), distance)
    state[_LEFT].view(np.int32)[0], state[_NEXT].view(np.uint64)[0] = 1, 0
    generator.set_state(torch.from_numpy(state))


def _skip_ahead(words: Words, distance: int) -> Words:
    """Return the 624-word state that is `distance` words after `words`."""
    needed = np.flatnonzero(_power(distance))
    sequence = _continue(words, _DEGREE + _WORDS)
    windows = np.lib.stride_tricks.sliding_window_view(sequence, _WORDS)
    found = np.zeros(_WORDS, dtype=np.uint32)
    for start in range(0, len(needed), 256):  # in chunks that fit the CPU cache
        found ^= np.bitwise_xor.reduce(windows[needed[start : start + 256]], axis=0)
    return found


def _continue(words: Words, count: int) -> Words:
    """Return the first `count` words of the sequence that begins with `words`."""
    sequence = np.concatenate((words, np.zeros(count - _WORDS, dtype=np.uint32)))
    step = _WORDS - _MIDDLE  # this many words depend only on earlier ones
    for start in range(0, count - _WORDS, step):
        size = min(step, count - _WORDS - start)
        first, second = sequence[start : start + size], sequence[start + 1 : start + 1 + size]
        mixed = (first & 0x80000000) | (second & 0x7FFFFFFF)
        twisted = (mixed >> 1) ^ np.where(mixed & 1, np.uint32(_TWIST), np.uint32(0))
        sequence[start + _WORDS : start + _WORDS + size] = sequence[start + _MIDDLE : start + _MIDDLE + size] ^ twisted
    return sequence


@cache
def _power(exponent: int) -> npt.NDArray[np.uint8]:
    """Return the coefficients of t^exponent modulo the characteristic polynomial, lowest degree first."""
    power = 1
    for bit in bin(exponent)[2:]:
        power = _reduce(_square(power) << (bit == "1"))
    data = np.frombuffer(power.to_bytes(_DEGREE // 8 + 1, "little"), dtype=np.uint8)
    return np.unpackbits(data, bitorder="little")


def _square(polynomial: int) -> int:
    """Return the square of a polynomial; over GF(2) this inserts a zero between any two coefficients."""
    data = np.frombuffer(polynomial.to_bytes(polynomial.bit_length() // 8 + 1, "little"), dtype=np.uint8)
    bits = np.unpackbits(data, bitorder="little")
    spread = np.zeros(2 * len(bits), dtype=np.uint8)
    spread[::2] = bits
    return int.from_bytes(np.packbits(spread, bitorder="little").tobytes(), "little")


def _reduce(polynomial: int) -> int:
    """Return the remainder modulo the characteristic polynomial."""
    while (high := polynomial >> _DEGREE) != 0:
        polynomial &= (1 << _DEGREE) - 1
        for exponent in _lower_terms():
            polynomial ^= high << exponent
    return polynomial


@cache
def _lower_terms() -> tuple[int, ...]:
    """Return the exponents of the characteristic polynomial below its degree."""
    one, other = (1 << _WORDS) | (1 << _MIDDLE), (1 << (_WORDS - 1)) | (1 << (_MIDDLE - 1))
    powers = [1]
    for _ in range(_LOW_BITS):
        powers.append(_product(powers[-1], other))
    total = _product(one, powers[_LOW_BITS])
    for place in range(_LOW_BITS):
        if _TWIST >> place & 1:
            total ^= _product(one, powers[_LOW_BITS - 1 - place])
    total ^= _TWIST >> _LOW_BITS & 1
    return tuple(exponent for exponent in range(_DEGREE) if total >> exponent & 1)


def _product(polynomial: int, sparse: int) -> int:
    found = 0
    while sparse:
        lowest = sparse & -sparse
        found ^= polynomial * lowest
        sparse ^= lowest
    return found
