"""`trainer.runs`: its summary of runs in every state, without importing torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.forked import REPOSITORY
from tests.helpers.runs import SharedRun
from trainer import runs
from trainer.lifecycle.folder import FolderLock
from trainer.runs import find_runs, summarize


def write(folder: Path, state: str, exit_code: int | None, *records: dict[str, Any], reason: str = "") -> Path:
    folder.mkdir(parents=True)
    status = {"state": state, "exit_code": exit_code, "step": 3, "reason": reason}
    (folder / "status.json").write_text(json.dumps(status))
    (folder / "config.yaml").write_text("run: {name: mine}\ntrain: {steps: 10}\n")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


START = {"kind": "start", "time": 100.0, "started": 90.0, "world_size": 1, "nodes": 1, "resumed_step": None}
TRAIN = {"kind": "train", "time": 110.0, "step": 3, "loss": 2.0, "mean_loss": 2.5, "step_s": 2.0, "skipped": 0}
EVAL = {"kind": "eval", "time": 112.0, "step": 3, "loss": 2.25, "eval_s": 2.0}


@pytest.mark.parametrize(
    ("state", "exit_code", "shown", "next_step"),
    [
        ("finished", 0, "finished", "python -m trainer.generate {} --prompt TEXT"),
        ("stopped", 75, "stopped", "python -m trainer.run recipe={}"),
        ("running", None, "killed", "python -m trainer.run recipe={}"),
        ("failed", 1, "failed", "see {}/console.log, then: python -m trainer.run recipe={}"),
        ("failed", 2, "failed", "correct the error reported in {}/console.log, then start it again"),
    ],
)
def test_each_state(state: str, exit_code: int | None, shown: str, next_step: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "a", state, exit_code, START, TRAIN, EVAL)
    run = summarize(folder)
    assert (run.state, run.step, run.num_steps, run.name) == (shown, 3, 10, "mine")
    assert (run.loss, run.eval_loss) == (2.5, 2.25)
    assert run.goodput == pytest.approx(3 * 2.0 / (112 - 90)), "three steps of two seconds since the command began"
    assert run.next == next_step.replace("{}", str(folder))


def test_a_run_that_is_alive(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", "running", None, START, TRAIN)
    lock = FolderLock(folder, "run.dir")
    lock.acquire()
    try:
        assert summarize(folder).state == "running"
    finally:
        lock.release()


def test_next_command_has_the_ranks_and_nodes(tmp_path: Path) -> None:
    two = write(tmp_path / "two", "stopped", 75, START | {"world_size": 2})
    assert summarize(two).next.endswith(f"recipe={two} nproc=2")
    nodes = write(tmp_path / "nodes", "stopped", 75, START | {"world_size": 16, "nodes": 2})
    assert summarize(nodes).next.startswith("submit the same job again")


def test_broken_and_empty_files_are_tolerated(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", "stopped", 75, START, TRAIN)
    with open(folder / "metrics.jsonl", "ab") as file:
        file.write(b'{"kind": "train", "st\xff')
    (folder / "config.yaml").write_text("run: [")
    run = summarize(folder)
    assert (run.step, run.loss, run.num_steps, run.name) == (3, 2.5, None, "a")
    (folder / "metrics.jsonl").write_text("")
    (folder / "status.json").write_text("")
    assert summarize(folder).state == "unknown"


def test_a_long_file_is_read_from_its_end(tmp_path: Path) -> None:
    records = [TRAIN | {"step": step, "time": 100.0 + step, "mean_loss": step / 1000} for step in range(1, 2001)]
    end = {"kind": "end", "step": 2000, "time": 2200.0, "reason": "finished", "goodput_total": 0.5}
    folder = write(tmp_path / "a", "finished", 0, START, EVAL, *records, end)
    run = summarize(folder)
    assert (run.step, run.loss, run.eval_loss, run.goodput) == (2000, 2.0, 2.25, 0.5)


def test_runs_are_found_in_folders_of_folders_and_not_inside_each_other(tmp_path: Path) -> None:
    old = write(tmp_path / "sweep" / "a", "finished", 0)
    new = write(tmp_path / "b", "stopped", 75)
    write(old / "previous_001", "failed", 1)
    (tmp_path / "c" / "no run").mkdir(parents=True)
    for place, when in ((old, 1000.0), (new, 2000.0)):
        for name in ("status.json", "metrics.jsonl"):
            os.utime(place / name, (when, when))
    assert find_runs(tmp_path) == [new, old]
    assert find_runs(old) == [old]


def test_output_as_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "x y", "stopped", 75, START, TRAIN, reason="notice")
    assert runs.command_line([str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["x", "y", "stopped", "3/10", "2.5000", "30%"]
    assert lines[-2:] == ["  x y (notice)", f"    python -m trainer.run recipe='{tmp_path}/x y'"]
    assert runs.command_line([str(tmp_path), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["state"], found["step"], found["folder"]) == ("stopped", 3, str(tmp_path / "x y"))


@pytest.mark.parametrize("name", ["none", "empty"])
def test_no_runs_give_one_error_message(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert runs.command_line([str(tmp_path / name)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2


@pytest.mark.slow
def test_a_real_run_without_torch(one: SharedRun) -> None:
    code = "import sys, trainer.runs; trainer.runs.command_line(sys.argv[1:]); assert 'torch' not in sys.modules"
    ran = subprocess.run(
        [sys.executable, "-c", code, str(one.ran.folder), "--json"], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    (found,) = json.loads(ran.stdout)
    last = [line for line in one.ran.metrics if line["kind"] == "train"][-1]
    assert (found["state"], found["step"], found["loss"]) == ("finished", last["step"], last["mean_loss"])
    assert found["goodput"] == one.ran.metrics[-1]["goodput_total"]
