"""The outputs of a run: metrics.jsonl, the console, console.log and status.json."""

from __future__ import annotations

import copy
import fcntl
import io
import json
import math
import os
import pickle
import re
import shutil
import socket
import struct
import sys
import termios
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.cases import in_campaign
from tests.helpers.launch import Run, fork, run, run_module, tiny
from tests.helpers.runs import EVALUATED_STEPS, SAVED_STEPS, STEPS, SharedRun
from tests.helpers.tiny import BATCH, SEQ_LEN, fit, lines, tiny_config
from trainer import Trainer
from trainer.metrics.record import Record

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


# ---------------------------------------------------------------------------------------------------------------
# metrics.jsonl


@pytest.mark.slow
def test_fields(one: SharedRun, two: SharedRun) -> None:
    for kind, fields in FIELDS.items():
        found = [*one.of_kind(kind), *two.of_kind(kind)]
        assert found
        for line in found:
            for field, kinds in fields.items():
                assert type(line[field]) in kinds, (field, line)


@pytest.mark.slow
def test_values_of_the_fields(one: SharedRun) -> None:
    (start,), (end,) = one.of_kind("start"), one.of_kind("end")
    assert (start["world_size"], start["mesh"], start["device"]) == (1, {"replicate": 1, "shard": 1}, "cpu")
    assert (start["torch"], start["resumed_step"]) == (torch.__version__, None)
    assert one.train("step") == list(range(1, STEPS + 1))
    assert [line["step"] for line in one.of_kind("eval")] == list(EVALUATED_STEPS)
    assert [line["step"] for line in one.of_kind("checkpoint")] == list(SAVED_STEPS)
    assert one.train("mfu") == [None] * STEPS, "nobody knows a CPU's peak"
    assert all(0 <= line["data_s"] <= line["step_s"] for line in one.of_kind("train"))
    assert all(line["blocked_s"] <= line["total_s"] for line in one.of_kind("checkpoint"))
    weights_and_moments = 3 * 4 * start["parameters"]
    assert min(line["bytes"] for line in one.of_kind("checkpoint")) > weights_and_moments
    assert all(0 < memory < 64 for memory in one.train("peak_memory_gib"))
    assert (end["step"], end["reason"]) == (STEPS, "finished")
    assert 0 < end["goodput"] <= 1
    assert (one.metrics[0], one.metrics[-1]) == (start, end)
    # A byte is a token here, and the end of each file is one more target than there are bytes.
    for line in one.of_kind("eval"):
        assert line["bits_per_byte"] == pytest.approx(line["loss"] / math.log(2), rel=0.01)


@pytest.mark.slow
def test_rates_and_bytes_are_totals_of_all_ranks(one: SharedRun, two: SharedRun) -> None:
    assert two.train("tokens") == one.train("tokens")
    before = 0
    for line in two.of_kind("train"):
        assert line["tokens_per_s"] * line["step_s"] == pytest.approx(line["tokens"] - before), "targets of one step"
        before = line["tokens"]
    for line in two.of_kind("checkpoint"):
        folder = two.checkpoints / f"step_{line['step']:08d}"
        files = [path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json"]
        assert line["bytes"] == sum(path.stat().st_size for path in files)


EVERY_3 = ["train.steps=8", "log.every=3", "eval.every=3", "checkpoint.every=3", "checkpoint.keep_last=0"]
Resumed = tuple[Path, list[dict[str, Any]], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Resumed:
    """A run of 8 steps, then again from its checkpoint at 3, as after a crash that left half a line."""
    folder = tmp_path_factory.mktemp("metrics") / "run"
    before = fit(folder, *EVERY_3)
    for step in (6, 8):
        shutil.rmtree(folder / "checkpoints" / f"step_{step:08d}")
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "step": 9, "lo')
    return folder, before, fit(folder, *EVERY_3)


def test_records_of_the_first_every_nth_and_the_last_step(resumed: Resumed) -> None:
    assert of("train", resumed[1], "step") == [1, 3, 6, 8]
    assert of("eval", resumed[1], "step") == [3, 6, 8]
    assert of("train", resumed[1], "tokens") == [step * BATCH * SEQ_LEN for step in (1, 3, 6, 8)]


def test_resume_replaces_records_after_its_checkpoint(resumed: Resumed) -> None:
    folder, before, after = resumed
    assert of("start", after, "resumed_step") == [None, 3]
    assert of("end", after, "reason") == ["finished", "finished"], "attempts are kept"
    assert of("train", after, "step") == [1, 3, 6, 8], "no step twice"
    assert of("eval", after, "step") == [3, 6, 8]
    kinds = [line["kind"] for line in after]
    second = len(kinds) - kinds[::-1].index("start") - 1
    assert [line["step"] for line in after[second:] if line["kind"] == "train"] == [6, 8]
    for field in ("loss", "grad_norm", "lr", "tokens"):
        assert of("train", after, field) == of("train", before, field), field
    kept = (folder / "metrics_superseded.jsonl").read_text()
    replaced = [line for line in before if line["kind"] in ("train", "eval") and line["step"] > 3]
    assert all(json.dumps(line) in kept for line in replaced), "nothing is lost"


@pytest.mark.parametrize(
    "debris",
    [
        b'{"kind": "train", "note": "\xc3',
        b'{"kind": "train", "loss": 2.5}\n{"kind": "norms", "step": "7"}\n{"kind": "sample", "step": null}\n'
        b'{"kind": "eval", "step": true}\n{"kind": "checkpoint"}\n{"kind": "train", "step": 1e400}\n'
        b'{"kind": ["train"], "step": [3]}\n{"note": 1}\n[1]\nnull\n{"kind": "train", "step": 1' + 400 * b"0" + b"}\n",
        b'{"kind": "note", "time": 1' + 400 * b"0" + b"}\n" + 100_000 * b"[",
        *(
            pytest.param(debris, marks=pytest.mark.campaign)
            for debris in (b'{"kind": "train", "step": 2', b"{", b"\n\n")
        ),
    ],
)
def test_debris_does_not_prevent_a_restart(debris: bytes, resumed: Resumed, tmp_path: Path) -> None:
    folder, _, before = resumed
    shutil.copytree(folder, tmp_path / "run")
    with open(tmp_path / "run" / "metrics.jsonl", "ab") as file:
        file.write(debris)
    after = fit(tmp_path / "run", *EVERY_3, "train.steps=9")
    assert of("train", after, "step") == [1, 3, 6, 8, 9]
    assert after[: len(before)] == before


class NeverFinite(Trainer):
    """Has a loss that is not a number in its second step."""

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return super().loss(batch) * (math.nan if self.state.step == 1 else 1.0)


def test_record_of_a_non_finite_step(tmp_path: Path) -> None:
    found = fit(tmp_path, "train.steps=4", kind=NeverFinite)
    assert of("train", found, "step") == [1, 2, 3, 4], "a skipped step advances the step"
    for field in ("loss", "grad_norm"):
        assert [value is None for value in of("train", found, field)] == [False, True, False, False]
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()


def test_steps_yields_all_fields_also_between_records(tmp_path: Path) -> None:
    trainer = Trainer(tiny_config(tmp_path, "train.steps=5", "log.every=100"))
    records = []
    for record in trainer.steps():
        written = len(lines(tmp_path)) if (tmp_path / "metrics.jsonl").exists() else 0
        assert written == 2, "each line is on the disk at once: start, step 1"
        records.append(record)
        if record.step == 4:
            break
    records += list(trainer.steps())
    trainer.close()
    assert [record.step for record in records] == [1, 2, 3, 4, 5]
    for record in records:
        assert set(record) >= {"kind", *FIELDS["train"]}
        for field, kinds in FIELDS["train"].items():
            assert type(record[field]) in kinds
            assert record[field] is getattr(record, field)
    assert len({record.loss for record in records}) == 5
    assert of("train", lines(tmp_path), "step") == [1, 5]
    with pytest.raises(AttributeError):
        _ = records[0].los


def test_a_record_is_copied_and_pickled_with_all_its_fields_read() -> None:
    """A field that is read late, because it is on the device, is read once."""
    calls: list[str] = []
    record = Record(kind="train", loss=lambda: [2.5, calls.append("loss")][0])
    assert dict(pickle.loads(pickle.dumps(record))) == {"kind": "train", "loss": 2.5}
    assert copy.copy(record).loss == record.loss == 2.5
    assert calls == ["loss"]


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


class Stumbling(Trainer):
    """Its fourth step has no finite loss."""

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return super().loss(batch) * (math.nan if self.state.step == 3 else 1.0)


def test_mean_loss_is_over_the_steps_since_the_previous_line(tmp_path: Path) -> None:
    trainer = Stumbling(tiny_config(tmp_path / "run", "log.every=3", "train.steps=7"))
    losses, means = {}, {}
    for record in trainer.steps():
        losses[record.step], means[record.step] = record.loss, record.mean_loss
    trainer.close()
    since = {1: [1], 2: [2], 3: [2, 3], 4: [], 5: [5], 6: [5, 6], 7: [7]}  # 4 was skipped
    for step, steps in since.items():
        expected = sum(losses[each] for each in steps) / len(steps) if steps else math.nan
        assert means[step] == pytest.approx(expected, nan_ok=True)
    written = {line["step"]: line for line in lines(tmp_path / "run") if line["kind"] == "train"}
    assert written[6]["mean_loss"] == means[6] != written[6]["loss"] == losses[6]


# ---------------------------------------------------------------------------------------------------------------
# The console


@pytest.mark.slow
def test_plain_lines_without_a_terminal(one: SharedRun) -> None:
    assert "\x1b" not in one.out
    assert "\r" not in one.out
    printed = one.out.splitlines()
    for line in one.of_kind("train"):
        (found,) = (text for text in printed if re.match(rf"step +{line['step']}/{STEPS} ", text))
        assert f"loss {line['loss']:.4f}" in found
        assert f"lr {line['lr']:.2e}" in found
    for line in one.of_kind("eval"):
        (found,) = (text for text in printed if re.match(rf"eval +step +{line['step']} ", text))
        assert f"{line['loss']:.4f}" in found
        assert f"{line['bits_per_byte']:.4f}" in found
    assert sum(text.startswith("saved ") for text in printed) == len(SAVED_STEPS)
    assert one.err == ""
    assert stored(one.folder) == one.out


def stored(folder: Path) -> str:
    """Return what console.log has, without the line with the time at which each attempt began."""
    text = (folder / "console.log").read_text()
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("-- "))


@pytest.mark.slow
def test_console_text_of_all_attempts_is_stored(one: SharedRun, tmp_path: Path) -> None:
    again = run(one.copy_to(tmp_path / "run", up_to=8), *one.overrides)
    assert stored(tmp_path / "run") == one.out + again.out


class Logging(Trainer):
    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self.log("accuracy", 0.625, over=1)
        self.log("margin", -1234.5, over=1)
        return super().loss(batch)


def test_logged_values_are_on_the_console(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = fit(tmp_path, "train.steps=2", "eval.every=2", kind=Logging)
    assert of("train", found, "accuracy") == [0.625] * 2
    printed = [text for text in capsys.readouterr().out.splitlines() if text.startswith(("step ", "eval "))]
    assert len(printed) == 3
    assert all("accuracy 0.625" in text and "margin -" in text for text in printed)


def train_in_a_terminal(slave: str, arguments: Sequence[str]) -> int:
    for name in ("COLUMNS", "LINES"):  # which have precedence over the terminal's size
        os.environ.pop(name, None)
    descriptor = os.open(slave, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(descriptor, number)
    return run_module("trainer.run", arguments)


@pytest.mark.slow
@pytest.mark.parametrize("columns", [40, pytest.param(100, marks=pytest.mark.campaign)])
def test_lines_fit_a_terminal(columns: int, tmp_path: Path) -> None:
    """The least important fields are dropped first; step, loss and remaining time always stay."""
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    seen: list[bytes] = []

    def read() -> None:
        try:
            while data := os.read(master, 1 << 16):
                seen.append(data)
        except OSError:  # the other side is closed
            pass

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    settings = ["recipe=llama_small", *tiny("train.steps=3", "eval.every=3", "eval.steps=1"), f"run.dir={tmp_path}"]
    ended = fork(train_in_a_terminal, [os.ttyname(slave), settings], tmp_path, variables={"TERM": "xterm"})
    ended.wait()
    os.close(slave)
    reader.join()
    os.close(master)
    text = b"".join(seen).decode()
    assert ended.code == 0, text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is shown again"
    shown = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text).replace("\r", "\n").splitlines()]
    own = [line for line in shown if re.match("(step|eval|saved) ", line)]
    assert max(map(len, own)) <= columns
    for line in ended.of_kind("train"):
        assert any(f"{line['step']}/3" in text and f"loss {line['loss']:.4f}" in text for text in shown)
    assert any("grad " in text for text in shown) == (columns == 100)


def train_into(kind: str, arguments: Sequence[str]) -> int:
    """Train with a stdout that cannot be written to: a pipe whose reader has exited, or a closed descriptor."""
    if kind == "pipe":
        theirs, ours = os.pipe()
        os.close(theirs)
        os.dup2(ours, 1)
    else:
        os.close(1)
    return run_module("trainer.run", arguments)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pipe", *in_campaign("closed")])
def test_a_reader_of_the_output_that_exits_changes_nothing(kind: str, tmp_path: Path) -> None:
    settings = ["recipe=llama_small", *tiny("train.steps=3"), f"run.dir={tmp_path / 'run'}"]
    ended: Run = fork(train_into, [kind, settings], tmp_path / "run").wait()
    assert ended.code == 0
    assert ended.train("step") == [1, 2, 3]
    assert ended.status["state"] == "finished"
    assert "step      3/3" in (tmp_path / "run" / "console.log").read_text()


def test_ascii_stream_gets_replacement_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(kept, "ascii"))
    fit(tmp_path, "train.steps=2", "run.name=né")
    assert b"n?" in kept.getvalue()
    assert b"step      2/2" in kept.getvalue(), "the stream has not gone"


# ---------------------------------------------------------------------------------------------------------------
# status.json, Prometheus


class WatchesStatus(Trainer):
    """Reads its status while it runs."""

    def on_step(self, record: Record) -> None:
        self.status = json.loads((Path(self.config.run.dir) / "status.json").read_text())


def test_status(tmp_path: Path) -> None:
    trainer = WatchesStatus(tiny_config(tmp_path, "train.steps=2"))
    trainer.fit()
    trainer.close()
    assert trainer.status == {"state": "running", "exit_code": None, "step": 0, "reason": ""}
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["state"], status["exit_code"], status["step"]) == ("finished", 0, 2)
    assert type(status["reason"]) is str


def test_status_is_written_when_storage_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If storage is unavailable just as the run ends, `running` would stay there forever."""
    works, failed = os.replace, []

    def away(source: Any, target: Any, **options: Any) -> None:
        if str(target).endswith("status.json") and '"finished"' in Path(source).read_text() and len(failed) < 2:
            failed.append(target)
            raise OSError(5, "Input/output error")
        works(source, target, **options)

    monkeypatch.setattr(os, "replace", away)
    fit(tmp_path, "train.steps=1")
    assert len(failed) == 2
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "finished"
    assert not [path.name for path in tmp_path.iterdir() if "status" in path.name and path.name != "status.json"]


def test_prometheus_can_scrape_a_run(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    pages: list[dict[str, float]] = []

    class Scraped(NeverFinite):
        def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            self.log("top-1 é", 0.5, over=1)
            return super().loss(batch)

        def on_step(self, record: Record) -> None:
            (port,) = re.findall(r"Prometheus: http://\S+:(\d+)", (tmp_path / "console.log").read_text())
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
                found = re.findall(r'^(\w+)\{run="my run"\} (\S+)$', answer.read().decode(), re.MULTILINE)
            pages.append({name: float(value) for name, value in found})

    settings = ["train.steps=3", "eval.every=2", "log.prometheus=0", "run.name=my run"]
    written = fit(tmp_path, *settings, kind=Scraped)
    first, second, third = pages
    train = [line for line in written if line["kind"] == "train"]
    for page, line in zip(pages, train, strict=True):
        for field in ("step", "lr", "tokens", "time", "skipped"):
            assert page[f"meshtrainer_train_{field}"] == line[field]
        assert page["meshtrainer_train_top_1__"] == 0.5
    assert (first["meshtrainer_train_loss"], third["meshtrainer_train_loss"]) == (train[0]["loss"], train[2]["loss"])
    assert math.isnan(second["meshtrainer_train_loss"]), "not that of an earlier step"
    assert third["meshtrainer_eval_loss"] == next(line["loss"] for line in written if line["kind"] == "eval")
    assert 0 < first["meshtrainer_end_update_s"] < third["meshtrainer_end_update_s"]


def test_port_that_is_taken_is_one_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("prometheus_client")
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        found = fit(tmp_path, "train.steps=1", f"log.prometheus={port}")
    assert of("end", found, "reason") == ["finished"]
    assert capsys.readouterr().err.count(f"warning: log.prometheus={port}: ") == 1
