"""Finds checkpoints, checks one against the live training state, and restores it; also reads weights by name.

Before a restore, rank 0 verifies the manifest.  The ranks then divide all files but `.metadata` among themselves and
verify the sizes and, unless `checkpoint.verify=sizes`, the checksums; large tensors may be verified while they are
read.  A damaged checkpoint is reported and the one before it is tried; if a specific checkpoint was requested, the run
fails instead.  All ranks restore the same checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from trainer.checkpoint.layout import (
    Chunk,
    Layout,
    ReadRequest,
    StoredTensor,
    Tensors,
    layout_from_json,
    plan_reads,
)
from trainer.checkpoint.manifest import (
    CHECKPOINT_PREFIX,
    Manifest,
    RunInfo,
    StoredBlocks,
    check_format,
    checkpoint_name,
    find_damage,
    list_steps,
    rank_file,
    read_file,
    read_manifest,
)
from trainer.checkpoint.retention import best_step, newest_step
from trainer.checkpoint.state_parts import SharedState, StatePart, join_state, rank_state_from_bytes, split_state
from trainer.checkpoint.storage import (
    DAMAGED,
    MANIFEST,
    BlockReader,
    Blocks,
    Damaged,
    LocalStorage,
    PinnedStorage,
    Storage,
    describe,
    is_same_location,
    list_configured_folder,
    open_storage,
)
from trainer.config import RunConfig, compare_configs, stored_value
from trainer.config.location import CHECKPOINT_FILES
from trainer.config.passes import current_checkpoint_dir
from trainer.config.stored import CONFIG, run_from_best_path
from trainer.distributed.world import World
from trainer.errors import TrainingFailed, UserError, is_masked, nearest, setting_error
from trainer.files import local_path
from trainer.recipe import StoredTensors

if TYPE_CHECKING:
    from trainer.lifecycle.state import TrainState

Result = TypeVar("Result")


@dataclass(frozen=True)
class RestoredCheckpoint:
    """The checkpoint that was restored, and the damaged ones that were tried before it."""

    path: str
    manifest: Manifest
    config_yaml: str
    """The configuration of the run that wrote the checkpoint."""
    damaged: Mapping[str, list[str]] = field(default_factory=dict)
    """The problems of each damaged checkpoint, by its name."""
    warnings: Sequence[str] = ()
    """What the user should know about this checkpoint, such as state that could not be restored exactly."""
    changed: Sequence[str] = ()
    """Permitted differences in settings, one line each."""


@dataclass(frozen=True)
class RestoreRequest:
    """The state to restore, and the conditions for restoring it."""

    state: TrainState
    config: RunConfig
    """The current configuration, to compare with the checkpoint's."""
    allowed: frozenset[str]
    """Keys and parts of the state that may differ (`checkpoint.allow_changes`)."""
    verify_first: bool
    """Verify all checksums before anything is overwritten, so that a damaged checkpoint cannot spoil the current state.
    No effect with `checkpoint.verify=sizes`."""


class CheckpointReader:
    """Restores a state from a checkpoint of one folder, or from a given one.  Collective unless noted otherwise."""

    def __init__(self, storage: Storage, world: World, checksums: bool) -> None:
        """storage: the folder of checkpoints.  checksums: whether to verify checksums, or only sizes."""
        self.storage, self.world, self._checksums = storage, world, checksums

    def newest_run_info(self) -> RunInfo | None:
        """Return the run that wrote the newest readable checkpoint, or None.  Not collective."""
        for step in reversed(list_steps(self.storage)):
            storage = self.storage / checkpoint_name(step)
            try:
                manifest = read_manifest(storage)
                config_yaml = read_file(storage, manifest, "config.yaml").decode()
            except (Damaged, FileNotFoundError, UserError):
                continue
            extra = manifest.extra
            return RunInfo(config_yaml, manifest.mesh, str(extra.get("job", "")), int(extra.get("restarts", 0)))
        return None

    @property
    def is_empty(self) -> bool:
        """True if the folder is empty or missing, as seen by this rank.  Not collective."""
        return not list_configured_folder(self.storage)

    def restore(self, request: RestoreRequest) -> RestoredCheckpoint | None:
        """Restore a state from the newest good checkpoint; return None if the folder has no checkpoints.

        Damaged checkpoints are quarantined once a good one has been restored.  A checkpoint that was saved while steps
        were skipped is used only if no other can be restored.

        Raises UserError if the configuration or the state is incompatible, TrainingFailed if no checkpoint is good.
        """
        names = self.world.broadcast(self.world.agreed(self._candidate_names))
        damaged: dict[str, list[str]] = {}
        postponed: dict[str, int] = {}
        for name in chain.from_iterable((names, postponed)):  # lazily, because the loop over `names` fills `postponed`
            storage = self.storage / name
            manifest, problem = self._broadcast_manifest(storage)
            restored, damage = None, [problem]
            if manifest is not None:
                if manifest.num_skipped and name not in postponed:
                    postponed[name] = manifest.num_skipped
                    continue
                restored, damage = self._load(storage, manifest, request)
            if damage:
                damaged[name] = damage
            if restored is not None:
                self.world.agreed(lambda: self._quarantine_damaged(damaged))
                warnings = [*restored.warnings, *_warnings_about(postponed, restored.manifest.step)]
                return dataclasses.replace(restored, damaged=damaged, warnings=warnings)
        if damaged:
            problems = "\n".join(f"  {line}" for lines in damaged.values() for line in lines)
            raise TrainingFailed(
                f"none of the {len(damaged)} checkpoints in {self.storage} is good:\n{problems}\n"
                "  They have not been changed.  checkpoint.resume=none starts over and moves them aside"
            )
        return None

    def load(self, storage: Storage, request: RestoreRequest) -> RestoredCheckpoint:
        """Restore a state from the checkpoint at `storage`, which may have been saved on another mesh.

        Raises UserError if the checkpoint is incompatible, TrainingFailed if it is damaged or has no manifest.
        """
        manifest, problem = self._broadcast_manifest(storage)
        restored, damage = None, [problem]
        if manifest is not None:
            restored, damage = self._load(storage, manifest, request)
        if restored is None:
            problems = "\n".join(f"  {line}" for line in damage)
            raise TrainingFailed(f"the checkpoint {storage} is damaged:\n{problems}")
        return restored

    def _quarantine_damaged(self, names: Iterable[str]) -> None:
        """On rank 0, move the damaged checkpoints aside, so that they are not tried again."""
        if self.world.is_main:
            for name in names:
                self.storage.quarantine(name, DAMAGED)

    def _candidate_names(self) -> list[str]:
        """Return the names of the checkpoints to try, newest first, on rank 0; an empty list on the others."""
        if not self.world.is_main:
            return []
        self.storage.recover()
        return [checkpoint_name(step) for step in reversed(list_steps(self.storage))]

    def _broadcast_manifest(self, storage: Storage) -> tuple[Manifest | None, str]:
        """Return the manifest on all ranks, or None and the problem if it is damaged."""
        manifest, problem = self.world.broadcast(
            self.world.agreed(lambda: _open_manifest(storage) if self.world.is_main else (None, ""))
        )
        return manifest, problem

    def _load(
        self, storage: Storage, manifest: Manifest, request: RestoreRequest
    ) -> tuple[RestoredCheckpoint | None, list[str]]:
        """Restore from `storage`.  Returns the restored checkpoint, or None and the damage."""
        state = request.state
        depth = "sizes" if not self._checksums else "full" if request.verify_first else "metadata"
        _, damage = self._attempt(lambda: _raise_if_damaged(storage, manifest, depth, self.world))
        if damage:
            return None, damage
        stored, damage = self._attempt(lambda: StoredState(storage, manifest, self.world))
        if stored is None or damage:
            return None, damage
        layout, blocks = stored.layout, StoredBlocks(storage, manifest)
        refused, changed = self.world.agreed(lambda: compare_configs(request.config, stored.config_yaml))
        left_out, warnings = self.world.agreed(
            lambda: check_compatible(storage, refused, state, stored, request.allowed)
        )
        targets = self.world.agreed(lambda: prepare_targets(state, layout, left_out))
        _, damage = self._attempt(lambda: read_tensors(storage, layout, blocks, targets, check=self._checksums))
        if damage:
            return None, damage
        self.world.agreed(lambda: load_parts(state, stored, targets, left_out))
        state.step = manifest.step
        if stored.per_rank_bytes is None:
            for part in state.per_rank_parts.values():
                StatePart.of(part).restart(manifest.step)
            if stored.shared.differing_keys:
                keys = ", ".join(stored.shared.differing_keys)
                warnings.append(
                    f"each of {manifest.world_size} ranks had its own values; using those of rank 0: {keys}"
                )
        return RestoredCheckpoint(str(storage), manifest, stored.config_yaml, warnings=warnings, changed=changed), []

    def _attempt(self, work: Callable[[], Result]) -> tuple[Result | None, list[str]]:
        """Return the result of `work` on this rank, and the damage found by any rank, one line each.  One gather."""
        result, damage = None, ""
        try:
            result = work()
        except Damaged as error:
            damage = str(error)
        except OSError as error:
            damage = f"rank {self.world.rank}: {describe(error)}"
        lines = [line for text in self.world.gather(damage) for line in text.splitlines()]
        return result, list(dict.fromkeys(lines))


def _warnings_about(postponed: Mapping[str, int], restored_step: int) -> list[str]:
    """Return warnings about checkpoints that were saved while steps were skipped.

    postponed: the number of consecutive skipped steps of each such checkpoint, by name.
    """
    name = checkpoint_name(restored_step)
    if name in postponed:
        return [f"was saved while steps were skipped ({postponed[name]} in a row); there is no other checkpoint"]
    return [
        f"is used instead of {name}, which was saved while steps were skipped ({number} in a row): that one is moved "
        "aside, and used only if checkpoint.resume names it"
        for name, number in postponed.items()
    ]


def _open_manifest(storage: Storage) -> tuple[Manifest | None, str]:
    """Return the manifest, or None and the problem if it is damaged."""
    try:
        return read_manifest(storage), ""
    except Damaged as error:
        return None, str(error)
    except FileNotFoundError:
        try:
            version = json.loads(storage.read("state.json")).get("format_version")
        except (OSError, ValueError, AttributeError):
            version = None
        if version is not None:  # formats before the manifest was introduced
            check_format(storage, version)
        return None, f"{storage}/{MANIFEST}: is missing"
    except OSError as error:
        return None, f"{storage}/{MANIFEST}: {describe(error)}"


def _raise_if_damaged(storage: Storage, manifest: Manifest, depth: str, world: World) -> None:
    damage = find_damage(storage, manifest, depth, world.rank, world.size)
    if damage:
        raise Damaged("\n".join(damage))


# ---------------------------------------------------------------------------------------------------------------
# Comparing a checkpoint with the state to restore

_ALLOW_HINT = re.compile(r"allow it: checkpoint\.allow_changes=\[([^\]]+)\]")

_MAX_LINES, _MAX_CHARACTERS = 4, 300
"""Maximum number of differences in the error message, and of characters in each: a single cause, such as a different
width, shows up in every tensor."""


class IncompatibleCheckpoint(UserError):
    """Raised if a checkpoint cannot be restored into the state.

    `lines` holds all differences, settings first; the message shows some of them.
    """

    def __init__(self, storage: Storage, settings: list[str], by_part: Mapping[str, list[str]]) -> None:
        """settings: the differences in settings, one line each.

        by_part: the differences in the state, one line each, by part.
        """
        part_lines = [line for lines in by_part.values() for line in lines]
        self.lines = [*settings, *part_lines]
        # A different optimizer explains the differences in its state, which then need no advice of their own.
        has_new_optimizer = any(line.startswith("optim.name:") for line in settings)
        lines_to_advise_on = [
            line for name, lines in by_part.items() if name != "optimizer" or not has_new_optimizer for line in lines
        ]
        parts = [name for name, lines in by_part.items() if any(not _ALLOW_HINT.search(line) for line in lines)]
        self._storage, self._advice = storage, advice_for(settings, lines_to_advise_on, parts)
        limit = _MAX_LINES if len(self.lines) <= _MAX_LINES else _MAX_LINES - 1  # one line for the number of others
        first_lines = [lines[0] for lines in by_part.values()]
        others = [line for line in part_lines if line not in first_lines]
        self._shown = [*settings, *first_lines, *others][:limit]
        super().__init__(self.message())

    @property
    def is_short(self) -> bool:
        """True if the message shows all differences in full."""
        return len(self.lines) == len(self._shown) and all(len(line) <= _MAX_CHARACTERS for line in self.lines)

    def message(self, file: str = "") -> str:
        """Return the message; `file` names a file that holds all lines."""
        shown = [line if len(line) <= _MAX_CHARACTERS else f"{line[:_MAX_CHARACTERS]}..." for line in self._shown]
        if more := len(self.lines) - len(self._shown):
            shown.append(f"and {more} more differences" + f": {file}" * bool(file))
        elif file:
            shown.append(f"in full: {file}")
        return f"cannot resume from {self._storage}:\n" + "\n".join(f"  {line}" for line in (*shown, self._advice))


class StoredState:
    """The small files of a checkpoint, without the data files.  Each is verified as it is read."""

    def __init__(self, storage: Storage, manifest: Manifest, world: World) -> None:
        self.shared = SharedState.from_json(read_file(storage, manifest, "state.json"))
        self.layout = layout_from_json(read_file(storage, manifest, "layout.json"))
        self.config_yaml = read_file(storage, manifest, "config.yaml").decode()
        is_same_size = manifest.world_size == world.size
        self.per_rank_bytes = read_file(storage, manifest, rank_file(world.rank)) if is_same_size else None
        """Content of this rank's file of per-rank state; None if the checkpoint has a different number of ranks."""


def prepare_targets(state: TrainState, layout: Layout, left_out: set[str]) -> dict[str, torch.Tensor]:
    """Prepare all parts for loading, and return the tensor to read each stored tensor into, by key.

    This is the live tensor if it has the same shape, otherwise a new one on the CPU.  left_out: parts not to restore.
    """
    targets: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, part in state.parts.items():
            if name in left_out:
                continue
            stored = _part_of_layout(layout, name)
            StatePart.of(part).prepare(stored)
            _, tensors = split_state(part.state_dict(), (name,))
            live = {".".join(path): tensor for path, tensor in tensors.items()}
            for key_in_part, stored_tensor in stored.items():
                key = f"{name}.{key_in_part}"
                tensor = live.get(key)
                if tensor is None or tuple(tensor.shape) != stored_tensor.shape:
                    tensor = torch.empty(stored_tensor.shape, dtype=stored_tensor.dtype)
                targets[key] = tensor.detach()
    return targets


def _part_of_layout(layout: Layout, part: str) -> dict[str, StoredTensor]:
    return {key.removeprefix(f"{part}."): stored for key, stored in layout.items() if key.startswith(f"{part}.")}


def check_compatible(
    storage: Storage, settings: list[str], state: TrainState, stored: StoredState, allowed: frozenset[str]
) -> tuple[set[str], list[str]]:
    """Return the parts not to restore, which differ but are in `allowed`, and remarks to print.

    settings: forbidden differences in settings, one line each.

    Raises IncompatibleCheckpoint with these and all forbidden differences in the state, and UserError if `allowed`
    names a part that does not exist.
    """
    parts, per_rank_parts = stored.shared.parts, stored.shared.per_rank_parts
    if per_rank_parts is None:
        per_rank_parts = list(state.per_rank_parts)
    names = {*state.parts, *state.per_rank_parts, *parts, *per_rank_parts}
    for entry in allowed:
        if entry.startswith("state.") and entry.removeprefix("state.") not in names:
            rule = f"the state has {', '.join(f'state.{name}' for name in sorted(names))}"
            best = nearest(entry.removeprefix("state."), names)
            meant = [f"state.{best}"] if best else None
            fix = "" if best else "leave it out, or name one of these"
            raise setting_error("checkpoint.allow_changes", [entry], rule, meant=meant, fix=fix)
    by_part: dict[str, list[str]] = {}
    left_out = set()
    for name, stateful in [*state.parts.items(), *state.per_rank_parts.items()]:
        part = StatePart.of(stateful)
        differences: list[str] | None = []
        if name not in (parts if name in state.parts else per_rank_parts):
            differences = [] if part.may_be_absent else [_state_differs(name, "not in the checkpoint")]
        elif name in state.per_rank_parts:
            if stored.per_rank_bytes is None and not part.can_restart:
                differences = [_state_differs(name, "per-rank state, saved with a different number of ranks")]
        else:
            differences = part.differences(parts[name], _part_of_layout(stored.layout, name))
            if differences is None:
                differences = _sharded_differences(name, part, stored.layout)
        if differences and f"state.{name}" in allowed:
            left_out.add(name)
        elif differences:
            by_part[name] = differences
    for name in [*parts, *per_rank_parts]:
        if name not in {*state.parts, *state.per_rank_parts} and f"state.{name}" not in allowed:
            by_part[name] = [_state_differs(name, "only in the checkpoint")]
    all_remarks: list[str] = []
    for name, stateful in state.parts.items():
        if name in parts and f"state.{name}" not in allowed:
            changed, remarks = StatePart.of(stateful).changes_from(parts[name], allowed)
            if changed:
                by_part[name] = by_part.get(name, []) + changed
            all_remarks += remarks
    if settings or by_part:
        raise IncompatibleCheckpoint(storage, settings, by_part)
    return left_out, all_remarks


def advice_for(settings: list[str], part_lines: list[str], parts: Sequence[str] = ()) -> str:
    """Return advice on a checkpoint that was refused.

    settings: the differences in settings, one line each.
    part_lines: the differences in parts of the state, one line each.
    parts: the parts that have a difference whose line does not say how to allow it.
    """
    keys = [line.partition(":")[0] for line in settings]
    keys += [key for line in part_lines for key in _ALLOW_HINT.findall(line)]
    if len(keys) < len(settings) + len(part_lines):
        names = [f"state.{name}" for name in parts if name != "optimizer" or "model" not in parts]  # model implies it
        keys = ["model" if key == "model.name" else key for key in keys]  # covers all its settings
        allowed = shlex.quote(f"checkpoint.allow_changes=[{','.join(dict.fromkeys([*keys, *names]))}]")
        return (
            "to fix: undo the change, or train another run: run.name=NAME (train.init_from starts it from these "
            f"weights, if they match); {allowed} reinitializes what does not match"
        )
    needed = [key for key in dict.fromkeys(keys) if key.partition(".")[0] == key or key.partition(".")[0] not in keys]
    allowed = shlex.quote(f"checkpoint.allow_changes=[{','.join(needed)}]")
    return f"to fix: undo the change, train another run (run.name=NAME), or allow it: {allowed}"


def _state_differs(name: str, where: str) -> str:
    return f"state {name!r}: {where} (allow it: checkpoint.allow_changes=[state.{name}])"


def _sharded_differences(name: str, part: StatePart, layout: Layout) -> list[str]:
    """Return one line per DTensor of a part whose shape differs from the stored one."""
    with torch.no_grad():
        _, tensors = split_state(part.state_dict(), (name,))
    lines = []
    for path, tensor in tensors.items():
        stored = layout.get(".".join(path))
        if isinstance(tensor, DTensor) and stored is not None and tuple(tensor.shape) != stored.shape:
            lines.append(
                f"{'.'.join(path)}: shape {_shape(stored.shape)} in the checkpoint, {_shape(tensor.shape)} now"
            )
    return lines


def tensor_differences(live: Mapping[str, torch.Tensor], stored: Mapping[str, StoredTensor]) -> Iterator[str]:
    """Yield one line per difference between live and stored tensors in keys, shapes and dtypes."""
    for key in [*live, *(key for key in stored if key not in live)]:
        if key not in stored:
            yield f"{key}: {_shape(live[key].shape)}, not in the checkpoint"
        elif key not in live:
            yield f"{key}: {_shape(stored[key].shape)}, only in the checkpoint"
        else:
            before, now = stored[key], live[key]
            if before.shape != tuple(now.shape):
                yield f"{key}: shape {_shape(before.shape)} in the checkpoint, {_shape(now.shape)} now"
            if before.dtype != now.dtype:
                yield f"{key}: dtype {_dtype(before.dtype)} in the checkpoint, {_dtype(now.dtype)} now"


def _shape(shape: Any) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def load_parts(state: TrainState, stored: StoredState, targets: Mapping[str, torch.Tensor], left_out: set[str]) -> None:
    """Load the state of every part not in `left_out`.  Call this only after everything has been read and verified.

    targets: the tensors that were read, by key.
    """
    content = stored.per_rank_bytes
    plain, tensors = rank_state_from_bytes(content) if content is not None else ({}, {})
    differing = {key: tensors[key] for key in stored.shared.differing_keys if key in tensors}
    with torch.no_grad():
        for name, part in state.parts.items():
            if name in stored.shared.parts and name not in left_out:
                part.load_state_dict(join_state(stored.shared.parts[name], {**targets, **differing}))
        for name, part in state.per_rank_parts.items():
            if name in plain and name not in left_out:
                part.load_state_dict(join_state(plain[name], tensors))


# ---------------------------------------------------------------------------------------------------------------
# Finding the checkpoint that a path refers to


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Return whether `path`, a folder or URL, is a single checkpoint, even if it is damaged or has no manifest."""
    return not CHECKPOINT_FILES.isdisjoint(list_configured_folder(open_storage(path)))


def find_checkpoints(path: str | os.PathLike[str]) -> Storage:
    """Return the folder of checkpoints at `path`, which is that folder or a run folder.  Raises UserError."""
    storage = open_storage(path)
    for folder in (storage, storage / "checkpoints", *_configured_folder(storage)):
        if any(name.startswith(CHECKPOINT_PREFIX) for name in folder.names()) or folder.quarantined_names():
            return folder
    local = local_path(path)
    rule = "has no checkpoints"
    if local is not None and not local.is_dir():
        rule = "is a file" if local.exists() else "no such folder"
    raise UserError(f"{path}: {rule}\n  to fix: give a run folder, or the folder in checkpoint.dir")


def find_checkpoint(path: str | os.PathLike[str]) -> Storage:
    """Return the checkpoint that `path` refers to.

    `path` is a checkpoint, a run folder, a folder of checkpoints, or `RUN/best`.  A folder refers to its newest
    checkpoint, or to one saved while steps were skipped only if there is no other.  `RUN/best` refers to the run's
    checkpoint with the best evaluation.

    Raises UserError if there is no such checkpoint.  Damage is detected only when the checkpoint is read.
    """
    if is_checkpoint(path):
        return open_storage(path)
    if (run := run_from_best_path(os.fspath(path))) is not None:
        folder = find_checkpoints(run)
        best = best_step(folder)
        if best is None:
            raise UserError(f"{path}: none of the checkpoints in {folder} was evaluated when it was saved")
        return folder / checkpoint_name(best)
    folder = find_checkpoints(path)
    step = newest_step(folder)
    if step is None:
        raise UserError(f"{path}: has no checkpoint")
    return folder / checkpoint_name(step)


def _configured_folder(run: Storage) -> list[Storage]:
    """Return the `checkpoint.dir` in a run's stored configuration as a list, which is empty if it is not set.

    Raises UserError if its credentials are masked.
    """
    try:
        text = run.read(CONFIG).decode(errors="replace")
        checkpoint_dir, run_dir = stored_value(text, "checkpoint.dir"), stored_value(text, "run.dir")
    except (OSError, UserError):  # not a run folder
        return []
    if is_masked(checkpoint_dir):
        raise UserError(
            f"{run}: its checkpoints are at {checkpoint_dir}, but credentials are not stored; give the complete URL"
        )
    if not (isinstance(checkpoint_dir, str) and checkpoint_dir):
        return []
    return [open_storage(current_checkpoint_dir(checkpoint_dir, str(run_dir or run), str(run)))]


# ---------------------------------------------------------------------------------------------------------------
# Weights by name, whole or by rows, in one process and without a process group

_MAX_ATTEMPTS = 50
"""Maximum number of attempts to open the newest checkpoint of a live run, which may be pruning it."""
_AVERAGE_PREFIX = "ema.weights."
"""Prefix of the keys of averaged weights."""


class StoredWeights(StoredTensors):
    """The model's weights in one checkpoint, verified as they are read."""

    def __init__(self, storage: Storage, averaged: bool = False) -> None:
        """With `averaged`, trained weights are replaced by their average (`train.ema`), cast to the weights' dtype.

        The files of a local checkpoint are held open, as far as the limit on open files permits, so that they remain
        readable even if a live run prunes the checkpoint.

        Raises UserError if there is no checkpoint or it has no average, TrainingFailed if it is damaged.
        """
        self.description = str(storage)
        try:
            self.manifest = read_manifest(storage)
            if isinstance(storage, LocalStorage) and not isinstance(storage, PinnedStorage):
                with suppress(FileNotFoundError):  # the check below reports which one is missing
                    storage = PinnedStorage(storage.path, [MANIFEST, *self.manifest.files])
            self.storage = storage
            damage = find_damage(storage, self.manifest, "metadata")
            if damage:
                raise Damaged("\n  ".join(damage))
            layout = layout_from_json(read_file(storage, self.manifest, "layout.json"))
            self._blocks = StoredBlocks(storage, self.manifest)
            self.config_yaml = read_file(storage, self.manifest, "config.yaml").decode()
            self.parts = SharedState.from_json(read_file(storage, self.manifest, "state.json")).parts
        except FileNotFoundError as error:
            raise UserError(f"{storage}: no checkpoint here ({MANIFEST} is missing)") from error
        except Damaged as error:
            raise TrainingFailed(f"the checkpoint {storage} is damaged:\n  {error}") from error
        self.layout = layout
        self._stored = _part_of_layout(layout, "model")
        if averaged and not any(key.startswith(_AVERAGE_PREFIX) for key in layout):
            raise UserError(f"{storage}: has no averaged weights: its run had train.ema=0")
        self._keys = {
            name: f"{_AVERAGE_PREFIX}{name}"
            for name in self._stored
            if averaged and f"{_AVERAGE_PREFIX}{name}" in layout
        }

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return rows [start, stop) of a parameter, all by default.  Raises TrainingFailed if they are damaged."""
        if name in self._keys:
            return self.read_stored(self._keys[name], start, stop).to(self.dtypes[name])
        return self.read_stored(f"model.{name}", start, stop)

    def read_stored(self, key: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return rows [start, stop) of any tensor of the checkpoint, by its full key.  Raises TrainingFailed."""
        try:
            return read_rows(self.storage, self.layout[key], self._blocks, start, stop)
        except (Damaged, OSError) as error:
            raise TrainingFailed(f"the checkpoint {self.storage} is damaged:\n  {error}") from error


def open_checkpoint(path: str | os.PathLike[str], averaged: bool = False) -> StoredWeights:
    """Open the weights of the checkpoint that `path` refers to (see `find_checkpoint`).

    If a live run prunes the newest checkpoint before it is open, try again with the one that is then newest.  Raises
    the exceptions of `find_checkpoint` and `StoredWeights`.
    """
    for _ in range(_MAX_ATTEMPTS):
        storage = find_checkpoint(path)
        try:
            return StoredWeights(storage, averaged)
        except (UserError, TrainingFailed):
            if MANIFEST in storage.names() or is_same_location(str(storage), os.fspath(path)):
                raise
    fix = "set checkpoint.keep_last of that run higher"
    raise UserError(f"{path}: its checkpoints are deleted faster than they can be opened\n  to fix: {fix}")


# ---------------------------------------------------------------------------------------------------------------
# Tensors from the data files


def read_tensors(
    storage: Storage, layout: Layout, blocks: Mapping[str, Blocks], targets: Tensors, check: bool = True
) -> None:
    """Read this rank's parts of `targets` (DTensors of any mesh, or plain tensors) in place, and verify them.

    No collective.  Raises Damaged or OSError; some targets may then have been overwritten.
    """
    reader = ChunkReader(storage, blocks, check)
    try:
        reader.read_all(plan_reads(targets, layout))
    finally:
        reader.close()


class ChunkReader:
    """Reads chunks, or boxes within chunks, from the data files of one checkpoint."""

    _NUM_THREADS = 2
    """The threads take turns on the blocks of a file: one waits for the disk while the other computes a checksum.  With
    one tensor per thread, which defeats the kernel's read-ahead, reading took 1.3 to 3 times as long."""
    _BYTES_IN_FLIGHT = 64 << 20
    """Limit on the bytes of reads that have started but not finished."""

    def __init__(self, storage: Storage, blocks: Mapping[str, Blocks], check: bool = True) -> None:
        self._storage, self._blocks, self._check = storage, blocks, check
        self._open_files: dict[str, BlockReader] = {}

    def read_all(self, requests: Iterable[ReadRequest]) -> None:
        """Fill the target of each request, in the order in which the chunks lie in the files."""
        in_flight: deque[_PendingRead] = deque()
        with ThreadPoolExecutor(self._NUM_THREADS) as threads:
            try:
                for request in sorted(requests, key=lambda request: (request.chunk.file, request.chunk.start)):
                    if request.target.numel():
                        in_flight.append(self._start_read(threads, request))
                    while sum(reading.num_bytes for reading in in_flight) > self._BYTES_IN_FLIGHT:
                        in_flight.popleft().finish()
                for reading in in_flight:
                    reading.finish()
            except BaseException:
                threads.shutdown(wait=True, cancel_futures=True)
                raise

    def _start_read(self, threads: ThreadPoolExecutor, request: ReadRequest) -> _PendingRead:
        """Start reading, directly into the target if the target has the same memory layout."""
        chunk, target, offsets, sizes = request.chunk, request.target, request.offsets, request.sizes
        reads_full_rows = sizes[1:] == chunk.sizes[1:]
        row_bytes = int(np.prod(chunk.sizes[1:], dtype=np.int64)) * request.dtype.itemsize
        start = chunk.data_start + (offsets[0] * row_bytes if reads_full_rows and offsets else 0)
        is_same_layout = target.device.type == "cpu" and target.dtype == request.dtype and target.is_contiguous()
        is_direct = reads_full_rows and is_same_layout
        buffer = target if is_direct else torch.empty(sizes if reads_full_rows else chunk.sizes, dtype=request.dtype)
        jobs = [threads.submit(read) for read in self._open_file(chunk.file).reads(_bytes_of(buffer), start)]
        if is_direct:
            return _PendingRead(jobs, None, None, buffer.nbytes)
        box = () if reads_full_rows else tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
        return _PendingRead(jobs, buffer[box], target, buffer.nbytes)

    def _open_file(self, name: str) -> BlockReader:
        if name not in self._open_files:
            if name not in self._blocks:
                raise Damaged(f"{self._storage}/{name}: is not in the manifest")
            self._open_files[name] = BlockReader(self._storage, name, self._blocks[name], self._check)
        return self._open_files[name]

    def read_rows(self, chunk: Chunk, start: int, rows: torch.Tensor) -> None:
        """Read rows of one chunk, starting at row `start`."""
        position = chunk.data_start + start * (rows.nbytes // len(rows) if rows.ndim else 0)
        self._open_file(chunk.file).read_into(_bytes_of(rows), position)

    def close(self) -> None:
        for reader in self._open_files.values():
            reader.close()


@dataclass(frozen=True)
class _PendingRead:
    """A read, in progress, of a box within a chunk."""

    jobs: Sequence[Future[None]]
    source: torch.Tensor | None
    """Intermediate buffer, if the data is not read directly into the target."""
    target: torch.Tensor | None
    """Where `finish` copies `source` to; None if the data is read directly into the target."""
    num_bytes: int

    def finish(self) -> None:
        for job in self.jobs:
            job.result()
        if self.source is not None and self.target is not None:
            self.target.copy_(self.source)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.flatten().view(torch.uint8).numpy())  # type: ignore[arg-type]


def read_rows(
    storage: Storage, stored: StoredTensor, blocks: Mapping[str, Blocks], start: int = 0, stop: int | None = None
) -> torch.Tensor:
    """Return rows [start, stop) along dim 0 of one tensor, all by default, on the CPU.  Raises Damaged or OSError."""
    num_rows = stored.shape[0] if stored.shape else 1
    stop = num_rows if stop is None else stop
    result = torch.empty((stop - start, *stored.shape[1:]) if stored.shape else (), dtype=stored.dtype)
    reader = ChunkReader(storage, blocks)
    try:
        offsets = (start, *(0 for _ in stored.shape[1:])) if stored.shape else ()
        for chunk in stored.chunks.overlapping(offsets, tuple(result.shape)):
            chunk_start = chunk.offsets[0] if chunk.offsets else 0
            chunk_stop = chunk_start + (chunk.sizes[0] if chunk.sizes else 1)
            low, high = max(start, chunk_start), min(stop, chunk_stop)
            rows = torch.empty((high - low, *chunk.sizes[1:]) if stored.shape else (), dtype=stored.dtype)
            reader.read_rows(chunk, low - chunk_start, rows)
            corner = (low - start, *chunk.offsets[1:])
            box = tuple(slice(o, o + n) for o, n in zip(corner, rows.shape, strict=True)) if stored.shape else ()
            result[box].copy_(rows)
    finally:
        reader.close()
    return result
