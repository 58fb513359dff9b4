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

    def may_retry(self) -> bool:
        """Return whether a failed save may be tried again by now."""
        return self.num_failures > 0 and self._clock() >= self._retry_at

    def is_due(self, step: int, may_retry: bool) -> bool:
        """Return whether to save after update `step`.  `may_retry` is rank 0's."""
        if self.num_failures:
            return may_retry
        return self.every > 0 and step % self.every == 0

    def failed(self) -> None:
        pause = min(self.FIRST_PAUSE_S * 2**self.num_failures, self.LONGEST_PAUSE_S)
        self.num_failures += 1
        self._retry_at = self._clock() + pause

    def succeeded(self) -> None:
        self.num_failures = 0
