"""Checks data for broken shards, duplicate documents, and held-out text that is also trained on.

Documents are compared by a hash of all their tokens.  Held-out text is searched for by 32-grams of tokens: every one
in the held-out data, and one in every 16 positions of the training data, so that no shared run of 47 tokens or more can
be missed.  All hash matches are verified token by token.
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

Tell = Callable[[str], None]
Hashes = NDArray[np.uint64]

_GRAM, _STRIDE = 32, 16
_CHUNK = 1 << 16
"""Tokens hashed at a time, few enough to stay in the CPU's caches."""
_MAX_LISTED = 10
"""How many findings of each kind are listed; all are counted."""


def check_data(data: DataSection, vocab_size: int | None, tell: Tell) -> int:
    """Report each problem in the data on one line through `tell`, and return the number of problems.

    Raises UserError if the settings do not name any data.
    """
    opened = _open_named_shards(data)
    shards = {name: found for name, found in opened.items() if isinstance(found, Shard)}
    broken = [str(found) for found in opened.values() if isinstance(found, ShardError)]
    broken += filter(None, map(_find_damage, shards.values()))
    train, held_out = None, None
    if not broken:
        train, held_out = open_source(data, vocab_size, "train"), open_source(data, vocab_size, "eval")
        of_both = [shard for source in (train, held_out) if source is not None for shard in source.shards]
        others = {shard.name: shard for shard in of_both if shard.name not in shards}
        broken += filter(None, map(_find_damage, others.values()))
        shards = {shard.name: shard for shard in of_both}
    for text in broken:
        tell(f"broken: {text}")
    if broken or train is None:
        return len(broken)
    num_tokens = sum(shard.info.num_tokens for shard in shards.values())
    tell(f"{_plural(len(shards), 'shard')}, {num_tokens:,} tokens: none broken")
    num_duplicates = _report_duplicates(list(shards.values()), tell)
    if held_out is None:
        tell("nothing is held out")
        return num_duplicates
    return num_duplicates + _report_leaks(train, held_out, data, tell)


def _plural(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


# -- shards -----------------------------------------------------------------------------------------------------------


def _open_named_shards(data: DataSection) -> dict[str, Shard | ShardError]:
    """Return the shards that the paths, globs and folders name, by file name; the error for those that do not open."""
    settings = [setting for setting in (data.path, data.eval_path) if setting is not None]
    paths = [
        path.removeprefix("file://")
        for each in settings
        for path in (each.values() if isinstance(each, Mapping) else [each])
    ]
    found: dict[str, Shard | ShardError] = {}
    names = {name for path in paths for name in glob.glob(os.path.expanduser(path), recursive=True)}
    folders = [name for name in names if os.path.isdir(name)]
    names.update(name for folder in folders for name in glob.glob(os.path.join(glob.escape(folder), "*.bin")))
    for name in sorted(names):
        if name.endswith(".bin") and Path(name).with_suffix(".json").exists():
            try:
                found[name] = Shard(Path(name))
            except ShardError as error:
                found[name] = error
    return found


def _find_damage(shard: Shard) -> str | None:
    """Return a message about the first problem in a shard's content, or None."""
    try:
        shard.verify()
        shard.read_offsets()
        for start in range(0, shard.info.num_tokens, _CHUNK):
            tokens = shard.read(start, min(_CHUNK, shard.info.num_tokens - start))
            if tokens.max(initial=0) >= shard.info.vocab_size:
                place = int(np.argmax(tokens >= shard.info.vocab_size))
                return f"{shard.name}: token {start + place} is {tokens[place]}, beyond the vocabulary"
    except ShardError as error:
        return str(error)
    return None


# -- hashes -----------------------------------------------------------------------------------------------------------
# A polynomial hash: that of tokens t_0 t_1 ... is the sum of mixed(t_i) * base**i, modulo 2**64.

_BASE = 0x9E3779B97F4A7C15
_INVERSE = pow(_BASE, -1, 2**64)


def _powers(base: int, count: int) -> Hashes:
    powers = np.full(count, base, dtype=np.uint64)
    powers[0] = 1
    return np.multiply.accumulate(powers)


def _random_table(vocab_size: int) -> Hashes:
    """Return a fixed pseudorandom number for each token id."""
    return np.random.Philox(key=vocab_size).random_raw(vocab_size)


class _Hasher:
    def __init__(self, vocab_size: int) -> None:
        self._random_table = _random_table(vocab_size)
        self._powers, self._inverses = _powers(_BASE, 1 << 12), _powers(_INVERSE, 1 << 12)

    def _terms(self, tokens: NDArray[Any]) -> Hashes:
        if len(tokens) > len(self._powers):
            self._powers, self._inverses = _powers(_BASE, 2 * len(tokens)), _powers(_INVERSE, 2 * len(tokens))
        terms = self._random_table.take(tokens)
        terms *= self._powers[: len(tokens)]
        return terms

    def grams(self, tokens: NDArray[Any]) -> Hashes:
        """Return the hashes of all 32-grams."""
        sums = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(self._terms(tokens))])
        found = sums[_GRAM:] - sums[:-_GRAM]
        return found * self._inverses[: len(found)]

    def strided_grams(self, tokens: NDArray[Any]) -> Hashes:
        """Return the hashes of the 32-grams that start at every 16th token."""
        whole = len(tokens) // _STRIDE
        parts = np.add.reduceat(self._terms(tokens)[: whole * _STRIDE], np.arange(0, whole * _STRIDE, _STRIDE))
        return (parts[:-1] + parts[1:]) * self._inverses[: (whole - 1) * _STRIDE : _STRIDE]

    def documents(self, shard: Shard, starts: NDArray[np.int64]) -> Hashes:
        """Return the hash of each document, given the documents' start offsets; the last one ends with the shard."""
        found = np.zeros(len(starts), dtype=np.uint64)
        for first in range(0, shard.info.num_tokens, _CHUNK):
            terms = self._terms(shard.read(first, min(_CHUNK, shard.info.num_tokens - first)))
            begin = int(np.searchsorted(starts, first, side="right")) - 1
            end = int(np.searchsorted(starts, first + len(terms)))
            sums = np.add.reduceat(terms, np.maximum(starts[begin:end] - first, 0))
            found[begin:end] += sums * np.uint64(pow(_BASE, first, 2**64))
        return found * _powers_at(_INVERSE, starts)


def _powers_at(base: int, exponents: NDArray[np.int64]) -> Hashes:
    """Return base**exponents, modulo 2**64."""
    found = np.ones(len(exponents), dtype=np.uint64)
    for bit in range(int(exponents.max(initial=0)).bit_length()):
        found[(exponents >> bit) & 1 == 1] *= np.uint64(pow(base, 1 << bit, 2**64))
    return found


# -- duplicate documents ----------------------------------------------------------------------------------------------


def _report_duplicates(shards: list[Shard], tell: Tell) -> int:
    """Report identical documents across all shards, and return how many documents repeat an earlier one."""
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
    again = np.flatnonzero(all_hashes[order][1:] == all_hashes[order][:-1])

    def read(document: int) -> tuple[str, bytes]:
        shard = int(np.searchsorted(numbers, document, side="right")) - 1
        number = document - int(numbers[shard])
        start, end = starts[shard][number : number + 2].tolist()
        return f"document {number} of {shards[shard].name}", shards[shard].read(start, end - start).tobytes()

    pairs = ((read(int(order[place])), read(int(order[place + 1]))) for place in again)
    same = [(first, second) for (first, text), (second, other) in pairs if text == other]
    for first, second in same[:_MAX_LISTED]:
        tell(f"twice: {second} is {first}")
    more = f", of which {_MAX_LISTED} are listed" if len(same) > _MAX_LISTED else ""
    tell(f"{_plural(len(all_hashes), 'document')}: {len(same):,} duplicates{more}")
    return len(same)


# -- held-out text that is trained on ---------------------------------------------------------------------------------


class _HeldOutIndex:
    """Index of the 32-grams in the held-out samples."""

    def __init__(self, source: Source) -> None:
        self.seq_len = source.seq_len
        tokens, ignored = zip(*_samples(source), strict=True)
        self.tokens = np.concatenate(tokens)
        grams = _Hasher(source.vocab_size).grams(self.tokens)
        # Ignore padding and repetitions of a single token, which are the same everywhere.
        is_indexed = _windows(np.concatenate(ignored), len(grams)) == 0
        is_indexed &= _windows(np.diff(self.tokens, append=-1) != 0, len(grams), _GRAM - 1) > 0
        places = np.flatnonzero(is_indexed)
        order = np.argsort(grams[places], kind="stable")
        self._grams, self._places = grams[places][order], places[order]
        self._may_contain = np.zeros(1 << 24, dtype=bool)
        self._may_contain[self._grams >> np.uint64(40)] = True

    def find(self, grams: Hashes, tokens: NDArray[Any], known: Container[int]) -> Iterator[tuple[int, int]]:
        """Yield (training, held-out) token positions of matching 32-grams.

        grams: the hashes of the training tokens' 32-grams at every 16th token.
        known: held-out samples to skip; the caller may add to them between items.
        """
        numbers = np.flatnonzero(self._may_contain[grams >> np.uint64(40)])
        firsts, ends = (np.searchsorted(self._grams, grams[numbers], side=side) for side in ("left", "right"))
        is_match = firsts < ends
        for number, first, end in zip(*(each[is_match].tolist() for each in (numbers, firsts, ends)), strict=True):
            start = number * _STRIDE
            for place in self._places[first:end].tolist():
                if place // self.seq_len in known:
                    continue
                if np.array_equal(self.tokens[place : place + _GRAM], tokens[start : start + _GRAM]):
                    yield start, place

    def drop_samples(self, samples: Iterable[int]) -> None:
        """Drop the 32-grams of some samples from the index: boilerplate would otherwise match millions of times."""
        is_dropped = np.zeros(len(self.tokens) // self.seq_len + 1, dtype=bool)
        is_dropped[list(samples)] = True
        is_kept = ~is_dropped[self._places // self.seq_len]
        self._grams, self._places = self._grams[is_kept], self._places[is_kept]


def _windows(flags: NDArray[np.bool_], count: int, width: int = _GRAM) -> NDArray[np.int64]:
    """Return the number of flags set in each window of `width` tokens, for the first `count` windows."""
    sums = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(flags)])
    return sums[width : width + count] - sums[:count]


def _samples(source: Source) -> Iterator[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
    """Yield the tokens of all samples in order, each with a mask of the ignored ones, in chunks."""
    step = max(1, _CHUNK // source.seq_len)
    for first in range(0, len(source), step):
        found = as_mapping(source.batch(np.arange(first, min(len(source), first + step))))
        yield found["tokens"].ravel(), found["targets"].ravel() == IGNORE


def _report_leaks(train: Source, held_out: Source, data: DataSection, tell: Tell) -> int:
    """Report held-out samples that share text with the training data, and return their number."""
    held, found = _HeldOutIndex(held_out), dict[int, tuple[int, int]]()
    hasher, seq_len = _Hasher(train.vocab_size), train.seq_len
    overlap, step = -(-(_GRAM + _STRIDE) // seq_len), max(1, _CHUNK // seq_len)
    for first in range(0, len(train), step):
        tokens = train.read_tokens(first, min(len(train), first + step + overlap))
        if len(tokens) >= 2 * _STRIDE:
            num_known = len(found)
            for start, place in held.find(hasher.strided_grams(tokens), tokens, found):
                found[place // held.seq_len] = (first + start // seq_len, place)
            if len(found) > num_known:
                held.drop_samples(found)
    tokenizer = tokenizer_of(data) if found else None
    for sample, (trained, place) in sorted(found.items())[:_MAX_LISTED]:
        piece = held.tokens[place : place + _GRAM]
        text = (
            repr(tokenizer.decode(piece))
            if tokenizer is not None and tokenizer.name == train.tokenizer
            else " ".join(map(str, piece.tolist()))
        )
        tell(f"leak: held-out sample {sample} shares text with training sample {trained}: {text}")
    more = f", of which {_MAX_LISTED} are listed" if len(found) > _MAX_LISTED else ""
    tell(f"{_plural(len(held_out), 'held-out sample')}: {len(found):,} share text with the training data{more}")
    return len(found)
