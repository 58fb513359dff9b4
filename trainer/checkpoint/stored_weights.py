"""Reads weights from a checkpoint by name, any rows of them, in one process and without a process group."""

from __future__ import annotations

import json
import os
from contextlib import suppress

import torch

from trainer.checkpoint.blocks import Damaged
from trainer.checkpoint.layout import layout_from_json
from trainer.checkpoint.manifest import PREFIX, StoredBlocks, find_damage, name_of, read_file, read_manifest
from trainer.checkpoint.retention import best_step, newest_step
from trainer.checkpoint.storage import (
    COMMIT,
    LocalStorage,
    PinnedStorage,
    Storage,
    is_same_location,
    list_configured_folder,
    open_storage,
)
from trainer.checkpoint.tensors import read_rows
from trainer.config import stored_value
from trainer.config.location import CHECKPOINT_FILES
from trainer.config.run_paths import CONFIG, relocated, run_of_best
from trainer.errors import TrainingFailed, UserError, is_masked
from trainer.files import find_folder
from trainer.recipe import StoredTensors

_TRIES = 50
"""Attempts to open the newest checkpoint of a live run, if each one is pruned before it can be opened."""
_AVERAGE = "ema.weights."
"""Prefix of the keys of averaged weights."""


class StoredWeights(StoredTensors):
    """The model's weights in one checkpoint, verified as they are read."""

    def __init__(self, storage: Storage, averaged: bool = False) -> None:
        """With `averaged`, trained weights are replaced by their average (`train.ema`), cast to the weights' dtype.

        All files stay open, so that they remain readable if a live run prunes the checkpoint meanwhile.

        Raises UserError if there is no checkpoint or it holds no average, TrainingFailed if it is damaged.
        """
        self.description = str(storage)
        try:
            self.manifest = read_manifest(storage)
            if isinstance(storage, LocalStorage) and not isinstance(storage, PinnedStorage):
                with suppress(FileNotFoundError):  # the check below reports which one is missing
                    storage = PinnedStorage(storage.path, [COMMIT, *self.manifest.files])
            self.storage = storage
            damage = find_damage(storage, self.manifest, "frames")
            if damage:
                raise Damaged("\n  ".join(damage))
            layout = layout_from_json(read_file(storage, self.manifest, "layout.json"))
            self._blocks = StoredBlocks(storage, self.manifest)
            self.config_yaml = read_file(storage, self.manifest, "config.yaml").decode()
            self.parts = json.loads(read_file(storage, self.manifest, "state.json"))["parts"]
        except FileNotFoundError as error:
            raise UserError(f"{storage}: no checkpoint here ({COMMIT} is missing)") from error
        except Damaged as error:
            raise TrainingFailed(f"the checkpoint {storage} is damaged:\n  {error}") from error
        self.layout = layout
        self._stored = {k.removeprefix("model."): stored for k, stored in layout.items() if k.startswith("model.")}
        if averaged and not self.has_average:
            raise UserError(f"{storage}: has no averaged weights: its run had train.ema=0")
        self._keys = {name: f"{_AVERAGE}{name}" for name in self._stored if averaged and f"{_AVERAGE}{name}" in layout}

    @property
    def has_average(self) -> bool:
        """True if the checkpoint also holds averaged weights."""
        return any(key.startswith(_AVERAGE) for key in self.layout)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return rows [start, stop) of a parameter, all by default.  Raises TrainingFailed if they are damaged."""
        if name in self._keys:
            return self.read_stored(self._keys[name], start, stop).to(self._stored[name].dtype)
        return self.read_stored(f"model.{name}", start, stop)

    def read_stored(self, key: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return rows of any tensor of the checkpoint by its full key."""
        try:
            return read_rows(self.storage, self.layout[key], self._blocks, start, stop)
        except (Damaged, OSError) as error:
            raise TrainingFailed(f"the checkpoint {self.storage} is damaged:\n  {error}") from error


def open_checkpoint(path: str | os.PathLike[str], averaged: bool = False) -> StoredWeights:
    """Open the weights of the checkpoint that `path` refers to (see `find_checkpoint`).

    If a live run prunes the newest checkpoint before it is open, try again with the one that is newest then.  Raises
    the exceptions of `find_checkpoint` and `StoredWeights`.
    """
    for _ in range(_TRIES):
        storage = find_checkpoint(path)
        try:
            return StoredWeights(storage, averaged)
        except (UserError, TrainingFailed):
            if COMMIT in storage.names() or is_same_location(str(storage), os.fspath(path)):
                raise
    fix = "set checkpoint.keep_last of that run higher"
    raise UserError(f"{path}: its checkpoints are deleted faster than they can be opened\n  to fix: {fix}")


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Return whether `path`, a folder or URL, is a single checkpoint, even if it is damaged or lacks its manifest."""
    return not CHECKPOINT_FILES.isdisjoint(list_configured_folder(open_storage(path)))


def find_checkpoints(path: str | os.PathLike[str]) -> Storage:
    """Return the folder of checkpoints at `path`, which is that folder itself or a run folder.  Raises UserError."""
    storage = open_storage(path)
    for folder in (storage, storage / "checkpoints", *_elsewhere(storage)):
        if any(name.startswith(PREFIX) for name in folder.names()) or folder.quarantined_names():
            return folder
    local = find_folder(path)
    rule = "has no checkpoints"
    if local is not None and not local.is_dir():
        rule = "is a file" if local.exists() else "no such folder"
    raise UserError(f"{path}: {rule}\n  to fix: give a run folder, or the folder in checkpoint.dir")


def find_checkpoint(path: str | os.PathLike[str]) -> Storage:
    """Return the checkpoint that `path` refers to.

    `path` is a checkpoint itself, a run folder (for its newest checkpoint; one saved while steps were skipped only if
    there is no other), or `RUN/best` (for the one with the best evaluation).  Raises UserError.

    The checkpoint may be damaged: only reading it will show that.
    """
    if is_checkpoint(path):
        return open_storage(path)
    if (run := run_of_best(os.fspath(path))) is not None:
        folder = find_checkpoints(run)
        best = best_step(folder)
        if best is None:
            raise UserError(f"{path}: none of the checkpoints in {folder} was evaluated when it was saved")
        return folder / name_of(best)
    folder = find_checkpoints(path)
    step = newest_step(folder)
    if step is None:
        raise UserError(f"{path}: has no checkpoint")
    return folder / name_of(step)


def _elsewhere(run: Storage) -> list[Storage]:
    """Return the checkpoint folder from a run's stored configuration, or an empty list if it sets none."""
    try:
        text = run.read(CONFIG).decode(errors="replace")
        stored, run_dir = stored_value(text, "checkpoint.dir"), stored_value(text, "run.dir")
    except (OSError, UserError):  # not a run folder
        return []
    if is_masked(stored):
        raise UserError(
            f"{run}: its checkpoints are at {stored}, whose credentials are not stored; give the complete URL"
        )
    if not (isinstance(stored, str) and stored):
        return []
    return [open_storage(relocated(stored, str(run_dir or run), str(run)))]
