"""Finds the checkpoint that a path refers to."""

from __future__ import annotations

import os

from trainer.checkpoint.manifest import CHECKPOINT_PREFIX, checkpoint_name
from trainer.checkpoint.retention import best_step, newest_step
from trainer.checkpoint.storage import Storage, list_configured_folder, open_storage
from trainer.config.changes import stored_value
from trainer.config.files import CONFIG, run_from_best_path
from trainer.config.schema import RUN_DIR_REFERENCE
from trainer.config.weights import CHECKPOINT_FILES
from trainer.errors import UserError
from trainer.files import local_path


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Return whether `path`, a folder or URL, is a single checkpoint, even if it is damaged or has no manifest."""
    return not CHECKPOINT_FILES.isdisjoint(list_configured_folder(open_storage(path)))


def find_checkpoints(path: str | os.PathLike[str]) -> Storage:
    """Return the folder of checkpoints at `path`, which is that folder or a run folder.  Raises UserError."""
    storage = open_storage(path)
    for folder in (storage, storage / "checkpoints", *_configured_folder(storage)):
        if any(name.startswith(CHECKPOINT_PREFIX) for name in folder.names()) or folder.quarantined_names():
            return folder
    local = local_path(path)
    rule = "has no checkpoints"
    if local is not None and not local.is_dir():
        rule = "is a file" if local.exists() else "no such folder"
    raise UserError(f"{path}: {rule}\n  to fix: give a run folder, or the folder in checkpoint.dir")


def find_checkpoint(path: str | os.PathLike[str]) -> Storage:
    """Return the checkpoint that `path` refers to.

    `path` is a checkpoint, a run folder, a folder of checkpoints, or `RUN/best`.  A folder refers to its newest
    checkpoint, or to one saved while steps were skipped only if there is no other.  `RUN/best` refers to the run's
    checkpoint with the best evaluation.

    Raises UserError if there is no such checkpoint.  Damage is detected only when the checkpoint is read.
    """
    if is_checkpoint(path):
        return open_storage(path)
    if (run := run_from_best_path(os.fspath(path))) is not None:
        folder = find_checkpoints(run)
        best = best_step(folder)
        if best is None:
            raise UserError(f"{path}: none of the checkpoints in {folder} was evaluated when it was saved")
        return folder / checkpoint_name(best)
    folder = find_checkpoints(path)
    step = newest_step(folder)
    if step is None:
        raise UserError(f"{path}: has no checkpoint")
    return folder / checkpoint_name(step)


def _configured_folder(run: Storage) -> list[Storage]:
    """Return the `checkpoint.dir` in a run's stored configuration as a list, which is empty if it is not set."""
    try:
        checkpoint_dir = stored_value(run.read(CONFIG).decode(errors="replace"), "checkpoint.dir")
    except (OSError, UserError):  # not a run folder
        return []
    if not (isinstance(checkpoint_dir, str) and checkpoint_dir):
        return []
    return [open_storage(checkpoint_dir.replace(RUN_DIR_REFERENCE, str(run)))]
