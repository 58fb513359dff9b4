"""Rank and world size from the variables of torchrun and Slurm, and errors in these variables."""

from __future__ import annotations

import gc
import socket
import subprocess
from pathlib import Path

import pytest

from trainer import UserError
from trainer.distributed.environment import (
    NPROC_VARIABLE,
    Environment,
    check_rendezvous,
    export_slurm_rendezvous,
    find_environment,
    without_garbage_collection,
)

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "node[1-4]",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
}
JOB = {"SLURM_NTASKS": "16", "SLURM_TASKS_PER_NODE": "4(x4)", "SLURM_JOB_NODELIST": "node[1-8]"}
"""Slurm's variables of the job; a step may use only some of its nodes."""


def test_no_launcher() -> None:
    assert find_environment({}) == Environment("single", rank=0, world_size=1, local_rank=0, local_world_size=1)
    assert not find_environment({}).is_distributed


def test_torchrun() -> None:
    assert find_environment(dict(TORCHRUN)) == Environment("torchrun", 5, 8, 1, 4)
    assert find_environment(TORCHRUN | {NPROC_VARIABLE: "8"}).launcher == "nproc"
    assert find_environment({"RANK": "1", "WORLD_SIZE": "2"}) == Environment("torchrun", 1, 2, 0, 2)
    assert find_environment(TORCHRUN | SRUN).launcher == "torchrun", "torchrun started by srun"


@pytest.mark.parametrize(
    ("tasks", "node", "expected"),
    [("2(x3),1", 0, 2), ("2(x3),1", 2, 2), ("2(x3),1", 3, 1), ("7", 0, 7), ("1,2,4", 2, 4), ("1,3(x2)", 2, 3)],
)
def test_srun(tasks: str, node: int, expected: int) -> None:
    env = SRUN | JOB | {"SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": str(node)}
    place = {"rank": 5, "world_size": 7, "local_rank": 1, "local_world_size": expected}
    assert find_environment(env) == Environment("srun", **place, job="slurm 4711")


def test_slurm_step_with_one_task() -> None:
    env = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0"}
    assert find_environment(env) == Environment("srun")


def test_batch_script_without_srun_is_one_process() -> None:
    """Whatever the size of the job."""
    assert find_environment(JOB | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}).launcher == "single"


@pytest.mark.parametrize(
    ("launcher", "name", "text"),
    [
        (TORCHRUN, "RANK", ""),
        (TORCHRUN, "RANK", "one"),
        (TORCHRUN, "RANK", "-1"),
        (TORCHRUN, "RANK", "1.0"),
        (TORCHRUN, "RANK", "²"),
        (TORCHRUN, "WORLD_SIZE", "eight"),
        (TORCHRUN, "LOCAL_RANK", "x"),
        (TORCHRUN, "LOCAL_WORLD_SIZE", ""),
        (SRUN, "SLURM_PROCID", "x"),
        (SRUN, "SLURM_STEP_NUM_TASKS", "x"),
        (SRUN, "SLURM_LOCALID", ""),
        (SRUN, "SLURM_NODEID", "x"),
        (SRUN, "SLURM_NODEID", "4"),
        (SRUN, "SLURM_STEP_TASKS_PER_NODE", "two"),
        (SRUN, "SLURM_STEP_TASKS_PER_NODE", "2(x"),
        (SRUN, "SLURM_STEP_TASKS_PER_NODE", "2(x3),"),
    ],
)
def test_malformed_variables_are_named(launcher: dict[str, str], name: str, text: str) -> None:
    with pytest.raises(UserError, match=name):
        find_environment(launcher | {name: text})


@pytest.mark.parametrize(
    ("variables", "key", "proposed"),
    [
        ({"RANK": "0"}, "RANK=0", ""),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2", ""),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2", "RANK=1"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, "LOCAL_RANK=4", "LOCAL_RANK=3"),
        (TORCHRUN, "MASTER_ADDR=null", ""),
        (TORCHRUN | {"MASTER_ADDR": "here"}, "MASTER_PORT=null", ""),
        (TORCHRUN | {"MASTER_ADDR": "here", "MASTER_PORT": "tcp"}, "MASTER_PORT=tcp", ""),
    ],
)
def test_partly_set_launcher_variables(variables: dict[str, str], key: str, proposed: str) -> None:
    with pytest.raises(UserError, match=f"^{key}: ") as raised:
        check_rendezvous(find_environment(variables), variables)
    if proposed:
        assert raised.value.proposal == proposed


# ---------------------------------------------------------------------------------------------------------------
# Rendezvous


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `scontrol` first on PATH that notes its arguments in a file, which is returned."""
    calls = tmp_path / "calls"
    calls.touch()
    program = tmp_path / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {calls}\n'
        'case "$2" in\n'
        "  hostnames) printf 'node1\\nnode2\\nnode3\\nnode4\\n' ;;\n"
        "  node) echo 'NodeName=node1 Arch=x86_64 NodeAddr=10.0.0.17 NodeHostName=node1' ;;\n"
        "esac\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    return calls


def resolve(name: str) -> str:
    return {"node1": "192.168.0.1"}[name]


def no_such_name(name: str) -> str:
    raise socket.gaierror("Name or service not known")


@pytest.mark.slow
def test_rendezvous(scontrol: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostbyname", resolve)
    env = SRUN | JOB
    export_slurm_rendezvous(env)
    variables = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    assert [env[name] for name in variables] == ["5", "7", "1", "2", "192.168.0.1"]
    assert "show hostnames node[1-4]" in scontrol.read_text(), "the step's nodes, not the job's"
    assert 1024 < int(env["MASTER_PORT"]) < 32768, "below the ephemeral ports"


@pytest.mark.slow
def test_address_if_host_names_do_not_resolve(scontrol: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostbyname", no_such_name)
    env = dict(SRUN)
    export_slurm_rendezvous(env)
    assert env["MASTER_ADDR"] == "10.0.0.17"


def test_variables_that_are_already_set_are_kept(scontrol: Path) -> None:
    env = SRUN | {"MASTER_ADDR": "10.1.1.1", "MASTER_PORT": "12345"}
    export_slurm_rendezvous(env)
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("10.1.1.1", "12345")
    assert scontrol.read_text() == ""


def test_tasks_of_a_step_share_a_port_that_other_steps_do_not() -> None:
    def port(**changes: str) -> str:
        env = SRUN | {"MASTER_ADDR": "10.1.1.1"} | changes
        export_slurm_rendezvous(env)
        return env["MASTER_PORT"]

    first = port()
    assert port(SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_NODEID="0") == first
    others = [port(SLURM_STEP_ID="1"), port(SLURM_RESTART_COUNT="1"), port(SLURM_JOB_ID="4712")]
    assert len({first, *others}) == 4


@pytest.mark.slow
def test_message_without_scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container on a cluster: the message says to set MASTER_ADDR."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="MASTER_ADDR"):
        export_slurm_rendezvous(dict(SRUN))


@pytest.mark.slow
def test_message_if_scontrol_fails(scontrol: Path) -> None:
    program = scontrol.parent / "bin" / "scontrol"
    program.write_text("#!/bin/sh\necho 'slurm_load_jobs error: Unable to contact slurm controller' >&2\nexit 1\n")
    assert subprocess.run([program], capture_output=True).returncode == 1
    with pytest.raises(UserError, match="MASTER_ADDR"):
        export_slurm_rendezvous(dict(SRUN))


@pytest.mark.parametrize("was_on", [True, False])
def test_garbage_collector_settings_are_restored(was_on):
    was = gc.isenabled()
    try:
        (gc.enable if was_on else gc.disable)()
        with without_garbage_collection():
            assert not gc.isenabled()
        assert gc.isenabled() == was_on
    finally:
        (gc.enable if was else gc.disable)()
