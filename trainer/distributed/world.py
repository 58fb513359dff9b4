"""The ranks of a run: their rendezvous, process groups, devices and meshes, and the messages between them.

Small messages never wait for the device: on GPUs, they use a gloo group that is separate from the model's groups.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import sys
import time
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainer.config.parallel import MeshShape
from trainer.config.schema import RunConfig
from trainer.distributed.channel import Channel
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
from trainer.distributed.monitor import Monitor, this_process
from trainer.errors import PeerFailed, TrainingFailed, UserError, print_stderr, setting_error
from trainer.stopping import stop

REPLICATE, SHARD, CONTEXT = "replicate", "shard", "context"
"""Names of the two mesh axes, and of the context-parallel groups inside `shard`."""
OUTER = "outer"
EXPERT = "expert"
TENSOR = "tensor"
"""Names of the axes into which `shard` is split: `outer`, and `expert` or `tensor`, whose ranks are consecutive."""
COPY, PART = "copy", "part"
"""Names of the axes of stacks with fewer matrices than `shard` has ranks."""


def make_copy_mesh(mesh: DeviceMesh, num_parts: int) -> DeviceMesh:
    """Return a mesh (copy, part) of the ranks of `mesh`; each copy has `num_parts` consecutive ranks.

    Collective: creates the process groups of both axes.
    """
    return DeviceMesh(mesh.device_type, mesh.mesh.reshape(-1, num_parts), mesh_dim_names=(COPY, PART))


def name_of_group(mesh: DeviceMesh) -> str:
    """Return the name of the process group of a mesh with one axis, for the operators in `exchange`."""
    (axis,) = mesh.mesh_dim_names or ("",)
    return register_group(mesh.get_group(), axis)


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
        self.interface = ""
        """The network interface that gloo listens on; empty if gloo chooses."""
        self._store: Store | None = None
        if self.owns_group:
            if self.device.type == "cuda":
                _record_collectives(config.run_dir)
            self.monitor = self._open_group(config, problem)
        else:
            self.monitor = Monitor(None, self.env.rank, self.env.world_size, config)
        # A Trainer may be forgotten without `close`, or a script may end.  If the interpreter is finalized while a
        # thread is inside the store, Python ends the thread with pthread_exit, and unwinding torch's C++ frames aborts
        # the process.
        weakref.finalize(self, self.monitor.close)
        # On a CPU the default group is a gloo group, and only the main thread uses it.
        use_default_group = self.owns_group and self.device.type == "cpu"
        super().__init__(dist.get_rank(), dist.get_world_size(), self.timeout, use_default_group)
        self._copy_meshes: dict[tuple[DeviceMesh, int], DeviceMesh] = {}
        if self.owns_group:
            self.monitor.processes = self.gather(this_process())

    def _open_group(self, config: RunConfig, problem: str) -> Monitor:
        """Open the default process group.  Returns the Monitor, which watches over the ranks from here on.

        problem: the message of a user error on this rank, or "".  All ranks raise UserError with the first one.
        """
        # By default each gloo group connects every pair of ranks: on 256 ranks, over a thousand sockets per rank.
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
        backend = "cuda:nccl" if self.device.type == "cuda" else "gloo"
        device_id = self.device if self.device.type == "cuda" else None
        rank, size = 0, 1
        if self.env.launcher == "single":
            store: Store = HashStore()
            monitor = Monitor(store, rank, size, config)
        else:
            if self.env.launcher == "srun":
                export_slurm_rendezvous()
            self.interface = choose_interface(self.env)
            store, rank, size = join_store(timedelta(seconds=config.run.timeout_s))
            store = self._store = PrefixStore(f"meshtrainer/{next(_openings)}", store)
            parent = os.getppid() if self.env.has_launcher_parent else None
            monitor = Monitor(store, rank, size, config, parent)
            die_with_parent(False)  # from here on, the Monitor does this and reports it
            if self.device.type == "cuda" and self.env.local_world_size > torch.cuda.device_count():
                # If two ranks saw the same GPU, NCCL would fail later with an unhelpful message.
                uuid = str(torch.cuda.get_device_properties(self.device).uuid)
                problem = problem or claim_gpu(store, rank, uuid, self.env.local_world_size)
            try:
                wait_for_all(store, rank, size, config.run.timeout_s, problem)
            except UserError:
                monitor.close()
                leave_store(store, rank, size)
                raise
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=size, timeout=self.timeout, device_id=device_id
        )
        return monitor

    def open_channel(self, timeout: timedelta) -> Channel:
        """Open a channel for another thread that communicates during training steps.  All ranks must call this.

        Collective: opens a process group and connects its ranks.
        """
        channel = Channel(self.rank, self.size, self.timeout)
        channel.connect()
        if self.size > 1:
            _set_timeout(timeout, channel.group)
        return channel

    def close_channel(self, channel: Channel) -> None:
        """Close a channel's connections on this rank, so that ranks that wait for it fail.  Not collective.

        They are closed once nothing refers to the channel any more: unlike this, `abort` and `shutdown` of a gloo group
        leave them open.
        """
        if self.size > 1:
            dist.destroy_process_group(channel.group)

    def build_mesh(self, shape: MeshShape) -> DeviceMesh:
        """Create a mesh of the given shape, with axes (shard,), or (replicate, shard) for HSDP.

        All ranks must call this.  The axes' process groups get this run's timeout.
        """
        return self._build_mesh({REPLICATE: shape.replicate, SHARD: shape.shard}, shape.has_replicas)

    def build_split_meshes(self, shape: MeshShape, sizes: Mapping[str, int]) -> dict[str, DeviceMesh]:
        """Create the mesh of the parameters that each group of consecutive ranks divides among them.

        Its axes are (outer, inner), or (replicate, outer, inner): those of `shape`, with the shard axis split in two.
        All ranks must call this.

        sizes: the size of such a group by the name of its axis, EXPERT or TENSOR; there is no mesh for a size of 1.
        """
        meshes = {}
        for inner, size in sizes.items():
            if size > 1:
                axes = {REPLICATE: shape.replicate, OUTER: shape.shard // size, inner: size}
                meshes[inner] = self._build_mesh(axes, shape.has_replicas)
        return meshes

    def _build_mesh(self, axes: dict[str, int], has_replicas: bool) -> DeviceMesh:
        if not has_replicas:
            del axes[REPLICATE]
        sizes, names = tuple(axes.values()), tuple(axes)
        mesh = init_device_mesh(self.device.type, sizes, mesh_dim_names=names)
        self._set_timeouts(mesh, names)
        return mesh

    def copy_mesh(self, mesh: DeviceMesh, num_parts: int) -> DeviceMesh:
        """Return `make_copy_mesh(mesh, num_parts)`, whose groups get this run's timeout.

        All ranks must call this.  Later calls with the same arguments return the same mesh.
        """
        if (mesh, num_parts) not in self._copy_meshes:
            copies = self._copy_meshes[mesh, num_parts] = make_copy_mesh(mesh, num_parts)
            self._set_timeouts(copies, (COPY, PART))
        return self._copy_meshes[mesh, num_parts]

    def _set_timeouts(self, mesh: DeviceMesh, axes: Iterable[str]) -> None:
        for axis in axes:
            # A mesh's groups do not inherit the timeout of the default group, but have torch's 30 minutes.
            _set_timeout(self.timeout, mesh.get_group(axis))

    def create_context_group(self, num_ranks: int, stride: int) -> str:
        """Create this rank's context-parallel group: `num_ranks` ranks, each `stride` after the one before.

        Returns the name of the group for `exchange`.  Without a separate group, the messages of attention would queue
        behind FSDP's all-gathers.  All ranks must call this.
        """
        first = self.rank - self.rank // stride % num_ranks * stride
        ranks = list(range(first, first + num_ranks * stride, stride))
        group = dist.new_group(ranks, timeout=self.timeout, use_local_synchronization=True, group_desc=CONTEXT)
        return register_group(group, CONTEXT)

    def sum_on_device(self, value: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all ranks in place, on its device, and return it.  One all-reduce on the default group."""
        if self.size > 1:
            dist.all_reduce(value)
        return value

    def close(self) -> None:
        """Wait for all ranks, then destroy the process group if it was opened here."""
        self.monitor.close()
        if dist.is_initialized() and self.owns_group:
            self.barrier()
        self.destroy_group()

    def leave(self) -> None:
        """Stop using the store and the process group, because all ranks end with the same user error."""
        self.monitor.close()
        if self._store is not None:
            leave_store(self._store, self.rank, self.size)
        self.destroy_group()

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """If the block, which builds a part of the Trainer, raises an exception, leave the other ranks.

        All ranks raise a UserError; any other exception is announced to them.
        """
        try:
            yield
        except UserError:
            self.leave()
            raise
        except BaseException as error:
            stop.is_ending = True  # a launcher sends SIGTERM if another rank ends first
            failure = self.monitor.fail(error)
            if self.size == 1:
                self.destroy_group()
            if not self.monitor.is_own(failure, error):
                raise PeerFailed(failure.reason) from error
            raise

    def destroy_group(self) -> None:
        """Destroy the process group, if it was opened here.  Not collective."""
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


_openings = itertools.count()
"""Numbers the process groups that this process opens, so that each gets its own prefix in the store."""


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
# Rendezvous: all ranks join a store, where they learn of each other's problems before a collective can hang


_READ_S = 2.0
"""Longest time that rank 0, which may host the store, waits for the others to leave it."""


@functools.cache
def join_store(timeout: timedelta) -> tuple[Store, int, int]:
    """Join the rendezvous store; return it, this rank and the world size.  A process joins only once.

    Callers must use a new prefix for each process group, because group names repeat, and a rank that read the address
    of an earlier group would hang.
    """
    return next(dist.rendezvous("env://", timeout=timeout))


def wait_for_all(store: Store, rank: int, size: int, timeout_s: float, problem: str = "") -> None:
    """Wait until all ranks have joined.

    problem: the message of a user error on this rank, or "".  All ranks raise UserError with the first one.

    Raises TrainingFailed if a rank has not joined in time.
    """
    if problem:
        store.compare_set("start/problem", "", problem)
    if store.add("start/joined", 1) == size:
        store.set("start/complete", "yes")
    try:
        store.wait(["start/complete"], timedelta(seconds=timeout_s))
    except RuntimeError as error:
        missing = size - store.add("start/joined", 0)
        rule = f"{missing} of {size} ranks have not joined within run.timeout_s={timeout_s:g}"
        raise TrainingFailed(f"rank {rank}: {rule}") from error
    if store.check(["start/problem"]):
        raise UserError(store.get("start/problem").decode())


def leave_store(store: Store, rank: int, size: int) -> None:
    """Stop using the store, before all ranks exit because of the same user error.

    Rank 0, which may host the store, waits briefly for the others, because torch prints a page of C++ frames on each
    rank that uses a store that is gone.
    """
    deadline = time.monotonic() + _READ_S
    with contextlib.suppress(RuntimeError):
        num_left = store.add("start/left", 1)
        while rank == 0 and num_left < size and time.monotonic() < deadline:
            time.sleep(0.02)
            num_left = store.add("start/left", 0)
