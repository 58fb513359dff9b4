"""Pace: decides after which steps a save is due: at a fixed interval, or as often as it pays."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Protocol

from trainer.checkpoint.interval import Costs, costs_of, sentences
from trainer.config import CheckpointSection, RunConfig
from trainer.distributed.ballot import Ballot
from trainer.distributed.world import World
from trainer.metrics.goodput import Experience


class Pace(Protocol):
    """Says after which steps to save, the same on all ranks."""

    @property
    def every_s(self) -> float | None:
        """Seconds from one save to the next, as decided last; None where steps are counted."""
        ...

    def falls_due(self, step: int) -> bool:
        """Return whether a save falls due after step `step`, whose ballot has been cast.  Not collective."""

    def began(self) -> None:
        """A save begins."""

    def learn(self, found: Experience) -> None:
        """Decide anew by what the run has seen.  Counts on rank 0 alone."""

    def sentences(self) -> list[str]:
        """Return what there is to say about it."""


class EverySoManySteps:
    """A save every `every` steps; 0: none."""

    every_s: None = None

    def __init__(self, every: int) -> None:
        self._every = every

    def falls_due(self, step: int) -> bool:
        return self._every > 0 and step % self._every == 0

    def began(self) -> None:
        """Nothing to note: steps are counted."""

    def learn(self, found: Experience) -> None:
        """Nothing to decide."""

    def sentences(self) -> list[str]:
        return []


class AsItPays:
    """A save as often as it loses least: rank 0 looks at the clock, and the message of each step carries its word.

    Steps of `checkpoint.keep_every` are saved as well.
    """

    def __init__(
        self,
        config: CheckpointSection,
        costs: Callable[[Experience | None], Costs],
        num_nodes: int,
        step_s: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """costs: what saves and failures cost, by what is known of the run.  step_s: how long a step takes."""
        self._keep_every, self._num_nodes = config.keep_every, num_nodes
        self._costs_of, self._step_s, self._clock = costs, step_s, clock
        self._since: float | None = None
        self.costs = costs(None)
        self.is_agreed: Callable[[], bool] = self.is_time
        """Rank 0's word on all ranks: its answer to `is_time` in the last ballot."""

    @property
    def every_s(self) -> float:
        return self.costs.best_s

    def is_time(self) -> bool:
        """Return whether the step that begins is the last before a save, of all steps the one nearest to its time."""
        now = self._clock()
        if self._since is None:
            self._since = now
        return now - self._since + 1.5 * self._step_s() >= self.every_s

    def falls_due(self, step: int) -> bool:
        return self.is_agreed() or (self._keep_every > 0 and step % self._keep_every == 0)

    def began(self) -> None:
        self._since = self._clock()

    def learn(self, found: Experience) -> None:
        self.costs = self._costs_of(found)

    def sentences(self) -> list[str]:
        said = sentences(self.costs, self.every_s, self._num_nodes)
        return ["checkpoint.every=auto:", *(f"  {topic}: {text}" for topic, text in said.items())]


def find_pace(config: RunConfig, world: World, ballot: Ballot, shard_bytes: int, step_s: Callable[[], float]) -> Pace:
    """Return the pace that `checkpoint.every` asks for.

    shard_bytes: what this rank writes in one save.  step_s: how long a step takes.
    """
    if isinstance(config.checkpoint.every, int):
        return EverySoManySteps(config.checkpoint.every)
    num_nodes = world.env.num_nodes
    costs = functools.partial(costs_of, config, num_nodes, shard_bytes)
    pace = AsItPays(config.checkpoint, costs, num_nodes, step_s)
    asked = ballot.ask(lambda: world.is_main and pace.is_time())
    pace.is_agreed = lambda: asked.anyone
    return pace
