"""Limits on the time and memory that a chat template takes.

A template comes with a model, which may come from anywhere.  Jinja's sandbox keeps it away from what it should not
read, but lets it compute for days or fill the memory.  There are two limits:

- `trial`: a forked child compiles and renders a template before this process does, under the kernel's limits on CPU
  time and address space.  Nothing inside a process can interrupt a single long call into C; the kernel can.
- `limited`: a template may behave in the trial and misbehave on some conversation of a file.  So each rendering has a
  limit, too: on memory by the kernel, on CPU time by a thread that raises an exception in the one that renders.

Both cost ordinary chats next to nothing: a fork for each template, and some microseconds for each rendering.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import resource
import signal
import threading
import time
import warnings
from collections.abc import Callable
from typing import TypeAlias

TRIAL_S = 0.5
"""CPU time of the trial, of which an ordinary template takes a few hundredths.  Not wall-clock time: a busy machine
must not refuse a good template."""

CPU_S = 2
"""CPU time of each rendering.  An ordinary one takes well under a millisecond, and one of a conversation of a hundred
megabytes less than this."""

MEMORY = 1 << 30
"""Bytes that a rendering may allocate beyond what the process has."""

TOO_MUCH_TIME = "takes too long: its CPU time is limited"
TOO_MUCH_MEMORY = f"takes more than {MEMORY >> 30} GiB of memory"


class TemplateTimeout(BaseException):
    """Raised in the thread that renders.  Not an Exception, so that nothing in Jinja handles it."""


# ---------------------------------------------------------------------------------------------------------------
# In a child


def trial(work: Callable[[], str]) -> str:
    """Return what `work` returns, called in a forked child; or what was wrong if it did not finish.

    Where the system does not allow another process, nothing is tried, and the answer is empty.
    """
    reader, writer = os.pipe()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # other threads may exist; the child needs none of them
            child = os.fork()
    except OSError:
        os.close(reader)
        os.close(writer)
        return ""
    if child == 0:
        _answer(work, writer)
    os.close(writer)
    try:
        with open(reader, "rb") as pipe:
            answer = pipe.read()
    except BaseException:  # a stop request, say: the child would go on for up to a second
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return (
            TOO_MUCH_TIME
            if number in (signal.SIGPROF, signal.SIGXCPU, signal.SIGKILL)
            else f"crashes (signal {number})"
        )
    if os.WEXITSTATUS(status) == _OUT_OF_MEMORY:
        return TOO_MUCH_MEMORY
    return answer.decode() if os.WEXITSTATUS(status) == 0 else "crashes"


_OUT_OF_MEMORY = 3
"""The exit code of such a child."""


def _answer(work: Callable[[], str], writer: int) -> None:
    """Write what `work` returns, and end this process, the child."""
    code = 1
    try:
        gc.disable()  # objects of the parent are not the child's to finalize
        faulthandler.disable()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the parent says what is wrong
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_IGN)  # sent to the whole group, they are for the parent, which ends this
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (1, 2))  # in whole seconds; the timer is finer
        signal.setitimer(signal.ITIMER_PROF, TRIAL_S)
        limits = _memory_limits()
        if limits is not None:
            resource.setrlimit(resource.RLIMIT_AS, limits[1])
        os.write(writer, work().encode(errors="replace"))
        code = 0
    except MemoryError:
        code = _OUT_OF_MEMORY
    finally:
        os._exit(code)


# ---------------------------------------------------------------------------------------------------------------
# In this process


class limited:
    """Limits what the block takes, in which TooSlow or MemoryError is raised.  One thread at a time in a process.

    Blocks may be nested: each has its own limit on time, and the outermost sets the one on memory.  So that an ordinary
    rendering costs nothing in a nested block, this is written out as a class.
    """

    def __enter__(self) -> None:
        self._is_inner = _WATCH.renderer == threading.get_ident()
        if self._is_inner:
            _WATCH.number += 1
            return
        self._before: tuple[Limits, Limits] | None = None
        try:  # a stop request may be raised anywhere in it
            _RENDER_LOCK.acquire()
            limits = self._before = _SPACE.limits()
            if limits is not None:
                resource.setrlimit(resource.RLIMIT_AS, limits[1])
            _WATCH.begin()
        except BaseException:
            self._leave()
            raise

    def __exit__(self, *raised: object) -> None:
        if not self._is_inner:
            self._leave()

    def _leave(self) -> None:
        """Undo what `__enter__` has done, however far it came."""
        try:
            _WATCH.end()
        finally:
            try:
                if self._before is not None:
                    resource.setrlimit(resource.RLIMIT_AS, self._before[0])
            finally:
                with contextlib.suppress(RuntimeError):  # this thread does not hold it
                    _RENDER_LOCK.release()


_RENDER_LOCK = threading.RLock()
"""The memory limit is the whole process's.  An RLock, as it can be released only by the thread that holds it."""

Limits: TypeAlias = "tuple[int, int]"
"""As `resource.getrlimit` has them: soft and hard."""


def _memory_limits() -> tuple[Limits, Limits] | None:
    """Return the limits on this process's address space, and those that let it allocate MEMORY more.

    None where that is no change, or the system does not tell.
    """
    try:
        with open("/proc/self/statm", "rb") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if any(limit != resource.RLIM_INFINITY and limit <= used + MEMORY for limit in (soft, hard)):
        return None
    return (soft, hard), (used + MEMORY, hard)


class _Space:
    """The limits on the address space, looked up again when they are older than a tenth of a second."""

    def __init__(self) -> None:
        self._until = 0.0
        self._limits: tuple[Limits, Limits] | None = None

    def limits(self) -> tuple[Limits, Limits] | None:
        now = time.monotonic()
        if now > self._until:
            self._limits, self._until = _memory_limits(), now + 0.1
        return self._limits


class _Watch:
    """A thread that raises TooSlow in the thread that renders, when one rendering has taken CPU_S of CPU time.

    It starts with the first rendering, and ends when there has been none for a while.
    """

    _EVERY_S = 0.2
    _IDLE_S = 5.0

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.number = 0
        """Counts renderings: when it has changed, another one has begun."""
        self.renderer: int | None = None
        """The thread that renders."""
        self._is_late = False
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        with self._lock:
            self.number += 1
            self.renderer, self._is_late = threading.get_ident(), False
            if self._thread is None:
                thread = threading.Thread(target=self._look, name="template-limits", daemon=True)
                with contextlib.suppress(RuntimeError):  # no more threads are allowed: the trial has to do
                    thread.start()
                    self._thread = thread

    def end(self) -> None:
        """Stop watching the thread that calls this, if it is the one that renders."""
        try:
            self._end()
        except BaseException:  # TooSlow itself, or a stop request, before it was done
            self._end()
            raise

    def _end(self) -> None:
        with self._lock:
            if self.renderer != threading.get_ident():
                return
            if self._is_late:  # TooSlow may not have been raised yet, and must not be later
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.renderer), None)
            self.renderer = None

    def _look(self) -> None:
        seen, began, idle_since = 0, 0.0, time.monotonic()
        while True:
            time.sleep(self._EVERY_S)
            with self._lock:
                if self.renderer is None:
                    if self.number == seen and time.monotonic() - idle_since > self._IDLE_S:
                        self._thread = None
                        return
                    if self.number != seen:
                        seen, idle_since = self.number, time.monotonic()
                    continue
                now = _cpu_s(self.renderer)
                if self.number != seen:
                    seen, began, idle_since = self.number, now, time.monotonic()
                elif now - began > CPU_S and not self._is_late:
                    self._is_late = True
                    error = ctypes.py_object(TemplateTimeout)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.renderer), error)


def _cpu_s(thread: int) -> float:
    """Return the CPU time of a thread; where the system does not tell, the time."""
    clock = getattr(time, "pthread_getcpuclockid", None)
    return time.clock_gettime(clock(thread)) if clock is not None else time.monotonic()


_SPACE, _WATCH = _Space(), _Watch()


def _reset_after_fork() -> None:
    """In a forked child there is no watching thread, and whoever held a lock is not there to release it."""
    global _RENDER_LOCK, _WATCH
    _RENDER_LOCK, _WATCH = threading.RLock(), _Watch()


os.register_at_fork(after_in_child=_reset_after_fork)
