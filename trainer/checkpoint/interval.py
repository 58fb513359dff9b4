"""The interval between saves that loses least, and the share of its time that a run then puts to use.

A save costs the time that training stands still for it; a failure costs the work since the newest checkpoint, and the
time until training goes on.  Failures are taken to come at random, at the same rate at any time.  Young 1974, "A first
order approximation to the optimum checkpoint interval"; Daly 2006, "A higher order estimate of the optimum checkpoint
interval for restart dumps".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from trainer.config import RunConfig
from trainer.metrics.goodput import Experience

LONGEST_S = 7200.0
"""The longest interval: what is saved protects from more than broken nodes."""
SHORTEST_S = 1.0
"""The shortest interval, of saves that take no time that can be measured."""
_ROOM = 1.2
"""The shortest interval, in times of a save: one has ended when the next begins."""
_BYTES_A_SECOND, _BLOCKED_BYTES_A_SECOND = 0.2e9, 1e9
"""Guesses of how fast a rank saves, and copies what training must wait for, until a save has been timed."""
_START_S = 180.0
"""A guess of what it takes from noticing a failure to the first step after it."""


@dataclass(frozen=True)
class Costs:
    """The costs of saves and failures to a run, in seconds."""

    blocked_s: float
    """Training stands still for one save."""
    total_s: float
    """From the beginning of a save until it is published."""
    restart_s: float
    """From a failure until training goes on, without the work that is done again."""
    mtbf_s: float
    """Mean time between failures, of all nodes together."""

    @cached_property
    def best_s(self) -> float:
        """The interval that loses least, from the beginning of one save to that of the next."""
        ratio = self.blocked_s / (2 * self.mtbf_s)
        every_s = self.mtbf_s + self.blocked_s  # a save takes longer than the nodes last
        if ratio < 1:
            every_s = math.sqrt(2 * self.blocked_s * self.mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9)
        return max(SHORTEST_S, _ROOM * self.total_s, min(LONGEST_S, every_s))

    def goodput(self, every_s: float) -> float:
        """Return the share of time that makes progress which is kept, with a save begun every `every_s` seconds."""
        kept = math.exp(-self.total_s / self.mtbf_s) * max(0.0, every_s - self.blocked_s)
        num_failures = min(700.0, every_s / self.mtbf_s)
        return kept / math.expm1(num_failures) / (self.mtbf_s + self.restart_s)

    def losses(self, every_s: float) -> dict[str, float]:
        """Return the share of time that each kind of loss takes, to a first approximation."""
        to_progress = {  # relative to the time spent on progress that is kept
            "pausing for saves": self.blocked_s / every_s,
            "repeating lost work": every_s / 2 / self.mtbf_s,
            "saves that did not finish": self.total_s / self.mtbf_s,
            "restarts": self.restart_s / self.mtbf_s,
        }
        whole = 1 + sum(to_progress.values())
        return {kind: each / whole for kind, each in to_progress.items()}


_ADVICE = {
    "pausing for saves": "make each save copy faster, or share it between more ranks",
    "repeating lost work": "make saves cheaper, so that they can be more frequent",
    "saves that did not finish": "shorten the time until a save is published: use faster storage",
    "restarts": (
        "shorten the time from a failure until training resumes: run.step_timeout_s, a spare node, a faster start"
    ),
}
"""What each kind of loss is shortened by."""


def costs_of(config: RunConfig, num_nodes: int, shard_bytes: float, found: Experience | None = None) -> Costs:
    """Return what saves and failures cost on so many nodes: as measured, or as set and guessed before.

    The rate of failures is the run's own, with `checkpoint.node_mtbf_h` in it as if one failure had been seen at that
    rate: a few early ones prove little, many count alone (the mean of a gamma distribution, given what was seen).
    shard_bytes: what a rank writes in one save.  found: what the run has seen; None before it has begun.
    """
    found = found or Experience()
    rate = (found.failures + 1) / (found.node_s + 3600 * config.checkpoint.node_mtbf_h)
    total_s = guessed_s(shard_bytes)
    blocked_s = shard_bytes / _BLOCKED_BYTES_A_SECOND if config.checkpoint.mode == "async" else total_s
    restart_s = found.restart_s or config.run.step_limit_s + _START_S
    if found.saves:
        blocked_s = _median([blocked for blocked, _ in found.saves])
        total_s = max(total for _, total in found.saves)
    return Costs(blocked_s, total_s, restart_s, 1 / (rate * num_nodes))


def guessed_s(shard_bytes: float) -> float:
    """Return a guess of the seconds that a save takes in which each rank writes so much."""
    return shard_bytes / _BYTES_A_SECOND


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def sentences(costs: Costs, every_s: float, num_nodes: int) -> dict[str, str]:
    """Return in words what to expect with a save begun every `every_s` seconds, and what to shorten, by topic."""
    losses = costs.losses(every_s)
    worst = max(losses, key=lambda name: losses[name])
    nodes = f"{num_nodes} nodes" if num_nodes > 1 else "1 node"
    best = "" if math.isclose(every_s, costs.best_s, rel_tol=0.05) else f"; best: every {readable_span(costs.best_s)}"
    at_best = f", {_percent(costs.goodput(costs.best_s))} at best" if best else ""
    return {
        "failures": f"one in {readable_span(costs.mtbf_s)} on {nodes}, {readable_span(costs.restart_s)} to resume",
        "saves": (
            f"every {readable_span(every_s)}, pausing for {readable_span(costs.blocked_s)}, published after "
            f"{readable_span(costs.total_s)}{best}"
        ),
        "expected goodput": f"{_percent(costs.goodput(every_s))}{at_best}",
        "to shorten": f"{worst}, {_percent(losses[worst])}: {_ADVICE[worst]}",
    }


def readable_span(seconds: float) -> str:
    """Return a length of time to two figures."""
    for size, unit in ((86400.0, "days"), (3600.0, "h"), (60.0, "min"), (1.0, "s")):
        if seconds >= 1.5 * size:
            value = seconds / size
            return f"{value:.0f} {unit}" if value >= 10 else f"{value:.2g} {unit}"
    return f"{seconds:.2g} s" if seconds >= 0.1 else f"{1000 * seconds:.2g} ms"


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.095 else f"{100 * share:.1f} %"
