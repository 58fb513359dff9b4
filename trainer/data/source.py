"""Sources give random access to samples by index; fingerprints identify the samples of a source.

A sample has one or more rows of `seq_len` tokens, each with its target: the next token or IGNORE.  A source knows
neither the sample order nor the ranks and batches.  This module does not import torch.

A fingerprint is stored in checkpoints next to the data position, which counts the samples consumed so far.  The
position means nothing for other data, since even a different number of samples gives a different order.  File names,
folders and modification times are not part of a fingerprint, so that data can be moved.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trainer.data.shards import Shard, ShardError, Stream

Split: TypeAlias = Literal["train", "eval"]
"""The samples to train on, or those that are held out."""

IGNORE = -100
"""Target value that is excluded from the loss: the default `ignore_index` of `torch.nn.functional.cross_entropy`."""


Samples: TypeAlias = "tuple[NDArray[np.int64], NDArray[np.int64]] | Mapping[str, NDArray[Any]]"
"""(tokens, targets), or a mapping with these and further entries.  The first dimension of an entry counts samples, or
rows if a sample has several (`Source.rows_per_sample`)."""


def as_mapping(samples: Samples) -> dict[str, NDArray[Any]]:
    """Return samples as a dict of entries."""
    if isinstance(samples, Mapping):
        return dict(samples)
    tokens, targets = samples
    return {"tokens": tokens, "targets": targets}


class Source(ABC):
    """Gives random access to samples by index.

    seq_len: tokens per row.
    vocab_size: exclusive upper bound on the token ids.
    tokenizer: the name of the tokenizer that produced the tokens; None for tokens that encode no text.
    bytes_per_token: mean bytes of raw text per target over all samples; None if there is no text.
    attended: the mean, over all positions, of the length of a token's document within its row; 0 for padding.  Causal
        attention costs as much per token as in rows of this length without boundaries.  None if tokens attend to their
        whole row, which is equivalent to seq_len.
    checks_ids: whether `batch` itself checks that ids are within the vocabulary; otherwise the loader does.
    waits_for_storage: whether `batch` is I/O-bound and thread-safe.  A thread of the rank then prefetches batches,
        since worker processes would only add copies.
    rows_per_sample: rows per sample; 2 for preference pairs and for mismatched responses.
    num_labels: number of classes; labels are less than this.  0 if samples have no labels.
    only_label: the label shared by all samples; None if there are several labels or none.
    shards: the token shards that the source reads, if any.
    """

    seq_len: int
    vocab_size: int
    tokenizer: str | None = None
    bytes_per_token: float | None = None
    attended: float | None = None
    checks_ids: bool = False
    waits_for_storage: bool = False
    rows_per_sample: int = 1
    num_labels: int = 0
    only_label: int | None = None
    shards: Sequence[Shard] = ()

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def batch(self, indices: NDArray[np.int64]) -> Samples:
        """Return tokens and targets of the samples at `indices`, both (len(indices) * rows_per_sample, seq_len).

        Targets to exclude from the loss are IGNORE.  Index -1 gives a sample with only ignored targets.  A mapping may
        contain entries besides `tokens` and `targets`: the model's `forward` receives those that it has parameters for,
        and `Trainer.loss` receives all.
        """

    def read_tokens(self, first: int, last: int) -> NDArray[np.integer[Any]]:
        """Return the concatenated tokens of samples `first` to `last` (exclusive)."""
        tokens: NDArray[np.integer[Any]] = as_mapping(self.batch(np.arange(first, last)))["tokens"].ravel()
        return tokens

    @property
    def fingerprint(self) -> Fingerprint:
        """Identifies the samples; stored with the data position, so that no run resumes on different data.

        By default it contains only the number of samples.  `content` may be any text that changes with the samples.
        """
        return Fingerprint(len(self))

    @property
    def facts(self) -> Mapping[str, float]:
        """Additional fields of the start record about how the samples were produced."""
        return {}

    @property
    def summary(self) -> str:
        """A description of how the samples were produced, for the user; may be empty."""
        return ""

    def bits_per_byte(self, loss: float) -> float | None:
        """Return a mean `loss` in nats per target as bits per byte of raw text, or None if there is no text."""
        return None if self.bytes_per_token is None else loss / math.log(2) / self.bytes_per_token


class SourceSubset(Source):
    """Samples `start` to `stop` (exclusive) of another source."""

    def __init__(self, base: Source, start: int, stop: int) -> None:
        self.seq_len, self.vocab_size, self.tokenizer = base.seq_len, base.vocab_size, base.tokenizer
        self.bytes_per_token, self.checks_ids = base.bytes_per_token, base.checks_ids
        self.waits_for_storage, self.shards = base.waits_for_storage, base.shards
        self.rows_per_sample, self.num_labels, self.only_label = base.rows_per_sample, base.num_labels, base.only_label
        self.base, self._start, self._length = base, start, stop - start

    def __len__(self) -> int:
        return self._length

    def batch(self, indices: NDArray[np.int64]) -> Samples:
        """Return the samples at `indices`; see `Source.batch`."""
        assert np.size(indices) == 0 or np.max(indices) < self._length, (indices, self._length)
        return self.base.batch(self._to_base_indices(np.asarray(indices)))

    def _to_base_indices(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.where(indices < 0, -1, indices + self._start)

    def read_tokens(self, first: int, last: int) -> NDArray[np.integer[Any]]:
        """Return the concatenated tokens of consecutive samples; see `Source.read_tokens`."""
        return self.base.read_tokens(self._start + first, self._start + last)

    @property
    def summary(self) -> str:
        """The underlying source's summary, with the number of its samples that are in this subset."""
        kind = "held out" if self._start else "trained on, the others held out"
        part = f"{len(self):,} of the {len(self.base):,} samples are {kind}"
        first_line, newline, other_lines = self.base.summary.partition("\n")
        return f"{first_line}; {part}{newline}{other_lines}" if first_line else part

    @property
    def facts(self) -> Mapping[str, float]:
        """The facts of the underlying source."""
        return self.base.facts

    @property
    def attended(self) -> float | None:  # type: ignore[override]
        """The value of the underlying source."""
        return self.base.attended

    @property
    def fingerprint(self) -> Fingerprint:
        """The underlying source's fingerprint, with the number of samples in this subset."""
        return dataclasses.replace(self.base.fingerprint, num_samples=len(self))


def hold_out_last(source: Source, holdout: float, split: Split) -> Source | None:
    """Return the samples to train on, or the last ones, which are held out; None if there are none to hold out.

    holdout: the fraction of the samples to hold out; at least one, unless it is 0 or there is only one sample.
    """
    num_held_out = min(len(source) - 1, math.ceil(holdout * len(source)))
    if not num_held_out:
        return source if split == "train" else None
    first = len(source) - num_held_out
    return SourceSubset(source, 0, first) if split == "train" else SourceSubset(source, first, len(source))


class SyntheticSource(Source):
    """Synthetic copying task: each sample repeats a random pattern of 4 to 32 tokens.

    A sample depends on the seed, split and index alone.  It is derived from the raw output of Philox (Salmon et al.
    2011, "Parallel random numbers: as easy as 1, 2, 3"), which numpy guarantees to be stable across versions.
    """

    def __init__(self, seq_len: int, vocab_size: int, seed: int, split: Split) -> None:
        self.seq_len, self.vocab_size = seq_len, vocab_size
        self._seed, self._split = seed % 2**64, split

    def __len__(self) -> int:
        return 2**20 if self._split == "train" else 256

    def batch(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return tokens and targets of the samples at `indices`; see `Source.batch`."""
        stream = np.zeros((len(indices), self.seq_len + 1), dtype=np.int64)
        for row, index in enumerate(np.asarray(indices).tolist()):
            if index >= 0:
                stream[row] = np.resize(self._pattern(index), self.seq_len + 1)
        targets = stream[:, 1:].copy()
        targets[np.asarray(indices) < 0] = IGNORE
        return stream[:, :-1].copy(), targets

    def _pattern(self, index: int) -> NDArray[np.int64]:
        assert index < len(self), index
        key = np.array([self._seed, index + (2**63 if self._split == "eval" else 0)], dtype=np.uint64)
        draws = np.random.Philox(key=key).random_raw(33)
        period = 4 + int(draws[0] % 29)
        return (draws[1 : 1 + period] % self.vocab_size).astype(np.int64)


_NUM_FINGERPRINT_WINDOWS = 64
"""Approximate number of windows of tokens that a fingerprint covers; at least one in each shard."""

_FINGERPRINT_WINDOW_TOKENS = 2048
"""Maximum number of tokens in each of these windows."""


class TokenSource(Source):
    """Consecutive windows over the concatenated tokens of one or more shards.

    Sample i holds tokens i * seq_len to (i + 1) * seq_len of the stream, across document and shard boundaries, so that
    every token but the first is a target exactly once.  The last sample is padded with end tokens and ignored targets.
    """

    checks_ids = waits_for_storage = True
    known_content = ""
    """The shards' `sample_content` if it is already known, otherwise ""."""
    warnings = ""
    """Warnings about documents that were skipped when the text was tokenized, one line per reason, or ""."""

    def __init__(self, shards: Sequence[Shard], seq_len: int, num_targets: int | None = None) -> None:
        """num_targets: the number of targets; None for all tokens but the first."""
        info = shards[0].info
        self.seq_len, self.vocab_size, self.tokenizer = seq_len, info.vocab_size, info.tokenizer
        self.stream, self.shards, self._padding = Stream(shards), list(shards), info.end_id
        self.num_targets = self.stream.num_tokens - 1 if num_targets is None else num_targets
        num_bytes = sum(shard.info.num_bytes for shard in shards)
        if self.num_targets and num_bytes:  # unknown (0) for tokens from other tools
            self.bytes_per_token = num_bytes / self.num_targets

    @property
    def summary(self) -> str:
        """The number of tokens, the fraction of them that are targets, and warnings about skipped documents."""
        num_tokens = self.stream.num_tokens
        fraction = self.num_targets / max(1, num_tokens)
        counts = f"{num_tokens:,} tokens, {fraction:.1%} of them are targets"
        return f"{counts}\n{self.warnings}" if self.warnings else counts

    def __len__(self) -> int:
        return -(-self.num_targets // self.seq_len)

    def batch(self, indices: NDArray[np.int64]) -> Samples:
        """Return tokens and targets of the samples at `indices`; see `Source.batch`."""
        return self._read_windows(indices)

    def read_tokens(self, first: int, last: int) -> NDArray[np.integer[Any]]:
        """Return the concatenated tokens of consecutive samples, in the shards' dtype; see `Source.read_tokens`."""
        start, stop = first * self.seq_len, min(last * self.seq_len, self.stream.num_tokens)
        return self.stream.read(start, stop - start)

    def _read_windows(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return tokens and targets of the samples at `indices`, both (len(indices), seq_len)."""
        sample_indices: list[int] = np.asarray(indices, dtype=np.int64).tolist()
        assert not sample_indices or -1 <= min(sample_indices) <= max(sample_indices) < len(self), (indices, len(self))
        starts = self._starts_of(sample_indices)
        if starts is not None:
            return self._tokens_and_targets(self._read_rows(sample_indices, starts, self.seq_len + 1))
        tokens = np.full((len(sample_indices), self.seq_len), self._padding, np.int64)
        targets = np.full((len(sample_indices), self.seq_len), IGNORE, np.int64)
        for row, index in enumerate(sample_indices):
            filled = 0
            for start, count in self._pieces_of(index):
                stop = filled + count
                piece = self._tokens_and_targets(self._read_rows([index], [start], count + 1))
                tokens[row, filled:stop], targets[row, filled:stop] = piece[0][0], piece[1][0]
                filled = stop
        return tokens, targets

    def _tokens_and_targets(
        self, values: NDArray[np.unsignedinteger[Any]]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return tokens and targets, both (n, count), given the stored values of n pieces, (n, count + 1)."""
        return values[:, :-1].astype(np.int64), values[:, 1:].astype(np.int64)

    def _starts_of(self, indices: Sequence[int]) -> list[int] | None:
        """Return the position of each sample's first token if all are full, contiguous windows; otherwise None."""
        if not indices or min(indices) < 0 or (max(indices) + 1) * self.seq_len >= self.stream.num_tokens:
            return None
        return [index * self.seq_len for index in indices]

    def _pieces_of(self, index: int) -> list[tuple[int, int]]:
        """Return (position of the first token, number of targets) for each piece of a sample; none for index -1."""
        start = index * self.seq_len
        return [(start, min(self.seq_len, self.stream.num_tokens - 1 - start))] if index >= 0 else []

    def _read_rows(self, indices: Sequence[int], starts: Sequence[int], count: int) -> NDArray[np.unsignedinteger[Any]]:
        """Return `count` values of the stream from each of `starts` on, shape (len(starts), count).

        indices: the sample that each row belongs to, for error messages.

        Raises ShardError if the values cannot be read or are outside the shards' vocabulary.
        """
        rows = np.empty((len(starts), count), self.stream.dtype)
        for index, row, start in zip(indices, rows, starts, strict=True):
            try:
                self.stream.read_into(row, start)
            except ShardError as error:
                raise ShardError(f"sample {index} cannot be read: {error}") from error
        limit = self.shards[0].info.vocab_size
        if rows.max(initial=0) >= limit:
            bad_row = int(np.argmax((rows >= limit).any(axis=1)))
            raise ShardError(self._out_of_vocabulary_message(rows[bad_row], indices[bad_row], starts[bad_row], limit))
        return rows

    def _out_of_vocabulary_message(
        self, row: NDArray[np.unsignedinteger[Any]], index: int, start: int, limit: int
    ) -> str:
        """Return the message about the first id of a row that is outside the vocabulary."""
        position = int(np.argmax(row >= limit))
        shard_number, position_in_shard = self.stream.locate(start + position)
        location = f"token {position_in_shard} of {self.shards[shard_number].name}"
        return (
            f"sample {index} holds the id {row[position]}, {location}: ids must be below {limit}, the size of the "
            "vocabulary; the shard is damaged, so prepare it again"
        )

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """The fingerprint, which covers the shards' metadata and some windows of tokens in each.  Raises ShardError."""
        content = self.known_content or sample_content(self.shards)
        return Fingerprint(len(self), len(self.shards), self.stream.num_tokens, content)


def sample_content(shards: Sequence[Shard]) -> str:
    """Return a digest of the shards' sizes and of windows of their tokens; see `_NUM_FINGERPRINT_WINDOWS`.

    An insertion or deletion anywhere shifts all later tokens, so one window of each shard is at its end.
    """
    digest = hashlib.blake2b(digest_size=8)
    windows_per_shard = max(1, _NUM_FINGERPRINT_WINDOWS // len(shards))
    for shard in shards:
        info = shard.info
        digest.update(f"{info.num_tokens} {info.num_documents} {info.num_bytes};".encode())
        count = min(info.num_tokens, _FINGERPRINT_WINDOW_TOKENS)
        last_start = info.num_tokens - count
        starts = {last_start - last_start * window // windows_per_shard for window in range(windows_per_shard)}
        for start in sorted(starts):
            digest.update(shard.read(start, count).tobytes())
    return digest.hexdigest()


# -- fingerprints -----------------------------------------------------------------------------------------------------

_KEYS_ALLOWING_OTHER_DATA = frozenset({"data", "data.path", "data.source", "data.tokenizer", "data.bos"})
"""Keys in `checkpoint.allow_changes` that permit different data."""

_KEYS_ALLOWING_OTHER_WINDOWS = frozenset(
    {"data.seq_len", "data.documents", "data.fit", "data.holdout", "data.eval_path"}
)
"""Keys in `checkpoint.allow_changes` that permit different samples cut from the same data."""


@dataclass(frozen=True)
class Fingerprint:
    """Identifies the samples of a source.  Equal on all ranks; independent of the sample order.

    content: a digest of all or part of the underlying data, or "" if unknown.
    sources: for a mixture, the fingerprint of each source by name.
    """

    num_samples: int
    num_shards: int = 0
    num_tokens: int = 0
    content: str = ""
    sources: Mapping[str, Fingerprint] = field(default_factory=dict)

    def to_state(self) -> dict[str, Any]:
        """Return the plain values to store in a checkpoint."""
        state = {name: value for name, value in vars(self).items() if name != "sources"}
        sources = {name: source.to_state() for name, source in self.sources.items()}
        return {**state, "sources": sources} if sources else state

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Fingerprint:
        """Return the fingerprint with the values that `to_state` returned."""
        sources = {name: cls.from_state(source) for name, source in state.get("sources", {}).items()}
        return cls(state["num_samples"], state["num_shards"], state["num_tokens"], state["content"], sources)

    def changes(self, stored: Mapping[str, Any], allowed: Collection[str]) -> tuple[list[str], list[str]]:
        """Compare this fingerprint with a stored one.

        stored: the values that `to_state` returned.
        allowed: configuration keys and sections that may change.

        Returns two lists with a line per change: changes that forbid resuming, and changes that `allowed` permits.
        """
        before = Fingerprint.from_state(stored)
        if not (before.sources and self.sources):
            return self._changes(before, allowed, "data")
        refused, reported = [], []
        for name in sorted({*before.sources, *self.sources}):
            current, earlier = self.sources.get(name, Fingerprint(0)), before.sources.get(name, Fingerprint(0))
            refused_for_source, reported_for_source = current._changes(earlier, allowed, f"data, source {name}")
            refused += refused_for_source
            reported += reported_for_source
        return refused, reported

    def _changes(self, before: Fingerprint, allowed: Collection[str], name: str) -> tuple[list[str], list[str]]:
        if before == self:
            return [], []
        is_same_data = dataclasses.replace(before, num_samples=self.num_samples) == self
        if is_same_data and not _KEYS_ALLOWING_OTHER_WINDOWS.isdisjoint(allowed):
            return [], []  # the comparison of the configurations reports this change
        if is_same_data or not self.num_shards or not before.num_shards:
            size_now, size_before = f"{self.num_samples} samples", f"{before.num_samples} samples"
        else:
            size_now, size_before = self._size(), before._size()
        now = "the same number now, with different content" if size_now == size_before else f"{size_now} now"
        change = f"{name}: {size_before} in the checkpoint, {now}"
        line = f"{change}; the saved position no longer refers to the same samples"
        if not _KEYS_ALLOWING_OTHER_DATA.isdisjoint(allowed):
            return [], [f"{line} (allowed by checkpoint.allow_changes)"]
        return [f"{line} (allow it: checkpoint.allow_changes=[data])"], []

    def _size(self) -> str:
        return f"{self.num_shards} shard{'' if self.num_shards == 1 else 's'} of {self.num_tokens} tokens"
