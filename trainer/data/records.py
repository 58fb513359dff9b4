"""Finds data files and reads their records: the one reader for text, chats and prompts.

`find_files` lists the files that a path, folder or glob names, and `split_into_pieces` divides them into pieces of
work.  `read_records` reads the records of a file, or of a part of one, without holding more than a record (for tables:
some rows) in memory.

A record is a JSON value of a .jsonl or .json file, or a row of a .csv, .tsv, .parquet or .arrow file as a dict.  A
.json file holds records if it is an array of objects, or has several lines with one object each.  Other JSON files,
such as a model's configuration or a shard's metadata, hold none.
"""

from __future__ import annotations

import csv
import difflib
import functools
import glob
import gzip
import io
import itertools
import json
import os
import re
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, TextIO, TypeAlias

from trainer.data.token_files import is_foreign_token_file
from trainer.errors import setting_error

Kind: TypeAlias = Literal["text", "jsonl", "json", "csv", "parquet", "arrow", "tokens"]
"""How a file is read; `tokens` are other trainers' token files."""

Compression: TypeAlias = Literal["", "gz", "zst"]

_PROSE_SUFFIXES = ".txt .md .markdown .rst .tex .org .adoc .html .htm .xml"

_CODE_SUFFIXES = (
    ".py .pyi .c .h .cc .cpp .cxx .hh .hpp .cu .cuh .m .mm .rs .go .java .kt .kts .scala .swift .cs .fs .js .jsx .mjs "
    ".ts .tsx .rb .php .pl .pm .lua .r .jl .hs .ml .mli .ex .exs .erl .clj .lisp .el .scm .sh .bash .zsh .sql .css "
    ".vue .proto .cmake .asm .s .f90 .f .zig .nim .dart .v .vhd .sv"
)

_KIND_BY_SUFFIX: dict[str, Kind] = {
    **dict.fromkeys((*_PROSE_SUFFIXES.split(), *_CODE_SUFFIXES.split()), "text"),
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".bin": "tokens",
}

_COMPRESSION_BY_SUFFIX: dict[str, Compression] = {".gz": "gz", ".zst": "zst"}

_COMPRESSIBLE_KINDS = ("text", "jsonl", "json", "csv")

RECORD_KINDS: tuple[Kind, ...] = ("jsonl", "json", "csv", "parquet", "arrow")
"""The kinds of files that `read_records` reads."""

DOCUMENT_KINDS: tuple[Kind, ...] = ("text", *RECORD_KINDS)
"""The kinds of files that hold documents.  A .bin file may be anything, unless the user named it."""

RECORD_SUFFIXES = ".jsonl, .json, .csv (each also with .gz or .zst), .parquet or .arrow"
"""The most common types of files with records, for messages."""

DOCUMENT_SUFFIXES = (
    ".txt, .md, .jsonl, .json, .csv, a source-code suffix (each also with .gz or .zst), .parquet or .arrow"
)
"""The most common types of document files, as read from local folders and from datasets on the Hub, for messages."""

SUPPORTED_SUFFIXES = f"{DOCUMENT_SUFFIXES.replace(' or .arrow', ', .arrow')}, or .bin (from another trainer)"
"""The most common types of files that a local path may name, for messages."""

URL_SUFFIXES = (
    ".txt, .md, .jsonl, .csv, a source-code suffix (each also with .gz or .zst), .json.gz, .json.zst, .parquet or "
    ".arrow"
)
"""The most common types of document files that a URL may name.  At a URL, an uncompressed .json file is a manifest."""

NO_RECORDS = "holds no records: a .json file must be an array of objects, or have several lines with one object each"
"""What messages say about a .json file without records."""


@dataclass(frozen=True)
class InputFile:
    """A file of documents, records or tokens.

    size: in bytes.
    mtime_ns: the modification time in nanoseconds; 0 for files that are downloaded.
    key: the setting that names the file, for messages.
    checksum: the checksum of the content, if known without reading the file, otherwise "".  A known checksum identifies
        the file in place of its path.
    """

    path: str
    kind: Kind
    compression: Compression
    size: int
    mtime_ns: int
    key: str
    checksum: str = ""

    @classmethod
    def from_path(cls, path: str, key: str) -> InputFile | None:
        """Return a description of the file at `path`, or None if its kind is not supported.

        A .json file without records is not supported.  Raises UserError that names the setting `key` if a file of a
        supported kind does not exist or cannot be accessed.
        """
        kind_and_compression = kind_of(path)  # a link's own name counts: the target's may have no suffix
        if kind_and_compression is None:
            return None
        kind, compression = kind_and_compression
        try:
            if kind == "json" and not compression and not is_record_file(path):
                return None
            stat = os.stat(path)
        except OSError as error:
            raise setting_error(key, path, f"cannot be read ({error.strerror})") from error
        return cls(path, kind, compression, stat.st_size, stat.st_mtime_ns, key)


def kind_of(path: str) -> tuple[Kind, Compression] | None:
    """Return the kind and the compression of a file, judging by its name; None if its kind is not supported."""
    stem, suffix = os.path.splitext(path.lower())
    compression = _COMPRESSION_BY_SUFFIX.get(suffix, "")
    kind = _KIND_BY_SUFFIX.get(os.path.splitext(stem)[1] if compression else suffix)
    if kind is None or (compression and kind not in _COMPRESSIBLE_KINDS):
        return None
    return kind, compression


_HEAD_BYTES = 4096
"""Number of bytes to inspect at the start of a .json file."""


def is_record_file(path: str | Path) -> bool:
    """Return whether a .json file holds records, judging by its first bytes.  Raises OSError."""
    with open(path, "rb") as file:
        head = file.read(_HEAD_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip()
    return re.match(rb"\[\s*[{\]]|\{[^\n]*\}[ \t\r]*\n\s*\{", head) is not None


# -- finding files ----------------------------------------------------------------------------------------------------


def find_files(values: Iterable[str], key: str, kinds: Collection[Kind] = DOCUMENT_KINDS) -> list[InputFile]:
    """Return the files that `values` (paths, folders or globs) match, without duplicates, in the same order.

    A folder means all files of `kinds` in it, at any depth and in sorted order.  A folder saved by `datasets` means its
    `train` split.  A value may also name token files of other trainers, if `kinds` includes text.

    Raises UserError that names the setting `key` if a value names no such file.
    """
    suffixes = DOCUMENT_SUFFIXES if "text" in kinds else RECORD_SUFFIXES
    files: dict[str, InputFile] = {}
    for value in values:
        for match in _find_matches(value, key, kinds):
            found = _list_files(match, key, kinds)
            if not found:
                if os.path.isdir(match):
                    rule = f"has no file that ends in {suffixes}"
                elif kind_of(match) == ("json", ""):
                    rule = NO_RECORDS
                else:
                    rule = f"its name must end in {SUPPORTED_SUFFIXES if 'text' in kinds else suffixes}"
                raise setting_error(key, match, rule, fix='write each document as one line of .jsonl: {"text": "..."}')
            files.update((os.path.realpath(file.path), file) for file in found)
    return list(files.values())


def _find_matches(value: str, key: str, kinds: Collection[Kind]) -> list[str]:
    """Return the files and folders that `value`, a path or glob, matches.  Raises UserError if there are none."""
    pattern = os.path.expanduser(value.removeprefix("file://"))
    matches = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
    if matches:
        return [os.path.abspath(match) for match in matches]
    if "://" in pattern:
        fix = "download it, and give the folder that contains it"
        raise setting_error(key, value, "is not on a local file system", fix=fix)
    if value.startswith("[") and value.endswith("]"):
        fix = "give several files as a folder or a glob, several sources as a mapping: {web: PATH, code: PATH}"
        raise setting_error(key, value, "is read as one path, and there is no such file", fix=fix)
    parent = Path(pattern).parent
    candidates = []
    for path in sorted(parent.glob("[!.]*")):
        kind_and_compression = kind_of(path.name)
        if path.is_dir() or (kind_and_compression is not None and kind_and_compression[0] in (*kinds, "tokens")):
            candidates.append(path.name)
    similar = difflib.get_close_matches(Path(pattern).name, candidates, n=1, cutoff=0.7)
    rule = "no such file or folder, and no match for it as a glob"
    if similar:
        raise setting_error(key, value, rule, proposal=parent / similar[0])
    searched_from = "" if os.path.isabs(pattern) else f", looked up from {Path.cwd()}"
    raise setting_error(key, value, rule, fix=f"give an existing file, folder or glob{searched_from}")


def _list_files(path: str, key: str, kinds: Collection[Kind]) -> list[InputFile]:
    """Return the files of `kinds` in a folder, or the file at `path` itself if it is usable."""
    if os.path.isdir(path):
        found = [InputFile.from_path(inner, key) for inner in _walk(_dataset_folder(path, key))]
        return [file for file in found if file is not None and file.kind in kinds]
    file = InputFile.from_path(path, key)
    if file is None:
        return []
    if file.kind == "tokens":
        return [file] if "text" in kinds and is_foreign_token_file(path) else []
    return [file] if file.kind in kinds else []


def _walk(folder: str) -> list[str]:
    """Return the files in a folder, at any depth, sorted by path; hidden files and folders are skipped."""
    paths = []
    for subfolder, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths += [os.path.join(subfolder, name) for name in names if not name.startswith(".")]
    return sorted(paths)


def _dataset_folder(folder: str, key: str) -> str:
    """Return the folder with the records: `folder`, or its subfolder `train` if `datasets` has saved splits there.

    Raises UserError if there are splits, but no `train` split.
    """
    if not os.path.isfile(os.path.join(folder, "dataset_dict.json")):
        return folder
    train_folder = os.path.join(folder, "train")
    if os.path.isdir(train_folder):
        return train_folder
    splits = sorted(entry.path for entry in os.scandir(folder) if entry.is_dir())
    raise setting_error(
        key, folder, "has no `train` split; give the folder of another split", proposal=next(iter(splits), None)
    )


# -- pieces of work ---------------------------------------------------------------------------------------------------
# They depend only on the files, so that the shards do not depend on where a build was interrupted.

MIN_PIECE_BYTES = 1 << 24
"""Minimum bytes of input to aim for per piece."""

MAX_PIECE_BYTES = 1 << 28
"""Maximum bytes of input to aim for per piece."""

TARGET_NUM_PIECES = 4096
"""Number of pieces to aim for within these limits."""

MAX_FILES_PER_PIECE = 4096
"""Maximum number of small files in a piece."""


@dataclass(frozen=True)
class FilePart:
    """A file, or a part of it.

    start, stop: a range of a .jsonl file's bytes or of a .parquet file's row groups; 0 and None for the whole file.
        The lines of a .jsonl part are those that begin within its range.
    """

    file: InputFile
    start: int = 0
    stop: int | None = None

    def record_number(self, number: int) -> int:
        """Return the number of a record in the whole file, given its number in this part: its line, row or object."""
        return number + (_records_before(self) if self.start else 0)

    def location(self, number: int) -> str:
        """Return where the record with this number is, for messages: `web.jsonl:12`, or `web.parquet, row 12`."""
        separator = ", row " if self.file.kind in ("parquet", "arrow") else ":"
        return f"{self.file.path}{separator}{self.record_number(number)}"


@functools.lru_cache(maxsize=64)
def _records_before(part: FilePart) -> int:
    """Return the number of lines or rows of a file before a part of it."""
    if part.file.kind == "parquet":
        with _open_parquet(part.file) as table:
            return sum(table.metadata.row_group(group).num_rows for group in range(part.start))
    # Parts are usually read in order, so counting continues where it stopped: a file is read once for all parts.
    # The line with the byte before the part is the last before it.
    position, num_lines = _counted_lines.get(part.file, (0, 0))
    if position > part.start - 1:
        position, num_lines = 0, 0
    with open(part.file.path, "rb") as file:
        file.seek(position)
        while position < part.start - 1 and (block := file.read(min(1 << 20, part.start - 1 - position))):
            position += len(block)
            num_lines += block.count(b"\n")
    _counted_lines.clear()
    _counted_lines[part.file] = position, num_lines
    return num_lines + 1


_counted_lines: dict[InputFile, tuple[int, int]] = {}
"""A position in the last file in which lines were counted, and the number of newlines before it."""


@dataclass(frozen=True)
class Piece:
    """Several files, or a part of one.

    size: the approximate number of input bytes.
    """

    parts: tuple[FilePart, ...]
    size: int


def split_into_pieces(files: Sequence[InputFile], min_bytes: int | None = None) -> list[Piece]:
    """Divide files into pieces, in the order of their records.

    min_bytes: the minimum size of a piece, if it is not MIN_PIECE_BYTES.
    """
    min_bytes = MIN_PIECE_BYTES if min_bytes is None else min_bytes
    size = min(MAX_PIECE_BYTES, max(min_bytes, sum(file.size for file in files) // TARGET_NUM_PIECES))
    pieces: list[Piece] = []
    group: list[InputFile] = []
    group_size = 0
    for file in files:
        if group and (len(group) == MAX_FILES_PER_PIECE or group_size + file.size > size):
            pieces.append(Piece(tuple(map(FilePart, group)), group_size))
            group, group_size = [], 0
        is_divisible = file.kind in ("jsonl", "parquet") and not file.compression
        if file.size <= size or not is_divisible:
            group.append(file)
            group_size += file.size
        elif file.kind == "parquet":
            pieces += _split_parquet(file, size)
        else:
            count = -(-file.size // size)
            bounds = [file.size * number // count for number in range(count + 1)]
            pieces += [Piece((FilePart(file, a, b),), b - a) for a, b in itertools.pairwise(bounds)]
    if group:
        pieces.append(Piece(tuple(map(FilePart, group)), group_size))
    return pieces


def _split_parquet(file: InputFile, size: int) -> Iterator[Piece]:
    """Divide a parquet file into ranges of row groups of about `size` bytes on disk.

    An invalid file is one piece: it is reported when it is read.
    """
    try:
        with _open_parquet(file) as table:
            metadata = table.metadata
    except (OSError, ValueError):
        yield Piece((FilePart(file),), file.size)
        return
    first, num_bytes = 0, 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        num_bytes += sum(group.column(column).total_compressed_size for column in range(group.num_columns))
        if num_bytes >= size or number + 1 == metadata.num_row_groups:
            yield Piece((FilePart(file, first, number + 1),), num_bytes)
            first, num_bytes = number + 1, 0


# -- reading records --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BadRecord:
    """A record that cannot be read.

    rule: what is wrong with it, to follow its location in a message.
    fix: what to do about it; may be empty.
    """

    rule: str
    fix: str = ""


class UnreadableFile(Exception):
    """A file cannot be read to its end; the message says why, to follow the file's path.

    fix: what to do about it; may be empty.
    """

    def __init__(self, rule: str, fix: str = "") -> None:
        super().__init__(rule)
        self.fix = fix


def read_file(file: InputFile) -> bytes:
    """Return the decompressed content of a file.  Raises UnreadableFile."""
    with _reporting_unreadable(), open_stream(file) as stream:
        return stream.read()


def read_records(part: FilePart, columns: Sequence[str] | None = None) -> Iterator[tuple[int, Any]]:
    """Yield (number, record) for each record of a part of a file, numbered from 1 as in `FilePart.record_number`.

    A record that cannot be read is a BadRecord.  Blank lines of .jsonl and .csv files are skipped, but count.

    columns: the columns of a .parquet or .arrow file to read; None for all.  If one is missing, all are read, so that
        messages can name them.

    Raises UnreadableFile if the rest of the file cannot be read.
    """
    read = {"jsonl": _read_lines, "json": _read_json, "csv": _read_csv}.get(part.file.kind)
    with _reporting_unreadable():
        yield from _read_table(part, columns) if read is None else read(part)


@contextmanager
def _reporting_unreadable() -> Iterator[None]:
    """Context manager that turns the errors of reading a missing or damaged file into UnreadableFile."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise UnreadableFile(f"is not UTF-8 ({error.reason})", "convert it to UTF-8") from error
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UnreadableFile(f"cannot be read to its end ({reason})") from error


def open_stream(file: InputFile) -> BinaryIO:
    """Open a file to read its decompressed content.  Opening and reading may raise OSError, EOFError or zlib.error."""
    if file.compression == "gz":
        return io.BufferedReader(gzip.open(file.path), 1 << 20)
    if file.compression == "zst":
        return io.BufferedReader(_import_pyarrow(file).input_stream(file.path, compression="zstd"), 1 << 20)
    return open(file.path, "rb", buffering=1 << 20)


def _read_lines(part: FilePart) -> Iterator[tuple[int, Any]]:
    with open_stream(part.file) as file:
        position = part.start
        if part.start:
            file.seek(part.start - 1)
            position += len(file.readline()) - 1  # the rest of a line that began before this part
        for number, line in enumerate(file, 1):
            if part.stop is not None and position >= part.stop:
                return
            position += len(line)
            if number == 1 and not part.start:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line and not line.isspace():
                yield number, _parse_line(line)


def _parse_line(line: bytes) -> Any:
    try:
        return json.loads(line.decode().rstrip())  # else messages name a second line
    except UnicodeDecodeError as error:
        return BadRecord(f"is not UTF-8 ({error.reason})", "convert it to UTF-8")
    except ValueError as error:
        return BadRecord(f"is not JSON ({error})")
    except RecursionError:
        return BadRecord("is not JSON (nested too deeply)")


_BLOCK_CHARS = 1 << 20
"""Minimum number of characters of a .json file to read at once."""

_SEPARATORS = re.compile(r"[\s,\[\]]*")
"""Matches the text between two records: white space, and the commas and brackets of an array."""


def _read_json(part: FilePart) -> Iterator[tuple[int, Any]]:
    with _open_text(part.file) as file:
        decoder = json.JSONDecoder()
        text, position = "", 0
        number = 0
        num_open = 0  # unclosed array brackets
        is_at_end = False
        while True:
            separators = text[position : _SEPARATORS.match(text, position).end()]  # type: ignore[union-attr]
            num_open += separators.count("[") - separators.count("]")
            position += len(separators)
            try:
                if position < len(text):
                    record, end = decoder.raw_decode(text, position)
                    number, position = number + 1, end
                    yield number, record
                    continue
            except json.JSONDecodeError as error:
                if is_at_end:
                    raise UnreadableFile(f"record {number + 1} is not JSON ({error.msg})") from error
            except RecursionError as error:
                raise UnreadableFile(f"record {number + 1} is nested too deeply") from error
            except ValueError as error:  # a number with too many digits
                raise UnreadableFile(f"record {number + 1} cannot be read ({error})") from error
            if is_at_end and num_open > 0:
                raise UnreadableFile(f"the array does not end: the file is cut off after record {number}")
            if is_at_end:
                return
            block = file.read(max(_BLOCK_CHARS, len(text) - position))
            text, position = text[position:] + block, 0
            is_at_end = not block


def _read_csv(part: FilePart) -> Iterator[tuple[int, Any]]:
    csv.field_size_limit(1 << 31)
    is_tab_separated = ".tsv" in Path(part.file.path.lower()).suffixes
    with _open_text(part.file) as file:
        rows = csv.reader(file, delimiter="\t" if is_tab_separated else ",", strict=True)
        try:
            names = next(rows, None)
            for number, row in enumerate(rows, 1):
                if names is None or not row:
                    continue
                if len(row) != len(names):
                    raise UnreadableFile(f"row {number} has {len(row)} fields, but the header has {len(names)}")
                yield number, dict(zip(names, row, strict=True))
        except csv.Error as error:
            raise UnreadableFile(f"line {rows.line_num} is not CSV ({error})") from error


def _open_text(file: InputFile) -> TextIO:
    return io.TextIOWrapper(open_stream(file), "utf-8-sig", newline="")


# -- tables, read with pyarrow ----------------------------------------------------------------------------------------

_ROWS_PER_BATCH = 128
"""Number of rows of a parquet file to decode at once."""


def _read_table(part: FilePart, columns: Sequence[str] | None) -> Iterator[tuple[int, Any]]:
    arrow, number = _import_pyarrow(part.file), 0
    try:
        for batch in _read_batches(part, columns):
            for record in _rows(_readable(arrow, batch), arrow.ArrowInvalid):
                number += 1
                yield number, record
    except arrow.ArrowException as error:
        raise UnreadableFile(f"cannot be read to its end ({error})") from error
    except (ValueError, OverflowError) as error:  # a time that Python cannot represent
        raise UnreadableFile(f"has a value that cannot be read ({error})") from error


def _read_batches(part: FilePart, columns: Sequence[str] | None) -> Iterator[Any]:
    """Yield a table's rows in pyarrow's RecordBatches."""
    if part.file.kind == "parquet":
        with _open_parquet(part.file) as table:
            groups = range(part.start, table.num_row_groups if part.stop is None else part.stop)
            selected = _select(columns, table.schema_arrow.names)
            yield from table.iter_batches(_ROWS_PER_BATCH, list(groups), selected, use_threads=False)
        return
    arrow = _import_pyarrow(part.file)
    with arrow.OSFile(part.file.path) as stored:
        is_indexed = stored.read(6) == b"ARROW1"
        stored.seek(0)
        if is_indexed:
            reader = arrow.ipc.open_file(stored)
            batches = map(reader.get_batch, range(reader.num_record_batches))
        else:  # the format that `datasets` writes
            reader = arrow.ipc.open_stream(stored)
            batches = iter(reader)
        selected = _select(columns, reader.schema.names)
        for batch in batches:
            yield batch if selected is None else batch.select(selected)


def _select(columns: Sequence[str] | None, names: Sequence[str]) -> list[str] | None:
    return list(columns) if columns is not None and set(columns) <= set(names) else None


def _readable(arrow: Any, batch: Any) -> Any:
    """Return a RecordBatch with times in nanoseconds as text: Python's own types cannot represent them."""
    for number, field in enumerate(batch.schema):
        if arrow.types.is_timestamp(field.type) and field.type.unit == "ns":
            batch = batch.set_column(number, field.name, batch.column(number).cast(arrow.string()))
    return batch


def _rows(batch: Any, invalid: type[Exception]) -> Iterator[Any]:
    """Yield the rows of a RecordBatch as dicts; a row with invalid UTF-8 or invalid offsets is a BadRecord.

    invalid: the exception that the validation raises.
    """
    try:
        batch.validate(full=True)
    except invalid:
        for number in range(len(batch)):
            row = batch.slice(number, 1)
            try:
                row.validate(full=True)
            except invalid as error:
                yield BadRecord("is not UTF-8" if "UTF8" in str(error) else f"is damaged ({error})")
            else:
                yield row.to_pylist()[0]
        return
    yield from batch.to_pylist()


def _open_parquet(file: InputFile) -> Any:
    """Open a parquet file.  Raises OSError or ArrowException."""
    _import_pyarrow(file)
    import pyarrow.parquet

    return pyarrow.parquet.ParquetFile(file.path, memory_map=False, pre_buffer=False, buffer_size=1 << 20)


def _import_pyarrow(file: InputFile) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError as error:
        fix = "pip install 'meshtrainer[data]'"
        raise setting_error(file.key, file.path, "needs the `pyarrow` library", fix=fix) from error
    return pyarrow
