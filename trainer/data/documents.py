"""Token shards with an eye to their documents: kept to themselves, one a row, or as many as fit.

Where documents begin is what the shards' index says, and no token: text may hold whatever ends a document.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from trainer.data.row_layout import DocumentIndex, find_rows
from trainer.data.shards import Shard
from trainer.data.source import IGNORE, Samples, Source, TokenSource, sample_content

if TYPE_CHECKING:
    from trainer.config import DataSection

_NUM_SAMPLED_WINDOWS = 64
"""Windows from which the mean length of what tokens attend to is estimated."""


def open_shards(shards: Sequence[Shard], data: DataSection, content: str = "") -> TokenSource:
    """Return the source over shards that `data.documents` and `data.fit` ask for.

    content: the shards' `sample_content`, where that is known.  Raises ShardError, UserError.
    """
    source = _open(shards, data, content)
    source.known_content = content
    return source


def _open(shards: Sequence[Shard], data: DataSection, content: str) -> TokenSource:
    if data.arrangement == "apart":
        return PackedSource(shards, data, content, packs=False)
    if data.fit == "best":
        return PackedSource(shards, data, content, packs=True)
    return MaskedSource(shards, data.seq_len) if data.arrangement == "masked" else TokenSource(shards, data.seq_len)


def _document_entries(begins: NDArray[np.bool_]) -> dict[str, NDArray[Any]]:
    """Return the entries `documents` and `positions` of rows, from where further documents begin in them, (B, T)."""
    index = np.arange(begins.shape[1])
    starts = np.maximum.accumulate(np.where(begins, index, 0), axis=1)
    return {"documents": begins.cumsum(1, dtype=np.int32), "positions": (index - starts).astype(np.int32)}


class MaskedSource(TokenSource):
    """The same windows, with the number of each token's document in its row, and its position there.

    A document that a window cuts counts as two; the last token of each has no target.
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
        begins = np.zeros((len(indices), self.seq_len + 1), bool)
        for row, index in enumerate(np.asarray(indices).tolist()):
            for start, count in self._pieces_of(index):
                begins[row, self._index.between(start + 1, start + count + 1) - start] = True
        targets[begins[:, 1:]] = IGNORE
        return {"tokens": tokens, "targets": targets, **_document_entries(begins[:, :-1])}

    @cached_property
    def attended(self) -> float:  # type: ignore[override]
        """An estimate, from windows in regular distances."""
        places = np.unique(np.linspace(0, len(self) - 1, _NUM_SAMPLED_WINDOWS).astype(np.int64))
        found: Any = self.batch(places)
        # A document of n tokens adds 0 + 1 + ... + n - 1.
        return float(2.0 * found["positions"].mean(dtype=np.float64) + 1.0)


class PackedSource(TokenSource):
    """Rows of whole documents: one in each, or with `packs` as many as fit; those that are longer are cut.

    A document's first token is no target, and its last one has none.
    """

    def __init__(self, shards: Sequence[Shard], data: DataSection, content: str, packs: bool) -> None:
        self._masked = data.arrangement == "masked"
        self._rows = find_rows(shards, data.seq_len, packs, content or sample_content(shards), data.cache_dir)
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
        """Return None: a row is put together from its pieces, few of which fill it."""

    def stretch(self, first: int, last: int) -> NDArray[np.integer[Any]]:
        """Return the tokens of samples one after the other; see `Source.stretch`."""
        return Source.stretch(self, first, last)

    def batch(self, indices: NDArray[np.int64]) -> Samples:
        """Return the samples at `indices`, where documents are masked with those and positions; see `Source.batch`."""
        tokens, targets = self._windows(indices)
        if not self._masked:
            return tokens, targets
        begins = np.zeros(tokens.shape, bool)
        for row, index in enumerate(np.asarray(indices).tolist()):
            ends = np.cumsum([count for _, count in self._pieces_of(index)], dtype=np.int64)
            begins[row, ends[ends < self.seq_len]] = True
        return {"tokens": tokens, "targets": targets, **_document_entries(begins)}
