"""URLs: what is path and what is query in them, their credentials, and the fsspec file system behind one.

In http(s) URLs a `?` begins the query, as everywhere on the web; globs there are `*` and `[...]`, in the path alone.
Elsewhere (s3://, gs://, memory://) there is no query, and `?` is a glob, too.
"""

from __future__ import annotations

import base64
import re
import urllib.parse
from typing import Any

from trainer.errors import PASSWORD_IN_URL, is_masked_query

_WITH_KEYS = ("s3", "s3a")
"""Schemes whose fsspec library takes key and secret as options, not from the URL."""
_SIGNED = re.compile(r"[?&](?:x-amz-signature|x-goog-signature|signature|sig)=", re.IGNORECASE)
_OF_A_SIGNATURE = re.compile(
    r"(?:x-(?:amz|goog)-.*|expires|signature|key-pair-id|policy|awsaccesskeyid|googleaccessid"
    r"|s[a-z]|ske|sks|skt|skv|skoid|sktid|sig|spr|sip|rsc[a-z])$",
    re.IGNORECASE,
)
"""Parameters that are renewed with a signature: of AWS, Google, CloudFront, and Azure (SAS)."""


def is_http(url: str) -> bool:
    """Return whether a URL is one of the web."""
    return url.startswith(("http://", "https://"))


def split_query(url: str) -> tuple[str, str]:
    """Return a URL without its query, and the query with its `?`; that is empty where there is none."""
    location, mark, query = url.partition("?") if is_http(url) else (url, "", "")
    return location, mark + query


def has_pattern(url: str) -> bool:
    """Return whether a URL is a glob."""
    if is_http(url):
        path = split_query(url)[0].partition("://")[2].partition("/")[2]  # [::1] is a host
        return bool(re.search(r"[*\[]", path))
    return bool(re.search(r"[*?\[]", url))


def join(url: str, name: str) -> str:
    """Return the URL of a file in the folder at `url`, with the same query: a token there holds for all of it."""
    location, query = split_query(url)
    return f"{location.rstrip('/')}/{name}{query}"


def parent(url: str) -> str:
    """Return the URL of the folder that a file is in, with the same query."""
    location, query = split_query(url)
    return f"{location.rpartition('/')[0]}{query}"


def with_suffix(url: str, old: str, new: str) -> str:
    """Return a URL whose path ends in `new` where it ended in `old`, with the same query."""
    location, query = split_query(url)
    return f"{location.removesuffix(old)}{new}{query}"


def without_credentials(url: str) -> str:
    """Return what a URL names, whoever asks for it: without user, password, token, and signature.

    Caches and comparisons go by this, so that a renewed token or signature still means the same file.  Masked
    credentials are left out as well: it may be what a run has stored.
    """
    if "://" not in url:
        return url
    location, query = split_query(url)
    location, _, _ = _split_user(location)
    is_signed = _SIGNED.search(query) is not None
    kept = [
        part
        for part in query[1:].split("&")
        if part and not is_masked_query(part) and not (is_signed and _OF_A_SIGNATURE.match(part.partition("=")[0]))
    ]
    return location + ("?" + "&".join(kept) if kept else "")


def with_credentials_of(url: str, other: str) -> str:
    """Return a URL that was found by way of `other` with the credentials that `other` has."""
    location, query = split_query(url)
    bare, own_user, _ = _split_user(location)
    start, end = _user_span(other)
    user = other[start:end]
    if user and not own_user:
        location = bare.replace("://", f"://{user}", 1)
    return location + (query or split_query(other)[1])


def _user_span(url: str) -> tuple[int, int]:
    """Return where `user:password@` is in a URL; an empty span where there is none."""
    found = PASSWORD_IN_URL.search(url)
    begin = url.find("://") + 3
    if found is not None and found.start() + 3 == begin:
        return begin, found.end()
    end = re.compile(r"[^\s/:@?#]+@").match(url, begin) if is_http(url) else None
    return begin, end.end() if end else begin


def _split_user(url: str) -> tuple[str, str, str]:
    """Return a URL without user and password, and these two."""
    begin, end = _user_span(url)
    user, _, password = url[begin : max(begin, end - 1)].partition(":")
    return url[:begin] + url[end:], urllib.parse.unquote(user), urllib.parse.unquote(password)


def split_login(url: str) -> tuple[str, dict[str, str]]:
    """Return an http(s) URL without user and password, and the header that carries these instead."""
    bare, user, password = _split_user(url)
    if not user and not password:
        return url, {}
    return bare, {"Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}


def open_filesystem(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL, and the path there.  One for each process: fsspec keeps them.

    `s3://KEY:SECRET@bucket/...` signs with these, in a chain such as simplecache::s3://..., too.  Raises ImportError
    or ValueError for a kind of URL that cannot be used.
    """
    import fsspec

    links, options = [], {}
    for link in url.split("::"):
        scheme = link.partition("://")[0]
        if scheme in _WITH_KEYS:
            link, key, secret = _split_user(link)
            if secret:
                options[scheme] = {"key": key, "secret": secret}
        links.append(link)
    return fsspec.core.url_to_fs("::".join(links), **options)  # type: ignore[no-any-return]
