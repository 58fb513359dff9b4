"""The order in which a run reads samples, from one source or from a mixture whose weights may differ between phases.

A position is an index into an endless sequence of samples.  The sample at a position is computed from the position, the
names and sizes of the sources, the seed and the phases so far.  It does not depend on the number of ranks or workers,
and depends on the batch size only through the positions at which phases begin.  Later phases never change the samples
at earlier positions.  The order must never change between versions: runs resume from a position, so a different order
would silently repeat some samples and skip others.

A single source is read in a different pseudorandom permutation in each epoch.  In a mixture, positions are grouped into
blocks of 1024 from the start of each phase, and each complete block contains exactly as many samples from each source
as the source's weight prescribes.  (A phase with the same counts per block as the previous phase continues it.)  Each
phase has one pattern, a shuffled list of 1024 entries that each name a source; each of its blocks is that pattern,
rotated by a pseudorandom offset.  The rotated pattern determines the source at a position.  Let k be the number of
samples from that source at earlier positions; it follows from the pattern and the counts of earlier blocks and phases.
Then the sample at the position is the one at index k in the source's own sequence, which is reshuffled in each epoch.
So all samples of a source are read before any of them is repeated, regardless of the phases.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from trainer.config.phases import MIXTURE_BLOCK, Phase, find_phases
from trainer.data.source import Fingerprint, Samples, Source, as_mapping
from trainer.errors import setting_error

if TYPE_CHECKING:
    from trainer.config.schema import RunConfig


def make_order(source: Source, config: RunConfig) -> SampleOrder:
    """Return the order in which a run reads its training data.

    Raises UserError if the run would read a source more than `data.max_epochs` times (None: no limit), if the phases
    are invalid, or if the weights default to the sizes of the sources and a source is too small (see `Mixture`).
    """
    order: SampleOrder = Permutation(len(source), config.data.seed)
    if isinstance(source, MixedSource):
        sizes = {name: len(component) for name, component in source.sources.items()}
        order = Mixture(sizes, find_phases(config), config.data.seed)
    usages = usage_by_phase(order, config.train.global_batch_size, config.train.steps, source.seq_len)
    most_repeated = max(usages, key=lambda usage: usage.epochs, default=None)
    max_epochs = config.data.max_epochs
    if most_repeated is not None and max_epochs is not None and most_repeated.epochs > max_epochs:
        name = f"source {most_repeated.source}" if most_repeated.source else "the data"
        rule = f"{name} would be read {most_repeated.epochs:.4g} times in {most_repeated.last_step} steps"
        raise setting_error("data.max_epochs", max_epochs, rule, float(f"{most_repeated.epochs * 1.0005:.4g}"))
    return order


class SampleOrder(ABC):
    """Maps each position of an endless sequence to a sample.

    sizes: the number of samples of each source by name; a single source has the name "".
    starts: the positions at which the phases start; the first is 0.
    """

    sizes: Mapping[str, int]
    starts: Sequence[int]

    @abstractmethod
    def at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sample index at each of `positions` (non-negative, any shape)."""

    @abstractmethod
    def counts(self, samples: int) -> dict[str, int]:
        """Return the number of samples of each source among the first `samples` samples."""

    @abstractmethod
    def order_state(self, samples: int) -> dict[str, Any]:
        """Return the few values that a checkpoint stores about the order of the first `samples` samples."""

    @abstractmethod
    def changes(
        self, stored: Mapping[str, Any], samples: int, samples_per_step: int, allowed: Collection[str]
    ) -> tuple[list[str], list[str]]:
        """Compare `order_state(samples)` with its stored value.

        samples_per_step: the global batch size, for messages.
        allowed: configuration keys and sections that may change.

        Returns two lists with a line per change: changes that forbid resuming, and changes that `allowed` permits.
        """


class Permutation(SampleOrder):
    """The order of a single source: all samples once per epoch, shuffled with the seed."""

    def __init__(self, num_samples: int, seed: int) -> None:
        self.sizes, self.starts = {"": num_samples}, [0]
        self._num_samples, self._seed = num_samples, seed

    def at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sample index at each of `positions` (non-negative, any shape)."""
        return sample_at(positions, self._num_samples, self._seed)

    def counts(self, samples: int) -> dict[str, int]:
        """Return `samples` for the only source."""
        return {"": samples}

    def order_state(self, samples: int) -> dict[str, Any]:
        """Return an empty mapping: the data and the seed determine the order."""
        return {}

    def changes(
        self, stored: Mapping[str, Any], samples: int, samples_per_step: int, allowed: Collection[str]
    ) -> tuple[list[str], list[str]]:
        """Return two empty lists; see `order_state`."""
        return [], []


_KEYS_ALLOWING_OTHER_WEIGHTS = frozenset({"data", "data.weights", "data.phases"})
"""Keys in `checkpoint.allow_changes` that permit different weights for samples already read."""


def samples_per_block(weights: Mapping[str, float]) -> dict[str, int]:
    """Return the number of samples of each source in a block (largest-remainder method; ties go to the first name)."""
    total = sum(map(Fraction, weights.values()))
    exact = {name: Fraction(weight) * MIXTURE_BLOCK / total for name, weight in weights.items()}
    counts = {name: int(count) for name, count in exact.items()}
    by_remainder = sorted(exact, key=lambda name: (counts[name] - exact[name], name))
    for name in by_remainder[: MIXTURE_BLOCK - sum(counts.values())]:
        counts[name] += 1
    return counts


def _counts_by_size(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return `samples_per_block` with the sources' sizes as weights.  Raises UserError if a source gets no samples."""
    counts = samples_per_block(sizes)
    for name, count in counts.items():
        if not count:
            rule = (
                f"by size, source {name} ({sizes[name]} of {sum(sizes.values())} samples) has fewer than one "
                f"sample in {MIXTURE_BLOCK}"
            )
            example = dict(sizes) | {name: -(-sum(sizes.values()) // (MIXTURE_BLOCK - 1))}
            raise setting_error("data.weights", None, rule, proposal=example)
    return counts


class _PhasePattern:
    """A phase: from position `start` on, each complete block has `block_counts[j]` samples of source j."""

    def __init__(self, start: int, block_counts: NDArray[np.int64], seed: int) -> None:
        self.start, self.block_counts, self._seed = start, block_counts, seed + 1
        slots = sample_at(start * MIXTURE_BLOCK + np.arange(MIXTURE_BLOCK), MIXTURE_BLOCK, seed)
        # Tiled twice, so that a block can start at any offset and still cover the complete pattern.
        self._pattern = np.tile(np.searchsorted(np.cumsum(block_counts), slots, side="right"), 2)
        is_of_source = self._pattern[:, None] == np.arange(len(block_counts))
        self._counts_before = np.concatenate(
            [np.zeros((1, len(block_counts)), np.int64), np.cumsum(is_of_source, axis=0)]
        )

    def locate(self, offsets: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the source at each offset in the phase, and the number of samples of that source before it."""
        blocks, offsets_in_block = np.divmod(offsets, MIXTURE_BLOCK)
        pattern_starts = self._pattern_offsets(blocks)
        sources = self._pattern[pattern_starts + offsets_in_block]
        num_before = (
            self._counts_before[pattern_starts + offsets_in_block, sources]
            - self._counts_before[pattern_starts, sources]
        )
        return sources, blocks * self.block_counts[sources] + num_before

    def count(self, length: int) -> NDArray[np.int64]:
        """Return the number of samples of each source among the first `length` positions of the phase."""
        block, offset = divmod(length, MIXTURE_BLOCK)
        (pattern_start,) = self._pattern_offsets(np.array([block]))
        return (
            block * self.block_counts + self._counts_before[pattern_start + offset] - self._counts_before[pattern_start]
        )

    def _pattern_offsets(self, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the offset in the pattern at which each block starts, pseudorandom for each block."""
        return sample_at((self.start + blocks) * MIXTURE_BLOCK, MIXTURE_BLOCK, self._seed)


class Mixture(SampleOrder):
    """The order of a mixture.  Sample indices are those of `MixedSource`, which concatenates its sources in name order.

    Raises UserError if the weights default to the sizes and a source is too small for one sample per block.
    """

    def __init__(self, sizes: Mapping[str, int], phases: Sequence[Phase], seed: int) -> None:
        self.sizes = dict(sorted(sizes.items()))
        names = (f"{seed} {name}".encode() for name in self.sizes)
        self._seeds = [int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") for name in names]
        """The seed of each source's permutation, independent of the other sources."""
        self._index_starts = np.cumsum([0, *self.sizes.values()])
        self.phases: list[tuple[int, dict[str, int]]] = []
        """The start of each phase, and its number of samples per block by source."""
        for phase in phases:
            weights = phase.weights
            given = _counts_by_size(self.sizes) if weights is None else samples_per_block(dict(sorted(weights.items())))
            counts = {name: given.get(name, 0) for name in self.sizes}
            if not self.phases or counts != self.phases[-1][1]:  # otherwise it continues the previous phase
                self.phases.append((phase.start, counts))
        self._patterns = [_PhasePattern(start, np.array(list(counts.values())), seed) for start, counts in self.phases]
        self.starts = [start for start, _ in self.phases]
        totals = [np.zeros(len(sizes), dtype=np.int64)]
        for pattern, end in zip(self._patterns, self.starts[1:], strict=False):
            totals.append(totals[-1] + pattern.count(end - pattern.start))
        self._totals = totals

    def at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sample index at each of `positions` (non-negative, any shape)."""
        flat = np.asarray(positions, dtype=np.int64).ravel()
        sources, numbers = np.empty_like(flat), np.empty_like(flat)
        phases = np.searchsorted(self.starts, flat, side="right") - 1
        for phase in np.unique(phases):
            mask, pattern = phases == phase, self._patterns[phase]
            sources[mask], numbers_in_phase = pattern.locate(flat[mask] - pattern.start)
            numbers[mask] = numbers_in_phase + self._totals[phase][sources[mask]]
        indices = np.empty_like(flat)
        for source, (size, seed) in enumerate(zip(self.sizes.values(), self._seeds, strict=True)):
            mask = sources == source
            indices[mask] = self._index_starts[source] + sample_at(numbers[mask], size, seed)
        return indices.reshape(np.shape(positions))

    def counts(self, samples: int) -> dict[str, int]:
        """Return the number of samples of each source among the first `samples` samples."""
        phase = int(np.searchsorted(self.starts, samples, side="right")) - 1
        counted = self._totals[phase] + self._patterns[phase].count(samples - self._patterns[phase].start)
        return dict(zip(self.sizes, counted.tolist(), strict=True))

    def order_state(self, samples: int) -> dict[str, Any]:
        """Return the phases of the first `samples` samples: the start of each, and its samples per block by source."""
        phases = self.phases[: int(np.searchsorted(self.starts, samples))]
        return {"phases": [[start, {n: count for n, count in counts.items() if count}] for start, counts in phases]}

    def changes(
        self, stored: Mapping[str, Any], samples: int, samples_per_step: int, allowed: Collection[str]
    ) -> tuple[list[str], list[str]]:
        """Compare the phases so far with the stored ones; see `SampleOrder.changes`."""
        stored_phases, phases = stored.get("phases"), self.order_state(samples)["phases"]
        if not stored_phases or stored_phases == phases:
            return [], []  # a run without a mixture had other data, which the fingerprint reports
        changed = next(n for n in range(len(stored_phases) + 1) if stored_phases[n : n + 1] != phases[n : n + 1])
        before = _describe_phase(stored_phases[changed:], samples_per_step)
        now = _describe_phase(phases[changed:], samples_per_step)
        hint = _phase_hint(stored_phases[changed:], self.phases[changed:], samples_per_step)
        message = (
            f"data.phases: phase {changed + 1} {before} in the checkpoint, but {now} now; the run is past step "
            f"{samples // samples_per_step}, and samples already used cannot change{hint}"
        )
        if not _KEYS_ALLOWING_OTHER_WEIGHTS.isdisjoint(allowed):
            return [], [f"{message} (allowed by checkpoint.allow_changes)"]
        return [f"{message} (allow it: checkpoint.allow_changes=[data.phases])"], []


def _describe_phase(phases: Sequence[Any], samples_per_step: int) -> str:
    if not phases:
        return "has not begun"
    start, counts = phases[0]
    parts = ", ".join(f"{name} {count}" for name, count in counts.items())
    return f"begins with step {start // samples_per_step + 1} ({parts} of {MIXTURE_BLOCK})"


def _phase_hint(stored_phases: Sequence[Any], phases: Sequence[Any], samples_per_step: int) -> str:
    """Return advice on how to keep the old start of a phase if only its start has changed, otherwise "".

    The start changes with `train.steps` if `from` is a fraction of the run.
    """
    if not stored_phases or not phases or stored_phases[0][0] == phases[0][0] or stored_phases[0][0] % samples_per_step:
        return ""
    if stored_phases[0][1] != {name: count for name, count in phases[0][1].items() if count}:
        return ""
    return f"; `from: {stored_phases[0][0] // samples_per_step + 1}` keeps its first step, whatever train.steps is"


# -- the permutation of an epoch --------------------------------------------------------------------------------------

_NUM_ROUNDS = 8
"""Number of Feistel rounds.  Luby and Rackoff prove that four are pseudorandom for wide halves; these halves are
narrow, so there are more."""

_MIN_BITS = 6
"""Minimum number of bits in an index.  With one-bit halves, 20,000 permutations of 5 samples were measurably uneven
(chi-square 142 for 16 degrees of freedom); with three-bit halves they are not (22)."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""The increment of splitmix64: 2**64 divided by the golden ratio, made odd."""


def sample_at(positions: NDArray[np.int64], num_samples: int, seed: int) -> NDArray[np.int64]:
    """Return the sample index, below `num_samples`, at each of `positions` (non-negative, any shape).

    Position p is in epoch p // num_samples, and each epoch visits every sample once.  The permutation of an epoch is a
    Feistel network over the smallest power of two that holds the samples, at least 2**_MIN_BITS (Luby and Rackoff 1988,
    "How to construct pseudorandom permutations from pseudorandom functions").  It is applied repeatedly until the
    result is a sample (cycle walking; Black and Rogaway 2002, "Ciphers with arbitrary finite domains").  Memory does
    not depend on `num_samples`, which may be anything from 1 to 2**62.  Above 32 samples, cycle walking takes at most
    two passes through the network on average.
    """
    assert num_samples >= 1, num_samples
    epochs, offsets = np.divmod(np.asarray(positions, dtype=np.int64).ravel(), num_samples)
    keys = _mix(_mix(np.array([seed % 2**64], dtype=np.uint64)) ^ epochs.astype(np.uint64))
    index = offsets.astype(np.uint64)
    num_bits = max(_MIN_BITS, (num_samples - 1).bit_length())
    walking = np.arange(index.size)
    while walking.size:
        index[walking] = _permute(index[walking], keys[walking], num_bits)
        walking = walking[index[walking] >= np.uint64(num_samples)]
    return index.astype(np.int64).reshape(np.shape(positions))


def _permute(values: NDArray[np.uint64], keys: NDArray[np.uint64], num_bits: int) -> NDArray[np.uint64]:
    """Permute numbers of `num_bits` bits: each round XORs a keyed hash of one half into the other half."""
    low_bits = np.uint64(num_bits // 2)
    low_mask = np.uint64((1 << (num_bits // 2)) - 1)
    high_mask = np.uint64((1 << (num_bits - num_bits // 2)) - 1)
    high: NDArray[np.uint64] = values >> low_bits
    low: NDArray[np.uint64] = values & low_mask
    for _ in range(_NUM_ROUNDS // 2):
        keys = _mix(keys)
        high ^= _mix(low ^ keys) & high_mask
        keys = _mix(keys)
        low ^= _mix(high ^ keys) & low_mask
    high <<= low_bits
    high |= low
    return high


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a hash of each value: splitmix64's increment and finalizer (Steele, Lea and Flood 2014)."""
    values = values + _GOLDEN  # wraps around modulo 2**64, as intended
    values ^= values >> np.uint64(30)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


# -- the source of a mixture ------------------------------------------------------------------------------------------


SOURCE = "source"
"""Name of the batch entry with the number of each sample's source, counted in name order: int64, (B,)."""


class MixedSource(Source):
    """Concatenation of several sources, in name order."""

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self.sources = dict(sorted(sources.items()))
        first = next(iter(self.sources.values()))
        self.seq_len, self.vocab_size, self.tokenizer = first.seq_len, first.vocab_size, first.tokenizer
        self.checks_ids = all(source.checks_ids for source in self.sources.values())
        self.waits_for_storage = all(source.waits_for_storage for source in self.sources.values())
        self.shards = [shard for source in self.sources.values() for shard in source.shards]
        self._starts = np.cumsum([0, *map(len, self.sources.values())])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def batch(self, indices: NDArray[np.int64]) -> Samples:
        """Return the samples at `indices`, with the number of each sample's source as `source`; see `Source.batch`.

        An entry that only some sources provide is zero for samples of the other sources.
        """
        indices = np.asarray(indices, dtype=np.int64)
        source_numbers = np.maximum(0, np.searchsorted(self._starts, indices, side="right") - 1)
        entries: dict[str, NDArray[Any]] = {SOURCE: source_numbers}
        for number, source in enumerate(self.sources.values()):
            rows = source_numbers == number
            if rows.any():
                local = np.where(indices[rows] < 0, -1, indices[rows] - self._starts[number])
                for name, entry in as_mapping(source.batch(local)).items():
                    combined = entries.setdefault(name, np.zeros((len(indices), *entry.shape[1:]), entry.dtype))
                    combined[rows] = entry
        return entries

    @property
    def facts(self) -> Mapping[str, float]:
        """The facts of all sources, each key followed by the name of its source."""
        return {
            f"{fact}_{name}": value for name, source in self.sources.items() for fact, value in source.facts.items()
        }

    @property
    def summary(self) -> str:
        """The summaries of the sources, each preceded by the name of its source."""
        return "\n".join(f"{name}: {source.summary}" for name, source in self.sources.items() if source.summary)

    @property
    def attended(self) -> float | None:  # type: ignore[override]
        """The mean of the sources' values, weighted by size; None if any of them is None."""
        lengths = [source.attended for source in self.sources.values()]
        sizes = [len(source) for source in self.sources.values()]
        weighted = [length * size for length, size in zip(lengths, sizes, strict=True) if length is not None]
        return sum(weighted) / sum(sizes) if len(weighted) == len(sizes) else None

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """The fingerprints of the sources, with a digest of all of them."""
        fingerprints = {name: source.fingerprint for name, source in self.sources.items()}
        content = hashlib.blake2b(repr(fingerprints).encode(), digest_size=8).hexdigest()
        return Fingerprint(len(self), content=content, sources=fingerprints)


def eval_sample_indices(source: Source, num_samples: int) -> NDArray[np.int64]:
    """Return the indices of an evaluation's samples, shape (num_samples,).

    These are the first samples.  In a mixture, they are the first samples of each source, in proportion to the sources'
    sizes.
    """
    if not isinstance(source, MixedSource):
        return np.arange(num_samples)
    fractions = [(np.arange(len(component)) + 0.5) / len(component) for component in source.sources.values()]
    return np.argsort(np.concatenate(fractions), kind="stable")[:num_samples]


# -- usage of the sources ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SourceUsage:
    """The samples of one source that are read in one phase.

    source: the source's name, or "" if there is only one source.
    share: the fraction of the phase's samples that come from the source.
    epochs: passes over the source by the end of the phase, including earlier phases.
    """

    first_step: int
    last_step: int
    source: str
    samples: int
    tokens: int
    share: float
    epochs: float


def usage_by_phase(order: SampleOrder, samples_per_step: int, steps: int, seq_len: int) -> list[SourceUsage]:
    """Return the usage of each source in each phase that starts within the first `steps` steps."""
    usages, starts = [], [start for start in order.starts if start < samples_per_step * steps]
    counts_before = order.counts(0)
    for start, end in pairwise([*starts, samples_per_step * steps]):
        counts_after, first, last = order.counts(end), start // samples_per_step + 1, -(-end // samples_per_step)
        for name, count in counts_after.items():
            samples, epochs = count - counts_before[name], count / order.sizes[name]
            tokens, share = samples * seq_len, samples / (end - start)
            usages.append(SourceUsage(first, last, name, samples, tokens, share, epochs))
        counts_before = counts_after
    return usages


def describe_usage(usages: Sequence[SourceUsage]) -> list[str]:
    """Return lines to print at the start of a run: one per phase, then one about repeated sources, if there are any."""
    lines = []
    for first in dict.fromkeys(usage.first_step for usage in usages):
        phase = [usage for usage in usages if usage.first_step == first]
        last_step = phase[0].last_step
        steps = f"steps {first} to {last_step}" if last_step > first else f"step {first}"
        parts = [
            f"{f'{usage.source} {100 * usage.share:.1f}%, ' if usage.source else ''}"
            f"{usage.samples:,} samples (to epoch {usage.epochs:.2f})"
            for usage in phase
            if usage.samples
        ]
        lines.append(f"{steps}: {', '.join(parts)}")
    repeated = {usage.source: usage.epochs for usage in usages if usage.epochs > 1}
    if repeated:
        names = ", ".join(f"{name or 'all'} is read {epochs:.2f} times" for name, epochs in repeated.items())
        lines.append(f"repeats its data: {names}")
    return lines


def epochs(order: SampleOrder, samples: int) -> dict[str, float]:
    """Return the number of passes over each source in the first `samples` samples."""
    return {name: count / order.sizes[name] for name, count in order.counts(samples).items()}
