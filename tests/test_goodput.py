"""The account of a run's time, from its records alone."""

from __future__ import annotations

from typing import Any

from trainer.metrics.goodput import find_goodput

Lines = list[dict[str, Any]]


def start(time: float, resumed_step: int | None = None, **fields: Any) -> dict[str, Any]:
    return {"kind": "start", "time": time, "started": time - 2, "resumed_step": resumed_step, **fields}


def train(step: int, time: float, **fields: Any) -> dict[str, Any]:
    return {"kind": "train", "step": step, "time": time, "step_s": 1.0, "skipped": 0, **fields}


def test_lines_of_saving_between_those_of_training_cost_no_update() -> None:
    """Every tenth update has a line, every 25th is saved."""
    records: Lines = [start(100.0)]
    for step in range(1, 101):
        if step % 10 == 0 or step == 1:
            records.append(train(step, 100.0 + step))
        if step % 25 == 0:
            records.append({"kind": "checkpoint", "step": step, "time": 100.0 + step, "blocked_s": 0.0, "total_s": 3.0})
    found = find_goodput(records)
    assert found.update_s == 100.0
    assert found.wall_s == 102.0


def test_updates_skipped_in_an_attempt_before_are_not_counted_again() -> None:
    records = [start(100.0), train(10, 110.0, skipped=5), start(200.0, 10, skipped=5), train(20, 210.0, skipped=6)]
    found = find_goodput(records)
    assert found.update_s == 5 + 9
    assert found.lost_s == 5 + 1


def test_a_start_record_that_somebody_has_spoilt() -> None:
    records = [
        start(100.0, before={"wall_s": "x", "update_s": None}),
        train(1, 101.0),
        {"kind": "start", "started": "now"},
    ]
    assert find_goodput(records).update_s == 1.0
