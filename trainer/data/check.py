"""Checks data for broken shards, duplicate documents, and held-out text that also occurs in the training data.

Documents are compared by a hash of all their tokens.  Held-out text in the training data is found by comparing the
32-grams of tokens at every position of the held-out data with those at every 16th position of the training data.  This
finds every held-out sample that shares a run of 47 or more tokens with the training data.  Repetitions of a single
token and tokens with ignored targets, such as padding, do not count.  All hash matches are verified token by token.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.config import DataSection
from trainer.data.opening import open_source
from trainer.data.shards import Shard, ShardError
from trainer.data.source import IGNORE, Source, as_mapping
from trainer.data.tokenizer import tokenizer_of

Reporter = Callable[[str], None]
Hashes = NDArray[np.uint64]

_GRAM_TOKENS = 32
"""Number of tokens in an n-gram."""
_STRIDE = 16
"""Distance in tokens between the starts of consecutive n-grams of the training data."""
_CHUNK_TOKENS = 1 << 16
"""Approximate number of tokens to read at once: few enough for the hashing to stay within the CPU's caches."""
_MAX_LISTED = 10
"""Maximum number of duplicates, and of held-out samples found in the training data, to list; all are counted."""


def check_data(data: DataSection, vocab_size: int | None, report: Reporter) -> int:
    """Report the problems in the data, and return their number.  If shards are broken, nothing else is checked.

    vocab_size: see `open_source`.
    report: called with each line of the report.

    Raises UserError as `open_source` does, but broken local shards that the settings name are reported instead.
    """
    opened = _open_named_shards(data)
    shards = {name: shard_or_error for name, shard_or_error in opened.items() if isinstance(shard_or_error, Shard)}
    broken = [str(shard_or_error) for shard_or_error in opened.values() if isinstance(shard_or_error, ShardError)]
    broken += filter(None, map(_find_damage, shards.values()))
    train, held_out = None, None
    if not broken:
        train, held_out = open_source(data, vocab_size, "train"), open_source(data, vocab_size, "eval")
        all_shards = [shard for source in (train, held_out) if source is not None for shard in source.shards]
        unlisted = {shard.name: shard for shard in all_shards if shard.name not in shards}
        broken += filter(None, map(_find_damage, unlisted.values()))
        shards = {shard.name: shard for shard in all_shards}
    for text in broken:
        report(f"broken: {text}")
    if broken or train is None:
        return len(broken)
    num_tokens = sum(shard.info.num_tokens for shard in shards.values())
    report(f"{_plural(len(shards), 'shard')}, {num_tokens:,} tokens: none broken")
    num_duplicates = _report_duplicates(list(shards.values()), report)
    if held_out is None:
        report("nothing is held out")
        return num_duplicates
    return num_duplicates + _report_leaks(train, held_out, data, report)


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


# -- shards -----------------------------------------------------------------------------------------------------------


def _open_named_shards(data: DataSection) -> dict[str, Shard | ShardError]:
    """Return, by file name, each local shard that the settings name, or the error if it cannot be opened."""
    values = [value for value in (data.path, data.eval_path) if value is not None]
    paths = [
        path.removeprefix("file://")
        for value in values
        for path in (value.values() if isinstance(value, Mapping) else [value])
    ]
    opened: dict[str, Shard | ShardError] = {}
    names = {name for path in paths for name in glob.glob(os.path.expanduser(path), recursive=True)}
    folders = [name for name in names if os.path.isdir(name)]
    names.update(name for folder in folders for name in glob.glob(os.path.join(glob.escape(folder), "*.bin")))
    for name in sorted(names):
        if name.endswith(".bin") and Path(name).with_suffix(".json").exists():
            try:
                opened[name] = Shard(Path(name))
            except ShardError as error:
                opened[name] = error
    return opened


def _find_damage(shard: Shard) -> str | None:
    """Return a message about the first problem in a shard's content, or None."""
    try:
        shard.verify()
        shard.read_offsets()
        for start in range(0, shard.info.num_tokens, _CHUNK_TOKENS):
            tokens = shard.read(start, min(_CHUNK_TOKENS, shard.info.num_tokens - start))
            if tokens.max(initial=0) >= shard.info.vocab_size:
                position = int(np.argmax(tokens >= shard.info.vocab_size))
                return f"{shard.name}: token {start + position} is {tokens[position]}, beyond the vocabulary"
    except ShardError as error:
        return str(error)
    return None


# -- hashes -----------------------------------------------------------------------------------------------------------
# A polynomial hash: the hash of tokens t_0 t_1 ... is the sum of random_table[t_i] * base**i, modulo 2**64.

_BASE = 0x9E3779B97F4A7C15
_INVERSE = pow(_BASE, -1, 2**64)


def _powers(base: int, count: int) -> Hashes:
    """Return base**0 to base**(count - 1), modulo 2**64."""
    powers = np.full(count, base, dtype=np.uint64)
    powers[0] = 1
    return np.multiply.accumulate(powers)


class _Hasher:
    """Hashes 32-grams of tokens, and documents."""

    def __init__(self, vocab_size: int) -> None:
        self._random_table: Hashes = np.random.Philox(key=vocab_size).random_raw(vocab_size)
        self._powers, self._inverses = _powers(_BASE, 1 << 12), _powers(_INVERSE, 1 << 12)

    def _terms(self, tokens: NDArray[Any]) -> Hashes:
        if len(tokens) > len(self._powers):
            self._powers, self._inverses = _powers(_BASE, 2 * len(tokens)), _powers(_INVERSE, 2 * len(tokens))
        terms = self._random_table.take(tokens)
        terms *= self._powers[: len(tokens)]
        return terms

    def grams(self, tokens: NDArray[Any]) -> Hashes:
        """Return the hash of the 32-gram that starts at each token, shape (len(tokens) - 31,)."""
        sums = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(self._terms(tokens))])
        hashes = sums[_GRAM_TOKENS:] - sums[:-_GRAM_TOKENS]
        return hashes * self._inverses[: len(hashes)]

    def strided_grams(self, tokens: NDArray[Any]) -> Hashes:
        """Return the hashes of the 32-grams that start at every 16th token."""
        num_strides = len(tokens) // _STRIDE
        stride_sums = np.add.reduceat(
            self._terms(tokens)[: num_strides * _STRIDE], np.arange(0, num_strides * _STRIDE, _STRIDE)
        )
        return (stride_sums[:-1] + stride_sums[1:]) * self._inverses[: (num_strides - 1) * _STRIDE : _STRIDE]

    def documents(self, shard: Shard, starts: NDArray[np.int64]) -> Hashes:
        """Return the hash of each document.

        starts: the offset at which each document starts; the last document ends with the shard.
        """
        hashes = np.zeros(len(starts), dtype=np.uint64)
        for first in range(0, shard.info.num_tokens, _CHUNK_TOKENS):
            terms = self._terms(shard.read(first, min(_CHUNK_TOKENS, shard.info.num_tokens - first)))
            first_document = int(np.searchsorted(starts, first, side="right")) - 1
            stop_document = int(np.searchsorted(starts, first + len(terms)))
            sums = np.add.reduceat(terms, np.maximum(starts[first_document:stop_document] - first, 0))
            hashes[first_document:stop_document] += sums * np.uint64(pow(_BASE, first, 2**64))
        # Divide by base**start, bit by bit of all starts, so that a hash does not depend on where the document lies.
        for bit in range(int(starts.max(initial=0)).bit_length()):
            hashes[(starts >> bit) & 1 == 1] *= np.uint64(pow(_INVERSE, 1 << bit, 2**64))
        return hashes


# -- duplicate documents ----------------------------------------------------------------------------------------------


def _report_duplicates(shards: list[Shard], report: Reporter) -> int:
    """Report identical documents across all shards, and return the number of documents that repeat an earlier one."""
    starts, hashes = [], []
    for shard in shards:
        offsets = np.unique(shard.read_offsets())  # ignores empty documents
        starts.append(offsets)
        hashes.append(_Hasher(shard.info.vocab_size).documents(shard, offsets[:-1]))
    if not shards:
        return 0
    numbers = np.cumsum([0, *map(len, hashes)])
    all_hashes = np.concatenate(hashes)
    order = np.argsort(all_hashes, kind="stable")
    repeated = np.flatnonzero(all_hashes[order][1:] == all_hashes[order][:-1])

    def read(document: int) -> tuple[str, bytes]:
        shard = int(np.searchsorted(numbers, document, side="right")) - 1
        number = document - int(numbers[shard])
        start, end = starts[shard][number : number + 2].tolist()
        return f"document {number} of {shards[shard].name}", shards[shard].read(start, end - start).tobytes()

    pairs = ((read(int(order[position])), read(int(order[position + 1]))) for position in repeated)
    duplicates = [(first, second) for (first, first_text), (second, second_text) in pairs if first_text == second_text]
    for first, second in duplicates[:_MAX_LISTED]:
        report(f"duplicate: {second} is identical to {first}")
    more = f"; {_MAX_LISTED} are listed" if len(duplicates) > _MAX_LISTED else ""
    report(f"{_plural(len(all_hashes), 'document')}: {len(duplicates):,} duplicates{more}")
    return len(duplicates)


# -- held-out text in the training data -------------------------------------------------------------------------------


class _HeldOutIndex:
    """Index of the 32-grams in the held-out samples."""

    def __init__(self, source: Source) -> None:
        self.seq_len = source.seq_len
        tokens, ignored, step = [], [], max(1, _CHUNK_TOKENS // source.seq_len)
        for first in range(0, len(source), step):
            entries = as_mapping(source.batch(np.arange(first, min(len(source), first + step))))
            tokens.append(entries["tokens"].ravel())
            ignored.append(entries["targets"].ravel() == IGNORE)
        self.tokens = np.concatenate(tokens)
        grams = _Hasher(source.vocab_size).grams(self.tokens)
        # 32-grams with ignored targets, such as padding, and those of a single token are not indexed: many samples
        # contain them.
        is_indexed = _count_in_windows(np.concatenate(ignored), len(grams)) == 0
        is_indexed &= _count_in_windows(np.diff(self.tokens, append=-1) != 0, len(grams), _GRAM_TOKENS - 1) > 0
        positions = np.flatnonzero(is_indexed)
        order = np.argsort(grams[positions], kind="stable")
        self._grams, self._positions = grams[positions][order], positions[order]
        self._may_contain = np.zeros(1 << 24, dtype=bool)
        self._may_contain[self._grams >> np.uint64(40)] = True

    def find(self, grams: Hashes, tokens: NDArray[Any], skipped_samples: Container[int]) -> Iterator[tuple[int, int]]:
        """Yield the (training, held-out) token positions of matching 32-grams.

        grams: the hashes of the 32-grams that start at every 16th training token.
        skipped_samples: held-out samples to skip; the caller may add to them between items.
        """
        candidates = np.flatnonzero(self._may_contain[grams >> np.uint64(40)])
        firsts, ends = (np.searchsorted(self._grams, grams[candidates], side=side) for side in ("left", "right"))
        is_match = firsts < ends
        for candidate, first, end in zip(
            *(values[is_match].tolist() for values in (candidates, firsts, ends)), strict=True
        ):
            start = candidate * _STRIDE
            for position in self._positions[first:end].tolist():
                if position // self.seq_len in skipped_samples:
                    continue
                if np.array_equal(
                    self.tokens[position : position + _GRAM_TOKENS], tokens[start : start + _GRAM_TOKENS]
                ):
                    yield start, position

    def drop_samples(self, samples: Iterable[int]) -> None:
        """Remove the 32-grams of samples from the index: boilerplate would otherwise match millions of times."""
        is_dropped = np.zeros(len(self.tokens) // self.seq_len + 1, dtype=bool)
        is_dropped[list(samples)] = True
        is_remaining = ~is_dropped[self._positions // self.seq_len]
        self._grams, self._positions = self._grams[is_remaining], self._positions[is_remaining]


def _count_in_windows(flags: NDArray[np.bool_], count: int, width: int = _GRAM_TOKENS) -> NDArray[np.int64]:
    """Return the number of set flags in each of the first `count` windows of `width` tokens."""
    sums = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(flags)])
    return sums[width : width + count] - sums[:count]


def _report_leaks(train: Source, held_out: Source, data: DataSection, report: Reporter) -> int:
    """Report held-out samples that share text with the training data, and return their number."""
    index, leaks = _HeldOutIndex(held_out), dict[int, tuple[int, int]]()
    hasher, seq_len = _Hasher(train.vocab_size), train.seq_len
    overlap, step = -(-(_GRAM_TOKENS + _STRIDE) // seq_len), max(1, _CHUNK_TOKENS // seq_len)
    for first in range(0, len(train), step):
        tokens = train.read_tokens(first, min(len(train), first + step + overlap))
        if len(tokens) >= 2 * _STRIDE:
            num_before = len(leaks)
            for start, position in index.find(hasher.strided_grams(tokens), tokens, leaks):
                leaks[position // index.seq_len] = (first + start // seq_len, position)
            if len(leaks) > num_before:
                index.drop_samples(leaks)
    tokenizer = tokenizer_of(data) if leaks else None
    for sample, (train_sample, position) in sorted(leaks.items())[:_MAX_LISTED]:
        gram = index.tokens[position : position + _GRAM_TOKENS]
        text = (
            repr(tokenizer.decode(gram))
            if tokenizer is not None and tokenizer.name == train.tokenizer
            else " ".join(map(str, gram.tolist()))
        )
        report(f"leak: held-out sample {sample} shares text with training sample {train_sample}: {text}")
    more = f"; {_MAX_LISTED} are listed" if len(leaks) > _MAX_LISTED else ""
    report(f"{_plural(len(held_out), 'held-out sample')}: {len(leaks):,} share text with the training data{more}")
    return len(leaks)
