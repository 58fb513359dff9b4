"""Fixtures and hooks for all tests: they restore shared state, and limit the processes that a test may start."""

from __future__ import annotations

import gc
import hashlib
import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tests.defects  # plants the defect that the environment names, before anything is imported
from tests.helpers import launch
from tests.helpers.runs import chat, four, one, two
from trainer.distributed.environment import limit_spinning
from trainer.stopping import stop

__all__ = ["chat", "four", "one", "two"]

limit_spinning()  # as the command line does, before torch is imported


def pytest_configure() -> None:
    # Processes started by tests would inherit signals that this one ignores, under `nohup` or in the background of a
    # script, but do not inherit handlers.
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGINT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    # A cache folder of the tests' own, kept between runs: a calibration in the user's cache would change plans.
    # Each checkout has its own, since another commit may have written other things under the same names.
    checkout = hashlib.sha256(str(launch.REPOSITORY).encode()).hexdigest()[:8]
    usual = Path(tempfile.gettempdir()) / f"meshtrainer-tests-{os.getuid()}-{checkout}"
    folder = Path(os.environ.get(tests.defects.CACHE, usual))
    folder.mkdir(exist_ok=True)
    os.environ["XDG_CACHE_HOME"] = str(folder)
    os.environ["HF_HUB_OFFLINE"] = "1"  # a test that uses the Hub starts its own server
    os.environ["MPLCONFIGDIR"] = str(folder / "matplotlib")


def pytest_collection_finish(session: pytest.Session) -> None:
    """List the fonts before the first test: matplotlib runs system programs for it, which a fast test may not."""
    if not session.config.option.collectonly:
        import matplotlib.font_manager  # noqa: F401


# ---------------------------------------------------------------------------------------------------------------
# What every test has


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models here are so small that a second thread only waits; and two may add up in another order each time."""
    import torch  # not at the top: `limit_spinning` comes first

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make no plans for runs in the test's own process; the tests of plans override this (`helpers/no_plan.py`)."""
    from tests.helpers.no_plan import refuse
    from trainer.plan import forecast

    monkeypatch.setattr(forecast, "make_plan", refuse)


# ---------------------------------------------------------------------------------------------------------------
# Restoring shared state


@pytest.fixture(autouse=True)
def restore_signal_handlers() -> Iterator[None]:
    """Restore signal handlers after each test: the next signal must not end the tests."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    stop.uninstall()
    stop.on_exit.clear()  # of Trainers that were not closed
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True, scope="module")
def freeze_imported_objects() -> None:
    """Exempt imported objects from garbage collection: a full one takes 0.25 s, and each Trainer triggers two."""
    gc.set_threshold(20_000, 20, 20)
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def end_leftovers() -> Iterator[None]:
    """Kill processes that a failed test left behind, and destroy the process group of a Trainer that failed to start.

    The processes would slow down the other tests, and those could open no group.
    """
    yield
    launch.kill_leftovers()
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


# ---------------------------------------------------------------------------------------------------------------
# How many processes a test may start, which bounds its cost on any machine

MAX_RANKS = 8
"""Forked ranks that a slow test may start, besides those of shared fixtures."""
MAX_INTERPRETERS = 2
"""Fresh interpreters that it may start, which take seconds each."""

_PROCESS_STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec", "tests.fork"}
_forbids_starts = False
_started: Counter[str] = Counter()


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if event not in _PROCESS_STARTS:
        return
    if event == "tests.fork":
        _started["ranks"] += arguments[0]
    elif event == "subprocess.Popen" and arguments[1] and str(arguments[1][0]) == sys.executable:
        _started["interpreters"] += 1
    if _forbids_starts:
        _started["in a fast test"] += 1
        raise RuntimeError(f"a fast test starts a process ({event}): mark it pytest.mark.slow")


sys.addaudithook(_watch)


def _is_fast(item: pytest.Item) -> bool:
    return not (item.get_closest_marker("slow") or item.get_closest_marker("campaign"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    global _forbids_starts  # also during the setup and teardown of fixtures
    _forbids_starts = _is_fast(item)
    _started.clear()
    try:
        return (yield)
    finally:
        _forbids_starts = False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    in_setup = Counter(_started)
    result = yield
    # Also if the test has caught the exception that this raised.
    assert not _started["in a fast test"], "a fast test has started a process: mark it pytest.mark.slow"
    if not item.get_closest_marker("campaign"):
        ranks = _started["ranks"] - in_setup["ranks"]
        interpreters = _started["interpreters"] - in_setup["interpreters"]
        assert ranks <= MAX_RANKS, f"{ranks} ranks in one test: make it smaller, or mark it pytest.mark.campaign"
        assert interpreters <= MAX_INTERPRETERS, f"{interpreters} interpreters in one test: fork, or mark it campaign"
    return result
