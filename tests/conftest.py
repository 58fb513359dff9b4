"""Fixtures and hooks for all tests: they restore shared state, forbid processes in fast tests, and limit durations."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.budget import TIERS, Budget, recorded_durations, tier_of
from tests.helpers.forked import fork_server, kill_leftover_processes
from tests.helpers.runs import four, one, two
from trainer import errors, stopping
from trainer.data.chat.limits import try_in_child
from trainer.distributed.environment import limit_spinning

__all__ = ["four", "one", "two"]

limit_spinning()  # as the command line does, before torch is imported

_RECORD = "--record-durations"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        _RECORD,
        action="store_true",
        help="record the duration of each test in tests/durations.json instead of enforcing limits",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_BUDGET] = Budget(recorded_durations())
    _catch_ignored_signals()
    _use_separate_caches()


def _catch_ignored_signals() -> None:
    """Catch signals that this process ignores, for example under `nohup` or in the background of a script.

    Processes started by tests would inherit ignored signals, but do not inherit handlers.
    """
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGINT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


def _use_separate_caches() -> None:
    """Use a separate cache folder, kept between runs, because a calibration in the user's cache would change plans."""
    folder = Path(tempfile.gettempdir()) / f"meshtrainer-tests-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    os.environ["XDG_CACHE_HOME"] = str(folder)
    os.environ["HF_HUB_OFFLINE"] = "1"  # a test that uses the Hub starts its own server
    os.environ["MPLCONFIGDIR"] = str(folder / "matplotlib")


_BUDGET = pytest.StashKey[Budget]()
_SECONDS = pytest.StashKey[float]()


# ---------------------------------------------------------------------------------------------------------------
# Restoring shared state


@pytest.fixture(autouse=True)
def restore_signal_handlers() -> Iterator[None]:
    """Restore signal handlers after each test, since commands that run in this process leave signals ignored.

    Child processes would inherit that, and a shell cannot trap an ignored signal.
    """
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for prompt in list(stopping._active):  # left by a Trainer that was not closed: the next signal would end the tests
        prompt.cancel()
    for number, handler in before.items():
        signal.signal(number, handler)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Import slow modules before the first test, so that they do not count toward its duration."""
    if not session.config.option.collectonly:
        import matplotlib.font_manager  # noqa: F401  runs system programs to list fonts, once
        import torch._dynamo
        import torch.distributed.checkpoint  # noqa: F401

        from tests.helpers.probes import cache_probes

        cache_probes()


@pytest.fixture(autouse=True)
def forget_secrets() -> Iterator[None]:
    """Forget the secrets of each test: they may be common words, and would be masked in the output of later tests."""
    yield
    errors._known_secrets.clear()


@pytest.fixture(autouse=True, scope="module")
def freeze_imported_objects() -> None:
    """Exempt imported objects from garbage collection: a full one takes 0.25 s, and each Trainer triggers two."""
    gc.set_threshold(20_000, 20, 20)
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def start_fork_server(request: pytest.FixtureRequest) -> None:
    """Start the fork server before a slow test, so that its start does not count toward the test's duration."""
    if tier_of(request.node) != TIERS[0]:
        fork_server()


@pytest.fixture(autouse=True)
def kill_leftovers() -> Iterator[None]:
    """Kill processes that a failed test left behind, since they would slow down the other tests."""
    yield
    kill_leftover_processes()


@pytest.fixture(autouse=True)
def destroy_leftover_process_group() -> Iterator[None]:
    """Destroy the group of a Trainer that failed in its constructor, so that other tests can open one."""
    yield
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


# ---------------------------------------------------------------------------------------------------------------
# A fast test starts no process

_PROCESS_STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec", "tests.fork"}
_is_start_forbidden = False
_started: list[str] = []


def _watch(name: str, arguments: tuple[Any, ...]) -> None:
    if _is_start_forbidden and name in _PROCESS_STARTS:
        if name == "os.fork" and sys._getframe(1).f_code is try_in_child.__code__:
            return  # a chat template is tried out in a child process that lives for milliseconds
        program = str(arguments[1]) if name == "subprocess.Popen" else name
        _started.append(program)
        raise RuntimeError(f"a fast test starts a process ({program}): mark it pytest.mark.slow")


sys.addaudithook(_watch)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    global _is_start_forbidden  # also during the setup and teardown of fixtures
    _started.clear()
    _is_start_forbidden = tier_of(item) == TIERS[0]
    try:
        return (yield)
    finally:
        _is_start_forbidden = False


@pytest.fixture(autouse=True)
def no_process_in_a_fast_test() -> Iterator[None]:
    """Fail if a test started a process, even if it caught the exception that this raised."""
    yield
    assert not _started, f"a fast test has started {_started}: mark it pytest.mark.slow"


# ---------------------------------------------------------------------------------------------------------------
# Duration limits


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    seconds = item.stash.setdefault(_SECONDS, 0.0) + (call.duration if call.when != "setup" else 0.0)
    item.stash[_SECONDS] = seconds
    if call.when == "teardown" and report.passed and not item.config.getoption(_RECORD):
        overrun = item.config.stash[_BUDGET].overrun(item.nodeid, tier_of(item), seconds)
        if overrun and not os.environ.get("NO_BUDGET"):
            report.outcome, report.longrepr = "failed", overrun
    return report


_durations: dict[str, float] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "setup":
        _durations[report.nodeid] = _durations.get(report.nodeid, 0.0) + report.duration


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if session.config.getoption(_RECORD) and "PYTEST_XDIST_WORKER" not in os.environ and not exitstatus:
        session.config.stash[_BUDGET].record(_durations)
