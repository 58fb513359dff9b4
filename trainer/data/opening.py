"""Opens the source that the settings name: token shards, chats, the standard library's text, generated patterns.

No torch here: opening a source is how the data settings are checked, before anything is spawned.
"""

from __future__ import annotations

import dataclasses
import glob
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, overload

from trainer.data.chat.source import PairSource, open_chats
from trainer.data.documents import open_shards
from trainer.data.mixed import MixedSource
from trainer.data.shards import Shard, ShardError
from trainer.data.source import Part, Source, SyntheticSource, TokenSource
from trainer.data.stdlib import Split, StdlibCorpus
from trainer.data.tokenizer import find_tokenizer
from trainer.errors import UserError, nearest, setting_error

if TYPE_CHECKING:
    from trainer.config import DataSection


@overload
def open_source(data: DataSection, vocab_size: int | None, split: Literal["train"]) -> Source: ...


@overload
def open_source(data: DataSection, vocab_size: int | None, split: Split) -> Source | None: ...


def open_source(data: DataSection, vocab_size: int | None, split: Split) -> Source | None:
    """Return the source that the settings name, or None if they hold nothing out and `split` is `eval`.

    Token shards without `data.eval_path` hold out their last windows, a share of `data.holdout`.

    `vocab_size` is the model's; None if the model has none to compare with.  Raises UserError if the data cannot be
    read, are too few for one sample, or have ids that the model has no room for.
    """
    if isinstance(data.path, Mapping):
        return _open_several(data, data.path, vocab_size, split)
    if data.source == "chat":
        return open_chats(data, vocab_size, split)
    if data.source == "synthetic":
        return SyntheticSource(data.seq_len, vocab_size or 256, data.seed, split)
    if data.source == "stdlib":
        shard = StdlibCorpus().shard(split, find_tokenizer(data.tokenizer), data.cache_dir)
        key, setting, source = "data.source", "stdlib", open_shards([shard], data)
    elif split == "eval" and data.eval_path is not None:
        key, setting, source = "data.eval_path", str(data.eval_path), _open_shards(data, split)
    else:
        key, setting, source = "data.path", str(data.path), _open_shards(data, "train")
    if source.num_targets < 1:
        raise setting_error(key, setting, "holds no target: a sample needs two tokens of one document")
    if split == "train" and data.fills_rows and source.num_targets < data.seq_len:
        rule = f"one sample needs {data.seq_len + 1} tokens, {key}={setting} holds {source.num_targets + 1}"
        raise setting_error("data.seq_len", data.seq_len, rule, source.num_targets)
    if vocab_size is not None and source.vocab_size > vocab_size:
        rule = f"the ids of {key}={setting} (tokenizer {source.tokenizer}) need at least {source.vocab_size}"
        raise setting_error("model.vocab_size", vocab_size, rule, source.vocab_size)
    if data.source == "tokens" and data.eval_path is None:
        return _part_of(source, data.holdout or 0.0, split)
    return source


def _open_several(
    data: DataSection, paths: Mapping[str, str], vocab_size: int | None, split: Split
) -> MixedSource | None:
    """Return the sources that data.path names as one, or those of them that hold out something; None if none does."""
    held_out = data.eval_path if isinstance(data.eval_path, Mapping) else {}
    found: dict[str, Source] = {}
    for name, path in paths.items():
        if split == "eval" and held_out and name not in held_out:
            continue
        alone = dataclasses.replace(data, path=path, eval_path=held_out.get(name), weights=None, phases=())
        try:
            source = open_source(alone, vocab_size, split)
        except UserError as error:
            raise UserError(f"source {name}: {error}") from error
        if source is not None:
            found[name] = source
    if any(isinstance(source, PairSource) for source in found.values()):
        raise setting_error("data.path", data.path, "pairs of answers are one source, not several")
    kinds = {name: (source.tokenizer, source.vocab_size) for name, source in found.items()}
    for name, kind in kinds.items():
        other = next(iter(kinds))
        if kind != kinds[other]:
            shown = ", ".join(f"{n} by {kinds[n][0]} ({kinds[n][1]} ids)" for n in (other, name))
            raise setting_error("data.path", data.path, f"sources must be made by one tokenizer: {shown}")
    return MixedSource(found) if found else None


def _part_of(source: TokenSource, holdout: float, split: Split) -> Source | None:
    """Return what is trained on, or what is held out: the last windows, at least one where there are two."""
    num_held_out = min(len(source) - 1, math.ceil(holdout * len(source)))
    if not num_held_out:
        return source if split == "train" else None
    first = len(source) - num_held_out
    return Part(source, 0, first) if split == "train" else Part(source, first, len(source))


def _open_shards(data: DataSection, split: Split) -> TokenSource:
    """Return the source over the shards that data.path or data.eval_path names.  Raises UserError."""
    train_paths = _find_paths("data.path", data.path)
    eval_paths = _find_paths("data.eval_path", data.eval_path) if data.eval_path else []
    shared = sorted({*train_paths} & {*eval_paths})
    if shared and data.path != data.eval_path:  # the same setting twice is meant, a glob that reaches too far is not
        rest = [path for path in train_paths if path not in shared]
        legal = re.sub(r"\d{5}\.bin$", "?????.bin", str(rest[0])) if rest else None
        raise setting_error("data.path", data.path, f"takes in {shared[0]}, which data.eval_path holds out", legal)
    key, setting, paths = ("data.path", data.path, train_paths)
    if split == "eval":
        key, setting, paths = ("data.eval_path", data.eval_path, eval_paths)
    try:
        shards = [Shard(path) for path in paths]
        for other in [*shards, *([Shard(train_paths[0])] if split == "eval" else [])]:
            if other.info.kind != shards[0].info.kind:
                raise ShardError(
                    f"shards that go together must be made alike: {shards[0].path} by tokenizer "
                    f"{shards[0].info.tokenizer} ({shards[0].info.vocab_size} ids, {shards[0].info.dtype}), "
                    f"{other.path} by {other.info.tokenizer} ({other.info.vocab_size} ids, {other.info.dtype})"
                )
        return open_shards(shards, data)
    except ShardError as error:
        fix = "make shards from text with python -m trainer.prepare"
        raise setting_error(key, setting, str(error), fix=fix) from error


def _find_paths(key: str, setting: str | Mapping[str, str] | None) -> list[Path]:
    """Return the .bin files that a path or glob names, sorted.  Raises UserError if there are none."""
    assert not isinstance(setting, Mapping), "several sources are opened one by one"
    if not setting:
        raise setting_error(key, setting, "data.source=tokens needs the path or glob of token shards")
    pattern = os.path.expanduser(setting)
    if os.path.isdir(pattern):
        rule = "is a folder; name the shards in it"
        raise setting_error(key, setting, rule, example=os.path.join(setting, "*.bin"))
    names = [pattern] if os.path.isfile(pattern) else glob.glob(pattern, recursive=True)
    paths = sorted(Path(name) for name in names if name.endswith(".bin"))
    if paths:
        return paths
    rule = "matches no token shard, whose name ends in .bin" if names else "no such file, and no glob that matches one"
    there = sorted(glob.glob(os.path.join(glob.escape(os.path.dirname(pattern)), "*.bin")))
    meant = nearest(pattern, there)
    raise setting_error(key, setting, rule, meant=meant, example=None if meant else next(iter(there), None))
