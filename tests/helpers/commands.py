"""Runs a subcommand of `meshtrainer` in the test's own process, which costs nothing but its work."""

from __future__ import annotations

import io
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import NamedTuple
from unittest import mock

import pytest

from trainer import run


class Ended(NamedTuple):
    """The exit code of a command, and what it printed."""

    code: int
    out: str
    err: str


def meshtrainer(subcommand: str, *arguments: object) -> Ended:
    """Run `meshtrainer subcommand arguments...`."""
    out, err = io.StringIO(), io.StringIO()
    argv = ["meshtrainer", subcommand, *map(str, arguments)]
    parent, exit_process = os.getpid(), os._exit

    def leave(code: int) -> None:
        if os.getpid() != parent:  # a child in which a chat template is tried
            exit_process(code)
        sys.exit(code)

    streams = redirect_stdout(out), redirect_stderr(err)
    replaced = mock.patch.object(sys, "argv", argv), mock.patch.object(os, "_exit", leave)
    with replaced[0], replaced[1], streams[0], streams[1], pytest.raises(SystemExit) as ended:
        run.meshtrainer()
    return Ended(int(ended.value.code or 0), out.getvalue(), err.getvalue())
