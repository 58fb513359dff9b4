"""Resolves a value of `data.path` to token shards, tokenizing text if necessary, and opens a source over them.

`open_path` handles every kind of path: token shards, a manifest, text, JSONL, parquet, folders and globs of them, and
URLs.  Text is tokenized on first use into `data.cache_dir`, where later processes and runs find the shards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.data.cache import storage_error
from trainer.data.catalogue import open_shard_files
from trainer.data.documents import open_shards
from trainer.data.ingest.inputs import (
    SUPPORTED_SUFFIXES,
    DocumentCounts,
    InputFile,
    describe,
    find_inputs,
    is_foreign_token_file,
)
from trainer.data.json_files import json_advice
from trainer.data.manifest import MANIFEST, Manifest
from trainer.data.shards import Shard, ShardError, verify_at_start
from trainer.data.source import Source, SourceSubset, TokenSource
from trainer.data.stdlib import Split
from trainer.data.tokenizer import tokenizer_of
from trainer.errors import UserError, setting_error
from trainer.files import find_folder

if TYPE_CHECKING:
    from trainer.config import DataSection


@dataclass(frozen=True)
class ShardSet:
    """The shards that a path resolves to: those to train on and those held out; and the files that the path names.

    The contents are digests from `sample_content`, or "" if unknown.
    """

    files: list[str]
    train: list[Shard]
    train_content: str = ""
    held_out: list[Shard] = field(default_factory=list)
    held_out_content: str = ""


def open_path(
    setting: str, data: DataSection, vocab_size: int | None, split: Split, key: str = "data.path"
) -> Source | None:
    """Return the source over the data at a path, or None if `split` is `eval` and nothing is held out.

    For text, `data.holdout` is the share of documents to hold out, chosen by a hash of their text.  For shards, and for
    text if that would leave either split empty, it is the share of samples to hold out, taken from the end.

    key: the setting that contains the path, `data.path` or `data.eval_path`; the latter is not divided.
    vocab_size: that of the model, or None to skip the comparison.

    Raises UserError if the data cannot be read, are too small for one sample, or have ids beyond the model's
    vocabulary.
    """
    holdout = _holdout_share(data, key)
    found = find_shards(setting, data, key)
    is_divided = bool(holdout and found.train and found.held_out)
    shards, content = found.train, found.train_content
    if (is_divided and split == "eval") or not shards:
        shards, content = found.held_out, found.held_out_content
    try:
        check_same_tokenizer(shards)
        verify_at_start(shards)
        source = open_shards(shards, data, content)
    except ShardError as error:
        raise unusable_shards_error(key, setting, error) from error
    source.left_out = _left_out_summary(shards)
    _check_bos(source, data, setting)
    check_source(source, data, vocab_size, split, key, setting)
    return source if is_divided or key == "data.eval_path" else _split_samples(source, holdout, split)


def _left_out_summary(shards: Sequence[Shard]) -> str:
    """Return warnings about documents that were left out when text was tokenized, or "".

    A few empty documents are normal and give no warning.
    """
    folders = {Path(shard.path).parent for shard in shards if not shard.is_remote}
    counts = DocumentCounts()
    for folder in folders:
        with contextlib.suppress(ShardError, OSError):
            counts.add(DocumentCounts.of(Manifest.read(folder / MANIFEST)))
    total = counts.documents + counts.bad
    lines = [f"warning: {describe(counts)}"] if counts.bad else []
    if counts.empty > _USUAL_EMPTY_SHARE * total:
        lines.append(f"warning: {counts.empty:,} of {total:,} documents are empty, and left out")
    return "\n".join(lines)


_USUAL_EMPTY_SHARE = 0.01
"""Share of empty documents above which there is a warning."""


def _check_bos(source: TokenSource, data: DataSection, setting: str) -> None:
    """Raise UserError if data.bos is set but the shards were made with a different setting."""
    if data.bos is not None and source.tokenizer != tokenizer_of(data).name:
        rule = f"{setting} is already tokenized, with a different setting, by data.tokenizer={data.tokenizer}"
        raise setting_error("data.bos", data.bos, rule, fix="prepare the text again, or leave data.bos out")


def check_source(
    source: TokenSource, data: DataSection, vocab_size: int | None, split: Split, key: str, setting: str
) -> None:
    """Raise UserError if a source is too small for one sample, or has ids beyond the model's vocabulary."""
    if source.num_targets < 1:
        raise setting_error(key, setting, "has no targets: a sample needs two tokens of one document")
    if split == "train" and data.fills_rows and source.num_targets < data.seq_len:
        rule = f"one sample needs {data.seq_len + 1} tokens, {key}={setting} holds {source.num_targets + 1}"
        raise setting_error("data.seq_len", data.seq_len, rule, source.num_targets)
    if vocab_size is not None and source.vocab_size > vocab_size:
        rule = f"the ids of {key}={setting} (tokenizer {source.tokenizer}) need at least {source.vocab_size}"
        raise setting_error("model.vocab_size", vocab_size, rule, source.vocab_size)


def _split_samples(source: TokenSource, holdout: float, split: Split) -> Source | None:
    """Return the training part or the held-out part of a source.

    The last windows are held out: at least one, if there are two or more.
    """
    num_held_out = min(len(source) - 1, math.ceil(holdout * len(source)))
    if not num_held_out:
        return source if split == "train" else None
    first = len(source) - num_held_out
    return SourceSubset(source, 0, first) if split == "train" else SourceSubset(source, first, len(source))


def check_same_tokenizer(shards: Sequence[Shard]) -> None:
    """Raise ShardError unless all shards were made by the same tokenizer."""
    for other in shards:
        if other.info.kind != shards[0].info.kind:
            raise ShardError(
                f"shards used together must be made in the same way: {shards[0].name} by tokenizer "
                f"{shards[0].info.tokenizer} ({shards[0].info.vocab_size} ids, {shards[0].info.dtype}), "
                f"{other.name} by {other.info.tokenizer} ({other.info.vocab_size} ids, {other.info.dtype})"
            )


def unusable_shards_error(key: str, setting: str, error: ShardError) -> UserError:
    """Return the error for shards that cannot be used."""
    if find_folder(setting) is None:
        from trainer.data.remote.transport import unusable_url

        return unusable_url(key, setting, error)
    return setting_error(key, setting, str(error), fix="prepare shards from text with python -m trainer.prepare")


# ---------------------------------------------------------------------------------------------------------------
# Resolving paths


def find_shards(setting: str | None, data: DataSection, key: str) -> ShardSet:
    """Return the shards that a path resolves to; text is tokenized first, unless the cache has its shards.

    Raises UserError.
    """
    if not setting:
        raise setting_error(
            key, setting or None, f"data.source=tokens needs a path: token shards, or {SUPPORTED_SUFFIXES}"
        )
    if find_folder(setting) is None:
        return _open_remote(setting, data, key)
    manifest, paths = _find_shard_files(setting, key)
    try:
        if manifest is not None:
            return _manifest_shards(manifest)
        if paths:
            _check_complete(setting)
            return ShardSet(paths, *open_shard_files(paths, data.cache_dir))
    except ShardError as error:
        raise unusable_shards_error(key, setting, error) from error
    return _tokenize_text(_find_inputs(setting, key), data, key)


def named_files(setting: str, key: str) -> list[str]:
    """Return the files that a path names, without opening them: shards, also those in a manifest, or text files.

    A URL is returned unchanged.  Raises UserError if there are no files.
    """
    if find_folder(setting) is None:
        return [setting]
    manifest, files = _find_shard_files(setting, key)
    if manifest is not None:
        try:
            files = [str(manifest.parent / row[0]) for row in Manifest.read(manifest).train]
        except ShardError as error:
            raise unusable_shards_error(key, setting, error) from error
    return [os.path.realpath(file) for file in files or (each.path for each in _find_inputs(setting, key))]


def needs_tokenizing(setting: str, data: DataSection, key: str) -> bool:
    """Return whether a path names text that has not been tokenized.  Raises UserError if it does not exist."""
    if find_folder(setting) is None:
        from trainer.data.remote.text import find_text, is_text

        if not is_text(setting):
            return False
        try:
            inputs = find_text(setting, data.cache_dir).inputs(key)
        except ShardError as error:
            raise unusable_shards_error(key, setting, error) from error
    elif any(_find_shard_files(setting, key)):
        return False
    else:
        inputs = _find_inputs(setting, key)
    from trainer.data.tokenized_cache import is_cached

    return not is_cached(inputs, data, _holdout_share(data, key), key)


def _find_shard_files(setting: str, key: str) -> tuple[Path | None, list[str]]:
    """Return the manifest that a path names, or the shards, or neither.

    Raises UserError for near misses, such as the metadata of a shard.
    """
    pattern = os.path.expanduser(setting.removeprefix("file://"))
    is_folder = os.path.isdir(pattern)
    manifest = os.path.join(pattern, MANIFEST) if is_folder else pattern
    shard = f"{pattern.removesuffix('.json')}.bin"
    if not is_folder and pattern.endswith(".json") and os.path.isfile(shard):
        raise setting_error(key, setting, "belongs to a token shard, whose name ends in .bin", meant=shard)
    if not is_folder and (advice := json_advice(pattern)) is not None:
        raise setting_error(key, setting, advice[0], fix=advice[1])
    if manifest.endswith(".json") and os.path.isfile(manifest):
        return Path(manifest), []
    found = _find_bins(pattern)
    return None, [] if _are_foreign(found) else found


def _find_bins(pattern: str) -> list[str]:
    """Return the .bin files that a path, glob or folder matches."""
    names = [pattern] if os.path.isfile(pattern) else glob.glob(os.path.expanduser(pattern), recursive=True)
    if os.path.isdir(os.path.expanduser(pattern)):
        names = glob.glob(os.path.join(glob.escape(os.path.expanduser(pattern)), "*.bin"))
    return sorted(name for name in names if name.endswith(".bin"))


def _check_complete(setting: str) -> None:
    """Raise ShardError if a glob or folder has the index and metadata of a shard, but not its tokens."""
    pattern = os.path.expanduser(setting.removeprefix("file://"))
    stem = os.path.join(glob.escape(pattern), "*") if os.path.isdir(pattern) else pattern.removesuffix(".bin")
    for index in sorted(glob.glob(f"{stem}.idx", recursive=True)) if "*" in stem or "?" in stem or "[" in stem else ():
        name = index.removesuffix(".idx")
        if os.path.exists(f"{name}.json") and not os.path.exists(f"{name}.bin"):
            raise ShardError(f"{name}.bin is missing, but the shard's {name}.idx and {name}.json are there")


def _foreign_bins(pattern: str) -> list[str]:
    """Return the matching .bin files if all of them are token files in another tool's format, otherwise none."""
    found = _find_bins(pattern)
    return found if _are_foreign(found) else []


def _are_foreign(paths: Sequence[str]) -> bool:
    return bool(paths) and all(map(is_foreign_token_file, paths))


def _open_remote(setting: str, data: DataSection, key: str) -> ShardSet:
    """Return the shards at a URL, or those made from the text at a URL."""
    from trainer.data.remote.shards import NoShards, open_remote
    from trainer.data.remote.text import find_text, is_text
    from trainer.data.remote.transport import Unreachable

    try:
        if not is_text(setting):
            try:
                with contextlib.suppress(NoShards):
                    found = open_remote(setting, key, data.cache_dir, data.cache_gib)
                    names = [shard.name for shard in found.train]
                    return ShardSet(names, found.train, found.train_content, found.held_out, found.held_out_content)
            except Unreachable as error:
                if not error.is_unavailable:
                    raise
        text = find_text(setting, data.cache_dir)
        if not text.items:
            rule = "contains neither token shards (.bin files or a manifest.json) nor text"
            raise setting_error(key, setting, rule, fix=f"give files that end in {SUPPORTED_SUFFIXES}")
        try:
            with text.kept_until_built():
                built = _tokenize_text(text.inputs(key), data, key, text.fetch)
        except OSError as error:
            raise storage_error(data.cache_dir, "text", text.folder, error) from error
        return dataclasses.replace(built, files=[item.url for item in text.items])
    except ShardError as error:
        raise unusable_shards_error(key, setting, error) from error


def _manifest_shards(path: Path) -> ShardSet:
    """Return the shards that a manifest lists.  Raises ShardError."""
    manifest = Manifest.read(path)
    train, held_out = (manifest.shards(path.parent, is_held_out) for is_held_out in (False, True))
    files = [shard.name for shard in train]
    return ShardSet(files, train, manifest.train_content, held_out, manifest.held_out_content)


def _tokenize_text(
    inputs: Sequence[InputFile], data: DataSection, key: str, fetch: Callable[[], None] = lambda: None
) -> ShardSet:
    from trainer.data.tokenized_cache import get_or_build_shards  # imports the text readers, so only when needed

    return ShardSet(
        [each.path for each in inputs], *get_or_build_shards(inputs, data, _holdout_share(data, key), key, fetch)
    )


def _find_inputs(setting: str, key: str) -> list[InputFile]:
    """Return the input files that a path names.  Raises UserError if there are none."""
    path = setting.removeprefix("file://")
    return find_inputs(_foreign_bins(path) or [path], key)


def _holdout_share(data: DataSection, key: str) -> float:
    """Return the share of the data to hold out: 0 for data.eval_path, and for data.path if data.eval_path is set."""
    return (data.holdout or 0.0) if key == "data.path" and data.eval_path is None else 0.0
