"""Generates report pages, each of which is a single self-contained HTML document.

All text from a run, such as its name, reason and configuration, is escaped: by `html.escape` in the HTML, and by
`page_data` in the data for the page's script.
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

from trainer.checkpoint.interval import costs_of, describe_costs
from trainer.config import CheckpointSection, RunConfig
from trainer.errors import yaml_scalar
from trainer.metrics.console import readable_count, readable_duration
from trainer.report.charts import RUN_COLORS, TIME_PART_STYLES
from trainer.report.history import NUM_POINTS, RecordedRun, page_data

MISSING = "&ndash;"
"""Placeholder for a missing value."""
REFRESH_S = 5.0
"""Seconds between reloads of a page while any of its runs is in progress."""

STYLE = (resources.files("trainer.report") / "page.css").read_text(encoding="utf-8")
SCRIPT = (resources.files("trainer.report") / "charts.js").read_text(encoding="utf-8")


def render_page(run: RecordedRun, page_folder: Path | None = None, is_served: bool = False) -> str:
    """Return the HTML of one run's page, which the caller writes to a file or serves.

    page_folder: the folder that the page is in; links are relative to it.  None omits the list of files.
    is_served: whether the page is served, not written to a file.  If so, checkpoint folders are listed without links,
        since a browser on another machine cannot open them.
    """
    name, state = escape(run.name), escape(run.state)
    parts = [
        f'<header><h1>{name} <span class="state {_state_class(run.state)}">{state}</span></h1>',
        f'<p class="muted">{escape(subtitle_of(run))}</p>',
        f'<p class="muted">{escape(run.reason)}</p>' if run.reason and run.reason != "train.steps reached" else "",
        f'</header><section class="card">{_tiles(run)}</section>',
        _time_bar(run),
        _CHARTS,
        _legend(run),
        _sources_section(run),
        _logged_section(run),
        _samples_section(run),
        _files_section(run, page_folder, is_served),
        _attempts_section(run),
        _save_costs_section(run),
        _configuration_section(run),
    ]
    return _html(run.name, parts, [run], [run.name])


def render_comparison(runs: Sequence[RecordedRun]) -> str:
    """Return the HTML of the page that compares runs.

    It has a summary table, the settings that differ, charts of all runs, and the configuration of each.
    """
    names = names_of(runs)
    rows = [_summary_row(number, name, run) for number, (name, run) in enumerate(zip(names, runs, strict=True))]
    headers = ("run", "state", "model", "parameters", "steps", "target tokens", "loss", "eval loss", "target tokens/s")
    parts = [
        f'<header><h1>{len(runs)} runs compared</h1></header><section class="card">',
        _table((*headers, "wall time", "goodput"), rows, num_text=3),
        "</section>",
        _differences_section(runs, names),
        _CHARTS,
        *(_configuration_section(run, f"Configuration of {name}") for name, run in zip(names, runs, strict=True)),
    ]
    return _html(f"{len(runs)} runs compared", parts, runs, names)


def names_of(runs: Sequence[RecordedRun]) -> list[str]:
    """Return a unique label for each run: its name or, if several runs share that name, its folder."""
    run_names = [run.name for run in runs]
    names = [run.name if run_names.count(run.name) == 1 else str(run.folder) for run in runs]
    return [name if names.count(name) == 1 else f"{name} ({number})" for number, name in enumerate(names, start=1)]


def _html(title: str, parts: Iterable[str], runs: Sequence[RecordedRun], names: Sequence[str]) -> str:
    written = time.strftime("%Y-%m-%d %H:%M:%S")
    data = page_data(runs, names, REFRESH_S if any(run.state == "running" for run in runs) else 0.0)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body><main>\n"
        + "\n".join(part for part in parts if part)
        + f"\n<footer>Written {written} by meshtrainer.</footer></main>\n"
        + f'<script type="application/json" id="data">{data}</script>\n<script>\n{SCRIPT}</script></body></html>\n'
    )


def subtitle_of(run: RecordedRun) -> str:
    """Return the line below the title: model, number of parameters, mesh, device and torch version."""
    start = run.attempts[-1].start if run.attempts else {}
    items = [run.model]
    if start.get("parameters"):
        items.append(f"{readable_count(start['parameters'])} parameters")
    if run.attempts and run.attempts[-1].mesh:
        ranks = start.get("world_size", 1)
        items.append(f"{run.attempts[-1].mesh} on {ranks} {start.get('device', '')} rank{'s' * (ranks != 1)}")
    if start.get("torch"):
        items.append(f"torch {start['torch']}")
    return " · ".join(item for item in items if item)


def _tiles(run: RecordedRun) -> str:
    """Return the key figures at the top of the page."""
    goodput = run.goodput
    loss, eval_loss = run.last("loss"), run.last("loss", from_evals=True)
    bits = run.last("bits_per_byte", from_evals=True)
    tokens, memory = run.last("tokens"), run.last("peak_memory_gib")
    speed, mfu = run.median("tokens_per_s"), run.median("mfu")
    skipped = f"{run.num_skipped} skipped" if run.num_skipped else ""
    with_mfu = "" if mfu is None else f"; MFU {_format_percent(mfu)}"
    of_total = f"of {run.num_steps:,}" if isinstance(run.num_steps, int) else ""
    tiles = [
        ("steps", f"{run.last_step:,}", ", ".join(text for text in (of_total, skipped) if text)),
        ("target tokens", readable_count(tokens or 0), ""),
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
    for name, (label, color) in TIME_PART_STYLES.items():
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


_CHARTS = """\
<section class="controls" hidden>
<label>over <select name="axis"><option value="step">steps</option><option value="tokens">tokens</option>
<option value="hours">wall time</option></select></label>
<label>scale <select name="log"><option value="auto">auto</option><option value="linear">linear</option>
<option value="log">logarithmic</option></select></label>
<label>smoothing <input type="range" name="smoothing" min="0" max="0.98" step="0.02"></label>
<label><input type="checkbox" name="live">refresh during training</label></section>
<noscript><p class="card">The charts need JavaScript. The PNG next to this page has them too.</p></noscript>
<section class="charts"></section>"""
"""The controls of the charts, and the section that the page's script fills with the charts."""


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


def _files_section(run: RecordedRun, page_folder: Path | None, is_served: bool) -> str:
    """Return the list of existing checkpoints and traces, with links relative to the page's folder."""
    checkpoints = sorted((run.folder / "checkpoints").glob("step_*"))
    traces = [path for name in dict.fromkeys(run.traces) if (path := run.folder / "profile" / name).is_file()]
    if page_folder is None or not (checkpoints or traces):
        return ""
    items = [
        f"<li>{escape(str(path))}</li>"
        if is_served and path in checkpoints
        else f'<li><a href="{escape(quote(os.path.relpath(path, page_folder)))}">{escape(path.name)}</a></li>'
        for path in (*checkpoints, *traces)
    ]
    hint = '<p class="muted">Traces open in <b>ui.perfetto.dev</b>.</p>' if traces else ""
    return f'<section class="card"><h2>Files</h2><ul class="links">{"".join(items)}</ul>{hint}</section>'


def _legend(run: RecordedRun) -> str:
    """Return a legend for the checkpoints, restarts and lost steps in the charts."""
    entries = []
    if run.checkpoint_steps.size:
        entries.append('<i style="height: 11px; border-left: 2px solid var(--green)"></i>checkpoint')
    if run.restarts:
        entries.append('<i style="height: 14px; border-left: 2px dashed var(--muted)"></i>restart')
    if run.goodput.lost_steps:
        style = "width: 14px; height: 14px; background: var(--red); opacity: .25"
        entries.append(f'<i style="{style}"></i>steps lost in a crash and repeated')
    if run.train["step"].size > 2 * NUM_POINTS:
        entries.append("line: mean of a point's steps; band: minimum to maximum")
    return f'<div class="key">{"".join(f"<span>{entry}</span>" for entry in entries)}</div>' if entries else ""


def _sources_section(run: RecordedRun) -> str:
    """Return a table of the losses and epochs of each data source, if the run has several sources."""
    if not run.sources:
        return ""
    rows = [
        [
            escape(source),
            _format_number(run.last(f"loss_{source}")),
            _format_number(run.last(f"loss_{source}", from_evals=True)),
            epochs,
        ]
        for source in run.sources
        for epochs in [f"{run.last(f'epoch_{source}') or 0:.2f}"]
    ]
    table = _table(("", "training loss", "evaluation loss", "epochs"), rows, num_text=1)
    return f'<section class="card"><h2>Sources</h2>{table}</section>'


def _logged_section(run: RecordedRun) -> str:
    """Return a table of the latest values that the run recorded with `Trainer.log`."""
    if not run.logged:
        return ""
    rows = [
        [escape(name), _format_logged(run.last(name)), _format_logged(run.last(name, from_evals=True))]
        for name in run.logged
    ]
    table = _table(("", "training", "evaluation"), rows, num_text=1)
    return f'<section class="card"><h2>Logged fields</h2>{table}</section>'


def _attempts_section(run: RecordedRun) -> str:
    if not run.attempts:
        return ""
    rows = []
    for number, attempt in enumerate(run.attempts, start=1):
        start = attempt.start
        started = start.get("started") or start.get("time")
        share = attempt.update_s / attempt.wall_s if attempt.wall_s else None
        outcome = f'<span class="{_state_class(attempt.outcome)}">{escape(attempt.outcome)}</span>'
        rows.append(
            [
                str(number),
                time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(started)) if started else MISSING,
                escape(attempt.mesh),
                outcome,
                escape(str(start.get("world_size", ""))),
                f"{attempt.resumed_step:,}",
                f"{attempt.last_step:,}",
                f"{attempt.lost_steps:,}" if attempt.lost_steps else MISSING,
                MISSING if "load_s" not in start else _format_duration(start["load_s"]),
                readable_duration(attempt.wall_s) if attempt.wall_s else MISSING,
                _format_percent(share),
            ]
        )
    headers = ("", "began", "mesh", "ended", "ranks", "from step", "to step", "steps lost", "loading", "wall time")
    table = _table((*headers, "goodput"), rows, num_text=4)
    return f'<section class="card"><h2>Attempts</h2>{table}</section>'


def save_costs_of(run: RecordedRun) -> dict[str, str]:
    """Return a description, by topic, of how saves and failures affect the run's goodput, given its history.

    Returns an empty mapping if the run has saved nothing yet, saves only at its end, or did not record its number of
    nodes.
    """
    num_nodes = _positive(run.attempts[-1].start.get("nodes")) if run.attempts else None
    every = run.checkpoint.get("every")
    if not run.history.saves or not num_nodes or not every:
        return {}
    section = CheckpointSection()
    if mtbf_h := _positive(run.checkpoint.get("node_mtbf_h")):
        section = dataclasses.replace(section, node_mtbf_h=mtbf_h)
    costs = costs_of(RunConfig(checkpoint=section), int(num_nodes), 0.0, run.history)
    step_s = run.median("step_s")
    every_s = every * step_s if isinstance(every, int) and step_s else costs.best_interval_s
    return describe_costs(costs, every_s, int(num_nodes))


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
    """Return a run's row of the table that compares runs; its label selects whether the charts show it."""
    color, text = RUN_COLORS[number % len(RUN_COLORS)], escape(name)
    box = f'<input type="checkbox" data-run="{text}" checked>'
    start = run.attempts[-1].start if run.attempts else {}
    speed, parameters = run.median("tokens_per_s"), start.get("parameters")
    return [
        f'<label>{box} <span class="swatch" style="background: var(--{color})"></span>{text}</label>',
        f'<span class="{_state_class(run.state)}">{escape(run.state)}</span>',
        escape(run.model),
        readable_count(parameters) if parameters else MISSING,
        f"{run.last_step:,}",
        readable_count(run.last("tokens") or 0),
        _format_number(run.last("loss")),
        _format_number(run.last("loss", from_evals=True)),
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
