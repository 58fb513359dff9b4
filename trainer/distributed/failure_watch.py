"""Ends this process soon after another rank has failed or the launcher has died."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from trainer.distributed.channel import StoreTimeout, TimedStore
from trainer.errors import EXIT_FAILED, print_stderr

if TYPE_CHECKING:
    from trainer.lifecycle.lifecycle import Lifecycle

FAILURE = "meshtrainer/failure"
"""Store key that holds the first failure."""

_GRACE_S, _PATIENCE_S = 3.0, 600.0
"""Time for the main thread to exit by itself, and for a save in flight to end."""


class FailureWatch(threading.Thread):
    """Ends this process some seconds after another rank has failed or the launcher has died.

    The main thread may be blocked in a collective or elsewhere, and would notice the failure only at the timeout.
    """

    def __init__(
        self,
        rank: int,
        messages: TimedStore,
        parent: int | None,
        listeners: list[Lifecycle],
    ) -> None:
        super().__init__(name="failure-watch", daemon=True)
        self._rank, self._messages = rank, messages
        self._listeners = listeners
        self._stopped, self._parent = threading.Event(), parent
        self.start()

    def run(self) -> None:
        while not self._stopped.wait(0.5):
            patience_s = _PATIENCE_S
            try:
                failure = self._failure()
            except StoreTimeout as lost:
                print_stderr(f"error: rank {self._rank}: lost rank 0: {lost}; this rank ends")
                failure, patience_s = f"lost rank 0: {lost}", 0.0
            except RuntimeError:
                failure = "lost rank 0, which hosted the store"
            if failure:
                for listener in self._listeners:
                    listener.peer_failed()
            if failure and not self._stopped.wait(_GRACE_S):
                for listener in self._listeners:
                    listener.before_exit(patience_s, failure)
                os._exit(EXIT_FAILED)

    def _failure(self) -> str:
        """Return the first failure on any rank; empty if there is none."""
        if self._messages.check(FAILURE):
            return self._messages.get(FAILURE)
        if self._parent is None or os.getppid() == self._parent:
            return ""
        orphaned = f"rank {self._rank}: its parent process has died"  # no launcher is left to manage this process
        print_stderr(f"error: {orphaned}; this rank ends")
        return self._messages.compare_set(FAILURE, "", orphaned)

    def stop(self, wait: bool = True) -> None:
        self._stopped.set()
        if wait:
            self.join(timeout=2 * _GRACE_S)
