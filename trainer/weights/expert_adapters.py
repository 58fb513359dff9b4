"""Exports the LoRA adapters of stacked experts, either merged into the experts or in peft's format.

In peft's format, the adapter of an expert parameter belongs to the parameter's module (`target_parameters`), and its
factors are two matrices.  A is (E x R, in): the R rows of each expert are consecutive.  B is (out, R x E): for each
of the R components, the columns of all experts are consecutive.  If several parameters of a module have adapters,
each adapter wraps the previous one as its `base_layer`, in the order of the module's parameters.  Source: peft 0.19.1
and later, `ParamWrapper`.

Shape suffixes: E experts, K inputs and N outputs of a matrix, R rank of the adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from trainer.experts import ADAPTER_NAME, ADAPTERS, matrices_of
from trainer.model.lora import expert_matrices, huggingface_module, parse_adapter
from trainer.weights.sources import WeightSource


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
            adapter, start = f"{module_name}.{ADAPTERS}.{matrix}", 0
            for name in parameters if adapter in adapters else ():
                stop = start + module.get_parameter(name).shape[2 if is_transposed else 1]
                parts[f"{module_name}.{name}"] = ExpertAdapterPart(adapter, (start, stop), is_transposed)
                start = stop
    return parts


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


class PeftFactors:
    """A `WeightSource` that returns the factors of expert adapters as matrices, as in peft's format."""

    def __init__(self, source: WeightSource, experts: Collection[str]) -> None:
        """`experts`: the names of the adapters that belong to experts."""
        self.description, self.dtypes, self._source = source.description, source.dtypes, source
        self._letters = {
            name: part[1] for name in source.shapes if (part := parse_adapter(name)) and part[0] in experts
        }
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: self._shape(name, shape) for name, shape in source.shapes.items()
        }
        self._cached: tuple[str, torch.Tensor] = ("", torch.empty(0))

    def _shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        letter = self._letters.get(name)
        if letter is None:
            return shape
        return (shape[0] * shape[1], shape[2]) if letter == "A" else (shape[1], shape[2] * shape[0])

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return rows [start, stop) of a tensor, or all of it."""
        if name not in self._letters:
            return self._source.read(name, start, stop)
        if self._cached[0] != name:
            stacked = self._source.read(name)
            ordered = stacked if self._letters[name] == "A" else stacked.permute(1, 2, 0)  # to (out, rank, expert)
            self._cached = (name, ordered.reshape(self.shapes[name]))
        return self._cached[1][start:stop]
