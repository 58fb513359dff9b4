"""Measures this machine's speed and writes the rates to the user's cache, where later plans find them.

A single process measures one device.  Under torchrun or srun, the ranks also measure the links between them.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from datetime import date
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from trainer.config.parallel import MeshShape
from trainer.config.schema import RunConfig
from trainer.distributed.environment import find_environment
from trainer.distributed.exchange import all_gather_single
from trainer.distributed.world import REPLICATE, SHARD, World
from trainer.errors import setting_error
from trainer.optim.muon import orthogonalization_flops, orthogonalize
from trainer.plan.machine import write_calibration

_BUDGET_S = 0.6
"""Approximate duration of a measurement by `_seconds`; it is less for short calls, since at most 250 are timed."""


def calibrate(config: RunConfig, device: str | None = None) -> dict[str, Any]:
    """Measure this machine's rates and return them; rank 0 also prints them and writes them to the calibration cache.

    Measures the FLOP/s of matmuls (at the width of `config`'s model), attention and Muon's iterations; the bytes/s of
    memory, the optimizer and host copies; the minimum seconds per kernel and the host's seconds per operator; and, in a
    distributed run, the bytes/s and latency of links.  Collective in a distributed run.  Raises UserError if this
    machine's device is not `device` (None accepts any).
    """
    world = World(config) if find_environment().is_distributed else None
    local_device = world.device if world else torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if local_device.type == "cuda" else "cpu"
    if device is not None and device.lower() not in name.lower():
        rule = f"is not this machine's device, {name}; --calibrate measures only this machine"
        raise setting_error("device", device, rule, "auto")
    dtypes = (torch.bfloat16, torch.float32)
    rates = {
        "measured": date.today().isoformat(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "matmul": {dtype.itemsize: _matmul_rate(config, local_device, dtype) for dtype in dtypes},
        "attention": {dtype.itemsize: _attention_rate(config, local_device, dtype) for dtype in dtypes},
        "orthogonalize": {dtype.itemsize: _orthogonalize_rate(config, local_device, dtype) for dtype in dtypes},
        "memory": _memory_rate(local_device),
        "optimizer": _optimizer_rate(local_device),
        "kernel_s": _kernel_s(local_device),
        "host_s": _host_s(local_device),
        "host": _host_copy_rate(local_device),
        **(_link_rates(world) if world else {}),
    }
    if world is None or world.is_main:
        path = write_calibration(name, rates)
        for key, value in rates.items():
            print(f"{key:>17}  {value}")
        print(f"{'saved to':>17}  {path}")
    if world is not None:
        world.close()
    return rates


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the time of one call in seconds, including its work on the device.

    This is the least of five repetitions, since other work on the machine only ever slows them; each is the mean of up
    to 50 calls.
    """

    def mean_s(num_calls: int) -> float:
        _synchronize(device)
        started = time.perf_counter()
        for _ in range(num_calls):
            work()
        _synchronize(device)
        return (time.perf_counter() - started) / num_calls

    mean_s(2)  # warm up
    num_calls = max(1, min(50, int(_BUDGET_S / 5 / max(mean_s(1), 1e-7))))
    return min(mean_s(num_calls) for _ in range(5))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _width(config: RunConfig, device: torch.device) -> int:
    """Return the model's width, or 1024 if its configuration has none; at most 1024 on a CPU."""
    width = int(getattr(config.model, "dim", None) or getattr(config.model, "width", None) or 1024)
    return width if device.type == "cuda" else min(width, 1024)


def _matmul_rate(config: RunConfig, device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of a matmul at the model's width (fewer rows and columns on a CPU, to save time)."""
    width = _width(config, device)
    rows = min(config.data.seq_len, 8192 if device.type == "cuda" else 512)
    a = torch.randn(rows, width, device=device, dtype=dtype)
    b = torch.randn(width, 4 * width, device=device, dtype=dtype)
    return 2.0 * rows * width * 4 * width / _seconds(lambda: a @ b, device)


def _orthogonalize_rate(config: RunConfig, device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of Muon's Newton-Schulz iterations on matrices of two typical shapes at the model's width."""
    width, flops = _width(config, device), 0
    batches = [torch.randn(2, rows, width, device=device).to(dtype) for rows in (width, 3 * width)]
    for batch in batches:
        flops += batch.shape[0] * orthogonalization_flops(*batch.shape[1:])
    return flops / _seconds(lambda: [orthogonalize(batch) for batch in batches], device)


def _attention_rate(config: RunConfig, device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of causal attention, forward and backward, counting half of the scores."""
    length = min(config.data.seq_len, 8192 if device.type == "cuda" else 512)
    heads, size = (16, 128) if device.type == "cuda" else (4, 64)
    q, k, v = (torch.randn(1, heads, length, size, device=device, dtype=dtype, requires_grad=True) for _ in range(3))

    def work() -> None:
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

    return (4 + 10) * heads * length * length * size / 2 / _seconds(work, device)


def _memory_rate(device: torch.device) -> float:
    """Return the bytes read and written per second by an elementwise addition."""
    numel = (256 if device.type == "cuda" else 16) * 2**20
    a, b = (torch.ones(numel, device=device) for _ in range(2))
    return 3 * 4 * numel / _seconds(lambda: torch.add(a, b, out=b), device)


def _optimizer_rate(device: torch.device) -> float:
    """Return the bytes read and written per second by fused AdamW, which reads four tensors and writes three."""
    numel = (128 if device.type == "cuda" else 8) * 2**20
    weight = torch.nn.Parameter(torch.ones(numel, device=device))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW([weight], fused=True)
    return 7 * 4 * numel / _seconds(optimizer.step, device)


def _host_copy_rate(device: torch.device) -> float:
    """Return the bytes per second of a copy to pinned host memory or back, whichever is slower."""
    num_bytes = (256 if device.type == "cuda" else 16) * 2**20
    on_device = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    on_host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    out_s = _seconds(lambda: on_host.copy_(on_device, non_blocking=True), device)
    back_s = _seconds(lambda: on_device.copy_(on_host, non_blocking=True), device)
    return num_bytes / max(out_s, back_s)


def _link_rates(world: World) -> dict[str, float]:
    """Measure the bandwidth into a rank and the latency of a collective, within a node and between nodes.

    Times all-gathers of two sizes along both axes of a mesh whose rows are the nodes.  Collective.
    """
    local_size = world.env.local_world_size
    mesh = world.build_mesh(MeshShape(world.size // local_size, local_size))
    measured: dict[str, float] = {}
    for axis, rate, latency in ((SHARD, "link", "link_latency_s"), (REPLICATE, "network", "network_latency_s")):
        if axis not in (mesh.mesh_dim_names or ()) or mesh[axis].size() == 1:
            continue
        group, num_ranks = mesh.get_group(axis), mesh[axis].size()
        small_s, large_s = (_all_gather_s(group, num_ranks, size, world) for size in (2**16, 2**25))
        measured[rate] = (2**25 - 2**16) * (num_ranks - 1) / num_ranks / max(large_s - small_s, 1e-9)
        measured[latency] = small_s / math.log2(num_ranks)
    return measured


def _all_gather_s(group: dist.ProcessGroup, num_ranks: int, num_bytes: int, world: World) -> float:
    """Return the time in seconds, on the slowest rank, of an all-gather with an output of `num_bytes` bytes."""
    output = torch.empty(num_bytes // num_ranks * num_ranks, dtype=torch.uint8, device=world.device)
    shard = torch.empty(num_bytes // num_ranks, dtype=torch.uint8, device=world.device)
    times = []
    for _ in range(7):
        world.barrier()
        _synchronize(world.device)
        started = time.perf_counter()
        all_gather_single(output, shard, group=group)
        _synchronize(world.device)
        times.append(time.perf_counter() - started)
    return world.max([statistics.median(times)])[0]


def _kernel_s(device: torch.device) -> float:
    """Return the shortest time from one kernel to the next, using kernels with almost no work."""
    small = torch.ones(64, device=device)
    return _seconds(lambda: [small.add_(1.0) for _ in range(200)], device) / 200


def _host_s(device: torch.device) -> float:
    """Return the host time to issue one operator, or 0 on a CPU, where the host is the device."""
    if device.type == "cpu":
        return 0.0
    small = torch.ones(64, device=device, requires_grad=True)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(1000):
        small * 1.0
    return (time.perf_counter() - started) / 1000
