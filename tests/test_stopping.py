"""Stopping on request: whatever asks, and whenever; and nothing is left when the launcher is killed."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.ranks import REPOSITORY, Ran, run_tiny, tiny_overrides
from tests.test_processes import processes_of, wait_for_step
from trainer import UserError, load_config
from trainer.config import check_config, find_deadline
from trainer.stop import StopRequest


def start(folder: Path, *overrides: str) -> subprocess.Popen[str]:
    arguments = tiny_overrides("train.steps=100000", f"run.dir={folder}", *overrides)
    command = [sys.executable, "-m", "trainer.run", "recipe=llama_small", *arguments]
    return subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str], folder: Path, timeout_s: float = 60) -> Ran:
    stdout, stderr = process.communicate(timeout=timeout_s)
    return Ran(process.returncode, stdout, stderr, folder)


def wait_until_it_catches(pid: int, number: signal.Signals) -> None:
    """Wait for the process to have a handler: an interpreter that has only just begun has none."""
    caught, deadline = 0, time.monotonic() + 30
    while not caught >> (number - 1) & 1:
        assert time.monotonic() < deadline
        time.sleep(0.01)
        found = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
        caught = int(found[1], 16) if found else 0


@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.parametrize("after_s", [0.0, 0.6, 1.5, 2.5, 3.5])
def test_a_signal_during_the_start_is_kept(after_s: float, nproc: int, tmp_path: Path) -> None:
    process = start(tmp_path / "run", f"nproc={nproc}")
    wait_until_it_catches(process.pid, signal.SIGTERM)
    time.sleep(after_s)
    process.send_signal(signal.SIGTERM)
    ran = ended(process, tmp_path / "run")
    assert ran.exit_code == 75, ran.stderr
    assert "Traceback" not in ran.stderr
    if (tmp_path / "run" / "status.json").exists():
        assert ran.status["state"] == "stopped"


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_notice_stops_the_run(nproc: int, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "notice").touch()  # of an attempt before: of no meaning to this one
    process = start(folder, f"nproc={nproc}")
    wait_for_step(folder)
    time.sleep(1)
    assert process.poll() is None
    (folder / "notice").touch()
    ran = ended(process, folder)
    assert ran.exit_code == 75, ran.stderr
    assert ran.status["reason"] == "notice"
    assert (folder / "checkpoints" / f"step_{ran.status['step']:08d}").is_dir()
    again = run_tiny(folder, f"train.steps={ran.status['step'] + 1}", f"nproc={nproc}")
    assert again.status["state"] == "finished"


def test_the_end_of_the_job_stops_the_run(tmp_path: Path) -> None:
    """It has stopped, saved and left before the end, but not long before: it reserves 5 s, two updates and a save."""
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


def test_it_begins_to_stop_early_enough(tmp_path: Path) -> None:
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


def test_the_ranks_end_when_their_launcher_is_killed(tmp_path: Path) -> None:
    process = start(tmp_path / "run", "nproc=2")
    wait_for_step(tmp_path / "run")
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and processes_of(tmp_path / "run"):
        time.sleep(0.5)
    assert processes_of(tmp_path / "run") == []
    assert run_tiny(tmp_path / "run", "train.steps=1", "nproc=2", "checkpoint.resume=none").status["step"] == 1


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_notice_during_the_start_is_one(nproc: int, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "notice").touch()
    process = start(folder, f"nproc={nproc}")
    wait_until_it_catches(process.pid, signal.SIGTERM)
    asked = time.monotonic()
    while process.poll() is None:  # as a batch file does: the run may take the first for the old one
        assert time.monotonic() - asked < 60
        (folder / "notice").touch()
        time.sleep(0.5)
    ran = ended(process, folder)
    assert ran.exit_code == 75, ran.stderr
    assert ran.status["reason"] == "notice"


def test_a_signal_ends_an_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is given up: whoever asked does not wait for its end.  No record of it is left; the state is saved."""
    folder, marker = tmp_path / "run", tmp_path / "evaluates"
    monkeypatch.setenv("MESHTRAINER_TEST_REST_S", "1")  # and so each batch of the evaluation takes a second
    monkeypatch.setenv("MESHTRAINER_TEST_MARKER", str(marker))
    own = ["model.name=tests.slow_trainer:slow_llama", "model.vocab_size=257", "model.num_kv_heads=2"]
    process = start(folder, "eval.every=2", "eval.steps=200", *own)
    deadline = time.monotonic() + 90
    while not marker.exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    asked = time.monotonic()
    ran = ended(process, folder, timeout_s=120)
    seconds = time.monotonic() - asked
    print(f"ended {seconds:.1f} s after the signal")
    assert seconds < 60, "of more than 200 that the evaluation takes"
    assert ran.exit_code == 75, ran.stderr
    assert (folder / "checkpoints" / "step_00000002").is_dir()
    assert [record["kind"] for record in ran.metrics if record["kind"] == "eval"] == []


def test_a_deadline_that_has_passed_is_a_mistake(tmp_path: Path) -> None:
    """Or a job that is started again and again would make one update each time."""
    ran = run_tiny(tmp_path / "run", "train.steps=5", "run.deadline=2020-01-01", ends=2)
    assert "run.deadline=2020-01-01: has passed already" in ran.stderr


def test_a_job_without_time_makes_no_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1700000000")
    ran = run_tiny(tmp_path / "run", "train.steps=5", "nproc=2", ends=75)
    assert ran.status == {"state": "stopped", "exit_code": 75, "step": 0, "reason": "deadline"}
    assert ran.train("step") == []


def test_a_signal_while_the_other_ranks_are_missing(tmp_path: Path) -> None:
    """The meeting of the ranks blocks in torch's own code, for as long as run.timeout_s."""
    arguments = tiny_overrides("train.steps=5", f"run.dir={tmp_path}")
    command = [sys.executable, "-m", "trainer.run", "recipe=llama_small", *arguments]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    env = os.environ | ranks | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    process = subprocess.Popen(
        command, cwd=REPOSITORY, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not _answers(int(port)):  # rank 0 keeps the store, so it is there once that listens
        assert time.monotonic() < deadline
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    ran = ended(process, tmp_path / "run")
    assert ran.exit_code == 75, ran.stderr
    assert "Traceback" not in ran.stderr


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_the_last_evaluation_is_made_up_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last update was saved before it: what is owed is saved too."""
    own = ["model.name=tests.slow_trainer:slow_llama", "model.vocab_size=257", "model.num_kv_heads=2"]
    own += ["train.steps=4", "checkpoint.every=4", "eval.every=3", "eval.steps=3", "log.every=1"]
    monkeypatch.setenv("MESHTRAINER_TEST_REST_S", "1")  # for each update, and each batch of an evaluation
    command = [sys.executable, "-m", "trainer.run", "recipe=llama_small", *tiny_overrides(*own)]
    process = subprocess.Popen(
        [*command, f"run.dir={tmp_path / 'run'}"], cwd=REPOSITORY, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 90
    while not (tmp_path / "run" / "checkpoints" / "step_00000004").is_dir():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    ran = ended(process, tmp_path / "run")
    assert ran.exit_code == 75, ran.stderr
    again = run_tiny(tmp_path / "run", *own)
    assert [line["step"] for line in again.metrics if line["kind"] == "eval"] == [3, 4]


def test_what_is_said_to_nobody_does_not_end_a_thread() -> None:
    """Whoever read stderr has died with the launcher; the rank still has to announce that, and to end."""
    code = "from trainer.errors import say; say('lost'); print('goes on')"
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=writer, text=True)
    finally:
        os.close(writer)
    assert (ended.returncode, ended.stdout) == (0, "goes on\n")
