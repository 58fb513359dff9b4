"""Traces one micro-batch of a model on fake tensors: the memory it allocates and saves, and the kernels it runs.

The model runs forward and backward, unsharded, on one imaginary rank, with marks where FSDP would gather and reduce.
In a long run of identical blocks, only the first and last ones are run and the others are copied from them, so tracing
126 layers takes as long as tracing four.  The result is a `Trace`, from which the planner composes any mesh and any
resharding without running the model again.  Independent of any particular model, the mesh and the speed of devices.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property

import torch
from torch import nn

from trainer.config import RunConfig, find_slices
from trainer.config.requirements import compiles_when_planned
from trainer.data.source_factory import open_source
from trainer.errors import UserError, setting_error
from trainer.loss import by_row, find_loss
from trainer.model.experts import fake_tensors
from trainer.model.network import build_network, flops_of
from trainer.model.parameters import tied_names
from trainer.model.recompute import OperatorId
from trainer.model.shard import apply_activation_checkpointing, forbid_view_outputs, saved_by_budget
from trainer.model.units import ShardUnit, find_blocks, find_units, is_embedding_unit
from trainer.optim.optimizer import optimizer_state_sizes
from trainer.plan.kernels import use_gpu_kernels
from trainer.plan.recorder import MemoryMeter, Recorder
from trainer.plan.repetition import Repetition, without_block_marks
from trainer.plan.trace import ParameterFacts, Trace, UnitFacts
from trainer.sequence import sliced


class Probe:
    """Traces one micro-batch of a configuration's model, which is built once, on the meta device."""

    def __init__(self, config: RunConfig, device_type: str) -> None:
        """`device_type` is `cuda`, which traces with the fused kernels of a GPU, or `cpu`."""
        self.config, self.device_type = config, device_type
        self._model = build_network(config)
        self._traces: dict[tuple[int, int | str], Trace] = {}

    @property
    def flops_per_token(self) -> float:
        """Model FLOPs per token for forward and backward, excluding recomputation."""
        return flops_of(self.config, self._model, self._attended)

    @cached_property
    def _attended(self) -> float:
        """Number of tokens that attention spans: from the data, or the sequence length if unavailable."""
        data, length = self.config.data, None
        if data.arrangement == "masked":
            with contextlib.suppress(UserError):
                length = open_source(data, self.config.vocab_size, "train").attended
        return length or data.seq_len

    def trace(self, micro_batch_size: int, checkpointing: int | str) -> Trace:
        """Return the trace of a micro-batch, with units according to `fsdp.wrap`.

        Raises UserError if the model's own code cannot run on tensors without values.
        """
        key = (micro_batch_size, checkpointing)
        if key not in self._traces:
            try:
                self._traces[key] = self._run(*key, shortens=True)
            except Exception:  # the model cannot run with skipped blocks, or treats them differently
                self._traces[key] = self._run_whole(*key)
        return self._traces[key]

    def _run_whole(self, micro_batch_size: int, checkpointing: int | str) -> Trace:
        try:
            return self._run(micro_batch_size, checkpointing, shortens=False)
        except UserError:
            raise
        except Exception as error:  # from the model's own code, on tensors without values
            text = str(error).splitlines()[0] if str(error) else ""
            rule = f"cannot be planned: tracing it on meta tensors fails with {type(error).__name__}: {text}"
            raise setting_error("model.name", self.config.model.name, rule) from error

    def _run(self, micro_batch_size: int, checkpointing: int | str, shortens: bool) -> Trace:
        model = copy.deepcopy(self._model)
        made = _trace(model, self.config, micro_batch_size, checkpointing, self.device_type, shortens)
        # The trace attended to full rows; that affects FLOPs only, not what the kernels save.
        return made.with_attention(self._attended / self.config.data.seq_len)


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
    kept = saved_by_budget(model, blocks, config, checkpointing, micro_batch_size)
    facts = _unit_facts(model, units, optimizer_state_sizes(model, config.optim))
    if device_type == "cuda":  # imitated, since autograd in a CPU build of torch refuses fake CUDA tensors
        use_gpu_kernels(model)
    compute_dtype = getattr(torch, config.fsdp.param_dtype)
    fuses = device_type == "cuda" and compiles_when_planned(config.train.compile, device_type)
    checkpointed = _checkpoint(blocks, checkpointing, kept, fuses)
    train = replace(config.train, activation_checkpoint="selective" if fuses else checkpointing)
    slices = find_slices(replace(config, train=train), rank=0)
    repetition = Repetition(model, units if shortens else (), checkpointed)
    with warnings.catch_warnings(), fake_tensors():
        warnings.simplefilter("ignore")  # about hooks on views; warning about those is FSDP's job
        buffer_bytes = _make_fake(model, compute_dtype, repetition.left_out)
        shape = (micro_batch_size * config.rows_per_sample, config.data.seq_len // config.context)
        batch = {name: torch.zeros(shape, dtype=torch.int64) for name in ("tokens", "targets")}
        meter = MemoryMeter(model, batch.values(), fuses, config.train.float8)
        recorder = Recorder(meter, compute_dtype)
        for block in blocks:
            recorder.watch_inside(block)
        forbid_view_outputs((*(module for unit in units for module in unit.modules), model))
        repetition.attach(recorder)
        for number, unit in enumerate(units):
            if not repetition.leaves_out(unit.modules):
                recorder.watch_unit(unit.modules, number)
        recorder.watch_unit((model,), len(units), is_root=True)
        loss_of = find_loss(model)
        with meter, sliced(slices), by_row() if config.train.objective == "dpo" else nullcontext():
            if config.train.objective == "dpo":
                with torch.no_grad():  # the reference model, which has the same architecture
                    loss_of(batch)
            loss = loss_of(batch)
            (loss * 1.0).sum().backward()
            del loss
            recorder.mark("end", len(units))
    events = tuple(without_block_marks(repetition.repeated(recorder.events)))
    facts = _without_unused(facts, repetition.like(meter.unused(model)))
    return Trace(events, facts, buffer_bytes, 2 * 8 * math.prod(shape))


def _checkpoint(
    blocks: Sequence[nn.Module], checkpointing: int | str, kept: Sequence[frozenset[OperatorId]], fuses: bool
) -> set[int]:
    """Apply activation checkpointing; return the ids of the blocks that it was applied to.

    If `fuses`, the other blocks are compiled and get selective checkpointing, since the compiler recomputes cheap
    operators.
    """
    before = [vars(block).get("forward") for block in blocks]
    apply_activation_checkpointing(blocks, checkpointing, kept)
    checkpointed = {id(b) for b, forward in zip(blocks, before, strict=True) if vars(b).get("forward") is not forward}
    if fuses:
        apply_activation_checkpointing([block for block in blocks if id(block) not in checkpointed], "selective")
    return checkpointed


def _unit_facts(
    model: nn.Module, units: Sequence[ShardUnit], moments: Mapping[int, tuple[int, int]]
) -> tuple[UnitFacts, ...]:
    """Return the units in forward order, then the root; each has the parameters that no unit inside it holds."""
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
        found[number] = UnitFacts(name, tuple(own), is_embedding_unit(modules, model))
    return tuple(found[number] for number in range(len(units) + 1))


def _without_unused(units: tuple[UnitFacts, ...], unused: set[str]) -> tuple[UnitFacts, ...]:
    """Mark parameters that get no gradient as untrained: they are not reduced and have no optimizer state."""
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
    """Replace meta tensors with fake ones, parameters in the compute dtype; return the size of the buffers."""
    ties = tied_names(model)
    buffer_bytes = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    for module in model.modules():
        if id(module) in left_out:
            continue
        for name, parameter in [*module.named_parameters(recurse=False, remove_duplicate=False)]:
            made = torch.empty(parameter.shape, dtype=compute_dtype)
            module.register_parameter(name, nn.Parameter(made, requires_grad=parameter.requires_grad))
        for name, buffer in [*module.named_buffers(recurse=False, remove_duplicate=False)]:
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype))
    for first, *aliases in ties:
        for alias in aliases:
            owner, _, name = alias.rpartition(".")
            model.get_submodule(owner).register_parameter(name, model.get_parameter(first))
    return buffer_bytes
