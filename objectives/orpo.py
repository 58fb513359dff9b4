"""The objective for odds ratio preference optimization (ORPO)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.config.declare import declare
from trainer.objective import Objective, ObjectiveInputs, log_sigmoid, pairs, register_objective

from .dpo import REWARD_METRICS, report_rewards

if TYPE_CHECKING:
    import torch


@register_objective("orpo")
@dataclass(frozen=True)
class Orpo(Objective):
    """Odds ratio preference optimization, without a reference model.

    The loss combines supervised fine-tuning on the chosen response with a term that raises the odds of this response
    relative to those of the rejected one.

    The loss of a pair is -c - beta * log sigmoid(log odds(c) - log odds(r)), where c and r are the mean
    log-probabilities of the target tokens in the chosen and rejected responses, and log odds(x) = x - log(1 - exp(x)).

    Source: Hong et al. 2024, arXiv:2403.07691, equations 6 and 7.
    """

    rows_per_sample, better = 2, REWARD_METRICS

    beta: float = declare(
        0.1, "weight of the odds-ratio term, relative to the SFT loss on the chosen response", at_least=0
    )

    def __call__(self, inputs: ObjectiveInputs) -> torch.Tensor:
        means = inputs.logps / inputs.lengths
        chosen, rejected = pairs(means)
        report_rewards(inputs, self.beta * chosen, self.beta * rejected)
        log_odds_chosen, log_odds_rejected = pairs(means - (-means.expm1()).log())
        return -chosen - self.beta * log_sigmoid(log_odds_chosen - log_odds_rejected)
