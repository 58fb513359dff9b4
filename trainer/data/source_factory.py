"""Opens the source that the data settings name: token shards, chats, standard library text, or synthetic patterns.

Does not import torch: the data settings are checked by opening the source before any process is spawned.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, overload

from trainer.data.documents import open_shards
from trainer.data.ingest.inputs import parse_limit
from trainer.data.mixed_source import MixedSource
from trainer.data.paths import (
    check_same_tokenizer,
    check_source,
    find_shards,
    named_files,
    needs_tokenizing,
    open_path,
    unusable_shards_error,
)
from trainer.data.shards import ShardError
from trainer.data.source import Source, SyntheticSource
from trainer.data.stdlib import Split, StdlibCorpus
from trainer.data.tokenizer import tokenizer_of
from trainer.errors import UserError, setting_error

if TYPE_CHECKING:
    from trainer.config import DataSection


@overload
def open_source(data: DataSection, vocab_size: int | None, split: Literal["train"]) -> Source: ...


@overload
def open_source(data: DataSection, vocab_size: int | None, split: Split) -> Source | None: ...


def open_source(data: DataSection, vocab_size: int | None, split: Split) -> Source | None:
    """Return the source that the settings name, or None if `split` is `eval` and nothing is held out.

    Token shards without `data.eval_path` hold out their last windows, a share of `data.holdout`.

    vocab_size: that of the model, or None to skip the comparison.

    Raises UserError if the data cannot be read, are too small for one sample, or have ids beyond the model's
    vocabulary.
    """
    parse_limit(data.bad, "data.bad")
    if isinstance(data.path, Mapping):
        return _open_mixture(data, data.path, vocab_size, split)
    if data.source == "chat":
        if data.bad != "error":
            rule = "only applies to text; correct an unreadable chat, or remove it from the file"
            raise setting_error("data.bad", data.bad, rule, "error")
        from trainer.data.chat.source import open_chats  # imports jinja2, so only when needed

        _check_chats_disjoint(data)
        return open_chats(data, vocab_size, split)
    if data.source == "synthetic":
        return SyntheticSource(data.seq_len, vocab_size or 256, data.seed, split)
    if data.source == "stdlib":
        shard = StdlibCorpus().shard(split, tokenizer_of(data), data.cache_dir)
        stdlib = open_shards([shard], data)
        check_source(stdlib, data, vocab_size, split, "data.source", "stdlib")
        return stdlib
    path, held_out = data.path or "", data.eval_path
    assert not isinstance(held_out, Mapping), "several sources must be opened one by one"
    if held_out is not None:
        _check_disjoint(path, held_out, data)
    if split == "eval" and held_out is not None:
        return open_path(held_out, data, vocab_size, split, "data.eval_path")
    return open_path(path, data, vocab_size, split)


def is_untokenized(data: DataSection) -> bool:
    """Return whether the settings name text whose tokens are not cached yet, so that opening it takes long.

    Raises UserError if the text does not exist.
    """
    if data.source != "tokens":
        return False
    settings = [*_paths_in("data.path", data.path), *_paths_in("data.eval_path", data.eval_path)]
    needed = [needs_tokenizing(setting, data, key) for key, setting in settings]  # checks that all of them exist
    return any(needed)


def _paths_in(key: str, setting: str | Mapping[str, str] | None) -> list[tuple[str, str]]:
    """Return the paths in a setting, each as (key of the setting, path)."""
    paths = setting.values() if isinstance(setting, Mapping) else [setting]
    return [(key, path) for path in paths if path]


def _open_mixture(
    data: DataSection, paths: Mapping[str, str], vocab_size: int | None, split: Split
) -> MixedSource | None:
    """Return the mixture of the sources in data.path; for `eval`, only those with held-out data, or None."""
    held_out = data.eval_path if isinstance(data.eval_path, Mapping) else {}
    if split == "train":
        _check_sources_disjoint(data, paths, held_out)
    found: dict[str, Source] = {}
    for name, path in paths.items():
        if split == "eval" and held_out and name not in held_out:
            continue
        alone = dataclasses.replace(data, path=path, eval_path=held_out.get(name), weights=None, phases=())
        with _prefix_errors(name):
            source = open_source(alone, vocab_size, split)
        if source is not None:
            found[name] = source
    if any(source.rows_per_sample > 1 for source in found.values()):
        raise setting_error("data.path", data.path, "preference pairs must be a single source")
    kinds = {name: (source.tokenizer, source.vocab_size) for name, source in found.items()}
    for name, kind in kinds.items():
        other = next(iter(kinds))
        if kind != kinds[other]:
            shown = ", ".join(f"{n} by {kinds[n][0]} ({kinds[n][1]} ids)" for n in (other, name))
            raise setting_error("data.path", data.path, f"sources must use the same tokenizer: {shown}")
    return MixedSource(found) if found else None


@contextmanager
def _prefix_errors(source: str) -> Iterator[None]:
    """Prefix the messages of UserErrors with the name of the source."""
    try:
        yield
    except UserError as error:
        raise UserError(f"source {source}: {error}") from error


def _check_sources_disjoint(data: DataSection, paths: Mapping[str, str], held_out: Mapping[str, str]) -> None:
    """Raise UserError if one source trains on a file that another source holds out."""
    holders: dict[str, set[str]] = {}
    for name, path in held_out.items():
        with _prefix_errors(name):
            for file in _files_of(data, path, "data.eval_path"):
                holders.setdefault(file, set()).add(name)
    stated = [data.weights, *(phase.get("weights") for phase in data.phases)]
    for name, path in paths.items() if holders else ():
        is_used = any(weights is None or weights.get(name) for weights in stated)
        with _prefix_errors(name):
            for file in _files_of(data, path, "data.path") if is_used else ():
                if others := sorted(holders.get(file, set()) - {name}):
                    rule = f"takes in {file}, which data.eval_path holds out for source {others[0]}"
                    raise setting_error("data.path", path, rule, fix="remove the file from one of the two")


def _files_of(data: DataSection, path: str, key: str) -> list[str]:
    if data.source != "chat":
        return named_files(path, key)
    from trainer.data.chat.formats import find_files

    return [os.path.realpath(file) for file in find_files(key, path)]


def _check_disjoint(path: str, held_out_path: str, data: DataSection) -> None:
    """Raise UserError if data.eval_path shares files with data.path or was made by a different tokenizer."""
    train, held_out = find_shards(path, data, "data.path"), find_shards(held_out_path, data, "data.eval_path")
    _check_files_disjoint(path, held_out_path, train.files, held_out.files)
    try:
        check_same_tokenizer([*held_out.train, *train.train[:1]])
    except ShardError as error:
        raise unusable_shards_error("data.eval_path", held_out_path, error) from error


def _check_chats_disjoint(data: DataSection) -> None:
    """Raise UserError if data.eval_path names a chat file that is also trained on."""
    if isinstance(data.path, str) and isinstance(data.eval_path, str):
        sides = ("data.path", data.path), ("data.eval_path", data.eval_path)
        _check_files_disjoint(data.path, data.eval_path, *(_files_of(data, path, key) for key, path in sides))


def _check_files_disjoint(path: str, held_out_path: str, train: Sequence[str], held_out: Sequence[str]) -> None:
    """Raise UserError if a file is both trained on and held out, even under different path names."""
    shared = sorted({*map(_canonical, train)} & {*map(_canonical, held_out)})
    if shared and path != held_out_path:  # an identical setting is intended; a glob that matches too much is not
        rest = [file for file in train if _canonical(file) not in shared]
        legal = re.sub(r"\d{5}\.bin$", "?????.bin", str(rest[0])) if rest else None
        raise setting_error("data.path", path, f"takes in {shared[0]}, which data.eval_path holds out", legal)


def _canonical(file: str) -> str:
    """Return the canonical path of a file; a URL is returned unchanged."""
    return file if "://" in file else os.path.realpath(file)


def refuse_pairs(source: Source) -> None:
    """Raise UserError for preference pairs: the ordinary loss would train on both answers."""
    if source.rows_per_sample > 1:
        rule = "rejected answers would be trained on like chosen ones"
        raise setting_error("data.format", "preference", rule, fix="use recipe=dpo, or set train.objective=dpo")
