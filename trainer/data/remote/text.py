"""Text that is elsewhere: fetched whole, and kept until shards have been made of it."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from trainer.data.ingest.builder import stop_if_asked
from trainer.data.ingest.inputs import NAMES, Input, find_inputs, kind_of
from trainer.data.remote.cache import Item, ShardCache, is_at
from trainer.data.remote.listing import find_folder_of
from trainer.data.remote.transport import Unreachable, find, look_up, unusable_url
from trainer.data.shards import ShardError
from trainer.errors import say, setting_error
from trainer.files import find_folder, replacing
from trainer.urls import has_pattern, split_query, with_credentials_of, without_credentials

_AT_ONCE = 16
"""Files that are looked up at a time."""


@dataclass(frozen=True)
class RemoteText:
    """Files of text at URLs, and the folder that they are fetched into: one for all processes of this machine."""

    items: Sequence[Item]
    folder: Path

    def inputs(self, key: str) -> list[Input]:
        """Return the files as they will be here.  Their names change with what lies at their URLs."""
        found = ((str(self.folder / item.name), kind_of(item.name), item.size) for item in self.items)
        return [Input(path, *kind, size, 0, key) for path, kind, size in found if kind is not None]

    def fetch(self) -> None:
        """Fetch what is not here.  Raises Unreachable, and OSError for the folder."""
        cache = ShardCache(self.folder, None)
        missing = [item for item in self.items if not cache.has(item.name)]
        if missing:
            size = sum(item.size for item in missing)
            what = "a file" if len(missing) == 1 else f"{len(missing)} files"
            say(f"fetching {what} of text, {size / 1e6:,.1f} MB, into {self.folder}")
        for item in missing:
            stop_if_asked()
            cache.fetch(item)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the files for the time of a block.  After that they are removed, unless another process needs them."""
        names = " ".join(item.name for item in self.items)
        lock = self.folder / f".{hashlib.blake2b(names.encode(), digest_size=12).hexdigest()}.lock"
        descriptor = _shared(lock)
        try:
            yield
            with suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for path in (*(self.folder / item.name for item in self.items), lock):
                    path.unlink(missing_ok=True)
        finally:
            os.close(descriptor)


def _shared(lock: Path) -> int:
    """Return the descriptor of a file that others may hold as well, but to remove it."""
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        if is_at(descriptor, lock):
            return descriptor
        os.close(descriptor)  # it was removed before it could be locked


def is_text(url: str) -> bool:
    """Return whether a URL, or a glob of some, names text by how it ends."""
    kind = kind_of(split_query(url)[0])
    return kind is not None and kind[0] != "tokens"


def find_text(setting: str, cache_dir: str | None) -> RemoteText:
    """Return the files of text that a URL, a glob of some, or a folder means: none, perhaps.

    While their server is away they are taken to be what they were when last looked up with the same cache, which is
    said: their tokens may be here.  Raises ShardError if they cannot be looked up and never were, UserError if there is
    no folder to fetch them into.
    """
    folder = find_folder_of(cache_dir, "text")
    named = hashlib.blake2b(without_credentials(setting).encode(), digest_size=12).hexdigest()
    known = folder.with_name(f"listed-{named}.json")
    try:
        facts = _look_up_all(setting)
    except Unreachable as error:
        facts = _recall(known, setting) if error.is_away else []
        if not facts:
            raise
        say(f"{error}; assuming that it has not changed since the last check")
    else:
        _remember(known, facts)
    return RemoteText([_item_of(*each) for each in facts], folder)


_Facts: TypeAlias = "list[tuple[str, int, str]]"
"""Of each file its URL, its size, and what changes with its content."""


def _look_up_all(setting: str) -> _Facts:
    is_one = is_text(setting) and not has_pattern(setting)
    urls = [setting] if is_one else [url for url in find(setting) if is_text(url)]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return [(url, *told) for url, told in zip(urls, pool.map(look_up, urls), strict=True)]


def _remember(known: Path, facts: _Facts) -> None:
    """Store what was looked up: URLs without their credentials."""
    stored = json.dumps([(without_credentials(url), size, version) for url, size, version in facts])
    if facts and not (known.is_file() and known.read_text(errors="replace") == stored):
        with suppress(OSError), replacing(known) as partial:
            partial.write_text(stored)


def _recall(known: Path, setting: str) -> _Facts:
    """Return what was stored, with the credentials of `setting`, by which the files are asked for now."""
    with suppress(OSError, ValueError, TypeError):
        stored = [(str(url), int(size), str(version)) for url, size, version in json.loads(known.read_text())]
        return [(with_credentials_of(url, setting), size, version) for url, size, version in stored]
    return []


@contextmanager
def text_files(settings: Sequence[str], key: str) -> Iterator[tuple[list[Input], Callable[[], None]]]:
    """Find the files of text that paths, folders, globs and URLs name, each once; beside them what fetches the latter.

    Fetched files are removed behind the block, unless another process needs them.  Raises UserError, with `key` for the
    setting, and so does what fetches.
    """
    with ExitStack() as stack:
        inputs: list[Input] = []
        elsewhere: dict[str, RemoteText] = {}
        for setting in settings:
            if find_folder(setting) is not None:
                inputs += find_inputs([setting.removeprefix("file://")], key)
                continue
            with _named(key, setting):
                text = elsewhere[setting] = find_text(setting, None)
            if not text.items:
                raise setting_error(key, setting, "there is no text", fix=f"give files that end in {NAMES}")
            inputs += text.inputs(key)
            stack.enter_context(text.kept())

        def fetch() -> None:
            for setting, text in elsewhere.items():
                with _named(key, setting):
                    text.fetch()

        yield list({each.path: each for each in inputs}.values()), fetch


@contextmanager
def _named(key: str, setting: str) -> Iterator[None]:
    """Say which setting it is that cannot be reached."""
    try:
        yield
    except ShardError as error:
        raise unusable_url(key, setting, error) from error


def _item_of(url: str, size: int, version: str) -> Item:
    name = hashlib.blake2b(f"{without_credentials(url)} {size} {version}".encode(), digest_size=12).hexdigest()
    return Item(f"{name}-{split_query(url)[0].rpartition('/')[2]}", url, size, lambda: None)
