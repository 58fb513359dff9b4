"""The planner compared with torch's own tracker, with the storages alive, and with real runs on several ranks."""

from __future__ import annotations

import itertools
import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.budget import machine_scale
from tests.helpers.forked import REPOSITORY
from tests.helpers.plan_truth import CollectiveLog, StorageMeter, as_logged, metered_peak, tracked_peak
from tests.helpers.ranks import run_command, run_ranks, run_tiny
from trainer import RunConfig, Trainer, UserError, load_config
from trainer.config import AUTO, MeshShape, check_config, recipe_description, recipe_files, resolve_expert_method
from trainer.plan.__main__ import command_line, default_num_ranks
from trainer.plan.forecast import Forecast
from trainer.plan.machine import GIB, Machine, find_machine
from trainer.plan.plan import Plan, make_plan, without_data
from trainer.plan.probe import Probe
from trainer.plan.search import chosen_settings, fastest_choice
from trainer.recipe import find_recipe

SHALLOW = ["model.num_layers=6", "data.seq_len=2048"]
FULL, SELECTIVE = "train.activation_checkpoint=full", "train.activation_checkpoint=selective"
NEVER, ALWAYS = "fsdp.reshard_after_forward=never", "fsdp.reshard_after_forward=always"
MIXED = "fsdp.reshard_after_forward=[always,always,8,8,2,never,never,never]"


def config_of(recipe: str, *overrides: str, shape: MeshShape, micro_batches: int = 1) -> RunConfig:
    """Return a configuration whose step has `micro_batches` on each rank of `shape`."""
    config = without_data(load_config(recipe, overrides, needs_weights=False))
    micro = config.train.micro_batch_size
    batch = shape.num_ranks * (1 if micro == AUTO else int(micro)) * micro_batches
    return replace(config, train=replace(config.train, global_batch_size=batch))


def plan_of(recipe: str, *overrides: str, shape: MeshShape, micro_batches: int = 1) -> Plan:
    config = config_of(recipe, *overrides, shape=shape, micro_batches=micro_batches)
    return make_plan(config, shape, find_machine("cpu"))


TRACKED = [
    ("llama_small", [], (1, 2)),
    ("llama3_1b", SHALLOW, (1, 8)),
    ("llama3_1b", [*SHALLOW, "model.tie_embeddings=false", NEVER], (1, 4)),
    ("llama3_8b", [*SHALLOW, FULL], (1, 64)),
    ("llama3_8b", [*SHALLOW, MIXED, SELECTIVE], (1, 16)),
    ("llama3_70b", [*SHALLOW, FULL], (8, 64)),
    ("llama3_8b", [*SHALLOW, "train.activation_checkpoint=budget:0.2"], (1, 8)),
]
MORE_TRACKED = [
    ("llama3_1b", ["data.seq_len=2048"], (1, 8)),
    ("llama3_1b", [*SHALLOW, ALWAYS, FULL], (2, 8)),
    ("llama3_1b", [*SHALLOW, "model.tie_embeddings=false", "fsdp.param_dtype=float32"], (1, 8)),
    ("llama3_1b", [*SHALLOW, "fsdp.reduce_dtype=bfloat16"], (4, 2)),
    ("llama3_1b", [*SHALLOW, "train.micro_batch_size=4"], (1, 8)),
    ("llama3_1b", [*SHALLOW, "model.tie_embeddings=false", FULL], (1, 512)),
    ("llama3_1b", [*SHALLOW, "train.activation_checkpoint=2"], (1, 8)),
    ("llama3_8b", [*SHALLOW, "train.activation_checkpoint=none"], (1, 8)),
    ("llama3_8b", [*SHALLOW, NEVER, FULL], (1, 8)),
    ("llama3_8b", [*SHALLOW, "train.activation_checkpoint=budget:0.4"], (2, 8)),
    ("llama3_8b", [*SHALLOW, NEVER, SELECTIVE], (4, 16)),
    ("llama3_8b", [*SHALLOW, ALWAYS, SELECTIVE], (1, 32)),
    ("llama3_8b", [*SHALLOW, "fsdp.reshard_after_forward=8", FULL], (1, 64)),
    ("llama3_8b", [*SHALLOW, "fsdp.reshard_after_forward=8"], (2, 32)),
    ("llama3_8b", [*SHALLOW, MIXED, FULL], (2, 64)),
    ("llama3_8b", [*SHALLOW, "fsdp.reduce_dtype=bfloat16", FULL], (2, 8)),
    ("llama3_8b", [*SHALLOW, "fsdp.prefetch_forward=2", "fsdp.prefetch_backward=2"], (1, 8)),
    ("llama3_8b", ["data.seq_len=1024", FULL], (1, 16)),
    ("llama3_8b", [*SHALLOW, "fsdp.wrap=size:100000000", FULL], (1, 8)),
    ("llama3_70b", [*SHALLOW, NEVER, FULL], (1, 64)),
    ("llama3_70b", [*SHALLOW, ALWAYS], (1, 64)),
    ("llama3_70b", [*SHALLOW, SELECTIVE], (2, 64)),
    ("llama3_70b", [*SHALLOW, MIXED, FULL], (1, 128)),
    ("llama3_70b", [*SHALLOW, "train.micro_batch_size=2", FULL], (1, 256)),
    ("llama3_70b", [*SHALLOW, "fsdp.reshard_after_forward=8", SELECTIVE], (8, 64)),
    ("llama3_405b", ["model.num_layers=6", "data.seq_len=1024", FULL], (1, 512)),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "overrides", "sizes"),
    [*TRACKED[:2], *(pytest.param(*case, marks=pytest.mark.campaign) for case in (*TRACKED[2:], *MORE_TRACKED))],
)
def test_peak_equals_torchs_tracker(recipe: str, overrides: list[str], sizes: tuple[int, int]) -> None:
    shape = MeshShape(*sizes)
    plan = plan_of(recipe, *overrides, shape=shape)
    truth = tracked_peak(plan.config, shape)
    print(f"planned {plan.peak_gib:.3f} GiB, tracked {truth / GIB:.3f} GiB")
    assert abs(plan.memory.peak.total / truth - 1) < 0.01


SMALL = ["model.num_layers=8"]
METERED: list[tuple[str, list[str], tuple[int, int], int]] = [
    # torch's tracker takes one micro-batch only, and has hooks of its own for a unit of two modules (gpt2's tied table)
    ("llama_small", [*SMALL], (1, 4), 3),
    ("llama_small", [*SMALL, "fsdp.param_dtype=bfloat16"], (2, 4), 3),
    ("llama_small", [*SMALL, "fsdp.param_dtype=bfloat16", "fsdp.reduce_dtype=bfloat16"], (1, 4), 2),
    ("llama_small", [*SMALL, "fsdp.accumulate=sharded"], (2, 4), 3),
    ("llama_small", [*SMALL, "fsdp.accumulate=sharded", "fsdp.param_dtype=bfloat16"], (1, 4), 2),
    ("llama_small", [*SMALL, "fsdp.reshard_after_backward=false", NEVER], (1, 4), 3),
    ("llama_small", [*SMALL, "fsdp.reshard_after_forward=2", "fsdp.reshard_after_backward=false"], (1, 4), 2),
    ("llama_small", ["fsdp.wrap=size:50000", FULL], (1, 4), 1),
    ("llama_small", [*SMALL, "train.activation_checkpoint=3"], (1, 4), 1),
    ("llama_small", [*SMALL, "train.activation_checkpoint=budget:0.1"], (1, 4), 2),
    ("gpt2", ["train.micro_batch_size=1", "model.num_layers=6", "train.activation_checkpoint=budget:0.3"], (1, 4), 1),
    ("llama_small", [], (4, 1), 2),
    ("llama_small", [*SMALL, "fsdp.param_dtype=bfloat16"], (1, 1), 2),
    ("gpt2", ["train.micro_batch_size=1", "model.num_layers=6"], (2, 4), 2),
    ("llama3_1b", [*SHALLOW, "fsdp.param_dtype=float32"], (1, 8), 1),
    *(
        ("llama3_1b", [*SHALLOW, "lora.rank=16", f"lora.base_dtype={packing}", *more], sizes, micro_batches)
        for packing, more, sizes, micro_batches in (
            ("nf4", [FULL], (1, 1), 1),
            ("nf4", [FULL], (1, 8), 2),
            ("nf4", [NEVER], (2, 4), 1),
            ("fp8", [SELECTIVE, "fsdp.accumulate=sharded"], (1, 4), 2),
            ("nf4", ["fsdp.param_dtype=float32", "model.tie_embeddings=false"], (1, 1), 1),
        )
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "overrides", "sizes", "micro_batches"),
    [
        METERED[0],
        METERED[8],
        *(pytest.param(*METERED[i], marks=pytest.mark.campaign) for i in range(len(METERED)) if i not in (0, 8)),
    ],
)
def test_peak_equals_that_of_the_storages(
    recipe: str, overrides: list[str], sizes: tuple[int, int], micro_batches: int
) -> None:
    shape = MeshShape(*sizes)
    plan = plan_of(recipe, *overrides, shape=shape, micro_batches=micro_batches)
    truth = metered_peak(plan.config, shape, micro_batches)
    assert abs(plan.memory.peak.total / truth - 1) < 0.001


BF16 = ["train.weights_dtype=bfloat16", "fsdp.param_dtype=bfloat16", "fsdp.reduce_dtype=bfloat16"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "micro_batches"),
    [([], 3), *(pytest.param(*case, marks=pytest.mark.campaign) for case in (([], 1), (BF16, 2)))],
)
def test_peak_of_an_unsharded_model(overrides: list[str], micro_batches: int) -> None:
    shape = MeshShape(1, 1)
    plan = plan_of("llama_small", *SMALL, *overrides, shape=shape, micro_batches=micro_batches)
    truth = metered_peak(plan.config, shape, micro_batches)
    assert abs(plan.memory.peak.total / truth - 1) < 0.001
    assert not plan.collectives


@pytest.mark.slow
def test_peak_of_an_unknown_model() -> None:
    """Odd shapes and two kinds of block, which the planner has no special case for."""
    own = ["model.name=tests.helpers.custom_recipes:mlp", "model.width=1030", "model.num_hidden=21", "data.seq_len=33"]
    shape = MeshShape(1, 4)
    plan = plan_of("llama_small", *own, shape=shape, micro_batches=2)
    assert plan.trace.root == 23
    truth = metered_peak(plan.config, shape, 2)
    assert abs(plan.memory.peak.total / truth - 1) < 0.001


WAYS = ["", "activation", "flag", "left out", "between", "twice", "reversed", "crossed"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", [*WAYS[:4:3], *(pytest.param(way, marks=pytest.mark.campaign) for way in WAYS if way not in WAYS[:4:3])]
)
@pytest.mark.parametrize("micro_batches", [3, pytest.param(1, marks=pytest.mark.campaign)])
def test_blocks_that_only_look_equal_are_traced_separately(way: str, micro_batches: int) -> None:
    """Parameters without a gradient are neither reduced nor kept by the optimizer."""
    own = ["model.name=tests.helpers.custom_recipes:wayward", f"model.way={way}", "data.seq_len=65"]
    shape = MeshShape(1, 4)
    plan = plan_of("llama_small", *own, shape=shape, micro_batches=micro_batches)
    truth = metered_peak(plan.config, shape, micro_batches)
    assert abs(plan.memory.peak.total / truth - 1) < 0.001


def test_model_that_cannot_be_planned() -> None:
    config = config_of("llama_small", "model.name=tests.helpers.custom_recipes:undecided", shape=MeshShape(1, 2))
    with pytest.raises(UserError, match=r"model\.name=.*undecided: cannot be planned: tracing it on fake tensors"):
        make_plan(config, MeshShape(1, 2), find_machine("h100"))


@pytest.mark.campaign
def test_largest_micro_batch_may_need_the_least_memory() -> None:
    """Without accumulation no unsharded gradients of the whole model are kept."""
    autos = [f"{key}={AUTO}" for key in chosen_settings(load_config("llama_small"))]
    whole = "fsdp.accumulate=unsharded"
    config = config_of("llama3_8b", *autos, whole, shape=MeshShape(1, 8), micro_batches=2)
    chosen = fastest_choice(config, MeshShape(1, 8), find_machine("h100", memory_gib=32)).plan
    assert chosen.config.train.micro_batch_size == 2
    assert chosen.fits


# ---------------------------------------------------------------------------------------------------------------
# Real runs


def measure(overrides: list[str]) -> tuple[int, Counter[tuple[str, int, int]]]:
    """Train three steps of a real run; return the peak of tensors and the collectives of the third."""
    trainer = Trainer(load_config("llama_small", overrides))
    meter, log = StorageMeter(), CollectiveLog()
    batches = iter(trainer.loader)
    for number in range(3):
        micro_batches = list(itertools.islice(batches, trainer.num_micro_batches))
        if number < 2:
            trainer.train_step(micro_batches)
            continue
        with meter.running(), log:
            for tensor in (*trainer.model.parameters(), *trainer.model.buffers()):
                meter.note(tensor)
            for part in trainer.optimizer.parts:
                for state in part.state.values():
                    for value in state.values():
                        meter.note(value) if value.ndim else None
            trainer.train_step(micro_batches)
    return meter.peak, log.counts


REAL = [
    (2, ["mesh.shard=2"]),
    (2, ["mesh.shard=1", "mesh.replicate=2", "model.dim=256", "model.ffn_dim=1024"]),  # two buckets
    (2, ["mesh.shard=2", "mesh.context=2", "mesh.context_method=gather"]),
]
MORE_REAL = [
    (4, ["mesh.replicate=2", "mesh.shard=2", "train.global_batch_size=24"]),
    (4, ["mesh.replicate=2", "mesh.shard=2", "optim.name=muon", "optim.muon.bucket_mib=0.2"]),
    (4, ["mesh.shard=4", NEVER, "fsdp.param_dtype=bfloat16"]),
    (4, ["mesh.shard=4", "fsdp.separate_reduce=true"]),
    (4, ["mesh.shard=4", "fsdp.reshard_after_backward=false", "train.global_batch_size=24"]),
    (2, ["mesh.shard=2", "model.tie_embeddings=true"]),
    (4, ["mesh.shard=4", "fsdp.reshard_after_forward=2", FULL, "train.global_batch_size=16"]),
    (4, ["mesh.replicate=2", "mesh.shard=2", "fsdp.accumulate=sharded", "train.global_batch_size=24"]),
    (4, ["mesh.shard=4", "mesh.context=2", "mesh.context_method=heads"]),
    (4, ["mesh.shard=4", "mesh.context=4", "mesh.context_method=gather", FULL]),
    (4, ["mesh.shard=4", "mesh.context=4", "mesh.context_method=gather", "train.activation_checkpoint=selective"]),
    (3, ["mesh.shard=3", "train.global_batch_size=6", "optim.name=muon", "optim.muon.variant=normuon"]),
    (2, ["mesh.shard=1", "mesh.replicate=2", "optim.name=muon", "optim.muon.dtype=float32"]),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nproc", "overrides"), [*REAL, *(pytest.param(*case, marks=pytest.mark.campaign) for case in MORE_REAL)]
)
def test_memory_and_collectives_of_a_real_run_are_as_planned(nproc: int, overrides: list[str], tmp_path: Path) -> None:
    common = ["data.source=synthetic", "run.threads=1", "train.micro_batch_size=2", f"run.dir={tmp_path / 'run'}"]
    arguments = [*common, *overrides]
    config = without_data(load_config("llama_small", arguments))
    shape = MeshShape(max(1, config.mesh.replicate), int(config.mesh.shard))
    plan = make_plan(config, shape, find_machine("cpu"))
    found = run_ranks(nproc, measure, arguments)
    peak, collectives = found[0]
    print(f"planned {plan.memory.peak.total}, measured {peak}: {plan.memory.peak.total / peak:.4f}")
    assert abs(plan.memory.peak.total / peak - 1) < 0.03
    assert collectives == as_logged(plan.collectives)
    assert "optim.name=muon" in overrides or all(counts == collectives for _, counts in found)


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 7])
def test_each_micro_batch_gathers_and_the_last_one_reduces(micro_batches: int) -> None:
    """By hand: 4 blocks are gathered forward and backward, embedding and head once, an empty root never."""
    plan = plan_of("llama_small", "model.num_layers=4", shape=MeshShape(2, 4), micro_batches=micro_batches)
    assert [bool(unit.numel) for unit in plan.trace.units] == [*[True] * 6, False]
    counts: Counter[str] = Counter()
    for collective, count in plan.collectives.items():
        if collective.num_bytes > 100:
            counts[collective.operation] += count
    assert counts == {"all_gather": (2 * 4 + 2) * micro_batches, "reduce_scatter": 6, "all_reduce": 6}


# ---------------------------------------------------------------------------------------------------------------
# auto


def exhaustive(config: RunConfig, shape: MeshShape, machine: Machine, micros: Sequence[int]) -> list[Plan]:
    """Return the plan of every choice there is: each unit for itself, each checkpointing, each micro-batch."""
    found = []
    for micro, kind in itertools.product(micros, ("none", 2, "selective", "full")):
        for entries in itertools.product(("always", "never", 2), repeat=4):
            fsdp = replace(config.fsdp, reshard_after_forward=list(entries))
            train = replace(config.train, micro_batch_size=micro, activation_checkpoint=kind)
            found.append((replace(config, fsdp=fsdp, train=train), (micro, kind)))
    probe = Probe(config, machine.device_type)
    return [make_plan(one, shape, machine, probe) for one, _ in found]


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("micros", "num_budgets"), [((1, 2), 4), pytest.param((1, 2, 4), 20, marks=pytest.mark.campaign)]
)
def test_auto_equals_an_exhaustive_search(micros: Sequence[int], num_budgets: int) -> None:
    """With random budgets: the choice fits by the meter of storages, and is as fast as the best that fits."""
    shape = MeshShape(1, 4)
    autos = [f"{key}={AUTO}" for key in chosen_settings(load_config("llama_small")) if key != "mesh.context"]
    config = config_of(
        "llama_small", *autos, "model.num_layers=2", "model.dim=384", shape=shape, micro_batches=max(micros)
    )
    base = find_machine("h100", ranks_per_node=2, network_gbps=20)
    everything = exhaustive(config, shape, base, micros)
    sizes = sorted(plan.memory.peak.total for plan in everything)
    draw, worst = random.Random(3), 0.0
    for _ in range(num_budgets):
        machine = base.with_budget(draw.uniform(sizes[0] * 1.0001, sizes[-1] * 1.05))
        chosen = fastest_choice(config, shape, machine).plan
        best_s = min(plan.time.total_s for plan in everything if plan.memory.peak.total <= machine.budget_bytes)
        worst = max(worst, chosen.time.total_s / best_s - 1)
        assert chosen.memory.peak.total <= machine.budget_bytes
        truth = metered_peak(chosen.config, shape, chosen.num_micro_batches)
        # The meter runs a CPU's kernels, the plan is for a GPU's, which keep less.
        on_cpu = make_plan(chosen.config, shape, find_machine("cpu")).memory.peak.total
        assert abs(on_cpu / truth - 1) < 0.001
    print(f"slower than the best that fits by {100 * worst:.2f} % at most")
    assert worst < 0.03


@pytest.mark.campaign
def test_nothing_fits() -> None:
    shape = MeshShape(1, 8)
    autos = ["fsdp.reshard_after_forward=auto", "train.activation_checkpoint=auto", "fsdp.accumulate=unsharded"]
    config = config_of("llama3_8b", *autos, shape=shape, micro_batches=4)
    with pytest.raises(UserError, match=r"nothing fits 30 GiB; the smallest candidate, .* needs \d+\.\d+") as caught:
        fastest_choice(config, shape, find_machine("h100", memory_gib=30))
    assert "would fit: " in str(caught.value)
    assert "fsdp.accumulate=sharded" in str(caught.value)
    with pytest.raises(UserError, match="no single change of other settings would be enough"):
        fastest_choice(config, shape, find_machine("h100", memory_gib=2))


@pytest.mark.slow
def test_planning_a_thousand_candidates_is_fast() -> None:
    shape = MeshShape(1, 64)
    plan = plan_of("llama3_8b", shape=shape)
    probe = Probe(plan.config, "cpu")
    probe.trace(1, plan.config.train.activation_checkpoint)
    started = time.process_time()
    for last in range(250):
        reshard = ["always"] * (34 - last % 34) + ["never"] * (last % 34)
        fsdp = replace(plan.config.fsdp, reshard_after_forward=reshard)
        other = make_plan(replace(plan.config, fsdp=fsdp), shape, plan.machine, probe)
        assert min(other.memory.peak.total, other.time.total_s) > 0
    seconds = 4 * (time.process_time() - started)
    print(f"a thousand candidates: {seconds:.1f} s")
    assert seconds < 20 * machine_scale()


# ---------------------------------------------------------------------------------------------------------------
# Command line


def machine_of_recipe(recipe: str) -> tuple[int, Machine]:
    """Return the ranks and the machine in the first line of a recipe, such as "8 x H100"; a CPU rank has 8 GiB."""
    named = re.findall(r"(\d+) x ([A-Z]\w+)", recipe_description(recipe_files()[recipe]))
    assert len(named) == 1, f"{recipe}: the first line names one machine, and how many ranks"
    ((ranks, device),) = named
    return int(ranks), find_machine(device.lower(), memory_gib=8 if device == "CPU" else None)


def fits(recipe: str, ranks: int, machine: Machine, *overrides: str) -> bool:
    config = without_data(load_config(recipe, overrides))
    if config.train.micro_batch_size == AUTO:  # takes what there is room for: one at the least
        config = without_data(load_config(recipe, [*overrides, "train.micro_batch_size=1"]))
    ranks_per_node = min(ranks, machine.rates.ranks_per_node)
    config = resolve_expert_method(config, ranks_per_node)
    plan = make_plan(config, check_config(config, ranks, ranks_per_node), machine)
    print(f"{recipe} {' '.join(overrides)} on {ranks} x {machine.name}: {plan.needed_gib:.1f} GiB")
    return plan.fits


EACH_KIND = (
    "llama_small",
    "llama3_8b",
    "gpt2",
    "deepseek_v3_small",
    "qwen3_30b_a3b",
    "qwen3_next_small",
    "sft",
    "distill",
)
"""One published recipe for each kind of model and of training."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [pytest.param(name, marks=() if name in EACH_KIND else pytest.mark.campaign) for name in sorted(recipe_files())],
)
def test_recipe_fits_the_machine_in_its_first_line(recipe: str, tmp_path: Path) -> None:
    overrides = [write_1b(tmp_path), "model.fresh=true"] if trains_a_folder(recipe) else []
    if recipe == "distill":
        overrides.append(f"objective.teacher={tmp_path}")
    assert fits(recipe, *machine_of_recipe(recipe), *overrides)


def trains_a_folder(recipe: str) -> bool:
    """Return whether a recipe, or the one that it begins with, takes its model from a Hugging Face folder."""
    text = recipe_files()[recipe].read_text()
    parent = re.search(r"^recipe: (\w+)", text, re.MULTILINE)
    return "name: auto" in text or (parent is not None and trains_a_folder(parent[1]))


def write_1b(folder: Path) -> str:
    """Write the configuration of Llama 3.2 1B, and return the setting that names its folder."""
    config = load_config("llama3_1b").model
    stated = {"model_type": "llama", **dict(find_recipe("llama").hf.config(config))}  # type: ignore[union-attr]
    (folder / "config.json").write_text(json.dumps(stated))
    (folder / "tokenizer.json").write_text("{}")
    return f"model.path={folder}"


SHOWN = [
    "README.md",
    "docs/planning.md",
    *sorted(f"launch/{path.name}" for path in (REPOSITORY / "launch").iterdir() if path.is_file()),
]
STARTS = ("torchrun", "srun", "sbatch", "launch/local.sh", "-m trainer.run", "launch/ray_train.py", "set -- ")


@pytest.mark.slow
@pytest.mark.parametrize("file", SHOWN)
def test_documented_commands_fit(file: str) -> None:
    """Commands that start a published recipe, on the ranks they name, or on the machine that the recipe is for."""
    for line in (REPOSITORY / file).read_text().splitlines():
        asked = re.search(r"recipe=(llama3_\w+|gpt2)(.*)", line)
        if asked is None or not any(start in line for start in STARTS):
            continue
        words = re.findall(r"\S+=\S+", asked[2])
        overrides = [w for w in words if w.startswith(("mesh.", "fsdp.", "train.")) and "init_from" not in w]
        ranks, machine = machine_of_recipe(asked[1])
        said = re.search(r"--(?:nproc-per-node|ntasks|workers)[ =](\d+)", line)
        assert fits(asked[1], int(said[1]) if said else ranks, machine, *overrides), line


def run_plan(capsys: pytest.CaptureFixture[str], *arguments: str, exit_code: int = 0) -> tuple[str, str]:
    """Return what `python -m trainer.plan` prints, on stdout and stderr."""
    capsys.readouterr()
    code = command_line(arguments)
    stdout, stderr = capsys.readouterr()
    assert code == exit_code, stderr + stdout
    return stdout, stderr


NUM_RANKS = [
    (["train.global_batch_size=6"], 6),
    (["train.global_batch_size=2", "mesh.context=4"], 8),
    (["train.global_batch_size=6", "mesh.context=4"], 8),
    (["train.global_batch_size=1", "mesh.context=4"], 4),
    (["train.global_batch_size=1", "mesh.context=16"], 16),
    (["train.global_batch_size=1", "mesh.context=4", "mesh.shard=4", "mesh.replicate=-1"], 4),
    (["train.global_batch_size=9", "fsdp.reshard_after_forward=2"], 2),
    (["train.global_batch_size=6", "mesh.replicate=3"], 6),
    (["train.global_batch_size=6", "mesh.shard=2", "mesh.replicate=-1"], 6),
    (["train.global_batch_size=8", "mesh.shard=node", "mesh.replicate=-1"], 8),
]


@pytest.mark.parametrize(("overrides", "expected"), NUM_RANKS)
def test_number_of_ranks_that_the_mesh_leaves_open(overrides: list[str], expected: int) -> None:
    config = without_data(load_config("llama_small", ["mesh.shard=-1", "train.micro_batch_size=1", *overrides]))
    assert default_num_ranks(config, find_machine("h100")) == expected


def test_number_of_ranks_suits_the_experts() -> None:
    overrides = ["mesh.shard=-1", "mesh.expert=4", "train.micro_batch_size=1", "train.global_batch_size=12"]
    config = without_data(load_config("qwen3_moe_small", overrides, needs_weights=False))
    assert default_num_ranks(config, find_machine("h100")) == 4, "not 6, which mesh.expert=4 does not divide"


@pytest.mark.campaign
def test_the_largest_recipe_on_4096_ranks(tmp_path: Path) -> None:
    """Under 10 s and 1 GiB, including the start of the interpreter."""
    script = (
        "import sys, time; from trainer.plan.__main__ import command_line; code = command_line(sys.argv[1:]);"
        "kib = open('/proc/self/status').read().partition('VmHWM:')[2].split()[0];"
        "print(int(kib) / 2**20, time.process_time(), file=sys.stderr);"
        "sys.exit(code)"
    )
    picture = tmp_path / "plan.png"
    arguments = ["recipe=llama3_405b", "mesh.replicate=8", "mesh.shard=512", "device=h200", "--json"]
    command = [sys.executable, "-c", script, *arguments, f"--picture={picture}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    gib, seconds = map(float, done.stderr.split()[-2:])
    print(f"{seconds:.1f} s of CPU time, {gib:.2f} GiB")
    assert (found["parameters"], found["num_ranks"], found["units"]) == (405_853_388_800, 4096, 128)
    assert gib < 1
    assert seconds < 10 * machine_scale()
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_plan_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    shown, _ = run_plan(capsys, "recipe=llama_small", "device=h100")
    for words in ("peak memory per rank", "communication per rank", "time of one step", "MFU", "fits"):
        assert words in shown
    assert "4 ranks of h100" in shown
    assert not re.search(r"\n[ ]*\n[ ]*\n", shown), "one blank line between tables, and none above their rows"
    assert "ranks_per_node=N" in run_plan(capsys, "--help")[0]


TOO_LARGE = ["recipe=llama_small", "ranks=2", "device=h100", "model.dim=1024", "memory_gib=1.01"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides", [[], pytest.param(["train.activation_checkpoint=auto"], marks=pytest.mark.campaign)]
)
def test_plan_that_does_not_fit_exits_with_3(overrides: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(run_plan(capsys, *TOO_LARGE, *overrides, "--json", exit_code=3)[0])
    assert (found["num_ranks"], found["fits"]) == (2, False)
    assert found["memory"]["needed_gib"] > found["memory_gib"] == 1.01
    assert found["time"]["tokens_per_s"] > 0
    shown, said = run_plan(capsys, *TOO_LARGE, *overrides, exit_code=3)
    assert "DOES NOT FIT" in shown
    assert "no single change" in shown + said
    assert ("nothing fits 1.01 GiB" in said) == bool(overrides)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["recipe=llama_small", "ranks=2", "device=h1000"], "device=h1000: must be one of a100"),
        (["recipe=llama_small", "ranks=0"], "ranks=0: must be a whole number above 0"),
        (["recipe=llama_small", "ranks=3"], "train.global_batch_size=8: must be 3 data-parallel ranks"),
        (["recipe=llama_small", "ranks=2", "--jason"], "--jason: no such option\n  did you mean --json?"),
        (["recipe=llama_small", "--picture=a.gif"], "--picture=a.gif: must be a file that ends in .png or .svg"),
        (["recipe=llama_smal"], "recipe=llama_smal"),
        ([], "recipe=NAME is missing"),
        (["recipe=llama3_8b", "ranks=8", "memory_gib=1"], "memory_gib=1.0: must be above 1"),
        (
            ["recipe=llama_small", "ranks=2", "fsdp.reshard_after_forward=[never]"],
            "a list needs one entry for each of the 5 units",
        ),
    ],
)
def test_mistakes(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in run_plan(capsys, *arguments, exit_code=2)[1]


@pytest.mark.campaign
def test_calibration_is_stored_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = find_machine("cpu")
    assert not before.is_measured
    run_plan(capsys, "--calibrate", "recipe=llama_small", "device=cpu")
    machine = find_machine("cpu")
    assert machine.is_measured
    assert machine.rates.matmul[4] > 1e8
    assert "measured here" in run_plan(capsys, "recipe=llama_small", "device=cpu")[0]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launcher, "-m", "trainer.plan", "--calibrate", "recipe=llama_small", "mesh.shard=2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    assert find_machine("cpu").rates.link not in (machine.rates.link, 0.0)
    assert done.stdout.count("saved to") == 1
    (path,) = (tmp_path / "meshtrainer" / "machines").iterdir()
    path.write_text("{}")
    assert "is not a valid calibration file" in run_plan(capsys, "recipe=llama_small", "device=cpu", exit_code=2)[1]


# ---------------------------------------------------------------------------------------------------------------
# In the trainer


@pytest.mark.slow
def test_run_resolves_auto_and_compares_itself_with_the_plan(tmp_path: Path) -> None:
    autos = [f"{key}={AUTO}" for key in chosen_settings(load_config("llama_small"))]
    ran = run_tiny(tmp_path / "run", *autos, "train.steps=4", "train.global_batch_size=16", "nproc=2")
    kept = load_config(str(tmp_path / "run" / "config.yaml"))
    assert AUTO not in chosen_settings(kept).values()
    assert "auto: " in ran.stdout
    comment = (tmp_path / "run" / "config.yaml").read_text().partition("run:")[0]
    assert comment.startswith("# auto: ")
    assert "chosen" in comment
    assert "of tensors per rank at the peak" in ran.stdout
    end = ran.metrics[-1]
    assert end["planned_peak_gib"] > 0
    assert end["peak_memory_gib"] > 0
    by_hand = [f"{key}={json.dumps(value)}" for key, value in chosen_settings(kept).items()]
    again = run_tiny(tmp_path / "again", *by_hand, "train.steps=4", "train.global_batch_size=16", "nproc=2")
    assert again.train("loss") == ran.train("loss")


@pytest.mark.slow
def test_out_of_memory_is_explained(tmp_path: Path) -> None:
    own = [
        "model.name=tests.helpers.custom_recipes:greedy",
        "model.width=600",
        "data.seq_len=32",
        "log.sample_tokens=0",
    ]
    own += ["train.micro_batch_size=2", "fsdp.reshard_after_forward=never", "train.steps=5", "eval.every=0"]
    ran = run_command(tmp_path / "run", "recipe=llama_small", *own, "nproc=2")
    assert ran.exit_code == 1
    assert "out of memory" in ran.stderr
    assert "peak memory per rank" in ran.stderr
    assert ran.stderr.count("would fit: ") == 2, ran.stderr
    lines = ran.stderr.rstrip().splitlines()
    *told, first, second = [
        i for i, line in enumerate(lines) if line.startswith(("peak memory", "less than ", "would fit: "))
    ]
    assert told[-1] + 1 == first == second - 1, "the advice comes last; the other rank may say something after it"
    assert "Traceback" not in ran.stderr
    assert not re.search(r"GiB, (fits|DOES NOT FIT)", ran.stderr), "it did not fit, whatever was planned"
    kept = sorted((tmp_path / "run").glob("traceback_rank*.txt"))
    assert any(str(file) in ran.stderr for file in kept)
    assert all("OutOfMemoryError: CUDA out of memory" in file.read_text() for file in kept)
    assert all("in loss" in file.read_text() for file in kept)


@pytest.mark.parametrize("size", [1, 2])
def test_explanation_does_not_wait_for_the_end_of_a_rank(
    size: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With several ranks it is printed at once: the failure of another rank may end this one at any moment."""
    config: Any = SimpleNamespace(run_dir=tmp_path)
    world: Any = SimpleNamespace(size=size, rank=0, once=lambda name, work: work(), device=torch.device("cpu"))
    forecast = Forecast(config, MeshShape(1, size), world)
    forecast.plan = None
    error = MemoryError()
    forecast.explain(error)
    printed, notes = capsys.readouterr().err, getattr(error, "__notes__", [])
    assert ("out of memory" in printed) == (size > 1 or sys.version_info < (3, 11))
    assert "out of memory" in printed + "".join(notes)


@pytest.mark.campaign
def test_real_out_of_memory_ends_with_advice(tmp_path: Path) -> None:
    """On a CPU with a limit of the process's memory: during training, and while the model is built."""
    script = (
        "import resource, sys, torch; from trainer import run; from trainer.trainer import Trainer\n"
        "room = 400 << 20; used = int(open('/proc/self/statm').read().split()[0]) * 4096\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + room, used + room)); sys.exit(run.main(sys.argv[1:]))"
    )

    def ends(*overrides: str) -> str:
        folder = tmp_path / overrides[0]
        own = ["recipe=llama_small", "data.source=synthetic", "eval.every=0", "run.threads=1", f"run.dir={folder}"]
        command = [sys.executable, "-c", script, *own, *overrides]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=REPOSITORY)
        assert done.returncode == 1, done.stderr
        return done.stderr.rstrip()

    training = ends("data.seq_len=16384", "train.micro_batch_size=8", "model.ffn_dim=2048")
    assert training.startswith("out of memory: "), training
    assert "Traceback" not in training
    assert training.splitlines()[-1].startswith(("would fit: ", "no single change"))
    assert "enforce fail" in (tmp_path / "data.seq_len=16384" / "traceback_rank0.txt").read_text()
    building = ends("model.dim=8192", "model.num_heads=8")
    assert "out of memory while" in building.splitlines()[-2], building
    assert "python -m trainer.plan" in building.splitlines()[-1]


@pytest.mark.slow
def test_out_of_memory_in_a_custom_script_ends_with_advice(tmp_path: Path) -> None:
    own = ["model.name=tests.helpers.custom_recipes:greedy", "data.seq_len=32", "data.source=synthetic", "eval.every=0"]
    config = load_config("llama_small", [*own, "log.sample_tokens=0", f"run.dir={tmp_path}"])
    trainer = config.recipe.trainer_class(Trainer)(config)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer.fit()
    trainer.close()
    notes = getattr(caught.value, "__notes__", [])
    assert bool(notes) == (sys.version_info >= (3, 11))
    assert not notes or notes[-1].splitlines()[-1].startswith("would fit: ")


@pytest.mark.campaign
def test_nothing_fits_in_a_run(tmp_path: Path) -> None:
    ran = run_tiny(tmp_path / "run", "fsdp.reshard_after_forward=auto", "run.memory_gib=0.4001", "nproc=2", exit_code=2)
    assert "nothing fits 0.4001 GiB" in ran.stderr
    assert not (tmp_path / "run" / "config.yaml").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["muon", *(pytest.param(name, marks=pytest.mark.campaign) for name in ("adamw", "sgd"))]
)
def test_memory_of_optimizers(name: str, tmp_path: Path) -> None:
    arguments = ["data.source=synthetic", f"optim.name={name}", "eval.every=0", f"run.dir={tmp_path}"]
    trainer = Trainer(load_config("llama_small", arguments))
    trainer.train_step(list(itertools.islice(iter(trainer.loader), trainer.num_micro_batches)))
    states = [state for part in trainer.optimizer.parts for state in part.state.values()]
    kept = sum(value.numel() for state in states for value in state.values() if value.ndim)
    plan = plan_of("llama_small", f"optim.name={name}", shape=MeshShape(1, 1))
    parameters = [parameter for unit in plan.trace.units for parameter in unit.parameters]
    assert sum(p.numel * p.num_moments for p in parameters) == kept
    assert plan.memory.peak.by_kind["optimizer"] == 4 * kept
    trainer.close()


def test_narrow_terminal_loses_no_value(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    said, _ = run_plan(capsys, "recipe=llama_small", "ranks=2", "device=h100")
    assert "expected goodput" in said
    assert "\u2026" not in said
