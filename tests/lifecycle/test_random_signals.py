"""Signals at random moments of the start, and terminals and pipes that close at random moments of the training.

Moments are random; each failure names its seed. MESHTRAINER_TEST_MOMENTS=N draws N moments for each case.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.distributed.test_processes import processes_of
from tests.helpers.forked import REPOSITORY, popen
from tests.helpers.gate import wait_until
from tests.helpers.ranks import CommandResult, run_tiny, tiny_overrides
from tests.helpers.slurm import FINAL_STATES, Cluster, missing_programs, slurm_cluster

pytestmark = pytest.mark.campaign

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
STEPS = 300
_END_TIMEOUT_S = 30.0


def draws(default: int) -> list[int]:
    """Return the seeds of the moments."""
    return list(range(int(os.environ.get("MESHTRAINER_TEST_MOMENTS", default))))


def command(folder: Path, steps: int, *arguments: str) -> list[str]:
    overrides = tiny_overrides(f"train.steps={steps}", f"run.dir={folder}", *arguments)
    return ["-m", "trainer.run", "recipe=llama_small", *overrides]


def saved_steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in (folder / "checkpoints").glob("step_*"))


def assert_nothing_is_lost(folder: Path, code: int, stderr: str, signals: int) -> None:
    """Stopped with its last step saved, or before there was anything to save, or before our first line ran."""
    assert code in (75, 0, -signals, 128 + signals), f"exit code {code}\n{stderr}"
    wait_until(lambda: not processes_of(folder), "the end of all processes", _END_TIMEOUT_S)
    if (folder / "status.json").exists():
        status = CommandResult(code, "", "", folder).status
        assert status["state"] == "stopped", f"{status}\n{stderr}"
        assert status["step"] == 0 or saved_steps(folder)[-1] == status["step"]
    else:
        assert not saved_steps(folder)


def catches(pid: int, number: signal.Signals) -> bool:
    """Return whether a process has a handler for a signal.

    Before torchrun installs its own, a Ctrl-C is an exception in some import, and some of these drop exceptions: that
    is before our first line runs.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True  # it has ended
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt")), "0")
    return not status or "\nState:\tZ" in status or bool(int(caught, 16) >> (number - 1) & 1)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", draws(4))
@pytest.mark.parametrize("way", ["alone", "nproc", "torchrun"])
def test_a_signal_at_any_moment_of_the_start(way: str, seed: int, tmp_path: Path) -> None:
    drawn = random.Random(f"{way} {seed}")
    for number in SIGNALS:
        after_s, folder = drawn.uniform(0.0, 8.0), tmp_path / number.name
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-endpoint=localhost:0"]
        launcher = torchrun if way == "torchrun" else []
        line = command(folder, 100_000, *(["nproc=2"] if way == "nproc" else []))
        process = popen([sys.executable, *launcher, *line])
        time.sleep(after_s)
        if way == "torchrun" and number == signal.SIGINT:
            wait_until(lambda process=process: catches(process.pid, signal.SIGTERM), "torchrun's handlers", 120)
        process.send_signal(number)
        try:
            _, stderr = process.communicate(timeout=_END_TIMEOUT_S + 15)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{number.name} {after_s:.2f} s after the start: still there after {_END_TIMEOUT_S + 15:.0f} s")
        code = process.returncode
        if way == "torchrun":  # its own code says that a worker was ended, whatever the worker's was
            code = 75 if (folder / "status.json").exists() else 0
        assert_nothing_is_lost(folder, code, f"{number.name} after {after_s:.2f} s\n{stderr}", number)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    assert not missing_programs(), f"CI must have Slurm: {', '.join(missing_programs())} missing"
    with slurm_cluster(num_nodes=2) as cluster:
        yield cluster


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", draws(4))
def test_a_signal_at_any_moment_of_the_start_under_srun(seed: int, cluster: Cluster, tmp_path: Path) -> None:
    drawn = random.Random(f"srun {seed}")
    for number in SIGNALS:
        after_s, folder = drawn.uniform(0.0, 8.0), tmp_path / number.name
        batch = tmp_path / f"{number.name}.sh"
        line = " ".join([sys.executable, *command(folder, 100_000)])
        batch.write_text(f"#!/bin/bash\ncd {REPOSITORY}\nsrun {line}\n")
        job = cluster.submit("--nodes=2", "--ntasks-per-node=1", "--no-requeue", str(batch))
        wait_until(lambda job=job: cluster.job(job)["JobState"] != "PENDING", "the job's start", 60)
        time.sleep(after_s)
        said = f"{number.name} after {after_s:.2f} s"
        is_there = any("trainer.run" in line and "srun" not in line for line in processes_of(folder))
        cluster.call("scancel", f"--signal={number.name.removeprefix('SIG')}", job, check=False)
        try:
            wait_until(
                lambda job=job: cluster.job(job)["JobState"] in FINAL_STATES,
                f"the end of {job}: {said}",
                _END_TIMEOUT_S,
            )
        except AssertionError:
            if not is_there:  # the step had no process yet that a signal could reach
                cluster.call("scancel", job)
                continue
            raise
        wait_until(lambda folder=folder: not processes_of(folder), "the end of all processes", _END_TIMEOUT_S)
        if (folder / "status.json").exists():
            assert_nothing_is_lost(folder, 75, said + cluster.log(job), number)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[float]]:
    folder = tmp_path_factory.mktemp("undisturbed")
    return {n: run_tiny(folder / str(n), f"train.steps={STEPS}", f"nproc={n}").train("loss") for n in (1, 2)}


def wait_for(folder: Path, step: int) -> None:
    path = folder / "metrics.jsonl"
    wait_until(lambda: path.exists() and f'"step": {step},' in path.read_text(), f"step {step}", 120)


def in_a_terminal(line: list[str], name: str) -> None:
    """Start a command in a terminal that `leave_the_terminal` closes."""
    quoted = " ".join(line)
    subprocess.run(
        ["tmux", "-L", name, "new-session", "-d", "-x", "120", "-y", "40", quoted], cwd=REPOSITORY, check=True
    )


def leave_the_terminal(name: str) -> None:
    subprocess.run(["tmux", "-L", name, "kill-server"], check=True)


@pytest.mark.parametrize("seed", draws(8))
@pytest.mark.parametrize("way", ["SIGHUP", "SIGQUIT", "stdout", "stderr", "terminal"])
def test_terminal_or_pipe_closes_at_any_moment(
    way: str, seed: int, undisturbed: dict[int, list[float]], tmp_path: Path
) -> None:
    """The run saves and resumes bit-identically, or is not affected at all; on one rank and on two in turn."""
    drawn, ranks, folder = random.Random(f"{way} {seed}"), 1 + seed % 2, tmp_path / "run"
    step = drawn.randrange(1, STEPS - 50)
    line = [sys.executable, *command(folder, STEPS, f"nproc={ranks}")]
    if way == "terminal":
        if shutil.which("tmux") is None:
            pytest.skip("needs tmux")
        name = f"meshtrainer-{os.getpid()}-{seed}"
        in_a_terminal(line, name)
        wait_for(folder, step)
        leave_the_terminal(name)
    else:
        process = popen(line)
        wait_for(folder, step)
        if way.startswith("SIG"):
            whom = drawn.choice([process.send_signal, partial(os.killpg, process.pid)])
            whom(signal.Signals[way])
            _, stderr = process.communicate(timeout=60)
            assert process.returncode == 75, stderr
        else:
            (process.stdout if way == "stdout" else process.stderr).close()  # type: ignore[union-attr]
            process.stdout = None if way == "stdout" else process.stdout
            process.stderr = None if way == "stderr" else process.stderr
            process.communicate(timeout=120)
            assert process.returncode == 0
    wait_until(lambda: not processes_of(folder), "the end of all processes", 60)
    status = CommandResult(0, "", "", folder).status
    assert saved_steps(folder)[-1] == status["step"]
    assert (status["state"] == "finished") is (status["step"] == STEPS)
    assert (status["step"] == STEPS) is (way in ("stdout", "stderr")), f"{way} at step {step}: {status}"
    ran = run_tiny(folder, f"train.steps={STEPS}", f"nproc={ranks}")
    assert ran.train("loss") == undisturbed[ranks]
