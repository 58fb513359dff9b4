"""The checkpoints of one run: a folder of published ones, and how one more gets there."""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException

from trainer.errors import TrainingFailed, UserError
from trainer.files import sync_folder, write_and_sync
from trainer.world import World

FORMAT_VERSION = 1
_NAME = re.compile(r"step_(\d{8,})")
_UNPUBLISHED = ".writing-"


class Stateful(Protocol):
    """What can be saved and restored."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Savable(Protocol):
    """What a checkpoint holds, by how it is stored."""

    step: int
    tensors: dict[str, Stateful]
    """Sharded over ranks, restored on any mesh: through torch.distributed.checkpoint."""
    values: dict[str, Stateful]
    """The same on all ranks: as JSON."""
    rank_values: dict[str, Stateful]
    """Each rank's own; restored where the number of ranks is the same."""


@dataclass(frozen=True)
class Saved:
    """What saving a checkpoint cost: its size over all ranks."""

    step: int
    path: Path
    bytes: int


class Checkpoints:
    """The checkpoints in one folder.  All methods are called by all ranks alike."""

    def __init__(self, folder: Path, world: World, keep_last: int, config_yaml: str) -> None:
        self.folder, self.world, self.keep_last, self.config_yaml = folder, world, keep_last, config_yaml

    def steps(self) -> list[int]:
        """Return the steps of the published checkpoints, oldest first."""
        if not self.folder.is_dir():
            return []
        return sorted(int(found.group(1)) for path in self.folder.iterdir() if (found := _NAME.fullmatch(path.name)))

    def path_of(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}"

    def find(self, resume: str) -> Path | None:
        """Return the checkpoint that `checkpoint.resume` asks for, as rank 0 sees the folder; None: start anew."""
        if resume == "none":
            return None
        if resume != "auto":
            return Path(resume)
        steps = self.world.broadcast(self.steps() if self.world.is_main else None)
        return self.path_of(steps[-1]) if steps else None

    def save(self, state: Savable) -> Saved:
        """Write and publish a checkpoint of `state`, then remove those that are no longer kept.

        Collective.  A failure on any rank is raised on all of them and leaves the published ones as they were.
        """
        final = self.path_of(state.step)
        unpublished = self.folder / self.world.broadcast(f"{_UNPUBLISHED}{final.name}-{uuid.uuid4().hex[:8]}")
        self.world.agreed(lambda: self._begin(unpublished))
        tensors = self.world.agreed(lambda: {name: part.state_dict() for name, part in state.tensors.items()})
        writer = FileSystemWriter(unpublished, single_file_per_rank=True, sync_files=True, thread_count=1)
        with _worded(f"cannot write {unpublished}"):
            dcp.save(tensors, storage_writer=writer, process_group=self.world.control)
        self.world.agreed(lambda: self._write_rank_values(unpublished, state))
        self.world.agreed(lambda: self._publish(unpublished, final, state))
        return Saved(state.step, final, self.world.broadcast(_size_of(final) if self.world.is_main else 0))

    def load(self, path: Path, state: Savable) -> None:
        """Restore `state` from the checkpoint at `path`, on any mesh.  Collective."""
        document = self.world.agreed(lambda: read_state(path))
        tensors = self.world.agreed(lambda: {name: part.state_dict() for name, part in state.tensors.items()})
        with _worded(f"cannot load {path}"):
            dcp.load(tensors, storage_reader=FileSystemReader(path), process_group=self.world.control)
        for name, part in state.tensors.items():
            part.load_state_dict(tensors[name])
        for name, part in state.values.items():
            if name in document["values"]:
                part.load_state_dict(document["values"][name])
        state.step = document["step"]
        if document["world_size"] == self.world.size:
            own = torch.load(path / "ranks" / f"rank_{self.world.rank:05d}.pt", weights_only=True)
            for name, part in state.rank_values.items():
                if name in own:
                    part.load_state_dict(own[name])

    def _begin(self, unpublished: Path) -> None:
        if self.world.is_main:
            for leftover in self.folder.glob(f"{_UNPUBLISHED}*"):  # of an attempt that was killed
                shutil.rmtree(leftover)
            unpublished.mkdir(parents=True)

    def _write_rank_values(self, folder: Path, state: Savable) -> None:
        (folder / "ranks").mkdir(exist_ok=True)
        own = {name: part.state_dict() for name, part in state.rank_values.items()}
        with open(folder / "ranks" / f"rank_{self.world.rank:05d}.pt", "wb") as file:
            torch.save(own, file)
            file.flush()
            os.fsync(file.fileno())

    def _publish(self, unpublished: Path, final: Path, state: Savable) -> None:
        if not self.world.is_main:
            return
        document = {
            "format_version": FORMAT_VERSION,
            "step": state.step,
            "world_size": self.world.size,
            "torch": torch.__version__,
            "values": {name: part.state_dict() for name, part in state.values.items()},
        }
        write_and_sync(unpublished / "config.yaml", self.config_yaml)
        write_and_sync(unpublished / "state.json", json.dumps(document, indent=1))
        sync_folder(unpublished / "ranks")
        sync_folder(unpublished)
        if final.exists():  # the same step again, after a resume from an earlier checkpoint
            os.rename(final, unpublished.with_name(f"{_UNPUBLISHED}replaced-{uuid.uuid4().hex[:8]}"))
        os.rename(unpublished, final)
        sync_folder(self.folder)
        kept = self.steps()[-self.keep_last :] if self.keep_last else self.steps()
        for step in set(self.steps()) - {*kept, state.step}:
            removed = self.folder / f"{_UNPUBLISHED}removed-{step:08d}-{uuid.uuid4().hex[:8]}"
            os.rename(self.path_of(step), removed)  # under its own name a checkpoint is whole
            shutil.rmtree(removed)


def read_state(path: Path) -> Mapping[str, Any]:
    """Return the `state.json` of a checkpoint.  Raises UserError if `path` holds none that can be read."""
    try:
        document = json.loads((path / "state.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"checkpoint.resume={path}: is not a checkpoint of this trainer ({error})") from error
    if document.get("format_version") != FORMAT_VERSION:
        found = document.get("format_version")
        raise UserError(f"checkpoint.resume={path}: has format version {found}, this trainer reads {FORMAT_VERSION}")
    return document


@contextmanager
def _worded(what: str) -> Iterator[None]:
    """Say what failed.  DCP's exception, raised on all ranks alike, is no `Exception`."""
    try:
        yield
    except CheckpointException as failure:
        causes = {rank: str(error[0]) for rank, error in failure.failures.items()}
        raise TrainingFailed(
            f"{what}: " + "; ".join(f"rank {rank}: {text}" for rank, text in causes.items())
        ) from failure


def _size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
