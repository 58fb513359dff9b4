"""Plans a run: estimates its memory, communication and time on a given machine.

For example:

    machine = find_machine("h100")
    plan = make_plan(load_config("llama3_70b"), MeshShape(8, 64), machine)
    plan.memory.peak.total, plan.time.total_s
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import get_args

from trainer.checkpoint.interval import Costs, costs_of
from trainer.config.parallel import MeshShape
from trainer.config.rules import offloaded_fraction
from trainer.config.schema import RunConfig
from trainer.config.teacher import teacher_config
from trainer.model.network import build_network, training_flops_per_token
from trainer.model.placement import divide, num_dims_to_divide
from trainer.model.shard import is_unsharded, resolve_resharding
from trainer.optim.optimizer import EMA_ELEMENT_SIZE
from trainer.plan.estimates import (
    Collective,
    Memory,
    MemorySnapshot,
    StepTime,
    at_rest,
    collectives_of,
    memory_of,
    time_of,
)
from trainer.plan.machine import GIB, Machine
from trainer.plan.muon import MuonUpdate
from trainer.plan.probe import Probe
from trainer.plan.step import Kind, Layout, Teacher
from trainer.plan.trace import Trace

_SIZES = {"float32": 4, "bfloat16": 2}
"""Bytes per element, by dtype."""


@dataclass(frozen=True)
class Generation:
    """The memory that generating text within a step takes in addition to the training state, in bytes per rank.

    texts: a description of the generated texts that gives their number and lengths.
    weights: the gathered weights.
    cache: the KV cache of all sequences at their full length.
    temporaries: the peak size of the tensors that a forward pass, or sampling after it, allocates temporarily.
    """

    texts: str
    weights: int
    cache: int
    temporaries: int


@dataclass(frozen=True)
class Plan:
    """Estimates for a run before it starts.  Per-rank values are for rank 0, which holds the largest shards."""

    config: RunConfig
    mesh: MeshShape
    machine: Machine
    trace: Trace
    layout: Layout
    probe: Probe
    """The probe that produced the trace, kept so that the same model can be traced with other settings."""
    generation: Generation | None = None
    """Set by `with_generation`, since no configuration key says whether a run generates text within its steps."""

    @property
    def num_micro_batches(self) -> int:
        return self.config.num_micro_batches(self.mesh.num_ranks)

    @cached_property
    def memory(self) -> Memory:
        """Memory over a step; if generation needs more than the rest of the step, the peak is during generation."""
        memory = memory_of(self.trace, self.layout, self.num_micro_batches)
        snapshot = self.generation_peak
        return memory if snapshot is None or snapshot.total <= memory.peak.total else replace(memory, peak=snapshot)

    @cached_property
    def generation_peak(self) -> MemorySnapshot | None:
        """The memory at the peak of generation, or None if nothing is generated."""
        generation = self.generation
        if generation is None:
            return None
        by_kind: dict[Kind, int] = dict.fromkeys(get_args(Kind), 0) | at_rest(self.trace, self.layout)
        by_kind |= {
            "unsharded parameters": generation.weights,
            "activations": generation.cache,
            "temporaries": generation.temporaries,
        }
        return MemorySnapshot(f"generation of {generation.texts}", by_kind)

    @cached_property
    def collectives(self) -> Counter[Collective]:
        return collectives_of(self.trace, self.layout, self.num_micro_batches)

    @cached_property
    def time(self) -> StepTime:
        return time_of(self.trace, self.layout, self.num_micro_batches, self.machine.rates)

    @property
    def peak_gib(self) -> float:
        """Live tensors at the peak: what torch.cuda.max_memory_allocated would report."""
        return self.memory.peak.total / GIB

    @property
    def needed_gib(self) -> float:
        """Device memory needed: live tensors, the allocator's reserve beyond them, the driver and the communicators."""
        return self.peak_gib * (1 + self.machine.allocator_share) + self.machine.reserved_gib

    @property
    def fits(self) -> bool:
        return self.memory.peak.total <= self.machine.budget_bytes

    @property
    def num_parameters(self) -> int:
        return sum(p.num_quantized_weights or p.numel for unit in self.trace.units for p in unit.parameters)

    @property
    def tokens(self) -> int:
        """Tokens per step over all ranks."""
        return self.config.step_tokens

    @property
    def flops(self) -> float:
        """Model FLOPs per step over all ranks, excluding recomputation."""
        return self.probe.flops_per_token * self.tokens

    @property
    def mfu(self) -> float | None:
        """Model FLOPs relative to the devices' peak (Chowdhery et al. 2022, arXiv:2204.02311, appendix B)."""
        peak = self.machine.peak_flops
        return None if peak is None else self.flops / self.time.total_s / (peak * self.mesh.num_ranks)

    @property
    def run_s(self) -> float:
        """Seconds for all steps, excluding evaluation and saves."""
        return self.time.total_s * self.config.train.steps

    @property
    def num_nodes(self) -> int:
        return -(-self.mesh.num_ranks // self.machine.rates.ranks_per_node)

    @cached_property
    def costs(self) -> Costs:
        """Estimated costs of saves and failures, before any has been observed."""
        return costs_of(self.config, self.num_nodes, self.checkpoint_bytes / self.mesh.num_ranks)

    @property
    def save_every_s(self) -> float:
        """Seconds between saves: as configured, or the interval with the lowest expected loss."""
        every = self.config.checkpoint.every
        return every * self.time.total_s if isinstance(every, int) and every else self.costs.best_interval_s

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of one checkpoint: parameters, optimizer state and, with `train.ema`, the weight average.

        For adapters on a loaded base model, the base model's parameters are not included.
        """
        config = self.config
        has_stored_base = config.lora.rank > 0 and (config.train.init_from or config.model_path) is not None
        parameters = [p for unit in self.trace.units for p in unit.parameters if p.is_trained or not has_stored_base]
        ema_size = EMA_ELEMENT_SIZE * (config.train.ema > 0)
        return sum(
            int(p.numel * (p.element_size + p.num_moments * p.moment_size + ema_size * p.is_trained))
            for p in parameters
        )


def make_plan(config: RunConfig, mesh: MeshShape, machine: Machine, probe: Probe | None = None) -> Plan:
    """Plan `config`, which must not contain `auto`, on `mesh`.

    `probe` is an existing probe of the same model, units and dtypes; by default a new one is created.
    """
    probe = probe or Probe(config, machine.device_type, machine.imbalance)
    train = config.train
    offload = offloaded_fraction(train.offload_activations)
    trace = probe.trace(int(train.micro_batch_size), train.activation_checkpoint, offload)
    return Plan(config, mesh, machine, trace, layout_of(config, trace, mesh, probe.attended_length), probe)


def layout_of(config: RunConfig, trace: Trace, mesh: MeshShape, attended_length: float) -> Layout:
    """Return the layout of the units of `trace` on `mesh`, according to `config`.

    attended_length: see `Probe.attended_length`.
    """
    fsdp = config.fsdp
    setting = fsdp.reshard_after_forward
    reshard = resolve_resharding(setting, [unit.name for unit in trace.units[: trace.root]], mesh.shard)
    divisions = {
        parameter.name: divide(
            parameter.shape,
            mesh.shard,
            config.expert if parameter.is_expert else 1,
            num_dims_to_divide(parameter.shape, config, after_forward),
        )
        for unit, after_forward in zip(trace.units, (*reshard, True), strict=True)
        for parameter in unit.parameters
    }
    muon_parameters = [p for unit in trace.units for p in unit.parameters if p.muon_blocks is not None and p.is_trained]
    return Layout(
        mesh.replicate,
        mesh.shard,
        (*reshard, setting == "always"),
        param_size=_SIZES[fsdp.param_dtype],
        reduce_size=_SIZES[fsdp.reduce_dtype],
        cpu_offload=fsdp.cpu_offload,
        has_reference_model=config.has_reference_model,
        teacher=teacher_of(config, mesh.shard, attended_length),
        context=config.context,
        expert=config.expert,
        has_average=config.train.ema > 0,
        prefetch_forward=fsdp.prefetch_forward,
        prefetch_backward=fsdp.prefetch_backward,
        accumulates_shards=fsdp.accumulate == "sharded",
        reshard_after_backward=fsdp.reshard_after_backward,
        is_unsharded=is_unsharded(config, mesh.shard),
        divisions=divisions,
        muon=MuonUpdate(muon_parameters, divisions, mesh.replicate, mesh.shard, config.optim.muon)
        if muon_parameters
        else None,
    )


def teacher_of(config: RunConfig, num_shards: int, attended_length: float | None = None) -> Teacher | None:
    """Return a distillation teacher's memory and FLOPs on one rank, or None without a teacher.

    attended_length: the sequence length for which the FLOPs of attention are counted; `data.seq_len` by default.
    """
    teacher = teacher_config(config)
    if teacher is None:
        return None
    model = build_network(teacher)
    shard_bytes = sum(p.numel() * p.element_size() for p in model.parameters()) // num_shards
    output_numel = max(p.numel() for p in model.parameters() if p.shape[:1] == (teacher.vocab_size,))
    tokens = int(config.train.micro_batch_size) * config.data.seq_len // config.context
    flops = training_flops_per_token(teacher, model, attended_length or config.data.seq_len) / 3 * tokens
    return Teacher(shard_bytes + output_numel * _SIZES[config.fsdp.param_dtype], flops)


def without_data(config: RunConfig) -> RunConfig:
    """Return `config` with synthetic data, so that a plan reads no data."""
    return replace(config, data=config.data.as_synthetic())
