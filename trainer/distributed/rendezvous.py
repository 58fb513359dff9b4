"""Rendezvous: all ranks join a store and decide there whether to start, before any collective can hang."""

from __future__ import annotations

import functools
import os
import threading
import time
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist
from torch.distributed import Store

from trainer.distributed.stop_request import was_asked_early
from trainer.errors import EXIT_STOPPED, TrainingFailed, UserError, print_stderr

_ANSWER_S = 5.0
"""How long rank 0, which may host the store, waits for the others to read a decision to stop."""


@functools.cache
def join_store(timeout: timedelta) -> tuple[Store, int, int]:
    """Join the rendezvous store; return it, this rank and the world size.  One store for the life of the process.

    Callers must use a new prefix for each process group: group names repeat, and a rank that read the stale address of
    an earlier group would hang.
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
    while meeting.is_alive():  # in a thread, so that signals are handled meanwhile
        meeting.join(0.2)
        if was_asked_early():
            _exit_before_start(should_announce=True)
    if errors:
        raise errors[0]
    return found[0]


_GO, _STOP = "go", "stop"
_PROBLEM = "meeting/problem"


def agree_to_start(store: Store, rank: int, size: int, timeout_s: float, problem: str = "") -> None:
    """Return once all ranks have joined; if one of them was asked to stop before that, all exit with code 75.

    Opening a process group does not react to signals, so ranks would wait for a rank that has left until the timeout.
    Therefore they decide in the store, where the first decision wins: the last rank to join writes "go", and a rank
    that was asked to stop writes "stop".  `problem`: a user error that this rank has found; all ranks raise UserError
    with the first one.
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
        _exit_before_start(should_announce=rank == 0)
    if store.check([_PROBLEM]):
        found = store.get(_PROBLEM).decode()
        _let_all_read(store, rank, size)
        raise UserError(found)


def _let_all_read(store: Store, rank: int, size: int) -> None:
    """On rank 0, which may host the store, wait until the other ranks have read it."""
    store.add("meeting/left", 1)
    until = time.monotonic() + _ANSWER_S
    while rank == 0 and store.add("meeting/left", 0) < size and time.monotonic() < until:
        time.sleep(0.02)


def _exit_before_start(should_announce: bool) -> NoReturn:
    if should_announce:
        print_stderr("stopped before all ranks had joined")
    os._exit(EXIT_STOPPED)
