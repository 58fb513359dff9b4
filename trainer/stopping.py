"""Prompt stops: a process with nothing to save ends within seconds of a signal, whatever it is doing.

This applies to a run until its first training step, and to every other command for its entire duration.  A signal takes
effect in three stages:

1. Immediately, the handler records it.  Long loops call `stop_if_asked`, which raises StopRequested at a safe point.
2. After RAISE_S, StopRequested is raised in the main thread wherever it is: in a wait, in a read, in a library.
3. After END_S, the process exits.  By then the main thread must be in a long call that runs no Python code, such as a
   tokenizer on a huge text, a compiler, or a collective.  Partially written files are deleted first.

Imports neither torch nor anything else of this package, so that signals are caught before the slow imports begin.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NoReturn

RAISE_S, END_S = 1.5, 3.0
"""Time from the signal to the second and to the third stage."""

_AGAIN_S = 0.05
"""Time after which a request that could not leave a destructor or a callback is raised again."""

_HOOK_S = 1.0
"""Time limit of `before_exit` in the third stage, since it may hang on a disk."""


def exit_on_signals(command: str) -> None:
    """Let signals end this process immediately while it imports modules, when there is nothing to clean up.

    command: the name of the command, such as `run` or `export`, which replaces the handlers when it begins.
    """
    _command[:] = [command]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, exit_immediately)


_command: list[str] = []


def exit_immediately(number: int, frame: object) -> NoReturn:
    """Exit this process.  This is the handler that `exit_on_signals` installs."""
    if os.environ.get("RANK", "0") == "0":
        with contextlib.suppress(OSError):
            os.write(2, f"{stopped(signal.Signals(number).name)}\n".encode())
    os._exit(75 if _command[0] in ("run", "evaluate") else 128 + number)  # the exit codes of `trainer.errors`


class StopRequested(BaseException):
    """Raised if a signal has asked this process to stop.  Not an Exception, so that nothing retries or swallows it.

    kept: a note on what was kept for the next start, if any.
    """

    def __init__(self, name: str, kept: str = "") -> None:
        super().__init__(name)
        self.name, self.kept = name, kept


def request_behind(error: BaseException) -> StopRequested | KeyboardInterrupt | None:
    """Return the stop request that an error has replaced, or None.

    A signal may arrive anywhere, and some code wraps whatever is raised inside it: until Python 3.12, for example, the
    interpreter turned an exception in `__set_name__` into a RuntimeError.
    """
    behind: BaseException | None = error
    while behind is not None and not isinstance(behind, (StopRequested, KeyboardInterrupt)):
        behind = behind.__cause__ or behind.__context__
    return behind


@contextlib.contextmanager
def unwrapping() -> Iterator[None]:
    """Raise the stop request behind an error in place of the error."""
    try:
        yield
    except Exception as error:
        request = request_behind(error)
        if request is None:
            raise
        raise request from None


class PromptStop:
    """Takes a signal through the three stages.  Use it in the main thread; only one is active at a time.

    numbers: the signals that have a Python handler, which must call `on_signal`.
    exit_code: returns the exit code of the third stage for the name of a signal.
    """

    def __init__(self, numbers: Iterable[signal.Signals], exit_code: Callable[[str], int]) -> None:
        self._numbers, self._exit_code = frozenset(numbers), exit_code
        self.name = ""
        """Name of the received signal, such as SIGTERM; empty if there is none."""
        self.before_exit: Callable[[], None] | None = None
        """Called in the third stage, on another thread."""
        self.raises_at_once = False
        """True during work that can be interrupted anywhere, such as an import: a signal then raises immediately."""
        self._is_overdue = False
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._main = threading.get_ident()
        self._reader, self._writer, self._wakeup_before = -1, -1, -1
        self._hook_before = sys.unraisablehook

    def start(self) -> None:
        """Start watching for signals, and cancel any active PromptStop.

        A Trainer that was never closed may have left one, which must not end the process while this one saves.
        """
        for earlier in list(_active):
            earlier.cancel()
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        # The interpreter writes each signal's number there immediately, even while the main thread runs no Python code.
        self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._hook_before, sys.unraisablehook = sys.unraisablehook, self._on_unraisable
        threading.Thread(target=self._watch, name="prompt-stop", daemon=True).start()
        _active.append(self)

    def cancel(self) -> None:
        """Leave signals to their handlers from now on: there is something to save, or the command is over."""
        with self._lock:
            if self not in _active or threading.get_ident() != self._main:
                return
            _active.remove(self)
            self._is_over.set()
            self.before_exit = None  # it may keep an entire run alive until the thread ends
        signal.set_wakeup_fd(self._wakeup_before)
        if sys.unraisablehook == self._on_unraisable:
            sys.unraisablehook = self._hook_before
        with contextlib.suppress(OSError):
            os.write(self._writer, b"\0")  # wakes the thread
        os.close(self._writer)

    def on_signal(self, name: str) -> bool:
        """Record a signal, in its handler.  Returns True if this call is the second stage and not a new signal."""
        if self.raises_at_once and not self._is_over.is_set():
            self.name = self.name or name
            raise StopRequested(self.name)
        if self._is_overdue:
            self._is_overdue = False
            if not self._is_over.is_set():
                raise StopRequested(self.name)
            return True
        self.name = self.name or name
        return False

    def _watch(self) -> None:
        number = 0
        while number not in self._numbers and not self._is_over.is_set():
            number = os.read(self._reader, 1)[0]
        if not self._is_over.wait(RAISE_S):
            self._raise_in_main_thread(number)
        if not self._is_over.wait(END_S - RAISE_S):
            with self._lock:
                if not self._is_over.is_set():
                    self._end(signal.Signals(number).name)
        os.close(self._reader)

    def _raise_in_main_thread(self, number: int) -> None:
        with self._lock:
            if not self._is_over.is_set():
                self._is_overdue = True
                signal.pthread_kill(self._main, number)  # interrupts a system call, too

    def _on_unraisable(self, unraisable: sys.UnraisableHookArgs) -> None:
        """Raise a request again that was raised in a destructor or a weak reference's callback.

        The interpreter cannot let an exception out of these.  It would print it with a traceback and go on.
        """
        if not self.name or not isinstance(unraisable.exc_value, (StopRequested, KeyboardInterrupt)):
            self._hook_before(unraisable)
            return
        again = threading.Timer(_AGAIN_S, self._raise_in_main_thread, [signal.Signals[self.name]])
        again.daemon = True
        again.start()

    def _end(self, name: str) -> NoReturn:
        hook = threading.Thread(target=self.before_exit or (lambda: None), daemon=True)
        hook.start()
        hook.join(_HOOK_S)
        for path in list(_partial_files):
            with contextlib.suppress(OSError):
                path.unlink()
        with contextlib.suppress(OSError):
            os.write(2, f"{stopped(name)}\n".encode())
        os._exit(self._exit_code(name))


_active: list[PromptStop] = []
"""The active PromptStop of this process, if there is one."""


def _forget_in_a_fork() -> None:
    """Reset a forked process: it has no watching thread, and its signals would be written to the parent's pipe."""
    if _active:
        _active.clear()
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget_in_a_fork)


def leave_signals_to_handlers() -> None:
    """Cancel the active PromptStop: this process has work to end in order, however long that takes."""
    for prompt in list(_active):
        prompt.cancel()


def stop_if_asked() -> None:
    """Raise StopRequested if a signal has asked this process to stop and there is nothing to save yet.

    Call this in long loops, at least once per second.
    """
    if name := prompt_stop_signal():
        raise StopRequested(name)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Raise StopRequested immediately on a signal, inside a block that can be interrupted anywhere."""
    stop_if_asked()
    for prompt in _active:
        prompt.raises_at_once = True
    try:
        yield
    finally:
        for prompt in _active:
            prompt.raises_at_once = False


def prompt_stop_signal() -> str:
    """Return the signal that asked this process to stop while there is nothing to save; empty if there is none."""
    return next((prompt.name for prompt in _active), "")


def stopped(name: str, kept: str = "") -> str:
    """Return the message of a process that was stopped by a signal."""
    return f"stopped ({name})" + (f"; {kept}" if kept else "")


# ---------------------------------------------------------------------------------------------------------------
# Partially written files

_partial_files: set[Path] = set()


def add_partial(path: Path) -> None:
    """Register a file that is being written, so that the third stage deletes it."""
    _partial_files.add(path)


def drop_partial(path: Path) -> None:
    """Unregister a file, because it is complete or deleted."""
    _partial_files.discard(path)


@contextlib.contextmanager
def partial_file(path: Path) -> Iterator[Path]:
    """Delete a file after the block, unless it was renamed by then; also if the process exits in the third stage."""
    add_partial(path)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)
        drop_partial(path)
