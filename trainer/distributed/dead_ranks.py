"""Finds out which ranks have died, and why.

If a rank is killed, the other ranks only see a closed connection and raise generic network errors.  But the launcher
learns the rank's exit status, and ranks on the same machine can see that its process is dead.
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

_CONNECTION_LOST = re.compile(r"(closed|reset) by peer|broken pipe|remote process exit|ncclRemoteError", re.IGNORECASE)
_MAX_NAMED = 4
"""Maximum number of dead ranks to name."""


def describe_exit(rank: int, pid: int, exit_code: int | None) -> str:
    """Describe how a rank ended, as far as its exit code (None if unknown) reveals."""
    subject = f"rank {rank} (process {pid})"
    if exit_code is None:
        return f"{subject} has died"
    if exit_code >= 0:
        return f"{subject} has ended with exit code {exit_code}"
    signal_name = f"signal {-exit_code}"
    with contextlib.suppress(ValueError):
        signal_name = signal.Signals(-exit_code).name
    reason = "; the kernel does this if the host runs out of memory" if signal_name == "SIGKILL" else ""
    return f"{subject} was killed by {signal_name}{reason}"


def describe_killed_ranks(failures: Mapping[int, ProcessFailure]) -> str:
    """Describe which ranks were killed first, and by which signals; "" if none were, or only by the launcher.

    failures: for each rank, how its process ended, according to the launcher.  A negative exit code is a signal, as in
        `subprocess`.
    """
    first_death = min((failure.timestamp for failure in failures.values()), default=0)
    # Later deaths do not count: the launcher kills ranks that do not exit.
    killed = {
        rank: failure
        for rank, failure in failures.items()
        if failure.exitcode < 0 and failure.timestamp <= first_death + 1
    }
    not_by_launcher = {rank: failure for rank, failure in killed.items() if failure.exitcode != -signal.SIGTERM}
    if not not_by_launcher and len(killed) < len(failures):
        return ""  # the launcher ends the remaining ranks with SIGTERM
    reported = sorted((not_by_launcher or killed).items())
    messages = [describe_exit(rank, failure.pid, failure.exitcode) for rank, failure in reported[:_MAX_NAMED]]
    return "; ".join([*messages, *([f"and {len(reported) - _MAX_NAMED} more"] if len(reported) > _MAX_NAMED else [])])


def is_lost_connection(error: BaseException) -> bool:
    """Return whether an error only reports that the connection to another rank was lost."""
    return isinstance(error, (RuntimeError, OSError)) and _CONNECTION_LOST.search(str(error)) is not None


@dataclass(frozen=True)
class Process:
    """A process, identified by its machine (or container) and its PID there."""

    machine: str
    pid: int


def this_process() -> Process:
    """Return the identity of this process."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return Process(" ".join(parts), os.getpid())


def describe_dead_ranks(ranks: Sequence[Process], timeout_s: float) -> str:
    """Describe which ranks on this machine have died and, if still known, how; empty if none has died.

    Polls for `timeout_s` seconds, because the connections of a dying process close before it dies.
    """
    machine = this_process().machine
    local_pids = {rank: process.pid for rank, process in enumerate(ranks) if process.machine == machine}
    deadline = time.monotonic() + timeout_s
    while True:
        messages = [message for rank, pid in local_pids.items() if (message := _describe_death(rank, pid))]
        if messages or time.monotonic() > deadline:
            return "; ".join(messages[:_MAX_NAMED])
        time.sleep(0.05)


def _describe_death(rank: int, pid: int) -> str:
    """Describe how a rank has died; empty if it is alive, or if this is unknown.  Linux only."""
    if not Path("/proc/self/stat").exists():
        return ""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return describe_exit(rank, pid, None)
    except OSError:
        return ""
    if fields[0] not in ("Z", "X"):
        return ""
    status = int(fields[49])  # a zombie's status, as wait(2) encodes it
    return describe_exit(rank, pid, -(status & 0x7F) or status >> 8)
