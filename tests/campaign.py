"""Runs the campaign, part by part: the tests that are too slow to run on every change.

    python -m tests.campaign                    # all parts
    python -m tests.campaign --minutes 20       # the parts that fit into this time; lists the others
    python -m tests.campaign faults slurm       # only these parts

The most important parts come first. Parts that use the machine as a cluster run alone.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from tests.helpers.launch import REPOSITORY


@dataclass(frozen=True)
class Part:
    """Test files or folders below tests/, the number of pytest workers that run them, and minutes on two cores."""

    name: str
    files: tuple[str, ...]
    minutes: float
    workers: int = 2
    without: tuple[str, ...] = ()
    """Files or folders that are left out."""
    command: tuple[str, ...] = ()
    """Arguments of the Python interpreter, for a part that pytest does not run."""
    needs: str = ""
    """A package that all of its tests need; without it the part is skipped."""

    @property
    def command_line(self) -> list[str]:
        if self.command:
            return [sys.executable, *self.command]
        distribution = ["-n", str(self.workers), "--dist", "worksteal"] if self.workers > 1 else []
        files = [f"tests/{name}" for name in self.files] + [f"--ignore=tests/{name}" for name in self.without]
        return [sys.executable, "-m", "pytest", "-q", "-m", "campaign", *distribution, *files]


_NAMED = [
    Part("faults", ("checkpoint/test_faults.py",), 4.0),
    Part("defects", (), 6.0, command=("-m", "tests.defects")),
    Part("table", ("exactness",), 14.0),
    Part("slurm", ("launch/test_slurm.py",), 14.0, workers=1),
    Part("real", ("weights/test_real_model.py",), 3.0, workers=1),  # each test holds one or two models in memory
    Part("network", ("distributed/test_network.py",), 0.7, workers=1),
    Part("newest", (), 15.0, command=("-m", "tests.newest")),
    Part("oldest_torch", (), 15.0, command=("-m", "tests.newest", "torch==2.11.0")),
    Part("ray", ("launch/test_ray.py",), 0.5, workers=1, needs="ray"),
    Part("compatibility", ("project/test_compatibility.py",), 10.0, workers=1),
    Part("pages", ("project/test_pages.py",), 11.0, workers=1),
    Part("installed", ("project/test_installed.py", "project/test_tutorials.py"), 12.0, workers=1),
    Part("signals", ("lifecycle/test_random_signals.py", "lifecycle/test_prompt_stops.py"), 30.0, workers=1),
]


_OTHERS = Part("others", ("",), 28.0, without=tuple(name for part in _NAMED for name in part.files))
PARTS = [*_NAMED[:6], _OTHERS, *_NAMED[6:]]


def run(parts: Sequence[Part], minutes: float) -> int:
    """Run the parts that fit into `minutes`, print a summary, and return 1 if a part failed.

    In CI a part whose tests were all skipped has failed: what they need is installed there.
    """
    start_time, pace = time.monotonic(), 1.0
    rows, failed, num_run = [], False, 0
    for part in parts:
        if part.needs and find_spec(part.needs) is None:
            rows.append((part.name, "-", f"not run: {part.needs} is not installed"))
            continue
        minutes_left = minutes - (time.monotonic() - start_time) / 60
        if pace * part.minutes > minutes_left:
            outcome = f"not run: {minutes_left:.0f} minutes left, it needs {pace * part.minutes:.0f} here"
            rows.append((part.name, "-", outcome))
            continue
        part_start_time = time.monotonic()
        outcome = run_part(part)
        num_run += 1
        minutes_taken = (time.monotonic() - part_start_time) / 60
        # This machine may be slower than the one on which the minutes were measured.
        pace = max(pace, minutes_taken / part.minutes)
        failed |= outcome.startswith("exit") or (outcome.startswith("nothing") and bool(os.environ.get("CI")))
        rows.append((part.name, f"{minutes_taken:.1f} min", outcome))
    print("\nThe campaign:")
    for name, duration, outcome in rows:
        print(f"  {name:24} {duration:>9}  {outcome}")
    counts = [re.findall(r"(\d+) (passed|failed)\b", outcome) for _, _, outcome in rows]
    total = {word: sum(int(n) for found in counts for n, w in found if w == word) for word in ("passed", "failed")}
    print(f"  {num_run} of {len(parts)} parts run: {total['passed']} tests passed, {total['failed']} failed")
    return 1 if failed else 0


def run_part(part: Part) -> str:
    """Run one part, print its output, and return its outcome."""
    print(f"+ {' '.join(part.command_line)}", flush=True)
    with subprocess.Popen(part.command_line, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        last = ""
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
    if process.returncode:
        return f"exit {process.returncode}: {last}"
    return last if part.command or " passed" in last else f"nothing was run: {last}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="part", help=f"some of {', '.join(names)} (default: all)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="time limit in minutes")
    chosen = parser.parse_args(argv)
    unknown = set(chosen.parts) - set(names)
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    return run([part for part in PARTS if part.name in chosen.parts or not chosen.parts], chosen.minutes)


if __name__ == "__main__":
    sys.exit(main())
