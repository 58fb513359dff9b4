"""Takes units until none is left: in this process, in some that it starts, and in any that others have started."""

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

from trainer.data.ingest.engines import Differs
from trainer.data.ingest.folder import BuildFolder, Record
from trainer.data.ingest.progress import Progress
from trainer.data.ingest.report import Tally, check_limit
from trainer.data.ingest.units import Unit, plan
from trainer.data.ingest.writing import Job, UnitWriter
from trainer.data.manifest import Manifest, rows_of
from trainer.data.shards import Shard, ShardError
from trainer.data.source import sample_content
from trainer.distributed.environment import LAUNCHER, find_environment, follow_parent
from trainer.errors import UserError, setting_error
from trainer.stopping import StopRequested, stop_if_asked

_FINISHING = 2**40
"""The place in the lock that is held by the one that writes the manifest: beyond all units."""

_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.05
"""Seconds between looks at a unit that another process has in hand: done, or given back by the kernel.  Twice as many
each time, as most of those who wait for the last units do so for a moment, and others, of a large run, for long.
"""


def build(job: Job, path: Path, procs: int = 1) -> Manifest:
    """Build the shards of a job in the folder `path`, and return their manifest; at once if they are there.

    Any number of processes may do so at the same time.  Uses up to `procs` processes: this one, and others that are
    forked where there is work for them.  Raises UserError for a bad document where none is allowed, or if there is no
    text; what is done by then is kept.  Raises OSError where the folder cannot be written.  What is found damaged is
    built again: the records of units, and a manifest.
    """
    try:
        try:
            return _build(job, path, procs)
        except ShardError:
            with BuildFolder(path) as folder:
                folder.discard(lambda: _damage_of(folder))
            return _build(job, path, procs)
    except StopRequested as request:
        raise StopRequested(request.name, _KEPT) from request
    except (UserError, OSError):
        if not any(path.glob("*.bin")):
            shutil.rmtree(path, ignore_errors=True)
        raise


def _build(job: Job, path: Path, procs: int) -> Manifest:
    path.mkdir(parents=True, exist_ok=True)  # here alone: what another has published is begun anew by no helper
    with BuildFolder(path) as folder:
        if not folder.is_complete:
            units = plan(job.inputs)
            folder.forget_damaged(len(units))
            missing = [number for number in range(len(units)) if not folder.is_done(number)]
            done = _Done(folder, units)
            total = sum(unit.size for unit in units)
            with _helpers(job, path, units, missing, procs) as helpers, Progress(total, done.num_bytes):
                _take_all(job, units, folder, done, helpers)
            _finish(job, len(units), folder)
        folder.tidy()
        return Manifest.read(folder.manifest_path)


def _damage_of(folder: BuildFolder) -> ShardError | None:
    try:
        Manifest.read(folder.manifest_path)
    except ShardError as error:
        return error
    return None


class _Done:
    """The share of the input that is done: counted by records, which others write too, and within a unit in hand."""

    def __init__(self, folder: BuildFolder, units: Sequence[Unit]) -> None:
        self._folder, self._units, self.in_hand = folder, units, 0
        self._known: set[int] = set()

    def num_bytes(self) -> int:
        for number in range(len(self._units)):
            if number not in self._known and self._folder.is_done(number):
                self._known.add(number)
        return self.in_hand + sum(self._units[number].size for number in self._known)


def _take_all(job: Job, units: Sequence[Unit], folder: BuildFolder, done: _Done, helpers: _Helpers) -> None:
    """Build each unit that is not done and that no other process holds; then wait for those that others hold."""
    pause = _PAUSE_S
    for waits in (False, True):
        for number, unit in enumerate(units):
            while not (folder.is_done(number) or folder.is_complete):
                helpers.hear()
                stop_if_asked()
                if folder.try_take(number):
                    try:
                        _build_unit(job, unit, number, folder, done)
                    finally:
                        done.in_hand = 0
                        folder.release(number)
                elif waits:
                    time.sleep(pause)
                    pause = min(2 * pause, _LONGEST_PAUSE_S)
                else:
                    break


_KEPT = "the next run continues tokenizing from here"


def _build_unit(job: Job, unit: Unit, number: int, folder: BuildFolder, done: _Done) -> None:
    if folder.is_done(number) or folder.is_complete:
        return  # by the process that held it until now
    folder.clear(number)
    for engine in dict.fromkeys((job.engine, job.reference)):
        writer = UnitWriter(job, unit, number, folder, engine)
        try:
            for num_bytes in writer.write():
                done.in_hand += num_bytes
                stop_if_asked()
            folder.write(number, writer.publish())
            return
        except Differs:
            done.in_hand = 0
        finally:
            writer.discard()


def _finish(job: Job, num_units: int, folder: BuildFolder) -> None:
    """Write the manifest, unless another process has."""
    with folder.taken(_FINISHING):
        if folder.is_complete:
            return
        records = [folder.read(number) for number in range(num_units)]
        tally = Tally()
        for record in records:
            tally.add(record.tally)
        check_limit(tally, job.bad, job.keys)
        folder.complete(_list_shards(job, records, tally, folder.path))


def _list_shards(job: Job, records: Sequence[Record], tally: Tally, path: Path) -> Manifest:
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
# Other processes


def usual_procs() -> int:
    """Return how many processes to build with: this one's share of the cores, or 1 where it has threads of torch, which
    a fork would cut off.
    """
    if "torch" in sys.modules or sys.platform == "darwin":
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // find_environment().local_world_size)


class _Helpers:
    """Processes that take units too."""

    def __init__(self) -> None:
        self._ends: list[Connection] = []

    def start(self, job: Job, path: Path, units: Sequence[Unit]) -> multiprocessing.process.BaseProcess:
        """Start one, by a fork: the tokenizer is made once, and inherited.

        The engine is not: what it learns of a text, it writes into its tables.  In tables that two processes share,
        each page is copied as it is written to, and the large pages fall into small ones: 10 to 40 % slower for ever.
        """
        context = multiprocessing.get_context("fork")
        end, its = context.Pipe(duplex=False)
        process = context.Process(target=_help, args=(job, path, units, its, os.getpid()), daemon=True)
        process.start()
        its.close()
        self._ends.append(end)
        return process

    def hear(self, to_the_end: bool = False) -> None:
        """Raise the error that one has met; one that was killed has met none, and its unit is free again."""
        for end in [end for end in self._ends if to_the_end or end.poll()]:
            self._ends.remove(end)
            with closing(end), suppress(EOFError):
                error = end.recv()
                if error is not None:
                    raise error


@contextmanager
def _helpers(job: Job, path: Path, units: Sequence[Unit], missing: Sequence[int], procs: int) -> Iterator[_Helpers]:
    """Have up to `procs` - 1 other processes take units too.  They are through when the block is, or killed with it."""
    helpers, processes = _Helpers(), []
    try:
        processes = [helpers.start(job, path, units) for _ in range(min(procs, len(missing)) - 1)]
        yield helpers
        helpers.hear(to_the_end=True)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _help(job: Job, path: Path, units: Sequence[Unit], end: Connection, parent: int) -> None:
    """Take units in a process of its own, and tell the parent how it ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    follow_parent(True, {LAUNCHER: str(parent)})
    error = None
    try:
        with BuildFolder(path) as folder:
            _take_all(job, units, folder, _Done(folder, units), _Helpers())
    except (UserError, OSError) as raised:
        error = raised
    end.send(error)
