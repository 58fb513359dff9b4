"""Linear layers whose matrix products run in float8, by torchao: its only door, and entered only where it is asked for.

Weights, their gradients and all that is kept stay in their own dtype: a layer casts its input, its weight and what
comes back from the layer behind it, scaled to what float8 can hold, by the tensor or by the row.  Knows no recipe and
no mesh.

Sources: Micikevicius et al. 2022, "FP8 Formats for Deep Learning", arXiv:2209.05433; torchao.float8,
https://github.com/pytorch/ao/tree/main/torchao/float8.
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

_MULTIPLE = 16
"""Both sizes of a matrix that the kernel multiplies are multiples of it (torch._scaled_mm)."""


def apply_float8(blocks: Sequence[nn.Module], setting: str, device_type: str, emulates: bool = False) -> int:
    """Replace the linear layers inside `blocks` by torchao's, in place; returns how many.

    `setting`: none, tensorwise or rowwise.  Names, parameters and initialisation stay as they are.  Layers with a size
    that is no multiple of 16 stay too, and so do classes with a `forward` of their own, and blocks that are nothing
    but a layer.  What lies outside the blocks is left alone: the head is known to suffer.  With `emulates` products
    are computed in float32 from rounded factors, on any device: for tests.

    Raises UserError without torchao, without a GPU that has such products, and if no layer can be replaced.
    """
    if setting == "none":
        return 0
    check_float8_installed(setting)
    if not emulates:
        _check_device(setting, device_type)
    num_replaced = 0
    for block in blocks:
        for parent in list(block.modules()):
            for name, child in list(parent.named_children()):
                if _can_be_replaced(child):
                    parent.register_module(name, _float8_layer(child, setting, emulates))
                    num_replaced += 1
    if not num_replaced:
        rule = f"no block has a linear layer with sizes that are multiples of {_MULTIPLE}"
        raise setting_error("train.float8", setting, rule, "none")
    return num_replaced


def _check_device(setting: str, device_type: str) -> None:
    if device_type != "cuda":
        rule = f"needs a GPU with float8 support (compute capability 8.9 or more); this run is on {device_type}"
        raise setting_error("train.float8", setting, rule, "none")
    capability, needed = torch.cuda.get_device_capability(), (9, 0) if setting == "rowwise" else (8, 9)
    if capability < needed:
        has, wants = (".".join(map(str, version)) for version in (capability, needed))
        rule = f"needs a GPU of compute capability {wants} or more; {torch.cuda.get_device_name()} has {has}"
        raise setting_error("train.float8", setting, rule, "none")


def _can_be_replaced(module: nn.Module) -> bool:
    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
        return False
    return module.in_features % _MULTIPLE == 0 and module.out_features % _MULTIPLE == 0


def _float8_layer(layer: nn.Module, setting: str, emulates: bool) -> nn.Module:
    """Return torchao's layer with the parameters of `layer`; it fills itself as `layer` would have."""
    convert, config = _torchao(setting, emulates)
    made = convert(layer, config=config)
    for name, value in vars(layer).items():
        if name not in vars(made):
            setattr(made, name, value)
    made.reset_parameters = types.MethodType(type(layer).reset_parameters, made)  # type: ignore[assignment, attr-defined]
    return made


@functools.cache
def _torchao(setting: str, emulates: bool) -> tuple[Callable[..., nn.Module], Any]:
    """Return torchao's conversion, and its configuration of the setting."""
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:  # one that this torch is too old or too new for
        raise setting_error("train.float8", setting, f"torchao cannot be imported ({error})", "none") from error
    return convert_to_float8_training, replace(Float8LinearConfig.from_recipe_name(setting), emulate=emulates)
