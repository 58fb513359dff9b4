"""Finds out which rank has died, and of which signal.

When a rank is killed, the other ranks only see a closed connection and raise unspecific network errors.  The launcher
learns the exit status, and ranks on the same machine can see that the process is gone.
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
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

_LOST = re.compile(r"(closed|reset) by peer|broken pipe|remote process exit|ncclRemoteError", re.IGNORECASE)
_MAX_NAMED = 4
"""Maximum number of dead ranks to name."""


def describe_end(rank: int, pid: int, exit_code: int | None) -> str:
    """Describe how a rank ended; without an exit code, only that it died."""
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


def describe_killed(ends: Mapping[int, ProcessFailure]) -> str:
    """Describe which ranks were killed by which signals, ignoring kills by the launcher; empty if none was.

    `ends`: how workers ended, as the launcher saw it, by rank.  As in `subprocess`, a negative exit code is a signal.
    """
    first = min((end.timestamp for end in ends.values()), default=0)
    # Later deaths are the launcher's kills of ranks that did not exit.
    killed = {rank: end for rank, end in ends.items() if end.exitcode < 0 and end.timestamp <= first + 1}
    by_others = {rank: end for rank, end in killed.items() if end.exitcode != -signal.SIGTERM}
    if not by_others and len(killed) < len(ends):
        return ""  # the launcher also ends the remaining ranks by SIGTERM
    named = sorted((by_others or killed).items())
    words = [describe_end(rank, end.pid, end.exitcode) for rank, end in named[:_MAX_NAMED]]
    return "; ".join([*words, *([f"and {len(named) - _MAX_NAMED} more"] if len(named) > _MAX_NAMED else [])])


def is_lost_connection(error: BaseException) -> bool:
    """Return whether an error only says that the connection to another rank was lost."""
    return isinstance(error, (RuntimeError, OSError)) and _LOST.search(str(error)) is not None


@dataclass(frozen=True)
class Process:
    """A process, identified by its machine (or container) and its PID there."""

    machine: str
    pid: int


def this_process() -> Process:
    """Return this process, for the other ranks."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return Process(" ".join(parts), os.getpid())


def describe_dead(ranks: Sequence[Process], patience_s: float) -> str:
    """Describe which ranks on this machine have died, and how, if that is still visible; empty if none has.

    Polls for `patience_s` seconds, because the connections of a dying process close before it is dead.
    """
    here = this_process().machine
    neighbours = {rank: process.pid for rank, process in enumerate(ranks) if process.machine == here}
    until = time.monotonic() + patience_s
    while True:
        words = [found for rank, pid in neighbours.items() if (found := _death_of(rank, pid))]
        if words or time.monotonic() > until:
            return "; ".join(words[:_MAX_NAMED])
        time.sleep(0.05)


def _death_of(rank: int, pid: int) -> str:
    """Describe how a rank has died; empty if it is alive or this is unknown.  Linux only."""
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
    status = int(fields[49])  # a zombie's status, in the encoding of wait(2)
    return describe_end(rank, pid, -(status & 0x7F) or status >> 8)
