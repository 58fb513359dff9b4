"""Facts about parameters: which names are one parameter, and which part of it is here."""

from __future__ import annotations

import hashlib
from collections import defaultdict

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.weak import WeakTensorKeyDictionary


def tied_names(model: nn.Module) -> list[list[str]]:
    """Return the groups of names that stand for one parameter, in the order of the modules; the first is canonical."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return [group for group in names.values() if len(group) > 1]


def seed_of(seed: int, name: str) -> int:
    """Return a 63-bit seed that depends on the run's seed and the name of a module or parameter alone."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little") >> 1


def num_writes(tensor: torch.Tensor) -> int:
    """Return how many times a tensor has been written to in place, through it or a view of it."""
    return tensor._version


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters of the whole model; shared ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def count_trained_parameters(model: nn.Module) -> int:
    """Return how many of them are trained: those that are not frozen."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def count_matrix_parameters(model: nn.Module) -> int:
    """Return the number of parameters outside embedding tables: those that each token is multiplied with."""
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    embedded = {id(p): p.numel() for table in tables for p in table.parameters(recurse=False)}
    return count_parameters(model) - sum(embedded.values())


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


_replicated_on: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""The mesh of each replicated parameter."""


def mark_replicated(parameter: nn.Parameter, mesh: DeviceMesh) -> None:
    """Note that every rank of `mesh` holds the whole parameter, and that its gradient is averaged over them."""
    _replicated_on[parameter] = mesh


def as_saved(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a tensor that belongs to `parameter` and has its shape as a checkpoint is to know it; copies nothing.

    Where all ranks hold the same that is a replicated DTensor: the ranks then share the work of writing it, and need
    not compare what each of them has.
    """
    mesh = _replicated_on.get(parameter)
    if mesh is None or isinstance(tensor, DTensor) or tensor.shape != parameter.shape:
        # Without what makes it a parameter, which would be stored too: in the background its copy is, which has none.
        return tensor if isinstance(tensor, DTensor) else tensor.detach()
    return DTensor.from_local(tensor.detach(), mesh, [Replicate()] * mesh.ndim, run_check=False)


def own_rows(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Return which rows of dimension 0 this rank holds, as (start, stop); None if it is split in any other way.

    A dimension is split as `torch.chunk` does: the last ranks may have fewer rows, or none.
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
    """Return a number that two storages share if they are one; it may be used again once the storage is freed."""
    return storage._cdata
