"""Hand-written training loops, used as baselines by `bench.step`: with FSDP2, with DDP, or in a single process.

Each is what an expert would write for one model in an afternoon: AdamW, clipping and a correct loss, and nothing more.
The only part of the trainer that they use is the recipe's model, so that both sides train the same model.  Initial
weights are read from a file.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset


@dataclass(frozen=True)
class Settings:
    """All settings of the training loop."""

    threads: int
    """Threads of each rank; 0 divides the cores of this machine among its ranks."""
    parallel: str
    """`fsdp`, `ddp`, or `none`: one process without a process group."""
    recipe: str
    overrides: list[str]
    weights: Path
    tokens: Path
    tokens_dtype: str
    order: Path
    log: Path
    seq_len: int
    global_batch_size: int
    micro_batch_size: int
    steps: int
    warmup_steps: int
    lr: float
    min_lr_ratio: float
    weight_decay: float
    betas: tuple[float, float]
    max_grad_norm: float
    log_every: int


class TokenWindows(Dataset[torch.Tensor]):
    """Sample i is tokens i * T to (i + 1) * T of the file, inclusive, where T is the sequence length."""

    def __init__(self, settings: Settings) -> None:
        self.tokens = np.memmap(settings.tokens, dtype=settings.tokens_dtype, mode="r")
        self.seq_len = settings.seq_len

    def __getitem__(self, index: int) -> torch.Tensor:
        start = index * self.seq_len
        return torch.from_numpy(self.tokens[start : start + self.seq_len + 1].astype(np.int64))


def sample_indices(settings: Settings, rank: int, world_size: int) -> Iterator[int]:
    """Yield this rank's share of each global batch."""
    order, share = np.load(settings.order), settings.global_batch_size // world_size
    for step in range(settings.steps):
        start = step * settings.global_batch_size + rank * share
        yield from order[start : start + share].tolist()


def build_model(settings: Settings, device: torch.device) -> nn.Module:
    """Return the recipe's model with the initial weights: sharded, replicated or plain."""
    from trainer import load_config

    config = load_config(settings.recipe, settings.overrides)
    weights = torch.load(settings.weights, mmap=True)
    if settings.parallel != "fsdp":
        plain = config.spec.build_model(config.model).to(device)
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                parameter.copy_(weights[name])
        return plain if settings.parallel == "none" else DistributedDataParallel(plain, gradient_as_bucket_view=True)
    with torch.device("meta"):
        model: Any = config.spec.build_model(config.model)  # a Llama
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("shard",))
    for module in (model.tok_embeddings, *model.layers, model.head, model):
        fully_shard(module, mesh=mesh)
    model.to_empty(device=device)
    for layer in model.layers:
        layer.attention.rope.reset_parameters()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            shard = distribute_tensor(weights[name].to(device), mesh, parameter.placements, src_data_rank=None)
            parameter.copy_(shard)
    return model


@contextmanager
def gradient_sync(model: nn.Module, reduce: bool) -> Iterator[None]:
    """During the block, reduce gradients in the backward pass, or accumulate them locally."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(reduce)
    with model.no_sync() if isinstance(model, DistributedDataParallel) and not reduce else nullcontext():
        yield


def build_optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    embedding_ids = {id(p) for embedding in embeddings for p in embedding.parameters(recurse=False)}
    decays = {name: p.ndim >= 2 and id(p) not in embedding_ids for name, p in model.named_parameters()}
    groups = [
        {"params": [p for name, p in model.named_parameters() if decays[name]], "weight_decay": settings.weight_decay},
        {"params": [p for name, p in model.named_parameters() if not decays[name]], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, fused=True)


def lr_factor(settings: Settings, step: int) -> float:
    """Return the factor for `step`, counted from 1: linear warmup, then cosine decay."""
    if step <= settings.warmup_steps:
        return step / settings.warmup_steps
    progress = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return settings.min_lr_ratio + (1 - settings.min_lr_ratio) * cosine


def train(settings: Settings, after_step: Callable[[int], None]) -> list[float]:
    """Train on the ranks given by the environment; return the loss of every step."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(settings.threads or max(1, cores // int(os.environ["LOCAL_WORLD_SIZE"])))
    rank, world_size = 0, 1
    if settings.parallel != "none":
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        rank, world_size = dist.get_rank(), dist.get_world_size()

    model = build_model(settings, device)
    optimizer = build_optimizer(model, settings)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: lr_factor(settings, done + 1))
    loader = DataLoader(
        TokenWindows(settings),
        batch_size=settings.micro_batch_size,
        sampler=list(sample_indices(settings, rank, world_size)),
        pin_memory=device.type == "cuda",
    )
    batches = iter(loader)
    num_micro_batches = settings.global_batch_size // (world_size * settings.micro_batch_size)
    losses: list[float] = []
    pending: list[torch.Tensor] = []
    log = open(settings.log, "w") if rank == 0 else None  # noqa: SIM115 - open for the life of the script

    for step in range(1, settings.steps + 1):
        micro_batches = [next(batches) for _ in range(num_micro_batches)]
        # The loss is the mean over the targets of all ranks and micro-batches; FSDP and DDP average over ranks.
        count = torch.tensor(sum(int((batch[:, 1:] != -100).sum()) for batch in micro_batches))
        if world_size > 1:
            dist.all_reduce(count)
        num_targets = int(count)
        total = torch.zeros((), device=device)
        for number, batch in enumerate(micro_batches, start=1):
            batch = batch.to(device, non_blocking=True)
            with gradient_sync(model, reduce=number == num_micro_batches):
                loss = model(batch[:, :-1], targets=batch[:, 1:]) / num_targets
                (loss * world_size).backward()
            total += loss.detach()
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        pending.append(total)
        if step % settings.log_every == 0 or step == settings.steps:
            new_losses = torch.stack(pending)
            if world_size > 1:
                dist.all_reduce(new_losses)
            losses += new_losses.tolist()
            pending.clear()
            norm = (grad_norm.full_tensor() if isinstance(grad_norm, DTensor) else grad_norm).item()
            if log is not None:
                log.write(json.dumps({"step": step, "loss": losses[-1], "grad_norm": norm}) + "\n")
                log.flush()
        after_step(step)
    return losses
