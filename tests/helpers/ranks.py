"""Runs a function or a command on several ranks: real processes that communicate over gloo (see forked.py)."""

from __future__ import annotations

__all__ = ["TINY", "merged"]

import json
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers.forked import REPOSITORY, call_on_ranks, fork, nproc_worker_variables, run_module, start_run
from tests.helpers.launch import TINY, merged, tiny


def run_ranks(world_size: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 300) -> list[Any]:
    """Return the result of `function(*arguments)` for each rank. It must be a module-level function.

    The ranks have torchrun's variables; nothing is initialized.
    """
    return call_on_ranks(world_size, function, arguments, timeout_s)


@dataclass(frozen=True)
class CommandResult:
    """A finished command: its exit code and what it printed."""

    exit_code: int
    stdout: str
    stderr: str
    folder: Path

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    @property
    def status(self) -> dict[str, Any]:
        return json.loads((self.folder / "status.json").read_text())

    def train(self, field: str) -> list[Any]:
        return [line[field] for line in self.metrics if line["kind"] == "train"]


def run_command(folder: Path, *arguments: str, launcher: Sequence[str] = (), timeout_s: float = 240) -> CommandResult:
    """Run `python -m trainer.run` with the arguments and `run.dir=folder` in forked processes.

    `nproc=N` works as on the command line, except that ranks are forked. With `launcher`, the command is started with
    it instead: `FRESH` for a new interpreter, or torchrun.
    """
    arguments = (*arguments, f"run.dir={folder}")
    if launcher:
        command = [*launcher, "-m", "trainer.run", *arguments]
        completed = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, cwd=REPOSITORY)
        return CommandResult(completed.returncode, completed.stdout, completed.stderr, folder)
    ranks = next((int(item[6:]) for item in arguments if re.fullmatch(r"nproc=\d+", item)), 1)
    with tempfile.TemporaryDirectory() as logs:
        started = start_run(arguments, Path(logs), ranks, nproc_worker_variables(ranks) if ranks > 1 else {})
        codes = set(started.wait_like_launcher(timeout_s))
        if codes & {2, 75}:  # the other ranks were terminated, some before they handled signals
            codes.discard(-signal.SIGTERM)
        assert min(codes) >= 0 or not codes & {2, 75}, f"a rank has crashed: {codes}\n{started.stderr}"
        code = next((one for one in (2, 75) if one in codes), 1) if codes != {0} else 0
        return CommandResult(code, started.stdout, started.stderr, folder)


FRESH = (sys.executable,)
"""The launcher for tests of the start itself, or of the processes that `nproc=N` starts."""


def run_python_module(module: str, *arguments: object, cwd: Path = REPOSITORY, timeout_s: float = 240) -> CommandResult:
    """Run `python -m module arguments...` in a forked process."""
    with tempfile.TemporaryDirectory() as logs:
        started = fork(run_module, [module, list(map(str, arguments))], Path(logs), cwd=cwd)
        (code,) = started.wait_like_launcher(timeout_s)
        return CommandResult(code, started.stdout, started.stderr, cwd)


def run_tiny(folder: Path, *arguments: str, exit_code: int = 0, **options: Any) -> CommandResult:
    """Run a tiny `llama_small`, and assert that its exit code is `exit_code`."""
    ran = run_command(folder, "recipe=llama_small", *tiny_overrides(*arguments), **options)
    assert ran.exit_code == exit_code, ran.stderr + ran.stdout
    return ran


tiny_overrides = tiny
