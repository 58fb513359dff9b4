"""Which GPU each rank uses, and the message on all ranks if one has none."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore

from trainer import UserError
from trainer.checkpoint.writer import Staging
from trainer.distributed.environment import Environment
from trainer.distributed.world import agree_to_start, choose_gpu, claim_gpu, use_deterministic_kernels

ONE, ALL = {"CUDA_VISIBLE_DEVICES": "3"}, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
UUID = {"CUDA_VISIBLE_DEVICES": "GPU-8a1b,"}


@pytest.mark.parametrize(
    ("wanted", "launcher", "local_rank", "local_ranks", "num_gpus", "variables", "expected"),
    [
        ("auto", "single", 0, 1, 0, {}, None),
        ("auto", "nproc", 1, 2, 0, {}, None),
        ("cpu", "nproc", 1, 2, 8, {}, None),
        ("auto", "single", 0, 1, 1, {}, 0),
        ("auto", "single", 0, 1, 8, {}, 0),
        ("cuda", "nproc", 3, 4, 4, {}, 3),
        ("auto", "torchrun", 1, 2, 4, ALL, 1),
        ("auto", "srun", 2, 4, 4, {}, 2),  # every task sees all
        ("auto", "srun", 2, 4, 1, ONE, 0),  # --gpus-per-task=1
        ("auto", "srun", 0, 1, 1, ONE, 0),
        ("auto", "torchrun", 2, 4, 1, ONE, 0),  # a wrapper that sets it for each rank
        ("auto", "torchrun", 2, 4, 1, UUID, 0),
        ("auto", "joined", 1, 2, 1, ONE, 0),
    ],
)
def test_the_gpu_of_a_rank(
    wanted: str,
    launcher: str,
    local_rank: int,
    local_ranks: int,
    num_gpus: int,
    variables: dict[str, str],
    expected: int | None,
) -> None:
    env = Environment(launcher, local_rank, local_ranks, local_rank, local_ranks)
    assert choose_gpu(wanted, env, num_gpus, variables) == expected


@pytest.mark.parametrize("local_rank", [0, 1])
@pytest.mark.parametrize(
    ("launcher", "local_ranks", "num_gpus", "variables"),
    [
        ("nproc", 2, 1, {}),
        ("nproc", 2, 1, ONE),  # whoever set it has set it for both
        ("nproc", 2, 1, ONE | {"SLURM_PROCID": "0"}),  # inside an allocation
        ("torchrun", 2, 1, {}),
        ("torchrun", 8, 4, ALL),
        ("srun", 4, 2, {}),
    ],
)
def test_every_rank_of_a_node_with_too_few_gpus_fails(
    launcher: str, local_ranks: int, num_gpus: int, variables: dict[str, str], local_rank: int
) -> None:
    env = Environment(launcher, local_rank, local_ranks, local_rank, local_ranks)
    number = "1 GPU," if num_gpus == 1 else f"{num_gpus} GPUs,"
    with pytest.raises(UserError, match=rf"nproc={local_ranks}: this node has {number} .*\n.*run\.device=cpu"):
        choose_gpu("auto", env, num_gpus, variables)


def test_missing_gpu() -> None:
    with pytest.raises(UserError, match=r"run\.device=cuda: torch finds no usable GPU\n.*run\.device=cpu"):
        choose_gpu("cuda", Environment(), 0, {})


def test_error_of_one_rank_is_raised_on_all() -> None:
    """As when the second of two nodes has fewer GPUs than the first: rank 0 prints the message."""
    store, found = HashStore(), {}

    def begin(rank: int) -> None:
        problem = claim_gpu(store, rank, "GPU-1" if rank else "GPU-0", 2)
        try:
            agree_to_start(store, rank, 3, 30.0, problem)
        except UserError as error:
            found[rank] = str(error)

    ranks = [threading.Thread(target=begin, args=(rank,)) for rank in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert sorted(found) == [0, 1, 2]
    assert len({*found.values()}) == 1
    assert "nproc=2: this node has 1 GPU, and each rank needs its own; ranks " in found[0]


def test_deterministic_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    try:
        use_deterministic_kernels()
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")


def test_memory_that_cannot_be_page_locked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It is used without the lock, reported once, and never unlocked."""
    locked: list[int] = []

    def lock(*_: object) -> None:
        raise RuntimeError("out of memory")

    cudart = SimpleNamespace(cudaHostRegister=lock, cudaHostUnregister=locked.append)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr("trainer.checkpoint.writer.torch.zeros", lambda *_, device: None)
    staging = Staging(torch.device("cuda"))
    assert staging._buffer_for({"w": torch.ones(100)}).nbytes >= 400
    assert "cannot be page-locked (out of memory)" in capsys.readouterr().err
    cudart.cudaHostRegister = lambda *_: 0
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    assert staging._buffer_for({"w": torch.ones(200)}).nbytes >= 800
    assert not locked
    staging._unlock()
    assert len(locked) == 1
