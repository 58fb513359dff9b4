"""Evaluations: what happens around each evaluation of a run."""

from __future__ import annotations

from collections.abc import Callable

from trainer.checkpoint.saver import Saver
from trainer.lifecycle.samples import Samples
from trainer.lifecycle.state import TrainState
from trainer.metrics.horizon import Horizon
from trainer.metrics.observer import Phases
from trainer.metrics.record import Record


class Evaluations:
    """Has an evaluation watched, its result taken into account (by the run's end, and by what is saved), and samples
    written.
    """

    def __init__(self, state: TrainState, phases: Phases, horizon: Horizon, saver: Saver, samples: Samples) -> None:
        self._state, self._phases, self._horizon, self._saver = state, phases, horizon, saver
        self._samples = samples

    def hold(self, evaluate: Callable[[], Record | None]) -> None:
        """Evaluate the state as it is, and save it if it is one of the best.  Collective.

        `evaluate` returns the record, or None where nothing is held out or a stop was requested.
        """
        with self._phases.during("evaluate"):
            record = evaluate()
            if record is None:
                return
            self._samples.write(self._state.step)
        self._state.evaluated(record)
        self._horizon.evaluated(record, self._state.step)
        self._saver.save_if_best(self._state)
