"""Reads the token files of other trainers, unchanged: nanoGPT's, and Megatron's with its index.

nanoGPT writes plain uint16; the tokenizer's end token separates documents.  Files with a header (llm.c, modded-nanogpt)
state the number of tokens.  Megatron's NAME.idx, next to NAME.bin, gives the boundaries of sequences and documents.
None of these formats records which tokenizer was used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.data.ingest.inputs import MEGATRON_MAGIC, InputFile, is_megatron
from trainer.data.ingest.report import SettingNames
from trainer.data.shards import find_dtype
from trainer.data.tokenizer import Tokenizer
from trainer.errors import UserError, setting_error

_MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_HEADER = 256 * 4
_HEADERS = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
"""The dtype of files with a header, by the header's first two integers."""

_CHUNK = 1 << 20
"""Tokens to read at a time."""


@dataclass(frozen=True)
class TokenChunk:
    """Consecutive tokens of a file, and the offsets in `ids` at which documents end."""

    ids: NDArray[np.integer[Any]]
    ends: NDArray[np.int64]


def check_tokens(inputs: Sequence[InputFile], tokenizer: Tokenizer, bos: bool | None, keys: SettingNames) -> None:
    """Check settings for token files of other trainers: `data.tokenizer` must be set, and `data.bos` must not.

    Raises UserError.
    """
    of_others = [each.path for each in inputs if each.kind == "tokens"]
    if of_others and tokenizer.name == "bytes":
        rule = f"{of_others[0]} does not say which tokenizer made its tokens"
        raise setting_error(keys.tokenizer, "bytes", rule, example="gpt2/tokenizer.json")
    if of_others and bos is not None:
        rule = f"the tokens of {of_others[0]} are used unchanged"
        raise setting_error(keys.bos, bos, rule, fix=f"leave {keys.bos} out")


def read_tokens(each: InputFile, tokenizer: Tokenizer, keys: SettingNames) -> Iterator[TokenChunk]:
    """Yield the tokens of a file.  Raises UserError if it cannot be read, or has ids outside the vocabulary of
    `tokenizer`.
    """
    try:
        read = _read_megatron if is_megatron(each.path) else _read_plain
        for tokens in read(each, tokenizer):
            beyond = (tokens.ids < 0) | (tokens.ids >= tokenizer.vocab_size)
            if beyond.any():
                rule = f"{each.path} holds the id {tokens.ids[beyond.argmax()]}, it has {tokenizer.vocab_size}"
                fix = "set the tokenizer that produced the tokens"
                raise setting_error(keys.tokenizer, tokenizer.name.partition(":")[0], rule, fix=fix)
            yield tokens
    except OSError as error:
        raise setting_error(each.key, each.path, f"cannot be read ({error.strerror})") from error


def _read_plain(each: InputFile, tokenizer: Tokenizer) -> Iterator[TokenChunk]:
    """Yield the tokens of a file without an index; each end token ends a document."""
    dtype, start = _layout(each, tokenizer)
    for ids, is_last in _chunks(each, dtype, start):
        ends = np.flatnonzero(ids == tokenizer.end_id) + 1
        is_cut = is_last and (not len(ends) or ends[-1] < len(ids))
        yield TokenChunk(ids, np.append(ends, len(ids)) if is_cut else ends)


def _layout(each: InputFile, tokenizer: Tokenizer) -> tuple[np.dtype[Any], int]:
    """Return the dtype of a file's tokens, and the byte offset at which they begin."""
    header = np.fromfile(each.path, "<i4", 3)
    dtype = _HEADERS.get(tuple(header[:2].tolist())) if len(header) == 3 else None
    if dtype is None:
        plain = np.promote_types(find_dtype(tokenizer.vocab_size), "u2")
        _check_size(each, each.size % plain.itemsize == 0, f"its size is not a multiple of {plain.itemsize} bytes")
        return plain.newbyteorder("<"), 0
    expected = _HEADER + int(header[2]) * np.dtype(dtype).itemsize
    _check_size(each, each.size == expected, f"it has {each.size} bytes, but its header says {expected}")
    return np.dtype(dtype), _HEADER


def _read_megatron(each: InputFile, tokenizer: Tokenizer) -> Iterator[TokenChunk]:
    dtype, borders = _read_index(each)
    position = 0
    for ids, _ in _chunks(each, dtype, 0):
        first, last = np.searchsorted(borders, [position, position + len(ids)], side="right")
        yield TokenChunk(ids, borders[first:last] - position)
        position += len(ids)


def _read_index(each: InputFile) -> tuple[np.dtype[Any], NDArray[np.int64]]:
    """Return the dtype of a Megatron file's tokens, and the positions at which documents end."""
    content = Path(each.path.removesuffix(".bin") + ".idx").read_bytes()
    found = np.frombuffer(content, "<u8", 1, len(MEGATRON_MAGIC))[0] if len(content) >= 34 else 0
    code = content[17] if found == 1 else 0
    _check_size(each, code in _MEGATRON_DTYPES, "its .idx has an unknown Megatron version or type")
    dtype = np.dtype(_MEGATRON_DTYPES[code])
    num_sequences, num_documents = np.frombuffer(content, "<u8", 2, 18).tolist()
    expected = 34 + 12 * num_sequences + 8 * num_documents
    _check_size(each, len(content) >= expected, f"its .idx has {len(content)} bytes and needs {expected}")
    lengths = np.frombuffer(content, "<i4", num_sequences, 34).astype(np.int64)
    pointers = np.frombuffer(content, "<i8", num_sequences, 34 + 4 * num_sequences)
    documents = np.frombuffer(content, "<i8", num_documents, 34 + 12 * num_sequences)
    ends = np.concatenate([[0], np.cumsum(lengths)])
    is_whole = ends[-1] * dtype.itemsize == each.size and np.array_equal(pointers, ends[:-1] * dtype.itemsize)
    _check_size(each, bool(is_whole), "its .idx does not cover all of its bytes in order")
    _check_size(each, bool(np.all((documents >= 0) & (documents <= num_sequences))), "its .idx is damaged")
    return dtype, np.unique(ends[np.append(documents, num_sequences)])[1:]


def _chunks(each: InputFile, dtype: np.dtype[Any], start: int) -> Iterator[tuple[NDArray[Any], bool]]:
    """Yield the tokens of a file from byte `start` on, in chunks, each with a flag for the last chunk."""
    left = (each.size - start) // dtype.itemsize
    with open(each.path, "rb") as file:
        file.seek(start)
        while left:
            found = np.fromfile(file, dtype, min(_CHUNK, left))
            _check_size(each, len(found) > 0, "it is truncated")
            left -= len(found)
            yield found, left == 0


def _check_size(each: InputFile, is_right: bool, rule: str) -> None:
    if not is_right:
        raise _damaged(each, rule)


def _damaged(each: InputFile, rule: str) -> UserError:
    return setting_error(each.key, each.path, f"is not a complete token file: {rule}")
