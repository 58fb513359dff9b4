"""Limits how long each test may take, relative to this machine's speed, so that the tests stay fast.

`durations.json` contains the duration of each test as it was last recorded (`make durations`), and the duration of a
fixed piece of work at that time. The same work is measured again, so that a slow or busy machine extends the limits.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TIERS = ("fast", "test", "campaign")

DEFAULT_LIMIT_S = {"fast": 5.0, "test": 20.0, "campaign": 600.0}
"""Limits for tests without a recorded duration, because they are new or short; that of fast tests includes imports."""

LIMIT_FACTOR = 4.0
"""The limit, as a multiple of the recorded duration. On two cores, two busy loops double or even triple durations."""

ALLOWANCE_S = 5.0
"""Extra seconds for a slow disk flush, or for a load that ends before the reference is measured."""

MIN_RECORDED_S = 0.5
"""Shorter durations are not recorded."""

PATH = Path(__file__).parent / "durations.json"


def tier_of(item: Any) -> str:
    """Return the tier of a test, by its markers."""
    if item.get_closest_marker("campaign"):
        return "campaign"
    return "test" if item.get_closest_marker("slow") else "fast"


def recorded_durations() -> dict[str, Any]:
    return json.loads(PATH.read_text()) if PATH.exists() else {"reference_s": 0.0, "tests": {}}


def reference_s() -> float:
    """Return the seconds that a fixed piece of work takes now: Python code, tensor operations and file writes."""
    import tempfile

    import torch

    def once() -> float:
        start_time = time.perf_counter()
        sum(number * number for number in range(200_000))
        matrix = torch.ones(192, 192)
        for _ in range(40):
            matrix = (matrix @ matrix).tanh()
        with tempfile.TemporaryDirectory() as folder:
            for number in range(20):
                Path(folder, str(number)).write_bytes(bytes(10_000))
        return time.perf_counter() - start_time

    return sorted(once() for _ in range(5))[2]


def machine_scale() -> float:
    """Return how many times slower this machine is now than the recorded one; at least 1."""
    return max(1.0, reference_s() / (recorded_durations()["reference_s"] or 1.0))


@dataclass
class Budget:
    """The limits of all tests, computed from the recorded durations."""

    records: Mapping[str, Any]
    measure: Any = reference_s
    _scale: float = field(default=0.0, init=False)

    def overrun(self, nodeid: str, tier: str, seconds: float) -> str:
        """Return an error message if a test took too long, else an empty string.

        The machine's speed is measured only if it matters, and each time, because the machine may have become busy.
        """
        recorded = self.records["tests"].get(nodeid, 0.0)
        limit_s = max(DEFAULT_LIMIT_S[tier], LIMIT_FACTOR * recorded)
        if seconds <= limit_s:
            return ""
        self._scale = max(1.0, self._scale, self.measure() / (self.records["reference_s"] or 1.0))
        if seconds <= limit_s * self._scale + ALLOWANCE_S:
            return ""
        new_limit = f"the limit for a new test of its tier is {limit_s:.0f} s"
        explanation = f"{recorded:.1f} s were recorded" if recorded else new_limit
        return (
            f"{nodeid} took {seconds:.1f} s: {explanation}, and this machine is {self._scale:.1f} times as slow as "
            "when durations were recorded. Make the test faster, move it to another tier, or run make durations."
        )

    def record(self, durations: Mapping[str, float]) -> None:
        """Write the durations of this run's tests, which must be all tests of a tier: other records are dropped."""
        tests = {name: round(s, 1) for name, s in sorted(durations.items()) if s >= MIN_RECORDED_S}
        PATH.write_text(json.dumps({"reference_s": round(self.measure(), 4), "tests": tests}, indent=1) + "\n")
