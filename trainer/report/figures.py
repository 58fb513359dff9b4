"""Draws the charts of a report with matplotlib: each panel as SVG for the page, or all of them as one PNG.

A long series is reduced to about as many columns as can be told apart.  It is drawn as a line through the columns'
means, with a band from minimum to maximum.
"""

from __future__ import annotations

import io
import logging
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import Any, Literal

import numpy as np

from trainer.metrics.console import readable_count, readable_duration
from trainer.report.history import Column, RecordedRun, Table, finite_values

COLORS = {
    "ink": "#1b1f24",
    "muted": "#66707b",
    "grid": "#e4e7eb",
    "blue": "#0072b2",
    "orange": "#e69f00",
    "green": "#009e73",
    "red": "#d55e00",
    "sky": "#56b4e9",
    "pink": "#cc79a7",
    "olive": "#8c8a00",
    "black": "#3d4650",
}
"""Colors by name, the same as in the light theme of the page's style sheet.  Most hues are from the colorblind-safe
palette of Okabe and Ito (https://jfly.uni-koeln.de/color/)."""
RUN_COLORS = ("blue", "red", "green", "pink", "orange", "sky", "olive", "black")
"""Colors of the compared runs, or of the series in a panel of one run; they repeat if there are more."""
TIME_PARTS = {
    "update_s": ("steps that count", "blue"),
    "lost_s": ("steps lost or skipped", "red"),
    "eval_s": ("evaluation", "green"),
    "save_s": ("saving", "pink"),
    "load_s": ("loading", "olive"),
    "start_s": ("starting", "orange"),
    "between_s": ("between attempts", "muted"),
    "other_s": ("other", "grid"),
}
"""The label and color of each part of the wall time, by its field in `Goodput`."""


# ---------------------------------------------------------------------------------------------------------------
# What the panels show


@dataclass(frozen=True)
class Series:
    """A column of the `train` or `eval` records, as it is drawn in a panel."""

    column: str
    label: str = ""
    color: str = "blue"
    """Color in the chart of a single run; if runs are compared, each has its own color."""
    style: Literal["line", "points", "area"] = "line"
    """Points are for evaluations.  An area is drawn only for a single run."""

    def table(self, run: RecordedRun) -> Table:
        """Return the records of a run that have the column."""
        return run.evals if self.style == "points" else run.train


@dataclass(frozen=True)
class Panel:
    """A chart."""

    title: str
    series: Sequence[Series]
    unit: str = ""
    starts_at_zero: bool = False
    """Whether the y axis starts at zero, and a few outliers are cut off.  Otherwise it is logarithmic if that helps."""


LOSS = Panel("loss", (Series("loss", "training"), Series("loss", "evaluation", "red", "points")))
OTHER_PANELS = (
    Panel("gradient norm, before clipping", (Series("grad_norm"),)),
    Panel("learning rate", (Series("lr"),), starts_at_zero=True),
    Panel("target tokens per second", (Series("tokens_per_s"),), starts_at_zero=True),
    Panel(
        "seconds per step",
        (Series("step_s", "full step"), Series("data_s", "waiting for data", "orange", "area")),
        unit="s",
        starts_at_zero=True,
    ),
    Panel("peak memory per rank, GiB", (Series("peak_memory_gib"),), unit="GiB", starts_at_zero=True),
)


MARKED_COLUMNS = ("loss", "grad_norm")
"""The columns whose values that are not finite are marked.  Others have none at the steps that lack the value."""


def panels_of(runs: Sequence[RecordedRun]) -> list[Panel]:
    """Return the panels of a report.

    These are the standard panels, one panel per field logged with `Trainer.log` and, for a single run with several data
    sources, the loss by source.
    """
    panels = [LOSS]
    if len(runs) == 1 and runs[0].sources:
        panels.append(Panel("loss by source", _source_series(runs[0].sources)))
    for name in dict.fromkeys(name for run in runs for name in run.logged):
        panels.append(Panel(name, (Series(name, "training"), Series(name, "evaluation", "red", "points"))))
    return [*panels, *OTHER_PANELS]


def _source_series(sources: Sequence[str]) -> list[Series]:
    """Return the series of the losses by source: for each, a line and the points of its evaluations."""
    series = []
    for number, source in enumerate(sources):
        color = RUN_COLORS[number % len(RUN_COLORS)]
        series.append(Series(f"loss_{source}", source, color))
        series.append(Series(f"loss_{source}", f"{source}, evaluation", color, "points"))
    return series


def series_of(panel: Panel, runs: Sequence[RecordedRun]) -> list[Series]:
    """Return the series of a panel that have values and are drawn for these runs."""
    return [
        series
        for series in panel.series
        if (len(runs) == 1 or series.style != "area")
        and any(finite_values(series.table(run), series.column).size for run in runs)
    ]


def color_of(series: Series, number: int, runs: Sequence[RecordedRun]) -> str:
    """Return the name of the color in which the series of the run with this number, counted from 0, is drawn."""
    return series.color if len(runs) == 1 else RUN_COLORS[number % len(RUN_COLORS)]


def is_logarithmic(panel: Panel, runs: Sequence[RecordedRun]) -> bool:
    """Return whether the panel's y axis is logarithmic: all values are positive and span more than a factor of 3."""
    values = _all_values(panel, runs)
    return bool(not panel.starts_at_zero and values.size and values.min() > 0 and values.max() > 3 * values.min())


def _all_values(panel: Panel, runs: Sequence[RecordedRun]) -> Column:
    """Return the finite values of all lines and points of a panel."""
    series = [each for each in panel.series if each.style != "area"]
    return np.concatenate([finite_values(each.table(run), each.column) for each in series for run in runs])


# ---------------------------------------------------------------------------------------------------------------
# Long series

NUM_COLUMNS = 400
"""Maximum number of columns that a long series is reduced to.  Series of up to twice as many values are not reduced."""
NUM_COLUMNS_COMPARED = 100
"""The same if runs are compared: noisy lines on top of each other could not be told apart."""


def num_columns_of(runs: Sequence[RecordedRun]) -> int:
    """Return the maximum number of columns in a chart of these runs."""
    return NUM_COLUMNS if len(runs) == 1 else NUM_COLUMNS_COMPARED


@dataclass(frozen=True)
class Columns:
    """A series reduced to columns: for each column, the mean x, and the mean, minimum and maximum of the values.

    A series that is not reduced has one column per value.
    """

    x: Column
    mean: Column
    low: Column
    high: Column

    @property
    def has_band(self) -> bool:
        """Whether the series was reduced, so that a band shows the range of the values in each column."""
        return self.low is not self.high


def reduce_to_columns(x: Column, y: Column, num_columns: int) -> Columns:
    """Reduce a series to at most `num_columns` columns of equal width.

    A series of at most twice as many values is returned unchanged, and its non-finite values appear as gaps.  In a
    longer series, non-finite values are ignored.
    """
    if x.size <= 2 * num_columns:
        return Columns(x, y, y, y)
    finite = np.isfinite(y)
    x, y = x[finite], y[finite]
    if not x.size:
        return Columns(x, y, y, y)
    column = np.minimum((x - x[0]) / max(x[-1] - x[0], 1.0) * num_columns, num_columns - 1).astype(np.int64)
    starts = np.flatnonzero(np.diff(column, prepend=-1))
    counts = np.diff(starts, append=x.size)
    mean_x, mean_y = np.add.reduceat(x, starts) / counts, np.add.reduceat(y, starts) / counts
    return Columns(mean_x, mean_y, np.minimum.reduceat(y, starts), np.maximum.reduceat(y, starts))


# ---------------------------------------------------------------------------------------------------------------
# One panel


def draw_panel(axes: Any, panel: Panel, runs: Sequence[RecordedRun]) -> None:
    """Draw a panel without its title."""
    if any(run.train["step"].size for run in runs):
        for number, run in enumerate(runs):
            for series in series_of(panel, runs):
                _draw_series(axes, series, run, COLORS[color_of(series, number, runs)], num_columns_of(runs))
            if panel.series[0].column in MARKED_COLUMNS:
                color = "red" if len(runs) == 1 else RUN_COLORS[number % len(RUN_COLORS)]
                _mark_not_finite(axes, run, panel.series[0].column, COLORS[color])
        if len(runs) == 1:
            _mark_attempts(axes, runs[0])
    else:
        style = {"transform": axes.transAxes, "ha": "center", "va": "center", "color": COLORS["muted"]}
        axes.text(0.5, 0.5, "no steps recorded yet", **style)
        axes.set_xticks([])
        axes.set_yticks([])
    _set_scales(axes, panel, runs)


def _draw_series(axes: Any, series: Series, run: RecordedRun, color: str, num_columns: int) -> None:
    table = series.table(run)
    if series.column not in table or not table["step"].size:
        return
    points = reduce_to_columns(table["step"], table[series.column], num_columns)
    if series.style == "points":
        size = 3.5 if points.x.size < 40 else 2.0
        axes.plot(points.x, points.mean, "o--", color=color, markersize=size, linewidth=0.8, zorder=4)
    elif series.style == "area":
        axes.fill_between(points.x, 0, points.mean, color=color, alpha=0.55, linewidth=0.6, zorder=3)
    else:
        if points.has_band:
            axes.fill_between(points.x, points.low, points.high, color=color, alpha=0.2, linewidth=0, zorder=2)
        marker = "o" if points.x.size < 3 else ""
        axes.plot(points.x, points.mean, color=color, marker=marker, markersize=3, zorder=3)


def _mark_not_finite(axes: Any, run: RecordedRun, column: str, color: str) -> None:
    """Mark the steps at which a column is not finite, along the upper edge."""
    steps = run.train["step"][~np.isfinite(run.train[column])]
    steps = reduce_to_columns(steps, steps, NUM_COLUMNS).x
    _mark_along_edge(axes, steps, 0.97, "x", color)


def _mark_attempts(axes: Any, run: RecordedRun) -> None:
    """Mark restarts, the steps that were lost and repeated and, along the lower edge, checkpoints."""
    for previous, attempt in zip(run.attempts, run.attempts[1:], strict=False):
        if previous.lost_steps:
            last = attempt.resumed_step + previous.lost_steps
            axes.axvspan(attempt.resumed_step, last, color=COLORS["red"], alpha=0.13, linewidth=0, zorder=0)
        axes.axvline(attempt.resumed_step, color=COLORS["muted"], linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    saved = reduce_to_columns(run.checkpoint_steps, run.checkpoint_steps, NUM_COLUMNS).x
    _mark_along_edge(axes, saved, 0.015, "|", COLORS["green"])


def _mark_along_edge(axes: Any, steps: Column, height: float, marker: str, color: str) -> None:
    """Mark steps at a height given as a fraction of the chart's height."""
    position = {"transform": axes.get_xaxis_transform(), "clip_on": False, "zorder": 5}
    axes.plot(steps, np.full(steps.size, height), marker, color=color, markersize=4, markeredgewidth=0.9, **position)


def _set_scales(axes: Any, panel: Panel, runs: Sequence[RecordedRun]) -> None:
    from matplotlib import ticker

    if panel.starts_at_zero:
        _limit_y_axis(axes, _all_values(panel, runs), panel.unit)
    if is_logarithmic(panel, runs):
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        if high > 200 * low:
            subs = [1.0]
        elif high > 20 * low:
            subs = [1.0, 2.0, 5.0]
        else:
            subs = [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0]
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=subs, numticks=12))
        axes.yaxis.set_minor_locator(ticker.NullLocator())
    else:
        axes.yaxis.set_major_locator(ticker.MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_locator(ticker.MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: format_tick(value)))
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    axes.text(-0.015, -0.045, "step", transform=axes.transAxes, color=COLORS["muted"], ha="right", va="top")


def _limit_y_axis(axes: Any, finite: Column, unit: str) -> None:
    """Start the y axis at zero, and cut off a few outliers at its top, so that they do not flatten the rest."""
    axes.set_ylim(bottom=0)
    if not finite.size or finite.max() <= 0:
        return
    maximum, usual_maximum = float(finite.max()), float(np.percentile(finite, 98))
    if finite.size < 8 or maximum <= 2.5 * usual_maximum or not usual_maximum:
        axes.set_ylim(0, 1.15 * maximum)
        return
    top = 1.5 * usual_maximum
    axes.set_ylim(0, top)
    num_above = int((finite > top).sum())
    note = f"{num_above} value{'s' * (num_above > 1)} above, up to {readable_count(maximum)} {unit}".rstrip()
    axes.text(0.995, 0.97, note, transform=axes.transAxes, color=COLORS["muted"], ha="right", va="top")


def format_tick(value: float) -> str:
    """Format a number as an axis label."""
    if value and abs(value) < 1e-3:
        return f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-")
    return readable_count(value) if abs(value) >= 1e4 else f"{round(value, 6):g}"


# ---------------------------------------------------------------------------------------------------------------
# Figures


@contextmanager
def chart_style() -> Iterator[None]:
    """Apply the style shared by all charts.  Math parsing is off because a run name may contain `$`."""
    import matplotlib

    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    spines = {f"axes.spines.{side}": False for side in ("top", "right", "left")}
    style = {
        "text.parse_math": False,
        "svg.fonttype": "none",
        "svg.hashsalt": "meshtrainer",
        "font.size": 8.0,
        "axes.titlesize": 9.0,
        "text.color": COLORS["ink"],
        "axes.titlecolor": COLORS["ink"],
        "axes.edgecolor": COLORS["muted"],
        "axes.linewidth": 0.7,
        "xtick.color": COLORS["muted"],
        "ytick.color": COLORS["muted"],
        "ytick.major.size": 0,
        "xtick.major.size": 3,
        "xtick.major.width": 0.7,
        "grid.color": COLORS["grid"],
        "grid.linewidth": 0.8,
        "axes.xmargin": 0.015,
        "lines.linewidth": 1.1,
        "lines.solid_joinstyle": "round",
        **spines,
    }
    with matplotlib.rc_context(style), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a run name may have characters that the font lacks
        yield


_PANEL_SIZE = (4.5, 2.4)
"""Width and height of a panel of the page, in inches of 72 units.  On a phone a unit is about one pixel wide, on a
large screen 1.6 pixels."""


def draw_svg(panel: Panel, runs: Sequence[RecordedRun]) -> str:
    """Return a panel as SVG to embed into the page, whose style sheet defines the colors of both themes."""
    from matplotlib.figure import Figure

    with chart_style():
        figure = Figure(figsize=_PANEL_SIZE)
        figure.patch.set_visible(False)
        axes = figure.add_axes((0.115, 0.12, 0.865, 0.85))
        axes.patch.set_visible(False)
        draw_panel(axes, panel, runs)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    return _embeddable(file.getvalue(), panel.title)


def _embeddable(svg: str, title: str) -> str:
    """Return a figure's SVG element with the page's colors, without what only a file of its own needs."""
    content = svg[svg.index("<svg") :].partition(">")[2]
    content = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", content, flags=re.DOTALL)
    content = re.sub(r'<g id="[^"]*"', "<g", content)  # ids of groups repeat in each figure, and nothing refers to them
    for name, color in COLORS.items():
        content = re.sub(rf"(fill|stroke): {color}", rf"\1: var(--{name})", content)
    content = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), content)
    content = re.sub(r"\s*\n\s*", " ", content)
    width, height = (72 * size for size in _PANEL_SIZE)
    return f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(title)}">{content.strip()}'


def draw_png(runs: Sequence[RecordedRun], title: str, subtitle: str) -> bytes:
    """Return all panels as one PNG.  For a single run, a bar below them shows how the wall time was spent."""
    from matplotlib.figure import Figure

    panels = panels_of(runs)
    num_rows = -(-len(panels) // 2)
    width, top, panel_height, bottom = 11.5, 1.0, 2.9, 1.2  # in inches
    height = top + num_rows * panel_height + bottom
    with chart_style():
        figure = Figure(figsize=(width, height), dpi=130, facecolor="white")

        def add_axes(from_left: float, from_top: float, axes_width: float, axes_height: float) -> Any:
            """Add axes at a place given in inches."""
            below = height - from_top - axes_height
            return figure.add_axes((from_left / width, below / height, axes_width / width, axes_height / height))

        heading = add_axes(0.25, 0.2, 11, 0.6)
        heading.set_axis_off()
        heading.text(0, 1, title, fontsize=15, fontweight="bold", va="top")
        heading.text(0, 0.2, subtitle, fontsize=9.5, color=COLORS["muted"], va="center")
        for number, panel in enumerate(panels):
            row, column = divmod(number, 2)
            axes = add_axes(0.75 + 5.65 * column, top + 0.3 + row * panel_height, 4.85, 2.2)
            draw_panel(axes, panel, runs)
            scale = ", log scale" if is_logarithmic(panel, runs) else ""
            axes.set_title(f"{panel.title}{scale}", loc="left", fontweight="bold", pad=7)
            _add_legend(axes, panel, runs)
        last_row = add_axes(0.75, height - bottom + 0.3, 10.5, 0.25)
        last_row.set_axis_off()
        if len(runs) == 1:
            _draw_time_bar(last_row, runs[0])
        else:
            _draw_names(last_row, runs)
        file = io.BytesIO()
        figure.savefig(file, format="png")
    return file.getvalue()


def _add_legend(axes: Any, panel: Panel, runs: Sequence[RecordedRun]) -> None:
    """Add a legend next to the title if there are several series; it is gray if colors denote runs."""
    series = series_of(panel, runs)
    if len(series) < 2:
        return
    styles = {"line": "-", "points": "o--", "area": "-"}
    handles = []
    for each in series:
        color = COLORS[each.color if len(runs) == 1 else "muted"]
        (handle,) = axes.plot([], [], styles[each.style], color=color, markersize=3)
        handles.append(handle)
    position = {"loc": "lower right", "bbox_to_anchor": (1.01, 1.015), "borderaxespad": 0.0, "borderpad": 0.2}
    style = {"ncols": 3, "frameon": False, "handlelength": 1.4, "columnspacing": 1.2}
    axes.legend(handles, [each.label for each in series], labelcolor=COLORS["muted"], **position, **style)


def _draw_names(axes: Any, runs: Sequence[RecordedRun]) -> None:
    """Draw a legend of the compared runs."""
    for number, run in enumerate(runs):
        color = COLORS[RUN_COLORS[number % len(RUN_COLORS)]]
        axes.plot([], [], color=color, linewidth=2, label=f"{number + 1}  {run.name}")
    axes.legend(loc="center", ncols=4, frameon=False)


def _draw_time_bar(axes: Any, run: RecordedRun) -> None:
    """Draw how the wall time was spent."""
    total, left = run.goodput.wall_s, 0.0
    for name, (label, color) in TIME_PARTS.items():
        seconds = getattr(run.goodput, name)
        if total > 0 and seconds > 0.0005 * total:
            text = f"{label} {100 * seconds / total:.1f}%"
            axes.barh(0, seconds, left=left, color=COLORS[color], label=text, edgecolor="white", linewidth=0.8)
            left += seconds
    if left:
        axes.set_xlim(0, left)
        axes.set_ylim(-0.4, 0.4)
        counts = f"{run.goodput.restarts} restarts, {run.goodput.lost_steps} lost steps"
        axes.set_title(f"wall time {readable_duration(total)}, {counts}", loc="left", fontweight="bold")
        position = {"loc": "upper left", "bbox_to_anchor": (0.0, -0.1), "borderaxespad": 0.0}
        axes.legend(ncols=4, frameon=False, handlelength=1, columnspacing=2.0, **position)
