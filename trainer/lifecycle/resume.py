"""Selects and loads the checkpoint that a run resumes from, and moves aside the files that the run supersedes.

`EarlierAttempts` compares the records in the run folder with the run's checkpoints, to detect missing checkpoints and
copied folders.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from trainer.checkpoint.compare import IncompatibleCheckpoint
from trainer.checkpoint.find import find_checkpoint
from trainer.checkpoint.manifest import checkpoint_name, list_steps
from trainer.checkpoint.restore import CheckpointReader, RestoredCheckpoint, RestoreRequest
from trainer.checkpoint.saves import Checkpoints
from trainer.checkpoint.storage import SUPERSEDED, is_same_location, open_storage
from trainer.config import RunConfig, stored_value
from trainer.config.passes import is_another_run, shared_checkpoints_rule
from trainer.distributed.world import World
from trainer.errors import UserError, setting_error
from trainer.lifecycle.folder import RECORD_FILES, RunFolder, read_status
from trainer.lifecycle.state import TrainState
from trainer.metrics.record import read_kinds
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
        self.earlier_attempts = EarlierAttempts(folder)
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

    @property
    def _reader(self) -> CheckpointReader:
        """The reader of the run's checkpoint folder, which may move."""
        return CheckpointReader(self._checkpoints.storage, self._world, self._config.checkpoint.verify == "full")

    def load(self, state: TrainState, path: str | Path | None, is_running: bool) -> RestoredCheckpoint | None:
        """Restore `state` from `path` or, if `path` is None, from the checkpoint that `checkpoint.resume` selects.

        is_running: whether training has begun, so that this load is a rollback.

        Returns None for a fresh start.  Raises UserError if there is no checkpoint at `path`, if it is incompatible, or
        if the folder's records do not match its checkpoints (`EarlierAttempts`), and TrainingFailed if all are damaged.
        If the message cannot show all differences, it names a file that does.
        """
        self._world.agreed(self.earlier_attempts.check_checkpoint_dir)
        restored = self._restore(state, str(path) if path is not None else None, is_running)
        if restored is None:
            return None
        self.step, self.path, self.changed = state.step, str(restored.path), list(restored.changed)
        own_path = f"{self._checkpoints.storage}/{checkpoint_name(restored.manifest.step)}"
        self.is_own_checkpoint = self._world.broadcast(is_same_location(restored.path, own_path))
        if not self.is_own_checkpoint or self._world.broadcast(self.earlier_attempts.is_copied(restored)):
            self._metrics.tracking_id = None  # it belongs to the other run
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
            with self._saving_differences():
                restored = None if is_empty else reader.restore(request)
            if self.step is None and not is_running:
                self._world.agreed(lambda: self.earlier_attempts.check(restored))
            return restored
        # Rank 0 decides, because the newest checkpoint of a live run may change at any moment.
        checkpoint_path = self._world.agreed(lambda: str(find_checkpoint(resume)) if self._world.is_main else "")
        with self._saving_differences():
            return reader.load(open_storage(self._world.broadcast(checkpoint_path)), request)

    @contextmanager
    def _saving_differences(self) -> Iterator[None]:
        """If the block finds an incompatible checkpoint with too many differences to print, write them to a file.

        This is a temporary file, one per run folder, because a refused start must not change the folder itself.
        """
        try:
            yield
        except IncompatibleCheckpoint as error:
            if error.is_short or not self._world.is_main:
                raise
            text = "\n".join([str(error), "", "all differences:", *error.lines, ""])
            raise UserError(error.message(_write_temporary(self._folder.path, text))) from error

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
        if not is_running and self.earlier_attempts.copied_from():
            self._folder.move_aside(["wandb", "trackers.json"])  # they identify the original run in its trackers


def _write_temporary(folder: Path, text: str) -> str:
    """Write text to the temporary file for the run in `folder`; return the file's path, or "" if writing fails."""
    digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]
    path = os.path.join(gettempdir(), f"meshtrainer-{os.getuid()}-{digest}.txt")
    with suppress(OSError):
        # Other users share the folder: do not follow their links, and do not let them read the file.
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "w") as file:
            file.write(text)
        return path
    return ""


# ---------------------------------------------------------------------------------------------------------------
# Earlier attempts: the records in the folder, compared with its checkpoints


METRICS, STATUS = "metrics.jsonl", "status.json"


@dataclass(frozen=True)
class RecordedProgress:
    """The progress of earlier attempts, according to their records."""

    newest_saved: int | None = None
    """Step of the newest checkpoint that was published or resumed from; None if there is no record of one."""
    source_file: str = ""
    """Name of the file that mentions that checkpoint."""


def read_recorded_progress(folder: Path) -> RecordedProgress:
    """Return the progress recorded in a run folder; empty if there are no records."""
    progress = RecordedProgress()
    with contextlib.suppress(OSError):
        for record in read_kinds(folder / METRICS, "start", "checkpoint"):
            if record["kind"] == "start":  # newer checkpoints were missing, or are superseded
                progress = RecordedProgress(_step(record.get("resumed_step")), METRICS)
            else:
                progress = RecordedProgress(max(progress.newest_saved or 0, _step(record.get("step")) or 0), METRICS)
    status = read_status(folder)
    step = _step(status.get("step"))
    # An orderly end and a resume imply that their step was saved.  A custom loop ends as "closed" even without a save.
    is_saved = status.get("state") in ("finished", "stopped", "running") and status.get("reason") != "closed"
    if progress.newest_saved is None and step and is_saved:
        return RecordedProgress(step, STATUS)
    return progress


def _step(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


class EarlierAttempts:
    """Earlier attempts of the run in a folder, and where their checkpoints should be (`checkpoint_dir`).

    A run whose checkpoints are gone must not silently start over, and a copy of a run must not touch the checkpoints of
    the original.  So before anything is written, rank 0 compares the records in the folder with the checkpoints.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder, self._config = folder, folder.config
        self.checkpoint_dir = self._config.checkpoint.dir or str(folder.path / "checkpoints")

    def check_checkpoint_dir(self) -> None:
        """Raise UserError if this folder is a copy of a run and would use the checkpoints of the original."""
        if not self._folder.is_main or not (original := self.copied_from()):
            return
        stored_dir = stored_value(self._folder.previous_config or "", "checkpoint.dir")
        if is_same_location(self.checkpoint_dir, str(stored_dir) if stored_dir else f"{original}/checkpoints"):
            rule = shared_checkpoints_rule(original, self.checkpoint_dir, str(self._folder.path))
            raise setting_error("checkpoint.dir", self._config.checkpoint.dir, rule)

    def check(self, restored: RestoredCheckpoint | None) -> None:
        """Raise UserError if the run's checkpoints are all gone; warn if only the newest one is missing.

        restored: the checkpoint that `checkpoint.resume=auto` has selected.
        """
        if not self._folder.is_main:
            return
        progress = read_recorded_progress(self._folder.path)
        if progress.newest_saved is None:
            return
        if restored is None:
            raise UserError(self._no_checkpoint_message(progress))
        missing = checkpoint_name(progress.newest_saved)
        if restored.manifest.step >= progress.newest_saved or missing in restored.damaged:
            return
        storage = open_storage(self.checkpoint_dir)
        moved = [path.name for path in self._folder.path.glob(f"previous_*/{missing}")]
        # It is not missing if the run itself has quarantined or moved it.
        if not storage.is_published(missing) and not any(
            missing in name for name in [*moved, *storage.quarantined_names()]
        ):
            warn(
                f"{progress.source_file} mentions a checkpoint of step {progress.newest_saved}, but the newest in "
                f"{self.checkpoint_dir} is from step {restored.manifest.step}: resuming from there"
            )

    def is_copied(self, restored: RestoredCheckpoint) -> bool:
        """Return whether the checkpoint was written by another run that still exists."""
        return _is_of_another_run(stored_value(restored.config_yaml, "run.dir"), self._folder.path)

    def copied_from(self) -> str | None:
        """Return the folder of the run that this one was copied from, or None."""
        stored = stored_value(self._folder.previous_config or "", "run.dir")
        return str(stored) if _is_of_another_run(stored, self._folder.path) else None

    def _no_checkpoint_message(self, progress: RecordedProgress) -> str:
        lines = [
            f"checkpoint.resume=auto: there is no checkpoint in {self.checkpoint_dir}, but this run had one",
            f"{progress.source_file} in {self._folder.path} mentions a checkpoint of step {progress.newest_saved}",
            *self._describe_other_checkpoints(),
            "if the checkpoints are elsewhere, or on a disk that is not mounted: mount it, or set checkpoint.dir=WHERE",
            "to resume from a specific one: checkpoint.resume=PATH",
            "to start over: checkpoint.resume=none, which moves the files here to a folder previous_NNN",
            "to train a new run instead: run.name=NAME",
        ]
        return "\n  ".join(lines)

    def _describe_other_checkpoints(self) -> Iterator[str]:
        run = self._folder.path
        previous_dir = stored_value(self._folder.previous_config or "", "checkpoint.dir")
        if previous_dir and not is_same_location(str(previous_dir), self.checkpoint_dir):
            yield f"the previous attempt stored them in checkpoint.dir={previous_dir}"
        for folder in (run / "checkpoints", run, *sorted(run.glob("previous_*"))):
            steps = [] if is_same_location(str(folder), self.checkpoint_dir) else list_steps(open_storage(folder))
            if steps:
                yield f"{folder} holds a checkpoint of step {steps[-1]}"


def _is_of_another_run(stored_dir: object, here: Path) -> bool:
    return isinstance(stored_dir, str) and is_another_run(stored_dir, here)
