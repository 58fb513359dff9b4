"""Dry runs: everything that a start does before the first step, in a temporary folder."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from trainer.config import RunConfig
from trainer.distributed.environment import Environment

_FOLDER = "MESHTRAINER_DRY_RUN"
"""The folder of a dry run, set by the process that starts the ranks."""


@contextmanager
def dry_run_config(config: RunConfig, env: Environment) -> Iterator[RunConfig]:
    """Yield the configuration of a dry run, which writes only to a temporary folder that is removed afterwards.

    A dry run resumes as the run itself would, without changing its checkpoints.
    """
    inherited = os.environ.get(_FOLDER)
    folder = Path(inherited or _name_of(config, env))
    os.environ[_FOLDER] = str(folder)
    checkpoint_dir = config.checkpoint.dir or f"{config.run.dir}/checkpoints"
    resume = config.checkpoint.resume
    if resume == "auto":
        resume = checkpoint_dir if "://" in checkpoint_dir or any(Path(checkpoint_dir).glob("step_*")) else "none"
    try:
        yield replace(
            config,
            run=replace(config.run, dir=str(folder / config.run.name), on_end=None),
            checkpoint=replace(config.checkpoint, dir=None, resume=resume),
            log=replace(config.log, wandb="off", tensorboard=False),
        )
    finally:
        if inherited is None:
            os.environ.pop(_FOLDER)
            if env.rank == 0:  # only rank 0 writes
                shutil.rmtree(folder, ignore_errors=True)


def _name_of(config: RunConfig, env: Environment) -> Path:
    """Return the temporary folder, the same on all ranks of a node with any launcher."""
    started_by = os.environ.get("TORCHELASTIC_RUN_ID") or env.job or os.getpid()
    seed = f"{os.getuid()} {started_by} {Path(config.run.dir).absolute()}"
    return Path(tempfile.gettempdir()) / f"meshtrainer-dry-run-{hashlib.sha256(seed.encode()).hexdigest()[:16]}"
