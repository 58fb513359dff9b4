"""Builds one unit: reads its documents, tokenizes them, and writes training and held-out shards."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trainer.data.ingest.engines import Engine, check_sample, find_engine, find_reference
from trainer.data.ingest.folder import BuildFolder, UnitRecord
from trainer.data.ingest.inputs import InputFile
from trainer.data.ingest.json_stream import BadLine
from trainer.data.ingest.records import read_records
from trainer.data.ingest.report import BadDocuments, SettingNames
from trainer.data.ingest.splitting import DocumentSplitter
from trainer.data.ingest.streams import READ_ERRORS
from trainer.data.ingest.text import DocumentBatch, LongDocument, read_lines, read_texts
from trainer.data.ingest.tokens import TokenChunk, read_tokens
from trainer.data.ingest.units import BuildUnit
from trainer.data.shards import ShardWriter
from trainer.data.tokenizer import Tokenizer

CHECK_INTERVAL_BYTES = 1 << 26
"""Bytes of text between two checks of an engine against the reference, within a unit."""


@dataclass(frozen=True)
class BuildJob:
    """Everything that the shards depend on, and the names of the settings in messages.

    bad: see `BadDocuments`.  holdout: share of documents to hold out.  shard_tokens: a unit starts a new shard at the
    first document end past this many tokens; 0 for one shard per unit.
    """

    inputs: tuple[InputFile, ...]
    tokenizer: Tokenizer
    text_key: str = "text"
    bad: str = "error"
    holdout: float = 0.0
    shard_tokens: int = 0
    keys: SettingNames = field(default_factory=SettingNames)

    @cached_property
    def engine(self) -> Engine:
        """The engine to use as long as its ids match the reference."""
        return find_engine(self.tokenizer)

    @cached_property
    def reference(self) -> Engine:
        """The reference engine."""
        return find_reference(self.tokenizer)

    @cached_property
    def splitter(self) -> DocumentSplitter:
        """Splits long documents."""
        return DocumentSplitter(self.tokenizer)


class UnitWriter:
    """Writes the shards of one unit with one engine.  They get their final names only in `publish`."""

    def __init__(self, job: BuildJob, unit: BuildUnit, number: int, folder: BuildFolder, engine: Engine) -> None:
        self._job, self._unit, self._engine = job, unit, engine
        self._train = _Split(job, folder, number, False)
        self._held_out = _Split(job, folder, number, True)
        self._bad = BadDocuments(job.bad, job.keys)
        self._lowest, self._unchecked = 1.0, 0

    def write(self) -> Iterator[int]:
        """Write all documents; yields the number of input bytes after each batch.

        Raises IdsDiffer if the engine's ids are wrong, and UserError if a document cannot be read and `data.bad` does
        not allow it.
        """
        for documents in self._read():
            if isinstance(documents, TokenChunk):
                self._bad.tally.documents += len(documents.ends)
                self._train.write_tokens(documents)
                yield documents.ids.nbytes
                continue
            if not isinstance(documents, list):
                yield from self._write_long(documents)
                continue
            self._bad.tally.documents += len(documents)
            short = [text for text in documents if text]
            self._bad.tally.empty += len(documents) - len(short)
            for is_long, texts in itertools.groupby(short, key=self._job.splitter.is_long):
                if is_long:
                    for text in texts:
                        yield from self._write_pieces([text], self._assign_split([text]))
                else:
                    yield self._write_short(list(texts))

    def publish(self) -> UnitRecord:
        """Rename the shards to their final names and return the unit's record."""
        return UnitRecord(self._train.publish(), self._held_out.publish(), self._bad.tally, self._lowest)

    def discard(self) -> None:
        """Remove all shards that have not been published."""
        self._train.discard()
        self._held_out.discard()

    def _read(self) -> Iterator[DocumentBatch | TokenChunk]:
        unit, job = self._unit, self._job
        for kind, inputs in itertools.groupby(unit.inputs, key=lambda each: each.kind):
            if kind == "text":
                yield from read_texts(inputs, self._bad)
                continue
            if kind == "tokens":
                for each in inputs:
                    yield from read_tokens(each, job.tokenizer, job.keys)
                continue
            read = read_lines if kind == "jsonl" else read_records
            for each in inputs:
                yield from read(each, unit.start, unit.stop, job.text_key, self._bad)

    def _write_short(self, texts: Sequence[bytes]) -> int:
        self._check_engine(texts)
        if not self._job.holdout:
            self._train.write_documents(texts, self._engine)
            return sum(map(len, texts))
        chosen = [self._assign_split([text]) for text in texts]
        for split in (self._train, self._held_out):
            split.write_documents([text for text, own in zip(texts, chosen, strict=True) if own is split], self._engine)
        return sum(map(len, texts))

    def _check_engine(self, texts: Sequence[bytes]) -> None:
        """Compare the engine with the reference, on the first texts and then every CHECKED_EVERY bytes.  Raises
        IdsDiffer.
        """
        if self._unchecked <= 0:
            check_sample(self._engine, self._job.reference, texts)
            self._unchecked = CHECK_INTERVAL_BYTES
        self._unchecked -= sum(map(len, texts))

    def _write_long(self, document: LongDocument) -> Iterator[int]:
        try:
            split = self._assign_split(document.pieces())  # reads all of it, to find errors before writing
        except (BadLine, UnicodeDecodeError, *READ_ERRORS) as error:
            document.reject(error, self._bad)
            return
        self._bad.tally.documents += 1
        yield from self._write_pieces(document.pieces(), split)

    def _write_pieces(self, pieces: Iterator[bytes] | Sequence[bytes], split: _Split) -> Iterator[int]:
        for piece in self._job.splitter.cut(pieces):
            self._check_engine([piece])
            split.write_piece(piece, self._engine)
            yield len(piece)
        split.end_document()

    def _assign_split(self, pieces: Iterator[bytes] | Sequence[bytes]) -> _Split:
        """Assign a document to the training or the held-out split by a hash of its text, so that equal texts share a
        split.
        """
        digest = hashlib.blake2b(digest_size=6)
        for piece in pieces:
            if self._job.holdout:
                digest.update(piece)
        chance = int.from_bytes(digest.digest(), "little") / (1 << 48) if self._job.holdout else 1.0
        self._lowest = min(self._lowest, chance)
        return self._held_out if chance < self._job.holdout else self._train


class _Split:
    """The shards of one split of a unit."""

    def __init__(self, job: BuildJob, folder: BuildFolder, unit: int, is_held_out: bool) -> None:
        self._job, self._folder, self._unit, self._is_held_out = job, folder, unit, is_held_out
        self._writers: list[ShardWriter] = []
        self._is_full = True

    def write_documents(self, texts: Sequence[bytes], engine: Engine) -> None:
        if not texts:
            return
        ids, counts = engine.encode(texts)
        around = len(self._job.tokenizer.start_ids) + len(self._job.tokenizer.end_ids)
        sizes = np.fromiter(map(len, texts), np.int64, len(texts))
        while len(counts):
            writer = self._current_writer
            number = self._num_fitting(counts + around, writer.num_tokens)
            end = int(counts[:number].sum())
            writer.write_documents(ids[:end], counts[:number], int(sizes[:number].sum()))
            ids, counts, sizes = ids[end:], counts[number:], sizes[number:]
            self._update_is_full(writer)

    def _num_fitting(self, counts: NDArray[np.int64], num_tokens: int) -> int:
        """Return how many of these documents go into a shard that holds `num_tokens` tokens; the last one may exceed
        the limit.
        """
        if not self._job.shard_tokens:
            return len(counts)
        room = self._job.shard_tokens - num_tokens
        return min(len(counts), int(np.searchsorted(np.cumsum(counts), room)) + 1)

    def write_tokens(self, tokens: TokenChunk) -> None:
        ids, ends = tokens.ids, tokens.ends
        while len(ids):
            writer = self._current_writer
            full = ends[writer.num_tokens + ends >= self._job.shard_tokens] if self._job.shard_tokens else ends[:0]
            stop = int(full[0]) if len(full) else len(ids)
            number = int(np.searchsorted(ends, stop, side="right"))
            writer.write_tokens(ids[:stop], ends[:number])
            ids, ends = ids[stop:], ends[number:] - stop
            if len(full):
                self._update_is_full(writer)

    def write_piece(self, text: bytes, engine: Engine) -> None:
        self._current_writer.write(engine.encode([text])[0], len(text))

    def end_document(self) -> None:
        writer = self._writers[-1]
        writer.end_document()
        self._update_is_full(writer)

    def _update_is_full(self, writer: ShardWriter) -> None:
        self._is_full = 0 < self._job.shard_tokens <= writer.num_tokens

    def publish(self) -> list[str]:
        for writer in self._writers[-1:]:
            writer.close()
        for writer in self._writers:
            writer.publish()
        return [writer.path.name for writer in self._writers]

    def discard(self) -> None:
        for writer in self._writers:
            writer.discard()

    @property
    def _current_writer(self) -> ShardWriter:
        if self._is_full:
            for writer in self._writers[-1:]:
                writer.close()
            name = self._folder.name_of(self._unit, len(self._writers), self._is_held_out)
            self._writers.append(ShardWriter(self._folder.path / f"{name}.bin", self._job.tokenizer))
            self._is_full = False
        return self._writers[-1]
