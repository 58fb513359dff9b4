"""Reads checkpoints and verifies what it reads, for `dcp.load`.

    import torch.distributed.checkpoint as dcp
    from trainer.checkpoint import VerifiedReader

    state_dict = {"model": model.state_dict()}  # sharded on any mesh, or not at all
    dcp.load(state_dict, storage_reader=VerifiedReader("runs/mine/checkpoints/step_00000100"))

torch.distributed.checkpoint (DCP) calls a reader in this order:

    on every rank     read_metadata             reads and verifies manifest.json and layout.json
    on every rank     set_up_storage_reader     raises what `read_metadata` found
    on every rank     prepare_local_plan
    on rank 0         prepare_global_plan
    on every rank     read_data                 reads and verifies the blocks with the rank's parts
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint import LoadPlan, LoadPlanner, Metadata, StorageReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.futures import Future

from trainer.checkpoint.data_files import ChunkReader, check_is_plain, read_rows
from trainer.checkpoint.layout import Chunk, Layout, ReadRequest, layout_from_json, paths_from_json
from trainer.checkpoint.manifest import LAYOUT, Manifest, StoredBlocks, read_file, read_manifest
from trainer.checkpoint.messages import CheckpointError, DamagedCheckpoint, as_checkpoint_error
from trainer.checkpoint.planner import ColumnLoadPlan, LayoutMetadata
from trainer.checkpoint.storage import MANIFEST, Damaged, describe, open_storage


class VerifiedReader(StorageReader):
    """Reads a checkpoint of a run, or one that a CheckedWriter has written, on any mesh.  Unpickles nothing.

    Any planner can be used.  The checksum of every block is verified as it is read; blocks that no rank needs are not
    read.  If a checkpoint is damaged, DCP raises a CheckpointException on all ranks, with a DamagedCheckpoint for each
    rank that found damage; some tensors may then have been overwritten.
    """

    def __init__(self, path: str | os.PathLike[str], checksums: bool = True) -> None:
        """path: the folder of one checkpoint, or a URL that fsspec supports.

        checksums: whether to verify the data; the files that describe it are always verified.
        """
        self._checksums = checksums
        self._error: CheckpointError | None = None
        """What `read_metadata` found."""
        self._layout: Layout = {}
        self.reset(path)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Read the checkpoint at this path from now on, if one is given."""
        if checkpoint_id is not None:
            self.checkpoint_id = os.fspath(checkpoint_id)
            self._storage = open_storage(self.checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def read_metadata(self) -> Metadata:
        # It must not raise: DCP would print a traceback and raise an AssertionError instead.  Nor may it have
        # `**kwargs`, since DCP would then look for a metadata file of each rank.
        try:
            with as_checkpoint_error():
                manifest = self._read_manifest()
                content = read_file(self._storage, manifest, LAYOUT)
                self._layout, self._error = layout_from_json(content), None
                self._blocks = StoredBlocks(self._storage, manifest)
        except CheckpointError as error:
            self._error = error
            return LayoutMetadata({})
        described, paths = _DescribedTensors(self._layout), paths_from_json(content)
        return LayoutMetadata(described, paths, storage_meta=StorageMeta(self.checkpoint_id), layout=self._layout)  # type: ignore[arg-type]

    def _read_manifest(self) -> Manifest:
        try:
            return read_manifest(self._storage)
        except FileNotFoundError:
            raise DamagedCheckpoint(f"{self._storage}: no checkpoint here ({MANIFEST} is missing)") from None

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if self._error is not None:
            raise self._error

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        with as_checkpoint_error():
            if isinstance(plan, ColumnLoadPlan):
                self._read_all(plan.requests)
            else:
                self._read_items(plan.items, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_all(self, requests: Sequence[ReadRequest]) -> None:
        reader = ChunkReader(self._storage, self._blocks, self._checksums)
        try:
            reader.read_all(requests)
        except OSError as error:  # an unreadable file
            raise Damaged(describe(error)) from None
        finally:
            reader.close()

    def _read_items(self, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        """Read what torch's own planner, or one derived from it, has planned."""
        requests, targets = [], []
        for item in items:
            key = item.storage_index.fqn
            stored = self._layout[key]
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, self._read_object(key))
                continue
            target = planner.resolve_tensor(item)
            chunk = self._chunk_at(item.storage_index)
            offsets, sizes = tuple(item.storage_offsets), tuple(item.lengths)
            requests.append(ReadRequest(chunk, stored.dtype, offsets, sizes, target.detach()))
            targets.append((item, target))
        self._read_all(requests)
        for item, target in targets:
            planner.commit_tensor(item, target)

    def _chunk_at(self, index: MetadataIndex) -> Chunk:
        offsets = tuple(index.offset or ())
        for chunk in self._layout[index.fqn].chunks.overlapping(offsets, (1,) * len(offsets)):
            if chunk.offsets == offsets:
                return chunk
        raise CheckpointError(f"{index.fqn}: the planner asks for a chunk at {offsets}, where none begins")

    def _read_object(self, key: str) -> io.BytesIO:
        """Return the bytes of an object, which torch's planner unpickles.  Raises CheckpointError if that is unsafe."""
        content = io.BytesIO(read_rows(self._storage, self._layout[key], self._blocks).numpy().tobytes())
        check_is_plain(f"{self._storage}: {key}", content)
        return content


class _DescribedTensors(Mapping[str, BytesStorageMetadata | TensorStorageMetadata]):
    """torch's description of each tensor, built when it is asked for: it has one object per chunk."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def __getitem__(self, key: str) -> BytesStorageMetadata | TensorStorageMetadata:
        stored = self._layout[key]
        if stored.is_object:
            return BytesStorageMetadata()
        chunks = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in stored.chunks]
        return TensorStorageMetadata(TensorProperties(dtype=stored.dtype), torch.Size(stored.shape), chunks)

    def __iter__(self) -> Iterator[str]:
        return iter(self._layout)

    def __len__(self) -> int:
        return len(self._layout)
