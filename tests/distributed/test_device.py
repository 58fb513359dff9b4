"""Which GPU each rank uses, and that each rank of a node with too few GPUs fails."""

from __future__ import annotations

import pytest

from trainer import UserError
from trainer.distributed.environment import Environment
from trainer.distributed.world import choose_gpu

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
    with pytest.raises(UserError, match=rf"^nproc={local_ranks}: .*\b{num_gpus} GPU"):
        choose_gpu("auto", env, num_gpus, variables)


def test_missing_gpu() -> None:
    with pytest.raises(UserError, match=r"^run\.device=cuda: "):
        choose_gpu("cuda", Environment(), 0, {})
