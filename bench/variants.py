"""Trainer variants that each replace one default, for comparison in `bench.step --against` and `bench.gpu`.

Each variant computes the same result as the default, so that losses agree and only time and memory differ.  This module
imports torch; a benchmark's main process does not import it.
"""

from __future__ import annotations

from unittest import mock

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from trainer import Trainer
from trainer.hooks import Hook
from trainer.loss import cross_entropy
from trainer.metrics.hooks import CollectGarbage


class WholeLoss(Trainer):
    """Computes all logits of a micro-batch at once, in fp32."""

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return cross_entropy(self.model(batch["tokens"]), batch["targets"])


class ForeachAdamW(Trainer):
    """Uses torch's foreach AdamW, with a kernel for each operation, directly on the DTensor parameters."""

    def build_optimizer(self) -> torch.optim.Optimizer:
        default = super().build_optimizer()
        assert not isinstance(default, torch.optim.Optimizer)
        # New groups, since the existing ones contain `fused=True`.
        groups = [{key: group[key] for key in ("params", "weight_decay")} for group in default.parts[0].param_groups]
        optim = self.config.optim
        return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, foreach=True)


class TorchClip(Trainer):
    """Clips with torch's own function, directly on the DTensor gradients."""

    def fit(self) -> int:
        with mock.patch("trainer.trainer.norm_and_clip_factor", _clip_as_torch_does):
            return super().fit()


def _clip_as_torch_does(model: nn.Module, mesh: DeviceMesh, max_norm: float | None) -> tuple[torch.Tensor, None]:
    limit = float("inf") if max_norm is None else max_norm
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm, None


class AutomaticGarbageCollection(Trainer):
    """Leaves Python's automatic garbage collection on, so that it may run in the middle of a step."""

    def fit(self) -> int:
        with mock.patch.multiple(CollectGarbage, begin_step=Hook.begin_step, close=Hook.close):
            return super().fit()
