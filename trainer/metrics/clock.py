"""The clock of a run: seconds since 1970, undisturbed by corrections of the machine's clock.

An attempt asks that clock once.  From then on it counts by one that only goes forward, and says when the machine was
started, so that the next attempt on it knows how much later it is, whatever the clock was set to meanwhile.
"""

from __future__ import annotations

import time
from pathlib import Path


def uptime() -> float:
    """Return the seconds since this machine was started, those asleep included; never less than before."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def find_boot() -> str:
    """Return what tells this start of the machine from all others, empty where nothing does."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class Clock:
    """The clock of one attempt."""

    def __init__(self) -> None:
        self.boot = find_boot()
        self.booted = time.time() - uptime()
        """When the machine was started, by its clock as it is now."""

    def now(self) -> float:
        """Return the time, in seconds since 1970."""
        return self.at(uptime())

    def at(self, uptime_s: float) -> float:
        """Return what time it was when the machine had been up for so long."""
        return self.booted + uptime_s
