"""The plan inside a run: resolves `auto` settings, and compares the prediction with the measurement."""

from __future__ import annotations

import math
import statistics
import traceback
from collections import deque
from dataclasses import replace
from functools import cached_property

import torch

from trainer.config import MeshShape, RunConfig, with_method
from trainer.distributed.world import World
from trainer.errors import UserError, redact, say
from trainer.metrics.console import readable_bytes
from trainer.metrics.meter import peak_memory_gib
from trainer.plan.machine import GIB, Machine, find_machine
from trainer.plan.plan import Plan, make_plan
from trainer.plan.search import Choice, asks_for_auto, remedies, settle

_MISS = 0.1
"""Share by which a prophecy may be wrong in silence."""
_HOST_MISS_GIB = 0.5
"""On a CPU memory is the process's, with much that is no tensor: less than this is no miss."""
_DEVICE_MISS_GIB = 0.25
"""On a GPU libraries take memory of their own from the allocator, cuBLAS 32 MiB for each of its handles."""


def resolve_auto(config: RunConfig, mesh: MeshShape, world: World) -> tuple[RunConfig, Choice | None]:
    """Return `config` with values for what is `auto`, the same on all ranks, and on rank 0 what there was to choose.

    The memory is that of the rank with the least.  Collective where anything is `auto`; raises UserError on all ranks
    if nothing fits.
    """
    config = with_method(config, world.env.local_world_size)
    if not asks_for_auto(config):
        return config, None
    (least,) = world.max([-machine_of(config, world).memory_gib])
    choice: Choice | None = None

    def choose() -> None:
        nonlocal choice
        if world.is_main:
            choice = settle(config, mesh, replace(machine_of(config, world), memory_gib=-least))

    world.agreed(choose)
    settings = world.broadcast(choice and choice.settings)
    fsdp = replace(config.fsdp, reshard_after_forward=settings["fsdp.reshard_after_forward"])
    train = replace(
        config.train,
        activation_checkpoint=settings["train.activation_checkpoint"],
        micro_batch_size=settings["train.micro_batch_size"],
    )
    settled = replace(config, fsdp=fsdp, train=train, mesh=replace(config.mesh, context=settings["mesh.context"]))
    return with_method(settled, world.env.local_world_size), choice


def describe_choice(choice: Choice | None) -> str:
    """Return in lines what `auto` has settled, and the runners-up; nothing where there was nothing to choose."""
    if choice is None:
        return ""
    from trainer.plan.show import choice_text  # it draws tables with rich, which most runs need not have in memory

    return choice_text(choice)


def machine_of(config: RunConfig, world: World) -> Machine:
    """Return the machine that this rank runs on."""
    ranks_per_node = world.env.local_world_size
    if world.device.type == "cpu":
        return find_machine("cpu", config.run.memory_gib, ranks_per_node, memory_key="run.memory_gib")
    memory_gib = config.run.memory_gib or torch.cuda.get_device_properties(world.device).total_memory / GIB
    return find_machine("auto", memory_gib, ranks_per_node, memory_key="run.memory_gib")


class Forecast:
    """A run's plan, compared with the measurements.  Calls no collective; planned when it is first asked for."""

    def __init__(self, config: RunConfig, mesh: MeshShape, world: World) -> None:
        self._config, self._mesh, self._world = config, mesh, world
        self._before_gib = peak_memory_gib(world.device)
        self._steps_s: deque[float] = deque(maxlen=100)
        self._num_steps = 0

    @cached_property
    def plan(self) -> Plan | None:
        """The plan, or None for a model that cannot be run without values."""
        try:
            return make_plan(self._config, self._mesh, machine_of(self._config, self._world))
        except UserError as error:
            self.why_not = str(error).splitlines()[0]
            return None

    why_not = ""

    @property
    def peak_gib(self) -> float | None:
        """The peak as `peak_memory_gib` measures it: of tensors on a GPU, of the whole process on a CPU."""
        if self.plan is None:
            return None
        return self.plan.peak_gib + (self._before_gib if self._world.device.type == "cpu" else 0.0)

    @property
    def step_s(self) -> float | None:
        """Seconds of a step; None where neither a data sheet nor a measurement says how fast the device is."""
        if self.plan is None:
            return None
        machine = self.plan.machine
        return self.plan.time.total_s if machine.is_measured or machine.peak_flops is not None else None

    def sentence(self) -> str:
        """Return what the start block says."""
        if self.plan is None:
            return f"none: {self.why_not}"
        time = "" if self.step_s is None else f", {self.step_s:.3g} s per step"
        peak = readable_bytes(self.plan.peak_gib * GIB)
        return f"{peak} of tensors per rank at the peak, in the {self.plan.memory.peak.place}{time}"

    def count(self, seconds: float, is_profiled: bool) -> None:
        """Count how long a step took, but for profiled ones and the first, which compiles and allocates."""
        self._num_steps += not is_profiled
        if self._num_steps > 1 and not is_profiled:
            self._steps_s.append(seconds)

    def result(self) -> dict[str, float | None]:
        """Return the end record's fields: what was planned, and what was measured."""
        return {
            "planned_peak_gib": self.peak_gib,
            "peak_memory_gib": peak_memory_gib(self._world.device),
            "planned_step_s": self.step_s,
            "step_s": statistics.median(self._steps_s) if self._steps_s else None,
        }

    def misses(self) -> list[str]:
        """Return in words where the plan was wrong by more than a tenth."""
        found = self.result()
        words = []
        peak, planned = found["peak_memory_gib"], found["planned_peak_gib"]
        least = _HOST_MISS_GIB if self._world.device.type == "cpu" else _DEVICE_MISS_GIB
        if planned and peak and self._num_steps > 1 and abs(peak - planned) > max(_MISS * planned, least):
            words.append(f"peak memory was {peak:.2f} GiB, planned {planned:.2f} GiB ({_percent(peak, planned)})")
        step_s, planned = found["step_s"], found["planned_step_s"]
        if planned and step_s and abs(step_s - planned) > _MISS * planned:
            words.append(
                f"a step took {step_s:.3g} s, planned {planned:.3g} s ({_percent(step_s, planned)}); "
                "python -m trainer.plan --calibrate measures this machine"
            )
        return words

    def explain(self, error: BaseException) -> None:
        """Note on an error that says that memory is full what was planned and, last, what would fit: on one rank.

        A note stands below the traceback, where there is one (before Python 3.11 it is printed at once).  On every
        rank with such an error the traceback goes to a file in the run's folder.
        """
        if is_out_of_memory(error):
            kept = self._keep_traceback(error)
            self._world.once("explain", lambda: getattr(error, "add_note", say)(self._explanation(error, kept)))

    def _keep_traceback(self, error: BaseException) -> str:
        path = self._config.run_dir / f"traceback_rank{self._world.rank}.txt"
        try:
            path.write_text(redact("".join(traceback.format_exception(error))))
        except OSError:  # no folder yet, or a full disk: then it is printed
            say("".join(traceback.format_exception(error)).rstrip())
            return "above"
        return f"in {path}"

    def _explanation(self, error: BaseException, kept: str) -> str:
        rank = f"rank {self._world.rank}: " if self._world.size > 1 else ""
        lines = [f"out of memory: {rank}{_first_line(error)}", f"(the traceback is {kept})"]
        if self.plan is None:
            return "\n".join([*lines, f"no plan to compare with: {self.why_not}"])
        if self._world.device.type == "cuda":
            allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
            lines.append(
                f"live now: {allocated / GIB:.2f} GiB in tensors, {reserved / GIB:.2f} GiB held by the allocator"
            )
        from trainer.plan.show import memory_text  # as in `describe_choice`

        lines.append(memory_text(self.plan))
        if self.plan.fits:
            memory_gib = self.plan.machine.memory_gib
            lines.append(f"less than {memory_gib:.2f} GiB was available: other processes use memory, or a limit is set")
        return "\n".join([*lines, *self._remedies(self.plan)])

    def _remedies(self, plan: Plan) -> list[str]:
        """Return what would have fitted; whatever the plan says this did not, so that it is to need a tenth less."""
        budget = min(plan.machine.budget_bytes, (1 - _MISS) * plan.memory.peak.total)
        try:
            found = remedies(replace(plan, machine=plan.machine.with_budget(budget)))
        except (MemoryError, RuntimeError):  # there is not even that much
            found = []
        return found or ["no single change of settings would be enough; see python -m trainer.plan"]


def _percent(found: float, planned: float) -> str:
    return f"{100 * (found / planned - 1):+.0f} %" if math.isfinite(found / planned) else ""


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


_FULL = ("can't allocate memory", "not enough memory", "Cannot allocate memory", "std::bad_alloc")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory is full, on a device or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, (RuntimeError, OSError)) and any(words in str(error) for words in _FULL)
