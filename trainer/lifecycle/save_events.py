"""Connects saves with the rest of a run: what happens before, during and after each save."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from trainer.checkpoint.saver import Resumable
from trainer.checkpoint.store import SaveResult
from trainer.distributed.world import World
from trainer.lifecycle.folder import RunFolder
from trainer.lifecycle.relocation import Relocation
from trainer.lifecycle.resume import Resume
from trainer.lifecycle.watchdog import Watchdog
from trainer.metrics.goodput import RunHistory
from trainer.metrics.hub import Metrics
from trainer.metrics.record import Record
from trainer.metrics.sinks import warn
from trainer.metrics.step_metrics import StepMetrics


class RunSaveListener:
    """The SaveListener of a run: acquires the folder, resolves pending metrics, and times and records the save."""

    def __init__(
        self,
        world: World,
        folder: RunFolder,
        relocation: Relocation,
        resume: Resume,
        accounts: StepMetrics,
        watchdog: Watchdog,
        metrics: Metrics,
    ) -> None:
        self._world, self._folder, self._relocation, self._resume = world, folder, relocation, resume
        self._accounts, self._watchdog, self._metrics = accounts, watchdog, metrics

    @property
    def step_s(self) -> float:
        return self._accounts.step_s

    def experience(self) -> RunHistory:
        return self._metrics.experience()

    def expects(self, falls_due: Callable[[int], bool]) -> None:
        self._accounts.is_saved_after = falls_due

    def settle(self) -> None:
        self._accounts.settle()

    def prepare(self, state: Resumable) -> None:
        self._world.agreed(self._folder.acquire)
        self._relocation.check()
        self._resume.confirm(state.step)
        self._accounts.settle()

    def waiting(self) -> AbstractContextManager[None]:
        return self._watchdog.during("save")

    def began(self, stage: Callable[[], str]) -> None:
        self._watchdog.save_begins(stage)

    def ended(self, result: SaveResult, every_s: float | None) -> None:
        self._watchdog.save_ends()
        if not result.error:
            times = {"blocked_s": result.blocked_s, "total_s": result.total_s}
            times |= {} if every_s is None else {"every_s": every_s}
            self._metrics.write(Record(kind="checkpoint", step=result.step, **times, bytes=result.bytes))

    def warn(self, text: str) -> None:
        if self._world.is_main:
            warn(text)
