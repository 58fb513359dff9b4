"""meshtrainer trains transformers with PyTorch's FSDP2 on a DeviceMesh.

`__all__` lists the public names.  All but `main`, which is defined here, are imported on first use, so that code
that does not need torch does not load it.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.stopping import stop

if sys.argv[:1] == ["-m"] and (_command := re.search(r"\0-m\0trainer\.(\w+)", "\0".join(sys.orig_argv))):
    # Started as `python -m trainer.COMMAND`: hear signals from here on, before the slow imports.
    if _command[1] in ("run", "evaluate"):
        stop.install(exit_code=lambda number: 75, note="run the same command again")
    else:
        stop.install(exit_code=lambda number: 128 + number)

from trainer.distributed.environment import without_garbage_collection

if TYPE_CHECKING:
    from trainer.config.load import load_config as load_config
    from trainer.config.schema import RunConfig as RunConfig
    from trainer.data.loader import TrainLoader as TrainLoader
    from trainer.data.source import Source as Source
    from trainer.errors import UserError as UserError
    from trainer.loss import linear_cross_entropy as linear_cross_entropy
    from trainer.model.gradients import gathered as gathered
    from trainer.model.logprobs import token_logprobs as token_logprobs
    from trainer.model.sample import Sampling as Sampling
    from trainer.model.sample import generate_batch as generate_batch
    from trainer.model_spec import HuggingFace as HuggingFace
    from trainer.model_spec import ModelSpec as ModelSpec
    from trainer.model_spec import Stacked as Stacked
    from trainer.model_spec import Transposed as Transposed
    from trainer.model_spec import WeightSource as WeightSource
    from trainer.objective import Objective as Objective
    from trainer.objective import register_objective as register_objective
    from trainer.registry import register as register
    from trainer.trainer import Trainer as Trainer
    from trainer.weights.loading import load_weights as load_weights
    from trainer.weights.sources import fill as fill

__version__ = "0.1.0"
__all__ = [
    "HuggingFace",
    "ModelSpec",
    "Objective",
    "RunConfig",
    "Sampling",
    "Source",
    "Stacked",
    "TrainLoader",
    "Trainer",
    "Transposed",
    "UserError",
    "WeightSource",
    "fill",
    "gathered",
    "generate_batch",
    "linear_cross_entropy",
    "load_config",
    "load_weights",
    "main",
    "register",
    "register_objective",
    "token_logprobs",
]

_MODULES = {
    "HuggingFace": "model_spec",
    "Objective": "objective",
    "ModelSpec": "model_spec",
    "RunConfig": "config.schema",
    "Sampling": "model.sample",
    "Source": "data.source",
    "Stacked": "model_spec",
    "TrainLoader": "data.loader",
    "Trainer": "trainer",
    "Transposed": "model_spec",
    "UserError": "errors",
    "WeightSource": "model_spec",
    "fill": "weights.sources",
    "gathered": "model.gradients",
    "generate_batch": "model.sample",
    "linear_cross_entropy": "loss",
    "load_config": "config.load",
    "load_weights": "weights.loading",
    "register": "registry",
    "register_objective": "objective",
    "token_logprobs": "model.logprobs",
}
"""The module in this package that defines each public name, except `main`."""

if not (Path(__file__).parent / "recipes").exists():
    # In a source checkout, recipes/, objectives/ and conf/ are next to this folder; in an installed package, inside it.
    __path__.append(str(Path(__file__).parent.parent))


def main(trainer: type[Trainer], argv: Sequence[str] | None = None) -> int:
    """Run the command line of `trainer.run` with your own Trainer class: `sys.exit(trainer.main(MyTrainer))`.

    Recipes, `key=value`, `nproc=N`, `--help`, all other options, messages and exit codes work as in `trainer.run`,
    including under torchrun and srun.  Returns the exit code.

    argv: the arguments (default: those of the script).
    """
    return int(importlib.import_module("trainer.run").main(argv, trainer))


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'trainer' has no attribute {name!r}")
    with without_garbage_collection():
        return getattr(importlib.import_module(f"trainer.{_MODULES[name]}"), name)
