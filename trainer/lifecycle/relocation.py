"""Relocation: saves a run elsewhere after one of its folders was deleted, renamed or replaced.

If training continued, its results would be lost.  If the folder were recreated, its files would be where somebody has
just deleted them or another run has started.  So the run ends after the current step.  Its state, metrics and status go
to the new name of a renamed folder, otherwise to a new folder next to the old one, where the run can be resumed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from trainer.checkpoint.storage import open_storage
from trainer.checkpoint.writer import Checkpoints
from trainer.distributed.world import World
from trainer.errors import TrainingFailed, UserError, as_typed
from trainer.lifecycle.folder import FolderLoss, RunFolder
from trainer.metrics.sinks import Metrics

Result = TypeVar("Result")


class Relocation:
    """Moves a run after it has lost a folder.  All methods are collective."""

    def __init__(self, world: World, folder: RunFolder, checkpoints: Checkpoints, metrics: Metrics) -> None:
        self._world, self._folder, self._checkpoints, self._metrics = world, folder, checkpoints, metrics
        self.has_moved = False
        """True on all ranks once the run writes elsewhere."""

    def check(self) -> bool:
        """Check whether a folder of the run is lost; if so, redirect all further writes to another folder.

        Returns whether a folder is lost.  Raises on all ranks if no other folder can be created.  One broadcast if none
        is lost.
        """
        if self.has_moved:
            return True
        loss = self._world.broadcast(self._folder.find_loss())
        if loss is None:
            return False
        self._agreed(loss, self._move_files)
        self._folder.adopt(*self._world.broadcast((self._folder.path, self._folder.checkpoint_dir)))
        storage = self._agreed(
            loss, lambda: open_storage(self._folder.checkpoint_dir or self._folder.path / "checkpoints")
        )
        self._checkpoints.move_to(storage)
        self.has_moved = True
        return True

    def _move_files(self) -> None:
        if self._world.is_main:
            self._folder.move()
            self._metrics.move_to(self._folder.path)

    def _agreed(self, loss: FolderLoss, work: Callable[[], Result]) -> Result:
        """Return the result of `work()`; if it fails, raise TrainingFailed on that rank, PeerFailed on others."""

        def attempt() -> Result:
            try:
                return work()
            except (OSError, UserError) as error:
                raise TrainingFailed(f"{loss}\n  its state cannot be saved elsewhere: {error}") from error

        return self._world.agreed(attempt)

    def final_error(self, outcome: str) -> TrainingFailed:
        """Return the error that ends the run: the cause, the location of the files, and how to continue.

        outcome: the location of the state, such as "the state of step 7 is in runs/a-rescued/checkpoints".
        """
        folder, config = self._folder, self._folder.config
        configured = {"run.dir": config.run_dir, "checkpoint.dir": config.checkpoint.dir}
        current = {"run.dir": folder.path, "checkpoint.dir": folder.checkpoint_dir}
        settings = " ".join(as_typed(key, current[key]) for key in current if current[key] != configured[key])
        lines = [str(folder.loss), outcome]
        if "run.dir=" in settings:
            lines.append(f"its metrics and its status are in {folder.path}")
        lines.append(f"to continue: the same command with {settings}")
        return TrainingFailed(self._world.broadcast("\n  ".join(lines)))
