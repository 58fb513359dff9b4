"""Synchronizes a test with a run by events instead of time: waits for a condition, or stops the run at a gate."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

PATIENCE_S = 600.0
"""The only time limit of the tests: after this long a wait is a hang. A slow machine does not come near it."""

_VARIABLE = "MESHTRAINER_TEST_GATE"


def wait_until(is_true: Callable[[], object], description: str) -> None:
    """Wait until `is_true()`; `description` describes the condition in the error after `PATIENCE_S`."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < deadline, f"has not happened: {description}"
        time.sleep(0.02)


class Gate:
    """One place in a run where it waits until the test opens the gate: `evaluation 4` is the evaluation of step 4."""

    def __init__(self, folder: Path, place: str) -> None:
        self.folder, self.place = folder, place
        folder.mkdir(exist_ok=True)

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables for the run."""
        return {_VARIABLE: f"{self.folder}\n{self.place}"}

    def is_reached(self) -> bool:
        return (self.folder / "reached").exists()

    def open(self) -> None:
        (self.folder / "open").touch()

    @property
    def num_passed(self) -> int:
        """How many times the run has come to any gate."""
        path = self.folder / "passed"
        return path.stat().st_size if path.exists() else 0


def pass_gate(place: str) -> None:
    """Wait until the test opens the gate, if it has one at this place. Recipes of the tests call this."""
    if _VARIABLE not in os.environ:
        return
    folder, _, named = os.environ[_VARIABLE].partition("\n")
    with open(f"{folder}/passed", "ab") as file:
        file.write(b".")
    if place == named:
        Path(folder, "reached").touch()
        while not Path(folder, "open").exists():
            time.sleep(0.01)
