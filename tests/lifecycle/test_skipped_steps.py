"""While steps are skipped the weights may be bad: earlier checkpoints are kept and used."""

from __future__ import annotations

import json
import math
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.runs import RUN, step_folder
from tests.helpers.cases import in_campaign
from tests.helpers.faults import Fault
from tests.helpers.gate import Gate, wait_until
from tests.helpers.launch import merged, on_ranks, start
from tests.helpers.launch import run as run_processes
from tests.helpers.tiny import full, lines, tiny_config
from trainer import Trainer, load_weights
from trainer.checkpoints import command_line
from trainer.data.source import IGNORE
from trainer.errors import TrainingFailed
from trainer.metrics.record import Record

OWN = ["checkpoint.every=2", "train.steps=12", "checkpoint.mode=sync"]


class Skipping(Trainer):
    """Skips the steps `skipped`, asks to stop after `stops_at`, and spoils its weights after `spoils_at`."""

    skipped: range = range(0)
    stops_at = spoils_at = -1
    factor = 1.0

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return super().loss(batch) * (math.nan if self.state.step + 1 in self.skipped else 1.0)

    def on_step(self, record: Record) -> None:
        if record.step == self.spoils_at:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.mul_(self.factor)
        if record.step == self.stops_at:
            self.stopping = True


def run(folder: Path, *overrides: str, **how: Any) -> int:
    """Train with the attributes `how` of `Skipping`; return the exit code, or raise what `fit` raises."""
    own = Skipping(tiny_config(folder, *merged(OWN, overrides)))
    for name, value in how.items():
        setattr(own, name, value)
    try:
        return own.fit()
    finally:
        own.close()


def saved(folder: Path) -> list[str]:
    """Return the names in the checkpoint folder, without leading zeros."""
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    return [name.replace("step_000000", "") for name in names]


def listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, int]:
    """Return the steps skipped before each save, as the command `checkpoints` lists them."""
    capsys.readouterr()
    assert command_line([str(folder), "--json"]) == 0
    return {entry["name"]: entry["num_skipped"] for entry in json.loads(capsys.readouterr().out)}


def losses(folder: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in lines(folder) if line["kind"] == "train"}


def resumed(folder: Path) -> list[int | None]:
    return [line["resumed_step"] for line in lines(folder) if line["kind"] == "start"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", pytest.param("async", marks=pytest.mark.campaign)])
def test_streak_prunes_no_good_checkpoint(mode: str, tmp_path: Path) -> None:
    """The run then continues from the last good checkpoint, as if undisturbed."""
    with pytest.raises(TrainingFailed, match=r"\b6\b"):
        run(tmp_path, f"checkpoint.mode={mode}", "train.max_skipped_updates=6", skipped=range(6, 99))
    assert saved(tmp_path) == ["02", "04"]
    assert run(tmp_path) == 0
    assert resumed(tmp_path) == [None, 4]
    assert run(tmp_path / "undisturbed") == 0
    assert losses(tmp_path) == losses(tmp_path / "undisturbed")


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1e25, pytest.param(-1e25, marks=pytest.mark.campaign)])
def test_implausibly_large_weights_are_not_published(factor: float, tmp_path: Path) -> None:
    """They are finite, but their squares are not: such weights were not trained, and cannot be."""
    with pytest.raises(TrainingFailed):
        run(tmp_path, "train.max_skipped_updates=3", spoils_at=6, factor=factor)
    assert saved(tmp_path) == ["02", "04"]
    assert run(tmp_path) == 0
    assert resumed(tmp_path) == [None, 4]


def test_weights_of_zero_and_frozen_ones_of_any_size_are_saved(tmp_path: Path) -> None:
    own = Skipping(tiny_config(tmp_path, *OWN, "checkpoint.keep_last=0"))
    with torch.no_grad():
        for parameter in own.model.parameters():
            parameter.zero_()
        frozen = next(iter(own.model.parameters())).requires_grad_(False)
        frozen.fill_(-3e38)  # a mask, say
    for _ in own.steps():
        own.save_checkpoint(wait=True)
        break
    own.close()
    assert saved(tmp_path) == ["01"]


@pytest.mark.slow
def test_save_due_in_a_streak_is_postponed_to_its_end(tmp_path: Path) -> None:
    """It replaces the due save, also for `keep_every` and after a restart."""
    keep = ["checkpoint.keep_last=1", "checkpoint.keep_every=4"]
    assert run(tmp_path, *keep, skipped=range(4, 7), stops_at=9) == 75
    assert saved(tmp_path) == ["07", "08", "09"]
    assert run(tmp_path, *keep) == 0
    assert saved(tmp_path) == ["07", "08", "12"]
    assert run(tmp_path, *keep, "train.steps=18") == 0
    assert saved(tmp_path) == ["07", "08", "12", "16", "18"]


@pytest.mark.campaign
def test_a_stop_in_a_streak(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The checkpoint saved then prunes nothing and is used only if named; it is not pruned either."""
    skipped = range(6, 8)
    assert run(tmp_path / "whole", skipped=skipped) == 0
    folder = tmp_path / "run"
    assert run(folder, "checkpoint.keep_last=1", skipped=skipped, stops_at=7) == 75
    assert saved(folder) == ["04", "07"]
    assert listed(folder, capsys)["step_00000007"] == 2
    by_name = tmp_path / "by_name"
    shutil.copytree(folder / "checkpoints" / "step_00000007", tmp_path / "step_00000007")
    assert run(folder, skipped=skipped) == 0
    assert "step_00000007" in capsys.readouterr().err
    assert resumed(folder) == [None, 4]
    assert losses(folder) == losses(tmp_path / "whole")
    assert (folder / "previous_001" / "step_00000007").is_dir()
    own = Skipping(tiny_config(by_name, *OWN, f"checkpoint.resume={tmp_path / 'step_00000007'}"))
    own.load_checkpoint()
    assert (own.skips.total, own.skips.in_a_row) == (2, 2)
    assert own.fit() == 0
    own.close()
    assert losses(by_name).items() <= losses(tmp_path / "whole").items()


@pytest.mark.campaign
def test_checkpoint_of_a_streak_is_used_if_there_is_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A streak is rarely caused by the weights, so earlier training is not discarded."""
    assert run(tmp_path / "whole", skipped=range(6, 8)) == 0
    assert run(tmp_path, "checkpoint.every=0", skipped=range(6, 8), stops_at=6) == 75
    assert saved(tmp_path) == ["06"]
    assert run(tmp_path, "checkpoint.every=0", skipped=range(6, 8)) == 0
    assert resumed(tmp_path) == [None, 6]
    assert "step_00000006" in capsys.readouterr().err
    assert losses(tmp_path).items() == losses(tmp_path / "whole").items()


@pytest.mark.slow
def test_run_that_ends_in_a_streak_fails(tmp_path: Path) -> None:
    with pytest.raises(TrainingFailed, match=r"train\.steps"):
        run(tmp_path, "checkpoint.every=0", skipped=range(11, 13))
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "failed"
    assert [line["reason"] for line in lines(tmp_path) if line["kind"] == "end"] == ["failed"]
    with pytest.raises(TrainingFailed):  # it is not done either
        run(tmp_path, "checkpoint.every=0", skipped=range(11, 13))
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "failed"
    assert run(tmp_path, "train.steps=14") == 0


@pytest.mark.campaign
def test_custom_loop_that_ends_in_a_streak_fails(tmp_path: Path) -> None:
    own = Skipping(tiny_config(tmp_path, *OWN))
    own.skipped = range(12, 13)
    for record in own.steps():
        assert record.step <= 12
    with pytest.raises(TrainingFailed):
        own.close()
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "failed"


@pytest.mark.slow
def test_streak_that_begins_during_a_save(tmp_path: Path) -> None:
    """The checkpoint just saved may be bad: until this is known, no older one is pruned."""
    folder = tmp_path / "run"
    own = merged(RUN, ["checkpoint.keep_last=1", "checkpoint.mode=async", "train.max_skipped_updates=3"])
    plain = Fault(tmp_path / "plain-notes", below=tmp_path / "plain" / "checkpoints")
    run_processes(tmp_path / "plain", *merged(own, ["train.steps=4"]), variables=plain.variables)
    number = next(n for n, line in enumerate(plain.files()) if "step_00000004" in line)
    fault = Fault(tmp_path / "notes", {f"forward {step}": "nan" for step in range(5, 9)}, below=folder / "checkpoints")
    gate = Gate(tmp_path / "gate", f"file {number + 1}")
    streak = start(folder, *own, variables=fault.variables | gate.variables)
    wait_until(lambda: None in streak.train("loss") or not streak.is_running, "a step that is skipped")
    gate.open()
    assert streak.wait().code == 1, streak.err
    assert saved(folder) == ["doubtful-04", "02"], "of its weights nothing is known but that no step was possible"
    again = run_processes(folder, *own)
    assert [line["resumed_step"] for line in again.of_kind("start")] == [None, 2]


@pytest.mark.campaign
def test_doubtful_checkpoint_is_quarantined_once(tmp_path: Path) -> None:
    """If resuming from the previous one fails too, the checkpoint was not the cause; storage does not fill up."""
    for _ in range(3):
        with pytest.raises(TrainingFailed):
            run(tmp_path, "train.max_skipped_updates=3", skipped=range(5, 99))
    assert saved(tmp_path) == ["doubtful-04", "02", "04"]
    assert resumed(tmp_path) == [None, 2, 4]


@pytest.mark.slow
def test_the_only_checkpoint_is_never_quarantined(tmp_path: Path) -> None:
    with pytest.raises(TrainingFailed):
        run(tmp_path, "train.max_skipped_updates=3", skipped=range(3, 99))
    assert saved(tmp_path) == ["02"]


class LacksTargets(Trainer):
    """Ignores all targets of the steps `empty`, and rank 0's first ones of step 3; keeps each step's weights."""

    empty = (2, 5, 6)

    def train_step(self, micro_batches: Any) -> Any:
        step = self.state.step + 1
        num_without = len(micro_batches) if step in self.empty else int(step == 3 and self.world.rank == 0)
        for batch in micro_batches[:num_without]:
            batch["targets"] = torch.full_like(batch["targets"], IGNORE)
        return super().train_step(micro_batches)

    def on_step(self, record: Record) -> None:
        self.weights = [*getattr(self, "weights", []), [full(p).detach().clone() for p in self.model.parameters()]]


def train_without_targets(folder: Path, *overrides: str) -> list[list[torch.Tensor]]:
    """Train with a limit of one skipped step in a row; return the weights after each step."""
    own = LacksTargets(tiny_config(folder, *overrides, "train.steps=6", "train.max_skipped_updates=1", "eval.every=0"))
    assert own.fit() == 0
    own.close()
    return own.weights


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "optimizer"), [(1, "adamw"), (2, "sgd"), *in_campaign((1, "sgd"), (1, "muon"), (2, "adamw"))]
)
def test_step_without_targets_changes_nothing_and_is_named(ranks: int, optimizer: str, tmp_path: Path) -> None:
    """Momentum moves no weights.  It says nothing about the weights, so it neither fails a run nor delays its saves."""
    how = [f"optim.name={optimizer}", "optim.lr=0.1", "checkpoint.every=1", "checkpoint.keep_last=0"]
    weights, *_ = on_ranks(ranks, train_without_targets, tmp_path, *how)
    moved = [
        any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)) for before, after in pairwise(weights)
    ]
    assert moved == [False, True, True, False, False], "steps 2 to 6"
    train = [line for line in lines(tmp_path) if line["kind"] == "train"]
    assert [line["step"] for line in train if line["loss"] is None] == [2, 5, 6]
    assert [line["skipped"] for line in train] == [0, 1, 1, 1, 2, 3]
    assert train[1]["tokens"] == train[0]["tokens"] < train[2]["tokens"]
    log = (tmp_path / "console.log").read_text()
    assert log.count("had no targets") == log.count("step 2 had no targets") == 1
    assert [name[-1:] for name in saved(tmp_path)] == list("123456")


def test_evaluation_without_targets_has_no_loss(tmp_path: Path) -> None:
    """A loss of 0 would be the best one."""

    class NoneHeldOut(Trainer):
        def build_eval_loader(self) -> Any:
            loader = super().build_eval_loader()
            assert loader is not None
            return [{**batch, "targets": torch.full_like(batch["targets"], IGNORE)} for batch in loader]

    own = NoneHeldOut(tiny_config(tmp_path, "train.steps=2", "eval.every=1", "checkpoint.keep_best=1"))
    assert own.fit() == 0
    own.close()
    assert [line["loss"] for line in lines(tmp_path) if line["kind"] == "eval"] == [None, None]
    assert not (tmp_path / "best").exists()


@pytest.mark.campaign
def test_newest_checkpoint_of_a_run_is_the_newest_good_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For exports, initial weights, and runs that resume from it; the list marks bad ones."""
    assert run(tmp_path, skipped=range(5, 8), stops_at=6) == 75
    assert list(listed(tmp_path, capsys).values()) == [0, 0, 2]
    newest = load_weights(tmp_path).state_dict()
    good = load_weights(step_folder(tmp_path, 4)).state_dict()
    assert [name for name in good if not torch.equal(newest[name], good[name])] == []
    shutil.rmtree(step_folder(tmp_path, 2))
    shutil.rmtree(step_folder(tmp_path, 4))
    assert load_weights(tmp_path) is not None, "the other one, where there is none that is good"
