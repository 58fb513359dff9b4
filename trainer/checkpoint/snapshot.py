"""Collects the state of a run for one save: tensors, JSON values, and checksums for comparing the ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from trainer.checkpoint.layout import Tensors
from trainer.checkpoint.messages import UnsavableState
from trainer.checkpoint.state_parts import SharedState, StatePart, rank_state_to_bytes, split_state
from trainer.checkpoint.storage import describe
from trainer.errors import UserError
from trainer.files import crc32

if TYPE_CHECKING:
    from trainer.lifecycle.state import TrainState


@dataclass
class Snapshot:
    """The state of a run at one step, or why it could not be collected.

    `tensors` are the live ones, which a save in the background copies; everything else is a copy.
    """

    step: int
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """All tensors that are sharded or the same on all ranks, by key."""
    paths: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The path of each tensor in the nested state dict."""
    plain: dict[str, Any] = field(default_factory=dict)
    """Everything except the tensors, by part, as JSON values."""
    per_rank_plain: dict[str, Any] = field(default_factory=dict)
    per_rank_tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """This rank's per-rank tensors."""
    may_differ: dict[str, torch.Tensor] = field(default_factory=dict)
    """The plain tensors that may differ between ranks; each rank then stores its own."""
    plain_checksums: dict[str, int] = field(default_factory=dict)
    """Checksum of each part's `plain`; empty with one rank."""
    tensor_checksums: dict[str, int] = field(default_factory=dict)
    """Checksum of each plain tensor; empty with one rank."""
    limits: Mapping[str, float] = field(default_factory=dict)
    """Magnitude limit of each weight, by key."""
    num_skipped: int = 0
    """Number of consecutive steps skipped just before the save."""
    evaluation: Mapping[str, float] = field(default_factory=dict)
    replaced_steps: Sequence[int] = ()
    """Earlier steps at which a save was due but did not succeed, and which this save replaces."""
    mistake: str = ""
    """Why the state cannot be saved at all; empty if it can be."""
    error: str = ""
    """Why it could not be collected or copied this time; empty if it could be."""

    @property
    def checksums(self) -> tuple[dict[str, int], list[int]]:
        """The checksum of each part's plain values, and of each plain tensor: what ranks compare."""
        return self.plain_checksums, [*self.tensor_checksums.values()]

    def shared_state(self, differing_keys: Sequence[str]) -> bytes:
        """Return the content of state.json.  differing_keys: those in `may_differ` that each rank stores itself."""
        return SharedState(self.plain, [*self.per_rank_plain], list(differing_keys)).to_json().encode()

    def rank_state(self, differing_keys: Sequence[str]) -> bytes:
        """Return the content of this rank's own file."""
        own = {key: self.may_differ[key] for key in differing_keys}
        return rank_state_to_bytes(self.per_rank_plain, {**self.per_rank_tensors, **own})


def take_snapshot(state: TrainState, num_ranks: int) -> Snapshot:
    """Return a snapshot of the state.  Raises nothing, since the other ranks would wait: errors are in the result."""
    try:
        state.check_complete()
        return collect(state, num_ranks)
    except (TypeError, UserError) as error:
        return Snapshot(state.step, mistake=str(error) or repr(error))
    except Exception as error:  # any error of the user's own state
        return Snapshot(state.step, error=f"cannot collect the state: {describe(error)}")


def collect(state: TrainState, num_ranks: int) -> Snapshot:
    """Return a snapshot of the state as it is now.  Raises TypeError for values that cannot be stored."""
    snapshot = Snapshot(
        state.step,
        limits=state.magnitude_limits,
        num_skipped=state.num_skipped,
        evaluation=state.evaluation,
    )
    with torch.no_grad():
        for name, part in state.parts.items():
            snapshot.plain[name], part_tensors = split_state(part.state_dict(), (name,))
            for path, tensor in part_tensors.items():
                key = ".".join(path)
                if key in snapshot.tensors:
                    raise TypeError(f"two tensors in the state have the name {key}")
                snapshot.tensors[key], snapshot.paths[key] = tensor, path
            if num_ranks > 1:
                snapshot.plain_checksums[name] = crc32(json.dumps(snapshot.plain[name]).encode())
                unsharded = {".".join(p): t for p, t in part_tensors.items() if not isinstance(t, DTensor)}
                snapshot.tensor_checksums |= checksums_of(unsharded)
                for key, tensor in unsharded.items():
                    if StatePart.of(part).may_differ(key.removeprefix(f"{name}.")):
                        snapshot.may_differ[key] = _copy_of(tensor)
        for name, part in state.per_rank_parts.items():
            snapshot.per_rank_plain[name], part_tensors = split_state(part.state_dict(), (name,))
            snapshot.per_rank_tensors |= {".".join(path): _copy_of(tensor) for path, tensor in part_tensors.items()}
    return snapshot


def _copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the CPU."""
    return tensor.detach().cpu().contiguous().clone()


def checksums_of(tensors: Tensors) -> dict[str, int]:
    """Return the CRC-32 of each tensor's bytes.  GPU tensors are copied to the host in one transfer."""
    contents = {key: tensor.detach().contiguous().flatten().view(torch.uint8) for key, tensor in tensors.items()}
    on_gpu = {key: content for key, content in contents.items() if content.device.type != "cpu"}
    if on_gpu:
        on_host = torch.cat([*on_gpu.values()]).cpu().split([content.numel() for content in on_gpu.values()])
        contents |= zip(on_gpu, on_host, strict=True)
    return {key: crc32(content.numpy().data) if content.numel() else 0 for key, content in contents.items()}


def keys_differing_between_ranks(
    snapshot: Snapshot, checksums_by_rank: Sequence[tuple[Mapping[str, int], Sequence[int]]]
) -> list[str]:
    """Return the keys of the plain tensors whose values differ between ranks and may do so.

    snapshot: that of any rank.  checksums_by_rank: `Snapshot.checksums` of each rank.

    Raises UnsavableState if anything else differs.
    """
    expected, _ = checksums_by_rank[0]
    for rank, (plain, _) in enumerate(checksums_by_rank):
        for part, checksum in expected.items():
            if plain.get(part) != checksum:
                raise UnsavableState(_differs_message(part, "values", rank))
    table = np.array([tensors for _, tensors in checksums_by_rank], dtype=np.int64)
    differs = table != table[0]
    keys = [*snapshot.tensor_checksums]
    differing_keys = [keys[index] for index in np.flatnonzero(differs.any(axis=0))]
    for key in differing_keys:
        if key not in snapshot.may_differ:
            rank = int(differs[:, keys.index(key)].argmax())
            part = max((part for part in snapshot.plain if key.startswith(f"{part}.")), key=len)
            raise UnsavableState(_differs_message(part, f"values in {key}", rank))
    return differing_keys


def _differs_message(part: str, what: str, rank: int) -> str:
    return (
        f"state {part!r}: rank {rank} does not hold the same {what} as rank 0; add state that differs between "
        f"ranks with self.state.add({part!r}, ..., per_rank=True)"
    )
