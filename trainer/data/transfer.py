"""Transfers between host and device beside the step: batches ahead of their use, a few numbers behind it.

The host never waits for the device in a step; it reads what a step came to once the next one is queued.  So the
device has always work to do, and the host is one step ahead of it at most.  Knows no model.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence

import torch


def prefetch_to_device(
    batches: Iterable[dict[str, torch.Tensor]], device: torch.device
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield each batch on `device`; on a GPU its copy is under way on a stream of its own while the one before is used.

    The copies do not hold up the host if the batches lie in pinned memory.
    """
    if device.type != "cuda":
        yield from ({name: tensor.to(device) for name, tensor in batch.items()} for batch in batches)
        return
    copying = _stream(device)
    waiting: dict[str, torch.Tensor] | None = None
    for batch in batches:
        with torch.cuda.stream(copying):
            copied = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        if waiting is not None:
            yield waiting
        waiting = _handed_over(copied, copying)
    if waiting is not None:
        yield waiting


def _handed_over(batch: dict[str, torch.Tensor], copying: torch.cuda.Stream) -> dict[str, torch.Tensor]:
    """Return the batch for use on the current stream, which waits for the copy."""
    current = torch.cuda.current_stream(copying.device)
    current.wait_stream(copying)
    for tensor in batch.values():
        tensor.record_stream(current)  # or its memory were free for the next copy while it is still read
    return batch


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]


class HostScalars:
    """A few numbers, or tensors of one element, on their way to the host.  `read` waits for them; until then nothing
    does.
    """

    def __init__(self, *values: float | torch.Tensor) -> None:
        device = next((value.device for value in values if isinstance(value, torch.Tensor)), torch.device("cpu"))
        self.waited_s = 0.0
        """How long `read` has waited."""
        self._found_at: float | None = None
        self._was_waited_for = False
        self._values, self._arrival = _sent_to_host(stack_scalars(values, device))

    def read(self) -> list[float]:
        """Return the numbers, once they are here."""
        if self._found_at is None:
            started = time.perf_counter()
            if self._arrival is not None:
                self._was_waited_for = not self._arrival.query()
                self._arrival.synchronize()
            self._found_at = time.perf_counter()
            self.waited_s = self._found_at - started
        return self._values.tolist()

    def arrived_at(self, before: HostScalars | None, before_at: float) -> float | None:
        """Return when they arrived, by `time.perf_counter`; waits for them.  None if they have been here all the time.

        If they were here before the host looked, the device says how long after `before`, which arrived at `before_at`.
        """
        self.read()
        if self._arrival is None or self._found_at is None:
            return None
        if self._was_waited_for or before is None or before._arrival is None:
            return self._found_at
        return min(self._found_at, before_at + before._arrival.elapsed_time(self._arrival) / 1000)


def stack_scalars(values: Sequence[float | torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return numbers, or tensors of one element, as one tensor on `device`, without the host waiting for that.

    In fp64, which holds whatever a scalar of another dtype says.
    """

    def on_device(value: float | torch.Tensor) -> torch.Tensor:
        if isinstance(value, torch.Tensor) and value.device == device:
            return value.detach().double().reshape(())
        return torch.full((), float(value), dtype=torch.float64, device=device)  # a copy would be waited for

    return torch.stack([on_device(value) for value in values])


def _sent_to_host(values: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    """Return where the values will be on the host, and the event of their arrival; None if they are there."""
    if values.device.type != "cuda":
        return values, None
    there = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    there.copy_(values, non_blocking=True)
    # One that is waited for asleep: spinning, the host would take a core from the loader's workers.
    arrival = torch.cuda.Event(enable_timing=True, blocking=True)
    arrival.record(torch.cuda.current_stream(values.device))
    return there, arrival
