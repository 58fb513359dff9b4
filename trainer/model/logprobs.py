"""Per-token log-probabilities, for losses that weight each token, such as policy gradients."""

from __future__ import annotations

import torch
from torch import nn

from trainer.errors import UserError
from trainer.experts import find_balance
from trainer.loss import find_loss, per_token_losses, replace_loss


def token_logprobs(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the log-probability of each target, (B, T) in fp32, with gradients; 0 for ignored targets.

    batch: `tokens`, `targets`, and any other arguments of the model's `forward`, as in a training step.  The full
    logits are never in memory if the model computes its loss with `linear_cross_entropy`.

    Raises UserError if the model, in training mode, adds loss terms that cannot be attributed to individual tokens, or
    if it computes its loss without the functions in `trainer.loss`.
    """
    balance = find_balance(model) if model.training else None
    if balance is not None and (balance.loss > 0 or balance.sequence_loss > 0 or balance.z_loss > 0):
        raise UserError(
            "per-token log-probabilities: the routers' losses cannot be attributed to individual tokens\n"
            "  to fix: set model.balance=0 model.sequence_balance=0 model.z_loss=0; model.balance_rate adds no loss"
        )
    with replace_loss(per_token_losses):
        losses_BT = find_loss(model)(batch)
    if losses_BT.shape != batch["targets"].shape:
        raise UserError(
            f"per-token log-probabilities: {type(model).__name__} sums its loss over all tokens itself\n"
            "  to fix: compute it with trainer.linear_cross_entropy, or have the model return logits"
        )
    return -losses_BT
