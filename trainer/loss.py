"""Cross-entropy losses, computed from logits or, without materializing the logits, from hidden states.

Losses are never averaged here.  By default they are summed over the targets, and `Trainer.train_step` divides the sum
over the global batch by the sum of `Trainer.count` (the number of targets, unless the objective counts samples).  So
the result does not depend on the mesh or the micro-batch size.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from trainer.config.requirements import can_compile
from trainer.distributed.exchange import gather_parts
from trainer.errors import setting_error

if TYPE_CHECKING:
    from trainer.config.schema import RunConfig

IGNORE = -100
"""Target value of positions without a loss (PyTorch's default `ignore_index`)."""

_CHUNK_BYTES = 64 * 2**20
"""Default limit on the size of a chunk's fp32 logits: enough for full-speed matmuls on a CPU, yet little memory."""

_GPU_CHUNK_ROWS = 2048
"""On a GPU, a chunk may have this many rows even if its logits then exceed `_CHUNK_BYTES`.

Each chunk reads and writes the full gradient of the weight, about 10 bytes per element, and takes 6 FLOPs per element
and row: at 4 TB/s and 800 TFLOP/s, the memory traffic takes as long as the FLOPs of 330 rows.
"""


Value = TypeVar("Value")


@contextmanager
def _within(variable: ContextVar[Value], value: Value) -> Iterator[Value]:
    """Set a context variable inside the block, and yield the value."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


_uses_gpu_chunks = ContextVar("uses_gpu_chunks", default=False)


def use_gpu_chunks() -> AbstractContextManager[object]:
    """Inside the block, compute losses in the chunks that a GPU would use.  The planner uses this on fake tensors."""
    return _within(_uses_gpu_chunks, True)


_recorded_losses: ContextVar[list[torch.Tensor] | None] = ContextVar("recorded_losses", default=None)


@contextmanager
def row_losses() -> Iterator[list[torch.Tensor]]:
    """Yield a list to which each cross-entropy inside the block appends its sum per sequence, (B,) in fp64.

    Only cross-entropies that return a single sum are recorded, not those inside `by_row` or `replace_loss`.
    """
    recorded: list[torch.Tensor] = []
    with _within(_recorded_losses, recorded):
        yield recorded


_sums_by_row = ContextVar("sums_by_row", default=False)


def by_row() -> AbstractContextManager[object]:
    """Make models inside the block return one loss sum per sequence, (B,), instead of a single sum.

    The sums are in fp64, because callers subtract them and small differences must be accurate.  Works for models that
    compute their loss with the functions in this module.
    """
    return _within(_sums_by_row, True)


@dataclass(frozen=True)
class VocabularyPart:
    """The rows of an output projection that one rank of a group holds, if the group divides the vocabulary."""

    start: int
    """The first row."""
    number: int
    """This rank's index in the group."""
    num_ranks: int
    group: str
    """Name of the process group, for `trainer.distributed.exchange`."""

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks, stacked.  One all-gather; no gradient."""
        return gather_parts(part.detach(), self.num_ranks, self.group)


_vocabulary_part: ContextVar[VocabularyPart | None] = ContextVar("vocabulary_part", default=None)


def split_vocabulary(part: VocabularyPart) -> AbstractContextManager[object]:
    """Inside the block, the weight given to `linear_cross_entropy` holds only `part` of the vocabulary.

    Its hidden states and targets must be the same on all ranks of the group: those of all their tokens, T of which
    (B, T) belong to each rank in equal shares, in order.
    """
    return _within(_vocabulary_part, part)


LossReplacement: TypeAlias = "Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor], torch.Tensor]"
"""A function of hidden states (B, T, D), the weight of the output projection (V, D) and targets (B, T).

If the weight is None, the first argument holds the logits, (B, T, V)."""

_replacement: ContextVar[LossReplacement | None] = ContextVar("replacement", default=None)


def replace_loss(function: LossReplacement) -> AbstractContextManager[object]:
    """Make models inside the block return `function(hidden, weight, targets)` in place of their summed loss.

    Works for models that compute their loss with the functions in this module.
    """
    return _within(_replacement, function)


def is_loss_replaced() -> bool:
    """Return whether models now return the result of a `LossReplacement`."""
    return _replacement.get() is not None


def scores_at_targets(hidden: torch.Tensor, weight: torch.Tensor | None, targets: torch.Tensor) -> torch.Tensor:
    """Return the outputs at each row's last target, (B, V) in fp64; a `LossReplacement`.

    Used with heads that score texts.  The last target marks the position to score; a row without targets is scored at
    its first position.
    """
    positions_T = torch.arange(1, targets.shape[1] + 1, device=targets.device)
    last_B = ((targets != IGNORE) * positions_T).argmax(1)
    hidden_BD = hidden[torch.arange(len(targets), device=targets.device), last_B].float()
    return (hidden_BD if weight is None else hidden_BD @ weight.float().T).double()


def per_token_losses(hidden: torch.Tensor, weight: torch.Tensor | None, targets: torch.Tensor) -> torch.Tensor:
    """Return the loss of each target, (B, T) in fp32, with 0 for ignored ones; a `LossReplacement`."""
    if weight is not None:
        return linear_cross_entropy(hidden, weight, targets, reduction="token")
    losses_N = F.cross_entropy(hidden.flatten(0, -2).float(), targets.flatten(), ignore_index=IGNORE, reduction="none")
    return losses_N.view(targets.shape)


def loss_mode(config: RunConfig) -> AbstractContextManager[object]:
    """Return the context in which a run computes its model's loss: as a sum over tokens, by row, or as scores."""
    if "scores" in config.objective.needs:
        return replace_loss(scores_at_targets)
    return nullcontext() if config.objective.sums_tokens else by_row()


def count_targets(targets: torch.Tensor) -> int:
    """Return the number of targets that are not IGNORE."""
    return int((targets != IGNORE).sum())


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the summed cross-entropy of `logits` (..., V) against `targets` (...), in fp32; see also `by_row`."""
    if (replacement := _replacement.get()) is not None:
        return replacement(logits, None, targets)
    flat_logits, flat_targets, recorded = logits.flatten(0, -2).float(), targets.flatten(), _recorded_losses.get()
    if recorded is None and not _sums_by_row.get():
        return F.cross_entropy(flat_logits, flat_targets, ignore_index=IGNORE, reduction="sum")
    losses = F.cross_entropy(flat_logits, flat_targets, ignore_index=IGNORE, reduction="none").view(targets.shape)
    if _sums_by_row.get():
        return losses.sum(-1, dtype=torch.float64)
    assert recorded is not None
    recorded.append(losses.detach().sum(-1, dtype=torch.float64))
    return losses.sum()


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    chunk_bytes: int | None = None,
    reduction: Literal["sum", "row", "token"] | None = None,
) -> torch.Tensor:
    """Return the summed cross-entropy of `hidden @ weight.T` (..., V) against `targets` (...), in fp32.

    hidden: (..., D).  weight: (V, D).  Works in chunks of rows with at most `chunk_bytes` of fp32 logits each, so that
    the full logits, often the peak memory of a step, are never materialized.  The default is 64 MiB, or on a GPU the
    size of 2048 rows if that is larger.  Only first derivatives are supported.

    With `reduction="sum"` the result is a scalar.  Gradients are computed in the forward pass, while a chunk's logits
    exist, so that nothing is computed twice, as in Liger Kernel (arXiv:2410.10989).  With `"row"` the result is one sum
    per sequence, (B,) for targets (B, T), and with `"token"` one loss per target, 0 for ignored ones; the backward pass
    recomputes the logits, since each sequence or token may have its own incoming gradient.  The default is "sum";
    inside `by_row` it is "row", and the sums are returned in fp64.

    Inside `split_vocabulary`, `weight` holds this rank's rows, and hidden states and targets are those of the group.
    The result of `"sum"` is an equal share of the group's loss on each rank, that of `"row"` and `"token"` is of this
    rank's tokens.  Collectives: a small all-gather per chunk of rows, in the forward pass and wherever logits are
    recomputed, and one of the incoming gradient.
    """
    if reduction is None and (replacement := _replacement.get()) is not None:
        return replacement(hidden, weight, targets)
    hidden_ND, targets_N = hidden.flatten(0, -2), targets.flatten()
    row_bytes = 4 * weight.shape[0]
    if chunk_bytes is None:
        on_a_gpu = weight.device.type == "cuda" or _uses_gpu_chunks.get()
        chunk_bytes = max(_CHUNK_BYTES, _GPU_CHUNK_ROWS * row_bytes if on_a_gpu else 0)
    num_chunks = max(1, math.ceil(hidden_ND.shape[0] / max(1, chunk_bytes // row_bytes)))
    part = _vocabulary_part.get()
    arguments = (hidden_ND, weight, targets_N, num_chunks, part)
    sums_by_row = reduction == "row" or (reduction is None and _sums_by_row.get())
    if reduction == "token" or sums_by_row:
        losses_N: torch.Tensor = _LinearCrossEntropyPerToken.apply(*arguments)  # type: ignore[no-untyped-call]
        losses = _own_tokens(losses_N.view(targets.shape), part)
        if not sums_by_row:
            return losses
        sums_B = losses.sum(-1, dtype=torch.float64)
        return sums_B.float() if reduction == "row" else sums_B
    recorded, token_losses = _recorded_losses.get(), list[torch.Tensor]()
    loss_list = None if recorded is None else token_losses
    loss: torch.Tensor = _LinearCrossEntropy.apply(*arguments, torch.is_grad_enabled(), loss_list)  # type: ignore[no-untyped-call]
    if recorded is not None:
        losses = _own_tokens(torch.cat(token_losses).view(targets.shape), part)
        recorded.append(losses.sum(-1, dtype=torch.float64))
    return loss


def _own_tokens(losses: torch.Tensor, part: VocabularyPart | None) -> torch.Tensor:
    """Return the losses of this rank's tokens, (B, t), given those of its group, (B, T)."""
    return losses if part is None else losses.chunk(part.num_ranks, -1)[part.number]


class _Chunk:
    """The log-probabilities and losses of a chunk of rows; `take_gradient` overwrites the log-probabilities."""

    def __init__(self, hidden_nD: torch.Tensor, weight_VD: torch.Tensor, targets_n: torch.Tensor) -> None:
        self._mask_n1 = (targets_n != IGNORE).unsqueeze(1)
        self._index_n1 = targets_n.unsqueeze(1).where(self._mask_n1, 0)
        # From here on, every pass over (n, V) matters: such passes dominate the loss's memory traffic.
        self._log_probs_nV = torch.log_softmax(hidden_nD @ weight_VD.T, 1, dtype=torch.float32)

    def losses(self) -> torch.Tensor:
        """Return the loss of each row, (n,); zero for ignored targets."""
        return -self._log_probs_nV.gather(1, self._index_n1).where(self._mask_n1, 0.0).squeeze(1)

    def take_gradient(self, scale_n1: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return d loss / d logits = (softmax - one-hot) x `scale_n1`; zero for ignored targets.

        Overwrites the chunk's buffers, to leave memory for the matmuls that follow.
        """
        probs_nV = self._log_probs_nV.exp_()
        del self._log_probs_nV
        probs_nV.scatter_add_(1, self._index_n1, probs_nV.new_full(self._index_n1.shape, -1.0))
        grad_nV = probs_nV if dtype == probs_nV.dtype else torch.empty_like(probs_nV, dtype=dtype)
        return torch.mul(probs_nV, scale_n1.where(self._mask_n1, 0.0), out=grad_nV)


class _FusedChunk:
    """A `_Chunk` with compiled kernels, each of which passes over the logits once, in their own dtype."""

    def __init__(self, hidden_nD: torch.Tensor, weight_VD: torch.Tensor, targets_n: torch.Tensor) -> None:
        # GPU kernels load 16 bytes per instruction if rows are aligned.  With GPT-2's vocabulary of 50,257, unpadded
        # rows of logits are not aligned, which would also slow down the two matmuls with their gradient.
        size, aligned = weight_VD.shape[0], 128 // hidden_nD.element_size()
        padded_nW = hidden_nD.new_empty(hidden_nD.shape[0], math.ceil(size / aligned) * aligned)
        self._logits_nV = torch.mm(hidden_nD, weight_VD.T, out=padded_nW[:, :size])
        self._targets_n = targets_n
        self._losses_n, self._logsumexp_n = _compiled(_losses)(self._logits_nV, targets_n)

    def losses(self) -> torch.Tensor:
        return self._losses_n

    def take_gradient(self, scale_n1: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        _compiled(_write_gradient)(self._logits_nV, self._logsumexp_n, self._targets_n, scale_n1)
        return self._logits_nV.to(dtype)


class _SplitChunk:
    """A chunk of all tokens of a group, among whose ranks the vocabulary is divided.  One small all-gather."""

    def __init__(
        self, hidden_nD: torch.Tensor, weight_VD: torch.Tensor, targets_n: torch.Tensor, part: VocabularyPart
    ) -> None:
        num_rows = weight_VD.shape[0]
        self._mask_n = targets_n != IGNORE
        index_n = targets_n - part.start
        is_elsewhere_n = (index_n < 0) | (index_n >= num_rows)
        # A target on another rank gets an index that no row here has.
        self._index_n = torch.where(self._mask_n, index_n.masked_fill(is_elsewhere_n, num_rows), IGNORE)
        self._logits_nV = hidden_nD @ weight_VD.T
        statistics, self._write_gradient = _kernels(self._logits_nV)
        logsumexp_n, picked_n = statistics(self._logits_nV, self._index_n)
        logsumexp_Rn, picked_Rn = part.gather(torch.stack((logsumexp_n, picked_n))).unbind(1)
        self._logsumexp_n, self._picked_n = logsumexp_Rn.logsumexp(0), picked_Rn.sum(0)

    def losses(self) -> torch.Tensor:
        return (self._logsumexp_n - self._picked_n).where(self._mask_n, 0.0)

    def take_gradient(self, scale_n1: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        self._write_gradient(self._logits_nV, self._logsumexp_n, self._index_n, scale_n1)
        return self._logits_nV.to(dtype)


def _statistics(logits_nV: torch.Tensor, index_n: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-sum-exp of each row, and the logit at its index, or 0 if that is outside: (n,) each, in fp32."""
    values_nV = logits_nV.float()
    is_here_n = (index_n >= 0) & (index_n < logits_nV.shape[1])
    picked_n = values_nV.gather(1, index_n.where(is_here_n, 0).unsqueeze(1)).squeeze(1)
    return values_nV.logsumexp(1), picked_n.where(is_here_n, 0.0)


def _kernels(logits_nV: torch.Tensor) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return `_statistics` and `_write_gradient`, compiled on a GPU; in the planner, functions with equal memory."""
    if _uses_gpu_chunks.get():
        return lambda logits, index: (logits.sum(1, dtype=torch.float32),) * 2, lambda logits, *_: logits.zero_()
    if logits_nV.device.type == "cuda" and can_compile("cuda"):
        return _compiled(_statistics), _compiled(_write_gradient)
    return _statistics, _write_gradient


class _PlannedChunk(_FusedChunk):
    """Stands in for `_FusedChunk` on fake tensors: allocates, reads and writes the same amount of memory."""

    def __init__(self, hidden_nD: torch.Tensor, weight_VD: torch.Tensor, targets_n: torch.Tensor) -> None:
        self._logits_nV = hidden_nD @ weight_VD.T
        self._losses_n = self._logits_nV.sum(1, dtype=torch.float32)

    def take_gradient(self, scale_n1: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self._logits_nV.zero_().to(dtype)


def _losses(logits_nV: torch.Tensor, targets_n: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss and the log-sum-exp of each row, (n,) in fp32."""
    values_nV, mask_n = logits_nV.float(), targets_n != IGNORE
    logsumexp_n = values_nV.logsumexp(1)
    picked_n = values_nV.gather(1, targets_n.where(mask_n, 0).unsqueeze(1)).squeeze(1)
    return (logsumexp_n - picked_n).where(mask_n, 0.0), logsumexp_n


def _write_gradient(
    logits_nV: torch.Tensor, logsumexp_n: torch.Tensor, targets_n: torch.Tensor, scale_n1: torch.Tensor
) -> None:
    """Overwrite the logits with the gradient of the losses, times `scale_n1`."""
    indices_V, targets_n1 = torch.arange(logits_nV.shape[1], device=logits_nV.device), targets_n.unsqueeze(1)
    probs_nV = (logits_nV.float() - logsumexp_n.unsqueeze(1)).exp()
    grad_nV = (probs_nV - (indices_V == targets_n1).float()) * scale_n1.where(targets_n1 != IGNORE, 0.0)
    logits_nV.copy_(grad_nV)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function for the shapes of its first call; a call with other shapes recompiles it for any shapes."""
    compiled: Callable[..., Any] = torch.compile(function, fullgraph=True)
    return compiled


def _chunk(
    hidden_nD: torch.Tensor, weight_VD: torch.Tensor, targets_n: torch.Tensor, part: VocabularyPart | None
) -> _Chunk | _FusedChunk | _SplitChunk:
    """Return a chunk for the weight's device: compiled on a GPU if a compiler is installed, otherwise plain."""
    if part is not None:
        return _SplitChunk(hidden_nD, weight_VD, targets_n, part)
    if _uses_gpu_chunks.get():
        return _PlannedChunk(hidden_nD, weight_VD, targets_n)
    if weight_VD.device.type == "cuda" and can_compile("cuda"):
        return _FusedChunk(hidden_nD, weight_VD, targets_n)
    return _Chunk(hidden_nD, weight_VD, targets_n)


class Gradients:
    """The gradients of the hidden states and of the weight, accumulated over the chunks; None if not needed."""

    def __init__(self, hidden_ND: torch.Tensor, needs_hidden: bool, needs_weight: bool) -> None:
        self.hidden_ND = torch.empty_like(hidden_ND) if needs_hidden else None
        self.weight_VD: torch.Tensor | None = None
        self.is_needed = needs_hidden or needs_weight
        self._needs_weight = needs_weight

    def add(self, grad_nV: torch.Tensor, hidden_nD: torch.Tensor, weight_VD: torch.Tensor, start: int) -> None:
        """Add the contribution of a chunk that starts at row `start`."""
        if self.hidden_ND is not None:
            self.hidden_ND[start : start + len(hidden_nD)] = grad_nV @ weight_VD
        if self._needs_weight:
            # In fp32, since the weight's gradient is a sum over chunks.
            if self.weight_VD is not None and grad_nV.dtype == self.weight_VD.dtype:
                self.weight_VD.addmm_(grad_nV.T, hidden_nD)
                return
            grad_VD = grad_nV.T @ hidden_nD
            self.weight_VD = grad_VD.float() if self.weight_VD is None else self.weight_VD.add_(grad_VD)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        targets_N: torch.Tensor,
        num_chunks: int,
        part: VocabularyPart | None,
        computes_gradients: bool,
        loss_list: list[torch.Tensor] | None,
    ) -> torch.Tensor:
        rows = max(1, math.ceil(hidden_ND.shape[0] / num_chunks))
        gradients = Gradients(hidden_ND, *(computes_gradients and needed for needed in ctx.needs_input_grad[:2]))
        total, one = hidden_ND.new_zeros((), dtype=torch.float32), hidden_ND.new_ones((), dtype=torch.float32)
        for start in range(0, hidden_ND.shape[0], rows):
            hidden_nD = hidden_ND[start : start + rows]
            chunk = _chunk(hidden_nD, weight_VD, targets_N[start : start + rows], part)
            losses_n = chunk.losses()
            total += losses_n.sum()
            if loss_list is not None:
                loss_list.append(losses_n)
            if gradients.is_needed:
                gradients.add(chunk.take_gradient(one, hidden_ND.dtype), hidden_nD, weight_VD, start)
        ctx.save_for_backward(gradients.hidden_ND, gradients.weight_VD)
        ctx.weight_dtype = weight_VD.dtype
        ctx.part = part
        return total if part is None else total / part.num_ranks

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grad_outputs
        if ctx.part is not None:
            grad = ctx.part.gather(grad).mean(0)
        grad_hidden_ND, grad_weight_VD = ctx.saved_tensors
        if grad_hidden_ND is not None:
            grad_hidden_ND = grad_hidden_ND * grad
        if grad_weight_VD is not None:
            grad_weight_VD = (grad_weight_VD * grad).to(ctx.weight_dtype)
        return grad_hidden_ND, grad_weight_VD, None, None, None, None, None


class _LinearCrossEntropyPerToken(torch.autograd.Function):
    """Returns the loss of each token.  Recomputes the logits in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        targets_N: torch.Tensor,
        num_chunks: int,
        part: VocabularyPart | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden_ND, weight_VD, targets_N)
        ctx.part = part
        ctx.rows = rows = max(1, math.ceil(hidden_ND.shape[0] / num_chunks))
        losses_N = hidden_ND.new_empty(targets_N.shape, dtype=torch.float32)
        for start in range(0, hidden_ND.shape[0], rows):
            chunk_rows = slice(start, start + rows)
            losses_N[chunk_rows] = _chunk(hidden_ND[chunk_rows], weight_VD, targets_N[chunk_rows], part).losses()
        return losses_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_ND, weight_VD, targets_N = ctx.saved_tensors
        (grad_N,) = grad_outputs
        if ctx.part is not None:
            grad_N = ctx.part.gather(grad_N).sum(0)
        gradients = Gradients(hidden_ND, *ctx.needs_input_grad[:2])
        for start in range(0, hidden_ND.shape[0], ctx.rows):
            chunk_rows = slice(start, start + ctx.rows)
            chunk = _chunk(hidden_ND[chunk_rows], weight_VD, targets_N[chunk_rows], ctx.part)
            grad_nV = chunk.take_gradient(grad_N[chunk_rows].unsqueeze(1), hidden_ND.dtype)
            gradients.add(grad_nV, hidden_ND[chunk_rows], weight_VD, start)
        grad_weight_VD = None if gradients.weight_VD is None else gradients.weight_VD.to(weight_VD.dtype)
        return gradients.hidden_ND, grad_weight_VD, None, None, None


def find_loss(model: nn.Module) -> Callable[[dict[str, torch.Tensor]], torch.Tensor]:
    """Return the function that maps a batch to the model's summed loss.

    The function calls the model with `tokens`, and with the other entries of the batch that its `forward` names.  A
    model that takes `targets` must return its summed loss; the logits of other models are passed to `cross_entropy`.
    It raises UserError for preference pairs, unless the caller has replaced the loss or uses `by_row`.
    """
    argument_names = set(inspect.signature(model.forward).parameters)

    def loss(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if "pair" in batch and not _sums_by_row.get() and _replacement.get() is None:
            rule = "rejected responses would be trained on like chosen ones"
            raise setting_error("data.format", "preference", rule, fix="use a Trainer whose `loss` compares the two")
        inputs = {name: entry for name, entry in batch.items() if name in argument_names and name != "tokens"}
        output: torch.Tensor = model(batch["tokens"], **inputs)
        return output if "targets" in argument_names else cross_entropy(output, batch["targets"])

    return loss
