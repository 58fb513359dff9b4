"""Replicas: each rank has the full model, and gradients are averaged during the backward pass."""

from __future__ import annotations

import copy
import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import trainer.model.gradients as module
from tests.helpers.launch import TINY, on_ranks, start
from tests.helpers.tiny import tiny_config
from trainer import Trainer
from trainer.errors import TrainingFailed
from trainer.model.gradients import (
    gradient_sync,
    replicate,
)

REPLICATED = ("mesh.shard=1", "mesh.replicate=-1")


class Branches(nn.Module):
    """A batch goes through the `taken` ones of three branches."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)])

    def forward(self, x: torch.Tensor, taken: Sequence[int]) -> torch.Tensor:
        return sum((self.branches[number](x).square().sum() for number in taken), torch.zeros(()))


def gradients_of(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def both_ways(taken: list[list[int]], seed: int) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
    """Return the gradients that replicas come to, and the means that one model finds by itself; of two micro-batches,
    the first of which is only added up.
    """
    rank, size = dist.get_rank(), dist.get_world_size()

    def model_of(seed: int) -> Branches:
        torch.manual_seed(seed)
        return Branches()

    def batches(rank: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(10 * seed + rank)
        return [torch.randn(4, 3, generator=generator) for _ in range(2)]

    ours, plain = model_of(seed), model_of(seed)
    replicate(ours, [], init_device_mesh("cpu", (size, 1), mesh_dim_names=("replicate", "shard")))
    for number, batch in enumerate(batches(rank)):
        with gradient_sync(ours, enabled=number == 1):
            ours(batch, taken[rank] if number else [0]).backward()
    for each in range(size):
        for number, batch in enumerate(batches(each)):
            (plain(batch, taken[each] if number else [0]) / size).backward()
    return gradients_of(ours), gradients_of(plain)


def average_of_branches(cases: list[list[list[int]]], first_bucket: int) -> list[Any]:
    dist.init_process_group("gloo")
    module.FIRST_BUCKET_BYTES = module.BUCKET_BYTES = first_bucket
    return [both_ways(taken, seed) for seed, taken in enumerate(cases)]


@pytest.mark.slow
@pytest.mark.parametrize("first_bucket", [1, pytest.param(2**20, marks=pytest.mark.campaign)])
def test_gradients_are_means_also_if_a_rank_has_none(first_bucket: int) -> None:
    """A parameter has a gradient if any rank has one, and no gradient if none has."""
    cases = [[[0, 1, 2], [0, 1, 2]], [[1], [2]], [[2], [2]], [[0], [1, 2]]]
    for found in on_ranks(2, average_of_branches, cases, first_bucket):
        for taken, (ours, plain) in zip(cases, found, strict=True):
            used = {0, *taken[0], *taken[1]}
            assert [g is not None for g in ours] == [number in used for number in range(3) for _ in range(2)]
            for own, expected in zip(ours, plain, strict=True):
                torch.testing.assert_close(own, expected, rtol=1e-6, atol=1e-7)


def small_replica() -> nn.Module:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    replicate(model, [], init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    return model


def through_twice() -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
    """Go through a model twice, under a kind of checkpointing that has a backward pass inside the backward pass."""
    model = small_replica()
    plain = copy.deepcopy(model)
    torch.manual_seed(1)
    xs = [torch.randn(2, 3, requires_grad=True) for _ in range(2)]

    def backward(model: nn.Module, x: torch.Tensor) -> None:
        for _ in range(2):
            x = checkpoint(model, x, use_reentrant=True)
        x.sum().backward()

    backward(model, xs[dist.get_rank()])
    for x in xs:
        backward(plain, x)
    return gradients_of(model), [None if p.grad is None else p.grad / 2 for p in plain.parameters()]


@pytest.mark.slow
def test_nested_backward_pass_averages_gradients() -> None:
    for ours, expected in on_ranks(2, through_twice):
        for own, other in zip(ours, expected, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-7)


def after_an_error() -> tuple[str, bool]:
    """Fail in the middle of a backward pass on both ranks, then do the next pass: unprepared, and inside
    `gradient_sync`.
    """
    model = small_replica()
    x = torch.randn(2, 3)

    def fail(gradient: torch.Tensor) -> None:
        raise ValueError("in the middle")

    hidden = model[0](x)
    hidden.register_hook(fail)
    with pytest.raises(ValueError, match="in the middle"):
        model[1](hidden).sum().backward()
    message = ""
    try:
        model(x).sum().backward()
    except RuntimeError as error:
        message = str(error)
    model.zero_grad()
    with gradient_sync(model, enabled=True):
        model(x).sum().backward()
    return message, all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@pytest.mark.slow
def test_failed_pass_leaves_no_gradient_unaveraged() -> None:
    for message, is_fine in on_ranks(2, after_an_error):
        assert "the previous backward pass did not finish" in message
        assert is_fine


class OwnStep(Trainer):
    """Has a custom training step that ignores when gradients are reduced."""

    def train_step(self, micro_batches: Any) -> Any:
        update = super().train_step(micro_batches)
        batch = micro_batches[0]
        self.loss(batch).backward()
        self.seen = [p.grad.clone() for p in self.model.parameters() if p.grad is not None]
        self.optimizer.zero_grad()
        return update


def own_step(folder: Path) -> Any:
    trainer = OwnStep(tiny_config(folder, *REPLICATED, "train.steps=2"))
    assert not any(isinstance(part, FSDPModule) for part in trainer.model.modules())
    assert not any(isinstance(p, DTensor) for p in trainer.model.parameters())
    records = [record["loss"] for record in trainer.steps()]
    gone = ref(trainer.model)
    seen = trainer.seen
    trainer.close()
    del trainer
    gc.collect()
    return records, seen, gone() is None


@pytest.mark.slow
def test_custom_step_gets_averaged_gradients_and_the_model_is_freed(tmp_path: Path) -> None:
    (losses, one, is_freed), (_, other, _) = on_ranks(2, own_step, tmp_path / "run")
    assert len(losses) == 2
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True)), "the ranks read different batches"
    assert is_freed


class Unfrozen(Trainer):
    """Trains parameters that were frozen when gradient averaging was set up."""

    def build_model(self, config: Any = None) -> nn.Module:
        model = super().build_model(config)
        model.tok_embeddings.requires_grad_(True)  # type: ignore[union-attr]
        return model


def start_unfrozen(folder: Path) -> str:
    trainer = Unfrozen(tiny_config(folder, *REPLICATED, "train.freeze=[tok_embeddings]"))
    with pytest.raises(TrainingFailed) as raised:
        trainer.start()
    return str(raised.value)


@pytest.mark.slow
def test_gradients_that_are_not_averaged_are_detected_at_the_start(tmp_path: Path) -> None:
    (message, _) = on_ranks(2, start_unfrozen, tmp_path / "run")
    assert "tok_embeddings.weight is not sharded, so its gradient is not reduced" in message


FSDP = "fsdp.cpu_offload=true"
"""Has FSDP shard on any mesh, and on a CPU changes nothing else."""
MESHES = {
    "one": [],
    "one-fsdp": [FSDP],
    "replicas": ["nproc=2", *REPLICATED],
    "replicas-fsdp": ["nproc=2", *REPLICATED, FSDP],
    "shards": ["nproc=2"],
}


def trained(folder: Path, mesh: str, *overrides: str) -> list[float]:
    own = [*TINY, "data.source=synthetic", "train.ema=0.9", "checkpoint.every=2", "train.steps=6"]
    own += ["schedule.name=constant", *overrides]
    ran = start(folder, "recipe=llama_small", *own, *MESHES[mesh]).wait()
    assert ran.code == 0, ran.err
    return [float(loss) for loss in ran.train("loss")]


@pytest.mark.slow
def test_replicas_share_the_writing_of_a_checkpoint(tmp_path: Path) -> None:
    """Each rank writes about half of it."""
    trained(tmp_path / "run", "replicas", "train.steps=2")
    files = sorted((tmp_path / "run" / "checkpoints" / "step_00000002").glob("*.distcp"))
    sizes = [file.stat().st_size for file in files]
    assert len(sizes) == 2
    assert max(sizes) < 2 * min(sizes)
