"""Gradient synchronization, the global gradient norm, and evaluation mode of a sharded model."""

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
    """Reduce gradients in this backward pass if `enabled`, otherwise accumulate them locally.

    The reduce-scatter over `shard` and the all-reduce over `replicate` both run only in the enabled pass, and each rank
    holds all gradients unsharded in between.  With `fsdp.accumulate=sharded` the reduce-scatter runs in every pass, and
    only shards are held.  On one rank nothing is reduced.
    """
    fsdp = fsdp or FsdpSection()
    replicas = replicas_of(model)
    if replicas is not None:
        replicas.enable(enabled)
    # Do not call `set_is_last_backward`: FSDP would keep the recorded order of the forward pass, and each further
    # micro-batch would needlessly gather the last unit of the previous one.
    for module in _fsdp_modules(model):
        module.set_requires_gradient_sync(enabled or fsdp.accumulate == "sharded", recurse=False)
        module.set_requires_all_reduce(enabled, recurse=False)
        module.set_reshard_after_backward(enabled or fsdp.reshard_after_backward, recurse=False)
    yield


def reshard(model: nn.Module) -> None:
    """Free parameters that a forward pass without a backward pass left gathered."""
    for module in _fsdp_modules(model):
        module.reshard()


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Enter evaluation mode without gradients inside the block; afterwards free parameters that are still gathered."""
    model.eval()
    with torch.no_grad():
        yield
    reshard(model)
    model.train()


_found: WeakKeyDictionary[nn.Module, list[ReferenceType[FSDPModule]]] = WeakKeyDictionary()


def _fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """Return the modules that `fully_shard` was called on; cached, since walking a large model is slow."""
    if model not in _found:
        _found[model] = [ref(module) for module in model.modules() if isinstance(module, FSDPModule)]
    return [module for reference in _found[model] if (module := reference()) is not None]


@torch.no_grad()
def gradient_norm(gradients: list[torch.Tensor], mesh: DeviceMesh) -> torch.Tensor:
    """Return the 2-norm of all gradients over all ranks: a scalar, the same on every rank.

    `gradients` are this rank's shards.  One all-reduce of a scalar over the `shard` axis; replicas hold equal shards.
    A non-finite gradient on any rank makes the norm non-finite on its whole replica group and, since gradients have
    been reduced, on all ranks.
    """
    device = torch.device(mesh.device_type)
    dtype = functools.reduce(torch.promote_types, {gradient.dtype for gradient in gradients}, torch.float32)
    squares = torch.stack(torch._foreach_norm(gradients, 2.0, dtype)).to(device).square().sum()
    if mesh.size(mesh.ndim - 1) > 1:
        dist.all_reduce(squares, group=mesh.get_group(mesh.ndim - 1))
    return squares.sqrt()


@torch.no_grad()
def norm_and_clip_factor(
    model: nn.Module, mesh: DeviceMesh, max_norm: float | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the global gradient norm, and the factor that clips it to `max_norm`, or None without a `max_norm`.

    Applying the factor is left to the optimizer, whose kernel may do it on a GPU.  One all-reduce of a scalar over the
    `shard` axis, and no host sync.  Works on local shards, since DTensor costs one dispatch per parameter.
    """
    gradients = [local(p.grad) for p in model.parameters() if p.grad is not None]
    if not gradients:
        raise UserError("loss: no parameter received a gradient; the loss must depend on a trainable parameter")
    norm = gradient_norm(gradients, mesh)
    return norm, None if max_norm is None else (max_norm / (norm + 1e-6)).clamp(max=1.0)
