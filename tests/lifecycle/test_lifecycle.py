"""How a run begins and ends, as its files say, also in loops of one's own and where something fails on the way."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.launch import Run, run
from tests.helpers.tiny import fit, tiny_config
from trainer import Trainer, UserError
from trainer.metrics.record import Record

pytestmark = pytest.mark.slow


class Failing(Trainer):
    def on_step(self, record: Record) -> None:
        raise ZeroDivisionError("mine")


def left_by(folder: Path) -> Run:
    """Return what a run has left in its folder."""
    return Run(folder, [], folder)


def kinds_of(folder: Path) -> list[str]:
    return [line["kind"] for line in left_by(folder).metrics]


def test_records_begin_with_the_start_and_finish_with_the_end(tmp_path: Path) -> None:
    fit(tmp_path, "train.steps=2")
    assert kinds_of(tmp_path) == ["start", "train", "train", "checkpoint", "end"]
    assert left_by(tmp_path).status == {"state": "finished", "exit_code": 0, "step": 2, "reason": "train.steps reached"}


def test_status_says_that_a_run_is_running(tmp_path: Path) -> None:
    trainer = Trainer(tiny_config(tmp_path, "train.steps=2"))
    next(trainer.steps())
    assert left_by(tmp_path).status["state"] == "running"
    trainer.close()
    assert left_by(tmp_path).status["state"] == "stopped"


@pytest.mark.parametrize("loop", ["fit", "steps"])
def test_exception_is_a_failure(loop: str, tmp_path: Path) -> None:
    """And closing afterwards does not hide it."""

    def train() -> None:
        trainer = (Failing if loop == "fit" else Trainer)(tiny_config(tmp_path, "train.steps=5"))
        try:
            if loop == "fit":
                trainer.fit()
            for _ in trainer.steps():
                raise ZeroDivisionError("mine")
        finally:
            trainer.close()
            trainer.close()

    with pytest.raises(ZeroDivisionError):
        train()
    status = left_by(tmp_path).status
    assert (status["state"], status["exit_code"], status["reason"]) == ("failed", 1, "ZeroDivisionError: mine")
    assert kinds_of(tmp_path).count("end") == 1
    assert left_by(tmp_path).metrics[-1]["reason"] == "failed"
    fit(tmp_path, "train.steps=2")  # the folder is free


def test_run_in_the_handler_of_an_earlier_error_has_not_failed(tmp_path: Path) -> None:
    try:
        raise MemoryError("earlier")
    except MemoryError:
        trainer = Trainer(tiny_config(tmp_path, "train.steps=2"))
        assert [record.step for record in trainer.steps()] == [1, 2]
        trainer.close()
    assert left_by(tmp_path).status["state"] == "finished"


def test_ended_run_does_not_start_again(tmp_path: Path) -> None:
    trainer = Trainer(tiny_config(tmp_path, "train.steps=3"))
    next(trainer.steps())
    trainer.close()
    before = left_by(tmp_path).metrics
    with pytest.raises(UserError):
        trainer.fit()
    assert left_by(tmp_path).metrics == before
    assert left_by(tmp_path).status["state"] == "stopped", "what it came to stays on record"


def test_user_error_before_the_start_leaves_the_run_unchanged(tmp_path: Path) -> None:
    fit(tmp_path, "train.steps=2")
    before = left_by(tmp_path)
    records, status = before.metrics, before.status
    with pytest.raises(UserError):
        fit(tmp_path, "train.steps=4", "model.dim=32")
    assert (left_by(tmp_path).metrics, left_by(tmp_path).status) == (records, status)


def test_finished_run_completes_the_record_of_a_killed_attempt(tmp_path: Path) -> None:
    """It was killed between its last save and its end."""
    trainer = Trainer(tiny_config(tmp_path, "train.steps=2"))
    for _ in trainer.steps():
        pass
    trainer.save_checkpoint(wait=True)
    assert left_by(tmp_path).status["state"] == "running"
    killed = left_by(tmp_path).metrics
    trainer.close()
    (tmp_path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in map(json.dumps, killed)))
    (tmp_path / "status.json").write_text(json.dumps({"state": "running", "exit_code": None, "step": 1, "reason": ""}))
    fit(tmp_path, "train.steps=2")
    assert left_by(tmp_path).status["state"] == "finished"
    assert left_by(tmp_path).status["step"] == 2


class SilentStep(Trainer):
    """A step of one's own, which does not call the Trainer's after the first."""

    kind: Any = None

    def train_step(self, micro_batches: Any) -> Any:
        if self.kind is None:
            update = super().train_step(micro_batches)
            self.kind = type(update)
            return update
        for batch in micro_batches:
            self.loss(batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.state.step == 2:
            signal.raise_signal(signal.SIGTERM)
        return self.kind(1.0, 1.0, 1)


def test_custom_step_is_stopped_and_saved(tmp_path: Path) -> None:
    trainer = SilentStep(tiny_config(tmp_path, "train.steps=1000", "checkpoint.every=1", "checkpoint.keep_last=0"))
    assert trainer.fit() == 75
    trainer.close()
    assert left_by(tmp_path).steps_saved == [1, 2, 3]


def test_second_start_leaves_the_status_of_the_first(tmp_path: Path) -> None:
    """Whatever error the second start has: the folder belongs to the first run."""
    running = Trainer(tiny_config(tmp_path / "run", "train.steps=4"))
    next(running.steps())
    status = (tmp_path / "run" / "status.json").read_bytes()
    fit(tmp_path / "other", "train.steps=1")
    damaged = tmp_path / "other" / "checkpoints" / "step_00000001"
    next(damaged.glob("*.distcp")).unlink()
    own = ["model.dim=16", "model.vocab_size=32", "data.source=synthetic", "data.seq_len=16"]
    second = run(tmp_path / "run", *own, f"checkpoint.resume={damaged}", code=2)
    assert f"run.dir={tmp_path / 'run'}: another run owns it" in second.err
    assert (tmp_path / "run" / "status.json").read_bytes() == status
    running.close()
