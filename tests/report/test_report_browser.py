"""The report in a real browser: Chromium, through playwright. Skipped if either is missing."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.report.test_report import ONE_ATTEMPT, start_line, train_line, write
from trainer.report.history import read_run
from trainer.report.live import Server
from trainer.report.page import render_comparison, render_page

pytestmark = pytest.mark.campaign


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright, and chromium")
    with playwright.sync_playwright() as tools:
        installed = shutil.which("chromium") or shutil.which("google-chrome")
        try:
            found = tools.chromium.launch(executable_path=installed, args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(f"no Chromium: {str(error).splitlines()[0]}")
        yield found
        found.close()


class Tab:
    """An open page, and the messages of its console."""

    def __init__(self, browser: Any, where: Path | str, width: int = 1280, scheme: str = "light") -> None:
        self.said: list[str] = []
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asks(request.url))
        self.where = where if isinstance(where, str) else where.as_uri()
        self.page.goto(self.where)

    def asks(self, url: str) -> None:
        if not url.startswith((self.where, "data:")) and not url.endswith("/favicon.ico"):
            self.said.append(f"asks for {url}")

    def count(self, selector: str) -> int:
        return int(self.page.locator(selector).count())

    def shot(self, name: str) -> None:
        if folder := os.environ.get("MESHTRAINER_TEST_PICTURES"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.page.screenshot(path=str(Path(folder) / f"{name}.png"), full_page=True)

    def close(self) -> None:
        self.context.close()
        assert self.said == []


def long_run(folder: Path, seed: int, num_lines: int = 10_000, state: str = "finished") -> Path:
    random = np.random.default_rng(seed)
    lines = [start_line(1000.0, started=990.0)]
    for step in range(1, num_lines + 1):
        loss = 2 + 4 * np.exp(-step / 2000) + 0.1 * random.normal()
        norms = {"grad_norm": 1 + abs(random.normal()), "lr": 1e-3 * min(1.0, step / 500), "tokens": 4096 * step}
        sources = {"loss_web": loss + 0.2, "loss_code": loss - 0.3, "epoch_web": 0.1, "epoch_code": 0.2}
        rates = {"tokens_per_s": 40_000 + 500 * random.normal(), "step_s": 0.1, "data_s": 0.01}
        lines.append(train_line(step, 1000.0 + step, loss=loss, **norms, **sources, **rates))
        if step % 500 == 0:
            lines.append(
                {"kind": "eval", "step": step, "loss": loss + 0.1, "loss_web": loss + 0.3, "time": 1000.0 + step}
            )
            lines.append({"kind": "checkpoint", "step": step, "blocked_s": 0.1, "total_s": 1.0, "bytes": 9})
            lines.append(
                {"kind": "sample", "step": step, "prompt": "Once upon", "text": f" a time there were {step} steps."}
            )
    config = f"run:\n  name: run-{seed}\nmodel:\n  name: llama\n  dim: {64 * seed}\noptim:\n  lr: {seed / 1000}\n"
    return write(folder, lines, state, config)


def loaded_ms(tab: Tab) -> float:
    """Return the load time of the page: the minimum of five, because other processes may use the cores."""
    script, found = "() => performance.getEntriesByType('navigation')[0].loadEventEnd", []
    for _ in range(5):
        found.append(float(tab.page.evaluate(script)))
        tab.page.reload()
    return min(found)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_one_run_of_ten_thousand_lines(scheme: str, width: int, tmp_path: Path, browser: Any) -> None:
    folder = long_run(tmp_path / "run", 1)
    (folder / "report.html").write_text(render_page(read_run(folder), folder))
    tab = Tab(browser, folder / "report.html", width, scheme)
    assert loaded_ms(tab) < 1000
    assert tab.count(".charts svg") == 7, "the six, and the losses by source"
    wide = "() => document.documentElement.scrollWidth <= innerWidth"
    assert tab.page.evaluate(wide), "nothing sticks out to the side"
    tab.shot(f"one-{width}-{scheme}")
    tab.close()


def test_tooltip_smoothing_and_axes(tmp_path: Path, browser: Any) -> None:
    folder = long_run(tmp_path / "run", 1)
    (folder / "report.html").write_text(render_page(read_run(folder), folder))
    tab = Tab(browser, folder / "report.html")
    chart, tip = tab.page.locator(".charts svg").first, tab.page.locator(".tip").first
    line = "() => document.querySelector('.charts svg path[style*=blue][style*=none]').getAttribute('d')"
    rough = tab.page.evaluate(line)
    tab.page.locator("[name=smoothing]").fill("0.9")
    assert tab.page.evaluate(line) != rough
    chart.hover()
    said = tip.inner_text()
    assert "step 4," in said.splitlines()[0], said
    assert "training" in said
    assert "evaluation" in said
    tab.shot("pointer")
    tab.page.locator("[name=axis]").select_option("tokens")
    tab.page.mouse.move(0, 0)
    chart.hover()
    assert tip.inner_text().splitlines()[0].endswith("M tokens")
    tab.page.locator("[name=axis]").select_option("hours")
    tab.page.mouse.move(0, 0)
    chart.hover()
    assert tip.inner_text().splitlines()[0].strip().endswith(" h")
    tab.page.locator("[name=log]").select_option("log")
    assert "log scale" in tab.page.locator(".scale").first.inner_text()
    tab.close()


def test_five_runs_are_compared(tmp_path: Path, browser: Any) -> None:
    folders = [long_run(tmp_path / f"run{seed}", seed) for seed in range(1, 6)]
    page = tmp_path / "comparison.html"
    page.write_text(render_comparison([read_run(folder) for folder in folders]))
    tab = Tab(browser, page)
    assert loaded_ms(tab) < 1000
    assert "optim.lr" in tab.page.locator("text=What differs >> xpath=..").inner_text()
    lines = "() => document.querySelectorAll('.charts svg')[0].querySelectorAll('path[style*=none]').length"
    before = tab.page.evaluate(lines)
    tab.page.locator("[data-run=run-3]").uncheck()
    assert tab.page.evaluate(lines) == before - 2, "its training and its evaluation"
    tab.page.locator(".charts svg").first.hover()
    assert "run-3" not in tab.page.locator(".tip").first.inner_text()
    tab.shot("five")
    tab.close()


@pytest.mark.parametrize("width", [1280, 800])
def test_a_long_setting_leaves_room_for_the_columns_of_other_runs(width: int, tmp_path: Path, browser: Any) -> None:
    """Such as the config.json of a transformers model; a click shows it in full."""
    settings = ", ".join(f"a_long_name_of_a_setting_{number}: {number}" for number in range(200))
    configs = ["  dim: 64\n", f"  name: hf\n  config: {{{settings}}}\n", "  dim: 128\n"]
    folders = [
        write(tmp_path / str(number), ONE_ATTEMPT, "finished", f"model:\n{config}")
        for number, config in enumerate(configs)
    ]
    (tmp_path / "page.html").write_text(render_comparison([read_run(folder) for folder in folders]))
    tab = Tab(browser, tmp_path / "page.html", width)
    fits = "() => { const box = document.querySelector('.wraps .scroll'); return box.scrollWidth <= box.clientWidth; }"
    assert tab.page.evaluate(fits), "the third run's column is on the page"
    tab.page.locator(".wraps summary").click()
    assert tab.page.evaluate(fits)
    assert "a_long_name_of_a_setting_199" in tab.page.locator(".wraps details").inner_text()
    tab.shot(f"long-setting-{width}")
    tab.close()


def test_a_refresh_keeps_scroll_and_choices(tmp_path: Path, browser: Any) -> None:
    folder = long_run(tmp_path / "run", 1, 3000, "running")
    (folder / ".owner.json").write_text("{}")
    with Server([folder], port=0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        tab = Tab(browser, server.url)
        tab.page.locator("[name=axis]").select_option("tokens")
        tab.page.locator("[name=smoothing]").fill("0.5")
        tab.page.locator("details summary").last.click()
        tab.page.evaluate("() => { scrollTo(0, 700); window.old = true; }")
        with open(folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps(train_line(3001, 4001.0, tokens=4096 * 3001)) + "\n")
        tab.page.wait_for_function(
            "() => window.old === undefined && document.querySelector('.charts svg path')", timeout=60_000
        )
        assert "3,001" in tab.page.locator(".tiles").inner_text(), "what is new is there"
        assert tab.page.locator("[name=axis]").input_value() == "tokens"
        assert tab.page.locator("[name=smoothing]").input_value() == "0.5"
        assert tab.page.locator("details").last.evaluate("(box) => box.open")
        assert tab.page.evaluate("() => scrollY") == 700
        tab.close()
        server.shutdown()


@pytest.mark.parametrize("lines", [ONE_ATTEMPT[:1], ONE_ATTEMPT[:2], ONE_ATTEMPT], ids=["start", "one step", "six"])
def test_runs_that_have_just_started(lines: list[dict[str, Any]], tmp_path: Path, browser: Any) -> None:
    folder = write(tmp_path, lines, "running")
    (folder / "report.html").write_text(render_page(read_run(folder), folder))
    tab = Tab(browser, folder / "report.html")
    assert tab.count(".charts svg") == 6
    tab.page.locator(".charts svg").first.hover()
    tab.shot(f"short-{len(lines)}")
    tab.close()
