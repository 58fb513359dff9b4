"""A run folder that is deleted, renamed or replaced during training.

The run reports it and ends, and it can be continued from the place where it saved its state.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.checkpoint.test_faults import lines_of, of, slow, steps_in, with_
from tests.helpers.faults import Fault, StartedRun, start
from tests.helpers.gate import wait_until
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import tiny_config
from trainer.distributed.world import World
from trainer.errors import PeerFailed, TrainingFailed, UserError
from trainer.lifecycle.folder import FolderLock, Relocation, RunFolder
from trainer.metrics.record import Record
from trainer.metrics.writers import JsonLines

STEPS = 40
LOST_AT_STEP = 5
"""The folder is lost after this step.  Saves are after even steps."""


def _delete(folder: Path) -> str:
    """Return a command that deletes a folder into which a save may be writing at that moment."""
    return f"until rm -rf {folder}; do :; done"


def lose(base: Path, command: str, *overrides: str, ranks: int = 1, logs_in: Path | None = None) -> StartedRun:
    """Train for some seconds in `base/run`, with the command run after step 5; return the ended run."""
    arguments = with_(f"train.steps={STEPS}", "checkpoint.keep_last=0", *overrides)
    fault = Fault(step_s=0.1, commands={str(LOST_AT_STEP): command})
    run = start(base / "run", *arguments, ranks=ranks, fault=fault, logs_in=logs_in)
    assert run.wait() == [1] * ranks, run.stderr
    assert "Traceback" not in run.stderr
    return run


def advice(run: StartedRun) -> list[str]:
    """Return the settings that the run suggests for continuing it."""
    (found,) = re.findall("to continue: the same command with (.*)", run.stderr_of(0))
    return str(found).split()


def continue_run(run: StartedRun, settings: list[str], *overrides: str, ranks: int = 1) -> Path:
    """Continue as the run has advised; return the folder of the run.  No step is trained twice, none is missing."""
    given = with_(*settings, base=with_(f"train.steps={STEPS}", *overrides, f"run.dir={run.folder}"))
    folder = Path(next(word.partition("=")[2] for word in given if word.startswith("run.dir=")))
    given.remove(f"run.dir={folder}")
    before = of("train", folder, "step")
    assert 0 < before[-1] < STEPS, "it has stopped soon after"
    assert lines_of(folder)[-1]["reason"] == "failed"
    again = start(folder, *given, ranks=ranks)
    assert again.wait() == [0] * ranks, again.stderr
    assert of("start", folder, "resumed_step") == [None, before[-1]], "the state of the last step was saved"
    assert of("train", folder, "step") == list(range(1, STEPS + 1))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, *slow(2)])
def test_state_is_saved_next_to_a_deleted_folder(ranks: int, tmp_path: Path) -> None:
    run = lose(tmp_path, _delete(tmp_path / "run"), ranks=ranks)
    assert not run.folder.exists(), "it is not made again"
    assert run.stderr.count(f"run.dir={run.folder}: was deleted while the run was training in it; the run stops") == 1
    assert "finished" not in run.stdout
    rescued = tmp_path / "run-rescued"
    assert advice(run) == [f"run.dir={rescued}"]
    status = json.loads((rescued / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", 1)
    assert "was deleted" in status["reason"]
    assert continue_run(run, advice(run), ranks=ranks) == rescued
    log = (rescued / "console.log").read_text()
    assert log.count("\n         run  ") == 2, "what the console said before is there, too"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, *slow(1)])
def test_a_renamed_folder_is_followed(ranks: int, tmp_path: Path) -> None:
    run = lose(tmp_path, f"mv {tmp_path / 'run'} {tmp_path / 'renamed'}", ranks=ranks)
    assert not run.folder.exists()
    assert f"was renamed to {tmp_path / 'renamed'} while the run was training in it" in run.stderr_of(0)
    assert advice(run) == [f"run.dir={tmp_path / 'renamed'}"]
    assert continue_run(run, advice(run), ranks=ranks) == tmp_path / "renamed"
    assert not (tmp_path / "renamed" / ".owner.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["deleted", *slow("renamed")])
def test_loss_of_a_separate_checkpoint_folder(how: str, tmp_path: Path) -> None:
    saved, now = tmp_path / "saved", tmp_path / ("saved-rescued" if how == "deleted" else "renamed")
    command = _delete(saved) if how == "deleted" else f"mv {saved} {now}"
    run = lose(tmp_path, command, f"checkpoint.dir={saved}")
    assert f"checkpoint.dir={saved}: was {how}" in run.stderr_of(0)
    assert advice(run) == [f"checkpoint.dir={now}"]
    continue_run(run, advice(run), f"checkpoint.dir={saved}")
    assert not saved.exists()


@pytest.mark.campaign
@pytest.mark.parametrize("inside", [False, True])
def test_loss_of_the_run_folder_with_separate_checkpoints(inside: bool, tmp_path: Path) -> None:
    saved = tmp_path / ("run/saved" if inside else "saved")
    run = lose(tmp_path, f"mv {tmp_path / 'run'} {tmp_path / 'renamed'}", f"checkpoint.dir={saved}")
    moved = [f"checkpoint.dir={tmp_path / 'renamed' / 'saved'}"] if inside else []
    assert advice(run) == [f"run.dir={tmp_path / 'renamed'}", *moved]
    continue_run(run, advice(run), f"checkpoint.dir={saved}")


@pytest.mark.campaign
def test_loss_of_both_folders_with_their_parent(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    run = lose(
        base, f"mv {base} {tmp_path / 'moved'}; mkdir {base}", f"checkpoint.dir={base / 'saved'}", logs_in=tmp_path
    )
    assert advice(run) == [f"run.dir={tmp_path}/moved/run", f"checkpoint.dir={tmp_path}/moved/saved"]
    continue_run(run, advice(run), f"checkpoint.dir={base / 'saved'}")


@pytest.mark.slow
def test_another_run_takes_the_name_of_a_deleted_folder(tmp_path: Path) -> None:
    """Two runs never write to one folder, even if the first is still alive."""
    folder = tmp_path / "run"
    first = start(folder, *with_("train.steps=100000"), fault=Fault(step_s=0.05))
    try:
        wait_until(lambda: bool(steps_in(folder)), "a checkpoint")
        folder.rename(tmp_path / "gone")
        second = start(folder, *with_("train.steps=8"))
        assert second.wait() == [0], second.stderr
        assert first.wait(60) == [1]
    finally:
        first.processes[0].kill()
    assert f"was renamed to {tmp_path / 'gone'}" in first.stderr
    assert of("start", folder, "resumed_step") == [None]
    assert of("train", folder, "step") == list(range(1, 9))
    assert json.loads((folder / "status.json").read_text())["state"] == "finished"
    assert json.loads((tmp_path / "gone" / "status.json").read_text())["state"] == "failed", first.stderr
    assert max(steps_in(folder)) == 8
    assert max(steps_in(tmp_path / "gone")) == max(of("train", tmp_path / "gone", "step"))


@pytest.mark.slow
def test_deleted_metrics_file_is_rewritten(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    fault = Fault(commands={str(LOST_AT_STEP): f"rm {run_dir}/metrics.jsonl {run_dir}/.owner.json"})
    run = start(run_dir, *with_("train.steps=8"), fault=fault)
    assert run.wait() == [0], run.stderr
    assert f"{run_dir}/metrics.jsonl was deleted and is now restored" in run.stderr
    assert of("train", run_dir, "step") == list(range(1, 9))


def owner_of(folder: Path) -> FolderLock:
    owner = FolderLock(folder, "run.dir")
    owner.acquire()
    return owner


def test_kind_of_loss_is_recognized(tmp_path: Path) -> None:
    folder, other = tmp_path / "a", tmp_path / "b"
    owner = owner_of(folder)
    assert owner.find_loss() is None
    folder.rename(other)
    loss = owner.find_loss()
    assert loss is not None
    assert (loss.moved_to, loss.event) == (other, f"was renamed to {other}")
    folder.mkdir()
    loss = owner.find_loss()
    assert loss is not None
    assert loss.event == f"was renamed to {other}"
    folder.rmdir()
    other.rename(folder)
    assert owner.find_loss() is None, "it is back"
    (folder / ".owner.json").unlink()
    assert owner.find_loss() is None, "the same folder"
    folder.rmdir()
    loss = owner.find_loss()
    assert loss is not None
    assert (loss.moved_to, loss.event) == (None, "was deleted")
    owner.release()


def test_unresponsive_storage_is_no_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = owner_of(tmp_path / "a")
    (tmp_path / "a" / ".owner.json").unlink()
    stat = os.stat

    def away(path: Any, **options: Any) -> os.stat_result:
        if path == tmp_path / "a":
            raise OSError(5, "Input/output error")
        return stat(path, **options)

    monkeypatch.setattr("trainer.lifecycle.folder.os.stat", away)
    assert owner.find_loss() is None
    monkeypatch.undo()
    owner.release()


@pytest.mark.slow
def test_owner_that_was_presumed_dead_names_the_new_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []
    monkeypatch.setattr("trainer.lifecycle.folder.os._exit", codes.append)
    owner = owner_of(tmp_path / "a")
    other = owner._identity | {"pid": 4711, "host": "elsewhere", "token": "other", "since": "yesterday"}
    (tmp_path / "a" / ".owner.json").write_text(json.dumps(other))
    wait_until(lambda: codes, "it gives way", 30)
    owner.release()
    assert codes[0] == 1
    said = capsys.readouterr().err
    assert (
        f"run.dir={tmp_path / 'a'}: another run has taken it over (process 4711 on elsewhere since yesterday)" in said
    )
    assert "{" not in said


def test_files_are_not_recreated_during_a_deletion(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files that are deleted one after another do not reappear at once."""
    folder = tmp_path / "a"
    folder.mkdir()
    lines = JsonLines(folder / "metrics.jsonl", 0)
    lines.write(Record(kind="eval", step=1, loss=1.0))
    (folder / "metrics.jsonl").unlink()
    lines.write(Record(kind="eval", step=2, loss=1.0))
    folder.rmdir()
    lines.write(Record(kind="eval", step=3, loss=1.0))
    (tmp_path / "b").mkdir()
    lines.move_to(tmp_path / "b")
    lines.close()
    assert of("eval", tmp_path / "b", "step") == [1, 2, 3]
    assert capsys.readouterr().err == ""


def relocate(base: Path, is_refused: bool) -> tuple[str, list[Path]]:
    """Lose the folder of a run on rank 0; return with what error relocation ends, and where this rank then writes."""
    config = tiny_config(base / "run", f"checkpoint.dir={base / 'run' / 'a' / 'b'}")
    world = World(config)
    folder, places = RunFolder(config, world.is_main), list[Path]()
    world.agreed(folder.acquire)
    if world.is_main:
        (base / "run").rename(base / "renamed")

    def refuse() -> None:
        raise UserError("another run owns it")

    if is_refused:
        folder.move = refuse  # type: ignore[method-assign]
    checkpoints: Any = SimpleNamespace(move_to=lambda place: places.append(place.path))
    metrics: Any = SimpleNamespace(move_to=lambda path: None)
    said = ""
    try:
        assert Relocation(world, folder, checkpoints, metrics).move_if_lost()
    except (TrainingFailed, PeerFailed) as error:
        said = str(error)
    folder.release()
    world.close()
    return said, [folder.path, *places]


@pytest.mark.slow
def test_all_ranks_follow_a_moved_folder_or_none(tmp_path: Path) -> None:
    for base in (tmp_path / "moves", tmp_path / "fails"):
        base.mkdir()
    moved = tmp_path / "moves" / "renamed"
    assert run_ranks(2, relocate, tmp_path / "moves", False, timeout_s=60) == [("", [moved, moved / "a" / "b"])] * 2
    for said, _ in run_ranks(2, relocate, tmp_path / "fails", True, timeout_s=60):
        assert "its state cannot be saved elsewhere: another run owns it" in said


@pytest.mark.slow
def test_nested_checkpoint_folder_inside_the_run(tmp_path: Path) -> None:
    """Its parents are created once: not again after the folder was deleted, but in the folder that replaces it."""
    saved = tmp_path / "run" / "a" / "b" / "saved"
    run = lose(tmp_path, _delete(tmp_path / "run"), f"checkpoint.dir={saved}")
    assert not run.folder.exists()
    rescued = tmp_path / "run-rescued"
    assert advice(run) == [f"run.dir={rescued}", f"checkpoint.dir={rescued}/a/b/saved"]
    continue_run(run, advice(run))


def test_unused_parent_folders_are_removed(tmp_path: Path) -> None:
    folder = RunFolder(tiny_config(tmp_path / "run", f"checkpoint.dir={tmp_path / 'run' / 'a' / 'b'}"), True)
    folder.acquire()
    assert (tmp_path / "run" / "a").is_dir()
    folder.release()
    assert not (tmp_path / "run").exists()
