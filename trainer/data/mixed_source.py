"""Combines several sources into one, and chooses the order in which a run reads its samples.

The combined source concatenates its sources sorted by name, regardless of the order in which they were given.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import cached_property, partial
from itertools import tee
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from trainer.config import find_phases
from trainer.data.fingerprint import Fingerprint
from trainer.data.mixture import Mixture
from trainer.data.sample_order import Permutation, SampleOrder
from trainer.data.source import Samples, Source, as_mapping
from trainer.data.usage import check_epochs, usage_by_phase

if TYPE_CHECKING:
    from trainer.config import RunConfig


SOURCE = "source"
"""Name of the batch entry with the index of each sample's source, counted in name order: int64, (B,)."""


class MixedSource(Source):
    """Concatenation of several sources, in name order."""

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self.sources = dict(sorted(sources.items()))
        first = next(iter(self.sources.values()))
        self.seq_len, self.vocab_size, self.tokenizer = first.seq_len, first.vocab_size, first.tokenizer
        self.checks_ids = all(source.checks_ids for source in self.sources.values())
        self.waits_for_storage = all(source.waits_for_storage for source in self.sources.values())
        self.is_local = all(source.is_local for source in self.sources.values())
        self.shards = [shard for source in self.sources.values() for shard in source.shards]
        self._starts = np.cumsum([0, *map(len, self.sources.values())])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def batch(self, indices: NDArray[np.int64]) -> Samples:
        """Return the samples at `indices`, with the index of each one's source as `source`; see `Source.batch`.

        An entry that only some of the sources provide is zero for samples of the others.
        """
        indices = np.asarray(indices, dtype=np.int64)
        numbers = np.maximum(0, np.searchsorted(self._starts, indices, side="right") - 1)
        found: dict[str, NDArray[Any]] = {SOURCE: numbers}
        for number, source in enumerate(self.sources.values()):
            rows = numbers == number
            if rows.any():
                local = np.where(indices[rows] < 0, -1, indices[rows] - self._starts[number])
                for name, entry in as_mapping(source.batch(local)).items():
                    combined = found.setdefault(name, np.zeros((len(indices), *entry.shape[1:]), entry.dtype))
                    combined[rows] = entry
        return found

    def follow(
        self, indices: Iterator[NDArray[np.int64]], steps: Iterator[NDArray[np.int64]], rank_slice: slice
    ) -> Iterator[NDArray[np.int64]]:
        """Let each source prefetch; see `Source.follow`."""
        for number, (source, of_source) in enumerate(
            zip(self.sources.values(), tee(steps, len(self.sources)), strict=True)
        ):
            indices = source.follow(indices, map(partial(self._within, number), of_source), rank_slice)
        return indices

    def _within(self, number: int, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return indices local to one source, with -1 for samples of other sources."""
        start, stop = self._starts[number : number + 2]
        return np.where((indices >= start) & (indices < stop), indices - start, -1)

    @property
    def facts(self) -> Mapping[str, float]:
        """The facts of all sources, with the source's name appended to each key."""
        return {
            f"{fact}_{name}": value for name, source in self.sources.items() for fact, value in source.facts.items()
        }

    @property
    def sentence(self) -> str:
        """The sentences of the sources, one per line."""
        return "\n".join(f"{name}: {source.sentence}" for name, source in self.sources.items() if source.sentence)

    @property
    def attended(self) -> float | None:  # type: ignore[override]
        """The mean over the sources, weighted by their sizes; None if any of them has None."""
        of_each = [source.attended for source in self.sources.values()]
        sizes = [len(source) for source in self.sources.values()]
        known = [length * size for length, size in zip(of_each, sizes, strict=True) if length is not None]
        return sum(known) / sum(sizes) if len(known) == len(sizes) else None

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """The fingerprints of the sources, with a digest over all of them."""
        fingerprints = {name: source.fingerprint for name, source in self.sources.items()}
        content = hashlib.blake2b(repr(fingerprints).encode(), digest_size=8).hexdigest()
        return Fingerprint(len(self), content=content, sources=fingerprints)


def find_order(source: Source, config: RunConfig) -> SampleOrder:
    """Return the order in which a run reads its training data.

    Raises UserError if the run would repeat a source more often than `data.max_epochs`.
    """
    order: SampleOrder = Permutation(len(source), config.data.seed)
    if isinstance(source, MixedSource):
        sizes = {name: len(each) for name, each in source.sources.items()}
        order = Mixture(sizes, find_phases(config), config.data.seed)
    batch, steps = config.train.global_batch_size, config.train.steps
    check_epochs(config.data, usage_by_phase(order, batch, steps, source.seq_len))
    return order


def evenly_spaced_indices(source: Source, num_samples: int) -> NDArray[np.int64]:
    """Return the indices of an evaluation's samples, shape (num_samples,).

    These are the first samples, taken from several sources in proportion to their sizes.  Depends on the sizes alone.
    """
    if not isinstance(source, MixedSource):
        return np.arange(num_samples)
    fractions = [(np.arange(len(each)) + 0.5) / len(each) for each in source.sources.values()]
    return np.argsort(np.concatenate(fractions), kind="stable")[:num_samples]
