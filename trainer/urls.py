"""Functions that split and join URLs, detect globs, copy or remove credentials, and open fsspec file systems.

In an http(s) URL, `?` starts the query, and only the path can contain the wildcards `*` and `[...]`.  Other URLs
(s3://, gs://, memory://) have no query, and in them `?` is a wildcard too.
"""

from __future__ import annotations

import base64
import re
import urllib.parse
from typing import Any

from trainer.errors import PASSWORD_IN_URL, is_secret_parameter

_KEY_SCHEMES = ("s3", "s3a")
"""Schemes for which fsspec takes the access key and the secret as options, not from the URL."""
_SIGNATURE = re.compile(r"[?&](?:x-amz-signature|x-goog-signature|signature|sig)=", re.IGNORECASE)
_SIGNATURE_PARAMETER = re.compile(
    r"(?:x-(?:amz|goog)-.*|expires|signature|key-pair-id|policy|awsaccesskeyid|googleaccessid"
    r"|s[a-z]|ske|sks|skt|skv|skoid|sktid|sig|spr|sip|rsc[a-z])$",
    re.IGNORECASE,
)
"""Matches query parameters that change when a URL is signed again: those of AWS, Google, CloudFront and Azure (SAS)."""


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
    """Return the URL of a file in the folder at `url`.  It keeps the folder's query, which may contain a token."""
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


def without_credentials(url: str) -> str:
    """Return a URL without its user, password, token and signature.

    Used in cache keys and comparisons, where a URL with a renewed token or signature refers to the same file.  Masked
    credentials are removed too, since the URL may come from a run's stored configuration.  A user without a password is
    removed only from http(s) URLs.
    """
    if "://" not in url:
        return url
    location, query = split_query(url)
    location, _, _ = _split_user(location)
    is_signed = _SIGNATURE.search(query) is not None
    parameters = [
        part
        for part in query[1:].split("&")
        if part
        and not is_secret_parameter(part)
        and not (is_signed and _SIGNATURE_PARAMETER.match(part.partition("=")[0]))
    ]
    return location + ("?" + "&".join(parameters) if parameters else "")


def with_credentials_of(url: str, other: str) -> str:
    """Return `url` with the credentials of `other`, for example those of the folder in which it was listed."""
    location, query = split_query(url)
    without_user, existing_user, _ = _split_user(location)
    start, end = _user_span(other)
    user = other[start:end]
    if user and not existing_user:
        location = without_user.replace("://", f"://{user}", 1)
    return location + (query or split_query(other)[1])


def _user_span(url: str) -> tuple[int, int]:
    """Return the [start, end) span of `user:password@` in a URL; empty if absent."""
    match = PASSWORD_IN_URL.search(url)
    start = url.find("://") + 3
    if match is not None and match.start() + 3 == start:
        return start, match.end()
    end = re.compile(r"[^\s/:@?#]+@").match(url, start) if is_http(url) else None
    return start, end.end() if end else start


def _split_user(url: str) -> tuple[str, str, str]:
    """Return a URL without user and password, the user, and the password."""
    start, end = _user_span(url)
    user, _, password = url[start : max(start, end - 1)].partition(":")
    return url[:start] + url[end:], urllib.parse.unquote(user), urllib.parse.unquote(password)


def split_login(url: str) -> tuple[str, dict[str, str]]:
    """Return an http(s) URL without user and password, and the header that transmits them instead (empty if none)."""
    without_user, user, password = _split_user(url)
    if not user and not password:
        return url, {}
    return without_user, {"Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}


def open_filesystem(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL, and the path in it.  fsspec caches file systems within a process.

    The credentials in `s3://KEY:SECRET@bucket/...` are used, even in a chain such as simplecache::s3://...  Raises
    ImportError or ValueError for unsupported URLs.
    """
    import fsspec

    links, options = [], {}
    for link in url.split("::"):
        scheme = link.partition("://")[0]
        if scheme in _KEY_SCHEMES:
            link, key, secret = _split_user(link)
            if secret:
                options[scheme] = {"key": key, "secret": secret}
        links.append(link)
    return fsspec.core.url_to_fs("::".join(links), **options)  # type: ignore[no-any-return]
