"""Asked to stop while there is nothing to lose yet, a process ends within seconds, whatever it is doing.

This holds for a run from its start to its first training step, and for all of every other command.  A signal has an
effect in three stages:

1. At once, the handler notes it.  Long loops call `stop_if_asked`, which raises StopRequested where it is safe.
2. After RAISE_S, StopRequested is raised in the main thread wherever it is: in a wait, in a read, in a library.
3. After END_S, the process ends.  By then the main thread must be in a long call that runs no Python code, such as a
   tokenizer on a huge text, a compiler, or a collective.  Files that are only half written are removed first.

Imports neither torch nor anything of this package, so that the signals are caught before the slow imports begin.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NoReturn

RAISE_S, END_S = 1.5, 3.0
"""Seconds from the signal to the second and to the third stage."""

_HOOK_S = 1.0
"""Seconds that the third stage gives to `before_exit`, which may hang on a disk."""


def leave_on_signals(command: str) -> None:
    """Have a signal end this process at once, for the time of its imports: there is nothing to clean up yet.

    command: the name of what is run, such as `run` or `export`, which replaces the handlers as it begins.
    """
    _command[:] = [command]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, leave_at_once)


_command: list[str] = []


def leave_at_once(number: int, frame: object) -> NoReturn:
    """End this process: the handler that `leave_on_signals` installs."""
    if os.environ.get("RANK", "0") == "0":
        with contextlib.suppress(OSError):
            os.write(2, f"{stopped(signal.Signals(number).name)}\n".encode())
    os._exit(75 if _command[0] in ("run", "evaluate") else 128 + number)  # as `trainer.errors` has them


class StopRequested(BaseException):
    """A signal has asked this process to stop.  Not an Exception, so that nothing retries or swallows it.

    kept: what has been kept for the next start, if there is something to say about it.
    """

    def __init__(self, name: str, kept: str = "") -> None:
        super().__init__(name)
        self.name, self.kept = name, kept


class PromptStop:
    """Takes one signal through the three stages.  Used in the main thread; one at a time is active.

    numbers: the signals that have a handler of Python's, which must call `hear`.
    exit_code: of the process in the third stage.
    """

    def __init__(self, numbers: Iterable[signal.Signals], exit_code: Callable[[str], int]) -> None:
        self._numbers, self._exit_code = frozenset(numbers), exit_code
        self.name = ""
        """The signal that has come, such as SIGTERM; empty before that."""
        self.before_exit: Callable[[], None] | None = None
        """Called in the third stage, in another thread than the main one."""
        self.raises_at_once = False
        """True for the time of work that can be interrupted anywhere, such as an import: there is no first stage."""
        self._is_overdue = False
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._main = threading.get_ident()
        self._reader, self._writer, self._wakeup_before = -1, -1, -1

    def start(self) -> None:
        """Start to watch for signals, in place of one that is active already.

        Such a one may be left by a Trainer that was never closed: it must not end the process while this one saves.
        """
        for earlier in list(_active):
            earlier.cancel()
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        # The interpreter writes each signal's number there at once, also while the main thread runs no Python code.
        self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="prompt-stop", daemon=True).start()
        _active.append(self)

    def cancel(self) -> None:
        """Leave signals to their handlers from now on: there is something to lose, or the command is over."""
        with self._lock:
            if self not in _active or threading.get_ident() != self._main:
                return
            _active.remove(self)
            self._is_over.set()
            self.before_exit = None  # it may hold a whole run, and the thread takes a moment to end
        signal.set_wakeup_fd(self._wakeup_before)
        with contextlib.suppress(OSError):
            os.write(self._writer, b"\0")  # wakes the thread
        os.close(self._writer)

    def hear(self, name: str) -> bool:
        """Note a signal, in its handler.  Returns True if this is the second stage, and no new signal."""
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
            with self._lock:
                if not self._is_over.is_set():
                    self._is_overdue = True
                    signal.pthread_kill(self._main, number)  # interrupts a system call, too
        if not self._is_over.wait(END_S - RAISE_S):
            with self._lock:
                if not self._is_over.is_set():
                    self._end(signal.Signals(number).name)
        os.close(self._reader)

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
"""The one that is active in this process, if there is one."""


def _forget_in_a_fork() -> None:
    """In a forked process no thread watches, and what is written would reach the one of the parent."""
    if _active:
        _active.clear()
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget_in_a_fork)


def stop_if_asked() -> None:
    """Raise StopRequested if a signal has asked this process to stop and there is nothing to lose yet.

    For long loops: each pass through one should take less than a second.
    """
    if name := asked_promptly():
        raise StopRequested(name)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Raise StopRequested as soon as a signal comes, for the time of a block that can be interrupted anywhere."""
    stop_if_asked()
    for prompt in _active:
        prompt.raises_at_once = True
    try:
        yield
    finally:
        for prompt in _active:
            prompt.raises_at_once = False


def asked_promptly() -> str:
    """Return the signal that has asked this process to stop while there is nothing to lose; empty if none has."""
    return next((prompt.name for prompt in _active), "")


def stopped(name: str, kept: str = "") -> str:
    """Return the line that says why a process ends."""
    return f"stopped ({name})" + (f"; {kept}" if kept else "")


# ---------------------------------------------------------------------------------------------------------------
# Files that are half written

_partial_files: set[Path] = set()


def add_partial(path: Path) -> None:
    """Have the third stage remove a file, which is being written."""
    _partial_files.add(path)


def drop_partial(path: Path) -> None:
    """Have the third stage leave a file alone: it is complete, or gone."""
    _partial_files.discard(path)


@contextlib.contextmanager
def partial_file(path: Path) -> Iterator[Path]:
    """Remove a file after the block, unless it was renamed by then; also if the process is ended meanwhile."""
    add_partial(path)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)
        drop_partial(path)
