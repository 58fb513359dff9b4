"""Trackers: every step arrives once, through kills and outages, and no run waits for one or is stopped by one."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import trackers
from tests.helpers.forked import REPOSITORY, popen
from tests.helpers.gate import wait_until
from tests.helpers.ranks import CommandResult, tiny_overrides
from tests.helpers.tiny import fit
from trainer import UserError, load_config
from trainer.config import rules
from trainer.config.rules import check_requirements
from trainer.metrics.follower import Follower, RowReader, TrackingFile
from trainer.metrics.trackers import TRACKERS, TrackedRun, tracker_names

STEPS = 100
MODEL = [
    "model.name=tests.helpers.slow_trainer:slow_llama",
    "model.vocab_size=257",
    "model.num_kv_heads=2",
    *("checkpoint.every=10", "eval.every=20", "eval.steps=1", f"train.steps={STEPS}"),
]


# ---------------------------------------------------------------------------------------------------------------
# The interface, with a custom tracker


class RecordingTracker:
    """A tracker that records what it receives, and may fail."""

    made: list[RecordingTracker] = []
    opens_fail = 0
    writes_fail = 0
    knows_steps = True
    rows: list[tuple[int, dict[str, float]]] = []

    def __init__(self) -> None:
        self.made.append(self)
        self.calls: list[str] = []

    def open(self, run: TrackedRun) -> int | None:
        self.calls.append("open")
        self.run = run
        if RecordingTracker.opens_fail:
            RecordingTracker.opens_fail -= 1
            raise ConnectionRefusedError("the server is away")
        return max((step for step, _ in self.rows), default=0) if self.knows_steps else None

    def write(self, step: int, values: Mapping[str, float], time: float) -> None:
        if RecordingTracker.writes_fail:
            RecordingTracker.writes_fail -= 1
            raise TimeoutError("the server is slow")
        self.rows.append((step, dict(values)))

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> type[RecordingTracker]:
    """The tracker `kept`, as another distribution announces it."""
    point = EntryPoint("kept", f"{__name__}:Kept", "meshtrainer.sinks")
    for module in ("trainer.config.rules", "trainer.metrics.trackers"):
        monkeypatch.setattr(f"{module}.entry_points", lambda group: [point])
    monkeypatch.setattr(EntryPoint, "load", lambda self: RecordingTracker)
    monkeypatch.setattr(Follower, "_PAUSES_S", (0.01,))
    for name, value in (("made", []), ("rows", []), ("opens_fail", 0), ("writes_fail", 0), ("knows_steps", True)):
        monkeypatch.setattr(RecordingTracker, name, value)
    return RecordingTracker


def of(kind: str, found: list[dict[str, Any]], field: str) -> list[Any]:
    return [line[field] for line in found if line["kind"] == kind]


def test_a_tracker_of_ones_own_gets_each_step_once_with_its_evaluation(
    kept: type[RecordingTracker], tmp_path: Path
) -> None:
    found = fit(tmp_path, "train.steps=6", "eval.every=3", "log.trackers=[kept]")
    (one,) = kept.made
    assert one.calls == ["open", "close"]
    assert (one.run.name, one.run.resumed_step, one.run.folder) == ("llama_small", 0, tmp_path)
    assert [step for step, _ in kept.rows] == [1, 2, 3, 4, 5, 6]
    assert [values["train/loss"] for _, values in kept.rows] == of("train", found, "loss")
    assert [values["eval/loss"] for _, values in kept.rows if "eval/loss" in values] == of("eval", found, "loss")
    assert ["eval/loss" in values for _, values in kept.rows] == [False, False, True] * 2


def test_example_on_the_page_accepts_rows_without_a_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (REPOSITORY / "docs" / "trackers.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    scope: dict[str, Any] = {}
    exec(code, scope)
    file = tmp_path / "metrics.jsonl"
    lines = [{"kind": "train", "step": 1, "loss": 2.5}, {"kind": "train", "step": 2, "loss": None, "lr": 0.1}]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    reader = RowReader(file, awaits_evaluation=lambda step: False)
    rows = reader.read(0, has_ended=True)
    with file.open("a") as late:
        late.write('{"kind": "eval", "step": 2, "loss": 2.0}\n')
    for row in [*rows, *reader.read(2, has_ended=True)]:
        scope["Printer"]().write(row.step, row.values, row.time)
    assert capsys.readouterr().out == "1 2.5\n2 None\n2 None\n"


@pytest.mark.parametrize("knows_steps", [True, False])
def test_a_resumed_run_continues_in_its_tracker(
    knows_steps: bool, kept: type[RecordingTracker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It resumes at 3, and the tracker has 4 and 5 of the attempt before."""
    monkeypatch.setattr(kept, "knows_steps", knows_steps)
    settings = ["log.trackers=[kept]", "checkpoint.every=3", "checkpoint.keep_last=0"]
    fit(tmp_path, "train.steps=5", *settings)
    (tmp_path / "checkpoints" / "step_00000005").rename(tmp_path / "lost")
    found = fit(tmp_path, "train.steps=8", *settings)
    assert [step for step, _ in kept.rows] == list(range(1, 9))
    assert [values["train/loss"] for _, values in kept.rows] == of("train", found, "loss"), "bit for bit"
    first, second = kept.made
    assert first.run.id == second.run.id
    assert second.run.resumed_step == 3


@pytest.mark.parametrize(("opens_fail", "writes_fail"), [(2, 0), (0, 3), (1, 1)])
def test_after_an_outage_everything_arrives_and_one_message_tells(
    opens_fail: int,
    writes_fail: int,
    kept: type[RecordingTracker],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(kept, "opens_fail", opens_fail)
    monkeypatch.setattr(kept, "writes_fail", writes_fail)
    settled = threading.Event()
    write = RecordingTracker.write

    def write_and_tell(self: RecordingTracker, *arguments: Any) -> None:
        write(self, *arguments)
        settled.set()

    monkeypatch.setattr(kept, "write", write_and_tell)
    from trainer import Trainer

    class Patient(Trainer):
        def on_step(self, record: Any) -> None:
            if record.step == 5:
                assert settled.wait(30)

    fit(tmp_path, "train.steps=6", "log.trackers=[kept]", kind=Patient)
    assert [step for step, _ in kept.rows] == list(range(1, 7))
    warned = capsys.readouterr().err
    assert warned.count("warning:") == 1
    assert "kept failed; continuing, with retries until the run ends: " in warned


def test_a_tracker_that_hangs_is_left(
    kept: type[RecordingTracker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Follower, "FINISH_TIMEOUT_S", 0.3)
    released = threading.Event()
    monkeypatch.setattr(kept, "write", lambda self, *_: released.wait(60))
    monkeypatch.setattr(kept, "abandon", lambda self: 1 / 0, raising=False)
    began = time.monotonic()
    found = fit(tmp_path, "train.steps=6", "log.trackers=[kept]")
    released.set()
    assert time.monotonic() - began < 30
    assert of("train", found, "step") == list(range(1, 7))
    assert capsys.readouterr().err.count("warning: kept did not finish within 0 s; the run ends without it") == 1


def append(path: Path, **record: Any) -> None:
    with open(path, "a") as file:
        file.write(json.dumps(record) + "\n")


def test_a_row_waits_for_its_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a stopped run the step whose evaluation was cut off is left to the next attempt."""
    monkeypatch.setattr(RowReader, "SETTLE_S", 0.0)
    path = tmp_path / "metrics.jsonl"
    path.touch()
    reader = RowReader(path, awaits_evaluation=lambda step: step % 2 == 0)
    append(path, kind="train", step=1, loss=1.0, time=1.0)
    assert [row.step for row in reader.read(0)] == [1], "none is due"
    append(path, kind="train", step=2, loss=2.0, time=2.0)
    assert reader.read(1) == []
    assert reader.read(1, has_ended=True) == []
    append(path, kind="eval", step=2, loss=3.0, time=3.0)
    (row,) = reader.read(1)
    assert row.values == {"train/loss": 2.0, "eval/loss": 3.0}
    append(path, kind="train", step=4, loss=2.0, time=2.0)
    append(path, kind="end", step=4, reason="finished")
    assert [row.step for row in reader.read(2, has_ended=True)] == [4], "no evaluation will come"
    append(path, kind="eval", step=4, loss=5.0, time=9.0)
    assert [row.values for row in reader.read(4)] == [{"eval/loss": 5.0}], "but one that was asked for"
    reader.close()


def test_a_file_that_is_replaced_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RowReader, "SETTLE_S", 0.0)
    path, other = tmp_path / "metrics.jsonl", tmp_path / "other"
    append(path, kind="train", step=1, loss=1.0)
    reader = RowReader(path, lambda step: False)
    assert [row.step for row in reader.read(0)] == [1]
    path.write_text('{"kind": "train", "st')  # half a line
    for step in (1, 2):
        append(other, kind="train", step=step, loss=1.0)
    other.rename(path)
    assert [row.step for row in reader.read(1)] == [2]
    path.unlink()
    assert reader.read(2) == []
    reader.close()


def test_repeated_steps_are_returned_again_only_to_a_tracker_that_can_rewind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run goes back from step 4 to step 2, and its file no longer has the steps after that."""
    monkeypatch.setattr(RowReader, "SETTLE_S", 0.0)
    path = tmp_path / "metrics.jsonl"
    for can_rewind, expected in ((True, [3, 4, 5]), (False, [5])):
        path.unlink(missing_ok=True)
        for step in range(1, 5):
            append(path, kind="train", step=step, loss=1.0)
        reader = RowReader(path, lambda step: False)
        assert [row.step for row in reader.read(0)] == [1, 2, 3, 4]
        for step in (1, 2):
            append(tmp_path / "shorter", kind="train", step=step, loss=1.0)
        (tmp_path / "shorter").rename(path)
        reader.go_back(2, returns_again=can_rewind)
        found = reader.read(2 if can_rewind else 4)
        for step in (3, 4, 5):
            append(path, kind="train", step=step, loss=2.0)
            found += reader.read(2 if can_rewind else 4)
        assert [row.step for row in found] == expected
        append(path, kind="eval", step=5, loss=3.0)
        assert [row.values for row in reader.read(5)] == [{"eval/loss": 3.0}], "late, but not repeated"
        reader.close()


@pytest.mark.parametrize("can_rewind", [True, False])
@pytest.mark.parametrize("waits_in", ["open", "write"])
def test_a_slow_tracker_gets_each_step_once_if_the_run_goes_back(
    can_rewind: bool, waits_in: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run goes back from step 6 to step 4 while the tracker is connecting, or sending step 2."""
    monkeypatch.setattr(RowReader, "SETTLE_S", 0.05)
    monkeypatch.setattr(Follower, "_PAUSES_S", (0.01,))
    reached, released = threading.Event(), threading.Event()
    kept: dict[int, float] = {}
    sent: list[int] = []
    failures = [TimeoutError("the server is slow")]

    class Slow:
        def open(self, run: TrackedRun) -> int:
            if waits_in == "open":
                self.wait()
            return max(kept, default=0)

        def write(self, step: int, values: Mapping[str, float], time: float) -> None:
            if waits_in == "write" and step == 2:
                self.wait()
            sent.append(step)
            kept[step] = values["train/loss"]

        def wait(self) -> None:
            reached.set()
            assert released.wait(60)

        def close(self) -> None: ...

    class SlowAndRewinding(Slow):
        def rewind(self, step: int) -> None:
            if failures:
                raise failures.pop()  # it is called again
            for later in [each for each in kept if each > step]:
                del kept[later]

    path = tmp_path / "metrics.jsonl"
    for step in range(1, 7):
        append(path, kind="train", step=step, loss=1.0)
    run = TrackedRun("id", tmp_path, load_config("llama_small", ["eval.every=0", f"run.dir={tmp_path}"]), 0)
    kind = SlowAndRewinding if can_rewind else Slow
    follower = Follower("slow", "Slow", kind, run, TrackingFile(tmp_path, "id"), lambda message: None)
    assert reached.wait(60)
    for step in range(1, 5):
        append(tmp_path / "shorter", kind="train", step=step, loss=1.0)
    (tmp_path / "shorter").rename(path)
    follower.go_back(4)
    for step in range(5, 8):
        append(path, kind="train", step=step, loss=2.0)
    released.set()
    wait_until(lambda: 7 in kept, "the last step")
    follower.close()
    assert sorted(kept) == list(range(1, 8))
    assert failures == [] or not can_rewind
    if can_rewind:
        assert [kept[step] for step in (5, 6, 7)] == [2.0] * 3
    else:
        assert sent == list(range(1, 8))


# ---------------------------------------------------------------------------------------------------------------
# Mistakes


@pytest.mark.parametrize("name", ["wandb", "tensorboard", "trackio", "mlflow"])
def test_a_library_that_is_missing_is_one_message(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda one, *rest: None if one == name else find(one, *rest))
    config = load_config("llama_small", [f"log.trackers=[{name}]"])
    with pytest.raises(UserError, match=rf"log.trackers=\[{name}\]: .* is not installed\n  to fix: pip install '?\w+"):
        check_requirements(config, "cpu")


def test_a_tracker_that_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config("llama_small", ["log.trackers=[mlfow]"])
    with pytest.raises(UserError, match=r"no tracker is called 'mlfow'(.|\n)*did you mean 'log.trackers=\[mlflow\]'"):
        check_requirements(config, "cpu")


def test_old_settings_are_trackers_too() -> None:
    log = load_config("llama_small", ["log.wandb=offline", "log.tensorboard=true", "log.trackers=[wandb,mlflow]"]).log
    assert tracker_names(log) == ("wandb", "tensorboard", "mlflow")
    assert tracker_names(log.without_trackers()) == ()


# ---------------------------------------------------------------------------------------------------------------
# The real clients: killed, resumed, and without their server for a minute

AWAY_S = 60.0
KINDS: dict[str, type[trackers.Tracker]] = {
    "tensorboard": trackers.TensorBoard,
    "wandb offline": trackers.WandbOffline,
    "wandb": trackers.Wandb,
    "mlflow": trackers.Mlflow,
    "trackio": trackers.TrackioLocal,
    "trackio server": trackers.Trackio,
}
WITH_SERVER = ["wandb", "mlflow", "trackio server"]


@pytest.fixture
def tracker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[trackers.Tracker]:
    kind = KINDS[request.param]
    pytest.importorskip(kind.name)
    tracker = kind(tmp_path / "tracker")
    tracker.start()
    yield tracker
    tracker.stop()


def start(folder: Path, tracker: trackers.Tracker, rest_s: float, patience_s: float = 30.0) -> subprocess.Popen[str]:
    own = {
        "MESHTRAINER_TEST_REST_S": str(rest_s),
        "MESHTRAINER_TEST_PATIENCE_S": str(patience_s),
        "PYTHONPATH": str(REPOSITORY),
    }
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    overrides = tiny_overrides(*MODEL, *tracker.overrides, f"run.dir={folder}")
    with open(f"{folder}.log", "a") as log:
        command = [sys.executable, "-m", "trainer.run", "recipe=llama_small", *overrides]
        return popen(command, env=inherited | own | tracker.env, stdout=log, stderr=log)


def wait_for_step(folder: Path, process: subprocess.Popen[str], step: int) -> None:
    def is_there() -> bool:
        assert process.poll() is None, Path(f"{folder}.log").read_text()
        metrics = folder / "metrics.jsonl"
        return metrics.exists() and f'"kind": "train", "step": {step},' in metrics.read_text()

    wait_until(is_there, f"step {step}")


def assert_every_step_arrived_once(folder: Path, tracker: trackers.Tracker) -> None:
    ran = CommandResult(0, "", "", folder)
    tracker.stop()
    found = tracker.received(folder)
    assert [step for step, _ in found] == list(range(1, STEPS + 1))
    assert [loss for _, loss in found] == pytest.approx(ran.train("loss"), rel=1e-6)


@pytest.mark.campaign
@pytest.mark.timeout(300)
@pytest.mark.parametrize("tracker", list(KINDS), indirect=True)
def test_killed_and_resumed_twice(tracker: trackers.Tracker, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for step in (37, 75):
        process = start(folder, tracker, rest_s=0.1)
        wait_for_step(folder, process, step)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert start(folder, tracker, rest_s=0.02).wait(240) == 0, Path(f"{folder}.log").read_text()
    assert_every_step_arrived_once(folder, tracker)
    assert "warning" not in Path(f"{folder}.log").read_text()


@pytest.mark.campaign
@pytest.mark.timeout(600)
@pytest.mark.parametrize("tracker", WITH_SERVER, indirect=True)
def test_its_server_is_away_for_a_minute(tracker: trackers.Tracker, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start(folder, tracker, rest_s=1.0, patience_s=60.0)
    wait_for_step(folder, process, 10)
    tracker.go_down()
    trackers.pause(AWAY_S)
    tracker.come_back()
    assert process.wait(400) == 0, Path(f"{folder}.log").read_text()
    times = [line["time"] for line in CommandResult(0, "", "", folder).metrics if line["kind"] == "train"]
    assert max(after - before for before, after in itertools.pairwise(times)) < 8, "no step waited"
    assert_every_step_arrived_once(folder, tracker)
    assert Path(f"{folder}.log").read_text().count("warning") <= 1


def test_configuration_knows_the_trackers_that_can_be_opened() -> None:
    """Two tables, because checking a configuration must not import the trackers."""
    assert set(rules._TRACKERS) == set(TRACKERS)
