"""The processes of a run: the process group, this rank's device, the mesh, and what ranks say to each other.

Small messages travel on a gloo group of their own (`control`), so that none of them waits for the device, and
what the model sends stays apart.  Knows no model and no data.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainer.config import MeshShape, RunConfig, find_mesh_shape
from trainer.deaths import find_dead, is_lost_connection, this_process
from trainer.environment import (
    Environment,
    export_slurm_rendezvous,
    find_environment,
    follow_parent,
    keep_freed_memory,
    raise_file_limit,
)
from trainer.errors import EXIT_FAILED, EXIT_STOPPED, PeerFailed, TrainingFailed, UserError, say, setting_error
from trainer.stop import was_asked_early

REPLICATE, SHARD = "replicate", "shard"
"""Names of the mesh's axes."""

Result = TypeVar("Result")

_FAILURE = "meshtrainer/failure"
_GRACE_S, _ANSWER_S, _PATIENCE_S = 3.0, 5.0, 600.0
"""How long the main thread has to end by itself; the store to answer; a save in flight to end."""


class Channel:
    """What ranks say to each other on one gloo group: small messages that never wait for the device.

    Every method is a collective of the group's ranks; two threads need two channels.
    """

    def __init__(self, rank: int, size: int, timeout: timedelta) -> None:
        self.rank, self.size = rank, size
        self.group = dist.new_group(backend="gloo", timeout=timeout)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the sums over all ranks, exact for integers below 2**53.  One all-reduce."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Sequence[float]) -> list[float]:
        """Return the maxima over all ranks.  One all-reduce."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: Sequence[float], op: dist.ReduceOp.RedOpType) -> list[float]:
        message = torch.tensor(values, dtype=torch.float64)
        if self.size > 1:
            dist.all_reduce(message, op, group=self.group)
        return message.tolist()

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's `value` on every rank.  One broadcast of a pickled object."""
        box = [value]
        if self.size > 1:
            dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's `value`, in the order of ranks.  One all-gather."""
        box: list[Any] = [None] * self.size
        if self.size > 1:
            dist.all_gather_object(box, value, group=self.group)
            return box
        return [value]

    def agree(self, error: BaseException | None) -> None:
        """Raise on every rank if any rank brings an error, so that none waits for one that has left.

        The rank whose error it is raises it; the others raise the same kind with the same message.
        """
        errors = self.gather(None if error is None else (isinstance(error, UserError), str(error) or repr(error)))
        if error is not None:
            raise error
        for rank, failed in enumerate(errors):
            if failed is not None:
                is_user_error, message = failed
                raise UserError(message) if is_user_error else PeerFailed(f"rank {rank} failed: {message}")

    def agreed(self, work: Callable[[], Result]) -> Result:
        """Return what `work` returns; if it fails on any rank, raise on all of them.  See `agree`."""
        result, error = None, None
        try:
            result = work()
        except Exception as failure:
            error = failure
        self.agree(error)
        return cast(Result, result)

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            dist.barrier(group=self.group)


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
        self.device = _find_device(config.run.device, self.env.local_rank, self.env.local_world_size)
        torch.set_num_threads(config.run.threads or max(1, _num_cores() // self.env.local_world_size))
        if self.device.type == "cpu":
            keep_freed_memory()
        if (advice := raise_file_limit()) and self.env.rank == 0:
            say(f"warning: {advice}")
        self._store: Store | None = None
        if self.owns_group:
            if self.device.type == "cuda":
                _record_collectives(config.run_dir)
            self._open_group(timedelta(seconds=config.run.timeout_s))
        super().__init__(dist.get_rank(), dist.get_world_size(), self.timeout)
        self._groups: list[dist.ProcessGroup] = [self.group]
        self._with_own_timeout: set[dist.ProcessGroup] = set()
        self.first_failure: str | None = None
        """What failed first, if that was another rank; known after `announce_failure`."""
        self.before_exit: list[Callable[[float, str], None]] = []
        """Called on this rank when the run has failed elsewhere and this process is about to end: with the seconds that
        there are, and with what has failed."""
        self.after_failure: list[Callable[[], None]] = []
        """Called on this rank as soon as it is known that another has failed."""
        self._processes = self.gather(this_process())
        self._watch = None
        if self._store is not None:
            messages = Messages(self._store, config.run.timeout_s)
            parent = os.getppid() if self.env.has_a_parent else None
            self._watch = _FailureWatch(self.rank, messages, parent, self.after_failure, self.before_exit)
            follow_parent(False)  # from here on the watch does, which leaves word of it

    @property
    def messages(self) -> Messages | None:
        """Where ranks leave messages without a collective; None if there is one rank, or the group is not ours."""
        return None if self._store is None else Messages(self._store, _ANSWER_S)

    def set_timeout(self, timeout_s: float) -> None:
        """Give every process group that this rank is in another timeout; in a group of somebody else's, only our own.

        The start and the first update compile and allocate, and have a longer one.
        """
        before, self.timeout = self.timeout, timedelta(seconds=timeout_s)
        # All of them, because integer resharding opens some that nobody else knows of; but for those of somebody who
        # has chosen another timeout.
        groups = list(dist.distributed_c10d._world.pg_map) if self.owns_group else self._groups
        for group in set(groups) - self._with_own_timeout:
            if group in self._groups or _timeout_of(group, self.device) in (None, before, *_DEFAULT_TIMEOUTS):
                dist.distributed_c10d._set_pg_timeout(self.timeout, group)

    def _open_group(self, meeting_s: timedelta) -> None:
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        device_id = self.device if self.device.type == "cuda" else None
        if self.env.launcher == "single":
            store, rank, size = cast(Store, HashStore()), 0, 1
        else:
            if self.env.launcher == "srun":
                export_slurm_rendezvous()
            store, rank, size = _rendezvous(meeting_s)
            store = self._store = PrefixStore(f"meshtrainer/{next(_openings)}", store)
            _go_on_together(store, rank, size, meeting_s.total_seconds())
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=size, timeout=self.timeout, device_id=device_id
        )

    def open_channel(self, timeout: timedelta) -> Channel:
        """Return one more channel, for a thread that talks beside the training step.  Called by all ranks."""
        channel = Channel(self.rank, self.size, timeout)
        self._with_own_timeout.add(channel.group)
        return channel

    def build_mesh(self, config: RunConfig) -> DeviceMesh:
        """Return the mesh that the configuration asks for: axes (shard,), or (replicate, shard) for HSDP.

        Every rank takes part in making the axes' process groups.  Raises UserError for a shape that does not fit.
        """
        shape = find_mesh_shape(config.mesh, self.size, self.env.local_world_size)
        return self.mesh_of(shape)

    def mesh_of(self, shape: MeshShape) -> DeviceMesh:
        """Return a mesh of the given shape, its groups with this run's timeout."""
        axes = {REPLICATE: shape.replicate, SHARD: shape.shard} if shape.is_hybrid else {SHARD: shape.shard}
        sizes, names = tuple(axes.values()), tuple(axes)
        mesh = init_device_mesh(self.device.type, sizes, mesh_dim_names=names)
        for axis in names:
            # A mesh's groups do not inherit the timeout of the default group: theirs would be 30 minutes.
            dist.distributed_c10d._set_pg_timeout(self.timeout, mesh.get_group(axis))
            self._groups.append(mesh.get_group(axis))
        return mesh

    def sum_on_device(self, value: torch.Tensor) -> torch.Tensor:
        """Return the sum of a scalar tensor over all ranks, on its device.  One all-reduce on the default group."""
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
            first = Messages(self._store, _ANSWER_S).compare_set(_FAILURE, "", dead or message)
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
        """Keep what another rank has announced while there is somebody to ask: rank 0, which may keep the store, leaves
        first, and what this rank's main thread hangs in then fails for a reason that is not the run's.
        """
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                self.first_failure = Messages(self._store, _ANSWER_S).get(_FAILURE)

    def close(self) -> None:
        """Leave together: wait for all ranks, then end the process group if this opened it."""
        if self._watch is not None:
            self._watch.stop()
        if dist.is_initialized() and self.owns_group:
            self.barrier()
            dist.destroy_process_group()


_DEATH_S = 1.0
"""Seconds in which a rank whose connections are closed is dead."""

_ONCE_S = 30.0
"""Seconds that ranks wait for one of them to do something for all."""

_DEFAULT_TIMEOUTS = (timedelta(minutes=30), timedelta(minutes=10))
"""What torch gives a group for which nobody has chosen: gloo and NCCL."""


def _timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """Return the timeout of a group's collectives on `device`, or None if its backend does not tell."""
    options = getattr(group._get_backend(device), "options", None)
    return getattr(options, "_timeout", None)


_openings = itertools.count()
"""Numbers the process groups that this process opens, one after another: each has names of its own in the store."""


@functools.cache
def _rendezvous(timeout: timedelta) -> tuple[Store, int, int]:
    """Return the store where all ranks meet, this rank, and their number; one store for the life of the process.

    Group names start again with each opening: in a store that still holds those of the one before, ranks read
    addresses that nobody listens to, and hang.
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
    while meeting.is_alive():  # in a thread, so that signals are heard meanwhile
        meeting.join(0.2)
        if was_asked_early():
            _leave_before_the_start(say_so=True)
    if errors:
        raise errors[0]
    return found[0]


_GO, _STOP = "go", "stop"


def _go_on_together(store: Store, rank: int, size: int, timeout_s: float) -> None:
    """Return once all ranks are here and none was asked to stop; else all of them leave, with 75.

    Opening a process group hears no signal: a rank that has left would be waited for there until the timeout.  So
    they decide in the store, where the first word counts: the last one to come says go, one that was asked to stop
    before that says stop.
    """
    is_last = store.add("meeting/here", 1) == size
    deadline, pause_s = time.monotonic() + timeout_s, 0.002
    while not store.check(["meeting/word"]):
        if was_asked_early():
            store.compare_set("meeting/word", "", _STOP)
        elif is_last:
            store.compare_set("meeting/word", "", _GO)
        elif time.monotonic() > deadline:
            raise TrainingFailed(f"rank {rank}: not all of {size} ranks have come within run.timeout_s={timeout_s:g}")
        else:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
    if store.get("meeting/word").decode() == _STOP:
        store.add("meeting/left", 1)
        until = time.monotonic() + _ANSWER_S
        while rank == 0 and store.add("meeting/left", 0) < size and time.monotonic() < until:
            time.sleep(0.02)  # this process may keep the store in which the others still look
        _leave_before_the_start(say_so=rank == 0)


def _leave_before_the_start(say_so: bool) -> NoReturn:
    if say_so:
        say("stopped before all ranks have met")
    os._exit(EXIT_STOPPED)


class NoAnswer(RuntimeError):
    """The process that keeps the store is gone without a word, and its host with it: a cut cable, say."""


class Messages:
    """The store, with an end to waiting.  A dead process closes its connections; a dead host leaves one waiting.

    All methods raise RuntimeError if the store has gone, NoAnswer after `limit_s`.
    """

    def __init__(self, store: Store, limit_s: float) -> None:
        self._store, self._limit_s = store, limit_s

    def check(self, key: str) -> bool:
        return self._within(lambda: self._store.check([key]))

    def set(self, key: str, value: str) -> None:
        self._within(lambda: self._store.set(key, value))

    def get(self, key: str) -> str:
        return self._within(lambda: self._store.get(key)).decode()

    def compare_set(self, key: str, expected: str, value: str) -> str:
        """Set the key if it is as expected; returns what it is then."""
        return self._within(lambda: self._store.compare_set(key, expected, value)).decode()

    def wait(self, key: str, timeout_s: float) -> None:
        self._within(lambda: self._store.wait([key], timedelta(seconds=timeout_s)), timeout_s)

    def _within(self, work: Callable[[], Any], more_s: float = 0.0) -> Any:
        results: list[Any] = []
        errors: list[RuntimeError] = []

        def run() -> None:
            try:
                results.append(work())
            except RuntimeError as error:
                errors.append(error)

        thread = threading.Thread(target=run, name="message", daemon=True)
        thread.start()
        thread.join(self._limit_s + more_s)
        if thread.is_alive():
            raise NoAnswer(f"no answer for {self._limit_s:g} s")
        if errors:
            raise errors[0]
        return results[0]


class _FailureWatch(threading.Thread):
    """Ends this process some seconds after another rank has failed, or the launcher has died.

    The main thread may be waiting in a collective, or anywhere else, and would notice only at the timeout.
    """

    def __init__(
        self,
        rank: int,
        messages: Messages,
        parent: int | None,
        after_failure: list[Callable[[], None]],
        before_exit: list[Callable[[float, str], None]],
    ) -> None:
        super().__init__(name="failure-watch", daemon=True)
        self._rank, self._messages = rank, messages
        self._after_failure, self._before_exit = after_failure, before_exit
        self._stopped, self._parent = threading.Event(), parent
        self.start()

    def run(self) -> None:
        while not self._stopped.wait(0.5):
            patience_s = _PATIENCE_S
            try:
                failure = self._failure()
            except NoAnswer as lost:
                say(f"error: rank {self._rank}: lost rank 0: {lost}; this rank ends")
                failure, patience_s = f"lost rank 0: {lost}", 0.0
            except RuntimeError:
                failure = "lost rank 0, and the store that it kept"
            if failure:
                for tell in self._after_failure:
                    tell()
            if failure and not self._stopped.wait(_GRACE_S):
                for finish in self._before_exit:
                    finish(patience_s, failure)
                os._exit(EXIT_FAILED)

    def _failure(self) -> str:
        """Return what has failed first, on whichever rank; empty if nothing has."""
        if self._messages.check(_FAILURE):
            return self._messages.get(_FAILURE)
        if self._parent is None or os.getppid() == self._parent:
            return ""
        orphaned = f"rank {self._rank}: the process that started it has died"  # nobody would start or end us
        say(f"error: {orphaned}; this rank ends")
        return self._messages.compare_set(_FAILURE, "", orphaned)

    def stop(self, wait: bool = True) -> None:
        self._stopped.set()
        if wait:
            self.join(timeout=2 * _GRACE_S)


def _record_collectives(folder: Path) -> None:
    """Have NCCL keep a record of its last collectives, and write it into `folder` when one times out.

    Read when a process group is opened.  Both names of each variable, for the torch versions that know one of them:
    https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html
    """
    for name, value in (
        ("TORCH_FR_BUFFER_SIZE", "2000"),
        ("TORCH_NCCL_TRACE_BUFFER_SIZE", "2000"),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "1"),
        ("TORCH_NCCL_ENABLE_MONITORING", "1"),
        ("TORCH_FR_DUMP_TEMP_FILE", f"{folder}/collectives_rank_"),
        ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", f"{folder}/collectives_rank_"),
    ):
        os.environ.setdefault(name, value)


def _joined_environment(env: Environment) -> Environment:
    """Return the environment of a rank in a process group that somebody else has opened."""
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


def _find_device(wanted: str, local_rank: int, local_world_size: int) -> torch.device:
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cuda" and not num_gpus:
        raise setting_error("run.device", wanted, "there is no GPU that torch can use", "cpu")
    if wanted == "cpu" or not num_gpus:
        return torch.device("cpu")
    # Under `srun --gpus-per-task=1` every task sees one GPU, number 0 whatever its local rank.
    index = 0 if num_gpus == 1 and "SLURM_PROCID" in os.environ else local_rank
    if (num_gpus > 1 and local_world_size > num_gpus) or index >= num_gpus:  # so that all ranks of the node say so
        raise setting_error("nproc", local_world_size, f"this node has {num_gpus} GPUs, one for each rank", num_gpus)
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
