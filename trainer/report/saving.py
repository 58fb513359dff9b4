"""Estimates how saves and failures affect a run's goodput, and which cost to reduce."""

from __future__ import annotations

import dataclasses
from typing import Any

from trainer.checkpoint.interval import costs_of, describe_costs
from trainer.config import CheckpointSection, RunConfig
from trainer.report.history import Run


def saving_of(run: Run) -> dict[str, str]:
    """Describe the costs of saves and failures, based on the run's history, as text by topic.

    Returns an empty mapping if the run has saved nothing yet, saves only at its end, or did not record its number of
    nodes.
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
