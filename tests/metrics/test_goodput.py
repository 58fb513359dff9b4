"""How the time of a run is divided: totals over all attempts, from the records of the attempts before."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.gate import Gate, wait_until
from tests.helpers.launch import run, start
from tests.helpers.tiny import fit

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


@pytest.fixture
def totals(saved: Path, tmp_path: Path) -> Any:
    def resume(records: list[dict[str, Any]], resumed_step: int) -> dict[str, Any]:
        """Resume a run that has these records at that step; return the totals in the new attempt's start record."""
        folder = tmp_path / "run"
        shutil.copytree(saved, folder)
        for step in range(resumed_step + 2, 9, 2):
            shutil.rmtree(folder / "checkpoints" / f"step_{step:08d}")
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        found = fit(folder, f"train.steps={resumed_step + 1}", *SAVED)
        start = [record for record in found if record["kind"] == "start"][-1]
        assert start["resumed_step"] == resumed_step
        return {**start["before"], "lost_now": start["lost_steps"]}

    return resume


def test_division_of_the_time_of_one_attempt(totals: Any) -> None:
    """6 steps of a second each: 20 s in all, of it 6 starting, 4 loading, 3 evaluating, 0.5 saving."""
    found = totals(
        [
            started(1010.0, started=1000.0, load_s=4.0),
            *(train(step, 1010.0 + step) for step in (1, 2, 3, 4)),
            {"kind": "eval", "step": 4, "loss": 2.0, "eval_s": 3.0, "time": 1017.0},
            {"kind": "checkpoint", "step": 4, "blocked_s": 0.5, "total_s": 2.0, "bytes": 9, "time": 1018.0},
            train(6, 1020.0),
        ],
        6,
    )
    assert {name: found[name] for name in PARTS[:-1]} == {
        "update_s": 6.0, "lost_s": 0.0, "start_s": 6.0, "load_s": 4.0, "save_s": 0.5, "eval_s": 3.0, "between_s": 0.0
    }  # fmt: skip
    assert (found["wall_s"], found["lost_steps"], found["lost_now"]) == (20.0, 0, 0)


def test_partly_lost_interval_counts_in_proportion(totals: Any) -> None:
    """Steps 2 to 6 have one record, and the run resumes at 4."""
    found = totals([started(1.0), train(1, 2.0), train(6, 7.0)], 4)
    assert (found["update_s"], found["lost_s"], found["lost_steps"], found["lost_now"]) == (4.0, 2.0, 2, 2)


@pytest.mark.parametrize(("reason", "between_s"), [("finished", 0.0), ("stopped", 8895.0)])
def test_time_after_a_finished_attempt_does_not_count(reason: str, between_s: float, totals: Any) -> None:
    """A stopped one waits to go on."""
    end = {"kind": "end", "step": 2, "reason": reason, "time": 103.0}
    found = totals([started(100.0), train(2, 102.0), end, started(9000.0, 2), train(4, 9002.0)], 4)
    assert (found["between_s"], found["wall_s"]) == (between_s, 5.0 + between_s + 4.0)


def test_skipped_steps_do_not_count(totals: Any) -> None:
    found = totals([started(1.0), train(2, 3.0, skipped=1), train(4, 5.0, skipped=1), train(6, 7.0, skipped=3)], 6)
    assert (found["update_s"], found["lost_s"]) == (3.0, 3.0)


def test_strange_values_count_as_nothing(totals: Any) -> None:
    corrupt = started(100.0, before={"wall_s": "x", "update_s": None})
    found = totals([corrupt, train(1, 101.0), {"kind": "start", "started": "now"}], 2)
    assert found["update_s"] == 1.0
    assert found["lost_s"] == 0.0


@pytest.mark.slow
def test_a_run_that_is_killed_and_resumed(tmp_path: Path) -> None:
    """Killed in the evaluation of step 4 with a checkpoint at 3: step 4 is lost."""
    folder, gate = tmp_path / "run", Gate(tmp_path / "gate", "evaluation 4")
    own = ["model.name=tests.helpers.slow_trainer:slow_llama", "model.vocab_size=257", "model.num_kv_heads=2"]
    own += ["train.steps=6", "eval.every=4", "eval.steps=1", "checkpoint.every=3", "checkpoint.mode=sync"]
    killed = start(folder, *own, variables=gate.variables)
    wait_until(gate.is_reached, "the evaluation")
    killed.signal(signal.SIGKILL)
    killed.wait(together=False)
    ended = run(folder, *own)
    end, (first, second) = ended.metrics[-1], ended.of_kind("start")
    assert (first["lost_steps"], first["before"]) == (0, None)
    assert (second["resumed_step"], second["lost_steps"], end["lost_steps"], end["restarts"]) == (3, 1, 1, 1)
    assert first["started"] <= first["time"] <= second["started"] <= second["time"]
    replaced = [json.loads(line) for line in (folder / "metrics_superseded.jsonl").read_text().splitlines()]
    assert end["lost_s"] == pytest.approx(sum(line["step_s"] for line in replaced if line["kind"] == "train"))
    kept = sum(line["step_s"] for line in ended.of_kind("train"))
    assert end["update_s"] == pytest.approx(kept)
    assert sum(end[name] for name in PARTS) == pytest.approx(end["wall_s"], rel=1e-6)
    assert all(end[name] > 0 for name in PARTS)
    assert end["goodput_total"] == pytest.approx(end["update_s"] / end["wall_s"])
