"""Puts failures of a save or a load into words, one message for all ranks."""

from __future__ import annotations

from typing import Any

from trainer.checkpoint.blocks import Damaged
from trainer.errors import UserError, is_full

TO_FIX = "to fix: free some space there, or set checkpoint.keep_last=1 or a checkpoint.dir on another disk"
"""Ends the message of a save that found no room: a final save that fails with it waits for room."""


def describe(error: BaseException) -> str:
    """Return what an error says, with its kind unless that is one of ours; of a full disk, what to do about it too."""
    text = str(error) or repr(error)
    if isinstance(error, OSError) and is_full(error):
        text += f"; {TO_FIX}"
    return text if isinstance(error, (UserError, Damaged)) else f"{type(error).__name__}: {text}"


def joined(errors: Any) -> str:
    """Return one message for what failed on any rank, with the ranks that say so; empty if nothing did."""
    ranks: dict[str, list[int]] = {}
    for rank, error in enumerate(errors):
        if error:
            ranks.setdefault(error, []).append(rank)
    return "; ".join(
        f"rank{'s' if len(who) > 1 else ''} {', '.join(map(str, who))}: {error}" for error, who in ranks.items()
    )
