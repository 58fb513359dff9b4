"""Tokenizes a run's text into shards on first use, and caches them in `data.cache_dir`.

The name of a cached folder is a hash of everything that its shards depend on, so that all processes and later runs find
it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from trainer.data.cache import find_cache_folders, storage_error
from trainer.data.ingest.build import BuildFolder, BuildJob, build, default_num_procs
from trainer.data.ingest.documents import check_tokens
from trainer.data.ingest.inputs import DocumentCounts, InputFile, SettingNames, check_limit, parse_limit
from trainer.data.manifest import MANIFEST, Manifest
from trainer.data.shards import Shard, ShardError, verify_at_start
from trainer.data.tokenizer import tokenizer_of
from trainer.errors import UserError, setting_error

if TYPE_CHECKING:
    from trainer.config import DataSection

_LAYOUT_VERSION = 1
"""Increase when the same text and settings give different shards, so that older cached shards are not used."""

TokenizedShards: TypeAlias = "tuple[list[Shard], str, list[Shard], str]"
"""(training shards, digest of their content, held-out shards, digest of their content)."""


def is_cached(inputs: Sequence[InputFile], data: DataSection, holdout: float, key: str) -> bool:
    """Return whether the shards of these files are in the cache.  Raises UserError if the settings are invalid."""
    name = _folder_name(_make_job(inputs, data, holdout, key))
    return any((base / name / MANIFEST).exists() for base in find_cache_folders(data.cache_dir))


def get_or_build_shards(
    inputs: Sequence[InputFile], data: DataSection, holdout: float, key: str, fetch: Callable[[], None]
) -> TokenizedShards:
    """Return the shards of text files from the cache, building them first if they are missing.

    holdout: the share of documents to hold out.
    key: the setting that names the files.
    fetch: called before the files are read, to download them.

    Raises UserError.
    """
    job = _make_job(inputs, data, holdout, key)
    failures: list[UserError] = []
    for base in find_cache_folders(data.cache_dir):
        try:
            return _get_or_build(job, base / _folder_name(job), fetch)
        except OSError as error:
            size = sum(each.size for each in job.inputs)
            failures.append(storage_error(data.cache_dir, "tokenized text", base, error, size))
    raise (
        failures[-1]
        if failures
        else setting_error(
            "data.cache_dir", data.cache_dir, "no folder to store tokenized text in", fix="give a writable folder"
        )
    )


def _make_job(inputs: Sequence[InputFile], data: DataSection, holdout: float, key: str) -> BuildJob:
    keys = SettingNames(inputs=key)
    parse_limit(data.bad, keys.bad)
    tokenizer = tokenizer_of(data)
    check_tokens(inputs, tokenizer, data.bos, keys)
    share = 0.0 if all(each.kind == "tokens" for each in inputs) else holdout
    return BuildJob(tuple(inputs), tokenizer, data.text_key, data.bad, share, keys=keys)


def _get_or_build(job: BuildJob, path: Path, fetch: Callable[[], None]) -> TokenizedShards:
    """Return the shards of a job and the digests of their contents, building them in `path` if they are missing.

    Existing shards are verified (see `verify_at_start`) and rebuilt if they are corrupt.
    """
    manifest = _manifest_of(job, path, fetch)
    check_limit(DocumentCounts.of(manifest), job.bad, job.keys)
    try:
        shards = _load_verified(path)
    except ShardError:
        with BuildFolder(path) as folder:
            folder.invalidate(lambda: _find_damage(path))
        manifest = _manifest_of(job, path, fetch)
        shards = _load_verified(path)
    return shards[0], manifest.train_content, shards[1], manifest.held_out_content


def _load_verified(path: Path) -> tuple[list[Shard], list[Shard]]:
    """Return the training shards and the held-out shards, verified.  Raises ShardError."""
    manifest = Manifest.read(path / MANIFEST)
    train, held_out = manifest.shards(path), manifest.shards(path, held_out=True)
    verify_at_start([*train, *held_out])
    for shard in (*train, *held_out):
        shard.is_rebuilt = True  # from here on, corruption is only detected when the shard is read
    return train, held_out


def _find_damage(path: Path) -> ShardError | None:
    try:
        _load_verified(path)
    except ShardError as error:
        return error
    return None


def _manifest_of(job: BuildJob, path: Path, fetch: Callable[[], None]) -> Manifest:
    if not (path / MANIFEST).exists():
        fetch()
    return build(job, path, default_num_procs())


def _folder_name(job: BuildJob) -> str:
    """Return the name of a job's folder: a hash of everything that its shards depend on, without reading the text."""
    files = [
        (os.path.realpath(each.path), each.kind, each.compression, each.size, each.mtime_ns) for each in job.inputs
    ]
    content = json.dumps([_LAYOUT_VERSION, job.tokenizer.name, job.text_key, job.holdout, files])
    return f"tokens-{hashlib.sha256(content.encode()).hexdigest()[:20]}"
