"""Uses the planner within a run, to resolve `auto` settings and to compare the plan with measurements."""

from __future__ import annotations

import math
import statistics
import traceback
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

import torch
from torch import nn

from trainer.config.parallel import MeshShape, resolve_context_method, resolve_expert_method
from trainer.config.schema import RunConfig
from trainer.distributed.world import World
from trainer.errors import UserError, print_stderr
from trainer.metrics.console import readable_bytes
from trainer.metrics.step_metrics import peak_memory_gib, resident_gib
from trainer.model.parameters import local
from trainer.optim.optimizer import EMA_ELEMENT_SIZE, Optimizer, training_bytes
from trainer.plan.layout import teacher_of
from trainer.plan.machine import GIB, Machine, find_machine
from trainer.plan.plan import Plan, make_plan
from trainer.plan.search import PlannedChoice, auto_settings, fastest_choice, remedies
from trainer.plan.show import choice_text, memory_text

_TOLERANCE = 0.1
"""Deviations in step time and in a GPU's peak memory are reported only above this fraction of the planned value."""
_HOST_TOLERANCE_GIB = 0.25
"""On a CPU, how far the peak memory of the process may lie outside the planned range without being reported."""
_HEAP_FRACTION = 0.5
_MAX_HEAP_FRACTIONS = (1.5, 0.6)
_MAX_HEAP_GIB = 0.3
"""Freed memory that malloc retains on a CPU: its typical value, as a fraction of the peak without weights, and an upper
bound.

The upper bound is the smaller of `_MAX_HEAP_FRACTIONS[0]` x peak (which applies to small runs) and
`_MAX_HEAP_FRACTIONS[1]` x peak + `_MAX_HEAP_GIB`, where `peak` excludes the weights.

Tensors below glibc's mmap threshold of 32 MiB come from its heap, which fragments differently in each run of the same
command.  Across twelve configurations (30M and 135M parameters, one thread) the fraction ranged from 0.03 to 0.93; on
two ranks it was 1.3.  With a threshold of 64 KiB nothing is retained and the plan is within 1.5%, but a step takes 1.4
times the CPU time (see `keep_freed_memory`)."""
_DEVICE_TOLERANCE_GIB = 0.25
"""On a GPU, deviations in peak memory up to this are not reported, since libraries such as cuBLAS (32 MiB per handle)
also take memory from the allocator."""


def resolve_on_device(config: RunConfig, mesh: MeshShape, world: World) -> tuple[RunConfig, PlannedChoice | None]:
    """Return `config` with its `auto` settings resolved identically on all ranks, and the planner's choice.

    The methods of context and expert parallelism are resolved before the planner's choice, whose plans need them, and
    again after it, since it may choose `mesh.context`, `mesh.tensor` and `mesh.expert`.  The choice is None if nothing
    is `auto`, and on all ranks but rank 0.  Collective if any setting is `auto`.  Raises UserError on all ranks if
    nothing fits.
    """
    config, choice = _choose_auto(_with_methods(config, world), mesh, world)
    return _with_methods(config, world), choice


def _with_methods(config: RunConfig, world: World) -> RunConfig:
    ranks_per_node = world.env.local_world_size
    return resolve_expert_method(resolve_context_method(config, ranks_per_node), ranks_per_node)


def _choose_auto(config: RunConfig, mesh: MeshShape, world: World) -> tuple[RunConfig, PlannedChoice | None]:
    """Let the planner choose the `auto` settings for the memory of the rank that has least."""
    if not auto_settings(config):
        return config, None
    (negated_min_gib,) = world.max([-machine_of(config, world).memory_gib])

    def choose() -> PlannedChoice | None:
        if not world.is_main:
            return None
        return fastest_choice(config, mesh, replace(machine_of(config, world), memory_gib=-negated_min_gib))

    choice: PlannedChoice | None = world.agreed(choose)
    settings = world.broadcast(choice and choice.settings)
    fsdp = replace(config.fsdp, reshard_after_forward=settings["fsdp.reshard_after_forward"])
    train = replace(
        config.train,
        activation_checkpoint=settings["train.activation_checkpoint"],
        micro_batch_size=settings["train.micro_batch_size"],
        offload_activations=settings["train.offload_activations"],
    )
    groups = {name: settings[f"mesh.{name}"] for name in ("context", "tensor", "expert", "expert_method")}
    return replace(config, fsdp=fsdp, train=train, mesh=replace(config.mesh, **groups)), choice


def describe_choice(choice: PlannedChoice | None) -> str:
    """Return the resolved `auto` settings, with reasons, or an empty string if nothing was `auto`."""
    return "" if choice is None else choice_text(choice)


def machine_of(config: RunConfig, world: World) -> Machine:
    """Return the machine that this rank runs on."""
    ranks_per_node = world.env.local_world_size
    if world.device.type == "cpu":
        return find_machine("cpu", config.run.memory_gib, ranks_per_node, memory_key="run.memory_gib")
    memory_gib = config.run.memory_gib or torch.cuda.get_device_properties(world.device).total_memory / GIB
    return find_machine("auto", memory_gib, ranks_per_node, memory_key="run.memory_gib")


class Forecast:
    """A run's plan, and how it compares with measurements.  No collectives; the plan is made when first accessed."""

    def __init__(self, config: RunConfig, mesh: MeshShape, world: World) -> None:
        self._config, self._mesh, self._world = config, mesh, world
        self._process_gib = self._min_gib = peak_memory_gib(world.device)
        self._steps_s: deque[float] = deque(maxlen=100)
        self._num_steps = 0

    @cached_property
    def plan(self) -> Plan | None:
        """The plan, or None if the model cannot be traced on fake tensors; `failure_reason` then gives the reason."""
        try:
            return make_plan(self._config, self._mesh, machine_of(self._config, self._world))
        except UserError as error:
            self.failure_reason = str(error).splitlines()[0]
            return None

    failure_reason = ""

    def begin(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Measure the memory that this process uses besides its tensors (CPU only); called just before training."""
        if self._world.device.type != "cpu":
            return
        weights, _, optimizer_bytes = training_bytes(model, self._config.optim, self._config.train.ema > 0)
        tensor_bytes = weights * (1 + self._config.has_reference_model) + sum(b.nbytes for b in model.buffers())
        tensor_bytes += teacher.num_bytes if (teacher := teacher_of(self._config, self._mesh.shard)) is not None else 0
        states = [state for part in optimizer.parts for state in part.state.values()]
        if any(states):  # a resumed run has loaded them
            tensor_bytes += optimizer_bytes
        elif self._config.train.ema > 0:
            tensor_bytes += EMA_ELEMENT_SIZE * sum(local(p).numel() for p in model.parameters() if p.requires_grad)
        self._process_gib = max(0.0, resident_gib() - tensor_bytes / GIB)
        self._min_gib = peak_memory_gib(self._world.device)

    @property
    def peak_gib(self) -> float | None:
        """The planned peak of what `peak_memory_gib` measures: tensors on a GPU, the process on a CPU."""
        return None if self.plan is None else self._peaks_gib(self.plan)[1]

    def _peaks_gib(self, plan: Plan) -> tuple[float, float, float]:
        """Return the lowest, typical and highest peak to expect; all three are equal on a GPU."""
        if self._world.device.type != "cpu":
            return plan.peak_gib, plan.peak_gib, plan.peak_gib
        tensors = self._process_gib + self._staging_gib(plan) + plan.peak_gib
        without_weights = plan.peak_gib - plan.memory.peak.by_kind["parameters"] / GIB
        fraction, fraction_above = _MAX_HEAP_FRACTIONS
        max_heap = min(fraction * without_weights, fraction_above * without_weights + _MAX_HEAP_GIB)
        low, typical, high = (
            max(self._min_gib, tensors + heap) for heap in (0.0, _HEAP_FRACTION * without_weights, max_heap)
        )
        return low, typical, high

    def _staging_gib(self, plan: Plan) -> float:
        """Return the size of the staging copy for background saves, or 0 if there is only a final save."""
        every, steps = self._config.checkpoint.every, self._config.train.steps
        saves_earlier = 0 < every < steps if isinstance(every, int) else plan.save_every_s < plan.run_s
        is_copied = saves_earlier and self._config.checkpoint.mode == "async"
        return plan.checkpoint_bytes / plan.mesh.num_ranks / GIB if is_copied else 0.0

    @property
    def step_s(self) -> float | None:
        """Planned seconds per step, or None if the device has neither a data sheet nor a calibration."""
        if self.plan is None:
            return None
        machine = self.plan.machine
        return self.plan.time.total_s if machine.is_measured or machine.peak_flops is not None else None

    def summary(self) -> str:
        """Return the plan as text for the start block; on a CPU, with the memory used besides tensors."""
        if self.plan is None:
            return f"none: {self.failure_reason}"
        plan = self.plan
        time = "" if self.step_s is None else f", {self.step_s:.3g} s per step"
        peak = readable_bytes(plan.peak_gib * GIB)
        tensors = f"{peak} of tensors per rank at the peak, in the {plan.memory.peak.place}{time}"
        if self._world.device.type != "cpu":
            return tensors
        staging = self._staging_gib(plan)
        process = readable_bytes(self._process_gib * GIB)
        lines = [tensors, f"on top: {process} for the process and its libraries,"]
        if staging:
            lines.append(f"  {readable_bytes(staging * GIB)} for a copy that is saved in the background,")
        low, typical, high = (readable_bytes(gib * GIB) for gib in self._peaks_gib(plan))
        return "\n".join(
            [
                *lines,
                "  and freed memory that malloc keeps, which varies from run to run",
                f"in all about {typical} per rank, between {low} and {high}",
            ]
        )

    def record_step(self, seconds: float, is_profiled: bool) -> None:
        """Record a step's duration, except for profiled steps and the first one, which compiles and allocates."""
        self._num_steps += not is_profiled
        if self._num_steps > 1 and not is_profiled:
            self._steps_s.append(seconds)

    def result(self) -> dict[str, float | None]:
        """Return planned and measured values, for the end record."""
        return {
            "planned_peak_gib": self.peak_gib,
            "peak_memory_gib": peak_memory_gib(self._world.device),
            "planned_step_s": self.step_s,
            "step_s": statistics.median(self._steps_s) if self._steps_s else None,
        }

    def mismatches(self) -> list[str]:
        """Return a line for each measured value that deviates from the plan by more than its tolerance."""
        result = self.result()
        lines = []
        peak = result["peak_memory_gib"]
        if self.plan is not None and peak and self._num_steps > 1:
            low, typical, high = self._peaks_gib(self.plan)
            is_cpu = self._world.device.type == "cpu"
            margin = _HOST_TOLERANCE_GIB if is_cpu else max(_TOLERANCE * typical, _DEVICE_TOLERANCE_GIB)
            if not low - margin <= peak <= high + margin:
                lines.append(f"peak memory was {peak:.2f} GiB, planned {typical:.2f} GiB ({_percent(peak, typical)})")
        step_s, planned = result["step_s"], result["planned_step_s"]
        if planned and step_s and abs(step_s - planned) > _TOLERANCE * planned:
            lines.append(
                f"a step took {step_s:.3g} s, planned {planned:.3g} s ({_percent(step_s, planned)}); "
                "python -m trainer.plan --calibrate measures this machine"
            )
        return lines

    def explain(self, error: BaseException) -> None:
        """If `error` is an out-of-memory error, explain it: the plan, and settings that would fit.

        Called on the rank whose failure was the first.

        If there are several ranks, the explanation is printed at once, since another rank's failure may end this
        process at any moment.  Otherwise it becomes a note, which Python (3.11 or later) prints below the traceback.
        The traceback goes to a file in the run's folder.
        """
        if is_out_of_memory(error):
            traceback_place = self._write_traceback(error)
            report = print_stderr if self._world.size > 1 else getattr(error, "add_note", print_stderr)

            for text in self._explanation(error, traceback_place):
                report(text)

    def _write_traceback(self, error: BaseException) -> str:
        path = self._config.run_dir / f"traceback_rank{self._world.rank}.txt"
        try:
            path.write_text("".join(traceback.format_exception(error)))
        except OSError:  # no folder yet, or the disk is full: print it instead
            print_stderr("".join(traceback.format_exception(error)).rstrip())
            return "above"
        return f"in {path}"

    def _explanation(self, error: BaseException, traceback_place: str) -> Iterator[str]:
        """Yield what happened, then what would fit, which takes seconds to compute."""
        rank = f"rank {self._world.rank}: " if self._world.size > 1 else ""
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        lines = [f"out of memory: {rank}{first_line}", f"(the traceback is {traceback_place})"]
        if self.plan is None:
            yield "\n".join([*lines, f"no plan to compare with: {self.failure_reason}"])
            return
        if self._world.device.type == "cuda":
            allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
            lines.append(
                f"live now: {allocated / GIB:.2f} GiB in tensors, {reserved / GIB:.2f} GiB held by the allocator"
            )
        lines.append(memory_text(self.plan))
        if self.plan.fits:
            memory_gib = self.plan.machine.memory_gib
            lines.append(f"less than {memory_gib:.2f} GiB was available: other processes use memory, or a limit is set")
        yield "\n".join(lines)
        yield "\n".join(self._remedies(self.plan))

    def _remedies(self, plan: Plan) -> list[str]:
        """Return changes that need at least a tenth less memory than the plan, since the run as planned did not fit."""
        budget = min(plan.machine.budget_bytes, (1 - _TOLERANCE) * plan.memory.peak.total)
        try:
            changes = remedies(replace(plan, machine=plan.machine.with_budget(budget)))
        except (MemoryError, RuntimeError):  # not even enough memory to plan
            changes = []
        return changes or ["no single change of settings would be enough; see python -m trainer.plan"]


def _percent(measured: float, planned: float) -> str:
    return f"{100 * (measured / planned - 1):+.0f}%" if math.isfinite(measured / planned) else ""


_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "Cannot allocate memory", "std::bad_alloc")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` is an out-of-memory error, on the device or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, (RuntimeError, OSError)) and any(text in str(error) for text in _OUT_OF_MEMORY)
