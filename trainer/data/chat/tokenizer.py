"""Tokenizes rendered chats, in which special tokens are recognized.

`trainer.data.tokenizer` never turns text into special tokens.  A chat template, in contrast, writes special tokens as
text, and they must be recognized.  A special token that is spelled out in a message must still be encoded as text, so
`ChatTokenizer.quoted` hides it from the template and the tokenizer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.data.tokenizer import FileTokenizer, Tokenizer, find_tokenizer, tokenizer_file
from trainer.errors import nearest, setting_error

QUOTE = "\U000f5150"
"""A character of the private use area, inserted into the spelling of a special token so that it is not recognized."""


class ChatTokenizer:
    """Tokenizer that recognizes special tokens in a text, and returns the character span of each id.

    plain: the same tokenizer, except that it encodes special tokens as text.
    accepted: special tokens that are recognized in messages too; the value of `data.special_tokens`.

    Raises UserError if the tokenizer cannot be used, or if one of `accepted` is not one of its special tokens.
    """

    def __init__(self, setting: str, key: str = "data.tokenizer", accepted: Sequence[str] = ()) -> None:
        self.plain: Tokenizer = find_tokenizer(setting, key)
        self.accepted = frozenset(accepted)
        self._content: dict[str, Any] = {}  # empty for `bytes`, which has no special tokens
        if setting != "bytes":
            self._content = json.loads(tokenizer_file(setting).read_bytes())
            # A post-processor may exclude white space from the tokens' spans.  It would also add special tokens, which
            # the template already writes.
            self._content["post_processor"] = None
        # The library's ids: a file may list one token twice, and then the library keeps the id that the vocabulary has.
        added = self.plain.library.get_added_tokens_decoder() if isinstance(self.plain, FileTokenizer) else {}
        self.added_tokens: dict[str, int] = {token.content: token_id for token_id, token in added.items()}
        """The id of each token that is not ordinary text, such as the end-of-turn token."""
        self.longest_added_tokens = sorted(filter(None, self.added_tokens), key=len, reverse=True)
        special = {token.content for token in added.values() if token.special} - {""}
        for token in accepted:
            if token not in special:
                rule = f"{token!r} is not a special token of data.tokenizer={setting}"
                best = nearest(token, sorted(special))
                meant = [best if other == token else other for other in accepted] if best else None
                fix = "" if best else "leave it out"
                raise setting_error("data.special_tokens", list(accepted), rule, proposal=meant, fix=fix)
        self._special_tokens = sorted(special, key=len, reverse=True)  # the longest one must match
        self._special_pattern = _pattern_of(self._special_tokens)
        self._quoted_pattern = _pattern_of([token for token in self._special_tokens if token not in self.accepted])

    @property
    def vocab_size(self) -> int:
        """Exclusive upper bound of the ids."""
        return self.plain.vocab_size

    @property
    def name(self) -> str:
        """Identifies the tokenizer: two tokenizers with the same name give the same ids."""
        return f"chat-{self.plain.name}"

    def quoted(self, value: Any) -> Any:
        """Return a message or any other JSON value, with QUOTE inserted into each special token that it spells out.

        Accepted tokens are left as they are.
        """
        if isinstance(value, str):
            return self._quoted_pattern.sub(lambda match: match[0][:1] + QUOTE + match[0][1:], value.replace(QUOTE, ""))
        if isinstance(value, Mapping):
            return {self.quoted(key): self.quoted(item) for key, item in value.items()}
        return [self.quoted(item) for item in value] if isinstance(value, (list, tuple)) else value

    def find_special_tokens(self, text: str) -> set[str]:
        """Return the special tokens that are spelled out in a text and are not accepted."""
        return {match[0] for match in self._quoted_pattern.finditer(text)}

    def find_quoted_tokens(self, text: str) -> set[str]:
        """Return the special tokens that are quoted in a text."""
        if QUOTE not in text:
            return set()
        return {token for token in self._special_tokens if f"{token[:1]}{QUOTE}{token[1:]}" in text}

    def encode_message(self, text: str) -> NDArray[np.integer[Any]]:
        """Return the ids of a text in which only accepted special tokens are recognized."""
        if not self.accepted:
            return self.plain.encode(text)
        return self.encode(self.quoted(text))[0]

    def token_text(self, token_id: int) -> str:
        """Return the text of an id, which may be a special token."""
        return (
            self.plain.decode([token_id]) if not self._content else str(self._special_tokenizer.id_to_token(token_id))
        )

    def encode(self, text: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the ids of a text, and the (start, end) character span of each, of shape (num_ids, 2).

        Quoted special tokens are encoded as text; QUOTE itself counts as a character in the spans.
        """
        if not self._content:
            ids = np.frombuffer(text.encode(), np.uint8).astype(np.int64)
            starts = np.repeat(np.arange(len(text)), [len(character.encode()) for character in text])
            return ids, np.stack([starts, starts + 1], axis=1)
        if QUOTE not in text:
            return self._encode(text, 0)
        parts, position = [], 0
        for match in re.finditer(f"{self._special_pattern.pattern}|$", text):
            parts += [
                self._encode_quoted(text[position : match.start()], position),
                self._encode(match[0], match.start()),
            ]
            position = match.end()
        return np.concatenate([ids for ids, _ in parts]), np.concatenate([spans for _, spans in parts])

    def _encode(self, text: str, start: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        encoding = self._special_tokenizer.encode(text, add_special_tokens=False)
        return np.array(encoding.ids, np.int64), np.array(encoding.offsets, np.int64).reshape(-1, 2) + start

    def _encode_quoted(self, text: str, start: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        is_text = np.array([character != QUOTE for character in text], bool)
        original_offsets = np.append(np.flatnonzero(is_text), len(text))
        encoding = self._plain_tokenizer.encode(text.replace(QUOTE, ""), add_special_tokens=False)
        spans = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        return np.array(encoding.ids, np.int64), original_offsets[spans] + start

    @cached_property
    def _special_tokenizer(self) -> Any:
        return _tokenizer_of(self._content)

    @cached_property
    def _plain_tokenizer(self) -> Any:
        tokenizer = _tokenizer_of(self._content)
        tokenizer.encode_special_tokens = True
        return tokenizer


def _pattern_of(tokens: Sequence[str]) -> re.Pattern[str]:
    """Return a pattern that matches any of the tokens."""
    return re.compile("|".join(map(re.escape, tokens)) or "(?!)")


def _tokenizer_of(content: Mapping[str, Any]) -> Any:
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
