"""A terminal screen drawn with rich: a summary panel at the start, colored lines and a status bar."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_REFRESHES_PER_S = 4
_MAX_BAR_WIDTH, _MIN_BAR_WIDTH, _TEXT_WIDTH = 40, 8, 32
"""Maximum and minimum width of the progress bar, and the width reserved for the text next to it, in columns."""


class Terminal:
    """A `Screen` that draws to a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None

    @property
    def width(self) -> int:
        return self._console.width

    def show_summary(self, summary: Mapping[str, str]) -> None:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", justify="right")
        table.add_column()
        for topic, text in summary.items():
            table.add_row(topic, Text(text))
        self._console.print(Panel(table, title="meshtrainer", title_align="left", border_style="cyan", expand=False))
        self._live = Live(Text("..."), console=self._console, transient=True, refresh_per_second=_REFRESHES_PER_S)
        self._live.start()

    def show_line(self, text: str, style: str) -> None:
        self._console.print(Text(text, style=style))

    def show_progress(self, step: int, num_steps: int, note: str) -> None:
        if self._live is None:
            return
        width = max(_MIN_BAR_WIDTH, min(_MAX_BAR_WIDTH, self._console.width - _TEXT_WIDTH))
        row = Table.grid(padding=(0, 1))
        row.add_row(ProgressBar(total=num_steps, completed=step, width=width), f"{step}/{num_steps}", note)
        self._live.update(row)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
