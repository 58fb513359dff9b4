"""Determines from file names alone what kind of weights a path holds; also makes Hub and GGUF models available locally.

Code that loads weights, for example for `train.init_from`, a teacher or the base model of adapters, calls `locate`, and
then does what the returned kind requires.  `locate` does not use the network, and this module does not import torch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trainer import gguf_model, hub
from trainer.config.pretrained import CONFIG_JSON
from trainer.config.stored import run_from_best_path

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
