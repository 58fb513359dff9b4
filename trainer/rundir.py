"""The folder of a run: its configuration, how it stands, and what it did before.

Written by rank 0 alone.  Nothing here is written before the run is known to be without mistake.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from trainer.config import RunConfig
from trainer.errors import setting_error
from trainer.files import write_atomically


class RunFolder:
    """What a run leaves in `run.dir`, apart from metrics and checkpoints."""

    def __init__(self, config: RunConfig, is_main: bool) -> None:
        self.config, self.path, self.is_main = config, config.run_dir, is_main

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    def begin(self, resumed_step: int | None) -> None:
        """Make the folder and write `config.yaml`.  What the new attempt leaves behind is moved aside, never deleted.

        Asked to start anew (`checkpoint.resume=none`) or from an older checkpoint, the run leaves behind the
        checkpoints past it, which `auto` would otherwise take up again.
        """
        if not self.is_main:
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._set_aside(resumed_step)
            write_atomically(self.path / "config.yaml", self.config.to_yaml())
        except OSError as error:
            rule = f"cannot be used ({error.strerror})"
            raise setting_error("run.dir", self.config.run.dir, rule, f"runs/{self.config.run.name}") from error

    def _set_aside(self, resumed_step: int | None) -> None:
        later = f"step_{0 if resumed_step is None else resumed_step + 1:08d}"
        earlier = [path for path in self.checkpoints.glob("step_*") if path.name >= later]
        if self.config.checkpoint.resume == "none" and self.metrics.exists():
            earlier.append(self.metrics)
        if not earlier:
            return
        aside = self.path / f"previous_{1 + len(list(self.path.glob('previous_*'))):03d}"
        aside.mkdir()
        for path in earlier:
            shutil.move(path, aside / path.name)

    def write_status(self, state: str, exit_code: int | None, step: int, reason: str) -> None:
        """Say how the run stands: `state` is running, finished, stopped or failed."""
        if self.is_main:
            status = {"state": state, "exit_code": exit_code, "step": step, "reason": reason}
            write_atomically(self.path / "status.json", json.dumps(status) + "\n")
