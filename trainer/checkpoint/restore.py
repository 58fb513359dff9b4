"""Restores the state of a run from its newest good checkpoint, or from a given one.

Before a restore, rank 0 verifies the manifest.  The ranks then divide the files among themselves and verify the sizes
and, unless `checkpoint.verify=sizes`, the checksums; large tensors may be verified while they are read, by a
VerifiedReader.  A damaged checkpoint is reported and the one before it is tried; if a specific checkpoint was
requested, the run fails instead.  All ranks restore the same checkpoint.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

import torch

from trainer.checkpoint.compare import check_compatible
from trainer.checkpoint.layout import Layout, layout_from_json, part_of_layout
from trainer.checkpoint.manifest import (
    CONFIG,
    LAYOUT,
    STATE,
    Manifest,
    RunInfo,
    check_is_of_run,
    checkpoint_name,
    find_damage,
    list_steps,
    rank_file,
    read_file,
    read_manifest,
)
from trainer.checkpoint.messages import DamagedCheckpoint, describe_failures
from trainer.checkpoint.state_parts import SharedState, StatePart, join_state, rank_state_from_bytes, split_state
from trainer.checkpoint.storage import DAMAGED, MANIFEST, Damaged, Storage, describe, list_configured_folder
from trainer.config.changes import compare_configs, free_run_name
from trainer.config.schema import RunConfig
from trainer.distributed.world import World
from trainer.errors import TrainingFailed, UserError

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
                config_yaml = read_file(storage, manifest, CONFIG).decode()
            except (Damaged, FileNotFoundError, UserError):
                continue
            return RunInfo(config_yaml, manifest.mesh, manifest.job, manifest.restarts, manifest.run_dir)
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
        self.world.agreed(lambda: check_is_of_run(storage, manifest))
        depth = "sizes" if not self._checksums else "full" if request.verify_first else "metadata"
        _, damage = self._attempt(lambda: self._raise_if_damaged(storage, manifest, depth))
        if damage:
            return None, damage
        stored, damage = self._attempt(lambda: StoredState(storage, manifest, self.world))
        if stored is None or damage:
            return None, damage
        refused, changed = self.world.agreed(lambda: compare_configs(request.config, stored.config_yaml))
        left_out, warnings = self.world.agreed(
            lambda: check_compatible(storage, refused, state, stored, request.allowed, free_run_name(request.config))
        )
        targets = self.world.agreed(lambda: prepare_targets(state, stored.layout, left_out))
        if damage := self._read(storage, targets):
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

    def _raise_if_damaged(self, storage: Storage, manifest: Manifest, depth: str) -> None:
        """Verify this rank's share of the files.  Raises Damaged."""
        damage = find_damage(storage, manifest, depth, self.world.rank, self.world.size)
        if damage:
            raise Damaged("\n".join(damage))

    def _read(self, storage: Storage, targets: Mapping[str, torch.Tensor]) -> list[str]:
        """Read this rank's parts of `targets`, through `dcp.load`.  Returns the damage found by any rank."""
        # Imported here because torch.distributed.checkpoint is 70 modules, which take 0.05 s to import.
        from torch.distributed.checkpoint import CheckpointException
        from torch.distributed.checkpoint import load as dcp_load

        from trainer.checkpoint.planner import ColumnLoadPlanner
        from trainer.checkpoint.verified_reader import VerifiedReader

        try:
            dcp_load(
                {"state": targets},
                storage_reader=VerifiedReader(str(storage), self._checksums),
                planner=ColumnLoadPlanner(),
                process_group=self.world.group,
            )
        except CheckpointException as exception:  # the same on all ranks
            errors = [error for error, _ in exception.failures.values()]
            for error in errors:
                if not isinstance(error, Exception):  # a signal's exception, such as KeyboardInterrupt
                    raise error from None
            if not all(isinstance(error, DamagedCheckpoint) for error in errors):
                raise TrainingFailed(f"cannot load {storage}: {describe_failures(exception.failures)}") from None
            return list(dict.fromkeys(str(error) for error in errors))
        return []

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
        return None, f"{storage}/{MANIFEST}: is missing"
    except OSError as error:
        return None, f"{storage}/{MANIFEST}: {describe(error)}"


class StoredState:
    """The small files of a checkpoint, without the data files.  Each is verified as it is read."""

    def __init__(self, storage: Storage, manifest: Manifest, world: World) -> None:
        self.shared = SharedState.from_json(read_file(storage, manifest, STATE))
        self.layout = layout_from_json(read_file(storage, manifest, LAYOUT))
        self.config_yaml = read_file(storage, manifest, CONFIG).decode()
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
            stored = part_of_layout(layout, name)
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
