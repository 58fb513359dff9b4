"""Converts linear layers, using torchao, so that they compute their matmuls in float8.

Weights, gradients and saved activations keep their dtype.  A layer casts its input, its weight and its incoming
gradient to float8 only for the matmuls, with one scale per tensor or per row.

This module is the only one that imports torchao, and does so only when needed.  It depends on no model and no mesh.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from trainer.config.requirements import check_float8_installed
from trainer.errors import setting_error

_ALIGNMENT = 16
"""torch._scaled_mm requires both dimensions of the weight to be multiples of this."""


def apply_float8(blocks: Sequence[nn.Module], scaling: str, device_type: str, emulate: bool = False) -> int:
    """Replace the linear layers inside `blocks` with torchao's float8 layers, in place.

    Returns the number of layers replaced.

    `scaling`: none (nothing is replaced), tensorwise or rowwise.  Names, parameters and initialization do not change.
    The following are skipped: layers with a dimension that is not a multiple of 16, subclasses that override `forward`,
    blocks that are themselves linear layers, and layers outside the blocks, since float8 is known to degrade the output
    head.  With `emulate`, matmuls are computed in float32 from inputs rounded to float8, on any device, for tests.

    Raises UserError if torchao is missing or cannot be imported, if the device does not support float8 with this
    scaling (not checked with `emulate`), or if no layer can be replaced.
    """
    if scaling == "none":
        return 0
    check_float8_installed(scaling)
    if not emulate:
        _check_device(scaling, device_type)
    num_replaced = 0
    for block in blocks:
        for parent in list(block.modules()):
            for name, child in list(parent.named_children()):
                if not isinstance(child, nn.Linear) or type(child).forward is not nn.Linear.forward:
                    continue
                if child.in_features % _ALIGNMENT == child.out_features % _ALIGNMENT == 0:
                    parent.register_module(name, _float8_layer(child, scaling, emulate))
                    num_replaced += 1
    if not num_replaced:
        reason = f"no block has a linear layer whose dimensions are both multiples of {_ALIGNMENT}"
        raise setting_error("train.float8", scaling, reason, fix="set train.float8=none")
    return num_replaced


def _check_device(scaling: str, device_type: str) -> None:
    required = (9, 0) if scaling == "rowwise" else (8, 9)
    minimum = ".".join(map(str, required))
    if device_type != "cuda":
        reason = (
            f"needs a GPU with float8 support (compute capability {minimum} or higher); this run is on {device_type}"
        )
        raise setting_error("train.float8", scaling, reason, fix="set train.float8=none")
    capability = torch.cuda.get_device_capability()
    if capability < required:
        actual = ".".join(map(str, capability))
        reason = f"needs a GPU of compute capability {minimum} or higher; {torch.cuda.get_device_name()} has {actual}"
        raise setting_error("train.float8", scaling, reason, "none")


def _float8_layer(layer: nn.Module, scaling: str, emulate: bool) -> nn.Module:
    """Return torchao's version of `layer`, with the same parameters and `reset_parameters`."""
    convert, config = _torchao(scaling, emulate)
    converted = convert(layer, config=config)
    for name, value in vars(layer).items():
        if name not in vars(converted):
            setattr(converted, name, value)
    converted.reset_parameters = types.MethodType(type(layer).reset_parameters, converted)  # type: ignore[assignment, attr-defined]
    return converted


@functools.cache
def _torchao(scaling: str, emulate: bool) -> tuple[Callable[..., nn.Module], Any]:
    """Return torchao's conversion function and its configuration for `scaling`."""
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:  # incompatible with this torch
        raise setting_error("train.float8", scaling, f"torchao cannot be imported ({error})", "none") from error
    return convert_to_float8_training, replace(Float8LinearConfig.from_recipe_name(scaling), emulate=emulate)
