"""Downloads shards in a background thread before they are needed; the order of the samples is known in advance."""

from __future__ import annotations

import contextlib
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from trainer.data.remote.cache import CacheFull, RemoteFile, ShardCache
from trainer.data.remote.shard import RemoteShard
from trainer.data.shards import Shard, ShardError

_SAMPLES = 4096
"""Number of samples to look ahead, rounded up to complete steps."""

_PAUSE_S = 1.0
"""Seconds until the next attempt if the cache is full; other processes may have evicted files meanwhile."""

Samples = NDArray[np.int64]


@dataclass(frozen=True)
class _Step:
    """The shards that a step needs: the names for all ranks, and this rank's files in the order of its samples."""

    names: frozenset[str]
    files: Sequence[RemoteFile]


def prefetcher_for(
    shards: Sequence[Shard], shards_of: Callable[[Samples], list[int]], steps: Iterator[Samples], rank_slice: slice
) -> ShardPrefetcher:
    """Return the prefetcher for those of `shards` that are remote.

    shards_of: maps samples to the positions of their remote shards, in order.
    """
    remote_shards = [shard for shard in shards if isinstance(shard, RemoteShard)]
    items = [shard.tokens for shard in remote_shards]
    return ShardPrefetcher(
        remote_shards[0].location.cache, steps, rank_slice, lambda samples: [items[n] for n in shards_of(samples)]
    )


class ShardPrefetcher:
    """Prefetches the files of upcoming steps.  The thread runs while samples are taken from `follow`.

    steps: the samples of each step, for all ranks.  rank_slice: this rank's slice of a step's samples.  items_of: maps
    samples to their files, in order.
    """

    def __init__(
        self,
        cache: ShardCache,
        steps: Iterator[Samples],
        rank_slice: slice,
        items_of: Callable[[Samples], list[RemoteFile]],
    ) -> None:
        self._cache, self._steps, self._rank_slice, self._items_of = cache, steps, rank_slice, items_of
        self._steps_ahead: deque[_Step] = deque()
        self._next: dict[str, int] = {}
        self._num_taken = 0
        self._changed = threading.Condition()
        self._is_closed = False
        self._look_ahead()
        cache.add_forecast(self)

    def steps_until_needed(self, name: str) -> float:
        """Return in how many steps a file is needed."""
        return self._next.get(name, math.inf)

    def follow(self, indices: Iterator[Samples]) -> Iterator[Samples]:
        """Yield the samples of each micro-batch in `indices` unchanged, and prefetch meanwhile."""
        threading.Thread(target=self._fetch, name="fetch", daemon=True).start()
        try:
            for some in indices:
                yield some
                self._advance(len(some))
        finally:
            with self._changed:
                self._is_closed = True
                self._changed.notify()

    def _advance(self, count: int) -> None:
        self._num_taken += count
        if self._num_taken == self._rank_slice.stop - self._rank_slice.start:
            self._num_taken = 0
            with self._changed:
                self._steps_ahead.popleft()
                self._look_ahead()
                self._changed.notify()

    def _look_ahead(self) -> None:
        size = 0
        for samples in self._steps:
            in_order = self._items_of(samples[self._rank_slice])
            names = frozenset(item.name for item in self._items_of(np.unique(samples)))
            self._steps_ahead.append(_Step(names, list({item.name: item for item in in_order}.values())))
            size = len(samples)
            if len(self._steps_ahead) * size >= _SAMPLES:
                break
        self._next = {name: n for n in range(len(self._steps_ahead) - 1, -1, -1) for name in self._steps_ahead[n].names}

    def _fetch(self) -> None:
        while not self._is_closed:
            with contextlib.suppress(CacheFull, ShardError, OSError):  # errors are raised when the file is needed
                if self._fetch_next():
                    continue
            with self._changed:
                if not self._is_closed:
                    self._changed.wait(_PAUSE_S)
            self._cache.close_evicted()

    def _fetch_next(self) -> bool:
        """Download the first missing file; returns whether there was one."""
        with self._changed:
            steps = list(islice(self._steps_ahead, len(self._steps_ahead)))
        for due, step in enumerate(steps):
            for item in step.files:
                if not self._cache.has(item.name):
                    self._cache.fetch(item, due)
                    return True
        return False
