"""Assigns documents to rows: which pieces of the token stream are in each row.

A document that fits in a row is one piece; a longer one is split into several.  The layout depends only on the
documents and the row length.  For few documents it is held in memory; for many it is a file in the cache that all ranks
of a node memory-map, so that even a billion documents take no private memory.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.data.cache import get_or_build
from trainer.data.packing import best_fit
from trainer.data.sample_order import sample_at
from trainer.data.shards import Shard
from trainer.files import checked, crc32, with_checksum

PIECE = np.dtype([("start", "<i8"), ("count", "<i4")])
"""A piece of a document: the position of its first token in the stream of all shards, and its number of targets."""

_FILES = {"pieces": PIECE, "ends": np.dtype("<i8")}
"""The files of a stored layout, with their dtypes."""

MAX_DOCUMENTS_IN_MEMORY = 2**20
"""The layout of up to this many documents is held in memory, at about 24 bytes per document."""

_BLOCK = 2**16
"""Documents are packed in blocks of this many; rows never mix documents of different blocks."""


@dataclass(frozen=True)
class PieceTotals:
    """Sums over all pieces: the number of targets, and the squares of the numbers of targets."""

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

    def pieces_of(self, row: int) -> list[tuple[int, int]]:
        """Return (start, count) of each piece of a row."""
        start = int(self.ends[row - 1]) if row else 0
        found: list[tuple[int, int]] = self.pieces[start : int(self.ends[row])].tolist()
        return found


def load_row_layout(
    shards: Sequence[Shard], seq_len: int, packs: bool, content: str, cache_dir: str | None
) -> RowLayout:
    """Return the layout of rows of at most `seq_len` targets.

    With `packs` each row holds as many pieces as fit; otherwise it holds one, in the order of the documents.

    content: a digest of the shards' content, which identifies a large layout in the cache; see `get_or_build`.

    Raises ShardError, or UserError if the cache is not writable.
    """
    if sum(shard.info.num_documents for shard in shards) <= MAX_DOCUMENTS_IN_MEMORY:
        return _in_memory(list(_blocks(shards, seq_len, packs)))
    name = f"packing-{content}-{seq_len}-{'best' if packs else 'apart'}"

    def build(folder: Path) -> None:
        _write(folder, _blocks(shards, seq_len, packs))

    return get_or_build(cache_dir, name, "the packing of the documents", build, _memory_mapped)


_Block = tuple[NDArray[Any], NDArray[np.int64]]
"""The pieces of a block's rows, in row order, and the number of pieces in each row."""


def _blocks(shards: Sequence[Shard], seq_len: int, packs: bool) -> Iterator[_Block]:
    pending: list[NDArray[np.int64]] = []
    for documents in _documents(shards):
        pending.append(documents)
        if sum(map(len, pending)) >= _BLOCK:
            yield _make_rows(np.concatenate(pending), seq_len, packs)
            pending = []
    if pending:
        yield _make_rows(np.concatenate(pending), seq_len, packs)


def _documents(shards: Sequence[Shard]) -> Iterator[NDArray[np.int64]]:
    """Yield arrays (n, 2) with the first token and the number of targets of up to a block of documents at a time."""
    before = 0
    for shard in shards:
        for first in range(0, shard.info.num_documents, _BLOCK):
            offsets = shard.read_offsets(first, min(_BLOCK, shard.info.num_documents - first) + 1)
            yield np.stack([offsets[:-1] + before, np.diff(offsets) - 1], axis=1)
        before += shard.info.num_tokens


def _make_rows(documents: NDArray[np.int64], seq_len: int, packs: bool) -> _Block:
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
    # Packing puts the longest documents first.  Shuffle the rows, so that the last ones, which may be held out, are
    # representative.
    shuffled = sample_at(np.arange(len(sizes)), max(1, len(sizes)), 0)
    row_starts, sizes = row_starts[shuffled], sizes[shuffled]
    piece_numbers = np.repeat(row_starts - (np.cumsum(sizes) - sizes), sizes) + np.arange(len(order))
    return pieces[order[piece_numbers]], sizes


def _totals_of(pieces: NDArray[Any]) -> PieceTotals:
    counts = pieces["count"].astype(np.int64)
    return PieceTotals(int(counts.sum()), int(counts @ counts))


def _in_memory(blocks: Sequence[_Block]) -> RowLayout:
    pieces = np.concatenate([pieces for pieces, _ in blocks])
    return RowLayout(pieces, np.cumsum(np.concatenate([sizes for _, sizes in blocks])), _totals_of(pieces))


def _write(folder: Path, blocks: Iterator[_Block]) -> None:
    """Write the files of a layout."""
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
    facts = {"totals": asdict(PieceTotals(targets, squares)), "pieces": pieces_crc, "ends": ends_crc}
    (folder / "totals.json").write_text(json.dumps(with_checksum(facts)))


def _memory_mapped(folder: Path) -> RowLayout:
    """Memory-map the layout that `_write` has written.  Raises ValueError if it is corrupt."""
    facts = checked(json.loads((folder / "totals.json").read_bytes()))
    totals = PieceTotals(**facts["totals"])
    pieces, ends = (_read_array(folder / name, dtype, facts[name]) for name, dtype in _FILES.items())
    return RowLayout(pieces, ends, totals)


def _read_array(path: Path, dtype: np.dtype[Any], checksum: int) -> NDArray[Any]:
    """Memory-map a file.  Raises ValueError if its checksum is not `checksum`."""
    found: NDArray[Any] = np.empty(0, dtype)
    if path.stat().st_size:  # an empty file cannot be memory-mapped
        found = np.memmap(path, dtype, "r")
    if (crc32(found.view(np.uint8).data) if len(found) else 0) != checksum:
        raise ValueError(f"the checksum of {path.name} is wrong")
    return found


class DocumentIndex:
    """Index of where documents start in the concatenated tokens of several shards."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = shards
        self._ends: list[int] = np.cumsum([shard.info.num_tokens for shard in shards]).tolist()
        is_small = sum(shard.info.num_documents for shard in shards) <= MAX_DOCUMENTS_IN_MEMORY
        self._starts = np.concatenate([documents[:, 0] for documents in _documents(shards)]) if is_small else None

    def between(self, first: int, last: int) -> NDArray[np.int64]:
        """Return the positions in [first, last) at which a document starts."""
        if self._starts is not None:
            return self._starts[slice(*np.searchsorted(self._starts, (first, last)).tolist())]
        found, number = [np.empty(0, np.int64)], bisect.bisect_right(self._ends, first)
        while number < len(self._ends) and (start := self._ends[number] - self._shards[number].info.num_tokens) < last:
            found.append(start + self._shards[number].documents_between(max(0, first - start), last - start))
            number += 1
        return np.concatenate(found)
