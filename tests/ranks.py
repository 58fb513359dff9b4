"""Runs a function, or the command line, on several ranks: real processes on gloo."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

REPOSITORY = Path(__file__).parent.parent


def run_ranks(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return what `function(*arguments)` returns on each of `world_size` ranks.  It must be a module's own function.

    The ranks have torchrun's variables, and nothing has been initialised.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = mp.spawn(
            _rank, (world_size, _free_port(), folder, function, arguments), nprocs=world_size, join=False
        )
        while not context.join(timeout=1):
            pass
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world_size)]


def _rank(
    rank: int, world_size: int, port: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    try:
        torch.save(function(*arguments), Path(folder) / f"{rank}.pt")
        while rank == 0 and len(list(Path(folder).glob("*.pt"))) < world_size:
            time.sleep(0.01)  # it has the store in which the others still look for each other
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@dataclass(frozen=True)
class Ran:
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


TINY = [
    "model.dim=32",
    "model.num_layers=2",
    "model.num_heads=4",
    "model.ffn_dim=64",
    "data.seq_len=32",
    "train.global_batch_size=8",
    "train.micro_batch_size=1",
    "eval.every=0",
    "checkpoint.every=0",
    "log.every=1",
    "log.sample_tokens=0",
    "schedule.warmup_steps=5",
]
"""Overrides that make llama_small train a step in milliseconds."""


def run_command(
    folder: Path, *arguments: str, launcher: Sequence[str] = (), timeout_s: float = 120, cwd: Path = REPOSITORY
) -> Ran:
    """Run `python -m trainer.run` with the arguments and `run.dir=folder`."""
    command = [*(launcher or [sys.executable]), "-m", "trainer.run", *arguments, f"run.dir={folder}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, cwd=cwd)
    return Ran(done.returncode, done.stdout, done.stderr, folder)


def run_tiny(folder: Path, *arguments: str, ends: int = 0, **options: Any) -> Ran:
    """Run `llama_small`, made tiny, and demand that it ends well, or as it should."""
    ran = run_command(folder, "recipe=llama_small", *merged(TINY, arguments), **options)
    assert ran.exit_code == ends, ran.stderr + ran.stdout
    return ran


def merged(base: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Return the overrides of `base` that are not given again, and those that are given."""
    given = {override.partition("=")[0] for override in overrides}
    return [*(item for item in base if item.partition("=")[0] not in given), *overrides]


def tiny_overrides(*overrides: str) -> list[str]:
    """Return the overrides of a tiny llama_small with some of them replaced."""
    return merged(TINY, overrides)
