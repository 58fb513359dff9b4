"""The number of sockets that a rank opens to other ranks; each process group needs its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.helpers.ranks import run_ranks, tiny_overrides
from trainer import Trainer, load_config

RANKS = 16


def descriptors_in_a_run(folder: Path) -> int:
    """Train, evaluate nothing, save twice; return the largest number of descriptors that this rank had open."""
    own = ["data.source=synthetic", f"train.global_batch_size={RANKS}", "train.steps=4", "checkpoint.every=2"]
    trainer = Trainer(load_config("llama_small", [*tiny_overrides(*own), f"run.dir={folder}"]))
    max_open = 0

    def count(*_: object) -> None:
        nonlocal max_open
        max_open = max(max_open, len(os.listdir("/proc/self/fd")))

    trainer.on_step = count  # type: ignore[method-assign]
    assert trainer.fit() == 0
    count()
    trainer.close()
    return max_open


@pytest.mark.campaign
def test_ranks_open_few_descriptors(tmp_path: Path) -> None:
    """36 to 40, and 67 on the rank with the store; with connections between all ranks it would be 86 and 112."""
    found = run_ranks(RANKS, descriptors_in_a_run, tmp_path / "run")
    print(f"descriptors of each of {RANKS} ranks: {sorted(found)}")
    assert max(found) < 6 * RANKS
