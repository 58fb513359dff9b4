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
from trainer.optim.optimizer import EMA_ELEMENT_SIZE
from trainer.plan.estimate import Estimate, Memory, StepTime, at_rest, estimate_step
from trainer.plan.layout import Layout, layout_of
from trainer.plan.ledger import Kind, MemorySnapshot
from trainer.plan.machine import GIB, Machine
from trainer.plan.probe import Probe
from trainer.plan.rates import Collective
from trainer.plan.trace import Trace


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
    def estimate(self) -> Estimate:
        """The estimate of one step without generation."""
        return estimate_step(self.trace, self.layout, self.num_micro_batches, self.machine.rates)

    @cached_property
    def memory(self) -> Memory:
        """Memory over a step; if generation needs more than the rest of the step, the peak is during generation."""
        memory = self.estimate.memory
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

    @property
    def collectives(self) -> Counter[Collective]:
        return self.estimate.collectives

    @property
    def time(self) -> StepTime:
        return self.estimate.time

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
    layout = layout_of(config, trace, mesh, probe.attended_length, machine.device_type)
    return Plan(config, mesh, machine, trace, layout, probe)


def without_data(config: RunConfig) -> RunConfig:
    """Return `config` with synthetic data, so that a plan reads no data."""
    return replace(config, data=config.data.as_synthetic())
