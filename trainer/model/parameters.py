"""Helpers for parameters: ties, counts, seeds, meshes, and this rank's shard."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.utils.weak import WeakTensorKeyDictionary

from trainer.model.packed import num_weights
from trainer.model.placement import Box, Division, chunk_of

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
"""Their base class has no public name."""


def is_vector(name: str, parameter: torch.Tensor) -> bool:
    """Return whether a parameter is a scalar, a vector, or a stack of vectors, one per expert.

    A two-dimensional parameter is such a stack if its name ends in `bias`.
    """
    return parameter.ndim < 2 or (parameter.ndim == 2 and name.endswith("bias"))


def tied_names(model: nn.Module) -> list[list[str]]:
    """Return one list of names for each tied parameter, in module order; the first name is the canonical one."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return [group for group in names.values() if len(group) > 1]


def seed_of(seed: int, name: str) -> int:
    """Return a 63-bit seed that depends only on the run's seed and the name of a module or parameter."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little") >> 1


def num_writes(tensor: torch.Tensor) -> int:
    """Return how many times a tensor was written to in place, including through views."""
    return tensor._version


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters in the full model, counting tied ones once and quantized ones as unpacked."""
    return sum(num_weights(model).values())


def count_trained_parameters(model: nn.Module) -> int:
    """Return the number of trainable parameters."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


_replicated_on: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""The mesh over which each replicated parameter is replicated."""


def mark_replicated(parameter: nn.Parameter, mesh: DeviceMesh) -> None:
    """Record that every rank of `mesh` holds the full parameter, and that its gradient is averaged over these ranks."""
    _replicated_on[parameter] = mesh


_unsplit_mesh_of: dict[DeviceMesh, DeviceMesh] = {}
"""Maps a mesh to the one it was made from by splitting the last axis in two.  No weak references: meshes of equal shape
are equal keys, and an entry must not disappear with the first of them."""


def record_split_mesh(split_mesh: DeviceMesh, mesh: DeviceMesh) -> None:
    """Record that `split_mesh` is the mesh of the other parameters, `mesh`, with its last axis split in two."""
    _unsplit_mesh_of[split_mesh] = mesh


_copied_from: dict[DeviceMesh, DeviceMesh] = {}
"""Maps the mesh of stacks that the shard axis holds in several copies, (copy, part), to that of the other parameters.
No weak references, as above."""


def record_copies(copy_mesh: DeviceMesh, mesh: DeviceMesh) -> None:
    """Record that `copy_mesh`, with axes (copy, part), has the ranks of `mesh`, which holds the other parameters."""
    _copied_from[copy_mesh] = mesh


def copied_from(parameter: torch.Tensor) -> DeviceMesh | None:
    """Return the mesh of the other parameters if the shard axis holds several copies of this one; otherwise None."""
    return _copied_from.get(parameter.device_mesh) if isinstance(parameter, DTensor) else None


def num_copies(tensor: torch.Tensor) -> int:
    """Return the number of ranks of the shard axis that hold the same part of a sharded tensor; usually 1."""
    mesh = copied_from(tensor) if _copied_from else None
    return 1 if mesh is None else mesh.shape[-1] // cast(DTensor, tensor).device_mesh.shape[-1]


def mesh_of(parameter: torch.Tensor) -> DeviceMesh | None:
    """Return the mesh whose ranks hold a parameter, sharded or replicated; None if only this process holds it.

    For parameters on a mesh whose shard axis is split in two, it is the mesh of the model's other parameters.
    """
    if not isinstance(parameter, DTensor):
        return _replicated_on.get(parameter)
    return _unsplit_mesh_of.get(parameter.device_mesh, parameter.device_mesh)


def is_shard(placed: Placement) -> bool:
    """Return whether a mesh axis divides a tensor along one dimension, strided or not."""
    return isinstance(placed, Shard) or _is_strided(placed)


def _is_strided(placed: Placement) -> bool:
    """Return whether a placement is FSDP's for a tensor that another axis divides along the same dimension.

    `Placement.is_shard` is False for it, and its class has no public name.
    """
    return hasattr(placed, "split_factor")


def local_box(tensor: torch.Tensor) -> Box | None:
    """Return the part of a tensor that this rank holds, as [start, stop) along each dimension; None if unknown.

    A dimension is split as by `torch.chunk`: the last ranks may have fewer rows, or none.  If several mesh axes split
    one dimension, FSDP's (a strided shard) is applied last.
    """
    box = [(0, size) for size in tensor.shape] or [(0, 1)]
    if not isinstance(tensor, DTensor):
        return tuple(box)
    split = [(axis, placed) for axis, placed in enumerate(tensor.placements) if not placed.is_replicate()]
    if not all(is_shard(placed) for _, placed in split):
        return None
    for axis, placed in sorted(split, key=lambda pair: _is_strided(pair[1])):
        dim, mesh = placed.dim, tensor.device_mesh  # type: ignore[attr-defined]
        box[dim] = chunk_of(box[dim], mesh.get_local_rank(axis), mesh.size(axis))
    return tuple(box)


def division_of(parameter: torch.Tensor) -> Division | None:
    """Return the division of a parameter among the ranks of the shard axis; None if `Division` cannot express it.

    A parameter that every rank holds in full has one part.
    """
    if not isinstance(parameter, DTensor):
        return Division()
    mesh = parameter.device_mesh
    split = [(placed, mesh.size(axis)) for axis, placed in enumerate(parameter.placements) if not placed.is_replicate()]
    if not all(is_shard(placed) for placed, _ in split) or len(split) > 2:
        return None
    if not split:
        return Division()
    (placed, parts), *rest = split
    dim: int = placed.dim  # type: ignore[attr-defined]
    if not rest:
        return Division(dim, parts, copies=num_copies(parameter))
    ((inner, num_ranks),) = rest
    return Division(dim, parts, num_ranks, inner.dim)  # type: ignore[attr-defined]


def storage_id(storage: torch.UntypedStorage) -> int:
    """Return a number that identifies a storage; it may be reused once the storage is freed."""
    return storage._cdata
