"""Runs shared by many tests: each is trained only once, by the first pytest worker that needs it.

A test that only reads uses the fixture directly; one that resumes or damages the run uses a copy (`copy_to`).
"""

from __future__ import annotations

import fcntl
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.ranks import CommandResult, run_tiny

STEPS = 20
SAVED_STEPS = (10, 20)
"""The steps for which a shared run has checkpoints."""

MESHES = {"one": ["nproc=1"], "two": ["nproc=2"], "four": ["nproc=4", "mesh.replicate=2", "train.micro_batch_size=1"]}
"""The shared runs and their meshes: 1, 2 and 2 x 2 ranks."""


@dataclass(frozen=True)
class SharedRun:
    """A finished run of tiny llama_small."""

    ran: CommandResult
    overrides: list[str]
    """The run's overrides. Started again with these, it has nothing to do; with more steps, it continues."""

    def copy_to(self, folder: Path, up_to: int = STEPS) -> Path:
        """Return a copy, as if the run had crashed after the save of step `up_to` and before the next."""
        shutil.copytree(self.ran.folder, folder)
        for step in SAVED_STEPS:
            if step > up_to:
                shutil.rmtree(folder / "checkpoints" / f"step_{step:08d}")
        return folder


def _train(name: str, factory: pytest.TempPathFactory) -> SharedRun:
    base = factory.getbasetemp()
    base = base.parent if base.name.startswith("popen-") else base  # shared by all workers of pytest-xdist
    overrides = [f"train.steps={STEPS}", "checkpoint.every=10", "checkpoint.keep_last=0", *MESHES[name]]
    folder, output_file = base / f"shared-{name}", base / f"shared-{name}.json"
    with open(base / f"shared-{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not output_file.exists():
            shutil.rmtree(folder, ignore_errors=True)  # left by a worker that was killed
            ran = run_tiny(folder, *overrides)
            output_file.write_text(json.dumps([ran.stdout, ran.stderr]))
    stdout, stderr = json.loads(output_file.read_text())
    return SharedRun(CommandResult(0, stdout, stderr, folder), overrides)


@pytest.fixture(scope="session")
def one(tmp_path_factory: pytest.TempPathFactory) -> SharedRun:
    """A run of 20 steps on one rank, with checkpoints of steps 10 and 20."""
    return _train("one", tmp_path_factory)


@pytest.fixture(scope="session")
def two(tmp_path_factory: pytest.TempPathFactory) -> SharedRun:
    """The same run on two ranks."""
    return _train("two", tmp_path_factory)


@pytest.fixture(scope="session")
def four(tmp_path_factory: pytest.TempPathFactory) -> SharedRun:
    """The same run on 2 x 2 ranks."""
    return _train("four", tmp_path_factory)
