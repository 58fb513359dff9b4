"""Token shards: their files, written and read."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import errno
import functools
import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.data.descriptors import SHARD_FILES, Version
from trainer.data.tokenizer import Tokenizer
from trainer.distributed.environment import file_limit
from trainer.files import crc32
from trainer.stopping import add_partial, drop_partial

SUFFIXES = (".bin", ".idx", ".json")
"""The files of a shard, metadata last."""


class ShardError(Exception):
    """A token shard is missing, damaged, or of another kind than it should be; says which and why."""


@dataclass(frozen=True)
class ShardInfo:
    """The metadata of a token shard, NAME.json.  `num_bytes` counts the raw text, `end_id` ends each document."""

    dtype: str
    vocab_size: int
    tokenizer: str
    end_id: int
    num_tokens: int
    num_documents: int
    num_bytes: int
    format: int = 1
    checksum: str = ""
    """CRC-32 of the tokens and of the index, in hexadecimal; empty in shards of before there was one."""

    @property
    def kind(self) -> tuple[str, int, str, int]:
        """The properties that shards read together must share."""
        return self.dtype, self.vocab_size, self.tokenizer, self.end_id


_KINDS = [(declared.name, declared.type) for declared in dataclasses.fields(ShardInfo)]


class Shard:
    """A token shard that has been checked against its metadata.

    Its files are opened when they are read, by whichever process reads them: a Shard can be sent to another one.
    Raises ShardError.
    """

    is_elsewhere = False
    """Whether it is to be fetched before it can be read."""

    def __init__(self, path: str | Path) -> None:
        self.name = os.fspath(path)
        """Its path; of one that is elsewhere, its URL."""
        stem = os.path.splitext(self.name)[0]
        self.info = read_info(f"{stem}.json")
        self._file = check_size(self.name, self.info.num_tokens * self.dtype.itemsize)
        check_size(f"{stem}.idx", (self.info.num_documents + 1) * 8)

    @classmethod
    def listed(cls, name: str, info: ShardInfo) -> Shard:
        """Return the shard at the path `name` that has `info` by a manifest: its files are looked at, none is opened.

        Thousands take a fraction of a second.
        """
        shard = cls.__new__(cls)
        shard.name, shard.info = name, info
        shard._file = _look_at(name, info.num_tokens * shard.dtype.itemsize)
        _look_at(f"{name.removesuffix('.bin')}.idx", (info.num_documents + 1) * 8)
        return shard

    @property
    def path(self) -> Path:
        """The file of its tokens."""
        return Path(self.name)

    @property
    def dtype(self) -> np.dtype[Any]:
        """That of its tokens: unsigned, little-endian."""
        return _stored(self.info.dtype)

    def read(self, start: int, count: int) -> NDArray[np.unsignedinteger[Any]]:
        """Return `count` tokens from `start` on.  Raises ShardError if they are no longer there."""
        found = np.empty(count, self.dtype)
        self.read_into(found, start)
        return found

    def read_into(self, found: NDArray[np.unsignedinteger[Any]], start: int) -> None:
        """Fill an array of the shard's dtype, in one piece, with tokens from `start` on.  Raises ShardError."""
        offset = start * found.itemsize
        try:
            count = self._fill(found, offset, is_index=False)
        except OSError as error:
            raise ShardError(f"{self.name} cannot be read ({reason(error)})") from error
        if count < found.nbytes:
            size, expected = offset + count, self.info.num_tokens * found.itemsize
            with contextlib.suppress(OSError):
                size = self.path.stat().st_size
            raise ShardError(f"{self.name} is truncated: it has {size} bytes, but its metadata says {expected}")

    def read_offsets(self, first: int = 0, count: int | None = None) -> NDArray[np.int64]:
        """Return where documents start, and where the last one ends: `count` of these from document `first` on.

        Raises ShardError if they do not make up the tokens.
        """
        num_offsets = self.info.num_documents + 1
        offsets = self._read_offsets(first, num_offsets - first if count is None else count)
        stop, num_tokens = first + len(offsets), self.info.num_tokens
        if (
            (first == 0 and offsets[0] != 0)
            or (stop == num_offsets and offsets[-1] != num_tokens)
            or (not 0 <= offsets[0] <= offsets[-1] <= num_tokens or np.any(np.diff(offsets) < 0))
        ):
            raise ShardError(f"{self._index_name} is damaged: its documents do not cover the tokens")
        return offsets

    def documents_between(self, first: int, last: int) -> NDArray[np.int64]:
        """Return those of the tokens from `first` up to `last`, which is left out, that begin a document."""
        documents = range(self.info.num_documents)
        place = functools.partial(bisect.bisect_left, documents, key=lambda number: self._read_offsets(number, 1)[0])
        start = place(first)
        stop = place(last, lo=start)
        return self.read_offsets(start, stop - start) if start < stop else np.empty(0, np.int64)

    @property
    def _index_name(self) -> str:
        return f"{self.name.removesuffix('.bin')}.idx"

    @functools.cached_property
    def _index(self) -> Version:
        return check_size(self._index_name, (self.info.num_documents + 1) * 8)

    def _read_offsets(self, first: int, count: int) -> NDArray[np.int64]:
        found = np.empty(count, "<u8")
        try:
            num_bytes = self._fill(found, first * 8, is_index=True)
        except OSError as error:
            raise ShardError(f"{self._index_name} cannot be read ({reason(error)})") from error
        if num_bytes < found.nbytes:
            raise ShardError(f"{self._index_name} is truncated")
        return found.astype(np.int64)

    def _fill(self, buffer: NDArray[Any], offset: int, is_index: bool) -> int:
        """Fill `buffer` with bytes of the tokens, or of the index; returns how many there were.  Raises OSError."""
        return SHARD_FILES.read_into(buffer, self._index if is_index else self._file, offset)

    def look(self, start: int, count: int) -> NDArray[np.unsignedinteger[Any]]:
        """Return a few tokens, as `read` does; of a shard that is elsewhere these alone are fetched."""
        return self.read(start, count)


class ShardWriter:
    """Writes one token shard, in constant memory.

    Until `publish` nothing stands under the shard's names.  Processes that write the same shard do not disturb each
    other.
    """

    def __init__(self, path: Path, tokenizer: Tokenizer) -> None:
        self.path, self._tokenizer = path, tokenizer
        self._dtype = np.dtype(find_dtype(tokenizer.vocab_size))
        self._attempt = f"{os.getpid()}-{secrets.token_hex(4)}.tmp"
        for suffix in SUFFIXES:
            add_partial(self._temporary(suffix))
        self._files = {suffix: open(self._temporary(suffix), "wb") for suffix in SUFFIXES}  # noqa: SIM115
        self._checksums = dict.fromkeys(SUFFIXES, 0)
        self._put(".idx", bytes(8))
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
        self._put(".bin", ids.astype(self._dtype.newbyteorder("<"), copy=False).tobytes())
        self.num_tokens += len(ids)

    def write_documents(self, ids: NDArray[np.integer[Any]], counts: NDArray[np.int64], num_bytes: int) -> None:
        """Append whole documents: the ids of all, how many each has, and the size of the text of all."""
        start, end = self._tokenizer.start_ids, self._tokenizer.end_ids
        ends = np.cumsum(counts + (len(start) + len(end)))
        found = np.empty(len(ids) + len(counts) * (len(start) + len(end)), self._dtype.newbyteorder("<"))
        is_text = np.ones(len(found), dtype=bool)
        starts = np.concatenate([[0], ends[:-1]])
        for around, places in ((start, starts), (end, ends - len(end))):
            for number, special in enumerate(around):
                found[places + number], is_text[places + number] = special, False
        found[is_text] = ids
        self._put(".bin", found.data)
        self._put(".idx", (self.num_tokens + ends).astype("<u8").data)
        self.num_tokens, self.num_documents = self.num_tokens + len(found), self.num_documents + len(counts)
        self.num_bytes += num_bytes

    def write_tokens(self, ids: NDArray[np.integer[Any]], ends: NDArray[np.int64]) -> None:
        """Append tokens as they are, and where documents end among them."""
        self._put(".idx", (self.num_tokens + ends).astype("<u8").data)
        self._append(ids)
        self.num_documents += len(ends)

    def end_document(self) -> None:
        """End the current document, which may be empty, as its tokenizer does."""
        self.write(np.array(self._tokenizer.end_ids, dtype=self._dtype), num_bytes=0)
        self._has_begun = False
        self.num_documents += 1
        self._put(".idx", self.num_tokens.to_bytes(8, "little"))

    def _put(self, suffix: str, content: bytes | memoryview) -> None:
        self._files[suffix].write(content)
        self._checksums[suffix] = crc32(content, self._checksums[suffix])

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
            checksum=f"{self._checksums['.bin']:08x}{self._checksums['.idx']:08x}",
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
            drop_partial(self._temporary(suffix))

    def discard(self) -> None:
        """Remove what has not been published."""
        for suffix, file in self._files.items():
            file.close()
            self._temporary(suffix).unlink(missing_ok=True)
            drop_partial(self._temporary(suffix))

    def _temporary(self, suffix: str) -> Path:
        return self.path.with_name(f".{self.path.stem}{suffix}.{self._attempt}")


def read_info(path: str) -> ShardInfo:
    """Return what a shard's metadata say.  Raises ShardError."""
    try:
        with open(path, "rb", buffering=0) as file:
            content = file.read()
    except OSError as error:
        raise ShardError(
            f"the metadata {path} cannot be read ({error.strerror}); a shard needs its metadata, not only ids"
        ) from error
    return parse_info(content, path)


def parse_info(content: bytes, path: str) -> ShardInfo:
    """Return the metadata that `content` holds; `path` is what messages call it.  Raises ShardError."""
    try:
        info = ShardInfo(**json.loads(content))
    except (ValueError, TypeError) as error:
        raise ShardError(f"{path} is not the metadata of a token shard") from error
    for name, kind in _KINDS:
        if type(value := getattr(info, name)).__name__ != kind:
            raise ShardError(f"{path} is damaged: {name} is {value!r}")
    if info.format != ShardInfo.format:
        raise ShardError(f"{path} has format {info.format}, this version reads format {ShardInfo.format}")
    if info.dtype != find_dtype(info.vocab_size) or info.num_tokens < 1 or info.num_documents < 1:
        raise ShardError(f"{path} is damaged: {info}")
    return info


def check_size(path: str, num_bytes: int) -> Version:
    """Return the file as it is now.  Raises ShardError unless it has as many bytes."""
    try:
        with open(path, "rb", buffering=0) as file:  # opened, not only looked at: it must be readable
            found = os.fstat(file.fileno())
    except OSError as error:
        raise ShardError(f"{path} cannot be read ({error.strerror})") from error
    return _checked(path, found, num_bytes)


def _look_at(path: str, num_bytes: int) -> Version:
    try:
        return _checked(path, os.stat(path), num_bytes)
    except OSError as error:
        raise ShardError(f"{path} cannot be read ({error.strerror})") from error


def _checked(path: str, found: os.stat_result, num_bytes: int) -> Version:
    if found.st_size != num_bytes:
        raise ShardError(f"{path} has {found.st_size} bytes, but its metadata says {num_bytes}")
    return path, found.st_ino, found.st_mtime_ns


def reason(error: OSError) -> str:
    """Return why the system refuses, with the limit if that is why."""
    limit = f"; `ulimit -n` is {file_limit()}" if error.errno in (errno.EMFILE, errno.ENFILE) else ""
    return f"{error.strerror}{limit}"


@functools.cache
def _stored(dtype: str) -> np.dtype[Any]:
    return np.dtype(dtype).newbyteorder("<")


def find_dtype(vocab_size: int) -> str:
    """Return the smallest dtype that holds every id."""
    return "uint8" if vocab_size <= 2**8 else "uint16" if vocab_size <= 2**16 else "uint32"
