"""The load-balancing loss of a mixture of experts, over the global batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from trainer.data.transfer import prefetch_to_device
from trainer.distributed.world import World


class BalanceLoss(nn.Module):
    """The load-balancing loss of all layers, over the global batch; it is lowest if all experts are chosen equally
    often.

    For each expert, the share of choices that fell on it is multiplied by its mean probability; the sum over experts is
    scaled by the number of experts and the coefficient (Fedus et al. 2021, arXiv:2101.03961, equations 4 to 6).  Shares
    and means are over the tokens that the loss counts, in all layers, micro-batches and ranks (Qiu et al. 2025,
    arXiv:2501.11873), so the loss does not depend on the mesh; `global_balance` ensures this in training.  Elsewhere
    they are those of the batch.
    """

    def __init__(self, coefficient: float, num_experts: int, num_chosen: int, num_layers: int) -> None:
        super().__init__()
        self.coefficient, self.num_experts, self.num_chosen = coefficient, num_experts, num_chosen
        self.num_layers = num_layers
        self.reduce_choices: Callable[[torch.Tensor], torch.Tensor] = _identity

    def forward(self, choices_E: torch.Tensor, probs_E: torch.Tensor) -> torch.Tensor:
        """Return the loss summed over this batch's tokens.

        choices_E: how often each expert was chosen (integers).  probs_E: the sum of its probabilities (fp32).  Both are
        over the tokens that count, in all layers.
        """
        all_choices_E = self.reduce_choices(choices_E)
        shares_E = all_choices_E * (self.num_chosen / all_choices_E.sum().clamp(min=1))
        return self.coefficient * self.num_experts / self.num_layers * (shares_E * probs_E).sum()


def _identity(choices_E: torch.Tensor) -> torch.Tensor:
    return choices_E


@contextmanager
def global_balance(
    model: nn.Module, micro_batches: Sequence[Any], loss: Callable[[Any], torch.Tensor], world: World
) -> Iterator[None]:
    """Inside the block, compute the balance loss of `model` over `micro_batches` on all ranks.

    The loss is a product of two sums, so the choices must be known before the first backward pass.  A single
    micro-batch sums them over the ranks in its own forward pass; with several, an extra forward pass of `loss` on each
    counts them first.  No-op for a model without a `BalanceLoss` child.  Collectives: one all-reduce of an integer per
    expert, and those of the extra passes.
    """
    found = [child for child in model.children() if isinstance(child, BalanceLoss)]
    for balance in found:
        if len(micro_batches) == 1:
            balance.reduce_choices = world.sum_on_device
        else:
            choices_E = world.sum_on_device(_count(balance, micro_batches, loss, world.device))
            balance.reduce_choices = lambda own_E, known_E=choices_E: known_E  # type: ignore[misc]
    try:
        yield
    finally:
        for balance in found:
            balance.reduce_choices = _identity


@torch.no_grad()
def _count(
    balance: BalanceLoss, micro_batches: Sequence[Any], loss: Callable[[Any], torch.Tensor], device: torch.device
) -> torch.Tensor:
    """Count how often the tokens of all micro-batches of this rank choose each expert."""
    total_E = torch.zeros(balance.num_experts, dtype=torch.int64, device=device)
    balance.reduce_choices = total_E.add_
    for batch in prefetch_to_device(micro_batches, device):
        loss(batch)
    return total_E
