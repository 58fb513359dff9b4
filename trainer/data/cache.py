"""The cache: what is built once from data, kept on disk, and read by every process and later run.

`get_or_build` is for whatever is a folder of files, such as tokenized chats.  An entry appears under its name only once
it is complete and on disk.  One that is found damaged is removed and built again, which is said in one line.
`read_value` and `write_value` are for single facts, which are looked up again if their file is damaged.
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
from trainer.errors import UserError, say, setting_error
from trainer.files import CHECKSUM, checked, replacing, sync_folder, with_checksum
from trainer.stopping import stop_if_asked

Entry = TypeVar("Entry")

DAMAGE = (OSError, ValueError, TypeError, LookupError, AttributeError, ShardError)
"""What reading a damaged file may raise."""

_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05
"""Seconds between attempts to get a lock: twice as many each time."""

_FULL = (errno.ENOSPC, errno.EDQUOT)


def find_cache_folders(setting: str | None) -> list[Path]:
    """Return where tokenized text may be kept, best first.  What the user names is the only place."""
    if setting is not None:
        return [Path(setting).expanduser()]
    folders = []
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if os.path.isabs(base):
        folders.append(Path(base, "meshtrainer"))
    user = os.getuid() if hasattr(os, "getuid") else 0
    shared = Path(tempfile.gettempdir(), f"meshtrainer-{user}")
    if not os.path.lexists(shared) or (shared.lstat().st_uid == user and not shared.is_symlink()):
        folders.append(shared)  # unless another user has put something there
    return folders


def get_or_build(
    cache_dir: str | None,
    name: str,
    what: str,
    build: Callable[[Path], None],
    load: Callable[[Path], Entry],
    made_of: int = 0,
) -> Entry:
    """Return the cache's entry `name`, which is built first if it is missing or damaged.

    load: reads an entry from its folder.  It must compare everything that is used later with a checksum, and raise one
        of DAMAGE if anything is wrong.
    build: writes the files of an entry into an empty folder.
    what, made_of: what the entry holds, and the bytes of files that it is made of, for messages.

    Any number of processes may ask for the same entry: one builds it, the others wait.  On a file system without locks
    each builds it for itself, and the first to finish provides it.  Raises UserError if no folder can be written.
    """
    folders = find_cache_folders(cache_dir)
    for folder in folders:
        with contextlib.suppress(*DAMAGE):  # missing, or to be built again: looked at again under the lock
            return load(folder / name)
    failures: list[UserError] = []
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            return _build(folder / name, build, load)
        except OSError as error:
            failures.append(cannot_store(cache_dir, what, folder, error, made_of))
    raise (
        failures[-1]
        if failures
        else setting_error("data.cache_dir", cache_dir, f"no folder to store {what} in", fix="give a writable folder")
    )


def cannot_store(cache_dir: str | None, what: str, folder: Path, error: OSError, made_of: int = 0) -> UserError:
    """Return what to raise if the cache's `folder` cannot be written; `made_of` is the size of the input, in bytes."""
    if error.errno not in _FULL:
        rule = f"{what} cannot be stored there ({error})"
        return setting_error("data.cache_dir", cache_dir, rule, fix="give a writable folder")
    room = "your quota is used up"
    if error.errno == errno.ENOSPC:
        free = 0.0
        with contextlib.suppress(OSError):
            free = shutil.disk_usage(folder).free / 1e6
        room = f"the disk is full: {free:,.1f} MB are free, and more is needed"
    if made_of:
        room += f" to tokenize {made_of / 1e6:,.1f} MB of files"
    rule = f"{what} cannot be stored in {folder}: {room}"
    return setting_error("data.cache_dir", cache_dir, rule, fix="free some space, or give a folder on another disk")


def _build(path: Path, build: Callable[[Path], None], load: Callable[[Path], Entry]) -> Entry:
    with locked(path.with_name(f".{path.name}.lock")) as is_locked:
        if os.path.lexists(path):
            try:
                return load(path)  # another process has built it meanwhile
            except DAMAGE as error:
                say(f"{path}, in the cache, is damaged ({error}); building it again")
                remove(path)
        if is_locked:  # no other process is building: what there is was left by one that was killed
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
                    raise  # else, without locks, another process was first
            sync_folder(path.parent)
        finally:
            remove(made)
        try:
            return load(path)
        except DAMAGE as error:
            raise OSError(f"{path} cannot be read back: {error}") from error


def _sync(folder: Path) -> None:
    """Flush the files of an entry to disk."""
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    sync_folder(folder)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Hold a lock for a block, which the kernel releases if this process dies; the file is removed after the block.

    Yields False, and does not wait, on a file system without locks.  A stop request ends the wait, and the process.
    """
    while True:
        descriptor = open_lock(path)
        is_locked = _lock(descriptor)
        if not is_locked or is_at(descriptor, path):
            break
        os.close(descriptor)  # removed by its last holder, after it was opened and before it was locked
    try:
        yield is_locked
    finally:
        if is_locked:
            path.unlink(missing_ok=True)  # while it is held: who opens it from now on finds another file
        os.close(descriptor)


def open_lock(path: Path) -> int:
    """Return the descriptor of a file to lock, which is created if it is missing."""
    if path.is_dir():
        remove(path)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)


def _lock(descriptor: int) -> bool:
    """Lock an open file, once no other process does; returns False if its file system has no locks."""
    pause = _PAUSE_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            stop_if_asked()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        except OSError:
            return False


def is_at(descriptor: int, path: Path) -> bool:
    """Return whether an open file is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with all that is in it; nothing, if it is not there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def write_value(path: Path, value: Any) -> None:
    """Keep a JSON value, with a checksum.  Raises OSError."""
    if path.is_dir():
        remove(path)
    with replacing(path) as partial:
        partial.write_text(json.dumps(with_checksum({"value": value})))


def read_value(path: Path) -> Any:
    """Return the JSON value that was kept; None if there is none, or its file is damaged."""
    with contextlib.suppress(*DAMAGE):
        content = json.loads(path.read_bytes())
        return checked(content)["value"] if CHECKSUM in content else None
    return None
