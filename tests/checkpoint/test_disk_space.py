"""Disk space for checkpoints: it is checked before a run starts, and a full disk is handled while it trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.runs import RUN, assert_only_whole
from tests.helpers.faults import small_disk
from tests.helpers.gate import wait_until
from tests.helpers.launch import merged, run, start
from tests.helpers.tiny import tiny_config
from trainer import Trainer

pytestmark = pytest.mark.slow

BIG = merged(RUN, ["model.name=tests.helpers.custom_recipes:mlp", "model.width=300", "checkpoint.mode=sync"])
"""A run whose checkpoint takes a few MiB, nearly all of them tensors."""


@pytest.fixture(scope="module")
def size_kib(tmp_path_factory: pytest.TempPathFactory) -> float:
    """The size of a checkpoint of the run."""
    plain = run(tmp_path_factory.mktemp("size") / "run", *merged(BIG, ["train.steps=1"]))
    return sum(path.stat().st_size for path in plain.checkpoints.rglob("*") if path.is_file()) / 1024


def printed_by_start(folder: Path, *overrides: str) -> str:
    """Return the log of a run that is only started."""
    trainer = Trainer(tiny_config(folder, *overrides))
    try:
        trainer.start()
    finally:
        trainer.close()
    return (folder / "console.log").read_text()


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        (["checkpoint.every=2", "checkpoint.keep_last=2"], 3),
        (["checkpoint.every=2", "checkpoint.keep_last=1"], 2),
        (["checkpoint.every=10", "checkpoint.keep_last=0"], 10),
        (["checkpoint.every=10", "checkpoint.keep_last=2", "checkpoint.keep_every=50"], 5),
    ],
)
def test_start_warns_if_checkpoints_will_not_fit(settings: list[str], count: int, tmp_path: Path) -> None:
    """The number that exists at once: those that are kept, and one that is being written."""
    with small_disk(tmp_path / "disk", "64k") as disk:
        said = printed_by_start(tmp_path / "run", *settings, f"checkpoint.dir={disk}/saved", "train.steps=100")
        assert f"{settings[1]}: {count} checkpoints" in said
        assert f"{disk}/saved" in said
    assert "warning" not in printed_by_start(tmp_path / "fits", *settings, "train.steps=100")


def test_oldest_checkpoint_is_deleted_first_if_only_two_fit(size_kib: float, tmp_path: Path) -> None:
    """keep_last=2 needs space for three; with less the run still saves, and always keeps a good checkpoint."""
    with small_disk(tmp_path / "disk", f"{int(2.6 * size_kib)}k") as disk:
        saved = disk / "saved"
        ran = run(tmp_path / "run", *merged(BIG, [f"checkpoint.dir={saved}"]))
        assert "checkpoint.keep_last=2: 3 checkpoints" in ran.out
        assert [line["step"] for line in ran.of_kind("checkpoint")] == [2, 4, 6, 8]
        assert_only_whole(saved)


@pytest.mark.campaign
def test_final_save_waits_for_space(size_kib: float, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", f"{int(1.5 * size_kib)}k") as disk:
        (disk / "other").write_bytes(bytes(int(size_kib * 1024)))
        own = ["train.steps=1", "checkpoint.every=0", f"checkpoint.dir={disk}/saved"]
        ran = start(tmp_path / "run", *merged(BIG, own))
        wait_until(lambda: "the checkpoint needs" in ran.err or not ran.is_running, "it says what it waits for")
        (disk / "other").unlink()
        assert ran.wait().code == 0, ran.err
        assert f"{disk}/saved" in ran.err
        assert "checkpoint.keep_last=1" in ran.err
        assert_only_whole(disk / "saved")
