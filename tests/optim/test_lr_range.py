"""The learning-rate range test, the command at the end of a run, and a resume with a new batch size."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.launch import merged, run
from tests.helpers.tiny import lines, tiny_config
from trainer import Trainer, UserError, load_config
from trainer.config.rules import check_config

RANGE = ["schedule.name=range", "train.steps=12", "schedule.lr_range=[1e-4, 1e3]", "optim.max_grad_norm=null"]


def test_range_test_suggests_a_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "range"
    trainer = Trainer(tiny_config(folder, *RANGE, "log.every=10"))
    assert trainer.fit() == 0
    trainer.close()
    said = capsys.readouterr().out
    train = [line for line in lines(folder) if line["kind"] == "train"]
    expected = [1e-4 * (1e3 / 1e-4) ** (number / 11) for number in range(12)]
    assert [line["lr"] for line in train] == pytest.approx(expected[: len(train)])
    found = json.loads((folder / "lr_range.json").read_text())
    assert [(point["lr"], point["loss"]) for point in found["points"]] == [(x["lr"], x["loss"]) for x in train]
    lowest = min(train, key=lambda line: line["loss"])
    assert 1e-4 < found["suggested_lr"] <= lowest["lr"] * 10
    assert f"suggested: optim.lr={found['suggested_lr']:.1e}" in said
    assert "trainer.report" in said
    assert "trainer.export" not in said, "of weights that have diverged there is nothing to do"


@pytest.mark.parametrize("first", ["training", "range"])
def test_a_range_test_and_a_training_run_do_not_continue_each_other(first: str, tmp_path: Path) -> None:
    kinds = {"training": ["train.steps=2"], "range": RANGE}
    second = "range" if first == "training" else "training"
    trainer = Trainer(tiny_config(tmp_path / "run", *kinds[first]))
    assert trainer.fit() == 0
    trainer.close()
    with pytest.raises(UserError, match=r"^schedule\.name=.*\n.*run\.name"):
        Trainer(tiny_config(tmp_path / "run", *kinds[second])).fit()


class Curve(Trainer):
    """Its loss depends on the rate alone: steepest at 1e-3, rising from 1e-1 on, with noise."""

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        lr = math.log10(self.schedule.lr(self.state.step + 1))
        noise = 0.02 * torch.randn((), generator=torch.Generator().manual_seed(self.state.step)).item()
        curve = 8 - 3 / (1 + math.exp(-4 * (lr + 3))) + 5 * max(0.0, lr + 1) + noise
        return super().loss(batch) * 0.0 + curve * batch["targets"].numel()


@pytest.mark.parametrize(
    "ends",
    [(1e-7, 1.0), pytest.param((0.2, 1.0), marks=pytest.mark.campaign)],
    ids=["a steep place", "it only rises"],
)
def test_rate_with_the_steepest_loss_is_suggested(ends: tuple[float, float], tmp_path: Path) -> None:
    """And none where the loss only rises."""
    wanted = merged(RANGE, [f"schedule.lr_range={list(ends)}", "train.steps=100"])
    trainer = Curve(tiny_config(tmp_path / "run", *wanted))
    assert trainer.fit() == 0
    trainer.close()
    found = json.loads((tmp_path / "run" / "lr_range.json").read_text())["suggested_lr"]
    assert found is None or 4e-4 < found < 2.5e-3
    assert (found is None) == (ends[0] > 0.1)


class Diverging(Trainer):
    factor = math.nan

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return super().loss(batch) * (self.factor if self.state.step == 4 else 1.0)


class Rising(Diverging):
    factor = 9.0


@pytest.mark.parametrize("kind", [Diverging, Rising])
def test_diverged_range_test_counts_as_finished(kind: type[Trainer], tmp_path: Path) -> None:
    trainer = kind(tiny_config(tmp_path / "run", *RANGE))
    assert trainer.fit() == 0
    trainer.close()
    folder = tmp_path / "run"
    status = json.loads((folder / "status.json").read_text())
    assert (status["state"], status["step"]) == ("finished", 5)
    last = json.loads((folder / "lr_range.json").read_text())["points"][-1]
    assert (last["loss"] is None) == (kind is Diverging)
    assert f"{last['lr']:.2e}" in status["reason"]


# ---------------------------------------------------------------------------------------------------------------

NOTE = 'echo "$RUN_DIR $STATE $EXIT_CODE $STEP" >> "$RUN_DIR/../told"'


@pytest.mark.campaign
def test_end_command_gets_the_outcome_once(tmp_path: Path) -> None:
    """On rank 0, after the end record, however the run ends."""
    folder = tmp_path / "run"
    check = 'tail -n 1 "$RUN_DIR/metrics.jsonl" | grep -q \'"kind": "end"\' && '
    told = ["train.steps=2", f"run.on_end={check}{NOTE}"]
    run(folder, *told, "nproc=2")
    run(folder, *told)  # there was nothing to do
    assert (tmp_path / "told").read_text().splitlines() == [f"{folder} finished 0 2"]


class Failing(Trainer):
    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if self.state.step == 1:
            raise ZeroDivisionError
        return super().loss(batch)


@pytest.mark.slow
def test_end_command_gets_a_failure_and_its_own_failure_is_ignored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = Failing(tiny_config(tmp_path / "run", f"run.on_end={NOTE}", "train.steps=3"))
    with pytest.raises(ZeroDivisionError):
        failing.fit()
    failing.close()
    assert (tmp_path / "told").read_text().splitlines() == [f"{tmp_path / 'run'} failed 1 1"]
    trainer = Trainer(tiny_config(tmp_path / "other", "run.on_end=exit 3", "train.steps=1"))
    assert trainer.fit() == 0
    trainer.close()
    assert json.loads((tmp_path / "other" / "status.json").read_text())["state"] == "finished"
    assert "run.on_end" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------------------


class Noting(Trainer):
    """Notes the rows of each step, in order."""

    def train_step(self, micro_batches: Any) -> Any:
        self.rows = [*getattr(self, "rows", []), *(row for batch in micro_batches for row in batch["tokens"].tolist())]
        return super().train_step(micro_batches)


def test_new_batch_size_continues_with_the_next_sample(tmp_path: Path) -> None:
    """No sample is repeated or missed."""

    def rows_of(folder: Path, *overrides: str) -> list[list[int]]:
        trainer = Noting(tiny_config(folder, "schedule.name=constant", *overrides))
        assert trainer.fit() == 0
        trainer.close()
        return [list(row) for row in trainer.rows]

    whole = rows_of(tmp_path / "whole", "train.steps=7")
    first = rows_of(tmp_path / "run", "train.steps=3")
    with pytest.raises(UserError, match=r"train\.global_batch_size"):
        rows_of(tmp_path / "run", "train.steps=5", "train.global_batch_size=8")
    allowed = "checkpoint.allow_changes=[train.global_batch_size]"
    then = rows_of(tmp_path / "run", "train.steps=5", "train.global_batch_size=8", allowed)
    assert first + then == whole


@pytest.mark.parametrize("ends", [(1, 1), (1, 0.5), (0, 1)])
def test_range_that_does_not_rise_is_rejected(ends: tuple[float, float]) -> None:
    with pytest.raises(UserError, match=r"schedule.lr_range"):
        check_config(load_config("llama_small", [f"schedule.lr_range={list(ends)}"]), 1, 1)
