"""The account of one rank's step: what is in memory, which collectives run, and how long each stream takes.

`Step` tells the ledger what happens, in the order in which the host issues it.

Memory: live bytes by kind, their peak, and where in the step it is.

Collectives: how often each one is issued, by operation, mesh axis, number of ranks and size.  Sizes are those of the
full tensor: the output of an all-gather, the input of a reduce-scatter, the buffer of an all-reduce.  For an
all-to-all, the larger of one rank's send and receive buffers counts.

Time: kernels and the collectives of context, tensor and expert parallelism share one stream.  FSDP2's all-gathers,
reduce-scatters and all-reduces run on three others, and copies between device and host memory on a fifth.  The streams
wait for each other as in FSDP2, and the host is assumed to run ahead of the device.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal, get_args

from trainer.plan.layout import Layout
from trainer.plan.rates import Axis, Collective, Operation, Rates
from trainer.plan.trace import Segment, Trace

Kind = Literal[
    "parameters",
    "gradients",
    "optimizer",
    "unsharded parameters",
    "unsharded gradients",
    "all-gather buffers",
    "reduction buffers",
    "activations",
    "temporaries",
    "buffers and inputs",
]


@dataclass(frozen=True)
class MemorySnapshot:
    """The memory in use at one point in a step: the bytes of each kind."""

    place: str
    """A description of the point, such as `backward of layers.3`."""
    by_kind: dict[Kind, int]

    @property
    def total(self) -> int:
        return sum(self.by_kind.values())


class Ledger:
    """Keeps the account of a step.

    A micro-batch may stand for several equal ones (`begin`): its collectives and its time count that many times.
    """

    def __init__(
        self, trace: Trace, layout: Layout, rates: Rates, at_rest: dict[Kind, int], with_curve: bool = False
    ) -> None:
        """`at_rest`: the bytes that are in memory before the step; `with_curve`: whether to record `curve`."""
        self._trace = trace
        self._layout = layout
        self._rates = rates
        self.repeats = 1
        """The number of micro-batches that the current one stands for."""
        self.collectives: Counter[Collective] = Counter()
        self.streams = Streams(layout, rates)
        self._live: dict[Kind, int] = dict.fromkeys(get_args(Kind), 0) | at_rest
        self._total = sum(at_rest.values())
        self._place = "time before the first step"
        self._peak_total = 0
        self._note_peak(0)
        self._with_curve = with_curve
        self.curve: list[MemorySnapshot] = []
        """One snapshot for each segment, in order."""
        self.offloaded = 0
        """Bytes of host memory that hold activations of the current micro-batch."""

    def begin(self, repeats: int) -> None:
        """Begin a micro-batch that stands for `repeats` of them."""
        self.repeats = repeats
        self.offloaded = 0  # each micro-batch frees its own
        self.streams.begin(repeats)

    def finish(self) -> None:
        """End the micro-batch: the next one, or the optimizer, waits for all reductions."""
        self.streams.finish()

    # -- memory ------------------------------------------------------------------------------------------------------

    def allocate(self, kind: Kind, num_bytes: int) -> None:
        self._live[kind] += num_bytes
        self._total += num_bytes
        if self._total > self._peak_total:
            self._note_peak(0)

    def free(self, kind: Kind, num_bytes: int) -> None:
        self._live[kind] -= num_bytes
        self._total -= num_bytes

    def use(self, kind: Kind, num_bytes: int) -> None:
        """Allocate memory for the duration of one call."""
        self.allocate(kind, num_bytes)
        self.free(kind, num_bytes)

    def update(self, num_bytes: int) -> None:
        """Account for the temporary tensors of the optimizer's update."""
        self._place = "optimizer update"
        self.use("temporaries", num_bytes)

    @property
    def peak(self) -> MemorySnapshot:
        return MemorySnapshot(*self._peak)

    def _note_peak(self, temporaries: int) -> None:
        self._peak_total = self._total + temporaries
        self._peak = self._place, self._live_with(temporaries)

    def _live_with(self, temporaries: int) -> dict[Kind, int]:
        return {**self._live, "temporaries": self._live["temporaries"] + temporaries}

    # -- kernels and collectives -------------------------------------------------------------------------------------

    def compute(self, segment: Segment, unit: int, is_backward: bool, adds_in_place: bool) -> None:
        """Run a segment's kernels and collectives.

        adds_in_place: whether autograd adds its gradients to existing ones, so that they need no memory.
        """
        self._place = f"{'backward' if is_backward else 'forward'} of {self._trace.units[unit].name}"
        temporaries = segment.peak_accumulating if adds_in_place else segment.peak
        if self._total + temporaries > self._peak_total:
            self._note_peak(temporaries)
        if self._with_curve:
            self.curve.append(MemorySnapshot(self._place, self._live_with(temporaries)))
        self.allocate("activations", segment.net)
        for work, count in segment.work:
            if work.operation is not None:
                num_ranks = self._layout.group_size(work.axis)
                self._count(work.operation, work.axis, num_ranks, work.num_bytes, count)
        self.streams.compute(segment)

    def gather(self, part: Hashable, axis: Axis, num_ranks: int, num_bytes: int) -> None:
        """Issue an all-gather of a part of the parameters."""
        self._count("all_gather", axis, num_ranks, num_bytes)
        self.streams.gather(part, axis, num_ranks, num_bytes)

    def wait_for_gather(self, part: Hashable, num_bytes: int, is_forward: bool) -> None:
        """Wait for the all-gather of a part, then copy `num_bytes` out of its buffer."""
        self.streams.wait_for_gather(part, num_bytes, is_forward)

    def scatter(self, axis: Axis, num_ranks: int, num_bytes: int, rearranged: int) -> None:
        """Copy gradients into a buffer and reduce-scatter it.

        rearranged: bytes that are copied twice, because their tensors are not divided along dimension 0.
        """
        if num_ranks > 1:
            self._count("reduce_scatter", axis, num_ranks, num_bytes)
        self.streams.scatter(axis, num_ranks, num_bytes, rearranged)

    def wait_for_scatters(self) -> None:
        """Wait until all reduce-scatters are done, so that their buffers can be used again."""
        self.streams.wait_for_scatters()

    def average(self, axis: Axis, num_ranks: int, num_bytes: int) -> None:
        """All-reduce the result of the last reduce-scatter over the ranks that hold the same shards."""
        self._count("all_reduce", axis, num_ranks, num_bytes)
        self.streams.average(axis, num_ranks, num_bytes)

    def offload(self, num_bytes: int) -> None:
        """Wait for the previous block's copies to host memory, then start this block's."""
        self.offloaded += num_bytes
        self.streams.offload(num_bytes)

    def reload(self, num_bytes: int) -> None:
        """Start copying a block's activations back to the device."""
        self.streams.reload(num_bytes)

    def wait_for_reload(self) -> None:
        """Wait for the earliest pending copy back to the device."""
        self.streams.wait_for_reload()

    def _count(self, operation: Operation, axis: Axis, num_ranks: int, num_bytes: int, count: int = 1) -> None:
        self.collectives[Collective(operation, axis, num_ranks, num_bytes)] += count * self.repeats


class Streams:
    """The time on each stream, in seconds since the step began.

    Sources: FSDPCommContext in torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py.
    """

    def __init__(self, layout: Layout, rates: Rates) -> None:
        self._layout = layout
        self._rates = rates
        self._repeats = 1
        self._began = 0.0
        self._now = 0.0
        """The end of what the compute stream has been given so far."""
        self._gathers_end = 0.0
        self._gathers_may_start = 0.0
        self._scatters_end = 0.0
        self._all_reduces_end = 0.0
        self._host_copies_end = 0.0
        self._gather_ends: dict[Hashable, float] = {}
        self._reload_ends: deque[float] = deque()
        self._last_copy_out_end: float | None = None
        self._segment_times: dict[int, tuple[float, float, int]] = {}
        self.total_s = 0.0
        self.compute_s = 0.0
        self.copy_s = 0.0
        self.communication_s = 0.0
        self.exposed_s = 0.0
        self.host_s = 0.0
        self.offload_s = 0.0
        self.exposed_offload_s = 0.0

    def begin(self, repeats: int) -> None:
        self._repeats = repeats
        self._began = self._now
        self._gathers_may_start = max(self._gathers_may_start, self._now)  # the root's forward pass waits

    def finish(self) -> None:
        self._wait_until(max(self._scatters_end, self._all_reduces_end))
        self._last_copy_out_end = None
        self.total_s += self._repeats * (self._now - self._began)

    def compute(self, segment: Segment) -> None:
        key = id(segment)  # repeated blocks share their segments
        if key not in self._segment_times:
            self._segment_times[key] = self._times_of(segment)
        kernels_s, collectives_s, num_kernels = self._segment_times[key]
        self._now += kernels_s + collectives_s
        self.compute_s += self._repeats * kernels_s
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
                num_ranks = layout.group_size(work.axis)
                seconds = self._rates.collective(work.operation, layout, work.axis, num_ranks, work.num_bytes)
                collectives_s += count * seconds
        return kernels_s, collectives_s, sum(count for _, count in segment.work)

    def gather(self, part: Hashable, axis: Axis, num_ranks: int, num_bytes: int) -> None:
        seconds = self._rates.collective("all_gather", self._layout, axis, num_ranks, num_bytes)
        start = max(self._gathers_end, self._gathers_may_start)
        copy_in_s = num_bytes // num_ranks * 2 / self._rates.memory
        self._gathers_end = start + copy_in_s + seconds
        self._gather_ends[part] = self._gathers_end
        self._add_communication(seconds)

    def wait_for_gather(self, part: Hashable, num_bytes: int, is_forward: bool) -> None:
        self._wait_until(self._gather_ends.pop(part, 0.0))
        if is_forward and self._last_copy_out_end is not None:
            self._gathers_may_start = max(self._gathers_may_start, self._last_copy_out_end)
        self._copy(num_bytes)
        if is_forward:
            self._last_copy_out_end = self._now
        else:
            self._gathers_may_start = max(self._gathers_may_start, self._now)

    def scatter(self, axis: Axis, num_ranks: int, num_bytes: int, rearranged: int) -> None:
        self._copy(num_bytes + rearranged)
        self._scatters_end = max(self._scatters_end, self._now)
        if num_ranks > 1:
            seconds = self._rates.collective("reduce_scatter", self._layout, axis, num_ranks, num_bytes)
            self._scatters_end += seconds
            self._add_communication(seconds)

    def wait_for_scatters(self) -> None:
        self._wait_until(self._scatters_end)

    def average(self, axis: Axis, num_ranks: int, num_bytes: int) -> None:
        seconds = self._rates.collective("all_reduce", self._layout, axis, num_ranks, num_bytes)
        self._all_reduces_end = max(self._all_reduces_end, self._scatters_end) + seconds
        self._add_communication(seconds)

    def offload(self, num_bytes: int) -> None:
        self._wait_for_host_copies(self._host_copies_end)
        self._copy_to_or_from_host(num_bytes)

    def reload(self, num_bytes: int) -> None:
        self._copy_to_or_from_host(num_bytes)
        self._reload_ends.append(self._host_copies_end)

    def wait_for_reload(self) -> None:
        self._wait_for_host_copies(self._reload_ends.popleft())

    def _copy_to_or_from_host(self, num_bytes: int) -> None:
        seconds = num_bytes / self._rates.host
        self._host_copies_end = max(self._host_copies_end, self._now) + seconds
        self.offload_s += self._repeats * seconds

    def _wait_for_host_copies(self, moment: float) -> None:
        self.exposed_offload_s += self._repeats * max(0.0, moment - self._now)
        self._now = max(self._now, moment)

    def _wait_until(self, moment: float) -> None:
        self.exposed_s += self._repeats * max(0.0, moment - self._now)
        self._now = max(self._now, moment)

    def _copy(self, num_bytes: int) -> None:
        seconds = 2 * num_bytes / self._rates.memory
        self._now += seconds
        self.copy_s += self._repeats * seconds

    def _add_communication(self, seconds: float) -> None:
        self.communication_s += self._repeats * seconds
