"""Decides when a run ends, and tracks its best evaluation.

A run ends at `train.steps`, or earlier if `eval.patience` consecutive evaluations have not improved on the best one.  A
learning-rate range test also ends once the loss diverges.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.config.schema import RunConfig
from trainer.files import write_atomically


class StopCriterion:
    """Decides at which step a run ends.  The decision is the same on all ranks."""

    def __init__(self, config: RunConfig) -> None:
        self.num_steps, self._eval = config.train.steps, config.eval
        self._sign = -1.0 if config.higher_is_better else 1.0
        self.best: tuple[float, int] | None = None
        """The best value of `eval.metric` and the step of its evaluation, whether or not that step's checkpoint still
        exists; None before the first finite value."""
        self.num_without_best = 0
        """Number of consecutive evaluations, up to the latest, without a new best."""
        self._latest: int | None = None
        """Step of the latest evaluation; None before the first."""

    def add_train_record(self, record: Mapping[str, Any]) -> None:
        """Process the `train` record of a step.  Does nothing here; `RangeTest` overrides it."""

    def closing_lines(self, folder: Path) -> list[str]:
        """Return additional lines to print at the end of the run in `folder`.  Called on rank 0."""
        return []

    def add_evaluation(self, record: Mapping[str, Any], step: int) -> None:
        """Process the evaluation of a step; does nothing if it has already been processed.

        A missing or non-finite value never counts as an improvement.
        """
        if step == self._latest:
            return
        self._latest, value = step, record.get(self._eval.metric)
        is_better = self.best is None or (value is not None and self._sign * value < self._sign * self.best[0])
        if value is not None and math.isfinite(value) and is_better:
            self.best, self.num_without_best = (value, step), 0
        else:
            self.num_without_best += 1

    @property
    def has_lost_patience(self) -> bool:
        """True if the last `eval.patience` evaluations brought no new best; always False with `eval.patience=0`."""
        return 0 < self._eval.patience <= self.num_without_best

    def is_reached(self, step: int) -> bool:
        """Return whether the run ends at `step`.  Call it after the step, and after its evaluation if one is due."""
        return step >= self.num_steps or self.has_lost_patience

    def may_end_at(self, step: int) -> bool:
        """Return whether the run may end at `step`, judging before that step's evaluation."""
        return step == self.num_steps or (self._eval.patience > 0 and self._eval.is_due(step))

    def reason(self, step: int) -> str:
        """Return why the run ends at `step`."""
        if step >= self.num_steps or not self.has_lost_patience:
            return "train.steps reached"
        best = f", which is {self.best[0]:.4f} at step {self.best[1]}" if self.best else ""
        return f"eval.patience={self._eval.patience}: {self.num_without_best} evaluations without a new best{best}"

    def after_load(self, is_same_run: bool) -> None:
        """Handle a loaded checkpoint.

        If it belongs to another run (`is_same_run` is False), reset the best evaluation, because that run's checkpoints
        are not in this run's folder.
        """
        if not is_same_run:
            self.best, self.num_without_best, self._latest = None, 0, None

    def state_dict(self) -> dict[str, Any]:
        return {
            "metric": self._eval.metric,
            "best": None if self.best is None else list(self.best),
            "num_without_best": self.num_without_best,
            "latest": self._latest,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the best evaluation.  It is reset if `eval.metric` has changed: the values are not comparable."""
        self._latest = state["latest"]
        if state["metric"] != self._eval.metric:
            self.best, self.num_without_best = None, 0
            return
        self.num_without_best = state["num_without_best"]
        self.best = None
        if state["best"] is not None:
            value, step = state["best"]
            self.best = value, step


# ---------------------------------------------------------------------------------------------------------------
# Learning-rate range test


RANGE_TEST_FILE = "lr_range.json"
"""File in the run folder with the results of the test."""
_HALF_WINDOW = 3
"""The loss is averaged over up to this many steps on either side, since the loss of a single batch is noisy."""
_DIVERGENCE_FACTOR = 4.0
"""The loss counts as diverged once it exceeds its minimum by this factor."""


class RangeTest(StopCriterion):
    """Ends a learning-rate range test as soon as the loss diverges, unless `StopCriterion` ends it earlier.

    The learning rate rises in every step, and the test suggests the rate at which the loss fell fastest.  Source:
    Smith 2017, "Cyclical Learning Rates for Training Neural Networks", arXiv:1506.01186, section 3.3.
    """

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.points: list[tuple[float, float]] = []
        """Learning rate and loss of each step."""

    def add_train_record(self, record: Mapping[str, Any]) -> None:
        self.points.append((record["lr"], record["loss"]))

    @property
    def has_diverged(self) -> bool:
        """True if the last loss is not finite or exceeds `_DIVERGENCE_FACTOR` times the lowest."""
        if not self.points:
            return False
        loss, lowest = self.points[-1][1], min(loss for _, loss in self.points)
        return not math.isfinite(loss) or loss > _DIVERGENCE_FACTOR * lowest

    def is_reached(self, step: int) -> bool:
        return self.has_diverged or super().is_reached(step)

    def may_end_at(self, step: int) -> bool:
        return True

    def reason(self, step: int) -> str:
        return f"the loss diverged at lr {self.points[-1][0]:.2e}" if self.has_diverged else super().reason(step)

    def closing_lines(self, folder: Path) -> list[str]:
        """Write the results to `RANGE_TEST_FILE`, and return lines that suggest a learning rate and name the file."""
        lr = suggested_lr(self.points)
        points = [{"lr": lr, "loss": loss if math.isfinite(loss) else None} for lr, loss in self.points]
        note = f"  every step of the test: {folder / RANGE_TEST_FILE}"
        try:
            write_atomically(folder / RANGE_TEST_FILE, json.dumps({"suggested_lr": lr, "points": points}) + "\n")
        except OSError as error:
            note = f"  {folder / RANGE_TEST_FILE} cannot be written: {error}"
        if lr is None:
            return ["no learning rate to suggest: the loss did not fall; try another schedule.lr_range", note]
        return [f"suggested: optim.lr={lr:.1e}, where the loss fell fastest", note]

    def state_dict(self) -> dict[str, Any]:
        points = [(lr, loss if math.isfinite(loss) else None) for lr, loss in self.points]
        return {**super().state_dict(), "points": [list(point) for point in points]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.points = [(lr, math.nan if loss is None else loss) for lr, loss in state["points"]]


def suggested_lr(points: Sequence[tuple[float, float]]) -> float | None:
    """Return the learning rate at which the loss fell fastest, or None if it did not fall.

    The slope is taken with respect to the logarithm of the learning rate, up to the minimum of the smoothed loss.
    `points`: pairs (learning rate, loss), in order of increasing learning rate.
    """
    finite = [(lr, loss) for lr, loss in points if math.isfinite(loss) and lr > 0]
    if len(finite) < 3:
        return None
    means = []
    for i in range(len(finite)):
        half = min(_HALF_WINDOW, i, len(finite) - 1 - i)
        window = [loss for _, loss in finite[i - half : i + half + 1]]
        means.append(sum(window) / len(window))
    lowest = means.index(min(means))
    slopes = [
        ((means[i + 1] - means[i - 1]) / math.log(finite[i + 1][0] / finite[i - 1][0]), i)
        for i in range(1, min(lowest + 1, len(finite) - 1))
    ]
    steepest, i = min(slopes, default=(0.0, 0))
    return finite[i][0] if steepest < 0 else None
