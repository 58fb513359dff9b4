"""Turns chat files into token shards: records to conversations, their ids and loss masks, and the hold-out.

Each conversation is a document.  Every stored value is 2 * id + loss_mask, so that a single read returns both the token
and its mask.  The two responses of a pair are consecutive documents.  With labels, each document starts with the
additional value 2 * label.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from trainer.data.build import Build
from trainer.data.chat.formats import BadChat, Completion, Format, Pair, Sample, location_of, read_objects
from trainer.data.chat.masking import EncodedSample, Encoder
from trainer.data.chat.report import ChatReport, list_locations
from trainer.data.progress import ByteProgress
from trainer.data.records import FilePart, InputFile, Piece, split_into_pieces
from trainer.data.shards import ShardWriter
from trainer.data.tokenizer import Tokenizer
from trainer.errors import UserError, setting_error
from trainer.files import sample_contents

_VERSION = 6
"""Increment this when a code change alters the tokens of existing files, so that older cache entries are not used."""

_MIN_PIECE_BYTES = 1 << 22
"""Chats take longer than text: rendering and masking cost about four times as much as tokenizing."""

_BYTES_PER_TOKEN = 4
"""Typical bytes of a chat file per token, to show the progress."""


@dataclass
class ChatBuild(Build):
    """The shards of some chat files.

    key: the setting that names the files, for messages.
    has_labels: whether each record has a label, which is stored too.
    format, columns, train_on, seq_len, too_long, holdout: the data settings with these names, with defaults resolved.
    """

    key: str
    inputs: tuple[InputFile, ...]
    encoder: Encoder
    format: str
    has_labels: bool
    columns: Mapping[str, str]
    train_on: str
    seq_len: int
    too_long: str
    holdout: float

    content = "conversations"

    def __post_init__(self) -> None:
        tokenizer = self.encoder.tokenizer
        doubled = _DoubledTokenizer(tokenizer.name, 2 * tokenizer.vocab_size, 2 * tokenizer.plain.end_id)
        self.tokenizer: Tokenizer = doubled  # type: ignore[assignment]

    @cached_property
    def files(self) -> list[str]:
        """The paths of the files."""
        return [file.path for file in self.inputs]

    @cached_property
    def pieces(self) -> list[Piece]:
        """See `Build.pieces`."""
        return split_into_pieces(self.inputs, _MIN_PIECE_BYTES)

    @cached_property
    def name(self) -> str:
        """See `Build.name`.  Of large files, only samples are read for the hash: see `sample_contents`."""
        samples = sample_contents(self.files, self.key)
        files = [
            (file.path, file.size, file.mtime_ns, sample) for file, sample in zip(self.inputs, samples, strict=True)
        ]
        settings = [self.format, self.has_labels, dict(self.columns), self.train_on, self.seq_len, self.too_long]
        identity = [_VERSION, files, *settings, self.holdout, self.encoder.identity]
        return f"chat-{hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:20]}"

    def write(
        self, piece: Piece, train: ShardWriter, held_out: ShardWriter, progress: ByteProgress
    ) -> Mapping[str, Any]:
        """Write the conversations of a piece, and return its ChatReport; see `Build.write`.

        A hash of its tokens decides whether a conversation is held out, so that equal ones are on the same side.
        """
        report = ChatReport(pairs=self._record_format.name == "preference")
        digest = hashlib.blake2b(digest_size=8)
        for part in piece.parts:
            for number, record in read_objects(part):
                documents = self._encode(location_of(part, number), record, report)
                ids_hash = hashlib.blake2b(b"".join(each.ids.tobytes() for each in documents), digest_size=8).digest()
                if documents:
                    digest.update(ids_hash + b"".join(each.loss_mask.tobytes() for each in documents))
                    is_held_out = int.from_bytes(ids_hash, "little") / 2**64 < self.holdout
                    self._write_documents(documents, held_out if is_held_out else train, is_held_out, report)
                progress.add(_BYTES_PER_TOKEN * sum(len(each.ids) for each in documents))
        report.content = digest.hexdigest()
        return dataclasses.asdict(report)

    def combine(self, notes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the report on all pieces; see `Build.combine`.

        Raises UserError if there are no conversations to use, or too many have no targets.
        """
        reports = [ChatReport(**each) for each in notes]
        report = reports[0]
        for other in reports[1:]:
            report.add(other)
            report.content = hashlib.blake2b(f"{report.content}{other.content}".encode(), digest_size=8).hexdigest()
        self._check(report)
        return dataclasses.asdict(report)

    def _write_documents(
        self, documents: Sequence[EncodedSample], writer: ShardWriter, is_held_out: bool, report: ChatReport
    ) -> None:
        num_tokens = sum(len(each.ids) for each in documents) - self.has_labels  # a label takes the place of a token
        if is_held_out:
            report.held_out += 1
            report.held_out_tokens += num_tokens
        else:
            report.tokens += num_tokens
            report.trained += sum(int(each.loss_mask[1:].sum()) for each in documents)
        for document in documents:
            writer.write(2 * document.ids + document.loss_mask, num_bytes=0)
            writer.end_document()

    @cached_property
    def _record_format(self) -> Format:
        """The format of the first record, which all records must have."""
        for part in map(FilePart, self.inputs):
            for number, record in read_objects(part):
                try:
                    return Format.detect(record, self.format, self.columns, self.has_labels)
                except BadChat as error:
                    raise self._user_error(error, location_of(part, number)) from error
        raise setting_error(
            self.key, ", ".join(self.files), "it contains no conversations", fix="give a file with some"
        )

    def _encode(self, location: str, record: Mapping[str, Any], report: ChatReport) -> list[EncodedSample]:
        """Return a record's documents.

        There are none if the record is dropped as too long, if a document has no targets, or if the responses of a pair
        have the same tokens.
        """
        record_format = self._record_format
        try:
            parsed = record_format.read(record)
            samples: list[Sample] = [parsed.chosen, parsed.rejected] if isinstance(parsed, Pair) else [parsed]
            for kind, detail in record_format.notices(record):
                report.add_notice(kind, detail, location)
            documents = []
            for side, sample in zip(sides_of(samples), samples, strict=True):
                with naming_side(side):
                    documents.append(self.encoder.encode(sample, self._max_tokens))
            report.chats += 1
            report.plain += any(isinstance(sample, Completion) for sample in samples)
            for kind, detail in {notice for document in documents for notice in document.notices}:
                report.add_notice(kind, detail, location)
            documents = self._fit_length(documents, report)
            label = record_format.label(record) if self.has_labels else None
        except BadChat as error:
            raise self._user_error(error, location) from error
        if documents and not all(document.loss_mask[1:].any() for document in documents):
            report.unused.append(location)
            return []
        if len(documents) == 2 and np.array_equal(documents[0].ids, documents[1].ids):
            report.identical.append(location)
            return []
        if label is None or not documents:
            return documents
        report.labels[str(label)] = report.labels.get(str(label), 0) + 1
        return [EncodedSample(np.insert(d.ids, 0, label), np.insert(d.loss_mask, 0, False)) for d in documents]

    @property
    def _max_tokens(self) -> int:
        """The maximum number of tokens that fit in a row; the last token takes a position only if it is scored."""
        return self.seq_len + (not self.encoder.targets_only_last_token)

    def _fit_length(self, documents: list[EncodedSample], report: ChatReport) -> list[EncodedSample]:
        """Apply `data.too_long`: return a record's documents, truncated if necessary, or an empty list to drop them."""
        max_tokens, longest = self._max_tokens, max(len(document.ids) for document in documents)
        if longest <= max_tokens:
            return documents
        if self.too_long == "error":
            rule = f"has {longest} tokens, but a sequence fits only {max_tokens}"
            raise BadChat(rule, "data.seq_len", proposal=longest - max_tokens + self.seq_len)
        if self.too_long == "drop":
            report.dropped += 1
            needed_length = str(-(-(longest - 1) // 64) * 64)
            report.longer[needed_length] = report.longer.get(needed_length, 0) + 1
            report.dropped_tokens += sum(len(document.ids) for document in documents)
            return []
        report.truncated += 1
        report.truncated_tokens += sum(max(0, len(document.ids) - max_tokens) for document in documents)
        return [document.truncated(max_tokens, self.encoder.targets_only_last_token) for document in documents]

    def _check(self, report: ChatReport) -> None:
        """Raise UserError if there are no conversations to use, or too many have no targets."""
        files = ", ".join(self.files)
        if len(report.unused) > _MAX_UNUSED_FRACTION * report.chats:
            fraction = len(report.unused) / report.chats
            rule = (
                f"{fraction:.1%} of {report.chats} {report.kind} have no targets, more than {_MAX_UNUSED_FRACTION:.0%}"
            )
            locations = list_locations(report.unused)
            fix = "remove these records, or choose other targets with data.train_on"
            raise setting_error(self.key, files, f"{rule}: {locations} (data.train_on={self.train_on})", fix=fix)
        if report.tokens or report.held_out:
            return
        if report.identical:
            rule = (
                f"no {report.kind} are left to train on; in {len(report.identical)}, both responses have the same "
                "tokens"
            )
            fix = "give pairs that differ"
            if report.truncated:
                fix = f"increase data.seq_len={self.seq_len}, which truncates them, or {fix}"
            raise setting_error(self.key, files, f"{rule}: {list_locations(report.identical)}", fix=fix)
        rule = f"all {report.chats} {report.kind} are longer than a sequence"
        fix = f"{report.suggested_lengths()}, if the model has that many positions; data.too_long=truncate cuts them"
        raise setting_error("data.seq_len", self.seq_len, rule, fix=fix)

    def _user_error(self, error: BadChat, location: str) -> UserError:
        """Convert a BadChat to a UserError that names the record's location and the setting to change."""
        values = {
            self.key: ", ".join(self.files),
            "data.train_on": self.train_on,
            "data.format": self.format,
            "data.seq_len": self.seq_len,
            "data.columns": json.dumps(dict(self.columns)),
            "data.chat_template": self.encoder.template_name,
        }
        return chat_error(error, location, self.key, values)


_MAX_UNUSED_FRACTION = 0.01
"""Fraction of conversations without targets above which the files are rejected."""


def chat_error(error: BadChat, location: str, key: str, values: Mapping[str, object]) -> UserError:
    """Convert a BadChat to a UserError that names the record's location and the setting to change.

    key: the setting that names the files; it is named if no other setting is to be changed.
    values: the value of this setting, and of each setting that a BadChat may name.
    """
    setting = error.key or key
    proposal = error.proposal
    has_it_already = proposal is not None and values.get(setting) == proposal
    if setting not in values or has_it_already:
        setting = key
        proposal = None
    return setting_error(setting, values[setting], f"{location}: {error}", proposal, fix=error.fix)


def sides_of(samples: Sequence[Sample]) -> tuple[str, ...]:
    """Return the names of a record's samples: those of a pair's two responses, or one empty name."""
    return ("chosen", "rejected") if len(samples) == 2 else ("",)


@contextlib.contextmanager
def naming_side(side: str) -> Iterator[None]:
    """Context manager that names the response in a BadChat that its block raises, unless the name is empty."""
    try:
        yield
    except BadChat as error:
        if not side:
            raise
        raise BadChat(f"{side}: {error}", error.key, error.proposal, error.fix) from error


@dataclass(frozen=True)
class _DoubledTokenizer:
    """Replaces the tokenizer in a shard's metadata: ids are doubled, and documents get no start or end tokens."""

    name: str
    vocab_size: int
    end_id: int
    start_ids: tuple[int, ...] = ()
    end_ids: tuple[int, ...] = ()
