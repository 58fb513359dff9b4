"""Retention: decides which published checkpoints are kept, which of them count as good, and whether they will fit.

A checkpoint is not good if it was saved while steps were skipped, if its manifest is damaged, or if its folder has the
name of another step.  Such a checkpoint never replaces a good one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice

from trainer.checkpoint.manifest import Manifest, name_of, read_manifest, step_in
from trainer.checkpoint.storage import DOUBTFUL, Damaged, Storage
from trainer.config import CheckpointSection
from trainer.errors import UserError
from trainer.metrics.console import readable_bytes


def list_steps(storage: Storage) -> list[int]:
    """Return the steps of the published checkpoints in `storage`, oldest first.  Some may be damaged."""
    steps = ((name, step_in(name)) for name in storage.names())
    return sorted(step for name, step in steps if step is not None and storage.is_published(name))


def newest_step(storage: Storage) -> int | None:
    """Return the step of the newest checkpoint in `storage`; None if there are no checkpoints.

    A checkpoint that was saved while steps were skipped is chosen only if all were.  The result may be damaged: only
    reading it will show that.
    """
    steps = list_steps(storage)
    for step in reversed(steps):
        manifest = _read(storage / name_of(step))
        if manifest is None or not manifest.num_skipped:
            return step
    return steps[-1] if steps else None


def best_step(storage: Storage) -> int | None:
    """Return the step of the best evaluated checkpoint in `storage`; None if none has been evaluated."""
    best = find_best(storage)
    return None if best is None else best[1]


def find_best(storage: Storage) -> tuple[float, int] | None:
    """Return the loss and the step of the best evaluated checkpoint in `storage`; None if none has been evaluated.

    Checkpoints are ranked by the metric that was configured when the newest of them was saved.
    """
    manifests = [m for step in list_steps(storage) if (m := _read(storage / name_of(step))) is not None]
    good = [manifest for manifest in manifests if manifest.evaluation and not manifest.num_skipped]
    scored = [(m.evaluation[good[-1].metric], m.step) for m in good if good[-1].metric in m.evaluation]
    return min(scored, default=None)


def _read(storage: Storage) -> Manifest | None:
    """Return the manifest, or None if it is missing, damaged or of an unsupported format."""
    try:
        return read_manifest(storage)
    except (Damaged, UserError, FileNotFoundError):
        return None


class RetentionPolicy:
    """Decides which checkpoints are obsolete.  For rank 0 only.  Each manifest is read once and cached.

    keep_last: number of newest good checkpoints to keep; 0 keeps all.  keep_every: keep permanently those saved for a
    multiple of this many steps; 0 disables it.  keep_best: number of checkpoints to keep whose evaluation has the
    lowest `metric`; 0 disables it.
    """

    def __init__(self, storage: Storage, keep_last: int, keep_every: int, keep_best: int, metric: str) -> None:
        self._place, self._keep_last, self._keep_every = storage, keep_last, keep_every
        self._keep_best, self._metric = keep_best, metric
        self._known: dict[int, Manifest | None] = {}

    def note(self, manifest: Manifest) -> None:
        """Record a checkpoint that has just been published."""
        self._known[manifest.step] = manifest

    def would_keep(self, evaluation: Mapping[str, float]) -> bool:
        """Return whether a checkpoint with this evaluation would be among the best; a tie does not count as better.

        Only checkpoints that exist are compared, not ones that failed to save or were deleted.  This is read-only,
        since a save may be in flight, and propagates errors of the storage.
        """
        value = evaluation.get(self._metric)
        if value is None:
            return False
        found = (self._known.get(step) or _read(self._place / name_of(step)) for step in list_steps(self._place))
        good = (manifest for manifest in found if manifest is not None and not manifest.num_skipped)
        return sum(m.evaluation.get(self._metric, math.inf) <= value for m in good) < self._keep_best

    def obsolete(self, before_next: bool = False) -> list[str]:
        """Return the names of the checkpoints to prune: older than the newest good ones, and kept by no other rule.

        `before_next`: those that will be pruned once another good one is published.  If the disk is too full for the
        new checkpoint, they can be pruned first.  At least one good checkpoint always remains.

        Propagates errors of the storage.
        """
        number = self._keep_last - 1 if before_next else self._keep_last
        steps = list_steps(self._place)
        last = list(islice((step for step in reversed(steps) if self._is_good(step)), max(0, number)))
        if not last or len(last) < number:
            return []
        manifests = {step: self._look_at(step) for step in steps}
        evaluated = [m for m in manifests.values() if m and not m.num_skipped and self._metric in m.evaluation]
        best = sorted((m.evaluation[self._metric], m.step) for m in evaluated)[: self._keep_best]  # a tie: the older
        kept = {step for _, step in best}
        for step, manifest in manifests.items():
            stands_for = (step, *(manifest.due if manifest is not None else ()))
            if self._keep_every > 0 and any(due % self._keep_every == 0 for due in stands_for):
                kept.add(step)
        return [name_of(step) for step in steps if step < last[-1] and step not in kept]

    def names_to_quarantine(self, since: int) -> list[str]:
        """Return the names of the good checkpoints saved at or after step `since`, from which on every step failed.

        The list is empty if no good checkpoint is older than `since`, since then there is nothing to resume from
        instead.  It leaves out checkpoints that were quarantined before: if the failure recurred after resuming from
        an older checkpoint, the checkpoint is not its cause.
        """
        good = [step for step in list_steps(self._place) if self._is_good(step)]
        if not good or good[0] >= since:
            return []
        aside = self._place.quarantined_names()
        return [name_of(step) for step in good if step >= since and f"{DOUBTFUL}-{name_of(step)}" not in aside]

    def _is_good(self, step: int) -> bool:
        manifest = self._look_at(step)
        return manifest is not None and not manifest.num_skipped

    def _look_at(self, step: int) -> Manifest | None:
        """Return the manifest of a checkpoint, or None if it cannot be used."""
        if step not in self._known:
            self._known[step] = _read(self._place / name_of(step))
        return self._known[step]


# ---------------------------------------------------------------------------------------------------------------
# Whether the checkpoints that are kept will fit on the disk


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
