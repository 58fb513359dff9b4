"""Saver: decides when to save, follows the save in flight, and retries failed saves."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Protocol

from trainer.checkpoint.contents import Savable
from trainer.checkpoint.failures import TO_FIX
from trainer.checkpoint.interval import guessed_s
from trainer.checkpoint.keeping import find_best
from trainer.checkpoint.manifest import name_of
from trainer.checkpoint.pace import Pace, find_pace
from trainer.checkpoint.store import Checkpoints, SaveResult
from trainer.config import RunConfig
from trainer.distributed.ballot import Ballot
from trainer.errors import TrainingFailed
from trainer.files import find_folder
from trainer.metrics.goodput import Experience

_FINAL_PAUSES_S = (0.0, 1.0, 3.0)
"""Before each try of the final save."""
_PAUSES_FOR_ROOM_S = (5.0, 10.0, 20.0, 25.0)
"""Before the further ones if the disk is full."""


class Resumable(Savable, Protocol):
    """State that says whether an evaluation of its step is still to be done."""

    eval_pending: bool


class SaveListener(Protocol):
    """Told how saves go; knows what the run has seen so far."""

    @property
    def step_s(self) -> float:
        """Seconds of a step; 0 where that is not known yet."""
        ...

    def experience(self) -> Experience:
        """Return what the run has seen of saves and failures; on all ranks but the first, nothing."""

    def expects(self, falls_due: Callable[[int], bool]) -> None:
        """`falls_due(step)` says, once the ballot of step `step` has been cast, whether a save follows it."""

    def settle(self) -> None:
        """Find out whether the steps so far were skipped, as far as that is still open."""

    def prepare(self, state: Resumable) -> None:
        """A save is about to begin.  Collective."""

    def waiting(self) -> AbstractContextManager[None]:
        """Training waits for a save inside the block."""

    def began(self, stage: Callable[[], str]) -> None:
        """A save has begun; `stage()` says what it is doing."""

    def ended(self, result: SaveResult, every_s: float | None) -> None:
        """The save in flight has ended, one way or the other; it was one every `every_s` seconds, if that is so."""

    def warn(self, text: str) -> None:
        """Something that does not stop training."""


class SaveSchedule:
    """As a pace has it; after a failure as soon as a pause has passed, twice as long after each further one.

    All ranks ask alike.  Only rank 0 looks at the clock: `may_retry` is its word, which the step's message carries.
    """

    FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0

    def __init__(self, pace: Pace, clock: Callable[[], float] = time.monotonic) -> None:
        self.pace, self._clock = pace, clock
        self.num_failures = 0
        """Failed saves in a row."""
        self._retry_at = 0.0
        self._is_postponed = False
        self._owed: list[int] = []

    def may_retry(self) -> bool:
        """Return whether a failed save may be tried again by now."""
        return self.num_failures > 0 and self._clock() >= self._retry_at

    def is_due(self, step: int, may_retry: bool) -> bool:
        """Return whether to save after step `step`.  `may_retry` is rank 0's."""
        falls_due = self.pace.falls_due(step)
        if falls_due:
            self._owed.append(step)
        if self.num_failures:
            return may_retry
        return falls_due or self._is_postponed

    def postpone(self) -> None:
        """Put the save that is due off to the next step: this is no state to keep."""
        self._is_postponed = True

    def begin(self, step: int) -> list[int]:
        """Note that a save begins, of step `step`; returns the steps whose saves it makes up for."""
        self._is_postponed = False
        self.pace.began()
        return [due for due in self._owed if due < step]

    def failed(self) -> None:
        pause = min(self.FIRST_PAUSE_S * 2**self.num_failures, self.LONGEST_PAUSE_S)
        self.num_failures += 1
        self._retry_at = self._clock() + pause

    def succeeded(self, step: int) -> None:
        self.num_failures = 0
        self._owed = [due for due in self._owed if due > step]


class Saver:
    """Saves a state at intervals, on request and at the end.  All methods are collective unless they say otherwise.

    With `checkpoint.mode=async` one save at most is in flight; the ballot of each step tells when it has ended on every
    rank, so that collecting its result never waits.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        config: RunConfig,
        ballot: Ballot,
        listener: SaveListener,
        expected_bytes: int,
    ) -> None:
        """`expected_bytes` is about what this rank will write."""
        self._checkpoints, self._config, self._listener = checkpoints, config.checkpoint, listener
        self._expected_bytes = expected_bytes
        pace = find_pace(config, checkpoints.world, ballot, expected_bytes, lambda: listener.step_s)
        self.schedule = SaveSchedule(pace)
        listener.expects(pace.falls_due)
        self._is_written = ballot.ask(lambda: checkpoints.is_written)
        self._is_overdue = ballot.ask(lambda: checkpoints.is_overdue)
        self._may_retry = ballot.ask(lambda: checkpoints.world.is_main and self.schedule.may_retry())
        self._started: tuple[object, ...] | None = None
        self._saved: tuple[object, ...] | None = None
        """What `_mark` says of the newest checkpoint here."""
        self.longest_s = 0.0
        """Seconds of the longest save."""

    def due(self, step: int) -> bool:
        """Return whether to save after step `step`, the same on all ranks.  Not collective."""
        return self.schedule.is_due(step, self._may_retry.anyone)

    def save_if_best(self, state: Resumable) -> None:
        """Save a state that has just been evaluated, if that makes it one of the best of those that are saved.

        It is saved now or never: `checkpoint.when_busy=skip` does not skip it.
        """
        if self._config.keep_best and self._checkpoints.is_among_the_best(state.evaluation):
            self.try_save(state, may_skip=False)

    @property
    def best(self) -> tuple[float, int] | None:
        """The loss and the step of the best checkpoint; None where none is kept for that.  Not collective."""
        if self._config.keep_best:
            with suppress(OSError):
                return find_best(self._checkpoints.place)
        return None

    def try_save(self, state: Resumable, may_skip: bool = True) -> None:
        """Save as `fit` does: a failure is counted, not raised, until there are too many in a row.

        While steps are skipped there is nothing good to save: the first one that counts makes up for it.
        """
        is_begun = self._started == self._mark(state)  # as the best one, before it fell due
        if self._checkpoints.in_flight and (is_begun or (may_skip and self._config.when_busy == "skip")):
            return
        self._listener.settle()
        if state.num_skipped:
            self.schedule.postpone()
            return
        self.finish()
        if self._is_saved(state) and not self.schedule.num_failures:
            return
        self._start(state, background=self._config.mode == "async")
        if self._config.mode == "sync":
            self._collect()

    def save(self, state: Resumable, wait: bool) -> Path | str:
        """Save now; return the checkpoint's folder or URL, or where it will be.  Raises TrainingFailed if it fails."""
        self.finish()
        background = self._config.mode == "async" and not wait
        self._start(state, background)
        if not background and (error := self._collect(warns=False).error):
            raise TrainingFailed(error)
        path = str(self._checkpoints.place / name_of(state.step))
        return path if find_folder(path) is None else Path(path)

    def collect(self) -> None:
        """Collect the result of the save in flight if it has ended on every rank; never waits."""
        if self._checkpoints.in_flight and (self._is_written.everyone or self._is_overdue.anyone):
            self._collect(has_ended=self._is_written.everyone)

    def finish(self) -> SaveResult | None:
        """Wait for the save in flight, if there is one, report it and return how it went."""
        return self._collect() if self._checkpoints.in_flight else None

    def save_at_the_end(self, state: Resumable) -> None:
        """Save for good: wait for the save in flight, and try again a few times if necessary.

        Where the disk is full, wait about a minute for somebody to free some space: nothing else is left to do.
        """
        self.finish()
        error = ""
        for number, pause_s in enumerate((*_FINAL_PAUSES_S, *_PAUSES_FOR_ROOM_S)):
            if self._is_saved(state) or (number >= len(_FINAL_PAUSES_S) and TO_FIX not in error):
                break
            if number == len(_FINAL_PAUSES_S):
                left_s = sum(_PAUSES_FOR_ROOM_S)
                self._listener.warn(f"the final save waits up to {left_s:.0f} s for room on the disk: {error}")
            time.sleep(pause_s)
            self._start(state, background=False)
            error = self._collect(warns=False, is_last=True).error
        if not self._is_saved(state):
            raise TrainingFailed(
                f"the final save failed: {error}{'; then run the same command again' * (TO_FIX in error)}"
            )

    def begin(self) -> list[str]:
        """The run begins: take into account what it has seen in earlier attempts; returns what there is to say."""
        found = self._listener.experience()
        self.longest_s = max(self.longest_s, found.longest_save_s)
        self.schedule.pace.learn(found)
        return self.schedule.pace.sentences()

    def loaded(self, state: Resumable, is_own: bool) -> None:
        """A checkpoint was loaded, of this run if `is_own`: it need not be saved again.  Not collective."""
        self._saved = self._mark(state) if is_own else None

    @property
    def place(self) -> str:
        """The folder or URL that checkpoints go to."""
        return str(self._checkpoints.place)

    def forget(self) -> None:
        """What was saved is lost: the next save is needed even if it is of the same step.  Not collective."""
        self._saved = None

    @property
    def expected_s(self) -> float:
        """Seconds that a save takes: the longest so far; before the first, a guess."""
        return self.longest_s or guessed_s(self._expected_bytes)

    def wait(self, timeout_s: float) -> None:
        """Give the save in flight time to end, for a rank that is about to leave.  Not collective."""
        self._checkpoints.wait(timeout_s)

    def doubt(self, since: int | None) -> None:
        """Set aside what was saved after step `since`, from which on every step had to be skipped.  Not collective."""
        if since is not None and (done := self._checkpoints.doubt(since)):
            self._listener.warn(done)

    def wait_for_deleting(self) -> None:
        """Wait some time until pruned checkpoints are gone.  Not collective."""
        self._checkpoints.wait_for_deleting()

    def _mark(self, state: Resumable) -> tuple[object, ...]:
        """Return what tells a state from one of the same step: an evaluation, where a checkpoint is kept for it."""
        return state.step, state.eval_pending, self._config.keep_best > 0 and tuple(state.evaluation.items())

    def _is_saved(self, state: Resumable) -> bool:
        return self._saved == self._mark(state)

    def _start(self, state: Resumable, background: bool) -> None:
        self._listener.prepare(state)
        self._started = self._mark(state)
        self._listener.began(lambda: self._checkpoints.stage)
        with self._listener.waiting():
            self._checkpoints.start(state, background, self.schedule.begin(state.step))

    def _collect(self, warns: bool = True, has_ended: bool = False, is_last: bool = False) -> SaveResult:
        """Take the result of the save in flight, the same on all ranks, and report it.

        Raises TrainingFailed after too many failures in a row, unless `is_last`, and where the storage does not answer.
        """
        with self._listener.waiting():
            result = self._checkpoints.take(has_ended)
        self._listener.ended(result, self.schedule.pace.every_s)
        if result.lost == "storage":
            raise TrainingFailed(f"cannot save: {result.error} (checkpoint.timeout_s)")
        if result.error:
            self.schedule.failed()
            limit = self._config.max_failures
            count = f"failure {self.schedule.num_failures} of {limit} in a row"
            if self.schedule.num_failures >= limit and not is_last:
                raise TrainingFailed(f"cannot save: {result.error} ({count})")
            if warns:
                self._listener.warn(f"checkpoint not saved, training continues: {result.error} ({count})")
            return result
        self.schedule.succeeded(result.step)
        self.longest_s = max(self.longest_s, result.total_s)
        self.schedule.pace.learn(self._listener.experience())
        self._saved = self._started
        if result.warning:
            self._listener.warn(result.warning)
        return result
