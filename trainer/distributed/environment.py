"""Reads this process's rank and world size from environment variables, and applies process-wide settings.

The launcher may be torchrun, srun (Slurm) or `nproc=N`.  This module does not import torch, so that configuration
errors are reported quickly.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import ipaddress
import os
import re
import resource
import signal
import socket
import struct
import subprocess
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from trainer.errors import EXIT_FAILED, UserError, setting_error

NPROC_VARIABLE = "MESHTRAINER_NPROC"
"""Environment variable set in the workers that `nproc=N` starts: the parent has printed the start-up notes for them."""

START_TIME = "MESHTRAINER_STARTED"
"""Environment variable with the command's start time, in seconds since the epoch."""

LAUNCHER_PID_VARIABLE = "MESHTRAINER_LAUNCHER"
"""Environment variable with the launcher's PID, set in the workers that `nproc=N` starts."""

ENDS_SILENT_RANK = signal.SIGVTALRM
"""The signal that ends a rank that does not answer.  Nobody else sends it, so a launcher can tell it from a cause."""

EXPANDABLE = "expandable_segments:True"
"""The CUDA allocator's configuration, unless the user sets a different one."""

_PR_SET_PDEATHSIG = 1
"""From <sys/prctl.h>."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""From <malloc.h>."""

_MAX_OPEN_FILES, _USUAL_OPEN_FILES = 65536, 1024
"""The highest limit on open files to request, and the usual default.  The request is finite, since some programs close
every descriptor up to the limit."""


@dataclass(frozen=True)
class Environment:
    """The rank of this process, and what its launcher reports about the run.

    launcher: `single`, `nproc`, `torchrun`, `srun`, or `joined` (other code had already initialized the process group).
    """

    launcher: str = "single"
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    job: str = ""
    """The launcher's id for the job, which stays the same after restarts; "" if there is none."""
    num_restarts: int = 0
    """How many times the launcher has restarted the job."""

    @property
    def num_nodes(self) -> int:
        """Number of nodes, if all nodes have as many ranks as this one."""
        return -(-self.world_size // self.local_world_size)

    @property
    def has_launcher_parent(self) -> bool:
        """True if the parent process is a launcher that outlives this process; RANK alone does not prove that."""
        return self.launcher in ("nproc", "srun") or (
            self.launcher == "torchrun" and "TORCHELASTIC_RUN_ID" in os.environ
        )

    @property
    def is_distributed(self) -> bool:
        return self.launcher != "single"


def find_environment(env: MutableMapping[str, str] = os.environ) -> Environment:
    """Read the launcher's environment variables.  A process without a launcher is rank 0 of 1.

    Under torchrun these are RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE
    (https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables).  Under srun they are the variables of
    the Slurm step, because a step may use only part of its job.
    """
    if "RANK" in env and "WORLD_SIZE" in env:
        world_size = _read_int(env, "WORLD_SIZE")
        local_world_size = _read_int(env, "LOCAL_WORLD_SIZE", world_size)
        return Environment(
            launcher="nproc" if NPROC_VARIABLE in env else "torchrun",
            rank=_read_int(env, "RANK", below=("WORLD_SIZE", world_size)),
            world_size=world_size,
            local_rank=_read_int(env, "LOCAL_RANK", 0, below=("LOCAL_WORLD_SIZE", local_world_size)),
            local_world_size=local_world_size,
            job=_job_id(env),
            num_restarts=_num_restarts(env),
        )
    if "SLURM_PROCID" in env and "SLURM_STEP_NUM_TASKS" in env and "SLURM_LOCALID" in env:
        return Environment(
            launcher="srun",
            rank=_read_int(env, "SLURM_PROCID"),
            world_size=_read_int(env, "SLURM_STEP_NUM_TASKS"),
            local_rank=_read_int(env, "SLURM_LOCALID"),
            local_world_size=_tasks_on_this_node(env),
            job=_job_id(env),
            num_restarts=_num_restarts(env),
        )
    for name, missing in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if name in env:
            rule = f"a launcher also sets {missing}, which is not set"
            raise setting_error(name, env[name], rule, fix=f"start with torchrun, srun or nproc=N, or unset {name}")
    return Environment(job=_job_id(env), num_restarts=_num_restarts(env))


def check_rendezvous(environment: Environment, env: Mapping[str, str] = os.environ) -> None:
    """Raise UserError unless rank 0's address and port are set; ranks that were started by hand may lack them."""
    if environment.launcher != "torchrun" or environment.world_size == 1:
        return
    fix = "start with torchrun, which sets it, or set it to the host of rank 0 and a free port there"
    if not env.get("MASTER_ADDR"):
        raise setting_error("MASTER_ADDR", env.get("MASTER_ADDR"), "ranks have no rendezvous address", fix=fix)
    if not env.get("MASTER_PORT", "").isdecimal() or not 0 < int(env["MASTER_PORT"]) < 65536:
        raise setting_error("MASTER_PORT", env.get("MASTER_PORT"), "must be a port, from 1 to 65535", fix=fix)


def _job_id(env: MutableMapping[str, str]) -> str:
    if env.get("SLURM_JOB_ID"):
        return f"slurm {env['SLURM_JOB_ID']}"
    elastic = env.get("TORCHELASTIC_RUN_ID", "none")  # torchrun's default for jobs without an id
    return "" if elastic == "none" else f"torchrun {elastic}"


def _num_restarts(env: MutableMapping[str, str]) -> int:
    return _read_int(env, "SLURM_RESTART_COUNT", 0) + _read_int(env, "TORCHELASTIC_RESTART_COUNT", 0)


def die_with_parent(enabled: bool, env: MutableMapping[str, str] = os.environ) -> None:
    """Have the kernel kill this process when its parent dies, or turn that off.  Linux only.

    Otherwise, if the launcher is killed, ranks that wait for each other would hold their GPUs for minutes.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None) if os.name == "posix" else None
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL if enabled else 0)
    if enabled and env.get(LAUNCHER_PID_VARIABLE, str(os.getppid())) != str(os.getppid()):
        os._exit(EXIT_FAILED)  # the parent is already dead


def record_start_time(start_time: float, env: MutableMapping[str, str] = os.environ) -> None:
    """Record the command's start time, for the first Trainer in this process or in each of its workers.

    start_time: in seconds since the Unix epoch.
    """
    if NPROC_VARIABLE not in env:
        env[START_TIME] = repr(start_time)


def take_start_time(env: MutableMapping[str, str] = os.environ) -> float | None:
    """Return the command's start time for the first Trainer of this process; None for later ones, or if not known."""
    text = env.get(START_TIME, "")
    is_first = bool(text) and text not in _taken_start_times
    _taken_start_times.add(text)
    return float(text) if is_first else None


_taken_start_times: set[str] = set()
"""Start times already taken by a Trainer of this process.  Removing the variable could crash threads that read it."""


def limit_spinning(env: MutableMapping[str, str] = os.environ) -> None:
    """Make idle OpenMP threads sleep after a short spin, unless the user configured this.  Call before importing torch.

    By default they spin for a long time, which slows training severely on busy cores.  Measured with llama_small on two
    busy cores: by default about 600 tokens/s; with this setting 5,100 to 7,900, but next to a different load (two busy
    loops), so the numbers are not comparable.  On idle cores: 22,000 with this setting, 24,000 with endless spinning,
    12,400 without spinning.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & set(env):
        env["GOMP_SPINCOUNT"] = "10000"


def use_expandable_segments(env: MutableMapping[str, str] = os.environ) -> None:
    """Use expandable segments for CUDA memory, unless the user configured this.  Call before importing torch.

    Without them memory fragments: a model that needs 110 of 140 GiB runs out of memory.
    """
    if not {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} & set(env):
        env["PYTORCH_CUDA_ALLOC_CONF"] = EXPANDABLE


def keep_freed_memory(env: MutableMapping[str, str] = os.environ) -> None:
    """Make malloc keep freed memory for the next step, unless the user configured this.  A no-op without glibc.

    Otherwise malloc returns memory to the kernel and requests it again in every step, and the kernel zeroes each page.
    While a checkpoint is written, the page cache takes those pages: steps during a save took 1.28 to 1.43 times as long
    as others, and with this setting 0.92 to 1.29 times (206 M parameters, one thread).
    """
    if {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"} & set(env):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None:  # the first value is the largest that glibc would choose itself
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, -1)


def file_limit() -> int:
    """Return this process's limit on open files (`ulimit -n`)."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else soft


def raise_file_limit() -> str:
    """Raise the limit on open files for this process and its children, as far as permitted.

    Sockets to other ranks, batches from loader workers, shards and checkpoints need open files.  Returns advice if the
    limit remains low, otherwise an empty string.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_OPEN_FILES)
    if file_limit() < target:
        with contextlib.suppress(OSError, ValueError):  # macOS has another limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    if file_limit() >= _USUAL_OPEN_FILES:
        return ""
    return (
        f"`ulimit -n` allows {file_limit()} open files, which is the maximum; {_USUAL_OPEN_FILES} are usual: raise the "
        "limit, or training may fail with `Too many open files`"
    )


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Disable the garbage collector inside the block.

    Imported modules are never garbage, but the collector scans them 700 times during the import of torch.  That takes
    0.8 s of the 4.1 s of CPU time until the first step of llama_small.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def export_slurm_rendezvous(env: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables that `init_process_group` reads, from those of a Slurm step.

    The address is that of the first node.  The port is computed from the numbers of the job, step and restart, so that
    all tasks of a step agree on it without communication, and two steps on one node most likely use different ports.
    """
    environment = find_environment(env)
    env["RANK"], env["WORLD_SIZE"] = str(environment.rank), str(environment.world_size)
    env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"] = str(environment.local_rank), str(environment.local_world_size)
    if "MASTER_ADDR" not in env:
        env["MASTER_ADDR"] = first_node_address(env.get("SLURM_STEP_NODELIST") or env["SLURM_JOB_NODELIST"])
    if "MASTER_PORT" not in env:
        step = [int(env.get(name, "0")) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")]
        env["MASTER_PORT"] = str(15000 + (step[0] * 131 + step[1] * 7 + step[2]) % 15000)


def _read_int(
    env: MutableMapping[str, str], name: str, default: int | None = None, below: tuple[str, int] | None = None
) -> int:
    """Return a variable's integer value.  below: name and value of another variable, which must be greater."""
    text = env.get(name, "" if default is None else str(default))
    if not text.isdecimal():
        raise setting_error(name, text, "the launcher's variable must be a whole number", default)
    if below is not None and int(text) >= below[1]:
        rule = f"must be below {below[0]}={below[1]}: ranks are counted from 0"
        raise setting_error(name, text, rule, max(0, below[1] - 1))
    return int(text)


def _tasks_on_this_node(env: MutableMapping[str, str]) -> int:
    counts = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or env["SLURM_STEP_NUM_TASKS"]
    per_node: list[int] = []
    for item in counts.split(","):  # "2(x3),1" means 2, 2, 2, 1
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item)
        if match is None:
            raise setting_error("SLURM_STEP_TASKS_PER_NODE", counts, "must have Slurm's form, such as 2(x3),1")
        per_node += [int(match[1])] * int(match[2] or 1)
    node = _read_int(env, "SLURM_NODEID", 0)
    if node >= len(per_node):
        raise setting_error("SLURM_NODEID", node, f"SLURM_STEP_TASKS_PER_NODE={counts} lists {len(per_node)} nodes")
    return per_node[node]


def first_node_address(node_list: str) -> str:
    """Return the address of the first node of a Slurm node list.  Raises UserError if scontrol cannot name it."""

    def scontrol(*arguments: str) -> str:
        try:
            return subprocess.run(["scontrol", *arguments], check=True, capture_output=True, text=True).stdout
        except (OSError, subprocess.CalledProcessError) as error:
            reason = (getattr(error, "stderr", "") or str(error)).strip()
            raise UserError(
                f"MASTER_ADDR is not set, and scontrol cannot name the first of {node_list} ({reason}); "
                "set MASTER_ADDR to the address of the step's first node"
            ) from error

    name = scontrol("show", "hostnames", node_list).split()[0]
    try:
        return socket.gethostbyname(name)
    except OSError:  # the name does not resolve here, but Slurm knows the address
        match = re.search(r"NodeAddr=(\S+)", scontrol("show", "node", "-o", name))
        if match is None:
            raise
        return match.group(1)


# ---------------------------------------------------------------------------------------------------------------
# The network interface for connections from other nodes


_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
_UNUSED_ADDRESS = "192.0.2.1"
"""An address that no host has (RFC 5737), so that the route to it is the default route."""
_SIOCGIFADDR = 0x8915


def choose_interface(env: Environment, variables: MutableMapping[str, str] = os.environ) -> str:
    """Make gloo listen on the interface that other nodes can reach, unless the user chose one.

    gloo listens on the address of the host name, which is 127.0.1.1 on many systems.  Ranks on other nodes then cannot
    connect and time out.  The right interface is that of the route to the rendezvous address.

    Returns the interface's name, or an empty string if gloo chooses.  Call before opening the process group.
    """
    if variables.get(_INTERFACE_VARIABLE) or env.local_world_size >= env.world_size:
        return variables.get(_INTERFACE_VARIABLE, "")
    name = find_interface(
        [variables.get("MASTER_ADDR", ""), _UNUSED_ADDRESS], _source_address, _interfaces_by_address()
    )
    if name:
        variables[_INTERFACE_VARIABLE] = name
    return name


def find_interface(hosts: Sequence[str], source_address: Callable[[str], str], interfaces: Mapping[str, str]) -> str:
    """Return the interface of the route to the first of `hosts` that is on another machine, or an empty string.

    source_address: returns the source address of the route to a host, or an empty string if there is no route.
    interfaces: interface names by address.
    """
    for host in hosts:
        address = source_address(host) if host else ""
        if address and not ipaddress.ip_address(address).is_loopback and address in interfaces:
            return interfaces[address]
    return ""


def _source_address(host: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting a UDP socket sends nothing
        try:
            probe.connect((host, 9))
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def _interfaces_by_address() -> dict[str, str]:
    """Return the names of this machine's interfaces by their IPv4 addresses.  Linux only; empty elsewhere."""
    interfaces = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # the interface has no address
                continue
            interfaces[socket.inet_ntoa(answer[20:24])] = name
    return interfaces
