"""The optimizer, rate and decay of each parameter: by default, and by `optim.groups`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.launch import run
from tests.helpers.plain_model import plain_model
from tests.helpers.tiny import fit
from trainer import UserError, load_config
from trainer.config.rules import check_config
from trainer.config.schema import OptimSection
from trainer.optim.muon import Muon
from trainer.optim.optimizer import build_optimizer

LLAMA = ["model.num_kv_heads=2", "model.num_layers=3"]


def of(field: str, records: list[dict[str, Any]]) -> list[Any]:
    return [record[field] for record in records if record["kind"] == "train"]


@dataclass(frozen=True)
class Assigned:
    """What an optimizer does with one parameter."""

    optimizer: str
    lr_scale: float
    weight_decay: float


def assigned_of(model: nn.Module, config: OptimSection, **more: Any) -> dict[str, Assigned]:
    """Return by name what each parameter gets."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {}
    for part in build_optimizer(model, config, **more).parts:
        kind = "muon" if isinstance(part, Muon) else "sgd" if isinstance(part, torch.optim.SGD) else "adamw"
        for group in part.param_groups:
            for parameter in group["params"]:
                own = Assigned(kind, group.get("lr_scale", 1.0), group["weight_decay"])
                found[names[id(parameter)]] = own
    return found


def assigned(*groups: Mapping[str, Any], name: Any = "adamw", **more: Any) -> dict[str, Assigned]:
    """The same for a small llama with these groups."""
    config = OptimSection(name, weight_decay=0.1, groups=tuple(dict(group) for group in groups), **more)
    return assigned_of(plain_model("llama_small", *LLAMA), config)


def names_with(found: Mapping[str, Assigned], optimizer: str) -> set[str]:
    return {name for name, each in found.items() if each.optimizer == optimizer}


# ---------------------------------------------------------------------------------------------------------------
# Muon's share


def test_stacked_experts_use_muon_and_routers_do_not() -> None:
    found = names_with(
        assigned_of(plain_model("qwen3_moe_small", "model.num_kv_heads=2"), OptimSection("muon")), "muon"
    )
    assert {name.rpartition(".")[2] for name in found if ".experts." in name} == {"w1", "w2", "w3"}
    assert not [name for name in found if "router" in name]


def test_stacked_biases_of_experts_are_vectors() -> None:
    """They have two dimensions, but neither decay nor Muon is for them."""
    model = plain_model("gpt_oss_small", "model.num_layers=1")
    found = assigned_of(model, OptimSection("muon", weight_decay=0.1))
    experts = {name.rpartition(".")[2]: each for name, each in found.items() if ".experts." in name}
    assert {name: (each.optimizer, each.weight_decay) for name, each in experts.items()} == {
        **dict.fromkeys(("gate_up", "down"), ("muon", 0.1)),
        **dict.fromkeys(("gate_up_bias", "down_bias"), ("adamw", 0.0)),
    }


def test_convolutions_and_single_rows_do_not_use_muon() -> None:
    model = nn.ModuleDict({"conv": nn.Conv1d(8, 8, 4), "gate": nn.Linear(8, 1), "inner": nn.Linear(8, 8)})
    assert names_with(assigned_of(model, OptimSection("muon")), "muon") == {"inner.weight"}


def test_blocks_of_a_fused_weight_do_not_fit() -> None:
    with pytest.raises(UserError, match=r"qkv\.weight"):
        assigned_of(nn.ModuleDict({"qkv": nn.Linear(8, 24)}), OptimSection("muon"), blocks={"qkv.weight": 5})


def test_muon_has_a_separate_rate() -> None:
    settings = replace(OptimSection("muon").muon, lr=0.02)
    optimizer = build_optimizer(plain_model("llama_small", *LLAMA), OptimSection("muon", 0.001, muon=settings))
    optimizer.set_lr(0.0005)
    muon, adamw = optimizer.parts
    assert [group["lr"] for group in muon.param_groups] == [pytest.approx(0.01)]
    assert {group["lr"] for group in adamw.param_groups} == {0.0005}


# ---------------------------------------------------------------------------------------------------------------
# Groups


def test_each_setting_reaches_the_parameters_that_match_and_no_others() -> None:
    found = assigned(
        {"match": "*embed*", "lr": 0.3},
        {"match": "layers.*.attention.*", "weight_decay": 0.02},
        {"match": "layers.*.feed_forward.*", "optimizer": "muon"},
    )
    for name, each in found.items():
        assert each.lr_scale == (0.3 if "embed" in name else 1.0), name
        assert each.optimizer == ("muon" if "feed_forward" in name else "adamw"), name
        is_matrix = "feed_forward" in name or name == "head.output.weight"
        expected = 0.02 if ".attention." in name else 0.1 if is_matrix else 0.0
        assert each.weight_decay == expected, name


def test_rates_decay_by_layer() -> None:
    found = assigned({"match": "layers.*", "lr": 2.0, "lr_decay": 0.5})
    layers = sorted({int(name.split(".")[1]) for name in found if name.startswith("layers.")})
    for name, each in found.items():
        layer = int(name.split(".")[1]) if name.startswith("layers.") else None
        assert each.lr_scale == (1.0 if layer is None else 2.0 * 0.5 ** (layers[-1] - layer)), name


def test_last_of_several_matching_groups_is_used_and_reported() -> None:
    groups = ({"match": "layers.*", "lr": 0.5, "weight_decay": 0.3}, {"match": "*.wq.weight", "lr": 2.0})
    found = assigned(*groups)
    assert found["layers.0.attention.wq.weight"] == Assigned("adamw", lr_scale=2.0, weight_decay=0.3)
    assert found["layers.0.attention.wk.weight"].lr_scale == 0.5
    model = plain_model("llama_small", *LLAMA)
    optimizer = build_optimizer(model, OptimSection(groups=groups))
    assert len(optimizer.notes) == 1, "that several match is reported"


REFUSED = {
    "matches nothing": {"match": "layer.*", "lr": 2.0},
    "no match": {"lr": 2.0},
    "nothing to set": {"match": "layers.*"},
    "unknown key": {"match": "layers.*", "learning_rate": 1.0},
    "a rate below 0": {"match": "layers.*", "lr": -1.0},
    "a rate that is a text": {"match": "layers.*", "lr": "high"},
    "unknown optimizer": {"match": "layers.*", "optimizer": "adam"},
    "muon for a vector": {"match": "*norm*", "optimizer": "muon"},
    "decay by layer outside of layers": {"match": "*embed*", "lr_decay": 0.9},
}


@pytest.mark.parametrize("kind", list(REFUSED))
def test_impossible_group_is_rejected(kind: str) -> None:
    with pytest.raises(UserError, match=r"^optim\.groups"):
        assigned(REFUSED[kind])


def test_pattern_of_a_tied_weight_names_the_one_that_it_is_tied_to() -> None:
    model = plain_model("llama_small", *LLAMA, "model.tie_embeddings=true")
    groups = ({"match": "head.output.*", "lr": 2.0},)
    with pytest.raises(UserError, match=r"tok_embeddings\.weight"):
        build_optimizer(model, OptimSection(groups=groups))


@pytest.mark.parametrize("optimizer", ["muon", "sgd"])
def test_bfloat16_weights_are_for_adamw_in_every_group(optimizer: str) -> None:
    group = f"optim.groups=[{{match: '*.wq.weight', optimizer: {optimizer}}}]"
    check_config(load_config("llama_small", [group]), 1, 1)
    with pytest.raises(UserError, match=r"^train\.weights_dtype=bfloat16: "):
        check_config(load_config("llama_small", [group, "train.weights_dtype=bfloat16"]), 1, 1)


def test_groups_that_leave_muon_nothing_are_named() -> None:
    groups = ({"match": "layers.*", "optimizer": "adamw"},)
    with pytest.raises(UserError, match=r"^optim\.name=muon: "):
        build_optimizer(plain_model("llama_small", *LLAMA), OptimSection("muon", groups=groups))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_groups_train_as_if_the_rates_were_set_by_hand(name: Any) -> None:
    """A model with two rates takes the steps that two optimizers would take."""
    groups = ({"match": "*.w1.weight", "lr": 0.1}, {"match": "*.w2.weight", "lr": 0.0})
    model, other = (plain_model("llama_small", *LLAMA) for _ in range(2))
    other.load_state_dict(model.state_dict())
    optimizer = build_optimizer(model, OptimSection(name, 0.01, groups=groups))
    plain = build_optimizer(other, OptimSection(name, 0.01))
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    for members in (model, other):
        generator = torch.Generator().manual_seed(0)
        for parameter in members.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()
    plain.step()
    for (key, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        change, full = mine.detach() - before[key], theirs.detach() - before[key]
        factor = 0.1 if ".w1." in key else 0.0 if ".w2." in key else 1.0
        torch.testing.assert_close(change, factor * full, rtol=1e-3, atol=1e-7)


# ---------------------------------------------------------------------------------------------------------------
# As commands

CANNOT_BE_MEANT = {
    "matches nothing": ("[{match: layer.*, lr: 2.0}]", "optim.groups[0].match=layer.*: "),
    "is spelled wrong": (
        '[{match: "*", lr: 1.0}, {match: tok_embedding.weight, lr: 2.0}]',
        "optim.groups[1].match=tok_embedding.weight: ",
    ),
    "is not a list": ("{match: layers.*}", "optim.groups="),
    "has an unknown key": ("[{match: layers.*, lrs: 2.0}]", "optim.groups"),
    "matches what is frozen": ("[{match: tok_embeddings.weight, lr: 2.0}]", "optim.groups[0].match="),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind == "matches nothing" else pytest.mark.campaign) for kind in CANNOT_BE_MEANT],
)
def test_a_command_with_such_a_group_ends_with_2_and_leaves_nothing(kind: str, tmp_path: Path) -> None:
    groups, setting = CANNOT_BE_MEANT[kind]
    frozen = ["train.freeze=[tok_embeddings]"] if "frozen" in kind else []
    given = [f"optim.groups={groups}", "train.steps=1", *frozen]
    ran = run(tmp_path / "run", *given, code=2)
    assert ran.err.startswith(f"error: {setting}")
    assert ran.err.count("error:") == 1
    assert not (tmp_path / "run").exists()


def test_groups_are_fixed_on_a_resume_unless_allowed(tmp_path: Path) -> None:
    groups = 'optim.groups=[{match: "layers.*", lr: 0.5}, {match: "*.w1.weight", lr: 2.0, weight_decay: 0.3}]'
    changed = groups.replace("2.0", "4.0")
    fit(tmp_path, groups, "schedule.name=constant", "train.steps=3")
    with pytest.raises(UserError, match=r"optim\.groups"):
        fit(tmp_path, changed, "schedule.name=constant", "train.steps=4")
    allowed = "checkpoint.allow_changes=[optim.groups]"
    assert of("step", fit(tmp_path, changed, "schedule.name=constant", "train.steps=4", allowed)) == [1, 2, 3, 4]


def test_a_resume_with_other_groups_keeps_every_moment(tmp_path: Path) -> None:
    """Rates that end up the same, though parameters are grouped otherwise: the losses are those of a straight run."""
    same = (
        'optim.groups=[{match: "layers.*", lr: 1.0}, {match: "*.w1.weight", lr: 2.0}, {match: "*.w1.weight", lr: 1.0}]'
    )
    common = ["optim.lr=0.01", "schedule.name=constant"]
    straight = fit(tmp_path / "straight", *common, "train.steps=6")
    fit(tmp_path / "halves", *common, 'optim.groups=[{match: "*.w1.weight", lr: 1.0}]', "train.steps=3")
    allowed = "checkpoint.allow_changes=[optim.groups]"
    resumed = fit(tmp_path / "halves", *common, same, allowed, "train.steps=6")
    assert of("loss", resumed) == of("loss", straight)


def test_a_parameter_may_change_its_optimizer_on_a_resume_if_that_is_allowed(tmp_path: Path) -> None:
    groups = 'optim.groups=[{match: "*.w1.weight", optimizer: muon}]'
    fit(tmp_path, "train.steps=2")
    with pytest.raises(UserError, match=r"layers\.0\.feed_forward\.w1\.weight"):
        fit(tmp_path, groups, "train.steps=4", "checkpoint.allow_changes=[optim.groups]")
    ran = fit(tmp_path, groups, "train.steps=4", "checkpoint.allow_changes=[optim.groups, state.optimizer]")
    assert of("step", ran) == [1, 2, 3, 4]


def test_groups_of_adapters(tmp_path: Path) -> None:
    """The second factor at a rate of its own, as LoRA+ has it; the frozen base is in no group."""
    given = ["lora.rank=2", "lora.targets=[wq]", "train.steps=2"]
    ran = fit(tmp_path, *given, 'optim.groups=[{match: "*.lora_B.*", lr: 16}]')
    assert of("step", ran) == [1, 2]
    with pytest.raises(UserError, match=r"^optim\.groups\[0\]\.match=\*\.wk\.weight: "):
        fit(tmp_path / "base", *given, "optim.groups=[{match: '*.wk.weight', lr: 2}]")
