"""Measures the time from the command to the first step of llama_small, its breakdown, and the time of `--help`.

    python -m bench.startup [--repeats 5]

Three measurements alternate: the command as users run it, up to the first line of metrics; the same command with a
stopwatch on its parts (bench/stopwatch.py); and `--help`.  A first run, which is not counted, fills the caches on disk.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.results import REPOSITORY, emit, show
from bench.stopwatch import LAUNCHED

TARGETS_S = {"first step": 6.0, "--help": 1.0}
"""Target wall times in seconds, including imports, on an otherwise idle machine."""

LIMIT_S = 600.0
POLL_S = 0.005


def run_to_first_step(folder: Path, arguments: list[str]) -> dict[str, float]:
    """Run the command until its metrics contain the first step, then kill it; return CPU and wall time."""
    command = [sys.executable, "-m", "trainer.run", *arguments, f"run.dir={folder}"]
    metrics = folder / "metrics.jsonl"
    with open(folder.with_suffix(".txt"), "w+") as output:
        start_time = time.perf_counter()
        process = subprocess.Popen(command, cwd=REPOSITORY, stdout=output, stderr=subprocess.STDOUT)
        while process.poll() is None and not _has_line(metrics):
            if time.perf_counter() - start_time > LIMIT_S:
                process.kill()
            time.sleep(POLL_S)
        wall_s = time.perf_counter() - start_time
        process.kill()
        before = os.times()
        process.wait()
        if not _has_line(metrics):
            output.seek(0)
            sys.exit(f"the run ended without a step:\n{output.read()}")
    after = os.times()
    cpu_s = (after.children_user - before.children_user) + (after.children_system - before.children_system)
    return {"cpu_s": cpu_s, "wall_s": wall_s}


def _has_line(metrics: Path) -> bool:
    return metrics.exists() and '"kind": "train"' in metrics.read_text()


def run_with_stopwatch(folder: Path, arguments: list[str]) -> dict[str, Any]:
    """Run the command with a stopwatch; return CPU and wall time, in total and by part, and the imported modules."""
    times = folder.with_suffix(".json")
    command = [sys.executable, "-m", "bench.stopwatch", str(times), *arguments, f"run.dir={folder}"]
    env = os.environ | {LAUNCHED: str(time.time())}
    completed = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    if not times.exists():
        sys.exit(f"the run ended without a step:\n{completed.stdout}{completed.stderr}")
    result: dict[str, Any] = json.loads(times.read_text())
    return result


def run_help() -> dict[str, Any]:
    """Run `--help`; return CPU and wall time, and whether torch was imported."""
    code = "import sys; from trainer.run import main; main(['--help']); sys.exit(3 if 'torch' in sys.modules else 0)"
    before, start_time = os.times(), time.perf_counter()
    completed = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    wall_s, after = time.perf_counter() - start_time, os.times()
    if completed.returncode not in (0, 3):
        sys.exit(f"--help failed:\n{completed.stderr}")
    cpu_s = (after.children_user - before.children_user) + (after.children_system - before.children_system)
    return {"cpu_s": cpu_s, "wall_s": wall_s, "imports_torch": completed.returncode == 3}


def compare(repeats: int, arguments: list[str]) -> int:
    """Run all repeats; print a JSON line per run, then the tables.  Return the exit code."""
    kinds = ("first step", "stopwatch", "--help")
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        run_to_first_step(folder / "caches", arguments)
        for repeat in range(repeats):
            for kind in kinds:
                if kind == "--help":
                    run = run_help()
                elif kind == "stopwatch":
                    run = run_with_stopwatch(folder / f"{repeat}-parts", arguments)
                    run.pop("modules")
                else:
                    run = run_to_first_step(folder / f"{repeat}", arguments)
                emit("startup", repeat=repeat, kind=kind, **run)
                runs[kind].append(run)
    _show(runs, repeats)
    return 1 if any(run["imports_torch"] for run in runs["--help"]) else 0


def _show(runs: dict[str, list[dict[str, Any]]], repeats: int) -> None:
    rows: list[list[object]] = []
    for kind, target_s in TARGETS_S.items():
        walls = [run["wall_s"] for run in runs[kind]]
        cpu_s = statistics.median(run["cpu_s"] for run in runs[kind])
        rows.append([kind, cpu_s, statistics.median(walls), f"{min(walls):.3g} - {max(walls):.3g}", target_s])
    columns = ["command to", "CPU s", "wall s", "from - to", "target, wall s"]
    show(f"bench.startup: llama_small, 1 process, medians of {repeats}", columns, rows)
    names = {name for run in runs["stopwatch"] for name in run["parts"]}
    parts = {
        name: [
            statistics.median(run["parts"].get(name, (0.0, 0.0))[kind] for run in runs["stopwatch"]) for kind in (0, 1)
        ]
        for name in names
    }
    ordered = sorted(parts.items(), key=lambda part: -part[1][0])
    total = [statistics.median(run[key] for run in runs["stopwatch"]) for key in ("cpu_s", "wall_s")]
    show("Time by part", ["part", "CPU s", "wall s"], [[name, *times] for name, times in [*ordered, ("all", total)]])


ARGUMENTS = ["recipe=llama_small", "checkpoint.resume=none"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.startup", description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5, help="runs of each kind")
    parser.add_argument("overrides", nargs="*", help="section.key=value, in addition to recipe=llama_small")
    options = parser.parse_args()
    return compare(options.repeats, [*ARGUMENTS, *options.overrides])


if __name__ == "__main__":
    sys.exit(main())
