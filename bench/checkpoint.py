"""Measures the cost of checkpoints (training pause, complete save, load) relative to the raw speed of the machine.

    python -m bench.checkpoint [--ranks 2] [--rounds 5] [--dim 1024] [--layers 16]

Each figure and its baseline are measured alternately, in one run, on the same bytes.  The training pause is compared
with copying each rank's bytes into a buffer that was used before, a complete save with `dd conv=fsync`, and a load with
reading the files.  The page cache is dropped before each load and each read, which requires root; without root, loads
are not measured.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.results import emit, show
from tests.helpers.launch import on_ranks
from trainer import Trainer, load_config
from trainer.model.parameters import local


def overrides(options: dict[str, Any], folder: str) -> list[str]:
    return [
        f"run.dir={folder}/run",
        f"model.dim={options['dim']}",
        f"model.num_layers={options['layers']}",
        "model.num_heads=16",
        "model.num_kv_heads=16",
        f"model.ffn_dim={options['dim'] * 11 // 4 // 32 * 32}",
        "data.source=synthetic",
        "data.seq_len=16",
        f"train.global_batch_size={options['ranks']}",
        "train.micro_batch_size=1",
        "train.steps=100000",
        "log.every=100000",
        "eval.every=0",
        "checkpoint.keep_last=1",
        "run.threads=1",
    ]


def local_tensors(trainer: Trainer) -> list[torch.Tensor]:
    """Return this rank's shards of the weights and the optimizer's moments."""
    model = [local(p.detach()) for p in trainer.model.parameters()]
    moments = [
        local(value)
        for part in trainer.optimizer.parts
        for state in part.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    return model + moments


def measure(options: dict[str, Any], folder: str) -> dict[str, Any]:
    """Measure copies, saves and loads; runs on every rank and returns that rank's figures."""
    dist.init_process_group("gloo")
    with torch.no_grad():
        trainer = Trainer(load_config("llama_small", overrides(options, folder)))
    steps = trainer.steps()
    next(steps)
    sources = local_tensors(trainer)
    buffers = [torch.zeros_like(source) for source in sources]
    num_bytes = sum(int(n) for n in trainer.world.sum([sum(source.nbytes for source in sources)]))
    figures: dict[str, list[float]] = {key: [] for key in ("copy", "pause", "save", "dd", "load", "read", "first")}
    figures["bytes"] = [num_bytes]
    path = None
    for number in range(options["rounds"] + 1):
        trainer.world.barrier()
        start_time = time.perf_counter()
        for source, buffer in zip(sources, buffers, strict=True):
            buffer.copy_(source)
        copy_s = time.perf_counter() - start_time
        trainer.world.barrier()
        start_time = time.perf_counter()
        trainer.save_checkpoint()
        pause_s = time.perf_counter() - start_time
        saved = trainer.saver.finish()
        assert saved is not None
        trainer.state.step += 1
        if not number:
            figures["first"] = [pause_s]
            continue
        figures["copy"].append(copy_s)
        figures["pause"].append(pause_s)
        figures["save"].append(saved.total_s)
        if trainer.world.is_main:
            figures["dd"].append(dd(num_bytes, folder))
        trainer.world.barrier()
        path = Path(saved.path)
    del buffers
    steps.close()
    before_gib = peak_gib()
    for _ in range(options["rounds"] if os.access("/proc/sys/vm/drop_caches", os.W_OK) else 0):
        for kind in ("read", "load"):
            if trainer.world.is_main:
                os.sync()
                Path("/proc/sys/vm/drop_caches").write_text("3")
            trainer.world.barrier()
            start_time = time.perf_counter()
            if kind == "load":
                trainer._has_loaded = False  # as in a new run
                trainer.load_checkpoint(path)
            else:
                read_file(path, trainer.world.rank)
            trainer.world.barrier()
            figures[kind].append(time.perf_counter() - start_time)
    figures["grown_gib"] = [peak_gib() - before_gib]
    trainer.close()
    return figures


def measure_steps(options: dict[str, Any], folder: str) -> dict[str, Any]:
    """Time steps while no checkpoint is being written, and while one is; runs on one rank with one thread."""
    trainer = Trainer(load_config("llama_small", overrides({**options, "ranks": 1}, folder)))
    steps = trainer.steps()
    next(steps)
    trainer.save_checkpoint()
    trainer.saver.finish()
    times: dict[str, list[float]] = {"quiet": [], "writing": []}

    def time_one(kind: str) -> None:
        start_time = time.perf_counter()
        next(steps)
        times[kind].append(time.perf_counter() - start_time)

    for _ in range(options["rounds"]):
        for _ in range(4):
            time_one("quiet")
        trainer.save_checkpoint()
        while trainer.checkpoints.in_flight and not trainer.checkpoints.is_written:
            time_one("writing")
        if trainer.checkpoints.in_flight:
            trainer.saver.finish()
        trainer.checkpoints.wait_for_deletion()
        os.sync()
    trainer.close()
    return times


def peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def dd(num_bytes: int, folder: str) -> float:
    target = f"{folder}/dd"
    start_time = time.perf_counter()
    blocks = num_bytes // (4 << 20)
    command = ["dd", "if=/dev/zero", f"of={target}", "bs=4M", f"count={blocks}", "conv=fsync"]
    subprocess.run(command, check=True, capture_output=True)
    elapsed = time.perf_counter() - start_time
    os.remove(target)
    return elapsed


def read_file(path: Path, rank: int) -> None:
    buffer = bytearray(4 << 20)
    with open(path / f"__{rank}_0.distcp", "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


MEASUREMENTS = {
    "pause": ("copy", "the training pause of an asynchronous save", "each rank copying its bytes into a warmed buffer"),
    "save": ("dd", "a complete save, including checksums", "`dd conv=fsync` of the same bytes"),
    "load": (
        "read",
        "a load, including checksums, with a cold page cache",
        "reading the files, with a cold page cache",
    ),
}
"""Maps each measurement to the key of its baseline, and to descriptions of the measurement and the baseline."""


def compare(options: dict[str, Any]) -> None:
    """Run all measurements; print a JSON line per pair and a summary line, then the table."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as folder:
        ranks = on_ranks(options["ranks"], measure, options, folder)
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as folder:
        (steps,) = on_ranks(1, measure_steps, options, folder)
    num_bytes = ranks[0]["bytes"][0]
    summary: dict[str, Any] = {"bytes": num_bytes, "first_pause_s": max(r["first"][0] for r in ranks)}
    summary["grown_gib"] = max(r["grown_gib"][0] for r in ranks)
    lines: list[list[object]] = []
    for key, (base, description, baseline) in MEASUREMENTS.items():
        pairs = [
            (max(r[key][i] for r in ranks), max(r[base][i] for r in ranks if r[base]))
            for i in range(len(ranks[0][key]))
        ]
        for number, (seconds, base_seconds) in enumerate(pairs):
            ratio = seconds / base_seconds
            emit("checkpoint", kind=key, pair=number, seconds=seconds, base=base, base_s=base_seconds, ratio=ratio)
        if not pairs:
            lines.append([description, baseline, None, None, None, "the page cache cannot be dropped: needs root"])
            continue
        summary[f"{key}_s"] = statistics.median(a for a, _ in pairs)
        summary[f"{base}_s"] = statistics.median(b for _, b in pairs)
        summary[f"{key}_over_{base}"] = statistics.median(a / b for a, b in pairs)
        summary[f"{key}_over_{base}_each"] = [round(a / b, 3) for a, b in pairs]
        medians = [summary[name] for name in (f"{key}_s", f"{base}_s", f"{key}_over_{base}")]
        lines.append([description, baseline, *medians, " ".join(f"{a / b:.2f}" for a, b in pairs)])
    summary["step_quiet_s"] = statistics.median(steps["quiet"])
    # None if every save finished before the next step ended.
    writing = summary["step_writing_s"] = statistics.median(steps["writing"]) if steps["writing"] else None
    ratio = summary["step_writing_over_quiet"] = writing and writing / summary["step_quiet_s"]
    summary["num_steps"] = [len(steps["quiet"]), len(steps["writing"])]
    counts = f"{len(steps['quiet'])} and {len(steps['writing'])} steps"
    description = "a step while a save is being written, 1 rank, 1 thread"
    lines.append([description, "a step with no save in progress", writing, summary["step_quiet_s"], ratio, counts])
    emit("checkpoint", kind="all", **summary)
    title = f"bench.checkpoint: {num_bytes / 1e9:.3g} GB, {options['ranks']} ranks, median of {options['rounds']} pairs"
    show(title, ["measurement", "baseline", "s", "baseline s", "ratio", "each pair"], lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.checkpoint", description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5, help="pairs of measurement and baseline")
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=16)
    compare(vars(parser.parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
