"""Saves checkpoints: collects the state, copies it, writes, verifies, publishes and prunes.

Training pauses only while the state is collected and copied.  A background thread on each rank then writes, using a
separate channel for its collectives.  Every rank writes its file and flushes it to disk; rank 0 checks that nothing is
missing, writes the manifest, publishes, and only then prunes.  An error on any rank is reported as the same message on
all ranks.  A failed attempt is deleted, and published checkpoints are untouched.  If a rank dies during a save, or if
the deletion fails as well, the unpublished folder remains until the next start of the run deletes it.

Read `Checkpoints.start` and `Checkpoints._save` first: what they call follows below, in the same order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import safetensors.torch
import torch
from torch.distributed.tensor import DTensor

from trainer.checkpoint.layout import (
    Box,
    Boxes,
    Chunk,
    PlannedTensor,
    Tensors,
    WriteResult,
    WrittenChunks,
    choose_writers,
    held_boxes,
    layout_of,
    layout_to_json,
    pickled_metadata,
)
from trainer.checkpoint.manifest import INDEX, PREFIX, Manifest, RunInfo, blocks_name, name_of, rank_file
from trainer.checkpoint.reader import CheckpointReader
from trainer.checkpoint.retention import RetentionPolicy
from trainer.checkpoint.state_parts import StatePart, split
from trainer.checkpoint.storage import (
    COMMIT,
    DISK_FULL_ADVICE,
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
        return cls(
            keep_last=section.keep_last,
            keep_every=section.keep_every,
            keep_best=section.keep_best,
            metric=metric,
            checksums=section.verify == "full",
            timeout_s=1.2 * section.timeout_s + 30.0,
        )


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


@dataclass(frozen=True)
class RankReport:
    """What one rank has written, as it reports it to rank 0."""

    files: Mapping[str, tuple[int, int]]
    """Size and checksum of each file."""
    chunks: WrittenChunks | None
    """The positions in its data file; None if they are those of the save before."""


class Checkpoints:
    """The checkpoints in one folder.  All ranks must call each method, unless it says otherwise."""

    def __init__(self, storage: Storage, world: World, settings: SaveSettings, facts: RunInfo) -> None:
        self.world, self.settings, self.facts = world, settings, facts
        self._in_flight: Future[SaveResult] | None = None
        self.move_to(storage)
        self._has_channels = False
        self._plans = SavePlans(world)
        self._staging = Staging(world.device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint", initializer=_lower_priority)
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

    def move_to(self, storage: Storage) -> None:
        """Save to this folder from now on.  No save may be in flight."""
        assert self._in_flight is None, "its files are in the earlier place"
        self.storage = storage
        self.reader = CheckpointReader(storage, self.world, self.settings.checksums)
        """Access to existing checkpoints."""
        kept = self.settings
        self.retention = RetentionPolicy(storage, kept.keep_last, kept.keep_every, kept.keep_best, kept.metric)

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

    def check(self, state: TrainState) -> None:
        """Raise UserError on all ranks if the state cannot be saved, before hours of training are spent on it."""

        def try_to_collect() -> None:
            state.check_complete()
            try:
                collect(state, self.world.size)
            except TypeError as error:
                raise UserError(str(error)) from error

        self.world.agreed(try_to_collect)

    def start(self, state: TrainState, background: bool, due: Sequence[int] = ()) -> None:
        """Start saving `state` as it is now.

        With `background`, training pauses only for a copy; otherwise the state must not change until `take` returns
        the result.  `due`: earlier steps whose due saves this save replaces.

        No save may be in flight.  Raises UserError for state that cannot be saved at all.
        Collectives: one gather of small messages; the first time, also those of planning and of opening process groups.
        """
        assert self._in_flight is None, "one save at a time: take() the result of the previous one first"
        started = time.perf_counter()
        if not self._has_channels:  # not opened earlier because each one costs some CPU time (see `Channel`)
            self._channel, self._results = self._open_channel(), self._open_channel()  # for the thread; for results
            self._has_channels = True
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
        stale = snapshot is not None and signature_of(snapshot.tensors) != self._plans.signature
        everybody = self.world.gather((mistake, failure, stale, snapshot.digests if snapshot else {}))
        for rank, (mistake, *_) in enumerate(everybody):
            if mistake is not None:
                raise UserError(f"rank {rank}: {mistake}")
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

    def _save(
        self,
        snapshot: Snapshot,
        tensors: Mapping[str, torch.Tensor],
        error: str,
        state: TrainState,
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
                    written, error = self._in_stage(
                        f"writing {folder}", lambda: self._write_own(self.storage / unpublished, snapshot, tensors)
                    )
                everybody = self._channel.gather_to_main((error, written))
                failed = merge_errors(error for error, _ in everybody)
                reports = [report for _, report in everybody]
                published = self._in_stage(
                    f"publishing {folder}", lambda: self._finish(unpublished, final, snapshot, reports, failed)
                )
                outcome = self._channel.broadcast(published)
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
                for name in self.retention.obsolete(before_next=True):
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
    ) -> tuple[RankReport | None, str]:
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
        return RankReport(files, None if is_known or written is None else written.placed), ""

    def _finish(
        self, unpublished: str, final: str, snapshot: Snapshot, reports: Sequence[RankReport | None], failed: str
    ) -> tuple[str, int]:
        """On rank 0, publish the checkpoint or delete the failed attempt.  Returns the error and the total bytes."""
        if not self.world.is_main:
            return "", 0
        for rank, report in enumerate(reports):
            if report is not None and report.chunks is not None:
                self._chunks_by_rank[rank] = report.chunks
                self._layout_files = {}
        if not failed:
            try:
                written = [report for report in reports if report is not None]  # no rank has failed
                manifest = self._write_common(self.storage / unpublished, snapshot, written)
                self.storage.publish(unpublished, final)
            except Exception as error:
                failed = f"rank 0: {describe(error)}"
            else:
                self.retention.note(manifest)
                return "", manifest.num_bytes
        with contextlib.suppress(Exception):  # storage may fail here too; the next start cleans up
            self.storage.delete(unpublished)
        return failed, 0

    def _write_common(self, folder: Storage, snapshot: Snapshot, reports: Sequence[RankReport]) -> Manifest:
        """Write the files that are common to all ranks, the manifest last."""
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
        files = {name: entry for report in reports for name, entry in report.files.items()}
        for rank, report in enumerate(reports):
            for name, (size, _) in report.files.items():
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
            for name in self.retention.obsolete():
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

    def clean(self) -> None:
        """Delete the leftovers of interrupted saves, on rank 0.  Only the owner of the run may call this."""
        if self.world.is_main:
            self.wait_for_deleting()
            self.storage.clean(PREFIX)

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

    def _open_channel(self) -> Channel:
        # Ranks wait here for storage, which takes longer than any other message between ranks.
        return self.world.open_channel(timedelta(seconds=2 * self.settings.timeout_s))


def _lower_priority() -> None:
    """Lower this thread's priority, so that the training step wins if both compete for a core."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)  # on Linux this affects only this thread


def _done(result: SaveResult) -> Future[SaveResult]:
    future: Future[SaveResult] = Future()
    future.set_result(result)
    return future


# ---------------------------------------------------------------------------------------------------------------
# The state at one moment


@dataclass
class Snapshot:
    """The state at one moment.  Its tensors are the live ones until they are staged."""

    step: int
    tensors: dict[str, torch.Tensor]
    paths: dict[str, tuple[str, ...]]
    plain: dict[str, Any]
    per_rank_plain: dict[str, Any]
    per_rank_tensors: dict[str, torch.Tensor]
    """CPU copies of this rank's per-rank tensors."""
    digests: dict[str, tuple[int, int]]
    """For each part, checksums of its plain values and of its unsharded tensors, which ranks compare."""
    weights: Mapping[str, float]
    num_skipped: int
    evaluation: Mapping[str, float] = field(default_factory=dict)
    due: Sequence[int] = ()
    """Earlier steps whose due saves this save replaces."""
    differing_keys: list[str] = field(default_factory=list)
    """Keys of plain tensors whose values each rank stores separately."""

    @property
    def document(self) -> str:
        content = {
            "step": self.step,
            "parts": self.plain,
            "rank_parts": [*self.per_rank_plain],
            "unlike": self.differing_keys,
        }
        return json.dumps(content, indent=1)

    @property
    def own(self) -> bytes:
        return safetensors.torch.save(self.per_rank_tensors, metadata={"state": json.dumps(self.per_rank_plain)})


def collect(state: TrainState, num_ranks: int) -> Snapshot:
    """Return the state as it is now.  Raises TypeError for values that cannot be stored."""
    plain: dict[str, Any] = {}
    tensors: dict[str, torch.Tensor] = {}
    paths: dict[str, tuple[str, ...]] = {}
    digests = {}
    with torch.no_grad():
        for name, part in state.parts.items():
            plain[name], found = split(part.state_dict(), (name,))
            if num_ranks > 1:
                text = json.dumps(plain[name]).encode()
                loose = [tensor for tensor in found.values() if not isinstance(tensor, DTensor)]
                digests[name] = crc32(text), checksum_of_tensors(loose)
            for path, tensor in found.items():
                key = ".".join(path)
                if key in tensors:
                    raise TypeError(f"two tensors of the state have the name {key}")
                tensors[key], paths[key] = tensor, path
        per_rank_plain: dict[str, Any] = {}
        per_rank_tensors: dict[str, torch.Tensor] = {}
        for name, part in state.per_rank_parts.items():
            per_rank_plain[name], found = split(part.state_dict(), (name,))
            per_rank_tensors |= {".".join(path): copy_of(tensor) for path, tensor in found.items()}
    return Snapshot(
        step=state.step,
        tensors=tensors,
        paths=paths,
        plain=plain,
        per_rank_plain=per_rank_plain,
        per_rank_tensors=per_rank_tensors,
        digests=digests,
        weights=state.weights,
        num_skipped=state.num_skipped,
        evaluation=state.evaluation,
    )


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the CPU."""
    return tensor.detach().cpu().contiguous().clone()


def checksum_of_tensors(tensors: Sequence[torch.Tensor]) -> int:
    """Return the CRC-32 of the tensors' bytes.  GPU tensors are copied to the host in one transfer."""
    crc = 0
    whole = [tensor.detach().contiguous().flatten().view(torch.uint8) for tensor in tensors if tensor.numel()]
    on_cpu = [part for part in whole if part.device.type == "cpu"]
    elsewhere = [part for part in whole if part.device.type != "cpu"]
    for part in [*on_cpu, *([torch.cat(elsewhere).cpu()] if elsewhere else [])]:
        crc = crc32(part.numpy().data, crc)
    return crc


def parts_differing_between_ranks(digests: list[dict[str, tuple[int, int]]]) -> list[str]:
    """Return the parts whose plain tensors differ between ranks.  Raises UserError if plain values differ."""
    differing = []
    for name, (values, tensors) in digests[0].items():
        others = [rank for rank, own in enumerate(digests) if name not in own or own[name][0] != values]
        if others:
            raise UserError(differs_message(name, "values", others[0]))
        if any(own[name][1] != tensors for own in digests):
            differing.append(name)
    return differing


def differs_message(name: str, what: str, rank: int) -> str:
    """Return the error message for state that should be the same on all ranks."""
    return (
        f"state {name!r}: rank {rank} does not hold the same {what} as rank 0; add state that differs between "
        f"ranks with self.state.add({name!r}, ..., per_rank=True)"
    )


def store_per_rank(state: TrainState, snapshot: Snapshot, parts: list[str], channel: Channel) -> None:
    """Move plain tensors whose values differ between ranks into each rank's own file.

    Raises UserError for a tensor that must not differ.  Collective: one gather.
    """
    loose = {key: t for key, t in snapshot.tensors.items() if not isinstance(t, DTensor)}
    loose = {key: t for key, t in loose.items() if key.startswith(tuple(f"{part}." for part in parts))}
    checksums = channel.gather({key: checksum_of_tensors([tensor]) for key, tensor in loose.items()})
    for key, expected in checksums[0].items():
        others = [rank for rank, own in enumerate(checksums) if own.get(key) != expected]
        if not others:
            continue
        name = max((part for part in parts if key.startswith(f"{part}.")), key=len)
        if not StatePart.of(state.parts[name]).may_differ(key.removeprefix(f"{name}.")):
            raise UserError(differs_message(name, f"values in {key}", others[0]))
        snapshot.differing_keys.append(key)
        snapshot.per_rank_tensors[key] = copy_of(loose[key])


# ---------------------------------------------------------------------------------------------------------------
# Which rank writes what


def signature_of(tensors: Tensors) -> tuple[Any, ...]:
    """Return the properties of the tensors that a plan depends on."""
    return tuple(
        (key, t.dtype, tuple(t.shape), (t.placements, tuple(t.device_mesh.shape)) if isinstance(t, DTensor) else None)
        for key, t in tensors.items()
    )


class SavePlans:
    """The chunks that each rank writes, planned once and reused while names, shapes and placements stay the same."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.signature: tuple[Any, ...] | None = None
        self.boxes: list[Box] = []
        """The boxes that this rank writes."""
        self.planned: dict[str, PlannedTensor] = {}
        """The planned chunks of every tensor.  On rank 0 only."""

    @property
    def num_bytes(self) -> int:
        """Number of tensor bytes that this rank writes."""
        return sum(torch.Size(box.sizes).numel() * box.dtype.itemsize for box in self.boxes)

    def make(self, tensors: Tensors) -> None:
        """Make a new plan.  Raises on all ranks if any rank fails.

        Collectives: two small messages, a gather of all boxes to rank 0 (0.1 MB per rank for a 70B model on 512 ranks),
        and a scatter of the result.
        """

        def find_own() -> list[Box]:
            # Rank 0 writes what is the same on all ranks.
            return held_boxes({k: t for k, t in tensors.items() if isinstance(t, DTensor) or self._channel.is_main})

        own = self._channel.agreed(find_own)
        held = self._channel.gather_to_main(Boxes.of((box.key, box.offsets, box.sizes) for box in own))
        masks, self.planned = self._channel.agreed(lambda: choose_writers(held, tensors) if held else ([], {}))
        self.boxes = [box for box, writes in zip(own, self._channel.scatter(masks), strict=True) if writes]
        self.signature = signature_of(tensors)


# ---------------------------------------------------------------------------------------------------------------
# A copy in host memory, while training continues


class Staging:
    """Host memory for a copy of the data that this rank writes, reused by every save.

    It is one buffer, page-locked if the device is a GPU, so that copies run at full speed.  The first save pays for
    allocating it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer, self._is_locked = np.empty(0, dtype=np.uint8), False

    def copy(self, tensors: Tensors, boxes: Iterable[Box]) -> dict[str, torch.Tensor]:
        """Return CPU copies of this rank's parts of the tensors in `boxes`.  Earlier copies are overwritten."""
        parts = {box.key: local(tensors[box.key]) for box in boxes}
        with torch.no_grad():
            copies = _views(self._buffer_for(parts), parts)
            for key, part in parts.items():
                copies[key].copy_(part, non_blocking=True)
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
        return copies

    def _buffer_for(self, parts: Tensors) -> np.ndarray[Any, Any]:
        needed = sum(_padded(part) for part in parts.values())
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


def _padded(tensor: torch.Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // 64) * 64


def _views(buffer: np.ndarray[Any, Any], like: Tensors) -> dict[str, torch.Tensor]:
    """Return tensors over parts of `buffer`, each with its own storage, since `torch.save` writes entire storages."""
    views, start = {}, 0
    for key, tensor in like.items():
        size = tensor.numel() * tensor.element_size()
        part = torch.from_numpy(buffer[start : start + size]) if size else torch.empty(0, dtype=torch.uint8)
        views[key] = part.view(tensor.dtype).view(tensor.shape)
        start += _padded(tensor)
    return views


# ---------------------------------------------------------------------------------------------------------------
# The data file of one rank.  It has the format of DCP's (torch.distributed.checkpoint's) `FileSystemWriter`, so that
# its `FileSystemReader` and other tools can read it.  In addition, checksums are computed during the write, the layout
# is stored as JSON, and data is read directly into the target tensors.


def write_tensors(
    storage: Storage,
    rank: int,
    boxes: Sequence[Box],
    tensors: Tensors,
    limits: Mapping[str, float],
    throttle: Callable[[float], None] | None = None,
) -> WriteResult | None:
    """Write this rank's chunks into one file and flush it to disk; return None if it has no chunks.  No collective.

    `tensors` are staged copies or the live tensors, which are then copied one by one during the write.  `throttle` is
    called after each block with the seconds that the block took.  Raises OSError, and ValueError for a weight that is
    not finite or reaches its magnitude limit.
    """
    if not boxes:
        return None
    name = f"__{rank}_0.distcp"
    writer = BlockWriter(storage.create(name), throttle)
    chunks = []
    scratch = np.empty(0, dtype=np.uint8)
    has_own_checksums = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)  # torch's checksums are redundant: each block has one
    try:
        for box in boxes:
            part = tensors[box.key]
            if isinstance(part, DTensor) or part.untyped_storage().nbytes() != part.nbytes or part.device.type != "cpu":
                part = local(part.detach())
                if scratch.nbytes < part.nbytes:
                    scratch = np.empty(part.nbytes, dtype=np.uint8)
                part = _views(scratch, {box.key: part})[box.key].copy_(part)
            look = _sanity_check(box.key, part.dtype, limits[box.key]) if box.key in limits else None
            chunks.append((box.key, _write_chunk(writer, name, box, part, look)))
    finally:
        torch.serialization.set_crc32_options(has_own_checksums)
        writer.close()
    return WriteResult(name, writer.blocks, chunks)


def _write_chunk(
    writer: BlockWriter,
    name: str,
    box: Box,
    part: torch.Tensor,
    look: Callable[[memoryview], None] | None,
) -> Chunk:
    locator = _DataLocator(writer, part, look)
    start = writer.tell()
    torch.save(part, locator)  # type: ignore[arg-type]  # torch.save only calls write
    if locator.error is not None:
        raise locator.error
    assert locator.data_start is not None or not part.nbytes, "torch.save writes a tensor's bytes in one piece"
    return Chunk(box.offsets, box.sizes, name, start, writer.tell() - start, locator.data_start or start)


class _DataLocator:
    """Forwards the output of `torch.save`, and notes where the tensor's raw bytes begin."""

    def __init__(self, writer: BlockWriter, tensor: torch.Tensor, look: Callable[[memoryview], None] | None) -> None:
        self._writer, self._address, self._bytes = writer, tensor.data_ptr(), tensor.nbytes
        self._look = look
        self.error: ValueError | None = None
        self.data_start: int | None = None

    def write(self, data: Any) -> int:
        if len(data) == self._bytes and np.frombuffer(data, dtype=np.uint8).ctypes.data == self._address:
            self.data_start = self._writer.tell()
            if self._look is not None:
                return self._write_inspected(data, self._look)
        return self._writer.write(data)

    def _write_inspected(self, data: Any, look: Callable[[memoryview], None]) -> int:
        def note(part: memoryview) -> None:
            try:
                look(part)
            except ValueError as error:  # raised here, it would be masked by torch's error about the file
                self.error = error

        before, self._writer.inspect = self._writer.inspect, note
        try:
            return self._writer.write(data)
        finally:
            self._writer.inspect = before

    def flush(self) -> None: ...


_EXPONENTS = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00}
_FLOATS = {torch.float32: np.float32, torch.float64: np.float64}


def _sanity_check(key: str, dtype: torch.dtype, limit: float) -> Callable[[memoryview], None] | None:
    """Return a check of a weight's bytes; None for integers.

    The check raises ValueError if a value is not finite or reaches `limit` in magnitude.  It uses numpy in the writing
    thread, because torch would start OpenMP threads that compete with the training step.
    """

    def look(part: memoryview) -> None:
        if dtype in _FLOATS:
            values = np.frombuffer(part, dtype=_FLOATS[dtype])
            largest = float(np.maximum(values.max(), -values.min()))
        else:  # rounded down to a power of two; NaN or inf if there is one
            exponent = int((np.frombuffer(part, dtype=np.uint16) & _EXPONENTS[dtype]).max())
            largest = torch.tensor(exponent, dtype=torch.int16).view(dtype).item()
        if not np.isfinite(largest):
            raise ValueError(f"{key} has non-finite values; such weights are never published")
        if largest >= limit:
            raise ValueError(
                f"{key} holds values of {largest:.1e}, which is implausible; such weights are never published"
            )

    return look if dtype in _FLOATS or dtype in _EXPONENTS else None
