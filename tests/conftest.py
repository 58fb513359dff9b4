"""What every test leaves as it was, what the fast ones must not do, and how long each may take (see README.md)."""

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

from tests.budget import TIERS, Budget, seconds_on_record, tier_of
from tests.helpers.forked import fork_server, kill_what_is_left
from tests.helpers.runs import four, one, two
from trainer import errors, stopping
from trainer.data.chat.limits import trial
from trainer.distributed.environment import limit_spinning

__all__ = ["four", "one", "two"]

limit_spinning()  # as the command line does, before torch is imported

_RECORD = "--record-durations"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        _RECORD, action="store_true", help="write how long each test took to tests/durations.json, instead of judging"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_BUDGET] = Budget(seconds_on_record())
    _catch_what_is_ignored()
    _have_caches_of_our_own()


def _catch_what_is_ignored() -> None:
    """Let what the tests start have the ordinary signals, also under `nohup` or in the background of a script.

    What a process ignores its children ignore, too; what it catches they do not.
    """
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGINT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


def _have_caches_of_our_own() -> None:
    """Keep away from the user's: a calibration of theirs changes plans.  Kept from one run to the next."""
    folder = Path(tempfile.gettempdir()) / f"meshtrainer-tests-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    os.environ["XDG_CACHE_HOME"] = str(folder)
    os.environ["HF_HUB_OFFLINE"] = "1"  # a test that uses the Hub brings its own
    os.environ["MPLCONFIGDIR"] = str(folder / "matplotlib")


_BUDGET = pytest.StashKey[Budget]()
_SECONDS = pytest.StashKey[float]()


# ---------------------------------------------------------------------------------------------------------------
# Left as it was


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    """Commands that end ignore further signals; run inside the tests' own process, they would leave that to all others.

    What a process ignores its children ignore, too: a shell cannot even trap it.
    """
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for prompt in list(stopping._active):  # of a Trainer that was not closed: it would end whoever hears a signal next
        prompt.cancel()
    for number, handler in before.items():
        signal.signal(number, handler)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Import what takes seconds the first time, before a test has to pay for it."""
    if not session.config.option.collectonly:
        import matplotlib.font_manager  # noqa: F401  asks programs of the system for fonts, once
        import torch._dynamo
        import torch.distributed.checkpoint  # noqa: F401

        from tests.helpers.probes import keep_probes

        keep_probes()


@pytest.fixture(autouse=True)
def no_secret_of_another_test() -> Iterator[None]:
    """A process masks every secret that it has seen in whatever it prints, be it a common word."""
    yield
    errors._known_secrets.clear()


@pytest.fixture(autouse=True, scope="module")
def nothing_imported_is_looked_through_again() -> None:
    """A full collection of all that tests import takes a quarter of a second, and each Trainer makes two."""
    gc.set_threshold(20_000, 20, 20)
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def server_of_slow_tests(request: pytest.FixtureRequest) -> None:
    if tier_of(request.node) != TIERS[0]:
        fork_server()


@pytest.fixture(autouse=True)
def nothing_is_left_running() -> Iterator[None]:
    """What a test that fails has started would train on beside all others."""
    yield
    kill_what_is_left()


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """A Trainer that could not be built, and so not closed, leaves one: a test that opens its own would fail."""
    yield
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


# ---------------------------------------------------------------------------------------------------------------
# A fast test starts no process

_STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec", "tests.fork"}
_forbidding = False
_started: list[str] = []


def _watch(name: str, arguments: tuple[Any, ...]) -> None:
    if _forbidding and name in _STARTS:
        if name == "os.fork" and sys._getframe(1).f_code is trial.__code__:
            return  # a chat template is tried in a child, for milliseconds
        what = str(arguments[1]) if name == "subprocess.Popen" else name
        _started.append(what)
        raise RuntimeError(f"a fast test starts a process ({what}): mark it pytest.mark.slow")


sys.addaudithook(_watch)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    global _forbidding  # from before its fixtures are made, those of its module too, until after they have gone
    _started.clear()
    _forbidding = tier_of(item) == TIERS[0]
    try:
        return (yield)
    finally:
        _forbidding = False


@pytest.fixture(autouse=True)
def no_process_in_a_fast_test() -> Iterator[None]:
    """What starts one fails at that; here it is noticed if that was caught."""
    yield
    assert not _started, f"a fast test has started {_started}: mark it pytest.mark.slow"


# ---------------------------------------------------------------------------------------------------------------
# The budget of time


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
