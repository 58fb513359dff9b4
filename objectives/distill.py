"""Distillation from a teacher."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from trainer.objective import Direction, TokenObjective, register_objective
from trainer.recipe import declare

if TYPE_CHECKING:
    import torch


@register_objective("distill")
@dataclass(frozen=True)
class Distill(TokenObjective):
    """Distillation: imitate a teacher's probabilities of each next token.

    The loss of a token is hard * (-log p) + (1 - hard) * D, where p is the probability of the target and D the
    generalized Jensen-Shannon divergence of student S and teacher T: with M = (1 - beta) * S + beta * T, it is
    beta * KL(T, M) + (1 - beta) * KL(S, M).  With beta=0 it is KL(T, S), the usual choice; with beta=1 it is KL(S, T).

    Sources: Hinton et al. 2015, arXiv:1503.02531; Agarwal et al. 2023, arXiv:2306.13649, equation 1.
    """

    better: ClassVar[Mapping[str, Direction]] = {"divergence": "lower"}

    teacher: str | None = declare(None, "the model to imitate: a Hugging Face folder, a run folder or a checkpoint")
    beta: float = declare(
        0.0, "0: KL(teacher, student); 1: KL(student, teacher); between: a mixture", at_least=0, at_most=1
    )
    temperature: float = declare(1.0, "divides the logits of both before the softmax", above=0)
    hard: float = declare(0.0, "weight of the cross-entropy with the targets in the data", at_least=0, at_most=1)

    def divergence(self, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        """Return the divergence of each token, (n,), given the log-probabilities of both models, (n, V)."""
        student, teacher = ((logps / self.temperature).log_softmax(-1) for logps in (student, teacher))
        if self.beta == 0:
            return _kl(teacher, student)
        if self.beta == 1:
            return _kl(student, teacher)
        mixture = (student + math.log1p(-self.beta)).logaddexp(teacher + math.log(self.beta))
        return self.beta * _kl(teacher, mixture) + (1 - self.beta) * _kl(student, mixture)


def _kl(logps: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the Kullback-Leibler divergence KL(logps, other) for log-probabilities (n, V): (n,)."""
    return (logps.exp() * (logps - other)).sum(-1)
