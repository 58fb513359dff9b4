"""Save policies: after which steps a save is due, at a fixed or at an adaptive interval."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Protocol

from trainer.checkpoint.interval import Costs, costs_of, describe_costs
from trainer.config import CheckpointSection, RunConfig
from trainer.distributed.channel import StepSync
from trainer.distributed.world import World
from trainer.metrics.goodput import RunHistory


class SavePolicy(Protocol):
    """Decides after which steps to save, the same on all ranks."""

    @property
    def every_s(self) -> float | None:
        """Current interval between saves in seconds; None if the interval is a number of steps."""
        ...

    def falls_due(self, step: int) -> bool:
        """Return whether a save is due after step `step`; call it after the step's all-reduce.  Not collective."""

    def began(self) -> None:
        """Record that a save begins."""

    def update(self, found: RunHistory) -> None:
        """Update the interval from what the run has measured.  Only the update on rank 0 matters."""

    def describe(self) -> list[str]:
        """Return lines that describe the policy to the user."""


class FixedInterval:
    """Saves every `every` steps; 0 disables saving."""

    every_s: None = None

    def __init__(self, every: int) -> None:
        self._every = every

    def falls_due(self, step: int) -> bool:
        return self._every > 0 and step % self._every == 0

    def began(self) -> None:
        """Do nothing: only the step number matters."""

    def update(self, found: RunHistory) -> None:
        """Do nothing: the interval is fixed."""

    def describe(self) -> list[str]:
        return []


class AdaptiveInterval:
    """Saves at the Young/Daly interval: rank 0 decides by its clock, and the step's all-reduce broadcasts the decision.

    Multiples of `checkpoint.keep_every` are saved as well.
    """

    def __init__(
        self,
        config: CheckpointSection,
        costs: Callable[[RunHistory | None], Costs],
        num_nodes: int,
        step_s: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """costs: returns the costs of saves and failures from the run's measurements.  step_s: returns the duration of
        a step in seconds.
        """
        self._keep_every, self._num_nodes = config.keep_every, num_nodes
        self._costs_of, self._step_s, self._clock = costs, step_s, clock
        self._since: float | None = None
        self.costs = costs(None)
        self.is_agreed: Callable[[], bool] = self.is_time
        """Rank 0's latest answer to `is_time`, the same on all ranks."""

    @property
    def every_s(self) -> float:
        return self.costs.best_s

    def is_time(self) -> bool:
        """Return whether to save after the current step, because it ends closest to the time at which a save is due."""
        now = self._clock()
        if self._since is None:
            self._since = now
        return now - self._since + 1.5 * self._step_s() >= self.every_s

    def falls_due(self, step: int) -> bool:
        return self.is_agreed() or (self._keep_every > 0 and step % self._keep_every == 0)

    def began(self) -> None:
        self._since = self._clock()

    def update(self, found: RunHistory) -> None:
        self.costs = self._costs_of(found)

    def describe(self) -> list[str]:
        said = describe_costs(self.costs, self.every_s, self._num_nodes)
        return ["checkpoint.every=auto:", *(f"  {topic}: {text}" for topic, text in said.items())]


def build_save_policy(
    config: RunConfig, world: World, step_sync: StepSync, shard_bytes: int, step_s: Callable[[], float]
) -> SavePolicy:
    """Build the policy that `checkpoint.every` selects.

    shard_bytes: bytes that this rank writes in one save.  step_s: returns the duration of a step in seconds.
    """
    if isinstance(config.checkpoint.every, int):
        return FixedInterval(config.checkpoint.every)
    num_nodes = world.env.num_nodes
    costs = functools.partial(costs_of, config, num_nodes, shard_bytes)
    policy = AdaptiveInterval(config.checkpoint, costs, num_nodes, step_s)
    asked = step_sync.register(lambda: world.is_main and policy.is_time())
    policy.is_agreed = lambda: asked.any_yes
    return policy
