"""Provides data sources for conversations (packed or not), preference pairs and labeled conversations.

Also reads the first conversations in a run's files, for display.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from trainer.config.rules import CHATML
from trainer.data.build import load_or_build
from trainer.data.chat.build import ChatBuild, chat_error, naming_side, sides_of
from trainer.data.chat.formats import BadChat, Format, Pair, check_columns, find_chat_files, location_of, read_objects
from trainer.data.chat.masking import EncodedSample, Encoder
from trainer.data.chat.report import ChatReport, check_dropped
from trainer.data.chat.template import find_template
from trainer.data.chat.tokenizer import ChatTokenizer
from trainer.data.packing import PackedSource
from trainer.data.records import FilePart
from trainer.data.shards import Shard, Stream
from trainer.data.source import IGNORE, Fingerprint, Source, Split, hold_out_last
from trainer.errors import setting_error

if TYPE_CHECKING:
    from trainer.config.schema import DataSection


def open_chats(data: DataSection, vocab_size: int | None, split: Split) -> Source | None:
    """Return the data source for the configured files, or None if `split` is `eval` and no conversation is held out.

    vocab_size: the model's vocabulary size; None skips the comparison with the tokenizer's.

    Raises UserError if the files, their columns, the tokenizer, the chat template or a conversation cannot be used, or
    if the tokenizer's vocabulary is larger than the model's.
    """
    check_columns(data.columns or {}, data.format)
    encoder = make_encoder(data)
    if vocab_size is not None and encoder.tokenizer.vocab_size > vocab_size:
        min_vocab_size = encoder.tokenizer.vocab_size
        rule = f"must be at least {min_vocab_size} for the ids of data.tokenizer={data.tokenizer}"
        fix = (
            "use the tokenizer that came with the weights; when training from scratch, "
            f"model.vocab_size={min_vocab_size} also works"
        )
        raise setting_error("model.vocab_size", vocab_size, rule, fix=fix)
    if split == "eval" and data.eval_path is not None:
        return _open_build(_chat_build(data, "data.eval_path", data.eval_path, encoder, holdout=0.0), data, "train")
    holdout = 0.0 if data.eval_path is not None else data.holdout or 0.0
    return _open_build(_chat_build(data, "data.path", data.path, encoder, holdout), data, split)


def _chat_build(data: DataSection, key: str, path: object, encoder: Encoder, holdout: float) -> ChatBuild:
    """Return how the conversations in the files named by `path`, the value of the setting `key`, are tokenized."""
    return ChatBuild(
        key=key,
        inputs=tuple(find_chat_files(str(path), key)),
        encoder=encoder,
        format=data.format,
        has_labels=data.labels != "none",
        columns=data.columns or {},
        train_on=data.train_on,
        seq_len=data.seq_len,
        too_long="drop" if data.too_long == "auto" else data.too_long,
        holdout=holdout,
    )


def _open_build(build: ChatBuild, data: DataSection, split: Split) -> Source | None:
    """Return the source for tokenized conversations, or None if `split` is `eval` and nothing is held out.

    The fraction `build.holdout` of the conversations is held out, chosen by a hash of their tokens; if either split
    would otherwise be empty, it is a fraction of the samples, taken from the end.
    """
    loaded = load_or_build(build, data.cache_dir)
    report = ChatReport(**loaded.notes)
    if data.too_long == "auto":
        check_dropped(report, build.key, data.seq_len)
    is_split = bool(loaded.train and loaded.held_out)
    shards, content = loaded.train, loaded.train_content
    if (is_split and split == "eval") or not shards:
        shards, content = loaded.held_out, loaded.held_out_content
    source: Source
    if build.has_labels:
        source = LabeledSource(shards, report, data.seq_len, build.encoder, data.labels == "mismatched")
    elif report.pairs:
        source = PairSource(shards, report, data.seq_len, build.encoder)
    else:
        source = ChatSource(shards, report, build.encoder, data, content)
    return source if is_split else hold_out_last(source, build.holdout, split)


def make_encoder(data: DataSection) -> Encoder:
    """Return the encoder for the data settings.  Raises UserError if the tokenizer or template cannot be used."""
    template = find_template(data.chat_template, data.tokenizer)
    tokenizer = ChatTokenizer(data.tokenizer, accepted=data.special_tokens)
    missing = [token for token in ("<|im_start|>", "<|im_end|>") if token not in tokenizer.added_tokens]
    if data.chat_template == CHATML and missing:
        rule = f"the tokenizer has no token {missing[-1]}, so the model could not learn to stop"
        fix = "give a .jinja file that ends turns with a token that the tokenizer has, such as {{ eos_token }}"
        raise setting_error("data.chat_template", CHATML, rule, fix=fix)
    return Encoder(tokenizer, template, data.train_on, data.chat_template)


class _Conversations(ABC):
    """What all sources of conversations know; each conversation is a document of some shards.

    report: statistics of all conversations in the files, including those of other splits.
    longest: the smallest row length, in tokens, that fits every conversation of the shards.
    """

    def __init__(self, shards: Sequence[Shard], report: ChatReport, encoder: Encoder) -> None:
        self.report = report
        self._encoder = encoder
        self._documents = Stream(shards)
        blocks = list(self._documents.document_blocks())
        self._offsets = np.concatenate([*(offsets[:-1] for offsets in blocks), blocks[-1][-1:]])
        self.longest = int(self._lengths.max(initial=0))

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """The fingerprint; it covers every token and every loss mask."""
        return Fingerprint(len(self), len(self._documents.shards), self._documents.num_tokens, self.report.content)

    @property
    def facts(self) -> Mapping[str, float]:
        """The fraction of training tokens that are targets, and the fractions of all tokens dropped and truncated."""
        return self.report.shares

    @property
    def summary(self) -> str:
        """Statistics of the conversations, and notes on the chat template."""
        notes = [] if self.report.plain == self.report.chats else self._encoder.notes()
        return "\n".join([self.report.summary(self._encoder.has_template), *notes])

    @property
    def _lengths(self) -> NDArray[np.int64]:
        """The number of positions that each conversation takes; its last token needs one only if it is scored."""
        return np.diff(self._offsets) - (not self._encoder.targets_only_last_token)

    def _read(self, number: int) -> EncodedSample:
        start, stop = self._offsets[number : number + 2].tolist()
        values = self._documents.read(start, stop - start)
        return EncodedSample((values >> 1).astype(np.int64), (values & 1).astype(bool))


class ChatSource(_Conversations, PackedSource):
    """Rows of one or more conversations that do not attend to each other.

    content: the shards' `sample_content`.
    """

    def __init__(
        self, shards: Sequence[Shard], report: ChatReport, encoder: Encoder, data: DataSection, content: str
    ) -> None:
        packs = data.documents != "apart"
        PackedSource.__init__(self, shards, data.seq_len, content, data.cache_dir, packs=packs, is_masked=packs)
        _Conversations.__init__(self, shards, report, encoder)
        self.vocab_size, self.tokenizer = encoder.tokenizer.vocab_size, encoder.tokenizer.plain.name
        self._padding = shards[0].info.end_id >> 1

    def __len__(self) -> int:
        return PackedSource.__len__(self)

    def _tokens_and_targets(
        self, values: NDArray[np.unsignedinteger[Any]]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return tokens and targets, given stored values 2 * id + loss_mask; see `TokenSource`."""
        ids = (values >> 1).astype(np.int64)
        return ids[:, :-1], np.where(values[:, 1:] & 1, ids[:, 1:], IGNORE)


class _ConversationRows(_Conversations, Source):
    """Base class of sources whose rows have one conversation each."""

    def __init__(self, shards: Sequence[Shard], report: ChatReport, seq_len: int, encoder: Encoder) -> None:
        super().__init__(shards, report, encoder)
        self.seq_len = seq_len
        self.vocab_size = encoder.tokenizer.vocab_size
        self.tokenizer = encoder.tokenizer.plain.name
        self.shards, self._padding = list(shards), shards[0].info.end_id >> 1

    def _empty_rows(self, num_rows: int) -> dict[str, NDArray[Any]]:
        shape = (num_rows, self.seq_len)
        return {
            "tokens": np.full(shape, self._padding, np.int64),
            "targets": np.full(shape, IGNORE, np.int64),
        }

    def _write_row(self, rows: Mapping[str, NDArray[Any]], row: int, number: int) -> int:
        """Write conversation `number` into a row, and return the offset of its end.

        A conversation of n tokens takes n - 1 positions: its last token is only a target.  With `data.train_on=end` it
        takes n positions, and its only target is a 0 at the last position.
        """
        encoded = self._read(number)
        if self._encoder.targets_only_last_token:
            stop = len(encoded.ids)
            rows["tokens"][row, :stop] = encoded.ids
            rows["targets"][row, stop - 1] = 0
            return stop
        stop = len(encoded.ids) - 1
        rows["tokens"][row, :stop] = encoded.ids[:-1]
        rows["targets"][row, :stop] = np.where(encoded.loss_mask[1:], encoded.ids[1:], IGNORE)
        return stop


class PairSource(_ConversationRows):
    """Preference pairs: rows 2i and 2i + 1 of a batch are the chosen and the rejected response of its i-th sample."""

    rows_per_sample = 2

    def __len__(self) -> int:
        return (len(self._offsets) - 1) // 2

    def batch(self, indices: NDArray[np.int64]) -> Mapping[str, NDArray[Any]]:
        """Return `tokens` and `targets`, both (2 * len(indices), seq_len), and `pair`, the sample index of each row."""
        rows = {**self._empty_rows(2 * len(indices)), "pair": np.repeat(np.asarray(indices, np.int64), 2)}
        for sample, index in enumerate(np.asarray(indices).tolist()):
            if index >= 0:
                self._write_row(rows, 2 * sample, 2 * index)
                self._write_row(rows, 2 * sample + 1, 2 * index + 1)
        return rows


class LabeledSource(_ConversationRows):
    """Labeled conversations, one per row or, with mismatched responses, one per two rows.

    A batch has `labels`, one per sample; with `data.train_on=end`, the label is also the target at the last token.
    With mismatched responses, row 2i is the conversation of sample i, and row 2i + 1 combines its prompt with the
    response of the next conversation that has a different prompt.  A prompt ends before the first target.
    """

    def __init__(
        self, shards: Sequence[Shard], report: ChatReport, seq_len: int, encoder: Encoder, is_mismatched: bool
    ) -> None:
        super().__init__(shards, report, seq_len, encoder)
        labels = [int(label) for label in report.labels]
        self.rows_per_sample, self.num_labels = 1 + is_mismatched, max(labels, default=-1) + 1
        self.only_label = labels[0] if len(labels) == 1 else None
        if is_mismatched and len(self):
            self._next_with_another_prompt(0)  # raises an error before training, not in the middle of it

    @property
    def _lengths(self) -> NDArray[np.int64]:
        return super()._lengths - 1  # the first value is the label

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def batch(self, indices: NDArray[np.int64]) -> Mapping[str, NDArray[Any]]:
        """Return `tokens`, `targets` and `labels` of the samples at `indices`; see the class."""
        rows, labels = self._empty_rows(self.rows_per_sample * len(indices)), np.zeros(len(indices), np.int64)
        for sample, index in enumerate(np.asarray(indices).tolist()):
            if index < 0:
                continue
            row = self.rows_per_sample * sample
            end = self._write_row(rows, row, index)
            labels[sample] = self._documents.read(int(self._offsets[index]), 1)[0] >> 1
            if self._encoder.targets_only_last_token:
                rows["targets"][row, end - 1] = labels[sample]
            if self.rows_per_sample == 2:
                self._write_mismatched(rows, row + 1, index, self._next_with_another_prompt(index))
        return {**rows, "labels": labels}

    def _read(self, number: int) -> EncodedSample:
        encoded = super()._read(number)
        return EncodedSample(encoded.ids[1:], encoded.loss_mask[1:])

    def _next_with_another_prompt(self, number: int) -> int:
        """Return the next conversation after `number` with another prompt.  Raises UserError if all have the same."""
        chat, start = self._read_and_find_response(number)
        for distance in range(1, len(self)):
            other = (number + distance) % len(self)
            other_chat, other_start = self._read_and_find_response(other)
            if not np.array_equal(other_chat.ids[:other_start], chat.ids[:start]):
                return other
        rule = "compares responses to different prompts, but all conversations in the data have the same prompt"
        raise setting_error("train.objective", "kto", rule, fix="add responses to another prompt")

    def _read_and_find_response(self, number: int) -> tuple[EncodedSample, int]:
        """Return a conversation, and the position of its first target: the start of the response."""
        encoded = self._read(number)
        return encoded, int(np.argmax(encoded.loss_mask))

    def _write_mismatched(self, rows: Mapping[str, NDArray[Any]], row: int, number: int, other: int) -> None:
        """Write the prompt of conversation `number` and the response of conversation `other` into a row."""
        (prompt, end), (response, start) = self._read_and_find_response(number), self._read_and_find_response(other)
        ids = np.concatenate([prompt.ids[:end], response.ids[start:]])[: self.seq_len + 1]
        loss_mask = np.concatenate([prompt.loss_mask[:end], response.loss_mask[start:]])[: self.seq_len + 1]
        rows["tokens"][row, : len(ids) - 1] = ids[:-1]
        rows["targets"][row, : len(ids) - 1] = np.where(loss_mask[1:], ids[1:], IGNORE)


# ---------------------------------------------------------------------------------------------------------------
# Conversations for display


@dataclass(frozen=True)
class DisplayedChat:
    """A conversation for display.

    location: its file and line, followed by `chosen` or `rejected` for a response of a pair.
    pieces: (text, is_target) for each piece of its text.
    """

    location: str
    pieces: Sequence[tuple[str, bool]]


def first_chats(data: DataSection, inputs: Sequence[str], num_records: int, key: str) -> Iterator[DisplayedChat]:
    """Yield the conversations of the first `num_records` records of some files; for a pair, both of its responses.

    inputs: paths, folders or globs.

    Raises UserError that names the setting `key` if files cannot be read, or a record is invalid.
    """
    check_columns(data.columns or {}, data.format)
    encoder = make_encoder(data)
    parts = (FilePart(file) for value in inputs for file in find_chat_files(value, key))
    records = ((location_of(part, number), record) for part in parts for number, record in read_objects(part))
    record_format: Format | None = None
    for location, record in islice(records, num_records):
        try:
            record_format = record_format or Format.detect(
                record, data.format, data.columns, has_labels=data.labels != "none"
            )
            sample = record_format.read(record)
            samples = [sample.chosen, sample.rejected] if isinstance(sample, Pair) else [sample]
            for side, each in zip(sides_of(samples), samples, strict=True):
                with naming_side(side):
                    pieces = encoder.pieces(each)
                yield DisplayedChat(f"{location}, {side}" if side else location, pieces)
        except BadChat as error:
            values = {
                key: ", ".join(inputs),
                "data.train_on": data.train_on,
                "data.format": data.format,
                "data.columns": json.dumps(dict(data.columns or {})),
                "data.chat_template": data.chat_template,
            }
            raise chat_error(error, location, key, values) from error
