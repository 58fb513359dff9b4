"""Tables as text, as wide as the terminal, or with one line for each row if stdout is no terminal."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Collection, Sequence

from trainer.errors import printable

_UNLIMITED_WIDTH = 10_000
"""Width in characters of a table that is not printed on a terminal: no cell is folded."""


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], text_columns: Collection[int] = (0,)) -> str:
    """Return a table as text, without borders and control sequences.

    Columns are right-aligned, except for those in `text_columns`.  On a narrow terminal, cells are folded into several
    lines; nothing is cut off.  If all headers are empty, there is no header line.
    """
    from rich.console import Console  # takes 50 ms to import, which a mistake or --help need not wait for
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, pad_edge=False, show_header=any(headers))
    for column, header in enumerate(headers):
        justify = "left" if column in text_columns else "right"
        grid.add_column(Text(header), justify=justify, overflow="fold")  # type: ignore[arg-type]
    for row in rows:
        grid.add_row(*(Text(printable(cell)) for cell in row))
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _UNLIMITED_WIDTH
    output = io.StringIO()
    # With both sizes given, rich does not ask COLUMNS and TERM.
    Console(file=output, width=width, height=1, color_system=None).print(grid)
    return "\n".join(line.rstrip() for line in output.getvalue().splitlines())
