"""Trains one row of `bench.gpu`, in its own process, with a Trainer that times its steps and then exits.

This module imports torch; the process that starts the rows does not.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from trainer.recipes import _layers

from bench.variants import ForeachAdamW, WholeLoss
from trainer import RunConfig, Trainer, load_config
from trainer.loss import linear_cross_entropy
from trainer.metrics.record import Record
from trainer.metrics.step_metrics import peak_flops, peak_memory_gib

if TYPE_CHECKING:
    from bench.gpu import Row

Mark = float | torch.cuda.Event
"""A point in time: a reading of the host's clock, or an event on a GPU's stream."""


@dataclass(frozen=True)
class Window:
    """The steps to measure, and the file to write the readings to."""

    warmup: int
    steps: int
    result: Path
    start_time: float
    """Start time of the row, from `time.time`."""


class MeasuredTrainer(Trainer):
    """Times its steps and ends the process after the last measured one, without writing a large checkpoint."""

    def __init__(self, config: RunConfig, window: Window) -> None:
        super().__init__(config)
        self.window = window
        self.marks: list[Mark] = []
        self.records: list[Record] = []
        """One record per step.  Losses are read after the last step only, because reading one waits for the device."""
        self.first_step_s = 0.0

    def on_step(self, record: Record) -> None:
        window, step = self.window, record["step"]
        self.records.append(record)
        if step == 1:
            self.first_step_s = time.time() - window.start_time
        if step >= window.warmup:
            self.marks.append(mark(self.world.device))
        if step == window.warmup + window.steps:
            window.result.write_text(json.dumps(self.readings()))
            sys.stdout.flush()
            os._exit(0)

    def readings(self) -> dict[str, Any]:
        """Return the results of the row; this is the first call that waits for the device."""
        device = self.world.device
        each_s = seconds_between(self.marks, device)
        step_s = statistics.median(each_s)
        tokens = self.config.train.global_batch_size * self.config.data.seq_len
        peak = peak_flops(device)
        losses = [float(record.loss) for record in self.records]
        return {
            "outcome": "ok" if all(map(math.isfinite, losses)) else "the loss is not finite",
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "tokens_per_s": tokens / step_s,
            "mfu": peak and self.flops_per_token * tokens / step_s / peak,
            "model_flops_per_token": self.flops_per_token,
            "peak_flops": peak,
            "peak_gib": peak_memory_gib(device),
            "reserved_gib": torch.cuda.max_memory_reserved(device) / 2**30 if device.type == "cuda" else None,
            "planned_gib": self.forecast.peak_gib,
            "step_s": step_s,
            "least_s": min(each_s),
            "largest_s": max(each_s),
            "data_s": self.records[-1]["data_s"],
            "first_step_s": self.first_step_s,
            "first_loss": losses[0],
            "losses": losses,
        }


VARIANTS: dict[str, type[Trainer]] = {"whole": WholeLoss, "foreach": ForeachAdamW}
"""Trainer variants by the value of a row's `loss` or `optimizer`, if it is not the default."""


def train(row: Row, overrides: Sequence[str], warmup: int, steps: int, result: Path) -> None:
    """Train as a row specifies, write its readings to `result` and end the process.

    Returns only if training ends before the last measured step.
    """
    window = Window(warmup, steps, result, time.time())
    if row.chunk_mib is not None:
        _layers.linear_cross_entropy = partial(linear_cross_entropy, chunk_bytes=row.chunk_mib << 20)
    variants = [VARIANTS[name] for name in (row.loss, row.optimizer) if name in VARIANTS]
    trainer_class = type("MeasuredTrainer", (MeasuredTrainer, *variants), {"__module__": __name__})
    trainer_class(load_config(row.recipe, overrides), window).fit()


def mark(device: torch.device) -> Mark:
    """Return the current time: on a GPU, an event recorded on the stream, which does not wait for the device."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(marks: Sequence[Any], device: torch.device) -> list[float]:
    """Return the seconds between consecutive marks, after waiting for the device to reach the last one."""
    if device.type != "cuda":
        return [after - before for before, after in itertools.pairwise(marks)]
    torch.cuda.synchronize(device)
    return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(marks)]
