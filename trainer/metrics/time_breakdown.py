"""Breaks down the time of profiled steps by kind of work: kernels, exposed communication, data loading, host.

Every moment of a step is attributed to a single kind of work: the first in `KINDS` that is active at that moment.
Communication therefore counts only while no kernel hides it, and waiting for data only while the device is idle.  The
rest is host time.  On a CPU, operators take the place of kernels, and an operator's time excludes the operators nested
inside it.

`Timeline` holds the parsed events of a trace from Kineto, the library behind torch's profiler.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

KINDS = ("matmul", "attention", "other_kernels", "exposed_communication", "data", "host")
"""The kinds of work to which step time is attributed, in order of precedence."""

MATMUL, ATTENTION, OTHER, COMMUNICATION, DATA, HOST = KINDS

STEP_PREFIX = "ProfilerStep#"
"""Prefix of the names of step ranges in a trace; the step number follows.  Trace viewers also recognize it."""

PHASE = "phase"
"""Category of the events that mark a rank's phases (see `Watchdog`)."""


class Span(NamedTuple):
    """An interval in a trace: a kernel on a stream, an operator on a thread, a collective, a step or a phase."""

    name: str
    kind: str
    start_us: float
    duration_us: float
    lane: Any = None
    """The stream or thread that the span ran on: its process ID and thread ID in the trace."""
    launched_us: float | None = None
    """Time at which the host launched the span; None if it is unknown, or if the span started when it was launched."""

    @property
    def end_us(self) -> float:
        return self.start_us + self.duration_us


def compute_fractions(spans: Iterable[Span], steps: Iterable[Span]) -> dict[str, float]:
    """Return the fraction of the step time spent in each of `KINDS`.  The fractions sum to 1; without steps, all are 0.

    Spans may overlap, on one lane or across lanes; time outside the steps is ignored.
    """
    numbered = [(span, KINDS.index(span.kind)) for span in spans] + [(step, len(KINDS)) for step in steps]
    edges = sorted(
        (time_us, number, change)
        for span, number in numbered
        for time_us, change in ((span.start_us, 1), (span.end_us, -1))
    )
    num_active, spent_us = [0] * (len(KINDS) + 1), dict.fromkeys(KINDS, 0.0)
    for (time_us, number, change), (next_us, *_) in pairwise(edges):
        num_active[number] += change
        if num_active[-1]:  # inside a step
            kind = next((kind for kind, active in zip(KINDS, num_active, strict=False) if active), HOST)
            spent_us[kind] += next_us - time_us
    total_us = sum(spent_us.values()) or 1.0
    return {kind: time_us / total_us for kind, time_us in spent_us.items()}


def flatten_to_self_time(spans: Iterable[Span]) -> list[Span]:
    """Flatten the nested spans of one lane into disjoint ones, attributing each moment to the innermost span.

    Anything nested inside attention, communication or data counts as that kind: some attention implementations are
    built from matmuls.
    """
    pieces: list[Span] = []
    stack: list[Span] = []
    position_us = 0.0

    def advance(time_us: float) -> None:
        """Attribute the time up to `time_us` to the innermost span."""
        nonlocal position_us
        if stack and time_us > position_us:
            pieces.append(stack[-1]._replace(start_us=position_us, duration_us=time_us - position_us))
        position_us = max(position_us, time_us)

    def close_spans(time_us: float) -> None:
        """Close the spans that have ended by `time_us`."""
        while stack and stack[-1].end_us <= time_us:
            advance(stack[-1].end_us)
            stack.pop()

    for span in sorted(spans, key=lambda span: (span.start_us, -span.duration_us)):
        close_spans(span.start_us)
        advance(span.start_us)
        kind, end_us = span.kind, span.end_us
        if stack:
            kind = stack[-1].kind if stack[-1].kind in (ATTENTION, COMMUNICATION, DATA) else kind
            end_us = min(end_us, stack[-1].end_us)
        stack.append(span._replace(kind=kind, duration_us=end_us - span.start_us))
    close_spans(float("inf"))
    return pieces


def extend_to_device(steps: Iterable[Span], kernels: Sequence[Span]) -> list[Span]:
    """Return the steps with their times on the device, which may lag behind the host.

    A step ends when its last kernel ends.  It starts when the host starts it or when the previous step ends, whichever
    is later.
    """
    extended: list[Span] = []
    for step in sorted(steps, key=lambda step: step.start_us):
        launched = ((k.start_us if k.launched_us is None else k.launched_us, k.end_us) for k in kernels)
        ends = (end_us for launched_us, end_us in launched if step.start_us <= launched_us < step.end_us)
        end_us = max(ends, default=step.end_us)
        start_us = max(step.start_us, extended[-1].end_us) if extended else step.start_us
        duration_us = max(step.end_us, end_us, start_us) - start_us
        extended.append(step._replace(start_us=start_us, duration_us=duration_us))
    return extended


# ---------------------------------------------------------------------------------------------------------------
# Classification of events by name

_ATTENTION = re.compile(r"scaled_dot_product|flash|fmha|sdpa|attention|attn", re.IGNORECASE)
_FUSED_BY_INDUCTOR = re.compile(r"triton_(poi|red|per|for)_")
"""Matches Inductor's pointwise and reduction kernels.  The operators that follow in a kernel's name are not always
part of the kernel."""
_MATMUL_KERNEL = re.compile(r"gemm|gemv|nvjet|cutlass|cublas|xmma|wgmma|splitk|matmul|(?<![a-z])(add|b|sc)?mm(?![a-z])")
_MATMUL_OPERATOR = re.compile(
    r"::_?(mm|addmm|bmm|baddbmm|addbmm|mv|addmv|dot|vdot|addr|int_mm|scaled_mm|grouped_mm|scaled_grouped_mm"
    r"|linear_pointwise|mkl_linear|mkldnn_linear)(_out|_backward)?$"
)


@cache
def classify_kernel(name: str) -> str:
    """Classify a CUDA kernel, copy or fill by name.  Recognizes names from NCCL, cuBLAS, CUTLASS, cuDNN and Triton."""
    if re.search("nccl|nvshmem", name, re.IGNORECASE):
        return COMMUNICATION
    if _FUSED_BY_INDUCTOR.match(name):
        return OTHER
    if _ATTENTION.search(name):  # checked before matmul: some attention kernels are CUTLASS kernels
        return ATTENTION
    return MATMUL if _MATMUL_KERNEL.search(name.lower()) else OTHER


@cache
def classify_operator(name: str) -> str:
    """Classify an operator or range on the CPU training thread by its name.

    Operators have a namespace (aten::mm).  Events without one (autograd nodes, ranges) are host time around operators.
    """
    if name.startswith(("c10d::", "_c10d_functional::", "gloo:")):
        return COMMUNICATION
    if "CompiledFxGraph" in name:  # loops generated by Inductor emit no separate events
        return OTHER
    if "::" not in name or name.startswith(("autograd::", "FSDP::")):
        return HOST
    if _ATTENTION.search(name):
        return ATTENTION
    return MATMUL if _MATMUL_OPERATOR.search(name) else OTHER


# ---------------------------------------------------------------------------------------------------------------
# Trace parsing


def find_events(text: str) -> tuple[int, Iterator[dict[str, Any]]]:
    """Return the offset at which the events start in a trace's text, and an iterator over the events.

    The events are parsed lazily because there may be millions.  Raises ValueError if the text has no `traceEvents`; the
    iterator raises it if the text is not valid JSON.
    """
    match = re.search(r'"traceEvents":\s*\[', text)
    if match is None:
        raise ValueError("the trace has no traceEvents")
    begin = match.end()

    def read(position: int) -> Iterator[dict[str, Any]]:
        decoder, separator = json.JSONDecoder(), re.compile(r"[\s,]*")
        while not text.startswith("]", position := separator.match(text, position).end()):  # type: ignore[union-attr]
            event, position = decoder.raw_decode(text, position)
            yield event
        json.loads(text[:begin] + text[position:])  # checks the text around the events

    return begin, read(begin)


_DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCH_CATEGORIES = ("cuda_runtime", "cuda_driver")
"""Kineto's categories for events on the device, and for the host calls that launch them."""


@dataclass
class Timeline:
    """The profiled steps of a trace and the activity recorded in it.

    A step's start and end are those on the training thread.
    """

    steps: list[Span] = field(default_factory=list)
    """The steps, named by number, of kind `host`, on the training thread's lane."""
    phases: list[Span] = field(default_factory=list)
    kernels: list[Span] = field(default_factory=list)
    """Kernels, copies and fills on the device."""
    collectives: list[Span] = field(default_factory=list)
    """Gloo collectives, in flight on Gloo's threads."""
    operators: list[Span] = field(default_factory=list)
    """Operators on the training thread, possibly nested."""

    @classmethod
    def from_events(cls, events: Iterable[Mapping[str, Any]]) -> Timeline:
        """Build the timeline from trace events in Chrome's trace format with Kineto's categories."""
        timeline, on_host = cls(), list[tuple[Span, Mapping[str, Any]]]()
        launches: dict[int, float] = {}
        kernels: list[tuple[Span, int | None]] = []
        for event in events:
            if event.get("ph") != "X":
                continue
            category, name, arguments = event.get("cat"), str(event["name"]), event.get("args", {})
            span = Span(name, HOST, float(event["ts"]), float(event.get("dur", 0.0)), (event["pid"], event["tid"]))
            if category in _DEVICE_CATEGORIES:
                kernels.append((span._replace(kind=classify_kernel(name)), arguments.get("correlation")))
            elif category in _LAUNCH_CATEGORIES and "correlation" in arguments:
                launches[arguments["correlation"]] = span.start_us
            elif category == PHASE:
                timeline.phases.append(span._replace(kind=DATA if name == DATA else HOST))
            elif category == "user_annotation" and name.startswith(STEP_PREFIX):
                timeline.steps.append(span._replace(name=name.removeprefix(STEP_PREFIX)))
            elif category == "user_annotation" and name.startswith("gloo:"):
                timeline.collectives.append(span._replace(kind=COMMUNICATION))
            elif category in ("cpu_op", "user_annotation"):
                on_host.append((span._replace(kind=classify_operator(name)), arguments))
        timeline.steps.sort(key=lambda step: step.start_us)
        timeline.kernels = [span._replace(launched_us=launches.get(launch)) for span, launch in kernels]  # type: ignore[arg-type]
        threads = {step.lane for step in timeline.steps}
        timeline.operators = _with_attention_backward([item for item in on_host if item[0].lane in threads])
        return timeline

    def fractions(self) -> dict[str, float]:
        """Return the fraction of the step time spent in each of `KINDS`.  The fractions sum to 1.

        If the trace has device kernels, time is attributed to them first, and to data phases and Gloo while the device
        is idle.  Otherwise it is attributed to operators by their self time on the training thread; time outside any
        operator while Gloo is active counts as waiting for communication.
        """
        data = [phase for phase in self.phases if phase.kind == DATA]
        if self.kernels:
            return compute_fractions(
                [*self.kernels, *self.collectives, *data], extend_to_device(self.steps, self.kernels)
            )
        return compute_fractions([*flatten_to_self_time([*self.operators, *data]), *self.collectives], self.steps)


def _with_attention_backward(operators: Sequence[tuple[Span, Mapping[str, Any]]]) -> list[Span]:
    """Return the operators, with those in the backward pass of attention reclassified as attention.

    operators: each with its arguments.

    Autograd numbers its nodes.  A forward operator carries the number of the next node to be created, so among
    operators with the same number, the last one to start created that node.  A backward operator carries the number of
    its own node.
    """
    attention_end_us, is_attention_node = 0.0, dict[Any, bool]()
    for span, arguments in sorted(operators, key=lambda item: item[0].start_us):
        if span.kind == ATTENTION:
            attention_end_us = max(attention_end_us, span.end_us)
        if not arguments.get("Fwd thread id"):
            is_attention_node[arguments.get("Sequence number")] = span.start_us < attention_end_us
    return [
        span._replace(kind=ATTENTION)
        if arguments.get("Fwd thread id") and is_attention_node.get(arguments.get("Sequence number"))
        else span
        for span, arguments in operators
    ]
