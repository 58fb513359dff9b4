"""On-disk cache for data that is built once, then shared by all processes and later runs.

- `in_writable_folder` chooses the folder.  Tokenized text (`ingest`) uses only `in_writable_folder`, since many
  processes build its parts at the same time.
- `build_entry` takes a lock, builds an entry that does not exist yet under a temporary name, flushes it to disk, and
  renames it.  An entry therefore appears under its name only once it is complete.  A corrupt entry is reported, removed
  and rebuilt.  Downloaded shards and text (`remote.cache`), which have folders of their own, use only `build_entry`.
- `get_or_build` combines the two.  It caches tokenized chats, the tokens of Python's standard library (the built-in
  data, `stdlib.py`), the packing of documents into rows, and lists of many local shards.

`write_value` stores a single JSON value and `read_value` returns it; a corrupt one counts as missing.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from trainer.data.shards import ShardError
from trainer.errors import UserError, print_stderr, setting_error
from trainer.files import CHECKSUM, atomic_replace, find_cache_folders, sync_folder, verify_checksum, with_checksum
from trainer.locks import locked, remove
from trainer.stopping import add_partial, drop_partial

Entry = TypeVar("Entry")

CORRUPTION_ERRORS = (OSError, ValueError, TypeError, LookupError, AttributeError, ShardError)
"""Exceptions that reading a corrupt file may raise."""

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


# -- folders ----------------------------------------------------------------------------------------------------------


def in_writable_folder(
    cache_dir: str | None, content: str, use: Callable[[Path], Entry], input_bytes: int = 0
) -> Entry:
    """Return `use(folder)` for the first cache folder for which `use` raises no OSError.

    content: what is stored in the folder, for messages.
    input_bytes: the total size of the files to tokenize, for messages; 0 if nothing is tokenized.

    Raises UserError if there is no such folder.
    """
    error = setting_error(
        "data.cache_dir", cache_dir, f"there is no writable folder for {content}", fix="choose a writable folder"
    )
    for folder in find_cache_folders(cache_dir):
        try:
            return use(folder)
        except OSError as failure:
            error = storage_error(cache_dir, content, folder, failure, input_bytes)
    raise error


def storage_error(cache_dir: str | None, content: str, folder: Path, error: OSError, input_bytes: int = 0) -> UserError:
    """Return the UserError for an OSError in a cache folder; see `in_writable_folder` for the arguments."""
    if error.errno not in _DISK_FULL:
        rule = f"{content} cannot be stored there ({error})"
        return setting_error("data.cache_dir", cache_dir, rule, fix="choose a writable folder")
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

    Any number of processes may request the same entry: one builds it while the others wait; see `build_entry`.

    Raises UserError if no cache folder is writable, and the exceptions of `build` other than OSError.
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
    complaint: str = "is damaged ({error}); building it again",
) -> None:
    """Build the entry at `path`, unless it exists and `check` raises none of CORRUPTION_ERRORS.

    One process builds it while the others wait.  On a file system without locks, each process builds its own copy, and
    one of the copies is kept.

    build: writes the entry at a temporary path: to an empty folder, or with `is_file` to a file.
    partial: a temporary path that all processes share, so that they can see what is being written.  The file is locked
        while it is written, so locks are required: see `locked`.
    complaint: what to print about a corrupt entry, after its path; {error} is replaced by what is wrong with it.

    Raises OSError and the exceptions of `build`, after removing the temporary files.
    """
    lock = path.with_name(f".{path.name}.lock") if partial is None else partial
    with locked(lock, is_required=partial is not None) as file_lock:
        if os.path.lexists(path):
            try:
                check(path)
                return  # another process has built it in the meantime
            except CORRUPTION_ERRORS as error:
                print_stderr(f"{path}, in the cache, {complaint.format(error=error)}")
                remove(path)
        temporary = partial
        if temporary is None:
            if file_lock.is_locked:  # so no other process is building: remove what killed processes left behind
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


def write_value(path: Path, value: Any) -> None:
    """Store a JSON value with a checksum.  Raises OSError."""
    if path.is_dir():
        remove(path)
    with atomic_replace(path) as partial:
        partial.write_text(json.dumps(with_checksum({"value": value})))


def read_value(path: Path) -> Any:
    """Return the stored JSON value, or None if it is missing or corrupt."""
    with contextlib.suppress(*CORRUPTION_ERRORS):
        content = json.loads(path.read_bytes())
        return verify_checksum(content)["value"] if CHECKSUM in content else None
    return None
