"""The small files that come with a model: tokenizer, chat template, generation settings, config.json."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np

from trainer.checkpoint.state_parts import StatePart, join_state
from trainer.checkpoint.weights import StoredWeights
from trainer.config.model_folder import CONFIG_JSON, check_links
from trainer.config.rules import CHATML, CHATML_TEMPLATE
from trainer.config.schema import RunConfig
from trainer.distributed.channel import Channel
from trainer.errors import setting_error
from trainer.files import parse_json, temporary_folder

MODEL_FILES = "model_files"
"""The key of `ModelFiles` in a checkpoint's state."""

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
"""Names and glob patterns of the tokenizer files that transformers uses."""


class ModelFiles(StatePart):
    """The small files that came with a model: tokenizer, chat template, generation settings, config.json.

    Part of a run's state, the same on all ranks.  Training does not need these files, but exports include them, even if
    the folder that training started from no longer exists.

    files: the contents, by name, of the files that came with the initial weights or, if there are none, of those in
        `model.path`; may be empty.
    tokenizer: the contents, by name, of the files of the run's own tokenizer (`data.tokenizer`), with the chat template
        (`data.chat_template`) if that is set; empty for `bytes` without a template.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.tokenizer: dict[str, bytes] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"files": _pack(self.files), "tokenizer": _pack(self.tokenizer)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.files, self.tokenizer = _unpack(state["files"]), _unpack(state["tokenizer"])

    def store_tokenizer(self, config: RunConfig, channel: Channel) -> None:
        """Store the files of the run's own tokenizer and chat template, for exports.  Collective."""
        data = config.data
        files = channel.agreed(lambda: read_tokenizer(data.tokenizer, data.chat_template) if channel.is_main else {})
        self.tokenizer = channel.broadcast(files)

    @classmethod
    def of_checkpoint(cls, stored: StoredWeights) -> ModelFiles:
        """Return the files in a checkpoint; none if it has none."""
        model_files = cls()
        if MODEL_FILES in stored.parts:
            keys = [key for key in stored.layout if key.startswith(f"{MODEL_FILES}.")]
            contents = {key: stored.read_stored(key) for key in keys}
            model_files.load_state_dict(join_state(stored.parts[MODEL_FILES], contents))
        return model_files


def _pack(files: Mapping[str, bytes]) -> dict[str, Any]:
    # A checkpoint stores arrays with its tensors, not in the JSON that is read whenever the checkpoint is inspected.
    return {name: np.frombuffer(data, np.uint8) if data else data for name, data in files.items()}


def _unpack(state: Mapping[str, Any]) -> dict[str, bytes]:
    return {name: bytes(data) for name, data in state.items()}


@contextmanager
def as_temporary_folder(files: Mapping[str, bytes]) -> Iterator[Path]:
    """Write files, given as contents by name, to a temporary folder; yield it, and delete it after the block."""
    with temporary_folder() as folder:
        for relative, data in files.items():
            file = folder / relative
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(data)
        yield folder


@contextmanager
def tokenizer_settings(model_files: ModelFiles, setting: str) -> Iterator[tuple[str, str]]:
    """Yield values for `data.tokenizer` and `data.chat_template` that refer to a run's tokenizer.

    This is the run's own tokenizer or, if it has none, the one that came with the model.  Its stored files are written
    to a temporary folder, which exists until the block ends.

    setting: the run's `data.tokenizer`, which is used if no tokenizer is stored.
    """
    files = model_files.tokenizer or {
        name: data for name, data in model_files.files.items() if TOKENIZER in model_files.files
    }
    if not files:
        yield setting, "model"
        return
    with as_temporary_folder(files) as folder:
        yield settings_for_folder(folder)


def is_tokenizer_file(name: str) -> bool:
    """Return whether a file, given its path in a model folder, belongs to the tokenizer."""
    return any(fnmatch(name, pattern) for pattern in TOKENIZER_FILES)


def read_model_files(folder: str | Path) -> dict[str, bytes]:
    """Return the small files of a Hugging Face folder by name.  Raises UserError if one cannot be read."""
    return _read_files(Path(folder), (CONFIG_JSON, GENERATION, *TOKENIZER_FILES), "train.init_from")


def read_tokenizer(setting: str, template: str = "model") -> dict[str, bytes]:
    """Return the files of a tokenizer by name: a tokenizer.json, and the related files next to it; none for `bytes`.

    A file with another name is returned as tokenizer.json, without related files.

    setting: the value of `data.tokenizer`.
    template: the value of `data.chat_template`; a file, or `chatml`, replaces the tokenizer's own templates.

    Raises UserError if a file cannot be read.
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
    """Return the chat template among a tokenizer's files: a separate file, else an entry in its settings; or None."""
    if TEMPLATE in files:
        return files[TEMPLATE]
    inline = _settings_of(files).get("chat_template")
    return inline.encode() if isinstance(inline, str) else None


def with_template(files: Mapping[str, bytes], template: bytes) -> dict[str, bytes]:
    """Return a tokenizer's files with `template` as their only chat template, wherever tools look for one."""
    other_files = {
        name: data for name, data in files.items() if not any(fnmatch(name, pattern) for pattern in _OTHER_TEMPLATES)
    }
    settings = _settings_of(other_files)
    if "chat_template" in settings:
        settings["chat_template"] = template.decode()
        other_files[_TOKENIZER_CONFIG] = (json.dumps(settings, indent=2) + "\n").encode()
    return other_files | {TEMPLATE: template}


def _settings_of(files: Mapping[str, bytes]) -> dict[str, Any]:
    with suppress(ValueError):
        content = parse_json(files.get(_TOKENIZER_CONFIG, b"{}"))
        return content if isinstance(content, dict) else {}
    return {}


def settings_for_folder(folder: Path) -> tuple[str, str]:
    """Return values for `data.tokenizer` and `data.chat_template` that refer to the model files in a folder."""
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
        return _read_files(path.parent, TOKENIZER_FILES, "data.tokenizer", named_file=TOKENIZER)
    named_file = glob.escape(path.name)
    (data,) = _read_files(path.parent, (named_file,), "data.tokenizer", named_file=named_file).values()
    return {TOKENIZER: data}


def _read_files(folder: Path, patterns: tuple[str, ...], setting: str, named_file: str = "") -> dict[str, bytes]:
    """Return the files of a folder that match any of `patterns`, by name.

    named_file: the pattern of the file that the user named, which may be a link to a file outside the folder.
    """
    check_links(folder, setting, [pattern for pattern in patterns if pattern != named_file])
    paths = [path for pattern in patterns for path in sorted(folder.glob(pattern)) if path.is_file()]
    try:
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
    except OSError as error:
        raise setting_error(setting, folder, f"{error.filename} cannot be read ({error.strerror})") from error


def with_tokenizer_config(files: Mapping[str, bytes], tokenizer: str, end_id: int | None) -> dict[str, bytes]:
    """Return a tokenizer's files, with a minimal tokenizer_config.json if it is missing; `bytes` does not get one."""
    if tokenizer == "bytes" and TOKENIZER not in files:
        return dict(files)
    try:
        content = json.loads(files[TOKENIZER])
        vocab = content["model"]["vocab"]
        added = [(token["content"], token["id"]) for token in content.get("added_tokens", ())]
    except (ValueError, KeyError, TypeError) as error:
        raise setting_error("tokenizer", tokenizer, f"is not a Hugging Face tokenizer.json ({error!r})") from error
    tokens = [*(vocab.items() if isinstance(vocab, dict) else ()), *added]
    end_token = next((text for text, token_id in tokens if token_id == end_id), None)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **({"eos_token": end_token} if end_token is not None else {}),
    }
    return {_TOKENIZER_CONFIG: json_bytes(settings), **files}


def json_bytes(content: Mapping[str, Any]) -> bytes:
    """Serialize as JSON, in the layout of exported files."""
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
