"""Applies stateful layers, such as convolutions and linear attention, to each packed document separately.

Shape suffixes: B batch, T time, D width, M tokens in all rows, N documents of similar length, L tokens in the
longest of them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from trainer.sequence.row_layout import Documents


def apply_by_document(
    layer: Callable[[torch.Tensor], torch.Tensor], x_BTD: torch.Tensor, documents: Documents
) -> torch.Tensor:
    """Return the output of a causal layer whose state is reset at the start of each document, (B, T, D).

    layer: maps (N, L, D) to (N, L, D).  It is called with one document per row, padded with zeros: once for documents
    of 1 token, once for those of 2 or 3, once for those of 4 to 7, and so on, so that less than half of the tokens are
    padding.  The host needs the documents' lengths: one host sync per batch on a GPU.  If each row is one document, the
    layer is called once, with the rows as they are.
    """
    if len(documents.cu_seqlens) == x_BTD.shape[0] + 1:  # each row is one document
        return layer(x_BTD)
    groups, order_M = documents.length_groups
    x_MD = x_BTD.flatten(0, 1)
    parts = []
    for group in groups:
        x_NLD = x_MD[group.source_index_NL].masked_fill(group.is_padding_NL.unsqueeze(-1), 0)
        parts.append(layer(x_NLD).flatten(0, 1)[group.tokens_M])
    return torch.cat(parts)[order_M].unflatten(0, x_BTD.shape[:2])
