"""The place where tokens meet: attention, and the positions that they stand at.

A model that calls nothing else to mix or to count tokens keeps the documents of a batch to themselves, however they are
packed into its rows: `attend` lets a token see what comes before it in its own document, `positions` counts from 0 in
each.  Without documents a row is one.  Knows no model, no mesh and no configuration.

Shape suffixes: B batch, T time, N query heads, K key and value heads, H head size.
"""

from __future__ import annotations

import inspect
import itertools
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn

_FEW_TOKENS = 8
"""Documents shorter than this on average make a loop over them slower than one pass with a mask.  Measured on a CPU:
0.04 ms a document, forward and backward, against 1.5 ms for a mask over 256 tokens and 14 ms over 512."""


class Documents:
    """The document of each token of a batch, and what attention wants of that: made once, used by every layer."""

    @classmethod
    def of(cls, documents_BT: torch.Tensor | Cache | None, borders: torch.Tensor | None = None) -> Documents | None:
        """Return those of a batch, or None for a batch without: its entries `documents` and, if it has them, `borders`.

        Tokens of a row that follow one another with the same number are one document.  A `Cache` is given as it is.
        """
        if documents_BT is None or isinstance(documents_BT, Cache):
            return documents_BT
        return cls(documents_BT, borders)

    def __init__(self, documents_BT: torch.Tensor, borders: torch.Tensor | None = None) -> None:
        begins_BT = _begins(documents_BT)
        self.numbers_BT = begins_BT.cumsum(1)
        """Each document's number in its row: no two have the same."""
        index_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
        self.positions_BT = index_T - torch.where(begins_BT, index_T, 0).cummax(1).values
        self.borders = find_borders(documents_BT) if borders is None else borders
        """See `find_borders`.  A batch that brings none has them found here: the host then waits for a GPU."""
        self._mask: torch.Tensor | None = None

    @property
    def mask(self) -> torch.Tensor:
        """True where a token (third dimension of four) may see another one (fourth): (B, 1, T, T).

        Compiled code keeps none, but makes it on its way.
        """
        if torch.compiler.is_compiling():
            return self._make_mask()
        if self._mask is None:
            self._mask = self._make_mask()
        return self._mask

    def _make_mask(self) -> torch.Tensor:
        seen_TT = torch.ones(self.numbers_BT.shape[1:] * 2, dtype=torch.bool, device=self.numbers_BT.device).tril()
        return (self.numbers_BT[:, None, :, None] == self.numbers_BT[:, None, None, :]) & seen_TT

    @cached_property
    def lengths(self) -> list[list[int]]:
        """The documents' lengths, row by row."""
        num_tokens, borders = self.numbers_BT.shape[1], self.borders.tolist()
        rows: list[list[int]] = [[] for _ in self.numbers_BT]
        for start, end in itertools.pairwise(borders):
            rows[start // num_tokens].append(end - start)
        return rows

    @property
    def are_tiny(self) -> bool:
        """True if they are so short that a mask is faster than a loop."""
        return (len(self.borders) - 1) * _FEW_TOKENS > self.numbers_BT.numel()


class Cache(Documents):
    """A text that is still being written: the keys and values of its tokens so far, layer by layer.

    Given to a model in place of a batch's `documents`, it lets the tokens of a call follow those of the calls before:
    `model(tokens, documents=cache)`, and then `cache.advance(tokens.shape[1])`.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        """Tokens of the calls that are over."""
        self._layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._next = 0

    def advance(self, num_tokens: int) -> None:
        """Note that a call is over, in which the model has read so many tokens."""
        self.num_tokens += num_tokens
        self._next = 0

    def extend(self, k_BKTH: torch.Tensor, v_BKTH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of all tokens so far in the layer whose turn it is, these the last of them."""
        if self._next < len(self._layers):
            k_BKSH, v_BKSH = self._layers[self._next]
            k_BKTH, v_BKTH = torch.cat((k_BKSH, k_BKTH), 2), torch.cat((v_BKSH, v_BKTH), 2)
            self._layers[self._next] = (k_BKTH, v_BKTH)
        else:
            self._layers.append((k_BKTH, v_BKTH))
        self._next += 1
        return k_BKTH, v_BKTH


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
    """
    grouped = k_BKTH.shape[1] != q_BNTH.shape[1]
    if isinstance(documents, Cache):
        return _attend_further(q_BNTH, *documents.extend(k_BKTH, v_BKTH), grouped)
    if grouped and not _takes_groups(q_BNTH.device.type, q_BNTH.dtype):
        heads_a_group, grouped = q_BNTH.shape[1] // k_BKTH.shape[1], False
        k_BKTH, v_BKTH = (tensor.repeat_interleave(heads_a_group, 1) for tensor in (k_BKTH, v_BKTH))
    if documents is None:
        return F.scaled_dot_product_attention(
            q_BNTH, k_BKTH, v_BKTH, dropout_p=dropout, is_causal=True, enable_gqa=grouped
        )
    if q_BNTH.is_cuda and q_BNTH.dtype in (torch.bfloat16, torch.float16) and not dropout:
        return _attend_packed(q_BNTH, k_BKTH, v_BKTH, documents.borders)
    if not q_BNTH.is_cuda and not torch.compiler.is_compiling() and not documents.are_tiny:
        return _attend_in_turn(q_BNTH, k_BKTH, v_BKTH, documents.lengths, dropout)
    mask = documents.mask
    return F.scaled_dot_product_attention(q_BNTH, k_BKTH, v_BKTH, attn_mask=mask, dropout_p=dropout, enable_gqa=grouped)


def _takes_groups(device_type: str, dtype: torch.dtype) -> bool:
    """Return whether a kernel that never holds all scores takes heads that share keys: on a GPU in fp32 none does."""
    return device_type != "cuda" or dtype in (torch.bfloat16, torch.float16)


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
    if documents is not None:
        return documents.positions_BT
    return torch.arange(tokens_BT.shape[1], device=tokens_BT.device)


def find_borders(documents_BT: torch.Tensor) -> torch.Tensor:
    """Return where documents begin in the tokens of all rows, and where the last one ends (int32).

    The number of documents is its length, so that the host has to know them.
    """
    (starts,) = torch.nonzero(_begins(documents_BT).flatten(), as_tuple=True)
    return F.pad(starts, (0, 1), value=documents_BT.numel()).to(torch.int32)


def _begins(documents_BT: torch.Tensor) -> torch.Tensor:
    """Return True for the first token of each document."""
    return F.pad(documents_BT[:, 1:] != documents_BT[:, :-1], (1, 0), value=True)


def _attend_further(q_BNTH: torch.Tensor, k_BKSH: torch.Tensor, v_BKSH: torch.Tensor, grouped: bool) -> torch.Tensor:
    """Attend from the last T of S tokens."""
    num_new, num_all = q_BNTH.shape[2], k_BKSH.shape[2]
    mask = None
    if 1 < num_new < num_all:
        mask = torch.ones(num_new, num_all, dtype=torch.bool, device=q_BNTH.device).tril(num_all - num_new)
    is_causal = num_new == num_all
    return F.scaled_dot_product_attention(q_BNTH, k_BKSH, v_BKSH, mask, is_causal=is_causal, enable_gqa=grouped)


def _attend_in_turn(
    q_BNTH: torch.Tensor, k_BKTH: torch.Tensor, v_BKTH: torch.Tensor, lengths: list[list[int]], dropout: float
) -> torch.Tensor:
    rows = []
    for number, of_row in enumerate(lengths):
        parts = (tensor[number : number + 1].split(of_row, 2) for tensor in (q_BNTH, k_BKTH, v_BKTH))
        found = [attend(q_1NLH, k_1KLH, v_1KLH, None, dropout) for q_1NLH, k_1KLH, v_1KLH in zip(*parts, strict=True)]
        rows.append(torch.cat(found, 2))
    return torch.cat(rows)


_TAKES = inspect.signature(varlen_attn).parameters
_CAUSAL: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in _TAKES else {"is_causal": True}
_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in _TAKES else {}
"""How this version of torch is told of a causal mask, and of heads that share keys; some take those unasked."""


def _attend_packed(
    q_BNTH: torch.Tensor, k_BKTH: torch.Tensor, v_BKTH: torch.Tensor, borders: torch.Tensor
) -> torch.Tensor:
    """Lay all rows end to end.  No document is longer than a row, which is all that the kernel is told of that."""
    num_rows, _, num_tokens, _ = q_BNTH.shape
    q_MNH, k_MKH, v_MKH = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (q_BNTH, k_BKTH, v_BKTH))
    found_MNH: Any = varlen_attn(q_MNH, k_MKH, v_MKH, borders, borders, num_tokens, num_tokens, **_CAUSAL, **_GROUPED)
    found_BTNH: torch.Tensor = found_MNH.unflatten(0, (num_rows, num_tokens))
    return found_BTNH.transpose(1, 2)
