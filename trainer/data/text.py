"""Turns files of text into token shards: documents of records, their ids, and the hold-out.

A document's ids are those that the tokenizer's library gives for its text, in which special tokens are plain text.  A
document of more than a MiB is tokenized in segments, and its ids are defined as theirs.  A segment ends after a newline
or before a space, each between two other characters that are no white space; for the tokenizers of GPT-2, Llama 3 and
Qwen, the ids are then those of the whole.  A MiB without such a place is cut anywhere.  Without segments, a book of
500 MB would need 50 GB of memory.
"""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trainer.data.build import Build
from trainer.data.progress import ByteProgress
from trainer.data.records import (
    BadRecord,
    FilePart,
    InputFile,
    Piece,
    UnreadableFile,
    read_file,
    read_records,
    split_into_pieces,
)
from trainer.data.shards import ShardWriter, find_dtype
from trainer.data.token_files import TokenChunk, read_tokens
from trainer.data.tokenizer import FileTokenizer, Tokenizer
from trainer.errors import UserError, importing, nearest, setting_error
from trainer.files import sample_contents

_LAYOUT_VERSION = 1
"""Increment this if a code change makes different shards from the same text, so that older ones are not used."""


@dataclass(frozen=True)
class SettingNames:
    """Names of the settings in messages: configuration keys, or a command's arguments."""

    inputs: str = "data.path"
    text_key: str = "data.text_key"
    bad: str = "data.bad"
    holdout: str = "data.holdout"
    tokenizer: str = "data.tokenizer"
    bos: str = "data.bos"
    engine: str = "data.engine"


@dataclass
class TextBuild(Build):
    """The shards of some files of text, records or tokens.

    text_key: the key or column that holds the text.
    bad: the value of `data.bad`; see `BadDocuments`.
    holdout: the fraction of documents to hold out.
    engine: the value of `data.engine`.
    """

    inputs: tuple[InputFile, ...]
    tokenizer: Tokenizer
    text_key: str = "text"
    bad: str = "error"
    holdout: float = 0.0
    engine: str = "tokenizers"
    keys: SettingNames = field(default_factory=SettingNames)

    content = "tokenized text"

    def __post_init__(self) -> None:
        parse_limit(self.bad, self.keys.bad)

    @cached_property
    def files(self) -> list[str]:
        """The paths of the files."""
        return [file.path for file in self.inputs]

    @cached_property
    def pieces(self) -> list[Piece]:
        """See `Build.pieces`."""
        return split_into_pieces(self.inputs)

    @cached_property
    def name(self) -> str:
        """See `Build.name`.  Of large files, only samples are read for the hash: see `sample_contents`."""
        local_paths = [file.path for file in self.inputs if file.mtime_ns]
        samples = dict(zip(local_paths, sample_contents(local_paths, self.keys.inputs), strict=True))
        files = [
            (
                file.checksum or os.path.realpath(file.path),
                *(file.kind, file.compression, file.size, file.mtime_ns, samples.get(file.path)),
            )
            for file in self.inputs
        ]
        # `bad` is no part of it: after an error, a run with data.bad=skip continues with what has been read.
        settings = [_LAYOUT_VERSION, self.tokenizer.name, self.text_key, self.holdout, self.engine, files]
        return f"tokens-{hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:20]}"

    def write(
        self, piece: Piece, train: ShardWriter, held_out: ShardWriter, progress: ByteProgress
    ) -> Mapping[str, Any]:
        """Write the documents of a piece, and return its DocumentCounts; see `Build.write`.

        A hash of its text decides whether a document is held out, so that equal texts are on the same side.
        """
        bad, lowest = BadDocuments(self.bad, self.keys), 1.0
        for are_tokens, parts in itertools.groupby(piece.parts, key=lambda part: part.file.kind == "tokens"):
            if are_tokens:
                for tokens in (chunk for part in parts for chunk in self._read_tokens(part)):
                    train.write_tokens(tokens.ids, tokens.ends)
                    bad.counts.documents += len(tokens.ends)
                    progress.add(tokens.ids.nbytes)
                continue
            for documents in _in_blocks(self._read_documents(parts, bad)):
                fractions = [_hash_fraction(text) if self.holdout else 1.0 for text in documents]
                lowest = min(lowest, *fractions)
                for writer, is_held_out in ((train, False), (held_out, True)):
                    own = [(fraction < self.holdout) == is_held_out for fraction in fractions]
                    self._write_documents(list(itertools.compress(documents, own)), writer)
                progress.add(sum(map(len, documents)))
        return {**dataclasses.asdict(bad.counts), "lowest_hash": lowest}

    def combine(self, notes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the counts of all pieces; see `Build.combine`."""
        counts = DocumentCounts()
        for each in notes:
            counts.add(DocumentCounts.from_notes(each))
        combined = {**dataclasses.asdict(counts), "lowest_hash": min(each["lowest_hash"] for each in notes)}
        if counts.documents == counts.empty:
            messages = [message.splitlines()[0] for message in counts.places[:1]]
            rule = f"no readable text in it: {messages[0]}" if messages else "there is no text in it"
            raise setting_error(self.keys.inputs, self.files[:5], rule, fix="give a file that contains text")
        return combined

    def check(self, notes: Mapping[str, Any]) -> None:
        """Raise UserError if `data.bad` does not allow as many bad documents; see `Build.check`."""
        check_limit(DocumentCounts.from_notes(notes), self.bad, self.keys)

    def _read_tokens(self, part: FilePart) -> Iterator[TokenChunk]:
        return read_tokens(part.file, self.tokenizer, self.keys.tokenizer)

    def _read_documents(self, parts: Iterable[FilePart], bad: BadDocuments) -> Iterator[bytes]:
        """Yield the texts of files as UTF-8, without empty ones; count them, and those that cannot be read."""
        for part in parts:
            try:
                for text in self._read_texts(part, bad):
                    bad.counts.documents += 1
                    bad.counts.empty += not text
                    if text:
                        yield text
            except UnreadableFile as error:
                bad.reject_file(part.file.path, str(error), fix=error.fix)

    def _read_texts(self, part: FilePart, bad: BadDocuments) -> Iterator[bytes]:
        if part.file.kind == "text":
            content = read_file(part.file)
            if _is_utf8(content):
                yield content
            else:
                bad.reject(self.keys.inputs, part.file.path, "is not UTF-8", fix="convert it to UTF-8")
            return
        for number, record in read_records(part, [self.text_key]):
            try:
                yield _as_utf8(record[self.text_key])
            except (TypeError, LookupError, AttributeError, ValueError):
                reject_record(record, part.location(number), self.text_key, bad)

    def _write_documents(self, documents: Sequence[bytes], writer: ShardWriter) -> None:
        for is_long, group in itertools.groupby(documents, key=lambda text: len(text) > BLOCK_BYTES):
            texts = list(group)
            if not is_long:
                writer.write_documents(*self._encode(texts), sum(map(len, texts)))
                continue
            for text in texts:
                for segments in _in_blocks(_segments(text)):
                    writer.write(self._encode(segments)[0], sum(map(len, segments)))
                writer.end_document()

    @cached_property
    def _encode(self) -> Encode:
        return make_encoder(self.tokenizer, self.engine, self.keys.engine)


BLOCK_BYTES = 1 << 20
"""Bytes of text to tokenize at once.  This takes about 200 bytes of memory per byte of text."""


def _in_blocks(texts: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Group texts into blocks of about BLOCK_BYTES."""
    block: list[bytes] = []
    num_bytes = 0
    for text in texts:
        block.append(text)
        num_bytes += len(text)
        if num_bytes > BLOCK_BYTES:
            yield block
            block, num_bytes = [], 0
    if block:
        yield block


def _as_utf8(text: Any) -> bytes:
    """Return text as UTF-8; tables may hold it as bytes.  Raises AttributeError or ValueError if it is not text."""
    if isinstance(text, bytes):
        text.decode()
        return text
    encoded: bytes = text.encode()
    return encoded


def _is_utf8(content: bytes) -> bool:
    """Return whether a text is UTF-8, decoding it block by block: a large str may need four bytes a character."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for start in range(0, len(content), BLOCK_BYTES):
            stop = start + BLOCK_BYTES
            decoder.decode(content[start:stop], final=stop >= len(content))
    except UnicodeDecodeError:
        return False
    return True


def _hash_fraction(text: bytes) -> float:
    """Return a hash of a text, from 0 to 1 (exclusive)."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=6).digest(), "little") / (1 << 48)


# -- long documents ---------------------------------------------------------------------------------------------------

_SEGMENT_BYTES = 1 << 18
"""Bytes after which a segment of a long document ends, at the first place where the tokenizers split anyway."""


def _segments(text: bytes) -> Iterator[bytes]:
    """Divide a long text into segments of at most BLOCK_BYTES."""
    start = 0
    while len(text) - start > BLOCK_BYTES:
        stop = _find_cut(text, start + _SEGMENT_BYTES, start + BLOCK_BYTES)
        yield text[start:stop]
        start = stop
    yield text[start:]


def _find_cut(text: bytes, first: int, last: int) -> int:
    """Return the end of a segment, from position `first` to `last`; see the module."""
    for separator, length_before in ((b"\n", 1), (b" ", 0)):
        position = text.find(separator, first, last)
        while position >= 0:
            if not text[position - 1 : position].isspace() and not text[position + 1 : position + 2].isspace():
                return position + length_before
            position = text.find(separator, position + 1, last)
    while text[last] & 0xC0 == 0x80:  # within a character
        last -= 1
    return last


def check_token_files(files: Sequence[InputFile], tokenizer: Tokenizer, bos: bool | None, keys: SettingNames) -> None:
    """Raise UserError if there are token files, unless the tokenizer is given and its BOS token left as it is.

    bos: the value of `data.bos`.
    """
    token_files = [file.path for file in files if file.kind == "tokens"]
    if token_files and tokenizer.name == "bytes":
        rule = f"{token_files[0]} does not say which tokenizer made its tokens"
        raise setting_error(keys.tokenizer, "bytes", rule, proposal="gpt2/tokenizer.json")
    if token_files and bos is not None:
        rule = f"the tokens of {token_files[0]} are used unchanged"
        raise setting_error(keys.bos, bos, rule, fix=f"leave {keys.bos} out")


# -- tokenizer engines ------------------------------------------------------------------------------------------------

IdsAndCounts: TypeAlias = "tuple[NDArray[np.integer[Any]], NDArray[np.int64]]"
"""The concatenated ids of several texts, and the number of ids of each text."""

Encode: TypeAlias = Callable[[Sequence[bytes]], IdsAndCounts]
"""Returns the ids of UTF-8 texts, without start and end tokens."""


def make_encoder(tokenizer: Tokenizer, engine: str, key: str) -> Encode:
    """Return the function that tokenizes texts with an engine, the value of `data.engine`.

    key: the setting that names the engine, for messages.

    Raises UserError if the engine is not installed, or does not support the tokenizer.
    """
    if not isinstance(tokenizer, FileTokenizer):
        return lambda texts: (tokenizer.encode(b"".join(texts)), _lengths(texts))
    library, dtype = tokenizer.library, find_dtype(tokenizer.vocab_size)
    # Set, so that the library does not warn when this process is forked later.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

    def encode(texts: Sequence[bytes]) -> IdsAndCounts:
        encodings = library.encode_batch_fast([text.decode() for text in texts], add_special_tokens=False)
        return _concatenate([np.array(encoding.ids, np.uint32) for encoding in encodings], dtype)

    return encode if engine == "tokenizers" else _make_gigatoken_encoder(tokenizer, encode, key)


def _make_gigatoken_encoder(tokenizer: FileTokenizer, fallback: Encode, key: str) -> Encode:
    """Return the function that tokenizes texts with `gigatoken`.

    fallback: tokenizes texts that contain an added token, with which gigatoken deals differently.
    """
    with importing(key, "gigatoken"):
        import gigatoken

    content = json.loads(tokenizer.library.to_str())
    added = [token["content"] for token in content["added_tokens"] if not token["special"]]
    content["added_tokens"] = [token for token in content["added_tokens"] if not token["special"]]
    content["post_processor"] = None
    contains_added = re.compile(b"|".join(re.escape(text.encode()) for text in added) or rb"(?!)").search
    dtype = find_dtype(tokenizer.vocab_size)

    @contextlib.contextmanager
    def refusing() -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            rule = f"cannot tokenize with {tokenizer.name.partition(':')[0]} ({error})"
            raise setting_error(key, "gigatoken", rule, proposal="tokenizers") from error

    with refusing():
        encode_text = gigatoken.Tokenizer.from_json(json.dumps(content)).backend.encode

    def encode(texts: Sequence[bytes]) -> IdsAndCounts:
        with refusing():
            return _concatenate(
                [fallback([text])[0] if contains_added(text) else encode_text(text) for text in texts], dtype
            )

    return encode


def _concatenate(ids: Sequence[NDArray[Any]], dtype: str) -> IdsAndCounts:
    """Concatenate ids into one array of `dtype`; a narrow dtype is faster, since the array is copied again later."""
    return np.concatenate([np.empty(0, dtype), *ids], dtype=dtype, casting="unsafe"), _lengths(ids)


def _lengths(values: Sequence[bytes] | Sequence[NDArray[Any]]) -> NDArray[np.int64]:
    return np.fromiter(map(len, values), np.int64, len(values))


# -- documents that cannot be read ------------------------------------------------------------------------------------

MAX_LISTED_PLACES = 20
"""Maximum number of bad documents whose locations are kept.  All bad documents are counted."""


@dataclass
class DocumentCounts:
    """How many documents were read or rejected.

    documents: number of documents that were read.
    empty: number of these documents that are empty.
    bad: number of documents that could not be read.
    places: messages about the first few bad documents, with their locations.
    cut_off: messages about the first few files that could not be read to their end.  Each counts as one bad document.
    """

    documents: int = 0
    empty: int = 0
    bad: int = 0
    places: list[str] = field(default_factory=list)
    cut_off: list[str] = field(default_factory=list)

    @classmethod
    def from_notes(cls, notes: Mapping[str, Any]) -> DocumentCounts:
        """Return the counts in the notes of a piece or of a manifest."""
        names = [declared.name for declared in dataclasses.fields(cls)]
        return cls(**{name: notes[name] for name in names if name in notes})

    def add(self, other: DocumentCounts) -> None:
        """Add the counts of `other`."""
        self.documents += other.documents
        self.empty += other.empty
        self.bad += other.bad
        self.places += other.places[: MAX_LISTED_PLACES - len(self.places)]
        self.cut_off += other.cut_off[: MAX_LISTED_PLACES - len(self.cut_off)]


class BadDocuments:
    """Rejects or counts documents that cannot be read.

    limit: the value of `data.bad`: `error` (raise an error at the first one), `skip` (skip them all), or the maximum
        fraction of documents to skip, which `check_limit` enforces after all have been read.
    """

    def __init__(self, limit: str, keys: SettingNames) -> None:
        self.keys, self._limit = keys, limit
        self.counts = DocumentCounts()

    def reject(self, key: str, value: object, rule: str, **advice: Any) -> None:
        """Count a bad document or, if the limit is `error`, raise UserError.  Arguments as for `setting_error`."""
        if self._limit == "error":
            advice = {name: text for name, text in advice.items() if text not in (None, "")}
            fix = f"{self.keys.bad}=skip skips unreadable documents and counts them"
            raise setting_error(key, value, rule, **(advice or {"fix": fix}))
        self.counts.bad += 1
        if len(self.counts.places) < MAX_LISTED_PLACES:
            self.counts.places.append(str(setting_error(key, value, rule)))

    def reject_file(self, value: str, rule: str, **advice: Any) -> None:
        """Count a file that cannot be read to its end as one bad document; raise UserError unless the limit is `skip`.

        A fraction cannot be enforced, since the number of documents in the file is unknown.
        """
        fix = f"{self.keys.bad}=skip skips the whole file; a fraction applies to documents only"
        as_fraction = setting_error(self.keys.inputs, value, rule, fix=fix)
        if self._limit not in ("error", "skip"):
            raise as_fraction
        self.reject(self.keys.inputs, value, rule, **advice)
        if len(self.counts.cut_off) < MAX_LISTED_PLACES:
            self.counts.cut_off.append(str(as_fraction))


def reject_record(record: Any, location: str, text_key: str, bad: BadDocuments) -> None:
    """Report why a record has no text."""
    keys = bad.keys
    if isinstance(record, BadRecord):
        bad.reject(keys.inputs, location, record.rule, fix=record.fix)
    elif not isinstance(record, dict):
        bad.reject(keys.inputs, location, f"must be a JSON object, not {type(record).__name__}")
    elif text_key not in record:
        rule = f"{location} has no such key; its keys: {', '.join(record) or 'none'}"
        fix = chat_advice(record, keys)
        proposal = None if fix else nearest(text_key, record) or (*record, None)[0]
        bad.reject(keys.text_key, text_key, rule, proposal=proposal, fix=fix)
    elif record[text_key] is None:
        bad.reject(keys.inputs, location, f"has no text: its {text_key!r} is null")
    elif isinstance(record[text_key], (str, bytes)):
        bad.reject(keys.inputs, location, "is not valid Unicode")
    else:
        strings = [key for key, value in record.items() if isinstance(value, str)]
        rule = f"at {location} it is not text but {type(record[text_key]).__name__}"
        fix = chat_advice(record, keys)
        bad.reject(keys.text_key, text_key, rule, proposal=None if fix else next(iter(strings), None), fix=fix)


_CHAT_KEYS = (
    {"messages"},
    {"conversations"},
    {"instruction", "output"},
    {"prompt", "completion"},
    {"prompt", "chosen", "rejected"},
)
"""Sets of keys that identify a record as a conversation or a preference pair."""


def chat_advice(names: Iterable[str], keys: SettingNames) -> str:
    """Return advice if records with the keys `names` are chats rather than text, otherwise ""."""
    if not any(chat <= {*names} for chat in _CHAT_KEYS):
        return ""
    if keys.inputs.startswith("data."):
        return "these records are chats, not text: set data.source=chat, or use recipe=sft model.path=FOLDER"
    return "these records are chats, which need no preparation: give the file to a run with data.source=chat"


def parse_limit(setting: str, key: str) -> float:
    """Parse `data.bad` into the allowed fraction of bad documents: 0 for `error`, 1 for `skip`.  Raises UserError."""
    named_limits: Mapping[str, float] = {"error": 0.0, "skip": 1.0}
    if setting in named_limits:
        return named_limits[setting]
    with contextlib.suppress(ValueError):
        if 0 < (fraction := float(setting)) < 1:
            return fraction
    rule = "must be error, skip, or the fraction of documents that may be skipped, between 0 and 1"
    raise setting_error(key, setting, rule, proposal="0.001")


def check_limit(counts: DocumentCounts, setting: str, keys: SettingNames) -> None:
    """Raise UserError if the limit does not allow the documents that were skipped, perhaps under an earlier limit.

    setting: the value of `data.bad`.
    """
    allowed = parse_limit(setting, keys.bad)
    if counts.cut_off and 0 < allowed < 1:
        raise UserError(counts.cut_off[0])
    fraction = counts.bad / max(1, counts.bad + counts.documents)
    if counts.bad and fraction > allowed:
        examples = "\n  ".join(counts.places[:5])
        rule = f"{counts.bad:,} of {counts.bad + counts.documents:,} documents cannot be read\n  {examples}"
        must_skip = fraction >= 0.5 or counts.cut_off
        raise setting_error(keys.bad, setting, rule, "skip" if must_skip else f"{fraction * 1.01:.2g}")


def describe_bad_documents(counts: DocumentCounts) -> str:
    """Return a message about the bad documents, or ""."""
    if not counts.bad:
        return ""
    total = counts.bad + counts.documents
    examples = "".join(f"\n  {error.splitlines()[0]}" for error in counts.places[:5])
    more = "\n  ..." if counts.bad > 5 else ""
    return f"{counts.bad:,} of {total:,} documents cannot be read and were skipped:{examples}{more}"
