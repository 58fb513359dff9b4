"""A thread that works ahead: what an iterator makes is there before it is asked for.

What does not come, as from a connection that is lost, is waited for only as long as the caller likes.

Being woken costs more than a micro-batch does.  So the thread works in bursts, until as much is ready as may be, and
rests until half of that has been taken; and a caller who finds nothing looks again after a millisecond.  One who does
nothing between two items leaves no time to work ahead in: the thread would only take turns with it at the interpreter.
Such a caller makes its items itself, while the thread rests, unless they may not come: it could not leave.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")

_PAUSE_S = 0.001

_SOON_S = 1e-4
"""Seconds after which a caller is back so soon that it has done nothing meanwhile: less than a thread takes to wake."""

_ENDING_S = 2.0
"""Seconds that a thread may take to end.  One that waits for a connection is left to itself."""


class GivenUp(Exception):
    """The wait has ended without what it was for."""


class Ahead(Generic[Item]):
    """The items of an iterator, of which a thread has up to `most` ready.

    What the iterator raises, its end too, is raised in its turn.  The thread ends with `close`, or with this object.
    gives_up: asked again and again while an item is waited for; once it is true, GivenUp is raised.
    is_quick: whether the iterator never waits for long, so that the caller may make items itself.
    """

    def __init__(
        self,
        items: Iterator[Item],
        most: int,
        gives_up: Callable[[], bool] = lambda: False,
        is_quick: bool = False,
    ) -> None:
        self._shelf, self._gives_up = _Shelf(items, most, is_quick), gives_up
        self._thread = threading.Thread(target=self._shelf.fill, name="data", daemon=True)
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
    """Batches that are ready.  The thread knows this alone, so that it holds nothing of what would end it.

    The iterator is the thread's, and the caller's while the thread rests, which the caller alone ends.
    """

    def __init__(self, source: Iterator[Item], most: int, is_quick: bool) -> None:
        self._source, self._most, self._items = source, most, deque[Item]()
        self._is_quick = is_quick
        self._error: BaseException | None = None
        self._is_closed = self._rests = self._is_pressed = False
        self._taken_at = -math.inf
        self._room = threading.Event()

    def fill(self) -> None:
        try:
            for item in self._source:
                self._items.append(item)
                if self._is_pressed or len(self._items) >= self._most:
                    self._rest()
                if self._is_closed:
                    return
            self._error = StopIteration()
        except BaseException as error:
            self._error = error

    def _rest(self) -> None:
        self._room.clear()
        self._rests = True
        if not self._is_closed:
            self._room.wait()

    def take(self, gives_up: Callable[[], bool]) -> Item:
        is_soon = self._is_quick and time.perf_counter() - self._taken_at < _SOON_S
        self._is_pressed &= is_soon
        item = self._await(is_soon, gives_up)
        self._taken_at = time.perf_counter()
        return item

    def _await(self, is_soon: bool, gives_up: Callable[[], bool]) -> Item:
        while True:
            error = self._error  # looked at first: what is there was put there before it
            if self._items:
                break
            if error is not None:
                raise error
            self._is_pressed |= is_soon
            if self._rests and self._is_pressed:
                return self._make()
            self._wake()
            if gives_up():
                raise GivenUp
            time.sleep(_PAUSE_S)
        item = self._items.popleft()
        if len(self._items) <= self._most // 2 and not self._is_pressed:
            self._wake()
        return item

    def _make(self) -> Item:
        try:
            return next(self._source)
        except BaseException as error:
            self._error = error
            raise

    def _wake(self) -> None:
        if self._rests:
            self._rests = False
            self._room.set()

    def close(self) -> None:
        self._is_closed = True
        self._room.set()
