"""Signals at random moments of the start under each launcher, preemptions of one run, and terminals that close.

Moments are random; each failure names its seed.
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
from pathlib import Path

import pytest

from tests.helpers.faults import Fault, catches, processes_of
from tests.helpers.gate import wait_until
from tests.helpers.launch import REPOSITORY, TORCHRUN, Run, launch, run, start, tiny
from tests.helpers.slurm import FINAL_STATES, Cluster, missing_programs, slurm_cluster

pytestmark = pytest.mark.campaign

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def words_of(folder: Path, *overrides: str) -> list[str]:
    return ["-m", "trainer.run", "recipe=llama_small", *tiny(*overrides), f"run.dir={folder}"]


def assert_nothing_is_lost(ran: Run, said: str) -> None:
    """Stopped with its last step saved, or before there was anything to save."""
    wait_until(lambda: not processes_of(ran.folder), f"the end of all processes: {said}")
    if (ran.folder / "status.json").exists():
        assert ran.status["state"] == "stopped", f"{ran.status} {said}"
        assert ran.status["step"] == max(ran.steps_saved, default=0), said
    else:
        assert not ran.steps_saved, said


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("way", ["alone", "nproc", "torchrun"])
def test_a_signal_at_any_moment_of_the_start(way: str, number: signal.Signals, tmp_path: Path) -> None:
    after_s = random.Random(f"{way} {number}").uniform(0.0, 8.0)
    own = words_of(tmp_path / "run", "train.steps=1000000", *(["nproc=2"] if way == "nproc" else []))
    torchrun = [*TORCHRUN[1:], "--nproc-per-node=2", "--rdzv-endpoint=localhost:0"] if way == "torchrun" else []
    ran = launch([sys.executable, *torchrun, *own], tmp_path / "run")
    time.sleep(after_s)
    if way == "torchrun" and number == signal.SIGINT:
        # Before it has handlers, a Ctrl-C is an exception in some import, and some of these drop exceptions.
        wait_until(lambda: not ran.is_running or catches(ran.pids[0], signal.SIGTERM), "torchrun's handlers")
    ran.signal(number)
    said = f"{number.name} after {after_s:.2f} s: {ran.wait().err}"
    if way != "torchrun":  # whose own code says that a worker was ended, whatever the worker's was
        assert ran.code in (75, -number, 128 + number), said  # before our first line runs, the signal's own
    assert_nothing_is_lost(ran, said)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    assert not missing_programs(), f"CI must have Slurm: {', '.join(missing_programs())} missing"
    with slurm_cluster(num_nodes=2) as cluster:
        yield cluster


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_at_any_moment_of_the_start_under_srun(
    number: signal.Signals, cluster: Cluster, tmp_path: Path
) -> None:
    after_s, folder = random.Random(f"srun {number}").uniform(0.0, 8.0), tmp_path / "run"
    line = " ".join([sys.executable, *words_of(folder, "train.steps=1000000")])
    (tmp_path / "batch.sh").write_text(f"#!/bin/bash\ncd {REPOSITORY}\nsrun {line}\n")
    job = cluster.submit("--nodes=2", "--ntasks-per-node=1", "--no-requeue", str(tmp_path / "batch.sh"))
    wait_until(lambda: cluster.job(job)["JobState"] != "PENDING", "the job's start")
    time.sleep(after_s)
    # Before the step has a process, a signal reaches nobody.
    wait_until(lambda: any("trainer.run" in line and "srun" not in line for line in processes_of(folder)), "a rank")
    cluster.call("scancel", f"--signal={number.name.removeprefix('SIG')}", job, check=False)
    wait_until(lambda: cluster.job(job)["JobState"] in FINAL_STATES, f"the end of the job: {cluster.log(job)}")
    assert_nothing_is_lost(Run(folder, [], tmp_path), f"{number.name} after {after_s:.2f} s: {cluster.log(job)}")


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("way", ["SIGHUP", "SIGQUIT", "terminal"])
def test_terminal_closes_at_any_moment(way: str, seed: int, tmp_path: Path) -> None:
    """The run saves, and the same command continues it bit for bit; on one rank and on two."""
    drawn, own = random.Random(f"{way} {seed}"), ["train.steps=200", f"nproc={1 + seed % 2}"]
    undisturbed = run(tmp_path / "undisturbed", *own)
    ran = Run(tmp_path / "run", [], tmp_path)
    words, step = [sys.executable, *words_of(ran.folder, *own)], drawn.randrange(1, 100)
    if way == "terminal":
        if shutil.which("tmux") is None:
            pytest.skip("needs tmux")
        tmux = ["tmux", "-L", f"meshtrainer-{os.getpid()}-{seed}"]
        started = [*tmux, "new-session", "-d", "-x", "120", "-y", "40", " ".join(words)]
        subprocess.run(started, cwd=REPOSITORY, check=True)
        wait_until(lambda: step in ran.train("step"), f"step {step}")
        subprocess.run([*tmux, "kill-server"], check=True)
    else:
        ran = launch(words, ran.folder)
        wait_until(lambda: step in ran.train("step"), f"step {step}")
        whom = os.killpg if drawn.random() < 0.5 else os.kill
        whom(ran.pids[0], signal.Signals[way])
        assert ran.wait().code == 75, ran.err
    assert_nothing_is_lost(ran, f"{way} at step {step}")
    assert run(ran.folder, *own).train("loss") == undisturbed.train("loss")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("more", [[], ["nproc=2"], ["train.compile=true"]], ids=["1 rank", "2 ranks", "compiled"])
def test_ten_preemptions(more: list[str], tmp_path: Path) -> None:
    """Of one run, at random moments: it ends with the losses of an undisturbed run."""
    own = ["model.name=tests.helpers.custom_recipes:llama_faulty", "model.vocab_size=257", "model.num_kv_heads=2"]
    own += ["train.steps=200", "checkpoint.every=3", "eval.every=5", "eval.steps=3", "data.num_workers=1", *more]
    alone = run(tmp_path / "alone", *own)
    draw, folder = random.Random(5), tmp_path / "run"
    for number in range(10):
        at = {f"step {step}": "sleep 0.1" for step in range(1, 200)}
        fault = Fault(tmp_path / f"notes-{number}", at)
        ran = start(folder, *own, fresh=True, variables=fault.variables)
        step = draw.randrange(20 * number, 20 * number + 15)
        wait_until(lambda step=step, ran=ran: step <= max(ran.train("step"), default=0), f"step {step}")
        while ran.is_running and number % 3 == 2:  # repeatedly, as a batch script does
            (folder / "notice").touch()
            time.sleep(0.5)
        ran.signal((signal.SIGTERM, signal.SIGUSR1)[number % 2])
        assert ran.wait().code == 75, ran.err
    ended = run(folder, *own)
    assert ended.train("step") == list(range(1, 201))
    assert ended.train("loss") == alone.train("loss")
    # An evaluation that a stop has aborted is made up for.
    evaluations = [{line["step"]: line["loss"] for line in ran.of_kind("eval")} for ran in (ended, alone)]
    assert evaluations[0] == evaluations[1]
