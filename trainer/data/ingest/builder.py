"""Builds all units of a job, in this process and in workers, alongside other processes that do the same."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path

from trainer.data.ingest.engines import IdsDiffer
from trainer.data.ingest.folder import BuildFolder, UnitRecord
from trainer.data.ingest.progress import BuildProgress
from trainer.data.ingest.report import DocumentCounts, check_limit
from trainer.data.ingest.units import BuildUnit, split_into_units
from trainer.data.ingest.writing import BuildJob, UnitWriter
from trainer.data.shards import Manifest, Shard, ShardError, rows_of
from trainer.data.source import sample_content
from trainer.distributed.environment import LAUNCHER, find_environment, follow_parent
from trainer.errors import UserError, setting_error
from trainer.stopping import StopRequested, stop_if_asked

_MANIFEST_LOCK = 2**40
"""The byte of the lock file that is locked while the manifest is written; it is past the bytes of all units."""

_POLL_S, _MAX_POLL_S = 0.002, 0.05
"""Polling interval for a unit that another process is building, and its maximum, in seconds.

The interval doubles each time: most processes wait only briefly for the last units, but a large build can take long.
"""


def build(job: BuildJob, path: Path, procs: int = 1) -> Manifest:
    """Build the shards of a job in the folder `path` and return their manifest; if they exist already, return at once.

    Any number of processes may do this at the same time.  Uses up to `procs` processes: this one and forked workers, if
    there are enough units.  Damaged unit records and a damaged manifest are rebuilt.

    Raises UserError if a document cannot be read and `data.bad` does not allow it, or if there is no text; finished
    units are kept.  Raises OSError if the folder is not writable.
    """
    try:
        try:
            return _build(job, path, procs)
        except ShardError:
            with BuildFolder(path) as folder:
                folder.invalidate(lambda: _find_damage(folder))
            return _build(job, path, procs)
    except StopRequested as request:
        raise StopRequested(request.name, _RESUME_NOTE) from request
    except (UserError, OSError):
        if not any(path.glob("*.bin")):
            shutil.rmtree(path, ignore_errors=True)
        raise


def _build(job: BuildJob, path: Path, procs: int) -> Manifest:
    path.mkdir(parents=True, exist_ok=True)  # not in workers: the folder may have been published
    with BuildFolder(path) as folder:
        if not folder.is_complete:
            units = split_into_units(job.inputs)
            folder.remove_damaged(len(units))
            missing = [number for number in range(len(units)) if not folder.is_done(number)]
            done = _ProcessedBytes(folder, units)
            total = sum(unit.size for unit in units)
            with _run_workers(job, path, units, missing, procs) as workers, BuildProgress(total, done.num_bytes):
                _build_all(job, units, folder, done, workers)
            _finish(job, len(units), folder)
        folder.clean_up()
        return Manifest.read(folder.manifest_path)


def _find_damage(folder: BuildFolder) -> ShardError | None:
    try:
        Manifest.read(folder.manifest_path)
    except ShardError as error:
        return error
    return None


class _ProcessedBytes:
    """Counts the bytes of input processed: units recorded by any process, plus the unit being built here."""

    def __init__(self, folder: BuildFolder, units: Sequence[BuildUnit]) -> None:
        self._folder, self._units, self.current_unit_bytes = folder, units, 0
        self._known: set[int] = set()

    def num_bytes(self) -> int:
        for number in range(len(self._units)):
            if number not in self._known and self._folder.is_done(number):
                self._known.add(number)
        return self.current_unit_bytes + sum(self._units[number].size for number in self._known)


def _build_all(
    job: BuildJob, units: Sequence[BuildUnit], folder: BuildFolder, done: _ProcessedBytes, workers: _Workers
) -> None:
    """Build every unit that is not done and not locked by another process, then wait for the locked ones."""
    pause = _POLL_S
    for waits in (False, True):
        for number, unit in enumerate(units):
            while not (folder.is_done(number) or folder.is_complete):
                workers.raise_errors()
                stop_if_asked()
                if folder.try_lock(number):
                    try:
                        _build_unit(job, unit, number, folder, done)
                    finally:
                        done.current_unit_bytes = 0
                        folder.unlock(number)
                elif waits:
                    time.sleep(pause)
                    pause = min(2 * pause, _MAX_POLL_S)
                else:
                    break


_RESUME_NOTE = "the next run continues tokenizing from here"


def _build_unit(job: BuildJob, unit: BuildUnit, number: int, folder: BuildFolder, done: _ProcessedBytes) -> None:
    if folder.is_done(number) or folder.is_complete:
        return  # finished by the process that held the lock before
    folder.clear(number)
    for engine in dict.fromkeys((job.engine, job.reference)):
        writer = UnitWriter(job, unit, number, folder, engine)
        try:
            for num_bytes in writer.write():
                done.current_unit_bytes += num_bytes
                stop_if_asked()
            folder.write(number, writer.publish())
            return
        except IdsDiffer:
            done.current_unit_bytes = 0
        finally:
            writer.discard()


def _finish(job: BuildJob, num_units: int, folder: BuildFolder) -> None:
    """Write the manifest, unless another process already did."""
    with folder.locked(_MANIFEST_LOCK):
        if folder.is_complete:
            return
        records = [folder.read(number) for number in range(num_units)]
        tally = DocumentCounts()
        for record in records:
            tally.add(record.tally)
        check_limit(tally, job.bad, job.keys)
        folder.finish(_list_shards(job, records, tally, folder.path))


def _list_shards(job: BuildJob, records: Sequence[UnitRecord], tally: DocumentCounts, path: Path) -> Manifest:
    train = [Shard(path / name) for record in records for name in record.train]
    held_out = [Shard(path / name) for record in records for name in record.held_out]
    if not train and not held_out:
        files, unread = [each.path for each in job.inputs][:5], [place.splitlines()[0] for place in tally.places[:1]]
        rule = f"no readable text in it: {unread[0]}" if unread else "there is no text in it"
        raise setting_error(job.keys.inputs, files, rule, fix="give a file that contains text")
    info = (train or held_out)[0].info
    return Manifest(
        dtype=info.dtype,
        vocab_size=info.vocab_size,
        tokenizer=info.tokenizer,
        end_id=info.end_id,
        train=rows_of(train, path),
        held_out=rows_of(held_out, path),
        checksums=[shard.info.checksum for shard in (*train, *held_out)],
        train_content=sample_content(train) if train else "",
        held_out_content=sample_content(held_out) if held_out else "",
        notes={**dataclasses.asdict(tally), "lowest": min(record.lowest for record in records)},
    )


# ---------------------------------------------------------------------------------------------------------------
# Worker processes


def default_num_procs() -> int:
    """Return the default number of processes: this process's share of the cores, or 1 if torch is loaded, since torch's
    threads do not survive a fork.
    """
    if "torch" in sys.modules or sys.platform == "darwin":
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // find_environment().local_world_size)


class _Workers:
    """Forked worker processes that also build units."""

    def __init__(self) -> None:
        self._receivers: list[Connection] = []

    def start(self, job: BuildJob, path: Path, units: Sequence[BuildUnit]) -> multiprocessing.process.BaseProcess:
        """Fork a worker, which inherits the tokenizer.

        The engine is created in each worker instead: it updates its tables as it sees text.  If two processes shared
        them, every page would be copied on its first write and huge pages would be split, which makes it 10 to 40 %
        slower.
        """
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(job, path, units, sender, os.getpid()), daemon=True)
        process.start()
        sender.close()
        self._receivers.append(receiver)
        return process

    def raise_errors(self, waits_for_all: bool = False) -> None:
        """Raise the error that a worker reported.  A killed worker reports none, and its unit is unlocked."""
        for receiver in [receiver for receiver in self._receivers if waits_for_all or receiver.poll()]:
            self._receivers.remove(receiver)
            with closing(receiver), suppress(EOFError):
                error = receiver.recv()
                if error is not None:
                    raise error


@contextmanager
def _run_workers(
    job: BuildJob, path: Path, units: Sequence[BuildUnit], missing: Sequence[int], procs: int
) -> Iterator[_Workers]:
    """Run up to `procs` - 1 workers.  They have finished when the block ends, or are killed if it raises."""
    workers, processes = _Workers(), []
    try:
        processes = [workers.start(job, path, units) for _ in range(min(procs, len(missing)) - 1)]
        yield workers
        workers.raise_errors(waits_for_all=True)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _work(job: BuildJob, path: Path, units: Sequence[BuildUnit], sender: Connection, parent: int) -> None:
    """Build units in a worker, and send the parent the error, or None."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    follow_parent(True, {LAUNCHER: str(parent)})
    error = None
    try:
        with BuildFolder(path) as folder:
            _build_all(job, units, folder, _ProcessedBytes(folder, units), _Workers())
    except (UserError, OSError) as raised:
        error = raised
    sender.send(error)
