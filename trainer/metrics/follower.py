"""Sends a run's metrics to its trackers (`trackers.py`), with one thread per tracker.

Each thread follows `metrics.jsonl`, so the file serves as its queue: no step waits, memory does not grow while a server
is unavailable, and after a restart the run sends whatever it had not sent when it was killed.
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
from typing import Any, BinaryIO

from trainer.files import write_atomically
from trainer.metrics.record import Record, RecordWriter, parse_line
from trainer.metrics.trackers import TrackedRun, Tracker

PLOTTED_KINDS = ("train", "eval", "norms")
"""Kinds of records whose fields trackers plot over steps."""


def numeric_fields(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numeric fields of a record except `step` and `time`.

    A dictionary, such as the gradient norms of all units, becomes one field per item: `grad_norm/<unit>`.
    """
    flat: dict[str, Any] = {}
    for name, value in record.items():
        flat |= {f"{name}/{unit}": item for unit, item in value.items()} if isinstance(value, dict) else {name: value}
    return {
        name: value
        for name, value in flat.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and name not in ("step", "time")
    }


# ---------------------------------------------------------------------------------------------------------------
# Rows


@dataclass
class Row:
    """The numeric fields of the records of one step, except any that arrive after the row is complete."""

    step: int
    time: float
    """Time of the first record, in seconds since the Unix epoch."""
    values: dict[str, float] = field(default_factory=dict)
    """The values of the fields, keyed by `<kind>/<field>`."""
    changed_at: float = 0.0
    """Time at which the last record was added, as returned by `time.monotonic()`."""
    has_evaluation: bool = False

    def add(self, record: Mapping[str, Any]) -> None:
        self.values |= {f"{record['kind']}/{name}": value for name, value in numeric_fields(record).items()}
        self.changed_at = time.monotonic()
        self.has_evaluation |= record["kind"] == "eval"


class RowReader:
    """Reads `metrics.jsonl` while the run appends to it, and returns a row for each step, in order.

    A row is complete once a later step has been recorded, or once nothing has been added to it for `SETTLE_S` and no
    evaluation of its step is expected.  A record of the same step that arrives later starts another row.  If the run
    was interrupted during a step's evaluation, that step's row is left to the next attempt, which repeats the
    evaluation.
    """

    SETTLE_S = 1.0
    """Seconds without a new record after which a row is complete."""

    def __init__(self, path: Path, awaits_evaluation: Callable[[int], bool]) -> None:
        self.path = path
        self._awaits_evaluation = awaits_evaluation
        self._file = self._open()
        self._partial = b""
        self._row: Row | None = None
        self._last_returned = 0
        """The last step whose row was returned."""
        self._repeated_until = 0
        """Rows up to this step were returned before the run went back, and are not returned again."""
        self._is_reread = False
        """True if the next lines may have been read before, because the file was reopened."""
        self._has_finished = False

    @property
    def is_settling(self) -> bool:
        """True if there is a row that will be complete after `SETTLE_S` even if nothing more is recorded."""
        return self._row is not None and not self._lacks_evaluation(self._row)

    def read(self, last_sent: int, has_ended: bool = False) -> list[Row]:
        """Return the complete rows after step `last_sent`.  has_ended: whether the run has ended."""
        rows = []
        for record, is_reread in self._new_records():
            kind, step = record.get("kind"), record.get("step")
            if kind == "end":
                self._has_finished = record.get("reason") == "finished"
            if kind not in PLOTTED_KINDS or step is None:
                continue
            if self._row is not None and step > self._row.step:
                rows.append(self._take_row(self._row))
            is_late = step == self._last_returned > self._repeated_until and not is_reread
            if self._row is None and (step > max(last_sent, self._last_returned) or is_late):
                self._row = Row(step, record.get("time") or time.time())
            if self._row is not None and step == self._row.step:
                self._row.add(record)
        if self._row is not None:
            is_settled = time.monotonic() - self._row.changed_at >= self.SETTLE_S
            is_evaluated = self._has_finished or not self._lacks_evaluation(self._row)
            if is_evaluated and (has_ended or is_settled):
                rows.append(self._take_row(self._row))
        return rows

    def _take_row(self, row: Row) -> Row:
        self._row, self._last_returned = None, row.step
        return row

    def _lacks_evaluation(self, row: Row) -> bool:
        return not row.has_evaluation and self._awaits_evaluation(row.step)

    def go_back(self, step: int, returns_again: bool) -> None:
        """Read the file from its beginning: it has been replaced, and the run repeats the steps after `step`.

        returns_again: whether to return the rows of those steps a second time.
        """
        self._row = None  # if its step is not repeated, its records are in the new file too
        self._reopen()
        if returns_again:
            self._last_returned, self._repeated_until = min(step, self._last_returned), 0
        else:
            self._repeated_until = self._last_returned

    def _new_records(self) -> Iterator[tuple[dict[str, Any], bool]]:
        """Yield new records, each with a flag: True if it may have been read before, because the file was replaced."""
        is_reread, self._is_reread = self._is_reread, False
        for record in self._parse_new_lines(self._file):
            yield record, is_reread
        with contextlib.suppress(FileNotFoundError):  # until it is restored
            is_replaced = not os.path.samestat(os.stat(self.path), os.fstat(self._file.fileno()))
            if is_replaced and self._reopen():
                self._is_reread = False
                for record in self._parse_new_lines(self._file):
                    yield record, True

    def _reopen(self) -> bool:
        """Continue at the beginning of the file at `path`.  If it does not exist, change nothing and return False."""
        with contextlib.suppress(FileNotFoundError):
            file = self._open()
            self.close()
            self._file, self._partial, self._is_reread = file, b"", True
            return True
        return False

    def _open(self) -> BinaryIO:
        return open(self.path, "rb")

    def _parse_new_lines(self, file: BinaryIO) -> Iterator[dict[str, Any]]:
        *lines, self._partial = (self._partial + file.read()).split(b"\n")
        for line in lines:
            record = parse_line(line)
            if record is not None:
                yield record

    def close(self) -> None:
        self._file.close()


# ---------------------------------------------------------------------------------------------------------------
# The thread


class TrackingFile:
    """`trackers.json` in the run folder: the run's ID, and the last step sent to each tracker that cannot report it."""

    NAME = "trackers.json"

    def __init__(self, folder: Path, restored_id: str | None) -> None:
        """restored_id: the ID in the checkpoint, if any; it is used if the folder has no such file."""
        self._folder, self._lock = folder, threading.Lock()
        stored: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            stored = json.loads((folder / self.NAME).read_text())
        sent = stored.get("sent")
        self._sent: dict[str, int] = dict(sent) if isinstance(sent, dict) else {}
        self.id = str(stored.get("id") or restored_id or os.urandom(4).hex())
        self._write()

    def last_sent(self, tracker: str) -> int:
        return self._sent.get(tracker, 0)

    def set_last_sent(self, tracker: str, step: int) -> None:
        with self._lock:
            self._sent[tracker] = step
            self._write()

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # a full disk, or a folder that was deleted
            write_atomically(self._folder / self.NAME, json.dumps({"id": self.id, "sent": self._sent}))


class Follower(RecordWriter):
    """Keeps one tracker up to date with `metrics.jsonl`, in a thread that training never waits for.

    Only the first error is reported.  After an error, the thread pauses and opens the tracker again, until the run
    ends; after an ImportError, it exits.  At the end of the run, `close` waits at most `FINISH_TIMEOUT_S` for the
    remaining rows to be sent.
    """

    FINISH_TIMEOUT_S = 10.0
    _PAUSES_S = (1.0, 2.0, 5.0, 10.0)
    """Seconds to wait after the first, second, third and every later error."""

    def __init__(
        self,
        key: str,
        name: str,
        create: Callable[[], Tracker],
        run: TrackedRun,
        tracking: TrackingFile,
        warn: Callable[[str], None],
    ) -> None:
        """Start the thread.

        key: the tracker's name in `log.trackers`.
        name: the tracker's name in messages.
        create: returns a new tracker; called in the thread.
        """
        self._key, self._name, self._create = key, name, create
        self._run, self._tracking, self._warn = run, tracking, warn
        self._path = run.folder / "metrics.jsonl"
        self._tracker: Tracker | None = None
        self._wake, self._run_ended = threading.Event(), threading.Event()
        self._rewind_to: int | None = None
        self._has_warned = self._has_given_up = False
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def write(self, record: Record) -> None:
        """Wake the thread, after the record has been written to the file."""
        if record.kind in PLOTTED_KINDS:
            self._wake.set()

    def go_back(self, step: int) -> None:
        """Tell the tracker that the steps after `step` will be repeated, if it has a `rewind` method."""
        self._rewind_to = step if self._rewind_to is None else min(step, self._rewind_to)
        self._wake.set()

    def finish(self) -> None:
        """Make the thread send the remaining rows and exit.  Unlike `close`, does not wait for the thread."""
        self._run_ended.set()
        self._wake.set()

    def close(self) -> None:
        self.finish()
        self._thread.join(self.FINISH_TIMEOUT_S)
        if self._thread.is_alive():
            self._has_given_up = True
            self._warn_once(
                f"{self._name} did not finish within {self.FINISH_TIMEOUT_S:.0f} s; the run ends without it"
            )
            abandon = getattr(self._tracker, "abandon", None)
            if abandon is not None:
                with contextlib.suppress(Exception):  # whatever a tracker raises, the run ends as it would without it
                    abandon()

    def _warn_once(self, message: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._warn(message)

    def _work(self) -> None:
        num_failures = 0
        while not self._has_given_up:
            try:
                self._tracker = self._tracker or self._create()
                self._follow(self._tracker)
                return
            except Exception as error:  # whatever a tracker raises, the run continues
                text = f"{type(error).__name__}: {error}"
                if isinstance(error, ImportError):
                    self._warn_once(f"{self._name} failed; continuing without it: {text}")
                    return
                if self._has_given_up:
                    return
                self._warn_once(f"{self._name} failed; continuing, with retries until the run ends: {text}")
            if self._run_ended.is_set():
                return
            self._run_ended.wait(self._PAUSES_S[min(num_failures, len(self._PAUSES_S) - 1)])
            num_failures += 1

    def _follow(self, tracker: Tracker) -> None:
        """Open the tracker, and send it all rows until the run ends."""
        last_received = tracker.open(self._run)
        last_sent = self._tracking.last_sent(self._key) if last_received is None else last_received
        reader = RowReader(self._path, self._awaits_evaluation)
        try:
            while not self._has_given_up:
                self._wake.clear()
                has_ended = self._run_ended.is_set()
                if self._rewind_to is not None:
                    rewind_to, self._rewind_to = self._rewind_to, None
                    rewind = getattr(tracker, "rewind", None)
                    reader.go_back(rewind_to, returns_again=rewind is not None)
                    if rewind is not None:
                        try:
                            rewind(rewind_to)
                        except BaseException:
                            self.go_back(rewind_to)  # again, once the tracker has been reopened
                            raise
                        last_sent = min(last_sent, rewind_to)
                        self._run = replace(self._run, resumed_step=rewind_to)
                for row in reader.read(last_sent, has_ended):
                    tracker.write(row.step, row.values, row.time)
                    last_sent = row.step
                    if last_received is None:
                        self._tracking.set_last_sent(self._key, last_sent)
                if has_ended:
                    tracker.close()
                    return
                self._wake.wait(reader.SETTLE_S if reader.is_settling else None)
        finally:
            reader.close()

    def _awaits_evaluation(self, step: int) -> bool:
        config = self._run.config
        return config.eval.is_due(step) or (config.eval.every > 0 and step == config.train.steps)
