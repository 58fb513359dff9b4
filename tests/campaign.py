"""Runs the campaign, part by part: the tests that are too slow to run on every change.

    python -m tests.campaign                    # all parts
    python -m tests.campaign --minutes 40       # the parts that fit into this time; lists the others
    python -m tests.campaign faults slurm       # only these parts

The most important parts come first. Parts that measure time, or that use the machine as a cluster, run alone.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from tests.helpers.forked import REPOSITORY
from tests.promises import TESTS, path_of


@dataclass(frozen=True)
class Part:
    """Test files, the number of pytest workers that run them, and how many minutes they take on two cores."""

    name: str
    files: tuple[str, ...]
    minutes: float
    workers: int = 2
    command: tuple[str, ...] = ()
    """Arguments of the Python interpreter, for a part that pytest does not run."""
    needs: str = ""
    """A package that all of its tests need; without it the part is skipped."""

    @property
    def command_line(self) -> list[str]:
        if self.command:
            return [sys.executable, *self.command]
        distribution = ["-n", str(self.workers), "--dist", "worksteal"] if self.workers > 1 else []
        files = [path_of(name) for name in self.files]
        return [sys.executable, "-m", "pytest", "-q", "-m", "campaign", *distribution, *files]


_NAMED_PARTS = [
    Part("faults", ("test_faults.py",), 9.0),
    Part("real", ("test_real_model.py",), 3.0, workers=1),  # each test holds one or two models in memory
    Part("slurm", ("test_slurm.py",), 6.0, workers=1),
    Part("network", ("test_network.py",), 0.7, workers=1),
    Part("preemptions", ("test_preemptions.py",), 9.0, workers=1),
    Part("ray", ("test_ray.py",), 0.5, workers=1, needs="ray"),
    Part("compatibility", ("test_compatibility.py",), 10.0, workers=1),
    Part("benches", ("test_benches.py", "test_profile.py"), 4.0, workers=1),
    Part("pages", ("test_pages.py",), 11.0, workers=1),
    Part("installed", ("test_installed.py", "test_tutorials.py"), 12.0, workers=1),
    Part("signals", ("test_random_signals.py",), 25.0, workers=1),
    Part("prompt-stops", ("test_prompt_stops.py", "test_stopping_early.py"), 180.0, workers=1),
    Part(
        "architectures",
        (
            *("test_hf.py", "test_native_models.py", "test_lora.py", "test_tuned_models.py"),
            *("test_generate.py", "test_mixture.py"),
        ),
        25.0,
    ),
]


def _other_files() -> tuple[str, ...]:
    named = {name for part in _NAMED_PARTS for name in part.files}
    files = sorted(path for path in TESTS.rglob("test_*.py") if path.name not in named)
    return tuple(path.name for path in files if "mark.campaign" in path.read_text())


REST = Part("meshes, and all others", _other_files(), 28.0)
PARTS = [
    *_NAMED_PARTS[:2],
    REST,
    *_NAMED_PARTS[2:4],
    Part("defects", (), 20.0, command=("-m", "tests.defects")),
    *_NAMED_PARTS[4:],
]


def run(parts: Sequence[Part], minutes: float) -> int:
    """Run the parts that fit into `minutes`, print a summary, and return 1 if a part failed."""
    start_time, pace = time.monotonic(), 1.0
    rows, failed = [], False
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
        minutes_taken = (time.monotonic() - part_start_time) / 60
        # This machine may be slower than the one on which the minutes were measured.
        pace = max(pace, minutes_taken / part.minutes)
        failed |= outcome.startswith("exit")
        rows.append((part.name, f"{minutes_taken:.1f} min", outcome))
    print("\nThe campaign:")
    for name, duration, outcome in rows:
        print(f"  {name:24} {duration:>9}  {outcome}")
    counts = [re.findall(r"(\d+) (passed|failed)\b", outcome) for _, _, outcome in rows]
    total = {word: sum(int(n) for found in counts for n, w in found if w == word) for word in ("passed", "failed")}
    print(f"  {total['passed']} passed, {total['failed']} failed in all")
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
    names = [re.match(r"\w+", part.name)[0] for part in PARTS]  # type: ignore[index]
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="part", help=f"some of {', '.join(names)} (default: all)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="time limit in minutes")
    chosen = parser.parse_args(argv)
    unknown = set(chosen.parts) - set(names)
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    parts = [part for name, part in zip(names, PARTS, strict=True) if name in chosen.parts or not chosen.parts]
    return run(parts, chosen.minutes)


if __name__ == "__main__":
    sys.exit(main())
