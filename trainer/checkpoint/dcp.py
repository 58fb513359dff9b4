"""The part of torch.distributed.checkpoint (DCP): it plans which rank writes what and who reads which part, and it has
metadata of its own, by which torch's tools read our files.

Imported when the first checkpoint is saved or loaded: some 70 modules, 2.5 MiB and 0.05 s that a step has no use for.
"""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Mapping
from typing import Protocol

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor

from trainer.checkpoint.layout import Box, Chunk, Layout, Part, Planned, Tensors
from trainer.distributed.channel import Channel


def plan_save(tensors: Tensors, channel: Channel) -> tuple[list[Box], dict[str, Planned]]:
    """Return what this rank writes, and on rank 0 what there will be of each tensor.

    Collective: two small messages, the plans of all ranks to rank 0, its answer to each.  Raises on all ranks if any
    fails.
    """
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)

    def plan_own() -> SavePlan:
        # What is the same everywhere is rank 0's to write.
        own = {k: t for k, t in tensors.items() if isinstance(t, DTensor) or channel.is_main}
        planner.set_up_planner(own, is_coordinator=channel.is_main)
        return planner.create_local_plan()

    plans = channel.gather_to_main(channel.agreed(plan_own))
    planned: dict[str, Planned] = {}

    def plan_all() -> list[list[Box]]:
        if not channel.is_main:
            return []
        found, metadata = planner.create_global_plan(plans)
        planned.update(_planned(metadata))
        _check_coverage(tensors, planned)
        return [_boxes(plan) for plan in found]

    return channel.scatter(channel.agreed(plan_all)), planned


def _planned(metadata: Metadata) -> dict[str, Planned]:
    found = {}
    for key, stored in metadata.state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata)
        boxes = frozenset((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in stored.chunks)
        found[key] = Planned(stored.properties.dtype, tuple(stored.size), boxes)
    return found


def _boxes(plan: SavePlan) -> list[Box]:
    boxes = []
    for item in plan.items:
        data = item.tensor_data
        assert data is not None
        boxes.append(Box(item.index.fqn, tuple(data.chunk.offsets), tuple(data.chunk.sizes), data.properties.dtype))
    return boxes


def _check_coverage(tensors: Tensors, planned: Mapping[str, Planned]) -> None:
    """Raise unless the chunks fill every tensor: DCP demands it of several ranks only, and never when it loads."""
    for key, tensor in tensors.items():
        filled = sum(torch.Size(sizes).numel() for _, sizes in planned[key].boxes) if key in planned else 0
        if filled != tensor.numel():
            raise ValueError(f"{key}: the ranks hold {filled} of its {tensor.numel()} elements")


def pickled_metadata(layout: Layout, paths: Mapping[str, tuple[str, ...]]) -> bytes:
    """Return DCP's `.metadata`, for torch's tools; it is never read here.

    paths: where each key stands in the nested state dict.
    """
    metadata = _metadata(layout)
    metadata.planner_data = dict(paths)
    metadata.storage_meta = StorageMeta()
    metadata.version = CURRENT_DCP_VERSION
    return pickle.dumps(metadata)


def _metadata(layout: Layout) -> Metadata:
    tensors = {
        key: TensorStorageMetadata(
            TensorProperties(dtype=stored.dtype),
            torch.Size(stored.shape),
            [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in stored.chunks],
        )
        for key, stored in layout.items()
    }
    places = {
        MetadataIndex(key, chunk.offsets, number): _StorageInfo(chunk.file, chunk.start, chunk.length)
        for key, stored in layout.items()
        for number, chunk in enumerate(stored.chunks)
    }
    return Metadata(tensors, storage_data=places)  # type: ignore[arg-type]


class PartReader(Protocol):
    """Fills parts of tensors from files."""

    def read_parts(self, parts: list[Part]) -> None: ...


def load(targets: Tensors, layout: Layout, reader: PartReader) -> None:
    """Have `reader` fill `targets` (DTensors of any mesh, or plain ones), each rank its own parts.  No collective."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # it is: each rank reads for itself
            dcp.load(dict(targets), storage_reader=_Storage(layout, reader), planner=planner, no_dist=True)
    except CheckpointException as failure:  # DCP's wrapper, which is no `Exception`
        (error, _), *_ = failure.failures.values()
        raise error from failure


class _Storage(StorageReader):
    """Shows DCP our layout.  It decides which parts of which chunks this rank's tensors need."""

    def __init__(self, layout: Layout, reader: PartReader) -> None:
        self._layout, self._reader = layout, reader

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def read_metadata(self) -> Metadata:
        return _metadata(self._layout)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        chunks: dict[tuple[str, tuple[int, ...]], Chunk] = {
            (key, chunk.offsets): chunk for key, stored in self._layout.items() for chunk in stored.chunks
        }
        parts = []
        for item in plan.items:
            key, target = item.storage_index.fqn, planner.resolve_tensor(item).detach()
            chunk = chunks[key, tuple(item.storage_index.offset or ())]
            offsets, sizes = tuple(item.storage_offsets), tuple(item.lengths)
            parts.append(Part(chunk, self._layout[key].dtype, offsets, sizes, target))
        self._reader.read_parts(parts)
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done
