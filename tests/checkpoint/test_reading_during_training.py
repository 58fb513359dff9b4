"""Commands that read the checkpoints of a run while it trains and prunes them."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.gate import wait_until
from tests.helpers.launch import command
from tests.helpers.runs import SharedRun
from trainer import load_weights
from trainer.checkpoints import command_line as list_checkpoints
from trainer.export import command_line as export

pytestmark = pytest.mark.slow  # the run that all tests read is trained in a separate process


class Pruning:
    """Deletes a checkpoint at one file operation below it, as a run does: first its name, then its files."""

    def __init__(self) -> None:
        self.checkpoint: Path | None = None
        self.number = self.num_seen = 0
        sys.addaudithook(self._on_event)  # for as long as the tests run

    @contextmanager
    def at(self, checkpoint: Path, number: int) -> Iterator[None]:
        self.number, self.num_seen, self.checkpoint = number, 0, checkpoint
        try:
            yield
        finally:
            self.checkpoint = None

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        checkpoint = self.checkpoint
        if checkpoint is None or event not in ("open", "os.listdir", "os.scandir"):
            return
        if not isinstance(arguments[0], (str, Path)) or not str(arguments[0]).startswith(str(checkpoint.parent)):
            return
        self.num_seen += 1
        if self.num_seen == self.number + 1:
            self.checkpoint = None
            hidden = checkpoint.with_name(f".removed-{checkpoint.name}-1")
            checkpoint.rename(hidden)
            shutil.rmtree(hidden)


@pytest.fixture(scope="module")
def pruning() -> Pruning:
    return Pruning()


def test_weights_are_read_whenever_the_checkpoint_is_pruned(pruning: Pruning, one: SharedRun, tmp_path: Path) -> None:
    """Those of this checkpoint, if it was open by then, or those of the one before."""
    expected = {
        load_weights(one.checkpoints / f"step_{step:08d}").state_dict()["head.output.weight"] for step in (8, 12)
    }
    found = []
    for number in itertools.count():
        run = one.copy_to(tmp_path / str(number))
        with pruning.at(run / "checkpoints" / "step_00000012", number):
            weights = load_weights(run).state_dict()["head.output.weight"]
        found.append([torch.equal(weights, one_of) for one_of in expected].count(True))
        if pruning.num_seen <= number:
            break
    assert len(found) > 5
    assert set(found) == {1}


@pytest.mark.parametrize("number", [0, 6])
def test_command_reads_a_checkpoint_that_is_pruned(
    number: int, pruning: Pruning, one: SharedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = one.copy_to(tmp_path / "run")
    with pruning.at(run / "checkpoints" / "step_00000012", number):
        assert export([str(run), str(tmp_path / "out")]) == 0
    assert not (run / "checkpoints" / "step_00000012").exists()
    run = one.copy_to(tmp_path / "listed")
    capsys.readouterr()
    with pruning.at(run / "checkpoints" / "step_00000008", number):
        assert list_checkpoints([str(run), "--verify", "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert {entry["state"] for entry in entries} == {"verified"}
    assert {4, 12} <= {entry["step"] for entry in entries}


@pytest.mark.campaign
@pytest.mark.parametrize("name", ["export", "generate", "checkpoints", "evaluate", "evaluate nproc=2"])
def test_commands_during_a_run_that_publishes_and_prunes(name: str, one: SharedRun, tmp_path: Path) -> None:
    run = one.copy_to(tmp_path / "run")
    has_ended, folder = threading.Event(), run / "checkpoints"
    folder.rename(run / "saved")
    folder.mkdir()

    def publish_and_prune() -> None:
        before = Path()
        for name in itertools.cycle(("step_00000008", "step_00000012")):
            shutil.copytree(run / "saved" / name, folder / ".writing-1")
            (folder / ".writing-1").rename(folder / name)
            if before.name:
                before.rename(folder / ".removed-1")
                shutil.rmtree(folder / ".removed-1")
            before = folder / name
            if has_ended.wait(0.005):
                return

    worker = threading.Thread(target=publish_and_prune)
    worker.start()
    try:
        wait_until(lambda: list(folder.glob("step_*")), "a checkpoint")
        for number in range(3 if "nproc" in name else 10):
            words = {
                "export": [run, tmp_path / f"out{number}"],
                "generate": [run, "--prompt", "def ", "--max-tokens", "2"],
                "checkpoints": [run, "--verify", "--json"],
                "evaluate": [run, "--json", "eval.steps=2"],
                "evaluate nproc=2": [run, "--json", "eval.steps=2", "nproc=2"],
            }[name]
            ran = command(f"trainer.{name.split()[0]}", *words)
            assert "damaged" not in ran.out + ran.err
    finally:
        has_ended.set()
        worker.join()
