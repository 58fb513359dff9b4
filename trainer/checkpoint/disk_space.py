"""Estimates the disk space that a run's checkpoints need, and warns if there is not enough."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

from trainer.checkpoint.blocks import Damaged
from trainer.checkpoint.manifest import name_of, read_manifest
from trainer.checkpoint.retention import list_steps
from trainer.checkpoint.storage import Storage
from trainer.config import CheckpointSection
from trainer.errors import UserError
from trainer.metrics.console import readable_bytes


@dataclass(frozen=True)
class CheckpointCounts:
    """Number of checkpoints that a run will have on disk at the same time."""

    num_kept: int
    """After its last save."""
    num_at_peak: int
    """At the peak, while a new checkpoint is written before the oldest is deleted."""
    num_if_pruned_first: int
    """If the oldest is deleted before the next one is written, which happens only if the disk is full."""


def checkpoint_counts(section: CheckpointSection, steps_left: int, num_existing: int) -> CheckpointCounts:
    """Return the demand of a run that has `num_existing` checkpoints and will train `steps_left` more steps."""
    every = section.every if isinstance(section.every, int) else 1
    num_saves = 1 if every == 0 else max(1, -(-steps_left // every))
    permanent = section.keep_best + (steps_left // section.keep_every if section.keep_every else 0)
    everything = num_existing + num_saves
    if section.keep_last == 0:
        if not isinstance(section.every, int):  # the number of saves is unknown
            everything = num_existing + 1
        return CheckpointCounts(everything, everything, everything)
    num_kept = min(section.keep_last + permanent, everything)
    num_at_peak = min(section.keep_last + permanent + 1, everything)
    return CheckpointCounts(num_kept, num_at_peak, min(max(section.keep_last, 2) + permanent, everything))


def disk_space_warning(storage: Storage, section: CheckpointSection, num_bytes: int, steps_left: int) -> str:
    """Return a warning if a run's checkpoints do not fit on the disk of `storage`.

    The result is empty if they fit or the free space is unknown.

    num_bytes: estimated size of a checkpoint, used if there is no existing checkpoint to measure.
    """
    free, existing = None, list[int]()
    with suppress(OSError, Damaged, UserError):
        free, existing = storage.free_bytes(), list_steps(storage)
        if existing:
            num_bytes = read_manifest(storage / name_of(existing[-1])).num_bytes
    if free is None:
        return ""
    counts = checkpoint_counts(section, steps_left, len(existing))
    still = (counts.num_at_peak - len(existing)) * num_bytes
    if still <= free:
        return ""
    number = counts.num_at_peak
    parts = f"{counts.num_kept} kept" + (", 1 being written" if number > counts.num_kept else "")
    need = f"{number} checkpoint{'s' * (number > 1)} of {readable_bytes(num_bytes)} ({parts})"
    there = f", {len(existing)} of them there already" if existing else ""
    lines = [
        f"warning: checkpoint.keep_last={section.keep_last}: {need} need {readable_bytes(number * num_bytes)}{there}, "
        f"but {storage} has {readable_bytes(free)} free"
    ]
    if section.keep_last > 1 and (counts.num_if_pruned_first - len(existing)) * num_bytes <= free:
        lines.append("the oldest one will be deleted before the next is written")
    else:
        lines.append("saves will fail once the disk is full")
    fixes = ["free some space there", "set checkpoint.dir to a folder on another disk"]
    with_one = checkpoint_counts(replace(section, keep_last=1), steps_left, len(existing)).num_at_peak
    if with_one < number:
        fixes.append(f"set checkpoint.keep_last=1 (needs {readable_bytes(with_one * num_bytes)})")
    lines.append(f"to fix: {', or '.join(fixes)}")
    return "\n  ".join(lines)
