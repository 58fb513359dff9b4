"""Log-probabilities by token, for losses that weigh each token: policy gradients, for example."""

from __future__ import annotations

import torch
from torch import nn

from trainer.errors import UserError
from trainer.experts import find_balance
from trainer.loss import find_loss, losses_of_tokens, replace_loss


def token_logprobs(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the log-probability of each target, (B, T) in fp32, with gradients; 0 for targets to ignore.

    batch: as for a training step: `tokens`, `targets` and whatever else the model's `forward` names.  Never has all
    logits in memory if the model computes its loss with `linear_cross_entropy`; see there.

    Raises UserError if the model adds to its loss terms that belong to no token, or sums its loss in another way.
    """
    balance = find_balance(model) if model.training else None
    if balance is not None and (balance.loss > 0 or balance.sequence_loss > 0 or balance.z_loss > 0):
        raise UserError(
            "log-probabilities by token: the losses of the routers belong to no token\n"
            "  model.balance=0 model.sequence_balance=0 model.z_loss=0 leave them out; model.balance_rate needs none"
        )
    with replace_loss(losses_of_tokens):
        losses_BT = find_loss(model)(batch)
    if losses_BT.shape != batch["targets"].shape:
        raise UserError(
            f"log-probabilities by token: {type(model).__name__} sums its loss over all tokens itself\n"
            "  compute it with trainer.linear_cross_entropy, or have the model return logits"
        )
    return -losses_BT
