"""Profiles selected steps: writes a trace, a memory snapshot (on CUDA), and a record of where the time went.

Open traces in https://ui.perfetto.dev and memory snapshots in https://pytorch.org/memory_viz.  In addition to what
torch's profiler records, a trace contains a range for each step and, in it, one in which training waits for data.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

from trainer.config.schema import RunConfig
from trainer.distributed.monitor import Monitor
from trainer.files import atomic_replace
from trainer.hooks import Hook
from trainer.metrics.record import Record
from trainer.metrics.time_breakdown import (
    COMMUNICATION,
    DATA,
    DATA_RANGE,
    HOST,
    KINDS,
    OTHER,
    Span,
    classify_kernel,
    classify_operator,
    compute_fractions,
)
from trainer.metrics.writers import Metrics, warn

if TYPE_CHECKING:
    from trainer.metrics.step_metrics import Update

_MAX_ALLOCATIONS = 100_000
"""Maximum number of allocations and frees in a memory snapshot, the same as in torchtitan."""
_STEP_PREFIX = "ProfilerStep#"
"""Prefix of the names of step ranges in a trace; the step number follows.  Trace viewers also recognize it."""


class Profile(Hook):
    """Profiles the steps of `log.profile_steps` on rank 0 and on the ranks in `log.profile_ranks`.

    It records nothing in other steps or on other ranks.  It calls no collectives.  While one rank writes its profile,
    the others wait for it in the next collective of the training loop.  File names contain the steps and the rank.
    Files are written atomically, and a failure to write one does not stop training.  If training ends early, the steps
    recorded so far are written.  If a run on CUDA fails, only the memory snapshot is written, because the device may
    never finish its queued work.
    """

    def __init__(self, config: RunConfig, rank: int, device: torch.device, metrics: Metrics, monitor: Monitor) -> None:
        self._config, self._rank, self._device, self._metrics = config, rank, device, metrics
        self._monitor = monitor
        self._first, self._last = config.log.profile_steps or (0, -1)
        self._is_profiled_rank = rank in (0, *config.log.profile_ranks)
        self._recording: _Recording | None = None

    def note(self, step: int) -> str:
        """Return a note to print at the start if this run will write no profile or no memory snapshot, otherwise "".

        step: the last completed step, from which the run continues.
        """
        if self._config.log.profile_steps is None:
            return ""
        setting = f"log.profile_steps=[{self._first},{self._last}]"
        if step >= self._last:
            return f"{setting}: no profile, because the run is already past these steps"
        if self._first > self._config.train.steps:
            return f"{setting}: no profile, because the run ends earlier, at step {self._config.train.steps}"
        return f"{setting}: trace only; memory snapshots need CUDA" if self._device.type != "cuda" else ""

    def close(self, has_failed: bool) -> None:
        self._finish(has_failed)

    def begin_step(self, step: int) -> None:
        """Start recording if `step` is to be profiled."""
        if not self._config.log.profiles(step):  # the run may have gone back to an earlier checkpoint
            self._finish()
        elif self._recording is None and self._is_profiled_rank:
            self._start()
        if self._recording is not None:
            self._recording.begin(step)

    def end_step(self, step: int, update: Update) -> None:
        """End the range of the step.  After the last profiled step, write the profile."""
        if self._recording is not None:
            self._recording.end()
        if step == self._last:
            self._finish()

    def _start(self) -> None:
        from torch.autograd import profiler

        if profiler._is_profiler_enabled:
            warn("log.profile_steps: no profile, because another profiler is already running")
            self._is_profiled_rank = False
            return
        with self._monitor.during("profile"):
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # keep earlier kernels out of the profile
            try:
                self._recording = _Recording(self._device)
            except RuntimeError as error:  # CUPTI may be missing or in use by another tool
                warn(f"log.profile_steps: the profiler cannot start: {error}")
                self._is_profiled_rank = False

    def _finish(self, has_failed: bool = False) -> None:
        if self._recording is None:
            return
        recording, self._recording = self._recording, None
        if threading.get_ident() != recording.thread:
            return  # a generator was finalized on another thread, which cannot stop the profiler
        with self._monitor.during("profile"):
            try:
                record = recording.write(self._config.run_dir / "profile", self._rank, has_failed)
            except (OSError, RuntimeError, ValueError) as error:
                warn(f"log.profile_steps: the profile cannot be written: {type(error).__name__}: {error}")
                return
        if record is not None:
            self._metrics.write(record)


class _Recording:
    """One profiler session on the current thread, with the memory history on CUDA.  Construction starts it."""

    def __init__(self, device: torch.device) -> None:
        self.thread = threading.get_ident()
        self._on_cuda = device.type == "cuda"
        self._steps: list[int] = []
        self._num_ended = 0
        self._range: torch.profiler.record_function | None = None
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._on_cuda:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities, record_shapes=True)
        self._profiler.start()  # may fail, so memory recording, which must be turned off again, is started after it
        if self._on_cuda:
            torch.cuda.memory._record_memory_history(stacks="python", max_entries=_MAX_ALLOCATIONS, clear_history=True)

    def begin(self, step: int) -> None:
        self._steps.append(step)
        self._range = torch.profiler.record_function(f"{_STEP_PREFIX}{step}")
        self._range.__enter__()

    def end(self) -> None:
        self._num_ended += self._range is not None
        self._end_range()

    def _end_range(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None

    def write(self, folder: Path, rank: int, has_failed: bool) -> Record | None:
        """Stop recording and write the files.  Returns the profile record, or None if no step was completed.

        On CUDA with `has_failed`, no trace is written and None is returned.  Raises OSError, RuntimeError or ValueError
        if a file cannot be written; no partial file is left behind.
        """
        name = f"{self._steps[0]}-{self._steps[-1]}_rank{rank}"
        trace, memory = folder / f"trace_{name}.json.gz", folder / f"memory_{name}.pickle"
        has_trace = not (self._on_cuda and has_failed)
        try:
            if has_trace:  # stop the profiler first: it would disturb everything that follows
                self._end_range()
                self._profiler.stop()
            folder.mkdir(parents=True, exist_ok=True)
            for partial in folder.glob(f".*_rank{rank}.*"):  # left over from a killed attempt
                partial.unlink(missing_ok=True)
            if self._on_cuda:
                with atomic_replace(memory) as partial:
                    torch.cuda.memory._dump_snapshot(str(partial))
        finally:
            if self._on_cuda:
                torch.cuda.memory._record_memory_history(enabled=None)
        if not has_trace:
            return None
        self._write_trace(trace)
        steps = self._steps[: self._num_ended]
        events = self._profiler.events()
        ranges = ranges_of_steps(events, steps)
        if not ranges:
            return None
        fractions: dict[str, Any] = dict.fromkeys(KINDS)
        if self._on_cuda and not any(map(_is_kernel, events)):
            warn("log.profile_steps: the profiler saw no kernels (CUPTI), so it is unknown where the time went")
        else:
            fractions = fractions_of(events, ranges)
        files = {"trace": trace.name, "memory": memory.name if self._on_cuda else None}
        return Record(
            kind="profile",
            step=steps[-1],
            first_step=steps[0],
            update_s=sum(step.time_range.elapsed_us() for step in ranges) / len(ranges) / 1e6,
            **fractions,
            **files,
        )

    def _write_trace(self, path: Path) -> None:
        with atomic_replace(path) as partial:
            compressed = partial.with_name(f"{partial.name}.gz")  # the profiler compresses if the name ends in .gz
            try:
                self._profiler.export_chrome_trace(str(compressed))
                compressed.replace(partial)
            finally:
                compressed.unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------------------------
# Shares of the steps' time, from the events of torch's profiler


def ranges_of_steps(events: Iterable[FunctionEvent], steps: Sequence[int]) -> list[FunctionEvent]:
    """Return the ranges of these steps on the training thread, in order, as far as the profiler has recorded them."""
    names = [f"{_STEP_PREFIX}{step}" for step in steps]
    ranges = {event.trace_name: event for event in events if event.device_type == DeviceType.CPU}
    return [ranges[name] for name in names if name in ranges]


def fractions_of(events: Sequence[FunctionEvent], steps: Sequence[FunctionEvent]) -> dict[str, float]:
    """Return the fraction of the steps' time spent in each of `KINDS`.  The fractions sum to 1.

    events: all events of a profile.
    steps: the steps' ranges on the training thread, in order.

    If there are kernels, time is attributed to them first, and to data and Gloo while the device is idle.  Otherwise it
    is attributed to operators on the training thread; time outside any operator while Gloo is active counts as waiting
    for communication.
    """
    kernels = [_span(event, classify_kernel(event.name)) for event in events if _is_kernel(event)]
    collectives = [_span(event, COMMUNICATION) for event in events if event.name.startswith("gloo:")]
    if not kernels:
        operators = [span for step in steps for span in _operators_in(step)]
        return compute_fractions([*operators, *collectives], [_span(step, HOST) for step in steps])
    data = [_span(event, DATA) for event in events if event.name == DATA_RANGE]
    return compute_fractions([*kernels, *collectives, *data], _steps_on_device(events, steps))


def _span(event: FunctionEvent, kind: str) -> Span:
    return Span(kind, event.time_range.start, event.time_range.end)


def _is_kernel(event: FunctionEvent) -> bool:
    """Return whether an event is a kernel, a copy or a fill on a GPU."""
    return event.device_type != DeviceType.CPU and not event.is_user_annotation


def _operators_in(event: FunctionEvent) -> Iterator[Span]:
    """Yield the operators that a range or an operator has called, each possibly within another one.

    Only host time and `other_kernels` are divided further: some attention implementations are built from matmuls, and a
    matmul may copy its arguments first.
    """
    for called in event.cpu_children:
        kind = classify_operator(called.name)
        if kind != HOST:
            yield _span(called, kind)
        if kind in (HOST, OTHER):
            yield from _operators_in(called)


def _steps_on_device(events: Sequence[FunctionEvent], steps: Sequence[FunctionEvent]) -> list[Span]:
    """Return the steps with their times on the device, which may lag behind the host.

    A step ends when its last kernel ends: the profiler records its range on the device under the same name.  It starts
    when the host starts it or when the previous step ends, whichever is later.
    """
    names = {step.trace_name for step in steps}
    ends_us: dict[str, float] = {}
    for event in events:
        if event.trace_name in names:
            ends_us[event.trace_name] = max(event.time_range.end, ends_us.get(event.trace_name, 0.0))
    spans: list[Span] = []
    for step in steps:
        start_us = max(step.time_range.start, spans[-1].end_us if spans else 0.0)
        spans.append(Span(HOST, start_us, max(start_us, ends_us[step.trace_name])))
    return spans
