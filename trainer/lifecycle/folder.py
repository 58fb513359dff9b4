"""Manages the run folder: its owner, configuration and status, and the files of earlier attempts.

Only rank 0 writes these files, once the settings have been validated; if its ranks could not record how the run ended,
the launcher does (`record_end`).
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.config.files import CONFIG
from trainer.config.schema import RunConfig
from trainer.errors import EXIT_FAILED, print_stderr, setting_error
from trainer.files import local_path, write_atomically
from trainer.lifecycle.owner import Owner, is_owned

STATUS = "status.json"
"""The file with the state of the run: running, or how it ended."""

RECORD_FILES = (
    "metrics.jsonl",
    "metrics_superseded.jsonl",
    "console.log",
    "samples.txt",
    "tensorboard",
    "wandb",
    "profile",
)
"""Files and folders, other than checkpoints, that are moved aside when a run starts over."""


class RunFolder:
    """The folder `run.dir`: its owner, `config.yaml` and `status.json`, and the files of earlier attempts."""

    def __init__(self, config: RunConfig, is_main: bool, comment: str = "") -> None:
        """comment: text to write above the configuration in `config.yaml`."""
        self.config, self.path, self.is_main = config, config.run_dir, is_main
        self._comment = comment
        self._owners = [Owner(self.path, "run.dir")]
        self._checkpoint_dir = local_path(config.checkpoint.dir) if config.checkpoint.dir else None
        if self._checkpoint_dir is not None and not self._checkpoint_dir.is_relative_to(self.path.absolute()):
            self._owners.append(Owner(self._checkpoint_dir, "checkpoint.dir"))
        self._is_acquired = False
        self._created_folders: list[Path] = []

    @property
    def checkpoints(self) -> Path:
        """The default folder for checkpoints."""
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def previous_config(self) -> str | None:
        """The content of `config.yaml` (before `begin`, the previous attempt's); None if it cannot be read."""
        try:
            return (self.path / CONFIG).read_text()
        except (OSError, UnicodeDecodeError):
            return None

    def acquire(self) -> None:
        """Acquire the folder, and a `checkpoint.dir` elsewhere, for this run.

        Does nothing if this run owns them already, or on a rank other than 0.  Raises UserError if another live run
        owns one of them or it is unusable.
        """
        if not self.is_main or self._is_acquired:
            return
        legal = {"run.dir": f"runs/{self.config.run.name}", "checkpoint.dir": None}
        for owner in self._owners:
            with _reporting_errors(owner.setting, owner.folder, legal[owner.setting]):
                self._make_folder(owner.folder)
                owner.acquire()
        if self._checkpoint_dir is not None and len(self._owners) == 1:
            with _reporting_errors("checkpoint.dir", self._checkpoint_dir, None):
                self._make_folder(self._checkpoint_dir.parent)  # saves create no parents
        self._is_acquired = True

    def release(self) -> None:
        """Release the folder for the next run.  Removes the folders that this run created and that are still empty."""
        self._is_acquired = False
        for owner in self._owners:
            owner.release()
        with contextlib.suppress(OSError):
            for folder in self._created_folders:
                folder.rmdir()  # fails unless it is empty
        self._created_folders = []

    def _make_folder(self, folder: Path) -> None:
        """Create a folder and its parents.

        Done only when the run acquires its folder, so that a folder that is deleted during training stays deleted.
        """
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        self._created_folders = [*missing, *self._created_folders]

    def run_reporting_errors(self, work: Callable[[], object]) -> None:
        """Run `work`; turn an OSError that it raises, such as for a full disk, into a UserError about `run.dir`."""
        with _reporting_errors("run.dir", self.path, f"runs/{self.config.run.name}"):
            work()

    def begin(self) -> None:
        """Write `config.yaml`."""
        if self.is_main:
            comment = "".join(f"# {line}\n" for line in self._comment.splitlines())
            write_atomically(self.path / CONFIG, comment + self.config.stored_yaml())

    def move_aside(self, names: Sequence[str]) -> Path | None:
        """Move those of the named files that exist to a new folder `previous_NNN`.  Returns that folder, or None.

        Deletes nothing.  If the metrics are moved, also copies the files that the new attempt will overwrite.
        """
        existing = [self.path / name for name in names if (self.path / name).exists()]
        if not existing:
            return None
        numbers = [path.name.removeprefix("previous_") for path in self.path.glob("previous_*")]
        target = self.path / f"previous_{1 + max((int(n) for n in numbers if n.isdecimal()), default=0):03d}"
        target.mkdir()
        for name in (CONFIG, STATUS) if self.metrics in existing else ():
            with contextlib.suppress(FileNotFoundError):
                shutil.copy2(self.path / name, target / name)
        for path in existing:
            shutil.move(path, target / path.name)
        return target

    def write_status(self, state: str, exit_code: int | None, step: int, reason: str) -> None:
        """Write `status.json`: `state` is running, finished, stopped or failed.

        Writes nothing unless this run owns the folder, so that it never changes the file of another run.
        """
        if all(owner.is_held for owner in self._owners):
            write_status(self.path, {"state": state, "exit_code": exit_code, "step": step, "reason": reason})

    def has_finished(self) -> bool:
        """Return whether `status.json` says that the run has finished."""
        return read_status(self.path).get("state") == "finished"

    def clean(self) -> None:
        """Delete partially written files of killed attempts."""
        for name in (CONFIG, STATUS, "metrics.jsonl", "owner.json"):
            for partial in self.path.glob(f".{name}.*"):
                partial.unlink()


@contextlib.contextmanager
def _reporting_errors(setting: str, folder: Path, legal: str | None) -> Iterator[None]:
    """Turn an OSError in the block into a UserError about the setting, with the file and the cause.

    legal: a value to suggest for the setting, or None.
    """
    try:
        yield
    except OSError as error:
        where = f": {error.filename}" if error.filename not in (None, str(folder)) else ""
        raise setting_error(setting, folder, f"cannot be used ({error.strerror or error}{where})", legal) from error


_RETRY_PAUSES_S = (0.2, 1.0)
"""Pauses before further attempts to write the status: storage may be unreachable for a moment."""


def write_status(run_dir: Path, status: Mapping[str, Any]) -> None:
    """Write `status.json`.  A failure is only printed, so that a full disk does not hide the run's own message."""
    for pause_s in (*_RETRY_PAUSES_S, None):
        try:
            write_atomically(run_dir / STATUS, json.dumps(status) + "\n")
            return
        except OSError as error:
            if pause_s is None:
                print_stderr(f"warning: {run_dir / STATUS} cannot be written: {error}")
            else:
                time.sleep(pause_s)


def read_status(run_dir: Path) -> dict[str, Any]:
    """Return the content of `status.json`, or an empty dictionary if it cannot be read."""
    try:
        status = json.loads((run_dir / STATUS).read_text())
    except (OSError, ValueError):
        return {}
    return status if isinstance(status, dict) else {}


def record_end(run_dir: Path, initial_status: Mapping[str, Any], last_step: int, reason: str) -> None:
    """Write to `status.json` how the run ended.  Called by a launcher after all its ranks have exited.

    Writes nothing if a live run owns the folder, or if the file belongs to an earlier attempt.

    initial_status: the content of `status.json` before the ranks were started.
    last_step: the last recorded step.
    """
    status = read_status(run_dir)
    has_ended = status.get("state") in ("failed", "stopped") and status != initial_status
    if (status.get("state") == "running" or has_ended) and not is_owned(run_dir):
        step = status.get("step") if has_ended else last_step
        write_status(run_dir, {"state": "failed", "exit_code": EXIT_FAILED, "step": step, "reason": reason})
