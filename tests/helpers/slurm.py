"""A real Slurm cluster with several nodes on this machine, from Debian's packages.

Needs slurmctld, slurmd, slurm-client and munge, but not root: the nodes are slurmds with separate names and ports on
the loopback interface, with as many CPUs as the settings claim. All files are in one temporary folder.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.helpers.gate import PATIENCE_S, wait_until
from tests.helpers.launch import REPOSITORY

PATH = os.environ["PATH"] + ":/usr/sbin:/sbin"  # where Debian puts daemons
FINAL_STATES = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
FREEZER = Path("/sys/fs/cgroup/freezer")

SETTINGS = """
ClusterName=meshtrainer
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={port}
AuthType=auth/munge
CredType=cred/munge
# cred_expire is also how long a requeued job waits: two minutes by default, five seconds at least
AuthInfo=socket={folder}/munge.sock,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/{tracking}
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
PropagateResourceLimits=NONE
# take the number of CPUs from these settings, not from the hardware
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=2,sched_interval=2,batch_sched_delay=0
KillWait=15
SlurmdTimeout=15
MessageTimeout=30
ReturnToService=2
MinJobAge=3600
JobRequeue=1
PartitionName=all Nodes=ALL Default=YES MaxTime=60 DefaultTime=10 State=UP
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 CoresPerSocket=2 State=UNKNOWN\n"


def missing_programs() -> list[str]:
    """Return the Slurm programs that are not installed."""
    programs = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
    return [name for name in programs if shutil.which(name, path=PATH) is None]


class Cluster:
    """A Slurm cluster. `nodes` are the names of its nodes; `env` is the environment for commands that talk to it."""

    def __init__(self, folder: Path, num_nodes: int) -> None:
        self.folder = folder
        port, *ports = _free_ports(1 + num_nodes)
        self.nodes = [f"p{port}n{number}" for number in range(num_nodes)]  # unique among the clusters on this machine
        # With cgroups signals reach everything that srun started, and orphans end with the step.
        self.tracking = "cgroup" if os.access(FREEZER / "cgroup.procs", os.W_OK) else "linuxproc"
        self.env = os.environ | {"PATH": PATH, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._write_settings(port, ports)

    def _write_settings(self, port: int, ports: list[int]) -> None:
        host, user = socket.gethostname().partition(".")[0], str(os.getuid())
        text = SETTINGS.format(host=host, user=user, port=port, folder=self.folder, tracking=self.tracking)
        for name, own_port in zip(self.nodes, ports, strict=True):
            text += NODE.format(name=name, host=host, port=own_port)
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # set, so that Slurm does not search
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))

    def start(self) -> None:
        folder = self.folder
        files = {"key-file": "munge.key", "socket": "munge.sock", "pid-file": "munge.pid", "log-file": "munge.log"}
        options = [f"--{option}={folder / name}" for option, name in (files | {"seed-file": "munge.seed"}).items()]
        self._start("munged", "--foreground", "--force", *options)
        wait_until((folder / "munge.sock").exists, "munged")
        self._start("slurmctld", "-D")
        for name in self.nodes:
            self._start("slurmd", "-D", "-N", name)
        wait_until(lambda: self.call("sinfo", "-hN", "-t", "idle", "-o", "%N").split() == self.nodes, "the nodes")

    def _start(self, *command: str) -> None:
        with open(self.folder / "daemons.out", "ab") as out:
            quiet = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
            self._daemons.append(subprocess.Popen(command, env=self.env, cwd=self.folder, **quiet))  # type: ignore[call-overload]

    def stop(self) -> None:
        """Kill every process of this cluster, daemons and ranks alike."""
        wait_until(lambda: not self._kill_leftovers(), "the death of all processes")
        for daemon in self._daemons:
            daemon.wait(PATIENCE_S)
        for folder in self._cgroups():
            with suppress(OSError):  # a zombie that is not reaped keeps its cgroup
                folder.rmdir()

    def _kill_leftovers(self) -> list[int]:
        for folder in self._cgroups():  # Slurm freezes processes before it signals them; frozen processes do not die
            with suppress(OSError):
                (folder / "freezer.state").write_text("THAWED")
        left = self.processes()
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return left

    def _cgroups(self) -> list[Path]:
        """Return the cgroup folders in which Slurm tracks processes, innermost first."""
        return [
            Path(folder) for name in self.nodes for folder, _, _ in os.walk(FREEZER / f"slurm_{name}", topdown=False)
        ]

    def processes(self, **variables: str) -> list[int]:
        """Return the processes of this cluster, daemons and ranks alike, that have these environment variables."""
        variables["SLURM_CONF"] = self.env["SLURM_CONF"]
        wanted = {f"{name}={value}".encode() for name, value in variables.items()}
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if wanted <= set(path.read_bytes().split(b"\0")):
                    found.append(int(path.parent.name))
        return [pid for pid in found if pid != os.getpid()]

    def call(self, *command: str, check: bool = True, env: Mapping[str, str] | None = None) -> str:
        done = subprocess.run(
            command, env={**self.env, **(env or {})}, cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert done.returncode == 0 or not check, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def submit(self, *command: str, **env: str) -> str:
        """Submit a batch file (options before it, overrides after it) with `sbatch`, and return the job's id."""
        return self.call("sbatch", "--parsable", f"--output={self.folder}/%j.out", *command, env=env)

    def job(self, job: str) -> dict[str, str]:
        """Return Slurm's record of a job: JobState, Restarts, ExitCode, ..."""
        return dict(re.findall(r"(\w+)=(\S*)", self.call("scontrol", "show", "job", "-o", job)))

    def log(self, job: str) -> str:
        path = self.folder / f"{job}.out"
        return path.read_text() if path.exists() else ""

    def wait_for_end(self, job: str, restarts: int = 0) -> dict[str, str]:
        """Wait until the job has ended after `restarts` restarts; before a restart it briefly looks ended."""

        def has_ended() -> bool:
            found = self.job(job)
            return found["JobState"] in FINAL_STATES and int(found["Restarts"]) >= restarts

        try:
            wait_until(has_ended, f"the end of job {job} after {restarts} restarts")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.job(job)}\n{self.log(job)}") from error
        return self.job(job)


@contextmanager
def slurm_cluster(num_nodes: int) -> Iterator[Cluster]:
    """Run a cluster, and remove all of it afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # not pytest's folder: a socket's path has 108 characters at most
    folder.chmod(0o755)
    cluster = Cluster(folder, num_nodes)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _free_ports(number: int) -> list[int]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [int(listener.getsockname()[1]) for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports
