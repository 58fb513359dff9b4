"""Stopping on request: by every means, before the first step, in an evaluation, and behind a launcher."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.faults import Fault, processes_of, wait_until_it_catches
from tests.helpers.gate import Gate, wait_until
from tests.helpers.launch import PYTHON_MODULE, REPOSITORY, TORCHRUN, Run, launch, run, start, tiny
from tests.helpers.runs import SharedRun
from tests.helpers.tiny import tiny_config
from trainer import Trainer
from trainer.metrics.record import Record

pytestmark = pytest.mark.slow

FAULTY = ["model.name=tests.helpers.custom_recipes:llama_faulty", "model.vocab_size=257", "model.num_kv_heads=2"]
LONG = "train.steps=1000000"


def wait_for_step(ran: Run, step: int = 1) -> None:
    """Wait until a run has recorded a step. A run that has ended is left to the test's own assertions."""
    wait_until(lambda: step in ran.train("step") or not ran.is_running, f"step {step}: {ran.err}")


def assert_stopped(ran: Run, reason: str) -> None:
    """Assert that a run has ended as it should on a request: after a step, with its state saved."""
    assert ran.code == 75, ran.err
    assert "Traceback" not in ran.err
    status = ran.status
    assert (status["state"], status["exit_code"], status["reason"]) == ("stopped", 75, reason)
    assert status["step"] == ran.steps_saved[-1]
    assert ran.of_kind("end")[-1]["reason"] == "stopped"


# ---------------------------------------------------------------------------------------------------------------
# Signals


class SignalsItself(Trainer):
    number = signal.SIGTERM

    def on_step(self, record: Record) -> None:
        if record.step == 2:
            signal.raise_signal(self.number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT])
def test_each_signal_stops_a_run(number: signal.Signals, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """SIGQUIT also prints the stacks of all threads."""
    signal.signal(number, lambda *_: None)  # else one that the run does not catch would end the tests
    trainer = SignalsItself(tiny_config(tmp_path, "train.steps=9"))
    trainer.number = number
    assert trainer.fit() == 75
    trainer.close()
    ran = Run(tmp_path, [], tmp_path)
    assert ran.status == {"state": "stopped", "exit_code": 75, "step": 3, "reason": number.name}
    assert ran.steps_saved == [3]
    assert ("test_stopping.py" in capfd.readouterr().err) == (number == signal.SIGQUIT)


def test_second_interrupt_ends_a_stuck_run(tmp_path: Path) -> None:
    """Without saving, but with its outcome on record, and the folder is free."""
    gate = Gate(tmp_path / "gate", "evaluation 2")
    stuck = start(tmp_path / "run", LONG, "eval.every=2", "eval.steps=1", *FAULTY, variables=gate.variables)
    wait_until(lambda: gate.is_reached() or not stuck.is_running, "the evaluation, in which it stays")
    stuck.signal(signal.SIGINT)
    wait_until(lambda: "Ctrl-C" in stuck.err or not stuck.is_running, "the answer, before the step ends")
    stuck.signal(signal.SIGINT)
    assert stuck.wait().code == 1
    assert (stuck.status["state"], stuck.status["exit_code"]) == ("failed", 1)
    assert "Ctrl-C" in stuck.status["reason"]
    assert "Traceback" not in stuck.err
    run(tmp_path / "run", "train.steps=1", *FAULTY)


def test_stop_aborts_an_evaluation_and_the_next_start_makes_up_for_it(tmp_path: Path) -> None:
    own = ["train.steps=4", "checkpoint.every=4", "eval.every=2", "eval.steps=9", *FAULTY]
    gate = Gate(tmp_path / "gate", "evaluation 4")
    stopped = start(tmp_path / "run", *own, variables=gate.variables)
    wait_until(lambda: gate.is_reached() or not stopped.is_running, "the last evaluation")
    stopped.signal(signal.SIGTERM)
    passed = gate.num_passed
    gate.open()
    assert_stopped(stopped.wait(), "SIGTERM")
    assert gate.num_passed - passed <= 1, "batches of an evaluation that counts for nothing"
    assert [line["step"] for line in stopped.of_kind("eval")] == [2]
    again = run(tmp_path / "run", *own)
    assert [line["step"] for line in again.of_kind("eval")] == [2, 4]


# ---------------------------------------------------------------------------------------------------------------
# Before the first step


@pytest.mark.parametrize(("place", "ranks"), [("build", 1), ("start of rank 1", 2)])
def test_stop_before_the_first_step(place: str, ranks: int, tmp_path: Path) -> None:
    """There is nothing to save, so nothing is waited for: neither work in progress nor a rank that is missing."""
    gate = Gate(tmp_path / "gate", place)
    stopped = start(tmp_path / "run", LONG, f"nproc={ranks}", *FAULTY, variables=gate.variables)
    wait_until(lambda: gate.is_reached() or not stopped.is_running, "its place before the first step")
    for pid in stopped.pids:
        wait_until_it_catches(pid, signal.SIGTERM)
    stopped.signal(signal.SIGTERM)
    assert stopped.wait(together=False).codes == [75] * ranks, stopped.err
    assert "Traceback" not in stopped.err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    run(tmp_path / "run", "train.steps=1", *FAULTY)


@pytest.mark.parametrize("nproc", [1, pytest.param(2, marks=pytest.mark.campaign)])
def test_signal_during_imports_is_remembered(nproc: int, tmp_path: Path) -> None:
    stopped = start(tmp_path / "run", LONG, f"nproc={nproc}", fresh=True)
    wait_until_it_catches(stopped.pids[0], signal.SIGTERM)
    stopped.signal(signal.SIGTERM)
    assert stopped.wait().code == 75
    assert "Traceback" not in stopped.err


# ---------------------------------------------------------------------------------------------------------------
# Notices and deadlines


def test_a_notice_stops_the_run(tmp_path: Path) -> None:
    """One that is there at the start is of an earlier attempt, and means nothing to this one."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notice").touch()
    # The file is looked for once a second.
    fault = Fault(tmp_path / "notes", {"step 2": "sleep 1.2", "step 3": "sleep 1.2"})
    stopped = start(tmp_path / "run", LONG, *FAULTY, variables=fault.variables)
    wait_for_step(stopped, 5)
    assert stopped.is_running, stopped.err
    (tmp_path / "run" / "notice").touch()
    assert_stopped(stopped.wait(), "notice")
    step = stopped.status["step"]
    again = run(tmp_path / "run", f"train.steps={step + 1}", *FAULTY)
    assert [line["resumed_step"] for line in again.of_kind("start")] == [None, step]


@pytest.mark.campaign
@pytest.mark.parametrize("nproc", [1, 2])
def test_notice_during_the_start_counts(nproc: int, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notice").touch()
    stopped = start(tmp_path / "run", LONG, f"nproc={nproc}", fresh=True)
    wait_until_it_catches(stopped.pids[0], signal.SIGTERM)
    while stopped.is_running:  # as a batch file does: the run may take the first for the old one
        (tmp_path / "run" / "notice").touch()
        time.sleep(0.5)
    assert stopped.wait().code == 75, stopped.err
    assert stopped.status["reason"] == "notice"


def test_a_run_stops_while_there_is_time_to_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of its Slurm job is not there yet, but too near for a step and a save."""
    trainer = Trainer(tiny_config(tmp_path, "train.steps=1"))
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 5))
    assert trainer.fit() == 75
    trainer.close()
    ran = Run(tmp_path, [], tmp_path)
    assert ran.status == {"state": "stopped", "exit_code": 75, "step": 0, "reason": "deadline"}
    assert ran.train("step") == []


def test_the_end_of_the_job_stops_all_ranks_alike(tmp_path: Path) -> None:
    past = {"SLURM_JOB_END_TIME": "1700000000"}
    stopped = run(tmp_path / "run", "train.steps=1", "nproc=2", code=75, variables=past)
    assert stopped.status == {"state": "stopped", "exit_code": 75, "step": 0, "reason": "deadline"}
    # What the user sets is heeded instead.
    run(tmp_path / "run", "train.steps=1", "run.deadline=2999-01-31T18:00:00+00:00", variables=past)


@pytest.mark.parametrize("deadline", ["tomorrow", "2020-01-01"])
def test_impossible_deadline_is_a_user_error(deadline: str, tmp_path: Path) -> None:
    """Also one that has passed: a job that is restarted again and again would make one step each time."""
    refused = run(tmp_path / "run", "train.steps=5", f"run.deadline={deadline}", code=2)
    assert refused.err.startswith(f"error: run.deadline={deadline}: ")


@pytest.mark.campaign
def test_run_stops_before_its_job_ends(tmp_path: Path) -> None:
    end = int(time.time()) + 45
    local = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(end))
    stopped = run(tmp_path / "run", LONG, f"run.deadline={local}", code=75)
    assert_stopped(stopped, "deadline")
    assert stopped.of_kind("end")[-1]["time"] < end


# ---------------------------------------------------------------------------------------------------------------
# Launchers


def test_stopped_launcher_passes_on_the_exit_code_of_its_ranks(tmp_path: Path) -> None:
    stopped = start(tmp_path / "run", "nproc=2", LONG, fresh=True)
    wait_for_step(stopped)
    stopped.signal(signal.SIGTERM)
    assert_stopped(stopped.wait(), "SIGTERM")
    assert processes_of(tmp_path / "run") == []


@pytest.mark.campaign
def test_no_rank_survives_its_launcher(tmp_path: Path) -> None:
    killed = start(tmp_path / "run", "nproc=2", LONG, fresh=True)
    wait_for_step(killed)
    killed.kill()
    wait_until(lambda: processes_of(tmp_path / "run") == [], "no rank is left")
    again = run(tmp_path / "run", "train.steps=1", "nproc=2", "checkpoint.resume=none")
    assert again.status["step"] == 1


@pytest.mark.campaign
def test_run_of_nproc_is_finished_under_torchrun(two: SharedRun, tmp_path: Path) -> None:
    folder = two.copy_to(tmp_path / "run", up_to=8)
    own = [item for item in tiny(*two.overrides) if not item.startswith("nproc=")]
    torchrun = [*TORCHRUN, "--standalone", "--nproc-per-node=2", "-m", "trainer.run"]
    finished = launch([*torchrun, "recipe=llama_small", *own, f"run.dir={folder}"], folder).wait()
    assert finished.code == 0, finished.err
    assert [line["resumed_step"] for line in finished.of_kind("start")] == [None, 8]
    assert finished.train("loss") == two.train("loss")
    assert finished.status["state"] == "finished"


@pytest.mark.campaign
def test_launcher_waits_for_a_slow_step_and_save(tmp_path: Path) -> None:
    """Before the first step a process ends within seconds of a signal; a launcher with training ranks must not."""
    gate = Gate(tmp_path / "gate", "step 2 of rank 1")
    stopped = start(tmp_path / "run", LONG, "nproc=2", *FAULTY, fresh=True, variables=gate.variables)
    wait_until(gate.is_reached, "step 2")
    stopped.signal(signal.SIGTERM)
    time.sleep(8)
    gate.open()
    assert_stopped(stopped.wait(), "SIGTERM")


@pytest.mark.campaign
@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_launcher_ends_before_its_ranks_are_connected(how: str, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate", "start of rank 1")
    launcher = start(tmp_path / "run", LONG, "nproc=2", *FAULTY, fresh=True, variables=gate.variables)
    wait_until(gate.is_reached, "rank 1 at the gate")
    if how == "killed":
        launcher.kill()
    else:
        launcher.signal(signal.SIGTERM)
        gate.open()
        assert launcher.wait().code == 75, launcher.err
        assert "Traceback" not in launcher.err
    wait_until(lambda: processes_of(tmp_path / "run") == [], "no rank is left")


# ---------------------------------------------------------------------------------------------------------------
# Terminals and pipes


def words_of(folder: Path, *overrides: str) -> list[str]:
    return [*PYTHON_MODULE, "trainer.run", "recipe=llama_small", *tiny(*overrides), f"run.dir={folder}"]


@pytest.mark.parametrize("nproc", [1, pytest.param(2, marks=pytest.mark.campaign)])
def test_closed_terminal_stops_the_run(nproc: int, tmp_path: Path) -> None:
    """The kernel sends SIGHUP to the whole group, and nobody reads what is printed."""
    words = words_of(tmp_path / "run", LONG, f"nproc={nproc}")
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(REPOSITORY)
        os.execv(words[0], words)
    ran = Run(tmp_path / "run", [], tmp_path)
    ended: list[int] = []

    def has_step() -> bool:
        with contextlib.suppress(OSError):
            os.read(terminal, 65536)
        return bool(ran.train("step"))

    def has_ended() -> bool:
        gone, status = os.waitpid(pid, os.WNOHANG)
        ended.extend([os.waitstatus_to_exitcode(status)] if gone else [])
        return bool(gone)

    try:
        wait_until(has_step, "the first step")
        os.close(terminal)
        wait_until(has_ended, "the end of the run")
    finally:
        if not ended:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    assert ended == [75]
    assert (ran.status["state"], ran.status["reason"]) == ("stopped", "SIGHUP")
    assert ran.steps_saved == [ran.status["step"]]


@pytest.mark.campaign
@pytest.mark.parametrize("nproc", [1, 2])
def test_closed_terminal_has_no_effect_under_nohup(nproc: int, tmp_path: Path) -> None:
    ran = launch(["nohup", *words_of(tmp_path / "run", LONG, f"nproc={nproc}")], tmp_path / "run")
    wait_for_step(ran)
    ran.signal(signal.SIGHUP)
    wait_for_step(ran, ran.train("step")[-1] + 20)
    assert ran.is_running
    ran.signal(signal.SIGTERM)
    assert ran.wait().code == 75


def test_output_whose_reader_is_gone_does_not_stop_a_run(tmp_path: Path) -> None:
    line = " ".join(words_of(tmp_path / "run", "train.steps=20"))
    ran = launch(["sh", "-c", f"{line} | true"], tmp_path / "run")
    status = tmp_path / "run" / "status.json"
    wait_until(lambda: status.exists() and ran.status["state"] != "running", "the end of the run")
    ran.kill()
    assert ran.status == {"state": "finished", "exit_code": 0, "step": 20, "reason": ran.status["reason"]}
    assert ran.train("step") == list(range(1, 21))
    assert "Traceback" not in ran.err


def test_a_pipe_that_is_closed_early_breaks_no_command() -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    command = [sys.executable, "-m", "trainer.run", "recipe=llama_small", "--print-config"]
    done = subprocess.run(command, cwd=REPOSITORY, stdout=theirs, stderr=subprocess.PIPE, text=True)
    os.close(theirs)
    assert (done.returncode, done.stderr) == (0, "")
