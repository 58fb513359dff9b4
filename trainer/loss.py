"""Cross-entropy, summed over targets, with and without ever holding all logits.

Every loss here is a sum: the step divides by the number of targets of the whole global batch, which makes the result
the same on every mesh and for every micro-batch size.  Knows no model; recipes use it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

IGNORE = -100
"""Target that does not count (PyTorch's default `ignore_index`)."""

_CHUNK_BYTES = 64 * 2**20
"""Size of one chunk of fp32 logits: large enough for full speed of a CPU's matrix product, small beside a model."""

_GPU_CHUNK_ROWS = 2048
"""Least rows of a chunk on a GPU.  Each chunk reads and writes the whole gradient of the weight, some 10 bytes an
element, while it computes 6 FLOPs an element and row: at 800 TFLOP/s and 4 TB/s that takes as long as 330 rows do."""


_plans_for_a_gpu = ContextVar("plans_for_a_gpu", default=False)


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Work in a GPU's chunks, wherever the tensors are: for a plan, whose tensors are nowhere."""
    token = _plans_for_a_gpu.set(True)
    try:
        yield
    finally:
        _plans_for_a_gpu.reset(token)


def count_targets(targets: torch.Tensor) -> int:
    """Return the number of targets that count."""
    return int((targets != IGNORE).sum())


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the summed cross-entropy of `logits` (..., V) against `targets` (...), in fp32."""
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), ignore_index=IGNORE, reduction="sum")


def linear_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, chunk_bytes: int | None = None
) -> torch.Tensor:
    """Return the summed cross-entropy of `hidden @ weight.T` (..., V) against `targets` (...), in fp32.

    Works in equal chunks of at most `chunk_bytes` of fp32 logits: the whole of them, often the peak of a step, never
    exists.  By default a chunk has 64 MiB, and on a GPU 2048 rows if that is more.  The gradients are computed in the
    forward pass, while a chunk's logits are there, so that nothing is computed twice; they only support a first
    derivative.  hidden (..., D), weight (V, D).  After Liger Kernel (arXiv:2410.10989).
    """
    hidden_ND, targets_N = hidden.flatten(0, -2), targets.flatten()
    row_bytes = 4 * weight.shape[0]
    if chunk_bytes is None:
        on_a_gpu = weight.device.type == "cuda" or _plans_for_a_gpu.get()
        chunk_bytes = max(_CHUNK_BYTES, _GPU_CHUNK_ROWS * row_bytes if on_a_gpu else 0)
    num_chunks = max(1, math.ceil(hidden_ND.shape[0] / max(1, chunk_bytes // row_bytes)))
    loss: torch.Tensor = _LinearCrossEntropy.apply(hidden_ND, weight, targets_N, num_chunks, torch.is_grad_enabled())  # type: ignore[no-untyped-call]
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        targets_N: torch.Tensor,
        num_chunks: int,
        trains: bool,
    ) -> torch.Tensor:
        rows = max(1, math.ceil(hidden_ND.shape[0] / num_chunks))
        wants_hidden, wants_weight = (trains and needed for needed in ctx.needs_input_grad[:2])
        grad_hidden_ND = torch.empty_like(hidden_ND) if wants_hidden else None
        grad_weight_VD: torch.Tensor | None = None
        total = hidden_ND.new_zeros((), dtype=torch.float32)
        for start in range(0, hidden_ND.shape[0], rows):
            hidden_nD, targets_n = hidden_ND[start : start + rows], targets_N[start : start + rows]
            counts_n1 = (targets_n != IGNORE).unsqueeze(1)
            index_n1 = targets_n.unsqueeze(1).where(counts_n1, 0)
            # From here on each pass over (n, V) counts: they are the memory traffic of the loss.
            log_probs_nV = torch.log_softmax(hidden_nD @ weight_VD.T, 1, dtype=torch.float32)
            total -= log_probs_nV.gather(1, index_n1).where(counts_n1, 0.0).sum()
            if not (wants_hidden or wants_weight):
                continue
            # d loss / d logits = softmax - one-hot, zero where the target does not count.
            probs_nV = log_probs_nV.exp_()
            probs_nV.scatter_add_(1, index_n1, probs_nV.new_full(index_n1.shape, -1.0))
            grad_nV = torch.empty_like(probs_nV, dtype=hidden_ND.dtype)
            torch.mul(probs_nV, counts_n1, out=grad_nV)
            del log_probs_nV, probs_nV  # before the products, which need memory themselves
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
