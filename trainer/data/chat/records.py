"""Reads chat files, JSONL and parquet, record by record."""

from __future__ import annotations

import glob
import gzip
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from trainer.data.chat.conversation import kind_of
from trainer.data.json_files import json_advice
from trainer.errors import nearest, setting_error
from trainer.files import find_folder

if TYPE_CHECKING:
    import pyarrow

SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")


def find_files(key: str, setting: str) -> list[Path]:
    """Return the chat files that a path, folder or glob names, sorted.

    Raises UserError that names the setting `key` if there are none.
    """
    pattern = os.path.expanduser(setting)
    if os.path.isdir(pattern):
        pattern = os.path.join(glob.escape(pattern), "**")
    names = [pattern] if os.path.isfile(pattern) else glob.glob(pattern, recursive=True)
    if find_folder(setting) is None:
        raise setting_error(key, setting, "chats are read from local files only", fix="download it, and give the file")
    paths = sorted(Path(name) for name in names if name.endswith(SUFFIXES) and os.path.isfile(name))
    if paths:
        return paths
    if (advice := next(filter(None, map(json_advice, sorted(names))), None)) is not None:
        raise setting_error(key, setting, advice[0], fix=advice[1])
    if names:
        raise setting_error(key, setting, f"data.source=chat reads files that end in {', '.join(SUFFIXES)}")
    there = [name for name in glob.glob(os.path.join(os.path.dirname(pattern), "*")) if name.endswith(SUFFIXES)]
    raise setting_error(
        key, setting, "no such file or folder, and no match for it as a glob", meant=nearest(pattern, there)
    )


def read_records(path: Path, key: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each record with its location, such as `chats.jsonl:17`: the line or parquet row, counted from 1.

    Raises UserError that names the setting `key` if a file cannot be read or a line is not a JSON object.
    """
    if path.suffix == ".parquet":
        yield from _read_parquet(path, key)
        return
    try:
        with _open(path) as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{path.name}:{number}", _parse(line, path, number, key)
    except UnicodeDecodeError as error:
        raise setting_error(key, path, f"is not UTF-8 ({error.reason})", fix="convert it to UTF-8") from error
    except (OSError, EOFError, zlib.error) as error:
        raise setting_error(key, path, f"cannot be read ({getattr(error, 'strerror', None) or error})") from error


def _open(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="\n")
    return open(path, encoding="utf-8-sig", newline="\n")


def _parse(line: str, path: Path, number: int, key: str) -> Mapping[str, Any]:
    try:
        record = json.loads(line)
        line.encode()
    except (ValueError, RecursionError) as error:
        raise setting_error(key, path, f"{path.name}:{number}: is not JSON ({error})") from error
    if not isinstance(record, dict):
        rule = f"{path.name}:{number}: must be a JSON object, not {kind_of(record)}"
        raise setting_error(key, path, rule)
    return record


def _read_parquet(path: Path, key: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        rule = "parquet needs the library `pyarrow`: pip install 'meshtrainer[parquet]'"
        raise setting_error(key, path, rule) from error
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for record in _rows(batch, path, number, key):
                    number += 1
                    yield f"{path.name}:{number}", _without_nulls(record)
    except (OSError, pyarrow.ArrowException) as error:
        raise setting_error(key, path, f"cannot be read ({error})") from error


def _rows(batch: pyarrow.RecordBatch, path: Path, before: int, key: str) -> list[dict[str, Any]]:
    """Return the rows of a batch that starts at row `before` of the file.

    Raises UserError with the number of the first row that is not UTF-8: parquet requires it, but not every writer
    enforces it.
    """
    try:
        return batch.to_pylist()
    except UnicodeDecodeError:
        for row in range(len(batch)):
            try:
                batch.slice(row, 1).to_pylist()
            except UnicodeDecodeError as error:
                rule = f"{path.name}:{before + row + 1}: is not UTF-8 ({error.reason})"
                raise setting_error(key, path, rule, fix="convert it to UTF-8") from error
        raise


def _without_nulls(value: Any) -> Any:
    """Remove null entries, recursively: in parquet all records of a column share the same keys."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
