"""Observers of training: told when a step begins and ends, and which phase this rank enters."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol


class StepObserver(Protocol):
    """Told of each step: the watchdog, the profiler, the forecast, the checkpoint writer."""

    def begin_step(self, step: int) -> None:
        """Step `step` begins, with its data."""

    def end_step(self, step: int, seconds: float, is_profiled: bool) -> None:
        """Step `step` took `seconds`; those of a profiled step are the profiler's as well."""


class PhaseObserver(Protocol):
    """Told of each phase."""

    def enter_phase(self, phase: str) -> None:
        """This rank enters `phase`.  Called on whatever thread notices it."""


class Phases(Protocol):
    """Knows which phase this rank is in: the watchdog."""

    observers: list[PhaseObserver]

    def enter(self, phase: str) -> None:
        """Enter a phase of the step."""

    def during(self, phase: str) -> AbstractContextManager[None]:
        """Be in a phase outside the step inside the block."""
