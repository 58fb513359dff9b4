"""NCCL's own record of its collectives: how far they have come on this rank's device, and the record as a file.

It lies in host memory, so that it can be read while the device hangs.
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
class Progress:
    """The collectives of this rank, over all its process groups: how many have ended, have begun and are queued.

    All ranks call the same ones, so that these numbers can be compared.  `waiting_for` is the oldest that has not
    ended, in words.
    """

    completed: int
    started: int
    enqueued: int
    waiting_for: str


def has_record() -> bool:
    """Return whether NCCL is in use here."""
    return dist.is_nccl_available() and torch.cuda.is_initialized()


def read_record() -> bytes:
    """Return NCCL's record as JSON; empty where there is none."""
    if not has_record():
        return b""
    return bytes(_recorder()._dump_nccl_trace_json(includeCollectives=True, onlyActive=False))


def _recorder() -> Any:
    from torch._C import _distributed_c10d

    return _distributed_c10d


def progress_of(record: bytes) -> Progress | None:
    """Return how far the collectives of a record have come; None if it does not say."""
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        content = json.loads(record)
        groups: Mapping[str, Mapping[str, Any]] = content["pg_status"]
        completed, started, enqueued = (
            sum(max(0, int(group[key])) for group in groups.values())
            for key in ("last_completed_collective", "last_started_collective", "last_enqueued_collective")
        )
        unfinished = [entry for entry in content.get("entries", ()) if entry["state"] != "completed"]
        return Progress(completed, started, enqueued, _in_words(unfinished[0]) if unfinished else "")
    return None


def _in_words(entry: Mapping[str, Any]) -> str:
    """Return a collective as `all_gather number 12 of group 0 (default_pg)`."""
    name = str(entry["profiling_name"]).removeprefix("nccl:").lstrip("_")
    group, *of = entry["process_group"]
    words = f"{name} number {entry['collective_seq_id']} of group {group}"
    return f"{words} ({of[0]})" if of and of[0] else words


def keep_record(folder: Path, rank: int) -> None:
    """Write the record into `folder`, if there is one: by the name and in the format in which NCCL does it itself, and
    `python -m torch.distributed.flight_recorder.fr_trace` reads it.
    """
    if has_record():
        with contextlib.suppress(OSError):
            (folder / f"collectives_rank_{rank}").write_bytes(_recorder()._dump_nccl_trace(includeCollectives=True))
