"""A tiny llama_small for training in the test's own process, and functions to read its metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tests.helpers.launch import merged, tiny
from trainer import RunConfig, Trainer, load_config

SEQ_LEN, BATCH = 16, 4
_TINIER = [
    "model.num_kv_heads=2",
    "model.dim=16",
    "model.vocab_size=32",
    "data.source=synthetic",
    f"data.seq_len={SEQ_LEN}",
    f"train.global_batch_size={BATCH}",
    "train.micro_batch_size=2",
    "eval.steps=1",
    "run.threads=1",
]


def tiny_config(folder: Path, *overrides: str) -> RunConfig:
    """Return the configuration of a run in `folder`, with two micro-batches per step on one rank."""
    return load_config("llama_small", tiny(*merged(_TINIER, overrides), f"run.dir={folder}"))


def fit(folder: Path, *overrides: str, kind: type[Trainer] = Trainer) -> list[dict[str, Any]]:
    """Train to the end and return the records of metrics.jsonl."""
    trainer = kind(tiny_config(folder, *overrides))
    assert trainer.fit() == 0
    trainer.close()
    return lines(folder)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def full(tensor: torch.Tensor | None) -> torch.Tensor:
    """Return the full tensor of a parameter, gradient or moment, which may be a DTensor or a plain tensor."""
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
