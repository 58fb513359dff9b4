"""Text tokenized by the settings of a run: made into shards on first use, and kept in `data.cache_dir`.

A folder there is named after all that its shards depend on, so that every process and every later run finds it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from trainer.data.cache import find_cache_folders, storage_error
from trainer.data.ingest.builder import build, usual_procs
from trainer.data.ingest.folder import MANIFEST, BuildFolder
from trainer.data.ingest.inputs import Input
from trainer.data.ingest.report import Keys, Tally, check_limit, parse_limit
from trainer.data.ingest.tokens import check_tokens
from trainer.data.ingest.writing import Job
from trainer.data.manifest import Manifest
from trainer.data.shards import Shard, ShardError, verify_at_start
from trainer.data.tokenizer import tokenizer_of
from trainer.errors import UserError, setting_error

if TYPE_CHECKING:
    from trainer.config import DataSection

_LAYOUT_VERSION = 1
"""Changes with what is made of the same text and settings, so that no shards of before are taken for those of now."""

TokenizedShards: TypeAlias = "tuple[list[Shard], str, list[Shard], str]"
"""The shards to train on and the digest of their content, and the same of those held out."""


def is_cached(inputs: Sequence[Input], data: DataSection, holdout: float, key: str) -> bool:
    """Return whether the shards of these files are in the cache.  Raises UserError for settings that are none."""
    name = _name(_job_of(inputs, data, holdout, key))
    return any((base / name / MANIFEST).exists() for base in find_cache_folders(data.cache_dir))


def make_shards(
    inputs: Sequence[Input], data: DataSection, holdout: float, key: str, fetch: Callable[[], None]
) -> TokenizedShards:
    """Return the shards of files: those that are in the cache, or else they are made, and kept there.

    `holdout` is the share of documents that is held out, `key` the setting that names the files; `fetch` is called
    before they are read.  Raises UserError.
    """
    job = _job_of(inputs, data, holdout, key)
    failures: list[UserError] = []
    for base in find_cache_folders(data.cache_dir):
        try:
            return _get_or_build(job, base / _name(job), fetch)
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


def _job_of(inputs: Sequence[Input], data: DataSection, holdout: float, key: str) -> Job:
    keys = Keys(inputs=key)
    parse_limit(data.bad, keys.bad)
    tokenizer = tokenizer_of(data)
    check_tokens(inputs, tokenizer, data.bos, keys)
    share = 0.0 if all(each.kind == "tokens" for each in inputs) else holdout
    return Job(tuple(inputs), tokenizer, data.text_key, data.bad, share, keys=keys)


def _get_or_build(job: Job, path: Path, fetch: Callable[[], None]) -> TokenizedShards:
    """Return the shards of a job, and the digests of their contents; they are made in `path` if they are not there.

    Those that are there are verified (see `verify_at_start`), and made again if they are damaged.
    """
    manifest = _manifest_of(job, path, fetch)
    check_limit(Tally.of(manifest), job.bad, job.keys)
    try:
        shards = _verified(path)
    except ShardError:
        with BuildFolder(path) as folder:
            folder.discard(lambda: _damage_of(path))
        manifest = _manifest_of(job, path, fetch)
        shards = _verified(path)
    return shards[0], manifest.train_content, shards[1], manifest.held_out_content


def _verified(path: Path) -> tuple[list[Shard], list[Shard]]:
    """Return the shards to train on, and those held out.  Raises ShardError."""
    manifest = Manifest.read(path / MANIFEST)
    train, held_out = manifest.shards(path), manifest.shards(path, held_out=True)
    verify_at_start([*train, *held_out])
    for shard in (*train, *held_out):
        shard.is_rebuilt = True  # from now on damage is only found while it is read
    return train, held_out


def _damage_of(path: Path) -> ShardError | None:
    try:
        _verified(path)
    except ShardError as error:
        return error
    return None


def _manifest_of(job: Job, path: Path, fetch: Callable[[], None]) -> Manifest:
    if not (path / MANIFEST).exists():
        fetch()
    return build(job, path, usual_procs())


def _name(job: Job) -> str:
    """Return a folder's name for all that the shards of a job depend on, without reading the text."""
    files = [(os.path.realpath(each.path), each.kind, each.packing, each.size, each.changed) for each in job.inputs]
    content = json.dumps([_LAYOUT_VERSION, job.tokenizer.name, job.text_key, job.holdout, files])
    return f"tokens-{hashlib.sha256(content.encode()).hexdigest()[:20]}"
