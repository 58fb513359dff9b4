"""The report of finished, running and killed runs: one page that needs no other file."""

from __future__ import annotations

import json
import math
import re
import signal
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.commands import meshtrainer
from tests.helpers.gate import Gate, wait_until
from tests.helpers.launch import start, start_command
from tests.helpers.runs import SharedRun
from trainer.report.figures import reduce_to_columns


def start_line(time: float, resumed_step: int | None = None, **fields: Any) -> dict[str, Any]:
    shape = {"world_size": 2, "mesh": {"replicate": 1, "shard": 2}, "parameters": 1234, "torch": "2.13.0"}
    return {"kind": "start", **shape, "device": "cpu", "resumed_step": resumed_step, "time": time} | fields


def train_line(step: int, time: float = 0.0, **fields: Any) -> dict[str, Any]:
    rates = {"lr": 1e-3, "tokens": 64 * step, "tokens_per_s": 64.0, "step_s": 1.0, "data_s": 0.1, "mfu": None}
    own = {"kind": "train", "step": step, "loss": 5.0 / step, "grad_norm": 1.0, "peak_memory_gib": 0.5, "skipped": 0}
    return own | rates | ({"time": time} if time else {}) | fields


ONE_ATTEMPT = [
    start_line(1010.0, started=1000.0, load_s=4.0),
    *(train_line(step, 1010.0 + step) for step in (1, 2, 3, 4)),
    {"kind": "eval", "step": 4, "loss": 2.0, "eval_s": 3.0, "time": 1017.0},
    {"kind": "checkpoint", "step": 4, "blocked_s": 0.5, "total_s": 2.0, "bytes": 9, "time": 1018.0},
    train_line(6, 1020.0),
]
"""6 steps of a second each: 20 s in all."""


def write(folder: Path, lines: Sequence[dict[str, Any]], state: str | None = None, config: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if state:
        status = {"state": state, "exit_code": None, "step": 0, "reason": ""}
        (folder / "status.json").write_text(json.dumps(status))
    if config:
        (folder / "config.yaml").write_text(config)
    return folder


class Page(HTMLParser):
    """Collects tags, what they refer to, and the visible text; checks that each tag is closed in order."""

    VOID = {"meta", "br", "img", "hr"}

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
        if "style" not in self.open:
            self.text += f" {data}"

    @property
    def elsewhere(self) -> list[str]:
        """References that are neither on the page nor relative paths."""
        return [each for each in self.refers if ":" in each or each.startswith("/")]


def report(folder: Path) -> Page:
    ended = meshtrainer("report", folder)
    assert ended.code == 0, ended.err
    assert [Path(line).name for line in ended.out.splitlines()] == ["report.html", "report.png"]
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")
    return Page((folder / "report.html").read_text())


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Page:
    """The page of a finished run."""
    return report(write(tmp_path_factory.mktemp("plain") / "run", ONE_ATTEMPT, "finished"))


# ---------------------------------------------------------------------------------------------------------------
# One run


@pytest.mark.slow
def test_page_of_a_run_needs_no_other_file(one: SharedRun, tmp_path: Path) -> None:
    page = report(one.copy_to(tmp_path / "run"))
    html = (tmp_path / "run" / "report.html").read_text()
    assert page.elsewhere == []
    assert not {"script", "link", "iframe", "object", "image"} & set(page.tags)
    assert page.tags.count("svg") == 6
    assert "@import" not in html
    assert "http" not in html.replace("http://www.w3.org/", "")
    for text in ("llama_small", "finished", f"{one.of_kind('eval')[-1]['loss']:.4f}"):
        assert text in page.text, text
    (sample,) = [line for line in one.of_kind("sample") if line["step"] == 12]
    assert sample["prompt"] in page.text
    assert any("step_00000012" in each for each in page.refers), "leads to the checkpoint"


def test_goodput_attempts_sources_and_logged_values_are_on_the_page(plain: Page, tmp_path: Path) -> None:
    assert "30.0%" in plain.text, "6 s of 20"
    shape = {"world_size": 16, "mesh": {"replicate": 4, "shard": 4}}
    own = {"loss_web": 3.125, "epoch_web": 0.25, "accuracy": 0.375}
    lines = [
        *ONE_ATTEMPT,
        start_line(1100.0, 6, started=1095.0, **shape),
        train_line(7, 1101.0, **own),
        {"kind": "eval", "step": 7, "loss": 2.0, "loss_web": 2.625, "time": 1102.0},
        {"kind": "end", "step": 7, "reason": "stopped", "goodput": 0.5, "time": 1103.0},
    ]
    text = report(write(tmp_path / "two", lines, "stopped")).text
    for part in ("killed", "stopped", "replicate 4", "web", "3.125", "2.625", "accuracy", "0.375"):
        assert part in text, part


EVIL = "<script>alert(1)</script> & \"$x_1$ '"


def test_text_of_a_run_is_escaped(tmp_path: Path) -> None:
    """Whoever wrote the run's folder cannot run code in the reader's browser."""
    config = f"run:\n  name: {json.dumps(EVIL)}\nmodel:\n  name: '<b>'\ntrain:\n  steps: 9\n"
    start = ONE_ATTEMPT[0] | {"device": "<em>", "torch": "<u>", "mesh": {"<s>": 1}}
    sample = {"kind": "sample", "step": 4, "prompt": EVIL, "text": "<script>"}
    logged = train_line(7, 1021.0) | {f"epoch_{EVIL}": 0.5, f"loss_{EVIL}": 2.0, "<u>$x$</u>": 1.0}
    end = {"kind": "end", "step": 7, "reason": "<em>", "time": 1022.0}
    folder = write(tmp_path / "evil", [start, *ONE_ATTEMPT[1:], sample, logged, end], config=config)
    (folder / "status.json").write_text(json.dumps({"state": "<strong>", "reason": "<q>"}))
    page = report(folder)
    assert not {"u", "s", "em", "strong", "q"} & set(page.tags)
    assert page.tags.count("script") == 0
    assert EVIL in page.text


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param(ONE_ATTEMPT[:1], marks=pytest.mark.campaign),
        pytest.param([*ONE_ATTEMPT[1:], {"kind": "unheard of"}], marks=pytest.mark.campaign),
        [start_line(1.0, world_size=None, mesh=None, parameters=None), train_line(1, 2.0, loss=None, step_s=None)],
        [start_line(1.0), train_line(1, loss=-3.0, grad_norm=0.0, lr=0.0), train_line(2, loss=1e30, grad_norm=1e-30)],
    ],
    ids=["start", "no start", "null", "strange numbers"],
)
def test_nearly_empty_files(lines: list[dict[str, Any]], tmp_path: Path) -> None:
    folder = write(tmp_path, lines, config="run: [\n")
    with open(folder / "metrics.jsonl", "ab") as file:
        file.write(b'3\n[]\nnull\n{"kind": "train", "step": 7, "lo\xc3')
    report(folder)


@pytest.mark.campaign
def test_a_million_records_make_a_small_page(tmp_path: Path) -> None:
    with open(tmp_path / "metrics.jsonl", "w") as file:
        file.write(json.dumps(start_line(1000.0, started=990.0)) + "\n")
        for step in range(1, 1_000_001):
            file.write(json.dumps(train_line(step, 1000.0 + step, loss=3.0 + step % 97 / 100)) + "\n")
    report(tmp_path)
    assert (tmp_path / "report.html").stat().st_size < 2_000_000


def test_losses_that_are_not_finite_are_marked(plain: Page, tmp_path: Path) -> None:
    text = report(write(tmp_path, [*ONE_ATTEMPT, train_line(7, loss=None)])).text
    assert ("not finite" in text, "not finite" in plain.text) == (True, False)


def test_a_long_series_is_summarized_by_means_minima_and_maxima() -> None:
    """Ten columns of ten steps; values that are not finite are left out."""
    steps = np.arange(1.0, 101.0)
    losses = np.sin(steps)
    losses[[3, 47]] = math.nan, math.inf
    columns = reduce_to_columns(steps, losses, 10)
    assert columns.has_band
    for number in range(10):
        values = [value for value in losses[10 * number : 10 * number + 10].tolist() if math.isfinite(value)]
        assert columns.mean[number] == pytest.approx(sum(values) / len(values))
        assert (columns.low[number], columns.high[number]) == (min(values), max(values))
    assert not reduce_to_columns(steps, losses, 50).has_band


def test_charts_follow_the_theme(tmp_path: Path) -> None:
    """All of their colors are names from the style sheet."""
    report(write(tmp_path, [*ONE_ATTEMPT, start_line(1030.0, 4, lost_steps=2), train_line(5, loss=None)]))
    _, _, charts = (tmp_path / "report.html").read_text().partition("</style>")
    assert charts.count("var(--") > 50
    assert re.findall(r"(?:fill|stroke): ?#\w+", charts) == []


# ---------------------------------------------------------------------------------------------------------------
# Running runs


REFRESH = '<meta http-equiv="refresh"'


@pytest.mark.campaign
def test_watched_page_is_rewritten_until_its_run_ends(tmp_path: Path) -> None:
    """While the run trains the page says so; once the run has been killed, too, though its files still say running."""
    folder, gate = tmp_path / "run", Gate(tmp_path / "gate", "evaluation 2")
    own = ["model.name=tests.helpers.slow_trainer:slow_llama", "model.vocab_size=257", "model.num_kv_heads=2"]
    own += ["train.steps=4", "eval.every=2", "eval.steps=1"]
    trained = start(folder, *own, variables=gate.variables)
    wait_until(gate.is_reached, "the evaluation")
    watching = start_command("trainer.report", folder, "--watch")
    page = folder / "report.html"
    wait_until(page.exists, "the page")
    html = page.read_text()
    assert "running" in Page(html).text
    assert "killed" not in Page(html).text
    assert REFRESH in html
    trained.signal(signal.SIGKILL)
    trained.wait(together=False)
    assert watching.wait().code == 0
    html = page.read_text()
    assert "killed" in Page(html).text
    assert REFRESH not in html


# ---------------------------------------------------------------------------------------------------------------
# Several runs, and mistakes


def test_differences_between_runs_are_listed(tmp_path: Path) -> None:
    config = "run:\n  name: mine\n  dir: {0}\noptim:\n  lr: {1}\n  name: adamw\n"
    one = write(tmp_path / "one", ONE_ATTEMPT, "finished", config.format("one", 0.125))
    two = write(tmp_path / "two", [start_line(1.0)], "finished", config.format("two", 0.25))
    ended = meshtrainer("report", one, two, "--out", tmp_path / "both.html")
    assert ended.code == 0, ended.err
    assert (tmp_path / "both.png").exists()
    page = Page((tmp_path / "both.html").read_text())
    assert page.elsewhere == []
    for text in (str(one), str(two), "optim.lr", "0.125", "0.25"):
        assert text in page.text, "both are called mine; the folders are not"
    assert "optim.name" not in page.text, "the same in both"
    assert sorted(path.name for path in one.iterdir()) == ["config.yaml", "metrics.jsonl", "status.json"]


def test_eight_runs_on_one_page(tmp_path: Path) -> None:
    runs = [write(tmp_path / f"run_{number}", ONE_ATTEMPT, "finished") for number in range(8)]
    ended = meshtrainer("report", *runs, "--out", tmp_path / "all.html")
    assert ended.code == 0, ended.err
    page = Page((tmp_path / "all.html").read_text())
    assert page.tags.count("svg") == 6
    assert all(run.name in page.text for run in runs)


@pytest.mark.parametrize(
    ("arguments", "begins"),
    [
        (["goood"], "run.dir={}/goood: "),
        (["bare"], "run.dir={}/bare: "),
        (["empty"], "run.dir={}/empty: "),
        (["good", "bare"], "run.dir={}/bare: "),
        (["good", "--out=a.png"], "--out=a.png: "),
        (["good", "--out=nowhere/a.html"], "--out=nowhere/a.html: "),
    ],
)
def test_mistakes(arguments: list[str], begins: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "good", ONE_ATTEMPT)
    write(tmp_path / "empty", [])
    (tmp_path / "bare").mkdir()
    before = sorted(tmp_path.rglob("*"))
    ended = meshtrainer("report", *(a if a.startswith("--") else tmp_path / a for a in arguments))
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith(f"error: {begins.format(tmp_path)}")
    assert sorted(tmp_path.rglob("*")) == before
