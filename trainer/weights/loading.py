"""Loads the initial or base weights of a training run, and builds unsharded models for inference.

Weights come from checkpoints, run folders, Hugging Face folders, single state-dict files (not for inference), or the
source that the model spec names (`ModelSpec.weights`).  Functions that take a `Channel` are collective and raise errors
on all ranks together; `load_weights` needs no process group.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.checkpoint.find import find_checkpoint
from trainer.checkpoint.weights import StoredWeights, open_checkpoint
from trainer.config.changes import stored_value
from trainer.config.files import declared_model
from trainer.config.load import load_stored
from trainer.config.model_folder import (
    CONFIG_JSON,
    DeclaredModel,
    find_native,
    generic_model_of,
    read_declared_model,
)
from trainer.config.schema import RunConfig, name_of_source
from trainer.config.weights import Location, cannot_quantize_random_weights_error, local_model_path, locate
from trainer.distributed.channel import Channel
from trainer.errors import UserError, print_stderr
from trainer.experts import ADAPTERS
from trainer.model.documents import guard_documents
from trainer.model.head import is_score_name
from trainer.model.initial_weights import materialize
from trainer.model.lora import is_base_weight, name_without_adapters, transposed_layers, weights_to_pack
from trainer.model.mup import scale_initial_weights
from trainer.model.network import build_network, replace_head
from trainer.model.packed import CODE_BITS, Packing
from trainer.model.units import find_blocks
from trainer.model_spec import ModelSpec
from trainer.weights.adapters import (
    BASE,
    BaseWeights,
    MergedSource,
    adapted_layers,
    checksum_lines,
    combine_checksums,
    find_adapter_parts,
    rename_for_adapters,
    without_adapters,
    wrong_base_message,
)
from trainer.weights.model_files import ModelFiles, read_model_files
from trainer.weights.sources import SafetensorsFolder, StateDictFile, WeightSource, fill, find_weights, joined
from trainer.weights.two_sources import contradictions


def init_weights(model: nn.Module, config: RunConfig, device: torch.device, load_later: bool) -> None:
    """Allocate a model that is on the meta device, and fill it: randomly, or with the weights that its spec provides.

    load_later: whether `load_initial_weights`, `load_base` or a checkpoint will load the weights; if so, nothing is
        loaded here, and the base weights are left uninitialized if `train.init_from` or the model spec names them.
    """
    spec = config.spec
    source = spec.initial_weights(config.model)
    loads_base = source is not None or (load_later and config.train.init_from is not None)
    materialize(
        model, config.run.seed, device, spec.init, config.fsdp.cpu_offload, is_base_weight if loads_base else None
    )
    scale_initial_weights(model, config)
    if source is not None and not load_later:
        _fill_base(model, source, f"model.name={config.model.name}")


def load_initial_weights(
    model: nn.Module, model_files: ModelFiles, config: RunConfig, channel: Channel, setting: str | None = None
) -> str:
    """Load the initial weights from `train.init_from`, else those that the spec provides; else keep the random ones.

    With adapters, `load_base` has already loaded the weights.  Stores in `model_files` the run's own tokenizer, and the
    files that came with the weights or else those in `model.path`.  Returns a description of where the weights came
    from, for the start block.

    setting: the setting to name in errors if the model is not the one that the run's own settings describe.

    Raises UserError on all ranks if the weights cannot be opened or do not fit.  Collective.
    """
    initial = _open_initial_weights(config, channel, setting)
    source, location, path = initial.source, initial.location, initial.path
    is_folder = location is not None and location.kind == "huggingface"
    if channel.is_main and is_folder and not (Path(path) / CONFIG_JSON).exists():
        print_stderr(
            f"warning: {initial.setting}: {path} has no {CONFIG_JSON}: settings without a tensor, such as rope_theta, "
            "are taken from model.*"
        )
    if source is not None and not config.lora.rank:
        channel.agreed(lambda: fill(model, source, initial.setting))
        rounded = _rounded_frozen_weights(model, source, initial.setting)
        if channel.is_main and rounded:
            print_stderr(
                f"warning: train.weights_dtype={config.train.weights_dtype}: {len(rounded)} frozen weights are stored "
                f"in a wider dtype in {source.description}, and are rounded here and in an export: {rounded[0]}"
                f"{', ...' if len(rounded) > 1 else ''}\n  to keep them: train.weights_dtype=float32"
            )

    files = channel.agreed(lambda: _read_small_files(source, config) if channel.is_main else {})
    model_files.files = channel.broadcast(files)
    model_files.store_tokenizer(config, channel)
    if source is None:
        note = f"; the weights in {path} are not used" if path else ""
        return f"drawn at random (run.seed={config.run.seed}){note}"
    where = name_of_source(str(Path(path).absolute())) if path and "://" not in path else path or source.description
    remarks: list[str] = getattr(source, "remarks", [])  # of a folder's files
    if channel.is_main and hasattr(source, "remarks"):
        remarks = [*remarks, *contradictions(source.description)]
    return "; ".join([where, *remarks])


def _read_small_files(source: WeightSource | None, config: RunConfig) -> dict[str, bytes]:
    """Return the small files that came with the weights of `source`, else those in `model.path`."""
    files: dict[str, bytes] = {}
    origin = source.adapters if isinstance(source, MergedSource) else source
    if isinstance(origin, StoredWeights):
        files = ModelFiles.of_checkpoint(origin).files
    elif isinstance(origin, SafetensorsFolder):
        files = read_model_files(origin.description)
    return files or (read_model_files(config.model_path) if config.model_path else {})


def _rounded_frozen_weights(model: nn.Module, source: WeightSource, setting: str) -> list[str]:
    """Return the frozen parameters of `model` whose dtype cannot represent the values that `source` stores.

    Training does not change them, but loading rounds them.
    """
    narrow = [
        (name, p.dtype)
        for name, p in model.named_parameters()
        if not p.requires_grad and p.is_floating_point() and p.dtype != torch.float32
    ]
    if not narrow:
        return []
    names, dtypes = find_weights(model, source, setting), source.dtypes
    return [
        name for name, dtype in narrow if name in names and torch.promote_types(dtype, dtypes[names[name]]) != dtype
    ]


def load_base(model: nn.Module, config: RunConfig, channel: Channel, setting: str | None = None) -> BaseWeights:
    """Load weights that a run does not train, such as the base of adapters, and return their identity.

    If they are random, nothing is loaded.  Each rank reads its own rows and, for the checksum, some of the tensors.

    setting: see `load_initial_weights`.

    Raises UserError on all ranks if the weights cannot be opened or do not fit, or if they are random and
    `lora.base_dtype` quantizes them.  Collective: a few small messages.
    """
    initial = _open_initial_weights(config, channel, setting)
    source = initial.source
    if source is None:
        if config.lora.packs:
            raise cannot_quantize_random_weights_error(config)
        return BaseWeights()
    filled = channel.agreed(lambda: _fill_base(model, source, initial.setting))
    lines = channel.agreed(lambda: checksum_lines(source, filled.values(), channel.rank, channel.size))
    path = initial.path if "://" in initial.path else name_of_source(str(Path(initial.path).absolute()))
    checksum = combine_checksums(channel.gather(lines))
    return BaseWeights(path, checksum, filled, setting or "train.init_from")


def _fill_base(model: nn.Module, source: WeightSource, setting: str) -> dict[str, str]:
    """Fill all weights except adapters.  Returns their names in `source`, by their names in the model."""
    renamed = rename_for_adapters(source, (name for name, _ in model.named_parameters()))
    fill(model, renamed, setting, only=is_base_weight)
    names = find_weights(model, renamed, setting, only=is_base_weight)
    return {name: name_without_adapters(stored) for name, stored in names.items()}


@dataclass(frozen=True)
class _InitialWeights:
    """The weights that a run starts from.

    source: the source of the weights; None if they are random.
    setting: the setting that names the weights, for messages.
    location: the location that `train.init_from` names (for a run folder, its newest checkpoint); None if unset.
    path: the path of `location`, else of the model's folder; may be empty.
    """

    source: WeightSource | None
    setting: str
    location: Location | None
    path: str


def _open_initial_weights(config: RunConfig, channel: Channel, setting: str | None) -> _InitialWeights:
    """Open the initial weights: those of `train.init_from`, else those that the model spec provides.  Collective."""
    init_from = config.train.init_from
    if init_from is None:
        source = channel.agreed(lambda: config.spec.initial_weights(config.model))
        return _InitialWeights(source, setting or f"model.name={config.model.name}", None, config.model_path or "")
    key = setting or "train.init_from"

    def find() -> Location:
        candidate = locate(init_from)
        if candidate.kind not in ("checkpoint", "run"):
            return candidate
        try:
            return Location(str(find_checkpoint(candidate.path)), "checkpoint")
        except UserError as error:
            raise UserError(f"{key}={error}") from error

    # Rank 0 decides, because each rank could find a different newest checkpoint of a run in progress.
    location: Location = channel.broadcast(channel.agreed(lambda: find() if channel.is_main else None))
    allow = config.checkpoint.allow_changes
    source = channel.agreed(lambda: open_weights(location, config.spec, config.model, key, allow))
    return _InitialWeights(source, key, location, location.path)


# ---------------------------------------------------------------------------------------------------------------
# A model for inference


def load_weights(
    path: str | os.PathLike[str],
    device: torch.device | str = "cpu",
    allow_import: Collection[str] = (),
    ema: bool = False,
) -> nn.Module:
    """Return the model with the weights at `path`, unsharded and in evaluation mode.

    path: a checkpoint, a run folder (its newest checkpoint), or a Hugging Face folder of a supported model.
    allow_import: modules that may be imported because a checkpoint's model is defined there ("my_models" for
        model.name=my_models:tiny).  Importing runs code, and a checkpoint may come from anywhere, so by default only
        registered models are built.
    ema: whether to use the averaged weights of a run with `train.ema`.

    Raises UserError if there are no weights at `path`, or if the model is neither registered nor allowed.
    """
    return open_model(locate(local_model_path(path)), allow_import, ema).load(device)


@dataclass(frozen=True)
class StoredModel:
    """A model whose weights are in a Hugging Face folder or a checkpoint.

    stored: the open checkpoint, and `config` the configuration of its run; None for a folder.
    """

    location: Location
    spec: ModelSpec
    model_config: Any
    stored: StoredWeights | None = None
    config: RunConfig | None = None

    def build(self) -> nn.Module:
        """Return the model on the meta device; with adapters, separate from their base, if the run has them."""
        return build_meta_model(self.spec, self.model_config) if self.config is None else build_network(self.config)

    def load(self, device: torch.device | str = "cpu") -> nn.Module:
        """Return the model with its weights, unsharded and in evaluation mode.  See `load_weights`."""
        return load_unsharded(self.build(), self.spec, self._open_weights(), torch.device(device))

    def _open_weights(self) -> WeightSource:
        if self.stored is None:
            return open_weights(self.location, self.spec, self.model_config, "path")
        if not self.stored.parts.get(BASE, {}).get("path"):
            return self.stored
        base = open_base(self.stored, self.spec, self.model_config)  # the checkpoint holds only adapters
        return joined(rename_for_adapters(base, self.stored.shapes), self.stored)


def open_model(location: Location, allow_import: Collection[str] = (), ema: bool = False) -> StoredModel:
    """Return the model at a location, without reading its weights; see `load_weights`.

    For a Hugging Face folder, this is a native model if one supports it, else one of transformers.
    """
    if location.kind == "huggingface":
        spec, model_config = find_native(location.path) or generic_model_of(location.path)
        return StoredModel(location, spec, model_config)
    stored = open_checkpoint(location.path, ema)
    config = load_stored(stored.config_yaml, allow_import=allow_import)
    return StoredModel(location, config.spec, config.model, stored, config)


def build_meta_model(spec: ModelSpec, model_config: object) -> nn.Module:
    """Build a model on the meta device."""
    with torch.device("meta"):
        return spec.build_model(model_config)


def load_unsharded(model: nn.Module, spec: ModelSpec, source: WeightSource, device: torch.device) -> nn.Module:
    """Allocate `model` unsharded on `device`, fill it from `source`, and put it in evaluation mode."""
    materialize(model, 0, device, spec.init, is_loaded_later=lambda name: True)  # some buffers are not stored
    fill(model, source, setting="load_weights")
    guard_documents(model)
    return model.eval().requires_grad_(False)


# ---------------------------------------------------------------------------------------------------------------
# Opening


def open_weights(
    location: Location,
    spec: ModelSpec,
    model_config: Any,
    setting: str,
    allow_changes: Collection[str] | None = None,
) -> WeightSource:
    """Open the weights at `location` for a model, under the model's names and with adapters merged.

    allow_changes: if not None, the model fields stored at the location must equal those of `model_config`, except for
        the keys listed here (`checkpoint.allow_changes`).

    Raises UserError, starting with `setting`, if there are no weights or the fields differ; TrainingFailed if the
    weights are damaged.
    """
    if location.kind == "file":
        return StateDictFile(Path(location.path), setting)
    if location.kind == "huggingface":
        own_weights = None
        if allow_changes is not None:  # refuses a model that reads its own weights
            _check_fields(read_declared_model(location.path, spec, setting), model_config, allow_changes)
        elif spec.weights:
            own_weights = spec.initial_weights(replace(model_config, path=location.path))
        return own_weights or SafetensorsFolder(location.path, spec, model_config, setting)
    stored = open_checkpoint(location.path)
    if allow_changes is not None:
        declared = declared_model(stored.config_yaml, spec.name, f"{stored.storage}/config.yaml")
        _check_fields(declared, model_config, allow_changes)
    return with_merged_adapters(stored, spec, model_config)


def _check_fields(declared: DeclaredModel | None, model_config: Any, allow_changes: Collection[str]) -> None:
    """Raise UserError if the files declare another model; they may declare none."""
    if declared is not None:
        declared.check(model_config, allow_changes)


def with_merged_adapters(
    stored: StoredWeights,
    spec: ModelSpec,
    model_config: Any,
    base: str | None = None,
    dtype: torch.dtype | None = None,
    into_original: bool = False,
) -> WeightSource:
    """Return the weights in a checkpoint, with the adapters, if it has any, merged into them.

    base: the path of the base weights if they have moved; None for the path in the checkpoint.

    If the base weights were quantized in training, the adapters are merged into the dequantized weights, in `dtype` or
    else in their stored dtype.  With `into_original`, they are merged into the weights before quantization, which gives
    a different model from the one that was trained.
    """
    adapted = adapted_layers(stored.shapes)
    if not adapted:
        return stored
    keys = ("alpha", "rank", "base_dtype")
    alpha, rank, base_dtype = (stored_value(stored.config_yaml, f"lora.{key}") for key in keys)
    assert isinstance(alpha, (int, float))
    assert isinstance(rank, int)
    model = build_meta_model(spec, model_config)
    transposed = transposed_layers(model)
    packings: dict[str, Packing] = {}
    experts = find_adapter_parts(model, adapted)
    if str(base_dtype) in CODE_BITS and not into_original:
        expert_adapters = {matrix.adapter for matrix in experts.values()}
        layers = {name.replace(f".{ADAPTERS}.", ".") if name in expert_adapters else name for name in adapted}
        names = weights_to_pack(model, find_blocks(model, spec), layers)
        packings = {name: Packing(str(base_dtype), model.get_parameter(name).shape[-1]) for name in names}
    weights = open_base(stored, spec, model_config, base)
    return MergedSource(weights, stored, alpha / rank, transposed, packings, dtype, experts)


def open_base(stored: StoredWeights, spec: ModelSpec, model_config: Any, path: str | None = None) -> WeightSource:
    """Return the base weights of a checkpoint with adapters, under their names in the model without adapters.

    The checkpoint contains the base weights if they were random.  Otherwise they are read from the path that it records
    or, if they have moved, from `path`.  Raises UserError if they are missing or have changed since training.
    """
    identity = stored.parts.get(BASE, {})
    if not identity.get("path"):
        return without_adapters(stored)
    base_path = local_model_path(path or str(identity["path"]), "base")
    if "://" not in base_path and not Path(base_path).exists():
        raise UserError(
            f"{stored.description}: has adapters for the weights of {base_path}, which is missing\n"
            "  to fix: move it back, or export with --base and the folder where it is now"
        )
    source = open_weights(locate(base_path), spec, model_config, "base")
    model = build_meta_model(spec, model_config)
    if heads := [shape for name, shape in stored.shapes.items() if is_score_name(name)]:
        replace_head(model, spec, model_config, heads[0][0])
    names = find_weights(model, source, "base").values()
    checksum = combine_checksums([checksum_lines(source, names)])
    if checksum != identity["checksum"]:
        raise UserError(f"{stored.description}: {wrong_base_message(base_path, checksum, identity)}")
    return source
