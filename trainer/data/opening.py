"""Opens the source that the data settings describe, and computes the settings that depend on the data.

`open_source` handles each kind of data: chats, synthetic patterns, the source code of Python's standard library,
mixtures, and token shards or text at a path.  `find` says what a path or URL names: token shards, a manifest, files of
text or records, a folder or glob of any of these, or a dataset on the Hub.  Text is tokenized into the cache
(`data.cache_dir`) on first use; later processes and runs find the shards there.  `resolve_from_data` computes the row
length and the number of steps from the data.

This module does not import torch, since the source is opened to check the data settings before any process is spawned.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, overload

from trainer.config.rules import check_schedule
from trainer.config.weights import allows_other_tokenizer, find_weights_tokenizer, will_resume
from trainer.data.build import load_or_build
from trainer.data.mixture import MixedSource
from trainer.data.packing import MaskedSource, PackedSource
from trainer.data.records import SUPPORTED_SUFFIXES, InputFile, find_files, is_record_file
from trainer.data.shards import MANIFEST, Shard, ShardError, ShardManifest, ShardSet, verify_at_start
from trainer.data.source import Source, SourceSubset, Split, SyntheticSource, TokenSource, hold_out_last
from trainer.data.stdlib import StdlibBuild
from trainer.data.text import (
    DocumentCounts,
    SettingNames,
    TextBuild,
    check_token_files,
    describe_bad_documents,
    parse_limit,
)
from trainer.data.token_files import is_foreign_token_file
from trainer.data.tokenizer import find_tokenizer, tokenizer_of
from trainer.errors import UserError, importing, setting_error
from trainer.files import local_path
from trainer.hub import is_hub_data

if TYPE_CHECKING:
    from trainer.config.schema import DataSection, RunConfig


@overload
def open_source(data: DataSection, vocab_size: int | None, split: Literal["train"]) -> Source: ...


@overload
def open_source(data: DataSection, vocab_size: int | None, split: Split) -> Source | None: ...


def open_source(data: DataSection, vocab_size: int | None, split: Split) -> Source | None:
    """Return the source that the settings describe, or None if `split` is `eval` and nothing is held out.

    Without `data.eval_path`, the fraction `data.holdout` of chats, text and shards is held out; see `_open_found`.

    vocab_size: the model's vocabulary size, or None if the ids in the data need not fit it.

    Raises UserError if the data cannot be read or cached, do not match the data settings, are too small for one sample,
    or were tokenized with a larger vocabulary than the model's.
    """
    parse_limit(data.bad, "data.bad")
    if isinstance(data.path, Mapping):
        return _open_mixture(data, data.path, vocab_size, split)
    if data.source == "chat":
        if data.bad != "error":
            rule = "only applies to text; correct an unreadable chat, or remove it from the file"
            raise setting_error("data.bad", data.bad, rule, "error")
        with importing("data.source", "chat"):
            from trainer.data.chat.source import open_chats  # imports jinja2: only when needed

        if isinstance(data.path, str) and isinstance(data.eval_path, str):
            train, held_out = _files_of(data, data.path, "data.path"), _files_of(data, data.eval_path, "data.eval_path")
            _check_files_disjoint(data.path, data.eval_path, train, held_out)
        return open_chats(data, vocab_size, split)
    if data.source == "synthetic":
        return SyntheticSource(data.seq_len, vocab_size or 256, data.seed, split)
    if data.source == "stdlib":
        built = load_or_build(StdlibBuild(tokenizer_of(data)), data.cache_dir)
        stdlib = _open_shards(built.train if split == "train" else built.held_out, data)
        _check_size(stdlib, data, vocab_size, split, "data.source", "stdlib")
        return stdlib
    assert not isinstance(data.eval_path, Mapping), "several sources must be opened one by one"
    path = data.path or ""
    found = find(path, data, "data.path")
    if data.eval_path is None:
        return _open_found(found, path, data, vocab_size, split, "data.path")
    found_held_out = find(data.eval_path, data, "data.eval_path")
    _check_files_disjoint(path, data.eval_path, found.files, found_held_out.files)
    try:
        _check_same_tokenizer([*found_held_out.load().train, *found.load().train[:1]])
    except ShardError as error:
        raise _unusable_shards_error("data.eval_path", data.eval_path, error) from error
    if split == "train":
        return _open_found(found, path, data, vocab_size, split, "data.path")
    return _open_found(found_held_out, data.eval_path, data, vocab_size, split, "data.eval_path")


def _open_found(
    found: Found, location: str, data: DataSection, vocab_size: int | None, split: Split, key: str
) -> Source | None:
    """Return the source for the data at a path, or None if `split` is `eval` and nothing is held out.

    For text, `data.holdout` is a fraction of the documents, chosen by a hash of their text.  For shards, and for text
    if either split would otherwise be empty, it is a fraction of the samples, taken from the end.

    key: the setting that contains the location: `data.path`, or `data.eval_path`, all of which is held out (of a
        manifest, only what it lists as held out, if there is any).
    """
    holdout = _holdout_fraction(data, key)
    loaded = found.load()
    is_split = bool(holdout and loaded.train and loaded.held_out)
    shards, content = loaded.train, loaded.train_content
    if (is_split and split == "eval") or not shards or (key == "data.eval_path" and loaded.held_out):
        shards, content = loaded.held_out, loaded.held_out_content
    try:
        _check_same_tokenizer(shards)
        verify_at_start(shards)
        source = _open_shards(shards, data, content)
    except ShardError as error:
        raise _unusable_shards_error(key, location, error) from error
    source.warnings = _skipped_warnings(DocumentCounts.from_notes(loaded.notes))
    if data.bos is not None and source.tokenizer != tokenizer_of(data).name:
        rule = f"{location} is already tokenized, with a different data.bos, by data.tokenizer={data.tokenizer}"
        raise setting_error("data.bos", data.bos, rule, fix="prepare the text again, or leave data.bos out")
    _check_size(source, data, vocab_size, split, key, location)
    if is_split or key == "data.eval_path":
        return source
    return hold_out_last(source, holdout, split)


def _open_shards(shards: Sequence[Shard], data: DataSection, content: str = "") -> TokenSource:
    """Return the source for `shards`, of the type that `data.documents` and `data.fit` select.

    content: the shards' `sample_content`, or "" if it is not known yet.

    Raises ShardError if a shard cannot be read, and UserError if no cache folder is writable.
    """
    source: TokenSource
    if data.documents == "apart":
        source = PackedSource(shards, data.seq_len, content, data.cache_dir, packs=False)
    elif data.fit == "best":
        is_masked = data.documents == "masked"
        source = PackedSource(shards, data.seq_len, content, data.cache_dir, packs=True, is_masked=is_masked)
    elif data.documents == "masked":
        source = MaskedSource(shards, data.seq_len)
    else:
        source = TokenSource(shards, data.seq_len)
    source.known_content = content
    return source


_MAX_EMPTY_FRACTION = 0.01
"""Fraction of empty documents above which a warning is printed.  A few are normal."""


def _skipped_warnings(counts: DocumentCounts) -> str:
    """Return warnings about bad and empty documents that were skipped when text was tokenized, or ""."""
    total = counts.documents + counts.bad
    lines = [f"warning: {describe_bad_documents(counts)}"] if counts.bad else []
    if counts.empty > _MAX_EMPTY_FRACTION * total:
        lines.append(f"warning: {counts.empty:,} of {total:,} documents are empty and were skipped")
    return "\n".join(lines)


def _holdout_fraction(data: DataSection, key: str) -> float:
    """Return the fraction of a path's data to hold out: `data.holdout`, or 0 if `data.eval_path` is set."""
    return (data.holdout or 0.0) if key == "data.path" and data.eval_path is None else 0.0


# -- mixtures ---------------------------------------------------------------------------------------------------------


def _open_mixture(
    data: DataSection, paths: Mapping[str, str], vocab_size: int | None, split: Split
) -> MixedSource | None:
    """Return the mixture of the sources in `data.path`.

    For the split `eval`, it consists of the sources that have held-out data; returns None if no source has any.
    """
    held_out = data.eval_path if isinstance(data.eval_path, Mapping) else {}
    if split == "train":
        _check_sources_disjoint(data, paths, held_out)
    sources: dict[str, Source] = {}
    for name, path in paths.items():
        if split == "eval" and held_out and name not in held_out:
            continue
        single = dataclasses.replace(data, path=path, eval_path=held_out.get(name), weights=None, phases=())
        with _prefix_errors(name):
            source = open_source(single, vocab_size, split)
        if source is not None:
            sources[name] = source
    if any(source.rows_per_sample > 1 or source.num_labels for source in sources.values()):
        rule = "preference pairs and labeled records must be a single source"
        raise setting_error("data.path", data.path, rule, fix="put the files into one folder, and name that")
    tokenizers = {name: (source.tokenizer, source.vocab_size) for name, source in sources.items()}
    first = next(iter(tokenizers), "")
    for name, tokenizer in tokenizers.items():
        if tokenizer != tokenizers[first]:
            differing = ", ".join(f"{n} by {tokenizers[n][0]} ({tokenizers[n][1]} ids)" for n in (first, name))
            raise setting_error("data.path", data.path, f"sources must use the same tokenizer: {differing}")
    return MixedSource(sources) if sources else None


@contextmanager
def _prefix_errors(source: str) -> Iterator[None]:
    """Context manager that prefixes the messages of UserErrors with the name of a source."""
    try:
        yield
    except UserError as error:
        raise UserError(f"source {source}: {error}") from error


# -- from a path to shards --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """What a path or URL names.

    files: the files, shards or text; if they are downloaded, their names where they come from.
    load: returns the shards.  Text is tokenized first, unless its shards are in the cache.  Raises UserError.
    build: how the shards are built from text; None if they exist.
    """

    files: list[str]
    load: Callable[[], ShardSet]
    build: TextBuild | None = None


def find(location: str | None, data: DataSection, key: str) -> Found:
    """Return what a location names, without reading more than names, sizes and the first bytes of some files.

    location: a path, a folder, a glob, a URL, or the name of a dataset on the Hub.
    key: the setting that contains the location, for messages.

    Raises UserError if there are neither shards nor text, or if the settings do not match the text.
    """
    if not location:
        raise setting_error(
            key, location or None, f"data.source=tokens needs a path: token shards, or {SUPPORTED_SUFFIXES}"
        )
    if is_hub_data(location):
        from trainer.data.hub_data import find_data

        hub_data = find_data(location, key)

        @contextmanager
        def fetched() -> Iterator[None]:
            hub_data.fetch()
            yield

        names = [str(name) for name in hub_data.names()]
        return _to_tokenize(hub_data.inputs(key), names, hub_data.settings(data), key, fetched)
    if local_path(location) is None:
        return _find_remote(location, data, key)
    path = os.path.expanduser(location.removeprefix("file://"))
    manifest_path = _find_manifest(path, location, key)
    if manifest_path is not None:
        return _in_manifest(manifest_path, location, key)
    bin_files = _find_bin_files(path)
    if bin_files and not all(map(is_foreign_token_file, bin_files)):
        return Found(bin_files, lambda: _load_shards(bin_files, location, key))
    inputs = find_files(bin_files or [path], key)
    return _to_tokenize(inputs, [file.path for file in inputs], data, key)


def _find_remote(url: str, data: DataSection, key: str) -> Found:
    """Return the shards or the text at a URL."""
    from trainer.data.remote import RemoteShards, find_remote

    remote = find_remote(url, key, data.cache_dir)
    if isinstance(remote, RemoteShards):
        return Found(remote.files, remote.load)
    found = _to_tokenize(remote.inputs, list(remote.urls), data, key, remote.downloaded)

    def load() -> ShardSet:
        shards = found.load()
        remote.discard()
        return shards

    return dataclasses.replace(found, load=load)


def _find_manifest(path: str, location: str, key: str) -> Path | None:
    """Return the path of the manifest that a local path names, if any.

    Raises UserError for the path of a shard's metadata, a likely mistake, and for a .json file that cannot be read.
    """
    if os.path.isdir(path):
        manifest = Path(path, MANIFEST)
        return manifest if manifest.is_file() else None
    if not path.endswith(".json") or not os.path.isfile(path):
        return None
    shard = f"{path.removesuffix('.json')}.bin"
    if os.path.isfile(shard):
        raise setting_error(key, location, "is the metadata of a token shard; give its .bin file", proposal=shard)
    try:
        return None if is_record_file(path) else Path(path)
    except OSError as error:
        raise setting_error(key, location, f"cannot be read ({error.strerror})") from error


def _in_manifest(path: Path, location: str, key: str) -> Found:
    try:
        manifest = ShardManifest.read(path)
    except ShardError as error:
        raise _unusable_shards_error(key, location, error) from error

    def load() -> ShardSet:
        try:
            train, held_out = (manifest.shards(path.parent, is_held_out) for is_held_out in (False, True))
        except ShardError as error:
            raise _unusable_shards_error(key, location, error) from error
        contents = manifest.train_content, manifest.held_out_content
        return ShardSet(files, train, contents[0], held_out, contents[1], manifest.notes)

    rows = manifest.held_out if key == "data.eval_path" and manifest.held_out else manifest.train
    files = [str(path.parent / row[0]) for row in rows]
    return Found(files, load)


def _find_bin_files(path: str) -> list[str]:
    """Return the .bin files that a path, glob or folder matches."""
    names = [path] if os.path.isfile(path) else glob.glob(path, recursive=True)
    if os.path.isdir(path):
        names = glob.glob(os.path.join(glob.escape(path), "*.bin"))
    return sorted(name for name in names if name.endswith(".bin"))


def _load_shards(paths: Sequence[str], location: str, key: str) -> ShardSet:
    try:
        _check_complete(location)
        return ShardSet(list(paths), [Shard(path) for path in paths])
    except ShardError as error:
        raise _unusable_shards_error(key, location, error) from error


def _check_complete(location: str) -> None:
    """Raise ShardError if a glob or folder has the index and metadata of a shard, but not its tokens."""
    pattern = os.path.expanduser(location.removeprefix("file://"))
    stem = os.path.join(glob.escape(pattern), "*") if os.path.isdir(pattern) else pattern.removesuffix(".bin")
    for index in sorted(glob.glob(f"{stem}.idx", recursive=True)) if "*" in stem or "?" in stem or "[" in stem else ():
        name = index.removesuffix(".idx")
        if os.path.exists(f"{name}.json") and not os.path.exists(f"{name}.bin"):
            raise ShardError(f"{name}.bin is missing, but the shard's {name}.idx and {name}.json exist")


def _unusable_shards_error(key: str, location: str, error: ShardError) -> UserError:
    """Return the UserError for shards that cannot be used."""
    if local_path(location) is None:
        fix = "start again to download it again, or check the URL"
        return setting_error(key, location, str(error), fix=fix)
    return setting_error(key, location, str(error), fix="prepare shards from text with python -m trainer.prepare")


def _to_tokenize(
    inputs: Sequence[InputFile],
    names: list[str],
    data: DataSection,
    key: str,
    input_on_disk: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Found:
    """Return text files that are tokenized when they are loaded.

    names: the files' names for the user.
    input_on_disk: a context manager inside which the files are on the disk.

    Raises UserError if the settings do not match the files.
    """
    tokenizer, keys = tokenizer_of(data), SettingNames(inputs=key)
    check_token_files(inputs, tokenizer, data.bos, keys)
    holdout = 0.0 if all(file.kind == "tokens" for file in inputs) else _holdout_fraction(data, key)
    build = TextBuild(tuple(inputs), tokenizer, data.text_key, data.bad, holdout, data.engine, keys)
    return Found(names, lambda: load_or_build(build, data.cache_dir, input_on_disk), build)


def is_untokenized(data: DataSection) -> bool:
    """Return whether the settings name text that is not tokenized yet, which makes opening it slow.

    Raises UserError if the text does not exist.
    """
    if data.source != "tokens":
        return False
    builds = [  # a list, since each call also checks that its path exists
        find(path, data, key).build
        for key, value in (("data.path", data.path), ("data.eval_path", data.eval_path))
        for path in (value.values() if isinstance(value, Mapping) else [value])
        if path
    ]
    return any(build is not None and not build.is_complete(data.cache_dir) for build in builds)


# -- checks -----------------------------------------------------------------------------------------------------------


def _check_size(
    source: TokenSource, data: DataSection, vocab_size: int | None, split: Split, key: str, location: str
) -> None:
    """Raise UserError if a source is too small for one sample, or has ids outside the model's vocabulary.

    key, location: the setting to name in messages, and its value.
    """
    if source.num_targets < 1:
        raise setting_error(key, location, "has no targets: a sample needs two tokens of one document")
    if split == "train" and data.fills_rows and source.num_targets < data.seq_len:
        rule = f"one sample needs {data.seq_len + 1} tokens, but {key}={location} holds {source.num_targets + 1}"
        raise setting_error("data.seq_len", data.seq_len, rule, source.num_targets)
    if vocab_size is not None and source.vocab_size > vocab_size:
        rule = f"must be at least {source.vocab_size} for the ids of {key}={location} (tokenizer {source.tokenizer})"
        raise setting_error("model.vocab_size", vocab_size, rule, source.vocab_size)


def _check_same_tokenizer(shards: Sequence[Shard]) -> None:
    """Raise ShardError unless all shards were tokenized with the same tokenizer."""
    for shard in shards:
        if shard.info.shared_properties != shards[0].info.shared_properties:
            raise ShardError(
                f"shards used together must be made in the same way: {shards[0].name} by tokenizer "
                f"{shards[0].info.tokenizer} ({shards[0].info.vocab_size} ids, {shards[0].info.dtype}), "
                f"{shard.name} by {shard.info.tokenizer} ({shard.info.vocab_size} ids, {shard.info.dtype})"
            )


def _check_files_disjoint(path: str, eval_path: str, train: Sequence[str], held_out: Sequence[str]) -> None:
    """Raise UserError if a file is both trained on and held out, even if the paths to it differ."""
    shared = sorted({*map(_canonical, train)} & {*map(_canonical, held_out)})
    if shared and path != eval_path:  # two equal settings are deliberate; a glob that matches too much is not
        unshared = [file for file in train if _canonical(file) not in shared]
        legal = re.sub(r"\d{5}\.bin$", "?????.bin", str(unshared[0])) if unshared else None
        raise setting_error("data.path", path, f"includes {shared[0]}, which data.eval_path holds out", legal)


def _check_sources_disjoint(data: DataSection, paths: Mapping[str, str], held_out: Mapping[str, str]) -> None:
    """Raise UserError if one source of a mixture trains on a file that another source holds out."""
    holders: dict[str, set[str]] = {}
    for name, path in held_out.items():
        with _prefix_errors(name):
            for file in _files_of(data, path, "data.eval_path"):
                holders.setdefault(file, set()).add(name)
    all_weights = [data.weights, *(phase.get("weights") for phase in data.phases)]
    for name, path in paths.items() if holders else ():
        is_used = any(weights is None or weights.get(name) for weights in all_weights)
        with _prefix_errors(name):
            for file in _files_of(data, path, "data.path") if is_used else ():
                if other_holders := sorted(holders.get(file, set()) - {name}):
                    rule = f"includes {file}, which data.eval_path holds out for source {other_holders[0]}"
                    raise setting_error("data.path", path, rule, fix="remove the file from one of the two")


def _files_of(data: DataSection, location: str, key: str) -> list[str]:
    """Return the files that a path names, chats, text, or shards.  Raises UserError if there are none."""
    if data.source == "chat":
        from trainer.data.chat.formats import find_chat_files

        return [os.path.realpath(file.path) for file in find_chat_files(location, key)]
    return list(map(_canonical, find(location, data, key).files))


def _canonical(file: str) -> str:
    """Return the canonical path of a file; a URL is returned unchanged."""
    return file if "://" in file else os.path.realpath(file)


def check_tokenizer(source: Source, config: RunConfig) -> None:
    """Raise UserError if the token shards were produced with a tokenizer other than that of the initial weights.

    Text needs no check: `data.tokenizer`, which tokenizes it, was checked when the configuration was loaded.
    """
    if (
        config.data.source != "tokens"
        or source.tokenizer is None
        or allows_other_tokenizer(config)
        or will_resume(config)
    ):
        return
    weights_tokenizer = find_weights_tokenizer(config)
    if weights_tokenizer is None or source.tokenizer == find_tokenizer(config.data.tokenizer, bos=config.data.bos).name:
        return
    for bos in (None, True, False):
        with contextlib.suppress(UserError):  # raised if the tokenizer has no BOS token
            if source.tokenizer == find_tokenizer(weights_tokenizer, bos=bos).name:
                return
    rule = (
        f"the shards were made with tokenizer {source.tokenizer}, but the weights were trained with {weights_tokenizer}"
    )
    fix = "prepare the text again, with --tokenizer and that file; to use these shards anyway: "
    raise setting_error("data.path", config.data.path, rule, fix=f"{fix}checkpoint.allow_changes=[data.tokenizer]")


# -- settings that depend on the data ---------------------------------------------------------------------------------

_ROW_MULTIPLE = 64
"""The length of trimmed rows is rounded up to a multiple of this, which kernels handle efficiently."""


def resolve_from_data(config: RunConfig) -> RunConfig:
    """Return the configuration with `data.trim_rows` applied to `data.seq_len` and `train.epochs` turned into steps.

    Opens the data only if one of these settings needs it.  Raises UserError as `open_source` does.
    """
    return epochs_to_steps(trim_rows(config))


def trim_rows(config: RunConfig) -> RunConfig:
    """Shrink `data.seq_len` to fit the longest conversation, rounded up to a multiple of _ROW_MULTIPLE.

    Held-out conversations count only if the run evaluates.  Runs before `epochs_to_steps`, which counts the rows.
    """
    data = config.data
    if not data.trim_rows:
        return config
    with importing("data.source", "chat"):
        from trainer.data.chat.source import ChatSource, LabeledSource, PairSource  # imports jinja2: only when needed

    splits: tuple[Split, ...] = ("train", "eval") if config.eval.every else ("train",)
    opened = [open_source(data, config.vocab_size, split) for split in splits]
    singles = [each for source in opened for each in getattr(source, "sources", {"": source}).values()]
    sources = [source.base if isinstance(source, SourceSubset) else source for source in singles]
    kinds = (ChatSource, LabeledSource, PairSource)
    longest = max(source.longest for source in sources if isinstance(source, kinds))
    seq_len = min(data.seq_len, math.ceil(longest / _ROW_MULTIPLE) * _ROW_MULTIPLE)
    return dataclasses.replace(config, data=dataclasses.replace(data, seq_len=seq_len))


def epochs_to_steps(config: RunConfig) -> RunConfig:
    """Replace `train.epochs` with the equivalent `train.steps`.

    Raises UserError if the schedule does not fit that number of steps.
    """
    train = config.train
    if train.epochs is None:
        return config
    samples = train.epochs * len(open_source(config.data, config.vocab_size, "train"))
    steps = max(1, math.ceil(samples / train.global_batch_size))
    config = dataclasses.replace(config, train=dataclasses.replace(train, epochs=None, steps=steps))
    check_schedule(config)
    return config
