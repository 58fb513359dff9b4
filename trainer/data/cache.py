"""On-disk cache of data that are built once and shared by all processes and later runs.

`build_entry` builds an entry: it takes a lock, checks again whether the entry exists, builds it under a temporary name,
flushes it to disk, and renames it.  So an entry appears under its name only when it is complete.  A corrupt entry is
reported, removed and rebuilt.  `get_or_build` also chooses the folder; tokenized chats, the standard library, row
layouts and catalogues of shards use it.  Downloaded shards and text (`remote.cache`) have separate folders and use
`build_entry`.  Parts of tokenized text are built by many processes at the same time (`ingest`), so it only uses the
choice of the folder, `in_writable_folder`.

`read_value` and `write_value` store single JSON values; a corrupt one counts as missing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from trainer.data.shards import ShardError
from trainer.errors import UserError, print_stderr, setting_error
from trainer.files import CHECKSUM, checked, replacing, sync_folder, with_checksum
from trainer.stopping import add_partial, drop_partial, stop_if_asked

Entry = TypeVar("Entry")

CORRUPTION_ERRORS = (OSError, ValueError, TypeError, LookupError, AttributeError, ShardError)
"""Exceptions that reading a corrupt file may raise."""

_MIN_RETRY_S, _MAX_RETRY_S = 0.001, 0.05
"""First and longest pause between attempts to get a lock, in seconds; the pause doubles each time."""

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


# -- folders ----------------------------------------------------------------------------------------------------------


def find_cache_folders(setting: str | None) -> list[Path]:
    """Return the possible cache folders, best first; only `setting` if it is given."""
    if setting is not None:
        return [Path(setting).expanduser()]
    folders = []
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if os.path.isabs(base):
        folders.append(Path(base, "meshtrainer"))
    user = os.getuid() if hasattr(os, "getuid") else 0
    shared = Path(tempfile.gettempdir(), f"meshtrainer-{user}")
    if not os.path.lexists(shared) or (shared.lstat().st_uid == user and not shared.is_symlink()):
        folders.append(shared)  # unless another user has created something at this path
    return folders


def in_writable_folder(
    cache_dir: str | None, content: str, use: Callable[[Path], Entry], input_bytes: int = 0
) -> Entry:
    """Return `use(folder)` for the first cache folder for which it raises no OSError.

    content, input_bytes: what is stored in the folder, and the size of its input files in bytes, for messages.

    Raises UserError if there is no such folder.
    """
    error = setting_error("data.cache_dir", cache_dir, f"no folder to store {content} in", fix="give a writable folder")
    for folder in find_cache_folders(cache_dir):
        try:
            return use(folder)
        except OSError as failure:
            error = storage_error(cache_dir, content, folder, failure, input_bytes)
    raise error


def storage_error(cache_dir: str | None, content: str, folder: Path, error: OSError, input_bytes: int = 0) -> UserError:
    """Return the error for a cache folder that cannot be written to; see `in_writable_folder`."""
    if error.errno not in _DISK_FULL:
        rule = f"{content} cannot be stored there ({error})"
        return setting_error("data.cache_dir", cache_dir, rule, fix="give a writable folder")
    reason = "your quota is used up"
    if error.errno == errno.ENOSPC:
        free_mb = 0.0
        with contextlib.suppress(OSError):
            free_mb = shutil.disk_usage(folder).free / 1e6
        reason = f"the disk is full: {free_mb:,.1f} MB are free, and more is needed"
    if input_bytes:
        reason += f" to tokenize {input_bytes / 1e6:,.1f} MB of files"
    rule = f"{content} cannot be stored in {folder}: {reason}"
    return setting_error("data.cache_dir", cache_dir, rule, fix="free some space, or give a folder on another disk")


# -- entries ----------------------------------------------------------------------------------------------------------


def get_or_build(
    cache_dir: str | None,
    name: str,
    content: str,
    build: Callable[[Path], None],
    load: Callable[[Path], Entry],
    input_bytes: int = 0,
    is_file: bool = False,
) -> Entry:
    """Return the cache entry `name`, building it first if it is missing or corrupt.

    load: reads an entry.  It must verify the checksum of everything that is used later, and raise one of
        CORRUPTION_ERRORS if the entry is corrupt.
    build: writes the files of an entry to an empty folder; with `is_file`, writes the file at a path.
    content, input_bytes: see `in_writable_folder`.

    Any number of processes may request the same entry: one builds it while the others wait; see `build_entry`.  Raises
    UserError if no cache folder is writable.
    """
    for folder in find_cache_folders(cache_dir):
        with contextlib.suppress(*CORRUPTION_ERRORS):  # missing or corrupt: checked again under the lock
            return load(folder / name)

    def build_in(folder: Path) -> Entry:
        path = folder / name
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        build_entry(path, build, load, is_file=is_file)
        try:
            return load(path)
        except CORRUPTION_ERRORS as error:
            raise OSError(f"{path} cannot be read back: {error}") from error

    return in_writable_folder(cache_dir, content, build_in, input_bytes)


def build_entry(
    path: Path,
    build: Callable[[Path], None],
    check: Callable[[Path], object],
    *,
    is_file: bool = False,
    partial: Path | None = None,
    damaged: str = "is damaged ({error}); building it again",
) -> None:
    """Build the entry at `path`, unless it exists and `check` raises none of CORRUPTION_ERRORS.

    One process builds it while the others wait.  On a file system without locks, each process builds its own copy, and
    the first to finish publishes it.

    build: writes the entry at a temporary path: to an empty folder, or with `is_file` to a file.
    partial: a temporary name that all processes share, so that they can see what is being written.  The file is locked
        while it is written, so locks are required: see `locked`.
    damaged: the message about a corrupt entry, after its path.

    Raises OSError and the exceptions of `build`, after removing the temporary files.
    """
    lock = path.with_name(f".{path.name}.lock") if partial is None else partial
    with locked(lock, is_required=partial is not None) as file_lock:
        if os.path.lexists(path):
            try:
                check(path)
                return  # another process has built it in the meantime
            except CORRUPTION_ERRORS as error:
                print_stderr(f"{path}, in the cache, {damaged.format(error=error)}")
                remove(path)
        temporary = partial
        if temporary is None:
            if file_lock.is_locked:  # so no other process is building: remove what killed processes have left
                for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
                    remove(leftover)
            temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
            if not is_file:
                temporary.mkdir()
        add_partial(temporary)
        try:
            build(temporary)
            for file in temporary.iterdir() if temporary.is_dir() else [temporary]:
                with open(file, "rb") as opened:
                    os.fsync(opened.fileno())
            if temporary.is_dir():
                sync_folder(temporary)
            try:
                os.rename(temporary, path)
            except OSError:
                if not os.path.lexists(path):
                    raise  # otherwise another process was faster, on a file system without locks
            sync_folder(path.parent)
        finally:
            if partial is None:  # otherwise `locked` removes it, unless another process is already writing to it
                remove(temporary)
            drop_partial(temporary)


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with its contents; do nothing if it does not exist."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def write_value(path: Path, value: Any) -> None:
    """Store a JSON value with a checksum.  Raises OSError."""
    if path.is_dir():
        remove(path)
    with replacing(path) as partial:
        partial.write_text(json.dumps(with_checksum({"value": value})))


def read_value(path: Path) -> Any:
    """Return the stored JSON value, or None if it is missing or corrupt."""
    with contextlib.suppress(*CORRUPTION_ERRORS):
        content = json.loads(path.read_bytes())
        return checked(content)["value"] if CHECKSUM in content else None
    return None


# -- locks ------------------------------------------------------------------------------------------------------------


class FileLock:
    """The lock that a `locked` block holds.

    is_locked: False on a file system without locks.
    """

    def __init__(self, descriptor: int, is_locked: bool) -> None:
        self._descriptor, self.is_locked = descriptor, is_locked

    def make_exclusive(self) -> bool:
        """Make a shared lock exclusive, unless other processes share it; return whether it is exclusive."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


@contextlib.contextmanager
def locked(path: Path, *, is_shared: bool = False, is_required: bool = False) -> Iterator[FileLock]:
    """Hold a file lock during a block.  The last holder removes the file, unless the block has renamed it.

    The kernel releases the lock if this process dies.  On a file system without locks, raises OSError with advice if
    the lock is required; otherwise does not wait, so several processes must be able to run the block at the same time.
    Raises StopRequested if this process is asked to stop while it waits.
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
        os.close(descriptor)  # between our opening and locking the file, its last holder removed or renamed it
    lock = FileLock(descriptor, is_locked)
    try:
        yield lock
    finally:
        # Only a holder of the lock removes the file, and only the file that it has locked.
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
    """Open the lock file at `path`, creating it if it is missing, and return its descriptor."""
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
            stop_if_asked()
            time.sleep(pause)
            pause = min(2 * pause, _MAX_RETRY_S)


def is_same_file(descriptor: int, path: Path) -> bool:
    """Return whether the open file is still the file at `path`."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
