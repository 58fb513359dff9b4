"""Builds token shards, piece by piece: the one builder for text, chats, Python's standard library and `prepare`.

A folder of shards:

    00007.bin ...       the shard of piece 7, and its other files (see `shards`); of held-out documents 00007-eval.bin
    00007.done          the record of piece 7, written after its shards
    manifest.json       lists all shards; written when every piece is done

A file appears under its name only once it is complete and on disk.  So a process that is killed leaves finished pieces,
which the next one keeps, and temporary files, which it removes.  One process builds, while others wait for the lock and
then find the manifest.  If a file is damaged later, only its piece is built again; it has the same bytes as before, so
that runs that are reading it are not disturbed.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.data.cache import CORRUPTION_ERRORS, in_writable_folder
from trainer.data.progress import ByteProgress, ProgressLine
from trainer.data.records import Piece
from trainer.data.shards import (
    MANIFEST,
    Shard,
    ShardError,
    ShardManifest,
    ShardSet,
    ShardWriter,
    manifest_rows,
    verify_at_start,
)
from trainer.data.source import sample_content
from trainer.data.tokenizer import Tokenizer
from trainer.errors import UserError, print_stderr
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


class Build(ABC):
    """What to build: the pieces of the input, and how to write the shards of a piece.

    content: what is built, for messages, such as `tokenized text`.
    tokenizer: the tokenizer that makes the ids.
    """

    content: str
    tokenizer: Tokenizer

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of its folder in the cache, with a hash of all that the shards depend on."""

    @property
    @abstractmethod
    def files(self) -> Sequence[str]:
        """The names of the input files."""

    @property
    @abstractmethod
    def pieces(self) -> Sequence[Piece]:
        """The pieces of the input.  They must not depend on the process that builds them."""

    @abstractmethod
    def write(
        self, piece: Piece, train: ShardWriter, held_out: ShardWriter, progress: ByteProgress
    ) -> Mapping[str, Any]:
        """Write the documents of a piece, and return JSON-compatible notes about them.

        progress: must be told at least once a second how many bytes were read.

        Raises UserError if the input cannot be used.
        """

    def combine(self, notes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the notes about all pieces together.  Raises UserError if there is nothing in them to build."""
        return {}

    def check(self, notes: Mapping[str, Any]) -> None:  # noqa: B027 - most builds have nothing to check
        """Raise UserError if the current settings do not allow what `combine` has noted, perhaps under earlier ones."""

    @property
    def num_bytes(self) -> int:
        """The size of the input."""
        return sum(piece.size for piece in self.pieces)

    def is_complete(self, cache_dir: str | None) -> bool:
        """Return whether the shards are in a cache folder already."""
        return any((folder / self.name / MANIFEST).exists() for folder in find_cache_folders(cache_dir))


def load_or_build(
    build: Build, cache_dir: str | None, input_on_disk: Callable[[], AbstractContextManager[None]] = nullcontext
) -> ShardSet:
    """Return the shards from the cache, building those first that are missing or damaged.

    input_on_disk: a context manager inside which the input files are on the disk; entered only to build.

    Raises UserError as `Build.write`, `Build.combine` and `Build.check` do, and if no cache folder is writable.
    """
    for folder in find_cache_folders(cache_dir):
        try:
            shards = _load(build, folder / build.name)
        except ShardError as error:
            if (folder / build.name / MANIFEST).exists():
                print_stderr(f"{str(error).partition('; ')[0]}; building this part again")
        else:
            build.check(shards.notes)
            return shards

    def build_below(folder: Path) -> ShardSet:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with locked(folder / build.name):
            try:
                return _load(build, folder / build.name)  # another process has built it in the meantime
            except ShardError:
                with input_on_disk():
                    build_in(build, folder / build.name)
                return _load(build, folder / build.name)

    shards = in_writable_folder(cache_dir, build.content, build_below, build.num_bytes)
    build.check(shards.notes)
    return shards


def build_in(build: Build, folder: Path) -> ShardManifest:
    """Build the pieces that are missing or damaged in a folder, and return its manifest.

    The caller holds a lock on the folder.  Raises UserError as `Build.write` and `Build.combine` do; finished pieces
    are kept.  Raises OSError if the folder is not writable.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in [*folder.glob(".*"), *folder.glob("*.damaged")]:  # of killed processes, and of damaged files
        remove(leftover)
    progress = ByteProgress("tokenizing", build.num_bytes)
    records = []
    try:
        with ProgressLine(progress.line), stop.noting("the next run continues tokenizing from here"):
            for number, piece in enumerate(build.pieces):
                record = _read_record(folder, number)
                if record is None:
                    record = _build_piece(build, piece, folder, number, progress)
                else:
                    progress.skip(piece.size)
                records.append(record)
        try:
            notes = build.combine([record.notes for record in records])
        except UserError:
            remove(folder)  # the input is of no use
            raise
        manifest = _make_manifest(records, notes, folder)
        if (folder / MANIFEST).is_dir():
            remove(folder / MANIFEST)  # what cannot be replaced by a file
        manifest.write(folder / MANIFEST)
        return manifest
    except (UserError, OSError):
        if not any(folder.glob("*.bin")):
            remove(folder)
        raise


def _load(build: Build, folder: Path) -> ShardSet:
    """Return the shards in a folder.  Raises ShardError if the manifest is missing, or if a shard is damaged."""
    manifest = ShardManifest.read(folder / MANIFEST)
    train, held_out = manifest.shards(folder), manifest.shards(folder, is_held_out=True)
    for shard in (*train, *held_out):
        shard.is_rebuilt = True
    verify_at_start([*train, *held_out])
    return ShardSet(
        list(build.files), train, manifest.train_content, held_out, manifest.held_out_content, manifest.notes
    )


# -- pieces -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _PieceRecord:
    """The record of a finished piece: the names of its two shards, "" for one without documents, and its notes."""

    train: str
    held_out: str
    notes: Mapping[str, Any]


def _read_record(folder: Path, number: int) -> _PieceRecord | None:
    """Return the record of a piece, or None if it is not done, or if its record or its shards are damaged."""
    path = _record_path(folder, number)
    try:
        record = _PieceRecord(**verify_checksum(json.loads(path.read_bytes())))
        for name in filter(None, (record.train, record.held_out)):
            Shard(folder / name).verify()
        return record
    except CORRUPTION_ERRORS:
        return None


def _build_piece(build: Build, piece: Piece, folder: Path, number: int, progress: ByteProgress) -> _PieceRecord:
    for suffix in ("", "-eval"):
        for path in folder.glob(f"{number:05d}{suffix}.*"):
            if path.is_dir():
                remove(path)  # what cannot be replaced by a file
    train = ShardWriter(folder / f"{number:05d}.bin", build.tokenizer)
    held_out = ShardWriter(folder / f"{number:05d}-eval.bin", build.tokenizer)
    try:
        notes = build.write(piece, train, held_out, progress)
        names = []
        for writer in (train, held_out):
            if writer.num_documents:
                writer.close()
                writer.publish()
            names.append(writer.path.name if writer.num_documents else "")
    finally:
        train.discard()
        held_out.discard()
    sync_folder(folder)
    record = _PieceRecord(names[0], names[1], notes)
    with atomic_replace(_record_path(folder, number)) as partial:
        partial.write_text(json.dumps(with_checksum(vars(record))))
    return record


def _record_path(folder: Path, number: int) -> Path:
    return folder / f"{number:05d}.done"


def _make_manifest(records: Sequence[_PieceRecord], notes: dict[str, Any], folder: Path) -> ShardManifest:
    train = [Shard(folder / record.train) for record in records if record.train]
    held_out = [Shard(folder / record.held_out) for record in records if record.held_out]
    info = (train or held_out)[0].info
    return ShardManifest(
        dtype=info.dtype,
        vocab_size=info.vocab_size,
        tokenizer=info.tokenizer,
        end_id=info.end_id,
        train=manifest_rows(train, folder),
        held_out=manifest_rows(held_out, folder),
        train_content=sample_content(train) if train else "",
        held_out_content=sample_content(held_out) if held_out else "",
        notes=notes,
    )
