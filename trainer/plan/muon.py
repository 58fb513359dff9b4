"""The costs of an update by Muon: memory of its messages and iterations, collectives, and time.

The code that training uses decides which rank owns which matrix (`trainer.optim.muon.Ownership`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainer.config.schema import MuonSection
from trainer.optim.muon import JORDAN, BucketCosts, Ownership, split_into_matrices
from trainer.plan.kernels import Work
from trainer.plan.trace import ParameterFacts

if TYPE_CHECKING:
    from trainer.plan.estimates import Collective, Rates
    from trainer.plan.step import Layout


class MuonUpdate:
    """The update of Muon's matrices on a mesh of `replicate` x `shard` ranks.

    Sizes and collectives are those of rank 0.
    """

    def __init__(self, parameters: Sequence[ParameterFacts], replicate: int, shard: int, config: MuonSection) -> None:
        shapes = [p.shape for p in parameters]
        matrices = [m for n, p in enumerate(parameters) for m in split_into_matrices(n, p.shape, p.muon_blocks or ())]
        self._itemsize = {"bfloat16": 2, "float32": 4}[config.dtype]
        bucket_numel = config.bucket_mib * 2**20 / self._itemsize
        self._buckets = Ownership(shapes, matrices, replicate, shard, bucket_numel).costs(rank=0)
        self._moment_size = max((p.element_size for p in parameters), default=4)
        self._replicate, self._shard = replicate, shard
        self._has_rows = config.variant == "normuon"

    @property
    def peak_bytes(self) -> int:
        """Bytes of temporaries at the peak; see `trainer.optim.muon._Step.run` for the order of events."""
        size, buckets, no_bucket = self._itemsize, self._buckets, BucketCosts(0, 0, 0, 0, 0, 0, 0, 0)
        peak = 0
        for turn in range(len(buckets) + 2):
            sent, computed, applied = (
                buckets[n] if 0 <= n < len(buckets) else no_bucket for n in (turn, turn - 1, turn - 2)
            )
            gathered = self._gathered(computed)
            scattered = self._scattered(applied)
            peak = max(peak, gathered + scattered + sent.held * self._moment_size + sent.sent_to_owners * size)
            results = computed.owned * size + self._scattered(computed)
            iterations = (3 * computed.batch + 2 * computed.grams) * size
            peak = max(peak, self._gathered(sent) + gathered + scattered + max(results, iterations))
        return peak

    def _gathered(self, bucket: BucketCosts) -> int:
        """Return the bytes of a bucket's message to the owners: the sent buffer and the received one."""
        received = bucket.owned if self._shard > 1 else 0
        return (bucket.sent_to_owners + received) * self._itemsize

    def _scattered(self, bucket: BucketCosts) -> int:
        """Return the bytes of a bucket's message to the holders: the sent buffer and the received one."""
        received = bucket.held if self._shard * self._replicate > 1 else 0
        return (bucket.sent_to_holders + received) * self._itemsize

    @property
    def collectives(self) -> Counter[Collective]:
        """The all-to-alls, with the bytes that rank 0 receives, and NorMuon's all-reduces."""
        from trainer.plan.estimates import Collective

        counts: Counter[Collective] = Counter()
        num_ranks = self._replicate * self._shard
        for bucket in self._buckets:
            if self._shard > 1:
                counts[Collective("all_to_all", "shard", self._shard, bucket.owned * self._itemsize)] += 1
                if self._has_rows:
                    counts[Collective("all_reduce", "shard", self._shard, bucket.num_matrices * 4)] += 1
            if num_ranks > 1:
                counts[Collective("all_to_all", "world", num_ranks, bucket.held * self._itemsize)] += 1
        return counts

    def seconds(self, layout: Layout, rates: Rates) -> float:
        """Return the time of the update besides reading and writing the weights and moments.

        Messages overlap with the iterations of other buckets, except for the first and the last one.
        """
        seconds = 0.0
        for bucket in self._buckets:
            work = Work("matmul", bucket.flops, 6 * len(JORDAN) * bucket.owned * self._itemsize, self._itemsize)
            seconds += rates.kernel(work)
        if self._buckets and self._replicate * self._shard > 1:
            first, last = self._buckets[0], self._buckets[-1]
            if self._shard > 1:
                size = first.owned * self._itemsize
                seconds += rates.collective("all_to_all", layout, "shard", self._shard, size)
            size = last.held * self._itemsize
            seconds += rates.collective("all_to_all", layout, "world", self._replicate * self._shard, size)
        return seconds
