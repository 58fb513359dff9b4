"""Computes goodput, the fraction of a run's wall time spent in productive steps, and breaks down the rest of the time.

The times cover all attempts of the run.  They are sums over the records in `metrics.jsonl`, whether or not an attempt
wrote an end record.  What a killed attempt did after its last record is unknown: any steps after it are not counted as
lost, and their time counts as part of the gap before the next attempt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple


@dataclass
class Goodput:
    """A run's wall time, broken down into parts.

    Time that belongs to no other part, such as logging and waiting for the last save, is `other_s`.
    """

    wall_s: float = 0.0
    """Time from the start of the first process to the last record, excluding gaps after a finished attempt."""
    update_s: float = 0.0
    """Time in steps that contributed to the run's result."""
    lost_s: float = 0.0
    """Time in steps that were repeated after a crash, or skipped because the loss or gradient was not finite."""
    start_s: float = 0.0
    """Time from the start of each process to its start record, just before its first step, excluding `load_s`."""
    load_s: float = 0.0
    """Time spent restoring checkpoints or reading initial weights before the start record."""
    save_s: float = 0.0
    """Time during which saves blocked training."""
    eval_s: float = 0.0
    """Time in evaluations that were not repeated."""
    between_s: float = 0.0
    """Time from an unfinished attempt's last record to the start of the next process, including any unrecorded work."""
    num_attempts: int = 0
    lost_steps: int = 0
    """Number of steps repeated after crashes: for each crash, the steps from the checkpoint to the last record."""
    last_time: float = 0.0
    """Time of the last record, in seconds since the Unix epoch."""

    @property
    def other_s(self) -> float:
        return max(0.0, self.wall_s - sum(self.parts().values()))

    @property
    def fraction(self) -> float | None:
        """Fraction of wall time spent in productive steps, or None if the records have no timestamps."""
        return min(1.0, self.update_s / self.wall_s) if self.wall_s > 0 else None

    @property
    def restarts(self) -> int:
        return max(0, self.num_attempts - 1)

    def parts(self) -> dict[str, float]:
        """Return the seconds of every part except `other_s`."""
        return {name: getattr(self, name) for name in PARTS}

    def fields(self) -> dict[str, Any]:
        """Return the fields of an end record that summarize all attempts."""
        return {
            "goodput_total": self.fraction,
            "restarts": self.restarts,
            "lost_steps": self.lost_steps,
            "wall_s": self.wall_s,
            **self.parts(),
            "other_s": self.other_s,
        }


PARTS = ("update_s", "lost_s", "start_s", "load_s", "save_s", "eval_s", "between_s")
"""The fields of `Goodput` that, with `other_s`, add up to the wall time."""


class SaveTimes(NamedTuple):
    """The durations of one save, in seconds."""

    blocked_s: float
    """Time for which the save blocked training."""
    total_s: float
    """Time until the checkpoint was published."""


@dataclass(frozen=True)
class RunHistory:
    """A run's saves and failures so far."""

    saves: Sequence[SaveTimes] = ()
    """The most recent saves."""
    longest_save_s: float = 0.0
    num_failures: int = 0
    """Number of attempts that failed or were killed after at least one step and were followed by another attempt."""
    node_seconds: float = 0.0
    """Each attempt's time multiplied by its number of nodes, summed over attempts."""
    mean_restart_s: float = 0.0
    """Mean time from the last record of a failed attempt to the start record of the next one; 0 if none has failed."""


_NUM_SAVES = 5
"""Number of recent saves to keep.  Older ones say less, as the number of ranks and the storage may have changed."""


@dataclass
class DroppedLines:
    """Sums over the lines of `metrics.jsonl` that a resume drops, because the run writes them again.

    The start record of the resumed attempt contains them, so that goodput is a sum over the lines that remain.
    """

    lost_s: float = 0.0
    """Time in the steps that the run repeats, and in skipped steps."""
    kept_s: float = 0.0
    """Time in the other steps of these lines, up to the resumed step: a line covers all steps since the one before."""
    until: float = 0.0
    """Time of the last of these lines, in seconds since the Unix epoch; 0 if there is none."""


class TimeLedger:
    """Computes the goodput of a run from its records, in file order."""

    def __init__(self) -> None:
        self.last_step = 0
        """The last recorded step of the current attempt."""
        self._total = Goodput()
        self._saves: deque[SaveTimes] = deque(maxlen=_NUM_SAVES)
        self._longest_save_s = 0.0
        self._num_failures = 0
        self._downtime_s = 0.0
        self._node_seconds = 0.0
        self._num_nodes = 0
        self._start_step = 0
        self._counted_step = self._num_skipped = 0
        """The step and the number of skipped steps in the last `train` record."""
        self._reason = ""
        """How the current attempt ended, or empty if it has no end record."""

    def total(self) -> Goodput:
        """Return the goodput so far."""
        return replace(self._total)

    def history(self) -> RunHistory:
        """Return the history of saves and failures so far."""
        mean_restart_s = self._downtime_s / self._num_failures if self._num_failures else 0.0
        return RunHistory(
            tuple(self._saves), self._longest_save_s, self._num_failures, self._node_seconds, mean_restart_s
        )

    def add(self, record: Mapping[str, Any]) -> None:
        """Add one record.  Missing or null fields count as zero."""
        kind, total = record.get("kind"), self._total
        if kind == "start":
            self._start(record)
            return
        self.advance(_number(record, "time"))
        if kind == "train":
            counted_s, skipped_s, _ = self._times_in_steps(record)
            total.update_s += counted_s
            total.lost_s += skipped_s
        elif kind == "eval":
            total.eval_s += _number(record, "eval_s")
        elif kind == "checkpoint":
            save = SaveTimes(_number(record, "blocked_s"), _number(record, "total_s"))
            total.save_s += save.blocked_s
            self._saves.append(save)
            self._longest_save_s = max(self._longest_save_s, save.total_s)
        elif kind == "end":
            self._reason = str(record.get("reason"))
        self.last_step = max(self.last_step, int(_number(record, "step")))

    def drop(self, record: Mapping[str, Any], resumed_step: int, dropped: DroppedLines) -> None:
        """Add a record that the run drops, because it resumes at `resumed_step`, to `dropped` and not to the totals."""
        step = int(_number(record, "step"))
        dropped.until = max(dropped.until, _number(record, "time"))
        if record.get("kind") == "train":
            num_repeated = max(0, step - max(self._counted_step, resumed_step))
            counted_s, skipped_s, step_s = self._times_in_steps(record)
            repeated_s = min(counted_s, num_repeated * step_s)
            dropped.lost_s += skipped_s + repeated_s
            dropped.kept_s += counted_s - repeated_s
        self.last_step = max(self.last_step, step)

    def advance(self, time: float) -> None:
        """Count the time from the last record until `time`, in seconds since the epoch, as time of this attempt."""
        total = self._total
        if time > total.last_time > 0:
            total.wall_s += time - total.last_time
            self._node_seconds += (time - total.last_time) * self._num_nodes
        total.last_time = max(time, total.last_time)

    def _start(self, record: Mapping[str, Any]) -> None:
        total = self._total
        time, load_s = _number(record, "time"), _number(record, "load_s")
        started = _number(record, "started") or time
        self._end_attempt(record)
        if total.last_time and self._reason != "finished":
            between_s = max(0.0, started - total.last_time)
            total.between_s += between_s
            total.wall_s += between_s
            if self._has_failed:
                self._num_failures += 1
                self._downtime_s += between_s + max(0.0, time - started)
        total.num_attempts += 1
        total.load_s += load_s
        total.start_s += max(0.0, time - started - load_s)
        self._num_nodes = int(_number(record, "nodes"))
        total.last_time = started or total.last_time
        self.advance(time)
        self._start_step = self._counted_step = self.last_step = int(_number(record, "resumed_step"))
        self._num_skipped = int(_number(record, "skipped"))
        self._reason = ""

    def _end_attempt(self, start: Mapping[str, Any]) -> None:
        """Add the lines of the previous attempt that were dropped, from the start record of the next one."""
        lost_steps = int(_number(start, "lost_steps"))
        self.advance(_number(start, "lost_until"))
        self._total.lost_steps += lost_steps
        self._total.lost_s += _number(start, "lost_s")
        self._total.update_s += _number(start, "kept_s")
        if lost_steps:
            self.last_step = max(self.last_step, int(_number(start, "resumed_step")) + lost_steps)

    def _times_in_steps(self, record: Mapping[str, Any]) -> tuple[float, float, float]:
        """Return the seconds in the steps since the previous `train` record: counted, skipped, and per step."""
        step, step_s, total_skipped = (_number(record, name) for name in ("step", "step_s", "skipped"))
        num_steps = max(0, int(step) - self._counted_step)
        num_skipped = min(num_steps, max(0, int(total_skipped) - self._num_skipped))
        self._counted_step, self._num_skipped = max(self._counted_step, int(step)), int(total_skipped)
        return (num_steps - num_skipped) * step_s, num_skipped * step_s, step_s

    @property
    def _has_failed(self) -> bool:
        """True if this attempt failed, or has no end record, after at least one step.

        An attempt that ends before its first step does not indicate a broken node.
        """
        return self._reason in ("", "failed") and self.last_step > self._start_step


def compute_goodput(records: Iterable[Mapping[str, Any]]) -> Goodput:
    """Return the breakdown of a run's wall time, given its records in file order."""
    ledger = TimeLedger()
    for record in records:
        ledger.add(record)
    return ledger.total()


def _number(record: Mapping[str, Any], name: str) -> float:
    """Return a numeric field, or 0 if it is missing or not a finite number."""
    value = record.get(name)
    return float(value) if isinstance(value, (int, float)) and abs(value) < _MAX_NUMBER else 0.0


_MAX_NUMBER = 2.0**63
"""Larger numbers are not measurements, and integers above 2^1024 cannot even be converted to float."""
