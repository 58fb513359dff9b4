"""The head that replaces the output projection onto the vocabulary in reward models and classifiers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from trainer.loss import linear_cross_entropy

_INITIAL_STD = 0.02
"""Standard deviation of the initial weights: transformers' default for such heads."""

SCORE = "score"
"""Name of the head's parameter in its module, and of the head itself in transformers."""


class ScoreHead(nn.Module):
    """A linear map from hidden states (..., D) to scores (..., num_outputs), without a bias.

    Like the output projection that the head replaces, `forward` returns the result of `linear_cross_entropy` if it is
    given targets: by default, the summed cross-entropy of the scores.  Therefore the functions in `trainer.loss` also
    work for a model with this head.
    """

    def __init__(self, in_features: int, num_outputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.score = nn.Parameter(torch.empty(num_outputs, in_features, dtype=dtype))

    @property
    def weight(self) -> nn.Parameter:
        """The parameter under the usual name, for code that inspects output layers."""
        return self.score

    def reset_parameters(self) -> None:
        nn.init.normal_(self.score, std=_INITIAL_STD)

    def forward(self, hidden: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(hidden, self.score) if targets is None else linear_cross_entropy(hidden, self.score, targets)


def is_score_name(name: str) -> bool:
    """Return whether `name` is the name of a `ScoreHead`'s parameter, judging by its last part."""
    return name.rpartition(".")[2] == SCORE


def replaced_output_name(model: nn.Module) -> str | None:
    """Return the name of the weight that the model's `ScoreHead` replaced, or None if the model has no such head."""
    heads = [name for name, module in model.named_modules() if isinstance(module, ScoreHead)]
    return f"{heads[0]}.weight" if heads else None
