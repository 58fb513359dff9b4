"""Operations across tokens: attention and positions.

A model that uses only these functions to mix or count tokens keeps packed documents separate: `attend` lets a token
attend only to earlier tokens of its own document, and `positions` counts from 0 in each document.  Without documents,
each row is one document.  Such a model also supports context parallelism, where each rank holds a slice of every
sequence: the model is called with the slice, and both functions refer to the full sequence.  This package does not
depend on models or meshes.

Shape suffixes: B batch, T time, N query heads, K key and value heads, H head size.
"""

from __future__ import annotations

import torch

from trainer.sequence.attention import attend_cached, attend_full, attend_slices
from trainer.sequence.row_layout import (
    Cache,
    Documents,
    current_slices,
    find_borders,
    forget_slices,
    full_sequences,
    slice_sequences,
    use_slices,
)

__all__ = [
    "Cache",
    "Documents",
    "attend",
    "current_slices",
    "find_borders",
    "forget_slices",
    "full_sequences",
    "positions",
    "slice_sequences",
    "use_slices",
    "whole",
]

whole = full_sequences  # the old name; remove it after one version


def attend(
    q_BNTH: torch.Tensor,
    k_BKTH: torch.Tensor,
    v_BKTH: torch.Tensor,
    documents: Documents | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Return causal attention of each token within its document, (B, N, T, H); query heads may share key heads.

    On a GPU in half precision, one kernel processes all documents without host sync.  On a CPU, a loop over the
    documents computes only what is needed, unless they are tiny.  All other cases, including compiled code on a CPU,
    use a mask.  dropout: the share of attention weights to drop.

    With context parallelism T is the length of a slice.  Collectives of the ranks that share sequences: an all-gather
    of keys and values, repeated in the backward pass unless the block saves them, and one reduce-scatter in the
    backward pass; or, by heads, two all-to-alls forward and two backward.
    """
    if isinstance(documents, Cache):
        return attend_cached(q_BNTH, *documents.extend(k_BKTH, v_BKTH))
    slices = current_slices()
    if slices is None:
        return attend_full(q_BNTH, k_BKTH, v_BKTH, documents, dropout)
    return attend_slices(slices, q_BNTH, k_BKTH, v_BKTH, documents, dropout)


def positions(
    tokens_BT: torch.Tensor, given_BT: torch.Tensor | None = None, documents: Documents | None = None
) -> torch.Tensor:
    """Return the positions of tokens: `given_BT` if not None, otherwise counted from 0 in each document or row.

    The shape is (B, T), or (T,) if all rows have the same positions.
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
    if slices is None:
        return counted
    return torch.cat([counted[..., start:stop] for start, stop in slices.pieces], -1)
