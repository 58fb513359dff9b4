"""Which dimension of a parameter is divided, and which part of it each rank holds."""

from __future__ import annotations

import gc
import itertools
from pathlib import Path

import pytest
import torch

from tests.helpers.cases import needs_torch
from tests.helpers.launch import on_ranks
from tests.helpers.plan_truth import fake_model
from trainer import Trainer, UserError, load_config
from trainer.config.parallel import MeshShape, advice_on_shards
from trainer.distributed.world import make_copy_mesh
from trainer.model.parameters import copied_from, division_of, local, local_box, num_copies, record_copies
from trainer.model.placement import Division, choose_copies, choose_dim, divide
from trainer.plan.machine import find_machine
from trainer.plan.plan import make_plan, without_data


@pytest.mark.parametrize(
    ("shape", "parts", "num_dims", "expected"),
    [
        ((128, 768, 2048), 512, 3, 2),  # 768 rows do not divide
        ((128, 2048, 768), 512, 3, 1),
        ((128, 768, 2048), 64, 3, 0),
        ((128, 768, 2048), 96, 3, 1),  # fewer ranks than experts, but a third would be padding
        ((128, 768, 2048), 512, 2, 0),  # rows stay whole: dimension 0 is padded after all
        ((257, 4096), 4, 2, 0),  # 260 rows for 257 are cheaper than a copy
        ((257, 4096), 64, 2, 1),
        ((256, 7168, 2048), 2048, 3, 2),
        ((3, 5), 4, 2, 0),  # nothing divides
        ((64,), 512, 1, 0),
        ((), 4, 0, 0),
        ((0, 8), 4, 2, 0),
    ],
)
def test_the_dimension_that_wastes_least(shape: tuple[int, ...], parts: int, num_dims: int, expected: int) -> None:
    assert choose_dim(shape, parts, num_dims) == expected


@pytest.mark.parametrize(
    ("shape", "parts", "num_dims", "expected"),
    [
        ((128, 768, 2048), 512, 3, 4),
        ((128, 768, 2048), 1024, 3, 1),  # in eight copies its memory would be eight times as large; columns divide
        ((128, 2880, 2880), 1024, 3, 8),  # nothing divides: the alternative is as much padding
        ((128, 768, 2048), 512, 2, 4),  # rows stay whole
        ((128, 768, 2048), 512, 1, 1),  # each unit reshards to a number of ranks
        ((128, 2048, 768), 64, 3, 1),
        ((128, 2048, 768), 128, 3, 1),
        ((128, 768, 2048), 192, 3, 1),
        ((2, 3, 8), 4, 3, 2),
        ((1, 8, 8), 4, 3, 1),  # a single matrix
        ((0, 8, 8), 4, 3, 1),
        ((2, 8), 4, 2, 1),
    ],
)
def test_copies_of_a_stack_of_few_matrices(shape: tuple[int, ...], parts: int, num_dims: int, expected: int) -> None:
    assert choose_copies(shape, parts, num_dims) == expected


@pytest.mark.parametrize(
    ("shape", "shard", "group", "group_dim"),
    [
        ((2, 6, 4), 4, 1, 0),
        ((6, 8, 4), 4, 1, 0),
        ((8, 3, 4), 4, 2, 0),
        ((2, 3, 8), 8, 2, 0),
        ((5, 3), 4, 1, 0),
        ((4, 6, 5), 6, 2, 0),
        ((8, 5), 8, 8, 0),
        ((6, 8), 4, 2, 1),
        ((5, 6), 6, 2, 1),
        ((7, 4), 4, 2, 0),  # a vocabulary whose parts differ
        ((9, 5), 4, 2, 0),
    ],
)
def test_the_parts_of_all_ranks_make_up_the_whole(
    shape: tuple[int, ...], shard: int, group: int, group_dim: int
) -> None:
    division = divide(shape, shard, group, group_dim, len(shape))
    counted = torch.zeros(shape, dtype=torch.int64)
    for rank in range(shard):
        counted[tuple(slice(*span) for span in division.box(shape, rank))] += 1
    assert counted.eq(division.copies).all()
    gathered = division.gathered_numel(shape)
    assert gathered * group >= counted.numel()
    assert gathered % division.parts == 0
    groups = itertools.groupby(range(shard), key=lambda rank: rank // group)
    for _, ranks in groups:  # consecutive ranks share out experts, rows or columns
        parts = {division.box(shape, rank)[group_dim] for rank in ranks}
        assert len(parts) == group


FEW = [
    *("model.num_layers=2", "model.dim=32", "model.head_dim=8", "model.num_experts=2", "model.num_chosen=1"),
    *("data.source=synthetic", "data.seq_len=16", "train.global_batch_size=8"),
    *("train.micro_batch_size=1", "run.threads=1", "eval.every=0", "checkpoint.every=0", "log.sample_tokens=0"),
    *("train.compile=false", "run.device=cpu"),
]


def parts_held(folder: Path, *overrides: str) -> tuple[list[str], str]:
    """Return what differs between what the ranks hold, and what the planner says that they hold; and how."""
    config = load_config("qwen3_moe_small", [*FEW, *overrides, f"run.dir={folder}"])
    trainer = Trainer(config)
    trainer.start()  # checks that copies are equal, and that there are no other parameters than shards
    plan = make_plan(without_data(config), trainer.shape, find_machine("cpu"))
    rank, found = trainer.mesh.get_local_rank("shard"), []
    for name, parameter in trainer.model.named_parameters():
        division = plan.layout.divisions[name]
        whole = parameter.full_tensor()  # type: ignore[attr-defined]
        box = division.box(parameter.shape, rank)
        if not torch.equal(local(parameter), whole[tuple(slice(*span) for span in box)]):
            found.append(f"{name} {box}")
        if division_of(parameter) != division or local_box(parameter) != box:
            found.append(f"{name}: {division_of(parameter)} {local_box(parameter)}")
    held = {name.rpartition(".")[2]: division for name, division in plan.layout.divisions.items() if "exp" in name}
    trainer.close()
    return found, f"w1 {held['w1'].dim} x {held['w1'].copies}, w2 {held['w2'].dim} x {held['w2'].copies}"


@pytest.mark.campaign
@needs_torch("2.12")
@pytest.mark.parametrize(
    ("overrides", "ranks", "expected"),
    [
        (["mesh.shard=4"], 4, "w1 0 x 2, w2 0 x 2"),  # each of the two experts is on two ranks
        (["mesh.shard=4", "mesh.replicate=2"], 8, "w1 0 x 2, w2 0 x 2"),
        (["mesh.shard=4", "model.num_experts=3", "model.expert_dim=25"], 4, "w1 2 x 1, w2 1 x 1"),  # 25 rows are odd
    ],
)
def test_ranks_hold_what_is_planned(tmp_path: Path, overrides: list[str], ranks: int, expected: str) -> None:
    assert on_ranks(ranks, parts_held, tmp_path, *overrides) == [([], expected)] * ranks


def test_torch_that_has_no_mesh_of_copies_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    with (
        pytest.raises(UserError, match=r"^mesh\.shard=4: needs torch 2\.12 .*\n.*mesh\.replicate=4 mesh\.shard=2"),
        fake_model(load_config("qwen3_moe_small", FEW), MeshShape(2, 4)),
    ):
        pass


@pytest.mark.parametrize(
    ("num_shards", "overrides", "advice"),
    [
        (2, [], ""),
        (4, [], ""),
        (8, [], ""),
        (16, [], "mesh.shard=2 mesh.replicate=8"),
        (5, [], "mesh.shard=1 mesh.replicate=5"),
        (4, ["fsdp.reshard_after_forward=2"], "mesh.shard=2 mesh.replicate=2"),
        (16, ["mesh.expert=2"], ""),
    ],
)
def test_advice_where_copies_are_not_made(num_shards: int, overrides: list[str], advice: str) -> None:
    """Of two experts."""
    found = advice_on_shards(load_config("qwen3_moe_small", [*FEW, *overrides]), MeshShape(1, num_shards))
    assert advice in found
    assert bool(advice) == bool(found)


def test_division_of_a_whole_tensor_is_one_part() -> None:
    assert division_of(torch.ones(3, 4)) == Division()
    assert local_box(torch.ones(3, 4)) == ((0, 3), (0, 4))


def of_tensor_parallelism(folder: Path) -> list[object]:
    """Return what is known of a matrix that is divided by rows and columns, as by torch's RowwiseParallel and FSDP."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    matrix = distribute_tensor(torch.arange(64.0).view(8, 8), mesh, [Shard(0), Shard(1)])
    row, column = divmod(dist.get_rank(), 2)
    assert local_box(matrix) == ((4 * row, 4 * row + 4), (4 * column, 4 * column + 4))
    whole = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
    first, second = make_copy_mesh(whole, 2), make_copy_mesh(whole, 2)
    record_copies(first, whole)
    record_copies(second, whole)
    del first  # as when the first of two equal trainers is collected
    gc.collect()
    stack = distribute_tensor(torch.ones(2, 4, 4), second, [Replicate(), Shard(0)])
    return [division_of(matrix), division_of(stack), num_copies(stack), copied_from(stack) == whole]


@pytest.mark.slow
def test_divisions_of_two_axes_are_told_apart(tmp_path: Path) -> None:
    assert (
        on_ranks(4, of_tensor_parallelism, tmp_path) == [[Division(0, 2, 2, 1), Division(0, 2, copies=2), 2, True]] * 4
    )
