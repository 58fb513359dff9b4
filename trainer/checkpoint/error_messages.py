"""Formats errors of a save or load into one message for all ranks."""

from __future__ import annotations

from typing import Any

from trainer.checkpoint.blocks import Damaged
from trainer.errors import UserError, is_disk_full

DISK_FULL_ADVICE = "to fix: free some space there, or set checkpoint.keep_last=1 or a checkpoint.dir on another disk"
"""Ends the message of a save that failed because the disk is full.  A final save recognizes it and retries later."""


def describe(error: BaseException) -> str:
    """Return an error's message, prefixed with its type unless it is one of ours; for a full disk, with advice."""
    text = str(error) or repr(error)
    if isinstance(error, OSError) and is_disk_full(error):
        text += f"; {DISK_FULL_ADVICE}"
    return text if isinstance(error, (UserError, Damaged)) else f"{type(error).__name__}: {text}"


def merge_errors(errors: Any) -> str:
    """Merge the errors of all ranks into one message that names the ranks; empty if no rank failed."""
    ranks: dict[str, list[int]] = {}
    for rank, error in enumerate(errors):
        if error:
            ranks.setdefault(error, []).append(rank)
    return "; ".join(
        f"rank{'s' if len(who) > 1 else ''} {', '.join(map(str, who))}: {error}" for error, who in ranks.items()
    )
