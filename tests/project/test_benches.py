"""The benchmarks: each runs at a small size and prints machine-readable lines. Also what starting up imports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import bench.gpu
from tests.helpers.launch import REPOSITORY, tiny
from trainer import load_config

NOT_FOR_THE_FIRST_STEP = {
    *("wandb", "tensorboard", "torch.utils.tensorboard", "matplotlib", "tokenizers", "transformers", "fsspec"),
    *("pytest", "trainer.report", "trainer.prepare", "trainer.export", "trainer.checkpoints"),
}
"""Modules that only some runs need, or none: they are imported where they are used."""


def python(*arguments: str, code: int = 0) -> str:
    ran = subprocess.run([sys.executable, *arguments], cwd=REPOSITORY, capture_output=True, text=True)
    assert ran.returncode == code, ran.stdout + ran.stderr
    return ran.stdout


def run_bench(name: str, *arguments: str) -> list[dict[str, Any]]:
    """Run a benchmark; return its lines of JSON."""
    lines = [json.loads(line) for line in python("-m", f"bench.{name}", *arguments).splitlines() if line[:1] == "{"]
    assert lines
    assert all(line["bench"] == name for line in lines)
    return lines


@pytest.mark.slow
def test_help_imports_no_torch_and_nothing_that_is_slow() -> None:
    code = "import sys; from trainer.run import main; main(['--help']); print(*sorted(sys.modules), sep='\\n')"
    assert not {"torch", "numpy", "rich", *NOT_FOR_THE_FIRST_STEP} & {*python("-c", code).splitlines()}


def test_gpu_rows_are_valid_configurations(tmp_path: Path) -> None:
    for row in bench.gpu.ROWS:
        config = load_config(row.recipe, bench.gpu.overrides_of(row, "cuda", False, 10, tmp_path))
        assert config.train.global_batch_size % int(config.train.micro_batch_size) == 0, row.name


@pytest.mark.campaign
def test_first_step_does_not_import_unneeded_modules(tmp_path: Path) -> None:
    times = tmp_path / "times.json"
    python("-m", "bench.stopwatch", str(times), "recipe=llama_small", f"run.dir={tmp_path / 'run'}", *tiny())
    assert not NOT_FOR_THE_FIRST_STEP & set(json.loads(times.read_text())["modules"])


@pytest.mark.campaign
def test_startup() -> None:
    runs = run_bench("startup", "--repeats", "1", *tiny())
    assert {run["kind"] for run in runs} == {"first step", "stopwatch", "--help"}


@pytest.mark.campaign
def test_gpu_on_a_cpu() -> None:
    small = ("--device", "cpu", "--tiny", "--steps", "2", "--warmup", "1", "--limit_s", "10000", "--budget_s", "10000")
    runs = run_bench("gpu", *small, "--no-check", "--rows", "^1b: (as the recipe|loss )")
    found = [run for run in runs if run["kind"] == "row"]
    assert len(found) > 1
    for run in found:
        assert run["outcome"] == "ok", run
        assert run["tokens_per_s"] == pytest.approx(64 / run["step_s"])
        assert run["mfu"] is None  # no data sheet of CPUs
        assert run["first_loss"] == pytest.approx(found[0]["first_loss"], rel=1e-3)  # bf16


@pytest.mark.campaign
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_losses_on_a_gpu_are_those_on_the_cpu() -> None:
    assert run_bench("gpu", "--check-only")[-1]["agrees"]


@pytest.mark.campaign
def test_data() -> None:
    small = ("--repeats", "1", "--seconds", "0.1", "--seq-len", "64", "--steps", "3", "--text-bytes", "200000")
    runs = run_bench("data", *small)
    assert {run["source"] for run in runs} == {"stdlib", "synthetic", "tokens"}
    assert all(run["tokens_per_cpu_s"] > 0 for run in runs if run["kind"] == "loader")


@pytest.mark.campaign
def test_optim() -> None:
    runs = run_bench("optim", "--task", "dense", "--only", "muon", "--steps", "30", "--seeds", "1")
    assert {run["optimizer"] for run in runs if "optimizer" in run} == {"adamw", "muon"}
    assert all(1 < run["loss"] < 5.5 for run in runs if "loss" in run)


@pytest.mark.campaign
def test_scale() -> None:
    small = ["--ranks", "2", "16", "--variants", "model alone", "eager", "--rounds", "1", "--steps", "2"]
    runs = run_bench("scale", *small, "model.num_layers=2")
    assert [(run["variant"], run["ranks"]) for run in runs] == [("model alone", 1), ("eager", 2), ("eager", 16)]
    assert all(run["step_ms"] >= run["host_ms"] > 0 for run in runs)


@pytest.mark.campaign
@pytest.mark.parametrize("side", ["handwritten", "ddp", "plain", "loss-whole", "clip-torch"])
def test_step(side: str) -> None:
    """Both sides train the same thing."""
    model = ["--nproc", "2"] if side == "handwritten" else ["--against", side, "--model", "tiny"]
    runs = run_bench("step", "--pairs", "1", "--warmup", "1", "--steps", "3", *model)
    assert [run["side"] for run in runs] == ["trainer", side]
    assert runs[0]["first_loss"] == pytest.approx(runs[1]["first_loss"], rel=1e-4)


@pytest.mark.campaign
def test_checkpoint() -> None:
    runs = run_bench("checkpoint", "--ranks", "2", "--rounds", "2", "--dim", "64", "--layers", "2")
    assert runs[-1]["kind"] == "all"
    assert [run["pair"] for run in runs if run["kind"] == "save"] == [0, 1]
