"""Selects and loads the checkpoint that a run resumes from, and moves aside the files that the run supersedes."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from pathlib import Path

from trainer.checkpoint.find import find_checkpoint
from trainer.checkpoint.manifest import checkpoint_name, list_steps
from trainer.checkpoint.restore import CheckpointReader, RestoredCheckpoint, RestoreRequest
from trainer.checkpoint.saves import Checkpoints
from trainer.checkpoint.storage import SUPERSEDED, is_same_location, open_storage
from trainer.config.changes import stored_value
from trainer.config.files import is_another_run
from trainer.config.schema import RUN_DIR_REFERENCE, RunConfig
from trainer.distributed.world import World
from trainer.errors import UserError, setting_error
from trainer.files import local_path
from trainer.lifecycle.folder import RECORD_FILES, RunFolder
from trainer.lifecycle.state import TrainState
from trainer.metrics.record import read_records
from trainer.metrics.writers import Metrics, warn


class Resume:
    """Restores the state from the checkpoint that `checkpoint.resume` selects, or from a given checkpoint.

    All public methods are collective.
    """

    def __init__(
        self, config: RunConfig, world: World, checkpoints: Checkpoints, folder: RunFolder, metrics: Metrics
    ) -> None:
        self._config, self._world = config, world
        self._checkpoints, self._folder, self._metrics = checkpoints, folder, metrics
        self._reader = CheckpointReader(checkpoints.storage, world, config.checkpoint.verify == "full")
        self.step: int | None = None
        """Step of the checkpoint that was loaded last; None for a fresh start."""
        self.path = ""
        """Path or URL of the checkpoint that was loaded last; empty for a fresh start."""
        self.is_own_checkpoint = False
        """True if the checkpoint that was loaded last lies in this run's checkpoint folder."""
        self.changed: list[str] = []
        """Permitted differences between this run's settings and those in the loaded checkpoint, one line each."""
        self.seconds = 0.0
        """Total time in seconds of all loads so far, measured by the Trainer."""
        self._must_supersede = False
        """True from a rollback during training until the later checkpoints have been superseded."""

    def load(self, state: TrainState, path: str | Path | None, is_running: bool) -> RestoredCheckpoint | None:
        """Restore `state` from `path` or, if `path` is None, from the checkpoint that `checkpoint.resume` selects.

        is_running: whether training has begun, so that this load is a rollback.

        Returns None for a fresh start.  Raises UserError if there is no checkpoint at `path`, if it is incompatible, or
        if the run's checkpoints are gone or are those of another run, and TrainingFailed if all are damaged.
        """
        if not is_running:
            self._world.agreed(self._check_not_shared)
        restored = self._restore(state, str(path) if path is not None else None, is_running)
        if restored is None:
            return None
        self.step, self.path, self.changed = state.step, str(restored.path), list(restored.changed)
        own_path = f"{self._checkpoints.storage}/{checkpoint_name(restored.manifest.step)}"
        self.is_own_checkpoint = self._world.broadcast(is_same_location(restored.path, own_path))
        self._must_supersede = is_running
        if self._world.is_main:
            for name, damage in restored.damaged.items():
                details = "\n".join(f"  {line}" for line in damage)
                warn(f"checkpoint {name} is damaged and was quarantined:\n{details}")
            for warning in restored.warnings:
                warn(f"{restored.path}: {warning}")
        return restored

    def _restore(self, state: TrainState, path: str | None, is_running: bool) -> RestoredCheckpoint | None:
        resume = path or self._config.checkpoint.resume
        if path is None and self._is_restart(resume):
            resume = "auto"
        allowed = frozenset(self._config.checkpoint.allow_changes)
        if allowed & {"optim", "optim.name", "state.model"}:
            allowed |= {"state.optimizer"}  # if the moments do not match, start with fresh ones
        request = RestoreRequest(state, self._config, allowed, verify_first=is_running)
        reader = self._reader
        if resume == "none":
            return None
        if resume == "auto":
            is_empty = self._world.broadcast(self._world.agreed(lambda: reader.is_empty))
            restored = None if is_empty else reader.restore(request)
            if restored is None and self.step is None and not is_running:
                self._world.agreed(self._check_not_lost)
            return restored
        # Rank 0 decides, because the newest checkpoint of a live run may change at any moment.
        checkpoint_path = self._world.agreed(lambda: str(find_checkpoint(resume)) if self._world.is_main else "")
        return reader.load(open_storage(self._world.broadcast(checkpoint_path)), request)

    def _is_restart(self, resume: str) -> bool:
        """Return whether the newest checkpoint of this run was written by an attempt with the same `resume` setting.

        If so, that attempt was stopped or killed, and this one continues from its checkpoint.  With `none`, this also
        requires that the launcher has restarted the same job.
        """
        if resume == "auto":
            return False

        def is_from_same_start() -> bool:
            newest = self._reader.newest_run_info() if self._world.is_main else None
            if newest is None or stored_value(newest.config_yaml, "checkpoint.resume") != resume:
                return False
            env = self._world.env
            is_same_job = newest.job != "" and newest.job == env.job
            return resume != "none" or (is_same_job and newest.restarts < env.num_restarts)

        is_restart: bool = self._world.broadcast(self._world.agreed(is_from_same_start))
        if is_restart:
            self._metrics.print(
                f"checkpoint.resume={resume}: {self._config.run.dir} has already continued from there, and "
                "continues again; to start from that checkpoint again, use another run.dir"
            )
        return is_restart

    def _check_not_shared(self) -> None:
        """Raise UserError if the run's checkpoints would be among those of another run that still exists."""
        if not self._world.is_main or self._reader.is_empty:
            return
        newest, storage = self._reader.newest_run_info(), str(self._checkpoints.storage)
        if newest is None or self._is_inside(storage) or not is_another_run(newest.run_dir, self._folder.path):
            return
        rule = (
            f"holds the checkpoints of the run in {newest.run_dir}; a run needs its own\n"
            "  give checkpoint.dir=WHERE (null: in run.dir) and, to continue from the newest checkpoint there, "
            f"checkpoint.resume={storage}\n  to resume that run: run.dir={newest.run_dir}"
        )
        raise setting_error("checkpoint.dir", self._config.checkpoint.dir, rule)

    def _check_not_lost(self) -> None:
        """Raise UserError if the run has no checkpoint, but had one according to its records."""
        step = _newest_recorded_save(self._folder.metrics) if self._world.is_main else None
        if step is None:
            return
        lines = [
            f"checkpoint.resume=auto: there is no checkpoint in {self._checkpoints.storage}, but this run had one",
            f"{self._folder.metrics} mentions a checkpoint of step {step}",
        ]
        stored_dir = stored_value(self._folder.previous_config or "", "checkpoint.dir")
        previous_dir = str(stored_dir or "").replace(RUN_DIR_REFERENCE, str(self._folder.path))
        if previous_dir and not is_same_location(previous_dir, str(self._checkpoints.storage)):
            lines.append(f"the previous attempt stored them in checkpoint.dir={previous_dir}")
        lines += [
            "if the checkpoints are elsewhere, or on a disk that is not mounted: mount it, or set checkpoint.dir=WHERE",
            "to resume from a specific one: checkpoint.resume=PATH",
            "to start over: checkpoint.resume=none, which moves the files here to a folder previous_NNN",
            "to train a new run instead: run.name=NAME",
        ]
        raise UserError("\n  ".join(lines))

    def _is_inside(self, storage: str) -> bool:
        """Return whether a checkpoint folder is really in the run folder, with links resolved."""
        folder = local_path(storage)
        return folder is not None and folder.resolve().is_relative_to(self._folder.path.resolve())

    def _is_copy(self) -> bool:
        """Return whether the run's folder was copied from that of another run, according to its records."""
        with suppress(OSError):
            starts = [record for _, record in read_records(self._folder.metrics) if record.get("kind") == "start"]
            return bool(starts) and is_another_run(str(starts[-1].get("run_dir", "")), self._folder.path)
        return False

    def supersede_if_rolled_back(self, step: int) -> None:
        """If a checkpoint was loaded during training, supersede later checkpoints, and metrics after `step`."""
        if self._must_supersede:
            self._must_supersede = False
            self.supersede(is_running=True)
            self._world.agreed(lambda: self._metrics.go_back(step))

    def supersede(self, is_running: bool = False) -> None:
        """Move aside the files that this attempt supersedes, and delete partial files of killed attempts.

        A run that starts over (`checkpoint.resume=none`) or from an older checkpoint supersedes its later checkpoints:
        otherwise `auto` would resume from them.  A run that resumes from a checkpoint elsewhere supersedes all of its
        own checkpoints and, if there are any, its records.
        """
        work = partial(self._supersede, is_running)
        if not is_running:
            work = partial(self._folder.run_reporting_errors, work)
        self._world.agreed(lambda: work() if self._world.is_main else None)

    def _supersede(self, is_running: bool) -> None:
        self._checkpoints.clean()
        self._folder.clean()
        is_fresh = not is_running and (self.step is None or not self.is_own_checkpoint)
        step = -1 if is_fresh or self.step is None else self.step
        later = [checkpoint_name(later) for later in list_steps(self._checkpoints.storage) if later > step]
        has_past = bool(later)
        if self._config.checkpoint.dir is not None:
            for name in later:
                self._checkpoints.storage.quarantine(name, SUPERSEDED)
            later = []
        is_requested = self._config.checkpoint.resume == "none" and self.step is None
        starts_over = is_fresh and (is_requested or has_past)
        names = [f"checkpoints/{name}" for name in later]
        moved_to = self._folder.move_aside(names + list(RECORD_FILES if starts_over else ()))
        if moved_to is not None:
            subject = "earlier run" if starts_over else f"checkpoints after step {step}"
            self._metrics.print(f"moved the {subject} to {moved_to}")
        if not is_running and self._is_copy():
            self._folder.move_aside(["wandb"])  # it identifies the original run


def _newest_recorded_save(metrics: Path) -> int | None:
    """Return the step of the newest checkpoint in a run's records, which was saved or resumed from; None for none."""
    newest: int | None = None
    with suppress(OSError):
        for _, record in read_records(metrics):
            if record.get("kind") == "start":  # newer checkpoints were missing, or are superseded
                resumed_step = record.get("resumed_step")
                newest = resumed_step if isinstance(resumed_step, int) else None
            elif record.get("kind") == "checkpoint":
                newest = max(newest or 0, record["step"])
    return newest
