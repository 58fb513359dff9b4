"""Which ranks the others wait for, and how that is said."""

from __future__ import annotations

import json
from typing import Any

import pytest
from torch.distributed import HashStore

from tests.helpers.gate import wait_until
from tests.helpers.tiny import tiny_config
from trainer.distributed.monitor import Monitor, this_process
from trainer.distributed.rank_status import RankStatus, describe_late, find_late, progress_of, status_table
from trainer.errors import PeerFailed


def status(rank: int, **facts: Any) -> RankStatus:
    return RankStatus(**{"rank": rank, "phase": "forward", "phase_s": 9.0, "step": 3, "num_phases_entered": 2, **facts})


WAITING = {"is_waiting": True}


@pytest.mark.parametrize(
    ("statuses", "late"),
    [
        ([status(0, **WAITING), status(1), status(2, **WAITING)], [1]),
        ([status(0, **WAITING), status(1, is_responding=False), status(2)], [1]),
        ([status(0), status(1, step=2), status(2, num_phases_entered=1)], [1]),
        ([status(0), status(1, num_phases_entered=1), status(2, num_phases_entered=1)], [1, 2]),
        # All are in collectives, which do not match.
        ([status(0, **WAITING), status(1, **WAITING, num_phases_entered=1)], [1]),
        ([status(rank, **WAITING, collectives=[7, 8, 9 - rank]) for rank in range(3)], [2]),
    ],
)
def test_late_ranks(statuses: list[RankStatus], late: list[int]) -> None:
    assert [row.rank for row in find_late(statuses)] == late
    marked = [line.split()[1] for line in status_table("a cause", statuses).splitlines() if line.startswith("  >>")]
    assert marked == [str(rank) for rank in late]
    assert "(a cause)" in describe_late("a cause", statuses)


def test_progress_of_collectives_on_a_gpu() -> None:
    groups = {
        "0": {"last_completed_collective": 5, "last_started_collective": 6, "last_enqueued_collective": 8},
        "1": {"last_completed_collective": -1, "last_started_collective": 1, "last_enqueued_collective": 1},
    }
    names = {"profiling_name": "nccl:_all_gather_base", "collective_seq_id": 6, "process_group": ["0", "default_pg"]}
    entries = [{**names, "state": "completed", "collective_seq_id": 5}, {**names, "state": "started"}]
    progress = progress_of(json.dumps({"pg_status": groups, "entries": entries}).encode())
    assert progress is not None
    assert (progress.completed, progress.started, progress.enqueued) == (5, 7, 9)
    assert progress.waiting_for == "all_gather_base number 6 of group 0 (default_pg)"
    assert progress_of(b"") is progress_of(b"{}") is None


def monitors(tmp_path: Any, num_ranks: int) -> list[Monitor]:
    """Return the monitors of several ranks, which share a store in this process."""
    store, config = HashStore(), tiny_config(tmp_path, "run.step_timeout_s=0.2", "run.first_step_timeout_s=0.2")
    found = [Monitor(store, rank, num_ranks, config) for rank in range(num_ranks)]
    for monitor in found:
        monitor.processes = [this_process()] * num_ranks
        monitor._leave = lambda failure: None  # type: ignore[method-assign]  # it would end the tests
    return found


def test_first_failure_is_that_of_all_ranks(tmp_path: Any) -> None:
    first, second, third = monitors(tmp_path, 3)
    failure = second.fail(ZeroDivisionError("mine"))
    assert failure.reason == "rank 1: ZeroDivisionError: mine"
    assert second.is_own(failure, ZeroDivisionError("mine"))
    wait_until(lambda: first.failure is not None and third.failure is not None, "the others know")
    assert first.failure == third.failure == failure
    error = PeerFailed("rank 1 failed: mine")
    assert third.fail(error) == failure
    assert not third.is_own(failure, error)
    for monitor in (first, second, third):
        monitor.close()


def test_rank_whose_limit_expires_asks_all(tmp_path: Any, capfd: pytest.CaptureFixture[str]) -> None:
    first, second = monitors(tmp_path, 2)
    second.enter("data")
    with first.step(2):
        wait_until(lambda: first.failure is not None and second.failure is not None, "an answer")
    assert first.failure == second.failure
    assert first.failure is not None
    assert "rank 1 made no progress in data of step 0" in first.failure.reason
    assert "run.first_step_timeout_s, 0.2 s" in first.failure.reason
    assert capfd.readouterr().err.count("watchdog:") == 1
    for monitor in (first, second):
        monitor.close()
