"""Estimates the memory, the collectives and the time of a Muon update.

A matrix's owner is the rank that orthogonalizes it; its holders are the ranks that store parts of it.  Owners are
assigned by the same code as in training (`trainer.optim.muon.Ownership`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from trainer.config.schema import MuonSection
from trainer.model.placement import Division
from trainer.optim.muon import NEWTON_SCHULZ, BucketCosts, Ownership, split_into_matrices
from trainer.plan.rates import Collective, Rates
from trainer.plan.trace import ParameterInfo

if TYPE_CHECKING:
    from trainer.plan.layout import Layout


class MuonUpdate:
    """The costs of one Muon update on `replicate` x `shard` ranks, for rank 0; the FLOPs are the busiest rank's."""

    def __init__(
        self,
        parameters: Sequence[ParameterInfo],
        divisions: Mapping[str, Division],
        replicate: int,
        shard: int,
        config: MuonSection,
    ) -> None:
        shapes = [p.shape for p in parameters]
        matrices = [m for n, p in enumerate(parameters) for m in split_into_matrices(n, p.shape, p.muon_blocks or ())]
        self._itemsize = {"bfloat16": 2, "float32": 4}[config.dtype]
        bucket_numel = config.bucket_mib * 2**20 / self._itemsize
        ownership = Ownership(shapes, [divisions[p.name] for p in parameters], matrices, replicate, shard, bucket_numel)
        self._buckets = [bucket.costs() for bucket in ownership.buckets(rank=0)]
        self._moment_size = max((p.element_size for p in parameters), default=4)
        self._replicate, self._shard = replicate, shard
        self._is_normuon = config.variant == "normuon"

    @property
    def peak_bytes(self) -> int:
        """Peak size of temporary tensors, in bytes, for the order of operations in `trainer.optim.muon._Step.run`."""
        size, buckets, no_costs = self._itemsize, self._buckets, BucketCosts(0, 0, 0, 0, 0, 0, 0, 0, 0)
        peak = 0
        for stage in range(len(buckets) + 2):
            new, computed, applied = (
                buckets[n] if 0 <= n < len(buckets) else no_costs for n in (stage, stage - 1, stage - 2)
            )
            in_flight = self._gather_bytes(computed) + self._scatter_bytes(applied)
            direction_bytes = new.sent_to_owners * size + new.largest_piece * self._moment_size
            peak = max(peak, in_flight + max(direction_bytes, self._gather_bytes(new)))
            in_flight = self._gather_bytes(new) + self._scatter_bytes(applied)
            rows = (computed.owned if self._shard > 1 else computed.sent_to_owners) * size
            iteration_bytes = rows + (computed.sent_to_holders + 2 * computed.iteration_numel) * size
            peak = max(peak, in_flight + max(iteration_bytes, self._scatter_bytes(computed)))
            update = applied.held * size + (4 * (applied.held + applied.largest_piece) if self._is_normuon else 0)
            peak = max(peak, self._gather_bytes(new) + self._scatter_bytes(computed) + update)
        return peak

    def _gather_bytes(self, bucket: BucketCosts) -> int:
        """Return the bytes of a bucket's exchange with the owners: the send buffer and the receive buffer."""
        received = bucket.owned if self._shard > 1 else 0
        return (bucket.sent_to_owners + received) * self._itemsize

    def _scatter_bytes(self, bucket: BucketCosts) -> int:
        """Return the bytes of a bucket's exchange with the holders: the send buffer and the receive buffer."""
        received = bucket.held if self._shard * self._replicate > 1 else 0
        return (bucket.sent_to_holders + received) * self._itemsize

    @property
    def collectives(self) -> Counter[Collective]:
        """The all-to-alls, with the bytes received by rank 0, and NorMuon's all-reduces."""
        counts: Counter[Collective] = Counter()
        num_ranks = self._replicate * self._shard
        for bucket in self._buckets:
            if self._shard > 1:
                counts[Collective("all_to_all", "shard", self._shard, bucket.owned * self._itemsize)] += 1
                if self._is_normuon:
                    counts[Collective("all_reduce", "shard", self._shard, bucket.num_matrices * 4)] += 1
            if num_ranks > 1:
                counts[Collective("all_to_all", "world", num_ranks, bucket.held * self._itemsize)] += 1
        return counts

    def seconds(self, layout: Layout, rates: Rates) -> float:
        """Return the time of the update in seconds, excluding the reads and writes of weights and moments.

        Messages overlap with the iterations of other buckets, except for the first and the last message.
        """
        flops_per_s = rates.orthogonalize.get(self._itemsize) or rates.matmul.get(self._itemsize, rates.matmul[2])
        seconds = 0.0
        for bucket in self._buckets:
            copied = bucket.held + bucket.sent_to_owners + 2 * bucket.owned + bucket.sent_to_holders
            seconds += bucket.flops / flops_per_s + 2 * copied * self._itemsize / rates.memory
            seconds += (2 * bucket.num_matrices + 2 * len(NEWTON_SCHULZ) * bucket.num_shapes) * rates.kernel_s
        if self._buckets and self._replicate * self._shard > 1:
            first, last = self._buckets[0], self._buckets[-1]
            if self._shard > 1:
                size = first.owned * self._itemsize
                seconds += rates.collective("all_to_all", layout, "shard", self._shard, size)
            size = last.held * self._itemsize
            seconds += rates.collective("all_to_all", layout, "world", self._replicate * self._shard, size)
        return seconds
