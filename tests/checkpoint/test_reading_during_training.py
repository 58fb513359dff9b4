"""Commands that read the checkpoints of a run while it trains and prunes them."""

from __future__ import annotations

import itertools
import shutil
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.forked import fork, run_module
from tests.helpers.gate import wait_until
from tests.helpers.runs import SharedRun
from trainer import evaluate, export, load_weights
from trainer.checkpoint import reader
from trainer.checkpoint.reader import StoredWeights, find_checkpoint, open_checkpoint
from trainer.checkpoint.storage import LocalStorage, open_storage
from trainer.checkpoints import list_checkpoints
from trainer.errors import UserError

pytestmark = pytest.mark.slow  # the run that all tests read is trained in a separate process


def prune(run: Path, step: int) -> None:
    """Delete a checkpoint as a run does: first its name, in one operation, then its files."""
    storage = open_storage(run / "checkpoints")
    storage.delete(storage.unpublish(f"step_{step:08d}"))


@contextmanager
def publishing_and_pruning(run: Path) -> Iterator[None]:
    """Until the block ends, publish and prune two checkpoints in turn, as fast as possible."""
    has_ended, storage = threading.Event(), LocalStorage(run / "checkpoints")
    (run / "checkpoints").rename(run / "saved")
    (run / "checkpoints").mkdir()

    def work() -> None:
        before = ""
        for name in itertools.cycle(("step_00000010", "step_00000020")):
            unpublished = storage.begin(name)
            shutil.copytree(run / "saved" / name, storage.path / unpublished, dirs_exist_ok=True)
            storage.publish(unpublished, name)
            if before:
                storage.delete(storage.unpublish(before))
            before = name
            if has_ended.wait(0.005):
                return

    worker = threading.Thread(target=work)
    worker.start()
    try:
        wait_until(lambda: open_storage(run / "checkpoints").names(), "a checkpoint")
        yield
    finally:
        has_ended.set()
        worker.join()


def test_open_checkpoint_is_readable_after_it_was_pruned(one: SharedRun, tmp_path: Path) -> None:
    run = one.copy_to(tmp_path / "run")
    expected = load_weights(run).state_dict()
    stored = open_checkpoint(run)
    prune(run, 20)
    for name in stored.shapes:
        assert torch.equal(stored.read(name), expected[name])
    assert StoredWeights(stored.storage).manifest.step == 20, "opened once more"


def test_checkpoint_pruned_before_it_is_opened_is_skipped(
    one: SharedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = one.copy_to(tmp_path / "run")
    find = find_checkpoint

    def find_and_prune(path: Any) -> Any:
        found = find(path)
        if str(found).endswith("20"):
            prune(run, 20)
        return found

    monkeypatch.setattr(reader, "find_checkpoint", find_and_prune)
    assert open_checkpoint(run).manifest.step == 10
    shutil.rmtree(run)
    one.copy_to(run)
    with pytest.raises(UserError, match="no checkpoint here"):
        open_checkpoint(run / "checkpoints" / "step_00000020")


def test_checkpoint_pruned_while_it_is_opened(one: SharedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = one.copy_to(tmp_path / "run")
    check = reader.find_damage

    def prune_and_check(storage: Any, *rest: Any) -> Any:
        if storage.path.name.endswith("20"):
            prune(run, 20)
        return check(storage, *rest)

    monkeypatch.setattr(reader, "find_damage", prune_and_check)
    assert open_checkpoint(run).manifest.step == 20, "its files were open by then"


def test_damage_is_still_reported(one: SharedRun, tmp_path: Path) -> None:
    run = one.copy_to(tmp_path / "run")
    (run / "checkpoints" / "step_00000020" / "layout.json").unlink()
    with pytest.raises(Exception, match=r"layout\.json: is missing"):
        open_checkpoint(run)


def test_export_of_a_checkpoint_that_is_pruned(one: SharedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = one.copy_to(tmp_path / "run")
    whole = export.export_checkpoint(run, tmp_path / "whole")
    write = export.export

    def prune_and_write(*arguments: Any, **options: Any) -> Any:
        prune(run, 20)
        return write(*arguments, **options)

    monkeypatch.setattr(export, "export", prune_and_write)
    exported = export.export_checkpoint(run, tmp_path / "exported")
    assert [path.read_bytes() for path in exported] == [path.read_bytes() for path in whole]


def test_evaluation_of_a_checkpoint_that_is_pruned(one: SharedRun, tmp_path: Path) -> None:
    run = one.copy_to(tmp_path / "run")
    with ExitStack() as stack:
        subject = evaluate.find_subject(str(run), [], stack=stack)
        prune(run, 20)
        assert subject.weights == str(run / "checkpoints" / "step_00000020")
        first = subject.config.train.init_from
        assert first is not None
        assert open_checkpoint(first).manifest.step == subject.step == 20
    assert not Path(first).exists()


def test_list_omits_checkpoints_pruned_meanwhile(
    one: SharedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = one.copy_to(tmp_path / "run")
    storage = open_storage(run / "checkpoints")
    from trainer import checkpoints

    entry = checkpoints._entry

    def prune_and_look(storage: Any, name: str, verify: bool) -> Any:
        if name == "step_00000010" and storage.is_published(name):
            prune(run, 10)
        return entry(storage, name, verify)

    monkeypatch.setattr(checkpoints, "_entry", prune_and_look)
    (found,) = list_checkpoints(storage, verify=True)
    assert (found.step, found.state) == (20, "verified")


@pytest.mark.campaign
@pytest.mark.parametrize("command", ["export", "generate", "checkpoints", "evaluate", "evaluate nproc=2"])
def test_twenty_commands_succeed_during_a_run_that_prunes(command: str, one: SharedRun, tmp_path: Path) -> None:
    run = one.copy_to(tmp_path / "run")
    with publishing_and_pruning(run):
        for number in range(3 if "nproc" in command else 20):  # which starts fresh interpreters
            words = {
                "export": [str(run), str(tmp_path / f"out{number}")],
                "generate": [str(run), "--prompt", "def ", "--max-tokens", "2"],
                "checkpoints": [str(run), "--verify", "--json"],
                "evaluate": [str(run), "--json", "eval.steps=2"],
                "evaluate nproc=2": [str(run), "--json", "eval.steps=2", "nproc=2"],
            }[command]
            logs = tmp_path / f"logs{number}"
            logs.mkdir()
            ran = fork(run_module, [f"trainer.{command.split()[0]}", words], logs)
            assert ran.wait() == [0], ran.stderr
            assert "damaged" not in ran.stdout + ran.stderr
            if command.startswith("evaluate"):
                assert f"{run}/checkpoints/step_000000" in ran.stdout
