"""Ends this process after another rank has failed or the launcher has died."""

from __future__ import annotations

import atexit
import os
import threading
from typing import TYPE_CHECKING

from trainer.distributed.channel import StoreTimeout, TimedStore
from trainer.errors import EXIT_FAILED, print_stderr

if TYPE_CHECKING:
    from trainer.lifecycle.lifecycle import Lifecycle

FAILURE = "meshtrainer/failure"
"""Key under which the first failure of any rank is recorded in the store."""

_POLL_S = 0.5
"""Seconds between polls of the store."""

_GRACE_S = 3.0
"""Seconds to wait for the main thread to exit before this thread ends the process."""

_SAVE_TIMEOUT_S = 600.0
"""Maximum seconds to wait for a checkpoint save in flight before this process exits.  After a StoreTimeout, the process
does not wait for the save."""


class FailureWatch(threading.Thread):
    """A thread that ends this process a few seconds after another rank has failed or the launcher has died.

    Otherwise the main thread, which may be blocked in a collective, would wait until the collective times out.
    """

    def __init__(
        self,
        rank: int,
        store: TimedStore,
        parent: int | None,
        listeners: list[Lifecycle],
    ) -> None:
        """Start the thread.

        parent: the launcher's PID; None if there is no launcher that outlives this process.
        listeners: notified as soon as a failure is noticed, and again before the exit.
        """
        super().__init__(name="failure-watch", daemon=True)
        self._rank, self._store = rank, store
        self._listeners = listeners
        self._stop_event, self._parent = threading.Event(), parent
        # A script may end without `Trainer.close`.  If the interpreter is finalized while this thread is inside the
        # store, Python ends the thread with pthread_exit, and unwinding torch's C++ frames aborts the process.
        atexit.register(self.stop)
        self.start()

    def run(self) -> None:
        while not self._stop_event.wait(_POLL_S):
            save_timeout_s = _SAVE_TIMEOUT_S
            try:
                failure = self._failure()
            except StoreTimeout as error:
                print_stderr(f"error: rank {self._rank}: lost rank 0: {error}; this rank exits")
                failure, save_timeout_s = f"lost rank 0: {error}", 0.0
            except RuntimeError:
                failure = "lost rank 0, which hosted the store"
            if failure:
                for listener in self._listeners:
                    listener.peer_failed()
            if failure and not self._stop_event.wait(_GRACE_S):
                for listener in self._listeners:
                    listener.before_exit(save_timeout_s, failure)
                os._exit(EXIT_FAILED)

    def _failure(self) -> str:
        """Return the first failure on any rank, or an empty string."""
        if self._store.check(FAILURE):
            return self._store.get(FAILURE)
        if self._parent is None or os.getppid() == self._parent:
            return ""
        message = f"rank {self._rank}: its parent process has died"
        print_stderr(f"error: {message}; this rank exits")
        return self._store.compare_set(FAILURE, "", message)

    def stop(self, wait: bool = True) -> None:
        """Stop watching; with `wait`, also wait a few seconds for the thread to end."""
        self._stop_event.set()
        if wait:
            self.join(timeout=2 * _GRACE_S)
            atexit.unregister(self.stop)
