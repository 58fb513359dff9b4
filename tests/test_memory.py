"""A model larger than a process may hold whole: built shard by shard."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from tests.ranks import run_ranks
from trainer import load_config


def peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def build(overrides: list[str], num_steps: int) -> tuple[float, int, list[float]]:
    """Build llama3_1b and train it for some steps; return the peak of memory, the parameters and the losses."""
    from itertools import islice

    from trainer import Trainer
    from trainer.parameters import count_parameters

    trainer = Trainer(load_config("llama3_1b", overrides))
    built = peak_gib()
    return built, count_parameters(trainer.model), [record.loss for record in islice(trainer.steps(), num_steps)]


def test_no_rank_ever_holds_the_whole_model(tmp_path: Path) -> None:
    overrides = ["data.source=synthetic", "data.seq_len=64", "train.global_batch_size=4", f"run.dir={tmp_path / 'a'}"]
    ranks = run_ranks(4, build, overrides, 0)
    peak, num_parameters = max(found[0] for found in ranks), ranks[0][1]
    assert num_parameters == 1_235_814_400, "as published"
    assert peak < 0.7 * num_parameters * 4 / 2**30, f"{peak:.2f} GiB a rank, everything included"


@pytest.mark.slow
def test_it_also_trains_with_a_smaller_vocabulary(tmp_path: Path) -> None:
    overrides = [
        "data.source=synthetic",
        "data.seq_len=32",
        "model.vocab_size=16384",
        "train.global_batch_size=4",
        f"run.dir={tmp_path / 'b'}",
    ]
    for _, num_parameters, losses in run_ranks(4, build, overrides, 2):
        assert num_parameters == 1_006_700_544
        assert 0 < losses[1] < 12
