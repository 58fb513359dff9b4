"""Limits how long each test may take, relative to this machine's speed, so that the tests stay fast.

`durations.json` has the duration of each test when they were last recorded (`make durations`), and the duration of a
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

SHARE_S = {"fast": 5.0, "test": 20.0, "campaign": 600.0}
"""Limit for a test without a record, because it is new or was short. The first one includes imports."""

SEVERAL = 4.0
"""The limit as a multiple of the recorded duration. Two busy loops on two cores double it, at times triple it."""

STALL_S = 5.0
"""Allowance for a slow disk flush, and for load that has ended when the reference is measured."""

SHORT_S = 0.5
"""Shorter durations are not recorded."""

PATH = Path(__file__).parent / "durations.json"


def tier_of(item: Any) -> str:
    """Return the tier of a test, by its markers."""
    if item.get_closest_marker("campaign"):
        return "campaign"
    return "test" if item.get_closest_marker("slow") else "fast"


def seconds_on_record() -> dict[str, Any]:
    return json.loads(PATH.read_text()) if PATH.exists() else {"reference_s": 0.0, "tests": {}}


def reference_s() -> float:
    """Return how long a fixed piece of work takes now: interpreter, tensors and files."""
    import tempfile

    import torch

    def once() -> float:
        began = time.perf_counter()
        sum(number * number for number in range(200_000))
        matrix = torch.ones(192, 192)
        for _ in range(40):
            matrix = (matrix @ matrix).tanh()
        with tempfile.TemporaryDirectory() as folder:
            for number in range(20):
                Path(folder, str(number)).write_bytes(bytes(10_000))
        return time.perf_counter() - began

    return sorted(once() for _ in range(5))[2]


def machine_scale() -> float:
    """Return how many times slower this machine is now than the recorded one; at least 1."""
    return max(1.0, reference_s() / (seconds_on_record()["reference_s"] or 1.0))


@dataclass
class Budget:
    """The limits that follow from the recorded durations."""

    record_of_tests: Mapping[str, Any]
    measure: Any = reference_s
    _scale: float = field(default=0.0, init=False)

    def overrun(self, nodeid: str, tier: str, seconds: float) -> str:
        """Return an error message if a test took too long, else an empty string.

        The machine's speed is measured only if it matters, and each time, because the machine may have become busy.
        """
        recorded = self.record_of_tests["tests"].get(nodeid, 0.0)
        share = max(SHARE_S[tier], SEVERAL * recorded)
        if seconds <= share:
            return ""
        self._scale = max(1.0, self._scale, self.measure() / (self.record_of_tests["reference_s"] or 1.0))
        if seconds <= share * self._scale + STALL_S:
            return ""
        known = f"{recorded:.1f} s are on record" if recorded else f"a new test of its tier may take {share:.0f} s"
        return (
            f"{nodeid} took {seconds:.1f} s: {known}, and this machine is {self._scale:.1f} times as slow as when "
            "tests were recorded. Make it faster, move it to another tier, or record durations again (make durations)."
        )

    def record(self, durations: Mapping[str, float]) -> None:
        """Write the durations of this run's tests, which must be all tests of a tier: other records are dropped."""
        tests = {name: round(s, 1) for name, s in sorted(durations.items()) if s >= SHORT_S}
        PATH.write_text(json.dumps({"reference_s": round(self.measure(), 4), "tests": tests}, indent=1) + "\n")
