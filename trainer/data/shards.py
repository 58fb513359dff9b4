"""Reads and writes token shards, and the manifests that list them.

A token shard consists of four files:

    NAME.bin    the tokens: little-endian uint8, uint16 or uint32, depending on the vocabulary size
    NAME.idx    the index: the start of each document and the end of the last one, num_documents + 1 uint64 values
    NAME.crc    the CRC-32 of each page of 4096 bytes, of NAME.bin and then of NAME.idx (little-endian uint32)
    NAME.json   the metadata (`ShardInfo`): dtype, tokenizer, number of tokens, and the CRC-32 of NAME.crc

Every page is compared with its checksum whenever it is read, so that no damage is served as other tokens.  This takes
no more reads from the disk, since the kernel reads complete pages anyway.

A manifest lists the shards of a dataset with their metadata, so that thousands of shards can be opened by reading a
single file.  `Stream` reads several shards as one sequence of tokens.

Files are read through a small cache of file descriptors, without memory mapping.  If a memory-mapped file is truncated
or its storage fails, SIGBUS kills the process.  A Python mapping also keeps a descriptor open, and touching a page
makes the kernel read ahead a hundred times what a sample needs.  `preadv` has none of these problems, and does not use
the file position, which processes or threads would share.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import errno
import functools
import json
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trainer.data.tokenizer import Tokenizer
from trainer.distributed.environment import file_limit
from trainer.files import atomic_replace, crc32, parse_json, verify_checksum, with_checksum
from trainer.stopping import stop

SUFFIXES = (".bin", ".idx", ".crc", ".json")
"""Suffixes of a shard's files, metadata last."""

MAX_BYTES_VERIFIED_AT_START = 1 << 30
"""Maximum total bytes of token data that are verified completely when opened, which takes up to half a second.  Larger
datasets are verified page by page as they are read."""

_PAGE_BYTES = 4096
"""Bytes covered by each checksum in NAME.crc."""


FileVersion: TypeAlias = "tuple[str, int, int]"
"""A version of a file: path, inode and change time (ctime, ns).  Each has a separate descriptor, since the file may
have been replaced."""


class ShardError(Exception):
    """A token shard is missing, corrupt or incompatible; the message names the shard and the reason."""


@dataclass(frozen=True)
class ShardInfo:
    """The metadata of a token shard, NAME.json.

    dtype: the name of the smallest dtype that can represent all ids of the vocabulary.
    end_id: the end-of-document token.
    num_bytes: the size of the raw text, or 0 if there was no text or its size is unknown.
    crc: the CRC-32 of NAME.crc.
    """

    dtype: str
    vocab_size: int
    tokenizer: str
    end_id: int
    num_tokens: int
    num_documents: int
    num_bytes: int
    crc: int
    format: int = 1

    @property
    def shared_properties(self) -> tuple[str, int, str, int]:
        """The properties that must be the same in all shards of a dataset."""
        return self.dtype, self.vocab_size, self.tokenizer, self.end_id

    @property
    def file_sizes(self) -> dict[str, int]:
        """The size of each file except the metadata, in bytes."""
        num_token_bytes, num_index_bytes = self.num_tokens * np.dtype(self.dtype).itemsize, (self.num_documents + 1) * 8
        num_pages = -(-num_token_bytes // _PAGE_BYTES) + -(-num_index_bytes // _PAGE_BYTES)
        return {".bin": num_token_bytes, ".idx": num_index_bytes, ".crc": 4 * num_pages}


class Shard:
    """A token shard.  Raises ShardError if a file is missing, or has another size than its metadata says.

    A Shard can be sent to another process: it holds no open files, and each process opens those that it reads.
    """

    is_rebuilt = False
    """Whether the next start rebuilds the shard if one of its files is missing, as for cached shards.  If so, a damaged
    file is renamed."""

    def __init__(self, path: str | Path, info: ShardInfo | None = None) -> None:
        """info: the metadata, if a manifest contains it; otherwise it is read from NAME.json."""
        self.name = os.fspath(path)
        """The shard's path."""
        self.info = read_info(self._path(".json")) if info is None else info
        self._sizes = self.info.file_sizes
        self._files = {suffix: _find_file(self._path(suffix), size) for suffix, size in self._sizes.items()}

    @property
    def path(self) -> Path:
        """The path of the token file."""
        return Path(self.name)

    @functools.cached_property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the tokens: unsigned, little-endian."""
        return np.dtype(self.info.dtype).newbyteorder("<")

    def read(self, start: int, count: int) -> NDArray[np.unsignedinteger[Any]]:
        """Return `count` tokens from `start` on.  Raises ShardError."""
        tokens = np.empty(count, self.dtype)
        self.read_into(tokens, start)
        return tokens

    def read_into(self, tokens: NDArray[np.unsignedinteger[Any]], start: int) -> None:
        """Fill `tokens`, a contiguous array of the shard's dtype, with tokens from `start` on.  Raises ShardError."""
        self._read(".bin", tokens, start * tokens.itemsize)

    def read_offsets(self, first: int = 0, count: int | None = None) -> NDArray[np.int64]:
        """Return `count` document offsets from document `first` on; the last offset is the end of the shard.

        count: None for all remaining offsets.

        Raises ShardError if the offsets do not cover the tokens.
        """
        num_offsets = self.info.num_documents + 1
        offsets = np.empty(num_offsets - first if count is None else count, "<u8")
        self._read(".idx", offsets, first * 8)
        offsets = offsets.astype(np.int64)
        stop, num_tokens = first + len(offsets), self.info.num_tokens
        if (
            (first == 0 and offsets[0] != 0)
            or (stop == num_offsets and offsets[-1] != num_tokens)
            or (not 0 <= offsets[0] <= offsets[-1] <= num_tokens or np.any(np.diff(offsets) < 0))
        ):
            raise ShardError(f"{self._path('.idx')} is damaged: its documents do not cover the tokens")
        return offsets

    def documents_between(self, first: int, last: int) -> NDArray[np.int64]:
        """Return the positions in [first, last) at which documents start."""
        start, stop = self._find_document(first), self._find_document(last)
        return self.read_offsets(start, stop - start) if start < stop else np.empty(0, np.int64)

    def _find_document(self, position: int) -> int:
        """Return the number of the first document that starts at a position or later."""
        page = max(0, int(np.searchsorted(self._page_starts, position)) - 1)
        first = page * _OFFSETS_PER_PAGE
        offsets = self.read_offsets(first, min(_OFFSETS_PER_PAGE, self.info.num_documents - first))
        return first + int(np.searchsorted(offsets, position))

    @functools.cached_property
    def _page_starts(self) -> NDArray[np.int64]:
        """The first offset in each page of the index, which takes 16 bytes of memory for a thousand documents."""
        num_documents = self.info.num_documents
        blocks = [
            self.read_offsets(first, min(_DOCUMENTS_PER_BLOCK, num_documents - first))[::_OFFSETS_PER_PAGE]
            for first in range(0, num_documents, _DOCUMENTS_PER_BLOCK)
        ]
        return np.concatenate(blocks)

    def verify(self) -> None:
        """Compare all bytes with their checksums, unless this process has done so already.  Raises ShardError."""
        files = tuple(self._files.values())
        if files in _VERIFIED:
            return
        for suffix in (".bin", ".idx"):
            num_pages = -(-self._sizes[suffix] // _PAGE_BYTES)
            for first in range(0, num_pages, _PAGES_VERIFIED_AT_ONCE):
                self._read_verified(suffix, first, min(first + _PAGES_VERIFIED_AT_ONCE, num_pages))
        _VERIFIED.add(files)

    def _read(self, suffix: str, buffer: NDArray[Any], offset: int) -> None:
        """Fill `buffer` with bytes of a file from `offset` on, after comparing their pages with the checksums.

        Raises ShardError if the file cannot be read or is damaged.
        """
        first, last = offset // _PAGE_BYTES, -(-(offset + buffer.nbytes) // _PAGE_BYTES)
        start = offset - first * _PAGE_BYTES
        buffer.view(np.uint8)[:] = self._read_verified(suffix, first, last)[start : start + buffer.nbytes]

    def _read_verified(self, suffix: str, first: int, last: int) -> NDArray[np.uint8]:
        """Return the bytes of pages `first` to `last` (exclusive) of a file.  Raises ShardError if one is damaged."""
        pages_before = 0 if suffix == ".bin" else -(-self._sizes[".bin"] // _PAGE_BYTES)
        start, stop = pages_before + first, pages_before + last
        first_page, last_page = start // _CHECKSUMS_PER_PAGE, -(-stop // _CHECKSUMS_PER_PAGE)
        checksums = self._read_pages(".crc", first_page, self._checksums_of_crc[first_page:last_page]).view("<u4")
        skipped = first_page * _CHECKSUMS_PER_PAGE
        return self._read_pages(suffix, first, checksums[start - skipped : stop - skipped].tolist())

    @functools.cached_property
    def _checksums_of_crc(self) -> list[int]:
        """The checksum of each page of NAME.crc, after comparing the file as a whole with the metadata.

        They are kept, since all files of a shard may be replaced while it is in use: then it must not be read.
        """
        content = self._read_bytes(".crc", 0, self._sizes[".crc"])
        if crc32(content.data) != self.info.crc:
            raise self._damaged(".crc", "its checksum is wrong")
        return _page_checksums(content)

    def _read_pages(self, suffix: str, first: int, checksums: list[int]) -> NDArray[np.uint8]:
        """Return the pages of a file from page `first` on that have these checksums.  Raises ShardError."""
        start, stop = first * _PAGE_BYTES, min((first + len(checksums)) * _PAGE_BYTES, self._sizes[suffix])
        content = self._read_bytes(suffix, start, max(0, stop - start))
        found = _page_checksums(content)
        if found != checksums:
            page = first + next(number for number, each in enumerate(found) if each != checksums[number])
            raise self._damaged(suffix, f"the checksum of page {page} is wrong")
        return content

    def _read_bytes(self, suffix: str, offset: int, count: int) -> NDArray[np.uint8]:
        """Return `count` bytes of a file from `offset` on, unverified.  Raises ShardError."""
        content = np.empty(count, np.uint8)
        file = self._files[suffix]
        path = file[0]
        try:
            num_read = _read_into(content, file, offset)
        except OSError as error:
            raise ShardError(f"{path} cannot be read ({describe_os_error(error)})") from error
        if num_read < count:
            expected = self._sizes[suffix]
            with contextlib.suppress(OSError):
                num_read = os.stat(path).st_size - offset
            raise ShardError(f"{path} is truncated: it has {offset + num_read} bytes, but its metadata says {expected}")
        return content

    def _damaged(self, suffix: str, reason: str) -> ShardError:
        """Return the error for a damaged file, which is renamed if the next start rebuilds it."""
        path = self._path(suffix)
        if not self.is_rebuilt:
            return ShardError(f"{path} is damaged: {reason}")
        with contextlib.suppress(OSError):
            os.replace(path, f"{path}.damaged")
        return ShardError(f"{path}, in the cache, is damaged: {reason}; the next start builds it again")

    def _path(self, suffix: str) -> str:
        return os.path.splitext(self.name)[0] + suffix


def _page_checksums(content: NDArray[np.uint8]) -> list[int]:
    """Return the checksum of each page of some content that begins with a page."""
    view = content.data
    return [crc32(view[start : start + _PAGE_BYTES]) for start in range(0, len(content), _PAGE_BYTES)]


_OFFSETS_PER_PAGE = _PAGE_BYTES // 8

_CHECKSUMS_PER_PAGE = _PAGE_BYTES // 4

_PAGES_VERIFIED_AT_ONCE = 256

_VERIFIED: set[tuple[FileVersion, ...]] = set()
"""The files that this process has verified completely: a start opens the same shards several times."""


class ShardWriter:
    """Writes one token shard in constant memory.

    The files have temporary names until `publish` renames them.  Several processes may write the same shard without
    interfering with each other.
    """

    def __init__(self, path: Path, tokenizer: Tokenizer) -> None:
        self.path, self._tokenizer = path, tokenizer
        self._dtype = np.dtype(find_dtype(tokenizer.vocab_size))
        self._attempt = f"{os.getpid()}-{secrets.token_hex(4)}.tmp"
        self._files: dict[str, _FileWithChecksums] = {}
        try:
            for suffix in (".bin", ".idx"):
                self._files[suffix] = _FileWithChecksums(self._temporary(suffix))
        except OSError:
            self.discard()
            raise
        self._write_bytes(".idx", bytes(8))
        self.num_tokens = self.num_documents = self.num_bytes = 0
        self._has_started = False

    def write(self, ids: NDArray[np.integer[Any]], num_bytes: int) -> None:
        """Append tokens to the current document, which begins with the tokenizer's start tokens.

        num_bytes: the size of the tokens' text in bytes.
        """
        if not self._has_started:
            self._has_started = True
            self._append(np.array(self._tokenizer.start_ids, dtype=self._dtype))
        self._append(ids)
        self.num_bytes += num_bytes

    def _append(self, ids: NDArray[np.integer[Any]]) -> None:
        self._write_bytes(".bin", ids.astype(self._dtype.newbyteorder("<"), copy=False).tobytes())
        self.num_tokens += len(ids)

    def write_documents(self, ids: NDArray[np.integer[Any]], counts: NDArray[np.int64], num_bytes: int) -> None:
        """Append complete documents, with the tokenizer's special tokens around each.

        ids: the concatenated ids of the documents.
        counts: the number of ids of each document.
        num_bytes: the size of the documents' text in bytes.
        """
        start, end = self._tokenizer.start_ids, self._tokenizer.end_ids
        ends = np.cumsum(counts + (len(start) + len(end)))
        tokens = np.empty(len(ids) + len(counts) * (len(start) + len(end)), self._dtype.newbyteorder("<"))
        is_text = np.ones(len(tokens), dtype=bool)
        starts = np.concatenate([[0], ends[:-1]])
        for special_ids, positions in ((start, starts), (end, ends - len(end))):
            for number, special in enumerate(special_ids):
                tokens[positions + number], is_text[positions + number] = special, False
        tokens[is_text] = ids
        self._write_bytes(".bin", tokens.data)
        self._write_bytes(".idx", (self.num_tokens + ends).astype("<u8").data)
        self.num_tokens, self.num_documents = self.num_tokens + len(tokens), self.num_documents + len(counts)
        self.num_bytes += num_bytes

    def write_tokens(self, ids: NDArray[np.integer[Any]], ends: NDArray[np.int64]) -> None:
        """Append tokens that already include the special tokens.

        ends: the offsets in `ids` at which documents end (exclusive).
        """
        self._write_bytes(".idx", (self.num_tokens + ends).astype("<u8").data)
        self._append(ids)
        self.num_documents += len(ends)

    def end_document(self) -> None:
        """End the current document, which may be empty, with the tokenizer's end tokens."""
        self.write(np.array(self._tokenizer.end_ids, dtype=self._dtype), num_bytes=0)
        self._has_started = False
        self.num_documents += 1
        self._write_bytes(".idx", self.num_tokens.to_bytes(8, "little"))

    def _write_bytes(self, suffix: str, content: bytes | memoryview) -> None:
        self._files[suffix].write(content)

    def close(self) -> None:
        """Flush all files to disk, under their temporary names."""
        for file in self._files.values():
            file.finish()
        page_checksums = np.array([*self._files[".bin"].checksums, *self._files[".idx"].checksums], "<u4").tobytes()
        info = ShardInfo(
            dtype=self._dtype.name,
            vocab_size=self._tokenizer.vocab_size,
            tokenizer=self._tokenizer.name,
            end_id=self._tokenizer.end_id,
            num_tokens=self.num_tokens,
            num_documents=self.num_documents,
            num_bytes=self.num_bytes,
            crc=crc32(page_checksums),
        )
        metadata = json.dumps(with_checksum(dataclasses.asdict(info)), indent=1).encode() + b"\n"
        for suffix, content in ((".crc", page_checksums), (".json", metadata)):
            stop.partial.add(self._temporary(suffix))
            with open(self._temporary(suffix), "wb") as written:
                written.write(content)
                written.flush()
                os.fsync(written.fileno())

    def publish(self) -> None:
        """Rename the files to their final names, metadata last: a shard without metadata is rejected."""
        for suffix in SUFFIXES:
            os.replace(self._temporary(suffix), self.path.with_suffix(suffix))
            stop.partial.discard(self._temporary(suffix))

    def discard(self) -> None:
        """Remove the files that were not published."""
        for file in self._files.values():
            with contextlib.suppress(OSError):  # on a full disk, buffered data cannot be flushed
                file.close()
        for suffix in SUFFIXES:
            self._temporary(suffix).unlink(missing_ok=True)
            stop.partial.discard(self._temporary(suffix))

    def _temporary(self, suffix: str) -> Path:
        return self.path.with_name(f".{self.path.stem}{suffix}.{self._attempt}")


class _FileWithChecksums:
    """A file that is being written, and the checksums of its pages."""

    def __init__(self, path: Path) -> None:
        stop.partial.add(path)
        self._file: BinaryIO = open(path, "wb")  # noqa: SIM115
        self.checksums: list[int] = []
        self._checksum = self._num_bytes_in_page = 0

    def write(self, content: bytes | memoryview) -> None:
        view = memoryview(content).cast("B")
        self._file.write(view)
        while len(view):
            part = view[: _PAGE_BYTES - self._num_bytes_in_page]
            self._checksum = crc32(part, self._checksum)
            self._num_bytes_in_page += len(part)
            view = view[len(part) :]
            if self._num_bytes_in_page == _PAGE_BYTES:
                self._end_page()

    def finish(self) -> None:
        """End the last page, flush the file to disk, and close it."""
        if self._num_bytes_in_page:
            self._end_page()
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file as it is."""
        self._file.close()

    def _end_page(self) -> None:
        self.checksums.append(self._checksum)
        self._checksum = self._num_bytes_in_page = 0


def read_info(path: str) -> ShardInfo:
    """Return the metadata in the file at `path`.  Raises ShardError."""
    try:
        with open(path, "rb", buffering=0) as file:
            content = file.read()
    except OSError as error:
        raise ShardError(
            f"the metadata {path} cannot be read ({error.strerror}); a shard needs its metadata, not only its ids"
        ) from error
    return parse_info(content, path)


def parse_info(content: bytes, path: str) -> ShardInfo:
    """Return the metadata in the content of a file; `path` names the file in messages.  Raises ShardError."""
    try:
        stored = parse_json(content)
        is_metadata = isinstance(stored, dict) and {"dtype", "vocab_size", "num_tokens"} <= stored.keys()
    except ValueError:
        is_metadata = False
    if not is_metadata:
        raise ShardError(f"{path} is not the metadata of a token shard")
    if stored.get("format") != ShardInfo.format:
        raise ShardError(f"{path} has format {stored.get('format')}, but this version reads format {ShardInfo.format}")
    try:
        return ShardInfo(**verify_checksum(stored))
    except (ValueError, TypeError) as error:
        raise ShardError(f"{path} is damaged: {error}") from error


def _find_file(path: str, num_bytes: int) -> FileVersion:
    """Return the current version of a file.  Raises ShardError unless it exists and has `num_bytes` bytes.

    The file is not opened, so that thousands of shards take only a fraction of a second.
    """
    try:
        stat = os.stat(path)
    except OSError as error:
        raise ShardError(f"{path} cannot be read ({error.strerror})") from error
    if stat.st_size != num_bytes:
        raise ShardError(f"{path} has {stat.st_size} bytes, but its metadata says {num_bytes}")
    return path, stat.st_ino, stat.st_ctime_ns  # unlike mtime, ctime cannot be set


def verify_at_start(shards: Sequence[Shard]) -> None:
    """Verify the checksums of shards, unless they have more than MAX_BYTES_VERIFIED_AT_START bytes of tokens in total.

    Raises ShardError if a shard is corrupt.
    """
    if sum(shard.info.num_tokens * shard.dtype.itemsize for shard in shards) <= MAX_BYTES_VERIFIED_AT_START:
        for shard in shards:
            shard.verify()


def describe_os_error(error: OSError) -> str:
    """Return the text of an OSError, with the limit on open files if it was reached, or advice if the disk is full."""
    details = f"; `ulimit -n` is {file_limit()}" if error.errno in (errno.EMFILE, errno.ENFILE) else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        details = " for the cache; free some space, or set data.cache_dir to another disk"
    return f"{error.strerror}{details}"


def find_dtype(vocab_size: int) -> str:
    """Return the name of the smallest dtype that can represent all ids of a vocabulary."""
    return "uint8" if vocab_size <= 2**8 else "uint16" if vocab_size <= 2**16 else "uint32"


@dataclass(frozen=True)
class ShardSet:
    """The files that a path or URL names, and the shards to train on and to hold out.

    train_content: the `sample_content` of the shards to train on, or "" if unknown.
    held_out_content: the same for the held-out shards.
    notes: what was noted when the shards were built; see `ShardManifest`.
    """

    files: list[str]
    train: list[Shard]
    train_content: str = ""
    held_out: list[Shard] = dataclasses.field(default_factory=list)
    held_out_content: str = ""
    notes: dict[str, Any] = dataclasses.field(default_factory=dict)


# -- manifests --------------------------------------------------------------------------------------------------------

MANIFEST = "manifest.json"
"""The file name of a manifest in a folder."""

ShardRow: TypeAlias = "tuple[str, int, int, int, int]"
"""A shard in a manifest: its path, absolute or relative to the manifest's folder, its numbers of tokens, documents and
bytes of raw text, and the CRC-32 of its checksums."""

_MANIFEST_FORMAT = 1


@dataclass(frozen=True)
class ShardManifest:
    """Lists the training and held-out shards of a dataset, all produced with the same tokenizer.

    train_content: the `sample_content` of the shards in `train`, or "" without shards.
    held_out_content: the same for `held_out`.
    notes: statistics collected while building the shards, for the messages of later runs.
    """

    dtype: str
    vocab_size: int
    tokenizer: str
    end_id: int
    train: list[ShardRow]
    held_out: list[ShardRow]
    train_content: str = ""
    held_out_content: str = ""
    notes: dict[str, Any] = dataclasses.field(default_factory=dict)
    format: int = _MANIFEST_FORMAT

    @classmethod
    def read(cls, path: Path) -> ShardManifest:
        """Return the manifest at `path`.  Raises ShardError."""
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ShardError(f"the manifest {path} cannot be read ({error.strerror})") from error
        return cls.parse(content, str(path))

    @classmethod
    def parse(cls, content: bytes, path: str) -> ShardManifest:
        """Parse the content of a manifest; `path` names it in messages.  Raises ShardError."""
        try:
            stored = parse_json(content)
            is_manifest = isinstance(stored, dict) and {"train", "held_out", "tokenizer"} <= stored.keys()
        except ValueError:
            is_manifest = False
        if not is_manifest:
            rule = "is neither a manifest of token shards nor a file of documents (an array of objects, or .jsonl)"
            raise ShardError(f"{path} {rule}")
        if stored.get("format") != _MANIFEST_FORMAT:
            rule = f"has format {stored.get('format')}, but this version reads format {_MANIFEST_FORMAT}"
            raise ShardError(f"{path} {rule}")
        try:
            return cls(**verify_checksum(stored))
        except (ValueError, TypeError) as error:
            raise ShardError(f"{path} is damaged: {error}") from error

    def write(self, path: Path) -> None:
        """Write the manifest to `path` atomically, replacing an earlier one, and flush it to disk."""
        with atomic_replace(path) as partial:
            partial.write_text(json.dumps(with_checksum(vars(self)), separators=(",", ":")))

    def shards(self, folder: Path, is_held_out: bool = False) -> list[Shard]:
        """Return the shards to train on, or the held-out shards.

        folder: the folder of the manifest.

        Raises ShardError if a file is missing or has the wrong size.
        """
        return [Shard(folder / name, info) for name, info in self.infos(is_held_out)]

    def infos(self, is_held_out: bool = False) -> list[tuple[str, ShardInfo]]:
        """Return the path of each shard as written in the manifest, and its metadata."""
        return [
            (
                name,
                ShardInfo(
                    dtype=self.dtype,
                    vocab_size=self.vocab_size,
                    tokenizer=self.tokenizer,
                    end_id=self.end_id,
                    num_tokens=num_tokens,
                    num_documents=num_documents,
                    num_bytes=num_bytes,
                    crc=crc,
                ),
            )
            for name, num_tokens, num_documents, num_bytes, crc in (self.held_out if is_held_out else self.train)
        ]


def manifest_rows(shards: Sequence[Shard], folder: Path) -> list[ShardRow]:
    """Return the rows that describe `shards` in a manifest in `folder`."""
    return [
        (
            shard.path.relative_to(folder).as_posix(),
            shard.info.num_tokens,
            shard.info.num_documents,
            shard.info.num_bytes,
            shard.info.crc,
        )
        for shard in shards
    ]


# -- several shards as one stream -------------------------------------------------------------------------------------

MAX_DOCUMENTS_IN_MEMORY = 2**20
"""Maximum number of documents for which a value per document is held in memory."""

_DOCUMENTS_PER_BLOCK = 2**16
"""Maximum number of documents whose offsets are read at once; whole pages of the index."""


class Stream:
    """The concatenated tokens of one or more shards, and the documents in them.

    dtype: the dtype of the tokens.
    num_tokens: the number of tokens in all shards.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards, self.dtype = list(shards), shards[0].dtype
        self._shard_starts: list[int] = np.cumsum([0, *(shard.info.num_tokens for shard in shards)]).tolist()
        self.num_tokens = self._shard_starts[-1]

    @property
    def has_few_documents(self) -> bool:
        """Whether a value per document may be held in memory."""
        return sum(shard.info.num_documents for shard in self.shards) <= MAX_DOCUMENTS_IN_MEMORY

    def locate(self, position: int) -> tuple[int, int]:
        """Return (shard number, position in that shard) of a token."""
        shard_number = bisect.bisect_right(self._shard_starts, position) - 1
        return shard_number, position - self._shard_starts[shard_number]

    def read(self, start: int, count: int) -> NDArray[np.unsignedinteger[Any]]:
        """Return `count` tokens from `start` on, across shard boundaries.  Raises ShardError."""
        tokens = np.empty(count, self.dtype)
        self.read_into(tokens, start)
        return tokens

    def read_into(self, tokens: NDArray[np.unsignedinteger[Any]], start: int) -> None:
        """Fill `tokens`, a contiguous array, with tokens from `start` on.  Raises ShardError."""
        shard_number, position = self.locate(start)
        filled = 0
        while filled < len(tokens):
            shard = self.shards[shard_number]
            count = min(len(tokens) - filled, shard.info.num_tokens - position)
            shard.read_into(tokens[filled : filled + count], position)
            filled, shard_number, position = filled + count, shard_number + 1, 0

    def document_blocks(self) -> Iterator[NDArray[np.int64]]:
        """Yield the offsets of consecutive documents: the start of each, and the end of the last one, in the stream.

        The documents of a block are in the same shard.  Raises ShardError.
        """
        for shard, shard_start in zip(self.shards, self._shard_starts, strict=False):
            for first in range(0, shard.info.num_documents, _DOCUMENTS_PER_BLOCK):
                count = min(_DOCUMENTS_PER_BLOCK, shard.info.num_documents - first)
                yield shard.read_offsets(first, count + 1) + shard_start

    def starts_between(self, first: int, last: int) -> NDArray[np.int64]:
        """Return the positions in [first, last) at which documents start.  Raises ShardError."""
        if self._document_starts is not None:
            return self._document_starts[slice(*np.searchsorted(self._document_starts, (first, last)).tolist())]
        starts = [np.empty(0, np.int64)]
        for shard_number in range(self.locate(first)[0], len(self.shards)):
            shard_start = self._shard_starts[shard_number]
            if shard_start >= last:
                break
            starts.append(
                shard_start
                + self.shards[shard_number].documents_between(max(0, first - shard_start), last - shard_start)
            )
        return np.concatenate(starts)

    @functools.cached_property
    def _document_starts(self) -> NDArray[np.int64] | None:
        """The start of each document, or None if there are too many to hold them in memory."""
        return np.concatenate([offsets[:-1] for offsets in self.document_blocks()]) if self.has_few_documents else None


# -- open files -------------------------------------------------------------------------------------------------------


class _OpenFile:
    """An open file.  It is closed when its last reference is dropped, so that readers can finish after its eviction."""

    descriptor = -1

    def __init__(self, path: str) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


@functools.cache
def _open_files() -> Callable[[FileVersion], _OpenFile]:
    """Return the cache of open files, which leaves most of the descriptors that `ulimit -n` allows for others."""
    return functools.lru_cache(maxsize=max(1, min(128, file_limit() // 4)))(lambda file: _OpenFile(file[0]))


def _read_into(buffer: NDArray[Any], file: FileVersion, offset: int) -> int:
    """Fill `buffer` with bytes of a file from `offset` on, as far as the file goes; return their number.

    Raises OSError.
    """
    opened = _open_files()(file)
    count = os.preadv(opened.descriptor, [buffer.data], offset)
    while 0 < count < buffer.nbytes:  # a signal interrupted it, or the file ends
        more = os.preadv(opened.descriptor, [buffer.data.cast("B")[count:]], offset + count)
        if not more:
            break
        count += more
    return count


def forget_files() -> None:
    """Close all files of shards that this process has open."""
    _open_files.cache_clear()
