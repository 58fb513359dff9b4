"""The processes of a run: the process group, this rank's device, the mesh, and messages between ranks.

Small messages use a gloo group, which on GPUs is separate from the groups of the model, so that they never wait for the
device.  Independent of models and data.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, cast

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainer.config import MeshShape, RunConfig
from trainer.distributed.channel import Channel, TimedStore
from trainer.distributed.dead_ranks import describe_dead, is_lost_connection, this_process
from trainer.distributed.environment import (
    EXPANDABLE,
    Environment,
    choose_interface,
    export_slurm_rendezvous,
    find_environment,
    follow_parent,
    keep_freed_memory,
    raise_file_limit,
)
from trainer.distributed.exchange import register_group
from trainer.distributed.failure_watch import FAILURE, FailureWatch
from trainer.distributed.stop_request import was_asked_early
from trainer.errors import EXIT_STOPPED, PeerFailed, TrainingFailed, UserError, print_stderr, setting_error

if TYPE_CHECKING:
    from trainer.lifecycle.lifecycle import Lifecycle

REPLICATE, SHARD, CONTEXT = "replicate", "shard", "context"
"""Names of the mesh axes, and of the context-parallel groups, which subdivide `shard`."""
OUTER, EXPERT = "outer", "expert"
"""Names of the axes into which the mesh of experts divides `shard`."""

_ANSWER_S = 5.0
"""Time limit for a response of the store."""


class World(Channel):
    """All ranks, as seen from one of them.

    Opens the process group (gloo on CPU, NCCL on CUDA) unless one is already open, as under Ray Train.  `close` closes
    the group only if it was opened here.  All ranks must create a World.
    """

    def __init__(self, config: RunConfig) -> None:
        self.timeout = timedelta(seconds=max(config.run.timeout_s, config.run.first_step_limit_s))
        self.env = find_environment()
        self.owns_group = not dist.is_initialized()
        if not self.owns_group:
            self.env = _joined_environment(self.env)
        self.device, problem = torch.device("cpu"), ""
        try:
            self.device = find_device(config.run.device, self.env)
        except UserError as error:
            if not (self.owns_group and self.env.is_distributed):
                raise
            problem = str(error)  # the rendezvous tells the other ranks
        torch.set_num_threads(config.run.threads or max(1, _num_cores() // self.env.local_world_size))
        # By default each rank starts 32 compile processes; all ranks of a node share its cores.  Torch's compiler reads
        # the variable when it is imported.
        num_compile = max(1, min(32, _num_cores() // self.env.local_world_size))
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(num_compile))
        if config.run.deterministic:
            use_deterministic_kernels()
        if self.device.type == "cpu":
            keep_freed_memory()
        if (advice := raise_file_limit()) and self.env.rank == 0:
            print_stderr(f"warning: {advice}")
        self._store: Store | None = None
        self.interface = ""
        """The network interface that gloo listens on; empty if gloo chooses."""
        if self.owns_group:
            if self.device.type == "cuda":
                _record_collectives(config.run_dir)
            self._open_group(timedelta(seconds=config.run.timeout_s), problem)
        # On a CPU the default group is already a gloo group, and the main thread alone uses it.
        uses_default_group = self.owns_group and self.device.type == "cpu"
        super().__init__(dist.get_rank(), dist.get_world_size(), self.timeout, uses_default_group)
        self._groups: list[dist.ProcessGroup] = [self.group]
        self._with_own_timeout: set[dist.ProcessGroup] = set()
        self.first_failure: str | None = None
        """The first failure, if it was on another rank; set by `announce_failure`."""
        self.failure_listeners: list[Lifecycle] = []
        self._processes = self.gather(this_process())
        self._watch = None
        if self._store is not None:
            messages = TimedStore(self._store, config.run.timeout_s)
            parent = os.getppid() if self.env.has_a_parent else None
            self._watch = FailureWatch(self.rank, messages, parent, self.failure_listeners)
            follow_parent(False)  # from here on the watch does this, and reports it
            _worlds.append(self)

    @property
    def messages(self) -> TimedStore | None:
        """The store, for messages without collectives; None for a single process or a group opened elsewhere."""
        return None if self._store is None else TimedStore(self._store, _ANSWER_S)

    def set_timeout(self, timeout_s: float) -> None:
        """Set the timeout of this rank's process groups.

        If the default group was opened elsewhere, only groups created here are changed.  The first step has a longer
        timeout, because it compiles and allocates.
        """
        before, self.timeout = self.timeout, timedelta(seconds=timeout_s)
        # All groups, because integer resharding opens some that are registered only with torch; except those whose
        # owner has set another timeout.
        groups = list(dist.distributed_c10d._world.pg_map) if self.owns_group else self._groups
        for group in set(groups) - self._with_own_timeout:
            known = None
            if group not in self._groups:  # None as well if the backend does not expose it
                known = getattr(getattr(group._get_backend(self.device), "options", None), "_timeout", None)
            if known in (None, before, *_DEFAULT_TIMEOUTS):
                _set_timeout(self.timeout, group)

    def _open_group(self, meeting_s: timedelta, problem: str) -> None:
        # By default each gloo group connects every pair of ranks: on 256 ranks, over a thousand sockets per rank.
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
        backend = "cuda:nccl" if self.device.type == "cuda" else "gloo"
        device_id = self.device if self.device.type == "cuda" else None
        if self.env.launcher == "single":
            store, rank, size = cast(Store, HashStore()), 0, 1
        else:
            if self.env.launcher == "srun":
                export_slurm_rendezvous()
            self.interface = choose_interface(self.env)
            store, rank, size = join_store(meeting_s)
            store = self._store = PrefixStore(f"meshtrainer/{next(_openings)}", store)
            if self.device.type == "cuda" and self.env.local_world_size > torch.cuda.device_count():
                # Other ranks may see the same GPU: NCCL would fail later, with a less helpful message.
                uuid = str(torch.cuda.get_device_properties(self.device).uuid)
                problem = problem or claim_gpu(store, rank, uuid, self.env.local_world_size)
            agree_to_start(store, rank, size, meeting_s.total_seconds(), problem)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=size, timeout=self.timeout, device_id=device_id
        )

    def open_channel(self, timeout: timedelta) -> Channel:
        """Open another channel, for a thread that communicates during training steps.  All ranks must call this."""
        channel = Channel(self.rank, self.size, timeout)
        if self.size > 1:
            self._with_own_timeout.add(channel.group)
        return channel

    def mesh_of(self, shape: MeshShape) -> DeviceMesh:
        """Create a mesh of the given shape, with axes (shard,), or (replicate, shard) for HSDP.

        All ranks must call this.  The axes' process groups get this run's timeout.
        """
        return self._mesh({REPLICATE: shape.replicate, SHARD: shape.shard}, shape.is_hybrid)

    def expert_mesh_of(self, shape: MeshShape, expert: int) -> DeviceMesh | None:
        """Create the mesh of parameters that `expert` consecutive ranks share out; None for one rank.

        The axes are (outer, expert), or (replicate, outer, expert): `shape` with its shard axis divided in two.  All
        ranks must call this.
        """
        if expert == 1:
            return None
        axes = {REPLICATE: shape.replicate, OUTER: shape.shard // expert, EXPERT: expert}
        return self._mesh(axes, shape.is_hybrid)

    def _mesh(self, axes: dict[str, int], is_hybrid: bool) -> DeviceMesh:
        if not is_hybrid:
            del axes[REPLICATE]
        sizes, names = tuple(axes.values()), tuple(axes)
        mesh = init_device_mesh(self.device.type, sizes, mesh_dim_names=names)
        for axis in names:
            # A mesh's groups do not inherit the timeout of the default group; they would have 30 minutes.
            _set_timeout(self.timeout, mesh.get_group(axis))
            self._groups.append(mesh.get_group(axis))
        return mesh

    def open_context(self, num_ranks: int) -> str:
        """Open this rank's context-parallel group of `num_ranks` neighbors; return its name for `exchange`.

        A separate group is needed because attention's messages would otherwise queue behind FSDP's all-gathers.  All
        ranks must call this.
        """
        first = self.rank - self.rank % num_ranks
        ranks = list(range(first, first + num_ranks))
        group = dist.new_group(ranks, timeout=self.timeout, use_local_synchronization=True, group_desc=CONTEXT)
        self._groups.append(group)
        return register_group(group, CONTEXT)

    def sum_on_device(self, value: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all ranks, in place on its device.  One all-reduce on the default group."""
        if self.size > 1:
            dist.all_reduce(value)
        return value

    def once(self, what: str, work: Callable[[], None]) -> None:
        """Run `work` on the first rank that calls this; the others wait for it for up to half a minute.

        This uses no collective, because some ranks may never call it.
        """
        messages, key = self.messages, f"meshtrainer/once/{what}"
        if messages is None:
            work()
            return
        try:
            if messages.compare_set(key, "", str(self.rank)) == str(self.rank):
                work()
                messages.set(f"{key}/done", "yes")
            else:
                messages.wait(f"{key}/done", _ONCE_S)
        except RuntimeError as lost:  # the store is gone or it took too long: not essential
            print_stderr(f"warning: rank {self.rank}: {what}: {lost}")

    def announce_failure(self, error: BaseException) -> str | None:
        """Tell the other ranks that this one has failed.  Returns the first failure if it was on another rank.

        This uses no collective, because the other ranks may be anywhere.
        """
        if self._store is None:
            return None
        if self._watch is not None:
            self._watch.stop(wait=False)
        is_about_another = isinstance(error, PeerFailed)
        message = str(error) if is_about_another else f"rank {self.rank}: {type(error).__name__}: {error}"
        dead = describe_dead(self._processes, _DEATH_S) if is_lost_connection(error) else ""
        try:
            first = TimedStore(self._store, _ANSWER_S).compare_set(FAILURE, "", dead or message)
        except RuntimeError:  # the process that hosts the store is gone
            first = self.first_failure or dead or message
        if first == dead and self.env.launcher != "nproc":  # which reports dead ranks itself
            self.once("death", lambda: print_stderr(f"error: {dead}"))  # on one of the ranks that noticed
        self.first_failure = None if first == message else first
        return self.first_failure

    def remember_failure(self) -> None:
        """Fetch the failure that another rank announced while the store is still there.

        Rank 0, which may host the store, may exit first.  This rank's main thread would then fail with a misleading
        error.
        """
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                self.first_failure = TimedStore(self._store, _ANSWER_S).get(FAILURE)

    def leave_store(self) -> None:
        """Stop using the store, before exiting because of a user error that all ranks know.

        Rank 0, whose process hosts the store, waits briefly for the other ranks: torch prints a page of C++ frames on
        every rank that contacts a store that is gone.
        """
        if self._watch is not None:
            self._watch.stop()
        if self._store is None:
            return
        until = time.monotonic() + _PART_S
        with contextlib.suppress(RuntimeError):
            num_parted = self._store.add("meshtrainer/parted", 1)
            while self.rank == 0 and num_parted < self.size and time.monotonic() < until:
                time.sleep(0.02)
                num_parted = self._store.add("meshtrainer/parted", 0)

    def close(self) -> None:
        """Wait for all ranks, then destroy the process group if it was opened here."""
        if self._watch is not None:
            self._watch.stop()
        if self in _worlds:
            _worlds.remove(self)  # it would keep the Trainer alive, which listens for failures
        if dist.is_initialized() and self.owns_group:
            self.barrier()
            dist.destroy_process_group()


def leave_store() -> None:
    """Call `World.leave_store` on the latest open world, if any.  Its Trainer may not have been created yet."""
    if _worlds:
        _worlds.pop().leave_store()


_worlds: list[World] = []
"""Worlds with a store that this process has opened and not closed."""

_PART_S = 2.0
"""Longest time that rank 0 waits for the others in `part`."""

_openings = itertools.count()
"""Numbers the process groups that this process opens, so that each has its own prefix in the store."""

_DEATH_S = 1.0
"""Time for a rank to die after its connections have closed."""

_ONCE_S = 30.0
"""Time that ranks wait for another one in `once`."""

_DEFAULT_TIMEOUTS = (timedelta(minutes=30), timedelta(minutes=10))
"""torch's default timeouts: gloo and NCCL."""


def _set_timeout(timeout: timedelta, group: dist.ProcessGroup) -> None:
    """Set the timeout of a group, with torch's public function if this torch has one."""
    public = getattr(dist, "set_timeout", None)
    if public is not None:
        public(timeout, group)
    else:
        dist.distributed_c10d._set_pg_timeout(timeout, group)


def _record_collectives(folder: Path) -> None:
    """Enable NCCL's flight recorder, which dumps the latest collectives into `folder` if one times out.

    The variables are read when a process group is opened:
    https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html
    """
    for name, value in (
        ("TORCH_FR_BUFFER_SIZE", "2000"),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "1"),
        ("TORCH_NCCL_ENABLE_MONITORING", "1"),
        ("TORCH_FR_DUMP_TEMP_FILE", f"{folder}/collectives_rank_"),
    ):
        os.environ.setdefault(name, value)
    # torchrun sets 1, with which a process aborts before the record is written.
    if os.environ.get(_ON_TIMEOUT, "1") == "1":
        os.environ[_ON_TIMEOUT] = "3"


_ON_TIMEOUT = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


def _joined_environment(env: Environment) -> Environment:
    """Return the environment of a rank whose process group was opened elsewhere."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return Environment(
        launcher="joined",
        rank=rank,
        world_size=size,
        local_rank=env.local_rank if env.is_distributed else rank,
        local_world_size=env.local_world_size if env.is_distributed else size,
        job=env.job,
        num_restarts=env.num_restarts,
    )


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# ---------------------------------------------------------------------------------------------------------------
# Devices


def find_device(wanted: str, env: Environment) -> torch.device:
    """Return this rank's device and make it the current device.

    Raises UserError if `run.device` requires a GPU and there is none, or if there are fewer GPUs than ranks.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = choose_gpu(wanted, env, num_gpus)
    if index is None:
        return torch.device("cpu")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    _try_memory(device, env)
    return device


def use_deterministic_kernels() -> None:
    """Use deterministic kernels for the rest of this process.

    Call this before anything runs on a GPU, because cuBLAS reads its workspace size at its first use.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _try_memory(device: torch.device, env: Environment) -> None:
    """Make a small allocation; if the driver does not support expandable segments, disable them."""
    try:
        torch.empty(1, device=device)
    except RuntimeError as error:
        if os.environ.get("PYTORCH_CUDA_ALLOC_CONF") != EXPANDABLE:
            raise
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # newer torch deprecates this, older has nothing else
            torch.cuda.memory._set_allocator_settings("expandable_segments:False")
        torch.empty(1, device=device)
        if env.rank == 0:
            print_stderr(f"warning: {EXPANDABLE} is off, since the driver refuses it: {str(error).splitlines()[0]}")


def choose_gpu(wanted: str, env: Environment, num_gpus: int, variables: Mapping[str, str] = os.environ) -> int | None:
    """Return the index of this rank's GPU among the `num_gpus` visible ones; None for the CPU.

    Each rank takes the GPU of its local rank.  If it sees only one GPU, the launcher has assigned that one to it:
    `srun --gpus-per-task=1`, or a wrapper that sets CUDA_VISIBLE_DEVICES per rank.  `claim_gpu` checks later that ranks
    do not share a GPU.  Raises UserError if there is no GPU or there are too few.
    """
    if wanted == "cuda" and not num_gpus:
        raise setting_error("run.device", wanted, "torch finds no usable GPU", "cpu")
    if wanted == "cpu" or not num_gpus:
        return None
    if env.local_rank < env.local_world_size <= num_gpus:
        return env.local_rank
    visible = variables.get("CUDA_VISIBLE_DEVICES", variables.get("HIP_VISIBLE_DEVICES", ""))
    names_one = len([name for name in visible.split(",") if name.strip()]) == 1
    if num_gpus == 1 and (env.launcher == "srun" or (env.launcher != "nproc" and names_one)):
        return 0
    raise _too_few(env.local_world_size, num_gpus)


def claim_gpu(store: Store, rank: int, uuid: str, num_ranks: int) -> str:
    """Claim a GPU by UUID for one of the node's `num_ranks` ranks; return an error message if it is taken, or ""."""
    owner = store.compare_set(f"meeting/gpu/{uuid}", "", str(rank)).decode()
    return "" if owner == str(rank) else str(_too_few(num_ranks, 1, f"; ranks {owner} and {rank} see the same one"))


def _too_few(ranks: int, num_gpus: int, how: str = "") -> UserError:
    rule = f"this node has {num_gpus} GPU{'s' * (num_gpus != 1)}, one for each rank{how}"
    return setting_error("nproc", ranks, rule, fix=f"nproc={num_gpus}, or run.device=cpu")


# ---------------------------------------------------------------------------------------------------------------
# Rendezvous: all ranks join a store, and decide there whether to start, before any collective can hang


_READ_S = 5.0
"""How long rank 0, which may host the store, waits for the others to read a decision to stop."""


@functools.cache
def join_store(timeout: timedelta) -> tuple[Store, int, int]:
    """Join the rendezvous store; return it, this rank and the world size.  One store for the life of the process.

    Callers must use a new prefix for each process group: group names repeat, and a rank that read the stale address of
    an earlier group would hang.
    """
    found: list[tuple[Store, int, int]] = []
    errors: list[BaseException] = []

    def meet() -> None:
        try:
            found.append(next(dist.rendezvous("env://", timeout=timeout)))
        except BaseException as error:
            errors.append(error)

    meeting = threading.Thread(target=meet, name="rendezvous", daemon=True)
    meeting.start()
    while meeting.is_alive():  # in a thread, so that signals are handled meanwhile
        meeting.join(0.2)
        if was_asked_early():
            _exit_before_start(should_announce=True)
    if errors:
        raise errors[0]
    return found[0]


_GO, _STOP = "go", "stop"
_PROBLEM = "meeting/problem"


def agree_to_start(store: Store, rank: int, size: int, timeout_s: float, problem: str = "") -> None:
    """Return once all ranks have joined; if one of them was asked to stop before that, all exit with code 75.

    Opening a process group does not react to signals, so ranks would wait for a rank that has left until the timeout.
    Therefore they decide in the store, where the first decision wins: the last rank to join writes "go", and a rank
    that was asked to stop writes "stop".  `problem`: a user error that this rank has found; all ranks raise UserError
    with the first one.
    """
    if problem:
        store.compare_set(_PROBLEM, "", problem)
    is_last = store.add("meeting/here", 1) == size
    deadline, pause_s = time.monotonic() + timeout_s, 0.002
    while not store.check(["meeting/word"]):
        if was_asked_early():
            store.compare_set("meeting/word", "", _STOP)
        elif is_last:
            store.compare_set("meeting/word", "", _GO)
        elif time.monotonic() > deadline:
            raise TrainingFailed(f"rank {rank}: not all of {size} ranks joined within run.timeout_s={timeout_s:g}")
        else:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
    if store.get("meeting/word").decode() == _STOP:
        _let_all_read(store, rank, size)
        _exit_before_start(should_announce=rank == 0)
    if store.check([_PROBLEM]):
        found = store.get(_PROBLEM).decode()
        _let_all_read(store, rank, size)
        raise UserError(found)


def _let_all_read(store: Store, rank: int, size: int) -> None:
    """On rank 0, which may host the store, wait until the other ranks have read it."""
    store.add("meeting/left", 1)
    until = time.monotonic() + _READ_S
    while rank == 0 and store.add("meeting/left", 0) < size and time.monotonic() < until:
        time.sleep(0.02)


def _exit_before_start(should_announce: bool) -> NoReturn:
    if should_announce:
        print_stderr("stopped before all ranks had joined")
    os._exit(EXIT_STOPPED)
