"""Finds checkpoints and restores a state from one.

Manifest, sizes and checksums are verified, in parallel across ranks.  If a checkpoint is damaged, it is reported and
the previous one is tried.  All ranks restore the same checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeVar

import torch

from trainer.checkpoint.blocks import Damaged
from trainer.checkpoint.compatibility import StoredState, apply, check_compatible, find_targets
from trainer.checkpoint.error_messages import describe
from trainer.checkpoint.layout import Layout
from trainer.checkpoint.manifest import (
    Manifest,
    StoredBlocks,
    check_format,
    find_damage,
    name_of,
    read_file,
    read_manifest,
)
from trainer.checkpoint.retention import list_steps
from trainer.checkpoint.snapshot import RestartablePart, RunInfo, Savable
from trainer.checkpoint.storage import COMMIT, DAMAGED, Storage, list_configured_folder
from trainer.checkpoint.tensors import read_tensors
from trainer.distributed.world import World
from trainer.errors import TrainingFailed, UserError

Result = TypeVar("Result")


@dataclass(frozen=True)
class RestoredCheckpoint:
    """The checkpoint that was restored, and the newer ones that could not be."""

    path: str
    manifest: Manifest
    config_yaml: str
    """The configuration of the run that wrote the checkpoint."""
    damaged: Mapping[str, list[str]] = field(default_factory=dict)
    """Problems of each damaged checkpoint, by name."""
    warnings: Sequence[str] = ()
    """State that could not be restored exactly."""
    changed: Sequence[str] = ()
    """Settings that differ and are allowed to."""


Compare = Callable[[str], tuple[list[str], list[str]]]
"""Compares the current configuration with a checkpoint's, given as YAML.  Returns the differences that forbid resuming
and those that do not, one line each.  Has no side effects."""


class CheckpointReader:
    """Lists and restores existing checkpoints.  Methods are collective unless they say otherwise."""

    def __init__(self, storage: Storage, world: World, checksums: bool) -> None:
        self.storage, self.world, self._checksums = storage, world, checksums

    def steps(self) -> list[int]:
        """Return the steps of the published checkpoints visible to this rank, oldest first.  Not collective."""
        return list_steps(self.storage)

    def newest_origin(self) -> RunInfo | None:
        """Return the run that wrote the newest readable checkpoint; None if there is none.  Not collective."""
        for step in reversed(self.steps()):
            storage = self.storage / name_of(step)
            try:
                manifest = read_manifest(storage)
                stored = read_file(storage, manifest, "config.yaml").decode()
            except (Damaged, FileNotFoundError, UserError):
                continue
            started = manifest.extra
            return RunInfo(stored, manifest.mesh, str(started.get("job", "")), int(started.get("restarts", 0)))
        return None

    @property
    def is_empty(self) -> bool:
        """True if this rank sees an empty or missing folder.  Not collective."""
        return not list_configured_folder(self.storage)

    def restore(
        self, state: Savable, compare: Compare, allowed: frozenset[str], careful: bool
    ) -> RestoredCheckpoint | None:
        """Restore `state` from the newest good checkpoint; return None if there are no checkpoints.

        `careful`: verify every byte before anything is overwritten, if the current state must not be lost.
        Damaged checkpoints are quarantined once a good one has been restored.  A checkpoint that was saved while steps
        were skipped is used only if there is no other.

        Raises UserError if the configuration or the state is incompatible, TrainingFailed if no checkpoint is good.
        """
        names = self.world.broadcast(self.world.agreed(self._candidates))
        damaged: dict[str, list[str]] = {}
        put_off: dict[str, int] = {}
        for name in chain.from_iterable((names, put_off)):  # read lazily: `put_off` fills up during the first pass
            found, damage = self._try(name, put_off, state, compare, allowed, careful)
            if damage:
                damaged[name] = damage
            if found is not None:
                self.world.agreed(lambda: self._quarantine(damaged, DAMAGED))
                notes = _notes_on(put_off, found.manifest.step)
                return dataclasses.replace(found, damaged=damaged, warnings=[*found.warnings, *notes])
        if damaged:
            listed = "\n".join(f"  {line}" for lines in damaged.values() for line in lines)
            raise TrainingFailed(
                f"none of the {len(damaged)} checkpoints in {self.storage} is good:\n{listed}\n"
                "  They have not been changed.  checkpoint.resume=none starts over and moves them aside"
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
    ) -> tuple[RestoredCheckpoint | None, list[str]]:
        """Load a checkpoint (see `_load`), or postpone it: note its number of skipped steps in `put_off`."""
        storage = self.storage / name
        manifest, problem = self._manifest(storage)
        if manifest is None:
            return None, [problem]
        if manifest.num_skipped and name not in put_off:
            put_off[name] = manifest.num_skipped
            return None, []
        return self._load(storage, manifest, state, compare, allowed, careful)

    def load(
        self, storage: Storage, state: Savable, compare: Compare, allowed: frozenset[str], careful: bool
    ) -> RestoredCheckpoint:
        """Restore `state` from the checkpoint at `storage`, on any mesh.

        `careful`: verify every byte before anything is overwritten, if the current state must not be lost.

        Raises UserError if there is no checkpoint or it is incompatible, TrainingFailed if it is damaged.
        """
        manifest, problem = self._manifest(storage)
        found, damage = None, [problem]
        if manifest is not None:
            found, damage = self._load(storage, manifest, state, compare, allowed, careful)
        if found is None:
            listed = "\n".join(f"  {line}" for line in damage)
            raise TrainingFailed(f"the checkpoint {storage} is damaged:\n{listed}")
        return found

    def _quarantine(self, names: Iterable[str], why: str) -> None:
        if self.world.is_main:
            for name in names:
                self.storage.quarantine(name, why)

    def _candidates(self) -> list[str]:
        if not self.world.is_main:
            return []
        self.storage.recover()
        return [name_of(step) for step in reversed(self.steps())]

    def _manifest(self, storage: Storage) -> tuple[Manifest | None, str]:
        """Return the manifest on all ranks, or None and the problem if it is damaged."""
        manifest, problem = self.world.broadcast(self.world.agreed(lambda: _open(storage, self.world.is_main)))
        return manifest, problem

    def _load(
        self,
        storage: Storage,
        manifest: Manifest,
        state: Savable,
        compare: Compare,
        allowed: frozenset[str],
        careful: bool,
    ) -> tuple[RestoredCheckpoint | None, list[str]]:
        """Restore from `storage`.  Returns the restored checkpoint, or None and the damage."""
        depth = "sizes" if not self._checksums else "full" if careful else "frames"
        _, damage = self._attempt(lambda: _look_for_damage(storage, manifest, depth, self.world))
        if damage:
            return None, damage
        stored, damage = self._attempt(lambda: StoredState(storage, manifest, self.world))
        if stored is None or damage:
            return None, damage
        document, layout = stored.document, stored.layout
        different, changed = self.world.agreed(lambda: compare(stored.config_yaml))
        is_same_size = stored.own is not None
        fit = (state, document, layout, allowed, is_same_size)
        left_out, warnings = self.world.agreed(lambda: check_compatible(storage, different, *fit))
        targets = self.world.agreed(lambda: find_targets(state, layout, left_out))
        _, damage = self._attempt(lambda: self._read(storage, manifest, layout, targets))
        if damage:
            return None, damage
        self.world.agreed(lambda: apply(state, document, targets, stored.own, left_out))
        state.step = manifest.step
        if not is_same_size:
            for part in state.per_rank_parts.values():
                if isinstance(part, RestartablePart):
                    part.restart(manifest.step)
            if document.get("unlike"):
                keys = ", ".join(document["unlike"])
                warnings.append(
                    f"each of {manifest.world_size} ranks had its own values; using those of rank 0: {keys}"
                )
        return RestoredCheckpoint(str(storage), manifest, stored.config_yaml, warnings=warnings, changed=changed), []

    def _read(self, storage: Storage, manifest: Manifest, layout: Layout, targets: Mapping[str, torch.Tensor]) -> None:
        blocks = StoredBlocks(storage, manifest)
        read_tensors(storage, layout, blocks, targets, check=self._checksums)

    def _attempt(self, work: Callable[[], Result]) -> tuple[Result | None, list[str]]:
        """Return this rank's result of `work`, and the damage that any rank found, the same lines on all ranks."""
        result, damage = None, ""
        try:
            result = work()
        except Damaged as error:
            damage = str(error)
        except OSError as error:
            damage = f"rank {self.world.rank}: {describe(error)}"
        lines = [line for text in self.world.gather(damage) for line in text.splitlines()]
        return result, list(dict.fromkeys(lines))


def _notes_on(put_off: Mapping[str, int], taken: int) -> list[str]:
    """Return remarks on the checkpoints that were postponed because they were saved while steps were skipped."""
    if name_of(taken) in put_off:
        return [
            f"was saved while steps were skipped ({put_off[name_of(taken)]} in a row); there is no other checkpoint"
        ]
    return [
        f"is used instead of {name}, which was saved while steps were skipped ({number} in a row): that one is moved "
        "aside, and used only if checkpoint.resume names it"
        for name, number in put_off.items()
    ]


def _open(storage: Storage, is_main: bool) -> tuple[Manifest | None, str]:
    """Read the manifest on rank 0.  Returns None and the problem if it is damaged."""
    if not is_main:
        return None, ""
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
        return None, f"{storage}/{COMMIT}: is missing"
    except OSError as error:
        return None, f"{storage}/{COMMIT}: {describe(error)}"


def _look_for_damage(storage: Storage, manifest: Manifest, depth: str, world: World) -> None:
    damage = find_damage(storage, manifest, depth, world.rank, world.size)
    if damage:
        raise Damaged("\n".join(damage))
