"""Requests to stop: a signal, a file `notice` in the run's folder, or the end of the time that the job has.

Handlers set a flag, and answer; the step's one small message tells all ranks.  Imports no torch, so that the
handlers are there before it is imported: a signal that comes meanwhile is kept, not fatal.
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

from trainer.errors import EXIT_FAILED

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

    def install(self) -> None:
        """Catch the signals, unless that is done already."""
        if threading.current_thread() is threading.main_thread() and not self._previous:
            for number in caught_signals():
                self._previous[number] = signal.signal(number, self._on_signal)

    def uninstall(self) -> None:
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


GIVING_UP = "Stopping: the evaluation is abandoned. Press Ctrl-C again to quit immediately."


def answer_at_once(text: str = STOPPING) -> None:
    """Say that the run is stopping.  In a signal's handler: what it has interrupted may hold any lock."""
    _write(2, f"{text}\n", _CLEAR_LINE)


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
    """Catch the signals from now on, for the Trainer that is to come."""
    request = StopRequest()
    request.install()
    _installed[:] = [request]
    return request


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
