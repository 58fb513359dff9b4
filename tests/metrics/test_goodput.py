"""How the time of a run is divided, computed from its records alone."""

from __future__ import annotations

import time as clocks
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.tiny import fit
from trainer import Trainer
from trainer.metrics.goodput import compute_goodput
from trainer.metrics.record import Record

Lines = list[dict[str, Any]]


def start(time: float, resumed_step: int | None = None, **fields: Any) -> dict[str, Any]:
    return {"kind": "start", "time": time, "started": time - 2, "resumed_step": resumed_step, **fields}


def train(step: int, time: float, **fields: Any) -> dict[str, Any]:
    return {"kind": "train", "step": step, "time": time, "step_s": 1.0, "skipped": 0, **fields}


def test_save_records_between_train_records_cost_no_step() -> None:
    """Every tenth step has a record, and every 25th is saved."""
    records: Lines = [start(100.0)]
    for step in range(1, 101):
        if step % 10 == 0 or step == 1:
            records.append(train(step, 100.0 + step))
        if step % 25 == 0:
            records.append({"kind": "checkpoint", "step": step, "time": 100.0 + step, "blocked_s": 0.0, "total_s": 3.0})
    found = compute_goodput(records)
    assert found.update_s == 100.0
    assert found.wall_s == 102.0


def test_steps_skipped_in_an_earlier_attempt_are_counted_once() -> None:
    records = [start(100.0), train(10, 110.0, skipped=5), start(200.0, 10, skipped=5), train(20, 210.0, skipped=6)]
    found = compute_goodput(records)
    assert found.update_s == 5 + 9
    assert found.lost_s == 5 + 1


def test_corrupt_start_record() -> None:
    records = [
        start(100.0, before={"wall_s": "x", "update_s": None}),
        train(1, 101.0),
        {"kind": "start", "started": "now"},
    ]
    assert compute_goodput(records).update_s == 1.0


@pytest.mark.parametrize("jump_s", [7200.0, -7200.0])
def test_clock_corrected_between_attempts(jump_s: float) -> None:
    """The machine did not reboot in between, and each attempt recorded the boot time by its clock."""
    first = [start(10_000.0, boot="a", booted=500.0), train(10, 10_010.0)]
    at = 10_030.0 + jump_s
    second = [start(at, 10, boot="a", booted=500.0 + jump_s), train(20, at + 10)]
    found = compute_goodput([*first, *second])
    assert (found.wall_s, found.between_s, found.update_s) == (42.0, 18.0, 20.0)
    stored = {"before": compute_goodput(first).to_state()}
    assert compute_goodput([{**second[0], **stored}, second[1]]).wall_s == 42.0, "from what the start record carries"


def test_clock_ahead_on_a_different_machine() -> None:
    """The time between attempts is then unknown; the time within them is counted as usual."""
    found = compute_goodput([start(10_000.0), train(10, 10_010.0), start(5_000.0, 10), train(20, 5_010.0)])
    assert (found.wall_s, found.between_s, found.update_s) == (24.0, 0.0, 20.0)


@pytest.mark.slow
@pytest.mark.parametrize("jump_s", [7200.0, -7200.0])
def test_clock_that_jumps_during_a_run(jump_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = clocks.time

    class Jumping(Trainer):
        def on_step(self, record: Record) -> None:
            if record.step == 3:
                monkeypatch.setattr(clocks, "time", lambda: real() + jump_s)

    began = real()
    fit(tmp_path, "train.steps=6", kind=Jumping)
    records = fit(tmp_path, "train.steps=8")
    assert all(began - 60 < record["time"] < began + 600 for record in records[:-5]), "of the first attempt"
    end = records[-1]
    assert 0 < end["wall_s"] < 600
    assert 0 <= end["between_s"] < 600
    assert end["goodput_total"] == pytest.approx(end["update_s"] / end["wall_s"])
    assert compute_goodput(records).wall_s == pytest.approx(end["wall_s"], abs=1.0)
