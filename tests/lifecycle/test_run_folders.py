"""Changed run folders: checkpoints missing, moved or unmounted, and runs that were copied, renamed or edited.

In every case no line of metrics is lost, and nothing is trained in a folder that was not named.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.faults import Fault
from tests.helpers.launch import merged, start, tiny
from tests.helpers.tiny import BATCH
from trainer import Trainer, UserError, load_config
from trainer.errors import TrainingFailed

TINY = tiny(
    "model.num_kv_heads=2",
    "model.dim=16",
    "model.vocab_size=32",
    "data.source=synthetic",
    "data.seq_len=16",
    f"train.global_batch_size={BATCH}",
    "train.micro_batch_size=2",
    "checkpoint.every=2",
    "checkpoint.keep_last=0",
)
STEPS, MORE = 4, 6
"""The steps of the original run, with a checkpoint every two steps, and `train.steps` of the next start."""

Start = tuple[str, list[str]]
"""A recipe and overrides."""


def original(folder: Path, *overrides: str, steps: int = STEPS) -> Path:
    trainer = Trainer(load_config("llama_small", [*TINY, f"run.dir={folder}", f"train.steps={steps}", *overrides]))
    try:
        trainer.fit()
    finally:
        trainer.close()
    return folder


def train(recipe: str, overrides: list[str]) -> str:
    """Start once more; return the message of a UserError, if there is one."""
    base = TINY if recipe == "llama_small" else []
    try:
        trainer = Trainer(load_config(recipe, merged([*base, f"train.steps={MORE}"], overrides)))
    except UserError as error:
        return str(error)
    try:
        assert trainer.fit() == 0
    except UserError as error:
        return str(error)
    finally:
        trainer.close()
    return ""


def same_command(run: Path, *overrides: str) -> Start:
    return "llama_small", [f"run.dir={run}", *overrides]


def contents(folder: Path) -> dict[Path, bytes]:
    """Return every file below a folder, and every folder as an empty one."""
    return {path: path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def metrics_lines(files: dict[Path, bytes]) -> set[bytes]:
    """Return the lines of all metrics, wherever they are."""
    return {
        line for path, content in files.items() if path.match("metrics*.jsonl") for line in content.splitlines() if line
    }


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record for record in lines if record["kind"] == kind]


# ---------------------------------------------------------------------------------------------------------------
# The ways.  Each changes what is below `base`, where the original lies in `a`, and says how to start again.


def checkpoints_deleted(base: Path) -> Start:
    shutil.rmtree(base / "a" / "checkpoints")
    return same_command(base / "a")


def checkpoints_moved(base: Path) -> Start:
    (base / "a" / "checkpoints").rename(base / "saved")
    return same_command(base / "a")


def checkpoints_moved_and_named(base: Path) -> Start:
    checkpoints_moved(base)
    return same_command(base / "a", f"checkpoint.dir={base / 'saved'}")


def newest_deleted(base: Path) -> Start:
    shutil.rmtree(base / "a" / "checkpoints" / "step_00000004")
    return same_command(base / "a")


def deleted_and_begun_anew(base: Path) -> Start:
    checkpoints_deleted(base)
    return same_command(base / "a", "checkpoint.resume=none")


def begun_anew(base: Path) -> Start:
    return same_command(base / "a", "checkpoint.resume=none")


def gone_back(base: Path) -> Start:
    return same_command(base / "a", f"checkpoint.resume={base / 'a' / 'checkpoints' / 'step_00000002'}")


def disk_unmounted(base: Path) -> Start:
    (base / "disk").rename(base / "unmounted")
    return same_command(base / "a", f"checkpoint.dir={base}/disk/deep/saved")


def disk_unmounted_with_mount_point(base: Path) -> Start:
    start = disk_unmounted(base)
    (base / "disk").mkdir()
    return start


def other_place(base: Path) -> Start:
    return same_command(base / "a", f"checkpoint.dir={base / 'elsewhere'}")


def place_forgotten(base: Path) -> Start:
    return same_command(base / "a")


def place_of_another_run(base: Path) -> Start:
    return same_command(base / "b", f"checkpoint.dir={base}/disk/deep/saved")


def run_moved(base: Path) -> Start:
    (base / "a").rename(base / "b")
    return str(base / "b" / "config.yaml"), []


def run_copied(base: Path) -> Start:
    shutil.copytree(base / "a", base / "b", symlinks=True)
    return str(base / "b" / "config.yaml"), []


def run_copied_for_a_new_one(base: Path) -> Start:
    return run_copied(base)[0], ["run.name=fresh"]


def linked_checkpoints(base: Path) -> None:
    (base / "a" / "checkpoints").rename(base / "saved")
    (base / "a" / "checkpoints").symlink_to(base / "saved")


def run_moved_with_linked_checkpoints(base: Path) -> Start:
    linked_checkpoints(base)
    return run_moved(base)


def run_copied_with_linked_checkpoints(base: Path) -> Start:
    linked_checkpoints(base)
    return run_copied(base)


def model_in_config_edited(base: Path) -> Start:
    path = base / "a" / "config.yaml"
    path.write_text(path.read_text().replace("dim: 16", "dim: 24"))
    return str(path), []


def config_of_a_checkpoint(base: Path) -> Start:
    return str(base / "a" / "checkpoints" / "step_00000002" / "config.yaml"), []


@dataclass(frozen=True)
class Way:
    change: Callable[[Path], Start]
    trains: str = ""
    """The folder in which it goes on; none where it is refused."""
    resumed: int | None = None
    says: str = ""
    with_options: tuple[str, ...] = ()
    """What the original was started with; BASE stands for where all lies."""
    also: tuple[str, ...] = ()
    """What else was named, and may change."""


ELSEWHERE, INSIDE = ("checkpoint.dir=BASE/disk/deep/saved",), ("checkpoint.dir=BASE/a/saved",)

IN_MAKE_TEST = [
    Way(checkpoints_deleted, says="BASE/a/checkpoints"),
    Way(newest_deleted, trains="a", resumed=2),
    Way(place_of_another_run, says="BASE/disk/deep/saved", with_options=ELSEWHERE),
    Way(run_moved, trains="b", resumed=4),
    Way(run_copied, trains="b", resumed=4),
]
IN_THE_CAMPAIGN = [
    Way(disk_unmounted_with_mount_point, says="BASE/disk/deep/saved", with_options=ELSEWHERE),
    Way(run_copied, says="BASE/disk/deep/saved", with_options=ELSEWHERE),
    Way(begun_anew, trains="a"),
    Way(deleted_and_begun_anew, trains="a"),
    Way(gone_back, trains="a", resumed=2),
    Way(checkpoints_moved_and_named, trains="a", resumed=4, also=("saved",)),
    Way(disk_unmounted, says="BASE/disk/deep/saved", with_options=ELSEWHERE),
    Way(other_place, says="BASE/disk/deep/saved", with_options=ELSEWHERE),
    Way(place_forgotten, says="BASE/disk/deep/saved", with_options=ELSEWHERE),
    Way(run_moved, trains="b", resumed=4, with_options=ELSEWHERE, also=("disk",)),
    Way(run_moved_with_linked_checkpoints, trains="b", resumed=4, also=("saved",)),
    Way(run_copied_with_linked_checkpoints, says="BASE/a"),
    Way(run_copied, trains="b", resumed=4, with_options=INSIDE),
    Way(run_copied_for_a_new_one, trains="runs/fresh"),
    Way(model_in_config_edited, says="model.dim"),
    Way(config_of_a_checkpoint, says="run.name="),
]


def name_of(way: Way) -> str:
    return "-".join(
        [way.change.__name__, *(option.rpartition("=")[2].rpartition("/")[2] for option in way.with_options)]
    )


WAYS = [
    *(pytest.param(way, id=name_of(way), marks=pytest.mark.slow) for way in IN_MAKE_TEST),
    *(pytest.param(way, id=f"{name_of(way)}-{i}", marks=pytest.mark.campaign) for i, way in enumerate(IN_THE_CAMPAIGN)),
]


@pytest.mark.parametrize("way", WAYS)
def test_changed_folder_loses_no_line_and_touches_no_other(
    way: Way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    original(tmp_path / "a", *(option.replace("BASE", str(tmp_path)) for option in way.with_options))
    recipe, overrides = way.change(tmp_path)
    before = contents(tmp_path)

    mistake = train(recipe, overrides)

    after = contents(tmp_path)
    assert metrics_lines(before) <= metrics_lines(after)
    if not way.trains:
        assert way.says.replace("BASE", str(tmp_path)) in mistake
        assert after == before
        return
    assert mistake == ""
    named = [tmp_path / name for name in (way.trains, *way.also)]
    changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    assert {
        path for path in changed if not any(path.is_relative_to(one) or path in one.parents for one in named)
    } == set()
    assert records(tmp_path / way.trains, "start")[-1]["resumed_step"] == way.resumed
    steps = [record["step"] for record in records(tmp_path / way.trains, "train")]
    assert steps == list(range(1, MORE + 1))


@pytest.mark.slow
def test_run_killed_before_its_first_checkpoint_starts_over(tmp_path: Path) -> None:
    """Its records mention steps but no checkpoint: nothing is missing, and no record is lost."""
    run = tmp_path / "run"
    fault = Fault(tmp_path / "notes", {"step 3": "SIGKILL"})
    own = ["model.name=tests.helpers.custom_recipes:llama_faulty", "train.steps=9", "checkpoint.every=0"]
    killed = start(run, *merged(TINY, own), variables=fault.variables).wait()
    assert killed.code == -9
    before = metrics_lines(contents(run))
    assert train(*same_command(run, own[0])) == ""
    assert [record["step"] for record in records(run, "train")] == list(range(1, MORE + 1))
    assert [record["resumed_step"] for record in records(run, "start")] == [None, None]
    assert before <= metrics_lines(contents(run))


def wandb_ids(folder: Path) -> set[str]:
    return {path.stem for path in (folder / "wandb").rglob("*.wandb") if path.is_file()}


@pytest.mark.campaign
def test_copy_is_a_new_run_in_wandb_and_moved_run_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    original(tmp_path / "a", "log.wandb=offline")
    ids = wandb_ids(tmp_path / "a")
    assert len(ids) == 1
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    shutil.copytree(tmp_path / "a", tmp_path / "later")
    assert train(str(tmp_path / "copy"), []) == ""
    assert len(wandb_ids(tmp_path / "copy")) == 1
    assert wandb_ids(tmp_path / "copy") != ids
    assert wandb_ids(tmp_path / "copy" / "previous_001") == ids
    # Also where W&B is off while the copy becomes a run of its own.
    assert train(str(tmp_path / "later"), ["log.wandb=off"]) == ""
    assert train(str(tmp_path / "later"), ["log.wandb=offline", f"train.steps={MORE + 2}"]) == ""
    assert not wandb_ids(tmp_path / "later") & ids
    (tmp_path / "a").rename(tmp_path / "moved")
    assert train(str(tmp_path / "moved"), []) == ""
    assert wandb_ids(tmp_path / "moved") == ids


@pytest.mark.slow
def test_copy_of_an_active_run_is_a_run_of_its_own(tmp_path: Path) -> None:
    """Its owner's mark names a living process, which owns the original folder, also after a move."""
    running = Trainer(load_config("llama_small", [*TINY, f"run.dir={tmp_path / 'a'}", "train.steps=4"]))
    next(running.steps())
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert train(*same_command(tmp_path / "b")) == ""
    assert records(tmp_path / "b", "train")[-1]["step"] == MORE
    running.close()


def test_run_whose_folder_is_deleted_fails_and_does_not_create_it_again(tmp_path: Path) -> None:
    own = [*TINY, f"run.dir={tmp_path / 'a'}", "train.steps=4", "checkpoint.max_failures=1"]
    running = Trainer(load_config("llama_small", own))
    next(running.steps())
    shutil.rmtree(tmp_path / "a")
    with pytest.raises(TrainingFailed, match=f"{tmp_path}/a/checkpoints"):
        running.save_checkpoint(wait=True)
    running.close()
    assert list(tmp_path.iterdir()) == []


def test_folders_created_for_a_rejected_start_are_removed(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a file")
    assert train(*same_command(tmp_path / "runs" / "deep", f"checkpoint.resume={tmp_path / 'a'}")) != ""
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.slow
def test_branch_without_steps_left_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    original(tmp_path / "a")
    assert train(str(tmp_path / "a"), ["run.name=branch", "checkpoint.resume=a", f"train.steps={STEPS}"]) == ""
    assert not (tmp_path / "runs" / "branch").exists()


def written(folder: Path, **sections: dict[str, Any]) -> Path:
    """Write the files of a run folder that follow from its configuration; return the configuration."""
    folder.mkdir(parents=True)
    (folder / "status.json").write_text("{}")
    values = {"model": {"name": "llama"}, "run": {"name": folder.name}, **sections}
    (folder / "config.yaml").write_text(json.dumps(values))  # JSON is YAML
    return folder / "config.yaml"


def test_config_yaml_refers_to_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = written(tmp_path / "a", checkpoint={"resume": "none", "dir": "${run.dir}/saved"})
    assert load_config(str(path)).run.dir == str(tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "b")
    moved = load_config("b")
    assert (moved.run.dir, moved.checkpoint.dir, moved.checkpoint.resume) == ("b", "b/saved", "auto")
    assert load_config("b/config.yaml") == moved
    assert load_config("b", [f"run.dir={tmp_path}/b"]).checkpoint.dir == f"{tmp_path}/b/saved"
    branch = load_config("b", ["run.name=c"])
    assert (branch.run.dir, branch.checkpoint.dir, branch.checkpoint.resume) == ("runs/c", None, "auto")
    assert load_config("b", ["run.dir=elsewhere"]).run.dir == "elsewhere"
    # Without a run around it, a file means what stands in it.
    (tmp_path / "b" / "config.yaml").rename(tmp_path / "config.yaml")
    assert load_config("config.yaml", ["checkpoint.dir=null"]).run.dir == "runs/a"
    with pytest.raises(UserError, match=r"^recipe=b: "):
        load_config("b")


def test_stored_configuration_does_not_name_its_folder(tmp_path: Path) -> None:
    stored = load_config("llama_small", [f"run.dir={tmp_path}/a", f"checkpoint.dir={tmp_path}/a/saved"]).stored_yaml()
    assert str(tmp_path) not in stored
    outside = load_config("llama_small", [f"run.dir={tmp_path}/a", f"checkpoint.dir={tmp_path}/saved"]).stored_yaml()
    assert f"dir: {tmp_path}/saved" in outside


def test_separate_checkpoint_folder_belongs_to_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "a", checkpoint={"dir": "s3://bucket/a"})
    assert load_config("a").checkpoint.dir == "s3://bucket/a"
    assert load_config("a", [f"run.dir={tmp_path / 'a'}"]).checkpoint.dir == "s3://bucket/a"
    assert load_config("a", ["run.name=b"]).checkpoint.dir is None
