"""Initial weights: the same on any mesh, bit for bit, whatever an initialization does; each rank draws only its part.

Tensors that are not initialized, or that have values before, are in `test_sharding.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.init import trunc_normal_
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from tests.exactness.table import KINDS
from tests.helpers.cases import campaign_except, in_campaign, needs_torch
from tests.helpers.hf_models import settings_of
from tests.helpers.launch import on_ranks
from tests.helpers.tiny import full, tiny_config
from trainer import ModelSpec, RunConfig, Trainer, load_config, register
from trainer.model import initial_weights
from trainer.model.initial_weights import materialize
from trainer.model.network import build_network
from trainer.model.parameters import count_parameters, local
from trainer.model.shard import apply_sharding

BLOCK = 2**16
"""Number of elements that one generator draws."""


# ---------------------------------------------------------------------------------------------------------------
# Initializations


@dataclass(frozen=True)
class OwnConfig:
    vocab_size: int = 257


class Layer(nn.Module):
    """Two matrices and a bias."""

    rows = 400

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.other = nn.Parameter(torch.empty(self.rows, 256)), nn.Parameter(torch.empty(400, 256))
        self.bias = nn.Parameter(torch.empty(400))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight.mean() + self.other.mean() + self.bias.mean()


class DrawsOneAfterAnother(Layer):
    rows = 2**15

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)
        nn.init.kaiming_uniform_(self.other)
        nn.init.normal_(self.weight, mean=1.0)
        nn.init.uniform_(self.bias, 1.0, 2.0)


class ChangesWhatWasDrawn(Layer):
    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.weight.normal_(0.5).clamp_(0, 1).clamp_(max=1)
        self.weight[-1].fill_(7)
        nn.init.uniform_(self.other, 0, 16).log_().add_(3, alpha=2)
        self.other.data[2].zero_()
        nn.init.zeros_(self.bias)
        self.bias[100:300].sub_(4)


class ComputesFromOthers(Layer):
    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.weight.normal_()
        self.other.uniform_(-1, 1)
        self.other[:, 3].zero_()
        self.bias.copy_(torch.rand(len(self.bias)) + self.other.sum())


class ReadsWithoutAnOperator(Layer):
    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.weight.normal_()
        self.weight.data.numpy()[3] = 0.0
        self.other.data.numpy()[:] = 1.0
        self.bias.fill_(float(self.weight.detach().numpy().sum()))


class Truncates(Layer):
    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.trunc_normal_(parameter, std=0.5, a=-1.0, b=1.0)


class TruncatesByTorchItself(Layer):
    """Since torch 2.13, it draws again whatever lies outside, and leaves tensors on the meta device alone."""

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=5.0)
            trunc_normal_(parameter, std=0.5, a=-1.0, b=1.0)


class HasItsOwnGenerator(Layer):
    def reset_parameters(self) -> None:
        generator = torch.Generator().manual_seed(3)
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=generator)


class Assigns(Layer):
    @torch.no_grad()
    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        self.weight.data = torch.rand(self.weight.shape)
        nn.init.zeros_(self.other)
        self.other = nn.Parameter(torch.rand(self.other.shape))
        try:
            self.bias.copy_(torch.arange(400.0))
        except RuntimeError:
            nn.init.zeros_(self.bias)


class Own(nn.Module):
    """A tied table with a padding row, and a layer of each kind."""

    kinds: Sequence[type[Layer]] = (
        DrawsOneAfterAnother,
        ChangesWhatWasDrawn,
        ComputesFromOthers,
        ReadsWithoutAnOperator,
        Truncates,
        TruncatesByTorchItself,
        HasItsOwnGenerator,
        Assigns,
    )

    def __init__(self, config: OwnConfig) -> None:
        super().__init__()
        self.table = nn.Embedding(config.vocab_size, 256, padding_idx=3)
        self.layers = nn.ModuleList(kind() for kind in self.kinds)
        self.out = nn.Linear(256, config.vocab_size)
        self.out.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


register(ModelSpec("draws", OwnConfig, Own, [("table", "out"), "layers.*"]))

SYNTHETIC = [
    *("data.source=synthetic", "data.seq_len=32", "train.global_batch_size=24", "train.micro_batch_size=1"),
    *("run.device=cpu", "run.threads=1"),
]


def config_of(name: str, *overrides: str) -> RunConfig:
    """Return the configuration of a recipe's model in a tiny shape, or of the model above."""
    if name == "draws":
        return load_config("llama_small", [f"model.name={Own.__module__}:draws", *SYNTHETIC, *overrides])
    return load_config("llama_small", [f"model.name={name}", *KINDS[name].fields, *SYNTHETIC, *overrides])


# ---------------------------------------------------------------------------------------------------------------
# One rank of a mesh, without the others


@contextmanager
def one_of(ranks: int, rank: int) -> Iterator[DeviceMesh]:
    """Open a process group that sends no messages, as one of its ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)  # type: ignore[no-untyped-call]
    try:
        yield init_device_mesh("cpu", (ranks,), mesh_dim_names=("shard",))
    finally:
        dist.destroy_process_group()


def build(config: RunConfig, mesh: DeviceMesh | None = None, device: str = "cpu") -> nn.Module:
    """Return the initialized model, or a rank's part of it."""
    model = build_network(config)
    if mesh is not None:
        apply_sharding(model, config.spec, config, mesh)
    materialize(model, config.run.seed, torch.device(device), config.spec.init)
    return model


def part_of(whole: torch.Tensor, parameter: DTensor, rank: int) -> torch.Tensor:
    """Return the part of a tensor that a rank should have of a parameter."""
    sizes = parameter.device_mesh.shape
    for size, index, placement in zip(sizes, np.unravel_index(rank, sizes), parameter.placements, strict=True):
        if isinstance(placement, Shard):
            chunks = whole.chunk(size, placement.dim)  # the last ranks may have none
            whole = chunks[index] if index < len(chunks) else whole.narrow(placement.dim, 0, 0)
    return whole


def assert_parts_of_one_whole(config: RunConfig, ranks: int) -> None:
    whole = dict(build(config).named_parameters())
    for rank in range(ranks):
        with one_of(ranks, rank) as mesh:
            for name, parameter in build(config, mesh).named_parameters():
                assert isinstance(parameter, DTensor)
                assert torch.equal(local(parameter), part_of(whole[name], parameter, rank)), (name, rank)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("overrides", [[], ["train.weights_dtype=bfloat16"]], ids=["float32", "bfloat16"])
def test_ranks_have_parts_of_the_same_weights(overrides: Sequence[str], ranks: int) -> None:
    """Most shards begin inside a block."""
    assert_parts_of_one_whole(config_of("draws", *overrides), ranks)


@pytest.mark.parametrize("ranks", [4, *in_campaign(8)])
def test_a_table_of_few_rows_is_divided_along_its_columns(ranks: int) -> None:
    config = config_of("draws", "model.vocab_size=7")
    with one_of(ranks, rank=1) as mesh:
        assert local(build(config, mesh).table.weight).shape == (7, 256 // ranks)  # type: ignore[union-attr, arg-type]
    assert_parts_of_one_whole(config, ranks)


NATIVE = [name for name, kind in KINDS.items() if not kind.transformers_model]


@pytest.mark.parametrize("ranks", [3, *in_campaign(2)])
@pytest.mark.parametrize("name", NATIVE)
def test_ranks_have_parts_of_the_same_native_model(name: str, ranks: int) -> None:
    assert_parts_of_one_whole(config_of(name), ranks)


@pytest.mark.parametrize("kind", ["llama", "gpt2", *in_campaign("gemma3", "qwen3_moe", "qwen3_next")])
def test_ranks_have_parts_of_the_same_transformers_model(kind: str, tmp_path: Path) -> None:
    """GPT-2 draws its projections twice; the tables have a padding row."""
    pytest.importorskip("transformers")
    settings_of(kind).save_pretrained(tmp_path)
    overrides = ["model.name=hf", f"model.path={tmp_path}", "model.fresh=true"]
    assert_parts_of_one_whole(load_config("llama_small", [*overrides, *SYNTHETIC]), 3)


# ---------------------------------------------------------------------------------------------------------------
# Trainers on real ranks


def digests(folder: Path, on_mesh: Sequence[str], num_ranks: int) -> dict[str, tuple[int, int, bool]]:
    """Return for each parameter of some models what tells whether a bit differs, without sending it to the test.

    on_mesh: settings that only several ranks have.
    """
    run = f"run.dir={folder / 'run'}"
    expert = ["mesh.expert=2"] if num_ranks == 2 and on_mesh else []
    configs = [
        tiny_config(folder / "run", "train.global_batch_size=24", "train.micro_batch_size=1", *on_mesh),
        config_of("draws", run),
        config_of("draws", "model.vocab_size=7", "train.weights_dtype=bfloat16", run),
        config_of("qwen3_moe", *expert, run),
    ]
    found = {}
    for number, config in enumerate(configs):
        trainer = Trainer(config)
        for name, parameter in trainer.model.named_parameters():
            bits = full(parameter.detach()).contiguous().view(torch.uint8).flatten().to(torch.int64)
            weighted = (bits * (1 + torch.arange(bits.numel()) % 65_521)).sum()
            found[f"{number} {name}"] = (int(bits.sum()), int(weighted), bool(bits.any()))
        trainer.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "on_mesh"),
    [
        pytest.param(2, ("mesh.context=2",), marks=needs_torch("2.12")),
        (4, ("mesh.replicate=2",)),
        *in_campaign((3, ()), (8, ())),
    ],
    ids=["context and experts", "2 x 2", "3", "8"],
)
def test_trainers_have_the_weights_of_one_rank(ranks: int, on_mesh: Sequence[str], tmp_path: Path) -> None:
    """Eight ranks share four experts."""
    alone = digests(tmp_path, (), 1)
    for found in on_ranks(ranks, digests, tmp_path, on_mesh, ranks):
        assert found == alone


# ---------------------------------------------------------------------------------------------------------------
# Values


@pytest.fixture(scope="module")
def own() -> Own:
    model = build(config_of("draws"))
    assert isinstance(model, Own)
    return model.requires_grad_(False)


def layer_of(own: Own, kind: type[Layer]) -> Layer:
    return next(layer for layer in own.layers if isinstance(layer, kind))


def test_the_last_draw_counts(own: Own) -> None:
    layer = layer_of(own, DrawsOneAfterAnother)
    assert abs(layer.weight.mean() - 1) < 4 / math.sqrt(layer.weight.numel())
    bound = math.sqrt(6 / 256)
    assert 0.99 * bound < layer.other.abs().max() <= bound
    assert 1 <= layer.bias.min() < 1.05 < 1.95 < layer.bias.max() <= 2


def test_changes_apply_to_what_was_drawn(own: Own) -> None:
    layer = layer_of(own, ChangesWhatWasDrawn)
    drawn = layer.weight[:-1]
    assert (drawn.min(), drawn.max()) == (0, 1)
    assert abs((drawn == 0).float().mean() - 0.3085) < 0.01, "the part of a normal distribution below -0.5"
    assert layer.weight[-1].eq(7).all()
    assert layer.other[2].eq(0).all()
    rest = torch.cat((layer.other[:2], layer.other[3:]))
    assert abs(((rest - 6).exp() / 16).mean() - 0.5) < 0.01
    assert layer.bias.tolist() == [0.0] * 100 + [-4.0] * 200 + [0.0] * 100


def test_values_may_depend_on_others(own: Own) -> None:
    layer = layer_of(own, ComputesFromOthers)
    assert layer.other[:, 3].eq(0).all()
    drawn = layer.bias - layer.other.sum()
    assert drawn.min() > -0.01
    assert drawn.max() < 1.01
    layer = layer_of(own, ReadsWithoutAnOperator)
    assert layer.weight[3].eq(0).all()
    assert layer.other.eq(1).all()
    assert torch.allclose(layer.bias, layer.weight.sum(), rtol=1e-4)


@pytest.mark.parametrize("kind", [Truncates, TruncatesByTorchItself])
def test_truncated_values_are_truncated(kind: type[Layer], own: Own) -> None:
    for weight in layer_of(own, kind).parameters():
        assert weight.abs().max() <= 1
        assert abs(weight.std() - 0.5 * 0.8796) < 1 / math.sqrt(len(weight.flatten()))  # of one cut at 2 sigma


def test_an_own_generator_is_used(own: Own) -> None:
    layer, expected = layer_of(own, HasItsOwnGenerator), HasItsOwnGenerator()
    expected.reset_parameters()
    assert torch.equal(layer.weight, expected.weight)
    assert torch.equal(layer.bias, expected.bias)


def test_assigned_tensors_count(own: Own) -> None:
    layer = layer_of(own, Assigns)
    for drawn in (layer.weight, layer.other):
        assert abs(drawn.mean() - 0.5) < 0.01
    assert torch.equal(layer.bias, torch.arange(400.0))


def test_a_padding_row_is_zero(own: Own) -> None:
    assert own.table.weight.eq(0).all(1).nonzero().tolist() == [[3]]


def test_scalars_and_empty_parameters_are_initialized() -> None:
    class Scalar(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.shift = nn.Parameter(torch.empty(())), nn.Parameter(torch.empty(()))
            self.nothing = nn.Parameter(torch.empty(0, 4))

        def reset_parameters(self) -> None:
            nn.init.uniform_(self.scale, 2, 3)
            nn.init.constant_(self.shift, 5)
            nn.init.normal_(self.nothing)

    with torch.device("meta"):
        model = Scalar()
    materialize(model, 0, torch.device("cpu"))
    assert 2 <= model.scale <= 3
    assert model.shift == 5
    assert model.nothing.shape == (0, 4)


def test_a_module_may_read_one_that_comes_before_it() -> None:
    class Copies(nn.Linear):
        def __init__(self, source: nn.Linear) -> None:
            self.sources = [source]  # not a submodule
            super().__init__(8, 8)

        @torch.no_grad()
        def reset_parameters(self) -> None:
            for own, other in zip(self.parameters(), self.sources[0].parameters(), strict=True):
                own.copy_(other)

    with torch.device("meta"):
        first = nn.Linear(8, 8)
        model = nn.Sequential(first, Copies(first))
    materialize(model, 0, torch.device("cpu"))
    assert torch.equal(model[1].weight, first.weight)
    assert first.weight.std() > 0.1


class Large(nn.Module):
    """Two matrices of 64 blocks."""

    def __init__(self, std: float = 0.02) -> None:
        super().__init__()
        self.std = std
        self.first, self.second = (nn.Parameter(torch.empty(2048, 2048)) for _ in range(2))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.first, std=self.std)
        nn.init.uniform_(self.second, -self.std, self.std)


def large(seed: int = 0) -> list[torch.Tensor]:
    """Return the weights of two equal layers."""
    with torch.device("meta"):
        model = nn.Sequential(Large(), Large())
    materialize(model, seed, torch.device("cpu"))
    return [parameter.detach().flatten() for parameter in model.parameters()]


def correlation(x: torch.Tensor, y: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack((x, y)))[0, 1])


def test_weights_are_distributed_as_asked_for() -> None:
    weights = large()
    for weight, std, kurtosis in zip(weights, 2 * [0.02, 0.02 / math.sqrt(3)], 2 * [3.0, 1.8], strict=True):
        assert abs(weight.mean()) < 4 * std / math.sqrt(len(weight))
        assert abs(weight.std() / std - 1) < 0.01
        assert abs((weight / std).pow(4).mean() - kurtosis) < 0.05
        assert abs(correlation(weight[:-BLOCK], weight[BLOCK:])) < 0.01, "of neighbouring blocks"
        assert abs(correlation(weight[:-1], weight[1:])) < 0.01
    for number, weight in enumerate(weights):
        for other in weights[number + 1 :]:
            assert abs(correlation(weight, other)) < 0.01


def test_weights_depend_on_the_seed_alone() -> None:
    first = large()
    torch.manual_seed(5)
    assert all(torch.equal(weight, again) for weight, again in zip(first, large(), strict=True))
    assert not any(torch.equal(weight, other) for weight, other in zip(first, large(seed=1), strict=True))


def test_threads_share_the_work() -> None:
    """The fixture that all tests have restores their number."""
    alone = large()
    torch.set_num_threads(3)
    assert all(torch.equal(weight, shared) for weight, shared in zip(alone, large(), strict=True))


# ---------------------------------------------------------------------------------------------------------------
# How much a rank draws


class Counting(TorchDispatchMode):
    """Counts the random numbers that are drawn."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and type(args[0]) is torch.Tensor:
            self.count += args[0].numel()
        return func(*args, **(kwargs or {}))


RECIPES = ["llama3_1b", "llama3_8b", "llama3_70b", "llama3_405b", "qwen3_8b", "qwen3_30b_a3b", "qwen3_next_80b"]
RECIPES += ["gpt_oss_20b", "gpt_oss_120b", "deepseek_v3"]


@needs_torch("2.12")  # which some of these need for copies of experts
@pytest.mark.parametrize("recipe", campaign_except(RECIPES, ["llama3_8b", "gpt_oss_20b"]))
def test_one_of_512_ranks_draws_little_more_than_its_part(recipe: str) -> None:
    sizes = ["train.micro_batch_size=1", "train.global_batch_size=512", "mesh.shard=512", "data.source=synthetic"]
    config = load_config(recipe, [*sizes, "data.tokenizer=null", "train.compile=false"], needs_weights=False)
    with one_of(512, rank=1) as mesh, Counting() as numbers:
        model = build(config, mesh, device="meta")
    held = sum(local(parameter.detach()).numel() for parameter in model.parameters())
    assert held / 2 < numbers.count < held + 0.01 * count_parameters(model)


@pytest.mark.parametrize("kind", [DrawsOneAfterAnother, ChangesWhatWasDrawn, Truncates])
def test_a_rank_draws_little_more_than_its_part(kind: type[Layer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Layer, "rows", 2**14)
    monkeypatch.setattr(Own, "kinds", [kind])
    config = config_of("draws")
    with one_of(32, rank=1) as mesh, Counting() as numbers:
        model = build(config, mesh)
    assert numbers.count < count_parameters(model) / 3


def test_many_numbers_drawn_in_vain_are_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of("draws")
    for limit, is_said in ((initial_weights.MANY, False), (1000, True)):
        monkeypatch.setattr(initial_weights, "MANY", limit)
        with one_of(2, rank=0) as mesh:
            build(config, mesh)
        build(config)  # one rank keeps all that it draws
        assert capsys.readouterr().err.count("warning: layers.2: ") == is_said
