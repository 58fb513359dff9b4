"""Changed run folders: checkpoints missing, moved or unmounted, and runs that were copied, renamed or edited.

In every case no line of metrics is lost, and nothing is trained in a folder that was not named.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.forked import start_run
from tests.helpers.gate import wait_until
from tests.helpers.ranks import merged, tiny_overrides
from tests.helpers.tiny import BATCH
from trainer import Trainer, load_config
from trainer.checkpoint.storage import open_storage
from trainer.config.passes import current_checkpoint_dir
from trainer.errors import UserError
from trainer.lifecycle.folder import FolderLock, _process_start_time, is_owned

TINY = tiny_overrides(
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


def checkpoints_emptied(base: Path) -> Start:
    checkpoints_deleted(base)
    (base / "a" / "checkpoints").mkdir()
    return same_command(base / "a")


def checkpoints_and_metrics_deleted(base: Path) -> Start:
    (base / "a" / "metrics.jsonl").rename(base / "kept")
    return checkpoints_deleted(base)


def checkpoints_moved(base: Path) -> Start:
    (base / "a" / "checkpoints").rename(base / "saved")
    return same_command(base / "a")


def checkpoints_moved_and_named(base: Path) -> Start:
    checkpoints_moved(base)
    return same_command(base / "a", f"checkpoint.dir={base / 'saved'}")


def checkpoints_moved_and_resumed_from(base: Path) -> Start:
    checkpoints_moved(base)
    return same_command(base / "a", f"checkpoint.resume={base / 'saved'}")


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


def gone_on_from_another(base: Path) -> Start:
    original(base / "b", steps=2)
    return same_command(base / "a", f"checkpoint.resume={base / 'b'}")


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


def object_store_away(base: Path) -> Start:
    import fsspec

    fsspec.filesystem("memory").rm("/saved", recursive=True)
    return same_command(base / "a", "checkpoint.dir=memory://saved")


def run_moved(base: Path) -> Start:
    (base / "a").rename(base / "b")
    return str(base / "b" / "config.yaml"), []


def run_moved_by_folder(base: Path) -> Start:
    run_moved(base)
    return str(base / "b"), []


def run_moved_with_relative_paths(base: Path) -> Start:
    run_moved(base)
    return "b", []


def run_copied(base: Path) -> Start:
    shutil.copytree(base / "a", base / "b", symlinks=True)
    return str(base / "b" / "config.yaml"), []


def run_copied_and_named(base: Path) -> Start:
    run_copied(base)
    return same_command(base / "b")


def run_copied_and_original_deleted(base: Path) -> Start:
    start = run_copied(base)
    shutil.rmtree(base / "a")
    return start


def run_copied_for_a_new_one(base: Path) -> Start:
    return run_copied(base)[0], ["run.name=fresh"]


def run_copied_for_another_folder(base: Path) -> Start:
    return run_copied(base)[0], [f"run.dir={base / 'runs' / 'fresh'}"]


def run_copied_with_a_place_of_its_own(base: Path) -> Start:
    recipe, _ = run_copied(base)
    return recipe, [f"checkpoint.dir={base / 'own'}", f"checkpoint.resume={base}/disk/deep/saved"]


def linked_checkpoints(base: Path) -> None:
    (base / "a" / "checkpoints").rename(base / "saved")
    (base / "a" / "checkpoints").symlink_to(base / "saved")


def run_copied_with_linked_checkpoints(base: Path) -> Start:
    linked_checkpoints(base)
    return run_copied(base)


def run_moved_with_linked_checkpoints(base: Path) -> Start:
    linked_checkpoints(base)
    return run_moved(base)


def config_edited(base: Path) -> Start:
    path = base / "a" / "config.yaml"
    path.write_text(re.sub(r"\n  lr: .*", "\n  lr: 0.001", path.read_text()))
    return str(path), []


def folder_in_config_edited(base: Path) -> Start:
    path = base / "a" / "config.yaml"
    path.write_text(path.read_text().replace(f"dir: {base / 'a'}", f"dir: {base / 'b'}"))
    return str(path), []


def model_in_config_edited(base: Path) -> Start:
    path = base / "a" / "config.yaml"
    path.write_text(path.read_text().replace("dim: 16", "dim: 24"))
    return str(path), []


def config_copied_and_named(base: Path) -> Start:
    shutil.copy(base / "a" / "config.yaml", base / "variation.yaml")
    return str(base / "variation.yaml"), ["run.name=fresh"]


def config_of_a_checkpoint(base: Path) -> Start:
    return str(base / "a" / "checkpoints" / "step_00000002" / "config.yaml"), []


def config_of_a_copied_checkpoint(base: Path) -> Start:
    run_copied(base)
    return str(base / "b" / "checkpoints" / "step_00000002"), ["run.name=fresh"]


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
    is_of_another: bool = False
    """Whether it goes on from another run, whose metrics stay there."""


ELSEWHERE, INSIDE = ("checkpoint.dir=BASE/disk/deep/saved",), ("checkpoint.dir=BASE/a/saved",)
GONE = "there is no checkpoint in"
OWN = "needs its own place"

IN_MAKE_TEST = [
    Way(checkpoints_deleted, says=GONE),
    Way(disk_unmounted_with_mount_point, says="mentions a checkpoint of step 4", with_options=ELSEWHERE),
    Way(newest_deleted, trains="a", resumed=2),
    Way(run_moved, trains="b", resumed=4),
    Way(run_copied, trains="b", resumed=4),
    Way(run_copied, says=OWN, with_options=ELSEWHERE),
]
IN_THE_CAMPAIGN = [
    Way(run_copied_for_a_new_one, trains="runs/fresh"),
    Way(deleted_and_begun_anew, trains="a"),
    Way(checkpoints_emptied, says=GONE),
    Way(checkpoints_and_metrics_deleted, says="status.json"),
    Way(checkpoints_moved, says=GONE),
    Way(checkpoints_moved_and_named, trains="a", resumed=4, also=("saved",)),
    Way(checkpoints_moved_and_resumed_from, trains="a", resumed=4),
    Way(begun_anew, trains="a"),
    Way(gone_back, trains="a", resumed=2),
    Way(gone_on_from_another, trains="a", resumed=2, is_of_another=True),
    Way(disk_unmounted, says="not mounted", with_options=ELSEWHERE),
    Way(other_place, says="BASE/disk/deep/saved", with_options=ELSEWHERE),
    Way(other_place, says="a/checkpoints holds a checkpoint of step 4"),
    Way(place_forgotten, says="BASE/disk/deep/saved", with_options=ELSEWHERE),
    Way(object_store_away, says="memory://saved", with_options=("checkpoint.dir=memory://saved",)),
    Way(run_moved, trains="b", resumed=4, with_options=ELSEWHERE, also=("disk",)),
    Way(run_moved, trains="b", resumed=4, with_options=INSIDE),
    Way(run_moved_by_folder, trains="b", resumed=4),
    Way(run_moved_with_relative_paths, trains="b", resumed=4),
    Way(run_moved_with_linked_checkpoints, trains="b", resumed=4, also=("saved",)),
    Way(run_copied, trains="b", resumed=4, with_options=INSIDE),
    Way(run_copied, trains="b", resumed=4, with_options=("checkpoint.resume=none",)),
    Way(run_copied_and_named, trains="b", resumed=4),
    Way(run_copied_and_named, trains="b", resumed=4, with_options=("checkpoint.mode=sync",)),
    Way(run_copied_and_original_deleted, trains="b", resumed=4),
    Way(run_copied_for_a_new_one, says=OWN, with_options=ELSEWHERE),
    Way(run_copied_for_a_new_one, trains="runs/fresh", with_options=INSIDE),
    Way(run_copied_for_another_folder, trains="runs/fresh"),
    Way(run_copied_with_a_place_of_its_own, trains="b", resumed=4, with_options=ELSEWHERE, also=("own",)),
    Way(run_copied_with_linked_checkpoints, says=OWN),
    Way(config_edited, trains="a", resumed=4),
    Way(folder_in_config_edited, trains="a", resumed=4),
    Way(model_in_config_edited, says="model.dim: 16 in the checkpoint, 24 now"),
    Way(config_copied_and_named, trains="runs/fresh"),
    Way(config_of_a_checkpoint, says="add run.name=NAME"),
    Way(config_of_a_copied_checkpoint, trains="runs/fresh"),
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
    assert steps == list(range(1 + way.resumed if way.is_of_another and way.resumed else 1, MORE + 1))


@pytest.mark.slow
def test_run_killed_before_its_first_checkpoint_starts_over(tmp_path: Path) -> None:
    """Its records mention steps but no checkpoint: nothing is missing, and no record is lost."""
    run = tmp_path / "run"
    options = merged(TINY, ["recipe=llama_small", f"run.dir={run}", "train.steps=1000000", "checkpoint.every=0"])
    first = start_run(options, tmp_path)
    wait_until(lambda: (run / "metrics.jsonl").is_file() and len(records(run, "train")) >= 3, "three steps")
    os.kill(first.processes[0].pid, signal.SIGKILL)
    first.wait()
    before = metrics_lines(contents(run))
    assert first.processes[0].exitcode == -signal.SIGKILL
    assert train(*same_command(run)) == ""
    assert [record["step"] for record in records(run, "train")] == list(range(1, MORE + 1))
    assert [record["resumed_step"] for record in records(run, "start")] == [None, None]
    assert before <= metrics_lines(contents(run))


@pytest.mark.slow
def test_custom_loop_that_never_saved_starts_over(tmp_path: Path) -> None:
    config = load_config("llama_small", [*TINY, f"run.dir={tmp_path}", "train.steps=2"])
    for _ in range(2):
        trainer = Trainer(config)
        assert [record.step for record in trainer.steps()] == [1, 2]
        trainer.close()
    assert len(metrics_lines(contents(tmp_path))) == 8  # start, two steps and end, of each


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


@pytest.mark.campaign
def test_starting_over_creates_a_new_run_in_wandb(tmp_path: Path) -> None:
    original(tmp_path / "a", "log.wandb=offline")
    ids = wandb_ids(tmp_path / "a")
    assert train(*same_command(tmp_path / "a", "log.wandb=offline", "checkpoint.resume=none")) == ""
    assert not wandb_ids(tmp_path / "a") & ids
    previous = {path.name for path in (tmp_path / "a" / "previous_001").iterdir()}
    assert previous >= {"metrics.jsonl", "config.yaml", "status.json", "wandb", "step_00000002", "step_00000004"}


def test_copy_of_an_active_run_is_not_locked(tmp_path: Path) -> None:
    """Its lock names a living process, which owns the original folder."""
    running = FolderLock(tmp_path / "a", "run.dir")
    running.acquire()
    owner = json.loads((tmp_path / "a" / ".owner.json").read_text())
    owner |= {"pid": os.getppid(), "started": _process_start_time(os.getppid())}  # any that is alive, but this one
    (tmp_path / "a" / ".owner.json").write_text(json.dumps(owner))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert is_owned(tmp_path / "a")
    assert not is_owned(tmp_path / "b")
    copy = FolderLock(tmp_path / "b", "run.dir")
    copy.acquire()
    assert json.loads((tmp_path / "b" / ".owner.json").read_text())["pid"] == os.getpid()
    copy.release()
    (tmp_path / "a").rename(tmp_path / "c")
    with pytest.raises(UserError, match="another run owns it"):
        FolderLock(tmp_path / "c", "run.dir").acquire()


def test_folders_created_for_a_rejected_start_are_removed(tmp_path: Path) -> None:
    owner = FolderLock(tmp_path / "disk" / "deep" / "saved", "checkpoint.dir")
    owner.acquire()
    owner.release()
    assert list(tmp_path.iterdir()) == []


def test_checkpoint_location_after_a_run_was_moved() -> None:
    assert current_checkpoint_dir("/a/run/saved", "/a/run", "/b/run") == "/b/run/saved"
    assert current_checkpoint_dir("runs/a/saved", "runs/a", "runs/b") == "runs/b/saved"
    assert current_checkpoint_dir("/a/run", "/a/run", "/b/run") == "/b/run"
    for outside in ("/a/run2/saved", "/a", "s3://a/run/saved", "/a/run/../saved"):
        assert current_checkpoint_dir(outside, "/a/run", "/b/run") == outside


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_leftovers_of_other_folders_are_not_deleted(kind: str, tmp_path: Path) -> None:
    place = open_storage(f"{kind}://{tmp_path}")
    unfinished = {name: place.begin(name) for name in ("step_00000002", "notes_2")}
    for folder in unfinished.values():
        file = (place / folder).create("content")
        file.write(b"half")
        file.close()
    assert place.clean("step_") == [unfinished["step_00000002"]]
    assert place.names() == [unfinished["notes_2"]]


def test_incomplete_upload_to_an_object_store_is_not_deleted() -> None:
    """A folder without a manifest may be a checkpoint that is being restored; leftovers of runs are marked."""
    place = open_storage("memory://restored")
    for name in ("step_00000002", "step_00000004"):
        if name == "step_00000004":
            place.begin(name)
        file = (place / name).create("__0_0.distcp")
        file.write(b"half")
        file.close()
    assert place.clean("step_") == ["step_00000004"]
    assert (place / "step_00000002").read("__0_0.distcp") == b"half"
    assert place.names() == ["step_00000002"]


def written(folder: Path, **sections: dict[str, Any]) -> Path:
    """Write the files of a run folder that follow from its configuration; return the configuration."""
    folder.mkdir(parents=True)
    (folder / "status.json").write_text("{}")
    values = {"model": {"name": "llama"}, "run": {"dir": str(folder), "name": folder.name}, **sections}
    (folder / "config.yaml").write_text(json.dumps(values))  # JSON is YAML
    return folder / "config.yaml"


def test_config_yaml_refers_to_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = written(tmp_path / "a", checkpoint={"resume": "none"})
    assert load_config(str(path)).run.dir == str(tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "b")
    moved = load_config("b")
    assert (moved.run.dir, moved.run.name, moved.checkpoint.resume) == ("b", "b", "auto")
    assert load_config("b/config.yaml") == moved
    named = load_config("b", ["run.name=c"])
    assert (named.run.dir, named.run.name, named.checkpoint.resume) == ("runs/c", "c", "none")
    assert load_config("b", ["run.dir=elsewhere"]).run.dir == "elsewhere"
    # Without a run around it, a file means what stands in it; a name on the command line is of another run.
    (tmp_path / "b" / "config.yaml").rename(tmp_path / "config.yaml")
    assert load_config("config.yaml").run.dir == str(tmp_path / "a")
    assert load_config("config.yaml", ["run.name=c"]).run.dir == "runs/c"
    with pytest.raises(UserError, match=r"recipe=b: is a folder, but not a run folder: it has no config\.yaml"):
        load_config("b")


def test_separate_checkpoint_folder_belongs_to_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "a", checkpoint={"dir": "s3://bucket/a"})
    assert load_config("a").checkpoint.dir == "s3://bucket/a"
    assert load_config("a", [f"run.dir={tmp_path / 'a'}"]).checkpoint.dir == "s3://bucket/a"
    with pytest.raises(UserError, match="holds the checkpoints of the run in a"):
        load_config("a", ["run.name=b"])
    assert load_config("a", ["run.name=b", "checkpoint.dir=null"]).checkpoint.dir is None
    shutil.copytree("a", "copy")
    with pytest.raises(UserError, match=f"holds the checkpoints of the run in {tmp_path}/a"):
        load_config("copy")
    shutil.rmtree("a")
    assert load_config("copy").checkpoint.dir == "s3://bucket/a"
