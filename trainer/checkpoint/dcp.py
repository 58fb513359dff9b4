"""Uses of torch.distributed.checkpoint (DCP): which part of a tensor this rank holds, which parts of which chunks it
must read, and DCP's `.metadata`, so that torch's tools can read our files.

Import this module only when a checkpoint is saved or loaded: it pulls in some 70 modules (2.5 MiB, 0.05 s).
"""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

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
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader

from trainer.checkpoint.layout import Box, Chunk, Layout, ReadRequest, Tensors

if TYPE_CHECKING:
    from trainer.checkpoint.reader import ChunkReader


def held_boxes(tensors: Tensors) -> list[Box]:
    """Return the boxes of `tensors` on this rank: a DTensor's local shard, all of a plain tensor.  No collective."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), is_coordinator=True)
    boxes = []
    for item in planner.create_local_plan().items:
        data = item.tensor_data
        assert data is not None
        boxes.append(Box(item.index.fqn, tuple(data.chunk.offsets), tuple(data.chunk.sizes), data.properties.dtype))
    return boxes


def pickled_metadata(layout: Layout, paths: Mapping[str, tuple[str, ...]]) -> bytes:
    """Return DCP's `.metadata` for torch's tools.  This package never reads it.

    paths: the path of each key in the nested state dict.
    """
    metadata = _metadata(layout, {key: list(stored.chunks) for key, stored in layout.items()})
    metadata.planner_data = dict(paths)
    metadata.storage_meta = StorageMeta()
    metadata.version = CURRENT_DCP_VERSION
    return pickle.dumps(metadata)


def _metadata(layout: Layout, chunks: Mapping[str, Sequence[Chunk]]) -> Metadata:
    """Return DCP metadata that lists only the given chunks of each tensor."""
    tensors = {
        key: TensorStorageMetadata(
            TensorProperties(dtype=layout[key].dtype),
            torch.Size(layout[key].shape),
            [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in own],
        )
        for key, own in chunks.items()
    }
    places = {
        MetadataIndex(key, chunk.offsets, number): _StorageInfo(chunk.file, chunk.start, chunk.length)
        for key, own in chunks.items()
        for number, chunk in enumerate(own)
    }
    return Metadata(tensors, storage_data=places)  # type: ignore[arg-type]


def load(targets: Tensors, layout: Layout, reader: ChunkReader) -> None:
    """Fill this rank's parts of `targets` (DTensors of any mesh, or plain tensors) by `reader`.  No collective."""
    # Only the chunks that overlap this rank's parts: given all chunks, DCP would examine every one.
    needed: dict[str, dict[Chunk, None]] = {key: {} for key in targets if key in layout}
    for box in held_boxes(targets):
        if box.key in needed:
            needed[box.key] |= dict.fromkeys(layout[box.key].chunks.meeting(box.offsets, box.sizes))
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # on purpose: each rank reads alone
            storage = _Storage(layout, {key: list(chunks) for key, chunks in needed.items()}, reader)
            dcp.load(dict(targets), storage_reader=storage, planner=planner, no_dist=True)
    except CheckpointException as failure:  # DCP's wrapper derives from BaseException
        (error, _), *_ = failure.failures.values()
        raise error from failure


class _Storage(StorageReader):
    """Presents the relevant chunks to DCP, which decides what parts of them this rank's tensors need."""

    def __init__(self, layout: Layout, chunks: Mapping[str, Sequence[Chunk]], reader: ChunkReader) -> None:
        self._layout, self._chunks, self._reader = layout, chunks, reader

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def read_metadata(self) -> Metadata:
        return _metadata(self._layout, self._chunks)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        chunks = {(key, chunk.offsets): chunk for key, own in self._chunks.items() for chunk in own}
        parts = []
        for item in plan.items:
            key, target = item.storage_index.fqn, planner.resolve_tensor(item).detach()
            chunk = chunks[key, tuple(item.storage_index.offset or ())]
            offsets, sizes = tuple(item.storage_offsets), tuple(item.lengths)
            parts.append(ReadRequest(chunk, self._layout[key].dtype, offsets, sizes, target))
        self._reader.read_parts(parts)
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done
