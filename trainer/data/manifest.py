"""Manifests: a file that lists the shards of a dataset with their metadata, so that opening thousands of shards reads
a single file.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from trainer.data.shards import Shard, ShardError, ShardInfo, find_dtype
from trainer.files import checked, replacing, with_checksum

ShardRow: TypeAlias = "tuple[str, int, int, int]"
"""A shard: its path, absolute or relative to the manifest's folder, and its numbers of tokens, documents and raw text
bytes."""

FORMAT = 1

MANIFEST = "manifest.json"
"""The name of the manifest of a folder of shards."""


@dataclass(frozen=True)
class Manifest:
    """Lists the training and held-out shards of a dataset, all made by the same tokenizer.

    train_content, held_out_content: the digests from `sample_content`; empty if there are no such shards.
    notes: statistics collected while building the shards, for the messages of later runs.
    checksums: the checksums in the metadata of all shards, first of `train`, then of `held_out`.  Empty in manifests
        written by earlier versions.
    """

    dtype: str
    vocab_size: int
    tokenizer: str
    end_id: int
    train: list[ShardRow]
    held_out: list[ShardRow]
    train_content: str = ""
    held_out_content: str = ""
    notes: dict[str, Any] = dataclasses.field(default_factory=dict)
    format: int = FORMAT
    checksums: list[str] = dataclasses.field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Return the manifest at `path`.  Raises ShardError."""
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ShardError(f"the manifest {path} cannot be read ({error.strerror})") from error
        return cls.parse(content, str(path))

    @classmethod
    def parse(cls, content: bytes, path: str) -> Manifest:
        """Parse the content of a manifest; `path` names it in messages.  Raises ShardError."""
        try:
            found = cls(**checked(json.loads(content)))
            if found.format != FORMAT:
                raise ShardError(f"{path} has format {found.format}, this version reads format {FORMAT}")
            _check_types(found)
            for row in (*found.train, *found.held_out):
                name, *counts = row
                if not isinstance(name, str) or [type(count) for count in counts] != [int] * 3 or min(counts) < 0:
                    raise ValueError(f"a shard is {row!r}")
        except (ValueError, TypeError) as error:
            raise ShardError(
                f"{path} is not a manifest of token shards; for documents use .jsonl, one per line"
            ) from error
        return found

    def write(self, path: Path) -> None:
        """Write the manifest to `path` atomically, replacing an earlier one, and flush it to disk."""
        with replacing(path) as partial:
            partial.write_text(json.dumps(with_checksum(vars(self)), separators=(",", ":")))

    def shards(self, folder: Path, held_out: bool = False) -> list[Shard]:
        """Return the shards; their files are checked with `stat`, not opened.  Raises ShardError."""
        inside = f"{folder}/"
        return [
            Shard.from_manifest(name if name.startswith("/") else inside + name, info)
            for name, info in self.infos(held_out)
        ]

    def infos(self, held_out: bool = False) -> list[tuple[str, ShardInfo]]:
        """Return the shards' paths, as written in the manifest, and their metadata."""
        alike = (self.dtype, self.vocab_size, self.tokenizer, self.end_id)
        checksums = self.checksums or [""] * (len(self.train) + len(self.held_out))
        rows, own = (
            (self.held_out, checksums[len(self.train) :]) if held_out else (self.train, checksums[: len(self.train)])
        )
        return [
            (name, ShardInfo(*alike, tokens, documents, num_bytes, checksum=checksum))
            for (name, tokens, documents, num_bytes), checksum in zip(rows, own, strict=True)
        ]


def _check_types(manifest: Manifest) -> None:
    """Raise ValueError if a field has the wrong type or an invalid value."""
    texts = (manifest.dtype, manifest.tokenizer, manifest.train_content, manifest.held_out_content, *manifest.checksums)
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("a field that must be text is not")
    if manifest.checksums and len(manifest.checksums) != len(manifest.train) + len(manifest.held_out):
        raise ValueError("it has a checksum too few or too many")
    for checksum in filter(None, manifest.checksums):
        if not re.fullmatch("[0-9a-f]{16}", checksum):
            raise ValueError(f"a checksum is {checksum!r}")
    if type(manifest.vocab_size) is not int or type(manifest.end_id) is not int or not isinstance(manifest.notes, dict):
        raise ValueError("vocab_size, end_id or notes is something else")
    if manifest.vocab_size < 1 or manifest.dtype != find_dtype(manifest.vocab_size):
        raise ValueError(f"dtype is {manifest.dtype}")


def row_of(shard: Shard, folder: Path) -> ShardRow:
    """Return the manifest row of a shard, for a manifest in `folder`."""
    info = shard.info
    return shard.path.relative_to(folder).as_posix(), info.num_tokens, info.num_documents, info.num_bytes


def rows_of(shards: Sequence[Shard], folder: Path) -> list[ShardRow]:
    """Return the manifest rows of shards, for a manifest in `folder`."""
    return [row_of(shard, folder) for shard in shards]
