"""Exponential moving average (EMA) of the weights, sharded like the weights.

Each rank averages its own shards, element by element in float32, so the average is the same on any mesh and needs no
communication.  It starts as a copy of the weights after the first step; skipped steps do not change it.

Source: Polyak and Juditsky 1992, "Acceleration of stochastic approximation by averaging"; for the exponential variant,
torch.optim.swa_utils.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from trainer.hooks import Hook
from trainer.model.parameters import local


class WeightAverage(Hook):
    """The exponential moving average of a model's trainable parameters.  With a decay of 0, it averages nothing."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float, use_for_eval: bool = True) -> None:
        """Allocate the average; the first step sets it.

        parameters: the trainable parameters, by name.
        decay: the weight of the old average in each update.
        use_for_eval: whether evaluations use the average.
        """
        self._decay, self._use_for_eval = decay, use_for_eval
        self.parameters = dict(parameters) if decay else {}
        """The averaged parameters, by name."""
        self.averages = {
            name: torch.zeros_like(parameter.detach(), dtype=torch.float32)
            for name, parameter in self.parameters.items()
        }
        """Each parameter's average, by the parameter's name."""
        self.has_started = False
        """Whether a step has set the average."""

    @torch.no_grad()
    def after_update(self, is_finite: torch.Tensor | None) -> None:
        """Update the average with the current weights, unless the scalar `is_finite` is false.

        `is_finite` is None if the step was not checked.  The first call always copies the weights.  No
        collectives, and no host sync unless parameters are offloaded to the CPU.
        """
        if not self.has_started:
            self.has_started = True
            self.copy_weights()
            return
        step_weight = 1.0 - self._decay
        for parameter, average in self._pairs():
            weight = torch.full((), step_weight, device=average.device)
            if is_finite is not None:
                weight = weight * is_finite.to(average.device)
            average.lerp_(parameter.to(average.dtype), weight)

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield this rank's shards of each parameter and of its average."""
        for name, parameter in self.parameters.items():
            yield local(parameter.detach()), local(self.averages[name])

    @torch.no_grad()
    def copy_weights(self) -> None:
        """Set the average to the current weights."""
        for parameter, average in self._pairs():
            average.copy_(parameter)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Replace the weights with their average inside the block, which must not modify them.

        The weights are copied so that they can be restored.  This does not raise peak memory, since no gradients
        exist at that time.  No-op before the first step, and if evaluations do not use the average.
        """
        if not (self.has_started and self._use_for_eval):
            yield
            return
        saved = [parameter.clone() for parameter, _ in self._pairs()]
        for parameter, average in self._pairs():
            parameter.copy_(average)
        try:
            yield
        finally:
            for (parameter, _), original in zip(self._pairs(), saved, strict=True):
                parameter.copy_(original)
