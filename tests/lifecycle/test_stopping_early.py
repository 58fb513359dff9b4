"""Stop requests where there is nothing to save: any command ends, whatever it is doing, and leaves no half file."""

from __future__ import annotations

import signal
import sys
import textwrap
from pathlib import Path

import pytest

from tests.helpers.gate import wait_until
from tests.helpers.launch import launch
from trainer.errors import run_command

STUCK = {
    "in Python": "while True: pass",
    "in a wait": "threading.Event().wait()",
    "swallowing": """
        while True:
            try:
                while True: time.sleep(0.01)
            except BaseException:
                pass
    """,
    "wrapping": """
        try:
            while True: time.sleep(0.01)
        except BaseException as error:
            raise RuntimeError("something failed") from error
    """,
    "in a destructor": """
        class Freed:
            def __del__(self):
                time.sleep(0.02)
        while True:
            Freed()
            time.sleep(0.005)
    """,
    "in C": "hashlib.pbkdf2_hmac('sha512', b'', b'', 2**31 - 1)",
}
"""Work that asks nobody whether it is to stop."""

COMMAND = """
import hashlib, sys, threading, time
from pathlib import Path
from trainer.errors import run_command
from trainer.stopping import partial_file

def work():
    with partial_file(Path(sys.argv[1])) as half:
        half.touch()
{work}

sys.exit(run_command(work))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "number"),
    [
        *[("in Python", signal.SIGTERM), ("swallowing", signal.SIGINT), ("in C", signal.SIGHUP)],
        *(
            pytest.param(how, number, marks=pytest.mark.campaign)
            for how in STUCK
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        ),
    ],
)
def test_command_ends_whatever_it_is_doing(how: str, number: signal.Signals, tmp_path: Path) -> None:
    """With one line instead of a traceback, and without the file that it was writing."""
    half = tmp_path / "half"
    script = COMMAND.format(work=textwrap.indent(textwrap.dedent(STUCK[how]), " " * 8))
    stopped = launch([sys.executable, "-c", script, str(half)], tmp_path)
    wait_until(half.exists, "the work has begun")
    stopped.signal(number)
    assert stopped.wait().code == 128 + number, stopped.err
    assert not half.exists()
    assert len(stopped.err.splitlines()) == 1, stopped.err


def test_a_command_leaves_the_handlers_of_signals_as_they_were() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)]
    assert run_command(lambda: 0) == 0
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)] == before
    assert signal.set_wakeup_fd(-1) == -1
