"""On-disk cache of data that is built once and shared by all processes and later runs.

`get_or_build` handles entries that are folders of files, such as tokenized chats.  Entries are published atomically: an
entry appears under its name only when it is complete and flushed to disk.  A corrupt entry is removed and rebuilt, and
one line reports it.  `read_value` and `write_value` store single JSON values; a corrupt one counts as missing.
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
from trainer.stopping import stop_if_asked

Entry = TypeVar("Entry")

CORRUPTION_ERRORS = (OSError, ValueError, TypeError, LookupError, AttributeError, ShardError)
"""Exceptions that reading a corrupt file may raise."""

_MIN_RETRY_S, _MAX_RETRY_S = 0.001, 0.05
"""First and longest pause between attempts to get a lock, in seconds; the pause doubles each time."""

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def find_cache_folders(setting: str | None) -> list[Path]:
    """Return the candidate cache folders, best first; `setting`, if given, is the only one."""
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


def get_or_build(
    cache_dir: str | None,
    name: str,
    what: str,
    build: Callable[[Path], None],
    load: Callable[[Path], Entry],
    input_bytes: int = 0,
) -> Entry:
    """Return the cache entry `name`, building it first if it is missing or corrupt.

    load: reads an entry from its folder.  It must verify the checksum of everything that is used later, and raise one
        of CORRUPTION_ERRORS if anything is wrong.
    build: writes the files of an entry into an empty folder.
    what, input_bytes: a description of the entry and the size of its input files in bytes, for messages.

    Any number of processes may request the same entry: one builds it while the others wait.  On a file system without
    locks each process builds its own copy, and the first to finish publishes it.  Raises UserError if no cache folder
    is writable.
    """
    folders = find_cache_folders(cache_dir)
    for folder in folders:
        with contextlib.suppress(*CORRUPTION_ERRORS):  # missing or corrupt: checked again under the lock
            return load(folder / name)
    failures: list[UserError] = []
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            return _build(folder / name, build, load)
        except OSError as error:
            failures.append(storage_error(cache_dir, what, folder, error, input_bytes))
    raise (
        failures[-1]
        if failures
        else setting_error("data.cache_dir", cache_dir, f"no folder to store {what} in", fix="give a writable folder")
    )


def storage_error(cache_dir: str | None, what: str, folder: Path, error: OSError, input_bytes: int = 0) -> UserError:
    """Return the error for a cache `folder` that is not writable; `input_bytes` is the size of the input in bytes."""
    if error.errno not in _DISK_FULL:
        rule = f"{what} cannot be stored there ({error})"
        return setting_error("data.cache_dir", cache_dir, rule, fix="give a writable folder")
    room = "your quota is used up"
    if error.errno == errno.ENOSPC:
        free = 0.0
        with contextlib.suppress(OSError):
            free = shutil.disk_usage(folder).free / 1e6
        room = f"the disk is full: {free:,.1f} MB are free, and more is needed"
    if input_bytes:
        room += f" to tokenize {input_bytes / 1e6:,.1f} MB of files"
    rule = f"{what} cannot be stored in {folder}: {room}"
    return setting_error("data.cache_dir", cache_dir, rule, fix="free some space, or give a folder on another disk")


def _build(path: Path, build: Callable[[Path], None], load: Callable[[Path], Entry]) -> Entry:
    with locked(path.with_name(f".{path.name}.lock")) as is_locked:
        if os.path.lexists(path):
            try:
                return load(path)  # another process built it in the meantime
            except CORRUPTION_ERRORS as error:
                print_stderr(f"{path}, in the cache, is damaged ({error}); building it again")
                remove(path)
        if is_locked:  # no other process is building, so temporary folders are leftovers of killed processes
            for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
                remove(leftover)
        made = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
        made.mkdir()
        try:
            build(made)
            _sync(made)
            try:
                os.rename(made, path)
            except OSError:
                if not os.path.lexists(path):
                    raise  # otherwise another process was first, on a file system without locks
            sync_folder(path.parent)
        finally:
            remove(made)
        try:
            return load(path)
        except CORRUPTION_ERRORS as error:
            raise OSError(f"{path} cannot be read back: {error}") from error


def _sync(folder: Path) -> None:
    """Flush the files of an entry to disk."""
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    sync_folder(folder)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Hold a file lock during a block, and remove the lock file afterwards.

    The kernel releases the lock if this process dies.  On a file system without locks, yields False without waiting.
    A stop request ends the wait by raising StopRequested.
    """
    while True:
        descriptor = open_lock(path)
        is_locked = _lock(descriptor)
        if not is_locked or is_same_file(descriptor, path):
            break
        os.close(descriptor)  # its last holder removed the file after we opened it and before we locked it
    try:
        yield is_locked
    finally:
        if is_locked:
            path.unlink(missing_ok=True)  # while holding the lock: later openers get a new file
        os.close(descriptor)


def open_lock(path: Path) -> int:
    """Open the lock file at `path`, creating it if it is missing, and return its descriptor."""
    if path.is_dir():
        remove(path)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)


def _lock(descriptor: int) -> bool:
    """Wait until the open file can be locked, and lock it; return False if its file system has no locks."""
    pause = _MIN_RETRY_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            stop_if_asked()
            time.sleep(pause)
            pause = min(2 * pause, _MAX_RETRY_S)
        except OSError:
            return False


def is_same_file(descriptor: int, path: Path) -> bool:
    """Return whether the open file is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


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
