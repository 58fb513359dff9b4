"""Attention from a rank's slice to the full sequence, most of which is on other ranks (context parallelism).

Shape suffixes: B batch, T tokens of a full sequence, t of a slice, S of a piece, N query heads, K key and value heads,
H head size, C slices.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trainer.config import Slices
from trainer.distributed.exchange import exchange_parts, gather_parts
from trainer.errors import UserError, setting_error
from trainer.sequence.attention import OPERATORS, attend_full, with_current_kernels
from trainer.sequence.documents import Documents


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
            "  for a whole sequence outside training: with trainer.sequence.whole():"
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
    kept: Any = {"use_reentrant": False, "context_fn": _save_attention_outputs, "preserve_rng_state": dropout > 0}
    found: torch.Tensor = checkpoint(
        with_current_kernels(_attend_to_all), slices, q_BNtH, k_BKtH, v_BKtH, documents, dropout, **kept
    )
    return found


def _attend_to_all(
    slices: Slices,
    q_BNtH: torch.Tensor,
    k_BKtH: torch.Tensor,
    v_BKtH: torch.Tensor,
    documents: Documents | None,
    dropout: float,
) -> torch.Tensor:
    """Let each piece attend to the preceding part of the sequence."""
    k_BKTH, v_BKTH = _reassemble(gather_parts(torch.stack((k_BKtH, v_BKtH)), slices.count, slices.group)).unbind()
    found = []
    for number, (q_BNSH, (_, stop)) in enumerate(zip(q_BNtH.chunk(2, 2), slices.pieces, strict=True)):
        piece_documents = None if documents is None else documents.pieces[number]
        found.append(attend_full(q_BNSH, k_BKTH[:, :, :stop], v_BKTH[:, :, :stop], piece_documents, dropout))
    return torch.cat(found, 2)


def _reassemble(slices_C2BKtH: torch.Tensor) -> torch.Tensor:
    """Reassemble the sequence from all slices: (2, B, K, T, H).  One copy, also in the backward pass."""
    heads_C2BKSH, tails_C2BKSH = slices_C2BKtH.unflatten(-2, (2, -1)).unbind(-3)
    return torch.cat([*heads_C2BKSH.unbind(), *reversed(tails_C2BKSH.unbind())], -2)


def _save_attention_outputs() -> Any:
    """Return the contexts of `torch.utils.checkpoint` that save only the outputs of attention kernels."""
    return create_selective_checkpoint_contexts(_policy)


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in OPERATORS else CheckpointPolicy.PREFER_RECOMPUTE


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
    found_BnTH = attend_full(q_BnTH, k_BkTH, v_BkTH, documents, dropout)
    parts_CBntH = exchange_parts(found_BnTH.unflatten(2, (num_ranks, -1)).movedim(2, 0), slices.group)
    return parts_CBntH.movedim(0, 1).flatten(1, 2)
