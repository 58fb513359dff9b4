"""Documents out of tables: parquet files, and Arrow files as `datasets` saves them.  Read with pyarrow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainer.data.ingest.inputs import Input
from trainer.data.ingest.report import BadPlaces
from trainer.errors import nearest, setting_error

ROWS = 256
"""Rows of a parquet file that are decoded at a time."""


def group_row_groups(each: Input, size: int) -> Iterator[tuple[int, int, int]]:
    """Yield consecutive row groups of about `size` bytes on disk: the first, one behind the last, their bytes.

    Raises UserError if the file is no parquet.
    """
    metadata = _open_parquet(each).metadata
    first, held = 0, 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        held += sum(group.column(column).total_compressed_size for column in range(group.num_columns))
        if held >= size or number + 1 == metadata.num_row_groups:
            yield first, number + 1, held
            first, held = number + 1, 0


def read_records(each: Input, start: int, stop: int | None, text_key: str, bad: BadPlaces) -> Iterator[list[bytes]]:
    """Yield the texts of a table's column, of the row groups `start` to `stop` of a parquet file."""
    arrow = _import(each)
    try:
        row = 0
        for column in _columns(each, start, stop, text_key, bad):
            if not (arrow.types.is_string(column.type) or arrow.types.is_large_string(column.type)):
                rule = f"in {each.path} it is not text but {column.type}"
                raise setting_error(bad.keys.text_key, text_key, rule, fix="give a text column")
            yield _texts(arrow, column, each, row, bad)
            row += len(column)
    except (OSError, arrow.ArrowException) as error:
        bad.refuse_file(each.path, f"cannot be read to its end ({error})")


def _columns(each: Input, start: int, stop: int | None, text_key: str, bad: BadPlaces) -> Iterator[Any]:
    if each.kind == "parquet":
        with _open_parquet(each) as file:
            _check_column(each, file.schema_arrow.names, text_key, bad)
            groups = range(start, file.num_row_groups if stop is None else stop)
            for batch in file.iter_batches(ROWS, list(groups), [text_key], use_threads=False):
                yield batch.column(0)
        return
    arrow = _import(each)
    with arrow.OSFile(each.path) as stored, _open_arrow(arrow, stored) as batches:
        _check_column(each, batches.schema.names, text_key, bad)
        for batch in batches:
            yield batch.column(batches.schema.names.index(text_key))


def _texts(arrow: Any, column: Any, each: Input, first: int, bad: BadPlaces) -> list[bytes]:
    """Return the texts of a column, in UTF-8; those that are none are refused."""
    try:
        column.validate(full=True)
        is_valid = True
    except arrow.ArrowInvalid:
        is_valid = False
    found: list[bytes] = []
    as_bytes = arrow.large_binary() if arrow.types.is_large_string(column.type) else arrow.binary()
    for row, text in enumerate(column.view(as_bytes).to_pylist(), first):
        if text is None:
            bad.refuse(bad.keys.inputs, f"{each.path}, row {row}", "has no text")
        elif is_valid or _is_unicode(text):
            found.append(text)
        else:
            bad.refuse(bad.keys.inputs, f"{each.path}, row {row}", "is not UTF-8")
    return found


def _is_unicode(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _check_column(each: Input, names: list[str], text_key: str, bad: BadPlaces) -> None:
    """Raise UserError unless a table has the column: it then has it in no row."""
    if text_key not in names:
        rule = f"{each.path} has no such column; its columns: {', '.join(names) or 'none'}"
        raise setting_error(bad.keys.text_key, text_key, rule, nearest(text_key, names) or (*names, None)[0])


def _open_parquet(each: Input) -> Any:
    arrow = _import(each)
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(each.path, memory_map=False, pre_buffer=False, buffer_size=1 << 20)
    except (OSError, arrow.ArrowException) as error:
        raise setting_error(each.key, each.path, f"is not a readable parquet file ({error})") from error


def _open_arrow(arrow: Any, stored: Any) -> Any:
    """Open a file of record batches: a stream, as `datasets` writes it, or a file with an index."""
    is_indexed = stored.read(6) == b"ARROW1"
    stored.seek(0)
    return _Indexed(arrow.ipc.open_file(stored)) if is_indexed else arrow.ipc.open_stream(stored)


class _Indexed:
    """The record batches of a file with an index, in turn."""

    def __init__(self, file: Any) -> None:
        self._file, self.schema = file, file.schema

    def __enter__(self) -> _Indexed:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[Any]:
        return map(self._file.get_batch, range(self._file.num_record_batches))


def _import(each: Input) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError as error:
        fix = "pip install 'meshtrainer[data]'"
        raise setting_error(each.key, each.path, "needs the library `pyarrow`", fix=fix) from error
    return pyarrow
