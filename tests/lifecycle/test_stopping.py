"""Stopping on request, by every means and at every moment. If the launcher is killed, no process is left."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.distributed.test_processes import processes_of, wait_for_step
from tests.helpers.faults import StartedRun
from tests.helpers.faults import start as start_faulty
from tests.helpers.forked import REPOSITORY, free_port, popen, rank_variables, start_run
from tests.helpers.gate import Gate, wait_until
from tests.helpers.ranks import CommandResult, run_tiny, tiny_overrides
from tests.helpers.tiny import tiny_config
from trainer import Trainer, UserError, load_config
from trainer.config import check_config, find_deadline
from trainer.distributed.stop_request import StopRequest
from trainer.metrics.record import Record

pytestmark = pytest.mark.slow

SLOW = ["model.name=tests.helpers.slow_trainer:slow_llama", "model.vocab_size=257", "model.num_kv_heads=2"]


def start(folder: Path, *overrides: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Start `python -m trainer.run` in a fresh interpreter, with torch's launcher if there is one."""
    arguments = tiny_overrides("train.steps=100000", f"run.dir={folder}", *overrides)
    command = [sys.executable, "-m", "trainer.run", "recipe=llama_small", *arguments]
    return popen(command, env=os.environ | (env or {}))


def ended(process: subprocess.Popen[str], folder: Path, timeout_s: float = 240) -> CommandResult:
    stdout, stderr = process.communicate(timeout=timeout_s)
    return CommandResult(process.returncode, stdout, stderr, folder)


def start_forked(folder: Path, *overrides: str, ranks: int = 1, env: dict[str, str] | None = None) -> StartedRun:
    """Start forked ranks without a launcher, for tests that are not about the start."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (env or {}).items():
            patch.setenv(name, value)
        return start_faulty(folder, "recipe=llama_small", *overrides, ranks=ranks)


def wait_until_it_catches(pid: int, number: signal.Signals) -> None:
    """Wait for the process to have a handler: an interpreter that has only just begun has none."""

    def catches() -> bool:
        found = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
        return bool(found and int(found[1], 16) >> (number - 1) & 1)

    wait_until(catches, f"a handler of {number.name}")


def test_signal_during_imports_is_remembered(tmp_path: Path) -> None:
    """From the moment it can be caught, seconds before there is a Trainer."""
    signal_during_the_start(0.0, 1, tmp_path)


@pytest.mark.campaign
@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.parametrize("after_s", [0.0, 0.6, 1.5, 2.5, 3.5])
def test_signal_during_the_start_is_remembered(after_s: float, nproc: int, tmp_path: Path) -> None:
    signal_during_the_start(after_s, nproc, tmp_path)


def signal_during_the_start(after_s: float, nproc: int, tmp_path: Path) -> None:
    process = start(tmp_path / "run", f"nproc={nproc}")
    wait_until_it_catches(process.pid, signal.SIGTERM)
    time.sleep(after_s)
    process.send_signal(signal.SIGTERM)
    ran = ended(process, tmp_path / "run")
    assert ran.exit_code == 75, ran.stderr
    assert "Traceback" not in ran.stderr
    if (tmp_path / "run" / "status.json").exists():
        assert ran.status["state"] == "stopped"


@pytest.mark.parametrize("nproc", [2, pytest.param(1, marks=pytest.mark.campaign)])
def test_a_notice_stops_the_run(nproc: int, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "notice").touch()  # of an attempt before: of no meaning to this one
    run = start_forked(folder, *tiny_overrides("train.steps=100000"), ranks=nproc)
    wait_for_step(folder)
    began = CommandResult(0, "", "", folder).metrics[1]["time"]
    wait_until(lambda: time.time() > began + 2 * StopRequest.POLL_S, "it has looked for a notice meanwhile")
    assert run.processes[0].is_alive()
    (folder / "notice").touch()
    ran = run.ran(240)
    assert ran.exit_code == 75, ran.stderr
    assert ran.status["reason"] == "notice"
    assert (folder / "checkpoints" / f"step_{ran.status['step']:08d}").is_dir()
    again = run_tiny(folder, f"train.steps={ran.status['step'] + 1}", f"nproc={nproc}")
    assert again.status["state"] == "finished"


class SignalsItself(Trainer):
    number = signal.SIGTERM

    def on_step(self, record: Record) -> None:
        if record.step == 2:
            signal.raise_signal(self.number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT])
def test_each_signal_stops_a_run(number: signal.Signals, tmp_path: Path) -> None:
    signal.signal(number, lambda *_: None)  # else one that the run does not catch would end the tests
    trainer = SignalsItself(tiny_config(tmp_path, "train.steps=9"))
    trainer.number = number
    assert trainer.fit() == 75
    trainer.close()
    status = json.loads((tmp_path / "status.json").read_text())
    assert status == {"state": "stopped", "exit_code": 75, "step": 3, "reason": number.name}
    assert (tmp_path / "checkpoints" / "step_00000003").is_dir()


@pytest.mark.campaign
def test_run_stops_before_its_job_ends(tmp_path: Path) -> None:
    """It has saved and ended before that, but not long before: it reserves 5 s, two steps and a save."""
    end = int(time.time()) + 45
    local = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(end))
    ran = ended(start(tmp_path / "run", f"run.deadline={local}"), tmp_path / "run", timeout_s=120)
    left_s = end - time.time()
    print(f"{left_s:.1f} s were left")
    assert ran.exit_code == 75, ran.stderr
    assert ran.status["reason"] == "deadline"
    assert 0 < left_s < 30


def test_deadlines() -> None:
    config = load_config("llama_small")
    assert find_deadline(config, {}) is None
    assert find_deadline(config, {"SLURM_JOB_END_TIME": "1700000000"}) == 1.7e9
    own = load_config("llama_small", ["run.deadline=2026-01-31T18:00:00+00:00"])
    assert find_deadline(own, {"SLURM_JOB_END_TIME": "1"}) == 1769882400.0
    with pytest.raises(UserError, match=r"run\.deadline=tomorrow: must be a time"):
        check_config(load_config("llama_small", ["run.deadline=tomorrow"]), 1, 1)


def test_stop_begins_early_enough_for_a_deadline(tmp_path: Path) -> None:
    now = 100.0
    request = StopRequest(clock=lambda: now)
    request.watch(tmp_path / "notice", deadline=130.0)
    assert request.reason(needs_s=29) is None
    assert request.reason(needs_s=30) == "deadline"
    request.watch(tmp_path / "notice", deadline=None)
    (tmp_path / "notice").touch()
    assert request.reason() is None, "it has looked less than a second ago"
    now += 1
    assert request.reason() == "notice"


@pytest.mark.campaign
def test_launcher_waits_for_a_slow_step_and_save(tmp_path: Path) -> None:
    """Before the first step a process ends within seconds of a signal; a launcher with training ranks must not."""
    process = start(tmp_path / "run", "nproc=2", *SLOW, env={"MESHTRAINER_TEST_REST_S": "5"})
    wait_for_step(tmp_path / "run")
    process.send_signal(signal.SIGTERM)
    ran = ended(process, tmp_path / "run")
    assert ran.exit_code == 75, ran.stderr
    assert (ran.status["state"], ran.status["exit_code"]) == ("stopped", 75)
    assert (tmp_path / "run" / "checkpoints" / f"step_{ran.status['step']:08d}").is_dir()


def test_the_ranks_end_when_their_launcher_is_killed(tmp_path: Path) -> None:
    process = start(tmp_path / "run", "nproc=2")
    wait_for_step(tmp_path / "run")
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=240)
    wait_until(lambda: processes_of(tmp_path / "run") == [], "no rank is left", timeout_s=60)
    assert run_tiny(tmp_path / "run", "train.steps=1", "nproc=2", "checkpoint.resume=none").status["step"] == 1


@pytest.mark.parametrize("nproc", [1, pytest.param(2, marks=pytest.mark.campaign)])
def test_notice_during_the_start_counts(nproc: int, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "notice").touch()
    process = start(folder, f"nproc={nproc}")
    wait_until_it_catches(process.pid, signal.SIGTERM)
    asked = time.monotonic()
    while process.poll() is None:  # as a batch file does: the run may take the first for the old one
        assert time.monotonic() - asked < 240
        (folder / "notice").touch()
        time.sleep(0.5)
    ran = ended(process, folder)
    assert ran.exit_code == 75, ran.stderr
    assert ran.status["reason"] == "notice"


def test_signal_aborts_an_evaluation(tmp_path: Path) -> None:
    """The stop does not wait for its end. No record of the evaluation is written; the state is saved."""
    folder, gate = tmp_path / "run", Gate(tmp_path / "gate", "evaluation 2")
    own = tiny_overrides("train.steps=100000", "eval.every=2", "eval.steps=200", *SLOW)
    run = start_forked(folder, *own, env=gate.variables)
    wait_until(gate.is_reached, "the first batch of the evaluation")
    os.kill(run.processes[0].pid, signal.SIGTERM)
    gate.open()
    ran = run.ran(240)
    assert gate.num_passed < 20, "of 200 sequences that the evaluation has"
    assert ran.exit_code == 75, ran.stderr
    assert (folder / "checkpoints" / "step_00000002").is_dir()
    assert [record["kind"] for record in ran.metrics if record["kind"] == "eval"] == []


def test_deadline_in_the_past_is_a_user_error(tmp_path: Path) -> None:
    """Otherwise a job that is restarted again and again would make one step each time."""
    ran = run_tiny(tmp_path / "run", "train.steps=5", "run.deadline=2020-01-01", exit_code=2)
    assert "run.deadline=2020-01-01: has already passed" in ran.stderr


def test_job_without_remaining_time_makes_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1700000000")
    ran = run_tiny(tmp_path / "run", "train.steps=5", "nproc=2", exit_code=75)
    assert ran.status == {"state": "stopped", "exit_code": 75, "step": 0, "reason": "deadline"}
    assert ran.train("step") == []


def rank_of(folder: Path, rank: int) -> int:
    """Return the process of a rank that a launcher has started."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_ours = str(folder).encode() in (path / "cmdline").read_bytes()
            if is_ours and f"RANK={rank}".encode() in (path / "environ").read_bytes().split(b"\0"):
                return int(path.name)
    raise AssertionError(f"no rank {rank}")


def is_idle(pid: int) -> bool:
    """Return whether a process has used (almost) no time of the CPU for a second."""

    def used() -> int:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    before = used()
    time.sleep(1)
    return used() - before <= 5


@pytest.mark.campaign
def test_signal_while_one_rank_is_missing(tmp_path: Path) -> None:
    """The others wait for it, and in torch's code they would not handle signals: all leave together, with 75."""
    folder, gate = tmp_path / "run", Gate(tmp_path / "gate", "import 1")
    process = start(folder, "nproc=2", *SLOW, env=gate.variables)
    wait_until(gate.is_reached, "rank 1 at the gate")
    wait_until(lambda: is_idle(rank_of(folder, 0)), "rank 0 where it waits for rank 1")
    process.send_signal(signal.SIGTERM)
    gate.open()
    ran = ended(process, folder, timeout_s=120)
    assert ran.exit_code == 75, ran.stderr
    assert "Traceback" not in ran.stderr
    wait_until(lambda: processes_of(folder) == [], "no rank is left", timeout_s=30)


@pytest.mark.campaign
def test_launcher_is_killed_before_its_ranks_are_connected(tmp_path: Path) -> None:
    folder, gate = tmp_path / "run", Gate(tmp_path / "gate", "import 1")
    process = start(folder, "nproc=2", *SLOW, env=gate.variables)
    wait_until(gate.is_reached, "rank 1 at the gate")
    process.kill()
    process.communicate(timeout=60)
    wait_until(lambda: processes_of(folder) == [], "no rank is left", timeout_s=30)


def test_signal_while_all_other_ranks_are_missing(tmp_path: Path) -> None:
    """Connecting blocks in torch's own code, for up to run.timeout_s."""
    arguments = tiny_overrides("train.steps=5", f"run.dir={tmp_path}")
    command = [sys.executable, "-m", "trainer.run", "recipe=llama_small", *arguments]
    port = free_port()
    env = os.environ | rank_variables(0, 2, str(port))
    process = popen(command, env=env)
    wait_until(lambda: _answers(port), "rank 0 keeps the store, so it is there once that listens")
    process.send_signal(signal.SIGTERM)
    ran = ended(process, tmp_path / "run")
    assert ran.exit_code == 75, ran.stderr
    assert "Traceback" not in ran.stderr


def test_signal_while_a_connected_rank_is_stuck(tmp_path: Path) -> None:
    """While a process group is opened no signal is handled, so the ranks first agree through the store."""
    port = free_port()
    arguments = tiny_overrides("train.steps=5", f"run.dir={tmp_path / 'run'}")
    rank = start_run(["recipe=llama_small", *arguments], tmp_path, variables=rank_variables(0, 2, str(port)))
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=False, timeout=timedelta(seconds=60))
    store.wait(["meshtrainer/0/start/joined"], timedelta(seconds=60))
    rank.processes[0].terminate()
    assert rank.wait() == [75], rank.stderr


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_missed_final_evaluation_is_made_up_for(tmp_path: Path) -> None:
    """The last step was saved before the evaluation; the checkpoint records that it is missing."""
    own = [*SLOW, "train.steps=4", "checkpoint.every=4", "eval.every=3", "eval.steps=3", "log.every=1"]
    gate = Gate(tmp_path / "gate", "evaluation 4")
    run = start_forked(tmp_path / "run", *tiny_overrides(*own), env=gate.variables)
    wait_until(gate.is_reached, "the last evaluation")
    wait_until((tmp_path / "run" / "checkpoints" / "step_00000004").is_dir, "the checkpoint before it")
    os.kill(run.processes[0].pid, signal.SIGTERM)
    gate.open()
    ran = run.ran(240)
    assert ran.exit_code == 75, ran.stderr
    assert [line["step"] for line in ran.metrics if line["kind"] == "eval"] == [3]
    again = run_tiny(tmp_path / "run", *own)
    assert [line["step"] for line in again.metrics if line["kind"] == "eval"] == [3, 4]


def test_closed_stderr_does_not_end_a_thread() -> None:
    """The reader of stderr died with the launcher; the rank must still announce that, and end."""
    code = "from trainer.errors import print_stderr; print_stderr('lost'); print('goes on')"
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=writer, text=True)
    finally:
        os.close(writer)
    assert (ended.returncode, ended.stdout) == (0, "goes on\n")


# ---------------------------------------------------------------------------------------------------------------
# Terminals


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT])
def test_closed_terminal_and_quit_signal_stop_the_run(number: signal.Signals, tmp_path: Path) -> None:
    """SIGQUIT also prints the stacks of all threads."""
    folder = tmp_path / "run"
    run = start_forked(folder, *tiny_overrides("train.steps=100000"))
    wait_for_step(folder)
    os.kill(run.processes[0].pid, number)
    ran = run.ran()
    assert ran.exit_code == 75, ran.stderr
    assert ran.status["state"] == "stopped"
    assert ran.status["reason"] == number.name
    assert (folder / "checkpoints" / f"step_{ran.status['step']:08d}").is_dir()
    assert (number == signal.SIGQUIT) == ("most recent call first" in ran.stderr)
    assert ran.stderr.count("Stopping: finishing this step and saving") == 1


@pytest.mark.campaign
def test_terminal_of_the_launcher_is_closed(tmp_path: Path) -> None:
    """The kernel sends SIGHUP to the whole group, the launcher forwards its own, and output has no reader."""
    folder = tmp_path / "run"
    process = start(folder, "nproc=2")
    wait_for_step(folder)
    process.stdout.close()  # type: ignore[union-attr]
    process.stderr.close()  # type: ignore[union-attr]
    os.killpg(process.pid, signal.SIGHUP)
    assert process.wait(240) == 75
    status = CommandResult(75, "", "", folder).status
    assert status["state"] == "stopped"
    assert (folder / "checkpoints" / f"step_{status['step']:08d}").is_dir()


@pytest.mark.campaign
@pytest.mark.parametrize("nproc", [1, 2])
def test_closed_terminal_has_no_effect_under_nohup(nproc: int, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    arguments = tiny_overrides("train.steps=100000", f"nproc={nproc}", f"run.dir={folder}")
    command = ["nohup", sys.executable, "-m", "trainer.run", "recipe=llama_small", *arguments]
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = popen(command, **quiet)
    wait_for_step(folder)
    process.send_signal(signal.SIGHUP)
    seen = len(CommandResult(0, "", "", folder).train("step"))
    wait_until(lambda: process.poll() or len(CommandResult(0, "", "", folder).train("step")) > seen + 20, "more steps")
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(240) == 75


@pytest.mark.parametrize("reader", ["goes", pytest.param("stops reading", marks=pytest.mark.campaign)])
def test_output_without_a_reader_does_not_stop_a_run(reader: str, tmp_path: Path) -> None:
    """The console can neither stop nor delay a run."""
    folder = tmp_path / "run"
    arguments = tiny_overrides("train.steps=80", f"run.dir={folder}")
    command = [sys.executable, "-m", "trainer.run", "recipe=llama_small", *arguments]
    ours, theirs = os.pipe()
    if reader == "stops reading":  # from the first byte on: the pipe is full
        os.set_blocking(theirs, False)
        with contextlib.suppress(BlockingIOError):
            while os.write(theirs, bytes(4096)):
                pass
        os.set_blocking(theirs, True)
    process = popen(command, stdout=theirs)
    os.close(theirs)
    if reader == "goes":
        wait_for_step(folder)
        os.close(ours)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert "Traceback" not in stderr
    assert stderr.count("warning: standard output was closed") == (reader == "goes"), stderr
    ran = CommandResult(0, "", "", folder)
    assert ran.status["state"] == "finished"
    assert ran.train("step")[-1] == 80
    if reader != "goes":
        os.close(ours)


@pytest.mark.parametrize("arguments", [["--help"], ["recipe=llama_small", "--print-config"]])
def test_a_pipe_that_is_closed_early_breaks_no_command(arguments: list[str]) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    command = [sys.executable, "-m", "trainer.run", *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, stdout=theirs, stderr=subprocess.PIPE, text=True)
    os.close(theirs)
    assert (done.returncode, done.stderr) == (0, "")


def test_second_interrupt_ends_a_stuck_run_cleanly(tmp_path: Path) -> None:
    """It ends a run that is stuck in its step, with status.json written and the lock released."""
    folder, gate = tmp_path / "run", Gate(tmp_path / "gate", "evaluation 2")
    own = tiny_overrides("train.steps=100000", "eval.every=2", "eval.steps=2", *SLOW)
    run = start_forked(folder, *own, env=gate.variables)
    wait_until(gate.is_reached, "the evaluation, in which it stays")
    os.kill(run.processes[0].pid, signal.SIGINT)
    wait_until(lambda: "Stopping: finishing this step and saving" in run.stderr, "the answer, before the step ends")
    os.kill(run.processes[0].pid, signal.SIGINT)
    ran = run.ran()
    assert ran.exit_code == 1
    assert ran.status["state"] == "failed"
    assert ran.status["reason"] == "a second Ctrl-C"
    assert not (folder / ".owner.json").exists()
    assert "Traceback" not in ran.stderr
