"""The documents that share the rows of a batch, and what attention wants of them.

Shape suffixes: B batch, T time, K key and value heads, H head size.
"""

from __future__ import annotations

import itertools
from functools import cached_property

import torch
import torch.nn.functional as F

from trainer.sequence.slices import current_slices

_FEW_TOKENS = 8
"""Documents shorter than this on average make a loop over them slower than one pass with a mask.  Measured on a CPU:
0.04 ms a document, forward and backward, against 1.5 ms for a mask over 256 tokens and 14 ms over 512."""


class Documents:
    """The document of each token of a batch, and what attention wants of that: made once, used by every layer."""

    @classmethod
    def of(cls, documents_BT: torch.Tensor | Cache | None, borders: torch.Tensor | None = None) -> Documents | None:
        """Return those of a batch, or None for a batch without: its entries `documents` and, if it has them, `borders`.

        Tokens of a row that follow one another with the same number are one document.  A `Cache` is given as it is.
        Both entries are of whole rows, also where the model is called with slices of them.
        """
        if documents_BT is None or isinstance(documents_BT, Cache):
            return documents_BT
        found, slices = cls(documents_BT, borders), current_slices()
        if slices is not None and slices.method == "gather":
            found.pieces = [found.up_to(stop, stop - start) for start, stop in slices.pieces]
        return found

    def __init__(
        self, documents_BT: torch.Tensor, borders: torch.Tensor | None = None, num_queries: int | None = None
    ) -> None:
        self.num_queries = documents_BT.shape[1] if num_queries is None else num_queries
        """The last so many tokens of each row attend, to all: Q below."""
        self.pieces: list[Documents] = []
        """The documents up to the end of each piece of a slice, whose tokens attend."""
        begins_BT = _begins(documents_BT)
        self.numbers_BT = begins_BT.cumsum(1)
        """Each document's number in its row: no two have the same."""
        index_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
        self.positions_BT = index_T - torch.where(begins_BT, index_T, 0).cummax(1).values
        self.borders = find_borders(documents_BT) if borders is None else borders
        """See `find_borders`.  A batch that brings none has them found here: the host then waits for a GPU."""
        self._mask: torch.Tensor | None = None

    def up_to(self, stop: int, num_queries: int) -> Documents:
        """Return the documents before the token `stop` of each row, the last `num_queries` tokens of which attend.

        Those that begin later are still among the borders, without a token.
        """
        num_tokens = self.numbers_BT.shape[1]
        rows, places = self.borders // num_tokens, self.borders % num_tokens
        borders = (rows * stop + places.clamp(max=stop)).to(torch.int32)
        return Documents(self.numbers_BT[:, :stop], borders, num_queries)

    @property
    def query_borders(self) -> torch.Tensor:
        """The borders among the tokens that attend: see `find_borders`."""
        num_tokens = self.numbers_BT.shape[1]
        if self.num_queries == num_tokens:
            return self.borders
        rows, places = self.borders // num_tokens, self.borders % num_tokens
        places = (places - (num_tokens - self.num_queries)).clamp(min=0)
        return (rows * self.num_queries + places).to(torch.int32)

    @property
    def mask(self) -> torch.Tensor:
        """True where a token that attends (third dimension of four) may see another one (fourth): (B, 1, Q, T).

        Compiled code keeps none, but makes it on its way.
        """
        if torch.compiler.is_compiling():
            return self._make_mask()
        if self._mask is None:
            self._mask = self._make_mask()
        return self._mask

    def _make_mask(self) -> torch.Tensor:
        shape, device = (self.num_queries, self.numbers_BT.shape[1]), self.numbers_BT.device
        seen_QT = torch.ones(shape, dtype=torch.bool, device=device).tril(shape[1] - shape[0])
        own_BQ = self.numbers_BT[:, shape[1] - shape[0] :]
        return (own_BQ[:, None, :, None] == self.numbers_BT[:, None, None, :]) & seen_QT

    @cached_property
    def lengths(self) -> list[list[int]]:
        """The documents' lengths, row by row."""
        num_tokens, borders = self.numbers_BT.shape[1], self.borders.tolist()
        rows: list[list[int]] = [[] for _ in self.numbers_BT]
        for start, end in itertools.pairwise(borders):
            if start < end:
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


def find_borders(documents_BT: torch.Tensor) -> torch.Tensor:
    """Return where documents begin in the tokens of all rows, and where the last one ends (int32).

    The number of documents is its length, so that the host has to know them.
    """
    (starts,) = torch.nonzero(_begins(documents_BT).flatten(), as_tuple=True)
    return F.pad(starts, (0, 1), value=documents_BT.numel()).to(torch.int32)


def _begins(documents_BT: torch.Tensor) -> torch.Tensor:
    """Return True for the first token of each document."""
    return F.pad(documents_BT[:, 1:] != documents_BT[:, :-1], (1, 0), value=True)
