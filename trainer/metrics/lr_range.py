"""The learning-rate range test: the rate rises from step to step, and where the loss falls fastest is a good one.

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
from trainer.metrics.horizon import Horizon

FILE = "lr_range.json"
"""The file in the run's folder with what was found."""
_HALF_WINDOW = 3
"""Steps to either side that a loss is averaged with: one batch's is noise."""
_DIVERGED = 4.0
"""The loss has diverged once it is so many times its lowest."""


def find_horizon(config: RunConfig) -> Horizon:
    """Return where the run ends: of a range test, where its loss diverges."""
    return RangeTest(config) if config.schedule.name == "range" else Horizon(config)


class RangeTest(Horizon):
    """The horizon of a range test: it ends at `train.steps`, or as soon as the loss diverges."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.points: list[tuple[float, float]] = []
        """The learning rate and the loss of each step."""

    def trained(self, record: Mapping[str, Any]) -> None:
        self.points.append((record["lr"], record["loss"]))

    @property
    def has_diverged(self) -> bool:
        """True once a loss is not finite, or several times the lowest."""
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

    def conclude(self, folder: Path) -> list[str]:
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
    """Return the learning rate at which the loss fell fastest, by its logarithm, before it was lowest; None if it did
    not fall.  `points`: (learning rate, loss), the rates rising.
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
