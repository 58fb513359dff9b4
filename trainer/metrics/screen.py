"""Screens that the console writes to: a terminal, or plain lines for a file or pipe."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Protocol, TextIO

_INDENT = 14


class Screen(Protocol):
    """Displays console output.  Callers must sanitize all text, so that it contains no control characters."""

    @property
    def width(self) -> int | None:
        """Maximum length of a line in columns, or None if unlimited."""
        ...

    def show_facts(self, facts: Mapping[str, str]) -> None:
        """Show the summary at the start of the run."""

    def show_line(self, text: str, style: str) -> None:
        """Show a line.  `style` is a color, `bold` or empty; screens without styles ignore it."""

    def show_progress(self, step: int, num_steps: int, note: str) -> None:
        """Update the status bar, if there is one."""

    def close(self) -> None:
        """Remove the status bar, if there is one."""


class PlainScreen:
    """Writes plain lines of any length, without a status bar, to log files and pipes."""

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
        """No-op: there is no status bar."""

    def close(self) -> None:
        """No-op: there is nothing to remove."""


def find_screen(stream: TextIO) -> Screen:
    """Return a `Terminal` if the stream is one, or if the environment asks to treat it as one, else a `PlainScreen`."""
    if not (stream.isatty() or os.environ.get("FORCE_COLOR") or os.environ.get("TTY_COMPATIBLE") == "1"):
        return PlainScreen(stream)
    from trainer.metrics.terminal import Terminal  # imports rich, which other runs need not load

    return Terminal.on(stream)
