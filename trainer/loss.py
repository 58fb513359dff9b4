"""Cross-entropy summed over targets, with or without materializing all logits.

Every loss here is a sum: the step divides it by the number of targets in the full global batch, so that the result is
the same on every mesh and for every micro-batch size.  Independent of models; recipes use it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from trainer.config.rules import can_compile
from trainer.errors import setting_error

IGNORE = -100
"""Target that does not count (PyTorch's default `ignore_index`)."""

_CHUNK_BYTES = 64 * 2**20
"""Size of a chunk of fp32 logits: large enough for a CPU's matrix product to run at full speed, and small relative to a
model.
"""

_GPU_CHUNK_ROWS = 2048
"""Minimum number of rows in a chunk on a GPU.

Each chunk reads and writes the full gradient of the weight, about 10 bytes per element, and computes 6 FLOPs per
element and row: at 800 TFLOP/s and 4 TB/s the former takes as long as 330 rows do.
"""


_plans_for_a_gpu = ContextVar("plans_for_a_gpu", default=False)


@contextmanager
def use_gpu_chunks() -> Iterator[None]:
    """Use a GPU's chunks and kernels whatever the device, for plans on fake tensors."""
    token = _plans_for_a_gpu.set(True)
    try:
        yield
    finally:
        _plans_for_a_gpu.reset(token)


_rows: ContextVar[list[torch.Tensor] | None] = ContextVar("rows", default=None)


@contextmanager
def row_losses() -> Iterator[list[torch.Tensor]]:
    """Record the summed loss of each sequence in every cross-entropy inside the block: float64, (B,)."""
    noted: list[torch.Tensor] = []
    token = _rows.set(noted)
    try:
        yield noted
    finally:
        _rows.reset(token)


_sums_by_row = ContextVar("sums_by_row", default=False)


@contextmanager
def by_row() -> Iterator[None]:
    """Make the losses of models inside the block one sum per sequence, (B,), instead of a single sum.

    They are in fp64, since such sums are compared, and their small difference must be as accurate as the terms.  Works
    for models whose loss is computed by the functions in this module.
    """
    token = _sums_by_row.set(True)
    try:
        yield
    finally:
        _sums_by_row.reset(token)


def count_targets(targets: torch.Tensor) -> int:
    """Return the number of targets that count."""
    return int((targets != IGNORE).sum())


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the summed cross-entropy of `logits` (..., V) against `targets` (...), in fp32; see also `by_row`."""
    flat_logits, flat_targets, noted = logits.flatten(0, -2).float(), targets.flatten(), _rows.get()
    if noted is None and not _sums_by_row.get():
        return F.cross_entropy(flat_logits, flat_targets, ignore_index=IGNORE, reduction="sum")
    losses = F.cross_entropy(flat_logits, flat_targets, ignore_index=IGNORE, reduction="none").view(targets.shape)
    if _sums_by_row.get():
        return losses.sum(-1, dtype=torch.float64)
    assert noted is not None
    noted.append(losses.detach().sum(-1, dtype=torch.float64))
    return losses.sum()


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    chunk_bytes: int | None = None,
    reduction: Literal["sum", "row"] | None = None,
) -> torch.Tensor:
    """Return the summed cross-entropy of `hidden @ weight.T` (..., V) against `targets` (...), in fp32.

    Works in equal chunks of at most `chunk_bytes` of fp32 logits, so the full logits, often the peak memory of a step,
    are never materialized.  By default a chunk has 64 MiB, and on a GPU 2048 rows if that is more.  hidden (..., D),
    weight (V, D).  Gradients support a first derivative only.

    With `reduction="sum"` the result is a scalar, and gradients are computed in the forward pass, while a chunk's
    logits exist, so that nothing is computed twice.  After Liger Kernel (arXiv:2410.10989).  With `"row"` it is one sum
    per sequence, targets (B, T) to (B,), and the backward pass recomputes the logits, since the incoming gradients may
    differ.  The default is "sum", and inside `by_row` it is "row", summed in fp64.
    """
    hidden_ND, targets_N = hidden.flatten(0, -2), targets.flatten()
    row_bytes = 4 * weight.shape[0]
    if chunk_bytes is None:
        on_a_gpu = weight.device.type == "cuda" or _plans_for_a_gpu.get()
        chunk_bytes = max(_CHUNK_BYTES, _GPU_CHUNK_ROWS * row_bytes if on_a_gpu else 0)
    num_chunks = max(1, math.ceil(hidden_ND.shape[0] / max(1, chunk_bytes // row_bytes)))
    arguments = (hidden_ND, weight, targets_N, num_chunks)
    if reduction == "row" or (reduction is None and _sums_by_row.get()):
        losses_N: torch.Tensor = _LinearCrossEntropyPerToken.apply(*arguments)  # type: ignore[no-untyped-call]
        sums_B = losses_N.view(targets.shape).sum(-1, dtype=torch.float64)
        return sums_B.float() if reduction == "row" else sums_B
    noted, tokens = _rows.get(), list[torch.Tensor]()
    notes = None if noted is None else tokens
    loss: torch.Tensor = _LinearCrossEntropy.apply(*arguments, torch.is_grad_enabled(), notes)  # type: ignore[no-untyped-call]
    if noted is not None:
        noted.append(torch.cat(tokens).view(targets.shape).sum(-1, dtype=torch.float64))
    return loss


class _Chunk:
    """Some rows of the product: their log-probabilities and losses, and, in place, the gradient of the logits."""

    def __init__(self, hidden_nD: torch.Tensor, weight_VD: torch.Tensor, targets_n: torch.Tensor) -> None:
        self._counts_n1 = (targets_n != IGNORE).unsqueeze(1)
        self._index_n1 = targets_n.unsqueeze(1).where(self._counts_n1, 0)
        # From here on every pass over (n, V) matters: they dominate the memory traffic of the loss.
        self._log_probs_nV = torch.log_softmax(hidden_nD @ weight_VD.T, 1, dtype=torch.float32)

    def losses(self) -> torch.Tensor:
        """Return the loss of each row (n,), zero where the target does not count."""
        return -self._log_probs_nV.gather(1, self._index_n1).where(self._counts_n1, 0.0).squeeze(1)

    def take_gradient(self, scale_n1: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return d loss / d logits = softmax - one-hot, times `scale_n1`, zero if the target does not count.

        This consumes the chunk's buffers, since the products that follow need memory themselves.
        """
        probs_nV = self._log_probs_nV.exp_()
        del self._log_probs_nV
        probs_nV.scatter_add_(1, self._index_n1, probs_nV.new_full(self._index_n1.shape, -1.0))
        grad_nV = probs_nV if dtype == probs_nV.dtype else torch.empty_like(probs_nV, dtype=dtype)
        return torch.mul(probs_nV, scale_n1.where(self._counts_n1, 0.0), out=grad_nV)


class _FusedChunk:
    """The same in three compiled kernels, each of which passes over the logits once, in their own dtype."""

    def __init__(self, hidden_nD: torch.Tensor, weight_VD: torch.Tensor, targets_n: torch.Tensor) -> None:
        self._logits_nV, self._targets_n = _aligned_logits(hidden_nD, weight_VD), targets_n
        self._losses_n, self._logsumexp_n = _compiled(_losses)(self._logits_nV, targets_n)

    def losses(self) -> torch.Tensor:
        return self._losses_n

    def take_gradient(self, scale_n1: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        _compiled(_write_gradient)(self._logits_nV, self._logsumexp_n, self._targets_n, scale_n1)
        return self._logits_nV.to(dtype)


def _aligned_logits(hidden_nD: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
    """Return `hidden @ weight.T` with rows aligned to 128 bytes, whatever the size of the vocabulary.

    GPU kernels load 16 bytes at a time if rows are aligned.  With GPT-2's vocabulary of 50,257 they would not be,
    neither in the logits nor in the two products with their gradient.
    """
    size, aligned = weight_VD.shape[0], 128 // hidden_nD.element_size()
    room_nW = hidden_nD.new_empty(hidden_nD.shape[0], math.ceil(size / aligned) * aligned)
    return torch.mm(hidden_nD, weight_VD.T, out=room_nW[:, :size])


class _PlannedChunk(_FusedChunk):
    """The same on fake tensors: the memory that it holds, and what its kernels read and write."""

    def __init__(self, hidden_nD: torch.Tensor, weight_VD: torch.Tensor, targets_n: torch.Tensor) -> None:
        self._logits_nV = hidden_nD @ weight_VD.T
        self._losses_n = self._logits_nV.sum(1, dtype=torch.float32)

    def take_gradient(self, scale_n1: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self._logits_nV.zero_().to(dtype)


def _losses(logits_nV: torch.Tensor, targets_n: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss and the log-sum-exp of each row, (n,) in fp32."""
    values_nV, counts_n = logits_nV.float(), targets_n != IGNORE
    logsumexp_n = values_nV.logsumexp(1)
    picked_n = values_nV.gather(1, targets_n.where(counts_n, 0).unsqueeze(1)).squeeze(1)
    return (logsumexp_n - picked_n).where(counts_n, 0.0), logsumexp_n


def _write_gradient(
    logits_nV: torch.Tensor, logsumexp_n: torch.Tensor, targets_n: torch.Tensor, scale_n1: torch.Tensor
) -> None:
    """Overwrite the logits with the gradient of the losses, times `scale_n1`."""
    places_V, targets_n1 = torch.arange(logits_nV.shape[1], device=logits_nV.device), targets_n.unsqueeze(1)
    probs_nV = (logits_nV.float() - logsumexp_n.unsqueeze(1)).exp()
    grad_nV = (probs_nV - (places_V == targets_n1).float()) * scale_n1.where(targets_n1 != IGNORE, 0.0)
    logits_nV.copy_(grad_nV)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function: for its first shape, and dynamically once it is called with others."""
    compiled: Callable[..., Any] = torch.compile(function, fullgraph=True)
    return compiled


def _chunk(hidden_nD: torch.Tensor, weight_VD: torch.Tensor, targets_n: torch.Tensor) -> _Chunk | _FusedChunk:
    """Return the best chunk implementation for the weight's device: compiled on a GPU, if there is a compiler."""
    kind: type[_Chunk | _FusedChunk] = _Chunk
    if _plans_for_a_gpu.get():
        kind = _PlannedChunk
    elif weight_VD.device.type == "cuda" and can_compile("cuda"):
        kind = _FusedChunk
    return kind(hidden_nD, weight_VD, targets_n)


class _Gradients:
    """The gradients of hidden states and weight, accumulated over chunks; None if not needed."""

    def __init__(self, hidden_ND: torch.Tensor, wants_hidden: bool, wants_weight: bool) -> None:
        self.hidden_ND = torch.empty_like(hidden_ND) if wants_hidden else None
        self.weight_VD: torch.Tensor | None = None
        self.wanted = wants_hidden or wants_weight
        self._wants_weight = wants_weight

    def add(self, grad_nV: torch.Tensor, hidden_nD: torch.Tensor, weight_VD: torch.Tensor, start: int) -> None:
        """Add the contribution of the rows from `start` on."""
        if self.hidden_ND is not None:
            self.hidden_ND[start : start + len(hidden_nD)] = grad_nV @ weight_VD
        if self._wants_weight:
            # Accumulate in fp32: the weight's gradient is a sum over chunks.
            if self.weight_VD is not None and grad_nV.dtype == self.weight_VD.dtype:
                self.weight_VD.addmm_(grad_nV.T, hidden_nD)
                return
            part_VD = grad_nV.T @ hidden_nD
            self.weight_VD = part_VD.float() if self.weight_VD is None else self.weight_VD.add_(part_VD)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        targets_N: torch.Tensor,
        num_chunks: int,
        trains: bool,
        notes: list[torch.Tensor] | None,
    ) -> torch.Tensor:
        rows = max(1, math.ceil(hidden_ND.shape[0] / num_chunks))
        gradients = _Gradients(hidden_ND, *(trains and needed for needed in ctx.needs_input_grad[:2]))
        total, one = hidden_ND.new_zeros((), dtype=torch.float32), hidden_ND.new_ones((), dtype=torch.float32)
        for start in range(0, hidden_ND.shape[0], rows):
            hidden_nD = hidden_ND[start : start + rows]
            chunk = _chunk(hidden_nD, weight_VD, targets_N[start : start + rows])
            losses_n = chunk.losses()
            total += losses_n.sum()
            if notes is not None:
                notes.append(losses_n)
            if gradients.wanted:
                gradients.add(chunk.take_gradient(one, hidden_ND.dtype), hidden_nD, weight_VD, start)
        ctx.save_for_backward(gradients.hidden_ND, gradients.weight_VD)
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
        return grad_hidden_ND, grad_weight_VD, None, None, None, None


class _LinearCrossEntropyPerToken(torch.autograd.Function):
    """Returns the loss of each token; their gradients are known only in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: torch.Tensor, weight_VD: torch.Tensor, targets_N: torch.Tensor, num_chunks: int
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden_ND, weight_VD, targets_N)
        ctx.rows = rows = max(1, math.ceil(hidden_ND.shape[0] / num_chunks))
        losses_N = hidden_ND.new_empty(targets_N.shape, dtype=torch.float32)
        for start in range(0, hidden_ND.shape[0], rows):
            part = slice(start, start + rows)
            losses_N[part] = _chunk(hidden_ND[part], weight_VD, targets_N[part]).losses()
        return losses_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_ND, weight_VD, targets_N = ctx.saved_tensors
        gradients = _Gradients(hidden_ND, *ctx.needs_input_grad[:2])
        for start in range(0, hidden_ND.shape[0], ctx.rows):
            part = slice(start, start + ctx.rows)
            chunk = _chunk(hidden_ND[part], weight_VD, targets_N[part])
            grad_nV = chunk.take_gradient(grad_outputs[0][part].unsqueeze(1), hidden_ND.dtype)
            gradients.add(grad_nV, hidden_ND[part], weight_VD, start)
        grad_weight_VD = None if gradients.weight_VD is None else gradients.weight_VD.to(weight_VD.dtype)
        return gradients.hidden_ND, grad_weight_VD, None, None


def find_loss(model: nn.Module) -> Callable[[dict[str, torch.Tensor]], torch.Tensor]:
    """Return the function that maps a batch to the model's summed loss.

    The model is called with `tokens`, and with every other entry of the batch that its `forward` names.  A model that
    takes `targets` sums its own loss; the logits of any other are passed to `cross_entropy`.
    """
    named = set(inspect.signature(model.forward).parameters)

    def loss(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if "pair" in batch and not _sums_by_row.get():
            rule = "rejected answers would be trained on like chosen ones"
            raise setting_error("data.format", "preference", rule, fix="use a Trainer whose `loss` compares the two")
        others = {name: entry for name, entry in batch.items() if name in named and name != "tokens"}
        found: torch.Tensor = model(batch["tokens"], **others)
        return found if "targets" in named else cross_entropy(found, batch["targets"])

    return loss
