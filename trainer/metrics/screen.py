"""Screens that a console writes to: plain lines for a file or a pipe, or a terminal."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Protocol, TextIO

_INDENT = 14


class Screen(Protocol):
    """Shows a run to a person.  All text that it gets is safe to show."""

    @property
    def width(self) -> int | None:
        """Columns that a line may have; None where lines may be of any length."""
        ...

    def show_facts(self, facts: Mapping[str, str]) -> None:
        """Show the start block."""

    def show_line(self, text: str, style: str) -> None:
        """Show a line; `style` is a colour or `bold`, where there are such things."""

    def show_progress(self, step: int, num_steps: int, note: str) -> None:
        """Move the status bar, if there is one."""

    def close(self) -> None:
        """Show no status bar any longer."""


class PlainScreen:
    """Plain lines, of any length, without a status bar: for log files and pipes."""

    width: int | None = None

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def show_facts(self, facts: Mapping[str, str]) -> None:
        for name, value in facts.items():
            self.show_line(f"{name:>{_INDENT - 2}}  {value}".replace("\n", "\n" + _INDENT * " "), "")

    def show_line(self, text: str, style: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()

    def show_progress(self, step: int, num_steps: int, note: str) -> None:
        """There is no status bar."""

    def close(self) -> None:
        """Nothing is left on the screen."""


def find_screen(stream: TextIO) -> Screen:
    """Return a screen for the stream: a terminal's where it is one, or the environment says to treat it as one."""
    if not (stream.isatty() or os.environ.get("FORCE_COLOR") or os.environ.get("TTY_COMPATIBLE") == "1"):
        return PlainScreen(stream)
    from trainer.metrics.terminal import Terminal  # rich, which a run in a log file does not need in memory

    return Terminal.on(stream)
