"""Requests to stop this process: a signal, a file named `notice` in the run folder, or the time limit of the job.

One thread hears every signal, whatever the main thread is doing: waiting in a rendezvous or a collective, tokenizing or
compiling.  The interpreter writes the number of a signal to a pipe as soon as it arrives, and the thread reads it
there.  As long as this process has nothing to save, the thread ends it.  Once a step has been trained, a signal only
records the request: the current step is finished, and the state is saved.

This module imports neither torch nor other modules of this package, so that signals are heard before slow imports.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)
"""Sent by a launcher, Ctrl-C, Slurm, a closed terminal and Ctrl-\\ (which also prints all stacks), respectively."""

_KEEP_IGNORED = (signal.SIGHUP, signal.SIGQUIT)
"""Signals that stay ignored if the process starts with them ignored, for example under `nohup` or in the background."""

NOTICE = "notice"
"""Name of the file that asks a run to stop.  With cgroup tracking, a signal to a Slurm step only reaches processes that
srun started, such as torchrun's agents, and not the ranks that those processes started.  A file reaches every rank."""

SECOND_INTERRUPT = "a second Ctrl-C"
"""The reason why a run has failed that was interrupted again while it was stopping."""

_STOPPING = "Stopping: finishing this step and saving."
_QUITTING = "Press Ctrl-C again to quit immediately without saving."

_POLL_S = 1.0
"""Seconds between checks for the notice file.  On a network file system each check is a round trip."""

_CLEANUP_S = 2.0
"""Longest time to delete unfinished files and to call `on_exit`, in seconds: the storage may hang."""


class Stop:
    """Whether this process was asked to stop, and how it leaves.  There is one for each process: `stop`.

    Only the main thread can install signal handlers; under Ray Train, Ray handles signals.
    """

    def __init__(self) -> None:
        self.name = ""
        """Name of the first signal, such as SIGTERM; empty if there was none."""
        self.has_state = False
        """Whether there is something to save.  Until then, a signal ends this process at once."""
        self.is_ending = False
        """Whether this process is about to end by itself.  Then only a second Ctrl-C matters."""
        self.note = ""
        """What to say after the name of the signal that has ended this process, such as what the next start reuses."""
        self.on_exit: list[Callable[[int, str], None]] = []
        """Called with the exit code and the reason by `leave`, in a thread of their own, once `partial` is deleted."""
        self.find_failure: Callable[[], tuple[int, str] | None] = lambda: None
        """Returns the exit code and the reason of a failure of another rank; None if there is none.

        A launcher sends SIGTERM after such a failure, which is no request to stop."""
        self.partial: set[Path] = set()
        """Unfinished files and folders, which `leave` deletes."""
        self._previous: dict[signal.Signals, Any] = {}
        self._exit_code: Callable[[int], int] = lambda number: 128 + number
        self._write_end, self._previous_wakeup_fd = -1, -1
        self._leaving = threading.Lock()
        self._has_answered, self._num_interrupts = False, 0
        self._notice: Path | None = None
        self._deadline, self._polled_at = float("inf"), 0.0
        self._other_reason = ""
        """`deadline` or `notice`, once that has asked this process to stop."""

    # -- hearing signals -----------------------------------------------------------------------------------------

    @property
    def is_installed(self) -> bool:
        return bool(self._previous)

    def install(self, exit_code: Callable[[int], int], has_state: bool = False, note: str = "") -> None:
        """Hear signals from now on, unless they are heard already or this is not the main thread.

        exit_code: returns the code of a process that a signal ends, given the number of the signal.
        """
        if self.is_installed or threading.current_thread() is not threading.main_thread():
            return
        self.name = ""
        self.has_state = has_state
        self.is_ending = False
        self.note = note
        self._exit_code = exit_code
        self._has_answered = False
        self._num_interrupts = 0
        for number in STOP_SIGNALS:
            if number not in _KEEP_IGNORED or signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._record)
        read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        self._previous_wakeup_fd = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, args=[read_end], name="signals", daemon=True).start()

    def uninstall(self) -> None:
        """Hear signals no more; restore the handlers of those whose handlers nobody has replaced since."""
        if not self.is_installed:
            return
        for number, handler in self._previous.items():
            if signal.getsignal(number) == self._record:
                signal.signal(number, handler)
        self._previous.clear()
        self.name = ""
        signal.set_wakeup_fd(self._previous_wakeup_fd)
        os.close(self._write_end)  # ends the thread

    @contextlib.contextmanager
    def hearing_signals(
        self, exit_code: Callable[[int], int], has_state: bool = False, note: str = ""
    ) -> Iterator[None]:
        """Hear signals in the block; see `install`.  If they are heard already, the block changes nothing."""
        was_installed = self.is_installed
        self.install(exit_code, has_state, note)
        try:
            yield
        finally:
            if not was_installed:
                self.uninstall()

    @contextlib.contextmanager
    def noting(self, note: str) -> Iterator[None]:
        """In the block, say `note` after the name of a signal that ends this process."""
        outer_note, self.note = self.note, note
        try:
            yield
        finally:
            self.note = outer_note

    def _record(self, number: int, frame: object) -> None:
        """Record a signal, so that the current step knows of it.  The thread does everything else.

        If the thread is about to end this process, the main thread waits for that: it must begin nothing new.
        """
        self.name = self.name or signal.Signals(number).name
        if signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False) != self._write_end:
            os.write(self._write_end, bytes([number]))  # an event loop has replaced the descriptor meanwhile
        while not self.has_state and not self.is_ending:
            time.sleep(60.0)

    def _listen(self, read_end: int) -> None:
        while number := os.read(read_end, 1):
            if signal.getsignal(number[0]) == self._record:  # nobody has replaced the handler since
                self._answer(signal.Signals(number[0]))
        os.close(read_end)

    def _answer(self, number: signal.Signals) -> None:
        if number == signal.SIGQUIT:
            with contextlib.suppress(OSError, ValueError):  # stderr may be gone
                faulthandler.dump_traceback(all_threads=True)
        self._num_interrupts += number == signal.SIGINT
        if number == signal.SIGINT and self._num_interrupts > 1:
            self.leave(1, SECOND_INTERRUPT)
        if self.is_ending:
            return
        if number == signal.SIGTERM and (failure := self.find_failure()) is not None:
            self.leave(*failure)
        if not self.has_state:
            # `name` may still be empty: the handler runs when the main thread next runs Python code.
            name = number.name
            message = f"stopped ({name})" + (f"; {self.note}" if self.note else "")
            self.leave(self._exit_code(number), name, message if is_first_rank() else "")
        self.name = self.name or number.name
        self.acknowledge()

    def acknowledge(self) -> None:
        """Say, once and on rank 0, that the run is stopping."""
        if not self._has_answered and is_first_rank():
            # torchrun does not pass a second Ctrl-C on to its ranks.
            has_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and "MESHTRAINER_NPROC" not in os.environ
            _write(2, f"{_STOPPING}\n" if has_torchrun else f"{_STOPPING} {_QUITTING}\n", _CLEAR_LINE)
        self._has_answered = True

    # -- leaving -------------------------------------------------------------------------------------------------

    def leave(
        self, exit_code: int, reason: str, message: str = "", before_exit: Callable[[], None] = lambda: None
    ) -> NoReturn:
        """End this process from any thread, whatever the main thread is doing.

        reason: for `on_exit`, such as the name of a signal.
        message: a line to print.
        before_exit: called last; it must return.
        """
        self._leaving.acquire()  # never released: a second thread that leaves waits here for the end
        cleanup = threading.Thread(target=self._clean_up, args=[exit_code, reason], daemon=True)
        cleanup.start()
        cleanup.join(_CLEANUP_S)
        multiprocessing = sys.modules.get("multiprocessing")
        for child in multiprocessing.active_children() if multiprocessing is not None else ():
            child.kill()
        if message:
            _write(2, f"{message}\n", _CLEAR_LINE)
        _write(1, "", _SHOW_CURSOR)
        before_exit()
        os._exit(exit_code)

    def _clean_up(self, exit_code: int, reason: str) -> None:
        for path in list(self.partial):
            with contextlib.suppress(OSError):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        for work in list(self.on_exit):
            try:
                work(exit_code, reason)
            except Exception as error:
                _write(2, f"error: {type(error).__name__}: {error}\n", _CLEAR_LINE)

    # -- other requests ------------------------------------------------------------------------------------------

    def watch(self, notice: Path, deadline: float | None) -> None:
        """Also watch for the notice file and the clock, as one rank does for all.

        deadline: in seconds since the epoch; None for no deadline.
        """
        self._notice = notice
        self._deadline = float("inf") if deadline is None else deadline
        self._other_reason = ""

    def watch_nothing(self) -> None:
        """Watch neither a notice file nor the clock any more, because the run has ended."""
        self._notice = None
        self._deadline = float("inf")
        self._other_reason = ""

    def reason(self, needs_s: float = 0.0) -> str:
        """Return why to stop now: the name of a signal, `deadline` or `notice`; empty if there is no reason.

        needs_s: how many seconds before the deadline to start stopping.
        """
        if time.time() + needs_s >= self._deadline:
            self._other_reason = "deadline"  # final, even if `needs_s` is shorter next time
        if self._notice is not None and time.monotonic() - self._polled_at >= _POLL_S:
            self._polled_at = time.monotonic()
            if self._notice.exists():
                self._other_reason = NOTICE
        return self.name or self._other_reason


stop = Stop()


def is_first_rank() -> bool:
    """Return whether this process is rank 0, as far as the launcher's environment variables say."""
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"


@contextlib.contextmanager
def partial_file(path: Path) -> Iterator[Path]:
    """Delete a file after the block, or if the process leaves during it, unless the block has renamed the file."""
    stop.partial.add(path)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)
        stop.partial.discard(path)


_CLEAR_LINE, _SHOW_CURSOR = "\r\x1b[K", "\x1b[?25h"
"""Terminal sequences: a status bar may fill the line, and hide the cursor."""


def _write(descriptor: int, text: str, terminal_prefix: str) -> None:
    """Write past the interpreter's buffers, whose locks the main thread may hold."""
    with contextlib.suppress(OSError):
        os.write(descriptor, ((terminal_prefix if os.isatty(descriptor) else "") + text).encode())


def _forget_after_fork() -> None:
    """In a forked process, which lacks the thread and shares the pipe with its parent, restore the handlers."""
    if stop.is_installed:
        for number, handler in stop._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(-1)
        os.close(stop._write_end)
        stop._previous.clear()
    stop.partial.clear()
    stop.on_exit.clear()


os.register_at_fork(after_in_child=_forget_after_fork)
