"""The objective for direct preference optimization (DPO), and the reward metrics shared by the pairwise objectives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.config.declare import declare
from trainer.objective import Direction, Objective, ObjectiveInputs, log_sigmoid, pairs, register_objective

if TYPE_CHECKING:
    import torch

REWARD_METRICS: Mapping[str, Direction] = {
    "accuracy": "higher",
    "margin": "higher",
    "reward_chosen": "higher",
    "reward_rejected": "lower",
}
"""Maps each metric that `report_rewards` logs to whether higher or lower values are better."""


def report_rewards(inputs: ObjectiveInputs, chosen: torch.Tensor, rejected: torch.Tensor) -> None:
    """Log the rewards of the chosen and rejected responses, (S,) each, and their difference, the margin.

    `accuracy` is the share of pairs with a positive margin.
    """
    chosen, rejected = chosen.detach(), rejected.detach()
    inputs.log("accuracy", (chosen > rejected).float())
    inputs.log("margin", chosen - rejected)
    inputs.log("reward_chosen", chosen)
    inputs.log("reward_rejected", rejected)


@register_objective("dpo")
@dataclass(frozen=True)
class Dpo(Objective):
    """Direct preference optimization: prefer the chosen response to the rejected one, relative to a reference model.

    The loss of a pair is -log sigmoid(beta * ((c - c') - (r - r'))), where c and r are the log-probabilities of the
    chosen and the rejected response, and c' and r' are their log-probabilities under the reference model.

    Source: Rafailov et al. 2023, "Direct Preference Optimization", arXiv:2305.18290.
    """

    rows_per_sample, needs, better = 2, ("reference",), REWARD_METRICS

    beta: float = declare(0.1, "strength of the penalty for moving away from the reference model", above=0)

    def __call__(self, inputs: ObjectiveInputs) -> torch.Tensor:
        chosen, rejected = pairs(self.beta * (inputs.logps - inputs.reference))
        report_rewards(inputs, chosen, rejected)
        return -log_sigmoid(chosen - rejected)
