"""Saving and loading on many ranks: what one rank plans, holds and opens. The other ranks are a fake process group."""

from __future__ import annotations

import json
import pickle
import random
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.helpers.ranks import run_tiny
from tests.helpers.runs import SharedRun
from trainer import load_config
from trainer.checkpoint.layout import (
    Boxes,
    Layout,
    ReadRequest,
    TensorBox,
    WrittenChunks,
    choose_writers,
    from_runs,
    layout_from_json,
    layout_of,
    layout_to_json,
    local_boxes,
    plan_reads,
    to_runs,
    value_at,
)
from trainer.checkpoint.manifest import Manifest, read_manifest
from trainer.checkpoint.storage import MANIFEST, Damaged, LocalStorage, crc32
from trainer.model.network import build_network

Result = TypeVar("Result")
Shapes = dict[str, tuple[int, ...]]


@contextmanager
def sharded(shapes: Shapes, sizes: tuple[int, ...], rank: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield tensors without values, sharded over the last axis of a mesh of `sizes`, as `rank` has them."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=int(np.prod(sizes)))
    try:
        mesh = init_device_mesh("cpu", sizes)
        placements = [*(Replicate() for _ in sizes[1:]), Shard(0)]
        yield {key: _on_mesh(shape, mesh, placements) for key, shape in shapes.items()}
    finally:
        dist.destroy_process_group()


def _on_mesh(shape: tuple[int, ...], mesh: Any, placements: Any) -> torch.Tensor:
    start, stop = rows_on(shape[0], mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1))
    whole, own = (torch.empty((n, *shape[1:]), device="meta") for n in (shape[0], stop - start))
    return DTensor.from_local(own, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def rows_on(num_rows: int, number: int, num_shards: int) -> tuple[int, int]:
    """Return the rows of one shard, as `torch.chunk` splits them."""
    each = -(-num_rows // num_shards)
    return min(num_rows, number * each), min(num_rows, (number + 1) * each)


def boxes_on(shapes: Shapes, number: int, num_shards: int) -> Boxes:
    """Return the boxes that a rank holds, counted by hand."""
    rows = {key: rows_on(shape[0], number, num_shards) for key, shape in shapes.items()}
    return Boxes.of(
        (key, (rows[key][0], *(0 for _ in shape[1:])), (rows[key][1] - rows[key][0], *shape[1:]))
        for key, shape in shapes.items()
    )


def as_boxes(boxes: Sequence[TensorBox]) -> Boxes:
    return Boxes.of((box.key, box.offsets, box.sizes) for box in boxes)


def written(boxes: Boxes, rank: int) -> WrittenChunks:
    """Return where the chunks would be in a rank's file: one after another, each after a header of 500 bytes."""
    lengths = boxes.sizes.prod(axis=1) * 4 + 500
    starts = np.cumsum(lengths) - lengths
    return WrittenChunks(f"__{rank}_0.distcp", boxes, np.column_stack((starts, lengths, starts + 400)))


SMALL: Shapes = {"a": (10, 3), "b": (7,), "c": (2, 3, 4), "d": (64, 2)}


@pytest.mark.parametrize("seed", range(20))
def test_column_is_restored_from_its_runs(seed: int) -> None:
    draw = random.Random(seed)
    column: list[int] = []
    for _ in range(draw.randrange(6)):
        first, step = draw.randrange(100), draw.choice([0, 1, -3, 2**40])
        column += [first + step * n for n in range(draw.randrange(1, 5))]
    runs = to_runs(np.array(column, dtype=np.int64))
    assert from_runs(runs).tolist() == column == [value_at(runs, row) for row in range(len(column))]
    assert to_runs(np.arange(5, 5 + 7 * 512, 7)) == [5, 7, 512]
    assert len(to_runs(np.array([16] * 511 + [12]))) == 6


def test_each_part_is_written_once_and_evenly() -> None:
    """Two replicas of four shards: of two ranks with the same rows, each writes half of the bytes."""
    held = [boxes_on(SMALL, rank % 4, 4) for rank in range(8)]
    tensors = {key: torch.empty(shape, device="meta") for key, shape in SMALL.items()}
    masks, planned = choose_writers(held, tensors)
    num_bytes = [int(own.sizes.prod(axis=1)[mask].sum()) for own, mask in zip(held, masks, strict=True)]
    assert sum(num_bytes) == sum(int(np.prod(shape)) for shape in SMALL.values())
    for first, second in zip(num_bytes[:4], num_bytes[4:], strict=True):
        assert abs(first - second) <= 16 * 2, "as even as the largest part allows"
    written_rows = sorted(
        (key, *offsets)
        for own, mask in zip(held, masks, strict=True)
        for key, offsets, writes in zip(own.keys, own.offsets.tolist(), mask, strict=True)
        if writes
    )
    assert written_rows == sorted((key, *row) for key, row in _distinct(held)), "each once"
    assert planned["a"].offsets.tolist() == [[0, 0], [3, 0], [6, 0], [9, 0]]


def _distinct(held: Sequence[Boxes]) -> set[tuple[str, tuple[int, ...]]]:
    return {(key, tuple(row)) for own in held for key, row in zip(own.keys, own.offsets.tolist(), strict=True)}


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        ([(0, 4), (6, 10)], "the ranks hold 24 of its 30 elements"),
        ([(0, 6), (4, 8)], "overlap or lie outside"),
        ([(0, 5), (6, 11)], "overlap or lie outside"),
    ],
)
def test_parts_that_do_not_cover_a_tensor_are_rejected(rows: list[tuple[int, int]], complaint: str) -> None:
    held = [Boxes.of([("a", (start, 0), (stop - start, 3))]) for start, stop in rows]
    with pytest.raises(ValueError, match=complaint):
        choose_writers(held, {"a": torch.empty(10, 3, device="meta")})


def test_tensor_missing_on_rank_0_is_named() -> None:
    with pytest.raises(ValueError, match="own: not all ranks hold this tensor"):
        choose_writers([Boxes.of([]), Boxes.of([("own", (0,), (4,))])], {})


def layout_on(shapes: Shapes, num_shards: int) -> tuple[Layout, str]:
    """Return the layout of a save on so many ranks, and its text."""
    held = [boxes_on(shapes, rank, num_shards) for rank in range(num_shards)]
    tensors = {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}
    masks, planned = choose_writers(held, tensors)
    own = [
        Boxes(
            [key for key, writes in zip(boxes.keys, mask, strict=True) if writes],
            boxes.offsets[mask],
            boxes.sizes[mask],
        )
        for boxes, mask in zip(held, masks, strict=True)
    ]
    placed = [written(boxes, rank) for rank, boxes in enumerate(own)]
    layout = layout_of(planned, placed)
    return layout, layout_to_json(layout, [part.file for part in placed])


def rows_of_format_2(layout: Layout) -> str:
    """Return the text that a layout was before it had runs: a row for each chunk."""
    return json.dumps(
        {
            key: [
                str(stored.dtype).removeprefix("torch."),
                stored.shape,
                [[c.offsets, c.sizes, c.file, c.start, c.length, c.data_start] for c in stored.chunks],
            ]
            for key, stored in layout.items()
        }
    )


def test_layout_is_restored_also_from_the_previous_format() -> None:
    layout, text = layout_on(SMALL, 4)
    for stored_as in (text, rows_of_format_2(layout)):
        back = layout_from_json(stored_as)
        assert {key: (t.dtype, t.shape, list(t.chunks)) for key, t in back.items()} == {
            key: (t.dtype, t.shape, list(t.chunks)) for key, t in layout.items()
        }
    chunks = layout["a"].chunks
    assert [chunk.offsets for chunk in chunks] == [(0, 0), (3, 0), (6, 0), (9, 0)]
    assert [chunk.file for chunk in chunks.overlapping((4, 1), (3, 1))] == ["__1_0.distcp", "__2_0.distcp"]
    assert len(chunks) == 4


def test_chunk_that_was_not_written_is_detected() -> None:
    held = [boxes_on(SMALL, rank, 2) for rank in range(2)]
    _, planned = choose_writers(held, {key: torch.empty(shape, device="meta") for key, shape in SMALL.items()})
    with pytest.raises(ValueError, match="a: 1 of its 2 chunks have not been written"):
        layout_of(planned, [written(held[0], 0)])


def files_read(reads: Sequence[ReadRequest]) -> set[str]:
    return {read.chunk.file for read in reads if read.target.numel()}


@pytest.mark.parametrize(("num_ranks", "rank", "files"), [(4, 2, {2}), (3, 0, {0, 1}), (1, 0, {0, 1, 2, 3})])
def test_rank_reads_only_its_own_rows(num_ranks: int, rank: int, files: set[int]) -> None:
    _, text = layout_on({"d": SMALL["d"]}, 4)
    with sharded({"d": SMALL["d"]}, (num_ranks,), rank) as targets:
        reads = plan_reads(targets, layout_from_json(text))
    assert files_read(reads) == {f"__{number}_0.distcp" for number in files}
    assert sum(read.target.numel() for read in reads) == 2 * (np.diff(rows_on(64, rank, num_ranks))[0])


def test_a_part_that_no_chunk_covers_is_an_error() -> None:
    _, text = layout_on({"d": SMALL["d"]}, 4)
    with (
        sharded({"d": (80, 2)}, (4,), 3) as targets,
        pytest.raises(Damaged, match="the chunks in the checkpoint do not cover it"),
    ):
        plan_reads(targets, layout_from_json(text))


@pytest.mark.slow
def test_checkpoint_of_the_previous_format_resumes(two: SharedRun, tmp_path: Path) -> None:
    """With the same losses, also on a different number of ranks."""
    folders = {version: two.copy_to(tmp_path / str(version), up_to=10) for version in (2, 3)}
    make_format_2(folders[2] / "checkpoints" / "step_00000010")
    for folder in folders.values():
        run_tiny(folder, "train.steps=12")
    losses = [[line["loss"] for line in _lines(folder) if line["kind"] == "train"] for folder in folders.values()]
    assert losses[0] == losses[1]
    assert [line["resumed_step"] for line in _lines(folders[2]) if line["kind"] == "start"][-1] == 10


def _lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def make_format_2(checkpoint: Path) -> None:
    """Convert a checkpoint to the previous format, in which each chunk had a row."""
    manifest = read_manifest(LocalStorage(checkpoint))
    text = rows_of_format_2(layout_from_json((checkpoint / "layout.json").read_text())).encode()
    (checkpoint / "layout.json").write_bytes(text)
    content = {**vars(manifest), "files": {**manifest.files, "layout.json": (len(text), crc32(text))}}
    (checkpoint / MANIFEST).write_text(Manifest(**{**content, "format_version": 2}).to_json())


# ---------------------------------------------------------------------------------------------------------------
# 70B with its moments on 512 ranks

RANKS, RANK = 512, 300
SECONDS, MEGABYTES = 1.0, 200.0
"""What planning may take on any rank but 0: seconds of a processor, and memory."""


def of_70b() -> Shapes:
    model = build_network(load_config("llama3_70b", []))
    names = ("model.{}", "optimizer.state.{}.exp_avg", "optimizer.state.{}.exp_avg_sq")
    return {form.format(name): tuple(p.shape) for form in names for name, p in model.named_parameters()}


def cost_of(what: str, work: Callable[[], Result]) -> Result:
    """Return what `work` returns; fail if it costs more than it may."""
    started = time.process_time()
    result = work()
    seconds = time.process_time() - started
    tracemalloc.start()
    try:
        work()
        megabytes = tracemalloc.get_traced_memory()[1] / 1e6
    finally:
        tracemalloc.stop()
    print(f"{what}: {seconds:.2f} s, {megabytes:.1f} MB")
    assert seconds < SECONDS
    assert megabytes < MEGABYTES
    return result


@pytest.mark.campaign
def test_planning_to_save_and_load_70b_on_512_ranks() -> None:
    shapes = of_70b()
    started = time.process_time()
    layout, text = layout_on(shapes, RANKS)
    print(f"rank 0 plans a save: {time.process_time() - started:.1f} s; the layout is {len(text) / 1e6:.2f} MB")
    with sharded(shapes, (RANKS,), RANK) as tensors:
        boxes, message = cost_of("a rank plans a save", lambda: _told_of(tensors))
        assert sum(int(np.prod(box.sizes)) for box in boxes) == sum(t.to_local().numel() for t in tensors.values())
        print(f"its message is {len(message) / 1e6:.2f} MB")
        reads = cost_of("a rank plans a load", lambda: plan_reads(tensors, layout_from_json(text)))
    assert files_read(reads) == {f"__{RANK}_0.distcp"}
    with sharded(shapes, (384,), RANK) as tensors:
        reads = cost_of("a rank of 384 plans a load", lambda: plan_reads(tensors, layout_from_json(text)))
    assert files_read(reads) == {f"__{number}_0.distcp" for number in files_of(shapes, 384)}
    assert layout_from_json(text).keys() == layout.keys()


def files_of(shapes: Shapes, num_ranks: int) -> set[int]:
    """Return the ranks of the save whose files hold rows of this one, of another number; counted by hand."""
    files = set()
    for num_rows in {shape[0] for shape in shapes.values()}:
        start, stop = rows_on(num_rows, RANK, num_ranks)
        each = -(-num_rows // RANKS)
        files |= set(range(start // each, -(-stop // each)))
    return files


def _told_of(tensors: dict[str, torch.Tensor]) -> tuple[list[TensorBox], bytes]:
    boxes = local_boxes(tensors)
    return boxes, pickle.dumps(as_boxes(boxes))
