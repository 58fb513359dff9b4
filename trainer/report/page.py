"""The page of a report: one HTML file that needs nothing beside it.

Whatever comes from a run (its name, reason, configuration) passes through `html.escape`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from html import escape

from trainer.metrics.console import readable_count, readable_duration
from trainer.report.charts import BY_SOURCE, PANELS, PARTS, SERIES, draw_svg
from trainer.report.saving import saving_of
from trainer.report.story import Run

NONE = "&ndash;"
"""Stands where there is no value."""

STYLE = """
:root {
  color-scheme: light dark;
  --font: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif;
  --page: #f6f7f9; --card: #ffffff; --line: #dfe3e8;
  --ink: #1b1f24; --muted: #66707b; --grid: #e4e7eb;
  --blue: #0072b2; --orange: #e69f00; --green: #009e73; --red: #d55e00; --sky: #56b4e9; --pink: #cc79a7;
  --olive: #8c8a00; --black: #3d4650; --amber: #8f6200;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #101317; --card: #181c21; --line: #2b3138;
    --ink: #e8ebee; --muted: #98a2ad; --grid: #2b3138;
    --blue: #4ba6e3; --orange: #f0b429; --green: #2bbf94; --red: #f08043; --sky: #8fd0f7; --pink: #e09cc3;
    --olive: #c2bf3a; --black: #c3cad1; --amber: #f0b429;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 var(--font); }
main { max-width: 1180px; margin: 0 auto; padding: 28px 20px 40px; }
header { margin-bottom: 20px; }
h1 { font-size: 27px; line-height: 1.2; letter-spacing: -0.01em; margin: 0 0 6px; overflow-wrap: anywhere; }
h2 { font-size: 16px; margin: 0 0 12px; }
p { margin: 0; }
.muted { color: var(--muted); }
.state { display: inline-block; margin-left: 10px; padding: 2px 11px; border-radius: 99px; font-size: 13px;
  font-weight: 600; letter-spacing: 0; vertical-align: 4px; border: 1.5px solid currentColor; }
.finished { color: var(--green); } .running { color: var(--blue); } .stopped { color: var(--amber); }
.failed, .killed { color: var(--red); } .unknown { color: var(--muted); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 18px 20px;
  margin-bottom: 16px; min-width: 0; }
.tiles { display: grid; grid-template-columns: repeat(5, minmax(0, 1fr)); gap: 18px 20px; margin: 0; }
.tiles dt { color: var(--muted); font-size: 12.5px; }
.tiles dd { margin: 0; font-size: 21px; font-weight: 600; line-height: 1.3; font-variant-numeric: tabular-nums; }
.tiles small { display: block; font-size: 12.5px; font-weight: 400; color: var(--muted); }
.bar { display: flex; gap: 2px; height: 22px; border-radius: 5px; overflow: hidden; margin-bottom: 12px; }
.bar span { min-width: 2px; }
.parts { display: flex; flex-wrap: wrap; gap: 4px 22px; margin: 0; padding: 0; list-style: none; font-size: 13.5px;
  font-variant-numeric: tabular-nums; }
.swatch { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 7px; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 430px), 1fr)); gap: 16px;
  margin-bottom: 10px; }
.charts figure { margin: 0; padding: 10px 10px 6px; }
.charts svg { display: block; width: 100%; height: auto; }
.key { display: flex; flex-wrap: wrap; gap: 4px 22px; font-size: 13px; color: var(--muted); margin: 0 4px 18px; }
.key i { display: inline-block; vertical-align: middle; margin-right: 7px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th { color: var(--muted); font-weight: 500; text-align: right; padding: 0 0 6px 20px; vertical-align: bottom;
  white-space: nowrap; }
td { border-top: 1px solid var(--line); padding: 6px 0 6px 20px; text-align: right; white-space: nowrap; }
th.text, td.text { text-align: left; }
th:first-child, td:first-child { padding-left: 0; }
summary { cursor: pointer; font-weight: 600; font-size: 16px; }
pre { margin: 12px 0 0; overflow-x: auto; font: 13px/1.5 ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
footer { color: var(--muted); font-size: 13px; margin: 18px 4px 0; }
@media (max-width: 560px) {
  main { padding: 18px 12px 28px; } h1 { font-size: 22px; } .card { padding: 14px; }
  .charts figure { padding: 8px 6px 4px; } .tiles { gap: 14px; grid-template-columns: repeat(2, minmax(0, 1fr)); }
}
@media print { body { background: none; } .card { break-inside: avoid; } }
"""


def write_page(run: Run) -> str:
    """Return the page of one run."""
    name, state = escape(run.name), escape(run.state)
    parts = [
        f'<header><h1>{name} <span class="state {_class(run.state)}">{state}</span></h1>',
        f'<p class="muted">{escape(facts_of(run))}</p>',
        f'<p class="muted">{escape(run.reason)}</p>' if run.reason and run.reason != "train.steps reached" else "",
        f'</header><section class="card">{_tiles(run)}</section>',
        _time(run),
        _charts([run]),
        _key(run),
        _sources(run),
        _attempts(run),
        _saving(run),
        _configuration(run),
    ]
    return _html(run.name, parts)


def write_comparison(runs: Sequence[Run]) -> str:
    """Return the page that compares runs: their curves in the same charts."""
    rows = [[_name(number, run), *_summary(run)] for number, run in enumerate(runs)]
    heads = ("run", "state", "model", "parameters", "steps", "tokens", "loss", "eval loss", "tokens/s", "wall time")
    parts = [
        f'<header><h1>{len(runs)} runs compared</h1></header><section class="card">',
        _table((*heads, "goodput"), rows, num_text=3),
        "</section>",
        _charts(runs),
        *(_configuration(run, f"Configuration of {run.name}") for run in runs),
    ]
    return _html(f"{len(runs)} runs compared", parts)


def _html(title: str, parts: Iterable[str]) -> str:
    written = time.strftime("%Y-%m-%d %H:%M:%S")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body><main>\n"
        + "\n".join(part for part in parts if part)
        + f"\n<footer>Written {written} by meshtrainer.</footer></main></body></html>\n"
    )


def facts_of(run: Run) -> str:
    """Return the line below the title: model, parameters, mesh, device, torch."""
    facts = run.attempts[-1].facts if run.attempts else {}
    found = [run.model]
    if facts.get("parameters"):
        found.append(f"{readable_count(facts['parameters'])} parameters")
    if run.attempts and run.attempts[-1].mesh:
        ranks = facts.get("world_size", 1)
        found.append(f"{run.attempts[-1].mesh} on {ranks} {facts.get('device', '')} rank{'s' * (ranks != 1)}")
    if facts.get("torch"):
        found.append(f"torch {facts['torch']}")
    return " · ".join(item for item in found if item)


def _tiles(run: Run) -> str:
    goodput = run.goodput
    loss, eval_loss, bits = run.last("loss"), run.last("loss", "eval"), run.last("bits_per_byte", "eval")
    tokens, memory = run.last("tokens"), run.last("peak_memory_gib")
    speed, mfu = run.median("tokens_per_s"), run.median("mfu")
    skipped = f"{run.num_skipped} skipped" if run.num_skipped else ""
    with_mfu = "" if mfu is None else f"; MFU {_percent(mfu)}"
    of = f"of {run.num_steps:,}" if isinstance(run.num_steps, int) else ""
    tiles = [
        ("steps", f"{run.reached:,}", ", ".join(text for text in (of, skipped) if text)),
        ("tokens", readable_count(tokens or 0), ""),
        ("training loss", _number(loss), "last on record"),
        ("evaluation loss", _number(eval_loss), "" if bits is None else f"{bits:.4f} bits per byte"),
        ("tokens a second", readable_count(speed) if speed else NONE, f"median{with_mfu}"),
        ("peak memory", NONE if memory is None else f"{memory:.2f} GiB", "of a rank"),
        ("wall time", readable_duration(goodput.wall_s) if goodput.wall_s else NONE, ""),
        ("goodput", _percent(goodput.share), "of wall time"),
        ("restarts", str(goodput.restarts), ""),
        ("steps lost", f"{goodput.lost_steps:,}", "and done again" if goodput.lost_steps else ""),
    ]
    items = (f"<div><dt>{dt}</dt><dd>{dd}<small>{escape(small)}</small></dd></div>" for dt, dd, small in tiles)
    return f'<dl class="tiles">{"".join(items)}</dl>'


def _time(run: Run) -> str:
    """Return the bar of where the time went."""
    goodput = run.goodput
    if goodput.share is None:
        return ""
    bar, items = [], []
    for name, (label, colour) in PARTS.items():
        seconds = getattr(goodput, name)
        share = seconds / goodput.wall_s
        if share >= 0.0005:
            bar.append(f'<span style="flex: {share:.5f} 1 0; background: var(--{colour})" title="{label}"></span>')
        if seconds > 0:
            swatch = f'<span class="swatch" style="background: var(--{colour})"></span>'
            items.append(f"<li>{swatch}{label} <b>{_percent(share)}</b> {_duration(seconds)}</li>")
    return (
        '<section class="card"><h2>Where the time went</h2>'
        f'<div class="bar">{"".join(bar)}</div><ul class="parts">{"".join(items)}</ul></section>'
    )


def _charts(runs: Sequence[Run]) -> str:
    titles = [*PANELS, BY_SOURCE] if len(runs) == 1 and runs[0].sources else PANELS
    figures = (f'<figure class="card">{draw_svg(title, runs)}</figure>' for title in titles)
    return f'<section class="charts">{"".join(figures)}</section>'


def _key(run: Run) -> str:
    """Return what the marks in the charts mean, of those that are there."""
    marks = []
    if run.saved.size:
        marks.append('<i style="height: 11px; border-left: 2px solid var(--green)"></i>checkpoint')
    if run.restarts:
        marks.append('<i style="height: 14px; border-left: 2px dashed var(--muted)"></i>restart')
    if run.goodput.lost_steps:
        style = "width: 14px; height: 14px; background: var(--red); opacity: .25"
        marks.append(f'<i style="{style}"></i>steps lost in a crash and done again')
    if run.train["step"].size > 800:
        marks.append("line: mean of a pixel's steps; band: least to most")
    return f'<div class="key">{"".join(f"<span>{mark}</span>" for mark in marks)}</div>' if marks else ""


def _sources(run: Run) -> str:
    """Return what the run has come to on each source of its data, where there are several."""
    if not run.sources:
        return ""
    rows = [
        [escape(source), _number(run.last(f"loss_{source}")), _number(run.last(f"loss_{source}", "eval")), epochs]
        for source in run.sources
        for epochs in [f"{run.last(f'epoch_{source}') or 0:.2f}"]
    ]
    table = _table(("", "training loss", "evaluation loss", "epochs"), rows, num_text=1)
    return f'<section class="card"><h2>Sources</h2>{table}</section>'


def _attempts(run: Run) -> str:
    if not run.attempts:
        return ""
    rows = []
    for number, attempt in enumerate(run.attempts, start=1):
        facts = attempt.facts
        began = facts.get("started") or facts.get("time")
        share = attempt.update_s / attempt.wall_s if attempt.wall_s else None
        ended = f'<span class="{_class(attempt.ended)}">{escape(attempt.ended)}</span>'
        rows.append(
            [
                str(number),
                time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(began)) if began else NONE,
                escape(attempt.mesh),
                ended,
                escape(str(facts.get("world_size", ""))),
                f"{attempt.resumed_step:,}",
                f"{attempt.reached:,}",
                f"{attempt.lost_steps:,}" if attempt.lost_steps else NONE,
                NONE if "load_s" not in facts else _duration(facts["load_s"]),
                readable_duration(attempt.wall_s) if attempt.wall_s else NONE,
                _percent(share),
            ]
        )
    heads = ("", "began", "mesh", "ended", "ranks", "from step", "to step", "steps lost", "loading", "wall time")
    table = _table((*heads, "goodput"), rows, num_text=4)
    return f'<section class="card"><h2>Attempts</h2>{table}</section>'


def _saving(run: Run) -> str:
    """Return what its saves and failures lead to."""
    rows = [[escape(topic), escape(text)] for topic, text in saving_of(run).items()]
    if not rows:
        return ""
    return f'<section class="card"><h2>Saves and failures</h2>{_table(("", ""), rows, num_text=2)}</section>'


def _configuration(run: Run, title: str = "Configuration") -> str:
    if not run.config_yaml:
        return ""
    return f'<details class="card"><summary>{escape(title)}</summary><pre>{escape(run.config_yaml)}</pre></details>'


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], num_text: int) -> str:
    """Return a table of cells that are HTML already; the first `num_text` columns are text, the others numbers."""
    sides = [' class="text"' if number < num_text else "" for number in range(len(heads))]
    head = "".join(f"<th{side}>{text}</th>" for side, text in zip(sides, heads, strict=True))
    body = "".join(
        f"<tr>{''.join(f'<td{side}>{cell}</td>' for side, cell in zip(sides, row, strict=True))}</tr>" for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _name(number: int, run: Run) -> str:
    colour = SERIES[number % len(SERIES)]
    return f'<span class="swatch" style="background: var(--{colour})"></span>{escape(run.name)}'


def _summary(run: Run) -> list[str]:
    facts = run.attempts[-1].facts if run.attempts else {}
    speed, parameters = run.median("tokens_per_s"), facts.get("parameters")
    return [
        f'<span class="{_class(run.state)}">{escape(run.state)}</span>',
        escape(run.model),
        readable_count(parameters) if parameters else NONE,
        f"{run.reached:,}",
        readable_count(run.last("tokens") or 0),
        _number(run.last("loss")),
        _number(run.last("loss", "eval")),
        readable_count(speed) if speed else NONE,
        readable_duration(run.goodput.wall_s) if run.goodput.wall_s else NONE,
        _percent(run.goodput.share),
    ]


def _class(state: str) -> str:
    return state if state in ("finished", "running", "stopped", "failed", "killed") else "unknown"


def _number(value: float | None) -> str:
    return NONE if value is None else f"{value:.4f}"


def _percent(share: float | None) -> str:
    return NONE if share is None else f"{100 * share:.1f} %"


def _duration(seconds: float) -> str:
    if seconds < 0.0995:
        return f"{1000 * seconds:.2g} ms"
    return f"{seconds:.2g} s" if seconds < 9.95 else readable_duration(seconds)
