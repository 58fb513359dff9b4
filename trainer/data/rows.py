"""Rows of whole documents: which pieces of the tokens lie in each.

A document is one piece if a row holds it, and else as many as it needs.  What lies where is a function of the documents
and the length of a row alone.  Of few documents it is kept in memory, of many in a file of the cache, which all ranks
of a node map: a billion documents cost none of them memory of its own.
"""

from __future__ import annotations

import bisect
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.data.cache import find_cache_folders
from trainer.data.order import sample_at
from trainer.data.packing import best_fit
from trainer.data.shards import Shard
from trainer.errors import setting_error

PIECE = np.dtype([("start", "<i8"), ("count", "<i4")])
"""A piece of a document: its first token in the stream of all shards, and its targets, the tokens after it."""

FEW_DOCUMENTS = 2**20
"""So many documents are kept in memory, with some 24 bytes each."""

_BLOCK = 2**16
"""Documents that share rows with each other and with no others."""


@dataclass(frozen=True)
class Totals:
    """The sum of the pieces: their targets, and the sum of the squares of their lengths."""

    targets: int = 0
    squares: int = 0


@dataclass(frozen=True)
class Rows:
    """The pieces of each row."""

    pieces: NDArray[Any]
    """Of all rows, one after the other."""
    ends: NDArray[np.int64]
    """Where each row's pieces end."""
    totals: Totals

    def __len__(self) -> int:
        return len(self.ends)

    def pieces_of(self, row: int) -> list[tuple[int, int]]:
        """Return start and count of each piece of a row."""
        start = int(self.ends[row - 1]) if row else 0
        found: list[tuple[int, int]] = self.pieces[start : int(self.ends[row])].tolist()
        return found


def find_rows(shards: Sequence[Shard], seq_len: int, packs: bool, content: str, cache_dir: str | None) -> Rows:
    """Return rows of at most `seq_len` targets: with `packs` as full as can be, else of one piece each, in order.

    content: a digest of the shards' content.  Any number of processes may do this at once: one of them makes the file,
    the others wait for it.  Raises ShardError, and UserError if the file cannot be kept.
    """
    if sum(shard.info.num_documents for shard in shards) <= FEW_DOCUMENTS:
        return _gathered(list(_blocks(shards, seq_len, packs)))
    name = f"rows-{content}-{seq_len}-{'best' if packs else 'apart'}"
    for folder in (folders := find_cache_folders(cache_dir)):
        if (folder / name).is_dir():
            return _mapped(folder / name)
    place = folders[0] / name if folders else Path(tempfile.gettempdir(), name)
    try:
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _locked(place.with_suffix(".lock")):
            if not place.is_dir():
                _write(place, _blocks(shards, seq_len, packs))
        return _mapped(place)
    except OSError as error:
        rule = f"the packing of the documents cannot be kept in {place.parent} ({error.strerror})"
        raise setting_error("data.cache_dir", cache_dir, rule, fix="give a writable folder") from error


_Block = tuple[NDArray[Any], NDArray[np.int64]]
"""Pieces, row after row, and how many of them each row has."""


def _blocks(shards: Sequence[Shard], seq_len: int, packs: bool) -> Iterator[_Block]:
    waiting: list[NDArray[np.int64]] = []
    for documents in _documents(shards):
        waiting.append(documents)
        if sum(map(len, waiting)) >= _BLOCK:
            yield _lay_out(np.concatenate(waiting), seq_len, packs)
            waiting = []
    if waiting:
        yield _lay_out(np.concatenate(waiting), seq_len, packs)


def _documents(shards: Sequence[Shard]) -> Iterator[NDArray[np.int64]]:
    """Yield first token and number of targets of documents (n, 2), at most a block of them at a time."""
    before = 0
    for shard in shards:
        for first in range(0, shard.info.num_documents, _BLOCK):
            offsets = shard.read_offsets(first, min(_BLOCK, shard.info.num_documents - first) + 1)
            yield np.stack([offsets[:-1] + before, np.diff(offsets) - 1], axis=1)
        before += shard.info.num_tokens


def _lay_out(documents: NDArray[np.int64], seq_len: int, packs: bool) -> _Block:
    starts, targets = documents.T
    counts = np.maximum(0, -(-targets // seq_len))
    document = np.repeat(np.arange(len(documents)), counts)
    behind = (np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)) * seq_len
    pieces = np.empty(len(document), PIECE)
    pieces["start"], pieces["count"] = starts[document] + behind, np.minimum(seq_len, targets[document] - behind)
    if not packs:
        return pieces, np.ones(len(pieces), np.int64)
    order, begins = best_fit(pieces["count"].astype(np.int64), seq_len)
    sizes = np.diff(begins)
    # The longest come first in packing: mixed here, so that the last rows, which may be held out, are like the others.
    mixed = sample_at(np.arange(len(sizes)), max(1, len(sizes)), 0)
    begins, sizes = begins[mixed], sizes[mixed]
    places = np.repeat(begins - (np.cumsum(sizes) - sizes), sizes) + np.arange(len(order))
    return pieces[order[places]], sizes


def _sum_up(pieces: NDArray[Any]) -> Totals:
    counts = pieces["count"].astype(np.int64)
    return Totals(int(counts.sum()), int(counts @ counts))


def _gathered(blocks: Sequence[_Block]) -> Rows:
    pieces = np.concatenate([pieces for pieces, _ in blocks])
    return Rows(pieces, np.cumsum(np.concatenate([sizes for _, sizes in blocks])), _sum_up(pieces))


def _write(place: Path, blocks: Iterator[_Block]) -> None:
    """Write the folder of a packing under another name, and rename it."""
    made = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
    try:
        targets = squares = end = 0
        with open(made / "pieces", "wb") as pieces_file, open(made / "ends", "wb") as ends_file:
            for pieces, sizes in blocks:
                pieces_file.write(pieces.tobytes())
                ends_file.write((end + np.cumsum(sizes)).astype("<i8").tobytes())
                end += len(pieces)
                totals = _sum_up(pieces)
                targets, squares = targets + totals.targets, squares + totals.squares
            for file in (pieces_file, ends_file):
                file.flush()
                os.fsync(file.fileno())
        (made / "totals.json").write_text(json.dumps(asdict(Totals(targets, squares))))
        os.rename(made, place)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _mapped(place: Path) -> Rows:
    totals = Totals(**json.loads((place / "totals.json").read_text()))
    if not totals.targets:
        return Rows(np.empty(0, PIECE), np.empty(0, np.int64), totals)
    return Rows(np.memmap(place / "pieces", PIECE, "r"), np.memmap(place / "ends", "<i8", "r"), totals)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Be the only one inside the block, of all processes that can see the file; the system unlocks for the dead."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class DocumentIndex:
    """The beginnings of documents in the tokens of several shards."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = shards
        self._ends: list[int] = np.cumsum([shard.info.num_tokens for shard in shards]).tolist()
        is_small = sum(shard.info.num_documents for shard in shards) <= FEW_DOCUMENTS
        self._starts = np.concatenate([documents[:, 0] for documents in _documents(shards)]) if is_small else None

    def between(self, first: int, last: int) -> NDArray[np.int64]:
        """Return those of the tokens from `first` up to `last`, which is left out, that begin a document."""
        if self._starts is not None:
            return self._starts[slice(*np.searchsorted(self._starts, (first, last)).tolist())]
        found, number = [np.empty(0, np.int64)], bisect.bisect_right(self._ends, first)
        while number < len(self._ends) and (start := self._ends[number] - self._shards[number].info.num_tokens) < last:
            found.append(start + self._shards[number].documents_between(max(0, first - start), last - start))
            number += 1
        return np.concatenate(found)
