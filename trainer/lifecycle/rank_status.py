"""What each rank is doing, which ranks the others wait for, and the table that shows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

_MAX_ROWS = 32


@dataclass(frozen=True)
class RankStatus:
    """The status of one rank."""

    rank: int
    phase: str
    phase_s: float
    """Time since the rank entered the phase."""
    step: int
    """The current step, or the last one."""
    num_phases_entered: int
    """Number of phases entered since the step began."""
    is_waiting: bool
    """True if the rank is in a collective, so that it waits for another rank."""
    is_within_limit: bool = False
    """True during a save, an evaluation or the writing of a profile that is still within its own time limit."""
    is_responding: bool = True
    stack: list[str] = field(default_factory=list)
    """Stack of the main thread, and of the saving thread if the main thread waits for it."""
    collectives: list[int] = field(default_factory=list)
    """Numbers of collectives completed, started and enqueued on its GPU; empty without a GPU."""
    device: str = ""
    """Description of the collective that its GPU waits for."""
    group: str = ""
    """`context` if the rank is in a collective of its context-parallel group, otherwise empty."""


def find_stragglers(statuses: Sequence[RankStatus]) -> list[RankStatus]:
    """Return the ranks that the others wait for.

    These are the ranks that do not answer; otherwise the ranks furthest behind among those outside collectives.  If all
    ranks are in collectives, which then do not match, these are the ranks whose GPUs (on a CPU: whose step and phase)
    are furthest behind.
    """
    silent = [status for status in statuses if not status.is_responding]
    if silent:
        return silent
    busy = [status for status in statuses if not status.is_waiting]
    if not busy and all(status.collectives for status in statuses):
        slowest = min(status.collectives for status in statuses)
        return [status for status in statuses if status.collectives == slowest]
    busy = busy or [*statuses]
    least = min((status.step, status.num_phases_entered) for status in busy)
    return [status for status in busy if (status.step, status.num_phases_entered) == least]


def is_stuck(statuses: Sequence[RankStatus]) -> bool:
    """Return whether a save in flight cannot finish, so that no rank needs to wait for it.

    Either the save itself has timed out, or a rank that others wait for does not answer.
    """
    late = find_stragglers(statuses)
    return any(not status.is_responding or (status.phase == "save" and not status.is_within_limit) for status in late)


def reason_of(why: str, statuses: Sequence[RankStatus]) -> str:
    """Describe in one line which ranks are late, in which phase, and which limit has passed."""
    late = find_stragglers(statuses)
    ranks = ", ".join(str(status.rank) for status in late[:8]) + (", ..." if len(late) > 8 else "")
    who = f"rank {ranks}" if len(late) == 1 else f"ranks {ranks}"
    first = late[0]
    if not first.is_responding:
        return f"watchdog: {who} did not answer ({why})"
    device = f", the device in {first.device}" if first.device else ""
    return (
        f"watchdog: {who} made no progress in {first.phase} of step {first.step} for {first.phase_s:g} s{device} "
        f"({why})"
    )


def table(why: str, statuses: Sequence[RankStatus]) -> str:
    """Return the table to print: one row per rank, with the late ranks marked, and the stacks of late ranks."""
    late = find_stragglers(statuses)
    rows = [*late, *(status for status in statuses if status not in late)]
    lines = [reason_of(why, statuses), "     rank    step  phase            for"]
    for row in sorted(rows[:_MAX_ROWS], key=lambda row: row.rank):
        if not row.is_responding:
            lines.append(f"  >> {row.rank:4}  does not answer")
            continue
        waits_for = f"waits for its {row.group} group" if row.group else "waits for others"
        state = "late" if row in late else waits_for if row.is_waiting else ""
        mark = ">>" if row in late else "  "
        lines.append(f"  {mark} {row.rank:4}  {row.step:6}  {row.phase:15}  {row.phase_s:6.1f} s  {state}".rstrip())
    if len(rows) > _MAX_ROWS:
        lines.append(f"     and {len(rows) - _MAX_ROWS} more that are not late")
    answering = [row for row in late[:4] if row.is_responding]
    for row in answering:
        lines += [f"rank {row.rank} is at", *(f"  {line}" for line in row.stack)]
    if not answering:  # no stack of a late rank is known: show one of a waiting rank
        for row in sorted((row for row in rows if row.is_waiting), key=lambda row: not row.group)[:1]:
            lines += [f"rank {row.rank} waits at", *(f"  {line}" for line in row.stack)]
    return "\n".join(lines)
