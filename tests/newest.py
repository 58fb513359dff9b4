"""Runs the fast tests and some slow ones with the newest release of every package that the project depends on.

    python -m tests.newest                # in a new environment, which is kept in .newest/ and updated
    python -m tests.newest torch==2.11.0  # with this version of a package, for the oldest torch that is supported

`constraints.txt`, which all other tests use, names the versions that were tested last. A release that breaks us is
found here first, by this part of the campaign.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from collections.abc import Sequence

from tests.helpers.launch import REPOSITORY

FOLDER = REPOSITORY / ".newest"
SHOWN = ("torch", "transformers", "tokenizers", "peft", "safetensors", "omegaconf", "wandb", "numpy", "pyarrow")
WORKERS = 3
BESIDE = (
    "tests/exactness",
    "tests/model/test_sharding.py::test_gradients_are_reduced_in_the_planned_dtype",
    "tests/plan/test_plan.py",
    "tests/checkpoint/test_dcp.py",
    "tests/checkpoint/test_failing_ranks.py",
)
"""Slow tests that run as well: results on several ranks, what torch sends between them, whether plans foretell that and
the memory, and what torch calls in a save."""


def main(argv: Sequence[str]) -> int:
    """Install, list the versions, run the tests, and return pytest's exit code."""
    python = str(FOLDER / "bin" / "python")
    if not FOLDER.exists():
        venv.create(FOLDER, with_pip=True)
    install = [python, "-m", "pip", "install", "--quiet", "--upgrade", "--upgrade-strategy", "eager"]
    subprocess.run([*install, *argv, "-e", f"{REPOSITORY}[test]"], check=True)
    listed = subprocess.run(
        [python, "-m", "pip", "list", "--format", "freeze"], check=True, capture_output=True, text=True
    )
    versions = dict(line.split("==") for line in listed.stdout.splitlines() if "==" in line)
    print("  ".join(f"{name} {versions[name]}" for name in SHOWN if name in versions), flush=True)
    pytest = [python, "-m", "pytest", "-q", "-n", str(WORKERS), "--dist", "worksteal"]
    fast = subprocess.run([*pytest, "-m", "not slow and not campaign"], cwd=REPOSITORY).returncode
    beside = subprocess.run([*pytest, "-m", "not campaign", *BESIDE], cwd=REPOSITORY).returncode
    return fast or beside


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
