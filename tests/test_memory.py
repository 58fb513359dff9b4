"""A model larger than a process may hold whole: built shard by shard."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from tests.ranks import run_ranks, tiny_overrides
from trainer import load_config


def peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def build(overrides: list[str], num_steps: int) -> tuple[float, int, list[float]]:
    """Build llama3_1b and train it for some steps; return the peak of memory, the parameters and the losses."""
    from itertools import islice

    from trainer import Trainer
    from trainer.model.parameters import count_parameters

    trainer = Trainer(load_config("llama3_1b", overrides))
    built = peak_gib()
    return built, count_parameters(trainer.model), [record.loss for record in islice(trainer.steps(), num_steps)]


def build_small(folder: Path) -> tuple[float, float]:
    """Build a model of some 90 M parameters; return by how much memory has grown at its peak, and its size, in MiB."""
    from trainer import Trainer
    from trainer.model.parameters import count_parameters

    Trainer(load_config("llama_small", tiny_overrides(f"run.dir={folder}"))).close()  # what the first one imports
    wide = ["model.dim=1024", "model.num_heads=8", "model.num_kv_heads=8", "model.ffn_dim=4096", "model.num_layers=4"]
    before = peak_gib()
    trainer = Trainer(load_config("llama_small", tiny_overrides(*wide, "model.vocab_size=16384", f"run.dir={folder}")))
    found = 1024 * (peak_gib() - before), 4 * count_parameters(trainer.model) / 2**20
    trainer.close()
    return found


@pytest.mark.slow
def test_no_rank_holds_the_whole_model(tmp_path: Path) -> None:
    for grown, size in run_ranks(4, build_small, tmp_path):
        assert size > 300
        print(f"grown by {grown:.0f} of {size:.0f} MiB")
        assert grown < 0.7 * size


@pytest.mark.campaign
def test_no_rank_ever_holds_the_whole_model(tmp_path: Path) -> None:
    """The same at the size of a model that is used, everything included."""
    overrides = ["data.source=synthetic", "data.seq_len=64", "train.global_batch_size=4", f"run.dir={tmp_path / 'a'}"]
    ranks = run_ranks(4, build, overrides, 0)
    peak, num_parameters = max(found[0] for found in ranks), ranks[0][1]
    assert num_parameters == 1_235_814_400, "as published"
    assert peak < 0.7 * num_parameters * 4 / 2**30, f"{peak:.2f} GiB a rank, everything included"


@pytest.mark.campaign
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
