"""Reads token files of other trainers (nanoGPT, llm.c, modded-nanogpt, Megatron), whose tokens are used unchanged.

nanoGPT's files are plain uint16 tokens.  The files of llm.c and modded-nanogpt have a header with the number of tokens.
In all of these, the tokenizer's end token separates documents.  Megatron's NAME.idx, next to NAME.bin, records the
boundaries of sequences and documents.  None of these formats records which tokenizer was used.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from trainer.data.shards import find_dtype
from trainer.data.tokenizer import Tokenizer
from trainer.errors import setting_error

if TYPE_CHECKING:
    from trainer.data.records import InputFile

_MEGATRON_MAGIC = b"MMIDIDX\0\0"
"""The first bytes of Megatron's index files."""

_MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}

_HEADER_BYTES = 256 * 4

_HEADER_DTYPES = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
"""The dtype of the tokens in files with a header, by the header's first two integers: magic number and version."""

_CHUNK_TOKENS = 1 << 20
"""Number of tokens read at once."""


@dataclass(frozen=True)
class TokenChunk:
    """Consecutive tokens of a file.

    ends: the offsets in `ids` at which documents end (exclusive).
    """

    ids: NDArray[np.integer[Any]]
    ends: NDArray[np.int64]


def is_foreign_token_file(path: str) -> bool:
    """Return whether a .bin file comes from another trainer: no .json or .idx file of this project is next to it."""
    stem = path.removesuffix(".bin")
    if os.path.exists(f"{stem}.json"):
        return False
    return not os.path.exists(f"{stem}.idx") or _is_megatron(path)


def _is_megatron(path: str) -> bool:
    """Return whether a .bin file has a Megatron index next to it."""
    try:
        with open(f"{path.removesuffix('.bin')}.idx", "rb") as file:
            return file.read(len(_MEGATRON_MAGIC)) == _MEGATRON_MAGIC
    except OSError:
        return False


def read_tokens(file: InputFile, tokenizer: Tokenizer, tokenizer_key: str) -> Iterator[TokenChunk]:
    """Yield the tokens of a file.

    tokenizer_key: the setting that names the tokenizer, for messages.

    Raises UserError if the file cannot be read or has ids outside the vocabulary of `tokenizer`.
    """
    try:
        read = _read_megatron if _is_megatron(file.path) else _read_plain_tokens
        for tokens in read(file, tokenizer):
            is_invalid = (tokens.ids < 0) | (tokens.ids >= tokenizer.vocab_size)
            if is_invalid.any():
                invalid_id, vocab_size = tokens.ids[is_invalid.argmax()], tokenizer.vocab_size
                rule = f"{file.path} holds the id {invalid_id}, but the tokenizer's ids are below {vocab_size}"
                fix = "set the tokenizer that produced the tokens"
                raise setting_error(tokenizer_key, tokenizer.name.partition(":")[0], rule, fix=fix)
            yield tokens
    except OSError as error:
        raise setting_error(file.key, file.path, f"cannot be read ({error.strerror})") from error


def _read_plain_tokens(file: InputFile, tokenizer: Tokenizer) -> Iterator[TokenChunk]:
    """Yield the tokens of a file without an index, in which each end token ends a document."""
    dtype, start = _token_layout(file, tokenizer)
    for ids, is_last in _token_chunks(file, dtype, start):
        ends = np.flatnonzero(ids == tokenizer.end_id) + 1
        if is_last and (not len(ends) or ends[-1] < len(ids)):
            ends = np.append(ends, len(ids))  # the last document has no end token
        yield TokenChunk(ids, ends)


def _token_layout(file: InputFile, tokenizer: Tokenizer) -> tuple[np.dtype[Any], int]:
    """Return the dtype of a file's tokens, and the byte offset at which they start."""
    header = np.fromfile(file.path, "<i4", 3)
    dtype = _HEADER_DTYPES.get(tuple(header[:2].tolist())) if len(header) == 3 else None
    if dtype is None:
        plain_dtype = np.promote_types(find_dtype(tokenizer.vocab_size), "u2")
        problem = f"its size is not a multiple of {plain_dtype.itemsize} bytes"
        _check_complete(file, file.size % plain_dtype.itemsize == 0, problem)
        return plain_dtype.newbyteorder("<"), 0
    expected = _HEADER_BYTES + int(header[2]) * np.dtype(dtype).itemsize
    problem = f"it has {file.size} bytes, but its header says {expected}"
    _check_complete(file, file.size == expected, problem)
    return np.dtype(dtype), _HEADER_BYTES


def _read_megatron(file: InputFile, tokenizer: Tokenizer) -> Iterator[TokenChunk]:
    dtype, document_ends = _read_megatron_index(file)
    position = 0
    for ids, _ in _token_chunks(file, dtype, 0):
        first, last = np.searchsorted(document_ends, [position, position + len(ids)], side="right")
        yield TokenChunk(ids, document_ends[first:last] - position)
        position += len(ids)


def _read_megatron_index(file: InputFile) -> tuple[np.dtype[Any], NDArray[np.int64]]:
    """Return the dtype of a Megatron file's tokens, and the positions at which documents end."""
    content = Path(file.path.removesuffix(".bin") + ".idx").read_bytes()
    version = np.frombuffer(content, "<u8", 1, len(_MEGATRON_MAGIC))[0] if len(content) >= 34 else 0
    code = content[17] if version == 1 else 0
    _check_complete(file, code in _MEGATRON_DTYPES, "its .idx has an unknown Megatron version or type")
    dtype = np.dtype(_MEGATRON_DTYPES[code])
    num_sequences, num_documents = np.frombuffer(content, "<u8", 2, 18).tolist()
    expected = 34 + 12 * num_sequences + 8 * num_documents
    _check_complete(file, len(content) >= expected, f"its .idx has {len(content)} bytes and needs {expected}")
    lengths = np.frombuffer(content, "<i4", num_sequences, 34).astype(np.int64)
    pointers = np.frombuffer(content, "<i8", num_sequences, 34 + 4 * num_sequences)
    documents = np.frombuffer(content, "<i8", num_documents, 34 + 12 * num_sequences)
    ends = np.concatenate([[0], np.cumsum(lengths)])
    has_all_bytes = ends[-1] * dtype.itemsize == file.size
    is_contiguous = has_all_bytes and np.array_equal(pointers, ends[:-1] * dtype.itemsize)
    _check_complete(file, bool(is_contiguous), "its .idx does not cover all of its bytes in order")
    _check_complete(file, bool(np.all((documents >= 0) & (documents <= num_sequences))), "its .idx is damaged")
    return dtype, np.unique(ends[np.append(documents, num_sequences)])[1:]


def _token_chunks(file: InputFile, dtype: np.dtype[Any], start: int) -> Iterator[tuple[NDArray[Any], bool]]:
    """Yield (ids, is_last) for each chunk of the file, from byte `start` on."""
    num_left = (file.size - start) // dtype.itemsize
    with open(file.path, "rb") as stream:
        stream.seek(start)
        while num_left:
            ids = np.fromfile(stream, dtype, min(_CHUNK_TOKENS, num_left))
            _check_complete(file, len(ids) > 0, "it is truncated")
            num_left -= len(ids)
            yield ids, num_left == 0


def _check_complete(file: InputFile, is_complete: bool, problem: str) -> None:
    if not is_complete:
        raise setting_error(file.key, file.path, f"is not a complete token file: {problem}")
