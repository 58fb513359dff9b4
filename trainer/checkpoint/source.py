"""A checkpoint as a source of weights: any rows by name, in one process, without a process group."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress

import torch

from trainer.checkpoint.blocks import Damaged
from trainer.checkpoint.keeping import best_step, newest_step
from trainer.checkpoint.layout import layout_from_json
from trainer.checkpoint.manifest import PREFIX, StoredBlocks, find_damage, name_of, read_file, read_manifest
from trainer.checkpoint.place import (
    COMMIT,
    HeldPlace,
    LocalPlace,
    Place,
    find_place,
    is_same_place,
    names_at_first,
)
from trainer.checkpoint.tensors import read_rows
from trainer.config import stored_value
from trainer.config.run_paths import CONFIG, relocated, run_of_best
from trainer.errors import TrainingFailed, UserError, is_masked
from trainer.files import find_folder

_TRIES = 50
"""How often the newest checkpoint of a run is looked for, if each is pruned before it can be opened."""
_AVERAGE = "ema.weights."
"""What the keys of averaged weights begin with."""


class StoredWeights:
    """The model's weights in one checkpoint.  What is read is checked."""

    def __init__(self, place: Place, averaged: bool = False) -> None:
        """With `averaged` the average of those that were trained (`train.ema`) is read in their place, in their dtype.

        All files stay open, so that they can be read even if a run that is training prunes the checkpoint meanwhile.

        Raises UserError if there is no checkpoint, or no average in it; TrainingFailed if it is damaged.
        """
        self.description = str(place)
        try:
            self.manifest = read_manifest(place)
            if isinstance(place, LocalPlace) and not isinstance(place, HeldPlace):
                with suppress(FileNotFoundError):  # which one is missing is found out below
                    place = HeldPlace(place.path, [COMMIT, *self.manifest.files])
            self.place = place
            damage = find_damage(place, self.manifest, "frames")
            if damage:
                raise Damaged("\n  ".join(damage))
            layout = layout_from_json(read_file(place, self.manifest, "layout.json"))
            self._blocks = StoredBlocks(place, self.manifest)
            self.config_yaml = read_file(place, self.manifest, "config.yaml").decode()
            self.parts = json.loads(read_file(place, self.manifest, "state.json"))["parts"]
        except FileNotFoundError as error:
            raise UserError(f"{place}: no checkpoint here ({COMMIT} is missing)") from error
        except Damaged as error:
            raise TrainingFailed(f"the checkpoint {place} is damaged:\n  {error}") from error
        self.layout = layout
        self._stored = {k.removeprefix("model."): stored for k, stored in layout.items() if k.startswith("model.")}
        if averaged and not self.has_average:
            raise UserError(f"{place}: has no averaged weights: its run had train.ema=0")
        self._keys = {name: f"{_AVERAGE}{name}" for name in self._stored if averaged and f"{_AVERAGE}{name}" in layout}

    @property
    def has_average(self) -> bool:
        """True if there is an average of the weights beside them."""
        return any(key.startswith(_AVERAGE) for key in self.layout)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: stored.shape for name, stored in self._stored.items()}

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        return {name: stored.dtype for name, stored in self._stored.items()}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return rows [start, stop) of a parameter, or all of it.  Raises TrainingFailed if they are damaged."""
        if name in self._keys:
            return self.read_stored(self._keys[name], start, stop).to(self._stored[name].dtype)
        return self.read_stored(f"model.{name}", start, stop)

    def read_stored(self, key: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return rows of any tensor of the checkpoint, by its whole key."""
        try:
            return read_rows(self.place, self.layout[key], self._blocks, start, stop)
        except (Damaged, OSError) as error:
            raise TrainingFailed(f"the checkpoint {self.place} is damaged:\n  {error}") from error


def open_checkpoint(path: str | os.PathLike[str], averaged: bool = False) -> StoredWeights:
    """Return the weights of the checkpoint that `path` means (see `find_checkpoint`), opened for reading.

    If a run that is training prunes the newest one before it is open, the next one is taken.  Raises what
    `find_checkpoint` and `StoredWeights` raise.
    """
    for _ in range(_TRIES):
        place = find_checkpoint(path)
        try:
            return StoredWeights(place, averaged)
        except (UserError, TrainingFailed):
            if COMMIT in place.names() or is_same_place(str(place), os.fspath(path)):
                raise
    fix = "set checkpoint.keep_last of that run higher"
    raise UserError(f"{path}: its checkpoints are deleted faster than they can be opened\n  to fix: {fix}")


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Return whether `path`, a folder or URL, is one checkpoint.  It may be damaged, its manifest even missing."""
    return bool({COMMIT, "state.json", "layout.json"} & set(names_at_first(find_place(path))))


def find_checkpoints(path: str | os.PathLike[str]) -> Place:
    """Return the folder of checkpoints that `path` means: one itself, or that of a run.  Raises UserError."""
    place = find_place(path)
    for folder in (place, place / "checkpoints", *_elsewhere(place)):
        if any(name.startswith(PREFIX) for name in folder.names()) or folder.names_aside():
            return folder
    local = find_folder(path)
    rule = "has no checkpoints"
    if local is not None and not local.is_dir():
        rule = "is a file" if local.exists() else "no such folder"
    raise UserError(f"{path}: {rule}\n  to fix: give a run folder, or the folder in checkpoint.dir")


def find_checkpoint(path: str | os.PathLike[str]) -> Place:
    """Return the checkpoint that `path` means: one itself, the newest of a run's folder (one that was saved while
    steps were skipped only if there is no other), or with `RUN/best` the one whose evaluation was the best.  Raises
    UserError.

    It may be damaged: reading it will tell.
    """
    if is_checkpoint(path):
        return find_place(path)
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


def _elsewhere(run: Place) -> list[Place]:
    """Return the folder that the configuration of a run names for its checkpoints, if it names one."""
    try:
        text = run.read(CONFIG).decode(errors="replace")
        stored, run_dir = stored_value(text, "checkpoint.dir"), stored_value(text, "run.dir")
    except (OSError, UserError):  # no run's folder
        return []
    if is_masked(stored):
        raise UserError(
            f"{run}: its checkpoints are at {stored}, whose credentials are not stored; give the complete URL"
        )
    if not (isinstance(stored, str) and stored):
        return []
    return [find_place(relocated(stored, str(run_dir or run), str(run)))]
