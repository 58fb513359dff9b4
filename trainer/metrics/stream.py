"""Output streams that can neither stop nor block a run: standard output and its copy in a log file.

The reader of a pipe or terminal may exit (`| head`, a closed terminal), which makes the next write fail, or stop
reading (a pager, a suspended `tee`), which makes a write block forever.  Neither affects training.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import queue
import stat
import threading
from pathlib import Path
from typing import TextIO

from trainer.errors import discard_stream, print_stderr
from trainer.files import content_of


class NonBlockingStream(io.TextIOBase):
    """A wrapper around a text stream that never blocks: if the stream is a pipe or a terminal, a thread writes to it.

    Text is dropped silently while the reader is `_MAX_WAITING` writes behind, and if the reader has not caught up
    `CLOSE_S` seconds after `close`.  After the reader has exited, all text is dropped, with a single warning on stderr.
    """

    CLOSE_S = 2.0
    """Seconds that `close` waits for a reader that has stopped reading."""
    _MAX_WAITING = 10_000

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._has_gone = False
        self._waiting: queue.Queue[str | None] | None = None
        self._thread: threading.Thread | None = None
        if _may_block(stream):
            self._waiting = queue.Queue(self._MAX_WAITING)
            self._thread = threading.Thread(target=self._work, args=(self._waiting,), name="console", daemon=True)
            self._thread.start()
            atexit.register(self.close)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self._waiting is None:
            self._put(text)
        else:
            with contextlib.suppress(queue.Full):
                self._waiting.put_nowait(text)
        return len(text)

    def close(self) -> None:
        """Flush the queued text, waiting at most `CLOSE_S`.  Later text is written directly if the reader kept up."""
        if self._waiting is None or self._thread is None:
            return
        waiting, self._waiting = self._waiting, None
        with contextlib.suppress(queue.Full):
            waiting.put_nowait(None)
            self._thread.join(self.CLOSE_S)
        self._has_gone |= self._thread.is_alive()
        atexit.unregister(self.close)

    def _work(self, waiting: queue.Queue[str | None]) -> None:
        while (text := waiting.get()) is not None:
            self._put(text)

    def _put(self, text: str) -> None:
        if self._has_gone:
            return
        text = text.encode(self.encoding, "replace").decode(self.encoding)  # the encoding may be ASCII
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError) as error:  # ValueError: this process closed the stream
            self._has_gone = True
            discard_stream(self._stream)
            print_stderr(f"warning: standard output was closed ({error}); the run continues without it")


class LogFile(io.TextIOBase):
    """An append-only log file.  Lines that cannot be written are dropped, and the run continues."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            if self._fd is None:
                self._fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            os.write(self._fd, text.encode("utf-8", "replace"))
        return len(text)

    def move_to(self, path: Path) -> None:
        """Continue in another file.  The text so far is copied, unless `path` is the same file, renamed."""
        before, self._path = b"", path
        with contextlib.suppress(OSError):
            if self._fd is not None and not (path.exists() and os.path.samestat(path.stat(), os.fstat(self._fd))):
                before = content_of(self._fd)
        self.close()
        if before:
            self.write(before.decode("utf-8", "replace"))

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            with contextlib.suppress(OSError):
                os.close(fd)


def _may_block(stream: TextIO) -> bool:
    """Return whether a write to the stream may block, which is not the case for regular files and in-memory streams."""
    try:
        return not stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    except (OSError, ValueError):
        return False
