"""The objective for Kahneman-Tversky optimization (KTO)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from trainer.config.declare import declare
from trainer.objective import Direction, Objective, ObjectiveInputs, pairs, register_objective

if TYPE_CHECKING:
    import torch


@register_objective("kto")
@dataclass(frozen=True)
class Kto(Objective):
    """Kahneman-Tversky optimization: learn from single responses labeled good or bad, without pairs.

    The loss of a response is w * (1 - sigmoid(s * beta * (g - k))).  g is the response's log-ratio log(p / p_ref),
    where p and p_ref are its probabilities under the model and the reference model; s is 1 for a good response and -1
    for a bad one; w is the weight of the response's label.  k estimates the KL divergence of the model from the
    reference: it is the mean log-ratio of mismatched responses (responses to other prompts) over the global batch (in
    an evaluation, over all held-out samples), or zero if this mean is negative.  No gradient flows through k.

    Source: Ethayarajh et al. 2024, arXiv:2402.01306, equation 7.
    """

    rows_per_sample, needs, num_classes = 2, ("reference", "labels"), 2
    better: ClassVar[Mapping[str, Direction]] = {"reward_good": "higher", "reward_bad": "lower", "kl": "lower"}

    beta: float = declare(0.1, "strength of the penalty for moving away from the reference model", above=0)
    good_weight: float = declare(1.0, "weight of the responses labeled good", at_least=0)
    bad_weight: float = declare(1.0, "weight of the responses labeled bad", at_least=0)

    def statistic(self, inputs: ObjectiveInputs) -> torch.Tensor:
        """Return the log-ratio of the mismatched response in the second row of each sample, (S,)."""
        return pairs(inputs.logps - inputs.reference)[1]

    def __call__(self, inputs: ObjectiveInputs) -> torch.Tensor:
        log_ratio = pairs(inputs.logps - inputs.reference)[0]
        kl = inputs.mean_statistic.clamp(min=0)
        good = inputs.labels > 0
        inputs.log("reward_good", self.beta * log_ratio.detach(), over=good)
        inputs.log("reward_bad", self.beta * log_ratio.detach(), over=~good)
        inputs.log("kl", kl.expand_as(log_ratio))
        utility = (self.beta * (log_ratio - kl) * (2 * good.to(log_ratio.dtype) - 1)).sigmoid()
        return (1 - utility) * (good * self.good_weight + ~good * self.bad_weight)
