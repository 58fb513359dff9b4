"""Each benchmark runs, made small, and prints lines that a program can read; and what starting up must not cost."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from bench.stopwatch import COLLECTING, IMPORT
from tests.ranks import REPOSITORY, tiny_overrides

NOT_FOR_THE_FIRST_STEP = {
    "wandb",
    "tensorboard",
    "torch.utils.tensorboard",
    "matplotlib",
    "tokenizers",
    "transformers",
    "fsspec",
    "pytest",
    "trainer.report",
    "trainer.prepare",
    "trainer.export",
    "trainer.checkpoints",
    "trainer.plan.calibrate",
}
"""What only some runs need, or none: imported where it is used."""


def bench(name: str, *arguments: str, ends: int = 0) -> tuple[list[dict[str, Any]], str]:
    """Run a benchmark; returns its lines of JSON and all that it printed."""
    command = [sys.executable, "-m", f"bench.{name}", *arguments]
    ran = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=500)
    assert ran.returncode == ends, ran.stdout + ran.stderr
    lines = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    assert lines
    assert all(line["bench"] == name for line in lines)
    return lines, ran.stdout


def test_startup() -> None:
    runs, printed = bench("startup", "--repeats", "1", *tiny_overrides())
    by_kind = {run["kind"]: run for run in runs}
    assert set(by_kind) == {"first step", "stopwatch", "--help"}
    parts = by_kind["stopwatch"]["parts"]
    assert {"model", "data", "first update", "planner's forecast", "self-check", f"{IMPORT}torch"} <= set(parts)
    assert sum(times[0] for times in parts.values()) == pytest.approx(by_kind["stopwatch"]["cpu_s"])
    assert "| --help |" in printed


def test_what_the_first_step_does_not_pay_for(tmp_path) -> None:
    """CPU time, for the machine may be busy: seen were 3.3 s in all, 0.02 s of it collecting garbage (0.8 before)."""
    times = tmp_path / "times.json"
    arguments = ["recipe=llama_small", f"run.dir={tmp_path / 'run'}", *tiny_overrides()]
    subprocess.run(
        [sys.executable, "-m", "bench.stopwatch", str(times), *arguments], cwd=REPOSITORY, check=True, timeout=500
    )
    found = json.loads(times.read_text())
    assert not NOT_FOR_THE_FIRST_STEP & set(found["modules"])
    assert found["parts"].get(COLLECTING, [0.0])[0] < 0.05 * found["cpu_s"]
    assert found["parts"]["planner's forecast"][0] < 0.25 * found["cpu_s"]
    assert found["cpu_s"] < 15


def test_help_imports_no_torch_and_nothing_that_is_slow() -> None:
    code = (
        "import sys; from trainer.run import main; main(['--help']); import json; "
        "print(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "rich", *NOT_FOR_THE_FIRST_STEP} & set(json.loads(ran.stderr))
