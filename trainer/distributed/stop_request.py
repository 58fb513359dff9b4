"""Requests to stop: a signal, a file named `notice` in the run folder, or the time limit of the job.

The signal handlers set a flag and print a line; the next step's all-reduce then passes the request to all ranks.
Until the first step has ended, there is nothing to save, so a signal ends the process within seconds
(`trainer.stopping`).  This module does not import torch, so the handlers can be installed before torch is imported.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from trainer.distributed.dead_ranks import is_lost_connection
from trainer.errors import EXIT_FAILED, EXIT_STOPPED, PeerFailed
from trainer.stopping import ImmediateStop, StopRequested, immediate_stop_signal, underlying_request

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)
"""Sent by a launcher, Ctrl-C, Slurm, a closed terminal and Ctrl-\\ (which also prints all stacks), respectively."""

_KEEP_IGNORED = (signal.SIGHUP, signal.SIGQUIT)
"""Signals that stay ignored if the process starts with them ignored, for example under `nohup` or in the background."""

NOTICE = "notice"
"""Name of the file that asks a run to stop.  With cgroup tracking, a signal to a Slurm step only reaches processes that
srun started, such as torchrun's agents, and not the ranks that those processes started.  A file reaches every rank."""

_STALE_NOTICE, _STALE_JOB_NOTICE = "MESHTRAINER_STALE_NOTICE", "MESHTRAINER_JOB_STALE_NOTICE"
"""Environment variables that each hold a run folder and the identity of a notice meant for an earlier attempt; the
identity is "" if there was none."""


class StopRequest:
    """Detects requests to stop this process, and their reasons.

    Only the main thread can catch signals; under Ray Train, Ray handles them.  A second SIGINT ends the process
    immediately.
    """

    POLL_S = 1.0
    """Seconds between checks for the notice file.  On a network file system each check is a round trip."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._signal: str | None = None
        self._previous: dict[signal.Signals, Any] = {}
        self._notice: Path | None = None
        self._deadline: float | None = None
        self._reason: str | None = None
        self.exits_on_sigterm = False
        """True after another rank has failed: SIGTERM then ends the process at once, as it may hang in a collective.
        Has no effect after `ignore_requests`."""
        self._ignores_requests = False
        self.on_first_signal: Callable[[], None] | None = None
        """Called once, in the handler of the first signal, to acknowledge the request."""
        self.is_acknowledged = False
        """True once the user has been told that the run is stopping."""
        self.on_second_interrupt: Callable[[], None] | None = None
        """Called before a second Ctrl-C (SIGINT) ends the process."""
        self._polled_at = 0.0
        self.immediate_stop: ImmediateStop | None = None
        """Ends the process within seconds of a signal while nothing needs saving; None if never enabled."""

    def install(self) -> None:
        """Install the signal handlers, unless they are installed already, and heed requests again."""
        self._ignores_requests = False
        if threading.current_thread() is threading.main_thread() and not self._previous:
            for number in caught_signals():
                self._previous[number] = signal.signal(number, self._on_signal)

    def enable_immediate_stop(self) -> None:
        """Let a signal end the process within seconds, with EXIT_STOPPED, until `disable_immediate_stop` is called."""
        if self._previous:
            self.immediate_stop = ImmediateStop(self._previous, lambda name: EXIT_STOPPED)
            self.immediate_stop.start()

    def disable_immediate_stop(self) -> None:
        """From now on, let signals only set the request, because there are steps to save or the run is ending."""
        if self.immediate_stop is not None:
            self.immediate_stop.cancel()

    def ignore_requests(self) -> None:
        """Until the next `install`, let only a second Ctrl-C end this process, because it is about to end by itself."""
        self.disable_immediate_stop()
        self._ignores_requests = True

    def uninstall(self) -> None:
        self.disable_immediate_stop()
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def watch(self, notice: Path | None, deadline: float | None) -> None:
        """Also watch the notice file and the clock, as one rank does for all.  deadline: in seconds since the epoch."""
        self._notice, self._deadline, self._reason = notice, deadline, None

    def reason(self, needs_s: float = 0.0) -> str | None:
        """Return the reason to stop now, or None.  needs_s: how many seconds before the deadline to start stopping."""
        if self._signal is not None:
            return self._signal
        now = self._clock()
        if self._deadline is not None and now + needs_s >= self._deadline:
            self._reason = "deadline"  # final, even if `needs_s` is shorter next time
        if self._notice is not None and now - self._polled_at >= self.POLL_S:
            self._polled_at = now
            if self._notice.exists():
                self._reason = NOTICE
        return self._reason

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.immediate_stop is not None and self.immediate_stop.on_signal(signal.Signals(number).name):
            return
        if number == signal.SIGTERM and self.exits_on_sigterm and not self._ignores_requests:
            os._exit(EXIT_FAILED)
        if number == signal.SIGINT and self._signal == "SIGINT":
            _write(1, "", _SHOW_CURSOR)  # a status bar has hidden it
            if self.on_second_interrupt is not None:
                self.on_second_interrupt()
            os._exit(EXIT_FAILED)
        if number == signal.SIGQUIT:
            with contextlib.suppress(OSError, ValueError):  # stderr may be gone
                faulthandler.dump_traceback(all_threads=True)
        is_first, self._signal = self._signal is None, signal.Signals(number).name
        if is_first and self.on_first_signal is not None and not self._ignores_requests:
            self.is_acknowledged = True
            self.on_first_signal()


STOPPING = "Stopping: finishing this step and saving. Press Ctrl-C again to quit immediately without saving."
STOPPING_EARLY = "Stopping. Press Ctrl-C again to quit immediately."
STOPPING_EVALUATION = "Stopping: the evaluation is abandoned. Press Ctrl-C again to quit immediately."


def acknowledge_stop(text: str = "") -> None:
    """Print that the run is stopping.  Safe in a signal handler: takes no lock that the interrupted code may hold.

    text: the message, by default the one that fits what the run is doing.
    """
    _write(2, f"{text or (STOPPING_EARLY if immediate_stop_signal() else STOPPING)}\n", _CLEAR_LINE)


_CLEAR_LINE, _SHOW_CURSOR = "\r\x1b[K", "\x1b[?25h"


def _write(descriptor: int, text: str, terminal_prefix: str) -> None:
    with contextlib.suppress(OSError):
        os.write(descriptor, ((terminal_prefix if os.isatty(descriptor) else "") + text).encode())


def caught_signals() -> list[signal.Signals]:
    """Return the signals that ask this process to stop: STOP_SIGNALS without those that its parent ignored."""
    return [
        number
        for number in STOP_SIGNALS
        if number not in _KEEP_IGNORED or signal.getsignal(number) is not signal.SIG_IGN
    ]


def note_stale_notice(run_dir: Path) -> None:
    """Record the notice that exists when the command starts, which is for an earlier attempt.  Workers inherit it.

    In a batch job, a notice for this attempt may arrive before this command starts, so the stale notice is the one
    that `with_stale_notice` recorded.
    """
    job_record = os.environ.get(_STALE_JOB_NOTICE, "")
    is_this_run = job_record.partition("\n")[0] == os.path.abspath(run_dir)
    notice_id = job_record.partition("\n")[2] if is_this_run else file_identity(run_dir / NOTICE)
    os.environ[_STALE_NOTICE] = f"{run_dir}\n{notice_id}"
    _taken_notices.discard(os.environ[_STALE_NOTICE])


def with_stale_notice(env: Mapping[str, str], run_dir: Path) -> dict[str, str]:
    """Return the environment for the ranks that a batch job starts next: any notice that appears later is for them."""
    return {**env, _STALE_JOB_NOTICE: f"{os.path.abspath(run_dir)}\n{file_identity(run_dir / NOTICE)}"}


def take_stale_notice(run_dir: Path) -> str:
    """Return the identity of the notice that existed at the start of the command or, if unknown, of the current one."""
    record = os.environ.get(_STALE_NOTICE, "")
    recorded_dir, _, notice_id = record.partition("\n")
    is_known = recorded_dir == str(run_dir) and record not in _taken_notices
    _taken_notices.add(record)
    return notice_id if is_known else file_identity(run_dir / NOTICE)


_taken_notices: set[str] = set()
"""Records already taken by a Trainer of this process.  Removing the variable could crash threads that read it."""


def file_identity(path: Path) -> str:
    """Return a string that changes if a file is replaced or touched; empty if there is no file.

    Compare it only with earlier values for the same file.
    """
    try:
        stats = path.stat()
    except OSError:
        return ""
    return f"{stats.st_ino}:{stats.st_mtime_ns}"


_installed: list[StopRequest] = []


def catch_signals_early() -> StopRequest:
    """Catch signals for a Trainer that is created later.  Until its first step ends, a signal ends the process."""
    request = StopRequest()
    request.install()
    request.enable_immediate_stop()
    _installed[:] = [request]
    return request


def announce_early(is_main: bool) -> None:
    """On rank 0, let the signal handler print an acknowledgement before there is a Trainer."""
    if is_main and _installed:
        _installed[0].on_first_signal = acknowledge_stop


def causing_stop_request(error: BaseException) -> StopRequested | None:
    """Return the stop request that caused an error, or None.

    Before the first step, another exception may hide the request, or another rank may have exited first.
    """
    request = underlying_request(error)
    if isinstance(request, StopRequested):
        return request
    name = immediate_stop_signal()
    return StopRequested(name) if name and (isinstance(error, PeerFailed) or is_lost_connection(error)) else None


def stop_is_requested_early() -> bool:
    """Return whether a stop was requested before any Trainer took over the signals."""
    return bool(_installed) and _installed[0].reason() is not None


def take_stop_request() -> StopRequest:
    """Return the StopRequest that already catches this process's signals, for a Trainer to take over, or a new one."""
    return _installed.pop() if _installed else StopRequest()


def stop_catching_signals() -> None:
    """Stop catching signals, because no Trainer will be created."""
    while _installed:
        _installed.pop().uninstall()
