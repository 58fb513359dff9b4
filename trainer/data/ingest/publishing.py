"""Renames finished shards to the names that the user asked for."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainer.data.ingest.folder import BuildFolder
from trainer.data.shards import MANIFEST, SUFFIXES, Manifest, Shard, ShardRow, row_of
from trainer.files import sync_folder

_PUBLISH_LOCK = 2**40 + 1
"""The byte of the folder's lock file that is locked while shards are renamed."""


def find_published(stem: Path) -> list[Path]:
    """Return the existing shard files whose names begin with this stem."""
    name = re.compile(re.escape(stem.name) + r"(-eval)?-\d{5,}\.(bin|idx|crc|json)")
    return sorted(path for path in stem.parent.iterdir() if name.fullmatch(path.name))


def is_in_progress(work: Path) -> bool:
    """Return whether a build in the folder `work` was started and has not finished."""
    return work.exists() or _finished_path(work).exists()


def was_published(work: Path, stem: Path) -> bool:
    """Return whether the shards built in `work` were published, even by a process that was killed right afterwards."""
    past = _finished_path(work)
    if past.exists():
        shutil.rmtree(past, ignore_errors=True)
        return True
    return not work.exists() and bool(find_published(stem))


def publish(manifest: Manifest, work: Path, stem: Path) -> None:
    """Rename a manifest's shards to `stem`-00000.bin and so on, replacing existing shards, and remove the folder
    `work`.

    If it is killed, calling it again continues.  Processes that call it at the same time wait for the first.
    """
    train, held_out = paths_of(manifest, stem)
    moves = list(_renames(work, [*manifest.train, *manifest.held_out], [*train, *held_out]))
    with BuildFolder(work) as folder, folder.locked(_PUBLISH_LOCK):
        if (work / MANIFEST).exists():  # else another process has published it
            wanted = {target for source, target in moves if source.exists() or not source.with_suffix(".bin").exists()}
            for path in find_published(stem):
                if path not in wanted:
                    path.unlink()
            for source, target in moves:
                if source.exists():
                    os.replace(source, target)
            sync_folder(stem.parent)
            shutil.rmtree(_finished_path(work), ignore_errors=True)
            os.rename(work, _finished_path(work))  # atomic: no other process may see a half-removed build
    shutil.rmtree(_finished_path(work), ignore_errors=True)


def read_published(stem: Path) -> Manifest:
    """Return a manifest of the shards published under a stem.  Raises ShardError."""
    paths = [path for path in find_published(stem) if path.suffix == ".bin"]
    is_held_out = [path.name.startswith(f"{stem.name}-eval-") for path in paths]
    shards = [Shard(path) for path in paths]
    return Manifest(
        *shards[0].info.kind,
        train=[row_of(shard, stem.parent) for shard, out in zip(shards, is_held_out, strict=True) if not out],
        held_out=[row_of(shard, stem.parent) for shard, out in zip(shards, is_held_out, strict=True) if out],
    )


def paths_of(manifest: Manifest, stem: Path) -> tuple[list[Path], list[Path]]:
    """Return the paths to publish a manifest's shards under: training shards, held-out shards."""
    return _paths(stem, manifest.train), _paths(stem.with_name(f"{stem.name}-eval"), manifest.held_out)


def _finished_path(work: Path) -> Path:
    return work.with_name(f"{work.name}.past")


def _paths(stem: Path, rows: Sequence[ShardRow]) -> list[Path]:
    return [stem.with_name(f"{stem.name}-{number:05d}.bin") for number in range(len(rows))]


def _renames(work: Path, rows: Sequence[ShardRow], paths: Sequence[Path]) -> Iterator[tuple[Path, Path]]:
    """Yield (source, target) of each file.  Metadata files come last: a shard without metadata is rejected."""
    for suffix in SUFFIXES:
        for (name, *_), path in zip(rows, paths, strict=True):
            yield (work / name).with_suffix(suffix), path.with_suffix(suffix)
