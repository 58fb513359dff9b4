"""Operations that mix tokens or compute their positions: attention, linear attention, convolutions and positions.

A model that uses only these functions to mix tokens and to compute positions keeps packed documents separate.  With
`attend`, a token attends only to itself and earlier tokens in its own document; `gated_delta_rule` and
`causal_convolution` reset their state at the start of each document, and `positions` restarts from 0.  If no
`documents` are given, each row is treated as one document.  Such a model also supports context parallelism, where each
rank holds a slice of every sequence: the model is called with the slice, and these functions still take the full
sequence into account.  `apply_by_document` separates the documents for any other causal layer, but does not support
slices.

With tensor parallelism, the ranks of a group share the matrices of a layer, and its attention heads.  Inside such a
layer, all tokens of the group are there; between layers, each rank holds an equal part of them, as if it were a slice.
`gather_tokens`, `sum_tokens` and `own_tokens` lead from one to the other.

Shape suffixes: B batch, T time, N query heads, K key and value heads, H head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from trainer.config.parallel import Slices
from trainer.errors import UserError
from trainer.sequence.attention import AttentionOptions, attend_cached, attend_full, attend_slices
from trainer.sequence.linear_attention import causal_convolution, gated_delta_rule
from trainer.sequence.recurrence import apply_by_document
from trainer.sequence.row_layout import (
    Cache,
    Documents,
    compute_cu_seqlens,
    context_slices,
    current_slices,
    disable_slices,
    enable_slices,
    full_sequences,
    gather_tokens,
    last_logits_only,
    needed_for_logits,
    own_rows,
    own_tokens,
    sum_over_slices,
    sum_tokens,
    tensor_slices,
    use_slices,
)

__all__ = [
    "Cache",
    "Documents",
    "apply_by_document",
    "attend",
    "attention_positions",
    "causal_convolution",
    "compute_cu_seqlens",
    "context_slices",
    "current_slices",
    "disable_slices",
    "enable_slices",
    "full_sequences",
    "gated_delta_rule",
    "gather_tokens",
    "last_logits_only",
    "needed_for_logits",
    "own_rows",
    "own_tokens",
    "positions",
    "sum_over_slices",
    "sum_tokens",
    "tensor_slices",
    "use_slices",
]


def attend(
    q_BNTH: torch.Tensor,
    k_BKTH: torch.Tensor,
    v_BKTH: torch.Tensor,
    documents: Documents | None = None,
    dropout: float = 0.0,
    *,
    window: int | None = None,
    scale: float | None = None,
    sinks_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the output of causal attention within each document, of shape (B, N, T, H).

    Query heads may share key and value heads.  The head size of values may be smaller than that of keys; the output has
    the head size of values.

    dropout: the fraction of attention weights to drop.
    window: the maximum number of tokens that a token attends to, including itself.
    scale: the factor by which scores are multiplied; by default 1 / sqrt(H).
    sinks_N: for each query head of the model, the score of an additional key without a value, so that attention
        weights sum to less than 1 (OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card", arXiv:2508.10925, section
        2.2).

    Without documents, attention is plain causal attention.  With them, on a GPU in half precision and without dropout,
    one kernel processes all documents, with no host sync if the batch has `cu_seqlens`.  On a CPU, unless the
    documents are tiny, a loop over them computes only what is needed.  All other batches with documents, including
    those in compiled code on a CPU, use a mask.  A window shorter than the sequence is computed block by block, with a
    mask for each block.

    With context parallelism, T is the length of a slice.  Collectives among the ranks that share a sequence: an
    all-gather of keys and values, repeated in the backward pass unless activations are kept, and one reduce-scatter in
    the backward pass.  With `mesh.context_method=heads` instead: two all-to-alls forward and two backward.
    """
    options = AttentionOptions(dropout, window, scale, sinks_N)
    if isinstance(documents, Cache):
        k_BKSH, v_BKSH = documents.extend(k_BKTH, v_BKTH)
        return attend_cached(q_BNTH, k_BKSH, v_BKSH, documents.mask_of(q_BNTH, window), options)
    slices = current_slices()
    if slices is not None and q_BNTH.shape[2] != slices.num_tokens:
        raise UserError(_wrong_length(q_BNTH.shape[2], slices))
    if sinks_N is not None:
        options = replace(options, sinks=own_rows(sinks_N, q_BNTH.shape[1]))
    if slices is None or slices.count == 1:
        return attend_full(q_BNTH, k_BKTH, v_BKTH, documents, options)
    return attend_slices(slices, q_BNTH, k_BKTH, v_BKTH, documents, options)


def _wrong_length(num_tokens: int, slices: Slices) -> str:
    ranks = f" on each of mesh.context={slices.count} ranks" if slices.count > 1 else ""
    text = (
        f"attention got {num_tokens} tokens, but data.seq_len={slices.seq_len} means {slices.num_tokens}{ranks}\n"
        "  for a full sequence outside training: with trainer.sequence.full_sequences():"
    )
    if slices.tensor_count > 1:
        text += "\n  with mesh.tensor, ModelSpec(tensor=...) must give the style `input` to the module that attends"
    return text


def positions(
    tokens_BT: torch.Tensor, positions_BT: torch.Tensor | None = None, documents: Documents | None = None
) -> torch.Tensor:
    """Return the positions of tokens: `positions_BT` if given, else counted from 0 in each document or full row.

    With a `Cache`, positions continue after its tokens.

    The shape is (B, T), or (T,) if all rows have the same positions.
    """
    if positions_BT is not None:
        return positions_BT
    slices = current_slices()
    return _count_positions(tokens_BT, documents, None if slices is None else slices.own_pieces)


def attention_positions(
    tokens_BT: torch.Tensor, positions_BT: torch.Tensor | None = None, documents: Documents | None = None
) -> torch.Tensor:
    """Return the positions of the tokens that attention layers see; see `positions`.

    With tensor parallelism, these are the tokens of all ranks of the group, and `positions_BT`, if given, takes one
    all-gather.  Otherwise they are the tokens that the model is called with.
    """
    if positions_BT is not None:
        return gather_tokens(positions_BT, 1)
    slices = current_slices()
    return _count_positions(tokens_BT, documents, None if slices is None else slices.pieces)


def _count_positions(
    tokens_BT: torch.Tensor, documents: Documents | None, pieces: Sequence[tuple[int, int]] | None
) -> torch.Tensor:
    """Return positions counted from 0; pieces: which tokens of full rows to count, None for those of `tokens_BT`."""
    if isinstance(documents, Cache):
        return documents.positions_of(tokens_BT)
    num_tokens = tokens_BT.shape[1] if pieces is None else max(stop for _, stop in pieces)
    counted = torch.arange(num_tokens, device=tokens_BT.device) if documents is None else documents.positions_BT
    return counted if pieces is None else torch.cat([counted[..., start:stop] for start, stop in pieces], -1)
