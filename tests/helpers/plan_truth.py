"""Measures memory and collectives of actual steps, to compare plans with: of real ones, and of ones on fake tensors."""

from __future__ import annotations

import itertools
import json
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.helpers.commands import meshtrainer
from trainer import Trainer, load_config
from trainer.config.parallel import MeshShape
from trainer.config.schema import AUTO, RunConfig
from trainer.loss import find_loss
from trainer.model.gradients import gradient_sync
from trainer.model.network import build_network
from trainer.model.parameters import local
from trainer.model.shard import apply_sharding
from trainer.plan.machine import find_machine
from trainer.plan.plan import Plan, make_plan, without_data
from trainer.plan.trace import Trace


def config_of(recipe: str, *overrides: str, shape: MeshShape, micro_batches: int = 1) -> RunConfig:
    """Return a configuration whose step has `micro_batches` on each rank of `shape`."""
    config = without_data(load_config(recipe, overrides, needs_weights=False))
    micro = config.train.micro_batch_size
    batch = shape.num_ranks * (1 if micro == AUTO else int(micro)) * micro_batches
    return replace(config, train=replace(config.train, global_batch_size=batch))


def plan_of(recipe: str, *overrides: str, shape: MeshShape, micro_batches: int = 1) -> Plan:
    """Return the plan of that configuration on CPUs."""
    config = config_of(recipe, *overrides, shape=shape, micro_batches=micro_batches)
    plan = make_plan(config, shape, find_machine("cpu"))
    assert kept_bytes(plan.trace) == 0
    return plan


def kept_bytes(trace: Trace) -> int:
    """Return the bytes, other than gradients, that a micro-batch leaves behind; the next one would add as many."""
    return sum(event.segment.net for event in trace.events)


def planned(*arguments: object, code: int = 0) -> dict[str, Any]:
    """Return what `meshtrainer plan arguments... --json` prints, and assert its exit code."""
    ended = meshtrainer("plan", *arguments, "--json")
    assert ended.code == code, ended.out + ended.err
    found: dict[str, Any] = json.loads(ended.out)
    return found


@contextmanager
def fake_model(config: RunConfig, shape: MeshShape) -> Iterator[tuple[nn.Module, DeviceMesh]]:
    """Open a fake process group of `shape`, and yield rank 0's sharded model on fake CPU tensors."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=shape.num_ranks)
    try:
        sizes = (shape.replicate, shape.shard) if shape.has_replicas else (shape.shard,)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])
        model = build_network(config)
        apply_sharding(model, config.spec, config, mesh)
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield model.to_empty(device="cpu"), mesh
    finally:
        dist.destroy_process_group()


def update(model: nn.Module, config: RunConfig, num_micro_batches: int) -> None:
    """Run the forward and backward passes of one step."""
    loss_of = find_loss(model)
    for number in range(num_micro_batches):
        shape = (int(config.train.micro_batch_size), config.data.seq_len)
        batch = {name: torch.zeros(shape, dtype=torch.int64) for name in ("tokens", "targets")}
        with gradient_sync(model, number == num_micro_batches - 1, config.fsdp):
            (loss_of(batch) * 1.0).backward()


def tracked_peak(config: RunConfig, shape: MeshShape, num_micro_batches: int = 1) -> int:
    """Return the peak memory in bytes of the second step's forward and backward passes, by torch's FSDPMemTracker.

    The optimizer's tensors are added here, because the tracker counts them as unsharded. It supports one micro-batch.
    """
    assert num_micro_batches == 1
    with fake_model(config, shape) as (model, _):
        update(model, config, 1)
        model.zero_grad(set_to_none=True)
        tracker = FSDPMemTracker(model)
        with tracker:
            update(model, config, 1)
        peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
        size = getattr(torch, config.optim.state_dtype).itemsize
        states = 2 * sum(local(p).numel() * size for p in model.parameters() if p.requires_grad)
        return int(peak) + states


class StorageMeter(TorchDispatchMode):
    """Counts the bytes of each storage that an operator uses, while it is referenced."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._sizes: dict[int, int] = {}
        self._references: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is DTensor for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((result, args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                self.note(leaf)
        return result

    def note(self, tensor: torch.Tensor) -> None:
        """Count the tensor's storage until it is freed."""
        storage = local(tensor).untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = 0
            self._references[key] = weakref.ref(storage, lambda _: self._forget(key))
        self.resize(key, storage.nbytes())

    def resize(self, key: int, size: int) -> None:
        if key in self._sizes:
            self.live += size - self._sizes[key]
            self._sizes[key] = size
            self.peak = max(self.peak, self.live)

    def _forget(self, key: int) -> None:
        self.live -= self._sizes.pop(key)
        del self._references[key]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count storages within the context, including FSDP's resizing of them."""
        resize = torch.UntypedStorage.resize_

        def counting_resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self.resize(storage._cdata, size)
            return result

        with mock.patch.object(torch.UntypedStorage, "resize_", counting_resize), self:
            yield


def metered_peak(config: RunConfig, shape: MeshShape, num_micro_batches: int = 1) -> int:
    """Return the peak memory in bytes of the second step's forward and backward passes, by the storages alive."""
    with fake_model(config, shape) as (model, _):
        meter = StorageMeter()
        with meter.running():
            for tensor in (*model.parameters(), *model.buffers()):
                meter.note(tensor)
            update(model, config, num_micro_batches)
            dtype = getattr(torch, config.optim.state_dtype)
            trained_shards = [local(p) for p in model.parameters() if p.grad is not None]
            states = [torch.empty_like(shard, dtype=dtype) for shard in trained_shards for _ in range(2)]
            model.zero_grad(set_to_none=True)
            meter.peak = meter.live
            update(model, config, num_micro_batches)
        del states
        return meter.peak


class CollectiveLog(TorchDispatchMode):
    """Counts the issued collectives by operation, group size, and bytes of the full tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[str, int, int]] = Counter()
        """The size is -1 for exchanges of rows, since it depends on the tokens."""
        self.exchanged = 0
        """Bytes received in these exchanges."""
        self.reduced: set[tuple[int, torch.dtype]] = set()
        """The bytes and dtypes of the full tensors that were summed over ranks."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is DTensor for kind in types):
            return NotImplemented
        name = func.overloadpacket.__name__
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        if name == "_allgather_base_":
            self.counts["all_gather", sizes[0] // sizes[1], sizes[0]] += 1
        elif name == "_reduce_scatter_base_":
            self.counts["reduce_scatter", sizes[1] // sizes[0], sizes[1]] += 1
            self.reduced.add((sizes[1], tensors[1].dtype))
        elif name == "gather_parts":
            self.counts["all_gather", args[1], args[1] * sizes[0]] += 1
        elif name == "sum_parts":
            self.counts["reduce_scatter", args[0].shape[0], sizes[0]] += 1
        elif name == "exchange_parts":
            self.counts["all_to_all", args[0].shape[0], sizes[0]] += 1
        elif name == "exchange_rows":
            row = sizes[0] // max(1, args[0].shape[0])
            self.counts["all_to_all", len(args[1]), -1] += 1
            self.exchanged += sum(args[2]) * row if args[0].shape[0] else 0
        elif name == "alltoall_base_":
            self.counts["all_to_all", len(args[3]), sizes[0]] += 1
        elif name == "allreduce_":
            self.counts["all_reduce", 0, sizes[0]] += 1
            self.reduced.add((sizes[0], tensors[0].dtype))
        return func(*args, **(kwargs or {}))


def measure(recipe: str, overrides: list[str]) -> tuple[int, Counter[tuple[str, int, int]]]:
    """Train three steps of a real run; return the peak of tensors and the collectives of the third."""
    trainer = Trainer(load_config(recipe, overrides))
    meter, log = StorageMeter(), CollectiveLog()
    batches = iter(trainer.loader)
    for number in range(3):
        micro_batches = list(itertools.islice(batches, trainer.num_micro_batches))
        if number < 2:
            trainer.train_step(micro_batches)
            continue
        with meter.running(), log:
            for tensor in (*trainer.model.parameters(), *trainer.model.buffers()):
                meter.note(tensor)
            for part in trainer.optimizer.parts:
                for state in part.state.values():
                    for value in state.values():
                        meter.note(value) if value.ndim else None
            trainer.train_step(micro_batches)
    return meter.peak, log.counts


def as_logged(counts: Mapping[Any, int]) -> Counter[tuple[str, int, int]]:
    """Convert planned collectives to the log's form, which lacks the number of ranks of an all-reduce."""
    found: Counter[tuple[str, int, int]] = Counter()
    for collective, count in counts.items():
        num_ranks = 0 if collective.operation == "all_reduce" else collective.num_ranks
        found[collective.operation, num_ranks, collective.num_bytes] += count
    return found
