"""Any causal language model of transformers, built by the library itself from a local model folder.

transformers is imported only when such a model is built, never for other recipes.  Nothing is downloaded.
Source: https://huggingface.co/docs/transformers.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from trainer.recipes.hf.config import HfConfig, check, model_type, resolve

from trainer.recipe import HuggingFace, Recipe, register

if TYPE_CHECKING:
    from torch import nn

_PACKAGE = "trainer.recipes.hf"


def _later(module: str, name: str) -> Callable[..., Any]:
    """Return a function that imports `module`, which needs transformers, when it is called."""
    return lambda *args: getattr(importlib.import_module(f"{_PACKAGE}.{module}"), name)(*args)


def init(module: nn.Module, name: str, model: nn.Module) -> None:
    """Initialise the parameters and buffers that `module` itself owns, as transformers does."""
    _later("model", "init")(module, name, model)


HUGGINGFACE = HuggingFace(
    model_type=model_type,
    architecture=_later("model", "architecture"),
    names={},
    config=lambda config: config.config,
    model_fields=lambda content: {"config": dict(content)},
    stored=f"{_PACKAGE}.weights:as_stored",
)

register(
    Recipe(
        name="hf",
        config=HfConfig,
        build=f"{_PACKAGE}.model:build",
        units=_later("model", "units"),
        init=init,
        resolve=resolve,
        weights=f"{_PACKAGE}.weights:first_weights",
        notes=f"{_PACKAGE}.model:notes",
        check=check,
        flops=_later("model", "flops"),
        hf=HUGGINGFACE,
    )
)
