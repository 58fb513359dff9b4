"""Generates report pages, each of which is a single HTML document without scripts that needs no other file.

All text from a run, such as its name, reason and configuration, is escaped.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from trainer.checkpoint.interval import costs_of, describe_costs
from trainer.config.schema import CheckpointSection, RunConfig
from trainer.errors import yaml_scalar
from trainer.metrics.console import readable_count, readable_duration
from trainer.report.figures import (
    MARKED_COLUMNS,
    RUN_COLORS,
    TIME_PARTS,
    Panel,
    draw_svg,
    is_logarithmic,
    num_columns_of,
    panels_of,
    series_of,
)
from trainer.report.history import Attempt, RecordedRun, last_value, median

MISSING = "&ndash;"
"""Placeholder for a missing value."""
REFRESH_S = 5
"""Seconds between reloads of a page that is kept up to date while any of its runs is in progress."""

_STYLE = (resources.files("trainer.report") / "page.css").read_text(encoding="utf-8")


def render_page(run: RecordedRun, page_folder: Path, reloads: bool = False) -> str:
    """Return the HTML of one run's page.

    page_folder: the folder that the page is in; links are relative to it.
    reloads: whether the browser is to reload the page while the run is in progress.
    """
    parts = [
        f'<header><h1>{escape(run.name)} <span class="state {_state_class(run.state)}">{escape(run.state)}</span></h1>',
        f'<p class="muted">{escape(subtitle_of(run))}</p>',
        f'<p class="muted">{escape(run.reason)}</p>' if run.reason and run.reason != "train.steps reached" else "",
        f'</header><section class="card">{_tiles(run)}</section>',
        _time_bar(run),
        _charts([run]),
        _legend([run]),
        _sources_section(run),
        _logged_section(run),
        _samples_section(run),
        _files_section(run, page_folder),
        _attempts_section(run),
        _save_costs_section(run),
        _configuration_section(run),
    ]
    return _html(run.name, parts, [run], reloads)


def render_comparison(runs: Sequence[RecordedRun], reloads: bool = False) -> str:
    """Return the HTML of the page that compares runs.

    It has a summary table, the settings that differ, charts of all runs, and the configuration of each.

    reloads: whether the browser is to reload the page while any of the runs is in progress.
    """
    names = names_of(runs)
    rows = [_summary_row(number, name, run) for number, (name, run) in enumerate(zip(names, runs, strict=True))]
    headers = ("run", "state", "model", "parameters", "steps", "target tokens", "loss", "eval loss", "target tokens/s")
    parts = [
        f'<header><h1>{len(runs)} runs compared</h1></header><section class="card">',
        _table((*headers, "wall time", "goodput"), rows, num_text=3),
        "</section>",
        _differences_section(runs, names),
        _charts(runs),
        _legend(runs),
        *(_configuration_section(run, f"Configuration of {name}") for name, run in zip(names, runs, strict=True)),
    ]
    return _html(f"{len(runs)} runs compared", parts, runs, reloads)


def names_of(runs: Sequence[RecordedRun]) -> list[str]:
    """Return a unique label for each run: its name or, if several runs share that name, its folder."""
    run_names = [run.name for run in runs]
    names = [run.name if run_names.count(run.name) == 1 else str(run.folder) for run in runs]
    return [name if names.count(name) == 1 else f"{name} ({number})" for number, name in enumerate(names, start=1)]


def _html(title: str, parts: Iterable[str], runs: Sequence[RecordedRun], reloads: bool) -> str:
    written = time.strftime("%Y-%m-%d %H:%M:%S")
    is_running = any(run.state == "running" for run in runs)
    refresh = f'<meta http-equiv="refresh" content="{REFRESH_S}">' if reloads and is_running else ""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">{refresh}'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body><main>\n"
        + "\n".join(part for part in parts if part)
        + f"\n<footer>Written {written} by meshtrainer.</footer></main></body></html>\n"
    )


def subtitle_of(run: RecordedRun) -> str:
    """Return the line below the title: model, number of parameters, mesh, device and torch version."""
    items = [run.model]
    if run.attempts:
        attempt = run.attempts[-1]
        if attempt.num_parameters:
            items.append(f"{readable_count(attempt.num_parameters)} parameters")
        if attempt.mesh:
            items.append(f"{attempt.mesh} on {attempt.num_ranks} {attempt.device} rank{'s' * (attempt.num_ranks != 1)}")
        if attempt.torch:
            items.append(f"torch {attempt.torch}")
    return " · ".join(item for item in items if item)


def _tiles(run: RecordedRun) -> str:
    """Return the key figures at the top of the page."""
    goodput = run.goodput
    loss, eval_loss = last_value(run.train, "loss"), last_value(run.evals, "loss")
    bits, memory = last_value(run.evals, "bits_per_byte"), last_value(run.train, "peak_memory_gib")
    speed, mfu = median(run.train, "tokens_per_s"), median(run.train, "mfu")
    num_skipped = last_value(run.train, "skipped")
    of_total = f"of {run.num_steps:,}" if run.num_steps is not None else ""
    skipped = f"{num_skipped:,.0f} skipped" if num_skipped else ""
    with_mfu = "" if mfu is None else f"; MFU {_format_percent(mfu)}"
    tiles = [
        ("steps", f"{run.last_step:,}", ", ".join(text for text in (of_total, skipped) if text)),
        ("target tokens", readable_count(last_value(run.train, "tokens") or 0), ""),
        ("training loss", _format_number(loss), "last recorded value"),
        ("evaluation loss", _format_number(eval_loss), "" if bits is None else f"{bits:.4f} bits per byte"),
        ("target tokens per second", readable_count(speed) if speed else MISSING, f"median{with_mfu}"),
        ("peak memory", MISSING if memory is None else f"{memory:.2f} GiB", "per rank"),
        ("wall time", readable_duration(goodput.wall_s) if goodput.wall_s else MISSING, ""),
        ("goodput", _format_percent(goodput.fraction), "of wall time"),
        ("restarts", str(goodput.restarts), ""),
        ("steps lost", f"{goodput.lost_steps:,}", "and repeated" if goodput.lost_steps else ""),
    ]
    items = (f"<div><dt>{dt}</dt><dd>{dd}<small>{escape(small)}</small></dd></div>" for dt, dd, small in tiles)
    return f'<dl class="tiles">{"".join(items)}</dl>'


def _time_bar(run: RecordedRun) -> str:
    """Return the bar that shows how the wall time was spent."""
    goodput = run.goodput
    if goodput.fraction is None:
        return ""
    bar, items = [], []
    for name, (label, color) in TIME_PARTS.items():
        seconds = getattr(goodput, name)
        share = seconds / goodput.wall_s
        if share >= 0.0005:
            bar.append(f'<span style="flex: {share:.5f} 1 0; background: var(--{color})" title="{label}"></span>')
        if seconds > 0:
            swatch = f'<span class="swatch" style="background: var(--{color})"></span>'
            items.append(f"<li>{swatch}{label} <b>{_format_percent(share)}</b> {_format_duration(seconds)}</li>")
    return (
        '<section class="card"><h2>Where the time went</h2>'
        f'<div class="bar">{"".join(bar)}</div><ul class="parts">{"".join(items)}</ul></section>'
    )


def _charts(runs: Sequence[RecordedRun]) -> str:
    """Return the charts of one run, or of several in common panels."""
    return f'<section class="charts">{"".join(_chart(panel, runs) for panel in panels_of(runs))}</section>'


def _chart(panel: Panel, runs: Sequence[RecordedRun]) -> str:
    scale = "<small>log scale</small>" if is_logarithmic(panel, runs) else ""
    series = series_of(panel, runs)
    entries = []
    for each in series if len(series) > 1 else []:
        color = each.color if len(runs) == 1 else "muted"
        mark = f'<i class="{each.style}" style="color: var(--{color})"></i>'
        entries.append(f"<span>{mark}{escape(each.label)}</span>")
    legend = f'<span class="legend">{"".join(entries)}</span>' if entries else ""
    caption = f"<figcaption><b>{escape(panel.title)}</b>{scale}{legend}</figcaption>"
    return f'<figure class="card">{caption}{draw_svg(panel, runs)}</figure>'


def _differences_section(runs: Sequence[RecordedRun], names: Sequence[str]) -> str:
    """Return a table of the settings that differ between the runs, other than their names and folders."""
    settings = [
        {
            f"{section}.{key}": value
            for section, values in run.settings.items()
            if isinstance(values, Mapping)
            for key, value in values.items()
        }
        for run in runs
    ]
    keys = dict.fromkeys(key for values in settings for key in values)
    differing = [
        key
        for key in keys
        if key not in ("run.name", "run.dir") and len({str(values.get(key, MISSING)) for values in settings}) > 1
    ]
    if not differing:
        return '<section class="card"><h2>What differs</h2><p class="muted">No setting.</p></section>'
    rows = []
    for key in differing:
        texts = [yaml_scalar(values.get(key, "")) for values in settings]
        cells = [
            escape(text)
            if len(text) <= _LONG_SETTING
            else f"<details><summary>{escape(text[:_LONG_SETTING])}&hellip;</summary>{escape(text)}</details>"
            for text in texts
        ]
        rows.append([escape(key), *cells])
    table = _table(("", *map(escape, names)), rows, num_text=len(names) + 1)
    return f'<section class="card wraps"><h2>What differs</h2>{table}</section>'


_LONG_SETTING = 120
"""Settings longer than this many characters are truncated in a table, and expand when clicked.  A setting may hold a
model's entire `config.json`."""


_MAX_SAMPLES = 20


def _samples_section(run: RecordedRun) -> str:
    """Return the samples that the model generated during training, newest first."""
    if not run.samples:
        return ""
    items = [
        f"<details{' open' if number == 0 else ''}><summary>step {escape(str(sample.get('step', '')))}</summary>"
        f"<pre><b>{escape(str(sample.get('prompt', '')))}</b>{escape(str(sample.get('text', '')))}</pre></details>"
        for number, sample in enumerate(reversed(run.samples[-_MAX_SAMPLES:]))
    ]
    return f'<section class="card samples"><h2>Samples</h2>{"".join(items)}</section>'


def _files_section(run: RecordedRun, page_folder: Path) -> str:
    """Return the list of existing checkpoints and traces, with links relative to the page's folder."""
    checkpoints = sorted((run.folder / "checkpoints").glob("step_*"))
    traces = [path for name in dict.fromkeys(run.traces) if (path := run.folder / "profile" / name).is_file()]
    if not (checkpoints or traces):
        return ""
    items = [
        f'<li><a href="{escape(quote(os.path.relpath(path, page_folder)))}">{escape(path.name)}</a></li>'
        for path in (*checkpoints, *traces)
    ]
    hint = '<p class="muted">Traces open in <b>ui.perfetto.dev</b>.</p>' if traces else ""
    return f'<section class="card"><h2>Files</h2><ul class="links">{"".join(items)}</ul>{hint}</section>'


def _legend(runs: Sequence[RecordedRun]) -> str:
    """Return a legend for what the charts mark: in those of a single run, checkpoints, restarts and lost steps."""
    entries = []
    if len(runs) == 1:
        (run,) = runs
        if run.checkpoint_steps.size:
            entries.append('<i class="checkpoint"></i>checkpoint')
        if len(run.attempts) > 1:
            entries.append('<i class="restart"></i>restart')
        if any(attempt.lost_steps for attempt in run.attempts):
            entries.append('<i class="lost"></i>steps lost in a crash and repeated')
    if not all(np.isfinite(run.train[column]).all() for run in runs for column in MARKED_COLUMNS):
        entries.append('<b class="cross">&times;</b>not finite')
    if any(run.train["step"].size > 2 * num_columns_of(runs) for run in runs):
        entries.append("line: mean over several steps; band: minimum to maximum")
    return f'<div class="key">{"".join(f"<span>{entry}</span>" for entry in entries)}</div>' if entries else ""


def _sources_section(run: RecordedRun) -> str:
    """Return a table of the losses and epochs of each data source, if the run has several sources."""
    if not run.sources:
        return ""
    rows = [
        [
            escape(source),
            _format_number(last_value(run.train, f"loss_{source}")),
            _format_number(last_value(run.evals, f"loss_{source}")),
            f"{last_value(run.train, f'epoch_{source}') or 0:.2f}",
        ]
        for source in run.sources
    ]
    table = _table(("", "training loss", "evaluation loss", "epochs"), rows, num_text=1)
    return f'<section class="card"><h2>Sources</h2>{table}</section>'


def _logged_section(run: RecordedRun) -> str:
    """Return a table of the latest values that the run recorded with `Trainer.log`."""
    if not run.logged:
        return ""
    rows = [
        [escape(name), *(_format_logged(last_value(table, name)) for table in (run.train, run.evals))]
        for name in run.logged
    ]
    table = _table(("", "training", "evaluation"), rows, num_text=1)
    return f'<section class="card"><h2>Logged fields</h2>{table}</section>'


def _attempts_section(run: RecordedRun) -> str:
    if not run.attempts:
        return ""
    headers = ("", "began", "mesh", "ended", "ranks", "from step", "to step", "steps lost", "loading", "wall time")
    rows = [_attempt_row(number, attempt) for number, attempt in enumerate(run.attempts, start=1)]
    table = _table((*headers, "goodput"), rows, num_text=4)
    return f'<section class="card"><h2>Attempts</h2>{table}</section>'


def _attempt_row(number: int, attempt: Attempt) -> list[str]:
    share = attempt.update_s / attempt.wall_s if attempt.wall_s else None
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(attempt.began)) if attempt.began else MISSING
    return [
        str(number),
        began,
        escape(attempt.mesh),
        f'<span class="{_state_class(attempt.outcome)}">{escape(attempt.outcome)}</span>',
        str(attempt.num_ranks or MISSING),
        f"{attempt.resumed_step:,}",
        f"{attempt.last_step:,}",
        f"{attempt.lost_steps:,}" if attempt.lost_steps else MISSING,
        MISSING if attempt.load_s is None else _format_duration(attempt.load_s),
        readable_duration(attempt.wall_s) if attempt.wall_s else MISSING,
        _format_percent(share),
    ]


def save_costs_of(run: RecordedRun) -> dict[str, str]:
    """Return a description, by topic, of how saves and failures affect the run's goodput, given its history.

    Returns an empty mapping if the run has saved nothing yet, saves only at its end, or did not record its number of
    nodes.
    """
    num_nodes = run.attempts[-1].num_nodes if run.attempts else 0
    every = run.setting("checkpoint", "every")
    if not run.history.saves or not num_nodes or not every:
        return {}
    section = CheckpointSection()
    if mtbf_h := _positive(run.setting("checkpoint", "node_mtbf_h")):
        section = dataclasses.replace(section, node_mtbf_h=mtbf_h)
    costs = costs_of(RunConfig(checkpoint=section), num_nodes, 0.0, run.history)
    step_s = median(run.train, "step_s")
    every_s = every * step_s if isinstance(every, int) and step_s else costs.best_interval_s
    return describe_costs(costs, every_s, num_nodes)


def _positive(value: Any) -> float | None:
    """Return a positive number as a float, and None for anything else."""
    return float(value) if isinstance(value, (int, float)) and value > 0 else None


def _save_costs_section(run: RecordedRun) -> str:
    """Return a table of save and failure costs, with the recommended save interval."""
    rows = [[escape(topic), escape(text)] for topic, text in save_costs_of(run).items()]
    if not rows:
        return ""
    return f'<section class="card"><h2>Saves and failures</h2>{_table(("", ""), rows, num_text=2)}</section>'


def _configuration_section(run: RecordedRun, title: str = "Configuration") -> str:
    if not run.config_yaml:
        return ""
    return f'<details class="card"><summary>{escape(title)}</summary><pre>{escape(run.config_yaml)}</pre></details>'


def _table(headers: Sequence[str], rows: Iterable[Sequence[str]], num_text: int) -> str:
    """Return an HTML table.  Cells must already be HTML; the first `num_text` columns are text, the others numbers."""
    sides = [' class="text"' if number < num_text else "" for number in range(len(headers))]
    head = "".join(f"<th{side}>{text}</th>" for side, text in zip(sides, headers, strict=True))
    body = "".join(
        f"<tr>{''.join(f'<td{side}>{cell}</td>' for side, cell in zip(sides, row, strict=True))}</tr>" for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _summary_row(number: int, name: str, run: RecordedRun) -> list[str]:
    """Return a run's row of the table that compares runs, with the color that it has in the charts."""
    color = RUN_COLORS[number % len(RUN_COLORS)]
    speed = median(run.train, "tokens_per_s")
    num_parameters = run.attempts[-1].num_parameters if run.attempts else 0
    return [
        f'<span class="swatch" style="background: var(--{color})"></span>{escape(name)}',
        f'<span class="{_state_class(run.state)}">{escape(run.state)}</span>',
        escape(run.model),
        readable_count(num_parameters) if num_parameters else MISSING,
        f"{run.last_step:,}",
        readable_count(last_value(run.train, "tokens") or 0),
        _format_number(last_value(run.train, "loss")),
        _format_number(last_value(run.evals, "loss")),
        readable_count(speed) if speed else MISSING,
        readable_duration(run.goodput.wall_s) if run.goodput.wall_s else MISSING,
        _format_percent(run.goodput.fraction),
    ]


def _state_class(state: str) -> str:
    """Return the CSS class of a run's state."""
    return state if state in ("finished", "running", "stopped", "failed", "killed") else "unknown"


def _format_number(value: float | None) -> str:
    return MISSING if value is None else f"{value:.4f}"


def _format_logged(value: float | None) -> str:
    return MISSING if value is None else f"{value:.4g}"


def _format_percent(share: float | None) -> str:
    return MISSING if share is None else f"{100 * share:.1f}%"


def _format_duration(seconds: float) -> str:
    if seconds < 0.0995:
        return f"{1000 * seconds:.2g} ms"
    return f"{seconds:.2g} s" if seconds < 9.95 else readable_duration(seconds)
