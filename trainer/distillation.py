"""The Trainer for distillation, in which a student learns to match a teacher's next-token distribution.

The teacher is a frozen model, sharded like the student.

Shape suffixes: n tokens in a chunk, N tokens in a micro-batch, D model width, V vocabulary size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainer.config.schema import RunConfig
from trainer.config.teacher import TEACHER_KEY, teacher_config
from trainer.data.loader import Batch
from trainer.loss import IGNORE, Gradients, find_loss, replace_loss
from trainer.model.gradients import reshard
from trainer.trainer import Trainer
from trainer.weights.loading import load_base

TEACHER = "teacher"
"""Key under which a checkpoint's state stores the identity of the teacher's weights."""

_CHUNK_BYTES = 16 * 2**20
"""Maximum size in bytes of one model's fp32 logits for a chunk, unless a single token's logits take more.  Several
tensors of this size are in memory at the same time."""


class DistillationTrainer(Trainer):
    """Trains a student to match the next-token distribution of a teacher, which is a frozen model.

    Logits are computed in chunks and never materialized in full, unless a model itself returns its logits.
    """

    takes_objectives = True
    """True, since this Trainer requires an objective other than next-token prediction."""

    def __init__(self, config: RunConfig) -> None:
        self.teacher: nn.Module | None = None
        super().__init__(config)
        config_of_teacher = teacher_config(self.config)
        assert self.teacher is not None
        assert config_of_teacher is not None
        with self.world.building():
            self.state.add(TEACHER, load_base(self.teacher, config_of_teacher, self.world, TEACHER_KEY))

    def build_model(self, config: RunConfig | None = None) -> nn.Module:
        """Return the sharded model of `config` (None: this run's).

        For the run's own model, builds the teacher first.  Collective.
        """
        if config is None:
            config_of_teacher = self.world.agreed(lambda: teacher_config(self.config))
            assert config_of_teacher is not None
            self.teacher = super().build_model(config_of_teacher).requires_grad_(False).eval()
        return super().build_model(config)

    def loss(self, batch: Batch) -> torch.Tensor:
        """Return this rank's loss summed over the batch's targets.

        Collectives: first those of the teacher's forward pass, then those of the student's.
        """
        assert self.teacher is not None
        teacher = outputs_of(self.teacher, batch)
        divergence = torch.zeros((), device=self.world.device, dtype=torch.float64)

        def distillation_loss(hidden: torch.Tensor, weight: torch.Tensor | None, targets: torch.Tensor) -> torch.Tensor:
            objective, needs_gradients = self.config.objective, torch.is_grad_enabled()
            loss, sum_of_divergences = _DistillationLoss.apply(  # type: ignore[no-untyped-call]
                hidden.flatten(0, -2), weight, targets.flatten(), teacher, objective, needs_gradients
            )
            divergence.add_(sum_of_divergences)
            return loss

        with replace_loss(distillation_loss):
            loss = super().loss(batch)
        self.log("divergence", divergence, over=(batch["targets"] != IGNORE).sum())
        return loss


@torch.no_grad()
def outputs_of(model: nn.Module, batch: Batch) -> Outputs:
    """Return a model's final hidden states for a batch, and the weight that projects them to logits.

    Collectives: those of a forward pass.
    """
    captured: list[Outputs] = []

    def capture(hidden: torch.Tensor, weight: torch.Tensor | None, targets: torch.Tensor) -> torch.Tensor:
        # Copy the weight, because `reshard` below frees it if it was gathered.
        captured.append(Outputs(hidden.flatten(0, -2), None if weight is None else weight.clone()))
        return hidden.new_zeros(())

    with replace_loss(capture):
        find_loss(model)(batch)
    reshard(model)
    return captured[0]


@dataclass(frozen=True)
class Outputs:
    """Hidden states (N, D), and the weight (V, D) that projects them to logits.

    If the weight is None, `hidden` holds the logits (N, V) themselves.
    """

    hidden: torch.Tensor
    weight: torch.Tensor | None

    def logits(self, start: int, stop: int) -> torch.Tensor:
        """Return rows [start, stop) of the logits in fp32, (n, V)."""
        hidden_nD = self.hidden[start:stop]
        return (hidden_nD if self.weight is None else hidden_nD @ self.weight.T).float()


def _rows_per_chunk(vocab_size: int) -> int:
    return max(1, _CHUNK_BYTES // (4 * vocab_size))


class _DistillationLoss(torch.autograd.Function):
    """Returns the loss and the divergence from the teacher, each summed over targets; only the loss has a gradient.

    Gradients are computed in the forward pass, while a chunk's logits exist, as in `linear_cross_entropy`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor | None,
        targets_N: torch.Tensor,
        teacher: Outputs,
        objective: Any,
        needs_gradients: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        student, needs_grad = Outputs(hidden_ND, weight_VD), ctx.needs_input_grad
        gradients = Gradients(hidden_ND, needs_gradients and needs_grad[0], needs_gradients and needs_grad[1])
        chunk_rows = _rows_per_chunk(hidden_ND.shape[1] if weight_VD is None else weight_VD.shape[0])
        loss, divergence = (hidden_ND.new_zeros((), dtype=torch.float32) for _ in range(2))
        for start in range(0, len(targets_N), chunk_rows):
            stop = min(start + chunk_rows, len(targets_N))
            targets_n = targets_N[start:stop]
            mask_n = targets_n != IGNORE
            logits_nV = student.logits(start, stop).requires_grad_(gradients.is_needed)
            with torch.set_grad_enabled(gradients.is_needed):
                logps_nV = logits_nV.log_softmax(1)
                divergences_n = objective.divergence(logps_nV, teacher.logits(start, stop).log_softmax(1))
                target_logps_n = logps_nV.gather(1, targets_n.where(mask_n, 0).unsqueeze(1)).squeeze(1)
                losses_n = (1 - objective.hard) * divergences_n - objective.hard * target_logps_n
                chunk_loss = losses_n.where(mask_n, 0.0).sum()
            loss += chunk_loss.detach()
            divergence += divergences_n.detach().where(mask_n, 0.0).sum()
            if gradients.is_needed:
                (grad_nV,) = torch.autograd.grad(chunk_loss, logits_nV)
                grad_nV = grad_nV.to(hidden_ND.dtype)
                if weight_VD is not None:
                    gradients.add(grad_nV, hidden_ND[start:stop], weight_VD, start)
                elif gradients.hidden_ND is not None:
                    gradients.hidden_ND[start:stop] = grad_nV
        ctx.save_for_backward(gradients.hidden_ND, gradients.weight_VD)
        ctx.weight_dtype = None if weight_VD is None else weight_VD.dtype
        ctx.mark_non_differentiable(divergence)
        return loss, divergence

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_hidden_ND, grad_weight_VD = ctx.saved_tensors
        scale = grad_outputs[0]
        hidden = None if grad_hidden_ND is None else grad_hidden_ND * scale
        weight = None if grad_weight_VD is None else (grad_weight_VD * scale).to(ctx.weight_dtype)
        return hidden, weight, None, None, None, None
