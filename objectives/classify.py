"""The objective for text classification."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from trainer.config.declare import declare
from trainer.objective import Direction, Objective, ObjectiveInputs, register_objective

if TYPE_CHECKING:
    import torch


@register_objective("classify")
@dataclass(frozen=True)
class Classify(Objective):
    """Text classification: assign one of `num_labels` labels to each text.

    The loss of a text is the cross-entropy between its scores and its label.  The scores are the logits that a new head
    computes at the text's last token.
    """

    needs = ("scores", "labels")
    better: ClassVar[Mapping[str, Direction]] = {"accuracy": "higher"}

    num_labels: int = declare(2, "number of classes; labels are 0 to num_labels - 1", at_least=2, at_most=2**15)

    @property
    def outputs(self) -> int:  # type: ignore[override]
        """The number of scores: one per class."""
        return self.num_labels

    def __call__(self, inputs: ObjectiveInputs) -> torch.Tensor:
        inputs.log("accuracy", (inputs.scores.argmax(1) == inputs.labels).double())
        return -inputs.scores.log_softmax(1).gather(1, inputs.labels.unsqueeze(1)).squeeze(1)
