"""Estimates the memory, collectives and time of one step.  For each, a `Watcher` observes the simulated step.

Memory: the peak per rank, where in the step it occurs, and its breakdown by kind.

Collectives: how often a step issues each one, by operation, mesh axis, number of ranks and size.  Sizes are those of
the full tensor: the output of an all-gather, the input of a reduce-scatter, the buffer of an all-reduce.  For an
all-to-all, the larger of one rank's send and receive buffers counts; in Muon, rank 0's receive buffer.

Time: kernels and the collectives of context and expert parallelism share one stream; FSDP2's collectives run on three
other streams, and the streams wait for each other as in FSDP2.  The host is assumed to run ahead of the device, but a
step never takes less time than the host needs to issue its operators.  For the streams, see FSDPCommContext in
torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py; for collectives, Patarasuk and Yuan 2009, "Bandwidth optimal
all-reduce algorithms for clusters of workstations".
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import NamedTuple, get_args

from trainer.optim.optimizer import EMA_ELEMENT_SIZE
from trainer.plan.kernels import Work
from trainer.plan.step import Axis, Kind, Layout, Operation, Step, Watcher
from trainer.plan.trace import Segment, Trace


@dataclass(frozen=True)
class MemorySnapshot:
    """The memory in use at one point in a step: the bytes of each kind."""

    place: str
    """A description of the point, such as `backward of layers.3`."""
    by_kind: dict[Kind, int]

    @property
    def total(self) -> int:
        return sum(self.by_kind.values())


@dataclass(frozen=True)
class Memory:
    """One rank's tensor memory over a step, in bytes.

    Includes the optimizer state, which exists from the second step on.
    """

    peak: MemorySnapshot
    curve: tuple[MemorySnapshot, ...]
    """One snapshot per `Segment` of the simulated step, in order, for plotting; empty unless requested."""
    offloaded: int = 0
    """Bytes of host memory that hold the rank's offloaded activations (`train.offload_activations`)."""


_OPTIMIZER_UPDATE = (-1, False)
"""Sentinel for the optimizer's update, in place of a pair (unit, is_backward)."""


class _MemoryWatcher(Watcher):
    """Tracks the live bytes of each kind, and their peak."""

    def __init__(self, trace: Trace, at_rest: dict[Kind, int], with_curve: bool) -> None:
        self._trace, self._with_curve = trace, with_curve
        self._live: dict[Kind, int] = dict.fromkeys(get_args(Kind), 0) | at_rest
        self._total = sum(at_rest.values())
        self._where: tuple[int, bool] | None = None
        self._peak: tuple[tuple[int, bool] | None, dict[Kind, int]] = (None, dict(self._live))
        self._peak_total = self._total
        self.curve: list[MemorySnapshot] = []
        self.offloaded = 0

    def begin(self, repeats: int) -> None:
        self.offloaded = 0  # each micro-batch frees its own

    def offload(self, num_bytes: int) -> None:
        self.offloaded += num_bytes

    def allocate(self, kind: Kind, num_bytes: int) -> None:
        self._live[kind] += num_bytes
        self._total += num_bytes
        if self._total > self._peak_total:
            self._note_peak(0)

    def free(self, kind: Kind, num_bytes: int) -> None:
        self._live[kind] -= num_bytes
        self._total -= num_bytes

    def compute(self, segment: Segment, unit: int, is_backward: bool, accumulates: bool) -> None:
        temporaries = segment.peak_accumulating if accumulates else segment.peak
        self._where = unit, is_backward
        if self._total + temporaries > self._peak_total:
            self._note_peak(temporaries)
        if self._with_curve:
            snapshot = MemorySnapshot(self._name(self._where), self._live_with(temporaries))
            self.curve.append(snapshot)
        self._live["activations"] += segment.net
        self._total += segment.net

    def update(self, num_bytes: int) -> None:
        """Account for the temporaries of the optimizer's update."""
        self._where = _OPTIMIZER_UPDATE
        if self._total + num_bytes > self._peak_total:
            self._note_peak(num_bytes)

    def _live_with(self, temporaries: int) -> dict[Kind, int]:
        return {**self._live, "temporaries": self._live["temporaries"] + temporaries}

    def _note_peak(self, temporaries: int) -> None:
        self._peak_total = self._total + temporaries
        self._peak = self._where, self._live_with(temporaries)

    def _name(self, where: tuple[int, bool] | None) -> str:
        if where is None:
            return "time before the first step"
        if where == _OPTIMIZER_UPDATE:
            return "optimizer update"
        unit, is_backward = where
        return f"{'backward' if is_backward else 'forward'} of {self._trace.units[unit].name}"

    @property
    def peak(self) -> MemorySnapshot:
        where, by_kind = self._peak
        return MemorySnapshot(self._name(where), by_kind)


def memory_of(trace: Trace, layout: Layout, num_micro_batches: int, with_curve: bool = False) -> Memory:
    """Return the memory of one rank over a step on `layout`; `with_curve` also records `Memory.curve`."""
    watcher = _MemoryWatcher(trace, at_rest(trace, layout), with_curve)
    Step(trace, layout, num_micro_batches, watcher).run()
    watcher.update(layout.muon.peak_bytes if layout.muon is not None else 0)
    return Memory(watcher.peak, tuple(watcher.curve), watcher.offloaded)


def at_rest(trace: Trace, layout: Layout) -> dict[Kind, int]:
    """Return the bytes that stay in a rank's device memory between steps, by kind."""
    kinds: dict[Kind, int] = {"buffers and inputs": trace.buffer_bytes + trace.input_bytes}
    if layout.cpu_offload:
        return kinds
    divisions = [(p, layout.division(p)) for unit in trace.units for p in unit.parameters]
    shards = [(p, division.gathered_numel(p.shape) // division.parts) for p, division in divisions]  # with padding
    kinds["parameters"] = (1 + layout.has_reference_model) * sum(numel * p.element_size for p, numel in shards)
    kinds["parameters"] += layout.teacher.num_bytes if layout.teacher is not None else 0
    ema_size = EMA_ELEMENT_SIZE * layout.has_average
    kinds["optimizer"] = sum(
        int(numel * (p.num_moments * p.moment_size + ema_size * p.is_trained)) for p, numel in shards
    )
    return kinds


# ---------------------------------------------------------------------------------------------------------------
# Collectives


class Collective(NamedTuple):
    """One kind of collective: the operation, the mesh axis, the number of participating ranks, and the size."""

    operation: Operation
    axis: Axis
    num_ranks: int
    num_bytes: int


class _CollectiveCounter(Watcher):
    """Counts the collectives of a step."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._repeats = 1
        self.counts: Counter[Collective] = Counter()

    def begin(self, repeats: int) -> None:
        self._repeats = repeats

    def gather(self, group: int, axis: Axis, num_ranks: int, num_bytes: int) -> None:
        self.counts[Collective("all_gather", axis, num_ranks, num_bytes)] += self._repeats

    def reduce(self, axis: Axis, num_ranks: int, scattered: int, reduced: int, rearranged: int) -> None:
        if num_ranks > 1:
            self.counts[Collective("reduce_scatter", axis, num_ranks, scattered)] += self._repeats
        if self._layout.replicate > 1 and reduced:
            self.counts[Collective("all_reduce", "replicate", self._layout.replicate, reduced)] += self._repeats

    def compute(self, segment: Segment, unit: int, is_backward: bool, accumulates: bool) -> None:
        for work, count in segment.work:
            if work.operation is not None:
                num_ranks = self._layout.group_size(work.axis)
                self.counts[Collective(work.operation, work.axis, num_ranks, work.num_bytes)] += count * self._repeats


_NORM_BYTES, _LOSS_BYTES, _MESSAGE_BYTES = 4, 8, 6 * 8
"""Sizes of the all-reduces of the gradient norm, the loss, and what the ranks agree on (`Trainer.agree`)."""


def collectives_of(trace: Trace, layout: Layout, num_micro_batches: int) -> Counter[Collective]:
    """Return the number of times that a step issues each kind of collective.

    These are the collectives of FSDP and of context and expert parallelism; the training step's three small all-reduces
    (what the ranks agree on, through host memory; the squared gradient norm over the shard axis; the loss over all
    ranks); the all-reduce of the expert counts; and those of Muon, with the sizes that rank 0 receives.
    """
    watcher = _CollectiveCounter(layout)
    Step(trace, layout, num_micro_batches, watcher).run()
    if layout.num_ranks > 1:
        watcher.counts[Collective("all_reduce", "world", layout.num_ranks, _MESSAGE_BYTES)] += 1
        watcher.counts[Collective("all_reduce", "world", layout.num_ranks, _LOSS_BYTES)] += 1
        if trace.expert_count_bytes:
            watcher.counts[Collective("all_reduce", "world", layout.num_ranks, trace.expert_count_bytes)] += 1
    if layout.shard > 1:
        watcher.counts[Collective("all_reduce", "shard", layout.shard, _NORM_BYTES)] += 1
    if layout.muon is not None:
        watcher.counts.update(layout.muon.collectives)
    return watcher.counts


# ---------------------------------------------------------------------------------------------------------------
# Time


@dataclass(frozen=True)
class Rates:
    """Rates of a machine, measured or estimated from its data sheet."""

    matmul: dict[int, float]
    """FLOP/s of matmuls, by `Work.element_size`."""
    attention: dict[int, float]
    """FLOP/s of attention, by `Work.element_size`."""
    memory: float
    """Bytes read and written per second by memory-bound kernels."""
    optimizer: float
    """Bytes read and written per second by the fused optimizer."""
    kernel_s: float
    """Shortest time between the starts of two kernels on the device."""
    host_s: float
    """Host time to issue one operator."""
    host: float
    """Bytes per second between one device and host memory, in either direction."""
    link: float
    """Bytes per second into one rank from the other ranks of its node."""
    network: float
    """Bytes per second into one rank from other nodes."""
    link_latency_s: float
    network_latency_s: float
    ranks_per_node: int
    taken_by_collectives: float = 0.0
    """Fraction of the device that is unavailable to kernels while a collective runs."""
    orthogonalize: dict[int, float] = field(default_factory=dict)
    """FLOP/s of Muon's Newton-Schulz iterations, by `Work.element_size`; where missing, `matmul` is used."""

    def kernel(self, work: Work) -> float:
        """Return the time of one kernel in seconds, by the roofline model (Williams et al. 2009)."""
        rates = {"matmul": self.matmul, "grouped": self.matmul, "attention": self.attention}.get(work.kind)
        compute_s = 0.0
        if rates:
            size = min(work.element_size, 4)
            compute_s = work.flops / rates.get(size, rates[2])  # without a float8 rate, use the bfloat16 rate
        return max(compute_s, work.num_bytes / self.memory, self.kernel_s)

    def collective(self, operation: str, layout: Layout, axis: Axis, num_ranks: int, num_bytes: int) -> float:
        """Return the time in seconds of one collective over `num_ranks` ranks along an axis of the mesh.

        Ranks are numbered along `shard` first.  Traffic between nodes goes through each rank's own NIC.  A
        ring moves (n - 1) / n of the bytes through each rank; an all-reduce moves twice that.
        """
        stride = {"replicate": layout.shard, "outer": layout.expert}.get(axis, 1)
        per_node = max(1, min(num_ranks, self.ranks_per_node // stride))
        num_nodes = -(-num_ranks // per_node)
        rounds = 2 if operation == "all_reduce" else 1
        # In an all-to-all, ranks send different data, each through its own card.
        num_cards = 1 if operation == "all_to_all" else per_node
        link_s = num_bytes * (per_node - 1) / per_node / self.link if per_node > 1 else 0.0
        network_s = num_bytes * (num_nodes - 1) / num_nodes / (num_cards * self.network) if num_nodes > 1 else 0.0
        latency_s = self.link_latency_s * math.log2(max(2, per_node)) + self.network_latency_s * math.log2(num_nodes)
        return rounds * (max(link_s, network_s) + latency_s)


@dataclass(frozen=True)
class StepTime:
    """The time of one step in seconds, broken down by cause."""

    total_s: float
    compute_s: float
    """Forward and backward kernels, including the slowdown by collectives that run at the same time."""
    optimizer_s: float
    copy_s: float
    """Copies into and out of the buffers of collectives."""
    communication_s: float
    """All collectives, whether or not they overlap with kernels."""
    exposed_s: float
    """The part of `communication_s` during which kernels had to wait."""
    host_s: float
    """Host time to issue all operators: a lower bound on the step time."""
    offload_s: float = 0.0
    """Copies of activations to host memory and back, whether or not they overlap with kernels."""
    exposed_offload_s: float = 0.0
    """The part of `offload_s` during which kernels had to wait."""


class _Clock(Watcher):
    """Tracks the time on each stream.  A micro-batch that represents `repeats` micro-batches counts that many times."""

    def __init__(self, layout: Layout, rates: Rates) -> None:
        self._layout, self._rates = layout, rates
        self._segment_times: dict[tuple[tuple[Work, int], ...], tuple[float, float, int]] = {}
        self._now = self._gathers_end = self._gathers_may_start = self._scatters_end = self._all_reduces_end = 0.0
        self._gathered_at: dict[int, float] = {}
        self._last_copy_end: float | None = None
        self._last_scatter_end: float | None = None
        self._repeats = 1
        self._started = 0.0
        self._host_copies_end = 0.0
        self._fetch_ends: deque[float] = deque()
        self.offload_s = self.exposed_offload_s = 0.0
        self.total_s = self.compute_s = self.copy_s = self.communication_s = self.exposed_s = self.host_s = 0.0

    def begin(self, repeats: int) -> None:
        self._repeats, self._started = repeats, self._now

    def compute(self, segment: Segment, unit: int, is_backward: bool, accumulates: bool) -> None:
        if segment.work not in self._segment_times:
            self._segment_times[segment.work] = self._times_of(segment)
        seconds, collectives_s, num_kernels = self._segment_times[segment.work]
        self._now += seconds + collectives_s
        self.compute_s += self._repeats * seconds
        self.exposed_s += self._repeats * collectives_s  # kernels wait for the collectives between them
        self._add_communication(collectives_s)
        self.host_s += self._repeats * num_kernels * self._rates.host_s

    def _times_of(self, segment: Segment) -> tuple[float, float, int]:
        """Return the seconds of a segment's kernels and of its collectives, and the number of both together."""
        kernels_s = collectives_s = 0.0
        layout = self._layout
        for work, count in segment.work:
            if work.operation is None:
                kernels_s += count * self._rates.kernel(work)
            else:
                num_ranks, num_bytes = layout.group_size(work.axis), work.num_bytes
                collectives_s += count * self._rates.collective(work.operation, layout, work.axis, num_ranks, num_bytes)
        return kernels_s, collectives_s, sum(count for _, count in segment.work)

    def gather(self, group: int, axis: Axis, num_ranks: int, num_bytes: int) -> None:
        seconds = self._rates.collective("all_gather", self._layout, axis, num_ranks, num_bytes)
        start = max(self._gathers_end, self._gathers_may_start)
        copy_in_s = num_bytes // num_ranks * 2 / self._rates.memory
        self._gathered_at[group] = self._gathers_end = start + copy_in_s + seconds
        self._add_communication(seconds)

    def wait_for_gather(self, group: int, num_bytes: int, is_forward: bool) -> None:
        self._wait_until(self._gathered_at.pop(group, 0.0))
        if is_forward and self._last_copy_end is not None:
            self._gathers_may_start = max(self._gathers_may_start, self._last_copy_end)
        self._copy(num_bytes)
        if is_forward:
            self._last_copy_end = self._now
        else:
            self._gathers_may_start = max(self._gathers_may_start, self._now)

    def reduce(self, axis: Axis, num_ranks: int, scattered: int, reduced: int, rearranged: int) -> None:
        layout, rates = self._layout, self._rates
        if self._last_scatter_end is not None:  # wait until its buffer is released
            self._wait_until(self._last_scatter_end)
        self._copy(scattered + rearranged)
        self._scatters_end = max(self._scatters_end, self._now)
        if num_ranks > 1:
            seconds = rates.collective("reduce_scatter", layout, axis, num_ranks, scattered)
            self._scatters_end += seconds
            self._add_communication(seconds)
        self._last_scatter_end = self._scatters_end
        if layout.replicate > 1 and reduced:
            seconds = rates.collective("all_reduce", layout, "replicate", layout.replicate, reduced)
            self._all_reduces_end = max(self._all_reduces_end, self._scatters_end) + seconds
            self._add_communication(seconds)

    def offload(self, num_bytes: int) -> None:
        self._wait_for_copy(self._host_copies_end)
        self._copy_on_host_link(num_bytes)

    def prefetch(self, num_bytes: int) -> None:
        self._copy_on_host_link(num_bytes)
        self._fetch_ends.append(self._host_copies_end)

    def wait_for_prefetch(self) -> None:
        self._wait_for_copy(self._fetch_ends.popleft())

    def _copy_on_host_link(self, num_bytes: int) -> None:
        seconds = num_bytes / self._rates.host
        self._host_copies_end = max(self._host_copies_end, self._now) + seconds
        self.offload_s += self._repeats * seconds

    def _wait_for_copy(self, moment: float) -> None:
        self.exposed_offload_s += self._repeats * max(0.0, moment - self._now)
        self._now = max(self._now, moment)

    def finish(self) -> None:
        self._wait_until(max(self._scatters_end, self._all_reduces_end))
        self._last_scatter_end = self._last_copy_end = None
        self.total_s += self._repeats * (self._now - self._started)

    def _wait_until(self, moment: float) -> None:
        self.exposed_s += self._repeats * max(0.0, moment - self._now)
        self._now = max(self._now, moment)

    def _copy(self, num_bytes: int) -> None:
        seconds = 2 * num_bytes / self._rates.memory
        self._now += seconds
        self.copy_s += self._repeats * seconds

    def _add_communication(self, seconds: float) -> None:
        self.communication_s += self._repeats * seconds


def time_of(trace: Trace, layout: Layout, num_micro_batches: int, rates: Rates) -> StepTime:
    """Estimate the time of one step of `num_micro_batches` micro-batches."""
    clock = _Clock(layout, rates)
    Step(trace, layout, num_micro_batches, clock).run()
    parameters = [p for unit in trace.units for p in unit.parameters if p.is_trained]
    shards = [(p, p.numel / layout.shard) for p in parameters]
    # Per trained element: the gradient norm reads the gradient.  The optimizer reads the weight and the gradient,
    # writes both (torch's fused step writes the clipped gradient), and reads and writes each moment.  A weight average
    # reads the weight, and reads and writes the average.
    average_s_per_byte = layout.has_average / rates.memory
    optimizer_s = sum(
        2 * numel * p.element_size / rates.memory
        + numel * (p.element_size + 2 * EMA_ELEMENT_SIZE) * average_s_per_byte
        + numel * (3 * p.element_size + 2 * p.num_moments * p.moment_size) / rates.optimizer
        for p, numel in shards
    )
    if layout.muon is not None:
        optimizer_s += layout.muon.seconds(layout, rates)
    # A teacher's all-gathers are not counted, since they overlap with its forward pass.
    teacher_s = 0.0 if layout.teacher is None else layout.teacher.flops / rates.matmul[layout.param_size]
    teacher_s *= num_micro_batches
    slowed_s = rates.taken_by_collectives * max(0.0, clock.communication_s - clock.exposed_s)
    total_s = max(clock.total_s + teacher_s + slowed_s + optimizer_s, clock.host_s)
    return StepTime(
        total_s,
        clock.compute_s + teacher_s + slowed_s,
        optimizer_s,
        clock.copy_s,
        clock.communication_s,
        min(clock.exposed_s, clock.communication_s),
        clock.host_s,
        clock.offload_s,
        clock.exposed_offload_s,
    )
