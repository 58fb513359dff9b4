"""On-disk cache for what is computed once, then shared by all processes and later runs.

`get_or_build` returns an entry: a file or a folder that one process builds under a temporary name, flushes to disk and
renames, while others wait for its lock.  An entry therefore appears under its name only once it is complete.  A corrupt
entry is reported and built again.  Token shards, which are built piece by piece (`build`), use only
`in_writable_folder`, which chooses the folder.

`write_value` stores a single JSON value and `read_value` returns it; a corrupt one counts as missing.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from trainer.data.shards import ShardError
from trainer.errors import UserError, print_stderr, setting_error
from trainer.files import (
    atomic_replace,
    find_cache_folders,
    locked,
    remove,
    sync_folder,
    verify_checksum,
    with_checksum,
)
from trainer.stopping import stop

Entry = TypeVar("Entry")

CORRUPTION_ERRORS = (OSError, ValueError, TypeError, LookupError, AttributeError, ShardError)
"""Exceptions that reading a corrupt file may raise."""


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

    Raises UserError if no cache folder is writable, and the exceptions of `build` other than OSError.
    """
    for folder in find_cache_folders(cache_dir):
        with contextlib.suppress(*CORRUPTION_ERRORS):  # missing or corrupt: checked again under the lock
            return load(folder / name)

    def build_below(folder: Path) -> Entry:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = folder / name
        with locked(path):
            if os.path.lexists(path):
                try:
                    return load(path)  # another process has built it in the meantime
                except CORRUPTION_ERRORS as error:
                    print_stderr(f"{path}, in the cache, is damaged ({error}); building it again")
                    remove(path)
            _build(path, build, is_file)
            try:
                return load(path)
            except CORRUPTION_ERRORS as error:
                raise OSError(f"{path} cannot be read back: {error}") from error

    return in_writable_folder(cache_dir, content, build_below, input_bytes)


def _build(path: Path, build: Callable[[Path], None], is_file: bool) -> None:
    """Build an entry under a temporary name and rename it.  The caller holds its lock."""
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):  # of killed processes
        remove(leftover)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    stop.partial.add(temporary)
    try:
        if not is_file:
            temporary.mkdir()
        build(temporary)
        for file in [temporary] if is_file else temporary.iterdir():
            with open(file, "rb") as opened:
                os.fsync(opened.fileno())
        if not is_file:
            sync_folder(temporary)
        os.rename(temporary, path)
        sync_folder(path.parent)
    finally:
        remove(temporary)
        stop.partial.discard(temporary)


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
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
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


def write_value(path: Path, value: Any) -> None:
    """Store a JSON value with a checksum.  Raises OSError."""
    with atomic_replace(path) as partial:
        partial.write_text(json.dumps(with_checksum({"value": value})))


def read_value(path: Path) -> Any:
    """Return the stored JSON value, or None if it is missing or corrupt."""
    with contextlib.suppress(*CORRUPTION_ERRORS):
        return verify_checksum(json.loads(path.read_bytes()))["value"]
    return None
