"""The small files that came with a model, from the folder that training started from.

Training does not need its tokenizer, chat template, generation settings and config.json, but an export must contain
them unchanged, even if that folder no longer exists.  They are therefore part of a run's state.
"""

from __future__ import annotations

import glob
import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np

from trainer.checkpoint.state_parts import StatePart
from trainer.config.chats import CHATML, CHATML_TEMPLATE
from trainer.config.pretrained import CONFIG, check_links
from trainer.errors import setting_error
from trainer.files import parse_json

GENERATION = "generation_config.json"
TOKENIZER = "tokenizer.json"
TEMPLATE = "chat_template.jinja"

_TOKENIZER_CONFIG = "tokenizer_config.json"
_OTHER_TEMPLATES = ("chat_template.json", "additional_chat_templates/*.jinja")

TOKENIZER_FILES = (
    TOKENIZER,
    _TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    TEMPLATE,
    *_OTHER_TEMPLATES,
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)
"""Names and glob patterns of tokenizer files, as used by transformers."""


class Origin(StatePart):
    """The files that came with a model: part of a run's state, the same on all ranks.

    files: from the Hugging Face folder that training started from, by name; empty if it did not start from one.
    tokenizer: files of the run's own tokenizer (`data.tokenizer`), with its chat template (`data.chat_template`) if
        set; empty for `bytes` without a template.
    """

    may_be_absent = True
    """Older checkpoints do not have it."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.tokenizer: dict[str, bytes] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"files": _pack(self.files), "tokenizer": _pack(self.tokenizer)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.files, self.tokenizer = _unpack(state["files"]), _unpack(state["tokenizer"])


def _pack(files: Mapping[str, bytes]) -> dict[str, Any]:
    # Arrays are stored with the tensors, not in the JSON that is read whenever a checkpoint is inspected.
    return {name: np.frombuffer(data, np.uint8) if data else data for name, data in files.items()}


def _unpack(state: Mapping[str, Any]) -> dict[str, bytes]:
    return {name: bytes(data) for name, data in state.items()}


@contextmanager
def as_temporary_folder(files: Mapping[str, bytes]) -> Iterator[Path]:
    """Write files from a state into a temporary folder, which exists inside the block."""
    with tempfile.TemporaryDirectory() as name:
        for relative, data in files.items():
            file = Path(name) / relative
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(data)
        yield Path(name)


@contextmanager
def tokenizer_settings(origin: Origin, setting: str) -> Iterator[tuple[str, str]]:
    """Yield values for `data.tokenizer` and `data.chat_template` that refer to a run's own tokenizer.

    Its stored files are written to a temporary folder.  setting: the run's `data.tokenizer`, used if no files are
    stored.
    """
    files = origin.tokenizer or {name: data for name, data in origin.files.items() if TOKENIZER in origin.files}
    if not files:
        yield setting, "model"
        return
    with as_temporary_folder(files) as folder:
        yield settings_for_folder(folder)


def is_tokenizer_file(name: str) -> bool:
    """Return whether a file, given its path in a model folder, belongs to the tokenizer."""
    return any(fnmatch(name, pattern) for pattern in TOKENIZER_FILES)


def read_model_files(folder: str | Path) -> dict[str, bytes]:
    """Return the files of a Hugging Face folder other than weights, by name.  Raises UserError if one is unreadable."""
    return _read(Path(folder), (CONFIG, GENERATION, *TOKENIZER_FILES), "train.init_from")


def read_tokenizer(setting: str, template: str = "model") -> dict[str, bytes]:
    """Return the files of the tokenizer that `data.tokenizer` names, including related files next to a tokenizer.json.

    Empty for `bytes`.  `template`: the value of `data.chat_template`; a file, or `chatml`, replaces the tokenizer's own
    templates.  Raises UserError if a file cannot be read.
    """
    files = _read_tokenizer(setting)
    if template == "model":
        return files
    if template == CHATML:
        return with_template(files, CHATML_TEMPLATE.encode())
    path = Path(template).expanduser()
    try:
        return with_template(files, path.read_bytes())
    except OSError as error:
        raise setting_error("data.chat_template", template, f"cannot be read ({error.strerror})") from error


def template_of(files: Mapping[str, bytes]) -> bytes | None:
    """Return the chat template in a tokenizer's files; a separate template file takes precedence over its settings."""
    if TEMPLATE in files:
        return files[TEMPLATE]
    stated = _settings_of(files).get("chat_template")
    return stated.encode() if isinstance(stated, str) else None


def with_template(files: Mapping[str, bytes], template: bytes) -> dict[str, bytes]:
    """Return a tokenizer's files with `template` as the only chat template, in every place where readers look."""
    kept = {
        name: data for name, data in files.items() if not any(fnmatch(name, pattern) for pattern in _OTHER_TEMPLATES)
    }
    settings = _settings_of(kept)
    if "chat_template" in settings:
        settings["chat_template"] = template.decode()
        kept[_TOKENIZER_CONFIG] = (json.dumps(settings, indent=2) + "\n").encode()
    return kept | {TEMPLATE: template}


def _settings_of(files: Mapping[str, bytes]) -> dict[str, Any]:
    with suppress(ValueError):
        content = parse_json(files.get(_TOKENIZER_CONFIG, b"{}"))
        return content if isinstance(content, dict) else {}
    return {}


def settings_for_folder(folder: Path) -> tuple[str, str]:
    """Return values for `data.tokenizer` and `data.chat_template` that refer to a folder with a model's files."""
    if (folder / TOKENIZER).exists():
        return str(folder), "model"
    return "bytes", str(folder / TEMPLATE) if (folder / TEMPLATE).exists() else "model"


def _read_tokenizer(setting: str) -> dict[str, bytes]:
    if setting == "bytes":
        return {}
    path = Path(setting).expanduser()
    if not path.is_file():
        rule = "must be bytes, or the path of a Hugging Face tokenizer.json"
        raise setting_error("data.tokenizer", setting, rule, fix="give an existing file")
    if path.name == TOKENIZER:
        return _read(path.parent, TOKENIZER_FILES, "data.tokenizer", named_file=TOKENIZER)
    named_file = glob.escape(path.name)
    (data,) = _read(path.parent, (named_file,), "data.tokenizer", named_file=named_file).values()
    return {TOKENIZER: data}


def _read(folder: Path, patterns: tuple[str, ...], setting: str, named_file: str = "") -> dict[str, bytes]:
    """Return files of a folder, by name.

    `named_file`: the pattern of the file that the user named, which may be a link.
    """
    check_links(folder, setting, [pattern for pattern in patterns if pattern != named_file])
    found = [path for pattern in patterns for path in sorted(folder.glob(pattern)) if path.is_file()]
    try:
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}
    except OSError as error:
        raise setting_error(setting, folder, f"{error.filename} cannot be read ({error.strerror})") from error
