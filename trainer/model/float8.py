"""Runs the matrix products of linear layers in float8, with torchao.

Only this module imports torchao, and only when it is needed.

Weights, gradients and saved activations keep their dtype: a layer casts its input, its weight and the incoming
gradient, scaled to the range of float8 per tensor or per row.  This module does not depend on recipes or meshes.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from trainer.config.rules import check_float8_installed
from trainer.errors import setting_error

_MULTIPLE = 16
"""The kernel needs both sizes of a matrix to be multiples of this (torch._scaled_mm)."""


def apply_float8(blocks: Sequence[nn.Module], setting: str, device_type: str, emulate: bool = False) -> int:
    """Replace the linear layers inside `blocks` by torchao's, in place.  Returns the number of replaced layers.

    `setting`: none, tensorwise or rowwise.  Names, parameters and initialization do not change.  Layers with a size
    that is not a multiple of 16 are left alone, and so are subclasses that override `forward`, and blocks that are a
    single layer.  Layers outside the blocks are left alone: float8 is known to hurt the head.  With `emulate`,
    products are computed in float32 from rounded inputs, on any device, for tests.

    Raises UserError if torchao is missing, if the GPU has no float8 support, or if no layer can be replaced.
    """
    if setting == "none":
        return 0
    check_float8_installed(setting)
    if not emulate:
        _check_device(setting, device_type)
    num_replaced = 0
    for block in blocks:
        for parent in list(block.modules()):
            for name, child in list(parent.named_children()):
                if _can_be_replaced(child):
                    parent.register_module(name, _float8_layer(child, setting, emulate))
                    num_replaced += 1
    if not num_replaced:
        rule = f"no block has a linear layer with sizes that are multiples of {_MULTIPLE}"
        raise setting_error("train.float8", setting, rule, "none")
    return num_replaced


def _check_device(setting: str, device_type: str) -> None:
    if device_type != "cuda":
        rule = f"needs a GPU with float8 support (compute capability 8.9 or more); this run is on {device_type}"
        raise setting_error("train.float8", setting, rule, "none")
    capability, required = torch.cuda.get_device_capability(), (9, 0) if setting == "rowwise" else (8, 9)
    if capability < required:
        actual, minimum = (".".join(map(str, version)) for version in (capability, required))
        rule = f"needs a GPU of compute capability {minimum} or more; {torch.cuda.get_device_name()} has {actual}"
        raise setting_error("train.float8", setting, rule, "none")


def _can_be_replaced(module: nn.Module) -> bool:
    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
        return False
    return module.in_features % _MULTIPLE == 0 and module.out_features % _MULTIPLE == 0


def _float8_layer(layer: nn.Module, setting: str, emulate: bool) -> nn.Module:
    """Return torchao's layer with the parameters of `layer`; it keeps the `reset_parameters` of `layer`."""
    convert, config = _torchao(setting, emulate)
    converted = convert(layer, config=config)
    for name, value in vars(layer).items():
        if name not in vars(converted):
            setattr(converted, name, value)
    converted.reset_parameters = types.MethodType(type(layer).reset_parameters, converted)  # type: ignore[assignment, attr-defined]
    return converted


@functools.cache
def _torchao(setting: str, emulate: bool) -> tuple[Callable[..., nn.Module], Any]:
    """Return torchao's conversion function, and its configuration for the setting."""
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:  # incompatible with this torch
        raise setting_error("train.float8", setting, f"torchao cannot be imported ({error})", "none") from error
    return convert_to_float8_training, replace(Float8LinearConfig.from_recipe_name(setting), emulate=emulate)
