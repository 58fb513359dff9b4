"""Identifies the base weights of LoRA adapters, merges adapters into them, and exports adapters in peft's format.

The checkpoint of a LoRA run does not hold the base weights, unless they were randomly initialized.  It records their
path and a checksum: they are read from that path unless another is given, and the checksum shows whether they have
changed.

In peft's format, the adapter of an expert parameter belongs to the parameter's module (`target_parameters`), and its
factors are two matrices.  A is (E x R, in): the R rows of each expert are consecutive.  B is (out, R x E): for each
of the R components, the columns of all experts are consecutive.  If several parameters of a module have adapters,
each adapter wraps the previous one as its `base_layer`, in the order of the module's parameters.  Source: peft 0.19.1
and later, `ParamWrapper`.

Shape suffixes: E experts, K inputs and N outputs of a matrix, R rank of the adapter.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.checkpoint.state_parts import StatePart
from trainer.config.model_folder import find_huggingface
from trainer.config.schema import LoraSection
from trainer.errors import UserError
from trainer.experts import ADAPTER_NAME, ADAPTERS, matrices_of
from trainer.files import crc32
from trainer.model.head import is_score_name
from trainer.model.lora import (
    expert_matrices,
    huggingface_module,
    name_without_adapters,
    parse_adapter,
    transposed_layers,
)
from trainer.model.network import HuggingFaceNames
from trainer.model.packed import Packing
from trainer.model_spec import ModelSpec, Transposed
from trainer.weights.exporting import ADAPTER_CONFIG, ADAPTER_WEIGHTS, MARK, write_folder
from trainer.weights.model_files import ModelFiles, is_tokenizer_file, json_bytes
from trainer.weights.sources import MappedSource, Origin, WeightSource, renamed, row_blocks

BASE = "base"
"""The key in a checkpoint's state for the entry that identifies the base weights under the adapters."""

REFERENCE = "reference"
"""The key in a checkpoint's state for the entry that identifies the weights of a separate reference model."""


class BaseWeights(StatePart):
    """Identifies weights that a run does not train: the base of its adapters, its reference model or its teacher.

    Does not hold the weights.  Part of the run's state, and the same on all ranks.

    path: where the weights were loaded from; empty for random weights, which checkpoints then contain.
    checksum: checksum of the weights (see `combine_checksums`); empty for random weights.
    names: the names, in the model's state, of the weights that checkpoints leave out.
    setting: the configuration key that names the weights, for messages.
    """

    def __init__(
        self,
        path: str = "",
        checksum: str = "",
        names: Collection[str] = (),
        setting: str = "train.init_from",
    ) -> None:
        self.path, self.checksum, self.names, self.setting = path, checksum, frozenset(names), setting

    def state_dict(self) -> dict[str, Any]:
        return {"path": self.path, "checksum": self.checksum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: the weights have been read from their path, and `changes_from` has compared them."""

    def changes_from(self, stored: Mapping[str, Any], allowed: Collection[str]) -> tuple[list[str], list[str]]:
        """Compare with the state that a run has stored; return lists of errors and of remarks.

        Different weights are an error; a different path is not.
        """
        if stored["checksum"] == self.checksum:
            return [], []
        return [wrong_base_message(self.path, self.checksum, stored, self.setting)], []


def wrong_base_message(path: str, checksum: str, expected: Mapping[str, Any], setting: str = "train.init_from") -> str:
    """Return the error message for weights that differ from the ones in `expected`, the stored state of a run."""
    kind = "base model" if setting == "train.init_from" else "model"
    return (
        f"{setting}={path or 'null'}: is not the {kind} that the run was trained with; that was "
        f"{expected['path'] or 'drawn at random'} (checksum {expected['checksum'] or 'none'}, this has "
        f"{checksum or 'none'})"
    )


def checksum_lines(source: WeightSource, names: Iterable[str], rank: int = 0, num_ranks: int = 1) -> dict[str, str]:
    """Return a line with the name, shape, dtype and CRC-32 of each tensor of `names` that this rank reads, by name.

    A rank reads every `num_ranks`-th tensor in order of decreasing size, one block of rows at a time.
    """
    shapes, dtypes = source.shapes, source.dtypes
    largest_first = sorted(names, key=lambda name: (-torch.Size(shapes[name]).numel(), name))
    lines = {}
    for name in largest_first[rank::num_ranks]:
        crc = 0
        for start, stop in row_blocks(shapes[name], dtypes[name], 0, shapes[name][0]) if shapes[name] else [(0, None)]:
            block = source.read(name, start, stop).contiguous().flatten()
            crc = crc32(block.view(torch.uint8).numpy().data, crc)
        lines[name] = f"{name} {list(shapes[name])} {dtypes[name]} {crc:08x}"
    return lines


def combine_checksums(lines: Iterable[Mapping[str, str]]) -> str:
    """Combine the lines of all ranks into one checksum, which does not depend on the number of ranks."""
    all_lines = {name: line for rank_lines in lines for name, line in rank_lines.items()}
    return hashlib.sha256("\n".join(all_lines[name] for name in sorted(all_lines)).encode()).hexdigest()[:16]


# ---------------------------------------------------------------------------------------------------------------
# Names


def rename_for_adapters(source: WeightSource, names: Iterable[str]) -> WeightSource:
    """Rename weights of a model without adapters to their names in the model with adapters.

    names: the names of the parameters of the model with adapters.
    """
    layers = adapted_layers(names)

    def rename(name: str) -> str:
        layer, _, suffix = name.rpartition(".")
        return f"{layer}.base_layer.{suffix}" if layer in layers else name

    return renamed(source, rename) if layers else source


def without_adapters(source: WeightSource) -> WeightSource:
    """Return only the base weights of a source with adapters, under their names in the model without adapters."""
    return renamed(source, lambda name: None if parse_adapter(name) else name_without_adapters(name))


def adapted_layers(names: Iterable[str]) -> set[str]:
    """Return the names of the layers whose adapter parameters are among `names`."""
    parts = (parse_adapter(name) for name in names)
    return {part[0] for part in parts if part}


# ---------------------------------------------------------------------------------------------------------------
# Merging


@dataclass(frozen=True)
class ExpertAdapterPart:
    """The part of an adapter that belongs to one parameter of the experts; an adapter may span several parameters.

    adapter: the adapter's name, `<experts>.adapters.<matrix>`.
    outputs: the range [start, stop) of the adapter's outputs that belong to the parameter.
    is_transposed: whether the parameter has shape (E, in, out) rather than (E, out, in).
    """

    adapter: str
    outputs: tuple[int, int]
    is_transposed: bool

    def product(self, adapters: WeightSource, start: int, stop: int | None) -> torch.Tensor:
        """Return B @ A for experts [start, stop), or for all from `start` on if `stop` is None.

        The product is in float32, and transposed if the parameter is.
        """
        down_ERK, up_ENR = (
            adapters.read(f"{self.adapter}.lora_{part}.{ADAPTER_NAME}.weight", start, stop).float() for part in "AB"
        )
        product = up_ENR[:, slice(*self.outputs)] @ down_ERK
        return product.transpose(1, 2) if self.is_transposed else product


def find_adapter_parts(model: nn.Module, adapters: Collection[str]) -> dict[str, ExpertAdapterPart]:
    """Return the adapter part of each expert parameter that has an adapter in `adapters`, by the parameter's name.

    model: the model without adapters.
    adapters: the names of the adapters.
    """
    parts = {}
    for module_name, module in model.named_modules():
        is_transposed = bool(getattr(module, "is_transposed", False))
        for matrix, parameters in matrices_of(module).items():
            adapter = f"{module_name}.{ADAPTERS}.{matrix}"
            start = 0
            for name in parameters if adapter in adapters else ():
                stop = start + module.get_parameter(name).shape[2 if is_transposed else 1]
                parts[f"{module_name}.{name}"] = ExpertAdapterPart(adapter, (start, stop), is_transposed)
                start = stop
    return parts


class MergedSource:
    """A `WeightSource` of base weights with adapters merged into them.

    Each weight is W + (B @ A) * scaling, computed in float32 and returned in the dtype of W.  B @ A is computed for a
    whole layer, as in other implementations, to be bit-identical to theirs, and kept for one layer at a time.
    For stacked experts, only the requested experts are computed.  A new head is returned unchanged.

    scaling: alpha / rank.
    transposed: the layers whose W has shape (in, out).
    packings: the formats of the weights that were quantized in training, by name.  For these, W is the dequantized
        weight, and the result has dtype `dtype`, if given.
    experts: the parameters of experts that have adapters, by name.
    """

    def __init__(
        self,
        base: WeightSource,
        adapters: WeightSource,
        scaling: float,
        transposed: Collection[str] = (),
        packings: Mapping[str, Packing] | None = None,
        dtype: torch.dtype | None = None,
        experts: Mapping[str, ExpertAdapterPart] | None = None,
    ) -> None:
        self.description, self.adapters = adapters.description, adapters
        self._head_names = {name for name in adapters.shapes if is_score_name(name)}
        self._base_weights, self._scaling, self._transposed = base, scaling, frozenset(transposed)
        self._packings = packings or {}
        self._layers = {f"{layer}.weight": layer for layer in adapted_layers(adapters.shapes)}
        self._experts = experts or {}
        self.shapes = {**base.shapes, **{name: adapters.shapes[name] for name in self._head_names}}
        self.dtypes = {name: (name in self._packings and dtype) or stored for name, stored in base.dtypes.items()}
        self.dtypes |= {name: adapters.dtypes[name] for name in self._head_names}
        self._product: tuple[str, torch.Tensor] = ("", torch.empty(0))

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return rows [start, stop) of a tensor, or all of it."""
        if name in self._head_names:
            return self.adapters.read(name, start, stop)
        weight = self._base_weights.read(name, start, stop)
        if name in self._packings:
            weight = self._packings[name].rounded(weight)
        if name in self._layers:
            weight = weight + self._adapter_product(name)[start:stop]
        if name in self._experts:
            weight = weight + self._experts[name].product(self.adapters, start, stop) * self._scaling
        return weight.to(self.dtypes[name])

    def _adapter_product(self, name: str) -> torch.Tensor:
        if self._product[0] != name:
            layer = self._layers[name]
            first, second = (self.adapters.read(f"{layer}.lora_{part}.{ADAPTER_NAME}.weight").float() for part in "AB")
            product = second @ first
            self._product = (name, (product.t() if layer in self._transposed else product) * self._scaling)
        return self._product[1]


# ---------------------------------------------------------------------------------------------------------------
# Export in peft's format: adapter_model.safetensors and adapter_config.json


def export_adapter(
    source: WeightSource,
    spec: ModelSpec,
    model_config: Any,
    model: nn.Module,
    lora: LoraSection,
    folder: str | os.PathLike[str],
    *,
    base: str = "",
    dtype: torch.dtype | None = None,
    model_files: ModelFiles | None = None,
    overwrite: bool = False,
    setting: str = "folder",
) -> list[Path]:
    """Write the adapters of `source` to `folder` in peft's format, and return the paths of the files.

    model: the model without adapters, on any device.
    base: the path or Hub name of the base weights, which peft reads from the export.
    dtype: the dtype of the exported adapters; None keeps theirs.
    model_files: the files that came with the model, whose tokenizer files are copied.

    Raises UserError if the folder cannot be written (as `exporting.export` does), if a layer has no Hugging Face name,
    or if only some of the layers are stored transposed.
    """
    names = HuggingFaceNames(spec, model_config)
    adapters = adapted_layers(source.shapes)
    expert_prefixes = peft_prefixes(model, adapters, names.to_huggingface)
    layers = adapters - expert_prefixes.keys()
    weight_names = {layer: _huggingface_weight(names, spec, layer) for layer in layers}
    transposed = {layer for layer in layers if isinstance(weight_names[layer], Transposed)}
    transposed |= layers & transposed_layers(model)
    if transposed not in (set(), layers):
        raise UserError(f"model {spec.name!r}: only some of the layers with adapters are stored transposed")
    prefixes = {layer: name.removesuffix(".weight") for layer, name in weight_names.items()}
    prefixes |= expert_prefixes
    origins = {}
    for name in source.shapes:
        if part := parse_adapter(name):
            layer, letter = part
            transform = _TO_MATRIX[letter] if layer in expert_prefixes else None
            exported_name = f"base_model.model.{prefixes[layer]}.lora_{letter}.weight"
            origins[exported_name] = Origin(source, name, transform=transform)
        elif is_score_name(name):
            origins[f"base_model.model.{names.to_huggingface(name)}"] = Origin(source, name)
    exported = MappedSource(source.description, origins)
    dtypes = {name: dtype or stored for name, stored in exported.dtypes.items()}
    has_head = any(map(is_score_name, source.shapes))
    all_names = [names.to_huggingface(name) or name for name in model.state_dict(keep_vars=True)]
    alpha = int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha
    settings = {
        **{
            "peft_type": "LORA",
            "task_type": "SEQ_CLS" if has_head else "CAUSAL_LM",
            "base_model_name_or_path": base or None,
        },
        **{"r": lora.rank, "lora_alpha": alpha, "lora_dropout": lora.dropout, "bias": "none"},
        "target_modules": target_modules({name.removesuffix(".weight") for name in weight_names.values()}, all_names),
        **({"modules_to_save": ["score"]} if has_head else {}),
        **{"fan_in_fan_out": bool(transposed), "init_lora_weights": True, "inference_mode": True},
    }
    if expert_prefixes:
        settings["target_parameters"] = target_parameters(model, adapters, names.to_huggingface)
    model_files = model_files or ModelFiles()
    tokenizer_files = {name: data for name, data in model_files.files.items() if is_tokenizer_file(name)}
    texts = {ADAPTER_CONFIG: json_bytes(settings), **(model_files.tokenizer or tokenizer_files)}
    files = {ADAPTER_WEIGHTS: [*origins]}
    return write_folder(Path(folder).expanduser(), texts, files, exported, dtypes, MARK, overwrite, setting)


_TO_MATRIX: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "A": lambda factor_ERK: factor_ERK.reshape(-1, factor_ERK.shape[2]),
    "B": lambda factor_ENR: factor_ENR.permute(1, 2, 0).reshape(factor_ENR.shape[1], -1),
}
"""Functions that turn the factors of an adapter of experts into matrices, as in peft's format."""


def _huggingface_weight(names: HuggingFaceNames, spec: ModelSpec, layer: str) -> str:
    name = names.to_huggingface(f"{layer}.weight")
    if name is None and find_huggingface(spec).stored is not None:
        return f"{layer}.weight"  # a transformers model already has Hugging Face's names
    if name is None:
        raise UserError(f"model {spec.name!r}: hf.names lacks {layer}.weight")
    return name


def target_modules(layers: Collection[str], weights: Collection[str]) -> list[str]:
    """Return peft's `target_modules`: the last part of each layer's name if all are unambiguous, else the full names.

    A last part is ambiguous if a module that is not in `layers` has it too.

    weights: the names of all tensors of the model.
    """
    modules = {name.rpartition(".")[0] for name in weights}
    last_parts = {layer.rpartition(".")[2] for layer in layers}
    is_unambiguous = all(module in layers for module in modules if module.rpartition(".")[2] in last_parts)
    return sorted(last_parts if is_unambiguous else layers)


def peft_prefixes(
    model: nn.Module, adapters: Collection[str], to_huggingface: Callable[[str], str | None]
) -> dict[str, str]:
    """Return the prefix of the tensor names in peft's format for each adapter that belongs to stacked experts.

    model: the model without adapters.
    adapters: the names of the adapters; those of other layers are ignored.
    """
    targets, prefixes = _targets(model, to_huggingface), {}
    for name in (name for name in targets if name in adapters):
        target_module, same_module = targets[name].rpartition(".")[0], f"{name.rpartition('.')[0]}."
        later = [*targets][[*targets].index(name) + 1 :]
        prefixes[name] = target_module + ".base_layer" * sum(n.startswith(same_module) and n in adapters for n in later)
    return prefixes


def target_parameters(
    model: nn.Module, adapters: Collection[str], to_huggingface: Callable[[str], str | None]
) -> list[str]:
    """Return peft's `target_parameters`: the last two parts of each name if these are unambiguous, else full names."""
    targets = _targets(model, to_huggingface)
    full = {target for name, target in targets.items() if name in adapters}
    short = {".".join(target.split(".")[-2:]) for target in full}
    others = set(targets.values()) - full
    return sorted(full if any(other.endswith(f".{name}") for other in others for name in short) else short)


def _targets(model: nn.Module, to_huggingface: Callable[[str], str | None]) -> dict[str, str]:
    """Return the adapters that the experts of `model` can have, each with its parameter's name in transformers."""
    targets = {}
    for name, parameter in expert_matrices(model).items():
        module, _, matrix = name.rpartition(".")
        targets[f"{module}.{ADAPTERS}.{matrix}"] = (
            f"{huggingface_module(to_huggingface(parameter) or parameter)}.{matrix}"
        )
    return targets
