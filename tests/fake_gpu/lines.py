"""Trains on fake GPUs with a log line for each step, and raises if the host waits for the device.

python tests/fake_gpu/lines.py OVERRIDE...
"""

from __future__ import annotations

import sys

import torch

from trainer import Trainer, load_config
from trainer.data.loader import Batch
from trainer.metrics.record import Record


class Logs(Trainer):
    """Logs values on the device and on the host."""

    def loss(self, batch: Batch) -> torch.Tensor:
        loss = super().loss(batch)
        self.log("own", loss, over=batch["targets"].numel())
        self.log("rows", len(batch["tokens"]))
        return loss

    def on_step(self, record: Record) -> None:
        if record.step in (2, 5):
            torch.cuda.set_sync_debug_mode("error" if record.step == 2 else "default")


if __name__ == "__main__":
    sys.exit(Logs(load_config("llama_small", sys.argv[1:])).fit())
