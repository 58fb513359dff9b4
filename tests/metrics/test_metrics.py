"""The outputs of a run: metrics.jsonl, console, TensorBoard, Weights & Biases, status.json."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import json
import math
import os
import pickle
import re
import shutil
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any, TextIO

import pytest
import torch
from rich.console import Console

from tests.helpers.forked import REPOSITORY
from tests.helpers.ranks import run_tiny
from tests.helpers.runs import SharedRun
from tests.helpers.tiny import BATCH, SEQ_LEN, fit, lines, tiny_config
from trainer import Trainer
from trainer.lifecycle import folder as rundir
from trainer.lifecycle.folder import RunFolder, write_atomically
from trainer.metrics.console import (
    ConsoleWriter,
    LogFile,
    NonBlockingStream,
    PlainScreen,
    Screen,
    make_screen,
    readable_bytes,
    readable_count,
    readable_duration,
)
from trainer.metrics.follower import Follower
from trainer.metrics.record import Record
from trainer.metrics.step_metrics import peak_memory_gib
from trainer.metrics.terminal import Terminal
from trainer.metrics.trackers import TensorBoard
from trainer.metrics.writers import JsonLines

NULL = type(None)
FIELDS: dict[str, dict[str, tuple[type, ...]]] = {
    "start": {
        "world_size": (int,),
        "mesh": (dict,),
        "parameters": (int,),
        "trainable_parameters": (int,),
        "torch": (str,),
        "device": (str,),
        "resumed_step": (int, NULL),
    },
    "train": {
        "step": (int,),
        "loss": (float,),
        "grad_norm": (float,),
        "lr": (float,),
        "tokens": (int,),
        "tokens_per_s": (float,),
        "step_s": (float,),
        "data_s": (float,),
        "mfu": (float, NULL),
        "peak_memory_gib": (float,),
    },
    "eval": {"step": (int,), "loss": (float,)},
    "checkpoint": {"step": (int,), "blocked_s": (float,), "total_s": (float,), "bytes": (int,)},
    "end": {"step": (int,), "reason": (str,), "goodput": (float,)},
}
"""The fixed fields of every kind of record, and their types in JSON."""


def of(kind: str, found: list[dict[str, Any]], field: str) -> list[Any]:
    return [line[field] for line in found if line["kind"] == kind]


class NeverFinite(Trainer):
    """Has a loss that is not a number in its second step."""

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return super().loss(batch) * (math.nan if self.state.step == 1 else 1.0)


# ---------------------------------------------------------------------------------------------------------------
# metrics.jsonl

EVERY_3 = ["log.every=3", "eval.every=3", "checkpoint.every=3", "checkpoint.keep_last=0", "log.tensorboard=true"]


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]], list[dict[str, Any]]]:
    """A run of 8 steps, then again from its checkpoint at 3, as after a crash that left half a line."""
    folder = tmp_path_factory.mktemp("metrics") / "run"
    before = fit(folder, "train.steps=8", *EVERY_3)
    for step in (6, 8):
        shutil.rmtree(folder / "checkpoints" / f"step_{step:08d}")
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "step": 9, "lo')
    return folder, before, fit(folder, "train.steps=8", *EVERY_3)


Resumed = tuple[Path, list[dict[str, Any]], list[dict[str, Any]]]


@pytest.mark.parametrize("kind", list(FIELDS))
def test_fields(kind: str, resumed: Resumed) -> None:
    found = [line for line in resumed[2] if line["kind"] == kind]
    assert found
    for line in found:
        for field, kinds in FIELDS[kind].items():
            assert type(line[field]) in kinds, (field, line)


def test_values_of_the_fields(resumed: Resumed) -> None:
    before = resumed[1]
    (start,) = [line for line in before if line["kind"] == "start"]
    assert (start["world_size"], start["mesh"], start["device"]) == (1, {"replicate": 1, "shard": 1}, "cpu")
    assert (start["torch"], start["resumed_step"]) == (torch.__version__, None)
    assert of("train", before, "mfu") == [None] * 4, "nobody knows a CPU's peak"
    assert of("train", before, "tokens") == [step * BATCH * SEQ_LEN for step in (1, 3, 6, 8)]
    assert all(0 <= line["data_s"] <= line["step_s"] for line in before if line["kind"] == "train")
    assert all(0 < memory < 64 for memory in of("train", before, "peak_memory_gib"))
    assert all(
        blocked <= total
        for blocked, total in zip(*(of("checkpoint", before, f) for f in ("blocked_s", "total_s")), strict=True)
    )
    assert min(of("checkpoint", before, "bytes")) > 4 * start["parameters"] * 3, "weights and two moments"
    (end,) = [line for line in before if line["kind"] == "end"]
    assert (end["step"], end["reason"]) == (8, "finished")
    assert 0 < end["goodput"] <= 1
    assert before[0] == start
    assert before[-1] == end


def test_records_of_the_first_every_nth_and_the_last_step(resumed: Resumed) -> None:
    assert of("train", resumed[1], "step") == [1, 3, 6, 8]
    assert of("eval", resumed[1], "step") == [3, 6, 8]
    assert of("checkpoint", resumed[1], "step") == [3, 6, 8]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every", "steps", "expected"), [(1, 3, [1, 2, 3]), (100, 4, [1, 4]), (2, 4, [1, 2, 4]), (5, 1, [1])]
)
def test_log_every(every: int, steps: int, expected: list[int], tmp_path: Path) -> None:
    found = fit(tmp_path, f"train.steps={steps}", f"log.every={every}")
    assert of("train", found, "step") == expected


def test_resume_replaces_records_after_its_checkpoint(resumed: Resumed) -> None:
    _, before, after = resumed
    assert of("start", after, "resumed_step") == [None, 3]
    assert of("end", after, "reason") == ["finished", "finished"], "attempts are kept"
    assert of("train", after, "step") == [1, 3, 6, 8], "no step twice"
    assert of("eval", after, "step") == [3, 6, 8]
    kinds = [line["kind"] for line in after]
    second = len(kinds) - kinds[::-1].index("start") - 1
    assert [line["step"] for line in after[second:] if line["kind"] == "train"] == [6, 8]
    for field in ("loss", "grad_norm", "lr", "tokens"):
        assert of("train", after, field) == of("train", before, field), field


def test_partial_lines_and_debris_do_not_prevent_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = [
        {"kind": "start", "resumed_step": None},
        *({"kind": "train", "step": step, "loss": 1.0} for step in (1, 2, 3, 4)),
        {"kind": "eval", "step": 4, "loss": 1.0},
        {"kind": "checkpoint", "step": 4},
        {"kind": "end", "step": 4},
    ]
    text = "".join(json.dumps(line) + "\n" for line in whole)
    for debris in (
        '{"kind": "train", "st',
        '{"kind": "train", "step": 5, "note": "\xc3',
        "{",
        "",
        '{"kind": "train", "step": 2',
    ):
        path.write_bytes(text.encode() + debris.encode("latin-1"))
        sink = JsonLines(path, resumed_step=2)
        sink.write(Record(kind="train", step=3, loss=0.5))
        sink.close()
        assert lines(tmp_path) == [whole[0], whole[1], whole[2], *whole[6:], {"kind": "train", "step": 3, "loss": 0.5}]
        superseded = (tmp_path / "metrics_superseded.jsonl").read_text(errors="replace")
        assert superseded.startswith("".join(json.dumps(line) + "\n" for line in whole[3:6])), "nothing is lost"
        assert debris[:20] in superseded
        assert len(list(tmp_path.iterdir())) == 2, "nothing else is left beside it"
        (tmp_path / "metrics_superseded.jsonl").unlink()


def test_lines_are_on_disk_at_once(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "metrics.jsonl", resumed_step=0)
    sink.write(Record(kind="train", step=1, loss=math.nan, grad_norm=math.inf, lr=-math.inf, mfu=None, tokens=3))
    (line,) = lines(tmp_path)
    assert line == {"kind": "train", "step": 1, "loss": None, "grad_norm": None, "lr": None, "mfu": None, "tokens": 3}
    sink.close()


def test_lines_that_are_never_written_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sink = JsonLines(tmp_path / "metrics.jsonl", resumed_step=0)
    sink._file.close()
    sink._file = io.FileIO("/dev/full", "a+b")
    sink.write(Record(kind="train", step=1, loss=1.0))
    sink.write(Record(kind="norms", step=1, grad_norm={"root": 1.0}, param_norm={"root": 2.0}))
    sink.close()
    assert "2 lines could not be written" in capsys.readouterr().err


@pytest.mark.slow
def test_record_of_a_non_finite_step(tmp_path: Path) -> None:
    found = fit(tmp_path, "train.steps=4", kind=NeverFinite)
    assert of("train", found, "step") == [1, 2, 3, 4], "a skipped step advances the step"
    assert [loss is None for loss in of("train", found, "loss")] == [False, True, False, False]
    assert [norm is None for norm in of("train", found, "grad_norm")] == [False, True, False, False]
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()


def test_steps_yields_all_fields_also_between_records(tmp_path: Path) -> None:
    trainer = Trainer(tiny_config(tmp_path, "train.steps=5", "log.every=100"))
    records = list(trainer.steps())
    trainer.close()
    assert [record.step for record in records] == [1, 2, 3, 4, 5]
    for record in records:
        assert set(record) >= {"kind", *FIELDS["train"]}
        for field, kinds in FIELDS["train"].items():
            assert type(record[field]) in kinds
            assert record[field] is getattr(record, field)
    assert [record.tokens for record in records] == [BATCH * SEQ_LEN * step for step in range(1, 6)]
    assert len({record.loss for record in records}) == 5
    assert of("train", lines(tmp_path), "step") == [1, 5]
    with pytest.raises(AttributeError, match="no field 'los'"):
        _ = records[0].los


@pytest.mark.slow
def test_rates_and_bytes_are_totals_of_all_ranks(two: SharedRun) -> None:
    for line in two.ran.metrics:
        if line["kind"] == "train":
            assert line["tokens_per_s"] * line["step_s"] == pytest.approx(8 * 32), "targets of one step"
        if line["kind"] == "checkpoint":
            folder = two.ran.folder / "checkpoints" / f"step_{line['step']:08d}"
            files = [path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json"]
            assert line["bytes"] == sum(path.stat().st_size for path in files)


class Ragged(Trainer):
    """Its micro-batches have 1, 2, 3 ... targets that count."""

    def build_loader(self) -> Iterator[dict[str, torch.Tensor]]:
        for number in range(1, 100):
            tokens = torch.arange(2 * SEQ_LEN).view(2, SEQ_LEN) % 32
            targets = torch.full((2, SEQ_LEN), -100)
            targets.view(-1)[:number] = tokens.view(-1)[:number]
            yield {"tokens": tokens, "targets": targets}

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self.summed.append(float((found := super().loss(batch)).detach()))
        return found


def test_ignored_targets_do_not_count(tmp_path: Path) -> None:
    trainer = Ragged(tiny_config(tmp_path, "train.steps=2"))
    trainer.summed = []
    records = list(trainer.steps())
    trainer.close()
    assert [record.tokens for record in records] == [1 + 2, 1 + 2 + 3 + 4]
    first, second = sum(trainer.summed[:2]), sum(trainer.summed[2:])
    assert [record.loss for record in records] == pytest.approx([first / 3, second / 7], rel=1e-6)


@pytest.mark.slow
def test_a_run_ends_with_bits_per_byte_and_a_sample(tmp_path: Path) -> None:
    ran = run_tiny(tmp_path / "run", "train.steps=2", "eval.every=2", "eval.steps=1", "log.sample_tokens=4")
    (line,) = [line for line in ran.metrics if line["kind"] == "eval"]
    # A byte is a token here, and the end of each file is one more target than there are bytes.
    assert line["bits_per_byte"] == pytest.approx(line["loss"] / math.log(2), rel=0.01)
    assert re.search(r"gzip -9 on the same held-out text: [12]\.\d{4} bits/byte", ran.stdout)
    assert ran.stdout.rpartition("sample text from the model:")[2].strip().startswith("def ")


# ---------------------------------------------------------------------------------------------------------------
# TensorBoard


def test_tensorboard(resumed: Resumed) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, _, found = resumed
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    tags = events.Tags()["scalars"]
    for kind, steps in (("train", [1, 3, 6, 8]), ("eval", [3, 6, 8])):
        (tag,) = [tag for tag in tags if tag.endswith("/loss") and kind in tag]  # two curves, not one
        assert [event.step for event in events.Scalars(tag)] == steps
        assert [event.value for event in events.Scalars(tag)] == pytest.approx(of(kind, found, "loss"), rel=1e-6)
    assert any("grad_norm" in tag for tag in tags)
    assert not any(tag.endswith("step") for tag in tags)


def test_failing_tensorboard_does_not_end_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard")

    def fail(*_: Any) -> None:
        raise OSError("any error of the client will do")

    monkeypatch.setattr(TensorBoard, "write", fail)
    found = fit(tmp_path, "train.steps=3", "log.tensorboard=true")
    assert of("train", found, "step") == [1, 2, 3]
    assert capsys.readouterr().err.count("warning: TensorBoard failed; continuing") == 1


# ---------------------------------------------------------------------------------------------------------------
# Weights & Biases


@pytest.mark.slow
def test_wandb_offline_keeps_one_id_over_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    for steps in (2, 4):
        fit(tmp_path, f"train.steps={steps}", "log.wandb=offline")
    runs = [path for path in (tmp_path / "wandb").rglob("*.wandb") if path.is_file()]
    assert len({path.parent for path in runs}) == 2, "one folder an attempt"
    assert len({path.stem for path in runs}) == 1, "of one run"
    assert all(path.stat().st_size > 0 for path in runs)


class FakeWandb(types.ModuleType):
    """A wandb that works, raises, or never comes back, in one of its calls."""

    def __init__(self, trouble: str = "", hangs: bool = False) -> None:
        super().__init__("wandb")
        self.trouble, self.hangs = trouble, hangs
        self.released = threading.Event()
        self.calls: list[tuple[str, Any]] = []

    def _called(self, name: str, value: Any = None) -> None:
        self.calls.append((name, value))
        if name == self.trouble:
            if not self.hangs:
                raise ConnectionResetError("the server is gone")
            self.released.wait(60)

    def Settings(self, **settings: Any) -> dict[str, Any]:  # noqa: N802
        return settings

    def init(self, **options: Any) -> FakeWandb:
        self._called("init", options)
        return self

    def define_metric(self, *names: str, **options: Any) -> None:
        pass

    def log(self, values: dict[str, Any], step: int) -> None:
        assert values["step"] == step
        self._called("log", values)

    @property
    def step(self) -> int:
        return 0

    def finish(self) -> None:
        self._called("finish")


@pytest.fixture
def use_wandb(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    made = []

    def use(*trouble: Any) -> FakeWandb:
        made.append(FakeWandb(*trouble))
        monkeypatch.setitem(sys.modules, "wandb", made[-1])
        return made[-1]

    yield use
    for fake in made:
        fake.released.set()


@pytest.mark.slow
def test_wandb_separates_train_and_eval(use_wandb: Any, tmp_path: Path) -> None:
    fake = use_wandb()
    found = fit(tmp_path, "train.steps=4", "eval.every=2", "log.wandb=online")
    options = fake.calls[0][1]
    assert (options["mode"], options["resume"]) == ("online", "allow")
    assert options["config"]["train"]["steps"] == 4
    assert "PATH" not in json.dumps(options["config"]), "the environment is never logged"
    logged = [value for name, value in fake.calls if name == "log"]
    assert [v["train/loss"] for v in logged if "train/loss" in v] == of("train", found, "loss")
    assert [v["eval/loss"] for v in logged if "eval/loss" in v] == of("eval", found, "loss")
    assert [v["step"] for v in logged if "train/loss" in v] == [1, 2, 3, 4]
    assert fake.calls[-1][0] == "finish"


def test_wandb_is_not_imported_when_disabled(use_wandb: Any, tmp_path: Path) -> None:
    fake = use_wandb("init")
    fit(tmp_path, "train.steps=1")
    assert fake.calls == []


@pytest.mark.slow
@pytest.mark.parametrize("hangs", [False, True], ids=["raises", "hangs"])
@pytest.mark.parametrize(
    "trouble", ["log", *(pytest.param(call, marks=pytest.mark.campaign) for call in ("init", "finish"))]
)
def test_failing_wandb_neither_stops_nor_delays_training(
    trouble: str,
    hangs: bool,
    use_wandb: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert Follower.FINISH_TIMEOUT_S < 15
    monkeypatch.setattr(Follower, "FINISH_TIMEOUT_S", 0.5)  # scaled down for the test
    fake = use_wandb(trouble, hangs)
    found = fit(tmp_path, "train.steps=4", "log.wandb=online")  # the fake hangs for a minute
    assert found[-1]["time"] - found[0]["time"] < 30
    assert of("train", found, "step") == [1, 2, 3, 4]
    assert of("end", found, "reason") == ["finished"]
    assert (tmp_path / "checkpoints" / "step_00000004").is_dir()
    assert fake.calls[-1][0] == trouble
    warned = capsys.readouterr().err
    assert warned.count("warning:") == 1
    assert warned.count("Weights & Biases") == 1


# ---------------------------------------------------------------------------------------------------------------
# The console


def test_a_record_is_copied_and_pickled_with_all_its_fields_read() -> None:
    calls: list[str] = []
    record = Record(kind="train", loss=lambda: [2.5, calls.append("loss")][0])
    assert dict(pickle.loads(pickle.dumps(record))) == {"kind": "train", "loss": 2.5}
    assert copy.copy(record).loss == record.loss == 2.5
    assert calls == ["loss"]


TRAIN = Record(kind="train", step=3, loss=2.5, grad_norm=0.75, lr=1e-3, tokens=900, tokens_per_s=43100.0, step_s=1.5,
               data_s=0.1, mfu=None, peak_memory_gib=0.5)  # fmt: skip
RECORDS = [
    TRAIN,
    Record(**{**TRAIN, "loss": math.nan, "mfu": 0.413}),
    Record(kind="eval", step=3, loss=2.25, bits_per_byte=1.9),
    Record(kind="checkpoint", step=3, blocked_s=0.5, total_s=2.0, bytes=3 * 2**30),
    Record(kind="end", step=3, reason="finished", goodput=1.0),
    Record(kind="start", world_size=1),
]


def terminal_of(file: TextIO, columns: int = 200, **options: Any) -> Terminal:
    options = {"width": columns, "force_terminal": True, "soft_wrap": True, "color_system": None, **options}
    return Terminal(Console(file=file, highlight=False, **options))


def shown(screen_of: Callable[[TextIO], Screen]) -> str:
    """Return the console output of a complete run."""
    file = StringIO()
    sink = ConsoleWriter(10, screen_of(file))
    sink.start({"run": "mine", "mesh": "shard [2]"})
    for record in RECORDS:
        sink.write(record)
    for step in range(1, 11):
        sink.progress(step)
    sink.print("[bold]as it stands[/bold]", "green")
    sink.close()
    sink.close()
    return file.getvalue()


def test_plain_lines_without_a_terminal() -> None:
    text = shown(make_screen)
    assert "\x1b" not in text
    assert "\r" not in text
    printed = text.splitlines()
    assert len(printed) == 2 + 4 + 1
    assert printed[0].split() == ["run", "mine"]
    assert printed[2] == "step      3/10  loss 2.5000  grad 0.750  lr 1.00e-03  43.1 k target tok/s  0.50 GiB  eta 10s"
    assert "loss not finite" in printed[3]
    assert "mfu 41.3%" in printed[3]
    assert printed[4] == "eval  step      3  loss 2.2500  1.9000 bits/byte"
    assert "3.00 GiB in 2.0 s" in printed[5]
    assert printed[6] == "[bold]as it stands[/bold]", "what looks like markup is none"


@pytest.mark.parametrize(
    ("columns", "left_out"), [(140, ""), (80, "lr GiB grad"), (40, "lr grad GiB mfu tok/s"), (20, "")]
)
def test_a_progress_line_fits_its_terminal(columns: int, left_out: str) -> None:
    """The least important fields are dropped first; step, loss and remaining time always stay."""
    file = StringIO()
    sink = ConsoleWriter(100_000, terminal_of(file, columns))
    sink.write(Record(**{**TRAIN, "step": 12_000, "mfu": 0.413}))
    (line,) = file.getvalue().splitlines()
    assert len(line) <= columns or columns == 20
    for word in ("12000/100000", "loss 2.5000", "eta 36h40m"):
        assert word in line
    assert not [word for word in left_out.split() if word in line]
    if columns == 140:
        assert all(
            word in line for word in ("grad 0.750", "lr 1.00e-03", "43.1 k target tok/s", "mfu 41.3%", "0.50 GiB")
        )


@pytest.mark.parametrize("columns", [140, 80, 40])
def test_other_lines_fit_too(columns: int) -> None:
    file = StringIO()
    sink = ConsoleWriter(10, terminal_of(file, columns))
    norms = {"tok_embeddings.weight": 33.4, "layers.11.attention.wq.weight": 1.234}
    sink.write(Record(kind="eval", step=119_500, loss=2.25, bits_per_byte=1.9))
    sink.write(Record(kind="norms", step=119_500, grad_norm=norms))
    sink.write(Record(kind="checkpoint", step=119_500, bytes=123_456_789_012, total_s=123.4))
    lines = file.getvalue().splitlines()
    assert len(lines) == 3
    assert max(map(len, lines)) <= columns
    assert ("loss 2.2500" in lines[0], "1.23 to 33.4" in lines[1], "114.98 GiB" in lines[2]) == (True, True, True)
    assert ("largest: tok_embeddings.weight" in lines[1]) == (columns >= 80)


LOGGED = {"accuracy": 0.625, "margin": 0.0123456, "reward_chosen": -1.5, "reward_rejected": -12345.678, "empty": None}
"""What `Trainer.log` adds to a record, such as those of DPO."""


@pytest.mark.parametrize("columns", [None, 140, 80, 60, 40])
def test_all_logged_values_are_on_the_console(columns: int | None) -> None:
    """Also in evaluations; on a terminal in lines that fit. Values logged per source have a separate place."""
    file = StringIO()
    sink = ConsoleWriter(10, PlainScreen(file) if columns is None else terminal_of(file, columns))
    by_source = {"loss_web": 2.0, "epoch_web": 0.5}
    sink.write(Record(**TRAIN, **LOGGED, **by_source))
    sink.write(Record(kind="eval", step=3, loss=2.25, eval_s=1.0, **LOGGED, **by_source))
    lines = file.getvalue().splitlines()
    for kind in ("step ", "eval "):
        (first,) = (number for number, line in enumerate(lines) if line.startswith(kind))
        found = "  ".join([lines[first], *itertools.takewhile(lambda line: line[0] == " ", lines[first + 1 :])])
        for text in ("accuracy 0.625", "margin 0.01235", "reward_chosen -1.5", "reward_rejected -1.235e+04", "empty -"):
            assert text in found
        assert "web" not in found
        assert "eval_s" not in found
    assert columns is None or max(map(len, lines)) <= columns
    assert columns is not None or len(lines) == 2


def test_logged_values_named_like_epochs_are_on_the_console() -> None:
    """Only those of the data's sources are not, also in evaluations on other data, whose records lack their losses."""
    file = StringIO()
    sink = ConsoleWriter(10, PlainScreen(file), sources=["web"])
    sink.write(Record(**TRAIN, epoch_of_curriculum=2.0, epoch=0.5))
    sink.write(Record(kind="eval", step=3, loss=2.25, eval_s=1.0, epoch_of_curriculum=3.0, epoch_web=0.5))
    train, evaluation = file.getvalue().splitlines()
    assert "epoch_of_curriculum 2" in train
    assert "epoch_of_curriculum 3" in evaluation
    assert "web" not in evaluation
    assert "epoch 0.5" not in train


def test_remaining_time_changes_smoothly() -> None:
    file = StringIO()
    sink = ConsoleWriter(103, PlainScreen(file))
    sink.write(Record(**{**TRAIN, "step_s": 1.0}))
    sink.write(Record(**{**TRAIN, "step_s": 2.0}))
    assert [line.rpartition("eta ")[2] for line in file.getvalue().splitlines()] == ["1m40s", "2m10s"]


@pytest.mark.slow
def test_console_text_is_stored(tmp_path: Path) -> None:
    """Over all attempts; if storage fails, only the text is lost."""
    for steps in (2, 4):
        fit(tmp_path, f"train.steps={steps}", "log.every=1")
    kept = (tmp_path / "console.log").read_text()
    assert [f"step      {step}/" in kept for step in (1, 2, 3, 4)] == [True] * 4
    assert kept.count("finished ") == 2
    assert f"next: python -m trainer.report {tmp_path}" in kept
    assert "\x1b" not in kept
    (tmp_path / "a folder").mkdir()
    stream = LogFile(tmp_path / "a folder")
    assert stream.write("dropped") == 7
    stream.close()


def test_rich_on_a_terminal() -> None:
    text = shown(partial(terminal_of, color_system="truecolor"))
    for part in ("meshtrainer", "mine", "shard [2]", "loss 2.5000", "10/10", "[bold]as it stands[/bold]"):
        assert part in text, part
    assert "\x1b[" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is shown again"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (-1, "0s"),
        (12.4, "12s"),
        (59.6, "1m00s"),
        (200, "3m20s"),
        (3599.7, "1h00m"),
        (7500, "2h05m"),
        (360000, "100h00m"),
    ],
)
def test_readable_duration(seconds: float, text: str) -> None:
    assert readable_duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (7, "7"),
        (999, "999"),
        (999.7, "1 k"),
        (1000, "1 k"),
        (43100, "43.1 k"),
        (999_999, "1 M"),
        (1.24e9, "1.24 B"),
        (405e9, "405 B"),
        (15e12, "15 T"),
    ],
)
def test_readable_count(count: float, text: str) -> None:
    assert readable_count(count) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (3 * 2**40, "3.00 TiB")])
def test_readable_bytes(count: float, text: str) -> None:
    assert readable_bytes(count) == text


# ---------------------------------------------------------------------------------------------------------------
# status.json


class WatchesStatus(Trainer):
    """Reads its status while it runs."""

    def on_step(self, record: Record) -> None:
        self.status = json.loads((self.folder.path / "status.json").read_text())


def test_status(tmp_path: Path) -> None:
    trainer = WatchesStatus(tiny_config(tmp_path, "train.steps=2"))
    trainer.fit()
    trainer.close()
    assert trainer.status == {"state": "running", "exit_code": None, "step": 0, "reason": ""}
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["state"], status["exit_code"], status["step"]) == ("finished", 0, 2)
    assert type(status["reason"]) is str


def test_status_is_complete_whenever_it_is_read(tmp_path: Path) -> None:
    folder = RunFolder(tiny_config(tmp_path), is_main=True)
    folder.write_status("running", None, 0, "")
    assert not (tmp_path / "status.json").exists(), "of a folder that it does not own"
    folder.acquire()
    folder.write_status("running", None, 0, "")
    done = threading.Event()

    def write() -> None:
        for step in range(200):
            folder.write_status("running", None, step, "x" * 10_000 * (step % 2))
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    num_read = 0
    while not done.is_set():
        assert json.loads((tmp_path / "status.json").read_text())["state"] == "running"
        num_read += 1
    writer.join()
    assert num_read > 10
    folder.release()
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "status.json"
    write_atomically(path, "old")

    def full_disk(descriptor: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="no space"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"], "and nothing beside it"


@pytest.mark.parametrize("name", ["replace", "fsync"])
def test_failed_status_write_is_retried(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If storage is unavailable just as the run ends, `running` would stay there forever."""
    monkeypatch.setattr(rundir, "_RETRY_PAUSES_S", (0.0, 0.0))
    folder = RunFolder(tiny_config(tmp_path / "run"), is_main=True)
    folder.acquire()
    folder.write_status("running", None, 0, "")
    works, left = getattr(os, name), [2]

    def away(*arguments: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(18, "Invalid cross-device link")
        return works(*arguments)

    monkeypatch.setattr(os, name, away)
    folder.write_status("finished", 0, 5, "train.steps reached")
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "finished"
    left[0] = 1000
    folder.write_status("failed", 1, 5, "later")
    assert "cannot be written" in capsys.readouterr().err
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "finished"
    monkeypatch.undo()
    folder.release()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["status.json"]


def test_blocked_reader_of_the_output_delays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NonBlockingStream, "CLOSE_S", 0.0)
    ours, theirs = os.pipe()
    stream = os.fdopen(theirs, "w")
    os.set_blocking(theirs, False)
    with contextlib.suppress(BlockingIOError):
        while os.write(theirs, bytes(4096)):
            pass
    os.set_blocking(theirs, True)
    writer = threading.Thread(target=lambda: NonBlockingStream(stream).write("a line\n"), daemon=True)
    writer.start()
    writer.join(20)
    waits = writer.is_alive()
    os.close(ours)  # later writes fail because there is no reader
    with contextlib.suppress(BrokenPipeError):
        stream.close()  # what it could not write may still be in its buffer
    assert not waits


@pytest.mark.slow
def test_memory_of_the_parent_process_does_not_count() -> None:
    held = torch.ones(200 << 20, dtype=torch.uint8)
    code = (
        "import torch; from trainer.metrics.step_metrics import peak_memory_gib; "
        "print(peak_memory_gib(torch.device('cpu')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, check=True)
    here = peak_memory_gib(held.device)
    assert 0.1 < float(done.stdout) < here - 0.1


def test_ascii_stream_gets_replacement_characters(capsys: pytest.CaptureFixture[str]) -> None:
    kept = io.BytesIO()
    stream = NonBlockingStream(io.TextIOWrapper(kept, "ascii"))
    stream.write("sample né\n")
    stream.write("the next line\n")
    assert kept.getvalue() == b"sample n?\nthe next line\n"
    assert capsys.readouterr().err == "", "the stream has not gone"
