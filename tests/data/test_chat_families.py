"""Turns with text, calls and reasoning in the templates of thirteen model families: what is trained on, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tokenizers", reason="a chat model's tokenizer is read with the library `tokenizers`")

from tests.helpers.chat_families import CHAT_FAMILIES, ChatFamily
from tests.helpers.chats import write_tokenizer
from tests.helpers.data import read_all, write_records
from trainer import UserError
from trainer.config.schema import DataSection
from trainer.data.chat.source import first_chats
from trainer.data.opening import open_source
from trainer.data.prompts import chat_stop_ids
from trainer.data.source import IGNORE

USER = {"role": "user", "content": "weather in Paris?"}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("weather", "time")
]


def call(number: int, name: str, arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call{number:05d}", "type": "function", "function": function}


CALLS = [call(0, "weather", {"city": "Paris"}), call(1, "time", {"zone": "CET"})]
TURNS: dict[str, dict[str, Any]] = {
    "text": {"content": "Yes"},
    "call": {"content": "", "tool_calls": CALLS[:1]},
    "two calls": {"content": "", "tool_calls": CALLS},
    "both": {"content": "Yes", "tool_calls": CALLS[:1]},
    "reasoning": {"content": "Yes", "reasoning_content": "hm"},
}


def data_of(folder: Path, family: ChatFamily, messages: list[Any], **settings: Any) -> DataSection:
    tools = {"tools": TOOLS} if any(message.get("tool_calls") for message in messages) else {}
    path = write_records(folder / "chats.jsonl", [{"messages": messages, **tools}])
    model = write_tokenizer(folder / "model", family.template, family.special.split(), **family.config)
    own = {"seq_len": 512, "documents": "apart", "cache_dir": str(folder / "cache"), "train_on": "last", **settings}
    return DataSection(source="chat", path=str(path), tokenizer=str(model), **own)


def targets_of(data: DataSection) -> str:
    """Return the text of all targets."""
    (chat,) = first_chats(data, [str(data.path)], 1, "data.path")
    return "".join(text for text, is_target in chat.pieces if is_target)


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("name", CHAT_FAMILIES)
def test_a_turn_is_trained_on_as_the_family_writes_it_or_refused(name: str, turn: str, tmp_path: Path) -> None:
    """Up to a token at which its models stop, and with all that the message holds."""
    family = CHAT_FAMILIES[name]
    expected = family.turns[turn]
    data = data_of(tmp_path, family, [USER, {"role": "assistant", **TURNS[turn]}])
    if expected.startswith("!"):
        with pytest.raises(UserError) as caught:
            targets_of(data)
        assert expected[1:] in str(caught.value)
        assert "chats.jsonl:1: " in str(caught.value)
        return
    assert targets_of(data) == expected
    assert expected.endswith(family.stops)
    last_target = read_all(open_source(data, None, "train"))["targets"]
    assert int(last_target[last_target != IGNORE][-1]) in chat_stop_ids(data.tokenizer)


@pytest.mark.parametrize("name", CHAT_FAMILIES)
def test_calls_of_earlier_turns_end_like_the_last(name: str, tmp_path: Path) -> None:
    """A call, its result, and the answer: each of the model's turns, or one message."""
    family = CHAT_FAMILIES[name]
    result = {"role": "tool", "name": "weather", "tool_call_id": "call00000", "content": "sunny"}
    turns = [{"role": "assistant", **TURNS["call"]}, result, {"role": "assistant", "content": "Yes"}]
    data = data_of(tmp_path, family, [USER, *turns], train_on="assistant")
    if family.turns["call"].startswith("!") or name == "phi":  # it writes another end of turn in the last one only
        with pytest.raises(UserError) as caught:
            targets_of(data)
        assert (family.turns["call"][1:] if name != "phi" else "data.train_on=last") in str(caught.value)
        return
    assert targets_of(data) == family.turns["call"] + family.turns["text"]


@pytest.mark.parametrize("name", [name for name, family in CHAT_FAMILIES.items() if family.turns["call"][0] != "!"])
def test_arguments_of_calls_are_text_or_an_object(name: str, tmp_path: Path) -> None:
    """The rendering is the same, and the start block says so if they had to be converted."""
    family = CHAT_FAMILIES[name]
    said = set()
    for form in ("object", "text"):
        (tmp_path / form).mkdir()
        arguments: Any = {"city": "Paris"}
        calls = [call(0, "weather", arguments if form == "object" else json.dumps(arguments))]
        data = data_of(tmp_path / form, family, [USER, {"role": "assistant", "content": None, "tool_calls": calls}])
        assert targets_of(data) == family.turns["call"]
        if "converted" in open_source(data, None, "train").summary:
            said.add(form)
    takes = {"deepseek": "text", "qwen3": "either"}.get(name, "object")
    assert said == {"object", "text"} - ({"object", "text"} if takes == "either" else {takes})


def test_a_family_that_names_calls_by_their_ids(tmp_path: Path) -> None:
    family = CHAT_FAMILIES["kimi"]
    calls = [{**CALLS[0], "id": "functions.weather:0"}]
    data = data_of(tmp_path, family, [USER, {"role": "assistant", "content": "Yes", "tool_calls": calls}])
    assert targets_of(data) == (
        "Yes<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        '{"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|><|im_end|>'
    )
