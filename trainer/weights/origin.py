"""Files that a model comes with besides its weights: the small files of the folder that training started from.

Its tokenizer, chat template, generation settings and config.json are none of training's business, and an export must
have them as they were, though it be made when that folder has long gone.  So they are part of a run's state.
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
"""Files of a tokenizer, and patterns of them, as transformers calls them."""


class Origin:
    """The files that came with a model: part of a run's state, the same on all ranks.

    files: those of the Hugging Face folder that training started from, by name; none if it started from nothing.
    tokenizer: those of the tokenizer that the run itself was given (`data.tokenizer`), with its own chat template
        (`data.chat_template`) if it was given one; none if that is `bytes` without a template.
    """

    may_be_absent = True
    """Checkpoints of before do not have it."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.tokenizer: dict[str, bytes] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"files": _packed(self.files), "tokenizer": _packed(self.tokenizer)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.files, self.tokenizer = _unpacked(state["files"]), _unpacked(state["tokenizer"])


def _packed(files: Mapping[str, bytes]) -> dict[str, Any]:
    # As arrays they lie among the tensors, not in the JSON that is read whenever anything is asked of a checkpoint.
    return {name: np.frombuffer(data, np.uint8) if data else data for name, data in files.items()}


def _unpacked(state: Mapping[str, Any]) -> dict[str, bytes]:
    return {name: bytes(data) for name, data in state.items()}


@contextmanager
def written_out(files: Mapping[str, bytes]) -> Iterator[Path]:
    """Write files that live in a state into a folder, for as long as the block lasts."""
    with tempfile.TemporaryDirectory() as name:
        for relative, data in files.items():
            file = Path(name) / relative
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(data)
        yield Path(name)


@contextmanager
def own_tokenizer(origin: Origin, setting: str) -> Iterator[tuple[str, str]]:
    """Yield what `data.tokenizer` and `data.chat_template` would name of a run's own tokenizer, wherever that is now.

    setting: the run's `data.tokenizer`, for one that has kept no files.
    """
    files = origin.tokenizer or {name: data for name, data in origin.files.items() if TOKENIZER in origin.files}
    if not files:
        yield setting, "model"
        return
    with written_out(files) as folder:
        yield named_in(folder)


def is_tokenizer_file(name: str) -> bool:
    """Return whether a file of a folder, by its name in there, belongs to the tokenizer."""
    return any(fnmatch(name, pattern) for pattern in TOKENIZER_FILES)


def read_folder(folder: str | Path) -> dict[str, bytes]:
    """Return the files beside the weights of a Hugging Face folder, by name.  Raises UserError for one unreadable."""
    return _read(Path(folder), (CONFIG, GENERATION, *TOKENIZER_FILES), "train.init_from")


def read_tokenizer(setting: str, template: str = "model") -> dict[str, bytes]:
    """Return the files of the tokenizer that `data.tokenizer` names: what stands beside a tokenizer.json goes along.

    None for `bytes`.  `template`: what `data.chat_template` names; a file, or `chatml`, takes the place of the
    tokenizer's own templates.  Raises UserError if one cannot be read.
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
    """Return the chat template that some files of a tokenizer hold: a file of its own comes before its settings."""
    if TEMPLATE in files:
        return files[TEMPLATE]
    stated = _settings_of(files).get("chat_template")
    return stated.encode() if isinstance(stated, str) else None


def with_template(files: Mapping[str, bytes], template: bytes) -> dict[str, bytes]:
    """Return the files of a tokenizer with `template` as its only chat template, wherever readers look for it."""
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


def named_in(folder: Path) -> tuple[str, str]:
    """Return what `data.tokenizer` and `data.chat_template` would name of a folder that has a model's files."""
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
        return _read(path.parent, TOKENIZER_FILES, "data.tokenizer", own=TOKENIZER)
    own = glob.escape(path.name)
    (data,) = _read(path.parent, (own,), "data.tokenizer", own=own).values()
    return {TOKENIZER: data}


def _read(folder: Path, patterns: tuple[str, ...], setting: str, own: str = "") -> dict[str, bytes]:
    """Return files of a folder, by name.  `own`: the pattern of the one that the user named, which may be a link."""
    check_links(folder, setting, [pattern for pattern in patterns if pattern != own])
    found = [path for pattern in patterns for path in sorted(folder.glob(pattern)) if path.is_file()]
    try:
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}
    except OSError as error:
        raise setting_error(setting, folder, f"{error.filename} cannot be read ({error.strerror})") from error
