"""The self-check before the first step: every kind of error is found and named, on all ranks alike."""

from __future__ import annotations

import faulthandler
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.budget import machine_scale
from tests.helpers.ranks import run_command, run_ranks, tiny_overrides
from trainer import RunConfig, Trainer, load_config
from trainer.config import MeshShape
from trainer.data.loader import TrainLoader
from trainer.lifecycle import selfcheck
from trainer.model.parameters import local

ON_2_X_2 = ["mesh.replicate=2", "mesh.shard=2"]


def config_of(folder: Path, *overrides: str) -> RunConfig:
    small = ["data.source=synthetic", "model.vocab_size=263", "train.steps=2", "train.micro_batch_size=2"]
    return load_config("llama_small", tiny_overrides(*small, f"run.dir={folder}", *overrides))


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
        loader = super().build_loader()
        assert isinstance(loader, TrainLoader)
        loader._dp_rank = 0
        return loader


class OtherOrder(Trainer):
    def build_loader(self) -> TrainLoader:
        loader = super().build_loader()
        assert isinstance(loader, TrainLoader)
        loader._seed += self.world.rank == 2
        return loader


class SameDataOnPurpose(SameData):
    def exempt_from_selfcheck(self) -> list[str]:
        return [selfcheck.DATA]


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
    """Return, for each case, the error that ends it, or how long the self-check took."""
    faulthandler.dump_traceback_later(120, exit=True)  # the group is not the Trainer's: nothing ends ranks that wait
    dist.init_process_group("gloo")
    check, found = selfcheck.check_start, []
    seconds = [0.0, 0.0]

    def timed(*args: Any) -> None:
        started = time.perf_counter(), time.process_time()
        check(*args)
        seconds[:] = time.perf_counter() - started[0], time.process_time() - started[1]

    import trainer.trainer

    trainer.trainer.check_start = timed  # type: ignore[attr-defined]
    for number, (kind, overrides) in enumerate(cases):
        try:
            running = kind(config_of(folder / str(number), *overrides))
            records = running.steps()
            next(records)
            running.close()
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
        else:
            found.append(f"passed in {seconds[0]:.3f} s, CPU {seconds[1]:.3f} s")
    return found


WRONG: dict[str, tuple[Case, str]] = {
    "replica": (
        (OtherReplica, ON_2_X_2),
        "TrainingFailed: self-check: rank 2: layers.1.feed_forward.w2.weight differs from its replica on rank 0\n",
    ),
    "replica of four": (
        (OtherReplica, ["mesh.replicate=4", "mesh.shard=1"]),
        "TrainingFailed: self-check: rank 2: layers.1.feed_forward.w2.weight differs from its replica on rank 0\n",
    ),
    "left out": (
        (LeftOut, ON_2_X_2),
        "TrainingFailed: self-check: ranks 0, 1, 2, 3: temperature is not sharded, so its gradient "
        "is not reduced; expected: a DTensor placed (Replicate(), Shard(dim=0)) on replicate 2 x shard 2\n",
    ),
    "frozen": (
        (FrozenOtherwise, ON_2_X_2),
        "TrainingFailed: self-check: rank 3: temperature differs from its replica on rank 0\n",
    ),
    "mesh": (
        (OnAnotherMesh, ON_2_X_2),
        "TrainingFailed: self-check: ranks 0, 1, 2, 3: tok_embeddings.weight is placed (Shard(dim=0),) on shard 4; "
        "expected: a DTensor placed (Replicate(), Shard(dim=0)) on replicate 2 x shard 2\n",
    ),
    "untied": (
        (Untied, [*ON_2_X_2, "model.tie_embeddings=true"]),
        "TrainingFailed: self-check: rank 1: head.output.weight is a separate parameter; expected: tied to "
        "tok_embeddings.weight, as the model was built\n",
    ),
    "frozen on one": (
        (FrozenOnOne, ON_2_X_2),
        "head.norm.weight is torch.float32 (32,), trainable, sharded on dim 0 over replicate 2 x shard 2 on ranks "
        "0, 1, 2; torch.float32 (32,), frozen, sharded on dim 0 over replicate 2 x shard 2 on rank 3",
    ),
    "seed": (
        (RankTwoOff, ON_2_X_2),
        "UserError: self-check: the ranks were started differently\n  run.seed: 0 on ranks 0, 1, 3; 7 on rank 2\n",
    ),
    "data": ((SameData, ON_2_X_2), "for the next step, which overlap with those of rank 0; expected: ["),
    "order": ((OtherOrder, []), "rank 2: reads from position 0 of an order of"),
}


@pytest.mark.slow
def test_error_is_named_on_every_rank(tmp_path: Path) -> None:
    ranks = run_ranks(4, outcomes, tmp_path, [case for case, _ in WRONG.values()])
    for (name, (_, expected)), *found in zip(WRONG.items(), *ranks, strict=True):
        assert expected in found[0], (name, found[0])
        assert len(set(found)) == 1, (name, found)
        assert "run.selfcheck=false" in found[0]
    data = ranks[0][list(WRONG).index("data")]
    assert "rank 0" not in data.partition("\n")[0].partition(":")[2].partition(":")[0], "its own part is right"
    assert all(f"rank {rank}: reads samples" in data for rank in (1, 2, 3)), data


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
    for found in run_ranks(4, outcomes, tmp_path, cases)[:2]:
        for case, outcome in zip(cases, found, strict=True):
            assert outcome.startswith("passed"), (case, outcome)


@pytest.mark.campaign
def test_one_rank_passes(tmp_path: Path) -> None:
    cases: list[Case] = [(kind, []) for kind in (Trainer, LeftOut, Frozen, OwnLoader)]
    assert all(outcome.startswith("passed") for outcome in run_ranks(1, outcomes, tmp_path, cases)[0])


@pytest.mark.campaign
def test_a_resumed_run_passes(tmp_path: Path) -> None:
    """On a different mesh, with restored state, in the middle of the data."""

    for mesh, steps in ((["nproc=2"], 2), (["nproc=2", "mesh.replicate=2"], 4), ([], 6)):
        overrides = tiny_overrides("data.source=synthetic", f"train.steps={steps}", *mesh)
        ran = run_command(tmp_path, "recipe=llama_small", *overrides)
        assert ran.exit_code == 0, ran.stderr
    assert ran.train("step") == [1, 2, 3, 4, 5, 6]


@pytest.mark.campaign
def test_self_check_takes_less_than_two_seconds(tmp_path: Path) -> None:
    """With 11 M parameters, each on two of four ranks. CPU time is measured, because the cores are shared."""
    size = ["model.dim=384", "model.num_heads=6", "model.num_kv_heads=6", "model.num_layers=6", "model.ffn_dim=1024"]
    found = run_ranks(4, outcomes, tmp_path, [(Trainer, [*ON_2_X_2, *size, "run.threads=1"])])
    print(*found)
    assert max(float(outcome.split()[-2]) for (outcome,) in found) < 2 * machine_scale(), "of the CPU's time"


@pytest.mark.slow
def test_a_failed_self_check_ends_the_run_with_1(tmp_path: Path) -> None:
    overrides = ["data.source=synthetic", "data.seq_len=16", "train.steps=2", "nproc=2"]
    ran = run_command(
        tmp_path / "run", "recipe=llama_small", "model.name=tests.helpers.custom_recipes:mlp_left_out", *overrides
    )
    assert ran.exit_code == 1
    assert ran.stderr.count("error: self-check: ranks 0, 1: extra is not sharded") == 1, ran.stderr
    assert "Traceback" not in ran.stderr
    assert ran.status["state"] == "failed"
    assert "extra is not sharded" in ran.status["reason"]
    assert not (ran.folder / "metrics.jsonl").exists(), "nothing was begun"


def test_checksum_detects_any_flipped_bit_and_swapped_blocks() -> None:
    """A flipped bit anywhere, and two blocks that were swapped."""

    def checksum(tensor: torch.Tensor) -> int:
        return selfcheck._checksum(selfcheck._Piece("x", "", tensor, ((0, 1), (0, 1)), (1, 1), copies=2))

    for dtype, size in ((torch.float32, 3 * 8192 + 5), (torch.bfloat16, 8192 * 4 + 3), (torch.uint8, 5)):
        data = torch.arange(size).to(dtype)
        before, seen = checksum(data), set()
        for place in (0, size // 2, size - 1):
            changed = data.clone()
            changed.view(torch.uint8).view(-1)[place * data.element_size()] ^= 1
            seen.add(checksum(changed))
        assert len({before, *seen}) == 4
    moved = torch.arange(3 * 8192).view(3, -1)[[1, 0, 2]].flatten()
    assert checksum(moved) != checksum(torch.arange(3 * 8192))
    assert checksum(data[1:]) == checksum(data[1:].clone()), "also where it does not begin at a word"
    assert checksum(torch.empty(0)) == checksum(torch.tensor([]))


@pytest.mark.parametrize("total", [4, 5, 6])
def test_checksum_of_pieces_equals_that_of_the_whole(total: int) -> None:
    import numpy as np

    one = ((0, 1), (0, 1))
    piece = selfcheck._Piece("w", "", torch.empty(0), one, (total, 1), copies=1)
    table = np.array([[[0, 3, 0, 1, 0]], [[2, 5, 0, 1, 0]], [[0, 0, 0, 1, 0]]])
    lines = list(selfcheck._compare_pieces([piece], table))
    assert lines[0] == "rank 1: the pieces of w overlap: rows 2 to 4 here; expected: from row 3 on"
    assert (len(lines) == 1) == (total == 5)
    halves = np.array([[[0, 3, 0, 1, 0]], [[0, 3, 0, 1, 0]]])
    twice = list(selfcheck._compare_pieces([replace(piece, totals=(3, 1))], halves))
    assert twice == ["ranks 0, 1: rows 0 to 2 of w are on 2 ranks; expected: 1"]
    square = replace(piece, totals=(4, 4))
    quarters = [[0, 2, 0, 2, 0], [0, 2, 2, 4, 0], [2, 4, 0, 2, 0], [2, 4, 2, 4, 0]]
    assert not list(selfcheck._compare_pieces([square], np.array(quarters)[:, None]))
    quarters[3] = [2, 4, 3, 4, 0]
    (line,) = selfcheck._compare_pieces([square], np.array(quarters)[:, None])
    assert line == "rank 3: the pieces of w leave a gap: columns 3 to 3 of rows 2 to 3 here; expected: from column 2 on"
