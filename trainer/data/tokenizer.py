"""Tokenizers convert text to token ids and back, and know the special tokens around a document, such as BOS and EOS.

Every tokenizer has an end-of-document token.  For a Hugging Face tokenizer it is usually the EOS token, which is named
only in the configuration files next to tokenizer.json; the post-processor in tokenizer.json determines which special
tokens are added to a text automatically.

This module does not import torch.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from trainer.errors import UserError, nearest, setting_error
from trainer.files import read_json

if TYPE_CHECKING:
    import tokenizers

    from trainer.config.schema import DataSection


END_OF_DOCUMENT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>")
"""Common names of the end-of-document token, tried in this order if nothing else determines it: see `FileTokenizer`."""

_BEGINNING_OF_TEXT = ("<|begin_of_text|>", "<s>", "<bos>", "<|startoftext|>", "[BOS]")
"""Common names of the beginning-of-text token, tried in this order if nothing else determines it."""

_RULES_VERSION = "text is text"
"""Part of a tokenizer's name, and therefore of cache keys.  Change it if a code change makes the same tokenizer file
give different tokens.  The current value refers to the rule that special tokens in a text are encoded as plain text."""


class Tokenizer(ABC):
    """Converts text to ids below `vocab_size`, and back.

    name: identifies the tokenizer, and is stored with the tokens; equal only for tokenizers that give the same ids.
    vocab_size: exclusive upper bound on the ids.
    end_id: the end-of-document token.
    start_ids: all special tokens before a document; `encode` does not add them.
    end_ids: all special tokens after a document; `encode` does not add them either.
    """

    name: str
    vocab_size: int
    end_id: int
    start_ids: tuple[int, ...]
    end_ids: tuple[int, ...]

    @abstractmethod
    def encode(self, text: str | bytes) -> NDArray[np.integer[Any]]:
        """Return the ids of `text` as a one-dimensional array."""

    @abstractmethod
    def decode(self, ids: Sequence[int] | NDArray[np.integer[Any]]) -> str:
        """Return the text of `ids`; invalid UTF-8 becomes U+FFFD.

        End-of-document tokens are dropped; other special tokens may be too.
        """


class ByteTokenizer(Tokenizer):
    """Byte-level tokenizer: ids 0 to 255 are the bytes, 256 is the end-of-document token."""

    name = "bytes"
    vocab_size = 257
    end_id = 256
    start_ids = ()
    end_ids = (end_id,)

    def encode(self, text: str | bytes) -> NDArray[np.integer[Any]]:
        """Return the bytes of `text` as uint8; a str is encoded as UTF-8."""
        return np.frombuffer(text.encode() if isinstance(text, str) else text, dtype=np.uint8)

    def decode(self, ids: Sequence[int] | NDArray[np.integer[Any]]) -> str:
        """Return the text of `ids`; invalid UTF-8 becomes U+FFFD, and end-of-document tokens are dropped."""
        values = np.asarray(ids, dtype=np.int64)
        return values[values < 256].astype(np.uint8).tobytes().decode(errors="replace")


class FileTokenizer(Tokenizer):
    """A Hugging Face `tokenizer.json`, read with the `tokenizers` library (the extra `hf`).

    Text never becomes a special token, even if it spells one out.  A document starts and ends with the tokens that the
    post-processor adds.  If the end-of-document token is not among those at the end, it follows them.  It is the token
    named in the configuration files next to the tokenizer (see `_configured_id`), otherwise the last token that the
    post-processor adds, otherwise the first of END_OF_DOCUMENT that exists.

    bos: whether documents start with the beginning-of-text token; None if the post-processor decides.
    key: the setting to name in error messages.

    Raises UserError if the library or the file is missing, if the file is not a tokenizer, if there is no
    end-of-document token, or if `bos` is True and there is no beginning-of-text token.
    """

    def __init__(self, path: str, key: str = "data.tokenizer", bos: bool | None = None) -> None:
        try:
            content = Path(path).expanduser().read_bytes()
        except OSError as error:
            raise setting_error(key, path, f"cannot be read ({error.strerror})", "bytes") from error
        try:
            import tokenizers
        except ImportError as error:
            rule = "a tokenizer file needs the `tokenizers` library: pip install 'meshtrainer[hf]'"
            raise setting_error(key, path, rule, "bytes") from error
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        except BaseException as error:  # `tokenizers` raises a bare Exception or a Rust panic for an invalid file
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            rule = f"is not a Hugging Face tokenizer.json ({error})"
            raise setting_error(key, path, rule, fix="download or save the file again") from error
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()  # the file may contain a model's maximum length
        self._tokenizer.no_padding()
        ids: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(ids.values()) + 1  # not len(ids): there may be gaps
        self.start_ids, added_after = added_ids(self._tokenizer)
        if bos is not None:
            bos_id = _configured_id(_BOS_KEYS, Path(path).expanduser(), ids, key)
            if bos_id is None and self.start_ids:
                bos_id = self.start_ids[0]
            if bos_id is None:
                bos_id = next((ids[name] for name in _BEGINNING_OF_TEXT if name in ids), None)
            other_start_ids = tuple(number for number in self.start_ids if number != bos_id)
            if bos and bos_id is None:
                names = ", ".join(_BEGINNING_OF_TEXT)
                raise missing_bos_error(path, f"tokenizer_config.json does not name one, and it has none of {names}")
            self.start_ids = (bos_id, *other_start_ids) if bos and bos_id is not None else other_start_ids
        self.end_id = self._find_end(Path(path).expanduser(), ids, added_after, key)
        self.end_ids = added_after if self.end_id in added_after else (*added_after, self.end_id)
        token_rules = repr((_RULES_VERSION, self.start_ids, self.end_ids, self.end_id)).encode()
        self.name = f"{Path(path).stem}:{hashlib.sha256(content + token_rules).hexdigest()[:16]}"

    @property
    def library(self) -> tokenizers.Tokenizer:
        """The underlying `tokenizers.Tokenizer`, which encodes special tokens as text; do not modify it."""
        return self._tokenizer

    def _find_end(self, path: Path, ids: dict[str, int], added_after: tuple[int, ...], key: str) -> int:
        end_id = _configured_id(_EOS_KEYS, path, ids, key)
        if end_id is None and added_after:
            end_id = added_after[-1]
        if end_id is None:
            end_id = next((ids[name] for name in END_OF_DOCUMENT if name in ids), None)
        if end_id is None:
            names = ", ".join(END_OF_DOCUMENT)
            rule = f"has no end-of-document token: tokenizer_config.json does not name one, and it has none of {names}"
            raise setting_error(key, path, rule, "bytes")
        return end_id

    def encode(self, text: str | bytes) -> NDArray[np.integer[Any]]:
        """Return the ids of `text`, without special tokens; invalid UTF-8 becomes U+FFFD first."""
        if isinstance(text, bytes):
            text = text.decode(errors="replace")
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.uint32)

    def decode(self, ids: Sequence[int] | NDArray[np.integer[Any]]) -> str:
        """Return the text of `ids`; special tokens, including the end-of-document token, are dropped."""
        return str(self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=True))


def missing_bos_error(tokenizer: object, why: str) -> UserError:
    """Return the UserError for `data.bos=true` with a tokenizer that has no beginning-of-text token."""
    return setting_error("data.bos", True, f"{tokenizer} has no beginning-of-text token: {why}", None)


def tokenizer_of(data: DataSection) -> Tokenizer:
    """Return the tokenizer that the data settings select.  Raises UserError if it cannot be found."""
    return find_tokenizer(data.tokenizer, bos=data.bos)


def find_tokenizer(name_or_path: str, key: str = "data.tokenizer", bos: bool | None = None) -> Tokenizer:
    """Return the tokenizer that `data.tokenizer` names.

    name_or_path: `bytes`, or the path of a tokenizer.json or of its folder.
    key: the setting or option that contains it, for messages.
    bos: see `FileTokenizer`.

    Raises UserError if there is no such tokenizer.
    """
    if name_or_path == "bytes":
        if bos:
            raise missing_bos_error("bytes", "its tokens are the 256 bytes, and one that ends a document")
        return ByteTokenizer()
    if not tokenizer_file(name_or_path).is_file():
        is_path = name_or_path.endswith(".json") or "/" in name_or_path
        explanation = "; there is no such file" if is_path else ""
        rule = f"must be bytes, or the path of a Hugging Face tokenizer.json{explanation}"
        fix = "download the tokenizer.json of that model, and give its path"
        suggestion = nearest(name_or_path, ["bytes"])
        raise setting_error(key, name_or_path, rule, proposal=suggestion, fix="" if suggestion else fix)
    return FileTokenizer(str(tokenizer_file(name_or_path)), key, bos)


def tokenizer_file(path: str) -> Path:
    """Return the tokenizer file at a path: the path itself, or the tokenizer.json in a folder."""
    expanded = Path(path).expanduser()
    return expanded / "tokenizer.json" if expanded.is_dir() else expanded


# -- special tokens ---------------------------------------------------------------------------------------------------

_EOS_KEYS = (
    ("tokenizer_config.json", "eos_token"),
    ("special_tokens_map.json", "eos_token"),
    ("generation_config.json", "eos_token_id"),
    ("config.json", "eos_token_id"),
)
"""The files that may name the EOS token, and the key in each.  The tokenizer's files come before the model's."""

_BOS_KEYS = tuple((name, field.replace("eos", "bos")) for name, field in _EOS_KEYS)
"""The same for the BOS token."""


def added_ids(tokenizer: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids that a tokenizer's post-processor adds before a text, and those that it adds after the text."""
    if tokenizer.num_special_tokens_to_add(is_pair=False) == 0:
        return (), ()
    for text in ("a", "0", *sorted(tokenizer.get_vocab(with_added_tokens=False))):
        encoding = tokenizer.encode(text)
        is_text = [not mask for mask in encoding.special_tokens_mask]
        if any(is_text):
            start, stop = is_text.index(True), len(is_text) - is_text[::-1].index(True)
            return tuple(encoding.ids[:start]), tuple(encoding.ids[stop:])
    return (), ()  # no text encodes to any token


def _configured_id(files: Sequence[tuple[str, str]], path: Path, ids: Mapping[str, int], key: str) -> int | None:
    """Return the id of a special token from the configuration files next to the tokenizer, or None if none names it.

    files: _EOS_KEYS or _BOS_KEYS.
    path: the tokenizer file.  If it is not called tokenizer.json, the configuration files are ignored.
    ids: the id of each token in the vocabulary.
    key: the setting to name in error messages.

    Raises UserError if a file cannot be read, or names a token that is not in the vocabulary.
    """
    for name, field in files if path.name == "tokenizer.json" else ():
        value = _read_config(path, name, key).get(field)
        if isinstance(value, list):
            value = value[0] if value else None
        if isinstance(value, dict):  # an added-token object
            value = value.get("content")
        if value is None:
            continue
        token_id = ids.get(value) if isinstance(value, str) else value
        if type(token_id) is not int or token_id not in ids.values():
            shown_value = value if isinstance(value, str) else json.dumps(value)
            rule = f"{path.with_name(name)} has {field}={shown_value}, which is not a token of this tokenizer"
            raise setting_error(key, path, rule, fix="use the files that belong to this tokenizer.json")
        return token_id
    return None


def _read_config(path: Path, name: str, key: str) -> dict[str, Any]:
    try:
        content = read_json(path.with_name(name))
        if not isinstance(content, dict):
            raise ValueError("it is not a JSON object")
        return content
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise setting_error(key, path, f"{name} in the same folder cannot be read ({error})") from error
