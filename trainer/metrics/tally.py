"""Tally: fields of a user's own for the next line, summed over its steps and over all ranks."""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeAlias

import torch

from trainer.data.transfer import Numbers
from trainer.distributed.channel import Channel
from trainer.errors import UserError

Amount: TypeAlias = float | torch.Tensor
"""A number, or a tensor of one element on any device."""

_NUM_SUMS = 4


class Tally:
    """Sums of named amounts, kept on the device until a line is due.

    Ranks need not know the same names: what one of them brings for the first time is told to the others when the next
    line is due, so that steps and lines for which nothing is logged send no message.
    """

    def __init__(self, channel: Channel, taken: Collection[str]) -> None:
        """`taken`: fields that the record has anyway, whose names none of these may have."""
        self._channel, self._taken = channel, taken
        self._names: list[str] = []  # known to all ranks, in the same order
        self._sums: dict[str, list[Amount]] = {}

    def add(self, name: str, value: Amount, over: Amount | None) -> None:
        """Add to the sum of `name`, and if it is a mean to what that is divided by.  Waits for no device.

        Raises UserError for a name that a field of the record has.
        """
        if name in self._taken:
            raise UserError(f"log: {name!r} is a field that every record of this kind has; choose another name")
        sums = self._sums.setdefault(name, [0.0] * _NUM_SUMS)
        for number, amount in enumerate((value, 0.0 if over is None else over, 1.0, float(over is not None))):
            sums[number] = sums[number] + (amount.detach().double() if isinstance(amount, torch.Tensor) else amount)

    def clear(self) -> None:
        """Forget what has been added since the last line."""
        self._sums = {}

    @property
    def has_news(self) -> bool:
        """True if this rank has a name that the others may not know."""
        return not self._sums.keys() <= set(self._names)

    def take(self, has_news: bool) -> dict[str, float | None]:
        """Return the fields over all ranks, and begin anew.  A mean over nothing is None.

        `has_news`, the same on all ranks: whether any of them has.  Collective: one all-gather if so, and one
        all-reduce if there has ever been a name.
        """
        if has_news:
            of_ranks = self._channel.gather(list(self._sums))
            found = dict.fromkeys(name for names in of_ranks for name in names)
            self._names += [name for name in found if name not in self._names]
        if not self._names:
            return {}
        own = [amount for name in self._names for amount in self._sums.get(name, [0.0] * _NUM_SUMS)]
        self._sums = {}
        of_all = self._channel.sum(Numbers(*own).read())
        fields: dict[str, float | None] = {}
        for number, name in enumerate(self._names):
            value, over, num_calls, num_means = of_all[_NUM_SUMS * number : _NUM_SUMS * (number + 1)]
            if num_calls:
                fields[name] = value if not num_means else value / over if over else None
        return fields
