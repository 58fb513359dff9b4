"""Collectives inside a forward pass, as custom operators with gradients.

Autograd, torch.compile, activation checkpointing and fake tensors treat each collective as one operator, whose output
shape depends only on its arguments.  Each operator waits for its collective (on a GPU, the current stream waits).
"""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""All-gather into one tensor.  Newer versions of torch deprecate the longer name."""
_reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_groups: dict[str, dist.ProcessGroup] = {}
_purposes: dict[str, str] = {}
"""What each registered group is for, by group name."""


def register_group(group: dist.ProcessGroup, purpose: str) -> str:
    """Register a process group for these operators, and return the name to pass to them.

    purpose: what the group is for, as `purpose_of` returns it.
    """
    _groups[group.group_name], _purposes[group.group_name] = group, purpose
    return group.group_name


def purpose_of(frame: FrameType | None) -> str:
    """Return the purpose of the group on which a thread is running one of these operators, or "" if it is running none.

    frame: the thread's innermost frame.
    """
    while frame is not None:
        if frame.f_code.co_filename == __file__ and frame.f_locals.get("group") in _purposes:
            return _purposes[frame.f_locals["group"]]
        frame = frame.f_back
    return ""


@torch.library.custom_op("meshtrainer::gather_parts", mutates_args=())
def gather_parts(part: torch.Tensor, num_parts: int, group: str) -> torch.Tensor:
    """Return the parts of all ranks of a group in rank order, of shape (num_parts, *part.shape).  One all-gather.

    Backward: one reduce-scatter.
    """
    parts = part.new_empty((num_parts, *part.shape))
    all_gather_single(parts.view(-1), part.contiguous().view(-1), group=_groups[group])
    return parts


@torch.library.custom_op("meshtrainer::sum_parts", mutates_args=())
def sum_parts(parts: torch.Tensor, group: str) -> torch.Tensor:
    """Return the sum of the parts that all ranks of a group hold for this rank; its shape is parts.shape[1:].

    One reduce-scatter.  Backward: one all-gather.
    """
    part = parts.new_empty(parts.shape[1:])
    _reduce_scatter_single(part.view(-1), parts.contiguous().view(-1), group=_groups[group])
    return part


@torch.library.custom_op("meshtrainer::exchange_parts", mutates_args=())
def exchange_parts(parts: torch.Tensor, group: str) -> torch.Tensor:
    """Send part n to the n-th rank of a group, and return the received parts in rank order.  One all-to-all.

    Backward: one all-to-all.
    """
    received = torch.empty_like(parts, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received.view(-1), parts.contiguous().view(-1), group=_groups[group])
    return received


@torch.library.custom_op("meshtrainer::exchange_rows", mutates_args=())
def exchange_rows(rows: torch.Tensor, sent: list[int], received: list[int], group: str) -> torch.Tensor:
    """Send `sent[n]` consecutive rows to the n-th rank of a group; return the received rows in rank order.

    received: the number of rows from each rank.  One all-to-all.  Backward: one all-to-all.
    """
    arrived = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=_groups[group])
    return arrived


@gather_parts.register_fake
def _(part: torch.Tensor, num_parts: int, group: str) -> torch.Tensor:
    return part.new_empty((num_parts, *part.shape))


@sum_parts.register_fake
def _(parts: torch.Tensor, group: str) -> torch.Tensor:
    return parts.new_empty(parts.shape[1:])


@exchange_parts.register_fake
def _(parts: torch.Tensor, group: str) -> torch.Tensor:
    return torch.empty_like(parts, memory_format=torch.contiguous_format)


@exchange_rows.register_fake
def _(rows: torch.Tensor, sent: list[int], received: list[int], group: str) -> torch.Tensor:
    return rows.new_empty((sum(received), *rows.shape[1:]))


def _keep_group(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.group = inputs[-1]


gather_parts.register_autograd(
    lambda ctx, grad_parts: (sum_parts(grad_parts, ctx.group), None, None), setup_context=_keep_group
)
exchange_parts.register_autograd(
    lambda ctx, grad_parts: (exchange_parts(grad_parts, ctx.group), None), setup_context=_keep_group
)


def _keep_parts(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    parts, ctx.group = inputs
    ctx.num_parts = parts.shape[0]


sum_parts.register_autograd(
    lambda ctx, grad_part: (gather_parts(grad_part, ctx.num_parts, ctx.group), None), setup_context=_keep_parts
)


def _keep_splits(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.sent, ctx.received, ctx.group = inputs


exchange_rows.register_autograd(
    lambda ctx, grad_rows: (exchange_rows(grad_rows, ctx.received, ctx.sent, ctx.group), None, None, None),
    setup_context=_keep_splits,
)


def scale_gradient(x: torch.Tensor, factor: float) -> torch.Tensor:
    """Return `x`; the backward pass multiplies its gradient by `factor`."""
    scaled: torch.Tensor = _ScaledGradient.apply(x, factor)  # type: ignore[no-untyped-call]
    return scaled


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * ctx.factor, None
