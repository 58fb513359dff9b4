"""gpt_oss and deepseek_v3 on several ranks, compiled, and planned: the losses of one rank, and the planned messages."""

from __future__ import annotations

import copy
import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.experts.test_balance import biases_of
from tests.experts.test_expert_parallel import EXCHANGE, FOUR, GATHER, TWO, assert_planned, measure, plan_of
from tests.helpers.ranks import merged, run_ranks
from tests.trainer.test_exactness import relative
from trainer import RunConfig, Trainer, load_config
from trainer.plan.probe import _trace as trace

CAMPAIGN = pytest.mark.campaign
STEPS = 20
ROPE = ["model.rope_factor=4", "model.rope_original_len=16"]
RECIPES = {
    "gpt_oss": [
        *("recipe=gpt_oss_small", "model.num_layers=2", "model.dim=32", "model.num_heads=4", "model.head_dim=8"),
        *("model.window=5", "model.expert_dim=24", "model.num_experts=4", "model.num_chosen=2", *ROPE),
    ],
    "deepseek_v3": [
        *("recipe=deepseek_v3_small", "model.num_layers=2", "model.dim=32", "model.num_heads=4", "model.kv_rank=12"),
        *("model.q_rank=20", "model.nope_dim=8", "model.rope_dim=6", "model.value_dim=10", "model.ffn_dim=40"),
        *("model.expert_dim=24", "model.num_experts=8", "model.num_chosen=2", *ROPE),
    ],
}
TINY = [
    *("data.source=synthetic", "data.seq_len=32", "train.global_batch_size=8", "train.micro_batch_size=1"),
    *(f"train.steps={STEPS}", "schedule.warmup_steps=5", "run.threads=1", "run.device=cpu", "train.compile=false"),
    *("eval.every=0", "checkpoint.every=0", "log.every=1", "log.sample_tokens=0"),
]


def config_of(name: str, folder: Path | str, *overrides: str) -> RunConfig:
    recipe, *model = RECIPES[name]
    given = merged([*TINY, *model], [*overrides, f"run.dir={folder}"])
    return load_config(recipe.removeprefix("recipe="), given)


def train_each(folder: Path, runs: list[tuple[str, list[str]]], num_steps: int) -> list[dict[str, Any]]:
    """Train each model with its overrides, one after another in one process group; see also `biases_of`."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    found = []
    for number, (name, overrides) in enumerate(runs):
        trainer = Trainer(config_of(name, folder / str(number), *overrides))
        records = list(itertools.islice(trainer.steps(), num_steps))
        trainer.close()
        fields = ("loss", "grad_norm", "busiest_expert")
        found.append({field: [record[field] for record in records] for field in fields})
        found[-1]["biases"] = biases_of(trainer)
    return found


FEW_STEPS = [
    [TWO, EXCHANGE, "mesh.context=2", "mesh.context_method=gather", "train.activation_checkpoint=full"],
    [FOUR, GATHER, "mesh.context=4", "mesh.context_method=heads", "train.activation_checkpoint=selective"],
]
EVERY = [
    [*mesh, method, *policy]
    for mesh in ([TWO], [FOUR], [TWO, "mesh.replicate=2"])
    for method in (EXCHANGE, GATHER)
    for policy in (
        *([], ["train.activation_checkpoint=full"], ["train.activation_checkpoint=selective"]),
        *(["fsdp.accumulate=sharded"], ["mesh.context=2", "data.documents=masked"], ["train.micro_batch_size=2"]),
    )
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "runs", "num_steps"),
    [
        *(
            pytest.param(name, [run], 3, id=f"few steps {name}", marks=() if name == "gpt_oss" else CAMPAIGN)
            for name, run in zip(RECIPES, FEW_STEPS, strict=True)
        ),
        *(
            pytest.param(name, EVERY[first::3], STEPS, marks=CAMPAIGN, id=f"{name} {first}")
            for name in RECIPES
            for first in range(3)
        ),
    ],
)
def test_losses_are_those_of_one_rank(name: str, runs: list[list[str]], num_steps: int, tmp_path: Path) -> None:
    on_four = [(name, run) for run in runs]
    on_one = [(name, [item for item in run if item.startswith("data.")]) for name, run in on_four]
    different = [pair for number, pair in enumerate(on_one) if pair not in on_one[:number]]
    alone = run_ranks(1, train_each, tmp_path / "one", different, num_steps, timeout_s=2400)[0]
    found = run_ranks(4, train_each, tmp_path / "four", on_four, num_steps, timeout_s=2400)[-1]
    for run, same, ours in zip(runs, on_one, found, strict=True):
        theirs = alone[different.index(same)]
        print(name, run, relative(ours["loss"], theirs["loss"]), relative(ours["grad_norm"], theirs["grad_norm"]))
        assert relative(ours["loss"], theirs["loss"]) < 1e-6, run
        assert relative(ours["grad_norm"], theirs["grad_norm"]) < 1e-5, run
        assert ours["busiest_expert"] == theirs["busiest_expert"], run
        assert ours["biases"] == theirs["biases"], run
        assert any(value for layer in ours["biases"] for value in layer) == (name == "deepseek_v3")


@CAMPAIGN
@pytest.mark.parametrize("name", RECIPES)
def test_compiled_blocks_gather(name: str, tmp_path: Path) -> None:
    runs = [(name, [TWO, GATHER, "train.compile=true", "data.documents=masked"])]
    ours = run_ranks(2, train_each, tmp_path / "two", runs, 3, timeout_s=900)[0][0]
    theirs = run_ranks(1, train_each, tmp_path / "one", [(name, ["data.documents=masked"])], 3)[0][0]
    assert relative(ours["loss"], theirs["loss"]) < 1e-6


@CAMPAIGN
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize(
    "overrides",
    [
        [TWO, EXCHANGE],
        [FOUR, GATHER, "train.activation_checkpoint=full"],
        [TWO, EXCHANGE, "mesh.context=2", "mesh.context_method=gather"],
    ],
)
def test_a_run_sends_what_was_planned(name: str, overrides: list[str], tmp_path: Path) -> None:
    of_four = ["model.num_experts=4", *(["model.num_groups=2"] if name == "deepseek_v3" else [])]
    given, make_config = [*overrides, *of_four], partial(config_of, name)
    found = run_ranks(4, measure, tmp_path / "run", given, make_config)
    assert_planned(found, plan_of(tmp_path, given, make_config))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "checkpointing"),
    [
        pytest.param(*pair, marks=() if pair == ("deepseek_v3", "none") else CAMPAIGN)
        for pair in itertools.product(RECIPES, ("none", "selective", "full"))
    ],
)
def test_short_plan_equals_the_full_one(name: str, checkpointing: str) -> None:
    """With windows in every other block, or without experts in the first two: other blocks are left out."""
    more = ["model.num_layers=12", "fsdp.param_dtype=bfloat16"]
    more += ["model.num_dense_layers=2"] if name == "deepseek_v3" else []
    config = config_of(name, "unused", *more)
    with torch.device("meta"):
        model = config.recipe.build_model(config.model)
    short, whole = (
        trace(copy.deepcopy(model), config, 2, checkpointing, 0.0, "cpu", shortens) for shortens in (True, False)
    )
    assert [(event.kind, event.unit) for event in short.events] == [(e.kind, e.unit) for e in whole.events]
    for one, other in zip(short.events, whole.events, strict=True):
        assert abs(one.segment.net - other.segment.net) <= 4096, (one.kind, one.unit)
        assert sum(w.flops * n for w, n in one.segment.work) == sum(w.flops * n for w, n in other.segment.work)
