"""Meeting a run in the middle, without a clock: a place at which it waits until it is let on, and a test that waits."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

_VARIABLE = "MESHTRAINER_TEST_GATE"


def wait_until(is_so: Callable[[], object], what: str, timeout_s: float = 240) -> None:
    """Wait for something to be so; `what` it is stands in the error if it does not become so in time."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.02)


class Gate:
    """One place in a run: `evaluation 4` is that of step 4, each batch of it."""

    def __init__(self, folder: Path, place: str) -> None:
        self.folder, self.place = folder, place
        folder.mkdir(exist_ok=True)

    @property
    def variables(self) -> dict[str, str]:
        """What the run needs to know."""
        return {_VARIABLE: f"{self.folder}\n{self.place}"}

    def is_reached(self) -> bool:
        return (self.folder / "reached").exists()

    def open(self) -> None:
        (self.folder / "open").touch()

    @property
    def num_passed(self) -> int:
        """How often the run has come to any gate."""
        path = self.folder / "passed"
        return path.stat().st_size if path.exists() else 0


def pass_gate(place: str) -> None:
    """Wait here, if this is the place that the test has named, until it opens the gate."""
    if _VARIABLE not in os.environ:
        return
    folder, _, named = os.environ[_VARIABLE].partition("\n")
    with open(f"{folder}/passed", "ab") as file:
        file.write(b".")
    if place == named:
        Path(folder, "reached").touch()
        while not Path(folder, "open").exists():
            time.sleep(0.01)
