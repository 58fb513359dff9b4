"""Compares the records in a run folder with its checkpoints, so that missing checkpoints are noticed.

A run whose checkpoints have disappeared must not silently start over, and a copy of a run must not touch the
checkpoints of the original.  This runs on rank 0 before anything is written.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.checkpoint.manifest import name_of
from trainer.checkpoint.reader import RestoredCheckpoint
from trainer.checkpoint.retention import list_steps
from trainer.checkpoint.storage import is_same_location, open_storage
from trainer.config import stored_value
from trainer.config.resolve import is_another_run, shared_checkpoints_rule
from trainer.errors import UserError, masked, setting_error
from trainer.lifecycle.folder import RunFolder
from trainer.metrics.record import read_kinds
from trainer.metrics.sinks import warn

METRICS, STATUS = "metrics.jsonl", "status.json"


@dataclass(frozen=True)
class RecordedProgress:
    """The progress of earlier attempts according to their records."""

    newest_saved: int | None = None
    """The step of the newest checkpoint that was published or resumed from; None if there never was one."""
    source_file: str = ""
    """The file that mentions that checkpoint."""


def read_recorded_progress(folder: Path) -> RecordedProgress:
    """Return the progress that a run folder records; empty if there are no records."""
    past = RecordedProgress()
    with contextlib.suppress(OSError):
        for record in read_kinds(folder / METRICS, "start", "checkpoint"):
            if record["kind"] == "start":  # newer checkpoints were gone by then, or are superseded
                past = RecordedProgress(_step(record.get("resumed_step")), METRICS)
            else:
                past = RecordedProgress(max(past.newest_saved or 0, _step(record.get("step")) or 0), METRICS)
    status = _read_status(folder)
    step = _step(status.get("step"))
    # If the run ended in order, or resumed at a step, that step was saved.  A custom loop ends as "closed" either way.
    is_saved = status.get("state") in ("finished", "stopped", "running") and status.get("reason") != "closed"
    if past.newest_saved is None and step and is_saved:
        return RecordedProgress(step, STATUS)
    return past


def _step(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _read_status(folder: Path) -> dict[str, Any]:
    try:
        status = json.loads((folder / STATUS).read_text())
    except (OSError, ValueError):
        return {}
    return status if isinstance(status, dict) else {}


class EarlierAttempts:
    """The earlier attempts of the run in a folder, whose checkpoints are expected in `checkpoint_dir`."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder, self._config = folder, folder.config
        self.checkpoint_dir = self._config.checkpoint.dir or str(folder.path / "checkpoints")

    def check_checkpoint_dir(self) -> None:
        """Raise UserError if this folder is a copy of a run and would use the checkpoints of the original."""
        if not self._folder.is_main or not (origin := self._copied_from()):
            return
        kept = stored_value(self._folder.previous_config or "", "checkpoint.dir")
        if is_same_location(str(masked(self.checkpoint_dir)), str(kept) if kept else f"{origin}/checkpoints"):
            rule = shared_checkpoints_rule(origin, self.checkpoint_dir, str(self._folder.path))
            raise setting_error("checkpoint.dir", self._config.checkpoint.dir, rule)

    def check(self, found: RestoredCheckpoint | None) -> None:
        """Raise UserError if the run had checkpoints and has none now; warn if only the newest one is missing.

        found: the checkpoint that `checkpoint.resume=auto` selected.
        """
        if not self._folder.is_main:
            return
        past = read_recorded_progress(self._folder.path)
        if past.newest_saved is None:
            return
        if found is None:
            raise UserError(self._nothing_found(past))
        missing = name_of(past.newest_saved)
        if found.manifest.step < past.newest_saved and missing not in found.damaged and not self._is_aside(missing):
            warn(
                f"{past.source_file} mentions a checkpoint of step {past.newest_saved}, but the newest in "
                f"{self.checkpoint_dir} is from step {found.manifest.step}: resuming from there"
            )

    def _is_aside(self, name: str) -> bool:
        """Return whether the run itself has quarantined or moved this checkpoint, or did not choose it."""
        aside = [path.name for path in self._folder.path.glob(f"previous_*/{name}")]
        storage = open_storage(self.checkpoint_dir)
        return storage.is_published(name) or any(name in one for one in [*aside, *storage.quarantined_names()])

    def is_copied(self, found: RestoredCheckpoint) -> bool:
        """Return whether the checkpoint was written by another run that still exists."""
        return _is_another(stored_value(found.config_yaml, "run.dir"), self._folder.path)

    def drop_wandb_identity(self) -> None:
        """If this folder is a copy, move aside the files that identify the original in Weights & Biases."""
        if self._folder.is_main and self._copied_from():
            self._folder.move_aside("wandb")

    def _copied_from(self) -> str | None:
        """Return the folder of the run that this one is a copy of, or None if it is not a copy."""
        stored = stored_value(self._folder.previous_config or "", "run.dir")
        return str(stored) if _is_another(stored, self._folder.path) else None

    def _nothing_found(self, past: RecordedProgress) -> str:
        lines = [
            f"checkpoint.resume=auto: there is no checkpoint in {self.checkpoint_dir}, but this run had one",
            f"{past.source_file} in {self._folder.path} mentions one of step {past.newest_saved}",
            *self._seen_elsewhere(),
            "if the checkpoints are elsewhere, or on a disk that is not mounted: mount it, or set checkpoint.dir=WHERE",
            "to resume from a specific one: checkpoint.resume=PATH",
            "to start over: checkpoint.resume=none, which moves the files here to a folder previous_NNN",
            "to train a new run instead: run.name=NAME",
        ]
        return "\n  ".join(lines)

    def _seen_elsewhere(self) -> Iterator[str]:
        run = self._folder.path
        before = stored_value(self._folder.previous_config or "", "checkpoint.dir")
        if before and not is_same_location(str(before), self.checkpoint_dir):
            yield f"the previous attempt stored them in checkpoint.dir={before}"
        for folder in (run / "checkpoints", run, *sorted(run.glob("previous_*"))):
            steps = [] if is_same_location(str(folder), self.checkpoint_dir) else list_steps(open_storage(folder))
            if steps:
                yield f"{folder} holds one of step {steps[-1]}"


def _is_another(stored_dir: object, here: Path) -> bool:
    return isinstance(stored_dir, str) and is_another_run(stored_dir, here)
