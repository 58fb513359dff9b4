"""The files in launch/ parse and run, and a Slurm job loses no notice and is not requeued forever.

Instead of a cluster there are programs that only note how they were called. `srun` is a stand-in for the ranks: a child
of the job's supervisor (`trainer.slurm`), which it can send signals.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from tests.helpers.launch import REPOSITORY, Run, command, launch, start_command
from trainer import load_config

FILES = sorted(path for path in (REPOSITORY / "launch").iterdir() if path.is_file())


def name(path: Path) -> str:
    return path.name


def commands_in(node: object) -> list[str]:
    """Return the texts of a YAML file that start a run."""
    if isinstance(node, dict):
        return [found for value in node.values() for found in commands_in(value)]
    if isinstance(node, list):
        return [found for value in node for found in commands_in(value)]
    return [node] if isinstance(node, str) and "trainer.run" in node else []


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=name)
def test_file_parses(path: Path) -> None:
    """And so do the commands in it."""
    if path.suffix == ".py":
        ast.parse(path.read_text())
        return
    scripts = [path.read_text()]
    if path.suffix == ".yaml":
        scripts = commands_in(yaml.safe_load(scripts[0]))
        assert scripts
    for script in scripts:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@pytest.mark.parametrize("path", FILES, ids=name)
def test_recipes_and_keys_exist(path: Path) -> None:
    text = path.read_text()
    recipes = set(re.findall(r"recipe=(\w+)", text)) | set(re.findall(r"RECIPE:[=-](\w+)", text))
    keys = set(re.findall(r"\b((?:mesh|train|checkpoint|optim|data|run)\.\w+)=", text))
    for recipe in recipes or {"llama_small"}:
        tree = yaml.safe_load(load_config(recipe).to_yaml())
        assert keys <= {f"{section}.{key}" for section in tree for key in tree[section]}


@pytest.mark.parametrize("path", [path for path in FILES if path.suffix == ".sbatch"], ids=name)
def test_a_batch_file_asks_for_a_notice_and_blocks_it_until_it_is_caught(path: Path) -> None:
    directives = " ".join(re.findall(r"^#SBATCH (.*)$", path.read_text(), re.MULTILINE))
    for option in ("--requeue", "--open-mode=append", "--signal=B:USR1@", "--time="):
        assert option in directives
    assert path.read_text().count("exec env --block-signal=USR1,TERM ") == 1


# ---------------------------------------------------------------------------------------------------------------
# They run, among programs that do nothing but say how they were called


class Stubs:
    """A folder of programs in front of the machine's own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls, self.run_dir = folder / "bin", folder / "calls", folder / "run"
        self.folder.mkdir()
        self.calls.touch()
        self.path = f"{self.folder}:/usr/bin:/bin"

    def add(self, name: str, body: str = "") -> None:
        path = self.folder / name
        path.write_text(f'#!/bin/bash\necho "{name} $*" >>"{self.calls}"\n{body}\n')
        path.chmod(0o755)

    def called(self, name: str) -> list[str]:
        """Return the arguments of each call."""
        return [line[len(name) + 1 :] for line in self.calls.read_text().splitlines() if line.startswith(f"{name} ")]

    def file(self, script: str, *arguments: str, **variables: str) -> Run:
        """Run a launch file."""
        path = [f"PATH={self.path}", *(f"{key}={value}" for key, value in variables.items())]
        program = ["env", *path, "bash", str(REPOSITORY / "launch" / script), *arguments]
        return launch(program, self.run_dir, {"PYTHONPATH": str(REPOSITORY)}, cwd=self.folder).wait()

    def job(self, srun: str, *options: str, restart: int = 0, job: int = 7) -> Run:
        """Run the supervisor of a job once, with a stand-in for its ranks."""
        self.add("srun", f"{SAYS}\n{srun}")
        self.add("scontrol")
        arguments = [*options, "--leave-s=1", "recipe=llama_small", f"run.dir={self.run_dir}"]
        return start_command("trainer.slurm", *arguments, variables=self.slurm(restart, job)).wait()

    def slurm(self, restart: int = 0, job: int = 7) -> dict[str, str]:
        """Return the variables of a job; RUN_DIR is for the stand-ins."""
        own = {"SLURM_JOB_ID": str(job), "SLURM_JOB_NAME": "mine", "SLURM_RESTART_COUNT": str(restart)}
        return {**own, "MASTER_ADDR": "127.0.0.1", "RUN_DIR": str(self.run_dir), "PATH": self.path}


SAYS = """said() { echo '{"state": "'$1'", "exit_code": 1, "step": '$2', "reason": ""}' >"$RUN_DIR/status.json"; }
waits() { until "$@"; do sleep 0.05; done; }"""
"""What a stand-in for the ranks can do: report a state at a step, and wait until a command succeeds."""


@pytest.fixture
def stubs(tmp_path: Path) -> Stubs:
    return Stubs(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("gpus", "expected"), [(None, 2), (0, 2), (3, 3)])
def test_one_node_with_and_without_gpus(gpus: int | None, expected: int, stubs: Stubs) -> None:
    stubs.add("torchrun", "exit 7")
    if gpus is not None:
        stubs.add("nvidia-smi", f"for n in $(seq {gpus}); do echo GPU $n; done; exit {0 if gpus else 9}")
    elif Path("/usr/bin/nvidia-smi").exists() or Path("/bin/nvidia-smi").exists():
        pytest.skip("this machine has a GPU")
    ran = stubs.file("local.sh", "recipe=llama3_8b", "data.path=shards/*.bin")
    assert ran.code == 7, ran.err
    (call,) = stubs.called("torchrun")
    assert call.startswith(f"--standalone --nproc-per-node {expected} ")
    assert call.endswith(" -m trainer.run recipe=llama3_8b data.path=shards/*.bin")


@pytest.mark.slow
def test_ranks_run_in_a_container(stubs: Stubs) -> None:
    stubs.add("scontrol", 'case $2 in hostnames) echo n1 ;; node) echo "NodeName=n1 NodeAddr=10.0.0.1 X=1" ;; esac')
    stubs.add("srun", 'echo "MASTER_ADDR=$MASTER_ADDR"')
    stubs.add("python3", f'exec {sys.executable} "$@"')
    ran = stubs.file("container.sbatch", "run.dir=run", SLURM_JOB_ID="7", SLURM_JOB_NODELIST="n[1-2]")
    assert "MASTER_ADDR=10.0.0.1" in ran.out, ran.err
    (call,) = stubs.called("srun")
    mounted = f"--bind {stubs.folder},/shared --pwd {stubs.folder}"
    assert f" apptainer exec --nv {mounted} /shared/meshtrainer.sif python -m trainer.run recipe=llama3_8b" in call


# ---------------------------------------------------------------------------------------------------------------
# Notices

IS_TOLD = 'waits [ -e "$RUN_DIR/notice" ]; said stopped 9; exit 75'


@pytest.mark.slow
def test_notice_before_python_handles_signals_is_not_lost(stubs: Stubs) -> None:
    """The batch file blocks the signal until the supervisor has installed its handlers."""
    stubs.add("python", f'kill -USR1 $$; exec {sys.executable} "$@"')
    stubs.add("srun", f"{SAYS}\n{IS_TOLD}")
    stubs.add("scontrol")
    ran = stubs.file("slurm.sbatch", f"run.dir={stubs.run_dir}", **stubs.slurm())
    assert ran.code == 0, ran.err + ran.out
    assert stubs.called("scontrol") == ["requeue 7"]


@pytest.mark.slow
def test_a_notice_is_repeated(stubs: Stubs) -> None:
    """A run that is just starting takes a notice for that of an earlier attempt, until its time changes."""
    is_new = 'is_new() { [ "$(stat -c %Y "$RUN_DIR/notice")" != "$old" ]; }'
    ran = stubs.job(
        f'{is_new}; kill -USR1 $PPID; waits [ -e "$RUN_DIR/notice" ]; old=$(stat -c %Y "$RUN_DIR/notice"); '
        "waits is_new; said stopped 9; exit 75"
    )
    assert ran.code == 0, ran.err + ran.out
    assert stubs.called("scontrol") == ["requeue 7"]


@pytest.mark.slow
@pytest.mark.parametrize(("signal", "options"), [("TERM", []), ("USR1", ["--no-requeue"])])
def test_a_cancelled_job_is_not_requeued(signal: str, options: list[str], stubs: Stubs) -> None:
    """Nor one that must not be."""
    ran = stubs.job(f"kill -{signal} $PPID; {IS_TOLD}", *options)
    assert ran.code == 75, ran.err + ran.out
    assert stubs.called("scontrol") == []


@pytest.mark.slow
def test_a_notice_that_cannot_be_written_does_not_end_the_job(stubs: Stubs) -> None:
    """As on a full disk, or if the folder was removed: it is tried again, and the run ends normally."""
    ran = stubs.job('rm -r "$RUN_DIR"; kill -USR1 $PPID; sleep 2; mkdir "$RUN_DIR"; said finished 9')
    assert ran.code == 0, ran.err + ran.out
    assert stubs.called("scontrol") == []


# ---------------------------------------------------------------------------------------------------------------
# Attempts


@pytest.mark.slow
@pytest.mark.parametrize("updates", [2, pytest.param(0, marks=pytest.mark.campaign)])
def test_a_job_that_makes_no_progress_is_not_requeued_forever(updates: int, stubs: Stubs) -> None:
    """As one that gets its notice just after each start. Submitted anew it begins again."""
    for number in range(2):
        ran = stubs.job(f"said stopped {(number + 1) * updates}; exit 75", "--max-idle=2", restart=number)
        is_last = number == 1
        assert ran.code == is_last, ran.err + ran.out
        assert len(stubs.called("scontrol")) == number + 1 - is_last
    again = stubs.job("exit 0", "--max-idle=2", restart=2)
    assert (again.code, len(stubs.called("srun"))) == (1, 2), "nor does it begin if Slurm requeues it"
    assert stubs.job("exit 0", "--max-idle=2", job=8).code == 0


@pytest.mark.slow
@pytest.mark.parametrize("says", ["said stopped {step}; exit 75", "said finished 2; exit 0"])
def test_progress_and_a_finished_run_are_not_idle(says: str, stubs: Stubs) -> None:
    """A run may be finished while its batch file was not: if its node failed."""
    for number in range(3):
        assert stubs.job(says.format(step=(number + 1) * 3), "--max-idle=2", restart=number).code == 0


@pytest.mark.slow
@pytest.mark.parametrize(("code", "requeues"), [(1, 1), (2, 0)])
def test_a_failure_is_requeued_on_request_and_a_mistake_never(code: int, requeues: int, stubs: Stubs) -> None:
    assert stubs.job(f"said failed 9; exit {code}").code == code
    assert stubs.called("scontrol") == []
    assert stubs.job(f"said failed 9; exit {code}", "--requeue-failed").code == (0 if requeues else code)
    assert len(stubs.called("scontrol")) == requeues


@pytest.mark.slow
@pytest.mark.parametrize("helps", [True, pytest.param(False, marks=pytest.mark.campaign)])
def test_a_step_that_outlives_its_ranks_is_ended(helps: bool, stubs: Stubs, tmp_path: Path) -> None:
    """It may be any step of the job. If Slurm does not even cancel it, srun is abandoned."""
    pid = tmp_path / "pid"
    stubs.add("squeue", "echo 7.0 true; echo 7.1 ranks; echo 7.batch batch")
    stubs.add("scancel", f"kill $(cat {pid})" if helps else "")
    try:
        ran = stubs.job(f"echo $$ >{pid}; said stopped 9; exec sleep 1000 &>/dev/null")
    finally:
        with suppress(OSError, ValueError):
            os.kill(int(pid.read_text()), 9)
    assert stubs.called("scancel") == ["7.1"]
    assert ran.code == 0, ran.err + ran.out
    assert stubs.called("scontrol") == ["requeue 7"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["recipe=x", "--max-idle=0"],
        ["recipe=x", "--min-steps=2.5"],
        ["recipe=x", "--leave-s=0"],
        ["recipe=x", "--nproc=-1"],
        ["recipe=x", "--requeue"],
        ["train.steps=5"],
    ],
    ids=" ".join,
)
def test_a_mistake_is_one_message(words: list[str], tmp_path: Path) -> None:
    variables = {"SLURM_JOB_ID": "7", "MASTER_ADDR": "127.0.0.1"}
    refused = command("trainer.slurm", *words, f"run.dir={tmp_path / 'run'}", variables=variables, code=2)
    assert refused.err.count("error: ") == 1
    assert "Traceback" not in refused.err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_outside_of_a_job_there_is_nothing_to_supervise() -> None:
    refused = command("trainer.slurm", "recipe=x", variables={"SLURM_JOB_ID": ""}, code=2)
    assert "SLURM_JOB_ID" in refused.err
    assert "Traceback" not in refused.err
