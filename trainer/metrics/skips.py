"""Counts skipped steps and stops the run after too many consecutive ones."""

from __future__ import annotations

import numpy as np

from trainer.errors import TrainingFailed


class SkipCounter:
    """Counts steps that were skipped because the loss or gradient norm was not finite."""

    def __init__(self, max_in_a_row: int, may_end_skipped: bool = False) -> None:
        """`may_end_skipped`: whether the last steps of a run may be skipped, as in a learning-rate range test."""
        self.max_in_a_row, self._may_end_skipped = max_in_a_row, may_end_skipped
        self.total = 0
        self.in_a_row = 0
        self.failed_since: int | None = None
        """The last good step if too many steps have been skipped since, otherwise None."""

    def count(self, loss: float, grad_norm: float, step: int) -> None:
        """Count a step, which was skipped if either value is not finite.  The values are the same on all ranks.

        Raises TrainingFailed after too many consecutive skipped steps.
        """
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
