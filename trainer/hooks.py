"""What a run may do beside training: a `Hook` is called around each step, after evaluations and at the end.

`Trainer.build_hooks` lists the hooks of a run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from trainer.metrics.step_metrics import Update


class Hook:
    """Something that a run does beside training.  Its methods do nothing unless they are overridden.

    Hooks never decide whether the run saves, evaluates or stops; `Trainer.fit` does.  All ranks have the same hooks in
    the same order and call them at the same points, so the methods may be collective, except for `close`.
    """

    def note(self, step: int) -> str:
        """Return a line to print when the run starts, or an empty string.  step: the last completed step; 0 if none."""
        return ""

    def begin_step(self, step: int) -> None:
        """Called when `step` starts, before its micro-batches are taken from the loader."""

    def after_update(self, is_finite: torch.Tensor | None) -> None:
        """Called when the optimizer has updated the weights, before the gradients are freed.

        is_finite: a scalar on the device, false if the update was skipped; None if that was not checked.
        """

    def end_step(self, step: int, update: Update) -> None:
        """Called in reverse order of the list when the host has queued all work of `step`.

        A GPU may still be running it: reading the loss or the norm of `update` waits for the device.
        """

    def after_evaluation(self, step: int) -> None:
        """Called after an evaluation that was not aborted."""

    def close(self, has_failed: bool) -> None:
        """Called in reverse order when a loop over `Trainer.steps` ends, by a failed rank without the others.

        has_failed: whether `steps` itself has raised an exception.  One in the body of the caller's loop counts as
            leaving early, because a generator cannot tell the two apart.
        """
