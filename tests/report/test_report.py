"""Goodput over the attempts of a run, and the report page, for finished, running and killed runs."""

from __future__ import annotations

import html
import http.client
import json
import math
import os
import threading
import time
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.faults import Fault, start
from trainer import UserError
from trainer.distributed.environment import NPROC_VARIABLE, START_TIME, record_start_time, take_start_time
from trainer.metrics.goodput import Goodput, TimeLedger, compute_goodput
from trainer.metrics.record import Record
from trainer.metrics.writers import JsonLines
from trainer.report.__main__ import command_line
from trainer.report.charts import NUM_COLUMNS, draw_png, reduce_to_columns
from trainer.report.history import NUM_POINTS, PANELS, downsample, read_run
from trainer.report.live import Server, watch
from trainer.report.page import render_comparison, render_page

# ---------------------------------------------------------------------------------------------------------------
# Generated runs


def start_line(time: float, resumed_step: int | None = None, **fields: Any) -> dict[str, Any]:
    shape = {"world_size": 2, "mesh": {"replicate": 1, "shard": 2}, "parameters": 1234, "torch": "2.13.0"}
    return {"kind": "start", **shape, "device": "cpu", "resumed_step": resumed_step, "time": time} | fields


def train_line(step: int, time: float = 0.0, **fields: Any) -> dict[str, Any]:
    rates = {"lr": 1e-3, "tokens": 64 * step, "tokens_per_s": 64.0, "step_s": 1.0, "data_s": 0.1, "mfu": None}
    own = {"kind": "train", "step": step, "loss": 5.0 / step, "grad_norm": 1.0, "peak_memory_gib": 0.5, "skipped": 0}
    return own | rates | ({"time": time} if time else {}) | fields


def write(folder: Path, lines: Sequence[dict[str, Any]], state: str | None = None, config: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if state:
        status = {"state": state, "exit_code": None, "step": 0, "reason": ""}
        (folder / "status.json").write_text(json.dumps(status))
    if config:
        (folder / "config.yaml").write_text(config)
    return folder


ONE_ATTEMPT = [
    start_line(1010.0, started=1000.0, load_s=4.0),
    *(train_line(step, 1010.0 + step) for step in (1, 2, 3, 4)),
    {"kind": "eval", "step": 4, "loss": 2.0, "eval_s": 3.0, "time": 1017.0},
    {"kind": "checkpoint", "step": 4, "blocked_s": 0.5, "total_s": 2.0, "bytes": 9, "time": 1018.0},
    train_line(6, 1020.0),
]
"""6 steps of a second each: 20 s in all, of it 6 starting, 4 loading, 3 evaluating, 0.5 saving, 0.5 unnamed."""


# ---------------------------------------------------------------------------------------------------------------
# Goodput


def test_division_of_the_time_of_one_attempt() -> None:
    found = compute_goodput(ONE_ATTEMPT)
    assert (found.start_s, found.load_s, found.eval_s, found.save_s) == (6.0, 4.0, 3.0, 0.5)
    assert (found.wall_s, found.update_s, found.lost_s, found.between_s) == (20.0, 6.0, 0.0, 0.0)
    assert (found.other_s, found.fraction, found.restarts, found.lost_steps) == (0.5, 0.3, 0, 0)


def resume(folder: Path, resumed_step: int, started: float) -> JsonLines:
    """Change the file as a resumed run does, and write its start record."""
    sink = JsonLines(folder / "metrics.jsonl", resumed_step)
    before = sink.earlier_goodput.to_state()
    fields = {"started": started, "load_s": 1.0, "lost_steps": sink.lost_steps, "before": before}
    sink.write(Record(**start_line(started + 5.0, resumed_step, **fields)))
    return sink


def test_steps_lost_in_a_crash_are_no_goodput(tmp_path: Path) -> None:
    folder = write(tmp_path, ONE_ATTEMPT)
    sink = resume(folder, 4, started=1030.0)
    assert sink.lost_steps == 2
    sink.write(Record(**train_line(6, 1037.0)))
    found = compute_goodput([json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()])
    assert (found.lost_steps, found.lost_s, found.restarts) == (2, 2.0, 1)
    assert (found.update_s, found.between_s, found.wall_s) == (6.0, 10.0, 37.0)
    assert (found.load_s, found.start_s) == (5.0, 10.0)


def test_repeated_loss_falls_back_to_older_checkpoints(tmp_path: Path) -> None:
    folder = write(tmp_path, ONE_ATTEMPT)
    sink = resume(folder, 4, started=1030.0)  # 5 and 6 are lost
    sink.write(Record(**train_line(7, 1040.0)))
    sink = resume(folder, 4, started=1050.0)  # 5, 6 and 7
    sink = resume(folder, 2, started=1060.0)  # the checkpoint at 4 was damaged: 3 and 4, whose lines were still there
    assert sink.lost_steps == 2
    found = compute_goodput([json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()])
    assert (found.lost_steps, found.lost_s, found.update_s, found.restarts) == (2 + 3 + 2, 7.0, 2.0, 3)
    attempts = read_run(folder).attempts
    assert [attempt.last_step for attempt in attempts] == [6, 7, 4, 2]
    assert [attempt.lost_steps for attempt in attempts] == [2, 3, 2, 0]
    assert [attempt.outcome for attempt in attempts] == ["killed"] * 4


@pytest.mark.parametrize("resumed_step", range(7))
def test_partly_lost_interval_counts_in_proportion(resumed_step: int) -> None:
    ledger = TimeLedger(resumed_step)
    for line in [start_line(1.0), train_line(1, 2.0), train_line(6, 7.0)]:
        ledger.add(line)
    total = ledger.total()
    assert (total.update_s, total.lost_s) == (resumed_step, 6 - resumed_step)
    assert total.lost_steps == 6 - resumed_step


def test_stop_on_request_and_resume_from_a_different_run_lose_nothing(tmp_path: Path) -> None:
    for resumed_step in (6, 500):
        assert resume(write(tmp_path, ONE_ATTEMPT), resumed_step, 1030.0).lost_steps == 0


def test_time_after_a_finished_attempt_does_not_count() -> None:
    end = {"kind": "end", "step": 6, "reason": "finished", "time": 1021.0}
    lines = [*ONE_ATTEMPT, end, start_line(9010.0, 6, started=9000.0, load_s=1.0), train_line(7, 9011.0)]
    found = compute_goodput(lines)
    assert (found.between_s, found.wall_s) == (0.0, 21.0 + 11.0)
    lines[len(ONE_ATTEMPT)] = end | {"reason": "stopped"}
    assert compute_goodput(lines).between_s == 9000.0 - 1021.0, "it waited to go on"


def test_skipped_steps_do_not_count() -> None:
    lines = [
        start_line(1.0),
        train_line(2, 3.0, skipped=1),
        train_line(4, 5.0, skipped=1),
        train_line(6, 7.0, skipped=3),
    ]
    found = compute_goodput(lines)
    assert (found.update_s, found.lost_s) == (3.0, 3.0)


def test_files_without_times_and_with_strange_values() -> None:
    old = [{k: v for k, v in line.items() if k not in ("time", "started", "load_s", "eval_s")} for line in ONE_ATTEMPT]
    found = compute_goodput(old)
    assert (found.fraction, found.update_s, found.restarts) == (None, 6.0, 0)
    strange = [{}, {"kind": "train"}, {"kind": "train", "step": None, "step_s": "x"}, {"kind": "start", "before": 3}]
    assert compute_goodput(strange).fraction is None
    assert compute_goodput([start_line(100.0, started=90.0, before={"later_field": 1, "wall_s": 5.0})]).wall_s == 15.0


def test_clock_that_goes_back_gives_no_negative_times() -> None:
    lines = [start_line(1000.0, started=990.0), train_line(1, 900.0), start_line(950.0, 1, started=940.0)]
    found = compute_goodput(lines)
    assert all(value >= 0 for value in vars(found).values() if not isinstance(value, str))
    assert found.fraction is not None
    assert found.fraction <= 1


def test_start_time_is_that_of_the_command_and_counted_once() -> None:
    env: dict[str, str] = {}
    record_start_time(12.5, env)
    assert (take_start_time(env), take_start_time(env)) == (12.5, None)
    worker = {NPROC_VARIABLE: "2", START_TIME: "7.25"}
    record_start_time(12.5, worker)
    assert take_start_time(worker) == 7.25, "a worker began with the command that started it"


@pytest.mark.slow
def test_a_run_that_is_killed_and_resumed(tmp_path: Path) -> None:
    """Killed after step 5 with a checkpoint at 3: steps 4 and 5 are lost, in the file and in the report."""
    folder = tmp_path / "run"
    arguments = ["recipe=llama_small", "model.name=tests.helpers.custom_recipes:mlp_faulty", "data.source=synthetic"]
    arguments += ["data.seq_len=16", "train.global_batch_size=4", "train.micro_batch_size=1", "train.steps=8"]
    arguments += ["eval.every=4", "eval.steps=1", "log.every=1", "log.sample_tokens=0", "run.threads=1"]
    arguments += ["checkpoint.every=3", "checkpoint.mode=sync"]
    assert start(folder, *arguments, fault=Fault(kill="all", at_step=5)).wait() == [-9]
    page = render_page(read_run(folder))
    assert ">killed</span>" in page, "status.json still says running"
    killed_at = time.time()
    time.sleep(1.0)
    resumed_at = time.time()
    assert start(folder, *arguments, fault=Fault(at_step=-1)).wait() == [0]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    end, (first, second) = lines[-1], [line for line in lines if line["kind"] == "start"]
    assert (first["lost_steps"], first["before"]) == (0, None)
    assert (second["resumed_step"], second["lost_steps"], end["lost_steps"], end["restarts"]) == (3, 2, 2, 1)
    assert all(abs(line["time"] - resumed_at) < 60 for line in lines)
    assert first["started"] <= first["time"] <= killed_at <= resumed_at <= second["started"] <= second["time"]
    assert 0 < second["load_s"] <= second["time"] - second["started"]
    assert end["between_s"] >= 1.0
    replaced = [json.loads(line) for line in (folder / "metrics_superseded.jsonl").read_text().splitlines()]
    assert end["lost_s"] == pytest.approx(sum(line["step_s"] for line in replaced if line["kind"] == "train"))
    before, behind = (line["time"] - first["started"] for line in lines[-2:])
    assert before - 0.1 < end["wall_s"] < behind + 0.1, "between the last two lines, by another clock"
    parts = [
        end[name] for name in ("update_s", "lost_s", "start_s", "load_s", "save_s", "eval_s", "between_s", "other_s")
    ]
    assert sum(parts) == pytest.approx(end["wall_s"], rel=1e-6)
    assert all(part > 0 for part in parts)
    assert end["goodput_total"] == pytest.approx(end["update_s"] / end["wall_s"])
    again = compute_goodput(lines)
    assert again.update_s == pytest.approx(end["update_s"])
    run = read_run(folder)
    assert (run.state, run.name, run.num_steps, run.last_step) == ("finished", "llama_small", 8, 8)
    found = [(attempt.resumed_step, attempt.last_step, attempt.lost_steps, attempt.outcome) for attempt in run.attempts]
    assert found == [(0, 5, 2, "killed"), (3, 8, 0, "finished")]
    assert run.checkpoint_steps.tolist() == [3, 6, 8]
    assert command_line([str(folder)]) == 0


# ---------------------------------------------------------------------------------------------------------------
# The page


class Page(HTMLParser):
    """Collects tags and their references, and checks that each tag is closed in order."""

    VOID = {"meta", "input", "br"}
    CDATA_CONTENT_ELEMENTS = ("script", "style")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.refers: list[str] = []
        self.text = ""
        self.feed(html)
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.refers += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "data")]

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def report(folder: Path, *arguments: str) -> str:
    assert command_line([str(folder), *arguments]) == 0
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")
    return (folder / "report.html").read_text()


def data_in(html: str) -> dict[str, Any]:
    """Return the data that the page's script draws."""
    text = html.partition('<script type="application/json" id="data">')[2].partition("</script>")[0]
    found: dict[str, Any] = json.loads(text)
    return found


def test_page_needs_no_other_file(tmp_path: Path) -> None:
    html = report(write(tmp_path, ONE_ATTEMPT, "finished"))
    page = Page(html)
    assert page.tags.count("script") == 2
    assert not {"link", "img", "iframe", "object"} & set(page.tags)
    assert page.refers == []
    assert "@import" not in html
    assert "http" not in html.replace("http://www.w3.org/2000/svg", "")
    assert "30.0%" in page.text
    assert "1.23 k parameters" in page.text


def test_charts_of_the_page(tmp_path: Path) -> None:
    data = data_in(report(write(tmp_path, ONE_ATTEMPT, "finished")))
    assert [panel["title"] for panel in data["panels"]] == [panel.title for panel in PANELS]
    (run,) = data["runs"]
    assert run["train"]["step"] == [1, 2, 3, 4, 6]
    assert run["train"]["tokens"] == [64, 128, 192, 256, 384]
    assert run["train"]["hours"] == pytest.approx([11 / 3600, 12 / 3600, 13 / 3600, 14 / 3600, 20 / 3600], rel=1e-4)
    assert (run["evals"]["loss"], run["evals"]["tokens"], run["checkpoint_steps"]) == ([2.0], [256], [4])
    assert data["refresh_s"] == 0, "it is finished"


def test_logged_values_have_charts_and_a_table(tmp_path: Path) -> None:
    """In training and in evaluations, also if they start later; and compared with a run that has none."""
    lines = [
        start_line(0.0),
        train_line(1, mean_loss=2.0, skipped=0),
        train_line(2, accuracy=0.5, margin=None),
        train_line(3, accuracy=0.75, margin=0.125),
        {"kind": "eval", "step": 3, "loss": 2.0, "accuracy": 0.25, "eval_s": 1.0},
    ]
    run = read_run(write(tmp_path / "a", lines, "finished"))
    assert run.logged == ["accuracy", "margin"]
    page = render_page(run)
    assert "accuracy0.750.25margin0.125" in Page(page).text
    data = data_in(page)
    panel = next(panel for panel in data["panels"] if panel["title"] == "accuracy")
    assert [(line["column"], line["table"]) for line in panel["lines"]] == [
        ("accuracy", "train"),
        ("accuracy", "evals"),
    ]
    assert data["runs"][0]["train"]["accuracy"] == [None, 0.5, 0.75]
    assert data["runs"][0]["evals"]["accuracy"] == [0.25]
    plain = read_run(write(tmp_path / "b", ONE_ATTEMPT, "finished"))
    compared = data_in(render_comparison([plain, run]))
    assert [panel["title"] for panel in compared["panels"]][1:3] == ["accuracy", "margin"]
    assert draw_png([plain, run], "two", "")[:4] == draw_png([run], "one", "")[:4] == b"\x89PNG"


def test_long_setting_is_collapsed_in_a_comparison(tmp_path: Path) -> None:
    """Such as the config.json of a transformers model: its column would push the others off the page."""
    short = "model:\n  name: llama\n"
    long = "model:\n  name: hf\n  config: {" + ", ".join(f"key_{n}: {n}" for n in range(200)) + "}\n"
    runs = [write(tmp_path / str(n), ONE_ATTEMPT, "finished", text) for n, text in enumerate([short, long, short])]
    page = render_comparison([read_run(folder) for folder in runs])
    (cell,) = [part for part in page.split("<td") if "<details>" in part]
    summary = cell.partition("<summary>")[2].partition("</summary>")[0]
    assert len(html.unescape(summary)) < 140
    assert "key_199" in cell.partition("</summary>")[2]


EVIL = "<script>alert(1)</script> & \"$x_1$ '"


@pytest.mark.slow
def test_sources_have_a_table_and_a_chart(tmp_path: Path) -> None:
    """For data with several sources: one was added later, and one has no target in the last record."""
    first = train_line(1, loss_web=3.0, epoch_web=0.25)
    last = train_line(2, loss_web=None, epoch_web=0.5, loss_code=1.25, epoch_code=1.5)
    evaluation = {"kind": "eval", "step": 2, "loss": 2.0, "loss_web": 2.5, "loss_code": 1.5}
    run = read_run(write(tmp_path, [start_line(0.0), first, last, evaluation]))
    assert run.sources == ["web", "code"]
    page = Page(render_page(run))
    assert "Sources" in page.text
    assert "web3.00002.50000.50" in page.text
    assert "code1.25001.50001.50" in page.text
    panel = next(panel for panel in data_in(render_page(run))["panels"] if panel["title"] == "loss by source")
    assert [(line["column"], line["table"]) for line in panel["lines"][:2]] == [
        ("loss_web", "train"),
        ("loss_web", "evals"),
    ]
    one = data_in(render_page(read_run(write(tmp_path / "one", ONE_ATTEMPT))))
    assert len(one["panels"]) == len(PANELS)


def test_sources_without_losses_are_known_from_the_configuration(tmp_path: Path) -> None:
    """A distillation, for example, has no loss for each of its rows."""
    lines = [start_line(0.0), train_line(1, loss_web=None, epoch_web=0.25, epoch_mine=3.0)]
    run = read_run(write(tmp_path, lines, config="data: {path: {web: a, code: b}}"))
    assert (run.sources, run.logged) == (["web"], ["epoch_mine"])


def test_text_of_a_run_is_escaped(tmp_path: Path) -> None:
    config = f"run:\n  name: {json.dumps(EVIL)}\nmodel:\n  name: '<b>'\ntrain:\n  steps: 9\n"
    lines = [line | {"device": "<i>", "torch": "<u>", "mesh": {"<s>": 1}} for line in ONE_ATTEMPT[:1]] + ONE_ATTEMPT[1:]
    folder = write(tmp_path, [*lines, {"kind": "end", "step": 6, "reason": "<em>", "time": 1021.0}], config=config)
    (folder / "status.json").write_text(json.dumps({"state": "<strong>", "reason": "<q>"}))
    page = Page(report(folder))
    assert not {"b", "i", "u", "s", "em", "strong", "q"} & (set(page.tags) - {"i", "b"})
    assert page.tags.count("script") == 2
    assert EVIL in page.text
    assert page.tags.count("i") <= 3, "those of the key"
    assert command_line([str(folder), str(folder), "--out", str(tmp_path / "both.html")]) == 0
    both = (tmp_path / "both.html").read_text()
    assert Page(both).tags.count("script") == 2
    assert [run["name"] for run in data_in(both)["runs"]] == [f"{folder} (1)", f"{folder} (2)"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "lines",
    [
        ONE_ATTEMPT[:1],
        ONE_ATTEMPT[:2],
        ONE_ATTEMPT[1:2],
        ONE_ATTEMPT[1:],
        [{"kind": "end", "step": 0, "reason": "failed", "goodput": 0.0}],
        [{"kind": "unheard of"}],
        [start_line(1.0, world_size=None, mesh=None, parameters=None, device=None), train_line(1)],
        [start_line(1.0), train_line(1, 2.0, loss=None, grad_norm=None, step_s=None, tokens_per_s=None)],
        [start_line(1.0), *(train_line(step, loss=None, grad_norm=None) for step in range(1, 9))],
        [start_line(1.0), train_line(1, grad_norm=0.0, loss=0.0, lr=0.0), train_line(2, loss=1e30, grad_norm=1e-30)],
        [start_line(1.0), train_line(1, loss=-3.0, mfu=0.4), train_line(2, loss=3.0, mfu=0.5)],
    ],
    ids=[
        "start",
        "one step",
        "only a step",
        "no start",
        "end",
        "unknown",
        "facts",
        "null",
        "all null",
        "zeros",
        "sign",
    ],
)
def test_nearly_empty_files(lines: list[dict[str, Any]], tmp_path: Path) -> None:
    Page(report(write(tmp_path, lines)))


def test_truncated_last_line_and_debris(tmp_path: Path) -> None:
    write(tmp_path, ONE_ATTEMPT, "running")
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'3\n[]\nnull\n{"kind": "train", "step": 7, "lo\xc3')
    Page(report(tmp_path))
    assert read_run(tmp_path).last_step == 6


@pytest.mark.slow
def test_running_and_killed_runs_are_distinguished(tmp_path: Path) -> None:
    write(tmp_path, ONE_ATTEMPT, "running")
    assert (read_run(tmp_path).state, read_run(tmp_path).attempts[-1].outcome) == ("killed", "killed")
    owner = tmp_path / ".owner.json"
    owner.write_text("{}")
    assert (read_run(tmp_path).state, read_run(tmp_path).attempts[-1].outcome) == ("running", "running")
    os.utime(owner, (time.time() - 3600,) * 2)
    assert read_run(tmp_path).state == "killed"
    report(tmp_path)


def test_watched_page_of_a_run_that_is_killed_says_so(tmp_path: Path) -> None:
    """No file of the run changes when it is killed."""
    write(tmp_path, ONE_ATTEMPT, "running")
    owner = tmp_path / ".owner.json"
    owner.write_text("{}")
    states: list[str] = []
    watch([tmp_path], lambda: states.append(read_run(tmp_path).state), lambda _: os.utime(owner, (1, 1)))
    assert states == ["running", "killed"]


@pytest.mark.slow
def test_attempts_on_different_numbers_of_ranks(tmp_path: Path) -> None:
    lines = list(ONE_ATTEMPT)
    for number, (ranks, reason) in enumerate([(4, "stopped"), (1, "failed"), (16, "finished")]):
        time, step = 1100.0 + 100 * number, 7 + number
        shape = {"world_size": ranks, "mesh": {"replicate": ranks // 4 or 1, "shard": min(4, ranks)}}
        lines += [start_line(time, step - 1, started=time - 5, **shape), train_line(step, time + 1)]
        lines += [{"kind": "end", "step": step, "reason": reason, "goodput": 0.5, "time": time + 2}]
    page = Page(report(write(tmp_path, lines, "finished")))
    for text in ("replicate 1 x shard 4", "replicate 4 x shard 4", "killed", "stopped", "failed", "finished"):
        assert text in page.text
    assert [attempt.outcome for attempt in read_run(tmp_path).attempts] == ["killed", "stopped", "failed", "finished"]


@pytest.mark.slow
def test_runs_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [write(tmp_path / name, ONE_ATTEMPT, "finished") for name in ("one", "two", "_three")]
    write(tmp_path / "two", [start_line(1.0)])
    monkeypatch.chdir(tmp_path)
    assert command_line([str(folder) for folder in folders]) == 0
    assert capsys.readouterr().out.split() == ["comparison.html", "comparison.png"]
    text = Page((tmp_path / "comparison.html").read_text()).text
    assert all(name in text for name in ("one", "two", "_three", "3 runs compared"))
    assert sorted(path.name for path in folders[0].iterdir()) == ["metrics.jsonl", "status.json"]


def test_differences_between_runs_come_first(tmp_path: Path) -> None:
    config = "run:\n  name: mine\n  dir: {0}\noptim:\n  lr: {1}\n  name: adamw\n"
    one = write(tmp_path / "one", ONE_ATTEMPT, "finished", config.format("one", 0.1))
    two = write(tmp_path / "two", ONE_ATTEMPT, "finished", config.format("two", 0.2))
    assert command_line([str(one), str(two), "--out", str(tmp_path / "both.html")]) == 0
    page = Page((tmp_path / "both.html").read_text())
    assert f"What differs{one}{two}optim.lr0.10.2" in page.text, "both are called mine; the folders are not"


@pytest.mark.slow
def test_samples_checkpoints_and_traces(tmp_path: Path) -> None:
    sample = {"kind": "sample", "step": 4, "prompt": "Once <", "text": "upon a time"}
    profile = {"kind": "profile", "step": 4, "trace": "trace_2-3_rank0.json.gz"}
    folder = write(tmp_path / "a run", [*ONE_ATTEMPT, sample, profile], "finished")
    (folder / "checkpoints" / "step_00000004").mkdir(parents=True)
    (folder / "profile").mkdir()
    (folder / "profile" / "trace_2-3_rank0.json.gz").write_bytes(b"trace")
    page = Page(report(folder))
    assert "step 4Once <upon a time" in page.text
    assert page.refers == ["checkpoints/step_00000004", "profile/trace_2-3_rank0.json.gz"]
    assert command_line([str(folder), "--out", str(tmp_path / "page.html")]) == 0
    assert "a%20run/checkpoints/step_00000004" in (tmp_path / "page.html").read_text()


def test_page_is_rewritten_until_its_run_ends(tmp_path: Path) -> None:
    folder = write(tmp_path, ONE_ATTEMPT[:3], "running")
    (folder / ".owner.json").write_text("{}")
    assert data_in(report(folder))["refresh_s"] > 0
    pauses, pages = 0, []

    def pause(seconds: float) -> None:
        nonlocal pauses
        pauses += 1
        if pauses == 2:
            write(folder, ONE_ATTEMPT, "finished")

    watch([folder], lambda: pages.append(render_page(read_run(folder))), pause)
    assert [data_in(page)["runs"][0]["train"]["step"] for page in pages] == [[1, 2], [1, 2, 3, 4, 6]]
    assert pauses == 2, "it wrote nothing while nothing was new"
    assert data_in(pages[-1])["refresh_s"] == 0


def fetch(server: Server, path: str, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, content


def test_page_is_served_to_this_machine_only(tmp_path: Path) -> None:
    profile = {"kind": "profile", "step": 4, "trace": "trace.json.gz"}
    folder = write(tmp_path, [*ONE_ATTEMPT, profile], "finished", config="run: {name: served}\n")
    (folder / "checkpoints" / "step_00000004").mkdir(parents=True)
    (folder / "profile").mkdir()
    (folder / "profile" / "trace.json.gz").write_bytes(b"trace")
    with Server([folder], port=0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert data_in(fetch(server, "/")[1].decode())["runs"][0]["name"] == "served"
        assert fetch(server, "/profile/trace.json.gz") == (200, b"trace")
        page = Page(fetch(server, "/")[1].decode())
        assert str(folder / "checkpoints" / "step_00000004") in page.text
        assert [fetch(server, f"/{link}")[0] for link in page.refers] == [200], "every link leads somewhere"
        for path in ("/config.yaml", "/profile/../config.yaml", "/profile/%2e%2e%2fconfig.yaml", "/profile", "/x"):
            assert fetch(server, path)[0] == 404, path
        assert fetch(server, "/", Host="elsewhere.example:80")[0] == 403
        with pytest.raises(UserError, match="cannot be used"):
            Server([folder], port=server.server_port)
        server.shutdown()


# ---------------------------------------------------------------------------------------------------------------
# Mistakes


def mistake(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert command_line(list(arguments)) == 2
    out, err = capsys.readouterr()
    assert not out
    return err


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = write(tmp_path / "good", ONE_ATTEMPT)
    empty = write(tmp_path / "empty", [])
    (tmp_path / "bare").mkdir()
    message = mistake(capsys, str(tmp_path / "goood"))
    assert f"run.dir={tmp_path / 'goood'}: has no metrics.jsonl" in message
    assert f"nearest legal value: run.dir={good}" in message
    assert "run.dir=" in mistake(capsys, str(tmp_path / "bare"))
    (tmp_path / "folder" / "metrics.jsonl").mkdir(parents=True)
    assert "has no metrics.jsonl" in mistake(capsys, str(tmp_path / "folder"))
    assert "has no records" in mistake(capsys, str(empty))
    assert f"nearest legal value: run.dir={good}" in mistake(capsys, str(good / "metrics.jsonl"))
    message = mistake(capsys, str(good), "--out", str(tmp_path / "a.png"))
    assert "must end in .html or .htm" in message
    assert f"nearest legal value: --out={tmp_path / 'a.html'}" in message
    assert "cannot be written" in mistake(capsys, str(good), "--out", str(tmp_path / "nowhere" / "a.html"))
    assert "has no metrics.jsonl" in mistake(capsys, str(good), str(tmp_path / "bare"))
    assert sorted(path.name for path in good.iterdir()) == ["metrics.jsonl"], "a mistake leaves nothing behind"


def test_unreadable_configuration(tmp_path: Path) -> None:
    page = Page(report(write(tmp_path / "name_of_the_folder", ONE_ATTEMPT, config="run: [\n")))
    assert "name_of_the_folder" in page.text
    assert "run: [" in page.text


# ---------------------------------------------------------------------------------------------------------------
# Long runs


def test_thinned_columns_keep_minimum_and_maximum() -> None:
    random = np.random.default_rng(0)
    x, y = np.arange(1.0, 100_001.0), random.normal(size=100_000)
    y[[5, 70_000]] = 99.0, -99.0
    y[777] = np.nan
    found = reduce_to_columns(x, y)
    assert found.x.size <= NUM_COLUMNS
    assert (found.high.max(), found.low.min()) == (99.0, -99.0)
    assert np.all((found.low <= found.mean) & (found.mean <= found.high))
    assert np.all(np.diff(found.x) > 0)
    few = reduce_to_columns(x[:50], y[:50])
    assert few.mean is few.low is few.high
    assert reduce_to_columns(x, np.full(x.size, np.nan)).x.size == 0


def test_thinned_series_keep_mean_minimum_and_maximum() -> None:
    random = np.random.default_rng(0)
    size = 7 * NUM_POINTS
    table = {"step": np.arange(1.0, size + 1), "loss": random.normal(size=size), "lr": np.ones(size)}
    table["loss"][[5, 4000]] = 99.0, math.nan
    found = downsample(table)
    assert {column.size for column in found.values()} == {NUM_POINTS}
    assert (found["step"][0], found["step"][-1]) == (7, size)
    assert found["loss_high"][0] == 99.0
    assert found["loss"][1] == pytest.approx(table["loss"][7:14].mean())
    assert np.all(found["loss_low"] <= found["loss"])
    assert np.isfinite(found["loss"]).all(), "one value that is missing leaves no gap among others"
    assert "lr_low" not in found
    assert np.isnan(downsample({**table, "loss": np.full(size, math.nan)})["loss_low"]).all()
    few = {"step": np.arange(3.0), "loss": np.arange(3.0)}
    assert downsample(few) == few


@pytest.mark.campaign
def test_a_million_records_make_a_small_page_in_time(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    with open(tmp_path / "metrics.jsonl", "w") as file:
        file.write(json.dumps(start_line(1000.0, started=990.0)) + "\n")
        for step, noise in enumerate(random.normal(size=1_000_000).tolist(), start=1):
            line = train_line(
                step, 1000.0 + step, loss=3.0 + noise * 0.1, grad_norm=1.0 + abs(noise), step_s=1 + noise / 9
            )
            file.write(json.dumps(line) + "\n")
    began = time.perf_counter()
    html = report(tmp_path)
    seconds = time.perf_counter() - began
    print(f"{seconds:.1f} s")
    assert seconds < 60.0  # 9 s on two idle cores of a laptop
    assert len(html) < 1_000_000
    assert compute_goodput([]) == Goodput()
