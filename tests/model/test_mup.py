"""muP: initial weights and rates follow from the widths of a smaller model, and activations stay as large as in it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.tiny import fit, tiny_config
from trainer import ModelSpec, Trainer, UserError, load_config, register

BASE = "optim.base_model={dim: 16, num_heads: 2, num_kv_heads: 2, ffn_dim: 32}"
NARROW = ["model.dim=16", "model.num_heads=2", "model.num_kv_heads=2", "model.ffn_dim=32"]
WIDE = ["model.dim=64", "model.num_heads=8", "model.num_kv_heads=8", "model.ffn_dim=192"]
"""Four times as wide as the base model; its feed-forward layers six times."""


def trainer_of(folder: Path, *overrides: str) -> Trainer:
    return Trainer(tiny_config(folder, *overrides))


def rates_in(trainer: Trainer) -> dict[str, tuple[float, float]]:
    """Return the factor of the rate, and the weight decay, of each trained parameter."""
    trainer.optimizer.set_lr(1.0)
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    groups = [group for part in trainer.optimizer.parts for group in part.param_groups]
    return {names[id(p)]: (float(group["lr"]), group["weight_decay"]) for group in groups for p in group["params"]}


def rates_of(folder: Path, *overrides: str) -> dict[str, tuple[float, float]]:
    trainer = trainer_of(folder, *overrides)
    found = rates_in(trainer)
    trainer.close()
    return found


# ---------------------------------------------------------------------------------------------------------------
# Rates, by the table of the paper

TABLE: dict[tuple[str, str], dict[str, float]] = {
    ("adamw", ""): {"wq": 1 / 4, "w1": 1 / 4, "w2": 1 / 6, "output": 1 / 4, "tok_embeddings": 1, "ffn_norm": 1},
    ("sgd", ""): {"wq": 1, "w1": 6 / 4, "w2": 4 / 6, "output": 1 / 4, "tok_embeddings": 4, "ffn_norm": 4},
    ("muon", "spectral"): {"wq": 1, "w1": 1, "w2": 1, "output": 1 / 4, "tok_embeddings": 1, "ffn_norm": 1},
    ("muon", "match_rms_adamw"): {"wq": 1 / 2, "w1": 1 / 2, "w2": 1 / 3, "output": 1 / 4, "tok_embeddings": 1},
    ("muon", "jordan"): {"wq": 1, "w1": 1, "w2": math.sqrt(4 / 6), "output": 1 / 4, "tok_embeddings": 1},
}
"""By optimizer and Muon's scale.  Muon's last two: their updates relative to sqrt(rows / columns), in this model and in
the base model, whose feed-forward layers are 192 x 64 and 32 x 16.
"""


@pytest.mark.parametrize(("optimizer", "scale"), list(TABLE))
def test_rates_are_those_of_the_table(optimizer: str, scale: str, tmp_path: Path) -> None:
    more = [f"optim.muon.scale={scale}"] if scale else []
    found = rates_of(tmp_path, *WIDE, BASE, f"optim.name={optimizer}", *more)
    for part, expected in TABLE[optimizer, scale].items():
        chosen = {name: values for name, values in found.items() if f"{part}.weight" in name}
        assert chosen, part
        for name, (rate, decay) in chosen.items():
            assert rate == pytest.approx(expected), name
            assert decay == (0 if part in ("tok_embeddings", "ffn_norm") else pytest.approx(0.1 / expected)), name


def test_without_growth_nothing_changes(tmp_path: Path) -> None:
    assert {rate for rate, _ in rates_of(tmp_path, *NARROW, BASE).values()} == {1.0}


def test_adapters_have_one_side_that_grows(tmp_path: Path) -> None:
    """The first factor maps a wide input to a fixed rank, as an output projection does; the second the other way."""
    found = rates_of(tmp_path, *WIDE, BASE, "lora.rank=4", "lora.targets=[wq,w2]")
    assert {name.split(".lora_")[1][0] for name in found} == {"A", "B"}
    for name, (rate, _) in found.items():
        expected = 1.0 if ".lora_B." in name else 1 / 6 if ".w2." in name else 1 / 4
        assert rate == pytest.approx(expected), name


def test_groups_and_frozen_parameters(tmp_path: Path) -> None:
    """A group's rate multiplies that of the width."""
    groups = 'optim.groups=[{match: "*.wq.weight", lr: 3.0, weight_decay: 0.2}]'
    found = rates_of(tmp_path, *WIDE, BASE, groups, "train.freeze=[tok_embeddings, layers.0]")
    assert found["layers.1.attention.wq.weight"] == (pytest.approx(3 / 4), pytest.approx(0.2 * 4 / 3 * 3))
    assert found["layers.1.attention.wk.weight"][0] == pytest.approx(1 / 4)
    assert not [name for name in found if name.startswith(("tok_embeddings", "layers.0"))]


def test_stacked_experts_and_routers(tmp_path: Path) -> None:
    fields = ["model.dim=64", "model.num_heads=4", "model.num_kv_heads=4", "model.expert_dim=32", "model.head_dim=16"]
    base = "optim.base_model={dim: 32, num_heads: 2, num_kv_heads: 2, expert_dim: 8}"
    more = ["data.seq_len=16", "train.global_batch_size=4", "data.source=synthetic", "run.device=cpu"]
    trainer = Trainer(load_config("qwen3_moe_small", [*fields, base, *more, f"run.dir={tmp_path}"]))
    found = rates_in(trainer)
    trainer.close()
    expected = {"router.weight": 1 / 2, "experts.w1": 1 / 2, "experts.w2": 1 / 4, "q_norm.weight": 1.0}
    for part, rate in expected.items():
        assert {round(found[name][0], 9) for name in found if name.endswith(part)} == {rate}, part


# ---------------------------------------------------------------------------------------------------------------
# Initial weights


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    trainer.close()
    return {name: parameter.detach() for name, parameter in trainer.model.named_parameters()}


def test_initial_weights_are_scaled(tmp_path: Path) -> None:
    plain, scaled = weights_of(trainer_of(tmp_path, *WIDE)), weights_of(trainer_of(tmp_path, *WIDE, BASE))
    expected = {"wq": 1 / 2, "w2": 1 / math.sqrt(6), "output": 1 / 4, "tok_embeddings": 1, "ffn_norm": 1}
    for part, factor in expected.items():
        for name in plain:
            if f"{part}.weight" in name:
                torch.testing.assert_close(scaled[name], factor * plain[name])


@dataclass(frozen=True)
class OwnConfig:
    vocab_size: int = 32
    dim: int = 32


class OwnModel(nn.Module):
    """Layers with torch's own initial values, whose variance is 1 / inputs already."""

    def __init__(self, config: OwnConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        self.hidden = nn.Linear(config.dim, config.dim)
        self.conv = nn.Conv1d(config.dim, config.dim, 3)
        self.output = nn.Linear(config.dim, config.vocab_size)

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.output(self.hidden(self.embed(tokens)))


register(ModelSpec(name="own_widths", config=OwnConfig, build=OwnModel))


def test_values_that_suit_their_width_already_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("model:\n  name: own_widths\ndata:\n  source: synthetic\n")
    own = ["data.seq_len=8", "train.global_batch_size=2", "run.device=cpu", f"run.dir={tmp_path / 'run'}"]
    before, after = (
        weights_of(Trainer(load_config(str(tmp_path / "own.yaml"), [*own, *more])))
        for more in ([], ["optim.base_model={dim: 8}"])
    )
    for name, weight in after.items():
        torch.testing.assert_close(weight, (1 / 2 if name == "output.weight" else 1.0) * before[name])


# ---------------------------------------------------------------------------------------------------------------
# Training


def change_of_logits(folder: Path, *overrides: str) -> float:
    """Return by how much four steps change the logits of the same tokens."""
    own = ["optim.lr=0.02", "schedule.warmup_steps=0", "schedule.name=constant", "optim.weight_decay=0"]
    trainer = trainer_of(folder, *own, "train.steps=4", *overrides)
    tokens = torch.arange(32)[None]
    before = trainer.model(tokens).detach()
    assert len(list(trainer.steps())) == 4
    found = trainer.model(tokens).detach() - before
    trainer.close()
    return float(found.square().mean().sqrt())


@pytest.mark.campaign
def test_activations_do_not_grow_with_the_width(tmp_path: Path) -> None:
    """At sixteen times the width logits change as in the base model, and without one several times as much."""
    widths = ["model.dim=256", "model.num_heads=32", "model.num_kv_heads=32", "model.ffn_dim=512"]
    small, wide = (change_of_logits(tmp_path / "with", BASE, *fields) for fields in (NARROW, widths))
    plain = change_of_logits(tmp_path / "without", *widths)
    print(small, wide, plain)
    assert 0.5 * small < wide < 2 * small
    assert plain > 4 * small


@pytest.mark.campaign
def test_a_resume_keeps_the_base_model(tmp_path: Path) -> None:
    """Another one changes the rates, and so must be allowed."""
    base = "optim.base_model={dim: 16, num_heads: 2, num_kv_heads: 2, ffn_dim: 48}"
    fit(tmp_path, *WIDE, base, "train.steps=1")
    changed = "optim.base_model={dim: 32, num_heads: 4, num_kv_heads: 4, ffn_dim: 96}"
    with pytest.raises(UserError, match=r"optim\.base_model"):
        fit(tmp_path, *WIDE, changed, "train.steps=2")
    allowed = "checkpoint.allow_changes=[optim.base_model]"
    records = fit(tmp_path, *WIDE, changed, "train.steps=2", allowed)
    assert [record["step"] for record in records if record["kind"] == "train"] == [1, 2]


@pytest.mark.parametrize(
    "given",
    [
        ["optim.base_model={dims: 16}"],
        ["optim.base_model={dim: 0}"],
        ["optim.base_model={dim: 16, num_heads: 3}"],
        ["optim.base_model={dim: 16}"],  # its heads would have another size
        ["optim.base_model={dim: 16, num_heads: 2, num_kv_heads: 2, num_layers: 1}"],
        [BASE, "model.tie_embeddings=true"],
    ],
    ids=" ".join,
)
def test_a_base_model_that_cannot_be_meant_is_refused(given: list[str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^optim\.base_model"):
        trainer_of(tmp_path / "run", *WIDE, *given)
    assert not (tmp_path / "run").exists()
