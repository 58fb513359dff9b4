"""Lays out tables and help texts to fit the terminal's width."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Sequence

_GAP = "  "
_MIN_WIDTH = 20
"""The minimum width, in characters, of a table and of a wrapped last column."""


def terminal_width() -> int:
    """Return the value of COLUMNS if it is set, else the terminal's width in characters; 80 if neither is known."""
    return shutil.get_terminal_size().columns


def table_lines(
    headers: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None, text_columns: Sequence[int] = ()
) -> list[str]:
    """Return the lines of a table that is at most `width` characters wide (None: the terminal's width; at least 20).

    Columns are right-aligned, except for those in `text_columns`, which are left-aligned.  Values are never truncated.
    If the columns do not fit side by side, the last one is wrapped, provided that it is text and has enough space.
    Otherwise each row becomes a block: a line with its first header and cell, and below it `header: value` for each of
    its other cells that is not empty.  If all headers are empty, there is no header line.
    """
    width = max(_MIN_WIDTH, terminal_width() if width is None else width)
    all_rows = [headers, *rows] if any(headers) else list(rows)
    *widths, longest_last = [max(len(row[column]) for row in all_rows) for column in range(len(headers))]
    last_width = width - sum(widths) - len(_GAP) * len(widths)
    is_last_column_text = len(headers) - 1 in text_columns
    if last_width < min(longest_last, _MIN_WIDTH if is_last_column_text else longest_last):
        return [line for row in rows for line in _block_lines(headers, row, width)]
    lines = []
    for *cells, final in all_rows:
        aligned = [
            cell.ljust(size) if column in text_columns else cell.rjust(size)
            for column, (cell, size) in enumerate(zip(cells, widths, strict=True))
        ]
        first, *more = textwrap.wrap(final, last_width, break_on_hyphens=False) or [""]
        lines.append(_GAP.join([*aligned, first if is_last_column_text else first.rjust(longest_last)]).rstrip())
        indent = " " * (width - last_width)
        lines += [indent + line for line in more]
    return lines


def _block_lines(headers: Sequence[str], row: Sequence[str], width: int) -> list[str]:
    """Return the lines of one row whose columns do not fit side by side."""
    first = textwrap.wrap(f"{headers[0]} {row[0]}".strip() or "-", width)
    others = [
        f"{header}: {cell}" if header else cell for header, cell in zip(headers[1:], row[1:], strict=True) if cell
    ]
    below = textwrap.wrap(", ".join(others), width, initial_indent=_GAP, subsequent_indent=_GAP, break_on_hyphens=False)
    return [*first, *below]


def fit_to_width(text: str, columns: int) -> str:
    """Wrap the text to lines of at most `columns` characters, unless a word is longer.

    Text in a second column, such as the description of an option, stays in that column when it is wrapped.  If
    `columns` is 0, returns the text unchanged.
    """
    lines = []
    for line in text.split("\n"):
        if 0 < columns < len(line):
            gap = re.match(r" *\S+(?: \S+)* {2,}", line)
            indent = gap.end() if gap and gap.end() <= columns // 2 else len(line) - len(line.lstrip())
            line = textwrap.fill(
                line, columns, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
            )
        lines.append(line)
    return "\n".join(lines)
