"""Finds the shards that a URL names: a single shard, a manifest, a glob or a folder."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.data.cache import find_cache_folders, read_value, write_value
from trainer.data.remote.shard import CacheLocation, RemoteShard
from trainer.data.remote.transport import Unreachable, find_urls, map_urls, read
from trainer.data.shards import Manifest, Shard, ShardError, parse_info
from trainer.data.source import sample_content
from trainer.distributed.environment import find_environment
from trainer.errors import masked, setting_error
from trainer.urls import has_pattern, join, parent, split_query, with_suffix


class NoShards(Exception):
    """A URL names no token shards."""


@dataclass(frozen=True)
class ShardListing:
    """Training and held-out shards, with digests of their contents (see `sample_content`)."""

    train: list[Shard]
    train_content: str
    held_out: list[Shard]
    held_out_content: str


def open_remote(setting: str, key: str, cache_dir: str | None, cache_gib: float | None) -> ShardListing:
    """Return the shards that a URL names.  They are cached as they are read.

    Raises NoShards if there are none, ShardError, and UserError if there is no usable cache folder or it is too small.
    """
    location = CacheLocation(
        find_cache_subfolder(cache_dir, "shards"), None if cache_gib is None else int(cache_gib * 2**30)
    )
    url_path, query = split_query(setting)
    url = url_path.rstrip("/") + query
    content = None
    if url_path.endswith(".json"):
        content = _read_manifest(setting, url, key)
    elif not url_path.endswith(".bin") and not has_pattern(url):
        with contextlib.suppress(Unreachable):  # no manifest: list the shards
            content = read(join(url, "manifest.json"))
            url = join(url, "manifest.json")
    found = _by_manifest(url, content, location) if content is not None else _by_name(url, location)
    if cache_gib is not None:
        _check_capacity([*found.train, *found.held_out], cache_gib)
    return found


def _read_manifest(setting: str, url: str, key: str) -> bytes:
    content = read(url)
    with contextlib.suppress(ShardError):
        parse_info(content, url)
        meant = with_suffix(url, ".json", ".bin")
        raise setting_error(key, setting, "belongs to a token shard, whose name ends in .bin", meant=meant)
    return content


def _by_manifest(url: str, content: bytes, location: CacheLocation) -> ShardListing:
    manifest = Manifest.parse(content, url)
    base, version = parent(url), hashlib.blake2b(content, digest_size=12).hexdigest()

    def shards(is_held_out: bool) -> list[Shard]:
        return [RemoteShard(_inside(base, name), info, location, version) for name, info in manifest.infos(is_held_out)]

    train, held_out = shards(is_held_out=False), shards(is_held_out=True)
    return ShardListing(train, manifest.train_content, held_out, manifest.held_out_content)


def _inside(base: str, name: str) -> str:
    if name.startswith("/"):
        raise ShardError(f"the manifest {masked(base)} lists {name}, which is on a file system of another machine")
    return name if "://" in name else join(base, name)


def _by_name(url: str, location: CacheLocation) -> ShardListing:
    is_one = split_query(url)[0].endswith(".bin") and not has_pattern(url)
    urls = [url] if is_one else [found for found in find_urls(url) if split_query(found)[0].endswith(".bin")]
    if not urls:
        raise NoShards
    metadata = map_urls(read, [with_suffix(url, ".bin", ".json") for url in urls])
    shards: list[Shard] = [
        RemoteShard(url, parse_info(content, url), location, hashlib.blake2b(content, digest_size=12).hexdigest())
        for url, content in zip(urls, metadata, strict=True)
    ]
    return ShardListing(shards, _content(shards, b"\0".join(metadata), location), [], "")


def _content(shards: Sequence[Shard], metadata: bytes, location: CacheLocation) -> str:
    """Return the digest of the shards' content, from the cache if it was computed before for the same metadata."""
    digest = hashlib.blake2b(metadata, digest_size=12)
    digest.update("\n".join(shard.name for shard in shards).encode())
    path = location.folder.with_name(f"content-{digest.hexdigest()}")
    if isinstance(known := read_value(path), str):
        return known
    content = sample_content(shards)
    with contextlib.suppress(OSError):
        write_value(path, content)
    return content


def find_cache_subfolder(cache_dir: str | None, name: str) -> Path:
    """Return the subfolder `name` of the cache, for downloads.

    Raises UserError if no cache folder is writable.
    """
    failure: OSError | None = None
    for base in find_cache_folders(cache_dir):
        try:
            (base / name).mkdir(parents=True, exist_ok=True)
            return base / name
        except OSError as error:
            failure = error
    rule = f"{name} cannot be stored there ({failure})" if failure else f"no folder to store {name} in"
    raise setting_error("data.cache_dir", cache_dir, rule, fix="give a writable folder")


def _check_capacity(shards: Sequence[Shard], cache_gib: float) -> None:
    """Raise UserError unless the cache can hold one shard for each rank of this machine."""
    ranks = find_environment().local_world_size
    needed = ranks * max((shard.info.num_tokens * shard.dtype.itemsize for shard in shards), default=0)
    if cache_gib * 2**30 < needed:
        whose = f"a shard for each of {ranks} ranks" if ranks > 1 else "the largest shard"
        legal = float(f"{needed / 2**30 * 1.0005 + 1e-9:.4g}")
        raise setting_error("data.cache_gib", cache_gib, f"must hold {whose}", legal)
