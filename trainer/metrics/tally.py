"""Tally: fields of a user's own for the next line, summed over its steps and over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TypeAlias

import torch

from trainer.data.transfer import HostScalars, stack_scalars
from trainer.distributed.world import World
from trainer.errors import UserError

Amount: TypeAlias = float | torch.Tensor
"""A number, or a tensor of one element on any device."""

Fields: TypeAlias = dict[str, float | Callable[[], float | None]]
"""Fields of a record, some of which are known once they are read."""

_NUM_SUMS = 3


class Tally:
    """Sums of named amounts, kept on the device until a line is due.

    Ranks need not know the same names: what one of them brings for the first time is told to the others when the next
    line is due, so that steps and lines for which nothing is logged send no message.
    """

    def __init__(self, world: World, taken: Collection[str]) -> None:
        """`taken`: fields that the record has anyway, whose names none of these may have."""
        self._world, self._taken = world, taken
        self._names: list[str] = []  # known to all ranks, in the same order
        self._sums: dict[str, list[Amount]] = {}

    def add(self, name: str, value: Amount, over: Amount | None) -> None:
        """Add to the sum of `name`, and if it is a mean to what that is divided by.  Waits for no device.

        Raises UserError for a name that a field of the record has.
        """
        if name in self._taken:
            raise UserError(f"log: {name!r} is a field that every record of this kind has; choose another name")
        sums = self._sums.setdefault(name, [0.0] * _NUM_SUMS)
        for number, amount in enumerate((value, 0.0 if over is None else over, float(over is not None))):
            sums[number] = sums[number] + (amount.detach().double() if isinstance(amount, torch.Tensor) else amount)

    def clear(self) -> None:
        """Forget what has been added since the last line."""
        self._sums = {}

    def news(self) -> list[bool]:
        """Return what ranks tell each other before `take`: whether this one has a name that others may not know, and
        for each that all know whether it has added to it.
        """
        return [not self._sums.keys() <= set(self._names), *(name in self._sums for name in self._names)]

    def take(self, news: Sequence[float]) -> Fields:
        """Return the fields over all ranks, and begin anew.  A mean over nothing is None.

        Reading a field waits for the device; this does not.  `news`, the same on all ranks: 0 where no rank said yes.
        Collective: one all-gather if a rank has a name that is new, and one all-reduce on the device if there is any.
        """
        added = {name for name, is_added in zip(self._names, news[1:], strict=True) if is_added}
        if news[0]:
            found = dict.fromkeys(name for names in self._world.gather(list(self._sums)) for name in names)
            self._names += [name for name in found if name not in self._names]
            added = set(found)
        names = [name for name in self._names if name in added]
        own = [amount for name in names for amount in self._sums.get(name, [0.0] * _NUM_SUMS)]
        self._sums = {}
        if not names:
            return {}
        sums = HostScalars(*self._world.sum_on_device(stack_scalars(own, self._world.device)).unbind())
        return {name: partial(_field, sums, number) for number, name in enumerate(names)}


def _field(sums: HostScalars, number: int) -> float | None:
    value, over, num_means = sums.read()[_NUM_SUMS * number : _NUM_SUMS * (number + 1)]
    return value if not num_means else value / over if over else None
