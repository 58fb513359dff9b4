"""Abandons a step whose data does not arrive, so that a run that was asked to stop does not wait for a lost connection.

The rank that gives up votes for it in the step's first all-reduce, which the other ranks take part in when they begin
the step.  None of them has changed any state by then, so that all ranks can save the state from before the step.  An
evaluation is abandoned in the all-reduce before each of its micro-batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trainer.data.loader import EvalLoader, TrainLoader, WaitAbandoned
from trainer.distributed.step_sync import StepSync

PATIENCE_S = 5.0
"""Time to wait for data after a request to stop, which is enough for most steps."""


class _StepAbandoned(Exception):
    """Raised on all ranks after one of them has given up waiting for its data."""


class StepAbandoner:
    """Abandons a step if its data does not arrive on a rank that was asked to stop.

    loader, eval_loader: custom loaders are never abandoned.  is_asked: returns whether this rank was asked to stop.
    """

    def __init__(self, step_sync: StepSync, loader: object, eval_loader: object, is_asked: Callable[[], bool]) -> None:
        self._step_sync, self._loader, self._is_asked = step_sync, loader, is_asked
        self._has_given_up = False
        self._waits_since: float | None = None
        step_sync.register(lambda: self._has_given_up, self._leave)
        for each in (loader, eval_loader):
            if isinstance(each, (TrainLoader, EvalLoader)):
                each.should_abandon = self._is_out_of_patience

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Leave the block on all ranks if the step inside is abandoned on one.  At most one all-reduce."""
        try:
            try:
                yield
            except WaitAbandoned:
                self._has_given_up = True
                self._step_sync.all_reduce()
        except _StepAbandoned:
            assert isinstance(self._loader, TrainLoader), "all ranks have the same loader"
            self._loader.rewind_step()

    def _is_out_of_patience(self) -> bool:
        if not self._is_asked():
            return False
        now = time.monotonic()
        self._waits_since = now if self._waits_since is None else self._waits_since
        return now - self._waits_since > PATIENCE_S

    def _leave(self) -> None:
        raise _StepAbandoned
