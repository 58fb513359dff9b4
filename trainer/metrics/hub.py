"""Creates the sinks of a run and sends each record to all of them."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO, cast

from trainer.config import RunConfig
from trainer.metrics.clock import Clock
from trainer.metrics.console import ConsoleSink
from trainer.metrics.goodput import RunHistory, TimeLedger
from trainer.metrics.record import Record
from trainer.metrics.screen import PlainScreen, find_screen
from trainer.metrics.sinks import JsonLines, SampleFile, Sink, TensorBoard, WandB, warn
from trainer.metrics.stream import LogFile, NonBlockingStream

LOG = "console.log"
"""Copy of the console output in the run folder."""
SAMPLES = "samples.txt"
"""File in the run folder for the samples generated from `log.prompts`."""


class Metrics:
    """The sinks of a run.  Only rank 0 has sinks; on other ranks, calls write nothing."""

    def __init__(self, config: RunConfig, is_main: bool) -> None:
        self._config = config
        self.clock = Clock()
        self.console: ConsoleSink | None = None
        """The console, or None on ranks other than 0."""
        if is_main:
            stream = cast(TextIO, NonBlockingStream(sys.stdout))
            self.console = ConsoleSink(config.train.steps, find_screen(stream), stream.close)
        self._log: ConsoleSink | None = None
        self._log_file: LogFile | None = None
        self._sinks: list[Sink] = []
        self._ledger = TimeLedger()
        self.before: dict[str, Any] = {}
        """Fields of the start record about earlier attempts (lost steps, where the time went) and about the clock of
        this attempt."""
        self.latest: dict[str, Record] = {}
        """The last record of each kind.  Empty on ranks other than 0."""
        self.wandb_id: str | None = None
        """ID of the run in Weights & Biases, or None before one exists.  The same on all ranks, and saved in
        checkpoints so that every attempt continues the same W&B run."""

    def state_dict(self) -> dict[str, Any]:
        return {"wandb_id": self.wandb_id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.wandb_id = state["wandb_id"]

    def open(self, path: Path, resumed_step: int) -> None:
        """Open all sinks, including the metrics file at `path`, for a run that continues after `resumed_step`."""
        if self.console is None:
            return
        file = JsonLines(path, resumed_step)
        before = dataclasses.asdict(file.before) if file.before.num_attempts else None
        clock = {"boot": self.clock.boot, "booted": self.clock.booted}
        self.before = {"lost_steps": file.lost_steps, "before": before, **clock}
        self._ledger.remember(file.ledger)
        kept = self._log_file = LogFile(path.parent / LOG)
        self._log = ConsoleSink(self._config.train.steps, PlainScreen(cast(TextIO, kept)), kept.close)
        self._log.say(f"-- {time.strftime('%Y-%m-%d %H:%M:%S')}")
        self._sinks = [file, self.console, self._log]
        if self._config.log.prompts:
            self._sinks.append(SampleFile(path.parent / SAMPLES))
        if self._config.log.tensorboard:
            self._sinks.append(TensorBoard(path.parent / "tensorboard", resumed_step))
        if self._config.log.wandb != "off":
            sink = WandB(self._config, warn, self.wandb_id)
            self.wandb_id = sink.id
            self._sinks.append(sink)

    def go_back(self, step: int) -> None:
        """Drop the lines past `step` from the metrics file, because those steps will be repeated.

        The other sinks show the repeated steps twice.
        """
        for sink in self._sinks:
            if isinstance(sink, JsonLines):
                sink.go_back(step)

    def move_to(self, folder: Path) -> None:
        """Continue the files in another folder, because their folder was renamed or deleted.

        Their contents are preserved.  TensorBoard event files and W&B's local files are not moved.
        """
        for sink in self._sinks:
            if isinstance(sink, (JsonLines, SampleFile)):
                sink.move_to(folder)
        if self._log_file is not None:
            self._log_file.move_to(folder / LOG)

    def write(self, record: Record) -> Record:
        """Send the record to all sinks, with a `time` field added (seconds since the epoch).

        Returns the record without that field.
        """
        if self._sinks:
            stamped = self.latest[record.kind] = Record(**record, time=self.clock.now())
            self._ledger.add(stamped)
            for sink in self._sinks:
                sink.write(stamped)
        return record

    def experience(self) -> RunHistory:
        """Return the history of saves and failures over all attempts.  Empty on ranks other than 0."""
        return self._ledger.experience()

    def totals(self) -> dict[str, Any]:
        """Return the breakdown of wall time over all attempts, which is added to the end record."""
        self._ledger.add(Record(time=self.clock.now()))
        return self._ledger.total().fields()

    def start(self, facts: Mapping[str, str]) -> None:
        for console in self._consoles():
            console.start(facts)

    def say(self, text: str, style: str = "") -> None:
        for console in self._consoles():
            console.say(text, style)

    def _consoles(self) -> list[ConsoleSink]:
        return [console for console in (self.console, self._log) if console is not None]

    def progress(self, step: int) -> None:
        if self.console is not None:
            self.console.progress(step)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()
        self._sinks, self._log, self._log_file = [], None, None
