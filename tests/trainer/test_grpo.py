"""examples/grpo.py: the same texts and rewards on any mesh and after a resume, and a reward that rises."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.launch import REPOSITORY, fork, on_ranks, run_script
from tests.helpers.tiny import lines
from trainer import load_config

QUICK = ["run.threads=1", "run.device=cpu", "eval.every=0", "log.every=1", "checkpoint.every=0"]
SMALL = ["schedule.name=constant", "train.global_batch_size=8", "train.micro_batch_size=2", "schedule.warmup_steps=2"]


def train_grpo(folder: Path, num_supervised: int, overrides: list[str]) -> dict[str, Any]:
    """Train to the end, and return what this rank generated, and how far log-probabilities had moved when trained."""
    sys.path.insert(0, str(REPOSITORY / "examples"))
    import grpo

    grpo.SUPERVISED_STEPS = num_supervised
    texts: dict[int, set[tuple[int, ...]]] = {}
    drifts: list[float] = []

    class Watched(grpo.GRPOTrainer):  # type: ignore[misc,name-defined]
        def roll_out(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            rolled: dict[str, torch.Tensor] = super().roll_out(batch)
            texts.setdefault(self.state.step, set()).update(map(tuple, rolled["tokens"].tolist()))
            return rolled

        def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            if "old_logprobs" in batch:
                logprobs = grpo.token_logprobs(self.model, batch).detach()
                counted = (logprobs - batch["old_logprobs"])[batch["targets"] != grpo.IGNORE]
                drifts.append(float(counted.abs().max()))
            loss: torch.Tensor = super().loss(batch)
            return loss

    recipe = str(REPOSITORY / "examples" / "grpo.yaml")
    trainer = Watched(load_config(recipe, [*QUICK, *overrides, f"run.dir={folder}"]))
    assert trainer.fit() == 0
    trainer.close()
    return {"texts": texts, "drift": max(drifts, default=0.0)}


def rewards(folder: Path) -> dict[int, float]:
    return {
        record["step"]: record["reward"] for record in lines(folder) if record["kind"] == "train" and "reward" in record
    }


def texts_of(found: list[dict[str, Any]]) -> dict[int, set[tuple[int, ...]]]:
    """Return what all ranks generated, by step."""
    return {step: set[tuple[int, ...]]().union(*(each["texts"][step] for each in found)) for step in found[0]["texts"]}


@pytest.mark.campaign
@pytest.mark.parametrize("ranks", [1, 2])
def test_grpo_trains_on_the_same_texts_after_a_resume_on_two_ranks(ranks: int, tmp_path: Path) -> None:
    one = on_ranks(1, train_grpo, tmp_path / "one", 2, [*SMALL, "train.steps=5"])
    two = on_ranks(ranks, train_grpo, tmp_path / "two", 2, [*SMALL, "train.steps=4"])
    resumed = on_ranks(2, train_grpo, tmp_path / "two", 2, [*SMALL, "train.steps=5"])
    assert texts_of(one) == texts_of(two) | texts_of(resumed)
    assert sorted(texts_of(resumed)) == [4]
    assert rewards(tmp_path / "one") == pytest.approx(rewards(tmp_path / "two"), abs=1e-6)
    assert sorted(rewards(tmp_path / "one")) == [3, 4, 5]
    assert max(each["drift"] for each in one + two + resumed) < 1e-5
    last = next(record for record in reversed(lines(tmp_path / "one")) if record["kind"] == "train")
    assert last["data_s"] < last["generate_s"] < last["step_s"], "generation is work, not waiting for data"


@pytest.mark.campaign
@pytest.mark.parametrize(("ranks", "own"), [(2, []), (4, ["mesh.replicate=2"])], ids=["2", "2x2"])
def test_rewards_of_a_hundred_steps_do_not_depend_on_the_mesh(ranks: int, own: list[str], tmp_path: Path) -> None:
    settings = ["train.steps=190", "train.micro_batch_size=8"]
    one = on_ranks(1, train_grpo, tmp_path / "one", 90, settings)
    found = on_ranks(ranks, train_grpo, tmp_path / "ranks", 90, [*settings, *own])
    assert rewards(tmp_path / "one") == pytest.approx(rewards(tmp_path / "ranks"), abs=1e-6)
    assert texts_of(one) == texts_of(found)
    assert len(rewards(tmp_path / "one")) == 100
    assert max(each["drift"] for each in one + found) < 1e-5


@pytest.mark.campaign
def test_example_as_typed_raises_the_reward(tmp_path: Path) -> None:
    arguments = ["recipe=examples/grpo.yaml", "run.threads=1", f"run.dir={tmp_path / 'run'}"]
    trained = fork(run_script, ["examples/grpo.py", arguments], tmp_path / "run").wait()
    assert trained.code == 0, trained.err
    found = [*rewards(tmp_path / "run").values()]
    assert sum(found[-3:]) / 3 > found[0] + 0.15
    evaluated = [record["reward"] for record in trained.of_kind("eval")]
    assert evaluated[-1] > evaluated[0] + 0.1
