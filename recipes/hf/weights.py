"""Converts weights between transformers' checkpoint files and models, tensor by tensor, in both directions.

The files of most mixture-of-experts models have one matrix per expert and projection, while the models stack the
matrices of all experts.  Some files use older names.  transformers ("the library") has a table of the renamings and
conversions that a model needs, and applies it to complete models.  This module applies the table to a single tensor or,
where rows can be converted separately, to the rows that a rank needs.
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
from trainer.model.head import ScoreHead, is_score_name
from trainer.model_spec import WeightSource
from trainer.weights.sources import SafetensorsFolder, find_weights

from .classifier import output_projection
from .config import HfConfig
from .model import build

_IGNORED_BUFFERS = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
"""Patterns that match the names of buffers in old files; models now compute these buffers themselves.

The library ignores such a buffer if the model has one of the same kind.
"""


def initial_weights(config: HfConfig) -> WeightSource | None:
    """Return a source for the weights in the model's folder; None if `config.fresh` is set."""
    return None if config.fresh else TransformersFolder(config)


def as_stored(config: HfConfig, source: WeightSource) -> WeightSource:
    """Return the tensors of `source`, converted to the format in which the library stores this model.

    `source` uses the model's names.  Raises UserError if `source` does not match the model.
    """
    with torch.device("meta"):
        model = build(config)
        if heads := [shape for name, shape in source.shapes.items() if is_score_name(name)]:
            num_outputs, width = heads[0]
            model.set_submodule(output_projection(config, model), ScoreHead(width, num_outputs, torch.float32))
    # Skip the conversions that only older files need, and prefixes that are optional in files.
    table = get_model_conversion_mapping(model, add_legacy=False)
    reversed_table = [entry.reverse_transform() for entry in reversed(table) if not isinstance(entry, PrefixChange)]
    renamings = [entry for entry in reversed_table if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in reversed_table if isinstance(entry, WeightConverter)]
    converted = _ConvertedSource(model, source, renamings)
    for name, stored in find_weights(model, source, "model 'hf'").items():
        renamed, pattern = apply_converters(name, converters)
        if is_score_name(name):
            converted.rename(stored, "score.weight")
        elif pattern is None:
            converted.rename(stored, apply_renamings(name, renamings))
        else:
            converted.convert(stored, renamed, pattern, converters)
    return converted


class TransformersFolder:
    """The weights in a folder, under the model's names: a `WeightSource` that opens its files on first use."""

    def __init__(self, config: HfConfig) -> None:
        self.description = config.path
        self._config = config

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of each tensor in the model."""
        return self._converted.shapes

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """The dtype of each tensor in the files."""
        return self._converted.dtypes

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return rows [start, stop) of a tensor, or all of it.  Raises UserError if a file cannot be read."""
        return self._converted.read(name, start, stop)

    @property
    def remarks(self) -> list[str]:
        """Remarks on the folder's files for the start block."""
        return self._files.remarks

    @cached_property
    def _files(self) -> SafetensorsFolder:
        return SafetensorsFolder(Path(self.description), setting="model.path")

    @cached_property
    def _converted(self) -> _ConvertedSource:
        with torch.device("meta"):
            model = build(self._config)
        names = model.state_dict()
        table = get_model_conversion_mapping(model)
        renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in table if isinstance(entry, WeightConverter)]
        files = self._files
        converted = _ConvertedSource(model, files)
        ignored = re.compile("|".join([*_IGNORED_BUFFERS, *(model._keys_to_ignore_on_load_unexpected or ())]))
        for name in sorted(files.shapes, key=dot_natural_key):
            model_name, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, names)
            if model_name not in names and name in names:
                model_name, pattern = rename_source_key(name, [], [], model.base_model_prefix, names)
            if pattern is not None:
                converted.convert(name, model_name, pattern, converters)
            elif model_name in names or not ignored.search(name):
                converted.rename(name, model_name)
        return converted


@dataclass
class _Conversion:
    """One application of a converter: its input tensors, grouped by the converter's patterns."""

    target: str
    converter: WeightConverter
    inputs: dict[str, list[str]] = field(default_factory=dict)

    @property
    def is_rowwise(self) -> bool:
        """True if row n of the result depends only on the n-th input, as with stacked experts."""
        first, *others = self.converter.operations
        if not isinstance(first, MergeModulelist) or first.dim != 0:
            return False
        return all(isinstance(other, Concatenate) and other.dim > 0 for other in others)


class _ConvertedSource:
    """A `WeightSource` whose tensors are those of another source, renamed or converted."""

    def __init__(self, model: Any, source: WeightSource, renamings: Sequence[WeightRenaming] = ()) -> None:
        """renamings: applied to the names of the converted tensors."""
        self.description = source.description
        self._model, self._source, self._renamings = model, source, renamings
        self._shapes, self._dtypes = source.shapes, source.dtypes
        self._renamed: dict[str, str] = {}
        self._conversions: dict[str, _Conversion] = {}
        self._last_result: tuple[str, dict[str, torch.Tensor]] = ("", {})

    def rename(self, name: str, new_name: str) -> None:
        """Provide the source's tensor `name` under the name `new_name`."""
        self._renamed[new_name] = name

    def convert(self, name: str, target: str, pattern: str, converters: Sequence[WeightConverter]) -> None:
        """Add the source's tensor `name` to the inputs of the conversion that produces `target`."""
        converter = next(entry for entry in converters if pattern in entry.source_patterns)
        conversion = self._conversions.setdefault(target, _Conversion(target, converter))
        conversion.inputs.setdefault(pattern, []).append(name)

    @cached_property
    def _results(self) -> dict[str, tuple[_Conversion, tuple[int, ...]]]:
        """The conversion and the shape of each converted tensor, computed on the meta device."""
        results: dict[str, tuple[_Conversion, tuple[int, ...]]] = {}
        for conversion in self._conversions.values():
            try:
                tensors = self._run(
                    conversion,
                    lambda name: torch.empty(self._shapes[name], dtype=self._dtypes[name], device="meta"),
                )
            except (RuntimeError, ValueError) as error:
                rule = f"{conversion.target} cannot be converted from its parts ({error})"
                raise setting_error("model.path", self.description, rule) from error
            results |= {name: (conversion, tuple(tensor.shape)) for name, tensor in tensors.items()}
        return results

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of each tensor."""
        renamed = {new_name: self._shapes[name] for new_name, name in self._renamed.items()}
        return renamed | {name: shape for name, (_, shape) in self._results.items()}

    @cached_property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """The dtype of each tensor."""
        renamed = {new_name: self._dtypes[name] for new_name, name in self._renamed.items()}
        first = {name: next(iter(conversion.inputs.values()))[0] for name, (conversion, _) in self._results.items()}
        return renamed | {name: self._dtypes[input_name] for name, input_name in first.items()}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return rows [start, stop) of a tensor, or all of it.

        If a conversion needs all of its inputs at once, all of its results stay in memory until another such conversion
        is read, because callers read the rows and the results of one conversion consecutively.
        """
        if name in self._renamed:
            return self._source.read(self._renamed[name], start, stop)
        conversion, _ = self._results[name]
        if conversion.is_rowwise:
            rows_only = _Conversion(
                conversion.target,
                conversion.converter,
                {pattern: names[start:stop] for pattern, names in conversion.inputs.items()},
            )
            return self._run(rows_only, self._source.read)[name]
        if self._last_result[0] != conversion.target:
            self._last_result = ("", {})
            self._last_result = conversion.target, self._run(conversion, self._source.read)
        tensor = self._last_result[1][name]
        return tensor[start:stop] if tensor.ndim else tensor

    def _run(self, conversion: _Conversion, read: Any) -> dict[str, torch.Tensor]:
        """Return the results of a conversion by name.  `read(name)` returns an input."""
        converter = copy.deepcopy(conversion.converter)
        for pattern, names in conversion.inputs.items():
            for name in names:
                converter.add_tensor(conversion.target, name, pattern, read(name))
        results = converter.convert(conversion.target, model=self._model, config=self._model.config)
        return {
            apply_renamings(name, self._renamings): value[0] if isinstance(value, list) else value
            for name, value in results.items()
        }
