"""When to save: at intervals, and again soon after a save that failed."""

from __future__ import annotations

import time
from collections.abc import Callable


class SaveSchedule:
    """Every so many updates; after a failure as soon as a pause has passed, twice as long after each further one.

    All ranks ask alike.  Only rank 0 looks at the clock: `may_retry` is its word, which the step's message carries.
    """

    FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0

    def __init__(self, every: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.every, self._clock = every, clock
        self.num_failures = 0
        """Failed saves in a row."""
        self._retry_at = 0.0
        self._is_postponed = False
        self._owed: list[int] = []

    def may_retry(self) -> bool:
        """Return whether a failed save may be tried again by now."""
        return self.num_failures > 0 and self._clock() >= self._retry_at

    def is_due(self, step: int, may_retry: bool) -> bool:
        """Return whether to save after update `step`.  `may_retry` is rank 0's."""
        falls_due = self.every > 0 and step % self.every == 0
        if falls_due:
            self._owed.append(step)
        if self.num_failures:
            return may_retry
        return falls_due or self._is_postponed

    def postpone(self) -> None:
        """Put the save that is due off to the next update: this is no state to keep."""
        self._is_postponed = True

    def begin(self, step: int) -> list[int]:
        """Note that a save begins, of update `step`; returns the updates whose saves it makes up for."""
        self._is_postponed = False
        return [due for due in self._owed if due < step]

    def failed(self) -> None:
        pause = min(self.FIRST_PAUSE_S * 2**self.num_failures, self.LONGEST_PAUSE_S)
        self.num_failures += 1
        self._retry_at = self._clock() + pause

    def succeeded(self, step: int) -> None:
        self.num_failures = 0
        self._owed = [due for due in self._owed if due > step]
