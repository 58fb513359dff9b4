"""The folder in which shards are built: a lock per unit, a record of each finished unit, and finally the manifest.

lock            one byte per unit is locked; the kernel releases the locks of a dead process. The file is never
                removed, so that all processes lock the same one, even if they join late.
00007.bin ...   shards of unit 7, renamed to these names once on disk; held-out shards end in -eval
00007.done      record of the unit, written last
manifest.json   lists all shards; written when every unit is done, after which the records are removed
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from trainer.data.cache import CORRUPTION_ERRORS, open_lock, remove
from trainer.data.ingest.report import DocumentCounts
from trainer.data.shards import MANIFEST, Manifest, Shard, ShardError
from trainer.errors import print_stderr
from trainer.files import checked, replacing, sync_folder, with_checksum

_LOCK = "lock"

_REPAIR_LOCK = 2**40 + 2
"""The byte of the lock file that is locked while damaged files are removed."""


@dataclass(frozen=True)
class UnitRecord:
    """A finished unit: the names of its training and held-out shards, and counts of its documents."""

    train: list[str] = field(default_factory=list)
    held_out: list[str] = field(default_factory=list)
    tally: DocumentCounts = field(default_factory=DocumentCounts)
    lowest: float = 1.0
    """The smallest hash value of a document, scaled to [0, 1): a `data.holdout` above it would hold out at least one
    document.
    """


class BuildFolder:
    """The folder that builders share.  Raises OSError if it is gone, is not writable or does not support locks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = -1

    def __enter__(self) -> BuildFolder:
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    @property
    def manifest_path(self) -> Path:
        """The path of the manifest, which exists once every unit is done."""
        return self.path / MANIFEST

    @property
    def is_complete(self) -> bool:
        """True if every unit is done and the manifest is written."""
        return self.manifest_path.exists()

    def name_of(self, unit: int, number: int, is_held_out: bool) -> str:
        """Return the file name of a unit's shard, without suffix."""
        return f"{unit:05d}{f'.{number:03d}' if number else ''}{'-eval' if is_held_out else ''}"

    def try_lock(self, unit: int) -> bool:
        """Lock a unit without blocking; returns False if another process holds it."""
        try:
            fcntl.lockf(self._lock_file(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, unit)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            raise
        return True

    def lock(self, unit: int) -> None:
        """Lock a unit, waiting until its holder has finished or died."""
        fcntl.lockf(self._lock_file(), fcntl.LOCK_EX, 1, unit)

    def unlock(self, unit: int) -> None:
        """Unlock a unit."""
        fcntl.lockf(self._lock_file(), fcntl.LOCK_UN, 1, unit)

    @contextlib.contextmanager
    def locked(self, unit: int) -> Iterator[None]:
        """Hold the lock of a unit inside the block."""
        self.lock(unit)
        try:
            yield
        finally:
            self.unlock(unit)

    def is_done(self, unit: int) -> bool:
        """Return whether there is a record of the unit."""
        return self._record_path(unit).exists()

    def read(self, unit: int) -> UnitRecord:
        """Return the record of a finished unit.  Raises ShardError if it is damaged."""
        path = self._record_path(unit)
        try:
            stored = checked(json.loads(path.read_bytes()))
            return UnitRecord(**{**stored, "tally": DocumentCounts(**stored["tally"])})
        except CORRUPTION_ERRORS as error:
            raise ShardError(f"{path} is damaged ({error})") from error

    def write(self, unit: int, record: UnitRecord) -> None:
        """Record that a unit's shards are complete: on disk, under their final names."""
        sync_folder(self.path)
        with replacing(self._record_path(unit)) as partial:
            partial.write_text(json.dumps(with_checksum(dataclasses.asdict(record))))

    def clear(self, unit: int) -> None:
        """Remove temporary files of a unit left by killed builders, and folders that occupy the names of its files.

        The caller holds the unit's lock.  Existing shards stay until they are replaced, since other runs may be reading
        them.
        """
        for path in self.path.glob(f".{unit:05d}[.-]*"):
            remove(path)
        for path in self.path.glob(f"{unit:05d}[.-]*"):
            if path.is_dir():
                remove(path)

    def remove_damaged(self, num_units: int) -> None:
        """Remove records that are damaged or whose shards are missing or damaged, so that these units are rebuilt."""
        for unit in range(num_units):
            if not self.is_done(unit):
                continue
            with self.locked(unit):
                try:
                    record = self.read(unit)
                    for name in (*record.train, *record.held_out):
                        Shard(self.path / name).verify()
                except ShardError as error:
                    if self.is_complete:
                        return  # another process has finished meanwhile, and removed the records
                    print_stderr(f"{error}; building this part again")
                    remove(self._record_path(unit))

    def invalidate(self, is_damaged: Callable[[], Exception | None]) -> None:
        """Cause everything in the folder to be rebuilt, if it is complete and still damaged.

        Shards stay until they are replaced, since other runs may be reading those that are intact.  `is_damaged` checks
        again, as another process may have done this already; it returns the error, or None.
        """
        with self.locked(_REPAIR_LOCK):
            if self.is_complete and (error := is_damaged()) is not None:
                print_stderr(f"{str(error).partition('; ')[0]}; building {self.path} again")
                remove(self.manifest_path)
                for path in self.path.glob("*.damaged"):
                    remove(path)

    def finish(self, manifest: Manifest) -> None:
        """Write the manifest, then remove the files that were only needed to build."""
        manifest.write(self.manifest_path)
        self.clean_up()

    def clean_up(self) -> None:
        """Remove the records, which the manifest replaces, and temporary files left by killed builders."""
        for path in [*self.path.glob("[0-9]*.done"), *self.path.glob(".[0-9]*")]:
            remove(path)

    def _record_path(self, unit: int) -> Path:
        return self.path / f"{unit:05d}.done"

    def _lock_file(self) -> int:
        if self._descriptor < 0:
            self._descriptor = open_lock(self.path / _LOCK)
        return self._descriptor
