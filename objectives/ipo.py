"""The objective for identity preference optimization (IPO)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.config.declare import declare
from trainer.objective import Objective, ObjectiveInputs, pairs, register_objective

from .dpo import REWARD_METRICS, report_rewards

if TYPE_CHECKING:
    import torch


@register_objective("ipo")
@dataclass(frozen=True)
class Ipo(Objective):
    """Identity preference optimization: like DPO, but the margin has a target value instead of growing without limit.

    The loss of a pair is (m - 1 / (2 * beta))^2.  The margin m is the log-ratio of the chosen response minus that of
    the rejected one.  A response's log-ratio is log(p / p_ref) divided by its number of target tokens, where p and
    p_ref are its probabilities under the model and the reference model.

    Source: Azar et al. 2023, arXiv:2310.12036, equation 17, where log-ratios are not divided by the number of tokens.
    """

    rows_per_sample, needs, better = 2, ("reference",), REWARD_METRICS

    beta: float = declare(0.1, "the target margin is 1 / (2 * beta)", above=0)

    def __call__(self, inputs: ObjectiveInputs) -> torch.Tensor:
        chosen, rejected = pairs((inputs.logps - inputs.reference) / inputs.lengths)
        report_rewards(inputs, self.beta * chosen, self.beta * rejected)
        return (chosen - rejected - 1 / (2 * self.beta)) ** 2
