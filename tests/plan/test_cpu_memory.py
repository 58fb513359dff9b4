"""Memory on a CPU: real runs of many kinds need what the start block shows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.forked import REPOSITORY
from tests.helpers.ranks import CommandResult

pytestmark = pytest.mark.campaign

SIZE = [
    *("model.dim=512", "model.num_layers=8", "model.num_heads=8", "model.num_kv_heads=8", "model.ffn_dim=1408"),
    *("model.vocab_size=8192", "data.source=synthetic", "data.seq_len=256", "train.micro_batch_size=2"),
    *("train.global_batch_size=4", "train.steps=4", "train.compile=false", "checkpoint.every=0", "eval.every=0"),
    *("log.sample_tokens=0", "log.every=1", "run.threads=1", "run.device=cpu"),
]
"""30 M parameters: the tensors take about as much memory as the rest of the process."""

KINDS = {
    "plain": [],
    "accumulation": ["train.global_batch_size=8"],
    "recomputation": ["train.activation_checkpoint=full"],
    "average": ["train.ema=0.99", "eval.every=2", "eval.steps=1"],
    "muon": ["optim.name=muon"],
    "sgd": ["optim.name=sgd"],
    "bf16": ["fsdp.param_dtype=bfloat16"],
    "saves": ["checkpoint.every=2"],
    "adapters": ["lora.rank=8"],
    "two ranks": ["nproc=2"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_real_run_needs_the_memory_in_its_start_block(kind: str, tmp_path: Path) -> None:
    """In a plain interpreter, because a forked process also has its parent's memory."""
    given = {item.partition("=")[0] for item in KINDS[kind]}
    overrides = [item for item in SIZE if item.partition("=")[0] not in given] + KINDS[kind]
    command = [sys.executable, "-m", "trainer.run", "recipe=llama_small", *overrides, f"run.dir={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, timeout=500)
    assert done.returncode == 0, done.stderr
    assert "on top: " in done.stdout
    end = CommandResult(0, done.stdout, done.stderr, tmp_path).metrics[-1]
    print(f"{kind}: planned {end['planned_peak_gib']:.3f} GiB, took {end['peak_memory_gib']:.3f} GiB")
    assert "not as planned: peak memory" not in done.stdout
    least, most = range_of(done.stdout)
    assert least - 0.02 <= end["peak_memory_gib"] <= most + 0.02


def range_of(stdout: str) -> tuple[float, float]:
    """Return the range that the start block ends with, in GiB."""
    found = re.search(r"between ([\d.]+) (\w+) and ([\d.]+) (\w+)", stdout)
    assert found is not None
    sizes = {"MiB": 2**-10, "GiB": 1.0}
    return float(found[1]) * sizes[found[2]], float(found[3]) * sizes[found[4]]


def test_without_a_heap_the_plan_is_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If malloc keeps no freed memory, only the planned tensors and the process itself are left."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(64 << 10))
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "1000000")
    command = [sys.executable, "-m", "trainer.run", "recipe=llama_small", *SIZE, f"run.dir={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, timeout=500)
    assert done.returncode == 0, done.stderr
    end = CommandResult(0, done.stdout, done.stderr, tmp_path).metrics[-1]
    assert end["peak_memory_gib"] == pytest.approx(range_of(done.stdout)[0], rel=0.05)
