"""A rank that blocks the others is named with its phase and place in the code, and the run ends."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

import trainer.trainer
from tests.helpers.faults import Fault, start
from tests.helpers.gate import wait_until
from tests.helpers.ranks import CommandResult, run_command
from trainer import load_config
from trainer.distributed.channel import StoreTimeout, TimedStore
from trainer.lifecycle.watchdog import (
    _ANSWER_S,
    _SAVE_GRACE_S,
    CollectiveProgress,
    RankStatus,
    Watchdog,
    _stack_lines,
    describe_stragglers,
    find_stragglers,
    is_stuck,
    progress_of,
    status_table,
    watch_phases,
)

LIMIT_S = 8.0
"""Longer than a normal step takes, even if other processes use the cores for seconds."""
SLEEPING = ["recipe=llama_small", "model.name=tests.helpers.sleeping_trainer:sleeping", "data.source=synthetic"]
SLEEPING += ["data.seq_len=16", "train.steps=5", "log.every=1", "log.sample_tokens=0", "checkpoint.every=0"]
SLEEPING += ["run.threads=1"]


def run_sleeping(
    monkeypatch: pytest.MonkeyPatch, folder: Path, place: str, *overrides: str, rank: int = 1, nproc: int = 2
) -> tuple[CommandResult, float]:
    """Run until it ends; return its result and its seconds."""
    monkeypatch.setenv("MESHTRAINER_TEST_PLACE", place)
    monkeypatch.setenv("MESHTRAINER_TEST_RANK", str(rank))
    given = {override.partition("=")[0] for override in overrides}
    base = [item for item in [*SLEEPING, "eval.every=0"] if item.partition("=")[0] not in given]
    started = time.monotonic()
    ran = run_command(folder, *base, *overrides, f"nproc={nproc}")
    return ran, time.monotonic() - started


SAVE_LIMIT_S = 10.0
"""More than a good save takes where the disk is slow to flush."""
LIMITS = [f"run.step_timeout_s={LIMIT_S}", f"checkpoint.timeout_s={SAVE_LIMIT_S}"]
PLACES = {
    "data": ("data", "__iter__"),
    "forward": ("forward", "loss"),
    "backward": ("backward", "<lambda>"),
    "on_step": ("between steps", "on_step"),
    "evaluate": ("evaluate", "loss"),
    "save": ("save", "state_dict"),
    "writing": ("save", "write_tensors"),
}


CASES = [("forward", 1)]
SLOW = [
    ("writing", 1),
    ("data", 1),
    ("save", 1),
    ("backward", 1),
    ("on_step", 1),
    ("evaluate", 1),
    ("data", 0),
    ("writing", 0),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "rank"), [*CASES, *(pytest.param(*case, marks=pytest.mark.campaign) for case in SLOW)]
)
def test_hanging_rank_is_named(place: str, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = {"evaluate": ["eval.every=2", "eval.steps=2", "run.first_step_timeout_s=16"], "save": ["checkpoint.every=3"]}
    more["writing"] = [*more["save"], "train.steps=100000"]
    monkeypatch.setenv("MESHTRAINER_TEST_HEARS_LATE_S", "2")  # of what rank 0 has found, which it alone reports
    ran, seconds = run_sleeping(monkeypatch, tmp_path / "run", place, *LIMITS, *more.get(place, []), rank=rank)
    phase, function = PLACES[place]
    limit_s = SAVE_LIMIT_S if place in ("save", "writing") else LIMIT_S
    print(f"{place}: {seconds:.1f} s in all, {seconds - limit_s:.1f} s beside the limit\n{ran.stderr}")
    assert ran.exit_code == 1
    assert ran.stderr.count("watchdog:") == 1, ran.stderr
    assert f"watchdog: rank {rank} made no progress in {phase} of step" in ran.stderr
    (row,) = [line for line in ran.stderr.splitlines() if line.startswith("  >>")]
    assert row.split()[1] == str(rank)
    assert row.endswith("late")
    stack = ran.stderr.partition(f"rank {rank} is at\n")[2].splitlines()
    assert f"in {function}" in "\n".join(stack)
    assert any(line.endswith("in hang") for line in stack)
    assert "Traceback" not in ran.stderr
    assert ran.status["state"] == "failed"
    assert ran.status["reason"].startswith(f"watchdog: rank {rank} made no progress in {phase}")
    assert ran.metrics[-1]["reason"] == "failed"
    assert seconds < limit_s + 200, "not the 300 s of the default, whatever else the machine does"


def test_a_stack_begins_at_the_training_loop() -> None:
    """The frames that call `fit`, in a launcher and the command line, say nothing about a rank."""
    inside: dict[str, Any] = {}
    exec(compile("def fit(inner):\n    return inner()", trainer.trainer.__file__, "exec"), inside)
    assert [line.rpartition(" ")[2] for line in inside["fit"](lambda: _stack_lines(sys._getframe()))] == [
        "fit",
        "<lambda>",
    ]


@pytest.mark.slow
def test_rank_lost_after_a_save_is_noticed_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others do not wait for it as long as storage may take; a cut cable once cost an hour."""
    more = ["train.steps=100000", "checkpoint.every=3", "checkpoint.when_busy=skip", f"run.timeout_s={LIMIT_S}"]
    ran, seconds = run_sleeping(monkeypatch, tmp_path / "run", "collect", *more)
    assert ran.exit_code == 1
    assert "watchdog: rank 1 made no progress in save of step" in ran.stderr
    assert ran.status["reason"].startswith("watchdog: rank 1 made no progress in save of step")
    assert seconds < 200, "not the hour of checkpoint.timeout_s"


@pytest.mark.campaign
def test_rank_that_stops_during_a_background_save(tmp_path: Path) -> None:
    """Its part of the save is never written, and no rank waits a minute for it."""
    fault = Fault(rank=1, hang="write", hang_until=str(tmp_path / "never"), at_step=3, then="SIGSTOP")
    options = ["recipe=llama_small", "model.name=tests.helpers.custom_recipes:mlp_faulty", "data.source=synthetic"]
    options += ["data.seq_len=16", "train.steps=9", "eval.every=0", "checkpoint.every=2", "checkpoint.mode=async"]
    options += ["run.threads=1", f"run.step_timeout_s={LIMIT_S}", "log.sample_tokens=0"]
    run = start(tmp_path / "run", *options, ranks=2, fault=fault)
    try:
        wait_until(lambda: _is_stopped(run.processes[1].pid), "rank 1 is stopped")
        stopped = time.monotonic()
        run.processes[0].join(240)
        seconds = time.monotonic() - stopped
    finally:
        run.kill()
    assert run.processes[0].exitcode == 1, run.stderr
    assert "watchdog: rank 1 did not answer" in run.stderr_of(0)
    assert seconds < LIMIT_S + _ANSWER_S + _SAVE_GRACE_S, "the grace that a save is given where it can end"


def _is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"


@pytest.mark.slow
def test_single_rank_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran, _ = run_sleeping(monkeypatch, tmp_path / "run", "data", *LIMITS, rank=0, nproc=1)
    assert ran.exit_code == 1
    assert "watchdog: rank 0 made no progress in data of step 3 for" in ran.stderr
    assert ran.status["reason"].startswith("watchdog: rank 0 made no progress in data of step 3")


@pytest.mark.campaign
def test_long_evaluations_are_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each evaluation takes 12 s, in two batches of 6 s; the limit of a step, and of a batch, is 10 s."""
    monkeypatch.setenv("MESHTRAINER_TEST_EVAL_S", "6")
    more = ["run.step_timeout_s=10", "run.first_step_timeout_s=10", "checkpoint.timeout_s=10"]
    more += ["eval.every=3", "eval.steps=1", "checkpoint.every=1"]
    ran, _ = run_sleeping(monkeypatch, tmp_path / "run", "nowhere", *more)
    assert ran.exit_code == 0, ran.stderr
    assert "watchdog" not in ran.stderr + ran.stdout
    assert ran.train("step") == [1, 2, 3, 4, 5]
    evaluated_s = [line["eval_s"] for line in ran.metrics if line["kind"] == "eval"]
    assert len(evaluated_s) == 2
    assert min(evaluated_s) > 10, "longer than any limit"


@pytest.mark.campaign
def test_collectives_have_the_step_timeout_after_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The groups are opened with 100 s; the waiting rank gives up after 15 s, and all ranks report where they are."""
    more = ["run.timeout_s=15", "run.first_step_timeout_s=100", "run.step_timeout_s=100"]
    ran, seconds = run_sleeping(monkeypatch, tmp_path / "run", "forward", *more)
    print(f"{seconds:.1f} s in all")
    assert seconds < 90, ran.stderr
    assert ran.exit_code == 1
    assert "watchdog: rank 1 made no progress in forward of step 3" in ran.stderr
    assert "a collective has timed out on rank 0" in ran.stderr
    assert ran.stderr.count("watchdog:") == 1
    assert "Traceback" not in ran.stderr
    assert ran.status["reason"].startswith("watchdog: rank 1 made no progress in forward")


# ---------------------------------------------------------------------------------------------------------------
# Phases and limits, in this process


@pytest.fixture
def dog() -> Watchdog:
    limits = load_config("llama_small", ["run.timeout_s=100", "checkpoint.timeout_s=300"])
    world: Any = SimpleNamespace(rank=0, size=1, timed_store=None, owns_group=True, set_timeout=lambda seconds: None)
    return Watchdog(world, limits)


def test_phases_of_a_step_are_recorded(dog: Watchdog) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters())
    watch_phases(dog, model, [optimizer])
    seen: list[str] = []
    dog.observers.append(seen.append)
    dog.begin_step(1)
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    dog.end_step(1)
    with dog.during("evaluate"), torch.no_grad():
        model(torch.ones(2, 3))
    each = ["forward", "backward", "reduce"]
    assert seen == ["data", *each, *each, "optimizer", "between steps", "evaluate", "between steps"]


def test_limit_of_each_phase(dog: Watchdog, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr("trainer.lifecycle.watchdog.time.monotonic", lambda: clock[0])

    def after(seconds: float) -> str:
        clock[0] += seconds
        return dog._describe_expired_limit()

    dog.begin_step(1)
    assert after(299) == ""
    assert after(2) == "no progress within run.first_step_timeout_s, 300 s"
    dog.end_step(1)
    assert after(10000) == "", "a user's own business"
    dog.begin_step(2)
    assert after(49) == ""
    with dog.during("save"):
        assert after(299) == ""
        assert after(2).startswith("no progress within checkpoint.timeout_s")
    assert after(0).startswith("no progress within run.step_timeout_s")
    dog.end_step(1)
    with dog.during("evaluate"):
        assert after(299) == ""
        dog.begin_forward()
        assert after(299) == "", "it makes progress"
        assert after(2) != ""
    dog.begin_step(3)
    dog._extend_limits(60)
    assert after(100) == "", "the process stood still for a minute itself"
    with pytest.raises(KeyError), dog.running():
        raise KeyError
    assert after(1000) == "", "the loop was left"
    dog.stop()


def test_shorter_limit_after_the_first_step(dog: Watchdog, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr("trainer.lifecycle.watchdog.time.monotonic", lambda: clock[0])
    found = []
    for step in (1, 2, 3):
        dog.begin_step(step)
        clock[0] += 51
        found.append(dog._describe_expired_limit())
        dog.end_step(1)
    assert found == ["", *["no progress within run.step_timeout_s, 50 s"] * 2]


def test_rank_that_saves_within_its_limit_is_not_late(dog: Watchdog, capsys: pytest.CaptureFixture[str]) -> None:
    dog._world.timed_store = TimedStore(HashStore(), 5.0)  # type: ignore[misc]
    dog._main_thread = threading.get_ident()
    with dog.during("save"):
        dog._report("another rank waits for this one")
        assert dog._num_reports == 1
        assert not dog._is_report_requested(), "next time there is a question of its own"
    assert capsys.readouterr().err == ""


class _Unanswering:
    """A store whose host is gone: its answers never come."""

    def __init__(self, gate: threading.Event) -> None:
        self._gate = gate

    def get(self, key: str) -> bytes:
        self._gate.wait()
        return b""

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self._gate.wait()


def test_message_of_a_store_timeout_gives_the_whole_time_waited() -> None:
    gate = threading.Event()
    store = TimedStore(_Unanswering(gate), 0.02)  # type: ignore[arg-type]
    try:
        with pytest.raises(StoreTimeout, match=r"no answer for 0\.02 s$"):
            store.get("key")
        with pytest.raises(StoreTimeout, match=r"no answer for 0\.05 s$"):
            store.wait("key", 0.03)
    finally:
        gate.set()


def test_late_ranks() -> None:
    def rank(number: int, step: int, num_phases_entered: int, waits: bool, answers: bool = True) -> RankStatus:
        return RankStatus(number, "forward", 7.0, step, num_phases_entered, waits, False, answers, ["a.py:1 in f"])

    ahead, waiting, behind = rank(0, 5, 3, False), rank(1, 5, 1, True), rank(2, 5, 2, False)
    assert find_stragglers([ahead, waiting, behind]) == [behind], "a rank in a collective is held up itself"
    assert find_stragglers([waiting, rank(3, 4, 9, True)]) == [rank(3, 4, 9, True)], (
        "all wait: collectives do not match"
    )
    silent = rank(4, 0, 0, False, answers=False)
    assert not is_stuck([ahead, waiting, behind]), "a save in flight may end before they leave"
    assert is_stuck([ahead, silent]), "none can end that it is part of"
    assert find_stragglers([ahead, silent]) == [silent]
    assert describe_stragglers("why", [ahead, silent]) == "watchdog: rank 4 did not answer (why)"
    many = status_table("why", [rank(number, 5, 1 if number == 700 else 2, number != 700) for number in range(1000)])
    assert ">>  700" in many
    assert "and 968 more that are not late" in many
    waits = replace(waiting, rank=7, group="context", stack=["b.py:2 in g"])
    shown = status_table("why", [silent, replace(waiting, rank=6), waits])
    assert "waits for its context group" in shown
    assert shown.endswith("rank 7 waits at\n  b.py:2 in g"), "the silent one cannot say where it is"


# ---------------------------------------------------------------------------------------------------------------
# A device that hangs


def record(*states: str, completed: int, enqueued: int) -> bytes:
    """Return what NCCL's recorder tells of one group's collectives, as JSON."""
    status = {"last_completed_collective": completed, "last_started_collective": -1}
    entries = [
        {
            "profiling_name": "nccl:_all_gather_base",
            "process_group": ["1", "shard"],
            "collective_seq_id": number,
            "state": state,
        }
        for number, state in enumerate(states, start=1)
    ]
    content = {"pg_status": {"1": status | {"last_enqueued_collective": enqueued}}, "entries": entries}
    return json.dumps(content).encode()


def test_progress_of_a_device() -> None:
    found = progress_of(record("completed", "started", "scheduled", completed=1, enqueued=3))
    assert found == CollectiveProgress(1, 0, 3, "all_gather_base number 2 of group 1 (shard)")
    assert progress_of(record("completed", completed=1, enqueued=1)) == CollectiveProgress(1, 0, 1, "")
    assert progress_of(b"") is None
    assert progress_of(b"[]") is None


def test_rank_with_the_least_device_progress_is_named() -> None:
    """All hosts wait for their device and have made the same progress."""

    def rank(number: int, completed: int) -> RankStatus:
        return RankStatus(
            number, "device", 7.0, 6, 4, True, collectives=[completed, 0, 9], pending_collective="reduce number 8"
        )

    statuses = [rank(0, 7), rank(1, 6), rank(2, 7)]
    assert find_stragglers(statuses) == [statuses[1]]
    reason = describe_stragglers("why", statuses)
    assert (
        reason == "watchdog: rank 1 made no progress in device of step 6 for 7 s, the device in reduce number 8 (why)"
    )
    busy = RankStatus(3, "data", 7.0, 6, 1, False)
    assert find_stragglers([*statuses, busy]) == [busy], "a host that is elsewhere holds up all devices"


def test_waiting_for_the_device_is_recognized(dog: Watchdog, monkeypatch: pytest.MonkeyPatch) -> None:
    """In `Event.synchronize`, where every rank is if a collective hangs on the device."""
    code = compile("", f"{os.sep}torch{os.sep}cuda{os.sep}streams.py", "exec")
    frame = SimpleNamespace(f_code=code, f_lineno=1, f_back=None)
    monkeypatch.setattr(
        "trainer.lifecycle.watchdog.read_flight_record", lambda: record("started", completed=0, enqueued=2)
    )
    monkeypatch.setattr("sys._current_frames", lambda: {1: frame})
    dog._main_thread = 1
    found = dog.status("asked")
    assert (found.phase, found.is_waiting, found.collectives) == ("device", True, [0, 0, 2])
    assert found.pending_collective == "all_gather_base number 1 of group 1 (shard)"
