"""Reads NCCL's flight recorder: the progress of collectives on this rank's GPU, and a dump of the record.

The record is in host memory, so that it can be read while the GPU hangs.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class CollectiveProgress:
    """Numbers of collectives completed, started and enqueued by this rank, over all its process groups.

    All ranks call the same collectives, so the numbers of different ranks can be compared.  `waiting_for` describes the
    oldest unfinished collective.
    """

    completed: int
    started: int
    enqueued: int
    waiting_for: str


def has_record() -> bool:
    """Return whether NCCL is in use in this process."""
    return dist.is_nccl_available() and torch.cuda.is_initialized()


def read_record() -> bytes:
    """Return NCCL's record as JSON; empty if NCCL is not in use."""
    if not has_record():
        return b""
    return bytes(_recorder()._dump_nccl_trace_json(includeCollectives=True, onlyActive=False))


def _recorder() -> Any:
    from torch._C import _distributed_c10d

    return _distributed_c10d


def progress_of(record: bytes) -> CollectiveProgress | None:
    """Return the progress of the collectives in a record; None if the record does not contain it."""
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        content = json.loads(record)
        groups: Mapping[str, Mapping[str, Any]] = content["pg_status"]
        completed, started, enqueued = (
            sum(max(0, int(group[key])) for group in groups.values())
            for key in ("last_completed_collective", "last_started_collective", "last_enqueued_collective")
        )
        unfinished = [entry for entry in content.get("entries", ()) if entry["state"] != "completed"]
        return CollectiveProgress(completed, started, enqueued, _in_words(unfinished[0]) if unfinished else "")
    return None


def _in_words(entry: Mapping[str, Any]) -> str:
    """Describe a collective, such as `all_gather number 12 of group 0 (default_pg)`."""
    name = str(entry["profiling_name"]).removeprefix("nccl:").lstrip("_")
    group, *of = entry["process_group"]
    words = f"{name} number {entry['collective_seq_id']} of group {group}"
    return f"{words} ({of[0]})" if of and of[0] else words


def dump_record(folder: Path, rank: int) -> None:
    """Dump the record, if there is one, into `folder`.

    Name and format are those of NCCL's own dumps, for `python -m torch.distributed.flight_recorder.fr_trace`.
    """
    if has_record():
        with contextlib.suppress(OSError):
            (folder / f"collectives_rank_{rank}").write_bytes(_recorder()._dump_nccl_trace(includeCollectives=True))
