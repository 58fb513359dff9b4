"""Accounts: what each step achieved and cost, written as one record per step.

On a GPU the numbers of a step are read, and its line is written, once the next step is queued: the host never waits for
the device while that has nothing else to do.  So a step is counted, and its time taken, when its numbers arrive.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import torch

from trainer.config import RunConfig
from trainer.data.loader import TrainLoader
from trainer.data.source import Source
from trainer.data.transfer import HostScalars
from trainer.distributed.world import World
from trainer.errors import TrainingFailed
from trainer.metrics.fanout import Metrics
from trainer.metrics.horizon import Horizon
from trainer.metrics.meter import Means, Meter, peak_flops, peak_memory_gib
from trainer.metrics.observer import Phases, StepObserver
from trainer.metrics.record import EVAL_FIELDS, TRAIN_FIELDS, Record
from trainer.metrics.skips import SkipCounter
from trainer.metrics.tally import Amount, Fields, Tally


class Update:
    """The outcome of one optimizer step, the same on all ranks.

    Its numbers may still be on their way from the device when the step returns: reading one waits for it.
    `num_targets` counts the targets of the global batch that are not ignored.
    """

    def __init__(self, loss: float | torch.Tensor, grad_norm: float | torch.Tensor, num_targets: int) -> None:
        self.num_targets = num_targets
        self._numbers = HostScalars(loss, grad_norm)

    def ended_at(self, before: Update | None, before_at: float) -> float | None:
        """Return when the device had finished the step, by `time.perf_counter`; waits for it.  None if that was before
        it returned.

        before, before_at: the step before, and when that had ended.
        """
        return self._numbers.arrived_at(None if before is None else before._numbers, before_at)

    @property
    def loss(self) -> float:
        """Mean loss over the targets of the global batch."""
        return self._numbers.read()[0]

    @property
    def grad_norm(self) -> float:
        """Global gradient norm before clipping."""
        return self._numbers.read()[1]

    @property
    def skipped(self) -> bool:
        """True if loss or gradient was not finite, and the weights were left alone."""
        return not all(map(math.isfinite, self._numbers.read()))


@dataclass
class _Queued:
    """A step that the device may still be at."""

    update: Update
    step: int
    began_at: float
    data_s: float
    is_profiled: bool
    closed_at: float = 0.0
    """When the host was done with it."""
    seconds: float = 0.0
    means: Means | None = None
    """Over the steps since the last line, with this one; known once it has been measured."""
    line: Record | None = None
    """What is to be written once it has been counted."""


class Progress(Protocol):
    """The counters of a run."""

    step: int
    tokens: int


class Accounts:
    """Times each step, counts the good ones, and writes their records.  All ranks keep the same accounts."""

    def __init__(
        self,
        config: RunConfig,
        world: World,
        metrics: Metrics,
        skips: SkipCounter,
        horizon: Horizon,
        phases: Phases,
        observers: Sequence[StepObserver],
        loader: object,
        on_time: Callable[[float, bool], None],
    ) -> None:
        """`on_time` is told how long each step took, once that is known, and whether a profiler slowed it down."""
        self._config, self._world, self._metrics = config, world, metrics
        self._skips, self._phases, self._observers, self._loader = skips, phases, observers, loader
        self._on_time = on_time
        self.horizon = horizon
        self.reads_late = world.device.type != "cpu"
        """True if the numbers of a step are read, and its line is written, once the next one is queued; the same on all
        ranks."""
        self.productive_s = 0.0
        """Seconds of the steps that counted."""
        self.step_s = 0.0
        """Seconds of the last step; 0 before the second, since the first one compiles and allocates."""
        self.evaluated_step: int | None = None
        """Step of the last evaluation."""
        self.is_saved_after: Callable[[int], bool] = lambda step: False
        """Whether a save follows a step."""
        self._latest: Update | None = None
        self._ended: tuple[Update | None, float] = None, 0.0
        """The last step that has been measured, and when it had ended."""
        self.pending: _Queued | None = None
        """The step that has not been counted yet."""
        self._logged, self._logged_aside = Tally(world, TRAIN_FIELDS), Tally(world, EVAL_FIELDS)
        self.restart()

    def restart(self) -> None:
        """Begin to measure anew: a loop begins."""
        if self.pending is not None:
            self._measured(self.pending)  # of the loop before
        self._meter, self._num_steps = Meter(), 0
        self._memory_gib = peak_memory_gib(self._world.device)
        self._started = self._data_s = 0.0

    # -- one step ------------------------------------------------------------------------------------------------

    @contextmanager
    def step(self, progress: Progress) -> Iterator[None]:
        """Account for one step: take its micro-batches with `take`, and close it with `record`, inside the block."""
        step = progress.step + 1
        for observer in self._observers:
            observer.begin_step(step)
        self._started = time.perf_counter()
        yield
        for observer in reversed(self._observers):
            observer.end_step(step)

    def take(self, batches: Iterator[Any], number: int, step: int) -> list[Any]:
        """Return the micro-batches of `step`.  Raises TrainingFailed if the loader has ended."""
        taken = list(islice(batches, number))
        if len(taken) < number:
            raise TrainingFailed(f"step {step}: the loader from build_loader ended; it must be endless")
        self._data_s = time.perf_counter() - self._started
        self._phases.enter("forward")
        return taken

    def record(
        self, update: Update, progress: Progress, lr: float, flops_per_token: Callable[[], float], is_last: bool
    ) -> Record:
        """Close the step that `progress` has just completed; return its record, written if a line is due: now, or where
        numbers are read late with those of the step.

        `flops_per_token` walks over all modules of the model, so it is only called when `mfu` is read.

        Collective where a line is due: one small CPU all-reduce, and what `Tally.take` says.  Raises TrainingFailed, on
        all ranks alike, after too many skipped steps in a row.
        """
        step = progress.step
        is_needed = step == 1 or self.horizon.may_end_at(step) or is_last
        is_line = is_needed or self._config.log.due(step)
        self.settle()
        is_profiled = self._config.log.profiles(step)
        queued = self.pending = _Queued(update, step, self._started, self._data_s, is_profiled)
        self._latest = update
        logged: Fields = {}
        if is_line:  # said while the device is at work
            mine = (peak_memory_gib(self._world.device), *self._logged.news())
            self._memory_gib, *news = self._world.max(mine)
            logged = self._logged.take(news)
        record = self._train_record(queued, progress, lr, flops_per_token, logged)
        queued.line, queued.closed_at = record if is_line else None, time.perf_counter()
        self._metrics.progress(step)
        # Evaluation and saving are timed by themselves: this step must not be part of that, and its line comes before.
        if is_needed or not self.reads_late or self._config.eval.due(step) or self.is_saved_after(step):
            self.settle()
        return record

    def _measured(self, queued: _Queued) -> Means:
        """Take a step into the means, once, and return them; waits for the device.

        A step lasts from when it began, or the one before had ended if that was later, until the device has finished
        it: what the host does meanwhile takes time only where it keeps the device from working.
        """
        if queued.means is None:
            update = queued.update
            ended_at = update.ended_at(*self._ended) or queued.closed_at
            queued.seconds = ended_at - max(queued.began_at, self._ended[1])
            self._ended = update, ended_at
            self._meter.count(queued.seconds, queued.data_s, update.num_targets, queued.is_profiled)
            self._meter.count_loss(update.loss, update.skipped)
            queued.means = self._meter.read()
            self.step_s = queued.seconds if self._num_steps else 0.0
            self._num_steps += 1
            self._on_time(queued.seconds, queued.is_profiled)
        return queued.means

    def settle(self) -> None:
        """Read the numbers of the pending step, count it as good or skipped, and write its line; waits for the device.

        Raises TrainingFailed, on all ranks alike, after too many skipped steps in a row.
        """
        if self.pending is None:
            return
        queued, self.pending = self.pending, None
        self._measured(queued)
        update = queued.update
        self.productive_s += queued.seconds * (not update.skipped)
        self._skips.count(update.loss, update.grad_norm, queued.step)
        if queued.line is not None:
            self._metrics.write(queued.line)
            self.horizon.trained(queued.line)
            self._meter = Meter()

    @property
    def grad_norm(self) -> float:
        """The gradient norm of the last step before clipping; reading it waits for the device."""
        return math.nan if self._latest is None else self._latest.grad_norm

    @property
    def in_streak(self) -> bool:
        """True if the last steps were skipped."""
        return self._skips.in_a_row > 0

    @property
    def good_until(self) -> int | None:
        """The last step that counted, once there have been too many skipped ones since."""
        return self._skips.failed_since

    def check_end(self, step: int) -> None:
        """Raise TrainingFailed if the run ends at `step` in steps that were skipped."""
        self._skips.check_end(step)

    def discard(self) -> None:
        """Forget the pending step, and what was logged for the next line: an earlier checkpoint was loaded."""
        if self.pending is not None:
            self._measured(self.pending)  # whose record may still be read
            self.pending = None
        self._logged.clear()

    # -- records -------------------------------------------------------------------------------------------------

    def log(self, name: str, value: Amount, over: Amount | None) -> None:
        """Add to a field of the next `train` line; inside `evaluation`, of the next `eval` line."""
        self._logged.add(name, value, over)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Keep what is logged inside the block for the record of the evaluation."""
        self._logged, self._logged_aside = self._logged_aside, self._logged
        self._logged.clear()  # of an evaluation that was abandoned
        try:
            yield
        finally:
            self._logged, self._logged_aside = self._logged_aside, self._logged

    def _train_record(
        self,
        queued: _Queued,
        progress: Progress,
        lr: float,
        flops_per_token: Callable[[], float],
        logged: Fields,
    ) -> Record:
        update, skipped_before = queued.update, self._skips.total
        return Record(
            kind="train",
            step=progress.step,
            loss=lambda: update.loss,
            mean_loss=lambda: self._measured(queued).loss,
            grad_norm=lambda: update.grad_norm,
            lr=lr,
            tokens=progress.tokens,
            tokens_per_s=lambda: self._measured(queued).tokens_per_s,
            step_s=lambda: self._measured(queued).step_s,
            data_s=lambda: self._measured(queued).data_s,
            mfu=lambda: self._mfu(flops_per_token, self._measured(queued).step_s),
            peak_memory_gib=self._memory_gib,
            skipped=lambda: skipped_before + update.skipped,
            **({"profiled": True} if queued.is_profiled and not self._meter.has_steps else {}),
            **logged | self._epochs(),
        )

    def _epochs(self) -> Fields:
        return {**self._loader.epochs} if isinstance(self._loader, TrainLoader) else {}

    def evaluated(self, step: int, total: torch.Tensor, count: float, eval_loader: object, started: float) -> Record:
        """Return the record of an evaluation, and write it; to be called inside `evaluation`.

        total, count: this rank's sum of losses, and what to divide it by.  started: when it began, by `perf_counter`.
        Collective: one small CPU all-reduce, and what `Tally.take` says.
        """
        self.evaluated_step = step
        loss_sum, count_of_all, *news = self._world.sum([float(total), count, *self._logged.news()])
        logged, loss = self._logged.take(news) | self._epochs(), loss_sum / (count_of_all or 1)
        eval_s = time.perf_counter() - started
        source = getattr(eval_loader, "source", None)
        bits = source.bits_per_byte(loss) if isinstance(source, Source) else None
        shown = {} if bits is None else {"bits_per_byte": bits}
        return self._metrics.write(Record(kind="eval", step=step, loss=loss, **shown, eval_s=eval_s, **logged))

    def _mfu(self, flops_per_token: Callable[[], float], step_s: float) -> float | None:
        """Return model FLOPs over the devices' peak (Chowdhery et al. 2022, arXiv:2204.02311, appendix B)."""
        peak = peak_flops(self._world.device)
        if peak is None:
            return None
        tokens = self._config.step_tokens
        return flops_per_token() * tokens / step_s / (peak * self._world.size)
