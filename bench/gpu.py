"""What each option gains on one GPU: tokens/s, MFU and memory of llama3_1b and llama3_8b, one option at a time.

    python -m bench.gpu [--rows 1b] [--budget_s 480] [--device cpu --tiny]

First the losses of llama_small on the CPU and on the GPU are compared: if they differ, nothing is measured and the exit
code is 1.  Then each row trains in a process of its own.  A row that runs out of memory, or of its time, is a result
like any other.  A step is timed by events on the device; of the steps after the warm-up the median is taken.

MFU counts the recipe's model FLOPs (6 a weight in a matrix, causal attention once, nothing that is recomputed) against
the dense bf16 peak of the device's data sheet (trainer/metrics/devices.py).
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

from bench.record import REPOSITORY, emit, show
from trainer.distributed.environment import limit_spinning


@dataclass(frozen=True)
class Row:
    """One way to train, compared with the first row of the same recipe."""

    name: str
    recipe: str
    overrides: tuple[str, ...] = ()
    loss: str = "chunked"
    """chunked, as the recipe has it; whole: all logits at once, in fp32."""
    chunk_mib: int | None = None
    """Size of a chunk of fp32 logits; None: the loss's own."""
    optimizer: str = "fused"
    """fused, as the trainer has it; foreach, for AdamW."""
    estimate_s: float = 30.0
    """How long the whole row may take, its start included: a guess for the budget, not a measurement."""


def sequences(number: int, micro_batches: int = 1) -> tuple[str, str]:
    """Return the overrides for a step of so many micro-batches, of so many sequences each."""
    return f"train.global_batch_size={number * micro_batches}", f"train.micro_batch_size={number}"


COMPILE = "train.compile=true"
BF16_STATES = ("train.weights_dtype=bfloat16", "optim.state_dtype=bfloat16")
BASE = {
    "llama3_1b": ("data.seq_len=8192", *sequences(1), "train.compile=false"),
    "llama3_8b": ("data.seq_len=4096", *sequences(1), "train.compile=false", "train.activation_checkpoint=full"),
}
"""What all rows of a recipe have, unless they say otherwise."""

_1b, _8b = partial(Row, recipe="llama3_1b"), partial(Row, recipe="llama3_8b")
_KEPT = "train.activation_checkpoint=none"
_GATHERED = ("fsdp.reshard_after_forward=never", "fsdp.reshard_after_backward=false")
"""Copied once a step rather than once a micro-batch: with one rank FSDP's gather is a copy."""
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
    _8b("8b: bf16 states, compile, nothing recomputed", overrides=(*BF16_STATES, COMPILE, _KEPT), estimate_s=60),
    _8b(
        "8b: bf16 states, compile, nothing recomputed, 2 sequences",
        overrides=(*BF16_STATES, COMPILE, _KEPT, *sequences(2)),
        estimate_s=60,
    ),
    _1b("1b: loss in chunks of 64 MiB", chunk_mib=64),
    _1b("1b: loss whole", loss="whole"),
    _8b(
        "8b: bf16 states, compile, nothing recomputed, 4 x 2 sequences, gathered for good, reduced in bf16",
        overrides=(*BF16_STATES, COMPILE, _KEPT, *sequences(2, 4), *_GATHERED, "fsdp.reduce_dtype=bfloat16"),
        estimate_s=90,
    ),
    _1b("1b: compile, 4 x 4 sequences, gathered", overrides=(COMPILE, *sequences(4, 4), *_GATHERED), estimate_s=75),
    _1b("1b: compile, 2 sequences", overrides=(COMPILE, *sequences(2)), estimate_s=45),
    _1b("1b: compile, never resharded", overrides=(COMPILE, "fsdp.reshard_after_forward=never"), estimate_s=45),
    _1b("1b: selective recomputation", overrides=("train.activation_checkpoint=selective",)),
    _1b("1b: full recomputation", overrides=("train.activation_checkpoint=full",)),
    _1b("1b: optimizer foreach", optimizer="foreach"),
    _1b("1b: gradients reduced in bf16", overrides=("fsdp.reduce_dtype=bfloat16",)),
    _1b("1b: bf16 weights and states", overrides=BF16_STATES),
    _1b("1b: computed in fp32", overrides=("fsdp.param_dtype=float32",)),
)
"""In the order of what one wants to know first: the budget may end before the last."""

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
"""Steps before the measured ones (the first ones compile and allocate), and measured steps."""

CHECK_STEPS, FIRST_TOLERANCE, TOLERANCE = 10, 1e-5, 1e-3
"""Steps of llama_small, and the largest relative difference of the first loss and of all: of the same fp32 sums in
another order, which steps make larger.  A wrong mask or gradient is off by more than a hundredth."""


# ---------------------------------------------------------------------------------------------------------------
# One row, in a process of its own


def overrides_of(row: Row, device: str, tiny: bool, steps: int, folder: Path) -> list[str]:
    """Return the settings of a row, the later ones in place of the earlier."""
    given = [*COMMON, *BASE.get(row.recipe, ()), *row.overrides, *(TINY if tiny else ())]
    given += [f"run.device={device}", f"run.dir={folder / 'run'}", f"train.steps={steps}"]
    return list({item.partition("=")[0]: item for item in given}.values())


def run_row(job: dict[str, Any], folder: Path) -> int:
    """Train as a row says and leave what it did in `folder`.  Returns the exit code."""
    row = Row(**{**job["row"], "overrides": tuple(job["row"]["overrides"])})
    warmup, steps, result = job["warmup"], job["steps"], folder / "result.json"
    try:
        from bench.measured import train  # with torch, in this process alone

        train(row, overrides_of(row, job["device"], job["tiny"], warmup + steps + 1, folder), warmup, steps, result)
    except Exception as error:
        result.write_text(json.dumps({"outcome": outcome_of(error)}))
    sys.stdout.flush()
    os._exit(0)  # process groups that are still alive may abort the interpreter's exit


def outcome_of(error: Exception) -> str:
    """Return in words how a row ended that ended with `error`."""
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
    """Run a row in a new process, for `limit_s` at most.  Returns its readings; `outcome` says how it went."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        job = {"row": dataclasses.asdict(row), "device": device, "tiny": options.tiny and row.recipe in BASE}
        (folder / "job.json").write_text(json.dumps({**job, "warmup": warmup, "steps": steps}))
        env = {"PYTORCH_CUDA_ALLOC_CONF": ALLOCATOR, **os.environ}
        limit_spinning(env)
        started = time.perf_counter()
        command = [sys.executable, "-m", "bench.gpu", "--folder", str(folder)]
        with open(folder / "printed.txt", "w+") as printed:
            process = subprocess.Popen(command, cwd=REPOSITORY, env=env, stdout=printed, stderr=subprocess.STDOUT)
            try:
                process.wait(timeout=limit_s)
                outcome = "failed: it left without a word"
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                outcome = f"more than {limit_s:.3g} s"
            found: dict[str, Any] = {"outcome": outcome}
            if (folder / "result.json").exists():
                found = json.loads((folder / "result.json").read_text())
            if found["outcome"].startswith("failed"):
                printed.seek(0)
                found["printed"] = printed.read()[-2000:]
    return {**found, "row_s": time.perf_counter() - started}


ALLOCATOR = "expandable_segments:True"
"""Of all rows, unless the environment says otherwise: 8B with fp32 states leaves no room for fragments."""


def check(options: argparse.Namespace) -> str:
    """Train llama_small on the device and on the CPU.  Returns in words what is wrong; nothing, if the losses agree."""
    row = Row("llama_small", recipe="llama_small", overrides=("schedule.warmup_steps=5", "train.compile=false"))
    sides = {}
    for device in dict.fromkeys((options.device, "cpu")):
        sides[device] = start_row(row, options, CHECK_STEPS - 1, 1, device, options.limit_s)
        emit("gpu", kind="check", device=device, **_without(sides[device], "device"))
        if "losses" not in sides[device]:
            return f"llama_small on {device}: {sides[device]['outcome']}"
    ours, theirs = sides[options.device]["losses"], sides["cpu"]["losses"]
    differences = [abs(x - y) / abs(y) for x, y in zip(ours, theirs, strict=True)]
    agrees = differences[0] < FIRST_TOLERANCE and max(differences) < TOLERANCE
    emit("gpu", kind="agreement", first=differences[0], largest=max(differences), steps=CHECK_STEPS, agrees=agrees)
    rows = [[device, *(f"{side['losses'][step]:.6f}" for step in (0, 1, 4, 9))] for device, side in sides.items()]
    difference = ["relative difference", *(f"{differences[step]:.1e}" for step in (0, 1, 4, 9))]
    columns = ["loss of llama_small in fp32, on", "step 1", "2", "5", "10"]
    show("bench.gpu: the same losses", columns, [*rows, difference], sides[options.device]["device"])
    return "" if agrees else "the losses on the CPU and on the device differ"


def measure(rows: Sequence[Row], options: argparse.Namespace, began: float) -> None:
    """Run the rows, as many as the budget has room for; print a line of JSON for each, and the table."""
    results: list[tuple[Row, dict[str, Any]]] = []
    for row in rows:
        left_s = options.budget_s - (time.perf_counter() - began)
        if row.estimate_s > left_s:
            found: dict[str, Any] = {"outcome": "not measured: no time left in --budget_s"}
        else:
            limit_s = min(options.limit_s, left_s)
            found = start_row(row, options, options.steps, options.warmup, options.device, limit_s)
        emit("gpu", kind="row", name=row.name, recipe=row.recipe, overrides=row.overrides, loss=row.loss,
             chunk_mib=row.chunk_mib, optimizer=row.optimizer, **_without(found, "losses"))  # fmt: skip
        results.append((row, found))
    _show(results, options)


def _without(found: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in found.items() if key != name}


def _show(results: Sequence[tuple[Row, dict[str, Any]]], options: argparse.Namespace) -> None:
    first: dict[str, float] = {}
    lines: list[list[object]] = []
    for row, found in results:
        if found["outcome"] != "ok":
            lines.append([row.name, found["outcome"], "", "", "", "", ""])
            continue
        base = first.setdefault(row.recipe, found["tokens_per_s"])
        mfu = None if found["mfu"] is None else f"{100 * found['mfu']:.1f} %"
        spread = f"{found['least_s']:.3g} - {found['largest_s']:.3g}"
        gain = f"{found['tokens_per_s'] / base:.3f}"
        lines.append([row.name, found["tokens_per_s"], gain, mfu, found["peak_gib"], found["planned_gib"], spread])
    measured = [found for _, found in results if found["outcome"] == "ok"]
    device = measured[0]["device"] if measured else options.device
    peak = measured[0]["peak_flops"] if measured else None
    sheet = "" if peak is None else f", peak {peak / 1e12:.0f} TFLOP/s in bf16 by its data sheet"
    columns = ["", "tokens/s", "gain", "MFU", "peak GiB", "planned GiB", "s a step, from - to"]
    shape = "tiny shapes" if options.tiny else "8b: sequence 4096; 1b: sequence 8192"
    title = f"bench.gpu: {shape}, medians of {options.steps} steps after {options.warmup}{sheet}"
    show(title, columns, lines, device)
    print("planned: the planner's peak of tensors; on a CPU, peak and plan are those of the whole process.")


def choose(pattern: str) -> list[Row]:
    """Return the rows whose name has `pattern` (a regular expression) in it."""
    return [row for row in ROWS if re.search(pattern, row.name)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to see that all of this runs")
    parser.add_argument("--rows", default="", help="only rows whose name has this regular expression in it")
    parser.add_argument("--check-only", action="store_true", help="compare the losses, and no more")
    parser.add_argument("--no-check", action="store_true", help="do not compare the losses first")
    parser.add_argument("--budget_s", type=float, default=480, help="seconds for all rows together")
    parser.add_argument("--limit_s", type=float, default=120, help="seconds after which a row is given up")
    parser.add_argument("--steps", type=int, default=STEPS, help="measured steps of each row")
    parser.add_argument("--warmup", type=int, default=WARMUP, help="steps before the measured ones, at least 1")
    parser.add_argument("--folder", help=argparse.SUPPRESS)  # how a row is started
    options = parser.parse_args()
    if options.folder:
        return run_row(json.loads((Path(options.folder) / "job.json").read_text()), Path(options.folder))
    rows = choose(options.rows)
    if not rows:
        parser.error(f"--rows {options.rows}: no row has it; there are {', '.join(row.name for row in ROWS)}")
    if options.warmup < 1 or options.steps < 1:
        parser.error("--warmup and --steps must be at least 1")
    began = time.perf_counter()
    estimate_s = sum(row.estimate_s for row in rows) * (not options.check_only) + CHECK_S * (not options.no_check)
    emit("gpu", kind="estimate", rows=len(rows), estimate_s=estimate_s, budget_s=options.budget_s)
    if not options.no_check and (problem := check(options)):
        print(f"{problem}: nothing is measured", file=sys.stderr)
        return 1
    if not options.check_only:
        measure(rows, options, began)
    return 0


CHECK_S = 30.0
"""How long the comparison of losses may take: a guess, like the rows'."""


if __name__ == "__main__":
    sys.exit(main())
