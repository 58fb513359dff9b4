"""TrainState: the list of everything that is resumed.

What is not in this list is not resumed.  A subclass of Trainer adds its own state with one line,
`self.state.add("name", thing)`, where the thing has `state_dict` and `load_state_dict`.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from trainer.checkpoint.store import Stateful
from trainer.guard import RandomState, SkipCounter
from trainer.optim import Optimizer
from trainer.parameters import tied_names


class TrainState:
    """Where a run stands: counters, weights, optimizer, position in the data, random states."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, skips: SkipCounter) -> None:
        self.step = 0
        self.tokens = 0
        self.tensors: dict[str, Stateful] = {
            "model": ModelState(model),
            "optimizer": OptimizerState(model, optimizer),
        }
        self.values: dict[str, Stateful] = {"counters": _Counters(self), "skipped_updates": skips}
        self.rank_values: dict[str, Stateful] = {"random": RandomState()}

    def add(self, name: str, part: Stateful, per_rank: bool = False) -> None:
        """Resume `part` too, under `name`.

        By default its state may hold tensors (DTensors are saved sharded) and must be the same on all ranks
        otherwise.  With `per_rank` each rank keeps its own, restored only on the same number of ranks.
        """
        where = self.rank_values if per_rank else self.tensors
        if name in {*self.tensors, *self.values, *self.rank_values}:
            raise ValueError(f"TrainState has a part named {name!r} already")
        where[name] = part


class ModelState:
    """Parameters and persistent buffers by name; a tied parameter once, under its first name."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.alias_of = {alias: first for first, *aliases in tied_names(model) for alias in aliases}

    def state_dict(self) -> dict[str, Any]:
        state = get_model_state_dict(self.model)
        return {name: tensor for name, tensor in state.items() if name not in self.alias_of}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        aliases = {alias: state[first] for alias, first in self.alias_of.items()}
        set_model_state_dict(self.model, {**state, **aliases}, options=StateDictOptions(strict=True))


class OptimizerState:
    """The optimizer's moments by parameter name.  Its settings are the configuration's, not the checkpoint's."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, self.optimizer.parts)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        configured = self.optimizer.hyperparameters()
        set_optimizer_state_dict(self.model, self.optimizer.parts, state)
        self.optimizer.set_hyperparameters(configured)


class _Counters:
    def __init__(self, state: TrainState) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"tokens": self.state.tokens}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state.tokens = state["tokens"]
