"""The folder in which shards are built: a lock for each unit, a record of each that is done, the manifest at the end.

lock            its bytes are locked, one for each unit; the kernel unlocks those of a process that has died; it stays,
                so that all lock the same file, however late they come
00007.bin ...   shards of unit 7, renamed once they are on disk; those of what is held out end in -eval
00007.done      its record: written last
manifest.json   all shards: written when every unit is done; the records are gone then
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

from trainer.data.cache import DAMAGE, open_lock, remove
from trainer.data.ingest.report import Tally
from trainer.data.manifest import Manifest
from trainer.data.shards import Shard, ShardError
from trainer.errors import say
from trainer.files import checked, replacing, sync_folder, with_checksum

MANIFEST = "manifest.json"
_LOCK = "lock"

_REPAIRING = 2**40 + 2
"""The place in the lock that is held by the process that removes what is damaged."""


@dataclass(frozen=True)
class Record:
    """A unit that is done: its shards by their names, those of training and those held out, and how it went."""

    train: list[str] = field(default_factory=list)
    held_out: list[str] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    lowest: float = 1.0
    """The smallest share of documents that would hold one of these out."""


class BuildFolder:
    """The folder that builders share.  Raises OSError where the folder is gone, cannot be written or has no locks."""

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
        """The path of the manifest, once all is done."""
        return self.path / MANIFEST

    @property
    def is_complete(self) -> bool:
        """True if every unit is done and the manifest says so."""
        return self.manifest_path.exists()

    def name_of(self, unit: int, number: int, is_held_out: bool) -> str:
        """Return the name of a unit's shard, without its suffix."""
        return f"{unit:05d}{f'.{number:03d}' if number else ''}{'-eval' if is_held_out else ''}"

    def try_take(self, unit: int) -> bool:
        """Lock a unit, unless another process has."""
        try:
            fcntl.lockf(self._lock(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, unit)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            raise
        return True

    def take(self, unit: int) -> None:
        """Lock a unit once no other process does: it has been done, or its builder has died."""
        fcntl.lockf(self._lock(), fcntl.LOCK_EX, 1, unit)

    def release(self, unit: int) -> None:
        """Unlock a unit."""
        fcntl.lockf(self._lock(), fcntl.LOCK_UN, 1, unit)

    @contextlib.contextmanager
    def taken(self, unit: int) -> Iterator[None]:
        """Hold a unit for the time of a block."""
        self.take(unit)
        try:
            yield
        finally:
            self.release(unit)

    def is_done(self, unit: int) -> bool:
        """Return whether there is a record of the unit."""
        return self._record_path(unit).exists()

    def read(self, unit: int) -> Record:
        """Return the record of a unit that is done.  Raises ShardError if it is damaged."""
        path = self._record_path(unit)
        try:
            stored = checked(json.loads(path.read_bytes()))
            return Record(**{**stored, "tally": Tally(**stored["tally"])})
        except DAMAGE as error:
            raise ShardError(f"{path} is damaged ({error})") from error

    def write(self, unit: int, record: Record) -> None:
        """Record that a unit's shards are complete, on disk under their names."""
        sync_folder(self.path)
        with replacing(self._record_path(unit)) as partial:
            partial.write_text(json.dumps(with_checksum(dataclasses.asdict(record))))

    def clear(self, unit: int) -> None:
        """Remove what builders that were killed have left of a unit, and folders in place of its files.

        The caller holds it.  Its shards stay until others replace them: other runs may be reading them.
        """
        for path in self.path.glob(f".{unit:05d}[.-]*"):
            remove(path)
        for path in self.path.glob(f"{unit:05d}[.-]*"):
            if path.is_dir():
                remove(path)

    def forget_damaged(self, num_units: int) -> None:
        """Remove the records that are damaged, or whose shards are missing or damaged: their units are built again."""
        for unit in range(num_units):
            if not self.is_done(unit):
                continue
            with self.taken(unit):
                try:
                    record = self.read(unit)
                    for name in (*record.train, *record.held_out):
                        Shard(self.path / name).verify()
                except ShardError as error:
                    if self.is_complete:
                        return  # another process has finished meanwhile, and removed the records
                    say(f"{error}; building this part again")
                    remove(self._record_path(unit))

    def discard(self, is_damaged: Callable[[], Exception | None]) -> None:
        """Have everything in the folder built again, if it is complete and still damaged.

        Shards stay until others replace them: other runs may be reading those that are not damaged.
        is_damaged: looks again, as another process may have done this already.  Returns what is wrong, or None.
        """
        with self.taken(_REPAIRING):
            if self.is_complete and (error := is_damaged()) is not None:
                say(f"{str(error).partition('; ')[0]}; building {self.path} again")
                remove(self.manifest_path)
                for path in self.path.glob("*.damaged"):
                    remove(path)

    def complete(self, manifest: Manifest) -> None:
        """Write the manifest, and remove all that was needed to build."""
        manifest.write(self.manifest_path)
        self.tidy()

    def tidy(self) -> None:
        """Remove records, of which nothing is needed next to a manifest, and what killed builders have left."""
        for path in [*self.path.glob("[0-9]*.done"), *self.path.glob(".[0-9]*")]:
            remove(path)

    def _record_path(self, unit: int) -> Path:
        return self.path / f"{unit:05d}.done"

    def _lock(self) -> int:
        if self._descriptor < 0:
            self._descriptor = open_lock(self.path / _LOCK)
        return self._descriptor
