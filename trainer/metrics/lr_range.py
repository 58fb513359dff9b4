"""Learning-rate range test: raises the learning rate every step and suggests the rate at which the loss falls fastest.

Source: Smith 2017, "Cyclical Learning Rates for Training Neural Networks", arXiv:1506.01186, section 3.3.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.config import RunConfig
from trainer.files import write_atomically
from trainer.metrics.stop_criterion import StopCriterion

FILE = "lr_range.json"
"""File in the run folder with the results of the test."""
_HALF_WINDOW = 3
"""Number of steps on either side over which the loss is averaged, since the loss of a single batch is noisy."""
_DIVERGED = 4.0
"""The loss counts as diverged once it exceeds its minimum by this factor."""


def find_horizon(config: RunConfig) -> StopCriterion:
    """Return the horizon of a run: a `RangeTest` if `schedule.name` is `range`, otherwise a plain `StopCriterion`."""
    return RangeTest(config) if config.schedule.name == "range" else StopCriterion(config)


class RangeTest(StopCriterion):
    """The horizon of a range test, which ends at `train.steps` or as soon as the loss diverges."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.points: list[tuple[float, float]] = []
        """Learning rate and loss of each step."""

    def trained(self, record: Mapping[str, Any]) -> None:
        self.points.append((record["lr"], record["loss"]))

    @property
    def has_diverged(self) -> bool:
        """True if the last loss is not finite or exceeds `_DIVERGED` times the lowest."""
        if not self.points:
            return False
        loss, lowest = self.points[-1][1], min(loss for _, loss in self.points)
        return not math.isfinite(loss) or loss > _DIVERGED * lowest

    def is_reached(self, step: int) -> bool:
        return self.has_diverged or super().is_reached(step)

    def may_end_at(self, step: int) -> bool:
        return True

    def reason(self, step: int) -> str:
        return f"the loss diverged at lr {self.points[-1][0]:.2e}" if self.has_diverged else super().reason(step)

    def closing_lines(self, folder: Path) -> list[str]:
        lr = suggested_lr(self.points)
        points = [{"lr": lr, "loss": loss if math.isfinite(loss) else None} for lr, loss in self.points]
        where = f"  every step of the test: {folder / FILE}"
        try:
            write_atomically(folder / FILE, json.dumps({"suggested_lr": lr, "points": points}) + "\n")
        except OSError as error:
            where = f"  {folder / FILE} cannot be written: {error}"
        if lr is None:
            return ["no learning rate to suggest: the loss did not fall; try another schedule.lr_range", where]
        return [f"suggested: optim.lr={lr:.1e}, where the loss fell fastest", where]

    def state_dict(self) -> dict[str, Any]:
        points = [(lr, loss if math.isfinite(loss) else None) for lr, loss in self.points]
        return {**super().state_dict(), "points": [list(point) for point in points]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.points = [(lr, math.nan if loss is None else loss) for lr, loss in state.get("points", [])]


def suggested_lr(points: Sequence[tuple[float, float]]) -> float | None:
    """Return the learning rate at which the loss fell fastest, or None if it did not fall.

    The slope is taken with respect to the logarithm of the learning rate, up to the minimum of the smoothed loss.
    `points` are pairs (learning rate, loss) in order of rising learning rate.
    """
    good = [(lr, loss) for lr, loss in points if math.isfinite(loss) and lr > 0]
    if len(good) < 3:
        return None
    means = []
    for place in range(len(good)):
        half = min(_HALF_WINDOW, place, len(good) - 1 - place)
        near = [loss for _, loss in good[place - half : place + half + 1]]
        means.append(sum(near) / len(near))
    lowest = means.index(min(means))
    slopes = [
        ((means[place + 1] - means[place - 1]) / math.log(good[place + 1][0] / good[place - 1][0]), place)
        for place in range(1, min(lowest + 1, len(good) - 1))
    ]
    steepest, place = min(slopes, default=(0.0, 0))
    return good[place][0] if steepest < 0 else None
