"""Goodput: the share of a run's wall time spent in steps that count, over all attempts, and where the rest went.

Knows records and nothing else: what is said here follows from `metrics.jsonl`, whether an attempt wrote its end or was
killed.  A killed attempt is known up to its last line: steps past it are neither seen nor counted as lost, and their
time is part of the gap before the next attempt.
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
    """The wall time of a run by its parts.  Time that no part names (logging, the last save's wait) is `other_s`."""

    wall_s: float = 0.0
    """From the start of the first process to the last record, without the time after an attempt that had finished."""
    update_s: float = 0.0
    """In steps whose result is part of the run."""
    lost_s: float = 0.0
    """In steps that were done again after a crash, or skipped because they were not finite."""
    start_s: float = 0.0
    """From the start of a process to its first step, loading excluded."""
    load_s: float = 0.0
    """Restoring from checkpoints, or reading initial weights."""
    save_s: float = 0.0
    """Training stood still for a save."""
    eval_s: float = 0.0
    between_s: float = 0.0
    """From the last record of an attempt to the start of the next process: waiting, and what was not on record."""
    num_attempts: int = 0
    lost_steps: int = 0
    """Steps done again after a crash: from the checkpoint to the last step on record."""
    failures: int = 0
    """Attempts that ended unasked, after a step at least, and were followed by another."""
    has_failed: bool = False
    """Whether the last attempt has ended so, or would if it ended now."""
    down_s: float = 0.0
    """From the ends of those attempts until the next ones began their first step."""
    node_s: float = 0.0
    """Time of all attempts, times their nodes."""
    until: float = 0.0
    """When the last record was written, in seconds since 1970."""
    boot: str = ""
    """Which start of which machine the last attempt ran in, if that is known."""
    booted: float = 0.0
    """When that was, by the clock of the attempt."""

    @property
    def other_s(self) -> float:
        return max(0.0, self.wall_s - sum(self.parts().values()))

    @property
    def share(self) -> float | None:
        """The share of wall time in steps that count; None for a file without time stamps."""
        return min(1.0, self.update_s / self.wall_s) if self.wall_s > 0 else None

    @property
    def restarts(self) -> int:
        return max(0, self.num_attempts - 1)

    def parts(self) -> dict[str, float]:
        """Return the seconds of every part that has a name."""
        return {name: getattr(self, name) for name in PARTS}

    def fields(self) -> dict[str, Any]:
        """Return what an end record says of the whole run."""
        counts = {"restarts": self.restarts, "lost_steps": self.lost_steps}
        return {"goodput_total": self.share, **counts, "wall_s": self.wall_s, **self.parts(), "other_s": self.other_s}


@dataclass(frozen=True)
class Experience:
    """The saves and failures that a run has seen."""

    saves: Sequence[tuple[float, float]] = ()
    """Of the newest: how long training stood still, and how long they took."""
    longest_save_s: float = 0.0
    failures: int = 0
    node_s: float = 0.0
    restart_s: float = 0.0
    """Mean of what a restart took; 0 where there was none."""


PARTS = ("update_s", "lost_s", "start_s", "load_s", "save_s", "eval_s", "between_s")
_NUM_SAVES = 5
"""What saves cost changes with the ranks and the storage: the newest count."""
_NUMBERS = frozenset(field.name for field in dataclasses.fields(Goodput)) - {"boot"}


class Ledger:
    """Keeps account of a run, record by record, in the order of the file.

    A resume drops lines from the file.  So each start record carries, as `before`, the account of all that was before
    it, made while those lines were still there; it takes the place of what the remaining lines add up to.
    """

    def __init__(self, resumed_step: int | None = None) -> None:
        """Give `resumed_step` to learn what is lost if the next attempt goes on from there."""
        self.reached = 0
        """The last step on record of the attempt in hand."""
        self._saves: deque[tuple[float, float]] = deque(maxlen=_NUM_SAVES)
        self._longest_save_s = 0.0
        self._total = Goodput()
        self._resumed_step = resumed_step
        self._undone_s = 0.0
        self._skipped = self._counted_to = 0
        self._num_nodes = 0
        self._began_at_step = 0
        self._reason = ""
        """How the attempt in hand ended; empty without an end record."""

    def add(self, record: Mapping[str, Any]) -> None:
        """Take one record into account; fields that are missing or null count as nothing."""
        kind, time, total = record.get("kind"), _number(record, "time"), self._total
        if kind == "start":
            self._start(record, time)
            return
        if time:
            passed_s = max(0.0, time - total.until) if total.until else 0.0
            total.wall_s += passed_s
            total.node_s += passed_s * self._num_nodes
            total.until = time  # earlier than before where the clock was set back: what follows counts all the same
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
            between_s = _between_s(total, record, started)
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
        self.reached = self._counted_to = self._began_at_step = int(_number(record, "resumed_step"))
        self._skipped = int(_number(record, "skipped"))
        self._reason = ""

    def _train(self, record: Mapping[str, Any]) -> None:
        """Count the steps since the line before; `step_s` is their mean."""
        step, step_s = int(_number(record, "step")), _number(record, "step_s")
        start = self._counted_to  # not `reached`: a checkpoint's line may stand between two of training
        num_updates = max(0, step - start)
        self._counted_to = max(start, step)
        skipped = int(_number(record, "skipped"))
        num_skipped = min(num_updates, max(0, skipped - self._skipped))
        self._skipped = skipped
        self._total.update_s += (num_updates - num_skipped) * step_s
        self._total.lost_s += num_skipped * step_s
        if self._resumed_step is not None:
            num_undone = max(0, step - max(start, self._resumed_step))
            self._undone_s += min(num_updates - num_skipped, num_undone) * step_s

    @property
    def lost_steps(self) -> int:
        """The steps of the last attempt past the one to go on from."""
        return 0 if self._resumed_step is None else max(0, self.reached - self._resumed_step)

    def total(self) -> Goodput:
        """Return the account so far."""
        undone_s = min(self._undone_s, self._total.update_s)
        return dataclasses.replace(
            self._total,
            update_s=self._total.update_s - undone_s,
            lost_s=self._total.lost_s + undone_s,
            lost_steps=self._total.lost_steps + self.lost_steps,
            has_failed=self._has_failed,
        )

    @property
    def _has_failed(self) -> bool:
        """True if this attempt has ended unasked after its first step; one that ends before it is no broken node."""
        return self._reason in ("", "failed") and self.reached > self._began_at_step

    def experience(self) -> Experience:
        """Return what the run has seen so far of saves and failures."""
        total = self._total
        restart_s = total.down_s / total.failures if total.failures else 0.0
        return Experience(tuple(self._saves), self._longest_save_s, total.failures, total.node_s, restart_s)

    def remember(self, earlier: Ledger) -> None:
        """Take over what the saves of earlier attempts were like: start records do not carry it."""
        self._saves.extend(earlier._saves)
        self._longest_save_s = max(self._longest_save_s, earlier._longest_save_s)


def _between_s(before: Goodput, start: Mapping[str, Any], started: float) -> float:
    """Return the seconds from the last record of an attempt to the start of the next process.

    On the same machine, not started anew meanwhile, it does not matter how its clock was set in between.
    """
    is_same = before.boot != "" and before.boot == start.get("boot")
    was_set_s = _number(start, "booted") - before.booted if is_same else 0.0
    return max(0.0, started - before.until - was_set_s)


def find_goodput(records: Iterable[Mapping[str, Any]]) -> Goodput:
    """Return where the time of a run went, from its records in the order of the file."""
    ledger = Ledger()
    for record in records:
        ledger.add(record)
    return ledger.total()


def _number(record: Mapping[str, Any], name: str) -> float:
    value = record.get(name)
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else 0.0
