"""Contents of a checkpoint: the parts of a state, by how they are stored, and their values at one moment."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import safetensors.torch
import torch
from torch.distributed.tensor import DTensor

from trainer.checkpoint.layout import Stored
from trainer.checkpoint.tree import split
from trainer.distributed.channel import Channel
from trainer.errors import UserError
from trainer.files import crc32


class Stateful(Protocol):
    """A part of the state: it can be saved and restored."""

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
    """A whole state, its parts grouped by how they are stored."""

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
        """Number of steps skipped in a row; above 0 the weights may be bad.

        The same on all ranks.
        """
        ...

    @property
    def evaluation(self) -> Mapping[str, float]:
        """The losses of the evaluation of this very step, by field; empty if there has been none."""
        ...

    def check_complete(self) -> None:
        """Raise UserError if there is state that is not listed here."""
        ...


@dataclass(frozen=True)
class Facts:
    """The run that wrote a checkpoint: its configuration, mesh and job."""

    config_yaml: str
    mesh: Mapping[str, int]
    job: str = ""
    """What the launcher calls the job."""
    restarts: int = 0
    """How often the launcher had started it again."""


@dataclass
class Snapshot:
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
    evaluation: Mapping[str, float] = field(default_factory=dict)
    due: Sequence[int] = ()
    """The steps whose saves this one makes up for."""
    unlike: list[str] = field(default_factory=list)
    """Keys of plain tensors of which each rank stores its own values."""

    @property
    def document(self) -> str:
        content = {"step": self.step, "parts": self.plain, "rank_parts": [*self.own_plain], "unlike": self.unlike}
        return json.dumps(content, indent=1)

    @property
    def own(self) -> bytes:
        return safetensors.torch.save(self.own_tensors, metadata={"state": json.dumps(self.own_plain)})


def collect(state: Savable, num_ranks: int) -> Snapshot:
    """Return the state as it is now.  Raises TypeError for what cannot be stored."""
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
        own_plain: dict[str, Any] = {}
        own_tensors: dict[str, torch.Tensor] = {}
        for name, part in state.rank_parts.items():
            own_plain[name], found = split(part.state_dict(), (name,))
            own_tensors |= {".".join(path): copy_of(tensor) for path, tensor in found.items()}
    of_step = state.weights, state.num_skipped, state.evaluation
    return Snapshot(state.step, tensors, paths, plain, own_plain, own_tensors, digests, *of_step)


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the CPU."""
    return tensor.detach().cpu().contiguous().clone()


def checksum_of_tensors(tensors: Sequence[torch.Tensor]) -> int:
    """Return the CRC-32 of the tensors' bytes.  Those of a GPU come over in one piece."""
    crc = 0
    whole = [tensor.detach().contiguous().flatten().view(torch.uint8) for tensor in tensors if tensor.numel()]
    on_cpu = [part for part in whole if part.device.type == "cpu"]
    elsewhere = [part for part in whole if part.device.type != "cpu"]
    for part in [*on_cpu, *([torch.cat(elsewhere).cpu()] if elsewhere else [])]:
        crc = crc32(part.numpy().data, crc)
    return crc


def unlike_parts(digests: list[dict[str, tuple[int, int]]]) -> list[str]:
    """Return the parts whose plain tensors are not the same on all ranks.  Raises UserError if plain values are not."""
    unlike = []
    for name, (values, tensors) in digests[0].items():
        others = [rank for rank, own in enumerate(digests) if name not in own or own[name][0] != values]
        if others:
            raise UserError(not_the_same(name, "values", others[0]))
        if any(own[name][1] != tensors for own in digests):
            unlike.append(name)
    return unlike


def not_the_same(name: str, what: str, rank: int) -> str:
    """Return the mistake of state that ranks should have alike."""
    return (
        f"state {name!r}: rank {rank} does not hold the same {what} as rank 0; add state that differs between "
        f"ranks with self.state.add({name!r}, ..., per_rank=True)"
    )


def keep_own(state: Savable, snapshot: Snapshot, parts: list[str], channel: Channel) -> None:
    """Put the plain tensors that ranks hold different values of into what is stored of each rank.

    Raises UserError if they must not differ.  One gather.
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
        if not isinstance(part, Strict) or not part.may_differ(within):
            raise UserError(not_the_same(name, f"values in {key}", others[0]))
        snapshot.unlike.append(key)
        snapshot.own_tensors[key] = copy_of(loose[key])
