"""Traces one micro-batch of a model on fake tensors: the kernels that run, and the memory that is allocated and freed.

The model runs forward and backward, unsharded, on one imaginary rank, and the points where FSDP would gather and reduce
are recorded.  In a long series of identical blocks, only the first and last few are run, and the events of the others
are copied from them, so tracing 126 layers takes about as long as tracing four.  The result is a `Trace`, from which
the planner simulates a step with any `mesh.replicate`, `mesh.shard` and resharding, without running the model again.
Each combination of context-parallel and expert-parallel group sizes needs its own trace.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from trainer.config.parallel import find_slices
from trainer.config.requirements import compiles_when_planned
from trainer.config.schema import RunConfig
from trainer.data.opening import open_source
from trainer.errors import UserError, reason_of, setting_error
from trainer.experts import Estimate, fake_tensors, find_balance, find_experts, simulate_expert_group
from trainer.loss import find_loss, loss_mode
from trainer.model.network import build_network, num_extra_forward_passes, training_flops_per_token
from trainer.model.offload import ActivationOffload, choose_offloaded_blocks
from trainer.model.packed import num_weights
from trainer.model.parameters import tied_names
from trainer.model.recompute import OperatorId
from trainer.model.shard import apply_activation_checkpointing, forbid_view_outputs, operators_to_save
from trainer.model.units import ShardUnit, find_blocks, find_units, is_embedding_unit
from trainer.optim.groups import assign, block_rows
from trainer.optim.optimizer import optimizer_state_sizes
from trainer.plan.kernels import use_gpu_kernels
from trainer.plan.trace import Event, EventKind, MemoryMeter, ParameterInfo, Recorder, Segment, Trace, UnitInfo
from trainer.sequence import use_slices


class Probe:
    """Builds a configuration's model once, on the meta device, and traces it on micro-batches."""

    def __init__(self, config: RunConfig, device_type: str, imbalance: float = 1.0) -> None:
        """`device_type`: `cpu`, or `cuda` to trace with a GPU's fused kernels.  For `imbalance`, see `Machine`."""
        self.config, self.device_type, self._imbalance = config, device_type, imbalance
        self._model = build_network(config)
        self._traces: dict[tuple[int, int | str, float], Trace] = {}  # by the arguments of `trace`

    def with_config(self, config: RunConfig) -> Probe:
        """Return a probe of the same model for a configuration whose `mesh` or `train` section differs."""
        other = copy.copy(self)
        other.config, other._traces = config, {}
        return other

    @property
    def flops_per_token(self) -> float:
        """Model FLOPs per token for forward and backward, excluding recomputation."""
        return training_flops_per_token(self.config, self._model, self.attended_length)

    @cached_property
    def attended_length(self) -> float:
        """The sequence length, in tokens, for which the FLOPs of attention are counted.

        With `data.documents=masked`, this is the length of the document that a token belongs to, averaged over tokens;
        otherwise, or if the data cannot be read, it is `data.seq_len`.
        """
        data, length = self.config.data, None
        if data.documents == "masked":
            with contextlib.suppress(UserError):
                length = open_source(data, self.config.vocab_size, "train").attended
        return length or data.seq_len

    @property
    def num_units(self) -> int:
        """Number of FSDP units, excluding the root."""
        return len(find_units(self._model, self.config.spec, self.config.fsdp.wrap))

    def trace(self, micro_batch_size: int, checkpointing: int | str, offload: float = 0.0) -> Trace:
        """Return the trace of a micro-batch, with units according to `fsdp.wrap`.

        checkpointing: as `train.activation_checkpoint`.
        offload: the fraction of blocks whose activations go to host memory.

        Raises UserError if the model's own code cannot run on fake tensors.
        """
        key = (micro_batch_size, checkpointing, offload)
        if key not in self._traces:
            with contextlib.suppress(Exception):  # blocks cannot be skipped, or the model treats them differently
                self._traces[key] = self._run(micro_batch_size, checkpointing, offload, skips_blocks=True)
        if key not in self._traces:
            try:
                self._traces[key] = self._run(micro_batch_size, checkpointing, offload, skips_blocks=False)
            except UserError:
                raise
            except Exception as error:  # from the model's own code, on tensors without values
                reason = f"{type(error).__name__}: {reason_of(error)}"
                rule = f"cannot be planned: tracing it on fake tensors fails with {reason}"
                raise setting_error("model.name", self.config.model.name, rule) from error
        return self._traces[key]

    def _run(self, micro_batch_size: int, checkpointing: int | str, offload: float, skips_blocks: bool) -> Trace:
        model = copy.deepcopy(self._model)
        trace = _trace(
            model,
            self.config,
            micro_batch_size,
            checkpointing,
            offload,
            self.device_type,
            skips_blocks,
            self._imbalance,
        )
        # Attention in the trace spans full rows; that affects its FLOPs, not what its kernels save.
        return trace.scaled("attention", self.attended_length / self.config.data.seq_len)


def _trace(
    model: nn.Module,
    config: RunConfig,
    micro_batch_size: int,
    checkpointing: int | str,
    offload_fraction: float,
    device_type: str,
    skips_blocks: bool,
    imbalance: float = 1.0,
) -> Trace:
    """Return the trace of a micro-batch of `model`, which the call makes unusable.

    skips_blocks: whether to run only some of a long series of identical blocks (see `Repetition`).
    """
    units = find_units(model, config.spec, config.fsdp.wrap)
    blocks = find_blocks(model, config.spec)
    saved_operators = operators_to_save(model, blocks, config, checkpointing, micro_batch_size)
    experts = find_experts(model, config.spec).values()
    expert_parameters = {id(parameter) for module in experts for parameter in module.parameters()}
    moments = optimizer_state_sizes(model, config.optim)
    rows_of = block_rows(model, config.spec.blocks)
    muon = [id(each.parameter) for each in assign(model, config.optim) if each.optimizer == "muon"]
    muon_blocks = {parameter: rows_of.get(parameter, ()) for parameter in muon}
    unit_infos = _units_of(model, units, moments, muon_blocks, expert_parameters)
    estimate = Estimate()
    if config.expert > 1:
        estimate = simulate_expert_group([*experts], config.expert, config.mesh.expert_method, imbalance)
    if device_type == "cuda":  # imitated, since autograd in a CPU build of torch refuses fake CUDA tensors
        use_gpu_kernels(model)
    compute_dtype = getattr(torch, config.fsdp.param_dtype)
    is_compiled = device_type == "cuda" and compiles_when_planned(config.train.compile, device_type)
    offload = _PlannedOffload(model, blocks, offload_fraction, counts_host=device_type == "cpu")
    checkpointed = _checkpoint(
        blocks, checkpointing, saved_operators, is_compiled, offload if offload_fraction else None
    )
    train = replace(config.train, activation_checkpoint="selective" if is_compiled else checkpointing)
    slices = find_slices(replace(config, train=train), rank=0)
    repetition = Repetition(model, units if skips_blocks else (), checkpointed, offload.offloaded_by_pattern)
    with warnings.catch_warnings(), fake_tensors():
        warnings.simplefilter("ignore")  # about hooks on views; in a real run, FSDP warns about them
        buffer_bytes = make_fake(model, compute_dtype, repetition.skipped_modules)
        shape = (micro_batch_size * config.rows_per_sample, config.data.seq_len // config.context)
        batch = {name: torch.zeros(shape, dtype=torch.int64) for name in ("tokens", "targets")}
        meter = MemoryMeter(model, batch.values(), is_compiled, config.train.float8)
        recorder = Recorder(meter, compute_dtype)
        for block in blocks:
            recorder.watch_inside(block)
        forbid_view_outputs((*(module for unit in units for module in unit.modules), model))
        repetition.attach(recorder)
        if offload_fraction:
            offload.record_in(recorder, repetition.skipped_modules)
        for number, unit in enumerate(units):
            if not all(id(module) in repetition.skipped_modules for module in unit.modules):
                recorder.watch_unit(unit.modules, number)
        recorder.watch_unit((model,), len(units), is_root=True)
        loss_of = find_loss(model)
        with meter, use_slices(slices), loss_mode(config):
            for _ in range(num_extra_forward_passes(config)):
                with torch.no_grad():  # including the reference model's, which has the same architecture
                    loss_of(batch)
            loss = loss_of(batch)
            (loss * 1.0).sum().backward()
            del loss
            balance = find_balance(model)
            if balance is not None:
                balance.counted_LE = None  # the next micro-batch replaces these counts; it does not add others
            recorder.record("end", len(units))
            if balance is not None and balance.needs_totals:
                with torch.no_grad():
                    loss_of(batch)
    all_events = [*without_block_events(repetition.repeated(recorder.events))]
    num_events = next(number for number, event in enumerate(all_events, start=1) if event.kind == "end")
    unit_infos = _as_frozen(unit_infos, repetition.with_skipped(meter.parameters_without_gradient(model)))
    return Trace(
        tuple(all_events[:num_events]),
        unit_infos,
        buffer_bytes,
        input_bytes=2 * 8 * math.prod(shape),
        # Nothing is saved for a backward pass, so it never needs more memory than the forward passes after it.
        counting_pass=tuple(replace(e, segment=Segment(work=e.segment.work)) for e in all_events[num_events:]),
        expert_count_bytes=0 if balance is None else 8 * balance.num_layers * balance.num_experts,
    ).scaled("grouped", estimate.fill_fraction)  # the fraction of rows in the experts' buffers that hold tokens


def _checkpoint(
    blocks: Sequence[nn.Module],
    checkpointing: int | str,
    saved_operators: Sequence[frozenset[OperatorId]],
    is_compiled: bool,
    offload: ActivationOffload | None,
) -> set[int]:
    """Apply activation checkpointing; return the ids of the checkpointed blocks.

    If `is_compiled`, the other blocks are compiled and get selective checkpointing, since the compiler recomputes cheap
    operators.
    """
    originals = [vars(block).get("forward") for block in blocks]
    apply_activation_checkpointing(blocks, checkpointing, saved_operators, offload)
    checkpointed = {
        id(b) for b, forward in zip(blocks, originals, strict=True) if vars(b).get("forward") is not forward
    }
    if is_compiled:
        others = [block for block in blocks if id(block) not in checkpointed]
        apply_activation_checkpointing(others, "selective", offload=offload)
    return checkpointed


class _PlannedOffload(ActivationOffload):
    """Offloads activations on fake tensors with the same code as training, and records the copies as events.

    `counts_host`: whether host memory counts as device memory, because the device is a CPU.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], fraction: float, counts_host: bool) -> None:
        super().__init__(model, blocks, fraction, torch.device("cpu"))
        self._counts_host = counts_host
        chosen = choose_offloaded_blocks(len(blocks), fraction, with_last=True)
        self.offloaded_by_pattern = {id(block) for block, is_chosen in zip(blocks, chosen, strict=True) if is_chosen}
        """Ids of the blocks that count as offloaded in the search for identical blocks.  Training never offloads the
        last block, but here it counts if it fits the pattern."""

    def record_in(self, recorder: Recorder, skipped_modules: set[int]) -> None:
        """Start recording the copies of all blocks that are not skipped.

        Call this after the recorder has been attached, so that a block's backward pass is recorded before the copies
        that it starts.
        """
        self._recorder = recorder
        self.attach([block for block in self._blocks if id(block) not in skipped_modules])

    def prefetch_before(self, block: nn.Module, call: Any, output: Any) -> None:
        def after(block: nn.Module, args: Any, output: Any) -> None:
            handle.remove()
            super(_PlannedOffload, self).prefetch_before(block, call, output)

        handle = block.register_forward_hook(after)

    def is_movable(self, tensor: torch.Tensor) -> bool:
        return not isinstance(tensor, nn.Parameter)

    def allocate_on_host(self, data: torch.Tensor) -> torch.Tensor:
        if self._counts_host:
            return super().allocate_on_host(data)
        with self.copying():
            return super().allocate_on_host(data)

    @contextmanager
    def copying(self) -> Iterator[None]:
        self._recorder.meter.is_paused = True
        try:
            yield
        finally:
            self._recorder.meter.is_paused = False

    def end_forward(self, call: Any) -> None:
        self._copied: dict[int, int] = {}
        super().end_forward(call)
        self._recorder.record_copy("activation_offload", self._copied)

    def note_copied(self, storages: Sequence[Any]) -> None:
        meter = self._recorder.meter
        for storage in storages:
            storage.serial = meter.serial(storage.on_device.untyped_storage())
        self._copied = {storage.serial: storage.num_bytes for storage in storages}

    def note_fetched(self, storages: Sequence[Any]) -> None:
        for storage in storages:
            self._recorder.meter.note_fetched(storage.serial, storage.on_device.untyped_storage())
        self._recorder.record_copy("activation_reload", {storage.serial: storage.num_bytes for storage in storages})

    def wait_for_fetch(self, event: Any) -> None:
        self._recorder.record_copy("activation_reload_wait", {})


def _units_of(
    model: nn.Module,
    units: Sequence[ShardUnit],
    moments: Mapping[int, tuple[int, float]],
    muon_blocks: Mapping[int, tuple[int, ...]],
    expert_parameters: Collection[int],
) -> tuple[UnitInfo, ...]:
    """Return the units in forward order, then the root, each with its parameters except those of units inside it.

    moments, muon_blocks: as in `ParameterInfo`, by the parameter's id.
    expert_parameters: the ids of the parameters of experts.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    weights = num_weights(model)
    assigned: set[int] = set()
    unit_infos: dict[int, UnitInfo] = {}
    innermost_first = sorted(enumerate(units), key=lambda pair: -pair[1].depth)
    for number, modules, name in [
        *((number, unit.modules, str(unit)) for number, unit in innermost_first),
        (len(units), (model,), "root"),
    ]:
        parameters = []
        for parameter in itertools.chain.from_iterable(module.parameters() for module in modules):
            if id(parameter) not in assigned:
                assigned.add(id(parameter))
                parameters.append(
                    ParameterInfo(
                        names[id(parameter)],
                        tuple(parameter.shape),
                        parameter.requires_grad,
                        parameter.element_size(),
                        *moments.get(id(parameter), (0, 0)),
                        muon_blocks.get(id(parameter)),
                        id(parameter) in expert_parameters,
                        0 if parameter.is_floating_point() else weights[id(parameter)],
                    )
                )
        unit_infos[number] = UnitInfo(name, tuple(parameters), is_embedding_unit(modules, model))
    return tuple(unit_infos[number] for number in range(len(units) + 1))


def _as_frozen(units: tuple[UnitInfo, ...], names: set[str]) -> tuple[UnitInfo, ...]:
    """Return the units with the named parameters, which receive no gradient, marked as not trained.

    Such parameters are not reduced and have no optimizer state.
    """
    return tuple(
        replace(
            unit,
            parameters=tuple(
                replace(p, is_trained=False, num_moments=0) if p.name in names else p for p in unit.parameters
            ),
        )
        for unit in units
    )


def make_fake(model: nn.Module, compute_dtype: torch.dtype, skipped_modules: set[int]) -> int:
    """Replace meta tensors with fake ones; return the size of the buffers in bytes.

    compute_dtype: the dtype of the new parameters, except quantized ones, which keep theirs.
    skipped_modules: the ids of modules whose tensors stay as they are.
    """
    ties = tied_names(model)
    buffer_bytes = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    for module in model.modules():
        if id(module) in skipped_modules:
            continue
        for name, parameter in [*module.named_parameters(recurse=False, remove_duplicate=False)]:
            is_packed = not parameter.is_floating_point()
            fake = torch.empty(parameter.shape, dtype=parameter.dtype if is_packed else compute_dtype)
            module.register_parameter(name, nn.Parameter(fake, requires_grad=parameter.requires_grad))
        for name, buffer in [*module.named_buffers(recurse=False, remove_duplicate=False)]:
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype))
    for first, *aliases in ties:
        for alias in aliases:
            owner, _, name = alias.rpartition(".")
            model.get_submodule(owner).register_parameter(name, model.get_parameter(first))
    return buffer_bytes


# ---------------------------------------------------------------------------------------------------------------
# Repetition: skipping the middle of long runs of identical blocks, and copying the events of the blocks that were run


_MAX_PERIOD = 16
"""Largest number of blocks in a repeating pattern."""
_MAX_LEADING_BLOCKS = 4
"""Maximum number of blocks at the start of a model that may differ from the repeated ones."""


class CannotSkipBlocks(Exception):
    """Raised if the model treats blocks differently, or if a block's output cannot serve as the next block's input."""


@dataclass(frozen=True)
class _BlockRun:
    """Consecutive blocks that repeat with a period.

    The first two periods are run, and the second represents the `num_skipped` blocks after it.  The remaining blocks
    are run too.
    """

    blocks: tuple[nn.Module, ...]
    names: tuple[str, ...]
    period: int
    num_skipped: int

    @property
    def first_skipped(self) -> int:
        return 2 * self.period

    @property
    def first_after(self) -> int:
        return self.first_skipped + self.num_skipped

    @property
    def skipped(self) -> tuple[nn.Module, ...]:
        return self.blocks[self.first_skipped : self.first_after]


class Repetition:
    """Skips the middle of long runs of identical blocks and fills in copies of the events of equivalent blocks."""

    def __init__(
        self, model: nn.Module, units: Sequence[ShardUnit], checkpointed: set[int], offloaded: set[int]
    ) -> None:
        self.runs = _find_runs(model, checkpointed, offloaded) if units else []
        self.skipped_modules = {id(m) for run in self.runs for block in run.skipped for m in block.modules()}
        self._watched_blocks: list[tuple[_BlockRun, int]] = []  # by `Event.unit` of a block's events
        self._calls: dict[int, list[tuple[int, Any]]] = {id(run): [] for run in self.runs}
        self._other_outputs: dict[int, tuple[Any, ...] | None] = {}
        """For each run, a block's outputs after the first, with a function that makes zeros in place of each tensor:
        the tensors themselves must not be kept alive."""
        self._block_of_unit: dict[int, tuple[_BlockRun, int, str]] = {}  # run, block, name in it
        self._unit_at: dict[tuple[int, int, str], int] = {}
        for run in self.runs:
            for position, block in enumerate(run.blocks):
                inside = {id(module): name for name, module in block.named_modules()}
                for number, unit in enumerate(units):
                    if all(id(module) in inside for module in unit.modules):
                        name = " ".join(inside[id(module)] for module in unit.modules)
                        self._block_of_unit[number] = (run, position, name)
                        self._unit_at[id(run), position, name] = number

    def attach(self, recorder: Recorder) -> None:
        """Record where blocks begin, and make the skipped ones return their input."""
        for run in self.runs:
            for position, block in enumerate(run.blocks):
                block.register_forward_pre_hook(partial(self._note_call, run, position), with_kwargs=True)
                recorder.watch_block(block, len(self._watched_blocks))
                self._watched_blocks.append((run, position))
                if block in run.skipped:
                    block.forward = self._skipping_forward(run)  # type: ignore[method-assign]
                else:
                    block.register_forward_hook(self._note_output(run))

    def _note_output(self, run: _BlockRun) -> Callable[..., None]:
        """Return a hook that raises CannotSkipBlocks unless a block's first output can be the next block's input."""

        def note(block: nn.Module, args: Any, output: Any) -> None:
            first_input = args[0] if args else None
            first, *others = output if isinstance(output, tuple) else (output,)
            if not (isinstance(first, torch.Tensor) and isinstance(first_input, torch.Tensor)):
                raise CannotSkipBlocks
            if first.shape != first_input.shape or first.dtype != first_input.dtype:
                raise CannotSkipBlocks
            as_zeros = pytree.tree_map_only(
                torch.Tensor, lambda t: partial(torch.zeros, t.shape, dtype=t.dtype, device=t.device), tuple(others)
            )
            self._other_outputs[id(run)] = as_zeros if isinstance(output, tuple) else None

        return note

    def _skipping_forward(self, run: _BlockRun) -> Callable[..., Any]:
        """Return the `forward` of skipped blocks, which returns its first input, and zeros for any further outputs."""

        def skip(*args: Any, **kwargs: Any) -> Any:
            if not args:
                raise CannotSkipBlocks
            # A separate node in the graph, so that the gradients of the blocks' outputs are computed one after another.
            first = args[0].view_as(args[0]) if isinstance(args[0], torch.Tensor) else args[0]
            others = self._other_outputs[id(run)]
            return first if others is None else (first, *pytree.tree_map_only(partial, lambda make: make(), others))

        return skip

    def with_skipped(self, names: set[str]) -> set[str]:
        """Return `names` of parameters, plus those of the corresponding parameters in skipped blocks."""
        all_names = set(names)
        for run in self.runs:
            for position in range(run.first_skipped, run.first_after):
                prefix = f"{run.names[run.period + position % run.period]}."
                all_names |= {f"{run.names[position]}.{n.removeprefix(prefix)}" for n in names if n.startswith(prefix)}
        return all_names

    def _note_call(self, run: _BlockRun, position: int, block: nn.Module, args: Any, kwargs: Any) -> None:
        """Record the form of a call, which is equal for equal structure, shapes, dtypes and plain values."""
        leaves, structure = pytree.tree_flatten((args, kwargs))
        forms = [
            (tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, torch.Tensor) else repr(leaf)
            for leaf in leaves
        ]
        self._calls[id(run)].append((position, (str(structure), forms)))

    def _check(self, events: Sequence[Event]) -> None:
        """Raise CannotSkipBlocks unless the model treats skipped blocks like the blocks that represent them.

        Blocks must be called one after another, with arguments of the same form and the same plain values, and the
        model must do the same work between them.
        """
        for run in self.runs:
            calls, size = self._calls[id(run)], len(run.blocks)
            if len(calls) % size or [position for position, _ in calls] != [*range(size)] * (len(calls) // size):
                raise CannotSkipBlocks
            for number, (position, form) in enumerate(calls):
                if position >= run.period and position % size >= 1 and form != calls[number - run.period][1]:
                    raise CannotSkipBlocks
            between: dict[int, set[Any]] = {}
            for event, following in itertools.pairwise(events):
                if event.kind == "block_return" and following.kind == "block_forward":
                    own_run, position = self._watched_blocks[event.unit]
                    if own_run is run and run.period <= position < run.first_after:
                        between.setdefault(position % run.period, set()).add(frozenset(following.segment.work))
            if any(len(kinds) > 1 for kinds in between.values()):
                raise CannotSkipBlocks

    def repeated(self, events: Sequence[Event]) -> list[Event]:
        """Return the events with copies of the second period in place of the skipped blocks.

        A period lasts from the event of its first block to the event of the next period's first block.  It includes the
        model's own work between blocks; the work recorded around skipped blocks is dropped.
        """
        self._check(events)
        result: list[Event] = []
        number = 0
        while number < len(events):
            event = events[number]
            result.append(event)
            number += 1
            if not event.kind.startswith("block"):
                continue
            run, position = self._watched_blocks[event.unit]
            if event.kind == "block_forward" and position == run.first_skipped < run.first_after:
                first = max(n for n, e in enumerate(events[:number]) if self._is_at(e, event.kind, run, run.period))
                result += self._copies(events[first + 1 : number], run, range(0, run.num_skipped, run.period))
                number = self._next(events, number, event.kind, run, run.first_after) + 1
            elif event.kind == "block_backward" and position == run.first_after - 1 >= run.first_skipped:
                number = self._next(events, number, event.kind, run, run.first_skipped - 1) + 1
                end = self._next(events, number, event.kind, run, run.period - 1) + 1
                result += self._copies(events[number:end], run, range(run.num_skipped - run.period, -1, -run.period))
        return result

    def _is_at(self, event: Event, kind: EventKind, run: _BlockRun, position: int) -> bool:
        return event.kind == kind and self._watched_blocks[event.unit] == (run, position)

    def _next(self, events: Sequence[Event], start: int, kind: EventKind, run: _BlockRun, position: int) -> int:
        for number in range(start, len(events)):
            if self._is_at(events[number], kind, run, position):
                return number
        raise CannotSkipBlocks

    def _copies(self, template: Sequence[Event], run: _BlockRun, offsets: Iterable[int]) -> Iterator[Event]:
        for offset in offsets:
            for event in template:
                unit = event.unit
                if not event.kind.startswith("block") and unit in self._block_of_unit:
                    own_run, position, name = self._block_of_unit[unit]
                    if own_run is run:
                        unit = self._unit_at[id(run), position + run.period + offset, name]
                yield replace(event, unit=unit)


def without_block_events(events: Iterable[Event]) -> Iterator[Event]:
    """Yield all events except those of blocks, merging the segments on both sides of each dropped event."""
    merged = Segment()
    for event in events:
        if event.kind.startswith("block"):
            merged = merged.then(event.segment)
        else:
            yield replace(event, segment=merged.then(event.segment))
            merged = Segment()


def _find_runs(model: nn.Module, checkpointed: set[int], offloaded: set[int]) -> list[_BlockRun]:
    """Return the runs of repeated blocks that are worth shortening, in outermost ModuleLists and Sequentials."""
    runs: list[_BlockRun] = []
    inside: set[int] = set()
    shared = {id(model.get_parameter(group[0])) for group in tied_names(model)}
    for parent_name, parent in model.named_modules():
        if not isinstance(parent, (nn.ModuleList, nn.Sequential)) or id(parent) in inside:
            continue
        blocks = tuple(parent.children())
        if len(blocks) < 4:
            continue
        ignored = _index_settings(blocks)
        kinds = [(id(block) in offloaded, _kind(block, ignored, shared, checkpointed)) for block in blocks]
        repetition = _longest_repetition(kinds)
        if repetition is None:
            continue
        first, period = repetition
        num_skipped = (len(blocks) - first - 3 * period) // period * period
        if num_skipped < 2 * period:  # with fewer, there is no second gap between blocks to compare
            continue
        prefix = f"{parent_name}." if parent_name else ""
        names = tuple(f"{prefix}{name}" for name, _ in parent.named_children())
        runs.append(_BlockRun(blocks[first:], names[first:], period, num_skipped))
        inside |= {id(module) for block in blocks for module in block.modules()}
    return runs


def _longest_repetition(kinds: Sequence[Any]) -> tuple[int, int] | None:
    """Return the index of the block from which the kinds of blocks repeat to the end, and the period; or None.

    The first few blocks may differ from the others, for example because they have no experts.
    """
    for first in range(min(_MAX_LEADING_BLOCKS, len(kinds) - 4) + 1):
        for period in range(1, min(_MAX_PERIOD, (len(kinds) - first) // 4) + 1):
            if all(kinds[n] == kinds[n - period] for n in range(first + period, len(kinds))):
                return first, period
    return None


def _kind(block: nn.Module, ignored: set[tuple[str, str]], shared: set[int], checkpointed: set[int]) -> Any:
    """Return a value that is equal for two blocks with the same modules, tensor shapes and dtypes, and plain settings.

    Settings in `ignored` are left out.  Blocks with tied parameters are equal only if they share these parameters.
    """
    parts: list[Any] = []
    for name, module in block.named_modules():
        settings = {key: value for key, value in _settings(module) if (name, key) not in ignored}
        tensors = [
            (key, tuple(tensor.shape), tensor.dtype, tensor.requires_grad, id(tensor) in shared and id(tensor))
            for key, tensor in (
                *module.named_parameters(recurse=False, remove_duplicate=False),
                *module.named_buffers(recurse=False, remove_duplicate=False),
            )
        ]
        parts.append((name, type(module), id(module) in checkpointed, settings, tensors))
    return parts


def _settings(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the module's own attributes that can be compared between modules; others are represented by their id."""
    for key, value in vars(module).items():
        if key in _MODULE_ATTRIBUTES or isinstance(value, (torch.Tensor, nn.Module)):
            continue
        is_plain = value is None or isinstance(value, (int, float, str, bool, tuple, list, dict, set, torch.dtype))
        yield key, value if is_plain or dataclasses.is_dataclass(value) else id(value)


_MODULE_ATTRIBUTES = frozenset({*vars(nn.Module()), "forward"})


def _index_settings(blocks: Sequence[nn.Module]) -> set[tuple[str, str]]:
    """Return the settings (module name, attribute) that merely hold the index of a block in the list."""
    candidates = {(name, key) for name, module in blocks[0].named_modules() for key, _ in _settings(module)}
    for position, block in enumerate(blocks):
        indices = {
            (name, key)
            for name, module in block.named_modules()
            for key, value in _settings(module)
            if type(value) is int and value == position
        }
        candidates &= indices
    return candidates
