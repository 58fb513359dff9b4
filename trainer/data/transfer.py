"""Transfers between host and device beside the step: batches ahead of their use, a few numbers behind it.

The host never waits for the device in a step; it reads what a step came to once the next one is queued.  So the
device has always work to do, and the host is one step ahead of it at most.  Knows no model.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

import torch


def ahead(batches: Iterable[dict[str, torch.Tensor]], device: torch.device) -> Iterator[dict[str, torch.Tensor]]:
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


class Numbers:
    """A few numbers, or tensors of one element, on their way to the host.  `read` waits for them; until then nothing
    does.
    """

    def __init__(self, *values: float | torch.Tensor) -> None:
        device = next((value.device for value in values if isinstance(value, torch.Tensor)), torch.device("cpu"))
        self.waited_s = 0.0
        """How long `read` has waited."""
        # In fp64, which holds whatever a scalar of another dtype says.
        numbers = [torch.as_tensor(value, dtype=torch.float64, device=device).detach().reshape(()) for value in values]
        self._values, self._arrival = torch.stack(numbers), None
        if device.type == "cuda":
            there = torch.empty(len(values), dtype=torch.float64, pin_memory=True)
            there.copy_(self._values, non_blocking=True)
            # One that is waited for asleep: spinning, the host would take a core from the loader's workers.
            self._values, self._arrival = there, torch.cuda.Event(blocking=True)
            self._arrival.record(torch.cuda.current_stream(device))

    def read(self) -> list[float]:
        """Return the numbers, once they are here."""
        if self._arrival is not None:
            started = time.perf_counter()
            self._arrival.synchronize()
            self._arrival = None
            self.waited_s += time.perf_counter() - started
        return self._values.tolist()
