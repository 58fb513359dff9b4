"""Downloads token shards and text at URLs into the cache before a run starts.

`find_remote` looks up what a URL names, and returns `RemoteShards` or `RemoteText`.  The last look-up of each URL is
kept in the cache (`listed-HASH`), so that a later start works without the server.

A shard is identified by its URL and metadata, and becomes a separate cache entry, which is verified before it appears
under its name.  From then on it is read like a local shard.  Text is identified by its URL, size, and ETag or
modification time.  It is removed as soon as it is tokenized.

URLs are read with fsspec, but without its file caches: after a process was killed, they return incomplete files.
"""

from __future__ import annotations

import errno
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from trainer.data.cache import CORRUPTION_ERRORS, get_or_build, in_writable_folder, read_value, write_value
from trainer.data.progress import ByteProgress, ProgressLine
from trainer.data.records import URL_SUFFIXES, InputFile, find_files, kind_of
from trainer.data.shards import (
    MANIFEST,
    MAX_BYTES_VERIFIED_AT_START,
    SUFFIXES,
    Shard,
    ShardError,
    ShardInfo,
    ShardManifest,
    ShardSet,
    parse_info,
)
from trainer.errors import UserError, print_stderr, reject_credentials, setting_error
from trainer.files import find_cache_folders, free_bytes, local_path, locked, readable_size, remove
from trainer.stopping import partial_file
from trainer.urls import has_pattern, is_http, join, open_filesystem, parent, split_query, with_suffix

_TRIES = 3
"""Maximum number of attempts to look up or download something."""

_NUM_THREADS = 8
"""Maximum number of files that a process looks up or downloads at the same time."""

_RETRY_STATUSES = (408, 425, 429)
"""HTTP statuses from 400 to 499 after which another attempt may succeed."""

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)

_VERSION_KEYS = ("ETag", "etag", "md5Hash", "content_md5", "Last-Modified", "LastModified", "last_modified", "mtime")
"""Entries of a file's metadata that change with its content, the most reliable first; each file system has some."""

_WEB_PAGE_SUFFIXES = (".html", ".htm", ".xml")
"""Suffixes of files that are expected to contain HTML or XML; a web page in any other file is an error."""

Item = TypeVar("Item")
Result = TypeVar("Result")


class RemoteError(ShardError):
    """A URL cannot be read, or is not what its name says.

    is_final: whether another attempt is pointless, as for a missing file.  Otherwise the server may be down.
    """

    def __init__(self, message: str, is_final: bool = True) -> None:
        super().__init__(message)
        self.is_final = is_final


# -- what a URL names -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Listing:
    """What a URL names: shards or text.  It is stored as JSON.

    manifest: the URL of a manifest and its content; two empty texts without one.
    shards: without a manifest, the URL of each shard, and the content of its metadata file.
    texts: the URL, size and version of each text file.
    """

    manifest: Sequence[str] = ("", "")
    shards: Sequence[tuple[str, str]] = ()
    texts: Sequence[tuple[str, int, str]] = ()


def find_remote(url: str, key: str, cache_dir: str | None) -> RemoteShards | RemoteText:
    """Return the shards or the text at a URL: of a file, a manifest or a folder, or a glob.

    If the server cannot be reached, prints a message and returns what the last look-up with the same cache has found.

    key: the setting that contains the URL, for messages.

    Raises UserError if there are neither shards nor text, or if they cannot be looked up.
    """
    reject_credentials(key, url)
    path, query = split_query(url)
    is_file = path.endswith((".bin", ".json")) or _is_text(url)
    if query and (has_pattern(url) or not is_file):
        rule = "a URL with a query (?...) names one file or a manifest, not a folder or a glob"
        raise setting_error(key, url, rule, fix="leave out the query, or name a manifest.json")
    try:
        listing = _look_up(path.rstrip("/") + query, key)
        _store_listing(listing, url, cache_dir)
    except RemoteError as error:
        stored = None if error.is_final else _stored_listing(url, cache_dir)
        if stored is None:
            raise _url_error(key, url, error) from error
        print_stderr(f"{error}; assuming that nothing has changed since the last start")
        listing = stored
    if listing.texts:
        return _find_text(listing, url, key, cache_dir)
    if not listing.shards and not listing.manifest[0]:
        rule = "contains neither token shards (.bin files or a manifest.json) nor text"
        raise setting_error(key, url, rule, fix=f"give files that end in {URL_SUFFIXES}")
    try:
        return _find_shards(listing, url, key, cache_dir)
    except ShardError as error:
        raise _url_error(key, url, error) from error


def _store_listing(listing: _Listing, url: str, cache_dir: str | None) -> None:
    for folder in find_cache_folders(cache_dir):
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_value(folder / f"listed-{_digest(url)}", vars(listing))
            return


def _stored_listing(url: str, cache_dir: str | None) -> _Listing | None:
    values = (read_value(folder / f"listed-{_digest(url)}") for folder in find_cache_folders(cache_dir))
    return next((_Listing(**value) for value in values if isinstance(value, dict)), None)


def _look_up(url: str, key: str) -> _Listing:
    """Return what a URL names.

    Raises RemoteError, and UserError for a shard's metadata or a .json file of records, which are likely mistakes.
    """
    path = split_query(url)[0]
    if not has_pattern(url):
        if _is_text(url):
            return _Listing(texts=[_describe(url)])
        if path.endswith(".json"):
            return _Listing(manifest=(url, _read_manifest(url, key)))
        if path.endswith(".bin"):
            return _Listing(shards=_read_metadata([url]))
        try:
            return _Listing(manifest=(join(url, MANIFEST), _read([join(url, MANIFEST)])[0]))
        except RemoteError as error:
            if not error.is_final:
                raise
    urls = _list_files(url)
    bin_urls = [each for each in urls if each.endswith(".bin")]
    if bin_urls:
        return _Listing(shards=_read_metadata(bin_urls))
    texts = [each for each in urls if _is_text(each)]
    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        return _Listing(texts=list(threads.map(_describe, texts)))


def _is_text(url: str) -> bool:
    """Return whether a URL, which may be a glob, names text or records, judging by its suffix.

    An uncompressed .json file does not count, since it may be a manifest.
    """
    kind_and_compression = kind_of(split_query(url)[0])
    return kind_and_compression is not None and kind_and_compression not in (("tokens", ""), ("json", ""))


def _read_manifest(url: str, key: str) -> str:
    content = _read([url])[0]
    with suppress(ShardError):
        parse_info(content.encode(), url)
        shard = with_suffix(url, ".json", ".bin")
        raise setting_error(key, url, "is the metadata of a token shard; give its .bin file", proposal=shard)
    try:
        ShardManifest.parse(content.encode(), url)
    except ShardError as error:
        rule = f"{error}; at a URL, an uncompressed .json file is a manifest of token shards"
        fix = "download a file of records and give its path, or give it as .jsonl or .json.gz"
        raise setting_error(key, url, rule.removeprefix(f"{url} "), fix=fix) from error
    return content


def _read_metadata(urls: Sequence[str]) -> list[tuple[str, str]]:
    """Return each URL of a shard with its metadata."""
    try:
        return list(zip(urls, _read([with_suffix(url, ".bin", ".json") for url in urls]), strict=True))
    except RemoteError as error:
        if not error.is_final:
            raise
        rule = "a shard needs its metadata; a token file of another trainer is read only from a local path"
        raise RemoteError(f"{error}; {rule}") from error


def _read(urls: Sequence[str]) -> list[str]:
    """Return the content of small files.  Raises RemoteError."""

    def read() -> list[str]:
        system, _ = open_filesystem(urls[0])
        paths = [open_filesystem(url)[1] for url in urls]
        contents = system.cat(paths)
        return [contents[path].decode(errors="replace") for path in paths]

    return _with_retries(urls[0], read)


def _describe(url: str) -> tuple[str, int, str]:
    """Return a file's URL, its size, and a version that changes with its content.  Raises RemoteError."""

    def look_up() -> tuple[str, int, str]:
        system, path = open_filesystem(url)
        info = system.info(path)
        if info["size"] is None:
            raise ValueError("the server does not report its size")
        return url, int(info["size"]), next((str(info[name]) for name in _VERSION_KEYS if info.get(name)), "")

    return _with_retries(url, look_up)


def _list_files(url: str) -> list[str]:
    """Return the sorted URLs of the files that a glob matches or a folder contains.  Raises RemoteError."""

    def look_up() -> list[str]:
        system, path = open_filesystem(url)
        names = system.glob(path) if has_pattern(url) else system.ls(join(path, ""), detail=False)
        return sorted(str(system.unstrip_protocol(name)) for name in names)

    try:
        return _with_retries(url, look_up)
    except RemoteError as error:
        rule = f"it was read as a folder, because its name does not end in {URL_SUFFIXES}"
        raise RemoteError(f"{error}; {rule}", error.is_final) if error.is_final else error from error


def _digest(*values: object) -> str:
    return hashlib.blake2b("\0".join(map(str, values)).encode(), digest_size=12).hexdigest()


# -- shards -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RemoteShards:
    """Token shards at a URL; see `find_remote`.

    train, held_out: the URL and the metadata of each shard.
    manifest: the manifest that lists them, or None.
    """

    url: str
    key: str
    cache_dir: str | None
    train: Sequence[tuple[str, ShardInfo]]
    held_out: Sequence[tuple[str, ShardInfo]] = ()
    manifest: ShardManifest | None = None

    @property
    def files(self) -> list[str]:
        """The URLs of the shards to train on."""
        return [url for url, _ in self.train]

    def load(self) -> ShardSet:
        """Download the shards that are missing or damaged in the cache, and return all.  Raises UserError."""
        try:
            shards = self._fetch([*self.train, *self.held_out])
        except ShardError as error:
            raise _url_error(self.key, self.url, error) from error
        train, held_out = shards[: len(self.train)], shards[len(self.train) :]
        if self.manifest is None:
            return ShardSet(self.files, train)
        contents = self.manifest.train_content, self.manifest.held_out_content
        return ShardSet(self.files, train, contents[0], held_out, contents[1], self.manifest.notes)

    def _fetch(self, infos: Sequence[tuple[str, ShardInfo]]) -> list[Shard]:
        is_verified = sum(map(_num_bytes, infos)) <= MAX_BYTES_VERIFIED_AT_START
        entries = [_ShardEntry(url, info, self.cache_dir, is_verified) for url, info in infos]
        cached = [entry.find() for entry in entries]
        missing = [entry for entry, shard in zip(entries, cached, strict=True) if shard is None]
        if not missing:
            return [shard for shard in cached if shard is not None]
        num_bytes = sum(_num_bytes((entry.url, entry.info)) for entry in missing)
        _check_space(num_bytes, self.key, self.url, self.cache_dir)
        downloaded = iter(_in_threads(_ShardEntry.get, missing, num_bytes, "token shard"))
        return [shard or next(downloaded) for shard in cached]


def _find_shards(listing: _Listing, url: str, key: str, cache_dir: str | None) -> RemoteShards:
    manifest_url, content = listing.manifest
    if not manifest_url:
        infos = [(shard_url, parse_info(text.encode(), shard_url)) for shard_url, text in listing.shards]
        return RemoteShards(url, key, cache_dir, infos)
    manifest = ShardManifest.parse(content.encode(), manifest_url)

    def infos_of(is_held_out: bool) -> list[tuple[str, ShardInfo]]:
        infos = manifest.infos(is_held_out)
        for name, _ in infos:
            if name.startswith("/"):
                raise ShardError(f"{manifest_url} lists {name}, which is on another machine's file system")
        return [(name if "://" in name else join(parent(manifest_url), name), info) for name, info in infos]

    return RemoteShards(url, key, cache_dir, infos_of(False), infos_of(True), manifest)


def _num_bytes(shard: tuple[str, ShardInfo]) -> int:
    """Return the size of a shard's tokens and index."""
    info = shard[1]
    return info.num_tokens * np.dtype(info.dtype).itemsize + (info.num_documents + 1) * 8


@dataclass(frozen=True)
class _ShardEntry:
    """A remote shard and its cache entry, a folder.

    is_verified: whether to compare checksums each time that the entry is read, and not only after the download.
    """

    url: str
    info: ShardInfo
    cache_dir: str | None
    is_verified: bool

    def find(self) -> Shard | None:
        """Return the shard if it is in the cache and intact."""
        for folder in find_cache_folders(self.cache_dir):
            with suppress(*CORRUPTION_ERRORS):
                return self._load(folder / self._name)
        return None

    @property
    def _name(self) -> str:
        return f"shard-{_digest(self.url, self.info)}"

    def get(self, progress: ByteProgress) -> Shard:
        """Return the shard, downloading it first if necessary.  Raises RemoteError, and UserError for the cache."""

        def build(folder: Path) -> None:
            _with_retries(self.url, lambda: self._download(folder, progress))

        return get_or_build(self.cache_dir, self._name, "token shards", build, self._load)

    def _download(self, folder: Path, progress: ByteProgress) -> None:
        for suffix in SUFFIXES:
            with partial_file(self._path(folder).with_suffix(f"{suffix}.part")) as partial:
                _download(with_suffix(self.url, ".bin", suffix), partial, progress)
                os.replace(partial, self._path(folder).with_suffix(suffix))
        try:
            self._load(folder).verify()
        except RemoteError:
            raise
        except ShardError as error:
            raise OSError("what was received is damaged") from error

    def _load(self, folder: Path) -> Shard:
        shard = Shard(self._path(folder))
        if shard.info != self.info:
            raise RemoteError(f"{self.url} has changed: its metadata does not match the manifest")
        if self.is_verified:
            shard.verify()
        shard.is_rebuilt = True
        return shard

    def _path(self, folder: Path) -> Path:
        return folder / split_query(self.url)[0].rpartition("/")[2]


# -- text -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RemoteText:
    """Text files and tables at a URL; see `find_remote`.

    urls: the URLs of the files.
    inputs: the files at their local paths, whether or not they have been downloaded.
    folder: the folder of the local paths.
    """

    url: str
    key: str
    cache_dir: str | None
    urls: Sequence[str]
    inputs: Sequence[InputFile]
    folder: Path

    @contextmanager
    def downloaded(self) -> Iterator[None]:
        """Context manager inside which the files are on the disk.  Other processes wait until they are removed again.

        They are removed at the end, and after a UserError, which would occur again; in its message, local paths become
        URLs.  After any other error, complete files stay for the next start.

        Raises UserError if the files cannot be downloaded, and OSError if they cannot be stored.
        """
        with locked(self.folder):
            try:
                self._fetch()
            except ShardError as error:
                raise _url_error(self.key, self.url, error) from error
            try:
                yield
            except UserError as error:
                remove(self.folder)
                message = str(error)
                for url, file in zip(self.urls, self.inputs, strict=True):
                    message = message.replace(file.path, url)
                raise UserError(message) from error
            remove(self.folder)

    def discard(self) -> None:
        """Remove files that a killed process has left behind, unless another process is using them."""
        if self.folder.exists():
            with suppress(TimeoutError), locked(self.folder, timeout_s=0):
                remove(self.folder)

    def _fetch(self) -> None:
        self.folder.mkdir(exist_ok=True)
        for leftover in self.folder.glob(".*"):
            remove(leftover)
        missing = [(url, file) for url, file in zip(self.urls, self.inputs, strict=True) if not _is_whole(file)]
        if not missing:
            return
        num_bytes = sum(file.size for _, file in missing)
        _check_space(num_bytes, self.key, self.url, self.cache_dir)
        _in_threads(_fetch_text, missing, num_bytes, "text file")


def _find_text(listing: _Listing, url: str, key: str, cache_dir: str | None) -> RemoteText:
    folder = _writable_folder(cache_dir) / f"text-{_digest(listing.texts)}"
    inputs = []
    for number, (file_url, size, version) in enumerate(listing.texts):
        path = folder / f"{number:05d}-{split_query(file_url)[0].rpartition('/')[2]}"
        kind_and_compression = kind_of(path.name)
        assert kind_and_compression is not None, path
        inputs.append(InputFile(str(path), *kind_and_compression, size, 0, key, _digest(file_url, size, version)))
    return RemoteText(url, key, cache_dir, [row[0] for row in listing.texts], inputs, folder)


def _is_whole(file: InputFile) -> bool:
    return os.path.isfile(file.path) and os.path.getsize(file.path) == file.size


def _fetch_text(row: tuple[str, InputFile], progress: ByteProgress) -> None:
    """Download a text file.  Raises RemoteError if it is a web page, or if it has changed since it was looked up."""
    url, file = row
    path = Path(file.path)

    def fetch() -> None:
        with partial_file(path.with_name(f".{path.name}")) as partial:
            _download(url, partial, progress)
            if _digest(*_describe(url)) != file.checksum:
                raise RemoteError(f"{url} has changed since it was looked up, a moment ago; start again")
            if partial.stat().st_size != file.size:
                raise OSError("the connection was lost")
            _reject_web_page(url, partial)
            os.replace(partial, path)

    _with_retries(url, fetch)


def _reject_web_page(url: str, path: Path) -> None:
    """Raise RemoteError if a file is unexpectedly a web page, such as one that asks for a password."""
    with open(path, "rb") as file:
        start = file.read(1024).lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    is_page = start.startswith((b"<!doctype html", b"<html"))
    if is_page and not split_query(url)[0].lower().endswith(_WEB_PAGE_SUFFIXES):
        raise RemoteError(f"{url} is a web page (HTML), despite its name; does the server require a login?")


def find_text_files(
    locations: Sequence[str], key: str
) -> tuple[list[InputFile], Callable[[], AbstractContextManager[object]]]:
    """Find the text files that paths, folders, globs and URLs name, without duplicates.

    Returns the files, and a context manager inside which those at URLs are on the disk; see `RemoteText.downloaded`.
    Raises UserError that names the setting `key` if a location names no text.
    """
    inputs: list[InputFile] = []
    remote_texts: dict[Path, RemoteText] = {}
    for location in locations:
        if local_path(location) is not None:
            inputs += find_files([location.removeprefix("file://")], key)
            continue
        found = find_remote(location, key, None)
        if isinstance(found, RemoteShards):
            raise setting_error(key, location, "names token shards, not text", fix=f"give {URL_SUFFIXES}")
        inputs += found.inputs
        remote_texts[found.folder] = found

    @contextmanager
    def downloaded() -> Iterator[None]:
        with ExitStack() as stack:
            for _, text in sorted(remote_texts.items()):  # every process takes the locks in the same order
                stack.enter_context(text.downloaded())
            yield

    return list({file.path: file for file in inputs}.values()), downloaded


# -- downloading ------------------------------------------------------------------------------------------------------


def _writable_folder(cache_dir: str | None) -> Path:
    """Create the cache folder and return it.  Raises UserError."""

    def create(folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return folder

    return in_writable_folder(cache_dir, "downloads", create)


def _check_space(num_bytes: int, key: str, url: str, cache_dir: str | None) -> None:
    """Raise UserError unless the disk of the cache has room for `num_bytes` bytes."""
    folder = _writable_folder(cache_dir)
    if (free := free_bytes(folder)) < num_bytes:
        rule = f"needs {readable_size(num_bytes)} in {folder} ({num_bytes:,} bytes); {free:,} bytes are free"
        fix = "set data.cache_dir to a folder on a larger disk, or mount the bucket and give the path"
        raise setting_error(key, url, rule, fix=fix)


def _in_threads(
    fetch: Callable[[Item, ByteProgress], Result], items: Sequence[Item], num_bytes: int, noun: str
) -> list[Result]:
    """Call `fetch` with each item, in several threads, and return the results in order.

    num_bytes: the size of all items together.
    noun: what an item is, for the message.
    """
    print_stderr(f"downloading {len(items):,} {noun}{'' if len(items) == 1 else 's'}, {num_bytes / 1e6:,.1f} MB")
    progress = ByteProgress("downloading", num_bytes)
    with ProgressLine(progress.line), ThreadPoolExecutor(_NUM_THREADS) as threads:
        return list(threads.map(lambda item: fetch(item, progress), items))


def _download(url: str, path: Path, progress: ByteProgress) -> None:
    """Download a file in a single attempt.  Raises any exception of the file system."""
    from fsspec.callbacks import Callback

    class Progress(Callback):  # type: ignore[misc]
        def relative_update(self, inc: int = 1) -> None:
            progress.add(inc)

    system, name = open_filesystem(url)
    system.get_file(name, str(path), callback=Progress())


def _with_retries(url: str, attempt: Callable[[], Result]) -> Result:
    """Call `attempt` until it succeeds, at most _TRIES times, and return its result.

    Raises RemoteError with the reason for the last failure.  A UserError and an OSError about a full disk are raised
    unchanged.
    """
    for num_tries in range(1, _TRIES + 1):
        try:
            return attempt()
        except (UserError, RemoteError):
            raise
        except Exception as error:  # each file system has its own exception types
            if isinstance(error, OSError) and error.errno in _DISK_FULL:
                raise
            cause, is_final = _cause_of(error, url)
            reason = _reason(cause)
            if is_final or num_tries == _TRIES:
                raise RemoteError(f"{url} cannot be read ({reason})", is_final) from error
            print_stderr(f"{url}: {reason}; trying again")
            time.sleep(2.0 ** (num_tries - 1))
    raise AssertionError(url)


def _cause_of(error: Exception, url: str) -> tuple[BaseException, bool]:
    """Return the cause of a failed attempt, and whether another attempt is pointless."""
    cause: BaseException = error
    if is_http(url) and isinstance(error, FileNotFoundError):  # fsspec's error for any failed look-up
        cause = error.__cause__ or error
    status = getattr(cause, "status", None)
    if isinstance(status, int):
        return cause, 400 <= status < 500 and status not in _RETRY_STATUSES
    return cause, isinstance(cause, (FileNotFoundError, PermissionError, ImportError, ValueError))


def _reason(error: BaseException) -> str:
    """Return a short reason for an error, for messages."""
    if isinstance(error, ImportError):
        return f"{error}: pip install 'meshtrainer[remote]'"
    status = getattr(error, "status", None)
    if isinstance(status, int):
        return f"the server says {status} {getattr(error, 'message', '')}".strip()
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    if isinstance(error, TimeoutError):
        return "the connection has stalled"
    return str(getattr(error, "strerror", None) or error) or type(error).__name__


def _url_error(key: str, url: str, error: ShardError) -> UserError:
    """Return the UserError for a setting whose URL cannot be used."""
    fix = "check the URL, and whether this machine can reach it" if isinstance(error, RemoteError) else ""
    return setting_error(key, url, str(error).removeprefix(f"{url} "), fix=fix)
