"""One small CPU all-reduce per step that carries everything the ranks must agree on.

Each component registers its own votes when it is created, in the same order on every rank.
"""

from __future__ import annotations

from collections.abc import Callable

from trainer.distributed.channel import Channel

_AMOUNTS = 2
"""Values reserved in every message, so that a rank that passes fewer still sends a message of the same length."""


class Question:
    """A yes-or-no question that every rank answers in each all-reduce."""

    def __init__(self, vote: Callable[[], bool], num_ranks: int, on_yes: Callable[[], None] | None) -> None:
        self.vote, self._num_ranks, self._on_yes = vote, num_ranks, on_yes
        self._num_yes = 0

    @property
    def anyone(self) -> bool:
        """True if at least one rank answered yes in the last all-reduce."""
        return self._num_yes > 0

    @property
    def everyone(self) -> bool:
        """True if every rank answered yes in the last all-reduce."""
        return self._num_yes == self._num_ranks

    def count(self, num_yes: int) -> None:
        """Record the result of an all-reduce, which is the same on all ranks."""
        self._num_yes = num_yes
        if num_yes and self._on_yes is not None:
            self._on_yes()


class Ballot:
    """Sums a step's values over all ranks, and collects every vote in the same all-reduce."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._questions: list[Question] = []
        self._is_cast = False

    def ask(self, vote: Callable[[], bool], on_yes: Callable[[], None] | None = None) -> Question:
        """Register a vote.  `vote()` is this rank's answer; `on_yes()` is called on every rank if any rank says yes.

        All ranks must register the same votes in the same order.
        """
        question = Question(vote, self._channel.size, on_yes)
        self._questions.append(question)
        return question

    def begin_step(self) -> None:
        """Begin a step, which must do one all-reduce."""
        self._is_cast = False

    def cast(self, *amounts: float) -> list[float]:
        """Return the sum of each of `amounts` over all ranks, and update every vote.  One all-reduce.

        All ranks must pass the same number of amounts, unless each passes at most two.
        """
        padding = [0.0] * (_AMOUNTS - len(amounts))
        sums = self._channel.sum([*amounts, *padding, *(question.vote() for question in self._questions)])
        self._is_cast = True
        for question, num_yes in zip(self._questions, sums[len(amounts) + len(padding) :], strict=True):
            question.count(int(num_yes))
        return sums[: len(amounts)]

    def ensure_cast(self) -> None:
        """Do the all-reduce unless the step has done it, as a custom train_step may not.  At most one all-reduce."""
        if not self._is_cast:
            self.cast()
