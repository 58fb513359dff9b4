"""Measures the gain of each option on one GPU: tokens/s, MFU and memory of llama3_1b and llama3_8b.

    python -m bench.gpu [--rows 1b] [--budget_s 480] [--device cpu --tiny]

The benchmark first compares the losses of llama_small on the CPU and on the GPU.  If they differ, it measures nothing
and exits with 1.  Then each row trains in a separate process.  Running out of memory or exceeding the time limit
is reported as the result of that row.  Steps are timed with device events; the reported time is the median of the steps
after the warmup.

MFU is the recipe's model FLOPs (6 per matrix weight and token, causal attention counted once, recomputation excluded)
relative to the dense bf16 peak in the device's data sheet (trainer/metrics/devices.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.results import REPOSITORY, emit, show
from trainer.distributed.environment import limit_spinning


@dataclass(frozen=True)
class Row:
    """One training configuration, compared with the first row of the same recipe."""

    name: str
    recipe: str
    overrides: tuple[str, ...] = ()
    loss: str = "chunked"
    """`chunked`, the recipe's default, or `whole`: all logits at once, in fp32."""
    chunk_mib: int | None = None
    """Size of a chunk of fp32 logits, or None for the loss's default."""
    optimizer: str = "fused"
    """`fused`, the trainer's default, or `foreach`, for AdamW."""
    estimate_s: float = 30.0
    """Estimated duration of the row, including process start; a row that exceeds the remaining budget is skipped."""


def sequences(number: int, micro_batches: int = 1) -> tuple[str, str]:
    """Return the overrides for `micro_batches` micro-batches per step, each of `number` sequences."""
    return f"train.global_batch_size={number * micro_batches}", f"train.micro_batch_size={number}"


COMPILE = "train.compile=true"
BF16_STATES = ("train.weights_dtype=bfloat16", "optim.state_dtype=bfloat16")
BASE = {
    "llama3_1b": ("data.seq_len=8192", *sequences(1), "train.compile=false"),
    "llama3_8b": ("data.seq_len=4096", *sequences(1), "train.compile=false", "train.activation_checkpoint=full"),
}
"""Overrides shared by all rows of a recipe; a row's own overrides take precedence."""

_1b, _8b = partial(Row, recipe="llama3_1b"), partial(Row, recipe="llama3_8b")
_NO_RECOMPUTATION = "train.activation_checkpoint=none"
_STAY_GATHERED = ("fsdp.reshard_after_forward=never", "fsdp.reshard_after_backward=false")
"""Gather once per step instead of once per micro-batch; on a single rank, FSDP's gather is a copy."""
ROWS = (
    _1b("1b: as the recipe says"),
    _8b("8b: full recomputation"),
    _1b("1b: compile", overrides=(COMPILE,), estimate_s=60),
    _8b("8b: bf16 weights and states", overrides=BF16_STATES),
    _8b("8b: bf16 states, compile", overrides=(*BF16_STATES, COMPILE), estimate_s=60),
    _8b(
        "8b: bf16 states, compile, selective",
        overrides=(*BF16_STATES, COMPILE, "train.activation_checkpoint=selective"),
        estimate_s=60,
    ),
    _8b(
        "8b: bf16 states, compile, nothing recomputed",
        overrides=(*BF16_STATES, COMPILE, _NO_RECOMPUTATION),
        estimate_s=60,
    ),
    _8b(
        "8b: bf16 states, compile, nothing recomputed, 2 sequences",
        overrides=(*BF16_STATES, COMPILE, _NO_RECOMPUTATION, *sequences(2)),
        estimate_s=60,
    ),
    _1b("1b: loss in chunks of 64 MiB", chunk_mib=64),
    _1b("1b: loss whole", loss="whole"),
    _8b(
        "8b: bf16 states, compile, nothing recomputed, 4 x 2 sequences, gathered for good, reduced in bf16",
        overrides=(
            *BF16_STATES,
            COMPILE,
            _NO_RECOMPUTATION,
            *sequences(2, 4),
            *_STAY_GATHERED,
            "fsdp.reduce_dtype=bfloat16",
        ),
        estimate_s=90,
    ),
    _1b(
        "1b: compile, 4 x 4 sequences, gathered", overrides=(COMPILE, *sequences(4, 4), *_STAY_GATHERED), estimate_s=75
    ),
    _1b("1b: compile, 2 sequences", overrides=(COMPILE, *sequences(2)), estimate_s=45),
    _1b("1b: compile, never resharded", overrides=(COMPILE, "fsdp.reshard_after_forward=never"), estimate_s=45),
    _1b("1b: selective recomputation", overrides=("train.activation_checkpoint=selective",)),
    _1b("1b: full recomputation", overrides=("train.activation_checkpoint=full",)),
    _1b("1b: optimizer foreach", optimizer="foreach"),
    _1b("1b: gradients reduced in bf16", overrides=("fsdp.reduce_dtype=bfloat16",)),
    _1b("1b: bf16 weights and states", overrides=BF16_STATES),
    _1b("1b: computed in fp32", overrides=("fsdp.param_dtype=float32",)),
)
"""The rows, most informative first, since the time budget may run out before the last one."""

COMMON = (
    "data.source=synthetic",
    "checkpoint.resume=none",
    "checkpoint.every=0",
    "eval.every=0",
    "log.sample_tokens=0",
)
TINY = (
    "model.vocab_size=512",
    "model.dim=64",
    "model.num_layers=2",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.ffn_dim=128",
    "data.seq_len=64",
)
WARMUP, STEPS = 5, 10
"""The numbers of unmeasured steps at the start, which compile and allocate, and of measured steps."""

CHECK_STEPS, FIRST_TOLERANCE, TOLERANCE = 10, 1e-5, 1e-3
"""Steps of llama_small, and the largest relative differences allowed for the first loss and for all losses.

Both devices compute the same fp32 sums in different orders, and the difference grows with each step.  A wrong mask or
gradient causes a difference of more than a hundredth.
"""


# ---------------------------------------------------------------------------------------------------------------
# One row, in its own process


def overrides_of(row: Row, device: str, tiny: bool, steps: int, folder: Path) -> list[str]:
    """Return the settings of a row; later ones replace earlier ones with the same key."""
    settings = [*COMMON, *BASE.get(row.recipe, ()), *row.overrides, *(TINY if tiny else ())]
    settings += [f"run.device={device}", f"run.dir={folder / 'run'}", f"train.steps={steps}"]
    return list({item.partition("=")[0]: item for item in settings}.values())


def run_row(job: dict[str, Any], folder: Path) -> int:
    """Train as a row specifies and write the result to `folder`; ends the process."""
    row = Row(**{**job["row"], "overrides": tuple(job["row"]["overrides"])})
    warmup, steps, result = job["warmup"], job["steps"], folder / "result.json"
    try:
        from bench.gpu_row import train  # imports torch, in this process only

        train(row, overrides_of(row, job["device"], job["tiny"], warmup + steps + 1, folder), warmup, steps, result)
    except Exception as error:
        result.write_text(json.dumps({"outcome": outcome_of(error)}))
    sys.stdout.flush()
    os._exit(0)  # process groups that are still alive may abort the interpreter's exit


def outcome_of(error: Exception) -> str:
    """Describe the outcome of a row that raised `error`."""
    import torch

    text = str(error).strip()
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "out of memory" in text:
        return "out of memory"
    return f"failed: {type(error).__name__}: {next(iter(text.splitlines()), '')}"


# ---------------------------------------------------------------------------------------------------------------
# All rows


def start_row(
    row: Row, options: argparse.Namespace, steps: int, warmup: int, device: str, limit_s: float
) -> dict[str, Any]:
    """Run a row in a new process for at most `limit_s`; return its readings, with `outcome` for how it ended."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        job = {"row": dataclasses.asdict(row), "device": device, "tiny": options.tiny and row.recipe in BASE}
        (folder / "job.json").write_text(json.dumps({**job, "warmup": warmup, "steps": steps}))
        env = {"PYTORCH_CUDA_ALLOC_CONF": ALLOCATOR, **os.environ}
        limit_spinning(env)
        row_start_time = time.perf_counter()
        command = [sys.executable, "-m", "bench.gpu", "--folder", str(folder)]
        with open(folder / "printed.txt", "w+") as printed:
            process = subprocess.Popen(command, cwd=REPOSITORY, env=env, stdout=printed, stderr=subprocess.STDOUT)
            try:
                process.wait(timeout=limit_s)
                outcome = "failed: it exited without a result"
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                outcome = f"more than {limit_s:.3g} s"
            result: dict[str, Any] = {"outcome": outcome}
            if (folder / "result.json").exists():
                result = json.loads((folder / "result.json").read_text())
            if result["outcome"].startswith("failed"):
                printed.seek(0)
                result["printed"] = printed.read()[-2000:]
    return {**result, "row_s": time.perf_counter() - row_start_time}


ALLOCATOR = "expandable_segments:True"
"""The allocator setting, if the environment has none: llama3_8b with fp32 states leaves no room for fragmentation."""


def check(options: argparse.Namespace) -> str:
    """Train llama_small on the device and on the CPU; return a description of the problem, or "" if losses agree."""
    row = Row("llama_small", recipe="llama_small", overrides=("schedule.warmup_steps=5", "train.compile=false"))
    sides = {}
    for device in dict.fromkeys((options.device, "cpu")):
        sides[device] = start_row(row, options, CHECK_STEPS - 1, 1, device, options.limit_s)
        emit("gpu", kind="check", device=device, **_without(sides[device], "device"))
        if "losses" not in sides[device]:
            return f"llama_small on {device}: {sides[device]['outcome']}"
    device_losses, cpu_losses = sides[options.device]["losses"], sides["cpu"]["losses"]
    differences = [abs(x - y) / abs(y) for x, y in zip(device_losses, cpu_losses, strict=True)]
    agrees = differences[0] < FIRST_TOLERANCE and max(differences) < TOLERANCE
    emit("gpu", kind="agreement", first=differences[0], largest=max(differences), steps=CHECK_STEPS, agrees=agrees)
    rows = [[device, *(f"{side['losses'][step]:.6f}" for step in (0, 1, 4, 9))] for device, side in sides.items()]
    difference = ["relative difference", *(f"{differences[step]:.1e}" for step in (0, 1, 4, 9))]
    columns = ["loss of llama_small in fp32, on", "step 1", "2", "5", "10"]
    show("bench.gpu: the same losses", columns, [*rows, difference], sides[options.device]["device"])
    return "" if agrees else "the losses on the CPU and on the device differ"


def measure(rows: Sequence[Row], options: argparse.Namespace, start_time: float) -> None:
    """Run the rows that fit the time budget; print a JSON line for each, then the table."""
    results: list[tuple[Row, dict[str, Any]]] = []
    for row in rows:
        left_s = options.budget_s - (time.perf_counter() - start_time)
        if row.estimate_s > left_s:
            result: dict[str, Any] = {"outcome": "not measured: no time left in --budget_s"}
        else:
            limit_s = min(options.limit_s, left_s)
            result = start_row(row, options, options.steps, options.warmup, options.device, limit_s)
        emit("gpu", kind="row", name=row.name, recipe=row.recipe, overrides=row.overrides, loss=row.loss,
             chunk_mib=row.chunk_mib, optimizer=row.optimizer, **_without(result, "losses"))  # fmt: skip
        results.append((row, result))
    _show(results, options)


def _without(result: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in result.items() if key != name}


def _show(results: Sequence[tuple[Row, dict[str, Any]]], options: argparse.Namespace) -> None:
    first: dict[str, float] = {}
    lines: list[list[object]] = []
    for row, result in results:
        if result["outcome"] != "ok":
            lines.append([row.name, result["outcome"], "", "", "", "", ""])
            continue
        base = first.setdefault(row.recipe, result["tokens_per_s"])
        mfu = None if result["mfu"] is None else f"{100 * result['mfu']:.1f} %"
        spread = f"{result['least_s']:.3g} - {result['largest_s']:.3g}"
        gain = f"{result['tokens_per_s'] / base:.3f}"
        lines.append([row.name, result["tokens_per_s"], gain, mfu, result["peak_gib"], result["planned_gib"], spread])
    measured = [result for _, result in results if result["outcome"] == "ok"]
    device = measured[0]["device"] if measured else options.device
    peak = measured[0]["peak_flops"] if measured else None
    sheet = "" if peak is None else f", peak {peak / 1e12:.0f} TFLOP/s in bf16 by its data sheet"
    columns = ["", "tokens/s", "gain", "MFU", "peak GiB", "planned GiB", "s per step, from - to"]
    shape = "tiny shapes" if options.tiny else "8b: sequence 4096; 1b: sequence 8192"
    title = f"bench.gpu: {shape}, medians of {options.steps} steps after {options.warmup}{sheet}"
    show(title, columns, lines, device)
    print("planned: the planner's peak of tensors; on a CPU, peak and plan are those of the whole process.")


def matching_rows(pattern: str) -> list[Row]:
    """Return the rows whose name matches the regular expression `pattern`."""
    return [row for row in ROWS if re.search(pattern, row.name)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to check that everything runs")
    parser.add_argument("--rows", default="", help="only rows with names that match this regular expression")
    parser.add_argument("--check-only", action="store_true", help="only compare the losses")
    parser.add_argument("--no-check", action="store_true", help="do not compare the losses first")
    parser.add_argument("--budget_s", type=float, default=480, help="seconds for all rows together")
    parser.add_argument("--limit_s", type=float, default=120, help="time limit of a row in seconds")
    parser.add_argument("--steps", type=int, default=STEPS, help="measured steps of each row")
    parser.add_argument("--warmup", type=int, default=WARMUP, help="steps before the measured ones, at least 1")
    parser.add_argument("--folder", help=argparse.SUPPRESS)  # internal: starts one row
    options = parser.parse_args()
    if options.folder:
        return run_row(json.loads((Path(options.folder) / "job.json").read_text()), Path(options.folder))
    rows = matching_rows(options.rows)
    if not rows:
        parser.error(f"--rows {options.rows}: no row matches; the rows are {', '.join(row.name for row in ROWS)}")
    if options.warmup < 1 or options.steps < 1:
        parser.error("--warmup and --steps must be at least 1")
    start_time = time.perf_counter()
    estimate_s = sum(row.estimate_s for row in rows) * (not options.check_only) + CHECK_S * (not options.no_check)
    emit("gpu", kind="estimate", rows=len(rows), estimate_s=estimate_s, budget_s=options.budget_s)
    if not options.no_check and (problem := check(options)):
        print(f"{problem}: nothing is measured", file=sys.stderr)
        return 1
    if not options.check_only:
        measure(rows, options, start_time)
    return 0


CHECK_S = 30.0
"""Estimated duration of the loss comparison."""


if __name__ == "__main__":
    sys.exit(main())
