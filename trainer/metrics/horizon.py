"""Horizon: where a run ends, and which of its evaluations was the best.

It ends at `train.steps`, or sooner, when as many evaluations as `eval.patience` says have passed without a new best.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.config import RunConfig


class Horizon:
    """The end of a run as far as it is known.  All ranks keep the same."""

    may_be_absent = True
    """In checkpoints of before there was one."""

    def __init__(self, config: RunConfig) -> None:
        self.num_steps, self._eval = config.train.steps, config.eval
        self.best: tuple[float, int] | None = None
        """Loss and step of the best evaluation, whether its checkpoint is there or not."""
        self.num_worse = 0
        """Evaluations since that one."""
        self._latest: int | None = None

    def trained(self, record: Mapping[str, Any]) -> None:
        """Take the line of a step into account."""

    def conclude(self, folder: Path) -> list[str]:
        """Return what there is to say at the end of the run in `folder`, beside what every run has.  On rank 0."""
        return []

    def evaluated(self, record: Mapping[str, Any], step: int) -> None:
        """Take the evaluation of a step into account, once.

        What is not finite, or has no target, is not better than anything.
        """
        if step == self._latest:
            return
        self._latest, value = step, record.get(self._eval.metric)
        if value is not None and math.isfinite(value) and (self.best is None or value < self.best[0]):
            self.best, self.num_worse = (value, step), 0
        else:
            self.num_worse += 1

    @property
    def has_lost_patience(self) -> bool:
        """True once `eval.patience` evaluations have passed without a new best."""
        return 0 < self._eval.patience <= self.num_worse

    def is_reached(self, step: int) -> bool:
        """Return whether the run ends with step `step`, which is completed, and evaluated where that is due."""
        return step >= self.num_steps or self.has_lost_patience

    def may_end_at(self, step: int) -> bool:
        """Return whether the run may end with step `step`, for all that is known before its evaluation."""
        return step == self.num_steps or (self._eval.patience > 0 and self._eval.due(step))

    def reason(self, step: int) -> str:
        """Return why the run ends at `step`."""
        if step >= self.num_steps or not self.has_lost_patience:
            return "train.steps reached"
        best = f", which is {self.best[0]:.4f} at step {self.best[1]}" if self.best else ""
        return f"eval.patience={self._eval.patience}: {self.num_worse} evaluations without a new best{best}"

    def loaded(self, is_own: bool) -> None:
        """A checkpoint was loaded: of another run, whose best ones are not here, the evaluations do not count."""
        if not is_own:
            self.best, self.num_worse, self._latest = None, 0, None

    def state_dict(self) -> dict[str, Any]:
        best = [] if self.best is None else [list(self.best)]
        return {"metric": self._eval.metric, "best": best, "num_worse": self.num_worse, "latest": self._latest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there, or from nothing where another field told the best: numbers of two are not compared."""
        is_comparable = state["metric"] == self._eval.metric
        self.best = next(((loss, step) for loss, step in state["best"]), None) if is_comparable else None
        self.num_worse = state["num_worse"] if is_comparable else 0
        self._latest = state["latest"]
