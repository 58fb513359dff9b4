"""The files in launch/: short, valid, and with the settings to change at the top."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from tests.helpers.launch import REPOSITORY
from trainer.errors import UserError
from trainer.slurm import Job, count_idle, make_job, make_parser

FILES = sorted(path for path in (REPOSITORY / "launch").iterdir() if path.is_file())
BATCH_FILES = [path for path in FILES if path.suffix == ".sbatch"]
NAMES = {
    "local.sh",
    "slurm.sbatch",
    "slurm_torchrun.sbatch",
    "slurm_array.sbatch",
    "container.sbatch",
    "kubernetes.yaml",
    "ray_train.py",
    "skypilot.yaml",
}


def name(path: Path) -> str:
    return path.name


def test_all_launch_files_exist() -> None:
    assert {path.name for path in FILES} == NAMES


@pytest.mark.parametrize("path", FILES, ids=name)
def test_file_is_short_and_begins_with_settings_to_change(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) < 60
    first = lines[1] if lines[0].startswith("#!") else lines[0]
    assert first.startswith(("# ", '"""'))
    assert "change" in first
    assert max(map(len, lines)) <= 120


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=name)
def test_file_parses(path: Path) -> None:
    if path.suffix in (".sh", ".sbatch"):
        subprocess.run(["bash", "-n", str(path)], check=True)
    elif path.suffix == ".yaml":
        assert {"kind", "spec"} <= set(tree := yaml.safe_load(path.read_text())) or "run" in tree
    else:
        ast.parse(path.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in FILES if path.suffix == ".yaml"], ids=name)
def test_commands_in_yaml_parse_too(path: Path) -> None:
    def commands(node: object) -> list[str]:
        if isinstance(node, dict):
            return [found for value in node.values() for found in commands(value)]
        if isinstance(node, list):
            return [found for value in node for found in commands(value)]
        return [node] if isinstance(node, str) and "trainer.run" in node else []

    found = commands(yaml.safe_load(path.read_text()))
    assert found
    for command in found:
        subprocess.run(["bash", "-n"], input=command, text=True, check=True)


@pytest.mark.parametrize("path", BATCH_FILES, ids=name)
def test_a_batch_file_is_resources_and_one_command(path: Path) -> None:
    text = path.read_text()
    assert len([line for line in text.splitlines() if not re.match(r"#(?!SBATCH)", line)]) <= 15
    directives = " ".join(re.findall(r"^#SBATCH (.*)$", text, re.MULTILINE))
    for option in ("--requeue", "--open-mode=append", "--signal=B:USR1@", "--time="):
        assert option in directives
    assert text.count("exec env --block-signal=USR1,TERM ") == 1


@pytest.mark.parametrize("path", FILES, ids=name)
def test_recipes_and_keys_exist(path: Path) -> None:
    from trainer import load_config

    text = path.read_text()
    recipes = set(re.findall(r"recipe=(\w+)", text)) | set(re.findall(r"RECIPE:=(\w+)", text))
    keys = set(re.findall(r"\b((?:mesh|train|checkpoint|optim|data|run)\.\w+)=", text))
    for recipe in recipes:
        tree = yaml.safe_load(load_config(recipe).to_yaml())
        assert keys <= {f"{section}.{key}" for section in tree for key in tree[section]}


# ---------------------------------------------------------------------------------------------------------------
# They run, among programs that do nothing but say how they were called


class Stubs:
    """A folder of programs in front of the machine's own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls = folder / "bin", folder / "calls"
        self.folder.mkdir()
        self.calls.touch()

    def add(self, name: str, body: str = "") -> None:
        path = self.folder / name
        path.write_text(f'#!/bin/bash\necho "{name} $*" >>"{self.calls}"\n{body}\n')
        path.chmod(0o755)

    def called(self, name: str) -> list[str]:
        """Return the arguments of each call."""
        return [line[len(name) + 1 :] for line in self.calls.read_text().splitlines() if line.startswith(f"{name} ")]

    def run(self, script: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run a launch file with the process id of its shell in BATCH."""
        env = {"PATH": f"{self.folder}:/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY), **env}
        command = ["bash", "-c", 'BATCH=$$ exec bash "$@"', "bash", str(REPOSITORY / "launch" / script), *arguments]
        return subprocess.run(command, env=env, cwd=self.folder, capture_output=True, text=True, timeout=120)


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
    ran = stubs.run("local.sh", "recipe=llama3_8b", "data.path=shards/*.bin")
    assert ran.returncode == 7, ran.err
    (call,) = stubs.called("torchrun")
    assert call.startswith(f"--standalone --nproc-per-node {expected} ")
    assert call.endswith(" -m trainer.run recipe=llama3_8b data.path=shards/*.bin")


SAYS = """said() { echo '{"state": "'$1'", "exit_code": 1, "step": '$2', "reason": ""}' >"$RUN_DIR/status.json"; }"""


def batch(stubs: Stubs, folder: Path, srun: str, restart: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the batch file once, with a stand-in for the ranks."""
    stubs.add("srun", f"{SAYS}\n{srun}")
    stubs.add("scontrol")
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "mine", "SLURM_RESTART_COUNT": str(restart), "LEAVE_S": "1"}
    return stubs.run("slurm.sbatch", **(slurm | {"RUN_DIR": str(folder), "PYTHON": sys.executable} | env))


CAMPAIGN = [pytest.param(*case, marks=pytest.mark.campaign) for case in ((0, 3), (1, 3), (2, 3))]


@pytest.mark.slow
@pytest.mark.parametrize(("updates", "attempts"), [*CAMPAIGN, (3, None)])
def test_one_step_per_attempt_is_no_progress(updates: int, attempts: int | None, stubs: Stubs, tmp_path: Path) -> None:
    """A job that gets its notice just after its start would be requeued forever."""
    for number in range(attempts or 5):
        ran = batch(stubs, tmp_path / "run", f"said stopped {(number + 1) * updates}; exit 75", number)
        is_last = number + 1 == attempts
        assert ran.returncode == is_last, ran.err + ran.out
        assert len(stubs.called("scontrol")) == number + 1 - is_last
    assert ("fewer than 3 steps in each of 3 attempts in a row" in ran.out) == (attempts is not None)
    if attempts:
        again = batch(stubs, tmp_path / "run", "exit 0", attempts)
        assert (again.returncode, len(stubs.called("srun"))) == (1, attempts), "nor does it begin if Slurm requeues it"
        assert batch(stubs, tmp_path / "run", "exit 0", 0).returncode == 0, "submitted anew it does"
        assert batch(stubs, tmp_path / "run", "exit 0", attempts, MIN_STEPS="0").returncode == 0


@pytest.mark.slow
def test_a_finished_run_is_not_idle(stubs: Stubs, tmp_path: Path) -> None:
    """Its node failed before the batch file ended."""
    for number in range(5):
        assert batch(stubs, tmp_path / "run", "said finished 2; exit 0", number).returncode == 0


WAITS = """
old=$(stat -c %Y "$RUN_DIR/notice" 2>/dev/null) # what a run takes for one from before
for second in $(seq 30); do
  sleep 1
  new=$(stat -c %Y "$RUN_DIR/notice" 2>/dev/null) && [ "$new" != "$old" ] && { said stopped 9; exit 75; }
done
said finished 99
"""


@pytest.mark.slow
def test_no_notice_is_lost(stubs: Stubs, tmp_path: Path) -> None:
    """A run that is just starting takes a notice for that of an earlier attempt, so it is repeated."""
    finds_one = 'kill -USR1 $BATCH; until [ -e "$RUN_DIR/notice" ]; do sleep 0.1; done'
    ran = batch(stubs, tmp_path / "run", f"{finds_one}\n{WAITS}")
    assert ran.returncode == 0, ran.err + ran.out
    assert stubs.called("scontrol") == ["requeue 7"]


@pytest.mark.slow
def test_notice_before_python_handles_signals_is_not_lost(stubs: Stubs, tmp_path: Path) -> None:
    """The signal stays blocked until the supervisor has installed its handlers."""
    stubs.add("python", f'kill -USR1 $$; exec {sys.executable} "$@"')
    ran = batch(stubs, tmp_path / "run", WAITS, PYTHON=str(stubs.folder / "python"))
    assert ran.returncode == 0, ran.err + ran.out
    assert stubs.called("scontrol") == ["requeue 7"]


@pytest.mark.slow
def test_cancelled_job_is_not_requeued(stubs: Stubs, tmp_path: Path) -> None:
    ran = batch(stubs, tmp_path / "run", f"kill -TERM $BATCH\n{WAITS}")
    assert ran.returncode == 75, ran.err + ran.out
    assert stubs.called("scontrol") == []


@pytest.mark.slow
def test_a_notice_that_cannot_be_written_does_not_end_the_job(stubs: Stubs, tmp_path: Path) -> None:
    """As on a full disk, or if the folder was removed: the run continues and ends normally."""
    ran = batch(stubs, tmp_path / "run", "kill -USR1 $BATCH; rm -r $RUN_DIR; sleep 3; mkdir $RUN_DIR; said finished 9")
    assert ran.returncode == 0, ran.err + ran.out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"SLURM_JOB_ID": ""}, "runs inside a Slurm job"),
        ({"MAX_IDLE": "often"}, "MAX_IDLE=often: must be a whole number"),
    ],
)
def test_user_error_is_one_message(env: dict[str, str], message: str, stubs: Stubs, tmp_path: Path) -> None:
    ran = batch(stubs, tmp_path / "run", "exit 0", **env)
    assert (ran.returncode, stubs.called("srun")) == (2, [])
    assert message in ran.err
    assert "Traceback" not in ran.err
    assert not (tmp_path / "run").exists()


def job_of(*arguments: str, **env: str) -> Job:
    return make_job(make_parser().parse_intermixed_args(["recipe=x", *arguments]), {"SLURM_JOB_ID": "7", **env})


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"REQUEUE": "1"}, "REQUEUE=1: must be yes or no\n  did you mean REQUEUE=yes?"),
        ({"REQUEUE": "true"}, "REQUEUE=true: must be yes or no\n  did you mean REQUEUE=yes?"),
        ({"REQUEUE": "0"}, "REQUEUE=0: must be yes or no\n  did you mean REQUEUE=no?"),
        ({"REQUEUE": "always"}, "REQUEUE=always: must be yes or no"),
        ({"REQUEUE_FAILED": "yes"}, "REQUEUE_FAILED=yes: must be 1 or 0\n  did you mean REQUEUE_FAILED=1?"),
        ({"REQUEUE_FAILED": "2"}, "REQUEUE_FAILED=2: must be 1 or 0"),
        ({"MAX_IDLE": "0"}, "MAX_IDLE=0: must be at least 1\n  nearest legal value: MAX_IDLE=1"),
        ({"MAX_IDLE": "-1"}, "MAX_IDLE=-1: must be a whole number"),
        ({"MIN_STEPS": "2.5"}, "MIN_STEPS=2.5: must be a whole number"),
        ({"LEAVE_S": "0"}, "LEAVE_S=0: must be at least 1\n  nearest legal value: LEAVE_S=1"),
        ({"NPROC": "0"}, "--nproc=0: must be at least 1"),
    ],
)
def test_nonsense_in_a_variable_is_rejected(env: dict[str, str], message: str) -> None:
    arguments = [f"--nproc={env.pop('NPROC')}"] if "NPROC" in env else []
    with pytest.raises(UserError) as raised:
        job_of(*arguments, **env)
    assert str(raised.value).startswith(message)


def test_values_that_the_variables_may_have() -> None:
    assert (job_of().requeue, job_of().requeue_failed) == (True, False)
    assert (job_of(REQUEUE="", REQUEUE_FAILED="", MAX_IDLE="")) == job_of(), "empty is as good as not set"
    assert (job_of(REQUEUE="yes").requeue, job_of(REQUEUE="no").requeue) == (True, False)
    assert (job_of(REQUEUE_FAILED="1").requeue_failed, job_of(REQUEUE_FAILED="0").requeue_failed) == (True, False)
    assert (job_of(MIN_STEPS="0").min_steps, job_of(MAX_IDLE="1").max_idle, job_of(LEAVE_S="5").leave_s) == (0, 1, 5)


LOG = """
2026-01-01T00:00:00 job 5 restart 0 step 0 begins
2026-01-01T00:00:00 job 5 restart 0 step 1 requeued, exit code 75
2026-01-01T00:00:00 job 7 restart 0 step 1 begins
2026-01-01T00:00:00 job 7 restart 1 step 3 begins
"""


@pytest.mark.parametrize(
    ("job", "step", "expected"), [("7", 4, 2), ("7", 6, 0), ("5", 4, 0), ("7", 1, 2)], ids=lambda value: str(value)
)
def test_idle_attempts_of_this_job_are_counted(job: str, step: int, expected: int) -> None:
    assert count_idle(LOG.strip().splitlines(), job, step, min_steps=3) == expected


@pytest.mark.slow
@pytest.mark.parametrize("helps", [True, pytest.param(False, marks=pytest.mark.campaign)])
def test_a_step_that_outlives_its_ranks_is_ended(helps: bool, stubs: Stubs, tmp_path: Path) -> None:
    """It may be any step of the job. If Slurm does not even cancel it, srun is abandoned."""
    pid = tmp_path / "pid"
    stubs.add("squeue", "echo 7.0 true; echo 7.1 ranks; echo 7.batch batch")
    stubs.add("scancel", f"kill $(cat {pid})" if helps else "")
    try:
        ran = batch(stubs, tmp_path / "run", f"echo $$ >{pid}; said stopped 9; exec sleep 100 &>/dev/null")
    finally:
        with suppress(OSError, ValueError):
            os.kill(int(pid.read_text()), 9)
    assert stubs.called("scancel") == ["7.1"]
    assert ran.returncode == 0, ran.err + ran.out
    assert stubs.called("scontrol") == ["requeue 7"]
    assert json.loads((tmp_path / "run" / "status.json").read_text())["step"] == 9


@pytest.mark.slow
def test_container_mounts_the_run_folder(stubs: Stubs, tmp_path: Path) -> None:
    stubs.add("scontrol", 'case $2 in hostnames) echo n1 ;; node) echo "NodeName=n1 NodeAddr=10.0.0.1 X=1" ;; esac')
    stubs.add("srun", 'echo "MASTER_ADDR=$MASTER_ADDR"')
    env = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NAME": "mine", "IMAGE": "mine.sif"}
    env["PYTHON"] = sys.executable
    ran = stubs.run("container.sbatch", "run.dir=../else where", **env)
    assert "MASTER_ADDR=10.0.0.1" in ran.out, ran.err
    (call,) = stubs.called("srun")
    assert f" --bind {stubs.folder},{tmp_path}/else where --pwd {stubs.folder} mine.sif python -m" in call
