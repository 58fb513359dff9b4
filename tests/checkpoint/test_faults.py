"""Checkpoints survive kills, damage, full or hanging storage, and failing ranks. See tests/helpers/faults.py.

`make test` runs a selection, and `python -m tests.campaign faults` everything. Random cases are seeded, and each
failure names its case, so that it can be repeated.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

import trainer.files
import trainer.lifecycle.folder
from tests.distributed.test_processes import processes_of
from tests.helpers.faults import Fault, StartedRun, start
from tests.helpers.forked import popen
from tests.helpers.gate import wait_until
from tests.helpers.ranks import run_command, run_python_module, run_ranks
from tests.helpers.tiny import tiny_config
from tests.trainer.test_exactness import assert_equal_tensors, load_tensors
from trainer import Trainer, load_config, load_weights
from trainer.checkpoint.manifest import TORCH_METADATA, find_damage, list_steps, read_manifest
from trainer.checkpoint.storage import open_storage
from trainer.errors import TrainingFailed, UserError
from trainer.model.parameters import local

EVERY, STEPS = 2, 8
RUN = [
    "recipe=llama_small",
    "model.name=tests.helpers.custom_recipes:mlp_faulty",
    "data.source=synthetic",
    "data.seq_len=16",
    "train.global_batch_size=4",
    "train.micro_batch_size=1",
    f"train.steps={STEPS}",
    "eval.every=0",
    "log.every=1",
    "log.sample_tokens=0",
    "run.threads=1",
    f"checkpoint.every={EVERY}",
    "checkpoint.keep_last=2",
    "run.timeout_s=100",
    "checkpoint.timeout_s=50",
]
"""A run of a fraction of a second, which saves at steps 2, 4, 6 and 8.

Where a rank dies and no launcher ends the others, gloo overlooks the closed connection once in some hundred times: then
these limits end the wait.
"""


def with_(*overrides: str, base: Iterable[str] = tuple(RUN)) -> list[str]:
    given = {override.partition("=")[0] for override in overrides}
    return [*(item for item in base if item.partition("=")[0] not in given), *overrides]


def check_each(cases: Iterable[Any], check: Callable[[Any], str]) -> None:
    """Assert that `check` finds no error in any case, two at a time; the message lists all cases that fail."""
    with ThreadPoolExecutor(2) as threads:
        found = [wrong for wrong in threads.map(check, cases) if wrong]
    assert not found, f"{len(found)} cases:\n" + "\n".join(found)


def slow(*cases: Any) -> list[Any]:
    """Return cases of a test that only the whole campaign runs."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.campaign) for case in cases]


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (folder / "checkpoints").glob("step_????????"))


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """Return the complete lines of metrics.jsonl: a killed run may have left a partial one."""
    found = []
    path = folder / "metrics.jsonl"
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def of(kind: str, folder: Path, field: str) -> list[Any]:
    return [line[field] for line in lines_of(folder) if line["kind"] == kind]


def last_step(folder: Path) -> int:
    return max(of("train", folder, "step"), default=0)


def contents(folder: Path) -> dict[str, bytes]:
    """Return all files below a folder that do not differ from run to run."""
    varying = ("manifest.json", "config.yaml", ".metadata")  # a time, run.dir, what a pickle thinks of sameness
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in varying]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


# ---------------------------------------------------------------------------------------------------------------
# kill -9


@dataclass(frozen=True)
class Kind:
    """A kind of run to be killed."""

    mode: str = "async"
    ranks: int = 1
    setup: str = "fresh"
    """fresh; resumed: from step 4, with checkpoints of 2 and 4; damaged: so, but that of 4 has one wrong bit; anew:
    from nothing, with the checkpoints of another attempt there; repeating: publishes every step twice."""

    @property
    def arguments(self) -> list[str]:
        name = "mlp_repeating" if self.setup == "repeating" else "mlp_faulty"
        resume = ["checkpoint.resume=none"] if self.setup == "anew" else []
        return with_(f"model.name=tests.helpers.custom_recipes:{name}", f"checkpoint.mode={self.mode}", *resume)


@dataclass(frozen=True)
class Kill:
    """A kill at an event of a phase, of one rank or of all."""

    kind: Kind
    whom: str
    rank: int
    phase: str
    number: int
    what: str

    def __str__(self) -> str:
        kind = self.kind
        return (
            f"{kind.setup} {kind.mode} on {kind.ranks}: {self.whom} of rank {self.rank} at {self.phase} {self.number} "
            f"({self.what})"
        )


class KillCampaign:
    """Runs without a fault, to draw points from and to compare with; then the kills."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.num_runs = 0
        self._plain: dict[Kind, StartedRun] = {}
        self._before = self._make_resumable()

    def _make_resumable(self) -> dict[int, Path]:
        """Return, by number of ranks, the folder of a run that was killed at step 5."""
        found = {}
        for ranks in (1, 2):
            found[ranks] = self.folder / f"killed-{ranks}"
            fault = Fault(kill="all", at_step=5)
            assert start(found[ranks], *with_("checkpoint.mode=sync"), ranks=ranks, fault=fault).wait() == [-9] * ranks
            assert steps_in(found[ranks]) == [2, 4]
        return found

    def set_up(self, kind: Kind) -> Path:
        self.num_runs += 1
        folder = self.folder / f"{self.num_runs:04d}"
        if kind.setup in ("fresh", "repeating"):
            return folder
        shutil.copytree(self._before[kind.ranks], folder)
        if kind.setup == "damaged":
            flip(folder / "checkpoints" / "step_00000004" / "__0_0.distcp", 70_000)
        return folder

    def plain(self, kind: Kind) -> StartedRun:
        """Return the run of this kind that nothing happens to."""
        if kind not in self._plain:
            started = start(self.set_up(kind), *kind.arguments, ranks=kind.ranks, fault=Fault())
            assert started.wait() == [0] * kind.ranks, started.stderr
            self._plain[kind] = started
        return self._plain[kind]

    def draw(self, kind: Kind, phases: Iterable[str], count: int, seed: int) -> list[Kill]:
        """Return `count` different kills, spread over phases, and within each over the kinds of what happens there."""
        draw = random.Random(f"{kind} {seed}")
        kills: dict[Kill, None] = {}
        for phase in cycle(phases):
            if len(kills) == count:
                return list(kills)
            rank = draw.randrange(kind.ranks) if phase not in ("publish", "prune") else 0
            events = [e.partition(" ")[2] for e in self.plain(kind).events_of(rank) if e.startswith(f"{phase} ")]
            word = draw.choice(sorted({event.split()[0] for event in events}))
            number = draw.choice([n for n, event in enumerate(events) if event.split()[0] == word])
            whom = draw.choice(["one", "all"]) if kind.ranks > 1 else "all"
            kills[Kill(kind, whom, rank, phase, number, events[number])] = None
        raise AssertionError("no phases")

    def check(self, kill: Kill) -> str:
        """Kill a run, start it again, and return what is not as it should be."""
        kind, folder = kill.kind, self.set_up(kill.kind)
        fault = Fault(kill=kill.whom, rank=kill.rank, phase=kill.phase, number=kill.number)
        killed = start(folder, *kind.arguments, ranks=kind.ranks, fault=fault)
        codes = killed.wait()
        wrong = []
        if codes[kill.rank] != -9:
            wrong.append(f"was not killed: {codes} {killed.stderr[-500:]}")
        if None in codes:
            wrong.append(f"a rank is still there: {codes}")
        wrong += self.restart(kind, folder)
        if not wrong:
            shutil.rmtree(folder, ignore_errors=True)
        return f"{folder}: {kill}: {wrong}" if wrong else ""

    def restart(self, kind: Kind, folder: Path) -> list[str]:
        """Restart a killed run and return all errors."""
        published, trained, starts = steps_in(folder), last_step(folder), len(of("start", folder, "world_size"))
        again = start(folder, *kind.arguments, ranks=kind.ranks)
        codes = again.wait()
        if codes != [0] * kind.ranks:
            return [f"started again it ended with {codes}: {again.stderr[-2000:]}"]
        plain = self.plain(kind).folder
        wrong = []
        # Killed after its last save: then there is nothing to start.
        is_through = len(of("start", folder, "world_size")) == starts
        resumed = STEPS if is_through else of("start", folder, "resumed_step")[-1]
        if kind.setup != "anew":
            good = [step for step in published if not (kind.setup == "damaged" and step == 4)]
            if resumed != max(good, default=None):
                wrong.append(f"went on from {resumed}, published were {published}")
            bound = EVERY if kind.mode == "sync" else 2 * EVERY  # at most the save in flight is lost with what follows
            if kind.setup != "damaged" and trained - (resumed or 0) > bound:
                wrong.append(f"lost {trained - (resumed or 0)} steps")
        if of("train", folder, "step") != list(range(1, STEPS + 1)):
            wrong.append(f"metrics.jsonl has the steps {of('train', folder, 'step')}")
        elif of("train", folder, "loss") != of("train", plain, "loss"):
            wrong.append("the losses differ from those of the undisturbed run")
        final = f"checkpoints/step_{STEPS:08d}"
        if contents(folder / final) != contents(plain / final):
            wrong.append("the last checkpoint differs from that of the undisturbed run")
        return wrong if is_through else wrong + leftovers(folder)


def leftovers(folder: Path) -> list[str]:
    """Return unexpected files in the folder of a finished run."""
    known = re.compile(
        r"config\.yaml|console\.log|metrics(_superseded)?\.jsonl|status\.json|checkpoints|previous_\d{3}"
    )
    wrong = [path.name for path in folder.iterdir() if not known.fullmatch(path.name)]
    known = re.compile(r"(damaged-)?step_\d{8}")
    wrong += [path.name for path in (folder / "checkpoints").iterdir() if not known.fullmatch(path.name)]
    return [f"left behind: {wrong}"] if wrong else []


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8 % len(data)] ^= 1 << bit % 8
    path.write_bytes(data)


SAVING, STARTING = ("collect", "write", "publish", "prune"), ("load", "start")


@pytest.fixture(scope="module")
def kills(tmp_path_factory: pytest.TempPathFactory) -> KillCampaign:
    return KillCampaign(tmp_path_factory.mktemp("kills"))


@pytest.mark.slow
def test_killed_run_continues(kills: KillCampaign) -> None:
    points = kills.draw(Kind("async"), ("collect", "publish"), 2, seed=1)
    points += kills.draw(Kind("async", setup="resumed"), STARTING, 1, seed=1)
    points += kills.draw(Kind("async", ranks=2), ("write", "publish"), 1, seed=1)
    check_each(points, kills.check)


SHARES = [
    (Kind("sync"), SAVING, 44),
    (Kind("async"), SAVING, 44),
    (Kind("async", setup="resumed"), STARTING, 20),
    (Kind("sync", setup="damaged"), ("load",), 12),
    (Kind("async", setup="anew"), ("start",), 10),
    (Kind("sync", setup="repeating"), ("publish",), 16),
    (Kind("sync", ranks=2), SAVING, 20),
    (Kind("async", ranks=2), SAVING, 20),
    (Kind("async", ranks=2, setup="resumed"), STARTING, 14),
]


@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_killed_at_two_hundred_points(kills: KillCampaign) -> None:
    points = [kill for kind, phases, count in SHARES for kill in kills.draw(kind, phases, count, seed=2)]
    assert len(set(points)) == 200
    check_each(points, kills.check)


@pytest.mark.campaign
def test_killed_at_random_moments_from_outside(kills: KillCampaign) -> None:
    """Not at an event that the run counts, but at any time from its first import to its end."""
    draw = random.Random(3)
    cases = [(Kind(mode, ranks), draw.uniform(0.1, 1.2)) for mode in ("async", "sync") for ranks in (1, 1, 1, 2) * 3]

    def check(case: tuple[Kind, float]) -> str:
        kind, pause_s = case
        folder = kills.set_up(kind)
        # No launcher ends the other rank here: before they are connected it waits for its whole timeout.
        started = start(folder, *with_("run.timeout_s=30", base=kind.arguments), ranks=kind.ranks)
        time.sleep(pause_s)
        started.processes[draw.randrange(kind.ranks)].kill()
        if None in started.wait():
            return f"{case}: a rank is still there"
        wrong = kills.restart(kind, folder)
        return f"{folder}: {case}: {wrong}" if wrong else ""

    check_each(cases, check)


@pytest.mark.campaign
@pytest.mark.parametrize("whom", ["one", "all"])
@pytest.mark.parametrize(("phase", "number"), [("write", 2000), ("publish", 12)])
def test_killed_under_the_launcher(phase: str, number: int, whom: str, tmp_path: Path) -> None:
    """With workers of `nproc=N`: none is left, and the same command continues."""
    plain = run_command(tmp_path / "plain", *RUN, "nproc=2")
    assert plain.exit_code == 0, plain.stderr
    log = tmp_path / "log"
    log.mkdir()
    fault = Fault(kill=whom, phase=phase, number=number, log=str(log))
    started = time.monotonic()
    with_fault = ["env", *(f"{name}={value}" for name, value in fault.variables().items()), sys.executable]
    killed = run_command(tmp_path / "run", *RUN, "nproc=2", launcher=with_fault)
    assert killed.exit_code == 1, killed.stderr
    assert time.monotonic() - started < 60
    assert processes_of(killed.folder) == []
    published = steps_in(killed.folder)
    again = run_command(tmp_path / "run", *RUN, "nproc=2")
    assert again.exit_code == 0, again.stderr
    assert of("start", again.folder, "resumed_step") == [None, max(published, default=None)]
    assert again.train("loss") == plain.train("loss")


# ---------------------------------------------------------------------------------------------------------------
# Damage

NEWEST, BEFORE = "step_00000006", "step_00000004"
FILES = [  # that are needed
    "manifest.json",
    "state.json",
    "layout.json",
    "config.yaml",
    "__0_0.distcp",
    "__0_0.blocks.json",
    "ranks/00000.safetensors",
]
WAYS = ["flipped", "truncated", "deleted", "zeroed"]


def damage(path: Path, way: str, draw: random.Random) -> str:
    """Damage the checkpoint in a way that always changes something; return a description."""
    data = path.read_bytes()
    place = draw.randrange(len(data))
    if way == "flipped":
        place = draw.randrange(len(data) * 8)
        flip(path, place)
    elif way == "truncated":
        path.write_bytes(data[:place])
    elif way == "deleted":
        path.unlink()
    else:  # a block that was never written
        start = next(at for at in range(place // 512 * 512, -1, -512) if any(data[at : at + 512]))
        path.write_bytes(data[:start] + bytes(len(data[start : start + 512])) + data[start + 512 :])
    return f"{path.name} {way} at {place} of {len(data)}"


def mlp_config(folder: Path, *overrides: str) -> Any:
    base = with_("model.name=tests.helpers.custom_recipes:mlp", "train.steps=6", "checkpoint.keep_last=0")
    run = with_(*overrides, base=base)
    return load_config("llama_small", [*(item for item in run if not item.startswith("recipe=")), f"run.dir={folder}"])


def load_newest(folder: Path, *overrides: str) -> tuple[int | None, str]:
    """Return the step that a new Trainer resumes from, and its stderr."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        trainer = Trainer(mlp_config(folder, *overrides))
        try:
            step = trainer.load_checkpoint()
        finally:
            trainer.close()
    return step, said.getvalue()


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on one rank with checkpoints of steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("three") / "run"
    started = start(
        folder, *with_("model.name=tests.helpers.custom_recipes:mlp", "train.steps=6", "checkpoint.keep_last=0")
    )
    assert started.wait() == [0], started.stderr
    assert steps_in(folder) == [2, 4, 6]
    return folder


@pytest.fixture(scope="module")
def three_of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of two ranks."""
    folder = tmp_path_factory.mktemp("three") / "run"
    run = with_("model.name=tests.helpers.custom_recipes:mlp", "train.steps=6", "checkpoint.keep_last=0")
    assert start(folder, *run, ranks=2).wait() == [0, 0]
    return folder


def damage_and_load(source: Path, folder: Path, count: int, seed: int, of_rank: int = 0) -> list[str]:
    """Damage the newest checkpoint `count` times, load after each, and return all errors.

    On several ranks all do the same; the first does the damage, and reports it in a file.
    """
    import torch.distributed as dist

    from trainer.distributed.environment import find_environment

    env = find_environment()
    if env.is_distributed and not dist.is_initialized():
        dist.init_process_group("gloo")
    draw, wrong = random.Random(seed), []
    files = FILES if env.world_size == 1 else [*FILES, "__1_0.distcp", "__1_0.blocks.json", "ranks/00001.safetensors"]
    for number in range(count):
        run = folder / f"{number:03d}"
        name, way = files[number % len(files)], WAYS[number // len(files) % len(WAYS)]
        path = run / "checkpoints" / NEWEST / name
        if env.rank == 0:
            shutil.copytree(source, run)
            done = damage(path, way, draw)
        if env.is_distributed:
            dist.barrier()
        step, said = load_newest(run)
        if env.rank == 0:
            problems = []
            if step != 4:
                problems.append(f"resumed from {step}")
            if str(path) not in said:
                problems.append(f"{path} is not named: {said}")
            if sorted(p.name for p in (run / "checkpoints").iterdir()) != [
                f"damaged-{NEWEST}",
                "step_00000002",
                BEFORE,
            ]:
                problems.append("it was not quarantined")
            wrong += [f"{done}: {problem}" for problem in problems]
            shutil.rmtree(run)
        elif step != 4:
            wrong.append(f"rank {env.rank}: {number}: resumed from {step}")
    return wrong


@pytest.mark.slow
def test_damage_is_found_and_the_previous_checkpoint_is_used(three: Path, tmp_path: Path) -> None:
    assert damage_and_load(three, tmp_path, 4 * len(FILES), seed=1) == []


@pytest.mark.campaign
def test_damage_is_found_on_two_ranks(three_of_two: Path, tmp_path: Path) -> None:
    assert run_ranks(2, damage_and_load, three_of_two, tmp_path, 4, 2) == [[], []]


@pytest.mark.campaign
def test_two_hundred_random_damages(three: Path, three_of_two: Path, tmp_path: Path) -> None:
    (tmp_path / "two").mkdir()
    assert damage_and_load(three, tmp_path, 160, seed=3) == []
    assert run_ranks(2, damage_and_load, three_of_two, tmp_path / "two", 44, 4) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, *slow(1)])
def test_damage_through_the_command_line(ranks: int, three: Path, three_of_two: Path, tmp_path: Path) -> None:
    """The previous checkpoint is used, and the run ends as the undisturbed one did."""
    source, run = (three if ranks == 1 else three_of_two), tmp_path / "run"
    shutil.copytree(source, run)
    path = run / "checkpoints" / NEWEST / f"__{ranks - 1}_0.distcp"
    flip(path, 123_456)
    arguments = with_("model.name=tests.helpers.custom_recipes:mlp", "train.steps=6", "checkpoint.keep_last=0")
    again = start(run, *arguments, ranks=ranks)
    assert again.wait() == [0] * ranks, again.stderr
    assert f"checkpoint {NEWEST} is damaged and was quarantined" in again.stderr_of(0)
    assert f"{path}: the checksum of bytes" in again.stderr_of(0)
    assert of("start", run, "resumed_step") == [None, 4]
    assert of("train", run, "loss") == of("train", source, "loss")
    assert contents(run / "checkpoints" / NEWEST) == contents(source / "checkpoints" / NEWEST)


@pytest.mark.slow
def test_all_checkpoints_are_damaged(three: Path, tmp_path: Path) -> None:
    run, draw = tmp_path / "run", random.Random(5)
    shutil.copytree(three, run)
    paths = [
        run / "checkpoints" / f"step_0000000{step}" / name
        for step, name in ((2, "layout.json"), (4, "__0_0.distcp"), (6, "manifest.json"))
    ]
    for path in paths:
        damage(path, "flipped", draw)
    before = stamps(run)
    del before["status.json"]  # says how it ended
    arguments = with_("model.name=tests.helpers.custom_recipes:mlp", "train.steps=6", "checkpoint.keep_last=0")
    for ranks in (1, 2):
        failed = start(run, *arguments, ranks=ranks)
        assert failed.wait() == [1] * ranks
        for path in paths:
            assert str(path) in failed.stderr_of(0)
        assert "checkpoint.resume=none" in failed.stderr_of(0)
        assert "Traceback" not in failed.stderr
        assert before.items() <= stamps(run).items()
        assert stamps(run).keys() - before.keys() == {"status.json"}
    anew = start(run, *arguments, "checkpoint.resume=none")
    assert anew.wait() == [0], anew.stderr
    assert steps_in(run) == [2, 4, 6]
    assert sorted(path.name for path in (run / "previous_001").iterdir())[-3:] == [
        "step_00000002",
        "step_00000004",
        "step_00000006",
    ]


def stamps(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return time and content of every file."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_verifying_sizes_finds_truncation(name: str, three: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(three, run)
    path = run / "checkpoints" / NEWEST / name
    path.write_bytes(path.read_bytes()[:-1])
    step, said = load_newest(run, "checkpoint.verify=sizes")
    assert step == 4
    assert str(path) in said


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FILES if name != "__0_0.distcp"])
def test_damaged_small_file_is_found_when_only_sizes_are_verified(name: str, three: Path, tmp_path: Path) -> None:
    """Small files are verified when they are read, and handled as any other damage."""
    run = tmp_path / "run"
    shutil.copytree(three, run)
    path = run / "checkpoints" / NEWEST / name
    flip(path, 8 * (path.stat().st_size // 2))
    step, said = load_newest(run, "checkpoint.verify=sizes")
    assert step == 4
    assert str(path) in said


class CutShort:
    """A file of which the storage keeps a half, and says that all is well."""

    def __init__(self, sink: Any) -> None:
        self._sink = sink

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._sink.write(view[: len(view) // 2])
        return len(view)

    def close(self) -> None:
        self._sink.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["local", "remote"])
def test_checkpoint_that_storage_truncated_is_not_published(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever file it is: all are checked once more, and earlier checkpoints stay."""
    where = [] if kind == "local" else [f"checkpoint.dir=memory://cut-{tmp_path.name}"]
    own = Trainer(tiny_config(tmp_path, *where))
    steps = own.steps()
    next(steps)
    own.save_checkpoint(wait=True)
    place = own.checkpoints.storage
    create = type(place).create
    for name in [*FILES, TORCH_METADATA]:
        next(steps)

        def cut_short(self: Any, file: str, name: str = name) -> Any:
            sink = create(self, file)
            return CutShort(sink) if file == name else sink

        with monkeypatch.context() as patch:
            patch.setattr(type(place), "create", cut_short)
            with pytest.raises(TrainingFailed, match=re.escape(f"/{name}: ")):
                own.save_checkpoint(wait=True)
        assert list_steps(place) == [1], name
    assert find_damage(place / "step_00000001", read_manifest(place / "step_00000001"), "full") == []
    own.save_checkpoint(wait=True)
    own.close()
    assert list_steps(place) == [1, 2 + len(FILES)]


@pytest.mark.slow
def test_bad_index_that_only_torch_reads_is_no_damage(three: Path, tmp_path: Path) -> None:
    """`--verify` reports it."""
    run = tmp_path / "run"
    shutil.copytree(three, run)
    index = run / "checkpoints" / NEWEST / ".metadata"
    for harm in (lambda: flip(index, 100), lambda: index.write_bytes(b""), index.unlink):
        harm()
        step, said = load_newest(run)
        assert (step, said) == (6, "")
        shown = run_python_module("trainer.checkpoints", run, "--verify")
        assert shown.exit_code == 0
        assert f"{index}: " in shown.stdout


@pytest.mark.slow
@pytest.mark.parametrize("exchanged", [False, True])
def test_checkpoint_under_a_wrong_step_name_is_damaged(exchanged: bool, three: Path, tmp_path: Path) -> None:
    """A copy of an old checkpoint is not the newest, and of two swapped ones neither is used."""
    run = tmp_path / "run"
    shutil.copytree(three, run)
    saved = run / "checkpoints"
    if exchanged:
        (saved / NEWEST).rename(saved / "aside")
        (saved / BEFORE).rename(saved / NEWEST)
        (saved / "aside").rename(saved / BEFORE)
    else:
        shutil.copytree(saved / BEFORE, saved / "step_00000012")
    newest = NEWEST if exchanged else "step_00000012"
    shown = run_python_module("trainer.checkpoints", run)
    assert shown.exit_code == 1
    assert f"{saved / newest}: holds the checkpoint of step 4" in shown.stdout
    with pytest.raises(TrainingFailed, match="holds the checkpoint of step 4"):
        load_weights(saved / newest)
    step, said = load_newest(run)
    assert step == (2 if exchanged else 6)
    assert f"checkpoint {newest} is damaged and was quarantined" in said
    shutil.copytree(three / "checkpoints" / BEFORE, tmp_path / "mine")
    assert load_weights(tmp_path / "mine") is not None, "any other name says nothing"


@pytest.mark.slow
def test_empty_checkpoint_folder_is_damage(three: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(three, run)
    shutil.rmtree(run / "checkpoints" / NEWEST)
    (run / "checkpoints" / NEWEST).mkdir()
    step, said = load_newest(run)
    assert step == 4
    assert str(run / "checkpoints" / NEWEST) in said


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, *slow(2)])
def test_step_saved_twice_exists_at_all_times(ranks: int, tmp_path: Path) -> None:
    """Between the two renames of the second save, the first one is available."""
    run = tmp_path / "run"
    arguments = with_(
        "model.name=tests.helpers.custom_recipes:mlp_repeating", "checkpoint.every=4", "checkpoint.mode=sync"
    )
    plain = start(tmp_path / "plain", *arguments, ranks=ranks, fault=Fault())
    assert plain.wait() == [0] * ranks, plain.stderr
    events = [event for event in plain.events_of(0) if event.startswith("publish ")]
    renames = [number for number, event in enumerate(events) if " os.rename " in event]
    assert len(renames) == 6, "two steps, each published once plainly and once over the first"
    killed = start(run, *arguments, ranks=ranks, fault=Fault(kill="all", phase="publish", number=renames[2]))
    assert killed.wait() == [-9] * ranks
    assert steps_in(run) == []
    again = start(run, *arguments, ranks=ranks)
    assert again.wait() == [0] * ranks, again.stderr
    assert of("start", run, "resumed_step") == [None, 4]
    assert of("train", run, "loss") == of("train", plain.folder, "loss")
    assert leftovers(run) == []


# ---------------------------------------------------------------------------------------------------------------
# Full, read-only, hanging storage


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mount a disk of memory; skips the test where that is not permitted."""
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"mount is not permitted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk with room for some ten checkpoints of the MLP."""
    with small_disk(tmp_path / "disk", "4m") as folder:
        yield folder


def failures_of(started: StartedRun, ranks: int = 1) -> list[tuple[int, str]]:
    """Return step and error of the failed saves; all ranks must have been told the same."""
    told = [started.results_of(rank) for rank in range(ranks)]
    assert all(results == told[0] for results in told), told
    return [(step, error) for step, error in told[0] if error]


def assert_all_good(folder: Path) -> None:
    """Every checkpoint in the folder can be read to the last byte, and nothing else is there."""
    for path in folder.iterdir():
        if path.name == ".owner.json":
            continue  # it cannot be removed there; its process is dead, so it blocks no run
        assert re.fullmatch(r"step_\d{8}", path.name), path
        place = open_storage(path)
        assert find_damage(place, read_manifest(place), "full") == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "ranks", "mode"),
    [
        ("the writer", 2, "async"),
        *slow(("the check before", 1, "sync")),
        *slow(("the writer", 1, "async"), ("the writer", 1, "sync"), ("the check before", 2, "async")),
    ],
)
def test_disk_is_full_for_a_while(where: str, ranks: int, mode: str, disk: Path, tmp_path: Path) -> None:
    arguments = with_(f"checkpoint.dir={disk}/saved", "checkpoint.keep_last=0", "train.steps=22", "checkpoint.every=4")
    plain = start(tmp_path / "plain", *with_("train.steps=22"), ranks=ranks)
    fault = Fault(
        step_s=0.2,
        commands={"7": f"head -c 99999999 /dev/zero > {disk}/fill || true", "9": f"rm {disk}/fill"},
        no_space_check=where == "the writer",
    )
    run = start(tmp_path / "run", *arguments, f"checkpoint.mode={mode}", ranks=ranks, fault=fault)
    assert plain.wait() == [0] * ranks
    assert run.wait() == [0] * ranks, run.stderr
    ((step, error),) = failures_of(run, ranks)
    assert step == 8
    assert f"{disk}/saved/step_00000008: rank" in error
    assert ("No space left on device" if where == "the writer" else "0.0 MiB free, the checkpoint needs") in error
    assert run.stderr_of(0).count("checkpoint not saved, training continues") == 1
    assert error in run.stderr_of(0)
    found = sorted(int(path.name[5:]) for path in (disk / "saved").iterdir())
    assert found[0] == 4
    assert found[-1] == 22
    assert any(8 < step < 16 for step in found), "it is tried again as soon as there is room, not only at the end"
    assert_all_good(disk / "saved")
    assert of("train", run.folder, "loss") == of("train", plain.folder, "loss")


@pytest.mark.slow
def test_disk_of_the_run_folder_is_full_for_a_while(disk: Path, tmp_path: Path) -> None:
    """It also has metrics and status: more lines than fit into the rest of a disk page."""
    fault = Fault(
        step_s=0.1,
        commands={"3": f"head -c 99999999 /dev/zero > {disk}/fill || true", "33": f"rm {disk}/fill"},
        no_space_check=True,
    )
    run = start(disk / "run", *with_("train.steps=36"), fault=fault, logs_in=tmp_path)
    assert run.wait() == [0], run.stderr
    assert failures_of(run)[0][0] in (2, 4), "of step 2, if that one was still being written"
    assert steps_in(run.folder)[-1] == 36
    assert_all_good(run.folder / "checkpoints")
    assert of("train", run.folder, "step") == list(range(1, 37)), "what could not be written was written later"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", ".owner.json"])
def test_disk_is_full_when_a_run_resumes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One message names the path; no partial file is written, and existing files are unchanged."""
    run = tmp_path / "run"
    own = Trainer(tiny_config(run, "train.steps=2"))
    assert own.fit() == 0
    own.close()
    (run / "metrics.jsonl").chmod(0o600)  # stays as it is
    before = stamps(run)
    write_and_sync = trainer.files.write_and_sync

    def full(path: Path, text: str) -> None:
        if name in path.name:
            path.write_text(text[: len(text) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write_and_sync(path, text)

    for module in (trainer.files, trainer.lifecycle.folder):
        monkeypatch.setattr(module, "write_and_sync", full)
    again = Trainer(tiny_config(run, "train.steps=4"))
    with pytest.raises(UserError, match=f"run.dir={run}: cannot be used.*No space left on device"):
        again.fit()
    again.close()
    after = stamps(run)
    assert {**after, "config.yaml": None} == {**before, "config.yaml": None}


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "mode"), [(1, "sync"), *slow((2, "async"), (1, "async"), (2, "sync"))])
def test_checkpoint_folder_becomes_read_only(ranks: int, mode: str, disk: Path, tmp_path: Path) -> None:
    """Permanently: the run fails as `checkpoint.max_failures` says, and earlier checkpoints are readable."""
    arguments = with_(f"checkpoint.dir={disk}/saved", f"checkpoint.mode={mode}", "train.steps=40")
    fault = Fault(step_s=0.1, commands={"5": f"mount -o remount,ro {disk}"})
    run = start(tmp_path / "run", *arguments, "checkpoint.max_failures=2", ranks=ranks, fault=fault)
    assert run.wait() == [1] * ranks, run.stderr
    first, _ = failures_of(run, ranks)
    assert first[0] in (4, 6), "that of step 4 may still have been on its way"
    assert f"{disk}/saved" in first[1]
    assert "rank 0" in first[1]
    assert "Read-only file system" in first[1]
    assert "(failure 1 of 2 in a row)" in run.stderr_of(0)
    assert run.stderr_of(0).count("error: cannot save:") == 1
    assert "(failure 2 of 2 in a row)" in run.stderr_of(0)
    assert "Traceback" not in run.stderr
    assert_all_good(disk / "saved")
    subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
    again = start(tmp_path / "run", *with_("train.steps=8", base=arguments), ranks=ranks)
    assert again.wait() == [0] * ranks, again.stderr
    assert of("start", again.folder, "resumed_step") == [None, first[0] - 2]


@pytest.mark.campaign
def test_file_replaces_the_checkpoint_folder(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    fault = Fault(step_s=0.2, commands={"3": f"mv {saved} {saved}.away; touch {saved}"})
    arguments = with_(f"checkpoint.dir={saved}", "train.steps=12", "checkpoint.max_failures=2")
    run = start(tmp_path / "run", *arguments, fault=fault)
    assert run.wait() == [1], run.stderr
    away = f"{saved}.away"
    assert f"checkpoint.dir={saved}: was renamed to {away}" in run.stderr
    assert f"to continue: the same command with checkpoint.dir={away}" in run.stderr
    assert saved.read_bytes() == b""
    assert_all_good(Path(away))
    assert "Traceback" not in run.stderr


HANGS = [("write", 1), *slow(("begin", 0), ("write", 0), ("finish", 0), ("publish", 0))]


@pytest.mark.slow
@pytest.mark.parametrize(("place", "rank"), HANGS)
def test_training_continues_while_storage_hangs(place: str, rank: int, tmp_path: Path) -> None:
    hang(tmp_path, place, rank)


@pytest.mark.campaign
def test_storage_hangs_for_half_a_minute(tmp_path: Path) -> None:
    hang(tmp_path, "write", 1, at_least_s=30)


def hang(folder: Path, place: str, rank: int, at_least_s: float = 0.0) -> None:
    """Training continues to its last step; a save that falls due is skipped, and the hanging one finally succeeds."""
    answers = folder / "answers"
    fault = Fault(hang=place, hang_until=str(answers), rank=rank, first=0, last=0)
    run = start(folder / "run", *with_("checkpoint.when_busy=skip"), ranks=2, fault=fault)
    wait_until(lambda: last_step(run.folder) == STEPS, "training to its end")
    assert steps_in(run.folder) == []
    time.sleep(at_least_s)
    answers.touch()
    assert run.wait() == [0, 0], run.stderr
    assert failures_of(run, 2) == []
    assert steps_in(run.folder) == [2, STEPS]


@pytest.mark.campaign
@pytest.mark.parametrize(("place", "rank"), [("write", 1), ("publish", 0), ("begin", 0)])
def test_storage_hangs_for_longer_than_ranks_wait(place: str, rank: int, tmp_path: Path) -> None:
    """Storage may be slower than anything else that ranks wait for: `run.timeout_s` does not apply."""
    fault = Fault(hang=place, hang_s=12, rank=rank, first=1, last=1, step_s=0.1)
    arguments = with_("run.timeout_s=5", "train.steps=20", "checkpoint.every=4")
    run = start(tmp_path / "run", *arguments, ranks=2, fault=fault)
    assert run.wait(60) == [0, 0], run.stderr
    assert failures_of(run, 2) == []
    assert steps_in(run.folder)[-1] == 20


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "rank", "mode"),
    slow(("write", 1, "async"), ("publish", 0, "async"), ("begin", 0, "async"), ("write", 0, "sync")),
)
def test_storage_never_responds(place: str, rank: int, mode: str, tmp_path: Path) -> None:
    """All ranks end alike and report what each waits for; the run continues from the last good checkpoint."""
    fault = Fault(hang=place, hang_s=600, rank=rank, first=1, last=1, step_s=0.1)
    arguments = with_("checkpoint.timeout_s=7", "train.steps=200", "checkpoint.every=4", "checkpoint.when_busy=skip")
    arguments = with_(f"checkpoint.mode={mode}", base=arguments)
    run = start(tmp_path / "run", *arguments, ranks=2, fault=fault)
    assert run.wait() == [1, 1], run.stderr
    doing = {"write": "writing", "publish": "publishing", "begin": "creating"}[place]
    assert f"watchdog: rank {rank} made no progress in save of step" in run.stderr
    assert f"{doing} {run.folder}/checkpoints/step_00000008" in run.stderr
    assert "Traceback" not in run.stderr
    assert json.loads((run.folder / "status.json").read_text())["state"] == "failed"
    again = start(tmp_path / "run", *with_("train.steps=12"), ranks=2)
    assert again.wait() == [0, 0], again.stderr
    assert of("start", again.folder, "resumed_step") == [None, 4]
    assert leftovers(again.folder) == []


# ---------------------------------------------------------------------------------------------------------------
# One rank fails

STAGES = [("collect", 1), ("write", 1), ("publish", 0), ("collect", 0), ("stage", 0), ("begin", 0), ("write", 0)]
STAGES += [("write_files", 0), ("finish", 0), ("stage", 1), ("write_files", 1)]


@pytest.mark.slow
@pytest.mark.parametrize(("place", "rank"), [*STAGES[:1], *slow(*STAGES[1:])])
def test_one_rank_fails_to_save(place: str, rank: int, tmp_path: Path) -> None:
    one_rank_fails("async", place, rank, tmp_path)


@pytest.mark.campaign
@pytest.mark.parametrize(("place", "rank"), [stage for stage in STAGES if stage[0] != "stage"])
def test_one_rank_fails_to_save_while_training_waits(place: str, rank: int, tmp_path: Path) -> None:
    one_rank_fails("sync", place, rank, tmp_path)


def one_rank_fails(mode: str, place: str, rank: int, folder: Path) -> None:
    """It fails once: all ranks learn it, the run continues, and the save is retried."""
    per_save = 3 if place == "write_files" and rank == 1 else 4 if place == "write_files" else 1
    first = 2 if place == "write_files" else per_save
    fault = Fault(fail=place, rank=rank, first=first, last=first, step_s=0.2)
    run = start(folder / "run", *with_(f"checkpoint.mode={mode}", "train.steps=12"), ranks=2, fault=fault)
    assert run.wait() == [0, 0], run.stderr
    ((step, error),) = failures_of(run, 2)
    assert error.startswith(f"{run.folder}/checkpoints/step_{step:08d}: rank") or place == "collect", error
    assert f"rank {rank}" in error
    assert str(run.folder) in error
    assert f"{place} fails on purpose" in error
    assert run.stderr_of(0).count("checkpoint not saved, training continues") == 1
    assert error in run.stderr_of(0)
    assert run.stderr_of(1).count("on purpose") == 0
    assert step in (2, 4)
    assert steps_in(run.folder)[-1] == 12
    assert_all_good(run.folder / "checkpoints")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", *slow("sync")])
def test_too_many_failures_end_the_run(mode: str, tmp_path: Path) -> None:
    fault = Fault(fail="write", rank=1, first=1, last=99, step_s=0.1)
    arguments = with_(f"checkpoint.mode={mode}", "train.steps=100", "checkpoint.max_failures=2")
    run = start(tmp_path / "run", *arguments, ranks=2, fault=fault)
    assert run.wait() == [1, 1], run.stderr
    assert len(failures_of(run, 2)) == 2
    assert run.stderr.count("error: cannot save:") == 1
    assert "rank 1" in run.stderr_of(0)
    assert steps_in(run.folder) == [2]
    assert_all_good(run.folder / "checkpoints")
    status = json.loads((run.folder / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", 1)
    assert "write fails on purpose" in status["reason"]


@pytest.mark.slow
def test_failed_pruning_does_not_fail_the_save(tmp_path: Path) -> None:
    fault = Fault(fail="prune", first=0, last=0)
    run = start(tmp_path / "run", *RUN, fault=fault)
    assert run.wait() == [0], run.stderr
    assert failures_of(run) == []
    assert "cannot delete old checkpoints" in run.stderr
    assert steps_in(run.folder) == [6, 8], "the next one removes both"


# ---------------------------------------------------------------------------------------------------------------
# Exit with a save in flight

ENDS = {"normal": 0, "raise": 1, "SIGTERM": 75, "SIGINT": 75}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "how"),
    [
        *[(1, "normal"), (2, "SIGTERM")],
        *slow((2, "raise"), (1, "raise"), (1, "SIGTERM"), (1, "SIGINT"), (2, "normal"), (2, "SIGINT")),
    ],
)
def test_exit_during_a_background_save(how: str, ranks: int, tmp_path: Path) -> None:
    steps = 3 if how == "normal" else 1000
    happens = {} if how == "normal" else {"at_step": 3, "then": how}
    fault = Fault(write_s=0.0005, rank=ranks - 1, **happens)
    run = start(tmp_path / "run", *with_(f"train.steps={steps}"), ranks=ranks, fault=fault)
    codes = run.wait()
    assert codes == [ENDS[how]] * ranks, f"{codes} {run.stderr}"
    assert_all_good(run.folder / "checkpoints")
    assert 2 in steps_in(run.folder), "what was in flight was good, and was finished"
    if how != "raise":
        assert steps_in(run.folder)[-1] > 2
    assert run.stderr.count("Traceback") == (how == "raise"), run.stderr


@pytest.mark.campaign
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_launcher_is_stopped_during_a_background_save(number: signal.Signals, tmp_path: Path) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    log.mkdir()
    process = popen(
        [sys.executable, "-m", "trainer.run", *with_("train.steps=100000"), f"run.dir={folder}", "nproc=2"],
        stdout=subprocess.DEVNULL,
        env=os.environ | Fault(write_s=0.001, log=str(log)).variables(),
    )
    wait_until(lambda: last_step(folder) >= 2, "two steps")
    process.send_signal(number)
    _, stderr = process.communicate(timeout=240)
    assert process.returncode == 75, stderr
    assert processes_of(folder) == []
    assert_all_good(folder / "checkpoints")
    assert steps_in(folder)


# ---------------------------------------------------------------------------------------------------------------
# Two runs in one folder


@contextlib.contextmanager
def running(folder: Path) -> Iterator[StartedRun]:
    """A run that continues until it is killed."""
    run = start(folder, *with_("train.steps=100000"), fault=Fault(step_s=0.05))
    try:
        wait_until(lambda: bool(steps_in(folder)), "a checkpoint")
        yield run
    finally:
        run.processes[0].kill()
        run.wait()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, *slow(1)])
def test_folder_belongs_to_one_run(ranks: int, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with running(folder) as first:
        config = (folder / "config.yaml").read_bytes()
        second = start(folder, *with_("run.seed=1"), ranks=ranks)
        assert second.wait() == [2] * ranks, second.stderr
        assert f"process {first.processes[0].pid} on {socket.gethostname()}" in second.stderr_of(0)
        assert second.stderr.count("another run owns it") == 1
        assert (folder / "config.yaml").read_bytes() == config
        assert first.processes[0].is_alive()
    third = start(folder, *with_(f"train.steps={last_step(folder) + 1}"), ranks=ranks)
    assert third.wait() == [0] * ranks, third.stderr
    assert of("start", folder, "resumed_step")[-1]


def killed_elsewhere(folder: Path) -> dict[str, Any]:
    """Leave the folder of a killed run as if it had run on a different machine; return the content of the lock."""
    with running(folder):
        pass
    owner = json.loads((folder / ".owner.json").read_text()) | {"host": "elsewhere", "boot": "another"}
    (folder / ".owner.json").write_text(json.dumps(owner))
    return owner


@pytest.mark.slow
def test_lock_of_a_different_host_without_heartbeat(tmp_path: Path) -> None:
    killed_elsewhere(tmp_path / "run")
    os.utime(tmp_path / "run" / ".owner.json", (time.time() - 120,) * 2)
    last = last_step(tmp_path / "run")
    run = start(tmp_path / "run", *with_(f"train.steps={last + 1}"))
    assert run.wait() == [0], run.stderr


class Awake:
    """The module `time`, but for sleeping."""

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def sleep(self, seconds: float) -> None:
        raise AssertionError("it waits for the death of a run that is dead")


@pytest.mark.slow
@pytest.mark.parametrize("elsewhere", [False, *slow(True)])
def test_lock_of_a_dead_run_is_ignored(elsewhere: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    if elsewhere:
        killed_elsewhere(folder)
        os.utime(folder / ".owner.json", (time.time() - 120,) * 2)
    else:
        with running(folder):
            pass
    monkeypatch.setattr("trainer.lifecycle.folder.time", Awake())
    own = Trainer(mlp_config(folder, "model.name=tests.helpers.custom_recipes:mlp_faulty", "train.steps=100000"))
    assert own.load_checkpoint()
    own.close()


@pytest.mark.campaign
def test_lock_of_a_different_host_with_heartbeat(tmp_path: Path) -> None:
    owner = killed_elsewhere(tmp_path / "run")
    run = start(tmp_path / "run", *with_("train.steps=100000"))
    while run.processes[0].is_alive():
        os.utime(tmp_path / "run" / ".owner.json")
        run.processes[0].join(0.5)
    assert run.wait() == [2]
    assert f"process {owner['pid']} on elsewhere" in run.stderr


@pytest.mark.campaign
def test_lock_of_a_different_host_with_a_recent_heartbeat(tmp_path: Path) -> None:
    """The start waits until that host is known to be dead."""
    killed_elsewhere(tmp_path / "run")
    os.utime(tmp_path / "run" / ".owner.json")
    last = last_step(tmp_path / "run")
    since = time.monotonic()
    run = start(tmp_path / "run", *with_(f"train.steps={last + 1}"))
    assert run.wait(60) == [0], run.stderr
    assert 25 < time.monotonic() - since < 50


# ---------------------------------------------------------------------------------------------------------------
# What is saved, and at which cost


def save_in_background(folder: Path, meshes: list[tuple[str, ...]]) -> list[str]:
    """Save at step 3 asynchronously while three more are made, and synchronously; return what differs."""
    import torch.distributed as dist

    import trainer.checkpoint.storage as place_module

    dist.init_process_group("gloo") if "RANK" in os.environ else None
    plain_write, wrong = place_module._SyncedFile.write, []
    for number, mesh in enumerate(meshes):
        saved = {}
        for mode in ("sync", "async"):
            own = Trainer(mlp_config(folder / f"{mode}-{number}", f"checkpoint.mode={mode}", *mesh))

            def slow(self: Any, data: Any, own: Trainer = own, waits: bool = mode == "async") -> int:
                if waits:
                    wait_until(lambda: own.state.step > 5, "two more steps")
                return plain_write(self, data)

            place_module._SyncedFile.write = slow  # type: ignore[method-assign]
            updates_meanwhile = 0
            for record in own.steps():
                if record.step == 3:
                    saved[mode] = own.save_checkpoint()
                elif record.step > 3 and own.checkpoints.in_flight and not own.checkpoints.is_written:
                    updates_meanwhile += 1
            own.saver.finish()
            place_module._SyncedFile.write = plain_write  # type: ignore[method-assign]
            if mode == "async" and updates_meanwhile < 2:
                wrong.append(f"{mesh}: training did not go on: {updates_meanwhile}")
            own.close()
        if own.world.is_main:
            pairs = [load_tensors(saved[mode]) for mode in ("sync", "async")]
            assert_equal_tensors(*pairs)
            one, other = (contents(saved[mode]) for mode in ("sync", "async"))
            wrong += [f"{mesh}: {name}" for name in one if one[name] != other.get(name)]
            wrong += [f"{mesh}: {name}" for name in other if name not in one]
    return wrong


OPTIMIZERS: list[tuple[str, ...]] = [("optim.name=adamw",), ("optim.name=muon",)]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, *slow(1, 4)])
def test_background_save_has_the_state_of_its_start(ranks: int, tmp_path: Path) -> None:
    extra = ("mesh.replicate=2",) if ranks == 4 else ()
    meshes = [(*optimizer, *extra) for optimizer in OPTIMIZERS]
    for found in run_ranks(ranks, save_in_background, tmp_path, meshes):
        assert found == []


def grow(folder: Path, saves: int) -> tuple[float, float, list[float]]:
    """Save repeatedly in the background. Returns in MiB the size of a staged copy, the memory before, and at each save.

    Training alone varies by 180 MiB, with gradients, so the memory before is the maximum of ten steps.
    """

    def resident_mib() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20

    overrides = ["model.width=1000", "model.num_hidden=20", "data.seq_len=4", "checkpoint.keep_last=1"]
    own = Trainer(mlp_config(folder, f"train.steps={saves + 15}", *overrides, "checkpoint.every=0"))
    sizes, before = [], 0.0
    for record in own.steps():
        if record.step > 15:
            own.save_checkpoint()
            sizes.append(resident_mib())
        elif record.step > 5:
            before = max(before, resident_mib())
    own.saver.finish()
    state = [*own.model.state_dict().values(), *(t for s in own.optimizer.parts[0].state.values() for t in s.values())]
    staged = sum(local(tensor).nbytes for tensor in state) / 2**20
    own.close()
    return staged, before, sizes


@pytest.mark.campaign
def test_thirty_saves_need_the_memory_of_one(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "2g") as folder:
        ((staged, before, sizes),) = run_ranks(1, grow, folder / "run", 30)
    assert staged > 200
    assert len(sizes) == 30
    # Medians: gradients come and go, and with them as much as half of a copy from one moment to the next.  What the
    # allocator keeps besides has been up to 0.11 of a copy, so the bound lies halfway between one copy and two.
    assert median(sizes) - before < 1.5 * staged, (staged, before, sizes)
    assert median(sizes[20:]) - median(sizes[:10]) < 0.1 * staged, "it does not grow from save to save"


# ---------------------------------------------------------------------------------------------------------------
# A model that has changed

CHANGES = {
    "wider": (["model.width=34"], ["model.width", "table.weight: shape 257x30 in the checkpoint, 257x34 now"]),
    "deeper": (["model.num_hidden=4"], ["model.num_hidden", "hidden.3.0.weight: 37x30, not in the checkpoint"]),
    "shallower": (["model.num_hidden=2"], ["model.num_hidden", "hidden.2.weight: 30x30, only in the checkpoint"]),
    "renamed": (
        ["model.name=tests.helpers.custom_recipes:mlp_renamed"],
        ["model.name", "inner.0.weight: 30x30, not in the checkpoint"],
    ),
    "other optimizer": (["optim.name=sgd"], ["optim.name", "optimizer: AdamW in the checkpoint, SGD now, for "]),
}


def check_listed(message: str) -> None:
    """A message has six lines at most; the differences that have no room there are in a file."""
    _, *shown, _ = message.strip().splitlines()
    assert len(shown) <= 4
    *told, rest = shown
    more, _, file = rest.partition(" more differences: ")
    if file:
        listed = Path(file).read_text().partition("all differences:\n")[2].splitlines()
        Path(file).unlink()
        assert re.fullmatch(r"meshtrainer-\d+-\w{12}\.txt", Path(file).name), "one for each run's folder"
        assert len(listed) == len(told) + int(more.removeprefix("  and "))
        assert {line.strip()[:200] for line in told} <= {line[:200] for line in listed}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, *slow(2)])
def test_changed_model_is_rejected(ranks: int, three: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(three, run)
    before = stamps(run)
    arguments = with_("model.name=tests.helpers.custom_recipes:mlp", "train.steps=9", "checkpoint.keep_last=0")
    for name, (change, expected) in CHANGES.items():
        refused = start(run, *with_(*change, base=arguments), ranks=ranks)
        assert refused.wait() == [2] * ranks, f"{name}: {refused.stderr}"
        for line in expected:
            assert line in refused.stderr_of(0), f"{name}: {refused.stderr_of(0)}"
        check_listed(refused.stderr_of(0))
        assert "Traceback" not in refused.stderr
        assert stamps(run) == before, name


@pytest.mark.slow
def test_nothing_is_partly_loaded(three: Path, tmp_path: Path) -> None:
    own = Trainer(mlp_config(tmp_path, "model.num_hidden=4"))
    before = {name: local(p).detach().clone() for name, p in own.model.named_parameters()}
    with pytest.raises(UserError, match=r"hidden.3.0.weight: 37x30, not in the checkpoint"):
        own.load_checkpoint(three / "checkpoints" / NEWEST)
    assert all(torch.equal(local(p), before[name]) for name, p in own.model.named_parameters())
    assert own.state.step == 0
    assert not own.optimizer.parts[0].state
    own.close()


@pytest.mark.slow
def test_damaged_checkpoint_is_not_partly_loaded_into_a_running_trainer(three: Path, tmp_path: Path) -> None:
    shutil.copytree(three / "checkpoints" / BEFORE, tmp_path / "saved")
    flip(tmp_path / "saved" / "__0_0.distcp", 2_000_000)
    own = Trainer(mlp_config(tmp_path / "run"))
    next(iter(own.steps()))
    before = {name: local(p).detach().clone() for name, p in own.model.named_parameters()}
    with pytest.raises(TrainingFailed, match=r"__0_0.distcp: the checksum of bytes"):
        own.load_checkpoint(tmp_path / "saved")
    assert all(torch.equal(local(p), before[name]) for name, p in own.model.named_parameters())
    assert own.state.step == 1
    own.close()


# ---------------------------------------------------------------------------------------------------------------
# Housekeeping


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, *slow(0)])
def test_weights_that_are_not_finite_are_never_published(rank: int, tmp_path: Path) -> None:
    run = start(tmp_path / "run", *with_("train.steps=6"), ranks=2, fault=Fault(poison_step=3, rank=rank))
    assert run.wait() == [1, 1], run.stderr
    assert steps_in(run.folder) == [2]
    for _, error in failures_of(run, 2):
        assert f"rank {rank}" in error
        assert "table.weight has non-finite values" in error
    assert "the final save failed" in run.stderr_of(0)


class Forgetful(Trainer):
    """Has state that it did not register."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.average = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(2, 2))


def test_forgotten_state_is_an_error(tmp_path: Path) -> None:
    for act in (lambda own: own.fit(), lambda own: own.save_checkpoint()):
        own = Forgetful(mlp_config(tmp_path / "run"))
        with pytest.raises(UserError, match=r"Forgetful.average .*self.state.add\('average', self.average\)"):
            act(own)
        own.close()
        assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.slow
def test_leftovers_of_crashes_are_removed(three: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(three, run)
    saved = run / "checkpoints"
    for name in (".writing-step_00000008-12345678", ".removed-step_00000002-12345678", ".replaced-step_00000006"):
        shutil.copytree(saved / NEWEST, saved / name)
    for name in (".config.yaml.99", ".status.json.99", ".metrics.jsonl.99"):
        (run / name).write_text("half")
    again = start(run, *with_("model.name=tests.helpers.custom_recipes:mlp", "train.steps=7", "checkpoint.keep_last=0"))
    assert again.wait() == [0], again.stderr
    assert sorted(path.name for path in saved.iterdir()) == [
        "step_00000002",
        "step_00000004",
        "step_00000006",
        "step_00000007",
    ]
    assert leftovers(run) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        (["checkpoint.keep_last=1"], [12]),
        (["checkpoint.keep_last=3"], [8, 10, 12]),
        (["checkpoint.keep_last=2", "checkpoint.keep_every=6"], [6, 10, 12]),
        *slow(
            (["checkpoint.keep_last=0"], [2, 4, 6, 8, 10, 12]),
            (["checkpoint.keep_last=1", "checkpoint.keep_every=4"], [4, 8, 12]),
        ),
    ],
)
@pytest.mark.parametrize("mode", ["async", *slow("sync")])
def test_retention(mode: str, keep: list[str], kept: list[int], tmp_path: Path) -> None:
    own = Trainer(mlp_config(tmp_path / "run", *keep, f"checkpoint.mode={mode}", "train.steps=12"))
    assert own.fit() == 0
    own.close()
    assert steps_in(tmp_path / "run") == kept


@pytest.mark.slow
@pytest.mark.parametrize(("when", "saved"), [("wait", [2, 4, 6, 8]), ("skip", [2, 8])])
def test_save_falls_due_during_a_background_save(when: str, saved: list[int], tmp_path: Path) -> None:
    arguments = with_(f"checkpoint.when_busy={when}", "checkpoint.keep_last=0")
    run = start(tmp_path / "run", *arguments, fault=Fault(hang="write", hang_s=2, first=0, last=0))
    assert run.wait() == [0], run.stderr
    assert steps_in(run.folder) == saved
