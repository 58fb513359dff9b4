"""Writes checkpoints with checksums and publishes them atomically, for `dcp.save` and `dcp.async_save`.

    import torch.distributed.checkpoint as dcp
    from trainer.checkpoint import CheckedWriter, VerifiedReader

    dcp.save(state_dict, storage_writer=CheckedWriter("checkpoints/step_00000100"))
    dcp.load(state_dict, storage_reader=VerifiedReader("checkpoints/step_00000100"))

torch.distributed.checkpoint (DCP) calls a writer in this order:

    on every rank     set_up_storage_writer, prepare_local_plan
    on rank 0         prepare_global_plan       checks the free space, creates the folder under a temporary name
    on every rank     write_data                writes and flushes the rank's files; reports them to rank 0
    on rank 0         finish                    checks that all files are there, writes the manifest, publishes
"""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import Metadata, SavePlan, SavePlanner, StorageWriter
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from trainer.checkpoint.data_files import check_is_plain, write_data_file
from trainer.checkpoint.layout import Boxes, PlannedTensor, TensorBox, WrittenChunks, layout_of, layout_to_json
from trainer.checkpoint.manifest import LAYOUT, Manifest, blocks_name, parse_step
from trainer.checkpoint.messages import CheckpointError, DiskFull, as_checkpoint_error, pack, unpack
from trainer.checkpoint.planner import ColumnMetadata
from trainer.checkpoint.storage import (
    MANIFEST,
    LocalStorage,
    Storage,
    check_visible,
    checksum_of,
    open_storage,
    split_parent,
    write_files,
)
from trainer.checkpoint.torch_metadata import TORCH_METADATA, pickle_in_child
from trainer.files import readable_size

_FREE_MARGIN = 1.02
"""Free space that a save requires, as a multiple of the size of its tensors; the other files are small."""


@dataclass(frozen=True)
class _UnpublishedFolder:
    """A folder that is being written."""

    parent: Storage
    temporary_name: str
    """At a URL, where folders cannot be renamed, this is `name`."""
    name: str

    @property
    def folder(self) -> Storage:
        return self.parent / self.temporary_name


class CheckedWriter(StorageWriter):
    """Writes each rank's chunks into one file with checksums, and publishes the folder once all files are complete.

    The checkpoint appears under its name atomically: it is complete or it does not exist.  Every file is flushed to
    disk, and rank 0 checks that it sees the files of all ranks; they must share the folder.  Any planner can be used,
    except that plans must not be cached (torch's `enable_plan_caching`).

    A save that fails or is killed leaves at most a folder `.writing-NAME-...`, or at a URL a folder without a manifest,
    which the next save of the same name deletes.

    A writer may be kept for further saves: pass `checkpoint_id` to `dcp.save`.

    DCP raises a CheckpointException on all ranks if any of them fails.
    """

    def __init__(self, path: str | os.PathLike[str], torch_metadata: bool = False) -> None:
        """path: the folder of the checkpoint, or a URL that fsspec supports.

        torch_metadata: whether to write `.metadata` too, which torch's own `FileSystemReader` needs.  It is a pickle,
        and a child process builds it, which takes 25 s and 2 GB for a 70B model on 512 ranks.
        """
        self._torch_metadata = torch_metadata
        self.limits: Mapping[str, float] = {}
        """The magnitude limit of each weight, by key.  A save fails if a weight is not finite or reaches its limit."""
        self.throttle: Callable[[float], None] | None = None
        """Called after each large block with the seconds that it took, so that a background save can pause."""
        self._rank = 0
        self._unpublished: _UnpublishedFolder | None = None
        """The folder that is being written.  On rank 0 only."""
        self.reset(path)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Write the next checkpoint to this path, if one is given."""
        if checkpoint_id is not None:
            self.checkpoint_id = os.fspath(checkpoint_id)
            parent, self._name = split_parent(self.checkpoint_id)
            self._parent = open_storage(parent)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise CheckpointError("CheckedWriter needs use_collectives=True: rank 0 publishes what all ranks wrote")
        self._rank = int(kwargs["rank"])
        self.discard()  # what a save that another rank has failed has left

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if not plan.usable:
            raise CheckpointError("CheckedWriter does not support plans of earlier saves (enable_plan_caching=True)")
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        with as_checkpoint_error():
            self.make_room(plans)
            temporary_name = self._parent.begin(self._name)
            self._unpublished = _UnpublishedFolder(self._parent, temporary_name, self._name)
        return [replace(plan, storage_data=temporary_name) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        folder = self._parent / plan.storage_data
        files: dict[str, tuple[int, int]] = {}
        chunks = b""
        with as_checkpoint_error(f"{folder}: "):
            if plan.items:
                parts = _parts_of(plan.items, planner)
                written = write_data_file(folder, f"__{self._rank}_0.distcp", parts, self.limits, self.throttle)
                files[written.name] = (written.num_bytes, checksum_of(written.blocks))
                checksums = json.dumps(written.blocks, separators=(",", ":")).encode()
                files |= write_files(folder, {blocks_name(written.name): checksums})
                chunks = _pack_chunks(written.columns)
            files |= write_files(folder, self.rank_files())
        num_bytes = sum(size for size, _ in files.values())
        future: Future[list[WriteResult]] = Future()
        future.set_result([WriteResult(MetadataIndex(f"rank {self._rank}"), num_bytes, (pack(files), chunks))])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        try:
            with as_checkpoint_error():
                self._publish(metadata, [result.storage_data for (result,) in results])
        except CheckpointError:
            self.discard()
            raise

    def _publish(self, metadata: Metadata, reports: Sequence[tuple[bytes, bytes]]) -> None:
        """Publish the checkpoint.  reports: of each rank, its files, and the chunks of its data file."""
        unpublished = self._unpublished
        assert unpublished is not None
        folder = unpublished.folder
        files: dict[str, tuple[int, int]] = {}
        for rank, (packed_files, _) in enumerate(reports):
            for file, (size, checksum) in unpack(packed_files)[0].items():
                check_visible(folder, file, size, rank)
                files[file] = (size, checksum)
        written = [_unpack_chunks(chunks) for _, chunks in reports if chunks]
        layout = self._described_layout(metadata, written)
        files |= write_files(folder, {LAYOUT: layout, **self.shared_files()})
        if self._torch_metadata:  # not listed in the manifest: nothing here depends on it
            write_files(folder, {TORCH_METADATA: pickle_in_child(layout)})
        self.manifest = Manifest(
            step=parse_step(unpublished.name) or 0,
            world_size=len(reports),
            torch=torch.__version__,
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            files=files,
            **self.manifest_fields(),
        )
        write_files(folder, {MANIFEST: self.manifest.to_json().encode()})
        unpublished.parent.publish(unpublished.temporary_name, unpublished.name)
        self._unpublished = None

    def _described_layout(self, metadata: Metadata, written: Sequence[WrittenChunks]) -> bytes:
        """Return the content of layout.json."""
        planned = metadata.planned if isinstance(metadata, ColumnMetadata) else _planned_of(metadata, written)
        layout = layout_of(planned, written)
        nested = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
        paths = {key: nested.get(key, (key,)) for key in layout}
        return layout_to_json(layout, [chunks.file for chunks in written], paths).encode()

    def discard(self) -> None:
        """Delete what a failed save has written, on rank 0."""
        unpublished, self._unpublished = self._unpublished, None
        if unpublished is None:
            return
        with contextlib.suppress(Exception):  # the storage may fail here too
            # At a URL both names are the same, and another writer may have published since.
            is_published = unpublished.temporary_name == unpublished.name and MANIFEST in unpublished.folder.names()
            if not is_published:
                unpublished.parent.delete(unpublished.temporary_name)

    # -- what a run adds -----------------------------------------------------------------------------------------

    def make_room(self, plans: Sequence[SavePlan]) -> None:
        """Prepare the parent folder, on rank 0.  Raises CheckpointError if the checkpoint cannot be written there."""
        if isinstance(self._parent, LocalStorage):
            self._parent.path.mkdir(parents=True, exist_ok=True)
            if (self._parent.path / self._name).is_file():
                raise CheckpointError(f"{self.checkpoint_id}: is a file; choose another path")
            names = (self._parent / self._name).names()
            if names and MANIFEST not in names:
                raise CheckpointError(
                    f"{self.checkpoint_id}: exists and is not a checkpoint (it has no {MANIFEST}); choose another path"
                )
        items = [item.tensor_data for plan in plans for item in plan.items if item.tensor_data is not None]
        self.check_space(sum(data.chunk.sizes.numel() * data.properties.dtype.itemsize for data in items))

    def check_space(self, num_bytes: int) -> None:
        """Raise DiskFull if the disk has no room for tensors of this size."""
        free = self._parent.free_bytes()
        if free is not None and free < num_bytes * _FREE_MARGIN:
            have, need = readable_size(free), readable_size(num_bytes)
            raise DiskFull(f"{self._parent} has {have} free, the checkpoint needs {need}")

    def rank_files(self) -> Mapping[str, bytes]:
        """Return the contents of further files of this rank, by name."""
        return {}

    def shared_files(self) -> Mapping[str, bytes]:
        """Return the contents of further files, by name; called on rank 0."""
        return {}

    def manifest_fields(self) -> Mapping[str, Any]:
        """Return further fields of the manifest; called on rank 0."""
        return {}


def _parts_of(
    items: Sequence[WriteItem], planner: SavePlanner
) -> Iterator[tuple[TensorBox, torch.Tensor | memoryview]]:
    """Yield the box and the data of each item, one at a time, since the planner may copy the data.

    Raises CheckpointError for an object that a VerifiedReader would refuse.
    """
    for item in items:
        if item.tensor_data is not None and not item.tensor_data.chunk.sizes.numel():
            continue
        key, data = item.index.fqn, planner.resolve_data(item)
        if isinstance(data, io.BytesIO):
            check_is_plain(key, data)
            content = data.getbuffer()
            yield TensorBox(key, (0,), (len(content),), torch.uint8), content
        else:
            assert item.tensor_data is not None
            chunk, dtype = item.tensor_data.chunk, item.tensor_data.properties.dtype
            yield TensorBox(key, tuple(chunk.offsets), tuple(chunk.sizes), dtype), data


def _pack_chunks(chunks: WrittenChunks) -> bytes:
    """Return the chunks of a rank's data file as a message.  Where they start follows from their lengths."""
    starts, lengths, data_starts = chunks.positions.T
    boxes = {"offsets": chunks.boxes.offsets, "sizes": chunks.boxes.sizes}
    header = {"file": chunks.file, "keys": chunks.boxes.keys}
    return pack(header, {**boxes, "lengths": lengths, "headers": data_starts - starts})


def _unpack_chunks(message: bytes) -> WrittenChunks:
    header, arrays = unpack(message)
    lengths = arrays["lengths"]
    starts = np.cumsum(lengths) - lengths
    positions = np.column_stack((starts, lengths, starts + arrays["headers"]))
    return WrittenChunks(header["file"], Boxes(header["keys"], arrays["offsets"], arrays["sizes"]), positions)


def _planned_of(metadata: Metadata, written: Sequence[WrittenChunks]) -> dict[str, PlannedTensor]:
    """Return the planned chunks in the metadata of torch's own planner."""
    sizes = {key: size for chunks in written for key, size in zip(chunks.boxes.keys, chunks.boxes.sizes, strict=True)}
    planned = {}
    for key, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata):
            rows = sorted((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in stored.chunks if chunk.sizes.numel())
            shape = tuple(stored.size)
            offsets, chunk_sizes = (
                np.array([row[column] for row in rows], dtype=np.int64).reshape(len(rows), len(shape))
                for column in (0, 1)
            )
            planned[key] = PlannedTensor(stored.properties.dtype, shape, offsets, chunk_sizes)
        else:  # an object, whose size was unknown to the planner
            planned[key] = PlannedTensor(
                torch.uint8, (int(sizes[key][0]),), np.array([[0]]), sizes[key][None, :1], True
            )
    return planned
