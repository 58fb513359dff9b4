"""Helpers for parameters: ties, counts, seeds, and this rank's part of a sharded tensor."""

from __future__ import annotations

import hashlib
from collections import defaultdict

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.weak import WeakTensorKeyDictionary


def tied_names(model: nn.Module) -> list[list[str]]:
    """Return the groups of names that share one parameter, in module order; the first name is canonical."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return [group for group in names.values() if len(group) > 1]


def seed_of(seed: int, name: str) -> int:
    """Return a 63-bit seed that depends only on the run's seed and the name of a module or parameter."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little") >> 1


def num_writes(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written to in place, including through views."""
    return tensor._version


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters of the full model; shared ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def count_trained_parameters(model: nn.Module) -> int:
    """Return the number of parameters that are not frozen."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


_replicated_on: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""The mesh of each replicated parameter."""


def mark_replicated(parameter: nn.Parameter, mesh: DeviceMesh) -> None:
    """Record that every rank of `mesh` holds the full parameter, and that its gradient is averaged over these ranks."""
    _replicated_on[parameter] = mesh


def mesh_of(parameter: torch.Tensor) -> DeviceMesh | None:
    """Return the mesh whose ranks hold a parameter, divided or as replicas; None if only this process holds it."""
    return parameter.device_mesh if isinstance(parameter, DTensor) else _replicated_on.get(parameter)


def for_checkpoint(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a tensor that belongs to `parameter` and has its shape in the form for checkpoints; copies nothing.

    If all ranks hold the same values, this is a replicated DTensor, so that the ranks share the work of writing it and
    need not compare their values.
    """
    mesh = _replicated_on.get(parameter)
    if mesh is None or isinstance(tensor, DTensor) or tensor.shape != parameter.shape:
        # Detach, since being a Parameter would be stored; copies for background saves are plain tensors.
        return tensor if isinstance(tensor, DTensor) else tensor.detach()
    return DTensor.from_local(tensor.detach(), mesh, [Replicate()] * mesh.ndim, run_check=False)


def local_rows(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Return the rows of dimension 0 that this rank holds, as (start, stop); None if it is sharded in another way.

    A dimension is split as by `torch.chunk`: the last ranks may have fewer rows, or none.
    """
    num_rows = tensor.shape[0] if tensor.ndim else 1
    if not isinstance(tensor, DTensor):
        return 0, num_rows
    split = [axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    if not split:
        return 0, num_rows
    placement = tensor.placements[split[0]]
    if len(split) > 1 or type(placement) is not Shard or placement.dim != 0:
        return None
    rows_a_rank = -(-num_rows // tensor.device_mesh.size(split[0]))
    start = min(num_rows, tensor.device_mesh.get_local_rank(split[0]) * rows_a_rank)
    return start, min(num_rows, start + rows_a_rank)


def storage_id(storage: torch.UntypedStorage) -> int:
    """Return a number that identifies a storage; it may be reused once the storage is freed."""
    return storage._cdata
