"""Shows the progress of a build on stderr: bytes done, MB/s and the time left."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

_INTERVAL_S = {True: 0.5, False: 30.0}
"""Seconds between lines: on a terminal (True), where each line replaces the previous one, and in a log (False)."""


class ProgressLine:
    """Context manager that prints the string returned by `line` at regular intervals.

    In a log, nothing is printed if the block ends within the first interval.
    """

    def __init__(self, line: Callable[[], str], stream: TextIO | None = None) -> None:
        self._line, self._stream = line, stream or sys.stderr
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._show, daemon=True, name="progress")

    def __enter__(self) -> ProgressLine:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        if self._stream.isatty():
            print(end="\r\x1b[K", file=self._stream, flush=True)

    def _show(self) -> None:
        is_terminal = self._stream.isatty()
        while not self._ended.wait(_INTERVAL_S[is_terminal]):
            if is_terminal:
                print(f"\r{self._line()}", end="\x1b[K", file=self._stream, flush=True)
            else:
                print(self._line(), file=self._stream, flush=True)


class BuildProgress(ProgressLine):
    """Shows how many of `total` bytes are done, the speed, and the time left.

    done: returns the number of bytes done.
    """

    def __init__(self, total: int, done: Callable[[], int], stream: TextIO | None = None) -> None:
        super().__init__(lambda: self.line(self._done(), time.monotonic() - self._started), stream)
        self._total, self._done = max(1, total), done

    def __enter__(self) -> BuildProgress:
        self._started, self._done_at_start = time.monotonic(), self._done()
        super().__enter__()
        return self

    def line(self, done: int, seconds: float) -> str:
        """Return the line to show when `done` bytes are done, `seconds` after the start."""
        rate = max(0, done - self._done_at_start) / max(seconds, 1e-3)
        message = f"tokenizing: {done / 1e6:,.0f} of {self._total / 1e6:,.0f} MB, {rate / 1e6:,.1f} MB/s"
        if rate <= 0:
            return message
        remaining_s = int(max(0, self._total - done) / rate)
        return f"{message}, {remaining_s // 3600}:{remaining_s // 60 % 60:02d}:{remaining_s % 60:02d} left"
