"""Accumulates user-logged fields, summed over the steps of a log line and over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TypeAlias

import torch

from trainer.data.transfer import HostScalars, stack_scalars
from trainer.distributed.world import World
from trainer.errors import UserError

Amount: TypeAlias = float | torch.Tensor
"""A number, or a one-element tensor on any device."""

Fields: TypeAlias = dict[str, float | Callable[[], float | None]]
"""Fields of a record, some of which are computed when first read."""

_NUM_SUMS = 3


class LoggedSums:
    """Sums of named amounts, kept on the device until a line is due.

    Ranks need not log the same names: names that are new on any rank are exchanged when the next line is due.  Steps
    never communicate, and lines without logged fields need no extra collective.
    """

    def __init__(self, world: World, taken: Collection[str]) -> None:
        """`taken`: names of the standard fields of the record, which logged fields must not use."""
        self._world, self._taken = world, taken
        self._names: list[str] = []  # known to all ranks, in the same order
        self._sums: dict[str, list[Amount]] = {}

    def add(self, name: str, value: Amount, over: Amount | None) -> None:
        """Add `value` to the sum of `name` and, if the field is a mean, `over` to its divisor.  No host sync.

        Raises UserError if `name` is a standard field of the record.
        """
        if name in self._taken:
            raise UserError(f"log: {name!r} is a field that every record of this kind has; choose another name")
        sums = self._sums.setdefault(name, [0.0] * _NUM_SUMS)
        for number, amount in enumerate((value, 0.0 if over is None else over, float(over is not None))):
            sums[number] = sums[number] + (amount.detach().double() if isinstance(amount, torch.Tensor) else amount)

    def clear(self) -> None:
        """Discard everything added since the last line."""
        self._sums = {}

    def news(self) -> list[bool]:
        """Return the flags to reduce over all ranks before calling `take`.

        The first flag is True if this rank has a name that other ranks may not know.  The others say, for each name
        known to all ranks, whether this rank has added to it.
        """
        return [not self._sums.keys() <= set(self._names), *(name in self._sums for name in self._names)]

    def take(self, news: Sequence[float]) -> Fields:
        """Return the fields summed over all ranks, and reset the sums.  A mean over nothing is None.

        Reading a field waits for the device; this call does not.  `news` holds the flags of all ranks, reduced by sum
        or max: an entry is 0 if it is False on all ranks.
        Collective: one all-gather if any rank has a new name, and one all-reduce on the device if there are any fields.
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
