"""The checkpoints of one run: how one more gets there, which of them are kept, and which is taken up again.

Saving: the state is collected and copied while training stands still; a thread of its own then writes, on all ranks at
once, and talks on a channel of its own.  Every rank writes its file and flushes it to disk; rank 0 sees that nothing is
missing, writes the manifest, publishes, and only then prunes.  A failure on any rank becomes the same message on all;
nothing of the attempt is left, and what was published before stays as it was.

Loading: nothing is trusted.  Manifest, sizes and checksums are checked, in parallel across ranks; a damaged checkpoint
is named and the one before it tried.  All ranks take the same one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from hashlib import sha256
from itertools import chain
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import safetensors.torch
import torch
from torch.distributed.tensor import DTensor

from trainer.checkpoint.blocks import Damaged, checksum_of, crc32
from trainer.checkpoint.keeping import Keeping, list_steps
from trainer.checkpoint.layout import Layout, Stored, Written, layout_from_json, layout_of, layout_to_json
from trainer.checkpoint.manifest import (
    INDEX,
    PREFIX,
    Manifest,
    blocks_name,
    check_format,
    find_damage,
    name_of,
    read_blocks,
    read_file,
    read_manifest,
)
from trainer.checkpoint.place import COMMIT, DAMAGED, DOUBTFUL, Place
from trainer.checkpoint.tensors import SavePlans, Staging, read_tensors, write_tensors
from trainer.checkpoint.tree import join, split
from trainer.config import CheckpointSection
from trainer.distributed.channel import Channel
from trainer.distributed.world import World
from trainer.errors import TrainingFailed, UserError, choice_error

Result = TypeVar("Result")

_DELETING_S = 60.0
_WAITING = "waiting for the other ranks"
_FREE_MARGIN = 1.02
"""Room that a save asks for, as a multiple of its tensors' bytes; the rest is small."""


class Stateful(Protocol):
    """What can be saved and restored."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@runtime_checkable
class Strict(Protocol):
    """A part that says what of it differs from what is stored, and makes room for what it does not hold yet."""

    def differences(self, plain: Any, stored: Mapping[str, Stored]) -> list[str]:
        """Return a line for each difference; `stored` by key within the part."""
        ...

    def prepare(self, stored: Mapping[str, Stored]) -> None:
        """Make the tensors that loading is going to fill."""
        ...

    def may_differ(self, key: str) -> bool:
        """Return whether ranks may hold different values of this plain tensor; each is then given its own back."""
        ...


@runtime_checkable
class Dependent(Protocol):
    """A part that means something only beside what no checkpoint holds, as a position does in its data."""

    def changes_outside(self, plain: Mapping[str, Any], allowed: Collection[str]) -> tuple[list[str], list[str]]:
        """Return a line for each change of that since `plain` was stored: those that forbid to go on, those to tell."""
        ...


@runtime_checkable
class Restartable(Protocol):
    """A rank's own part that can be made anew, where what is stored is for another number of ranks."""

    def restart(self, step: int) -> None: ...


class Savable(Protocol):
    """What a checkpoint holds, by how it is stored."""

    step: int
    parts: dict[str, Stateful]
    """The same on all ranks, or sharded (DTensors): restored on any mesh."""
    rank_parts: dict[str, Stateful]
    """Each rank's own: restored where the number of ranks is the same, otherwise made anew if it is Restartable."""

    @property
    def weights(self) -> Mapping[str, float]:
        """Keys of the parameters, which must be finite to be published, and magnitudes that no value may reach."""
        ...

    @property
    def num_skipped(self) -> int:
        """How many updates have been skipped in a row: while there are any, nobody knows whether the weights are good.

        The same on all ranks.
        """
        ...

    def check_complete(self) -> None:
        """Raise UserError if there is state that nobody has listed here."""
        ...


@dataclass(frozen=True)
class Settings:
    """How checkpoints are kept."""

    keep_last: int = 2
    keep_every: int = 0
    checksums: bool = True
    timeout_s: float = 3600.0
    """How long a save may take.  Beyond, the storage is taken for lost."""

    @classmethod
    def of(cls, section: CheckpointSection) -> Settings:
        """Return those of a configuration.

        The watchdog ends the run before the timeout given here, unless the process group belongs to somebody else.
        """
        return cls(section.keep_last, section.keep_every, section.verify == "full", 1.2 * section.timeout_s + 30.0)


@dataclass(frozen=True)
class Facts:
    """What a checkpoint says about the run that wrote it."""

    config_yaml: str
    mesh: Mapping[str, int]
    job: str = ""
    """What the launcher calls the job."""
    restarts: int = 0
    """How often the launcher had started it again."""


@dataclass(frozen=True)
class SaveResult:
    """How one save went; the same on all ranks but for the times."""

    step: int
    path: str
    bytes: int = 0
    """Of all files."""
    blocked_s: float = 0.0
    """How long training stood still."""
    total_s: float = 0.0
    """From the beginning until it was published."""
    error: str = ""
    """What went wrong and where, empty if it is published."""
    warning: str = ""
    lost: Literal["", "ranks", "storage"] = ""
    """What gave no answer in time, if that is what went wrong."""


@dataclass
class _Snapshot:
    """The state at one moment.  Its tensors are live until they are staged."""

    step: int
    tensors: dict[str, torch.Tensor]
    paths: dict[str, tuple[str, ...]]
    plain: dict[str, Any]
    own_plain: dict[str, Any]
    own_tensors: dict[str, torch.Tensor]
    """Copies, on the CPU, of what is this rank's own."""
    digests: dict[str, tuple[int, int]]
    """Checksums, by part, of what must be the same on all ranks: plain values, and tensors that are not sharded."""
    weights: Mapping[str, float]
    num_skipped: int
    due: Sequence[int] = ()
    """The updates whose saves this one makes up for."""
    unlike: list[str] = field(default_factory=list)
    """Keys of plain tensors of which each rank stores its own values."""

    @property
    def document(self) -> str:
        content = {"step": self.step, "parts": self.plain, "rank_parts": [*self.own_plain], "unlike": self.unlike}
        return json.dumps(content, indent=1)

    @property
    def own(self) -> bytes:
        return safetensors.torch.save(self.own_tensors, metadata={"state": json.dumps(self.own_plain)})


@dataclass(frozen=True)
class Found:
    """A checkpoint that was taken up, and those newer ones that could not be."""

    path: str
    manifest: Manifest
    config_yaml: str
    """The configuration that it was written with."""
    damaged: Mapping[str, list[str]] = field(default_factory=dict)
    """What is wrong with each, by its name."""
    warnings: Sequence[str] = ()
    """What could not be taken up as it was."""
    changed: Sequence[str] = ()
    """Settings that differ, and may."""


Compare = Callable[[str], tuple[list[str], list[str]]]
"""Compares with the configuration that a checkpoint was written with, given as YAML; returns the differences that
forbid resuming from it and those that do not, one line each.  Has no side effects."""


class Checkpoints:
    """The checkpoints in one place.  All methods are called by all ranks alike unless they say otherwise."""

    def __init__(self, place: Place, world: World, settings: Settings, facts: Facts) -> None:
        self.place, self.world, self.settings, self.facts = place, world, settings, facts
        self._channel, self._results = self._open_channel(), self._open_channel()
        self._plans = SavePlans(world)
        self._staging = Staging(world.device)
        self._keeping = Keeping(place, settings.keep_last, settings.keep_every)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint", initializer=_step_back)
        self._in_flight: Future[SaveResult] | None = None
        self.makes_way = False
        """True while an update is made on the CPU, where writing in the background takes its memory bandwidth."""
        self._overdue_at = 0.0
        self.stage = _WAITING
        """What the save in flight is about, in words."""
        self._deleting: Future[None] | None = None
        self._warning = ""
        self._sent_chunks: Any = None
        self._chunks_by_rank: dict[int, Written] = {}
        self._layout_files: dict[str, bytes] = {}

    # -- saving --------------------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        """A step begins: on the CPU, writing in the background would take its memory bandwidth."""
        self.makes_way = self.world.device.type == "cpu"

    def end_step(self, step: int, seconds: float, is_profiled: bool) -> None:
        """A step ends."""
        self.makes_way = False

    @property
    def in_flight(self) -> bool:
        """Whether a save has begun whose result has not been taken."""
        return self._in_flight is not None

    @property
    def is_written(self) -> bool:
        """Whether the save in flight has come to its end on this rank."""
        return self._in_flight is not None and self._in_flight.done()

    @property
    def is_overdue(self) -> bool:
        """Whether the save in flight has taken longer than it may, on this rank."""
        return self.in_flight and not self.is_written and time.monotonic() > self._overdue_at

    def _open_channel(self) -> Channel:
        # Whoever waits here waits for storage: longer than for anything else that ranks say to each other.
        return self.world.open_channel(timedelta(seconds=2 * self.settings.timeout_s))

    def check(self, state: Savable) -> None:
        """Raise UserError on all ranks alike for state that cannot be saved at all: before hours are spent on it."""

        def collect() -> None:
            state.check_complete()
            try:
                _collect(state, self.world.size)
            except TypeError as error:
                raise UserError(str(error)) from error

        self.world.agreed(collect)

    def start(self, state: Savable, background: bool, due: Sequence[int] = ()) -> None:
        """Begin to save `state` as it is now.  In the background, training stands still for a copy only; otherwise the
        state must not change before `take`, which has the result.  `due`: the updates whose saves it makes up for.

        No save may be in flight.  Raises UserError for state that cannot be saved at all.
        Collectives: one gather of small messages; the first time, those of planning.
        """
        assert self._in_flight is None, "one save at a time: take() the result of the one before"
        started = time.perf_counter()
        self._overdue_at = time.monotonic() + self.settings.timeout_s
        snapshot, mistake, failure = None, None, ""
        try:
            state.check_complete()
            snapshot = _collect(state, self.world.size)
            snapshot.due = due
        except (TypeError, UserError) as error:
            mistake = str(error)
        except Exception as error:
            failure = f"cannot collect the state: {_describe(error)}"
        stale = snapshot is not None and self._plans.is_stale(snapshot.tensors)
        everybody = self.world.gather((mistake, failure, stale, snapshot.digests if snapshot else {}))
        _raise_first_mistake([mistake for mistake, *_ in everybody])
        failed = _joined(failure for _, failure, *_ in everybody)
        if failed or snapshot is None:
            self._in_flight = _done(self._failed(state.step, failed, started))
            return
        unlike = _unlike_parts([digests for *_, digests in everybody])
        if unlike:
            self._keep_own(state, snapshot, unlike)
        if any(stale for _, _, stale, _ in everybody):
            self._layout_files, self._chunks_by_rank, self._sent_chunks = {}, {}, None
            try:
                self._plans.make(snapshot.tensors)
            except Exception as error:
                self._in_flight = _done(self._failed(state.step, f"cannot plan: {_describe(error)}", started))
                return
        failure, tensors = "", snapshot.tensors
        if background:
            try:
                tensors = self._staging.copy(snapshot.tensors, self._plans.boxes)
            except Exception as error:
                failure = f"cannot copy the state: {_describe(error)}"
        blocked_s = time.perf_counter() - started if background else None
        self._in_flight = self._thread.submit(self._save, snapshot, tensors, failure, state, started, blocked_s)

    def _keep_own(self, state: Savable, snapshot: _Snapshot, parts: list[str]) -> None:
        """Put the plain tensors that ranks hold different values of into what is stored of each rank.

        Raises UserError if they must not differ.  One gather.
        """
        loose = {key: t for key, t in snapshot.tensors.items() if not isinstance(t, DTensor)}
        loose = {key: t for key, t in loose.items() if key.startswith(tuple(f"{part}." for part in parts))}
        checksums = self.world.gather({key: _checksum_of([tensor]) for key, tensor in loose.items()})
        for key, expected in checksums[0].items():
            others = [rank for rank, own in enumerate(checksums) if own.get(key) != expected]
            if not others:
                continue
            name = max((part for part in parts if key.startswith(f"{part}.")), key=len)
            part, within = state.parts[name], key.removeprefix(f"{name}.")
            if not isinstance(part, Strict) or not part.may_differ(within):
                raise UserError(_not_the_same(name, f"values in {key}", others[0]))
            snapshot.unlike.append(key)
            snapshot.own_tensors[key] = _copy_of(loose[key])

    def take(self) -> SaveResult:
        """Wait for the save in flight and return how it went, the same on all ranks.  Collective: one gather.

        Waits no longer than a save may take: then the result says that the storage gives no answer.
        """
        future = self._in_flight
        assert future is not None
        self.makes_way = False  # for whoever waits here
        try:
            result = future.result(max(0.0, self._overdue_at - time.monotonic()))
        except NotYet:
            path = f"{self.place}/{PREFIX}*"
            late = f"rank {self.world.rank} is still {self.stage} after {self.settings.timeout_s:.0f} s"
            result = SaveResult(-1, path, error=late, lost="storage")
        everybody = self._results.gather((result.error, result.lost, self.stage))
        lost = {kind for _, kind, _ in everybody}
        if lost != {""}:
            to_blame = [error for error, kind, stage in everybody if kind and stage != _WAITING]
            first = next(error for error in [*to_blame, *(error for error, *_ in everybody)] if error)
            result = dataclasses.replace(result, error=first, lost="storage" if "storage" in lost else "ranks")
            if result.lost == "ranks":  # what was heard on the old one is of the save that failed
                self._channel = self._open_channel()
                self._layout_files, self._chunks_by_rank, self._sent_chunks = {}, {}, None
        self._in_flight = None
        return result

    def wait(self, timeout_s: float) -> None:
        """Give a save in flight time to end.  For a rank that is about to leave; not collective."""
        future = self._in_flight
        self.makes_way = False
        if future is not None:
            with contextlib.suppress(NotYet):
                future.exception(timeout_s)  # whoever takes the result raises it

    def wait_for_deleting(self) -> None:
        """Wait until what was pruned is gone, for some time: what is left is cleaned at the next start."""
        deleting, self._deleting = self._deleting, None
        if deleting is not None:
            with contextlib.suppress(NotYet):
                deleting.result(_DELETING_S)

    def _save(
        self,
        snapshot: _Snapshot,
        tensors: Mapping[str, torch.Tensor],
        error: str,
        state: Savable,
        started: float,
        blocked_s: float | None,
    ) -> SaveResult:
        """Write and publish.  The same steps on all ranks, whatever fails where."""
        final = name_of(snapshot.step)
        outcome, lost_ranks, folder = ("", 0), False, self.place / final
        try:
            (all_bytes,) = self._channel.sum([self._plans.num_bytes])
            begun = self._at(f"making {folder}", lambda: self._begin(final, int(all_bytes)))
            unpublished, failed = self._channel.broadcast(begun)
            if not failed:
                written = None
                if not error:
                    own = (self.place / unpublished, snapshot, tensors)
                    written, error = self._at(f"writing {folder}", lambda: self._write_own(*own))
                reports = self._channel.gather((error, written))
                failed = _joined(report[0] for report in reports)
                end = (unpublished, final, snapshot, reports, failed)
                outcome = self._channel.broadcast(self._at(f"publishing {folder}", lambda: self._finish(*end)))
            else:
                outcome = (failed, 0)
        except RuntimeError as gone:  # what torch.distributed raises: another rank has gone, or does not answer in time
            outcome = (f"rank {self.world.rank}: lost the other ranks while saving: {_describe(gone)}", 0)
            lost_ranks = True
        failed, num_bytes = outcome
        total_s = time.perf_counter() - started
        # Saved in doubt, or in doubt by now: what is older may be all that is good.
        is_in_doubt = snapshot.num_skipped > 0 or state.num_skipped > 0
        warning = "" if failed or is_in_doubt else self._at(f"pruning {self.place}", self._prune)
        path = f"{self.place}/{final}"
        if failed:
            failed = f"{path}: {failed}"
        blocked_s = total_s if blocked_s is None else blocked_s
        lost: Literal["", "ranks"] = "ranks" if lost_ranks else ""
        return SaveResult(snapshot.step, path, num_bytes, blocked_s, total_s, failed, warning, lost)

    def _rest(self, worked_s: float) -> None:
        """Let the update in hand have the memory and the caches that writing takes from it, for as long again."""
        if self.makes_way:
            time.sleep(worked_s)

    def _at(self, stage: str, work: Callable[[], Result]) -> Result:
        """Do a part of a save that may hang, and have it known by name."""
        self.stage = stage
        result = work()
        self.stage = _WAITING
        return result

    def _failed(self, step: int, error: str, started: float) -> SaveResult:
        elapsed = time.perf_counter() - started
        path = f"{self.place}/{name_of(step)}"
        return SaveResult(step, path, 0, elapsed, elapsed, f"{path}: {error}")

    def _begin(self, final: str, all_bytes: int) -> tuple[str, str]:
        """Rank 0: see that there is room, and make the folder.  Returns its name for the time being, or an error."""
        if not self.world.is_main:
            return "", ""
        try:
            self.wait_for_deleting()
            free = self.place.free_bytes()
            if free is not None and free < all_bytes * _FREE_MARGIN:
                return "", f"rank 0: {self.place} has {_gib(free)} free, the checkpoint needs {_gib(all_bytes)}"
            return self.place.begin(final), ""
        except Exception as error:
            return "", f"rank 0: {_describe(error)}"

    def _write_own(
        self, folder: Place, snapshot: _Snapshot, tensors: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, Any] | None, str]:
        """Write what is this rank's.  Returns what rank 0 must know of it, or an error."""
        rank = self.world.rank
        try:
            files = {}
            written = write_tensors(folder, rank, self._plans.boxes, tensors, snapshot.weights, self._rest)
            if written is not None:
                files[written.file] = (written.num_bytes, checksum_of(written.blocks))
                listed = json.dumps(written.blocks, separators=(",", ":")).encode()
                files |= _write_files(folder, {blocks_name(written.file): listed})
            files |= _write_files(folder, {_rank_file(rank): snapshot.own})
        except Exception as error:
            return None, f"{folder}: {_describe(error)}"
        chunks = written.chunks if written is not None else []
        is_known = chunks == self._sent_chunks
        self._sent_chunks = chunks
        return {"files": files, "chunks": None if is_known or written is None else written.without_checksums()}, ""

    def _finish(
        self, unpublished: str, final: str, snapshot: _Snapshot, reports: list[Any], failed: str
    ) -> tuple[str, int]:
        """Rank 0: publish, or take the attempt away.  Returns what went wrong, and the bytes of all files."""
        if not self.world.is_main:
            return "", 0
        self._note_chunks(reports)
        if not failed:
            try:
                manifest = self._write_common(self.place / unpublished, snapshot, reports)
                self.place.publish(unpublished, final)
            except Exception as error:
                failed = f"rank 0: {_describe(error)}"
            else:
                self._keeping.note(manifest)
                return "", manifest.num_bytes
        self._discard(unpublished)
        return failed, 0

    def _note_chunks(self, reports: list[Any]) -> None:
        """Remember where each rank's chunks stand in its file.  A rank says so only when it has changed."""
        for rank, (_, report) in enumerate(reports):
            if report is not None and report["chunks"] is not None:
                self._chunks_by_rank[rank] = report["chunks"]
                self._layout_files = {}

    def _write_common(self, folder: Place, snapshot: _Snapshot, reports: list[Any]) -> Manifest:
        """Write what is the same for all ranks, the manifest last."""
        from trainer.checkpoint.dcp import pickled_metadata

        if not self._layout_files:
            layout = layout_of(self._plans.planned, self._chunks_by_rank.values())
            self._layout_files = {
                "layout.json": layout_to_json(layout).encode(),
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
                _check_visible(folder, name, size, rank)
        files |= _write_files(folder, common)
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
            },
        )
        _write_files(folder, {COMMIT: manifest.to_json().encode()})
        return manifest

    def _discard(self, unpublished: str) -> None:
        try:
            self.place.delete(unpublished)
        except Exception:  # the storage that failed may fail here too; what is left is cleaned at the next start
            return

    def _prune(self) -> str:
        """Rank 0: take away the checkpoints that are no longer kept.  Returns what went wrong: the save itself has not.

        Their names go at once, their bytes in the background: to unlink gigabytes takes a while.
        """
        if not self.world.is_main:
            return ""
        earlier, self._warning = self._warning, ""
        try:
            retired = [self.place.retire(name) for name in self._keeping.obsolete()]
        except Exception as error:
            return f"cannot remove checkpoints that are no longer kept: {_describe(error)}"
        if retired:
            self._deleting = self._thread.submit(self._at, f"deleting in {self.place}", lambda: self._delete(retired))
        return earlier

    def _delete(self, names: list[str]) -> None:
        try:
            for name in names:
                self.place.delete(name)
        except Exception as error:  # what is left is cleaned at the next start
            self._warning = f"cannot delete what is no longer kept: {_describe(error)}"

    # -- what is there -------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Return the steps of the published checkpoints, oldest first, as this rank sees them.  Not collective."""
        return list_steps(self.place)

    def newest_origin(self) -> Facts | None:
        """Return what the newest checkpoint says that can say it; None if none can.  Not collective."""
        for step in reversed(self.steps()):
            place = self.place / name_of(step)
            try:
                manifest = read_manifest(place)
                stored = read_file(place, manifest, "config.yaml").decode()
            except (Damaged, FileNotFoundError, UserError):
                continue
            started = manifest.extra
            return Facts(stored, manifest.mesh, str(started.get("job", "")), int(started.get("restarts", 0)))
        return None

    def clean(self) -> None:
        """Remove what killed attempts have left behind.  Only the owner of the run may; rank 0 does."""
        if self.world.is_main:
            self.wait_for_deleting()
            self.place.clean(PREFIX)

    # -- loading -------------------------------------------------------------------------------------------------

    def restore(self, state: Savable, compare: Compare, allowed: frozenset[str], careful: bool) -> Found | None:
        """Restore `state` from the newest good checkpoint; None if there is none at all.

        `careful`: look at every byte before anything is overwritten, for a state that is worth something.
        Damaged ones are left where they are until a good one is found, then set aside under another name.  One that was
        saved while updates were skipped is taken if there is no other.

        Raises UserError if the configuration or the state does not fit; TrainingFailed if none is good.
        """
        names = self.world.broadcast(self.world.agreed(self._candidates))
        damaged: dict[str, list[str]] = {}
        put_off: dict[str, int] = {}
        for name in chain.from_iterable((names, put_off)):  # the latter last, once all of them are known
            found, damage = self._try(name, put_off, state, compare, allowed, careful)
            if damage:
                damaged[name] = damage
            if found is not None:
                self.world.agreed(lambda: self._set_aside(damaged, DAMAGED))
                notes = _notes_on(put_off, found.manifest.step)
                return dataclasses.replace(found, damaged=damaged, warnings=[*found.warnings, *notes])
        if damaged:
            listed = "\n".join(f"  {line}" for lines in damaged.values() for line in lines)
            raise TrainingFailed(
                f"none of the {len(damaged)} checkpoints in {self.place} is good:\n{listed}\n"
                "  They are left as they are.  checkpoint.resume=none starts anew and moves them aside"
            )
        return None

    def _try(
        self,
        name: str,
        put_off: dict[str, int],
        state: Savable,
        compare: Compare,
        allowed: frozenset[str],
        careful: bool,
    ) -> tuple[Found | None, list[str]]:
        """Return what `_load` does, or nothing for one that is put off: it is noted, with how many were skipped."""
        place = self.place / name
        manifest, problem = self._manifest(place)
        if manifest is None:
            return None, [problem]
        if manifest.num_skipped and name not in put_off:
            put_off[name] = manifest.num_skipped
            return None, []
        return self._load(place, manifest, state, compare, allowed, careful)

    def load(self, place: Place, state: Savable, compare: Compare, allowed: frozenset[str], careful: bool) -> Found:
        """Restore `state` from the checkpoint at `place`, on any mesh.

        `careful`: look at every byte before anything is overwritten, for a state that is worth something.

        Raises UserError if there is no checkpoint, or it does not fit; TrainingFailed if it is damaged.
        """
        manifest, problem = self._manifest(place)
        found, damage = None, [problem]
        if manifest is not None:
            found, damage = self._load(place, manifest, state, compare, allowed, careful)
        if found is None:
            listed = "\n".join(f"  {line}" for line in damage)
            raise TrainingFailed(f"the checkpoint {place} is damaged:\n{listed}")
        return found

    def _set_aside(self, names: Iterable[str], why: str) -> None:
        if self.world.is_main:
            for name in names:
                self.place.set_aside(name, why)

    def doubt(self, since: int) -> str:
        """Set aside what was saved from update `since` on, after which every update had to be skipped: the next start
        tries the one before, if there is one, and that only once.  Returns what was done, or went wrong, in words.

        Not collective: for rank 0 of a run that has failed.
        """
        if not self.world.is_main or (self.in_flight and not self.is_written):
            return ""
        try:
            names = self._keeping.in_doubt(since)
            self._set_aside(names, DOUBTFUL)
        except Exception as error:  # the storage is away, too: what is in doubt stays where it is
            return f"cannot set aside what was saved after step {since}: {_describe(error)}"
        done = ", ".join(f"{name} was set aside as {DOUBTFUL}-{name}" for name in names)
        return done and f"every update since has failed: {done}; the same command goes on from the checkpoint before"

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing at all, as this rank sees it.  Not collective."""
        return not self.place.names()

    def _candidates(self) -> list[str]:
        if not self.world.is_main:
            return []
        self.place.recover()
        return [name_of(step) for step in reversed(self.steps())]

    def _manifest(self, place: Place) -> tuple[Manifest | None, str]:
        """Return the manifest, on all ranks; None, and what is wrong with it, if it is damaged."""
        manifest, problem = self.world.broadcast(self.world.agreed(lambda: _open(place, self.world.is_main)))
        return manifest, problem

    def _load(
        self,
        place: Place,
        manifest: Manifest,
        state: Savable,
        compare: Compare,
        allowed: frozenset[str],
        careful: bool,
    ) -> tuple[Found | None, list[str]]:
        """Restore from `place`.  Returns what was found; or None, and what is damaged."""
        depth = "sizes" if not self.settings.checksums else "full" if careful else "frames"
        _, damage = self._attempt(lambda: _look_for_damage(place, manifest, depth, self.world))
        if damage:
            return None, damage
        stored, damage = self._attempt(lambda: _Common(place, manifest, self.world))
        if stored is None or damage:
            return None, damage
        document, layout = stored.document, stored.layout
        different, changed = self.world.agreed(lambda: compare(stored.config_yaml))
        is_same_size = stored.own is not None
        fit = (state, document, layout, allowed, is_same_size)
        left_out, warnings = self.world.agreed(lambda: _check_fit(place, different, *fit))
        targets = self.world.agreed(lambda: _targets(state, layout, left_out))
        _, damage = self._attempt(lambda: self._read(place, manifest, layout, targets))
        if damage:
            return None, damage
        self.world.agreed(lambda: _apply(state, document, targets, stored.own, left_out))
        state.step = manifest.step
        if not is_same_size:
            for part in state.rank_parts.values():
                if isinstance(part, Restartable):
                    part.restart(manifest.step)
            if document.get("unlike"):
                keys = ", ".join(document["unlike"])
                warnings.append(f"each of {manifest.world_size} ranks had values of its own, rank 0's are used: {keys}")
        return Found(str(place), manifest, stored.config_yaml, warnings=warnings, changed=changed), []

    def _read(self, place: Place, manifest: Manifest, layout: Layout, targets: Mapping[str, torch.Tensor]) -> None:
        blocks = read_blocks(place, manifest)
        read_tensors(place, layout, blocks, targets, check=self.settings.checksums)

    def _attempt(self, work: Callable[[], Result]) -> tuple[Result | None, list[str]]:
        """Return what `work` returns on this rank, and on all ranks alike a line for all that is damaged on any."""
        result, damage = None, ""
        try:
            result = work()
        except Damaged as error:
            damage = str(error)
        except OSError as error:
            damage = f"rank {self.world.rank}: {_describe(error)}"
        lines = [line for text in self.world.gather(damage) for line in text.splitlines()]
        return result, list(dict.fromkeys(lines))


# ---------------------------------------------------------------------------------------------------------------


def _notes_on(put_off: Mapping[str, int], taken: int) -> list[str]:
    """Return what is to be said of checkpoints from inside a streak of skipped updates, where one was looked at."""
    if name_of(taken) in put_off:
        return [f"was saved while updates were skipped ({put_off[name_of(taken)]} in a row); there is no other"]
    return [
        f"is taken instead of {name}, which was saved while updates were skipped ({number} in a row): that is moved "
        "aside, and gone on from only where checkpoint.resume names it"
        for name, number in put_off.items()
    ]


def _open(place: Place, is_main: bool) -> tuple[Manifest | None, str]:
    """Rank 0: read the manifest.  Returns None and the reason if it is damaged."""
    if not is_main:
        return None, ""
    try:
        return read_manifest(place), ""
    except Damaged as error:
        return None, str(error)
    except FileNotFoundError:
        try:
            version = json.loads(place.read("state.json")).get("format_version")
        except (OSError, ValueError, AttributeError):
            version = None
        if version is not None:  # before there were manifests
            check_format(place, version)
        return None, f"{place}/{COMMIT}: is missing"
    except OSError as error:
        return None, f"{place}/{COMMIT}: {_describe(error)}"


def _step_back() -> None:
    """Let the training step go first where both want the same core."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)  # on Linux: of this thread alone


def _look_for_damage(place: Place, manifest: Manifest, depth: str, world: World) -> None:
    damage = find_damage(place, manifest, depth, world.rank, world.size)
    if damage:
        raise Damaged("\n".join(damage))


class _Common:
    """What of a checkpoint is no tensor: read, and checked as it is."""

    def __init__(self, place: Place, manifest: Manifest, world: World) -> None:
        self.document: dict[str, Any] = json.loads(read_file(place, manifest, "state.json"))
        self.layout = layout_from_json(read_file(place, manifest, "layout.json"))
        self.config_yaml = read_file(place, manifest, "config.yaml").decode()
        is_same_size = manifest.world_size == world.size
        self.own = read_file(place, manifest, _rank_file(world.rank)) if is_same_size else None


def _collect(state: Savable, num_ranks: int) -> _Snapshot:
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
                digests[name] = crc32(text), _checksum_of(loose)
            for path, tensor in found.items():
                key = ".".join(path)
                if key in tensors:
                    raise TypeError(f"two tensors of the state have the name {key}")
                tensors[key], paths[key] = tensor, path
        own_plain: dict[str, Any] = {}
        own_tensors: dict[str, torch.Tensor] = {}
        for name, part in state.rank_parts.items():
            own_plain[name], found = split(part.state_dict(), (name,))
            own_tensors |= {".".join(path): _copy_of(tensor) for path, tensor in found.items()}
    return _Snapshot(
        state.step, tensors, paths, plain, own_plain, own_tensors, digests, state.weights, state.num_skipped
    )


def _copy_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().clone()


def _checksum_of(tensors: Sequence[torch.Tensor]) -> int:
    """Return the CRC-32 of the tensors' bytes.  Those of a GPU come over in one piece."""
    crc = 0
    whole = [tensor.detach().contiguous().flatten().view(torch.uint8) for tensor in tensors if tensor.numel()]
    on_cpu = [part for part in whole if part.device.type == "cpu"]
    elsewhere = [part for part in whole if part.device.type != "cpu"]
    for part in [*on_cpu, *([torch.cat(elsewhere).cpu()] if elsewhere else [])]:
        crc = crc32(part.numpy().data, crc)
    return crc


def _unlike_parts(digests: list[dict[str, tuple[int, int]]]) -> list[str]:
    """Return the parts whose plain tensors are not the same on all ranks.  Raises UserError if plain values are not."""
    unlike = []
    for name, (values, tensors) in digests[0].items():
        others = [rank for rank, own in enumerate(digests) if name not in own or own[name][0] != values]
        if others:
            raise UserError(_not_the_same(name, "values", others[0]))
        if any(own[name][1] != tensors for own in digests):
            unlike.append(name)
    return unlike


def _not_the_same(name: str, what: str, rank: int) -> str:
    return (
        f"state {name!r}: rank {rank} does not hold the same {what} as rank 0; state that is each rank's own is added "
        f"with self.state.add({name!r}, ..., per_rank=True)"
    )


def _targets(state: Savable, layout: Layout, left_out: set[str]) -> dict[str, torch.Tensor]:
    """Return where each stored tensor is to be read: into the live state where it has such a tensor."""
    targets: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, part in state.parts.items():
            if name in left_out:
                continue
            stored = _within(layout, name)
            if isinstance(part, Strict):
                part.prepare(stored)
            _, live = split(part.state_dict(), (name,))
            by_key = {".".join(path): tensor for path, tensor in live.items()}
            for key in stored:
                full = f"{name}.{key}"
                tensor = by_key.get(full)
                if tensor is None or tuple(tensor.shape) != stored[key].shape:
                    tensor = torch.empty(stored[key].shape, dtype=stored[key].dtype)
                targets[full] = tensor.detach()
    return targets


def _within(layout: Layout, name: str) -> dict[str, Stored]:
    return {key.removeprefix(f"{name}."): stored for key, stored in layout.items() if key.startswith(f"{name}.")}


def _check_fit(
    place: Place,
    different: list[str],
    state: Savable,
    document: Mapping[str, Any],
    layout: Layout,
    allowed: frozenset[str],
    is_same_size: bool,
) -> tuple[set[str], list[str]]:
    """Return the parts that stay as they are because that is allowed, and what is to be told.

    Raises UserError with all that does not fit, `different` among it.
    """
    unfit, left_out = _differences(state, document, layout, allowed, is_same_size)
    told: list[str] = []
    for name, part in state.parts.items():
        if isinstance(part, Dependent) and name in document["parts"] and f"state.{name}" not in allowed:
            changed, remarks = part.changes_outside(document["parts"][name], allowed)
            unfit += changed
            told += remarks
    if different or unfit:
        lines = [*different, *unfit, _advice(different, unfit)]
        raise UserError(f"cannot resume from {place}:\n" + "\n".join(f"  {line}" for line in lines))
    return left_out, told


def _differences(
    state: Savable, document: Mapping[str, Any], layout: Layout, allowed: frozenset[str], is_same_size: bool
) -> tuple[list[str], set[str]]:
    """Return a line for everything that does not fit, and the parts that stay as they are because that is allowed."""
    # The first checkpoints of this format did not list the ranks' parts.
    parts, rank_parts = document["parts"], document.get("rank_parts", list(state.rank_parts))
    known = {*state.parts, *state.rank_parts, *parts, *rank_parts}
    for named in allowed:
        if named.startswith("state.") and named.removeprefix("state.") not in known:
            raise choice_error("checkpoint.allow_changes", named, [f"state.{name}" for name in sorted(known)])
    lines: list[str] = []
    left_out = set()
    for name, part in [*state.parts.items(), *state.rank_parts.items()]:
        unfit: list[str] = []
        if name not in (parts if name in state.parts else rank_parts):
            unfit = [] if getattr(part, "may_be_absent", False) else [_other_state(name, "not in the checkpoint")]
        elif name in state.rank_parts:
            if not is_same_size and not isinstance(part, Restartable):
                unfit = [_other_state(name, "each rank's own, of another number of ranks")]
        elif isinstance(part, Strict):
            unfit = part.differences(parts[name], _within(layout, name))
        else:
            unfit = _sharded_differences(name, part, layout)
        if unfit and f"state.{name}" in allowed:
            left_out.add(name)
        else:
            lines += unfit
    for name in [*parts, *rank_parts]:
        if name not in {*state.parts, *state.rank_parts} and f"state.{name}" not in allowed:
            lines.append(_other_state(name, "only in the checkpoint"))
    return lines, left_out


def _advice(different: list[str], unfit: list[str]) -> str:
    """Return what to do about a checkpoint that was refused."""
    keys = [line.partition(":")[0] for line in different] + [part for line in unfit for part in _OFFER.findall(line)]
    if len(keys) < len(different) + len(unfit):
        return (
            "take another run.dir; train.init_from starts one with the weights of a checkpoint, where they fit the "
            "model.  checkpoint.allow_changes=[state.<name>] leaves one kind of state as it is made anew"
        )
    return f"restore it, take another run.dir, or allow it: checkpoint.allow_changes=[{','.join(keys)}]"


def _other_state(name: str, where: str) -> str:
    return f"state {name!r}: {where} (allow it: checkpoint.allow_changes=[state.{name}])"


_OFFER = re.compile(r"allow it: checkpoint\.allow_changes=\[([^\]]+)\]")


def _sharded_differences(name: str, part: Stateful, layout: Layout) -> list[str]:
    with torch.no_grad():
        _, live = split(part.state_dict(), (name,))
    lines = []
    for path, tensor in live.items():
        stored = layout.get(".".join(path))
        if isinstance(tensor, DTensor) and stored is not None and tuple(tensor.shape) != stored.shape:
            lines.append(
                f"{'.'.join(path)}: shape {_shape(stored.shape)} in the checkpoint, {_shape(tensor.shape)} now"
            )
    return lines


def tensor_differences(own: Mapping[str, torch.Tensor], stored: Mapping[str, Stored]) -> Iterator[str]:
    """Yield a line for each difference in keys, shapes and dtypes, both ways."""
    for key in [*own, *(key for key in stored if key not in own)]:
        if key not in stored:
            yield f"{key}: {_shape(own[key].shape)}, not in the checkpoint"
        elif key not in own:
            yield f"{key}: {_shape(stored[key].shape)}, only in the checkpoint"
        else:
            before, now = stored[key], own[key]
            if before.shape != tuple(now.shape):
                yield f"{key}: shape {_shape(before.shape)} in the checkpoint, {_shape(now.shape)} now"
            if before.dtype != now.dtype:
                yield f"{key}: dtype {_dtype(before.dtype)} in the checkpoint, {_dtype(now.dtype)} now"


def _shape(shape: Any) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _apply(
    state: Savable,
    document: Mapping[str, Any],
    targets: Mapping[str, torch.Tensor],
    own: bytes | None,
    left_out: set[str],
) -> None:
    """Hand every part what is its own.  Only now, when all has been read and checked."""
    plain, tensors = ({}, {}) if own is None else _read_own(own)
    unlike = {key: tensors[key] for key in document.get("unlike", []) if key in tensors}
    with torch.no_grad():
        for name, part in state.parts.items():
            if name in document["parts"] and name not in left_out:
                part.load_state_dict(join(document["parts"][name], {**targets, **unlike}))
        for name, part in state.rank_parts.items():
            if name in plain and name not in left_out:
                part.load_state_dict(join(plain[name], tensors))


def _read_own(own: bytes) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    header = json.loads(own[8 : 8 + int.from_bytes(own[:8], "little")])
    return json.loads(header["__metadata__"]["state"]), safetensors.torch.load(own)


def _check_visible(folder: Place, name: str, size: int, rank: int) -> None:
    """Raise OSError unless rank 0 sees what another rank has written."""
    try:
        found = folder.size(name)
    except FileNotFoundError:
        raise OSError(
            f"{folder}/{name}, which rank {rank} has written, is not seen by rank 0: checkpoints need a place that all "
            "nodes share (run.dir, or checkpoint.dir)"
        ) from None
    if found != size:
        raise OSError(f"{folder}/{name}: rank {rank} has written {size} bytes, rank 0 sees {found}")


def _rank_file(rank: int) -> str:
    return f"ranks/{rank:05d}.safetensors"


def _write_files(folder: Place, contents: Mapping[str, bytes]) -> dict[str, tuple[int, int]]:
    """Write small files, and look at each again: storage may say that all is well and keep a part.

    Returns their sizes and checksums.  Raises OSError.
    """
    for name, data in contents.items():
        file = folder.create(name)
        try:
            file.write(data)
        finally:
            file.close()
        kept = folder.read(name)
        if kept != data:
            raise OSError(f"{folder}/{name}: the storage has kept {_part(kept, data)}, and reported no error")
    return {name: (len(data), crc32(data)) for name, data in contents.items()}


def _part(kept: bytes, data: bytes) -> str:
    return f"{len(kept)} of {len(data)} bytes" if len(kept) != len(data) else "other bytes"


def _done(result: SaveResult) -> Future[SaveResult]:
    future: Future[SaveResult] = Future()
    future.set_result(result)
    return future


def _describe(error: BaseException) -> str:
    text = str(error) or repr(error)
    return text if isinstance(error, (UserError, Damaged)) else f"{type(error).__name__}: {text}"


def _raise_first_mistake(mistakes: list[str | None]) -> None:
    for rank, mistake in enumerate(mistakes):
        if mistake is not None:
            raise UserError(f"rank {rank}: {mistake}")


def _joined(errors: Any) -> str:
    """Return one message for what failed on any rank, with the ranks that say so; empty if nothing did."""
    ranks: dict[str, list[int]] = {}
    for rank, error in enumerate(errors):
        if error:
            ranks.setdefault(error, []).append(rank)
    return "; ".join(
        f"rank{'s' if len(who) > 1 else ''} {', '.join(map(str, who))}: {error}" for error, who in ranks.items()
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**28 else f"{num_bytes / 2**20:.1f} MiB"
