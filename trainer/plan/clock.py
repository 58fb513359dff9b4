"""The time of a step: kernels on one stream, collectives on three others, each waiting where FSDP2 lets it wait.

The host is taken to be ahead of the device; what it needs at least is reported beside it.  Reference for the streams:
torch.distributed.fsdp, FSDPCommContext and the notes there; for collectives: Patarasuk and Yuan 2009, "Bandwidth
optimal all-reduce algorithms for clusters of workstations".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainer.optim.optimizer import AVERAGE_SIZE
from trainer.plan.kernels import Work
from trainer.plan.step import Axis, Kind, Layout, Step
from trainer.plan.trace import Segment, Trace


@dataclass(frozen=True)
class Rates:
    """Rates of a machine: FLOP/s by the bytes of an element, bytes/s, seconds.  Measured, or shares of a sheet."""

    matmul: dict[int, float]
    attention: dict[int, float]
    memory: float
    """Bytes read and written a second by what only moves numbers."""
    optimizer: float
    """The same for the fused optimizer."""
    kernel_s: float
    """Least time from one kernel to the next on the device."""
    host_s: float
    """Host time to issue one operator."""
    link: float
    """Bytes a second into one rank from the others of its node."""
    network: float
    """Bytes a second into one rank from other nodes."""
    link_latency_s: float
    network_latency_s: float
    ranks_per_node: int
    taken_by_collectives: float = 0.0
    """Share of a device that a collective keeps kernels from while it runs."""

    def kernel(self, work: Work) -> float:
        """Return the seconds of one kernel: as the roofline has it (Williams et al. 2009)."""
        rates = {"matmul": self.matmul, "attention": self.attention}.get(work.kind)
        compute_s = 0.0
        if rates:
            size = min(work.element_size, 4)
            compute_s = work.flops / rates.get(size, rates[2])  # without products in float8, as in bfloat16
        return max(compute_s, work.num_bytes / self.memory, self.kernel_s)

    def collective(self, operation: str, layout: Layout, axis: Axis, num_ranks: int, num_bytes: int) -> float:
        """Return the seconds of one collective over `num_ranks` ranks of an axis of the mesh.

        Ranks are numbered along `shard` first.  What crosses nodes goes through each rank's own card; a ring moves
        (n - 1) / n of the bytes through each rank, an all-reduce twice that.
        """
        stride = layout.shard if axis == "replicate" else 1
        within = max(1, min(num_ranks, self.ranks_per_node // stride))
        num_nodes = -(-num_ranks // within)
        rounds = 2 if operation == "all_reduce" else 1
        cards = 1 if operation == "all_to_all" else within  # what a rank sends to others is its own
        inside_s = num_bytes * (within - 1) / within / self.link if within > 1 else 0.0
        outside_s = num_bytes * (num_nodes - 1) / num_nodes / (cards * self.network) if num_nodes > 1 else 0.0
        latency_s = self.link_latency_s * math.log2(max(2, within)) + self.network_latency_s * math.log2(num_nodes)
        return rounds * (max(inside_s, outside_s) + latency_s)


@dataclass(frozen=True)
class StepTime:
    """The seconds of one step, and where they go."""

    total_s: float
    compute_s: float
    """Kernels of forward and backward, slowed down by collectives that run beside them."""
    optimizer_s: float
    copy_s: float
    """Copies into and out of the collectives' buffers."""
    communication_s: float
    """Collectives, hidden or not."""
    exposed_s: float
    """The part of it for which the kernels had to wait."""
    host_s: float
    """What the host needs to issue it all: the step can be no shorter."""


class _Clock:
    """Times of the streams.  What is said of `repeats` micro-batches is added up when each of them ends."""

    def __init__(self, layout: Layout, rates: Rates) -> None:
        self._layout, self._rates = layout, rates
        self._kernels: dict[tuple[tuple[Work, int], ...], tuple[float, float, int]] = {}
        self._now = self._gathers_free = self._gathers_may = self._scatters_free = self._sums_free = 0.0
        self._gathered: dict[int, float] = {}
        self._copied_before: float | None = None
        self._last_scatter: float | None = None
        self._repeats = 1
        self._started = 0.0
        self.total_s = self.compute_s = self.copy_s = self.communication_s = self.exposed_s = self.host_s = 0.0

    def begin(self, repeats: int) -> None:
        self._repeats, self._started = repeats, self._now

    def compute(self, segment: Segment, unit: int, is_backward: bool, accumulates: bool) -> None:
        if segment.work not in self._kernels:
            self._kernels[segment.work] = self._times_of(segment)
        seconds, sent_s, num_kernels = self._kernels[segment.work]
        self._now += seconds + sent_s
        self.compute_s += self._repeats * seconds
        self.exposed_s += self._repeats * sent_s  # kernels wait for what is sent in their midst
        self._communicates(sent_s)
        self.host_s += self._repeats * num_kernels * self._rates.host_s

    def _times_of(self, segment: Segment) -> tuple[float, float, int]:
        """Return the seconds of a segment's kernels, those of the collectives between them, and how many all are."""
        kernels_s = sent_s = 0.0
        layout = self._layout
        for work, count in segment.work:
            if work.operation is None:
                kernels_s += count * self._rates.kernel(work)
            else:
                num_ranks, num_bytes = layout.context, work.num_bytes
                sent_s += count * self._rates.collective(work.operation, layout, "context", num_ranks, num_bytes)
        return kernels_s, sent_s, sum(count for _, count in segment.work)

    def gather(self, unit: int, axis: Axis, num_ranks: int, num_bytes: int) -> None:
        seconds = self._rates.collective("all_gather", self._layout, axis, num_ranks, num_bytes)
        start = max(self._gathers_free, self._gathers_may)
        self._gathered[unit] = self._gathers_free = start + num_bytes // num_ranks * 2 / self._rates.memory + seconds
        self._communicates(seconds)

    def wait_for_gather(self, unit: int, num_bytes: int, is_forward: bool) -> None:
        self._wait_until(self._gathered.pop(unit, 0.0))
        if is_forward and self._copied_before is not None:
            self._gathers_may = max(self._gathers_may, self._copied_before)
        self._copy(num_bytes)
        if is_forward:
            self._copied_before = self._now
        else:
            self._gathers_may = max(self._gathers_may, self._now)

    def reduce(self, unit: int, scattered: int, reduced: int) -> None:
        layout, rates = self._layout, self._rates
        if self._last_scatter is not None:  # its buffer is given back first
            self._wait_until(self._last_scatter)
        self._copy(scattered)
        self._scatters_free = max(self._scatters_free, self._now)
        if layout.shard > 1:
            seconds = rates.collective("reduce_scatter", layout, "shard", layout.shard, scattered)
            self._scatters_free += seconds
            self._communicates(seconds)
        self._last_scatter = self._scatters_free
        if layout.replicate > 1 and reduced:
            seconds = rates.collective("all_reduce", layout, "replicate", layout.replicate, reduced)
            self._sums_free = max(self._sums_free, self._scatters_free) + seconds
            self._communicates(seconds)

    def finish_backward(self) -> None:
        self._wait_until(max(self._scatters_free, self._sums_free))
        self._last_scatter = self._copied_before = None
        self.total_s += self._repeats * (self._now - self._started)

    def _wait_until(self, moment: float) -> None:
        self.exposed_s += self._repeats * max(0.0, moment - self._now)
        self._now = max(self._now, moment)

    def _copy(self, num_bytes: int) -> None:
        seconds = 2 * num_bytes / self._rates.memory
        self._now += seconds
        self.copy_s += self._repeats * seconds

    def _communicates(self, seconds: float) -> None:
        self.communication_s += self._repeats * seconds

    def allocate(self, kind: Kind, num_bytes: int) -> None: ...

    def free(self, kind: Kind, num_bytes: int) -> None: ...


def time_of(trace: Trace, layout: Layout, num_micro_batches: int, rates: Rates) -> StepTime:
    """Return the time of one step."""
    clock = _Clock(layout, rates)
    Step(trace, layout, num_micro_batches, clock).run()
    parameters = [p for unit in trace.units for p in unit.parameters if p.is_trained]
    shards = [(p, p.numel / layout.shard) for p in parameters]
    # Their norm reads gradients; the step reads weight and gradient, writes the weight, and torch's the gradient as it
    # clips it, and does both with each moment; an average reads the weight, and does both with itself.
    average = layout.averages / rates.memory
    optimizer_s = sum(
        2 * numel * p.element_size / rates.memory
        + numel * (p.element_size + 2 * AVERAGE_SIZE) * average
        + numel * (3 * p.element_size + 2 * p.moments * p.moment_size) / rates.optimizer
        for p, numel in shards
    )
    slowed_s = rates.taken_by_collectives * max(0.0, clock.communication_s - clock.exposed_s)
    total_s = max(clock.total_s + slowed_s + optimizer_s, clock.host_s)
    return StepTime(
        total_s,
        clock.compute_s + slowed_s,
        optimizer_s,
        clock.copy_s,
        clock.communication_s,
        min(clock.exposed_s, clock.communication_s),
        clock.host_s,
    )
