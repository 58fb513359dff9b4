"""Sample order of a mixture of sources whose weights may change from phase to phase.

From the start of each phase, positions are grouped into blocks of 1024, and each complete block holds exactly as many
samples of each source as its weight prescribes.  A phase has one pattern of sources, and each block starts at a
different place in it.  The pattern gives the source of a position and how many samples of that source precede it; the
k-th sample of a source is at position k of that source's permutation.  So a source is read completely before any of
its samples repeats, whatever the phases are.

All of this is a closed form of the position, the seed and the phases so far.  No state is stored, and later phases
never change earlier positions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.config import BLOCK, Phase
from trainer.data.sample_order import sample_at
from trainer.errors import setting_error

_KEYS_ALLOWING_OTHER_SHARES = frozenset({"data", "data.weights", "data.phases"})
"""Keys in `checkpoint.allow_changes` that permit different weights for samples already consumed."""


def shares_per_block(weights: Mapping[str, float]) -> dict[str, int]:
    """Return the number of samples of each source in a block (largest-remainder method; ties go to the first name)."""
    total = sum(map(Fraction, weights.values()))
    exact = {name: Fraction(weight) * BLOCK / total for name, weight in weights.items()}
    shares = {name: int(share) for name, share in exact.items()}
    by_remainder = sorted(exact, key=lambda name: (shares[name] - exact[name], name))
    for name in by_remainder[: BLOCK - sum(shares.values())]:
        shares[name] += 1
    return shares


def _shares_by_size(sizes: Mapping[str, int]) -> dict[str, int]:
    shares = shares_per_block(sizes)
    for name, share in shares.items():
        if not share:
            rule = (
                f"by size, source {name} ({sizes[name]} of {sum(sizes.values())} samples) has fewer than one "
                f"sample in {BLOCK}"
            )
            example = dict(sizes) | {name: -(-sum(sizes.values()) // (BLOCK - 1))}
            raise setting_error("data.weights", None, rule, example=example)
    return shares


class _PhasePattern:
    """A phase: starting at position `start`, every block has `shares[j]` samples of source j."""

    def __init__(self, start: int, shares: NDArray[np.int64], seed: int) -> None:
        self.start, self.shares, self._seed = start, shares, seed + 1
        slots = sample_at(start * BLOCK + np.arange(BLOCK), BLOCK, seed)
        # Repeated twice, so that a block can start anywhere in the pattern and still cover all of it.
        self._pattern = np.tile(np.searchsorted(np.cumsum(shares), slots, side="right"), 2)
        is_of = self._pattern[:, None] == np.arange(len(shares))
        self._before = np.concatenate([np.zeros((1, len(shares)), np.int64), np.cumsum(is_of, axis=0)])

    def locate(self, offsets: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the source at each offset into the phase, and how many samples of that source precede it."""
        blocks, places = np.divmod(offsets, BLOCK)
        pattern_starts = self._pattern_offsets(blocks)
        sources = self._pattern[pattern_starts + places]
        before = self._before[pattern_starts + places, sources] - self._before[pattern_starts, sources]
        return sources, blocks * self.shares[sources] + before

    def count(self, length: int) -> NDArray[np.int64]:
        """Return how many of the first `length` positions belong to each source."""
        block, rest = divmod(length, BLOCK)
        (pattern_start,) = self._pattern_offsets(np.array([block]))
        return block * self.shares + self._before[pattern_start + rest] - self._before[pattern_start]

    def _pattern_offsets(self, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where in the pattern each block starts, drawn pseudorandomly for each block."""
        return sample_at((self.start + blocks) * BLOCK, BLOCK, self._seed)


class Mixture:
    """Sample order of a mixture.  Sample indices are those of `MixedSource`: the sources concatenated in name order.

    Raises UserError if the weights default to the sizes and a source is too small to get a share.
    """

    def __init__(self, sizes: Mapping[str, int], phases: Sequence[Phase], seed: int) -> None:
        self.sizes = dict(sorted(sizes.items()))
        self._seeds = [_seed_of(name, seed) for name in self.sizes]
        self._index_starts = np.cumsum([0, *self.sizes.values()])
        self.phases = [(phase.start, self._shares(phase.weights)) for phase in phases]
        # Merge each phase into the one before it if both have the same shares.
        self.phases = [
            phase for number, phase in enumerate(self.phases) if not number or phase[1] != self.phases[number - 1][1]
        ]
        self._patterns = [_PhasePattern(start, np.array(list(shares.values())), seed) for start, shares in self.phases]
        self.starts = [start for start, _ in self.phases]
        totals = [np.zeros(len(sizes), dtype=np.int64)]
        for pattern, end in zip(self._patterns, self.starts[1:], strict=False):
            totals.append(totals[-1] + pattern.count(end - pattern.start))
        self._totals = totals

    def _shares(self, weights: Mapping[str, float] | None) -> dict[str, int]:
        shares = _shares_by_size(self.sizes) if weights is None else shares_per_block(dict(sorted(weights.items())))
        return {name: shares.get(name, 0) for name in self.sizes}

    def at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sample index at each of `positions` (non-negative, any shape)."""
        flat = np.asarray(positions, dtype=np.int64).ravel()
        sources, numbers = np.empty_like(flat), np.empty_like(flat)
        phases = np.searchsorted(self.starts, flat, side="right") - 1
        for phase in np.unique(phases):
            chosen, pattern = phases == phase, self._patterns[phase]
            sources[chosen], within = pattern.locate(flat[chosen] - pattern.start)
            numbers[chosen] = within + self._totals[phase][sources[chosen]]
        indices = np.empty_like(flat)
        for source, (size, seed) in enumerate(zip(self.sizes.values(), self._seeds, strict=True)):
            chosen = sources == source
            indices[chosen] = self._index_starts[source] + sample_at(numbers[chosen], size, seed)
        return indices.reshape(np.shape(positions))

    def counts(self, samples: int) -> dict[str, int]:
        """Return how many of the run's first `samples` samples come from each source."""
        phase = int(np.searchsorted(self.starts, samples, side="right")) - 1
        counted = self._totals[phase] + self._patterns[phase].count(samples - self._patterns[phase].start)
        return dict(zip(self.sizes, counted.tolist(), strict=True))

    def past(self, samples: int) -> dict[str, Any]:
        """Return the starts and shares of the phases that the first `samples` samples belong to."""
        phases = self.phases[: int(np.searchsorted(self.starts, samples))]
        return {"phases": [[start, {n: share for n, share in shares.items() if share}] for start, shares in phases]}

    def changes(
        self, stored: Mapping[str, Any], samples: int, batch: int, allowed: Collection[str]
    ) -> tuple[list[str], list[str]]:
        """Compare the phases so far with the stored ones; see `SampleOrder.changes`."""
        before, now = stored.get("phases"), self.past(samples)["phases"]
        if not before or before == now:
            return [], []  # a run without a mixture also had other data, and the fingerprint reports that
        number = next(n for n in range(len(before) + 1) if before[n : n + 1] != now[n : n + 1])
        line = (
            f"data.phases: phase {number + 1} {_describe_phase(before[number:], batch)} in the checkpoint, "
            f"{_describe_phase(now[number:], batch)} now; the run is past step {samples // batch}, and samples already "
            f"used cannot change{_phase_hint(before[number:], self.phases[number:], batch)}"
        )
        if not _KEYS_ALLOWING_OTHER_SHARES.isdisjoint(allowed):
            return [], [f"{line}, but it was allowed"]
        return [f"{line} (allow it: checkpoint.allow_changes=[data.phases])"], []


def _describe_phase(phases: Sequence[Any], batch: int) -> str:
    if not phases:
        return "had not begun"
    start, shares = phases[0]
    parts = ", ".join(f"{name} {share}" for name, share in shares.items())
    return f"begins with step {start // batch + 1} ({parts} of {BLOCK})"


def _phase_hint(before: Sequence[Any], now: Sequence[Any], batch: int) -> str:
    """Return how to keep a phase at its old start, if only its start has moved.

    A phase whose `from` is a share of the run moves when `train.steps` changes.
    """
    if not before or not now or before[0][0] == now[0][0] or before[0][0] % batch:
        return ""
    if before[0][1] != {name: share for name, share in now[0][1].items() if share}:
        return ""
    return f"; `from: {before[0][0] // batch + 1}` names the step it began with, whatever train.steps is"


def _seed_of(name: str, seed: int) -> int:
    """Return the seed of a source's permutation, independent of the other sources."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest(), "little")
