"""Small messages between ranks: CPU collectives that never wait for the device, and a key-value store with timeouts.

One small all-reduce in each step (`StepSync`) carries everything that the ranks must agree on in that step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import Store

from trainer.errors import PeerFailed, UserError

Result = TypeVar("Result")


class Channel:
    """Collectives for small messages between the ranks of a gloo group.  They never wait for the device.

    The constructor and every method are collective.  Threads must not share a channel.
    """

    def __init__(self, rank: int, size: int, timeout: timedelta, use_default_group: bool = False) -> None:
        """Open a new group, unless the default group will do.

        With `use_default_group`, the default process group must be a gloo group.  With one rank, it will do if it can
        communicate on the CPU, which a group of NCCL cannot.  An open group costs CPU time, even if it is idle: gloo
        runs a thread for it that wakes up a hundred times per second.
        """
        self.rank, self.size = rank, size
        default_will_do = use_default_group or (size == 1 and "cpu:" in dist.get_backend_config())
        self.group = cast(Any, dist.group.WORLD) if default_will_do else dist.new_group(backend="gloo", timeout=timeout)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def connect(self) -> None:
        """Connect the ranks that talk to each other in a gather, a scatter and a broadcast.  One of each.

        Groups connect two ranks when they first talk to each other.  A rank that waits for another one to which it was
        never connected does not notice that the other one has died.
        """
        if self.size > 1:
            dist.gather_object(None, [None] * self.size if self.is_main else None, dst=0, group=self.group)
            dist.scatter_object_list([None], [None] * self.size if self.is_main else None, src=0, group=self.group)
            self.broadcast(None)

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the sum of each value over all ranks, exact for integers below 2**53.  One all-reduce."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Sequence[float]) -> list[float]:
        """Return the maximum of each value over all ranks.  One all-reduce."""
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
        """Return every rank's `value` in rank order, on all ranks.  One all-gather."""
        box: list[Any] = [None] * self.size
        if self.size > 1:
            dist.all_gather_object(box, value, group=self.group)
            return box
        return [value]

    def agree(self, error: BaseException | None) -> None:
        """Raise on every rank if any rank passes an error, so that no rank waits for one that has failed.

        One all-gather.

        A rank that passes an error raises it.  The others raise a UserError if the error of the first failed rank is a
        UserError, and PeerFailed otherwise.
        """
        errors = self.gather(None if error is None else (isinstance(error, UserError), str(error) or repr(error)))
        if error is not None:
            raise error
        for rank, failure in enumerate(errors):
            if failure is not None:
                is_user_error, message = failure
                raise UserError(message) if is_user_error else PeerFailed(f"rank {rank} failed: {message}")

    def agreed(self, work: Callable[[], Result]) -> Result:
        """Return the result of `work()`; if that raises on any rank, raise on every rank: see `agree`.

        One all-gather.
        """
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


class StoreTimeout(RuntimeError):
    """Raised if the store does not respond in time, for example because its host or the network is down."""


class TimedStore:
    """A key-value store with timeouts, because a dead host, unlike a dead process, does not close its connections.

    All methods raise RuntimeError if the store is gone, and its subclass StoreTimeout if the store does not respond
    within `limit_s` seconds.  `wait` adds its own timeout to this limit.
    """

    def __init__(self, store: Store, limit_s: float) -> None:
        self._store, self._limit_s = store, limit_s

    def check(self, key: str) -> bool:
        return self._with_timeout(lambda: self._store.check([key]))

    def set(self, key: str, value: str) -> None:
        self._with_timeout(lambda: self._store.set(key, value))

    def get(self, key: str) -> str:
        return self._with_timeout(lambda: self._store.get(key)).decode()

    def compare_set(self, key: str, expected: str, value: str) -> str:
        """Set the key if its value is `expected` ("" if it is not set).  Returns its value after that."""
        return self._with_timeout(lambda: self._store.compare_set(key, expected, value)).decode()

    def wait(self, key: str, timeout_s: float) -> None:
        """Wait up to `timeout_s` seconds for the key to be set, then raise RuntimeError."""
        self._with_timeout(lambda: self._store.wait([key], timedelta(seconds=timeout_s)), timeout_s)

    def _with_timeout(self, work: Callable[[], Any], extra_s: float = 0.0) -> Any:
        results: list[Any] = []
        errors: list[RuntimeError] = []

        def run() -> None:
            try:
                results.append(work())
            except RuntimeError as error:
                errors.append(error)

        thread = threading.Thread(target=run, name="message", daemon=True)
        thread.start()
        timeout_s = self._limit_s + extra_s
        thread.join(timeout_s)
        if thread.is_alive():
            raise StoreTimeout(f"no answer for {timeout_s:g} s")
        if errors:
            raise errors[0]
        return results[0]


# ---------------------------------------------------------------------------------------------------------------
# The all-reduce of each step


_NUM_RESERVED = 2
"""Minimum number of amounts in a message.  If there are fewer, zeros are added, so that all ranks send messages of the
same length."""


class Vote:
    """A yes-or-no question that every rank answers in each all-reduce."""

    def __init__(self, answer: Callable[[], bool], num_ranks: int, on_yes: Callable[[], None] | None) -> None:
        self.answer, self._num_ranks, self._on_yes = answer, num_ranks, on_yes
        self._num_yes = 0

    @property
    def any_yes(self) -> bool:
        """True if at least one rank answered yes in the last all-reduce."""
        return self._num_yes > 0

    @property
    def all_yes(self) -> bool:
        """True if every rank answered yes in the last all-reduce."""
        return self._num_yes == self._num_ranks

    def record(self, num_yes: int) -> None:
        """Record the result of an all-reduce, which is the same on all ranks."""
        self._num_yes = num_yes
        if num_yes and self._on_yes is not None:
            self._on_yes()


class StepSync:
    """Sums a step's amounts and counts the yes votes, over all ranks, in one all-reduce.

    Components register their votes when they are created, in the same order on every rank.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._votes: list[Vote] = []
        self._is_reduced = False

    def register(self, answer: Callable[[], bool], on_yes: Callable[[], None] | None = None) -> Vote:
        """Register a vote.  `answer()` returns this rank's answer; `on_yes()` is called on all ranks if any says yes.

        All ranks must register the same votes in the same order.
        """
        vote = Vote(answer, self._channel.size, on_yes)
        self._votes.append(vote)
        return vote

    def begin_step(self) -> None:
        """Start a step, which must do at least one all-reduce."""
        self._is_reduced = False

    def all_reduce(self, *amounts: float) -> list[float]:
        """Return the sum of each amount over all ranks, and update all votes.  One all-reduce.

        All ranks must pass the same number of amounts, unless each passes at most two.
        """
        padding = [0.0] * (_NUM_RESERVED - len(amounts))
        sums = self._channel.sum([*amounts, *padding, *(vote.answer() for vote in self._votes)])
        self._is_reduced = True
        for vote, num_yes in zip(self._votes, sums[len(amounts) + len(padding) :], strict=True):
            vote.record(int(num_yes))
        return sums[: len(amounts)]

    def ensure_all_reduced(self) -> None:
        """Do the step's all-reduce if a custom train_step has not done it.  At most one all-reduce."""
        if not self._is_reduced:
            self.all_reduce()
