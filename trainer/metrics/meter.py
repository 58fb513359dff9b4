"""Meters the time of a step and its rate."""

from __future__ import annotations

import resource
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from trainer.metrics.devices import find_device


def peak_flops(device: torch.device) -> float | None:
    """Return the device's peak in bf16 FLOP/s, or None where it is not known (CPUs, other GPUs)."""
    if device.type != "cuda":
        return None
    sheet = find_device(torch.cuda.get_device_name(device))
    return None if sheet is None else sheet.bf16_flops


def peak_memory_gib(device: torch.device) -> float:
    """Return the most memory that this process has held: on the GPU, or resident in host memory without one."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return _peak_resident() / 2**30


def _peak_resident() -> int:
    """Return bytes.  What getrusage says may be what another program held: the one that has started this one."""
    with suppress(OSError), open("/proc/self/status") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


@dataclass
class Meter:
    """Means of time and rate over the steps since the last reading."""

    started: float = field(default_factory=time.perf_counter)
    data_s: float = 0.0
    num_tokens: int = 0
    num_updates: int = 0
    loss_sum: float = 0.0
    num_losses: int = 0
    """The steps whose losses have been read and are in the sum: those that were not skipped."""
    profiled: list[tuple[float, float, int]] = field(default_factory=list)
    """Seconds, seconds waiting for data, and tokens of each step under a profiler."""

    def count(self, data_s: float, num_tokens: int) -> None:
        self.data_s += data_s
        self.num_tokens += num_tokens
        self.num_updates += 1

    def count_profiled(self, seconds: float, data_s: float, num_tokens: int) -> None:
        """Count a step that a profiler has slowed down: in the means only if there is no other."""
        self.leave_out(seconds)
        self.profiled.append((seconds, data_s, num_tokens))

    @property
    def is_profiled(self) -> bool:
        """True if the means are those of profiled steps."""
        return bool(self.profiled) and not self.num_updates

    def count_loss(self, loss: float, is_skipped: bool) -> None:
        """Take the loss of a step into the mean, unless it was skipped."""
        if not is_skipped:
            self.loss_sum += loss
            self.num_losses += 1

    def leave_out(self, seconds: float) -> None:
        """Leave time out of the means: evaluation and saving are no part of a step."""
        self.started += seconds

    def read(self) -> tuple[float, float, float]:
        """Return (seconds a step, seconds of it waiting for data, target tokens per second) so far."""
        elapsed, data_s, num_tokens = time.perf_counter() - self.started, self.data_s, self.num_tokens
        updates = max(1, self.num_updates)
        if self.is_profiled:
            elapsed, data_s, num_tokens = (sum(column) for column in zip(*self.profiled, strict=True))
            updates = len(self.profiled)
        elapsed = max(elapsed, 1e-9)
        return elapsed / updates, data_s / updates, num_tokens / elapsed

    def reset(self) -> None:
        self.started, self.data_s, self.num_tokens, self.num_updates = time.perf_counter(), 0.0, 0, 0
        self.loss_sum, self.num_losses = 0.0, 0
        self.profiled = []
