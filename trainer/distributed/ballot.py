"""The ballot: one small all-reduce per step in which the ranks tell each other all that they must agree on.

Knows none of the questions: each collaborator asks its own when it is built, in the same order on every rank.
"""

from __future__ import annotations

from collections.abc import Callable

from trainer.distributed.channel import Channel

_AMOUNTS = 2
"""Amounts that fit into every ballot, so that one with fewer may meet one with as many."""


class Question:
    """A yes-or-no question that every rank answers each time a ballot is cast."""

    def __init__(self, vote: Callable[[], bool], num_ranks: int, on_yes: Callable[[], None] | None) -> None:
        self.vote, self._num_ranks, self._on_yes = vote, num_ranks, on_yes
        self._num_yes = 0

    @property
    def anyone(self) -> bool:
        """True if at least one rank said yes in the last ballot."""
        return self._num_yes > 0

    @property
    def everyone(self) -> bool:
        """True if every rank said yes in the last ballot."""
        return self._num_yes == self._num_ranks

    def count(self, num_yes: int) -> None:
        """Take the result of a ballot, the same on all ranks."""
        self._num_yes = num_yes
        if num_yes and self._on_yes is not None:
            self._on_yes()


class Ballot:
    """Sums what a step counts over all ranks, and answers every question with the same message."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._questions: list[Question] = []
        self._is_cast = False

    def ask(self, vote: Callable[[], bool], on_yes: Callable[[], None] | None = None) -> Question:
        """Add a question; `vote()` is this rank's answer, `on_yes()` is called wherever a rank said yes.

        All ranks must ask the same questions in the same order.
        """
        question = Question(vote, self._channel.size, on_yes)
        self._questions.append(question)
        return question

    def begin_step(self) -> None:
        """Begin a step, in which one ballot must be cast."""
        self._is_cast = False

    def cast(self, *amounts: float) -> list[float]:
        """Return the sum of each of `amounts` over all ranks; the questions are answered on the way.  One all-reduce.

        All ranks bring as many amounts, or two at most.
        """
        padding = [0.0] * (_AMOUNTS - len(amounts))
        sums = self._channel.sum([*amounts, *padding, *(question.vote() for question in self._questions)])
        self._is_cast = True
        for question, num_yes in zip(self._questions, sums[len(amounts) + len(padding) :], strict=True):
            question.count(int(num_yes))
        return sums[: len(amounts)]

    def ensure_cast(self) -> None:
        """Cast a ballot unless the step has: a train_step of your own need not know of it.  At most one all-reduce."""
        if not self._is_cast:
            self.cast()
