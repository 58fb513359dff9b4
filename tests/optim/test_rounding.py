"""Weights and moments in bfloat16: their mean is preserved on every mesh and after a resume; what is not supported."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.helpers.comparing import load_tensors
from tests.helpers.launch import on_ranks, tiny
from tests.helpers.tiny import full
from trainer import RunConfig, Trainer, UserError, load_config
from trainer.config import OptimSection, check_config
from trainer.export import export_checkpoint
from trainer.model.parameters import local
from trainer.model.placement import Box
from trainer.optim import adamw
from trainer.optim.adamw import (
    FusedAdamW,
    RoundingAdamW,
    _compiled_update,
    _step_scalars,
    _update_by_pieces,
    hash_keys,
    random_bits,
    round_stochastically,
)
from trainer.optim.optimizer import build_optimizer

# ---------------------------------------------------------------------------------------------------------------
# Rounding


def origin(key: int = 1, place: int = 0) -> torch.Tensor:
    return torch.tensor((key, place), dtype=torch.int32)


def rounded(values: torch.Tensor, times: int) -> torch.Tensor:
    """Return values rounded `times` times, in bfloat16 with shape (times, N)."""
    bits = random_bits(origin(), times * len(values)).view(times, -1)
    return round_stochastically(values.expand(times, -1), bits)


def test_mean_of_rounded_values_is_the_value() -> None:
    """To five standard errors, for 2000 numbers of both signs over 16 orders of magnitude."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2000, generator=generator) * 10 ** torch.linspace(-8, 8, 2000)
    times = 4096
    found = rounded(values, times).double()
    words = values.view(torch.int32) & -0x10000
    low, high = words.view(torch.float32).double(), (words + 0x10000).view(torch.float32).double()
    share = (values.double() - low) / (high - low)
    assert ((found == low) | (found == high)).all()
    error = ((found == high).double().mean(0) - share) / (share * (1 - share) / times).sqrt()
    error = error[(share > 0.01) & (share < 0.99)]
    assert len(error) > 1900
    assert error.abs().max() < 5
    assert abs(error.mean()) < 5 / len(error) ** 0.5
    assert abs(error.std() - 1) < 0.1


def test_rounding_gives_one_of_the_two_neighbors() -> None:
    values = torch.randn(3000, generator=torch.Generator().manual_seed(1))
    found = rounded(values, 8).float()
    nearest = values.to(torch.bfloat16).float()
    assert ((found - values).abs() < 2**-7 * values.abs()).all()
    exact = rounded(nearest, 8).float()
    assert torch.equal(exact, nearest.expand(8, -1))


def test_special_values_are_unchanged() -> None:
    inf, nan, tiniest = torch.inf, torch.nan, 2.0**-133
    kept = torch.tensor([inf, -inf, nan, 0.0, -0.0, tiniest, -tiniest, 1.0, -1.0])
    for row in rounded(kept, 64).float():
        assert torch.equal(row.nan_to_num(7), kept.nan_to_num(7))
        assert torch.equal(row.signbit()[3:], kept.signbit()[3:])
    # All bits of the lower half set would carry into the sign if they were added to.
    payload = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    assert rounded(payload, 64).isnan().all()
    denormal = torch.tensor([0.25 * tiniest, -2.5 * tiniest])
    found = rounded(denormal, 4096).double() / tiniest
    assert {*found[:, 0].tolist()} == {0.0, 1.0}
    assert {*found[:, 1].tolist()} == {-2.0, -3.0}
    assert found.mean(0).tolist() == pytest.approx([0.25, -2.5], abs=0.05)


def test_random_bits_depend_on_the_position() -> None:
    whole = random_bits(origin(), 21_000)
    assert torch.equal(random_bits(origin(place=1_200), 7_000), whole[1_200:8_200])
    assert torch.equal(random_bits(origin(place=2**31 - 5), 10)[5:], random_bits(origin(place=-(2**31)), 5))
    assert len(whole.unique()) > 0.999 * whole.numel()
    ones = torch.stack([(whole >> bit) & 1 for bit in range(32)]).double()
    assert (ones.mean(1) - 0.5).abs().max() < 5 * 0.5 / whole.numel() ** 0.5
    neighbours = torch.stack([(whole[1:] ^ whole[:-1]) >> bit & 1 for bit in range(32)]).double()
    assert (neighbours.mean(1) - 0.5).abs().max() < 5 * 0.5 / whole.numel() ** 0.5
    other = random_bits(origin(key=2), 21_000)
    assert (whole == other).sum() < 3
    keys = hash_keys(torch.arange(100, dtype=torch.int32)[:, None], torch.arange(1.0, 1001.0))
    assert len(keys.unique()) > 0.999 * keys.numel()


@pytest.mark.parametrize("box", [((1, 3), (0, 6), (0, 5)), ((0, 4), (2, 4), (0, 5)), ((1, 3), (0, 6), (3, 5))])
def test_bits_of_a_shard_are_those_of_its_elements(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """Along whichever dimension it is cut, and wherever it is divided once more."""
    monkeypatch.setattr("trainer.optim.adamw.local_box", lambda parameter: box)
    place = adamw._shard_position(torch.empty(4, 6, 5), "w", 0)
    own = torch.tensor([*place, *adamw._CONTIGUOUS[len(place) - 2 :]], dtype=torch.int32)
    start = torch.tensor([int(own[0]), 0, 0, 0], dtype=torch.int32)
    whole = random_bits(start, 4 * 6 * 5).view(4, 6, 5)
    expected = whole[tuple(slice(*span) for span in box)].flatten()
    found = torch.cat([random_bits(adamw._advance(own, first), 4) for first in range(0, len(expected), 4)])
    assert torch.equal(found, expected)


# ---------------------------------------------------------------------------------------------------------------
# The optimizer


def small_model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 70), nn.Linear(70, 1)).to(dtype)


def own_adamw(model: nn.Module, state_dtype: torch.dtype, stochastic: bool = True) -> RoundingAdamW:
    names = {id(p): name for name, p in model.named_parameters()}
    groups = [{"params": list(model.parameters()), "weight_decay": 0.1}]
    return RoundingAdamW(groups, names, 0, 1e-2, (0.9, 0.999), 1e-8, state_dtype, stochastic)


def draw_gradients(model: nn.Module, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def test_without_rounding_it_equals_torchs_adamw() -> None:
    ours, theirs = small_model(torch.float32), small_model(torch.float32)
    parts = own_adamw(ours, torch.float32), torch.optim.AdamW(theirs.parameters(), 1e-2, (0.9, 0.999), weight_decay=0.1)
    for number in range(20):
        for model, part in zip((ours, theirs), parts, strict=True):
            draw_gradients(model, number)
            part.step()
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (own - other).abs().max() < 2e-7


def test_step_is_skipped_like_in_torchs_fused_optimizers() -> None:
    """A skipped step does not count: the next one uses the bits that it would have used."""
    results = []
    for bad in (False, True):
        model = small_model(torch.bfloat16)
        part = own_adamw(model, torch.bfloat16)
        for number in range(4):
            if bad:
                draw_gradients(model, 99)
                for p in model.parameters():
                    p.grad[0] = torch.nan  # type: ignore[index]
                part.found_inf = torch.ones(())  # type: ignore[attr-defined]
                part.step()
            part.found_inf = torch.zeros(())  # type: ignore[attr-defined]
            draw_gradients(model, number)
            part.step()
        results.append([*model.parameters(), *(s["exp_avg_sq"] for s in part.state.values())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_mean_of_many_updates_equals_float32() -> None:
    """A constant gradient moves each weight by 1e-5 per step, 1/400 of the distance between bfloat16 numbers near 1."""
    found = {}
    for dtype, stochastic in ((torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False)):
        model = nn.Linear(100, 100, bias=False)
        nn.init.ones_(model.weight)
        model.to(dtype)
        part = RoundingAdamW(
            list(model.parameters()), {id(model.weight): "w"}, 0, 1e-5, (0.9, 0.999), 1e-8, dtype, stochastic
        )
        for _ in range(200):
            model.weight.grad = torch.ones_like(model.weight)
            part.step()
        found[dtype, stochastic] = 1 - model.weight.double().mean().item()
    # Below 1 a float32 is 6e-8 from the next, so that each of its steps of 1e-5 is off by up to 3e-3.
    assert found[torch.float32, True] == pytest.approx(2e-3, rel=3e-3)
    # Each of the 10,000 weights is at 1 or 1/256 below: the standard error of their mean is 1 % of 2e-3.
    assert found[torch.bfloat16, True] == pytest.approx(2e-3, rel=0.05)
    assert found[torch.bfloat16, False] == 0


def shards(device: str) -> list[torch.Tensor]:
    """Return a parameter, a gradient and two moments: bfloat16, more than a piece of them."""
    generator = torch.Generator().manual_seed(0)
    p, g, m = (torch.randn(2**16 + 70, generator=generator) for _ in range(3))
    return [tensor.to(device, torch.bfloat16) for tensor in (p, g, 0.1 * m, 0.1 * m.square())]


def update_both_ways(device: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the result of a step on the same shards, in pieces on the CPU, and compiled on `device`."""
    group = {"lr": 1e-2, "betas": (0.9, 0.999), "weight_decay": 0.1, "eps": 1e-8}
    place = torch.tensor((7, 5, 0, 0), dtype=torch.int32)
    plain, compiled = shards("cpu"), shards(device)
    steps = torch.tensor([3.0])
    _update_by_pieces(plain, _step_scalars(group, steps, None)[0], place, True)
    _compiled_update()(compiled, _step_scalars(group, steps.to(device), None)[0], place.to(device), True)
    return plain[:1] + plain[2:], [tensor.cpu() for tensor in compiled[:1] + compiled[2:]]


@pytest.mark.campaign
def test_compiled_rounding_is_the_same_on_a_cpu() -> None:
    for plain, compiled in zip(*update_both_ways("cpu"), strict=True):
        assert (plain != compiled).double().mean() < 1e-3  # measured 0; a fused multiply-add may tip the balance


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_compiled_rounding_is_the_same_on_a_gpu() -> None:
    for plain, compiled in zip(*update_both_ways("cuda"), strict=True):
        assert (plain != compiled).double().mean() < 1e-3


# ---------------------------------------------------------------------------------------------------------------
# On meshes

ALL_BFLOAT16 = ["train.weights_dtype=bfloat16", "fsdp.param_dtype=bfloat16", "optim.state_dtype=bfloat16"]
MESHES: dict[int, list[list[str]]] = {
    1: [[]],
    3: [["train.global_batch_size=6"]],
}


def small_config(folder: Path, *overrides: str) -> RunConfig:
    given = {override.partition("=")[0] for override in overrides}
    own = ["data.source=synthetic", "run.threads=1", "model.vocab_size=263"]
    own = tiny(*(item for item in own if item.partition("=")[0] not in given), *overrides)
    return load_config("llama_small", [*own, f"run.dir={folder}"])


def step_with_equal_gradients(folder: Path, meshes: list[list[str]]) -> list[tuple[list[torch.Tensor], bool]]:
    """Make five steps with seeded random gradients on each mesh; return all full weights."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    found = []
    for number, mesh in enumerate(meshes):
        trainer = Trainer(small_config(folder / str(number), *ALL_BFLOAT16, "optim.lr=0.01", *mesh))
        for update in range(5):
            generator = torch.Generator().manual_seed(update)
            for p in trainer.model.parameters():
                gradient = torch.randn(p.shape, generator=generator).to(torch.bfloat16)
                if isinstance(p, DTensor):
                    gradient = distribute_tensor(gradient, p.device_mesh, p.placements, src_data_rank=None)
                p.grad = gradient
            trainer.optimizer.step()
        part = trainer.optimizer.parts[0]
        moments = [state["exp_avg_sq"] for state in part.state.values()]
        tensors = [full(t).detach().clone() for t in (*trainer.model.parameters(), *moments)]
        found.append(tensors)
        trainer.close()
    return found  # type: ignore[return-value]


@pytest.mark.slow
def test_equal_gradients_give_equal_weights_on_every_mesh(tmp_path: Path) -> None:
    """Bit for bit; an odd vocabulary gives uneven shards."""
    ((expected,),) = on_ranks(1, step_with_equal_gradients, tmp_path / "1", MESHES[1])
    assert {tensor.dtype for tensor in expected} == {torch.bfloat16}
    for ranks in (3,):
        for every_mesh in on_ranks(ranks, step_with_equal_gradients, tmp_path / str(ranks), MESHES[ranks]):
            for mesh, found in zip(MESHES[ranks], every_mesh, strict=True):
                assert [torch.equal(a, b) for a, b in zip(found, expected, strict=True)].count(False) == 0, mesh


def train(config: RunConfig, save_at: int | None = None) -> dict[str, Any]:
    """Train to the end, or to `save_at`; return losses and this rank's shards, and save."""
    trainer = Trainer(config)
    losses, norms = [], []
    try:
        for record in trainer.steps():
            losses.append(record.loss)
            norms.append(record.grad_norm)
            if record.step == save_at:
                break
        path = trainer.save_checkpoint(wait=True)
        shards = [local(p).detach().clone() for p in trainer.model.parameters()]
    finally:
        trainer.close()
    return {"losses": losses, "norms": norms, "shards": shards, "path": str(path)}


# ---------------------------------------------------------------------------------------------------------------
# What is kept


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of 4 steps, all in bfloat16."""
    folder = tmp_path_factory.mktemp("run") / "run"
    train(small_config(folder, *ALL_BFLOAT16, "train.steps=4"))
    return folder


def test_checkpoints_and_exports_keep_the_dtype(trained: Path, tmp_path: Path) -> None:
    stored = load_tensors(trained / "checkpoints" / "step_00000004")
    kept = {name: tensor for name, tensor in stored.items() if re.match(r"/model/|/optimizer/state/.*/exp_avg", name)}
    assert len(kept) == 3 * sum(name.startswith("/model/") for name in kept)
    assert {tensor.dtype for tensor in kept.values()} == {torch.bfloat16}
    export_checkpoint(trained, tmp_path / "folder")
    with safe_open(tmp_path / "folder" / "model.safetensors", "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118
    assert "bfloat16" in json.dumps(json.loads((tmp_path / "folder" / "config.json").read_text()))
    export_checkpoint(trained, tmp_path / "plain.pt")
    plain = torch.load(tmp_path / "plain.pt")
    assert torch.equal(plain["layers.0.attention.wq.weight"], stored["/model/layers.0.attention.wq.weight"])
    assert {tensor.dtype for tensor in plain.values()} == {torch.bfloat16}


def test_initial_weights_are_rounded_float32_weights(tmp_path: Path) -> None:
    fine, coarse = (Trainer(small_config(tmp_path / str(n), *own)) for n, own in enumerate(([], ALL_BFLOAT16)))
    for one, other in zip(fine.model.parameters(), coarse.model.parameters(), strict=True):
        assert torch.equal(local(one).to(torch.bfloat16), local(other))
    fine.close()
    coarse.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"), [("bfloat16", "float32"), pytest.param("float32", "bfloat16", marks=pytest.mark.campaign)]
)
def test_dtype_of_moments_may_change_if_allowed(before: str, after: str, tmp_path: Path) -> None:
    train(small_config(tmp_path, f"optim.state_dtype={before}", "train.steps=4"), save_at=2)
    changed = [f"optim.state_dtype={after}", "train.steps=4"]
    with pytest.raises(UserError, match=r"optim\.state_dtype"):
        train(small_config(tmp_path, *changed))
    trainer = Trainer(small_config(tmp_path, *changed, "checkpoint.allow_changes=[optim.state_dtype]"))
    assert [record.step for record in trainer.steps()] == [3, 4]
    states = [state for part in trainer.optimizer.parts for state in part.state.values()]
    assert {value.dtype for state in states for k, value in state.items() if k != "step"} == {getattr(torch, after)}
    trainer.close()


@pytest.mark.slow
def test_init_from_accepts_weights_of_a_different_dtype(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train\.weights_dtype"):
        train(small_config(tmp_path / "a", f"checkpoint.resume={trained}"))
    found = train(small_config(tmp_path / "b", f"train.init_from={trained}", "train.steps=1"))
    assert {shard.dtype for shard in found["shards"]} == {torch.float32}


# ---------------------------------------------------------------------------------------------------------------
# Rules, and plans


@pytest.mark.parametrize("name", ["sgd", "muon"])
@pytest.mark.parametrize("key", ["train.weights_dtype", "optim.state_dtype"])
def test_optimizers_without_bfloat16_state_are_rejected(name: str, key: str, tmp_path: Path) -> None:
    config = small_config(tmp_path, f"optim.name={name}", f"{key}=bfloat16")
    with pytest.raises(UserError, match=rf"^{key}=bfloat16: "):
        check_config(config, 1, 1)


def test_torchs_adamw_is_used_if_nothing_is_rounded() -> None:
    (part,) = build_optimizer(small_model(torch.float32), OptimSection()).parts
    assert type(part) is FusedAdamW
    for dtype, state_dtype in ((torch.bfloat16, "float32"), (torch.float32, "bfloat16")):
        (part,) = build_optimizer(small_model(dtype), OptimSection(state_dtype=state_dtype)).parts  # type: ignore[arg-type]
        assert type(part) is RoundingAdamW
