"""Rendezvous: all ranks meet in a store and decide there whether they begin, before any collective can hang."""

from __future__ import annotations

import functools
import os
import threading
import time
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist
from torch.distributed import Store

from trainer.distributed.stop import was_asked_early
from trainer.errors import EXIT_STOPPED, TrainingFailed, UserError, say

_ANSWER_S = 5.0
"""How long rank 0, which may keep the store, waits for the others to have read the decision to stop."""


@functools.cache
def meet_in_a_store(timeout: timedelta) -> tuple[Store, int, int]:
    """Return the store where all ranks meet, this rank, and their number; one store for the life of the process.

    Group names start again with each opening: in a store that still holds those of the one before, ranks read
    addresses that are not listened to, and hang.
    """
    found: list[tuple[Store, int, int]] = []
    errors: list[BaseException] = []

    def meet() -> None:
        try:
            found.append(next(dist.rendezvous("env://", timeout=timeout)))
        except BaseException as error:
            errors.append(error)

    meeting = threading.Thread(target=meet, name="rendezvous", daemon=True)
    meeting.start()
    while meeting.is_alive():  # in a thread, so that signals are heard meanwhile
        meeting.join(0.2)
        if was_asked_early():
            _leave_before_the_start(say_so=True)
    if errors:
        raise errors[0]
    return found[0]


_GO, _STOP = "go", "stop"
_PROBLEM = "meeting/problem"


def begin_together(store: Store, rank: int, size: int, timeout_s: float, problem: str = "") -> None:
    """Return once all ranks are here and none was asked to stop; else all of them leave, with 75.

    Opening a process group hears no signal: a rank that has left would be waited for there until the timeout.  So
    they decide in the store, where the first word counts: the last one to come says go, one that was asked to stop
    before that says stop.  `problem`: the user's mistake that this rank has found; all raise UserError with the first.
    """
    if problem:
        store.compare_set(_PROBLEM, "", problem)
    is_last = store.add("meeting/here", 1) == size
    deadline, pause_s = time.monotonic() + timeout_s, 0.002
    while not store.check(["meeting/word"]):
        if was_asked_early():
            store.compare_set("meeting/word", "", _STOP)
        elif is_last:
            store.compare_set("meeting/word", "", _GO)
        elif time.monotonic() > deadline:
            raise TrainingFailed(f"rank {rank}: not all of {size} ranks joined within run.timeout_s={timeout_s:g}")
        else:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
    if store.get("meeting/word").decode() == _STOP:
        _let_all_read(store, rank, size)
        _leave_before_the_start(say_so=rank == 0)
    if store.check([_PROBLEM]):
        found = store.get(_PROBLEM).decode()
        _let_all_read(store, rank, size)
        raise UserError(found)


def _let_all_read(store: Store, rank: int, size: int) -> None:
    """Wait on rank 0, whose process may keep the store in which the others still look."""
    store.add("meeting/left", 1)
    until = time.monotonic() + _ANSWER_S
    while rank == 0 and store.add("meeting/left", 0) < size and time.monotonic() < until:
        time.sleep(0.02)


def _leave_before_the_start(say_so: bool) -> NoReturn:
    if say_so:
        say("stopped before all ranks had joined")
    os._exit(EXIT_STOPPED)
