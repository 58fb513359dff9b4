"""Trainers that do one thing another way: what a default is compared with.

Each computes what the default computes, so that losses agree and only time and memory differ.  Imports torch: a
benchmark's own process imports it where it trains.
"""

from __future__ import annotations

import torch

from trainer import Trainer
from trainer.loss import cross_entropy


class WholeLoss(Trainer):
    """Has all logits of a micro-batch at once, in fp32."""

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return cross_entropy(self.model(batch["tokens"]), batch["targets"])


class ForeachAdamW(Trainer):
    """Updates with torch's other AdamW, a kernel for each operation, on the parameters as they are: DTensors."""

    def build_optimizer(self) -> torch.optim.Optimizer:
        built = super().build_optimizer()
        assert not isinstance(built, torch.optim.Optimizer)
        # Not the groups as they are: those of fused AdamW say so.
        groups = [{key: group[key] for key in ("params", "weight_decay")} for group in built.parts[0].param_groups]
        optim = self.config.optim
        return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, foreach=True)
