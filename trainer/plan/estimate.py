"""The estimate of one step: its memory, collectives and time.

A step never takes less time than the host needs to issue its operators.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from trainer.optim.optimizer import EMA_ELEMENT_SIZE
from trainer.plan.layout import Layout
from trainer.plan.ledger import Kind, Ledger, MemorySnapshot
from trainer.plan.rates import Collective, Rates
from trainer.plan.step import Step
from trainer.plan.trace import Trace


@dataclass(frozen=True)
class Memory:
    """One rank's tensor memory over a step, in bytes.

    Includes the optimizer state, which exists from the second step on.
    """

    peak: MemorySnapshot
    offloaded: int
    """Bytes of host memory that hold the rank's offloaded activations (`train.offload_activations`)."""


@dataclass(frozen=True)
class StepTime:
    """The time of one step in seconds, broken down by cause."""

    total_s: float
    compute_s: float
    """Forward and backward kernels, including the slowdown by collectives that run at the same time."""
    optimizer_s: float
    copy_s: float
    """Copies into and out of the buffers of collectives."""
    communication_s: float
    """All collectives, whether or not they overlap with kernels."""
    exposed_s: float
    """The part of `communication_s` during which kernels had to wait."""
    host_s: float
    """Host time to issue all operators: a lower bound on the step time."""
    offload_s: float
    """Copies of activations to host memory and back, whether or not they overlap with kernels."""
    exposed_offload_s: float
    """The part of `offload_s` during which kernels had to wait."""


@dataclass(frozen=True)
class Estimate:
    """The estimate of one rank's step."""

    memory: Memory
    collectives: Counter[Collective]
    """How often a step issues each kind of collective: those of FSDP and of context, tensor and expert parallelism;
    three small all-reduces of the training step (what the ranks agree on, through host memory; the squared gradient
    norm over the shard axis; the loss over all ranks); that of the expert counts; and those of Muon, with the sizes
    that rank 0 receives."""
    time: StepTime


def estimate_step(trace: Trace, layout: Layout, num_micro_batches: int, rates: Rates) -> Estimate:
    """Estimate one step of `num_micro_batches` micro-batches."""
    ledger = _ledger_of(trace, layout, num_micro_batches, rates)
    memory = Memory(ledger.peak, ledger.offloaded)
    collectives = ledger.collectives + _collectives_of_update(trace, layout)
    return Estimate(memory, collectives, _time_of(trace, layout, num_micro_batches, rates, ledger))


def memory_curve(trace: Trace, layout: Layout, num_micro_batches: int, rates: Rates) -> list[MemorySnapshot]:
    """Return the memory in each segment of the simulated step, in order."""
    return _ledger_of(trace, layout, num_micro_batches, rates, with_curve=True).curve


def _ledger_of(trace: Trace, layout: Layout, num_micro_batches: int, rates: Rates, with_curve: bool = False) -> Ledger:
    ledger = Ledger(trace, layout, rates, at_rest(trace, layout), with_curve)
    Step(trace, layout, num_micro_batches, ledger).run()
    ledger.update(max((update.peak_bytes for update in layout.muon), default=0))
    return ledger


def at_rest(trace: Trace, layout: Layout) -> dict[Kind, int]:
    """Return the bytes that stay in a rank's device memory between steps, by kind."""
    kinds: dict[Kind, int] = {"buffers and inputs": trace.buffer_bytes + trace.input_bytes}
    if layout.cpu_offload:
        return kinds
    divisions = [(p, layout.division(p)) for unit in trace.units for p in unit.parameters]
    shards = [(p, division.gathered_numel(p.shape) // division.parts) for p, division in divisions]  # with padding
    kinds["parameters"] = (1 + layout.has_reference_model) * sum(numel * p.element_size for p, numel in shards)
    kinds["parameters"] += layout.teacher.num_bytes if layout.teacher is not None else 0
    ema_size = EMA_ELEMENT_SIZE * layout.has_average
    kinds["optimizer"] = sum(
        int(numel * (p.num_moments * p.moment_size + ema_size * p.is_trained)) for p, numel in shards
    )
    return kinds


_NORM_BYTES = 4
"""Size of the all-reduce of the gradient norm."""
_LOSS_BYTES = 8
"""Size of the all-reduce of the loss."""
_MESSAGE_BYTES = 6 * 8
"""Size of the all-reduce of what the ranks agree on (`Trainer.agree`)."""


def _collectives_of_update(trace: Trace, layout: Layout) -> Counter[Collective]:
    """Return the collectives of a step besides those of its micro-batches."""
    counts: Counter[Collective] = Counter()
    if layout.num_ranks > 1:
        sizes = [_MESSAGE_BYTES, _LOSS_BYTES, trace.expert_count_bytes]
        counts.update(Collective("all_reduce", "world", layout.num_ranks, size) for size in sizes if size)
    if layout.shard > 1:
        counts[Collective("all_reduce", "shard", layout.shard, _NORM_BYTES)] += 1
    for update in layout.muon:
        counts.update(update.collectives)
    return counts


def _time_of(trace: Trace, layout: Layout, num_micro_batches: int, rates: Rates, ledger: Ledger) -> StepTime:
    streams = ledger.streams
    # A teacher's all-gathers are not counted, since they overlap with its forward pass.
    teacher_s = 0.0
    if layout.teacher is not None:
        teacher_s = num_micro_batches * layout.teacher.flops / rates.matmul[layout.param_size]
    slowed_s = rates.taken_by_collectives * max(0.0, streams.communication_s - streams.exposed_s)
    optimizer_s = _optimizer_s(trace, layout, rates)
    total_s = streams.total_s + teacher_s + slowed_s + optimizer_s
    return StepTime(
        total_s=max(total_s, streams.host_s),
        compute_s=streams.compute_s + teacher_s + slowed_s,
        optimizer_s=optimizer_s,
        copy_s=streams.copy_s,
        communication_s=streams.communication_s,
        exposed_s=min(streams.exposed_s, streams.communication_s),
        host_s=streams.host_s,
        offload_s=streams.offload_s,
        exposed_offload_s=streams.exposed_offload_s,
    )


def _optimizer_s(trace: Trace, layout: Layout, rates: Rates) -> float:
    """Return the time in seconds of the gradient norm and of the optimizer's update.

    Per trained element, the norm reads the gradient.  The optimizer reads the weight and the gradient, writes both
    (torch's fused step writes the clipped gradient), and reads and writes each moment.  A weight average reads the
    weight, and reads and writes the average.
    """
    seconds = 0.0
    for p in (p for unit in trace.units for p in unit.parameters if p.is_trained):
        division = layout.division(p)
        numel = p.numel / (division.parts * division.group)
        seconds += 2 * numel * p.element_size / rates.memory
        seconds += numel * (3 * p.element_size + 2 * p.num_moments * p.moment_size) / rates.optimizer
        if layout.has_average:
            seconds += numel * (p.element_size + 2 * EMA_ELEMENT_SIZE) / rates.memory
    return seconds + sum(update.seconds(layout, rates) for update in layout.muon)
