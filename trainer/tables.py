"""Fits plain text to the width of a terminal: tables, which become one block per row if too wide, and help texts."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Sequence

_GAP = "  "
_MIN_WIDTH = 20


def terminal_width() -> int:
    """Return the width of the terminal in characters, or of COLUMNS; 80 if neither is known."""
    return shutil.get_terminal_size().columns


def table_lines(
    heads: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None, text_columns: Sequence[int] = ()
) -> list[str]:
    """Return the lines of a table that is at most `width` characters wide (default: as wide as the terminal).

    Columns are right-aligned, except for those in `text_columns`, which are left-aligned.  Values are never truncated.
    If the columns do not fit side by side, the last one is wrapped if it is text; otherwise each row becomes its first
    cell with `head: value` for the other cells below it.  If all heads are empty, there is no header line.
    """
    width = max(_MIN_WIDTH, terminal_width() if width is None else width)
    shown = [heads, *rows] if any(heads) else list(rows)
    *sizes, last = [max(len(row[column]) for row in shown) for column in range(len(heads))]
    room = width - sum(sizes) - len(_GAP) * len(sizes)
    has_text_last = len(heads) - 1 in text_columns
    if room < min(last, _MIN_WIDTH if has_text_last else last):
        return [line for row in rows for line in _block(heads, row, width)]
    lines = []
    for *cells, final in shown:
        placed = [
            cell.ljust(size) if column in text_columns else cell.rjust(size)
            for column, (cell, size) in enumerate(zip(cells, sizes, strict=True))
        ]
        first, *more = textwrap.wrap(final, room, break_on_hyphens=False) or [""]
        lines.append(_GAP.join([*placed, first if has_text_last else first.rjust(last)]).rstrip())
        indent = " " * (width - room)
        lines += [indent + line for line in more]
    return lines


def _block(heads: Sequence[str], row: Sequence[str], width: int) -> list[str]:
    """Return the lines of one row whose columns do not fit side by side."""
    first = textwrap.wrap(f"{heads[0]} {row[0]}".strip() or "-", width)
    others = [f"{head}: {cell}" if head else cell for head, cell in zip(heads[1:], row[1:], strict=True) if cell]
    below = textwrap.wrap(", ".join(others), width, initial_indent=_GAP, subsequent_indent=_GAP, break_on_hyphens=False)
    return [*first, *below]


def fit_to_width(text: str, columns: int) -> str:
    """Wrap the text to lines of at most `columns` characters, unless a word is longer; 0: unchanged.

    Text after a wide gap, such as the meaning of an option, continues at its own indentation.
    """
    lines = []
    for line in text.split("\n"):
        if 0 < columns < len(line):
            gap = re.match(r" *\S+(?: \S+)* {2,}", line)
            below = gap.end() if gap and gap.end() <= columns // 2 else len(line) - len(line.lstrip())
            line = textwrap.fill(
                line, columns, subsequent_indent=" " * below, break_long_words=False, break_on_hyphens=False
            )
        lines.append(line)
    return "\n".join(lines)
