"""Standings: where each rank stands, whom the others wait for, and the table that says so.  Knows no process."""

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
    """How long it has been in the phase."""
    step: int
    """Of the step in hand, or of the last one."""
    marks: int
    """How many phases it has entered since the step began."""
    waits: bool
    """Whether it is in a collective, so that another rank holds it up."""
    within: bool = False
    """Whether it is in a save, an evaluation or the writing of a profile, which may take longer than a step, and has
    not taken too long."""
    answers: bool = True
    stack: list[str] = field(default_factory=list)
    """Where its main thread is, and the thread that saves, where that is what it waits for."""
    collectives: list[int] = field(default_factory=list)
    """How many collectives its device has ended, has begun, and has queued; empty without a GPU."""
    device: str = ""
    """What its device waits for, in words."""
    group: str = ""
    """The ranks whose collective it is in, where these are those that share sequences: `context`."""


def find_late(standings: Sequence[Standing]) -> list[Standing]:
    """Return those that the others wait for.

    Who does not answer; else, of those that are in no collective, who has come least far.  If all are in one, whose
    device has come least far, or, on a CPU, who has come least far of all: ranks whose collectives do not match.
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
    """Return whether a save in flight cannot end, so that no rank needs to wait for it: it is what took too long, or a
    rank whose part of it is missing does not answer.
    """
    late = find_late(standings)
    return any(not standing.answers or (standing.phase == "save" and not standing.within) for standing in late)


def reason_of(why: str, standings: Sequence[Standing]) -> str:
    """Return one line: who is late, in which phase, and which limit has passed."""
    late = find_late(standings)
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
    """Return what a person is to see: a row for each rank, the late ones marked, and where these are."""
    late = find_late(standings)
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
    if not answering:  # where it is itself cannot be known
        for row in sorted((row for row in rows if row.waits), key=lambda row: not row.group)[:1]:
            lines += [f"rank {row.rank} waits at", *(f"  {line}" for line in row.stack)]
    return "\n".join(lines)
