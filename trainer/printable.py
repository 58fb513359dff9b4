"""Makes text safe to show and keep: without credentials and terminal control sequences.

Everything that is written to a terminal, a log or a file that others read asks here.  Knows nothing of the rest.
"""

from __future__ import annotations

import re
from typing import Any

MASK = "***"
"""What stands where credentials were."""


def printable(text: str) -> str:
    """Return the text as it may reach a terminal or a log: without control sequences, credentials in URLs masked."""
    return mask_credentials(_CONTROL.sub("", _LONE.sub("\ufffd", _SEQUENCE.sub("", text))))


_STRING = r"(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x80-\x9f\n]*(?:\x07|\x1b\\|\x9c)"
_SEQUENCE = re.compile(rf"{_STRING}|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|\x1b(?:[!-/][0-~]|[0-OQ-WYZ\\`-~])")
"""Control sequences of ECMA-48, 7-bit and 8-bit (C1): commands with a text (a title, say), CSI, and short ones."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""What is left of them, and of everything else that moves the cursor; lines and tabs stay."""
_LONE = re.compile("[\ud800-\udfff]")
"""Bytes that were no character; printed they would be bytes again."""


# ---------------------------------------------------------------------------------------------------------------
# Credentials


def mask_credentials(text: str) -> str:
    """Return the text with the passwords and keys of all URLs in it masked: scheme://user:***@host/path?token=***."""
    return _URL.sub(_mask_url, text)


def masked(tree: Any) -> Any:
    """Return a configuration's tree with the credentials of the URLs in it masked."""
    if isinstance(tree, dict):
        return {key: masked(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(masked(item) for item in tree)
    # A value is one URL up to its end, whatever the password has in it.
    return _WHOLE.sub(_mask_url, mask_credentials(tree)) if isinstance(tree, str) else tree


def is_masked(value: object) -> bool:
    """Return whether a value is a URL whose credentials were masked: it cannot be used."""
    return isinstance(value, str) and _MASKED.search(value) is not None


# The name of a scheme is short: a long word is not looked through again from each of its letters.
_URL = re.compile(r"[A-Za-z][\w+.-]{0,30}://(?:[^\s/?#<>]*@)?[^\s'\"<>]*")
_WHOLE = re.compile(r"[A-Za-z][\w+.-]{0,30}://.*", re.DOTALL)

_PASSWORD = re.compile(r"(://[^\s/:@?#\[]*:)(?!\d*(?:[/?#]|$))(?:[^/?#]*@|[^@]*@)")
"""In scheme://user:password@host; what is a port has digits alone.  A password may hold a slash that is not encoded."""
_USER = re.compile(r"(https?://)[^\s/:@?#]+@", re.IGNORECASE)
"""Of the web, a user without a password is a token."""
_NAMED = re.compile(
    r"([?&;#](?:[\w.-]*(?:token|secret|signature|passw(?:or)?d|passphrase|credential|api-?key|access[-_]?key(?:[-_]?id)?)"
    r"|(?:[\w.-]*[-_.])?(?:key|sig|pwd|pass|auth|authorization|jwt|sas))=)[^&;#]*",
    re.IGNORECASE,
)
_MASKED = re.compile(r"://[^/\s]*\*\*\*@|://\S*[?&;#][\w.-]+=\*\*\*(?:[&;#]|$)")


def _mask_url(found: re.Match[str]) -> str:
    url = _PASSWORD.sub(rf"\g<1>{MASK}@", found[0], count=1)
    url = _USER.sub(rf"\g<1>{MASK}@", url, count=1)
    return _NAMED.sub(rf"\g<1>{MASK}", url)
