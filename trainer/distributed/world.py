"""The processes of a run: the process group, this rank's device, the mesh, and messages between ranks.

Small messages travel on a gloo group of their own (`control`), so that none of them waits for the device, and
what the model sends stays apart.  Knows no model and no data.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainer.config import MeshShape, RunConfig
from trainer.distributed.channel import Channel, Messages
from trainer.distributed.deaths import find_dead, is_lost_connection, this_process
from trainer.distributed.device import add_in_order, claim_gpu, find_device
from trainer.distributed.environment import (
    Environment,
    connect_late,
    export_slurm_rendezvous,
    find_environment,
    follow_parent,
    keep_freed_memory,
    raise_file_limit,
    share_compilers,
)
from trainer.distributed.exchange import know_group
from trainer.distributed.failure import FAILURE, FailureListener, FailureWatch
from trainer.distributed.interface import choose_interface
from trainer.distributed.rendezvous import begin_together, meet_in_a_store
from trainer.errors import PeerFailed, UserError, say

REPLICATE, SHARD, CONTEXT = "replicate", "shard", "context"
"""Names of the mesh's axes, and of the one inside `shard` whose ranks hold slices of the same sequences."""

_ANSWER_S = 5.0
"""How long the store has to answer."""


class World(Channel):
    """All ranks, seen from one of them.

    Opens the process group (gloo on CPU, NCCL on CUDA) unless there is one already, as under Ray Train; only what it
    opened does it close.  Must be opened by all ranks.
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
            problem = str(error)  # the other ranks hear of it where they meet
        torch.set_num_threads(config.run.threads or max(1, _num_cores() // self.env.local_world_size))
        share_compilers(_num_cores(), self.env.local_world_size)
        if config.run.deterministic:
            add_in_order()
        if self.device.type == "cpu":
            keep_freed_memory()
        if (advice := raise_file_limit()) and self.env.rank == 0:
            say(f"warning: {advice}")
        self._store: Store | None = None
        self.interface = ""
        """The network interface that gloo listens on; empty where it is left to gloo."""
        if self.owns_group:
            if self.device.type == "cuda":
                _record_collectives(config.run_dir)
            self._open_group(timedelta(seconds=config.run.timeout_s), problem)
        # On a CPU the default group is gloo's already.  It is the main thread that uses both.
        uses_default_group = self.owns_group and self.device.type == "cpu"
        super().__init__(dist.get_rank(), dist.get_world_size(), self.timeout, uses_default_group)
        self._groups: list[dist.ProcessGroup] = [self.group]
        self._with_own_timeout: set[dist.ProcessGroup] = set()
        self.first_failure: str | None = None
        """What failed first, if that was another rank; known after `announce_failure`."""
        self.failures: list[FailureListener] = []
        self._processes = self.gather(this_process())
        self._watch = None
        if self._store is not None:
            messages = Messages(self._store, config.run.timeout_s)
            parent = os.getppid() if self.env.has_a_parent else None
            self._watch = FailureWatch(self.rank, messages, parent, self.failures)
            follow_parent(False)  # from here on the watch does, which leaves word of it
            _worlds.append(self)

    @property
    def messages(self) -> Messages | None:
        """The store for messages without a collective; None if there is one rank, or the group is not ours."""
        return None if self._store is None else Messages(self._store, _ANSWER_S)

    def set_timeout(self, timeout_s: float) -> None:
        """Give the process groups of this rank another timeout: all, or only those made here if a user opened them.

        The start and the first step compile and allocate, and have a longer one.
        """
        before, self.timeout = self.timeout, timedelta(seconds=timeout_s)
        # All of them, because integer resharding opens some that are known nowhere else; but for those whose owner
        # has chosen another timeout.
        groups = list(dist.distributed_c10d._world.pg_map) if self.owns_group else self._groups
        for group in set(groups) - self._with_own_timeout:
            if group in self._groups or _timeout_of(group, self.device) in (None, before, *_DEFAULT_TIMEOUTS):
                _set_timeout(self.timeout, group)

    def _open_group(self, meeting_s: timedelta, problem: str) -> None:
        connect_late()
        backend = "cuda:nccl" if self.device.type == "cuda" else "gloo"
        device_id = self.device if self.device.type == "cuda" else None
        if self.env.launcher == "single":
            store, rank, size = cast(Store, HashStore()), 0, 1
        else:
            if self.env.launcher == "srun":
                export_slurm_rendezvous()
            self.interface = choose_interface(self.env)
            store, rank, size = meet_in_a_store(meeting_s)
            store = self._store = PrefixStore(f"meshtrainer/{next(_openings)}", store)
            problem = problem or claim_gpu(store, rank, self.env, self.device)
            begin_together(store, rank, size, meeting_s.total_seconds(), problem)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=size, timeout=self.timeout, device_id=device_id
        )

    def open_channel(self, timeout: timedelta) -> Channel:
        """Return one more channel, for a thread that talks beside the training step.  Called by all ranks."""
        channel = Channel(self.rank, self.size, timeout)
        if self.size > 1:
            self._with_own_timeout.add(channel.group)
        return channel

    def mesh_of(self, shape: MeshShape) -> DeviceMesh:
        """Return a mesh of the given shape: axes (shard,), or (replicate, shard) for HSDP.

        Every rank takes part in making the axes' process groups, which have this run's timeout.
        """
        axes = {REPLICATE: shape.replicate, SHARD: shape.shard} if shape.is_hybrid else {SHARD: shape.shard}
        sizes, names = tuple(axes.values()), tuple(axes)
        mesh = init_device_mesh(self.device.type, sizes, mesh_dim_names=names)
        for axis in names:
            # A mesh's groups do not inherit the timeout of the default group: theirs would be 30 minutes.
            _set_timeout(self.timeout, mesh.get_group(axis))
            self._groups.append(mesh.get_group(axis))
        return mesh

    def open_context(self, num_ranks: int) -> str:
        """Open the process group of this rank and its neighbours, `num_ranks` in all; return its name for `exchange`.

        One of its own: what attention sends would wait behind the parameters that FSDP gathers.  Called by all ranks.
        """
        first = self.rank - self.rank % num_ranks
        ranks = list(range(first, first + num_ranks))
        group = dist.new_group(ranks, timeout=self.timeout, use_local_synchronization=True, group_desc=CONTEXT)
        self._groups.append(group)
        return know_group(group)

    def sum_on_device(self, value: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor over all ranks, on its device.  One all-reduce on the default group."""
        if self.size > 1:
            dist.all_reduce(value)
        return value

    def once(self, what: str, work: Callable[[], None]) -> None:
        """Let the first rank that comes here do the work; the others wait for it, half a minute at most.

        No collective is called: some ranks may never come.
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
        except RuntimeError as lost:  # the store has gone, or it took too long: nothing depends on it
            say(f"warning: rank {self.rank}: {what}: {lost}")

    def announce_failure(self, error: BaseException) -> str | None:
        """Tell the other ranks that this one fails.  Returns what failed first if that was another rank.

        No collective is called: the others may be anywhere.
        """
        if self._store is None:
            return None
        if self._watch is not None:
            self._watch.stop(wait=False)
        is_about_another = isinstance(error, PeerFailed)
        message = str(error) if is_about_another else f"rank {self.rank}: {type(error).__name__}: {error}"
        dead = find_dead(self._processes, _DEATH_S) if is_lost_connection(error) else ""
        try:
            first = Messages(self._store, _ANSWER_S).compare_set(FAILURE, "", dead or message)
        except RuntimeError:  # the process that keeps the store has gone
            first = self.first_failure or dead or message
        if first == dead:
            self._report_once(dead)
        self.first_failure = None if first == message else first
        return self.first_failure

    def _report_once(self, dead: str) -> None:
        """Say who has died, on one of the ranks that have seen it, unless the launcher does."""
        if self.env.launcher != "nproc":
            self.once("death", lambda: say(f"error: {dead}"))

    def remember_failure(self) -> None:
        """Keep what another rank has announced while it can still be read: rank 0, which may keep the store, leaves
        first, and what this rank's main thread hangs in then fails for a reason that is not the run's.
        """
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                self.first_failure = Messages(self._store, _ANSWER_S).get(FAILURE)

    def part(self) -> None:
        """Stop using the store, before leaving because of a user's mistake that all ranks have heard of.

        Rank 0, whose process keeps the store, waits a moment until all have: torch prints a page of C++ frames on
        every rank that asks a store which is gone.
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
        """Leave together: wait for all ranks, then end the process group if this opened it."""
        if self._watch is not None:
            self._watch.stop()
        if self in _worlds:
            _worlds.remove(self)  # which would keep the Trainer: it listens for failures
        if dist.is_initialized() and self.owns_group:
            self.barrier()
            dist.destroy_process_group()


def part() -> None:
    """`World.part` of the world that this process opened last, if there is one: its Trainer may not have been built."""
    if _worlds:
        _worlds.pop().part()


_worlds: list[World] = []
"""Those of several ranks that this process has opened and not closed."""

_PART_S = 2.0
"""How long rank 0 waits for the others, at most."""

_openings = itertools.count()
"""Numbers the process groups that this process opens, one after another: each has its own names in the store."""

_DEATH_S = 1.0
"""Seconds in which a rank whose connections are closed is dead."""

_ONCE_S = 30.0
"""Seconds that ranks wait for one of them to do something for all."""

_DEFAULT_TIMEOUTS = (timedelta(minutes=30), timedelta(minutes=10))
"""What torch gives a group by default: gloo and NCCL."""


def _set_timeout(timeout: timedelta, group: dist.ProcessGroup) -> None:
    """Give a group another timeout, by torch's public function where this torch has one."""
    public = getattr(dist, "set_timeout", None)
    if public is not None:
        public(timeout, group)
    else:
        dist.distributed_c10d._set_pg_timeout(timeout, group)


def _timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """Return the timeout of a group's collectives on `device`, or None if its backend does not tell."""
    options = getattr(group._get_backend(device), "options", None)
    return getattr(options, "_timeout", None)


def _record_collectives(folder: Path) -> None:
    """Have NCCL keep a record of its last collectives, and write it into `folder` when one times out.

    Read when a process group is opened:
    https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html
    """
    for name, value in (
        ("TORCH_FR_BUFFER_SIZE", "2000"),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "1"),
        ("TORCH_NCCL_ENABLE_MONITORING", "1"),
        ("TORCH_FR_DUMP_TEMP_FILE", f"{folder}/collectives_rank_"),
    ):
        os.environ.setdefault(name, value)
    # torch's launcher sets 1, by which a process ends itself before the record is written.
    if os.environ.get(_ON_TIMEOUT, "1") == "1":
        os.environ[_ON_TIMEOUT] = "3"


_ON_TIMEOUT = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


def _joined_environment(env: Environment) -> Environment:
    """Return the environment of a rank in a process group that was opened elsewhere."""
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
