"""Conversations as the rest of this folder knows them, whatever file they came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

ROLES = ("system", "developer", "user", "assistant", "tool")

Message: TypeAlias = "Mapping[str, Any]"
"""`role`, one of ROLES, and `content`, text; whatever else it holds (tool_calls, reasoning_content) is the template's
to read."""


class BadChat(Exception):
    """A conversation that cannot be trained on: says what in it is wrong.

    key: the setting that would have to change where it is not the file.
    """

    def __init__(self, text: str, key: str = "", legal: object = None, fix: str = "") -> None:
        super().__init__(text)
        self.key, self.legal, self.fix = key, legal, fix


@dataclass(frozen=True)
class Conversation:
    """Messages in turn, and the tools that the assistant may call.  Of those before `first` none is trained on."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    first: int = 0

    @property
    def assistant_turns(self) -> list[int]:
        """The numbers of the assistant's messages that may be trained on: not those of weight 0."""
        return [
            number
            for number, message in enumerate(self.messages)
            if number >= self.first and message["role"] == "assistant" and message.get("weight", 1) != 0
        ]

    @property
    def excluded(self) -> list[int]:
        """The numbers of the messages of weight 0, of any role."""
        return [number for number, message in enumerate(self.messages) if message.get("weight", 1) == 0]


@dataclass(frozen=True)
class Completion:
    """A text and what follows it; no chat template has a part in it."""

    prompt: str
    completion: str


Sample: TypeAlias = "Conversation | Completion"


@dataclass(frozen=True)
class Pair:
    """Two answers to the same, of which the first is preferred."""

    chosen: Sample
    rejected: Sample


def kind_of(value: Any) -> str:
    """Return what JSON calls a value, for a message."""
    kinds = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return "null" if value is None else kinds.get(type(value), type(value).__name__)
