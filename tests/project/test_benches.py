"""The benchmarks: each runs at a small size and prints machine-readable lines. Also limits the cost of starting up."""

from __future__ import annotations

import gc
import json
import pkgutil
import re
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import bench.gpu
import bench.optim
import bench.scale
import bench.step
from bench.stopwatch import GARBAGE_COLLECTION, IMPORT
from tests.helpers.forked import REPOSITORY
from tests.helpers.ranks import tiny_overrides
from trainer import UserError, load_config

NOT_FOR_THE_FIRST_STEP = {
    "wandb",
    "tensorboard",
    "torch.utils.tensorboard",
    "matplotlib",
    "tokenizers",
    "transformers",
    "fsspec",
    "torch.distributed.checkpoint",
    "pytest",
    "trainer.report",
    "trainer.prepare",
    "trainer.export",
    "trainer.checkpoints",
    "trainer.plan.calibrate",
}
"""Modules that only some runs need, or none: they are imported where they are used."""


def run_bench(name: str, *arguments: str, exit_code: int = 0) -> tuple[list[dict[str, Any]], str]:
    """Run a benchmark; returns its lines of JSON and all that it printed."""
    command = [sys.executable, "-m", f"bench.{name}", *arguments]
    ran = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=500)
    assert ran.returncode == exit_code, ran.stdout + ran.stderr
    lines = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    assert lines
    assert all(line["bench"] == name for line in lines)
    return lines, ran.stdout


@pytest.mark.campaign
def test_startup() -> None:
    runs, printed = run_bench("startup", "--repeats", "1", *tiny_overrides())
    by_kind = {run["kind"]: run for run in runs}
    assert set(by_kind) == {"first step", "stopwatch", "--help"}
    parts = by_kind["stopwatch"]["parts"]
    assert {"model", "data", "first step", "planner's forecast", "self-check", f"{IMPORT}torch"} <= set(parts)
    assert sum(times[0] for times in parts.values()) == pytest.approx(by_kind["stopwatch"]["cpu_s"])
    assert "| --help |" in printed


@pytest.mark.slow
def test_first_step_does_not_import_unneeded_modules(tmp_path) -> None:
    """CPU time, because the machine may be busy. Measured: 3.3 s, 0.02 s of it garbage collection (0.8 before)."""
    times = tmp_path / "times.json"
    arguments = ["recipe=llama_small", f"run.dir={tmp_path / 'run'}", *tiny_overrides()]
    subprocess.run(
        [sys.executable, "-m", "bench.stopwatch", str(times), *arguments], cwd=REPOSITORY, check=True, timeout=500
    )
    found = json.loads(times.read_text())
    assert not NOT_FOR_THE_FIRST_STEP & set(found["modules"])
    assert found["parts"].get(GARBAGE_COLLECTION, [0.0])[0] < 0.05 * found["cpu_s"]
    assert found["parts"]["planner's forecast"][0] < 0.25 * found["cpu_s"]


@pytest.mark.slow
def test_help_imports_no_torch_and_nothing_that_is_slow() -> None:
    code = (
        "import sys; from trainer.run import main; main(['--help']); import json; "
        "print(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "rich", *NOT_FOR_THE_FIRST_STEP} & set(json.loads(ran.stderr))


# ---------------------------------------------------------------------------------------------------------------
# bench.gpu

TINY_GPU = ("--tiny", "--steps", "2", "--warmup", "1", "--limit_s", "300", "--budget_s", "10000")
"""Whatever else the machine does, no row may run out of time: that it can has tests of its own."""


@pytest.mark.campaign
def test_gpu_on_a_cpu() -> None:
    rows = "^1b: (as the recipe|loss |optimizer foreach)"
    runs, printed = run_bench("gpu", "--device", "cpu", *TINY_GPU, "--no-check", "--rows", rows)
    rows = {run["name"]: run for run in runs if run["kind"] == "row"}
    assert len(rows) == 4
    for run in rows.values():
        assert run["outcome"] == "ok", run
        assert run["tokens_per_s"] == pytest.approx(64 / run["step_s"])
        assert run["mfu"] is None  # no data sheet of CPUs
        assert run["first_loss"] == pytest.approx(rows["1b: as the recipe says"]["first_loss"], rel=1e-3)  # bf16
        assert f"| {run['name']} |" in printed


def test_gpu_counts_model_flops_once() -> None:
    """By hand, for 8B: 6 FLOPs per weight of a matrix; attention, forward and backward, is halved by the mask."""
    config = load_config("llama3_8b", [*bench.gpu.BASE["llama3_8b"], *bench.gpu.COMMON])
    matrices = 32 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336) + 4096 * 128256
    scores = 32 * 3 * (2 * 2 * 4096 * 4096) / 2
    assert config.recipe.flops is not None
    assert config.recipe.flops(config.model, 4096) == pytest.approx(6 * matrices + scores)


@pytest.mark.campaign
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_gpu_without_a_gpu_says_so_first() -> None:
    ran = subprocess.run([sys.executable, "-m", "bench.gpu"], cwd=REPOSITORY, capture_output=True, text=True)
    assert ran.returncode == 1
    assert "torch finds no usable GPU: nothing is measured" in ran.stderr
    assert '"device": "cpu"' not in ran.stdout


@pytest.mark.campaign
def test_gpu_measures_the_rows_that_fit_the_budget() -> None:
    runs, printed = run_bench("gpu", "--device", "cpu", *TINY_GPU, "--no-check", "--budget_s", "1")
    outcomes = {run["outcome"] for run in runs if run["kind"] == "row"}
    assert outcomes == {"not measured: no time left in --budget_s"}
    assert printed.count("not measured: no time left") == 2 * len(bench.gpu.ROWS)


@pytest.mark.campaign
def test_gpu_rows_that_fail_are_reported_as_results() -> None:
    assert (
        bench.gpu.outcome_of(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")) == "out of memory"
    )
    assert bench.gpu.outcome_of(RuntimeError("NCCL error: out of memory")) == "out of memory"
    assert bench.gpu.outcome_of(ValueError("a\nb")) == "failed: ValueError: a"
    late = run_bench("gpu", "--device", "cpu", "--tiny", "--no-check", "--rows", "^1b: as", "--limit_s", "0.5")[0]
    assert late[-1]["outcome"] == "more than 0.5 s"


@pytest.mark.campaign
def test_gpu_row_reports_the_error() -> None:
    row = bench.gpu.Row("impossible", recipe="llama_small", overrides=("model.num_heads=5",))
    found = bench.gpu.start_row(row, Namespace(tiny=False), 1, 1, "cpu", 300)
    assert found["outcome"].startswith("failed: UserError: model.num_heads=5")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpu", "optim", "scale", "step"])
def test_help_of_benches_imports_no_torch(name: str) -> None:
    code = f"import sys, bench.{name}; sys.argv[1:] = ['--help']; bench.{name}.main()"
    watched = f"import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); {code}"
    ran = subprocess.run([sys.executable, "-c", watched], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert ran.stdout.startswith(f"usage: python -m bench.{name}")
    assert ran.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize("row", bench.gpu.ROWS, ids=lambda row: row.name)
def test_gpu_rows_are_valid_configurations(row: bench.gpu.Row, tmp_path) -> None:
    config = load_config(row.recipe, bench.gpu.overrides_of(row, "cuda", False, 10, tmp_path))
    assert config.train.global_batch_size % int(config.train.micro_batch_size) == 0


def test_gpu_default_set_fits_into_its_budget() -> None:
    """The most important rows come first: the budget suffices for all rows before the single options of 1B."""
    first = [row.estimate_s for row in bench.gpu.ROWS[:9]]
    assert bench.gpu.CHECK_S + sum(first) <= 480


@pytest.mark.campaign
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_losses_on_a_gpu_are_those_on_the_cpu() -> None:
    runs, _ = run_bench("gpu", "--check-only")
    assert runs[-1]["kind"] == "agreement" and runs[-1]["agrees"]  # noqa: PT018


@pytest.mark.campaign
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_rows_on_a_gpu() -> None:
    runs, _ = run_bench("gpu", *TINY_GPU, "--no-check")
    assert {run["outcome"] for run in runs if run["kind"] == "row"} == {"ok"}


# ---------------------------------------------------------------------------------------------------------------
# The others


@pytest.mark.campaign
def test_data() -> None:
    small = ("--repeats", "1", "--seconds", "0.1", "--seq-len", "64", "--steps", "3", "--text-bytes", "200000")
    runs, printed = run_bench("data", *small)
    cases = {(run["kind"], run["source"], run["num_workers"]) for run in runs}
    assert cases == {
        (kind, source, workers)
        for kind in ("loader", "run")
        for source in ("stdlib", "synthetic", "tokens")
        for workers in (0, 2)
    }
    assert all(run["tokens_per_cpu_s"] > 0 for run in runs if run["kind"] == "loader")
    assert all(0 <= run["data_s"] < run["step_s"] for run in runs if run["kind"] == "run")
    assert "| tokens | 64 | 2 |" in printed


@pytest.mark.slow
def test_optim(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Two rates are tried, then lower ones for as long as they are better; the table has the fewest steps first."""
    losses = {0.001: 2.5, 0.002: 2.2, 0.004: 2.4, 0.008: 2.7}
    tried: list[float] = []

    def train(task: str, settings: list[str], steps: int, seed: int) -> tuple[list[float], float]:
        rate = float(settings[-1].partition("=")[2])
        tried.append(rate)
        last = losses[rate] - 0.3 * ("optim.name=muon" in settings) + 0.01 * seed
        return [3.0 + (last - 3.0) * step / steps for step in range(bench.optim.WINDOW, steps + 1)], 0.01

    monkeypatch.setattr(bench.optim, "train", train)
    arguments = Namespace(task="dense", only="muon", steps=100, seeds=2, rates="0.004,0.008")
    assert bench.optim.compare(arguments) == 0
    assert tried == [0.004, 0.008, 0.002, 0.001, 0.002, 0.002] * 2
    printed = capsys.readouterr().out
    rows = [line.split("|")[1:-1] for line in printed.splitlines() if line.startswith(("| muon", "| adamw"))]
    assert [row[0].strip() for row in rows] == ["muon", "adamw"]
    target = 2.21
    first = next(step for step in range(20, 101) if 3.0 + (1.9 - 3.0) * step / 100 <= target)
    assert rows[0][2].split()[0] == str(first)
    assert rows[1][2].split() == ["99", "100"]


@pytest.mark.campaign
def test_optim_really_trains() -> None:
    runs, printed = run_bench("optim", "--task", "dense", "--only", "muon", "--steps", "30", "--seeds", "1")
    assert {run["optimizer"] for run in runs if "optimizer" in run} == {"adamw", "muon"}
    assert all(1 < run["loss"] < 5.5 for run in runs if "loss" in run)
    assert "| muon |" in printed


@pytest.mark.campaign
def test_scale() -> None:
    small = ["--ranks", "2", "16", "--variants", "model alone", "eager", "--rounds", "1", "--steps", "2"]
    runs, printed = run_bench("scale", *small, "model.num_layers=2")
    assert [(run["variant"], run["ranks"]) for run in runs] == [("model alone", 1), ("eager", 2), ("eager", 16)]
    for run in runs:
        parts = run["forward_ms"] + run["backward_ms"] + run["rest_ms"]
        assert parts == pytest.approx(run["host_ms"]), "a median of two is their mean"
        assert run["step_ms"] >= run["host_ms"] > 0
    assert printed.count("| eager |") == 2
    assert printed.count("| model alone |") == 1


@pytest.mark.parametrize("compiles", [False, True])
def test_scale_without_fsdp(compiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are compiled as by the Trainer; nothing is sharded, and no process group is opened."""
    compiled: list[nn.Module] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, fullgraph: compiled.append(self))
    variant = bench.scale.VARIANTS["model alone, compiled" if compiles else "model alone"]
    config = load_config("llama3_8b", [*bench.scale.NARROW, *bench.scale.PLAIN, *variant, "model.num_layers=2"])
    update, marks = bench.scale.build_alone(config, "cpu")
    update({"tokens": torch.zeros(1, 8, dtype=torch.int64), "targets": torch.ones(1, 8, dtype=torch.int64)})
    assert len(marks) == 2
    assert [type(block).__name__ for block in compiled] == ["LlamaBlock"] * (2 * compiles)
    assert not torch.distributed.is_initialized()


SMALL_STEP = ("--pairs", "1", "--warmup", "1", "--steps", "3")


@pytest.mark.campaign
def test_step() -> None:
    runs, printed = run_bench("step", *SMALL_STEP, "--nproc", "2")
    assert [run["side"] for run in runs] == ["trainer", "handwritten"]
    assert runs[0]["first_loss"] == pytest.approx(runs[1]["first_loss"], rel=1e-4)
    assert "| CPU s per step, mean of ranks |" in printed


@pytest.mark.campaign
@pytest.mark.parametrize("side", ["ddp", "plain"])
def test_step_without_fsdp(side: str) -> None:
    """Both sides train the same thing, and neither saves a checkpoint within the measurement."""
    runs, printed = run_bench("step", *SMALL_STEP, "--against", side, "--model", "tiny")
    assert [run["side"] for run in runs] == ["trainer", side]
    assert runs[0]["first_loss"] == pytest.approx(runs[1]["first_loss"], rel=1e-4)
    assert "| ratio | min/min |" in printed


DONE_BY = {
    "loss-whole": "bench.variants.cross_entropy",
    "adamw-foreach": "torch._foreach_lerp_",
    "clip-torch": "torch.nn.utils.clip_grad_norm_",
}
"""The function that does it the other way: the default calls none of them."""


def train_as(side: str, folder: Path, after_step: Callable[[int], None] = lambda step: None) -> list[float]:
    """Train a few steps like one side of bench.step, in this process only; returns the losses."""
    job = {
        "recipe": "llama_small",
        "overrides": tiny_overrides("train.steps=3", "data.source=synthetic", "run.threads=1"),
    }
    return bench.step._train_with_trainer(side, job, SimpleNamespace(after_step=after_step), folder / side)


@pytest.mark.slow
@pytest.mark.parametrize(
    "side",
    ["loss-whole", *(pytest.param(side, marks=pytest.mark.campaign) for side in DONE_BY if side != "loss-whole")],
)
def test_step_can_swap_the_order_of_sides(side: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Mock(wraps=pkgutil.resolve_name(DONE_BY[side]))
    monkeypatch.setattr(DONE_BY[side], watched)
    default = train_as(bench.step.TRAINER, tmp_path)
    assert not watched.called
    assert bench.step.largest_difference(train_as(side, tmp_path), default) < bench.step.TOLERANCE
    assert watched.called


@pytest.mark.campaign
def test_step_leaves_garbage_collection_enabled(tmp_path: Path) -> None:
    found: dict[str, list[bool]] = {bench.step.TRAINER: [], "gc": []}
    losses = [train_as(side, tmp_path, lambda _, own=own: own.append(gc.isenabled())) for side, own in found.items()]
    assert found == {bench.step.TRAINER: [False] * 3, "gc": [True] * 3}
    assert losses[0] == losses[1]


@pytest.mark.campaign
def test_step_compares_two_settings() -> None:
    """Losses may differ, and the difference is reported."""
    runs, printed = run_bench("step", *SMALL_STEP, "--nproc", "1", "--against", "fsdp.param_dtype=bfloat16")
    assert [run["side"] for run in runs] == ["trainer", "fsdp.param_dtype=bfloat16"]
    ours, theirs = (run["first_loss"] for run in runs)
    assert 1e-6 < abs(ours - theirs) / theirs < 0.05
    assert "| measure | trainer | fsdp.param_dtype=bfloat16 | ratio |" in printed
    assert float(re.search(r"first losses within (\S+)", printed)[1]) >= float(f"{abs(ours - theirs) / theirs:.1e}")


def test_step_rejects_unknown_sides() -> None:
    def refused(side: str, nproc: int = 2) -> str:
        with pytest.raises(UserError) as error:
            bench.step.check_side(side, "small", nproc)
        return str(error.value)

    assert refused("clip").endswith("did you mean --against=clip-torch?")
    assert "key=value" in refused("nothing like it")
    assert "changes the amount of work" in refused("model.dim=64")
    assert refused("train.steps=4") == "--against=train.steps=4: train.steps is set by the benchmark itself"
    assert refused("train.compil=true").endswith("did you mean train.compile=true?")
    assert refused("train.micro_batch_size=3").startswith("train.")
    for side in (bench.step.HANDWRITTEN, "ddp", *bench.step.VARIANTS, "train.micro_batch_size=1"):
        bench.step.check_side(side, "small", 2)
    bench.step.check_side("plain", "tiny", 1)
    with pytest.raises(UserError, match="shards a llama"):
        bench.step.check_side(bench.step.HANDWRITTEN, "tiny", 2)


@pytest.mark.campaign
def test_checkpoint() -> None:
    runs, printed = run_bench("checkpoint", "--ranks", "2", "--rounds", "2", "--dim", "64", "--layers", "2")
    summary = runs[-1]
    assert summary["kind"] == "all"
    for kind in ("pause", "save"):
        pairs = [run for run in runs if run["kind"] == kind]
        assert [run["pair"] for run in pairs] == [0, 1]
        assert summary[f"{kind}_over_{pairs[0]['base']}_each"] == [round(run["ratio"], 3) for run in pairs]
    assert "| a complete save, including checksums |" in printed
