"""Catalogues: what is known of many shards that no manifest lists, kept in the cache, so that it is read once.

A thousand ranks that open thousands of shards each would be a storm on the file server.  A catalogue is a manifest in
the cache, under a name made of the shards' paths and of what tells their metadata from others; ranks then open that
one file.
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

MANY = 64
"""Shards from which on a catalogue is kept."""


def read_shards(paths: Sequence[str], cache_dir: str | None) -> tuple[list[Shard], str]:
    """Return the shards at `paths`, and their `sample_content` or nothing where it is not known.  Raises ShardError."""
    if len(paths) < MANY:
        return [Shard(path) for path in paths], ""
    name = _name(paths)
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
        with contextlib.suppress(OSError):  # the next one, or none: it is then read again
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            Manifest(*shards[0].info.kind, train=rows, held_out=[], train_content=content, checksums=checksums).write(
                folder / name
            )
            break
    return shards, content


def _name(paths: Sequence[str]) -> str:
    """Return a name for shards as they are now.  Raises ShardError if the metadata of one is not there."""
    digest = hashlib.blake2b(b"2" + os.fsencode(os.getcwd()), digest_size=12)
    for path in paths:
        metadata = f"{path.removesuffix('.bin')}.json"
        try:
            found = os.stat(metadata)
        except OSError as error:
            raise ShardError(f"the metadata {metadata} cannot be read ({error.strerror})") from error
        digest.update(f"{path}:{found.st_ino}:{found.st_mtime_ns}:{found.st_size};".encode())
    return f"catalogue-{digest.hexdigest()}.json"
