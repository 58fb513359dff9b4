"""File utilities for locks, atomic replacement, untrusted JSON, checksums, free disk space, and cache folders.

After a crash, a file that was being replaced atomically has either its entire old content or its entire new content.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import filelock

from trainer.errors import TORCH_SAVE_ERRORS, UserError, is_disk_full, setting_error
from trainer.stopping import partial_file, stop

try:
    from isal.isal_zlib import crc32 as crc32  # the same checksums, at 26 GB/s instead of zlib's 6
except ImportError:  # no wheel for this machine
    from zlib import crc32 as crc32


def find_cache_folders(cache_dir: str | None) -> list[Path]:
    """Return the possible cache folders, in order of preference; only `cache_dir` if it is not None."""
    if cache_dir is not None:
        return [Path(cache_dir).expanduser()]
    folders = []
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if os.path.isabs(base):
        folders.append(Path(base, "meshtrainer"))
    user = os.getuid() if hasattr(os, "getuid") else 0
    temporary = Path(tempfile.gettempdir(), f"meshtrainer-{user}")
    if not os.path.lexists(temporary) or (temporary.lstat().st_uid == user and not temporary.is_symlink()):
        folders.append(temporary)  # unless another user has created something at this path
    return folders


_LOCK_POLL_S = 0.02
"""Seconds between two attempts to acquire a lock."""


@contextmanager
def locked(path: Path, timeout_s: float = -1) -> Iterator[None]:
    """Hold the lock of a file or folder during a block: the file `.NAME.lock` next to it.

    The kernel releases the lock if this process dies.  On a file system without `flock`, filelock falls back to a
    marker file, which it takes over from a dead process.

    timeout_s: how long to wait while another process holds the lock; -1 for no limit.

    Raises TimeoutError after `timeout_s`, and OSError if the lock file cannot be created.
    """
    lock_file = path.with_name(f".{path.name}.lock")
    lock = filelock.FileLock(lock_file, poll_interval=_LOCK_POLL_S)
    lock.acquire(timeout_s)
    try:
        yield
    finally:
        with suppress(OSError):
            lock_file.unlink()  # a process that waits notices that the file is gone, and locks a new one
        lock.release()


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with its contents.  Does nothing if it does not exist or cannot be removed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def local_path(path: str | os.PathLike[str]) -> Path | None:
    """Return the absolute path of a local path or file:// URL; None for other URLs."""
    text = os.fspath(path).removeprefix("file://")
    return None if "://" in text else Path(text).absolute()


MAX_JSON_BYTES = 16 << 20
"""Size limit, in bytes, for each JSON file of a model, except tokenizer.json and the index of the weights.  Real files
are a few megabytes at most."""


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Parse an untrusted JSON file.

    Raises OSError if the file cannot be read.  Raises ValueError if it is not valid JSON, has a duplicate key, is
    nested too deeply, or is larger than `max_bytes`.
    """
    if (size := path.stat().st_size) > max_bytes:
        raise ValueError(f"its size is {size / 2**20:.0f} MiB, above the limit of {max_bytes / 2**20:.0f} MiB")
    return parse_json(path.read_bytes())


def parse_json(content: bytes) -> Any:
    """Parse untrusted JSON of any size.  Raises ValueError for the same content as `read_json`."""
    try:
        return json.loads(content.decode("utf-8"), object_pairs_hook=_reject_duplicate_keys)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8: {error.reason} at byte {error.start}") from error


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        names = [name for name, _ in pairs]
        duplicate = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"it has {duplicate!r} twice")
    return content


def symlink_target_outside(folder: Path, name: str) -> Path | None:
    """Return the real path of a file in a folder if a symlink leads outside the folder; otherwise None.

    In a Hugging Face cache (models--*/snapshots/*/file -> ../../blobs/*), links into the model's blobs are allowed.
    """
    target, allowed_folders = Path(os.path.realpath(folder / name)), [Path(os.path.realpath(folder))]
    if allowed_folders[0].parent.name == "snapshots":
        allowed_folders.append(allowed_folders[0].parent.parent / "blobs")
    return None if any(target.is_relative_to(allowed) for allowed in allowed_folders) else target


def write_atomically(path: Path, text: str) -> None:
    """Write `text` to a temporary file, flush it to disk, and rename it to `path`."""
    with partial_file(path.with_name(f".{path.name}.{os.getpid()}")) as partial:
        write_and_sync(partial, text)
        os.replace(partial, path)


@contextmanager
def atomic_replace(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file to write, which is flushed to disk and renamed to `path` after the block.

    If the block raises, the temporary file is deleted and `path` is unchanged.
    """
    with partial_file(path.with_name(f".{path.name}.{os.getpid()}")) as partial:
        yield partial
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yield a new folder, which is deleted after the block, or if the process leaves during it."""
    with tempfile.TemporaryDirectory(prefix="meshtrainer-") as name:
        stop.partial.add(Path(name))
        try:
            yield Path(name)
        finally:
            stop.partial.discard(Path(name))


@contextmanager
def writing_to(setting: str, path: Path, num_bytes: int = 0) -> Iterator[None]:
    """Wrap a block that writes at least `num_bytes` bytes to a file or folder at `path`.

    Raises UserError, naming `setting`, if the disk is too full before the block or fills up during it, or if torch.save
    cannot write.  If the block raises, or if the process leaves during it, empty folders that were created for `path`
    are removed.
    """
    missing = [folder for folder in (path, *path.absolute().parents) if not folder.exists()]

    def remove_created(*_: object) -> None:
        for folder in missing:
            with suppress(OSError):
                folder.rmdir()

    free = free_bytes(path)
    if free < num_bytes:
        raise _disk_full_error(setting, path, num_bytes, free)
    stop.on_exit.append(remove_created)
    try:
        yield
    except BaseException as error:
        remove_created()
        if is_disk_full(error, path, num_bytes):
            raise _disk_full_error(setting, path, num_bytes, free) from error
        if isinstance(error, RuntimeError) and any(words in str(error) for words in TORCH_SAVE_ERRORS):
            reason = str(error).partition("\n")[0]
            fix = "check that storage, or give another path"
            raise setting_error(setting, path, f"cannot be written ({reason})", fix=fix) from error
        raise
    finally:
        stop.on_exit.remove(remove_created)


def free_bytes(path: Path) -> int:
    """Return the free space on the disk of `path`, in bytes.  The path need not exist."""
    return shutil.disk_usage(next(folder for folder in (path, *path.absolute().parents) if folder.exists())).free


def readable_size(num_bytes: int) -> str:
    """Format a size in GiB, or in MiB if it is small."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**28 else f"{num_bytes / 2**20:.1f} MiB"


def _disk_full_error(setting: str, path: Path, num_bytes: int, free: int) -> UserError:
    need = f"needs {readable_size(num_bytes)}, " if num_bytes else ""
    rule = f"cannot be written (No space left on device): {need}{readable_size(free)} were free"
    return setting_error(setting, path, rule, fix="free some space there, or give a path on another disk")


def write_and_sync(path: Path, text: str) -> None:
    """Write `text` and flush it to disk."""
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def append_and_sync(path: Path, text: str) -> None:
    """Append `text` and flush it to disk."""
    with open(path, "a") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


CHECKSUM = "crc32"
"""The key under which a JSON object stores its own checksum."""


def with_checksum(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON object with an added checksum, which `verify_checksum` checks."""
    return {**content, CHECKSUM: _checksum_of(content)}


def verify_checksum(content: Any) -> dict[str, Any]:
    """Return a JSON object read from a file, without its checksum.

    Raises ValueError if it is not an object, or if the checksum is missing or wrong.
    """
    if not isinstance(content, dict):
        raise ValueError("it is not a JSON object")
    plain = {name: value for name, value in content.items() if name != CHECKSUM}
    if content.get(CHECKSUM) != _checksum_of(plain):
        raise ValueError("its checksum is wrong" if CHECKSUM in content else "it has no checksum")
    return plain


def _checksum_of(content: Mapping[str, Any]) -> str:
    return f"{crc32(json.dumps(content, sort_keys=True, separators=(',', ':')).encode()):08x}"


_SAMPLED_BYTES = 1 << 26
"""Maximum number of bytes that `sample_contents` reads of all files together."""
_MIN_SAMPLED_BYTES = 1 << 14
"""Number of bytes that it reads of each file, even if this exceeds the maximum in total."""
_SAMPLE_BYTES = 1 << 12
"""Number of bytes that it reads at each place in a file."""


def sample_contents(paths: Sequence[str], key: str) -> list[str]:
    """Return a fingerprint of the content of each file.

    It supplements size and modification time, which a restored backup, a container's layer or `rsync -t` may leave as
    they were.  Files of up to 64 MiB together are read as a whole, and larger ones at evenly spaced places.

    Raises UserError that names the setting `key` if a file cannot be read.
    """
    num_bytes = max(_MIN_SAMPLED_BYTES, _SAMPLED_BYTES // max(1, len(paths)))
    try:
        return [_sample_content(path, num_bytes) for path in paths]
    except OSError as error:
        raise setting_error(key, error.filename, f"cannot be read ({error.strerror})") from error


def _sample_content(path: str, num_bytes: int) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        num_places = 1 if size <= num_bytes else num_bytes // _SAMPLE_BYTES
        for number in range(num_places):
            file.seek((size - _SAMPLE_BYTES) * number // (num_places - 1) if num_places > 1 else 0)
            digest.update(file.read(size if num_places == 1 else _SAMPLE_BYTES))
    return digest.hexdigest()


def read_all(descriptor: int) -> bytes:
    """Return the content of an open file, even if the file has been deleted."""
    pieces, start = [], 0
    while piece := os.pread(descriptor, 1 << 20, start):
        pieces.append(piece)
        start += len(piece)
    return b"".join(pieces)


def sync_folder(path: Path) -> None:
    """Flush a folder's entries to disk, so that new files and renames in it are durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
