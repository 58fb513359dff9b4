"""Reads documents from tables with pyarrow: parquet files, and Arrow files as saved by `datasets`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainer.data.ingest.inputs import InputFile
from trainer.data.ingest.report import BadDocuments, chat_advice
from trainer.errors import nearest, setting_error

ROWS_PER_BATCH = 128
"""Rows of a parquet file to decode at a time."""


def split_row_groups(each: InputFile, size: int) -> Iterator[tuple[int, int | None, int]]:
    """Split a parquet file into runs of row groups of about `size` bytes on disk: yields (start, stop, bytes).

    A file that is not valid parquet yields a single run, and is rejected when it is read.
    """
    try:
        with _open_parquet(each) as file:
            metadata = file.metadata
    except (OSError, _import(each).ArrowException):
        yield 0, None, each.size
        return
    first, held = 0, 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        held += sum(group.column(column).total_compressed_size for column in range(group.num_columns))
        if held >= size or number + 1 == metadata.num_row_groups:
            yield first, number + 1, held
            first, held = number + 1, 0


def read_records(
    each: InputFile, start: int, stop: int | None, text_key: str, bad: BadDocuments
) -> Iterator[list[bytes]]:
    """Yield the texts of a table's column; of a parquet file, those in the row groups `start` to `stop`."""
    arrow = _import(each)
    try:
        for first, column in _columns(each, start, stop, text_key, bad):
            found = _as_bytes(arrow, column)
            if found is None:
                rule = f"in {each.path} it is not text but {column.type}"
                fix = chat_advice([text_key], bad.keys) or "give a text column"
                raise setting_error(bad.keys.text_key, text_key, rule, fix=fix)
            yield _texts(arrow, found, each, first, bad)
    except (OSError, arrow.ArrowException) as error:
        bad.reject_file(each.path, f"cannot be read to its end ({error})")


def _columns(
    each: InputFile, start: int, stop: int | None, text_key: str, bad: BadDocuments
) -> Iterator[tuple[int, Any]]:
    """Yield pieces of a table's column, each with the 1-based number of its first row in the file."""
    row = 1
    if each.kind == "parquet":
        with _open_parquet(each) as file:
            _check_column(each, file.schema_arrow.names, text_key, bad)
            row += sum(file.metadata.row_group(number).num_rows for number in range(start))
            groups = range(start, file.num_row_groups if stop is None else stop)
            for batch in file.iter_batches(ROWS_PER_BATCH, list(groups), [text_key], use_threads=False):
                yield row, batch.column(batch.schema.names.index(text_key))  # "a.b" also matches `b` in a struct `a`
                row += len(batch)
        return
    arrow = _import(each)
    with arrow.OSFile(each.path) as stored:
        schema, batches = _open_arrow(arrow, stored)
        _check_column(each, schema.names, text_key, bad)
        for batch in batches:
            yield row, batch.column(schema.names.index(text_key))
            row += len(batch)


def _as_bytes(arrow: Any, column: Any) -> Any:
    """Convert a text column to bytes, without requiring valid UTF-8; returns None if it is not text.

    Raises ArrowInvalid if the column's offsets are invalid.
    """
    kinds = arrow.types
    if kinds.is_dictionary(column.type):
        values = _as_bytes(arrow, column.dictionary)
        if values is None:
            return None
        return arrow.DictionaryArray.from_arrays(column.indices, values).dictionary_decode()
    if kinds.is_string_view(column.type) or kinds.is_binary_view(column.type):
        column = column.view(arrow.binary_view())
        column.validate(full=True)
        return column.cast(arrow.large_binary())
    if kinds.is_large_string(column.type) or kinds.is_large_binary(column.type):
        found = column.view(arrow.large_binary())
    elif kinds.is_string(column.type) or kinds.is_binary(column.type):
        found = column.view(arrow.binary())
    else:
        return None
    found.validate(full=True)
    return found


def _texts(arrow: Any, column: Any, each: InputFile, first: int, bad: BadDocuments) -> list[bytes]:
    """Return the texts of a column of bytes; nulls and invalid UTF-8 are counted as bad."""
    try:
        column.view(arrow.large_string() if arrow.types.is_large_binary(column.type) else arrow.string()).validate(
            full=True
        )
        is_valid = True
    except arrow.ArrowInvalid:
        is_valid = False
    found: list[bytes] = []
    for row, text in enumerate(column.to_pylist(), first):
        if text is None:
            bad.reject(bad.keys.inputs, f"{each.path}, row {row}", "has no text")
        elif is_valid or _is_unicode(text):
            found.append(text)
        else:
            bad.reject(bad.keys.inputs, f"{each.path}, row {row}", "is not UTF-8")
    return found


def _is_unicode(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _check_column(each: InputFile, names: list[str], text_key: str, bad: BadDocuments) -> None:
    """Raise UserError if the table lacks the column."""
    if text_key not in names:
        rule = f"{each.path} has no such column; its columns: {', '.join(names) or 'none'}"
        if fix := chat_advice(names, bad.keys):
            raise setting_error(bad.keys.text_key, text_key, rule, fix=fix)
        raise setting_error(bad.keys.text_key, text_key, rule, nearest(text_key, names) or (*names, None)[0])


def _open_parquet(each: InputFile) -> Any:
    """Open a parquet file.  Raises OSError or ArrowException."""
    _import(each)
    import pyarrow.parquet

    return pyarrow.parquet.ParquetFile(each.path, memory_map=False, pre_buffer=False, buffer_size=1 << 20)


def _open_arrow(arrow: Any, stored: Any) -> tuple[Any, Iterator[Any]]:
    """Return the schema and the record batches of an Arrow file, in the stream format (used by `datasets`) or file
    format.
    """
    is_indexed = stored.read(6) == b"ARROW1"
    stored.seek(0)
    if not is_indexed:
        stream = arrow.ipc.open_stream(stored)
        return stream.schema, iter(stream)
    file = arrow.ipc.open_file(stored)
    return file.schema, map(file.get_batch, range(file.num_record_batches))


def _import(each: InputFile) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError as error:
        fix = "pip install 'meshtrainer[data]'"
        raise setting_error(each.key, each.path, "needs the library `pyarrow`", fix=fix) from error
    return pyarrow
