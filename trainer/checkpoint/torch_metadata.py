"""Writes the `.metadata` of torch.distributed.checkpoint (DCP), with which torch's own `FileSystemReader` reads.

It holds the layout as a pickle with one object per chunk.  For a 70B model on 512 ranks, it takes 25 s and 2 GB to
build; a training process would hold Python's interpreter lock for much of that time.  So it is built only on request,
in a child process, which this module is:

    python -m trainer.checkpoint.torch_metadata < layout.json > .metadata

It is never read here.  A pickle can run code, and in one case a single flipped bit made loading allocate 20 GB.
"""

from __future__ import annotations

import pickle
import subprocess
import sys

import torch

from trainer.checkpoint.manifest import LAYOUT, read_file, read_manifest
from trainer.checkpoint.storage import Storage, write_files

TORCH_METADATA = ".metadata"


def add_torch_metadata(checkpoint: Storage) -> None:
    """Write the `.metadata` of a published checkpoint.  Raises Damaged, OSError or UserError."""
    layout = read_file(checkpoint, read_manifest(checkpoint), LAYOUT)
    write_files(checkpoint, {TORCH_METADATA: pickle_in_child(layout)})


def pickle_in_child(layout_json: bytes) -> bytes:
    """Return the `.metadata` for the content of a layout.json.  Raises OSError if the child process fails."""
    command = [sys.executable, "-m", "trainer.checkpoint.torch_metadata"]
    child = subprocess.run(command, input=layout_json, capture_output=True)
    if child.returncode:
        reason = child.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise OSError(f"{TORCH_METADATA} cannot be built: exit code {child.returncode}: {reason}")
    return child.stdout


def pickled_metadata(layout_json: bytes) -> bytes:
    """Return the `.metadata` for the content of a layout.json."""
    from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    from trainer.checkpoint.layout import layout_from_json, paths_from_json

    described: dict[str, BytesStorageMetadata | TensorStorageMetadata] = {}
    places = {}
    for key, stored in layout_from_json(layout_json).items():
        chunks = list(stored.chunks)
        if stored.is_object:
            described[key] = BytesStorageMetadata()
            places[MetadataIndex(key)] = _StorageInfo(chunks[0].file, chunks[0].start, chunks[0].length)
            continue
        described[key] = TensorStorageMetadata(
            TensorProperties(dtype=stored.dtype),
            torch.Size(stored.shape),
            [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in chunks],
        )
        for number, chunk in enumerate(chunks):
            index = MetadataIndex(key, torch.Size(chunk.offsets), number)
            places[index] = _StorageInfo(chunk.file, chunk.start, chunk.length)
    paths = paths_from_json(layout_json)
    metadata = Metadata(described, planner_data=paths, storage_data=places, storage_meta=StorageMeta())  # type: ignore[arg-type]
    metadata.version = CURRENT_DCP_VERSION
    return pickle.dumps(metadata)


if __name__ == "__main__":
    sys.stdout.buffer.write(pickled_metadata(sys.stdin.buffer.read()))
