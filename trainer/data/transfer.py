"""Asynchronous transfers between host and device: batches to the device, and a step's metrics back to the host.

The trainer reads most steps' metrics only after it has queued the next step, so that the device has work in the
meantime.  The host is at most one step ahead.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence

import torch


def prefetch_to_device(
    batches: Iterable[dict[str, torch.Tensor]], device: torch.device
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield each batch on `device`.  On a GPU, a separate stream copies it while the previous batch is in use.

    The copies do not block the host if the batches are in pinned memory.
    """
    if device.type != "cuda":
        yield from ({name: tensor.to(device) for name, tensor in batch.items()} for batch in batches)
        return
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    copy_stream = _streams[device]
    pending: dict[str, torch.Tensor] | None = None
    for batch in batches:
        with torch.cuda.stream(copy_stream):
            copied = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        if pending is not None:
            yield pending
        current = torch.cuda.current_stream(copy_stream.device)
        current.wait_stream(copy_stream)
        for tensor in copied.values():
            tensor.record_stream(current)  # otherwise the next copy could overwrite its memory while it is being read
        pending = copied
    if pending is not None:
        yield pending


_streams: dict[torch.device, torch.cuda.Stream] = {}


class HostScalars:
    """Asynchronously copies a few scalars (numbers or one-element tensors) to the host; `read` waits for the copy."""

    def __init__(self, *values: float | torch.Tensor) -> None:
        device = next((value.device for value in values if isinstance(value, torch.Tensor)), torch.device("cpu"))
        self.waited_s = 0.0
        """Seconds that the first `read` waited; 0 until then."""
        self._first_read_at: float | None = None
        self._has_waited = False
        self._values, self._arrival = _copy_to_host(stack_scalars(values, device))

    def read(self) -> list[float]:
        """Wait for the values and return them.  Host sync."""
        if self._first_read_at is None:
            started = time.perf_counter()
            if self._arrival is not None:
                self._has_waited = not self._arrival.query()
                self._arrival.synchronize()
            self._first_read_at = time.perf_counter()
            self.waited_s = self._first_read_at - started
        return self._values.tolist()

    def arrived_at(self, previous: HostScalars | None, previous_arrived_at: float) -> float | None:
        """Wait for the values, and return the `time.perf_counter` at which they arrived, or None if there was no copy.

        If they arrived before the host first checked, the result is the arrival time of an earlier copy plus the time
        between the two copies according to their CUDA events, but not later than that check.

        previous: the earlier copy, or None, in which case the result is the time of the check.
        previous_arrived_at: the time at which the earlier copy arrived.
        """
        self.read()
        if self._arrival is None or self._first_read_at is None:
            return None
        if self._has_waited or previous is None or previous._arrival is None:
            return self._first_read_at
        since_previous_s = previous._arrival.elapsed_time(self._arrival) / 1000
        return min(self._first_read_at, previous_arrived_at + since_previous_s)


def stack_scalars(values: Sequence[float | torch.Tensor], device: torch.device) -> torch.Tensor:
    """Stack numbers and one-element tensors into one tensor on `device`, without a host sync.

    The result is fp64, which represents all values of the other floating-point dtypes.
    """

    def on_device(value: float | torch.Tensor) -> torch.Tensor:
        if isinstance(value, torch.Tensor) and value.device == device:
            return value.detach().double().reshape(())
        return torch.full((), float(value), dtype=torch.float64, device=device)  # a copy would block the host

    return torch.stack([on_device(value) for value in values])


def _copy_to_host(values: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    """Start a copy to pinned host memory; return the host tensor, and the event that records the end of the copy.

    Values that are already on the host are returned unchanged, with None.
    """
    if values.device.type != "cuda":
        return values, None
    on_host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    on_host.copy_(values, non_blocking=True)
    # Waiting for a blocking event sleeps; spinning would take a core from the loader's workers.
    arrival = torch.cuda.Event(enable_timing=True, blocking=True)
    arrival.record(torch.cuda.current_stream(values.device))
    return on_host, arrival
