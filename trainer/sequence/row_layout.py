"""The layout of a batch's rows: slices for context and tensor parallelism, packed documents, and the generation cache.

Also lets a caller declare that it needs only the logits of each row's last token (`last_logits_only`).

Shape suffixes: B batch, T time, S tokens so far, Q queries, N query heads (in `DocumentRows`, documents), L tokens in
the longest document, K key and value heads, H head size, D width, M tokens in all rows, R rows to keep.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cached_property

import torch
import torch.nn.functional as F

from trainer.config.parallel import Slices, find_slices
from trainer.config.schema import RunConfig
from trainer.distributed.exchange import gather_parts, sum_parts
from trainer.distributed.world import World

# ---------------------------------------------------------------------------------------------------------------
# Sequence slices: the tokens that a rank holds under context and tensor parallelism

_current_slices: Slices | None = None
"""The slices that models are called with; None if they are called with full sequences.

A global rather than a context variable, since autograd recomputes activations in its own threads."""


def current_slices() -> Slices | None:
    """Return the current slices; None if models are called with full sequences."""
    return _current_slices


def context_slices() -> Slices | None:
    """Return the current slices if context parallelism splits the sequences that attention layers see; else None."""
    return None if _current_slices is None or _current_slices.count == 1 else _current_slices


def tensor_slices() -> Slices | None:
    """Return the current slices if a tensor-parallel group shares them; else None."""
    return None if _current_slices is None or _current_slices.tensor_count == 1 else _current_slices


def enable_slices(config: RunConfig, world: World, tensor_group: str = "") -> None:
    """From now on, treat model inputs as slices of sequences if `mesh.context` or `mesh.tensor` is above 1.

    With context parallelism, also create the process group of the ranks with slices of the same sequences; this is a
    collective operation.

    tensor_group: the name of the tensor-parallel process group, if there is one.
    """
    global _current_slices
    slices = find_slices(config, world.rank)
    if slices is not None and slices.count > 1:
        slices = replace(slices, group=world.create_context_group(slices.count, slices.tensor_count))
    _current_slices = None if slices is None else replace(slices, tensor_group=tensor_group)


def disable_slices() -> None:
    """Undo `enable_slices`: from now on, model inputs are full sequences."""
    global _current_slices
    _current_slices = None


@contextmanager
def use_slices(slices: Slices | None) -> Iterator[None]:
    """Set the current slices inside the block; None for full sequences."""
    global _current_slices
    previous, _current_slices = _current_slices, slices
    try:
        yield
    finally:
        _current_slices = previous


def full_sequences() -> AbstractContextManager[None]:
    """Treat model inputs inside the block as full sequences, even if training uses slices.

    A backward pass belongs inside the block too, since what it recomputes must see full sequences as well.
    """
    return use_slices(None)


def gather_tokens(part: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the tokens of all ranks of the tensor-parallel group, in order, along the dimension `dim`.

    One all-gather; in the backward pass, one reduce-scatter.  Without tensor parallelism, returns `part` itself.
    """
    slices = tensor_slices()
    if slices is None:
        return part
    return torch.cat(gather_parts(part, slices.tensor_count, slices.tensor_group).unbind(), dim)


def sum_tokens(partial: torch.Tensor, dim: int) -> torch.Tensor:
    """Sum a tensor over the tensor-parallel group, and return this rank's tokens, along the dimension `dim`.

    One reduce-scatter; in the backward pass, one all-gather.  Without tensor parallelism, returns `partial` itself.
    """
    slices = tensor_slices()
    if slices is None:
        return partial
    return sum_parts(torch.stack(partial.chunk(slices.tensor_count, dim)), slices.tensor_group)


def own_tokens(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Return this rank's tokens of a tensor with all tokens of the tensor-parallel group along the dimension `dim`.

    Without tensor parallelism, returns `tensor` itself.
    """
    slices = tensor_slices()
    return tensor if slices is None else tensor.chunk(slices.tensor_count, dim)[slices.tensor_number]


def own_rows(tensor: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return this rank's `num_rows` rows of a tensor that has some for each rank of the tensor-parallel group.

    If it has only `num_rows` rows, returns `tensor` itself.
    """
    slices = tensor_slices()
    if slices is None or tensor.shape[0] == num_rows:
        return tensor
    return tensor[slices.tensor_number * num_rows : (slices.tensor_number + 1) * num_rows]


def sum_over_slices(part: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor over the ranks that share its sequences.

    At most two all-gathers; in the backward pass, as many reduce-scatters.
    """
    slices = current_slices()
    total = part
    if slices is not None and slices.count > 1:
        total = gather_parts(total, slices.count, slices.group).sum(0)
    if slices is not None and slices.tensor_count > 1:
        total = gather_parts(total, slices.tensor_count, slices.tensor_group).sum(0)
    return total


# ---------------------------------------------------------------------------------------------------------------
# Logits

_needs_last_logits_only = False


@contextmanager
def last_logits_only() -> Iterator[None]:
    """Declare that only the logits of each row's last token are needed inside the block, as after a prompt.

    A model may return the other logits too.  A head that calls `needed_for_logits` does not compute them.
    """
    global _needs_last_logits_only
    previous, _needs_last_logits_only = _needs_last_logits_only, True
    try:
        yield
    finally:
        _needs_last_logits_only = previous


def needed_for_logits(x_BTD: torch.Tensor) -> torch.Tensor:
    """Return the hidden states of the tokens whose logits are needed: (B, T, D), or (B, 1, D) in `last_logits_only`."""
    return x_BTD[:, -1:] if _needs_last_logits_only else x_BTD


# ---------------------------------------------------------------------------------------------------------------
# Documents

_MIN_MEAN_LENGTH = 8
"""If documents are shorter than this on average, a loop over them is slower than one pass with a mask.

Measured on a CPU: 0.04 ms per document, forward and backward, against 1.5 ms for a mask over 256 tokens and 14 ms over
512.
"""


class Documents:
    """The documents packed into a batch, in the forms that layers need; created once and used by all layers."""

    @classmethod
    def of(cls, documents_BT: torch.Tensor | Cache | None, cu_seqlens: torch.Tensor | None = None) -> Documents | None:
        """Return the documents of a batch, given its entries `documents` and `cu_seqlens`; None without `documents`.

        Consecutive tokens of a row with the same number form one document.  A `Cache` is returned unchanged.  Both
        entries describe full rows, even if the model is called with slices of them.
        """
        if documents_BT is None or isinstance(documents_BT, Cache):
            return documents_BT
        documents, slices = cls(documents_BT, cu_seqlens), context_slices()
        if slices is not None and slices.method == "gather":
            documents.pieces = [documents.up_to(stop, stop - start) for start, stop in slices.pieces]
        return documents

    def __init__(
        self, documents_BT: torch.Tensor, cu_seqlens: torch.Tensor | None = None, num_queries: int | None = None
    ) -> None:
        self.num_queries = documents_BT.shape[1] if num_queries is None else num_queries
        """Q, the number of tokens at the end of each row that are queries; all tokens are keys."""
        self.pieces: list[Documents] = []
        """For each piece of a slice, the documents up to its end, with the piece's tokens as queries."""
        is_first_BT = _is_first_token(documents_BT)
        self.numbers_BT = is_first_BT.cumsum(1)
        """Each token's document number, unique within its row."""
        index_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
        self.positions_BT = index_T - torch.where(is_first_BT, index_T, 0).cummax(1).values
        self.cu_seqlens = compute_cu_seqlens(documents_BT) if cu_seqlens is None else cu_seqlens
        """See `compute_cu_seqlens`.  Computed here, with a host sync on a GPU, unless the batch has this entry."""
        self._mask: torch.Tensor | None = None

    def up_to(self, stop: int, num_queries: int) -> Documents:
        """Return the documents before token `stop` of each row, with the last `num_queries` of these tokens as queries.

        Documents that start later remain in `cu_seqlens`, with a length of zero.
        """
        num_tokens = self.numbers_BT.shape[1]
        rows, offsets = self.cu_seqlens // num_tokens, self.cu_seqlens % num_tokens
        cu_seqlens = (rows * stop + offsets.clamp(max=stop)).to(torch.int32)
        return Documents(self.numbers_BT[:, :stop], cu_seqlens, num_queries)

    @property
    def query_cu_seqlens(self) -> torch.Tensor:
        """The cumulative sequence lengths of the queries alone; see `compute_cu_seqlens`."""
        num_tokens = self.numbers_BT.shape[1]
        if self.num_queries == num_tokens:
            return self.cu_seqlens
        rows, offsets = self.cu_seqlens // num_tokens, self.cu_seqlens % num_tokens
        offsets = (offsets - (num_tokens - self.num_queries)).clamp(min=0)
        return (rows * self.num_queries + offsets).to(torch.int32)

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
        num_tokens, cu_seqlens = self.numbers_BT.shape[1], self.cu_seqlens.tolist()
        rows: list[list[int]] = [[] for _ in self.numbers_BT]
        for start, end in itertools.pairwise(cu_seqlens):
            if start < end:
                rows[start // num_tokens].append(end - start)
        return rows

    @cached_property
    def length_groups(self) -> tuple[list[DocumentRows], torch.Tensor]:
        """The documents as separate rows, padded to less than twice their length, in groups of similar length; and the
        index (M,) of each token of the batch among the tokens of all groups.
        """
        by_size: dict[int, list[tuple[int, int]]] = {}
        for start, end in itertools.pairwise(self.cu_seqlens.tolist()):
            if start < end:
                by_size.setdefault((end - start).bit_length(), []).append((start, end - start))
        groups = [DocumentRows(spans, self.cu_seqlens.device) for spans in by_size.values()]
        source_index_M = torch.cat([group.source_index_NL.flatten()[group.tokens_M] for group in groups])
        return groups, source_index_M.argsort()

    @property
    def are_tiny(self) -> bool:
        """True if documents are so short that a mask is faster than a loop."""
        return (len(self.cu_seqlens) - 1) * _MIN_MEAN_LENGTH > self.numbers_BT.numel()


class DocumentRows:
    """Indices for copying documents of similar length from the concatenated rows of a batch to separate rows (N, L)."""

    def __init__(self, spans: list[tuple[int, int]], device: torch.device) -> None:
        """spans: the start and the length of each document."""
        starts_N, lengths_N = torch.tensor(spans).unbind(1)
        offsets_L = torch.arange(int(lengths_N.max()))
        is_token_NL = offsets_L < lengths_N[:, None]
        source_index_NL = torch.where(is_token_NL, starts_N[:, None] + offsets_L, 0)
        self.source_index_NL = source_index_NL.to(device)
        """Index of each token of the new rows in the concatenated rows; 0 for padding, which follows the documents."""
        self.is_padding_NL = ~is_token_NL.to(device)
        self.tokens_M = is_token_NL.flatten().nonzero().squeeze(1).to(device)
        """Indices of the tokens, without padding, in the concatenated new rows."""


class Cache(Documents):
    """A cache for generation: each layer's keys and values of all tokens so far, or its state after them.

    Passed to a model instead of a batch's `documents`, it makes a call's tokens follow those of earlier calls:
    `model(tokens, documents=cache)`, followed by `cache.advance(tokens.shape[1])`.

    Sequences of different lengths are padded on the left, with any tokens.  No other token attends to the padding, and
    positions count from the first token after it.  Positions are limited to `max_tokens` - 1, since a finished sequence
    is fed more tokens until the whole batch has finished.

    A layer's memory is allocated for twice its current number of tokens, but at most for `max_tokens` and the padding,
    and doubled when full.  New keys and values are written in place; earlier ones are copied only when memory grows.
    """

    def __init__(self, padding: Sequence[int] = (), max_tokens: int = 0) -> None:
        """padding: the number of padding tokens of each row.
        max_tokens: the length of the longest sequence, without padding; 0 if unknown.
        """
        self.num_tokens = 0
        """Number of tokens in finished calls, including padding."""
        self._padding = torch.tensor(padding) if any(padding) else None
        self._max_position = max_tokens - 1 if max_tokens else torch.iinfo(torch.int64).max
        self._max_tokens = max_tokens + max(padding, default=0)
        self._layers: list[tuple[torch.Tensor, ...]] = []
        self._next_layer = 0
        self._masks: dict[int | None, torch.Tensor] = {}
        """Masks of the current call, by window."""

    def advance(self, num_tokens: int) -> None:
        """Record that a call with this many tokens has finished."""
        self.num_tokens += num_tokens
        self._next_layer = 0
        self._masks = {}

    def recall(self) -> tuple[torch.Tensor, ...] | None:
        """Return the state that the next layer kept in the previous call; None in the first call."""
        return self._layers[self._next_layer] if self._next_layer < len(self._layers) else None

    def keep(self, *state: torch.Tensor) -> None:
        """Store the next layer's state for the next call, and advance to the layer after it."""
        self._layers[self._next_layer : self._next_layer + 1] = [state]
        self._next_layer += 1

    def extend(self, k_BKTH: torch.Tensor, v_BKTH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values to those of the next layer; return views of all that the layer has so far."""
        stop, stored = self.num_tokens + k_BKTH.shape[2], self.recall()
        if stored is None or stop > stored[0].shape[2]:
            memory = (self._allocate(k_BKTH, stop), self._allocate(v_BKTH, stop))
            for new, old in zip(memory, stored or (), strict=False):
                new[:, :, : self.num_tokens] = old[:, :, : self.num_tokens]
            stored = memory
        keys, values = stored
        keys[:, :, self.num_tokens : stop] = k_BKTH
        values[:, :, self.num_tokens : stop] = v_BKTH
        self.keep(keys, values)
        return keys[:, :, :stop], values[:, :, :stop]

    def _allocate(self, like_BKTH: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Return memory for keys or values of at least `num_tokens` tokens."""
        capacity = max(2 * num_tokens, _MIN_CACHED_TOKENS)
        if self._max_tokens >= num_tokens:
            capacity = min(capacity, self._max_tokens)
        return like_BKTH.new_empty(*like_BKTH.shape[:2], capacity, like_BKTH.shape[3])

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Drop all rows except `rows`.  Copies the cache of the rows that remain."""
        index_R = torch.tensor(rows)
        if self._padding is not None:
            self._padding = self._padding[index_R.to(self._padding.device)]
        self._layers = [
            tuple(kept.index_select(0, index_R.to(kept.device)) for kept in state) for state in self._layers
        ]

    def positions_of(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Return the positions of a call's tokens: (T,), or (B, T) with padding.  Padding has position 0."""
        index_T = torch.arange(self.num_tokens, self.num_tokens + tokens_BT.shape[1], device=tokens_BT.device)
        if self._padding is None:
            return index_T.clamp(max=self._max_position)
        return (index_T - self._padding.to(tokens_BT.device).unsqueeze(1)).clamp(min=0, max=self._max_position)

    def is_padding(self, x_BTD: torch.Tensor) -> torch.Tensor | None:
        """Return which of a call's tokens are padding, (B, T); None if no row has padding."""
        if self._padding is None:
            return None
        index_T = torch.arange(self.num_tokens, self.num_tokens + x_BTD.shape[1], device=x_BTD.device)
        return index_T < self._padding.to(x_BTD.device).unsqueeze(1)

    def mask_of(self, q_BNTH: torch.Tensor, window: int | None = None) -> torch.Tensor | None:
        """Return the mask of a call's queries, (B, 1, T, S) for S tokens so far; None if no row has padding.

        It is 0 where a query may attend to a key (one of the last `window`) and -inf elsewhere; all layers share it.
        Padding attends to itself, since a query that attends to nothing has no finite output.
        """
        if self._padding is None or window in self._masks:
            return self._masks.get(window)
        self._padding = self._padding.to(q_BNTH.device)
        keys_S = torch.arange(self.num_tokens + q_BNTH.shape[2], device=q_BNTH.device)
        distances_TS = keys_S[self.num_tokens :].unsqueeze(1) - keys_S
        is_near_TS = (distances_TS >= 0) & (distances_TS < (window or len(keys_S)))
        is_text_B1S = (keys_S >= self._padding.unsqueeze(1)).unsqueeze(1)
        is_seen_BTS = (is_text_B1S & is_near_TS) | (distances_TS == 0)
        mask_BTS = q_BNTH.new_zeros(is_seen_BTS.shape).masked_fill_(~is_seen_BTS, -torch.inf)
        self._masks[window] = mask_BTS.unsqueeze(1)
        return self._masks[window]


_MIN_CACHED_TOKENS = 64
"""A KV cache allocates memory for at least this many tokens, unless `max_tokens` is lower."""


def compute_cu_seqlens(documents_BT: torch.Tensor) -> torch.Tensor:
    """Return the cumulative lengths of the documents, as in FlashAttention (int32).

    These are the start of each document in the concatenated rows, followed by the end of the last document.  The size
    of the result depends on the data, so this needs a host sync.
    """
    (starts,) = torch.nonzero(_is_first_token(documents_BT).flatten(), as_tuple=True)
    return F.pad(starts, (0, 1), value=documents_BT.numel()).to(torch.int32)


def _is_first_token(documents_BT: torch.Tensor) -> torch.Tensor:
    """Return a mask that is True for the first token of each document."""
    return F.pad(documents_BT[:, 1:] != documents_BT[:, :-1], (1, 0), value=True)
