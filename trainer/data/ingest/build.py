"""Builds the token shards that a `BuildJob` describes, in this process, its workers and any other processes that join.

The input is split into units, and each unit is written to separate shards.  Any number of processes, on any machines
that share the output folder, can build in it at the same time, join late, or be killed without harm.  File locks decide
which process builds which unit; the kernel releases the locks of a process that dies.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import itertools
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from trainer.data.cache import CORRUPTION_ERRORS
from trainer.data.ingest.encode import (
    DocumentSplitter,
    Engine,
    TokenizationMismatch,
    check_sample,
    find_engine,
    find_reference,
)
from trainer.data.ingest.inputs import READ_ERRORS, BadDocuments, DocumentCounts, InputFile, SettingNames, check_limit
from trainer.data.ingest.progress import BuildProgress
from trainer.data.ingest.readers import (
    BadLine,
    DocumentBatch,
    LongDocument,
    TokenChunk,
    read_lines,
    read_record_file,
    read_table,
    read_texts,
    read_tokens,
    split_row_groups,
)
from trainer.data.shards import MANIFEST, SUFFIXES, Shard, ShardError, ShardManifest, ShardWriter, manifest_rows
from trainer.data.source import sample_content
from trainer.data.tokenizer import Tokenizer
from trainer.distributed.environment import LAUNCHER_PID_VARIABLE, die_with_parent, find_environment
from trainer.errors import UserError, print_stderr, setting_error
from trainer.files import atomic_replace, sync_folder, verify_checksum, with_checksum
from trainer.locks import open_lock, remove
from trainer.stopping import StopRequested, raise_if_stop_requested


@dataclass(frozen=True)
class BuildJob:
    """Everything that the shards depend on, and the names of the settings for messages.

    text_key: the key or column that holds the text.
    bad: the value of `data.bad`; see `BadDocuments`.
    holdout: the fraction of documents to hold out.
    shard_tokens: a shard ends with the document that brings it to this many tokens; 0 for one shard per unit and split.
    """

    inputs: tuple[InputFile, ...]
    tokenizer: Tokenizer
    text_key: str = "text"
    bad: str = "error"
    holdout: float = 0.0
    shard_tokens: int = 0
    keys: SettingNames = field(default_factory=SettingNames)

    @cached_property
    def engine(self) -> Engine:
        """The engine to use while its ids match the reference's."""
        return find_engine(self.tokenizer)

    @cached_property
    def reference(self) -> Engine:
        """The reference engine."""
        return find_reference(self.tokenizer)

    @cached_property
    def splitter(self) -> DocumentSplitter:
        """The splitter for long documents."""
        return DocumentSplitter(self.tokenizer)


def build(job: BuildJob, path: Path, procs: int = 1) -> ShardManifest:
    """Build the shards of a job in the folder `path`, unless they exist already, and return their manifest.

    Any number of processes may do this at the same time.  Uses up to `procs` processes (this one and forked workers),
    but no more than there are units to build.  Corrupt unit records and a corrupt manifest are rebuilt.

    Raises UserError if a document cannot be read and `data.bad` does not allow that, or if there is no text; finished
    units are kept.  Raises OSError if the folder is not writable.
    """
    try:
        try:
            return _build(job, path, procs)
        except ShardError:
            with BuildFolder(path) as folder:
                folder.invalidate(lambda: ShardManifest.read(folder.manifest_path))
            return _build(job, path, procs)
    except StopRequested as request:
        raise StopRequested(request.name, "the next run continues tokenizing from here") from request
    except (UserError, OSError):
        if not any(path.glob("*.bin")):
            shutil.rmtree(path, ignore_errors=True)
        raise


def _build(job: BuildJob, path: Path, procs: int) -> ShardManifest:
    path.mkdir(parents=True, exist_ok=True)  # workers do not create it: it may have been published already
    with BuildFolder(path) as folder:
        if not folder.is_complete:
            units = split_into_units(job.inputs)
            folder.remove_damaged(len(units))
            missing = [number for number in range(len(units)) if not folder.is_done(number)]
            with _run_workers(job, path, units, min(procs, len(missing)) - 1) as workers:
                builder = _Builder(job, units, folder, workers)
                with BuildProgress(sum(unit.size for unit in units), builder.count_bytes):
                    builder.build_all()
            _finish(job, len(units), folder)
        folder.clean_up()
        return ShardManifest.read(folder.manifest_path)


_POLL_S, _MAX_POLL_S = 0.002, 0.05
"""Initial and maximum seconds between two checks on a unit that another process is building.

The interval doubles each time: most processes wait only briefly for the last units, but a large build can take minutes.
"""


class _Builder:
    """Builds units in this process.

    workers: processes that also build units; their errors are raised in this process.
    """

    def __init__(self, job: BuildJob, units: Sequence[BuildUnit], folder: BuildFolder, workers: _Workers) -> None:
        self._job, self._units, self._folder, self._worker_pool = job, units, folder, workers
        self._current_unit_bytes = 0
        self._finished_units: set[int] = set()

    def build_all(self) -> None:
        """Build every unit that is not done, first those that no other process has locked; return when all are done."""
        folder, pause = self._folder, _POLL_S
        for waits_for_others in (False, True):
            for number in range(len(self._units)):
                while not (folder.is_done(number) or folder.is_complete):
                    self._worker_pool.raise_errors()
                    raise_if_stop_requested()
                    if folder.try_lock(number):
                        try:
                            self._build_unit(number)
                        finally:
                            self._current_unit_bytes = 0
                            folder.unlock(number)
                    elif waits_for_others:
                        time.sleep(pause)
                        pause = min(2 * pause, _MAX_POLL_S)
                    else:
                        break

    def _build_unit(self, number: int) -> None:
        job, folder = self._job, self._folder
        if folder.is_done(number) or folder.is_complete:
            return  # the previous holder of the lock has finished it
        folder.clear(number)
        for engine in dict.fromkeys((job.engine, job.reference)):
            writer = UnitWriter(job, self._units[number], number, folder, engine)
            try:
                for num_bytes in writer.write():
                    self._current_unit_bytes += num_bytes
                    raise_if_stop_requested()
                folder.write(number, writer.publish())
                return
            except TokenizationMismatch:
                self._current_unit_bytes = 0
            finally:
                writer.discard()

    def count_bytes(self) -> int:
        """Return the bytes of input processed: units finished by any process, and part of the unit in progress here."""
        for number in range(len(self._units)):
            if number not in self._finished_units and self._folder.is_done(number):
                self._finished_units.add(number)
        return self._current_unit_bytes + sum(self._units[number].size for number in self._finished_units)


_MANIFEST_LOCK = 2**40
"""Position of the lock-file byte to lock while the manifest is written.  It lies beyond the bytes of all units."""


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
        _make_manifest(job, records, tally, folder.path).write(folder.manifest_path)
        folder.clean_up()


def _make_manifest(job: BuildJob, records: Sequence[UnitRecord], tally: DocumentCounts, path: Path) -> ShardManifest:
    train = [Shard(path / name) for record in records for name in record.train]
    held_out = [Shard(path / name) for record in records for name in record.held_out]
    if not train and not held_out:
        files, messages = (
            [file.path for file in job.inputs][:5],
            [message.splitlines()[0] for message in tally.places[:1]],
        )
        rule = f"no readable text in it: {messages[0]}" if messages else "there is no text in it"
        raise setting_error(job.keys.inputs, files, rule, fix="give a file that contains text")
    info = (train or held_out)[0].info
    return ShardManifest(
        dtype=info.dtype,
        vocab_size=info.vocab_size,
        tokenizer=info.tokenizer,
        end_id=info.end_id,
        train=manifest_rows(train, path),
        held_out=manifest_rows(held_out, path),
        checksums=[shard.info.checksum for shard in (*train, *held_out)],
        train_content=sample_content(train) if train else "",
        held_out_content=sample_content(held_out) if held_out else "",
        notes={**dataclasses.asdict(tally), "lowest": min(record.lowest for record in records)},
    )


# ---------------------------------------------------------------------------------------------------------------
# Units of the input.  They depend only on the input, so that the shards do not depend on the number of processes.


MIN_UNIT_BYTES, MAX_UNIT_BYTES, TARGET_NUM_UNITS = 1 << 24, 1 << 28, 4096
"""Minimum and maximum bytes of input to aim for per unit, and the number of units to aim for within these limits."""

MAX_FILES_PER_UNIT = 4096
"""Maximum number of small files in a unit."""


@dataclass(frozen=True)
class BuildUnit:
    """One or more files, or a part of one file.

    size: the approximate number of input bytes.
    start, stop: a range of bytes of a JSONL file, or of row groups of a parquet file; 0 and None for complete files.
    """

    inputs: tuple[InputFile, ...]
    size: int
    start: int = 0
    stop: int | None = None


def split_into_units(inputs: Sequence[InputFile]) -> list[BuildUnit]:
    """Split files into units, in document order."""
    size = min(MAX_UNIT_BYTES, max(MIN_UNIT_BYTES, sum(file.size for file in inputs) // TARGET_NUM_UNITS))
    units: list[BuildUnit] = []
    group: list[InputFile] = []

    def end_group() -> None:
        if group:
            units.append(BuildUnit(tuple(group), sum(file.size for file in group)))
            group.clear()

    for file in inputs:
        if len(group) == MAX_FILES_PER_UNIT or sum(file.size for file in group) + file.size > size:
            end_group()
        if file.size <= size or file.kind not in ("jsonl", "parquet") or file.compression:
            group.append(file)
        elif file.kind == "parquet":
            for start, stop, num_bytes in split_row_groups(file, size):
                units.append(BuildUnit((file,), num_bytes, start, stop))
        else:
            count = -(-file.size // size)
            bounds = [file.size * number // count for number in range(count + 1)]
            for start, stop in itertools.pairwise(bounds):
                units.append(BuildUnit((file,), stop - start, start, stop))
    end_group()
    return units


# ---------------------------------------------------------------------------------------------------------------
# Worker processes


def default_num_procs() -> int:
    """Return the default number of processes: this process's share of the cores.

    1 on macOS, and if torch is loaded, since torch's threads do not survive a fork.
    """
    if "torch" in sys.modules or sys.platform == "darwin":
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // find_environment().local_world_size)


@contextmanager
def _run_workers(job: BuildJob, path: Path, units: Sequence[BuildUnit], num_workers: int) -> Iterator[_Workers]:
    """Run workers during a block; none if `num_workers` is not positive.

    At the end of the block, waits until they have finished and raises their errors; if the block raises, kills them.
    """
    workers, processes = _Workers(), []
    try:
        for _ in range(num_workers):
            processes.append(workers.start(job, path, units))
        yield workers
        workers.raise_errors(waits_for_all=True)
    finally:
        for process in processes:
            process.kill()
            process.join()


class _Workers:
    """Forked worker processes that also build units."""

    def __init__(self) -> None:
        self._receivers: list[Connection] = []

    def start(self, job: BuildJob, path: Path, units: Sequence[BuildUnit]) -> multiprocessing.process.BaseProcess:
        """Fork a worker, which inherits the tokenizer but creates its own engine.

        An engine updates its tables as it sees text.  If it were inherited, each page of the tables would be copied on
        its first write and huge pages would be split, which is 10% to 40% slower.
        """
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_run_worker, args=(job, path, units, sender, os.getpid()), daemon=True)
        process.start()
        sender.close()
        self._receivers.append(receiver)
        return process

    def raise_errors(self, waits_for_all: bool = False) -> None:
        """Raise the error that a worker has reported, if any.

        A killed worker reports none; the kernel unlocks its unit.

        waits_for_all: whether to wait until every worker has reported or died.
        """
        for receiver in [receiver for receiver in self._receivers if waits_for_all or receiver.poll()]:
            self._receivers.remove(receiver)
            with closing(receiver), suppress(EOFError):
                error = receiver.recv()
                if error is not None:
                    raise error


def _run_worker(job: BuildJob, path: Path, units: Sequence[BuildUnit], sender: Connection, parent: int) -> None:
    """Build units in a worker, and send the error that occurred, or None, to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(True, {LAUNCHER_PID_VARIABLE: str(parent)})
    error = None
    try:
        with BuildFolder(path) as folder:
            _Builder(job, units, folder, _Workers()).build_all()
    except (UserError, OSError) as raised:
        error = raised
    sender.send(error)


# ---------------------------------------------------------------------------------------------------------------
# Writing one unit: documents are read, tokenized, and written to training and held-out shards


CHECK_INTERVAL_BYTES = 1 << 26
"""Bytes of a unit's text between two checks of the engine against the reference."""


class UnitWriter:
    """Writes the shards of one unit, using one engine.  `publish` gives the shards their final names."""

    def __init__(self, job: BuildJob, unit: BuildUnit, number: int, folder: BuildFolder, engine: Engine) -> None:
        self._job, self._unit, self._engine = job, unit, engine
        self._train = _Split(job, folder, number, False)
        self._held_out = _Split(job, folder, number, True)
        self._bad = BadDocuments(job.bad, job.keys)
        self._lowest, self._bytes_until_check = 1.0, 0

    def write(self) -> Iterator[int]:
        """Write all documents; yield the number of bytes of each batch.

        Raises TokenizationMismatch if the engine's ids are wrong, and UserError if a document cannot be read and
        `data.bad` does not allow it.
        """
        for documents in self._read():
            if isinstance(documents, TokenChunk):
                self._bad.tally.documents += len(documents.ends)
                self._train.write_tokens(documents)
                yield documents.ids.nbytes
                continue
            if not isinstance(documents, list):
                yield from self._write_long(documents)
                continue
            self._bad.tally.documents += len(documents)
            short = [text for text in documents if text]
            self._bad.tally.empty += len(documents) - len(short)
            for is_long, texts in itertools.groupby(short, key=self._job.splitter.is_long):
                if is_long:
                    for text in texts:
                        yield from self._write_pieces([text], self._assign_split([text]))
                else:
                    yield self._write_short(list(texts))

    def publish(self) -> UnitRecord:
        """Rename the shards to their final names and return the unit's record."""
        return UnitRecord(self._train.publish(), self._held_out.publish(), self._bad.tally, self._lowest)

    def discard(self) -> None:
        """Remove all shards that have not been published."""
        self._train.discard()
        self._held_out.discard()

    def _read(self) -> Iterator[DocumentBatch | TokenChunk]:
        unit, job = self._unit, self._job
        for kind, inputs in itertools.groupby(unit.inputs, key=lambda file: file.kind):
            if kind == "text":
                yield from read_texts(inputs, self._bad)
                continue
            if kind == "tokens":
                for file in inputs:
                    yield from read_tokens(file, job.tokenizer, job.keys)
                continue
            read = {"jsonl": read_lines, "records": read_record_file}.get(kind, read_table)
            for file in inputs:
                yield from read(file, unit.start, unit.stop, job.text_key, self._bad)

    def _write_short(self, texts: Sequence[bytes]) -> int:
        self._check_engine(texts)
        if not self._job.holdout:
            self._train.write_documents(texts, self._engine)
            return sum(map(len, texts))
        splits = [self._assign_split([text]) for text in texts]
        for split in (self._train, self._held_out):
            split.write_documents(
                [text for text, assigned in zip(texts, splits, strict=True) if assigned is split], self._engine
            )
        return sum(map(len, texts))

    def _check_engine(self, texts: Sequence[bytes]) -> None:
        """Compare the engine with the reference on the unit's first texts, and again every CHECK_INTERVAL_BYTES.

        Raises TokenizationMismatch if they differ.
        """
        if self._bytes_until_check <= 0:
            check_sample(self._engine, self._job.reference, texts)
            self._bytes_until_check = CHECK_INTERVAL_BYTES
        self._bytes_until_check -= sum(map(len, texts))

    def _write_long(self, document: LongDocument) -> Iterator[int]:
        try:
            split = self._assign_split(document.pieces())  # reads all of it, so errors occur before any writing
        except (BadLine, UnicodeDecodeError, *READ_ERRORS) as error:
            document.reject(error, self._bad)
            return
        self._bad.tally.documents += 1
        yield from self._write_pieces(document.pieces(), split)

    def _write_pieces(self, pieces: Iterator[bytes] | Sequence[bytes], split: _Split) -> Iterator[int]:
        for piece in self._job.splitter.cut(pieces):
            self._check_engine([piece])
            split.current_writer.write(self._engine.encode([piece])[0], len(piece))
            yield len(piece)
        split.end_document()

    def _assign_split(self, pieces: Iterator[bytes] | Sequence[bytes]) -> _Split:
        """Return a document's split.  A hash of the text chooses it, so that equal texts are in the same split."""
        digest = hashlib.blake2b(digest_size=6)
        for piece in pieces:
            if self._job.holdout:
                digest.update(piece)
        hash_fraction = int.from_bytes(digest.digest(), "little") / (1 << 48) if self._job.holdout else 1.0
        self._lowest = min(self._lowest, hash_fraction)
        return self._held_out if hash_fraction < self._job.holdout else self._train


class _Split:
    """The shards of one split of a unit."""

    def __init__(self, job: BuildJob, folder: BuildFolder, unit: int, is_held_out: bool) -> None:
        self._job, self._folder, self._unit, self._is_held_out = job, folder, unit, is_held_out
        self._writers: list[ShardWriter] = []
        self._is_full = True

    def write_documents(self, texts: Sequence[bytes], engine: Engine) -> None:
        if not texts:
            return
        ids, counts = engine.encode(texts)
        num_special = len(self._job.tokenizer.start_ids) + len(self._job.tokenizer.end_ids)
        sizes = np.fromiter(map(len, texts), np.int64, len(texts))
        while len(counts):
            writer = self.current_writer
            num_fitting = len(counts)
            if self._job.shard_tokens:  # the last document may exceed the limit
                space = self._job.shard_tokens - writer.num_tokens
                num_fitting = min(num_fitting, int(np.searchsorted(np.cumsum(counts + num_special), space)) + 1)
            end = int(counts[:num_fitting].sum())
            writer.write_documents(ids[:end], counts[:num_fitting], int(sizes[:num_fitting].sum()))
            ids, counts, sizes = ids[end:], counts[num_fitting:], sizes[num_fitting:]
            self._update_is_full(writer)

    def write_tokens(self, tokens: TokenChunk) -> None:
        ids, ends = tokens.ids, tokens.ends
        while len(ids):
            writer = self.current_writer
            ends_past_limit = (
                ends[writer.num_tokens + ends >= self._job.shard_tokens] if self._job.shard_tokens else ends[:0]
            )
            stop = int(ends_past_limit[0]) if len(ends_past_limit) else len(ids)
            num_documents = int(np.searchsorted(ends, stop, side="right"))
            writer.write_tokens(ids[:stop], ends[:num_documents])
            ids, ends = ids[stop:], ends[num_documents:] - stop
            if len(ends_past_limit):
                self._update_is_full(writer)

    def end_document(self) -> None:
        writer = self._writers[-1]
        writer.end_document()
        self._update_is_full(writer)

    def _update_is_full(self, writer: ShardWriter) -> None:
        self._is_full = 0 < self._job.shard_tokens <= writer.num_tokens

    def publish(self) -> list[str]:
        for writer in self._writers[-1:]:
            writer.close()
        for writer in self._writers:
            writer.publish()
        return [writer.path.name for writer in self._writers]

    def discard(self) -> None:
        for writer in self._writers:
            writer.discard()

    @property
    def current_writer(self) -> ShardWriter:
        """The writer of the current shard; starts a new shard if the last one is full."""
        if self._is_full:
            for writer in self._writers[-1:]:
                writer.close()
            name = self._folder.name_of(self._unit, len(self._writers), self._is_held_out)
            self._writers.append(ShardWriter(self._folder.path / f"{name}.bin", self._job.tokenizer))
            self._is_full = False
        return self._writers[-1]


# ---------------------------------------------------------------------------------------------------------------
# The build folder: a lock per unit, a record of each finished unit, and finally the manifest
#
# lock            the lock file, with one byte to lock per unit.  It is never removed, so that all processes lock the
#                 same file, even those that join late.
# 00007.bin ...   shards of unit 7, renamed to these names once they are on disk; held-out shards end in -eval
# 00007.done      the record of unit 7, written after its shards
# manifest.json   lists all shards; written when every unit is done, after which the records are removed


_LOCK = "lock"

_REPAIR_LOCK = 2**40 + 2
"""Position of the lock-file byte to lock while corrupt files are removed."""


@dataclass(frozen=True)
class UnitRecord:
    """The record of a finished unit: the names of its training and held-out shards, and the counts of its documents."""

    train: list[str] = field(default_factory=list)
    held_out: list[str] = field(default_factory=list)
    tally: DocumentCounts = field(default_factory=DocumentCounts)
    lowest: float = 1.0
    """The smallest hash of a document, scaled to [0, 1), or 1 if `data.holdout` is 0.  A `data.holdout` above it holds
    out at least one document."""


class BuildFolder:
    """The folder that builders share.

    Methods that lock or write raise OSError if the folder is missing or not writable, or does not support locks.
    """

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
        """True if every unit is done and the manifest has been written."""
        return self.manifest_path.exists()

    def name_of(self, unit: int, number: int, is_held_out: bool) -> str:
        """Return the file name of a unit's shard, without suffix."""
        return f"{unit:05d}{f'.{number:03d}' if number else ''}{'-eval' if is_held_out else ''}"

    def try_lock(self, unit: int) -> bool:
        """Try to lock a unit; return False without waiting if another process has locked it."""
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
        """Context manager that holds the lock of a unit."""
        self.lock(unit)
        try:
            yield
        finally:
            self.unlock(unit)

    def is_done(self, unit: int) -> bool:
        """Return whether there is a record of the unit."""
        return self._record_path(unit).exists()

    def read(self, unit: int) -> UnitRecord:
        """Return the record of a finished unit.  Raises ShardError if it is corrupt."""
        path = self._record_path(unit)
        try:
            stored = verify_checksum(json.loads(path.read_bytes()))
            return UnitRecord(**{**stored, "tally": DocumentCounts(**stored["tally"])})
        except CORRUPTION_ERRORS as error:
            raise ShardError(f"{path} is damaged ({error})") from error

    def write(self, unit: int, record: UnitRecord) -> None:
        """Write the record of a unit, after its shards are on disk under their final names."""
        sync_folder(self.path)
        with atomic_replace(self._record_path(unit)) as partial:
            partial.write_text(json.dumps(with_checksum(dataclasses.asdict(record))))

    def clear(self, unit: int) -> None:
        """Remove temporary files left by killed builders of a unit, and folders that have the names of its files.

        The caller holds the unit's lock.  Existing shards stay until they are replaced, since other runs may be reading
        them.
        """
        for path in self.path.glob(f".{unit:05d}[.-]*"):
            remove(path)
        for path in self.path.glob(f"{unit:05d}[.-]*"):
            if path.is_dir():
                remove(path)

    def remove_damaged(self, num_units: int) -> None:
        """Remove the record of each unit whose record or shards are corrupt or missing, so that the unit is rebuilt."""
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
                        return  # meanwhile, another process has finished and removed the records
                    print_stderr(f"{error}; building this part again")
                    remove(self._record_path(unit))

    def invalidate(self, check: Callable[[], object]) -> None:
        """If the folder is complete but corrupt, remove its manifest, so that the next build rebuilds everything in it.

        Shards stay until they are replaced, since other runs may be reading the intact ones.

        check: raises ShardError if the folder is corrupt.  It is called under a lock, since another process may have
            rebuilt the folder in the meantime.
        """
        with self.locked(_REPAIR_LOCK):
            if not self.is_complete:
                return
            try:
                check()
            except ShardError as error:
                print_stderr(f"{str(error).partition('; ')[0]}; building {self.path} again")
                remove(self.manifest_path)
                for path in self.path.glob("*.damaged"):
                    remove(path)

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


# ---------------------------------------------------------------------------------------------------------------
# Publishing: renaming finished shards to the names that the user asked for


_PUBLISH_LOCK = 2**40 + 1
"""Position of the lock-file byte to lock while shards are renamed."""


def find_published(stem: Path) -> list[Path]:
    """Return the files of all shards published under a stem, the part that the shards' paths have in common."""
    name = re.compile(re.escape(stem.name) + r"(-eval)?-\d{5,}\.(bin|idx|crc|json)")
    return sorted(path for path in stem.parent.iterdir() if name.fullmatch(path.name))


def is_in_progress(work: Path) -> bool:
    """Return whether a build in the folder `work` has started, and its folder has not been removed yet."""
    return work.exists() or _finished_path(work).exists()


def was_published(work: Path, stem: Path) -> bool:
    """Return whether the shards built in `work` were published, even if the process was killed right afterwards.

    Removes the folder that such a process has left.
    """
    finished = _finished_path(work)
    if finished.exists():
        shutil.rmtree(finished, ignore_errors=True)
        return True
    return not work.exists() and bool(find_published(stem))


def publish(manifest: ShardManifest, work: Path, stem: Path) -> None:
    """Rename a manifest's shards to STEM-00000.bin and so on, replacing existing shards; then remove the folder `work`.

    If the process is killed, another call finishes the work.  If several processes call this, all but one wait.
    """
    train, held_out = paths_of(manifest, stem)
    moves = [
        ((work / name).with_suffix(suffix), path.with_suffix(suffix))
        for suffix in SUFFIXES  # metadata files come last: a shard without metadata is rejected
        for (name, *_), path in zip([*manifest.train, *manifest.held_out], [*train, *held_out], strict=True)
    ]
    with BuildFolder(work) as folder, folder.locked(_PUBLISH_LOCK):
        if (work / MANIFEST).exists():  # otherwise another process has published the shards
            targets = {target for source, target in moves if source.exists() or not source.with_suffix(".bin").exists()}
            for path in find_published(stem):
                if path not in targets:
                    path.unlink()
            for source, target in moves:
                if source.exists():
                    os.replace(source, target)
            sync_folder(stem.parent)
            shutil.rmtree(_finished_path(work), ignore_errors=True)
            os.rename(work, _finished_path(work))  # atomic: no other process may see a half-removed build
    shutil.rmtree(_finished_path(work), ignore_errors=True)


def read_published(stem: Path) -> ShardManifest:
    """Return a manifest of the shards published under a stem.  Raises ShardError if they cannot be read."""
    paths = [path for path in find_published(stem) if path.suffix == ".bin"]
    held_out = [Shard(path) for path in paths if path.name.startswith(f"{stem.name}-eval-")]
    train = [Shard(path) for path in paths if not path.name.startswith(f"{stem.name}-eval-")]
    info = (train or held_out)[0].info
    return ShardManifest(
        dtype=info.dtype,
        vocab_size=info.vocab_size,
        tokenizer=info.tokenizer,
        end_id=info.end_id,
        train=manifest_rows(train, stem.parent),
        held_out=manifest_rows(held_out, stem.parent),
    )


def paths_of(manifest: ShardManifest, stem: Path) -> tuple[list[Path], list[Path]]:
    """Return the paths at which a manifest's training shards and held-out shards are published."""
    train_numbers, held_out_numbers = range(len(manifest.train)), range(len(manifest.held_out))
    return (
        [stem.with_name(f"{stem.name}-{number:05d}.bin") for number in train_numbers],
        [stem.with_name(f"{stem.name}-eval-{number:05d}.bin") for number in held_out_numbers],
    )


def _finished_path(work: Path) -> Path:
    return work.with_name(f"{work.name}.past")
