"""Writes a run's records to `metrics.jsonl`, `samples.txt`, the console, `console.log`, Prometheus and trackers.

`Metrics` creates a `RecordWriter` for each of these that the run uses, and passes every record to all of them.  The
writers for `metrics.jsonl` and `samples.txt` are below; the others are in `console.py`, `prometheus.py` and
`follower.py`.  The writer for a tracker such as Weights & Biases (`trackers.py`) is a `Follower`, which reads the
records back from `metrics.jsonl`.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO, cast

from trainer.config import RunConfig
from trainer.errors import print_stderr, redact
from trainer.files import append_and_sync, read_all, write_atomically
from trainer.metrics.console import ConsoleWriter, LogFile, NonBlockingStream, PlainScreen, Screen, make_screen
from trainer.metrics.follower import Follower, TrackingFile
from trainer.metrics.goodput import RunHistory, TimeLedger
from trainer.metrics.prometheus import Prometheus
from trainer.metrics.record import Clock, Record, RecordWriter, read_lines
from trainer.metrics.trackers import TrackedRun, find_tracker, tracker_names


class JsonLines(RecordWriter):
    """Writes `metrics.jsonl`: one JSON object per line, appended without buffering.

    A later attempt first drops the lines that it will write again: records of the kinds in `_WRITTEN_AGAIN` for steps
    after the checkpoint that it resumes from, or for all steps if it starts afresh.  It also drops lines that are not
    records, such as the partial line of a killed process.  The dropped lines are appended to
    `metrics_superseded.jsonl`, and the other lines are rewritten atomically, so that a crash leaves either the old file
    or the new one.

    The attributes `ledger`, `lost_steps` and `earlier_goodput` account for earlier attempts (after `go_back`, for this
    attempt too), including the dropped lines.
    """

    def __init__(self, path: Path, resumed_step: int) -> None:
        self._path = path
        self._unwritten = b""
        self._missing_since: float | None = None
        """Time at which the file was first found to be deleted or replaced, or None if it is in place."""
        self._folder_fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        """Descriptor of the file's folder.  It stays valid if the folder is renamed or replaced."""
        self._file = self._drop_lines_and_open(resumed_step)

    def _drop_lines_and_open(self, step: int) -> io.FileIO:
        """Drop invalid lines, and those that a run continuing after `step` will write again; open the file."""
        ledger = TimeLedger(step)
        if self._path.exists():
            kept: list[str] = []
            dropped: list[str] = []
            for line, record in read_lines(self._path):
                if record is not None:
                    ledger.add(record)
                is_kept = record is not None and _is_kept(record, step)
                (kept if is_kept else dropped).append(line)
            self._append_superseded("".join(dropped))
            write_atomically(self._path, "".join(kept))
        self.ledger = ledger
        self.lost_steps, self.earlier_goodput = ledger.lost_steps, ledger.total()
        return open(self._path, "a+b", buffering=0)

    def go_back(self, step: int) -> None:
        """Drop the lines for steps after `step`.  If that fails, raises OSError and leaves the file unchanged."""
        kept, dropped = b"", b""
        for line in self._unwritten.splitlines(keepends=True):
            if _is_kept(json.loads(line), step):
                kept += line
            else:
                dropped += line
        self._append_superseded(dropped.decode())
        old_file, self._file = self._file, self._drop_lines_and_open(step)
        old_file.close()
        self._unwritten = kept

    def _append_superseded(self, lines: str) -> None:
        if lines:
            append_and_sync(self._path.with_name(SUPERSEDED), lines)

    def write(self, record: Record) -> None:
        """Append the record.  If the disk is full or unavailable, keep the line in memory until the next call."""
        was_failing = bool(self._unwritten)
        # Mask secrets, and write None for non-finite numbers, which JSON lacks.
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        safe = {k: redact(v) if isinstance(v, str) and k != "kind" else v for k, v in finite.items()}
        self._unwritten += json.dumps(safe).encode() + b"\n"
        try:
            self._restore_file(_RESTORE_AFTER_S)
            self._flush()
        except OSError as error:
            if not was_failing:
                warn(f"{self._path} cannot be written; lines are kept in memory until it can: {error}")

    def _flush(self) -> None:
        while self._unwritten:
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]

    def _restore_file(self, min_missing_s: float) -> None:
        """Restore the file if it was deleted, or switch to the new one if it was replaced.

        A deleted file's content can still be read through the open descriptor and is written again, but no earlier than
        `min_missing_s` seconds after the file was first found missing: otherwise a command that is deleting the entire
        folder would fail because the folder is not empty.
        """
        opened = os.fstat(self._file.fileno())
        try:
            current = os.stat(self._path.name, dir_fd=self._folder_fd)
        except FileNotFoundError:
            current = None
        if current is not None and (opened.st_nlink or os.path.samestat(current, opened)):
            self._missing_since = None
            return
        self._missing_since = time.monotonic() if self._missing_since is None else self._missing_since
        if time.monotonic() - self._missing_since < min_missing_s:
            return
        try:
            self._continue_in_folder(with_content=current is None)
        except FileNotFoundError:  # the folder itself was deleted
            return
        outcome = "deleted and is now restored" if current is None else "replaced; the run continues in the new file"
        warn(f"{self._path} was {outcome}")

    def _continue_in_folder(self, with_content: bool) -> None:
        """Open the file of the same name in the folder.  `with_content`: queue the previous content for writing."""
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        descriptor = os.open(self._path.name, flags, 0o666, dir_fd=self._folder_fd)
        old_file, self._file = self._file, io.FileIO(descriptor, "a+b")
        if with_content:
            self._unwritten = read_all(old_file.fileno()) + self._unwritten
        old_file.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._restore_file(0.0)
            self._flush()
        if self._unwritten:
            num_lines = self._unwritten.count(b"\n")
            warn(f"{self._path}: {num_lines} lines could not be written")
        self._file.close()
        os.close(self._folder_fd)


_RESTORE_AFTER_S = 1.0
"""Minimum time in seconds between finding the metrics file missing and writing it again."""

SUPERSEDED = "metrics_superseded.jsonl"
"""File for the lines that were dropped from the metrics because the run resumed, or went back, to an earlier step."""

_WRITTEN_AGAIN = ("train", "eval", "profile", "sample", "norms")
"""Kinds of records that a resumed run writes again for the steps that it repeats."""


def _is_kept(record: Mapping[str, Any], resumed_step: int) -> bool:
    return record.get("kind") not in _WRITTEN_AGAIN or record["step"] <= resumed_step


class SampleFile(RecordWriter):
    """Writes `samples.txt`: the samples generated from the prompts, as plain text.  Every attempt appends to it."""

    def __init__(self, path: Path) -> None:
        self._text = LogFile(path)

    def write(self, record: Record) -> None:
        if record.kind == "sample":
            self._text.write(f"-- step {record.step}: {record.prompt}\n{record.text}\n\n")

    def close(self) -> None:
        self._text.close()


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
        self.clock = Clock()
        self.console: ConsoleWriter | None = None
        """The console on rank 0, otherwise None."""
        if is_main:
            stream = cast(TextIO, NonBlockingStream(sys.stdout))
            self.console = self._console_on(make_screen(stream), stream.close)
        self._console_copy: ConsoleWriter | None = None
        self._writers: list[RecordWriter] = []
        self._ledger = TimeLedger()
        self.start_fields: dict[str, Any] = {}
        """Fields of the start record: lost steps and time spent in earlier attempts, and this attempt's clock."""
        self.latest: dict[str, Record] = {}
        """The last record of each kind.  Empty on ranks other than 0."""
        self._prometheus: Prometheus | None = None
        self.tracking_id: str | None = None
        """The run's ID in its trackers, or None without trackers.  Once the run has started, it is the same on all
        ranks.  Checkpoints contain it, so that every attempt continues the same run in the trackers."""

    def _console_on(self, screen: Screen, on_close: Callable[[], None]) -> ConsoleWriter:
        path = self._config.data.path
        sources = list(path) if isinstance(path, Mapping) else []
        return ConsoleWriter(self._config.train.steps, screen, on_close, sources)

    def state_dict(self) -> dict[str, Any]:
        return {"tracking_id": self.tracking_id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tracking_id = state["tracking_id"]

    def open(self, path: Path, resumed_step: int) -> None:
        """Open all writers, including the metrics file at `path`, for a run that resumes after `resumed_step`."""
        if self.console is None:
            return
        file = JsonLines(path, resumed_step)
        before = file.earlier_goodput.to_state() if file.earlier_goodput.num_attempts else None
        clock = {"boot": self.clock.boot_id, "booted": self.clock.boot_time}
        self.start_fields = {"lost_steps": file.lost_steps, "before": before, **clock}
        self._ledger.copy_saves(file.ledger)
        log_file = LogFile(path.parent / CONSOLE_LOG)
        copy = self._console_on(PlainScreen(cast(TextIO, log_file)), log_file.close)
        copy.print(f"-- {time.strftime('%Y-%m-%d %H:%M:%S')}")
        self._console_copy = copy
        self._writers = [file, self.console, copy]
        if self._config.log.prompts:
            self._writers.append(SampleFile(path.parent / SAMPLES))
        if self._config.log.prometheus is not None:
            self._prometheus = Prometheus(self._config.log.prometheus, self._config.run.name, warn)
            self._writers.append(self._prometheus)
            if self._prometheus.port:
                self.print(f"metrics for Prometheus: http://{socket.gethostname()}:{self._prometheus.port}/metrics")
        self._start_trackers(path.parent, resumed_step)

    def _start_trackers(self, folder: Path, resumed_step: int) -> None:
        """For each of the run's trackers, start a thread that follows the metrics file."""
        names = tracker_names(self._config.log)
        if not names:
            return
        tracking = TrackingFile(folder, self.tracking_id)
        self.tracking_id = tracking.id
        run = TrackedRun(tracking.id, folder, self._config, resumed_step)
        self._writers += [Follower(name, *find_tracker(name), run, tracking, warn) for name in names]

    def go_back(self, step: int) -> None:
        """Drop what was written after `step`, because those steps will be repeated."""
        for writer in self._writers:
            writer.go_back(step)

    def write(self, record: Record) -> Record:
        """Send the record to all writers, with an added `time` field (seconds since the epoch).

        Returns the record without that field.
        """
        if self._writers:
            stamped = self.latest[record.kind] = Record(**record, time=self.clock.now())
            self._ledger.add(stamped)
            for writer in self._writers:
                writer.write(stamped)
        return record

    def history(self) -> RunHistory:
        """Return the history of saves and failures over all attempts, on rank 0; an empty one on other ranks."""
        return self._ledger.history()

    def goodput_fields(self) -> dict[str, Any]:
        """Return the fields of the end record that break down the wall time of all attempts."""
        self._ledger.add(Record(time=self.clock.now()))
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
        """Show on the console and in Prometheus that a step has completed."""
        if self.console is not None:
            self.console.progress(step)
        if self._prometheus is not None:
            self._prometheus.progress(step)

    def close(self) -> None:
        for writer in self._writers:
            writer.finish()  # all at once: each may take a while
        for writer in self._writers:
            writer.close()
        self._writers, self._console_copy = [], None
