"""Loads weights: the initial weights of a training run, or an unsharded model for inference.

Weights come from checkpoints, run folders, Hugging Face folders, or single state-dict files.  Functions that take a
`Channel` are collective and raise errors on all ranks alike; `load_weights` needs no process group.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from trainer.checkpoint.state_tree import join
from trainer.checkpoint.stored_weights import StoredWeights, find_checkpoint, is_checkpoint, open_checkpoint
from trainer.config import RunConfig, config_from_yaml, declared_by_yaml, stored_value
from trainer.config.pretrained import (
    CONFIG,
    any_model_of,
    declared_by_folder,
    is_folder_of_weights,
    model_config_of,
    read_config,
)
from trainer.distributed.channel import Channel
from trainer.errors import UserError, print_stderr, setting_error
from trainer.model.lora import is_base_weight, plain_name, transposed_layers
from trainer.model.materialize import materialize
from trainer.model.network import build_network
from trainer.recipe import Recipe, all_recipes
from trainer.weights.adapters import (
    BASE,
    BaseWeights,
    JoinedSource,
    MergedSource,
    adapted_layers,
    checksum_lines,
    combine_checksums,
    rename_for_adapters,
    without_adapters,
    wrong_base_message,
)
from trainer.weights.exporting import Origin, read_model_files, read_tokenizer
from trainer.weights.sources import SafetensorsFolder, WeightSource, fill, find_weights

ORIGIN = "origin"
"""Key of the state entry for the files that came with the model."""

_STATE_DICT_SUFFIXES = (".pt", ".pth", ".safetensors")


class StateDictFile:
    """A `WeightSource` for a single file of unsharded tensors under our names, e.g. another trainer's
    `torch.save(...)`.

    The file is memory-mapped, so only the rows that are read are loaded, and unpickled with `weights_only=True`, so no
    code runs.
    """

    _PREFIXES = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")

    def __init__(self, path: Path, setting: str) -> None:
        self.description = str(path)
        content: Any
        try:
            if path.suffix == ".safetensors":
                content = safetensors.torch.load_file(path)
            else:
                content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except (OSError, RuntimeError, pickle.UnpicklingError, safetensors.SafetensorError) as error:
            raise setting_error(setting, path, f"cannot be read as a state dict ({error})") from error
        if isinstance(content, dict) and isinstance(content.get("model"), dict):
            content = content["model"]
        if not isinstance(content, dict):
            raise setting_error(setting, path, "has no state dict")
        self._tensors = {self._without_prefixes(name): t for name, t in content.items() if isinstance(t, torch.Tensor)}

    def _without_prefixes(self, name: str) -> str:
        for prefix in self._PREFIXES:
            name = name.replace(prefix, "")
        return name

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        return {name: tensor.dtype for name, tensor in self._tensors.items()}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return rows [start, stop) of a tensor, or all of it."""
        tensor = self._tensors[name]
        return tensor[start:stop] if tensor.ndim else tensor


def resolve_weights_path(path: str | os.PathLike[str]) -> str:
    """Resolve a path to weights; a run folder resolves to its newest checkpoint."""
    path = os.fspath(path).removeprefix("file://")
    if Path(path).suffix in _STATE_DICT_SUFFIXES or _is_hugging_face(path):
        return os.fspath(path)
    return str(find_checkpoint(path))


def open_weights(path: str | os.PathLike[str], config: RunConfig) -> WeightSource:
    """Open the weights at `path` for the model of `config`.

    `path`: a checkpoint, a run folder (its newest checkpoint), a folder of safetensors, or a single file of unsharded
    tensors.

    Raises UserError if there are none, or if they belong to a model with different fields (`checkpoint.allow_changes`
    names those that may differ); TrainingFailed if they are damaged.
    """
    if Path(path).suffix in _STATE_DICT_SUFFIXES:
        return StateDictFile(Path(path), "train.init_from")
    source: WeightSource
    if _is_hugging_face(path):
        declared = declared_by_folder(os.fspath(path), config.recipe, "train.init_from")
        source = SafetensorsFolder(Path(path), config.recipe, config.model, setting="train.init_from")
    else:
        stored = open_checkpoint(path)
        declared = declared_by_yaml(stored.config_yaml, config.recipe.name, f"{stored.storage}/config.yaml")
        source = with_merged_adapters(stored, config.recipe, config.model)
    if declared is not None:
        declared.check(config.model, config.checkpoint.allow_changes)
    return source


def model_files_of(source: WeightSource) -> Origin:
    """Return the files that came with the weights of `source`: from their folder, or as stored in a checkpoint."""
    origin = Origin()
    source = source.adapters if isinstance(source, MergedSource) else source
    if isinstance(source, SafetensorsFolder):
        origin.files = read_model_files(source.description)
    elif isinstance(source, StoredWeights) and ORIGIN in source.parts:
        keys = [key for key in source.layout if key.startswith(f"{ORIGIN}.")]
        origin.load_state_dict(join(source.parts[ORIGIN], {key: source.read_stored(key) for key in keys}))
    return origin


# ---------------------------------------------------------------------------------------------------------------
# Checkpoints with adapters


def open_base(stored: StoredWeights, recipe: Recipe, model_config: Any, path: str | None = None) -> WeightSource:
    """Return the base weights of a checkpoint with adapters, under the names of the model without adapters.

    They are read from the path in the checkpoint, from `path` if they have moved, or from the checkpoint itself.
    Raises UserError if they are missing or differ from those that were trained on.
    """
    named = stored.parts.get(BASE, {})
    if not named.get("path"):
        return without_adapters(stored)
    where = path or str(named["path"])
    if "://" not in where and not Path(where).exists():
        raise UserError(
            f"{stored.description}: has adapters for the weights of {where}, which is missing\n"
            "  to fix: move it back, or export with --base and the folder where it is now"
        )
    source = _open_base(where, recipe, model_config)
    names = find_weights(build_meta_model(recipe, model_config), source, "base").values()
    checksum = combine_checksums([checksum_lines(source, names)])
    if checksum != named["checksum"]:
        raise UserError(f"{stored.description}: {wrong_base_message(where, checksum, named)}")
    return source


def _open_base(path: str, recipe: Recipe, model_config: Any) -> WeightSource:
    if Path(path).suffix in _STATE_DICT_SUFFIXES:
        return StateDictFile(Path(path), "base")
    if _is_hugging_face(path):
        recipe_source = recipe.first_weights(replace(model_config, path=path)) if recipe.weights is not None else None
        return recipe_source or SafetensorsFolder(Path(path), recipe, model_config, setting="base")
    return with_merged_adapters(open_checkpoint(path), recipe, model_config)


def with_base(stored: StoredWeights, recipe: Recipe, model_config: Any) -> WeightSource:
    """Return all weights of a checkpoint's model, joined with its base if the checkpoint holds only adapters."""
    if not stored.parts.get(BASE, {}).get("path"):
        return stored
    return JoinedSource(rename_for_adapters(open_base(stored, recipe, model_config), stored.shapes), stored)


def with_merged_adapters(
    stored: StoredWeights, recipe: Recipe, model_config: Any, base: str | None = None
) -> WeightSource:
    """Return the weights of a checkpoint's model with any adapters merged into them."""
    if not adapted_layers(stored.shapes):
        return stored
    alpha, rank = (stored_value(stored.config_yaml, f"lora.{key}") for key in ("alpha", "rank"))
    assert isinstance(alpha, (int, float))
    assert isinstance(rank, int)
    transposed = transposed_layers(build_meta_model(recipe, model_config))
    return MergedSource(open_base(stored, recipe, model_config, base), stored, alpha / rank, transposed)


def missing_config_warning(path: str) -> str:
    """Return a warning if the settings of the model at `path` are not fully known, else an empty string."""
    if _is_hugging_face(path) and not (Path(path.removeprefix("file://")) / CONFIG).exists():
        return (
            f"train.init_from: {path} has no {CONFIG}: settings without a tensor, such as rope_theta, are taken "
            "from model.*"
        )
    return ""


def init_weights(model: nn.Module, config: RunConfig, device: torch.device, load_later: bool) -> None:
    """Materialize a model on the meta device: initialize it randomly, or load the weights that its recipe names.

    With `load_later` nothing is loaded: `load_initial_weights` will, or a checkpoint.
    """
    recipe = config.recipe
    source = recipe.first_weights(config.model)
    are_read = source is not None or (load_later and config.train.init_from is not None)
    materialize(
        model, config.run.seed, device, recipe.init, config.fsdp.cpu_offload, is_base_weight if are_read else None
    )
    if source is not None and not load_later:
        _fill_base(model, source, f"model.name={config.model.name}")


def _fill_base(model: nn.Module, source: WeightSource, setting: str) -> dict[str, str]:
    """Fill all weights except adapters.  Returns their names, each with its name in `source`."""
    under = rename_for_adapters(source, (name for name, _ in model.named_parameters()))
    fill(model, under, setting, only=is_base_weight)
    found = find_weights(model, under, setting, only=is_base_weight)
    return {name: plain_name(stored) for name, stored in found.items()}


def _find_initial_weights(config: RunConfig, channel: Channel) -> tuple[WeightSource | None, str, str]:
    """Find the initial weights: returns their source (None: random), the setting that names them, and the path.
    Collective.
    """
    given = config.train.init_from
    if given is None:
        source = channel.agreed(lambda: config.recipe.first_weights(config.model))
        return source, f"model.name={config.model.name}", config.model_path or ""
    path: str = channel.broadcast(channel.agreed(lambda: resolve_weights_path(given) if channel.is_main else ""))
    return channel.agreed(lambda: open_weights(path, config)), "train.init_from", path


def load_base(model: nn.Module, config: RunConfig, channel: Channel) -> BaseWeights:
    """Load the base weights of a model with adapters, and return what identifies them.

    If the weights are random, nothing is loaded.  Each rank reads its own rows, plus its share of the tensors for the
    checksum.  Raises UserError, on all ranks alike, if the weights do not fit.  Collective: a few small messages.
    """
    source, setting, path = _find_initial_weights(config, channel)
    if source is None:
        return BaseWeights()
    filled = channel.agreed(lambda: _fill_base(model, source, setting))
    share = channel.agreed(lambda: checksum_lines(source, filled.values(), channel.rank, channel.size))
    return BaseWeights(
        path if "://" in path else str(Path(path).absolute()), combine_checksums(channel.gather(share)), filled
    )


def load_initial_weights(model: nn.Module, origin: Origin, config: RunConfig, channel: Channel) -> str:
    """Load the initial weights: from `train.init_from`, else those that the recipe names, else keep the random ones.

    Stores the files that came with them in `origin`.  Returns where the weights come from, for the start block.

    Raises UserError, on all ranks alike, if the weights do not fit.  Collective.
    """
    source, setting, path = _find_initial_weights(config, channel)
    if config.train.init_from and channel.is_main and (doubt := missing_config_warning(path)):
        print_stderr(f"warning: {doubt}")
    if source is not None and not config.lora.rank:  # base weights under adapters are loaded already
        channel.agreed(lambda: fill(model, source, setting))
    files = channel.agreed(lambda: _files_of(source, config) if channel.is_main else {})
    origin.files = channel.broadcast(files)
    store_tokenizer(origin, config, channel)
    if source is None:
        without = f"; {path} has none that are used" if path else ""
        return f"drawn at random (run.seed={config.run.seed}){without}"
    return str(Path(path).absolute()) if path and "://" not in path else path or source.description


def store_tokenizer(origin: Origin, config: RunConfig, channel: Channel) -> None:
    """Store the files of the run's own tokenizer and chat template in `origin`, for exports.  Collective."""
    settings = config.data.tokenizer, config.data.chat_template
    origin.tokenizer = channel.broadcast(channel.agreed(lambda: read_tokenizer(*settings) if channel.is_main else {}))


def _is_hugging_face(path: str | os.PathLike[str]) -> bool:
    return is_folder_of_weights(os.fspath(path)) and not is_checkpoint(path)


def load_weights(
    path: str | os.PathLike[str],
    device: torch.device | str = "cpu",
    allow_import: Collection[str] = (),
    ema: bool = False,
) -> nn.Module:
    """Return the model with the weights at `path`, unsharded and in evaluation mode.

    `path`: a checkpoint, a run folder (its newest checkpoint), or a Hugging Face folder of a supported model.
    `ema`: use the averaged weights of a run with `train.ema`.
    `allow_import`: modules that may be imported because a checkpoint names them as its model's ("my_models" for
    model.name=my_models:tiny).  Importing runs code, and a checkpoint may come from anywhere, so by default only
    registered models are built.  Raises UserError for others.
    """
    if _is_hugging_face(path):
        recipe, model_config = _find_model(Path(path))
        read = recipe.first_weights(model_config) or SafetensorsFolder(Path(path), recipe, model_config)
        return load_unsharded(build_meta_model(recipe, model_config), recipe, read, torch.device(device))
    return model_of(open_checkpoint(path, ema), device, allow_import)


def model_of(
    stored: StoredWeights, device: torch.device | str = "cpu", allow_import: Collection[str] = ()
) -> nn.Module:
    """Return the model of an open checkpoint; see `load_weights`."""
    config = config_from_yaml(stored.config_yaml, allow_import=allow_import)
    source = with_base(stored, config.recipe, config.model)
    return load_unsharded(build_network(config), config.recipe, source, torch.device(device))


def _find_model(folder: Path) -> tuple[Recipe, Any]:
    """Return the recipe and configuration of the model in a folder; prefers our own recipe for that model type."""
    model_type = read_config(folder, "path")["model_type"]
    if any(recipe.hf and recipe.hf.model_type == model_type for recipe in all_recipes()):
        return model_config_of(folder, all_recipes())
    return any_model_of(folder)


def _files_of(source: WeightSource | None, config: RunConfig) -> dict[str, bytes]:
    """Return the files that came with the model: from the weights' folder, else from the model's."""
    files = model_files_of(source).files if source is not None else {}
    return files or (read_model_files(config.model_path) if config.model_path else {})


def build_meta_model(recipe: Recipe, model_config: object) -> nn.Module:
    """Build the recipe's model on the meta device."""
    with torch.device("meta"):
        return recipe.build_model(model_config)


def load_unsharded(model: nn.Module, recipe: Recipe, source: WeightSource, device: torch.device) -> nn.Module:
    """Materialize `model` unsharded on `device`, fill it from `source`, and set evaluation mode."""
    materialize(model, 0, device, recipe.init, is_loaded_later=lambda name: True)  # some buffers are not stored
    fill(model, source, setting="load_weights")
    return model.eval().requires_grad_(False)
