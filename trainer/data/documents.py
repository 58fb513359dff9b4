"""Sources over token shards that respect document boundaries: masked, one document per row, or packed rows.

Document boundaries come from the shards' index, never from the tokens: text may contain the end-of-document token.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from trainer.data.row_layout import DocumentIndex, load_row_layout
from trainer.data.shards import Shard
from trainer.data.source import IGNORE, Samples, Source, TokenSource, sample_content

if TYPE_CHECKING:
    from trainer.config import DataSection

_NUM_SAMPLED_WINDOWS = 64
"""Number of windows from which the mean attention length is estimated."""


def open_shards(shards: Sequence[Shard], data: DataSection, content: str = "") -> TokenSource:
    """Return the source over `shards` that `data.documents` and `data.fit` select.

    content: the shards' `sample_content`, or "" if it is not known yet.  Raises ShardError, UserError.
    """
    source = _open_arranged(shards, data, content)
    source.known_content = content
    return source


def _open_arranged(shards: Sequence[Shard], data: DataSection, content: str) -> TokenSource:
    if data.arrangement == "apart":
        return PackedSource(shards, data, content, packs=False)
    if data.fit == "best":
        return PackedSource(shards, data, content, packs=True)
    return MaskedSource(shards, data.seq_len) if data.arrangement == "masked" else TokenSource(shards, data.seq_len)


def _document_entries(is_start: NDArray[np.bool_]) -> dict[str, NDArray[Any]]:
    """Return the batch entries `documents` and `positions`, both (B, T).

    is_start: True wherever a document starts that is not the first of its row, (B, T).
    """
    index = np.arange(is_start.shape[1])
    starts = np.maximum.accumulate(np.where(is_start, index, 0), axis=1)
    return {"documents": is_start.cumsum(1, dtype=np.int32), "positions": (index - starts).astype(np.int32)}


class MaskedSource(TokenSource):
    """Windows as in `TokenSource`, with each token's document number in its row and position in that document.

    A document that is split between two windows counts as two.  The last token of a document has no target.
    """

    def __init__(self, shards: Sequence[Shard], seq_len: int) -> None:
        super().__init__(shards, seq_len)
        self._index = DocumentIndex(shards)

    def __len__(self) -> int:
        return -(-(self._shard_starts[-1] - 1) // self.seq_len)

    def _count_targets(self) -> int:
        return self._shard_starts[-1] - sum(shard.info.num_documents for shard in self.shards)

    def batch(self, indices: NDArray[np.int64]) -> Samples:
        """Return the samples at `indices`, with `documents` and `positions` (int32); see `Source.batch`."""
        tokens, targets = self._windows(indices)
        is_start = np.zeros((len(indices), self.seq_len + 1), bool)
        for row, index in enumerate(np.asarray(indices).tolist()):
            for start, count in self._pieces_of(index):
                is_start[row, self._index.between(start + 1, start + count + 1) - start] = True
        targets[is_start[:, 1:]] = IGNORE
        return {"tokens": tokens, "targets": targets, **_document_entries(is_start[:, :-1])}

    @cached_property
    def attended(self) -> float:  # type: ignore[override]
        """The mean attention length, estimated from evenly spaced windows."""
        sampled = np.unique(np.linspace(0, len(self) - 1, _NUM_SAMPLED_WINDOWS).astype(np.int64))
        found: Any = self.batch(sampled)
        # A document of n tokens adds 0 + 1 + ... + n - 1.
        return float(2.0 * found["positions"].mean(dtype=np.float64) + 1.0)


class PackedSource(TokenSource):
    """Rows of complete documents: one per row, or with `packs` as many as fit.  Documents longer than a row are split.

    The first token of a document is never a target, and its last token has no target.
    """

    def __init__(self, shards: Sequence[Shard], data: DataSection, content: str, packs: bool) -> None:
        self._masked = data.arrangement == "masked"
        self._rows = load_row_layout(shards, data.seq_len, packs, content or sample_content(shards), data.cache_dir)
        super().__init__(shards, data.seq_len)
        if self._masked and len(self):
            self.attended = self._rows.totals.squares / (len(self) * self.seq_len)

    def __len__(self) -> int:
        return len(self._rows)

    def _count_targets(self) -> int:
        return self._rows.totals.targets

    def _pieces_of(self, index: int) -> list[tuple[int, int]]:
        return self._rows.pieces_of(index) if index >= 0 else []

    def _starts_of(self, indices: Sequence[int]) -> None:
        """Return None: a row is assembled from pieces."""

    def read_tokens(self, first: int, last: int) -> NDArray[np.integer[Any]]:
        """Return the concatenated tokens of consecutive samples; see `Source.read_tokens`."""
        return Source.read_tokens(self, first, last)

    def batch(self, indices: NDArray[np.int64]) -> Samples:
        """Return the samples at `indices`, with `documents` and `positions` (int32) if documents are masked.

        See `Source.batch`.
        """
        tokens, targets = self._windows(indices)
        if not self._masked:
            return tokens, targets
        is_start = np.zeros(tokens.shape, bool)
        for row, index in enumerate(np.asarray(indices).tolist()):
            ends = np.cumsum([count for _, count in self._pieces_of(index)], dtype=np.int64)
            is_start[row, ends[ends < self.seq_len]] = True
        return {"tokens": tokens, "targets": targets, **_document_entries(is_start)}
