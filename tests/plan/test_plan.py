"""The planner compared with torch's own tracker, with the storages alive, and with real runs on several ranks."""

from __future__ import annotations

import itertools
import json
import random
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.helpers.cases import in_campaign, needs_torch
from tests.helpers.commands import meshtrainer
from tests.helpers.launch import REPOSITORY, TORCHRUN, command, launch, on_ranks, run, tiny
from tests.helpers.plan_truth import (
    as_logged,
    config_of,
    kept_bytes,
    measure,
    metered_peak,
    plan_of,
    planned,
    tracked_peak,
)
from tests.helpers.tiny import lines
from trainer import Trainer, UserError, load_config
from trainer.config.files import recipe_description, recipe_files
from trainer.config.parallel import MeshShape, resolve_expert_method
from trainer.config.rules import check_config, offloaded_fraction
from trainer.config.schema import AUTO
from trainer.plan.machine import GIB, Machine, find_machine
from trainer.plan.plan import Plan, make_plan, without_data
from trainer.plan.probe import Probe
from trainer.registry import find_model

SHALLOW = ["model.num_layers=6", "data.seq_len=2048"]
FULL, SELECTIVE = "train.activation_checkpoint=full", "train.activation_checkpoint=selective"
NEVER, ALWAYS = "fsdp.reshard_after_forward=never", "fsdp.reshard_after_forward=always"
MIXED = "fsdp.reshard_after_forward=[always,always,8,8,2,never,never,never]"


# ---------------------------------------------------------------------------------------------------------------
# Memory and collectives


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "overrides", "sizes"),
    [
        ("llama_small", [], (1, 2)),
        *in_campaign(
            ("llama3_1b", SHALLOW, (1, 8)),
            ("llama3_1b", [*SHALLOW, "model.tie_embeddings=false", NEVER], (1, 4)),
            ("llama3_1b", [*SHALLOW, "model.tie_embeddings=false", "fsdp.param_dtype=float32"], (1, 8)),
            ("llama3_1b", [*SHALLOW, "fsdp.reduce_dtype=bfloat16"], (4, 2)),
            ("llama3_1b", [*SHALLOW, "train.activation_checkpoint=2"], (1, 8)),
            ("llama3_8b", [*SHALLOW, MIXED, SELECTIVE], (1, 16)),
            ("llama3_8b", [*SHALLOW, "train.activation_checkpoint=budget:0.4"], (2, 8)),
            ("llama3_8b", [*SHALLOW, "fsdp.reshard_after_forward=8"], (2, 32)),
            ("llama3_8b", [*SHALLOW, "fsdp.prefetch_forward=2", "fsdp.prefetch_backward=2"], (1, 8)),
            ("llama3_8b", [*SHALLOW, "fsdp.wrap=size:100000000", FULL], (1, 8)),
            ("llama3_70b", [*SHALLOW, ALWAYS], (1, 64)),
            ("llama3_70b", [*SHALLOW, "train.micro_batch_size=2", FULL], (1, 256)),
            ("llama3_405b", ["model.num_layers=6", "data.seq_len=1024", FULL], (1, 512)),
        ),
    ],
)
def test_peak_equals_torchs_tracker(recipe: str, overrides: list[str], sizes: tuple[int, int]) -> None:
    shape = MeshShape(*sizes)
    plan = plan_of(recipe, *overrides, shape=shape)
    truth = tracked_peak(plan.config, shape)
    print(f"planned {plan.peak_gib:.3f} GiB, tracked {truth / GIB:.3f} GiB")
    assert abs(plan.memory.peak.total / truth - 1) < 0.01


SMALL = ["model.num_layers=8"]
BF16 = ["train.weights_dtype=bfloat16", "fsdp.param_dtype=bfloat16", "fsdp.reduce_dtype=bfloat16"]
ODD = ["model.name=tests.helpers.custom_recipes:mlp", "model.width=1030", "model.num_hidden=21", "data.seq_len=33"]
"""Odd shapes and two kinds of block, which the planner has no special case for."""
WAYWARD = ["model.name=tests.helpers.custom_recipes:wayward", "data.seq_len=65"]
"""Blocks that only look equal. Parameters without a gradient are neither reduced nor kept by the optimizer."""
NORMUON = ["optim.name=muon", "optim.muon.variant=normuon"]
FEW_TOKENS = ["data.seq_len=64", "train.global_batch_size=8"]
FEW_EXPERTS = ["model.num_experts=4", "model.num_chosen=2", "model.num_layers=2"]
"""With more shards, there are copies."""
PACKED = [*SHALLOW, "lora.rank=16", "lora.base_dtype=nf4"]


# torch's tracker takes one micro-batch only, and has hooks of its own for a unit of two modules (gpt2's tied table)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "overrides", "sizes", "micro_batches"),
    [
        ("llama_small", [*WAYWARD, "model.way=left out"], (1, 4), 3),
        *in_campaign(
            ("llama_small", ["model.num_layers=3"], (1, 4), 2),
            ("llama_small", SMALL, (1, 4), 3),
            ("llama_small", ODD, (1, 4), 2),
            ("llama_small", SMALL, (1, 1), 3),
            ("llama_small", [*SMALL, *BF16], (1, 1), 2),
            ("llama_small", [], (4, 1), 2),
            ("llama_small", [*SMALL, "fsdp.param_dtype=bfloat16", "fsdp.reduce_dtype=bfloat16"], (1, 4), 2),
            ("llama_small", [*SMALL, "fsdp.accumulate=sharded"], (2, 4), 3),
            ("llama_small", [*SMALL, "fsdp.reshard_after_backward=false", NEVER], (1, 4), 3),
            ("llama_small", [*SMALL, "fsdp.reshard_after_forward=2", "fsdp.reshard_after_backward=false"], (1, 4), 2),
            ("llama_small", ["fsdp.wrap=size:50000", FULL], (1, 4), 1),
            ("llama_small", [*SMALL, "train.activation_checkpoint=budget:0.1"], (1, 4), 2),
            ("gpt2", ["train.micro_batch_size=1", "model.num_layers=6"], (2, 4), 2),
            (
                "llama3_8b",
                [*SHALLOW, "model.vocab_size=256", "data.seq_len=2048", "fsdp.wrap=size:20_000_000", FULL],
                (1, 8),
                2,
            ),
            ("qwen3_moe_small", [*FEW_EXPERTS, *FEW_TOKENS, "fsdp.accumulate=sharded"], (2, 8), 3),
            ("qwen3_moe_small", [*FEW_EXPERTS, *FEW_TOKENS, *BF16], (1, 8), 2),
            ("llama3_1b", [*PACKED, FULL], (1, 8), 2),
            ("llama3_1b", [*PACKED, NEVER], (2, 4), 1),
            *(
                ("llama_small", [*WAYWARD, f"model.way={way}"], (1, 4), 3)
                for way in ("activation", "flag", "between", "twice", "reversed", "crossed")
            ),
        ),
    ],
)
def test_peak_equals_that_of_the_storages(
    recipe: str, overrides: list[str], sizes: tuple[int, int], micro_batches: int
) -> None:
    shape = MeshShape(*sizes)
    plan = plan_of(recipe, *overrides, shape=shape, micro_batches=micro_batches)
    truth = metered_peak(plan.config, shape, micro_batches)
    assert abs(plan.memory.peak.total / truth - 1) < 0.001


COMPILED = ["train.micro_batch_size=1", "train.compile=true"]
OFFLOAD = "train.offload_activations=0.5"


@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        ("llama3_8b", []),
        ("llama_small", [OFFLOAD]),
        ("deepseek_v3_small", []),
        ("qwen3_next_small", []),
        *in_campaign(
            *(("llama3_8b", [setting]) for setting in (FULL, SELECTIVE, OFFLOAD, "train.activation_checkpoint=2")),
            *(("llama3_8b", [f"train.float8={scaling}"]) for scaling in ("tensorwise", "rowwise")),
            ("llama3_8b", ["train.activation_checkpoint=budget:0.4"]),
            ("llama3_8b", ["train.offload_activations=1", FULL]),
            ("llama3_8b", ["lora.rank=16"]),
            ("llama3_8b", ["lora.rank=16", "lora.base_dtype=nf4"]),
            ("llama3_8b", ["lora.rank=16", "lora.dropout=0.1", FULL]),
            ("qwen3_next_small", ["train.offload_activations=1"]),
            ("deepseek_v3_small", [OFFLOAD, "model.balance=0.1", "model.balance_shares=exact"]),
            ("llama_small", ODD),
            ("llama_small", [*WAYWARD, "model.way=between"]),
            *((recipe, []) for recipe in ("gpt2", "gpt_oss_small", "gpt_oss_20b", "qwen3_8b", "qwen3_moe_small")),
            *((recipe, []) for recipe in ("qwen3_30b_a3b", "llama3_70b", "qwen3_next_80b", "deepseek_v3")),
        ),
    ],
)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_micro_batch_leaves_nothing_but_gradients_behind(recipe: str, overrides: list[str], device: str) -> None:
    """Also where blocks are compiled, and store fewer tensors than the operators of the model return."""
    config = config_of(recipe, *COMPILED, *overrides, shape=MeshShape(1, 1))
    train = config.train
    offload = offloaded_fraction(train.offload_activations)
    trace = Probe(config, device).trace(1, train.activation_checkpoint, offload)
    assert max(itertools.accumulate(event.segment.net for event in trace.events)) > 0
    assert kept_bytes(trace) == 0


def test_more_micro_batches_need_no_more_activations() -> None:
    shape, machine = MeshShape(1, 8), find_machine("h100")
    settings = ["train.micro_batch_size=1", "fsdp.accumulate=sharded"]
    snapshots = []
    for number in (2, 8):
        config = config_of("llama3_8b", *settings, shape=shape, micro_batches=number)
        snapshots.append(make_plan(config, shape, machine).memory.peak)
    assert snapshots[0].by_kind == snapshots[1].by_kind


GATHERED_EXPERTS = ["mesh.expert=2", "mesh.expert_method=gather", "model.balance_shares=exact"]
GATHERED_EXPERTS += ["model.balance=0.1", "model.num_layers=8", "model.num_dense_layers=2"]
"""The first two blocks have none, so that no other may be planned like them. Exact shares take a forward pass more."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "ranks", "overrides"),
    [
        ("llama_small", 2, ["mesh.shard=2", "optim.name=muon", "optim.muon.bucket_mib=0.2", *FEW_TOKENS]),
        pytest.param(
            "deepseek_v3_small", 2, ["mesh.shard=2", *GATHERED_EXPERTS, *FEW_TOKENS], marks=needs_torch("2.12")
        ),
        *in_campaign(
            # Two buckets
            ("llama_small", 2, ["mesh.shard=1", "mesh.replicate=2", "model.dim=256", "model.ffn_dim=1024"]),
            ("llama_small", 2, ["mesh.shard=2", "mesh.context=2", "mesh.context_method=gather"]),
            ("llama_small", 4, ["mesh.replicate=2", "mesh.shard=2", "train.global_batch_size=24"]),
            ("llama_small", 4, ["mesh.shard=4", NEVER, "fsdp.param_dtype=bfloat16"]),
            ("llama_small", 4, ["mesh.shard=4", "fsdp.separate_reduce=true"]),
            ("llama_small", 4, ["mesh.shard=4", "fsdp.reshard_after_forward=2", FULL, "train.global_batch_size=16"]),
            (
                "llama_small",
                4,
                ["mesh.replicate=2", "mesh.shard=2", "fsdp.accumulate=sharded", "train.global_batch_size=24"],
            ),
            ("llama_small", 4, ["mesh.shard=4", "mesh.context=2", "mesh.context_method=heads"]),
            ("qwen3_moe_small", 8, ["mesh.shard=8", *FEW_EXPERTS, "data.seq_len=64", "train.global_batch_size=32"]),
            (
                "qwen3_moe_small",
                8,
                ["mesh.shard=8", *FEW_EXPERTS, "data.seq_len=64", "train.global_batch_size=16", *NORMUON],
            ),
            (
                "llama_small",
                3,
                ["mesh.shard=3", "train.global_batch_size=6", *NORMUON],
            ),
        ),
    ],
)
def test_memory_and_collectives_of_a_real_run_are_as_planned(
    recipe: str, ranks: int, overrides: list[str], tmp_path: Path
) -> None:
    of_ranks = collectives_as_planned(recipe, ranks, overrides, tmp_path)
    assert "optim.name=muon" in overrides or all(counts == of_ranks[0] for counts in of_ranks)


TENSOR = ["mesh.tensor=2", "data.seq_len=256"]
"""The vocabulary of `llama_small` is odd: the ranks of a group hold different numbers of rows."""


@needs_torch("2.12")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "ranks", "overrides"),
    [
        ("llama_small", 2, ["mesh.shard=2", *TENSOR, "lora.rank=8", "train.global_batch_size=6"]),
        (
            "qwen3_moe_small",
            4,
            ["mesh.shard=4", *TENSOR, *FEW_EXPERTS, "mesh.expert=2", "mesh.expert_method=gather", "optim.name=muon"],
        ),
        *in_campaign(
            ("llama_small", 2, ["mesh.shard=2", *TENSOR]),
            ("llama_small", 2, ["mesh.shard=2", *TENSOR, SELECTIVE]),
            ("llama_small", 2, ["mesh.shard=2", *TENSOR, FULL, "fsdp.cpu_offload=true"]),
            ("llama_small", 2, ["mesh.shard=2", *TENSOR, OFFLOAD]),
            ("llama_small", 4, ["mesh.shard=4", *TENSOR, NEVER, "fsdp.param_dtype=bfloat16"]),
            ("llama_small", 4, ["mesh.shard=4", *TENSOR, "optim.name=muon", "optim.muon.bucket_mib=0.2"]),
            ("llama_small", 4, ["mesh.shard=4", *TENSOR, "mesh.context=2", "mesh.context_method=heads"]),
            ("llama_small", 4, ["mesh.shard=4", *TENSOR, "mesh.context=2", "mesh.context_method=gather"]),
            ("llama_small", 4, ["mesh.replicate=2", "mesh.shard=2", *TENSOR, "train.global_batch_size=24"]),
            (
                "llama_small",
                4,
                ["mesh.replicate=2", "mesh.shard=2", *TENSOR, "train.global_batch_size=24", "fsdp.accumulate=sharded"],
            ),
            ("gpt2", 2, ["mesh.shard=2", *TENSOR, "model.num_layers=2", "train.global_batch_size=8"]),
            ("gpt_oss_small", 4, ["mesh.shard=4", *TENSOR]),
            ("gpt_oss_small", 4, ["mesh.shard=4", *TENSOR, "mesh.expert=2", "mesh.expert_method=gather"]),
            ("deepseek_v3_small", 2, ["mesh.shard=2", *TENSOR]),
        ),
    ],
)
def test_memory_and_collectives_with_a_tensor_axis_are_as_planned(
    recipe: str, ranks: int, overrides: list[str], tmp_path: Path
) -> None:
    collectives_as_planned(recipe, ranks, overrides, tmp_path)


def collectives_as_planned(
    recipe: str, ranks: int, overrides: list[str], folder: Path
) -> list[Counter[tuple[str, int, int]]]:
    """Assert that a real run needs the planned memory, and that rank 0 issues the planned collectives.

    Returns the collectives of each rank.
    """
    common = ["data.source=synthetic", "run.threads=1", "train.micro_batch_size=2", f"run.dir={folder / 'run'}"]
    arguments = [*common, *overrides]
    config = without_data(load_config(recipe, arguments))
    shape = MeshShape(max(1, config.mesh.replicate), int(config.mesh.shard))
    plan = make_plan(config, shape, find_machine("cpu"))
    found = on_ranks(ranks, measure, recipe, arguments)
    ratios = [plan.memory.peak.total / peak for peak, _ in found]
    # On a busy machine a rank may free a buffer of a collective a moment later than planned.
    assert min(abs(ratio - 1) for ratio in ratios) < 0.03, ratios
    assert found[0][1] == as_logged(plan.collectives)
    return [counts for _, counts in found]


def test_copies_of_experts_take_as_long_as_replicas() -> None:
    """Gradients of experts and of other parameters are reduced apart, but neither reduction waits for the other."""
    times = []
    for shape in (MeshShape(1, 256), MeshShape(2, 128)):
        config = config_of("qwen3_30b_a3b", "model.num_layers=4", "train.micro_batch_size=2", shape=shape)
        times.append(make_plan(config, shape, find_machine("h100")).time.total_s)
    assert times[0] == pytest.approx(times[1], rel=0.01)


@pytest.mark.parametrize("micro_batches", [1, 5])
def test_each_micro_batch_gathers_and_the_last_one_reduces(micro_batches: int) -> None:
    """By hand: 12 blocks are gathered forward and backward, embedding and head once, an empty root never."""
    plan = plan_of("llama_small", "model.num_layers=12", shape=MeshShape(2, 4), micro_batches=micro_batches)
    counts: Counter[str] = Counter()
    for collective, count in plan.collectives.items():
        if collective.num_bytes > 100:
            counts[collective.operation] += count
    assert counts == {"all_gather": (2 * 12 + 2) * micro_batches, "reduce_scatter": 14, "all_reduce": 14}


def test_model_that_cannot_be_planned() -> None:
    config = config_of("llama_small", "model.name=tests.helpers.custom_recipes:undecided", shape=MeshShape(1, 2))
    with pytest.raises(UserError) as refused:
        make_plan(config, MeshShape(1, 2), find_machine("h100"))
    assert str(refused.value).startswith("model.name=tests.helpers.custom_recipes:undecided: ")


# ---------------------------------------------------------------------------------------------------------------
# auto

CHOSEN = ("fsdp.reshard_after_forward", "train.activation_checkpoint", "train.micro_batch_size")
AUTOS = [f"{key}={AUTO}" for key in CHOSEN]


def test_run_resolves_auto_and_compares_itself_with_the_plan(tmp_path: Path) -> None:
    autos = ["fsdp.reshard_after_forward=auto", "train.micro_batch_size=auto"]
    own = tiny(*autos, "train.steps=2", "train.global_batch_size=2", "model.num_layers=1", f"run.dir={tmp_path}")
    trainer = Trainer(load_config("llama_small", own))
    assert trainer.fit() == 0
    trainer.close()
    kept = load_config(str(tmp_path / "config.yaml"))
    assert AUTO not in (kept.fsdp.reshard_after_forward, kept.train.micro_batch_size)
    end = lines(tmp_path)[-1]
    assert end["planned_peak_gib"] > 0
    assert end["peak_memory_gib"] > 0


def test_auto_compares_every_kind_of_recomputation() -> None:
    """Compiled blocks need more memory with `selective`, which then saves as much as `none`, than with every second."""
    plan = planned("recipe=llama3_8b", "ranks=64", "device=h100", "memory_gib=34", "train.activation_checkpoint=auto")
    others = {other["value"]: other["fits"] for other in plan["auto"]["alternatives"]["train.activation_checkpoint"]}
    assert plan["settings"]["train.activation_checkpoint"] == 4
    assert others == {2: True, "full": True, "selective": False, "none": False}  # 4 fits, so `none` is tried


SPLIT = ["recipe=qwen3_moe_small", "ranks=8", "device=h100", "train.micro_batch_size=1"]


@pytest.mark.parametrize("axis", ["mesh.tensor", "mesh.expert"])
def test_no_unit_is_resharded_to_groups_if_parameters_are_on_a_mesh_of_their_own(axis: str) -> None:
    found = planned(*SPLIT, f"{axis}=2", "fsdp.reshard_after_forward=auto")
    others = [other["value"] for other in found["auto"]["alternatives"]["fsdp.reshard_after_forward"]]
    assert "always" in (*others, found["settings"]["fsdp.reshard_after_forward"])
    assert not [value for value in others if isinstance(value, int)]


FEW_SEQUENCES = [
    "recipe=llama_small",
    "ranks=4",
    "device=h100",
    "train.micro_batch_size=1",
    "train.global_batch_size=2",
]


def test_groups_that_share_sequences_are_chosen_for_a_small_batch() -> None:
    """Two ranks must share each sequence: with one axis, unless both are open, or with the other."""
    both = planned(*FEW_SEQUENCES, "mesh.context=auto", "mesh.tensor=auto")
    assert both["mesh"]["context"] * both["mesh"]["tensor"] == 2
    others = both["auto"]["alternatives"]["mesh.tensor"]
    assert {other["value"] for other in others} == {1, 2} - {both["mesh"]["tensor"]}
    assert planned(*FEW_SEQUENCES, "mesh.tensor=auto")["mesh"]["tensor"] == 2
    assert planned(*FEW_SEQUENCES, "mesh.context=auto")["mesh"]["context"] == 2
    assert planned("recipe=llama_small", "ranks=4", "device=h100", "mesh.tensor=auto")["mesh"]["tensor"] == 1


def test_refused_batch_says_which_ranks_could_share_sequences() -> None:
    code, _, err = meshtrainer("plan", *FEW_SEQUENCES)
    assert code == 2
    (line,) = (line for line in err.splitlines() if "share sequences" in line)
    for fix in ("mesh.context=2", "mesh.tensor=2"):
        assert fix in line
        assert planned(*FEW_SEQUENCES, fix)["num_micro_batches"] == 1


def test_tensor_axis_is_proposed_where_gathered_weights_do_not_fit() -> None:
    asked = ["recipe=llama_small", "ranks=4", "device=h100", "train.micro_batch_size=1", "data.seq_len=256", FULL]
    asked += ["model.vocab_size=128256", "model.dim=512", "model.num_heads=8", "model.num_kv_heads=4", ALWAYS]
    asked += ["fsdp.param_dtype=bfloat16", "optim.state_dtype=bfloat16", "train.weights_dtype=bfloat16"]
    code, out, _ = meshtrainer("plan", *asked, "memory_gib=1.85")
    assert code == 3
    proposed = re.findall(r"^would fit: (mesh.tensor=\d+):", out, re.MULTILINE)
    assert proposed
    assert planned(*asked, proposed[0], "memory_gib=1.85")["fits"]


def test_model_without_a_tensor_plan_is_planned_without_the_axis() -> None:
    found = planned("recipe=qwen3_next_small", "ranks=2", "device=h100", "mesh.tensor=auto", "mesh.expert=auto")
    assert found["mesh"]["tensor"] == 1


@pytest.mark.campaign
def test_auto_equals_an_exhaustive_search() -> None:
    """With random budgets: the choice fits by the meter of storages, and is as fast as the best that fits."""
    shape, model = MeshShape(1, 4), ["model.num_layers=2", "model.dim=384"]
    config = config_of("llama_small", *model, "train.micro_batch_size=1", shape=shape, micro_batches=4)
    machine = find_machine("h100", ranks_per_node=2, network_gbps=20)
    everything: list[Plan] = []
    for micro, kind in itertools.product((1, 2, 4), ("none", 2, "selective", "full")):
        for entries in itertools.product(("always", "never", 2), repeat=4):
            fsdp = replace(config.fsdp, reshard_after_forward=list(entries))
            train = replace(config.train, micro_batch_size=micro, activation_checkpoint=kind)
            everything.append(make_plan(replace(config, fsdp=fsdp, train=train), shape, machine))
    sizes = sorted(plan.memory.peak.total for plan in everything)
    draw, worst = random.Random(3), 0.0
    for _ in range(8):
        with_room = machine.with_budget(draw.uniform(sizes[0] * 1.0001, sizes[-1] * 1.05))
        on_machine = ["device=h100", "ranks_per_node=2", "network_gbps=20", f"memory_gib={with_room.memory_gib}"]
        batch = f"train.global_batch_size={config.train.global_batch_size}"
        found = planned("recipe=llama_small", *model, *AUTOS, "mesh.shard=4", batch, *on_machine)
        best_s = min(plan.time.total_s for plan in everything if plan.memory.peak.total <= with_room.budget_bytes)
        worst = max(worst, found["time"]["step_s"] / best_s - 1)
        assert found["memory"]["peak_bytes"] <= with_room.budget_bytes
        taken = [f"{key}={json.dumps(value)}" for key, value in found["settings"].items()]
        micro_batches = found["num_micro_batches"]
        # The meter runs a CPU's kernels, and the plan above is for a GPU's, which keep less.
        on_cpu = plan_of("llama_small", *model, *taken, shape=shape, micro_batches=micro_batches)
        truth = metered_peak(on_cpu.config, shape, micro_batches)
        assert abs(on_cpu.memory.peak.total / truth - 1) < 0.001
    print(f"slower than the best that fits by {100 * worst:.2f} % at most")
    assert worst < 0.03


@pytest.mark.campaign
def test_if_nothing_fits_the_message_has_what_would(tmp_path: Path) -> None:
    asked = ["recipe=llama_small", "ranks=4", "device=h100", "model.dim=1024", "train.global_batch_size=64"]
    asked += ["fsdp.accumulate=unsharded", "fsdp.reshard_after_forward=auto", "train.micro_batch_size=1"]
    code, _, err = meshtrainer("plan", *asked, "memory_gib=1.15")
    assert code == 3
    found = re.findall(r"^ *would fit: ([\w.]+=\S+):", err, re.MULTILINE)
    assert found
    for advice in found:
        key = advice.partition("=")[0]
        changed = [item for item in asked if not item.startswith(f"{key}=")]
        assert planned(*changed, advice, "memory_gib=1.15")["fits"]
    refused = run(tmp_path / "run", "fsdp.reshard_after_forward=auto", "run.memory_gib=0.4001", "nproc=2", code=2)
    assert "0.4001" in refused.err
    assert not (tmp_path / "run" / "config.yaml").exists()


# ---------------------------------------------------------------------------------------------------------------
# What the published recipes and the pages promise


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


EVERY_TIME = ("qwen3_30b_a3b",)
"""The published recipe that is planned in `make test`; the others are planned in the campaign."""


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [*EVERY_TIME, *in_campaign(*sorted({*recipe_files()} - {*EVERY_TIME}))])
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
    stated = {"model_type": "llama", **dict(find_model("llama").hf.config(config))}  # type: ignore[union-attr]
    (folder / "config.json").write_text(json.dumps(stated))
    (folder / "tokenizer.json").write_text("{}")
    return f"model.path={folder}"


STARTS = ("torchrun", "srun", "sbatch", "launch/local.sh", "-m trainer.run", "launch/ray_train.py", "set -- ")


@pytest.mark.campaign
def test_documented_commands_fit() -> None:
    """Commands that start a published recipe, on the ranks they name, or on the machine that the recipe is for."""
    launch_files = sorted(path for path in (REPOSITORY / "launch").iterdir() if path.is_file())
    for file in (REPOSITORY / "README.md", REPOSITORY / "docs" / "planning.md", *launch_files):
        for line in file.read_text().splitlines():
            asked = re.search(r"recipe=(llama3_\w+|gpt2)(.*)", line)
            if asked is None or not any(start in line for start in STARTS):
                continue
            words = re.findall(r"\S+=\S+", asked[2])
            overrides = [w for w in words if w.startswith(("mesh.", "fsdp.", "train.")) and "init_from" not in w]
            ranks, machine = machine_of_recipe(asked[1])
            said = re.search(r"--(?:nproc-per-node|ntasks|workers)[ =](\d+)", line)
            assert fits(asked[1], int(said[1]) if said else ranks, machine, *overrides), line


# ---------------------------------------------------------------------------------------------------------------
# The command


def test_plan_that_does_not_fit_exits_with_3() -> None:
    asked = ["recipe=llama_small", "ranks=2", "device=h100", "model.dim=1024"]
    found = planned(*asked, "memory_gib=1.01", code=3)
    assert (found["num_ranks"], found["fits"]) == (2, False)
    assert found["memory"]["needed_gib"] > found["memory_gib"] == 1.01
    assert found["time"]["tokens_per_s"] > 0
    needed_gib = found["memory"]["needed_gib"]
    assert planned(*asked, f"memory_gib={1.001 * needed_gib}")["fits"]
    assert not planned(*asked, f"memory_gib={0.999 * needed_gib}", code=3)["fits"]
    code, out, _ = meshtrainer("plan", *asked, "memory_gib=80")
    assert code == 0
    assert f"{needed_gib:.2f} GiB" in out


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["train.global_batch_size=6", "mesh.context=4"], 8),
        (["train.global_batch_size=6", "mesh.tensor=2"], 6),
        (["train.global_batch_size=2", "mesh.tensor=auto"], 4),
        (["train.global_batch_size=6", "mesh.replicate=3"], 6),
        (["train.global_batch_size=8", "mesh.shard=node", "mesh.replicate=-1"], 8),
    ],
)
def test_number_of_ranks_that_the_mesh_leaves_open(overrides: list[str], expected: int) -> None:
    """The most on one node that the global batch and the mesh allow."""
    common = ["recipe=llama_small", "device=h100", "mesh.shard=-1", "train.micro_batch_size=1"]
    assert planned(*common, *overrides)["num_ranks"] == expected


@pytest.mark.parametrize(
    ("arguments", "begins"),
    [
        (["recipe=llama_small", "ranks=2", "device=h1000"], "device=h1000: "),
        (["recipe=llama_small", "ranks=0"], "ranks=0: "),
        (["recipe=llama_small", f"ranks_per_node={10**20}"], f"ranks_per_node={10**20}: "),
        (["recipe=llama_small", "ranks=3"], "train.global_batch_size=8: "),
        (["recipe=llama_small", "--picture=a.gif"], "--picture=a.gif: "),
        (["recipe=llama_small", "ranks=8", "memory_gib=1"], "memory_gib=1.0: "),
        (["recipe=llama_small", "generate=64"], "generate=64: "),
    ],
)
def test_mistakes(arguments: list[str], begins: str) -> None:
    code, out, err = meshtrainer("plan", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {begins}")


@pytest.mark.campaign
def test_the_largest_recipe_on_4096_ranks(tmp_path: Path) -> None:
    """The parameters are those of the published model. The plan needs less than 1 GiB of memory."""
    script = (
        "import sys; from trainer.run import meshtrainer\n"
        "try: meshtrainer()\n"
        "finally: print(open('/proc/self/status').read().partition('VmHWM:')[2].split()[0], file=sys.stderr)"
    )
    arguments = ["plan", "recipe=llama3_405b", "mesh.replicate=8", "mesh.shard=512", "device=h200", "--json"]
    picture = tmp_path / "plan.png"
    ended = launch([sys.executable, "-c", script, *arguments, f"--picture={picture}"], REPOSITORY).wait()
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert (found["parameters"], found["num_ranks"], found["units"]) == (405_853_388_800, 4096, 128)
    assert int(ended.err.split()[-1]) < 1 << 20
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.campaign
def test_calibration_is_stored_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked = ["recipe=llama_small", "device=cpu"]
    assert not planned(*asked)["is_measured"]
    command("trainer.plan", "--calibrate", *asked)
    assert planned(*asked)["is_measured"]
    alone = find_machine("cpu").rates
    program = [*TORCHRUN, "--standalone", "--nproc-per-node=2", "-m", "trainer.plan", "--calibrate", *asked]
    assert launch(program, REPOSITORY).wait().code == 0
    assert find_machine("cpu").rates.link not in (alone.link, 0.0)
    (path,) = (tmp_path / "meshtrainer" / "machines").iterdir()
    path.write_text("{}")
    code, _, err = meshtrainer("plan", *asked)
    assert code == 2
    assert str(path) in err


# ---------------------------------------------------------------------------------------------------------------
# Out of memory


GREEDY = ["model.name=tests.helpers.custom_recipes:greedy", "data.seq_len=32", "log.sample_tokens=0", "eval.every=0"]


@pytest.mark.slow
def test_out_of_memory_ends_with_advice(tmp_path: Path) -> None:
    asked = ["recipe=llama_small", *GREEDY, "model.num_hidden=2", "train.micro_batch_size=2", "train.steps=5", NEVER]
    ended = run(tmp_path / "run", *asked, code=1)
    assert ended.status["state"] == "failed"
    assert "out of memory" in ended.err
    assert "Traceback" not in ended.err
    assert ended.err.rstrip().splitlines()[-1].startswith("would fit: "), "the advice is not scrolled away"
    (kept,) = (tmp_path / "run").glob("traceback_rank*.txt")
    assert str(kept) in ended.err
    assert "CUDA out of memory" in kept.read_text()


@pytest.mark.campaign
def test_out_of_memory_in_a_custom_script_ends_with_advice(tmp_path: Path) -> None:
    config = load_config("llama_small", [*GREEDY, "data.source=synthetic", f"run.dir={tmp_path / 'script'}"])
    trainer = config.spec.trainer_class(Trainer)(config)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer.fit()
    trainer.close()
    notes = getattr(caught.value, "__notes__", [])
    assert bool(notes) == (sys.version_info >= (3, 11))
    assert not notes or notes[-1].splitlines()[-1].startswith("would fit: ")


@pytest.mark.campaign
def test_real_out_of_memory_ends_with_advice(tmp_path: Path) -> None:
    """On a CPU with a limit of the process's memory."""
    script = (
        "import resource, sys, torch; from trainer import run; from trainer.trainer import Trainer\n"
        "room = 400 << 20; used = int(open('/proc/self/statm').read().split()[0]) * 4096\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + room, used + room)); sys.exit(run.main(sys.argv[1:]))"
    )
    own = ["recipe=llama_small", "data.source=synthetic", "eval.every=0", "run.threads=1", f"run.dir={tmp_path}"]
    large = ["data.seq_len=16384", "train.micro_batch_size=8", "model.ffn_dim=2048"]
    done = subprocess.run([sys.executable, "-c", script, *own, *large], capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 1, done.stderr
    assert "out of memory" in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "traceback_rank0.txt").exists()
