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

from tests.helpers.launch import on_ranks, run
from tests.helpers.tiny import tiny_config
from trainer import Trainer
from trainer.errors import TrainingFailed
from trainer.model.gradients import gradient_sync, replicate

REPLICATED = ("mesh.shard=1", "mesh.replicate=-1")


class Branches(nn.Module):
    """A batch goes through the `taken` ones of three branches, whose gradients are too large for one message."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(3, 300_000) for _ in range(3)])

    def forward(self, x: torch.Tensor, taken: Sequence[int]) -> torch.Tensor:
        return sum((self.branches[number](x).square().sum() for number in taken), torch.zeros(()))


def gradients_of(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def apart_from_the_mean(taken: list[list[int]], seed: int) -> tuple[list[bool], float]:
    """Return which parameters get gradients, and how far they are, in relation, from the means over ranks that one
    model finds by itself; of two micro-batches, the first of which is only added up.
    """
    rank, size = dist.get_rank(), dist.get_world_size()

    def batches(rank: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(10 * seed + rank)
        return [torch.randn(4, 3, generator=generator) for _ in range(2)]

    torch.manual_seed(seed)
    ours = Branches()
    plain = copy.deepcopy(ours)
    replicate(ours, [], init_device_mesh("cpu", (size, 1), mesh_dim_names=("replicate", "shard")))
    for number, batch in enumerate(batches(rank)):
        with gradient_sync(ours, enabled=number == 1):
            ours(batch, taken[rank] if number else [0]).backward()
    for each in range(size):
        for number, batch in enumerate(batches(each)):
            (plain(batch, taken[each] if number else [0]) / size).backward()
    has_gradient, apart = [], [0.0]
    for own, right in zip(gradients_of(ours), gradients_of(plain), strict=True):
        assert (own is None) == (right is None)
        has_gradient.append(own is not None)
        if own is not None and right is not None:
            apart.append(float((own - right).norm() / right.norm()))
    return has_gradient, max(apart)


def small_replica() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    replicate(model, [], init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    return model


def nested_passes() -> None:
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
    for own, expected in zip(gradients_of(model), gradients_of(plain), strict=True):
        assert own is not None
        assert expected is not None
        torch.testing.assert_close(own, expected / 2, rtol=1e-6, atol=1e-7)


def a_failed_pass() -> None:
    """Fail in the middle of a backward pass on both ranks; the next one must say so, unless it begins anew."""
    model, x = small_replica(), torch.randn(2, 3)

    def fail(gradient: torch.Tensor) -> None:
        raise ValueError("in the middle")

    hidden = model[0](x)  # type: ignore[index]
    hidden.register_hook(fail)
    with pytest.raises(ValueError, match="in the middle"):
        model[1](hidden).sum().backward()  # type: ignore[index]
    with pytest.raises(RuntimeError):
        model(x).sum().backward()
    model.zero_grad()
    with gradient_sync(model, enabled=True):
        model(x).sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def all_passes(cases: list[list[list[int]]]) -> list[Any]:
    dist.init_process_group("gloo")
    nested_passes()
    a_failed_pass()
    return [apart_from_the_mean(taken, seed) for seed, taken in enumerate(cases)]


@pytest.mark.slow
def test_gradients_are_means_also_if_a_rank_has_none() -> None:
    """A parameter has a gradient if any rank has one, and no gradient if none has; also in a backward pass inside
    another. A pass that failed leaves no gradient unaveraged.
    """
    cases = [[[0, 1, 2], [0, 1, 2]], [[1], [2]], [[2], [2]], [[0], [1, 2]]]
    for found in on_ranks(2, all_passes, cases):
        for taken, (has_gradient, apart) in zip(cases, found, strict=True):
            used = {0, *taken[0], *taken[1]}
            assert has_gradient == [number in used for number in range(3) for _ in range(2)]
            assert apart < 1e-6


class OwnStep(Trainer):
    """Has a custom training step that ignores when gradients are reduced."""

    def train_step(self, micro_batches: Any) -> Any:
        update = super().train_step(micro_batches)
        self.loss(micro_batches[0]).backward()
        self.seen = gradients_of(self.model)
        self.optimizer.zero_grad()
        return update


class Unfrozen(Trainer):
    """Trains parameters that were frozen when gradient averaging was set up."""

    def build_model(self, config: Any = None) -> nn.Module:
        model = super().build_model(config)
        model.tok_embeddings.requires_grad_(True)  # type: ignore[union-attr]
        return model


def own_step(folder: Path) -> Any:
    trainer = OwnStep(tiny_config(folder, *REPLICATED, "train.steps=2"))
    assert not any(isinstance(part, FSDPModule) for part in trainer.model.modules())
    assert not any(isinstance(p, DTensor) for p in trainer.model.parameters())
    assert len(list(trainer.steps())) == 2
    gone, seen = ref(trainer.model), trainer.seen
    trainer.close()
    del trainer
    gc.collect()
    assert gone() is None
    return seen


def start_unfrozen(folder: Path) -> str:
    trainer = Unfrozen(tiny_config(folder, *REPLICATED, "train.freeze=[tok_embeddings]"))
    with pytest.raises(TrainingFailed) as raised:
        trainer.start()
    return str(raised.value)


@pytest.mark.campaign
def test_custom_steps_get_averaged_gradients(tmp_path: Path) -> None:
    """The model is freed afterwards."""
    one, other = on_ranks(2, own_step, tmp_path / "run")
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True)), "the ranks read different batches"


@pytest.mark.slow
def test_gradients_that_are_not_averaged_are_detected_at_the_start(tmp_path: Path) -> None:
    for message in on_ranks(2, start_unfrozen, tmp_path / "run"):
        assert "tok_embeddings.weight" in message


FSDP = "fsdp.cpu_offload=true"
"""Has FSDP shard on any mesh, and on a CPU changes nothing else."""


@pytest.mark.campaign
def test_replicas_share_the_writing_of_a_checkpoint(tmp_path: Path) -> None:
    """Each rank writes about half of it."""
    run(tmp_path / "run", "nproc=2", *REPLICATED, "train.ema=0.9", "checkpoint.every=2", "train.steps=2")
    files = sorted((tmp_path / "run" / "checkpoints" / "step_00000002").glob("*.distcp"))
    sizes = [file.stat().st_size for file in files]
    assert len(sizes) == 2
    assert max(sizes) < 2 * min(sizes)


BFLOAT16 = ["train.weights_dtype=bfloat16", "fsdp.param_dtype=bfloat16", "fsdp.reduce_dtype=bfloat16"]


@pytest.mark.campaign
@pytest.mark.slow
@pytest.mark.parametrize("own", [[*BFLOAT16, "optim.state_dtype=bfloat16"], ["optim.name=muon"], ["lora.rank=4"]])
def test_replicas_train_like_fsdps_replicas(own: list[str], tmp_path: Path) -> None:
    """Bit for bit. One rank is no reference here: rounding to bfloat16 amplifies a different order of summation."""
    common = ["nproc=2", *REPLICATED, "data.source=synthetic", "train.steps=6", *own]
    replicas, sharded = run(tmp_path / "replicas", *common), run(tmp_path / "fsdp", *common, FSDP)
    assert replicas.train("loss") == sharded.train("loss")
