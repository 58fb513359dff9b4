"""Trackers: every step arrives, through kills and resumes, and no run waits for one or is stopped by one."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import sqlite3
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.cases import in_campaign
from tests.helpers.gate import Gate, wait_until
from tests.helpers.launch import REPOSITORY, run, start
from tests.helpers.tiny import fit, tiny_config
from trainer import Trainer, UserError, registry
from trainer.metrics import trackers
from trainer.metrics.trackers import Sender

WRITING_TRACKER = """\
import json, os, threading, time

class Keeper:
    '''Appends what it gets to a file; fails, or waits for a file or for ever, where the environment says so.'''

    def open(self, run):
        self.call("open", run.id, run.name, run.resumed_step)
        if os.environ.get("KEEPER_FORGETS"):
            return None
        return max((one["step"] for one in self.kept() if "step" in one), default=0)

    def write(self, step, values, time):
        self.call("write")
        self.keep({"step": step, **values})

    def close(self):
        self.call("close")

    def call(self, name, *about):
        self.keep({"call": [name, *about]})
        if os.environ.get("KEEPER_FAILS") == name:
            error = {"open": ConnectionRefusedError, "write": SystemExit, "close": AssertionError}[name]
            raise error("the server is away")
        if os.environ.get("KEEPER_HANGS") == name:
            threading.Event().wait()
        while not os.path.exists(os.environ.get("KEEPER_WAITS_FOR", "/")):
            time.sleep(0.01)

    def keep(self, value):
        with open(os.environ["KEEPER"], "a") as file:
            file.write(json.dumps(value) + "\\n")

    def kept(self):
        with open(os.environ["KEEPER"]) as file:
            return [json.loads(line) for line in file]
"""


def install(name: str, code: str, entry_point: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a distribution with one module, which announces a tracker, as pip would."""
    (folder / f"{name}.py").write_text(code)
    about = folder / f"{name}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(entry_point)
    monkeypatch.syspath_prepend(str(folder))
    # A process reads once what is installed.
    monkeypatch.setattr(registry, "_all_entry_points", metadata.entry_points)


@pytest.fixture
def keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which the tracker `keeper` of another distribution records what it is called with."""
    site = tmp_path / "site"
    site.mkdir()
    install("keeper_of_tests", WRITING_TRACKER, ENTRY_POINT, site, monkeypatch)
    monkeypatch.setenv("KEEPER", str(tmp_path / "kept"))
    return tmp_path / "kept"


ENTRY_POINT = "[meshtrainer.trackers]\nkeeper = keeper_of_tests:Keeper\n"


def rows_in(file: Path) -> list[dict[str, Any]]:
    return [row for row in map(json.loads, file.read_text().splitlines()) if "step" in row]


def calls_in(file: Path, name: str) -> list[list[Any]]:
    calls = [row["call"] for row in map(json.loads, file.read_text().splitlines()) if "call" in row]
    return [call for call in calls if call[0] == name]


def of(kind: str, found: list[dict[str, Any]], field: str) -> list[Any]:
    return [line[field] for line in found if line["kind"] == kind]


def steps_of(kind: str, file: Path) -> list[int]:
    return [row["step"] for row in rows_in(file) if f"{kind}/loss" in row]


RESUMED = ["log.trackers=[keeper]", "checkpoint.every=3", "checkpoint.keep_last=0", "eval.every=2"]


@pytest.mark.parametrize("forgets", [False, True])
def test_a_resumed_run_continues_in_its_tracker(
    forgets: bool, keeper: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It resumes at 3, and the tracker has 4 and 5 of the attempt before; it may not be able to tell."""
    if forgets:
        monkeypatch.setenv("KEEPER_FORGETS", "yes")
    fit(tmp_path / "run", "train.steps=5", *RESUMED)
    (tmp_path / "run" / "checkpoints" / "step_00000005").rename(tmp_path / "lost")
    found = fit(tmp_path / "run", "train.steps=8", *RESUMED)
    assert steps_of("train", keeper) == [1, 2, 3, 4, 5, *([4, 5] if forgets else []), 6, 7, 8]
    assert steps_of("eval", keeper) == [2, 4, 5, *([4] if forgets else []), 6, 8]
    for kind in ("train", "eval"):
        expected = {line["step"]: line["loss"] for line in found if line["kind"] == kind}
        sent = {row["step"]: row[f"{kind}/loss"] for row in rows_in(keeper) if f"{kind}/loss" in row}
        assert expected.items() <= sent.items(), "bit for bit"
    first, second = calls_in(keeper, "open")
    assert first[1] == second[1], "the same run"
    assert (first[2:], second[2:]) == (["llama_small", 0], ["llama_small", 3])
    assert len(calls_in(keeper, "close")) == 2


def test_evaluation_that_was_cut_off_is_sent_by_the_next_attempt(keeper: Path, tmp_path: Path) -> None:
    """The tracker has step 4 already, but not its evaluation."""
    settings = ["log.trackers=[keeper]", "train.steps=6", "eval.every=4", "checkpoint.every=4"]

    class CutOff(Trainer):
        def evaluate(self) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        CutOff(tiny_config(tmp_path / "run", *settings)).fit()
    assert (steps_of("train", keeper), steps_of("eval", keeper)) == ([1, 2, 3, 4], [])
    fit(tmp_path / "run", *settings)
    assert steps_of("eval", keeper) == [4, 6]


@pytest.mark.parametrize("forgets", [False, True])
def test_tracker_gets_what_an_earlier_attempt_has_not_sent(
    forgets: bool, keeper: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the checkpoint at 3, if it can tell that it lacks these steps."""
    if forgets:
        monkeypatch.setenv("KEEPER_FORGETS", "yes")
    fit(tmp_path / "run", "train.steps=5", *RESUMED, "log.trackers=[]")
    (tmp_path / "run" / "checkpoints" / "step_00000005").rename(tmp_path / "lost")
    found = fit(tmp_path / "run", "train.steps=6", *RESUMED)
    assert steps_of("train", keeper) == ([4, 5, 6] if forgets else [1, 2, 3, 4, 5, 6])
    assert steps_of("eval", keeper) == ([4, 6] if forgets else [2, 4, 6])
    sent = {row["step"]: row["train/loss"] for row in rows_in(keeper) if "train/loss" in row}
    assert sent.items() <= {line["step"]: line["loss"] for line in found if line["kind"] == "train"}.items()


@pytest.mark.parametrize(("change", "is_same"), [("moved", True), ("copied", False)])
def test_copy_of_a_run_is_another_one_in_its_tracker(change: str, is_same: bool, keeper: Path, tmp_path: Path) -> None:
    fit(tmp_path / "run", "train.steps=2", "log.trackers=[keeper]")
    if change == "moved":
        (tmp_path / "run").rename(tmp_path / "other")
    else:
        shutil.copytree(tmp_path / "run", tmp_path / "other")
    for steps in (3, 4):
        found = fit(tmp_path / "other", f"train.steps={steps}", "log.trackers=[keeper]")
    first, *later = [call[1] for call in calls_in(keeper, "open")]
    assert later[0] == later[1]
    assert (first == later[0]) == is_same
    assert of("start", found, "run_id") == [first, *later]


def test_steps_do_not_wait_for_a_slow_tracker(keeper: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers its first call after the last step; then it gets all of them."""
    monkeypatch.setenv("KEEPER_WAITS_FOR", str(tmp_path / "answer"))

    class Answers(Trainer):
        def on_step(self, record: Any) -> None:
            if record.step == 20:
                assert not keeper.exists() or rows_in(keeper) == []
                (tmp_path / "answer").touch()

    fit(tmp_path / "run", "train.steps=20", "log.trackers=[keeper]", kind=Answers)
    assert steps_of("train", keeper) == list(range(1, 21))
    assert len(calls_in(keeper, "close")) == 1


@pytest.mark.parametrize("call", ["write", *in_campaign("open", "close")])
def test_a_tracker_that_fails_is_one_warning(
    call: str, keeper: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KEEPER_FAILS", call)
    found = fit(tmp_path / "run", "train.steps=3", "log.trackers=[keeper]")
    assert of("train", found, "step") == [1, 2, 3]
    assert found[-1]["reason"] == "finished"
    assert len(calls_in(keeper, call)) == 1
    warned = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert len(warned) == 1
    assert "keeper" in warned[0]
    assert "the server is away" in warned[0]


@pytest.mark.parametrize("call", ["write", *in_campaign("open", "close")])
def test_a_tracker_that_hangs_is_left(
    call: str, keeper: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the end of the run, some time later; the steps wait for nothing."""
    monkeypatch.setattr(Sender, "FINISH_TIMEOUT_S", 0.5)
    monkeypatch.setenv("KEEPER_HANGS", call)
    found = fit(tmp_path / "run", "train.steps=3", "log.trackers=[keeper]")
    assert of("train", found, "step") == [1, 2, 3]
    assert capsys.readouterr().err.count("warning: keeper ") == 1


def test_a_tracker_that_is_far_behind_is_left(
    keeper: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """So that what waits for it does not fill the memory."""
    monkeypatch.setattr(Sender, "FINISH_TIMEOUT_S", 0.5)
    monkeypatch.setattr(Sender, "_MAX_WAITING", 2)
    monkeypatch.setenv("KEEPER_HANGS", "open")
    fit(tmp_path / "run", "train.steps=5", "log.trackers=[keeper]")
    warned = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert warned == ["warning: keeper is 2 records behind; the run continues without it"]


@pytest.mark.campaign
def test_all_trackers_together_delay_the_end_of_a_run_by_ten_seconds(
    keeper: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEEPER_HANGS", "open")
    found = trackers.find_tracker("keeper")
    monkeypatch.setattr("trainer.metrics.writers.find_tracker", lambda name: found)
    names = ["keeper", *(name for name in READERS if importlib.util.find_spec(name))]
    assert len(names) > 1
    trainer = Trainer(tiny_config(tmp_path / "run", "train.steps=2", f"log.trackers=[{','.join(names)}]"))
    for record in trainer.steps():
        if record.step == 2:
            break
    before = time.monotonic()
    trainer.close()
    assert 10 <= time.monotonic() - before < 15


def test_example_on_the_page_is_a_tracker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its code and its entry point as they are printed, with a step whose loss is not finite."""
    page = (REPOSITORY / "docs" / "trackers.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (toml,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    group, name, target = re.findall(r'entry-points\."(.*)"\]\n(\w+) = "(.*)"', toml)[0]
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "trackers.py").write_text(code)
    install("my_package_of_tests", "", f"[{group}]\n{name} = {target}\n", tmp_path, monkeypatch)

    class NeverFinite(Trainer):
        def loss(self, batch: Any) -> Any:
            return super().loss(batch) * (float("nan") if self.state.step == 1 else 1.0)

    found = fit(tmp_path / "run", "train.steps=3", f"log.trackers=[{name}]", kind=NeverFinite)
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if re.match(r"\d (None|\d\.\d+)$", line)] == [
        f"{line['step']} {line['loss']}" for line in found if line["kind"] == "train"
    ]


# ---------------------------------------------------------------------------------------------------------------
# The real clients


def tensorboard_rows(folder: Path) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return [(event.step, event.value) for event in events.Scalars("train/loss")]


def mlflow_rows(folder: Path) -> list[tuple[int, float]]:
    with sqlite3.connect(folder.parent / "mlflow.db") as store:
        assert len(store.execute("select * from runs where lifecycle_stage = 'active'").fetchall()) == 1
        return store.execute("select step, value from metrics where key = 'train/loss' order by step").fetchall()


def trackio_rows(folder: Path) -> list[tuple[int, float]]:
    with sqlite3.connect(folder.parent / "trackio" / "meshtrainer.db") as store:
        rows = [(step, json.loads(text)) for step, text in store.execute("select step, metrics from metrics")]
    return sorted((step, values["train/loss"]) for step, values in rows if "train/loss" in values)


READERS = {"tensorboard": tensorboard_rows, "mlflow": mlflow_rows, "trackio": trackio_rows}


@pytest.mark.campaign
@pytest.mark.parametrize("name", ["tensorboard", "mlflow", "trackio"])
def test_client_gets_each_step_once_from_a_run_that_is_killed_and_resumed(name: str, tmp_path: Path) -> None:
    client = pytest.importorskip(name)
    if name == "mlflow":  # on a busy machine, creating its database takes longer than a run waits
        client.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db").search_experiments()
    folder, gate = tmp_path / "run", Gate(tmp_path / "gate", "evaluation 6")
    own = ["model.name=tests.helpers.slow_trainer:slow_llama", "model.vocab_size=257", "model.num_kv_heads=2"]
    own += ["train.steps=8", "checkpoint.every=4", "eval.every=6", "eval.steps=1", f"log.trackers=[{name}]"]
    variables = {
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        **gate.variables,
    }
    killed = start(folder, *own, variables=variables)
    wait_until(gate.is_reached, "the evaluation")
    killed.signal(signal.SIGKILL)
    killed.wait(together=False)
    gate.open()
    ended = run(folder, *own, variables=variables)
    assert "warning" not in ended.err
    rows = READERS[name](folder)
    assert [step for step, _ in rows] == list(range(1, 9))
    assert [loss for _, loss in rows] == pytest.approx(ended.train("loss"), rel=1e-6)


@pytest.mark.campaign
def test_wandb_offline_keeps_one_id_over_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    for steps in (2, 4):
        run(tmp_path / "run", f"train.steps={steps}", "log.wandb=offline")
    runs = [path for path in (tmp_path / "run" / "wandb").rglob("*.wandb") if path.is_file()]
    assert len({path.parent for path in runs}) == 2, "one folder an attempt"
    assert len({path.stem for path in runs}) == 1, "of one run"
    assert all(path.stat().st_size > 0 for path in runs)


# ---------------------------------------------------------------------------------------------------------------
# Mistakes


@pytest.mark.parametrize(
    ("setting", "library"),
    [
        *((f"log.trackers=[{name}]", name) for name in ("wandb", "tensorboard", "trackio", "mlflow")),
        ("log.prometheus=9400", "prometheus_client"),
    ],
)
def test_a_library_that_is_missing_is_one_message(
    setting: str, library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda one, *rest: None if one == library else find(one, *rest))
    with pytest.raises(UserError) as refused:
        fit(tmp_path / "run", setting)
    assert str(refused.value).startswith(f"{setting}: ")
    assert "pip install" in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_a_tracker_that_there_is_not(tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        fit(tmp_path / "run", "log.trackers=[mlfow]")
    assert str(refused.value).startswith("log.trackers=[mlfow]: ")
    assert "log.trackers=[mlflow]" in str(refused.value)
