"""A llama that rests after each update, so that a run of milliseconds can be met in the middle."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

import torch

from trainer import Trainer, register
from trainer.metrics.record import Record
from trainer.recipe import find_recipe


class SlowTrainer(Trainer):
    """Rests for MESHTRAINER_TEST_REST_S seconds after each update, and before each batch of an evaluation.

    As soon as it evaluates, there is a file MESHTRAINER_TEST_MARKER, if that is set.
    """

    def on_step(self, record: Record) -> None:
        rest()

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if not torch.is_grad_enabled():
            if marker := os.environ.get("MESHTRAINER_TEST_MARKER"):
                Path(marker).touch()
            rest()
        return super().loss(batch)


def rest() -> None:
    time.sleep(float(os.environ.get("MESHTRAINER_TEST_REST_S", "0")))


register(dataclasses.replace(find_recipe("llama"), name="slow_llama", trainer=SlowTrainer))
