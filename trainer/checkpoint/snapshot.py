"""Collects the state at one moment, its parts grouped by how they are stored."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import safetensors.torch
import torch
from torch.distributed.tensor import DTensor

from trainer.checkpoint.layout import StoredTensor
from trainer.checkpoint.state_tree import split
from trainer.distributed.channel import Channel
from trainer.errors import UserError
from trainer.files import crc32


class Stateful(Protocol):
    """A part of the state that can be saved and restored."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@runtime_checkable
class ComparablePart(Protocol):
    """A part that compares itself with its stored form, and allocates tensors that it does not hold yet."""

    def differences(self, plain: Any, stored: Mapping[str, StoredTensor]) -> list[str]:
        """Return one line per difference.  `stored` maps keys within the part to stored tensors."""
        ...

    def prepare(self, stored: Mapping[str, StoredTensor]) -> None:
        """Allocate the tensors that loading will fill."""
        ...

    def may_differ(self, key: str) -> bool:
        """Return whether ranks may hold different values of this plain tensor; each rank then restores its own."""
        ...


@runtime_checkable
class DependentPart(Protocol):
    """A part that is valid only together with something outside the checkpoint, as a position is with its data."""

    def changes_outside(self, plain: Mapping[str, Any], allowed: Collection[str]) -> tuple[list[str], list[str]]:
        """Return outside changes since `plain` was stored, one line each: those that forbid resuming, and remarks."""
        ...


@runtime_checkable
class RestartablePart(Protocol):
    """A per-rank part that can be reinitialized if the checkpoint has a different number of ranks."""

    def restart(self, step: int) -> None: ...


class Savable(Protocol):
    """The complete state, its parts grouped by how they are stored."""

    step: int
    parts: dict[str, Stateful]
    """Parts that are the same on all ranks, or sharded (DTensors).  They can be restored on any mesh."""
    per_rank_parts: dict[str, Stateful]
    """Per-rank parts.  They are restored if the number of ranks is the same, and otherwise reinitialized if they are
    RestartablePart."""

    @property
    def weights(self) -> Mapping[str, float]:
        """Magnitude limit of each parameter, by key.  To be published, values must be finite and below it."""
        ...

    @property
    def num_skipped(self) -> int:
        """Number of consecutive steps skipped, the same on all ranks.  If it is above 0, the weights may be bad."""
        ...

    @property
    def evaluation(self) -> Mapping[str, float]:
        """Losses of the evaluation at this step, by field; empty if it has not been evaluated."""
        ...

    def check_complete(self) -> None:
        """Raise UserError if there is state that has not been registered."""
        ...


@dataclass(frozen=True)
class RunInfo:
    """The run that wrote a checkpoint: its configuration, mesh and job."""

    config_yaml: str
    mesh: Mapping[str, int]
    job: str = ""
    """The launcher's identifier of the job."""
    restarts: int = 0
    """How often the launcher had restarted the job."""


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


def collect(state: Savable, num_ranks: int) -> Snapshot:
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
    of_step = state.weights, state.num_skipped, state.evaluation
    return Snapshot(state.step, tensors, paths, plain, per_rank_plain, per_rank_tensors, digests, *of_step)


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


def store_per_rank(state: Savable, snapshot: Snapshot, parts: list[str], channel: Channel) -> None:
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
        part, within = state.parts[name], key.removeprefix(f"{name}.")
        if not isinstance(part, ComparablePart) or not part.may_differ(within):
            raise UserError(differs_message(name, f"values in {key}", others[0]))
        snapshot.differing_keys.append(key)
        snapshot.per_rank_tensors[key] = copy_of(loose[key])
