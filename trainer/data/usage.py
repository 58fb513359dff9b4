"""How much of each source a run reads, by phase, and how often data is repeated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from trainer.config import DataSection
from trainer.data.sample_order import SampleOrder
from trainer.errors import setting_error


@dataclass(frozen=True)
class SourceUsage:
    """How much of one source the steps of one phase read.

    source: the source's name, or "" if there is only one source.
    share: the source's share of the phase's samples.
    epochs: passes over the source by the end of the phase, including earlier phases.
    """

    first_step: int
    last_step: int
    source: str
    samples: int
    tokens: int
    share: float
    epochs: float


def usage_by_phase(order: SampleOrder, batch: int, steps: int, seq_len: int) -> list[SourceUsage]:
    """Return the usage of each source in `steps` steps of `batch` samples, for each phase that begins in them."""
    usages, starts = [], [start for start in order.starts if start < batch * steps]
    before = order.counts(0)
    for start, end in pairwise([*starts, batch * steps]):
        after, first, last = order.counts(end), start // batch + 1, -(-end // batch)
        for name, count in after.items():
            samples, epochs = count - before[name], count / order.sizes[name]
            tokens, share = samples * seq_len, samples / (end - start)
            usages.append(SourceUsage(first, last, name, samples, tokens, share, epochs))
        before = after
    return usages


def check_epochs(data: DataSection, usages: Sequence[SourceUsage]) -> None:
    """Raise UserError if a source would be read more than `data.max_epochs` times."""
    most = max(usages, key=lambda usage: usage.epochs, default=None)
    if most is not None and data.max_epochs is not None and most.epochs > data.max_epochs:
        name = f"source {most.source}" if most.source else "the data"
        rule = f"{name} would be read {most.epochs:.4g} times in {most.last_step} steps"
        raise setting_error("data.max_epochs", data.max_epochs, rule, float(f"{most.epochs * 1.0005:.4g}"))


def describe_usage(usages: Sequence[SourceUsage]) -> list[str]:
    """Return the lines printed at the start of a run: one per phase, then one about repeated sources, if any."""
    lines = []
    for first in dict.fromkeys(usage.first_step for usage in usages):
        phase = [usage for usage in usages if usage.first_step == first]
        last = phase[0].last_step
        steps = f"steps {first} to {last}" if last > first else f"step {first}"
        lines.append(f"{steps}: {', '.join(_describe_source(usage) for usage in phase if usage.samples)}")
    again = {usage.source: usage.epochs for usage in usages if usage.epochs > 1}
    if again:
        names = ", ".join(f"{name or 'all'} is read {epochs:.2f} times" for name, epochs in again.items())
        lines.append(f"repeats its data: {names}")
    return lines


def _describe_source(usage: SourceUsage) -> str:
    name = f"{usage.source} {100 * usage.share:.1f} %, " if usage.source else ""
    return f"{name}{usage.samples:,} samples (to epoch {usage.epochs:.2f})"
