"""Simulates one step under FSDP2: what is gathered, reduced, allocated and freed, in order.

The simulation replays a `Trace` event by event through the state machine of torch.distributed.fsdp, without process
groups, tensors or devices.  Callers pass a `Watcher` that receives the events, to compute memory or time from them.
The simulated rank is rank 0, which has the largest shards.

Source: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py and _fsdp_collectives.py, torch 2.13.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from trainer.model.gradients import bucket_gradients, bucket_numel
from trainer.model.placement import Division
from trainer.plan.trace import ParameterInfo, Segment, Trace, UnitInfo

if TYPE_CHECKING:
    from trainer.plan.muon import MuonUpdate

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
Axis = Literal["shard", "replicate", "reshard", "outer", "context", "expert", "world"]
Operation = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]


@dataclass(frozen=True)
class Teacher:
    """The teacher model in distillation.  It is frozen and runs only forward passes.

    num_bytes: memory per rank in bytes: its shards, and the output projection, which stays gathered for the loss.
    flops: FLOPs of the teacher's forward pass over one rank's micro-batch.
    """

    num_bytes: int
    flops: float


@dataclass(frozen=True)
class Layout:
    """The layout of the units on a mesh of `replicate` x `shard` ranks, with FSDP's settings for each unit.

    `reshard` has one entry per unit (the last is for the root): False, True, or the number of ranks to reshard to.
    """

    replicate: int
    shard: int
    reshard: tuple[bool | int, ...]
    param_size: int
    """Bytes per element of an unsharded parameter."""
    reduce_size: int
    """Bytes per element of a gradient when it is reduced."""
    cpu_offload: bool = False
    has_reference_model: bool = False
    """Whether there is a frozen copy of the model, sharded the same way."""
    teacher: Teacher | None = None
    """The teacher model in distillation; None without one."""
    has_average: bool = False
    """Whether there is an average of the trained weights (`train.ema`), sharded the same way."""
    prefetch_forward: int = 0
    """Number of units to gather ahead in the forward pass; 0 for FSDP's default."""
    prefetch_backward: int = 0
    """Number of units to gather ahead in the backward pass; 0 for FSDP's default."""
    accumulates_shards: bool = False
    """Whether gradients are reduced after each micro-batch (`fsdp.accumulate=sharded`)."""
    context: int = 1
    """Number of ranks in the shard axis that hold slices of the same sequences."""
    expert: int = 1
    """Number of ranks in the shard axis among which the experts are divided."""
    reshard_after_backward: bool = True
    """Whether every micro-batch gathers again; after the last one of a step, only shards remain in any case."""
    muon: MuonUpdate | None = None
    """The update of the matrices that Muon trains."""
    is_unsharded: bool = False
    """Whether each rank holds the full model as a plain module: nothing is gathered, and replicas average gradients in
    buckets."""
    divisions: Mapping[str, Division] = field(default_factory=dict)
    """How parameters are divided, by name; all others are divided along dimension 0."""

    @property
    def num_ranks(self) -> int:
        return self.replicate * self.shard

    def group_size(self, axis: Literal["context", "expert"]) -> int:
        return self.context if axis == "context" else self.expert

    def division(self, parameter: ParameterInfo) -> Division:
        """Return how a parameter is divided among the ranks of the shard axis."""
        return self.divisions.get(parameter.name) or Division(0, self.shard)


class Watcher:
    """Receives every event of a step, in the order in which the host issues them; does nothing by default.

    `begin` starts a micro-batch that represents `repeats` of them, and `finish` ends it.  `gather` issues an
    all-gather, and `wait_for_gather` waits for it, then copies `num_bytes` out of its buffer.  `reduce` waits for the
    previous one, copies gradients into its buffer (`rearranged` bytes of them twice), reduce-scatters `scattered`
    bytes, then all-reduces `reduced` bytes over the replicas (0: no all-reduce).  `offload` waits for the copies of
    the previous block, then starts its own.
    """

    def begin(self, repeats: int) -> None: ...
    def allocate(self, kind: Kind, num_bytes: int) -> None: ...
    def free(self, kind: Kind, num_bytes: int) -> None: ...
    def compute(self, segment: Segment, unit: int, is_backward: bool, accumulates: bool) -> None: ...
    def gather(self, group: int, axis: Axis, num_ranks: int, num_bytes: int) -> None: ...
    def wait_for_gather(self, group: int, num_bytes: int, is_forward: bool) -> None: ...
    def reduce(self, axis: Axis, num_ranks: int, scattered: int, reduced: int, rearranged: int) -> None: ...
    def offload(self, num_bytes: int) -> None: ...
    def prefetch(self, num_bytes: int) -> None: ...
    def wait_for_prefetch(self) -> None: ...
    def finish(self) -> None: ...


@dataclass(frozen=True)
class _Sizes:
    """Bytes of a group of parameters on this rank, padded as FSDP pads: dim 0 of each parameter to equal shards."""

    stored: tuple[int, ...]
    """Each parameter's stored shard."""
    unsharded: tuple[int, ...]
    """Each gathered parameter."""
    cast: tuple[int, ...]
    """Each gathered parameter whose stored dtype differs from the gathered dtype; 0 for others."""
    gradients: int
    """The gradients of all trained parameters, unsharded, as autograd creates them."""
    accumulated: tuple[int, ...]
    """Each trained parameter's gradient, unsharded, in the dtype of the reduction."""
    reduced: int
    """All gradients, padded, in the dtype of the reduction."""
    final: int
    """The shards of all gradients, as they are stored."""
    rearranged: int
    """The gathered parameters that are not divided along dimension 0, which are copied once more."""
    rearranged_gradients: int
    """The gradients of these parameters, as autograd creates them."""
    largest_rearranged_gradient: int


def _sizes_of(parameters: Sequence[ParameterInfo], layout: Layout, parts: int) -> _Sizes:
    trained = [parameter for parameter in parameters if parameter.is_trained]
    padded = [layout.division(parameter).gathered_numel(parameter.shape) for parameter in parameters]
    stored = [n // parts * parameter.element_size for n, parameter in zip(padded, parameters, strict=True)]
    gathered = [
        n * parameter.gathered_element_size(layout.param_size) for n, parameter in zip(padded, parameters, strict=True)
    ]
    trained_numel = sum(layout.division(parameter).gathered_numel(parameter.shape) for parameter in trained)
    element_size = trained[0].element_size if trained else 4
    local_numel = [parameter.numel // layout.division(parameter).expert for parameter in trained]
    rearranged = [
        numel * layout.param_size
        for numel, parameter in zip(local_numel, trained, strict=True)
        if layout.division(parameter).dim
    ]
    return _Sizes(
        stored=tuple(stored),
        unsharded=tuple(gathered),
        cast=tuple(
            size * (parameter.element_size != parameter.gathered_element_size(layout.param_size))
            for size, parameter in zip(gathered, parameters, strict=True)
        ),
        gradients=sum(local_numel) * layout.param_size,
        accumulated=tuple(numel * layout.reduce_size for numel in local_numel),
        reduced=trained_numel * layout.reduce_size,
        final=trained_numel // parts * element_size,
        rearranged=sum(
            size for size, parameter in zip(gathered, parameters, strict=True) if layout.division(parameter).dim
        ),
        rearranged_gradients=sum(rearranged),
        largest_rearranged_gradient=max(rearranged, default=0),
    )


class _Group:
    """The state of parameters that are gathered together (torch's FSDPParamGroup).

    These are the parameters of a unit or, with expert parallelism, either its expert parameters or its other ones.
    """

    def __init__(
        self, number: int, unit: int, info: UnitInfo, parameters: Sequence[ParameterInfo], layout: Layout
    ) -> None:
        self.number, self.unit = number, unit
        self.has_divided_experts = layout.expert > 1 and any(parameter.is_expert for parameter in parameters)
        self.axis: Axis = "outer" if self.has_divided_experts else "shard"
        self.num_ranks = layout.shard // layout.expert if self.has_divided_experts else layout.shard
        self.sizes = _sizes_of(parameters, layout, self.num_ranks)
        self.reshard = layout.reshard[unit]
        self.is_gathered_in_backward = not (info.is_embedding_unit and layout.reshard_after_backward)
        """Whether the backward pass gathers this group."""
        self.state: Literal["sharded", "resharded", "unsharded"] = "sharded"
        self.is_pending = False
        """Whether a gather has been issued that nothing has waited for yet."""
        self.phase: Literal["idle", "forward", "pre_backward", "post_backward"] = "idle"
        self.order: list[int] = []
        """Positions of this group in the order of the forward pass, one for each time that it ran."""
        self.accumulated = 0
        """Bytes of unsharded gradients accumulated in earlier micro-batches."""
        self.adds_in_place = False
        """Whether autograd adds to these gradients in place, because they are in the compute dtype."""
        self.buffer_in_use = self.partial = 0
        """Bytes of a reduced buffer still in use, and of one not yet all-reduced over replicas."""
        self.has_gradient_shards = False
        """Whether the shards of its gradients have been allocated."""

    @property
    def is_empty(self) -> bool:
        return not self.sizes.stored


def _groups_of(units: Sequence[UnitInfo], layout: Layout) -> list[list[_Group]]:
    """Return the groups of each unit: one, or two if it has experts that are divided among ranks, in FSDP's order."""
    groups: list[list[_Group]] = []
    number = 0
    for unit, info in enumerate(units):
        by_mesh: dict[bool, list[ParameterInfo]] = {}
        for parameter in info.parameters:
            by_mesh.setdefault(layout.expert > 1 and parameter.is_expert, []).append(parameter)
        groups.append([])
        for parameters in by_mesh.values() or ([],):
            groups[-1].append(_Group(number, unit, info, parameters, layout))
            number += 1
    return groups


@dataclass
class _Bucket:
    """Gradients that replicas average together."""

    pending_units: set[int]
    """Units whose backward pass has not finished."""
    gradients: int
    """Bytes of the gradients as autograd allocates them."""
    buffer: int
    """Bytes of the buffer into which they are copied."""


class Step:
    """One step of `num_micro_batches` over `trace`; `run` reports its events to the watcher."""

    def __init__(self, trace: Trace, layout: Layout, num_micro_batches: int, watcher: Watcher) -> None:
        self.trace, self.layout, self.watcher = trace, layout, watcher
        self.num_micro_batches = num_micro_batches
        self._groups = _groups_of(trace.units, layout)
        """By unit."""
        self._order: list[_Group] = []
        self._gathered = 0
        """Bytes of the forward pass's last all-gather buffer, kept until the next one has been copied out."""
        self._reducing: deque[int] = deque()
        """Bytes of the reduce-scatters in flight."""
        self._gradients = 0
        """Bytes of this micro-batch's unsharded gradients."""
        self._adds_in_place = False
        self._buckets = self._cut_buckets() if layout.is_unsharded and layout.replicate > 1 else deque()

    def run(self) -> None:
        """Run the micro-batches.  The second one that accumulates represents all later ones that do."""
        if self.num_micro_batches > 1 and self.trace.counting_pass:
            self._run_counting_pass(repeats=1)
            self._run_counting_pass(repeats=self.num_micro_batches - 1)
        if self.num_micro_batches > 1:
            self._run_micro_batch(is_last=False, repeats=1)
        if self.num_micro_batches > 2:
            self._run_micro_batch(is_last=False, repeats=self.num_micro_batches - 2)
        self._run_micro_batch(is_last=True, repeats=1)

    def _run_counting_pass(self, repeats: int) -> None:
        self.watcher.begin(repeats)
        for event in self.trace.counting_pass:
            self._compute(event.segment, event.unit, is_backward=False, adds_in_place=False)
            if event.kind == "pre_forward":
                self._pre_forward(self._groups[event.unit])
            elif event.kind == "post_forward":
                self._post_forward(self._groups[event.unit], is_backward=False)
        self.watcher.finish()

    def _run_micro_batch(self, is_last: bool, repeats: int) -> None:
        self.watcher.begin(repeats)
        is_backward = False
        self._adds_in_place = any(group.adds_in_place for groups in self._groups for group in groups)
        for event in self.trace.events:
            groups = self._groups[event.unit]
            is_backward = is_backward or event.kind in ("pre_backward", "end")
            adds_in_place = groups[0].adds_in_place if event.kind == "post_backward" else self._adds_in_place
            self._compute(event.segment, event.unit, is_backward, adds_in_place)
            if event.kind == "pre_forward":
                self._pre_forward(groups)
            elif event.kind == "post_forward":
                self._post_forward(groups, is_backward)
            elif event.kind == "pre_backward":
                self._pre_backward(groups)
            elif event.kind == "post_backward":
                for group in reversed(groups):
                    self._post_backward(group, is_last)
            elif event.kind == "activation_offload":
                self.watcher.offload(event.num_bytes)
            elif event.kind == "activation_reload":
                self.watcher.prefetch(event.num_bytes)
            elif event.kind == "activation_reload_wait":
                self.watcher.wait_for_prefetch()
            else:
                self._end(is_last)

    def _compute(self, segment: Segment, unit: int, is_backward: bool, adds_in_place: bool) -> None:
        self.watcher.compute(segment, unit, is_backward, adds_in_place)
        if segment.gradients and not adds_in_place:
            self._gradients += segment.gradients
            self.watcher.allocate("unsharded gradients", segment.gradients)

    # -- forward -------------------------------------------------------------------------------------------------

    def _pre_forward(self, groups: Sequence[_Group]) -> None:
        unit, is_first = groups[0].unit, groups[0].phase != "forward"
        for group in groups:
            if not group.is_empty:
                group.phase = "forward"
                self._unshard(group)
                self._wait(group, is_forward=True)
        if is_first and unit != self.trace.root:
            for next_groups in self._groups[unit + 1 : min(unit + 1 + self.layout.prefetch_forward, self.trace.root)]:
                for group in next_groups:
                    self._unshard(group)

    def _post_forward(self, groups: Sequence[_Group], is_backward: bool) -> None:
        for group in groups:
            if not group.is_empty:
                if not is_backward:
                    self._reshard_after_forward(group)
                    group.order.append(len(self._order))
                    self._order.append(group)
                group.phase = "idle"
        if groups[0].unit == self.trace.root and self._gathered:
            self.watcher.free("all-gather buffers", self._gathered)
            self._gathered = 0

    def _reshard_after_forward(self, group: _Group) -> None:
        if group.reshard is True:
            self._free_unsharded(group)
        elif group.reshard is not False:
            for num_bytes in group.sizes.unsharded:
                self.watcher.allocate("parameters", num_bytes // group.reshard)
                self.watcher.free("unsharded parameters", num_bytes)
            group.state = "resharded"

    # -- gathering -----------------------------------------------------------------------------------------------

    def _unshard(self, group: _Group) -> None:
        if group.is_pending or group.state == "unsharded" or group.is_empty or self.layout.is_unsharded:
            return
        group.is_pending = True
        num_ranks = self._ranks_of(group)
        if num_ranks == 1:
            return
        gathered = sum(group.sizes.unsharded)
        # Shards cast to the compute dtype, or copied from host memory, are copied into the buffer and then freed.
        copied = (gathered if self.layout.cpu_offload else sum(group.sizes.cast)) // num_ranks
        if copied:
            self.watcher.allocate("all-gather buffers", copied)
        self.watcher.allocate("all-gather buffers", gathered)
        if copied:
            self.watcher.free("all-gather buffers", copied)
        axis: Axis = "reshard" if group.state == "resharded" else group.axis
        self.watcher.gather(group.number, axis, num_ranks, gathered)

    def _unshard_in_backward(self, group: _Group) -> None:
        if group.is_gathered_in_backward:
            self._unshard(group)

    def _ranks_of(self, group: _Group) -> int:
        return int(group.reshard) if group.state == "resharded" else group.num_ranks

    def _wait(self, group: _Group, is_forward: bool) -> None:
        if not group.is_pending:
            return
        group.is_pending = False
        previous = self._gathered if is_forward else 0
        num_ranks, gathered, copied = self._ranks_of(group), sum(group.sizes.unsharded), 0
        if num_ranks == 1:
            self._copy_shards(group)
        else:
            # Parameters not divided along the first dimension are copied to a second buffer and concatenated from
            # there.  The kernels that do this wait for the gather, and the unit waits for them.
            rearranged = group.sizes.rearranged
            self.watcher.allocate("unsharded parameters", gathered)
            self.watcher.allocate("all-gather buffers", rearranged)
            self.watcher.free("all-gather buffers", rearranged)
            copied = gathered + rearranged
        self.watcher.wait_for_gather(group.number, copied, is_forward)
        if group.state == "resharded":
            self.watcher.free("parameters", sum(n // int(group.reshard) for n in group.sizes.unsharded))
        group.state = "unsharded"
        if is_forward:  # kept until the next all-gather has been copied out
            self.watcher.free("all-gather buffers", previous)
            self._gathered = gathered if num_ranks > 1 else 0
        elif num_ranks > 1:
            self.watcher.free("all-gather buffers", gathered)

    def _copy_shards(self, group: _Group) -> None:
        """Copy each parameter, if the shard axis has one rank; a cast copy lives until the next one is allocated."""
        previous = 0
        for num_bytes, is_cast in zip(group.sizes.unsharded, group.sizes.cast, strict=True):
            if is_cast:
                self.watcher.allocate("all-gather buffers", num_bytes)
                self.watcher.free("all-gather buffers", previous)
                previous = num_bytes
            self.watcher.allocate("unsharded parameters", num_bytes)
        self.watcher.free("all-gather buffers", previous)

    def _free_unsharded(self, group: _Group) -> None:
        if group.state == "unsharded":
            self.watcher.free("unsharded parameters", sum(group.sizes.unsharded))
        elif group.state == "resharded":
            self.watcher.free("parameters", sum(n // int(group.reshard) for n in group.sizes.unsharded))
        group.state = "sharded"

    # -- backward ------------------------------------------------------------------------------------------------

    def _pre_backward(self, groups: Sequence[_Group]) -> None:
        if groups[0].is_empty or groups[0].phase == "pre_backward":
            return
        unit, num_prefetched = groups[0].unit, self.layout.prefetch_backward
        is_explicit = num_prefetched > 0 and unit != self.trace.root
        for index, group in enumerate(groups):
            group.phase = "pre_backward"
            self._unshard_in_backward(group)
            self._wait(group, is_forward=False)
            position = group.order.pop() if group.order else 0
            if not is_explicit:
                self._prefetch_previous(position, index, len(groups))
        for number in range(unit - 1, max(-1, unit - 1 - num_prefetched), -1) if is_explicit else ():
            for group in reversed(self._groups[number]):
                self._unshard_in_backward(group)

    def _prefetch_previous(self, position: int, index: int, num_groups: int) -> None:
        """Gather the group before the one at `position`.

        If this unit has two groups, gather all groups of the previous unit after this unit's second group.
        """
        if num_groups == 1 and position > 0:
            self._unshard_in_backward(self._order[position - 1])
        if num_groups == 1 or index != 1:
            return
        unit, previous_unit = self._order[position].unit, None
        for group in reversed(self._order[:position]):
            if group.unit == unit:
                continue
            if previous_unit not in (None, group.unit):
                break
            previous_unit = group.unit
            self._unshard_in_backward(group)

    def _post_backward(self, group: _Group, is_last: bool) -> None:
        if group.is_empty or group.phase == "post_backward":
            return
        group.phase = "post_backward"
        sizes, watcher, layout = group.sizes, self.watcher, self.layout
        new_bytes = min(sizes.gradients, self._gradients) if not group.adds_in_place else 0
        if self.layout.is_unsharded:
            # Gradients stay where autograd allocated them, as the parameters' `.grad`.
            self._free_gradients(new_bytes)
            watcher.allocate("gradients", new_bytes)
            group.adds_in_place = group.adds_in_place or new_bytes > 0
            if is_last:
                self._send_buckets(group)
            return
        if group.accumulated and new_bytes:  # added to the accumulated gradients, in the reduction dtype
            self._free_gradients(new_bytes)
            new_bytes = 0
        if is_last or self.layout.reshard_after_backward:
            self._free_unsharded(group)
        if not is_last and not self.layout.accumulates_shards:
            if new_bytes:
                self._accumulate_gradients(group, new_bytes)
            return
        while self._reducing and group is self._groups[group.unit][-1]:
            watcher.free("reduction buffers", self._reducing.popleft())
        if not new_bytes and not group.accumulated:
            return
        # These gradients are concatenated shard by shard; accumulated ones are in the reduction dtype.
        dtype_size = layout.reduce_size if group.accumulated else layout.param_size
        largest = sizes.largest_rearranged_gradient * dtype_size // layout.param_size
        rearranged = sizes.rearranged_gradients * dtype_size // layout.param_size
        watcher.allocate("unsharded gradients", largest)
        watcher.free("unsharded gradients", largest)
        watcher.allocate("reduction buffers", sizes.reduced)
        if new_bytes:
            self._free_gradients(new_bytes)
        if group.accumulated:
            watcher.free("unsharded gradients", group.accumulated)
            group.accumulated, group.adds_in_place = 0, False
        self._reducing.append(sizes.reduced)
        self._scatter(group, is_last, rearranged)

    def _scatter(self, group: _Group, is_last: bool, rearranged: int) -> None:
        """Reduce-scatter, all-reduce if there are replicas, and add to the gradients' shards."""
        sizes, watcher, layout = group.sizes, self.watcher, self.layout
        scattered = sizes.reduced // group.num_ranks
        is_hybrid = layout.replicate > 1
        watcher.reduce(group.axis, group.num_ranks, sizes.reduced, scattered if is_last else 0, rearranged)
        watcher.allocate("reduction buffers", scattered)
        if is_hybrid and not is_last:  # the all-reduce waits until the last micro-batch
            watcher.free("reduction buffers", group.partial)
            group.partial = scattered
            return
        watcher.free("reduction buffers", group.partial)
        group.partial = 0
        final = 0 if layout.cpu_offload else sizes.final
        is_cast = scattered != sizes.final
        if is_cast:
            watcher.allocate("reduction buffers", final)
        if is_cast and is_hybrid and not layout.cpu_offload:
            group.buffer_in_use = scattered  # not returned to the allocator until the all-reduce is done
        else:
            watcher.free("reduction buffers", scattered)
        if is_cast:
            watcher.free("reduction buffers", final)
        if not group.has_gradient_shards:
            watcher.allocate("gradients", final)
            group.has_gradient_shards = True

    def _accumulate_gradients(self, group: _Group, new_bytes: int) -> None:
        """Accumulate unsharded gradients for the next micro-batch, in the reduction dtype."""
        if self.layout.param_size == self.layout.reduce_size:
            self._gradients -= new_bytes  # they stay in place, and autograd adds the next ones to them
            group.accumulated, group.adds_in_place = new_bytes, True
            return
        for num_bytes in group.sizes.accumulated:
            self.watcher.allocate("unsharded gradients", num_bytes)
            self._free_gradients(num_bytes * self.layout.param_size // self.layout.reduce_size)
        group.accumulated = sum(group.sizes.accumulated)

    def _cut_buckets(self) -> deque[_Bucket]:
        """Return the buckets in which replicas average gradients, as `trainer.model.gradients` cuts them."""
        trained = [(number, p) for number, u in enumerate(self.trace.units) for p in u.parameters if p.is_trained]
        backward = trained[::-1]
        element_size = self.layout.param_size
        return deque(
            _Bucket(
                {backward[i][0] for i in bucket},
                sum(backward[i][1].numel for i in bucket) * element_size,
                bucket_numel((backward[i][1].numel for i in bucket), element_size) * element_size,
            )
            for bucket in bucket_gradients([(p.numel, element_size) for _, p in backward])
        )

    def _send_buckets(self, group: _Group) -> None:
        """All-reduce the buckets that `group` completes, in order, to average gradients over replicas."""
        for bucket in self._buckets:
            bucket.pending_units.discard(group.unit)
        while self._buckets and not self._buckets[0].pending_units:
            bucket = self._buckets.popleft()
            self.watcher.allocate("gradients", bucket.buffer)
            self.watcher.reduce("shard", 1, bucket.buffer, bucket.buffer, 0)
            self.watcher.free("gradients", bucket.gradients)

    def _free_gradients(self, num_bytes: int) -> None:
        self._gradients -= num_bytes
        self.watcher.free("unsharded gradients", num_bytes)

    def _end(self, is_last: bool) -> None:
        """Finish the backward pass as FSDP does after autograd: reduce the remaining groups, the root's first."""
        for group in (group for groups in (self._groups[-1], *self._groups[:-1]) for group in reversed(groups)):
            self._post_backward(group, is_last)
            group.phase = "idle"
            group.order.clear()
            if group.is_pending:  # prefetched but not needed
                group.is_pending = False
                self.watcher.free("all-gather buffers", sum(group.sizes.unsharded) * (self._ranks_of(group) > 1))
            if group.buffer_in_use:
                self.watcher.free("reduction buffers", group.buffer_in_use)
                group.buffer_in_use = 0
        self._order.clear()
        while self._reducing:
            self.watcher.free("reduction buffers", self._reducing.popleft())
        self.watcher.finish()
