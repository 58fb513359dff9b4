"""Shards stacks with fewer matrices than ranks, such as 128 experts on 512 ranks, by the rows of each matrix.

FSDP divides a tensor along one dimension; for such a stack, of shape (N, rows, columns), this would be the rows or the
columns, since N is less than the number of ranks.  FSDP would then copy the stack once more in every all-gather and
every reduce-scatter, because the ranks' shards interleave in memory.  Here, each matrix is split by rows among
consecutive ranks instead (`placement.choose_ranks_per_matrix`): every shard is contiguous in the stack, so FSDP handles
the stack like a tensor of shape (ranks, rows / ranks per matrix, columns) divided along dimension 0.

This module sets attributes of FSDP's private class FSDPParam (torch/distributed/fsdp/_fully_shard/_fsdp_param.py).
These attributes are the same in torch 2.11 to 2.14.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor, Replicate, Shard

from trainer.model.gradients import fsdp_param_groups


@dataclass(frozen=True)
class RowShard:
    """This rank's rows of one matrix of a stack, on a mesh whose last two axes are (matrix, part of its rows)."""

    rows: torch.Tensor
    """This rank's rows, (1, rows / ranks per matrix, columns)."""
    shape: torch.Size
    """Shape of the full stack, whose strides are `stride`."""
    stride: tuple[int, ...]
    mesh: DeviceMesh


RowShards = dict[tuple[int, str], RowShard]
"""Row shards, by the `id` of the module that owns the stack and the stack's name in that module."""


def row_shards_of(
    modules: Sequence[nn.Module],
    ranks_per_matrix: Callable[[nn.Parameter], int],
    split_mesh: Callable[[int], DeviceMesh],
) -> RowShards:
    """Return this rank's row shards of those stacks in `modules` that `fully_shard` has not yet divided.

    ranks_per_matrix: returns the number of ranks among which each matrix of a parameter is split; if it is 1, the
        parameter is left to FSDP.
    split_mesh: returns the mesh with its last axis split into (outer, inner), given the number of inner ranks.

    Collective if `split_mesh` creates process groups.
    """
    found: RowShards = {}
    for owner in (owner for module in modules for owner in module.modules()):
        for name, stack in owner.named_parameters(recurse=False):
            if isinstance(stack, DTensor) or (num_ranks := ranks_per_matrix(stack)) == 1:
                continue
            mesh = split_mesh(num_ranks)
            matrix, part = (mesh.get_local_rank(axis) for axis in (mesh.ndim - 2, mesh.ndim - 1))
            rows = stack.detach()[matrix : matrix + 1].chunk(num_ranks, dim=1)[part].clone()
            found[id(owner), name] = RowShard(rows, stack.shape, stack.stride(), mesh)
    return found


def apply_row_shards(module: FSDPModule, shards: RowShards) -> None:
    """Replace the shards that FSDP has made from stacks.  `fully_shard` must just have been applied to `module`."""
    for group in fsdp_param_groups(module) if shards else ():
        for sharded in group.fsdp_params:
            shard = shards.get((id(sharded._module_info.module), sharded._module_info.param_name))
            if shard is not None:
                _replace_shard(sharded, shard)


def _replace_shard(sharded: FSDPParam, shard: RowShard) -> None:
    rows, mesh = shard.rows, shard.mesh
    placements = (*[Replicate()] * (mesh.ndim - 2), Shard(0), Shard(1))
    parameter = DTensor.from_local(rows, mesh, placements, run_check=False, shape=shard.shape, stride=shard.stride)
    sharded.sharded_size = sharded.padded_sharded_param_size = rows.size()
    sharded.contiguous_sharded_stride = rows.stride()
    sharded._sharding_spec = parameter._spec
    sharded.sharded_param = nn.Parameter(parameter, requires_grad=sharded.sharded_param.requires_grad)
    sharded._setattr_on_modules(sharded.sharded_param)
    sharded.reset_sharded_param()  # registers the new storage, in pinned memory if parameters are offloaded
    sharded.__class__ = _RowShardedParam


class _RowShardedParam(FSDPParam):
    """A stack whose matrices are split by rows among ranks."""

    def _get_grad_inner_tensor(self, grad: torch.Tensor) -> torch.Tensor:
        """Return an unsharded gradient in the shape that FSDP divides: with one entry per rank along dimension 0."""
        return super()._get_grad_inner_tensor(grad).reshape(-1, *self.sharded_size[1:])
