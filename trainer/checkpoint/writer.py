"""Snapshots the state, writes and checks the files of a checkpoint, publishes it, and prunes old checkpoints.

A background save pauses training only while the state is collected and copied.  A thread on each rank then writes the
copy, using a separate process group (`Channel`) for its collectives.  Every rank writes its files and flushes them to
disk; rank 0 checks that nothing is missing, writes the manifest and publishes the checkpoint.  Obsolete checkpoints are
deleted afterwards, or before the save if the disk is too full for it; at least one good checkpoint always remains.
If any rank fails, all ranks report the same error, and the files of the failed save are deleted.  If a rank dies during
a save, or if the files cannot be deleted, the unpublished folder remains until the run is next started.

Read `Checkpoints.start` and `Checkpoints._save` first.  Collecting, planning, staging and writing each have a section
below.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from trainer.checkpoint.layout import (
    Boxes,
    Chunk,
    PlannedTensor,
    TensorBox,
    Tensors,
    WrittenChunks,
    choose_writers,
    layout_of,
    layout_to_json,
    local_boxes,
    padded_rows,
    pickled_metadata,
)
from trainer.checkpoint.manifest import (
    CHECKPOINT_PREFIX,
    TORCH_METADATA,
    Manifest,
    RunInfo,
    blocks_name,
    checkpoint_name,
    rank_file,
)
from trainer.checkpoint.retention import RetentionPolicy
from trainer.checkpoint.state_parts import SharedState, StatePart, rank_state_to_bytes, split_state
from trainer.checkpoint.storage import (
    DISK_FULL_ADVICE,
    MANIFEST,
    Blocks,
    BlockWriter,
    Storage,
    check_visible,
    checksum_of,
    describe,
    merge_errors,
    write_files,
)
from trainer.config import CheckpointSection
from trainer.distributed.channel import Channel
from trainer.distributed.world import World
from trainer.errors import UserError, print_stderr
from trainer.files import crc32, readable_size
from trainer.model.parameters import local

if TYPE_CHECKING:
    from trainer.lifecycle.state import TrainState

_DELETE_TIMEOUT_S = 60.0
"""Maximum time to wait for the deletion of pruned checkpoints."""
_WAITING = "waiting for the other ranks"
_FREE_MARGIN = 1.02
"""Free space that a save requires, as a multiple of the size of its tensors; the other files are small."""


@dataclass(frozen=True)
class SaveResult:
    """The outcome of one save, the same on all ranks except for the times and for `warning`, which only rank 0 has.

    If `lost` is set, only `error` and `lost` are the same on all ranks.
    """

    step: int
    path: str
    bytes: int = 0
    """Total size of the files, without the manifest; 0 if the save failed."""
    blocked_s: float = 0.0
    """Time that training was paused."""
    total_s: float = 0.0
    """Time from the start until the checkpoint was published, or until the save failed."""
    error: str = ""
    """What went wrong and where; empty if the checkpoint was published."""
    warning: str = ""
    """The error of the last deletion of pruned checkpoints; empty if it succeeded."""
    lost: Literal["", "ranks", "storage"] = ""
    """What did not respond in time, if the save failed for that reason."""


@dataclass(frozen=True)
class Readiness:
    """What each rank reports to the others before anything is written."""

    mistake: str
    """Why the rank's state cannot be saved at all; empty if it can be."""
    failure: str
    """Why the state could not be collected this time; empty if it could be."""
    needs_plan: bool
    """True if the last plan does not match the rank's tensors."""
    digests: Mapping[str, PartDigest]
    """Checksums of each part of the state, by name; empty with one rank."""


@dataclass(frozen=True)
class RankReport:
    """A rank's report to rank 0: what it has written, or why it could not."""

    error: str = ""
    files: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Size and checksum of each file."""
    chunks: WrittenChunks | None = None
    """The chunks in the rank's data file; None if it has none or they have not changed since its last report."""


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
        self.world, self._section, self._run_info = world, section, run_info
        self._metric, self._higher_is_better = metric, higher_is_better
        self._timeout_s = 1.2 * section.timeout_s + 30.0  # the watchdog, if there is one, ends the run first
        self.in_flight: Future[SaveResult] | None = None
        """The save that has been started, until `take_result` returns its result."""
        self.move_to(storage)
        self._has_channels = False
        self._plans = SavePlans(world)
        self._staging = Staging(world.device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint", initializer=_lower_priority)
        self.is_throttled = False
        """True during a training step on the CPU: the background writer then leaves memory bandwidth to the step."""
        self._overdue_at = 0.0
        self.stage = _WAITING
        """What the save in flight is doing now, as text for messages."""
        self._deleting: Future[None] | None = None
        self._warning = ""
        """The error of the last deletion; empty if it succeeded."""
        self._sent_chunks: list[tuple[str, Chunk]] | None = None
        """The chunks in this rank's last report; None if it must report its chunks again."""
        self._chunks_by_rank: dict[int, WrittenChunks] = {}
        """The chunks in every rank's last report.  On rank 0 only."""
        self._layout_files: dict[str, bytes] = {}
        """Contents of the files that describe those chunks, by name; empty if they must be built.  On rank 0 only."""

    def move_to(self, storage: Storage) -> None:
        """Save to this folder from now on.  No save may be in flight."""
        assert self.in_flight is None, "the save in flight writes to the old folder"
        self.storage = storage
        self.retention = RetentionPolicy(storage, self._section, self._metric, self._higher_is_better)

    def begin_step(self, step: int) -> None:
        """Throttle background writing during a step on the CPU, because the two compete for memory bandwidth."""
        self.is_throttled = self.world.device.type == "cpu"

    def end_step(self, step: int) -> None:
        """Stop throttling background writing."""
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
        """Raise UserError on all ranks if the state cannot be saved, before hours of training are lost.  One gather."""

        def try_to_collect() -> None:
            state.check_complete()
            try:
                collect(state, self.world.size)
            except TypeError as error:
                raise UserError(str(error)) from error

        self.world.agreed(try_to_collect)

    def start(self, state: TrainState, background: bool, replaced_steps: Sequence[int] = ()) -> None:
        """Start saving `state` as it is now.

        With `background`, training pauses only for a copy; otherwise the state must not change until `take_result`
        returns.  `replaced_steps`: earlier steps at which a save was due, which this save replaces.

        No save may be in flight.  Raises UserError for state that cannot be saved at all.
        Collectives: one gather of small messages; another one if unsharded tensors differ between ranks; those of
        `SavePlans.make` if the tensors have changed; and at the first save, the creation of two process groups.
        """
        assert self.in_flight is None, "one save at a time: call take_result() for the previous one first"
        started = time.perf_counter()
        if not self._has_channels:  # not opened earlier because each one costs some CPU time (see `Channel`)
            # One for the save's thread, one for the main thread, which gathers the results.
            self._channel, self._result_channel = self._open_channel(), self._open_channel()
            self._has_channels = True
        self._overdue_at = time.monotonic() + self._timeout_s
        snapshot, mistake, failure = None, "", ""
        try:
            state.check_complete()
            snapshot = collect(state, self.world.size)
            snapshot.replaced_steps = replaced_steps
        except (TypeError, UserError) as error:
            mistake = str(error) or repr(error)
        except Exception as error:  # any error: the other ranks wait in the gather below
            failure = f"cannot collect the state: {describe(error)}"
        needs_plan = snapshot is not None and signature_of(snapshot.tensors) != self._plans.signature
        readiness_by_rank: list[Readiness] = self.world.gather(
            Readiness(mistake, failure, needs_plan, snapshot.digests if snapshot else {})
        )
        for rank, readiness in enumerate(readiness_by_rank):
            if readiness.mistake:
                raise UserError(f"rank {rank}: {readiness.mistake}")
        failures = merge_errors(readiness.failure for readiness in readiness_by_rank)
        if failures or snapshot is None:
            self._fail_at_once(state.step, failures, started)
            return
        differing_parts = parts_differing_between_ranks([readiness.digests for readiness in readiness_by_rank])
        if differing_parts:
            store_per_rank(state, snapshot, differing_parts, self.world)
        if any(readiness.needs_plan for readiness in readiness_by_rank):
            self._forget_layout()
            try:
                self._plans.make(snapshot.tensors)
            except Exception as error:  # any error: the save fails, but not the run
                self._fail_at_once(state.step, f"cannot plan: {describe(error)}", started)
                return
        failure, tensors = "", snapshot.tensors
        if background:
            try:
                tensors = self._staging.copy(snapshot.tensors, self._plans.boxes)
            except Exception as error:  # any error: `_save` reports it to the other ranks
                failure = f"cannot copy the state: {describe(error)}"
        blocked_s = time.perf_counter() - started if background else None
        self.in_flight = self._thread.submit(self._save, snapshot, tensors, failure, state, started, blocked_s)

    def _fail_at_once(self, step: int, error: str, started: float) -> None:
        """Record a save that failed before it wrote anything, as the save in flight."""
        elapsed, path = time.perf_counter() - started, f"{self.storage}/{checkpoint_name(step)}"
        self.in_flight = Future()
        self.in_flight.set_result(SaveResult(step, path, blocked_s=elapsed, total_s=elapsed, error=f"{path}: {error}"))

    def _save(
        self,
        snapshot: Snapshot,
        tensors: Mapping[str, torch.Tensor],
        error: str,
        state: TrainState,
        started: float,
        blocked_s: float | None,
    ) -> SaveResult:
        """Write and publish, on the background thread.

        All ranks execute the same collectives, even if some ranks fail.

        error: why this rank cannot write; empty if it can.
        blocked_s: how long training was paused; None if it stays paused until this method returns.
        """
        name = checkpoint_name(snapshot.step)
        folder, failure, num_bytes = self.storage / name, "", 0
        lost: Literal["", "ranks"] = ""
        try:
            (total_bytes,) = self._channel.sum([self._plans.num_bytes])
            unpublished = ""
            if self.world.is_main:
                with self._in_stage(f"creating {folder}"):
                    is_good = snapshot.num_skipped == 0 and state.num_skipped == 0
                    unpublished, failure = self._create_folder(name, int(total_bytes), may_prune=is_good)
            unpublished, failure = self._channel.broadcast((unpublished, failure))
            if not failure:
                report = RankReport(error)
                if not error:
                    with self._in_stage(f"writing {folder}"):
                        report = self._write_rank_files(self.storage / unpublished, snapshot, tensors)
                reports = self._channel.gather_to_main(report)
                if self.world.is_main:
                    with self._in_stage(f"publishing {folder}"):
                        failure, num_bytes = self._publish(unpublished, name, snapshot, reports)
                failure, num_bytes = self._channel.broadcast((failure, num_bytes))
        except RuntimeError as lost_connection:  # torch.distributed: another rank has died or timed out
            failure = f"rank {self.world.rank}: lost the other ranks while saving: {describe(lost_connection)}"
            num_bytes = 0
            lost = "ranks"
        total_s = time.perf_counter() - started
        warning = ""
        # If steps were being skipped at the snapshot or are now, the older checkpoints may be the only good ones.
        if self.world.is_main and not failure and snapshot.num_skipped == 0 and state.num_skipped == 0:
            with self._in_stage(f"pruning {self.storage}"):
                warning = self._prune()
        path = f"{self.storage}/{name}"
        return SaveResult(
            step=snapshot.step,
            path=path,
            bytes=num_bytes,
            blocked_s=total_s if blocked_s is None else blocked_s,
            total_s=total_s,
            error=f"{path}: {failure}" if failure else "",
            warning=warning,
            lost=lost,
        )

    def _create_folder(self, name: str, total_bytes: int, may_prune: bool) -> tuple[str, str]:
        """Check the free space and create the folder, on rank 0.  Returns its temporary name, and an error or "".

        With `may_prune`, checkpoints that this one will make obsolete are deleted first if the disk is too full.
        """
        try:
            self.wait_for_deletion()
            free = self.storage.free_bytes()
            if free is not None and free < total_bytes * _FREE_MARGIN and may_prune:
                for obsolete_name in self.retention.obsolete(before_next=True):
                    self.storage.delete(self.storage.unpublish(obsolete_name))
                free = self.storage.free_bytes()
            if free is not None and free < total_bytes * _FREE_MARGIN:
                problem = (
                    f"{self.storage} has {readable_size(free)} free, the checkpoint needs {readable_size(total_bytes)}"
                )
                return "", f"rank 0: {problem}; {DISK_FULL_ADVICE}"
            return self.storage.begin(name), ""
        except Exception as error:  # any error: the other ranks wait for the name
            return "", f"rank 0: {describe(error)}"

    def _write_rank_files(self, folder: Storage, snapshot: Snapshot, tensors: Mapping[str, torch.Tensor]) -> RankReport:
        """Write this rank's files; return a report for rank 0, with the error if this fails."""
        rank = self.world.rank

        def throttle(worked_s: float) -> None:
            """Pause for as long as the write took, to leave memory bandwidth and caches to the current step."""
            if self.is_throttled:
                time.sleep(worked_s)

        try:
            files = {}
            written = write_tensors(folder, rank, self._plans.boxes, tensors, snapshot.limits, throttle)
            if written is not None:
                files[written.file] = (written.num_bytes, checksum_of(written.blocks))
                checksums = json.dumps(written.blocks, separators=(",", ":")).encode()
                files |= write_files(folder, {blocks_name(written.file): checksums})
            own = rank_state_to_bytes(snapshot.per_rank_plain, snapshot.per_rank_tensors)
            files |= write_files(folder, {rank_file(rank): own})
        except Exception as error:  # any error: rank 0 waits for this report
            return RankReport(f"{folder}: {describe(error)}")
        chunks = written.chunks if written is not None else []
        is_unchanged = chunks == self._sent_chunks
        self._sent_chunks = chunks
        return RankReport(files=files, chunks=None if is_unchanged or written is None else written.written_chunks)

    def _publish(
        self, unpublished: str, name: str, snapshot: Snapshot, reports: Sequence[RankReport]
    ) -> tuple[str, int]:
        """Publish the checkpoint, or delete what was written, on rank 0.  Returns an error or "", and the size."""
        for rank, report in enumerate(reports):
            if report.chunks is not None:
                self._chunks_by_rank[rank] = report.chunks
                self._layout_files = {}
        failure = merge_errors(report.error for report in reports)
        if not failure:
            try:
                manifest = self._write_shared_files(self.storage / unpublished, snapshot, reports)
                self.storage.publish(unpublished, name)
            except Exception as error:  # any error: the other ranks wait for the result
                failure = f"rank 0: {describe(error)}"
            else:
                self.retention.record_published(manifest)
                return "", manifest.num_bytes
        with contextlib.suppress(Exception):  # storage may fail here too; the next start cleans up
            self.storage.delete(unpublished)
        return failure, 0

    def _write_shared_files(self, folder: Storage, snapshot: Snapshot, reports: Sequence[RankReport]) -> Manifest:
        """Write the files that are common to all ranks, the manifest last."""
        if not self._layout_files:
            written = list(self._chunks_by_rank.values())
            layout = layout_of(self._plans.planned, written)
            self._layout_files = {
                "layout.json": layout_to_json(layout, [chunks.file for chunks in written]).encode(),
                TORCH_METADATA: pickled_metadata(layout, snapshot.paths),
            }
        shared = SharedState(snapshot.plain, [*snapshot.per_rank_plain], snapshot.differing_keys)
        common = {
            **self._layout_files,
            "state.json": shared.to_json(snapshot.step).encode(),
            "config.yaml": self._run_info.config_yaml.encode(),
        }
        files = {name: entry for report in reports for name, entry in report.files.items()}
        for rank, report in enumerate(reports):
            for name, (size, _) in report.files.items():
                check_visible(folder, name, size, rank)
        files |= write_files(folder, common)
        manifest = Manifest(
            step=snapshot.step,
            world_size=self.world.size,
            mesh=dict(self._run_info.mesh),
            torch=torch.__version__,
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            config_sha256=sha256(common["config.yaml"]).hexdigest(),
            files=files,
            extra={
                "job": self._run_info.job,
                "restarts": self._run_info.restarts,
                "num_skipped": snapshot.num_skipped,
                "due": list(snapshot.replaced_steps),
                "evaluation": dict(snapshot.evaluation),
                "metric": self._metric,
                "higher_is_better": self._higher_is_better,
            },
        )
        write_files(folder, {MANIFEST: manifest.to_json().encode()})
        return manifest

    def _prune(self) -> str:
        """Delete obsolete checkpoints, on rank 0.  Returns a warning if this or the previous deletion failed.

        Obsolete checkpoints are unpublished immediately and deleted in the background, since deleting gigabytes takes a
        while.
        """
        warning, self._warning = self._warning, ""
        unpublished: list[str] = []
        try:
            for name in self.retention.obsolete():
                unpublished.append(self.storage.unpublish(name))
        except Exception as error:  # any error: the new checkpoint is already published
            warning = f"cannot delete old checkpoints: {describe(error)}"
        if unpublished:
            self._deleting = self._thread.submit(self._delete, unpublished)
        return warning

    def _delete(self, names: list[str]) -> None:
        with self._in_stage(f"deleting in {self.storage}"):
            try:
                for name in names:
                    self.storage.delete(name)
            except Exception as error:  # the next start deletes the rest
                self._warning = f"cannot delete old checkpoints: {describe(error)}"

    def take_result(self, has_ended: bool = False) -> SaveResult:
        """Wait for the save in flight and return its result, the same on all ranks.  Collective: one gather.

        If the save exceeds its time limit, the result says that the storage does not respond.  `has_ended`: whether the
        save is known to have ended on every rank, so that the storage is not to blame if a rank does not respond now.
        """
        future = self.in_flight
        assert future is not None
        self.is_throttled = False  # training waits here
        try:
            result = future.result(max(0.0, self._overdue_at - time.monotonic()))
        except FutureTimeout:
            path = f"{self.storage}/{CHECKPOINT_PREFIX}*"
            late = f"rank {self.world.rank} is still {self.stage} after {self._timeout_s:.0f} s"
            result = SaveResult(-1, path, error=late, lost="storage")
        channel = self.world if has_ended else self._result_channel
        outcomes = channel.gather((result.error, result.lost, self.stage))
        all_lost = {lost for _, lost, _ in outcomes}
        if all_lost != {""}:
            # Prefer the error of a rank that was working to those of ranks that were waiting for it.
            working_errors = [error for error, lost, stage in outcomes if lost and stage != _WAITING]
            first = next(error for error in [*working_errors, *(error for error, *_ in outcomes)] if error)
            result = dataclasses.replace(result, error=first, lost="storage" if "storage" in all_lost else "ranks")
            if result.lost == "ranks":  # messages of the failed save may be left in the old channel
                self._channel = self._open_channel()
                self._forget_layout()
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
    def _in_stage(self, stage: str) -> Iterator[None]:
        """Set `stage` while the block, which may hang, is running."""
        self.stage = stage
        yield
        self.stage = _WAITING

    def _forget_layout(self) -> None:
        """Discard rank 0's record of the other ranks' files, so that every rank reports its chunks again."""
        self._layout_files, self._chunks_by_rank, self._sent_chunks = {}, {}, None

    def _open_channel(self) -> Channel:
        # Ranks wait on this channel for storage, which takes longer than the messages on other channels.
        return self.world.open_channel(timedelta(seconds=2 * self._timeout_s))


def _lower_priority() -> None:
    """Lower this thread's priority, so that the training step wins if both compete for a core."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)  # on Linux this affects only this thread


# ---------------------------------------------------------------------------------------------------------------
# A snapshot of the state


class PartDigest(NamedTuple):
    """Checksums of one part of the state, which ranks compare to detect differences."""

    values: int
    """Checksum of everything except the tensors."""
    tensors: int
    """Checksum of the unsharded tensors."""


@dataclass
class Snapshot:
    """A snapshot of the state.  `tensors` are the live ones; a background save writes staged copies of them."""

    step: int
    tensors: dict[str, torch.Tensor]
    paths: dict[str, tuple[str, ...]]
    """The path of each tensor in the nested state dict."""
    plain: dict[str, Any]
    """Everything except the tensors, by part, as JSON values."""
    per_rank_plain: dict[str, Any]
    per_rank_tensors: dict[str, torch.Tensor]
    """CPU copies of this rank's per-rank tensors."""
    digests: dict[str, PartDigest]
    limits: Mapping[str, float]
    """Magnitude limit of each weight, by key."""
    num_skipped: int
    evaluation: Mapping[str, float] = field(default_factory=dict)
    replaced_steps: Sequence[int] = ()
    """Earlier steps at which a save was due but did not succeed, and which this save replaces."""
    differing_keys: list[str] = field(default_factory=list)
    """Keys of unsharded tensors that each rank stores separately, because their values differ."""


def collect(state: TrainState, num_ranks: int) -> Snapshot:
    """Return a snapshot of the state as it is now.  Raises TypeError for values that cannot be stored."""
    plain: dict[str, Any] = {}
    tensors: dict[str, torch.Tensor] = {}
    paths: dict[str, tuple[str, ...]] = {}
    digests = {}
    with torch.no_grad():
        for name, part in state.parts.items():
            plain[name], part_tensors = split_state(part.state_dict(), (name,))
            if num_ranks > 1:
                unsharded = [tensor for tensor in part_tensors.values() if not isinstance(tensor, DTensor)]
                text = json.dumps(plain[name]).encode()
                digests[name] = PartDigest(crc32(text), checksum_of_tensors(unsharded))
            for path, tensor in part_tensors.items():
                key = ".".join(path)
                if key in tensors:
                    raise TypeError(f"two tensors in the state have the name {key}")
                tensors[key], paths[key] = tensor, path
        per_rank_plain: dict[str, Any] = {}
        per_rank_tensors: dict[str, torch.Tensor] = {}
        for name, part in state.per_rank_parts.items():
            per_rank_plain[name], part_tensors = split_state(part.state_dict(), (name,))
            per_rank_tensors |= {".".join(path): copy_of(tensor) for path, tensor in part_tensors.items()}
    return Snapshot(
        step=state.step,
        tensors=tensors,
        paths=paths,
        plain=plain,
        per_rank_plain=per_rank_plain,
        per_rank_tensors=per_rank_tensors,
        digests=digests,
        limits=state.magnitude_limits,
        num_skipped=state.num_skipped,
        evaluation=state.evaluation,
    )


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the CPU."""
    return tensor.detach().cpu().contiguous().clone()


def checksum_of_tensors(tensors: Sequence[torch.Tensor]) -> int:
    """Return the CRC-32 of the tensors' bytes.  GPU tensors are copied to the host in one transfer."""
    crc = 0
    all_bytes = [tensor.detach().contiguous().flatten().view(torch.uint8) for tensor in tensors if tensor.numel()]
    on_cpu = [content for content in all_bytes if content.device.type == "cpu"]
    on_gpu = [content for content in all_bytes if content.device.type != "cpu"]
    for content in [*on_cpu, *([torch.cat(on_gpu).cpu()] if on_gpu else [])]:
        crc = crc32(content.numpy().data, crc)
    return crc


def parts_differing_between_ranks(digests: Sequence[Mapping[str, PartDigest]]) -> list[str]:
    """Return the parts whose unsharded tensors differ between ranks.

    digests: one mapping per rank.  Raises UserError if values other than tensors differ.
    """
    differing = []
    for name, expected in digests[0].items():
        for rank, by_part in enumerate(digests):
            if name not in by_part or by_part[name].values != expected.values:
                raise UserError(differs_message(name, "values", rank))
        if any(by_part[name].tensors != expected.tensors for by_part in digests):
            differing.append(name)
    return differing


def differs_message(name: str, what: str, rank: int) -> str:
    """Return the error message for state that should be the same on all ranks."""
    return (
        f"state {name!r}: rank {rank} does not hold the same {what} as rank 0; add state that differs between "
        f"ranks with self.state.add({name!r}, ..., per_rank=True)"
    )


def store_per_rank(state: TrainState, snapshot: Snapshot, parts: list[str], channel: Channel) -> None:
    """Store in each rank's own file the unsharded tensors of `parts` that differ between ranks.

    Raises UserError for a tensor that must not differ.  Collective: one gather.
    """
    prefixes = tuple(f"{part}." for part in parts)
    unsharded = {
        key: tensor
        for key, tensor in snapshot.tensors.items()
        if not isinstance(tensor, DTensor) and key.startswith(prefixes)
    }
    checksums = channel.gather({key: checksum_of_tensors([tensor]) for key, tensor in unsharded.items()})
    for key, expected in checksums[0].items():
        differing_ranks = [rank for rank, by_key in enumerate(checksums) if by_key.get(key) != expected]
        if not differing_ranks:
            continue
        name = max((part for part in parts if key.startswith(f"{part}.")), key=len)
        if not StatePart.of(state.parts[name]).may_differ(key.removeprefix(f"{name}.")):
            raise UserError(differs_message(name, f"values in {key}", differing_ranks[0]))
        snapshot.differing_keys.append(key)
        snapshot.per_rank_tensors[key] = copy_of(unsharded[key])


# ---------------------------------------------------------------------------------------------------------------
# Which rank writes what


def signature_of(tensors: Tensors) -> tuple[Any, ...]:
    """Return the properties of the tensors that a plan depends on."""
    return tuple(
        (key, t.dtype, tuple(t.shape), (t.placements, tuple(t.device_mesh.shape)) if isinstance(t, DTensor) else None)
        for key, t in tensors.items()
    )


class SavePlans:
    """The chunks that each rank writes, planned once and reused until the tensors' `signature_of` changes."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.signature: tuple[Any, ...] | None = None
        self.boxes: list[TensorBox] = []
        """The boxes that this rank writes."""
        self.planned: dict[str, PlannedTensor] = {}
        """The planned chunks of every tensor.  On rank 0 only."""

    @property
    def num_bytes(self) -> int:
        """Number of tensor bytes that this rank writes."""
        return sum(torch.Size(box.sizes).numel() * box.dtype.itemsize for box in self.boxes)

    def make(self, tensors: Tensors) -> None:
        """Create a new plan.  Raises on all ranks if any rank fails.

        Collectives: two small messages, a gather of all boxes to rank 0 (0.1 MB per rank for a 70B model on 512 ranks),
        and a scatter of the result.
        """

        # Tensors that are the same on all ranks are written by rank 0.
        candidates = {k: t for k, t in tensors.items() if isinstance(t, DTensor) or self._channel.is_main}
        boxes = self._channel.agreed(lambda: local_boxes(candidates))
        boxes_by_rank = self._channel.gather_to_main(Boxes.of((box.key, box.offsets, box.sizes) for box in boxes))
        masks, self.planned = self._channel.agreed(
            lambda: choose_writers(boxes_by_rank, tensors) if boxes_by_rank else ([], {})
        )
        self.boxes = [box for box, writes in zip(boxes, self._channel.scatter(masks), strict=True) if writes]
        self.signature = signature_of(tensors)


# ---------------------------------------------------------------------------------------------------------------
# Staging: a copy in host memory, so that training can continue


class Staging:
    """Host memory for a copy of the data that this rank writes, reused by every save.

    It is one buffer, allocated by the first save, and page-locked if the device is a GPU, so that copies run at full
    speed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer, self._is_locked = np.empty(0, dtype=np.uint8), False

    def copy(self, tensors: Tensors, boxes: Iterable[TensorBox]) -> dict[str, torch.Tensor]:
        """Return CPU copies of this rank's shards of the tensors in `boxes`.  Earlier copies are overwritten."""
        shards = {box.key: local(tensors[box.key]) for box in boxes}
        with torch.no_grad():
            copies = _views(self._buffer_for(shards), shards)
            for key, shard in shards.items():
                copies[key].copy_(shard, non_blocking=True)
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
        return copies

    def _buffer_for(self, shards: Tensors) -> np.ndarray[Any, Any]:
        needed = sum(_padded_bytes(shard) for shard in shards.values())
        if needed > self._buffer.nbytes:
            self._unlock()
            self._buffer = np.empty(0, dtype=np.uint8)  # free it before the larger one is allocated
            self._buffer = np.zeros(needed, dtype=np.uint8)
            if self._device.type == "cuda":
                self._is_locked = self._lock()
        return self._buffer

    def _lock(self) -> bool:
        """Page-lock the buffer.  torch's own pinned allocator would round its size up to a power of two."""
        cudart: Any = torch.cuda.cudart()
        try:
            torch.cuda.check_error(cudart.cudaHostRegister(self._buffer.ctypes.data, self._buffer.nbytes, 0))
        except RuntimeError as error:
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=self._device)  # clears CUDA's last error, which the next kernel would report
            print_stderr(
                f"warning: {self._buffer.nbytes / 2**30:.2f} GiB of host memory cannot be page-locked "
                f"({str(error).splitlines()[0]}): training pauses for longer while a save is copied"
            )
            return False
        return True

    def _unlock(self) -> None:
        if self._is_locked:
            self._is_locked = False
            cudart: Any = torch.cuda.cudart()
            torch.cuda.check_error(cudart.cudaHostUnregister(self._buffer.ctypes.data))


def _padded_bytes(tensor: torch.Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // 64) * 64


def _views(buffer: np.ndarray[Any, Any], tensors: Tensors) -> dict[str, torch.Tensor]:
    """Return views of `buffer` with the dtypes and shapes of `tensors`.

    Each has its own storage, since `torch.save` writes entire storages.
    """
    views, start = {}, 0
    for key, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        content = torch.from_numpy(buffer[start : start + size]) if size else torch.empty(0, dtype=torch.uint8)
        views[key] = content.view(tensor.dtype).view(tensor.shape)
        start += _padded_bytes(tensor)
    return views


# ---------------------------------------------------------------------------------------------------------------
# The data file of one rank.  It has the format of torch.distributed.checkpoint's `FileSystemWriter`, so that torch's
# `FileSystemReader` and other tools can read it.  In addition, checksums are computed during the write, the layout is
# stored as JSON, and data is read directly into the target tensors.


@dataclass
class WriteResult:
    """The data file that one rank wrote: its checksums, and its chunks with the keys of their tensors."""

    file: str
    blocks: Blocks
    chunks: list[tuple[str, Chunk]]

    @property
    def num_bytes(self) -> int:
        return sum(length for length, _ in self.blocks)

    @property
    def written_chunks(self) -> WrittenChunks:
        """The columns that rank 0 needs for the layout.  The checksums are stored in a separate file."""
        boxes = Boxes.of((key, chunk.offsets, chunk.sizes) for key, chunk in self.chunks)
        positions = padded_rows([(chunk.start, chunk.length, chunk.data_start) for _, chunk in self.chunks], 3, 0)
        return WrittenChunks(self.file, boxes, positions)


def write_tensors(
    storage: Storage,
    rank: int,
    boxes: Sequence[TensorBox],
    tensors: Tensors,
    limits: Mapping[str, float],
    throttle: Callable[[float], None] | None = None,
) -> WriteResult | None:
    """Write this rank's chunks into one file and flush it to disk; return None if it has no chunks.  No collective.

    `tensors` are staged copies or the live tensors; live ones are copied one by one during the write.  `limits`: the
    magnitude limit of each weight, by key.  `throttle` is called after each large block with the seconds that it took.

    Raises OSError, and ValueError for a weight that is not finite or reaches its limit.
    """
    if not boxes:
        return None
    name = f"__{rank}_0.distcp"
    writer = BlockWriter(storage.create(name), throttle)
    chunks = []
    scratch = np.empty(0, dtype=np.uint8)
    torch_computes_crc32 = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)  # torch's checksums are redundant: each block has one
    try:
        for box in boxes:
            tensor = tensors[box.key]
            is_staged = tensor.device.type == "cpu" and not isinstance(tensor, DTensor)
            if not is_staged or tensor.untyped_storage().nbytes() != tensor.nbytes:
                shard = local(tensor.detach())
                if scratch.nbytes < shard.nbytes:
                    scratch = np.empty(shard.nbytes, dtype=np.uint8)
                tensor = _views(scratch, {box.key: shard})[box.key].copy_(shard)
            check = _sanity_check(box.key, tensor.dtype, limits[box.key]) if box.key in limits else None
            chunks.append((box.key, _write_chunk(writer, name, box, tensor, check)))
    finally:
        torch.serialization.set_crc32_options(torch_computes_crc32)
        writer.close()
    return WriteResult(name, writer.blocks, chunks)


def _write_chunk(
    writer: BlockWriter,
    name: str,
    box: TensorBox,
    tensor: torch.Tensor,
    check: Callable[[memoryview], None] | None,
) -> Chunk:
    locator = _DataLocator(writer, tensor, check)
    start = writer.tell()
    torch.save(tensor, locator)  # type: ignore[arg-type]  # torch.save only calls write
    if locator.error is not None:
        raise locator.error
    assert locator.data_start is not None or not tensor.nbytes, "torch.save writes a tensor's bytes in one piece"
    return Chunk(box.offsets, box.sizes, name, start, writer.tell() - start, locator.data_start or start)


class _DataLocator:
    """Forwards the output of `torch.save`, notes where the tensor's raw bytes start, and checks them."""

    def __init__(self, writer: BlockWriter, tensor: torch.Tensor, check: Callable[[memoryview], None] | None) -> None:
        self._writer, self._address, self._num_bytes = writer, tensor.data_ptr(), tensor.nbytes
        self._check = check
        self.error: ValueError | None = None
        """The error that the check raised."""
        self.data_start: int | None = None

    def write(self, data: Any) -> int:
        if len(data) == self._num_bytes and np.frombuffer(data, dtype=np.uint8).ctypes.data == self._address:
            self.data_start = self._writer.tell()
            if self._check is not None:
                return self._write_checked(data, self._check)
        return self._writer.write(data)

    def _write_checked(self, data: Any, check: Callable[[memoryview], None]) -> int:
        def inspect(content: memoryview) -> None:
            try:
                check(content)
            except ValueError as error:  # raised here, it would be masked by torch's error about the file
                self.error = error

        previous, self._writer.inspect = self._writer.inspect, inspect
        try:
            return self._writer.write(data)
        finally:
            self._writer.inspect = previous

    def flush(self) -> None: ...


_EXPONENTS = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00}
"""Masks of the exponent bits."""
_FLOATS = {torch.float32: np.float32, torch.float64: np.float64}


def _sanity_check(key: str, dtype: torch.dtype, limit: float) -> Callable[[memoryview], None] | None:
    """Return a function that checks a weight's bytes; None for integers.

    The check raises ValueError if a value is not finite or reaches `limit` in magnitude.  It uses numpy in the writing
    thread, because torch would start OpenMP threads that compete with the training step.
    """

    def check(content: memoryview) -> None:
        if dtype in _FLOATS:
            values = np.frombuffer(content, dtype=_FLOATS[dtype])
            largest = float(np.maximum(values.max(), -values.min()))
        else:  # numpy has no bfloat16: the exponent alone rounds down to a power of two, and turns NaN into inf
            exponent = int((np.frombuffer(content, dtype=np.uint16) & _EXPONENTS[dtype]).max())
            largest = torch.tensor(exponent, dtype=torch.int16).view(dtype).item()
        if not np.isfinite(largest):
            raise ValueError(f"{key} has non-finite values; such weights are never published")
        if largest >= limit:
            raise ValueError(
                f"{key} holds values of {largest:.1e}, which is implausible; such weights are never published"
            )

    return check if dtype in _FLOATS or dtype in _EXPONENTS else None
