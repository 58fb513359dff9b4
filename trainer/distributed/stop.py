"""Requests to stop: a signal, a file `notice` in the run's folder, or the end of the time that the job has.

The handlers set a flag and print a line; the one small message of each step tells all ranks.  Before the first step,
when there is nothing to save, a signal ends the process within seconds instead (`trainer.stopping`).  Imports no torch,
so that the handlers are installed before it is imported.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from trainer.distributed.deaths import is_lost_connection
from trainer.errors import EXIT_FAILED, EXIT_STOPPED, PeerFailed
from trainer.stopping import PromptStop, StopRequested, asked_promptly

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)
"""A launcher, Ctrl-C, Slurm, a terminal that is closed, Ctrl-\\ (which also prints where all threads are)."""

_MAY_BE_IGNORED = (signal.SIGHUP, signal.SIGQUIT)
"""Signals that stay ignored where the parent has had them ignored: `nohup`, a shell's background jobs."""

NOTICE = "notice"
"""Name of the file that asks a run to stop.  Under cgroup tracking a signal to a Slurm step reaches what srun has
started, torchrun's agents say, and never the ranks behind them: a file reaches everybody."""


_STALE = "MESHTRAINER_STALE_NOTICE"


class StopRequest:
    """A request to stop this process: whether there is one, and its reason.

    Signals are caught in the main thread only: under Ray Train they belong to Ray.  A second SIGINT ends the process
    at once.
    """

    POLL_S = 1.0
    """How often the file is looked for; on a network file system that costs a message."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._signal: str | None = None
        self._previous: dict[signal.Signals, Any] = {}
        self._notice: Path | None = None
        self._deadline: float | None = None
        self._found: str | None = None
        self.at_once = False
        """After a failure elsewhere a SIGTERM ends this process: it may be waiting in a collective for ever."""
        self.on_ask: Callable[[], None] | None = None
        """Called once, in the handler of the first signal: the request is answered at once."""
        self.is_answered = False
        self.on_second_interrupt: Callable[[], None] | None = None
        """Called before a second Ctrl-C ends the process."""
        self._polled_at = 0.0
        self.prompt: PromptStop | None = None
        """What ends the process within seconds, as long as there is nothing to save."""

    def install(self) -> None:
        """Catch the signals, unless that is done already."""
        if threading.current_thread() is threading.main_thread() and not self._previous:
            for number in caught_signals():
                self._previous[number] = signal.signal(number, self._on_signal)

    def stop_promptly(self) -> None:
        """Have a signal end the process within seconds, with EXIT_STOPPED, until `stop_in_order`."""
        if self._previous:
            self.prompt = PromptStop(self._previous, lambda name: EXIT_STOPPED)
            self.prompt.start()

    def stop_in_order(self) -> None:
        """Have signals only ask from now on: there are steps to save, or the run is ending already."""
        if self.prompt is not None:
            self.prompt.cancel()

    def uninstall(self) -> None:
        self.stop_in_order()
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def watch(self, notice: Path | None, deadline: float | None) -> None:
        """Look for the file too, and at the clock: `deadline` in seconds since 1970.  One rank does it for all."""
        self._notice, self._deadline, self._found = notice, deadline, None

    def reason(self, needs_s: float = 0.0) -> str | None:
        """Return what asks to stop by now, or None.  `needs_s`: how long stopping takes, so when to begin with it."""
        if self._signal is not None:
            return self._signal
        now = self._clock()
        if self._deadline is not None and now + needs_s >= self._deadline:
            self._found = "deadline"  # for good: later stopping may be thought to take less
        if self._notice is not None and now - self._polled_at >= self.POLL_S:
            self._polled_at = now
            if self._notice.exists():
                self._found = NOTICE
        return self._found

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.prompt is not None and self.prompt.hear(signal.Signals(number).name):
            return
        if number == signal.SIGTERM and self.at_once:
            os._exit(EXIT_FAILED)
        if number == signal.SIGINT and self._signal == "SIGINT":
            if self.on_second_interrupt is not None:
                self.on_second_interrupt()
            os._exit(EXIT_FAILED)
        if number == signal.SIGQUIT:
            with contextlib.suppress(OSError, ValueError):  # stderr may be gone
                faulthandler.dump_traceback(all_threads=True)
        is_first, self._signal = self._signal is None, signal.Signals(number).name
        if is_first and self.on_ask is not None:
            self.is_answered = True
            self.on_ask()


STOPPING = "Stopping: finishing this step and saving. Press Ctrl-C again to quit immediately without saving."


STOPPING_EARLY = "Stopping. Press Ctrl-C again to quit immediately."


GIVING_UP = "Stopping: the evaluation is abandoned. Press Ctrl-C again to quit immediately."


def answer_at_once(text: str = "") -> None:
    """Say that the run is stopping.  In a signal's handler: what it has interrupted may hold any lock."""
    _write(2, f"{text or (STOPPING_EARLY if asked_promptly() else STOPPING)}\n", _CLEAR_LINE)


def show_cursor() -> None:
    """Show the cursor that a status bar has hidden.  In a signal's handler, too."""
    _write(1, "", _SHOW_CURSOR)


_CLEAR_LINE, _SHOW_CURSOR = "\r\x1b[K", "\x1b[?25h"


def _write(descriptor: int, text: str, on_a_terminal: str) -> None:
    with contextlib.suppress(OSError):
        os.write(descriptor, ((on_a_terminal if os.isatty(descriptor) else "") + text).encode())


def caught_signals() -> list[signal.Signals]:
    """Return the signals that ask this process to stop: those of STOP_SIGNALS that its parent has not had ignored."""
    return [
        number
        for number in STOP_SIGNALS
        if number not in _MAY_BE_IGNORED or signal.getsignal(number) is not signal.SIG_IGN
    ]


def note_stale_notice(run_dir: Path) -> None:
    """Note which notice lies there as the command begins: it was for an attempt before.  Inherited by its workers."""
    os.environ[_STALE] = f"{run_dir}\n{identity(run_dir / NOTICE)}"
    _taken.discard(os.environ[_STALE])


def take_stale_notice(run_dir: Path) -> str:
    """Return the identity of the notice that is from before this attempt began, as far back as that is known."""
    text = os.environ.get(_STALE, "")
    noted_dir, _, noted = text.partition("\n")
    is_known = noted_dir == str(run_dir) and text not in _taken
    _taken.add(text)
    return noted if is_known else identity(run_dir / NOTICE)


_taken: set[str] = set()
"""Notices that a Trainer of this process has taken.  They stay in the environment, which other threads read by now."""


def identity(path: Path) -> str:
    """Return what tells a file from another of its name, and from itself touched again; empty if there is none.

    Compared with itself only, so that no two clocks are.
    """
    try:
        found = path.stat()
    except OSError:
        return ""
    return f"{found.st_ino}:{found.st_mtime_ns}"


_installed: list[StopRequest] = []


def catch_signals_early() -> StopRequest:
    """Catch the signals from now on, for the Trainer that is to come; until its first step, they end the process."""
    request = StopRequest()
    request.install()
    request.stop_promptly()
    _installed[:] = [request]
    return request


def announce_early(is_main: bool) -> None:
    """On the first rank, have the handler say that it has heard, also before there is a Trainer."""
    if is_main and _installed:
        _installed[0].on_ask = answer_at_once


def behind(error: BaseException) -> StopRequested | None:
    """Return the stop request that an error is a consequence of: one before the first step, whose exception something
    has replaced by its own, or at which another rank has left before this one.
    """
    name = asked_promptly()
    return StopRequested(name) if name and (isinstance(error, PeerFailed) or is_lost_connection(error)) else None


def was_asked_early() -> bool:
    """Return whether a signal has come to this process that no Trainer has taken up yet."""
    return bool(_installed) and _installed[0].reason() is not None


def find_stop_request() -> StopRequest:
    """Return what catches this process's signals already, for one Trainer to have, or a new one."""
    return _installed.pop() if _installed else StopRequest()


def let_go() -> None:
    """Catch no signal any more: no Trainer is to come."""
    while _installed:
        _installed.pop().uninstall()
