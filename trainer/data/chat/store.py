"""Tokenizes the conversations of chat files once, and stores their tokens, loss masks and statistics in the cache.

Each conversation is a document in a token shard.  Every stored value is 2 * id + loss_mask, so that a single read
returns both the token and its mask.  The two responses of a pair are consecutive documents.  With labels, each document
starts with the additional value 2 * label.

If several processes request the same files at once, even on different machines that share the cache, one of them
tokenizes the files while the others wait; see `get_or_build`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.data.cache import get_or_build, read_value, write_value
from trainer.data.chat.formats import BadChat, Completion, Format, Pair, Sample, location_of, read_objects
from trainer.data.chat.masking import EncodedSample, Encoder
from trainer.data.progress import ProgressLine
from trainer.data.records import FilePart, InputFile
from trainer.data.shards import Shard, ShardWriter
from trainer.errors import UserError, print_stderr, setting_error
from trainer.files import atomic_replace, sample_contents
from trainer.stopping import StopRequested, raise_if_stop_requested

_VERSION = 5
"""Increment this when a code change alters the tokens of existing files, so that older cache entries are not used."""

_ANNOUNCE_BYTES = 1 << 25
"""Total size of the files, in bytes, above which a message announces that they are being tokenized."""


@dataclass(frozen=True)
class ChatSpec:
    """A set of chat files, and the settings that determine how they are tokenized.

    key: the setting that names the files, for messages.
    has_labels: whether each record has a label, which is stored too.
    format, columns, train_on, seq_len, too_long, holdout: the data settings with these names, with defaults resolved.
    """

    key: str
    files: tuple[InputFile, ...]
    format: str
    has_labels: bool
    columns: Mapping[str, str]
    train_on: str
    seq_len: int
    too_long: str
    holdout: float


@dataclass(frozen=True)
class ChatShards:
    """Tokenized conversations: a shard to train on, a held-out shard, and the statistics of both.

    A shard is None if it is empty; `get_or_tokenize` never returns an empty `train`.
    """

    train: Shard | None
    held_out: Shard | None
    report: ChatReport


def get_or_tokenize(spec: ChatSpec, encoder: Encoder, cache_dir: str | None) -> ChatShards:
    """Return the tokenized conversations from the cache, tokenizing them first if they are missing.

    Raises UserError if a record is invalid, if one is too long and `data.too_long` is `error`, if no conversation is
    left to train on, if too many have no targets (see `_check`), or if no cache folder is writable.
    """
    samples = sample_contents([file.path for file in spec.files], spec.key)
    files = [(file.path, file.size, file.mtime_ns, sample) for file, sample in zip(spec.files, samples, strict=True)]
    settings = dataclasses.asdict(dataclasses.replace(spec, files=(), key=""))
    identity = json.dumps([_VERSION, files, settings, encoder.identity], sort_keys=True)
    name = f"chat-{hashlib.sha256(identity.encode()).hexdigest()[:20]}"
    num_bytes = sum(size for _, size, _, _ in files)
    return get_or_build(
        cache_dir, name, "conversations", lambda folder: _tokenize_all(folder, name, spec, encoder), _load, num_bytes
    )


def _load(folder: Path) -> ChatShards:
    """Read a cache entry that `_tokenize_all` has written.  Raises one of CORRUPTION_ERRORS if it is corrupt."""
    content = read_value(folder / "report.json")
    if content is None:
        raise ValueError("report.json is missing or corrupt")
    shards: dict[str, Shard | None] = {"train": None, "eval": None}
    for split in content["splits"]:
        shard = Shard(folder / f"{split}.bin")
        shard.verify()
        shards[split] = shard
    return ChatShards(shards["train"], shards["eval"], ChatReport(**content["report"]))


# ---------------------------------------------------------------------------------------------------------------
# Tokenizing


def _tokenize_all(folder: Path, name: str, spec: ChatSpec, encoder: Encoder) -> None:
    if sum(file.size for file in spec.files) > _ANNOUNCE_BYTES:
        print_stderr(f"tokenizing {spec.key}, once: the conversations are stored in {folder.parent}")
    tokenizer = encoder.tokenizer
    doubled = _DoubledTokenizer(tokenizer.name, 2 * tokenizer.vocab_size, 2 * tokenizer.plain.end_id)
    train, held_out = (_SplitWriter(folder / f"{split}.bin", doubled) for split in ("train", "eval"))
    report, partial_results = ChatReport(), PartialResults(folder.parent, name)
    partial_results.remove_old()
    reader = _ChatReader(spec, encoder, report, partial_results)
    try:
        with ProgressLine(lambda: f"tokenizing {spec.key}: {report.chats:,} {report.kind}"):
            _write(reader.conversations(), spec.holdout, train, held_out, report)
        report.tokens = train.num_tokens - train.num_records * spec.has_labels  # a label takes the place of a token
        report.held_out, report.trained = held_out.num_records, train.num_targets
        report.held_out_tokens = held_out.num_tokens - held_out.num_records * spec.has_labels
        _check(spec, report, is_empty=train.is_empty)
        train.publish()
        held_out.publish()
    finally:
        train.discard()
        held_out.discard()
    splits = [split for split, shard in (("train", train), ("eval", held_out)) if not shard.is_empty]
    write_value(folder / "report.json", {"splits": splits, "report": dataclasses.asdict(report)})
    partial_results.remove()


def _write(
    conversations: Iterator[Sequence[EncodedSample]],
    holdout: float,
    train: _SplitWriter,
    held_out: _SplitWriter,
    report: ChatReport,
) -> None:
    """Write each conversation to one of the two shards, chosen by a hash of its tokens.

    If `holdout` is positive and there are at least two distinct conversations, at least one of them is held out.
    """
    digest = hashlib.blake2b(digest_size=8)
    # Until a conversation is held out, the one with the lowest hash so far (and its duplicates) is undecided.
    undecided: list[Sequence[EncodedSample]] = []
    lowest_fraction = 1.0
    for documents in conversations:
        ids_hash = hashlib.blake2b(b"".join(document.ids.tobytes() for document in documents), digest_size=8).digest()
        digest.update(ids_hash + b"".join(document.loss_mask.tobytes() for document in documents))
        hash_fraction = int.from_bytes(ids_hash, "little") / 2**64
        if hash_fraction < holdout:
            held_out.write(documents)
        elif not holdout or not held_out.is_empty or (undecided and hash_fraction > lowest_fraction):
            train.write(documents)
        elif undecided and hash_fraction == lowest_fraction:
            undecided.append(documents)
        else:
            for record_documents in undecided:
                train.write(record_documents)
            undecided, lowest_fraction = [documents], hash_fraction
    remaining_split = train if train.is_empty or not held_out.is_empty else held_out
    for record_documents in undecided:
        remaining_split.write(record_documents)
    report.content = digest.hexdigest()


class _ChatReader:
    """Reads and encodes conversations one by one, and collects their statistics.

    Writes partial results every few seconds, and when this process is asked to stop.  The next run resumes from them.
    """

    def __init__(self, spec: ChatSpec, encoder: Encoder, report: ChatReport, partial_results: PartialResults) -> None:
        self._spec, self._encoder, self._report, self._partial_results = spec, encoder, report, partial_results
        self._format: Format | None = None

    def conversations(self) -> Iterator[Sequence[EncodedSample]]:
        """Yield the documents of each record: one conversation, or both responses of a pair.

        Raises UserError for an invalid record.
        """
        for stored, statistics in self._partial_results.read():  # from an earlier run
            for name, value in statistics.items():
                setattr(self._report, name, value)
            yield from stored
        num_restored = self._partial_results.num_records
        records = ((FilePart(file), *record) for file in self._spec.files for record in read_objects(FilePart(file)))
        try:
            for number, (part, number_in_part, record) in enumerate(records):
                raise_if_stop_requested()
                if number < num_restored:
                    if not number:
                        self._samples(record)  # detects the format
                    continue
                documents = self._encode(location_of(part, number_in_part), record)
                if documents:
                    yield documents
                self._partial_results.add(documents, self._report)
        except StopRequested as request:
            self._partial_results.flush(self._report)
            progress = f"{self._report.chats:,} {self._report.kind} are tokenized; the next run continues from there"
            raise StopRequested(request.name, progress if self._report.chats else "") from request

    def _encode(self, location: str, record: Mapping[str, Any]) -> list[EncodedSample]:
        """Return a record's documents.

        There are none if the record is dropped as too long, if a document has no targets, or if the responses of a pair
        have the same tokens.
        """
        try:
            samples = self._samples(record)
            assert self._format is not None
            for kind, detail in self._format.notices(record):
                self._report.add_notice(kind, detail, location)
            documents = []
            for side, sample in zip(sides_of(samples), samples, strict=True):
                with naming_side(side):
                    documents.append(self._encoder.encode(sample, self._max_tokens))
            self._count(samples, documents, location)
            documents = self._fit_length(documents)
            label = self._format.label(record) if self._spec.has_labels and self._format is not None else None
        except BadChat as error:
            raise self._user_error(error, location) from error
        if documents and not all(document.loss_mask[1:].any() for document in documents):
            self._report.unused.append(location)
            return []
        if len(documents) == 2 and np.array_equal(documents[0].ids, documents[1].ids):
            self._report.identical.append(location)
            return []
        if label is None or not documents:
            return documents
        self._report.labels[str(label)] = self._report.labels.get(str(label), 0) + 1
        return [EncodedSample(np.insert(d.ids, 0, label), np.insert(d.loss_mask, 0, False)) for d in documents]

    @property
    def _max_tokens(self) -> int:
        """The maximum number of tokens that fit in a row; the last token takes a position only if it is scored."""
        return self._spec.seq_len + (not self._encoder.targets_only_last_token)

    def _samples(self, record: Mapping[str, Any]) -> Sequence[Sample]:
        if self._format is None:
            self._format = Format.detect(record, self._spec.format, self._spec.columns, self._spec.has_labels)
            self._report.pairs = self._format.name == "preference"
        parsed = self._format.read(record)
        return [parsed.chosen, parsed.rejected] if isinstance(parsed, Pair) else [parsed]

    def _count(self, samples: Sequence[Sample], documents: Sequence[EncodedSample], location: str) -> None:
        report = self._report
        report.chats += 1
        report.plain += any(isinstance(sample, Completion) for sample in samples)
        for kind, detail in {notice for document in documents for notice in document.notices}:
            report.add_notice(kind, detail, location)

    def _fit_length(self, documents: list[EncodedSample]) -> list[EncodedSample]:
        """Apply `data.too_long`: return a record's documents, truncated if necessary, or an empty list to drop them."""
        max_tokens, longest = self._max_tokens, max(len(document.ids) for document in documents)
        if longest <= max_tokens:
            return documents
        if self._spec.too_long == "error":
            raise BadChat(
                f"has {longest} tokens, but a sequence fits only {max_tokens}",
                "data.seq_len",
                legal=longest - max_tokens + self._spec.seq_len,
            )
        if self._spec.too_long == "drop":
            self._report.dropped += 1
            needed_length = str(-(-(longest - 1) // 64) * 64)
            self._report.longer[needed_length] = self._report.longer.get(needed_length, 0) + 1
            self._report.dropped_tokens += sum(len(document.ids) for document in documents)
            return []
        self._report.truncated += 1
        self._report.truncated_tokens += sum(max(0, len(document.ids) - max_tokens) for document in documents)
        return [document.truncated(max_tokens, self._encoder.targets_only_last_token) for document in documents]

    def _user_error(self, error: BadChat, location: str) -> UserError:
        """Convert a BadChat to a UserError that names the record's location and the setting to change."""
        spec = self._spec
        values = {
            spec.key: ", ".join(file.path for file in spec.files),
            "data.train_on": spec.train_on,
            "data.format": spec.format,
            "data.seq_len": spec.seq_len,
            "data.columns": json.dumps(dict(spec.columns)),
            "data.chat_template": self._encoder.template_name,
        }
        return chat_error(error, location, spec.key, values)


def chat_error(error: BadChat, location: str, key: str, values: Mapping[str, object]) -> UserError:
    """Convert a BadChat to a UserError that names the record's location and the setting to change.

    key: the setting that names the files; it is named if no other setting is to be changed.
    values: the value of this setting, and of each setting that a BadChat may name.
    """
    setting, legal = error.key or key, error.legal
    if setting not in values or (legal is not None and values[setting] == legal):  # it has the suggested value already
        setting, legal = key, None
    return setting_error(setting, values[setting], f"{location}: {error}", legal, fix=error.fix)


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
        raise BadChat(f"{side}: {error}", error.key, error.legal, error.fix) from error


_MAX_UNUSED_FRACTION = 0.01
"""Fraction of conversations without targets above which the files are rejected."""


def _check(spec: ChatSpec, report: ChatReport, is_empty: bool) -> None:
    """Raise UserError if there are no conversations to train on, or too many have no targets."""
    files = ", ".join(file.path for file in spec.files)
    if not report.chats:
        raise setting_error(spec.key, files, "it contains no conversations", fix="give a file with some")
    if len(report.unused) > _MAX_UNUSED_FRACTION * report.chats:
        fraction = len(report.unused) / report.chats
        rule = f"{fraction:.1%} of {report.chats} {report.kind} have no targets, more than {_MAX_UNUSED_FRACTION:.0%}"
        locations = _list_locations(report.unused)
        fix = "remove these records, or choose other targets with data.train_on"
        raise setting_error(spec.key, files, f"{rule}: {locations} (data.train_on={spec.train_on})", fix=fix)
    if is_empty and report.held_out and not report.dropped:
        rule = "leaves no conversations to train on"
        raise setting_error("data.holdout", spec.holdout, rule, fix="decrease it, or give more conversations")
    if is_empty and report.identical:
        rule = f"no {report.kind} are left to train on; in {len(report.identical)}, both responses have the same tokens"
        fix = "give pairs that differ"
        if report.truncated:
            fix = f"increase data.seq_len={spec.seq_len}, which truncates them, or {fix}"
        raise setting_error(spec.key, files, f"{rule}: {_list_locations(report.identical)}", fix=fix)
    if is_empty:
        held_out = f", or held out (data.holdout={spec.holdout})" if report.held_out else ""
        rule = f"all {report.chats} {report.kind} are longer than a sequence{held_out}"
        fix = f"{report.suggested_lengths()}, if the model has that many positions; data.too_long=truncate cuts them"
        raise setting_error("data.seq_len", spec.seq_len, rule, fix=fix)


class _SplitWriter:
    """Writes the shard of one split.  The first conversation creates it."""

    def __init__(self, path: Path, tokenizer: _DoubledTokenizer) -> None:
        self._path, self._tokenizer = path, tokenizer
        self._writer: ShardWriter | None = None
        self.num_records = self.num_tokens = self.num_targets = 0

    def write(self, documents: Sequence[EncodedSample]) -> None:
        if self._writer is None:
            self._writer = ShardWriter(self._path, self._tokenizer)  # type: ignore[arg-type]
        self.num_records += 1
        for document in documents:
            self.num_tokens += len(document.ids)
            self.num_targets += int(document.loss_mask[1:].sum())
            self._writer.write(2 * document.ids + document.loss_mask, num_bytes=0)
            self._writer.end_document()

    @property
    def is_empty(self) -> bool:
        return self._writer is None

    def publish(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer.publish()

    def discard(self) -> None:
        if self._writer is not None:
            self._writer.discard()


@dataclass(frozen=True)
class _DoubledTokenizer:
    """Replaces the tokenizer in a shard's metadata: ids are doubled, and documents get no start or end tokens."""

    name: str
    vocab_size: int
    end_id: int
    start_ids: tuple[int, ...] = ()
    end_ids: tuple[int, ...] = ()


def decode_document(values: NDArray[np.unsignedinteger[Any]]) -> EncodedSample:
    """Split the stored values of a document into token ids and their loss mask."""
    return EncodedSample((values >> 1).astype(np.int64), (values & 1).astype(bool))


# ---------------------------------------------------------------------------------------------------------------
# Partial results


_PART_S = 5.0
"""Seconds between writes of partial results."""

_STALE_AFTER_S = 30 * 86400.0
"""Age in seconds at which partial results are removed: no run needs them once the files or settings have changed."""


class PartialResults:
    """Partial results of tokenizing chat files, from which a later run resumes: NAME.part-00000 and so on.

    A part holds the documents of consecutive records, and the statistics of all records up to its end.  It is a zip
    file, so it has checksums; a corrupt part and the parts after it are removed.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self.num_records = 0
        """Number of records that the parts cover, including records without documents."""
        self._num_parts = 0
        self._pending: list[Sequence[EncodedSample]] = []
        self._flushed_at = time.monotonic()
        self._num_seen = 0

    def _path(self, number: int) -> Path:
        return self._folder / f"{self._name}.part-{number:05d}"

    def read(self) -> Iterator[tuple[list[list[EncodedSample]], dict[str, Any]]]:
        """Yield, for each part, the documents of each record, and the statistics up to the part's end."""
        while (content := self._read_part(self._path(self._num_parts))) is not None:
            tokens, counts, sizes, metadata = content
            stored_documents = np.split(tokens, np.cumsum(counts)[:-1]) if len(counts) else []
            documents = [decode_document(values) for values in stored_documents]
            ends = np.cumsum(sizes)
            self.num_records = self._num_seen = metadata["num_records"]
            self._num_parts += 1
            yield [documents[end - size : end] for end, size in zip(ends, sizes, strict=True)], metadata["report"]
        self._remove_from(self._num_parts)  # these parts follow a corrupt one

    def _read_part(self, path: Path) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]] | None:
        try:
            with np.load(path, allow_pickle=False) as file:
                metadata = json.loads(file["about"].tobytes())
                return file["tokens"], file["counts"], file["sizes"], metadata
        except Exception:  # missing or corrupt: the exception type depends on what is corrupt
            return None

    def add(self, documents: Sequence[EncodedSample], report: ChatReport) -> None:
        """Add the documents of one record."""
        self._num_seen += 1
        if documents:
            self._pending.append(documents)
        if time.monotonic() - self._flushed_at > _PART_S:
            self.flush(report)

    def flush(self, report: ChatReport) -> None:
        """Write what has been added since the last call as a new part."""
        if self._num_seen == self.num_records:
            return
        metadata = json.dumps({"num_records": self._num_seen, "report": dataclasses.asdict(report)})
        documents = [document for record_documents in self._pending for document in record_documents]
        with contextlib.suppress(OSError):  # such as a full disk, on which the final shards may still fit
            with atomic_replace(self._path(self._num_parts)) as partial, open(partial, "wb") as file:
                np.savez(
                    file,
                    tokens=np.concatenate(
                        [np.zeros(0, np.int64), *(2 * document.ids + document.loss_mask for document in documents)]
                    ),
                    counts=np.array([len(document.ids) for document in documents], np.int64),
                    sizes=np.array([len(record_documents) for record_documents in self._pending], np.int64),
                    about=np.frombuffer(metadata.encode(), np.uint8),
                )
            self._num_parts += 1
            self.num_records, self._pending = self._num_seen, []
        self._flushed_at = time.monotonic()

    def remove_old(self) -> None:
        """Remove old parts from this folder, whichever chat files they belong to."""
        for path in self._folder.glob("chat-*.part-*"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _STALE_AFTER_S:
                    path.unlink()

    def remove(self) -> None:
        """Remove all parts, once the complete shards exist."""
        self._remove_from(0)

    def _remove_from(self, number: int) -> None:
        for path in self._folder.glob(f"{self._name}.part-*"):
            if path >= self._path(number):
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------------------------
# Statistics


@dataclass
class ChatReport:
    """Statistics of the conversations in some files.  A preference pair counts as one conversation.

    pairs: whether the records are preference pairs.
    chats: number of conversations read, including those that were dropped or have no targets.
    tokens: number of training tokens.
    trained: number of targets among the training tokens.
    held_out: number of held-out conversations.
    held_out_tokens: number of tokens in the held-out conversations.
    dropped: number of conversations dropped because they are longer than a sequence.
    dropped_tokens: number of tokens in the dropped conversations.
    truncated: number of conversations truncated because they are longer than a sequence.
    truncated_tokens: number of tokens cut off.
    longer: number of dropped conversations by required sequence length, rounded up to a multiple of 64.
    unused: locations of the conversations without targets, which are not used.
    identical: locations of the pairs whose responses have the same tokens, perhaps once truncated; they are not used.
    plain: number of conversations that are a plain-text prompt and completion.
    notices: for each kind of notice (see `Notice`; `flag of a record` is about the record) and each detail, the
        conversations with it: their number (`count`), and the locations of the first few.
    labels: number of conversations with each label, excluding those that were dropped or have no targets.
    content: a digest of all tokens and masks.
    """

    pairs: bool = False
    chats: int = 0
    tokens: int = 0
    trained: int = 0
    held_out: int = 0
    held_out_tokens: int = 0
    dropped: int = 0
    dropped_tokens: int = 0
    truncated: int = 0
    truncated_tokens: int = 0
    longer: dict[str, int] = dataclasses.field(default_factory=dict)
    unused: list[str] = dataclasses.field(default_factory=list)
    identical: list[str] = dataclasses.field(default_factory=list)
    plain: int = 0
    notices: dict[str, dict[str, dict[str, Any]]] = dataclasses.field(default_factory=dict)
    labels: dict[str, int] = dataclasses.field(default_factory=dict)
    content: str = ""

    @property
    def kind(self) -> str:
        """What messages call the records."""
        return "pairs" if self.pairs else "conversations"

    def add_notice(self, kind: str, detail: str, location: str) -> None:
        """Count a notice about the conversation at `location`; after the first few details, only one for the rest."""
        details = self.notices.setdefault(kind, {})
        if detail not in details and len(details) >= _MAX_DETAILS:
            detail = "others"
        entry = details.setdefault(detail, {"count": 0, "locations": []})
        entry["count"] += 1
        if len(entry["locations"]) < _NUM_LOCATIONS:
            entry["locations"].append(location)

    @property
    def shares(self) -> dict[str, float]:
        """The fraction of training tokens that are targets, and the fractions of all tokens dropped and truncated."""
        num_written = self.tokens + self.held_out_tokens
        total = max(1, num_written + self.dropped_tokens + self.truncated_tokens)
        return {
            "trained_share": self.trained / max(1, self.tokens),
            "dropped_share": self.dropped_tokens / total,
            "truncated_share": self.truncated_tokens / total,
        }

    @property
    def max_dropped_fraction(self) -> float:
        """The fraction of conversations that were dropped or the fraction of tokens, whichever is larger."""
        return max(self.dropped / max(1, self.chats), self.shares["dropped_share"])

    def describe_dropped(self) -> str:
        """Return how much was dropped, in words: `50 of 60 conversations (99.8% of the tokens)`."""
        fraction = self.shares["dropped_share"]
        return f"{self.dropped:,} of {self.chats:,} {self.kind} ({fraction:.1%} of the tokens)"

    def suggested_lengths(self) -> str:
        """Return the `data.seq_len` that keeps all conversations and, if much smaller, the one that keeps 95%."""
        lengths = sorted((int(length), count) for length, count in self.longer.items())
        if not lengths:
            return ""
        longest, num_still_dropped = lengths[-1][0], self.dropped
        for length, count in lengths:
            num_still_dropped -= count
            if num_still_dropped <= 0.05 * self.chats:
                if 2 * length < longest:
                    return f"data.seq_len={length} keeps 95% of them, and data.seq_len={longest} all"
                break
        return f"data.seq_len={longest} keeps them all"

    def summary(self, has_template: bool = False) -> str:
        """Return one line of counts, and one line for each warning or note.

        has_template: whether there is a chat template, which plain-text records do not use.
        """
        facts = [
            f"{self.chats:,} {self.kind}, {self.shares['trained_share']:.1%} of the tokens are targets",
            *([f"{self.held_out:,} held out for evaluation"] if self.held_out else []),
            *(
                f"{count:,} {word} as too long ({self.shares[f'{word}_share']:.1%} of the tokens)"
                for count, word in ((self.dropped, "dropped"), (self.truncated, "truncated"))
                if count
            ),
        ]
        lines = [", ".join(facts)]
        if self.unused:
            lines.append(f"  no targets in {_list_locations(self.unused)}")
        if self.max_dropped_fraction > _WARN_DROPPED_FRACTION:
            lines.append(f"warning: {self.describe_dropped()} are not trained on; {self.suggested_lengths()}")
        if self.plain and has_template:
            lines.append(
                f"note: {self.plain:,} {self.kind} are plain text and used without the chat template; records with "
                "messages use it"
            )
        if self.identical:
            lines.append(
                f"  {len(self.identical):,} {self.kind} are not used, because both responses have the same tokens"
                f"{' once truncated' if self.truncated else ''}: {_list_locations(self.identical)}"
            )
        lines += [self._describe_notices(kind, details) for kind, details in sorted(self.notices.items())]
        return "\n".join(lines)

    def _describe_notices(self, kind: str, details: Mapping[str, Mapping[str, Any]]) -> str:
        """Return a line about all notices of one kind."""
        is_warning = kind in ("spelled out", "read as text", "flag of a record")
        parts = []
        for detail, entry in sorted(details.items()):
            where = f"first: {entry['locations'][0]}"
            if is_warning:
                where = _list_locations(entry["locations"], entry["count"])
            parts.append(f"{detail} in {entry['count']:,} {self.kind} ({where})")
        listed = "; ".join(parts)
        match kind:
            case "spelled out":
                return (
                    "warning: special tokens that the chat template writes are spelled out in messages too, and read "
                    f"there as text: {listed}: has a chat template already been applied?"
                )
            case "read as text":
                largest = max(entry["count"] for entry in details.values())
                return (
                    f"warning: special tokens are spelled out in up to {largest / max(1, self.chats):.1%} of the "
                    f"{self.kind}, and read as text: {listed}; data.special_tokens={json.dumps(sorted(details))} reads "
                    "them as tokens"
                )
            case "unread key":
                return f"note: the chat template does not read these keys of messages: {listed}"
            case "nulls":
                return f"note: nulls are left out, as if there were no such entry: {listed}"
            case "converted arguments":
                return f"note: arguments of calls are converted to what the chat template takes: {listed}"
            case "untagged turn":
                return f"note: turns of the assistant outside the tag that marks targets have none: {listed}"
            case "flag of a record":
                return f"warning: these keys are read as keys of messages only, not of records: {listed}"
            case _:
                return f"note: messages are marked as targets, but data.train_on excludes them: {listed}"


_MAX_DETAILS = 20
"""Maximum number of details of one kind of notice, such as keys, that are reported one by one."""

_NUM_LOCATIONS = 5
"""Number of locations that messages list."""

_WARN_DROPPED_FRACTION = 0.01
"""Fraction of dropped conversations or tokens above which a warning is printed."""

_MAX_DROPPED_FRACTION = 0.5
"""Fraction of dropped conversations or tokens above which a run with `data.too_long=auto` does not start."""


def check_dropped(report: ChatReport, key: str, seq_len: int) -> None:
    """Raise UserError if more than half of the conversations, or of their tokens, would be dropped.

    key: the setting that names the files, for the message.
    """
    if report.max_dropped_fraction <= _MAX_DROPPED_FRACTION:
        return
    files = "" if key == "data.path" else f" of {key}"
    rule = f"{report.describe_dropped()}{files} are longer than a sequence, and would be dropped"
    fix = (
        f"{report.suggested_lengths()}, if the model has that many positions; data.too_long=truncate cuts them, and "
        "data.too_long=drop drops them anyway"
    )
    raise setting_error("data.seq_len", seq_len, rule, fix=fix)


def _list_locations(locations: Sequence[str], count: int | None = None) -> str:
    """Return the first five locations as text, and how many more there are.

    count: the number of all locations, if `locations` are only the first of them.
    """
    more = (len(locations) if count is None else count) - len(locations[:_NUM_LOCATIONS])
    return ", ".join(locations[:_NUM_LOCATIONS]) + (f" and {more:,} more" if more > 0 else "")
