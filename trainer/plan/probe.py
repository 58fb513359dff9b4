"""Traces one micro-batch of a model on fake tensors: the kernels that run, and the memory that is allocated and freed.

The model runs forward and backward, unsharded, on one imaginary rank, and the points where FSDP would gather and reduce
are recorded.  The result is a `Trace`, from which the planner simulates a step with any `mesh.replicate`, `mesh.shard`
and resharding, without running the model again.  Each combination of context-, tensor- and expert-parallel group sizes
needs its own trace.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from trainer.config.parallel import find_slices
from trainer.config.requirements import compiles_when_planned
from trainer.config.schema import RunConfig
from trainer.data.opening import open_source
from trainer.distributed.world import TENSOR
from trainer.errors import UserError, reason_of, setting_error
from trainer.experts import Balance, Estimate, fake_tensors, find_balance, find_experts, simulate_expert_group
from trainer.loss import find_loss, loss_mode
from trainer.model.network import build_network, num_extra_forward_passes, training_flops_per_token
from trainer.model.offload import ActivationOffload, choose_offloaded_blocks
from trainer.model.packed import num_weights
from trainer.model.parameters import tied_names
from trainer.model.recompute import OperatorId
from trainer.model.shard import apply_activation_checkpointing, forbid_view_outputs, operators_to_save
from trainer.model.tensor import TensorGroup, split_model, split_parameters
from trainer.model.units import ShardUnit, find_blocks, find_units, is_embedding_unit
from trainer.optim.groups import assign, block_rows
from trainer.optim.optimizer import optimizer_state_sizes
from trainer.plan.kernels import use_gpu_kernels
from trainer.plan.shorten import Shortening, find_series, treats_blocks_alike
from trainer.plan.trace import MemoryMeter, ParameterInfo, Recorder, Segment, Trace, UnitInfo
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

    @cached_property
    def unit_names(self) -> list[str]:
        """The names of the FSDP units, without the root."""
        return [str(unit) for unit in find_units(self._model, self.config.spec, self.config.fsdp.wrap)]

    def trace(self, micro_batch_size: int, checkpointing: int | str, offload: float = 0.0) -> Trace:
        """Return the trace of a micro-batch, with units according to `fsdp.wrap`.

        checkpointing: as `train.activation_checkpoint`.
        offload: the fraction of blocks whose activations go to host memory.

        Raises UserError if the model's own code cannot run on fake tensors.
        """
        key = (micro_batch_size, checkpointing, offload)
        if key not in self._traces:
            self._traces[key] = self._trace_shortened(*key) or self._trace_whole(*key)
        return self._traces[key]

    def _trace_shortened(self, micro_batch_size: int, checkpointing: int | str, offload: float) -> Trace | None:
        """Return the trace of a model without most of its identical blocks; None if that fails."""
        if not self._treats_blocks_alike:
            return None
        try:
            return self._run(micro_batch_size, checkpointing, offload, shortens=True)
        except Exception:  # its events do not fit together, or its code needs the deleted blocks
            return None

    def _trace_whole(self, micro_batch_size: int, checkpointing: int | str, offload: float) -> Trace:
        try:
            return self._run(micro_batch_size, checkpointing, offload, shortens=False)
        except UserError:
            raise
        except Exception as error:  # from the model's own code, on tensors without values
            reason = f"{type(error).__name__}: {reason_of(error)}"
            rule = f"cannot be planned: tracing it on fake tensors fails with {reason}"
            raise setting_error("model.name", self.config.model.name, rule) from error

    @cached_property
    def _treats_blocks_alike(self) -> bool:
        def run_forward(model: nn.Module) -> None:
            with torch.device("meta"), loss_mode(self.config):
                find_loss(model)(self._batch(micro_batch_size=1))

        try:
            return treats_blocks_alike(self._model, run_forward)
        except Exception:  # the model's code does not run on meta tensors
            return False

    def _batch(self, micro_batch_size: int) -> dict[str, torch.Tensor]:
        config = self.config
        shape = (micro_batch_size * config.rows_per_sample, config.data.seq_len // config.ranks_per_sample)
        return {name: torch.zeros(shape, dtype=torch.int64) for name in ("tokens", "targets")}

    def _run(self, micro_batch_size: int, checkpointing: int | str, offload_fraction: float, shortens: bool) -> Trace:
        """Return the trace of a micro-batch; `shortens`: whether to delete blocks from the model (`Shortening`)."""
        config = self.config
        is_gpu = self.device_type == "cuda"
        model = copy.deepcopy(self._model)
        units = find_units(model, config.spec, config.fsdp.wrap)
        blocks = find_blocks(model, config.spec)
        infos = _units_of(model, units, config)
        saved_operators = operators_to_save(model, blocks, config, checkpointing, micro_batch_size)
        estimate = Estimate()
        if config.expert > 1:
            experts = find_experts(model, config.spec).values()
            estimate = simulate_expert_group([*experts], config.expert, config.mesh.expert_method, self._imbalance)
        if config.tensor > 1:
            split_model(model, config.spec, TensorGroup(config.tensor, rank=0, name=TENSOR), mesh=None)
        if is_gpu:  # imitated, since autograd in a CPU build of torch refuses fake CUDA tensors
            use_gpu_kernels(model)
        is_compiled = is_gpu and compiles_when_planned(config.train.compile, self.device_type)
        offload = _PlannedOffload(model, blocks, offload_fraction, counts_host=self.device_type == "cpu")
        recomputed = _checkpoint(
            blocks, checkpointing, saved_operators, is_compiled, offload if offload_fraction else None
        )
        series = find_series(model, recomputed, offload.offloaded_by_pattern) if shortens else []
        shortening = Shortening(model, units, series)
        # Compiled blocks recompute cheap operators, whatever the setting.
        train = replace(config.train, activation_checkpoint="selective" if is_compiled else checkpointing)
        slices = find_slices(replace(config, train=train), rank=0)
        if slices is not None:
            slices = replace(slices, tensor_group=TENSOR)
        compute_dtype = getattr(torch, config.fsdp.param_dtype)
        buffer_bytes = sum(buffer.numel() * buffer.element_size() for buffer in self._model.buffers())
        with warnings.catch_warnings(), fake_tensors():
            warnings.simplefilter("ignore")  # about hooks on views; in a real run, FSDP warns about them
            make_fake(model, compute_dtype)
            batch = self._batch(micro_batch_size)
            meter = MemoryMeter(model, batch.values(), is_compiled, config.train.float8)
            recorder = Recorder(meter, compute_dtype)
            for block in blocks:
                recorder.watch_inside(block)
            forbid_view_outputs((*(module for unit in units for module in unit.modules), model))
            if offload_fraction:
                offload.record_in(recorder)
            for number, unit in enumerate(units):
                recorder.watch_unit(unit.modules, number)
            recorder.watch_unit((model,), len(units), is_root=True)
            with meter, use_slices(slices), loss_mode(config):
                balance = _run_micro_batch(model, batch, recorder, len(units), num_extra_forward_passes(config))
        events = shortening.restored(recorder.events)
        num_events = next(number for number, event in enumerate(events, start=1) if event.kind == "end")
        without_gradient = shortening.original_names(meter.parameters_without_gradient(model))
        trace = Trace(
            tuple(events[:num_events]),
            _as_frozen(infos, without_gradient),
            buffer_bytes,
            input_bytes=sum(tensor.nbytes for tensor in batch.values()),
            # Nothing is saved for a backward pass, so it never needs more memory than the forward passes after it.
            counting_pass=tuple(replace(e, segment=Segment(work=e.segment.work)) for e in events[num_events:]),
            expert_count_bytes=0 if balance is None else 8 * balance.num_layers * balance.num_experts,
        )
        # The fraction of rows in the experts' buffers that hold tokens
        trace = trace.scaled("grouped", estimate.fill_fraction)
        # Attention in the trace spans full rows; that affects its FLOPs, not what its kernels save.
        return trace.scaled("attention", self.attended_length / config.data.seq_len)


def _run_micro_batch(
    model: nn.Module, batch: dict[str, torch.Tensor], recorder: Recorder, root: int, num_extra_forward_passes: int
) -> Balance | None:
    """Run the forward and backward passes of a micro-batch, then the pass that counts the tokens of each expert.

    Returns the balance of the model's experts, if it keeps one.
    """
    loss_of = find_loss(model)
    for _ in range(num_extra_forward_passes):
        with torch.no_grad():  # including the reference model's, which has the same architecture
            loss_of(batch)
    loss = loss_of(batch)
    (loss * 1.0).sum().backward()
    del loss
    balance = find_balance(model)
    if balance is not None:
        balance.counted_LE = None  # the next micro-batch replaces these counts; it does not add others
    recorder.record("end", root)
    if balance is not None and balance.needs_totals:
        with torch.no_grad():
            loss_of(batch)
    return balance


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

    def record_in(self, recorder: Recorder) -> None:
        """Start recording the copies.

        Call this after the recorder has been attached, so that a block's backward pass is recorded before the copies
        that it starts.
        """
        self._recorder = recorder
        self.attach()

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


def _units_of(model: nn.Module, units: Sequence[ShardUnit], config: RunConfig) -> tuple[UnitInfo, ...]:
    """Return the units in forward order, then the root, each with its parameters except those of units inside it."""
    info_of = _parameter_infos(model, config)
    assigned: set[int] = set()
    unit_infos: dict[int, UnitInfo] = {}
    innermost_first = sorted(enumerate(units), key=lambda pair: -pair[1].depth)
    for number, modules, name in [
        *((number, unit.modules, str(unit)) for number, unit in innermost_first),
        (len(units), (model,), "root"),
    ]:
        own = {id(p): info_of[id(p)] for module in modules for p in module.parameters() if id(p) not in assigned}
        assigned |= own.keys()
        unit_infos[number] = UnitInfo(name, tuple(own.values()), is_embedding_unit(modules, model))
    return tuple(unit_infos[number] for number in range(len(units) + 1))


def _parameter_infos(model: nn.Module, config: RunConfig) -> dict[int, ParameterInfo]:
    """Return the facts about each parameter, by its id."""
    moments = optimizer_state_sizes(model, config.optim)
    trained_by_muon = {id(each.parameter) for each in assign(model, config.optim) if each.optimizer == "muon"}
    rows_of = block_rows(model, config.spec.blocks)
    experts = find_experts(model, config.spec).values()
    expert_parameters = {id(parameter) for module in experts for parameter in module.parameters()}
    tensor_dims = split_parameters(model, config.spec, config.tensor) if config.tensor > 1 else {}
    quantized_weights = num_weights(model)
    infos: dict[int, ParameterInfo] = {}
    for name, parameter in model.named_parameters():
        key = id(parameter)
        num_moments, moment_size = moments.get(key, (0, 0))
        infos[key] = ParameterInfo(
            name,
            tuple(parameter.shape),
            is_trained=parameter.requires_grad,
            element_size=parameter.element_size(),
            num_moments=num_moments,
            moment_size=moment_size,
            muon_blocks=rows_of.get(key, ()) if key in trained_by_muon else None,
            is_expert=key in expert_parameters,
            tensor_dim=tensor_dims.get(name),
            num_quantized_weights=0 if parameter.is_floating_point() else quantized_weights[key],
        )
    return infos


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


def make_fake(model: nn.Module, compute_dtype: torch.dtype) -> None:
    """Replace meta tensors with fake ones.

    compute_dtype: the dtype of the new parameters, except quantized ones, which keep theirs.
    """
    ties = tied_names(model)
    for module in model.modules():
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
