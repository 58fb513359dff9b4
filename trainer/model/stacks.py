"""Sharding of stacks that have fewer matrices than there are ranks, such as 128 experts on 512 ranks.

FSDP divides such a stack of shape (N, rows, columns) along rows or columns, and then copies it once more in every
all-gather and every reduce-scatter, because the shards of the ranks interleave in memory.  Here, consecutive ranks
share a matrix and divide its rows instead (`placement.ranks_per_matrix`): every shard is contiguous in the stack, so
that FSDP handles it like a tensor of shape (ranks, rows / ranks per matrix, columns), divided along dimension 0.

This replaces attributes of FSDP's private class FSDPParam, the same ones in torch 2.11 to 2.14
(torch/distributed/fsdp/_fully_shard/_fsdp_param.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor, Replicate, Shard

from trainer.distributed.world import INNER, OUTER
from trainer.model.gradients import fsdp_param_groups
from trainer.model.parameters import note_split_mesh

SplitMesh = Callable[[DeviceMesh, int], DeviceMesh]
"""Splits the last axis of a mesh into (outer, inner) with the given number of inner ranks."""


@contextmanager
def sharing_matrices(
    modules: Sequence[nn.Module],
    ranks_per_matrix: Callable[[nn.Parameter], int],
    mesh: DeviceMesh,
    split_mesh: SplitMesh,
) -> Iterator[None]:
    """Shard stacks by matrices and their rows in this block, which must call `fully_shard` on `modules` and `mesh`.

    ranks_per_matrix: returns the number of ranks that share each matrix of a parameter; 1 leaves it to FSDP.
    Collective: `split_mesh` creates process groups.
    """
    stacks = {
        (id(owner), name): (parameter, num_ranks)
        for module in modules
        for owner in module.modules()
        for name, parameter in owner.named_parameters(recurse=False)
        if not isinstance(parameter, DTensor) and (num_ranks := ranks_per_matrix(parameter)) > 1
    }
    yield
    for group in fsdp_param_groups(cast(FSDPModule, modules[0])) if stacks else ():
        for sharded in group.fsdp_params:
            place = (id(sharded._module_info.module), sharded._module_info.param_name)
            if place in stacks:
                parameter, num_ranks = stacks[place]
                split = split_mesh(mesh, num_ranks)
                note_split_mesh(split, mesh)
                _share_matrices(sharded, parameter, split)


def _share_matrices(sharded: FSDPParam, full: nn.Parameter, mesh: DeviceMesh) -> None:
    """Replace the shard of dimension 0 that FSDP has chosen.  full: the parameter before `fully_shard`."""
    matrix, part, num_parts = mesh.get_local_rank(OUTER), mesh.get_local_rank(INNER), mesh.size(mesh.ndim - 1)
    shard = full.detach()[matrix : matrix + 1].chunk(num_parts, dim=1)[part].clone()
    placements = (*[Replicate()] * (mesh.ndim - 2), Shard(0), Shard(1))
    shared = DTensor.from_local(shard, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())
    sharded.sharded_size = sharded.padded_sharded_param_size = shard.size()
    sharded.contiguous_sharded_stride = shard.stride()
    sharded._sharded_param_data, sharded._sharding_spec = shard.view(-1), shared._spec
    sharded.sharded_param = nn.Parameter(shared, requires_grad=full.requires_grad)
    sharded._setattr_on_modules(sharded.sharded_param)
    sharded.reset_sharded_param()  # moves the shard to pinned memory if parameters are offloaded
    sharded.__class__ = _SharedMatrices


class _SharedMatrices(FSDPParam):
    """A stack whose matrices are each shared by several ranks."""

    def _get_grad_inner_tensor(self, grad: torch.Tensor) -> torch.Tensor:
        """Return an unsharded gradient in the shape in which FSDP divides dimension 0: one row for each rank."""
        return super()._get_grad_inner_tensor(grad).reshape(-1, *self.sharded_size[1:])
