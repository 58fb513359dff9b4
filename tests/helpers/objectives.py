"""Small sources of pairs, labels and classes, a Trainer that reads one of them, and the batches that it would read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tests.helpers.launch import merged, tiny
from trainer import RunConfig, Source, Trainer, TrainLoader, load_config
from trainer.data.loader import Batch, EvalLoader
from trainer.data.source import IGNORE, Fingerprint
from trainer.objective import Objective

SEQ_LEN, VOCAB = 16, 257


class Pairs(Source):
    """Pairs of answers of different lengths to one prompt; row 2i is the chosen answer of sample i."""

    seq_len, vocab_size, checks_ids, rows_per_sample = SEQ_LEN, VOCAB, True, 2

    def __len__(self) -> int:
        return 10

    def batch(self, indices: NDArray[np.int64]) -> Mapping[str, NDArray[Any]]:
        tokens = np.zeros((2 * len(indices), SEQ_LEN), np.int64)
        targets = np.full_like(tokens, IGNORE)
        for row, index in enumerate(np.repeat(indices, 2)):
            if index < 0:
                continue
            draw = np.random.default_rng([index])
            prompt = draw.integers(0, VOCAB, 1 + index % 5)
            answer = np.random.default_rng([index, row % 2]).integers(0, VOCAB, 2 + (3 * index + row % 2) % 7)
            text = np.concatenate([prompt, answer])
            tokens[row, : len(text) - 1] = text[:-1]
            targets[row, len(prompt) - 1 : len(text) - 1] = answer
        return {"tokens": tokens, "targets": targets}

    @cached_property
    def fingerprint(self) -> Fingerprint:
        return Fingerprint(len(self), 1, 0, type(self).__name__)


class Labelled(Pairs):
    """Row 2i is a labelled answer of sample i, and row 2i + 1 an answer to another prompt."""

    num_labels = 2

    def batch(self, indices: NDArray[np.int64]) -> Mapping[str, NDArray[Any]]:
        return {**super().batch(indices), "labels": np.where(indices < 0, 0, indices % 3 != 0).astype(np.int64)}


class ScoredPairs(Pairs):
    """Pairs of answers that are scored at their last token, where the target is 0."""

    def batch(self, indices: NDArray[np.int64]) -> Mapping[str, NDArray[Any]]:
        batch = super().batch(indices)
        places = np.arange(SEQ_LEN) == ((batch["targets"] != IGNORE) * np.arange(SEQ_LEN)).argmax(1)[:, None]
        is_padding = (batch["targets"] == IGNORE).all(1, keepdims=True)
        return {**batch, "targets": np.where(places & ~is_padding, 0, IGNORE)}


class Classes(ScoredPairs):
    """Texts of three classes, which are the targets at their last tokens."""

    rows_per_sample, num_labels = 1, 3

    def batch(self, indices: NDArray[np.int64]) -> Mapping[str, NDArray[Any]]:
        chosen = {name: rows[::2] for name, rows in super().batch(indices).items()}
        labels = np.where(indices < 0, 0, indices % 3).astype(np.int64)
        return {**chosen, "targets": np.where(chosen["targets"] == 0, labels[:, None], IGNORE), "labels": labels}


def source_of(objective: Objective) -> Source:
    if "scores" in objective.needs:
        return Classes() if "labels" in objective.needs else ScoredPairs()
    return Labelled() if "labels" in objective.needs else Pairs()


OWN = [
    "data.source=synthetic",
    f"data.seq_len={SEQ_LEN}",
    "train.global_batch_size=4",
    "train.steps=3",
    "schedule.warmup_steps=0",
    "fsdp.param_dtype=float32",
]
PLAIN_SGD = [
    "optim.name=sgd",
    "optim.lr=0.3",
    "optim.momentum=0",
    "optim.weight_decay=0",
]
"""Not AdamW, which turns rounding errors of small gradients into full updates."""


def config_of(base: Path, folder: Path, *overrides: str) -> RunConfig:
    """Return the configuration of a run that starts from a model folder."""
    settings = tiny(*merged([*OWN, f"train.init_from={base}", f"run.dir={folder}"], overrides))
    return load_config("llama_small", [item for item in settings if not item.startswith("model.")])


def trainer_on(source: Source | None, config: RunConfig) -> Trainer:
    """Return the objective's Trainer, which trains on `source` and is evaluated on all of it; None: on its own data."""
    kind: type[Trainer] = config.trainer_class(Trainer)
    if source is None:
        return kind(config)

    class OnSource(kind):  # type: ignore[misc, valid-type]
        def build_loader(self) -> Iterable[Batch]:
            return TrainLoader.from_config(source, self.config, self.world.rank, self.world.size, self.world.device)

        def build_eval_loader(self) -> Iterable[Batch] | None:
            if not self.config.eval.every:
                return None
            return EvalLoader.from_config(source, self.config, self.world.rank, self.world.size)

    return OnSource(config)


def global_batches(trainer: Trainer) -> list[tuple[float, dict[str, torch.Tensor]]]:
    """Return the learning rate and the whole batch of each step of a run."""
    loader, found = iter(trainer.loader), []
    for step in range(1, trainer.config.train.steps + 1):
        micro = [next(loader) for _ in range(trainer.num_micro_batches)]
        batch = {name: torch.cat([part[name] for part in micro]) for name in micro[0]}
        found.append((trainer.schedule.lr(step), batch))
    return found


def log_probabilities(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the summed log-probability of each row's targets."""
    counts = targets != IGNORE
    index = targets.where(counts, torch.zeros(()).long()).unsqueeze(-1)
    return (logits.log_softmax(-1).gather(-1, index).squeeze(-1) * counts).sum(-1)


# ---------------------------------------------------------------------------------------------------------------
# As files


def write_records(path: Path, records: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_pairs(path: Path) -> Path:
    """Write twelve records of preferences that a small model can learn."""
    asked = (("Hi", "Yes", "No"), ("Bye", "Yes now", "No"), ("two and two", "Yes", "No No"))
    return write_records(path, [{"prompt": text, "chosen": a, "rejected": b} for text, a, b in asked] * 4)
