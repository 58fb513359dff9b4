"""Limits the CPU time and memory used to render chat templates.

A template comes with a model, which may come from an untrusted source.  Jinja's sandbox restricts what a template can
access, but not how much CPU time and memory it uses.  Both are limited in two ways:

- `try_in_child`: as a trial, a forked child compiles and renders a template before this process does, under kernel
  limits on CPU time and address space.  Only the kernel can interrupt a single long call into C.
- `rendering_limits`: a template that passes the trial may still misbehave on a particular conversation, so each
  rendering in this process is limited too.  The kernel limits its memory.  A watchdog thread limits its CPU time, by
  raising an exception in the rendering thread.

The overhead for ordinary chats is negligible: one fork per tokenizer, for all of its templates, and a few microseconds
per rendering.
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

TRIAL_CPU_S = 0.5
"""Maximum CPU time of the trial in seconds; ordinary templates take a few hundredths of a second.  A limit on
wall-clock time would reject valid templates on a busy machine."""

RENDERING_CPU_S = 2
"""Approximate maximum CPU time of each rendering in seconds.  An ordinary rendering takes well under a millisecond, and
even rendering a hundred megabytes takes less than this."""

MAX_EXTRA_MEMORY_BYTES = 1 << 30
"""Maximum bytes of address space that a rendering may add to what the process already uses."""

TOO_MUCH_TIME = "exceeds the CPU time limit"
TOO_MUCH_MEMORY = f"uses more than {MAX_EXTRA_MEMORY_BYTES >> 30} GiB of memory"


class TemplateTimeout(BaseException):
    """Raised if a rendering exceeds its CPU limit.  Not a subclass of Exception, so that Jinja does not catch it."""


# ---------------------------------------------------------------------------------------------------------------
# The trial in a child process


def try_in_child(work: Callable[[], str]) -> str:
    """Call `work` in a forked child, and return its result; if the child did not finish, return the reason instead.

    If the process cannot fork, returns "" without calling `work`.
    """
    reader, writer = os.pipe()
    try:
        with warnings.catch_warnings():
            # Python warns that other threads do not survive the fork; the child does not need them.
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
    except OSError:
        os.close(reader)
        os.close(writer)
        return ""
    if child == 0:
        _run_in_child(work, writer)
    os.close(writer)
    try:
        with open(reader, "rb") as pipe:
            output = pipe.read()
    except BaseException:  # such as a stop request: otherwise the child would run for up to a second longer
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
    return output.decode() if os.WEXITSTATUS(status) == 0 else "crashes"


_OUT_OF_MEMORY = 3
"""Exit code of a child that ran out of memory."""


def _run_in_child(work: Callable[[], str], writer: int) -> None:
    """Write the result of `work` to the pipe, and exit the child."""
    code = 1
    try:
        gc.disable()  # the child must not finalize the parent's objects
        faulthandler.disable()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the parent reports the error
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_IGN)  # sent to the process group; the parent kills the child itself
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (1, 2))  # in seconds; the timer below has a finer resolution
        signal.setitimer(signal.ITIMER_PROF, TRIAL_CPU_S)
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
# Limits in this process


class rendering_limits:
    """Context manager that limits the CPU time and memory of its block.

    If a limit is exceeded, TemplateTimeout or MemoryError is raised in the block.  Only one thread of a process can be
    in such a block at any time; others wait.  Blocks may be nested: entering a nested block restarts the CPU clock, but
    only the outermost block sets the memory limit.  This is a class rather than a generator, so that entering a nested
    block costs almost nothing.
    """

    def __enter__(self) -> None:
        self._is_nested = _WATCHDOG.renderer == threading.get_ident()
        if self._is_nested:
            _WATCHDOG.num_started += 1
            return
        self._limits: tuple[Limits, Limits] | None = None
        try:  # a stop request may be raised at any point in this block
            _RENDER_LOCK.acquire()
            limits = self._limits = _MEMORY_LIMITS.limits()
            if limits is not None:
                resource.setrlimit(resource.RLIMIT_AS, limits[1])
            _WATCHDOG.begin()
        except BaseException:
            self._leave()
            raise

    def __exit__(self, *raised: object) -> None:
        if not self._is_nested:
            self._leave()

    def _leave(self) -> None:
        """Undo what `__enter__` did, even if it did not complete."""
        try:
            _WATCHDOG.end()
        finally:
            try:
                if self._limits is not None:
                    resource.setrlimit(resource.RLIMIT_AS, self._limits[0])
            finally:
                with contextlib.suppress(RuntimeError):  # this thread does not hold it
                    _RENDER_LOCK.release()


_RENDER_LOCK = threading.RLock()
"""Serializes renderings, because the memory limit applies to the whole process.  An RLock, because only the thread that
holds an RLock can release it."""

Limits: TypeAlias = "tuple[int, int]"
"""A soft and a hard limit, as `resource.getrlimit` returns them."""


def _memory_limits() -> tuple[Limits, Limits] | None:
    """Return this process's address-space limits, and limits that allow MAX_EXTRA_MEMORY_BYTES more than are in use.

    Returns None if the current limits are at least as strict, or the system does not report memory use.
    """
    try:
        with open("/proc/self/statm", "rb") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if any(limit != resource.RLIM_INFINITY and limit <= used + MAX_EXTRA_MEMORY_BYTES for limit in (soft, hard)):
        return None
    return (soft, hard), (used + MAX_EXTRA_MEMORY_BYTES, hard)


class _MemoryLimits:
    """Caches the result of `_memory_limits` for a tenth of a second."""

    def __init__(self) -> None:
        self._expires_at = 0.0
        self._limits: tuple[Limits, Limits] | None = None

    def limits(self) -> tuple[Limits, Limits] | None:
        now = time.monotonic()
        if now > self._expires_at:
            self._limits, self._expires_at = _memory_limits(), now + 0.1
        return self._limits


class _Watchdog:
    """A watchdog thread that raises TemplateTimeout in the rendering thread after RENDERING_CPU_S seconds of CPU time.

    The thread starts with a rendering, and ends after a few seconds without renderings.
    """

    _POLL_S = 0.2
    _IDLE_S = 5.0

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.num_started = 0
        """Number of renderings started; a change tells the watchdog that a new rendering has started."""
        self.renderer: int | None = None
        """The rendering thread, or None."""
        self._has_fired = False
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        with self._lock:
            self.num_started += 1
            self.renderer, self._has_fired = threading.get_ident(), False
            if self._thread is None:
                thread = threading.Thread(target=self._watch, name="template-limits", daemon=True)
                with contextlib.suppress(RuntimeError):  # no more threads are allowed: rely on the trial alone
                    thread.start()
                    self._thread = thread

    def end(self) -> None:
        """Stop watching the calling thread, if it is the rendering thread."""
        try:
            self._end()
        except BaseException:  # TemplateTimeout or a stop request interrupted it
            self._end()
            raise

    def _end(self) -> None:
        with self._lock:
            if self.renderer != threading.get_ident():
                return
            if self._has_fired:  # cancel a pending TemplateTimeout, which must not be raised after the block
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.renderer), None)
            self.renderer = None

    def _watch(self) -> None:
        last_num_started, started_at, idle_since = 0, 0.0, time.monotonic()
        while True:
            time.sleep(self._POLL_S)
            with self._lock:
                if self.renderer is None:
                    if self.num_started == last_num_started and time.monotonic() - idle_since > self._IDLE_S:
                        self._thread = None
                        return
                    if self.num_started != last_num_started:
                        last_num_started, idle_since = self.num_started, time.monotonic()
                    continue
                clock = getattr(time, "pthread_getcpuclockid", None)  # not on every system; wall-clock time otherwise
                now = time.clock_gettime(clock(self.renderer)) if clock is not None else time.monotonic()
                if self.num_started != last_num_started:
                    last_num_started, started_at, idle_since = self.num_started, now, time.monotonic()
                elif now - started_at > RENDERING_CPU_S and not self._has_fired:
                    self._has_fired = True
                    error = ctypes.py_object(TemplateTimeout)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.renderer), error)


_MEMORY_LIMITS, _WATCHDOG = _MemoryLimits(), _Watchdog()


def _reset_after_fork() -> None:
    """Reset the lock and the watchdog in a forked child, where the threads that used them do not exist."""
    global _RENDER_LOCK, _WATCHDOG
    _RENDER_LOCK, _WATCHDOG = threading.RLock(), _Watchdog()


os.register_at_fork(after_in_child=_reset_after_fork)
