"""Finds the token with which each turn of the assistant ends, so that the model learns to stop there.

Most templates end every turn with a special token, and some write more after it, such as the header of another turn.
With others, the model's turn ends where the next message begins, and inference stops at the token with which it does.
Which it is, depends on the template and on whether the turn has calls.  It is found out by rendering short
conversations.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property

from trainer.data.chat.calls import find_missing_part, omission_error
from trainer.data.chat.formats import BadChat, Conversation, Message
from trainer.data.chat.template import ChatTemplate
from trainer.data.chat.tokenizer import ChatTokenizer


class TurnEnds:
    """The tokens that end the assistant's turns with a chat template.

    prepare: returns a conversation as the template takes it.  Raises BadChat.
    """

    def __init__(
        self, tokenizer: ChatTokenizer, template: ChatTemplate, prepare: Callable[[Conversation], Conversation]
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._prepare = prepare
        self._end_of_document = tokenizer.token_text(tokenizer.plain.end_id) if tokenizer.added_tokens else ""

    @property
    def stop_tokens(self) -> Mapping[str, int]:
        """The tokens at which generation stops: the text and the id of each.

        These are the end-of-document token, and for each kind of turn the added token with which the template ends it,
        or else the one with which the next message begins.
        """
        return self._tokens_and_tails[0]

    @cached_property
    def closing_text(self) -> str:
        """The text with which the template ends turns if the tokenizer has no added tokens, as `bytes`; or "".

        Generation does not stop there.
        """
        if self._tokenizer.added_tokens:
            return ""
        for alternatives in _probe_conversations():
            with suppress(BadChat):
                chat = alternatives[0]
                text = self._template.render(chat.messages, chat.tools).text.rstrip()
                return text.rpartition(str(chat.messages[-1]["content"]))[2]
        return ""

    @cached_property
    def _tokens_and_tails(self) -> tuple[dict[str, int], dict[bool, str]]:
        """Return `stop_tokens`, and what follows a turn without and with calls if the template does not end it."""
        tails: dict[bool, str] = {}
        tokens = {self._end_of_document: self._tokenizer.plain.end_id} if self._end_of_document else {}
        for alternatives in _probe_conversations():
            for chat in alternatives:
                with suppress(BadChat):  # a template may reject system messages, tools, or more than one call
                    token, tail = self._find_end_token(chat)
                    if token:
                        tokens[token] = self._tokenizer.added_tokens[token]
                        tails.setdefault("tool_calls" in chat.messages[-1], tail)
                    break
        return tokens, tails

    def _find_end_token(self, chat: Conversation) -> tuple[str, str]:
        """Return the added token that ends the last message, or else the one that begins the message after it, or "".

        A token that is written twice in the message, such as the end of a call, does not end it.  Also returns the text
        between the message and the end of the next one's first token, or "" if the message itself has an end.

        Raises BadChat if the template rejects the conversation, or omits a part of the last message.
        """
        chat = self._prepare(chat)
        text = self._template.render(chat.messages, chat.tools).text.rstrip()
        prompt = self._template.render(chat.messages[:-1], chat.tools, add_generation_prompt=True).text
        written = text[common_length(prompt, text) :]
        if part := find_missing_part(chat.messages[-1], written):
            raise omission_error(len(chat.messages) - 1, part)
        if self._end_of_document and self._end_of_document in written:
            return self._end_of_document, ""
        added_tokens = self._tokenizer.longest_added_tokens
        token = next((token for token in added_tokens if written.endswith(token)), "")
        if token and written.count(token) == 1:
            return token, ""
        for follower in _followers(chat.messages[-1]):
            with suppress(BadChat):
                longer = self._template.render([*chat.messages, follower], chat.tools).text
                tail = longer[len(text) :] if longer.startswith(text) else ""
                token = next((token for token in added_tokens if tail.lstrip().startswith(token)), "")
                return token, tail[: tail.find(token) + len(token)]
        return "", ""

    @cached_property
    def _ends(self) -> tuple[str, ...]:
        return tuple(filter(None, [*self.stop_tokens, self.closing_text]))

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        tokens = sorted(self.stop_tokens, key=len, reverse=True)
        return re.compile(r"\s*(?:" + "|".join(map(re.escape, tokens)) + ")" if tokens else "(?!)")

    def find(self, text: str, start: int, end: int) -> int | None:
        """Return where the stop token of a turn, written in text[start:end], ends; None if it has none.

        It is the first end-of-document token in the turn, or else the token at the turn's end, or the one that follows.
        """
        end_of_document = -1
        if self._end_of_document and self._end_of_document not in self._tokenizer.accepted:  # not in a message, then
            end_of_document = text.find(self._end_of_document, start, end)
        if end_of_document >= 0:
            return end_of_document + len(self._end_of_document)
        if text.endswith(self._ends, 0, end):
            return end
        match = self._pattern.match(text, end)
        return match.end() if match else None

    def complete(self, chat: Conversation, text: str) -> str:
        """Return the text of a conversation with the stop token of its last turn, if the template writes it later.

        Raises BadChat if the last message is the assistant's, and has no stop token.
        """
        last = len(chat.messages) - 1
        is_target = chat.messages[last]["role"] == "assistant" and chat.messages[last].get("weight", 1) != 0
        stripped = text.rstrip()
        if not is_target or self.find(text, len(stripped), len(stripped)) is not None:
            return text
        prompt = self._template.render(chat.messages[:last], chat.tools, add_generation_prompt=True).text
        if self.find(text, common_length(prompt, text), len(stripped)) is not None:
            return text
        tail = self._tokens_and_tails[1].get("tool_calls" in chat.messages[last])
        if not tail:
            raise without_end_error(last, text)
        return stripped + tail


def common_length(first: str, second: str) -> int:
    """Return the length of the longest common prefix of two texts."""
    if second.startswith(first):  # usually; the loop below is slow
        return len(first)
    pairs = enumerate(zip(first, second, strict=False))
    return next((number for number, (a, b) in pairs if a != b), min(len(first), len(second)))


def without_end_error(turn: int, text: str) -> BadChat:
    """Return the error for a turn, at the end of `text`, that does not end with a stop token."""
    rule = (
        f"messages[{turn}]: the chat template does not end this turn with a token at which generation stops, but with "
        f"{text.rstrip()[-20:]!r}, so the model cannot learn to stop"
    )
    return BadChat(rule, "data.chat_template", fix="end it with a token, such as {{ eos_token }}")


def _probe_conversations() -> Iterator[Sequence[Conversation]]:
    """Yield short conversations that end with each kind of turn: text, calls, and both.

    Each kind comes with alternatives, of which the first that the template accepts counts: two calls are better than
    one, because they tell the end of a call from the end of the turn.
    """
    system, user = {"role": "system", "content": "Hi"}, {"role": "user", "content": "Hi"}
    names = ("first_name", "other_name")
    functions = [{"name": name, "arguments": {"first_key": "first value"}} for name in names]
    calls = [
        {"id": f"call0000{number}", "type": "function", "function": function}
        for number, function in enumerate(functions)
    ]
    parameters = {"type": "object", "properties": {"first_key": {"type": "string", "description": "Hi"}}}
    tools = [
        {"type": "function", "function": {"name": name, "description": "Hi", "parameters": parameters}}
        for name in names
    ]
    for context in ([user], [system, user]):
        answers = [{"role": "assistant", "content": "Hello", **more} for more in ({}, {"reasoning_content": "Hmm"})]
        for answer_tools in ((), tools):
            yield [Conversation([*context, answer], answer_tools) for answer in answers]
        for content in ("", "Hello"):
            turns = [{"role": "assistant", "content": content, "tool_calls": calls[:count]} for count in (2, 1)]
            yield [Conversation([*context, turn], turn_tools) for turn_tools in (tools, ()) for turn in turns]


def _followers(message: Message) -> list[Message]:
    """Return messages that may follow a message of the assistant, the likeliest first."""
    user = {"role": "user", "content": "Hi"}
    if "tool_calls" not in message:
        return [user]
    call = message["tool_calls"][0]
    return [{"role": "tool", "name": call["function"]["name"], "tool_call_id": call["id"], "content": "Hi"}, user]
