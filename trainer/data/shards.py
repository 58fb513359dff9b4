"""Reads and writes token shards, and the manifests that list them.

A token shard consists of three or four files:

    NAME.bin    the tokens: little-endian uint8, uint16 or uint32, depending on the vocabulary size
    NAME.idx    the index: the start of each document and the end of the last one, num_documents + 1 uint64 values
    NAME.crc    for large shards: CRC-32 of all tokens and of the index (big-endian uint32), then of each 4096-byte page
                of tokens (little-endian uint32)
    NAME.json   the metadata (`ShardInfo`): dtype, tokenizer, number of tokens, and checksums of NAME.bin and NAME.idx

A manifest lists the shards of a dataset with their metadata, so that thousands of shards can be opened by reading a
single file.

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
import re
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trainer.data.tokenizer import Tokenizer
from trainer.distributed.environment import file_limit
from trainer.files import CHECKSUM, atomic_replace, crc32, verify_checksum, with_checksum
from trainer.stopping import add_partial, drop_partial

SUFFIXES = (".bin", ".idx", ".crc", ".json")
"""Suffixes of a shard's files, metadata last.  Only large shards have a .crc: see `_MAX_BYTES_WITHOUT_CRC`."""

MAX_BYTES_VERIFIED_AT_START = 1 << 30
"""Maximum total bytes of token data that are verified completely when opened, which takes up to half a second.  In
larger datasets, a shard is verified when it is first read or, with a .crc, page by page as it is read."""

_PAGE_BYTES = 4096
"""Bytes covered by each page checksum in NAME.crc.  The kernel reads complete pages of this size anyway, so verifying
them takes no additional reads."""

_MAX_BYTES_WITHOUT_CRC = 1 << 22
"""Shards with at most this many bytes of tokens have no .crc, and are verified completely before the first read."""

FileVersion: TypeAlias = "tuple[str, int, int]"
"""A version of a file: path, inode and change time (ctime, ns)."""

_VERIFIED: set[FileVersion] = set()
"""The files whose checksums this process has verified, or for which it has found no checksum."""


class ShardError(Exception):
    """A token shard is missing, corrupt or incompatible; the message names the shard and the reason."""


@dataclass(frozen=True)
class ShardInfo:
    """The metadata of a token shard, NAME.json.

    dtype: the name of the smallest dtype that can represent all ids of the vocabulary.
    end_id: the end-of-document token.
    num_bytes: the size of the raw text, or 0 if there was no text or its size is unknown.
    """

    dtype: str
    vocab_size: int
    tokenizer: str
    end_id: int
    num_tokens: int
    num_documents: int
    num_bytes: int
    format: int = 1
    checksum: str = ""
    """CRC-32 of the tokens and of the index, in hexadecimal; empty in shards written by early versions."""

    @property
    def shared_properties(self) -> tuple[str, int, str, int]:
        """The properties that must be the same in all shards of a dataset."""
        return self.dtype, self.vocab_size, self.tokenizer, self.end_id


_FIELD_TYPES = [(declared.name, declared.type) for declared in dataclasses.fields(ShardInfo)]
"""The name of each field, and the name of its type."""


class Shard:
    """A token shard.  Raises ShardError if the sizes of its files do not match its metadata.

    A Shard can be sent to another process: it holds no open files, and each process opens those that it reads.
    """

    is_rebuilt = False
    """Whether the next start rebuilds the shard if one of its files is missing, as for cached shards.  If so, a corrupt
    file is renamed."""

    def __init__(self, path: str | Path) -> None:
        self.name = os.fspath(path)
        """The shard's path; for a remote shard, its URL."""
        stem = os.path.splitext(self.name)[0]
        self.info = read_info(f"{stem}.json")
        self._file = check_file_size(self.name, self.info.num_tokens * self.dtype.itemsize)
        check_file_size(f"{stem}.idx", (self.info.num_documents + 1) * 8)

    @classmethod
    def from_manifest(cls, name: str, info: ShardInfo) -> Shard:
        """Return the shard at the path `name`, with `info` from a manifest.

        The sizes of the files are checked with `stat`, without opening them, so that thousands of shards take only a
        fraction of a second.
        """
        shard = cls.__new__(cls)
        shard.name, shard.info = name, info
        shard._file = _stat_file(name, info.num_tokens * shard.dtype.itemsize)
        _stat_file(f"{name.removesuffix('.bin')}.idx", (info.num_documents + 1) * 8)
        return shard

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
        offset = start * tokens.itemsize
        try:
            num_read = self._fill(tokens, offset, is_index=False)
        except OSError as error:
            raise ShardError(f"{self.name} cannot be read ({describe_os_error(error)})") from error
        if num_read < tokens.nbytes:
            num_bytes, expected = offset + num_read, self.info.num_tokens * tokens.itemsize
            with contextlib.suppress(OSError):
                num_bytes = self.path.stat().st_size
            raise ShardError(f"{self.name} is truncated: it has {num_bytes} bytes, but its metadata says {expected}")

    def read_offsets(self, first: int = 0, count: int | None = None) -> NDArray[np.int64]:
        """Return `count` document offsets from document `first` on; the last offset is the end of the shard.

        count: None for all remaining offsets.

        Raises ShardError if the offsets do not cover the tokens.
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
        """Return the positions in [first, last) at which documents start."""
        documents = range(self.info.num_documents)
        find_document = functools.partial(
            bisect.bisect_left, documents, key=lambda number: self._read_offsets(number, 1)[0]
        )
        start = find_document(first)
        stop = find_document(last, lo=start)
        return self.read_offsets(start, stop - start) if start < stop else np.empty(0, np.int64)

    @property
    def _index_name(self) -> str:
        return f"{self.name.removesuffix('.bin')}.idx"

    @functools.cached_property
    def _index(self) -> FileVersion:
        return check_file_size(self._index_name, (self.info.num_documents + 1) * 8)

    def _read_offsets(self, first: int, count: int) -> NDArray[np.int64]:
        offsets = np.empty(count, "<u8")
        try:
            num_bytes = self._fill(offsets, first * 8, is_index=True)
        except OSError as error:
            raise ShardError(f"{self._index_name} cannot be read ({describe_os_error(error)})") from error
        if num_bytes < offsets.nbytes:
            raise ShardError(f"{self._index_name} is truncated")
        return offsets.astype(np.int64)

    def _fill(self, buffer: NDArray[Any], offset: int, is_index: bool) -> int:
        """Fill `buffer` with bytes of the tokens or of the index, and return the number of bytes read.

        Raises OSError, or ShardError if a checksum does not match.
        """
        file = self._index if is_index else self._file
        if file not in _VERIFIED:
            if not is_index and self._page_checksums is not None:
                return self._fill_verified(buffer, offset, self._page_checksums)
            self._verify(file, is_index)
        return SHARD_FILES.read_into(buffer, file, offset)

    def verify(self) -> None:
        """Verify the checksums of all bytes.  Raises ShardError.

        Each process does this once per shard.  Shards without checksums, from early versions or other tools, pass.
        """
        self._verify(self._file, is_index=False)
        self._verify(self._index, is_index=True)

    def _verify(self, file: FileVersion, is_index: bool) -> None:
        """Verify the checksum of one file, unless this process has done so already.  Raises ShardError."""
        if file in _VERIFIED:
            return
        recorded = self._recorded_checksum[8:] if is_index else self._recorded_checksum[:8]
        if recorded:
            crc, offset, block = 0, 0, np.empty(1 << 20, np.uint8)
            try:
                while count := SHARD_FILES.read_into(block, file, offset):
                    crc, offset = crc32(block[:count].data, crc), offset + count
            except OSError as error:
                raise ShardError(f"{file[0]} cannot be read ({describe_os_error(error)})") from error
            checksum = f"{crc:08x}"
            if checksum != recorded:
                complaint = f"is damaged: its checksum is {checksum}, but {recorded} was written"
                if not self.is_rebuilt:
                    raise ShardError(f"{file[0]} {complaint}")
                with contextlib.suppress(OSError):
                    os.replace(file[0], f"{file[0]}.damaged")
                raise ShardError(f"{file[0]}, in the cache, {complaint}; the next start builds it again")
        _VERIFIED.add(file)

    @functools.cached_property
    def _recorded_checksum(self) -> str:
        """The checksums that were recorded when the shard was written, as in `ShardInfo.checksum`."""
        metadata = f"{self.name.removesuffix('.bin')}.json"
        if self.info.checksum or not os.path.lexists(metadata):
            return self.info.checksum
        return read_info(metadata).checksum  # early manifests do not list checksums

    @functools.cached_property
    def _page_checksums(self) -> FileVersion | None:
        """The file with page checksums, or None if there is no valid one."""
        size = self.info.num_tokens * self.dtype.itemsize
        path = f"{self.name.removesuffix('.bin')}.crc"
        if size <= _MAX_BYTES_WITHOUT_CRC or not self._recorded_checksum or not os.path.isfile(path):
            return None
        try:
            file = check_file_size(path, 8 + 4 * -(-size // _PAGE_BYTES))
            header = np.empty(8, np.uint8)
            SHARD_FILES.read_into(header, file, 0)
        except (OSError, ShardError):
            return None
        return file if header.tobytes() == bytes.fromhex(self._recorded_checksum) else None

    def _fill_verified(self, buffer: NDArray[Any], offset: int, page_checksums: FileVersion) -> int:
        """Fill `buffer` with tokens, as `_fill` does, after verifying the pages that contain them."""
        size, stop = self.info.num_tokens * self.dtype.itemsize, offset + buffer.nbytes
        first, last = offset // _PAGE_BYTES, -(-min(stop, size) // _PAGE_BYTES)
        pages = np.empty(min(last * _PAGE_BYTES, size) - first * _PAGE_BYTES, np.uint8)
        checksums = np.empty(last - first, "<u4")
        SHARD_FILES.read_into(checksums, page_checksums, 8 + 4 * first)
        if SHARD_FILES.read_into(pages, self._file, first * _PAGE_BYTES) == len(pages):
            position, page_bytes = 0, pages.data
            for page_sum in checksums.tolist():
                if crc32(page_bytes[position : position + _PAGE_BYTES]) != page_sum:
                    break
                position += _PAGE_BYTES
            else:
                content = pages[offset - first * _PAGE_BYTES : stop - first * _PAGE_BYTES]
                buffer.view(np.uint8)[: len(content)] = content
                return len(content)
            self._verify(self._file, is_index=False)  # if this passes, the .crc is corrupt, not the tokens
        return SHARD_FILES.read_into(buffer, self._file, offset)


class ShardWriter:
    """Writes one token shard in constant memory.

    The files have temporary names until `publish` renames them.  Several processes may write the same shard without
    interfering with each other.
    """

    def __init__(self, path: Path, tokenizer: Tokenizer) -> None:
        self.path, self._tokenizer = path, tokenizer
        self._dtype = np.dtype(find_dtype(tokenizer.vocab_size))
        self._attempt = f"{os.getpid()}-{secrets.token_hex(4)}.tmp"
        self._checksums = {".bin": 0, ".idx": 0, ".json": 0}
        self._files: dict[str, BinaryIO] = {}
        try:
            for suffix in self._checksums:
                add_partial(self._temporary(suffix))
                self._files[suffix] = open(self._temporary(suffix), "wb")  # noqa: SIM115
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
        self._checksums[suffix] = crc32(content, self._checksums[suffix])

    def close(self) -> None:
        """Flush all files to disk, under their temporary names."""
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
        self._files[".json"].write(json.dumps(with_checksum(dataclasses.asdict(info)), indent=1).encode() + b"\n")
        self._files[".bin"].flush()
        if self.num_tokens * self._dtype.itemsize > _MAX_BYTES_WITHOUT_CRC:
            add_partial(self._temporary(".crc"))
            self._files[".crc"] = open(self._temporary(".crc"), "wb")  # noqa: SIM115
            self._files[".crc"].write(bytes.fromhex(info.checksum))
            with open(self._temporary(".bin"), "rb") as tokens:
                page_checksums = [crc32(page) for page in iter(lambda: tokens.read(_PAGE_BYTES), b"")]
            self._files[".crc"].write(np.array(page_checksums, "<u4").tobytes())
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()

    def publish(self) -> None:
        """Rename the files to their final names, metadata last: a shard without metadata is rejected."""
        for suffix in SUFFIXES:
            if suffix in self._files:
                os.replace(self._temporary(suffix), self.path.with_suffix(suffix))
            else:
                self.path.with_suffix(suffix).unlink(missing_ok=True)
            drop_partial(self._temporary(suffix))

    def discard(self) -> None:
        """Remove the files that were not published."""
        for suffix in SUFFIXES:
            if suffix in self._files:
                with contextlib.suppress(OSError):  # on a full disk, buffered data cannot be flushed
                    self._files[suffix].close()
            self._temporary(suffix).unlink(missing_ok=True)
            drop_partial(self._temporary(suffix))

    def _temporary(self, suffix: str) -> Path:
        return self.path.with_name(f".{self.path.stem}{suffix}.{self._attempt}")


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
        stored = json.loads(content)
        info = ShardInfo(**{name: value for name, value in stored.items() if name != CHECKSUM})
    except (ValueError, TypeError, AttributeError) as error:
        raise ShardError(f"{path} is not the metadata of a token shard") from error
    for name, kind in _FIELD_TYPES:
        if type(value := getattr(info, name)).__name__ != kind:
            raise ShardError(f"{path} is damaged: {name} is {value!r}")
    if info.format != ShardInfo.format:
        raise ShardError(f"{path} has format {info.format}, but this version reads format {ShardInfo.format}")
    if info.checksum and not re.fullmatch("[0-9a-f]{16}", info.checksum):
        raise ShardError(f"{path} is damaged: checksum is {info.checksum!r}")
    if info.dtype != find_dtype(info.vocab_size) or info.num_tokens < 1 or info.num_documents < 1:
        raise ShardError(f"{path} is damaged: {info}")
    try:
        verify_checksum(stored)
    except ValueError as error:
        raise ShardError(f"{path} is damaged: {error}") from error
    return info


def check_file_size(path: str, num_bytes: int) -> FileVersion:
    """Return the current version of a file.  Raises ShardError unless it is readable and has `num_bytes` bytes."""
    try:
        with open(path, "rb", buffering=0) as file:  # `stat` alone would not show whether it is readable
            stat = os.fstat(file.fileno())
    except OSError as error:
        raise ShardError(f"{path} cannot be read ({error.strerror})") from error
    return _check_stat(path, stat, num_bytes)


def _stat_file(path: str, num_bytes: int) -> FileVersion:
    try:
        return _check_stat(path, os.stat(path), num_bytes)
    except OSError as error:
        raise ShardError(f"{path} cannot be read ({error.strerror})") from error


def _check_stat(path: str, stat: os.stat_result, num_bytes: int) -> FileVersion:
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

ShardRow: TypeAlias = "tuple[str, int, int, int]"
"""A shard in a manifest: its path, absolute or relative to the manifest's folder, and its numbers of tokens,
documents and bytes of raw text."""

_MANIFEST_FORMAT = 1


@dataclass(frozen=True)
class ShardManifest:
    """Lists the training and held-out shards of a dataset, all produced with the same tokenizer.

    train_content: the `sample_content` of the shards in `train`, or "" without shards.
    held_out_content: the same for `held_out`.
    notes: statistics collected while building the shards, for the messages of later runs.
    checksums: the checksums in the metadata of all shards: first those of `train`, then those of `held_out`.  Empty in
        manifests from earlier versions.
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
    checksums: list[str] = dataclasses.field(default_factory=list)

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
            manifest = cls(**verify_checksum(json.loads(content)))
            if manifest.format != _MANIFEST_FORMAT:
                raise ShardError(
                    f"{path} has format {manifest.format}, but this version reads format {_MANIFEST_FORMAT}"
                )
            _check_types(manifest)
            for row in (*manifest.train, *manifest.held_out):
                name, *counts = row
                if not isinstance(name, str) or [type(count) for count in counts] != [int] * 3 or min(counts) < 0:
                    raise ValueError(f"a shard is {row!r}")
        except (ValueError, TypeError) as error:
            raise ShardError(
                f"{path} is neither a manifest of token shards nor a file of documents (an array of objects, or .jsonl)"
            ) from error
        return manifest

    def write(self, path: Path) -> None:
        """Write the manifest to `path` atomically, replacing an earlier one, and flush it to disk."""
        with atomic_replace(path) as partial:
            partial.write_text(json.dumps(with_checksum(vars(self)), separators=(",", ":")))

    def shards(self, folder: Path, is_held_out: bool = False) -> list[Shard]:
        """Return the shards to train on, or the held-out shards.

        folder: the folder of the manifest.

        Raises ShardError if a file is missing or has the wrong size; see `Shard.from_manifest`.
        """
        prefix = f"{folder}/"
        return [
            Shard.from_manifest(name if name.startswith("/") else prefix + name, info)
            for name, info in self.infos(is_held_out)
        ]

    def infos(self, is_held_out: bool = False) -> list[tuple[str, ShardInfo]]:
        """Return the path of each shard as written in the manifest, and its metadata."""
        checksums = self.checksums or [""] * (len(self.train) + len(self.held_out))
        rows, checksums_of_split = (
            (self.held_out, checksums[len(self.train) :]) if is_held_out else (self.train, checksums[: len(self.train)])
        )
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
                    checksum=checksum,
                ),
            )
            for (name, num_tokens, num_documents, num_bytes), checksum in zip(rows, checksums_of_split, strict=True)
        ]


def _check_types(manifest: ShardManifest) -> None:
    """Raise ValueError if a field has the wrong type or an invalid value."""
    texts = (manifest.dtype, manifest.tokenizer, manifest.train_content, manifest.held_out_content, *manifest.checksums)
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("a field that must be text is not text")
    if manifest.checksums and len(manifest.checksums) != len(manifest.train) + len(manifest.held_out):
        raise ValueError("the number of checksums is wrong")
    for checksum in filter(None, manifest.checksums):
        if not re.fullmatch("[0-9a-f]{16}", checksum):
            raise ValueError(f"a checksum is {checksum!r}")
    if type(manifest.vocab_size) is not int or type(manifest.end_id) is not int or not isinstance(manifest.notes, dict):
        raise ValueError("vocab_size, end_id or notes has the wrong type")
    if manifest.vocab_size < 1 or manifest.dtype != find_dtype(manifest.vocab_size):
        raise ValueError(f"dtype is {manifest.dtype}")


def manifest_rows(shards: Sequence[Shard], folder: Path) -> list[ShardRow]:
    """Return the rows that describe `shards` in a manifest in `folder`."""
    names = [shard.path.relative_to(folder).as_posix() for shard in shards]
    infos = [shard.info for shard in shards]
    return [
        (name, info.num_tokens, info.num_documents, info.num_bytes) for name, info in zip(names, infos, strict=True)
    ]


# -- open files -------------------------------------------------------------------------------------------------------

MAX_OPEN_FILES = 128
"""Maximum number of descriptors that are kept open."""


class _Descriptor:
    """An open file.  It is closed when its last reference is dropped, so that readers can finish after its eviction."""

    number = -1

    def __init__(self, path: str) -> None:
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.number, 0, 0, os.POSIX_FADV_RANDOM)

    def __del__(self) -> None:
        if self.number >= 0:
            os.close(self.number)


class DescriptorCache:
    """Cache of the most recently opened files.  Thread-safe; a forked process can use the cache that it inherits.

    Looking up an open file takes no lock and records no use, since this happens for every sample.
    """

    def __init__(self) -> None:
        self._open: dict[FileVersion, _Descriptor] = {}
        self._lock = threading.Lock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._reset_lock)

    def read_into(self, buffer: NDArray[Any], file: FileVersion, offset: int) -> int:
        """Fill the contiguous `buffer` with bytes from `offset` on, as far as the file goes; return their number.

        Each version of a file has a separate descriptor, since the file may have been replaced.  Raises OSError.
        """
        descriptor = self._open.get(file) or self._get_or_open(file)
        count = os.preadv(descriptor.number, [buffer.data], offset)
        while 0 < count < buffer.nbytes:  # a signal interrupted it, or the file ends
            more = os.preadv(descriptor.number, [buffer.data.cast("B")[count:]], offset + count)
            if not more:
                break
            count += more
        return count

    def forget(self, file: FileVersion) -> None:
        """Drop a file from the cache; it is closed once no thread reads from it."""
        with self._lock:
            self._open.pop(file, None)

    def close(self) -> None:
        """Drop all files from the cache; each is closed once no thread reads from it."""
        with self._lock:
            self._open.clear()

    def _get_or_open(self, file: FileVersion) -> _Descriptor:
        with self._lock:
            descriptor = self._open.get(file)  # another thread may just have opened it
            if descriptor is None:
                max_open = max(1, min(MAX_OPEN_FILES, file_limit() // 4))
                for old_file in list(self._open)[: max(0, len(self._open) + 1 - max_open)]:
                    del self._open[old_file]
                descriptor = self._open[file] = self._open_file(file[0])
            return descriptor

    def _open_file(self, path: str) -> _Descriptor:
        try:
            return _Descriptor(path)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._open:
                raise
        self._open.clear()  # the rest of the process has used up the limit: use a single descriptor
        return _Descriptor(path)

    def _reset_lock(self) -> None:
        self._lock = threading.Lock()  # a thread of the parent may have held the old lock during the fork


SHARD_FILES = DescriptorCache()
"""The open files of all token shards that this process reads."""
