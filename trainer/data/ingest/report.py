"""Counts or rejects documents that cannot be read, according to `data.bad`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from trainer.data.shards import Manifest
from trainer.errors import setting_error

MAX_LISTED_PLACES = 20
"""Maximum number of bad documents whose location a unit's record lists; all are counted."""


@dataclass(frozen=True)
class SettingNames:
    """Names of the settings in messages: configuration keys, or a command's arguments."""

    inputs: str = "data.path"
    text_key: str = "data.text_key"
    bad: str = "data.bad"
    holdout: str = "data.holdout"
    tokenizer: str = "data.tokenizer"
    folder: str = "data.cache_dir"
    bos: str = "data.bos"


@dataclass
class DocumentCounts:
    """Counts of documents: those read, the empty ones among them, and the bad ones, some with their locations."""

    documents: int = 0
    empty: int = 0
    bad: int = 0
    places: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, manifest: Manifest) -> DocumentCounts:
        """Return the counts stored in a manifest."""
        names = [each.name for each in dataclasses.fields(cls)]
        return cls(**{name: manifest.notes[name] for name in names if name in manifest.notes})

    def add(self, other: DocumentCounts) -> None:
        """Add the counts of `other`."""
        self.documents += other.documents
        self.empty += other.empty
        self.bad += other.bad
        self.places += other.places[: MAX_LISTED_PLACES - len(self.places)]


class BadDocuments:
    """Handles documents that cannot be read.

    `limit` is `error` (raise at the first one), `skip` (skip them all), or the maximum share of documents to skip.
    """

    def __init__(self, limit: str, keys: SettingNames) -> None:
        self.keys, self._limit = keys, limit
        self.tally = DocumentCounts()

    def reject(self, key: str, value: object, rule: str, **advice: Any) -> None:
        """Count a bad document, or raise UserError with this setting, value and rule."""
        if self._limit == "error":
            given = {name: what for name, what in advice.items() if what not in (None, "")}
            fix = f"{self.keys.bad}=skip leaves out unreadable documents and counts them"
            raise setting_error(key, value, rule, **(given or {"fix": fix}))
        self.tally.bad += 1
        if len(self.tally.places) < MAX_LISTED_PLACES:
            self.tally.places.append(str(setting_error(key, value, rule)))

    def reject_file(self, value: str, rule: str, **advice: Any) -> None:
        """Count a file that cannot be read to its end, or raise UserError.

        The number of its documents is unknown, so a share as the limit rejects it.
        """
        if self._limit not in ("error", "skip"):
            fix = f"{self.keys.bad}=skip leaves out the whole file; a share counts documents"
            raise setting_error(self.keys.inputs, value, rule, fix=fix)
        self.reject(self.keys.inputs, value, rule, **advice)


_CHAT_KEYS = (
    {"messages"},
    {"conversations"},
    {"instruction", "output"},
    {"prompt", "completion"},
    {"prompt", "chosen", "rejected"},
)
"""Keys by which records of conversations are recognized."""


def chat_advice(names: Iterable[str], keys: SettingNames) -> str:
    """Return advice if records with these keys are chats rather than text, else an empty string."""
    if not any(chat <= {*names} for chat in _CHAT_KEYS):
        return ""
    if keys.inputs.startswith("data."):
        return "these records are chats, not text: set data.source=chat, or use recipe=sft model.path=FOLDER"
    return "these records are chats, which need no preparation: give the file to a run with data.source=chat"


def parse_limit(setting: str, key: str) -> float:
    """Parse `data.bad` into the allowed share of bad documents: 0 for `error`, 1 for `skip`.  Raises UserError."""
    known: Mapping[str, float] = {"error": 0.0, "skip": 1.0}
    if setting in known:
        return known[setting]
    try:
        share = float(setting)
    except ValueError:
        _reject_limit(setting, key)
    if not 0 < share < 1:
        _reject_limit(setting, key)
    return share


def _reject_limit(setting: str, key: str) -> NoReturn:
    rule = "must be error, skip, or the share of documents that may be left out, between 0 and 1"
    raise setting_error(key, setting, rule, example="0.001")


def check_limit(tally: DocumentCounts, setting: str, keys: SettingNames) -> None:
    """Raise UserError if the share of bad documents exceeds the limit in `setting`."""
    allowed = parse_limit(setting, keys.bad)
    share = tally.bad / max(1, tally.bad + tally.documents)
    if tally.bad and share > allowed:
        shown = "\n  ".join(tally.places[:5])
        rule = f"{tally.bad:,} of {tally.bad + tally.documents:,} documents cannot be read\n  {shown}"
        raise setting_error(keys.bad, setting, rule, "skip" if share >= 0.5 else f"{share * 1.01:.2g}")


def describe(tally: DocumentCounts) -> str:
    """Return a message about the bad documents, or an empty string if there were none."""
    if not tally.bad:
        return ""
    total = tally.bad + tally.documents
    shown = "".join(f"\n  {place.splitlines()[0]}" for place in tally.places[:5])
    more = "\n  ..." if tally.bad > 5 else ""
    return f"{tally.bad:,} of {total:,} documents cannot be read and were left out:{shown}{more}"
