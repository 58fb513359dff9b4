"""Defines `Trace`: one micro-batch as FSDP's marks in order, with the memory and kernels between them."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal

from trainer.plan.kernels import Work

Mark = Literal[
    "pre_forward",
    "post_forward",
    "pre_backward",
    "post_backward",
    "end",
    "block_forward",
    "block_return",
    "block_backward",
]


@dataclass(frozen=True)
class ParameterFacts:
    """A parameter; tied parameters appear once.  `element_size` is in bytes, in the dtype it is stored in."""

    name: str
    shape: tuple[int, ...]
    is_trained: bool
    element_size: int
    moments: int
    """Number of tensors of the parameter's size in its optimizer state."""
    moment_size: int
    """Bytes per element of those tensors."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class UnitFacts:
    """A unit that FSDP gathers at once: its name, and the parameters that no unit inside it holds."""

    name: str
    parameters: tuple[ParameterFacts, ...]
    is_embedding_unit: bool = False
    """Whether it holds only embedding tables, which the backward pass does not read."""

    @property
    def numel(self) -> int:
        return sum(parameter.numel for parameter in self.parameters)


@dataclass(frozen=True)
class Segment:
    """The stretch between two marks: bytes relative to its start, and the kernels that run."""

    peak: int = 0
    """Peak of activations, temporaries and gradients together."""
    peak_accumulating: int = 0
    """The same peak if each parameter already has a gradient that new ones are added to."""
    net: int = 0
    """Bytes at the end, without the gradients of parameters."""
    gradients: int = 0
    """Bytes at the end of gradients of unsharded parameters, which FSDP frees after reducing them."""
    work: tuple[tuple[Work, int], ...] = ()
    """Kernels, and the number of times each one runs."""

    def then(self, later: Segment) -> Segment:
        """Return this segment merged with the one that follows it."""
        work = Counter(dict(self.work))
        for kernel, count in later.work:
            work[kernel] += count
        return Segment(
            max(self.peak, self.net + self.gradients + later.peak),
            max(self.peak_accumulating, self.net + later.peak_accumulating),
            self.net + later.net,
            self.gradients + later.gradients,
            tuple(work.items()),
        )

    def with_attention(self, share: float) -> Segment:
        """Return the segment with attention's FLOPs multiplied by `share`."""
        work = Counter[Work]()
        for kernel, count in self.work:
            flops = round(kernel.flops * share) if kernel.kind == "attention" else kernel.flops
            work[kernel._replace(flops=flops)] += count
        return replace(self, work=tuple(work.items()))


@dataclass(frozen=True)
class Event:
    """One of FSDP's marks, for the unit with this number, and the segment since the previous mark."""

    before: Segment
    mark: Mark
    unit: int


@dataclass(frozen=True)
class Trace:
    """One micro-batch: the events in order, and the units in forward order with the root last."""

    events: tuple[Event, ...]
    units: tuple[UnitFacts, ...]
    buffer_bytes: int
    """Bytes of the model's buffers, which are always in memory."""
    input_bytes: int
    """Bytes of the micro-batch's tokens and targets."""

    @property
    def root(self) -> int:
        return len(self.units) - 1

    def with_attention(self, share: float) -> Trace:
        """Return the trace for rows with document masks, which leave only this share of attention's FLOPs."""
        if share == 1.0:
            return self
        events = (replace(event, before=event.before.with_attention(share)) for event in self.events)
        return replace(self, events=tuple(events))
