"""Decisions that depend on evaluations: which checkpoints count as best, and when a run stops early."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from tests.helpers.faults import fill, small_disk
from tests.helpers.launch import Run
from tests.helpers.tiny import tiny_config
from trainer import Trainer, UserError, load_config, load_weights
from trainer.checkpoints import command_line as show_checkpoints
from trainer.config.rules import check_config
from trainer.export import command_line as export
from trainer.metrics.record import Record

OWN = ("eval.every=2", "checkpoint.keep_last=1", "checkpoint.mode=sync", "log.every=5")


class Scripted(Trainer):
    """Evaluates normally, but returns the losses that the test chooses, by step."""

    values: Mapping[int, Mapping[str, float | None]] = {
        step: {"loss": loss} for step, loss in {2: 3.0, 4: 1.0, 6: 2.0, 8: 2.5, 10: 1.5, 12: 0.5}.items()
    }

    def evaluate(self) -> Record | None:
        record = super().evaluate()
        return None if record is None else Record(**{**record, **self.values.get(self.state.step, {"loss": 2.2})})


def trained(folder: Path, *overrides: str, kind: type[Trainer] = Scripted) -> Run:
    trainer = kind(tiny_config(folder, *OWN, *overrides))
    assert trainer.fit() == 0
    trainer.close()
    return Run(folder, [], folder)


def best_of(folder: Path, capsys: pytest.CaptureFixture[str]) -> list[int]:
    """Return the steps that the command `checkpoints` marks as best."""
    capsys.readouterr()
    assert show_checkpoints([str(folder), "--json"]) == 0
    return [entry["step"] for entry in json.loads(capsys.readouterr().out) if entry["is_best"]]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", pytest.param("sync", marks=pytest.mark.campaign)])
def test_the_best_checkpoints_are_kept_and_known_after_a_resume(
    mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    best = ("checkpoint.keep_best=1", f"checkpoint.mode={mode}")
    assert trained(folder, *best, "train.steps=7").steps_saved == [4, 7]
    # Nothing better comes, and more is pruned.
    assert trained(folder, *best, "train.steps=10", "checkpoint.every=5").steps_saved == [4, 10]
    assert best_of(folder, capsys) == [4]
    at_4 = load_weights(folder / "checkpoints" / "step_00000004").state_dict()
    assert export([f"{folder}/best", str(tmp_path / "best.pt")]) == 0
    exported = torch.load(tmp_path / "best.pt")
    assert [name for name in at_4 if not torch.equal(exported[name], at_4[name])] == []
    branch = trained(tmp_path / "branch", f"checkpoint.resume={folder}/best", "train.steps=5", kind=Trainer)
    assert [line["resumed_step"] for line in branch.of_kind("start")] == [4]
    assert trained(folder, *best, "train.steps=12").steps_saved == [12]


@pytest.mark.campaign
def test_several_best_checkpoints_are_kept(tmp_path: Path) -> None:
    """Step 2, the best at first, has gone."""
    assert trained(tmp_path / "run", "checkpoint.keep_best=3", "train.steps=11").steps_saved == [4, 6, 10, 11]


@pytest.mark.campaign
def test_best_existing_checkpoint_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that could not be saved, or was deleted, does not count."""
    with small_disk(tmp_path / "disk", "4m") as disk:

        class OnceFull(Scripted):
            def evaluate(self) -> Record | None:
                if self.state.step == 4:
                    subprocess.run(fill(disk), shell=True, check=True, capture_output=True)
                if self.state.step == 6:
                    (disk / "fill").unlink()
                return super().evaluate()

        full = ("checkpoint.keep_best=1", f"checkpoint.dir={disk}/saved", "train.steps=7")
        trained(tmp_path / "full", *full, kind=OnceFull)
        assert best_of(tmp_path / "full", capsys) == [6], "4 would have been better"
    folder = tmp_path / "deleted"
    trained(folder, "checkpoint.keep_best=1", "train.steps=7")
    shutil.rmtree(folder / "checkpoints" / "step_00000004")
    assert trained(folder, "checkpoint.keep_best=1", "train.steps=11").steps_saved == [10, 11]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("losses", "best"),
    [({2: 1.0, 4: 1.0, 6: 1.0}, 2), ({2: math.nan, 4: 2.0, 6: math.inf}, 4)],
    ids=["as good is not better", "not a number is never best"],
)
def test_what_counts_as_best(losses: dict[int, float], best: int, tmp_path: Path) -> None:
    class Own(Scripted):
        values = {step: {"loss": loss} for step, loss in losses.items()}

    assert trained(tmp_path, "checkpoint.keep_best=1", "train.steps=7", kind=Own).steps_saved == [best, 7]


@pytest.mark.slow
def test_loss_of_one_source_selects_the_best(tmp_path: Path) -> None:
    class Own(Scripted):
        values = {
            2: {"loss": 1.0, "loss_code": 3.0},
            4: {"loss": 0.5, "loss_code": 4.0},
            6: {"loss": 0.4, "loss_code": None},
        }

    for name in ("web", "code"):
        (tmp_path / f"{name}.txt").write_text(name * 500)
    sources = f"data.path={{web: {tmp_path}/web.txt, code: {tmp_path}/code.txt}}"
    own = [sources, "data.source=tokens", "model.vocab_size=257", "data.holdout=0.2", "eval.metric=loss_code"]
    ran = trained(tmp_path / "run", *own, "checkpoint.keep_best=1", "train.steps=7", kind=Own)
    assert ran.steps_saved == [2, 7]


@pytest.mark.slow
def test_run_ends_when_evaluations_stop_improving(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also counting over a stop and a resume; and it says why, and what to do to train longer."""
    folder, patient = tmp_path / "run", ("eval.patience=3", "train.steps=1000")

    class Stopped(Scripted):
        def on_step(self, record: Record) -> None:
            self.stopping = record.step == 7

    first = Stopped(tiny_config(folder, *OWN, *patient))
    assert first.fit() == 75
    first.close()
    ended = trained(folder, *patient)
    status = ended.status
    assert (status["state"], status["exit_code"], status["step"]) == ("finished", 0, 10)
    assert status["reason"].startswith("eval.patience=3: ")
    assert "step 4" in status["reason"]
    capsys.readouterr()
    assert trained(folder, *patient).status["step"] == 10
    assert "eval.patience=0" in capsys.readouterr().out
    assert trained(folder, "eval.patience=0", "train.steps=12").status["step"] == 12


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("checkpoint.keep_best=1", "eval.every=0"),
        ("eval.patience=2", "eval.every=0"),
        ("eval.metric=los", "eval.metric=loss"),
        ("eval.metric=loss_web", "eval.metric"),
    ],
)
def test_mistakes(setting: str, named: str) -> None:
    overrides = [setting, *(["eval.every=0"] if named == "eval.every=0" else [])]
    with pytest.raises(UserError) as refused:
        check_config(load_config("llama_small", overrides), 1, 1)
    assert str(refused.value).startswith(f"{setting}: ")
    assert named in str(refused.value)


def test_there_is_no_best_before_an_evaluation(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no checkpoints"):
        load_weights(tmp_path / "best")
