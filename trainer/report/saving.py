"""A run's prospects with its saves: the share of its time put to use, and what to shorten."""

from __future__ import annotations

import dataclasses
from typing import Any

from trainer.checkpoint.interval import costs_of, describe_costs
from trainer.config import CheckpointSection, RunConfig
from trainer.report.story import Run


def saving_of(run: Run) -> dict[str, str]:
    """Return in words what the run's own record of saves and failures leads to, by topic.

    Empty for a run that has saved nothing yet, that saves at its end alone, or whose record does not tell its nodes.
    """
    num_nodes = _number(run.attempts[-1].facts.get("nodes")) if run.attempts else None
    every = run.checkpoint.get("every")
    if not run.experience.saves or not num_nodes or not every:
        return {}
    section = CheckpointSection()
    if mtbf_h := _number(run.checkpoint.get("node_mtbf_h")):
        section = dataclasses.replace(section, node_mtbf_h=mtbf_h)
    costs = costs_of(RunConfig(checkpoint=section), int(num_nodes), 0.0, run.experience)
    step_s = run.median("step_s")
    every_s = every * step_s if isinstance(every, int) and step_s else costs.best_s
    return describe_costs(costs, every_s, int(num_nodes))


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and value > 0 else None
