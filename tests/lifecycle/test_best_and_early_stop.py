"""Decisions that depend on evaluations: which checkpoints count as best, and when a run stops early."""

from __future__ import annotations

import functools
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.tiny import lines, tiny_config
from trainer import Trainer, UserError, load_config, load_weights
from trainer.checkpoint.reader import find_checkpoint
from trainer.checkpoint.writer import RankReport
from trainer.checkpoints import list_checkpoints
from trainer.config import check_config
from trainer.export import command_line as export
from trainer.metrics.record import Record
from trainer.metrics.stop_criterion import StopCriterion


class Scripted(Trainer):
    """Evaluates normally, but returns the losses that the test chooses."""

    LOSSES: Mapping[int, float] = {2: 3.0, 4: 1.0, 6: 2.0, 8: 2.5, 10: 1.5, 12: 0.5}

    def evaluate(self) -> Record | None:
        record = super().evaluate()
        return None if record is None else Record(**{**record, "loss": self.LOSSES.get(self.state.step, 2.2)})


OWN = ("eval.every=2", "checkpoint.keep_last=1", "log.every=5")


def trained(folder: Path, *overrides: str, kind: type[Trainer] = Scripted) -> Trainer:
    trainer = kind(tiny_config(folder, *OWN, *overrides))
    assert trainer.fit() == 0
    trainer.close()
    return trainer


def kept(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in (folder / "checkpoints").glob("step_*"))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", pytest.param("sync", marks=pytest.mark.campaign)])
def test_the_best_checkpoints_are_kept_and_known_after_a_resume(mode: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    best = ("checkpoint.keep_best=1", f"checkpoint.mode={mode}")
    trained(run, *best, "train.steps=7")
    assert kept(run) == [4, 7]
    at_4 = load_weights(run / "checkpoints" / "step_00000004").state_dict()
    trained(run, *best, "train.steps=10", "checkpoint.every=5")  # nothing better, and more is pruned
    assert kept(run) == [4, 10]
    assert str(find_checkpoint(run / "best")).endswith("step_00000004")
    assert [(e.step, e.evaluation["loss"], e.is_best) for e in list_checkpoints(find_place_of(run))] == [
        (4, 1.0, True),
        (10, 1.5, False),
    ]
    assert export([f"{run}/best", str(tmp_path / "best.pt")]) == 0
    exported = torch.load(tmp_path / "best.pt")
    assert all(torch.equal(exported[name], at_4[name]) for name in at_4)
    branch = trained(tmp_path / "branch", f"checkpoint.resume={run}/best", "train.steps=5", kind=Trainer)
    assert branch.resume.step == 4
    trained(run, *best, "train.steps=12")
    assert kept(run) == [12]


def find_place_of(run: Path) -> Any:
    from trainer.checkpoint.reader import find_checkpoints

    return find_checkpoints(run)


@pytest.mark.campaign
def test_several_best_checkpoints_are_kept(tmp_path: Path) -> None:
    trained(tmp_path / "run", "checkpoint.keep_best=3", "train.steps=11", "eval.every=2")
    assert kept(tmp_path / "run") == [4, 6, 10, 11]  # 2, the best at first, has gone


class OnceFull(Scripted):
    """Its disk is full when the best checkpoint is written."""

    def evaluate(self) -> Record | None:
        store = self.checkpoints
        write = type(store)._write_rank_files
        if self.state.step == 4:
            store._write_rank_files = lambda *_: RankReport("no space left")  # type: ignore[method-assign]
            self.saver.schedule.record_failure = lambda: None  # type: ignore[method-assign]  # nor is it tried again
        else:
            store._write_rank_files = functools.partial(write, store)  # type: ignore[method-assign]
        return super().evaluate()


@pytest.mark.slow
def test_best_existing_checkpoint_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint that was not saved, or was deleted, does not count."""
    trained(tmp_path / "full", "checkpoint.keep_best=1", "checkpoint.mode=sync", "train.steps=9", kind=OnceFull)
    assert kept(tmp_path / "full") == [6, 9], "4 would have been better"
    assert "best: step 6, 2.0000" in capsys.readouterr().out
    run = tmp_path / "deleted"
    trained(run, "checkpoint.keep_best=1", "train.steps=7")
    shutil.rmtree(run / "checkpoints" / "step_00000004")
    trained(run, "checkpoint.keep_best=1", "train.steps=11")
    assert kept(run) == [10, 11]


@pytest.mark.slow
def test_run_ends_when_evaluations_stop_improving(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, patient = tmp_path / "run", ("eval.patience=3", "train.steps=1000")
    first = Scripted(tiny_config(run, *OWN, *patient))
    for record in first.steps():  # as in a custom loop, stopped within the patience
        if record.step % 2 == 0:
            first._run_evaluation()
        if record.step == 7:
            first.save_checkpoint(wait=True)
            break
    first.close()
    assert not first.stop_criterion.has_lost_patience
    again = trained(run, *patient)
    assert again.state.step == 10
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["exit_code"], status["step"]) == ("finished", 0, 10)
    assert status["reason"].startswith("eval.patience=3: 3 evaluations without a new best, which is 1.0000 at step 4")
    assert [line["step"] for line in lines(run) if line["kind"] == "train"][-1] == 10
    assert "earlier than train.steps=1000: eval.patience=3" in capsys.readouterr().out
    trained(run, *patient)
    assert "nothing to do" in (said := capsys.readouterr().out)
    assert "to train longer: eval.patience=0" in said
    assert trained(run, "eval.patience=0", "train.steps=12").state.step == 12


@pytest.mark.parametrize(
    ("losses", "best", "num_without_best"),
    [
        ([2.0, 1.0, 1.5, 1.2], (1.0, 2), 2),
        ([1.0, 1.0, 1.0], (1.0, 1), 2),  # as good is not better
        ([math.nan, 3.0, math.nan, math.inf], (3.0, 2), 2),
    ],
)
def test_minimum_improvement(losses: Sequence[float], best: tuple[float, int], num_without_best: int) -> None:
    stop_criterion = StopCriterion(load_config("llama_small", ["eval.every=1"]))
    for step, loss in enumerate(losses, start=1):
        stop_criterion.add_evaluation({"loss": loss}, step)
        stop_criterion.add_evaluation({"loss": loss}, step)  # the same once more counts once
    assert (stop_criterion.best, stop_criterion.num_without_best) == (best, num_without_best)


def test_loss_of_one_source_selects_the_best() -> None:
    sources = ["data.path={web: a.txt, code: b.txt}", "eval.every=1", "checkpoint.keep_best=1"]
    stop_criterion = StopCriterion(load_config("llama_small", [*sources, "eval.metric=loss_code"]))
    found: list[dict[str, float | None]] = [
        {"loss": 1.0, "loss_code": 3.0},
        {"loss": 0.5, "loss_code": 4.0},
        {"loss": 0.4, "loss_code": None},
        {"loss": 2.0, "loss_code": 2.0},
    ]
    bests = []
    for step, record in enumerate(found, start=1):
        stop_criterion.add_evaluation(record, step)
        bests.append(stop_criterion.best)
    assert bests == [(3.0, 1), (3.0, 1), (3.0, 1), (2.0, 4)]
    other = StopCriterion(load_config("llama_small", [*sources, "eval.metric=loss"]))
    other.load_state_dict(stop_criterion.state_dict())
    assert other.best is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["checkpoint.keep_best=1", "eval.every=0"], r"checkpoint.keep_best=1: .*eval.every=0"),
        (["eval.patience=2", "eval.every=0"], r"eval.patience=2: .*eval.every=0"),
        (["eval.metric=los"], r"eval.metric=los: (.|\n)*eval.metric=loss"),
        (["eval.metric=loss_web"], r"eval.metric=loss_web"),
    ],
)
def test_mistakes(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_config(load_config("llama_small", overrides), 1, 1)


def test_there_is_no_best_before_an_evaluation(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no checkpoints"):
        find_checkpoint(tmp_path / "best")
