"""Checkpoints survive kills, damage, full or hanging storage, and failing ranks. See tests/helpers/faults.py.

`make test` runs a selection, and `python -m tests.campaign faults` the rest. Random cases are seeded, and each
failure names its case, so that it can be repeated.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.runs import (
    EVERY,
    RUN,
    STEPS,
    assert_only_whole,
    assert_same_weights,
    resumed_steps,
    show_checkpoints,
    step_folder,
)
from tests.helpers.cases import in_campaign
from tests.helpers.faults import Fault, fill, small_disk
from tests.helpers.gate import Gate, wait_until
from tests.helpers.launch import Run, merged, on_ranks, run, start, tiny
from tests.helpers.runs import SharedRun
from trainer import Trainer, UserError, load_config, load_weights
from trainer.errors import TrainingFailed

campaign = pytest.mark.campaign


def with_(*overrides: str, ranks: int = 1) -> list[str]:
    return [*merged(RUN, overrides), f"nproc={ranks}"]


def last_step(ran: Run) -> int:
    return max(ran.train("step"), default=0)


# ---------------------------------------------------------------------------------------------------------------
# kill -9


@dataclass(frozen=True)
class Kind:
    """A kind of run to be killed."""

    mode: str = "async"
    ranks: int = 1
    setup: str = "fresh"
    """`fresh`; `resumed` from step 4; `anew`, with the checkpoints of an earlier attempt in the folder; `repeating`:
    each step is saved twice."""

    @property
    def settings(self) -> list[str]:
        name = "mlp_repeating" if self.setup == "repeating" else "mlp_faulty"
        resume = ["checkpoint.resume=none"] if self.setup == "anew" else []
        own = [f"model.name=tests.helpers.custom_recipes:{name}", f"checkpoint.mode={self.mode}", *resume]
        return with_(*own, ranks=self.ranks)


class Kills:
    """Runs that nothing happens to, to draw file operations from and to compare with; then the kills."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._undisturbed: dict[Kind, tuple[Run, Fault]] = {}
        self._killed: dict[int, Path] = {}
        self._num_runs = 0

    def undisturbed(self, kind: Kind) -> tuple[Run, Fault]:
        """Return the run of this kind that nothing happens to, with its file operations."""
        if kind not in self._undisturbed:
            folder = self.set_up(kind)
            fault = Fault(Path(f"{folder}-notes"), below=folder / "checkpoints")
            self._undisturbed[kind] = run(folder, *kind.settings, variables=fault.variables), fault
        return self._undisturbed[kind]

    def set_up(self, kind: Kind) -> Path:
        """Return the folder for a new run, which has what its kind finds there."""
        self._num_runs += 1
        folder = self.folder / f"{self._num_runs:03d}"
        if kind.setup not in ("resumed", "anew"):
            return folder
        if kind.ranks not in self._killed:
            self._killed[kind.ranks] = self.folder / f"killed-{kind.ranks}"
            fault = Fault(self.folder / f"notes-{kind.ranks}", {"step 5": "kill all"})
            own = with_("checkpoint.mode=sync", ranks=kind.ranks)
            started = start(self._killed[kind.ranks], *own, variables=fault.variables).wait()
            assert set(started.codes) == {-9}
            assert started.steps_saved == [2, 4]
        shutil.copytree(self._killed[kind.ranks], folder)
        return folder

    def kill(self, kind: Kind, number: int, whom: str = "kill all", rank: int = 0) -> Run:
        """Kill at a file operation of a rank, cut what was being written, and start again; return the new start."""
        folder = self.set_up(kind)
        place = f"file {number} of rank {rank}" if rank else f"file {number}"
        fault = Fault(Path(f"{folder}-notes"), {place: whom}, below=folder / "checkpoints")
        killed = start(folder, *kind.settings, variables=fault.variables).wait(together=False)
        case = f"{folder}: {kind}, {whom} of rank {rank} at {fault.files(rank)[-1]}"
        assert killed.codes[rank] == -9, f"{case}: {killed.codes} {killed.err}"
        cut_newest_file(folder / "checkpoints", random.Random(f"{kind} {number} {whom} {rank}"))
        return self.restart(kind, killed, case)

    def restart(self, kind: Kind, killed: Run, case: str) -> Run:
        """Start a killed run again, and assert that it continues as if nothing had happened."""
        published, trained, starts = killed.steps_saved, last_step(killed), len(killed.of_kind("start"))
        again = run(killed.folder, *kind.settings)
        undisturbed, _ = self.undisturbed(kind)
        # If it was killed after its last save, there is nothing left to start.
        has_work = len(again.of_kind("start")) > starts
        resumed = (resumed_steps(again)[-1] or 0) if has_work else STEPS
        if kind.setup != "anew":
            assert resumed >= max(published, default=0), f"{case}: continues from {resumed}, published were {published}"
            # At most the save in flight is lost, with what followed it.
            assert trained - resumed <= EVERY * (1 if kind.mode == "sync" else 2), f"{case}: lost too many steps"
        assert again.train("step") == list(range(1, STEPS + 1)), case
        assert again.train("loss") == undisturbed.train("loss"), case
        assert_same_weights(again.folder, undisturbed.folder)
        names = [path.name for path in again.checkpoints.iterdir()]
        assert all(name.startswith("step_") for name in names), f"{case}: {names} are left"
        return again


def cut_newest_file(folder: Path, draw: random.Random) -> None:
    """Cut the newest file that belongs to no complete checkpoint, as a crash of the machine does."""
    if not folder.exists():
        return
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".json"]
    unpublished = [path for path in files if not path.relative_to(folder).parts[0].startswith("step_")]
    if unpublished:
        newest = max(unpublished, key=lambda path: path.stat().st_mtime_ns)
        os.truncate(newest, draw.randrange(newest.stat().st_size + 1))


@pytest.fixture(scope="module")
def kills(tmp_path_factory: pytest.TempPathFactory) -> Kills:
    return Kills(tmp_path_factory.mktemp("kills"))


def numbers_of(files: list[str], event: str) -> list[int]:
    return [number for number, line in enumerate(files) if line.startswith(f"{event} ")]


@pytest.mark.slow
@pytest.mark.parametrize("place", ["while tensors are written", "at the publication", "while an old one is pruned"])
def test_killed_run_continues(place: str, kills: Kills) -> None:
    kind = Kind("async" if place == "while tensors are written" else "sync")
    _, fault = kills.undisturbed(kind)
    files = fault.files()
    if place == "while tensors are written":
        published = numbers_of(files, "os.rename")[0]
        number = published + next(n for n, line in enumerate(files[published:]) if line.startswith("os.mkdir")) + 4
    elif place == "at the publication":
        number = numbers_of(files, "os.rename")[1]
    else:
        number = next(n for n, line in enumerate(files) if "step_00000002" in line and "rmtree" in line)
    kills.kill(kind, number)


@campaign
def test_killed_rank_ends_the_others_and_the_run_continues(kills: Kills) -> None:
    kind = Kind("async", ranks=2)
    _, fault = kills.undisturbed(kind)
    kills.kill(kind, len(fault.files(1)) // 2, "SIGKILL", rank=1)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, *in_campaign(2)])
def test_step_saved_twice_exists_at_all_times(ranks: int, kills: Kills) -> None:
    """Between the two renames of the second save, the first one is available."""
    kind = Kind("sync", ranks, setup="repeating")
    _, fault = kills.undisturbed(kind)
    before = [n for n in numbers_of(fault.files(), "os.rename") if "step_00000002" in fault.files()[n]]
    assert len(before) > 2, "published once, and once over the first"
    assert resumed_steps(kills.kill(kind, before[2]))[-1] == 2


SHARES = [
    (Kind("sync"), 10),
    (Kind("async"), 8),
    (Kind("async", setup="resumed"), 8),
    (Kind("async", setup="anew"), 4),
    (Kind("sync", setup="repeating"), 6),
    (Kind("sync", ranks=2), 6),
    (Kind("async", ranks=2), 6),
    (Kind("async", ranks=2, setup="resumed"), 4),
]


@campaign
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("kind", "count"), SHARES, ids=[str(kind) for kind, _ in SHARES])
def test_killed_at_random_file_operations(kind: Kind, count: int, kills: Kills) -> None:
    """Spread over the kinds of operations, since most only open a file."""
    draw = random.Random(str(kind))
    for _ in range(count):
        rank = draw.randrange(kind.ranks)
        files = kills.undisturbed(kind)[1].files(rank)
        event = draw.choice(sorted({line.split()[0] for line in files}))
        # The last operations may not be reached where a background save finds other ones.
        number = draw.choice([n for n in numbers_of(files, event) if n < 0.9 * len(files)] or [len(files) // 2])
        kills.kill(kind, number, draw.choice(["SIGKILL", "kill all"]), rank)


@campaign
@pytest.mark.parametrize(("mode", "ranks"), [("async", 1), ("sync", 1), ("async", 2)])
@pytest.mark.parametrize("step", [0, 1, 3, 6])
def test_killed_from_outside(mode: str, ranks: int, step: int, kills: Kills) -> None:
    """Not at a file operation, but at any moment after a step; no launcher ends the other rank here."""
    kind = Kind(mode, ranks)
    started = start(kills.set_up(kind), *merged(kind.settings, ["run.timeout_s=30"]))
    wait_until(lambda: last_step(started) >= step, f"step {step}")
    started.kill(ranks - 1)
    kills.restart(kind, started.wait(together=False), f"killed after step {step}")


# ---------------------------------------------------------------------------------------------------------------
# Damage

WAYS = ("flipped", "truncated", "deleted", "zeroed")


def damage(path: Path, way: str, draw: random.Random) -> None:
    """Damage a file in a way that always changes something."""
    content = bytearray(path.read_bytes())
    place = draw.randrange(len(content))
    if way == "flipped":
        content[place] ^= 1 << draw.randrange(8)
    elif way == "truncated":
        content = content[:place]
    elif way == "deleted":
        path.unlink()
        return
    else:  # a block that was never written
        begin = next(at for at in range(place // 512 * 512, -1, -512) if any(content[at : at + 512]))
        content[begin : begin + 512] = bytes(len(content[begin : begin + 512]))
    path.write_bytes(content)


def files_of(checkpoint: Path) -> list[Path]:
    """Return the files that a resume needs: `.metadata` is only for torch's own tools."""
    return sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.name != ".metadata")


def config_of(shared: SharedRun, folder: Path, *overrides: str) -> Any:
    own = [item for item in shared.overrides if not item.startswith(("nproc=", "mesh."))]
    return load_config("llama_small", [*tiny(*merged(own, overrides)), f"run.dir={folder}"])


def load_newest(config: Any) -> tuple[int | None, str]:
    """Return the step that a new Trainer resumes from, and its stderr."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        trainer = Trainer(config)
        try:
            step = trainer.load_checkpoint()
        finally:
            trainer.close()
    return step, said.getvalue()


def damage_and_load(shared: SharedRun, folder: Path, ways: Iterable[str], seed: int) -> None:
    """Damage each file of the newest checkpoint in each way; each time it is quarantined, and the one before is used.

    On several ranks all do the same, and the first does the damage.
    """
    import torch.distributed as dist

    if "RANK" in os.environ and not dist.is_initialized():
        dist.init_process_group("gloo")
    is_first = os.environ.get("RANK", "0") == "0"
    for way in ways:
        for number, original in enumerate(files_of(step_folder(shared.folder, 12))):
            case = folder / f"{way}-{number}"
            path = step_folder(case, 12) / original.relative_to(step_folder(shared.folder, 12))
            if is_first:
                shared.copy_to(case)
                damage(path, way, random.Random(f"{seed} {case.name}"))
            if dist.is_initialized():
                dist.barrier()
            step, said = load_newest(config_of(shared, case))
            assert step == 8, f"{path} {way}: resumed from {step}"
            if is_first:
                assert str(path) in said
                names = {entry.name for entry in (case / "checkpoints").iterdir()}
                assert names == {"damaged-step_00000012", "step_00000004", "step_00000008"}
                shutil.rmtree(case)


@pytest.mark.slow
def test_damage_of_any_file_is_found_and_the_previous_checkpoint_is_used(one: SharedRun, tmp_path: Path) -> None:
    damage_and_load(one, tmp_path, ["flipped"], seed=1)


@campaign
@pytest.mark.parametrize("seed", range(2, 6))
def test_random_damages(seed: int, one: SharedRun, two: SharedRun, tmp_path: Path) -> None:
    damage_and_load(one, tmp_path, WAYS, seed)
    (tmp_path / "two").mkdir()
    on_ranks(2, damage_and_load, two, tmp_path / "two", [WAYS[seed % 4]], seed)


def stamps(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return time and content of every file."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


@pytest.mark.slow
def test_flipped_bit_costs_one_checkpoint(two: SharedRun, tmp_path: Path) -> None:
    """The file is named, the checkpoint before is used, and the run ends as if undisturbed."""
    folder = two.copy_to(tmp_path / "run")
    largest = max(files_of(step_folder(folder, 12)), key=lambda path: path.stat().st_size)
    damage(largest, "flipped", random.Random(0))
    again = run(folder, *two.overrides)
    assert "is damaged" in again.err
    assert str(largest) in again.err
    assert resumed_steps(again) == [None, 8]
    assert again.train("loss") == two.train("loss")
    assert again.train("grad_norm") == two.train("grad_norm")
    assert_same_weights(folder, two.folder)
    assert (folder / "checkpoints" / "damaged-step_00000012").is_dir()


@pytest.mark.slow
def test_all_checkpoints_are_damaged(one: SharedRun, tmp_path: Path) -> None:
    """Nothing is started from scratch, and nothing is touched, unless the user asks for it."""
    folder = one.copy_to(tmp_path / "run")
    draw = random.Random(5)
    paths = [draw.choice(files_of(step_folder(folder, step))) for step in (4, 8, 12)]
    for path in paths:
        damage(path, "flipped", draw)
    before = stamps(folder)
    failed = run(folder, *merged(one.overrides, ["nproc=2"]), code=1)
    assert [path for path in paths if str(path) not in failed.err] == []
    assert "checkpoint.resume=none" in failed.err
    assert "Traceback" not in failed.err
    assert failed.status["state"] == "failed"
    after = stamps(folder)
    assert {name: after[name] for name in before if name != "status.json"} == {
        name: content for name, content in before.items() if name != "status.json"
    }
    assert after.keys() == before.keys()
    anew = run(folder, *merged(one.overrides, ["train.steps=4", "checkpoint.resume=none"]))
    assert anew.steps_saved == [4]
    assert {path.name for path in (folder / "previous_001").glob("step_*")} == {
        *(f"step_{step:08d}" for step in (4, 8, 12))
    }


@campaign
def test_verifying_sizes_finds_truncation(one: SharedRun, tmp_path: Path) -> None:
    for number, original in enumerate(files_of(step_folder(one.folder, 12))):
        folder = one.copy_to(tmp_path / str(number))
        path = step_folder(folder, 12) / original.relative_to(step_folder(one.folder, 12))
        os.truncate(path, path.stat().st_size - 1)
        step, said = load_newest(config_of(one, folder, "checkpoint.verify=sizes"))
        assert (step, str(path) in said) == (8, True), path


@pytest.mark.slow
@pytest.mark.parametrize("way", ["copied", "exchanged", "emptied"])
def test_checkpoint_that_is_not_what_its_name_says_is_damaged(way: str, one: SharedRun, tmp_path: Path) -> None:
    """A copy of an old one under a new name is not the newest; of two exchanged ones, neither is used."""
    folder = one.copy_to(tmp_path / "run")
    wrong, resumed = {"copied": (16, 12), "exchanged": (12, 4), "emptied": (12, 8)}[way]
    if way == "copied":
        shutil.copytree(step_folder(folder, 8), step_folder(folder, 16))
    elif way == "exchanged":
        step_folder(folder, 12).rename(folder / "aside")
        step_folder(folder, 8).rename(step_folder(folder, 12))
        (folder / "aside").rename(step_folder(folder, 8))
    else:
        shutil.rmtree(step_folder(folder, 12))
        step_folder(folder, 12).mkdir()
    code, listed = show_checkpoints(folder)
    assert code == 1
    assert str(step_folder(folder, wrong)) in listed
    with pytest.raises((TrainingFailed, UserError), match=step_folder(folder, wrong).name):
        load_weights(step_folder(folder, wrong))
    step, said = load_newest(config_of(one, folder))
    assert step == resumed
    assert step_folder(folder, wrong).name in said


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["largest", "smallest"])
def test_file_that_storage_truncates_during_a_save_is_not_used(kind: str, tmp_path: Path) -> None:
    """The save is reported as failed, and what is under a checkpoint's name is complete."""
    plain = Fault(tmp_path / "plain-notes", below=tmp_path / "plain" / "checkpoints")
    finished = run(
        tmp_path / "plain", *with_("checkpoint.mode=sync", "checkpoint.keep_last=0"), variables=plain.variables
    )
    by_size = sorted(files_of(step_folder(finished.folder, 2)), key=lambda path: path.stat().st_size)
    name = by_size[-1 if kind == "largest" else 0].name
    published = numbers_of(plain.files(), "os.rename")[0]
    opened = [number for number, line in enumerate(plain.files()[:published]) if line.endswith(f"/{name}")]
    # A file that is read back has been written when it is opened again; three operations later any other one has.
    place = opened[1] if len(opened) > 1 else opened[0] + 3
    saved = tmp_path / "run" / "checkpoints"
    cut = f"find {saved} -name {name} -exec truncate -s -1 {{}} +"
    fault = Fault(tmp_path / "notes", {f"file {place}": cut}, below=saved)
    ran = run(tmp_path / "run", *with_("checkpoint.mode=sync", "checkpoint.keep_last=0"), variables=fault.variables)
    assert name in ran.err
    assert "step_00000002" in ran.err
    assert 2 not in ran.steps_saved
    assert ran.steps_saved[-1] == STEPS
    assert_only_whole(ran.checkpoints)


# ---------------------------------------------------------------------------------------------------------------
# Full, read-only, hanging storage


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk with room for some ten checkpoints of the MLP."""
    with small_disk(tmp_path / "disk", "4m") as folder:
        yield folder


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "mode"), [(1, "async"), *in_campaign((1, "sync"), (2, "async"), (2, "sync"))])
def test_disk_is_full_for_a_while(ranks: int, mode: str, disk: Path, tmp_path: Path) -> None:
    """It costs that save and nothing else, and is tried again as soon as there is room."""
    own = [f"checkpoint.dir={disk}/saved", "checkpoint.keep_last=0", "checkpoint.every=4", f"checkpoint.mode={mode}"]
    saved_before = f"until [ -d {disk}/saved/step_00000004 ]; do sleep 0.05; done"
    fault = Fault(tmp_path / "notes", {"step 7": f"{saved_before}; {fill(disk)}"})
    ran = start(tmp_path / "run", *with_(*own, "train.steps=1000000", ranks=ranks), variables=fault.variables)
    wait_until(lambda: "checkpoint not saved" in ran.err or not ran.is_running, "a save that fails")
    (disk / "fill").unlink()
    wait_until(lambda: len(list((disk / "saved").glob("step_*"))) > 1 or not ran.is_running, "a save that succeeds")
    ran.signal(signal.SIGTERM)
    assert ran.wait().codes == [75] * ranks, ran.err
    assert ran.err_of(0).count("checkpoint not saved") == 1
    assert "step_00000008" in ran.err_of(0)
    assert ran.train("step") == list(range(1, ran.status["step"] + 1))
    assert_only_whole(disk / "saved")


@pytest.mark.slow
def test_disk_of_the_run_folder_is_full_for_a_while(disk: Path, tmp_path: Path) -> None:
    """It also has metrics and status: what could not be written then is written later."""
    fault = Fault(tmp_path / "notes", {"step 3": fill(disk), "step 60": f"rm {disk}/fill"})
    ran = run(disk / "run", *with_("train.steps=64"), variables=fault.variables)
    assert ran.train("step") == list(range(1, 65))
    assert ran.status["state"] == "finished"
    assert ran.steps_saved[-1] == 64
    assert_only_whole(ran.checkpoints)


@pytest.mark.slow
def test_disk_is_full_when_a_run_resumes(one: SharedRun, tmp_path: Path) -> None:
    """One message names the folder; no partial file is left, and existing files are unchanged."""
    with small_disk(tmp_path / "disk", "8m") as disk:
        folder = one.copy_to(disk / "run", up_to=8)
        subprocess.run(fill(disk), shell=True, check=True, capture_output=True)
        before = stamps(folder)
        refused = run(folder, *one.overrides, code=2)
        assert f"run.dir={folder}: " in refused.err
        assert "Traceback" not in refused.err
        assert stamps(folder) == before


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "mode"), [(1, "sync"), *in_campaign((2, "async"), (1, "async"), (2, "sync"))])
def test_checkpoint_folder_becomes_read_only(ranks: int, mode: str, disk: Path, tmp_path: Path) -> None:
    """Permanently: the run fails as `checkpoint.max_failures` says, and earlier checkpoints are readable."""
    own = [f"checkpoint.dir={disk}/saved", f"checkpoint.mode={mode}"]
    # Mounted once more on top: the disk itself is busy as long as a file is open for writing.
    read_only = f"mount --bind {disk} {disk} && mount -o remount,bind,ro {disk}"
    fault = Fault(tmp_path / "notes", {"step 5": read_only})
    limits = ["train.steps=1000000", "checkpoint.max_failures=2"]
    failed = run(tmp_path / "run", *with_(*own, *limits, ranks=ranks), code=1, variables=fault.variables)
    assert failed.err_of(0).count("checkpoint not saved") == 1
    assert failed.err_of(0).count("error: ") == 1
    assert f"{disk}/saved" in failed.err_of(0)
    assert "Traceback" not in failed.err
    assert (failed.status["state"], failed.status["exit_code"]) == ("failed", 1)
    code, listed = show_checkpoints(disk / "saved", "--verify", "--json")
    assert code == 0
    saved = {entry["step"]: entry["state"] for entry in json.loads(listed)}
    assert saved in ({2: "verified"}, {2: "verified", 4: "verified"})
    # A save in the background may have been between two files: what it wrote can be removed only from now on.
    subprocess.run(["umount", disk], check=True)
    again = run(tmp_path / "run", *with_(*own, ranks=ranks))
    assert resumed_steps(again) == [None, max(saved)]
    assert_only_whole(disk / "saved")


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), *in_campaign((0, 2), (1, 2))])
def test_training_continues_while_storage_hangs(rank: int, ranks: int, tmp_path: Path) -> None:
    """Meanwhile a save that falls due is skipped. What is written at last is the state of the moment when it began."""
    folder = tmp_path / "run"
    gate = Gate(tmp_path / "gate", "file 0 of rank 1" if rank else "file 2")
    fault = Fault(tmp_path / "notes", below=folder / "checkpoints")
    own = ["train.steps=5", "checkpoint.keep_last=0"]
    in_background = ["checkpoint.mode=async", "checkpoint.when_busy=skip"]
    started = start(folder, *with_(*own, *in_background, ranks=ranks), variables=fault.variables | gate.variables)
    wait_until(lambda: last_step(started) == 5 or not started.is_running, "training to its end")
    assert started.steps_saved == []
    gate.open()
    assert started.wait().codes == [0] * ranks, started.err
    assert started.steps_saved == [2, 5]
    plain = run(tmp_path / "plain", *with_(*own, "checkpoint.mode=sync", ranks=ranks))
    assert_same_weights(step_folder(folder, 2), step_folder(plain.folder, 2))
    branch = run(tmp_path / "branch", *with_(*own, f"checkpoint.resume={step_folder(folder, 2)}", ranks=ranks))
    assert branch.train("loss") == plain.train("loss")[2:], "the optimizer's state is that of step 2 too"


@pytest.mark.slow
def test_save_that_falls_due_waits_for_the_one_in_flight(tmp_path: Path) -> None:
    gate, fault = Gate(tmp_path / "gate", "file 2"), Fault(tmp_path / "notes", below=tmp_path / "run" / "checkpoints")
    own = with_("checkpoint.mode=async", "checkpoint.when_busy=wait", "checkpoint.keep_last=0")
    started = start(tmp_path / "run", *own, variables=fault.variables | gate.variables)
    wait_until(lambda: last_step(started) >= 2 * EVERY or not started.is_running, "the next save falls due")
    gate.open()
    assert started.wait().codes == [0], started.err
    assert started.steps_saved == [2, 4, 6, 8]


@campaign
@pytest.mark.parametrize(
    ("number", "rank", "settings"),
    [
        (2, 1, ["checkpoint.mode=async"]),
        (30, 0, ["checkpoint.mode=async"]),
        (2, 0, ["checkpoint.mode=sync"]),
        (2, 1, ["checkpoint.mode=async", "checkpoint.when_busy=skip"]),  # training goes on meanwhile
    ],
)
def test_storage_never_responds(number: int, rank: int, settings: list[str], tmp_path: Path) -> None:
    """All ranks end alike, the one that waits is named, and the run continues from the last good checkpoint."""
    place = f"file {number} of rank 1" if rank else f"file {number}"
    fault = Fault(tmp_path / "notes", {place: "hang"}, below=tmp_path / "run" / "checkpoints")
    own = with_("checkpoint.timeout_s=7", "train.steps=1000000", *settings, ranks=2)
    failed = run(tmp_path / "run", *own, code=1, variables=fault.variables)
    assert failed.codes == [1, 1]
    assert f"rank {rank}" in failed.status["reason"]
    assert "within checkpoint.timeout_s, 7 s" in failed.err
    assert "Traceback" not in failed.err
    saved = max(failed.steps_saved, default=None)
    again = run(tmp_path / "run", *with_(f"train.steps={(saved or 0) + 4}", ranks=2))
    assert resumed_steps(again) == [None, saved]


@campaign
def test_storage_may_hang_for_longer_than_ranks_wait_otherwise(tmp_path: Path) -> None:
    fault = Fault(tmp_path / "notes", {"file 2 of rank 1": "sleep 12"}, below=tmp_path / "run" / "checkpoints")
    ran = run(tmp_path / "run", *with_("run.timeout_s=5", ranks=2), variables=fault.variables)
    assert ran.steps_saved[-1] == STEPS
    assert "checkpoint not saved" not in ran.err


# ---------------------------------------------------------------------------------------------------------------
# One rank fails


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "rank", "mode"),
    [
        ("file 2", 1, "async"),
        *in_campaign(("file 2", 0, "async"), ("file 16", 0, "sync"), ("file 2", 1, "sync")),
        *in_campaign(("save 2", 0, "async"), ("save 2", 1, "sync")),
    ],
)
def test_one_rank_fails_to_save(place: str, rank: int, mode: str, tmp_path: Path) -> None:
    """All ranks learn it, nothing is published, training continues, and the next save succeeds."""
    name = f"{place} of rank 1" if rank else place
    fault = Fault(tmp_path / "notes", {name: "raise"}, below=tmp_path / "run" / "checkpoints")
    ran = run(tmp_path / "run", *with_(f"checkpoint.mode={mode}", ranks=2), variables=fault.variables)
    assert ran.err_of(0).count("checkpoint not saved") == 1
    assert f"rank {rank}" in ran.err_of(0)
    assert "on purpose" not in ran.err_of(1)
    assert 2 not in [line["step"] for line in ran.of_kind("checkpoint")]
    assert ran.steps_saved[-1] == STEPS
    assert_only_whole(ran.checkpoints)


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), *in_campaign((0, 2), (1, 2))])
def test_weights_that_are_not_finite_are_never_published(rank: int, ranks: int, tmp_path: Path) -> None:
    fault = Fault(tmp_path / "notes", {"step 3 of rank 1" if rank else "step 3": "poison"})
    failed = run(tmp_path / "run", *with_("train.steps=6", ranks=ranks), code=1, variables=fault.variables)
    assert failed.steps_saved == [2]
    assert ranks == 1 or f"rank {rank}" in failed.err_of(0)
    assert "table.weight" in failed.err_of(0)


# ---------------------------------------------------------------------------------------------------------------
# Exit with a save in flight


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "ranks", "code"),
    [
        ("SIGTERM", 2, 75),
        *in_campaign(("nothing", 1, 0), ("raise", 1, 1), ("SIGINT", 1, 75), ("nothing", 2, 0), ("raise", 2, 1)),
    ],
)
def test_exit_during_a_background_save(how: str, ranks: int, code: int, tmp_path: Path) -> None:
    """What is in flight is good, and is finished."""
    folder, gate = tmp_path / "run", Gate(tmp_path / "gate", "file 2")
    at = {} if how == "nothing" else {"step 3 of rank 1" if ranks > 1 else "step 3": how}
    fault = Fault(tmp_path / "notes", at, below=folder / "checkpoints")
    own = with_("train.steps=3" if how == "nothing" else "train.steps=1000000", "checkpoint.every=2", ranks=ranks)
    started = start(folder, *own, variables=fault.variables | gate.variables)
    wait_until(lambda: last_step(started) >= 3 or not started.is_running, "the step after which it ends")
    gate.open()
    started.wait(together=False)
    assert started.codes == [code] * ranks, started.err
    assert 2 in started.steps_saved
    assert (max(started.steps_saved) > 2) == (how != "raise")
    assert_only_whole(started.checkpoints)


# ---------------------------------------------------------------------------------------------------------------
# A model that has changed


def mlp_config(folder: Path, *overrides: str) -> Any:
    own = with_("model.name=tests.helpers.custom_recipes:mlp", *overrides, f"run.dir={folder}")
    return load_config("llama_small", [item for item in own if not item.startswith(("recipe=", "nproc="))])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of the MLP with checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    run(folder, *with_("model.name=tests.helpers.custom_recipes:mlp", "train.steps=4"))
    return folder


CHANGES = {
    "model.width=34": ["model.width", "table.weight", "257x30", "257x34"],
    "model.num_hidden=4": ["model.num_hidden", "hidden.3.0.weight", "37x30"],
    "model.num_hidden=2": ["model.num_hidden", "hidden.2.weight", "30x30"],
    "model.name=tests.helpers.custom_recipes:mlp_renamed": ["model.name", "inner.0.weight"],
    "optim.name=sgd": ["optim.name", "AdamW", "SGD"],
}


@pytest.mark.slow
def test_changed_model_is_rejected(saved: Path) -> None:
    """With the differences, of which a long list is cut; nothing is loaded, and nothing is written."""
    before = stamps(saved)
    for change, named in CHANGES.items():
        own = Trainer(mlp_config(saved, change, "train.steps=9"))
        fresh = {name: tensor.clone() for name, tensor in own.model.state_dict().items()}
        with pytest.raises(UserError) as refused:
            own.load_checkpoint()
        message = str(refused.value)
        assert [name for name in named if name not in message] == [], message
        assert len(message.splitlines()) <= 23
        assert all(torch.equal(tensor, fresh[name]) for name, tensor in own.model.state_dict().items())
        assert own.state.step == 0
        own.close()
    assert stamps(saved) == before


@pytest.mark.slow
def test_damaged_checkpoint_is_not_partly_loaded_into_a_running_trainer(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(step_folder(saved, 4), tmp_path / "saved")
    largest = max(files_of(tmp_path / "saved"), key=lambda path: path.stat().st_size)
    damage(largest, "flipped", random.Random(3))
    own = Trainer(mlp_config(tmp_path / "run"))
    next(iter(own.steps()))
    before = {name: tensor.clone() for name, tensor in own.model.state_dict().items()}
    with pytest.raises(TrainingFailed, match=largest.name):
        own.load_checkpoint(tmp_path / "saved")
    assert all(torch.equal(tensor, before[name]) for name, tensor in own.model.state_dict().items())
    assert own.state.step == 1
    own.close()


# ---------------------------------------------------------------------------------------------------------------
# Housekeeping


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        (["checkpoint.keep_last=2", "checkpoint.keep_every=6"], [6, 10, 12]),
        *in_campaign(
            (["checkpoint.keep_last=1"], [12]),
            (["checkpoint.keep_last=0"], [2, 4, 6, 8, 10, 12]),
            (["checkpoint.keep_last=1", "checkpoint.keep_every=4"], [4, 8, 12]),
        ),
    ],
)
@pytest.mark.parametrize("mode", ["async", *in_campaign("sync")])
def test_retention(mode: str, keep: list[str], kept: list[int], tmp_path: Path) -> None:
    own = Trainer(mlp_config(tmp_path / "run", *keep, f"checkpoint.mode={mode}", "train.steps=12"))
    assert own.fit() == 0
    own.close()
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == [
        f"step_{step:08d}" for step in kept
    ]


@pytest.mark.slow
def test_failed_pruning_does_not_fail_the_save(kills: Kills, tmp_path: Path) -> None:
    """The next save removes what is left."""
    _, plain = kills.undisturbed(Kind("sync"))
    published = numbers_of(plain.files(), "os.rename")
    pruned = next(number for number in published if "writing" not in plain.files()[number])
    fault = Fault(tmp_path / "notes", {f"file {pruned}": "raise"}, below=tmp_path / "run" / "checkpoints")
    ran = run(tmp_path / "run", *Kind("sync").settings, variables=fault.variables)
    assert [line["step"] for line in ran.of_kind("checkpoint")] == [2, 4, 6, 8]
    assert "on purpose" in ran.err
    assert ran.steps_saved == [6, 8]


def grow(folder: Path, saves: int) -> tuple[float, float, list[float]]:
    """Save repeatedly in the background. Returns in MiB the size of a staged copy, the memory before, and at each save.

    Training alone varies by 180 MiB, with gradients, so the memory before is the maximum of ten steps.
    """

    def resident_mib() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20

    large = ["model.width=1000", "model.num_hidden=20", "data.seq_len=4", "checkpoint.keep_last=1"]
    own = Trainer(mlp_config(folder, f"train.steps={saves + 15}", *large, "checkpoint.every=0"))
    sizes, before = [], 0.0
    for record in own.steps():
        if record.step > 15:
            own.save_checkpoint()
            sizes.append(resident_mib())
        elif record.step > 5:
            before = max(before, resident_mib())
    weights_and_moments = 3 * sum(parameter.nbytes for parameter in own.model.parameters())
    own.close()
    return weights_and_moments / 2**20, before, sizes


@campaign
def test_thirty_saves_need_the_memory_of_one(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "2g") as folder:
        ((staged, before, sizes),) = on_ranks(1, grow, folder / "run", 30)
    assert staged > 200
    # Medians: gradients come and go, and with them as much as half of a copy from one moment to the next. What the
    # allocator keeps besides has been up to 0.11 of a copy, so the bound lies halfway between one copy and two.
    assert statistics.median(sizes) - before < 1.5 * staged, (staged, before, sizes)
    assert statistics.median(sizes[20:]) - statistics.median(sizes[:10]) < 0.1 * staged, "it grows from save to save"
