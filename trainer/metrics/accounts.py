"""Accounts: what each step achieved and cost, written as one record per step.

Losses are read late on a GPU, once the next step is queued, so that the host never waits for the device.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, Protocol

import torch

from trainer.config import RunConfig
from trainer.data.loader import TrainLoader
from trainer.data.source import Source
from trainer.data.transfer import Numbers
from trainer.distributed.world import World
from trainer.errors import TrainingFailed
from trainer.metrics.fanout import Metrics
from trainer.metrics.horizon import Horizon
from trainer.metrics.meter import Meter, peak_flops, peak_memory_gib
from trainer.metrics.observer import Phases, StepObserver
from trainer.metrics.record import Record
from trainer.metrics.skips import SkipCounter
from trainer.metrics.tally import Amount, Tally


class Update:
    """The outcome of one optimizer step, the same on all ranks.

    Its numbers may still be on their way from the device when the step returns: reading one waits for it.
    `num_targets` counts the targets of the global batch that are not ignored.
    """

    def __init__(self, loss: float | torch.Tensor, grad_norm: float | torch.Tensor, num_targets: int) -> None:
        self.num_targets = num_targets
        self._numbers = Numbers(loss, grad_norm)

    def wait(self) -> None:
        """Wait until the device has finished the step."""
        self._numbers.read()

    @property
    def waited_s(self) -> float:
        """Seconds spent waiting for it so far."""
        return self._numbers.waited_s

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


_FIELDS = ("kind", "step", "loss", "epoch", "time")
_TRAIN_FIELDS = (
    *_FIELDS,
    *(
        "mean_loss",
        "grad_norm",
        "lr",
        "tokens",
        "tokens_per_s",
        "step_s",
        "data_s",
        "mfu",
        "peak_memory_gib",
        "skipped",
        "profiled",
    ),
)
_EVAL_FIELDS = (*_FIELDS, "bits_per_byte", "eval_s")


def _mean_loss(total: float, number: int, unread: Update | None) -> float:
    """Return the mean of `number` losses that add up to `total`, and of one that may still be on its way."""
    if unread is not None and not unread.skipped:
        total, number = total + unread.loss, number + 1
    return total / number if number else math.nan


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
    ) -> None:
        self._config, self._world, self._metrics = config, world, metrics
        self._skips, self._phases, self._observers, self._loader = skips, phases, observers, loader
        self.horizon = horizon
        self.reads_late = world.device.type != "cpu"
        """True if the numbers of a step are read once the next one is queued; the same on all ranks."""
        self.productive_s = 0.0
        """Seconds of the steps that counted."""
        self.step_s = 0.0
        """Seconds of the last step; 0 before the second, since the first one compiles and allocates."""
        self.evaluated_step: int | None = None
        """Step of the last evaluation."""
        self.is_saved_after: Callable[[int], bool] = lambda step: False
        """Whether a save follows a step."""
        self._latest: Update | None = None
        self.pending: tuple[Update, int, float] | None = None
        """The step whose numbers have not been read yet, its step, and its seconds."""
        self._logged, self._logged_aside = Tally(world, _TRAIN_FIELDS), Tally(world, _EVAL_FIELDS)
        self.restart()

    def restart(self) -> None:
        """Begin to measure anew: a loop begins."""
        self._meter, self._num_steps = Meter(), 0
        self._memory_gib = peak_memory_gib(self._world.device)
        self._started = self._data_s = 0.0

    # -- one step ------------------------------------------------------------------------------------------------

    @contextmanager
    def step(self, progress: Progress) -> Iterator[None]:
        """Account for one step: take its micro-batches with `take`, and close it with `record`, inside the block."""
        step = progress.step + 1
        with self.paused():
            for observer in self._observers:
                observer.begin_step(step)
        self._started = time.perf_counter()
        yield
        with self.paused():
            is_profiled = self._config.log.profiles(step)
            for observer in reversed(self._observers):
                observer.end_step(step, self._seconds, is_profiled)

    def take(self, batches: Iterator[Any], number: int, step: int) -> list[Any]:
        """Return the micro-batches of `step`.  Raises TrainingFailed if the loader has ended."""
        taken = list(islice(batches, number))
        if len(taken) < number:
            raise TrainingFailed(f"step {step}: the loader from build_loader ended; it must be endless")
        self._data_s = time.perf_counter() - self._started
        self._phases.enter("forward")
        return taken

    def record(self, update: Update, progress: Progress, lr: float, flops_per_token: float, is_last: bool) -> Record:
        """Close the step that `progress` has just completed; return its record, written if a line is due.

        Collective where a line is due: one small CPU all-reduce, and what `Tally.take` says.  Raises TrainingFailed, on
        all ranks alike, after too many skipped steps in a row.
        """
        step = progress.step
        is_line = step == 1 or self._config.log.due(step) or self.horizon.may_end_at(step) or is_last
        self._close(update, step, at_once=is_line or not self.reads_late)
        logged: dict[str, float | None] = {}
        if is_line:
            mine = (peak_memory_gib(self._world.device), self._logged.has_news)
            self._memory_gib, has_news = self._world.max(mine)
            logged = self._logged.take(bool(has_news))
        record = self._train_record(update, progress, lr, flops_per_token, logged)
        self._metrics.progress(step)
        if is_line:
            self._metrics.write(record)
            self.horizon.trained(record)
            self._meter.reset()
        return record

    def _close(self, update: Update, step: int, at_once: bool) -> None:
        """Take a step into the means, and note how many seconds it took.

        They end when the device has finished it or, unless `at_once`, the one before it: from step to step the same.
        """
        self.settle()
        # Evaluation and saving are timed by themselves: this step must not be part of that.
        if at_once or self._config.eval.due(step) or self.is_saved_after(step):
            update.wait()
        self._seconds = time.perf_counter() - self._started
        if self._config.log.profiles(step):
            self._meter.count_profiled(self._seconds, self._data_s, update.num_targets)
        else:
            self._meter.count(self._data_s, update.num_targets)
        self._latest, self.pending = update, (update, step, self._seconds)
        if at_once:
            self.settle()
        self.step_s = self._seconds if self._num_steps else 0.0
        self._num_steps += 1

    def settle(self) -> None:
        """Read the numbers of the pending step and count it as good or skipped; waits for the device.

        Raises TrainingFailed, on all ranks alike, after too many skipped steps in a row.
        """
        if self.pending is not None:
            (update, step, seconds), self.pending = self.pending, None
            self.productive_s += seconds * (not update.skipped)
            self._meter.count_loss(update.loss, update.skipped)
            self._skips.count(update.loss, update.grad_norm, step)

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
        self.pending = None
        self._logged.clear()

    @contextmanager
    def paused(self, update: Update | None = None) -> Iterator[None]:
        """Leave the time inside the block out of the means, but for the time spent waiting for `update`."""
        started, waited_s = time.perf_counter(), update.waited_s if update else 0.0
        yield
        waited_s = update.waited_s - waited_s if update else 0.0
        self._meter.leave_out(time.perf_counter() - started - waited_s)

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
        update: Update,
        progress: Progress,
        lr: float,
        flops_per_token: float,
        logged: dict[str, float | None],
    ) -> Record:
        step_s, data_s, tokens_per_s = self._meter.read()
        total, number = self._meter.loss_sum, self._meter.num_losses
        unread = None if self.pending is None else update
        before = self._skips.total - (update.skipped if self.pending is None else 0)  # counted late, or already
        return Record(
            kind="train",
            step=progress.step,
            loss=lambda: update.loss,
            mean_loss=lambda: _mean_loss(total, number, unread),
            grad_norm=lambda: update.grad_norm,
            lr=lr,
            tokens=progress.tokens,
            tokens_per_s=tokens_per_s,
            step_s=step_s,
            data_s=data_s,
            mfu=self._mfu(flops_per_token, step_s),
            peak_memory_gib=self._memory_gib,
            skipped=lambda: before + update.skipped,
            **({"profiled": True} if self._meter.is_profiled else {}),
            **logged | self._epochs(),
        )

    def _epochs(self) -> dict[str, float]:
        return self._loader.epochs if isinstance(self._loader, TrainLoader) else {}

    def evaluated(self, step: int, total: torch.Tensor, count: float, eval_loader: object, started: float) -> Record:
        """Return the record of an evaluation, and write it; to be called inside `evaluation`.

        total, count: this rank's sum of losses, and what to divide it by.  started: when it began, by `perf_counter`.
        Collective: one small CPU all-reduce, and what `Tally.take` says.
        """
        self.evaluated_step = step
        loss_sum, count_of_all, news = self._world.sum([float(total), count, self._logged.has_news])
        logged, loss = self._logged.take(news > 0) | self._epochs(), loss_sum / (count_of_all or 1)
        eval_s = time.perf_counter() - started
        source = getattr(eval_loader, "source", None)
        bits = source.bits_per_byte(loss) if isinstance(source, Source) else None
        shown = {} if bits is None else {"bits_per_byte": bits}
        return self._metrics.write(Record(kind="eval", step=step, loss=loss, **shown, eval_s=eval_s, **logged))

    def _mfu(self, flops_per_token: float, step_s: float) -> float | None:
        """Return model FLOPs over the devices' peak (Chowdhery et al. 2022, arXiv:2204.02311, appendix B)."""
        peak = peak_flops(self._world.device)
        if peak is None:
            return None
        tokens = self._config.step_tokens
        return flops_per_token * tokens / step_s / (peak * self._world.size)
