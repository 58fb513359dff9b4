"""Catalogues: cached manifests for large sets of shards without a manifest.

If a thousand ranks each opened the metadata of thousands of shards, they would overload the file server.  So the
metadata are collected once in a catalogue, a manifest in the cache, and each rank opens that one file.  Its name
contains a hash of the shards' paths and of the inode, modification time and size of their metadata files.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Sequence

from trainer.data.cache import find_cache_folders
from trainer.data.manifest import Manifest
from trainer.data.shards import Shard, ShardError
from trainer.data.source import sample_content

MIN_SHARDS = 64
"""The smallest number of shards for which a catalogue is written."""


def open_shard_files(paths: Sequence[str], cache_dir: str | None) -> tuple[list[Shard], str]:
    """Return the shards at `paths` and their `sample_content`, or "" if it is not known.  Raises ShardError."""
    if len(paths) < MIN_SHARDS:
        return [Shard(path) for path in paths], ""
    name = _cache_name(paths)
    for folder in find_cache_folders(cache_dir):
        with contextlib.suppress(ShardError):  # absent, or the shards have changed
            manifest = Manifest.read(folder / name)
            return manifest.shards(folder), manifest.train_content
    shards = [Shard(path) for path in paths]
    if any(shard.info.kind != shards[0].info.kind for shard in shards):
        return shards, ""
    content = sample_content(shards)
    rows = [
        (os.path.abspath(shard.name), shard.info.num_tokens, shard.info.num_documents, shard.info.num_bytes)
        for shard in shards
    ]
    checksums = [shard.info.checksum for shard in shards]
    for folder in find_cache_folders(cache_dir):
        with contextlib.suppress(OSError):  # try the next folder; if none is writable, the next run reads them again
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            Manifest(*shards[0].info.kind, train=rows, held_out=[], train_content=content, checksums=checksums).write(
                folder / name
            )
            break
    return shards, content


def _cache_name(paths: Sequence[str]) -> str:
    """Return the cache file's name for the shards in their current state.  Raises ShardError if metadata is missing."""
    digest = hashlib.blake2b(b"2" + os.fsencode(os.getcwd()), digest_size=12)
    for path in paths:
        metadata = f"{path.removesuffix('.bin')}.json"
        try:
            found = os.stat(metadata)
        except OSError as error:
            raise ShardError(f"the metadata {metadata} cannot be read ({error.strerror})") from error
        digest.update(f"{path}:{found.st_ino}:{found.st_mtime_ns}:{found.st_size};".encode())
    return f"catalogue-{digest.hexdigest()}.json"
