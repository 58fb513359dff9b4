"""Leaving a step whose data do not come: asked to stop, a run does not wait for a connection that is lost.

The rank that gives up says so in the ballot with which the others begin the step.  None of them has done anything in
it by then, so that all are where the step began, and can save.  An evaluation is left as ever: in the ballot that is
cast before each of its micro-batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trainer.data.loader import EvalLoader, TrainLoader
from trainer.data.prefetch import WaitAbandoned
from trainer.distributed.ballot import Ballot

PATIENCE_S = 5.0
"""Seconds that data are waited for after a request to stop: those of most steps come by then."""


class _Left(Exception):
    """A rank has given up waiting for its data."""


class Leaving:
    """Leaves a step if its data do not come on some rank that was asked to stop.

    loader, eval_loader: ones of another class are waited for.  is_asked: whether this rank was asked to stop.
    """

    def __init__(self, ballot: Ballot, loader: object, eval_loader: object, is_asked: Callable[[], bool]) -> None:
        self._ballot, self._loader, self._is_asked = ballot, loader, is_asked
        self._has_given_up = False
        self._waits_since: float | None = None
        ballot.ask(lambda: self._has_given_up, self._leave)
        for each in (loader, eval_loader):
            if isinstance(each, (TrainLoader, EvalLoader)):
                each.should_abandon = self._is_out_of_patience

    @contextmanager
    def possible(self) -> Iterator[None]:
        """Leave the block, on all ranks alike, with the step in it that cannot be.  At most one all-reduce."""
        try:
            try:
                yield
            except WaitAbandoned:
                self._has_given_up = True
                self._ballot.cast()
        except _Left:
            assert isinstance(self._loader, TrainLoader), "all ranks have the same loader"
            self._loader.rewind_step()

    def _is_out_of_patience(self) -> bool:
        if not self._is_asked():
            return False
        now = time.monotonic()
        self._waits_since = now if self._waits_since is None else self._waits_since
        return now - self._waits_since > PATIENCE_S

    def _leave(self) -> None:
        raise _Left
