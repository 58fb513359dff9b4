"""Saves, publishes, finds, loads and prunes checkpoints, through torch.distributed.checkpoint (DCP).

A checkpoint is a folder such as `step_00000100` that is published atomically: it is complete or it does not exist.

For any code that uses DCP:

    CheckedWriter    writes a checkpoint with checksums and publishes it atomically, for `dcp.save` and `dcp.async_save`
    VerifiedReader   reads one and verifies what it reads, for `dcp.load`

For a run:

    saver            decides when to save, retries failed saves, quarantines suspect checkpoints
    saves            performs one save: the order of what DCP calls is in its docstring
    restore          restores the newest good checkpoint
    weights          reads weights by name, in one process

Where to read what happens in a save, in this order:

    snapshot         collects the state: tensors, JSON values, checksums for comparing the ranks
    planner          which rank writes and reads what, as DCP's planners
    stager           the copy in host memory, as DCP's stagers
    checked_writer   folder, files, manifest and publishing, as DCP's StorageWriter; run_writer adds a run's own files
    data_files       the data file of a rank, written and read

They use, lowest first:

    storage          file systems and object stores, each with its own way to publish atomically; files with checksums
    manifest         the names of checkpoints; the list of a checkpoint's files, used to verify them
    retention        which checkpoints to keep, and whether they will fit on the disk
    interval         the save interval that loses the least time
    layout           where the bytes of each tensor are in the files; which rank writes and reads them
    messages         what ranks tell each other through DCP
    state_parts      the interface for a part of the state; splits a state dict into tensors and JSON, without pickle
    compare          compares a checkpoint with the state that is to be restored
    find             finds the checkpoint that a path refers to
    torch_metadata   the `.metadata` for torch's own reader, on request

The first four of these do not import torch, because commands that only look at runs start without it.  The package
accesses the parts of a `TrainState` only through the interface in `state_parts`, and does not depend on any particular
model.

The command that lists and compares checkpoints, `python -m trainer.checkpoints`, is in `trainer/checkpoints.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.checkpoint.checked_writer import CheckedWriter as CheckedWriter
    from trainer.checkpoint.verified_reader import VerifiedReader as VerifiedReader

__all__ = ["CheckedWriter", "VerifiedReader"]


def __getattr__(name: str) -> Any:
    # Imported on first use, because most of this package does not need torch.distributed.checkpoint.
    if name == "CheckedWriter":
        from trainer.checkpoint.checked_writer import CheckedWriter

        return CheckedWriter
    if name == "VerifiedReader":
        from trainer.checkpoint.verified_reader import VerifiedReader

        return VerifiedReader
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
