"""Measures the load of experts, and balances it with auxiliary router losses and by biasing the selection of experts.

Tokens per expert are counted as integers over the global batch (for `sequence_loss`, over each sequence), so the counts
do not depend on how the mesh and the micro-batches divide the tokens.

Shape suffixes: B sequences, T tokens per sequence, E experts, A experts per token, S tokens (B x T), L MoE layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from trainer.data.transfer import prefetch_to_device
from trainer.distributed.world import World
from trainer.hooks import Hook
from trainer.sequence import sum_over_slices

BALANCE = "balance"
"""Key in a checkpoint for the state of `ExpertBalance`: the number of tokens routed to each expert in the last step
that was not skipped."""


class TopKExperts(nn.Module):
    """Selects each token's experts: those with the highest scores.

    With a bias, the experts with the highest sums of score and bias are selected, but their weights depend only on the
    scores.  If `Balance.rate` is set, `ExpertBalance` raises or lowers each bias by this rate after each step that is
    not skipped (Wang et al. 2024, arXiv:2408.15664; DeepSeek-V3, arXiv:2412.19437, equation 16).  The bias is a
    persistent buffer in fp32: it is saved in checkpoints, and used in evaluation and generation.
    """

    bias: torch.Tensor | None

    def __init__(self, num_experts: int, num_chosen: int, has_bias: bool) -> None:
        super().__init__()
        self.num_chosen = num_chosen
        self.register_buffer("bias", torch.zeros(num_experts, dtype=torch.float32) if has_bias else None)

    def reset_parameters(self) -> None:
        if self.bias is not None:
            self.bias.zero_()

    def forward(self, scores_SE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores and the indices of each token's experts, both (S, A)."""
        if self.bias is None:
            scores_SA, chosen_SA = scores_SE.topk(self.num_chosen)
            return scores_SA, chosen_SA
        chosen_SA = (scores_SE + self.bias).topk(self.num_chosen).indices
        return scores_SE.gather(1, chosen_SA), chosen_SA


class Load(NamedTuple):
    """The load of a layer's experts, counting only tokens with targets; see `expert_load`."""

    choices: torch.Tensor
    """(B, E), the number of each sequence's tokens that were routed to each expert (int64)."""
    probs: torch.Tensor | None
    """(B, E), the sum over these tokens of the router's probability for each expert, in the dtype of the probabilities;
    None if they were not passed to `expert_load`."""
    squares: torch.Tensor | None
    """A scalar, the sum over these tokens of the squared log-sum-exp of the router's logits (fp32); None if
    the logits were not passed to `expert_load`."""


def expert_load(
    chosen_SA: torch.Tensor,
    is_target_BT: torch.Tensor,
    num_experts: int,
    probs_SE: torch.Tensor | None = None,
    logits_SE: torch.Tensor | None = None,
) -> Load:
    """Return the load of a layer's experts, counting only tokens with targets (where `is_target_BT` is True).

    A block returns the load as an output; it must not accumulate the load, since recomputation may run the block twice.
    probs_SE: the router's scores, normalized per token.  Needed for `Balance(loss=..., sequence_loss=...)`.
    logits_SE: the logits that the scores were computed from.  Needed for `Balance(z_loss=...)`.
    """
    num_rows = is_target_BT.shape[0]
    ones_SA = is_target_BT.flatten().unsqueeze(1).expand_as(chosen_SA).long()
    zeros_BE = torch.zeros(num_rows, num_experts, dtype=torch.int64, device=chosen_SA.device)
    choices_BE = zeros_BE.scatter_add(1, chosen_SA.reshape(num_rows, -1), ones_SA.reshape(num_rows, -1))
    probs_BE = squares = None
    if probs_SE is not None:
        probs_BE = (probs_SE.unflatten(0, is_target_BT.shape) * is_target_BT.unsqueeze(2)).sum(1)
    if logits_SE is not None:
        squares = (logits_SE.float().logsumexp(1).square() * is_target_BT.flatten()).sum()
    return Load(choices_BE, probs_BE, squares)


class Balance(nn.Module):
    """Computes the router losses of all layers, and counts how often their experts are chosen in a step.

    A mixture-of-experts model has one as a child, and calls it in training with the loads of its layers.  All losses
    are sums over the tokens with targets, like the model's own loss:

    - `loss`, the coefficient of the load-balancing loss: the fraction of tokens routed to each expert is multiplied by
      the expert's mean probability, and the sum over experts is scaled by their number (Fedus et al. 2021,
      arXiv:2101.03961, equations 4 to 6).  It is lowest if all experts are chosen equally often.  Fractions and means
      are over all layers, micro-batches and ranks (Qiu et al. 2025, arXiv:2501.11873).  With shares="exact", the
      fractions are those of this step.  They must be known before the first backward pass, so with several
      micro-batches, each takes an additional forward pass (see `global_balance`).  With shares="last", they are those
      of the previous step, at no cost, and uniform in the first step.
    - `sequence_loss`, the coefficient of the same loss within each sequence and layer, summed over layers, with
      fractions of the choices instead of the tokens (DeepSeek-V3, arXiv:2412.19437, equations 17 to 20).
    - `z_loss`, the coefficient of the squared log-sum-exp of the router's logits, summed over layers (Zoph et al. 2022,
      arXiv:2202.08906, equation 5).

    rate: the amount by which `ExpertBalance` changes the bias of each `TopKExperts` in the model after a step.
    """

    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        num_chosen: int,
        loss: float = 0.0,
        shares: Literal["exact", "last"] = "exact",
        sequence_loss: float = 0.0,
        z_loss: float = 0.0,
        rate: float | None = None,
    ) -> None:
        super().__init__()
        self.num_layers, self.num_experts, self.num_chosen = num_layers, num_experts, num_chosen
        self.loss, self.shares, self.sequence_loss, self.z_loss, self.rate = loss, shares, sequence_loss, z_loss, rate
        self.reduce_choices: Callable[[torch.Tensor], torch.Tensor] = _identity
        """Returns the choices (L, E) of all micro-batches and ranks, given those of one micro-batch on this rank."""
        self.last_choices_E: torch.Tensor | None = None
        """How often each expert was chosen in the last step, over all layers and ranks."""
        self.counted_LE: torch.Tensor | None = None
        """Choices on this rank in the micro-batches of this step so far."""
        self.total_LE: torch.Tensor | None = None
        """Choices of all ranks in this step, once they are known."""

    @property
    def needs_totals(self) -> bool:
        """Whether the loss depends on the choices of all micro-batches of a step."""
        return self.loss > 0 and self.shares == "exact"

    def forward(self, loads: Sequence[Load]) -> torch.Tensor:
        """Return the losses, summed over this batch's tokens (a scalar in fp32).

        With `sequence_loss` and split sequences (`mesh.context`): one all-gather of the counts of all layers.
        """
        choices_LBE = torch.stack([load.choices for load in loads])
        choices_LE = choices_LBE.sum(1)
        if torch.is_grad_enabled():  # extra passes that only count choices run without gradients
            self.counted_LE = choices_LE if self.counted_LE is None else self.counted_LE + choices_LE
        total = torch.zeros((), device=choices_LE.device)
        if self.loss > 0:
            probs_E = torch.stack([_require(load.probs).sum(0) for load in loads]).sum(0)
            factor = self.loss * self.num_experts / self.num_layers
            total = total + factor * (self._fractions(choices_LE) * probs_E).sum()
        if self.sequence_loss > 0:
            total = total + self.sequence_loss * self._sequence_loss(choices_LBE, loads)
        if self.z_loss > 0:
            total = total + self.z_loss * torch.stack([_require(load.squares) for load in loads]).sum()
        return total

    def _fractions(self, choices_LE: torch.Tensor) -> torch.Tensor:
        """Return the fraction of tokens routed to each expert, (E,); these sum to the number of experts per token."""
        if self.shares == "exact":
            all_choices_E = self.reduce_choices(choices_LE).sum(0)
        elif self.last_choices_E is not None:
            all_choices_E = self.last_choices_E
        else:
            all_choices_E = torch.ones_like(choices_LE[0])
        return all_choices_E * (self.num_chosen / all_choices_E.sum().clamp(min=1))

    def _sequence_loss(self, choices_LBE: torch.Tensor, loads: Sequence[Load]) -> torch.Tensor:
        probs_LBE = torch.stack([_require(load.probs) for load in loads])
        # The loss is linear in the probabilities, so each rank can use those of its own tokens.
        choices_LBE = sum_over_slices(choices_LBE)
        num_choices_LB1 = choices_LBE.sum(2, keepdim=True).clamp(min=1)
        return (self.num_experts * (choices_LBE / num_choices_LB1) * probs_LBE).sum()


def _require(value: torch.Tensor | None) -> torch.Tensor:
    if value is None:
        raise ValueError("Balance: `expert_load` needs probs_SE for loss and sequence_loss, and logits_SE for z_loss")
    return value


def _identity(choices_LE: torch.Tensor) -> torch.Tensor:
    return choices_LE


def find_balance(model: nn.Module) -> Balance | None:
    """Return the `Balance` of a model; None if it has none, like a model from transformers."""
    return next((child for child in model.children() if isinstance(child, Balance)), None)


@contextmanager
def global_balance(
    model: nn.Module, micro_batches: Sequence[Any], loss: Callable[[Any], torch.Tensor], world: World
) -> Iterator[None]:
    """Inside the block, compute the router losses of `model` from the expert choices in `micro_batches` on all ranks.

    loss: runs the model's forward pass on a micro-batch, and returns its loss.

    The load-balancing loss multiplies two sums over tokens.  If it uses this step's choices, they must therefore be
    known before the first backward pass.  A single micro-batch sums them over the ranks in its forward pass; with
    several, an extra forward pass on each counts them first.  No-op for a model without a `Balance` child.
    Collectives if `Balance.needs_totals`: one all-reduce of an integer per layer and expert, and those of the extra
    passes.
    """
    balance = find_balance(model)
    if balance is None:
        yield
        return
    balance.counted_LE = balance.total_LE = None

    def sum_over_ranks(choices_LE: torch.Tensor) -> torch.Tensor:
        balance.total_LE = world.sum_on_device(choices_LE.clone())
        return balance.total_LE

    if balance.needs_totals and len(micro_batches) == 1:
        balance.reduce_choices = sum_over_ranks
    elif balance.needs_totals:
        total_LE = sum_over_ranks(_count_choices(balance, micro_batches, loss, world.device))
        balance.reduce_choices = lambda local_LE: total_LE
    try:
        yield
    finally:
        balance.reduce_choices = _identity


@torch.no_grad()
def _count_choices(
    balance: Balance, micro_batches: Sequence[Any], loss: Callable[[Any], torch.Tensor], device: torch.device
) -> torch.Tensor:
    """Count how often the tokens of all micro-batches of this rank choose each expert in each layer."""
    total_LE = torch.zeros(balance.num_layers, balance.num_experts, dtype=torch.int64, device=device)
    balance.reduce_choices = total_LE.add_
    for batch in prefetch_to_device(micro_batches, device):
        loss(batch)
    return total_LE


class ExpertBalance(Hook):
    """Runs after each optimizer step: updates the biases of a model's `TopKExperts` modules, keeps the step's choices
    for the next one, and logs the load of the experts.

    A bias rises by `Balance.rate` if its expert was chosen less often than the mean, and falls by the same amount if
    more often; only tokens with targets count, over the global batch.  A skipped step changes neither biases nor stored
    choices.

    Fields of the `train` record, each a mean over the steps since the previous record: `busiest_expert`, the number of
    tokens of the busiest expert, relative to the mean of its layer, and `dead_experts`, the number of experts in all
    layers that no token chose.
    """

    def __init__(self, model: nn.Module, world: World, log: Callable[[str, torch.Tensor, float], None]) -> None:
        """`log(name, value, over)` is `Trainer.log`."""
        self.model, self._balance, self._world, self._log = model, find_balance(model), world, log
        self._biases = [m.bias for m in model.modules() if isinstance(m, TopKExperts) and m.bias is not None]

    @torch.no_grad()
    def after_update(self, is_finite: torch.Tensor | None) -> None:
        """Process a finished step; it was skipped if the scalar `is_finite` is false.  No host sync.

        Collective: one all-reduce of an integer per layer and expert, unless the loss has summed them already.
        """
        balance = self._balance
        if balance is None or balance.counted_LE is None:
            return
        total_LE = self._world.sum_on_device(balance.counted_LE) if balance.total_LE is None else balance.total_LE
        balance.counted_LE = balance.total_LE = None
        is_applied = total_LE.new_ones((), dtype=torch.bool) if is_finite is None else is_finite.to(total_LE.device)
        shortfall_LE = total_LE.sum(1, keepdim=True) - balance.num_experts * total_LE
        if balance.rate and self._biases:
            signs_LE = shortfall_LE.sign() * is_applied
            torch._foreach_add_(self._biases, list((balance.rate * signs_LE.float()).unbind()))
        last_E = total_LE.new_ones(balance.num_experts) if balance.last_choices_E is None else balance.last_choices_E
        balance.last_choices_E = torch.where(is_applied, total_LE.sum(0), last_E)
        means_L1 = total_LE.sum(1, keepdim=True).clamp(min=1) / balance.num_experts
        self._log("busiest_expert", (total_LE / means_L1).max(), 1.0)
        self._log("dead_experts", (total_LE == 0).sum(), 1.0)

    def state_dict(self) -> dict[str, Any]:
        last_E = None if self._balance is None else self._balance.last_choices_E
        return {"last_choices": None if last_E is None else last_E.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        last = state["last_choices"]
        if self._balance is not None:
            self._balance.last_choices_E = None if last is None else torch.tensor(last, device=self._world.device)
