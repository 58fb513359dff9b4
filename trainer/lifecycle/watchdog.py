"""Watchdog: names the rank that the others wait for.  Every rank notes its phase; a thread watches the clock.

When a step, a save or an evaluation makes no progress for too long, all ranks say through the store (never by a
collective: some are waiting in one) which phase they are in and where in the code.  Rank 0 prints one table, names
those that the others wait for, and the run ends as failed on all ranks.

What the limits cover: `run.step_timeout_s` one step, from asking for its data to its log line; the first one, which
compiles and allocates, has `run.first_step_timeout_s`, and so has in an evaluation the time between two forward passes,
and a profile that is begun or written.
`checkpoint.timeout_s` covers what training waits for in a save, and a save in the background from its beginning; ranks
that wait meanwhile for one of these wait as long.  What a loop of the user's own does between steps has no limit, nor
has the start; but ranks that wait for that in a step of theirs have one.

Out of reach: a process that never lets go of Python's lock, or is stopped.  It is named, because it does not answer; if
it is rank 0, there is no table, and the others end by themselves.  In a process group that was
opened elsewhere there is no store to talk through: each rank reports on itself alone, and ending is left to the opener.

Knows no model by name and calls no collective.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from types import FrameType
from typing import NoReturn

from trainer.config import RunConfig
from trainer.distributed import exchange
from trainer.distributed.channel import Messages
from trainer.distributed.world import CONTEXT, World
from trainer.errors import EXIT_FAILED, PeerFailed, print_stderr
from trainer.lifecycle.phases import IN_STEP
from trainer.lifecycle.recorder import keep_record, progress_of, read_record
from trainer.lifecycle.standing import Standing, find_late, is_stuck, reason_of, table
from trainer.metrics.observer import PhaseObserver

_POLL_S, _ASK_EVERY = 0.5, 4
_ANSWER_S, _VERDICT_S, _GRACE_S, _SAVE_GRACE_S = 6.0, 15.0, 3.0, 60.0
_STOOD_STILL_S = 5.0
_MAX_FRAMES = 12
_TIMED_OUT = "a collective has timed out"
_IN_BACKGROUND = "a save in the background"


class Watchdog:
    """Notes what this rank is doing, which costs two attributes a phase, and watches that it does not do so for ever.

    On rank 0 the world's failure listeners record how the run has failed, called from the watching thread.
    """

    def __init__(self, world: World, config: RunConfig) -> None:
        self._world, self._limits, self._folder = world, config.run, config.run_dir
        self._save_limit_s = config.checkpoint.timeout_s
        self._save_stage: Callable[[], str] = str
        self.phase, self.since, self.marks, self.step = "start", time.monotonic(), 0, 0
        self.observers: list[PhaseObserver] = []
        self._round = 0
        """How often the ranks have said where they are: each time has keys of its own in the store."""
        self._armed: tuple[float, str, float] | None = None
        """When the present limit ends, its key, and what it is."""
        self._num_updates = 0
        self._saving_since: float | None = None
        self._watched = 0
        self._stopped, self._done = threading.Event(), threading.Event()
        self._timed_out = ""
        self._thread: threading.Thread | None = None

    # -- what the training thread notes ----------------------------------------------------------------------------

    def enter(self, phase: str) -> None:
        """Enter a phase."""
        self.phase, self.since = phase, time.monotonic()
        self.marks += 1
        for observer in self.observers:
            observer.enter_phase(phase)

    def begin_step(self, step: int) -> None:
        """Begin a step, with its data."""
        self.step, self.marks = step, 0
        self.enter("data")
        is_first = self._num_updates == 0
        limit = self._limits.first_step_limit_s if is_first else self._limits.step_limit_s
        self._arm("run.first_step_timeout_s" if is_first else "run.step_timeout_s", limit)

    def end_step(self, step: int) -> None:
        """End a step.  After the first all collectives get the ordinary timeout."""
        self._armed = None
        self.enter("between steps")
        self._num_updates += 1
        if self._num_updates == 1:
            self._world.set_timeout(self._limits.timeout_s)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Be in a phase outside the step, with its own limit, inside the block."""
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
        """Watch, and have no limit any more after the block, however it is left."""
        self._start()
        try:
            yield
        finally:
            self._armed = None

    def save_begins(self, stage: Callable[[], str]) -> None:
        """Say that a save in the background has begun; `stage()` says what it is about."""
        self._saving_since, self._save_stage = time.monotonic(), stage

    def save_ends(self) -> None:
        """Say that there is none any more."""
        self._saving_since = None

    def begin_forward(self) -> None:
        """Note a forward pass: of a step, or of an evaluation, which makes progress by it."""
        if self.phase in IN_STEP:
            self.enter("forward")
        else:
            self.marks += 1
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
        """Watch no longer."""
        self._stopped.set()

    def explain(self, error: BaseException) -> None:
        """If a collective has timed out, have all ranks say where they are, as if a limit had passed, and end."""
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
            stood_still_s = time.monotonic() - polled
            polled, num_polls = time.monotonic(), num_polls + 1
            if stood_still_s > _STOOD_STILL_S:  # the whole process did, suspended by Slurm say: that is no fault
                self._forgive(stood_still_s)
            why = self._timed_out or self._overdue()
            if why or (num_polls % _ASK_EVERY == 0 and self._is_asked()):
                self._report(why)
                if self._timed_out or self._world.messages is None:
                    self._done.set()
                    return
                polled = time.monotonic()

    def _forgive(self, seconds: float) -> None:
        if self._armed is not None:
            until, key, limit = self._armed
            self._armed = (until + seconds, key, limit)
        if self._saving_since is not None:
            self._saving_since += seconds

    def _overdue(self) -> str:
        """Return which limit has passed, or an empty text."""
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
        except RuntimeError:  # the store has gone, which the failure watch sees too
            return False

    def _key(self, name: str | int) -> str:
        return f"meshtrainer/watchdog/{self._round}/{name}"

    def _report(self, why: str) -> None:
        """Say where this rank stands; on rank 0, print where all of them do, and end, which the others do then.

        Returns if the late ranks have good reason to be: the limit that has passed begins again.  And in a process
        group that is not ours.
        """
        store, rank = self._world.messages, self._world.rank
        if store is None:
            own = self.standing(why)
            print_stderr(table(why, [own]))
            if self._world.owns_group:
                self._end(reason_of(why, [own]), is_stuck=is_stuck([own]))
            return
        try:
            why = store.compare_set(self._key("ask"), "", why)  # what the first one said, if this is not the first
            store.set(self._key(rank), json.dumps(asdict(self.standing(why))))
            if rank == 0:
                standings = self._gather(store)
                verdict = "stuck" if is_stuck(standings) else "end"
                if all(standing.within for standing in find_late(standings)) and not why.startswith(_TIMED_OUT):
                    verdict = "go on"
                else:
                    print_stderr(table(why, standings))
                    self._world.announce_failure(PeerFailed(reason_of(why, standings)))
                store.set(self._key("verdict"), verdict)
                if verdict != "go on":
                    others = [standing.rank for standing in standings if standing.answers and standing.rank != rank]
                    _wait_until_set(store, [self._key(f"heard/{other}") for other in others])
            else:
                store.wait(self._key("verdict"), _VERDICT_S)
                verdict = store.get(self._key("verdict"))
                with suppress(RuntimeError):
                    store.set(self._key(f"heard/{rank}"), "")
        except RuntimeError as lost:  # the store has gone, or rank 0 does not answer
            print_stderr(f"{table(why, [self.standing(why)])}\nrank 0 does not answer rank {rank}: {lost}")
            self._leave(is_stuck=True)
        if verdict == "go on":
            self._round += 1
            if self._armed is not None and time.monotonic() > self._armed[0]:
                self._arm(*self._armed[1:])
        elif rank == 0:
            self._end(reason_of(why, standings), verdict == "stuck")
        else:
            self._world.remember_failure()
            self._leave(verdict == "stuck")

    def _gather(self, store: Messages) -> list[Standing]:
        found = {rank: Standing(rank, "?", 0.0, 0, 0, False, answers=False) for rank in range(self._world.size)}
        until = time.monotonic() + _ANSWER_S
        while (missing := [rank for rank in found if not found[rank].answers]) and time.monotonic() < until:
            for rank in missing:
                if store.check(self._key(rank)):
                    found[rank] = Standing(**json.loads(store.get(self._key(rank))))
            time.sleep(0.1)
        return list(found.values())

    def _end(self, reason: str, is_stuck: bool) -> NoReturn:
        """Record the failure, as far as that can be done within a moment, and leave."""
        recording = threading.Thread(target=self._record, args=(reason,), daemon=True)
        recording.start()
        recording.join(_GRACE_S)
        self._leave(is_stuck)

    def _record(self, reason: str) -> None:
        for listener in self._world.failures:
            listener.give_up(reason)

    def _leave(self, is_stuck: bool) -> NoReturn:
        """End this process, which may be asleep for ever; a save in flight may end before, unless that is stuck."""
        keeping = threading.Thread(target=keep_record, args=(self._folder, self._world.rank), daemon=True)
        keeping.start()
        keeping.join(_GRACE_S)
        until = time.monotonic() + _SAVE_GRACE_S
        while not is_stuck and _saving_frame() is not None and time.monotonic() < until:
            time.sleep(0.1)
        if self._world.rank != 0:
            time.sleep(_GRACE_S)  # rank 0 has something to write, and to tell
        os._exit(EXIT_FAILED)

    def standing(self, why: str = "") -> Standing:
        """Return where this rank stands, seen from another thread, asked for the reason `why`."""
        phase, since = self.phase, self.since
        main, saving = sys._current_frames().get(self._watched), _saving_frame()
        armed, limit = self._armed, self._save_limit_s
        within = phase in ("evaluate", "save", "profile") and armed is not None and time.monotonic() < armed[0]
        stack, waits = _lines(main), bool(self._timed_out) or _is_in_a_collective(main)
        progress = progress_of(read_record()) if why else None
        collectives = [] if progress is None else [progress.completed, progress.started, progress.enqueued]
        if _is_waiting_for_the_device(main):
            phase, waits = "device", True  # the host is in the next step already
        if why.startswith(_IN_BACKGROUND):
            waits = saving is None or _is_in_a_collective(saving)  # without one, its part of the save is through
            if saving is not None:
                phase, since, stack = "save", self._saving_since or since, [self._save_stage(), *_lines(saving)]
                within = time.monotonic() < since + limit
        elif saving is not None and _is_in_another_thread(main):
            waits = _is_in_a_collective(saving)
            stack = [*stack, f"and the thread that saves, {self._save_stage()}, at", *_lines(saving)]
        seconds = round(time.monotonic() - since, 1)
        device = "" if progress is None else progress.waiting_for
        own = (self._world.rank, phase, seconds, self.step, self.marks, waits, within)
        return Standing(*own, collectives=collectives, device=device, group=_group_of(main), stack=stack)


def _wait_until_set(store: Messages, keys: Sequence[str]) -> None:
    """Let the others read the verdict: the store ends with this process, and without it they would report, too."""
    until = time.monotonic() + _ANSWER_S
    with suppress(RuntimeError):
        while (keys := [key for key in keys if not store.check(key)]) and time.monotonic() < until:
            time.sleep(0.1)


# ---------------------------------------------------------------------------------------------------------------
# Stacks


def _saving_frame() -> FrameType | None:
    """Return where the thread that saves is; None if there is none, or it has nothing to do."""
    frames = sys._current_frames()
    for thread in threading.enumerate():
        if thread.name.startswith("checkpoint"):
            frame = frames.get(thread.ident or 0)
            if frame is not None and frame.f_code.co_name != "_worker":
                return frame
    return None


def _is_in_a_collective(frame: FrameType | None) -> bool:
    """Return whether the innermost code is torch.distributed, or torch called from there."""
    while frame is not None and f"{os.sep}torch{os.sep}" in frame.f_code.co_filename:
        if f"{os.sep}torch{os.sep}distributed{os.sep}" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def _group_of(frame: FrameType | None) -> str:
    """Return `context` inside a collective of the ranks that share sequences, else nothing."""
    while frame is not None and frame.f_code.co_filename != exchange.__file__:
        frame = frame.f_back
    return "" if frame is None else CONTEXT


def _is_waiting_for_the_device(frame: FrameType | None) -> bool:
    """Return whether the innermost code waits for what is queued on a GPU, where a collective may hang."""
    return frame is not None and frame.f_code.co_filename.endswith(_WAITS_FOR_DEVICE)


_WAITS_FOR_DEVICE = tuple(os.sep + os.path.join("torch", "cuda", name) for name in ("streams.py", "__init__.py"))


def _is_in_another_thread(frame: FrameType | None) -> bool:
    return frame is not None and frame.f_code.co_filename == threading.__file__


_OF_OPERATORS = ("_ops.py", "_compile.py", "_library/custom_ops.py", "_library/autograd.py", "_dynamo/eval_frame.py")
_OF_TORCH = ("nn/modules/module.py", "autograd/function.py", *_OF_OPERATORS)
_LEFT_OUT = (f"{os.sep}contextlib.py", *(os.sep + os.path.join("torch", *name.split("/")) for name in _OF_TORCH))
"""Files whose frames only stand between those that tell something."""


def _lines(frame: FrameType | None) -> list[str]:
    """Return file, line and function of each useful frame, the innermost last, from the Trainer on.

    Not the source's text: reading it may block for ever, where that is what the others do.
    """
    lines: list[str] = []
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if not file.endswith(_LEFT_OUT):
            lines.append(f"{file}:{frame.f_lineno} in {name}")
        if name in ("fit", "_save") and file.startswith(os.path.dirname(__file__)):
            break
        frame = frame.f_back
    return lines[:_MAX_FRAMES][::-1]
