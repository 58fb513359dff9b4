"""Reads weights by name, whole or by rows, in one process and without a process group."""

from __future__ import annotations

import os
from contextlib import suppress

import torch

from trainer.checkpoint.data_files import read_rows
from trainer.checkpoint.find import find_checkpoint
from trainer.checkpoint.layout import layout_from_json, part_of_layout
from trainer.checkpoint.manifest import (
    CONFIG,
    LAYOUT,
    STATE,
    StoredBlocks,
    check_is_of_run,
    find_damage,
    read_file,
    read_manifest,
)
from trainer.checkpoint.state_parts import SharedState
from trainer.checkpoint.storage import (
    MANIFEST,
    Damaged,
    LocalStorage,
    PinnedStorage,
    Storage,
    is_same_location,
)
from trainer.errors import TrainingFailed, UserError
from trainer.model_spec import StoredTensors

_MAX_ATTEMPTS = 50
"""Maximum number of attempts to open the newest checkpoint of a live run, which may be pruning it."""
_AVERAGE_PREFIX = "ema.weights."
"""Prefix of the keys of averaged weights."""


class StoredWeights(StoredTensors):
    """The model's weights in one checkpoint, verified as they are read."""

    def __init__(self, storage: Storage, averaged: bool = False) -> None:
        """With `averaged`, trained weights are replaced by their average (`train.ema`), cast to the weights' dtype.

        The files of a local checkpoint are held open, as far as the limit on open files permits, so that they remain
        readable even if a live run prunes the checkpoint.

        Raises UserError if there is no checkpoint or it has no average, TrainingFailed if it is damaged.
        """
        self.description = str(storage)
        try:
            self.manifest = read_manifest(storage)
            if isinstance(storage, LocalStorage) and not isinstance(storage, PinnedStorage):
                with suppress(FileNotFoundError):  # the check below reports which one is missing
                    storage = PinnedStorage(storage.path, [MANIFEST, *self.manifest.files])
            self.storage = storage
            damage = find_damage(storage, self.manifest, "metadata")
            if damage:
                raise Damaged("\n  ".join(damage))
            check_is_of_run(storage, self.manifest)
            layout = layout_from_json(read_file(storage, self.manifest, LAYOUT))
            self._blocks = StoredBlocks(storage, self.manifest)
            self.config_yaml = read_file(storage, self.manifest, CONFIG).decode()
            self.parts = SharedState.from_json(read_file(storage, self.manifest, STATE)).parts
        except FileNotFoundError as error:
            raise UserError(f"{storage}: no checkpoint here ({MANIFEST} is missing)") from error
        except Damaged as error:
            raise TrainingFailed(f"the checkpoint {storage} is damaged:\n  {error}") from error
        self.layout = layout
        self._stored = part_of_layout(layout, "model")
        if averaged and not any(key.startswith(_AVERAGE_PREFIX) for key in layout):
            raise UserError(f"{storage}: has no averaged weights: its run had train.ema=0")
        self._keys = {
            name: f"{_AVERAGE_PREFIX}{name}"
            for name in self._stored
            if averaged and f"{_AVERAGE_PREFIX}{name}" in layout
        }

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return rows [start, stop) of a parameter, all by default.  Raises TrainingFailed if they are damaged."""
        if name in self._keys:
            return self.read_stored(self._keys[name], start, stop).to(self.dtypes[name])
        return self.read_stored(f"model.{name}", start, stop)

    def read_stored(self, key: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return rows [start, stop) of any tensor of the checkpoint, by its full key.  Raises TrainingFailed."""
        try:
            return read_rows(self.storage, self.layout[key], self._blocks, start, stop)
        except (Damaged, OSError) as error:
            raise TrainingFailed(f"the checkpoint {self.storage} is damaged:\n  {error}") from error


def open_checkpoint(path: str | os.PathLike[str], averaged: bool = False) -> StoredWeights:
    """Open the weights of the checkpoint that `path` refers to (see `find_checkpoint`).

    If a live run prunes the newest checkpoint before it is open, try again with the one that is then newest.  Raises
    the exceptions of `find_checkpoint` and `StoredWeights`.
    """
    for _ in range(_MAX_ATTEMPTS):
        storage = find_checkpoint(path)
        try:
            return StoredWeights(storage, averaged)
        except (UserError, TrainingFailed):
            if MANIFEST in storage.names() or is_same_location(str(storage), os.fspath(path)):
                raise
    fix = "set checkpoint.keep_last of that run higher"
    raise UserError(f"{path}: its checkpoints are deleted faster than they can be opened\n  to fix: {fix}")
