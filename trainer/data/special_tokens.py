"""Finds the special tokens that a Hugging Face tokenizer puts around a document, such as BOS and EOS.

The post-processor in tokenizer.json defines the tokens that the tokenizer adds itself.  Only the configuration files
next to tokenizer.json say which token is EOS.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.errors import setting_error
from trainer.files import read_json

if TYPE_CHECKING:
    import tokenizers

_EOS_KEYS = (
    ("tokenizer_config.json", "eos_token"),
    ("special_tokens_map.json", "eos_token"),
    ("generation_config.json", "eos_token_id"),
    ("config.json", "eos_token_id"),
)
"""The files that may name the EOS token, and the key in each; the tokenizer's own files come first."""

_BOS_KEYS = tuple((name, field.replace("eos", "bos")) for name, field in _EOS_KEYS)


def added_ids(tokenizer: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids that the post-processor adds before a text, and those that it adds after it."""
    if tokenizer.num_special_tokens_to_add(is_pair=False) == 0:
        return (), ()
    for text in ("a", "0", *sorted(tokenizer.get_vocab(with_added_tokens=False))):
        found = tokenizer.encode(text)
        is_text = [not mask for mask in found.special_tokens_mask]
        if any(is_text):
            start, stop = is_text.index(True), len(is_text) - is_text[::-1].index(True)
            return tuple(found.ids[:start]), tuple(found.ids[stop:])
    return (), ()  # no text encodes to any token


def configured_eos(path: Path, ids: Mapping[str, int], key: str) -> int | None:
    """Return the id of the EOS token from the configuration files next to the tokenizer, or None if no file names it.

    path: the tokenizer file.  The configuration files are ignored unless it is called tokenizer.json.
    ids: the vocabulary.
    key: the setting to name in errors.

    Raises UserError if a file cannot be read, or names a token that is not in the vocabulary.
    """
    return _configured_id(_EOS_KEYS, path, ids, key)


def configured_bos(path: Path, ids: Mapping[str, int], key: str) -> int | None:
    """Return the id of the BOS token; see `configured_eos`."""
    return _configured_id(_BOS_KEYS, path, ids, key)


def _configured_id(files: Sequence[tuple[str, str]], path: Path, ids: Mapping[str, int], key: str) -> int | None:
    for name, field in files if path.name == "tokenizer.json" else ():
        value = _unwrap_token(_read(path, name, key).get(field))
        if value is None:
            continue
        end = ids.get(value) if isinstance(value, str) else value
        if type(end) is not int or end not in ids.values():
            shown = value if isinstance(value, str) else json.dumps(value)
            rule = f"{path.with_name(name)} has {field}={shown}, which is not a token of this tokenizer"
            raise setting_error(key, path, rule, fix="use a tokenizer.json together with its own files")
        return end
    return None


def _unwrap_token(value: Any) -> Any:
    """Return a token's text or id, unwrapped from a list (its first item) or from an added-token object."""
    if isinstance(value, list):
        value = value[0] if value else None
    return value.get("content") if isinstance(value, dict) else value


def _read(path: Path, name: str, key: str) -> dict[str, Any]:
    try:
        content = read_json(path.with_name(name))
        if not isinstance(content, dict):
            raise ValueError("it is not a JSON object")
        return content
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise setting_error(key, path, f"{name} in the same folder cannot be read ({error})") from error
