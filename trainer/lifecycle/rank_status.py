"""What each rank is doing, which ranks the others wait for, and the table that shows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

_MAX_ROWS = 32


@dataclass(frozen=True)
class Standing:
    """The status of one rank."""

    rank: int
    phase: str
    phase_s: float
    """Time since the rank entered the phase."""
    step: int
    """The current step, or the last one."""
    marks: int
    """Number of phases entered since the step began."""
    waits: bool
    """True if the rank is in a collective, so that it waits for another rank."""
    within: bool = False
    """True during a save, an evaluation or the writing of a profile that is still within its own time limit."""
    answers: bool = True
    stack: list[str] = field(default_factory=list)
    """Stack of the main thread, and of the saving thread if the main thread waits for it."""
    collectives: list[int] = field(default_factory=list)
    """Numbers of collectives completed, started and enqueued on its GPU; empty without a GPU."""
    device: str = ""
    """Description of the collective that its GPU waits for."""
    group: str = ""
    """`context` if the rank is in a collective of its context-parallel group, otherwise empty."""


def find_stragglers(standings: Sequence[Standing]) -> list[Standing]:
    """Return the ranks that the others wait for.

    These are the ranks that do not answer; otherwise the ranks furthest behind among those outside collectives.  If all
    ranks are in collectives, which then do not match, these are the ranks whose GPUs (on a CPU: whose step and phase)
    are furthest behind.
    """
    silent = [standing for standing in standings if not standing.answers]
    if silent:
        return silent
    busy = [standing for standing in standings if not standing.waits]
    if not busy and all(standing.collectives for standing in standings):
        slowest = min(standing.collectives for standing in standings)
        return [standing for standing in standings if standing.collectives == slowest]
    busy = busy or [*standings]
    least = min((standing.step, standing.marks) for standing in busy)
    return [standing for standing in busy if (standing.step, standing.marks) == least]


def is_stuck(standings: Sequence[Standing]) -> bool:
    """Return whether a save in flight cannot finish, so that no rank needs to wait for it.

    Either the save itself has timed out, or a rank that others wait for does not answer.
    """
    late = find_stragglers(standings)
    return any(not standing.answers or (standing.phase == "save" and not standing.within) for standing in late)


def reason_of(why: str, standings: Sequence[Standing]) -> str:
    """Describe in one line which ranks are late, in which phase, and which limit has passed."""
    late = find_stragglers(standings)
    ranks = ", ".join(str(standing.rank) for standing in late[:8]) + (", ..." if len(late) > 8 else "")
    who = f"rank {ranks}" if len(late) == 1 else f"ranks {ranks}"
    first = late[0]
    if not first.answers:
        return f"watchdog: {who} did not answer ({why})"
    device = f", the device in {first.device}" if first.device else ""
    return (
        f"watchdog: {who} made no progress in {first.phase} of step {first.step} for {first.phase_s:g} s{device} "
        f"({why})"
    )


def table(why: str, standings: Sequence[Standing]) -> str:
    """Return the table to print: one row per rank, with the late ranks marked, and the stacks of late ranks."""
    late = find_stragglers(standings)
    rows = [*late, *(standing for standing in standings if standing not in late)]
    lines = [reason_of(why, standings), "     rank    step  phase            for"]
    for row in sorted(rows[:_MAX_ROWS], key=lambda row: row.rank):
        if not row.answers:
            lines.append(f"  >> {row.rank:4}  does not answer")
            continue
        waits = f"waits for its {row.group} group" if row.group else "waits for others"
        state = "late" if row in late else waits if row.waits else ""
        mark = ">>" if row in late else "  "
        lines.append(f"  {mark} {row.rank:4}  {row.step:6}  {row.phase:15}  {row.phase_s:6.1f} s  {state}".rstrip())
    if len(rows) > _MAX_ROWS:
        lines.append(f"     and {len(rows) - _MAX_ROWS} more that are not late")
    answering = [row for row in late[:4] if row.answers]
    for row in answering:
        lines += [f"rank {row.rank} is at", *(f"  {line}" for line in row.stack)]
    if not answering:  # no stack of a late rank is known: show one of a waiting rank
        for row in sorted((row for row in rows if row.waits), key=lambda row: not row.group)[:1]:
            lines += [f"rank {row.rank} waits at", *(f"  {line}" for line in row.stack)]
    return "\n".join(lines)
