"""Prints benchmark results: a JSON line per run, and a final Markdown table that can be pasted into bench/RESULTS.md.

Does not import torch, so that the start-up benchmark can use it.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parent.parent


def emit(bench: str, **facts: Any) -> None:
    """Print one run of a benchmark as a JSON line."""
    print(json.dumps({"bench": bench, **facts}), flush=True)


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], device: str = "cpu") -> None:
    """Print a Markdown table under a heading with the date, machine, versions and commit.

    Numbers are rounded to three significant digits; None is shown as "not measured".
    """
    print(f"\n## {title}\n\n{describe_environment(device)}\n")
    for cells in (columns, ["---"] * len(columns), *rows):
        print("| " + " | ".join(_cell(cell) for cell in cells) + " |")
    print(flush=True)


def describe_environment(device: str = "cpu") -> str:
    """Return a sentence with the date, the machine, the versions and the commit."""
    versions = ", ".join([f"Python {platform.python_version()}", f"torch {importlib.metadata.version('torch')}"])
    load = f"load {os.getloadavg()[0]:.1f}"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    accelerator = "" if device == "cpu" else f"{device}, "
    return (
        f"{time.strftime('%Y-%m-%d')}; {accelerator}{cores} cores of {_processor()}, {load}, {platform.system()}; "
        f"{versions}; commit {commit()}."
    )


def commit() -> str:
    """Return the short commit hash, marked if tracked files have changes, or "unknown" outside of a checkout."""
    try:
        name = _git("rev-parse", "--short", "HEAD").strip()
        return name + (" with changes" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(REPOSITORY), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _cell(value: object) -> str:
    if value is None:
        return "not measured"
    return f"{value:.3g}" if isinstance(value, float) and abs(value) < 1000 else _plain(value)


def _plain(value: object) -> str:
    return f"{value:,.0f}" if isinstance(value, float) else str(value)
