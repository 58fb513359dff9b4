"""Shows the progress of a long operation, such as tokenizing files or completing prompts, by default on stderr."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

_TERMINAL_INTERVAL_S = 0.5
"""Seconds between updates on a terminal, where each line replaces the previous one."""

_LOG_INTERVAL_S = 30.0
"""Seconds between lines if the output is not a terminal."""


class ProgressLine:
    """Context manager that prints the result of `make_line` at regular intervals.

    No line is printed if the `with` block ends within the first interval.

    stream: where to print; by default stderr.
    """

    def __init__(self, make_line: Callable[[], str], stream: TextIO | None = None) -> None:
        self._make_line, self._stream = make_line, stream or sys.stderr
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._show, daemon=True, name="progress")

    def __enter__(self) -> ProgressLine:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        self._thread.join()
        if self._stream.isatty():
            print(end="\r\x1b[K", file=self._stream, flush=True)

    def _show(self) -> None:
        is_terminal = self._stream.isatty()
        while not self._has_ended.wait(_TERMINAL_INTERVAL_S if is_terminal else _LOG_INTERVAL_S):
            if is_terminal:
                print(f"\r{self._make_line()}", end="\x1b[K", file=self._stream, flush=True)
            else:
                print(self._make_line(), file=self._stream, flush=True)


class ByteProgress:
    """How many of `total` bytes have been processed; `line` also gives the speed and, once it is known, the time left.

    activity: what is done with the bytes, such as `tokenizing`.
    """

    def __init__(self, activity: str, total: int) -> None:
        self._activity, self._total = activity, max(1, total)
        self._started_at = time.monotonic()
        self._num_bytes = self._num_skipped = 0

    def add(self, num_bytes: int) -> None:
        """Count bytes that have been processed."""
        self._num_bytes += num_bytes

    def skip(self, num_bytes: int) -> None:
        """Count bytes that an earlier process has processed."""
        self._num_bytes += num_bytes
        self._num_skipped += num_bytes

    def line(self) -> str:
        """Return the progress in words."""
        seconds = time.monotonic() - self._started_at
        rate = max(0, self._num_bytes - self._num_skipped) / max(seconds, 1e-3)
        total_mb = self._total / 1e6
        line = f"{self._activity}: {self._num_bytes / 1e6:,.0f} of {total_mb:,.0f} MB, {rate / 1e6:,.1f} MB/s"
        if rate <= 0:
            return line
        remaining_s = int(max(0, self._total - self._num_bytes) / rate)
        return f"{line}, {remaining_s // 3600}:{remaining_s // 60 % 60:02d}:{remaining_s % 60:02d} left"
