"""Compares what a run has written with docs/metrics.md."""

from __future__ import annotations

import re

from tests.helpers.launch import REPOSITORY, Run

DOCS = REPOSITORY / "docs"

_CONDITIONAL = {
    *("profiled", "bits_per_byte", "every_s", "trained_share", "dropped_share", "truncated_share"),
    *("accuracy", "margin", "reward_chosen", "reward_rejected", "reward_good", "reward_bad", "kl", "divergence"),
    *("busiest_expert", "dead_experts"),
}
"""Documented fields that only some runs write."""


def documented(kind: str) -> tuple[set[str], set[str]]:
    """Return the fields on the page for a kind of record: all, and the conditional ones."""
    text = (DOCS / "metrics.md").read_text().partition(f"## `{kind}`")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", text, re.MULTILINE)
    fields = {name for names, _ in rows for name in re.findall(r"`([^`]+)`", names)}
    return fields | {"kind", "time"}, _CONDITIONAL | {name for name in fields if "<" in name}


def check_fields(ran: Run, kind: str) -> None:
    fields, conditional = documented(kind)
    written = {name for record in ran.metrics if record["kind"] == kind for name in record}
    assert written, f"no record of kind {kind}"
    assert written <= fields, "a field without its meaning in docs/metrics.md"
    assert fields - conditional <= written, "docs/metrics.md speaks of what is not written"
