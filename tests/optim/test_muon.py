"""Muon and NorMuon: their mathematics, which rank owns which matrix, and that the mesh does not change them."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.helpers.launch import tiny
from trainer import Trainer, UserError, load_config
from trainer.model.placement import Division
from trainer.optim.muon import (
    Matrix,
    Muon,
    Ownership,
    assign_owners,
    bucket_matrices,
    orthogonalize,
    split_into_matrices,
    update_scale,
)

SHAPES = [(64, 64), (128, 64), (64, 192), (64, 64), (30, 20), (20, 30)]


def parameters(shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(*shape, generator=generator)) for shape in shapes]


def take_steps(optimizers: Sequence[torch.optim.Optimizer], groups: Sequence[Sequence[nn.Parameter]]) -> None:
    """Do ten steps, each with the same random gradients for every group of parameters."""
    for number in range(10):
        for optimizer, members in zip(optimizers, groups, strict=True):
            generator = torch.Generator().manual_seed(100 + number)
            for parameter in members:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step()


def relative_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).detach().abs().max() / b.detach().abs().max())


# ---------------------------------------------------------------------------------------------------------------
# Mathematics


@pytest.mark.parametrize("scale", ["match_rms_adamw", "jordan"])
def test_one_rank_equals_torchs_muon(scale: str) -> None:
    ours, torchs = parameters(), parameters()
    adjust = {"match_rms_adamw": "match_rms_adamw", "jordan": "original"}[scale]
    take_steps(
        [Muon(ours, lr=0.02, scale=scale), torch.optim.Muon(torchs, lr=0.02, adjust_lr_fn=adjust)], [ours, torchs]
    )
    assert max(map(relative_difference, ours, torchs)) < 1e-6


@pytest.mark.parametrize("shape", [(3, 40, 100), (2, 100, 40), (1, 64, 64)])
def test_singular_values_become_about_one(shape: tuple[int, int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    u, s, v = torch.linalg.svd(torch.randn(shape, generator=generator), full_matrices=False)
    spread = torch.linspace(0.02, 1, s.shape[1]).expand_as(s)
    found = torch.linalg.svdvals(orthogonalize(u @ torch.diag_embed(spread) @ v))
    assert found.min() > 0.65
    assert found.max() < 1.25


def test_batched_matrices_equal_single_ones() -> None:
    batch = torch.randn(7, 48, 80, generator=torch.Generator().manual_seed(0))
    alone = torch.cat([orthogonalize(matrix[None]) for matrix in batch])
    assert relative_difference(orthogonalize(batch), alone) < 1e-6


def test_blocks_of_fused_matrices_and_experts_equal_separate_parameters() -> None:
    fused, stacked = parameters([(96, 32), (5, 24, 16)])
    parts = [nn.Parameter(part.detach().clone()) for part in [*fused.split([64, 16, 16]), *stacked.unbind()]]
    one = Muon([fused, stacked], lr=0.02, blocks={id(fused): (64, 16, 16)})
    many = Muon(parts, lr=0.02)
    for number in range(3):
        generator = torch.Generator().manual_seed(number)
        fused.grad, stacked.grad = (torch.randn(p.shape, generator=generator) for p in (fused, stacked))
        for part, gradient in zip(parts, [*fused.grad.split([64, 16, 16]), *stacked.grad.unbind()], strict=True):
            part.grad = gradient
        one.step()
        many.step()
    torch.testing.assert_close(fused, torch.cat(parts[:3]), rtol=0, atol=0)
    torch.testing.assert_close(stacked, torch.stack(parts[3:]), rtol=0, atol=0)


def test_normuon_equalizes_rows_and_keeps_the_norm() -> None:
    (weight,) = parameters([(40, 60)])
    before = weight.detach().clone()
    optimizer = Muon([weight], lr=0.1, weight_decay=0.0, variant="normuon", dtype=torch.float32)
    weight.grad = torch.randn(40, 60, generator=torch.Generator().manual_seed(0)) * torch.logspace(-2, 0, 40)[:, None]
    optimizer.step()
    change = (weight.detach() - before) / 0.1
    rows = change.norm(dim=1)
    assert rows.max() / rows.min() < 1.001
    expected = update_scale("match_rms_adamw", 40, 60) * math.sqrt(40)
    assert float(change.norm()) == pytest.approx(expected, rel=1e-4)


class FlagOnGPU(torch.Tensor):
    """A scalar in main memory that says that it is on a GPU. The host must not read it, since it would wait for it."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, value: torch.Tensor) -> FlagOnGPU:
        return torch.Tensor._make_subclass(cls, value)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda")

    def __bool__(self) -> bool:
        raise AssertionError("the host waits for the GPU")


@pytest.mark.parametrize("kind", [torch.Tensor, FlagOnGPU])
@pytest.mark.parametrize("variant", ["muon", "normuon"])
def test_non_finite_step_changes_nothing(variant: str, kind: type[torch.Tensor]) -> None:
    weights = parameters()
    optimizer = Muon(weights, lr=0.02, variant=variant)
    take_steps([optimizer], [weights])
    before = [w.detach().clone() for w in weights]
    state = [{k: v.clone() for k, v in optimizer.state[w].items()} for w in weights]
    for weight in weights:
        weight.grad = torch.full_like(weight, math.nan)
    optimizer.found_inf = kind(torch.ones(()))  # type: ignore[attr-defined]
    optimizer.step()
    for weight, old, values in zip(weights, before, state, strict=True):
        assert torch.equal(weight, old)
        assert all(torch.equal(optimizer.state[weight][name], value) for name, value in values.items())


def test_gradients_are_divided_by_their_scale() -> None:
    ours, scaled = parameters(), parameters()
    one, other = Muon(ours, lr=0.02), Muon(scaled, lr=0.02)
    for a, b in zip(ours, scaled, strict=True):
        a.grad = torch.randn(a.shape, generator=torch.Generator().manual_seed(0))
        b.grad = a.grad * 8
    other.grad_scale = torch.tensor(8.0)  # type: ignore[attr-defined]
    one.step()
    other.step()
    assert max(map(relative_difference, ours, scaled)) == 0.0


# ---------------------------------------------------------------------------------------------------------------
# Owners


def llama_matrices(dim: int, ffn: int, layers: int, kv: int) -> list[Matrix]:
    shapes = [(dim, dim), (kv, dim), (kv, dim), (dim, dim), (ffn, dim), (ffn, dim), (dim, ffn)] * layers
    return [matrix for number, shape in enumerate(shapes) for matrix in split_into_matrices(number, shape)]


def busiest_over_mean(matrices: Sequence[Matrix], owners: Sequence[int], ranks: int) -> float:
    load = Counter[int]()
    for matrix, owner in zip(matrices, owners, strict=True):
        load[owner] += matrix.flops
    return max(load.values()) * ranks / sum(load.values())


@pytest.mark.parametrize(("replicate", "shard"), [(1, 8), (8, 8), (1, 64), (2, 4)])
def test_work_is_balanced(replicate: int, shard: int) -> None:
    matrices = llama_matrices(4096, 14336, 32, 1024)
    owners = assign_owners(matrices, lambda matrix, s: matrix.numel // shard, replicate, shard)
    assert busiest_over_mean(matrices, owners, replicate * shard) < 1.1


def test_buckets_are_full_and_have_matrices_of_one_shape() -> None:
    matrices = llama_matrices(64, 128, 3, 32)
    buckets = bucket_matrices(matrices, 3 * 64 * 128)
    assert sorted(i for bucket in buckets for i in bucket) == list(range(len(matrices)))
    for bucket in buckets:
        assert sum(matrices[i].numel for i in bucket) <= 3 * 64 * 128
    shapes = [(matrices[i].rows, matrices[i].columns) for bucket in buckets for i in bucket]
    assert len({a for a, b in itertools.pairwise(shapes) if a != b}) < len(set(shapes))
    assert [len(bucket) for bucket in bucket_matrices(matrices, 1)] == [1] * len(matrices), "too large alone, too"


@pytest.mark.parametrize(("replicate", "shard"), [(1, 4), (2, 4), (4, 2)])
def test_messages_bring_the_ranks_no_more_than_a_bucket(replicate: int, shard: int) -> None:
    """On average over the ranks: as owners of matrices and as holders of pieces."""
    shapes, limit, ranks = [(256, 256)] * 64, 3 * 256 * 256, replicate * shard
    matrices = [matrix for number, shape in enumerate(shapes) for matrix in split_into_matrices(number, shape)]
    ownership = Ownership(shapes, [Division(parts=shard)] * len(shapes), matrices, replicate, shard, limit)
    for buckets in zip(*map(ownership.buckets, range(ranks)), strict=True):
        costs = [bucket.costs() for bucket in buckets]
        assert sum(cost.owned + cost.held for cost in costs) / ranks <= limit


# ---------------------------------------------------------------------------------------------------------------
# Checkpoints


def test_another_variant_needs_a_new_momentum(tmp_path: Path) -> None:
    def settings_of(variant: str) -> list[str]:
        own = ["model.num_layers=1", "train.steps=6", "optim.name=muon", f"optim.muon.variant={variant}"]
        return tiny(*own, f"run.dir={tmp_path}")

    before = Trainer(load_config("llama_small", settings_of("muon")))
    list(itertools.islice(before.steps(), 3))
    before.save_checkpoint(wait=True)
    before.close()
    for allowed in ("", "optim.muon.variant"):
        trainer = Trainer(
            load_config("llama_small", [*settings_of("normuon"), f"checkpoint.allow_changes=[{allowed}]"])
        )
        with pytest.raises(UserError, match=r"optim\.muon\.variant|NorMuon now"):
            trainer.load_checkpoint()
        trainer.close()
    trainer = Trainer(load_config("llama_small", [*settings_of("normuon"), "checkpoint.allow_changes=[optim]"]))
    assert trainer.load_checkpoint() == 3
    assert not trainer.optimizer.parts[0].state
    assert [record.step for record in trainer.steps()] == [4, 5, 6]
    trainer.close()
