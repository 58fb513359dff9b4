"""The series of a report, as the page's script draws them: few enough points to load at once, of a run of any length.

A point of a long series stands for several lines: their mean, and for what is drawn with a band the least and the most.
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

from trainer.report.story import Column, Run

NUM_POINTS = 1000
"""Points of one series; up to twice as many lines are drawn as they are."""
_BANDS = ("loss", "grad_norm")


@dataclass(frozen=True)
class Line:
    """A line of a panel: the column of `of` (`train` or `evals`) that it shows, and what it is called."""

    column: str
    label: str = ""
    of: str = "train"


@dataclass(frozen=True)
class Panel:
    """A chart of the page.  With `from_zero` its axis begins at zero."""

    title: str
    lines: tuple[Line, ...]
    unit: str = ""
    from_zero: bool = False
    is_noisy: bool = True
    """Whether it is smoothed where a reader asks for it."""


PANELS = (
    Panel("loss", (Line("loss", "training"), Line("loss", "evaluation", "evals"))),
    Panel("gradient norm, before clipping", (Line("grad_norm"),)),
    Panel("learning rate", (Line("lr"),), from_zero=True, is_noisy=False),
    Panel("target tokens per second", (Line("tokens_per_s"),), from_zero=True),
    Panel("seconds per step", (Line("step_s", "whole step"), Line("data_s", "waiting for data")), "s", True),
    Panel("peak memory per rank", (Line("peak_memory_gib"),), "GiB", True),
)


def panels_of(runs: Sequence[Run]) -> list[Panel]:
    """Return the charts of a page: the standard ones, one for each figure of `Trainer.log` and, of a single run whose
    data has several sources, the loss by source.
    """
    logged = dict.fromkeys(name for run in runs for name in run.logged)
    own = [Panel(name, (Line(name, "training"), Line(name, "evaluation", "evals"))) for name in logged]
    sources = runs[0].sources if len(runs) == 1 else []
    lines = [Line(f"loss_{source}", source, of) for source in sources for of in ("train", "evals")]
    return [PANELS[0], *([Panel("loss by source", tuple(lines))] if lines else []), *own, *PANELS[1:]]


def data_of(runs: Sequence[Run], names: Sequence[str], refresh_s: float) -> str:
    """Return what the script draws, as JSON that may stand in a page.  refresh_s: 0 for a page that stays as it is."""
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
    """Return the columns of a table with at most `num_points` rows: means over equal numbers of lines.

    Columns that are drawn with a band have two more, `<name>_low` and `<name>_high`.  What is not finite is left out of
    a mean, and NaN where there is nothing else.
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
    for name in ("step", "tokens", "hours"):  # where a point is: at the last of its lines
        if name in table:
            found[name] = table[name][np.append(starts[1:], size) - 1]
    return found


def _extreme(ufunc: np.ufunc, column: Column, starts: NDArray[np.int64]) -> Column:
    values: Column = ufunc.reduceat(column, starts)
    return np.where(np.isfinite(values), values, math.nan)


def _plain(values: Column) -> list[float | None]:
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]
