"""muP: initial weights and rates follow from the widths of a smaller model, and activations stay as large as in it."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.helpers.launch import on_ranks, start, tiny
from tests.helpers.tiny import tiny_config
from trainer import Recipe, RunConfig, Trainer, load_config, register
from trainer.model.mup import find_growth, scale_initial_weights
from trainer.model.network import build_network
from trainer.optim.groups import assign
from trainer.optim.optimizer import build_optimizer

BASE = "optim.base_model={dim: 16, num_heads: 2, num_kv_heads: 2, ffn_dim: 32}"
WIDE = ["model.dim=64", "model.num_heads=8", "model.num_kv_heads=8", "model.ffn_dim=192"]
"""Four times as wide as the base model; its feed-forward layers six times."""


def config_of(*overrides: str) -> RunConfig:
    return load_config("llama_small", tiny(*WIDE, BASE, *overrides, "run.dir=never_written"))


def rates_of(config: RunConfig) -> dict[str, tuple[float, float]]:
    """Return the factor of the rate, and the weight decay, of each parameter."""
    model = build_network(config)
    found = assign(model, config.optim, find_growth(config, model))
    return {each.name: (each.lr_scale, each.weight_decay) for each in found}


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
def test_rates_are_those_of_the_table(optimizer: str, scale: str) -> None:
    more = [f"optim.muon.scale={scale}"] if scale else []
    found = rates_of(config_of(f"optim.name={optimizer}", *more))
    for part, expected in TABLE[optimizer, scale].items():
        for name, (rate, decay) in found.items():
            if f"{part}.weight" not in name:
                continue
            assert rate == pytest.approx(expected), name
            assert decay == (0 if part in ("tok_embeddings", "ffn_norm") else pytest.approx(0.1 / expected)), name


def test_without_growth_nothing_changes() -> None:
    config = config_of("model.dim=16", "model.num_heads=2", "model.num_kv_heads=2", "model.ffn_dim=32")
    assert {rate for rate, _ in rates_of(config).values()} == {1.0}


def test_muon_updates_move_activations_alike_at_both_widths() -> None:
    """With every scale: the norm of an update's product with a vector of ones, relative to that vector's."""
    for scale in ("spectral", "match_rms_adamw", "jordan"):
        sizes = []
        for fields in ([], ["model.dim=16", "model.num_heads=2", "model.num_kv_heads=2", "model.ffn_dim=32"]):
            config = config_of("optim.name=muon", f"optim.muon.scale={scale}", "optim.weight_decay=0.0", *fields)
            model = config.recipe.build_model(config.model)
            optimizer = build_optimizer(model, config.optim, growth=find_growth(config, model))
            weight = model.get_parameter("layers.0.feed_forward.w2.weight")
            before = weight.detach().clone()
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
            optimizer.step()
            change = torch.linalg.svdvals(weight.detach() - before).median()
            sizes.append(float(change) * math.sqrt(weight.shape[1] / weight.shape[0]))
        assert sizes[0] == pytest.approx(sizes[1], rel=0.1), scale


def test_adapters_have_one_side_that_grows() -> None:
    """The first factor maps a wide input to a fixed rank, as an output projection does; the second the other way."""
    found = rates_of(config_of("lora.rank=4", "lora.targets=[wq,w2]"))
    assert {name.split(".lora_")[1][0] for name in found} == {"A", "B"}
    for name, (rate, _) in found.items():
        expected = 1.0 if ".lora_B." in name else 1 / 6 if ".w2." in name else 1 / 4
        assert rate == pytest.approx(expected), name


def test_a_groups_rate_multiplies_that_of_the_width() -> None:
    found = rates_of(config_of('optim.groups=[{match: "*.wq.weight", lr: 3.0, weight_decay: 0.2}]'))
    assert found["layers.0.attention.wq.weight"] == (pytest.approx(3 / 4), pytest.approx(0.2 * 4 / 3 * 3))
    assert found["layers.0.attention.wk.weight"][0] == pytest.approx(1 / 4)


def test_frozen_parameters_have_no_rate() -> None:
    found = rates_of(config_of("train.freeze=[tok_embeddings, layers.0]"))
    assert not [name for name in found if name.startswith(("tok_embeddings", "layers.0"))]
    assert found["layers.1.attention.wq.weight"][0] == pytest.approx(1 / 4)


def test_stacked_experts_and_routers() -> None:
    fields = ["model.dim=64", "model.num_heads=4", "model.num_kv_heads=4", "model.expert_dim=32", "model.head_dim=16"]
    base = "optim.base_model={dim: 32, num_heads: 2, num_kv_heads: 2, expert_dim: 8}"
    config = load_config("qwen3_moe_small", [*fields, base])
    found = rates_of(config)
    expected = {"router.weight": 1 / 2, "experts.w1": 1 / 2, "experts.w2": 1 / 4, "q_norm.weight": 1.0}
    for part, rate in expected.items():
        assert {round(found[name][0], 9) for name in found if name.endswith(part)} == {rate}, part


# ---------------------------------------------------------------------------------------------------------------
# Initial weights


def weights_of(folder: Path, *overrides: str) -> dict[str, torch.Tensor]:
    trainer = Trainer(tiny_config(folder, *overrides))
    found = {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in trainer.model.named_parameters()
    }
    trainer.close()
    return found


@pytest.mark.slow
def test_initial_weights_are_scaled_and_the_same_on_every_mesh(tmp_path: Path) -> None:
    plain, scaled = weights_of(tmp_path, *WIDE), weights_of(tmp_path, *WIDE, BASE)
    expected = {"wq": 1 / 2, "w2": 1 / math.sqrt(6), "output": 1 / 4, "tok_embeddings": 1, "ffn_norm": 1}
    for part, factor in expected.items():
        for name in plain:
            if f"{part}.weight" in name:
                torch.testing.assert_close(scaled[name], factor * plain[name])
    for name, weight in on_ranks(2, weights_of, tmp_path, *WIDE, BASE)[1].items():
        assert torch.equal(weight, scaled[name]), name


@dataclasses.dataclass(frozen=True)
class OwnConfig:
    vocab_size: int = 20
    dim: int = 8


class OwnModel(nn.Module):
    """Layers with torch's own initial values, whose variance is 1 / inputs already."""

    def __init__(self, config: OwnConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        self.hidden = nn.Linear(config.dim, config.dim)
        self.conv = nn.Conv1d(config.dim, config.dim, 3)
        self.output = nn.Linear(config.dim, config.vocab_size)


def test_values_that_suit_their_width_already_are_left_alone() -> None:
    recipe = register(Recipe(name="own_widths", config=OwnConfig, build=OwnModel))
    config = load_config("llama_small", ["run.dir=never_written"])
    optim = dataclasses.replace(config.optim, base_model={"dim": 8})
    config = dataclasses.replace(config, model=recipe.config(dim=32), optim=optim)
    model = OwnModel(config.model)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    scale_initial_weights(model, config)
    for name, parameter in model.named_parameters():
        factor = 1 / 2 if name == "output.weight" else 1.0
        torch.testing.assert_close(parameter.detach(), factor * before[name])


# ---------------------------------------------------------------------------------------------------------------
# As commands

MISTAKES = {
    "no such width": (["optim.base_model={dims: 16}"], ["has no such width: dims", "dim: 16"]),
    "no width at all": (["optim.base_model={dim: 0}"], ["optim.base_model.dim=0: must be at least 1"]),
    "no legal model": (["optim.base_model={dim: 16, num_heads: 3}"], ["is not a legal model", "num_heads"]),
    "heads of another size": (["optim.base_model={dim: 16}"], ["its heads have size 2, but this model's have 8"]),
    "another depth": (
        ["optim.base_model={dim: 16, num_heads: 2, num_kv_heads: 2, num_layers: 1}"],
        ["has different parameters than this model", "only fields that are widths"],
    ),
    "tied": ([BASE, "model.tie_embeddings=true"], ["tok_embeddings.weight is both an embedding table and an output"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(MISTAKES))
def test_a_base_model_that_cannot_be_meant_is_refused(kind: str, tmp_path: Path) -> None:
    given, expected = MISTAKES[kind]
    ran = start(tmp_path / "run", "recipe=llama_small", *tiny(*WIDE, *given, "train.steps=1")).wait()
    assert ran.code == 2, ran.err
    assert all(text in ran.err for text in expected), ran.err
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------------------------------------------------------
# The coordinate check

CHECK = ["recipe=llama_small", "optim.base_model={dim: 32, num_heads: 2, num_kv_heads: 2, ffn_dim: 64}"]
CHECK += ["model.dim=32", "model.num_heads=2", "model.num_kv_heads=2", "model.num_layers=2", "run.threads=1"]
CHECK += ["data.seq_len=32", "train.global_batch_size=4", "train.micro_batch_size=4", "data.source=synthetic"]
RATES = {"adamw": ["optim.lr=0.01"], "sgd": ["optim.name=sgd", "optim.lr=0.1"]}
RATES |= {
    f"muon {scale}": ["optim.name=muon", "optim.lr=0.01", f"optim.muon.scale={scale}", f"optim.muon.lr={rate}"]
    for scale, rate in (("spectral", 0.1), ("match_rms_adamw", 0.05), ("jordan", 0.1))
}
