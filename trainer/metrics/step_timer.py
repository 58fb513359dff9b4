"""Measures step time, throughput and peak memory."""

from __future__ import annotations

import math
import resource
import sys
from contextlib import suppress
from dataclasses import dataclass

import torch

from trainer.metrics.devices import find_device


def peak_flops(device: torch.device) -> float | None:
    """Return the device's peak bf16 FLOP/s, or None if it is unknown (CPUs, unlisted GPUs)."""
    if device.type != "cuda":
        return None
    sheet = find_device(torch.cuda.get_device_name(device))
    return None if sheet is None else sheet.bf16_flops


def peak_memory_gib(device: torch.device) -> float:
    """Return the peak memory of this process: allocated on the GPU or, without a GPU, resident in host memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return _peak_resident() / 2**30


def resident_gib() -> float:
    """Return the resident host memory of this process, or its peak if the system does not report the current value."""
    return (_read_status("VmRSS") or _peak_resident()) / 2**30


def _peak_resident() -> int:
    """Return the peak resident memory in bytes.

    Prefers /proc, because the value from getrusage may be that of the program that started this one.
    """
    if (most := _read_status("VmHWM")) is not None:
        return most
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def _read_status(name: str) -> int | None:
    """Return the value of a line of Linux's /proc/self/status in bytes, or None if it is unavailable."""
    with suppress(OSError), open("/proc/self/status") as status:
        for line in status:
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return None


@dataclass
class StepMeans:
    """Means over a number of steps."""

    step_s: float
    data_s: float
    tokens_per_s: float
    """Target tokens per second."""
    loss: float
    """Mean loss over the steps that were not skipped, or NaN if there are none."""


@dataclass
class _Totals:
    number: int = 0
    seconds: float = 0.0
    data_s: float = 0.0
    num_tokens: int = 0

    def add(self, seconds: float, data_s: float, num_tokens: int) -> None:
        self.number += 1
        self.seconds += seconds
        self.data_s += data_s
        self.num_tokens += num_tokens


class StepTimer:
    """Accumulates means over the steps since the last line.

    Times and throughput exclude profiled steps, unless all steps were profiled.
    """

    def __init__(self) -> None:
        self._steps, self._profiled = _Totals(), _Totals()
        self._loss_sum, self._num_losses = 0.0, 0

    def count(self, seconds: float, data_s: float, num_tokens: int, is_profiled: bool = False) -> None:
        """Add a step: its duration, the time it waited for data, and its number of target tokens."""
        (self._profiled if is_profiled else self._steps).add(seconds, data_s, num_tokens)

    def count_loss(self, loss: float, is_skipped: bool) -> None:
        """Add the loss of a step to the mean, unless the step was skipped."""
        if not is_skipped:
            self._loss_sum += loss
            self._num_losses += 1

    @property
    def has_steps(self) -> bool:
        """True if at least one step that was not profiled has been counted."""
        return self._steps.number > 0

    def read(self) -> StepMeans:
        """Return the means so far."""
        totals = self._steps if self.has_steps else self._profiled
        number, seconds = max(1, totals.number), max(totals.seconds, 1e-9)
        loss = self._loss_sum / self._num_losses if self._num_losses else math.nan
        return StepMeans(seconds / number, totals.data_s / number, totals.num_tokens / seconds, loss)
