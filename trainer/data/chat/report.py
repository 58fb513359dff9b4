"""Statistics of the conversations in some files, and what the user is told about them."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.errors import setting_error


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

    def add(self, other: ChatReport) -> None:
        """Add the statistics of further conversations."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.pairs |= other.pairs
        self.longer = dict(Counter(self.longer) + Counter(other.longer))
        self.labels = dict(Counter(self.labels) + Counter(other.labels))
        for kind, details in other.notices.items():
            for detail, entry in details.items():
                self._add_notices(kind, detail, entry["count"], entry["locations"])

    def add_notice(self, kind: str, detail: str, location: str) -> None:
        """Count a notice about the conversation at `location`; after the first few details, only one for the rest."""
        self._add_notices(kind, detail, 1, [location])

    def _add_notices(self, kind: str, detail: str, count: int, locations: Sequence[str]) -> None:
        details = self.notices.setdefault(kind, {})
        if detail not in details and len(details) >= _MAX_DETAILS:
            detail = "others"
        entry = details.setdefault(detail, {"count": 0, "locations": []})
        entry["count"] += count
        entry["locations"] += locations[: _NUM_LOCATIONS - len(entry["locations"])]

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
            lines.append(f"  no targets in {list_locations(self.unused)}")
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
                f"{' once truncated' if self.truncated else ''}: {list_locations(self.identical)}"
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
                where = list_locations(entry["locations"], entry["count"])
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


_SUMS = (
    *("chats", "tokens", "trained", "held_out", "held_out_tokens", "dropped", "dropped_tokens"),
    *("truncated", "truncated_tokens", "plain", "unused", "identical"),
)
"""The fields that are added up, numbers and lists."""

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


def list_locations(locations: Sequence[str], count: int | None = None) -> str:
    """Return the first five locations as text, and how many more there are.

    count: the number of all locations, if `locations` are only the first of them.
    """
    more = (len(locations) if count is None else count) - len(locations[:_NUM_LOCATIONS])
    return ", ".join(locations[:_NUM_LOCATIONS]) + (f" and {more:,} more" if more > 0 else "")
