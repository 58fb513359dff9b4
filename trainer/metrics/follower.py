"""Sends a run's metrics to trackers: the interface of a tracker, and the thread that keeps one up to date.

The thread follows `metrics.jsonl`, so the file is its queue: training never waits, memory does not grow while a server
is unavailable, and the next attempt sends what a killed one could not.  The trackers are in `trackers.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from trainer.config import RunConfig
from trainer.files import write_atomically
from trainer.metrics.record import Record


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker receives about the run."""

    id: str
    """Identifies the run in every tracker, across all attempts: it is stored in the run folder and in checkpoints."""
    folder: Path
    """The run folder."""
    config: RunConfig
    resumed_step: int
    """Step of the checkpoint that this attempt resumes from; 0 for a fresh start."""

    @property
    def name(self) -> str:
        return self.config.run.name

    @property
    def project(self) -> str:
        return self.config.log.wandb_project


class Sink(Protocol):
    """A tracker, which shows a run's curves: Weights & Biases, or your own, from an entry point in `meshtrainer.sinks`.

    The entry point is a callable without arguments that returns a Sink.  Its methods are called one at a time, in a
    separate thread on rank 0: they may block, and exceptions that they raise do not stop the run.  After an error,
    `open` is called again, until the run ends.

    Two more methods are optional, and therefore not declared below:

    rewind(step): the steps after `step` will be repeated within this run, so drop their values.  Without this method,
        the old values remain and the repeated steps are not sent.
    abandon(): called from the main thread if not everything could be sent in time at the end of the run; must not
        block.
    """

    def open(self, run: TrackedRun) -> int | None:
        """Open or resume the run.  Return the last step that the tracker has received, or 0 if it has received none.

        Steps up to that one are not sent again.  Return None if the tracker cannot know: then the last step for which
        `write` has returned, in any attempt, is used.
        """

    def write(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Add the values of one step, such as `train/loss`.  time: when they were recorded, in seconds since the epoch.

        Steps increase.  Each is sent once, together with its evaluation; an evaluation that runs separately may arrive
        later, for the same step.
        """

    def close(self) -> None:
        """End the run in the tracker, once everything has arrived there."""


PLOTTED_KINDS = ("train", "eval", "norms")
"""Record kinds that are plotted over steps."""


def numbers_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numeric fields of a record, with per-layer fields flattened to `grad_norm/<layer>`."""
    flat: dict[str, Any] = {}
    for name, value in record.items():
        flat |= {f"{name}/{key}": one for key, one in value.items()} if isinstance(value, dict) else {name: value}
    return {
        name: value
        for name, value in flat.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and name not in ("step", "time")
    }


# ---------------------------------------------------------------------------------------------------------------
# Rows


@dataclass
class Row:
    """The values of all records of one step."""

    step: int
    time: float
    values: dict[str, float] = field(default_factory=dict)
    changed: float = 0.0
    """When the last record was added, by `time.monotonic`."""
    has_evaluation: bool = False

    def add(self, record: Mapping[str, Any]) -> None:
        self.values |= {f"{record['kind']}/{name}": value for name, value in numbers_of(record).items()}
        self.changed, self.has_evaluation = time.monotonic(), self.has_evaluation or record["kind"] == "eval"


class RowReader:
    """Reads `metrics.jsonl` while the run appends to it, and returns one row for each step, in order.

    A row is complete if a later step is recorded, or if nothing was added to it for `SETTLE_S` and no evaluation of its
    step is expected.  A step whose evaluation was cut off is left to the next attempt, which repeats the evaluation.
    """

    SETTLE_S = 1.0

    def __init__(self, path: Path, awaits_evaluation: Callable[[int], bool]) -> None:
        self.path = path
        self._awaits_evaluation = awaits_evaluation
        self._file = self._opened()
        self._partial = b""
        self._row: Row | None = None
        self._last_returned = 0
        """The last step whose row was returned."""
        self._has_finished = False

    @property
    def is_settling(self) -> bool:
        """True if a row will be complete even if nothing more is recorded."""
        return self._row is not None and not self._is_unevaluated(self._row)

    def read(self, sent: int, has_ended: bool = False) -> list[Row]:
        """Return the complete rows after the step `sent`.  has_ended: whether the run has ended."""
        rows = []
        for record, is_reread in self._new_records():
            kind, step = record.get("kind"), record.get("step")
            if kind == "end":
                self._has_finished = record.get("reason") == "finished"
            if kind not in PLOTTED_KINDS or not isinstance(step, int):
                continue
            if self._row is not None and step > self._row.step:
                rows.append(self._release(self._row))
            is_late = step == self._last_returned and not is_reread
            if self._row is None and (step > max(sent, self._last_returned) or is_late):
                self._row = Row(step, record.get("time") or time.time())
            if self._row is not None and step == self._row.step:
                self._row.add(record)
        if self._row is not None:
            is_settled = time.monotonic() - self._row.changed >= self.SETTLE_S
            is_evaluated = self._has_finished or not self._is_unevaluated(self._row)
            if is_evaluated and (has_ended or is_settled):
                rows.append(self._release(self._row))
        return rows

    def _release(self, row: Row) -> Row:
        self._row, self._last_returned = None, row.step
        return row

    def _is_unevaluated(self, row: Row) -> bool:
        return not row.has_evaluation and self._awaits_evaluation(row.step)

    def go_back(self, step: int) -> None:
        """Return the steps after `step` again, once they are recorded again."""
        self._row, self._last_returned = None, step

    def _new_records(self) -> Iterator[tuple[dict[str, Any], bool]]:
        """Yield new records, each with a flag: True if it is read again because the file was replaced."""
        for record in self._lines_of(self._file):
            yield record, False
        with contextlib.suppress(FileNotFoundError):  # until it is restored
            if not os.path.samestat(os.stat(self.path), os.fstat(self._file.fileno())):
                self.close()
                self._file, self._partial = self._opened(), b""
                for record in self._lines_of(self._file):
                    yield record, True

    def _opened(self) -> BinaryIO:
        return open(self.path, "rb")

    def _lines_of(self, file: BinaryIO) -> Iterator[dict[str, Any]]:
        *lines, self._partial = (self._partial + file.read()).split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                if isinstance(record, dict):
                    yield record

    def close(self) -> None:
        self._file.close()


# ---------------------------------------------------------------------------------------------------------------
# The thread


class TrackingFile:
    """`trackers.json` in the run folder: the run's ID, and the last step sent to each tracker that cannot report it."""

    NAME = "trackers.json"

    def __init__(self, folder: Path, restored_id: str | None) -> None:
        """restored_id: the ID in the checkpoint, used if the folder has no such file."""
        self._folder, self._lock = folder, threading.Lock()
        stored: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            stored = json.loads((folder / self.NAME).read_text())
        sent = stored.get("sent")
        self._sent: dict[str, int] = dict(sent) if isinstance(sent, dict) else {}
        self.id = str(stored.get("id") or restored_id or os.urandom(4).hex())
        self._write()

    def sent(self, tracker: str) -> int:
        return self._sent.get(tracker, 0)

    def note(self, tracker: str, step: int) -> None:
        with self._lock:
            self._sent[tracker] = step
            self._write()

    def move_to(self, folder: Path) -> None:
        with self._lock:
            self._folder = folder
            self._write()

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # a full disk, or a folder that was deleted
            write_atomically(self._folder / self.NAME, json.dumps({"id": self.id, "sent": self._sent}))


class Follower:
    """Keeps one tracker up to date with `metrics.jsonl`, in a thread that training never waits for.

    An error is reported once, and the tracker is opened again after a pause, until the run ends.  Then `close` waits at
    most `FINISH_S` until the remaining rows are sent.
    """

    FINISH_S = 10.0
    _PAUSES_S = (1.0, 2.0, 5.0, 10.0)

    def __init__(
        self,
        key: str,
        name: str,
        make: Callable[[], Sink],
        run: TrackedRun,
        tracking: TrackingFile,
        warn: Callable[[str], None],
    ) -> None:
        """key: the name in `log.trackers`.  name: shown in messages.  make: creates the tracker, in the thread."""
        self._key, self._name, self._make = key, name, make
        self._run, self._tracking, self._warn = run, tracking, warn
        self._path = run.folder / "metrics.jsonl"
        self._sink: Sink | None = None
        self._wake, self._ends = threading.Event(), threading.Event()
        self._back_to: int | None = None
        self._has_warned = self._is_given_up = False
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def write(self, record: Record) -> None:
        """Wake the thread, after the record has been written to the file."""
        if record.kind in PLOTTED_KINDS:
            self._wake.set()

    def go_back(self, step: int) -> None:
        """Note that the steps after `step` will be repeated.  Only trackers with a `rewind` method replace them."""
        self._back_to = step
        self._wake.set()

    def move_to(self, folder: Path) -> None:
        self._path = folder / self._path.name

    def finish(self) -> None:
        """Make the thread send the remaining rows and exit.  Unlike `close`, does not wait for it."""
        self._ends.set()
        self._wake.set()

    def close(self) -> None:
        self.finish()
        self._thread.join(self.FINISH_S)
        if self._thread.is_alive():
            self._is_given_up = True
            self._complain(f"{self._name} did not finish within {self.FINISH_S:.0f} s; the run ends without it")
            abandon = getattr(self._sink, "abandon", None)
            if abandon is not None:
                abandon()

    def _complain(self, message: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._warn(message)

    def _work(self) -> None:
        num_failures = 0
        while not self._is_given_up:
            try:
                self._sink = self._sink or self._make()
                self._follow(self._sink)
                return
            except Exception as error:  # whatever a tracker raises, the run continues
                text = f"{type(error).__name__}: {error}"
                if isinstance(error, ImportError):
                    self._complain(f"{self._name} failed; continuing without it: {text}")
                    return
                if self._is_given_up:
                    return
                self._complain(f"{self._name} failed; continuing, and trying it again until the run ends: {text}")
            if self._ends.is_set():
                return
            self._ends.wait(self._PAUSES_S[min(num_failures, len(self._PAUSES_S) - 1)])
            num_failures += 1

    def _follow(self, sink: Sink) -> None:
        """Open the tracker, and send it all rows until the run ends."""
        last_received = sink.open(self._run)
        sent = self._tracking.sent(self._key) if last_received is None else last_received
        reader = RowReader(self._path, self._awaits_evaluation)
        try:
            while not self._is_given_up:
                self._wake.clear()
                has_ended = self._ends.is_set()
                reader.path = self._path
                if self._back_to is not None:
                    back_to, self._back_to = self._back_to, None
                    if hasattr(sink, "rewind"):
                        sink.rewind(back_to)
                        reader.go_back(back_to)
                        sent = back_to
                        self._run = replace(self._run, resumed_step=back_to)
                for row in reader.read(sent, has_ended):
                    sink.write(row.step, row.values, row.time)
                    sent = row.step
                    if last_received is None:
                        self._tracking.note(self._key, sent)
                if has_ended:
                    sink.close()
                    return
                self._wake.wait(reader.SETTLE_S if reader.is_settling else None)
        finally:
            reader.close()

    def _awaits_evaluation(self, step: int) -> bool:
        config = self._run.config
        return config.eval.is_due(step) or (config.eval.every > 0 and step == config.train.steps)
