"""The tokenizer of a chat model: text to ids, special tokens among them, and where in the text each id stands.

Unlike that of plain text (`trainer.data.tokenizer`), where text is text: a chat template spells the special tokens.
What a message spells is text here too: `quoted` hides it from the template and the tokenizer.
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
"""A character of the private use area that stands within the spelling of a special token, so that it is none."""


class ChatTokenizer:
    """A tokenizer that reads the special tokens that a text spells, and knows where each of its ids stands.

    plain: the same tokenizer for text that holds none.
    """

    def __init__(self, setting: str, key: str = "data.tokenizer") -> None:
        self.plain: Tokenizer = find_tokenizer(setting, key)
        self._content: dict[str, Any] = {}  # of bytes, that have no special token
        if setting != "bytes":
            self._content = json.loads(tokenizer_file(setting).read_bytes())
            # It would cut white space from the places of tokens, and special tokens are the template's business.
            self._content["post_processor"] = None
        special = [token["content"] for token in self._content.get("added_tokens", ()) if token.get("special")]
        longest_first = sorted(filter(None, special), key=len, reverse=True)
        self._special = longest_first
        self._spelled = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    @property
    def vocab_size(self) -> int:
        """Every id is below it."""
        return self.plain.vocab_size

    @property
    def name(self) -> str:
        """Another one for a tokenizer that gives other ids."""
        return f"chat-{self.plain.name}"

    def quoted(self, value: Any) -> Any:
        """Return a message, or whatever is in one, with the special tokens that it spells made text."""
        if isinstance(value, str):
            return self._spelled.sub(lambda found: found[0][:1] + QUOTE + found[0][1:], value.replace(QUOTE, ""))
        if isinstance(value, Mapping):
            return {key: self.quoted(item) for key, item in value.items()}
        return [self.quoted(item) for item in value] if isinstance(value, (list, tuple)) else value

    def spelled_in(self, text: str) -> str:
        """Return the first special token that a text spells, or nothing."""
        found = self._spelled.search(text)
        return found[0] if found else ""

    def spelled_by_content(self, text: str) -> str:
        """Return a special token that a rendered text has from its template, and that a message spells as well."""
        if QUOTE not in text:
            return ""
        rendered = (token for token in self._special if token in text)
        return next((token for token in rendered if f"{token[:1]}{QUOTE}{token[1:]}" in text), "")

    def is_added(self, number: int) -> bool:
        """Return whether an id is that of a token of its own, such as an end of turn, and not of a piece of text."""
        return any(token["id"] == number for token in self._content.get("added_tokens", ()))

    def has(self, text: str) -> bool:
        """Return whether a text is a token of its own."""
        return any(token["content"] == text for token in self._content.get("added_tokens", ()))

    def text_of(self, number: int) -> str:
        """Return the text of one id; that of a special token too."""
        return self.plain.decode([number]) if not self._content else str(self._reads_special.id_to_token(number))

    def encode(self, text: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the ids of a text, and (first, behind) of each: the characters it stands for, shape (number, 2).

        What is quoted becomes text; QUOTE itself counts as a character.
        """
        if not self._content:
            return self._encode_bytes(text)
        if QUOTE not in text:
            return self._encode(text, 0)
        parts, at = [], 0
        for found in re.finditer(f"{self._spelled.pattern}|$", text):
            parts += [self._encode_quoted(text[at : found.start()], at), self._encode(found[0], found.start())]
            at = found.end()
        return np.concatenate([ids for ids, _ in parts]), np.concatenate([places for _, places in parts])

    def _encode(self, text: str, start: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        found = self._reads_special.encode(text, add_special_tokens=False)
        return np.array(found.ids, np.int64), np.array(found.offsets, np.int64).reshape(-1, 2) + start

    def _encode_quoted(self, text: str, start: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        is_text = np.array([character != QUOTE for character in text], bool)
        place_of = np.append(np.flatnonzero(is_text), len(text))
        found = self._reads_text.encode(text.replace(QUOTE, ""), add_special_tokens=False)
        places = np.array(found.offsets, np.int64).reshape(-1, 2)
        return np.array(found.ids, np.int64), place_of[places] + start

    def _encode_bytes(self, text: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        ids = np.frombuffer(text.encode(), np.uint8).astype(np.int64)
        places = np.repeat(np.arange(len(text)), [len(character.encode()) for character in text])
        return ids, np.stack([places, places + 1], axis=1)

    @cached_property
    def _reads_special(self) -> Any:
        return _tokenizer_of(self._content)

    @cached_property
    def _reads_text(self) -> Any:
        tokenizer = _tokenizer_of(self._content)
        tokenizer.encode_special_tokens = True
        return tokenizer


def _tokenizer_of(content: Mapping[str, Any]) -> Any:
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
