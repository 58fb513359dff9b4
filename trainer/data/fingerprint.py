"""Fingerprint of the training data, stored in checkpoints next to the data position.

A position counts the samples consumed so far.  It means nothing in other data, and even a different number of samples
gives a different order.  File names, folders and modification times do not matter: moved data are still the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

_KEYS_ALLOWING_OTHER_DATA = frozenset({"data", "data.path", "data.source", "data.tokenizer", "data.bos"})
_KEYS_ALLOWING_OTHER_WINDOWS = frozenset(
    {"data.seq_len", "data.documents", "data.fit", "data.pack", "data.holdout", "data.eval_path"}
)
"""Keys in `checkpoint.allow_changes` that permit different data, or different samples cut from the same data."""


@dataclass(frozen=True)
class Fingerprint:
    """Identifies the samples of a source.  It is the same on all ranks and does not depend on the sample order.

    content: a digest of all or part of the underlying data, or "" if unknown.
    sources: for a mixture, the fingerprint of each source by name.
    """

    num_samples: int
    num_shards: int = 0
    num_tokens: int = 0
    content: str = ""
    sources: Mapping[str, Fingerprint] = field(default_factory=dict)

    def to_state(self) -> dict[str, Any]:
        """Return the plain values to store in a checkpoint."""
        state = {name: value for name, value in vars(self).items() if name != "sources"}
        sources = {name: source.to_state() for name, source in self.sources.items()}
        return {**state, "sources": sources} if sources else state

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Fingerprint:
        """Return the fingerprint that `to_state` converted."""
        sources = {name: cls.from_state(source) for name, source in state.get("sources", {}).items()}
        return cls(state["num_samples"], state["num_shards"], state["num_tokens"], state["content"], sources)

    def changes(self, stored: Mapping[str, Any], allowed: Collection[str]) -> tuple[list[str], list[str]]:
        """Compare with a stored fingerprint, as `to_state` returned it.

        allowed: configuration keys and sections that may change.

        Returns two lists with a line per change: changes that forbid resuming, and changes that `allowed` permits.
        """
        before = Fingerprint.from_state(stored)
        if not (before.sources and self.sources):
            return self._changes(before, allowed, "data")
        refused, reported = [], []
        for name in sorted({*before.sources, *self.sources}):
            source, other = self.sources.get(name, Fingerprint(0)), before.sources.get(name, Fingerprint(0))
            found = source._changes(other, allowed, f"data, source {name}")
            refused += found[0]
            reported += found[1]
        return refused, reported

    def _changes(self, before: Fingerprint, allowed: Collection[str], name: str) -> tuple[list[str], list[str]]:
        if before == self:
            return [], []
        is_same_data = dataclasses.replace(before, num_samples=self.num_samples) == self
        if is_same_data and not _KEYS_ALLOWING_OTHER_WINDOWS.isdisjoint(allowed):
            return [], []  # the comparison of the configurations reports this change
        if is_same_data or not self.num_shards or not before.num_shards:
            mine, theirs = f"{self.num_samples} samples", f"{before.num_samples} samples"
        else:
            mine, theirs = self._size(), before._size()
        now = "the same number now, with different content" if mine == theirs else f"{mine} now"
        line = f"{name}: {theirs} in the checkpoint, {now}; the saved position no longer refers to the same samples"
        if not _KEYS_ALLOWING_OTHER_DATA.isdisjoint(allowed):
            return [], [f"{line}, as it was allowed"]
        return [f"{line} (allow it: checkpoint.allow_changes=[data])"], []

    def _size(self) -> str:
        return f"{self.num_shards} shard{'' if self.num_shards == 1 else 's'} of {self.num_tokens} tokens"
