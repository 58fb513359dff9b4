"""Retention: decides which published checkpoints are kept, and which of them count as good.

One that was saved while steps were skipped, one that is damaged or lies under another step's name does not count:
it takes no other's place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import islice

from trainer.checkpoint.blocks import Damaged
from trainer.checkpoint.manifest import Manifest, name_of, read_manifest, step_in
from trainer.checkpoint.place import DOUBTFUL, Place
from trainer.errors import UserError


def list_steps(place: Place) -> list[int]:
    """Return the steps of the checkpoints in `place`, oldest first: whole or damaged, but published."""
    steps = ((name, step_in(name)) for name in place.names())
    return sorted(step for name, step in steps if step is not None and place.is_published(name))


def newest_step(place: Place) -> int | None:
    """Return the step to take of the checkpoints in `place`; None if there is none.

    The newest one, but one that was saved while steps were skipped only if all were.  It may be damaged:
    reading it will tell.
    """
    steps = list_steps(place)
    settled = (step for step in reversed(steps) if not _num_skipped(place / name_of(step)))
    return next(settled, steps[-1] if steps else None)


def best_step(place: Place) -> int | None:
    """Return the step of the best evaluated checkpoint in `place`; None if none has been evaluated."""
    best = find_best(place)
    return None if best is None else best[1]


def find_best(place: Place) -> tuple[float, int] | None:
    """Return the loss and the step of the best evaluated checkpoint in `place`; None if none has been evaluated.

    Best by the field that told the best when the newest of them was saved.
    """
    manifests = [m for step in list_steps(place) if (m := _read(place / name_of(step))) is not None]
    good = [manifest for manifest in manifests if manifest.evaluation and not manifest.num_skipped]
    scored = [(m.evaluation[good[-1].metric], m.step) for m in good if good[-1].metric in m.evaluation]
    return min(scored, default=None)


def _num_skipped(place: Place) -> int:
    manifest = _read(place)
    return 0 if manifest is None else manifest.num_skipped


def _read(place: Place) -> Manifest | None:
    """Return the manifest, or None if it is none that can be gone on from."""
    try:
        return read_manifest(place)
    except (Damaged, UserError, FileNotFoundError):
        return None


class Keeping:
    """Says which checkpoints are obsolete.  For rank 0 alone; what it has to know of each it reads once.

    keep_last: how many good ones are kept, the newest; 0: all.  keep_every: those that stand for a multiple of so many
    steps are kept for good; 0: none.  keep_best: how many are kept whose evaluation has the lowest `metric`; 0: none.
    """

    def __init__(self, place: Place, keep_last: int, keep_every: int, keep_best: int, metric: str) -> None:
        self._place, self._keep_last, self._keep_every = place, keep_last, keep_every
        self._keep_best, self._metric = keep_best, metric
        self._known: dict[int, Manifest | None] = {}

    def note(self, manifest: Manifest) -> None:
        """Take note of a checkpoint that has just been published."""
        self._known[manifest.step] = manifest

    def would_keep(self, evaluation: Mapping[str, float]) -> bool:
        """Return whether a checkpoint with this evaluation is one of the best that there are; as good is not better.

        What counts is what is there: one that could not be saved, or was deleted, is in no other's way.  Looks only,
        as a save may be in flight, and raises what the storage raises.
        """
        value = evaluation.get(self._metric)
        if value is None:
            return False
        found = (self._known.get(step) or _read(self._place / name_of(step)) for step in list_steps(self._place))
        good = (manifest for manifest in found if manifest is not None and not manifest.num_skipped)
        return sum(m.evaluation.get(self._metric, math.inf) <= value for m in good) < self._keep_best

    def obsolete(self) -> list[str]:
        """Return the names of the checkpoints that are no longer kept.  Raises what the storage raises."""
        return self._older_than_the_last(self._keep_last)

    def spare(self) -> list[str]:
        """Return the names of those that will no longer be kept once another good one is published.

        For a disk without room for that one.  At least one good checkpoint is never among them.
        """
        return self._older_than_the_last(self._keep_last - 1) if self._keep_last > 1 else []

    def _older_than_the_last(self, number: int) -> list[str]:
        """Return those that are older than the newest `number` good ones, and kept for no other reason."""
        steps = list_steps(self._place)
        last = list(islice((step for step in reversed(steps) if self._is_good(step)), number))
        if not last or len(last) < number:
            return []
        best = self._best(steps)
        return [
            name_of(step) for step in steps if step < last[-1] and step not in best and not self._is_kept_for_good(step)
        ]

    def in_doubt(self, since: int) -> list[str]:
        """Return the names of the good ones from step `since` on, which was the last before all failed.

        None if there is no good one before, to go on from instead.  None that has been in doubt before: then the same
        has come again from an older one, and it is not the checkpoint's fault.
        """
        good = [step for step in list_steps(self._place) if self._is_good(step)]
        if not good or good[0] >= since:
            return []
        aside = self._place.names_aside()
        return [name_of(step) for step in good if step >= since and f"{DOUBTFUL}-{name_of(step)}" not in aside]

    def _is_kept_for_good(self, step: int) -> bool:
        every, manifest = self._keep_every, self._look_at(step)
        stands_for = (step, *(manifest.due if manifest is not None else ()))
        return every > 0 and any(due % every == 0 for due in stands_for)

    def _best(self, steps: Sequence[int]) -> set[int]:
        """Return those of the good ones that are kept for their evaluation; of equal ones the older."""
        good = [m for step in steps if (m := self._look_at(step)) is not None and not m.num_skipped]
        scored = sorted((m.evaluation[self._metric], m.step) for m in good if self._metric in m.evaluation)
        return {step for _, step in scored[: self._keep_best]}

    def _is_good(self, step: int) -> bool:
        manifest = self._look_at(step)
        return manifest is not None and not manifest.num_skipped

    def _look_at(self, step: int) -> Manifest | None:
        """Return the manifest of a checkpoint; None if that is none that can be gone on from."""
        if step not in self._known:
            self._known[step] = _read(self._place / name_of(step))
        return self._known[step]
