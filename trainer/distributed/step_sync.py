"""One small CPU all-reduce per step that carries everything the ranks must agree on.

Each component registers its own votes when it is created, in the same order on every rank.
"""

from __future__ import annotations

from collections.abc import Callable

from trainer.distributed.channel import Channel

_NUM_RESERVED = 2
"""Values reserved in every message, so that a rank that passes fewer still sends a message of the same length."""


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
    """Sums a step's values over all ranks, and collects every vote in the same all-reduce."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._votes: list[Vote] = []
        self._is_reduced = False

    def register(self, answer: Callable[[], bool], on_yes: Callable[[], None] | None = None) -> Vote:
        """Register a vote.  `answer()` is this rank's answer; `on_yes()` is called on every rank if any rank says yes.

        All ranks must register the same votes in the same order.
        """
        registered = Vote(answer, self._channel.size, on_yes)
        self._votes.append(registered)
        return registered

    def begin_step(self) -> None:
        """Begin a step, which must do one all-reduce."""
        self._is_reduced = False

    def all_reduce(self, *amounts: float) -> list[float]:
        """Return the sum of each of `amounts` over all ranks, and update every vote.  One all-reduce.

        All ranks must pass the same number of amounts, unless each passes at most two.
        """
        padding = [0.0] * (_NUM_RESERVED - len(amounts))
        sums = self._channel.sum([*amounts, *padding, *(vote.answer() for vote in self._votes)])
        self._is_reduced = True
        for vote, num_yes in zip(self._votes, sums[len(amounts) + len(padding) :], strict=True):
            vote.record(int(num_yes))
        return sums[: len(amounts)]

    def ensure_all_reduced(self) -> None:
        """Do the all-reduce unless the step has done it, as a custom train_step may not.  At most one all-reduce."""
        if not self._is_reduced:
            self.all_reduce()
