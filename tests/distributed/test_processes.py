"""How a run ends: cleanly, on request, or with the first error of any rank; no process is left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.faults import start
from tests.helpers.forked import REPOSITORY, popen
from tests.helpers.gate import wait_until
from tests.helpers.ranks import FRESH, CommandResult, run_command, run_ranks, run_tiny, tiny_overrides
from tests.helpers.runs import SharedRun
from trainer import load_config

pytestmark = pytest.mark.slow

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
OWN = "model.name=tests.helpers.custom_recipes:"
MLP = ["recipe=llama_small", "data.source=synthetic", "data.seq_len=16", "train.steps=6", "eval.every=0", "log.every=1"]


def processes_of(folder: Path) -> list[str]:
    """Return the processes whose command line names the run's folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in command and path.parent.name != str(os.getpid()):
            found.append(command)
    return found


@pytest.mark.parametrize(
    "setting", ["fsdp.wrap=foo.bar:baz", pytest.param("train.init_from=missing", marks=pytest.mark.campaign)]
)
def test_user_error_on_ranks_without_a_launcher_is_one_message(setting: str, tmp_path: Path) -> None:
    """The other ranks used to print a page of C++ frames each, because rank 0 had closed the store."""
    given = [*MLP, f"{OWN}mlp", "run.threads=1", "train.micro_batch_size=2", "train.global_batch_size=6", setting]
    run = start(tmp_path / "run", *given, ranks=3)
    assert run.wait() == [2, 2, 2], run.stderr
    assert run.stderr_of(0).startswith(f"error: {setting}")
    assert run.stderr_of(1) + run.stderr_of(2) == ""


@pytest.mark.parametrize("times", [1, pytest.param(6, marks=pytest.mark.campaign)])
def test_plain_runs_end_cleanly(times: int, tmp_path: Path) -> None:
    """Finished runs with an open mesh used to abort at interpreter exit in 13 of 16 cases."""
    for number in range(times):
        ran = run_tiny(tmp_path / str(number), "train.steps=5", "nproc=2", "data.num_workers=1", launcher=FRESH)
        assert "terminate called" not in ran.stderr
        assert ran.status == {"state": "finished", "exit_code": 0, "step": 5, "reason": "train.steps reached"}
        assert processes_of(tmp_path / str(number)) == []


WITHOUT_CLOSE = """
import time
from torch.distributed import HashStore
from trainer.distributed import failure_watch
from trainer.distributed.channel import TimedStore
failure_watch._POLL_S = 0
for _ in range(8):
    failure_watch.FailureWatch(0, TimedStore(HashStore(), 30), None, [])
time.sleep(0.2)
"""


def test_a_script_that_does_not_close_its_trainer_ends_cleanly() -> None:
    """Threads that were inside torch's store when the interpreter was finalized used to abort the process."""
    done = subprocess.run([*FRESH, "-c", WITHOUT_CLOSE], capture_output=True, text=True, timeout=240, cwd=REPOSITORY)
    assert (done.returncode, done.stderr) == (0, "")


def test_one_rank_fails_and_all_end_with_its_error(tmp_path: Path) -> None:
    """The other ranks end without being killed."""
    run = start(tmp_path / "run", *MLP, OWN + "mlp_crashing", ranks=2)
    ran = run.ran()
    assert ran.exit_code == 1
    assert ran.stderr.count("ValueError: the disk of rank 1 is on fire") == 1
    assert ran.stderr.count("Traceback") == 1, ran.stderr
    assert ran.status == {
        "state": "failed",
        "exit_code": 1,
        "step": 2,
        "reason": "rank 1: ValueError: the disk of rank 1 is on fire",
    }
    assert ran.metrics[-1]["kind"] == "end"
    assert ran.metrics[-1]["reason"] == "failed"


@pytest.mark.campaign
def test_one_rank_fails_and_the_launcher_ends_a_sleeping_one(tmp_path: Path) -> None:
    ran = run_command(tmp_path / "run", *MLP, OWN + "mlp_sleeping", "nproc=2", launcher=FRESH)
    assert ran.exit_code == 1
    assert ran.stderr.count("ValueError: the disk of rank 1 is on fire") == 1
    assert ran.stderr.count("Traceback") == 1, ran.stderr
    assert processes_of(ran.folder) == []


def test_non_finite_steps_are_skipped_on_all_ranks(tmp_path: Path) -> None:
    ran = run_command(tmp_path / "run", *MLP, OWN + "mlp_nonfinite", "nproc=2")
    assert ran.exit_code == 0, ran.stderr
    losses = ran.train("loss")
    assert [loss is None for loss in losses] == [False, False, True, True, False, False]
    assert ran.train("step") == [1, 2, 3, 4, 5, 6]


def test_too_many_non_finite_steps_end_the_run(tmp_path: Path) -> None:
    ran = run_command(tmp_path / "run", *MLP, OWN + "mlp_nonfinite", "nproc=2", "train.max_skipped_updates=2")
    assert ran.exit_code == 1
    assert ran.stderr.count("not finite in 2 steps in a row") == 1
    assert "Traceback" not in ran.stderr
    assert ran.status["state"] == "failed"


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.campaign)])
def test_stops_on_request_after_saving(number: signal.Signals, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    overrides = tiny_overrides("train.steps=100000", f"run.dir={folder}", "nproc=2")
    process = popen([sys.executable, "-m", "trainer.run", "recipe=llama_small", *overrides])
    wait_for_step(folder)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=240)
    ran = CommandResult(process.returncode, stdout, stderr, folder)
    assert ran.exit_code == 75, stderr
    assert "Traceback" not in stderr
    assert ran.status["state"] == "stopped"
    assert ran.status["exit_code"] == 75
    step = ran.status["step"]
    assert (folder / "checkpoints" / f"step_{step:08d}").is_dir()
    again = run_tiny(folder, f"train.steps={step + 2}", "nproc=2")
    assert again.train("step")[-3:] == [step, step + 1, step + 2]


def wait_for_step(folder: Path) -> None:
    """Wait for the second line of training: that of the first step is written just before the step has ended."""
    metrics = folder / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_text().count('"train"') >= 2, "two steps")


def test_under_torchrun(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ran = run_tiny(tmp_path / "run", "train.steps=3", "nproc=2", launcher=launcher)
    assert ran.train("step") == [1, 2, 3]


def test_nproc_must_equal_the_launchers_world_size(tmp_path: Path) -> None:
    ran = run_command(tmp_path / "run", "recipe=llama_small", "nproc=3", launcher=[sys.executable, *TORCHRUN])
    assert ran.stderr.count("nproc=3: torchrun has already started 2 processes") == 1


@pytest.mark.parametrize(
    "launcher", [[], pytest.param(TORCHRUN, marks=pytest.mark.campaign)], ids=["alone", "torchrun"]
)
def test_custom_script_ends_cleanly(launcher: list[str], tmp_path: Path) -> None:
    """With `fit()` in a script, which does not exit the way the command line does."""
    script = tmp_path / "mine.py"
    overrides = tiny_overrides("train.steps=3", f"run.dir={tmp_path / 'run'}")
    script.write_text(
        "from trainer import Trainer, load_config\n"
        f"raise SystemExit(Trainer(load_config('llama_small', {overrides!r})).fit())\n"
    )
    command, run_trainer = [sys.executable, *launcher, str(script)], os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, capture_output=True, text=True, env=run_trainer)
    assert done.returncode == 0, done.stderr
    assert "terminate called" not in done.stderr


def test_a_finished_run_started_again_does_nothing(one: SharedRun, tmp_path: Path) -> None:
    folder = one.copy_to(tmp_path / "run")
    metrics = (folder / "metrics.jsonl").read_bytes()
    again = run_tiny(folder, *one.overrides)
    assert "nothing to do" in again.stdout
    assert (folder / "metrics.jsonl").read_bytes() == metrics
    further = run_tiny(folder, "train.steps=22")
    assert further.train("step") == list(range(1, 23))


@pytest.mark.campaign
def test_exit_code_of_workers_under_torchs_launcher(tmp_path: Path) -> None:
    """The workers end on their own."""
    unfilled = run_command(tmp_path / "run", *MLP, OWN + "mlp_unfilled", "nproc=2", launcher=FRESH)
    assert unfilled.exit_code == 2, unfilled.stderr


def spawn_workers_that_end_with(folder: Path, codes: list[int]) -> int:
    """Return the exit code of `nproc=N` if torch's launcher says that its workers have ended with these."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
    from torch.distributed.launcher import api

    from trainer.lifecycle.launch import spawn

    def elastic_launch(*_: object) -> Callable[..., None]:
        def fail(*_: object) -> None:
            failures = {rank: ProcessFailure(rank, 1, code, "") for rank, code in enumerate(codes)}
            raise ChildFailedError("workers", failures)

        return fail

    api.elastic_launch = elastic_launch  # type: ignore[assignment,misc]
    return spawn(len(codes), [], load_config("llama_small", [f"run.dir={folder}"]))


def test_most_specific_exit_code_of_the_workers_is_used(tmp_path: Path) -> None:
    for codes, expected in (([75, 75], 75), ([1, 75], 75), ([75, 2], 2), ([1, 1], 1)):
        assert run_ranks(1, spawn_workers_that_end_with, tmp_path, codes) == [expected]


def spawn_a_worker_that_ignores_sigterm(folder: Path) -> None:
    from trainer.lifecycle.launch import spawn

    ready = folder / "ready"
    ignore = f"import pathlib, signal, time; signal.signal(15, signal.SIG_IGN); pathlib.Path({str(ready)!r}).touch()"
    terminate = f"while [ ! -e {ready} ]; do sleep 0.1; done; kill -TERM {os.getpid()}"
    with subprocess.Popen(["sh", "-c", terminate]):
        spawn(1, ["-c", f"{ignore}; time.sleep(99)"], load_config("llama_small", [f"run.dir={folder / 'run'}"]))


@pytest.mark.campaign
def test_time_that_workers_have_to_shut_down_can_be_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It can be set with every supported torch; older versions by themselves always wait 30 seconds."""
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "1")
    since = time.monotonic()
    run_ranks(1, spawn_a_worker_that_ignores_sigterm, tmp_path)
    assert time.monotonic() - since < 25


@pytest.mark.campaign
def test_exit_code_of_workers_with_a_job_end_in_the_past(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1700000000")
    run_tiny(tmp_path / "run", "train.steps=5", "nproc=2", launcher=FRESH, exit_code=75)
