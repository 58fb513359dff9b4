"""An exponential moving average of the weights (EMA), kept beside them and sharded as they are.

Each rank averages its own shards, element by element and in float32, so that the average is the same on any mesh and
costs no message.  After the first step it is the weights themselves; a step that is skipped leaves it as it is.

Source: Polyak and Juditsky 1992, "Acceleration of stochastic approximation by averaging"; as an exponential average
torch.optim.swa_utils has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from trainer.model.parameters import as_saved, local

EMA = "ema"
"""The part of a run's state that is the average."""


class WeightAverage:
    """The average of some parameters; with a decay of 0 of none, and then everything here does nothing."""

    may_be_absent = True
    """In checkpoints of before there was one."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float, is_evaluated: bool = True) -> None:
        """`parameters`: by name, those that are trained.  `is_evaluated`: whether evaluations are to be with it."""
        self._decay, self._is_evaluated = decay, is_evaluated
        self._parameters = dict(parameters) if decay else {}
        self._averages = {name: _like(parameter) for name, parameter in self._parameters.items()}
        self._has_begun = False

    @torch.no_grad()
    def follow(self, is_finite: torch.Tensor | None = None) -> None:
        """Take the weights of a step into the average, unless the scalar `is_finite` is false.

        The host does not wait for the device.  No collective.
        """
        if not self._has_begun:
            self._has_begun = True
            self._take_weights()
            return
        share = 1.0 - self._decay
        for parameter, average in self._pairs():
            weight = torch.full((), share, device=average.device)
            if is_finite is not None:
                weight = weight * is_finite.to(average.device)
            average.lerp_(parameter.to(average.dtype), weight)

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield this rank's shard of each parameter, and of its average."""
        for name, parameter in self._parameters.items():
            yield local(parameter.detach()), local(self._averages[name])

    def _take_weights(self) -> None:
        for parameter, average in self._pairs():
            average.copy_(parameter)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Have the average in place of the weights inside the block, which is to leave them alone.

        The weights are kept meanwhile: where training would have the gradients.
        """
        if not (self._has_begun and self._is_evaluated):
            yield
            return
        kept = [parameter.clone() for parameter, _ in self._pairs()]
        for parameter, average in self._pairs():
            parameter.copy_(average)
        try:
            yield
        finally:
            for (parameter, _), before in zip(self._pairs(), kept, strict=True):
                parameter.copy_(before)

    # -- as a part of the state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        if not self._has_begun:  # of no step it is the weights
            with torch.no_grad():
                self._take_weights()
        weights = {name: as_saved(average, self._parameters[name]) for name, average in self._averages.items()}
        return {"has_begun": self._has_begun, "weights": weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._has_begun = state["has_begun"]
        for name, average in self._averages.items():
            loaded = state["weights"][name]
            if local(loaded).data_ptr() != local(average).data_ptr():
                average.copy_(loaded)

    def differences(self, plain: Any, stored: Mapping[str, Any]) -> list[str]:
        names = {f"weights.{name}" for name in self._averages}
        if names == set(stored):
            return []
        where = (
            "only in the checkpoint" if not names else "not in the checkpoint" if not stored else "of different weights"
        )
        return [f"train.ema: the average is {where} (allow it: checkpoint.allow_changes=[state.{EMA}])"]

    def prepare(self, stored: Mapping[str, Any]) -> None:
        """Nothing: all that can be loaded is there."""

    def may_differ(self, key: str) -> bool:
        """Nothing may: all ranks make the same step."""
        return False


def _like(parameter: nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(parameter.detach(), dtype=torch.float32)
