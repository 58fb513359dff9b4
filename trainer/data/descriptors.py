"""Random access to thousands of files through a small cache of file descriptors, without memory mapping.

If a memory-mapped file is truncated or its storage fails, the process dies of SIGBUS.  A mapping also holds its
descriptor open, and touching one page reads ahead its neighbours, a hundred times what a sample needs.  `preadv` has
none of these problems, nor a file position that processes or threads would share.
"""

from __future__ import annotations

import errno
import os
import threading
from typing import Any, TypeAlias

from numpy.typing import NDArray

from trainer.distributed.environment import file_limit

FileVersion: TypeAlias = "tuple[str, int, int]"
"""A version of a file: path, inode and change time (ctime, ns)."""

MAX_OPEN_FILES = 128
"""Maximum number of open descriptors, over all files."""


class _Descriptor:
    """An open file.  It is closed with its last reference, so a reader may finish after the cache has evicted it."""

    number = -1

    def __init__(self, path: str) -> None:
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.number, 0, 0, os.POSIX_FADV_RANDOM)

    def __del__(self) -> None:
        if self.number >= 0:
            os.close(self.number)


class DescriptorCache:
    """Cache of the most recently opened files.  Thread-safe; a forked process may keep using the cache it inherits.

    Looking up an open file takes no lock and records no use, since every sample goes through here.
    """

    def __init__(self) -> None:
        self._open: dict[FileVersion, _Descriptor] = {}
        self._lock = threading.Lock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._reset_lock)

    def read_into(self, buffer: NDArray[Any], file: FileVersion, offset: int) -> int:
        """Fill the contiguous `buffer` with bytes from `offset` on, and return their number: fewer at end of file.

        Each version of a file has its own descriptor, since the file may have been replaced.  Raises OSError.
        """
        descriptor = self._open.get(file) or self._get_or_open(file)
        count = os.preadv(descriptor.number, [buffer.data], offset)
        while 0 < count < buffer.nbytes:  # interrupted by a signal, or end of file
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
                for other in list(self._open)[: max(0, len(self._open) + 1 - self._max_open())]:
                    del self._open[other]
                descriptor = self._open[file] = self._open_file(file[0])
            return descriptor

    def _open_file(self, path: str) -> _Descriptor:
        try:
            return _Descriptor(path)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._open:
                raise
        self._open.clear()  # the rest of the process has used up the limit: make do with one descriptor
        return _Descriptor(path)

    def _max_open(self) -> int:
        return max(1, min(MAX_OPEN_FILES, file_limit() // 4))

    def _reset_lock(self) -> None:
        self._lock = threading.Lock()  # a thread of the parent may have held it during the fork


SHARD_FILES = DescriptorCache()
"""The open files of all token shards that this process reads."""
