"""Layers that recipes share: torch's own, with an initialisation that is told its standard deviation."""

from __future__ import annotations

import torch
from torch import nn

from trainer.loss import linear_cross_entropy


class Linear(nn.Linear):
    """A linear map with weights from N(0, std) and no bias unless asked; the bias starts at zero."""

    def __init__(self, in_features: int, out_features: int, std: float, bias: bool = False) -> None:
        self.std = std
        super().__init__(in_features, out_features, bias=bias)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Output(Linear):
    """The projection onto the vocabulary; with targets, the summed loss without ever holding all logits.

    The weight is used in this module's own forward alone, so that it may be an FSDP unit of its own.
    """

    def forward(self, hidden_BTD: torch.Tensor, targets_BT: torch.Tensor | None = None) -> torch.Tensor:
        if targets_BT is None:
            return super().forward(hidden_BTD)
        return linear_cross_entropy(hidden_BTD, self.weight, targets_BT)


class Head(nn.Module):
    """Final norm and output projection, or with targets their summed loss."""

    def __init__(self, norm: nn.Module, dim: int, vocab_size: int, std: float) -> None:
        super().__init__()
        self.norm = norm
        self.output = Output(dim, vocab_size, std=std)

    def forward(self, x_BTD: torch.Tensor, targets_BT: torch.Tensor | None = None) -> torch.Tensor:
        return self.output(self.norm(x_BTD), targets_BT)


class Embedding(nn.Embedding):
    """A table of vectors from N(0, std)."""

    def __init__(self, num_embeddings: int, embedding_dim: int, std: float) -> None:
        self.std = std
        super().__init__(num_embeddings, embedding_dim)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


def split_heads(x_BTD: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Return (B, N, T, H) for (B, T, N x H)."""
    return x_BTD.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def merge_heads(x_BNTH: torch.Tensor) -> torch.Tensor:
    """Return (B, T, N x H) for (B, N, T, H)."""
    return x_BNTH.transpose(1, 2).flatten(-2)
