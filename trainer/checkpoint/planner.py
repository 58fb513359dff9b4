"""Plans which rank writes and reads what, as planners for torch.distributed.checkpoint (DCP).

A plan travels as columns of integers, a few kilobytes per rank, and only when the tensors have changed since the last
save.  With DCP's own planner, the plans of a 7B model on 512 ranks are 106 MB, which rank 0 takes 19 s to unpickle, and
77 MB of metadata are then sent to every rank.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import LoadPlan, LoadPlanner, Metadata, SavePlan, SavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from trainer.checkpoint.layout import (
    Boxes,
    Layout,
    PlannedTensor,
    ReadRequest,
    TensorBox,
    Tensors,
    boxes_to_write,
    plan_reads,
    planned_tensors,
)
from trainer.checkpoint.messages import CheckpointError, UnsavableState, as_checkpoint_error, pack, unpack
from trainer.checkpoint.snapshot import Snapshot, keys_differing_between_ranks

# ---------------------------------------------------------------------------------------------------------------
# Saving

SAVE_THREAD = "checkpoint"
"""Name of the background thread of a save; the Monitor shows what it is doing."""


@dataclass
class ColumnMetadata(Metadata):
    """The plan of all ranks, as rank 0 holds it.  To the other ranks, to which DCP sends it, it is empty."""

    planned: Mapping[str, PlannedTensor] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        return Metadata, ({},)


class ColumnSavePlanner(SavePlanner):
    """Plans the saves of a run, one after another.  It is given each state by `begin`, on the main thread."""

    def __init__(self) -> None:
        self.snapshot = Snapshot(0)
        """The state that is being saved."""
        self.boxes: list[TensorBox] = []
        """The boxes that this rank writes."""
        self.differing_keys: list[str] = []
        """Keys of the plain tensors that each rank stores itself in this save, since they differ between ranks."""
        self._signature: tuple[Any, ...] | None = None
        """The properties of the tensors that `boxes` depend on."""
        self._is_sent = False
        """True if rank 0 has this rank's boxes."""
        self._staged: Mapping[str, torch.Tensor] = {}
        self._planned: dict[str, PlannedTensor] = {}
        """The planned chunks of every tensor.  On rank 0 only."""

    @property
    def num_bytes(self) -> int:
        """Number of tensor bytes in the checkpoint.  On rank 0 only."""
        return sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in self._planned.values())

    def begin(self, snapshot: Snapshot) -> None:
        """Take the next state to save, and choose what this rank writes of it.  No collective.  Raises nothing."""
        self.snapshot, self.differing_keys = snapshot, []
        try:
            signature = _signature_of(snapshot.tensors)
            if signature != self._signature:
                self.boxes = boxes_to_write(snapshot.tensors)
                self._signature, self._is_sent = signature, False
        except Exception as error:  # any error: `create_local_plan` reports it to the other ranks
            self._signature = None
            snapshot.error = snapshot.error or f"cannot plan: {error}"

    def end(self, is_saved: bool) -> None:
        """Release the state.  If the save has failed, all ranks send their boxes again in the next one."""
        self.snapshot, self._staged = Snapshot(0), {}
        self._is_sent = self._is_sent and is_saved

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self._staged = state_dict["state"]
        threading.current_thread().name = SAVE_THREAD

    def create_local_plan(self) -> SavePlan:
        snapshot = self.snapshot
        if snapshot.mistake:
            raise UnsavableState(snapshot.mistake)
        if snapshot.error:
            raise CheckpointError(snapshot.error)
        plain, tensors = snapshot.checksums
        header: dict[str, Any] = {"plain": plain}
        arrays = {"tensors": np.array(tensors, dtype=np.uint32)}
        if not self._is_sent:
            boxes = Boxes.of((box.key, box.offsets, box.sizes) for box in self.boxes)
            header["keys"] = boxes.keys
            arrays |= {"offsets": boxes.offsets, "sizes": boxes.sizes}
        return SavePlan([], planner_data=pack(header, arrays))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        messages = [unpack(plan.planner_data) for plan in all_plans]
        checksums = [(header["plain"], arrays["tensors"].tolist()) for header, arrays in messages]
        differing_keys = keys_differing_between_ranks(self.snapshot, checksums)
        boxes = [Boxes(h["keys"], a["offsets"], a["sizes"]) for h, a in messages if "keys" in h]
        if boxes:
            with as_checkpoint_error("cannot plan: "):
                self._planned = planned_tensors(boxes, self.snapshot.tensors)
        reply = SavePlan([], planner_data=pack({"differing_keys": differing_keys}))
        metadata = ColumnMetadata({}, planner_data=self.snapshot.paths, planned=self._planned)
        return [reply] * len(all_plans), metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self._is_sent = True
        header, _ = unpack(new_plan.planner_data)
        self.differing_keys = header["differing_keys"]
        _lower_priority()
        return SavePlan([self._item_of(box) for box in self.boxes], new_plan.storage_data)

    def _item_of(self, box: TensorBox) -> WriteItem:
        chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
        size = torch.Size(self.snapshot.tensors[box.key].shape)
        data = TensorWriteData(chunk, TensorProperties(dtype=box.dtype), size)
        return WriteItem(MetadataIndex(box.key, chunk.offsets), WriteItemType.SHARD, tensor_data=data)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """Return the staged copy of this rank's shard, or the live tensor if nothing was copied."""
        return self._staged[write_item.index.fqn]


def _signature_of(tensors: Tensors) -> tuple[Any, ...]:
    """Return the properties of the tensors that a plan depends on."""
    return tuple(
        (key, t.dtype, tuple(t.shape), (t.placements, t.device_mesh) if isinstance(t, DTensor) else None)
        for key, t in tensors.items()
    )


def _lower_priority() -> None:
    """Lower this thread's priority, so that the training step wins if both compete for a core."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)  # on Linux this affects only this thread


# ---------------------------------------------------------------------------------------------------------------
# Loading


@dataclass
class LayoutMetadata(Metadata):
    """What a VerifiedReader knows of a checkpoint.  `state_dict_metadata` describes it for torch's own planner."""

    layout: Layout = field(default_factory=dict)


@dataclass
class ColumnLoadPlan(LoadPlan):
    """This rank's reads."""

    requests: Sequence[ReadRequest] = ()


class ColumnLoadPlanner(LoadPlanner):
    """Plans this rank's reads from the columns of the layout; nothing about them is sent.  Only for a VerifiedReader.

    The state dict is {"state": targets}; each target, on any mesh, has the shape of the stored tensor.
    """

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        assert isinstance(metadata, LayoutMetadata)
        self._targets: Tensors = state_dict["state"]
        self._layout = metadata.layout

    def create_local_plan(self) -> LoadPlan:
        with as_checkpoint_error():
            self._requests = plan_reads(self._targets, self._layout)
        return LoadPlan([])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return ColumnLoadPlan([], requests=self._requests)

    # A reader calls the rest for the items of a plan, and these plans have none.

    def load_bytes(self, read_item: Any, value: Any) -> None:
        raise NotImplementedError

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        raise NotImplementedError

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        raise NotImplementedError
