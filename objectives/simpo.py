"""The objective for simple preference optimization (SimPO)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.config.declare import declare
from trainer.objective import Objective, ObjectiveInputs, log_sigmoid, pairs, register_objective

from .dpo import REWARD_METRICS, report_rewards

if TYPE_CHECKING:
    import torch


@register_objective("simpo")
@dataclass(frozen=True)
class Simpo(Objective):
    """Simple preference optimization: like DPO, but with mean log-probabilities and without a reference model.

    The loss of a pair is -log sigmoid(beta * (c - r) - gamma), where c and r are the mean log-probabilities of the
    target tokens in the chosen and the rejected response.

    Source: Meng et al. 2024, arXiv:2405.14734, equation 6.
    """

    rows_per_sample, better = 2, REWARD_METRICS

    beta: float = declare(2.0, "scale of the mean log-probabilities", above=0)
    gamma: float = declare(1.0, "target margin between the rewards of the chosen and the rejected response", at_least=0)

    def __call__(self, inputs: ObjectiveInputs) -> torch.Tensor:
        chosen, rejected = pairs(self.beta * inputs.logps / inputs.lengths)
        report_rewards(inputs, chosen, rejected)
        return -log_sigmoid(chosen - rejected - self.gamma)
