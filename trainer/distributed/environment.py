"""Rank and world size of this process, read from its launcher.

Knows the variables of torchrun and Slurm and nothing else; imports no torch, so that a mistake in the
configuration can be reported within a moment and before anything is spawned.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import resource
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass

from trainer.errors import EXIT_FAILED, UserError, setting_error

SPAWNED_BY_US = "MESHTRAINER_NPROC"
"""Set in the worker processes that `nproc=N` starts: their parent has reported what there was to report."""

STARTED = "MESHTRAINER_STARTED"
"""When the command began (`clock.uptime`): known to it, and to the workers that it starts on this machine."""


LAUNCHER = "MESHTRAINER_LAUNCHER"
"""Set in the same processes: the process that has started them."""

EXPANDABLE = "expandable_segments:True"
"""What the allocator is told by default."""

_PR_SET_PDEATHSIG = 1
"""Of <sys/prctl.h>."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

_MOST_FILES, _USUAL_FILES = 65536, 1024
"""Open files beyond which there is no use in more: some programs close each that there might be; what systems allow by
default."""


@dataclass(frozen=True)
class Environment:
    """One process among those of a run.  `launcher` is `single`, `nproc`, `torchrun` or `srun`."""

    launcher: str = "single"
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    job: str = ""
    """What the launcher calls the job, the same when it starts it again; empty if it has no name of its own."""
    num_restarts: int = 0
    """How often the launcher has started the job again."""

    @property
    def num_nodes(self) -> int:
        """Nodes, as far as one can tell from the ranks on this one."""
        return -(-self.world_size // self.local_world_size)

    @property
    def has_a_parent(self) -> bool:
        """True if the process that started this one lives as long as the run: variables alone may be set by hand."""
        return self.launcher in ("nproc", "srun") or (
            self.launcher == "torchrun" and "TORCHELASTIC_RUN_ID" in os.environ
        )

    @property
    def is_distributed(self) -> bool:
        return self.launcher != "single"


def find_environment(env: MutableMapping[str, str] = os.environ) -> Environment:
    """Return what the launcher's variables say; a process without a launcher is rank 0 of 1.

    Under torchrun these are RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE
    (https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables).  Under srun they are the step's
    variables: the job's own are wrong as soon as a step uses a part of the job.
    """
    if "RANK" in env and "WORLD_SIZE" in env:
        world_size = _read(env, "WORLD_SIZE")
        local_world_size = _read(env, "LOCAL_WORLD_SIZE", world_size)
        return Environment(
            launcher="nproc" if SPAWNED_BY_US in env else "torchrun",
            rank=_read(env, "RANK", below=("WORLD_SIZE", world_size)),
            world_size=world_size,
            local_rank=_read(env, "LOCAL_RANK", 0, below=("LOCAL_WORLD_SIZE", local_world_size)),
            local_world_size=local_world_size,
            job=_job(env),
            num_restarts=_restarts(env),
        )
    if "SLURM_PROCID" in env and "SLURM_STEP_NUM_TASKS" in env and "SLURM_LOCALID" in env:
        return Environment(
            launcher="srun",
            rank=_read(env, "SLURM_PROCID"),
            world_size=_read(env, "SLURM_STEP_NUM_TASKS"),
            local_rank=_read(env, "SLURM_LOCALID"),
            local_world_size=_tasks_on_this_node(env),
            job=_job(env),
            num_restarts=_restarts(env),
        )
    for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if name in env:
            rule = f"a launcher also sets {other}, which is not set"
            raise setting_error(name, env[name], rule, fix=f"start with torchrun, srun or nproc=N, or unset {name}")
    return Environment(job=_job(env), num_restarts=_restarts(env))


def check_rendezvous(here: Environment, env: Mapping[str, str] = os.environ) -> None:
    """Raise UserError if the first rank cannot be found, as where torchrun's variables were set by hand."""
    if here.launcher != "torchrun" or here.world_size == 1:
        return
    fix = "start with torchrun, which sets it, or set it to the host of rank 0 and a free port there"
    if not env.get("MASTER_ADDR"):
        raise setting_error("MASTER_ADDR", env.get("MASTER_ADDR"), "ranks have no rendezvous address", fix=fix)
    if not env.get("MASTER_PORT", "").isdecimal() or not 0 < int(env["MASTER_PORT"]) < 65536:
        raise setting_error("MASTER_PORT", env.get("MASTER_PORT"), "must be a port, from 1 to 65535", fix=fix)


def _job(env: MutableMapping[str, str]) -> str:
    if env.get("SLURM_JOB_ID"):
        return f"slurm {env['SLURM_JOB_ID']}"
    elastic = env.get("TORCHELASTIC_RUN_ID", "none")  # torchrun's default name, of whatever runs without one
    return "" if elastic == "none" else f"torchrun {elastic}"


def _restarts(env: MutableMapping[str, str]) -> int:
    return _read(env, "SLURM_RESTART_COUNT", 0) + _read(env, "TORCHELASTIC_RESTART_COUNT", 0)


def follow_parent(follows: bool, env: MutableMapping[str, str] = os.environ) -> None:
    """Have the kernel end this process as soon as the one that started it has gone; or no longer.  Linux only.

    Ranks that wait for each other when their launcher is killed would stay for minutes, and keep their GPUs.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None) if os.name == "posix" else None
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL if follows else 0)
    if follows and env.get(LAUNCHER, str(os.getppid())) != str(os.getppid()):
        os._exit(EXIT_FAILED)  # it has gone already


def note_start(began: float, env: MutableMapping[str, str] = os.environ) -> None:
    """Note when the command began, for the first Trainer to take, here or in a worker."""
    if SPAWNED_BY_US not in env:
        env[STARTED] = repr(began)


def take_start(env: MutableMapping[str, str] = os.environ) -> float | None:
    """Return when the command began, once: a second Trainer in the same process has begun at another time."""
    text = env.get(STARTED, "")
    is_first = bool(text) and text not in _taken
    _taken.add(text)
    return float(text) if is_first else None


_taken: set[str] = set()
"""Starts that a Trainer of this process has taken.  They stay in the environment, which other threads read by now."""


def limit_spinning(env: MutableMapping[str, str] = os.environ) -> None:
    """Have OpenMP's threads sleep after a short while of waiting, unless told otherwise.  Before torch is imported.

    By default they spin for long, a disaster on busy cores: beside other work on two cores llama_small trained some
    600 tokens/s.  With this, beside two busy loops (another load, so no ratio): 5,100 to 7,900.  On idle cores: 22,000
    against 24,000 when they always spin, and 12,400 when they sleep at once.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & set(env):
        env["GOMP_SPINCOUNT"] = "10000"


def share_compilers(num_cores: int, local_world_size: int, env: MutableMapping[str, str] = os.environ) -> None:
    """Have torch.compile start no more processes on all ranks of the node than it has cores, unless told otherwise.

    By itself each rank starts 32.  Read when the compiler is imported.
    """
    env.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, min(32, num_cores // local_world_size))))


def connect_late(env: MutableMapping[str, str] = os.environ) -> None:
    """Have gloo connect two ranks when they first talk, unless told otherwise.  Before a process group is opened.

    By itself each group connects every rank with every other: on 256 ranks more than a thousand sockets a rank.
    """
    env.setdefault("TORCH_GLOO_LAZY_INIT", "1")


def allocate_in_segments(env: MutableMapping[str, str] = os.environ) -> None:
    """Have CUDA's memory grow in place rather than in blocks of fixed sizes, unless told otherwise.  Before torch is
    imported.

    Else what is freed between blocks fits nothing: a model that needs 110 of 140 GiB runs out of memory.
    """
    if not {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} & set(env):
        env["PYTORCH_CUDA_ALLOC_CONF"] = EXPANDABLE


def keep_freed_memory(env: MutableMapping[str, str] = os.environ) -> None:
    """Have malloc keep what is freed for the next step, unless told otherwise.  glibc only; does nothing elsewhere.

    Otherwise it gives memory back and asks for it again in every step, and the kernel clears each page anew.  Where
    the page cache takes those pages meanwhile, as while a checkpoint is written, steps took 1.28 to 1.43 times as
    long; with this, 0.92 to 1.29 (206 M parameters, one thread).
    """
    if {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"} & set(env):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None:  # values of malloc.h; the first is what glibc would find by itself
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, -1)


def file_limit() -> int:
    """Return how many files this process may have open: `ulimit -n`."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_FILES if soft == resource.RLIM_INFINITY else soft


def raise_file_limit() -> str:
    """Allow this process, and those that it starts, as many open files as it may allow itself.

    Returns advice where that is little still, else nothing.  Sockets to other ranks, batches of loader workers, shards
    and checkpoints all take their share.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if file_limit() < wanted:
        with contextlib.suppress(OSError, ValueError):  # macOS has a further limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if file_limit() >= _USUAL_FILES:
        return ""
    return (
        f"`ulimit -n` allows {file_limit()} open files, which is the maximum; {_USUAL_FILES} are usual: raise the "
        "limit, or training may fail with `Too many open files`"
    )


@contextmanager
def without_collecting() -> Iterator[None]:
    """Leave the garbage collector off meanwhile.

    What is imported stays, and the collector looks through all of it 700 times while torch is being imported: 0.8 of
    4.1 s of CPU time from the command to the first step of llama_small.
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

    The address is the first node's; the port follows from job, step and restart, so that every task finds the same
    one without a message, and two steps on one node do not meet.
    """
    here = find_environment(env)
    env["RANK"], env["WORLD_SIZE"] = str(here.rank), str(here.world_size)
    env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"] = str(here.local_rank), str(here.local_world_size)
    if "MASTER_ADDR" not in env:
        env["MASTER_ADDR"] = first_address(env.get("SLURM_STEP_NODELIST") or env["SLURM_JOB_NODELIST"])
    if "MASTER_PORT" not in env:
        step = [int(env.get(name, "0")) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")]
        env["MASTER_PORT"] = str(15000 + (step[0] * 131 + step[1] * 7 + step[2]) % 15000)


def _read(
    env: MutableMapping[str, str], name: str, default: int | None = None, below: tuple[str, int] | None = None
) -> int:
    """Return the number in a variable; `below` names another one that it must be below, and what that says."""
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
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item)
        if found is None:
            raise setting_error("SLURM_STEP_TASKS_PER_NODE", counts, "must have Slurm's form, such as 2(x3),1")
        per_node += [int(found[1])] * int(found[2] or 1)
    node = _read(env, "SLURM_NODEID", 0)
    if node >= len(per_node):
        raise setting_error("SLURM_NODEID", node, f"SLURM_STEP_TASKS_PER_NODE={counts} lists {len(per_node)} nodes")
    return per_node[node]


def first_address(node_list: str) -> str:
    """Return the address of the first node of a Slurm node list.  Raises UserError if scontrol cannot name it."""

    def scontrol(*arguments: str) -> str:
        try:
            return subprocess.run(["scontrol", *arguments], check=True, capture_output=True, text=True).stdout
        except (OSError, subprocess.CalledProcessError) as error:
            why = (getattr(error, "stderr", "") or str(error)).strip()
            raise UserError(
                f"MASTER_ADDR is not set, and scontrol cannot name the first of {node_list} ({why}); "
                "set MASTER_ADDR to the address of the step's first node"
            ) from error

    name = scontrol("show", "hostnames", node_list).split()[0]
    try:
        return socket.gethostbyname(name)
    except OSError:  # the name does not resolve here: Slurm knows the address all the same
        found = re.search(r"NodeAddr=(\S+)", scontrol("show", "node", "-o", name))
        if found is None:
            raise
        return found.group(1)
