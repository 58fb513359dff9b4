"""File locks that the kernel releases if their holder dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from trainer.stopping import raise_if_stop_requested

_MIN_RETRY_S, _MAX_RETRY_S = 0.001, 0.05
"""The first and the longest pause between attempts to acquire a lock, in seconds.

Each pause is twice as long as the previous one, up to the longest.
"""


class FileLock:
    """A file lock, held during a `locked` block.

    is_locked: True if the lock was acquired; False on a file system without locks.
    """

    def __init__(self, descriptor: int, is_locked: bool) -> None:
        self._descriptor, self.is_locked = descriptor, is_locked

    def make_exclusive(self) -> bool:
        """Make a shared lock exclusive, unless other processes share it; return whether it is exclusive.

        If it returns False, the shared lock has been released (flock(2) itself does so on most file systems), so that
        if all holders call this at the same time, the last one succeeds.  If each kept its lock, all could fail, and
        nobody would clean up.  Raises OSError if the file system has no locks.
        """
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # NFS keeps the shared lock
            return False
        return True


@contextlib.contextmanager
def locked(path: Path, *, is_shared: bool = False, is_required: bool = False) -> Iterator[FileLock]:
    """Hold a lock on the file at `path` during a block.  The last holder removes the file, unless the block renamed it.

    is_shared: whether other processes may hold a shared lock on the file at the same time.
    is_required: what to do on a file system without locks.  If True, raise OSError with advice; if False, run the block
        without a lock; the block must then tolerate other processes running it concurrently.

    The kernel releases the lock if this process dies.  Raises StopRequested if this process is asked to stop while
    waiting.
    """
    while True:
        descriptor, is_locked = open_lock(path), True
        try:
            _wait_for_lock(descriptor, fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX)
        except OSError as error:
            is_locked = False
            if is_required:
                os.close(descriptor)
                rule = f"the file system of the cache {path.parent} has no locks; set data.cache_dir to a local disk"
                raise OSError(error.errno, rule) from error
        except BaseException:
            os.close(descriptor)
            raise
        if not is_locked or is_same_file(descriptor, path):
            break
        os.close(descriptor)  # its last holder removed or renamed it after it was opened here
    lock = FileLock(descriptor, is_locked)
    try:
        yield lock
    finally:
        # The file is removed only while it is locked here, and only if `path` is still the locked file.
        if is_locked and (not is_shared or lock.make_exclusive()) and is_same_file(descriptor, path):
            path.unlink(missing_ok=True)
        os.close(descriptor)


def remove_unlocked(path: Path) -> bool:
    """Remove the file at `path` if it exists and no process has locked it; return whether it was removed."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        is_abandoned = FileLock(descriptor, True).make_exclusive() and is_same_file(descriptor, path)
        if is_abandoned:
            path.unlink(missing_ok=True)  # while holding the lock, so that no other process can lock it in between
        return is_abandoned
    finally:
        os.close(descriptor)


def open_lock(path: Path) -> int:
    """Open the lock file at `path`, creating it if it is missing, and return its descriptor.

    A folder at `path` is removed first.
    """
    if path.is_dir():
        remove(path)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)


def _wait_for_lock(descriptor: int, kind: int) -> None:
    """Wait until the open file can be locked, and lock it.  Raises OSError if its file system has no locks."""
    pause = _MIN_RETRY_S
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            raise_if_stop_requested()
            time.sleep(pause)
            pause = min(2 * pause, _MAX_RETRY_S)


def is_same_file(descriptor: int, path: Path) -> bool:
    """Return whether the open file is still the file at `path`."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with its contents.  Does nothing if it does not exist or cannot be removed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
