"""Collectives inside a forward pass, as custom operators with gradients.

Autograd, torch.compile, activation checkpointing and fake tensors see each of them as one operator with shapes that do
not depend on the rank.  Each operator waits for its collective on the stream on which it is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""All-gather into one tensor.  Newer versions of torch deprecate the old name."""
_reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_groups: dict[str, dist.ProcessGroup] = {}


def register_group(group: dist.ProcessGroup) -> str:
    """Register a process group for these operators, and return the name to pass to them."""
    _groups[group.group_name] = group
    return group.group_name


@torch.library.custom_op("meshtrainer::gather_parts", mutates_args=())
def gather_parts(part: torch.Tensor, num_parts: int, group: str) -> torch.Tensor:
    """Return the parts of all ranks of a group in rank order, (num_parts, *part.shape).  One all-gather.

    Backward: one reduce-scatter.
    """
    parts = part.new_empty((num_parts, *part.shape))
    all_gather_single(parts.view(-1), part.contiguous().view(-1), group=_groups[group])
    return parts


@torch.library.custom_op("meshtrainer::sum_parts", mutates_args=())
def sum_parts(parts: torch.Tensor, group: str) -> torch.Tensor:
    """Return the sum over all ranks of their parts for this rank, of shape parts.shape[1:].  One reduce-scatter."""
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


@gather_parts.register_fake
def _(part: torch.Tensor, num_parts: int, group: str) -> torch.Tensor:
    return part.new_empty((num_parts, *part.shape))


@sum_parts.register_fake
def _(parts: torch.Tensor, group: str) -> torch.Tensor:
    return parts.new_empty(parts.shape[1:])


@exchange_parts.register_fake
def _(parts: torch.Tensor, group: str) -> torch.Tensor:
    return torch.empty_like(parts, memory_format=torch.contiguous_format)


def _keep_group(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.group = inputs[-1]


gather_parts.register_autograd(
    lambda ctx, grad_parts: (sum_parts(grad_parts, ctx.group), None, None), setup_context=_keep_group
)
exchange_parts.register_autograd(
    lambda ctx, grad_parts: (exchange_parts(grad_parts, ctx.group), None), setup_context=_keep_group
)
