"""Times each training step, counts applied and skipped steps, and writes one record per logged step.

On a GPU, a step's loss and gradient norm are usually read, and its record is written, only after the next step has been
queued, so that the device is not idle while the host waits.  They are read without this delay in step 1, in a step that
may be the last, and before an evaluation or a save.  A step is counted when they are read.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from trainer.config.schema import RunConfig
from trainer.data.loader import TrainLoader
from trainer.data.source import Source
from trainer.data.transfer import HostScalars, stack_scalars
from trainer.distributed.world import World
from trainer.errors import TrainingFailed, UserError
from trainer.metrics.devices import find_device
from trainer.metrics.record import EVAL_FIELDS, TRAIN_FIELDS, Record
from trainer.metrics.stop_criterion import StopCriterion
from trainer.metrics.time_breakdown import DATA_RANGE

if TYPE_CHECKING:
    from trainer.lifecycle.state import TrainState
    from trainer.metrics.writers import Metrics
    from trainer.plan.forecast import Forecast


class Update:
    """The result of one optimizer step, identical on all ranks.

    The loss and gradient norm may still be on their way to the host when `Trainer.train_step` returns; reading either
    waits for the transfer.  `num_targets` is the number of targets in the global batch, not counting ignored ones.
    `is_empty` is True if `Trainer.count` found nothing in the global batch, so that there was nothing to learn.
    """

    def __init__(
        self, loss: float | torch.Tensor, grad_norm: float | torch.Tensor, num_targets: int, is_empty: bool = False
    ) -> None:
        self.num_targets, self.is_empty = num_targets, is_empty
        self._scalars = HostScalars(loss, grad_norm)

    def end_time(self, previous: Update | None, previous_end: float) -> float | None:
        """Return when the device finished the step, as a time of `time.perf_counter`.  Waits for the device.

        Returns None if the loss and the norm were computed on the host: the step then ended when the host finished it.

        previous: the previous step; None for the first.
        previous_end: the time at which the previous step ended.
        """
        return self._scalars.arrived_at(None if previous is None else previous._scalars, previous_end)

    @property
    def loss(self) -> float:
        """The global batch's summed loss divided by its sum of `Trainer.count`: by default, the mean over targets."""
        return self._scalars.read()[0]

    @property
    def grad_norm(self) -> float:
        """The global gradient norm before clipping."""
        return self._scalars.read()[1]

    @property
    def skipped(self) -> bool:
        """True if the loss or the gradient norm was not finite, so the weights were left unchanged.

        The loss of a step without targets is not a number.
        """
        return not all(map(math.isfinite, self._scalars.read()))


@dataclass
class _QueuedStep:
    """A step that the device may still be running."""

    update: Update
    step: int
    started_at: float
    data_s: float
    is_profiled: bool
    host_ended_at: float = 0.0
    """Time at which the host finished the step."""
    seconds: float = 0.0
    """Duration of the step, once it has been measured."""
    means: StepMeans | None = None
    """Means over the steps since the last written record, including this step; None until the step is measured."""
    record: Record | None = None
    """The record to write once the step has been counted, or None if no record is due."""


class StepMetrics:
    """Times each step, counts applied and skipped steps, and writes their records.  Runs identically on all ranks."""

    def __init__(
        self,
        config: RunConfig,
        world: World,
        state: TrainState,
        metrics: Metrics,
        stop_criterion: StopCriterion,
        forecast: Forecast,
        loader: object,
    ) -> None:
        """`loader`: the training loader; epochs are recorded only for a TrainLoader."""
        self._config = config
        self._world = world
        self._state = state
        self._metrics = metrics
        self._skips = state.skips
        self._forecast = forecast
        self._loader = loader
        self.stop_criterion = stop_criterion
        self.reads_late = world.device.type != "cpu"
        """Whether a step's numbers are usually read only after the next step has been queued; the same on all ranks."""
        self.productive_s = 0.0
        """Total duration of all steps that were not skipped, in seconds."""
        self.step_s = 0.0
        """Seconds that the last measured step took; 0 for the first step of a loop, which compiles and allocates."""
        self.evaluated_step: int | None = None
        """The step of the last evaluation."""
        self._last_measured: Update | None = None
        self._has_named_empty_step = False
        self._last_end = 0.0
        """The time at which the last measured step ended."""
        self.pending: _QueuedStep | None = None
        """The step that has not been counted yet, if any."""
        train_fields, eval_fields = ((*fields, *self._epochs()) for fields in (TRAIN_FIELDS, EVAL_FIELDS))
        self._train_sums, self._eval_sums = LoggedSums(world, train_fields), LoggedSums(world, eval_fields)
        self._current_sums = self._train_sums
        """The sums that `log` adds to."""
        self.restart()

    def restart(self) -> None:
        """Reset the measurements at the start of a training loop."""
        if self.pending is not None:
            self._measure(self.pending)  # a step of the previous loop
        self._timer, self._num_steps = StepTimer(), 0
        self._memory_gib = peak_memory_gib(self._world.device)
        self._started = self._data_s = 0.0

    # -- one step ------------------------------------------------------------------------------------------------

    def take_micro_batches(self, batches: Iterator[Any], count: int) -> list[Any]:
        """Start to measure a step, and return its `count` micro-batches.  Raises TrainingFailed if the loader ends."""
        self._started = time.perf_counter()
        with torch.profiler.record_function(DATA_RANGE):
            micro_batches = list(islice(batches, count))
        if len(micro_batches) < count:
            raise TrainingFailed(f"step {self._state.step + 1}: the loader from build_loader ended; it must be endless")
        self._data_s = time.perf_counter() - self._started
        return micro_batches

    def record(
        self, update: Update, lr: float, flops_per_token: Callable[[], float], is_last: bool, is_followed: bool
    ) -> Record:
        """Finish the step that the state has just counted, and return its record.

        If a record is due, it is also written; with `reads_late`, usually only once the next step has been queued.
        `flops_per_token` walks all of the model's modules, so it is called only when `mfu` is read.

        is_last: whether the run stops after this step; the number of steps and early stopping are known here.
        is_followed: whether an evaluation or a save follows, which is timed by itself: this step is then finished
            first, so that its time does not include it and its record is written before.

        Collective if a record is due: one small CPU all-reduce, plus those of `LoggedSums.take`.  Raises TrainingFailed
        on all ranks after too many consecutive skipped steps.
        """
        step = self._state.step
        is_first_or_last = step == 1 or self.stop_criterion.may_end_at(step) or is_last
        is_due = is_first_or_last or self._config.log.is_due(step)
        self.finish_pending_step()
        is_profiled = self._config.log.profiles(step)
        queued = self.pending = _QueuedStep(update, step, self._started, self._data_s, is_profiled)
        logged: Fields = {}
        if is_due:  # communicate while the device is busy
            values = (peak_memory_gib(self._world.device), *self._train_sums.flags())
            self._memory_gib, *flags = self._world.max(values)
            logged = self._train_sums.take(flags)
        record = self._train_record(queued, lr, flops_per_token, logged)
        queued.record, queued.host_ended_at = record if is_due else None, time.perf_counter()
        self._metrics.progress(step)
        if is_first_or_last or is_followed or not self.reads_late:
            self.finish_pending_step()
        return record

    def _measure(self, queued: _QueuedStep) -> StepMeans:
        """Add a step to the running means, unless it has been added, and return the means.  Waits for the device.

        A step lasts from its start, or from the end of the previous step if that is later, until the device has
        finished it.  Host work therefore adds to the step time only if it keeps the device from working.
        """
        if queued.means is None:
            update = queued.update
            ended_at = update.end_time(self._last_measured, self._last_end) or queued.host_ended_at
            queued.seconds = ended_at - max(queued.started_at, self._last_end)
            self._last_measured, self._last_end = update, ended_at
            loss = None if update.skipped else update.loss
            self._timer.count(queued.seconds, queued.data_s, update.num_targets, queued.is_profiled, loss)
            queued.means = self._timer.read()
            self.step_s = queued.seconds if self._num_steps else 0.0
            self._num_steps += 1
            self._forecast.record_step(queued.seconds, queued.is_profiled)
        return queued.means

    def finish_pending_step(self) -> None:
        """Read the pending step's numbers, count it as good or skipped, and write its record.  Waits for the device.

        Raises TrainingFailed on all ranks after too many consecutive skipped steps.
        """
        if self.pending is None:
            return
        queued, self.pending = self.pending, None
        self._measure(queued)
        update = queued.update
        self.productive_s += queued.seconds * (not update.skipped)
        self._skips.count(update.loss, update.grad_norm, queued.step, update.is_empty)
        if update.is_empty and not self._has_named_empty_step:
            self._has_named_empty_step = True
            self._metrics.print(
                f"warning: step {queued.step} had no targets, so its update was skipped; later ones are only counted",
                "yellow",
            )
        if queued.record is not None:
            self._metrics.write(queued.record)
            if not update.is_empty:
                self.stop_criterion.add_train_record(queued.record)
            self._timer = StepTimer()

    def discard_pending_step(self) -> None:
        """After loading an earlier checkpoint, drop the pending step and the fields logged for the next record."""
        if self.pending is not None:
            self._measure(self.pending)  # its record may still be read
            self.pending = None
        self._train_sums.clear()

    # -- records -------------------------------------------------------------------------------------------------

    def log(self, name: str, value: Amount, over: Amount | None) -> None:
        """Add to a field of the next `train` record or, inside an `evaluation` block, of the next `eval` record."""
        self._current_sums.add(name, value, over)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Collect the fields logged inside the block for the evaluation record."""
        self._eval_sums.clear()  # an earlier evaluation may have been aborted
        self._current_sums = self._eval_sums
        try:
            yield
        finally:
            self._current_sums = self._train_sums

    def _train_record(
        self, queued: _QueuedStep, lr: float, flops_per_token: Callable[[], float], logged: Fields
    ) -> Record:
        update, skipped_before = queued.update, self._skips.total
        return Record(
            kind="train",
            step=queued.step,
            loss=lambda: update.loss,
            mean_loss=lambda: self._measure(queued).loss,
            grad_norm=lambda: update.grad_norm,
            lr=lr,
            tokens=self._state.tokens,
            tokens_per_s=lambda: self._measure(queued).tokens_per_s,
            step_s=lambda: self._measure(queued).step_s,
            data_s=lambda: self._measure(queued).data_s,
            mfu=lambda: self._mfu(flops_per_token, self._measure(queued).step_s),
            peak_memory_gib=self._memory_gib,
            skipped=lambda: skipped_before + update.skipped,
            **({"profiled": True} if queued.is_profiled and not self._timer.has_steps else {}),
            **logged | self._epochs(),
        )

    def _epochs(self) -> Fields:
        return {**self._loader.epochs} if isinstance(self._loader, TrainLoader) else {}

    def record_evaluation(
        self, step: int, total: torch.Tensor, count: float, eval_loader: object, started: float
    ) -> Record:
        """Write the record of an evaluation and return it.  Must be called inside `evaluation`.

        total: this rank's sum of losses.
        count: this rank's part of the divisor: the loss is the total divided by the count, each summed over all ranks;
            it is not a number if the count is 0.
        started: when the evaluation started, by `time.perf_counter`.

        Collective: one small CPU all-reduce, plus those of `LoggedSums.take`.
        """
        self.evaluated_step = step
        loss_sum, total_count, *flags = self._world.sum([float(total), count, *self._eval_sums.flags()])
        logged = self._eval_sums.take(flags) | self._epochs()
        loss = loss_sum / total_count if total_count else math.nan
        eval_s = time.perf_counter() - started
        source = getattr(eval_loader, "source", None)
        bits = source.bits_per_byte(loss) if isinstance(source, Source) else None
        extra = {} if bits is None else {"bits_per_byte": bits}
        return self._metrics.write(Record(kind="eval", step=step, loss=loss, **extra, eval_s=eval_s, **logged))

    def _mfu(self, flops_per_token: Callable[[], float], step_s: float) -> float | None:
        """Return the model FLOPs utilization, or None if the device's peak is unknown.

        It is the model's FLOP/s divided by the peak of all devices (Chowdhery et al. 2022, arXiv:2204.02311,
        appendix B).
        """
        peak = peak_flops(self._world.device)
        if peak is None:
            return None
        tokens = self._config.step_tokens
        return flops_per_token() * tokens / step_s / (peak * self._world.size)


# ---------------------------------------------------------------------------------------------------------------
# Timing


def peak_flops(device: torch.device) -> float | None:
    """Return the device's peak bf16 FLOP/s, or None if it is unknown (CPUs, unlisted GPUs)."""
    if device.type != "cuda":
        return None
    specifications = find_device(torch.cuda.get_device_name(device))
    return None if specifications is None else specifications.bf16_flops


def peak_memory_gib(device: torch.device) -> float:
    """Return this process's peak memory in GiB: allocated on the GPU or, without a GPU, resident in host memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return _peak_resident_bytes() / 2**30


def resident_gib() -> float:
    """Return this process's resident host memory in GiB, or its peak if the system does not report the current one."""
    return (_read_status("VmRSS") or _peak_resident_bytes()) / 2**30


def _peak_resident_bytes() -> int:
    """Return this process's peak resident memory.

    Prefers /proc, because getrusage may report the peak of the program that started this one.
    """
    if (peak := _read_status("VmHWM")) is not None:
        return peak
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _read_status(name: str) -> int | None:
    """Return a value from Linux's /proc/self/status in bytes, or None if it is unavailable."""
    with suppress(OSError), open("/proc/self/status") as status:
        for line in status:
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return None


@dataclass
class StepMeans:
    """Means over a number of steps."""

    step_s: float
    data_s: float
    tokens_per_s: float
    """Target tokens per second."""
    loss: float
    """Mean loss over steps that were not skipped; NaN if all were."""


@dataclass
class _Totals:
    num_steps: int = 0
    seconds: float = 0.0
    data_s: float = 0.0
    num_tokens: int = 0


class StepTimer:
    """Computes means over the steps since the last written record.

    Times and throughput exclude profiled steps, unless all steps were profiled.
    """

    def __init__(self) -> None:
        self._steps, self._profiled = _Totals(), _Totals()
        self._loss_sum, self._num_losses = 0.0, 0

    def count(
        self, seconds: float, data_s: float, num_tokens: int, is_profiled: bool = False, loss: float | None = None
    ) -> None:
        """Add a step: its duration, the time spent waiting for data, its number of target tokens, and its loss.

        `loss`: None if the step was skipped.
        """
        totals = self._profiled if is_profiled else self._steps
        totals.num_steps += 1
        totals.seconds += seconds
        totals.data_s += data_s
        totals.num_tokens += num_tokens
        if loss is not None:
            self._loss_sum += loss
            self._num_losses += 1

    @property
    def has_steps(self) -> bool:
        """True if at least one step that was not profiled has been counted."""
        return self._steps.num_steps > 0

    def read(self) -> StepMeans:
        """Return the means so far."""
        totals = self._steps if self.has_steps else self._profiled
        num_steps, seconds = max(1, totals.num_steps), max(totals.seconds, 1e-9)
        loss = self._loss_sum / self._num_losses if self._num_losses else math.nan
        return StepMeans(seconds / num_steps, totals.data_s / num_steps, totals.num_tokens / seconds, loss)


# ---------------------------------------------------------------------------------------------------------------
# Skipped steps


class SkipCounter:
    """Counts steps that were skipped because the loss or gradient norm was not finite, or without targets."""

    def __init__(self, max_in_a_row: int, may_end_skipped: bool = False) -> None:
        """`may_end_skipped`: whether a run's last steps may be skipped, as in a learning-rate range test."""
        self.max_in_a_row, self._may_end_skipped = max_in_a_row, may_end_skipped
        self.total = 0
        self.in_a_row = 0
        self.failed_since: int | None = None
        """The last good step, if too many steps have been skipped since; otherwise None."""

    def count(self, loss: float, grad_norm: float, step: int, is_empty: bool = False) -> None:
        """Count a step; it was skipped if either value is not finite.  The values are the same on all ranks.

        A step without targets (`is_empty`) says nothing about the weights: it neither continues nor ends a streak of
        skipped steps.

        Raises TrainingFailed after too many consecutive skipped steps.
        """
        if is_empty:
            self.total += 1
            return
        if np.isfinite(grad_norm) and np.isfinite(loss):
            self.in_a_row = 0
            return
        self.total += 1
        self.in_a_row += 1
        if self.in_a_row >= self.max_in_a_row:
            self.failed_since = step - self.in_a_row
            raise TrainingFailed(
                f"step {step}: loss or gradient was not finite in {self.in_a_row} steps in a row (loss {loss}, "
                f"gradient norm {grad_norm}); train.max_skipped_updates={self.max_in_a_row}.  All of them were "
                "skipped.  Usual remedies: a lower optim.lr, more schedule.warmup_steps, a smaller optim.max_grad_norm"
            )

    def check_end(self, step: int) -> None:
        """Raise TrainingFailed if the last steps of a run that ends at `step` were skipped."""
        if self.in_a_row and not self._may_end_skipped:
            last = "the last step was" if self.in_a_row == 1 else f"the last {self.in_a_row} steps were"
            raise TrainingFailed(
                f"step {step}: the run has reached train.steps, but {last} skipped because the loss or gradient was "
                "not finite, so the weights may be bad.  The checkpoint of this step is used only if checkpoint.resume "
                "names it, or if there is no other.  To train past this step, raise train.steps"
            )

    def state_dict(self) -> dict[str, int]:
        return {"total": self.total, "in_a_row": self.in_a_row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.total, self.in_a_row = state["total"], state["in_a_row"]


# ---------------------------------------------------------------------------------------------------------------
# Fields of Trainer.log


Amount: TypeAlias = float | torch.Tensor
"""A number, or a one-element tensor on any device."""

Fields: TypeAlias = dict[str, float | Callable[[], float | None]]
"""Fields of a record; functions are called when the field is first read."""

_NUM_SUMS = 3
"""Number of sums per field: the values, the divisors, and how often a divisor was given."""


class LoggedSums:
    """Sums of named amounts, kept on the device until a record is due.

    Ranks need not log the same names: when a record is due, names that are new on any rank are exchanged.  The steps in
    between never communicate, and records without logged fields need no extra collective.
    """

    def __init__(self, world: World, standard_fields: Collection[str]) -> None:
        """`standard_fields`: names in every record of this kind, which logged fields must not use."""
        self._world, self._standard_fields = world, standard_fields
        self._names: list[str] = []  # known to all ranks, in the same order
        self._sums: dict[str, list[Amount]] = {}

    def add(self, name: str, value: Amount, over: Amount | None) -> None:
        """Add `value` to the sum of `name` and, if the field is a mean, `over` to its divisor.  No host sync.

        Raises UserError if `name` is a standard field of this kind of record.
        """
        if name in self._standard_fields:
            raise UserError(f"log: {name!r} is a field that every record of this kind has; choose another name")
        sums = self._sums.setdefault(name, [0.0] * _NUM_SUMS)
        for index, amount in enumerate((value, 0.0 if over is None else over, float(over is not None))):
            sums[index] = sums[index] + (amount.detach().double() if isinstance(amount, torch.Tensor) else amount)

    def clear(self) -> None:
        """Discard everything added since the last record."""
        self._sums = {}

    def flags(self) -> list[bool]:
        """Return the flags to reduce over all ranks before calling `take`.

        The first flag is True if this rank has a name that other ranks may not know.  The others say, for each name
        known to all ranks, whether this rank has added to it.
        """
        return [not self._sums.keys() <= set(self._names), *(name in self._sums for name in self._names)]

    def take(self, flags: Sequence[float]) -> Fields:
        """Return the fields summed over all ranks, and reset the sums.  A mean over nothing is None.

        Reading a field waits for the device; this call does not.  `flags`: the flags of all ranks, reduced by
        sum or max, so that an entry is 0 only if it is False on all ranks.
        Collective: one all-gather if any rank has a new name, and one all-reduce on the device if there are any fields.
        """
        added = {name for name, is_added in zip(self._names, flags[1:], strict=True) if is_added}
        if flags[0]:
            on_any_rank = dict.fromkeys(name for names in self._world.gather(list(self._sums)) for name in names)
            self._names += [name for name in on_any_rank if name not in self._names]
            added = set(on_any_rank)
        names = [name for name in self._names if name in added]
        amounts = [amount for name in names for amount in self._sums.get(name, [0.0] * _NUM_SUMS)]
        self._sums = {}
        if not names:
            return {}
        sums = HostScalars(*self._world.sum_on_device(stack_scalars(amounts, self._world.device)).unbind())
        return {name: partial(_field_value, sums, index) for index, name in enumerate(names)}


def _field_value(sums: HostScalars, index: int) -> float | None:
    """Return field `index` of the sums: a mean if any rank gave a divisor, otherwise a sum."""
    value, over, num_means = sums.read()[_NUM_SUMS * index : _NUM_SUMS * (index + 1)]
    return value if not num_means else value / over if over else None
