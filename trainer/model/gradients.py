"""Controls when FSDP gathers units and reduces gradients, and computes the global gradient norm.

FSDP reduces the gradients of a sharded model.  The gradients of an unsharded model are averaged here, in buckets, while
the backward pass runs, as in DistributedDataParallel (DDP).  DDP wraps the model in another `nn.Module`; here, only
hooks are added to the parameters, so the model's class, names and forward pass do not change.  Source: Li et al. 2020,
"PyTorch Distributed: Experiences on Accelerating Data Parallel Training", arXiv:2006.15704; bucket sizes are DDP's
defaults.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from trainer.config.schema import FsdpSection
from trainer.errors import UserError
from trainer.experts.dispatch import GROUP_ATTRIBUTE
from trainer.model.parameters import local, mark_replicated, num_copies
from trainer.model.tensor import is_split
from trainer.model.units import ShardUnit, parameters_by_unit


@contextmanager
def gradient_sync(model: nn.Module, enabled: bool, fsdp: FsdpSection | None = None) -> Iterator[None]:
    """In a backward pass inside the `with` block, reduce gradients if `enabled`; otherwise accumulate them locally.

    The reduce-scatter over `shard` and the all-reduce over `replicate` run only in a pass with `enabled` true; until
    then, each rank holds all gradients unsharded.  With `fsdp.accumulate=sharded` the reduce-scatter runs in every
    pass, so ranks hold only shards.  On one rank nothing is reduced.  After a pass with `enabled` false, units stay
    gathered unless `fsdp.reshard_after_backward` is set.  Without `fsdp`, its defaults apply.
    """
    fsdp = fsdp or FsdpSection()
    replicas = replicas_of(model)
    if replicas is not None:
        replicas.set_requires_gradient_sync(enabled)
    # Do not call `set_is_last_backward(False)` for earlier micro-batches: FSDP would keep the order that it recorded in
    # their forward passes, so the next backward pass would needlessly prefetch a unit from that stale order.
    for module in _fsdp_modules(model):
        module.set_requires_gradient_sync(enabled or fsdp.accumulate == "sharded", recurse=False)
        module.set_requires_all_reduce(enabled, recurse=False)
        module.set_reshard_after_backward(enabled or fsdp.reshard_after_backward, recurse=False)
    yield


def reshard(model: nn.Module) -> None:
    """Free parameters that a forward pass left gathered because no backward pass followed; no-op inside `gathered`."""
    if model in _gathered_models:
        return
    for module in _fsdp_modules(model):
        module.reshard()


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Run the `with` block in evaluation mode without gradients, then free parameters that are still gathered."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        reshard(model)
        model.train(was_training)


_gathered_models: WeakSet[nn.Module] = WeakSet()

_after_forward: WeakKeyDictionary[Any, bool | int] = WeakKeyDictionary()
"""What `fully_shard` was told about resharding each module after its forward pass."""


def record_resharding(module: nn.Module, reshard_after_forward: bool | int) -> None:
    """Record what `fully_shard` was told about `module`, so that `gathered` can restore it; FSDP does not tell."""
    _after_forward[module] = reshard_after_forward


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Keep all units of `model` gathered inside the block, so that many forward passes gather them only once.

        with gathered(trainer.model):
            completions = generate_batch(trainer.model, prompts, max_tokens=256)

    Every rank then holds the full model in `fsdp.param_dtype`, in addition to its shards: 16 GB for 8 billion
    parameters in bfloat16.  Experts and matrices divided among ranks (`mesh.expert`, `mesh.tensor`) are gathered only
    from the ranks with the same part, and units that reshard to a number of ranks after a forward pass not at all,
    since FSDP could not be told that number again: these are gathered in each forward pass, as outside the block.
    No-op for an unsharded model.  Only for forward passes without gradients: do not update the weights inside the
    block, since the gathered copies would not change.  The units are resharded afterwards.

    Collective: one all-gather per unit at the start of the block.  Unless `forward_is_collective`, as it is with
    divided experts or matrices and units that are not gathered, the ranks may run different numbers of forward passes
    inside it.
    """
    if model in _gathered_models or not _fsdp_modules(model):
        yield
        return
    modules = [module for module in _fsdp_modules(model) if _can_stay_gathered(module)]
    _gathered_models.add(model)
    try:
        for module in modules:
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
        yield
    finally:
        _gathered_models.discard(model)
        for module in modules:
            module.set_reshard_after_forward(bool(_after_forward[module]), recurse=False)
        reshard(model)


def _can_stay_gathered(module: FSDPModule) -> bool:
    return isinstance(_after_forward[module], bool)  # `set_reshard_after_forward` could not restore a number of ranks


def forward_is_collective(model: nn.Module) -> bool:
    """Return whether a forward pass of `model` has collectives, so that all ranks must call it together."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return False
    modules = _fsdp_modules(model)
    if model in _gathered_models:
        modules = [module for module in modules if not _can_stay_gathered(module)]
    return bool(modules) or any(hasattr(m, GROUP_ATTRIBUTE) or is_split(m) for m in model.modules())


_fsdp_modules_of: WeakKeyDictionary[nn.Module, list[ReferenceType[FSDPModule]]] = WeakKeyDictionary()


def _fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """Return the modules that `fully_shard` was called on; cached, since walking a large model is slow."""
    if model not in _fsdp_modules_of:
        _fsdp_modules_of[model] = [ref(module) for module in model.modules() if isinstance(module, FSDPModule)]
    return [module for reference in _fsdp_modules_of[model] if (module := reference()) is not None]


@torch.no_grad()
def sum_of_squares(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return this rank's share in the sum of squares of tensors, a scalar on `device`: at least in float32.

    The sum over the ranks of the shard axis counts each element once, also in tensors of which they hold copies.
    """
    shards: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors:
        shards.setdefault(num_copies(tensor), []).append(local(tensor.detach()))
    total = torch.zeros((), device=device)
    for copies, parts in shards.items():
        dtype = functools.reduce(torch.promote_types, {part.dtype for part in parts}, torch.float32)
        total = total + torch.stack(torch._foreach_norm(parts, 2.0, dtype)).to(device).square().sum() / copies
    return total


@torch.no_grad()
def norm_and_clip_factor(
    model: nn.Module, mesh: DeviceMesh, max_norm: float | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the 2-norm of all gradients over all ranks, a scalar, and the factor that clips it to `max_norm`.

    The factor is None without a `max_norm`.  Applying it is left to the optimizer, whose kernel may do it on a GPU.
    One all-reduce of a scalar over the `shard` axis, if it has several ranks; replicas hold equal shards.  A non-finite
    gradient on any rank makes the norm non-finite on the whole `shard` axis and, since gradients have been reduced over
    replicas, on every rank.  No host sync.  Works on local shards, since DTensor costs one dispatch per parameter.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if not gradients:
        raise UserError("loss: no parameter received a gradient; the loss must depend on a trainable parameter")
    squares = sum_of_squares(gradients, torch.device(mesh.device_type))
    if mesh.size(mesh.ndim - 1) > 1:
        dist.all_reduce(squares, group=mesh.get_group(mesh.ndim - 1))
    norm = squares.sqrt()
    return norm, None if max_norm is None else (max_norm / (norm + 1e-6)).clamp(max=1.0)


# ---------------------------------------------------------------------------------------------------------------
# Replicas: averaging in buckets

FIRST_BUCKET_BYTES = 2**20
"""The first bucket is small, so that communication starts early in the backward pass."""
BUCKET_BYTES = 25 * 2**20
"""Large enough that the latency of an all-reduce is negligible."""
_ALIGNMENT = 64
"""Alignment of each gradient in the buffer, in bytes, for vector instructions and GPU kernels."""


def bucket_gradients(sizes: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Return the indices of the gradients in each bucket, in order.

    `sizes` holds each gradient's number of elements and bytes per element.  A bucket is closed once its limit is
    reached, so the last gradient may exceed it.  Gradients with different element sizes never share a bucket.
    """
    buckets: list[list[int]] = []
    bytes_left = 0
    for index, (numel, element_size) in enumerate(sizes):
        if bytes_left <= 0 or element_size != sizes[index - 1][1]:
            buckets.append([])
            bytes_left = BUCKET_BYTES if len(buckets) > 1 else FIRST_BUCKET_BYTES
        buckets[-1].append(index)
        bytes_left -= numel * element_size
    return buckets


def bucket_numel(numels: Iterable[int], element_size: int) -> int:
    """Return the number of elements in a bucket's buffer: the padded gradients, and one flag per gradient."""
    return sum(_padded(numel, element_size) + 1 for numel in numels)


def _padded(numel: int, element_size: int) -> int:
    step = _ALIGNMENT // element_size
    return -(-numel // step) * step


class _Bucket:
    """Gradients averaged by a single all-reduce."""

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup) -> None:
        self.parameters, self._group = parameters, group
        self._mean_factor = 1 / group.size()
        """Factor applied to gradients before they are summed, which makes the sum a mean."""
        self._slots: list[tuple[int, torch.Size, tuple[int, ...]]] = []
        """Each gradient's offset in the buffer, size and strides."""
        start = 0
        for p in parameters:
            self._slots.append((start, p.size(), p.stride()))
            start += _padded(p.numel(), p.element_size())
        self._numel = bucket_numel((p.numel() for p in parameters), parameters[0].element_size())
        self.num_awaited = 0
        """Number of gradients that the current backward pass has not produced yet."""
        self._work: dist.Work | None = None
        self._flags: torch.Tensor | None = None
        self._absent: list[nn.Parameter] = []

    @torch.no_grad()
    def send(self) -> None:
        """Start the all-reduce, and make the gradients views of the bucket's buffer.

        A parameter without a gradient here may have one on another rank, so it contributes zeros.  After the
        all-reduce, a flag per parameter is nonzero if any rank has a gradient.
        """
        buffer = self.parameters[0].new_empty(self._numel)
        self._flags = buffer[-len(self.parameters) :].fill_(1)
        self._absent = []
        views = [buffer.as_strided(size, stride, start) for start, size, stride in self._slots]
        for index, (p, view) in enumerate(zip(self.parameters, views, strict=True)):
            if p.grad is None:
                self._absent.append(p)
                self._flags[index] = 0
                p.grad = torch.zeros_like(view)
        torch._foreach_copy_(views, [cast(torch.Tensor, p.grad) for p in self.parameters])
        for p, view in zip(self.parameters, views, strict=True):
            p.grad = view
        buffer.mul_(self._mean_factor)
        self._work = dist.all_reduce(buffer, group=self._group, async_op=True)

    @torch.no_grad()
    def receive(self) -> None:
        """Wait for the all-reduce, and reset the gradient to None for parameters that have none on any rank.

        Syncs with the host only if this rank lacks a gradient.
        """
        assert self._work is not None
        assert self._flags is not None
        self._work.wait()
        if self._absent:
            has_gradient = dict(zip(map(id, self.parameters), self._flags.tolist(), strict=True))
            for p in self._absent:
                if not has_gradient[id(p)]:
                    p.grad = None
        self._work = self._flags = None


class Replicas:
    """Keeps the replicas of a model identical by averaging gradients over the ranks of `group`.

    Every backward pass ends with averaged gradients, unless `enabled` is false: gradients then accumulate on this rank
    until the next enabled pass.  All ranks send buckets in the same order, the reverse of the forward pass, because
    gradients usually become ready in that order.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        """parameters: the trainable parameters, in the order of the forward pass."""
        backward = [*reversed(parameters)]
        dtypes = [*dict.fromkeys(p.dtype for p in backward)]
        backward.sort(key=lambda p: dtypes.index(p.dtype))  # a bucket has one dtype; the sort is stable
        indices = bucket_gradients([(p.numel(), p.element_size()) for p in backward])
        self.enabled = True
        self._buckets = [_Bucket([backward[index] for index in bucket], group) for bucket in indices]
        self._num_sent = 0
        self._is_running = False
        for bucket_index, bucket in enumerate(self._buckets):
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(_hook(ref(self), bucket_index))

    def averages(self, parameter: torch.Tensor) -> bool:
        """Return whether gradients of `parameter` are averaged.

        They are if it was trainable when `replicate` was called.
        """
        return any(parameter is averaged for bucket in self._buckets for averaged in bucket.parameters)

    def set_requires_gradient_sync(self, enabled: bool) -> None:
        """Set whether the next backward pass averages gradients or accumulates them on this rank."""
        self.enabled = enabled
        self._is_running = False  # a pass that raised an error has not finished

    def add(self, bucket_index: int) -> None:
        """Record that one more gradient of a bucket is ready, and send complete buckets that are next in order.

        Raises RuntimeError if a parameter receives a second gradient, since the count and the average would be wrong.
        """
        if not self.enabled:
            return
        if not self._is_running:
            self._is_running, self._num_sent = True, 0
            for bucket in self._buckets:
                bucket.num_awaited = len(bucket.parameters)
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        self._buckets[bucket_index].num_awaited -= 1
        if self._buckets[bucket_index].num_awaited < 0:
            raise RuntimeError(
                "a parameter got a second gradient in one backward pass: the previous backward pass did not finish; "
                "call zero_grad, and run the next one inside gradient_sync"
            )
        while self._num_sent < len(self._buckets) and self._buckets[self._num_sent].num_awaited == 0:
            self._send_next()

    def _send_next(self) -> None:
        self._buckets[self._num_sent].send()
        self._num_sent += 1

    def _finish(self) -> None:
        """End a backward pass: send the remaining buckets, which lack some gradients, and receive all buckets."""
        while self._num_sent < len(self._buckets):
            self._send_next()
        for bucket in self._buckets:
            bucket.receive()
        self._is_running = False


def _hook(replicas: ref[Replicas], bucket_index: int) -> Callable[[torch.Tensor], None]:
    """Return a hook that tells `replicas` that a gradient of bucket `bucket_index` is ready.

    The hook holds a weak reference: the garbage collector cannot see a tensor's hooks, so it would never free a
    reference cycle through them.
    """

    def hook(parameter: torch.Tensor) -> None:
        target = replicas()
        if target is not None:
            target.add(bucket_index)

    return hook


_replicas: WeakKeyDictionary[nn.Module, Replicas] = WeakKeyDictionary()


def replicas_of(model: nn.Module) -> Replicas | None:
    """Return the `Replicas` of a model that `replicate` was called on; None for any other model."""
    return _replicas.get(model)


def replicate(model: nn.Module, units: Sequence[ShardUnit], mesh: DeviceMesh) -> None:
    """From now on, average the gradients of `model` over `mesh`, if `apply_sharding` has left the model unsharded.

    Call this once the parameters have values.  No collectives.
    """
    if mesh.size() == 1 or any(isinstance(module, FSDPModule) for module in model.modules()):
        return
    for parameter in model.parameters():
        mark_replicated(parameter, mesh)
    trained = [p for group in parameters_by_unit(model, units).values() for p in group if p.requires_grad]
    (axis,) = (axis for axis in range(mesh.ndim) if mesh.size(axis) > 1)
    _replicas[model] = Replicas(trained, mesh.get_group(axis))
