"""The Young/Daly save interval, and the goodput that a run can expect from it.

A save costs the time for which training pauses.  A failure costs the work since the newest checkpoint and the time
until training resumes.  Failures are assumed to occur at random at a constant rate.  Sources: Young 1974, "A first
order approximation to the optimum checkpoint interval"; Daly 2006, "A higher order estimate of the optimum checkpoint
interval for restart dumps".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from trainer.config.schema import RunConfig
from trainer.metrics.goodput import RunHistory

MAX_INTERVAL_S = 7200.0
"""Upper limit on the Young/Daly interval, in seconds.  It exists because checkpoints protect against more than node
failures."""
MIN_INTERVAL_S = 1.0
"""Lower limit on the interval, in seconds, for saves that are too short to measure."""
_SAVE_MARGIN = 1.2
"""Lower limit on the interval as a multiple of the duration of a save, so that saves do not overlap.  It takes
precedence over `MAX_INTERVAL_S`."""
_WRITE_BYTES_PER_S = 0.2e9
"""Rate at which each rank writes to storage, in bytes per second, assumed until a save has been timed."""
_COPY_BYTES_PER_S = 1e9
"""Rate of the copy that pauses training, in bytes per second on each rank, assumed until a save has been timed."""
_ASSUMED_RESTART_S = 180.0
"""Assumed time from the detection of a failure to the first step after the restart, in seconds."""


@dataclass(frozen=True)
class Costs:
    """The time that each save and each failure costs a run, in seconds, and the mean time between failures."""

    blocked_s: float
    """Time for which one save pauses training."""
    total_s: float
    """Time from the start of a save until its checkpoint is published."""
    restart_s: float
    """Time from a failure until training resumes, excluding repeated work."""
    mtbf_s: float
    """Mean time between failures of the job."""

    @cached_property
    def best_interval_s(self) -> float:
        """Daly's estimate of the best interval between the starts of consecutive saves, kept within the limits."""
        ratio = self.blocked_s / (2 * self.mtbf_s)
        if ratio < 1:
            interval_s = math.sqrt(2 * self.blocked_s * self.mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9)
        else:
            interval_s = self.mtbf_s + self.blocked_s
        return max(MIN_INTERVAL_S, _SAVE_MARGIN * self.total_s, min(MAX_INTERVAL_S, interval_s))

    def goodput(self, interval_s: float) -> float:
        """Return the fraction of time spent on work that is not lost, if a save starts every `interval_s` seconds."""
        expected_kept_s = math.exp(-self.total_s / self.mtbf_s) * max(0.0, interval_s - self.blocked_s)
        expected_failures = min(700.0, interval_s / self.mtbf_s)  # `expm1` overflows above 709
        return expected_kept_s / math.expm1(expected_failures) / (self.mtbf_s + self.restart_s)

    def lost_time_fractions(self, interval_s: float) -> dict[str, float]:
        """Return the fraction of time lost to each cause, to first order."""
        lost = {  # relative to the time spent on progress that is kept
            "pausing for saves": self.blocked_s / interval_s,
            "repeating lost work": interval_s / 2 / self.mtbf_s,
            "saves that did not finish": self.total_s / self.mtbf_s,
            "restarts": self.restart_s / self.mtbf_s,
        }
        total = 1 + sum(lost.values())
        return {cause: time / total for cause, time in lost.items()}


_ADVICE = {
    "pausing for saves": "speed up the copy made at each save, or shard the model over more ranks",
    "repeating lost work": "make saves cheaper, so that they can be more frequent",
    "saves that did not finish": "shorten the time until a save is published: use faster storage",
    "restarts": (
        "shorten the time from a failure until training resumes: run.step_timeout_s, a spare node, a faster start"
    ),
}
"""How to reduce each kind of lost time, by cause."""


def costs_of(config: RunConfig, num_nodes: int, shard_bytes: float, history: RunHistory | None = None) -> Costs:
    """Return the costs of saves and failures: measured if possible, otherwise from settings and assumptions.

    The failure rate is the posterior mean of a gamma distribution: `checkpoint.node_mtbf_h` counts as one observed
    failure, so that a few early failures change the rate little, while many outweigh the setting.

    shard_bytes: number of bytes that each rank writes in one save.
    history: the run's measurements; None before the run starts.
    """
    history = history or RunHistory()
    rate = (history.num_failures + 1) / (history.node_seconds + 3600 * config.checkpoint.node_mtbf_h)
    total_s = estimated_save_s(shard_bytes)
    blocked_s = shard_bytes / _COPY_BYTES_PER_S if config.checkpoint.mode == "async" else total_s
    restart_s = history.mean_restart_s or config.run.step_limit_s + _ASSUMED_RESTART_S
    if history.saves:
        blocked_s = sorted(save.blocked_s for save in history.saves)[len(history.saves) // 2]  # the median
        total_s = max(save.total_s for save in history.saves)
    return Costs(blocked_s, total_s, restart_s, 1 / (rate * num_nodes))


def estimated_save_s(shard_bytes: float) -> float:
    """Return the assumed duration, in seconds, of a save in which each rank writes `shard_bytes`."""
    return shard_bytes / _WRITE_BYTES_PER_S


def describe_costs(costs: Costs, interval_s: float, num_nodes: int) -> dict[str, str]:
    """Return text by topic: the expected goodput with a save every `interval_s` seconds, and how to improve it."""
    lost = costs.lost_time_fractions(interval_s)
    worst = max(lost, key=lambda cause: lost[cause])
    nodes = f"{num_nodes} nodes" if num_nodes > 1 else "1 node"
    best = (
        ""
        if math.isclose(interval_s, costs.best_interval_s, rel_tol=0.05)
        else f"; best: every {format_duration(costs.best_interval_s)}"
    )
    at_best_interval = f", {_percent(costs.goodput(costs.best_interval_s))} at the best interval" if best else ""
    return {
        "failures": (
            f"one every {format_duration(costs.mtbf_s)} on {nodes}, {format_duration(costs.restart_s)} to resume"
        ),
        "saves": (
            f"every {format_duration(interval_s)}, pausing for {format_duration(costs.blocked_s)}, published after "
            f"{format_duration(costs.total_s)}{best}"
        ),
        "expected goodput": f"{_percent(costs.goodput(interval_s))}{at_best_interval}",
        "to improve": f"{worst}, {_percent(lost[worst])}: {_ADVICE[worst]}",
    }


def format_duration(seconds: float) -> str:
    """Format a duration with about two significant digits."""
    for size, unit in ((86400.0, "days"), (3600.0, "h"), (60.0, "min"), (1.0, "s")):
        if seconds >= 1.5 * size:
            value = seconds / size
            return f"{value:.0f} {unit}" if value >= 10 else f"{value:.2g} {unit}"
    return f"{seconds:.2g} s" if seconds >= 0.1 else f"{1000 * seconds:.2g} ms"


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.2g}%" if fraction < 0.095 else f"{100 * fraction:.1f}%"
