"""Saves checkpoints: collects, writes, verifies, publishes and prunes.

Training pauses only while the state is collected and copied.  A background thread on each rank then writes, using a
separate channel for its collectives.  Every rank writes its file and flushes it to disk; rank 0 checks that nothing is
missing, writes the manifest, publishes, and only then prunes.  An error on any rank is reported as the same message on
all ranks.  A failed attempt is deleted, and published checkpoints are untouched.  If a rank dies during a save, or if
the deletion fails as well, the unpublished folder remains until the next start of the run deletes it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from hashlib import sha256
from typing import Any, Literal, TypeVar

import torch

from trainer.checkpoint.layout import WrittenChunks, layout_of, layout_to_json
from trainer.checkpoint.manifest import (
    INDEX,
    PREFIX,
    Manifest,
    blocks_name,
    name_of,
    rank_file,
)
from trainer.checkpoint.reader import CheckpointReader
from trainer.checkpoint.retention import RetentionPolicy
from trainer.checkpoint.snapshot import (
    RunInfo,
    Savable,
    Snapshot,
    collect,
    parts_differing_between_ranks,
    store_per_rank,
)
from trainer.checkpoint.storage import (
    COMMIT,
    DISK_FULL_ADVICE,
    DOUBTFUL,
    Storage,
    check_visible,
    checksum_of,
    describe,
    merge_errors,
    write_files,
)
from trainer.checkpoint.tensors import SavePlans, Staging, write_tensors
from trainer.config import CheckpointSection
from trainer.distributed.channel import Channel
from trainer.distributed.world import World
from trainer.errors import UserError
from trainer.files import readable_size

Result = TypeVar("Result")

_DELETE_TIMEOUT_S = 60.0
_WAITING = "waiting for the other ranks"
_FREE_MARGIN = 1.02
"""Free space that a save requires, as a multiple of its tensors' size.  Other files are negligible."""


@dataclass(frozen=True)
class SaveSettings:
    """Settings of saving and retention."""

    keep_last: int = 2
    keep_every: int = 0
    keep_best: int = 0
    metric: str = "loss"
    """The metric that ranks evaluations."""
    checksums: bool = True
    timeout_s: float = 3600.0
    """Time limit of a save, after which the storage is considered lost."""

    @classmethod
    def of(cls, section: CheckpointSection, metric: str = "loss") -> SaveSettings:
        """Build the settings from the configuration.

        The timeout here is longer than `checkpoint.timeout_s`: the watchdog, if there is one, ends the run first.
        """
        kept = (section.keep_last, section.keep_every, section.keep_best, metric)
        return cls(*kept, section.verify == "full", 1.2 * section.timeout_s + 30.0)


@dataclass(frozen=True)
class SaveResult:
    """The outcome of one save, the same on all ranks except for the times."""

    step: int
    path: str
    bytes: int = 0
    """Total size of all files."""
    blocked_s: float = 0.0
    """Time that training was paused."""
    total_s: float = 0.0
    """Time from the start until the checkpoint was published."""
    error: str = ""
    """What went wrong and where; empty if the checkpoint was published."""
    warning: str = ""
    lost: Literal["", "ranks", "storage"] = ""
    """What did not respond in time, if that was the failure."""


class Checkpoints:
    """The checkpoints in one folder.  All ranks must call each method, unless it says otherwise."""

    def __init__(self, storage: Storage, world: World, settings: SaveSettings, facts: RunInfo) -> None:
        self.storage, self.world, self.settings, self.facts = storage, world, settings, facts
        self._has_channels = False
        self._plans = SavePlans(world)
        self._staging = Staging(world.device)
        self.reader = CheckpointReader(storage, world, settings.checksums)
        """Access to existing checkpoints."""
        self._retention = self._make_retention(storage)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint", initializer=_lower_priority)
        self._in_flight: Future[SaveResult] | None = None
        self.is_throttled = False
        """True during a training step on the CPU, when the background writer should leave it memory bandwidth."""
        self._overdue_at = 0.0
        self.stage = _WAITING
        """Description of what the save in flight is doing."""
        self._deleting: Future[None] | None = None
        self._warning = ""
        self._sent_chunks: Any = None
        self._chunks_by_rank: dict[int, WrittenChunks] = {}
        self._layout_files: dict[str, bytes] = {}

    def _make_retention(self, storage: Storage) -> RetentionPolicy:
        kept = self.settings
        return RetentionPolicy(storage, kept.keep_last, kept.keep_every, kept.keep_best, kept.metric)

    def move_to(self, storage: Storage) -> None:
        """Save to another folder from now on.  No save may be in flight."""
        assert self._in_flight is None, "its files are in the earlier place"
        self.storage = storage
        self.reader = CheckpointReader(storage, self.world, self.settings.checksums)
        self._retention = self._make_retention(storage)

    def begin_step(self, step: int) -> None:
        """Throttle background writing during a step on the CPU, for which it would take memory bandwidth."""
        self.is_throttled = self.world.device.type == "cpu"

    def end_step(self, step: int) -> None:
        """Stop throttling background writing."""
        self.is_throttled = False

    @property
    def in_flight(self) -> bool:
        """True if a save has been started and its result has not been taken."""
        return self._in_flight is not None

    @property
    def is_written(self) -> bool:
        """True if the save in flight has ended on this rank."""
        return self._in_flight is not None and self._in_flight.done()

    @property
    def is_overdue(self) -> bool:
        """True if the save in flight has exceeded its time limit on this rank."""
        return self.in_flight and not self.is_written and time.monotonic() > self._overdue_at

    def _open_channels(self) -> None:
        """Open a channel for the writing thread and one for its results, before the first save.  Collective.

        They are not opened earlier because each open channel costs some CPU time (see `Channel`).
        """
        if not self._has_channels:
            self._channel, self._results = self._open_channel(), self._open_channel()
            self._has_channels = True

    def _open_channel(self) -> Channel:
        # Ranks wait here for storage, which takes longer than any other message between ranks.
        return self.world.open_channel(timedelta(seconds=2 * self.settings.timeout_s))

    def check(self, state: Savable) -> None:
        """Raise UserError on all ranks if the state cannot be saved, before hours of training are spent on it."""

        def try_to_collect() -> None:
            state.check_complete()
            try:
                collect(state, self.world.size)
            except TypeError as error:
                raise UserError(str(error)) from error

        self.world.agreed(try_to_collect)

    def is_among_the_best(self, evaluation: Mapping[str, float]) -> bool:
        """Return whether a state with this evaluation should be saved as one of the best.  One broadcast."""
        is_best = True  # if the storage is unreachable, the save will report it
        with contextlib.suppress(OSError):
            is_best = self.world.is_main and self._retention.would_keep(evaluation)
        return self.world.broadcast(is_best)

    def start(self, state: Savable, background: bool, due: Sequence[int] = ()) -> None:
        """Start saving `state` as it is now.

        With `background`, training pauses only for a copy; otherwise the state must not change until `take` returns
        the result.  `due`: earlier steps whose due saves this save replaces.

        No save may be in flight.  Raises UserError for state that cannot be saved at all.
        Collectives: one gather of small messages; the first time, also those of planning and of opening process groups.
        """
        assert self._in_flight is None, "one save at a time: take() the result of the previous one first"
        started = time.perf_counter()
        self._open_channels()
        self._overdue_at = time.monotonic() + self.settings.timeout_s
        snapshot, mistake, failure = None, None, ""
        try:
            state.check_complete()
            snapshot = collect(state, self.world.size)
            snapshot.due = due
        except (TypeError, UserError) as error:
            mistake = str(error)
        except Exception as error:
            failure = f"cannot collect the state: {describe(error)}"
        stale = snapshot is not None and self._plans.is_stale(snapshot.tensors)
        everybody = self.world.gather((mistake, failure, stale, snapshot.digests if snapshot else {}))
        _raise_first_mistake([mistake for mistake, *_ in everybody])
        failed = merge_errors(failure for _, failure, *_ in everybody)
        if failed or snapshot is None:
            self._in_flight = _done(self._failed(state.step, failed, started))
            return
        differing_parts = parts_differing_between_ranks([digests for *_, digests in everybody])
        if differing_parts:
            store_per_rank(state, snapshot, differing_parts, self.world)
        if any(stale for _, _, stale, _ in everybody):
            self._layout_files, self._chunks_by_rank, self._sent_chunks = {}, {}, None
            try:
                self._plans.make(snapshot.tensors)
            except Exception as error:
                self._in_flight = _done(self._failed(state.step, f"cannot plan: {describe(error)}", started))
                return
        failure, tensors = "", snapshot.tensors
        if background:
            try:
                tensors = self._staging.copy(snapshot.tensors, self._plans.boxes)
            except Exception as error:
                failure = f"cannot copy the state: {describe(error)}"
        blocked_s = time.perf_counter() - started if background else None
        self._in_flight = self._thread.submit(self._save, snapshot, tensors, failure, state, started, blocked_s)

    def take(self, has_ended: bool = False) -> SaveResult:
        """Wait for the save in flight and return its result, the same on all ranks.  Collective: one gather.

        After the time limit of a save, the result says that the storage does not respond.  `has_ended`: the save has
        ended on every rank, so that a rank that does not respond now is lost for reasons other than its storage.
        """
        future = self._in_flight
        assert future is not None
        self.is_throttled = False  # training waits here
        try:
            result = future.result(max(0.0, self._overdue_at - time.monotonic()))
        except FutureTimeout:
            path = f"{self.storage}/{PREFIX}*"
            late = f"rank {self.world.rank} is still {self.stage} after {self.settings.timeout_s:.0f} s"
            result = SaveResult(-1, path, error=late, lost="storage")
        channel = self.world if has_ended else self._results
        everybody = channel.gather((result.error, result.lost, self.stage))
        lost = {kind for _, kind, _ in everybody}
        if lost != {""}:
            to_blame = [error for error, kind, stage in everybody if kind and stage != _WAITING]
            first = next(error for error in [*to_blame, *(error for error, *_ in everybody)] if error)
            result = dataclasses.replace(result, error=first, lost="storage" if "storage" in lost else "ranks")
            if result.lost == "ranks":  # messages of the failed save may be left in the old channel
                self._channel = self._open_channel()
                self._layout_files, self._chunks_by_rank, self._sent_chunks = {}, {}, None
        self._in_flight = None
        return result

    def wait(self, timeout_s: float) -> None:
        """Give a save in flight time to end before this rank exits.  Not collective."""
        future = self._in_flight
        self.is_throttled = False
        if future is not None:
            with contextlib.suppress(FutureTimeout):
                future.exception(timeout_s)  # any exception is raised when the result is taken

    def wait_for_deleting(self) -> None:
        """Wait for the deletion of pruned checkpoints, up to a limit; the next start deletes the rest."""
        deleting, self._deleting = self._deleting, None
        if deleting is not None:
            with contextlib.suppress(FutureTimeout):
                deleting.result(_DELETE_TIMEOUT_S)

    def _save(
        self,
        snapshot: Snapshot,
        tensors: Mapping[str, torch.Tensor],
        error: str,
        state: Savable,
        started: float,
        blocked_s: float | None,
    ) -> SaveResult:
        """Write and publish.  All ranks execute the same collectives, even if some of them fail."""
        final = name_of(snapshot.step)
        outcome, lost_ranks, folder = ("", 0), False, self.storage / final
        try:
            (all_bytes,) = self._channel.sum([self._plans.num_bytes])
            is_good = snapshot.num_skipped == 0 and state.num_skipped == 0
            begun = self._in_stage(f"making {folder}", lambda: self._begin(final, int(all_bytes), may_prune=is_good))
            unpublished, failed = self._channel.broadcast(begun)
            if not failed:
                written = None
                if not error:
                    own = (self.storage / unpublished, snapshot, tensors)
                    written, error = self._in_stage(f"writing {folder}", lambda: self._write_own(*own))
                reports = self._channel.gather_to_main((error, written))
                failed = merge_errors(report[0] for report in reports)
                end = (unpublished, final, snapshot, reports, failed)
                outcome = self._channel.broadcast(self._in_stage(f"publishing {folder}", lambda: self._finish(*end)))
            else:
                outcome = (failed, 0)
        except RuntimeError as gone:  # torch.distributed: another rank has died or timed out
            outcome = (f"rank {self.world.rank}: lost the other ranks while saving: {describe(gone)}", 0)
            lost_ranks = True
        failed, num_bytes = outcome
        total_s = time.perf_counter() - started
        # If steps were being skipped then or are now, the older checkpoints may be the only good ones.
        is_in_doubt = snapshot.num_skipped > 0 or state.num_skipped > 0
        warning = "" if failed or is_in_doubt else self._in_stage(f"pruning {self.storage}", self._prune)
        path = f"{self.storage}/{final}"
        if failed:
            failed = f"{path}: {failed}"
        blocked_s = total_s if blocked_s is None else blocked_s
        lost: Literal["", "ranks"] = "ranks" if lost_ranks else ""
        return SaveResult(snapshot.step, path, num_bytes, blocked_s, total_s, failed, warning, lost)

    def _in_stage(self, stage: str, work: Callable[[], Result]) -> Result:
        """Run a part of a save that may hang, with `stage` describing it meanwhile."""
        self.stage = stage
        result = work()
        self.stage = _WAITING
        return result

    def _failed(self, step: int, error: str, started: float) -> SaveResult:
        elapsed = time.perf_counter() - started
        path = f"{self.storage}/{name_of(step)}"
        return SaveResult(step, path, 0, elapsed, elapsed, f"{path}: {error}")

    def _begin(self, final: str, all_bytes: int, may_prune: bool) -> tuple[str, str]:
        """On rank 0, check the free space and create the folder.  Returns its temporary name, or an error.

        With `may_prune`, checkpoints that this one makes obsolete are deleted beforehand if the disk is too full.
        """
        if not self.world.is_main:
            return "", ""
        try:
            self.wait_for_deleting()
            free = self.storage.free_bytes()
            if free is not None and free < all_bytes * _FREE_MARGIN and may_prune:
                for name in self._retention.obsolete_after_next():
                    self.storage.delete(self.storage.unpublish(name))
                free = self.storage.free_bytes()
            if free is not None and free < all_bytes * _FREE_MARGIN:
                lack = f"{self.storage} has {readable_size(free)} free, the checkpoint needs {readable_size(all_bytes)}"
                return "", f"rank 0: {lack}; {DISK_FULL_ADVICE}"
            return self.storage.begin(final), ""
        except Exception as error:
            return "", f"rank 0: {describe(error)}"

    def _write_own(
        self, folder: Storage, snapshot: Snapshot, tensors: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, Any] | None, str]:
        """Write this rank's files.  Returns a report for rank 0, or an error."""
        rank = self.world.rank

        def throttle(worked_s: float) -> None:
            """Pause for as long as the write took, to leave memory bandwidth and caches to the current step."""
            if self.is_throttled:
                time.sleep(worked_s)

        try:
            files = {}
            written = write_tensors(folder, rank, self._plans.boxes, tensors, snapshot.weights, throttle)
            if written is not None:
                files[written.file] = (written.num_bytes, checksum_of(written.blocks))
                listed = json.dumps(written.blocks, separators=(",", ":")).encode()
                files |= write_files(folder, {blocks_name(written.file): listed})
            files |= write_files(folder, {rank_file(rank): snapshot.own})
        except Exception as error:
            return None, f"{folder}: {describe(error)}"
        chunks = written.chunks if written is not None else []
        is_known = chunks == self._sent_chunks
        self._sent_chunks = chunks
        return {"files": files, "chunks": None if is_known or written is None else written.placed}, ""

    def _finish(
        self, unpublished: str, final: str, snapshot: Snapshot, reports: list[Any], failed: str
    ) -> tuple[str, int]:
        """On rank 0, publish the checkpoint or delete the failed attempt.  Returns the error and the total bytes."""
        if not self.world.is_main:
            return "", 0
        self._note_chunks(reports)
        if not failed:
            try:
                manifest = self._write_common(self.storage / unpublished, snapshot, reports)
                self.storage.publish(unpublished, final)
            except Exception as error:
                failed = f"rank 0: {describe(error)}"
            else:
                self._retention.note(manifest)
                return "", manifest.num_bytes
        with contextlib.suppress(Exception):  # storage may fail here too; the next start cleans up
            self.storage.delete(unpublished)
        return failed, 0

    def _note_chunks(self, reports: list[Any]) -> None:
        """Remember the positions of each rank's chunks in its file.  Ranks report them only if they have changed."""
        for rank, (_, report) in enumerate(reports):
            if report is not None and report["chunks"] is not None:
                self._chunks_by_rank[rank] = report["chunks"]
                self._layout_files = {}

    def _write_common(self, folder: Storage, snapshot: Snapshot, reports: list[Any]) -> Manifest:
        """Write the files that are common to all ranks, the manifest last."""
        from trainer.checkpoint.dcp import pickled_metadata

        if not self._layout_files:
            placed = list(self._chunks_by_rank.values())
            layout = layout_of(self._plans.planned, placed)
            self._layout_files = {
                "layout.json": layout_to_json(layout, [part.file for part in placed]).encode(),
                INDEX: pickled_metadata(layout, snapshot.paths),
            }
        common = {
            **self._layout_files,
            "state.json": snapshot.document.encode(),
            "config.yaml": self.facts.config_yaml.encode(),
        }
        files = {name: entry for _, report in reports for name, entry in report["files"].items()}
        for rank, (_, report) in enumerate(reports):
            for name, (size, _) in report["files"].items():
                check_visible(folder, name, size, rank)
        files |= write_files(folder, common)
        manifest = Manifest(
            step=snapshot.step,
            world_size=self.world.size,
            mesh=dict(self.facts.mesh),
            torch=torch.__version__,
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            config_sha256=sha256(common["config.yaml"]).hexdigest(),
            files=files,
            extra={
                "job": self.facts.job,
                "restarts": self.facts.restarts,
                "num_skipped": snapshot.num_skipped,
                "due": list(snapshot.due),
                "evaluation": dict(snapshot.evaluation),
                "metric": self.settings.metric,
            },
        )
        write_files(folder, {COMMIT: manifest.to_json().encode()})
        return manifest

    def _prune(self) -> str:
        """On rank 0, delete obsolete checkpoints.  Returns an error, which does not affect the save itself.

        They are unpublished immediately and deleted in the background, since unlinking gigabytes takes a while.
        """
        if not self.world.is_main:
            return ""
        earlier, self._warning = self._warning, ""
        unpublished: list[str] = []
        try:
            for name in self._retention.obsolete():
                unpublished.append(self.storage.unpublish(name))
        except Exception as error:
            earlier = f"cannot delete old checkpoints: {describe(error)}"
        if unpublished:
            self._deleting = self._thread.submit(
                self._in_stage, f"deleting in {self.storage}", lambda: self._delete(unpublished)
            )
        return earlier

    def _delete(self, names: list[str]) -> None:
        try:
            for name in names:
                self.storage.delete(name)
        except Exception as error:  # the next start deletes the rest
            self._warning = f"cannot delete old checkpoints: {describe(error)}"

    def clean(self) -> None:
        """Delete the leftovers of interrupted saves, on rank 0.  Only the owner of the run may call this."""
        if self.world.is_main:
            self.wait_for_deleting()
            self.storage.clean(PREFIX)

    def quarantine_since(self, since: int) -> str:
        """Quarantine checkpoints saved since step `since`, after which every step was skipped.

        The next start then resumes from an older checkpoint, if there is one; no checkpoint is quarantined twice.
        Returns a message that describes what was done or what went wrong.

        Not collective: for rank 0 of a run that has failed.
        """
        if not self.world.is_main or (self.in_flight and not self.is_written):
            return ""
        try:
            names = self._retention.names_to_quarantine(since)
            for name in names:
                self.storage.quarantine(name, DOUBTFUL)
        except Exception as error:  # the storage has failed as well: leave the checkpoints in place
            return f"cannot set aside the checkpoints saved after step {since}: {describe(error)}"
        done = ", ".join(f"{name} was set aside as {DOUBTFUL}-{name}" for name in names)
        return done and f"every step since then failed: {done}; the same command resumes from the checkpoint before it"


def _lower_priority() -> None:
    """Lower this thread's priority, so that the training step wins if both compete for a core."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)  # on Linux this affects only this thread


def _done(result: SaveResult) -> Future[SaveResult]:
    future: Future[SaveResult] = Future()
    future.set_result(result)
    return future


def _raise_first_mistake(mistakes: list[str | None]) -> None:
    for rank, mistake in enumerate(mistakes):
        if mistake is not None:
            raise UserError(f"rank {rank}: {mistake}")
