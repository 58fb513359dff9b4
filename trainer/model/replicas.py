"""Averages the gradients of a model that every rank holds whole, in buckets, while the backward pass still runs.

What DistributedDataParallel does for a module of its own, done here for parameters, so that the model keeps its class,
its names and its forward pass.  Source: Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel
Training", arXiv:2006.15704; the sizes of buckets are DistributedDataParallel's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import cast
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from trainer.model.parameters import mark_replicated
from trainer.model.units import ShardUnit, parameters_by_unit

FIRST_BUCKET_BYTES = 2**20
"""The first bucket is small: communication begins early in the backward pass."""
BUCKET_BYTES = 25 * 2**20
"""Large enough that the latency of a message hardly counts."""
_ALIGNMENT = 64
"""Bytes that each gradient begins at a multiple of, as vector instructions and GPU kernels want it."""


def cut_into_buckets(sizes: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Return the indices of the gradients in each bucket, in order.

    `sizes` has for each gradient its number of elements and the bytes of one.  A bucket is closed once it is full, so
    that it may exceed its limit by one gradient; gradients with elements of different size never share one.
    """
    buckets: list[list[int]] = []
    room = 0
    for index, (numel, element_size) in enumerate(sizes):
        if room <= 0 or element_size != sizes[index - 1][1]:
            buckets.append([])
            room = BUCKET_BYTES if len(buckets) > 1 else FIRST_BUCKET_BYTES
        buckets[-1].append(index)
        room -= numel * element_size
    return buckets


def bucket_numel(numels: Iterable[int], element_size: int) -> int:
    """Return the number of elements of a bucket's buffer: the gradients, padded, and a flag for each of them."""
    return sum(_padded(numel, element_size) + 1 for numel in numels)


def _padded(numel: int, element_size: int) -> int:
    step = _ALIGNMENT // element_size
    return -(-numel // step) * step


class _Bucket:
    """Gradients that are sent together."""

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup) -> None:
        self.parameters, self._group = parameters, group
        self._share = 1 / group.size()
        """What gradients are multiplied by before they are summed."""
        self._places: list[tuple[int, torch.Size, tuple[int, ...]]] = []
        """Where each gradient begins in the buffer, its size and its strides."""
        start = 0
        for p in parameters:
            self._places.append((start, p.size(), p.stride()))
            start += _padded(p.numel(), p.element_size())
        self._numel = bucket_numel((p.numel() for p in parameters), parameters[0].element_size())
        self.num_awaited = 0
        """Gradients that this backward pass has not produced yet."""
        self._work: dist.Work | None = None
        self._flags: torch.Tensor | None = None
        self._absent: list[nn.Parameter] = []

    @torch.no_grad()
    def send(self) -> None:
        """Start the all-reduce.  From now on the gradients lie in the bucket's buffer.

        A parameter without a gradient here may have one on another rank: it takes part with zeros, and a flag for each
        parameter says whether any rank has one.
        """
        buffer = self.parameters[0].new_empty(self._numel)
        self._flags = buffer[-len(self.parameters) :].fill_(1)
        self._absent = []
        views = [buffer.as_strided(size, stride, start) for start, size, stride in self._places]
        for index, (p, view) in enumerate(zip(self.parameters, views, strict=True)):
            if p.grad is None:
                self._absent.append(p)
                self._flags[index] = 0
                p.grad = torch.zeros_like(view)
        torch._foreach_copy_(views, [cast(torch.Tensor, p.grad) for p in self.parameters])
        for p, view in zip(self.parameters, views, strict=True):
            p.grad = view
        buffer.mul_(self._share)
        self._work = dist.all_reduce(buffer, group=self._group, async_op=True)

    @torch.no_grad()
    def receive(self) -> None:
        """Wait for the all-reduce; take the gradient from parameters that have none on any rank.

        The host waits for the device only where this rank lacks a gradient.
        """
        assert self._work is not None
        assert self._flags is not None
        self._work.wait()
        if self._absent:
            exists = dict(zip(map(id, self.parameters), self._flags.tolist(), strict=True))
            for p in self._absent:
                if not exists[id(p)]:
                    p.grad = None
        self._work = self._flags = None


class Replicas:
    """What keeps the replicas of a model alike: it averages their gradients over the ranks of `group`.

    Every backward pass ends with averaged gradients, unless `enabled` is false: then they add up on this rank until the
    next pass in which it is true.  Buckets are sent in the same order on every rank: that of the forward pass,
    reversed, in which gradients usually become ready.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        """`parameters`: those that are trained, in the order of the forward pass."""
        backward = [*reversed(parameters)]
        dtypes = [*dict.fromkeys(p.dtype for p in backward)]
        backward.sort(key=lambda p: dtypes.index(p.dtype))  # a bucket has one dtype; sorting keeps the order otherwise
        indices = cut_into_buckets([(p.numel(), p.element_size()) for p in backward])
        self.enabled = True
        self._buckets = [_Bucket([backward[index] for index in own], group) for own in indices]
        self._num_sent = 0
        self._is_running = False
        for number, bucket in enumerate(self._buckets):
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(_hook(ref(self), number))

    def averages(self, parameter: torch.Tensor) -> bool:
        """Return whether the gradient of `parameter` is averaged: it was trained when `replicate` was called."""
        return any(parameter is own for bucket in self._buckets for own in bucket.parameters)

    def enable(self, enabled: bool) -> None:
        """Average gradients in the next backward pass, or let them add up on this rank."""
        self.enabled = enabled
        self._is_running = False  # a pass that raised an error has not finished

    def add(self, number: int) -> None:
        """Count one more gradient of a bucket as ready; send the bucket once it is complete and the next in order.

        Raises RuntimeError for a second gradient of a parameter: the count would be wrong, and so would be the average.
        """
        if not self.enabled:
            return
        if not self._is_running:
            self._is_running, self._num_sent = True, 0
            for bucket in self._buckets:
                bucket.num_awaited = len(bucket.parameters)
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        self._buckets[number].num_awaited -= 1
        if self._buckets[number].num_awaited < 0:
            raise RuntimeError(
                "a parameter got a second gradient in one backward pass: the backward pass before did not end; call "
                "zero_grad, and run the next one inside gradient_sync"
            )
        while self._num_sent < len(self._buckets) and self._buckets[self._num_sent].num_awaited == 0:
            self._send_next()

    def _send_next(self) -> None:
        self._buckets[self._num_sent].send()
        self._num_sent += 1

    def _finish(self) -> None:
        """End a backward pass: send the buckets in which gradients are missing, and receive all."""
        while self._num_sent < len(self._buckets):
            self._send_next()
        for bucket in self._buckets:
            bucket.receive()
        self._is_running = False


def _hook(replicas: ref[Replicas], number: int) -> Callable[[torch.Tensor], None]:
    """Return the hook of a parameter in bucket `number`.

    It holds a weak reference: the garbage collector does not see into a tensor's hooks, so that a cycle through them
    would never be freed.
    """

    def hook(parameter: torch.Tensor) -> None:
        found = replicas()
        if found is not None:
            found.add(number)

    return hook


_replicas: WeakKeyDictionary[nn.Module, Replicas] = WeakKeyDictionary()


def replicas_of(model: nn.Module) -> Replicas | None:
    """Return what averages the gradients of a model that `replicate` was called on; None for any other."""
    return _replicas.get(model)


def replicate(model: nn.Module, units: Sequence[ShardUnit], mesh: DeviceMesh) -> None:
    """Have the gradients of `model` averaged over the ranks of `mesh`, if `apply_sharding` has left it whole on each.

    To be called once its parameters have values.  No collective.
    """
    if mesh.size() == 1 or any(isinstance(module, FSDPModule) for module in model.modules()):
        return
    for parameter in model.parameters():
        mark_replicated(parameter, mesh)
    trained = [p for own in parameters_by_unit(model, units).values() for p in own if p.requires_grad]
    (axis,) = (axis for axis in range(mesh.ndim) if mesh.size(axis) > 1)
    _replicas[model] = Replicas(trained, mesh.get_group(axis))
