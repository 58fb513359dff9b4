"""A cache of remote files (shards or text), in a folder shared by all processes on this machine.

    NAME          a complete file; its size and, if known, its checksum were verified when it was downloaded
    .NAME.crc     the checksum of NAME as downloaded, if none was published with it
    .NAME.part    a file being downloaded; the process that downloads it holds a lock on it
    .lock         locked while files are evicted

The name of a shard file contains its size, so a file being downloaded counts toward the limit at its full size.  If
the cache is full, the token files needed furthest in the future are evicted first.  Index files are never evicted.

Before a process first reads a file, it verifies the file's checksum.  A corrupt file is downloaded again.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from trainer.data.cache import CORRUPTION_ERRORS, build_entry, read_value, write_value
from trainer.data.remote.transport import MANY_TRIES, DamagedDownload, FileChanged, download, with_retries
from trainer.data.shards import SHARD_FILES, FileVersion
from trainer.errors import masked
from trainer.files import crc32
from trainer.locks import locked, remove_unlocked
from trainer.stopping import raise_if_stop_requested

if TYPE_CHECKING:
    from trainer.data.remote.shards import ShardPrefetcher

_PART = ".part"
"""Suffix of a file being downloaded."""

_BLOCK_BYTES = 1 << 20
"""Number of bytes to read at once to compute a checksum."""


class CacheFull(Exception):
    """There is no room for a new file, even if all token files that are needed later than that file were evicted."""


@dataclass(frozen=True)
class RemoteFile:
    """A remote file.

    name: the file's name in the cache.
    size: in bytes.
    checksum: returns the file's CRC-32, or None if it is unknown; may download a shard's metadata.
    version: the file's version on the server (such as its ETag and modification time) when it was looked up: "" if the
        server reports none, None if the file was never looked up.
    """

    name: str
    url: str
    size: int
    checksum: Callable[[], int | None]
    version: str | None = None


class RemoteFileCache:
    """A folder of cached files, with at most `limit` bytes (None: unlimited).  Thread-safe and process-safe.

    The limit is exceeded only if files that are needed now, or that are never evicted, need more.
    """

    def __init__(self, folder: Path, limit: int | None) -> None:
        self._folder, self._limit = folder, limit
        self._cached: dict[str, FileVersion] = {}
        self._fetching = threading.Lock()
        self.prefetchers: weakref.WeakSet[ShardPrefetcher] = weakref.WeakSet()
        """The prefetchers that use this cache.  They know when each file is needed, which decides what is evicted."""

    def read_into(self, buffer: NDArray[Any], file: RemoteFile, offset: int) -> int:
        """Fill `buffer` with bytes of a file, downloading the file if needed; see `DescriptorCache.read_into`.

        Raises ShardError or OSError as `fetch` does.
        """
        while True:
            try:
                return SHARD_FILES.read_into(buffer, self._cached.get(file.name) or self.fetch(file), offset)
            except FileNotFoundError:  # another process has just evicted the file
                self._cached.pop(file.name, None)

    def has(self, name: str) -> bool:
        """Return whether the file `name` is in the cache."""
        return name in self._cached or (self._folder / name).exists()

    def fetch(self, file: RemoteFile, num_steps: float = -1) -> FileVersion:
        """Return the cached version of a file, downloading it first if needed.

        num_steps: the number of steps until the file is needed.  Only files that are needed later are evicted to make
            room; raises CacheFull if that is not enough.  If negative, the file is needed now, and is downloaded even
            if the cache is full.

        Raises ShardError if the file cannot be downloaded or has changed since it was looked up, and OSError if the
        cache folder cannot be used.
        """
        path = self._folder / file.name
        with self._fetching:
            self._folder.mkdir(parents=True, exist_ok=True)
            if file.name not in self._cached:
                checksum = file.checksum()

                def check(path: Path) -> None:
                    """Raise ValueError or OSError unless the cached file is intact."""
                    expected = read_value(checksum_path(path)) if checksum is None else checksum
                    if _size_and_crc(path) != (file.size, expected):
                        raise ValueError("its size or checksum is wrong")

                def build(partial: Path) -> None:
                    self._evict(file.size, num_steps)
                    with_retries(file.url, MANY_TRIES, lambda: _download(file, checksum, partial))

                try:
                    check(path)
                except CORRUPTION_ERRORS:  # missing or corrupt: `build_entry` checks again, under a lock
                    partial = self._folder / f".{file.name}{_PART}"
                    build_entry(path, build, check, partial=partial, complaint="is damaged; downloading it again")
            stat = os.stat(path)
            return self._cached.setdefault(file.name, (str(path), stat.st_ino, stat.st_ctime_ns))

    def close_evicted(self) -> None:
        """Close files that other processes have evicted, so that their disk space is freed."""
        for name in list(self._cached):
            if not (self._folder / name).exists():
                self._forget(name)

    def _forget(self, name: str) -> None:
        version = self._cached.pop(name, None)
        if version is not None:
            SHARD_FILES.forget(version)

    def _evict(self, size: int, num_steps: float) -> None:
        """Evict the files needed furthest in the future until `size` more bytes fit; see `fetch`."""
        if self._limit is None:
            return
        with locked(self._folder / ".lock", is_required=True):
            self.close_evicted()
            excess = sum(map(_size_of, self._names())) - self._limit  # includes files being downloaded
            evicted: list[str] = []
            for name, steps_until_needed in self._least_urgent_first():
                if excess <= 0 or steps_until_needed <= num_steps:
                    break
                evicted.append(name)
                excess -= _size_of(name)
            if excess > 0 and num_steps >= 0:
                raise CacheFull
            for name in evicted:
                (self._folder / name).unlink(missing_ok=True)
                checksum_path(self._folder / name).unlink(missing_ok=True)
                self._forget(name)

    def _names(self) -> Sequence[str]:
        """Return the names of the files that are cached or being downloaded; remove partial files of dead processes."""
        names = []
        for entry in os.scandir(self._folder):
            if entry.name.endswith(_PART) and remove_unlocked(Path(entry.path)):
                continue
            if entry.name != ".lock" and not entry.name.endswith(".crc"):
                names.append(entry.name)
        return names

    def _least_urgent_first(self) -> list[tuple[str, float]]:
        """Return each token file with the steps until it is needed: the least urgent first, ties in order of age."""
        files, prefetchers = [], list(self.prefetchers)
        for name in self._names():
            if name.endswith(".bin"):
                num_steps = min((prefetcher.steps_until_needed(name) for prefetcher in prefetchers), default=math.inf)
                files.append((name, num_steps, os.stat(self._folder / name).st_mtime_ns))
        files.sort(key=lambda file: (-file[1], file[2]))
        return [(name, steps) for name, steps, _ in files]


def _size_of(name: str) -> int:
    """Return the size of a shard file, which is part of its name."""
    return int(name.removesuffix(_PART).rpartition("-")[2].partition(".")[0])


def _download(file: RemoteFile, checksum: int | None, path: Path) -> None:
    """Download a file and verify its checksum.  If `checksum` is None, store the checksum in the cache instead.

    Raises DamagedDownload if the size or checksum is wrong, FileChanged if the file has changed since it was looked up,
    or any exception of `download`.
    """
    version = download(file.url, path, with_version=file.version is not None)
    has_versions = (version or "").strip() and (file.version or "").strip()  # not all servers report them
    if has_versions and version != file.version:
        raise FileChanged(f"{masked(file.url)} has changed since it was looked up, a moment ago")
    size, crc = _size_and_crc(path)
    if size != file.size:
        raise DamagedDownload(f"it has {size} bytes, but its metadata says {file.size}")
    if checksum is None:
        write_value(checksum_path(path.with_name(file.name)), crc)
    elif crc != checksum:
        raise DamagedDownload("its checksum does not match its metadata")


def checksum_path(path: Path) -> Path:
    """Return the path of the file that stores the checksum of the file at `path`, if none was published with it."""
    return path.with_name(f".{path.name}.crc")


def _size_and_crc(path: Path) -> tuple[int, int]:
    size, crc = 0, 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            raise_if_stop_requested()
            size, crc = size + len(block), crc32(block, crc)
    return size, crc
