"""Sources: samples by their index.

A sample is `seq_len` tokens and, for each of them, the target: the token that comes next.  Sources know nothing of
the order in which samples are asked for, of ranks or of batches.  No torch here: opening a source is how the data
settings are checked, before anything is spawned.

Token shards are three files side by side:

    NAME.bin    the tokens, little-endian, uint8, uint16 or uint32 as the vocabulary needs
    NAME.idx    where documents start, and where the last one ends: uint64, one more than there are documents
    NAME.json   a `ShardInfo`: what the other two hold, and how long they must be
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import errno
import glob
import gzip
import hashlib
import json
import math
import os
import re
import secrets
import sys
import sysconfig
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from trainer.data.descriptors import SHARD_FILES, Version
from trainer.data.fingerprint import Fingerprint
from trainer.data.tokenizer import Tokenizer, find_tokenizer
from trainer.distributed.environment import file_limit
from trainer.errors import nearest, setting_error

if TYPE_CHECKING:
    from trainer.config import DataSection

IGNORE = -100
"""The target that counts for nothing: what `torch.nn.functional.cross_entropy` ignores unless told otherwise."""

Split: TypeAlias = Literal["train", "eval"]


class Source(ABC):
    """Samples by their index.

    seq_len: tokens of one sample.
    vocab_size: every token id is below it.
    tokenizer: the name of the tokenizer that made the tokens; None for those that no text stands behind.
    bytes_per_token: bytes of raw text for each target, when every sample is read once; None without text.
    checks_ids: whether `batch` sees to it that no id is beyond the vocabulary; else the loader does.
    """

    seq_len: int
    vocab_size: int
    tokenizer: str | None = None
    bytes_per_token: float | None = None
    checks_ids: bool = False

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def batch(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return tokens and targets of the samples at `indices`, each of shape (len(indices), seq_len).

        Targets that count for nothing are IGNORE.  Index -1 gives a sample whose targets are all ignored.
        """

    @property
    def fingerprint(self) -> Fingerprint:
        """Which samples there are, kept with a run's position in them: a run does not go on in others unasked.

        By default their number alone.  `content` may be any text that changes with them.
        """
        return Fingerprint(len(self))

    def bits_per_byte(self, loss: float) -> float | None:
        """Return the bits for each byte of raw text that a mean `loss` (nats a target) amounts to, or None."""
        return None if self.bytes_per_token is None else loss / math.log(2) / self.bytes_per_token


@overload
def open_source(data: DataSection, vocab_size: int | None, split: Literal["train"]) -> Source: ...


@overload
def open_source(data: DataSection, vocab_size: int | None, split: Split) -> Source | None: ...


def open_source(data: DataSection, vocab_size: int | None, split: Split) -> Source | None:
    """Return the source that the settings name, or None if they hold nothing out and `split` is `eval`.

    Token shards without `data.eval_path` hold out their last windows, a share of `data.holdout`.

    `vocab_size` is the model's; None if the model has none to compare with.  Raises UserError if the data cannot be
    read, are too few for one sample, or have ids that the model has no room for.
    """
    if data.source == "synthetic":
        return SyntheticSource(data.seq_len, vocab_size or 256, data.seed, split)
    if data.source == "stdlib":
        shard = StdlibCorpus().shard(split, find_tokenizer(data.tokenizer), data.cache_dir)
        key, setting, source = "data.source", "stdlib", TokenSource([shard], data.seq_len, data.pack)
    elif split == "eval" and data.eval_path is not None:
        key, setting, source = "data.eval_path", data.eval_path, _open_shards(data, split)
    else:
        key, setting, source = "data.path", data.path or "", _open_shards(data, "train")
    if source.num_targets < 1:
        raise setting_error(key, setting, "holds no target: a sample needs two tokens of one document")
    if split == "train" and data.pack and source.num_targets < data.seq_len:
        rule = f"one sample needs {data.seq_len + 1} tokens, {key}={setting} holds {source.num_targets + 1}"
        raise setting_error("data.seq_len", data.seq_len, rule, source.num_targets)
    if vocab_size is not None and source.vocab_size > vocab_size:
        rule = f"the ids of {key}={setting} (tokenizer {source.tokenizer}) need at least {source.vocab_size}"
        raise setting_error("model.vocab_size", vocab_size, rule, source.vocab_size)
    if data.source == "tokens" and data.eval_path is None:
        return _part_of(source, data.holdout or 0.0, split)
    return source


def _part_of(source: TokenSource, holdout: float, split: Split) -> Source | None:
    """Return what is trained on, or what is held out: the last windows, at least one where there are two."""
    num_held_out = min(len(source) - 1, math.ceil(holdout * len(source)))
    if not num_held_out:
        return source if split == "train" else None
    first = len(source) - num_held_out
    return Part(source, 0, first) if split == "train" else Part(source, first, len(source))


class Part(Source):
    """Samples `start` to `stop` of another source."""

    def __init__(self, whole: Source, start: int, stop: int) -> None:
        self.seq_len, self.vocab_size, self.tokenizer = whole.seq_len, whole.vocab_size, whole.tokenizer
        self.bytes_per_token, self.checks_ids = whole.bytes_per_token, whole.checks_ids
        self._whole, self._start, self._length = whole, start, stop - start

    def __len__(self) -> int:
        return self._length

    def batch(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return tokens and targets of the samples at `indices`; see `Source.batch`."""
        assert np.size(indices) == 0 or np.max(indices) < self._length, (indices, self._length)
        return self._whole.batch(np.where(np.asarray(indices) < 0, -1, np.asarray(indices) + self._start))

    @property
    def fingerprint(self) -> Fingerprint:
        """That of the whole, with the number of these samples."""
        return dataclasses.replace(self._whole.fingerprint, num_samples=len(self))


# ---------------------------------------------------------------------------------------------------------------
# Generated


class SyntheticSource(Source):
    """Random patterns of 4 to 32 tokens, each repeated until its sample is full: a model learns to copy.

    A sample is a function of seed, split and index alone.  It is made from the raw output of Philox (Salmon et al.
    2011, "Parallel random numbers: as easy as 1, 2, 3"), which numpy keeps the same for ever.
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


# ---------------------------------------------------------------------------------------------------------------
# Token shards


SUFFIXES = (".bin", ".idx", ".json")
"""The files of a shard, metadata last."""


_NUM_PLACES, _PLACE = 64, 2048
"""How many places a fingerprint looks at, and how many tokens at each."""


class ShardError(Exception):
    """A token shard is missing, damaged, or of another kind than it should be; says which and why."""


@dataclass(frozen=True)
class ShardInfo:
    """What NAME.json says about a token shard.  `num_bytes` counts the raw text, `end_id` ends each document."""

    dtype: str
    vocab_size: int
    tokenizer: str
    end_id: int
    num_tokens: int
    num_documents: int
    num_bytes: int
    format: int = 1

    @property
    def kind(self) -> tuple[str, int, str, int]:
        """What shards that are read together must share."""
        return self.dtype, self.vocab_size, self.tokenizer, self.end_id


class Shard:
    """A token shard that has been checked against its metadata.

    Its files are opened when they are read, by whichever process reads them: a Shard can be sent to another one.
    Raises ShardError.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.info = _read_info(path.with_suffix(".json"))
        self._file = _check_size(path, self.info.num_tokens * self.dtype.itemsize)
        _check_size(path.with_suffix(".idx"), (self.info.num_documents + 1) * 8)

    @property
    def dtype(self) -> np.dtype[Any]:
        """That of its tokens: unsigned, little-endian."""
        return np.dtype(self.info.dtype).newbyteorder("<")

    def read(self, start: int, count: int) -> NDArray[np.unsignedinteger[Any]]:
        """Return `count` tokens from `start` on.  Raises ShardError if they are no longer there."""
        found = np.empty(count, self.dtype)
        self.read_into(found, start)
        return found

    def read_into(self, found: NDArray[np.unsignedinteger[Any]], start: int) -> None:
        """Fill an array of the shard's dtype, in one piece, with tokens from `start` on.  Raises ShardError."""
        offset = start * found.itemsize
        try:
            count = SHARD_FILES.read_into(found, self._file, offset)
        except OSError as error:
            raise ShardError(f"{self.path} cannot be read ({_reason(error)})") from error
        if count < found.nbytes:
            size, expected = offset + count, self.info.num_tokens * found.itemsize
            with contextlib.suppress(OSError):
                size = self.path.stat().st_size
            raise ShardError(f"{self.path} has been cut short: it has {size} bytes, its metadata say {expected}")

    def read_offsets(self) -> NDArray[np.int64]:
        """Return where each document starts, and where the last one ends."""
        offsets = np.fromfile(self.path.with_suffix(".idx"), dtype="<u8").astype(np.int64)
        if offsets[0] != 0 or offsets[-1] != self.info.num_tokens or np.any(np.diff(offsets) < 0):
            raise ShardError(f"{self.path.with_suffix('.idx')} is damaged: its documents do not make up the tokens")
        return offsets


class ShardWriter:
    """Writes one token shard, in constant memory.

    Until `publish` nothing stands under the shard's names.  Processes that write the same shard do not disturb each
    other.
    """

    def __init__(self, path: Path, tokenizer: Tokenizer) -> None:
        self.path, self._tokenizer = path, tokenizer
        self._dtype = np.dtype(_find_dtype(tokenizer.vocab_size))
        self._attempt = f"{os.getpid()}-{secrets.token_hex(4)}.tmp"
        self._files = {suffix: open(self._temporary(suffix), "wb") for suffix in SUFFIXES}  # noqa: SIM115
        self._files[".idx"].write(bytes(8))
        self.num_tokens = self.num_documents = self.num_bytes = 0
        self._has_begun = False

    def write(self, ids: NDArray[np.integer[Any]], num_bytes: int) -> None:
        """Append tokens to the current document; `num_bytes` is the size of the text that they stand for."""
        if not self._has_begun:
            self._has_begun = True
            self._append(np.array(self._tokenizer.start_ids, dtype=self._dtype))
        self._append(ids)
        self.num_bytes += num_bytes

    def _append(self, ids: NDArray[np.integer[Any]]) -> None:
        self._files[".bin"].write(ids.astype(self._dtype.newbyteorder("<"), copy=False).tobytes())
        self.num_tokens += len(ids)

    def end_document(self) -> None:
        """End the current document, which may be empty, as its tokenizer does."""
        self.write(np.array(self._tokenizer.end_ids, dtype=self._dtype), num_bytes=0)
        self._has_begun = False
        self.num_documents += 1
        self._files[".idx"].write(self.num_tokens.to_bytes(8, "little"))

    def close(self) -> None:
        """Bring everything to disk, still under temporary names."""
        info = ShardInfo(
            dtype=self._dtype.name,
            vocab_size=self._tokenizer.vocab_size,
            tokenizer=self._tokenizer.name,
            end_id=self._tokenizer.end_id,
            num_tokens=self.num_tokens,
            num_documents=self.num_documents,
            num_bytes=self.num_bytes,
        )
        self._files[".json"].write(json.dumps(dataclasses.asdict(info), indent=1).encode() + b"\n")
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()

    def publish(self) -> None:
        """Rename the files to their own names, metadata last: without it a shard is refused."""
        for suffix in SUFFIXES:
            os.replace(self._temporary(suffix), self.path.with_suffix(suffix))

    def discard(self) -> None:
        """Remove what has not been published."""
        for suffix, file in self._files.items():
            file.close()
            self._temporary(suffix).unlink(missing_ok=True)

    def _temporary(self, suffix: str) -> Path:
        return self.path.with_name(f".{self.path.stem}{suffix}.{self._attempt}")


class TokenSource(Source):
    """Windows over the tokens of one or several shards, read as one stream.

    With `pack`, sample i holds tokens i * seq_len to (i + 1) * seq_len of the stream, across documents and shards, so
    that every token but the first is a target once.  Without, windows start anew with each document, and a document's
    first token is no target.  Where a window ends early, the rest is end tokens whose targets are ignored.
    """

    checks_ids = True

    def __init__(self, shards: Sequence[Shard], seq_len: int, pack: bool) -> None:
        info = shards[0].info
        self.seq_len, self.vocab_size, self.tokenizer = seq_len, info.vocab_size, info.tokenizer
        self._shards, self._padding, self._dtype = list(shards), info.end_id, shards[0].dtype
        self._may_be_beyond = info.vocab_size <= np.iinfo(self._dtype).max
        self._shard_starts: list[int] = np.cumsum([0, *(shard.info.num_tokens for shard in shards)]).tolist()
        # Windows lie in segments: documents, or all there is.
        self._segment_starts = self._find_documents() if not pack else np.array([0, self._shard_starts[-1]])
        targets = np.maximum(np.diff(self._segment_starts) - 1, 0)
        self._first_windows = np.concatenate([[0], np.cumsum(-(-targets // seq_len))])
        self.num_targets = int(targets.sum())
        if self.num_targets:
            self.bytes_per_token = sum(shard.info.num_bytes for shard in shards) / self.num_targets

    def __len__(self) -> int:
        return int(self._first_windows[-1])

    def batch(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return tokens and targets of the samples at `indices`; see `Source.batch`."""
        indices = np.asarray(indices, dtype=np.int64)
        assert indices.size == 0 or -1 <= indices.min() <= indices.max() < len(self), (indices, len(self))
        starts, counts = self._find_windows(indices)
        windows = np.empty((len(indices), self.seq_len + 1), self._dtype)
        for row, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
            try:
                self._read(windows[row, : count + 1], start)
            except ShardError as error:
                raise ShardError(f"sample {indices[row]} cannot be read: {error}") from error
            if count < self.seq_len:
                windows[row, count + 1 :] = self._padding
        if self._may_be_beyond and windows.max(initial=0) >= self.vocab_size:
            raise ShardError(self._beyond(windows, indices, starts))
        tokens, targets = windows[:, :-1].astype(np.int64), windows[:, 1:].astype(np.int64)
        if np.any(counts < self.seq_len):
            is_padding = np.arange(self.seq_len) >= counts[:, None]
            tokens[is_padding], targets[is_padding] = self._padding, IGNORE
        return tokens, targets

    def _beyond(
        self, windows: NDArray[np.unsignedinteger[Any]], indices: NDArray[np.int64], starts: NDArray[np.int64]
    ) -> str:
        """Return what to say of the first id that is beyond the vocabulary."""
        row, position = (int(place) for place in np.argwhere(windows >= self.vocab_size)[0])
        number, first = self._locate(int(starts[row]) + position)
        place = f"token {first} of {self._shards[number].path}"
        return (
            f"sample {indices[row]} holds the id {windows[row, position]}, {place}: "
            f"ids must be below {self.vocab_size}, the size of the vocabulary; the shard is damaged, make it again"
        )

    def _find_windows(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the first token and the number of targets of each window; none for index -1."""
        valid = np.maximum(indices, 0)
        segments = np.searchsorted(self._first_windows, valid, side="right") - 1
        starts = self._segment_starts[segments] + (valid - self._first_windows[segments]) * self.seq_len
        counts = np.minimum(self.seq_len, self._segment_starts[segments + 1] - 1 - starts)
        return starts, np.where(indices < 0, 0, counts)

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """What the shards say of themselves, and the content of some places in each.  Raises ShardError."""
        content = _sample_content(self._shards)
        return Fingerprint(len(self), len(self._shards), self._shard_starts[-1], content)

    def _locate(self, start: int) -> tuple[int, int]:
        """Return the shard that a token of the stream lies in, and its place there."""
        number = bisect.bisect_right(self._shard_starts, start) - 1
        return number, start - self._shard_starts[number]

    def _read(self, found: NDArray[np.unsignedinteger[Any]], start: int) -> None:
        """Fill an array with tokens of the stream from `start` on, which may lie in several shards."""
        number, first = self._locate(start)
        filled = 0
        while filled < len(found):
            shard = self._shards[number]
            count = min(len(found) - filled, shard.info.num_tokens - first)
            shard.read_into(found[filled : filled + count], first)
            filled, number, first = filled + count, number + 1, 0

    def _find_documents(self) -> NDArray[np.int64]:
        starts = [
            shard.read_offsets()[:-1] + first
            for shard, first in zip(self._shards, self._shard_starts[:-1], strict=True)
        ]
        return np.concatenate([*starts, self._shard_starts[-1:]])


def _sample_content(shards: Sequence[Shard]) -> str:
    """Return a digest of 64 places, spread over the shards with one in each at least, and of their sizes.

    Whatever changes in the middle of a document moves what comes after it, so that one place in each is its end.
    """
    digest = hashlib.blake2b(digest_size=8)
    num_places = max(1, _NUM_PLACES // len(shards))
    for shard in shards:
        info = shard.info
        digest.update(f"{info.num_tokens} {info.num_documents} {info.num_bytes};".encode())
        count = min(info.num_tokens, _PLACE)
        last = info.num_tokens - count
        for start in sorted({last - last * place // num_places for place in range(num_places)}):
            digest.update(shard.read(start, count).tobytes())
    return digest.hexdigest()


def _open_shards(data: DataSection, split: Split) -> TokenSource:
    """Return the source over the shards that data.path or data.eval_path names.  Raises UserError."""
    train_paths = _find_paths("data.path", data.path)
    eval_paths = _find_paths("data.eval_path", data.eval_path) if data.eval_path else []
    shared = sorted({*train_paths} & {*eval_paths})
    if shared and data.path != data.eval_path:  # the same setting twice is meant, a glob that reaches too far is not
        rest = [path for path in train_paths if path not in shared]
        legal = re.sub(r"\d{5}\.bin$", "?????.bin", str(rest[0])) if rest else None
        raise setting_error("data.path", data.path, f"takes in {shared[0]}, which data.eval_path holds out", legal)
    key, setting, paths = ("data.path", data.path, train_paths)
    if split == "eval":
        key, setting, paths = ("data.eval_path", data.eval_path, eval_paths)
    try:
        shards = [Shard(path) for path in paths]
        for other in [*shards, *([Shard(train_paths[0])] if split == "eval" else [])]:
            if other.info.kind != shards[0].info.kind:
                raise ShardError(
                    f"shards that go together must be made alike: {shards[0].path} by tokenizer "
                    f"{shards[0].info.tokenizer} ({shards[0].info.vocab_size} ids, {shards[0].info.dtype}), "
                    f"{other.path} by {other.info.tokenizer} ({other.info.vocab_size} ids, {other.info.dtype})"
                )
        return TokenSource(shards, data.seq_len, data.pack)
    except ShardError as error:
        fix = "make shards from text with python -m trainer.prepare"
        raise setting_error(key, setting, str(error), fix=fix) from error


def _find_paths(key: str, setting: str | None) -> list[Path]:
    """Return the .bin files that a path or glob names, sorted.  Raises UserError if there are none."""
    if not setting:
        raise setting_error(key, setting, "data.source=tokens needs the path or glob of token shards")
    pattern = os.path.expanduser(setting)
    if os.path.isdir(pattern):
        rule = "is a folder; name the shards in it"
        raise setting_error(key, setting, rule, example=os.path.join(setting, "*.bin"))
    names = [pattern] if os.path.isfile(pattern) else glob.glob(pattern, recursive=True)
    paths = sorted(Path(name) for name in names if name.endswith(".bin"))
    if paths:
        return paths
    rule = "matches no token shard, whose name ends in .bin" if names else "no such file, and no glob that matches one"
    there = sorted(glob.glob(os.path.join(glob.escape(os.path.dirname(pattern)), "*.bin")))
    meant = nearest(pattern, there)
    raise setting_error(key, setting, rule, meant=meant, example=None if meant else next(iter(there), None))


def _read_info(path: Path) -> ShardInfo:
    try:
        info = ShardInfo(**json.loads(path.read_bytes()))
    except OSError as error:
        raise ShardError(f"the metadata {path} cannot be read ({error.strerror})") from error
    except (ValueError, TypeError) as error:
        raise ShardError(f"{path} is no metadata of a token shard ({error})") from error
    for declared in dataclasses.fields(ShardInfo):
        value = getattr(info, declared.name)
        if type(value).__name__ != declared.type:
            raise ShardError(f"{path} is damaged: {declared.name} is {value!r}")
    if info.format != ShardInfo.format:
        raise ShardError(f"{path} has format {info.format}, this version reads format {ShardInfo.format}")
    if info.dtype != _find_dtype(info.vocab_size) or info.num_tokens < 1 or info.num_documents < 1:
        raise ShardError(f"{path} is damaged: {info}")
    return info


def _check_size(path: Path, num_bytes: int) -> Version:
    """Return the file as it is now.  Raises ShardError unless it has as many bytes."""
    try:
        with open(path, "rb") as file:  # opened, not only looked at: it must be readable
            found = os.fstat(file.fileno())
    except OSError as error:
        raise ShardError(f"{path} cannot be read ({error.strerror})") from error
    if found.st_size != num_bytes:
        raise ShardError(f"{path} has {found.st_size} bytes, its metadata say {num_bytes}")
    return str(path), found.st_ino, found.st_mtime_ns


def _reason(error: OSError) -> str:
    limit = f"; `ulimit -n` is {file_limit()}" if error.errno in (errno.EMFILE, errno.ENFILE) else ""
    return f"{error.strerror}{limit}"


def _find_dtype(vocab_size: int) -> str:
    return "uint8" if vocab_size <= 2**8 else "uint16" if vocab_size <= 2**16 else "uint32"


# ---------------------------------------------------------------------------------------------------------------
# The standard library


class StdlibCorpus:
    """This Python's own source text: there wherever Python is, and the same for all ranks.

    Without its tests, and without what is generated: tables of encodings and the texts of `help()`.  About one file in
    twenty is held out, by a hash of its name.
    """

    _LEFT_OUT = frozenset(
        ["test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages", "dist-packages", "__pycache__"]
    )

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or Path(sysconfig.get_path("stdlib"))
        self._names = sorted(self._walk())
        if not all(self._find_names(split) for split in ("train", "eval")):
            rule = f"this Python has no source files of its standard library in {self._folder}"
            raise setting_error("data.source", "stdlib", rule, "synthetic")

    def documents(self, split: Split) -> list[bytes]:
        """Return the files of one split as they are, in the order of their names."""
        try:
            return [(self._folder / name).read_bytes() for name in self._find_names(split)]
        except OSError as error:
            rule = f"{error.filename} cannot be read ({error.strerror})"
            raise setting_error("data.source", "stdlib", rule, "synthetic") from error

    def shard(self, split: Split, tokenizer: Tokenizer, cache_dir: str | None) -> Shard:
        """Return the tokens of one split, a document a file: from the cache if it has them, else made and kept there.

        Any number of processes may do this at once.  Raises UserError if there is no folder to write to.
        """
        name = f"stdlib-{self._fingerprint(tokenizer)}-{split}.bin"
        folders = _find_cache_folders(cache_dir)
        for folder in folders:
            with contextlib.suppress(ShardError):  # absent, or cut short by whatever befell the disk: made again
                return Shard(folder / name)
        failure: OSError | None = None
        documents = self.documents(split)
        for folder in folders:
            try:
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                _write_shard(folder / name, tokenizer, documents)
            except OSError as error:
                failure = error
            else:
                return Shard(folder / name)
        rule = f"tokenized text cannot be kept there ({failure})" if failure else "no folder to keep tokenized text in"
        raise setting_error("data.cache_dir", cache_dir, rule, fix="name a folder that you can write to")

    def _walk(self) -> Iterator[str]:
        for folder, subfolders, names in os.walk(self._folder):
            subfolders[:] = [name for name in subfolders if name not in self._LEFT_OUT]
            for name in names:
                if name.endswith(".py"):
                    yield Path(folder, name).relative_to(self._folder).as_posix()

    def _find_names(self, split: Split) -> list[str]:
        return [name for name in self._names if _is_held_out(name) == (split == "eval")]

    def _fingerprint(self, tokenizer: Tokenizer) -> str:
        """Return a digest of all that the tokens depend on, without reading the files."""
        stats = [(name, (self._folder / name).stat()) for name in self._names]
        files = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
        content = json.dumps([ShardInfo.format, sys.version, str(self._folder), tokenizer.name, files])
        return hashlib.sha256(content.encode()).hexdigest()[:16]


def _is_held_out(name: str) -> bool:
    return hashlib.sha256(name.encode()).digest()[0] % 20 == 0


def _write_shard(path: Path, tokenizer: Tokenizer, documents: Sequence[bytes]) -> None:
    writer = ShardWriter(path, tokenizer)
    try:
        for text in documents:
            writer.write(tokenizer.encode(text), len(text))
            writer.end_document()
        writer.close()
        writer.publish()
    finally:
        writer.discard()


def _find_cache_folders(setting: str | None) -> list[Path]:
    """Return where tokenized text may be kept, best first.  What the user names is the only place."""
    if setting is not None:
        return [Path(setting).expanduser()]
    folders = []
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if os.path.isabs(base):
        folders.append(Path(base, "meshtrainer"))
    user = os.getuid() if hasattr(os, "getuid") else 0
    shared = Path(tempfile.gettempdir(), f"meshtrainer-{user}")
    if not os.path.lexists(shared) or (shared.lstat().st_uid == user and not shared.is_symlink()):
        folders.append(shared)  # unless somebody else has put something there
    return folders


def held_out_text(data: DataSection) -> bytes | None:
    """Return the raw text that is held out, to compare a model with other compressors; None unless it is stdlib's."""
    return b"".join(StdlibCorpus().documents("eval")) if data.source == "stdlib" else None


def gzip_bits_per_byte(text: bytes) -> float:
    """Return what `gzip -9` needs for each byte of `text`, in bits."""
    return 8 * len(gzip.compress(text, 9, mtime=0)) / len(text)
