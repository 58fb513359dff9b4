"""Disk space for checkpoints: it is checked before a run starts, and a full disk is handled while it trains."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.checkpoint.test_faults import assert_all_good, of, small_disk, steps_in, with_
from tests.helpers.faults import start
from tests.helpers.gate import wait_until
from tests.helpers.tiny import tiny_config
from trainer import Trainer
from trainer.checkpoint.retention import CheckpointCounts, checkpoint_counts
from trainer.checkpoint.storage import LocalStorage
from trainer.config import CheckpointSection
from trainer.metrics.console import readable_bytes

BIG = ("model.name=tests.helpers.custom_recipes:mlp", "model.width=300", "checkpoint.every=2", "train.steps=8")
"""A run whose checkpoint takes a few MiB, nearly all of them tensors."""


@pytest.mark.parametrize(
    ("settings", "steps_left", "existing", "demand"),
    [
        ({"every": 2, "keep_last": 2}, 100, 0, CheckpointCounts(2, 3, 2)),
        ({"every": 2, "keep_last": 1}, 100, 0, CheckpointCounts(1, 2, 2)),
        ({"every": 2, "keep_last": 2}, 100, 2, CheckpointCounts(2, 3, 2)),
        ({"every": 100, "keep_last": 2}, 100, 0, CheckpointCounts(1, 1, 1)),
        ({"every": 0, "keep_last": 2}, 100, 0, CheckpointCounts(1, 1, 1)),
        ({"every": 10, "keep_last": 0}, 95, 1, CheckpointCounts(11, 11, 11)),
        ({"every": "auto", "keep_last": 0}, 95, 1, CheckpointCounts(2, 2, 2)),
        ({"every": "auto", "keep_last": 3, "keep_best": 1}, 95, 0, CheckpointCounts(4, 5, 4)),
        ({"every": 10, "keep_last": 2, "keep_every": 50}, 1000, 0, CheckpointCounts(22, 23, 22)),
    ],
)
def test_number_of_simultaneous_checkpoints(
    settings: dict[str, object], steps_left: int, existing: int, demand: CheckpointCounts
) -> None:
    section = CheckpointSection(**settings)  # type: ignore[arg-type]
    assert checkpoint_counts(section, steps_left, existing) == demand


def start_log(folder: Path, free: int, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> str:
    """Return the log of a run that has nothing left to do, started with this many free bytes."""
    trainer = Trainer(tiny_config(folder, "train.steps=8", "checkpoint.every=2", *overrides))
    monkeypatch.setattr(LocalStorage, "free_bytes", lambda self: free)
    try:
        trainer.start()
    finally:
        trainer.close()
    return (folder / "console.log").read_text()


def test_start_warns_if_checkpoints_will_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = start_log(tmp_path / "a", 250_000, monkeypatch)
    size = 12 * 8784  # weights and two moments, in float32
    one, three = readable_bytes(size), readable_bytes(3 * size)
    assert f"checkpoint.keep_last=2: 3 checkpoints of {one} (2 kept, 1 being written) need {three}, but" in said
    assert f"{tmp_path / 'a' / 'checkpoints'} has {readable_bytes(250_000)} free" in said
    assert "the oldest one will be deleted before the next is written" in said
    assert "to fix: free some space there, or set checkpoint.dir to a folder on another disk, or set" in said
    assert f"checkpoint.keep_last=1 (needs {readable_bytes(2 * size)})" in said
    assert "saves will fail" in start_log(tmp_path / "b", 1000, monkeypatch)
    assert "checkpoint.keep_last=1 (" not in start_log(tmp_path / "c", 1000, monkeypatch, "checkpoint.keep_last=1")
    assert "warning" not in start_log(tmp_path / "d", 10_000_000, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", pytest.param("sync", marks=pytest.mark.campaign)])
def test_oldest_checkpoint_is_deleted_first_if_only_two_fit(mode: str, tmp_path: Path) -> None:
    """keep_last=2 needs space for three; with less the run still saves, and always keeps a good checkpoint."""
    plain = start(tmp_path / "plain", *with_(*BIG, "train.steps=2"))
    assert plain.wait() == [0], plain.stderr
    size = sum(path.stat().st_size for path in (plain.folder / "checkpoints").rglob("*") if path.is_file())
    with small_disk(tmp_path / "disk", f"{int(2.6 * size) // 1024}k") as disk:
        saved = disk / "saved"
        run = start(tmp_path / "run", *with_(*BIG, f"checkpoint.dir={saved}", f"checkpoint.mode={mode}"))
        assert run.wait() == [0], run.stderr
        assert "warning: checkpoint.keep_last=2: 3 checkpoints" in run.stdout
        assert "the oldest one will be deleted before the next is written" in run.stdout
        assert of("checkpoint", run.folder, "step") == [2, 4, 6, 8]
        assert_all_good(saved)


@pytest.mark.slow
def test_final_save_waits_for_space(tmp_path: Path) -> None:
    plain = start(tmp_path / "plain", *with_(*BIG, "train.steps=2"))
    assert plain.wait() == [0], plain.stderr
    size = sum(path.stat().st_size for path in (plain.folder / "checkpoints").rglob("*") if path.is_file())
    with small_disk(tmp_path / "disk", f"{int(1.5 * size) // 1024}k") as disk:
        (disk / "other").write_bytes(bytes(size))
        saved = disk / "saved"
        arguments = with_(*BIG, "train.steps=3", "checkpoint.every=0", f"checkpoint.dir={saved}")
        run = start(tmp_path / "run", *arguments)
        wait_until(lambda: "the final save waits up to 60 s for disk space" in run.stderr, "it waits")
        threading.Timer(0.0, (disk / "other").unlink).start()
        assert run.wait() == [0], run.stderr
        assert "MiB free, the checkpoint needs" in run.stderr
        assert "to fix: free some space there, or set checkpoint.keep_last=1 or a checkpoint.dir" in run.stderr
        assert [path.name for path in saved.glob("step_*")] == ["step_00000003"]
    assert steps_in(run.folder) == []
