"""Profiles selected steps: writes a trace, a memory snapshot (on CUDA), and a record of where the time went.

Open traces in https://ui.perfetto.dev and memory snapshots in https://pytorch.org/memory_viz.  In addition to what
torch's profiler records, a trace contains a range for each step, and a separate track for the phases of the run: a
phase may start on one thread and end on another, so it does not fit into the track of any one thread.
"""

from __future__ import annotations

import gzip
import json
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainer.config import RunConfig
from trainer.distributed.monitor import Monitor
from trainer.files import atomic_replace
from trainer.hooks import Hook
from trainer.metrics.record import Record
from trainer.metrics.time_breakdown import KINDS, PHASE, STEP_PREFIX, Timeline, find_events
from trainer.metrics.writers import Metrics, warn

if TYPE_CHECKING:
    from trainer.metrics.step_metrics import Update

_MAX_ALLOCATIONS = 100_000
"""Maximum number of allocations and frees in a memory snapshot, the same as in torchtitan."""
_PHASE_THREAD_ID = 2**31 - 1
"""Thread ID under which the trace shows the phases; no such thread exists."""


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
                return
        self._monitor.observers.append(self._recording.enter_phase)

    def _finish(self, has_failed: bool = False) -> None:
        if self._recording is None:
            return
        recording, self._recording = self._recording, None
        self._monitor.observers.remove(recording.enter_phase)
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
        self._device, self._on_cuda = device, device.type == "cuda"
        self._step_starts: dict[int, float] = {}
        """Start time of each step by this process's clock, in microseconds."""
        self._num_ended = 0
        self._range: torch.profiler.record_function | None = None
        self._phases: list[tuple[float, str]] = []
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._on_cuda:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities, record_shapes=True)
        self._profiler.start()  # may fail, so memory recording, which must be turned off again, is started after it
        if self._on_cuda:
            torch.cuda.memory._record_memory_history(stacks="python", max_entries=_MAX_ALLOCATIONS, clear_history=True)

    def enter_phase(self, phase: str) -> None:
        """Record that a phase starts.  May be called from any thread."""
        self._phases.append((_now_us(), phase))

    def begin(self, step: int) -> None:
        self._range = torch.profiler.record_function(f"{STEP_PREFIX}{step}")
        self._range.__enter__()
        self._step_starts[step] = _now_us()

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
        steps = list(self._step_starts)
        name = f"{steps[0]}-{steps[-1]}_rank{rank}"
        trace, memory = folder / f"trace_{name}.json.gz", folder / f"memory_{name}.pickle"
        has_trace = not (self._on_cuda and has_failed)
        try:
            if has_trace:  # stop the profiler first: it would disturb everything that follows
                self._end_range()
                self.enter_phase("end")
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
        timeline = self._write_trace(trace)
        timeline.steps = timeline.steps[: self._num_ended]
        if not timeline.steps:
            return None
        fractions: dict[str, Any] = dict.fromkeys(KINDS)
        if self._on_cuda and not timeline.kernels:
            warn("log.profile_steps: the profiler saw no kernels (CUPTI), so it is unknown where the time went")
        else:
            fractions = timeline.fractions()
        files = {"trace": trace.name, "memory": memory.name if self._on_cuda else None}
        num_steps = len(timeline.steps)
        return Record(
            kind="profile",
            step=steps[num_steps - 1],
            first_step=steps[0],
            update_s=sum(step.duration_us for step in timeline.steps) / num_steps / 1e6,
            **fractions,
            **files,
        )

    def _write_trace(self, path: Path) -> Timeline:
        """Write the compressed trace, including the track of phases, and return its parsed timeline."""
        with atomic_replace(path) as partial:
            raw = partial.with_suffix(".json")
            try:
                self._profiler.export_chrome_trace(str(raw))
                text = raw.read_text()
            finally:
                raw.unlink(missing_ok=True)
            begin, events = find_events(text)
            timeline = Timeline.from_events(events)
            phase_events = self._phase_events(timeline)
            timeline.phases = Timeline.from_events(phase_events).phases
            with gzip.open(partial, "wt", compresslevel=3) as file:
                file.write(text[:begin])
                file.writelines(json.dumps(event) + ",\n" for event in phase_events)
                file.write(text[begin:])
        return timeline

    def _phase_events(self, timeline: Timeline) -> list[dict[str, Any]]:
        """Return the trace events of the phases, with times converted to the trace's clock.

        The offset between the clocks is derived from the step ranges.  This process's clock is read slightly after a
        range starts, and noticeably after the first one starts, so the largest difference is the most accurate.
        """
        steps = timeline.steps
        offsets = [step.start_us - self._step_starts[int(step.name)] for step in steps]
        offset_us = max(offsets, default=0.0)
        lane = {"pid": steps[0].lane[0] if steps else os.getpid(), "tid": _PHASE_THREAD_ID}
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "thread_name", **lane, "args": {"name": "phases"}},
            {"ph": "M", "name": "thread_sort_index", **lane, "args": {"sort_index": -1}},
        ]
        for (start_us, phase), (end_us, _) in zip(self._phases, self._phases[1:], strict=False):
            if phase != "between steps":
                times = {"ts": round(start_us + offset_us, 3), "dur": round(end_us - start_us, 3)}
                events.append({"ph": "X", "cat": PHASE, "name": phase, **lane, **times})
        return events


def _now_us() -> float:
    return time.perf_counter_ns() / 1e3
