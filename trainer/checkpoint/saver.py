"""Decides when to save, starts each save, and retries failed ones.

`Saver` handles due saves, retries and the final save.  Around each save, it also locks the run's folders, tells the
Monitor and records metrics.  `Checkpoints` (saves.py) performs the saves, one at a time.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.checkpoint.interval import Costs, costs_of, describe_costs, estimated_save_s
from trainer.checkpoint.manifest import checkpoint_name
from trainer.checkpoint.retention import find_best
from trainer.checkpoint.saves import Checkpoints, SaveResult
from trainer.checkpoint.storage import SUSPECT, describe
from trainer.config.schema import CheckpointSection, RunConfig
from trainer.distributed.monitor import Monitor
from trainer.errors import TrainingFailed, UserError
from trainer.files import local_path
from trainer.metrics.goodput import RunHistory
from trainer.metrics.record import Record
from trainer.metrics.step_metrics import StepMetrics
from trainer.metrics.writers import Metrics, warn

if TYPE_CHECKING:
    from trainer.lifecycle.folder import RunFolder
    from trainer.lifecycle.resume import Resume
    from trainer.lifecycle.state import TrainState

_FINAL_PAUSES_S = (0.0, 1.0, 3.0)
"""Pauses in seconds before each attempt at the final save."""
_DISK_FULL_PAUSES_S = (5.0, 10.0, 20.0, 25.0)
"""Pauses in seconds before further attempts, which are made only if the disk is full."""


class Saver:
    """Saves the training state when a save is due, when an evaluation is among the best, on request, and at the end.

    Methods are collective unless documented otherwise; properties are not.

    With `checkpoint.mode=async`, at most one save is in flight.  Each step's all-reduce carries this rank's `votes`,
    and `take_votes` gets those of all ranks: whether the save has ended on every rank, so that `take_finished_save`
    does not wait for the storage unless the save is overdue, and whether it is time for the next save by rank 0's
    clock.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        config: RunConfig,
        *,
        folder: RunFolder,
        resume: Resume,
        step_metrics: StepMetrics,
        metrics: Metrics,
        expected_bytes: int,
    ) -> None:
        """expected_bytes: estimate of how many bytes this rank writes per save."""
        self._checkpoints, self._config, self._world = checkpoints, config.checkpoint, checkpoints.world
        self._folder, self._resume = folder, resume
        self._step_metrics, self._metrics = step_metrics, metrics
        self._monitor: Monitor = self._world.monitor
        self._expected_bytes = expected_bytes
        policy: SavePolicy
        if isinstance(config.checkpoint.every, int):
            policy = FixedInterval(config.checkpoint.every)
        else:
            num_nodes = self._world.env.num_nodes
            policy = AdaptiveInterval(
                config.checkpoint,
                costs=functools.partial(costs_of, config, num_nodes, expected_bytes),
                num_nodes=num_nodes,
                step_s=lambda: step_metrics.step_s,
            )
        self.schedule = SaveSchedule(policy)
        self._is_written = self._is_overdue = self._is_time = False
        """What the last all-reduce said; see `take_votes`."""
        self._started_key: tuple[object, ...] | None = None
        """The key (see `_state_key`) of the state that was last passed to a save."""
        self._saved_key: tuple[object, ...] | None = None
        """The key of the state that was last saved, or loaded from this run; None if nothing was."""
        self._has_acquired_folder = self._has_checked_state = False
        self.longest_save_s = 0.0
        """Duration of the longest save so far, in seconds."""

    def votes(self) -> list[bool]:
        """Return what this rank tells the others in the step's all-reduce.  Not collective.

        Its save has ended; its save is overdue; on rank 0, it is time to save.
        """
        is_time = self._world.is_main and self.schedule.is_time()
        return [self._checkpoints.is_written, self._checkpoints.is_overdue, is_time]

    def take_votes(self, num_written: float, num_overdue: float, num_time: float) -> None:
        """Record how many ranks have voted yes on each of `votes`.  Not collective."""
        self._is_written, self._is_overdue = num_written == self._world.size, num_overdue > 0
        self._is_time = num_time > 0

    def is_due(self, step: int) -> bool:
        """Return whether to save after step `step`, the same on all ranks.  Call it once a step.  Not collective."""
        return self.schedule.is_due(step, self._is_time)

    def may_be_due(self, step: int) -> bool:
        """Return whether a save after step `step` is planned, retries left aside.  Not collective."""
        return self.schedule.policy.is_due(step, self._is_time)

    def save_if_best(self, state: TrainState) -> None:
        """Save a state that has just been evaluated if it ranks among the best saved ones.  One broadcast, and a save.

        `checkpoint.when_busy=skip` does not apply to this save, since it cannot be made up for later.
        """
        if not self._config.keep_best:
            return
        is_best = True  # if the storage is unreachable, the save will report it
        with suppress(OSError):
            is_best = self._world.is_main and self._checkpoints.retention.would_keep(state.evaluation)
        if self._world.broadcast(is_best):
            self.try_save(state, may_skip=False)

    @property
    def best(self) -> tuple[float, int] | None:
        """The metric and step of the best checkpoint; None if it is unknown or `keep_best` is 0.  Not collective."""
        if self._config.keep_best:
            with suppress(OSError):
                return find_best(self._checkpoints.storage)
        return None

    def try_save(self, state: TrainState, may_skip: bool = True) -> None:
        """Save as `fit` does: failures are counted, and TrainingFailed is raised only after too many in a row.

        While steps are being skipped the state is not worth saving, so the save is postponed until the next good step.
        """
        is_started = self._started_key == self._state_key(state)  # by `save_if_best`
        if self._checkpoints.in_flight and (is_started or (may_skip and self._config.when_busy == "skip")):
            return
        self._step_metrics.finish_pending_step()
        if state.num_skipped:
            self.schedule.is_postponed = True
            return
        self.finish()
        if self._is_saved(state) and not self.schedule.num_failures:
            return
        self._start(state, background=self._config.mode == "async")
        if self._config.mode == "sync":
            self._collect()

    def save(self, state: TrainState, wait: bool) -> Path | str:
        """Save now; return the (future) folder or URL of the checkpoint.

        With `checkpoint.mode=async` and without `wait`, the save continues in the background, and a failure is reported
        when its result is taken.  Otherwise raises TrainingFailed if the save fails.
        """
        self.finish()
        background = self._config.mode == "async" and not wait
        if not self._has_checked_state:
            self._checkpoints.check(state)
            self._has_checked_state = True
        self._start(state, background)
        if not background and (error := self._collect(warns=False).error):
            raise TrainingFailed(error)
        path = str(self._checkpoints.storage / checkpoint_name(state.step))
        return path if local_path(path) is None else Path(path)

    def take_finished_save(self) -> None:
        """Take the result of the save in flight if it has ended on every rank or is overdue on any."""
        if self._checkpoints.in_flight and (self._is_written or self._is_overdue):
            self._collect()

    def finish(self) -> SaveResult | None:
        """Wait for the save in flight, report it and return its result, or None."""
        return self._collect() if self._checkpoints.in_flight else None

    def save_final(self, state: TrainState) -> None:
        """Make the final save: wait for the save in flight, then save with a few retries.

        If the disk is full, keep retrying for about a minute, in case some space is freed.  Raises TrainingFailed.
        """
        self.finish()
        result: SaveResult | None = None
        for attempt, pause_s in enumerate((*_FINAL_PAUSES_S, *_DISK_FULL_PAUSES_S)):
            if self._is_saved(state) or (attempt >= len(_FINAL_PAUSES_S) and not (result and result.is_disk_full)):
                break
            if attempt == len(_FINAL_PAUSES_S) and result:
                total_s = sum(_DISK_FULL_PAUSES_S)
                self._warn(f"the final save waits up to {total_s:.0f} s for disk space: {result.error}")
            time.sleep(pause_s)
            self._start(state, background=False)
            result = self._collect(warns=False, is_last=True)
        if result and result.error:
            advice = "; then run the same command again" * result.is_disk_full
            raise TrainingFailed(f"the final save failed: {result.error}{advice}")

    def begin(self) -> list[str]:
        """Load the measurements of this run's earlier attempts; return lines that describe the save policy."""
        history = self._metrics.history()
        self.longest_save_s = max(self.longest_save_s, history.longest_save_s)
        self.schedule.policy.update(history)
        return self.schedule.policy.describe()

    def record_loaded(self, state: TrainState, is_own: bool) -> None:
        """Record that a checkpoint was loaded; if it is this run's own, it need not be saved again.  Not collective."""
        self._saved_key = self._state_key(state) if is_own else None

    @property
    def expected_save_s(self) -> float:
        """Expected duration of a save in seconds: the longest so far, or an estimate before the first."""
        return self.longest_save_s or estimated_save_s(self._expected_bytes)

    def wait(self, timeout_s: float) -> None:
        """Wait for the save in flight, at most `timeout_s`, before this rank exits.  Not collective."""
        self._checkpoints.wait(timeout_s)

    def quarantine_since(self, first_step: int | None) -> None:
        """Quarantine the checkpoints of `first_step` and later steps, after which every step was skipped.

        Call this after the run has failed.  The next start then resumes from an older checkpoint, if there is one.  No
        step is quarantined twice.  Not collective: acts on rank 0 only.
        """
        checkpoints = self._checkpoints
        is_busy = checkpoints.in_flight is not None and not checkpoints.is_written
        if first_step is None or not self._world.is_main or is_busy:
            return
        try:
            names = checkpoints.retention.names_to_quarantine(first_step)
            for name in names:
                checkpoints.storage.quarantine(name, SUSPECT)
        except Exception as error:  # the storage has failed as well: leave the checkpoints in place
            self._warn(f"cannot quarantine the checkpoints saved after step {first_step}: {describe(error)}")
            return
        if names:
            renamed = ", ".join(f"{name} was quarantined as {SUSPECT}-{name}" for name in names)
            self._warn(f"{renamed}: every later step failed; the same command resumes from an earlier checkpoint")

    def wait_for_deletion(self) -> None:
        """Wait for the deletion of pruned checkpoints, up to a time limit.  Not collective."""
        self._checkpoints.wait_for_deletion()

    def _warn(self, text: str) -> None:
        if self._world.is_main:
            warn(text)

    def _state_key(self, state: TrainState) -> tuple[object, ...]:
        """Return a key that changes with the step, `eval_pending` and, with `checkpoint.keep_best`, the evaluation."""
        evaluation = self._config.keep_best > 0 and tuple(state.evaluation.items())
        return state.step, state.eval_pending, evaluation

    def _is_saved(self, state: TrainState) -> bool:
        return self._saved_key == self._state_key(state)

    def _start(self, state: TrainState, background: bool) -> None:
        if not self._has_acquired_folder:
            self._world.agreed(self._folder.acquire)
            self._has_acquired_folder = True
        self._resume.supersede_if_rolled_back(state.step)
        self._step_metrics.finish_pending_step()
        self._started_key = self._state_key(state)
        self._monitor.begin_save(lambda: self._checkpoints.activity)
        with self._monitor.during("save"):
            self._checkpoints.start(state, background, self.schedule.begin(state.step))

    def _collect(self, warns: bool = True, is_last: bool = False) -> SaveResult:
        """Collect and report the result of the save in flight, which is the same on all ranks.

        Raises UserError if the state cannot be saved at all, and TrainingFailed if the storage does not respond, or
        after too many consecutive failures unless `is_last`.
        """
        with self._monitor.during("save"):
            result = self._checkpoints.take_result()
        self._monitor.end_save()
        if not result.error:
            times = {"blocked_s": result.blocked_s, "total_s": result.total_s}
            every_s = self.schedule.policy.every_s
            times |= {} if every_s is None else {"every_s": every_s}
            self._metrics.write(Record(kind="checkpoint", step=result.step, **times, bytes=result.bytes))
        if result.is_mistake:
            raise UserError(result.error)
        if result.lost == "storage":
            raise TrainingFailed(f"cannot save: {result.error} (checkpoint.timeout_s)")
        if result.error:
            self.schedule.record_failure()
            limit = self._config.max_failures
            count = f"failure {self.schedule.num_failures} of {limit} in a row"
            if self.schedule.num_failures >= limit and not is_last:
                raise TrainingFailed(f"cannot save: {result.error} ({count})")
            if warns:
                self._warn(f"checkpoint not saved, training continues: {result.error} ({count})")
            return result
        self.schedule.record_success(result.step)
        self.longest_save_s = max(self.longest_save_s, result.total_s)
        self.schedule.policy.update(self._metrics.history())
        self._saved_key = self._started_key
        if result.warning:
            self._warn(result.warning)
        return result


class SaveSchedule:
    """Schedules saves by a policy, and retries failed ones after a pause that doubles with each failure.

    All ranks make the same calls.  Only rank 0's clock counts: each step's all-reduce sends rank 0's `is_time` to the
    others.
    """

    FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
    """The pause after the first failure, and the limit up to which it doubles."""

    def __init__(self, policy: SavePolicy, clock: Callable[[], float] = time.monotonic) -> None:
        self.policy, self._clock = policy, clock
        self.num_failures = 0
        """Number of consecutive failed saves."""
        self._retry_at = 0.0
        self.is_postponed = False
        """True if a due save was postponed until the next step, because the state was not worth saving."""
        self._unsaved_steps: list[int] = []
        """Steps at which a save was due, with no successful save since then."""

    def is_time(self) -> bool:
        """Return whether it is time to save: by the policy's clock or, after a failed save, once the pause is over."""
        return self._clock() >= self._retry_at if self.num_failures else self.policy.is_time()

    def is_due(self, step: int, is_time: bool) -> bool:
        """Return whether to save after step `step`.  `is_time`: what `is_time()` returned on rank 0."""
        is_due = self.policy.is_due(step, is_time and not self.num_failures)
        if is_due:
            self._unsaved_steps.append(step)
        if self.num_failures:
            return is_time
        return is_due or self.is_postponed

    def begin(self, step: int) -> list[int]:
        """Record that a save of step `step` has started; return the earlier steps whose due saves it replaces."""
        self.is_postponed = False
        self.policy.record_start()
        return [due for due in self._unsaved_steps if due < step]

    def record_failure(self) -> None:
        pause = min(self.FIRST_PAUSE_S * 2**self.num_failures, self.LONGEST_PAUSE_S)
        self.num_failures += 1
        self._retry_at = self._clock() + pause

    def record_success(self, step: int) -> None:
        self.num_failures = 0
        self._unsaved_steps = [due for due in self._unsaved_steps if due > step]


# ---------------------------------------------------------------------------------------------------------------
# After which steps a save is due


class SavePolicy:
    """Decides after which steps to save, the same on all ranks."""

    @property
    def every_s(self) -> float | None:
        """Current interval between saves in seconds; None if the interval is a number of steps."""
        return None

    def is_time(self) -> bool:
        """Return whether it is time to save by this rank's clock.  Only rank 0's clock matters."""
        return False

    def is_due(self, step: int, is_time: bool) -> bool:
        """Return whether a save is due after step `step`.  `is_time`: what `is_time()` returned on rank 0."""
        raise NotImplementedError

    def record_start(self) -> None:
        """Record that a save has started."""

    def update(self, history: RunHistory) -> None:
        """Update the interval from the run's measurements.  Only the update on rank 0 matters."""

    def describe(self) -> list[str]:
        """Return lines that describe the policy to the user."""
        return []


class FixedInterval(SavePolicy):
    """Saves every `every` steps; 0 disables saving."""

    def __init__(self, every: int) -> None:
        self._every = every

    def is_due(self, step: int, is_time: bool) -> bool:
        return self._every > 0 and step % self._every == 0


class AdaptiveInterval(SavePolicy):
    """Saves at the Young/Daly interval: rank 0 decides by its clock, and each step's all-reduce tells the other ranks.

    Steps that are multiples of `checkpoint.keep_every` are saved as well.
    """

    def __init__(
        self,
        config: CheckpointSection,
        costs: Callable[[RunHistory | None], Costs],
        num_nodes: int,
        step_s: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """costs: returns the costs of saves and failures, given the run's measurements.

        step_s: returns the duration of a step in seconds.
        """
        self._keep_every, self._num_nodes = config.keep_every, num_nodes
        self._costs_of, self._step_s, self._clock = costs, step_s, clock
        self._last_save: float | None = None
        """When the last save started, by `clock`; before the first save, when the first step ended."""
        self.costs = costs(None)

    @property
    def every_s(self) -> float:
        return self.costs.best_interval_s

    def is_time(self) -> bool:
        """Return whether the next save is due closer to the end of this step than to the end of the next step."""
        now = self._clock()
        if self._last_save is None:
            self._last_save = now
        return now - self._last_save + 1.5 * self._step_s() >= self.every_s

    def is_due(self, step: int, is_time: bool) -> bool:
        return is_time or (self._keep_every > 0 and step % self._keep_every == 0)

    def record_start(self) -> None:
        self._last_save = self._clock()

    def update(self, history: RunHistory) -> None:
        self.costs = self._costs_of(history)

    def describe(self) -> list[str]:
        by_topic = describe_costs(self.costs, self.every_s, self._num_nodes)
        return ["checkpoint.every=auto:", *(f"  {topic}: {text}" for topic, text in by_topic.items())]
