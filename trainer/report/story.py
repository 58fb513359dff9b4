"""The story of a run from its folder: its attempts, its curves, how it stands.

Trusts nothing to be complete: the run may be going on, or have been killed in the middle of a line.
"""

from __future__ import annotations

import difflib
import json
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.config import read_yaml
from trainer.errors import UserError, redact, setting_error
from trainer.lifecycle.folder import is_owned
from trainer.metrics.goodput import Experience, Goodput, Ledger
from trainer.metrics.record import EVAL_FIELDS, TRAIN_FIELDS, logged_names, read_records

Column = NDArray[np.float64]

_RATES = ("tokens_per_s", "step_s", "data_s", "mfu", "peak_memory_gib")
TRAIN = ("step", "loss", "grad_norm", "lr", "tokens", *_RATES, "time")
EVAL = ("step", "loss", "bits_per_byte", "time")
_STANDARD = frozenset((*TRAIN_FIELDS, *EVAL_FIELDS))


@dataclass
class Attempt:
    """One life of the run: from a start record to an end record, or to where nothing more was heard."""

    facts: Mapping[str, Any]
    """The start record."""
    reached: int = 0
    lost_steps: int = 0
    """Steps that the next attempt had to do again."""
    ended: str = ""
    """`finished`, `stopped`, `failed`; `killed` without an end record; `running`."""
    wall_s: float = 0.0
    update_s: float = 0.0

    @property
    def resumed_step(self) -> int:
        return int(_number(self.facts, "resumed_step"))

    @property
    def mesh(self) -> str:
        mesh = self.facts.get("mesh")
        return " x ".join(f"{axis} {size}" for axis, size in mesh.items()) if isinstance(mesh, dict) else ""


@dataclass
class Run:
    """All that the report says of one run."""

    folder: Path
    name: str
    model: str
    num_steps: int | None
    """`train.steps`, where `config.yaml` tells it."""
    config_yaml: str
    state: str
    """As in `status.json`; `killed` where that says `running` but the process is gone."""
    reason: str
    train: dict[str, Column]
    """Columns of the `train` lines, in the order of steps; NaN for null."""
    evals: dict[str, Column]
    saved: Column
    """Steps of the checkpoints."""
    goodput: Goodput
    checkpoint: Mapping[str, Any]
    """The section of that name in `config.yaml`, as far as it can be read."""
    experience: Experience
    """What it has seen of saves and failures."""
    num_skipped: int = 0
    values: Mapping[str, Any] = field(default_factory=dict)
    """What `config.yaml` holds, by section, as far as it can be read."""
    traces: list[str] = field(default_factory=list)
    """Names of the profiles in `profile/`."""
    samples: list[Mapping[str, Any]] = field(default_factory=list)
    """Records of what the model has written: `step`, `prompt`, `text`."""
    attempts: list[Attempt] = field(default_factory=list)

    @property
    def restarts(self) -> list[Attempt]:
        return self.attempts[1:]

    @property
    def reached(self) -> int:
        return self.attempts[-1].reached if self.attempts else 0

    @property
    def sources(self) -> list[str]:
        """The sources of the data, where there are several."""
        return [name.removeprefix("epoch_") for name in self.train if name.startswith("epoch_")]

    @property
    def logged(self) -> list[str]:
        """What the run recorded with `Trainer.log`, in training or in evaluations."""
        return logged_names(dict.fromkeys((*self.train, *self.evals)))

    def last(self, column: str, of: str = "train") -> float | None:
        """Return the last finite value of a column, None if there is none."""
        values = (self.train if of == "train" else self.evals).get(column)
        finite = np.empty(0) if values is None else values[np.isfinite(values)]
        return float(finite[-1]) if finite.size else None

    def median(self, column: str) -> float | None:
        """Return the median of a column's finite values, None if there are none."""
        finite = self.train[column][np.isfinite(self.train[column])]
        return float(np.median(finite)) if finite.size else None


class _Reading:
    """Takes in the records of `metrics.jsonl` in their order."""

    def __init__(self) -> None:
        self.train, self.evals = _Table(TRAIN), _Table(EVAL)
        self.saved, self.attempts, self.ledger = array("d"), list[Attempt](), Ledger()
        self.traces, self.samples = list[str](), list[Mapping[str, Any]]()
        self.num_records = self.num_skipped = 0

    def add(self, record: Mapping[str, Any]) -> None:
        kind, self.num_records = record.get("kind"), self.num_records + 1
        if kind == "start":
            _close_attempt(self.attempts, self.ledger, record)
        self.ledger.add(record)
        if kind == "start":
            self.attempts.append(Attempt(_cleaned(record), update_s=self.ledger.total().update_s))
        elif kind == "train":
            self.train.append(record)
            self.num_skipped = int(_number(record, "skipped")) or self.num_skipped
        elif kind == "eval":
            self.evals.append(record)
        elif kind == "checkpoint":
            self.saved.append(_value(record.get("step")))
        elif kind == "profile" and isinstance(record.get("trace"), str):
            self.traces.append(Path(record["trace"]).name)
        elif kind == "sample":
            self.samples.append(record)
        elif kind == "end" and self.attempts:
            self.attempts[-1].ended = str(record.get("reason"))


def read_run(folder: Path) -> Run:
    """Return what the folder tells.  Raises UserError if it holds no record of a run."""
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise _no_run(folder, "has no metrics.jsonl, so it is not a run")
    read = _Reading()
    for _, record in read_records(path):
        read.add(record)
    if not read.num_records:
        fix = "see its console.log, or wait until it has started"
        raise setting_error("run.dir", folder, "its metrics.jsonl has no records", fix=fix)
    attempts, ledger = read.attempts, read.ledger
    _close_attempt(attempts, ledger, None)
    state, reason = _state(folder, attempts)
    if attempts and not attempts[-1].ended:
        attempts[-1].ended = "running" if state == "running" else "killed"
    config_yaml, values = _read_config(folder / "config.yaml")
    return Run(
        folder=folder,
        name=str(_find(values, "run", "name") or folder.absolute().name),
        model=str(_find(values, "model", "name") or ""),
        num_steps=_find(values, "train", "steps"),
        config_yaml=config_yaml,
        state=state,
        reason=reason,
        train=_columns(read.train.columns),
        evals=_columns(read.evals.columns),
        saved=np.unique(np.asarray(read.saved)),
        goodput=ledger.total(),
        checkpoint=section if isinstance(section := values.get("checkpoint"), Mapping) else {},
        experience=ledger.experience(),
        num_skipped=read.num_skipped,
        values=values,
        traces=read.traces,
        samples=read.samples,
        attempts=attempts,
    )


def _close_attempt(attempts: Sequence[Attempt], ledger: Ledger, start: Mapping[str, Any] | None) -> None:
    """Write down how far the last attempt came.  The start record after it knows what the file no longer holds."""
    if not attempts:
        return
    attempt, total, reached = attempts[-1], ledger.total(), ledger.reached
    if start is not None:
        attempt.lost_steps = int(_number(start, "lost_steps"))
        reached = max(reached, int(_number(start, "resumed_step")) + attempt.lost_steps)
        attempt.ended = attempt.ended or "killed"
        if isinstance(before := start.get("before"), dict):
            total = Goodput(until=_number(before, "until"), update_s=_number(before, "update_s"))
    attempt.reached = reached
    began = _number(attempt.facts, "started") or _number(attempt.facts, "time")
    attempt.wall_s = max(0.0, total.until - began) if began and total.until else 0.0
    attempt.update_s = max(0.0, total.update_s - attempt.update_s)


def _state(folder: Path, attempts: Sequence[Attempt]) -> tuple[str, str]:
    try:
        status = json.loads((folder / "status.json").read_text())
        state, reason = str(status["state"]), redact(str(status.get("reason") or ""))
    except (OSError, ValueError, KeyError, TypeError):
        return (attempts[-1].ended if attempts else "") or "unknown", ""
    if state == "running" and not is_owned(folder):
        return "killed", "status.json says running, but its process is gone"
    return state, reason


def _read_config(path: Path) -> tuple[str, Mapping[str, Any]]:
    """Return the text of `config.yaml` and its values, as far as they can be read."""
    try:
        text = redact(path.read_text(errors="replace"))  # of runs that still kept them
    except OSError:
        return "", {}
    try:
        return text, read_yaml(path)
    except UserError:
        return text, {}


def _find(values: Mapping[str, Any], section: str, key: str) -> Any:
    found = values.get(section)
    return found.get(key) if isinstance(found, Mapping) else None


class _Table:
    """Columns that grow by one record at a time.

    Columns beyond `names` (figures of one source, and those of `Trainer.log`) begin with the first record that has
    them.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.columns = {name: array("d") for name in names}
        self._seen = {*names, *_STANDARD}

    def append(self, record: Mapping[str, Any]) -> None:
        if not record.keys() <= self._seen:
            new = [name for name in record if name not in self._seen and isinstance(record[name], (int, float))]
            self.columns |= {name: array("d", [math.nan]) * len(self.columns["step"]) for name in new}
            self._seen.update(new)
        for name, column in self.columns.items():
            column.append(_value(record.get(name)))


def _value(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan


_NUMBERS = ("started", "time", "load_s", "resumed_step", "lost_steps", "parameters", "world_size")


def _cleaned(start: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a start record without fields that ought to be numbers and are none."""
    return {k: v for k, v in start.items() if k not in _NUMBERS or _number(start, k) or v == 0}


_MOST = {"started": 1e11, "time": 1e11}
"""Seconds since 1970 that a calendar has room for."""


def _number(record: Mapping[str, Any], name: str) -> float:
    """Return a field that ought to be a number; 0 for anything else."""
    value = _value(record.get(name))
    return value if 0 <= value < _MOST.get(name, 1e18) else 0.0


def _columns(values: Mapping[str, array[float]]) -> dict[str, Column]:
    """Return the columns in the order of steps; lines without a step are left out."""
    columns = {name: np.asarray(column, dtype=np.float64) for name, column in values.items()}
    order = np.argsort(columns["step"], kind="stable")
    order = order[np.isfinite(columns["step"][order])]
    return {name: column[order] for name, column in columns.items()}


def _no_run(folder: Path, rule: str) -> UserError:
    best = _nearest_run(folder)
    fix = "" if best else "give a run folder, such as runs/llama_small"
    return setting_error("run.dir", folder, rule, best, fix=fix)


def _nearest_run(folder: Path) -> object:
    if folder.name == "metrics.jsonl" and folder.is_file():
        return folder.parent
    runs = [path.parent for place in (folder, folder.parent, Path("runs")) for path in place.glob("*/metrics.jsonl")]
    close = difflib.get_close_matches(folder.name, [run.name for run in runs], n=1, cutoff=0.7)
    return next((run for run in runs if close == [run.name]), None)
