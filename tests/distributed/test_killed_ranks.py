"""A killed rank is named with the signal that killed it, and `status.json` does not stay at `running`."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.faults import Fault, start
from tests.helpers.forked import popen
from tests.helpers.ranks import CommandResult, run_command
from trainer.distributed.dead_ranks import (
    Process,
    describe_dead_ranks,
    describe_exit,
    describe_killed_ranks,
    is_lost_connection,
    this_process,
)
from trainer.lifecycle.folder import FolderLock, record_end

MLP = [
    "recipe=llama_small",
    "model.name=tests.helpers.custom_recipes:mlp_faulty",
    "data.source=synthetic",
    "data.seq_len=16",
]
RUN = [*MLP, "train.steps=8", "eval.every=0", "log.every=1", "log.sample_tokens=0", "run.threads=1"]


@dataclass
class WorkerExit:
    pid: int
    exitcode: int
    timestamp: int = 100


@pytest.mark.parametrize(
    ("ends", "named"),
    [
        ({0: WorkerExit(10, 1), 1: WorkerExit(11, -9)}, ["rank 1 (process 11) was killed by SIGKILL"]),
        ({0: WorkerExit(10, -11), 1: WorkerExit(11, -15)}, ["rank 0 (process 10) was killed by SIGSEGV"]),
        (
            {0: WorkerExit(10, -9), 1: WorkerExit(11, -9)},
            ["rank 0 (process 10) was killed by SIGKILL", "rank 1 (process 11)"],
        ),
        (
            {0: WorkerExit(10, -15), 1: WorkerExit(11, -15)},
            ["rank 0 (process 10) was killed by SIGTERM", "rank 1 (process 11)"],
        ),
        ({0: WorkerExit(10, 1), 1: WorkerExit(11, -9, timestamp=700)}, []),
        ({0: WorkerExit(10, 1), 1: WorkerExit(11, -15)}, []),
        ({0: WorkerExit(10, 2), 1: WorkerExit(11, 2)}, []),
        (
            {rank: WorkerExit(10 + rank, -7) for rank in range(9)},
            ["rank 3 (process 13) was killed by SIGBUS", "and 5 more"],
        ),
        ({0: WorkerExit(10, -40)}, ["rank 0 (process 10) was killed by signal 40"]),
        ({}, []),
    ],
)
def test_killed_ranks_are_identified(ends: dict[int, Any], named: list[str]) -> None:
    found = describe_killed_ranks(ends)
    assert bool(found) == bool(named)
    for words in named:
        assert words in found, found


def test_errors_that_mean_a_lost_rank() -> None:
    gloo = "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:28823. This may mean ... GLHF"
    nccl = "NCCL error ... ncclRemoteError: A call failed possibly due to a network error or a remote process exiting"
    assert is_lost_connection(RuntimeError(gloo))
    assert is_lost_connection(ConnectionResetError(104, "Connection reset by peer"))
    assert is_lost_connection(RuntimeError(nccl)), nccl
    assert not is_lost_connection(RuntimeError("shape '[2]' is invalid"))
    assert not is_lost_connection(ValueError("closed by peer"))


def test_dead_ranks_are_found_on_this_node_only() -> None:
    here = this_process()
    assert describe_dead_ranks([here, Process("another machine", 2**22 + 1)], 0.0) == ""
    assert describe_dead_ranks([here, Process(here.machine, 2**22 + 1)], 0.0) == describe_exit(1, 2**22 + 1, None)


@pytest.mark.slow
def test_zombie_rank_counts_as_dead() -> None:
    child = popen(["sleep", "1000"])
    child.send_signal(signal.SIGBUS)
    found = describe_dead_ranks([this_process(), Process(this_process().machine, child.pid)], 10.0)
    child.wait()
    assert found == f"rank 1 (process {child.pid}) was killed by SIGBUS"


# ---------------------------------------------------------------------------------------------------------------
# What a launcher leaves


def status_after(folder: Path, status: dict[str, Any] | None, before: dict[str, Any]) -> dict[str, Any]:
    path = folder / "status.json"
    if status is not None:
        path.write_text(json.dumps(status))
    record_end(folder, before, 7, "rank 1 was killed")
    return json.loads(path.read_text()) if path.exists() else {}


def status_of(state: str, step: int = 3, reason: str = "") -> dict[str, Any]:
    return {"state": state, "exit_code": {"running": None, "finished": 0}.get(state, 1), "step": step, "reason": reason}


def test_launcher_records_how_the_run_ended(tmp_path: Path) -> None:
    silent = status_of("failed", step=7, reason="rank 1 was killed")
    assert status_after(tmp_path, status_of("running"), {}) == silent
    assert status_after(tmp_path, status_of("running"), status_of("running")) == silent, "nobody runs there"
    killed = status_of("failed", reason="rank 1 was killed")
    assert status_after(tmp_path, status_of("failed", reason="RuntimeError: closed by peer"), {}) == killed


def test_launcher_keeps_a_status_written_by_a_rank(tmp_path: Path) -> None:
    assert status_after(tmp_path / "no_folder", None, {}) == {}
    for status in (status_of("finished"), status_of("stopped"), status_of("failed", reason="of an attempt before")):
        assert status_after(tmp_path, status, status) == status
    owner = FolderLock(tmp_path, "run.dir")
    owner.acquire()
    assert status_after(tmp_path, status_of("running"), {}) == status_of("running"), "another run's, which is alive"
    owner.release()


# ---------------------------------------------------------------------------------------------------------------
# Real ones


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "name"),
    [
        pytest.param(1, "SIGKILL", marks=pytest.mark.campaign),
        pytest.param(0, "SIGKILL", marks=pytest.mark.campaign),
        pytest.param(0, "SIGSEGV", marks=pytest.mark.campaign),
        pytest.param(1, "SIGBUS", marks=pytest.mark.campaign),
    ],
)
def test_launcher_names_a_killed_rank(rank: int, name: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.mkdir()
    fault = Fault(at_step=3, then=name, rank=rank, log=str(log))
    with_fault = ["env", *(f"{key}={value}" for key, value in fault.variables().items()), sys.executable]
    ran = run_command(tmp_path / "run", *RUN, "nproc=2", launcher=with_fault)
    check_named(ran, f"rank {rank} (process {(log / f'pid.{rank}').read_text()}) was killed by {name}")
    assert not [path for path in ran.folder.iterdir() if path.name.startswith(".status")]


@pytest.mark.slow
def test_other_ranks_name_a_killed_rank(tmp_path: Path) -> None:
    """With any launcher."""
    run = start(tmp_path / "run", *RUN, ranks=2, fault=Fault(at_step=3, then="SIGKILL", rank=1))
    assert run.wait() == [1, -signal.SIGKILL]
    check_named(CommandResult(1, run.stdout, run.stderr, run.folder), f"rank 1 (process {run.processes[1].pid})")


def check_named(ran: CommandResult, words: str) -> None:
    assert ran.exit_code == 1, ran.stderr
    assert ran.status["state"] == "failed"
    assert ran.status["exit_code"] == 1
    assert ran.status["step"] >= 2
    assert ran.status["reason"].startswith(words), ran.status
    assert ran.stderr.count(words) == 1, ran.stderr
    assert "Traceback" not in ran.stderr
    assert "by peer" not in ran.stderr
