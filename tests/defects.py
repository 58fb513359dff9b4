"""Deliberate defects: each is planted in a copy of the project, and the tests of the promise that it breaks must fail.

    python -m tests.defects                     # all of them, against the tests of `make test`
    python -m tests.defects --campaign          # against those of the campaign too
    python -m tests.defects loss-scale --keep   # one, in a copy that is left for a look

Each is one line of one file, of a kind that happens: a wrong scale, a missed flush, a swapped axis.  A defect that no
test finds means that a test is missing, or that it cannot fail.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.forked import REPOSITORY
from tests.promises import read_promises


@dataclass(frozen=True)
class Defect:
    """One line of `file`, `old`, becomes `new`: what `promise`, a row of README.md beside this file, says is broken."""

    name: str
    promise: str
    file: str
    old: str
    new: str

    def plant(self, root: Path) -> None:
        path = root / self.file
        text = path.read_text()
        assert text.count(self.old) == 1, f"{self.name}: {self.file} has {text.count(self.old)} times {self.old!r}"
        path.write_text(text.replace(self.old, self.new))


DEFECTS: list[Defect] = []


@dataclass(frozen=True)
class Outcome:
    """What the tests said of a defect."""

    defect: Defect
    found_by: str
    """The first test that failed; empty if none did."""
    seconds: float
    output: str


def try_defect(defect: Defect, in_campaign: bool, keep: bool = False) -> Outcome:
    """Plant the defect in a copy of the project and run the tests of its promise until one fails."""
    promise = read_promises()[defect.promise]
    tests = [*promise.tests, *(promise.campaign if in_campaign else ())]
    folder = Path(tempfile.mkdtemp(prefix=f"defect-{defect.name}-"))
    try:
        root = folder / "project"
        shutil.copytree(REPOSITORY, root, ignore=shutil.ignore_patterns(".git", ".venv", "runs", "*.pyc", ".*_cache"))
        defect.plant(root)
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m"]
        command += ["" if in_campaign else "not campaign", f"--basetemp={folder / 'tmp'}"]
        began = time.monotonic()
        ran = subprocess.run(
            [*command, *(f"tests/{test}" for test in dict.fromkeys(tests))], cwd=root, capture_output=True, text=True
        )
        if ran.returncode not in (0, 1):
            raise RuntimeError(f"{defect.name}: pytest ended with {ran.returncode}\n{ran.stdout[-3000:]}{ran.stderr}")
        failed = [line for line in ran.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        found_by = failed[0].split()[1] if ran.returncode == 1 else ""
        return Outcome(defect, found_by, time.monotonic() - began, ran.stdout)
    finally:
        if keep:
            print(f"left in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Try defects; return 1 if one is not found."""
    parser = argparse.ArgumentParser(prog="python -m tests.defects", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="which defects (default: all)")
    parser.add_argument("--campaign", action="store_true", help="run the campaign's tests of the promise too")
    parser.add_argument("--keep", action="store_true", help="leave the copy")
    parser.add_argument("--at-once", type=int, default=2, help="how many copies are tested at a time (default: 2)")
    chosen = parser.parse_args(argv)
    unknown = set(chosen.names) - {defect.name for defect in DEFECTS}
    if unknown:
        parser.error(f"no such defect: {', '.join(sorted(unknown))}")
    defects = [defect for defect in DEFECTS if defect.name in chosen.names or not chosen.names]
    missed = []
    with ThreadPoolExecutor(chosen.at_once) as threads:
        for outcome in threads.map(lambda defect: try_defect(defect, chosen.campaign, chosen.keep), defects):
            verdict = f"found by {outcome.found_by}" if outcome.found_by else "NOT FOUND"
            print(f"{outcome.defect.name:28} {outcome.seconds:5.0f} s  {verdict}", flush=True)
            if not outcome.found_by:
                missed.append(outcome.defect.name)
    print(
        f"{len(defects) - len(missed)} of {len(defects)} defects found" + (f"; not: {', '.join(missed)}" * bool(missed))
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
