"""Synchronizes a test with a run without relying on time: the run waits at a gate until the test opens it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

_VARIABLE = "MESHTRAINER_TEST_GATE"


def wait_until(is_true: Callable[[], object], description: str, timeout_s: float = 240) -> None:
    """Wait until `is_true()`; `description` describes the condition in the error after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, f"not in time: {description}"
        time.sleep(0.02)


class Gate:
    """One place in a run: `evaluation 4` is each batch of the evaluation of step 4."""

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
        """How many times the run has reached any gate."""
        path = self.folder / "passed"
        return path.stat().st_size if path.exists() else 0


def pass_gate(place: str) -> None:
    """Wait until the test opens the gate, if it named this place."""
    if _VARIABLE not in os.environ:
        return
    folder, _, named = os.environ[_VARIABLE].partition("\n")
    with open(f"{folder}/passed", "ab") as file:
        file.write(b".")
    if place == named:
        Path(folder, "reached").touch()
        while not Path(folder, "open").exists():
            time.sleep(0.01)
