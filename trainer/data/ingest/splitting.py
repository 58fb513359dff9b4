"""Splits long documents into pieces whose ids, concatenated, are those of the full document.

Tokens do not cross the boundaries of the pre-tokenizer.  Candidate boundaries are those after a newline between two
non-space characters, and before a space between two letters.  Whether a tokenizer always splits there is tested on
every pair of ASCII characters and some of each script, since the result can depend on the adjacent characters.  If it
does not, documents are tokenized in one piece, whatever memory that takes.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache, cached_property
from typing import Any

from trainer.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer

MAX_PIECE_BYTES = 1 << 20
"""Maximum size of a piece in bytes, if it can be cut: tokenizing takes about 200 bytes of memory per byte."""

_LETTERS = "abcdefghijklmnopqrstuvwxyz"

_RANGES = [
    (0x21, 0x7E), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0x3041, 0x3096), (0x30A1, 0x30FA), (0x410, 0x42F),
    (0x430, 0x44F), (0x391, 0x3A1), (0x3B1, 0x3C9), (0x627, 0x64A), (0x5D0, 0x5EA), (0xE01, 0xE2E),
    (0x905, 0x939), (0x985, 0x9A8), (0xE0, 0xF6), (0xF8, 0xFF), (0xC0, 0xD6),
]  # fmt: skip
"""Ranges (first, last) of similar characters: outside ASCII, tokenizers treat all characters of a range alike."""

_PUNCTUATION = "".join(
    map(chr, (0x3002, 0x3001, 0xFF0C, 0xFF01, 0xFF1F, 0xFF1A, 0xFF1B, 0x300D, 0x300F, 0xFF09, 0x201D))
)
"""Punctuation that ends lines in other scripts."""

_WORD_CHARACTERS = "".join(f"{re.escape(chr(first))}-{re.escape(chr(last))}" for first, last in _RANGES)
_LINE_END = re.compile(f"[{_WORD_CHARACTERS}{_PUNCTUATION}]\n(?=[{_WORD_CHARACTERS}])")
_SPACE = re.compile("[a-z](?= [a-z])")

_SEARCH_BYTES = 1 << 14
"""The last bytes of a piece, which are searched for a boundary first."""


class DocumentSplitter:
    """Splits long documents for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def is_long(self, text: bytes) -> bool:
        """Return whether a document is long enough to be split."""
        return len(text) > MAX_PIECE_BYTES

    def cut(self, pieces: Iterable[bytes]) -> Iterator[bytes]:
        """Yield a document in pieces of at most `MAX_PIECE_BYTES`, or longer ones if it has no boundary."""
        held, searched_to = b"", 0
        for piece in pieces:
            held += piece
            while len(held) > MAX_PIECE_BYTES:
                end = self._find_boundary(held, searched_to)
                if not end:
                    searched_to = max(
                        MAX_PIECE_BYTES, len(held) - _SEARCH_BYTES
                    )  # a boundary may span the end of `held`
                    break
                yield held[:end]
                held, searched_to = held[end:], 0
        if held:
            yield held

    def _find_boundary(self, text: bytes, searched_to: int) -> int:
        """Return the last boundary within `MAX_PIECE_BYTES`, else the first one after that, else 0.

        `text` is known to have no boundary before `searched_to`.
        """
        if isinstance(self._tokenizer, ByteTokenizer):
            return MAX_PIECE_BYTES
        if not searched_to:
            for start in (max(0, MAX_PIECE_BYTES - _SEARCH_BYTES), 0):
                for pattern in self._boundary_patterns:
                    if end := _last(pattern, text[start:MAX_PIECE_BYTES]):
                        return start + end
        found = (_first(pattern, text[max(MAX_PIECE_BYTES, searched_to) - 8 :]) for pattern in self._boundary_patterns)
        ends = [end for end in found if end]
        return max(MAX_PIECE_BYTES, searched_to) - 8 + min(ends) if ends else 0

    @cached_property
    def _boundary_patterns(self) -> list[re.Pattern[str]]:
        """Patterns of the boundaries that this tokenizer's tokens never cross."""
        if not isinstance(self._tokenizer, FileTokenizer):
            return []
        library = self._tokenizer.library
        if _crosses_boundaries(library):
            return []
        found = []
        left, right = _examples(_PUNCTUATION), _examples("")
        if _always_splits(library, ((f"{first}\n", second) for first in left for second in right)):
            found.append(_LINE_END)
        if _always_splits(library, ((left, f" {right}") for left, right in itertools.product(_LETTERS, _LETTERS))):
            found.append(_SPACE)
        return found


def _last(pattern: re.Pattern[str], text: bytes) -> int:
    """Return the byte offset at which the last match ends, or 0.  `text` may begin or end within a character."""
    shown = text.decode(errors="surrogateescape")
    last = max((found.end() for found in pattern.finditer(shown)), default=0)
    return len(shown[:last].encode(errors="surrogateescape"))


def _first(pattern: re.Pattern[str], text: bytes) -> int:
    found = pattern.search(text.decode(errors="surrogateescape"))
    return len(found.string[: found.end()].encode(errors="surrogateescape")) if found else 0


def _examples(more: str) -> list[str]:
    """Return every character of the first range (ASCII), three of each other range, and those in `more`."""
    (first, last), *others = _RANGES
    every = [*range(first, last + 1), *(code for a, b in others for code in (a, (a + b) // 2, b))]
    return [*map(chr, every), *more]


def _crosses_boundaries(library: Any) -> bool:
    """Return whether tokens may cross the pre-tokenizer's boundaries: added tokens may include white space."""
    added = library.get_added_tokens_decoder().values()
    taken = [token for token in added if not token.special]
    return library.pre_tokenizer is None or any(
        token.lstrip or token.rstrip or re.search(r"\s", token.content) for token in taken
    )


_CONTEXTS = (("", ""), ("x", "x"), ("1", "1"), (".", "."), (" ", " "), ("X", "X"), ("the ", " end"))
"""Text before and after the pair, to vary the context."""


def _always_splits(library: Any, pairs: Iterable[tuple[str, str]]) -> bool:
    """Return whether the pre-tokenizer always splits between the texts of each pair, in all contexts."""
    normalize: Callable[[str], str] = library.normalizer.normalize_str if library.normalizer else str
    split = library.pre_tokenizer.pre_tokenize_str

    def words(text: str) -> list[str]:
        return [word for word, _ in split(normalize(text))]

    words_of_half = cache(words)  # each half occurs in hundreds of pairs
    contexts = itertools.cycle(_CONTEXTS)
    for left, right in pairs:
        before, behind = next(contexts)
        first, second = before + left, right + behind
        if words(first + second) != words_of_half(first) + words_of_half(second):
            return False
    return True
