"""A cache of remote shard files, in a folder shared by all processes of this machine.

    NAME          a complete file, whose size and checksum were correct when it was downloaded
    .NAME.crc     its checksum, if its source provides none
    .NAME.part    a file being downloaded; it is locked by the process that downloads it, until that process dies
    .lock         held while files are evicted

A name ends in the file's size, so a file being downloaded counts at its full size from the start.  If the cache is
full, the token files that are needed last are evicted; indices stay.

A process verifies the checksum of a file before it first reads it.  A damaged file is downloaded again.
"""

from __future__ import annotations

import contextlib
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
from trainer.stopping import stop_if_asked

if TYPE_CHECKING:
    from trainer.data.remote.shards import ShardPrefetcher

_PART = ".part"
_BLOCK = 1 << 20


class CacheFull(Exception):
    """The cache is full of shards that are needed sooner."""


@dataclass(frozen=True)
class RemoteFile:
    """A remote file.

    checksum: returns its CRC-32, or None if there is none; it may have to download the metadata.

    version: the server's version of it (ETag, modification time) at look-up; None if it was not looked up.
    """

    name: str
    url: str
    size: int
    checksum: Callable[[], int | None]
    version: str | None = None


class ShardCache:
    """A folder of cached files, of at most `limit` bytes (None: unlimited).  Thread-safe and process-safe."""

    def __init__(self, folder: Path, limit: int | None) -> None:
        self._folder, self._limit = folder, limit
        self._cached: dict[str, FileVersion] = {}
        self._fetching = threading.Lock()
        self._forecasts: weakref.WeakSet[ShardPrefetcher] = weakref.WeakSet()

    def add_forecast(self, forecast: ShardPrefetcher) -> None:
        """Take `forecast` into account when evicting files, for as long as that object exists."""
        self._forecasts.add(forecast)

    def read_into(self, buffer: NDArray[Any], item: RemoteFile, offset: int) -> int:
        """Fill `buffer` with bytes of a file, downloading the file if needed; see `DescriptorCache.read_into`.

        Raises OSError, and ShardError if the file cannot be downloaded.
        """
        while True:
            try:
                return SHARD_FILES.read_into(buffer, self._cached.get(item.name) or self.fetch(item), offset)
            except FileNotFoundError:  # another process has just evicted it
                self._cached.pop(item.name, None)

    def has(self, name: str) -> bool:
        """Return whether a file is in the cache."""
        return name in self._cached or (self._folder / name).exists()

    def fetch(self, item: RemoteFile, due: float = -1) -> FileVersion:
        """Return the cached version of a file, downloading it if needed.

        A file that is due in `due` steps evicts only files that are needed later.  Raises CacheFull if that does not
        free enough space, Unreachable, and OSError for the cache folder itself.
        """
        path = self._folder / item.name
        with self._fetching:
            self._folder.mkdir(parents=True, exist_ok=True)
            if item.name not in self._cached:
                checksum = item.checksum()

                def check(path: Path) -> None:
                    """Raise ValueError or OSError unless the file is intact."""
                    expected = read_value(checksum_path(path)) if checksum is None else checksum
                    if _size_and_crc(path) != (item.size, expected):
                        raise ValueError("its size or checksum is wrong")

                def build(partial: Path) -> None:
                    self._evict(item.size, due)
                    with_retries(item.url, MANY_TRIES, lambda: _download(item, checksum, partial))

                is_intact = False
                with contextlib.suppress(*CORRUPTION_ERRORS):  # missing or corrupt: checked again under the lock
                    check(path)
                    is_intact = True
                if not is_intact:
                    partial = self._folder / f".{item.name}{_PART}"
                    build_entry(path, build, check, partial=partial, damaged="is damaged; fetching it again")
            stat = os.stat(path)
            return self._cached.setdefault(item.name, (str(path), stat.st_ino, stat.st_ctime_ns))

    def close_evicted(self) -> None:
        """Close files that other processes have evicted, so that their disk space is freed."""
        for name in list(self._cached):
            if not (self._folder / name).exists():
                self._forget(name)

    def _forget(self, name: str) -> None:
        version = self._cached.pop(name, None)
        if version is not None:
            SHARD_FILES.forget(version)

    def _steps_until_needed(self, name: str) -> float:
        return min((forecast.steps_until_needed(name) for forecast in list(self._forecasts)), default=math.inf)

    def _evict(self, size: int, due: float) -> None:
        """Evict the files that are needed last until `size` more bytes fit.  Raises CacheFull."""
        if self._limit is None:
            return
        with locked(self._folder / ".lock", is_required=True):
            self.close_evicted()
            excess = sum(map(_size_of, self._names())) - self._limit  # includes files being downloaded
            evicted: list[str] = []
            for name, steps_until_needed in self._by_need():
                if excess <= 0 or steps_until_needed <= due:
                    break
                evicted.append(name)
                excess -= _size_of(name)
            if excess > 0 and due >= 0:
                raise CacheFull
            for name in evicted:
                (self._folder / name).unlink(missing_ok=True)
                checksum_path(self._folder / name).unlink(missing_ok=True)
                self._forget(name)

    def _names(self) -> Sequence[str]:
        """Return the names of files that are cached or being downloaded; removes those left by dead processes."""
        found = []
        for entry in os.scandir(self._folder):
            if entry.name.endswith(_PART) and remove_unlocked(Path(entry.path)):
                continue
            if entry.name != ".lock" and not entry.name.endswith(".crc"):
                found.append(entry.name)
        return found

    def _by_need(self) -> list[tuple[str, float]]:
        """Return the token files, those needed last first; among files of unknown need, the oldest first."""
        found = []
        for name in self._names():
            if name.endswith(".bin"):
                found.append((name, self._steps_until_needed(name), os.stat(self._folder / name).st_mtime_ns))
        found.sort(key=lambda each: (-each[1], each[2]))
        return [(name, steps_until_needed) for name, steps_until_needed, _ in found]


def _size_of(name: str) -> int:
    """Return the file size that is part of a name."""
    return int(name.removesuffix(_PART).rpartition("-")[2].partition(".")[0])


def _download(item: RemoteFile, checksum: int | None, path: Path) -> None:
    """Download a file, and verify it against `checksum` if there is one; otherwise store its checksum beside it.

    Raises DamagedDownload if its size or checksum is wrong, FileChanged if the server has a different version of it.
    """
    version = download(item.url, path, with_version=item.version is not None)
    are_reported = (version or "").strip() and (item.version or "").strip()  # otherwise the server reports none
    if are_reported and version != item.version:
        raise FileChanged(f"{masked(item.url)} has changed since it was looked up, a moment ago")
    size, found = _size_and_crc(path)
    if size != item.size:
        raise DamagedDownload(f"it has {size} bytes, but its metadata says {item.size}")
    if checksum is None:
        write_value(checksum_path(path.with_name(item.name)), found)
    elif found != checksum:
        raise DamagedDownload("its checksum does not match its metadata")


def checksum_path(path: Path) -> Path:
    """Return the path of the file that stores the checksum of `path`, if its source provides none."""
    return path.with_name(f".{path.name}.crc")


def _size_and_crc(path: Path) -> tuple[int, int]:
    size, found = 0, 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            stop_if_asked()
            size, found = size + len(block), crc32(block, found)
    return size, found
