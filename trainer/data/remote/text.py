"""Finds and downloads remote text files and tables, and keeps them until shards have been built from them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from trainer.data.cache import read_value, write_value
from trainer.data.records import URL_SUFFIXES, InputFile, find_files, kind_of
from trainer.data.remote.cache import RemoteFile, RemoteFileCache, checksum_path
from trainer.data.remote.shards import make_cache_subfolder
from trainer.data.remote.transport import (
    RemoteReadError,
    find_urls,
    json_url_error,
    map_urls,
    missing_folder_error,
    size_and_version_of,
    unusable_url_error,
)
from trainer.data.shards import ShardError
from trainer.errors import UserError, masked, print_stderr, setting_error
from trainer.files import local_path
from trainer.locks import locked
from trainer.stopping import raise_if_stop_requested
from trainer.urls import has_pattern, split_query, with_credentials_of, without_credentials

_WEB_PAGE_SUFFIXES = (".html", ".htm", ".xml")
"""Suffixes of files that are expected to contain HTML or XML; a web page in any other file is an error."""


@dataclass(frozen=True)
class RemoteText:
    """Text files and tables at URLs.

    items: the remote files.
    folder: the folder to download them to, shared by all processes on this machine.
    """

    items: Sequence[RemoteFile]
    folder: Path

    def inputs(self, key: str) -> list[InputFile]:
        """Return the files at their local paths; some may not have been downloaded yet.

        A file has a new path whenever its size or version on the server changes.

        key: the setting that names the files, for messages.
        """
        inputs = []
        for item in self.items:
            if (kind_and_compression := kind_of(item.name)) is not None:
                kind, compression = kind_and_compression
                inputs.append(InputFile(str(self.folder / item.name), kind, compression, item.size, 0, key))
        return inputs

    def fetch(self) -> None:
        """Download the files that are missing or corrupt.

        Raises RemoteReadError if a file cannot be downloaded or is a web page, FileChanged if a file has changed since
        it was looked up, and OSError if the folder cannot be used.
        """
        cache = RemoteFileCache(self.folder, limit=None)
        missing = [item for item in self.items if not cache.has(item.name)]
        if missing:
            size = sum(item.size for item in missing)
            files = "a text file" if len(missing) == 1 else f"{len(missing)} text files"
            print_stderr(f"downloading {files}, {size / 1e6:,.1f} MB, to {self.folder}")
        for item in self.items:  # includes cached files, to verify them
            raise_if_stop_requested()
            cache.fetch(item)
            self._reject_web_page(item)

    def _reject_web_page(self, item: RemoteFile) -> None:
        """Remove a file and raise RemoteReadError if it is unexpectedly a web page, such as a login or error page."""
        path = self.folder / item.name
        with open(path, "rb") as file:
            start = file.read(1024).lstrip(b"\xef\xbb\xbf \t\r\n").lower()
        if start.startswith((b"<!doctype html", b"<html")) and not split_query(item.url)[0].lower().endswith(
            _WEB_PAGE_SUFFIXES
        ):
            path.unlink(missing_ok=True)
            checksum_path(path).unlink(missing_ok=True)
            rule = "is a web page (HTML), despite its name; does the server require a login?"
            raise RemoteReadError(f"{masked(item.url)} {rule}")

    @contextmanager
    def kept_until_built(self) -> Iterator[None]:
        """Keep the files during a block, and remove them afterwards, unless another process needs them.

        In the message of a UserError, the local paths of files are replaced by their URLs.  After any other error, the
        files stay for the next start.
        """
        names = " ".join(item.name for item in self.items)
        lock = self.folder / f".{hashlib.blake2b(names.encode(), digest_size=12).hexdigest()}.lock"
        local_paths = [self.folder / item.name for item in self.items]
        files: list[Path] = []
        with locked(lock, is_shared=True, is_required=True) as file_lock:
            try:
                yield
                files = local_paths
            except UserError as error:
                files = local_paths  # with these files, the error would occur again
                text = str(error)
                for item, path in zip(self.items, local_paths, strict=True):
                    text = text.replace(str(path), masked(item.url))
                raise UserError(text) from error
            finally:
                if file_lock.make_exclusive():
                    for path in (*files, *map(checksum_path, files)):
                        path.unlink(missing_ok=True)


def is_text(url: str) -> bool:
    """Return whether a URL, which may be a glob, names text files, judging by its suffix.

    An uncompressed .json file does not count, since it may be a manifest.
    """
    kind = kind_of(split_query(url)[0])
    may_be_manifest = kind == ("records", "") and not split_query(url)[0].lower().endswith((".csv", ".tsv"))
    return kind is not None and kind[0] != "tokens" and not may_be_manifest


def find_text(url: str, cache_dir: str | None) -> RemoteText:
    """Return the text files at a URL, which may be a glob or a folder.  There may be none.

    If the server cannot be reached, prints a message and returns the files of the last look-up with the same cache,
    since their tokens may be cached.

    Raises RemoteReadError if the files can neither be looked up nor taken from an earlier look-up, and UserError if no
    cache folder is writable.
    """
    folder = make_cache_subfolder(cache_dir, "text")
    digest = hashlib.blake2b(without_credentials(url).encode(), digest_size=12).hexdigest()
    listing_path = folder.with_name(f"listed-{digest}.json")
    is_single = is_text(url) and not has_pattern(url)
    try:
        urls = [url] if is_single else list(filter(is_text, find_urls(url)))
        looked_up = zip(urls, map_urls(size_and_version_of, urls), strict=True)
        items = [_remote_file(file_url, size, version) for file_url, (size, version) in looked_up]
    except RemoteReadError as error:
        listing = read_value(listing_path) or [] if error.is_unavailable else []
        if not listing and error.is_missing and not is_single and not has_pattern(url):
            raise missing_folder_error(error) from error
        if not listing:
            raise
        items = [_remote_file(with_credentials_of(file_url, url), size, version) for file_url, size, version in listing]
        print_stderr(f"{error}; assuming that it has not changed since the last check")
    else:
        listing = [[without_credentials(item.url), item.size, item.version] for item in items]
        if listing and read_value(listing_path) != listing:
            with suppress(OSError):
                write_value(listing_path, listing)
    return RemoteText(items, folder)


@contextmanager
def text_files(locations: Sequence[str], key: str) -> Iterator[tuple[list[InputFile], Callable[[], None]]]:
    """Find the text files that paths, folders, globs and URLs name, without duplicates.

    Yields the files, and a function that downloads the remote ones.  After the block, downloaded files are removed,
    unless another process needs them.  Finding and downloading files may raise a UserError that names the setting
    `key`.
    """
    with ExitStack() as stack:
        inputs: list[InputFile] = []
        remote_texts: dict[str, RemoteText] = {}
        for location in locations:
            if local_path(location) is not None:
                inputs += find_files([location.removeprefix("file://")], key)
                continue
            _reject_other_file(location, key)
            with _as_user_error(key, location):
                text = remote_texts[location] = find_text(location, None)
            if not text.items:
                raise setting_error(key, location, "there is no text", fix=f"give files that end in {URL_SUFFIXES}")
            inputs += text.inputs(key)
            stack.enter_context(text.kept_until_built())

        def fetch() -> None:
            for url, text in remote_texts.items():
                with _as_user_error(key, url):
                    text.fetch()

        yield list({file.path: file for file in inputs}.values()), fetch


def _reject_other_file(url: str, key: str) -> None:
    """Raise UserError that names the setting `key` if a URL, which may be a glob, names .json or .bin files."""
    kind = kind_of(split_query(url)[0])
    if kind is None or is_text(url):
        return
    if kind[0] != "tokens":
        raise json_url_error(key, url)
    fix = "download it and the files next to it, and give its path"
    raise setting_error(key, url, "a token file cannot be read from a URL here", fix=fix)


@contextmanager
def _as_user_error(key: str, url: str) -> Iterator[None]:
    """Context manager that turns a ShardError into a UserError for the setting `key`, whose value is `url`."""
    try:
        yield
    except ShardError as error:
        raise unusable_url_error(key, url, error) from error


def _remote_file(url: str, size: int, version: str) -> RemoteFile:
    name = hashlib.blake2b(f"{without_credentials(url)} {size} {version}".encode(), digest_size=12).hexdigest()
    return RemoteFile(f"{name}-{split_query(url)[0].rpartition('/')[2]}", url, size, lambda: None, version)
