"""How long a test may take, on this machine's own scale: else the tests get slow again, a second at a time.

`durations.json` has what each test took when they were last recorded (`make durations`), and what a fixed piece of
work took then.  The same work is measured in every run, so that a slow or busy machine gives each test more.
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
"""What a test of the tier may take that is not on record: it is new, or was short.  The first one pays for imports."""

SEVERAL = 4.0
"""How many times of what is on record is too much.  Two busy loops beside two cores make it twice, at times thrice."""

STALL_S = 5.0
"""What a disk that flushes may add, and what was busy is idle again when the reference is measured."""

SHORT_S = 0.5
"""What is not worth a line in the record."""

PATH = Path(__file__).parent / "durations.json"


def tier_of(item: Any) -> str:
    """Return the tier of a test, by its markers."""
    if item.get_closest_marker("campaign"):
        return "campaign"
    return "test" if item.get_closest_marker("slow") else "fast"


def seconds_on_record() -> dict[str, Any]:
    return json.loads(PATH.read_text()) if PATH.exists() else {"reference_s": 0.0, "tests": {}}


def reference_s() -> float:
    """Return what a fixed piece of work takes here and now: the interpreter, tensors, and files."""
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
    """Return how many times as slow as the one on record this machine is now; never below 1."""
    return max(1.0, reference_s() / (seconds_on_record()["reference_s"] or 1.0))


@dataclass
class Budget:
    """What the tests may take, by what is on record."""

    with_absolute_paths: Mapping[str, Any]
    measure: Any = reference_s
    _scale: float = field(default=0.0, init=False)

    def overrun(self, nodeid: str, tier: str, seconds: float) -> str:
        """Return what is wrong with a test that took so long, empty if nothing is.

        The machine's scale is measured only where it matters, and again each time: it may have become busy since.
        """
        recorded = self.with_absolute_paths["tests"].get(nodeid, 0.0)
        share = max(SHARE_S[tier], SEVERAL * recorded)
        if seconds <= share:
            return ""
        self._scale = max(1.0, self._scale, self.measure() / (self.with_absolute_paths["reference_s"] or 1.0))
        if seconds <= share * self._scale + STALL_S:
            return ""
        known = f"{recorded:.1f} s are on record" if recorded else f"a new one of its tier may take {share:.0f} s"
        return (
            f"{nodeid} took {seconds:.1f} s: {known}, and this machine is {self._scale:.1f} times as slow as when they "
            "were recorded.  Make it faster, give it another tier, or record durations again (make durations)."
        )

    def record(self, durations: Mapping[str, float]) -> None:
        """Write what the tests of this run took.  It must be all of a tier: what is not in it is forgotten."""
        tests = {name: round(s, 1) for name, s in sorted(durations.items()) if s >= SHORT_S}
        PATH.write_text(json.dumps({"reference_s": round(self.measure(), 4), "tests": tests}, indent=1) + "\n")
