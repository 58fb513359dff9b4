"""Prepares the series that the page's script draws, downsampled so that a run of any length loads quickly.

A point of a long series represents several lines of metrics: their mean and, for columns drawn with a band, their
minimum and maximum.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.report.history import Column, Run

NUM_POINTS = 1000
"""Number of points in a series.  Up to twice as many lines of metrics are drawn without downsampling."""
_BANDS = ("loss", "grad_norm")


@dataclass(frozen=True)
class Line:
    """A line in a panel: the column to show, its label, and the table that has the column (`train` or `evals`)."""

    column: str
    label: str = ""
    of: str = "train"


@dataclass(frozen=True)
class Panel:
    """A chart of the page.  If `from_zero`, its y axis starts at zero."""

    title: str
    lines: tuple[Line, ...]
    unit: str = ""
    from_zero: bool = False
    is_noisy: bool = True
    """Whether the page's smoothing control applies to the panel."""


PANELS = (
    Panel("loss", (Line("loss", "training"), Line("loss", "evaluation", "evals"))),
    Panel("gradient norm, before clipping", (Line("grad_norm"),)),
    Panel("learning rate", (Line("lr"),), from_zero=True, is_noisy=False),
    Panel("target tokens per second", (Line("tokens_per_s"),), from_zero=True),
    Panel("seconds per step", (Line("step_s", "whole step"), Line("data_s", "waiting for data")), "s", True),
    Panel("peak memory per rank", (Line("peak_memory_gib"),), "GiB", True),
)


def panels_of(runs: Sequence[Run]) -> list[Panel]:
    """Return the panels of a page.

    These are the standard panels, one panel per field logged with `Trainer.log` and, for a single run with several data
    sources, the loss by source.
    """
    logged = dict.fromkeys(name for run in runs for name in run.logged)
    own = [Panel(name, (Line(name, "training"), Line(name, "evaluation", "evals"))) for name in logged]
    sources = runs[0].sources if len(runs) == 1 else []
    lines = [Line(f"loss_{source}", source, of) for source in sources for of in ("train", "evals")]
    return [PANELS[0], *([Panel("loss by source", tuple(lines))] if lines else []), *own, *PANELS[1:]]


def data_of(runs: Sequence[Run], names: Sequence[str], refresh_s: float) -> str:
    """Return the data for the page's script, as JSON that is safe to embed in HTML.

    refresh_s: seconds between reloads of the page, or 0 for a static page.
    """
    content = {
        "panels": [asdict(panel) for panel in panels_of(runs)],
        "runs": [_series_of(run, name) for run, name in zip(runs, names, strict=True)],
        "refresh_s": refresh_s,
        "written": time.time(),
    }
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _series_of(run: Run, name: str) -> dict[str, Any]:
    train, evals = thinned(_with_hours(run, run.train)), thinned(_with_hours(run, run.evals))
    if run.train["step"].size and run.evals["step"].size:
        tokens = np.interp(run.evals["step"], run.train["step"], np.nan_to_num(run.train["tokens"]))
        evals["tokens"] = thinned({**run.evals, "tokens": tokens})["tokens"]
    lost = [
        [attempt.resumed_step, attempt.resumed_step + before.lost_steps]
        for before, attempt in zip(run.attempts, run.restarts, strict=False)
        if before.lost_steps
    ]
    return {
        "name": name,
        "train": {column: _plain(values) for column, values in train.items()},
        "evals": {column: _plain(values) for column, values in evals.items()},
        "saved": _plain(run.saved),
        "restarts": [attempt.resumed_step for attempt in run.restarts],
        "lost": lost,
    }


def _with_hours(run: Run, table: Mapping[str, Column]) -> dict[str, Column]:
    facts = run.attempts[0].facts if run.attempts else {}
    began = facts.get("started") or facts.get("time")
    times = table.get("time", np.full(table["step"].size, math.nan))
    hours = (times - began) / 3600 if isinstance(began, (int, float)) else np.full(times.size, math.nan)
    return {**{name: column for name, column in table.items() if name != "time"}, "hours": hours}


def thinned(table: Mapping[str, Column], num_points: int = NUM_POINTS) -> dict[str, Column]:
    """Downsample a table to `num_points` rows, each the mean over an equal number of lines.

    A table of up to twice as many rows is returned unchanged.  For columns drawn with a band, `<name>_low` and
    `<name>_high` are added.  Means ignore non-finite values, and are NaN if there are no others.
    """
    size = table["step"].size
    if size <= 2 * num_points:
        return dict(table)
    starts = np.linspace(0, size, num_points, endpoint=False).astype(np.int64)
    found: dict[str, Column] = {}
    for name, column in table.items():
        finite = np.isfinite(column)
        counts = np.add.reduceat(finite.astype(np.float64), starts)
        sums = np.add.reduceat(np.where(finite, column, 0.0), starts)
        found[name] = np.divide(sums, counts, out=np.full(num_points, math.nan), where=counts > 0)
        if name in _BANDS:
            found[f"{name}_low"] = _extreme(np.minimum, np.where(finite, column, np.inf), starts)
            found[f"{name}_high"] = _extreme(np.maximum, np.where(finite, column, -np.inf), starts)
    for name in ("step", "tokens", "hours"):  # a point is placed at the last of its lines
        if name in table:
            found[name] = table[name][np.append(starts[1:], size) - 1]
    return found


def _extreme(ufunc: np.ufunc, column: Column, starts: NDArray[np.int64]) -> Column:
    values: Column = ufunc.reduceat(column, starts)
    return np.where(np.isfinite(values), values, math.nan)


def _plain(values: Column) -> list[float | None]:
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]
