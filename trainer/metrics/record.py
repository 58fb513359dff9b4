"""Metrics records (the lines of `metrics.jsonl`), functions that read them, and the writers' base class."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

TRAIN_FIELDS = (
    *("kind", "step", "loss", "epoch", "time", "mean_loss", "grad_norm", "lr", "tokens", "tokens_per_s", "step_s"),
    *("data_s", "mfu", "peak_memory_gib", "skipped", "profiled"),
)
"""The standard fields of a `train` record.  Mixtures and `Trainer.log` add others.  Only some records have `epoch` and
`profiled`."""
EVAL_FIELDS = ("kind", "step", "loss", "epoch", "time", "bits_per_byte", "eval_s")
"""The standard fields of an `eval` record.  Only some records have `epoch` and `bits_per_byte`."""


def logged_names(names: Iterable[str], sources: Iterable[str] = ()) -> list[str]:
    """Return the names of `train` or `eval` fields that come from `Trainer.log`, in their original order.

    The per-source fields `loss_<source>` and `epoch_<source>` are excluded.

    sources: names of data sources.  A source that is not listed is recognized if it has both fields.
    """
    names = list(names)
    by_source = {f"{prefix}_{source}" for source in {*sources, *source_names(names)} for prefix in ("loss", "epoch")}
    return [name for name in names if name not in by_source and name not in TRAIN_FIELDS and name not in EVAL_FIELDS]


def source_names(names: Iterable[str]) -> list[str]:
    """Return the data sources, given the names of a `train` record's fields: those with both a loss and an epoch."""
    names = dict.fromkeys(names)
    sources = [name.removeprefix("epoch_") for name in names if name.startswith("epoch_")]
    return [source for source in sources if f"loss_{source}" in names]


def numeric_fields(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the fields of a record that are numbers, finite or not.

    A dictionary, such as the gradient norms of all units, becomes one field per item: `grad_norm/<unit>`.
    """
    flat: dict[str, Any] = {}
    for name, value in record.items():
        flat |= {f"{name}/{unit}": item for unit, item in value.items()} if isinstance(value, dict) else {name: value}
    return {
        name: value for name, value in flat.items() if isinstance(value, (int, float)) and not isinstance(value, bool)
    }


class Record(Mapping[str, Any]):
    """A metrics record.  Fields can be accessed as keys or as attributes: `record["loss"]` or `record.loss`.

    A field may be given as a zero-argument function, which is called when the field is first read.  Creating a record
    therefore need not wait for the device.
    """

    def __init__(self, **fields: Any) -> None:
        self._fields = fields

    def __getitem__(self, name: str) -> Any:
        value = self._fields[name]
        if callable(value):
            value = self._fields[name] = value()
        return value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle look up special methods before `_fields` exists
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"a record of kind {self._fields.get('kind')!r} has no field {name!r}") from None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to copy or pickle, with all lazy fields evaluated."""
        return {"_fields": dict(self)}

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __repr__(self) -> str:
        return f"Record({', '.join(f'{name}={value!r}' for name, value in self.items())})"


class RecordWriter:
    """Receives every record of a run.  Subclasses override what they need; `Metrics.open` creates a run's writers.

    Training calls these methods directly, so they must not wait for a server.  `go_back` may raise OSError; the others
    must not raise.  Code that may wait or fail belongs in a `Tracker` (`trackers.py`), which has a thread of its own.
    """

    def write(self, record: Record) -> None:
        """Handle a record.  Called once for each record of the run."""

    def go_back(self, step: int) -> None:
        """Discard what was written after `step`: those steps will be repeated."""

    def finish(self) -> None:
        """Start the slow part of closing without waiting for it.  Called on all writers before any `close`."""

    def close(self) -> None:
        """Called once, at the end of the run."""


def read_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each record as (raw line, parsed record), skipping lines that are not records."""
    for line, record in read_lines(path):
        if record is not None:
            yield line, record


def read_lines(path: Path) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Yield every line as (raw line, parsed record).

    The record is None if the line is not a record (`parse_line`).
    """
    with open(path, errors="replace") as file:
        for line in file:
            yield line if line.endswith("\n") else line + "\n", parse_line(line)


def last_step(path: Path) -> int:
    """Return the highest step in a metrics file, or 0 if no line has a step or there is no such file."""
    if not path.is_file():
        return 0
    steps = (record.get("step") for _, record in read_lines(path) if record is not None)
    return max((step for step in steps if isinstance(step, int)), default=0)


_KINDS_WITH_STEP = ("train", "eval", "checkpoint", "profile", "sample", "norms")
"""Kinds of records that describe one step of the run."""
_MAX_STEP = 2**63


def parse_line(line: str | bytes) -> dict[str, Any] | None:
    """Return a line's record, or None if it is not a valid one.

    A killed process leaves a partial line, and other programs may have written to the file: a record must have a kind,
    and a record of a step must have that step, as a whole number.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    kind, step = record.get("kind"), record.get("step")
    has_step = isinstance(step, int) and not isinstance(step, bool) and 0 <= step < _MAX_STEP
    needs_step = step is not None or kind in _KINDS_WITH_STEP
    return record if isinstance(kind, str) and (has_step or not needs_step) else None
