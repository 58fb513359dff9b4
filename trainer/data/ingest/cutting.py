"""Long documents in pieces: cut only where the ids of the pieces are, one after the other, those of the whole.

Ids do not run across a border of the pre-tokenizer.  Whether there always is one behind a line end, between two
characters that are no white space, or before a space between two letters, is found out by trying every pair of ASCII
characters and some of each script: what a tokenizer does at a border depends on what stands next to it.
Where that is not so, a document is tokenized as a whole, whatever memory that takes.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache, cached_property
from typing import Any

from trainer.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer

PIECE = 1 << 20
"""Bytes of a piece, at most, where it can be cut: a library takes some 200 bytes of memory for each."""

_LETTERS = "abcdefghijklmnopqrstuvwxyz"

_RANGES = [
    (0x21, 0x7E), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0x3041, 0x3096), (0x30A1, 0x30FA), (0x410, 0x42F),
    (0x430, 0x44F), (0x391, 0x3A1), (0x3B1, 0x3C9), (0x627, 0x64A), (0x5D0, 0x5EA), (0xE01, 0xE2E),
    (0x905, 0x939), (0x985, 0x9A8), (0xE0, 0xF6), (0xF8, 0xFF), (0xC0, 0xD6),
]  # fmt: skip
"""Characters that are alike, the first and the last: within each, tokenizers know no difference but in ASCII."""

_MARKS = "".join(map(chr, (0x3002, 0x3001, 0xFF0C, 0xFF01, 0xFF1F, 0xFF1A, 0xFF1B, 0x300D, 0x300F, 0xFF09, 0x201D)))
"""Signs that end lines in other scripts."""

_INSIDE = "".join(f"{re.escape(chr(first))}-{re.escape(chr(last))}" for first, last in _RANGES)
_LINE_END = re.compile(f"[{_INSIDE}{_MARKS}]\n(?=[{_INSIDE}])")
_SPACE = re.compile("[a-z](?= [a-z])")

_NEAR = 1 << 14
"""Bytes before the end of a piece in which a place to cut is looked for first."""


class Cutter:
    """Cuts the documents of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def is_long(self, text: bytes) -> bool:
        """Return whether a document is to be cut."""
        return len(text) > PIECE

    def cut(self, pieces: Iterable[bytes]) -> Iterator[bytes]:
        """Yield a document again, in pieces of at most PIECE bytes where it can be cut."""
        held, looked_at = b"", 0
        for piece in pieces:
            held += piece
            while len(held) > PIECE:
                end = self._find(held, looked_at)
                if not end:
                    looked_at = max(PIECE, len(held) - _NEAR)  # what comes may begin with the second half of a border
                    break
                yield held[:end]
                held, looked_at = held[end:], 0
        if held:
            yield held

    def _find(self, text: bytes, looked_at: int) -> int:
        """Return the last place in a piece where `text` may be cut, or else the first one beyond; 0 for none.

        There is none before `looked_at`.
        """
        if isinstance(self._tokenizer, ByteTokenizer):
            return PIECE
        if not looked_at:
            for start in (max(0, PIECE - _NEAR), 0):
                for mark in self._marks:
                    if end := _last(mark, text[start:PIECE]):
                        return start + end
        found = (_first(mark, text[max(PIECE, looked_at) - 8 :]) for mark in self._marks)
        ends = [end for end in found if end]
        return max(PIECE, looked_at) - 8 + min(ends) if ends else 0

    @cached_property
    def _marks(self) -> list[re.Pattern[str]]:
        """The kinds of places where this tokenizer's ids never run across."""
        if not isinstance(self._tokenizer, FileTokenizer):
            return []
        library = self._tokenizer.library
        if _reaches_across(library):
            return []
        found = []
        left, right = _examples(_MARKS), _examples("")
        if _are_borders(library, ((f"{first}\n", second) for first in left for second in right)):
            found.append(_LINE_END)
        if _are_borders(library, ((left, f" {right}") for left, right in itertools.product(_LETTERS, _LETTERS))):
            found.append(_SPACE)
        return found


def _last(mark: re.Pattern[str], text: bytes) -> int:
    """Return where the last match ends, in bytes; 0 if there is none.  A character may be cut off at either end."""
    shown = text.decode(errors="surrogateescape")
    last = max((found.end() for found in mark.finditer(shown)), default=0)
    return len(shown[:last].encode(errors="surrogateescape"))


def _first(mark: re.Pattern[str], text: bytes) -> int:
    found = mark.search(text.decode(errors="surrogateescape"))
    return len(found.string[: found.end()].encode(errors="surrogateescape")) if found else 0


def _examples(more: str) -> list[str]:
    """Return all of ASCII's characters in the first of the ranges, three of each other one, and more."""
    (first, last), *others = _RANGES
    every = [*range(first, last + 1), *(code for a, b in others for code in (a, (a + b) // 2, b))]
    return [*map(chr, every), *more]


def _reaches_across(library: Any) -> bool:
    """Return whether ids may run across what the pre-tokenizer separates: added tokens that take white space in."""
    added = library.get_added_tokens_decoder().values()
    taken = [token for token in added if not token.special]
    return library.pre_tokenizer is None or any(
        token.lstrip or token.rstrip or re.search(r"\s", token.content) for token in taken
    )


_CONTEXTS = (("", ""), ("x", "x"), ("1", "1"), (".", "."), (" ", " "), ("X", "X"), ("the ", " end"))
"""Text further off on both sides."""


def _are_borders(library: Any, pairs: Iterable[tuple[str, str]]) -> bool:
    """Return whether each pair of texts means the same side by side as each alone, in all contexts."""
    normalize: Callable[[str], str] = library.normalizer.normalize_str if library.normalizer else str
    split = library.pre_tokenizer.pre_tokenize_str

    def words(text: str) -> list[str]:
        return [word for word, _ in split(normalize(text))]

    words_of_half = cache(words)  # each is part of hundreds of pairs
    contexts = itertools.cycle(_CONTEXTS)
    for left, right in pairs:
        before, behind = next(contexts)
        first, second = before + left, right + behind
        if words(first + second) != words_of_half(first) + words_of_half(second):
            return False
    return True
