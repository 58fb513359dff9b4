"""A remote token shard, read through the cache."""

from __future__ import annotations

import functools
import hashlib
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.data.remote.cache import RemoteFile, ShardCache
from trainer.data.remote.transport import MANY_TRIES, read, read_range
from trainer.data.shards import Shard, ShardError, ShardInfo, parse_info
from trainer.urls import with_suffix, without_credentials


@dataclass(frozen=True)
class CacheLocation:
    """The cache folder, and the maximum number of bytes in it."""

    folder: Path
    limit: int | None

    @property
    def cache(self) -> ShardCache:
        """The cache of this process."""
        return _cache(self, os.getpid())


@functools.cache
def _cache(location: CacheLocation, process: int) -> ShardCache:
    return ShardCache(location.folder, location.limit)


class RemoteShard(Shard):
    """The shard at a URL, described by `info`.  Nothing is downloaded until it is read.

    version: a string that changes with the manifest or metadata that lists the shard, so that stale files are not used.
    """

    is_remote = True

    def __init__(self, url: str, info: ShardInfo, location: CacheLocation, version: str) -> None:
        self._url, self.name, self.info = url, without_credentials(url), info
        self.location, self._file_version = location, version

    @functools.cached_property
    def tokens(self) -> RemoteFile:
        """The token file."""
        return self._item(".bin", self.info.num_tokens * self.dtype.itemsize, slice(0, 8))

    @functools.cached_property
    def index(self) -> RemoteFile:
        """The index file: where documents start."""
        return self._item(".idx", (self.info.num_documents + 1) * 8, slice(8, 16))

    def peek(self, start: int, count: int) -> NDArray[np.unsignedinteger[Any]]:
        """Return a few tokens, downloading only these if the server supports range requests."""
        if not self.location.cache.has(self.tokens.name):
            size = self.dtype.itemsize
            found = read_range(self._url, start * size, (start + count) * size)
            if found is not None and len(found) == count * size:
                return np.frombuffer(found, self.dtype)
        return self.read(start, count)

    def verify(self) -> None:
        """Do nothing: the cache verifies a file when it is downloaded and when it is first read."""

    def _fill(self, buffer: NDArray[Any], offset: int, is_index: bool) -> int:
        return self.location.cache.read_into(buffer, self.index if is_index else self.tokens, offset)

    def _item(self, suffix: str, size: int, digits: slice) -> RemoteFile:
        url = with_suffix(self._url, ".bin", suffix)
        what = f"{without_credentials(url)} {self._file_version}"
        name = hashlib.blake2b(what.encode(), digest_size=12).hexdigest()
        return RemoteFile(f"{name}-{size}{suffix}", url, size, lambda: self._checksum(digits))

    def _checksum(self, digits: slice) -> int | None:
        checksum = self.info.checksum or self._own_metadata.checksum
        return int(checksum[digits], 16) if checksum else None

    @functools.cached_property
    def _own_metadata(self) -> ShardInfo:
        """The shard's own metadata.  Raises ShardError if it differs from `info`."""
        url = with_suffix(self._url, ".bin", ".json")
        found = parse_info(read(url, MANY_TRIES), without_credentials(url))
        if replace(found, checksum="") != replace(self.info, checksum=""):
            raise ShardError(f"{self.name} has changed: its metadata does not match the manifest")
        return found
