"""Runs the command in `run.on_end` once, on rank 0, with the outcome of the run in its environment."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping

LIMIT_S = 30.0
"""Time limit of the command: whoever asked the run to stop waits for it."""
_GRACE_S = 5.0
"""Extra time after which `timeout` kills the command, if this process was killed meanwhile and cannot."""


def run_end_command(command: str, facts: Mapping[str, object]) -> str:
    """Run a shell command with `facts` in its environment; return an error message, or an empty string.

    The command runs in its own session, so that signals to the run's process group do not reach it.
    """
    env = os.environ | {name: str(value) for name, value in facts.items()}
    try:
        words = [*_limiter(), "/bin/sh", "-c", command]
        process = subprocess.Popen(words, env=env, stdin=subprocess.DEVNULL, start_new_session=True)
    except (OSError, ValueError) as error:
        return f"run.on_end cannot be started: {error}"
    try:
        code = process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"run.on_end was stopped: it took more than {LIMIT_S:.0f} s"
    return f"run.on_end failed with exit code {code}" if code else ""


def _limiter() -> list[str]:
    """Return a `timeout` prefix that kills a command and its children after a time; empty if there is no `timeout`."""
    program = shutil.which("timeout")
    return [] if program is None else [program, "-s", "KILL", f"{LIMIT_S + _GRACE_S:g}"]
