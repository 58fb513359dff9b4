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
import fcntl
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from trainer.data.cache import is_same_file, open_lock, read_value, remove, write_value
from trainer.data.descriptors import SHARD_FILES, FileVersion
from trainer.data.remote.transport import MANY_TRIES, DamagedDownload, FileChanged, download, with_retries
from trainer.errors import masked, print_stderr
from trainer.files import crc32
from trainer.stopping import add_partial, drop_partial, stop_if_asked

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
            if item.name not in self._cached and not self._is_intact(item, path):
                with _locked_partial(self._folder / f".{item.name}{_PART}") as partial:
                    if not self._is_intact(item, path):  # another process may have fetched it
                        if os.path.lexists(path):
                            print_stderr(f"{path}, in the cache, is damaged; fetching it again")
                            remove(path)
                        self._evict(item.size, due)
                        with_retries(item.url, MANY_TRIES, lambda: _download(item, partial))
                        os.replace(partial, path)
            return self._register(item.name, path)

    def _is_intact(self, item: RemoteFile, path: Path) -> bool:
        """Return whether a file is in the cache and intact.  Raises ShardError if its checksum cannot be determined."""
        if not os.path.lexists(path):
            return False
        expected = _expected_checksum(item, path)
        try:
            return _size_and_crc(path) == (item.size, expected)
        except OSError:
            return False

    def close_evicted(self) -> None:
        """Close files that other processes have evicted, so that their disk space is freed."""
        for name in list(self._cached):
            if not (self._folder / name).exists():
                self._forget(name)

    def _register(self, name: str, path: Path) -> FileVersion:
        stat = os.stat(path)
        return self._cached.setdefault(name, (str(path), stat.st_ino, stat.st_ctime_ns))

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
        with os.fdopen(open_lock(self._folder / ".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
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
            if entry.name.endswith(_PART) and _is_abandoned(Path(entry.path)):
                Path(entry.path).unlink(missing_ok=True)
            elif entry.name != ".lock" and entry.name != checksum_path(Path(entry.name)).name:
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


def _download(item: RemoteFile, path: Path) -> None:
    """Download a file and flush it to disk.

    Raises DamagedDownload if its size or checksum is wrong, FileChanged if the server has a different version of it.
    """
    checksum = item.checksum()
    version = download(item.url, path, with_version=item.version is not None)
    are_reported = (version or "").strip() and (item.version or "").strip()  # otherwise the server reports none
    if are_reported and version != item.version:
        raise FileChanged(f"{masked(item.url)} has changed since it was looked up, a moment ago")
    size, found = _size_and_crc(path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    if size != item.size:
        raise DamagedDownload(f"it has {size} bytes, but its metadata says {item.size}")
    if checksum is None:
        write_value(checksum_path(path.with_name(item.name)), found)
    elif found != checksum:
        raise DamagedDownload("its checksum does not match its metadata")


def checksum_path(path: Path) -> Path:
    """Return the path of the file that stores the checksum of `path`, if its source provides none."""
    return path.with_name(f".{path.name}.crc")


def _expected_checksum(item: RemoteFile, path: Path) -> int | None:
    """Return the checksum that a cached file must have; None if it was stored at download and is lost."""
    checksum = item.checksum()
    return read_value(checksum_path(path)) if checksum is None else checksum


def _size_and_crc(path: Path) -> tuple[int, int]:
    size, found = 0, 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            stop_if_asked()
            size, found = size + len(block), crc32(block, found)
    return size, found


@contextlib.contextmanager
def _locked_partial(path: Path) -> Iterator[Path]:
    """Hold the exclusive lock of a file to write.  The file is removed after the block unless it was renamed."""
    while True:
        descriptor = open_lock(path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            os.close(descriptor)
            rule = f"the file system of the cache {path.parent} has no locks; set data.cache_dir to a local disk"
            raise OSError(error.errno, rule) from error
        if is_same_file(descriptor, path):
            break
        os.close(descriptor)  # it was renamed, or removed, before it could be locked
    add_partial(path)
    try:
        yield path
    finally:
        if is_same_file(descriptor, path):
            path.unlink()
        drop_partial(path)
        os.close(descriptor)


def _is_abandoned(path: Path) -> bool:
    """Return whether no process holds the lock of a partial download."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return is_same_file(descriptor, path)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
