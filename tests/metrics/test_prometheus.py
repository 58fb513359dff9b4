"""What rank 0 serves to Prometheus, read over HTTP while a run trains."""

from __future__ import annotations

import re
import socket
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.tiny import BATCH, SEQ_LEN, fit, tiny_config
from trainer import Trainer
from trainer.metrics.prometheus import Prometheus
from trainer.metrics.record import Record

LINE = re.compile(r'(?:# (?:HELP|TYPE) meshtrainer_\w+ .+|meshtrainer_\w+\{run="[^"]*"(?:,part="\w+")?\} \S+)\n')


def values_of(page: str) -> dict[str, float]:
    """Return the samples of a page, by name and part; assert that every line has Prometheus' text format."""
    assert LINE.sub("", page) == ""
    found = re.findall(r'^(meshtrainer_\w+)\{run="[^"]*"(?:,part="(\w+)")?\} (\S+)$', page, re.MULTILINE)
    assert len({(name, part) for name, part, _ in found}) == len(found), "each once"
    assert {name for name, _, _ in found} == set(re.findall(r"^# TYPE (\w+) (?:gauge|counter)$", page, re.MULTILINE))
    return {name.removeprefix("meshtrainer_") + (f" {part}" if part else ""): float(v) for name, part, v in found}


def test_a_run_is_scraped_while_it_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pages: list[dict[str, float]] = []

    class Scraped(Trainer):
        def on_step(self, record: Any) -> None:
            (url,) = re.findall(r"metrics for Prometheus: (http://\S+)", (tmp_path / "console.log").read_text())
            port = url.rpartition(":")[2]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}", timeout=10) as answer:
                assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
                pages.append(values_of(answer.read().decode()))

    settings = ["train.steps=4", "log.every=2", "eval.every=2", "log.prometheus=0"]
    found = fit(tmp_path, *settings, kind=Scraped)
    train = {line["step"]: line for line in found if line["kind"] == "train"}
    assert [page["step"] for page in pages] == [1, 2, 3, 4], "of every step, whatever log.every"
    assert pages[1]["loss"] == pytest.approx(train[2]["loss"], rel=1e-9)
    assert pages[3]["tokens_total"] == 4 * BATCH * SEQ_LEN
    assert "eval_loss" not in pages[1]
    assert pages[2]["eval_loss"] > 0
    assert all(0 < page["goodput"] <= 1 for page in pages)
    assert pages[3]["peak_memory_gib"] > 0
    assert {f"time_seconds {part}" for part in ("update", "save", "eval", "load", "start", "other")} <= set(pages[3])


def test_a_port_that_is_taken_ends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("", 0)) as listener:
        port = listener.getsockname()[1]
        found = fit(tmp_path, "train.steps=2", f"log.prometheus={port}")
    assert found[-1]["reason"] == "finished"
    assert capsys.readouterr().err.count(f"warning: log.prometheus={port}: cannot listen on this port") == 1


def test_names_and_numbers_are_spelled_as_prometheus_reads_them() -> None:
    sink = Prometheus(0, 'a "b"\\', pytest.fail)
    sink.write(Record(kind="train", step=1, loss=float("nan"), tokens=3, skipped=1, time=1.0))
    text = sink.render()
    assert 'meshtrainer_loss{run="a \\"b\\"\\\\"} NaN\n' in text
    sink.close()


def test_it_is_off_by_default(tmp_path: Path) -> None:
    assert tiny_config(tmp_path).log.prometheus is None
