"""Decides which checkpoints are good and which to keep, and estimates whether a run's checkpoints will fit on the disk.

A published checkpoint is complete and has its final name.  It is not good if the steps just before it were skipped
because their loss or gradient was not finite, if its manifest is missing, damaged or of an unsupported format, or if
its folder is named after a different step.  A checkpoint that is not good never causes a good one to be pruned.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice

from trainer.checkpoint.manifest import Manifest, checkpoint_name, list_steps, read_manifest
from trainer.checkpoint.storage import SUSPECT, Damaged, Storage
from trainer.config.schema import CheckpointSection
from trainer.errors import UserError
from trainer.metrics.console import readable_bytes


def newest_step(storage: Storage) -> int | None:
    """Return the step of the newest checkpoint in `storage`; None if there are no checkpoints.

    Checkpoints that were saved right after skipped steps are considered only if there are no others.  A damaged
    manifest does not rule a checkpoint out: the damage is reported when the checkpoint is opened.
    """
    steps = list_steps(storage)
    for step in reversed(steps):
        manifest = _read_if_usable(storage / checkpoint_name(step))
        if manifest is None or not manifest.num_skipped:
            return step
    return steps[-1] if steps else None


def best_step(storage: Storage) -> int | None:
    """Return the step of the checkpoint that `find_best` returns; None if it returns None."""
    best = find_best(storage)
    return None if best is None else best[1]


def find_best(storage: Storage) -> tuple[float, int] | None:
    """Return the metric's value and the step of the good checkpoint with the best value; None if none has a value.

    The metric is the one that was configured when the newest good checkpoint with an evaluation was saved; checkpoints
    without a value for it are ignored.  Ties go to the older checkpoint.
    """
    manifests = [
        m for step in list_steps(storage) if (m := _read_if_usable(storage / checkpoint_name(step))) is not None
    ]
    good = [manifest for manifest in manifests if manifest.evaluation and not manifest.num_skipped]
    if not good:
        return None
    metric, sign = good[-1].metric, -1 if good[-1].higher_is_better else 1
    scored = [(m.evaluation[metric], m.step) for m in good if metric in m.evaluation]
    return min(scored, key=lambda value_and_step: (sign * value_and_step[0], value_and_step[1]), default=None)


def _read_if_usable(storage: Storage) -> Manifest | None:
    """Return the manifest, or None if it is missing, damaged or of an unsupported format."""
    try:
        return read_manifest(storage)
    except (Damaged, UserError, FileNotFoundError):
        return None


class RetentionPolicy:
    """Decides which checkpoints are obsolete.  For rank 0 only.  Manifests are cached.

    With `checkpoint.keep_last=0`, the policy keeps every checkpoint.  Otherwise it keeps the newest
    `checkpoint.keep_last` good checkpoints, the `checkpoint.keep_best` ones with the best `metric`, and each checkpoint
    whose step, or a step whose save it replaces, is a multiple of `checkpoint.keep_every`.
    """

    def __init__(self, storage: Storage, section: CheckpointSection, metric: str, higher_is_better: bool) -> None:
        self._storage, self._keep_last, self._keep_every = storage, section.keep_last, section.keep_every
        self._keep_best, self._sign = section.keep_best, -1 if higher_is_better else 1
        self.metric, self.higher_is_better = metric, higher_is_better
        self._manifests: dict[int, Manifest | None] = {}
        """The manifest of each step; None if it cannot be used."""

    def record_published(self, manifest: Manifest) -> None:
        """Record a checkpoint that has just been published."""
        self._manifests[manifest.step] = manifest

    def would_keep(self, evaluation: Mapping[str, float]) -> bool:
        """Return whether a checkpoint with this evaluation would be among the best; a tie does not count as better.

        It is compared only with existing checkpoints, not with ones that failed to save or were deleted.  This method
        does not update the cache, since a save may be in flight.  It propagates storage errors.
        """
        value = evaluation.get(self.metric)
        if value is None:
            return False
        num_better = 0
        for step in list_steps(self._storage):
            manifest = self._manifests.get(step) or _read_if_usable(self._storage / checkpoint_name(step))
            if manifest is not None and not manifest.num_skipped:
                other = manifest.evaluation.get(self.metric)
                num_better += other is not None and self._sign * other <= self._sign * value
        return num_better < self._keep_best

    def obsolete(self, before_next: bool = False) -> list[str]:
        """Return the names of checkpoints to prune: older than the newest good ones to keep, and kept by no other rule.

        With `before_next`, they include those that will be obsolete once the next good checkpoint is published; these
        are pruned in advance if the disk is too full for the new one.  At least one good checkpoint always remains.

        Propagates storage errors.
        """
        num_last = self._keep_last - 1 if before_next else self._keep_last
        steps = list_steps(self._storage)
        newest = list(islice((step for step in reversed(steps) if self._is_good(step)), max(0, num_last)))
        if not newest or len(newest) < num_last:
            return []
        manifests = {step: self._manifest_of(step) for step in steps}
        evaluated = [m for m in manifests.values() if m and not m.num_skipped and self.metric in m.evaluation]
        ranked = sorted((self._sign * m.evaluation[self.metric], m.step) for m in evaluated)  # ties: older first
        to_keep = {step for _, step in ranked[: self._keep_best]}
        for step, manifest in manifests.items():
            due_steps = (step, *(manifest.replaced_steps if manifest is not None else ()))
            if self._keep_every > 0 and any(due % self._keep_every == 0 for due in due_steps):
                to_keep.add(step)
        return [checkpoint_name(step) for step in steps if step < newest[-1] and step not in to_keep]

    def names_to_quarantine(self, first_step: int) -> list[str]:
        """Return the names of the good checkpoints of step `first_step` and later, after which every step failed.

        The list is empty if no good checkpoint is older, because there is then nothing else to resume from.  It omits a
        step whose checkpoint was already quarantined as suspect: the failure recurred after resuming from an older
        checkpoint, so the quarantined one was not its cause.
        """
        good = [step for step in list_steps(self._storage) if self._is_good(step)]
        if not good or good[0] >= first_step:
            return []
        quarantined = self._storage.quarantined_names()
        return [
            checkpoint_name(step)
            for step in good
            if step >= first_step and f"{SUSPECT}-{checkpoint_name(step)}" not in quarantined
        ]

    def _is_good(self, step: int) -> bool:
        manifest = self._manifest_of(step)
        return manifest is not None and not manifest.num_skipped

    def _manifest_of(self, step: int) -> Manifest | None:
        """Return the manifest of a checkpoint, or None if it cannot be used."""
        if step not in self._manifests:
            self._manifests[step] = _read_if_usable(self._storage / checkpoint_name(step))
        return self._manifests[step]


# ---------------------------------------------------------------------------------------------------------------
# Disk space


@dataclass(frozen=True)
class CheckpointCounts:
    """How many checkpoints a run will have on disk at the same time."""

    num_kept: int
    """The number after the run's last save."""
    num_at_peak: int
    """The largest number, while a new checkpoint is written before the oldest is deleted."""
    num_if_pruned_first: int
    """The largest number if the oldest is deleted before the next is written, as happens only if the disk is full."""


def checkpoint_counts(section: CheckpointSection, steps_left: int, num_existing: int) -> CheckpointCounts:
    """Return the counts for a run that has `num_existing` checkpoints and will train `steps_left` more steps."""
    every = section.every if isinstance(section.every, int) else 1
    num_saves = 1 if every == 0 else max(1, -(-steps_left // every))
    permanent = section.keep_best + (steps_left // section.keep_every if section.keep_every else 0)
    total = num_existing + num_saves
    if section.keep_last == 0:
        if not isinstance(section.every, int):  # the number of saves is unknown
            total = num_existing + 1
        return CheckpointCounts(num_kept=total, num_at_peak=total, num_if_pruned_first=total)
    return CheckpointCounts(
        num_kept=min(section.keep_last + permanent, total),
        num_at_peak=min(section.keep_last + permanent + 1, total),
        num_if_pruned_first=min(max(section.keep_last, 2) + permanent, total),
    )


def disk_space_warning(storage: Storage, section: CheckpointSection, num_bytes: int, steps_left: int) -> str:
    """Return a warning if a run's checkpoints do not fit on the disk of `storage`; "" if they do or it is unknown.

    num_bytes: estimated size of a checkpoint, used if there is no existing checkpoint to measure.
    """
    free, existing = None, list[int]()
    with suppress(OSError, Damaged, UserError):
        free, existing = storage.free_bytes(), list_steps(storage)
        if existing:
            num_bytes = read_manifest(storage / checkpoint_name(existing[-1])).num_bytes
    if free is None:
        return ""
    counts = checkpoint_counts(section, steps_left, len(existing))
    needed_bytes = (counts.num_at_peak - len(existing)) * num_bytes
    if needed_bytes <= free:
        return ""
    num_at_peak = counts.num_at_peak
    kept = f"{counts.num_kept} kept" + (", 1 being written" if num_at_peak > counts.num_kept else "")
    which = f"{num_at_peak} checkpoint{'s' * (num_at_peak > 1)} of {readable_bytes(num_bytes)} ({kept})"
    there = f", {len(existing)} of them there already" if existing else ""
    lines = [
        f"warning: checkpoint.keep_last={section.keep_last}: {which} need {readable_bytes(num_at_peak * num_bytes)}"
        f"{there}, but {storage} has {readable_bytes(free)} free"
    ]
    if section.keep_last > 1 and (counts.num_if_pruned_first - len(existing)) * num_bytes <= free:
        lines.append("the oldest one will be deleted before the next is written")
    else:
        lines.append("saves will fail once the disk is full")
    fixes = ["free some space there", "set checkpoint.dir to a folder on another disk"]
    with_one = checkpoint_counts(replace(section, keep_last=1), steps_left, len(existing)).num_at_peak
    if with_one < num_at_peak:
        fixes.append(f"set checkpoint.keep_last=1 (needs {readable_bytes(with_one * num_bytes)})")
    lines.append(f"to fix: {', or '.join(fixes)}")
    return "\n  ".join(lines)
