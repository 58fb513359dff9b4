"""Asynchronous transfers between host and device: prefetches batches, and copies a step's metrics back.

The host never waits for the device within a step; it reads a step's metrics once the next step is queued.  So the
device always has work queued, and the host is at most one step ahead.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence

import torch


def prefetch_to_device(
    batches: Iterable[dict[str, torch.Tensor]], device: torch.device
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield each batch on `device`.  On a GPU, it is copied on a separate stream while the previous batch is in use.

    The copies do not block the host if the batches are in pinned memory.
    """
    if device.type != "cuda":
        yield from ({name: tensor.to(device) for name, tensor in batch.items()} for batch in batches)
        return
    copy_stream = _stream(device)
    pending: dict[str, torch.Tensor] | None = None
    for batch in batches:
        with torch.cuda.stream(copy_stream):
            copied = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        if pending is not None:
            yield pending
        current = torch.cuda.current_stream(copy_stream.device)
        current.wait_stream(copy_stream)
        for tensor in copied.values():
            tensor.record_stream(current)  # otherwise the next copy could reuse its memory while it is being read
        pending = copied
    if pending is not None:
        yield pending


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]


class HostScalars:
    """Asynchronous copy of a few scalars (numbers or one-element tensors) to the host.  Only `read` waits for it."""

    def __init__(self, *values: float | torch.Tensor) -> None:
        device = next((value.device for value in values if isinstance(value, torch.Tensor)), torch.device("cpu"))
        self.waited_s = 0.0
        """Seconds that `read` has waited."""
        self._found_at: float | None = None
        self._was_waited_for = False
        self._values, self._arrival = _copy_to_host(stack_scalars(values, device))

    def read(self) -> list[float]:
        """Wait for the values and return them.  Host sync."""
        if self._found_at is None:
            started = time.perf_counter()
            if self._arrival is not None:
                self._was_waited_for = not self._arrival.query()
                self._arrival.synchronize()
            self._found_at = time.perf_counter()
            self.waited_s = self._found_at - started
        return self._values.tolist()

    def arrived_at(self, before: HostScalars | None, before_at: float) -> float | None:
        """Return when the values arrived, by `time.perf_counter`, or None if they were on the host from the start.

        Waits for them.  If they arrived before the host checked, the time is `before_at` plus the time between the two
        arrivals by the device's events, where `before` is an earlier copy that arrived at `before_at`.
        """
        self.read()
        if self._arrival is None or self._found_at is None:
            return None
        if self._was_waited_for or before is None or before._arrival is None:
            return self._found_at
        return min(self._found_at, before_at + before._arrival.elapsed_time(self._arrival) / 1000)


def stack_scalars(values: Sequence[float | torch.Tensor], device: torch.device) -> torch.Tensor:
    """Stack numbers and one-element tensors into one tensor on `device`, without a host sync.

    The result is fp64, which loses nothing of other floating-point dtypes.
    """

    def on_device(value: float | torch.Tensor) -> torch.Tensor:
        if isinstance(value, torch.Tensor) and value.device == device:
            return value.detach().double().reshape(())
        return torch.full((), float(value), dtype=torch.float64, device=device)  # a copy would block the host

    return torch.stack([on_device(value) for value in values])


def _copy_to_host(values: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    """Start a copy to pinned host memory.  Return the host tensor and the event of its arrival, None if it is there."""
    if values.device.type != "cuda":
        return values, None
    on_host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    on_host.copy_(values, non_blocking=True)
    # A blocking event sleeps while waiting; spinning would take a core from the loader's workers.
    arrival = torch.cuda.Event(enable_timing=True, blocking=True)
    arrival.record(torch.cuda.current_stream(values.device))
    return on_host, arrival
