"""List the runs in a folder, with the progress and losses of each, and what to do next.

    python -m trainer.runs              the runs in runs/ and its subfolders
    python -m trainer.runs FOLDER       the runs in FOLDER and its subfolders, for example the runs of a sweep
    python -m trainer.runs --json       a JSON list with one object per run

Read-only; does not import torch.  The most recently active run comes first.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer.config import read_yaml
from trainer.errors import (
    EXIT_FINISHED,
    EXIT_USER_ERROR,
    CommandParser,
    UserError,
    print_stdout,
    redact,
    run_command,
    setting_error,
)
from trainer.lifecycle.folder import read_status
from trainer.lifecycle.owner import is_owned
from trainer.metrics.goodput import compute_goodput
from trainer.metrics.record import read_records
from trainer.tables import table_lines

_TAIL_BYTES = 1 << 16
"""The number of bytes to read from the end of a metrics file to find the latest records."""
_MAX_DEPTH = 4
"""The number of levels of subfolders that are searched for runs."""
_RUN_FILES = ("metrics.jsonl", "status.json")
"""A folder that contains one of these files is a run folder."""


@dataclass
class RunSummary:
    """The state of a run, read from its folder."""

    folder: str
    name: str
    state: str
    """`running`, `finished`, `stopped`, `failed`, `killed`, or `unknown`."""
    step: int
    num_steps: int | None
    loss: float | None
    """Training loss in the last `train` record: the mean over its steps or, if that is missing or not finite, the
    loss of its last step; None if neither is finite."""
    eval_loss: float | None
    """Loss of the last evaluation; None before the first."""
    goodput: float | None
    """Fraction of the wall time spent on steps that count; None if unknown."""
    reason: str
    """Why the run is in its state, from `status.json`; may be empty."""
    next: str
    """What to do next: a command, a short instruction, or both."""
    active: float
    """Time at which `metrics.jsonl` or `status.json` last changed, in seconds since the Unix epoch."""


def find_runs(folder: Path) -> list[Path]:
    """Return the run folders in a folder and its subfolders, except hidden ones, most recently active first.

    If the folder is a run folder itself, returns only that.
    """
    return sorted(_find_run_folders(folder, _MAX_DEPTH), key=_last_active, reverse=True)


def _find_run_folders(folder: Path, depth: int) -> Iterator[Path]:
    if any((folder / name).is_file() for name in _RUN_FILES):
        yield folder
    elif depth:
        with os.scandir(folder) as entries:
            subfolders = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
        for name in subfolders:
            if not name.startswith("."):
                yield from _find_run_folders(folder / name, depth - 1)


def _last_active(folder: Path) -> float:
    return max((path.stat().st_mtime for name in _RUN_FILES if (path := folder / name).exists()), default=0.0)


def summarize(folder: Path) -> RunSummary:
    """Read a run's folder.  Files may be incomplete: the run may still be writing them, or may have been killed."""
    status, latest = read_status(folder), _latest_records(folder / "metrics.jsonl")
    state = str(status.get("state") or "unknown")
    if state == "running" and not is_owned(folder):
        state = "killed"
    config = _read_config(folder / "config.yaml")
    steps = [int(record["step"]) for record in (status, *latest.values()) if _is_number(record.get("step"))]
    train = latest.get("train", {})
    reason = redact(str(status.get("reason") or ""))
    num_nodes = latest.get("start", {}).get("nodes") or 1
    return RunSummary(
        folder=str(folder),
        name=str(config.get("run", {}).get("name") or folder.absolute().name),
        state=state,
        step=max(steps, default=0),
        num_steps=config.get("train", {}).get("steps"),
        loss=_first_number(train.get("mean_loss"), train.get("loss")),
        eval_loss=_first_number(latest.get("eval", {}).get("loss")),
        goodput=_goodput(folder / "metrics.jsonl", latest, state),
        reason=reason,
        next=_next_action(folder, state, latest.get("start", {}).get("world_size") or 1, num_nodes),
        active=_last_active(folder),
    )


def _latest_records(path: Path) -> dict[str, dict[str, Any]]:
    """Return the last record of each kind.

    Reads only the end of the file if it contains a record of each kind that this command needs.
    """
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return {}
    latest: dict[str, dict[str, Any]] = {}
    for line in reversed(lines):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            latest.setdefault(str(record.get("kind")), record)
    if size > _TAIL_BYTES and not {"train", "eval", "start"} <= latest.keys():
        for _, record in read_records(path):
            if record.get("kind") in ("train", "eval", "start"):
                latest[str(record["kind"])] = record
    return latest


def _goodput(path: Path, latest: Mapping[str, Mapping[str, Any]], state: str) -> float | None:
    end = latest.get("end", {})
    if state in ("finished", "stopped") and _is_number(end.get("goodput_total")):
        return float(end["goodput_total"])
    if not path.is_file():
        return None
    return compute_goodput(record for _, record in read_records(path)).fraction


def _read_config(path: Path) -> dict[str, Any]:
    try:
        values = read_yaml(path)
    except (OSError, UserError):
        return {}
    return {key: value for key, value in values.items() if isinstance(value, dict)}


def _next_action(folder: Path, state: str, world_size: int, num_nodes: int) -> str:
    """Return what to do next with a run in this state."""
    quoted_folder = shlex.quote(str(folder))
    if state == "running":
        return f"python -m trainer.report {quoted_folder} --watch"
    if state == "finished":
        return f"python -m trainer.generate {quoted_folder} --prompt TEXT"
    if state == "failed" and read_status(folder).get("exit_code") == EXIT_USER_ERROR:
        return f"correct the error reported in {quoted_folder}/console.log, then start it again"
    if num_nodes > 1:
        return "submit the same job again: it continues from its last checkpoint"
    ranks = f" nproc={world_size}" if world_size > 1 else ""
    command = f"python -m trainer.run recipe={quoted_folder}{ranks}"
    return command if state != "failed" else f"see {quoted_folder}/console.log, then: {command}"


def _first_number(*values: Any) -> float | None:
    """Return the first value that is a finite number, or None."""
    return next((float(value) for value in values if _is_number(value)), None)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def table_of(runs: Sequence[RunSummary], folder: Path) -> list[str]:
    """Return the lines of the table of runs."""
    headers = ["run", "state", "step", "loss", "held-out", "goodput"]
    rows = [
        [
            os.path.relpath(run.folder, folder) if Path(run.folder) != folder else run.name,
            run.state,
            f"{run.step}/{run.num_steps}" if run.num_steps else str(run.step),
            "" if run.loss is None else f"{run.loss:.4f}",
            "" if run.eval_loss is None else f"{run.eval_loss:.4f}",
            "" if run.goodput is None else f"{100 * run.goodput:.0f}%",
        ]
        for run in runs
    ]
    return table_lines(headers, rows, text_columns=(0, 1))


def command_line(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = CommandParser(prog="python -m trainer.runs", description=__doc__)
    parser.add_argument("folder", nargs="?", default="runs", help="where to look for runs (default: runs)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)
    return run_command(lambda: _show(Path(options.folder), options.json))


def _show(folder: Path, as_json: bool) -> int:
    if not folder.is_dir():
        raise setting_error("folder", folder, "is not a folder", example="runs")
    runs = [summarize(path) for path in find_runs(folder)]
    if as_json:
        print_stdout(json.dumps([asdict(run) for run in runs]))
        return EXIT_FINISHED
    if not runs:
        raise setting_error("folder", folder, "has no runs", fix="give the folder that holds your run folders")
    print_stdout("\n".join(table_of(runs, folder)))
    print_stdout("\nnext:")
    for run in runs:
        reason = f" ({run.reason})" if run.reason and run.state in ("failed", "stopped") else ""
        print_stdout(f"  {os.path.relpath(run.folder, folder) if Path(run.folder) != folder else run.name}{reason}")
        print_stdout(f"    {run.next}")
    return EXIT_FINISHED


if __name__ == "__main__":
    sys.exit(command_line())
