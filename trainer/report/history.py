"""Reads a run's records, attempts and current state from its folder.

No file is assumed to be complete: the run may be in progress, or may have been killed while it was writing a line.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.config.files import read_yaml
from trainer.errors import UserError, setting_error
from trainer.lifecycle.owner import is_owned
from trainer.metrics.goodput import Goodput, RunHistory, TimeLedger
from trainer.metrics.record import EVAL_FIELDS, TRAIN_FIELDS, logged_names, read_records, source_names

Column = NDArray[np.float64]
Table = Mapping[str, Column]
"""The records of one kind, as columns of equal length in the order of their steps."""

_PERFORMANCE = ("tokens_per_s", "step_s", "data_s", "mfu", "peak_memory_gib")
TRAIN_COLUMNS = ("step", "loss", "grad_norm", "lr", "tokens", "skipped", *_PERFORMANCE)
EVAL_COLUMNS = ("step", "loss", "bits_per_byte")
"""The columns of `train` and `eval` records that every run has."""


@dataclass
class Attempt:
    """One attempt of a run: from its start record to its end record or, without one, to its last record.

    Numbers that are missing or invalid in the start record are 0, and texts are empty.
    """

    began: float
    """Start time of the process, in seconds since the Unix epoch."""
    mesh: str
    num_ranks: int
    num_nodes: int
    num_parameters: int
    device: str
    torch: str
    load_s: float | None
    """Seconds spent restoring a checkpoint or reading weights; None if there were none."""
    resumed_step: int
    last_step: int = 0
    lost_steps: int = 0
    """Number of steps that the next attempt had to repeat."""
    outcome: str = ""
    """`finished`, `stopped` or `failed`, from the end record.  Without an end record, `running` for the last attempt
    of a run whose state is `running`, else `killed`."""
    wall_s: float = 0.0
    """Wall time of the attempt in seconds; 0 if unknown."""
    update_s: float = 0.0
    """The part of the wall time that was spent on steps that count, in seconds."""

    @classmethod
    def from_record(cls, start: Mapping[str, Any]) -> Attempt:
        """Return the attempt that a start record begins."""
        mesh = start.get("mesh")
        return cls(
            began=_time(start, "started") or _time(start, "time"),
            mesh=" x ".join(f"{axis} {size}" for axis, size in mesh.items()) if isinstance(mesh, Mapping) else "",
            num_ranks=int(_number(start, "world_size")),
            num_nodes=int(_number(start, "nodes")),
            num_parameters=int(_number(start, "parameters")),
            device=str(start.get("device") or ""),
            torch=str(start.get("torch") or ""),
            load_s=_number(start, "load_s") if "load_s" in start else None,
            resumed_step=int(_number(start, "resumed_step")),
        )


@dataclass
class RecordedRun:
    """Everything that a report shows about one run."""

    folder: Path
    config_yaml: str
    """The text of `config.yaml`; empty if it cannot be read."""
    settings: Mapping[str, Any]
    """Contents of `config.yaml` by section; empty if it cannot be parsed."""
    state: str
    """The state in `status.json`, or `killed` if that says `running` but the process is gone.

    If the file is missing or unreadable, the outcome in the last attempt's end record, or `unknown` without one."""
    reason: str
    attempts: Sequence[Attempt]
    train: Table
    """The `train` records.  Values that are null or missing are NaN."""
    evals: Table
    """The `eval` records, in the same form."""
    checkpoint_steps: Column
    """Steps at which checkpoints were saved."""
    goodput: Goodput
    history: RunHistory
    """The run's saves and failures."""
    samples: Sequence[Mapping[str, Any]]
    """The `sample` records, with `step`, `prompt` and `text`."""
    traces: Sequence[str]
    """File names of the traces in `profile/`."""

    @property
    def name(self) -> str:
        return str(self.setting("run", "name") or self.folder.absolute().name)

    @property
    def model(self) -> str:
        return str(self.setting("model", "name") or "")

    @property
    def num_steps(self) -> int | None:
        """`train.steps`, or None if it is unknown."""
        steps = self.setting("train", "steps")
        return steps if isinstance(steps, int) else None

    @property
    def last_step(self) -> int:
        return self.attempts[-1].last_step if self.attempts else 0

    @property
    def sources(self) -> list[str]:
        """Names of the data sources, or an empty list if the data is not a mixture."""
        path = self.setting("data", "path")
        configured = [name for name in path if f"epoch_{name}" in self.train] if isinstance(path, Mapping) else []
        return list(dict.fromkeys([*configured, *source_names(self.train)]))

    @property
    def logged(self) -> list[str]:
        """Names of the fields logged with `Trainer.log`, in training or in evaluations."""
        return logged_names(dict.fromkeys((*self.train, *self.evals)), self.sources)

    def setting(self, section: str, key: str) -> Any:
        """Return a setting, or None if it is unknown."""
        values = self.settings.get(section)
        return values.get(key) if isinstance(values, Mapping) else None


def last_value(table: Table, column: str) -> float | None:
    """Return the last finite value of a column, or None."""
    finite = finite_values(table, column)
    return float(finite[-1]) if finite.size else None


def median(table: Table, column: str) -> float | None:
    """Return the median of a column's finite values, or None."""
    finite = finite_values(table, column)
    return float(np.median(finite)) if finite.size else None


def finite_values(table: Table, column: str) -> Column:
    """Return the finite values of a column; none if the table lacks it."""
    values = table.get(column, np.empty(0))
    return values[np.isfinite(values)]


def read_run(folder: Path) -> RecordedRun:
    """Read a run from its folder.  Raises UserError if the folder has no metrics records."""
    path = folder / "metrics.jsonl"
    if not path.is_file():
        best = _nearest_run(folder)
        fix = "" if best else "give a run folder, such as runs/llama_small"
        raise setting_error("run.dir", folder, "has no metrics.jsonl, so it is not a run", best, fix=fix)
    records, num_records = _Records(), 0
    for _, record in read_records(path):
        records.add(record)
        num_records += 1
    if not num_records:
        fix = "see its console.log, or wait until it has started"
        raise setting_error("run.dir", folder, "its metrics.jsonl has no records", fix=fix)
    records.close_attempt()
    state, reason = _run_state(folder, records.attempts)
    if records.attempts and not records.attempts[-1].outcome:
        records.attempts[-1].outcome = "running" if state == "running" else "killed"
    config_yaml, settings = _read_config(folder / "config.yaml")
    return RecordedRun(
        folder=folder,
        config_yaml=config_yaml,
        settings=settings,
        state=state,
        reason=reason,
        attempts=records.attempts,
        train=records.train.by_step(),
        evals=records.evals.by_step(),
        checkpoint_steps=np.unique(np.asarray(records.checkpoint_steps)),
        goodput=records.ledger.total(),
        history=records.ledger.history(),
        samples=records.samples,
        traces=records.traces,
    )


class _Records:
    """Collects the records of `metrics.jsonl`, in file order."""

    def __init__(self) -> None:
        self.train = _TableBuilder(TRAIN_COLUMNS)
        self.evals = _TableBuilder(EVAL_COLUMNS)
        self.checkpoint_steps = array("d")
        self.samples: list[Mapping[str, Any]] = []
        self.traces: list[str] = []
        self.attempts: list[Attempt] = []
        self.ledger = TimeLedger()
        self._earlier_update_s = 0.0
        """Time in steps that count, over all attempts before the current one."""

    def add(self, record: Mapping[str, Any]) -> None:
        kind = record.get("kind")
        if kind == "start":
            self._start_attempt(record)
            return
        self.ledger.add(record)
        if kind == "train":
            self.train.append(record)
        elif kind == "eval":
            self.evals.append(record)
        elif kind == "checkpoint":
            self.checkpoint_steps.append(_to_float(record.get("step")))
        elif kind == "profile" and isinstance(record.get("trace"), str):
            self.traces.append(Path(record["trace"]).name)
        elif kind == "sample":
            self.samples.append(record)
        elif kind == "end" and self.attempts:
            self.attempts[-1].outcome = str(record.get("reason"))

    def _start_attempt(self, start: Mapping[str, Any]) -> None:
        """Close the attempt before this one and begin a new one.

        The new attempt has removed the lines of the steps that it repeats.  Its start record says what they were.
        """
        attempt = Attempt.from_record(start)
        lost_steps = int(_number(start, "lost_steps"))
        previous_end = max(self.ledger.total().last_time, _time(start, "lost_until"))
        previous_step = max(self.ledger.last_step, attempt.resumed_step + lost_steps if lost_steps else 0)
        self.ledger.add(start)
        if self.attempts:
            previous = self.attempts[-1]
            previous.lost_steps = lost_steps
            previous.outcome = previous.outcome or "killed"
            self._close(previous, previous_step, previous_end)
        self._earlier_update_s = self.ledger.total().update_s
        self.attempts.append(attempt)

    def close_attempt(self) -> None:
        """Fill in the last step and the times of the last attempt."""
        if self.attempts:
            self._close(self.attempts[-1], self.ledger.last_step, self.ledger.total().last_time)

    def _close(self, attempt: Attempt, last_step: int, end: float) -> None:
        attempt.last_step = last_step
        attempt.wall_s = max(0.0, end - attempt.began) if attempt.began and end else 0.0
        attempt.update_s = max(0.0, self.ledger.total().update_s - self._earlier_update_s)


class _TableBuilder:
    """Collects records of one kind as columns.

    Numeric fields that are not in `names` (per-source fields, and fields of `Trainer.log`) become columns when a record
    first has them, and are NaN in earlier rows.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._columns = {name: array("d") for name in names}
        self._seen_names = {*names, *TRAIN_FIELDS, *EVAL_FIELDS}

    def append(self, record: Mapping[str, Any]) -> None:
        if not record.keys() <= self._seen_names:
            num_rows = len(self._columns["step"])
            for name, value in record.items():
                if name not in self._seen_names and isinstance(value, (int, float)):
                    self._columns[name] = array("d", [math.nan]) * num_rows
                    self._seen_names.add(name)
        for name, column in self._columns.items():
            column.append(_to_float(record.get(name)))

    def by_step(self) -> Table:
        """Return the columns, with their rows sorted by step."""
        columns = {name: np.asarray(column, dtype=np.float64) for name, column in self._columns.items()}
        order = np.argsort(columns["step"], kind="stable")
        return {name: column[order] for name, column in columns.items()}


def _run_state(folder: Path, attempts: Sequence[Attempt]) -> tuple[str, str]:
    """Return the run's state (see `RecordedRun.state`), and the reason for it."""
    try:
        status = json.loads((folder / "status.json").read_text())
        state = str(status["state"])
        reason = str(status.get("reason") or "")
    except (OSError, ValueError, KeyError, TypeError):
        return (attempts[-1].outcome if attempts else "") or "unknown", ""
    if state == "running" and not is_owned(folder):
        return "killed", "status.json says running, but its process is gone"
    return state, reason


def _read_config(path: Path) -> tuple[str, Mapping[str, Any]]:
    """Return the text of `config.yaml` and its parsed contents; each is empty if that fails."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return "", {}
    try:
        return text, read_yaml(path)
    except UserError:
        return text, {}


def _to_float(value: Any) -> float:
    """Return a number as a float, and NaN for anything else."""
    with contextlib.suppress(OverflowError):  # an integer above 2^1024
        return float(value) if isinstance(value, (int, float)) else math.nan
    return math.nan


def _number(record: Mapping[str, Any], name: str, limit: float = 1e18) -> float:
    """Return the value of a numeric field, or 0 if it is not a number from 0 to `limit`."""
    value = _to_float(record.get(name))
    return value if 0 <= value < limit else 0.0


def _time(record: Mapping[str, Any], name: str) -> float:
    """Return a time in seconds since the Unix epoch, or 0 if it is missing or beyond what calendar functions accept."""
    return _number(record, name, limit=1e11)


def _nearest_run(folder: Path) -> Path | None:
    """Return the run folder with the most similar name, to suggest in an error message, or None."""
    if folder.name == "metrics.jsonl" and folder.is_file():
        return folder.parent
    parents = (folder, folder.parent, Path("runs"))
    runs = [path.parent for parent in parents for path in parent.glob("*/metrics.jsonl")]
    matches = difflib.get_close_matches(folder.name, [run.name for run in runs], n=1, cutoff=0.7)
    return next((run for run in runs if matches == [run.name]), None)
