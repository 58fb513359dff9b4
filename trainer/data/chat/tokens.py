"""Tokenizer for rendered chats: recognizes special tokens, and returns the character span of each id.

For plain text, `trainer.data.tokenizer` never produces special tokens.  A chat template, in contrast, spells out
special tokens that must be recognized.  A special token spelled in a message must still be encoded as text: `quoted`
hides it from the template and the tokenizer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.data.tokenizer import Tokenizer, find_tokenizer, tokenizer_file

QUOTE = "\U000f5150"
"""A character of the private use area, inserted into the spelling of a special token so that it is not recognized."""


class ChatTokenizer:
    """Tokenizer that recognizes special tokens spelled in a text, and returns the character span of each id.

    plain: the same tokenizer without recognition of special tokens.
    """

    def __init__(self, setting: str, key: str = "data.tokenizer") -> None:
        self.plain: Tokenizer = find_tokenizer(setting, key)
        self._content: dict[str, Any] = {}  # empty for `bytes`, which has no special tokens
        if setting != "bytes":
            self._content = json.loads(tokenizer_file(setting).read_bytes())
            # It would trim white space from the tokens' spans, and the template already writes the special tokens.
            self._content["post_processor"] = None
        special = [token["content"] for token in self._content.get("added_tokens", ()) if token.get("special")]
        longest_first = sorted(filter(None, special), key=len, reverse=True)
        self._special_tokens = longest_first
        self._special_pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    @property
    def vocab_size(self) -> int:
        """Exclusive upper bound of the ids."""
        return self.plain.vocab_size

    @property
    def name(self) -> str:
        """Identifies the tokenizer; tokenizers that produce different ids have different names."""
        return f"chat-{self.plain.name}"

    def quoted(self, value: Any) -> Any:
        """Return a message, or any JSON value, with QUOTE inserted into every special token that it spells."""
        if isinstance(value, str):
            return self._special_pattern.sub(
                lambda found: found[0][:1] + QUOTE + found[0][1:], value.replace(QUOTE, "")
            )
        if isinstance(value, Mapping):
            return {key: self.quoted(item) for key, item in value.items()}
        return [self.quoted(item) for item in value] if isinstance(value, (list, tuple)) else value

    def spelled_in(self, text: str) -> str:
        """Return the first special token that a text spells, or an empty string."""
        found = self._special_pattern.search(text)
        return found[0] if found else ""

    def spelled_by_content(self, text: str) -> str:
        """Return a special token that both the template and a message spell, or an empty string."""
        if QUOTE not in text:
            return ""
        rendered = (token for token in self._special_tokens if token in text)
        return next((token for token in rendered if f"{token[:1]}{QUOTE}{token[1:]}" in text), "")

    def is_added(self, number: int) -> bool:
        """Return whether an id belongs to an added token, such as an end of turn, rather than to a piece of text."""
        return any(token["id"] == number for token in self._content.get("added_tokens", ()))

    def has(self, text: str) -> bool:
        """Return whether a text is an added token."""
        return any(token["content"] == text for token in self._content.get("added_tokens", ()))

    def text_of(self, number: int) -> str:
        """Return the text of one id, which may be a special token."""
        return self.plain.decode([number]) if not self._content else str(self._special_tokenizer.id_to_token(number))

    def encode(self, text: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the ids of a text, and the (start, end) character span of each, of shape (num_ids, 2).

        Quoted special tokens are encoded as text; QUOTE itself counts as a character in the spans.
        """
        if not self._content:
            return self._encode_bytes(text)
        if QUOTE not in text:
            return self._encode(text, 0)
        parts, position = [], 0
        for found in re.finditer(f"{self._special_pattern.pattern}|$", text):
            parts += [
                self._encode_quoted(text[position : found.start()], position),
                self._encode(found[0], found.start()),
            ]
            position = found.end()
        return np.concatenate([ids for ids, _ in parts]), np.concatenate([spans for _, spans in parts])

    def _encode(self, text: str, start: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        found = self._special_tokenizer.encode(text, add_special_tokens=False)
        return np.array(found.ids, np.int64), np.array(found.offsets, np.int64).reshape(-1, 2) + start

    def _encode_quoted(self, text: str, start: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        is_text = np.array([character != QUOTE for character in text], bool)
        original_offsets = np.append(np.flatnonzero(is_text), len(text))
        found = self._plain_tokenizer.encode(text.replace(QUOTE, ""), add_special_tokens=False)
        spans = np.array(found.offsets, np.int64).reshape(-1, 2)
        return np.array(found.ids, np.int64), original_offsets[spans] + start

    def _encode_bytes(self, text: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        ids = np.frombuffer(text.encode(), np.uint8).astype(np.int64)
        spans = np.repeat(np.arange(len(text)), [len(character.encode()) for character in text])
        return ids, np.stack([spans, spans + 1], axis=1)

    @cached_property
    def _special_tokenizer(self) -> Any:
        return _tokenizer_of(self._content)

    @cached_property
    def _plain_tokenizer(self) -> Any:
        tokenizer = _tokenizer_of(self._content)
        tokenizer.encode_special_tokens = True
        return tokenizer


def _tokenizer_of(content: Mapping[str, Any]) -> Any:
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
