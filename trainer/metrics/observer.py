"""Protocols for observers of training, which are called when a step begins or ends or this rank enters a phase."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol


class StepObserver(Protocol):
    """Notified of each step.  Implemented by the watchdog, the profiler and the checkpoint writer, among others."""

    def begin_step(self, step: int) -> None:
        """Called when `step` begins, before its data is loaded."""

    def end_step(self, step: int) -> None:
        """Called when `step` has been queued; a GPU may still be running it."""


class PhaseObserver(Protocol):
    """Notified of each phase."""

    def enter_phase(self, phase: str) -> None:
        """Called when this rank enters `phase`, possibly from any thread."""


class Phases(Protocol):
    """Tracks the current phase of this rank.  Implemented by the watchdog."""

    observers: list[PhaseObserver]

    def enter(self, phase: str) -> None:
        """Enter a phase of the step."""

    def during(self, phase: str) -> AbstractContextManager[None]:
        """Return a context manager that enters a phase outside the step for the duration of its block."""
