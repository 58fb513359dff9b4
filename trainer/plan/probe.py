"""One micro-batch of a model without a single number computed: what its modules allocate, keep, and have to do.

The model runs forward and backward on fake tensors, unsharded, on one imaginary rank, with marks where FSDP would
gather and reduce.  Of a long run of equal blocks only the first and the last ones are run, the rest is repeated from
them, so that 126 layers cost as much as four.  The result is a `Trace`, from which the other rooms compose any mesh
and any resharding without running the model again.  Knows no model by name, no mesh and no device's speed.

Source: FakeTensorMode, https://docs.pytorch.org/docs/stable/torch.compiler_fake_tensor.html
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from trainer.config import RunConfig
from trainer.errors import UserError, setting_error
from trainer.flops import flops_per_token
from trainer.loss import find_loss
from trainer.optim import moments_of
from trainer.parameters import tied_names
from trainer.plan.kernels import Work, use_gpu_kernels, work_of
from trainer.shard import (
    ShardUnit,
    apply_activation_checkpointing,
    apply_weights_dtype,
    find_blocks,
    find_units,
    kept_by_budget,
    own_outputs,
)

Mark = Literal[
    "pre_forward",
    "post_forward",
    "pre_backward",
    "post_backward",
    "end",
    "block_forward",
    "block_return",
    "block_backward",
]


@dataclass(frozen=True)
class ParameterFacts:
    """A parameter, shared ones once: its shape, whether it is trained, bytes of an element as it is stored."""

    name: str
    shape: tuple[int, ...]
    is_trained: bool
    element_size: int
    moments: int
    """Tensors of its size that the optimizer keeps for it."""
    moment_size: int
    """Bytes of an element of these."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class UnitFacts:
    """What FSDP gathers together: its name, and the parameters that no unit inside it holds."""

    name: str
    parameters: tuple[ParameterFacts, ...]

    @property
    def numel(self) -> int:
        return sum(parameter.numel for parameter in self.parameters)


@dataclass(frozen=True)
class Segment:
    """What happens between two marks, in bytes above what was there at its start, and the kernels that run."""

    peak: int = 0
    """At most, activations, temporaries and gradients together."""
    peak_accumulating: int = 0
    """The same where each parameter has a gradient already, to which new ones are added."""
    net: int = 0
    """At its end, without the gradients of parameters."""
    gradients: int = 0
    """At its end, gradients of unsharded parameters: FSDP frees them when it has reduced them."""
    work: tuple[tuple[Work, int], ...] = ()
    """Kernels, and how often each one runs."""

    def then(self, later: Segment) -> Segment:
        """Return this segment and the one behind it as one."""
        work = Counter(dict(self.work))
        for kernel, count in later.work:
            work[kernel] += count
        return Segment(
            max(self.peak, self.net + self.gradients + later.peak),
            max(self.peak_accumulating, self.net + later.peak_accumulating),
            self.net + later.net,
            self.gradients + later.gradients,
            tuple(work.items()),
        )


@dataclass(frozen=True)
class Event:
    """A mark of FSDP's, for the unit with this number, and what has happened since the mark before."""

    before: Segment
    mark: Mark
    unit: int


@dataclass(frozen=True)
class Trace:
    """One micro-batch: the events in order, the units in the order of the forward pass, the root last."""

    events: tuple[Event, ...]
    units: tuple[UnitFacts, ...]
    buffer_bytes: int
    """Buffers of the model, which lie in memory all the time."""
    input_bytes: int
    """Tokens and targets of the micro-batch."""

    @property
    def root(self) -> int:
        return len(self.units) - 1


class Probe:
    """Makes traces of one micro-batch of a configuration's model; the model itself is built once, without values."""

    def __init__(self, config: RunConfig, device_type: str) -> None:
        """`device_type` is `cuda` (with the fused kernels of a GPU) or `cpu`."""
        self.config, self.device_type = config, device_type
        with torch.device("meta"):
            self._model = config.recipe.build_model(config.model)
        apply_weights_dtype(self._model, config.train.weights_dtype)
        self._traces: dict[tuple[int, int | str], Trace] = {}

    @property
    def flops_per_token(self) -> float:
        """Model FLOPs of forward and backward for one token, recomputation not counted."""
        config = self.config
        return flops_per_token(config.recipe, config.model, self._model, config.data.seq_len)

    def trace(self, micro_batch_size: int, checkpointing: int | str) -> Trace:
        """Return the trace with units as `fsdp.wrap` says.

        Raises UserError for a model whose own code cannot be run on tensors without values.
        """
        key = (micro_batch_size, checkpointing)
        if key not in self._traces:
            try:
                self._traces[key] = self._run(*key, shortens=True)
            except Exception:  # whatever a model does with blocks that are left out, or does not do the same with
                self._traces[key] = self._run_whole(*key)
        return self._traces[key]

    def _run_whole(self, micro_batch_size: int, checkpointing: int | str) -> Trace:
        try:
            return self._run(micro_batch_size, checkpointing, shortens=False)
        except UserError:
            raise
        except Exception as error:  # the model's own, on tensors that have no values
            text = str(error).splitlines()[0] if str(error) else ""
            rule = f"cannot be planned: on tensors without values it fails with {type(error).__name__}: {text}"
            raise setting_error("model.name", self.config.model.name, rule) from error

    def _run(self, micro_batch_size: int, checkpointing: int | str, shortens: bool) -> Trace:
        model = copy.deepcopy(self._model)
        return _trace(model, self.config, micro_batch_size, checkpointing, self.device_type, shortens)


def _trace(
    model: nn.Module,
    config: RunConfig,
    micro_batch_size: int,
    checkpointing: int | str,
    device_type: str,
    shortens: bool,
) -> Trace:
    units = find_units(model, config.recipe, config.fsdp.wrap)
    blocks = find_blocks(model, config.recipe)
    kept = kept_by_budget(model, blocks, config, checkpointing, micro_batch_size)
    facts = _unit_facts(model, units, moments_of(model, config.optim))
    if device_type == "cuda":  # one that is not there cannot be faked: on a CPU build of torch autograd refuses it
        use_gpu_kernels(model)
    before = [vars(block).get("forward") for block in blocks]
    apply_activation_checkpointing(blocks, checkpointing, kept)
    checkpointed = {id(b) for b, forward in zip(blocks, before, strict=True) if vars(b).get("forward") is not forward}
    compute_dtype = getattr(torch, config.fsdp.param_dtype)
    repetition = _Repetition(model, units if shortens else (), checkpointed)
    with warnings.catch_warnings(), FakeTensorMode():
        warnings.simplefilter("ignore")  # of hooks on views, which are FSDP's to warn of
        buffer_bytes = _make_fake(model, compute_dtype, repetition.left_out)
        shape = (micro_batch_size, config.data.seq_len)
        batch = {name: torch.zeros(shape, dtype=torch.int64) for name in ("tokens", "targets")}
        meter = _Meter(model, batch.values())
        recorder = _Recorder(meter, compute_dtype)
        own_outputs((*(module for unit in units for module in unit.modules), model))
        repetition.attach(recorder)
        for number, unit in enumerate(units):
            if not repetition.leaves_out(unit.modules):
                recorder.watch_unit(unit.modules, number)
        recorder.watch_unit((model,), len(units), is_root=True)
        loss_of = find_loss(model)
        with meter:
            loss = loss_of(batch)
            (loss * 1.0).backward()
            del loss
            recorder.mark("end", len(units))
    events = tuple(_without_block_marks(repetition.repeated(recorder.events)))
    facts = _without_unused(facts, repetition.like(meter.unused(model)))
    return Trace(events, facts, buffer_bytes, 2 * 8 * math.prod(shape))


def _unit_facts(
    model: nn.Module, units: Sequence[ShardUnit], moments: Mapping[int, tuple[int, int]]
) -> tuple[UnitFacts, ...]:
    """Return the units in the order of the forward pass, each with what no inner unit holds, and then the root."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    taken: set[int] = set()
    found: dict[int, UnitFacts] = {}
    innermost_first = sorted(enumerate(units), key=lambda pair: -pair[1].depth)
    for number, modules, name in [
        *((number, unit.modules, str(unit)) for number, unit in innermost_first),
        (len(units), (model,), "root"),
    ]:
        own = []
        for parameter in itertools.chain.from_iterable(module.parameters() for module in modules):
            if id(parameter) not in taken:
                taken.add(id(parameter))
                own.append(
                    ParameterFacts(
                        names[id(parameter)],
                        tuple(parameter.shape),
                        parameter.requires_grad,
                        parameter.element_size(),
                        *moments.get(id(parameter), (0, 0)),
                    )
                )
        found[number] = UnitFacts(name, tuple(own))
    return tuple(found[number] for number in range(len(units) + 1))


def _without_unused(units: tuple[UnitFacts, ...], unused: set[str]) -> tuple[UnitFacts, ...]:
    """Return the units; parameters that get no gradient are not reduced, and the optimizer keeps nothing for them."""
    return tuple(
        replace(
            unit,
            parameters=tuple(
                replace(p, is_trained=False, moments=0) if p.name in unused else p for p in unit.parameters
            ),
        )
        for unit in units
    )


def _make_fake(model: nn.Module, compute_dtype: torch.dtype, left_out: set[int]) -> int:
    """Give fake values to what is on the meta device, parameters in the dtype of compute; return buffers' bytes."""
    ties = tied_names(model)
    buffer_bytes = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    for module in model.modules():
        if id(module) in left_out:
            continue
        for name, parameter in module._parameters.items():
            if parameter is not None:
                made = torch.empty(parameter.shape, dtype=compute_dtype)
                module._parameters[name] = nn.Parameter(made, requires_grad=parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
    for first, *aliases in ties:
        for alias in aliases:
            owner, _, name = alias.rpartition(".")
            model.get_submodule(owner)._parameters[name] = model.get_parameter(first)
    return buffer_bytes


# ---------------------------------------------------------------------------------------------------------------
# Memory


class _Meter(TorchDispatchMode):
    """Counts the bytes of the storages that operators make, until nobody refers to them any more."""

    def __init__(self, model: nn.Module, inputs: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._known: dict[int, weakref.ref[Any]] = {}
        self._live = self._start = self._peak = 0
        self._gradients = self._start_gradients = self._peak_accumulating = 0
        self._work: Counter[Work] = Counter()
        self._not_counted = {
            tensor.untyped_storage()._cdata
            for tensor in (*model.parameters(), *model.buffers(), *inputs)
            if not tensor.is_meta
        }
        self._with_gradient: set[int] = set()
        for parameter in model.parameters():
            if parameter.requires_grad and not parameter.is_meta:
                parameter.register_post_accumulate_grad_hook(self._note_gradient)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.prim.device.default:
            return result
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage())
        work = work_of(func, args, kwargs or {}, result)
        if work.num_bytes:
            self._work[work] += 1
        self._peak = max(self._peak, self._live)
        self._peak_accumulating = max(self._peak_accumulating, self._live - self._gradients)
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._known and key not in self._not_counted:
            size = storage.nbytes()
            self._known[key] = weakref.ref(storage, lambda _: self._forget(key, size))
            self._live += size

    def _forget(self, key: int, size: int) -> None:
        del self._known[key]
        self._live -= size

    def _note_gradient(self, parameter: torch.Tensor) -> None:
        if id(parameter) not in self._with_gradient and parameter.grad is not None:
            self._with_gradient.add(id(parameter))
            self._gradients += parameter.grad.numel() * parameter.grad.element_size()

    def unused(self, model: nn.Module) -> set[str]:
        """Return the names of the trainable parameters that have got no gradient."""
        return {
            name
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and not parameter.is_meta and id(parameter) not in self._with_gradient
        }

    def cut(self) -> Segment:
        """Return what has happened since the last cut, and begin anew."""
        gradients = self._gradients - self._start_gradients
        segment = Segment(
            peak=self._peak - self._start,
            peak_accumulating=self._peak_accumulating - (self._start - self._start_gradients),
            net=self._live - self._start - gradients,
            gradients=gradients,
            work=tuple(self._work.items()),
        )
        self._begin()
        return segment

    def _begin(self) -> None:
        self._start = self._peak = self._live
        self._start_gradients = self._gradients
        self._peak_accumulating = self._live - self._gradients
        self._work = Counter()


# ---------------------------------------------------------------------------------------------------------------
# Marks


class _Recorder:
    """Notes where FSDP would gather and reduce, and where repeated blocks begin: as FSDP does, with hooks."""

    def __init__(self, meter: _Meter, compute_dtype: torch.dtype) -> None:
        self.meter = meter
        self.cast_dtype = None if compute_dtype == torch.float32 else compute_dtype
        self.events: list[Event] = []

    def mark(self, mark: Mark, unit: int) -> None:
        self.events.append(Event(self.meter.cut(), mark, unit))

    def watch_block(self, block: nn.Module, position: int) -> None:
        """Note where the block begins, in both passes."""
        block.register_forward_pre_hook(lambda *_: self.mark("block_forward", position))

        def after(block: nn.Module, args: Any, output: Any) -> None:
            self._when_gradient("block_backward", position, output)
            self.mark("block_return", position)

        block.register_forward_hook(after)

    def watch_unit(self, modules: Sequence[nn.Module], unit: int, is_root: bool = False) -> None:
        """Note what FSDP's hooks on `modules`, gathered together, do.

        The unit is gathered before the first of them runs and reshards after the last; its gradients are reduced once
        those of the first one's inputs are known, or, where these need none, when the whole backward pass is over.
        """
        waiting = set(modules)

        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            is_first = waiting == set(modules)
            if self.cast_dtype is not None:
                args, kwargs = tree_map_only(torch.Tensor, self._cast, (args, kwargs))
            self.mark("pre_forward", unit)
            if is_first and torch.is_grad_enabled() and not is_root:
                args, kwargs = self._note_inputs(unit, args, kwargs)
            return args, kwargs

        def after(module: nn.Module, args: Any, output: Any) -> None:
            waiting.discard(module)
            if not waiting:
                waiting.update(modules)
                self.mark("post_forward", unit)
                self._when_gradient("pre_backward", unit, output)

        for module in modules:
            module.register_forward_pre_hook(before, with_kwargs=True)
            module.register_forward_hook(after)

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.cast_dtype) if tensor.is_floating_point() else tensor

    def _when_gradient(self, mark: Mark, unit: int, output: Any) -> None:
        """Make the mark when the first gradient of `output` is there."""
        is_done = False

        def note(gradient: torch.Tensor) -> None:
            nonlocal is_done
            if not is_done:
                is_done = True
                self.mark(mark, unit)

        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(note)

    def _note_inputs(self, unit: int, args: Any, kwargs: Any) -> Any:
        leaves, structure = tree_flatten((args, kwargs))
        with_gradient = [n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if with_gradient:
            passed = _AfterBackward.apply(lambda: self.mark("post_backward", unit), *(leaves[n] for n in with_gradient))  # type: ignore[no-untyped-call]
            for n, tensor in zip(with_gradient, passed, strict=True):
                leaves[n] = tensor
        return tree_unflatten(leaves, structure)


class _AfterBackward(torch.autograd.Function):
    """Passes tensors on, and calls back once the gradients of all of them are there."""

    @staticmethod
    def forward(ctx: Any, callback: Callable[[], None], *inputs: torch.Tensor) -> Any:
        ctx.callback = callback
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.callback()
        return (None, *gradients)


# ---------------------------------------------------------------------------------------------------------------
# Repetition

_LONGEST_PERIOD = 16


class _NotRepeated(Exception):
    """A block does not pass on what it was given in the same form, so that none can be left out."""


@dataclass(frozen=True)
class _Run:
    """Blocks in a row that repeat with a period.

    Two periods are run, of which the second stands for the `num_skipped` blocks behind it, and then the rest.
    """

    blocks: tuple[nn.Module, ...]
    names: tuple[str, ...]
    period: int
    num_skipped: int

    @property
    def first_skipped(self) -> int:
        return 2 * self.period

    @property
    def first_behind(self) -> int:
        return self.first_skipped + self.num_skipped

    @property
    def skipped(self) -> tuple[nn.Module, ...]:
        return self.blocks[self.first_skipped : self.first_behind]


class _Repetition:
    """Leaves out the middle of long runs of equal blocks, and puts copies of its like into the events."""

    def __init__(self, model: nn.Module, units: Sequence[ShardUnit], checkpointed: set[int]) -> None:
        self.runs = _find_runs(model, checkpointed) if units else []
        self.left_out = {id(m) for run in self.runs for block in run.skipped for m in block.modules()}
        self._place: list[tuple[_Run, int]] = []  # of each watched block, by the number in its marks
        self._calls: dict[int, list[tuple[int, Any]]] = {id(run): [] for run in self.runs}
        self._home: dict[int, tuple[_Run, int, str]] = {}  # of each unit: its block, and its name therein
        self._unit_at: dict[tuple[int, int, str], int] = {}
        for run in self.runs:
            for position, block in enumerate(run.blocks):
                inside = {id(module): name for name, module in block.named_modules()}
                for number, unit in enumerate(units):
                    if all(id(module) in inside for module in unit.modules):
                        name = " ".join(inside[id(module)] for module in unit.modules)
                        self._home[number] = (run, position, name)
                        self._unit_at[id(run), position, name] = number

    def leaves_out(self, modules: Iterable[nn.Module]) -> bool:
        return all(id(module) in self.left_out for module in modules)

    def attach(self, recorder: _Recorder) -> None:
        """Mark where blocks begin, and let those that are left out pass on what they are given."""
        for run in self.runs:
            for position, block in enumerate(run.blocks):
                block.register_forward_pre_hook(self._note_call(run, position), with_kwargs=True)
                recorder.watch_block(block, len(self._place))
                self._place.append((run, position))
                if block in run.skipped:
                    block.forward = _pass_on  # type: ignore[method-assign]
                else:
                    block.register_forward_hook(_check_form)

    def like(self, names: set[str]) -> set[str]:
        """Return the names of parameters, and those of the same parameters of blocks that were left out."""
        found = set(names)
        for run in self.runs:
            for position in range(run.first_skipped, run.first_behind):
                template = run.names[run.period + position % run.period]
                inside = f"{template}."
                found |= {f"{run.names[position]}.{n.removeprefix(inside)}" for n in names if n.startswith(inside)}
        return found

    def _note_call(self, run: _Run, position: int) -> Callable[..., None]:
        def note(block: nn.Module, args: Any, kwargs: Any) -> None:
            self._calls[id(run)].append((position, _form((args, kwargs))))

        return note

    def _check(self, events: Sequence[Event]) -> None:
        """Raise _NotRepeated unless the model treats the blocks that were left out as it does those in their stead.

        They must be called one after another, with arguments of the same form and the same plain values, and what
        the model does between them must be the same.
        """
        for run in self.runs:
            calls, size = self._calls[id(run)], len(run.blocks)
            if len(calls) % size or [position for position, _ in calls] != [*range(size)] * (len(calls) // size):
                raise _NotRepeated
            for number, (position, form) in enumerate(calls):
                if position >= run.period and position % size >= 1 and form != calls[number - run.period][1]:
                    raise _NotRepeated
            between: dict[int, set[Any]] = {}
            for event, following in itertools.pairwise(events):
                if event.mark == "block_return" and following.mark == "block_forward":
                    place, position = self._place[event.unit]
                    if place is run and run.period <= position < run.first_behind:
                        between.setdefault(position % run.period, set()).add(frozenset(following.before.work))
            if any(len(kinds) > 1 for kinds in between.values()):
                raise _NotRepeated

    def repeated(self, events: Sequence[Event]) -> list[Event]:
        """Return the events with copies of the second period for what was left out.

        A period is what happens from the mark of its first block to that of the next period's: the model's own work
        between blocks is part of it, and what it did around blocks that were left out is dropped.
        """
        self._check(events)
        done: list[Event] = []
        number = 0
        while number < len(events):
            event = events[number]
            done.append(event)
            number += 1
            if not event.mark.startswith("block"):
                continue
            run, position = self._place[event.unit]
            if event.mark == "block_forward" and position == run.first_skipped < run.first_behind:
                first = max(n for n, e in enumerate(events[:number]) if self._is_at(e, event.mark, run, run.period))
                done += self._copies(events[first + 1 : number], run, range(0, run.num_skipped, run.period))
                number = self._next(events, number, event.mark, run, run.first_behind) + 1
            elif event.mark == "block_backward" and position == run.first_behind - 1 >= run.first_skipped:
                number = self._next(events, number, event.mark, run, run.first_skipped - 1) + 1
                end = self._next(events, number, event.mark, run, run.period - 1) + 1
                done += self._copies(events[number:end], run, range(run.num_skipped - run.period, -1, -run.period))
        return done

    def _is_at(self, event: Event, mark: Mark, run: _Run, position: int) -> bool:
        return event.mark == mark and self._place[event.unit] == (run, position)

    def _next(self, events: Sequence[Event], start: int, mark: Mark, run: _Run, position: int) -> int:
        for number in range(start, len(events)):
            if self._is_at(events[number], mark, run, position):
                return number
        raise _NotRepeated

    def _copies(self, template: Sequence[Event], run: _Run, offsets: Iterable[int]) -> Iterator[Event]:
        for offset in offsets:
            for event in template:
                is_block = event.mark.startswith("block")
                yield event if is_block else replace(event, unit=self._moved(event.unit, run, run.period + offset))

    def _moved(self, unit: int, run: _Run, distance: int) -> int:
        home = self._home.get(unit)
        if home is None or home[0] is not run:
            return unit
        return self._unit_at[id(run), home[1] + distance, home[2]]


def _form(arguments: Any) -> Any:
    """Return what two calls must have in common: structure, shapes and dtypes, and values that are no tensors."""
    leaves, structure = tree_flatten(arguments)
    return str(structure), [
        (tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, torch.Tensor) else repr(leaf)
        for leaf in leaves
    ]


def _pass_on(*args: Any, **kwargs: Any) -> Any:
    if not args:
        raise _NotRepeated
    # As a node of its own in the graph, so that the gradients of each block's output are known one after another.
    return args[0].view_as(args[0]) if isinstance(args[0], torch.Tensor) else args[0]


def _check_form(block: nn.Module, args: Any, output: Any) -> None:
    """Raise _NotRepeated unless a block's output could be the next one's input."""
    given = args[0] if args else None
    if not (isinstance(output, torch.Tensor) and isinstance(given, torch.Tensor)):
        raise _NotRepeated
    if output.shape != given.shape or output.dtype != given.dtype:
        raise _NotRepeated


def _without_block_marks(events: Iterable[Event]) -> Iterator[Event]:
    """Yield the marks of FSDP's alone."""
    held = Segment()
    for event in events:
        if event.mark.startswith("block"):
            held = held.then(event.before)
        else:
            yield replace(event, before=held.then(event.before))
            held = Segment()


def _find_runs(model: nn.Module, checkpointed: set[int]) -> list[_Run]:
    """Return the runs of equal blocks that are worth shortening: children of a list of modules, not inside another."""
    runs: list[_Run] = []
    inside: set[int] = set()
    shared = {id(model.get_parameter(group[0])) for group in tied_names(model)}
    for parent_name, parent in model.named_modules():
        if not isinstance(parent, (nn.ModuleList, nn.Sequential)) or id(parent) in inside:
            continue
        blocks = tuple(parent.children())
        if len(blocks) < 4:
            continue
        counted = _counted_settings(blocks)
        kinds = [_kind(block, counted, shared, checkpointed) for block in blocks]
        for period in range(1, min(_LONGEST_PERIOD, len(blocks) // 4) + 1):
            if all(kinds[n] == kinds[n - period] for n in range(period, len(blocks))):
                num_skipped = (len(blocks) - 3 * period) // period * period
                if num_skipped < 2 * period:  # with fewer there is nothing to compare what lies between them with
                    break
                inner = "".join([parent_name, "."] if parent_name else [])
                names = tuple(f"{inner}{name}" for name, _ in parent.named_children())
                runs.append(_Run(blocks, names, period, num_skipped))
                inside |= {id(module) for block in blocks for module in block.modules()}
                break
    return runs


def _kind(block: nn.Module, counted: set[tuple[str, str]], shared: set[int], checkpointed: set[int]) -> Any:
    """Return what two blocks must have in common to be one and the same here: modules, shapes and plain settings.

    Settings in `counted` are not among these.  What shares a parameter is like nothing else.
    """
    parts: list[Any] = []
    for name, module in block.named_modules():
        settings = {key: value for key, value in _settings(module) if (name, key) not in counted}
        tensors = [
            (key, tuple(tensor.shape), tensor.dtype, tensor.requires_grad, id(tensor) in shared and id(tensor))
            for key, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None
        ]
        parts.append((name, type(module), id(module) in checkpointed, settings, tensors))
    return parts


def _settings(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the attributes that are the module's own settings, as far as two modules can be compared by them."""
    for key, value in vars(module).items():
        if key in _OF_EVERY_MODULE or isinstance(value, (torch.Tensor, nn.Module)):
            continue
        is_plain = value is None or isinstance(value, (int, float, str, bool, tuple, list, dict, set, torch.dtype))
        yield key, value if is_plain or dataclasses.is_dataclass(value) else id(value)


_OF_EVERY_MODULE = frozenset({*vars(nn.Module()), "forward"})


def _counted_settings(blocks: Sequence[nn.Module]) -> set[tuple[str, str]]:
    """Return the settings (module's name, attribute) that only say which block of the list this one is."""
    counted = {(name, key) for name, module in blocks[0].named_modules() for key, _ in _settings(module)}
    for position, block in enumerate(blocks):
        own = {
            (name, key)
            for name, module in block.named_modules()
            for key, value in _settings(module)
            if type(value) is int and value == position
        }
        counted &= own
    return counted
