"""Several sources as one, and the order in which a run goes through what it has.

They are one whose indices count their samples on end, sorted by name, whatever order they were given in.
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
from trainer.data.source import Samples, Source, entries
from trainer.data.usage import check_epochs, usage_by_phase

if TYPE_CHECKING:
    from trainer.config import RunConfig


SOURCE = "source"
"""The entry of a batch that says which source each of its samples is of, as a number by name: int64, (B,)."""


class MixedSource(Source):
    """Several sources by name as one: the samples of the first by name, then those of the next."""

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self.sources = dict(sorted(sources.items()))
        first = next(iter(self.sources.values()))
        self.seq_len, self.vocab_size, self.tokenizer = first.seq_len, first.vocab_size, first.tokenizer
        self.checks_ids = all(source.checks_ids for source in self.sources.values())
        self.waits_for_storage = all(source.waits_for_storage for source in self.sources.values())
        self.is_here = all(source.is_here for source in self.sources.values())
        self.shards = [shard for source in self.sources.values() for shard in source.shards]
        self._starts = np.cumsum([0, *map(len, self.sources.values())])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def batch(self, indices: NDArray[np.int64]) -> Samples:
        """Return the samples at `indices`, and as `source` the number of each one's source; see `Source.batch`.

        What a sample's source does not give, and others do, is zero.
        """
        indices = np.asarray(indices, dtype=np.int64)
        numbers = np.maximum(0, np.searchsorted(self._starts, indices, side="right") - 1)
        found: dict[str, NDArray[Any]] = {SOURCE: numbers}
        for number, source in enumerate(self.sources.values()):
            rows = numbers == number
            if rows.any():
                own = np.where(indices[rows] < 0, -1, indices[rows] - self._starts[number])
                for name, entry in entries(source.batch(own)).items():
                    whole = found.setdefault(name, np.zeros((len(indices), *entry.shape[1:]), entry.dtype))
                    whole[rows] = entry
        return found

    def follow(
        self, indices: Iterator[NDArray[np.int64]], steps: Iterator[NDArray[np.int64]], own: slice
    ) -> Iterator[NDArray[np.int64]]:
        """Let each source fetch ahead; see `Source.follow`."""
        for number, (source, of_source) in enumerate(
            zip(self.sources.values(), tee(steps, len(self.sources)), strict=True)
        ):
            indices = source.follow(indices, map(partial(self._within, number), of_source), own)
        return indices

    def _within(self, number: int, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return samples as one source numbers them, and -1 for those of others."""
        start, stop = self._starts[number : number + 2]
        return np.where((indices >= start) & (indices < stop), indices - start, -1)

    @property
    def facts(self) -> Mapping[str, float]:
        """Those of each source, with its name behind theirs."""
        return {f"{fact}_{name}": value for name, own in self.sources.items() for fact, value in own.facts.items()}

    @property
    def sentence(self) -> str:
        """Those of the sources, a line each."""
        return "\n".join(f"{name}: {own.sentence}" for name, own in self.sources.items() if own.sentence)

    @property
    def attended(self) -> float | None:  # type: ignore[override]
        """The mean of the sources', by their sizes; None where one has none."""
        of_each = [source.attended for source in self.sources.values()]
        sizes = [len(source) for source in self.sources.values()]
        known = [length * size for length, size in zip(of_each, sizes, strict=True) if length is not None]
        return sum(known) / sum(sizes) if len(known) == len(sizes) else None

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """Those of the sources, and what they amount to together."""
        own = {name: source.fingerprint for name, source in self.sources.items()}
        content = hashlib.blake2b(repr(own).encode(), digest_size=8).hexdigest()
        return Fingerprint(len(self), content=content, sources=own)


def find_order(source: Source, config: RunConfig) -> SampleOrder:
    """Return the order in which a run goes through its training data.

    Raises UserError if that would repeat a source more often than `data.max_epochs`.
    """
    order: SampleOrder = Permutation(len(source), config.data.seed)
    if isinstance(source, MixedSource):
        sizes = {name: len(own) for name, own in source.sources.items()}
        order = Mixture(sizes, find_phases(config), config.data.seed)
    batch, steps = config.train.global_batch_size, config.train.steps
    check_epochs(config.data, usage_by_phase(order, batch, steps, source.seq_len))
    return order


def evenly_spaced_indices(source: Source, num_samples: int) -> NDArray[np.int64]:
    """Return the samples of an evaluation: the first ones, of several sources each in proportion to its size.

    Shape (num_samples,); a function of the sizes alone.
    """
    if not isinstance(source, MixedSource):
        return np.arange(num_samples)
    places = [(np.arange(len(own)) + 0.5) / len(own) for own in source.sources.values()]
    return np.argsort(np.concatenate(places), kind="stable")[:num_samples]
