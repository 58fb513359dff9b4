"""Finds out which rank has died, and of which signal.

What is left of a rank that was killed is a closed connection: the others fail with whatever their network says of that.
Who started it learns how it ended, and the ranks beside it on its machine can see that it has gone.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

_LOST = re.compile(r"(closed|reset) by peer|broken pipe|remote process exit|ncclRemoteError", re.IGNORECASE)
_MOST = 4
"""How many of the dead are named."""


class End(Protocol):
    """The end of a worker, as its launcher has seen it."""

    pid: int
    exitcode: int
    """As of Python's processes: negative, the signal that killed it."""
    timestamp: int
    """When, in seconds."""


def describe_end(rank: int, pid: int, exit_code: int | None) -> str:
    """Return in words how a rank ended; without an exit code, that it did."""
    who = f"rank {rank} (process {pid})"
    if exit_code is None:
        return f"{who} has died"
    if exit_code >= 0:
        return f"{who} has ended with exit code {exit_code}"
    name = f"signal {-exit_code}"
    with contextlib.suppress(ValueError):
        name = signal.Signals(-exit_code).name
    why = "; the kernel does that where the host's memory is full" if name == "SIGKILL" else ""
    return f"{who} was killed by {name}{why}"


def find_killed(ends: Mapping[int, End]) -> str:
    """Return which ranks were killed, and by which signal; empty if none was, but by the launcher."""
    first = min((end.timestamp for end in ends.values()), default=0)
    # What comes later the launcher has killed because it did not end.
    killed = {rank: end for rank, end in ends.items() if end.exitcode < 0 and end.timestamp <= first + 1}
    by_others = {rank: end for rank, end in killed.items() if end.exitcode != -signal.SIGTERM}
    if not by_others and len(killed) < len(ends):
        return ""  # it ends those that are left by SIGTERM, too
    named = sorted((by_others or killed).items())
    words = [describe_end(rank, end.pid, end.exitcode) for rank, end in named[:_MOST]]
    return "; ".join([*words, *([f"and {len(named) - _MOST} more"] if len(named) > _MOST else [])])


def is_lost_connection(error: BaseException) -> bool:
    """Return whether an error only says that another rank no longer answers."""
    return isinstance(error, (RuntimeError, OSError)) and _LOST.search(str(error)) is not None


@dataclass(frozen=True)
class Process:
    """A process, and the machine (or container) in which its number means something."""

    machine: str
    pid: int


def this_process() -> Process:
    """Return what the other ranks are to know of this one."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return Process(" ".join(parts), os.getpid())


def find_dead(ranks: Sequence[Process], patience_s: float) -> str:
    """Return which of the ranks on this machine has died, and of what if that can still be seen; empty if none has.

    Asks again for `patience_s`: the connections of a dying process are closed before it is dead.
    """
    here = this_process().machine
    neighbours = {rank: process.pid for rank, process in enumerate(ranks) if process.machine == here}
    until = time.monotonic() + patience_s
    while True:
        words = [found for rank, pid in neighbours.items() if (found := _death_of(rank, pid))]
        if words or time.monotonic() > until:
            return "; ".join(words[:_MOST])
        time.sleep(0.05)


def _death_of(rank: int, pid: int) -> str:
    """Return how a rank has died, empty if it is alive or there is no saying.  Linux only."""
    if not Path("/proc/self/stat").exists():
        return ""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return describe_end(rank, pid, None)
    except OSError:
        return ""
    if fields[0] not in ("Z", "X"):
        return ""
    status = int(fields[49])  # as of wait(2): it has not been asked for yet
    return describe_end(rank, pid, -(status & 0x7F) or status >> 8)
