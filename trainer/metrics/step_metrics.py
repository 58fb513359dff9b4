"""Times each training step, counts good and skipped steps, and writes one record per logged step.

On a GPU, the loss and gradient norm of a step are read, and its line is written, only after the next step has been
queued, so the host never waits for an otherwise idle device.  A step is therefore counted and timed when its numbers
arrive on the host.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from trainer.data.loader import TrainLoader
from trainer.data.source import Source
from trainer.data.transfer import HostScalars
from trainer.errors import TrainingFailed
from trainer.metrics.logged_sums import Amount, Fields, LoggedSums
from trainer.metrics.record import EVAL_FIELDS, TRAIN_FIELDS, Record
from trainer.metrics.step_timer import StepMeans, StepTimer, peak_flops, peak_memory_gib

if TYPE_CHECKING:
    from trainer.lifecycle.assembly import Run


class Update:
    """The outcome of one optimizer step, identical on all ranks.

    The loss and gradient norm may still be in flight from the device when the step returns; reading either waits for
    the transfer.  `num_targets` is the number of targets in the global batch that are not ignored.
    """

    def __init__(self, loss: float | torch.Tensor, grad_norm: float | torch.Tensor, num_targets: int) -> None:
        self.num_targets = num_targets
        self._numbers = HostScalars(loss, grad_norm)

    def ended_at(self, before: Update | None, before_at: float) -> float | None:
        """Return the `time.perf_counter` time at which the device finished the step.  Waits for the device.

        Returns None if the numbers were on the host from the start, so that the step was finished when it returned.

        before, before_at: the previous step and the time at which it ended.
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
        """True if the loss or the gradient norm was not finite, so the weights were left unchanged."""
        return not all(map(math.isfinite, self._numbers.read()))


@dataclass
class _Queued:
    """A step that the device may still be running."""

    update: Update
    step: int
    began_at: float
    data_s: float
    is_profiled: bool
    closed_at: float = 0.0
    """Time at which the host finished the step."""
    seconds: float = 0.0
    means: StepMeans | None = None
    """Means over the steps since the last line, including this one; set once this step has been measured."""
    line: Record | None = None
    """The record to write once the step has been counted, or None if no line is due."""


class StepMetrics:
    """Times each step, counts good and skipped steps, and writes their records.  Runs identically on all ranks."""

    def __init__(self, run: Run, loader: object) -> None:
        """`loader`: the training data; epochs are recorded if it is a TrainLoader."""
        self._config, self._world, self._state, self._metrics = run.config, run.world, run.state, run.metrics
        self._skips, self._watchdog, self._checkpoints = run.state.skips, run.watchdog, run.checkpoints
        self._callbacks, self._forecast, self._loader = run.callbacks, run.forecast, loader
        self.horizon = run.horizon
        self.reads_late = run.world.device.type != "cpu"
        """True if the numbers of a step are read, and its line written, only after the next step has been queued.  The
        same on all ranks."""
        self.productive_s = 0.0
        """Total seconds of all steps that were not skipped."""
        self.step_s = 0.0
        """Seconds of the last step.  0 until the second step, because the first one compiles and allocates."""
        self.evaluated_step: int | None = None
        """The step of the last evaluation."""
        self.is_saved_after: Callable[[int], bool] = lambda step: False
        """Returns whether a save follows the given step."""
        self._latest: Update | None = None
        self._ended: tuple[Update | None, float] = None, 0.0
        """The last measured step and the time at which it ended."""
        self.pending: _Queued | None = None
        """The step that has not been counted yet, if any."""
        self._logged, self._logged_aside = LoggedSums(run.world, TRAIN_FIELDS), LoggedSums(run.world, EVAL_FIELDS)
        self.restart()

    def restart(self) -> None:
        """Reset the measurements at the start of a training loop."""
        if self.pending is not None:
            self._measured(self.pending)  # left over from the previous loop
        self._meter, self._num_steps = StepTimer(), 0
        self._memory_gib = peak_memory_gib(self._world.device)
        self._started = self._data_s = 0.0

    # -- one step ------------------------------------------------------------------------------------------------

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure one step.  Inside the block, get the micro-batches from `take` and finish the step with `record`."""
        step = self._state.step + 1
        self._checkpoints.begin_step(step)
        for callback in self._callbacks:
            callback.begin_step(step)
        self._started = time.perf_counter()
        yield
        for callback in reversed(self._callbacks):
            callback.end_step(step)
        self._checkpoints.end_step(step)

    def take(self, batches: Iterator[Any], number: int) -> list[Any]:
        """Return the micro-batches of the step.  Raises TrainingFailed if the loader is exhausted."""
        taken = list(islice(batches, number))
        if len(taken) < number:
            raise TrainingFailed(f"step {self._state.step + 1}: the loader from build_loader ended; it must be endless")
        self._data_s = time.perf_counter() - self._started
        self._watchdog.enter("forward")
        return taken

    def record(self, update: Update, lr: float, flops_per_token: Callable[[], float], is_last: bool) -> Record:
        """Finish the step that the state has just counted and return its record.

        If a line is due, the record is also written: immediately, or, if `reads_late`, once the step's numbers have
        been read.  `flops_per_token` walks all modules of the model, so it is called only when `mfu` is read.

        Collective if a line is due: one small CPU all-reduce, plus those of `LoggedSums.take`.  Raises TrainingFailed
        on all ranks after too many consecutive skipped steps.
        """
        step = self._state.step
        is_needed = step == 1 or self.horizon.may_end_at(step) or is_last
        is_line = is_needed or self._config.log.due(step)
        self.settle()
        is_profiled = self._config.log.profiles(step)
        queued = self.pending = _Queued(update, step, self._started, self._data_s, is_profiled)
        self._latest = update
        logged: Fields = {}
        if is_line:  # communicate while the device is busy
            mine = (peak_memory_gib(self._world.device), *self._logged.news())
            self._memory_gib, *news = self._world.max(mine)
            logged = self._logged.take(news)
        record = self._train_record(queued, lr, flops_per_token, logged)
        queued.line, queued.closed_at = record if is_line else None, time.perf_counter()
        self._metrics.progress(step)
        # Evaluation and saving are timed separately: settle this step first so that their times do not include it and
        # its line is written before theirs.
        if is_needed or not self.reads_late or self._config.eval.due(step) or self.is_saved_after(step):
            self.settle()
        return record

    def _measured(self, queued: _Queued) -> StepMeans:
        """Add a step to the running means, at most once, and return the means.  Waits for the device.

        A step lasts from its start, or from the end of the previous step if that is later, until the device has
        finished it.  Host work therefore adds to the step time only if it keeps the device from working.
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
            self._forecast.count(queued.seconds, queued.is_profiled)
        return queued.means

    def settle(self) -> None:
        """Read the numbers of the pending step, count it as good or skipped, and write its line.  Waits for the device.

        Raises TrainingFailed on all ranks after too many consecutive skipped steps.
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
            self._meter = StepTimer()

    @property
    def grad_norm(self) -> float:
        """Gradient norm of the last step before clipping.  Waits for the device."""
        return math.nan if self._latest is None else self._latest.grad_norm

    def discard(self) -> None:
        """Drop the pending step and the fields logged for the next line, after an earlier checkpoint was loaded."""
        if self.pending is not None:
            self._measured(self.pending)  # its record may still be read
            self.pending = None
        self._logged.clear()

    # -- records -------------------------------------------------------------------------------------------------

    def log(self, name: str, value: Amount, over: Amount | None) -> None:
        """Add to a field of the next `train` line or, inside `evaluation`, of the next `eval` line."""
        self._logged.add(name, value, over)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Collect the fields logged inside the block for the evaluation record."""
        self._logged, self._logged_aside = self._logged_aside, self._logged
        self._logged.clear()  # drop leftovers of an evaluation that was aborted
        try:
            yield
        finally:
            self._logged, self._logged_aside = self._logged_aside, self._logged

    def _train_record(self, queued: _Queued, lr: float, flops_per_token: Callable[[], float], logged: Fields) -> Record:
        update, skipped_before = queued.update, self._skips.total
        return Record(
            kind="train",
            step=queued.step,
            loss=lambda: update.loss,
            mean_loss=lambda: self._measured(queued).loss,
            grad_norm=lambda: update.grad_norm,
            lr=lr,
            tokens=self._state.tokens,
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
        """Write the record of an evaluation and return it.  Must be called inside `evaluation`.

        total, count: this rank's sum of losses and the count to divide it by.
        started: start of the evaluation, by `time.perf_counter`.
        Collective: one small CPU all-reduce, plus those of `LoggedSums.take`.
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
        """Return the model FLOPs utilization, or None if the device's peak is unknown.

        Model FLOPs per second over the peak of all devices (Chowdhery et al. 2022, arXiv:2204.02311, appendix B).
        """
        peak = peak_flops(self._world.device)
        if peak is None:
            return None
        tokens = self._config.step_tokens
        return flops_per_token() * tokens / step_s / (peak * self._world.size)
