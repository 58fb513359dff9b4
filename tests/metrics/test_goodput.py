"""How the time of a run is divided: totals over all attempts, from the records that remain of them."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.gate import Gate, wait_until
from tests.helpers.launch import run, start
from tests.helpers.tiny import fit
from trainer.metrics.goodput import TimeLedger, compute_goodput

PARTS = ("update_s", "lost_s", "start_s", "load_s", "save_s", "eval_s", "between_s", "other_s")


def started(time: float, resumed_step: int | None = None, **fields: Any) -> dict[str, Any]:
    return {"kind": "start", "time": time, "started": time - 2, "resumed_step": resumed_step, "load_s": 0.0, **fields}


def train(step: int, time: float, **fields: Any) -> dict[str, Any]:
    return {"kind": "train", "step": step, "time": time, "step_s": 1.0, "skipped": 0, **fields}


SAVED = ["checkpoint.every=2", "checkpoint.keep_last=0", "checkpoint.mode=sync"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("goodput") / "run"
    fit(folder, "train.steps=8", *SAVED)
    return folder


Resume = Callable[[list[dict[str, Any]], int], list[dict[str, Any]]]


@pytest.fixture
def resume(saved: Path, tmp_path: Path) -> Resume:
    def resume(records: list[dict[str, Any]], resumed_step: int) -> list[dict[str, Any]]:
        """Resume a run that has these records at that step; return its records up to the new attempt's start."""
        folder = tmp_path / "run"
        shutil.copytree(saved, folder)
        for step in range(resumed_step + 2, 9, 2):
            shutil.rmtree(folder / "checkpoints" / f"step_{step:08d}")
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        found = fit(folder, f"train.steps={resumed_step + 1}", *SAVED)
        starts = [number for number, record in enumerate(found) if record["kind"] == "start"]
        assert found[starts[-1]]["resumed_step"] == resumed_step
        return found[: starts[-1] + 1]

    return resume


def test_division_of_the_time_of_one_attempt() -> None:
    """6 steps of a second each: 20 s in all, of it 6 starting, 4 loading, 3 evaluating, 0.5 saving."""
    found = compute_goodput(
        [
            started(1010.0, started=1000.0, load_s=4.0),
            *(train(step, 1010.0 + step) for step in (1, 2, 3, 4)),
            {"kind": "eval", "step": 4, "loss": 2.0, "eval_s": 3.0, "time": 1017.0},
            {"kind": "checkpoint", "step": 4, "blocked_s": 0.5, "total_s": 2.0, "bytes": 9, "time": 1018.0},
            train(6, 1020.0),
        ]
    )
    assert found.parts() == {
        "update_s": 6.0, "lost_s": 0.0, "start_s": 6.0, "load_s": 4.0, "save_s": 0.5, "eval_s": 3.0, "between_s": 0.0
    }  # fmt: skip
    assert (found.wall_s, found.other_s, found.lost_steps) == (20.0, 0.5, 0)


def test_partly_lost_interval_counts_in_proportion(resume: Resume) -> None:
    """Steps 2 to 6 have one record, and the run resumes at 4."""
    found = resume([started(1.0), train(1, 2.0), train(6, 7.0)], 4)
    assert [record["kind"] for record in found] == ["start", "train", "start"]
    start, total = found[-1], compute_goodput(found)
    assert (start["lost_steps"], start["lost_s"], start["kept_s"], start["lost_until"]) == (2, 2.0, 3.0, 7.0)
    assert (total.update_s, total.lost_s, total.lost_steps) == (4.0, 2.0, 2)
    assert total.between_s == pytest.approx(start["started"] - 7.0), "since the last record, though it was dropped"


def test_two_attempts_lost_at_once(resume: Resume) -> None:
    """The second saved nothing, and the checkpoint that it had resumed from is gone."""
    first = [started(0.0), *(train(step, 1.0 * step) for step in range(1, 7))]
    found = resume([*first, started(100.0, 6), *(train(step, 94.0 + step) for step in (7, 8))], 4)
    total = compute_goodput(found)
    assert (total.update_s, total.lost_s, total.lost_steps) == (4.0, 4.0, 4)


@pytest.mark.parametrize(("reason", "between_s"), [("finished", 0.0), ("stopped", 8895.0)])
def test_time_after_a_finished_attempt_does_not_count(reason: str, between_s: float) -> None:
    """A stopped one waits to go on."""
    end = {"kind": "end", "step": 2, "reason": reason, "time": 103.0}
    found = compute_goodput([started(100.0), train(2, 102.0), end, started(9000.0, 2), train(4, 9002.0)])
    assert (found.between_s, found.wall_s) == (between_s, 5.0 + between_s + 4.0)


def test_skipped_steps_do_not_count() -> None:
    records = [started(1.0), train(2, 3.0, skipped=1), train(4, 5.0, skipped=1), train(6, 7.0, skipped=3)]
    found = compute_goodput(records)
    assert (found.update_s, found.lost_s) == (3.0, 3.0)


def test_strange_values_count_as_nothing(resume: Resume) -> None:
    corrupt = started(100.0, lost_s="x", kept_s=None, lost_until=[1])
    total = compute_goodput(resume([corrupt, train(1, 101.0), {"kind": "start", "started": "now"}], 2))
    assert (total.update_s, total.lost_s) == (1.0, 0.0)


def test_failures_and_restarts_are_those_of_attempts_that_took_a_step() -> None:
    """Two crashes on two nodes, of which the second lost all its steps; a crash at the start; a stop."""
    ledger = TimeLedger()
    for record in [
        started(10.0, nodes=2),
        train(1, 11.0),
        train(2, 12.0),
        started(20.0, 2, nodes=2),  # 8 s after the last record of the one before
        started(40.0, 2, nodes=2, lost_steps=3, lost_s=3.0, lost_until=24.0),
        started(60.0, 2, nodes=2),
        train(3, 61.0),
        {"kind": "end", "step": 3, "reason": "stopped", "time": 62.0},
        started(70.0, 3, nodes=2),
    ]:
        ledger.add(record)
    history = ledger.history()
    assert (history.num_failures, history.mean_restart_s) == (2, (8.0 + 16.0) / 2)
    assert history.node_seconds == 2 * ((12.0 - 8.0) + (24.0 - 18.0) + 2.0 + (62.0 - 58.0) + 2.0)


@pytest.mark.slow
def test_a_run_that_is_killed_twice(tmp_path: Path) -> None:
    """Killed in the evaluations of steps 4 and 8, with checkpoints at 3 and 6: steps 4, 7 and 8 are lost."""
    folder = tmp_path / "run"
    own = ["model.name=tests.helpers.slow_trainer:slow_llama", "model.vocab_size=257", "model.num_kv_heads=2"]
    own += ["train.steps=10", "eval.every=4", "eval.steps=1", "checkpoint.every=3", "checkpoint.mode=sync"]
    until = []
    for step in (4, 8):
        gate = Gate(tmp_path / f"gate {step}", f"evaluation {step}")
        killed = start(folder, *own, variables=gate.variables)
        wait_until(gate.is_reached, "the evaluation")
        killed.signal(signal.SIGKILL)
        killed.wait(together=False)
        until.append(killed.metrics[-1]["time"])
    ended = run(folder, *own)
    end, (first, *resumed) = ended.metrics[-1], ended.of_kind("start")
    replaced = [json.loads(line) for line in (folder / "metrics_superseded.jsonl").read_text().splitlines()]
    assert [line["step"] for line in replaced if line["kind"] == "train"] == [4, 7, 8]
    assert [start["lost_steps"] for start in (first, *resumed)] == [0, 1, 2]
    assert [start["resumed_step"] for start in resumed] == [3, 6]
    assert first["started"] <= first["time"] <= resumed[0]["started"] <= resumed[0]["time"]
    assert (end["lost_steps"], end["restarts"]) == (3, 2)
    by_hand = {
        "wall_s": end["time"] - first["started"],
        "update_s": sum(line["step_s"] for line in ended.of_kind("train")),
        "lost_s": sum(line["step_s"] for line in replaced if line["kind"] == "train"),
        "start_s": sum(start["time"] - start["started"] - start["load_s"] for start in (first, *resumed)),
        "load_s": sum(start["load_s"] for start in (first, *resumed)),
        "save_s": sum(line["blocked_s"] for line in ended.of_kind("checkpoint")),
        "eval_s": sum(line["eval_s"] for line in ended.of_kind("eval")),
        "between_s": sum(start["started"] - time for start, time in zip(resumed, until, strict=True)),
    }
    assert {name: end[name] for name in by_hand} == pytest.approx(by_hand, rel=0.01)
    assert end["wall_s"] == pytest.approx(by_hand["wall_s"], abs=0.1), "all but writing the record itself"
    assert sum(end[name] for name in PARTS) == pytest.approx(end["wall_s"], rel=1e-6)
    assert all(end[name] > 0 for name in PARTS)
    assert end["goodput_total"] == pytest.approx(end["update_s"] / end["wall_s"])
