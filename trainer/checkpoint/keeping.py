"""Retention: decides which published checkpoints are kept, and which of them count as good.

One that was saved while steps were skipped, one that is damaged or lies under another step's name does not count:
it takes no other's place.
"""

from __future__ import annotations

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
    steps are kept for good; 0: none.
    """

    def __init__(self, place: Place, keep_last: int, keep_every: int) -> None:
        self._place, self._keep_last, self._keep_every = place, keep_last, keep_every
        self._known: dict[int, tuple[bool, tuple[int, ...]]] = {}

    def note(self, manifest: Manifest) -> None:
        """Take note of a checkpoint that has just been published."""
        self._known[manifest.step] = (not manifest.num_skipped, tuple(manifest.due))

    def obsolete(self) -> list[str]:
        """Return the names of the checkpoints that are no longer kept.  Raises what the storage raises."""
        steps = list_steps(self._place)
        last = list(islice((step for step in reversed(steps) if self._look_at(step)[0]), self._keep_last))
        if not last or len(last) < self._keep_last:
            return []
        return [name_of(step) for step in steps if step < last[-1] and not self._is_kept_for_good(step)]

    def in_doubt(self, since: int) -> list[str]:
        """Return the names of the good ones from step `since` on, which was the last before all failed.

        None if there is no good one before, to go on from instead.  None that has been in doubt before: then the same
        has come again from an older one, and it is not the checkpoint's fault.
        """
        good = [step for step in list_steps(self._place) if self._look_at(step)[0]]
        if not good or good[0] >= since:
            return []
        aside = self._place.names_aside()
        return [name_of(step) for step in good if step >= since and f"{DOUBTFUL}-{name_of(step)}" not in aside]

    def _is_kept_for_good(self, step: int) -> bool:
        every = self._keep_every
        return every > 0 and (step % every == 0 or any(due % every == 0 for due in self._look_at(step)[1]))

    def _look_at(self, step: int) -> tuple[bool, tuple[int, ...]]:
        """Return whether a checkpoint is good, as far as its manifest says, and which saves it stands for."""
        if step not in self._known:
            manifest = _read(self._place / name_of(step))
            self._known[step] = (False, ()) if manifest is None else (not manifest.num_skipped, tuple(manifest.due))
        return self._known[step]
