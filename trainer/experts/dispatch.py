"""Runs tokens through their experts, on this rank or on the ranks that hold the experts (expert parallelism).

With `mesh.expert_method=exchange`, each token is sent to the ranks of its experts in an all-to-all; reading the split
sizes requires a host sync.  With `gather`, every rank receives all of the group's tokens and processes those routed to
its experts; all shapes are known in advance.

Shape suffixes: D model width, E experts, A experts per token, S tokens on this rank, M token-expert pairs, N ranks in
the group, L experts per rank, T tokens in the group, P pairs in the group, R rows computed on this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from trainer.distributed.exchange import exchange_parts, exchange_rows, gather_parts, scale_gradient, sum_parts

GROUP_ATTRIBUTE = "expert_group"
"""Name of the attribute that holds the `ExpertGroup` of a module whose experts are divided among ranks."""


@dataclass
class Estimate:
    """Routing statistics that the planner estimates, since it routes no real tokens."""

    imbalance: float = 1.0
    """Assumed number of rows on the busiest rank, relative to the mean over ranks."""
    fill_fraction: float = 1.0
    """With `gather`, the fraction of buffer rows that hold tokens; set when the model runs."""


@dataclass(frozen=True)
class ExpertGroup:
    """The ranks among which a module's experts are divided, and this rank's index among them."""

    size: int
    rank: int
    method: str
    """`exchange` or `gather`."""
    name: str = ""
    """Name of the process group, for `trainer.distributed.exchange`."""
    estimate: Estimate | None = None
    """Set only by the planner.  `exchange` derives its split sizes from it; `gather` sets its `fill_fraction`."""
    observer: Callable[..., None] | None = None
    """Called with the arguments of `apply_experts` except `experts`, and the result.  None outside the self-check."""


def apply_experts(
    experts: nn.Module, x_SD: torch.Tensor, chosen_SA: torch.Tensor, weights_SA: torch.Tensor
) -> torch.Tensor:
    """Return the weighted sum of each token's expert outputs, (S, D).

    experts: a module whose parameters are all stacked by expert along dimension 0.  It is called as
        `experts(rows, ends)`: rows sorted by expert, and the exclusive end of each expert's rows (int32).  `ends` may
        have one extra entry; see `grouped_mm`.
    chosen_SA: the indices of each token's experts, all different.
    weights_SA: the weights of these experts.

    Collectives in the expert group, if there is one.  With `exchange`: an all-to-all of counts, on which the host
    blocks, then two all-to-alls of rows, and two more in the backward pass.  With `gather`: all-gathers of tokens,
    choices and weights, and a reduce-scatter of the results; in the backward pass, an all-gather and two
    reduce-scatters.  With `gather`, S must be equal on all ranks.
    """
    group: ExpertGroup | None = getattr(experts, GROUP_ATTRIBUTE, None)
    if group is None:
        num_experts = next(iter(experts.parameters())).shape[0]
        order_M, ends_E = _sort_by_expert(chosen_SA.flatten(), num_experts)
        out_MD = experts(_rows_of_pairs(x_SD, order_M, chosen_SA.shape[1]), ends_E)
        return _sum_by_token(out_MD, order_M, weights_SA)
    method = _run_by_exchange if group.method == "exchange" else _run_by_gather
    out_SD = method(group, experts, x_SD, chosen_SA, weights_SA)
    if group.observer is not None:
        group.observer(x_SD, chosen_SA, weights_SA, out_SD)
    return out_SD


def choices_of(chosen: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return the number of tokens routed to each expert, (E,).  chosen: expert indices, in any shape."""
    zeros_E = torch.zeros(num_experts, dtype=torch.int64, device=chosen.device)
    return zeros_E.scatter_add(0, chosen.flatten(), torch.ones_like(chosen.flatten(), dtype=torch.int64))


def _sort_by_expert(chosen_M: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the order that sorts token-expert pairs by expert, and the end of each expert's range of pairs."""
    return chosen_M.argsort(stable=True), choices_of(chosen_M, num_experts).cumsum(0).to(torch.int32)


def _rows_of_pairs(
    x_SD: torch.Tensor, order_M: torch.Tensor, experts_per_token: int, num_rows: int | None = None
) -> torch.Tensor:
    """Return the token of each token-expert pair in the order `order_M`, or of the first `num_rows` pairs: (R, D)."""
    rows_RD: torch.Tensor = _RowsOfPairs.apply(x_SD, order_M, experts_per_token, num_rows)  # type: ignore[no-untyped-call]
    return rows_RD


class _RowsOfPairs(torch.autograd.Function):
    """The indexing x[order // A], with a deterministic gradient.

    On a CPU, torch's own gradient adds up the pairs of a token in whatever order its threads reach them.
    """

    @staticmethod
    def forward(
        ctx: Any, x_SD: torch.Tensor, order_M: torch.Tensor, experts_per_token: int, num_rows: int | None
    ) -> torch.Tensor:
        ctx.save_for_backward(order_M)
        ctx.experts_per_token = experts_per_token
        return x_SD[order_M[:num_rows] // experts_per_token]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad_RD,) = gradients
        (order_M,) = ctx.saved_tensors
        num_rows = grad_RD.shape[0]
        row_SA = order_M.argsort().unflatten(0, (-1, ctx.experts_per_token))
        grad_SD: torch.Tensor | None = None
        for row_S in row_SA.unbind(1):
            part_SD = grad_RD.index_select(0, row_S.clamp(max=num_rows - 1))
            if num_rows < order_M.shape[0]:
                part_SD = part_SD.masked_fill((row_S >= num_rows).unsqueeze(1), 0)
            grad_SD = part_SD if grad_SD is None else grad_SD.add_(part_SD)
        return grad_SD, None, None, None


def _sum_by_token(out_MD: torch.Tensor, order_M: torch.Tensor, weights_SA: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum of each token's expert outputs, in the original order of the tokens: (S, D)."""
    # A scatter-add instead would not be deterministic on a GPU.
    out_SAD = out_MD[order_M.argsort()].unflatten(0, weights_SA.shape)
    return (out_SAD * weights_SA.unsqueeze(-1)).sum(1)


# ---------------------------------------------------------------------------------------------------------------
# Expert parallelism


def _run_by_exchange(
    group: ExpertGroup, experts: nn.Module, x_SD: torch.Tensor, chosen_SA: torch.Tensor, weights_SA: torch.Tensor
) -> torch.Tensor:
    """Send each token to the ranks of its experts, and the results back."""
    num_local = _num_local(experts, group)
    order_M = chosen_SA.flatten().argsort(stable=True)
    sent_NL = choices_of(chosen_SA, group.size * num_local).view(group.size, num_local)
    received_NL = exchange_parts(sent_NL, group.name)
    sent, received = _splits(group, sent_NL, received_NL, order_M.shape[0])
    rows_RD = exchange_rows(_rows_of_pairs(x_SD, order_M, chosen_SA.shape[1]), sent, received, group.name)
    # Rows arrive by rank, and by expert within a rank.
    experts_NL = torch.arange(num_local, device=x_SD.device).repeat(group.size)
    expert_R = experts_NL.repeat_interleave(received_NL.flatten(), output_size=sum(received))
    order_R = expert_R.argsort(stable=True)
    out_RD = _run_experts(group, experts, rows_RD[order_R], received_NL.sum(0).cumsum(0).to(torch.int32))
    out_MD = exchange_rows(out_RD[order_R.argsort()], received, sent, group.name)
    return _sum_by_token(out_MD, order_M, weights_SA)


def _splits(
    group: ExpertGroup, sent_NL: torch.Tensor, received_NL: torch.Tensor, num_sent: int
) -> tuple[list[int], list[int]]:
    """Return the number of rows to send to and to receive from each rank.  Host sync."""
    if group.estimate is None:
        sent, received = torch.stack((sent_NL.sum(1), received_NL.sum(1))).tolist()
        return sent, received
    return _split_evenly(num_sent, group.size), _split_evenly(round(num_sent * group.estimate.imbalance), group.size)


def _split_evenly(total: int, count: int) -> list[int]:
    return [total // count + (index < total % count) for index in range(count)]


def _run_by_gather(
    group: ExpertGroup, experts: nn.Module, x_SD: torch.Tensor, chosen_SA: torch.Tensor, weights_SA: torch.Tensor
) -> torch.Tensor:
    """Gather the group's tokens, process those routed to this rank's experts, and sum the results over the group.

    The buffers are large enough for the worst case, in which all tokens choose only experts of this rank.
    """
    num_local, experts_per_token = _num_local(experts, group), chosen_SA.shape[1]
    x_TD, chosen_TA, weights_TA = (
        gather_parts(part, group.size, group.name).flatten(0, 1)
        for part in (x_SD, chosen_SA.to(torch.int32), weights_SA)
    )
    local_TA = chosen_TA.long() - group.rank * num_local
    is_here_TA = (local_TA >= 0) & (local_TA < num_local)
    order_P, ends_L = _sort_by_expert(torch.where(is_here_TA, local_TA, num_local).flatten(), num_local + 1)
    num_rows = x_TD.shape[0] * min(experts_per_token, num_local)
    if group.estimate is not None:
        group.estimate.fill_fraction = min(
            1.0, group.estimate.imbalance * experts_per_token / group.size / min(experts_per_token, num_local)
        )
    rows_RD = _rows_of_pairs(x_TD, order_P, experts_per_token, num_rows)
    out_RD = _run_experts(group, experts, rows_RD, ends_L.clamp(max=num_rows))
    # Pairs of other ranks' experts come after these rows, or are among the last of them, which are zero.
    position_P = order_P.argsort().clamp(max=num_rows - 1)
    weights_TA = torch.where(is_here_TA, weights_TA, 0)
    out_TD = (out_RD[position_P].unflatten(0, weights_TA.shape) * weights_TA.unsqueeze(-1)).sum(1)
    return sum_parts(out_TD.unflatten(0, (group.size, -1)), group.name)


def _num_local(experts: nn.Module, group: ExpertGroup) -> int:
    """Return the number of experts on each rank."""
    first = next(iter(experts.parameters()))
    return first.shape[0] // group.size if isinstance(first, DTensor) else first.shape[0]


def _run_experts(group: ExpertGroup, experts: nn.Module, rows_RD: torch.Tensor, ends_L: torch.Tensor) -> torch.Tensor:
    """Return the outputs of this rank's experts.

    The gradient of their weights is a sum over the tokens of the entire group, but FSDP averages it only over the ranks
    with the same experts.  These are fewer than all ranks by a factor of the group size, so gradients are divided by
    the group size while they pass through the experts.
    """
    weights = {
        name: parameter.to_local() if isinstance(parameter, DTensor) else parameter
        for name, parameter in experts.named_parameters()
    }
    rows_RD = scale_gradient(rows_RD, float(group.size))
    out_RD: torch.Tensor = functional_call(experts, weights, (rows_RD, ends_L))
    return scale_gradient(out_RD, 1 / group.size)
