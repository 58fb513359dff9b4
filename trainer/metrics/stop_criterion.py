"""Decides when a run ends, and tracks its best evaluation.

A run ends at `train.steps`, or earlier, once `eval.patience` consecutive evaluations have not improved on the best one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.config import RunConfig


class StopCriterion:
    """Decides at which step a run ends.  The state is identical on all ranks."""

    may_be_absent = True
    """Older checkpoints do not contain this state."""

    def __init__(self, config: RunConfig) -> None:
        self.num_steps, self._eval = config.train.steps, config.eval
        self.best: tuple[float, int] | None = None
        """Value of `eval.metric` and step of the best evaluation, whether or not its checkpoint still exists."""
        self.num_worse = 0
        """Number of evaluations since the best one."""
        self._latest: int | None = None

    def trained(self, record: Mapping[str, Any]) -> None:
        """Process the `train` record of a step."""

    def closing_lines(self, folder: Path) -> list[str]:
        """Return additional lines to print at the end of the run in `folder`.  Called on rank 0."""
        return []

    def evaluated(self, record: Mapping[str, Any], step: int) -> None:
        """Process the evaluation of a step, at most once per step.

        A value that is missing or not finite never counts as an improvement.
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
        """Return whether the run ends at `step`.  Call after the step and its evaluation, if due, are complete."""
        return step >= self.num_steps or self.has_lost_patience

    def may_end_at(self, step: int) -> bool:
        """Return whether the run may end at `step`, judging by what is known before its evaluation."""
        return step == self.num_steps or (self._eval.patience > 0 and self._eval.due(step))

    def reason(self, step: int) -> str:
        """Return why the run ends at `step`, as text."""
        if step >= self.num_steps or not self.has_lost_patience:
            return "train.steps reached"
        best = f", which is {self.best[0]:.4f} at step {self.best[1]}" if self.best else ""
        return f"eval.patience={self._eval.patience}: {self.num_worse} evaluations without a new best{best}"

    def loaded(self, is_own: bool) -> None:
        """Handle a loaded checkpoint.

        If it belongs to another run (`is_own` is False), reset the best evaluation: that run's checkpoints are not in
        this run's folder.
        """
        if not is_own:
            self.best, self.num_worse, self._latest = None, 0, None

    def state_dict(self) -> dict[str, Any]:
        best = [] if self.best is None else [list(self.best)]
        return {"metric": self._eval.metric, "best": best, "num_worse": self.num_worse, "latest": self._latest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the best evaluation.  It is reset if `eval.metric` has changed: the values are not comparable."""
        is_comparable = state["metric"] == self._eval.metric
        self.best = next(((loss, step) for loss, step in state["best"]), None) if is_comparable else None
        self.num_worse = state["num_worse"] if is_comparable else 0
        self._latest = state["latest"]
