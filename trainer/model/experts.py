"""Mixture-of-experts operations: grouped matrix products, and the load-balancing loss over the global batch.

Group sizes are known only on the device, so the products are custom operators: fake tensors, compiled code and
activation checkpointing see a single operator, whatever its implementation.  This module does not depend on recipes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import register_flop_formula

from trainer.data.transfer import prefetch_to_device
from trainer.distributed.world import World

# ---------------------------------------------------------------------------------------------------------------
# Grouped products


@torch.library.custom_op("meshtrainer::grouped_mm", mutates_args=())
def grouped_mm(x_MK: torch.Tensor, weight_EKN: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """Multiply each row of `x_MK` with the matrix of its group, giving (M, N).  Group e ends before row `ends_E[e]`
    (int32).

    The last group ends with the last row.  On a GPU in bfloat16 this is one kernel without host sync; elsewhere it is
    one product per group.
    """
    if _has_kernel(x_MK, weight_EKN):
        return F.grouped_mm(x_MK, weight_EKN, offs=ends_E)
    out_MN = x_MK.new_empty(x_MK.shape[0], weight_EKN.shape[2])
    for group, rows in enumerate(_rows(ends_E)):
        torch.mm(x_MK[rows], weight_EKN[group], out=out_MN[rows])
    return out_MN


@torch.library.custom_op("meshtrainer::grouped_outer", mutates_args=())
def grouped_outer(x_MK: torch.Tensor, y_MN: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """Return x.T @ y for the rows of each group: (E, K, N).  See `grouped_mm`."""
    if _has_kernel(x_MK, y_MN):
        return F.grouped_mm(x_MK.t(), y_MN, offs=ends_E)
    out_EKN = x_MK.new_empty(len(ends_E), x_MK.shape[1], y_MN.shape[1])
    for group, rows in enumerate(_rows(ends_E)):
        torch.mm(x_MK[rows].t(), y_MN[rows], out=out_EKN[group])
    return out_EKN


def _rows(ends_E: torch.Tensor) -> list[slice]:
    ends = ends_E.tolist()
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def _has_kernel(*tensors: torch.Tensor) -> bool:
    """Return whether torch's kernel supports these tensors: it needs strides that are multiples of 16 bytes."""
    fits = all(t.is_cuda and t.dtype == torch.bfloat16 and t.shape[-1] % 8 == t.shape[-2] % 8 == 0 for t in tensors[1:])
    first = tensors[0]
    return fits and first.is_cuda and first.dtype == torch.bfloat16 and first.shape[-1] % 8 == 0


@grouped_mm.register_fake
def _(x_MK: torch.Tensor, weight_EKN: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    return x_MK.new_empty(x_MK.shape[0], weight_EKN.shape[2])


@grouped_outer.register_fake
def _(x_MK: torch.Tensor, y_MN: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    return x_MK.new_empty(ends_E.shape[0], x_MK.shape[1], y_MN.shape[1])


def _setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    x_MK, weight_EKN, ends_E = inputs
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    ctx.save_for_backward(x_MK if needs_weight else None, weight_EKN if needs_x else None, ends_E)


def _backward(ctx: Any, grad_MN: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
    x_MK, weight_EKN, ends_E = ctx.saved_tensors
    grad_MN = grad_MN.contiguous()
    grad_x = None if weight_EKN is None else grouped_mm(grad_MN, weight_EKN.transpose(1, 2), ends_E)
    grad_weight = None if x_MK is None else grouped_outer(x_MK, grad_MN, ends_E)
    return grad_x, grad_weight, None


grouped_mm.register_autograd(_backward, setup_context=_setup_context)

GROUPED = torch.ops.meshtrainer.grouped_mm.default
"""The operator as seen by dispatch modes."""


@register_flop_formula(torch.ops.meshtrainer.grouped_mm)
def _(x: Sequence[int], weight: Sequence[int], ends: Sequence[int], *args: Any, **kwargs: Any) -> int:
    return 2 * x[0] * weight[1] * weight[2]


@register_flop_formula(torch.ops.meshtrainer.grouped_outer)
def _(x: Sequence[int], y: Sequence[int], ends: Sequence[int], *args: Any, **kwargs: Any) -> int:
    return 2 * x[0] * x[1] * y[1]


# ---------------------------------------------------------------------------------------------------------------
# Balance


class BalanceLoss(nn.Module):
    """The load-balancing loss of all layers, over the global batch; it is lowest if all experts are chosen equally
    often.

    For each expert, the share of choices that fell on it is multiplied by its mean probability; the sum over experts is
    scaled by the number of experts and the coefficient (Fedus et al. 2021, arXiv:2101.03961, equations 4 to 6).  Shares
    and means are over the tokens that the loss counts, in all layers, micro-batches and ranks (Qiu et al. 2025,
    arXiv:2501.11873), so the loss does not depend on the mesh; `global_balance` ensures this in training.  Outside of
    training they are taken over the batch alone.
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
    balance_losses = [child for child in model.children() if isinstance(child, BalanceLoss)]
    for balance in balance_losses:
        if len(micro_batches) == 1:
            balance.reduce_choices = world.sum_on_device
        else:
            choices_E = world.sum_on_device(_count(balance, micro_batches, loss, world.device))
            balance.reduce_choices = lambda _, global_E=choices_E: global_E  # type: ignore[misc]
    try:
        yield
    finally:
        for balance in balance_losses:
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


# ---------------------------------------------------------------------------------------------------------------
# Fake tensors, which have only shapes and dtypes: models run on them in milliseconds, without memory

GROUPED_PRODUCT = torch.ops.aten._grouped_mm.default
"""Torch's grouped matrix product, used by mixture-of-experts models."""


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Make every tensor created inside the block a fake tensor."""
    with _FakeTensors():
        yield


class _FakeTensors(FakeTensorMode):
    """Supports grouped products in any dtype; torch's own fake kernel is for GPUs and only supports bfloat16."""

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not GROUPED_PRODUCT:
            return super().dispatch(func, types, args, kwargs)
        first, second, *rest = args
        ends = rest[0] if rest else kwargs["offs"]
        num_rows, num_columns = first.shape[-2], second.shape[-1]
        if first.ndim == second.ndim:  # 2D: groups along the shared dimension; 3D: one product per matrix
            return first.new_empty(first.shape[0] if first.ndim == 3 else ends.shape[0], num_rows, num_columns)
        return first.new_empty(num_rows, num_columns)
