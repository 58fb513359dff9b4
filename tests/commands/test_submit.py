"""`meshtrainer submit`: the job of a recipe as one would write it by hand, for Slurm, Kubernetes and this machine."""

from __future__ import annotations

import os
import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.forked import REPOSITORY
from trainer import submit

DATA = "data.path=a b/*.bin"
BASE = ["recipe=llama3_8b", "mesh.shard=node", "mesh.replicate=-1", "train.global_batch_size=1024", DATA]


def printed(capsys: pytest.CaptureFixture[str], *words: str, exit_code: int = 0) -> str:
    """Return what a dry run prints."""
    capsys.readouterr()
    assert submit.command_line([*words, "--dry-run"]) == exit_code, capsys.readouterr().err
    return capsys.readouterr().out


def directives(text: str) -> dict[str, str]:
    options = " ".join(re.findall(r"^#SBATCH (.*)$", text, re.MULTILINE))
    return dict(word.partition("=")[::2] for word in shlex.split(options))


@pytest.mark.parametrize("nodes", [1, 8, 64])
def test_a_batch_file(nodes: int, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "slurm", f"--nodes={nodes}", "--option=--account=us", *BASE, "run.name=my run")
    lines = text.splitlines()
    assert len(lines) <= 15
    assert lines[0] == "#!/usr/bin/env bash"
    found = directives(text)
    assert (found["--nodes"], found["--ntasks-per-node"], found["--gpus-per-node"]) == (str(nodes), "8", "8")
    assert (found["--job-name"], found["--account"], found["--signal"]) == ("my-run", "us", "B:USR1@300")
    assert {"--requeue", "--open-mode", "--time"} <= found.keys()
    command = shlex.split(text[text.index("exec ") :].replace("\\\n", ""))
    start = ["exec", "env", "--block-signal=USR1,TERM", sys.executable, "-m", "trainer.slurm", "recipe=llama3_8b"]
    assert command == [*start, "run.dir=runs/my run", *BASE[1:], "run.name=my run"]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["mesh.replicate=4", "mesh.shard=16"], "8"),
        (["mesh.replicate=2", "mesh.shard=node"], "2"),
        (["mesh.replicate=1", "mesh.shard=8"], "1"),
    ],
)
def test_nodes_of_the_mesh(settings: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "slurm", "recipe=llama3_8b", "train.global_batch_size=1024", DATA, *settings)
    assert directives(text)["--nodes"] == expected


@pytest.mark.campaign  # half a minute of planning
def test_nodes_of_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """The fewest nodes, by powers of two, of which `trainer.plan` says that the run fits, and of half as many not."""
    settings = ["recipe=llama3_8b", "mesh.replicate=1", "mesh.shard=-1", "train.global_batch_size=1024"]
    settings += ["run.memory_gib=56", "data.source=synthetic"]
    num_nodes = int(directives(printed(capsys, "slurm", *settings))["--nodes"])
    from trainer.plan.__main__ import command_line as plan

    assert plan([*settings, f"ranks={8 * num_nodes}", "device=h100"]) == 0
    assert num_nodes > 1
    assert plan([*settings, f"ranks={4 * num_nodes}", "device=h100"]) == 3


def test_a_run_on_cpus_asks_for_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["recipe=llama_small", "run.device=cpu", "train.global_batch_size=8", "train.micro_batch_size=1"]
    found = directives(printed(capsys, "slurm", "--ranks=4", "--cpus=2", *settings))
    assert "--gpus-per-node" not in found
    assert (found["--nodes"], found["--ntasks-per-node"], found["--cpus-per-task"]) == ("1", "4", "2")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["slurm"], "recipe=NAME is missing"),
        (["slurm", "recipe=llama3_8b", "mesh.shrad=8"], "mesh.shrad=8: no such key"),
        (["slurm", "--nodes=0", "recipe=llama3_8b"], "--nodes=0: must be at least 1"),
        (["slurm", "--time=1d", "recipe=llama3_8b"], "--time=1d: must have the form HH:MM:SS"),
        (["slurm", "--time=00:00:00", "recipe=llama3_8b"], "--time=00:00:00: must be at least a minute"),
        (["slurm", "--ranks=0", "recipe=llama3_8b"], "--ranks=0: must be at least 1"),
        (["slurm", "--option=account=me", "recipe=llama3_8b"], "--option=account=me: must be one option of sbatch"),
        (["slurm", "--option=", "recipe=llama3_8b"], "--option=: must be one option of sbatch"),
        (["slurm", "recipe=llama_small"], "train.global_batch_size=8: must be 8 data-parallel ranks"),
        (["slurm", "recipe=llama3_8b", "nproc=8"], "nproc=8: does not apply to a job; use --nodes and --gpus instead"),
        (["slurm", "--nodes=3", *BASE], "train.global_batch_size=1024"),
        (
            ["slurm", "recipe=llama3_8b", "mesh.replicate=3", "mesh.shard=4"],
            "--gpus=8: mesh.replicate x mesh.shard is 12",
        ),
        (["k8s", "--nodes=1", *BASE], "--image: a job on Kubernetes needs the image"),
        (["k8s", "--image=a b", *BASE], "--image=a b: must be the name of an image"),
        (["k8s", "--image=i", "--claim=My_Data", *BASE], "--claim=My_Data: must be the name of a volume claim"),
        (["k8s", "--image=i", "--mount=data", *BASE], "--mount=data: must be an absolute path"),
        (["k8s", "--image=i", "--nodes=1", *BASE, "run.dir=/tmp/r"], "run.dir=/tmp/r: is not on the volume"),
        (["k8s", "--image=i", "--nodes=1", *BASE, "run.dir=../r"], "run.dir=../r: is not on the volume"),
        (["local", "--ranks=0", "recipe=llama_small"], "--ranks=0: must be at least 1"),
        (["local", "--nodes=2", "--ranks=1", "recipe=llama_small"], "--nodes=2: this machine is one node"),
    ],
)
def test_mistakes_are_one_message(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit.command_line([*words, "--dry-run"]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.out == ""


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["recipe=llama_small", "run.name=a b"]
    text = printed(capsys, "local", "--ranks=2", *settings)
    assert shlex.split(text) == [sys.executable, "-m", "trainer.run", *settings, "nproc=2"]


@pytest.mark.slow
@pytest.mark.parametrize(("where", "program"), [("slurm", "sbatch"), ("k8s", "kubectl")])
def test_what_is_sent_is_what_is_printed(where: str, program: str, tmp_path: Path) -> None:
    """To a program that keeps what it is given, says a number, and fails if asked to."""
    path = tmp_path / program
    path.write_text(
        f'#!/bin/bash\ncat >{tmp_path}/sent\necho "$@" >{tmp_path}/arguments\necho job 7\nexit ${{FAILS:-0}}\n'
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    command = [sys.executable, "-m", "trainer.submit", where, "--nodes=1", "--image=r/i:1", *BASE]

    def ran(*further: str, **env: str) -> subprocess.CompletedProcess[str]:
        own = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"} | env
        return subprocess.run([*command, *further], cwd=REPOSITORY, env=own, capture_output=True, text=True)

    dry = ran("--dry-run")
    script = dry.stdout if where == "slurm" else yaml.safe_load(dry.stdout)["spec"]["replicatedJobs"][0]
    if where == "k8s":
        (script,) = script["template"]["spec"]["template"]["spec"]["containers"][0]["args"]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    sent = ran()
    assert (sent.returncode, sent.stdout) == (0, "job 7\n"), sent.stderr
    assert (tmp_path / "sent").read_text() == dry.stdout
    assert (tmp_path / "arguments").read_text().strip() == {"sbatch": "", "kubectl": "apply -f -"}[program]
    assert ran(FAILS="3").returncode == 1
    path.unlink()
    if where == "k8s":
        missing = ran(PATH=str(tmp_path))
        assert (missing.returncode, len(missing.stderr.splitlines())) == (2, 2)


# ---------------------------------------------------------------------------------------------------------------
# Kubernetes

NAME = {"type": "string", "pattern": "^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"}
JOB_SET: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "jobset.x-k8s.io/v1alpha2"},
        "kind": {"const": "JobSet"},
        "metadata": {"type": "object", "required": ["name"], "properties": {"name": NAME}},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "failurePolicy": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "maxRestarts": {"type": "integer", "minimum": 0},
                        "restartStrategy": {"enum": ["Recreate", "BlockingRecreate"]},
                        "rules": {
                            "type": "array",
                            "items": {
                                "type": "object",
                                "additionalProperties": False,
                                "required": ["name", "action"],
                                "properties": {
                                    "name": {"type": "string", "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
                                    "action": {
                                        "enum": ["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"]
                                    },
                                    "onJobFailureReasons": {
                                        "type": "array",
                                        "items": {
                                            "enum": [
                                                *("BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes"),
                                                *("MaxFailedIndexesExceeded", "PodFailurePolicy"),
                                            ]
                                        },
                                    },
                                    "targetReplicatedJobs": {"type": "array", "items": {"type": "string"}},
                                },
                            },
                        },
                    },
                },
                "network": {"type": "object"},
                "successPolicy": {"type": "object"},
                "startupPolicy": {"type": "object"},
                "suspend": {"type": "boolean"},
                "ttlSecondsAfterFinished": {"type": "integer"},
                "replicatedJobs": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "additionalProperties": False,
                        "required": ["name", "template"],
                        "properties": {
                            "name": NAME,
                            "groupName": {"type": "string"},
                            "replicas": {"type": "integer", "minimum": 0},
                            "template": {
                                "type": "object",
                                "additionalProperties": False,
                                "properties": {"metadata": {"type": "object"}, "spec": {"type": "object"}},
                            },
                        },
                    },
                },
            },
        },
    },
}
"""The schema of JobSet's own fields, as its CRD has them (api/jobset/v1alpha2); jobs inside have Kubernetes' own."""


def assert_valid(job_set: dict[str, Any]) -> None:
    """Demand that a JobSet follows its schema, and each of its jobs that of Kubernetes, without unknown fields."""
    jsonschema = pytest.importorskip("jsonschema")
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    jsonschema.validate(job_set, JOB_SET)
    for job in job_set["spec"]["replicatedJobs"]:
        whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, **job["template"]}
        kubernetes_validate.validate(whole, "1.31", strict=True)


@pytest.mark.campaign
@pytest.mark.parametrize("nodes", [1, 8, 64])
def test_a_job_set_follows_its_schema(nodes: int, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "k8s", f"--nodes={nodes}", "--image=r/i:1", *BASE, "run.name=My Run")
    assert_valid(yaml.safe_load(text))


@pytest.mark.campaign
def test_the_job_set_of_launch_follows_its_schema() -> None:
    assert_valid(yaml.safe_load((REPOSITORY / "launch/kubernetes.yaml").read_text()))


@pytest.mark.campaign
@pytest.mark.parametrize(
    "damage", [{"spec": {"replicatedJob": []}}, {"kind": "Job"}, {"metadata": {"name": "My_Run"}}], ids=str
)
def test_the_schema_refuses_what_is_wrong(damage: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    found = yaml.safe_load(printed(capsys, "k8s", "--nodes=2", "--image=r/i:1", *BASE))
    with pytest.raises(jsonschema.ValidationError):
        assert_valid({**found, **damage})


CHECK_TASK = """
import sys, jsonschema, yaml
from sky.utils import schemas
task = yaml.safe_load(sys.stdin)
jsonschema.validate(task, schemas.get_task_schema())
"""


@pytest.mark.campaign
def test_the_task_of_skypilot_follows_its_schema() -> None:
    """SkyPilot's own.  It needs another click than wandb, so its Python is that of another environment."""
    python = os.environ.get("MESHTRAINER_TEST_SKYPILOT")
    if not python:
        pytest.skip("MESHTRAINER_TEST_SKYPILOT names no Python that has skypilot")
    text = (REPOSITORY / "launch/skypilot.yaml").read_text()
    for task, code in ((text, 0), (text.replace("num_nodes:", "num_node:"), 1)):
        assert subprocess.run([python, "-c", CHECK_TASK], input=task, text=True, capture_output=True).returncode == code


@pytest.mark.parametrize("nodes", [1, 8])
def test_a_job_set(nodes: int, capsys: pytest.CaptureFixture[str]) -> None:
    """As launch/kubernetes.yaml, but for names and sizes."""
    text = printed(capsys, "k8s", f"--nodes={nodes}", "--image=r/i:1", "--claim=mine", "--time=01:00:00", *BASE)
    found, known = yaml.safe_load(text), yaml.safe_load((REPOSITORY / "launch/kubernetes.yaml").read_text())
    assert found["metadata"]["name"] == "llama3-8b"
    assert {key: found[key] for key in ("apiVersion", "kind")} == {key: known[key] for key in ("apiVersion", "kind")}
    assert found["spec"]["failurePolicy"] == known["spec"]["failurePolicy"]
    ((job,), (shown,)) = (tree["spec"]["replicatedJobs"] for tree in (found, known))
    spec, shown_spec = job["template"]["spec"], shown["template"]["spec"]
    assert (spec["parallelism"], spec["completions"], spec["activeDeadlineSeconds"]) == (nodes, nodes, 3600)
    for key in ("completionMode", "backoffLimit", "podFailurePolicy"):
        assert spec[key] == shown_spec[key]
    (container,) = spec["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    (command,) = container["args"]
    assert f"--nnodes={nodes} --nproc-per-node=8" in command
    assert "--rdzv-endpoint=llama3-8b-node-0-0.llama3-8b:29500" in command
    assert "'data.path=a b/*.bin'" in command
    assert command.startswith("set -- recipe=llama3_8b run.dir=/data/runs/llama3_8b mesh.shard=node ")
    claims = [
        volume["persistentVolumeClaim"] for volume in spec["template"]["spec"]["volumes"] if "emptyDir" not in volume
    ]
    assert claims == [{"claimName": "mine"}]
