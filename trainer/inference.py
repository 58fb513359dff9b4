"""A plain model for inference and evaluation, from a checkpoint, a run or a Hugging Face folder; no process group."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

from trainer.checkpoint.source import StoredWeights, find_checkpoint, is_checkpoint
from trainer.config import RunConfig, config_from_yaml
from trainer.huggingface import SafetensorsFolder, model_config_of
from trainer.materialize import materialize
from trainer.recipe import Recipe, all_recipes
from trainer.weights import WeightSource, fill


def open_weights(path: str | os.PathLike[str], config: RunConfig) -> WeightSource:
    """Return where the weights for the model of `config` are: a checkpoint, a run's newest, or a folder of safetensors.

    Raises UserError if there are none, TrainingFailed if they are damaged.
    """
    if _is_hugging_face(path):
        return SafetensorsFolder(Path(path), config.recipe, config.model, setting="train.init_from")
    return StoredWeights(find_checkpoint(path))


def _is_hugging_face(path: str | os.PathLike[str]) -> bool:
    folder = Path(os.fspath(path).removeprefix("file://"))
    return folder.is_dir() and not is_checkpoint(path) and any(folder.glob("*.safetensors"))


def load_weights(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> nn.Module:
    """Return the model whose weights are at `path`, whole and unsharded, in evaluation mode.

    `path`: a checkpoint, the folder of a run (its newest checkpoint), or a Hugging Face folder of a known model.
    """
    source: WeightSource
    if _is_hugging_face(path):
        recipe, model_config = model_config_of(Path(path), all_recipes())
        source = SafetensorsFolder(Path(path), recipe, model_config)
    else:
        source = StoredWeights(find_checkpoint(path))
        config = config_from_yaml(source.config_yaml)
        recipe, model_config = config.recipe, config.model
    return build_plain(recipe, model_config, source, torch.device(device))


def build_plain(recipe: Recipe, model_config: object, source: WeightSource, device: torch.device) -> nn.Module:
    """Return the whole model on one device, filled from `source`."""
    with torch.device("meta"):
        model = recipe.build_model(model_config)
    materialize(model, 0, device, recipe.init)  # buffers that are stored nowhere, too
    fill(model, source, setting="load_weights")
    return model.eval().requires_grad_(False)
