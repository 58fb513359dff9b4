"""The watchdog detects hangs and names the ranks that the others are waiting for.

Every rank tracks its phase, and a thread watches the clock.  If a step, a save or an evaluation makes no progress for
too long, all ranks report their phase and stack through the rendezvous store, not in a collective, since some of them
are blocked in one.  Rank 0 prints one table and names the ranks that the others are waiting for, and the run fails on
all ranks.

Limits: `run.step_timeout_s` covers one step, from the request for its data to its log line; each forward pass restarts
this limit and the next.  `run.first_step_timeout_s` covers the first step (which compiles and allocates), the time
between two forward passes of an evaluation, and starting or writing a profile.  `checkpoint.timeout_s` covers the time
for which training is blocked by a save, and the whole duration of a background save.  A rank that is waiting for
another rank's evaluation, save or profile gets that rank's limit.  There is no limit on a run's start or on a custom
loop's code between steps; but if another rank is already waiting inside a step, that step's limit applies.

Limitations: a process that is suspended or never releases Python's GIL cannot report.  Its rank is still named, because
it does not respond.  If it is rank 0, there is no combined table: every other rank prints its own status, reports that
rank 0 does not answer, and exits.  If the process group was initialized by the caller, there is no store for messages:
each rank reports only on itself and does not exit.

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
from dataclasses import asdict, dataclass, field, replace
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

_CHECK_INTERVAL_S = 0.5
"""Seconds between checks of the limits."""
_CHECKS_PER_POLL = 4
"""One in this many checks of the limits also polls the store to see whether another rank has asked for reports."""
_ANSWER_S, _VERDICT_S = 6.0, 15.0
"""`_ANSWER_S`: seconds that rank 0 waits for the other ranks' reports, and later for them to read its verdict.
`_VERDICT_S`: seconds that the other ranks wait for the verdict."""
_GRACE_S, _SAVE_GRACE_S = 3.0, 60.0
"""How long this process waits before it exits, in seconds: up to `_GRACE_S` for the failure to be recorded, as long for
the flight recorder's dump, and up to `_SAVE_GRACE_S` for a save in flight that is not stuck.  Ranks other than
0 then wait `_GRACE_S` more, for rank 0 to record and print the failure."""
_SUSPENDED_S = 5.0
"""If two consecutive checks are more than this many seconds apart, the process is assumed to have been suspended."""
_MAX_FRAMES = 12
"""Maximum number of stack frames to print."""
_TIMED_OUT = "a collective has timed out"
_IN_BACKGROUND = "a save in the background"


@dataclass(frozen=True)
class _Limit:
    """A time limit: its expiry time (by `time.monotonic`), the setting that defines it, and its length in seconds."""

    expires: float
    key: str
    seconds: float


class Watchdog(Callback):
    """Tracks this rank's phase, at the cost of setting three attributes per phase, and detects hangs.

    After a hang, the watchdog's thread on rank 0 calls the world's failure listeners to record the failure.
    """

    def __init__(self, world: World, config: RunConfig) -> None:
        self._world, self._limits, self._folder = world, config.run, config.run_dir
        self._save_limit_s = config.checkpoint.timeout_s
        self._save_stage: Callable[[], str] = str
        self.phase, self.since, self.num_phases_entered, self.step = "start", time.monotonic(), 0, 0
        self.observers: list[Callable[[str], None]] = []
        """Functions that are called with each phase that this rank enters, by the thread that enters it."""
        self._num_reports = 0
        """Number of completed reports.  Each report uses its own keys in the store."""
        self._limit: _Limit | None = None
        self._num_steps = 0
        self._saving_since: float | None = None
        self._main_thread = 0
        self._stop_event, self._has_reported = threading.Event(), threading.Event()
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
        """Start a step, in the phase `data`."""
        self.step, self.num_phases_entered = step, 0
        self.enter("data")
        is_first = self._num_steps == 0
        limit = self._limits.first_step_limit_s if is_first else self._limits.step_limit_s
        self._set_limit("run.first_step_timeout_s" if is_first else "run.step_timeout_s", limit)

    def end_step(self, step: int) -> None:
        """End a step.  After the first step, collectives get their ordinary timeout."""
        self._limit = None
        self.enter("between steps")
        self._num_steps += 1
        if self._num_steps == 1:
            self._world.set_timeout(self._limits.timeout_s)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """For the duration of the block, enter a phase outside the steps that has its own limit."""
        outer_phase, outer_limit, self._limit = self.phase, self._limit, None
        self.enter(phase)
        if phase == "save":
            self._set_limit("checkpoint.timeout_s", self._save_limit_s)
        else:
            self._set_limit("run.first_step_timeout_s", self._limits.first_step_limit_s)
        try:
            yield
        finally:
            self._limit = outer_limit
            self.enter(outer_phase)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Watch the clock from now until `stop` is called.  After the block, even if it raises, no limit is active."""
        self._main_thread = threading.get_ident()
        if self._thread is None or self._stop_event.is_set():
            self._stop_event = threading.Event()
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        try:
            yield
        finally:
            self._limit = None

    def begin_save(self, stage: Callable[[], str]) -> None:
        """Record that a background save has started.  `stage()` returns what it is doing now."""
        self._saving_since, self._save_stage = time.monotonic(), stage

    def end_save(self) -> None:
        """Record that the background save has ended."""
        self._saving_since = None

    def begin_forward(self) -> None:
        """Record a forward pass, which restarts the current limit: in an evaluation, each pass counts as progress."""
        if self.phase in STEP_PHASES:
            self.enter("forward")
        else:
            self.num_phases_entered += 1
        if self._limit is not None:
            self._set_limit(self._limit.key, self._limit.seconds)

    def _set_limit(self, key: str, seconds: float) -> None:
        self._limit = _Limit(time.monotonic() + seconds, key, seconds)

    # -- the watching thread ---------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop watching."""
        self._stop_event.set()

    def explain(self, error: BaseException) -> None:
        """If `error` is a collective's timeout, make all ranks report and exit, as if a limit had expired."""
        frame, trace = None, error.__traceback__
        while trace is not None:
            frame, trace = trace.tb_frame, trace.tb_next
        text = str(error).lower()
        if self._thread is not None and _is_in_a_collective(frame) and ("timed out" in text or "timeout" in text):
            self._timed_out = f"{_TIMED_OUT} on rank {self._world.rank}: {str(error).splitlines()[0]}"
            self._has_reported.wait(_ANSWER_S + _VERDICT_S)

    def _watch(self) -> None:
        last_check, num_checks, stop_event = time.monotonic(), 0, self._stop_event
        while not stop_event.wait(_CHECK_INTERVAL_S):
            suspended_s = time.monotonic() - last_check
            last_check, num_checks = time.monotonic(), num_checks + 1
            if suspended_s > _SUSPENDED_S:  # the process was suspended, for example by Slurm
                self._extend_limits(suspended_s)
            reason = self._timed_out or self._describe_expired_limit()
            if reason or (num_checks % _CHECKS_PER_POLL == 0 and self._is_report_requested()):
                self._report(reason)
                if self._timed_out or self._world.timed_store is None:
                    self._has_reported.set()
                    return
                last_check = time.monotonic()

    def _extend_limits(self, seconds: float) -> None:
        if self._limit is not None:
            self._limit = replace(self._limit, expires=self._limit.expires + seconds)
        if self._saving_since is not None:
            self._saving_since += seconds

    def _describe_expired_limit(self) -> str:
        """Describe the expired limit; empty if none has expired."""
        limit, saving_since, save_limit_s = self._limit, self._saving_since, self._save_limit_s
        if limit is not None and time.monotonic() > limit.expires:
            return f"no progress within {limit.key}, {limit.seconds:g} s"
        has_expired = saving_since is not None and time.monotonic() > saving_since + save_limit_s
        if has_expired and _saving_frame() is not None:
            return f"{_IN_BACKGROUND} has not ended within checkpoint.timeout_s, {save_limit_s:g} s"
        return ""

    def _is_report_requested(self) -> bool:
        store = self._world.timed_store
        try:
            return store is not None and store.check(self._key("ask"))
        except RuntimeError:  # the store is gone; the failure watch handles that
            return False

    def _key(self, name: str | int) -> str:
        return f"meshtrainer/watchdog/{self._num_reports}/{name}"

    def _report(self, reason: str) -> None:
        """Report this rank's status; on rank 0, print the table of all ranks.  Then exit, as all ranks do.

        If the ranks that the others wait for are in a phase with a longer limit, restarts an expired limit and returns.
        Also returns if the caller initialized the process group.
        """
        store, rank = self._world.timed_store, self._world.rank
        if store is None:
            statuses = [self.status(reason)]
            print_stderr(status_table(reason, statuses))
            if self._world.owns_group:
                self._end(describe_stragglers(reason, statuses), is_stuck=is_stuck(statuses))
            return
        try:
            reason = store.compare_set(self._key("ask"), "", reason)  # the reason of the first rank to report
            store.set(self._key(rank), json.dumps(asdict(self.status(reason))))
            if rank == 0:
                statuses = self._gather(store)
                verdict = "stuck" if is_stuck(statuses) else "end"
                if all(status.is_within_limit for status in find_stragglers(statuses)) and not reason.startswith(
                    _TIMED_OUT
                ):
                    verdict = "continue"
                else:
                    print_stderr(status_table(reason, statuses))
                    self._world.announce_failure(PeerFailed(describe_stragglers(reason, statuses)))
                store.set(self._key("verdict"), verdict)
                if verdict != "continue":
                    # The store dies with this process; ranks that had not read the verdict would report a lost store.
                    other_ranks = [status.rank for status in statuses if status.is_responding and status.rank != rank]
                    pending = [self._key(f"heard/{other}") for other in other_ranks]
                    deadline = time.monotonic() + _ANSWER_S
                    with suppress(RuntimeError):
                        while pending and time.monotonic() < deadline:
                            if pending := [key for key in pending if not store.check(key)]:
                                time.sleep(0.1)
            else:
                store.wait(self._key("verdict"), _VERDICT_S)
                verdict = store.get(self._key("verdict"))
                with suppress(RuntimeError):
                    store.set(self._key(f"heard/{rank}"), "")
        except RuntimeError as error:  # the store is gone, or rank 0 does not answer
            print_stderr(f"{status_table(reason, [self.status(reason)])}\nrank 0 does not answer rank {rank}: {error}")
            self._exit(is_stuck=True)
        if verdict == "continue":
            self._num_reports += 1
            if self._limit is not None and time.monotonic() > self._limit.expires:
                self._set_limit(self._limit.key, self._limit.seconds)
        elif rank == 0:
            self._end(describe_stragglers(reason, statuses), verdict == "stuck")
        else:
            self._world.remember_failure()
            self._exit(verdict == "stuck")

    def _gather(self, store: TimedStore) -> list[RankStatus]:
        ranks = range(self._world.size)
        statuses = {rank: RankStatus(rank, "?", 0.0, 0, 0, False, is_responding=False) for rank in ranks}
        deadline = time.monotonic() + _ANSWER_S
        while time.monotonic() < deadline and (missing := [rank for rank in ranks if not statuses[rank].is_responding]):
            for rank in missing:
                if store.check(self._key(rank)):
                    statuses[rank] = RankStatus(**json.loads(store.get(self._key(rank))))
            time.sleep(0.1)
        return list(statuses.values())

    def _end(self, reason: str, is_stuck: bool) -> NoReturn:
        """Record the failure, within a time limit, and exit."""

        def record() -> None:
            for listener in self._world.failure_listeners:
                listener.main_thread_hung(reason)

        thread = threading.Thread(target=record, daemon=True)
        thread.start()
        thread.join(_GRACE_S)
        self._exit(is_stuck)

    def _exit(self, is_stuck: bool) -> NoReturn:
        """Exit even if the main thread hangs.  First waits for the save in flight, unless it is stuck."""
        thread = threading.Thread(target=dump_flight_record, args=(self._folder, self._world.rank), daemon=True)
        thread.start()
        thread.join(_GRACE_S)
        deadline = time.monotonic() + _SAVE_GRACE_S
        while not is_stuck and _saving_frame() is not None and time.monotonic() < deadline:
            time.sleep(0.1)
        if self._world.rank != 0:
            time.sleep(_GRACE_S)  # leave rank 0 time to record and print
        os._exit(EXIT_FAILED)

    def status(self, reason: str = "") -> RankStatus:
        """Return this rank's status; called from the watchdog's thread.  reason: the reason for the report."""
        phase, since = self.phase, self.since
        main_frame, saving_frame = sys._current_frames().get(self._main_thread), _saving_frame()
        active_limit, save_limit_s = self._limit, self._save_limit_s
        is_within_limit = (
            phase in ("evaluate", "save", "profile")
            and active_limit is not None
            and time.monotonic() < active_limit.expires
        )
        stack, is_waiting = _stack_lines(main_frame), bool(self._timed_out) or _is_in_a_collective(main_frame)
        progress = progress_of(read_flight_record()) if reason else None
        collectives = [] if progress is None else [progress.completed, progress.started, progress.enqueued]
        if main_frame is not None and main_frame.f_code.co_filename.endswith(_DEVICE_WAIT_FILES):
            phase, is_waiting = "device", True  # the host may be in the next step already
        if reason.startswith(_IN_BACKGROUND):
            is_waiting = saving_frame is None or _is_in_a_collective(
                saving_frame
            )  # without a frame, this rank's part of the save is done
            if saving_frame is not None:
                phase, since, stack = (
                    "save",
                    self._saving_since or since,
                    [self._save_stage(), *_stack_lines(saving_frame)],
                )
                is_within_limit = time.monotonic() < since + save_limit_s
        elif (
            saving_frame is not None and main_frame is not None and main_frame.f_code.co_filename == threading.__file__
        ):
            is_waiting = _is_in_a_collective(saving_frame)
            stack = [*stack, f"and the thread that saves, {self._save_stage()}, at", *_stack_lines(saving_frame)]
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
            pending_collective="" if progress is None else progress.waiting_for,
            group=exchange.purpose_of(main_frame),
        )


# ---------------------------------------------------------------------------------------------------------------
# Stacks


def _saving_frame() -> FrameType | None:
    """Return the saving thread's frame; None if there is no such thread or it is idle."""
    frames = sys._current_frames()
    for thread in threading.enumerate():
        if thread.name.startswith("checkpoint"):
            frame = frames.get(thread.ident or 0)
            if frame is not None:
                return frame
    return None


def _is_in_a_collective(frame: FrameType | None) -> bool:
    """Return whether the innermost frame is in torch.distributed, or in torch code that torch.distributed called."""
    while frame is not None and f"{os.sep}torch{os.sep}" in frame.f_code.co_filename:
        if f"{os.sep}torch{os.sep}distributed{os.sep}" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


_DEVICE_WAIT_FILES = tuple(os.sep + os.path.join("torch", "cuda", name) for name in ("streams.py", "__init__.py"))
"""Files whose functions wait for the GPU.  When a collective hangs on the GPU, the host is in one of them."""

_OPERATOR_FILES = ("_ops.py", "_compile.py", "_library/custom_ops.py", "_library/autograd.py", "_dynamo/eval_frame.py")
_WRAPPER_FILES = ("nn/modules/module.py", "autograd/function.py", *_OPERATOR_FILES)
_HIDDEN_FILES = (
    f"{os.sep}contextlib.py",
    *(os.sep + os.path.join("torch", *name.split("/")) for name in _WRAPPER_FILES),
)
"""Files whose frames are uninformative, and so are left out of printed stacks."""


_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"


def _stack_lines(frame: FrameType | None) -> list[str]:
    """Return file, line and function of each informative frame, innermost last.

    Source lines are left out, because reading them blocks if the file system hangs.
    """
    lines: list[str] = []
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if not file.endswith(_HIDDEN_FILES):
            lines.append(f"{file}:{frame.f_lineno} in {name}")
        if name in ("fit", "write_data", "prepare_global_plan") and file.startswith(
            _PACKAGE
        ):  # their callers are always the same
            break
        frame = frame.f_back
    return lines[:_MAX_FRAMES][::-1]


# ---------------------------------------------------------------------------------------------------------------
# Phases of a step, detected by hooks, so that custom train steps work too


STEP_PHASES = ("data", "forward", "backward", "reduce", "optimizer")
"""The phases of a step, in order.  The other phases are start, evaluate, save, profile and between steps."""


def watch_phases(watchdog: Watchdog, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Register hooks on the model and the optimizers that tell the watchdog when a step enters a new phase."""

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
        if watchdog.phase in STEP_PHASES:
            watchdog.enter("optimizer")

    # Before FSDP's hook, which all-gathers and waits.
    model.register_forward_pre_hook(lambda module, inputs: watchdog.begin_forward(), prepend=True)
    model.register_forward_hook(after_forward)
    for optimizer in optimizers:
        optimizer.register_step_pre_hook(before_optimizer)


# ---------------------------------------------------------------------------------------------------------------
# The status of each rank, the ranks that the others wait for, and the table to print


_MAX_ROWS = 32
"""Maximum number of ranks in the table."""


@dataclass(frozen=True)
class RankStatus:
    """The status of one rank."""

    rank: int
    phase: str
    phase_s: float
    """Seconds since the rank entered the phase."""
    step: int
    """The current step, or the last one if the rank is between steps."""
    num_phases_entered: int
    """Number of phases entered since the step started."""
    is_waiting: bool
    """True if the rank is in a collective, and so waiting for other ranks."""
    is_within_limit: bool = False
    """True if the rank is in a save, an evaluation or a profile, and still within that phase's limit."""
    is_responding: bool = True
    stack: list[str] = field(default_factory=list)
    """The main thread's stack, plus the saving thread's if the main thread waits for it."""
    collectives: list[int] = field(default_factory=list)
    """How many collectives the rank's GPU has completed, started and enqueued; empty without a GPU."""
    pending_collective: str = ""
    """The collective that the rank's GPU waits for; empty if it is not known to wait for one."""
    group: str = ""
    """`context` if the rank is in a collective of its context-parallel group; otherwise empty."""


def find_stragglers(statuses: Sequence[RankStatus]) -> list[RankStatus]:
    """Return the ranks that the others wait for.

    These are the ranks that do not respond; if all respond, the ranks furthest behind among those outside collectives.
    If all ranks are in collectives, their collectives do not match.  The ranks returned are then those whose GPU is
    furthest behind; on CPUs, those whose step and phase are.
    """
    unresponsive = [status for status in statuses if not status.is_responding]
    if unresponsive:
        return unresponsive
    candidates = [status for status in statuses if not status.is_waiting]
    if not candidates and all(status.collectives for status in statuses):
        slowest = min(status.collectives for status in statuses)
        return [status for status in statuses if status.collectives == slowest]
    candidates = candidates or [*statuses]
    furthest_behind = min((status.step, status.num_phases_entered) for status in candidates)
    return [status for status in candidates if (status.step, status.num_phases_entered) == furthest_behind]


def is_stuck(statuses: Sequence[RankStatus]) -> bool:
    """Return whether a save in flight cannot finish, so that no rank should wait for it.

    This is the case if the save itself has timed out, or if a rank that the others wait for does not respond.
    """
    stragglers = find_stragglers(statuses)
    return any(
        not status.is_responding or (status.phase == "save" and not status.is_within_limit) for status in stragglers
    )


def describe_stragglers(cause: str, statuses: Sequence[RankStatus]) -> str:
    """Describe in one line the ranks that the others wait for, their phase, and the expired limit."""
    stragglers = find_stragglers(statuses)
    ranks = ", ".join(str(status.rank) for status in stragglers[:8]) + (", ..." if len(stragglers) > 8 else "")
    names = f"rank {ranks}" if len(stragglers) == 1 else f"ranks {ranks}"
    worst = stragglers[0]
    if not worst.is_responding:
        return f"watchdog: {names} did not answer ({cause})"
    device = f", the device in {worst.pending_collective}" if worst.pending_collective else ""
    return (
        f"watchdog: {names} made no progress in {worst.phase} of step {worst.step} for {worst.phase_s:g} s{device} "
        f"({cause})"
    )


def status_table(cause: str, statuses: Sequence[RankStatus]) -> str:
    """Return a table of the ranks that marks those that the others wait for, followed by the stacks of some ranks."""
    stragglers = find_stragglers(statuses)
    rows = [*stragglers, *(status for status in statuses if status not in stragglers)]
    lines = [describe_stragglers(cause, statuses), "     rank    step  phase            for"]
    for row in sorted(rows[:_MAX_ROWS], key=lambda row: row.rank):
        if not row.is_responding:
            lines.append(f"  >> {row.rank:4}  does not answer")
            continue
        waits_for = f"waits for its {row.group} group" if row.group else "waits for others"
        state = "late" if row in stragglers else waits_for if row.is_waiting else ""
        mark = ">>" if row in stragglers else "  "
        lines.append(f"  {mark} {row.rank:4}  {row.step:6}  {row.phase:15}  {row.phase_s:6.1f} s  {state}".rstrip())
    if len(rows) > _MAX_ROWS:
        lines.append(f"     and {len(rows) - _MAX_ROWS} more that are not late")
    responding = [row for row in stragglers[:4] if row.is_responding]
    for row in responding:
        lines += [f"rank {row.rank} is at", *(f"  {line}" for line in row.stack)]
    if not responding:  # show the stack of a waiting rank instead
        for row in sorted((row for row in rows if row.is_waiting), key=lambda row: not row.group)[:1]:
            lines += [f"rank {row.rank} waits at", *(f"  {line}" for line in row.stack)]
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------------
# NCCL's flight recorder, which is in host memory and so can be read while the GPU hangs


@dataclass(frozen=True)
class CollectiveProgress:
    """How many collectives this rank has completed, started and enqueued, over all its process groups.

    All ranks call the same collectives, so the numbers are comparable between ranks.
    """

    completed: int
    started: int
    enqueued: int
    waiting_for: str
    """Description of the oldest unfinished collective; empty if there is none."""


def has_flight_recorder() -> bool:
    """Return whether NCCL, and so its flight recorder, is in use in this process."""
    return dist.is_nccl_available() and torch.cuda.is_initialized()


def read_flight_record() -> bytes:
    """Return the contents of NCCL's flight recorder as JSON; empty if NCCL is not in use."""
    if not has_flight_recorder():
        return b""
    return bytes(_recorder()._dump_nccl_trace_json(includeCollectives=True, onlyActive=False))


def _recorder() -> Any:
    from torch._C import _distributed_c10d

    return _distributed_c10d


def progress_of(record: bytes) -> CollectiveProgress | None:
    """Return the progress of collectives according to a flight record; None if the record does not contain it."""
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
            group, *description = entry["process_group"]
            waiting_for = f"{name} number {entry['collective_seq_id']} of group {group}"
            waiting_for += f" ({description[0]})" if description and description[0] else ""
        return CollectiveProgress(completed, started, enqueued, waiting_for)
    return None


def dump_flight_record(folder: Path, rank: int) -> None:
    """Write the contents of NCCL's flight recorder, if it is in use, to a file in `folder`.

    Call this in a separate thread, because the file system may hang.

    The file's name and format match NCCL's own dumps, so that
    `python -m torch.distributed.flight_recorder.fr_trace` can read it.
    """
    if has_flight_recorder():
        with contextlib.suppress(OSError):
            (folder / f"collectives_rank_{rank}").write_bytes(_recorder()._dump_nccl_trace(includeCollectives=True))
