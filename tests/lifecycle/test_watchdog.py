"""A rank that blocks the others is named, with its phase and place in the code, and the run ends."""

from __future__ import annotations

import signal
import socket
import time
from pathlib import Path

import pytest

from tests.helpers.cases import in_campaign
from tests.helpers.faults import Fault, processes_of
from tests.helpers.gate import wait_until
from tests.helpers.launch import Run, merged, run, start

pytestmark = pytest.mark.slow

LIMITS = ["run.step_timeout_s=8", "run.first_step_timeout_s=16", "checkpoint.timeout_s=10"]
"""The other ranks wait meanwhile, a thousand times as long as a step takes."""
RUN = [
    "recipe=llama_small",
    "model.name=tests.helpers.custom_recipes:mlp_faulty",
    "data.source=synthetic",
    "data.seq_len=16",
    "train.steps=5",
    "log.every=1",
    "log.sample_tokens=0",
    "eval.every=0",
    "checkpoint.every=0",
    "run.threads=1",
    "run.device=cpu",
]

PLACES = {
    "data 3": "data",
    "forward 3": "forward",
    "backward 3": "backward",
    "step 3": "between steps",
    "evaluation 2": "evaluate",
    "save 3": "save",
    "file 2": "save",
}
"""Where the rank hangs, and the phase that the message names."""


def assert_named(ran: Run, rank: int, phase: str) -> None:
    """Assert that one rank is blamed, once, in the output and in what the run leaves."""
    assert set(ran.codes) == {1}, ran.err
    assert ran.err.count("watchdog:") == 1, ran.err
    assert "Traceback" not in ran.err
    reason = ran.status["reason"]
    assert (ran.status["state"], ran.status["exit_code"]) == ("failed", 1)
    assert f"rank {rank} " in reason
    assert f" {phase} " in reason
    assert ran.of_kind("end")[-1]["reason"] == "failed"
    (marked,) = [line for line in ran.err.splitlines() if line.startswith("  >>")]
    assert marked.split()[1] == str(rank)


@pytest.mark.parametrize(
    ("place", "rank", "nproc"),
    [
        *[("forward 3", 1, 2), ("data 3", 0, 1)],
        *in_campaign(("save 3", 1, 2), ("file 2", 1, 2), ("data 3", 1, 2), ("backward 3", 1, 2), ("step 3", 1, 2)),
        *in_campaign(("evaluation 2", 1, 2), ("data 3", 0, 2), ("file 2", 0, 2)),
    ],
)
def test_hanging_rank_is_named(place: str, rank: int, nproc: int, tmp_path: Path) -> None:
    name = f"{place} of rank {rank}" if rank else place
    fault = Fault(tmp_path / "notes", {name: "hang"}, below=tmp_path / "run" / "checkpoints")
    more = {"evaluate": ["eval.every=2", "eval.steps=2"], "save": ["checkpoint.every=3"]}.get(PLACES[place], [])
    if place == "file 2":
        more += ["train.steps=1000000"]  # a hang of the storage alone does not stop the training
    ran = run(tmp_path / "run", *merged(RUN, [*LIMITS, *more, f"nproc={nproc}"]), code=1, variables=fault.variables)
    assert_named(ran, rank, PLACES[place])
    if place in ("data 3", "forward 3", "backward 3"):
        assert LIMITS[0].replace("=", ", ") in ran.err, "the limit of a later step"
    if place != "file 2":
        assert "no progress within" in ran.err
        assert "of step 3" in ran.status["reason"] or place == "evaluation 2"
        assert "in hang" in ran.err, "where it is in the code"
        assert "faults.py" in ran.err


@pytest.mark.campaign
def test_rank_that_is_gone_without_a_word_ends_the_others(tmp_path: Path) -> None:
    """While a save is on its way too: they do not wait for it as long as storage may take, which is an hour."""
    fault = Fault(tmp_path / "notes", {"step 4 of rank 1": "SIGSTOP"})
    own = ["train.steps=1000000", "checkpoint.every=3", "run.timeout_s=8", "nproc=2"]
    ran = start(tmp_path / "run", *merged(RUN, own), variables=fault.variables)
    wait_until(lambda: ran.processes[0].exitcode is not None, "the end of rank 0")
    ran.kill()
    assert ran.codes == [1, -9], ran.err
    assert "rank 1 " in ran.status["reason"]
    assert ran.status["state"] == "failed"


@pytest.mark.parametrize("by_launcher", [False, pytest.param(True, marks=pytest.mark.campaign)])
def test_second_interrupt_ends_ranks_that_wait_for_each_other(by_launcher: bool, tmp_path: Path) -> None:
    """Rank 0 is in a collective, where no handler of Python's runs; a launcher passes on both."""
    fault = Fault(tmp_path / "notes", {"forward 3 of rank 1": "hang"})
    stuck = start(tmp_path / "run", *merged(RUN, ["nproc=2"]), fresh=by_launcher, variables=fault.variables)
    wait_until(lambda: 2 in stuck.train("step") or not stuck.is_running, f"step 2: {stuck.err}")
    time.sleep(1.0)
    stuck.signal(signal.SIGINT)
    wait_until(lambda: "Ctrl-C" in stuck.err or not stuck.is_running, "the answer to the first")
    asked_at = time.monotonic()
    stuck.signal(signal.SIGINT)
    assert set(stuck.wait(together=False).codes) == {1}, stuck.err
    assert time.monotonic() - asked_at < 3.0
    assert "Traceback" not in stuck.err
    assert (stuck.status["state"], stuck.status["exit_code"]) == ("failed", 1)


@pytest.mark.campaign
@pytest.mark.parametrize("rank", [0, 1])
def test_suspended_rank_is_named_and_ended(rank: int, tmp_path: Path) -> None:
    """By the other ranks: its launcher would wait for it for half a minute."""
    fault = Fault(tmp_path / "notes", {f"forward 3{' of rank 1' * rank}": "SIGSTOP"})
    own = merged(RUN, [*LIMITS, "nproc=2", "train.steps=1000000"])
    begun_at = time.monotonic()
    ran = run(tmp_path / "run", *own, fresh=True, code=1, variables=fault.variables)
    pid = (tmp_path / "notes" / f"pid.{rank}").read_text()
    assert ran.status["reason"].startswith(f"rank {rank} (process {pid} on {socket.gethostname()}): no answer"), ran.err
    assert (ran.status["state"], ran.status["exit_code"]) == ("failed", 1)
    assert time.monotonic() - begun_at < 60
    assert processes_of(tmp_path / "run") == []


@pytest.mark.campaign
def test_ranks_that_are_suspended_together_go_on(tmp_path: Path) -> None:
    """For longer than any limit, as Slurm does it."""
    alone = run(tmp_path / "alone", *merged(RUN, ["nproc=2", "train.steps=200"]))
    fault = Fault(tmp_path / "notes", {f"step {step}": "sleep 0.1" for step in range(1, 200)})
    own = merged(RUN, ["run.step_timeout_s=8", "run.first_step_timeout_s=16", "nproc=2", "train.steps=200"])
    ran = start(tmp_path / "run", *own, variables=fault.variables)
    wait_until(lambda: 3 in ran.train("step") or not ran.is_running, f"step 3: {ran.err}")
    ran.signal(signal.SIGSTOP)
    time.sleep(20.0)
    ran.signal(signal.SIGCONT)
    assert ran.wait().code == 0, ran.err
    assert "rank" not in ran.err
    assert ran.train("loss") == alone.train("loss")


@pytest.mark.campaign
def test_long_evaluations_are_allowed(tmp_path: Path) -> None:
    """Each batch has the limit to itself."""
    at = {f"evaluation {step}{of}": "sleep 6" for step in (3, 5) for of in ("", " of rank 1")}
    limits = ["run.step_timeout_s=10", "run.first_step_timeout_s=10", "checkpoint.timeout_s=10", "nproc=2"]
    own = ["eval.every=3", "eval.steps=2", "checkpoint.every=1"]
    fault = Fault(tmp_path / "notes", at)
    ran = run(tmp_path / "run", *merged(RUN, [*limits, *own]), variables=fault.variables)
    assert "watchdog" not in ran.err + ran.out
    assert ran.train("step") == [1, 2, 3, 4, 5]
    assert [line["step"] for line in ran.of_kind("eval")] == [3, 5]


@pytest.mark.campaign
def test_the_first_step_may_take_longer(tmp_path: Path) -> None:
    fault = Fault(tmp_path / "notes", {"forward 1 of rank 1": "sleep 20"})
    limits = ["run.step_timeout_s=8", "run.first_step_timeout_s=60", "nproc=2"]
    ran = run(tmp_path / "run", *merged(RUN, limits), variables=fault.variables)
    assert ran.train("step") == [1, 2, 3, 4, 5]
