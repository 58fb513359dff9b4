"""A pytest plugin that prints where the CPU time of the tests goes: `make times`. It never fails a test.

A test's CPU time is that of its own process, of the processes that it started, and of those that it had the fork server
start.  Unlike seconds on the wall, it hardly depends on what else the machine does.
"""

from __future__ import annotations

import json
import multiprocessing.forkserver
import os
import resource
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_spent: dict[str, float] = defaultdict(float)
"""CPU seconds by test, and by worker for its start."""


def cpu_s() -> float:
    """Return the CPU seconds of this process, its ended children, and the fork server with its ended children."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = time.process_time() + children.ru_utime + children.ru_stime
    server = multiprocessing.forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    if server is not None:
        fields = Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()
        total += sum(int(ticks) for ticks in fields[11:15]) / _TICKS_PER_S
    return total


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    before = cpu_s()
    result = yield
    item.config.stash[_OWN][item.nodeid] = cpu_s() - before
    return result


_OWN = pytest.StashKey[dict[str, float]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_OWN] = {}


def pytest_sessionfinish(session: pytest.Session) -> None:
    own = session.config.stash[_OWN]
    if own:
        own["start, collection, imports"] = cpu_s() - sum(own.values())
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["cpu_s"] = json.dumps(own)
    else:
        _add(own)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    _add(json.loads(getattr(node, "workeroutput", {}).get("cpu_s", "{}")))


def _add(spent: dict[str, float]) -> None:
    for name, seconds in spent.items():
        _spent[name] += seconds


def pytest_terminal_summary(terminalreporter: Any) -> None:
    folders: dict[str, float] = defaultdict(float)
    files: dict[str, float] = defaultdict(float)
    for name, seconds in _spent.items():
        path = name.partition("::")[0]
        folders[path.rpartition("/")[0] or path] += seconds
        files[path] += seconds
    terminalreporter.section("CPU seconds")
    for title, table in (("folder", folders), ("file", files), ("test", _spent)):
        terminalreporter.write_line(f"by {title}:")
        for name, seconds in sorted(table.items(), key=_seconds, reverse=True)[:20]:
            terminalreporter.write_line(f"  {seconds:7.1f}  {name}")
    terminalreporter.write_line(f"  {sum(_spent.values()):7.1f}  in all")
    if path := os.environ.get("TIMES_JSON"):
        Path(path).write_text(json.dumps(_spent, indent=1))


def _seconds(item: tuple[str, float]) -> float:
    return item[1]
