"""A thread that works ahead: what an iterator makes is there before it is asked for.

What does not come, as from a connection that is lost, is waited for only as long as the caller likes.

Being woken costs more than a micro-batch does.  So the thread works in bursts, until as much is ready as may be, and
rests until half of that has been taken; and a caller who finds nothing looks again after a millisecond.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")

_PAUSE_S = 0.001

_ENDING_S = 2.0
"""Seconds that a thread may take to end.  One that waits for a connection is left to itself."""


class GivenUp(Exception):
    """The wait has ended without what it was for."""


class Ahead(Generic[Item]):
    """The items of an iterator, of which a thread has up to `most` ready.

    What the iterator raises, its end too, is raised in its turn.  The thread ends with `close`, or with this object.
    gives_up: asked again and again while an item is waited for; once it is true, GivenUp is raised.
    """

    def __init__(self, items: Iterator[Item], most: int, gives_up: Callable[[], bool] = lambda: False) -> None:
        self._shelf, self._gives_up = _Shelf[Item](most), gives_up
        self._thread = threading.Thread(target=self._shelf.fill, args=(items,), name="data", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        return self._shelf.take(self._gives_up)

    def close(self) -> None:
        """End the thread, and wait for that, but not for long."""
        self._shelf.close()
        self._thread.join(_ENDING_S)

    def __del__(self) -> None:
        self._shelf.close()


class _Shelf(Generic[Item]):
    """Batches that are ready.  The thread knows this alone, so that it holds nothing of what would end it."""

    def __init__(self, most: int) -> None:
        self._most, self._items = most, deque[Item]()
        self._error: BaseException | None = None
        self._is_closed = False
        self._room = threading.Event()

    def fill(self, items: Iterator[Item]) -> None:
        try:
            for item in items:
                self._items.append(item)
                if len(self._items) >= self._most:
                    self._rest()
                if self._is_closed:
                    return
            self._error = StopIteration()
        except BaseException as error:
            self._error = error

    def _rest(self) -> None:
        self._room.clear()
        if len(self._items) > self._most // 2 and not self._is_closed:
            self._room.wait()

    def take(self, gives_up: Callable[[], bool]) -> Item:
        while True:
            error = self._error  # looked at first: what is there was put there before it
            if self._items:
                break
            if error is not None:
                raise error
            if gives_up():
                raise GivenUp
            time.sleep(_PAUSE_S)
        item = self._items.popleft()
        if len(self._items) == self._most // 2:
            self._room.set()
        return item

    def close(self) -> None:
        self._is_closed = True
        self._room.set()
