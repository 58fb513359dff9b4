"""Maximal update parametrization (muP): initial weights and learning rates for models of any width.

`optim.base_model` describes the smaller model for which the learning rate and the scale of the initial weights were
tuned.  Each parameter's initial values and learning rate are rescaled according to the ratio of its dimensions to those
in that model.  At every width, activations then start at the same scale and change by the same amount per step, so the
same learning rate works for all widths.

Source: Yang et al. 2022, "Tensor Programs V", arXiv:2203.03466, table 3, the variant without multipliers in the forward
pass.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import nn

from trainer.config.schema import RunConfig
from trainer.errors import setting_error
from trainer.model.lora import FACTORS
from trainer.model.network import build_network
from trainer.model.parameters import CONVOLUTIONS, is_vector, local, tied_names


@dataclass(frozen=True)
class Growth:
    """A parameter's fan-out (outputs) and fan-in (inputs) in this model and the base model; vectors have fan-in 1."""

    outputs: int
    inputs: int
    base_outputs: int
    base_inputs: int

    @property
    def input_ratio(self) -> float:
        return self.inputs / self.base_inputs

    @property
    def output_ratio(self) -> float:
        return self.outputs / self.base_outputs

    def lr_scale(self, optimizer: str) -> float:
        """Return the learning-rate factor for `adamw` or `sgd`.

        The size of an AdamW step does not depend on the width, but its effects add up over the inputs, so the learning
        rate is inversely proportional to their number.  With SGD, it is also proportional to the number of outputs,
        since the gradients shrink as that number grows.
        """
        if optimizer == "adamw":
            return 1 / self.input_ratio
        return self.output_ratio / self.input_ratio

    def init_scale(self, is_fan_in: bool) -> float:
        """Return the factor by which to scale the initial values.

        is_fan_in: True if these values are already drawn with a variance proportional to 1 / inputs, as in torch's
            linear and convolution layers.
        """
        hidden = 1.0 if is_fan_in else 1 / math.sqrt(self.input_ratio)
        return hidden if self.output_ratio != 1 else hidden / math.sqrt(self.input_ratio)


def find_growth(config: RunConfig, model: nn.Module) -> dict[str, Growth]:
    """Return the growth of each parameter of `model` over `optim.base_model`, by name; empty if that is not set.

    Raises UserError if the base model has different parameters, or if a trained parameter whose shape differs is tied:
    as an embedding table and as an output projection, it would need different factors.
    """
    if config.optim.base_model is None:
        return {}
    base_fields = dataclasses.replace(config.model, **config.optim.base_model)
    base = build_network(dataclasses.replace(config, model=base_fields))
    shapes = {name: tuple(parameter.shape) for name, parameter in base.named_parameters()}
    named = dict(model.named_parameters())
    if different := sorted(shapes.keys() ^ named.keys()):
        rule = f"has different parameters than this model: {different[0]} and {len(different) - 1} more"
        raise setting_error("optim.base_model", config.optim.base_model, rule, fix="name only fields that are widths")
    owners = {id(p): module for module in model.modules() for p in module.parameters(recurse=False)}
    growth = {n: _growth_of(owners[id(p)], tuple(p.shape), shapes[n], is_vector(n, p)) for n, p in named.items()}
    for first, *_ in tied_names(model):
        if named[first].requires_grad and tuple(named[first].shape) != shapes[first]:
            rule = f"{first} is both an embedding table and an output projection, which need different scales"
            fix = "set model.tie_embeddings=false" if hasattr(config.model, "tie_embeddings") else ""
            raise setting_error("optim.base_model", config.optim.base_model, rule, fix=fix)
    return growth


def _growth_of(module: nn.Module, shape: tuple[int, ...], base: tuple[int, ...], is_vector_like: bool) -> Growth:
    """Compare two shapes: (..., outputs, inputs) for matrices, (inputs, outputs) for tables, (outputs,) for vectors."""
    if is_vector_like:
        return Growth(math.prod(shape[-1:]), 1, math.prod(base[-1:]), 1)
    outputs, inputs = -2, -1
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or hasattr(module, "nf"):  # also transformers' Conv1D
        outputs, inputs = -1, -2
    elif isinstance(module, CONVOLUTIONS):
        outputs, inputs = 0, 1
    return Growth(shape[outputs], shape[inputs], base[outputs], base[inputs])


@torch.no_grad()
def scale_initial_weights(model: nn.Module, config: RunConfig) -> None:
    """Scale freshly drawn weights of `model` as muP requires, in place, except for adapters.

    No-op without `optim.base_model`.  Elementwise, so the values are the same on all meshes.  No collectives.
    """
    growth = find_growth(config, model)
    modules = model.named_modules() if growth else ()
    for module_name, module in modules:
        if isinstance(module, FACTORS):
            continue
        is_fan_in = config.spec.init is None and getattr(type(module), "reset_parameters", None) in _FAN_IN_INITIALIZERS
        for name, parameter in module.named_parameters(prefix=module_name, recurse=False):
            if parameter.ndim >= 2 and (scale := growth[name].init_scale(is_fan_in)) != 1:
                local(parameter).mul_(scale)


_FAN_IN_INITIALIZERS = (nn.Linear.reset_parameters, nn.Conv1d.reset_parameters)
"""Initializers that draw values with a variance proportional to 1 / inputs (the fan-in)."""
