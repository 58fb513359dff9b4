"""Locates weights, checks that a run's initial weights can be read, and that the run uses their tokenizer.

`locate` determines from file names alone what kind of weights a path holds.  Code that loads weights, for example for
`train.init_from`, a teacher or the base model of adapters, calls it, and then does what the returned kind requires.  It
does not use the network, and this module does not import torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainer import gguf_model, hub
from trainer.config.files import CONFIG, read_run_config, run_from_best_path, section_of
from trainer.config.model_folder import CONFIG_JSON, check_weights, local_folder
from trainer.config.schema import RunConfig
from trainer.errors import UserError, setting_error

_WEIGHT_FILE_SUFFIXES = (".pt", ".pth", ".safetensors")

CHECKPOINT_FILES = frozenset({"manifest.json", "state.json", "layout.json"})
"""A folder with any of these files is a checkpoint, perhaps a damaged one that lacks the others."""

Kind = Literal["file", "huggingface", "checkpoint", "run"]


@dataclass(frozen=True)
class Location:
    """A path to weights, and their kind.

    path: the path or URL, without `file://`.
    kind: one of
        file: unsharded tensors in one file (.pt, .pth, .safetensors), named as in this project's model;
        huggingface: a Hugging Face model folder, such as an export, with config.json or .safetensors files.  A folder
            with a PEFT adapter gets this kind too, but is rejected when its weights are opened;
        checkpoint: one checkpoint of a run;
        run: anything else, such as a run folder, a folder of checkpoints, RUN/best, or any URL without one of the
            suffixes above, even the URL of a single checkpoint.  `checkpoint.find.find_checkpoint` finds the
            checkpoint there.
    """

    path: str
    kind: Kind

    @property
    def folder(self) -> Path:
        """The folder where the config.yaml of a checkpoint or run would be; for RUN/best, the run folder."""
        return Path(run_from_best_path(self.path) or self.path)


def local_model_path(path: str | os.PathLike[str], setting: str = "path") -> str:
    """Return the local path of a model, after fetching it from the Hugging Face Hub or converting it from GGUF.

    A path that needs neither is returned unchanged.  Raises UserError, naming `setting`, if the model cannot be fetched
    or converted.
    """
    text = os.fspath(path)
    if (name := hub.parse_name(text)) is not None and name.kind == "model":
        text = str(hub.fetch_model(name, setting, None, with_weights=True))
    return str(gguf_model.convert(text, setting)) if gguf_model.is_gguf(text) else text


def locate(path: str | os.PathLike[str]) -> Location:
    """Return the location of the weights at `path`, with their kind.  The path need not exist."""
    text = os.fspath(path).removeprefix("file://")
    folder = Path(text)
    if "://" in text or not folder.is_dir():
        return Location(text, "file" if folder.suffix in _WEIGHT_FILE_SUFFIXES else "run")
    if any((folder / name).exists() for name in CHECKPOINT_FILES):
        return Location(text, "checkpoint")
    is_huggingface = (folder / CONFIG_JSON).is_file() or any(folder.glob("*.safetensors"))
    return Location(text, "huggingface" if is_huggingface else "run")


# ---------------------------------------------------------------------------------------------------------------
# The initial weights


def check_initial_weights(config: RunConfig, given: Mapping[str, Any]) -> None:
    """Raise UserError if the run's initial weights cannot be read, or if they are random but would be quantized.

    given: the values that layers set, by key.

    A run that will resume from a checkpoint is not checked, nor are weights that are not in a Hugging Face folder.
    """
    if will_resume(config):
        return
    source = config.train.init_from
    if source is not None:
        if locate(source).kind == "huggingface":
            check_weights(source, "model.path" if given.get("model.path") else "train.init_from")
        return
    folder = config.model_path if hasattr(config.model, "fresh") else None
    if config.lora.packs and (folder is None or config.model.fresh):
        raise cannot_quantize_random_weights_error(config)
    if folder is None:
        return
    fresh = given.get("model.fresh")
    # A folder without weights is a model to train from scratch, but not one to fine-tune, unless this is asked for.
    settings = {
        "data.source": config.data.source,
        "train.objective": config.train.objective,
        "lora.rank": config.lora.rank,
    }
    is_new_model = fresh is None and config.model.fresh and not is_fine_tuning(settings)
    if not parse_bool(fresh) and not is_new_model:
        check_weights(folder, "model.path")


def cannot_quantize_random_weights_error(config: RunConfig) -> UserError:
    """Return the error for a quantized `lora.base_dtype` with random base weights instead of pretrained ones."""
    rule = "quantizes pretrained weights, but this model starts from random ones"
    fix = "set train.init_from or model.path to a folder with weights, or leave out lora.base_dtype"
    return setting_error("lora.base_dtype", config.lora.base_dtype, rule, fix=fix)


def is_fine_tuning(values: Mapping[str, Any]) -> bool:
    """Return whether a run fine-tunes: it trains on chats, with an objective other than `tokens`, or with adapters.

    Such a run starts from pretrained weights unless random weights are requested explicitly.
    """
    return (
        values.get("data.source") == "chat"
        or values.get("train.objective") not in (None, "tokens")
        or values.get("lora.rank") not in (None, 0, "0")
    )


def parse_bool(value: object) -> bool:
    """Return whether a value in a recipe file or on the command line is true."""
    return str(value).lower() == "true"


def will_resume(config: RunConfig) -> bool:
    """Return whether the run will resume from a checkpoint, judging by file names.

    True if the run has started before and its checkpoints are at a URL, which is not read.
    """
    if config.checkpoint.resume != "auto":
        return config.checkpoint.resume != "none"
    if not (config.run_dir / CONFIG).is_file():
        return False
    checkpoint_dir = config.checkpoint.dir or str(config.run_dir / "checkpoints")
    return "://" in checkpoint_dir or any(Path(checkpoint_dir).glob("step_*"))


def resumed_run_config(config: RunConfig) -> Mapping[str, Any]:
    """Return what the run or checkpoint that this run resumes from has stored, by section; empty for a new run."""
    if not will_resume(config):
        return {}
    start = config.checkpoint.resume
    return read_run_config(config.run_dir if start == "auto" else locate(start).folder)


# ---------------------------------------------------------------------------------------------------------------
# The tokenizer of the initial weights

_TOKENIZER_FILE = "tokenizer.json"
_TOKENIZER_KEY = "data.tokenizer"
_UNSUPPORTED_TOKENIZERS = (
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
)
"""Tokenizer files in formats that are not supported."""


def find_weights_tokenizer(config: RunConfig) -> str | None:
    """Return the path of the tokenizer.json that belongs to the initial weights, or None.

    The file is in the weights' folder; for the weights of a run, it is the file that the run used.  None for random
    weights, if there is no such file, or if that run was trained on bytes.
    """
    folder = _weights_folder(config)
    tokenizer = _tokenizer_of_run(config) if folder is None else str((folder / _TOKENIZER_FILE).absolute())
    return tokenizer if tokenizer is not None and Path(tokenizer).is_file() else None


def _weights_folder(config: RunConfig) -> Path | None:
    """Return the Hugging Face folder of the initial weights, or None for other weights."""
    source = config.train.init_from
    if source is not None:
        return local_folder(source) if locate(source).kind == "huggingface" else None
    is_fresh = getattr(config.model, "fresh", True)
    return None if is_fresh or config.model_path is None else local_folder(config.model_path)


def _tokenizer_of_run(config: RunConfig) -> str | None:
    """Return the tokenizer file of the run that the initial weights come from.  The file may be missing."""
    source = config.train.init_from
    if source is None or "://" in source.removeprefix("file://"):
        return None
    tokenizer = section_of(read_run_config(locate(source).folder), "data").get("tokenizer")
    if not isinstance(tokenizer, str) or tokenizer in ("bytes", "model"):
        return None
    return str(Path(tokenizer).expanduser().absolute())


def allows_other_tokenizer(config: RunConfig) -> bool:
    """Return whether `checkpoint.allow_changes` permits a tokenizer other than that of the weights."""
    return not {"data", _TOKENIZER_KEY}.isdisjoint(config.checkpoint.allow_changes)


def check_same_tokenizer(tokenizer: str, expected: str) -> None:
    """Raise UserError if `data.tokenizer` is not the tokenizer of the initial weights, the file `expected`."""
    path = Path(tokenizer).expanduser()
    file = path / _TOKENIZER_FILE if path.is_dir() else path
    if tokenizer != "bytes" and not file.is_file():
        return  # opening it reports the error
    if tokenizer == "bytes" or not _have_same_ids(file, Path(expected)):
        rule = f"differs from the tokenizer that the weights were trained with, {expected}"
        fix = f"leave it out to use that one, or set checkpoint.allow_changes=[{_TOKENIZER_KEY}] to keep this one"
        raise setting_error(_TOKENIZER_KEY, tokenizer, rule, fix=fix)


def _have_same_ids(first_file: Path, second_file: Path) -> bool:
    """Return whether two tokenizer.json files encode text as the same ids; post-processing and truncation may differ.

    Also returns True if either file cannot be read.
    """
    try:
        contents = [file.read_bytes() for file in (first_file, second_file)]
        if contents[0] == contents[1]:
            return True
        parts = ("model", "added_tokens", "normalizer", "pre_tokenizer")
        first, second = ({part: json.loads(content).get(part) for part in parts} for content in contents)
        return first == second
    except (OSError, ValueError, AttributeError, RecursionError):
        return True  # opening an unreadable file reports the error


def check_readable_tokenizer(config: RunConfig) -> None:
    """Raise UserError if the tokenizer of the weights cannot be read, because training would fall back to bytes."""
    missing = _tokenizer_of_run(config)
    folder = _weights_folder(config)
    if missing is not None:
        rule = f"the weights of {config.train.init_from} were trained with {missing}, which is missing"
        raise setting_error(_TOKENIZER_KEY, config.data.tokenizer, rule, fix=f"set {_TOKENIZER_KEY} to its new path")
    if folder is not None and not allows_other_tokenizer(config):
        check_tokenizer_of_folder(folder)


def check_tokenizer_of_folder(folder: Path) -> None:
    """Raise UserError if a Hugging Face folder has a tokenizer only in unsupported formats."""
    unsupported = [name for name in _UNSUPPORTED_TOKENIZERS if (folder / name).is_file()]
    if unsupported and not (folder / _TOKENIZER_FILE).is_file():
        rule = f"the tokenizer in {folder} ({', '.join(unsupported)}) is not read, only {_TOKENIZER_FILE}"
        fix = "in Python: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER), with transformers"
        raise setting_error(_TOKENIZER_KEY, "bytes", rule, fix=fix)
