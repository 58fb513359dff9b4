"""Progress of a build on stderr: how much is done, MB/s, the time that is left."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

_EVERY_S = {True: 0.5, False: 30.0}
"""Seconds between two lines: on a terminal, where each line replaces the one before, and in a log."""


class Counting:
    """Shows, until the block ends, the line that `line` returns: how far something is.  Nothing in a log that would
    have one line.
    """

    def __init__(self, line: Callable[[], str], stream: TextIO | None = None) -> None:
        self._line, self._stream = line, stream or sys.stderr
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._show, daemon=True, name="progress")

    def __enter__(self) -> Counting:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        if self._stream.isatty():
            print(end="\r\x1b[K", file=self._stream, flush=True)

    def _show(self) -> None:
        is_terminal = self._stream.isatty()
        while not self._ended.wait(_EVERY_S[is_terminal]):
            if is_terminal:
                print(f"\r{self._line()}", end="\x1b[K", file=self._stream, flush=True)
            else:
                print(self._line(), file=self._stream, flush=True)


class Progress(Counting):
    """Shows what `done` says of `total` bytes, the speed, and the time that is left."""

    def __init__(self, total: int, done: Callable[[], int], stream: TextIO | None = None) -> None:
        super().__init__(lambda: self.line(self._done(), time.monotonic() - self._began), stream)
        self._total, self._done = max(1, total), done

    def __enter__(self) -> Progress:
        self._began, self._before = time.monotonic(), self._done()
        super().__enter__()
        return self

    def line(self, done: int, seconds: float) -> str:
        """Return what to show once `done` bytes are done, `seconds` after the beginning."""
        rate = max(0, done - self._before) / max(seconds, 1e-3)
        shown = f"tokenizing: {done / 1e6:,.0f} of {self._total / 1e6:,.0f} MB, {rate / 1e6:,.1f} MB/s"
        if rate <= 0:
            return shown
        left = int(max(0, self._total - done) / rate)
        return f"{shown}, {left // 3600}:{left // 60 % 60:02d}:{left % 60:02d} left"
