"""Causal attention: on one rank that holds all keys and values, and under context parallelism, where each rank holds a
slice of the sequence.

Shape suffixes: B batch, T tokens of a full sequence, t of a slice, S of a piece, Q queries, N query heads,
K key and value heads, H head size, M tokens of all rows, C slices.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from trainer.config import Slices
from trainer.distributed.exchange import exchange_parts, gather_parts
from trainer.errors import UserError, setting_error
from trainer.sequence.row_layout import Documents

KERNELS = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
"""Names of the attention kernels; the device determines which one is used.  Each has a `_backward`."""

OPERATORS = frozenset(
    {*(getattr(torch.ops.aten, name).default for name in KERNELS), torch.ops.torch_attn._varlen_attn.default}
)
"""All attention operators that never materialize all scores."""

Kernels: TypeAlias = "Callable[[], AbstractContextManager[Any]]"

_gpu_kernels: Kernels | None = None


@contextmanager
def use_gpu_attention(kernels: Kernels) -> Iterator[None]:
    """Attend as on a GPU, where no causal mask is materialized, for plans on fake tensors.

    kernels: creates a context that replaces GPU kernels; it is entered again when `with_current_kernels` recomputes.
    """
    global _gpu_kernels
    previous, _gpu_kernels = _gpu_kernels, kernels
    try:
        yield
    finally:
        _gpu_kernels = previous


def with_current_kernels(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap an attention function to run later, in the backward pass, with the kernels that are active now."""
    kernels = _gpu_kernels
    if kernels is None:
        return function

    def run(*args: Any) -> torch.Tensor:
        with use_gpu_attention(kernels), kernels():
            return function(*args)

    return run


def attend_full(
    q_BNQH: torch.Tensor,
    k_BKTH: torch.Tensor,
    v_BKTH: torch.Tensor,
    documents: Documents | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Return causal attention of the last Q of T tokens within their documents: (B, N, Q, H).

    See `trainer.sequence.attend`.
    """
    grouped = k_BKTH.shape[1] != q_BNQH.shape[1]
    if grouped and not _supports_grouped_heads(q_BNQH.device.type, q_BNQH.dtype):
        heads_a_group, grouped = q_BNQH.shape[1] // k_BKTH.shape[1], False
        k_BKTH, v_BKTH = (tensor.repeat_interleave(heads_a_group, 1) for tensor in (k_BKTH, v_BKTH))
    if documents is None:
        return _attend_causally(q_BNQH, k_BKTH, v_BKTH, dropout, grouped)
    if q_BNQH.is_cuda and q_BNQH.dtype in (torch.bfloat16, torch.float16) and not dropout:
        return _attend_packed(q_BNQH, k_BKTH, v_BKTH, documents)
    if not q_BNQH.is_cuda and not torch.compiler.is_compiling() and not documents.are_tiny:
        return _attend_per_document(q_BNQH, k_BKTH, v_BKTH, documents, dropout)
    mask = documents.mask
    return F.scaled_dot_product_attention(q_BNQH, k_BKTH, v_BKTH, attn_mask=mask, dropout_p=dropout, enable_gqa=grouped)


def attend_cached(
    q_BNQH: torch.Tensor, k_BKTH: torch.Tensor, v_BKTH: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Attend from the last Q of T tokens, during generation.  mask: which keys each query attends to, if not all."""
    num_new, num_all = q_BNQH.shape[2], k_BKTH.shape[2]
    grouped = k_BKTH.shape[1] != q_BNQH.shape[1]
    if mask is not None:
        return F.scaled_dot_product_attention(q_BNQH, k_BKTH, v_BKTH, attn_mask=mask, enable_gqa=grouped)
    if num_new == 1 < num_all:
        return F.scaled_dot_product_attention(q_BNQH, k_BKTH, v_BKTH, enable_gqa=grouped)
    return _attend_causally(q_BNQH, k_BKTH, v_BKTH, 0.0, grouped)


def _supports_grouped_heads(device_type: str, dtype: torch.dtype) -> bool:
    """Return whether a kernel that never materializes all scores supports grouped-query heads; in fp32 on a GPU none
    does.
    """
    return device_type != "cuda" or dtype in (torch.bfloat16, torch.float16)


def _attend_causally(
    q_BNQH: torch.Tensor, k_BKTH: torch.Tensor, v_BKTH: torch.Tensor, dropout: float, grouped: bool
) -> torch.Tensor:
    num_new, num_all = q_BNQH.shape[2], k_BKTH.shape[2]
    options: dict[str, Any] = {"dropout_p": dropout, "enable_gqa": grouped}
    if num_new == num_all or (not q_BNQH.is_cuda and _gpu_kernels is not None):
        return F.scaled_dot_product_attention(q_BNQH, k_BKTH, v_BKTH, is_causal=True, **options)
    if q_BNQH.is_cuda:
        bias = causal_lower_right(num_new, num_all)  # GPU kernels never materialize it
        return F.scaled_dot_product_attention(q_BNQH, k_BKTH, v_BKTH, bias, **options)
    mask = _reversed_causal_mask(q_BNQH, num_all)
    return F.scaled_dot_product_attention(q_BNQH.flip(2), k_BKTH, v_BKTH, mask, **options).flip(2)


def _reversed_causal_mask(q_BNQH: torch.Tensor, num_all: int) -> torch.Tensor:
    """Return the mask of the last Q of T tokens, in reverse order: (Q, T), 0 where attention is allowed, else -inf.

    Each row is the previous one shifted by one: a strided view of Q + T numbers, for any length.
    """
    num_new = q_BNQH.shape[2]
    line = q_BNQH.new_zeros(num_new + num_all - 1)
    line[num_all:] = -torch.inf
    return line.as_strided((num_new, num_all), (1, 1))


def _attend_per_document(
    q_BNQH: torch.Tensor, k_BKTH: torch.Tensor, v_BKTH: torch.Tensor, documents: Documents, dropout: float
) -> torch.Tensor:
    grouped, num_queries = k_BKTH.shape[1] != q_BNQH.shape[1], q_BNQH.shape[2]
    rows = []
    for row, row_lengths in enumerate(documents.lengths):
        keys, values = (tensor[row : row + 1].split(row_lengths, 2) for tensor in (k_BKTH, v_BKTH))
        outputs, tokens_left = [], sum(row_lengths)
        for length, k_1KLH, v_1KLH in zip(row_lengths, keys, values, strict=True):
            start, tokens_left = max(0, num_queries - tokens_left), tokens_left - length
            stop = num_queries - tokens_left
            if stop > 0:
                q_1NLH = q_BNQH[row : row + 1, :, start:stop]
                outputs.append(_attend_causally(q_1NLH, k_1KLH, v_1KLH, dropout, grouped))
        rows.append(torch.cat(outputs, 2))
    return torch.cat(rows)


_VARLEN_PARAMETERS = inspect.signature(varlen_attn).parameters
_CAUSAL: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in _VARLEN_PARAMETERS else {"is_causal": True}
_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in _VARLEN_PARAMETERS else {}
"""Arguments of this torch version for a causal mask and for grouped-query heads, which some versions support
implicitly.
"""


def _attend_packed(
    q_BNQH: torch.Tensor, k_BKTH: torch.Tensor, v_BKTH: torch.Tensor, documents: Documents
) -> torch.Tensor:
    """Concatenate all rows and attend with the variable-length kernel.  No document is longer than a row."""
    (num_rows, _, num_queries, _), num_tokens = q_BNQH.shape, k_BKTH.shape[2]
    q_MNH, k_MKH, v_MKH = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (q_BNQH, k_BKTH, v_BKTH))
    borders_q, borders_k = documents.query_borders, documents.borders
    output_MNH: Any = varlen_attn(
        q_MNH, k_MKH, v_MKH, borders_q, borders_k, num_queries, num_tokens, **_CAUSAL, **_GROUPED
    )
    output_BQNH: torch.Tensor = output_MNH.unflatten(0, (num_rows, num_queries))
    return output_BQNH.transpose(1, 2)


# ---------------------------------------------------------------------------------------------------------------
# Context parallelism


def attend_slices(
    slices: Slices,
    q_BNtH: torch.Tensor,
    k_BKtH: torch.Tensor,
    v_BKtH: torch.Tensor,
    documents: Documents | None,
    dropout: float,
) -> torch.Tensor:
    """Return causal attention of a slice's tokens within their sequence, or within their documents: (B, N, t, H)."""
    if q_BNtH.shape[2] != slices.num_tokens:
        raise UserError(
            f"attention of {q_BNtH.shape[2]} tokens, where a slice of data.seq_len={slices.seq_len} has "
            f"{slices.num_tokens} on each of mesh.context={slices.count} ranks\n"
            "  for a full sequence outside training: with trainer.sequence.full_sequences():"
        )
    attend = _attend_by_heads if slices.method == "heads" else _attend_gathered
    return attend(slices, q_BNtH, k_BKtH, v_BKtH, documents, dropout)


def _attend_gathered(
    slices: Slices,
    q_BNtH: torch.Tensor,
    k_BKtH: torch.Tensor,
    v_BKtH: torch.Tensor,
    documents: Documents | None,
    dropout: float,
) -> torch.Tensor:
    """Gather all keys and values; they are freed when this call ends if the backward pass gathers them again."""
    if not slices.regathers_in_backward:
        return _attend_to_all(slices, q_BNtH, k_BKtH, v_BKtH, documents, dropout)
    options: Any = {"use_reentrant": False, "context_fn": _save_attention_outputs, "preserve_rng_state": dropout > 0}
    output: torch.Tensor = checkpoint(
        with_current_kernels(_attend_to_all), slices, q_BNtH, k_BKtH, v_BKtH, documents, dropout, **options
    )
    return output


def _attend_to_all(
    slices: Slices,
    q_BNtH: torch.Tensor,
    k_BKtH: torch.Tensor,
    v_BKtH: torch.Tensor,
    documents: Documents | None,
    dropout: float,
) -> torch.Tensor:
    """Let each piece attend to the preceding part of the sequence."""
    parts_C2BKtH = gather_parts(torch.stack((k_BKtH, v_BKtH)), slices.count, slices.group)
    # The sequence from all slices, (2, B, K, T, H): one copy, also in the backward pass.
    heads_C2BKSH, tails_C2BKSH = parts_C2BKtH.unflatten(-2, (2, -1)).unbind(-3)
    k_BKTH, v_BKTH = torch.cat([*heads_C2BKSH.unbind(), *reversed(tails_C2BKSH.unbind())], -2).unbind()
    outputs = []
    for number, (q_BNSH, (_, stop)) in enumerate(zip(q_BNtH.chunk(2, 2), slices.pieces, strict=True)):
        piece_documents = None if documents is None else documents.pieces[number]
        outputs.append(attend_full(q_BNSH, k_BKTH[:, :, :stop], v_BKTH[:, :, :stop], piece_documents, dropout))
    return torch.cat(outputs, 2)


def _save_attention_outputs() -> Any:
    """Return the contexts of `torch.utils.checkpoint` that save only the outputs of attention kernels."""
    return create_selective_checkpoint_contexts([*OPERATORS])


def _attend_by_heads(
    slices: Slices,
    q_BNtH: torch.Tensor,
    k_BKtH: torch.Tensor,
    v_BKtH: torch.Tensor,
    documents: Documents | None,
    dropout: float,
) -> torch.Tensor:
    """Exchange slices for heads: each rank attends on full sequences with some heads, then sends the results back."""
    num_ranks, num_heads, num_kv_heads = slices.count, q_BNtH.shape[1], k_BKtH.shape[1]
    if num_heads % num_ranks:
        rule = f"needs mesh.context={num_ranks} to divide the number of query heads, {num_heads}"
        raise setting_error("mesh.context_method", "heads", rule, "gather")
    repeats = math.lcm(num_kv_heads, num_ranks) // num_kv_heads
    if repeats > 1:
        k_BKtH, v_BKtH = (tensor.repeat_interleave(repeats, 1) for tensor in (k_BKtH, v_BKtH))
    parts_BCXtH = [tensor.unflatten(1, (num_ranks, -1)) for tensor in (q_BNtH, k_BKtH, v_BKtH)]
    sizes = [part.shape[2] for part in parts_BCXtH]
    received_CBXtH = exchange_parts(torch.cat(parts_BCXtH, 2).transpose(0, 1), slices.group)
    q_BnTH, k_BkTH, v_BkTH = received_CBXtH.movedim(0, 2).flatten(2, 3).split(sizes, 1)
    output_BnTH = attend_full(q_BnTH, k_BkTH, v_BkTH, documents, dropout)
    parts_CBntH = exchange_parts(output_BnTH.unflatten(2, (num_ranks, -1)).movedim(2, 0), slices.group)
    return parts_CBntH.movedim(0, 1).flatten(1, 2)
