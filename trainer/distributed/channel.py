"""Small messages between ranks: CPU collectives that never wait for the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

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
