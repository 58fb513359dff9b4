"""Lists, reads and downloads remote files: over HTTP with the standard library, otherwise with fsspec.

`with_retries` repeats failed attempts after increasing pauses, unless retrying is pointless, as for a missing file.
"""

from __future__ import annotations

import errno
import fnmatch
import queue
import re
import string
import threading
import time
import urllib.error
import urllib.parse
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from trainer.data.records import URL_SUFFIXES
from trainer.data.shards import ShardError
from trainer.errors import UserError, masked, print_stderr, redact, setting_error
from trainer.stopping import raise_if_stop_requested
from trainer.urls import (
    has_pattern,
    is_http,
    join,
    open_filesystem,
    parent,
    split_login,
    split_query,
    with_credentials_of,
)

if TYPE_CHECKING:
    import http.client

STALL_S = 60.0
"""Seconds without data after which an HTTP connection counts as lost; also the window over which speed is averaged."""

MIN_BYTES_PER_S = 1 << 10
"""Minimum bytes per second from a web server, averaged over STALL_S."""

MAX_PAUSE_S = 60.0
"""Maximum pause between attempts, in seconds; pauses start at one second and double."""

FEW_TRIES = 3
"""Maximum number of attempts while a URL may still be wrong (to look up, list or peek at files), or if the server is
too slow."""

MANY_TRIES = 12
"""Maximum number of attempts to download a file that has been found; the pauses take about 6 minutes in total."""

_NUM_THREADS = 16
"""Maximum number of URLs that are read at the same time."""

_BLOCK_BYTES = 1 << 20
"""Maximum number of bytes to read at once."""

_RETRY_STATUSES = (408, 425, 429)
"""HTTP statuses from 400 to 499 after which retrying may help."""

_LOCAL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ENOENT, errno.EISDIR)
"""Errors of the local file system, after which retrying does not help."""

Result = TypeVar("Result")


class RemoteReadError(ShardError):
    """A remote file cannot be read, or is not what its name says.

    is_missing: whether the file does not exist.
    is_unavailable: whether its server or the network seems to be down, so that a later attempt may succeed.
    """

    def __init__(self, message: str, is_missing: bool = False, is_unavailable: bool = False) -> None:
        super().__init__(message)
        self.is_missing, self.is_unavailable = is_missing, is_unavailable


class FileChanged(ShardError):
    """A remote file has changed since it was looked up."""


def unusable_url_error(key: str, url: str, error: ShardError) -> UserError:
    """Return the UserError for a setting whose URL cannot be used."""
    fix = "start again" if isinstance(error, FileChanged) else ""
    if isinstance(error, RemoteReadError):
        fix = "check the URL" if error.is_missing else "check the URL, and whether this machine can reach it"
    return setting_error(key, url, str(error).removeprefix(f"{masked(url)} "), fix=fix)


def missing_folder_error(error: RemoteReadError) -> RemoteReadError:
    """Return the error for a URL that was read as a folder, and does not exist."""
    rule = f"it was read as a folder, because its name does not end in {URL_SUFFIXES}"
    return RemoteReadError(f"{error}; {rule}", is_missing=True)


def json_url_error(key: str, url: str) -> UserError:
    """Return the UserError for a setting that names an uncompressed .json file of records by its URL."""
    rule = "an uncompressed .json file cannot be read from a URL, unless it is a manifest of token shards"
    return setting_error(key, url, rule, fix="download it and give its path, or give it as .jsonl or .json.gz")


class SlowServer(OSError):
    """The server sends data too slowly."""


class DamagedDownload(OSError):
    """A download is incomplete or damaged."""


def read_url(url: str, tries: int = FEW_TRIES) -> bytes:
    """Return the content of a small file.  Raises RemoteReadError."""
    return with_retries(url, tries, lambda: b"".join(_read_blocks(url)))


def read_range(url: str, start: int, stop: int) -> bytes | None:
    """Return bytes `start` to `stop` (exclusive) of a file, or None if its server sends only complete files.

    Raises RemoteReadError.
    """

    def read() -> bytes | None:
        if not is_http(url):
            system, name = open_filesystem(url)
            return bytes(system.cat_file(name, start=start, end=stop))
        with _open_url(url, Range=f"bytes={start}-{stop - 1}") as response:
            return b"".join(_body_blocks(response)) if response.status == 206 else None

    return with_retries(url, FEW_TRIES, read)


def size_and_version_of(url: str) -> tuple[int, str]:
    """Return the size of a file, and its version: a string that changes with the content, or "" if none is known.

    Raises RemoteReadError.
    """
    return with_retries(url, FEW_TRIES, lambda: _size_and_version(url))


def download(url: str, path: Path, with_version: bool = False) -> str | None:
    """Download a file to `path` in a single attempt, and return its version as `size_and_version_of` does, or None.

    with_version: whether to return the version of the downloaded content.

    Raises any exception of the file system or the connection.
    """
    if not is_http(url):
        system, name = open_filesystem(url)
        system.get_file(name, str(path))
        if not with_version:
            return None
        system.invalidate_cache()
        return _size_and_version(url)[1]
    with open(path, "wb") as file, _open_url(url) as response:
        for block in _body_blocks(response):
            file.write(block)
        return _version_of(response) if with_version else None


def find_urls(url: str) -> list[str]:
    """Return the sorted URLs of the files that a glob matches or a folder contains.

    On a web server, these are taken from the links on the folder's page.  Raises RemoteReadError.
    """
    return sorted(with_retries(url, FEW_TRIES, lambda: _list_urls(url)))


def _version_of(response: http.client.HTTPResponse) -> str:
    """Return a string that changes with a file's content, from the headers of the server's response."""
    return " ".join(response.headers.get(name, "") for name in ("ETag", "Last-Modified"))


_SAFE_CHARACTERS = string.punctuation
"""Characters of a URL, besides ASCII letters and digits, that are not percent-encoded."""

_VERSION_KEYS = (
    "ETag",
    "etag",
    "md5Hash",
    "content_md5",
    "mtime",
    "LastModified",
    "last_modified",
    "updated",
    "created",
)
"""Keys of a file's metadata whose values change with the content, most reliable first.

Each file system provides some of them.  Only the first of these is used, since a listing and a query for a single file
report times in different formats.
"""


def _size_and_version(url: str) -> tuple[int, str]:
    if is_http(url):
        with _open_url(url) as response:  # GET: some servers refuse HEAD
            if response.length is None:
                raise ValueError("the server does not report its size")
            return response.length, _version_of(response)
    system, path = open_filesystem(url)
    info = system.info(path)
    return int(info["size"]), next((str(info[name]) for name in _VERSION_KEYS if name in info), "")


def _list_urls(url: str) -> list[str]:
    if not is_http(url):
        system, path = open_filesystem(url)
        paths = system.glob(path) if has_pattern(url) else system.ls(path, detail=False)
        return [with_credentials_of(str(system.unstrip_protocol(name)), url) for name in paths]
    folder, pattern = (parent(url), split_query(url)[0].rpartition("/")[2]) if has_pattern(url) else (url, "*")
    page = b"".join(_read_blocks(join(folder, ""))).decode(errors="replace")
    links = [
        urllib.parse.unquote(link) for link in re.findall(r"""<a\s[^>]*?href=["']([^"'?#]+)""", page, re.IGNORECASE)
    ]
    names = {link.rpartition("/")[2] for link in links}
    return [join(folder, urllib.parse.quote(name)) for name in names if name and fnmatch.fnmatchcase(name, pattern)]


def with_retries(url: str, tries: int, attempt: Callable[[], Result]) -> Result:
    """Call `attempt` until it succeeds, and return its result.

    At most `tries` attempts are made, but only FEW_TRIES if the server is too slow, and no further one if retrying is
    pointless.  Raises RemoteReadError with the reason for the last failure.  A ShardError, or an OSError about a full
    disk, is raised unchanged.
    """
    for num_retries in range(tries - 1, -1, -1):
        raise_if_stop_requested()
        try:
            return attempt()
        except ShardError:
            raise
        except Exception as error:  # each file system has its own exception types
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            if isinstance(error, SlowServer) and tries - num_retries >= FEW_TRIES:
                num_retries = 0
            if not num_retries or _is_final(error):
                message = redact(f"{masked(url)} cannot be read ({_reason(error)})")
                is_404 = isinstance(error, urllib.error.HTTPError) and error.code == 404
                is_missing = is_404 or isinstance(error, FileNotFoundError)
                raise RemoteReadError(message, is_missing, is_unavailable=not _is_final(error)) from error
            pause = min(MAX_PAUSE_S, 2.0 ** (tries - 1 - num_retries))
            tries_left = f"{num_retries} more {'try' if num_retries == 1 else 'tries'}"
            print_stderr(f"{masked(url)}: {_reason(error)}; trying again ({tries_left})")
            _sleep(pause)
    raise AssertionError(tries)


def _sleep(seconds: float) -> None:
    """Sleep.  Raises StopRequested if this process is asked to stop."""
    deadline = time.monotonic() + seconds
    while (remaining_s := deadline - time.monotonic()) > 0:
        time.sleep(min(remaining_s, 0.2))
        raise_if_stop_requested()


def map_urls(function: Callable[[str], Result], urls: Sequence[str]) -> list[Result]:
    """Call `function` with each URL, in several threads, and return the results in order.

    Raises the first error that occurs, or StopRequested, at once, without waiting for the other threads.  The threads
    are daemons, so that the process does not wait for them at exit, as it would for the threads of an executor.
    """
    pending = deque(enumerate(urls))
    outcomes: queue.SimpleQueue[tuple[int, Result] | BaseException] = queue.SimpleQueue()

    def work() -> None:
        with suppress(IndexError):  # raised by `popleft` when no URL is left
            while True:
                number, url = pending.popleft()
                try:
                    outcomes.put((number, function(url)))
                except BaseException as error:
                    outcomes.put(error)

    for _ in range(min(_NUM_THREADS, len(urls))):
        threading.Thread(target=work, name="look-up", daemon=True).start()
    results: dict[int, Result] = {}
    try:
        while len(results) < len(urls):
            raise_if_stop_requested()
            with suppress(queue.Empty):
                outcome = outcomes.get(timeout=0.2)
                if isinstance(outcome, BaseException):
                    raise outcome
                results[outcome[0]] = outcome[1]
    finally:
        pending.clear()
    return [results[number] for number in range(len(urls))]


def _is_final(error: Exception) -> bool:
    """Return whether retrying is pointless."""
    if isinstance(error, urllib.error.HTTPError):
        return 400 <= error.code < 500 and error.code not in _RETRY_STATUSES
    is_local = isinstance(error, OSError) and error.errno in _LOCAL_ERRORS
    return is_local or isinstance(error, (FileNotFoundError, PermissionError, ImportError, ValueError))


def _reason(error: Exception) -> str:
    """Return a short reason for an error, for messages."""
    if isinstance(error, ImportError):
        return f"{error}: pip install 'meshtrainer[remote]'"
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(cause, TimeoutError):
        return "the connection has stalled"
    if isinstance(error, urllib.error.HTTPError):
        reason = " ".join(str(error.reason).split())  # the one for a redirect loop has several lines
        return f"the server says {error.code} {reason}"
    return str(getattr(cause, "strerror", None) or cause) or type(error).__name__


def _read_blocks(url: str) -> Iterator[bytes]:
    """Yield the content of a file in blocks."""
    if not is_http(url):
        system, name = open_filesystem(url)
        yield system.cat_file(name)
        return
    with _open_url(url) as response:
        yield from _body_blocks(response)


@contextmanager
def _open_url(url: str, **headers: str) -> Iterator[http.client.HTTPResponse]:
    import urllib.request  # slow to import (ssl): only when needed

    url_without_login, login = split_login(url)
    request = urllib.request.Request(
        urllib.parse.quote(url_without_login, safe=_SAFE_CHARACTERS), headers={"Accept-Encoding": "identity", **headers}
    )
    for name, value in login.items():
        request.add_unredirected_header(name, value)  # not sent to the target of a redirect
    with urllib.request.urlopen(request, timeout=STALL_S) as response:
        yield response


def _body_blocks(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """Yield the body of a response.

    Raises DamagedDownload if the connection ends early, and SlowServer if the data arrive too slowly.
    """
    expected, count = response.length, 0
    window_start, count_at_start = time.monotonic(), 0
    while block := response.read1(_BLOCK_BYTES):  # returns the available data; `read` would wait for a full block
        raise_if_stop_requested()
        count += len(block)
        yield block
        if (window_s := time.monotonic() - window_start) > STALL_S:
            if count - count_at_start < MIN_BYTES_PER_S * window_s:
                raise SlowServer(f"the server sends only {(count - count_at_start) / window_s:,.0f} bytes/s")
            window_start, count_at_start = time.monotonic(), count
    if expected is not None and count != expected:
        raise DamagedDownload(f"the connection was lost after {count} of {expected} bytes")
