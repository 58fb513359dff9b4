"""The command in `run.on_end`: rank 0 runs it once, and tells it how the run ended."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping

LIMIT_S = 30.0
"""How long it may take: whatever has asked the run to stop waits for it."""
_GRACE_S = 5.0
"""After so much more the command is ended where the run no longer can: it was killed meanwhile, or left in a hurry."""


def tell_of_the_end(command: str, facts: Mapping[str, object]) -> str:
    """Run a command in a shell, with `facts` in its environment.  Returns what went wrong, in words; empty if nothing.

    Signals to the run's process group do not reach it.
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
    """Return the command that ends another, and all that this has started, after a time; empty where there is none."""
    program = shutil.which("timeout")
    return [] if program is None else [program, "-s", "KILL", f"{LIMIT_S + _GRACE_S:g}"]
