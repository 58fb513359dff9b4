"""What each rank is doing, which ranks the others wait for, and the table that says so."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

_MAX_ROWS = 32
"""The most ranks in the table."""
_MAX_STACKS = 4
"""The most stacks below the table."""
_MAX_NAMES = 8
"""The most ranks that a sentence names."""
_MAX_FRAMES = 12
"""The most frames of a stack."""


@dataclass(frozen=True)
class RankStatus:
    """The status of one rank, as it reports it itself."""

    rank: int
    phase: str = ""
    phase_s: float = 0.0
    """Seconds since the rank entered the phase."""
    step: int = 0
    """The current step, or the last one if the rank is between steps."""
    num_phases_entered: int = 0
    """Number of phases entered since the step started."""
    is_waiting: bool = False
    """True if the rank is in a collective, and so waiting for other ranks."""
    is_responding: bool = True
    process: str = ""
    """The rank's process and host; known of ranks that do not respond."""
    stack: list[str] = field(default_factory=list)
    """The main thread's stack, plus the saving thread's if the main thread waits for it."""
    collectives: list[int] = field(default_factory=list)
    """How many collectives the rank's GPU has completed, started and enqueued; empty without a GPU."""
    pending_collective: str = ""
    """The collective that the rank's GPU waits for; empty if it is not known to wait for one."""
    group: str = ""
    """`context` if the rank is in a collective of its context-parallel group; otherwise empty."""


def find_late(statuses: Sequence[RankStatus]) -> list[RankStatus]:
    """Return the ranks that the others wait for.

    These are the ranks that do not respond; if all respond, the ranks furthest behind among those outside collectives.
    If all ranks are in collectives, their collectives do not match.  The ranks returned are then those whose GPU is
    furthest behind; on CPUs, those whose step and phase are.
    """
    if unresponsive := [status for status in statuses if not status.is_responding]:
        return unresponsive
    outside = [status for status in statuses if not status.is_waiting]
    if not outside and all(status.collectives for status in statuses):
        slowest = min(status.collectives for status in statuses)
        return [status for status in statuses if status.collectives == slowest]
    candidates = outside or [*statuses]
    furthest_behind = min((status.step, status.num_phases_entered) for status in candidates)
    return [status for status in candidates if (status.step, status.num_phases_entered) == furthest_behind]


def describe_late(cause: str, statuses: Sequence[RankStatus]) -> str:
    """Describe in one line the ranks that the others wait for and what they are doing.

    cause: why the ranks were asked, such as the limit that has expired.
    """
    late = find_late(statuses)
    ranks = ", ".join(str(status.rank) for status in late[:_MAX_NAMES]) + (", ..." if len(late) > _MAX_NAMES else "")
    names, worst = f"rank {ranks}" if len(late) == 1 else f"ranks {ranks}", late[0]
    if not worst.is_responding:
        described = [f"rank {status.rank} ({status.process})" for status in late[:_MAX_NAMES]]
        more = ", ..." if len(late) > _MAX_NAMES else ""
        return f"{', '.join(described)}{more}: no answer, so killed, suspended or stuck ({cause})"
    device = f", the device in {worst.pending_collective}" if worst.pending_collective else ""
    return (
        f"watchdog: {names} made no progress in {worst.phase} of step {worst.step} for {worst.phase_s:g} s{device} "
        f"({cause})"
    )


def status_table(cause: str, statuses: Sequence[RankStatus]) -> str:
    """Return a table of the ranks that marks those that the others wait for, followed by the stacks of some ranks."""
    late = find_late(statuses)
    rows = [*late, *(status for status in statuses if status not in late)]
    lines = [describe_late(cause, statuses), "     rank    step  phase            for"]
    for row in sorted(rows[:_MAX_ROWS], key=lambda row: row.rank):
        if not row.is_responding:
            lines.append(f"  >> {row.rank:4}  does not answer  ({row.process})")
            continue
        waits_for = f"waits for its {row.group} group" if row.group else "waits for others"
        state = "late" if row in late else waits_for if row.is_waiting else ""
        mark = ">>" if row in late else "  "
        lines.append(f"  {mark} {row.rank:4}  {row.step:6}  {row.phase:15}  {row.phase_s:6.1f} s  {state}".rstrip())
    if len(rows) > _MAX_ROWS:
        lines.append(f"     and {len(rows) - _MAX_ROWS} more that are not late")
    responding = [row for row in late[:_MAX_STACKS] if row.is_responding]
    for row in responding:
        lines += [f"rank {row.rank} is at", *(f"  {line}" for line in row.stack)]
    if not responding:  # show the stack of a waiting rank instead
        for row in sorted((row for row in rows if row.is_waiting), key=lambda row: not row.group)[:1]:
            lines += [f"rank {row.rank} waits at", *(f"  {line}" for line in row.stack)]
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------------
# Stacks


def is_in_a_collective(frame: FrameType | None) -> bool:
    """Return whether the innermost frame is in torch.distributed, or in torch code that torch.distributed called."""
    while frame is not None and f"{os.sep}torch{os.sep}" in frame.f_code.co_filename:
        if f"{os.sep}torch{os.sep}distributed{os.sep}" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def waits_for_device(frame: FrameType | None) -> bool:
    """Return whether the innermost frame waits for the GPU, as the host does when a collective hangs there."""
    return frame is not None and frame.f_code.co_filename.endswith(_DEVICE_WAIT_FILES)


def stack_lines(frame: FrameType | None) -> list[str]:
    """Return file, line and function of each informative frame, innermost last.

    Source lines are left out, because reading them blocks if the file system hangs.
    """
    lines: list[str] = []
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if not file.endswith(_HIDDEN_FILES):
            lines.append(f"{file}:{frame.f_lineno} in {name}")
        if name in _OUTERMOST and file.startswith(_PACKAGE):
            break
        frame = frame.f_back
    return lines[:_MAX_FRAMES][::-1]


_DEVICE_WAIT_FILES = tuple(os.sep + os.path.join("torch", "cuda", name) for name in ("streams.py", "__init__.py"))
"""Files whose functions wait for the GPU."""

_OPERATOR_FILES = ("_ops.py", "_compile.py", "_library/custom_ops.py", "_library/autograd.py", "_dynamo/eval_frame.py")
_WRAPPER_FILES = ("nn/modules/module.py", "autograd/function.py", *_OPERATOR_FILES)
_HIDDEN_FILES = (
    f"{os.sep}contextlib.py",
    *(os.sep + os.path.join("torch", *name.split("/")) for name in _WRAPPER_FILES),
)
"""Files whose frames are uninformative, and so are left out of printed stacks."""

_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_OUTERMOST = ("fit", "write_data", "prepare_global_plan")
"""Functions of this package whose callers are always the same, and so are left out of printed stacks."""


# ---------------------------------------------------------------------------------------------------------------
# NCCL's flight recorder, which is in host memory and so can be read while the GPU hangs


@dataclass(frozen=True)
class CollectiveProgress:
    """How many collectives this rank has completed, started and enqueued, over all its process groups.

    All ranks call the same collectives, so the numbers are comparable between ranks.
    """

    completed: int
    started: int
    enqueued: int
    waiting_for: str
    """Description of the oldest unfinished collective; empty if there is none."""


def read_flight_record() -> bytes:
    """Return the contents of NCCL's flight recorder as JSON; empty if NCCL is not in use."""
    recorder = _recorder()
    return b"" if recorder is None else bytes(recorder._dump_nccl_trace_json(includeCollectives=True, onlyActive=False))


def progress_of(record: bytes) -> CollectiveProgress | None:
    """Return the progress of collectives according to a flight record; None if the record does not contain it."""
    with suppress(ValueError, KeyError, TypeError, AttributeError):
        content = json.loads(record)
        groups: Mapping[str, Mapping[str, Any]] = content["pg_status"]
        completed, started, enqueued = (
            sum(max(0, int(group[key])) for group in groups.values())
            for key in ("last_completed_collective", "last_started_collective", "last_enqueued_collective")
        )
        unfinished = [entry for entry in content.get("entries", ()) if entry["state"] != "completed"]
        waiting_for = ""
        if unfinished:  # such as `all_gather number 12 of group 0 (default_pg)`
            entry = unfinished[0]
            name = str(entry["profiling_name"]).removeprefix("nccl:").lstrip("_")
            group, *description = entry["process_group"]
            waiting_for = f"{name} number {entry['collective_seq_id']} of group {group}"
            waiting_for += f" ({description[0]})" if description and description[0] else ""
        return CollectiveProgress(completed, started, enqueued, waiting_for)
    return None


def dump_flight_record(folder: Path, rank: int) -> None:
    """Write the contents of NCCL's flight recorder, if it is in use, to a file in `folder`.  The storage may hang.

    The file's name and format match NCCL's own dumps, so that
    `python -m torch.distributed.flight_recorder.fr_trace` can read it.
    """
    if recorder := _recorder():
        with suppress(OSError):
            (folder / f"collectives_rank_{rank}").write_bytes(recorder._dump_nccl_trace(includeCollectives=True))


def _recorder() -> Any:
    """Return the module with NCCL's flight recorder; None if NCCL is not in use."""
    if not (dist.is_nccl_available() and torch.cuda.is_initialized()):
        return None
    from torch._C import _distributed_c10d

    return _distributed_c10d
