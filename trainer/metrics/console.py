"""Console output: a summary at the start, lines for records and, on a terminal, a status bar.

A `Screen` lays out the text, either for a terminal or as plain lines.  It writes to a stream whose errors cannot stop
the run.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeAlias

from trainer.errors import discard_stream, print_stderr, printable
from trainer.metrics.record import Record, RecordWriter, logged_names
from trainer.metrics.time_breakdown import KINDS

if TYPE_CHECKING:
    from trainer.metrics.terminal import Terminal

_SMOOTHING = 0.7
"""Weight of the old value in the moving average of the step time, from which the remaining time is estimated."""

_PHASE_LABELS = {"evaluate": "evaluating", "save": "saving", "profile": "profiling"}
"""Status bar labels for the phases outside a step."""


class ConsoleWriter(RecordWriter):
    """Prints records in readable form to a screen.

    sources: the names of the run's data sources, whose losses and epochs are not printed.
    """

    def __init__(self, num_steps: int, screen: Screen, sources: Collection[str] = ()) -> None:
        self.num_steps = num_steps
        self._screen, self._sources = screen, sources
        self._drawn_at: float | None = None
        self._step_s = math.nan  # moving average of the seconds per step, updated by each `train` record
        self._step, self._phase_label = 0, ""
        self.first_step_label = ""
        """Status bar label until the first step has completed, such as `compiling`; empty for none."""

    def start(self, summary: Mapping[str, str]) -> None:
        """Print the summary at the start of the run.  summary: the text for each topic."""
        self._screen.show_summary({printable(topic): printable(text) for topic, text in summary.items()})

    def write(self, record: Record) -> None:
        if record.kind == "train":
            self._print_train(record)
        elif record.kind == "eval":
            fields = [(0, f"eval  step {record.step:>6}"), (0, f"loss {record.loss:.4f}")]
            if "bits_per_byte" in record:
                fields.append((1, f"{record['bits_per_byte']:.4f} bits/byte"))
            self._print_with_logged(fields, record, "green")
        elif record.kind == "sample":
            self.print(f"sample step {record.step:>5}  {record.prompt}", "bold")
            self.print(record.text)
        elif record.kind == "norms":
            norms = [(norm, name) for name, norm in record.grad_norm.items() if norm is not None]
            fields = [(0, f"norms step {record.step:>6}")]
            if norms:
                (smallest, smallest_unit), (largest, largest_unit) = min(norms), max(norms)
                fields += [(0, f"gradients {smallest:.3g} to {largest:.3g}")]
                fields += [(1, f"largest: {largest_unit}"), (2, f"smallest: {smallest_unit}")]
            else:
                fields.append((0, "not finite"))
            self._print_fitted(fields)
        elif record.kind == "checkpoint":
            size = readable_bytes(record.bytes)
            self.print(f"saved step {record.step:>6}  {size} in {record.total_s:.1f} s", "blue")
        elif record.kind == "profile":
            steps = f"profiled steps {record.first_step} to {record.step}"
            text = f"{steps}, {record.update_s:.3g} s per step under the profiler"
            if record.host is not None:  # the fraction of the step time that each kind of work takes
                text += ": " + ", ".join(f"{kind.replace('_', ' ')} {100 * record[kind]:.1f}%" for kind in KINDS)
            self.print(f"{text}; {record.trace}", "magenta")

    def print(self, text: str, style: str = "") -> None:
        """Print a line.  `style` is a color or `bold`."""
        self._screen.show_line(printable(text), style)

    def close(self) -> None:
        self._screen.close()

    def _print_fitted(self, fields: Sequence[tuple[int, str]], style: str = "") -> None:
        self.print(fit_to_width(fields, self._screen.width), style)

    def _print_train(self, record: Record) -> None:
        if math.isnan(self._step_s):
            self._step_s = record.step_s
        else:
            self._step_s = _SMOOTHING * self._step_s + (1 - _SMOOTHING) * record.step_s
        eta = readable_duration(self._step_s * (self.num_steps - record.step))
        mean = record.get("mean_loss", record.loss)
        fields = [
            (0, f"step {record.step:>6}/{self.num_steps}"),
            (0, f"loss {_format_number(record.loss, '.4f')}"),
            *([(2, f"mean {_format_number(mean, '.4f')}")] if mean != record.loss else []),
            (3, f"grad {_format_number(record.grad_norm, '.3f')}"),
            (5, f"lr {record.lr:.2e}"),
            (1, f"{readable_count(record.tokens_per_s)} target tok/s"),
            *([] if record.mfu is None else [(2, f"mfu {100 * record.mfu:.1f}%")]),
            (4, f"{record.peak_memory_gib:.2f} GiB"),
            (0, f"eta {eta}"),
        ]
        self._print_with_logged(fields, record)

    def _print_with_logged(self, fields: Sequence[tuple[int, str]], record: Record, style: str = "") -> None:
        """Print a line of fields, followed by all fields that `Trainer.log` added to the record.

        Logged fields that do not fit on a terminal line are wrapped onto further lines; none is omitted.
        """
        logged = [f"{name} {_format_logged(record[name])}" for name in logged_names(record, self._sources)]
        width = self._screen.width
        full_line = "  ".join([*(text for _, text in fields), *logged])
        if width is None or len(full_line) <= width:
            self.print(full_line, style)
            return
        self._print_fitted(fields, style)
        line = ""
        for text in logged:
            if line and len(f"{line}  {text}") > width:
                self.print(line, style)
                line = ""
            line = f"{line}  {text}" if line else f"    {text}"
        if line:
            self.print(line, style)

    def progress(self, step: int) -> None:
        """Update the status bar.  Called every step; redraws at most five times per second, and after the last step."""
        now, self._step, self.first_step_label = time.perf_counter(), step, ""
        if self._drawn_at is not None and now - self._drawn_at < 0.2 and step < self.num_steps:
            return
        self._drawn_at = now
        self._draw()

    def enter_phase(self, phase: str) -> None:
        """Show in the status bar that the run has entered a phase, if the phase is outside a step."""
        label = _PHASE_LABELS.get(phase, self.first_step_label)
        if label != self._phase_label:
            self._phase_label = label
            self._draw()

    def _draw(self) -> None:
        remaining_s = self._step_s * (self.num_steps - self._step)
        note = self._phase_label or ("" if math.isnan(remaining_s) else f"eta {readable_duration(remaining_s)}")
        self._screen.show_progress(self._step, self.num_steps, note)


def fit_to_width(fields: Sequence[tuple[int, str]], width: int | None) -> str:
    """Join fields, given as (priority, text), into one line of at most `width` characters.

    Fields with the highest priority numbers are dropped first.  Fields with priority 0 are never dropped; if they alone
    are too long, their padding is removed.  If `width` is None, nothing is dropped.
    """
    fields = list(fields)
    while width is not None and len("  ".join(text for _, text in fields)) > width:
        last = max(priority for priority, _ in fields)
        if last == 0:
            return " ".join(" ".join(text.split()) for _, text in fields)
        fields = [(priority, text) for priority, text in fields if priority != last]
    return "  ".join(text for _, text in fields)


def _format_logged(value: Any) -> str:
    """Format a value from `Trainer.log`; a mean over nothing (None) is shown as a dash."""
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, (int, float)) else str(value)


def _format_number(value: float, format_spec: str) -> str:
    return format(value, format_spec) if math.isfinite(value) else "not finite"


def readable_duration(seconds: float) -> str:
    """Format a duration, such as 2h05m, 3m20s or 12s."""
    total = max(0, round(seconds))
    hours, minutes, seconds = total // 3600, total // 60 % 60, total % 60
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{seconds:02d}s" if minutes else f"{seconds}s"


def readable_count(count: float) -> str:
    """Format a count with three significant digits and a unit, such as 1.24 B or 43.1 k."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= 0.9995 * size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.3g}"


def readable_bytes(count: float) -> str:
    """Format a size in binary units, such as 1.50 GiB."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"


# ---------------------------------------------------------------------------------------------------------------
# Screens: a terminal, or plain lines for a file or a pipe


_INDENT = 14
"""Column of the summary at which the texts start; the topics are to the left of it."""


Screen: TypeAlias = "PlainScreen | Terminal"
"""Displays console output.  Callers must strip control characters from all text."""


class PlainScreen:
    """Writes plain lines of any length, without a status bar, to log files and pipes."""

    width: int | None = None
    """Maximum length of a line in columns, or None if unlimited."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def show_summary(self, summary: Mapping[str, str]) -> None:
        """Show the summary at the start of the run, given as text by topic."""
        for topic, text in summary.items():
            self.show_line(f"{topic:>{_INDENT - 2}}  {text}".replace("\n", "\n" + _INDENT * " "), "")

    def show_line(self, text: str, style: str) -> None:
        """Show a line.  `style`, a color, `bold` or empty, is ignored here."""
        self._stream.write(text + "\n")
        self._stream.flush()

    def show_progress(self, step: int, num_steps: int, note: str) -> None:
        """Does nothing: there is no status bar."""

    def close(self) -> None:
        """Does nothing: there is nothing to remove."""


def make_screen(stream: TextIO) -> Screen:
    """Return a `Terminal` if the stream is one or FORCE_COLOR or TTY_COMPATIBLE=1 is set; otherwise a `PlainScreen`."""
    if not (stream.isatty() or os.environ.get("FORCE_COLOR") or os.environ.get("TTY_COMPATIBLE") == "1"):
        return PlainScreen(stream)
    from rich.console import Console  # other runs do not need rich

    from trainer.metrics.terminal import Terminal

    return Terminal(Console(file=stream, highlight=False, soft_wrap=True))


# ---------------------------------------------------------------------------------------------------------------
# Streams whose errors cannot stop a run


class StandardOutput(io.TextIOBase):
    """The standard output of this process.

    If its reader exits (`| head`, a closed terminal), the rest of the text is dropped, with a warning on stderr.
    Characters that its encoding lacks are replaced.
    """

    def __init__(self) -> None:
        self._stream = sys.stdout
        self._is_closed = False

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
        if not self._is_closed:
            try:
                self._stream.write(text.encode(self.encoding, "replace").decode(self.encoding))
                self._stream.flush()
            except (OSError, ValueError) as error:  # ValueError: this process closed the stream
                self._is_closed = True
                discard_stream(self._stream)
                print_stderr(f"warning: standard output was closed ({error}); the run continues without it")
        return len(text)


class LogFile(io.TextIOBase):
    """An append-only log file.  Text that cannot be written is dropped without an error."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError), open(self._path, "a", encoding="utf-8", errors="replace") as file:
            file.write(text)
        return len(text)
