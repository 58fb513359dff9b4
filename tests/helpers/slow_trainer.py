"""A Llama that pauses after each step, or stops at a gate, so that a test can interact with a run of milliseconds."""

from __future__ import annotations

import dataclasses
import os
import time

import torch

from tests.helpers.gate import pass_gate
from trainer import Trainer, register
from trainer.metrics.record import Record
from trainer.registry import find_model


class SlowTrainer(Trainer):
    """Pauses for MESHTRAINER_TEST_REST_S seconds after each step, and waits at a gate if there is one."""

    def on_step(self, record: Record) -> None:
        time.sleep(float(os.environ.get("MESHTRAINER_TEST_REST_S", "0")))

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if not torch.is_grad_enabled() and self.world.rank == 0:
            pass_gate(f"evaluation {self.state.step}")
        return super().loss(batch)


pass_gate(f"import {os.environ.get('RANK', '')}")
register(dataclasses.replace(find_model("llama"), name="slow_llama", trainer=SlowTrainer))
