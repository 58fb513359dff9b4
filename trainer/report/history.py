"""Reads a run's attempts, metrics and current state from its folder, and prepares its series for the HTML page.

No file is assumed to be complete: the run may be in progress, or may have been killed while it was writing a line.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import math
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.config import read_yaml
from trainer.errors import UserError, redact, setting_error
from trainer.lifecycle.owner import is_owned
from trainer.metrics.goodput import Goodput, RunHistory, TimeLedger
from trainer.metrics.record import EVAL_FIELDS, TRAIN_FIELDS, logged_names, read_records, source_names

Column = NDArray[np.float64]

_PERFORMANCE_FIELDS = ("tokens_per_s", "step_s", "data_s", "mfu", "peak_memory_gib")
TRAIN_COLUMNS = ("step", "loss", "grad_norm", "lr", "tokens", *_PERFORMANCE_FIELDS, "time")
EVAL_COLUMNS = ("step", "loss", "bits_per_byte", "time")
"""The fields of `train` and `eval` records that `RecordedRun` holds as columns for every run."""
_STANDARD_FIELDS = frozenset((*TRAIN_FIELDS, *EVAL_FIELDS))


@dataclass
class Attempt:
    """One attempt of a run: from its start record to its end record or, without one, to its last record."""

    start: Mapping[str, Any]
    """The start record, without the numeric fields whose values are invalid."""
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

    @property
    def resumed_step(self) -> int:
        return int(_number(self.start, "resumed_step"))

    @property
    def mesh(self) -> str:
        mesh = self.start.get("mesh")
        return " x ".join(f"{axis} {size}" for axis, size in mesh.items()) if isinstance(mesh, dict) else ""


@dataclass
class RecordedRun:
    """Everything that a report shows about one run."""

    folder: Path
    name: str
    model: str
    num_steps: int | None
    """`train.steps`, or None if `config.yaml` does not set it."""
    config_yaml: str
    state: str
    """The state in `status.json`, or `killed` if that says `running` but the process is gone.

    If the file is missing or unreadable, the outcome in the last attempt's end record, or `unknown` without one."""
    reason: str
    train: dict[str, Column]
    """Columns of the `train` records in step order, with NaN for values that are null or missing."""
    evals: dict[str, Column]
    checkpoint_steps: Column
    """Steps at which checkpoints were saved."""
    goodput: Goodput
    checkpoint: Mapping[str, Any]
    """The `checkpoint` section of `config.yaml`, or an empty mapping if it is missing or cannot be read."""
    history: RunHistory
    """History of the run's saves and failures."""
    num_skipped: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Contents of `config.yaml` by section, or an empty mapping if the file cannot be read."""
    traces: list[str] = field(default_factory=list)
    """File names of the traces in `profile/`."""
    samples: list[Mapping[str, Any]] = field(default_factory=list)
    """The `sample` records, with `step`, `prompt` and `text`."""
    attempts: list[Attempt] = field(default_factory=list)

    @property
    def restarts(self) -> list[Attempt]:
        return self.attempts[1:]

    @property
    def last_step(self) -> int:
        return self.attempts[-1].last_step if self.attempts else 0

    @property
    def sources(self) -> list[str]:
        """Names of the data sources, or an empty list if the data is not a mixture."""
        path = _setting(self.settings, "data", "path")
        configured = [name for name in path if f"epoch_{name}" in self.train] if isinstance(path, Mapping) else []
        return list(dict.fromkeys([*configured, *source_names(self.train)]))

    @property
    def logged(self) -> list[str]:
        """Names of the fields logged with `Trainer.log`, in training or in evaluations."""
        return logged_names(dict.fromkeys((*self.train, *self.evals)), self.sources)

    def last(self, column: str, from_evals: bool = False) -> float | None:
        """Return the last finite value of a column of `train` (of `evals` if `from_evals` is set), or None."""
        values = (self.evals if from_evals else self.train).get(column)
        finite = np.empty(0) if values is None else values[np.isfinite(values)]
        return float(finite[-1]) if finite.size else None

    def median(self, column: str) -> float | None:
        """Return the median of a column's finite values, or None."""
        finite = self.train[column][np.isfinite(self.train[column])]
        return float(np.median(finite)) if finite.size else None


class _RecordCollector:
    """Collects the records of `metrics.jsonl`, in file order."""

    def __init__(self) -> None:
        self.train, self.evals = _Table(TRAIN_COLUMNS), _Table(EVAL_COLUMNS)
        self.checkpoint_steps, self.attempts, self.ledger = array("d"), list[Attempt](), TimeLedger()
        self.traces, self.samples = list[str](), list[Mapping[str, Any]]()
        self.num_records = self.num_skipped = 0

    def add(self, record: Mapping[str, Any]) -> None:
        kind, self.num_records = record.get("kind"), self.num_records + 1
        if kind == "start":
            _close_attempt(self.attempts, self.ledger, record)
        self.ledger.add(record)
        if kind == "start":
            # Leave out numeric fields whose value is invalid.
            start = {k: v for k, v in record.items() if k not in _NUMERIC_START_FIELDS or _number(record, k) or v == 0}
            self.attempts.append(Attempt(start, update_s=self.ledger.total().update_s))
        elif kind == "train":
            self.train.append(record)
            self.num_skipped = int(_number(record, "skipped")) or self.num_skipped
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


def read_run(folder: Path) -> RecordedRun:
    """Read a run from its folder.  Raises UserError if the folder has no metrics records."""
    path = folder / "metrics.jsonl"
    if not path.is_file():
        best = _nearest_run(folder)
        fix = "" if best else "give a run folder, such as runs/llama_small"
        raise setting_error("run.dir", folder, "has no metrics.jsonl, so it is not a run", best, fix=fix)
    records = _RecordCollector()
    for _, record in read_records(path):
        records.add(record)
    if not records.num_records:
        fix = "see its console.log, or wait until it has started"
        raise setting_error("run.dir", folder, "its metrics.jsonl has no records", fix=fix)
    attempts, ledger = records.attempts, records.ledger
    _close_attempt(attempts, ledger, None)
    state, reason = _run_state(folder, attempts)
    if attempts and not attempts[-1].outcome:
        attempts[-1].outcome = "running" if state == "running" else "killed"
    config_yaml, settings = _read_config(folder / "config.yaml")
    return RecordedRun(
        folder=folder,
        name=str(_setting(settings, "run", "name") or folder.absolute().name),
        model=str(_setting(settings, "model", "name") or ""),
        num_steps=_setting(settings, "train", "steps"),
        config_yaml=config_yaml,
        state=state,
        reason=reason,
        train=_columns(records.train.columns),
        evals=_columns(records.evals.columns),
        checkpoint_steps=np.unique(np.asarray(records.checkpoint_steps)),
        goodput=ledger.total(),
        checkpoint=section if isinstance(section := settings.get("checkpoint"), Mapping) else {},
        history=ledger.history(),
        num_skipped=records.num_skipped,
        settings=settings,
        traces=records.traces,
        samples=records.samples,
        attempts=attempts,
    )


def _close_attempt(attempts: Sequence[Attempt], ledger: TimeLedger, start: Mapping[str, Any] | None) -> None:
    """Fill in the last step, the times and the lost steps of the last attempt.

    start: the start record of the next attempt, if there is one.  Its totals include records that have since been
    dropped from the file.
    """
    if not attempts:
        return
    attempt, total, last_step = attempts[-1], ledger.total(), ledger.last_step
    if start is not None:
        attempt.lost_steps = int(_number(start, "lost_steps"))
        last_step = max(last_step, int(_number(start, "resumed_step")) + attempt.lost_steps)
        attempt.outcome = attempt.outcome or "killed"
        total.last_time = max(total.last_time, _number(start, "lost_until"))
        total.update_s += _number(start, "kept_s")
    attempt.last_step = last_step
    started = _number(attempt.start, "started") or _number(attempt.start, "time")
    attempt.wall_s = max(0.0, total.last_time - started) if started and total.last_time else 0.0
    attempt.update_s = max(0.0, total.update_s - attempt.update_s)


def _run_state(folder: Path, attempts: Sequence[Attempt]) -> tuple[str, str]:
    """Return the run's state (see `RecordedRun.state`), and the reason for it."""
    try:
        status = json.loads((folder / "status.json").read_text())
        state, reason = str(status["state"]), redact(str(status.get("reason") or ""))
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


def _setting(settings: Mapping[str, Any], section: str, key: str) -> Any:
    values = settings.get(section)
    return values.get(key) if isinstance(values, Mapping) else None


class _Table:
    """A table with one row per record, in columns.

    Columns that are not in `names` (per-source fields, and fields of `Trainer.log`) are added when a record first has
    them, and are NaN in earlier rows.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.columns = {name: array("d") for name in names}
        self._seen_names = {*names, *_STANDARD_FIELDS}

    def append(self, record: Mapping[str, Any]) -> None:
        if not record.keys() <= self._seen_names:
            new = [name for name in record if name not in self._seen_names and isinstance(record[name], (int, float))]
            self.columns |= {name: array("d", [math.nan]) * len(self.columns["step"]) for name in new}
            self._seen_names.update(new)
        for name, column in self.columns.items():
            column.append(_to_float(record.get(name)))


def _to_float(value: Any) -> float:
    """Return a number as a float, and NaN for anything else."""
    with contextlib.suppress(OverflowError):  # an integer above 2^1024
        return float(value) if isinstance(value, (int, float)) else math.nan
    return math.nan


_NUMERIC_START_FIELDS = ("started", "time", "load_s", "resumed_step", "lost_steps", "parameters", "world_size")
"""Numeric fields of a start record."""


_UPPER_BOUNDS = {"started": 1e11, "time": 1e11}
"""Bounds for times, in seconds since the Unix epoch: calendar functions overflow on larger numbers."""


def _number(record: Mapping[str, Any], name: str) -> float:
    """Return the value of a numeric field, or 0 if it is not a valid non-negative number."""
    value = _to_float(record.get(name))
    return value if 0 <= value < _UPPER_BOUNDS.get(name, 1e18) else 0.0


def _columns(values: Mapping[str, array[float]]) -> dict[str, Column]:
    """Return the columns with their rows sorted by step; rows without a step are left out."""
    columns = {name: np.asarray(column, dtype=np.float64) for name, column in values.items()}
    order = np.argsort(columns["step"], kind="stable")
    order = order[np.isfinite(columns["step"][order])]
    return {name: column[order] for name, column in columns.items()}


def _nearest_run(folder: Path) -> Path | None:
    """Return the run folder with the most similar name, to suggest in an error message, or None."""
    if folder.name == "metrics.jsonl" and folder.is_file():
        return folder.parent
    parents = (folder, folder.parent, Path("runs"))
    runs = [path.parent for parent in parents for path in parent.glob("*/metrics.jsonl")]
    matches = difflib.get_close_matches(folder.name, [run.name for run in runs], n=1, cutoff=0.7)
    return next((run for run in runs if matches == [run.name]), None)


# ---------------------------------------------------------------------------------------------------------------
# Series for the page's script, downsampled so that a run of any length loads quickly
#
# A point of a long series summarizes several records: by their mean and, for columns drawn with a band, by their
# minimum and maximum.
NUM_POINTS = 1000
"""Number of points in a downsampled series.  A series of up to twice as many records is not downsampled."""
_BANDS = ("loss", "grad_norm")


@dataclass(frozen=True)
class Line:
    """A line in a panel: the column to plot, the line's label, and the column's table (`train` or `evals`)."""

    column: str
    label: str = ""
    table: str = "train"


@dataclass(frozen=True)
class Panel:
    """A chart of the page."""

    title: str
    lines: tuple[Line, ...]
    unit: str = ""
    starts_at_zero: bool = False
    """Whether the y axis starts at zero."""
    is_noisy: bool = True
    """Whether the page's smoothing control applies to the panel."""


PANELS = (
    Panel("loss", (Line("loss", "training"), Line("loss", "evaluation", "evals"))),
    Panel("gradient norm, before clipping", (Line("grad_norm"),)),
    Panel("learning rate", (Line("lr"),), starts_at_zero=True, is_noisy=False),
    Panel("target tokens per second", (Line("tokens_per_s"),), starts_at_zero=True),
    Panel("seconds per step", (Line("step_s", "full step"), Line("data_s", "waiting for data")), "s", True),
    Panel("peak memory per rank", (Line("peak_memory_gib"),), "GiB", True),
)


def panels_of(runs: Sequence[RecordedRun]) -> list[Panel]:
    """Return the panels of a page.

    These are the standard panels, one panel per field logged with `Trainer.log` and, for a single run with several data
    sources, the loss by source.
    """
    logged = dict.fromkeys(name for run in runs for name in run.logged)
    logged_panels = [Panel(name, (Line(name, "training"), Line(name, "evaluation", "evals"))) for name in logged]
    sources = runs[0].sources if len(runs) == 1 else []
    lines = [Line(f"loss_{source}", source, table) for source in sources for table in ("train", "evals")]
    by_source = [Panel("loss by source", tuple(lines))] if lines else []
    return [PANELS[0], *by_source, *logged_panels, *PANELS[1:]]


def page_data(runs: Sequence[RecordedRun], names: Sequence[str], refresh_s: float) -> str:
    """Return the data for the page's script, as JSON that is safe to embed in HTML.

    refresh_s: seconds between reloads of the page, or 0 for a static page.
    """
    content = {
        "panels": [asdict(panel) for panel in panels_of(runs)],
        "runs": [_run_data(run, name) for run, name in zip(runs, names, strict=True)],
        "refresh_s": refresh_s,
        "written": time.time(),
    }
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _run_data(run: RecordedRun, name: str) -> dict[str, Any]:
    """Return one run's series, checkpoints and restarts for the charts, as plain JSON values."""
    train, evals = downsample(_with_hours(run, run.train)), downsample(_with_hours(run, run.evals))
    if run.train["step"].size and run.evals["step"].size:
        tokens = np.interp(run.evals["step"], run.train["step"], np.nan_to_num(run.train["tokens"]))
        evals["tokens"] = downsample({**run.evals, "tokens": tokens})["tokens"]
    lost = [
        [attempt.resumed_step, attempt.resumed_step + previous.lost_steps]
        for previous, attempt in zip(run.attempts, run.restarts, strict=False)
        if previous.lost_steps
    ]
    return {
        "name": name,
        "train": {column: _to_json(values) for column, values in train.items()},
        "evals": {column: _to_json(values) for column, values in evals.items()},
        "checkpoint_steps": _to_json(run.checkpoint_steps),
        "restarts": [attempt.resumed_step for attempt in run.restarts],
        "lost": lost,
    }


def _with_hours(run: RecordedRun, table: Mapping[str, Column]) -> dict[str, Column]:
    """Return the table with `hours` since the start of the run instead of `time`."""
    start = run.attempts[0].start if run.attempts else {}
    started = start.get("started") or start.get("time")
    times = table.get("time", np.full(table["step"].size, math.nan))
    hours = (times - started) / 3600 if isinstance(started, (int, float)) else np.full(times.size, math.nan)
    return {**{name: column for name, column in table.items() if name != "time"}, "hours": hours}


def downsample(table: Mapping[str, Column], num_points: int = NUM_POINTS) -> dict[str, Column]:
    """Reduce a table to `num_points` rows, each the mean over about the same number of original rows.

    A table of up to twice as many rows is returned unchanged.  For columns drawn with a band, `<name>_low` and
    `<name>_high` are added.  Means ignore non-finite values, and are NaN if all values are non-finite.  The columns
    step, tokens and hours have the value of the last original row instead of the mean.
    """
    size = table["step"].size
    if size <= 2 * num_points:
        return dict(table)
    starts = np.linspace(0, size, num_points, endpoint=False).astype(np.int64)
    reduced: dict[str, Column] = {}
    for name, column in table.items():
        finite = np.isfinite(column)
        counts = np.add.reduceat(finite.astype(np.float64), starts)
        sums = np.add.reduceat(np.where(finite, column, 0.0), starts)
        reduced[name] = np.divide(sums, counts, out=np.full(num_points, math.nan), where=counts > 0)
        if name in _BANDS:
            reduced[f"{name}_low"] = _reduce_finite(np.minimum, np.where(finite, column, np.inf), starts)
            reduced[f"{name}_high"] = _reduce_finite(np.maximum, np.where(finite, column, -np.inf), starts)
    for name in ("step", "tokens", "hours"):  # a point is at the last of its rows
        if name in table:
            reduced[name] = table[name][np.append(starts[1:], size) - 1]
    return reduced


def _reduce_finite(ufunc: np.ufunc, column: Column, starts: NDArray[np.int64]) -> Column:
    """Reduce each slice of a column with `ufunc`; a slice without finite values becomes NaN."""
    values: Column = ufunc.reduceat(column, starts)
    return np.where(np.isfinite(values), values, math.nan)


def _to_json(values: Column) -> list[float | None]:
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]
