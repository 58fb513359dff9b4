"""The network of a run before it is sharded: as its recipe builds it, in the run's dtypes, with adapters, part frozen.

Training, planning and checking all get the model of a configuration here, so that they see the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from trainer.config import RunConfig
from trainer.errors import nearest, setting_error
from trainer.model.lora import add_adapters, plain_name
from trainer.model.names import Names
from trainer.model.units import find_blocks


def build_network(config: RunConfig) -> nn.Module:
    """Return the model of `config` on the meta device.

    Raises UserError for layers or parameters that `lora.targets` and `train.freeze` name and the model does not have.
    """
    theirs = _their_names(config)
    with torch.device("meta"):
        model = config.recipe.build_model(config.model)
        apply_weights_dtype(model, kept_dtype(config))
        blocks = find_blocks(model, config.recipe) if config.lora.rank else []
        add_adapters(model, blocks, config.lora, lambda layer: _module(theirs(f"{layer}.weight")))
    freeze(model, config.train.freeze, theirs)
    return model


def _their_names(config: RunConfig) -> Callable[[str], str | None]:
    """Return what tells a parameter's name in Hugging Face's world from its own: there it is known by that, too."""
    if config.recipe.hf is None:
        return lambda name: None
    return Names(config.recipe, config.model).theirs


def _module(parameter: str | None) -> str | None:
    return parameter.removesuffix(".weight") if parameter else None


def kept_dtype(config: RunConfig) -> str:
    """Return the dtype in which a run keeps its weights, those of adapters left out."""
    return (config.lora.rank and config.lora.base_dtype) or config.train.weights_dtype


def apply_weights_dtype(model: nn.Module, weights_dtype: str) -> None:
    """Have the parameters of `model` kept in bfloat16, if that is asked for; what is tied stays so.

    With `float32` they are as the model has made them.  Buffers are left alone.
    """
    for parameter in model.parameters() if weights_dtype == "bfloat16" else ():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.bfloat16)


def freeze(model: nn.Module, patterns: Sequence[str], theirs: Callable[[str], str | None] = lambda name: None) -> None:
    """Have the parameters that `train.freeze` names get no gradient, and no step.

    A pattern is a parameter's name, that of a module, or either with `*` for any text; what is tied has several names,
    and any of them will do.  `theirs` tells another name of a parameter, by which it may be called, too.  Raises
    UserError for a pattern that matches nothing, and if nothing is left to train.
    """
    called = [(parameter, _names(name, theirs)) for name, parameter in model.named_parameters(remove_duplicate=False)]
    for pattern in patterns:
        found = [parameter for parameter, names in called if _matches(names, pattern)]
        if not found:
            known = {part: None for _, names in called for name in names for part in _with_modules(name)}
            best = nearest(pattern, known)
            meant = [best if item == pattern else item for item in patterns] if best else None
            raise setting_error("train.freeze", list(patterns), f"no parameter matches {pattern!r}", meant=meant)
        for parameter in found:
            parameter.requires_grad_(False)
    if patterns and not any(parameter.requires_grad for parameter in model.parameters()):
        raise setting_error("train.freeze", list(patterns), "leaves nothing to train", fix="name fewer parameters")


def _names(name: str, theirs: Callable[[str], str | None]) -> list[str]:
    """Return what a parameter may be called: its name, as of before adapters first, and the one elsewhere."""
    plain = plain_name(name)
    return list(dict.fromkeys(filter(None, [plain, name, theirs(plain)])))


def _matches(names: Sequence[str], pattern: str) -> bool:
    return any(fnmatchcase(name, form) for name in names for form in (pattern, f"{pattern}.*"))


def _with_modules(name: str) -> list[str]:
    """Return the names of the modules that a parameter is in, from the outside in, and its own."""
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
