"""Files that a model comes with besides its weights: the small files of the folder that training started from.

Its tokenizer, chat template, generation settings and config.json are none of training's business, and an export must
have them as they were, though it be made when that folder has long gone.  So they are part of a run's state.
"""

from __future__ import annotations

import glob
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config.pretrained import CONFIG
from trainer.errors import setting_error

GENERATION = "generation_config.json"
TOKENIZER = "tokenizer.json"

TOKENIZER_FILES = (
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
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
    tokenizer: those of the tokenizer that the run itself was given (`data.tokenizer`); none if that is `bytes`.
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


def is_tokenizer_file(name: str) -> bool:
    """Return whether a file of a folder, by its name in there, belongs to the tokenizer."""
    return any(fnmatch(name, pattern) for pattern in TOKENIZER_FILES)


def read_folder(folder: str | Path) -> dict[str, bytes]:
    """Return the files beside the weights of a Hugging Face folder, by name.  Raises UserError for one unreadable."""
    return _read(Path(folder), (CONFIG, GENERATION, *TOKENIZER_FILES), "train.init_from")


def read_tokenizer(setting: str) -> dict[str, bytes]:
    """Return the files of the tokenizer that `data.tokenizer` names: what stands beside a tokenizer.json goes along.

    None for `bytes`.  Raises UserError if one cannot be read.
    """
    if setting == "bytes":
        return {}
    path = Path(setting).expanduser()
    if not path.is_file():
        rule = "must be bytes, or the path of a Hugging Face tokenizer.json"
        raise setting_error("data.tokenizer", setting, rule, fix="give an existing file")
    if path.name == TOKENIZER:
        return _read(path.parent, TOKENIZER_FILES, "data.tokenizer")
    (data,) = _read(path.parent, (glob.escape(path.name),), "data.tokenizer").values()
    return {TOKENIZER: data}


def _read(folder: Path, patterns: tuple[str, ...], setting: str) -> dict[str, bytes]:
    found = [path for pattern in patterns for path in sorted(folder.glob(pattern)) if path.is_file()]
    try:
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}
    except OSError as error:
        raise setting_error(setting, folder, f"{error.filename} cannot be read ({error.strerror})") from error
