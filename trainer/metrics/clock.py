"""Clock of a run: seconds since the Unix epoch, unaffected by adjustments of the system clock.

An attempt reads the system clock once and measures time with a monotonic clock from then on.  It also records the boot
time, so that the next attempt on the same machine can compute the elapsed time even if the system clock was changed in
between.
"""

from __future__ import annotations

import time
from pathlib import Path


def uptime() -> float:
    """Return the seconds since this machine booted, including time in suspend.  Monotonic."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def find_boot() -> str:
    """Return an identifier of the current boot, or an empty string if the system provides none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class Clock:
    """The clock of one attempt."""

    def __init__(self) -> None:
        self.boot = find_boot()
        self.booted = time.time() - uptime()
        """Boot time in seconds since the epoch, according to the system clock when this object was created."""

    def now(self) -> float:
        """Return the current time in seconds since the epoch."""
        return self.at(uptime())

    def at(self, uptime_s: float) -> float:
        """Return the time at which the machine had been up for `uptime_s` seconds."""
        return self.booted + uptime_s
