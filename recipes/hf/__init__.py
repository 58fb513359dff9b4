"""The model spec `hf` for any causal language model that transformers can build from a local model folder.

Importing this package does not import transformers, so other models work without transformers.  `trainer.hub`
downloads such folders, and `trainer.gguf_model` creates them from .gguf files.
Source: https://huggingface.co/docs/transformers.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from trainer.model_spec import HuggingFace, ModelSpec
from trainer.registry import register

from .config import HfConfig, check, model_type, resolve

if TYPE_CHECKING:
    from torch import nn

_PACKAGE = "trainer.recipes.hf"


def _import_on_call(module: str, name: str) -> Callable[..., Any]:
    """Return a function that, when called, imports `module` and calls `name` in it.  The module needs transformers."""
    return lambda *args: getattr(importlib.import_module(f"{_PACKAGE}.{module}"), name)(*args)


def init(module: nn.Module, name: str, model: nn.Module) -> None:
    """Initialize the parameters and buffers that `module` directly owns, as transformers does."""
    _import_on_call("model", "init")(module, name, model)


HUGGINGFACE = HuggingFace(
    model_type=model_type,
    architecture=_import_on_call("model", "architecture"),
    names={},
    config=lambda config: config.config,
    model_fields=lambda config_json: {"config": dict(config_json)},
    stored=f"{_PACKAGE}.weights:as_stored",
    output=_import_on_call("classifier", "output_projection"),
)

register(
    ModelSpec(
        name="hf",
        config=HfConfig,
        build=f"{_PACKAGE}.model:build",
        units=_import_on_call("model", "units"),
        init=init,
        resolve=resolve,
        weights=f"{_PACKAGE}.weights:initial_weights",
        notes=f"{_PACKAGE}.model:notes",
        check=check,
        flops=_import_on_call("model", "flops"),
        hf=HUGGINGFACE,
        tensor=_import_on_call("tensor", "tensor_plan"),
        experts=_import_on_call("experts", "expert_modules"),
    )
)
