"""Ends every rank within seconds once any rank has failed, hangs or is gone, and names the rank that is to blame.

Each rank has a `Monitor` with two threads.  `clock` watches this rank's time limits and ends the process; it touches
neither the store nor the disk, so nothing can block it.  `poll` exchanges short messages with the other ranks through
the rendezvous store, not in collectives, since some ranks are blocked in one.

All faults have one answer: the rank that notices first asks every rank where it is.  Each `poll` thread replies with
its rank's phase, step and stack.  The rank that asked prints one table, names the ranks that the others wait for, and
records the failure, on which all ranks end.  A rank that does not reply was killed, is suspended, or never releases
Python's GIL.  An exception that is not about other ranks needs no question: it is the failure.

Limits: `run.step_timeout_s` covers one step, from the request for its data to its log line; each forward pass restarts
this limit and the next.  `run.first_step_timeout_s` covers the first step (which compiles and allocates), profiled
steps, and the time between two forward passes of an evaluation.  `checkpoint.timeout_s` covers the time for which
training is blocked by a save, and the whole duration of a background save.  The step after an evaluation has its limit,
because this rank may have to wait for one that is still evaluating.  There is no limit on a run's start or on a custom
loop's code between steps; but if another rank is already waiting inside a step, that step's limit applies.

If the process group was initialized by the caller, there is no store: each rank reports only on itself, and goes on.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.distributed import HashStore, Store
from torch.utils._pytree import tree_leaves

from trainer.config.schema import RunConfig
from trainer.distributed import exchange
from trainer.distributed.environment import ENDS_SILENT_RANK
from trainer.distributed.rank_status import (
    RankStatus,
    describe_late,
    dump_flight_record,
    find_late,
    is_in_a_collective,
    progress_of,
    read_flight_record,
    stack_lines,
    status_table,
    waits_for_device,
)
from trainer.errors import EXIT_FAILED, EXIT_STOPPED, PeerFailed, print_stderr
from trainer.stopping import stop

_TICK_S = 0.5
"""Seconds between two rounds of each thread."""
_ANSWER_S = 5.0
"""Longest time that a rank that asks waits for the answers of the others, in seconds."""
_SILENCE_S = 10.0
"""Seconds without an answer of the store after which its host counts as gone, if this rank has a question."""
_GRACE_S, _SAVE_S = 3.0, 60.0
"""How long this rank waits once it knows of a failure, in seconds: for its main thread to end by itself, later for
ranks that did not answer, and at the end for a save in flight.  Ranks other than 0 wait `_GRACE_S` more if rank 0 is
alive, because their exit makes a launcher end rank 0, which records and prints."""
_SUSPENDED_S = 5.0
"""If two rounds are more than this many seconds apart, the process is assumed to have been suspended."""

_NEWS = "monitor/news"
_QUESTION = "monitor/question"
_FAILURE = "monitor/failure"
"""Keys in the store.  `_NEWS` is set with each of the others, so that a round needs one request."""

_CONNECTION_LOST = re.compile(r"(closed|reset) by peer|broken pipe|remote process exit|ncclRemoteError", re.IGNORECASE)
_TIMED_OUT = re.compile(r"timed out|timeout", re.IGNORECASE)


@dataclass(frozen=True)
class Failure:
    """Why all ranks end: the first failure of any of them, or a request to stop before the first step."""

    reason: str
    exit_code: int = EXIT_FAILED
    can_save: bool = True
    """Whether a save in flight may still be completed; not if a rank is gone or if the save itself hangs."""
    silent_ranks: Sequence[int] = ()
    """Ranks that are gone or did not answer.  They may only be suspended, so the others on their machine end them."""


@dataclass(frozen=True)
class Process:
    """The process of a rank."""

    pid: int
    host: str
    namespace: str
    """The namespace of the PID, which is the container's; empty if the system has none."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    def is_near(self, other: Process) -> bool:
        """Return whether `other` is on the same machine, in the same container."""
        return (self.host, self.namespace) == (other.host, other.namespace)

    def has_ended(self) -> bool:
        """Return whether the process is gone; False if it is on another machine."""
        if not self.is_near(this_process()):
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            pass
        return False


def this_process() -> Process:
    """Return the process that calls this."""
    namespace = ""
    with suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return Process(os.getpid(), socket.gethostname(), namespace)


@dataclass(frozen=True)
class _Limit:
    """A time limit: its expiry time (by `time.monotonic`), the setting that defines it, and its length in seconds."""

    expires: float
    key: str
    seconds: float


class Monitor:
    """Watches this rank and its peers.  See the description of this module.

    The training thread says what it does, at the cost of setting three attributes for each phase.
    """

    def __init__(self, store: Store | None, rank: int, size: int, config: RunConfig, parent: int | None = None) -> None:
        """Start both threads.

        store: the store that the ranks share; None if the process group was opened elsewhere.
        parent: the launcher's PID; None if there is no launcher that outlives this process.
        """
        self.rank = rank
        self._ranks = [rank] if store is None else list(range(size))
        # A connection of its own: another request on the same one may wait for minutes.
        self._store: Store = HashStore() if store is None else store.clone()  # type: ignore[attr-defined]
        self._can_leave = store is not None
        self._limits = config.run
        self._save_limit_s = config.checkpoint.timeout_s
        self._folder = config.run_dir
        self._profiles, self._parent = config.log.profiles, parent
        self.observers: list[Callable[[str], None]] = []
        """Functions that are called with each phase that this rank enters, by the thread that enters it."""
        self.failure: Failure | None = None
        """The first failure of any rank, once this rank knows of it."""
        self.processes: Sequence[Process] = ()
        """The process of each rank, once they are known."""

        self.phase = "start"
        self.since = time.monotonic()
        self._step = 0
        self.num_phases_entered = 0
        self._limit: _Limit | None = None
        self._longer_limit_s = 0.0
        """The limit of an evaluation since the last step; 0 if there was none."""
        self._num_steps = 0
        self._saving_since: float | None = None
        self._save_stage: Callable[[], str] = str
        self._main_thread = threading.main_thread().ident or 0

        self._own_failure: Failure | None = None
        """A failure that `poll` is to announce."""
        self._question = ""
        """Why the ranks are asked, once this rank wants to ask or was asked."""
        self._has_asked = self._has_replied = False
        self._cut_off_by = ""
        self._cut_off_at: FrameType | None = None
        """The error of a collective of this rank, and its innermost frame; empty and None if none has failed."""
        self._asked_at = self._failed_at = 0.0
        self._heard_at, self._num_rounds = time.monotonic(), 0
        self._wake = threading.Event()
        self._learned = threading.Event()
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=self._poll, name="poll", daemon=True),
            threading.Thread(target=self._watch_clock, name="clock", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        if self._can_leave:
            stop.find_failure = self._find_failure
            stop.on_exit.append(self._on_leaving)

    # -- called by the training thread ---------------------------------------------------------------------------

    def enter(self, phase: str) -> None:
        """Enter a phase."""
        self.phase, self.since = phase, time.monotonic()
        self.num_phases_entered += 1
        for observe in self.observers:
            observe(phase)

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """For the duration of the block, be in a step, which starts in the phase `data`.

        Afterwards, even if the block raises, no limit is active: the code of a custom loop between steps has none.
        """
        self._main_thread = threading.get_ident()
        self._step, self.num_phases_entered = step, 0
        self.enter("data")
        key, seconds = "run.step_timeout_s", self._limits.step_limit_s
        if self._num_steps == 0 or self._profiles(step) or self._profiles(step - 1):
            key, seconds = "run.first_step_timeout_s", self._limits.first_step_limit_s
        self._set_limit(key, max(seconds, self._longer_limit_s))
        self._longer_limit_s = 0.0
        try:
            yield
            self.enter("between steps")
            self._num_steps += 1
        finally:
            self._limit = None

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """For the duration of the block, enter a phase outside the steps, such as `evaluate` or `save`."""
        outer_phase, outer_limit = self.phase, self._limit
        self.enter(phase)
        if phase == "save":
            self._set_limit("checkpoint.timeout_s", self._save_limit_s)
        else:
            self._set_limit("run.first_step_timeout_s", self._limits.first_step_limit_s)
            self._longer_limit_s = self._limits.first_step_limit_s
        try:
            yield
        finally:
            self._limit = outer_limit
            self.enter(outer_phase)

    def begin_save(self, stage: Callable[[], str]) -> None:
        """Record that a background save has started.  `stage()` returns what it is doing now."""
        self._saving_since, self._save_stage = time.monotonic(), stage

    def end_save(self) -> None:
        """Record that the background save has ended."""
        self._saving_since, self._save_stage = None, str

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

    def fail(self, error: BaseException) -> Failure:
        """Announce the failure of this rank, stop watching, and return the first failure of any rank.  Not collective.

        An error that only says that another rank is gone or late makes this rank ask all ranks first.
        """
        own = Failure(self._describe(error))
        if self.failure is None:
            is_lost = _is_lost_connection(error)
            if is_lost or _is_timeout(error):
                self._cut_off_by, self._cut_off_at = str(error).partition("\n")[0], _innermost_frame(error)
                self._ask(f"rank {self.rank} {_LOST_CONNECTION if is_lost else 'has waited too long in a collective'}")
            else:
                self._own_failure = own
            self._wake.set()
            self._learned.wait(_ANSWER_S + 2 * _TICK_S + _GRACE_S)
        self._cut_off_at = None
        self.close()  # the caller ends this rank
        return self.failure or own

    def is_own(self, failure: Failure, error: BaseException) -> bool:
        """Return whether `failure` is what `fail` announced for this rank's `error`."""
        return failure.reason == self._describe(error)

    def _describe(self, error: BaseException) -> str:
        if isinstance(error, PeerFailed):
            return str(error)
        subject = f"rank {self.rank}: " if len(self._ranks) > 1 else ""
        return f"{subject}{type(error).__name__}: {error}"

    def close(self) -> None:
        """Stop watching, because this rank is about to leave the others in an orderly way."""
        self._stopped.set()
        self._wake.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=_GRACE_S)
        if stop.find_failure == self._find_failure:
            stop.find_failure = lambda: None
        if self._on_leaving in stop.on_exit:
            stop.on_exit.remove(self._on_leaving)

    # -- when a signal arrives -----------------------------------------------------------------------------------

    def _find_failure(self) -> tuple[int, str] | None:
        """Return the exit code and the reason of a failure, as a launcher sends SIGTERM after one; None for none.

        Called by the thread `signals`.  Looks for news, and waits for the answer to a question.
        """
        if any(process.has_ended() for process in self.processes):
            self._ask("a rank has ended without a word")
        next_round = self._num_rounds + 2  # the round that is under way may have missed it
        deadline = time.monotonic() + _ANSWER_S + 1.0
        while self.failure is None and time.monotonic() < deadline:
            is_silent = time.monotonic() - self._heard_at > 1.0
            if not self._question and (self._num_rounds >= next_round or is_silent):
                return None
            self._wake.set()
            time.sleep(0.02)
        return None if self.failure is None else (self.failure.exit_code, self.failure.reason)

    def _on_leaving(self, exit_code: int, reason: str) -> None:
        """One of `stop.on_exit`: if this rank leaves because of a signal, let the others leave as well."""
        if self.failure is not None:
            dump_flight_record(self._folder, self.rank)
            return
        self._own_failure = Failure(reason, exit_code)
        self._wake.set()
        self._learned.wait(1.0)

    # -- the thread `clock` --------------------------------------------------------------------------------------

    def _watch_clock(self) -> None:
        last_round = time.monotonic()
        while not self._stopped.wait(_TICK_S):
            now = time.monotonic()
            if now - last_round > _SUSPENDED_S:  # the process was suspended, for example by Slurm
                self._extend_limits(now - last_round)
            last_round = now
            if not self._question and (reason := self._describe_expired_limit()):
                self._ask(reason)
            if self.failure is None:
                self._find_silence(now)
            if self.failure is not None and now - self._failed_at > self._grace_s(self.failure):
                self._leave(self.failure)
                return

    def _grace_s(self, failure: Failure) -> float:
        """Return how long the main thread has to end by itself, in seconds."""
        if failure.exit_code == EXIT_STOPPED:
            return 0.0  # there is nothing to record
        return _GRACE_S if self.rank == 0 or 0 in failure.silent_ranks else 2 * _GRACE_S

    def _extend_limits(self, seconds: float) -> None:
        self._heard_at += seconds
        self._asked_at += seconds
        if self._limit is not None:
            self._limit = _Limit(self._limit.expires + seconds, self._limit.key, self._limit.seconds)
        if self._saving_since is not None:
            self._saving_since += seconds

    def _describe_expired_limit(self) -> str:
        """Describe the expired limit; empty if none has expired."""
        limit = self._limit  # the training thread may replace it at any time
        if limit is not None and time.monotonic() > limit.expires:
            return f"no progress within {limit.key}, {limit.seconds:g} s"
        saving_since = self._saving_since
        has_expired = saving_since is not None and time.monotonic() > saving_since + self._save_limit_s
        if has_expired and _saving_frame() is not None:
            return f"{_IN_BACKGROUND} has not ended within checkpoint.timeout_s, {self._save_limit_s:g} s"
        return ""

    def _ask(self, reason: str) -> None:
        """Have `poll` ask all ranks where they are, unless they have been asked."""
        if not self._question:
            self._question, self._asked_at = reason, time.monotonic()
            self._wake.set()

    def _find_silence(self, now: float) -> None:
        """Record a failure if the store, or the rank that asks, has not answered for too long."""
        silent_s = now - self._heard_at
        if silent_s > (_SILENCE_S if self._question else max(_SILENCE_S, self._limits.timeout_s)):
            reason = f"rank 0 ({self._describe_process(0)}): no answer, its store is silent for {silent_s:.0f} s"
            print_stderr(f"error: {reason}\n{status_table(self._question, [self.status()])}")
            self._learn(Failure(reason, can_save=False, silent_ranks=[0]))
        elif self._question and now - self._asked_at > _ANSWER_S + _SILENCE_S:
            self._learn(Failure(self._question, can_save=False))

    def _leave(self, failure: Failure) -> None:
        """Record the failure, wait for a save in flight, and end this process."""
        if not self._can_leave:
            return
        self._end_silent_ranks(failure.silent_ranks)  # before another rank records the failure in the place of rank 0

        def wait_for_save() -> None:
            deadline = time.monotonic() + _SAVE_S
            while failure.can_save and _saving_frame() is not None and time.monotonic() < deadline:
                time.sleep(0.1)

        stop.leave(failure.exit_code, failure.reason, before_exit=wait_for_save)

    def _end_silent_ranks(self, silent_ranks: Sequence[int]) -> None:
        """End those of the ranks that run on this machine, unless they end by themselves within a few seconds."""
        here = this_process()
        processes = [self.processes[rank] for rank in silent_ranks if self.processes]
        near = [process for process in processes if process.is_near(here) and process != here]
        deadline = time.monotonic() + _GRACE_S
        while near and time.monotonic() < deadline:
            time.sleep(0.1)
            near = [process for process in near if not process.has_ended()]
        for process in near:
            with suppress(OSError):  # it has just ended
                os.kill(process.pid, ENDS_SILENT_RANK)
                os.kill(process.pid, signal.SIGCONT)  # a suspended process gets the first signal only now
        if near:
            time.sleep(0.5)  # until the kernel has released its lock on the run folder

    # -- the thread `poll` ---------------------------------------------------------------------------------------

    def _poll(self) -> None:
        while not self._stopped.is_set():
            try:
                self._exchange_news()
            except RuntimeError:
                time.sleep(0.1)  # until the kernel has told this process that its parent is gone
                if self._has_lost_launcher():
                    self._learn(Failure(f"rank {self.rank}: its launcher has died"))
                else:
                    self._learn(Failure("lost rank 0, which hosted the store", can_save=False, silent_ranks=[0]))
                return
            self._heard_at = time.monotonic()
            self._num_rounds += 1
            self._wake.wait(_TICK_S)
            self._wake.clear()

    def _exchange_news(self) -> None:
        """Tell the other ranks what is new here, and learn what is new elsewhere.

        Raises RuntimeError if the process that hosts the store has ended.
        """
        store = self._store
        if self._has_lost_launcher() and self.failure is None:
            print_stderr(f"error: rank {self.rank}: its launcher has died; this rank exits")
            self._own_failure = Failure(f"rank {self.rank}: its launcher has died")
            self._learn(self._own_failure)
            if len({process.host for process in self.processes}) == 1:
                return  # the others know, and the store is gone if the launcher hosted it
            self._publish(self._own_failure)
        if self._own_failure is not None and self.failure is None:
            self._publish(self._own_failure)
        if self._question and not self._has_asked:
            self._has_asked = True
            store.compare_set(_QUESTION, "", json.dumps([self.rank, self._question]))
            store.set(_NEWS, "yes")
        if self.failure is not None or not store.check([_NEWS]):
            return
        if not self._has_replied and store.check([_QUESTION]):
            asker, question = json.loads(store.get(_QUESTION))
            self._has_asked = self._has_replied = True
            self._question, self._asked_at = question, self._asked_at or time.monotonic()
            store.set(f"monitor/status/{self.rank}", json.dumps(asdict(self.status())))
            if asker == self.rank:
                self._conclude(question)
        if store.check([_FAILURE]):
            self._learn(Failure(**json.loads(store.get(_FAILURE))))

    def _has_lost_launcher(self) -> bool:
        return self._parent is not None and os.getppid() != self._parent

    def _publish(self, failure: Failure) -> None:
        """Make `failure` the failure of all ranks, unless there is an earlier one."""
        first = self._store.compare_set(_FAILURE, "", json.dumps(asdict(failure)))
        self._store.set(_NEWS, "yes")
        self._learn(Failure(**json.loads(first)))

    def _learn(self, failure: Failure) -> None:
        if self.failure is None:
            self.failure, self._failed_at = failure, time.monotonic()
            self._learned.set()

    def _conclude(self, question: str) -> None:
        """Gather the answers of all ranks, print the table, and publish the failure."""
        statuses: dict[int, RankStatus] = {}
        deadline = time.monotonic() + _ANSWER_S
        missing = self._ranks
        while missing and time.monotonic() < deadline:
            time.sleep(0.1)
            for rank in missing:
                if self._store.check([key := f"monitor/status/{rank}"]):
                    statuses[rank] = RankStatus(**json.loads(self._store.get(key)))
            missing = [rank for rank in missing if rank not in statuses and not self._has_ended(rank)]
            if self._store.check([_FAILURE]):
                return  # an exception is the cause
        for rank in self._ranks:
            if rank not in statuses:
                statuses[rank] = RankStatus(rank, is_responding=False, process=self._describe_process(rank))
        rows = [statuses[rank] for rank in self._ranks]
        if question.endswith(_LOST_CONNECTION) and all(row.is_responding for row in rows):
            self._publish(Failure(f"{question}, but all ranks answer: {self._cut_off_by}"))
            return
        print_stderr(status_table(question, rows))
        late = find_late(rows)
        silent_ranks = [row.rank for row in late if not row.is_responding]
        can_save = not silent_ranks and not any(row.phase == "save" for row in late)
        self._publish(Failure(describe_late(question, rows), can_save=can_save, silent_ranks=silent_ranks))

    def _has_ended(self, rank: int) -> bool:
        return bool(self.processes) and self.processes[rank].has_ended()

    def _describe_process(self, rank: int) -> str:
        return str(self.processes[rank]) if self.processes else "still starting"

    def status(self) -> RankStatus:
        """Return this rank's status; called by `poll`."""
        phase, since = self.phase, self.since
        main_frame = self._cut_off_at or sys._current_frames().get(self._main_thread)
        saving_frame = _saving_frame()
        stack, is_waiting = stack_lines(main_frame), is_in_a_collective(main_frame)
        progress = progress_of(read_flight_record())
        if waits_for_device(main_frame):
            phase, is_waiting = "device", True  # the host may be in the next step already
        if self._question.startswith(_IN_BACKGROUND):
            # Without a frame, this rank's part of the save is done.
            is_waiting = saving_frame is None or is_in_a_collective(saving_frame)
            if saving_frame is not None:
                phase, since = "save", self._saving_since or since
                stack = [self._save_stage(), *stack_lines(saving_frame)]
        elif saving_frame is not None and _waits_for_a_thread(main_frame):
            is_waiting = is_in_a_collective(saving_frame)
            stack = [*stack, f"and the thread that saves, {self._save_stage()}, at", *stack_lines(saving_frame)]
        return RankStatus(
            rank=self.rank,
            phase=phase,
            phase_s=round(time.monotonic() - since, 1),
            step=self._step,
            num_phases_entered=self.num_phases_entered,
            is_waiting=is_waiting,
            stack=stack,
            collectives=[] if progress is None else [progress.completed, progress.started, progress.enqueued],
            pending_collective="" if progress is None else progress.waiting_for,
            group=exchange.purpose_of(main_frame),
        )


_IN_BACKGROUND, _LOST_CONNECTION = "a save in the background", "has lost the connection to another rank"
"""Parts of questions."""


def _saving_frame() -> FrameType | None:
    """Return the saving thread's frame; None if there is no such thread or it is idle."""
    frames = sys._current_frames()
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("checkpoint")]
    return next((frames[thread.ident] for thread in threads if thread.ident in frames), None)


def _waits_for_a_thread(frame: FrameType | None) -> bool:
    return frame is not None and frame.f_code.co_filename == threading.__file__


def _is_lost_connection(error: BaseException) -> bool:
    """Return whether an error only reports that the connection to another rank was lost."""
    return isinstance(error, (RuntimeError, OSError)) and _CONNECTION_LOST.search(str(error)) is not None


def _is_timeout(error: BaseException) -> bool:
    """Return whether an error reports that a collective has timed out."""
    return is_in_a_collective(_innermost_frame(error)) and _TIMED_OUT.search(str(error)) is not None


def _innermost_frame(error: BaseException) -> FrameType | None:
    frame, trace = None, error.__traceback__
    while trace is not None:
        frame, trace = trace.tb_frame, trace.tb_next
    return frame


# ---------------------------------------------------------------------------------------------------------------
# Phases of a step, detected by hooks, so that custom train steps work too


STEP_PHASES = ("data", "forward", "backward", "reduce", "optimizer")
"""The phases of a step, in order.  The other phases are start, evaluate, save, profile and between steps."""


def watch_phases(monitor: Monitor, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Register hooks on the model and the optimizers that tell the Monitor when a step enters a new phase."""

    def after_forward(module: nn.Module, inputs: Any, output: Any) -> None:
        if monitor.phase == "forward" and torch.is_grad_enabled():
            for tensor in tree_leaves(output):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(in_backward)

    def in_backward(gradient: torch.Tensor) -> None:
        if monitor.phase == "forward":
            monitor.enter("backward")
            torch.autograd.Variable._execution_engine.queue_callback(after_backward)

    def after_backward() -> None:
        if monitor.phase == "backward":
            monitor.enter("reduce")

    def before_optimizer(*_: Any) -> None:
        if monitor.phase in STEP_PHASES:
            monitor.enter("optimizer")

    # Before FSDP's hook, which all-gathers and waits.
    model.register_forward_pre_hook(lambda module, inputs: monitor.begin_forward(), prepend=True)
    model.register_forward_hook(after_forward)
    for optimizer in optimizers:
        optimizer.register_step_pre_hook(before_optimizer)
