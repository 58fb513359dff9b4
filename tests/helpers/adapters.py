"""Runs with adapters on a folder of weights, in the test's own process, and the loop of a plain script around peft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers.launch import merged, tiny
from trainer import Trainer, load_config

OWN = [
    *("data.source=synthetic", "data.seq_len=16", "train.global_batch_size=4", "train.micro_batch_size=2"),
    *("optim.lr=1e-2", "schedule.warmup_steps=0", "lora.rank=4", "lora.alpha=8", "fsdp.param_dtype=float32"),
]


def overrides_of(base: Path | str | None, folder: Path | str, *overrides: str) -> list[str]:
    """Return the overrides of a run in `folder` that starts from `base`; without it, of a tiny model."""
    own = [f"train.init_from={base}", *OWN] if base is not None else OWN
    shaped = tiny(*merged(own, [*overrides, f"run.dir={folder}"]))
    return [item for item in shaped if base is None or not item.startswith("model.") or item in overrides]


def config_of(base: Path | str | None, folder: Path | str, *overrides: str, recipe: str = "llama_small") -> Any:
    return load_config(recipe, overrides_of(base, folder, *overrides))


def trained(base: Path | str | None, folder: Path, *overrides: str, recipe: str = "llama_small") -> Path:
    """Train, for two steps by default, and return the run's folder."""
    trainer = Trainer(config_of(base, folder, *merged(["train.steps=2"], overrides), recipe=recipe))
    try:
        assert trainer.fit() == 0
    finally:
        trainer.close()
    return folder


def plain_loop(
    model: nn.Module, parameters: list[nn.Parameter], batches: list[Any], lrs: list[float], config: Any
) -> list[float]:
    """Train as a plain script would, on as many batches a step as there are for each rate; return the losses."""
    optim = config.optim
    optimizer = torch.optim.AdamW(parameters, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay)
    losses, per_step = [], len(batches) // len(lrs)
    for step, lr in enumerate(lrs):
        ours = batches[step * per_step : (step + 1) * per_step]
        tokens, targets = (torch.cat([batch[name] for batch in ours]) for name in ("tokens", "targets"))
        loss = F.cross_entropy(model(tokens).logits.flatten(0, 1), targets.flatten())
        loss.backward()
        if optim.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, optim.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
