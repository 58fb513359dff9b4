"""Decides when to save, tracks the save in flight, and retries failed saves."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Protocol

from trainer.checkpoint.error_messages import DISK_FULL_ADVICE
from trainer.checkpoint.interval import estimated_save_s
from trainer.checkpoint.manifest import name_of
from trainer.checkpoint.retention import find_best
from trainer.checkpoint.save_policy import SavePolicy, build_save_policy
from trainer.checkpoint.snapshot import Savable
from trainer.checkpoint.store import Checkpoints, SaveResult
from trainer.config import RunConfig
from trainer.distributed.channel import StepSync
from trainer.errors import TrainingFailed
from trainer.files import find_folder
from trainer.metrics.goodput import RunHistory

_FINAL_PAUSES_S = (0.0, 1.0, 3.0)
"""Pause before each attempt of the final save."""
_DISK_FULL_PAUSES_S = (5.0, 10.0, 20.0, 25.0)
"""Pauses before further attempts if the disk is full."""


class Resumable(Savable, Protocol):
    """State that records whether the evaluation at its step is still pending."""

    eval_pending: bool


class SaveListener(Protocol):
    """Receives events of saves, and provides measurements of the run so far."""

    @property
    def step_s(self) -> float:
        """Duration of a step in seconds; 0 if it is not known yet."""
        ...

    def experience(self) -> RunHistory:
        """Return the run's measurements of saves and failures; empty except on rank 0."""

    def expects(self, falls_due: Callable[[int], bool]) -> None:
        """Take the function that tells, after the all-reduce of step `step`, whether a save is due after that step."""

    def settle(self) -> None:
        """Resolve whether the latest steps were skipped, if that is not known yet."""

    def prepare(self, state: Resumable) -> None:
        """Prepare for a save that is about to begin.  Collective."""

    def waiting(self) -> AbstractContextManager[None]:
        """Return a context manager for a block in which training waits for a save."""

    def began(self, stage: Callable[[], str]) -> None:
        """Note that a save has begun.  `stage()` describes what it is doing."""

    def ended(self, result: SaveResult, every_s: float | None) -> None:
        """Note that the save in flight has succeeded or failed.  `every_s`: the save interval in seconds, if known."""

    def warn(self, text: str) -> None:
        """Report a problem that does not stop training."""


class SaveSchedule:
    """Schedules saves by a policy, and retries failed ones after a pause that doubles with each further failure.

    All ranks make the same calls.  Only rank 0 reads the clock: the step's all-reduce broadcasts its `may_retry`.
    """

    FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0

    def __init__(self, policy: SavePolicy, clock: Callable[[], float] = time.monotonic) -> None:
        self.policy, self._clock = policy, clock
        self.num_failures = 0
        """Number of consecutive failed saves."""
        self._retry_at = 0.0
        self._is_postponed = False
        self._owed: list[int] = []

    def may_retry(self) -> bool:
        """Return whether the pause after a failed save is over."""
        return self.num_failures > 0 and self._clock() >= self._retry_at

    def is_due(self, step: int, may_retry: bool) -> bool:
        """Return whether to save after step `step`.  `may_retry`: rank 0's answer."""
        falls_due = self.policy.falls_due(step)
        if falls_due:
            self._owed.append(step)
        if self.num_failures:
            return may_retry
        return falls_due or self._is_postponed

    def postpone(self) -> None:
        """Postpone the save that is due to the next step, because the current state is not worth saving."""
        self._is_postponed = True

    def begin(self, step: int) -> list[int]:
        """Note that a save of step `step` begins; return the earlier steps whose due saves it replaces."""
        self._is_postponed = False
        self.policy.began()
        return [due for due in self._owed if due < step]

    def failed(self) -> None:
        pause = min(self.FIRST_PAUSE_S * 2**self.num_failures, self.LONGEST_PAUSE_S)
        self.num_failures += 1
        self._retry_at = self._clock() + pause

    def succeeded(self, step: int) -> None:
        self.num_failures = 0
        self._owed = [due for due in self._owed if due > step]


class Saver:
    """Saves a state at intervals, on request and at the end.  Methods are collective unless they say otherwise.

    With `checkpoint.mode=async` at most one save is in flight.  The all-reduce of each step tells when it has ended on
    every rank, so that collecting its result never waits.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        config: RunConfig,
        step_sync: StepSync,
        listener: SaveListener,
        expected_bytes: int,
    ) -> None:
        """`expected_bytes`: estimate of the bytes that this rank writes per save."""
        self._checkpoints, self._config, self._listener = checkpoints, config.checkpoint, listener
        self._expected_bytes = expected_bytes
        policy = build_save_policy(config, checkpoints.world, step_sync, expected_bytes, lambda: listener.step_s)
        self.schedule = SaveSchedule(policy)
        listener.expects(policy.falls_due)
        self._is_written = step_sync.register(lambda: checkpoints.is_written)
        self._is_overdue = step_sync.register(lambda: checkpoints.is_overdue)
        self._may_retry = step_sync.register(lambda: checkpoints.world.is_main and self.schedule.may_retry())
        self._started: tuple[object, ...] | None = None
        self._saved: tuple[object, ...] | None = None
        """`_mark` of the newest checkpoint of this run."""
        self.longest_s = 0.0
        """Duration of the longest save in seconds."""

    def due(self, step: int) -> bool:
        """Return whether to save after step `step`, the same on all ranks.  Not collective."""
        return self.schedule.is_due(step, self._may_retry.any_yes)

    def save_if_best(self, state: Resumable) -> None:
        """Save a state that has just been evaluated if it ranks among the best saved ones.

        This save is never skipped, not even with `checkpoint.when_busy=skip`, since it cannot be made later.
        """
        if self._config.keep_best and self._checkpoints.is_among_the_best(state.evaluation):
            self.try_save(state, may_skip=False)

    @property
    def best(self) -> tuple[float, int] | None:
        """The loss and step of the best checkpoint; None if best checkpoints are not kept.  Not collective."""
        if self._config.keep_best:
            with suppress(OSError):
                return find_best(self._checkpoints.storage)
        return None

    def try_save(self, state: Resumable, may_skip: bool = True) -> None:
        """Save as `fit` does: failures are counted, and raised only after too many in a row.

        While steps are being skipped the state is not worth saving, so the save is postponed to the next good step.
        """
        is_begun = self._started == self._mark(state)  # it was already saved as one of the best
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
        """Save now; return the (future) folder or URL of the checkpoint.  Raises TrainingFailed if the save fails."""
        self.finish()
        background = self._config.mode == "async" and not wait
        self._start(state, background)
        if not background and (error := self._collect(warns=False).error):
            raise TrainingFailed(error)
        path = str(self._checkpoints.storage / name_of(state.step))
        return path if find_folder(path) is None else Path(path)

    def collect(self) -> None:
        """Collect the result of the save in flight if it has ended on every rank.  Never waits."""
        if self._checkpoints.in_flight and (self._is_written.all_yes or self._is_overdue.any_yes):
            self._collect(has_ended=self._is_written.all_yes)

    def finish(self) -> SaveResult | None:
        """Wait for the save in flight, if any, report it and return its result."""
        return self._collect() if self._checkpoints.in_flight else None

    def save_final(self, state: Resumable) -> None:
        """Make the final save: wait for the save in flight, then save with a few retries.

        If the disk is full, keep retrying for about a minute, in case somebody frees some space.
        """
        self.finish()
        error = ""
        for number, pause_s in enumerate((*_FINAL_PAUSES_S, *_DISK_FULL_PAUSES_S)):
            if self._is_saved(state) or (number >= len(_FINAL_PAUSES_S) and DISK_FULL_ADVICE not in error):
                break
            if number == len(_FINAL_PAUSES_S):
                left_s = sum(_DISK_FULL_PAUSES_S)
                self._listener.warn(f"the final save waits up to {left_s:.0f} s for room on the disk: {error}")
            time.sleep(pause_s)
            self._start(state, background=False)
            error = self._collect(warns=False, is_last=True).error
        if not self._is_saved(state):
            raise TrainingFailed(
                f"the final save failed: {error}{'; then run the same command again' * (DISK_FULL_ADVICE in error)}"
            )

    def begin(self) -> list[str]:
        """Start with the measurements of earlier attempts; return lines that describe the save policy."""
        found = self._listener.experience()
        self.longest_s = max(self.longest_s, found.longest_save_s)
        self.schedule.policy.update(found)
        return self.schedule.policy.describe()

    def loaded(self, state: Resumable, is_own: bool) -> None:
        """Note that a checkpoint was loaded.  If it is this run's own, it need not be saved again.  Not collective."""
        self._saved = self._mark(state) if is_own else None

    @property
    def storage(self) -> str:
        """The folder or URL that checkpoints go to."""
        return str(self._checkpoints.storage)

    def forget(self) -> None:
        """Note that the saved checkpoints are lost, so that the same step will be saved again.  Not collective."""
        self._saved = None

    @property
    def expected_s(self) -> float:
        """Expected duration of a save in seconds: the longest so far, or an estimate before the first."""
        return self.longest_s or estimated_save_s(self._expected_bytes)

    def wait(self, timeout_s: float) -> None:
        """Give the save in flight time to end before this rank exits.  Not collective."""
        self._checkpoints.wait(timeout_s)

    def quarantine_since(self, since: int | None) -> None:
        """Quarantine checkpoints saved since step `since`, after which every step was skipped.  Not collective."""
        if since is not None and (done := self._checkpoints.quarantine_since(since)):
            self._listener.warn(done)

    def wait_for_deleting(self) -> None:
        """Wait for the deletion of pruned checkpoints, up to a time limit.  Not collective."""
        self._checkpoints.wait_for_deleting()

    def _mark(self, state: Resumable) -> tuple[object, ...]:
        """Return a key that identifies the state: its step, and its evaluation if best checkpoints are kept."""
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
        """Collect and report the result of the save in flight, which is the same on all ranks.

        Raises TrainingFailed if the storage does not respond, and, unless `is_last`, after too many consecutive
        failures.
        """
        with self._listener.waiting():
            result = self._checkpoints.take(has_ended)
        self._listener.ended(result, self.schedule.policy.every_s)
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
        self.schedule.policy.update(self._listener.experience())
        self._saved = self._started
        if result.warning:
            self._listener.warn(result.warning)
        return result
