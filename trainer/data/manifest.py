"""Manifests: one file that lists the shards of a set, so that opening thousands of them reads no other metadata."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from trainer.data.shards import Shard, ShardError, ShardInfo
from trainer.files import replacing

Row: TypeAlias = "tuple[str, int, int, int]"
"""A shard: its path, absolute or from the manifest's folder, its tokens, documents, and bytes of raw text."""

FORMAT = 1


@dataclass(frozen=True)
class Manifest:
    """Lists shards that were made alike: those to train on, and those held out.

    train_content, held_out_content: the digests of `sample_content`; empty if there are no such shards.
    notes: what was found while they were built, for the messages of later runs.
    """

    dtype: str
    vocab_size: int
    tokenizer: str
    end_id: int
    train: list[Row]
    held_out: list[Row]
    train_content: str = ""
    held_out_content: str = ""
    notes: dict[str, Any] = dataclasses.field(default_factory=dict)
    format: int = FORMAT

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
        """Return the manifest that `content` holds; `path` is what messages call it.  Raises ShardError."""
        try:
            found = cls(**json.loads(content))
            if found.format != FORMAT:
                raise ShardError(f"{path} has format {found.format}, this version reads format {FORMAT}")
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
        """Write the manifest, flushed, in place of an earlier one."""
        with replacing(path) as partial:
            partial.write_text(json.dumps(vars(self), separators=(",", ":")))

    def shards(self, folder: Path, held_out: bool = False) -> list[Shard]:
        """Return the shards, whose files are looked at and not opened.  Raises ShardError."""
        alike = (self.dtype, self.vocab_size, self.tokenizer, self.end_id)
        inside = f"{folder}/"
        return [
            Shard.listed(
                name if name.startswith("/") else inside + name, ShardInfo(*alike, tokens, documents, num_bytes)
            )
            for name, tokens, documents, num_bytes in (self.held_out if held_out else self.train)
        ]


def row_of(shard: Shard, folder: Path) -> Row:
    """Return what a manifest in `folder` says of a shard."""
    info = shard.info
    return shard.path.relative_to(folder).as_posix(), info.num_tokens, info.num_documents, info.num_bytes


def rows_of(shards: Sequence[Shard], folder: Path) -> list[Row]:
    """Return what a manifest in `folder` says of shards."""
    return [row_of(shard, folder) for shard in shards]
