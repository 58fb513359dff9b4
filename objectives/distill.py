"""The objective for distillation from a teacher model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from trainer.config.declare import declare
from trainer.objective import Direction, TokenObjective, register_objective

if TYPE_CHECKING:
    import torch


@register_objective("distill")
@dataclass(frozen=True)
class Distill(TokenObjective):
    """Distillation: match a teacher's next-token distribution.

    The loss of a token is hard * (-log p) + (1 - hard) * D, where p is the student's probability of the target token.
    D is the divergence between the student's distribution S and the teacher's distribution T, both softened by
    `temperature`.  With beta=0, the usual choice, D is KL(T || S); with beta=1, D is KL(S || T).  In between, D is the
    generalized Jensen-Shannon divergence beta * KL(T || M) + (1 - beta) * KL(S || M), where
    M = (1 - beta) * S + beta * T.

    Sources: Hinton et al. 2015, arXiv:1503.02531; Agarwal et al. 2023, arXiv:2306.13649, equation 1.
    """

    better: ClassVar[Mapping[str, Direction]] = {"divergence": "lower"}

    teacher: str | None = declare(
        None,
        "the model to imitate: a Hugging Face folder or name, a run folder or a checkpoint",
    )
    beta: float = declare(
        0.0,
        "0: KL(teacher, student); 1: KL(student, teacher); in between: generalized Jensen-Shannon divergence",
        at_least=0,
        at_most=1,
    )
    temperature: float = declare(1.0, "divides the logits of both models before the softmax", above=0)
    hard: float = declare(0.0, "weight of the cross-entropy on the dataset's target tokens", at_least=0, at_most=1)

    def divergence(self, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        """Return the divergence at each token, (n,), given both models' log-probabilities, (n, V)."""
        student, teacher = ((logps / self.temperature).log_softmax(-1) for logps in (student, teacher))
        if self.beta == 0:
            return _kl(teacher, student)
        if self.beta == 1:
            return _kl(student, teacher)
        mixture = (student + math.log1p(-self.beta)).logaddexp(teacher + math.log(self.beta))
        return self.beta * _kl(teacher, mixture) + (1 - self.beta) * _kl(student, mixture)


def _kl(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """Return the Kullback-Leibler divergence KL(p || q) of each row, (n,), given log-probabilities (n, V)."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)
