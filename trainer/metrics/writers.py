"""Writes a run's records to `metrics.jsonl`, `samples.txt`, the console, `console.log`, Prometheus and trackers.

`Metrics` creates a `RecordWriter` for each of these that the run uses, and passes every record to all of them.  The
writers for `metrics.jsonl` and `samples.txt` are below; the others are in `console.py`, `prometheus.py` and
`trackers.py`.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO, cast

from trainer.config.files import is_another_run
from trainer.config.schema import RunConfig
from trainer.errors import print_stderr
from trainer.files import append_and_sync, write_atomically
from trainer.metrics.console import ConsoleWriter, LogFile, PlainScreen, Screen, StandardOutput, make_screen
from trainer.metrics.goodput import DroppedLines, RunHistory, TimeLedger
from trainer.metrics.prometheus import Prometheus
from trainer.metrics.record import Record, RecordWriter, read_lines
from trainer.metrics.trackers import Sender, TrackedRun, find_tracker, tracker_names

SUPERSEDED = "metrics_superseded.jsonl"
"""File for the lines that were dropped from the metrics because the run resumed, or went back, to an earlier step."""

_WRITTEN_AGAIN = ("train", "eval", "profile", "sample", "norms")
"""Kinds of records that a resumed run writes again for the steps that it repeats."""


@dataclass
class EarlierLines:
    """What `metrics.jsonl` says about earlier attempts at the run."""

    ledger: TimeLedger = field(default_factory=TimeLedger)
    """The lines that remain."""
    dropped: DroppedLines = field(default_factory=DroppedLines)
    last_start: Mapping[str, Any] = field(default_factory=dict)
    """The last start record, or an empty mapping."""


class JsonLines(RecordWriter):
    """Writes `metrics.jsonl`: one JSON object per line, appended without buffering.

    A later attempt first drops the lines that it will write again: records of the kinds in `_WRITTEN_AGAIN` for steps
    after the checkpoint that it resumes from, or for all steps if it starts afresh.  It also drops lines that are not
    records, such as the partial line of a killed process.  The dropped lines are appended to
    `metrics_superseded.jsonl`, and the other lines are rewritten atomically, so that a crash leaves either the old file
    or the new one.
    """

    def __init__(self, path: Path, resumed_step: int) -> None:
        self._path = path
        self._unwritten = b""
        self.earlier = self._drop_lines(resumed_step)
        self._file = self._open()

    def _open(self) -> io.FileIO:
        return open(self._path, "ab", buffering=0)

    def _drop_lines(self, step: int) -> EarlierLines:
        """Drop invalid lines, and those that a run continuing after `step` will write again."""
        earlier = EarlierLines()
        if not self._path.exists():
            return earlier
        kept: list[str] = []
        dropped: list[str] = []
        for line, record in read_lines(self._path):
            if record is None:
                dropped.append(line)
            elif _is_kept(record, step):
                kept.append(line)
                earlier.ledger.add(record)
                if record.get("kind") == "start":
                    earlier.last_start = record
            else:
                dropped.append(line)
                earlier.ledger.drop(record, step, earlier.dropped)
        if dropped:
            append_and_sync(self._path.with_name(SUPERSEDED), "".join(dropped))
        write_atomically(self._path, "".join(kept))
        return earlier

    def go_back(self, step: int) -> None:
        """Drop the lines for steps after `step`.  If that fails, raises OSError and leaves the file unchanged."""
        self._flush()
        self._drop_lines(step)
        self._file.close()
        self._file = self._open()

    def write(self, record: Record) -> None:
        """Append the record.  If the disk is full or unavailable, keep the line in memory until the next call."""
        was_failing = bool(self._unwritten)
        # JSON has no numbers that are not finite.
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        self._unwritten += json.dumps(finite).encode() + b"\n"
        try:
            self._flush()
        except OSError as error:
            if not was_failing:
                warn(f"{self._path} cannot be written; lines are kept in memory until it can: {error}")

    def _flush(self) -> None:
        while self._unwritten:
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._flush()
        if self._unwritten:
            num_lines = self._unwritten.count(b"\n")
            warn(f"{self._path}: {num_lines} lines could not be written")
        self._file.close()


def _is_kept(record: Mapping[str, Any], resumed_step: int) -> bool:
    return record.get("kind") not in _WRITTEN_AGAIN or record["step"] <= resumed_step


class SampleFile(RecordWriter):
    """Writes `samples.txt`: the samples generated from the prompts, as plain text.  Every attempt appends to it."""

    def __init__(self, path: Path) -> None:
        self._file = LogFile(path)

    def write(self, record: Record) -> None:
        if record.kind == "sample":
            self._file.write(f"-- step {record.step}: {record.prompt}\n{record.text}\n\n")


def warn(message: str) -> None:
    """Print a warning to stderr."""
    print_stderr(f"warning: {message}")


# ---------------------------------------------------------------------------------------------------------------
# All record writers of a run


CONSOLE_LOG = "console.log"
"""File in the run folder with a copy of the console output."""
SAMPLES = "samples.txt"
"""File in the run folder with the samples generated from `log.prompts`."""


class Metrics:
    """The record writers of a run.  Only rank 0 has any; on other ranks, calls write nothing."""

    def __init__(self, config: RunConfig, is_main: bool) -> None:
        self._config = config
        self.console: ConsoleWriter | None = None
        """The console on rank 0, otherwise None."""
        if is_main:
            self.console = self._console_on(make_screen(cast(TextIO, StandardOutput())))
        self._console_copy: ConsoleWriter | None = None
        self._writers: list[RecordWriter] = []
        self._ledger = TimeLedger()
        self.start_fields: dict[str, Any] = {}
        """Fields of the start record: the run's ID and folder, and sums over the lines that this attempt dropped."""
        self.latest: dict[str, Record] = {}
        """The last record of each kind.  Empty on ranks other than 0."""

    def _console_on(self, screen: Screen) -> ConsoleWriter:
        path = self._config.data.path
        sources = list(path) if isinstance(path, Mapping) else []
        return ConsoleWriter(self._config.train.steps, screen, sources)

    def open(self, path: Path, resumed_step: int) -> None:
        """Open all writers, including the metrics file at `path`, for a run that resumes after `resumed_step`."""
        if self.console is None:
            return
        folder, file = path.parent.absolute(), JsonLines(path, resumed_step)
        self._ledger, dropped = file.earlier.ledger, file.earlier.dropped
        run_id = find_run_id(file.earlier.last_start, folder)
        self.start_fields = {
            "run_id": run_id,
            "run_dir": str(folder),
            "lost_steps": max(0, self._ledger.last_step - resumed_step),
            "lost_s": dropped.lost_s,
            "kept_s": dropped.kept_s,
            "lost_until": dropped.until or None,
        }
        self._console_copy = self._console_on(PlainScreen(cast(TextIO, LogFile(folder / CONSOLE_LOG))))
        self._console_copy.print(f"-- {time.strftime('%Y-%m-%d %H:%M:%S')}")
        self._writers = [file, self.console, self._console_copy]
        log = self._config.log
        if log.prompts:
            self._writers.append(SampleFile(folder / SAMPLES))
        if log.prometheus is not None:
            prometheus = Prometheus(log.prometheus, self._config.run.name, self.goodput_fields, warn)
            self._writers.append(prometheus)
            if prometheus.port:
                self.print(f"metrics for Prometheus: http://{socket.gethostname()}:{prometheus.port}/metrics")
        run = TrackedRun(run_id, folder, self._config, resumed_step)
        self._writers += [Sender(*find_tracker(name), run, warn) for name in tracker_names(log)]

    def go_back(self, step: int) -> None:
        """Drop what was written after `step`, because those steps will be repeated."""
        for writer in self._writers:
            writer.go_back(step)

    def write(self, record: Record) -> Record:
        """Send the record to all writers, with an added `time` field (seconds since the epoch).

        Returns the record without that field.
        """
        if self._writers:
            stamped = self.latest[record.kind] = Record(**record, time=time.time())
            self._ledger.add(stamped)
            for writer in self._writers:
                writer.write(stamped)
        return record

    def history(self) -> RunHistory:
        """Return the history of saves and failures over all attempts, on rank 0; an empty one on other ranks."""
        return self._ledger.history()

    def goodput_fields(self) -> dict[str, Any]:
        """Return the fields of the end record that break down the wall time of all attempts."""
        self._ledger.advance(time.time())
        return self._ledger.total().fields()

    def start(self, summary: Mapping[str, str]) -> None:
        """Print the summary at the start of the run, given as text by topic."""
        for console in self._consoles():
            console.start(summary)

    def print(self, text: str, style: str = "") -> None:
        """Print a line that belongs to no record, on the console and in its copy in the run folder."""
        for console in self._consoles():
            console.print(text, style)

    def _consoles(self) -> list[ConsoleWriter]:
        return [console for console in (self.console, self._console_copy) if console is not None]

    def progress(self, step: int) -> None:
        """Show on the console that a step has completed."""
        if self.console is not None:
            self.console.progress(step)

    def close(self) -> None:
        for writer in self._writers:
            writer.finish()  # all at once: each may take a while
        for writer in self._writers:
            writer.close()
        self._writers, self._console_copy = [], None


def find_run_id(last_start: Mapping[str, Any], folder: Path) -> str:
    """Return the ID of the run in `folder`: that of the attempt before, unless the folder is a copy of another run.

    last_start: the start record of the attempt before; empty if there is none.
    """
    run_id, run_dir = last_start.get("run_id"), last_start.get("run_dir")
    if isinstance(run_id, str) and isinstance(run_dir, str) and not is_another_run(run_dir, folder):
        return run_id
    return os.urandom(4).hex()
