"""Operations across tokens: attention and positions.

A model that calls nothing else to mix or to count tokens keeps the documents of a batch to themselves, however they are
packed into its rows: `attend` lets a token see what comes before it in its own document, `positions` counts from 0 in
each.  Without documents a row is one.  Such a model also trains on sequences of which each rank holds a slice: what it
is called with is the slice, and both functions mean the whole sequence.  Knows no model and no mesh.

Shape suffixes: B batch, T time, N query heads, K key and value heads, H head size.
"""

from __future__ import annotations

import torch

from trainer.sequence.attention import attend_further, attend_whole
from trainer.sequence.context import attend_slices
from trainer.sequence.documents import Cache, Documents, find_borders
from trainer.sequence.slices import current_slices, forget_slices, slice_sequences, sliced, take, whole

__all__ = [
    "Cache",
    "Documents",
    "attend",
    "current_slices",
    "find_borders",
    "forget_slices",
    "positions",
    "slice_sequences",
    "sliced",
    "whole",
]


def attend(
    q_BNTH: torch.Tensor,
    k_BKTH: torch.Tensor,
    v_BKTH: torch.Tensor,
    documents: Documents | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Return causal attention of each token to its document, (B, N, T, H); query heads may share those of keys.

    On a GPU in half precision one kernel takes all documents as they lie, and the host waits for nothing.  On a CPU a
    loop over them computes what is needed and no more, unless they are tiny.  Everything else, compiled code for a CPU
    among it, masks.  dropout: the share of attention weights that is dropped.

    Of slices of sequences T is a slice's, and collectives of the ranks that share them are an all-gather of keys and
    values, once more backward unless the block keeps them, and one reduce-scatter backward; or two all-to-alls and two
    backward.
    """
    if isinstance(documents, Cache):
        return attend_further(q_BNTH, *documents.extend(k_BKTH, v_BKTH))
    slices = current_slices()
    if slices is None:
        return attend_whole(q_BNTH, k_BKTH, v_BKTH, documents, dropout)
    return attend_slices(slices, q_BNTH, k_BKTH, v_BKTH, documents, dropout)


def positions(
    tokens_BT: torch.Tensor, given_BT: torch.Tensor | None = None, documents: Documents | None = None
) -> torch.Tensor:
    """Return where tokens stand: `given_BT` if the batch says so, else counted from 0 in each document or row.

    Of shape (B, T), or (T,) where all rows are alike.
    """
    if given_BT is not None:
        return given_BT
    if isinstance(documents, Cache):
        return torch.arange(documents.num_tokens, documents.num_tokens + tokens_BT.shape[1], device=tokens_BT.device)
    slices = current_slices()
    if documents is None:
        counted = torch.arange(tokens_BT.shape[1] if slices is None else slices.seq_len, device=tokens_BT.device)
    else:
        counted = documents.positions_BT
    return counted if slices is None else take(slices, counted)
