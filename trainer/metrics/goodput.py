"""Computes goodput, the fraction of a run's wall time spent in productive steps, and breaks down the rest of the time.

The times cover all attempts of the run.  They are computed from the records in `metrics.jsonl`, whether or not an
attempt wrote an end record.  What a killed attempt did after its last record is unknown: any steps after it are not
counted as lost, and their time counts as part of the gap before the next attempt.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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
    between_s: float = 0.0
    """Time from an unfinished attempt's last record to the start of the next process, including any unrecorded work."""
    num_attempts: int = 0
    lost_steps: int = 0
    """Number of steps repeated after crashes: for each crash, the steps from the checkpoint to the last record."""
    num_failures: int = 0
    """Number of attempts that failed or were killed after at least one step and were followed by another attempt."""
    has_failed: bool = False
    """True if the last attempt failed, or has no end record, after at least one step."""
    downtime_s: float = 0.0
    """Time from the last record of each failed attempt to the start record of the next attempt."""
    node_seconds: float = 0.0
    """Each attempt's time multiplied by its number of nodes, summed over attempts."""
    last_time: float = 0.0
    """Time of the last record, in seconds since the Unix epoch."""
    boot_id: str = ""
    """Boot ID of the machine on which the last attempt ran; empty if unknown."""
    boot_time: float = 0.0
    """When that machine was booted, in seconds since the Unix epoch, according to its clock."""

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
        counts = {"restarts": self.restarts, "lost_steps": self.lost_steps}
        return {
            "goodput_total": self.fraction,
            **counts,
            "wall_s": self.wall_s,
            **self.parts(),
            "other_s": self.other_s,
        }

    def to_state(self) -> dict[str, Any]:
        """Return the totals to store in the next attempt's start record."""
        return {_STORED_NAMES.get(name, name): value for name, value in vars(self).items()}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Goodput:
        """Return the totals stored in a start record.  Missing or invalid numbers count as zero."""
        values: dict[str, Any] = {}
        for name, default in vars(cls()).items():
            stored_name = _STORED_NAMES.get(name, name)
            is_text = isinstance(default, str)
            values[name] = str(state.get(stored_name) or "") if is_text else type(default)(_number(state, stored_name))
        return cls(**values)


_STORED_NAMES = {
    "num_failures": "failures",
    "downtime_s": "down_s",
    "node_seconds": "node_s",
    "last_time": "until",
    "boot_id": "boot",
    "boot_time": "booted",
}
"""The public names, in start records, of the fields whose own names differ."""


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
    node_seconds: float = 0.0
    """See `Goodput.node_seconds`."""
    mean_restart_s: float = 0.0
    """Mean duration of a restart after a failure, in seconds; 0 if there was no failure."""


PARTS = ("update_s", "lost_s", "start_s", "load_s", "save_s", "eval_s", "between_s")
"""The fields of `Goodput` that, with `other_s`, add up to the wall time."""
_NUM_SAVES = 5
"""Number of recent saves to keep.  Older ones say less, as the number of ranks and the storage may have changed."""


class TimeLedger:
    """Computes the goodput of a run from its records, in file order.

    Resuming drops lines from the file.  Every start record but the first therefore contains, as `before`, the totals of
    all earlier attempts, computed before those lines were dropped.  They replace the totals computed from the remaining
    lines.
    """

    def __init__(self, resumed_step: int | None = None) -> None:
        """`resumed_step`: the step to resume from; steps after it count as lost.  None if the run will not resume."""
        self.last_step = 0
        """The last recorded step of the current attempt."""
        self._saves: deque[SaveTimes] = deque(maxlen=_NUM_SAVES)
        self._longest_save_s = 0.0
        self._total = Goodput()
        self._resumed_step = resumed_step
        self._repeated_s = 0.0
        self._num_skipped = self._last_counted_step = 0
        self._num_nodes = 0
        self._start_step = 0
        self._reason = ""
        """How the current attempt ended, or empty if it has no end record."""

    def add(self, record: Mapping[str, Any]) -> None:
        """Add one record.  Missing or null fields count as zero."""
        kind, time, total = record.get("kind"), _number(record, "time"), self._total
        if kind == "start":
            self._start(record, time)
            return
        if time:
            elapsed_s = max(0.0, time - total.last_time) if total.last_time else 0.0
            total.wall_s += elapsed_s
            total.node_seconds += elapsed_s * self._num_nodes
            total.last_time = time  # may move backward if the clock was set back, so that later intervals still count
        if kind == "train":
            self._train(record)
        elif kind == "eval":
            total.eval_s += _number(record, "eval_s")
        elif kind == "checkpoint":
            total.save_s += _number(record, "blocked_s")
            self._saves.append(SaveTimes(_number(record, "blocked_s"), _number(record, "total_s")))
            self._longest_save_s = max(self._longest_save_s, _number(record, "total_s"))
        elif kind == "end":
            self._reason = str(record.get("reason"))
        self.last_step = max(self.last_step, int(_number(record, "step")))

    def _start(self, record: Mapping[str, Any], time: float) -> None:
        before = record.get("before")
        if isinstance(before, dict):
            self._total = Goodput.from_state(before)
        total = self._total
        total.num_failures += total.has_failed
        started, load_s = _number(record, "started") or time, _number(record, "load_s")
        if total.last_time and self._reason != "finished":
            # If both attempts ran on the same machine without a reboot in between, correct for changes of its clock.
            is_same_boot = total.boot_id != "" and total.boot_id == record.get("boot")
            clock_change_s = _number(record, "booted") - total.boot_time if is_same_boot else 0.0
            between_s = max(0.0, started - total.last_time - clock_change_s)
            total.between_s += between_s
            total.wall_s += between_s
            total.downtime_s += (between_s + max(0.0, time - started)) * total.has_failed
        total.num_attempts += 1
        total.load_s += load_s
        total.start_s += max(0.0, time - started - load_s)
        total.wall_s += max(0.0, time - started)
        self._num_nodes = int(_number(record, "nodes"))
        total.node_seconds += max(0.0, time - started) * self._num_nodes
        total.last_time = time or total.last_time
        total.boot_id, total.boot_time = str(record.get("boot") or ""), _number(record, "booted")
        self.last_step = self._last_counted_step = self._start_step = int(_number(record, "resumed_step"))
        self._num_skipped = int(_number(record, "skipped"))
        self._reason = ""

    def _train(self, record: Mapping[str, Any]) -> None:
        """Count the steps since the previous `train` line; `step_s` is their mean duration."""
        step, step_s = int(_number(record, "step")), _number(record, "step_s")
        start = self._last_counted_step  # not `last_step`: a checkpoint line may come between two train lines
        num_steps = max(0, step - start)
        self._last_counted_step = max(start, step)
        total_skipped = int(_number(record, "skipped"))
        num_skipped = min(num_steps, max(0, total_skipped - self._num_skipped))
        self._num_skipped = total_skipped
        self._total.update_s += (num_steps - num_skipped) * step_s
        self._total.lost_s += num_skipped * step_s
        if self._resumed_step is not None:
            num_repeated = max(0, step - max(start, self._resumed_step))
            self._repeated_s += min(num_steps - num_skipped, num_repeated) * step_s

    @property
    def lost_steps(self) -> int:
        """Number of steps that the last attempt took past the step to resume from."""
        return 0 if self._resumed_step is None else max(0, self.last_step - self._resumed_step)

    def total(self) -> Goodput:
        """Return the goodput so far."""
        repeated_s = min(self._repeated_s, self._total.update_s)
        return dataclasses.replace(
            self._total,
            update_s=self._total.update_s - repeated_s,
            lost_s=self._total.lost_s + repeated_s,
            lost_steps=self._total.lost_steps + self.lost_steps,
            has_failed=self._has_failed,
        )

    @property
    def _has_failed(self) -> bool:
        """True if this attempt failed, or has no end record, after at least one step.

        An attempt that ends before its first step does not indicate a broken node.
        """
        return self._reason in ("", "failed") and self.last_step > self._start_step

    def history(self) -> RunHistory:
        """Return the history of saves and failures so far."""
        total = self._total
        mean_restart_s = total.downtime_s / total.num_failures if total.num_failures else 0.0
        return RunHistory(
            tuple(self._saves), self._longest_save_s, total.num_failures, total.node_seconds, mean_restart_s
        )

    def copy_saves(self, earlier: TimeLedger) -> None:
        """Copy the save durations of earlier attempts, which start records do not contain."""
        self._saves.extend(earlier._saves)
        self._longest_save_s = max(self._longest_save_s, earlier._longest_save_s)


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
