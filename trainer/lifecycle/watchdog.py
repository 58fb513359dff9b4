"""Watchdog: detects hangs and names the ranks that the others wait for.

Every rank tracks its phase, and a thread watches the clock.  When a step, a save or an evaluation makes no progress for
too long, all ranks report their phase and stack through the store, not by a collective, since some ranks are blocked in
one.  Rank 0 prints one table, names the ranks that the others wait for, and the run ends as failed on all ranks.

Limits: `run.step_timeout_s` covers one step, from requesting its data to its log line.  `run.first_step_timeout_s`
covers the first step, which compiles and allocates, the time between two forward passes of an evaluation, and starting
or writing a profile.  `checkpoint.timeout_s` covers the time that training waits for a save, and a background save from
its start.  A rank that waits for another rank's evaluation, save or profile is allowed the same time.  Code of a custom
loop between steps and the start of a run have no limit, but a rank that waits for them inside a step does.

Not covered: a process that holds Python's GIL forever or is suspended.  It is named because it does not answer; if it
is rank 0, there is no table, and the others exit by themselves.  In a process group that was opened elsewhere there is
no store to communicate through: each rank reports only on itself and does not end the process.

The watchdog uses no collectives and works for any model.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from trainer.config import RunConfig
from trainer.distributed import exchange
from trainer.distributed.channel import TimedStore
from trainer.distributed.world import World
from trainer.errors import EXIT_FAILED, PeerFailed, print_stderr
from trainer.metrics.callbacks import Callback

_POLL_S, _ASK_EVERY = 0.5, 4
_ANSWER_S, _VERDICT_S, _GRACE_S, _SAVE_GRACE_S = 6.0, 15.0, 3.0, 60.0
_SUSPENDED_S = 5.0
_MAX_FRAMES = 12
_TIMED_OUT = "a collective has timed out"
_IN_BACKGROUND = "a save in the background"


class Watchdog(Callback):
    """Tracks what this rank is doing, at the cost of setting two attributes per phase, and detects hangs.

    On rank 0 it calls the world's failure listeners, from the watching thread, to record the failure.
    """

    def __init__(self, world: World, config: RunConfig) -> None:
        self._world, self._limits, self._folder = world, config.run, config.run_dir
        self._save_limit_s = config.checkpoint.timeout_s
        self._save_stage: Callable[[], str] = str
        self.phase, self.since, self.num_phases_entered, self.step = "start", time.monotonic(), 0, 0
        self.observers: list[Callable[[str], None]] = []
        """Functions that are called with each phase that this rank enters, possibly from any thread."""
        self._round = 0
        """Number of completed reports; each report uses separate keys in the store."""
        self._armed: tuple[float, str, float] | None = None
        """Current limit: when it expires, its setting and its value."""
        self._num_steps = 0
        self._saving_since: float | None = None
        self._watched = 0
        self._stopped, self._done = threading.Event(), threading.Event()
        self._timed_out = ""
        self._thread: threading.Thread | None = None

    # -- called by the training thread -----------------------------------------------------------------------------

    def enter(self, phase: str) -> None:
        """Enter a phase."""
        self.phase, self.since = phase, time.monotonic()
        self.num_phases_entered += 1
        for observe in self.observers:
            observe(phase)

    def begin_step(self, step: int) -> None:
        """Begin a step, in the phase `data`."""
        self.step, self.num_phases_entered = step, 0
        self.enter("data")
        is_first = self._num_steps == 0
        limit = self._limits.first_step_limit_s if is_first else self._limits.step_limit_s
        self._arm("run.first_step_timeout_s" if is_first else "run.step_timeout_s", limit)

    def end_step(self, step: int) -> None:
        """End a step.  After the first step, collectives get the ordinary timeout."""
        self._armed = None
        self.enter("between steps")
        self._num_steps += 1
        if self._num_steps == 1:
            self._world.set_timeout(self._limits.timeout_s)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Enter a phase outside the step, with its own limit, for the block."""
        before, self._armed = (self.phase, self._armed), None
        self.enter(phase)
        if phase == "save":
            self._arm("checkpoint.timeout_s", self._save_limit_s)
        else:
            self._arm("run.first_step_timeout_s", self._limits.first_step_limit_s)
        try:
            yield
        finally:
            phase, self._armed = before
            self.enter(phase)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Start watching; after the block no limit is active, even if it raised."""
        self._start()
        try:
            yield
        finally:
            self._armed = None

    def save_begins(self, stage: Callable[[], str]) -> None:
        """Note that a background save has started.  `stage()` describes what it is doing."""
        self._saving_since, self._save_stage = time.monotonic(), stage

    def save_ends(self) -> None:
        """Note that the background save has ended."""
        self._saving_since = None

    def begin_forward(self) -> None:
        """Note a forward pass, which in an evaluation counts as progress."""
        if self.phase in IN_STEP:
            self.enter("forward")
        else:
            self.num_phases_entered += 1
        if self._armed is not None:
            _, key, limit = self._armed
            self._arm(key, limit)

    def _arm(self, key: str, limit_s: float) -> None:
        self._armed = (time.monotonic() + limit_s, key, limit_s)

    # -- the watching thread ---------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._watched = threading.get_ident()
        if self._thread is None or self._stopped.is_set():
            self._stopped = threading.Event()
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop watching."""
        self._stopped.set()

    def explain(self, error: BaseException) -> None:
        """If `error` is a collective's timeout, make all ranks report and exit, as if a limit had passed."""
        frame, trace = None, error.__traceback__
        while trace is not None:
            frame, trace = trace.tb_frame, trace.tb_next
        text = str(error).lower()
        if self._thread is not None and _is_in_a_collective(frame) and ("timed out" in text or "timeout" in text):
            self._timed_out = f"{_TIMED_OUT} on rank {self._world.rank}: {str(error).splitlines()[0]}"
            self._done.wait(_ANSWER_S + _VERDICT_S)

    def _watch(self) -> None:
        polled, num_polls, stopped = time.monotonic(), 0, self._stopped
        while not stopped.wait(_POLL_S):
            suspended_s = time.monotonic() - polled
            polled, num_polls = time.monotonic(), num_polls + 1
            if suspended_s > _SUSPENDED_S:  # the process was suspended, for example by Slurm
                self._extend_limits(suspended_s)
            why = self._timed_out or self._overdue()
            if why or (num_polls % _ASK_EVERY == 0 and self._is_asked()):
                self._report(why)
                if self._timed_out or self._world.messages is None:
                    self._done.set()
                    return
                polled = time.monotonic()

    def _extend_limits(self, seconds: float) -> None:
        if self._armed is not None:
            until, key, limit = self._armed
            self._armed = (until + seconds, key, limit)
        if self._saving_since is not None:
            self._saving_since += seconds

    def _overdue(self) -> str:
        """Describe the limit that has passed; empty if none has."""
        armed, saving = self._armed, self._saving_since
        if armed is not None and time.monotonic() > armed[0]:
            return f"no progress within {armed[1]}, {armed[2]:g} s"
        limit = self._save_limit_s
        if saving is not None and time.monotonic() > saving + limit and _saving_frame() is not None:
            return f"{_IN_BACKGROUND} has not ended within checkpoint.timeout_s, {limit:g} s"
        return ""

    def _is_asked(self) -> bool:
        store = self._world.messages
        try:
            return store is not None and store.check(self._key("ask"))
        except RuntimeError:  # the store is gone; the failure watch handles that
            return False

    def _key(self, name: str | int) -> str:
        return f"meshtrainer/watchdog/{self._round}/{name}"

    def _report(self, why: str) -> None:
        """Report this rank's status; on rank 0, print the table of all ranks.  Then all ranks exit.

        Returns, and restarts the limit, if the late ranks are in a phase with a longer limit.  Also returns if the
        process group was opened elsewhere.
        """
        store, rank = self._world.messages, self._world.rank
        if store is None:
            own = self.status(why)
            print_stderr(table(why, [own]))
            if self._world.owns_group:
                self._end(reason_of(why, [own]), is_stuck=is_stuck([own]))
            return
        try:
            why = store.compare_set(self._key("ask"), "", why)  # the reason of the first rank to report
            store.set(self._key(rank), json.dumps(asdict(self.status(why))))
            if rank == 0:
                statuses = self._gather(store)
                verdict = "stuck" if is_stuck(statuses) else "end"
                if all(status.is_within_limit for status in find_stragglers(statuses)) and not why.startswith(
                    _TIMED_OUT
                ):
                    verdict = "go on"
                else:
                    print_stderr(table(why, statuses))
                    self._world.announce_failure(PeerFailed(reason_of(why, statuses)))
                store.set(self._key("verdict"), verdict)
                if verdict != "go on":
                    # The store ends with this process: the others would report its loss if they had not read it yet.
                    others = [status.rank for status in statuses if status.is_responding and status.rank != rank]
                    unheard, until = [self._key(f"heard/{other}") for other in others], time.monotonic() + _ANSWER_S
                    with suppress(RuntimeError):
                        while unheard and time.monotonic() < until:
                            if unheard := [key for key in unheard if not store.check(key)]:
                                time.sleep(0.1)
            else:
                store.wait(self._key("verdict"), _VERDICT_S)
                verdict = store.get(self._key("verdict"))
                with suppress(RuntimeError):
                    store.set(self._key(f"heard/{rank}"), "")
        except RuntimeError as lost:  # the store is gone, or rank 0 does not answer
            print_stderr(f"{table(why, [self.status(why)])}\nrank 0 does not answer rank {rank}: {lost}")
            self._leave(is_stuck=True)
        if verdict == "go on":
            self._round += 1
            if self._armed is not None and time.monotonic() > self._armed[0]:
                self._arm(*self._armed[1:])
        elif rank == 0:
            self._end(reason_of(why, statuses), verdict == "stuck")
        else:
            self._world.remember_failure()
            self._leave(verdict == "stuck")

    def _gather(self, store: TimedStore) -> list[RankStatus]:
        found = {rank: RankStatus(rank, "?", 0.0, 0, 0, False, is_responding=False) for rank in range(self._world.size)}
        until = time.monotonic() + _ANSWER_S
        while (missing := [rank for rank in found if not found[rank].is_responding]) and time.monotonic() < until:
            for rank in missing:
                if store.check(self._key(rank)):
                    found[rank] = RankStatus(**json.loads(store.get(self._key(rank))))
            time.sleep(0.1)
        return list(found.values())

    def _end(self, reason: str, is_stuck: bool) -> NoReturn:
        """Record the failure, within a time limit, and exit."""

        def record() -> None:
            for listener in self._world.failure_listeners:
                listener.give_up(reason)

        recording = threading.Thread(target=record, daemon=True)
        recording.start()
        recording.join(_GRACE_S)
        self._leave(is_stuck)

    def _leave(self, is_stuck: bool) -> NoReturn:
        """Exit this process, whose main thread may hang.  A save in flight may finish first, unless it is stuck."""
        keeping = threading.Thread(target=dump_record, args=(self._folder, self._world.rank), daemon=True)
        keeping.start()
        keeping.join(_GRACE_S)
        until = time.monotonic() + _SAVE_GRACE_S
        while not is_stuck and _saving_frame() is not None and time.monotonic() < until:
            time.sleep(0.1)
        if self._world.rank != 0:
            time.sleep(_GRACE_S)  # leave rank 0 time to record and print
        os._exit(EXIT_FAILED)

    def status(self, why: str = "") -> RankStatus:
        """Return this rank's status, as seen from another thread.  `why`: the reason for the report."""
        phase, since = self.phase, self.since
        main, saving = sys._current_frames().get(self._watched), _saving_frame()
        armed, limit = self._armed, self._save_limit_s
        is_within_limit = phase in ("evaluate", "save", "profile") and armed is not None and time.monotonic() < armed[0]
        stack, is_waiting = _lines(main), bool(self._timed_out) or _is_in_a_collective(main)
        progress = progress_of(read_record()) if why else None
        collectives = [] if progress is None else [progress.completed, progress.started, progress.enqueued]
        if main is not None and main.f_code.co_filename.endswith(_WAITS_FOR_DEVICE):
            phase, is_waiting = "device", True  # the host may already be in the next step
        if why.startswith(_IN_BACKGROUND):
            is_waiting = saving is None or _is_in_a_collective(saving)  # no saving frame: its part is done
            if saving is not None:
                phase, since, stack = "save", self._saving_since or since, [self._save_stage(), *_lines(saving)]
                is_within_limit = time.monotonic() < since + limit
        elif saving is not None and main is not None and main.f_code.co_filename == threading.__file__:
            is_waiting = _is_in_a_collective(saving)
            stack = [*stack, f"and the thread that saves, {self._save_stage()}, at", *_lines(saving)]
        return RankStatus(
            rank=self._world.rank,
            phase=phase,
            phase_s=round(time.monotonic() - since, 1),
            step=self.step,
            num_phases_entered=self.num_phases_entered,
            is_waiting=is_waiting,
            is_within_limit=is_within_limit,
            stack=stack,
            collectives=collectives,
            device="" if progress is None else progress.waiting_for,
            group=exchange.purpose_of(main),
        )


# ---------------------------------------------------------------------------------------------------------------
# Stacks


def _saving_frame() -> FrameType | None:
    """Return the frame of the saving thread; None if there is no such thread or it is idle."""
    frames = sys._current_frames()
    for thread in threading.enumerate():
        if thread.name.startswith("checkpoint"):
            frame = frames.get(thread.ident or 0)
            if frame is not None and frame.f_code.co_name != "_worker":
                return frame
    return None


def _is_in_a_collective(frame: FrameType | None) -> bool:
    """Return whether the innermost frames are in torch.distributed, or in torch called from there."""
    while frame is not None and f"{os.sep}torch{os.sep}" in frame.f_code.co_filename:
        if f"{os.sep}torch{os.sep}distributed{os.sep}" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


_WAITS_FOR_DEVICE = tuple(os.sep + os.path.join("torch", "cuda", name) for name in ("streams.py", "__init__.py"))
"""Files whose functions wait for work queued on a GPU, where a collective may hang."""

_OF_OPERATORS = ("_ops.py", "_compile.py", "_library/custom_ops.py", "_library/autograd.py", "_dynamo/eval_frame.py")
_OF_TORCH = ("nn/modules/module.py", "autograd/function.py", *_OF_OPERATORS)
_LEFT_OUT = (f"{os.sep}contextlib.py", *(os.sep + os.path.join("torch", *name.split("/")) for name in _OF_TORCH))
"""Files whose frames are left out of printed stacks as uninformative."""


_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"


def _lines(frame: FrameType | None) -> list[str]:
    """Return file, line and function of each informative frame, innermost last.

    Source lines are not included, because reading them may block forever if the file system hangs.
    """
    lines: list[str] = []
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if not file.endswith(_LEFT_OUT):
            lines.append(f"{file}:{frame.f_lineno} in {name}")
        if name in ("fit", "_save") and file.startswith(_PACKAGE):  # what called these is always the same
            break
        frame = frame.f_back
    return lines[:_MAX_FRAMES][::-1]


# ---------------------------------------------------------------------------------------------------------------
# Phases of a step, found by hooks so that custom train steps work too


IN_STEP = ("data", "forward", "backward", "reduce", "optimizer")
"""Phases of a step, in order.  Other phases: start, evaluate, save, profile and between steps."""


def watch_phases(watchdog: Watchdog, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Register hooks on the model and the optimizers that report the phases of a step to the watchdog."""

    def after_forward(module: nn.Module, inputs: Any, output: Any) -> None:
        if watchdog.phase == "forward" and torch.is_grad_enabled():
            for tensor in tree_leaves(output):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(in_backward)

    def in_backward(gradient: torch.Tensor) -> None:
        if watchdog.phase == "forward":
            watchdog.enter("backward")
            torch.autograd.Variable._execution_engine.queue_callback(after_backward)

    def after_backward() -> None:
        if watchdog.phase == "backward":
            watchdog.enter("reduce")

    def before_optimizer(*_: Any) -> None:
        if watchdog.phase in IN_STEP:
            watchdog.enter("optimizer")

    # Before FSDP's hook, which all-gathers and waits.
    model.register_forward_pre_hook(lambda module, inputs: watchdog.begin_forward(), prepend=True)
    model.register_forward_hook(after_forward)
    for optimizer in optimizers:
        optimizer.register_step_pre_hook(before_optimizer)


# ---------------------------------------------------------------------------------------------------------------
# What each rank is doing, which ranks the others wait for, and the table that shows it


_MAX_ROWS = 32


@dataclass(frozen=True)
class RankStatus:
    """The status of one rank."""

    rank: int
    phase: str
    phase_s: float
    """Time since the rank entered the phase."""
    step: int
    """The current step, or the last one."""
    num_phases_entered: int
    """Number of phases entered since the step began."""
    is_waiting: bool
    """True if the rank is in a collective, so that it waits for another rank."""
    is_within_limit: bool = False
    """True during a save, an evaluation or the writing of a profile that is still within its own time limit."""
    is_responding: bool = True
    stack: list[str] = field(default_factory=list)
    """Stack of the main thread, and of the saving thread if the main thread waits for it."""
    collectives: list[int] = field(default_factory=list)
    """Numbers of collectives completed, started and enqueued on its GPU; empty without a GPU."""
    device: str = ""
    """Description of the collective that its GPU waits for."""
    group: str = ""
    """`context` if the rank is in a collective of its context-parallel group, otherwise empty."""


def find_stragglers(statuses: Sequence[RankStatus]) -> list[RankStatus]:
    """Return the ranks that the others wait for.

    These are the ranks that do not answer; otherwise the ranks furthest behind among those outside collectives.  If all
    ranks are in collectives, which then do not match, these are the ranks whose GPUs (on a CPU: whose step and phase)
    are furthest behind.
    """
    silent = [status for status in statuses if not status.is_responding]
    if silent:
        return silent
    busy = [status for status in statuses if not status.is_waiting]
    if not busy and all(status.collectives for status in statuses):
        slowest = min(status.collectives for status in statuses)
        return [status for status in statuses if status.collectives == slowest]
    busy = busy or [*statuses]
    least = min((status.step, status.num_phases_entered) for status in busy)
    return [status for status in busy if (status.step, status.num_phases_entered) == least]


def is_stuck(statuses: Sequence[RankStatus]) -> bool:
    """Return whether a save in flight cannot finish, so that no rank needs to wait for it.

    Either the save itself has timed out, or a rank that others wait for does not answer.
    """
    late = find_stragglers(statuses)
    return any(not status.is_responding or (status.phase == "save" and not status.is_within_limit) for status in late)


def reason_of(why: str, statuses: Sequence[RankStatus]) -> str:
    """Describe in one line which ranks are late, in which phase, and which limit has passed."""
    late = find_stragglers(statuses)
    ranks = ", ".join(str(status.rank) for status in late[:8]) + (", ..." if len(late) > 8 else "")
    who = f"rank {ranks}" if len(late) == 1 else f"ranks {ranks}"
    first = late[0]
    if not first.is_responding:
        return f"watchdog: {who} did not answer ({why})"
    device = f", the device in {first.device}" if first.device else ""
    return (
        f"watchdog: {who} made no progress in {first.phase} of step {first.step} for {first.phase_s:g} s{device} "
        f"({why})"
    )


def table(why: str, statuses: Sequence[RankStatus]) -> str:
    """Return the table to print: one row per rank, with the late ranks marked, and the stacks of late ranks."""
    late = find_stragglers(statuses)
    rows = [*late, *(status for status in statuses if status not in late)]
    lines = [reason_of(why, statuses), "     rank    step  phase            for"]
    for row in sorted(rows[:_MAX_ROWS], key=lambda row: row.rank):
        if not row.is_responding:
            lines.append(f"  >> {row.rank:4}  does not answer")
            continue
        waits_for = f"waits for its {row.group} group" if row.group else "waits for others"
        state = "late" if row in late else waits_for if row.is_waiting else ""
        mark = ">>" if row in late else "  "
        lines.append(f"  {mark} {row.rank:4}  {row.step:6}  {row.phase:15}  {row.phase_s:6.1f} s  {state}".rstrip())
    if len(rows) > _MAX_ROWS:
        lines.append(f"     and {len(rows) - _MAX_ROWS} more that are not late")
    answering = [row for row in late[:4] if row.is_responding]
    for row in answering:
        lines += [f"rank {row.rank} is at", *(f"  {line}" for line in row.stack)]
    if not answering:  # no stack of a late rank is known: show one of a waiting rank
        for row in sorted((row for row in rows if row.is_waiting), key=lambda row: not row.group)[:1]:
            lines += [f"rank {row.rank} waits at", *(f"  {line}" for line in row.stack)]
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------------
# NCCL's flight recorder: in host memory, so that it can be read while the GPU hangs


@dataclass(frozen=True)
class CollectiveProgress:
    """Numbers of collectives completed, started and enqueued by this rank, over all its process groups.

    All ranks call the same collectives, so the numbers of different ranks can be compared.  `waiting_for` describes the
    oldest unfinished collective.
    """

    completed: int
    started: int
    enqueued: int
    waiting_for: str


def has_record() -> bool:
    """Return whether NCCL is in use in this process."""
    return dist.is_nccl_available() and torch.cuda.is_initialized()


def read_record() -> bytes:
    """Return NCCL's record as JSON; empty if NCCL is not in use."""
    if not has_record():
        return b""
    return bytes(_recorder()._dump_nccl_trace_json(includeCollectives=True, onlyActive=False))


def _recorder() -> Any:
    from torch._C import _distributed_c10d

    return _distributed_c10d


def progress_of(record: bytes) -> CollectiveProgress | None:
    """Return the progress of the collectives in a record; None if the record does not contain it."""
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        content = json.loads(record)
        groups: Mapping[str, Mapping[str, Any]] = content["pg_status"]
        completed, started, enqueued = (
            sum(max(0, int(group[key])) for group in groups.values())
            for key in ("last_completed_collective", "last_started_collective", "last_enqueued_collective")
        )
        unfinished = [entry for entry in content.get("entries", ()) if entry["state"] != "completed"]
        waiting_for = ""
        if unfinished:  # such as `all_gather number 12 of group 0 (default_pg)`
            entry = unfinished[0]
            name = str(entry["profiling_name"]).removeprefix("nccl:").lstrip("_")
            group, *of = entry["process_group"]
            waiting_for = f"{name} number {entry['collective_seq_id']} of group {group}"
            waiting_for += f" ({of[0]})" if of and of[0] else ""
        return CollectiveProgress(completed, started, enqueued, waiting_for)
    return None


def dump_record(folder: Path, rank: int) -> None:
    """Dump the record, if there is one, into `folder`.  On a thread of its own, since the file system may hang.

    Name and format are those of NCCL's own dumps, for `python -m torch.distributed.flight_recorder.fr_trace`.
    """
    if has_record():
        with contextlib.suppress(OSError):
            (folder / f"collectives_rank_{rank}").write_bytes(_recorder()._dump_nccl_trace(includeCollectives=True))
