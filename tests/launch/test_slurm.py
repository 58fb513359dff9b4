"""The batch files of launch/ on a real Slurm cluster: they train, are disturbed, and continue under the same job id.

Each disturbed run has the losses of an undisturbed one, bit for bit.
"""

from __future__ import annotations

import math
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.gate import wait_until
from tests.helpers.launch import REPOSITORY, Run, run, tiny
from tests.helpers.slurm import PATH, Cluster, missing_programs, slurm_cluster

MISSING = missing_programs()
pytestmark = [
    pytest.mark.campaign,
    pytest.mark.skipif(
        bool(MISSING) and not os.environ.get("CI"), reason=f"Slurm is not installed: no {', '.join(MISSING)}"
    ),
]

STEPS = 60
MODEL = ["model.name=tests.helpers.slow_trainer:slow_llama", "model.vocab_size=257", "model.num_kv_heads=2"]
OVERRIDES = [*MODEL, f"train.steps={STEPS}", "checkpoint.every=5"]
SIZE = ["--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=0", "--cpus-per-task=1", "--time=30"]
TORCHRUN_SIZE = ["--nodes=2", "--gpus-per-node=0", "--cpus-per-task=2", "--time=30"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    assert not MISSING, f"CI must have Slurm: {', '.join(MISSING)} missing"
    with slurm_cluster(num_nodes=4) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One node with four ranks, on the mesh that two nodes with two ranks each make."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    return run(folder, *OVERRIDES, "mesh.replicate=2", "mesh.shard=2", "nproc=4")


@pytest.fixture(scope="module")
def limited(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A job that reaches its time limit.  Its notice comes after half a minute, during the first test.

    Its steps are so long that it reaches the limit several times before it ends, however long that test takes.
    """
    folder = tmp_path_factory.mktemp("limited") / "run"
    return submit(cluster, folder, "--time=1", "--signal=B:USR1@10", rest_s=3), folder


def submit(
    cluster: Cluster,
    folder: Path,
    *options: str,
    rest_s: float = 0.1,
    script: str = "slurm.sbatch",
    supervisor: Sequence[str] = (),
) -> str:
    """Submit a run of 2 nodes x 2 ranks; returns the job's id.

    options: those of `sbatch`.
    supervisor: options of `trainer.slurm`.
    """
    size, own = SIZE, [*supervisor, "recipe=llama_small", f"run.dir={folder}"]
    if "torchrun" in script:
        size, own = TORCHRUN_SIZE, [*own, "--nproc=2"]
    overrides = tiny(*OVERRIDES, "mesh.replicate=-1", "mesh.shard=node")
    return cluster.submit(*size, *options, str(REPOSITORY / "launch" / script), *own, *overrides, **variables(rest_s))


def variables(rest_s: float) -> dict[str, str]:
    """Return a job's environment, in which `python` is the interpreter of the tests."""
    path = f"{Path(sys.executable).parent}:{PATH}"
    return {"PATH": path, "OMP_NUM_THREADS": "1", "MESHTRAINER_TEST_REST_S": str(rest_s)}


def ran(folder: Path) -> Run:
    """Return what a job has left in its run's folder."""
    return Run(folder, [], folder)


def wait_for_step(cluster: Cluster, job: str, folder: Path, step: int) -> None:
    try:
        wait_until(lambda: step <= max(ran(folder).train("step"), default=0), f"step {step} of job {job}")
    except AssertionError as error:
        raise AssertionError(f"{error}\n{cluster.job(job)}\n{cluster.log(job)}") from error


def ends_and_starts(folder: Path) -> list[dict[str, Any]]:
    return [line for line in ran(folder).metrics if line["kind"] in ("start", "end")]


def assert_finished(
    cluster: Cluster, job: str, folder: Path, undisturbed: Run, restarts: int = 0, world_size: int = 4
) -> None:
    ended = cluster.wait_for_end(job, restarts)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", str(restarts)), cluster.log(job)
    assert ran(folder).status["state"] == "finished"
    starts = ran(folder).of_kind("start")
    assert {line["world_size"] for line in starts} == {world_size}
    assert all(line["mesh"] == {"replicate": world_size // 2, "shard": 2} for line in starts)
    assert ran(folder).train("step") == list(range(1, STEPS + 1))
    assert ran(folder).train("loss") == undisturbed.train("loss")


def test_notice_and_requeue(limited: tuple[str, Path], cluster: Cluster, undisturbed: Run, tmp_path: Path) -> None:
    job = notice_and_requeue("slurm.sbatch", cluster, undisturbed, tmp_path / "run")
    assert re.search(rf"job {job} restart 0 step \d+ requeued, exit code 75\n", attempts(tmp_path / "run"))


def test_time_limit_and_cancellation(limited: tuple[str, Path], cluster: Cluster, undisturbed: Run) -> None:
    """After a cancellation the ranks also save and exit with 75, but the job is not requeued."""
    job, folder = limited
    wait_until(lambda: cluster.job(job)["Restarts"] != "0", "the requeue")
    cluster.call("scontrol", "update", f"jobid={job}", "timelimit=30")
    first, stopped = ends_and_starts(folder)[:2]
    assert (first["resumed_step"], stopped["reason"]) == (None, "stopped")
    wait_for_step(cluster, job, folder, stopped["step"] + 1)
    cluster.call("scancel", job)
    ended = cluster.wait_for_end(job)
    assert ended["JobState"] == "CANCELLED", cluster.log(job)
    wait_until(lambda: ran(folder).status["state"] == "stopped", "the save")
    losses = ran(folder).train("loss")
    assert len(losses) > stopped["step"]
    assert losses == undisturbed.train("loss")[: len(losses)]


def test_notice_and_requeue_under_torchrun(cluster: Cluster, undisturbed: Run, tmp_path: Path) -> None:
    job = notice_and_requeue("slurm_torchrun.sbatch", cluster, undisturbed, tmp_path / "run")
    assert re.search(rf"job {job} restart 0 step \d+ requeued, exit code 1\n", attempts(tmp_path / "run"))


def notice_and_requeue(script: str, cluster: Cluster, undisturbed: Run, folder: Path) -> str:
    """Only the batch script gets the notice. A notice that already exists has no effect."""
    folder.mkdir()
    (folder / "notice").touch()
    job = submit(cluster, folder, script=script)
    wait_for_step(cluster, job, folder, 10)
    cluster.call("scancel", "--signal=USR1", "--batch", job)
    assert_finished(cluster, job, folder, undisturbed, restarts=1)
    stopped, resumed = ends_and_starts(folder)[1:3]
    assert stopped["reason"] == "stopped"
    assert resumed["resumed_step"] == stopped["step"] >= 10, "nothing was done twice"
    return job


def attempts(folder: Path) -> str:
    return (folder / "attempts.log").read_text()


def test_notice_during_the_start(cluster: Cluster, undisturbed: Run, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    job = submit(cluster, folder)
    wait_until((folder / "attempts.log").exists, "the batch script")
    cluster.call("scancel", "--signal=USR1", "--batch", job)
    assert_finished(cluster, job, folder, undisturbed, restarts=1)
    assert ends_and_starts(folder)[1]["step"] <= 1, "the notice came before the first step"


def test_requeue_by_hand_and_by_a_node_failure(cluster: Cluster, undisturbed: Run, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    job = submit(cluster, folder)
    wait_for_step(cluster, job, folder, 10)
    cluster.call("scontrol", "requeue", job)
    wait_for_step(cluster, job, folder, 25)
    node = cluster.call("scontrol", "show", "hostnames", cluster.job(job)["NodeList"]).split()[-1]
    cluster.call("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
    try:
        wait_until(lambda: cluster.job(job)["Restarts"] == "2", "the second restart")
    finally:
        cluster.call("scontrol", "update", f"nodename={node}", "state=resume", check=False)  # unless it has come back
    assert_finished(cluster, job, folder, undisturbed, restarts=2)


def test_a_rank_is_killed(cluster: Cluster, undisturbed: Run, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    job = submit(cluster, folder, supervisor=["--requeue-failed"])
    wait_for_step(cluster, job, folder, 10)
    kill_rank(cluster, job, 2)
    assert_finished(cluster, job, folder, undisturbed, restarts=1)
    assert ends_and_starts(folder)[-2]["resumed_step"] >= 5


def kill_rank(cluster: Cluster, job: str, rank: int) -> None:
    (pid,) = ranks_of(cluster, job, SLURM_PROCID=str(rank))
    os.kill(pid, signal.SIGKILL)


def ranks_of(cluster: Cluster, job: str, step: str = "0", **variables: str) -> list[int]:
    """Return the processes of the training step that are ranks."""
    found = []
    for pid in cluster.processes(SLURM_JOB_ID=job, SLURM_STEP_ID=step, **variables):
        with suppress(OSError):
            if b"trainer.run" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_slurmstepd_is_killed(num_nodes: int, cluster: Cluster, undisturbed: Run, tmp_path: Path) -> None:
    """No process starts or ends the ranks of that node any more: they end by themselves, and the job continues.

    On a single node srun would wait for it forever; the step is found by its name, not as the first of the job.
    """
    folder, world_size = tmp_path / "run", 2 * num_nodes
    expected, script, step = undisturbed, REPOSITORY / "launch/slurm.sbatch", "0"
    if num_nodes == 1:
        expected = run(tmp_path / "alone", *OVERRIDES, "nproc=2")
        text, script, step = script.read_text(), tmp_path / "slurm.sbatch", "1"
        assert text.count("\nexec env ") == 1
        script.write_text(text.replace("\nexec env ", "\nsrun true\nexec env "))
    supervisor = ["--requeue-failed", "--leave-s=5"]
    # Slowly, so that the run is not through before the ranks have noticed: they give a save in flight its time.
    job = submit(cluster, folder, f"--nodes={num_nodes}", rest_s=0.5, script=str(script), supervisor=supervisor)
    wait_for_step(cluster, job, folder, 10)
    first = ranks_of(cluster, job, step)
    assert len(first) == world_size
    (last,) = ranks_of(cluster, job, step, SLURM_PROCID=str(world_size - 1))
    slurmstepd = int(Path(f"/proc/{last}/stat").read_text().rpartition(")")[2].split()[1])
    assert Path(f"/proc/{slurmstepd}/cmdline").read_text().startswith("slurmstepd")
    os.kill(slurmstepd, signal.SIGKILL)
    wait_until(lambda: not set(first) & set(ranks_of(cluster, job, step)), "the end of all ranks")
    wait_until(lambda: cluster.job(job)["Restarts"] == "1", "the requeue")
    assert_finished(cluster, job, folder, expected, restarts=1, world_size=world_size)
    assert ends_and_starts(folder)[-2]["resumed_step"] >= 5


def test_failures_are_requeued_on_request_but_not_forever(cluster: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    left = submit(cluster, tmp_path / "left", supervisor=["--python=false"])
    job = submit(cluster, folder, supervisor=["--python=false", "--requeue-failed", "--max-idle=2"])
    for name, restarts in ((left, 0), (job, 1)):
        ended = cluster.wait_for_end(name, restarts)
        assert (ended["JobState"], ended["Restarts"]) == ("FAILED", str(restarts)), cluster.log(name)
    assert f"job {job} restart 1 step 0 not requeued: " in attempts(folder)


def test_a_job_array(cluster: Cluster, tmp_path: Path) -> None:
    """Each job of an array has its own folder and setting, and is requeued alone."""
    size = ["--array=0-1", "--ntasks-per-node=1", "--gpus-per-node=0", "--cpus-per-task=1", "--time=30"]
    script = tmp_path / "slurm_array.sbatch"
    text = (REPOSITORY / "launch/slurm_array.sbatch").read_text()
    assert text.count("runs/sweep-$") == 1
    script.write_text(text.replace("runs/sweep-$", f"{tmp_path}/$"))
    overrides = ["recipe=llama_small", *tiny(*MODEL, "train.steps=40")]
    array = cluster.submit(*size, str(script), *overrides, **variables(rest_s=0.2))
    last = f"{array}_1"  # whose own id is the array's
    wait_for_step(cluster, last, tmp_path / "1", 5)
    cluster.call("scancel", "--signal=USR1", "--batch", last)
    for number, restarts in ((0, 0), (1, 1)):
        ended = cluster.wait_for_end(f"{array}_{number}", restarts)
        assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", str(restarts)), cluster.log(f"{array}_{number}")
    peaks = [max(ran(tmp_path / str(number)).train("lr")) for number in (0, 1)]
    assert math.isclose(peaks[1], 3 * peaks[0])
