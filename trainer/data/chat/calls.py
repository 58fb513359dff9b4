"""Converts the arguments of calls to the form that a chat template takes, and checks that a template omits nothing.

OpenAI's format has the arguments of a call as text, which is JSON; other formats have an object.  A template usually
takes one of the two: if it writes text with `tojson`, the text is quoted and escaped, and if it joins text, an object
is an error or is written as Python prints it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from trainer.data.chat.formats import REASONING_KEYS, BadChat, Conversation, Message
from trainer.data.chat.template import ChatTemplate

ArgumentsForm: TypeAlias = Literal["objects", "text", "either"]
"""The form in which a chat template takes the arguments of calls; `either` if it writes the same for both."""


_PROBE = {"qzkey": "qzvalue"}
"""Arguments that are unlikely to be part of a template or a message."""


def find_arguments_form(template: ChatTemplate, chat: Conversation) -> ArgumentsForm:
    """Return the form in which a template takes the arguments of calls, by rendering the first calls in both.

    Raises BadChat if it writes the arguments in neither form, or not at all.
    """
    first = next(number for number, message in enumerate(chat.messages) if message.get("tool_calls"))
    from_object, error = _render_calls(template, chat, first, _PROBE)
    from_text, _ = _render_calls(template, chat, first, json.dumps(_PROBE))
    if not from_object and not from_text and error is not None:  # it does not depend on the arguments
        raise error
    words = [*_PROBE, *_PROBE.values()]
    takes_objects = all(word in from_object for word in words) and str(_PROBE) not in from_object  # as Python prints it
    takes_text = json.dumps(_PROBE) in from_text  # otherwise it is missing, or quoted and escaped
    if takes_objects and from_object == from_text:
        return "either"
    if takes_objects or takes_text:
        return "objects" if takes_objects else "text"
    rule = f"messages[{first}].tool_calls: the chat template does not write the arguments of calls"
    raise BadChat(rule, "data.chat_template", fix="give a .jinja file that writes them")


def _render_calls(
    template: ChatTemplate, chat: Conversation, number: int, arguments: object
) -> tuple[str, BadChat | None]:
    """Return the text up to a message with calls, with these arguments in each, or why it cannot be rendered."""
    message = chat.messages[number]
    calls = [_with_arguments(call, arguments) for call in message["tool_calls"]]
    try:
        messages = [*chat.messages[:number], {**message, "tool_calls": calls}]
        return template.render(messages, chat.tools).text, None
    except BadChat as error:
        return "", error


def convert_arguments(messages: Sequence[Message], form: ArgumentsForm) -> list[Message]:
    """Return messages with the arguments of all calls in a form; no arguments become an empty object.

    Text must be JSON, as `Format` checks.
    """
    converted = []
    for message in messages:
        if calls := message.get("tool_calls"):
            new_calls = []
            for call in calls:
                arguments = call.get("function", call).get("arguments") or {}
                if isinstance(arguments, str) and (form == "objects" or not arguments.strip()):
                    arguments = json.loads(arguments) if arguments.strip() else {}
                if not isinstance(arguments, str) and form == "text":
                    arguments = json.dumps(arguments, ensure_ascii=False)
                new_calls.append(_with_arguments(call, arguments))
            message = {**message, "tool_calls": new_calls}
        converted.append(message)
    return converted


def _with_arguments(call: Mapping[str, Any], arguments: Any) -> dict[str, Any]:
    if "function" not in call:
        return {**call, "arguments": arguments}
    return {**call, "function": {**call["function"], "arguments": arguments}}


# ---------------------------------------------------------------------------------------------------------------
# What a rendering lacks


def find_missing_part(message: Message, text: str) -> str:
    """Return which part of the assistant's message is not in its rendering `text`, such as `content`, or ""."""
    if not _is_written(message.get("content") or "", text):
        return "content"
    reasoning_key = next((key for key in REASONING_KEYS if message.get(key)), None)
    if reasoning_key is not None and not _is_written(message[reasoning_key], text):
        return reasoning_key
    calls = message.get("tool_calls", ())
    names = [call.get("function", call)["name"] for call in calls]
    for number, call in enumerate(calls):
        if text.count(names[number]) < names.count(names[number]):
            return f"tool_calls[{number}]"
        arguments = call.get("function", call).get("arguments") or {}
        if isinstance(arguments, str) and arguments not in text:
            arguments = json.loads(arguments)
        for leaf in _leaves(arguments) if isinstance(arguments, Mapping) else ():
            if not _is_written(leaf, text):
                return f"tool_calls[{number}]"
    return ""


def marked(message: Message) -> tuple[Message, dict[str, str]]:
    """Return a message in which each part is a text that occurs nowhere else, and the text of each part.

    Whether a template writes these texts shows which parts it writes, which the message's own texts may hide: the
    city in a call may also be in the text beside it.
    """
    texts: dict[str, str] = {}

    def mark(part: str) -> str:
        texts[part] = f"qz{len(texts)}part"
        return texts[part]

    replaced = dict(message)
    if message.get("content"):
        replaced["content"] = mark("content")
    reasoning_keys = [key for key in REASONING_KEYS if message.get(key)]
    if reasoning_keys:
        replaced |= dict.fromkeys(reasoning_keys, mark(reasoning_keys[0]))
    calls = []
    for number, call in enumerate(message.get("tool_calls", ())):
        function, name = call.get("function", call), mark(f"tool_calls[{number}]")
        renamed = {**call, **({"id": str(call["id"]).replace(function["name"], name)} if "id" in call else {})}
        calls.append(renamed | ({"function": {**function, "name": name}} if "function" in call else {"name": name}))
    if calls:
        replaced["tool_calls"] = calls
    return replaced, texts


def marked_tools(tools: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[str]]:
    """Return tools whose names occur nowhere else, and the names; see `marked`."""
    names = [f"qz{number}tool" for number in range(len(tools))]
    return [
        {**tool, "function": {**tool["function"], "name": name}}
        if isinstance(tool.get("function"), Mapping)
        else {**tool, "name": name}
        for tool, name in zip(tools, names, strict=True)
    ], names


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the keys and the values other than objects and lists of a JSON value."""
    if isinstance(value, Mapping):
        yield from value
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _is_written(value: Any, text: str) -> bool:
    """Return whether a value is in a text: as it is, as JSON, as in Python, or line by line with other indentation."""
    if not isinstance(value, str):
        return json.dumps(value, default=str) in text or str(value) in text  # parquet also has dates
    stripped = value.strip()
    if stripped in text or any(json.dumps(stripped, ensure_ascii=ascii)[1:-1] in text for ascii in (False, True)):
        return True
    return all(line.strip() in text for line in value.splitlines()) or repr(stripped)[1:-1] in text


def omission_error(number: int, part: str) -> BadChat:
    """Return the error for a message of which the chat template leaves out a part; see `find_missing_part`."""
    rule = f"messages[{number}].{part}: the chat template omits it, in whole or in part"
    return BadChat(rule, "data.chat_template", fix="give a .jinja file that includes it, or remove it from the records")
