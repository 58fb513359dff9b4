"""Data types for conversations, independent of the file format that they were read from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

ROLES = ("system", "developer", "user", "assistant", "tool")

Message: TypeAlias = "Mapping[str, Any]"
"""`role` (one of ROLES), `content` (text), and further keys such as tool_calls or reasoning_content, read only by the
chat template."""


class BadChat(Exception):
    """A conversation cannot be trained on; the message says why.

    key: the setting to change, or empty if the file has to be corrected.  legal, fix: see `setting_error`.
    """

    def __init__(self, text: str, key: str = "", legal: object = None, fix: str = "") -> None:
        super().__init__(text)
        self.key, self.legal, self.fix = key, legal, fix


@dataclass(frozen=True)
class Conversation:
    """Messages in order, and the tools that the assistant may call.

    first: index of the first message that may be trained on.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    first: int = 0

    @property
    def assistant_turns(self) -> list[int]:
        """Indices of the assistant messages that may be trained on, without those of weight 0."""
        return [
            number
            for number, message in enumerate(self.messages)
            if number >= self.first and message["role"] == "assistant" and message.get("weight", 1) != 0
        ]

    @property
    def excluded(self) -> list[int]:
        """Indices of the messages of weight 0, whatever their role."""
        return [number for number, message in enumerate(self.messages) if message.get("weight", 1) == 0]


@dataclass(frozen=True)
class Completion:
    """A plain-text prompt and its completion, used without a chat template."""

    prompt: str
    completion: str


Sample: TypeAlias = "Conversation | Completion"


@dataclass(frozen=True)
class Pair:
    """A preference pair: two answers to the same prompt."""

    chosen: Sample
    rejected: Sample


def kind_of(value: Any) -> str:
    """Return the JSON name of a value's type, for error messages."""
    kinds = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return "null" if value is None else kinds.get(type(value), type(value).__name__)
