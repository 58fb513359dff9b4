"""The objective for training reward models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.config.declare import declare
from trainer.objective import Objective, ObjectiveInputs, log_sigmoid, pairs, register_objective

from .dpo import REWARD_METRICS, report_rewards

if TYPE_CHECKING:
    import torch


@register_objective("reward")
@dataclass(frozen=True)
class Reward(Objective):
    """Reward modeling: score the chosen response of each pair higher than the rejected one.

    The loss of a pair is -log sigmoid(c - r) (Bradley-Terry) + centering * (c + r)^2, where c and r are the scores of
    the chosen and the rejected response: the outputs of a new head at each response's last token.

    Sources: Ouyang et al. 2022, arXiv:2203.02155, equation 1; for the second term, Eisenstein et al. 2023,
    arXiv:2312.09244, section 3.1.
    """

    rows_per_sample, needs, outputs, better = 2, ("scores",), 1, REWARD_METRICS

    centering: float = declare(0.0, "weight of the term that keeps scores around zero, for example 0.01", at_least=0)

    def __call__(self, inputs: ObjectiveInputs) -> torch.Tensor:
        chosen, rejected = pairs(inputs.scores[:, 0])
        report_rewards(inputs, chosen, rejected)
        return -log_sigmoid(chosen - rejected) + self.centering * (chosen + rejected) ** 2
