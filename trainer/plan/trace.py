"""Trace: one micro-batch as data: FSDP's marks in order, with what is allocated and computed between them."""

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
    """A parameter, shared ones once: its shape, whether it is trained, bytes of an element as it is stored."""

    name: str
    shape: tuple[int, ...]
    is_trained: bool
    element_size: int
    moments: int
    """Tensors of its size that the optimizer keeps for it."""
    moment_size: int
    """Bytes of an element of these."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class UnitFacts:
    """A unit, gathered as a whole: its name, and the parameters that no unit inside it holds."""

    name: str
    parameters: tuple[ParameterFacts, ...]
    is_embedding_unit: bool = False
    """Whether it is tables that the backward pass does not read."""

    @property
    def numel(self) -> int:
        return sum(parameter.numel for parameter in self.parameters)


@dataclass(frozen=True)
class Segment:
    """A segment between two marks, in bytes above what was there at its start, and the kernels that run."""

    peak: int = 0
    """At most, activations, temporaries and gradients together."""
    peak_accumulating: int = 0
    """The same where each parameter has a gradient already, to which new ones are added."""
    net: int = 0
    """At its end, without the gradients of parameters."""
    gradients: int = 0
    """At its end, gradients of unsharded parameters: FSDP frees them when it has reduced them."""
    work: tuple[tuple[Work, int], ...] = ()
    """Kernels, and how often each one runs."""

    def then(self, later: Segment) -> Segment:
        """Return this segment and the one behind it as one."""
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
        """Return the segment with this share of attention's operations."""
        work = Counter[Work]()
        for kernel, count in self.work:
            flops = round(kernel.flops * share) if kernel.kind == "attention" else kernel.flops
            work[kernel._replace(flops=flops)] += count
        return replace(self, work=tuple(work.items()))


@dataclass(frozen=True)
class Event:
    """A mark of FSDP's, for the unit with this number, and what has happened since the mark before."""

    before: Segment
    mark: Mark
    unit: int


@dataclass(frozen=True)
class Trace:
    """One micro-batch: the events in order, the units in the order of the forward pass, the root last."""

    events: tuple[Event, ...]
    units: tuple[UnitFacts, ...]
    buffer_bytes: int
    """Buffers of the model, which lie in memory all the time."""
    input_bytes: int
    """Tokens and targets of the micro-batch."""

    @property
    def root(self) -> int:
        return len(self.units) - 1

    def with_attention(self, share: float) -> Trace:
        """Return the trace of rows whose documents are kept to themselves: this share of attention is left."""
        if share == 1.0:
            return self
        events = (replace(event, before=event.before.with_attention(share)) for event in self.events)
        return replace(self, events=tuple(events))
