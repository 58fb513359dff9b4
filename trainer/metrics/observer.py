"""Observers of training: told when a step begins and ends, and which phase this rank enters."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol


class StepObserver(Protocol):
    """Told of each step: the watchdog, the profiler, the checkpoint writer."""

    def begin_step(self, step: int) -> None:
        """Step `step` begins, with its data."""

    def end_step(self, step: int) -> None:
        """Step `step` has been queued; a GPU may still be at it."""


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
