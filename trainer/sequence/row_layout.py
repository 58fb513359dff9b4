"""The layout of a batch's rows, in the forms that attention needs: slices of sequences under context parallelism, and
packed documents.

Shape suffixes: B batch, T time, Q queries, K key and value heads, H head size.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cached_property

import torch
import torch.nn.functional as F

from trainer.config import RunConfig, Slices, find_slices
from trainer.distributed.world import World

# ---------------------------------------------------------------------------------------------------------------
# Slices of sequences, with which this process calls its models under context parallelism

_current: Slices | None = None
"""Not a context variable, since autograd recomputes activations in its own threads."""


def current_slices() -> Slices | None:
    """Return the current slices; None if models are called with full sequences."""
    return _current


def slice_sequences(config: RunConfig, world: World) -> None:
    """Call the models of this process with slices of sequences from now on, if `mesh.context` is above 1.

    Opens the process group of the ranks that share sequences.  Called by all ranks.
    """
    global _current
    _current = find_slices(config, world.rank)
    if _current is not None:
        _current = replace(_current, group=world.open_context(_current.count))


def forget_slices() -> None:
    """Call the models of this process with full sequences again."""
    global _current
    _current = None


@contextmanager
def use_slices(slices: Slices | None) -> Iterator[None]:
    """Set the current slices inside the block; None for full sequences."""
    global _current
    previous, _current = _current, slices
    try:
        yield
    finally:
        _current = previous


def full_sequences() -> AbstractContextManager[None]:
    """Call models with full sequences inside the block, even if training uses slices."""
    return use_slices(None)


# ---------------------------------------------------------------------------------------------------------------
# Documents

_MIN_MEAN_LENGTH = 8
"""If documents are shorter than this on average, a loop over them is slower than one pass with a mask.

Measured on a CPU: 0.04 ms per document, forward and backward, against 1.5 ms for a mask over 256 tokens and 14 ms over
512.
"""


class Documents:
    """The document of each token of a batch, in the forms that attention needs; created once and used by all layers."""

    @classmethod
    def of(cls, documents_BT: torch.Tensor | Cache | None, borders: torch.Tensor | None = None) -> Documents | None:
        """Return the documents of a batch from its entries `documents` and, if present, `borders`; None without
        documents.

        Consecutive tokens of a row with the same number form one document.  A `Cache` is returned unchanged.  Both
        entries describe full rows, even if the model is called with slices of them.
        """
        if documents_BT is None or isinstance(documents_BT, Cache):
            return documents_BT
        documents, slices = cls(documents_BT, borders), current_slices()
        if slices is not None and slices.method == "gather":
            documents.pieces = [documents.up_to(stop, stop - start) for start, stop in slices.pieces]
        return documents

    def __init__(
        self, documents_BT: torch.Tensor, borders: torch.Tensor | None = None, num_queries: int | None = None
    ) -> None:
        self.num_queries = documents_BT.shape[1] if num_queries is None else num_queries
        """Number of tokens at the end of each row that are queries; all tokens are keys.  Q below."""
        self.pieces: list[Documents] = []
        """For each piece of a slice, the documents up to its end, with the piece's tokens as queries."""
        begins_BT = _is_first_token(documents_BT)
        self.numbers_BT = begins_BT.cumsum(1)
        """Each token's document number, unique within its row."""
        index_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
        self.positions_BT = index_T - torch.where(begins_BT, index_T, 0).cummax(1).values
        self.borders = find_borders(documents_BT) if borders is None else borders
        """See `find_borders`.  For a batch without `borders` they are computed here, with a host sync on a GPU."""
        self._mask: torch.Tensor | None = None

    def up_to(self, stop: int, num_queries: int) -> Documents:
        """Return the documents before token `stop` of each row, with the last `num_queries` of these tokens as queries.

        Documents that begin later still have borders, with zero tokens.
        """
        num_tokens = self.numbers_BT.shape[1]
        rows, places = self.borders // num_tokens, self.borders % num_tokens
        borders = (rows * stop + places.clamp(max=stop)).to(torch.int32)
        return Documents(self.numbers_BT[:, :stop], borders, num_queries)

    @property
    def query_borders(self) -> torch.Tensor:
        """The borders among the queries; see `find_borders`."""
        num_tokens = self.numbers_BT.shape[1]
        if self.num_queries == num_tokens:
            return self.borders
        rows, places = self.borders // num_tokens, self.borders % num_tokens
        places = (places - (num_tokens - self.num_queries)).clamp(min=0)
        return (rows * self.num_queries + places).to(torch.int32)

    @property
    def mask(self) -> torch.Tensor:
        """Boolean mask (B, 1, Q, T): True if the query (third dimension) may attend to the key (fourth).

        Cached, except in compiled code, which recomputes it.
        """
        if torch.compiler.is_compiling():
            return self._make_mask()
        if self._mask is None:
            self._mask = self._make_mask()
        return self._mask

    def _make_mask(self) -> torch.Tensor:
        shape, device = (self.num_queries, self.numbers_BT.shape[1]), self.numbers_BT.device
        causal_QT = torch.ones(shape, dtype=torch.bool, device=device).tril(shape[1] - shape[0])
        queries_BQ = self.numbers_BT[:, shape[1] - shape[0] :]
        return (queries_BQ[:, None, :, None] == self.numbers_BT[:, None, None, :]) & causal_QT

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
        """True if documents are so short that a mask is faster than a loop."""
        return (len(self.borders) - 1) * _MIN_MEAN_LENGTH > self.numbers_BT.numel()


class Cache(Documents):
    """A KV cache for generation: the keys and values of the texts so far, layer by layer.

    Passed to a model instead of a batch's `documents`, it makes the tokens of a call continue those of earlier calls:
    `model(tokens, documents=cache)`, followed by `cache.advance(tokens.shape[1])`.

    Texts of different lengths are padded on the left, with any tokens.  Nothing attends to the padding, and positions
    count from the first token after it.  They stay below `max_tokens`, since a text that has ended is fed more tokens
    as long as others of its batch go on.

    A layer's memory is allocated for twice the tokens that it holds, or for as many as it can ever hold if that is
    less, and doubled when it is full.  New keys and values are written in place: a call copies none of the earlier
    ones, unless the memory has to grow.
    """

    def __init__(self, padding: Sequence[int] = (), max_tokens: int = 0) -> None:
        """`padding`: padding tokens of each text.  `max_tokens`: number of tokens of the longest text; 0 if unknown."""
        self.num_tokens = 0
        """Number of tokens in finished calls, with the padding."""
        self._padding = torch.tensor(padding) if any(padding) else None
        self._max_position = max_tokens - 1 if max_tokens else torch.iinfo(torch.int64).max
        self._max_tokens = max_tokens + max(padding, default=0)
        self._layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._next = 0
        self._mask_of_call: torch.Tensor | None = None

    def advance(self, num_tokens: int) -> None:
        """Record that a call with this many tokens has finished."""
        self.num_tokens += num_tokens
        self._next = 0
        self._mask_of_call = None

    def extend(self, k_BKTH: torch.Tensor, v_BKTH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values to the next layer's, and return those of all tokens so far: views."""
        stop = self.num_tokens + k_BKTH.shape[2]
        if self._next == len(self._layers):
            self._layers.append((self._allocate(k_BKTH, stop), self._allocate(v_BKTH, stop)))
        elif stop > self._layers[self._next][0].shape[2]:
            larger = [self._allocate(buffer, stop) for buffer in self._layers[self._next]]
            for buffer, full in zip(larger, self._layers[self._next], strict=True):
                buffer[:, :, : self.num_tokens] = full[:, :, : self.num_tokens]
            self._layers[self._next] = (larger[0], larger[1])
        keys, values = self._layers[self._next]
        keys[:, :, self.num_tokens : stop] = k_BKTH
        values[:, :, self.num_tokens : stop] = v_BKTH
        self._next += 1
        return keys[:, :, :stop], values[:, :, :stop]

    def _allocate(self, like_BKTH: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Return memory for keys or values of at least `num_tokens` tokens."""
        capacity = max(2 * num_tokens, _MIN_CACHED_TOKENS)
        if self._max_tokens >= num_tokens:
            capacity = min(capacity, self._max_tokens)
        return like_BKTH.new_empty(*like_BKTH.shape[:2], capacity, like_BKTH.shape[3])

    def keep(self, rows: Sequence[int]) -> None:
        """Drop the texts of all other rows.  Copies what the cache holds."""
        index_R = torch.tensor(rows)
        if self._padding is not None:
            self._padding = self._padding[index_R.to(self._padding.device)]
        for number, (keys, values) in enumerate(self._layers):
            kept = index_R.to(keys.device)
            self._layers[number] = (keys.index_select(0, kept), values.index_select(0, kept))

    def positions_of(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Return the positions of a call's tokens: (T,), or (B, T) with padding, whose own positions are 0."""
        index_T = torch.arange(self.num_tokens, self.num_tokens + tokens_BT.shape[1], device=tokens_BT.device)
        if self._padding is None:
            return index_T.clamp(max=self._max_position)
        return (index_T - self._padding.to(tokens_BT.device).unsqueeze(1)).clamp(min=0, max=self._max_position)

    def mask_of(self, q_BNTH: torch.Tensor) -> torch.Tensor | None:
        """Return the mask of a call's queries, (B, 1, T, S) for S tokens so far; None without padding.

        All layers share it: 0 where a query may attend to a key, else -inf.  Padding attends to itself, since a query
        that attends to nothing has no finite output.
        """
        if self._padding is None or self._mask_of_call is not None:
            return self._mask_of_call
        keys_S = torch.arange(self.num_tokens + q_BNTH.shape[2], device=q_BNTH.device)
        queries_T1 = keys_S[self.num_tokens :].unsqueeze(1)
        self._padding = self._padding.to(q_BNTH.device)
        is_text_B1S = (keys_S >= self._padding.unsqueeze(1)).unsqueeze(1)
        is_seen_BTS = (is_text_B1S & (keys_S <= queries_T1)) | (keys_S == queries_T1)
        mask_BTS = q_BNTH.new_zeros(is_seen_BTS.shape).masked_fill_(~is_seen_BTS, -torch.inf)
        self._mask_of_call = mask_BTS.unsqueeze(1)
        return self._mask_of_call


_MIN_CACHED_TOKENS = 64
"""Smallest number of tokens for which a KV cache allocates memory, unless its `max_tokens` is lower."""


def find_borders(documents_BT: torch.Tensor) -> torch.Tensor:
    """Return the start of each document in the concatenated rows, and the end of the last one (int32).

    The length depends on the number of documents, so this needs a host sync.
    """
    (starts,) = torch.nonzero(_is_first_token(documents_BT).flatten(), as_tuple=True)
    return F.pad(starts, (0, 1), value=documents_BT.numel()).to(torch.int32)


def _is_first_token(documents_BT: torch.Tensor) -> torch.Tensor:
    """Return a mask that is True for the first token of each document."""
    return F.pad(documents_BT[:, 1:] != documents_BT[:, :-1], (1, 0), value=True)
