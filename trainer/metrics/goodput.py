"""Goodput: the fraction of a run's wall time spent in productive steps, over all attempts, and where the rest went.

It is computed from the records in `metrics.jsonl`, whether or not an attempt wrote an end record.  A killed attempt is
known only up to its last line: later steps are not counted as lost, and their time is part of the gap before the next
attempt.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass
class Goodput:
    """The wall time of a run, broken down.

    Time outside all other parts, such as logging and waiting for the last save, is `other_s`.
    """

    wall_s: float = 0.0
    """Time from the start of the first process to the last record, excluding gaps after a finished attempt."""
    update_s: float = 0.0
    """Time in steps that contributed to the run's result."""
    lost_s: float = 0.0
    """Time in steps that were repeated after a crash, or skipped because the loss or gradient was not finite."""
    start_s: float = 0.0
    """Time from the start of a process to its first step, excluding loading."""
    load_s: float = 0.0
    """Time spent restoring checkpoints or reading initial weights."""
    save_s: float = 0.0
    """Time during which saves blocked training."""
    eval_s: float = 0.0
    between_s: float = 0.0
    """Gaps from the last record of an attempt to the start of the next process, including any unrecorded work."""
    num_attempts: int = 0
    lost_steps: int = 0
    """Steps repeated after a crash: from the checkpoint to the last recorded step."""
    failures: int = 0
    """Number of attempts that failed or were killed after at least one step and were followed by another attempt."""
    has_failed: bool = False
    """True if the last attempt counts as such a failure, or would if it ended now."""
    down_s: float = 0.0
    """Time from the end of each failed attempt until the next attempt started its first step."""
    node_s: float = 0.0
    """Node-seconds: each attempt's time multiplied by its number of nodes, summed over attempts."""
    until: float = 0.0
    """Time of the last record, in seconds since the Unix epoch."""
    boot: str = ""
    """Identifier of the machine boot under which the last attempt ran; empty if unknown."""
    booted: float = 0.0
    """Time of that boot, according to that attempt's clock."""

    @property
    def other_s(self) -> float:
        return max(0.0, self.wall_s - sum(self.parts().values()))

    @property
    def share(self) -> float | None:
        """Fraction of wall time spent in productive steps, or None if the file has no timestamps."""
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
        return {"goodput_total": self.share, **counts, "wall_s": self.wall_s, **self.parts(), "other_s": self.other_s}


@dataclass(frozen=True)
class RunHistory:
    """A run's saves and failures so far."""

    saves: Sequence[tuple[float, float]] = ()
    """For each recent save: seconds that training was blocked, and seconds in total."""
    longest_save_s: float = 0.0
    failures: int = 0
    node_s: float = 0.0
    restart_s: float = 0.0
    """Mean duration of a restart after a failure, in seconds; 0 if there was no failure."""


PARTS = ("update_s", "lost_s", "start_s", "load_s", "save_s", "eval_s", "between_s")
_NUM_SAVES = 5
"""Number of recent saves to remember: the cost of a save changes with the number of ranks and the storage."""
_NUMBERS = frozenset(field.name for field in dataclasses.fields(Goodput)) - {"boot"}


class TimeLedger:
    """Computes the goodput of a run from its records, in file order.

    Resuming drops lines from the file.  Each start record therefore carries, as `before`, the totals of all earlier
    attempts, computed before those lines were dropped.  They replace the totals of the remaining lines.
    """

    def __init__(self, resumed_step: int | None = None) -> None:
        """`resumed_step`: the step to resume from; steps after it count as lost."""
        self.reached = 0
        """The last recorded step of the current attempt."""
        self._saves: deque[tuple[float, float]] = deque(maxlen=_NUM_SAVES)
        self._longest_save_s = 0.0
        self._total = Goodput()
        self._resumed_step = resumed_step
        self._repeated_s = 0.0
        self._skipped = self._counted_to = 0
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
            elapsed_s = max(0.0, time - total.until) if total.until else 0.0
            total.wall_s += elapsed_s
            total.node_s += elapsed_s * self._num_nodes
            total.until = time  # may move backward if the clock was set back, so that later intervals still count
        if kind == "train":
            self._train(record)
        elif kind == "eval":
            total.eval_s += _number(record, "eval_s")
        elif kind == "checkpoint":
            total.save_s += _number(record, "blocked_s")
            self._saves.append((_number(record, "blocked_s"), _number(record, "total_s")))
            self._longest_save_s = max(self._longest_save_s, _number(record, "total_s"))
        elif kind == "end":
            self._reason = str(record.get("reason"))
        self.reached = max(self.reached, int(_number(record, "step")))

    def _start(self, record: Mapping[str, Any], time: float) -> None:
        before = record.get("before")
        if isinstance(before, dict):
            numbers = {name: _number(before, name) for name in _NUMBERS if name in before}
            self._total = Goodput(**numbers, boot=str(before.get("boot") or ""))  # type: ignore[arg-type]
            self._total.num_attempts = int(self._total.num_attempts)
            self._total.lost_steps = int(self._total.lost_steps)
            self._total.failures = int(self._total.failures)
        else:
            self._total.has_failed = self._has_failed
        total = self._total
        total.failures += bool(total.has_failed)
        started, load_s = _number(record, "started") or time, _number(record, "load_s")
        if total.until and self._reason != "finished":
            # If both attempts ran on the same machine without a reboot in between, correct for changes of its clock.
            is_same_boot = total.boot != "" and total.boot == record.get("boot")
            clock_change_s = _number(record, "booted") - total.booted if is_same_boot else 0.0
            between_s = max(0.0, started - total.until - clock_change_s)
            total.between_s += between_s
            total.wall_s += between_s
            total.down_s += (between_s + max(0.0, time - started)) * total.has_failed
        total.num_attempts += 1
        total.load_s += load_s
        total.start_s += max(0.0, time - started - load_s)
        total.wall_s += max(0.0, time - started)
        self._num_nodes = int(_number(record, "nodes"))
        total.node_s += max(0.0, time - started) * self._num_nodes
        total.until = time or total.until
        total.boot, total.booted = str(record.get("boot") or ""), _number(record, "booted")
        self.reached = self._counted_to = self._start_step = int(_number(record, "resumed_step"))
        self._skipped = int(_number(record, "skipped"))
        self._reason = ""

    def _train(self, record: Mapping[str, Any]) -> None:
        """Count the steps since the previous `train` line; `step_s` is their mean duration."""
        step, step_s = int(_number(record, "step")), _number(record, "step_s")
        start = self._counted_to  # not `reached`: a checkpoint line may come between two train lines
        num_updates = max(0, step - start)
        self._counted_to = max(start, step)
        skipped = int(_number(record, "skipped"))
        num_skipped = min(num_updates, max(0, skipped - self._skipped))
        self._skipped = skipped
        self._total.update_s += (num_updates - num_skipped) * step_s
        self._total.lost_s += num_skipped * step_s
        if self._resumed_step is not None:
            num_repeated = max(0, step - max(start, self._resumed_step))
            self._repeated_s += min(num_updates - num_skipped, num_repeated) * step_s

    @property
    def lost_steps(self) -> int:
        """Number of steps that the last attempt took past the step to resume from."""
        return 0 if self._resumed_step is None else max(0, self.reached - self._resumed_step)

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
        return self._reason in ("", "failed") and self.reached > self._start_step

    def experience(self) -> RunHistory:
        """Return the history of saves and failures so far."""
        total = self._total
        restart_s = total.down_s / total.failures if total.failures else 0.0
        return RunHistory(tuple(self._saves), self._longest_save_s, total.failures, total.node_s, restart_s)

    def remember(self, earlier: TimeLedger) -> None:
        """Copy the save durations of earlier attempts, which start records do not carry."""
        self._saves.extend(earlier._saves)
        self._longest_save_s = max(self._longest_save_s, earlier._longest_save_s)


def find_goodput(records: Iterable[Mapping[str, Any]]) -> Goodput:
    """Return the breakdown of a run's wall time, given its records in file order."""
    ledger = TimeLedger()
    for record in records:
        ledger.add(record)
    return ledger.total()


def _number(record: Mapping[str, Any], name: str) -> float:
    value = record.get(name)
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else 0.0
