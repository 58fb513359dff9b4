"""The gated delta rule (linear attention with a matrix-valued state), and short causal convolutions.

Masks separate the documents of each row, so that shapes do not depend on the documents.  Under context parallelism,
each rank computes how its pieces of a sequence change the state.  This change is an affine map, so after one all-gather
of the maps of all pieces, each rank can compute the initial states of its pieces.

Sources: Yang, Kautz and Hatamizadeh 2024, "Gated Delta Networks", arXiv:2412.06464; for the chunkwise matmuls, Yang
et al. 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length", arXiv:2406.06484.

Shape suffixes: B rows or pieces of rows, T tokens, D channels, W taps of a convolution, N heads, H key size, E value
size, C chunks of S tokens each, P pieces of a sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from trainer.config.parallel import Slices
from trainer.distributed.exchange import gather_parts
from trainer.sequence.chunk_states import chunk_states, last_state
from trainer.sequence.row_layout import Cache, Documents, context_slices

_CHUNK_TOKENS = 64
"""Number of tokens to process at once with matmuls; the state is computed only between chunks."""


def causal_convolution(
    x_BTD: torch.Tensor, weight_DW: torch.Tensor, documents: Documents | None = None
) -> torch.Tensor:
    """Return the causal convolution (B, T, D) of each channel with its taps, within each document.

    The last tap belongs to the current token.

    With a `Cache`, the tokens continue those of earlier calls.  With context parallelism, T is the length of a slice.
    Collectives: one all-gather of the last W - 1 tokens of each piece, and one reduce-scatter in the backward pass.
    """
    num_before = weight_DW.shape[1] - 1
    if isinstance(documents, Cache):
        stored, is_padding_BT = documents.recall(), documents.is_padding(x_BTD)
        if is_padding_BT is not None:
            x_BTD = x_BTD.masked_fill(is_padding_BT.unsqueeze(-1), 0)
        before_BTD = x_BTD.new_zeros(x_BTD.shape[0], num_before, x_BTD.shape[2]) if stored is None else stored[0]
        x_BTD = torch.cat((before_BTD, x_BTD), 1)
        documents.keep(x_BTD[:, x_BTD.shape[1] - num_before :])
        return _convolve(x_BTD, weight_DW)
    slices = context_slices()
    if slices is None:
        x_BTD = F.pad(x_BTD, (0, 0, num_before, 0))
        return _convolve(x_BTD, weight_DW, None if documents is None else documents.positions_BT)
    pieces_BTD = _split_pieces(slices, x_BTD)
    ends_PBWD = _gather_pieces(slices, pieces_BTD[:, -num_before:])
    # Concatenated, since W - 1 tokens span several pieces if the pieces are shorter than that.
    ends_BTD = F.pad(ends_PBWD.transpose(0, 1).flatten(1, 2), (0, 0, num_before, 0))
    starts = [index * ends_PBWD.shape[2] for index in _piece_indices(slices)]
    before_BWD = torch.cat([ends_BTD[:, start : start + num_before] for start in starts])
    positions_BT = None if documents is None else _split_rows(slices, documents.positions_BT)
    return _join_pieces(slices, _convolve(torch.cat((before_BWD, pieces_BTD), 1), weight_DW, positions_BT))


def _convolve(x_BTD: torch.Tensor, weight_DW: torch.Tensor, positions_BT: torch.Tensor | None = None) -> torch.Tensor:
    """Return the convolution at all tokens except the first W - 1; within documents if `positions_BT` is given."""
    num_taps = weight_DW.shape[1]
    if positions_BT is None:
        out_BDT = F.conv1d(x_BTD.transpose(1, 2), weight_DW.unsqueeze(1), groups=x_BTD.shape[2])
        return out_BDT.transpose(1, 2)
    num_tokens = positions_BT.shape[1]
    out_BTD = x_BTD[:, num_taps - 1 :] * weight_DW[:, -1]
    for distance in range(1, num_taps):
        start = num_taps - 1 - distance
        is_inside_BT1 = (positions_BT >= distance).unsqueeze(-1)
        seen_BTD = torch.where(is_inside_BT1, x_BTD[:, start : start + num_tokens], 0)
        out_BTD = out_BTD + seen_BTD * weight_DW[:, start]
    return out_BTD


def gated_delta_rule(
    q_BTNH: torch.Tensor,
    k_BTNH: torch.Tensor,
    v_BTNE: torch.Tensor,
    decay_BTN: torch.Tensor,
    beta_BTN: torch.Tensor,
    documents: Documents | None = None,
) -> torch.Tensor:
    """Return the output of the gated delta rule within documents, (B, T, N, E).

    The state S (H, E) of a head starts at zero.  A token with key k, value v, log decay g and rate b first decays it to
    exp(g) S, then moves the value that k reads towards v: S + b k (v - k S).  The token's output is q S for its query
    q.  Computed in float32; the result has the dtype of `v_BTNE`.

    With a `Cache`, the tokens continue those of earlier calls.  With context parallelism, T is the length of a slice.
    Collectives: one all-gather of H x (H + E) numbers per head and piece, and one reduce-scatter in the backward pass.
    """
    inputs = [tensor.float() for tensor in (q_BTNH, k_BTNH, v_BTNE, decay_BTN, beta_BTN)]
    num_rows, _, num_heads, key_size = k_BTNH.shape
    zeros_BNHE = inputs[2].new_zeros(num_rows, num_heads, key_size, v_BTNE.shape[-1])
    if isinstance(documents, Cache):
        stored, is_padding_BT = documents.recall(), documents.is_padding(beta_BTN)
        if is_padding_BT is not None:  # with rate 0, padding does not change the state
            inputs[-1] = inputs[-1].masked_fill(is_padding_BT.unsqueeze(-1), 0)
        chunks = _prepare_chunks(*inputs, is_first_BT=None)
        out_BTNE, state_BNHE = _read_chunks(chunks, zeros_BNHE if stored is None else stored[0])
        documents.keep(state_BNHE)
    elif (slices := context_slices()) is None:
        is_first_BT = None if documents is None else documents.positions_BT == 0
        out_BTNE, _ = _read_chunks(_prepare_chunks(*inputs, is_first_BT=is_first_BT), zeros_BNHE)
    else:
        is_first_BT = None if documents is None else _split_rows(slices, documents.positions_BT == 0)
        chunks = _prepare_chunks(*(_split_pieces(slices, tensor) for tensor in inputs), is_first_BT=is_first_BT)
        map_BNHX = _total_map(chunks)
        maps_PBNHX = _gather_pieces(slices, map_BNHX)
        out_BTNE, _ = _read_chunks(chunks, _initial_states(slices, maps_PBNHX, zeros_BNHE))
        out_BTNE = _join_pieces(slices, out_BTNE[:, : slices.num_tokens // len(slices.pieces)])
    return out_BTNE[:, : v_BTNE.shape[1]].to(v_BTNE.dtype)


class _Chunks(NamedTuple):
    """The effect of each chunk as a function of S0, the state before it.

    The values written are `writes` - `seen` @ S0; the outputs are `reads` @ S0 + `attention` @ written, and the state
    after the chunk is `decay` * S0 + `keys`.T @ written.
    """

    reads: torch.Tensor
    """Queries, decayed from the start of the chunk, (B, N, C, S, H)."""
    seen: torch.Tensor
    """Keys that read from S0 the values to replace, (B, N, C, S, H)."""
    writes: torch.Tensor
    """Values to write if S0 is zero, (B, N, C, S, E)."""
    keys: torch.Tensor
    """Keys under which values are written, decayed to the end of the chunk, (B, N, C, S, H)."""
    attention: torch.Tensor
    """Weights of each query for the values written in its chunk, (B, N, C, S, S)."""
    decay: torch.Tensor
    """Decay of S0 over the chunk, (B, N, C)."""


def _prepare_chunks(
    q_BTNH: torch.Tensor,
    k_BTNH: torch.Tensor,
    v_BTNE: torch.Tensor,
    decay_BTN: torch.Tensor,
    beta_BTN: torch.Tensor,
    *,
    is_first_BT: torch.Tensor | None,
) -> _Chunks:
    """Compute everything that does not depend on the state.  is_first_BT: True for each document's first token."""
    num_tokens = q_BTNH.shape[1]
    size = min(_CHUNK_TOKENS, num_tokens)
    num_missing = -num_tokens % size  # padding with zeros does not change the state

    def chunk(tensor: torch.Tensor) -> torch.Tensor:
        """Return (B, N, C, S, ...) for (B, T, N, ...)."""
        padding = [0, 0] * (tensor.ndim - 2) + [0, num_missing]
        return F.pad(tensor, padding).transpose(1, 2).unflatten(2, (-1, size))

    q_BNCSH, k_BNCSH, v_BNCSE, decay_BNCS, beta_BNCS = map(chunk, (q_BTNH, k_BTNH, v_BTNE, decay_BTN, beta_BTN))
    is_before_SS = torch.ones(size, size, dtype=torch.bool, device=q_BTNH.device).tril()
    # The sum of decays after a token and up to another.  A difference of cumulative sums would contain the decays of
    # other documents, which cancel only up to rounding.
    sums_BNCSS = torch.where(is_before_SS.tril(-1), decay_BNCS.unsqueeze(-1), 0).cumsum(-2)
    same_document, from_start = is_before_SS, is_before_SS[-1]
    if is_first_BT is not None:
        documents_BCS = F.pad(is_first_BT, (0, num_missing)).unflatten(1, (-1, size)).cumsum(-1)[:, None]
        same_document = documents_BCS.unsqueeze(-1) == documents_BCS.unsqueeze(-2)
        from_start = documents_BCS == 0  # tokens of the document that the previous chunk ended in
    pairs_BNCSS = torch.where(is_before_SS & same_document, sums_BNCSS.exp(), 0)
    since_start_BNCS = torch.where(from_start, decay_BNCS.cumsum(-1).exp(), 0)
    rates_BNCSH = k_BNCSH * beta_BNCS.unsqueeze(-1)
    system_BNCSS = (rates_BNCSH @ k_BNCSH.mT) * pairs_BNCSS
    targets = torch.cat((v_BNCSE * beta_BNCS.unsqueeze(-1), rates_BNCSH * since_start_BNCS.unsqueeze(-1)), -1)
    solved = torch.linalg.solve_triangular(system_BNCSS, targets, upper=False, unitriangular=True)
    writes_BNCSE, seen_BNCSH = solved.split([v_BNCSE.shape[-1], k_BNCSH.shape[-1]], -1)
    return _Chunks(
        q_BNCSH * since_start_BNCS.unsqueeze(-1),
        seen_BNCSH,
        writes_BNCSE,
        k_BNCSH * pairs_BNCSS[..., -1, :].unsqueeze(-1),
        (q_BNCSH @ k_BNCSH.mT) * pairs_BNCSS,
        since_start_BNCS[..., -1],
    )


def _read_chunks(chunks: _Chunks, state_BNHE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output of each query, (B, T, N, E), and the final state, given the initial state."""
    states_BNCHE, last_BNHE = chunk_states(chunks.decay, chunks.keys, chunks.seen, chunks.writes, state_BNHE)
    new_BNCSE = chunks.writes - chunks.seen @ states_BNCHE
    out_BNCSE = chunks.reads @ states_BNCHE + chunks.attention @ new_BNCSE
    return out_BNCSE.flatten(2, 3).transpose(1, 2), last_BNHE


# ---------------------------------------------------------------------------------------------------------------
# Context parallelism


def _total_map(chunks: _Chunks) -> torch.Tensor:
    """Return how all chunks together change the state, (B, N, H, H + E): the result is [A, b] if S becomes A S + b.

    It is the final state if the initial state is [identity, 0] and writes apply only to the columns of b.
    """
    num_rows, num_heads, _, _, key_size = chunks.keys.shape
    identity_HH = torch.eye(key_size, device=chunks.keys.device)
    first_HX = F.pad(identity_HH, (0, chunks.writes.shape[-1]))
    first_BNHX = first_HX.expand(num_rows, num_heads, -1, -1)
    return last_state(chunks.decay, chunks.keys, chunks.seen, chunks.writes, first_BNHX)


def _initial_states(slices: Slices, maps_PBNHX: torch.Tensor, state_BNHE: torch.Tensor) -> torch.Tensor:
    """Return the initial state of each of this rank's pieces, concatenated along dimension 0."""
    key_size, states = state_BNHE.shape[-2], []
    for map_BNHX in maps_PBNHX.unbind():
        states.append(state_BNHE)
        state_BNHE = map_BNHX[..., :key_size] @ state_BNHE + map_BNHX[..., key_size:]
    # Index into a stack, so that all ranks, even one with the first piece, run the gather's backward collective.
    return torch.stack(states)[_piece_indices(slices)].flatten(0, 1)


def _piece_indices(slices: Slices) -> list[int]:
    """Return the indices of this rank's pieces among all pieces of a sequence."""
    return [start // (stop - start) for start, stop in slices.pieces]


def _split_pieces(slices: Slices, x_BtX: torch.Tensor) -> torch.Tensor:
    """Return the pieces of a slice as rows, piece by piece."""
    return torch.cat(x_BtX.chunk(len(slices.pieces), 1))


def _join_pieces(slices: Slices, x_BTX: torch.Tensor) -> torch.Tensor:
    """Undo `_split_pieces`."""
    return torch.cat(x_BTX.chunk(len(slices.pieces)), 1)


def _split_rows(slices: Slices, x_BT: torch.Tensor) -> torch.Tensor:
    """Return this rank's pieces of full rows, piece by piece."""
    return torch.cat([x_BT[:, start:stop] for start, stop in slices.pieces])


def _gather_pieces(slices: Slices, part_BX: torch.Tensor) -> torch.Tensor:
    """Gather the tensors of all pieces, (P, B, ...), in the order of the sequence; `part_BX` has this rank's pieces."""
    local_PBX = part_BX.unflatten(0, (len(slices.pieces), -1))
    gathered_CPBX = gather_parts(local_PBX, slices.count, slices.group)
    if len(slices.pieces) == 1:
        return gathered_CPBX.flatten(0, 1)
    heads, tails = gathered_CPBX.unbind(1)
    return torch.cat((heads, tails.flip(0)))
