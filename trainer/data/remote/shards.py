"""Finds the token shards at a URL, reads them through a cache, and prefetches those that a run needs next.

The URL may name a shard, a manifest or a folder, or be a glob.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trainer.data.cache import read_value, write_value
from trainer.data.former_records import holds_records
from trainer.data.remote.cache import CacheFull, RemoteFile, RemoteFileCache
from trainer.data.remote.transport import (
    MANY_TRIES,
    RemoteReadError,
    find_urls,
    json_url_error,
    map_urls,
    missing_folder_error,
    read_range,
    read_url,
)
from trainer.data.shards import MANIFEST, Shard, ShardError, ShardInfo, ShardManifest, ShardSet, parse_info
from trainer.data.source import sample_content
from trainer.distributed.environment import find_environment
from trainer.errors import masked, setting_error
from trainer.files import find_cache_folders
from trainer.urls import has_pattern, join, parent, split_query, with_suffix, without_credentials


class NoShardsFound(Exception):
    """There are no token shards at a URL."""


def open_remote(url: str, key: str, cache_dir: str | None, cache_gib: float | None) -> ShardSet:
    """Return the shards at a URL.  Each is downloaded into the cache when it is first read or prefetched.

    url: the URL of a shard, a manifest or a folder, or a glob.
    key: the configuration key whose value is the URL, for messages.
    cache_dir: the value of `data.cache_dir`.
    cache_gib: the maximum size of the cache in GiB; None for no limit.

    Raises NoShardsFound if there are no shards at the URL.  Raises ShardError if they cannot be reached or used.
    Raises UserError if the URL names a shard's metadata or a .json file of records, if a shard has no metadata, or if
    the cache is not writable or too small.
    """
    cache_settings = CacheSettings(
        make_cache_subfolder(cache_dir, "shards"), None if cache_gib is None else int(cache_gib * 2**30)
    )
    path, query = split_query(url)
    url = path.rstrip("/") + query
    content = None
    if path.endswith(".json") and not has_pattern(url):
        content = _read_manifest(url, key)
    elif not path.endswith(".bin") and not has_pattern(url):
        with contextlib.suppress(RemoteReadError):  # missing, or unreadable: list the folder
            content = read_url(join(url, MANIFEST))
            url = join(url, MANIFEST)
    shards = (
        _shards_in_manifest(url, content, cache_settings)
        if content is not None
        else _shards_in_folder(url, key, cache_settings)
    )
    if cache_gib is not None:
        _check_capacity([*shards.train, *shards.held_out], cache_gib)
    return shards


def _read_manifest(url: str, key: str) -> bytes:
    content = read_url(url)
    with contextlib.suppress(ShardError):
        parse_info(content, url)
        token_file = with_suffix(url, ".json", ".bin")
        raise setting_error(key, url, "is the metadata of a token shard; give its .bin file", meant=token_file)
    if holds_records(content):
        raise json_url_error(key, url)
    return content


def _shards_in_manifest(url: str, content: bytes, cache_settings: CacheSettings) -> ShardSet:
    manifest = ShardManifest.parse(content, url)
    base, version = parent(url), hashlib.blake2b(content, digest_size=12).hexdigest()

    def shards(is_held_out: bool) -> list[Shard]:
        listed: list[Shard] = []
        for name, info in manifest.infos(is_held_out):
            if name.startswith("/"):
                rule = f"lists {name}, which is on another machine's file system"
                raise ShardError(f"the manifest {masked(base)} {rule}")
            listed.append(RemoteShard(name if "://" in name else join(base, name), info, cache_settings, version))
        return listed

    train, held_out = shards(is_held_out=False), shards(is_held_out=True)
    names = [shard.name for shard in train]
    return ShardSet(names, train, manifest.train_content, held_out, manifest.held_out_content)


def _shards_in_folder(url: str, key: str, cache_settings: CacheSettings) -> ShardSet:
    """Return the shards in a folder, those that match a glob, or the single shard at the URL."""
    is_single = split_query(url)[0].endswith(".bin") and not has_pattern(url)
    try:
        urls = [url] if is_single else [match for match in find_urls(url) if split_query(match)[0].endswith(".bin")]
    except RemoteReadError as error:
        if error.is_missing and not has_pattern(url):
            raise missing_folder_error(error) from error
        raise
    if not urls:
        raise NoShardsFound
    try:
        metadata = map_urls(read_url, [with_suffix(url, ".bin", ".json") for url in urls])
    except RemoteReadError as error:
        if not error.is_missing:
            raise
        whose = "its metadata" if is_single else "the metadata of a shard,"
        fix = "check the URL; a token file of another trainer has no metadata, and is read only from a local path"
        raise setting_error(key, url, f"{whose} {error}", fix=fix) from error
    shards: list[Shard] = [
        RemoteShard(url, parse_info(content, url), cache_settings, hashlib.blake2b(content, digest_size=12).hexdigest())
        for url, content in zip(urls, metadata, strict=True)
    ]
    return ShardSet(
        [shard.name for shard in shards], shards, _cached_content(shards, b"\0".join(metadata), cache_settings)
    )


def _cached_content(shards: Sequence[Shard], metadata: bytes, cache_settings: CacheSettings) -> str:
    """Return the `sample_content` of shards; from the cache, if it has been computed for the same metadata before."""
    digest = hashlib.blake2b(metadata, digest_size=12)
    digest.update("\n".join(shard.name for shard in shards).encode())
    path = cache_settings.folder.with_name(f"content-{digest.hexdigest()}")
    if isinstance(stored := read_value(path), str):
        return stored
    content = sample_content(shards)
    with contextlib.suppress(OSError):
        write_value(path, content)
    return content


def make_cache_subfolder(cache_dir: str | None, name: str) -> Path:
    """Create the subfolder `name` of the cache, for downloads, and return it.

    Raises UserError if no cache folder is writable.
    """
    failure: OSError | None = None
    for base in find_cache_folders(cache_dir):
        try:
            (base / name).mkdir(parents=True, exist_ok=True)
            return base / name
        except OSError as error:
            failure = error
    rule = f"{name} cannot be stored there ({failure})" if failure else f"no folder to store {name} in"
    raise setting_error("data.cache_dir", cache_dir, rule, fix="choose a writable folder")


def _check_capacity(shards: Sequence[Shard], cache_gib: float) -> None:
    """Raise UserError unless the cache can hold one shard for each rank of this machine."""
    ranks = find_environment().local_world_size
    min_bytes = ranks * max((shard.info.num_tokens * shard.dtype.itemsize for shard in shards), default=0)
    if cache_gib * 2**30 < min_bytes:
        shards_to_hold = f"a shard for each of {ranks} ranks" if ranks > 1 else "the largest shard"
        legal = float(f"{min_bytes / 2**30 * 1.0005 + 1e-9:.4g}")
        raise setting_error("data.cache_gib", cache_gib, f"must hold {shards_to_hold}", legal)


# ---------------------------------------------------------------------------------------------------------------
# A remote shard


@dataclass(frozen=True)
class CacheSettings:
    """The settings of a cache of shards.

    folder: the folder of the cache, shared by all processes of this machine.
    limit: the maximum number of bytes in it; None for no limit.
    """

    folder: Path
    limit: int | None

    @property
    def cache(self) -> RemoteFileCache:
        """This process's own cache: a forked process must not share the locks of its parent."""
        key = self, os.getpid()
        if key not in _CACHES:
            _CACHES[key] = RemoteFileCache(self.folder, self.limit)
        return _CACHES[key]


_CACHES: dict[tuple[CacheSettings, int], RemoteFileCache] = {}
"""The caches of this process and, if it was forked, of its ancestors, keyed by settings and process ID."""


class RemoteShard(Shard):
    """The shard at a URL, with the metadata `info`.  Nothing is downloaded until the shard is read or prefetched.

    version: a string that changes with the file that describes the shard (the manifest or the metadata), so that no
        stale file in the cache is used.
    """

    is_remote = True

    def __init__(self, url: str, info: ShardInfo, cache_settings: CacheSettings, version: str) -> None:
        self._url, self.name, self.info = url, without_credentials(url), info
        self.cache_settings, self._file_version = cache_settings, version

    @functools.cached_property
    def tokens(self) -> RemoteFile:
        """The token file."""
        return self._remote_file(".bin", self.info.num_tokens * self.dtype.itemsize, slice(0, 8))

    @functools.cached_property
    def index(self) -> RemoteFile:
        """The index file, with the offsets at which documents start."""
        return self._remote_file(".idx", (self.info.num_documents + 1) * 8, slice(8, 16))

    def peek(self, start: int, count: int) -> NDArray[np.unsignedinteger[Any]]:
        """Return a few tokens.  If the server supports range requests, only these are downloaded."""
        if not self.cache_settings.cache.has(self.tokens.name):
            size = self.dtype.itemsize
            content = read_range(self._url, start * size, (start + count) * size)
            if content is not None and len(content) == count * size:
                return np.frombuffer(content, self.dtype)
        return self.read(start, count)

    def verify(self) -> None:
        """Do nothing: the cache verifies a file when it is downloaded and when it is first read."""

    def _fill(self, buffer: NDArray[Any], offset: int, is_index: bool) -> int:
        return self.cache_settings.cache.read_into(buffer, self.index if is_index else self.tokens, offset)

    def _remote_file(self, suffix: str, size: int, checksum_digits: slice) -> RemoteFile:
        url = with_suffix(self._url, ".bin", suffix)
        identity = f"{without_credentials(url)} {self._file_version}"
        name = hashlib.blake2b(identity.encode(), digest_size=12).hexdigest()
        return RemoteFile(f"{name}-{size}{suffix}", url, size, lambda: self._checksum(checksum_digits))

    def _checksum(self, checksum_digits: slice) -> int | None:
        checksum = self.info.checksum or self._metadata.checksum
        return int(checksum[checksum_digits], 16) if checksum else None

    @functools.cached_property
    def _metadata(self) -> ShardInfo:
        """The content of the shard's metadata file.  Raises ShardError if it differs from `info`."""
        url = with_suffix(self._url, ".bin", ".json")
        metadata = parse_info(read_url(url, MANY_TRIES), without_credentials(url))
        if replace(metadata, checksum="") != replace(self.info, checksum=""):
            raise ShardError(f"{self.name} has changed: its metadata does not match the manifest")
        return metadata


# ---------------------------------------------------------------------------------------------------------------
# Prefetching: a background thread downloads shards before they are needed, since the sample order is known in advance


_NUM_SAMPLES_AHEAD = 4096
"""Number of samples to look ahead, rounded up to complete steps."""

_RETRY_DELAY_S = 1.0
"""Maximum seconds until the next attempt if nothing is missing or an attempt has failed.  If the cache was full, other
processes may have evicted files by then."""

SampleIndices: TypeAlias = "NDArray[np.int64]"


@dataclass(frozen=True)
class _Step:
    """The token files that a step needs.

    names: the names of the files that any rank needs.
    files: the files that this rank needs, in the order of its samples.
    """

    names: frozenset[str]
    files: Sequence[RemoteFile]


class ShardPrefetcher:
    """Prefetches the token files of upcoming steps in a thread, which runs while `follow` is being iterated over.

    shards: the source's shards, all of them remote.
    shards_of: returns the positions in `shards` of the shards that contain given samples, in the order of the samples.
    steps: the samples of each step, over all ranks.
    rank_slice: this rank's slice of a step's samples.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        shards_of: Callable[[SampleIndices], list[int]],
        steps: Iterator[SampleIndices],
        rank_slice: slice,
    ) -> None:
        remote_shards = [shard for shard in shards if isinstance(shard, RemoteShard)]
        self._files, self._shards_of = [shard.tokens for shard in remote_shards], shards_of
        self._cache, self._steps, self._rank_slice = remote_shards[0].cache_settings.cache, steps, rank_slice
        self._steps_ahead: deque[_Step] = deque()
        self._steps_until: dict[str, int] = {}
        self._num_taken = 0
        self._changed = threading.Condition()
        self._is_closed = False
        self._look_ahead()
        self._cache.prefetchers.add(self)

    def steps_until_needed(self, name: str) -> float:
        """Return the number of steps until a file is needed, or infinity if that is not known."""
        return self._steps_until.get(name, math.inf)

    def follow(self, indices: Iterator[SampleIndices]) -> Iterator[SampleIndices]:
        """Yield the samples of each micro-batch in `indices` unchanged, prefetching files in the background."""
        threading.Thread(target=self._fetch, name="fetch", daemon=True).start()
        try:
            for samples in indices:
                yield samples
                self._advance(len(samples))
        finally:
            with self._changed:
                self._is_closed = True
                self._changed.notify()

    def _advance(self, count: int) -> None:
        self._num_taken += count
        if self._num_taken == self._rank_slice.stop - self._rank_slice.start:
            self._num_taken = 0
            with self._changed:
                self._steps_ahead.popleft()
                self._look_ahead()
                self._changed.notify()

    def _look_ahead(self) -> None:
        size = 0
        for samples in self._steps:
            files = [self._files[number] for number in self._shards_of(samples[self._rank_slice])]
            names = frozenset(self._files[number].name for number in self._shards_of(np.unique(samples)))
            self._steps_ahead.append(_Step(names, list({file.name: file for file in files}.values())))
            size = len(samples)
            if len(self._steps_ahead) * size >= _NUM_SAMPLES_AHEAD:
                break
        steps_until: dict[str, int] = {}
        for num_steps, step in enumerate(self._steps_ahead):
            for name in step.names:
                steps_until.setdefault(name, num_steps)
        self._steps_until = steps_until  # replaced at once: other threads read it without a lock

    def _fetch(self) -> None:
        while not self._is_closed:
            with contextlib.suppress(CacheFull, ShardError, OSError):  # errors are raised when the file is needed
                if self._fetch_next():
                    continue
            with self._changed:
                if not self._is_closed:
                    self._changed.wait(_RETRY_DELAY_S)
            self._cache.close_evicted()

    def _fetch_next(self) -> bool:
        """Download the first missing file that this rank needs; return whether there was one."""
        with self._changed:
            steps = list(self._steps_ahead)
        for num_steps, step in enumerate(steps):
            for file in step.files:
                if not self._cache.has(file.name):
                    self._cache.fetch(file, num_steps)
                    return True
        return False
