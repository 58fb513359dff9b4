"""The self-check before the first step: every kind of error is found and named, on all ranks alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tests.helpers.launch import on_ranks, run, tiny
from trainer import RunConfig, Trainer, TrainLoader, load_config
from trainer.config.parallel import MeshShape
from trainer.model.parameters import local

ON_2_X_2 = ["mesh.replicate=2", "mesh.shard=2"]


def config_of(folder: Path, *overrides: str) -> RunConfig:
    small = ["data.source=synthetic", "model.vocab_size=263", "train.steps=2", "train.micro_batch_size=2"]
    return load_config("llama_small", tiny(*small, f"run.dir={folder}", *overrides))


class OtherReplica(Trainer):
    """One element of one weight differs on rank 2."""

    def build_model(self, config: RunConfig | None = None) -> nn.Module:
        model = super().build_model(config)
        if self.world.rank == 2:
            with torch.no_grad():
                local(model.get_parameter("layers.1.feed_forward.w2.weight")).view(-1)[-1] += 1e-6
        return model


class LeftOut(Trainer):
    """A parameter that is registered after FSDP has wrapped the model."""

    def build_model(self, config: RunConfig | None = None) -> nn.Module:
        model = super().build_model(config)
        model.register_parameter("temperature", nn.Parameter(torch.ones(3)))
        return model


class LeftOutOnPurpose(LeftOut):
    def exempt_from_selfcheck(self) -> list[str]:
        return ["temper*"]


class Frozen(LeftOut):
    """As with low-rank adapters: most parameters are frozen, and some of those are unsharded on every rank."""

    def build_model(self, config: RunConfig | None = None) -> nn.Module:
        model = super().build_model(config)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("feed_forward" in name)
        return model


class FrozenOtherwise(Frozen):
    def build_model(self, config: RunConfig | None = None) -> nn.Module:
        model = super().build_model(config)
        with torch.no_grad():
            model.get_parameter("temperature")[2] += self.world.rank == 3
        return model


class OnAnotherMesh(Trainer):
    """The model is sharded over all ranks, not over pairs of them."""

    def build_model(self, config: RunConfig | None = None) -> nn.Module:
        mesh, self.mesh = self.mesh, self.world.build_mesh(MeshShape(1, self.world.size))
        model = super().build_model(config)
        self.mesh = mesh
        return model


class OtherRanks(Trainer):
    """Ranks 2 and 3 have a mesh in which they have changed places."""

    def build_mesh(self) -> DeviceMesh:
        mesh = super().build_mesh()
        if self.world.rank < 2:
            return mesh
        groups, names = mesh.get_all_groups(), mesh.mesh_dim_names
        return DeviceMesh.from_group(groups, "cpu", mesh=[[0, 1], [3, 2]], mesh_dim_names=names)


class ShortShard(Trainer):
    """Rank 1 holds one row less of a parameter than it should."""

    def build_model(self, config: RunConfig | None = None) -> nn.Module:
        model = super().build_model(config)
        owner = model.get_submodule("layers.1.feed_forward.w2")
        if self.world.rank == 1:
            whole: Any = owner.weight
            short = DTensor.from_local(
                whole.to_local()[1:], whole.device_mesh, whole.placements, shape=whole.shape, stride=whole.stride()
            )
            owner.weight = nn.Parameter(short)
        return model


class Untied(Trainer):
    """On rank 1 the head has a separate parameter again."""

    def build_model(self, config: RunConfig | None = None) -> nn.Module:
        model = super().build_model(config)
        if self.world.rank == 1:
            model.head.output.weight = nn.Parameter(model.head.output.weight.detach().clone())  # type: ignore[union-attr]
        return model


class FrozenOnOne(Trainer):
    def build_model(self, config: RunConfig | None = None) -> nn.Module:
        model = super().build_model(config)
        model.get_parameter("head.norm.weight").requires_grad_(self.world.rank != 3)
        return model


class SameData(Trainer):
    """All ranks read the data of the first one."""

    def build_loader(self) -> TrainLoader:
        source = super().build_loader().source  # type: ignore[attr-defined]
        return TrainLoader.from_config(source, self.config, 0, self.world.size, self.world.device)


class OtherOrder(Trainer):
    def build_loader(self) -> TrainLoader:
        source = super().build_loader().source  # type: ignore[attr-defined]
        data = replace(self.config.data, seed=self.config.data.seed + (self.world.rank == 2))
        config = replace(self.config, data=data)
        return TrainLoader.from_config(source, config, self.world.rank, self.world.size, self.world.device)


class SameDataOnPurpose(SameData):
    def exempt_from_selfcheck(self) -> list[str]:
        return ["data"]


class OwnLoader(Trainer):
    def build_loader(self) -> Iterator[Any]:  # type: ignore[override]
        while True:
            yield {"tokens": torch.ones(2, 32, dtype=torch.int64), "targets": torch.ones(2, 32, dtype=torch.int64)}


class CalledBefore(Trainer):
    """Runs the model before training begins, which leaves the root's own parameters gathered."""

    def build_loader(self) -> Any:
        with torch.no_grad():
            self.model(torch.ones(1, 4, dtype=torch.int64))
        return super().build_loader()


class RankTwoOff(Trainer):
    """Rank 2 is started with another seed, and without the self-check."""

    def __init__(self, config: RunConfig) -> None:
        if dist.get_rank() == 2:
            config = replace(config, run=replace(config.run, seed=7, selfcheck=False))
        super().__init__(config)


class OtherThreads(Trainer):
    def __init__(self, config: RunConfig) -> None:
        super().__init__(replace(config, run=replace(config.run, threads=1 + dist.get_rank() % 2)))


Case = tuple[type[Trainer], list[str]]


def outcomes(folder: Path, cases: list[Case]) -> list[str]:
    """Return, for each case, the error that ends it; empty if it trains."""
    dist.init_process_group("gloo")
    found = []
    for number, (kind, overrides) in enumerate(cases):
        try:
            running = kind(config_of(folder / str(number), *overrides))
            next(running.steps())
            running.close()
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
        else:
            found.append("")
    return found


WRONG: dict[str, tuple[Case, list[str]]] = {
    "replica": ((OtherReplica, ON_2_X_2), ["TrainingFailed", "rank 2", "rank 0", "layers.1.feed_forward.w2.weight"]),
    "replica of four": (
        (OtherReplica, ["mesh.replicate=4", "mesh.shard=1"]),
        ["TrainingFailed", "rank 2", "rank 0", "layers.1.feed_forward.w2.weight"],
    ),
    "left out": ((LeftOut, ON_2_X_2), ["TrainingFailed", "ranks 0, 1, 2, 3", "temperature"]),
    "frozen": ((FrozenOtherwise, ON_2_X_2), ["TrainingFailed", "rank 3", "rank 0", "temperature"]),
    "mesh": (
        (OnAnotherMesh, ON_2_X_2),
        ["TrainingFailed", "tok_embeddings.weight", "shard 4", "replicate 2 x shard 2"],
    ),
    "ranks of the mesh": (
        (OtherRanks, ON_2_X_2),
        ["TrainingFailed", "replicate 2 x shard 2", "[[0, 1], [2, 3]] on ranks 0, 1", "[[0, 1], [3, 2]] on ranks 2, 3"],
    ),
    "shape": ((ShortShard, ON_2_X_2), ["TrainingFailed", "rank 1", "layers.1.feed_forward.w2.weight", "shape"]),
    "untied": (
        (Untied, [*ON_2_X_2, "model.tie_embeddings=true"]),
        ["TrainingFailed", "rank 1", "head.output.weight", "tok_embeddings.weight"],
    ),
    "frozen on one": ((FrozenOnOne, ON_2_X_2), ["head.norm.weight", "ranks 0, 1, 2", "rank 3"]),
    "seed": ((RankTwoOff, ON_2_X_2), ["UserError", "run.seed", "0 on ranks 0, 1, 3", "7 on rank 2"]),
    "data": ((SameData, ON_2_X_2), ["TrainingFailed", "rank 1", "rank 2", "rank 3"]),
    "order": ((OtherOrder, []), ["TrainingFailed", "rank 2"]),
}
"""What is wrong, and what the message names."""


EVERYDAY = ["replica", "mesh", "seed", "data"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [EVERYDAY, pytest.param([name for name in WRONG if name not in EVERYDAY], marks=pytest.mark.campaign)],
    ids=["everyday", "others"],
)
def test_error_is_named_on_every_rank(names: list[str], tmp_path: Path) -> None:
    ranks = on_ranks(4, outcomes, tmp_path, [WRONG[name][0] for name in names])
    for name, *found in zip(names, *ranks, strict=True):
        named = WRONG[name][1]
        assert [part for part in named if part not in found[0]] == [], (name, found[0])
        assert "self-check" in found[0]
        assert "run.selfcheck=false" in found[0]
        assert len(set(found)) == 1, (name, found)


RIGHT: list[Case] = [
    (Trainer, []),
    (Trainer, ON_2_X_2),
    (Trainer, ["mesh.replicate=4", "mesh.shard=1"]),
    (Trainer, [*ON_2_X_2, "model.tie_embeddings=true"]),
    (Trainer, [*ON_2_X_2, "fsdp.cpu_offload=true"]),
    (Trainer, [*ON_2_X_2, "fsdp.param_dtype=bfloat16", "fsdp.reshard_after_forward=never", "data.num_workers=1"]),
    (LeftOutOnPurpose, ON_2_X_2),
    (Frozen, ON_2_X_2),
    (SameDataOnPurpose, []),
    (OwnLoader, []),
    (CalledBefore, ON_2_X_2),
    (OtherThreads, []),
    (SameData, ["run.selfcheck=false"]),
]


@pytest.mark.campaign
@pytest.mark.parametrize("cases", [RIGHT[::2], RIGHT[1::2]], ids=["even", "odd"])
def test_correct_run_passes(cases: list[Case], tmp_path: Path) -> None:
    for found in on_ranks(4, outcomes, tmp_path, cases)[:2]:
        for case, outcome in zip(cases, found, strict=True):
            assert outcome == "", (case, outcome)


@pytest.mark.campaign
def test_one_rank_passes(tmp_path: Path) -> None:
    cases: list[Case] = [(kind, []) for kind in (Trainer, LeftOut, Frozen, OwnLoader)]
    assert on_ranks(1, outcomes, tmp_path, cases) == [[""] * 4]


@pytest.mark.slow
def test_a_failed_self_check_ends_the_run_with_1(tmp_path: Path) -> None:
    own = ["recipe=llama_small", "model.name=tests.helpers.custom_recipes:mlp_left_out", "data.source=synthetic"]
    failed = run(tmp_path / "run", *own, "data.seq_len=16", "train.steps=2", "nproc=2", code=1)
    assert failed.err.count("error: self-check: ") == 1, failed.err
    assert "Traceback" not in failed.err
    assert failed.status["state"] == "failed"
    assert "extra" in failed.status["reason"]
    assert not (failed.folder / "metrics.jsonl").exists(), "nothing was begun"
