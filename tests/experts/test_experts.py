"""Experts divided among ranks: what is refused, what the check at the start finds, and what is read and exported.

That losses do not depend on how experts are divided is in `tests/exactness/table.py`.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.exactness.table import BASE
from tests.helpers.launch import command, on_ranks
from tests.helpers.moe import moe
from tests.helpers.no_plan import make_no_plan
from trainer import Trainer, UserError, load_config, load_weights
from trainer.config.parallel import MeshShape
from trainer.config.rules import check_config
from trainer.errors import TrainingFailed
from trainer.experts import apply_experts, grouped_mm
from trainer.export import export_checkpoint
from trainer.plan.machine import find_machine
from trainer.plan.plan import make_plan

EXCHANGE = ["mesh.expert=2", "mesh.expert_method=exchange"]
GATHER = ["mesh.expert=2", "mesh.expert_method=gather"]


# ---------------------------------------------------------------------------------------------------------------
# Settings


@pytest.mark.parametrize(
    ("overrides", "ranks", "ranks_per_node"),
    [
        (["mesh.expert=4", "mesh.replicate=2"], 4, 4),
        (["mesh.expert=8"], 8, 8),
        ([GATHER[1], "mesh.expert=2"], 4, 1),
        (["train.compile=true", *EXCHANGE], 2, 2),
        (["fsdp.reshard_after_forward=2", "mesh.expert=2"], 4, 4),
        (["mesh.expert=some"], 2, 2),
    ],
    ids=["divides the shards", "divides the experts", "within a node", "compiled", "resharding", "a number"],
)
def test_setting_that_cannot_be_is_refused(overrides: list[str], ranks: int, ranks_per_node: int) -> None:
    """The message begins with the setting, and its proposal is one of it."""
    with pytest.raises(UserError) as refusal:
        check_config(moe("none", *overrides), ranks, ranks_per_node)
    assert str(refusal.value).startswith(f"{overrides[0]}: ")


def test_model_without_experts_cannot_divide_them() -> None:
    with pytest.raises(UserError, match=r"^mesh\.expert=2: "):
        check_config(load_config("llama_small", ["mesh.expert=2"]), 2, 2)


# ---------------------------------------------------------------------------------------------------------------
# The check before the first step


class Counting(Trainer):
    """Has experts whose outputs depend on how many tokens a rank brings them."""

    def build_model(self, config: Any = None) -> Any:
        model = super().build_model(config)
        for module in model.modules():
            if hasattr(module, "w1") and hasattr(module, "reset_parameters"):
                module.register_forward_hook(lambda experts, args, output: output * len(args[0]))
        return model


class Inflating(Trainer):
    """Has experts in the second layer whose gradients are 1.3 times what they should be."""

    def build_model(self, config: Any = None) -> Any:
        model = super().build_model(config)
        inflated = model.get_submodule("layers.1.moe.experts")
        inflated.register_forward_hook(lambda experts, args, output: output + 0.3 * (output - output.detach()))
        return model


def errors_at_the_start(folder: Path, kinds: list[type[Trainer]], method: list[str]) -> list[str]:
    """Return the error that ends the start of each kind of Trainer; empty if it starts."""
    make_no_plan()
    dist.init_process_group("gloo")
    found = []
    for kind in kinds:
        trainer = kind(moe(folder / f"{len(found)}", *method))
        try:
            trainer.start()
        except TrainingFailed as error:
            found.append(str(error))
        else:
            found.append("")
            trainer.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", [EXCHANGE, pytest.param(GATHER, marks=pytest.mark.campaign)], ids=["exchange", "gather"]
)
def test_wrong_experts_are_refused_before_the_first_step(method: list[str], tmp_path: Path) -> None:
    kinds = [Trainer, Counting, Inflating]
    for right, counting, inflating in on_ranks(2, errors_at_the_start, tmp_path, kinds, method):
        assert right == ""
        assert "layers.0.moe.experts" in counting
        assert "layers.0" not in inflating
        assert "layers.1.moe.experts" in inflating


def errors_when_recomputing(folder: Path, settings: list[str]) -> list[str]:
    """Return the errors that end the starts with each `train.activation_checkpoint`; empty if they all start."""
    make_no_plan()
    dist.init_process_group("gloo")
    found = []
    for setting in settings:
        trainer = Trainer(moe(folder / f"{len(found)}", *EXCHANGE, f"train.activation_checkpoint={setting}"))
        try:
            trainer.start()
            trainer.close()
        except Exception as error:
            found.append(f"{setting}: {error}")
    return found


@pytest.mark.slow
def test_check_passes_in_blocks_that_are_recomputed(tmp_path: Path) -> None:
    """What the check computes in a forward pass must not count among what autograd saves for the backward pass."""
    assert on_ranks(2, errors_when_recomputing, tmp_path, ["full", "selective", "budget:0.5"]) == [[], []]


# ---------------------------------------------------------------------------------------------------------------
# What they compute


def test_rows_of_no_expert_give_zeros() -> None:
    """And get none but zeros as gradients; they are what buffers for the worst case hold besides tokens."""
    torch.manual_seed(0)
    rows, weights = torch.randn(7, 3, requires_grad=True), torch.randn(2, 3, 4, requires_grad=True)
    out = grouped_mm(rows, weights, torch.tensor([2, 5, 7], dtype=torch.int32))
    expected = torch.cat([rows[:2] @ weights[0], rows[2:5] @ weights[1], torch.zeros(2, 4)])
    assert torch.allclose(out, expected)
    given = torch.randn(7, 4)
    found = torch.autograd.grad(out, (rows, weights), given)
    right = torch.autograd.grad(expected, (rows, weights), given)
    assert all(torch.allclose(own, other) for own, other in zip(found, right, strict=True))


class Scaled(nn.Module):
    """An expert that scales each row by a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stacked = nn.Parameter(torch.ones(8, 1))

    def forward(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return rows * torch.linspace(0.1, 3, len(rows)).unsqueeze(1)


def test_gradients_of_tokens_are_bit_identical_in_every_run() -> None:
    """Four threads reach the pairs of a token in any order; each repetition would add them in another."""
    torch.manual_seed(0)
    x, given, weights = torch.randn(256, 64), torch.randn(256, 64), torch.rand(256, 4)
    chosen, experts, found = torch.rand(256, 8).topk(4, 1)[1], Scaled(), set()
    num_threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        for _ in range(40):
            tokens = x.clone().requires_grad_()
            (apply_experts(experts, tokens, chosen, weights) * given).sum().backward()
            assert tokens.grad is not None
            found.add(tokens.grad.numpy().tobytes())
    finally:
        torch.set_num_threads(num_threads)
    assert len(found) == 1


# ---------------------------------------------------------------------------------------------------------------
# Folders of transformers


def save_untrained(base: Path, folder: Path, overrides: list[str]) -> None:
    dist.init_process_group("gloo")
    own = ["model.name=hf", f"model.path={base}", "data.source=synthetic", "data.seq_len=32", *overrides]
    base_settings = [item for item in BASE if not item.startswith("data.")]
    trainer = Trainer(load_config("llama_small", [*base_settings, *own, f"run.dir={folder}"]))
    trainer.load_checkpoint()
    trainer.save_checkpoint(wait=True)
    trainer.close()


@pytest.mark.campaign
@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_moe", "mixtral", "deepseek_v3"])
def test_weights_read_by_the_owners_of_experts_are_exported_bit_for_bit(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the extra `transformers` is not installed")
    from safetensors.torch import load_file

    from tests.helpers.hf_models import folder_of, load_with_transformers

    base = folder_of(tmp_path / "base", kind)
    on_ranks(2, save_untrained, base, tmp_path / "run", EXCHANGE)
    export_checkpoint(tmp_path / "run", tmp_path / "export")
    before, after = (load_file(folder / "model.safetensors") for folder in (base, tmp_path / "export"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    tokens = torch.randint(0, 257, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = load_with_transformers(base)[0].eval()(tokens).logits
        torch.testing.assert_close(load_weights(tmp_path / "run")(tokens), expected, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------------------------------------------------------
# Plans

LARGE = [
    *("model.dim=2048", "model.num_layers=8", "model.num_heads=16", "model.num_kv_heads=4", "model.head_dim=128"),
    *("model.expert_dim=2048", "model.num_experts=64", "model.num_chosen=4", "fsdp.param_dtype=bfloat16"),
    *(
        "data.seq_len=1024",
        "train.activation_checkpoint=full",
        "train.global_batch_size=16",
        "train.micro_batch_size=1",
    ),
]


@pytest.mark.campaign
def test_planner_chooses_an_expert_axis_where_it_pays() -> None:
    """With few tokens a micro-batch, experts take longer to move than to compute."""
    arguments = ["recipe=qwen3_moe_small", *LARGE, "data.source=synthetic", "ranks=16", "device=h100"]
    plain = command("trainer.plan", *arguments, "--json")
    chosen = command("trainer.plan", *arguments, "mesh.expert=auto", "--json")
    assert json.loads(plain.out)["mesh"]["expert"] == 1
    assert json.loads(chosen.out)["mesh"]["expert"] > 1


@pytest.mark.campaign
def test_imbalance_of_the_router_costs_time_and_memory() -> None:
    config = moe("none", *LARGE, "mesh.expert=8", EXCHANGE[1])
    machine = find_machine("h100")
    even, skewed = (make_plan(config, MeshShape(1, 16), replace(machine, imbalance=factor)) for factor in (1.0, 2.0))
    assert skewed.time.total_s > 1.05 * even.time.total_s
    assert skewed.memory.peak.total > even.memory.peak.total
