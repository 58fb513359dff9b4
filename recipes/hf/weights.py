"""Weights as the library's files have them: its own renamings and conversions, a tensor at a time, both ways.

Files of a mixture of experts have a matrix for each expert and projection, the model has one tensor for all of them;
other files have older names.  The library's table says which conversions a model needs.  It loads and saves whole
models by it; here it is asked for one tensor, or for those rows of it that a rank keeps.
Source: transformers, core_model_loading.py and conversion_mapping.py.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from trainer.recipes.hf.config import HfConfig
from trainer.recipes.hf.model import build
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    apply_converters,
    apply_renamings,
    dot_natural_key,
    rename_source_key,
)

from trainer.errors import setting_error
from trainer.recipe import WeightSource
from trainer.weights.huggingface import SafetensorsFolder
from trainer.weights.state_dict import find_weights

_LEFT_OUT = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
"""Buffers that old files hold and models compute: the library passes over them in any model."""


def first_weights(config: HfConfig) -> WeightSource | None:
    """Return the weights in the model's folder, which is opened when they are asked for; None if they are drawn."""
    return None if config.fresh else TransformersFolder(config)


def as_stored(config: HfConfig, source: WeightSource) -> WeightSource:
    """Return the tensors that the library's files of the model hold, made of those of `source` under the model's names.

    Raises UserError if `source` is not of this model.
    """
    with torch.device("meta"):
        model = build(config)
    # Without what only older files need, and without prefixes that files may have or not.
    table = get_model_conversion_mapping(model, add_legacy=False)
    back = [entry.reverse_transform() for entry in reversed(table) if not isinstance(entry, PrefixChange)]
    renamings = [entry for entry in back if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in back if isinstance(entry, WeightConverter)]
    made = _Made(model, source, renamings)
    for name, stored in find_weights(model, source, "recipe 'hf'").items():
        renamed, pattern = apply_converters(name, converters)
        if pattern is None:
            made.rename(stored, apply_renamings(name, renamings))
        else:
            made.convert(stored, renamed, pattern, converters)
    return made


class TransformersFolder:
    """The weights in a folder, under the model's names: a `WeightSource` that is opened when it is first asked."""

    def __init__(self, config: HfConfig) -> None:
        self.description = config.path
        self._config = config

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of each tensor, as the model has it."""
        return self._made.shapes

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """The dtype of each tensor, as it is stored."""
        return self._made.dtypes

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return rows [start, stop) of a tensor, or all of it.  Raises UserError if a file cannot be read."""
        return self._made.read(name, start, stop)

    @cached_property
    def _made(self) -> _Made:
        with torch.device("meta"):
            model = build(self._config)
        names = model.state_dict()
        table = get_model_conversion_mapping(model)
        renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in table if isinstance(entry, WeightConverter)]
        files = SafetensorsFolder.as_stored(Path(self.description), "model.path")
        made = _Made(model, files)
        left_out = re.compile("|".join([*_LEFT_OUT, *(model._keys_to_ignore_on_load_unexpected or ())]))
        for name in sorted(files.shapes, key=dot_natural_key):
            found, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, names)
            if found not in names and name in names:
                found, pattern = rename_source_key(name, [], [], model.base_model_prefix, names)
            if pattern is not None:
                made.convert(name, found, pattern, converters)
            elif found in names or not left_out.search(name):
                made.rename(name, found)
        return made


@dataclass
class _Conversion:
    """One application of a converter: the tensors that go into it, by the converter's patterns."""

    target: str
    converter: WeightConverter
    inputs: dict[str, list[str]] = field(default_factory=dict)

    @property
    def keeps_rows(self) -> bool:
        """True if row n of the result is made of the n-th input alone, as an expert is."""
        first, *others = self.converter.operations
        if not isinstance(first, MergeModulelist) or first.dim != 0:
            return False
        return all(isinstance(other, Concatenate) and other.dim > 0 for other in others)


class _Made:
    """Tensors that are those of another source renamed, or converted: a `WeightSource`."""

    def __init__(self, model: Any, source: WeightSource, renamings: Sequence[WeightRenaming] = ()) -> None:
        """`renamings` are applied to what conversions make."""
        self.description = source.description
        self._model, self._source, self._renamings = model, source, renamings
        self._shapes, self._dtypes = source.shapes, source.dtypes
        self._renamed: dict[str, str] = {}
        self._conversions: dict[str, _Conversion] = {}
        self._last: tuple[str, dict[str, torch.Tensor]] = ("", {})

    def rename(self, name: str, new: str) -> None:
        """Have the tensor `name` of the source under another name."""
        self._renamed[new] = name

    def convert(self, name: str, target: str, pattern: str, converters: Sequence[WeightConverter]) -> None:
        """Have the tensor `name` of the source go into a conversion, which makes `target`, maybe among others."""
        converter = next(each for each in converters if pattern in each.source_patterns)
        conversion = self._conversions.setdefault(target, _Conversion(target, converter))
        conversion.inputs.setdefault(pattern, []).append(name)

    @cached_property
    def _results(self) -> dict[str, tuple[_Conversion, tuple[int, ...]]]:
        """Each converted tensor's conversion and shape, found without values."""
        found: dict[str, tuple[_Conversion, tuple[int, ...]]] = {}
        for conversion in self._conversions.values():
            try:
                made = self._run(conversion, self._nowhere)
            except (RuntimeError, ValueError) as error:
                what = f"{conversion.target} cannot be made of its parts ({error})"
                raise setting_error("model.path", self.description, what) from error
            found |= {name: (conversion, tuple(tensor.shape)) for name, tensor in made.items()}
        return found

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of each tensor."""
        renamed = {new: self._shapes[name] for new, name in self._renamed.items()}
        return renamed | {name: shape for name, (_, shape) in self._results.items()}

    @cached_property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """The dtype of each tensor."""
        renamed = {new: self._dtypes[name] for new, name in self._renamed.items()}
        first = {name: next(iter(made.inputs.values()))[0] for name, (made, _) in self._results.items()}
        return renamed | {name: self._dtypes[given] for name, given in first.items()}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return rows [start, stop) of a tensor, or all of it.

        Of what a conversion makes whole, all is kept until another one is asked for: its rows, and what else it makes,
        are asked for one after another.
        """
        if name in self._renamed:
            return self._source.read(self._renamed[name], start, stop)
        conversion, _ = self._results[name]
        if conversion.keeps_rows:
            some = _Conversion(
                conversion.target,
                conversion.converter,
                {pattern: names[start:stop] for pattern, names in conversion.inputs.items()},
            )
            return self._run(some, self._source.read)[name]
        if self._last[0] != conversion.target:
            self._last = ("", {})
            self._last = conversion.target, self._run(conversion, self._source.read)
        tensor = self._last[1][name]
        return tensor[start:stop] if tensor.ndim else tensor

    def _nowhere(self, name: str) -> torch.Tensor:
        return torch.empty(self._shapes[name], dtype=self._dtypes[name], device="meta")

    def _run(self, conversion: _Conversion, read: Any) -> dict[str, torch.Tensor]:
        converter = copy.deepcopy(conversion.converter)
        for pattern, names in conversion.inputs.items():
            for name in names:
                converter.add_tensor(conversion.target, name, pattern, read(name))
        made = converter.convert(conversion.target, model=self._model, config=self._model.config)
        return {
            apply_renamings(name, self._renamings): value[0] if isinstance(value, list) else value
            for name, value in made.items()
        }
