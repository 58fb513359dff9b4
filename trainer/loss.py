"""Cross-entropy, summed over targets, with and without ever holding all logits.

Every loss here is a sum: the step divides by the number of targets of the whole global batch, which makes the result
the same on every mesh and for every micro-batch size.  Knows no model; recipes use it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

IGNORE = -100
"""Target that does not count (PyTorch's default `ignore_index`)."""

_CHUNK_BYTES = 64 * 2**20
"""Size of one chunk of fp32 logits: large enough for full speed of the matrix product, small beside a model."""


def count_targets(targets: torch.Tensor) -> int:
    """Return the number of targets that count."""
    return int((targets != IGNORE).sum())


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the summed cross-entropy of `logits` (..., V) against `targets` (...), in fp32."""
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), ignore_index=IGNORE, reduction="sum")


def linear_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, chunk_bytes: int = _CHUNK_BYTES
) -> torch.Tensor:
    """Return the summed cross-entropy of `hidden @ weight.T` (..., V) against `targets` (...), in fp32.

    Works in chunks of `chunk_bytes` of fp32 logits: the whole of them, often the peak of a step, never exists.  The
    gradients are computed in the forward pass, while a chunk's logits are there, so that nothing is computed twice;
    they only support a first derivative.  hidden (..., D), weight (V, D).  After Liger Kernel (arXiv:2410.10989).
    """
    hidden_ND, targets_N = hidden.flatten(0, -2), targets.flatten()
    loss: torch.Tensor = _LinearCrossEntropy.apply(hidden_ND, weight, targets_N, chunk_bytes, torch.is_grad_enabled())  # type: ignore[no-untyped-call]
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        targets_N: torch.Tensor,
        chunk_bytes: int,
        trains: bool,
    ) -> torch.Tensor:
        rows = max(1, chunk_bytes // (4 * weight_VD.shape[0]))
        wants_hidden, wants_weight = (trains and needed for needed in ctx.needs_input_grad[:2])
        grad_hidden_ND = torch.empty_like(hidden_ND) if wants_hidden else None
        grad_weight_VD: torch.Tensor | None = None
        total = hidden_ND.new_zeros((), dtype=torch.float32)
        for start in range(0, hidden_ND.shape[0], rows):
            hidden_nD, targets_n = hidden_ND[start : start + rows], targets_N[start : start + rows]
            logits_nV = (hidden_nD @ weight_VD.T).float()
            counts_n = targets_n != IGNORE
            index_n1 = targets_n.where(counts_n, 0).unsqueeze(1)
            log_normalizer_n1 = logits_nV.logsumexp(1, keepdim=True)
            losses_n1 = log_normalizer_n1 - logits_nV.gather(1, index_n1)
            total += losses_n1.squeeze(1).where(counts_n, 0.0).sum()
            if not (wants_hidden or wants_weight):
                continue
            # d loss / d logits = softmax - one-hot, zero where the target does not count.
            grad_nV = logits_nV.sub_(log_normalizer_n1).exp_()
            grad_nV.scatter_add_(1, index_n1, grad_nV.new_full(index_n1.shape, -1.0))
            grad_nV.masked_fill_(~counts_n.unsqueeze(1), 0.0)
            grad_nV = grad_nV.to(hidden_ND.dtype)
            if grad_hidden_ND is not None:
                grad_hidden_ND[start : start + rows] = grad_nV @ weight_VD
            if wants_weight:
                # Sums over chunks in fp32: the weight's gradient has one addend a chunk.
                part_VD = grad_nV.T @ hidden_nD
                grad_weight_VD = part_VD.float() if grad_weight_VD is None else grad_weight_VD.add_(part_VD)
        ctx.save_for_backward(grad_hidden_ND, grad_weight_VD)
        ctx.weight_dtype = weight_VD.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grad_outputs
        grad_hidden_ND, grad_weight_VD = ctx.saved_tensors
        if grad_hidden_ND is not None:
            grad_hidden_ND = grad_hidden_ND * grad
        if grad_weight_VD is not None:
            grad_weight_VD = (grad_weight_VD * grad).to(ctx.weight_dtype)
        return grad_hidden_ND, grad_weight_VD, None, None, None


def find_loss(model: nn.Module) -> Callable[[dict[str, torch.Tensor]], torch.Tensor]:
    """Return the function that maps a batch to the model's summed loss.

    A model whose `forward` takes `targets` sums its own loss; the logits of any other go through `cross_entropy`.
    """
    if "targets" in inspect.signature(model.forward).parameters:
        return lambda batch: model(batch["tokens"], targets=batch["targets"])
    return lambda batch: cross_entropy(model(batch["tokens"]), batch["targets"])
