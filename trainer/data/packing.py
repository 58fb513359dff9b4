"""Sources that respect the document boundaries of token shards: masked windows, one document per row, or packed rows.

Document boundaries come from the shards' index files, not from the tokens, since text may contain the end-of-document
token.

A row layout lists, for each row, the pieces of the token stream that the row contains.  A document that fits in a row
is one piece, and a longer one is split into several; a document without targets is omitted.  The layout depends only on
the lengths of the documents, their division into shards, the row length, and whether rows are packed.  With few
documents, it is held in memory.  With many, it is stored in the cache and memory-mapped by all ranks of a node, so that
even a billion documents need no private memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.data.cache import get_or_build
from trainer.data.mixture import sample_at
from trainer.data.shards import Shard, Stream
from trainer.data.source import IGNORE, Samples, Source, TokenSource, sample_content
from trainer.files import crc32, verify_checksum, with_checksum

_MAX_SAMPLED_WINDOWS = 64
"""Maximum number of windows from which `MaskedSource.attended` is estimated."""


def _document_entries(is_start: NDArray[np.bool_]) -> dict[str, NDArray[Any]]:
    """Return the batch entries `documents` and `positions`, both (B, T).

    They hold the index of each token's document within its row, and the token's position in that document, both
    from 0.

    is_start: (B, T), True at the start of each document except the first in a row.
    """
    index = np.arange(is_start.shape[1])
    starts = np.maximum.accumulate(np.where(is_start, index, 0), axis=1)
    return {"documents": is_start.cumsum(1, dtype=np.int32), "positions": (index - starts).astype(np.int32)}


class MaskedSource(TokenSource):
    """The windows of `TokenSource`, with document boundaries: see `_document_entries`.

    Parts of a document that lie in different windows count as separate documents.  The last token of a document has no
    target.
    """

    def __init__(self, shards: Sequence[Shard], seq_len: int) -> None:
        num_targets = sum(shard.info.num_tokens - shard.info.num_documents for shard in shards)
        super().__init__(shards, seq_len, num_targets)

    def __len__(self) -> int:
        return -(-(self.stream.num_tokens - 1) // self.seq_len)

    def batch(self, indices: NDArray[np.int64]) -> Samples:
        """Return the samples at `indices`, with `documents` and `positions` (int32); see `Source.batch`."""
        tokens, targets = self._read_windows(indices)
        is_start = np.zeros((len(indices), self.seq_len + 1), bool)
        for row, index in enumerate(np.asarray(indices).tolist()):
            for start, count in self._pieces_of(index):
                is_start[row, self.stream.starts_between(start + 1, start + count + 1) - start] = True
        targets[is_start[:, 1:]] = IGNORE
        return {"tokens": tokens, "targets": targets, **_document_entries(is_start[:, :-1])}

    @cached_property
    def attended(self) -> float:  # type: ignore[override]
        """See `Source.attended`; estimated from evenly spaced windows."""
        sampled = np.unique(np.linspace(0, len(self) - 1, _MAX_SAMPLED_WINDOWS).astype(np.int64))
        entries: Any = self.batch(sampled)
        # The positions in a document of n tokens add up to n * (n - 1) / 2, so this is sum(n**2) / sum(n).
        return float(2.0 * entries["positions"].mean(dtype=np.float64) + 1.0)


class PackedSource(TokenSource):
    """Rows of complete documents.  Only documents that are longer than a row are split.

    The first token of a document is never a target, and the last token of a document has no target.

    content: the shards' `sample_content`, or "" if it is not known yet.
    cache_dir: the value of `data.cache_dir`, where the layout of many documents is stored.
    packs: whether to pack several documents into each row where they fit, instead of one document per row.
    is_masked: whether the documents of a row do not attend to each other.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        seq_len: int,
        content: str,
        cache_dir: str | None,
        *,
        packs: bool,
        is_masked: bool = False,
    ) -> None:
        self._is_masked = is_masked
        self._rows = load_row_layout(shards, seq_len, packs, content or sample_content(shards), cache_dir)
        TokenSource.__init__(self, shards, seq_len, self._rows.totals.targets)
        if self._is_masked and len(self):
            self.attended = self._rows.totals.squares / (len(self) * self.seq_len)

    def __len__(self) -> int:
        return len(self._rows)

    def _pieces_of(self, index: int) -> list[tuple[int, int]]:
        if index < 0:
            return []
        first = int(self._rows.ends[index - 1]) if index else 0
        pieces: list[tuple[int, int]] = self._rows.pieces[first : int(self._rows.ends[index])].tolist()
        return pieces

    def _starts_of(self, indices: Sequence[int]) -> None:
        """Return None, since rows are assembled from pieces."""

    def read_tokens(self, first: int, last: int) -> NDArray[np.integer[Any]]:
        """Return the concatenated tokens of consecutive samples; see `Source.read_tokens`."""
        return Source.read_tokens(self, first, last)

    def batch(self, indices: NDArray[np.int64]) -> Samples:
        """Return the samples at `indices`; if documents are masked, with `documents` and `positions` (int32).

        See `Source.batch`.
        """
        tokens, targets = self._read_windows(indices)
        if not self._is_masked:
            return tokens, targets
        is_start = np.zeros(tokens.shape, bool)
        for row, index in enumerate(np.asarray(indices).tolist()):
            ends = np.cumsum([count for _, count in self._pieces_of(index)], dtype=np.int64)
            is_start[row, ends[ends < self.seq_len]] = True
        return {"tokens": tokens, "targets": targets, **_document_entries(is_start)}


PIECE = np.dtype([("start", "<i8"), ("count", "<i4")])
"""A piece of a document: the position of its first token in the concatenated shards, and its number of targets."""

_FILES = {"pieces": PIECE, "ends": np.dtype("<i8")}
"""The files of a stored layout, with their dtypes."""

_MIN_BLOCK_DOCUMENTS = 2**16
"""Minimum number of documents that are packed together.  No row contains documents from two blocks."""


@dataclass(frozen=True)
class PieceTotals:
    """Sums, over all pieces, of the number of targets in a piece and of its square."""

    targets: int = 0
    squares: int = 0


@dataclass(frozen=True)
class RowLayout:
    """The pieces of each row."""

    pieces: NDArray[Any]
    """The pieces of all rows, in row order."""
    ends: NDArray[np.int64]
    """The end of each row's pieces in `pieces`."""
    totals: PieceTotals

    def __len__(self) -> int:
        return len(self.ends)


def load_row_layout(
    shards: Sequence[Shard], seq_len: int, packs: bool, content: str, cache_dir: str | None
) -> RowLayout:
    """Return the layout for rows of at most `seq_len` targets.

    packs: whether to pack several pieces into each row where they fit, instead of one piece per row in document order.
    content: a digest of the shards' content, which identifies a large layout in the cache.

    Raises ShardError, or UserError if the cache is not writable; see `get_or_build`.
    """
    stream = Stream(shards)
    if stream.has_few_documents:
        blocks = list(_row_blocks(stream, seq_len, packs))
        pieces = np.concatenate([pieces for pieces, _ in blocks])
        return RowLayout(pieces, np.cumsum(np.concatenate([sizes for _, sizes in blocks])), _totals_of(pieces))
    name = f"packing-{content}-{seq_len}-{'best' if packs else 'apart'}"
    return get_or_build(
        cache_dir,
        name,
        "the packing of the documents",
        build=lambda folder: _write_layout(folder, _row_blocks(stream, seq_len, packs)),
        load=_memory_map,
    )


_Block = tuple[NDArray[Any], NDArray[np.int64]]
"""The pieces of a block's rows, in row order, and the number of pieces in each row."""


def _row_blocks(stream: Stream, seq_len: int, packs: bool) -> Iterator[_Block]:
    """Yield the rows of each block of documents in turn."""
    pending: list[NDArray[np.int64]] = []
    for offsets in stream.document_blocks():
        pending.append(np.stack([offsets[:-1], np.diff(offsets) - 1], axis=1))
        if sum(map(len, pending)) >= _MIN_BLOCK_DOCUMENTS:
            yield _make_rows(np.concatenate(pending), seq_len, packs)
            pending = []
    if pending:
        yield _make_rows(np.concatenate(pending), seq_len, packs)


def _make_rows(documents: NDArray[np.int64], seq_len: int, packs: bool) -> _Block:
    """Return the rows of one block.

    documents: (n, 2), the position of the first token and the number of targets of each document.
    """
    starts, targets = documents.T
    counts = np.maximum(0, -(-targets // seq_len))
    document = np.repeat(np.arange(len(documents)), counts)
    offset = (np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)) * seq_len
    pieces = np.empty(len(document), PIECE)
    pieces["start"], pieces["count"] = starts[document] + offset, np.minimum(seq_len, targets[document] - offset)
    if not packs:
        return pieces, np.ones(len(pieces), np.int64)
    order, row_starts = best_fit(pieces["count"].astype(np.int64), seq_len)
    sizes = np.diff(row_starts)
    # Packing puts the longest documents first.  Rows are shuffled so that the last ones, which may be held out, are
    # representative.
    shuffled = sample_at(np.arange(len(sizes)), max(1, len(sizes)), 0)
    row_starts, sizes = row_starts[shuffled], sizes[shuffled]
    piece_numbers = np.repeat(row_starts - (np.cumsum(sizes) - sizes), sizes) + np.arange(len(order))
    return pieces[order[piece_numbers]], sizes


def _totals_of(pieces: NDArray[Any]) -> PieceTotals:
    counts = pieces["count"].astype(np.int64)
    return PieceTotals(int(counts.sum()), int(counts @ counts))


def _write_layout(folder: Path, blocks: Iterator[_Block]) -> None:
    """Write a layout to files in `folder`."""
    targets = squares = end = pieces_crc = ends_crc = 0
    with open(folder / "pieces", "wb") as pieces_file, open(folder / "ends", "wb") as ends_file:
        for pieces, sizes in blocks:
            ends = (end + np.cumsum(sizes)).astype("<i8").tobytes()
            pieces_file.write(pieces.tobytes())
            ends_file.write(ends)
            pieces_crc, ends_crc = crc32(pieces.tobytes(), pieces_crc), crc32(ends, ends_crc)
            end += len(pieces)
            totals = _totals_of(pieces)
            targets, squares = targets + totals.targets, squares + totals.squares
    metadata = {"totals": asdict(PieceTotals(targets, squares)), "pieces": pieces_crc, "ends": ends_crc}
    (folder / "totals.json").write_text(json.dumps(with_checksum(metadata)))


def _memory_map(folder: Path) -> RowLayout:
    """Return the layout written by `_write_layout`, memory-mapped.  Raises ValueError if it is corrupt."""
    metadata = verify_checksum(json.loads((folder / "totals.json").read_bytes()))
    totals = PieceTotals(**metadata["totals"])
    pieces, ends = (_read_array(folder / name, dtype, metadata[name]) for name, dtype in _FILES.items())
    return RowLayout(pieces, ends, totals)


def _read_array(path: Path, dtype: np.dtype[Any], checksum: int) -> NDArray[Any]:
    """Return the content of a file, memory-mapped.  Raises ValueError if its checksum is not `checksum`."""
    values: NDArray[Any] = np.empty(0, dtype)
    if path.stat().st_size:  # an empty file cannot be memory-mapped
        values = np.memmap(path, dtype, "r")
    if (crc32(values.view(np.uint8).data) if len(values) else 0) != checksum:
        raise ValueError(f"the checksum of {path.name} is wrong")
    return values


def best_fit(lengths: NDArray[np.int64], row_length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the documents' indices grouped by row, and the offset in that array at which each row starts.

    The last offset is the end of the array, so the shapes are (num_documents,) and (num_rows + 1,).

    The longest documents are placed first, each into the fullest row that still has space for it (best fit decreasing:
    Johnson 1973, "Near-optimal bin packing algorithms").  The result is deterministic.

    lengths: the length of each document, from 1 to `row_length`.
    """
    rows_by_space: list[list[int]] = [[] for _ in range(row_length + 1)]  # the rows with each amount of free space
    spaces = 0  # bit n is set if a row has exactly n free
    row_of_document = np.empty(len(lengths), np.int64)
    num_rows = 0
    longest_first = np.argsort(-lengths, kind="stable")
    for document, length in zip(longest_first.tolist(), lengths[longest_first].tolist(), strict=True):
        fitting = spaces >> length
        if fitting:
            space = length + (fitting & -fitting).bit_length() - 1
            row = rows_by_space[space].pop()
            if not rows_by_space[space]:
                spaces ^= 1 << space
        else:
            space, row, num_rows = row_length, num_rows, num_rows + 1
        row_of_document[document] = row
        if space > length:
            rows_by_space[space - length].append(row)
            spaces |= 1 << (space - length)
    order = np.argsort(row_of_document, kind="stable")
    return order, np.searchsorted(row_of_document[order], np.arange(num_rows + 1))
