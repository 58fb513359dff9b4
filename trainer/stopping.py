"""Ends a process within seconds of a signal, whatever it is doing, if it has nothing to save.

This applies to a training run until its first step has ended, and to most other commands until they exit.  A signal
takes effect in three stages:

1. Immediately, the handler records the signal.  Inside `run_command` it also raises StopRequested, or KeyboardInterrupt
   for Ctrl-C.  In a training run it raises StopRequested only inside an `interruptible` block, which may be interrupted
   anywhere.  At safe points, long loops call `raise_if_stop_requested`, which raises StopRequested after a signal.
2. RAISE_AFTER_S seconds after the signal, StopRequested (or KeyboardInterrupt) is raised in the main thread, even if
   that thread is blocked or in library code.
3. EXIT_AFTER_S seconds after the signal, the process calls `ImmediateStop.before_exit` if it is set, deletes partially
   written files, and exits.  By then, the main thread is usually in a long call that runs no Python code: it is
   tokenizing a huge text, compiling, or waiting for a collective.

This module imports neither torch nor other modules of this package, so that the handlers are installed before slow
imports.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

RAISE_AFTER_S, EXIT_AFTER_S = 1.5, 3.0
"""Delays of stages 2 and 3 after the signal, in seconds."""

_RERAISE_S = 0.05
"""Seconds after which StopRequested is raised again if the interpreter has swallowed it (see `_on_unraisable`)."""

_HOOK_TIMEOUT_S = 1.0
"""Time limit for `before_exit` in seconds, because that hook may block on disk I/O."""


def exit_on_signals(command: str) -> None:
    """Let signals end this process immediately while it is still importing modules and has nothing to clean up.

    command: the name of the command, such as `run` or `export`.  The command installs its own handlers when it starts.
    """
    _command[:] = [command]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, exit_immediately)


_command: list[str] = []
"""Holds the name of the command that this process runs; empty until `exit_on_signals` is called."""


def exit_immediately(number: int, frame: object) -> NoReturn:
    """Exit this process; `exit_on_signals` installs this function as the signal handler."""
    if os.environ.get("RANK", "0") == "0":
        with contextlib.suppress(OSError):
            os.write(2, f"{stop_message(signal.Signals(number).name)}\n".encode())
    os._exit(75 if _command[0] in ("run", "evaluate") else 128 + number)  # the exit codes of `trainer.errors`


class StopRequested(BaseException):
    """Raised if a signal has asked this process to stop.  `except Exception` does not catch it.

    name: the name of the signal, such as SIGTERM.
    note: what the next start can reuse, for the message; may be empty.
    """

    def __init__(self, name: str, note: str = "") -> None:
        super().__init__(name)
        self.name, self.note = name, note


def underlying_request(error: BaseException) -> StopRequested | KeyboardInterrupt | None:
    """Return the stop request that caused an error, or None.

    A signal may arrive anywhere, and some code wraps any exception.  Before Python 3.12, for example, the interpreter
    turned exceptions in `__set_name__` into RuntimeErrors.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, (StopRequested, KeyboardInterrupt)):
        cause = cause.__cause__ or cause.__context__
    return cause


@contextlib.contextmanager
def unwrapping() -> Iterator[None]:
    """If a stop request caused an error in the block, raise the request instead."""
    try:
        yield
    except Exception as error:
        request = underlying_request(error)
        if request is None:
            raise
        raise request from None


class ImmediateStop:
    """Stops this process within seconds of a signal, in three stages.  Used in the main thread; at most one is active.

    numbers: the signals to watch for.  Each must have a Python handler that calls `on_signal`.
    exit_code: returns the exit code of the third stage, given the name of the signal.
    """

    def __init__(self, numbers: Iterable[signal.Signals], exit_code: Callable[[str], int]) -> None:
        self._numbers, self._exit_code = frozenset(numbers), exit_code
        self.name = ""
        """Name of the received signal, such as SIGTERM; empty if there was none."""
        self.before_exit: Callable[[], None] | None = None
        """Called in the third stage, in a separate thread."""
        self.raises_immediately = False
        """Whether a signal raises StopRequested immediately: only in work that can be interrupted anywhere, such as an
        import."""
        self._is_raising = False
        self._is_cancelled = threading.Event()
        self._lock = threading.Lock()
        self._main_thread = threading.get_ident()
        self._read_fd, self._write_fd, self._previous_wakeup_fd = -1, -1, -1
        self._previous_hook = sys.unraisablehook

    def start(self) -> None:
        """Start watching for signals, and cancel any active ImmediateStop.

        A Trainer that was not closed may have left one active, which must not end the process while another Trainer
        saves.
        """
        for earlier in list(_active):
            earlier.cancel()
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        # The interpreter writes the number of each signal to this pipe immediately, even if no Python code is running.
        self._previous_wakeup_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._previous_hook, sys.unraisablehook = sys.unraisablehook, self._on_unraisable
        threading.Thread(target=self._watch, name="immediate-stop", daemon=True).start()
        _active.append(self)

    def cancel(self) -> None:
        """Stop watching for signals, because there is now state to save or the command has ended."""
        with self._lock:
            if self not in _active or threading.get_ident() != self._main_thread:
                return
            _active.remove(self)
            self._is_cancelled.set()
            self.before_exit = None  # it may reference an entire run
        signal.set_wakeup_fd(self._previous_wakeup_fd)
        if sys.unraisablehook == self._on_unraisable:
            sys.unraisablehook = self._previous_hook
        with contextlib.suppress(OSError):
            os.write(self._write_fd, b"\0")  # wakes the thread
        os.close(self._write_fd)

    def on_signal(self, name: str) -> bool:
        """Record a signal; called by its handler.  Returns True for the signal that the second stage sends.

        Raises StopRequested in the second stage, or if `raises_immediately` is set, unless this ImmediateStop is
        cancelled or the signal has interrupted the hook for unraisable exceptions (see `is_in_hook`).
        """
        can_raise = not self._is_cancelled.is_set() and not is_in_hook(sys._getframe())
        if self.raises_immediately and can_raise:
            self.name = self.name or name
            raise StopRequested(self.name)
        if self._is_raising:
            self._is_raising = False
            if can_raise:
                raise StopRequested(self.name)
            return True
        self.name = self.name or name
        return False

    def _watch(self) -> None:
        number = 0
        while number not in self._numbers and not self._is_cancelled.is_set():
            number = os.read(self._read_fd, 1)[0]
        if not self._is_cancelled.wait(RAISE_AFTER_S):
            self._raise_in_main_thread(number)
        if not self._is_cancelled.wait(EXIT_AFTER_S - RAISE_AFTER_S):
            with self._lock:
                if not self._is_cancelled.is_set():
                    self._end(signal.Signals(number).name)
        os.close(self._read_fd)

    def _raise_in_main_thread(self, number: int) -> None:
        with self._lock:
            if not self._is_cancelled.is_set():
                self._is_raising = True
                signal.pthread_kill(self._main_thread, number)  # also interrupts system calls

    def _on_unraisable(self, unraisable: sys.UnraisableHookArgs) -> None:
        """Raise StopRequested again if it was raised in a destructor or in the callback of a weak reference.

        Exceptions do not propagate out of such code: the interpreter would print a traceback and continue.
        """
        if not self.name or not isinstance(unraisable.exc_value, (StopRequested, KeyboardInterrupt)):
            self._previous_hook(unraisable)
            return
        threading.Thread(target=self._raise_again, args=[signal.Signals[self.name]], daemon=True).start()

    def _raise_again(self, number: int) -> None:
        """Raise StopRequested in the main thread once it has left `_on_unraisable`, which swallows exceptions too."""
        time.sleep(_RERAISE_S)
        while is_in_hook(sys._current_frames().get(self._main_thread)):
            time.sleep(_RERAISE_S)
        self._raise_in_main_thread(number)

    def _end(self, name: str) -> NoReturn:
        hook = threading.Thread(target=self.before_exit or (lambda: None), daemon=True)
        hook.start()
        hook.join(_HOOK_TIMEOUT_S)
        for path in list(_partial_files):
            with contextlib.suppress(OSError):
                path.unlink()
        with contextlib.suppress(OSError):
            os.write(2, f"{stop_message(name)}\n".encode())
        os._exit(self._exit_code(name))


def is_in_hook(frame: FrameType | None) -> bool:
    """Return whether the code of `frame` runs inside the hook for unraisable exceptions.

    A signal handler must not raise there: its exception would only be printed, and the hook might not finish.
    """
    while frame is not None and frame.f_code is not ImmediateStop._on_unraisable.__code__:
        frame = frame.f_back
    return frame is not None


_active: list[ImmediateStop] = []
"""The active ImmediateStop of this process, if any."""


def _reset_after_fork() -> None:
    """Forget the ImmediateStop in a forked process, which lacks its thread and shares its pipe with the parent."""
    if _active:
        _active.clear()
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_reset_after_fork)


def leave_signals_to_handlers() -> None:
    """Cancel the active ImmediateStop: only the handlers react to signals, and may take as long as they need."""
    for active in list(_active):
        active.cancel()


def raise_if_stop_requested() -> None:
    """Raise StopRequested if a signal has arrived and there is nothing to save yet.

    Long loops must call this at least once per second.
    """
    if name := immediate_stop_signal():
        raise StopRequested(name)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Raise StopRequested immediately if a signal arrives in the block, which must be interruptible anywhere."""
    raise_if_stop_requested()
    for active in _active:
        active.raises_immediately = True
    try:
        yield
    finally:
        for active in _active:
            active.raises_immediately = False


def immediate_stop_signal() -> str:
    """Return the name of the signal that has arrived while there is nothing to save yet; empty if none has arrived."""
    return next((active.name for active in _active), "")


def stop_message(name: str, note: str = "") -> str:
    """Return the message that a process prints when a signal stops it."""
    return f"stopped ({name})" + (f"; {note}" if note else "")


# ---------------------------------------------------------------------------------------------------------------
# Partially written files

_partial_files: set[Path] = set()


def add_partial(path: Path) -> None:
    """Register a partially written file, which the third stage deletes."""
    _partial_files.add(path)


def drop_partial(path: Path) -> None:
    """Unregister a file that is complete or deleted."""
    _partial_files.discard(path)


@contextlib.contextmanager
def partial_file(path: Path) -> Iterator[Path]:
    """Delete a file after the block, or if the process exits in the third stage, unless the block has renamed it."""
    add_partial(path)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)
        drop_partial(path)
