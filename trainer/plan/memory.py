"""Estimates memory per rank over one step: the peak, when it occurs, and its breakdown by kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from trainer.optim.optimizer import AVERAGE_SIZE
from trainer.plan.step import Axis, Kind, Layout, Step, padded_numel
from trainer.plan.trace import Segment, Trace


@dataclass(frozen=True)
class Moment:
    """Memory at one moment of a step: the bytes of each kind, and the position in the step."""

    place: str
    by_kind: dict[Kind, int]

    @property
    def total(self) -> int:
        return sum(self.by_kind.values())


@dataclass(frozen=True)
class Memory:
    """Tensor memory of one rank over one step, in bytes, from the second step on, when the optimizer state exists."""

    peak: Moment
    curve: tuple[Moment, ...]
    """One moment per mark of the step, in order, for the picture; empty unless requested."""


class _MemoryWatcher:
    """Watcher that sums allocations and frees."""

    def __init__(self, trace: Trace, at_rest: dict[Kind, int], draws: bool) -> None:
        self._trace, self._draws = trace, draws
        self._live: dict[Kind, int] = dict.fromkeys(get_args(Kind), 0) | at_rest
        self._total = sum(at_rest.values())
        self._where: tuple[int, bool] | None = None
        self._peak: tuple[tuple[int, bool] | None, dict[Kind, int]] = (None, dict(self._live))
        self._peak_total = self._total
        self.curve: list[Moment] = []

    def allocate(self, kind: Kind, num_bytes: int) -> None:
        self._live[kind] += num_bytes
        self._total += num_bytes
        if self._total > self._peak_total:
            self._note_peak(0)

    def free(self, kind: Kind, num_bytes: int) -> None:
        self._live[kind] -= num_bytes
        self._total -= num_bytes

    def compute(self, segment: Segment, unit: int, is_backward: bool, accumulates: bool) -> None:
        above = segment.peak_accumulating if accumulates else segment.peak
        self._where = unit, is_backward
        if self._total + above > self._peak_total:
            self._note_peak(above)
        if self._draws:
            self.curve.append(Moment(self._place, self._with("temporaries", above)))
        self._live["activations"] += segment.net
        self._total += segment.net

    def _with(self, kind: Kind, num_bytes: int) -> dict[Kind, int]:
        return {**self._live, kind: self._live[kind] + num_bytes}

    def _note_peak(self, temporaries: int) -> None:
        self._peak_total = self._total + temporaries
        self._peak = self._where, self._with("temporaries", temporaries)

    @property
    def _place(self) -> str:
        return self._name(self._where)

    def _name(self, where: tuple[int, bool] | None) -> str:
        if where is None:
            return "time before the first step"
        unit, is_backward = where
        return f"{'backward' if is_backward else 'forward'} of {self._trace.units[unit].name}"

    @property
    def peak(self) -> Moment:
        where, by_kind = self._peak
        return Moment(self._name(where), by_kind)

    def begin(self, repeats: int) -> None: ...

    def gather(self, unit: int, axis: Axis, num_ranks: int, num_bytes: int) -> None: ...

    def wait_for_gather(self, unit: int, num_bytes: int, is_forward: bool) -> None: ...

    def reduce(self, unit: int, scattered: int, reduced: int) -> None: ...

    def finish_backward(self) -> None: ...


def memory_of(trace: Trace, layout: Layout, num_micro_batches: int, draws: bool = False) -> Memory:
    """Return the memory of a rank over one step on `layout`, with the full curve if `draws`."""
    watcher = _MemoryWatcher(trace, at_rest(trace, layout), draws)
    Step(trace, layout, num_micro_batches, watcher).run()
    return Memory(watcher.peak, tuple(watcher.curve))


def at_rest(trace: Trace, layout: Layout) -> dict[Kind, int]:
    """Return the bytes of each kind that occupy a rank's device memory between two steps."""
    kinds: dict[Kind, int] = {"buffers and inputs": trace.buffer_bytes + trace.input_bytes}
    if layout.cpu_offload:
        return kinds
    parameters = [p for unit in trace.units for p in unit.parameters]
    shards = [(p, padded_numel(p, layout.shard) // layout.shard) for p in parameters]
    kinds["parameters"] = (1 + layout.has_reference_model) * sum(numel * p.element_size for p, numel in shards)
    average = AVERAGE_SIZE * layout.averages
    kinds["optimizer"] = sum(numel * (p.moments * p.moment_size + average * p.is_trained) for p, numel in shards)
    return kinds
