"""Files that are read here and there: thousands of them through few descriptors, and nothing is mapped.

A mapped file that becomes shorter, or whose storage fails, ends the process with SIGBUS; it keeps its descriptor for
as long as it is mapped; and touching a page of it fetches its neighbours too, a hundred times what a sample needs.
`preadv` has none of this, and no position that processes or threads would share.
"""

from __future__ import annotations

import errno
import os
import threading
from typing import Any, TypeAlias

from numpy.typing import NDArray

from trainer.distributed.environment import file_limit

Version: TypeAlias = "tuple[str, int, int]"
"""A version of a file: its path, and what tells it from another of that name (inode, time of change)."""

MOST = 128
"""Descriptors that are kept open, for all files together."""


class _Descriptor:
    """An open file, closed with its last user, which may still read from it when it leaves the cache."""

    number = -1

    def __init__(self, path: str) -> None:
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.number, 0, 0, os.POSIX_FADV_RANDOM)

    def __del__(self) -> None:
        if self.number >= 0:
            os.close(self.number)


class Descriptors:
    """A cache of open files, those opened last.  Safe for threads; a forked process may go on with what it inherits.

    A file that is open is found without a lock, and no record is kept of its use: every sample comes this way.
    """

    def __init__(self) -> None:
        self._open: dict[Version, _Descriptor] = {}
        self._lock = threading.Lock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._renew_lock)

    def read_into(self, buffer: NDArray[Any], file: Version, offset: int) -> int:
        """Fill `buffer`, in one piece, with bytes from `offset` on; returns how many there were: fewer at the end.

        Who has seen another version of the file reads through another descriptor: it may have been replaced.
        Raises OSError.
        """
        descriptor = self._open.get(file) or self._take(file)
        count = os.preadv(descriptor.number, [buffer.data], offset)
        while 0 < count < buffer.nbytes:  # a signal, or the end
            more = os.preadv(descriptor.number, [buffer.data.cast("B")[count:]], offset + count)
            if not more:
                break
            count += more
        return count

    def forget(self, file: Version) -> None:
        """Close a file, unless it is being read from at the moment."""
        with self._lock:
            self._open.pop(file, None)

    def close(self) -> None:
        """Close all files that are not being read from at the moment."""
        with self._lock:
            self._open.clear()

    def _take(self, file: Version) -> _Descriptor:
        with self._lock:
            descriptor = self._open.get(file)  # another thread may just have opened it
            if descriptor is None:
                for other in list(self._open)[: max(0, len(self._open) + 1 - self._room())]:
                    del self._open[other]
                descriptor = self._open[file] = self._open_anew(file[0])
            return descriptor

    def _open_anew(self, path: str) -> _Descriptor:
        try:
            return _Descriptor(path)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._open:
                raise
        self._open.clear()  # others have taken the rest: make do with one
        return _Descriptor(path)

    def _room(self) -> int:
        return max(1, min(MOST, file_limit() // 4))

    def _renew_lock(self) -> None:
        self._lock = threading.Lock()  # another thread of the parent's may have held it


SHARD_FILES = Descriptors()
"""Those of all token shards that this process reads."""
