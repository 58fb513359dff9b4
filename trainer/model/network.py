"""Builds a run's unsharded model: by its recipe, in the run's dtypes, with adapters and frozen parameters.

Training, planning and checks all build the model here, so that they see the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from trainer.config import RunConfig
from trainer.errors import nearest, setting_error
from trainer.model.lora import add_adapters, plain_name
from trainer.model.names import HuggingFaceNames
from trainer.model.units import find_blocks


def build_network(config: RunConfig) -> nn.Module:
    """Build the model of `config` on the meta device.

    Raises UserError for layers in `lora.targets` or parameters in `train.freeze` that the model does not have.
    """
    theirs = _huggingface_name(config)
    with torch.device("meta"):
        model = config.recipe.build_model(config.model)
        apply_weights_dtype(model, storage_dtype(config))
        blocks = find_blocks(model, config.recipe) if config.lora.rank else []
        add_adapters(model, blocks, config.lora, lambda layer: _module(theirs(f"{layer}.weight")))
    freeze(model, config.train.freeze, theirs)
    return model


def _huggingface_name(config: RunConfig) -> Callable[[str], str | None]:
    """Return the function that maps a parameter's name to Hugging Face's, which settings may use as well."""
    if config.recipe.hf is None:
        return lambda name: None
    return HuggingFaceNames(config.recipe, config.model).theirs


def _module(parameter: str | None) -> str | None:
    return parameter.removesuffix(".weight") if parameter else None


def storage_dtype(config: RunConfig) -> str:
    """Return the dtype in which a run stores its weights, other than those of adapters."""
    return (config.lora.rank and config.lora.base_dtype) or config.train.weights_dtype


def apply_weights_dtype(model: nn.Module, weights_dtype: str) -> None:
    """Convert the parameters of `model` to bfloat16, if requested; ties are preserved.

    With `float32` the parameters are not changed.  Buffers are never changed.
    """
    for parameter in model.parameters() if weights_dtype == "bfloat16" else ():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.bfloat16)


def freeze(model: nn.Module, patterns: Sequence[str], theirs: Callable[[str], str | None] = lambda name: None) -> None:
    """Freeze the parameters that `train.freeze` matches.

    A pattern is the name of a parameter or module, with `*` for any text; a tied parameter may be matched by any of its
    names.  `theirs` returns an alternative name of a parameter, which is matched too.  Raises UserError for a pattern
    that matches nothing, and if no trainable parameter is left.
    """
    names_of = [(parameter, _names(name, theirs)) for name, parameter in model.named_parameters(remove_duplicate=False)]
    for pattern in patterns:
        found = [parameter for parameter, names in names_of if _matches(names, pattern)]
        if not found:
            known = {part: None for _, names in names_of for name in names for part in _with_modules(name)}
            best = nearest(pattern, known)
            meant = [best if item == pattern else item for item in patterns] if best else None
            raise setting_error("train.freeze", list(patterns), f"no parameter matches {pattern!r}", meant=meant)
        for parameter in found:
            parameter.requires_grad_(False)
    if patterns and not any(parameter.requires_grad for parameter in model.parameters()):
        raise setting_error("train.freeze", list(patterns), "leaves nothing to train", fix="name fewer parameters")


def _names(name: str, theirs: Callable[[str], str | None]) -> list[str]:
    """Return the names by which a parameter may be matched: without adapters, its own, and the alternative name."""
    plain = plain_name(name)
    return list(dict.fromkeys(filter(None, [plain, name, theirs(plain)])))


def _matches(names: Sequence[str], pattern: str) -> bool:
    return any(fnmatchcase(name, form) for name in names for form in (pattern, f"{pattern}.*"))


def _with_modules(name: str) -> list[str]:
    """Return the names of the modules that contain a parameter, outermost first, and its own name."""
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
