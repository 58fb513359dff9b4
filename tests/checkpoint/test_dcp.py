"""Checkpoints through torch.distributed.checkpoint: what torch calls and reads, and loops of one's own."""

from __future__ import annotations

import functools
import json
import random
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import (
    CheckpointException,
    FileSystemReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.checkpoint.runs import step_folder
from tests.helpers.cases import in_campaign
from tests.helpers.launch import on_ranks, tiny
from tests.helpers.runs import SharedRun
from trainer import Trainer, UserError, load_config, load_weights
from trainer.checkpoint import CheckedWriter, VerifiedReader, checked_writer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),  # torch says so in a single process
]

MESHES = {"1": (1,), "2": (2,), "4": (4,), "2x2": (2, 2)}

# ---------------------------------------------------------------------------------------------------------------
# A loop of one's own


def own_state(mesh_shape: tuple[int, ...] | None) -> dict[str, Any]:
    """Return the state of a loop of one's own after two steps: a sharded model, its moments, and other values.

    mesh_shape: of the mesh of all ranks; None: not sharded, in one process.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(13, 32), nn.Linear(32, 7), nn.BatchNorm1d(7))
    mesh = None
    if mesh_shape is not None:
        names = ("replicate", "shard")[-len(mesh_shape) :]
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
        for layer in (*model, model):
            fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(2):
        model(torch.randn(8, 13, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = {"model": model.state_dict(), "moments": {}, "step": 2, "losses": [1.5, 0.5], "name": "own"}
    for name, parameter in model.named_parameters():
        state["moments"][name] = dict(optimizer.state[parameter])
    replicated = torch.arange(6.0).reshape(2, 3)
    state["table"] = replicated if mesh is None else distribute_tensor(replicated, mesh, [Replicate()] * mesh.ndim)
    state["empty"], row = (
        torch.zeros(0, 3),
        torch.arange(64.0).reshape(1, 64),
    )  # most ranks have no part of the row
    state["row"] = row if mesh is None else distribute_tensor(row, mesh, [Replicate(), Shard(0)][-mesh.ndim :])
    columns = torch.arange(35.0).reshape(5, 7)
    placements = [Replicate(), Shard(1)][-len(mesh_shape or (1,)) :]
    state["columns"] = columns if mesh is None else distribute_tensor(columns, mesh, placements)
    return state


def full(tree: Any) -> Any:
    """Return a nested state with whole tensors in place of sharded ones.  Collective."""
    if isinstance(tree, Mapping):
        return {name: full(value) for name, value in tree.items()}
    return tree.full_tensor().clone() if isinstance(tree, DTensor) else tree


def emptied(tree: Any) -> Any:
    """Return a nested state of the same form, with zeros in all tensors and None in place of other values."""
    if isinstance(tree, Mapping):
        return {name: emptied(value) for name, value in tree.items()}
    return torch.zeros_like(tree) if isinstance(tree, torch.Tensor) else None


def assert_same(found: Any, expected: Any, path: str = "") -> None:
    """Assert that two nested states are the same, to the bit."""
    if isinstance(expected, Mapping):
        assert found.keys() == expected.keys(), path
        for name in expected:
            assert_same(found[name], expected[name], f"{path}.{name}")
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected), path
    else:
        assert found == expected, path


def save_own(folder: Path, mesh_shape: tuple[int, ...], in_background: bool) -> None:
    dist.init_process_group("gloo")
    state = own_state(mesh_shape)
    writer = CheckedWriter(folder / "checkpoint", torch_metadata=True)
    if in_background:
        dcp.async_save(state, storage_writer=writer).result()
        for tensor in state["model"].values():
            tensor.zero_()
        dcp.async_save(state, checkpoint_id=folder / "zeros", storage_writer=writer).result()
    else:
        dcp.save(state, storage_writer=writer)


def load_own(folders: list[Path], mesh_shape: tuple[int, ...] | None) -> None:
    dist.init_process_group("gloo")
    for folder in folders:
        expected = own_state(mesh_shape)
        readers: list[Any] = [VerifiedReader(folder / "checkpoint"), FileSystemReader(folder / "checkpoint")]
        for reader in readers:
            state = emptied(expected)
            dcp.load(state, storage_reader=reader)
            assert_same(full(state), full(expected))


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [(["2x2"], "2"), *in_campaign(*(([*MESHES], mesh) for mesh in MESHES))],
)
def test_own_loop_saves_and_loads_on_any_mesh(saved: list[str], loaded: str, tmp_path: Path) -> None:
    for number, name in enumerate(saved):
        (tmp_path / name).mkdir()
        shape = MESHES[name]
        on_ranks(torch.Size(shape).numel(), save_own, tmp_path / name, shape, number % 2 == 1)
    shape = MESHES[loaded]
    on_ranks(torch.Size(shape).numel(), load_own, [tmp_path / name for name in saved], shape)


def chain(source: Path, folder: Path, mesh_shape: tuple[int, ...]) -> None:
    """Read a run's weights with our reader, and write them with torch's writer of model folders."""
    dist.init_process_group("gloo")
    layout = json.loads((source / "layout.json").read_text())["tensors"]
    mesh = init_device_mesh("cpu", mesh_shape)

    def empty() -> dict[str, torch.Tensor]:
        shapes = {key: shape for key, (_, shape, _) in layout.items() if key.startswith("model.")}
        return {
            key: distribute_tensor(torch.zeros(shape), mesh, [Shard(0)] * mesh.ndim) for key, shape in shapes.items()
        }

    weights = empty()
    dcp.load(weights, storage_reader=VerifiedReader(source))
    writer = HuggingFaceStorageWriter(
        str(folder), dict.fromkeys(weights, 1), save_distributed=True, enable_consolidation=True
    )
    dcp.save(weights, storage_writer=writer)
    expected = full(weights)
    assert all(tensor.any() for tensor in expected.values())
    (file,) = folder.glob("*.safetensors")
    assert_same(safetensors.torch.load_file(file), expected)


@pytest.mark.parametrize("mesh", ["2", *in_campaign("1", "4", "2x2")])
def test_chain_into_the_writer_of_hugging_face(mesh: str, two: SharedRun, tmp_path: Path) -> None:
    shape = MESHES[mesh]
    on_ranks(torch.Size(shape).numel(), chain, step_folder(two.folder, 12), tmp_path / "exported", shape)


def test_objects_of_strangers_are_not_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's planner would: it stores what is not a tensor as a pickle."""

    class Evil:
        def __reduce__(self) -> Any:
            return (Path(tmp_path / "ran").touch, ())

    folder, saved = tmp_path / "checkpoint", {"weight": torch.ones(2), "note": Evil()}
    with pytest.raises(CheckpointException, match="note is an object that only a pickle can hold"):
        dcp.save(saved, storage_writer=CheckedWriter(folder), no_dist=True)
    monkeypatch.setattr(checked_writer, "check_is_plain", lambda name, content: None)
    dcp.save(saved, storage_writer=CheckedWriter(folder), no_dist=True)
    state = {"weight": torch.zeros(2), "note": None}
    with pytest.raises(CheckpointException, match="note is an object that only a pickle can hold"):
        dcp.load(state, storage_reader=VerifiedReader(folder), no_dist=True)
    assert not (tmp_path / "ran").exists()
    state.pop("note")
    dcp.load(state, storage_reader=VerifiedReader(folder), no_dist=True)
    assert state["weight"].tolist() == [1, 1]


@pytest.mark.parametrize("seed", [0, *in_campaign(*range(1, 24))])
def test_flipped_bit_is_never_read(seed: int, tmp_path: Path) -> None:
    """Whatever planner: either the values are right, or the reader says which file is damaged."""
    draw = random.Random(seed)
    folder = tmp_path / "checkpoint"
    saved = {"weight": torch.randn(300, 40), "step": 3}
    dcp.save(saved, storage_writer=CheckedWriter(folder), no_dist=True)
    for path in sorted(folder.iterdir()):
        copy = tmp_path / path.name
        shutil.copytree(folder, copy)
        content = bytearray(path.read_bytes())
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        (copy / path.name).write_bytes(content)
        state = {"weight": torch.zeros(300, 40), "step": 0}
        error = ""
        try:
            dcp.load(state, storage_reader=VerifiedReader(copy), no_dist=True)
        except CheckpointException as raised:
            error = str(raised)
        if error:
            assert path.name in error
        else:
            assert_same(state, saved)


def test_own_loop_is_told_what_is_wrong(tmp_path: Path) -> None:
    state = {"weight": torch.ones(2)}
    with pytest.raises(CheckpointException, match=r"nowhere: no checkpoint here \(manifest.json is missing\)"):
        dcp.load(state, storage_reader=VerifiedReader(tmp_path / "nowhere"), no_dist=True)
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "thesis.tex").touch()
    with pytest.raises(CheckpointException, match=r"papers: exists and is not a checkpoint \(it has no manifest"):
        dcp.save(state, storage_writer=CheckedWriter(tmp_path / "papers"), no_dist=True)
    assert (tmp_path / "papers" / "thesis.tex").exists()
    with pytest.raises(CheckpointException, match=r"weight is a tensor of layout torch\.sparse_coo"):
        dcp.save({"weight": torch.eye(2).to_sparse()}, storage_writer=CheckedWriter(tmp_path / "eye"), no_dist=True)
    writer = CheckedWriter(tmp_path / "new" / "checkpoint")
    for value in (1.0, 2.0):  # the same path again: the earlier checkpoint is there until the later one is complete
        (tmp_path / "new" / ".replaced-checkpoint").mkdir(parents=True)  # as left by a kill at the publication
        (tmp_path / "new" / ".writing-checkpoint-0123abcd").mkdir()
        dcp.save({"weight": torch.full((2,), value)}, storage_writer=writer, no_dist=True)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["checkpoint"]
    dcp.load(state, storage_reader=VerifiedReader(tmp_path / "new" / "checkpoint"), no_dist=True)
    assert state["weight"].tolist() == [2, 2]
    with pytest.raises(UserError, match=r"is not the checkpoint of a run \(it has no config.yaml\)"):
        load_weights(tmp_path / "new" / "checkpoint")


# ---------------------------------------------------------------------------------------------------------------
# A run


class Calls:
    """What torch calls, in order, on this rank: on the main thread, and on a background thread of each save."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._main_thread = threading.current_thread()

    def note(self, owner: Any, *names: str, only_in_background: bool = False) -> None:
        for name in names:
            setattr(owner, name, self._noting(name, getattr(owner, name), only_in_background))

    def _noting(self, name: str, original: Callable[..., Any], only_in_background: bool) -> Callable[..., Any]:
        @functools.wraps(original)  # torch looks at the signature
        def noting(*args: Any, **named: Any) -> Any:
            if not only_in_background or threading.current_thread() is not self._main_thread:
                self.names.append(name)
            return original(*args, **named)

        return noting

    def take(self) -> list[str]:
        names, self.names = self.names, []
        return names


def noted_calls(folder: str, mode: str) -> list[list[str]]:
    """Return what torch calls in a save, in a second one, and in the restore of a new Trainer."""
    from trainer.checkpoint import planner, run_writer, stager, verified_reader

    calls = Calls()
    calls.note(dcp, "async_save", "load", "save")
    for kind in (stager.CopyStager, stager.LiveStager):
        calls.note(kind, "stage")
    for planner_class in (planner.ColumnSavePlanner, planner.ColumnLoadPlanner):
        calls.note(planner_class, "set_up_planner", "create_local_plan", "create_global_plan", "finish_plan")
    for storage, names in (
        (run_writer.RunWriter, ("set_up_storage_writer", "write_data", "finish")),
        (verified_reader.VerifiedReader, ("read_metadata", "set_up_storage_reader", "read_data")),
    ):
        calls.note(storage, "prepare_local_plan", "prepare_global_plan", *names)
    collectives = ("gather_object", "scatter_object_list", "broadcast_object_list", "all_gather_object")
    calls.note(dist, *collectives, only_in_background=True)
    overrides = [*tiny("train.steps=2", f"checkpoint.mode={mode}", "checkpoint.every=0"), f"run.dir={folder}"]
    trainer = Trainer(load_config("llama_small", overrides))
    found = []
    for _ in trainer.steps():
        trainer.save_checkpoint()
        trainer.saver.finish()
        found.append(calls.take())
    trainer.close()
    again = Trainer(load_config("llama_small", overrides))
    again.load_checkpoint()
    again.close()
    return [*found, calls.take()]


@pytest.mark.parametrize(("mode", "ranks"), [("async", 2), *in_campaign(("sync", 2), ("async", 1), ("sync", 4))])
def test_each_save_is_one_async_save_and_each_restore_one_load(mode: str, ranks: int, tmp_path: Path) -> None:
    """In this order, on which the planners, stagers, writer and reader rely; docs/own_checkpoints.md shows it."""
    collectives = ("gather_object", "scatter_object_list", "broadcast_object_list")
    for rank, (first, second, restore) in enumerate(on_ranks(ranks, noted_calls, str(tmp_path / "run"), mode)):
        is_main = rank == 0
        save = [
            *("async_save", "stage", "set_up_planner", "set_up_storage_writer"),
            *("create_local_plan", "prepare_local_plan", collectives[0]),
            *(("create_global_plan", "prepare_global_plan") if is_main else ()),
            *(collectives[1], "finish_plan", "write_data", collectives[0]),
            *(("finish",) if is_main else ()),
            collectives[2],
        ]
        assert first == second == save
        assert restore == [
            *("load", "read_metadata", "set_up_planner", "set_up_storage_reader"),
            *("create_local_plan", "prepare_local_plan"),
            *(("create_global_plan", "prepare_global_plan") if is_main else ()),
            *("finish_plan", "read_data"),
        ]
