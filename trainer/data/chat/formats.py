"""Reads the records of chat files, and turns them into conversations, completions and pairs.

The formats are messages, ShareGPT, Alpaca, prompt-completion and preference pairs, plus plain text if records have
labels.  If a value in a record is invalid, the error gives its path, such as `messages[2].role`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from trainer.data.records import (
    RECORD_KINDS,
    BadRecord,
    FilePart,
    InputFile,
    UnreadableFile,
    find_files,
    read_records,
)
from trainer.errors import nearest, setting_error
from trainer.hub import is_hub_data

ROLES = ("system", "developer", "user", "assistant", "tool")

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message that may hold its reasoning; templates usually read one of the first two."""

FLAGS = ("weight", "loss", "train", "trainable", "loss_mask")
"""The keys of a message that say whether its tokens may be targets: 0 or false excludes them.  They mean the same."""

Message: TypeAlias = "Mapping[str, Any]"
"""A message: `role` (one of ROLES), `content` (text), and optional keys for the chat template, such as `tool_calls` or
`reasoning_content`.  Whichever of FLAGS the file has, it is called `weight` here; a `weight` of 0 excludes the message
from the loss, unless `data.train_on=end`."""


class BadChat(Exception):
    """Raised for a record or conversation that cannot be used; the error message says why.

    key: the setting to change, or "" if the file must be corrected.
    proposal, fix: as in `setting_error`.
    """

    def __init__(self, text: str, key: str = "", proposal: object = None, fix: str = "") -> None:
        super().__init__(text)
        self.key = key
        self.proposal = proposal
        self.fix = fix


@dataclass(frozen=True)
class Conversation:
    """Messages in order, and the tools that the assistant may call.

    first_trainable: assistant turns before this index in `messages` contain no targets; ignored if `data.train_on`
        is `all` or `end`.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    first_trainable: int = 0


@dataclass(frozen=True)
class Completion:
    """A prompt and its completion as plain text, without a chat template."""

    prompt: str
    completion: str


Sample: TypeAlias = "Conversation | Completion"


@dataclass(frozen=True)
class Pair:
    """A preference pair: two responses to the same prompt."""

    chosen: Sample
    rejected: Sample


Notice: TypeAlias = tuple[
    Literal[
        "spelled out",
        "read as text",
        "unread key",
        "converted arguments",
        "untagged turn",
        "flag without effect",
        "flag of a record",
        "nulls",
    ],
    str,
]
"""What the user should know about a record, and a detail:

- spelled out: a message spells out a special token, the detail, that the template writes too.
- read as text: a message spells out another special token, the detail.
- unread key: a message has a key, the detail, that the template does not read.
- converted arguments: the arguments of calls were converted to the form that the template takes, the detail.
- untagged turn: a turn of the assistant is not in the tag that marks targets, the detail, and has none.
- flag without effect: a message of a role, the detail, is marked as a target, but `data.train_on` excludes it.
- flag of a record: the record has a flag, the detail, but only flags of messages are read.
- nulls: nulls in calls or tools, the detail, were left out.
"""


def json_type(value: Any) -> str:
    """Return the JSON type of a value in words, for error messages."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


# ---------------------------------------------------------------------------------------------------------------
# Files to records


def find_chat_files(value: str, key: str) -> list[InputFile]:
    """Return the files that `value` names: a path, folder or glob, or data on the Hugging Face Hub, which it fetches.

    Raises UserError that names the setting `key` if there are none.
    """
    if not is_hub_data(value):
        return find_files([value], key, RECORD_KINDS)
    from trainer.data.hub_data import find_data

    hub_data = find_data(value, key)
    hub_data.fetch()
    files = [InputFile.from_path(path, key) for path in hub_data.paths()]
    return [file for file in files if file is not None and file.kind in RECORD_KINDS]


def read_objects(part: FilePart) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield (number, record) for each record of a part of a file; `location_of` says where it is.

    Raises UserError if the file cannot be read, or if a record is not a JSON object.
    """
    file = part.file
    try:
        for number, record in read_records(part):
            if not isinstance(record, dict):
                rule = record.rule if isinstance(record, BadRecord) else f"must be an object, not {json_type(record)}"
                fix = 'write one JSON object per record, such as {"messages": [...]}'
                raise setting_error(file.key, file.path, f"{location_of(part, number)}: {rule}", fix=fix)
            yield number, record
    except UnreadableFile as error:
        raise setting_error(file.key, file.path, str(error), fix=error.fix) from error


def location_of(part: FilePart, number: int) -> str:
    """Return the location of a record for messages, such as `chats.jsonl:17`: its line, row or object, from 1."""
    return f"{Path(part.file.path).name}:{part.record_number(number)}"


# ---------------------------------------------------------------------------------------------------------------
# Records to conversations


COLUMNS: dict[str, tuple[str, ...]] = {
    "messages": ("messages", "tools", "label"),
    "sharegpt": ("conversations", "system", "tools", "label"),
    "alpaca": ("instruction", "input", "output", "system", "history", "label"),
    "prompt_completion": ("prompt", "completion", "tools", "label"),
    "preference": ("prompt", "messages", "conversations", "chosen", "rejected", "tools"),
    "text": ("text", "label"),
}
"""Keys that are read from records of each format; `label` only for objectives that need one."""

_REQUIRED = {
    "preference": {"chosen", "rejected"},
    "messages": {"messages"},
    "sharegpt": {"conversations"},
    "prompt_completion": {"prompt", "completion"},
    "alpaca": {"instruction", "output"},
    "text": {"text"},
}
"""Required keys of each format.  `data.format=auto` tries the formats in this order, and `text` only with labels."""


def check_columns(columns: Mapping[str, str], format_name: str) -> None:
    """Raise UserError if `data.columns` maps a key that the format does not have.

    format_name: the value of `data.format`; for `auto`, the keys of all formats are allowed.
    """
    known_keys = list(dict.fromkeys(COLUMNS.get(format_name) or [key for keys in COLUMNS.values() for key in keys]))
    for key in columns:
        if key not in known_keys:
            nearest_key = nearest(key, known_keys)
            setting_value = json.dumps(dict(columns))
            rule = f"{key!r} is not a key of data.format={format_name}; its keys are {', '.join(known_keys)}"
            suggestion = json.dumps(
                {str(nearest_key) if name == key else name: value for name, value in columns.items()}
            )
            raise setting_error("data.columns", setting_value, rule, proposal=suggestion if nearest_key else None)


class Format:
    """Reads records of one format.

    columns: maps the format's keys to the file's keys where they differ: {"messages": "dialog"}.
    """

    def __init__(self, name: str, columns: Mapping[str, str] | None = None) -> None:
        self.name, self._columns = name, dict(columns or {})

    @classmethod
    def detect(
        cls,
        record: Mapping[str, Any],
        name: str,
        columns: Mapping[str, str] | None = None,
        has_labels: bool = False,
    ) -> Format:
        """Return the format `name`; for `auto`, the first format whose required keys are all in `record`.

        columns: as for the constructor.
        has_labels: whether records have labels; without them, `auto` does not try `text`.

        Raises BadChat if no format matches.
        """
        columns_in_file = dict(columns or {})
        if name != "auto":
            return cls(name, columns_in_file)
        matching_formats = [
            candidate
            for candidate, required_keys in _REQUIRED.items()
            if (has_labels or candidate != "text")
            and all(columns_in_file.get(key, key) in record for key in required_keys)
        ]
        if not matching_formats:
            formats = [candidate for candidate in _REQUIRED if has_labels or candidate != "text"]
            rule = f"matches none of the formats {', '.join(formats)}; its keys: {', '.join(record) or 'none'}"
            fix = f"map the file's keys to those of a format, for example data.columns={_mapping_for(record)!r}"
            raise BadChat(rule, "data.columns" if columns_in_file else "data.format", fix=fix)
        return cls(matching_formats[0], columns_in_file)

    def read(self, record: Mapping[str, Any]) -> Sample | Pair:
        """Convert a record to a conversation, a completion or a pair.  Raises BadChat."""
        _check_nesting(record)
        values = {key: _without_nulls(record.get(self._columns.get(key, key))) for key in COLUMNS[self.name]}
        missing = sorted(self._columns.get(key, key) for key in _REQUIRED[self.name] if values[key] is None)
        if missing:
            if missing[0] in record:
                raise BadChat(f"{missing[0]!r} is null", fix="remove the record, or set its value")
            rule = f"has no key {missing[0]!r}; its keys: {', '.join(record) or 'none'}"
            other_formats = [name for name, keys in _REQUIRED.items() if name != "text" and keys <= set(record)]
            if other_formats and not self._columns:
                rule += f", which is the format {other_formats[0]}, while the first record has the format {self.name}"
                raise BadChat(
                    rule,
                    fix="convert them, or make each format a source of a mixture: data.path={a: ..., b: ...}",
                )
            fix = f"map the file's keys, for example data.columns={_mapping_for(record)!r}, or set data.format"
            raise BadChat(rule, "data.columns", fix=fix)
        _check_context(record, {self._columns.get(key, key) for key in values}, values)
        match self.name:
            case "messages":
                return Conversation(_messages(values["messages"], "messages"), _tools(values["tools"]))
            case "sharegpt":
                return _read_sharegpt(values)
            case "alpaca":
                return _read_alpaca(values)
            case "prompt_completion":
                tools = _tools(values["tools"])
                return _join_prompt_and_response(values["prompt"], values["completion"], "completion", tools)
            case "text":
                return Completion(_text(values["text"], "text"), "")
            case _:
                return _read_preference(values)

    def notices(self, record: Mapping[str, Any]) -> set[Notice]:
        """Return what the user should know about a record, apart from its conversation."""
        notices: set[Notice] = {
            ("flag of a record", key)
            for key, value in record.items()
            if (key in FLAGS and value is not None) or _looks_like_flag(key, value)
        }
        values = {key: record.get(self._columns.get(key, key)) for key in COLUMNS[self.name]}
        if any(_has_nulls(value, key == "tools") for key, value in values.items()):
            notices.add(("nulls", "calls or tools"))
        return notices

    def label(self, record: Mapping[str, Any]) -> int:
        """Return the record's label, an integer in [0, MAX_LABELS); true is 1, false is 0.  Raises BadChat.

        Labels may also be text, as in CSV, or whole floats, as in a parquet column with missing values.
        """
        key = self._columns.get("label", "label")
        label = record.get(key)
        if self.name == "preference":
            rule = "is a pair of responses, but train.objective needs one response with a label"
            raise BadChat(rule, fix="for pairs use recipe=dpo, ipo, simpo, orpo or reward")
        if label is None:
            rule = f"has no key {key!r}; its keys: {', '.join(record) or 'none'}"
            raise BadChat(
                rule, "data.columns", fix="name the key of the label, for example data.columns={label: class}"
            )
        try:
            number = float({"true": 1, "false": 0}.get(label.lower(), label) if isinstance(label, str) else label)
        except (TypeError, ValueError):
            number = math.nan
        if not (number.is_integer() and 0 <= number < MAX_LABELS):
            rule = f"{key}={label!r:.60}: must be true or false, or a whole number from 0 to {MAX_LABELS - 1}"
            raise BadChat(rule, fix="number the classes from 0 on; a bad response is 0 or false, a good one 1 or true")
        return int(number)


MAX_LABELS = 2**15
"""Exclusive upper bound of labels.  They are stored like token ids: doubled, and in 16 bits if the vocabulary is
small."""


_COMMON_COLUMN_NAMES = {
    "messages": ("dialog", "dialogue", "conversation", "chat", "turns"),
    "prompt": ("question", "query", "instruction", "problem", "input", "context"),
    "completion": ("answer", "response", "output", "solution", "target", "reply"),
}
"""Common alternative names of a format's keys, used to suggest a value for `data.columns`."""


def _mapping_for(record: Mapping[str, Any]) -> str:
    """Return an example value of `data.columns`, with keys of the record if their meaning is clear."""
    suggested = {
        column: next((name for name in names if name in record and column not in record), None)
        for column, names in _COMMON_COLUMN_NAMES.items()
    }
    if suggested["prompt"] and suggested["completion"]:
        return f"{{prompt: {suggested['prompt']}, completion: {suggested['completion']}}}"
    return f"{{messages: {suggested['messages'] or 'dialog'}}}"


def _without_nulls(value: Any) -> Any:
    """Leave out the entries of objects that are null, at any depth.

    Every row of an Arrow table has all keys that any row has, with null for those that it lacks.  So in files written
    from such a table a null means that there is no such entry, and it has this meaning in all files.  A null in text
    that is JSON, such as the arguments of a call, stays.
    """
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _has_nulls(value: Any, in_calls_or_tools: bool) -> bool:
    """Return whether a null entry of an object is left out within calls or tools; elsewhere nulls are usual."""
    if isinstance(value, dict):
        return any(
            (item is None and in_calls_or_tools)
            or _has_nulls(item, in_calls_or_tools or key in ("tool_calls", "tools"))
            for key, item in value.items()
        )
    return isinstance(value, list) and any(_has_nulls(item, in_calls_or_tools) for item in value)


_CONTEXT_KEYS = ("system", "system_prompt", "messages", "conversations", "history", "tools", "functions")
"""Keys of a record that belong to the conversation, whichever its format."""


def _check_context(record: Mapping[str, Any], read_keys: Collection[str], values: Mapping[str, Any]) -> None:
    """Raise BadChat if a key that belongs to the conversation would be ignored, unless its texts are read elsewhere.

    read_keys: the keys of the record that are read.
    values: their values.
    """
    read_texts: list[str] | None = None
    for key in _CONTEXT_KEYS:
        if key in read_keys or not record.get(key):
            continue
        read_texts = read_texts or list(_texts_in(values))
        texts = [text.strip() for text in _texts_in(record[key])]
        if not all(any(text in read_text for read_text in read_texts) for text in texts):
            others = ", ".join(name for name in values if values[name] is not None)
            rule = f"has the key {key!r} next to {others}, where it would be ignored"
            raise BadChat(rule, fix="write it into the messages, or remove it")


def _texts_in(value: Any) -> Iterator[str]:
    """Yield all texts in a JSON value, without keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (Mapping, list)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _texts_in(item)


def _read_sharegpt(values: Mapping[str, Any]) -> Sample:
    turns = _list(values["conversations"], "conversations")
    is_renamed = isinstance(turns[0], Mapping) and "from" in turns[0]
    role_key, content_key = ("from", "value") if is_renamed else ("role", "content")
    messages = _messages(_as_messages(turns, "conversations"), "conversations", role_key, content_key)
    if not values["system"]:
        return Conversation(messages, _tools(values["tools"]))
    system = {"role": "system", "content": _text(values["system"], "system")}
    if messages[0]["role"] == "system":
        if messages[0]["content"] != system["content"]:
            raise BadChat("has a system message, and another one under the key 'system'", fix="keep one of them")
        return Conversation(messages, _tools(values["tools"]))
    return Conversation([system, *messages], _tools(values["tools"]))


def _as_messages(turns: Sequence[Any], location: str) -> list[Any]:
    """Return turns with ShareGPT's keys and names of roles as messages; others as they are."""
    messages = []
    for number, turn in enumerate(turns):
        if isinstance(turn, Mapping) and "from" in turn:
            turn = _from_sharegpt(turn, f"{location}[{number}]")
        elif isinstance(turn, Mapping) and location == "conversations":
            turn = {**turn, "role": _ALIASES.get(str(turn.get("role")), turn.get("role"))}
        messages.append(turn)
    return messages


def _from_sharegpt(turn: Any, location: str) -> Message:
    role, value = _get_required(turn, "from", location), _get_required(turn, "value", location)
    other_keys = {key: item for key, item in turn.items() if key not in ("from", "value")}
    if role not in ("function_call", "tool_call"):
        return {**other_keys, "role": _ALIASES.get(str(role), role), "content": value}
    calls = _parse_json(value, f"{location}.value, a call,") if isinstance(value, str) else value
    return {**other_keys, "role": "assistant", "content": "", "tool_calls": _as_tool_calls(calls)}


def _as_tool_calls(calls: Any) -> list[Any]:
    """Return a call or a list of calls, whose function may lack its wrapper, as `tool_calls`."""
    return [
        call
        if not isinstance(call, Mapping) or isinstance(call.get("function"), Mapping)
        else {"type": "function", "function": call}
        for call in (calls if isinstance(calls, list) else [calls])
    ]


def _read_alpaca(values: Mapping[str, Any]) -> Sample:
    texts = {key: _text(values[key], key) for key in ("instruction", "input", "output", "system") if values[key]}
    for key in ("instruction", "output"):
        if not texts.get(key, "").strip():
            raise BadChat(f"{key}={values[key]!r} is empty")
    prompt = "\n\n".join(texts[key] for key in ("instruction", "input") if texts.get(key, "").strip())
    system = [{"role": "system", "content": texts["system"]}] if texts.get("system") else []
    history, past_messages = values["history"] or [], []
    if not isinstance(history, list):
        raise BadChat(f"history must be a list of questions and their answers, not {json_type(history)}")
    for number, turn in enumerate(history):
        if not isinstance(turn, list) or len(turn) != 2:
            raise BadChat(f"history[{number}] must be a question and its answer")
        past_messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    last_messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": texts["output"]}]
    return Conversation(_messages([*system, *past_messages, *last_messages], "messages"))


def _read_preference(values: Mapping[str, Any]) -> Pair:
    prompt, tools = values["prompt"], _tools(values["tools"])
    if prompt is None:
        prompt = _find_prompt(values)
    sides: list[Sample] = []
    for key in ("chosen", "rejected"):
        response = [values[key]] if isinstance(values[key], Mapping) else values[key]
        if isinstance(response, list):
            response = _as_messages(response, key)
        if prompt is not None:
            sides.append(_join_prompt_and_response(prompt, response, key, tools))
            continue
        messages = _messages(response, key)
        last = max((number for number, message in enumerate(messages) if message["role"] == "user"), default=-1)
        if last < 0:
            raise BadChat(f"has no prompt, and {key} has no message of the user", fix="name its key in data.columns")
        sides.append(Conversation(messages, tools, first_trainable=last + 1))
    chosen, rejected = sides
    if chosen == rejected:
        raise BadChat("chosen and rejected are identical")
    if isinstance(chosen, Conversation) and isinstance(rejected, Conversation):
        prompts = [_roles_and_texts(side.messages[: side.first_trainable]) for side in (chosen, rejected)]
        if prompts[0] != prompts[1]:
            rule = "chosen and rejected must have the same messages up to the user's last one"
            raise BadChat(rule, fix="remove the record")
    return Pair(chosen, rejected)


def _find_prompt(values: Mapping[str, Any]) -> list[Any] | None:
    """Return the conversation that a pair's responses answer, if the record has one."""
    for key in ("messages", "conversations"):
        if values[key] is not None:
            messages = _as_messages(_list(values[key], key), key)
            if messages[-1].get("role") != "assistant":  # otherwise it repeats a response
                return messages
    return None


def _roles_and_texts(messages: Sequence[Message]) -> list[tuple[str, str, str]]:
    """Return the role, stripped text and calls of each message, to compare messages regardless of white space."""
    return [
        (
            message["role"],
            message["content"].strip(),
            json.dumps(message.get("tool_calls"), sort_keys=True, default=str),
        )
        for message in messages
    ]


def _join_prompt_and_response(prompt: Any, response: Any, key: str, tools: Sequence[Mapping[str, Any]]) -> Sample:
    """Join a prompt and a response, each of which is text or a list of messages."""
    if isinstance(prompt, str) and isinstance(response, str):
        if not response.strip():
            raise BadChat(f"{key}={response!r} is empty")
        return Completion(_text(prompt, "prompt"), _text(response, key))
    prompt_messages = (
        [{"role": "user", "content": prompt}] if isinstance(prompt, str) else _list(prompt, "prompt", "text or ")
    )
    response_messages = (
        [{"role": "assistant", "content": response}] if isinstance(response, str) else _list(response, key, "text or ")
    )
    prompt_turns, response_turns = _messages(prompt_messages, "prompt"), _messages(response_messages, key)
    role = response_turns[0]["role"]
    restarts = role in ("system", "developer") or (role == "user" and prompt_turns[-1]["role"] in ("user", "tool"))
    if not restarts:  # the first message of the response can follow the prompt
        return Conversation([*prompt_turns, *response_turns], tools, first_trainable=len(prompt_turns))
    # The response should repeat the prompt.  A repetition at its start takes precedence, otherwise the last one counts.
    prompt_texts, response_texts = _roles_and_texts(prompt_turns), _roles_and_texts(response_turns)
    starts = (0, *range(len(response_texts) - len(prompt_texts), 0, -1))
    first = next(
        (
            start + len(prompt_texts)
            for start in starts
            if response_texts[start : start + len(prompt_texts)] == prompt_texts
        ),
        None,
    )
    if first is None:
        rule = f"{key} begins with a {role} message, but does not repeat the prompt"
        raise BadChat(rule, fix="start it with the assistant's message, or with the complete prompt")
    if first == len(response_turns):
        raise BadChat(f"{key} repeats the prompt, but has no answer to it")
    start = first - len(prompt_turns)
    repeated = [
        {**({"weight": turn["weight"]} if "weight" in turn else {}), **repetition}
        for turn, repetition in zip(prompt_turns, response_turns[start:first], strict=True)
    ]
    return Conversation([*response_turns[:start], *repeated, *response_turns[first:]], tools, first)


# ---------------------------------------------------------------------------------------------------------------
# Messages


_ALIASES = {
    **dict.fromkeys(("human", "prompter", "customer", "usr"), "user"),
    **dict.fromkeys(("gpt", "bot", "model", "ai", "chatgpt", "bing", "bard", "assistent"), "assistant"),
    **dict.fromkeys(("function", "function_response", "observation", "ipython", "tool_response"), "tool"),
}
"""Other names of roles.  They are allowed in ShareGPT files; for other formats, errors suggest the correct name."""


def _messages(value: Any, location: str, role_key: str = "role", content_key: str = "content") -> list[Message]:
    """Return the messages in `value`, after checking that each has a known role, and content or tool calls.

    role_key, content_key: what the file calls the keys `role` and `content`, for errors.

    Raises BadChat.
    """
    messages: list[Message] = []
    for number, message in enumerate(_list(value, location)):
        message_location = f"{location}[{number}]"
        role, content = _get_required(message, "role", message_location, role_key), message.get("content")
        if role not in ROLES:
            nearest_role = _ALIASES.get(str(role), nearest(role, ROLES))
            advice = f"nearest: {nearest_role}" if nearest_role else f"must be one of {', '.join(ROLES)}"
            raise BadChat(f"{message_location}.{role_key}={role!r}; {advice}")
        calls, weight = _calls(message, message_location), _flag(message, message_location)
        if calls and role != "assistant":
            raise BadChat(f"{message_location}.tool_calls: only the assistant calls tools, not the role {role!r}")
        if role == "tool" and isinstance(content, Mapping):
            content = json.dumps(content, ensure_ascii=False, default=str)
        # Tools may have nothing to say, a system prompt may be empty, and reasoning or calls can be all of a turn.
        may_be_empty = bool(calls) or role in ("tool", "system", "developer") or weight == 0
        may_be_empty = may_be_empty or any(message.get(key) for key in REASONING_KEYS)
        if content is None and not may_be_empty:
            raise BadChat(f"{message_location} has no {content_key!r}")
        text = _text_of(content, f"{message_location}.{content_key}") if content is not None else ""
        if not text.strip() and not may_be_empty:
            raise BadChat(f"{message_location}.{content_key}={text!r} is empty")
        messages.append(
            {
                **{key: item for key, item in message.items() if key not in FLAGS and key != "tool_calls"},
                "content": text,
                **({"tool_calls": calls} if calls else {}),
                **({} if weight is None else {"weight": weight}),
            }
        )
    return _join_calls(messages, location)


def _join_calls(messages: Sequence[Message], location: str) -> list[Message]:
    """Join calls with the assistant's text or calls directly before them: some formats write one turn as several.

    Raises BadChat if only one of the parts is excluded from the loss.
    """
    joined: list[Message] = []
    for number, message in enumerate(messages):
        last = joined[-1] if joined else {}
        is_continued = "tool_calls" in message and message["role"] == last.get("role") == "assistant"
        if not is_continued or message["content"] or any(message.get(key) for key in REASONING_KEYS):
            joined.append(message)
            continue
        if message.get("weight", 1) != last.get("weight", 1):
            rule = f"{location}[{number}] continues the turn before it, but only one of them is excluded from the loss"
            raise BadChat(rule, fix="exclude both, or neither")
        calls = [*last.get("tool_calls", ()), *message["tool_calls"]]
        joined[-1] = {**last, "tool_calls": calls}
    return joined


_FLAG_WORDS = {
    *("train", "trained", "trainable", "training", "loss", "mask", "masked", "weight", "weights", "ignore", "ignored"),
    *("skip", "exclude", "excluded", "supervised", "learn"),
}
"""Words in the names of keys that look like flags, such as `train_detail` or `masked`."""


def _looks_like_flag(key: str, value: Any) -> bool:
    """Return whether a key that is not in FLAGS looks like a flag, judging by its name; text is not one."""
    is_text = isinstance(value, str) and value.lower() not in ("true", "false", "yes", "no", "0", "1")
    return not is_text and value is not None and not _FLAG_WORDS.isdisjoint(re.split(r"[^a-z]+", key.lower()))


def _flag(message: Mapping[str, Any], location: str) -> int | None:
    """Return whether a message's tokens may be targets, 0 or 1, or None if none of FLAGS says so.

    Raises BadChat if a flag has another value, if two flags differ, or if another key looks like a flag.
    """
    flags: dict[str, int] = {}
    for key, value in message.items():
        if key in FLAGS:
            if not isinstance(value, (bool, int, float)) or value not in (0, 1):
                rule = f"{location}.{key}={value!r:.60} must be 0 or 1, or true or false"
                raise BadChat(rule, fix="leave it out, or set 0 to exclude the message from the loss")
            flags[key] = int(value)
        elif _looks_like_flag(key, value):
            rule = f"{location}.{key}={value!r:.60} looks like a flag, but is not one of {', '.join(FLAGS)}"
            raise BadChat(rule, fix=f"write {FLAGS[0]}: 0 to exclude the message from the loss, or remove it")
    if len(set(flags.values())) > 1:
        raise BadChat(f"{location}: {' and '.join(flags)} differ, but mean the same", fix="keep one of them")
    return next(iter(flags.values()), None)


def _list(value: Any, location: str, alternatives: str = "") -> list[Any]:
    if not isinstance(value, list):
        raise BadChat(f"{location} must be {alternatives}a list of messages, not {json_type(value)}")
    if not value:
        raise BadChat(f"{location}=[] has no messages")
    return value


def _get_required(value: Any, key: str, location: str, key_in_file: str = "") -> Any:
    if not isinstance(value, Mapping):
        raise BadChat(f"{location} must be an object, not {json_type(value)}")
    if value.get(key) is None:
        nearest_key = nearest(key_in_file or key, value)
        raise BadChat(
            f"{location} has no {key_in_file or key!r}" + (f"; did you mean {nearest_key!r}?" if nearest_key else "")
        )
    return value[key]


def _text_of(content: Any, location: str) -> str:
    """Return the text of a message's content, joined if it has several parts.  Raises BadChat if a part is not text."""
    if not isinstance(content, list):
        return _text(content, location)
    for number, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type", "text") != "text":
            kind = part.get("type") if isinstance(part, Mapping) else json_type(part)
            raise BadChat(f"{location}[{number}].type={kind!r}: only text is supported")
        _check_no_flag(part, f"{location}[{number}]")
    return "".join(_text(part.get("text"), f"{location}[{number}].text") for number, part in enumerate(content))


def _text(value: Any, location: str) -> str:
    if not isinstance(value, str):
        raise BadChat(f"{location} must be text, not {json_type(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadChat(f"{location} is not valid Unicode ({error.reason})") from error
    return value


def _calls(message: Mapping[str, Any], location: str) -> list[Mapping[str, Any]]:
    """Return a message's calls.  Raises BadChat unless each names a function, with an object or text as arguments."""
    if message.get("function_call"):
        raise BadChat(
            f"{location}.function_call is not read",
            fix='write tool_calls: [{"type": "function", "function": {"name": ..., "arguments": ...}}]',
        )
    calls = message.get("tool_calls") or []
    if isinstance(calls, str):
        calls = _parse_json(calls, f"{location}.tool_calls") if calls.strip() else []
    if not isinstance(calls, list):
        raise BadChat(f"{location}.tool_calls must be a list, not {json_type(calls)}")
    for number, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise BadChat(f"{location}.tool_calls[{number}] does not name a function")
        call_location = f"{location}.tool_calls[{number}]"
        _check_no_flag(call, call_location)
        if function is not call and not {"arguments", "parameters"}.isdisjoint(call):
            raise BadChat(f"{call_location}: the arguments are outside the function", fix="write them in the function")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = _parse_json(arguments, f"{call_location}: the arguments") if arguments.strip() else {}
        if not isinstance(arguments, (Mapping, type(None))):
            rule = f"{call_location}: the arguments must be an object, or text that contains one as JSON"
            raise BadChat(f"{rule}, not {json_type(arguments)}")
        if arguments is None and not {"name", "description", "id", "type", "index"}.issuperset(function):
            rule = f"{call_location} has no 'arguments'; its keys: {', '.join(function)}"
            raise BadChat(rule, fix="write the arguments under this key")
    return calls


def _parse_json(text: str, name: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadChat(f"{name} must be JSON ({error})", fix="correct the record, or remove it") from error
    _check_nesting(value)
    return value


_MAX_NESTING = 100
"""Maximum depth of objects and lists in a record; a schema of a tool has about ten levels."""


def _check_nesting(value: Any, max_depth: int = _MAX_NESTING) -> None:
    """Raise BadChat if a JSON value is nested so deeply that functions that walk it might recurse too deeply."""
    if isinstance(value, (Mapping, list)):
        if max_depth == 0:
            raise BadChat(f"is nested more than {_MAX_NESTING} levels deep", fix="remove the record")
        for item in value.values() if isinstance(value, Mapping) else value:
            _check_nesting(item, max_depth - 1)


def _check_no_flag(part: Mapping[str, Any], location: str) -> None:
    """Raise BadChat if a part of a message has a flag: only messages as a whole can be excluded from the loss."""
    for key, value in part.items():
        if value is not None and (key in FLAGS or _looks_like_flag(key, value)):
            raise BadChat(f"{location}.{key}: a part of a message cannot have a flag", fix="flag the whole message")


def _tools(value: Any) -> Sequence[Mapping[str, Any]]:
    """Return a record's tools: a list of objects, or a JSON string that contains such a list."""
    if isinstance(value, str):
        value = _parse_json(value, "tools") if value.strip() else None
    if isinstance(value, list):
        value = [_parse_json(tool, "tools") if isinstance(tool, str) else tool for tool in value]
    if not value:
        return ()
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise BadChat(f"tools must be a list of objects, not {json_type(value)}")
    return value
