"""A plain model for inference and evaluation, from a checkpoint, a run or a Hugging Face folder; no process group."""

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

from trainer.checkpoint.source import StoredWeights, find_checkpoint, is_checkpoint, open_checkpoint
from trainer.checkpoint.tree import join
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
from trainer.errors import UserError, say, setting_error
from trainer.model.lora import is_of_the_base, plain_name, transposed_layers
from trainer.model.materialize import materialize
from trainer.model.network import build_network
from trainer.recipe import Recipe, all_recipes
from trainer.weights.access import WeightSource, fill, find_weights
from trainer.weights.adapters import (
    BASE,
    Base,
    Joined,
    Merged,
    adapted_layers,
    checksum_of,
    checksums_of,
    not_the_base,
    under_adapters,
    without_adapters,
)
from trainer.weights.huggingface import SafetensorsFolder
from trainer.weights.origin import Origin, read_folder, read_tokenizer

ORIGIN = "origin"
"""The part of a run's state that holds what came with the model."""

_PLAIN = (".pt", ".pth", ".safetensors")


class PlainFile:
    """One file of whole tensors by our names, as `torch.save(model.state_dict(), ...)` of another trainer leaves it.

    Mapped into memory, so that only the rows that are read are loaded; unpickled as weights only, which runs no code.
    """

    _PREFIXES = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")

    def __init__(self, path: Path, setting: str) -> None:
        self.description = str(path)
        whole: Any
        try:
            if path.suffix == ".safetensors":
                whole = safetensors.torch.load_file(path)
            else:
                whole = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except (OSError, RuntimeError, pickle.UnpicklingError, safetensors.SafetensorError) as error:
            raise setting_error(setting, path, f"cannot be read as a state dict ({error})") from error
        if isinstance(whole, dict) and isinstance(whole.get("model"), dict):
            whole = whole["model"]
        if not isinstance(whole, dict):
            raise setting_error(setting, path, "has no state dict")
        self._tensors = {self._own_name(name): t for name, t in whole.items() if isinstance(t, torch.Tensor)}

    def _own_name(self, name: str) -> str:
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


def settle_path(path: str | os.PathLike[str]) -> str:
    """Return the one thing that a path to weights means now: of a run its newest checkpoint."""
    path = os.fspath(path).removeprefix("file://")
    if Path(path).suffix in _PLAIN or _is_hugging_face(path):
        return os.fspath(path)
    return str(find_checkpoint(path))


def open_weights(path: str | os.PathLike[str], config: RunConfig) -> WeightSource:
    """Return where the weights for the model of `config` are.

    `path`: a checkpoint, a run's folder (its newest), a folder of safetensors, or one file of whole tensors.

    Raises UserError if there are none, or if they are of a model with other fields (`checkpoint.allow_changes` names
    those that may differ); TrainingFailed if they are damaged.
    """
    if Path(path).suffix in _PLAIN:
        return PlainFile(Path(path), "train.init_from")
    source: WeightSource
    if _is_hugging_face(path):
        told = declared_by_folder(os.fspath(path), config.recipe, "train.init_from")
        source = SafetensorsFolder(Path(path), config.recipe, config.model, setting="train.init_from")
    else:
        stored = open_checkpoint(path)
        told = declared_by_yaml(stored.config_yaml, config.recipe.name, f"{stored.place}/config.yaml")
        source = merged(stored, config.recipe, config.model)
    if told is not None:
        told.check(config.model, config.checkpoint.allow_changes)
    return source


def origin_of(source: WeightSource) -> Origin:
    """Return what came with the weights of `source`: what stands beside them, or what a checkpoint has of it."""
    origin = Origin()
    source = source.adapters if isinstance(source, Merged) else source
    if isinstance(source, SafetensorsFolder):
        origin.files = read_folder(source.description)
    elif isinstance(source, StoredWeights) and ORIGIN in source.parts:
        keys = [key for key in source.layout if key.startswith(f"{ORIGIN}.")]
        origin.load_state_dict(join(source.parts[ORIGIN], {key: source.read_stored(key) for key in keys}))
    return origin


# ---------------------------------------------------------------------------------------------------------------
# Checkpoints with adapters


def base_of(stored: StoredWeights, recipe: Recipe, model_config: Any, path: str | None = None) -> WeightSource:
    """Return the weights under a checkpoint's adapters, as a model without adapters has them.

    They are where the checkpoint says, or at `path` if they have moved; or in it.  Raises UserError if they are not
    there, or not the ones that they were.
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
    names = find_weights(plain_network(recipe, model_config), source, "base").values()
    checksum = checksum_of([checksums_of(source, names)])
    if checksum != named["checksum"]:
        raise UserError(f"{stored.description}: {not_the_base(where, checksum, named)}")
    return source


def _open_base(path: str, recipe: Recipe, model_config: Any) -> WeightSource:
    if Path(path).suffix in _PLAIN:
        return PlainFile(Path(path), "base")
    if _is_hugging_face(path):
        own = recipe.first_weights(replace(model_config, path=path)) if recipe.weights is not None else None
        return own or SafetensorsFolder(Path(path), recipe, model_config, setting="base")
    return merged(open_checkpoint(path), recipe, model_config)


def joined(stored: StoredWeights, recipe: Recipe, model_config: Any) -> WeightSource:
    """Return all the weights of a checkpoint's model: with the base that it names, if it holds adapters alone."""
    if not stored.parts.get(BASE, {}).get("path"):
        return stored
    return Joined(under_adapters(base_of(stored, recipe, model_config), stored.shapes), stored)


def merged(stored: StoredWeights, recipe: Recipe, model_config: Any, base: str | None = None) -> WeightSource:
    """Return the weights of a checkpoint's model without adapters: those that it has are merged into them."""
    if not adapted_layers(stored.shapes):
        return stored
    alpha, rank = (stored_value(stored.config_yaml, f"lora.{key}") for key in ("alpha", "rank"))
    assert isinstance(alpha, (int, float))
    assert isinstance(rank, int)
    transposed = transposed_layers(plain_network(recipe, model_config))
    return Merged(base_of(stored, recipe, model_config, base), stored, alpha / rank, transposed)


def doubts(path: str) -> str:
    """Return what cannot be known of the weights at `path`, as a warning; nothing if all is said."""
    if _is_hugging_face(path) and not (Path(path.removeprefix("file://")) / CONFIG).exists():
        return (
            f"train.init_from: {path} has no {CONFIG}: settings without a tensor, such as rope_theta, are taken "
            "from model.*"
        )
    return ""


def give_values(model: nn.Module, config: RunConfig, device: torch.device, is_begun_later: bool) -> None:
    """Give values to a model on the meta device: drawn, or read from where its recipe says that the weights are.

    With `is_begun_later` they are not read here: `begin_from` will, or a checkpoint has them.
    """
    recipe = config.recipe
    source = recipe.first_weights(config.model)
    are_read = source is not None or (is_begun_later and config.train.init_from is not None)
    materialize(
        model, config.run.seed, device, recipe.init, config.fsdp.cpu_offload, is_of_the_base if are_read else None
    )
    if source is not None and not is_begun_later:
        _fill_base(model, source, f"model.name={config.model.name}")


def _fill_base(model: nn.Module, source: WeightSource, setting: str) -> dict[str, str]:
    """Fill all but adapters.  Returns the names of what was filled, each with its name in `source`."""
    under = under_adapters(source, (name for name, _ in model.named_parameters()))
    fill(model, under, setting, only=is_of_the_base)
    found = find_weights(model, under, setting, only=is_of_the_base)
    return {name: plain_name(stored) for name, stored in found.items()}


def _first_weights(config: RunConfig, channel: Channel) -> tuple[WeightSource | None, str, str]:
    """Return where the first weights are (None: they are drawn), the setting that says so, the path.  Collective."""
    given = config.train.init_from
    if given is None:
        source = channel.agreed(lambda: config.recipe.first_weights(config.model))
        return source, f"model.name={config.model.name}", config.model_path or ""
    path: str = channel.broadcast(channel.agreed(lambda: settle_path(given) if channel.is_main else ""))
    return channel.agreed(lambda: open_weights(path, config)), "train.init_from", path


def take_base(model: nn.Module, config: RunConfig, channel: Channel) -> Base:
    """Fill what is no adapter of a model with the first weights, and return which those are.

    If the weights are drawn, nothing is filled.  Each rank reads its rows, and its share of the tensors for the
    checksum.  Raises UserError, on all ranks alike, for weights that do not fit.  Collective: a few small messages.
    """
    source, setting, path = _first_weights(config, channel)
    if source is None:
        return Base()
    filled = channel.agreed(lambda: _fill_base(model, source, setting))
    share = channel.agreed(lambda: checksums_of(source, filled.values(), channel.rank, channel.size))
    return Base(path if "://" in path else str(Path(path).absolute()), checksum_of(channel.gather(share)), filled)


def begin_from(model: nn.Module, origin: Origin, config: RunConfig, channel: Channel) -> str:
    """Fill the model with its first weights: those of `train.init_from`, else those that its recipe names, else drawn.

    Keeps the files that came with them in `origin`.  Returns where the weights come from, for the start block.

    Raises UserError, on all ranks alike, for weights that do not fit.  Collective.
    """
    source, setting, path = _first_weights(config, channel)
    if config.train.init_from and channel.is_main and (doubt := doubts(path)):
        say(f"warning: {doubt}")
    if source is not None and not config.lora.rank:  # under adapters they are already
        channel.agreed(lambda: fill(model, source, setting))
    came = channel.agreed(lambda: _files_of(source, config) if channel.is_main else {})
    origin.files = channel.broadcast(came)
    keep_tokenizer(origin, config, channel)
    if source is None:
        without = f"; {path} has none that are used" if path else ""
        return f"drawn at random (run.seed={config.run.seed}){without}"
    return str(Path(path).absolute()) if path and "://" not in path else path or source.description


def keep_tokenizer(origin: Origin, config: RunConfig, channel: Channel) -> None:
    """Keep the files of the run's own tokenizer and chat template, for its export.  Collective."""
    own = config.data.tokenizer, config.data.chat_template
    origin.tokenizer = channel.broadcast(channel.agreed(lambda: read_tokenizer(*own) if channel.is_main else {}))


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
    model.name=my_models:tiny).  What is imported runs, and a checkpoint may come from anywhere: by default only models
    that are registered already are built.  Raises UserError for others.
    """
    if _is_hugging_face(path):
        recipe, model_config = _model_in(Path(path))
        read = recipe.first_weights(model_config) or SafetensorsFolder(Path(path), recipe, model_config)
        return fill_plain(plain_network(recipe, model_config), recipe, read, torch.device(device))
    return model_of(open_checkpoint(path, ema), device, allow_import)


def model_of(
    stored: StoredWeights, device: torch.device | str = "cpu", allow_import: Collection[str] = ()
) -> nn.Module:
    """Return the model of a checkpoint that is open, as `load_weights` does."""
    config = config_from_yaml(stored.config_yaml, allow_import=allow_import)
    source = joined(stored, config.recipe, config.model)
    return fill_plain(build_network(config), config.recipe, source, torch.device(device))


def _model_in(folder: Path) -> tuple[Recipe, Any]:
    """Return the recipe for the model in a folder, one of our own if it is for that type, and its configuration."""
    model_type = read_config(folder, "path")["model_type"]
    if any(recipe.hf and recipe.hf.model_type == model_type for recipe in all_recipes()):
        return model_config_of(folder, all_recipes())
    return any_model_of(folder)


def _files_of(source: WeightSource | None, config: RunConfig) -> dict[str, bytes]:
    """Return the files that the model comes with: those beside its weights, or of the folder that it is from."""
    files = origin_of(source).files if source is not None else {}
    return files or (read_folder(config.model_path) if config.model_path else {})


def plain_network(recipe: Recipe, model_config: object) -> nn.Module:
    """Return the model as the recipe builds it, on the meta device."""
    with torch.device("meta"):
        return recipe.build_model(model_config)


def fill_plain(model: nn.Module, recipe: Recipe, source: WeightSource, device: torch.device) -> nn.Module:
    """Return `model`, which is on the meta device, whole on `device` and filled from `source`."""
    materialize(model, 0, device, recipe.init, filled_later=lambda name: True)  # buffers may be stored nowhere
    fill(model, source, setting="load_weights")
    return model.eval().requires_grad_(False)
