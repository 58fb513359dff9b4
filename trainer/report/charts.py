"""Draws the charts of a report as one PNG image.  Matplotlib is imported only when charts are drawn.

A long series is reduced to about one column for every two pixels.  It is drawn as a line through the columns' means,
with a band from minimum to maximum.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from trainer.metrics.console import readable_count, readable_duration
from trainer.report.history import Column, RecordedRun

NUM_COLUMNS = 400
"""Maximum number of columns that a long series is reduced to.  Series of up to twice as many values are not reduced."""

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
"""Colors of the compared runs, in order; they repeat if there are more runs than colors."""
TIME_PART_STYLES = {
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


def reduce_to_columns(x: Column, y: Column, num_columns: int = NUM_COLUMNS) -> Columns:
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
# Panels


def _draw_loss(axes: Any, runs: Sequence[RecordedRun]) -> None:
    is_log = _spans_factor([run.train["loss"] for run in runs], 3.0)
    for run, color in _with_colors(runs):
        _draw_line(axes, run.train["step"], run.train["loss"], color, "training")
        eval_color = COLORS["red"] if len(runs) == 1 else color
        points = reduce_to_columns(run.evals["step"], run.evals["loss"])
        if points.x.size:
            size = 4.5 if points.x.size < 40 else 2.5
            style = {"marker": "o", "markersize": size, "linewidth": 1.0, "linestyle": (0, (3, 2))}
            axes.plot(points.x, points.mean, color=eval_color, label="evaluation", zorder=4, **style)
        _mark_not_finite(axes, run, "loss", eval_color)
    if is_log:
        _use_log_scale(axes)
    _add_legend(axes, runs)


def _draw_grad_norm(axes: Any, runs: Sequence[RecordedRun]) -> None:
    is_log = _spans_factor([run.train["grad_norm"] for run in runs], 4.0)
    for run, color in _with_colors(runs):
        _draw_line(axes, run.train["step"], run.train["grad_norm"], color)
        _mark_not_finite(axes, run, "grad_norm", COLORS["red"] if len(runs) == 1 else color)
    if is_log:
        _use_log_scale(axes)


def _draw_column(
    column: str, format_value: Callable[[float], str] | None, axes: Any, runs: Sequence[RecordedRun]
) -> None:
    """Draw a column, with the y axis starting at zero.

    format_value: formats the largest value for the note about clipped outliers; None to clip no outliers.
    """
    for run, color in _with_colors(runs):
        _draw_line(axes, run.train["step"], run.train[column], color)
    if format_value is None:
        axes.set_ylim(bottom=0)
    else:
        _limit_y_axis(axes, [run.train[column] for run in runs], format_value)


def _draw_step_s(axes: Any, runs: Sequence[RecordedRun]) -> None:
    for run, color in _with_colors(runs):
        _draw_line(axes, run.train["step"], run.train["step_s"], color, "full step")
        if len(runs) == 1:
            waiting = reduce_to_columns(run.train["step"], run.train["data_s"])
            style = {"color": COLORS["orange"], "linewidth": 0.8, "zorder": 3}
            axes.fill_between(waiting.x, 0, waiting.mean, alpha=0.55, label="waiting for data", **style)
    _limit_y_axis(axes, [run.train["step_s"] for run in runs], _format_seconds)
    _add_legend(axes, runs)


PANELS: dict[str, Callable[[Any, Sequence[RecordedRun]], None]] = {
    "loss": _draw_loss,
    "gradient norm, before clipping": _draw_grad_norm,
    "learning rate": partial(_draw_column, "lr", None),
    "target tokens per second": partial(_draw_column, "tokens_per_s", readable_count),
    "seconds per step": _draw_step_s,
    "peak memory per rank, GiB": partial(_draw_column, "peak_memory_gib", lambda value: f"{value:.3g} GiB"),
}
"""The drawing function of each panel, by title."""


def _draw_logged(name: str, axes: Any, runs: Sequence[RecordedRun]) -> None:
    """Draw a field logged with `Trainer.log`: training as a line, evaluations as dots."""
    for run, color in _with_colors(runs):
        if name in run.train:
            _draw_line(axes, run.train["step"], run.train[name], color, "training")
        if name in run.evals:
            points = reduce_to_columns(run.evals["step"], run.evals[name])
            eval_color = COLORS["red"] if len(runs) == 1 else color
            axes.plot(points.x, points.mean, "o--", color=eval_color, markersize=3, linewidth=1.0, label="evaluation")
    _add_legend(axes, runs)


def _with_colors(runs: Sequence[RecordedRun]) -> Iterator[tuple[RecordedRun, str]]:
    for number, run in enumerate(runs):
        yield run, COLORS[RUN_COLORS[number % len(RUN_COLORS)]]


def _draw_line(axes: Any, x: Column, y: Column, color: str, label: str = "") -> None:
    points = reduce_to_columns(x, y)
    if points.has_band:
        axes.fill_between(points.x, points.low, points.high, color=color, alpha=0.22, linewidth=0, zorder=2)
    style = {"marker": "o", "markersize": 3} if points.x.size < 3 else {}
    axes.plot(points.x, points.mean, color=color, linewidth=1.3, label=label, zorder=3, **style)


def _mark_not_finite(axes: Any, run: RecordedRun, column: str, color: str) -> None:
    """Mark the steps with a non-finite value, along the upper edge."""
    not_finite = run.train["step"][~np.isfinite(run.train[column])]
    steps = reduce_to_columns(not_finite, not_finite).x[:NUM_COLUMNS]
    if steps.size:
        position = {"transform": axes.get_xaxis_transform(), "clip_on": False, "zorder": 5}
        axes.plot(steps, np.full(steps.size, 0.97), "x", color=color, markersize=4.5, label="not finite", **position)


def _spans_factor(values: Sequence[Column], ratio: float) -> bool:
    """Return whether a logarithmic scale helps: all values are positive and span more than a factor of `ratio`."""
    finite = np.concatenate([column[np.isfinite(column)] for column in values])
    return bool(finite.size and finite.min() > 0 and finite.max() / finite.min() > ratio)


def _use_log_scale(axes: Any) -> None:
    """Make the y axis logarithmic, with more tick labels per decade the fewer decades it spans."""
    from matplotlib import ticker

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    ratio = high / low
    subs = (1.0,) if ratio > 200 else (1.0, 2.0, 5.0) if ratio > 20 else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=subs, numticks=12))
    axes.yaxis.set_minor_locator(ticker.NullLocator())


def _limit_y_axis(axes: Any, values: Sequence[Column], format_value: Callable[[float], str]) -> None:
    """Start the y axis at zero, and clip a few outliers at its top, so that they do not flatten the rest."""
    finite = np.concatenate([column[np.isfinite(column)] for column in values])
    axes.set_ylim(bottom=0)
    if not finite.size or finite.max() <= 0:
        return
    maximum, usual_maximum = float(finite.max()), float(np.percentile(finite, 98))
    if finite.size >= 8 and maximum > 2.5 * usual_maximum > 0:
        top = 1.5 * usual_maximum
        axes.set_ylim(0, top)
        num_above = int((finite > top).sum())
        note = f"{num_above} value{'s' * (num_above > 1)} above, up to {format_value(maximum)}"
        style = {"fontsize": "small", "color": COLORS["muted"], "ha": "right", "va": "top"}
        axes.text(0.995, 0.97, note, transform=axes.transAxes, **style)
    else:
        axes.set_ylim(0, 1.15 * maximum)


def _add_legend(axes: Any, runs: Sequence[RecordedRun]) -> None:
    """Add a legend next to the title if there is more than one label; it is gray if colors denote runs."""
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    if len(unique) < 2:
        return
    position = {"loc": "lower right", "bbox_to_anchor": (1.01, 1.015), "borderaxespad": 0.0, "borderpad": 0.2}
    style = {"ncols": 3, "frameon": False, "fontsize": 8.0, "handlelength": 1.4, "columnspacing": 1.2}
    legend = axes.legend(unique.values(), unique.keys(), labelcolor=COLORS["muted"], **position, **style)
    if len(runs) > 1:
        for handle in legend.legend_handles:
            handle.set_color(COLORS["muted"])


def _mark_attempts(axes: Any, run: RecordedRun) -> None:
    """Mark restarts, the steps that were lost and repeated and, along the lower edge, checkpoints."""
    for previous, attempt in zip(run.attempts, run.restarts, strict=False):
        if previous.lost_steps:
            last = attempt.resumed_step + previous.lost_steps
            axes.axvspan(attempt.resumed_step, last, color=COLORS["red"], alpha=0.13, linewidth=0, zorder=0)
        axes.axvline(attempt.resumed_step, color=COLORS["muted"], linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
    saved = reduce_to_columns(run.checkpoint_steps, run.checkpoint_steps).x
    position = {"transform": axes.get_xaxis_transform(), "zorder": 4}
    style = {"color": COLORS["green"], "markersize": 5, "markeredgewidth": 1.1}
    axes.plot(saved, np.full(saved.size, 0.012), "|", **style, **position)


def _draw_panel(
    axes: Any, title: str, draw: Callable[[Any, Sequence[RecordedRun]], None], runs: Sequence[RecordedRun]
) -> None:
    from matplotlib import ticker

    if any(run.train["step"].size for run in runs):
        draw(axes, runs)
        if len(runs) == 1:
            _mark_attempts(axes, runs[0])
    else:
        style = {"transform": axes.transAxes, "ha": "center", "va": "center", "color": COLORS["muted"]}
        axes.text(0.5, 0.5, "no steps recorded yet", **style)
        axes.set_xticks([])
        axes.set_yticks([])
    scale = axes.get_yscale()
    axes.set_title(f"{title}{', log scale' if scale == 'log' else ''}", loc="left", fontweight="bold", pad=7)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
    if scale == "linear":
        axes.yaxis.set_major_locator(ticker.MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: format_tick(value)))
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: format_tick(value)))
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    corner = {"transform": axes.transAxes, "ha": "right", "va": "top", "fontsize": 8.0, "color": COLORS["muted"]}
    axes.text(-0.015, -0.035, "step", **corner)


def format_tick(value: float) -> str:
    """Format a number as an axis label."""
    if value and abs(value) < 1e-3:
        return f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-")
    return readable_count(value) if abs(value) >= 1e4 else f"{round(value, 6):g}"


def _format_seconds(value: float) -> str:
    return f"{value:.3g} s" if value < 60 else readable_duration(value)


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
        "font.size": 8.5,
        "axes.titlesize": 9.0,
        "axes.labelsize": 8.0,
        "xtick.labelsize": 8.0,
        "ytick.labelsize": 8.0,
        "text.color": COLORS["ink"],
        "axes.titlecolor": COLORS["ink"],
        "axes.labelcolor": COLORS["muted"],
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
        "lines.solid_joinstyle": "round",
        **spines,
    }
    with matplotlib.rc_context(style), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a run name may have characters that the font lacks
        yield


def draw_png(runs: Sequence[RecordedRun], title: str, subtitle: str) -> bytes:
    """Return all panels as one PNG.  For a single run, a bar below them shows how the wall time was spent."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    logged = dict.fromkeys(name for run in runs for name in run.logged)
    panels: dict[str, Callable[[Any, Sequence[RecordedRun]], None]] = {
        name: partial(_draw_logged, name) for name in logged
    }
    panels |= PANELS
    num_rows = -(-len(panels) // 2)
    with chart_style():
        figure = Figure(figsize=(11.5, 1.2 + 3 * num_rows), dpi=130, facecolor="white", layout="constrained")
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
        top, middle, bottom = figure.subfigures(3, 1, height_ratios=(0.62, 3 * num_rows, 1.0))
        top.text(0.012, 0.66, title, fontsize=15, fontweight="bold", va="center")
        top.text(0.012, 0.1, subtitle, fontsize=9.5, color=COLORS["muted"], va="center")
        all_axes = middle.subplots(num_rows, 2).flat
        for axes, (name, draw) in zip(all_axes, panels.items(), strict=False):
            _draw_panel(axes, name, draw, runs)
        for axes in all_axes[len(panels) :]:  # an odd number of panels leaves one unused
            axes.set_axis_off()
        if len(runs) == 1:
            _draw_time_bar(bottom, runs[0])
        else:
            lines = [Line2D([], [], color=color, linewidth=2) for _, color in _with_colors(runs)]
            names = [f"{number}  {run.name}" for number, run in enumerate(runs, start=1)]
            bottom.legend(lines, names, loc="center", ncols=4, frameon=False)
        file = io.BytesIO()
        figure.savefig(file, format="png")
    return file.getvalue()


def _draw_time_bar(figure: Any, run: RecordedRun) -> None:
    axes = figure.add_subplot()
    axes.set_axis_off()
    total, left = run.goodput.wall_s, 0.0
    for name, (label, color) in TIME_PART_STYLES.items():
        seconds = getattr(run.goodput, name)
        if total > 0 and seconds > 0.0005 * total:
            text = f"{label} {100 * seconds / total:.1f}%"
            axes.barh(0, seconds, left=left, color=COLORS[color], label=text, edgecolor="white", linewidth=0.8)
            left += seconds
    if left:
        axes.set_xlim(0, left)
        counts = f"{run.goodput.restarts} restarts, {run.goodput.lost_steps} lost steps"
        axes.set_title(f"wall time {readable_duration(total)}, {counts}", loc="left", fontweight="bold")
        position = {"loc": "upper left", "bbox_to_anchor": (-0.005, 0.0)}
        axes.legend(ncols=4, frameon=False, handlelength=1, columnspacing=2.0, **position)
