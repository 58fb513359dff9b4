"""Causal attention, on one rank that holds all keys and values or under context parallelism, where each rank holds a
slice of the sequence.

Shape suffixes: B batch, T tokens in a full sequence, t tokens in a slice, S tokens in a piece, L tokens in a document,
M tokens in all rows, Q queries, N query heads, K key and value heads, n and k the same on one rank, H head size, C
slices, W window.  The head size of values may be smaller than that of keys; the output has the head size of values.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from trainer.config.parallel import Slices
from trainer.distributed.exchange import exchange_parts, gather_parts
from trainer.errors import setting_error
from trainer.sequence.row_layout import Documents

KERNELS = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
"""Names of the kernels of `scaled_dot_product_attention`; device, dtype and arguments determine which one runs.

The name of each backward kernel is the forward kernel's name with `_backward` appended."""

ATTENTION_OPERATORS = frozenset(
    {*(getattr(torch.ops.aten, name).default for name in KERNELS), torch.ops.torch_attn._varlen_attn.default}
)
"""The operators that compute attention without materializing the full matrix of scores."""

KernelContext: TypeAlias = "Callable[[], AbstractContextManager[Any]]"

_gpu_kernels: KernelContext | None = None
"""Creates a context that imitates GPU kernels; None outside `use_gpu_attention`."""


@contextmanager
def use_gpu_attention(kernels: KernelContext) -> Iterator[None]:
    """Inside the block, compute attention as on a GPU, without materializing causal masks.  Used for planning.

    kernels: creates a context that imitates GPU kernels; functions wrapped by `with_current_kernels` enter such a
    context again when they run in the backward pass.
    """
    global _gpu_kernels
    previous, _gpu_kernels = _gpu_kernels, kernels
    try:
        yield
    finally:
        _gpu_kernels = previous


def with_current_kernels(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap an attention function that may run again in the backward pass, so that it then uses the current kernels."""
    kernels = _gpu_kernels
    if kernels is None:
        return function

    def run(*args: Any) -> torch.Tensor:
        with use_gpu_attention(kernels), kernels():
            return function(*args)

    return run


@dataclass(frozen=True)
class AttentionOptions:
    """Options of causal attention; see `trainer.sequence.attend`."""

    dropout: float = 0.0
    window: int | None = None
    scale: float | None = None
    sinks: torch.Tensor | None = None
    """A score per query head, (N,)."""


CAUSAL_ONLY = AttentionOptions()


def attend_full(
    q_BNQH: torch.Tensor,
    k_BKTH: torch.Tensor,
    v_BKTH: torch.Tensor,
    documents: Documents | None = None,
    options: AttentionOptions = CAUSAL_ONLY,
) -> torch.Tensor:
    """Return causal attention from the last Q of T tokens to the tokens of their documents: (B, N, Q, H).

    See `trainer.sequence.attend`.
    """
    value_width, padding = v_BKTH.shape[-1], q_BNQH.shape[-1] - v_BKTH.shape[-1]
    if padding < 0:  # flash attention needs equal widths; zeros do not change the scores
        scale = q_BNQH.shape[-1] ** -0.5 if options.scale is None else options.scale
        q_BNQH, k_BKTH = F.pad(q_BNQH, (0, -padding)), F.pad(k_BKTH, (0, -padding))
        return attend_full(q_BNQH, k_BKTH, v_BKTH, documents, replace(options, scale=scale))
    if padding:
        return attend_full(q_BNQH, k_BKTH, F.pad(v_BKTH, (0, padding)), documents, options)[..., :value_width]
    is_grouped = k_BKTH.shape[1] != q_BNQH.shape[1]
    if is_grouped and not _supports_grouped_heads(q_BNQH.device.type, q_BNQH.dtype):
        heads_per_group = q_BNQH.shape[1] // k_BKTH.shape[1]
        k_BKTH, v_BKTH = (tensor.repeat_interleave(heads_per_group, 1) for tensor in (k_BKTH, v_BKTH))
    if options.window is not None and options.window < k_BKTH.shape[2]:
        return _attend_in_window(q_BNQH, k_BKTH, v_BKTH, documents, options)
    if documents is None:
        return _attend_causally(q_BNQH, k_BKTH, v_BKTH, options)
    if q_BNQH.is_cuda and q_BNQH.dtype in (torch.bfloat16, torch.float16) and not options.dropout:
        return _attend_packed(q_BNQH, k_BKTH, v_BKTH, documents, options)
    if not q_BNQH.is_cuda and not torch.compiler.is_compiling() and not documents.are_tiny:
        return _attend_per_document(q_BNQH, k_BKTH, v_BKTH, documents, options)
    return _attend_masked(q_BNQH, k_BKTH, v_BKTH, documents.mask, options)


def attend_cached(
    q_BNQH: torch.Tensor,
    k_BKTH: torch.Tensor,
    v_BKTH: torch.Tensor,
    mask: torch.Tensor | None,
    options: AttentionOptions,
) -> torch.Tensor:
    """Return attention from the last Q of T tokens during generation, (B, N, Q, H).  mask: see `Cache.mask_of`."""
    if q_BNQH.shape[2] > 1:
        if mask is None:
            return attend_full(q_BNQH, k_BKTH, v_BKTH, None, options)
        return _attend_masked(q_BNQH, k_BKTH, v_BKTH, mask, options)
    visible = slice(-options.window if options.window is not None else None, None)
    mask = None if mask is None else mask[..., visible]
    return _attend_masked(q_BNQH, k_BKTH[:, :, visible], v_BKTH[:, :, visible], mask, options)


def _supports_grouped_heads(device_type: str, dtype: torch.dtype) -> bool:
    """Return whether some kernel supports grouped-query heads without materializing the full matrix of scores.

    In fp32 on a GPU, none does.
    """
    return device_type != "cuda" or dtype in (torch.bfloat16, torch.float16)


def _attend_causally(
    q_BNQH: torch.Tensor, k_BKTH: torch.Tensor, v_BKTH: torch.Tensor, options: AttentionOptions
) -> torch.Tensor:
    if options.sinks is not None:
        return _attend_causally(*_with_sink_key(q_BNQH, k_BKTH, v_BKTH, options))[..., : v_BKTH.shape[-1]]
    num_queries, num_keys = q_BNQH.shape[2], k_BKTH.shape[2]
    arguments = _kernel_arguments(q_BNQH, k_BKTH, options)
    if num_queries == num_keys or (not q_BNQH.is_cuda and _gpu_kernels is not None):
        return F.scaled_dot_product_attention(q_BNQH, k_BKTH, v_BKTH, is_causal=True, **arguments)
    if q_BNQH.is_cuda:
        bias = causal_lower_right(num_queries, num_keys)  # GPU kernels never materialize it
        return F.scaled_dot_product_attention(q_BNQH, k_BKTH, v_BKTH, bias, **arguments)
    # With the queries in reverse order, each row of the mask, which is 0 where attention is allowed and else -inf, is
    # the previous one shifted by one, so the mask is a strided view of only Q + T numbers.
    values = q_BNQH.new_zeros(num_queries + num_keys - 1)
    values[num_keys:] = -torch.inf
    mask = values.as_strided((num_queries, num_keys), (1, 1))
    return F.scaled_dot_product_attention(q_BNQH.flip(2), k_BKTH, v_BKTH, mask, **arguments).flip(2)


def _attend_masked(
    q_BNQH: torch.Tensor,
    k_BKTH: torch.Tensor,
    v_BKTH: torch.Tensor,
    mask: torch.Tensor | None,
    options: AttentionOptions,
) -> torch.Tensor:
    if options.sinks is not None:
        mask = None if mask is None else F.pad(mask, (1, 0), value=mask.dtype == torch.bool)  # True, or 0 if additive
        q_BNQH, k_BKTH, with_sink, options = _with_sink_key(q_BNQH, k_BKTH, v_BKTH, options)
        return _attend_masked(q_BNQH, k_BKTH, with_sink, mask, options)[..., : v_BKTH.shape[-1]]
    arguments = _kernel_arguments(q_BNQH, k_BKTH, options)
    return F.scaled_dot_product_attention(q_BNQH, k_BKTH, v_BKTH, attn_mask=mask, **arguments)


def _kernel_arguments(q_BNQH: torch.Tensor, k_BKTH: torch.Tensor, options: AttentionOptions) -> dict[str, Any]:
    is_grouped = k_BKTH.shape[1] != q_BNQH.shape[1]
    return {"dropout_p": options.dropout, "enable_gqa": is_grouped, "scale": options.scale}


_SINK_WIDTH = 8
"""Dimensions added to each head for the sink.  One would be enough, but GPU kernels need a multiple of 8."""


def _with_sink_key(
    q_BNQH: torch.Tensor, k_BKTH: torch.Tensor, v_BKTH: torch.Tensor, options: AttentionOptions
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionOptions]:
    """Return queries, keys and values with an additional first key, and the options without sinks.

    The score of this key is the sink of the query's head, and its value is zero, so any attention kernel supports
    sinks.  In an additional dimension, queries contain the sink, the new key is 1, and all other keys are 0.
    """
    assert options.sinks is not None
    scale = options.scale or q_BNQH.shape[-1] ** -0.5
    sinks_N111 = (options.sinks / scale).to(q_BNQH.dtype)[:, None, None]
    q_BNQX = torch.cat((q_BNQH, F.pad(sinks_N111.expand(*q_BNQH.shape[:3], 1), (0, _SINK_WIDTH - 1))), -1)
    k_BKTX, v_BKTX = (F.pad(tensor, (0, _SINK_WIDTH)) for tensor in (k_BKTH, v_BKTH))
    sink_X = F.pad(k_BKTH.new_ones(1), (k_BKTH.shape[-1], _SINK_WIDTH - 1))
    k_BKTX = torch.cat((sink_X.expand(*k_BKTX.shape[:2], 1, -1), k_BKTX), 2)
    return q_BNQX, k_BKTX, F.pad(v_BKTX, (0, 0, 1, 0)), replace(options, scale=scale, sinks=None)


def _attend_in_window(
    q_BNQH: torch.Tensor,
    k_BKTH: torch.Tensor,
    v_BKTH: torch.Tensor,
    documents: Documents | None,
    options: AttentionOptions,
) -> torch.Tensor:
    """Return attention of each query to the last W tokens of its document, including itself.

    Each block of W queries attends to its own block and the previous one, with a mask.  This takes 2 W scores per query
    instead of T, in shapes that do not depend on the documents.
    """
    assert options.window is not None
    (num_rows, _, num_queries, _), num_tokens, window = q_BNQH.shape, k_BKTH.shape[2], options.window
    num_blocks = math.ceil(num_queries / window)
    # Queries are the last tokens, so padding comes first; negative padding drops keys that no query attends to.
    query_padding, key_padding = num_blocks * window - num_queries, (num_blocks + 1) * window - num_tokens
    q_BNQH = F.pad(q_BNQH, (0, 0, query_padding, 0))
    k_BKTH, v_BKTH = (F.pad(tensor, (0, 0, key_padding, 0)) for tensor in (k_BKTH, v_BKTH))
    numbers_BT = torch.ones((num_rows, num_tokens), dtype=torch.int64, device=q_BNQH.device)
    numbers_BT = F.pad(numbers_BT if documents is None else documents.numbers_BT, (key_padding, 0))
    # All blocks of all rows become separate rows.
    q_RNWH = q_BNQH.unflatten(2, (num_blocks, window)).transpose(1, 2).flatten(0, 1)
    k_RKSH, v_RKSH = (x.unfold(2, 2 * window, window).permute(0, 2, 1, 4, 3).flatten(0, 1) for x in (k_BKTH, v_BKTH))
    numbers_RS = numbers_BT.unfold(1, 2 * window, window).flatten(0, 1)
    band_WS = torch.ones((window, 2 * window), dtype=torch.bool, device=q_BNQH.device).triu(1).tril(window)
    mask_R1WS = (numbers_RS[:, None, window:, None] == numbers_RS[:, None, None, :]) & band_WS
    out_RNWH = _attend_masked(q_RNWH, k_RKSH, v_RKSH, mask_R1WS, options)
    return out_RNWH.unflatten(0, (num_rows, num_blocks)).transpose(1, 2).flatten(2, 3)[:, :, query_padding:]


def _attend_per_document(
    q_BNQH: torch.Tensor, k_BKTH: torch.Tensor, v_BKTH: torch.Tensor, documents: Documents, options: AttentionOptions
) -> torch.Tensor:
    num_queries, rows = q_BNQH.shape[2], []
    for row, row_lengths in enumerate(documents.lengths):
        keys, values = (tensor[row : row + 1].split(row_lengths, 2) for tensor in (k_BKTH, v_BKTH))
        outputs, tokens_left = [], sum(row_lengths)
        for length, k_1KLH, v_1KLH in zip(row_lengths, keys, values, strict=True):
            start, tokens_left = max(0, num_queries - tokens_left), tokens_left - length
            stop = num_queries - tokens_left
            if stop > 0:
                q_1NLH = q_BNQH[row : row + 1, :, start:stop]
                outputs.append(_attend_causally(q_1NLH, k_1KLH, v_1KLH, options))
        rows.append(torch.cat(outputs, 2))
    return torch.cat(rows)


_VARLEN_PARAMETERS = inspect.signature(varlen_attn).parameters
_CAUSAL: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in _VARLEN_PARAMETERS else {"is_causal": True}
_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in _VARLEN_PARAMETERS else {}
"""The arguments for a causal mask and for grouped-query heads, which depend on the version of torch.  Some versions
support grouped heads without an argument.
"""


def _attend_packed(
    q_BNQH: torch.Tensor,
    k_BKTH: torch.Tensor,
    v_BKTH: torch.Tensor,
    documents: Documents,
    options: AttentionOptions = CAUSAL_ONLY,
) -> torch.Tensor:
    """Concatenate all rows and attend with the variable-length kernel, (B, N, Q, H).  Documents never span rows."""
    (num_rows, _, num_queries, width), num_tokens = q_BNQH.shape, k_BKTH.shape[2]
    cu_seqlens_q, cu_seqlens_k, scale = documents.query_cu_seqlens, documents.cu_seqlens, options.scale
    if options.sinks is None:
        q_MNH, k_MKH, v_MKH = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (q_BNQH, k_BKTH, v_BKTH))
    else:
        q_BNQH, k_BKTH, v_BKTH, without_sinks = _with_sink_key(q_BNQH, k_BKTH, v_BKTH, options)
        q_MNH, scale = q_BNQH.transpose(1, 2).flatten(0, 1), without_sinks.scale
        # Insert the sink's key before each document's first token, which shifts all later tokens.
        tokens_M = torch.arange(num_rows * num_tokens, device=q_BNQH.device)
        key_index_M = tokens_M + torch.searchsorted(cu_seqlens_k, tokens_M, right=True)
        num_keys = len(tokens_M) + len(cu_seqlens_k) - 1
        sink_KH, zero_KH = k_BKTH[0, :, 0], v_BKTH[0, :, 0]
        k_MKH, v_MKH = (
            first_KH.expand(num_keys, -1, -1).index_copy(0, key_index_M, tensor[:, :, 1:].transpose(1, 2).flatten(0, 1))
            for first_KH, tensor in ((sink_KH, k_BKTH), (zero_KH, v_BKTH))
        )
        cu_seqlens_k = cu_seqlens_k + torch.arange(len(cu_seqlens_k), dtype=torch.int32, device=cu_seqlens_k.device)
        num_tokens += 1
    arguments = {**_CAUSAL, **_GROUPED, **({} if scale is None else {"scale": scale})}
    output_MNH: Any = varlen_attn(q_MNH, k_MKH, v_MKH, cu_seqlens_q, cu_seqlens_k, num_queries, num_tokens, **arguments)
    output_BQNH: torch.Tensor = output_MNH.unflatten(0, (num_rows, num_queries))
    return output_BQNH.transpose(1, 2)[..., :width]


# ---------------------------------------------------------------------------------------------------------------
# Context parallelism


def attend_slices(
    slices: Slices,
    q_BNtH: torch.Tensor,
    k_BKtH: torch.Tensor,
    v_BKtH: torch.Tensor,
    documents: Documents | None,
    options: AttentionOptions,
) -> torch.Tensor:
    """Return causal attention of a slice's tokens within their sequence, or within their documents: (B, N, t, H)."""
    attend = _attend_by_heads if slices.method == "heads" else _attend_gathered
    return attend(slices, q_BNtH, k_BKtH, v_BKtH, documents, options)


def _attend_gathered(
    slices: Slices,
    q_BNtH: torch.Tensor,
    k_BKtH: torch.Tensor,
    v_BKtH: torch.Tensor,
    documents: Documents | None,
    options: AttentionOptions,
) -> torch.Tensor:
    """Gather all keys and values, then attend.  Frees them afterwards if the backward pass is to gather them again."""
    if not slices.regathers_in_backward:
        return _attend_to_all(slices, q_BNtH, k_BKtH, v_BKtH, documents, options)
    arguments: Any = {
        **{"use_reentrant": False, "context_fn": _save_attention_outputs},
        "preserve_rng_state": options.dropout > 0,
    }
    output: torch.Tensor = checkpoint(
        with_current_kernels(_attend_to_all), slices, q_BNtH, k_BKtH, v_BKtH, documents, options, **arguments
    )
    return output


def _attend_to_all(
    slices: Slices,
    q_BNtH: torch.Tensor,
    k_BKtH: torch.Tensor,
    v_BKtH: torch.Tensor,
    documents: Documents | None,
    options: AttentionOptions,
) -> torch.Tensor:
    """Return the attention of each piece of this rank's slice to all tokens up to the end of the piece."""
    widths = [k_BKtH.shape[-1], v_BKtH.shape[-1]]
    parts_CBKtX = gather_parts(torch.cat((k_BKtH, v_BKtH), -1), slices.count, slices.group)
    # Join the slices with keys and values in one tensor (B, K, T, X), so that there is one copy per direction.
    heads_CBKSX, tails_CBKSX = parts_CBKtX.unflatten(-2, (2, -1)).unbind(-3)
    k_BKTH, v_BKTH = torch.cat([*heads_CBKSX.unbind(), *reversed(tails_CBKSX.unbind())], -2).split(widths, -1)
    outputs = []
    for number, (q_BNSH, (_, stop)) in enumerate(zip(q_BNtH.chunk(2, 2), slices.pieces, strict=True)):
        piece_documents = None if documents is None else documents.pieces[number]
        outputs.append(attend_full(q_BNSH, k_BKTH[:, :, :stop], v_BKTH[:, :, :stop], piece_documents, options))
    return torch.cat(outputs, 2)


def _save_attention_outputs() -> Any:
    """Return the contexts of `torch.utils.checkpoint` that save only the outputs of attention kernels."""
    return create_selective_checkpoint_contexts([*ATTENTION_OPERATORS])


def _attend_by_heads(
    slices: Slices,
    q_BNtH: torch.Tensor,
    k_BKtH: torch.Tensor,
    v_BKtH: torch.Tensor,
    documents: Documents | None,
    options: AttentionOptions,
) -> torch.Tensor:
    """Exchange slices for heads: each rank computes some heads for full sequences, then sends the results back."""
    num_ranks, num_heads, num_kv_heads = slices.count, q_BNtH.shape[1], k_BKtH.shape[1]
    if num_heads % num_ranks:
        rule = f"needs mesh.context={num_ranks} to divide the number of query heads, {num_heads}"
        raise setting_error("mesh.context_method", "heads", rule, "gather")
    repeats = math.lcm(num_kv_heads, num_ranks) // num_kv_heads
    if repeats > 1:
        k_BKtH, v_BKtH = (tensor.repeat_interleave(repeats, 1) for tensor in (k_BKtH, v_BKtH))
    value_width = v_BKtH.shape[-1]
    v_BKtH = F.pad(v_BKtH, (0, q_BNtH.shape[-1] - value_width))
    parts_BCXtH = [tensor.unflatten(1, (num_ranks, -1)) for tensor in (q_BNtH, k_BKtH, v_BKtH)]
    sizes = [part.shape[2] for part in parts_BCXtH]
    received_CBXtH = exchange_parts(torch.cat(parts_BCXtH, 2).transpose(0, 1), slices.group)
    q_BnTH, k_BkTH, v_BkTH = received_CBXtH.movedim(0, 2).flatten(2, 3).split(sizes, 1)
    if options.sinks is not None:
        options = replace(options, sinks=options.sinks.chunk(num_ranks)[slices.number])
    output_BnTH = attend_full(q_BnTH, k_BkTH, v_BkTH[..., :value_width], documents, options)
    parts_CBntH = exchange_parts(output_BnTH.unflatten(2, (num_ranks, -1)).movedim(2, 0), slices.group)
    return parts_CBntH.movedim(0, 1).flatten(1, 2)
