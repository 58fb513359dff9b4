"""Plants each defect in turn and runs the tests that must find it.

    python -m tests.defects                  # all of them, two at a time
    python -m tests.defects not-clipped      # some of them, by name

Each of these tests must pass with the defect `nothing`, which plants nothing, and fail an assertion with its own. The
last line is `N of 42 defects found`. A defect that was not planted where it has to act is not found, and neither is one
with which the tests break off for another reason.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.defects import CACHE, DEFECT, MARKS, NOTHING, Defect, Kind, marks_of
from tests.defects.plants import DEFECTS

REPOSITORY = Path(__file__).parents[2]

_ASSERTION = re.compile(r" - (assert |AssertionError|Failed: )")
"""What pytest says about a test that has failed an assertion, and not by another exception."""


@dataclass(frozen=True)
class Outcome:
    """What the tests said about a defect."""

    defect: Defect
    exit_code: int
    """pytest's: 0 if all tests passed in spite of the defect, 1 if some failed, more if it broke off."""
    failed: str
    """The test that failed; empty if none did."""
    is_planted: bool
    output: str
    seconds: float
    cpu_s: float

    @property
    def is_as_expected(self) -> bool:
        is_found = self.exit_code == 1 and _ASSERTION.search(self.failed) is not None
        return self.is_planted and (self.exit_code == 0 if self.defect.name == NOTHING else is_found)

    @property
    def verdict(self) -> str:
        if not self.is_planted:
            return f"ERROR: not planted in the {self.defect.acts_in} (exit {self.exit_code}: {self._last_line})"
        if self.exit_code == 0:
            return f"{'passed' if self.defect.name == NOTHING else 'NOT FOUND by'} {self.defect.file}"
        if self.exit_code == 1 and self.failed:
            return f"{'found by' if _ASSERTION.search(self.failed) else 'ERROR: broke off:'} {self.failed}"
        return f"ERROR: the tests broke off (exit {self.exit_code}: {self._last_line})"

    @property
    def _last_line(self) -> str:
        return (self.output.strip() or "no output").splitlines()[-1]


def try_defect(defect: Defect) -> Outcome:
    """Run the tests of a defect, with the defect planted, until one fails."""
    with tempfile.TemporaryDirectory(prefix=f"defect-{defect.name}-") as name:
        folder, began = Path(name), time.monotonic()
        marks, cache, times = folder / "marks", folder / "cache", folder / "times.json"
        marks.mkdir()
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "tests.times"]
        command += [f"--basetemp={folder / 'tmp'}", "-m", "not campaign", defect.file]
        command += ["-k", defect.words] if defect.words else []
        command += [f"--timeout={defect.timeout_s}"] if defect.timeout_s else []
        variables = {DEFECT: defect.name, MARKS: str(marks), CACHE: str(cache), "TIMES_JSON": str(times)}
        with subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env={**os.environ, **variables, "COLUMNS": "250"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as tests:
            output = tests.communicate()[0]
        failed = [line.partition(" ")[2] for line in output.splitlines() if line.startswith("FAILED ")]
        cpu_s = sum(json.loads(times.read_text()).values()) if times.exists() else 0.0
        return Outcome(
            defect,
            tests.returncode,
            failed[0] if failed else "",
            defect.acts_in in marks_of(marks, tests.pid),
            output,
            time.monotonic() - began,
            cpu_s,
        )


def controls() -> list[Defect]:
    """Return the defect `nothing` for each file that must find another one, with all tests that are run there."""
    found = []
    for file in sorted({defect.file for defect in DEFECTS.values()}):
        same = [defect for defect in DEFECTS.values() if defect.file == file]
        words = " or ".join(sorted({f"({defect.words})" for defect in same})) if all(d.words for d in same) else ""
        acts_in: Kind = "ranks" if any(defect.acts_in == "ranks" for defect in same) else "tests"
        timeout_s = 0 if any(not d.timeout_s for d in same) else max(d.timeout_s for d in same)
        found.append(Defect(NOTHING, lambda: None, acts_in, file, words, timeout_s))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Try defects; return 1 unless all are found, and nothing is found where nothing is planted."""
    parser = argparse.ArgumentParser(prog="python -m tests.defects", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="which defects (default: all)")
    parser.add_argument("--at-once", type=int, default=2, help="how many to try at a time (default: 2)")
    parser.add_argument("--show", action="store_true", help="print what the tests print")
    chosen = parser.parse_args(argv)
    unknown = set(chosen.names) - {NOTHING, *DEFECTS}
    if unknown:
        parser.error(f"no such defect: {', '.join(sorted(unknown))}")
    names = chosen.names or [NOTHING, *DEFECTS]
    defects = [*(controls() if NOTHING in names else ()), *(each for name, each in DEFECTS.items() if name in names)]
    num_found, cpu_s, unexpected = 0, 0.0, []
    with ThreadPoolExecutor(chosen.at_once) as threads:
        for outcome in threads.map(try_defect, defects):
            name, cpu_s = outcome.defect.name, cpu_s + outcome.cpu_s
            if chosen.show:
                print(outcome.output)
            print(f"{name:28} {outcome.seconds:5.0f} s {outcome.cpu_s:5.1f} CPU s  {outcome.verdict}", flush=True)
            num_found += outcome.is_as_expected and name != NOTHING
            if not outcome.is_as_expected:
                unexpected.append(name)
    print(f"{cpu_s:.0f} CPU s" + (f"; not as expected: {', '.join(unexpected)}" if unexpected else ""))
    print(f"{num_found} of {sum(defect.name != NOTHING for defect in defects)} defects found")
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
