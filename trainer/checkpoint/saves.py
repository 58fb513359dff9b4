"""Saves a run's checkpoints through `torch.distributed.checkpoint.async_save`, one at a time, and prunes old ones.

`Checkpoints.start` calls `async_save`, which calls the parts in this order, C marking a collective of DCP's own:

    thread       ranks   called                                              does
    main         all     CopyStager.stage                                    copies what this rank writes
    background   all     ColumnSavePlanner.create_local_plan                 reports an error, or checksums and boxes
                         C gather
                 0       ColumnSavePlanner.create_global_plan                compares the ranks, plans the chunks
                 0       RunWriter.prepare_global_plan                       checks the disk, creates the folder
                         C scatter
                 all     ColumnSavePlanner.finish_plan
                 all     RunWriter.write_data                                writes and flushes the rank's files
                         C gather
                 0       RunWriter.finish                                    writes the manifest, publishes
                         C broadcast
                 all     Checkpoints._end                                    makes the result; rank 0 prunes
    main         all     Checkpoints.take_result                             agrees on the result

If any rank raises in one of these, DCP raises the errors of all ranks on every rank, and rank 0 deletes the files of
the failed save.  If a rank dies, the others lose their connections to it, and fail too.  If that was rank 0, the
unpublished folder remains until the run is next started.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from trainer.checkpoint.manifest import CHECKPOINT_PREFIX, RunInfo
from trainer.checkpoint.messages import DiskFull, UnsavableState, describe_failures
from trainer.checkpoint.retention import RetentionPolicy
from trainer.checkpoint.snapshot import Snapshot, collect, keys_differing_between_ranks, take_snapshot
from trainer.checkpoint.storage import Storage, describe
from trainer.config.schema import CheckpointSection
from trainer.distributed.channel import Channel
from trainer.distributed.world import World
from trainer.errors import TrainingFailed, UserError

if TYPE_CHECKING:
    from trainer.checkpoint.planner import ColumnSavePlanner
    from trainer.checkpoint.run_writer import RunWriter
    from trainer.checkpoint.stager import CopyStager, LiveStager
    from trainer.lifecycle.state import TrainState

_DELETE_TIMEOUT_S = 60.0
"""Maximum time to wait for the deletion of pruned checkpoints."""
_WAITING = "waiting for the other ranks"

_DISK_FULL_ADVICE = "; to fix: free some space there, or set checkpoint.keep_last=1 or a checkpoint.dir on another disk"


@dataclass(frozen=True)
class SaveResult:
    """The outcome of one save, the same on all ranks except for the times, `bytes` and `warning`.

    If `lost` is set, only `error` and `lost` are the same on all ranks.
    """

    step: int
    path: str
    bytes: int = 0
    """Total size of the files, without the manifest.  On rank 0 only, and 0 if the save failed."""
    blocked_s: float = 0.0
    """Time that training was paused."""
    total_s: float = 0.0
    """Time from the start until the checkpoint was published, or until the save failed."""
    error: str = ""
    """What went wrong and where; empty if the checkpoint was published."""
    is_mistake: bool = False
    """True if the state cannot be saved at all, so that it is no use trying again."""
    is_disk_full: bool = False
    """True if the save failed because the disk is full."""
    warning: str = ""
    """The error of the last deletion of pruned checkpoints; empty if it succeeded.  On rank 0 only."""
    lost: Literal["", "ranks", "storage"] = ""
    """What did not respond in time, if the save failed for that reason."""


@dataclass
class _Tools:
    """The parts of torch.distributed.checkpoint that all saves of a run use."""

    planner: ColumnSavePlanner
    writer: RunWriter
    copy_stager: CopyStager
    live_stager: LiveStager


class Checkpoints:
    """The checkpoints in one folder.  Methods documented as collective must be called by all ranks."""

    def __init__(
        self,
        storage: Storage,
        world: World,
        section: CheckpointSection,
        metric: str,
        higher_is_better: bool,
        run_info: RunInfo,
    ) -> None:
        """metric: the evaluation field by which checkpoints are ranked.

        higher_is_better: whether higher values of `metric` are better.
        """
        self.world, self.run_info, self._section = world, run_info, section
        self._timeout_s = 1.2 * section.timeout_s + 30.0  # the Monitor, if it may, ends the run first
        self.in_flight: Future[SaveResult] | None = None
        """The save that has been started, until `take_result` returns its result."""
        self.storage = storage
        self.retention = RetentionPolicy(storage, section, metric, higher_is_better)
        self._tools: _Tools | None = None
        self._channel: Channel | None = None
        """Used by the background thread of a save, and by nothing else."""
        self.is_throttled = False
        """True during a training step on the CPU: the background writer then leaves memory bandwidth to the step."""
        self._is_abandoned = False
        """True if a save has exceeded its time limit: its thread may still use what all saves share."""
        self._overdue_at = 0.0
        self._blocked_s: float | None = None
        """How long the save in flight has paused training; None if it does so until it ends."""
        self.activity = _WAITING
        """What the save in flight is doing now, as text for messages."""
        self._deleting: Future[None] | None = None
        self._warning = ""
        """The error of the last deletion; empty if it succeeded."""

    @contextlib.contextmanager
    def throttled(self) -> Iterator[None]:
        """Throttle background writing in the block, a step, on the CPU: the two compete for memory bandwidth."""
        self.is_throttled = self.world.device.type == "cpu"
        try:
            yield
        finally:
            self.is_throttled = False

    @property
    def is_written(self) -> bool:
        """True if the save in flight has ended on this rank."""
        return self.in_flight is not None and self.in_flight.done()

    @property
    def is_overdue(self) -> bool:
        """True if the save in flight has exceeded its time limit on this rank."""
        return self.in_flight is not None and not self.in_flight.done() and time.monotonic() > self._overdue_at

    def check(self, state: TrainState) -> None:
        """Raise UserError on all ranks if the state cannot be saved or differs between them.  Two gathers."""

        def try_to_collect() -> Snapshot:
            state.check_complete()
            try:
                return collect(state, self.world.size)
            except TypeError as error:
                raise UserError(str(error)) from error

        snapshot = self.world.agreed(try_to_collect)
        checksums = self.world.gather(snapshot.checksums)
        try:
            keys_differing_between_ranks(snapshot, checksums)
        except UnsavableState as error:
            raise UserError(str(error)) from error

    def start(self, state: TrainState, background: bool, replaced_steps: Sequence[int] = ()) -> None:
        """Start saving `state` as it is now.

        With `background`, training pauses only for a copy; otherwise the state must not change until `take_result`
        returns.  `replaced_steps`: earlier steps at which a save was due, which this save replaces.

        No save may be in flight.  Errors are in the result.  But with one rank, raises UserError for a state that
        cannot be saved at all; and raises TrainingFailed if an earlier save has exceeded its time limit.
        No collective on this thread, except that the first save, and one after a rank was lost, opens a process group.
        """
        assert self.in_flight is None, "one save at a time: call take_result() for the previous one first"
        from torch.distributed.checkpoint import async_save

        started = time.perf_counter()
        if self._is_abandoned:
            raise TrainingFailed("cannot save: an earlier save has not ended")
        self.activity = _WAITING
        tools, channel = self._open_tools()
        self._overdue_at = time.monotonic() + self._timeout_s
        snapshot = take_snapshot(state, self.world.size)
        if snapshot.mistake and self.world.size == 1:  # no other rank waits for this one
            raise UserError(snapshot.mistake)
        snapshot.replaced_steps = replaced_steps
        tools.planner.begin(snapshot)
        tools.writer.begin(state, snapshot)
        upload = async_save(
            {"state": snapshot.tensors},  # nested: DCP spends 25 us on each value at the top, while training waits
            storage_writer=tools.writer,
            planner=tools.planner,
            process_group=channel.group,
            async_stager=tools.copy_stager if background else tools.live_stager,
        )
        assert isinstance(upload, Future)
        self.in_flight = Future()
        upload.add_done_callback(partial(self._end, self.in_flight, snapshot.step, started))
        self._blocked_s = time.perf_counter() - started if background else None

    def _end(self, ended: Future[SaveResult], step: int, started: float, upload: Future[Any]) -> None:
        """Set the result of a save that has ended on this rank, and prune, on the background thread."""
        assert self._tools is not None
        path, storage = self._tools.writer.checkpoint_id, self.storage
        result = SaveResult(step, path, total_s=time.perf_counter() - started)
        error, pruned = upload.exception(), list[str]()
        try:
            if error is not None:
                result = self._failed(result, error)
                self._tools.writer.discard()
            elif self.world.is_main:
                result = replace(result, bytes=self._tools.writer.manifest.num_bytes)
                if self._tools.writer.may_prune:
                    warning, pruned = self._unpublish_obsolete()
                    result = replace(result, warning=warning)
        except Exception as unexpected:  # any error: a callback's is not reported, and training would wait in vain
            result = replace(result, error=f"{path}: {describe(unexpected)}")
        self._tools.planner.end(is_saved=error is None)
        self._tools.writer.end()
        deleting = self._deleting = Future()
        ended.set_result(result)  # before the deletion, which takes longer
        self._delete(storage, pruned)
        deleting.set_result(None)

    def _failed(self, result: SaveResult, error: BaseException) -> SaveResult:
        """Return the result of a save in which DCP has raised an error."""
        from torch.distributed.checkpoint import CheckpointException

        if not isinstance(error, CheckpointException):  # a collective: another rank has died or does not respond
            lost = f"rank {self.world.rank}: lost the other ranks while saving: {describe(error)}"
            _drop_frames(error)  # they refer to the process group
            self._close_channel()  # so that ranks that wait for this one fail too
            return replace(result, error=f"{result.path}: {lost}", lost="ranks")
        errors = [error for error, _ in error.failures.values()]  # the same on all ranks
        is_disk_full = any(isinstance(error, DiskFull) for error in errors)
        return replace(
            result,
            error=f"{result.path}: {describe_failures(error.failures)}{_DISK_FULL_ADVICE * is_disk_full}",
            is_mistake=any(isinstance(error, UnsavableState) for error in errors),
            is_disk_full=is_disk_full,
        )

    def _unpublish_obsolete(self) -> tuple[str, list[str]]:
        """Unpublish obsolete checkpoints, on rank 0.

        Returns a warning if this or the previous deletion failed, and the names to delete, which takes longer.
        """
        warning, self._warning = self._warning, ""
        unpublished: list[str] = []
        with self.doing(f"pruning {self.storage}"):
            try:
                for name in self.retention.obsolete():
                    unpublished.append(self.storage.unpublish(name))
            except Exception as error:  # any error: the new checkpoint is already published
                warning = f"cannot delete old checkpoints: {describe(error)}"
        return warning, unpublished

    def _delete(self, storage: Storage, names: Sequence[str]) -> None:
        try:
            for name in names:
                storage.delete(name)
        except Exception as error:  # the next start deletes the rest
            self._warning = f"cannot delete old checkpoints: {describe(error)}"

    def take_result(self) -> SaveResult:
        """Wait for the save in flight and return its result, the same on all ranks.  Collective: one gather.

        If the save exceeds its time limit, the result says that the storage does not respond.
        """
        future = self.in_flight
        assert future is not None
        self.is_throttled = False  # training waits here
        try:
            result = future.result(max(0.0, self._overdue_at - time.monotonic()))
        except FutureTimeout:
            path = f"{self.storage}/{CHECKPOINT_PREFIX}*"
            late = f"rank {self.world.rank} is still {self.activity} after {self._timeout_s:.0f} s"
            result = SaveResult(-1, path, error=late, lost="storage")
        result = replace(result, blocked_s=result.total_s if self._blocked_s is None else self._blocked_s)
        outcomes = self.world.gather((result.error, result.lost, self.activity))
        all_lost = {lost for _, lost, _ in outcomes}
        if all_lost != {""}:
            # Prefer the error of a rank that was working to those of ranks that were waiting for it.
            working_errors = [error for error, lost, activity in outcomes if lost and activity != _WAITING]
            first = next(error for error in [*working_errors, *(error for error, *_ in outcomes)] if error)
            result = replace(result, error=first, lost="storage" if "storage" in all_lost else "ranks")
            self._is_abandoned = result.lost == "storage"
            if result.lost == "ranks" and self._tools is not None:
                self._close_channel()  # the next save opens another one
                self._tools.planner.end(is_saved=False)
        self.in_flight = None
        return result

    def wait(self, timeout_s: float) -> None:
        """Wait for a save in flight to end, for a limited time, before this rank exits.  Not collective."""
        future = self.in_flight
        self.is_throttled = False
        if future is not None:
            with contextlib.suppress(FutureTimeout):
                future.exception(timeout_s)  # any exception is raised when the result is taken

    def wait_for_deletion(self) -> None:
        """Wait for the deletion of pruned checkpoints, up to a time limit; the next start deletes the rest."""
        deleting, self._deleting = self._deleting, None
        if deleting is not None:
            with contextlib.suppress(FutureTimeout):
                deleting.result(_DELETE_TIMEOUT_S)

    def clean(self) -> None:
        """Delete the leftovers of interrupted saves, on rank 0.  Only the owner of the run may call this."""
        if self.world.is_main:
            self.wait_for_deletion()
            self.storage.clean(CHECKPOINT_PREFIX)

    @contextlib.contextmanager
    def doing(self, activity: str) -> Iterator[None]:
        """Set `activity` while the block, which may hang, is running."""
        self.activity = activity
        try:
            yield
        finally:
            self.activity = _WAITING

    def _open_tools(self) -> tuple[_Tools, Channel]:
        """Return what saves need.  Collective if they are opened: by the first save, and after a rank was lost."""
        if self._tools is None:
            # Imported here because torch.distributed.checkpoint is 70 modules, which take 0.05 s to import.
            from trainer.checkpoint.planner import ColumnSavePlanner
            from trainer.checkpoint.run_writer import RunWriter
            from trainer.checkpoint.stager import CopyStager, LiveStager

            planner = ColumnSavePlanner()
            writer = RunWriter(self, planner, self._section.torch_metadata)
            self._tools = _Tools(planner, writer, CopyStager(planner, self.world.device), LiveStager())
        if self._channel is None:
            # Ranks wait on this channel for storage, which takes longer than the messages on other channels.
            self._channel = self.world.open_channel(timedelta(seconds=2 * self._timeout_s))
        return self._tools, self._channel

    def _close_channel(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            self.world.close_channel(channel)


def _drop_frames(error: BaseException | None) -> None:
    """Drop the tracebacks of an error, and of the errors that led to it."""
    while error is not None:
        error.__traceback__ = None
        error = error.__context__
