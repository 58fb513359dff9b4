"""What one rank does in a step under FSDP2: what it gathers and reduces, and what is in memory in the meantime.

The rules, as torch documents them for `torch.distributed.fsdp.fully_shard` and the methods of `FSDPModule`:

1. Before a unit's forward pass, its parameters are all-gathered (unless they still are), and the unit waits for them.
   The buffer that received them is copied into the parameters.  With `prefetch_forward=n`, the next n units are then
   gathered ahead.
2. After it, they are freed (`reshard_after_forward=True`), kept (`False`), or divided among n ranks (an integer).
3. Before its backward pass, they are gathered again where they are not there, and then the unit that ran before it is
   gathered ahead, or as many units as `prefetch_backward` says.
4. After its backward pass, they are freed, and its gradients are copied into a buffer and reduce-scattered, once those
   of the unit before have been.  Ranks with equal shards then all-reduce them.  Before the last micro-batch, gradients
   are kept unsharded and added up instead, or reduced without the all-reduce (`fsdp.accumulate=sharded`).
5. Units whose inputs need no gradient, such as the embedding and the root, do so when the backward pass has ended.

`Step` follows them through a `Trace`, without process groups, tensors or devices, and tells a `Ledger` what happens.
The rank is rank 0, which has the largest shards.  tests/plan/test_plan.py compares the results with real steps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainer.model.gradients import bucket_gradients, bucket_numel
from trainer.plan.kernels import GroupAxis
from trainer.plan.layout import Layout
from trainer.plan.ledger import Ledger
from trainer.plan.rates import Axis
from trainer.plan.trace import Event, ParameterInfo, Trace, UnitInfo


class Part:
    """The parameters of a unit that one collective gathers: those of one mesh.  Sizes are in bytes."""

    def __init__(
        self, info: UnitInfo, reshard: bool | int, parameters: Sequence[ParameterInfo], layout: Layout
    ) -> None:
        division = layout.division(parameters[0])
        self.axis: Axis = "outer" if division.group > 1 else "shard"
        self.num_ranks = division.parts
        self.num_copies = layout.num_ranks // (division.parts * division.group)
        """Number of ranks that hold the same shards: the replicas, or more."""
        self.copy_axis: Axis = "replicate" if self.num_copies == layout.replicate else "copy"
        self.reshard = reshard
        self.is_read_in_backward = not (info.is_embedding_unit and layout.reshard_after_backward)
        self._measure(parameters, layout)

        self.is_pending = False
        """Whether a gather has been issued that nothing has waited for yet."""
        self.is_gathered = False
        self.kept_bytes = 0
        """Size of the shards that stay after the forward pass, with an integer `reshard_after_forward`."""
        self.is_done = False
        """Whether this micro-batch's gradients have been reduced or accumulated."""
        self.accumulated_bytes = 0
        """Size of the unsharded gradients of earlier micro-batches."""
        self.delayed_bytes = 0
        """Size of a reduced buffer that waits for its all-reduce."""
        self.has_gradient_shards = False

    def _measure(self, parameters: Sequence[ParameterInfo], layout: Layout) -> None:
        """Compute the sizes, with the padding to shards of equal size."""
        self.gathered_bytes = 0
        self.cast_bytes = 0
        """Of `gathered_bytes`, what is stored in another dtype."""
        self.largest_cast_bytes = 0
        self.rearranged_bytes = 0
        """Of `gathered_bytes`, what is not divided along dimension 0, and is copied once more."""
        self.gradients = 0
        """The trained parameters' gradients, as autograd creates them."""
        self.each_accumulated: list[int] = []
        """Each of these gradients in the dtype of the reduction."""
        self.rearranged_gradients = 0
        self.largest_rearranged_gradient = 0
        self.buffer_bytes = 0
        """The buffer of gradients that is reduced."""
        self.gradient_shards = 0
        """This rank's gradients after the reduction, as they are stored."""
        for parameter in parameters:
            division = layout.division(parameter)
            padded = division.gathered_numel(parameter.shape)
            element_size = parameter.gathered_element_size(layout.param_size)
            self.gathered_bytes += padded * element_size
            if parameter.element_size != element_size:
                self.cast_bytes += padded * element_size
                self.largest_cast_bytes = max(self.largest_cast_bytes, padded * element_size)
            if division.dim:
                self.rearranged_bytes += padded * element_size
            if parameter.is_trained:
                numel = math.prod(division.unsharded_shape(parameter.shape))
                self.gradients += numel * layout.param_size
                self.each_accumulated.append(numel * layout.reduce_size)
                if division.dim:
                    self.rearranged_gradients += numel * layout.param_size
                    self.largest_rearranged_gradient = max(self.largest_rearranged_gradient, numel * layout.param_size)
                self.buffer_bytes += padded * layout.reduce_size
                self.gradient_shards += padded // self.num_ranks * parameter.element_size


def _parts_of(info: UnitInfo, reshard: bool | int, layout: Layout) -> Iterator[Part]:
    """Yield the parts of a unit in the order in which FSDP gathers them: the parameters on each mesh."""
    by_mesh: dict[tuple[GroupAxis | None, int], list[ParameterInfo]] = {}
    for parameter in info.parameters:
        by_mesh.setdefault((layout.split_axis(parameter), layout.division(parameter).parts), []).append(parameter)
    for parameters in by_mesh.values():
        yield Part(info, reshard, parameters, layout)


@dataclass
class _Bucket:
    """Gradients that replicas of an unsharded model average together."""

    pending_units: set[int]
    """Units whose backward pass has not finished."""
    gradients: int
    """Bytes of the gradients as autograd allocates them."""
    buffer: int
    """Bytes of the buffer into which they are copied."""


class Step:
    """One step of `num_micro_batches` over `trace`; `run` tells the ledger what happens."""

    def __init__(self, trace: Trace, layout: Layout, num_micro_batches: int, ledger: Ledger) -> None:
        self.trace = trace
        self.layout = layout
        self.ledger = ledger
        self.num_micro_batches = num_micro_batches
        self._parts = [
            [*_parts_of(info, reshard, layout)] for info, reshard in zip(trace.units, layout.reshard, strict=True)
        ]
        """By unit; none for a unit without parameters of its own."""
        self._order: list[int] = []
        """Units in the order in which forward passes have run them since the last backward pass, each as often as it
        ran."""
        self._positions: dict[int, list[int]] = {}
        """For each unit, its positions in `_order` that the backward pass has not reached yet."""
        self._gather_buffer = 0
        """Bytes of the forward pass's last gather buffer, which is freed once the next one has been copied out."""
        self._reducing = 0
        """Bytes of the reduction buffers that are in flight."""
        self._gradients = 0
        """Bytes of this micro-batch's unsharded gradients that are neither reduced nor accumulated yet."""
        self._adds_in_place = False
        """Whether autograd adds to the gradients of earlier micro-batches in place, because they have its dtype."""
        self._buckets = self._cut_buckets() if layout.is_unsharded and layout.replicate > 1 else deque()

    def run(self) -> None:
        """Run the micro-batches.  The second one that accumulates stands for all later ones that do."""
        number = self.num_micro_batches
        if number > 1 and self.trace.counting_pass:
            self._count_tokens(repeats=1)
            self._count_tokens(repeats=number - 1)
        if number > 1:
            self._run_micro_batch(is_last=False, repeats=1)
        if number > 2:
            self._run_micro_batch(is_last=False, repeats=number - 2)
        self._run_micro_batch(is_last=True, repeats=1)

    def _count_tokens(self, repeats: int) -> None:
        """Run the extra forward passes that count the tokens of each expert."""
        self.ledger.begin(repeats)
        for event in self.trace.counting_pass:
            self.ledger.compute(event.segment, event.unit, is_backward=False, adds_in_place=False)
            if event.kind == "pre_forward":
                self._pre_forward(event.unit)
            elif event.kind == "post_forward":
                self._post_forward(event.unit)
        self.ledger.finish()

    def _run_micro_batch(self, is_last: bool, repeats: int) -> None:
        self.ledger.begin(repeats)
        accumulates = any(part.accumulated_bytes for parts in self._parts for part in parts)
        has_same_dtype = self.layout.is_unsharded or self.layout.param_size == self.layout.reduce_size
        self._adds_in_place = accumulates and has_same_dtype
        is_backward = False
        for event in self.trace.events:
            is_backward = is_backward or event.kind in ("pre_backward", "end")
            self.ledger.compute(event.segment, event.unit, is_backward, self._adds_in_place)
            if not self._adds_in_place:
                self._allocate_gradients(event.segment.gradients)
            self._follow(event, is_backward, is_last)

    def _follow(self, event: Event, is_backward: bool, is_last: bool) -> None:
        """Do what happens at an event."""
        match event.kind:
            case "pre_forward":
                self._pre_forward(event.unit)
            case "post_forward":
                if is_backward:  # a recomputed unit stays gathered
                    self._free_gather_buffer()
                else:
                    self._post_forward(event.unit)
            case "pre_backward":
                self._pre_backward(event.unit)
            case "post_backward":
                self._post_backward(event.unit, is_last)
            case "activation_offload":
                self.ledger.offload(event.num_bytes)
            case "activation_reload":
                self.ledger.reload(event.num_bytes)
            case "activation_reload_wait":
                self.ledger.wait_for_reload()
            case "end":
                self._end(is_last)

    # -- forward -----------------------------------------------------------------------------------------------------

    def _pre_forward(self, unit: int) -> None:
        for part in self._parts[unit]:
            self._gather(part)
            self._wait(part, is_forward=True)
        for following in range(unit + 1, min(unit + 1 + self.layout.prefetch_forward, self.trace.root)):
            for part in self._parts[following]:
                self._gather(part)

    def _post_forward(self, unit: int) -> None:
        for part in self._parts[unit]:
            if part.reshard:
                self._release(part)
            if not isinstance(part.reshard, bool):
                part.kept_bytes = part.gathered_bytes // part.reshard
                self.ledger.allocate("parameters", part.kept_bytes)
        if self._parts[unit]:
            self._positions.setdefault(unit, []).append(len(self._order))
            self._order.append(unit)
        if unit == self.trace.root:
            self._free_gather_buffer()

    # -- gathering ---------------------------------------------------------------------------------------------------

    def _gather(self, part: Part) -> None:
        """Issue the all-gather of a part that is not gathered."""
        if part.is_gathered or part.is_pending or self.layout.is_unsharded:
            return
        part.is_pending = True
        axis: Axis = "reshard" if part.kept_bytes else part.axis
        num_ranks = int(part.reshard) if part.kept_bytes else part.num_ranks
        if num_ranks == 1:
            return
        # Shards in another dtype, or in host memory, are copied on their way into the buffer.
        copied = (part.gathered_bytes if self.layout.cpu_offload else part.cast_bytes) // num_ranks
        self.ledger.allocate("all-gather buffers", part.gathered_bytes + copied)
        self.ledger.free("all-gather buffers", copied)
        self.ledger.gather(part, axis, num_ranks, part.gathered_bytes)

    def _wait(self, part: Part, is_forward: bool) -> None:
        """Wait for a gather that has been issued, and copy the parameters out of its buffer."""
        if not part.is_pending:
            return
        part.is_pending = False
        part.is_gathered = True
        is_copied = part.num_ranks > 1
        buffer = part.gathered_bytes if is_copied else 0
        self.ledger.allocate("unsharded parameters", part.gathered_bytes)
        self.ledger.use("all-gather buffers", part.rearranged_bytes if is_copied else part.largest_cast_bytes)
        self.ledger.wait_for_gather(part, part.gathered_bytes + part.rearranged_bytes if is_copied else 0, is_forward)
        self.ledger.free("parameters", part.kept_bytes)
        part.kept_bytes = 0
        if is_forward:  # the copy runs on another stream, so the buffer stays until the next one
            self._free_gather_buffer()
            self._gather_buffer = buffer
        else:
            self.ledger.free("all-gather buffers", buffer)

    def _free_gather_buffer(self) -> None:
        self.ledger.free("all-gather buffers", self._gather_buffer)
        self._gather_buffer = 0

    def _release(self, part: Part) -> None:
        """Free what is gathered, but for this rank's shard."""
        if part.is_gathered:
            self.ledger.free("unsharded parameters", part.gathered_bytes)
        self.ledger.free("parameters", part.kept_bytes)
        part.is_gathered = False
        part.kept_bytes = 0

    # -- backward ----------------------------------------------------------------------------------------------------

    def _pre_backward(self, unit: int) -> None:
        ahead = self._gathered_ahead(unit)
        for part in self._parts[unit]:
            part.is_done = False
            if part.is_read_in_backward:
                self._gather(part)
            self._wait(part, is_forward=False)
        for part in ahead:
            if part.is_read_in_backward:
                self._gather(part)

    def _gathered_ahead(self, unit: int) -> list[Part]:
        """Return the parts that are gathered while the backward pass of `unit` runs, in order."""
        depth = self.layout.prefetch_backward
        positions = self._positions.get(unit)
        position = positions.pop() if positions else 0
        if depth and unit != self.trace.root:
            earlier = range(unit - 1, max(-1, unit - 1 - depth), -1)
            return [part for other in earlier for part in reversed(self._parts[other])]
        previous = self._order[max(0, position - 1) : position]
        parts = [part for other in previous for part in reversed(self._parts[other])]
        return parts if len(self._parts[unit]) > 1 else parts[:1]  # as many collectives ahead as the unit has

    def _post_backward(self, unit: int, is_last: bool) -> None:
        """Reduce or accumulate a unit's gradients, and free its parameters."""
        layout = self.layout
        parts = [part for part in reversed(self._parts[unit]) if not part.is_done]
        reduces = (is_last or layout.accumulates_shards) and not layout.is_unsharded
        if parts and reduces:
            self._finish_reductions()
        for part in parts:
            part.is_done = True
            # Less than all of them if the unit did not run, or autograd has added to tensors of earlier micro-batches.
            new = 0 if self._adds_in_place else min(part.gradients, self._gradients)
            if layout.is_unsharded:
                self._keep_as_gradients(part, new)
                continue
            if is_last or layout.reshard_after_backward:
                self._release(part)
            if part.accumulated_bytes and new:  # added to what is there
                self._free_gradients(new)
                new = 0
            if reduces:
                self._reduce(part, new, is_last)
            elif new:
                self._accumulate(part, new)
        if layout.is_unsharded and is_last:
            self._send_buckets(unit)

    def _keep_as_gradients(self, part: Part, new: int) -> None:
        """Leave gradients of an unsharded model where autograd has allocated them, as the parameters' `.grad`."""
        self._free_gradients(new)
        self.ledger.allocate("gradients", new)
        part.accumulated_bytes = part.accumulated_bytes or new

    def _accumulate(self, part: Part, new: int) -> None:
        """Keep unsharded gradients for the next micro-batch, in the dtype of the reduction."""
        if self.layout.param_size == self.layout.reduce_size:
            self._gradients -= new  # autograd's own tensors stay
            part.accumulated_bytes = new
            return
        for num_bytes in part.each_accumulated:
            self.ledger.allocate("unsharded gradients", num_bytes)
            self._free_gradients(num_bytes * self.layout.param_size // self.layout.reduce_size)
        part.accumulated_bytes = sum(part.each_accumulated)

    def _reduce(self, part: Part, new: int, is_last: bool) -> None:
        """Copy a part's gradients into a buffer, reduce it, and add the result to this rank's gradients."""
        layout = self.layout
        ledger = self.ledger
        if not new and not part.accumulated_bytes:
            return
        # What is not divided along dimension 0 is concatenated shard by shard first, one tensor after another.
        size = layout.reduce_size if part.accumulated_bytes else layout.param_size
        ledger.use("unsharded gradients", part.largest_rearranged_gradient * size // layout.param_size)
        ledger.allocate("reduction buffers", part.buffer_bytes)
        self._reducing += part.buffer_bytes
        self._free_gradients(new)
        ledger.free("unsharded gradients", part.accumulated_bytes)
        part.accumulated_bytes = 0

        scattered = part.buffer_bytes // part.num_ranks
        rearranged = part.rearranged_gradients * size // layout.param_size
        ledger.scatter(part.axis, part.num_ranks, part.buffer_bytes, rearranged)
        if is_last and part.num_copies > 1:
            ledger.average(part.copy_axis, part.num_copies, scattered)
        ledger.allocate("reduction buffers", scattered)
        shards = 0 if layout.cpu_offload else part.gradient_shards
        is_cast = scattered != part.gradient_shards
        if is_cast:
            ledger.use("reduction buffers", shards)
        # If its dtype and device are those of the gradients, it becomes them.  Otherwise FSDP keeps it until the end of
        # the backward pass in which it is all-reduced.
        is_delayed = part.num_copies > 1 and (not is_last or is_cast or layout.cpu_offload)
        ledger.free("reduction buffers", part.delayed_bytes)
        part.delayed_bytes = scattered if is_delayed else 0
        ledger.free("reduction buffers", scattered - part.delayed_bytes)
        if not part.has_gradient_shards and (is_last or part.num_copies == 1):
            ledger.allocate("gradients", shards)
            part.has_gradient_shards = True

    def _finish_reductions(self) -> None:
        """Wait for the reductions of the unit before, and free their buffers."""
        self.ledger.wait_for_scatters()
        self.ledger.free("reduction buffers", self._reducing)
        self._reducing = 0

    def _end(self, is_last: bool) -> None:
        """End the backward pass: reduce what has not been reduced, the root first."""
        for unit in (self.trace.root, *range(self.trace.root)):
            self._post_backward(unit, is_last)
            for part in self._parts[unit]:
                part.is_done = False
                if part.is_pending:  # gathered ahead, but not needed
                    part.is_pending = False
                    self.ledger.free("all-gather buffers", part.gathered_bytes if part.num_ranks > 1 else 0)
                if is_last:
                    self.ledger.free("reduction buffers", part.delayed_bytes)
                    part.delayed_bytes = 0
        self._order.clear()
        self._positions.clear()
        self._finish_reductions()
        self.ledger.finish()

    def _allocate_gradients(self, num_bytes: int) -> None:
        self._gradients += num_bytes
        self.ledger.allocate("unsharded gradients", num_bytes)

    def _free_gradients(self, num_bytes: int) -> None:
        self._gradients -= num_bytes
        self.ledger.free("unsharded gradients", num_bytes)

    # -- replicas of an unsharded model ------------------------------------------------------------------------------

    def _cut_buckets(self) -> deque[_Bucket]:
        """Return the buckets in which replicas average gradients, as `trainer.model.gradients` cuts them."""
        trained = [(number, p) for number, u in enumerate(self.trace.units) for p in u.parameters if p.is_trained]
        backward = trained[::-1]
        element_size = self.layout.param_size
        buckets = deque[_Bucket]()
        for bucket in bucket_gradients([(p.numel, element_size) for _, p in backward]):
            units = {backward[index][0] for index in bucket}
            numels = [backward[index][1].numel for index in bucket]
            buffer = bucket_numel(numels, element_size) * element_size
            buckets.append(_Bucket(units, sum(numels) * element_size, buffer))
        return buckets

    def _send_buckets(self, unit: int) -> None:
        """All-reduce the buckets that `unit` completes, in order, to average gradients over replicas."""
        for bucket in self._buckets:
            bucket.pending_units.discard(unit)
        while self._buckets and not self._buckets[0].pending_units:
            bucket = self._buckets.popleft()
            self.ledger.allocate("gradients", bucket.buffer)
            self.ledger.scatter("shard", 1, bucket.buffer, 0)
            self.ledger.average("replicate", self.layout.replicate, bucket.buffer)
            self.ledger.free("gradients", bucket.gradients)
