"""Records a `Trace` of one micro-batch: the events of FSDP units and of activation offloading, and the memory and
kernels between them."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.model.parameters import storage_id
from trainer.plan.kernels import Float8Casts, Operator, Work, fuse, work_of

EventKind = Literal[
    "pre_forward",  # this and the next three: FSDP's hooks on a unit
    "post_forward",
    "pre_backward",
    "post_backward",
    "end",  # the whole backward pass has ended
    "activation_offload",  # activations start being copied to the host
    "activation_reload",  # activations start being copied back to the device
    "activation_reload_wait",  # the backward pass waits for the earliest pending reload
]


@dataclass(frozen=True)
class ParameterInfo:
    """The facts about one parameter that a plan needs; tied parameters appear once."""

    name: str
    shape: tuple[int, ...]
    is_trained: bool
    """Whether the parameter requires a gradient and receives one."""
    element_size: int
    """Bytes per element in the stored dtype."""
    num_moments: int
    """Number of tensors of the parameter's shape in its optimizer state."""
    moment_size: float
    """Bytes per element of each of these tensors, including the scales of 8-bit ones."""
    muon_blocks: tuple[int, ...] | None = None
    """Number of rows in each submatrix that Muon orthogonalizes separately.

    Empty if Muon orthogonalizes the parameter's matrices whole; None if Muon does not train the parameter."""
    is_expert: bool = False
    """Whether it holds expert weights, which expert parallelism may divide among ranks (`ModelSpec.experts`)."""
    tensor_dim: int | None = None
    """The dimension along which tensor parallelism divides it; None if it does not."""
    num_quantized_weights: int = 0
    """Number of weights in a quantized parameter, which is stored and gathered as packed bytes; 0 for any other."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def gathered_element_size(self, param_size: int) -> int:
        """Return the bytes per element once gathered, given the bytes per element of the compute dtype."""
        return self.element_size if self.num_quantized_weights else param_size


@dataclass(frozen=True)
class UnitInfo:
    """An FSDP unit: its name and the parameters that it all-gathers together, without those of nested units."""

    name: str
    parameters: tuple[ParameterInfo, ...]
    is_embedding_unit: bool = False
    """Whether it holds only embedding tables, which the backward pass does not read."""

    @property
    def numel(self) -> int:
        return sum(parameter.numel for parameter in self.parameters)


@dataclass(frozen=True)
class Segment:
    """What happens between two events: the memory in bytes, relative to the first event, and the kernels that run."""

    peak: int = 0
    """Peak of activations, temporaries and gradients together."""
    peak_accumulating: int = 0
    """The same peak if each parameter already has a gradient, to which autograd adds the new one in place."""
    net: int = 0
    """Bytes at the end, excluding the parameters' gradients."""
    gradients: int = 0
    """Bytes of the new gradients of unsharded parameters, which FSDP frees after reducing them."""
    work: tuple[tuple[Work, int], ...] = ()
    """Kernels, and the number of times each one runs."""

    def scaled(self, kind: str, factor: float) -> Segment:
        """Return the segment with the FLOPs of all kernels of one kind multiplied by `factor`."""
        work = Counter[Work]()
        for kernel, count in self.work:
            flops = round(kernel.flops * factor) if kernel.kind == kind else kernel.flops
            work[kernel._replace(flops=flops)] += count
        return replace(self, work=tuple(work.items()))


@dataclass(frozen=True)
class Event:
    """An event of a unit, and the segment from the previous event to this one."""

    segment: Segment
    kind: EventKind
    unit: int
    """Index of the unit; for copies, the current one."""
    num_bytes: int = 0
    """Bytes that `activation_offload` or `activation_reload` copies."""


@dataclass(frozen=True)
class Trace:
    """One micro-batch: the events in order, and the units in forward order with the root last."""

    events: tuple[Event, ...]
    units: tuple[UnitInfo, ...]
    buffer_bytes: int
    """Bytes of the model's buffers, which are always in memory."""
    input_bytes: int
    """Bytes of the micro-batch's tokens and targets."""
    counting_pass: tuple[Event, ...] = ()
    """The extra forward pass that counts how often each expert is chosen, if load balancing needs it."""
    expert_count_bytes: int = 0
    """Bytes of the expert counts that are summed over all ranks once per step."""

    @property
    def root(self) -> int:
        return len(self.units) - 1

    def scaled(self, kind: str, factor: float) -> Trace:
        """Return the trace with the FLOPs of all kernels of one kind, such as `attention`, multiplied by `factor`."""
        if factor == 1.0:
            return self
        scaled = (
            tuple(replace(event, segment=event.segment.scaled(kind, factor)) for event in events)
            for events in (self.events, self.counting_pass)
        )
        events, counting_pass = scaled
        return replace(self, events=events, counting_pass=counting_pass)


# ---------------------------------------------------------------------------------------------------------------
# Recording a run on fake tensors: the bytes that operators allocate, and where FSDP would gather and reduce


class MemoryMeter(TorchDispatchMode):
    """Tracks the kernels that run, and the storages that operators allocate, until these are freed.

    Each storage that it tracks has a serial number; any other is identified by a negative number (see `serial`).
    """

    def __init__(
        self, model: nn.Module, inputs: Iterable[torch.Tensor], is_compiled: bool = False, float8: str = "none"
    ) -> None:
        """`is_compiled`: whether blocks are compiled; `float8`: the value of `train.float8`."""
        super().__init__()
        self.in_block = self.is_backward = False
        """Whether the current operators are inside a block, and whether they belong to the backward pass."""
        self.is_paused = False
        """Whether operators are ignored, because they work on host memory."""
        self._original: dict[int, int] = {}
        """For each storage that received reloaded contents, the storage that was offloaded; both as serial numbers."""
        self._is_compiled, self._casts = is_compiled, Float8Casts(float8, is_compiled)
        self._live_storages: dict[int, weakref.ref[Any]] = {}
        self._serials: dict[int, int] = {}
        self._num_allocated = 0
        self._log: list[tuple[int, int]] = []
        """Pairs of serial number and bytes, negative when freed; serial number 0 is the gradient of a parameter."""
        self._operators: list[Operator] = []
        self._raw_segments: list[_RawSegment] = []
        self._from_forward: set[int] = set()
        """Serial numbers of the storages that blocks have allocated in their forward passes."""
        self._untracked = {
            storage_id(tensor.untyped_storage())
            for tensor in (*model.parameters(), *model.buffers(), *inputs)
            if not tensor.is_meta
        }
        self._with_gradient: set[int] = set()
        for parameter in model.parameters():
            if parameter.requires_grad and not parameter.is_meta:
                parameter.register_post_accumulate_grad_hook(self._note_gradient)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.is_paused or func is torch.ops.prim.device.default:
            return result
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._track(tensor.untyped_storage())
        work = work_of(func, args, kwargs or {}, result)
        if work.num_bytes:
            self._note_work(work, func, args, kwargs, result)
        return result

    def _note_work(self, work: Work, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        is_fused = self._is_compiled and self.in_block and work.kind == "memory"
        operator = Operator(work, self._touched((args, kwargs)), self._touched(result), is_fused)
        if not self.in_block:
            self._operators.append(operator)
            return
        serials = [self.serial(arg.untyped_storage()) for arg in args if isinstance(arg, torch.Tensor)]
        self._operators += self._casts.cast(func, args, operator, serials)

    def _track(self, storage: torch.UntypedStorage) -> None:
        key = storage_id(storage)
        if key not in self._live_storages and key not in self._untracked:
            size = storage.nbytes()

            def note_free(_: object) -> None:
                del self._live_storages[key]
                self._log.append((self._serials.pop(key), -size))

            self._live_storages[key] = weakref.ref(storage, note_free)
            self._num_allocated += 1
            self._serials[key] = self._num_allocated
            self._log.append((self._num_allocated, size))
            if self.in_block and not self.is_backward:
                self._from_forward.add(self._num_allocated)

    def serial(self, storage: torch.UntypedStorage) -> int:
        """Return the serial number of a storage; if it is not tracked, the negative of its `storage_id`."""
        key = storage_id(storage)
        return self._serials.get(key, -key)

    def note_fetched(self, original: int, storage: torch.UntypedStorage) -> None:
        """Note that `storage` receives the contents of the offloaded storage with the serial number `original`."""
        self._original[self.serial(storage)] = original

    def _touched(self, tree: Any) -> dict[int, int]:
        """Return how many bytes of each storage the tensors in `tree` cover, by the storage's serial number."""
        num_bytes: dict[int, int] = {}
        for tensor in pytree.tree_leaves(tree):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                serial = self.serial(storage)
                covered = num_bytes.get(serial, 0) + tensor.numel() * tensor.element_size()
                num_bytes[serial] = min(storage.nbytes(), covered)
        return num_bytes

    def _note_gradient(self, parameter: torch.Tensor) -> None:
        if id(parameter) not in self._with_gradient and parameter.grad is not None:
            self._with_gradient.add(id(parameter))
            self._log.append((0, parameter.grad.numel() * parameter.grad.element_size()))

    def parameters_without_gradient(self, model: nn.Module) -> set[str]:
        """Return the names of the trainable parameters that have received no gradient."""
        return {
            name
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and not parameter.is_meta and id(parameter) not in self._with_gradient
        }

    def cut(self) -> None:
        """End the current segment and start the next one."""
        self._raw_segments.append(_RawSegment(self._log, self._operators, frozenset(self._serials.values())))
        self._log, self._operators = [], []
        self._casts.clear()

    def segments(self) -> list[Segment]:
        """Return the segments so far, in order."""
        if not self._is_compiled:
            return [_segment_of(raw.log, Counter(o.work for o in raw.operators)) for raw in self._raw_segments]
        segments, already_dropped = list[Segment](), set[int]()
        never_fetched = self.never_fetched()
        for raw, unread in zip(self._raw_segments, self._unread(), strict=True):
            sizes = dict(raw.log)
            dropped = {serial for serial in unread if serial in raw.alive}
            work, not_materialized = fuse(raw.operators, raw.alive - dropped)
            # An earlier segment has counted the storages that it allocated, so their end must be counted too.
            born = {serial for serial, size in raw.log if size > 0}
            not_materialized = not_materialized & born | never_fetched
            log = [(serial, size) for serial, size in raw.log if not (serial in already_dropped and size < 0)]
            log += [(serial, -sizes[serial]) for serial in dropped - not_materialized]
            segments.append(_segment_of(log, work, not_materialized))
            already_dropped |= dropped
        return segments

    def _unread(self) -> list[set[int]]:
        """Return, for each segment, the storages that blocks allocate there and that no later segment reads.

        Compiled code does not save them for the backward pass, regardless of the checkpointing policy.
        """
        last_read: dict[int, int] = {}
        for number, raw in enumerate(self._raw_segments):
            read = {serial for operator in raw.operators for serial in operator.reads}
            last_read |= dict.fromkeys([*read, *(self._original.get(serial, serial) for serial in read)], number)
        return [
            {serial for serial, _ in raw.log if serial in self._from_forward and last_read.get(serial, 0) <= number}
            for number, raw in enumerate(self._raw_segments)
        ]

    def never_fetched(self) -> set[int]:
        """Return the reloaded storages that nothing reads: compiled code would not have saved or copied them."""
        if not self._is_compiled:
            return set()
        read = {s for raw in self._raw_segments for operator in raw.operators for s in operator.reads}
        return {serial for serial in self._original if serial not in read}

    def copied_bytes(self, storages: Mapping[int, int]) -> int:
        """Return how many bytes of the offloaded storages are copied, given their sizes by serial number."""
        not_copied = {self._original[serial] for serial in self.never_fetched()}
        return sum(size for serial, size in storages.items() if serial not in not_copied)


class _RawSegment(NamedTuple):
    """A segment as recorded, before fusion."""

    log: list[tuple[int, int]]
    operators: list[Operator]
    alive: frozenset[int]
    """Storages that are alive at the end of the segment."""


def _segment_of(log: Iterable[tuple[int, int]], work: Counter[Work], not_materialized: Collection[int] = ()) -> Segment:
    live = gradients = peak = peak_accumulating = 0
    for serial, size in log:
        if serial == 0:
            gradients += size
        elif serial not in not_materialized:
            live += size
            peak, peak_accumulating = max(peak, live), max(peak_accumulating, live - gradients)
    return Segment(peak, peak_accumulating, live - gradients, gradients, tuple(work.items()))


class Recorder:
    """Records where FSDP would gather and reduce, using the same hooks as FSDP."""

    def __init__(self, meter: MemoryMeter, compute_dtype: torch.dtype) -> None:
        self.meter = meter
        self.cast_dtype = None if compute_dtype == torch.float32 else compute_dtype
        self._recorded: list[tuple[EventKind, int, Mapping[int, int]]] = []

    @property
    def events(self) -> list[Event]:
        """The events so far, in order."""
        pairs = zip(self.meter.segments(), self._recorded, strict=True)
        return [Event(segment, kind, unit, self.meter.copied_bytes(sizes)) for segment, (kind, unit, sizes) in pairs]

    def record(self, kind: EventKind, unit: int) -> None:
        self.meter.cut()
        self._recorded.append((kind, unit, {}))

    def record_copy(self, kind: EventKind, sizes: Mapping[int, int]) -> None:
        """Record a copy to or from the host in the current unit, given the bytes of each storage by serial number."""
        self.meter.cut()
        unit = self._recorded[-1][1] if self._recorded else 0
        self._recorded.append((kind, unit, sizes))

    def watch_inside(self, block: nn.Module) -> None:
        """Tell the meter when operators run inside a block.

        Once the backward pass of any block has begun, all operators count as inside a block.
        """

        def enter(*_: Any) -> None:
            self.meter.in_block = True

        def enter_backward(*_: Any) -> None:
            self.meter.in_block = self.meter.is_backward = True

        def leave(block: nn.Module, args: Any, output: Any) -> None:
            self.meter.in_block = False
            for tensor in pytree.tree_leaves(output):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(enter_backward)

        block.register_forward_pre_hook(enter)
        block.register_forward_hook(leave)

    def watch_unit(self, modules: Sequence[nn.Module], unit: int, is_root: bool = False) -> None:
        """Record the events of FSDP's hooks for `modules`, which form one unit.

        The unit is gathered before its first module runs and resharded after its last.  Its gradients are reduced once
        the gradients of the first module's inputs have been computed, or at the end of the backward pass if the inputs
        need none.
        """
        pending = set(modules)

        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            is_first = pending == set(modules)
            if self.cast_dtype is not None:
                args, kwargs = pytree.tree_map_only(torch.Tensor, self._cast, (args, kwargs))
            self.record("pre_forward", unit)
            if is_first and torch.is_grad_enabled() and not is_root:
                args, kwargs = self._note_inputs(unit, args, kwargs)
            return args, kwargs

        def after(module: nn.Module, args: Any, output: Any) -> None:
            pending.discard(module)
            if not pending:
                pending.update(modules)
                self.record("post_forward", unit)
                self._when_gradient("pre_backward", unit, output)

        for module in modules:
            module.register_forward_pre_hook(before, with_kwargs=True)
            module.register_forward_hook(after)

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.cast_dtype) if tensor.is_floating_point() else tensor

    def _when_gradient(self, kind: EventKind, unit: int, output: Any) -> None:
        """Record the event as soon as the first gradient of `output` is computed."""
        is_done = False

        def note(gradient: torch.Tensor) -> None:
            nonlocal is_done
            if not is_done:
                is_done = True
                self.record(kind, unit)

        for tensor in pytree.tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(note)

    def _note_inputs(self, unit: int, args: Any, kwargs: Any) -> Any:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        with_gradient = [n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if with_gradient:
            outputs = _AfterBackward.apply(
                lambda: self.record("post_backward", unit), *(leaves[n] for n in with_gradient)
            )  # type: ignore[no-untyped-call]
            for n, tensor in zip(with_gradient, outputs, strict=True):
                leaves[n] = tensor
        return pytree.tree_unflatten(leaves, structure)


class _AfterBackward(torch.autograd.Function):
    """The identity; in the backward pass, calls a callback once the gradients of all its tensors are computed."""

    @staticmethod
    def forward(ctx: Any, callback: Callable[[], None], *inputs: torch.Tensor) -> Any:
        ctx.callback = callback
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.callback()
        return (None, *gradients)
