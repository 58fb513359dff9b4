"""The step's view of a sharded model: when gradients are reduced, their global norm, evaluation without them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from trainer.config import FsdpSection
from trainer.errors import UserError
from trainer.model.parameters import local
from trainer.model.replicas import replicas_of


@contextmanager
def gradient_sync(model: nn.Module, enabled: bool, fsdp: FsdpSection | None = None) -> Iterator[None]:
    """Reduce gradients in this backward pass, or let them accumulate until the one that does.

    The reduce-scatter over `shard` and the all-reduce over `replicate` both run in the enabled pass alone, and all
    gradients of the model lie unsharded on each rank in between; with `fsdp.accumulate=sharded` the reduce-scatter runs
    in every pass, and only shards lie there.  On one rank nothing is reduced.
    """
    fsdp = fsdp or FsdpSection()
    replicas = replicas_of(model)
    if replicas is not None:
        replicas.enable(enabled)
    # Not `set_is_last_backward` as well: it keeps FSDP from forgetting the order of the forward pass, and each further
    # micro-batch then gathers the last unit of the one before, for nothing.
    for module in _fsdp_modules(model):
        module.set_requires_gradient_sync(enabled or fsdp.accumulate == "sharded", recurse=False)
        module.set_requires_all_reduce(enabled, recurse=False)
        module.set_reshard_after_backward(enabled or fsdp.reshard_after_backward, recurse=False)
    yield


def reshard(model: nn.Module) -> None:
    """Free what a forward pass without a backward pass has left gathered."""
    for module in _fsdp_modules(model):
        module.reshard()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Run forward passes alone inside the block: no gradients, evaluation mode; then free what they left gathered."""
    model.eval()
    with torch.no_grad():
        yield
    reshard(model)
    model.train()


_found: WeakKeyDictionary[nn.Module, list[ReferenceType[FSDPModule]]] = WeakKeyDictionary()


def _fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """Return the modules that `fully_shard` was called on; looked for once, as a walk of a large model takes long."""
    if model not in _found:
        _found[model] = [ref(module) for module in model.modules() if isinstance(module, FSDPModule)]
    return [module for reference in _found[model] if (module := reference()) is not None]


@torch.no_grad()
def gradient_norm(gradients: list[torch.Tensor], mesh: DeviceMesh) -> torch.Tensor:
    """Return the 2-norm of all gradients over all ranks: a scalar, the same on every rank.

    `gradients` are this rank's shards.  One all-reduce of a scalar over the `shard` axis; replicas hold equal shards.
    A value that is not finite on any rank makes the norm so on every rank of its replica group, and, the gradients
    having been reduced, on all.
    """
    device = torch.device(mesh.device_type)
    dtype = functools.reduce(torch.promote_types, {gradient.dtype for gradient in gradients}, torch.float32)
    squares = torch.stack(torch._foreach_norm(gradients, 2.0, dtype)).to(device).square().sum()
    if mesh.size(mesh.ndim - 1) > 1:
        dist.all_reduce(squares, group=mesh.get_group(mesh.ndim - 1))
    return squares.sqrt()


@torch.no_grad()
def find_clipping(
    model: nn.Module, mesh: DeviceMesh, max_norm: float | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the global norm of all gradients, and what to multiply them by for a norm of at most `max_norm`.

    The latter is None without a `max_norm`; multiplying is left to the optimizer, whose kernel may do it on a GPU.
    One all-reduce of a scalar over the `shard` axis, and no host synchronisation.  Works on the local shards: going
    through DTensor costs a dispatch for every parameter.
    """
    gradients = [local(p.grad) for p in model.parameters() if p.grad is not None]
    if not gradients:
        raise UserError("loss: no parameter received a gradient; the loss must depend on a trainable parameter")
    norm = gradient_norm(gradients, mesh)
    return norm, None if max_norm is None else (max_norm / (norm + 1e-6)).clamp(max=1.0)
