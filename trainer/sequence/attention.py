"""Attention of tokens to those before them, all of which are here.

Shape suffixes: B batch, T time, N query heads, K key and value heads, H head size.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn

from trainer.sequence.documents import Documents

_plans_for_a_gpu = False


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Attend as a GPU does, which makes no mask of what is causal: for a plan, whose tensors are nowhere."""
    global _plans_for_a_gpu
    before, _plans_for_a_gpu = _plans_for_a_gpu, True
    try:
        yield
    finally:
        _plans_for_a_gpu = before


def attend_whole(
    q_BNQH: torch.Tensor,
    k_BKTH: torch.Tensor,
    v_BKTH: torch.Tensor,
    documents: Documents | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Return causal attention of the last Q tokens to their documents in all T of a row: (B, N, Q, H).

    See `trainer.sequence.attend`.
    """
    grouped = k_BKTH.shape[1] != q_BNQH.shape[1]
    if grouped and not _takes_groups(q_BNQH.device.type, q_BNQH.dtype):
        heads_a_group, grouped = q_BNQH.shape[1] // k_BKTH.shape[1], False
        k_BKTH, v_BKTH = (tensor.repeat_interleave(heads_a_group, 1) for tensor in (k_BKTH, v_BKTH))
    if documents is None:
        return _attend_causally(q_BNQH, k_BKTH, v_BKTH, dropout, grouped)
    if q_BNQH.is_cuda and q_BNQH.dtype in (torch.bfloat16, torch.float16) and not dropout:
        return _attend_packed(q_BNQH, k_BKTH, v_BKTH, documents)
    if not q_BNQH.is_cuda and not torch.compiler.is_compiling() and not documents.are_tiny:
        return _attend_in_turn(q_BNQH, k_BKTH, v_BKTH, documents, dropout)
    mask = documents.mask
    return F.scaled_dot_product_attention(q_BNQH, k_BKTH, v_BKTH, attn_mask=mask, dropout_p=dropout, enable_gqa=grouped)


def attend_further(q_BNQH: torch.Tensor, k_BKTH: torch.Tensor, v_BKTH: torch.Tensor) -> torch.Tensor:
    """Attend from the last Q of T tokens, where a text is still being written."""
    num_new, num_all = q_BNQH.shape[2], k_BKTH.shape[2]
    grouped = k_BKTH.shape[1] != q_BNQH.shape[1]
    mask = _lower_right(num_new, num_all, q_BNQH.device) if 1 < num_new < num_all else None
    is_causal = num_new == num_all
    return F.scaled_dot_product_attention(q_BNQH, k_BKTH, v_BKTH, mask, is_causal=is_causal, enable_gqa=grouped)


def _takes_groups(device_type: str, dtype: torch.dtype) -> bool:
    """Return whether a kernel that never holds all scores takes heads that share keys: on a GPU in fp32 none does."""
    return device_type != "cuda" or dtype in (torch.bfloat16, torch.float16)


def _attend_causally(
    q_BNQH: torch.Tensor, k_BKTH: torch.Tensor, v_BKTH: torch.Tensor, dropout: float, grouped: bool
) -> torch.Tensor:
    num_new, num_all = q_BNQH.shape[2], k_BKTH.shape[2]
    mask: torch.Tensor | None = None
    if num_new < num_all and q_BNQH.is_cuda:
        mask = causal_lower_right(num_new, num_all)  # which no kernel of a GPU ever makes
    elif num_new < num_all and not _plans_for_a_gpu:
        mask = _lower_right(num_new, num_all, q_BNQH.device)
    return F.scaled_dot_product_attention(
        q_BNQH, k_BKTH, v_BKTH, mask, dropout_p=dropout, is_causal=mask is None, enable_gqa=grouped
    )


def _lower_right(num_new: int, num_all: int, device: torch.device) -> torch.Tensor:
    """Return the mask of the last of all tokens: True where one may see another, (Q, T)."""
    return torch.ones(num_new, num_all, dtype=torch.bool, device=device).tril(num_all - num_new)


def _attend_in_turn(
    q_BNQH: torch.Tensor, k_BKTH: torch.Tensor, v_BKTH: torch.Tensor, documents: Documents, dropout: float
) -> torch.Tensor:
    grouped, num_queries = k_BKTH.shape[1] != q_BNQH.shape[1], q_BNQH.shape[2]
    rows = []
    for number, of_row in enumerate(documents.lengths):
        keys, values = (tensor[number : number + 1].split(of_row, 2) for tensor in (k_BKTH, v_BKTH))
        found, left = [], sum(of_row)
        for length, k_1KLH, v_1KLH in zip(of_row, keys, values, strict=True):
            start, left = max(0, num_queries - left), left - length
            stop = num_queries - left
            if stop > 0:
                q_1NLH = q_BNQH[number : number + 1, :, start:stop]
                found.append(_attend_causally(q_1NLH, k_1KLH, v_1KLH, dropout, grouped))
        rows.append(torch.cat(found, 2))
    return torch.cat(rows)


_TAKES = inspect.signature(varlen_attn).parameters
_CAUSAL: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in _TAKES else {"is_causal": True}
_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in _TAKES else {}
"""How this version of torch is told of a causal mask, and of heads that share keys; some take those unasked."""


def _attend_packed(
    q_BNQH: torch.Tensor, k_BKTH: torch.Tensor, v_BKTH: torch.Tensor, documents: Documents
) -> torch.Tensor:
    """Lay all rows end to end.  No document is longer than a row, which is all that the kernel is told of that."""
    (num_rows, _, num_queries, _), num_tokens = q_BNQH.shape, k_BKTH.shape[2]
    q_MNH, k_MKH, v_MKH = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (q_BNQH, k_BKTH, v_BKTH))
    of_q, of_k = documents.query_borders, documents.borders
    found_MNH: Any = varlen_attn(q_MNH, k_MKH, v_MKH, of_q, of_k, num_queries, num_tokens, **_CAUSAL, **_GROUPED)
    found_BQNH: torch.Tensor = found_MNH.unflatten(0, (num_rows, num_queries))
    return found_BQNH.transpose(1, 2)
