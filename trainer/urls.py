"""Functions that split and join URLs, detect globs and credentials, and open fsspec file systems.

In an http(s) URL, `?` starts the query, and only the path can contain the wildcards `*` and `[...]`.  Other URLs
(s3://, gs://, memory://) have no query, and in them `?` is a wildcard too.
"""

from __future__ import annotations

import re
from typing import Any

STALL_S = 60.0
"""Seconds without data after which an HTTP connection counts as lost."""


_CREDENTIALS = re.compile(
    r"(?i)(?<=://)[^\s/:@?#\[]*:(?!\d+/)[^\s?#]*(?=@)"  # user:password@; a number before a slash is a port
    r"|(?<=http://)[^\s/?#]+(?=@)|(?<=https://)[^\s/?#]+(?=@)"  # a user without a password is a token
    r"|(?<=hf://)[^\s@?#]*:[^\s?#]*(?=@)"
    r"|(?<=[?&;#])(?:[\w.-]*[-_.]|access|api|aws)?"
    r"(?:token|secret|signature|sig|key|accesskeyid|password|credentials?)=[^\s&;#]*"
)


def without_credentials(text: str) -> str:
    """Return the text with `***` in place of the credentials in its URLs.

    These are `user:password` in front of the host, also if the password contains a slash; with http(s) a user alone;
    and parameters of a query that are called `token`, `X-Amz-Signature` or the like.
    """
    return _CREDENTIALS.sub("***", text) if "://" in text else text


def is_http(url: str) -> bool:
    """Return whether the scheme of a URL is http or https."""
    return url.startswith(("http://", "https://"))


def split_query(url: str) -> tuple[str, str]:
    """Split a URL into the part before the query, and the query with its `?` (empty without a query)."""
    location, mark, query = url.partition("?") if is_http(url) else (url, "", "")
    return location, mark + query


def has_pattern(url: str) -> bool:
    """Return whether a URL is a glob."""
    if is_http(url):
        path = split_query(url)[0].partition("://")[2].partition("/")[2]  # [::1] is a host
        return bool(re.search(r"[*\[]", path))
    return bool(re.search(r"[*?\[]", url))


def join(url: str, name: str) -> str:
    """Return the URL of a file in the folder at `url`, with the same query."""
    location, query = split_query(url)
    return f"{location.rstrip('/')}/{name}{query}"


def parent(url: str) -> str:
    """Return the URL of the folder that contains the file at `url`, with the same query."""
    location, query = split_query(url)
    return f"{location.rpartition('/')[0]}{query}"


def with_suffix(url: str, old: str, new: str) -> str:
    """Replace the suffix `old` of a URL's path with `new`, and keep the query.  The path must end with `old`."""
    location, query = split_query(url)
    return f"{location.removesuffix(old)}{new}{query}"


def has_known_scheme(url: str) -> bool:
    """Return whether fsspec knows the scheme of a URL; the library that the scheme needs may not be installed."""
    import fsspec

    return url.partition("://")[0].lower() in fsspec.available_protocols()


def open_filesystem(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL, and the path in it.  fsspec caches file systems within a process.

    Environment variables configure it, such as FSSPEC_HTTP, and for http(s) also the usual ones for proxies and the
    file ~/.netrc.  Raises ImportError or ValueError for unsupported URLs.
    """
    import fsspec

    options: dict[str, Any] = {}
    if is_http(url):
        import aiohttp

        sections = [fsspec.config.conf.get(scheme, {}) for scheme in ("http", "https")]
        configured = {name: value for section in sections for name, value in section.get("client_kwargs", {}).items()}
        # By default, a download must end within five minutes.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=STALL_S, sock_read=STALL_S)
        headers = {"Accept-Encoding": "identity", **configured.get("headers", {})}
        options["client_kwargs"] = {"trust_env": True, "timeout": timeout, **configured, "headers": headers}
    return fsspec.core.url_to_fs(url, **options)  # type: ignore[no-any-return]
