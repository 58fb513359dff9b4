"""Counts the collectives that FSDP2 issues in one step, by operation, mesh axis and size.

Sizes are those of the full tensor: the output of an all-gather, the input of a reduce-scatter, the buffer of an
all-reduce.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from trainer.plan.step import Axis, Kind, Layout, Operation, Step
from trainer.plan.trace import Segment, Trace


class Collective(NamedTuple):
    """One kind of collective: the operation, the mesh axis, the number of participating ranks, and the bytes."""

    operation: Operation
    axis: Axis
    num_ranks: int
    num_bytes: int


class _CollectiveCounter:
    """Watcher that counts the collectives of a step."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._repeats = 1
        self.counts: Counter[Collective] = Counter()

    def begin(self, repeats: int) -> None:
        self._repeats = repeats

    def gather(self, unit: int, axis: Axis, num_ranks: int, num_bytes: int) -> None:
        self.counts[Collective("all_gather", axis, num_ranks, num_bytes)] += self._repeats

    def reduce(self, unit: int, scattered: int, reduced: int) -> None:
        if self._layout.shard > 1:
            self.counts[Collective("reduce_scatter", "shard", self._layout.shard, scattered)] += self._repeats
        if self._layout.replicate > 1 and reduced:
            self.counts[Collective("all_reduce", "replicate", self._layout.replicate, reduced)] += self._repeats

    def allocate(self, kind: Kind, num_bytes: int) -> None: ...

    def free(self, kind: Kind, num_bytes: int) -> None: ...

    def compute(self, segment: Segment, unit: int, is_backward: bool, accumulates: bool) -> None:
        num_ranks = self._layout.context
        for work, count in segment.work:
            if work.operation is not None:
                self.counts[Collective(work.operation, "context", num_ranks, work.num_bytes)] += count * self._repeats

    def wait_for_gather(self, unit: int, num_bytes: int, is_forward: bool) -> None: ...

    def finish_backward(self) -> None: ...


_NORM_BYTES, _LOSS_BYTES, _MESSAGE_BYTES = 4, 8, 8 * 8


def collectives_of(trace: Trace, layout: Layout, num_micro_batches: int) -> Counter[Collective]:
    """Return the number of times that a step issues each kind of collective.

    Besides FSDP's collectives, this counts the training step's three small all-reduces: the message in which the ranks
    agree (through host memory), the squared gradient norm over the shard axis, and the loss over all ranks.  The
    collectives with which Muon gathers full matrices are not counted.
    """
    watcher = _CollectiveCounter(layout)
    Step(trace, layout, num_micro_batches, watcher).run()
    if layout.num_ranks > 1:
        watcher.counts[Collective("all_reduce", "world", layout.num_ranks, _MESSAGE_BYTES)] += 1
        watcher.counts[Collective("all_reduce", "world", layout.num_ranks, _LOSS_BYTES)] += 1
    if layout.shard > 1:
        watcher.counts[Collective("all_reduce", "shard", layout.shard, _NORM_BYTES)] += 1
    return watcher.counts
