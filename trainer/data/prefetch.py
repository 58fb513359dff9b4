"""Prefetches the items of an iterator in a background thread.

If an item never arrives, for example after a lost connection, the caller decides when to stop waiting.

Waking a thread costs more than making a micro-batch.  So the thread works in bursts: it fills its buffer, then sleeps
until the buffer is half empty.  A caller that finds the buffer empty polls every millisecond.  A caller that does no
work between items leaves no time for prefetching; the two threads would only contend for the GIL.  Such a caller makes
its items itself while the thread sleeps, unless making an item could block, since it could not give up then.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")

_POLL_S = 0.001

_IDLE_CALLER_S = 1e-4
"""A caller that returns within this time, which is less than it takes to wake a thread, did no other work."""

_JOIN_TIMEOUT_S = 2.0
"""Seconds to wait for the thread when closing.  A thread still waiting for a connection is abandoned."""


class WaitAbandoned(Exception):
    """The wait was abandoned before the item arrived."""


class Prefetcher(Generic[Item]):
    """Iterator whose items a background thread prefetches, up to `capacity` at a time.

    Exceptions, including StopIteration, are re-raised in order.  The thread ends when `close` is called or this object
    is deleted.

    should_abandon: polled while waiting for an item; WaitAbandoned is raised as soon as it returns True.
    is_nonblocking: whether the iterator never blocks for long, so that the caller may make items itself.
    """

    def __init__(
        self,
        items: Iterator[Item],
        capacity: int,
        should_abandon: Callable[[], bool] = lambda: False,
        is_nonblocking: bool = False,
    ) -> None:
        self._buffer, self._should_abandon = _Buffer(items, capacity, is_nonblocking), should_abandon
        self._thread = threading.Thread(target=self._buffer.fill, name="data", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        return self._buffer.take(self._should_abandon)

    def close(self) -> None:
        """Stop the thread, and wait briefly for it to end."""
        self._buffer.close()
        self._thread.join(_JOIN_TIMEOUT_S)

    def __del__(self) -> None:
        self._buffer.close()


class _Buffer(Generic[Item]):
    """Buffer of prefetched items.

    The thread refers only to this object, not to the one whose deletion ends it.  The iterator belongs to the thread,
    except while the thread sleeps: then it belongs to the caller, and only the caller can wake the thread.
    """

    def __init__(self, source: Iterator[Item], capacity: int, is_nonblocking: bool) -> None:
        self._source, self._capacity, self._items = source, capacity, deque[Item]()
        self._is_nonblocking = is_nonblocking
        self._error: BaseException | None = None
        self._is_closed = self._is_resting = self._is_caller_faster = False
        self._taken_at = -math.inf
        self._has_space = threading.Event()

    def fill(self) -> None:
        try:
            for item in self._source:
                self._items.append(item)
                if self._is_caller_faster or len(self._items) >= self._capacity:
                    self._wait_for_space()
                if self._is_closed:
                    return
            self._error = StopIteration()
        except BaseException as error:
            self._error = error

    def _wait_for_space(self) -> None:
        self._has_space.clear()
        self._is_resting = True
        if not self._is_closed:
            self._has_space.wait()

    def take(self, should_abandon: Callable[[], bool]) -> Item:
        is_caller_idle = self._is_nonblocking and time.perf_counter() - self._taken_at < _IDLE_CALLER_S
        self._is_caller_faster &= is_caller_idle
        item = self._wait_for_item(is_caller_idle, should_abandon)
        self._taken_at = time.perf_counter()
        return item

    def _wait_for_item(self, is_caller_idle: bool, should_abandon: Callable[[], bool]) -> Item:
        while True:
            error = self._error  # read first: all items are in the buffer before the error is set
            if self._items:
                break
            if error is not None:
                raise error
            self._is_caller_faster |= is_caller_idle
            if self._is_resting and self._is_caller_faster:
                return self._produce()
            self._wake()
            if should_abandon():
                raise WaitAbandoned
            time.sleep(_POLL_S)
        item = self._items.popleft()
        if len(self._items) <= self._capacity // 2 and not self._is_caller_faster:
            self._wake()
        return item

    def _produce(self) -> Item:
        try:
            return next(self._source)
        except BaseException as error:
            self._error = error
            raise

    def _wake(self) -> None:
        if self._is_resting:
            self._is_resting = False
            self._has_space.set()

    def close(self) -> None:
        self._is_closed = True
        self._has_space.set()
