"""Measures the throughput of each data source, and the time that a training step waits for data.

    python -m bench.data [--seconds 3] [--repeats 3]

The first part runs one rank's loader alone, with and without worker processes, and reports tokens per second of CPU
time (of the rank and its workers together) and per second of wall time.  The second part trains llama_small on the same
source and reads from its metrics how long a step waited (`data_s`).  Loaders and training runs alternate.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from bench.results import REPOSITORY, emit, show
from trainer.distributed.environment import limit_spinning

WORKERS = (0, 2)
MICRO_BATCH, GLOBAL_BATCH = 2, 8
"""Sequences per micro-batch and per step, as in llama_small."""
BATCHES_PER_READING = 32
"""Micro-batches to read between two clock readings."""
TEXT_BYTES = 16 << 20
"""Size of the text prepared for source=tokens: 16 M byte-level tokens, more than CPU caches hold."""


@dataclass(frozen=True)
class Case:
    """One data source, with its sequence length and number of workers."""

    source: str
    seq_len: int
    num_workers: int

    def overrides(self, folder: Path) -> list[str]:
        path = [f"data.path={folder / 'shards' / 'text-*.bin'}"] if self.source == "tokens" else []
        workers = f"data.num_workers={self.num_workers}"
        return [f"data.source={self.source}", f"data.seq_len={self.seq_len}", workers, *path]


def cases(seq_lens: list[int]) -> list[Case]:
    sources = ("stdlib", "synthetic", "tokens")
    return [Case(source, seq_len, n) for source in sources for seq_len in seq_lens for n in WORKERS]


def prepare(folder: Path, num_bytes: int) -> None:
    """Write a text file with documents of random words, and convert it to token shards as users would."""
    from trainer.prepare import prepare as prepare_shards

    words = random.Random(0)
    vocabulary = ["".join(words.choices("etaoinshrdlu", k=words.randint(2, 9))) for _ in range(5000)]
    with open(folder / "text.jsonl", "w") as file:
        while file.tell() < num_bytes:
            file.write(json.dumps({"text": " ".join(words.choices(vocabulary, k=words.randint(50, 2000)))}) + "\n")
    (folder / "shards").mkdir()
    prepare_shards([str(folder / "text.jsonl")], str(folder / "shards" / "text"))


def read(case: Case, folder: Path, seconds: float) -> dict[str, float]:
    """Read micro-batches for `seconds`; return tokens per second of CPU time and of wall time."""
    from trainer import load_config
    from trainer.data.loader import TrainLoader
    from trainer.data.opening import open_source

    config = load_config("llama_small", case.overrides(folder))
    loader = TrainLoader(
        open_source(config.data, config.vocab_size, "train"),
        seed=0,
        global_batch_size=GLOBAL_BATCH,
        micro_batch_size=MICRO_BATCH,
        num_workers=case.num_workers,
    )
    for _ in range(2 * BATCHES_PER_READING):  # warm up: workers start, files are opened
        next(loader)
    workers = [worker.pid for worker in getattr(loader._batches, "_workers", [])]
    num_batches, start_time, cpu_s = 0, time.perf_counter(), _cpu_s(workers)
    while time.perf_counter() - start_time < seconds:
        for _ in range(BATCHES_PER_READING):
            next(loader)
        num_batches += BATCHES_PER_READING
    wall_s, cpu_s = time.perf_counter() - start_time, _cpu_s(workers) - cpu_s
    loader.close()
    tokens = num_batches * MICRO_BATCH * case.seq_len
    return {"tokens_per_cpu_s": tokens / cpu_s, "tokens_per_s": tokens / wall_s}


def _cpu_s(workers: list[int]) -> float:
    """Return the CPU time used so far by this process and its workers, including all threads."""
    ticks = 0
    for pid in workers:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])  # utime and stime: proc(5)
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def train(case: Case, folder: Path, steps: int, name: str) -> dict[str, float]:
    """Train llama_small on the source; return the mean step time and data wait, excluding the first step."""
    run_dir = folder / name
    command = [
        *(sys.executable, "-m", "trainer.run", "recipe=llama_small", *case.overrides(folder), f"run.dir={run_dir}"),
        *(f"train.steps={steps}", f"log.every={max(1, steps - 1)}", "eval.every=0", "checkpoint.every=0"),
        *("log.sample_tokens=0", f"train.global_batch_size={GLOBAL_BATCH}", f"train.micro_batch_size={MICRO_BATCH}"),
    ]
    completed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    if completed.returncode:
        sys.exit(f"training on {case.source} failed:\n{completed.stdout}{completed.stderr}")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    # The first line covers the first step only, so the later lines are means that exclude it.
    train_lines = [line for line in lines if line["kind"] == "train"][1:]
    steps_s, data_s = (statistics.mean(line[key] for line in train_lines) for key in ("step_s", "data_s"))
    return {"step_s": steps_s, "data_s": data_s}


def compare(options: argparse.Namespace) -> None:
    """Measure all cases; print a JSON line per run, then the tables."""
    alone: dict[Case, list[dict[str, float]]] = {case: [] for case in cases(options.seq_len)}
    runs = {case: [] for case in alone if case.seq_len == options.seq_len[0]}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prepare(folder, options.text_bytes)
        for repeat in range(options.repeats):
            for case, rates in alone.items():
                rates.append(read(case, folder, options.seconds))
                emit("data", kind="loader", repeat=repeat, **vars(case), **rates[-1])
            for number, (case, waits) in enumerate(runs.items()):
                waits.append(train(case, folder, options.steps, f"run-{repeat}-{number}"))
                emit("data", kind="run", repeat=repeat, **vars(case), **waits[-1])
    rows = [
        [case.source, case.seq_len, case.num_workers, *(_median(rates, key) for key in rates[0])]
        for case, rates in alone.items()
    ]
    columns = ["source", "sequence", "workers", "tokens per CPU s", "tokens per wall s"]
    show(f"bench.data: a loader alone, medians of {options.repeats}", columns, rows)
    waiting = [
        [case.source, case.num_workers, 1e3 * _median(rates, "data_s"), 1e3 * _median(rates, "step_s"),
         f"{100 * _median(rates, 'data_s') / _median(rates, 'step_s'):.2f} %"]
        for case, rates in runs.items()
    ]  # fmt: skip
    columns = ["source", "workers", "ms waiting for data", "ms per step", "share"]
    show(f"What a step of llama_small waits for, sequence {options.seq_len[0]}", columns, waiting)


def _median(runs: list[dict[str, float]], key: str) -> float:
    return statistics.median(run[key] for run in runs)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.data", description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3, help="number of times to measure each case")
    parser.add_argument("--seconds", type=float, default=2, help="seconds to read from each loader")
    parser.add_argument(
        "--seq-len",
        type=int,
        nargs="+",
        default=[256, 8192],
        help="tokens per sequence; the training runs use the first",
    )
    parser.add_argument("--steps", type=int, default=31, help="steps per training run; the first is not counted")
    parser.add_argument("--text-bytes", type=int, default=TEXT_BYTES, help="size of the generated text")
    options = parser.parse_args()
    if options.steps < 2:
        parser.error("--steps must be at least 2")
    limit_spinning()
    compare(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
