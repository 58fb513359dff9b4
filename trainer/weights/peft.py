"""Exports adapters in peft's format: adapter_model.safetensors and adapter_config.json, with Hugging Face's names."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.config import LoraSection
from trainer.config.pretrained import find_huggingface
from trainer.errors import UserError
from trainer.model.lora import adapter_part, transposed_layers
from trainer.model.names import HuggingFaceNames
from trainer.recipe import Recipe, Transposed
from trainer.weights.adapters import adapted_layers
from trainer.weights.exporting import ADAPTER_CONFIG, ADAPTER_WEIGHTS, MARK, ExportedTensor, json_bytes, write_folder
from trainer.weights.origin import Origin, is_tokenizer_file
from trainer.weights.state_dict import WeightSource


def export_adapter(
    source: WeightSource,
    recipe: Recipe,
    model_config: Any,
    model: nn.Module,
    lora: LoraSection,
    folder: str | os.PathLike[str],
    *,
    base: str = "",
    dtype: torch.dtype | None = None,
    origin: Origin | None = None,
    overwrite: bool = False,
    setting: str = "folder",
) -> list[Path]:
    """Write the adapters of `source` to `folder` in peft's format, and return the files.

    `model` is the model without adapters, on any device; `base` is the path of the base weights to record for peft.
    Adapters are stored as `dtype`, by default unchanged.  The tokenizer files in `origin` are copied.  Raises UserError
    as `exporting.export` does.
    """
    names, layers = HuggingFaceNames(recipe, model_config), adapted_layers(source.shapes)
    theirs = {layer: _their_weight(names, recipe, layer) for layer in layers}
    is_transposed = {layer for layer in layers if isinstance(theirs[layer], Transposed)}
    is_transposed |= layers & transposed_layers(model)
    if is_transposed not in (set(), layers):
        raise UserError(f"recipe {recipe.name!r}: only some of the layers with adapters are stored transposed")
    tensors = []
    for name, shape in source.shapes.items():
        if part := adapter_part(name):
            layer, letter = part
            their_name = f"base_model.model.{theirs[layer].removesuffix('.weight')}.lora_{letter}.weight"
            tensors.append(ExportedTensor(name, their_name, shape, dtype or source.dtypes[name]))
    every = [names.theirs(name) or name for name in model.state_dict(keep_vars=True)]
    settings = {
        **{"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base or None},
        **{"r": lora.rank, "lora_alpha": _as_int(lora.alpha), "lora_dropout": lora.dropout, "bias": "none"},
        "target_modules": target_modules({name.removesuffix(".weight") for name in theirs.values()}, every),
        **{"fan_in_fan_out": bool(is_transposed), "init_lora_weights": True, "inference_mode": True},
    }
    texts = {ADAPTER_CONFIG: json_bytes(settings), **_tokenizer_of(origin or Origin())}
    shards = {ADAPTER_WEIGHTS: tensors}
    return write_folder(Path(folder).expanduser(), texts, shards, source, MARK, overwrite, setting)


def _their_weight(names: HuggingFaceNames, recipe: Recipe, layer: str) -> str:
    found = names.theirs(f"{layer}.weight")
    if found is None and find_huggingface(recipe).stored is not None:
        return f"{layer}.weight"  # a transformers model already uses their names
    if found is None:
        raise UserError(f"recipe {recipe.name!r}: hf.names lacks {layer}.weight")
    return found


def target_modules(layers: Collection[str], weights: Collection[str]) -> list[str]:
    """Return peft's `target_modules`: the last parts of the layers' names if these are unambiguous, else the full
    names.

    `weights` are the names of all tensors of the model; a last part is ambiguous if other modules have it too.
    """
    modules = {name.rpartition(".")[0] for name in weights}
    last_parts = {layer.rpartition(".")[2] for layer in layers}
    is_unambiguous = all(module in layers for module in modules if module.rpartition(".")[2] in last_parts)
    return sorted(last_parts if is_unambiguous else layers)


def _as_int(number: float) -> float:
    return int(number) if number == int(number) else number


def _tokenizer_of(origin: Origin) -> Mapping[str, bytes]:
    return origin.tokenizer or {name: data for name, data in origin.files.items() if is_tokenizer_file(name)}
