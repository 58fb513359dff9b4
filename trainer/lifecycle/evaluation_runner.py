"""Runs the evaluations of a training run, and acts on their results."""

from __future__ import annotations

from collections.abc import Callable

from trainer.checkpoint.saver import Saver
from trainer.lifecycle.samples import Samples
from trainer.lifecycle.state import TrainState
from trainer.metrics.observer import Phases
from trainer.metrics.record import Record
from trainer.metrics.stop_criterion import StopCriterion


class EvaluationRunner:
    """Runs an evaluation under the watchdog, writes samples, and passes the result on to early stopping and saving."""

    def __init__(
        self, state: TrainState, phases: Phases, horizon: StopCriterion, saver: Saver, samples: Samples
    ) -> None:
        self._state, self._phases, self._horizon, self._saver = state, phases, horizon, saver
        self._samples = samples

    def run(self, evaluate: Callable[[], Record | None]) -> None:
        """Evaluate the current state, and save it if it is one of the best.  Collective.

        `evaluate` returns the record, or None if there is no held-out data or a stop was requested.
        """
        with self._phases.during("evaluate"):
            record = evaluate()
            if record is None:
                return
            self._samples.write(self._state.step)
        self._state.evaluated(record)
        self._horizon.evaluated(record, self._state.step)
        self._saver.save_if_best(self._state)
