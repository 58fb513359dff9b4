"""The ranks of a run: their rendezvous, process groups, devices and meshes, and the messages between them.

Small messages never wait for the device: on GPUs, they use a gloo group that is separate from the model's groups.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, cast

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainer.config import MeshShape, RunConfig
from trainer.distributed.channel import Channel, TimedStore
from trainer.distributed.dead_ranks import describe_dead_ranks, is_lost_connection, this_process
from trainer.distributed.environment import (
    EXPANDABLE,
    Environment,
    choose_interface,
    die_with_parent,
    export_slurm_rendezvous,
    find_environment,
    keep_freed_memory,
    raise_file_limit,
)
from trainer.distributed.exchange import register_group
from trainer.distributed.failure_watch import FAILURE, FailureWatch
from trainer.distributed.stop_request import stop_is_requested_early
from trainer.errors import EXIT_STOPPED, PeerFailed, TrainingFailed, UserError, print_stderr, setting_error
from trainer.renamed import Renamed

if TYPE_CHECKING:
    from trainer.lifecycle.lifecycle import Lifecycle

REPLICATE, SHARD, CONTEXT = "replicate", "shard", "context"
"""Names of the two mesh axes, and of the context-parallel groups inside `shard`."""
OUTER, EXPERT, INNER = "outer", "expert", "inner"
"""Names of the axes into which `shard` is split: (outer, expert) for experts that are divided among ranks, or
(outer, inner) for stacked parameters whose matrices are split by rows."""


def split_last_axis(mesh: DeviceMesh, num_inner: int) -> DeviceMesh:
    """Return `mesh` with its last axis split into (outer, inner); each inner group has `num_inner` consecutive ranks.

    Collective: creates the process groups of all axes of the result.
    """
    ranks = mesh.mesh.unflatten(-1, (-1, num_inner))
    names = (*(mesh.mesh_dim_names or ())[:-1], OUTER, INNER)
    return DeviceMesh(mesh.device_type, ranks, mesh_dim_names=names)


_STORE_TIMEOUT_S = 5.0
"""Timeout of requests to the store, in seconds."""


class World(Channel):
    """All ranks of a run, and the rank, device and process group of this process.

    Opens the process group (gloo on CPU, NCCL on CUDA) unless one is already open, as under Ray Train.  `close` closes
    the group only if this object opened it.  Collective: all ranks must create a World.
    """

    def __init__(self, config: RunConfig) -> None:
        self.timeout = timedelta(seconds=max(config.run.timeout_s, config.run.first_step_limit_s))
        self.env = find_environment()
        self.owns_group = not dist.is_initialized()
        if not self.owns_group:
            self.env = _joined_environment(self.env)
        self.device, problem = torch.device("cpu"), ""
        try:
            self.device = select_device(config.run.device, self.env)
        except UserError as error:
            if not (self.owns_group and self.env.is_distributed):
                raise
            problem = str(error)  # reported during the rendezvous, to all ranks
        torch.set_num_threads(config.run.threads or max(1, _num_cores() // self.env.local_world_size))
        # By default each rank starts 32 compile processes, but all ranks of a node share its cores.  Torch's compiler
        # reads the variable when it is imported.
        num_compile_processes = max(1, min(32, _num_cores() // self.env.local_world_size))
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(num_compile_processes))
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
        # On a CPU the default group is a gloo group, and only the main thread uses it.
        use_default_group = self.owns_group and self.device.type == "cpu"
        super().__init__(dist.get_rank(), dist.get_world_size(), self.timeout, use_default_group)
        self._groups: list[dist.ProcessGroup] = [self.group]
        self._split_meshes: dict[tuple[DeviceMesh, int], DeviceMesh] = {}
        self._groups_with_custom_timeout: set[dist.ProcessGroup] = set()
        self.first_failure: str | None = None
        """The first failure, if it was on another rank; set by `announce_failure`."""
        self.failure_listeners: list[Lifecycle] = []
        self._processes = self.gather(this_process())
        self._watch = None
        if self._store is not None:
            store = TimedStore(self._store, config.run.timeout_s)
            parent = os.getppid() if self.env.has_launcher_parent else None
            self._watch = FailureWatch(self.rank, store, parent, self.failure_listeners)
            die_with_parent(False)  # from here on, the FailureWatch does this and reports it
            _worlds.append(self)

    @property
    def timed_store(self) -> TimedStore | None:
        """The store with timeouts, for messages without collectives; None if this process has not opened one."""
        return None if self._store is None else TimedStore(self._store, _STORE_TIMEOUT_S)

    def set_timeout(self, timeout_s: float) -> None:
        """Set the timeout of this rank's process groups, except those with their own timeout.

        If the default group was opened elsewhere, this affects only groups that this object opened.  Until the first
        step ends, the timeout is longer, because that step compiles and allocates.
        """
        previous, self.timeout = self.timeout, timedelta(seconds=timeout_s)
        # Includes groups that torch opened internally, such as those of integer resharding, but not those with their
        # own timeout.
        groups = list(dist.distributed_c10d._world.pg_map) if self.owns_group else self._groups
        for group in set(groups) - self._groups_with_custom_timeout:
            current = None
            if group not in self._groups:  # None if the backend does not expose it
                current = getattr(getattr(group._get_backend(self.device), "options", None), "_timeout", None)
            if current in (None, previous, *_DEFAULT_TIMEOUTS):
                _set_timeout(self.timeout, group)

    def _open_group(self, rendezvous_timeout: timedelta, problem: str) -> None:
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
            store, rank, size = join_store(rendezvous_timeout)
            store = self._store = PrefixStore(f"meshtrainer/{next(_openings)}", store)
            if self.device.type == "cuda" and self.env.local_world_size > torch.cuda.device_count():
                # If two ranks saw the same GPU, NCCL would fail later with an unhelpful message.
                uuid = str(torch.cuda.get_device_properties(self.device).uuid)
                problem = problem or claim_gpu(store, rank, uuid, self.env.local_world_size)
            agree_to_start(store, rank, size, rendezvous_timeout.total_seconds(), problem)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=size, timeout=self.timeout, device_id=device_id
        )

    def open_channel(self, timeout: timedelta) -> Channel:
        """Open a channel for another thread that communicates during training steps.  All ranks must call this.

        Collective: opens a process group and connects its ranks.
        """
        channel = Channel(self.rank, self.size, self.timeout)
        channel.connect()
        if self.size > 1:
            _set_timeout(timeout, channel.group)
            self._groups_with_custom_timeout.add(channel.group)
        return channel

    def close_channel(self, channel: Channel) -> None:
        """Close a channel's connections on this rank, so that ranks that wait for it fail.  Not collective.

        They are closed once nothing refers to the channel any more: unlike this, `abort` and `shutdown` of a gloo group
        leave them open.
        """
        if self.size > 1:
            self._groups_with_custom_timeout.discard(channel.group)
            dist.destroy_process_group(channel.group)

    mesh_of, expert_mesh_of = Renamed("build_mesh"), Renamed("build_expert_mesh")

    def build_mesh(self, shape: MeshShape) -> DeviceMesh:
        """Create a mesh of the given shape, with axes (shard,), or (replicate, shard) for HSDP.

        All ranks must call this.  The axes' process groups get this run's timeout.
        """
        return self._build_mesh({REPLICATE: shape.replicate, SHARD: shape.shard}, shape.has_replicas)

    def build_expert_mesh(self, shape: MeshShape, expert: int) -> DeviceMesh | None:
        """Create the mesh of expert parameters, which are divided among `expert` consecutive ranks; None for one rank.

        The axes are (outer, expert), or (replicate, outer, expert): those of `shape`, with the shard axis split in
        two.  All ranks must call this.
        """
        if expert == 1:
            return None
        axes = {REPLICATE: shape.replicate, OUTER: shape.shard // expert, EXPERT: expert}
        return self._build_mesh(axes, shape.has_replicas)

    def _build_mesh(self, axes: dict[str, int], has_replicas: bool) -> DeviceMesh:
        if not has_replicas:
            del axes[REPLICATE]
        sizes, names = tuple(axes.values()), tuple(axes)
        mesh = init_device_mesh(self.device.type, sizes, mesh_dim_names=names)
        self._register_groups(mesh, names)
        return mesh

    def split_mesh(self, mesh: DeviceMesh, num_inner: int) -> DeviceMesh:
        """Return `split_last_axis(mesh, num_inner)`, whose groups get this run's timeout.

        All ranks must call this.  Later calls with the same arguments return the same mesh.
        """
        if (mesh, num_inner) not in self._split_meshes:
            split = self._split_meshes[mesh, num_inner] = split_last_axis(mesh, num_inner)
            self._register_groups(split, split.mesh_dim_names or ())
        return self._split_meshes[mesh, num_inner]

    def _register_groups(self, mesh: DeviceMesh, axes: Iterable[str]) -> None:
        for axis in axes:
            # A mesh's groups do not inherit the timeout of the default group, but have torch's 30 minutes.
            _set_timeout(self.timeout, mesh.get_group(axis))
            self._groups.append(mesh.get_group(axis))

    def create_context_group(self, num_ranks: int) -> str:
        """Create this rank's context-parallel group of `num_ranks` consecutive ranks; return its name for `exchange`.

        Without a separate group, the messages of attention would queue behind FSDP's all-gathers.  All ranks must call
        this.
        """
        first = self.rank - self.rank % num_ranks
        ranks = list(range(first, first + num_ranks))
        group = dist.new_group(ranks, timeout=self.timeout, use_local_synchronization=True, group_desc=CONTEXT)
        self._groups.append(group)
        return register_group(group, CONTEXT)

    def sum_on_device(self, value: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all ranks in place, on its device, and return it.  One all-reduce on the default group."""
        if self.size > 1:
            dist.all_reduce(value)
        return value

    def once(self, name: str, work: Callable[[], None]) -> None:
        """Run `work` on the first rank that calls this; the others wait until it is done, for at most half a minute.

        Uses no collective, because some ranks may never call this.  If `work` takes too long, only warns.
        """
        store, key = self.timed_store, f"meshtrainer/once/{name}"
        if store is None:
            work()
            return
        try:
            if store.compare_set(key, "", str(self.rank)) == str(self.rank):
                work()
                store.set(f"{key}/done", "yes")
            else:
                store.wait(f"{key}/done", _ONCE_S)
        except RuntimeError as error:  # the store is gone or the work took too long; it is not essential
            print_stderr(f"warning: rank {self.rank}: {name}: {error}")

    def announce_failure(self, error: BaseException) -> str | None:
        """Announce this rank's failure to the others.  Returns the first failure if it was on another rank, or None.

        Uses no collective, because the other ranks may be anywhere in their code.
        """
        if (store := self.timed_store) is None:
            return None
        if self._watch is not None:
            self._watch.stop(wait=False)
        is_from_peer = isinstance(error, PeerFailed)
        message = str(error) if is_from_peer else f"rank {self.rank}: {type(error).__name__}: {error}"
        dead = describe_dead_ranks(self._processes, _DEATH_S) if is_lost_connection(error) else ""
        try:
            first_failure = store.compare_set(FAILURE, "", dead or message)
        except RuntimeError:  # the process that hosts the store is gone
            first_failure = self.first_failure or dead or message
        if first_failure == dead and self.env.launcher != "nproc":  # its launcher reports dead ranks itself
            self.once("death", lambda: print_stderr(f"error: {dead}"))  # print it on one rank only
        self.first_failure = None if first_failure == message else first_failure
        return self.first_failure

    def remember_failure(self) -> None:
        """Fetch the failure that another rank has announced, while the store still exists.

        If rank 0 hosts the store and exits first, the main thread of this rank fails with a misleading error.
        """
        if (store := self.timed_store) is not None:
            with contextlib.suppress(RuntimeError):
                self.first_failure = store.get(FAILURE)

    def leave_store(self) -> None:
        """Stop using the store, before all ranks exit because of the same user error.

        Rank 0, which may host the store, waits briefly for the others, because torch prints a page of C++ frames on
        each rank that uses a store that is gone.
        """
        if self._watch is not None:
            self._watch.stop()
        if self._store is None:
            return
        deadline = time.monotonic() + _LEAVE_S
        with contextlib.suppress(RuntimeError):
            num_left = self._store.add("meshtrainer/left_store", 1)
            while self.rank == 0 and num_left < self.size and time.monotonic() < deadline:
                time.sleep(0.02)
                num_left = self._store.add("meshtrainer/left_store", 0)

    def close(self) -> None:
        """Wait for all ranks, then destroy the process group if it was opened here."""
        if self._watch is not None:
            self._watch.stop()
        if dist.is_initialized() and self.owns_group:
            self.barrier()
        self._destroy_group()

    @contextlib.contextmanager
    def closing_on_user_error(self) -> Iterator[None]:
        """If the block raises a UserError, as it then does on all ranks, destroy the group if it was opened here.

        After any other error, other ranks may be anywhere in their code, so only a run of one process does this.
        """
        try:
            yield
        except BaseException as error:
            if isinstance(error, UserError) or self.size == 1:
                self.leave_store()
                self._destroy_group()
            raise

    def _destroy_group(self) -> None:
        if self in _worlds:
            _worlds.remove(self)  # it would keep alive the Trainer, which listens for failures
        if dist.is_initialized() and self.owns_group:
            dist.destroy_process_group()
            _forget_meshes()


def _forget_meshes() -> None:
    """Clear DTensor's caches of sharding propagation, which contain meshes.

    An equal mesh of a later World would get the names of this World's groups from a cache; by then, other groups may
    have them.
    """
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import DTensor

        # `torch.distributed.tensor.debug._clear_sharding_prop_cache` does the same, but its module takes up to a second
        # of CPU time to import.
        DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()  # type: ignore[attr-defined]
        torch._C._clear_DTensor_sharding_propagator_cache()


def leave_store() -> None:
    """Call `leave_store` on the latest open World, if any, even if its Trainer does not exist yet."""
    if _worlds:
        _worlds.pop().leave_store()


_worlds: list[World] = []
"""Worlds with a store that this process has opened but not closed."""

_LEAVE_S = 2.0
"""Longest time that rank 0 waits for the others in `leave_store`."""

_openings = itertools.count()
"""Numbers the process groups that this process opens, so that each gets its own prefix in the store."""

_DEATH_S = 1.0
"""Longest time between the closing of a dying rank's connections and its death."""

_ONCE_S = 30.0
"""Longest time that ranks wait for another rank in `once`."""

_DEFAULT_TIMEOUTS = (timedelta(minutes=30), timedelta(minutes=10))
"""torch's default timeouts: gloo and NCCL."""


def _set_timeout(timeout: timedelta, group: dist.ProcessGroup) -> None:
    """Set the timeout of a group, with torch's public function if there is one."""
    set_timeout = getattr(dist, "set_timeout", None)
    if set_timeout is not None:
        set_timeout(timeout, group)
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
    # With 1, which torchrun sets, a process aborts before the record is written.
    if os.environ.get(_NCCL_ERROR_HANDLING, "1") == "1":
        os.environ[_NCCL_ERROR_HANDLING] = "3"


_NCCL_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


def _joined_environment(env: Environment) -> Environment:
    """Return the environment of this rank, whose process group was opened elsewhere."""
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


def select_device(requested: str, env: Environment) -> torch.device:
    """Return this rank's device, and make it the current device.

    requested: `run.device`.  Raises UserError if it requires a GPU and the machine has none or too few.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = choose_gpu(requested, env, num_gpus)
    if index is None:
        return torch.device("cpu")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    _check_expandable_segments(device, env)
    return device


def use_deterministic_kernels() -> None:
    """Use deterministic kernels for the rest of this process.

    Call this before anything runs on a GPU, because cuBLAS reads its workspace size at its first use.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _check_expandable_segments(device: torch.device, env: Environment) -> None:
    """Disable expandable segments if a small allocation shows that the driver does not support them."""
    try:
        torch.empty(1, device=device)
    except RuntimeError as error:
        if os.environ.get("PYTORCH_CUDA_ALLOC_CONF") != EXPANDABLE:
            raise
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", FutureWarning
            )  # deprecated in newer torch; older versions have no alternative
            torch.cuda.memory._set_allocator_settings("expandable_segments:False")
        torch.empty(1, device=device)
        if env.rank == 0:
            print_stderr(f"warning: {EXPANDABLE} is off, since the driver refuses it: {str(error).splitlines()[0]}")


def choose_gpu(
    requested: str, env: Environment, num_gpus: int, variables: Mapping[str, str] = os.environ
) -> int | None:
    """Return the index of this rank's GPU among the `num_gpus` visible ones; None for the CPU.

    Each rank takes the GPU with the index of its local rank.  If it sees only one GPU, the launcher has assigned that
    one to it: `srun --gpus-per-task=1`, or a wrapper that sets CUDA_VISIBLE_DEVICES per rank.  `claim_gpu` checks later
    that no two ranks share a GPU.  Raises UserError if GPUs are required and the machine has none or too few.
    """
    if requested == "cuda" and not num_gpus:
        raise setting_error("run.device", requested, "torch finds no usable GPU", "cpu")
    if requested == "cpu" or not num_gpus:
        return None
    if env.local_rank < env.local_world_size <= num_gpus:
        return env.local_rank
    visible = variables.get("CUDA_VISIBLE_DEVICES", variables.get("HIP_VISIBLE_DEVICES", ""))
    sees_one = len([name for name in visible.split(",") if name.strip()]) == 1
    if num_gpus == 1 and (env.launcher == "srun" or (env.launcher != "nproc" and sees_one)):
        return 0
    raise _too_few_gpus(env.local_world_size, num_gpus)


def claim_gpu(store: Store, rank: int, uuid: str, num_ranks: int) -> str:
    """Claim a GPU for one of the node's `num_ranks` ranks; return an error message if another rank has it, else ""."""
    owner = store.compare_set(f"start/gpu/{uuid}", "", str(rank)).decode()
    return (
        "" if owner == str(rank) else str(_too_few_gpus(num_ranks, 1, f"; ranks {owner} and {rank} see the same one"))
    )


def _too_few_gpus(ranks: int, num_gpus: int, details: str = "") -> UserError:
    rule = f"this node has {num_gpus} GPU{'s' * (num_gpus != 1)}, and each rank needs its own{details}"
    return setting_error("nproc", ranks, rule, fix=f"nproc={num_gpus}, or run.device=cpu")


# ---------------------------------------------------------------------------------------------------------------
# Rendezvous: all ranks join a store, where they decide whether to start, before a collective can hang


_READ_DECISION_S = 5.0
"""Longest time that rank 0, which may host the store, waits for the others to read the decision to stop."""


@functools.cache
def join_store(timeout: timedelta) -> tuple[Store, int, int]:
    """Join the rendezvous store; return it, this rank and the world size.  A process joins only once.

    Callers must use a new prefix for each process group, because group names repeat, and a rank that read the address
    of an earlier group would hang.
    """
    joined: list[tuple[Store, int, int]] = []
    errors: list[BaseException] = []

    def rendezvous() -> None:
        try:
            joined.append(next(dist.rendezvous("env://", timeout=timeout)))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=rendezvous, name="rendezvous", daemon=True)
    thread.start()
    while thread.is_alive():  # in a thread, so that this one handles signals
        thread.join(0.2)
        if stop_is_requested_early():
            _exit_before_start(should_announce=True)
    if errors:
        raise errors[0]
    return joined[0]


_GO, _STOP = "go", "stop"
_PROBLEM, _DECISION = "start/problem", "start/decision"


def agree_to_start(store: Store, rank: int, size: int, timeout_s: float, problem: str = "") -> None:
    """Wait until all ranks have joined.  If one of them is asked to stop before then, all exit with code 75.

    Opening a process group does not react to signals, and ranks would wait until the timeout for one that has exited.
    So they decide in the store, where the first decision wins: the last rank to join writes "go", and a rank that is
    asked to stop writes "stop".

    problem: the message of a user error on this rank, or "".  All ranks raise UserError with the first one.
    """
    if problem:
        store.compare_set(_PROBLEM, "", problem)
    is_last = store.add("start/joined", 1) == size
    deadline, pause_s = time.monotonic() + timeout_s, 0.002
    while not store.check([_DECISION]):
        if stop_is_requested_early():
            store.compare_set(_DECISION, "", _STOP)
        elif is_last:
            store.compare_set(_DECISION, "", _GO)
        elif time.monotonic() > deadline:
            raise TrainingFailed(f"rank {rank}: not all of {size} ranks joined within run.timeout_s={timeout_s:g}")
        else:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
    if store.get(_DECISION).decode() == _STOP:
        _wait_until_all_have_read(store, rank, size)
        _exit_before_start(should_announce=rank == 0)
    if store.check([_PROBLEM]):
        message = store.get(_PROBLEM).decode()
        _wait_until_all_have_read(store, rank, size)
        raise UserError(message)


def _wait_until_all_have_read(store: Store, rank: int, size: int) -> None:
    """On rank 0, which may host the store, wait until the other ranks have read the decision."""
    store.add("start/have_read", 1)
    deadline = time.monotonic() + _READ_DECISION_S
    while rank == 0 and store.add("start/have_read", 0) < size and time.monotonic() < deadline:
        time.sleep(0.02)


def _exit_before_start(should_announce: bool) -> NoReturn:
    if should_announce:
        print_stderr("stopped before all ranks had joined")
    os._exit(EXIT_STOPPED)
