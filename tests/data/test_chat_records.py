"""What records of chats say beside their text: flags, calls, nulls, parts of turns, special tokens and changes."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.chat_families import CHAT_FAMILIES
from tests.helpers.chats import CHATML, FAMILIES, GENERATION, QWEN3, conversation, write_tokenizer
from tests.helpers.commands import meshtrainer
from tests.helpers.data import read_all, write_records
from trainer import UserError
from trainer.config.schema import DataSection
from trainer.data.opening import open_source
from trainer.data.prompts import ChatPrompts, chat_stop_ids
from trainer.data.source import IGNORE, Source

tokenizers = pytest.importorskip("tokenizers", reason="a chat model's tokenizer is read with the library `tokenizers`")

TOOLS = FAMILIES["tools"].template
ASKED = {"role": "user", "content": "weather ?"}
WEATHER = '{"name": "weather", "arguments": {"city": "Paris"}}'
SUNNY = {"role": "tool", "content": "sunny"}


def answer(text: str = "", *calls: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **({"tool_calls": [*calls]} if calls else {}), **more}


def call(arguments: Any, name: str = "weather") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def data_of(folder: Path, records: Any, template: str | None = TOOLS, **settings: Any) -> DataSection:
    model = write_tokenizer(folder / "model", template, eos_token=settings.pop("eos", "</s>"))
    path = settings.pop("path", None) or write_records(folder / "chats.jsonl", records)
    own = {"seq_len": 256, "documents": "apart", "cache_dir": str(folder / "cache"), **settings}
    return DataSection(source="chat", path=str(path), tokenizer=str(model), **own)


def opened(data: DataSection) -> Source:
    source = open_source(data, None, "train")
    assert source is not None
    return source


def trained(data: DataSection) -> list[str]:
    """Return the decoded targets of each row."""
    text = tokenizers.Tokenizer.from_file(f"{data.tokenizer}/tokenizer.json").id_to_token
    return ["".join(map(text, row[row != IGNORE].tolist())) for row in read_all(opened(data))["targets"]]


def refusal(data: DataSection) -> str:
    with pytest.raises(UserError) as caught:
        opened(data)
    return str(caught.value)


# ---------------------------------------------------------------------------------------------------------------
# Flags

FLAGS = ("weight", "loss", "train", "trainable", "loss_mask")


def flagged(kind: str, flag: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Return a record whose first answer has a flag, the settings that it needs, and what is trained on without it."""
    yes, no = {**answer("Yes"), **flag}, answer("No")
    match kind:
        case "messages":
            return {"messages": [ASKED, yes, ASKED, no]}, {}, ["No<|im_end|>"]
        case "sharegpt":
            turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes", **flag}]
            more = [{"from": "human", "value": "Bye"}, {"from": "gpt", "value": "No"}]
            return {"conversations": [*turns, *more]}, {}, ["No<|im_end|>"]
        case "completion":
            return {"prompt": [ASKED], "completion": [yes, ASKED, no]}, {}, ["No<|im_end|>"]
        case "preference":
            record = {"prompt": [ASKED], "chosen": [yes, ASKED, no], "rejected": [yes, ASKED, answer("Bye")]}
            return record, {}, ["No<|im_end|>", "Bye<|im_end|>"]
        case _:
            record = {"messages": [ASKED, yes, ASKED, no], "label": True}
            return record, {"labels": "read"}, ["No<|im_end|>"]


@pytest.mark.parametrize("key", FLAGS)
@pytest.mark.parametrize("kind", ["messages", "sharegpt", "completion", "preference", "kto"])
def test_all_spellings_of_a_flag_mean_the_same(kind: str, key: str, tmp_path: Path) -> None:
    for number, value in enumerate((0, False, 0.0)):
        folder = tmp_path / str(number)
        folder.mkdir()
        record, settings, expected = flagged(kind, {key: value})
        assert trained(data_of(folder, [record], **settings)) == expected
    for number, value in enumerate((1, True, None), 3):
        folder = tmp_path / str(number)
        folder.mkdir()
        record, settings, expected = flagged(kind, {key: value})
        assert trained(data_of(folder, [record], **settings)) == [f"Yes<|im_end|>{text}" for text in expected]


@pytest.mark.parametrize(
    "flag",
    [
        *({key: "false"} for key in FLAGS),
        *({key: 0.5} for key in FLAGS),
        {"weight": 0, "train": True},
        {"train_detail": [{"begin_offset": 0, "end_offset": 2, "train": False}]},
        {"masked": True},
        {"skip": "true"},
        {"loss_scale": 0.0},
        {"Train": False},
    ],
)
def test_a_flag_with_another_value_or_name_is_refused_by_name(flag: dict[str, Any], tmp_path: Path) -> None:
    for kind in ("messages", "sharegpt", "preference"):
        folder = tmp_path / kind
        folder.mkdir()
        message = refusal(data_of(folder, [flagged(kind, flag)[0]]))
        assert "chats.jsonl:1: " in message
        assert all(key in message for key in flag)


def test_a_flag_that_cannot_have_an_effect_is_said(tmp_path: Path) -> None:
    data = data_of(tmp_path, [{"messages": [{**ASKED, "train": True}, answer("Yes")]}])
    assert "user in 1 conversations (first: chats.jsonl:1)" in opened(data).summary
    assert trained(data) == ["Yes<|im_end|>"]


def test_a_flag_of_a_whole_record_is_said(tmp_path: Path) -> None:
    data = data_of(tmp_path, [{"messages": [ASKED, answer("Yes", training_source="web")], "weight": 0.5}])
    (line,) = [line for line in opened(data).summary.splitlines() if "not of records" in line]
    assert "weight in 1 conversations (chats.jsonl:1)" in line


def test_keys_that_a_template_does_not_read_are_said(tmp_path: Path) -> None:
    stamped = [{**ASKED, "time": 5}, {**answer("Yes"), "id": "a", "name": "weather"}]
    summary = opened(data_of(tmp_path, [{"messages": stamped}, {"messages": [ASKED, answer("No")]}])).summary
    (line,) = [line for line in summary.splitlines() if "does not read" in line]
    assert all(f"{key} in 1 conversations (first: chats.jsonl:1)" in line for key in ("id", "name", "time"))

    whole = "{% for m in messages %}{{ m | tojson }}{{ '<|im_end|>' }}{% endfor %}"
    (tmp_path / "whole").mkdir()
    assert "does not read" not in opened(data_of(tmp_path / "whole", [{"messages": stamped}], whole)).summary


# ---------------------------------------------------------------------------------------------------------------
# Calls, turns and nulls


@pytest.mark.parametrize("arguments", ["{", "[1]", '"Paris"', 5, ["Paris"]])
def test_arguments_that_are_no_object_are_refused(arguments: Any, tmp_path: Path) -> None:
    message = refusal(data_of(tmp_path, [{"messages": [ASKED, answer("", call(arguments))]}]))
    assert "chats.jsonl:1: messages[1].tool_calls[0]" in message


@pytest.mark.parametrize("arguments", ["", None, {}, "{}"])
def test_a_call_without_arguments(arguments: Any, tmp_path: Path) -> None:
    data = data_of(tmp_path, [{"messages": [ASKED, answer("", call(arguments))]}])
    assert trained(data) == ['<tool_call>{"name": "weather", "arguments": {}}</tool_call><|im_end|>']


def test_a_template_that_does_not_write_arguments_is_refused(tmp_path: Path) -> None:
    message = refusal(
        data_of(
            tmp_path,
            [{"messages": [ASKED, answer("", call({}))]}],
            TOOLS.replace("call.function |", "call.function.name |"),
        )
    )
    assert "messages[1].tool_calls" in message
    assert "arguments" in message


@pytest.mark.parametrize(
    "odd",
    [
        {"tool_calls": [{"function": {"name": "weather", "parameters": {"city": "Paris"}}}]},
        {"function_call": {"name": "weather", "arguments": "{}"}},
    ],
)
def test_calls_in_another_notation_are_refused(odd: dict[str, Any], tmp_path: Path) -> None:
    assert "chats.jsonl:1: messages[1]." in refusal(data_of(tmp_path, [{"messages": [ASKED, answer("Yes", **odd)]}]))


PARIS, TIMED_CALL = call({"city": "Paris"}), call({}, "get")


def sharegpt(*turns: tuple[str, Any], **more: Any) -> dict[str, Any]:
    return {"conversations": [{"from": role, "value": value} for role, value in turns], **more}


TIME = '{"name": "get", "arguments": {}}'
CALLED, TIMED = (f"<tool_call>{text}</tool_call>" for text in (WEATHER, TIME))
SPLIT_TURNS: dict[str, tuple[dict[str, Any], str]] = {
    "text and its call": (
        sharegpt(("human", "Hi"), ("gpt", "Yes"), ("function_call", WEATHER)),
        f"Yes{CALLED}<|im_end|>",
    ),
    "two calls": (
        sharegpt(("human", "Hi"), ("function_call", WEATHER), ("function_call", TIME)),
        f"{CALLED}{TIMED}<|im_end|>",
    ),
    "a list of calls": (
        sharegpt(("human", "Hi"), ("function_call", f"[{WEATHER}, {TIME}]")),
        f"{CALLED}{TIMED}<|im_end|>",
    ),
    "a call that is an object": (sharegpt(("human", "Hi"), ("tool_call", json.loads(WEATHER))), f"{CALLED}<|im_end|>"),
    "a call, its result, and the answer": (
        sharegpt(("human", "Hi"), ("function_call", WEATHER), ("observation", "sunny"), ("gpt", "Yes")),
        f"{CALLED}<|im_end|>Yes<|im_end|>",
    ),
    "an empty result": (
        {"messages": [ASKED, answer("", call({"city": "Paris"})), {"role": "tool", "content": ""}, answer("Yes")]},
        f"{CALLED}<|im_end|>Yes<|im_end|>",
    ),
    "no result at all": (
        {"messages": [ASKED, answer("", call({"city": "Paris"})), {"role": "tool", "content": None}, answer("Yes")]},
        f"{CALLED}<|im_end|>Yes<|im_end|>",
    ),
    "an empty list of calls": ({"messages": [ASKED, answer("Yes", tool_calls=[])]}, "Yes<|im_end|>"),
}  # fmt: skip


@pytest.mark.parametrize("kind", SPLIT_TURNS)
def test_calls_and_texts_of_one_turn_are_one_turn(kind: str, tmp_path: Path) -> None:
    record, expected = SPLIT_TURNS[kind]
    assert trained(data_of(tmp_path, [record])) == [expected]


def test_parts_of_a_turn_with_different_flags_are_refused(tmp_path: Path) -> None:
    record = sharegpt(("human", "Hi"), ("gpt", "Yes"), ("function_call", WEATHER))
    record["conversations"][1]["train"] = False
    assert "conversations[2]" in refusal(data_of(tmp_path, [record]))


def test_nulls_mean_the_same_in_all_files(tmp_path: Path) -> None:
    """An entry that is null is left out, as Arrow adds it; in text that is JSON, it stays."""
    pyarrow = pytest.importorskip("pyarrow", reason="parquet is read with the library `pyarrow`")
    parquet = pytest.importorskip("pyarrow.parquet")
    records = [
        {
            "messages": [ASKED, answer("", call({"city": "Paris", "type": None}))],
            "tools": [{"name": "weather", "x": None}],
        },
        {"messages": [ASKED, answer("", call({"city": None, "type": "a"}))], "tools": [{"name": "weather", "x": "a"}]},
    ]
    table = pyarrow.Table.from_pylist(records)
    parquet.write_table(table, tmp_path / "chats.parquet")
    expected = [
        f'<tool_call>{{"name": "weather", "arguments": {{{arguments}}}}}</tool_call><|im_end|>'
        for arguments in ('"city": "Paris"', '"type": "a"')
    ]
    for path in (write_records(tmp_path / "own.jsonl", records), tmp_path / "chats.parquet"):
        data = data_of(tmp_path, [], path=path, documents="apart")
        assert trained(data) == expected
        assert "nulls are left out" in opened(data).summary
    (tmp_path / "text").mkdir()
    meant = answer("", call('{"city": null}'))
    data = data_of(tmp_path / "text", [{"messages": [ASKED, {**meant, "name": None}]}])
    assert trained(data) == ['<tool_call>{"name": "weather", "arguments": {"city": null}}</tool_call><|im_end|>']
    assert "nulls" not in opened(data).summary


YES = {"prompt": [ASKED], "chosen": [answer("Yes")], "rejected": [answer("No")]}
REFUSED_RECORDS: dict[str, tuple[dict[str, Any], str]] = {
    "a pair without a prompt": ({"question": "Hi", "chosen": [answer("Yes")], "rejected": [answer("No")]}, "no prompt"),
    "a system prompt beside a pair": ({**YES, "system": "Be brief"}, "'system'"),
    "a system prompt beside a completion": ({"system": "Be brief", "prompt": "Hi", "completion": "Yes"}, "'system'"),
    "functions beside messages": ({"messages": [ASKED, answer("Yes")], "functions": [{"name": "get"}]}, "'functions'"),
    "two system prompts": (
        {"system": "Be brief", "conversations": [{"role": "system", "content": "Bye"}, ASKED, answer("Yes")]}, "system"
    ),
    "arguments beside the function": (
        {"messages": [ASKED, answer("", {"function": {"name": "get"}, "arguments": {"a": "b"}})]}, "tool_calls[0]"
    ),
    "a flag of a part": (
        {"messages": [ASKED, {**answer(), "content": [{"type": "text", "text": "Yes", "weight": 0}]}]}, "weight"
    ),
    "a flag of a call": ({"messages": [ASKED, answer("", {**call({}), "weight": 0})]}, "weight"),
    "a call of the user": ({"messages": [ASKED, {**ASKED, "tool_calls": [call({})]}, answer("Yes")]}, "messages[1]"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED_RECORDS)
def test_what_would_be_ignored_is_refused(kind: str, tmp_path: Path) -> None:
    record, named = REFUSED_RECORDS[kind]
    message = refusal(data_of(tmp_path, [record]))
    assert "chats.jsonl:1: " in message
    assert named in message


@pytest.mark.parametrize(
    "arguments", ['{"city": ', '"{\\"city\\": \\"Paris\\"}"', "{'city': 'Paris'}", "[1]", "5", "null"]
)
@pytest.mark.parametrize("family", ["qwen2.5", "qwen3", "deepseek"])
def test_broken_arguments_are_refused_by_every_form(family: str, arguments: str, tmp_path: Path) -> None:
    record = {"messages": [ASKED, answer("", call(arguments))]}
    assert "messages[1].tool_calls[0]" in refusal(data_of(tmp_path, [record], CHAT_FAMILIES[family].template))


ACCEPTED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "keys that only resemble flags": (
        {"messages": [ASKED, answer("Yes", constraints=1, glossary=2, learner_id=3, target=4)]}, ["Yes<|im_end|>"]
    ),
    "an empty system prompt": ({"messages": conversation("Hi", "Yes", system="")}, ["Yes<|im_end|>"]),
    "an empty answer that is excluded": (
        {"messages": [ASKED, answer("", weight=0), ASKED, answer("No")]}, ["No<|im_end|>"]
    ),
    "a response that is one message": ({**YES, "chosen": answer("Yes")}, ["Yes<|im_end|>", "No<|im_end|>"]),
    "a pair after a conversation": (
        {"messages": [ASKED], "chosen": [answer("Yes")], "rejected": [answer("No")]}, ["Yes<|im_end|>", "No<|im_end|>"]
    ),
    "a pair in ShareGPT's keys": (
        sharegpt(("human", "Hi"), chosen={"from": "gpt", "value": "Yes"}, rejected={"from": "gpt", "value": "No"}),
        ["Yes<|im_end|>", "No<|im_end|>"],
    ),
    "a pair beside the conversation of one": (
        {**YES, "messages": [ASKED, answer("Yes")]}, ["Yes<|im_end|>", "No<|im_end|>"]
    ),
    "a result that is an object": (
        {"messages": [ASKED, answer("", PARIS), {"role": "tool", "content": {"city": "Paris"}}, answer("Yes")]},
        [f"{CALLED}<|im_end|>Yes<|im_end|>"],
    ),
    "other names of roles in ShareGPT": (
        {"conversations": [{"role": "human", "content": "Hi"}, {"role": "gpt", "content": "Yes"}]}, ["Yes<|im_end|>"]
    ),
    "calls and tools as JSON": (
        {"messages": [ASKED, answer("", tool_calls=json.dumps([PARIS]))], "tools": ['{"name": "weather"}']},
        [f"{CALLED}<|im_end|>"],
    ),
    "a call after its text": ({"messages": [ASKED, answer("Yes"), answer("", PARIS)]}, [f"Yes{CALLED}<|im_end|>"]),
    "another text beside the call": (
        {"messages": [ASKED, answer("Yes"), answer("No", PARIS)]}, [f"Yes<|im_end|>No{CALLED}<|im_end|>"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", ACCEPTED)
def test_ordinary_records_are_read(kind: str, tmp_path: Path) -> None:
    record, expected = ACCEPTED[kind]
    data = data_of(tmp_path, [record])
    assert trained(data) == expected
    text = tokenizers.Tokenizer.from_file(f"{data.tokenizer}/tokenizer.json").id_to_token
    assert all("user" in "".join(map(text, row.tolist())) for row in read_all(opened(data))["tokens"])


# ---------------------------------------------------------------------------------------------------------------
# Ends of turns, and what a template leaves out

ENDLESS_CALLS = """\
{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}
{%- for call in m.tool_calls or [] %}{{ '<tool_call>' }}{{ call.function | tojson }}{{ '</tool_call>' }}{% endfor %}
{%- if not m.tool_calls %}{{ '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
BARE = "{% for m in messages %}{{ '\n' + m.role + ' ' + TEXT }}{% endfor %}"
BARE += "{% if add_generation_prompt %}{{ '\nassistant ' }}{% endif %}"
STOPS: dict[str, tuple[str, list[Any], str]] = {
    "a call alone": (ENDLESS_CALLS, [ASKED, answer("", PARIS)], f"{CALLED}\n<|im_start|>"),
    "a call and its result": (
        ENDLESS_CALLS, [ASKED, answer("", PARIS), SUNNY, answer("Yes")], f"{CALLED}\n<|im_start|>Yes<|im_end|>"
    ),
    "text and a call": (ENDLESS_CALLS, [ASKED, answer("Yes", PARIS)], f"Yes{CALLED}\n<|im_start|>"),
    "no end at all": (BARE.replace("TEXT", "m.content"), [ASKED, answer("Yes")], ""),
    "an answer that is trimmed": (BARE.replace("TEXT", "m.content | trim"), [ASKED, answer("Yes ")], ""),
    "reasoning that is cut off": (
        CHATML.replace("m['content']", "m['content'].split('</think>')[-1]"),
        [ASKED, answer("<think>hm</think>Yes")], "",
    ),
    "an end that is written before another turn only": (
        CHATML.replace(
            "'<|im_end|>' + '\n' }}", "('' if loop.last and not add_generation_prompt else '<|im_end|>\n') }}"
        ),
        [ASKED, answer("Yes"), ASKED, answer("No")], "Yes<|im_end|>No<|im_end|>",
    ),
    "a header after every turn": (
        CHATML.replace("{% if add_generation_prompt %}", "{% if true %}"), [ASKED, answer("Yes"), ASKED, answer("No")],
        "Yes<|im_end|>No<|im_end|>",
    ),
    "tags without an end": (
        GENERATION.replace(" + '<|im_end|>\n'", " + '\n'"), [ASKED, answer("Yes"), ASKED, answer("No")],
        "Yes\n<|im_start|>No\n<|im_start|>",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", STOPS)
def test_every_turn_ends_with_a_token_at_which_generation_stops(kind: str, tmp_path: Path) -> None:
    template, messages, expected = STOPS[kind]
    eos = "<|im_end|>" if "every turn" in kind or "before another" in kind else "</s>"
    data = data_of(tmp_path, [{"messages": messages}], template, eos=eos)
    if not expected:
        assert "chats.jsonl:1: messages[1]" in refusal(data)
        return
    assert trained(data) == [expected]
    (targets,) = read_all(opened(data))["targets"]
    assert int(targets[targets != IGNORE][-1]) in chat_stop_ids(data.tokenizer)


def test_bytes_have_no_token_at_which_generation_stops(tmp_path: Path) -> None:
    """So a template may end turns with text, which is said, but not with white space."""
    for number, (end, is_accepted) in enumerate((("[/INST]", True), ("\n", False))):
        (tmp_path / str(number)).mkdir()
        template = tmp_path / str(number) / "own.jinja"
        template.write_text(
            "{% for m in messages %}{{ '[INST]' + m.content + END }}{% endfor %}".replace("END", repr(end))
        )
        data = data_of(tmp_path / str(number), [{"messages": [ASKED, answer("Yes"), ASKED, answer("No")]}])
        data = dataclasses.replace(data, tokenizer="bytes", chat_template=str(template))
        if is_accepted:
            assert "warning: the chat template ends turns with '[/INST]'" in opened(data).summary
        else:
            assert "chats.jsonl:1: messages[3]" in refusal(data)


ONLY_CALLS = TOOLS.replace("if m.content", "if not m.tool_calls")
WITHOUT_TOOLS = TOOLS.replace("{% if tools %}", "{% if tools and messages[0].role == 'system' %}")
HIDDEN: dict[str, tuple[str, dict[str, Any], str]] = {
    "text that is in the call too": (
        ONLY_CALLS,
        {"messages": [ASKED, answer("weather", PARIS)]},
        "messages[1].content",
    ),
    "a result that is in the answer too": (
        CHATML.replace("in messages %}", "in messages if m.role != 'tool' %}").replace(
            "{% if add", "{# tool_calls #}{% if add"
        ),
        {"messages": [ASKED, SUNNY, answer("sunny")]},
        "messages[1].role='tool'",
    ),
    "a question that is asked twice": (
        CHATML.replace("in messages %}", "in messages %}{% if loop.index0 != 2 %}").replace(
            "{% endfor", "{% endif %}{% endfor"
        ),
        {"messages": [ASKED, answer("Yes"), ASKED, answer("Yes")]},
        "messages[2].role='user'",
    ),
    "tools": (WITHOUT_TOOLS, {"messages": [ASKED, answer("Yes")], "tools": [{"name": "weather"}]}, "has tools"),
}


@pytest.mark.parametrize("kind", HIDDEN)
def test_what_is_left_out_is_found_though_its_text_occurs_elsewhere(kind: str, tmp_path: Path) -> None:
    template, record, named = HIDDEN[kind]
    assert named in refusal(data_of(tmp_path, [record], template))


LEAVING_OUT: dict[str, tuple[str, dict[str, Any], str]] = {
    "text beside a call": (TOOLS.replace("if m.content", "if not m.tool_calls"), answer("Yes", PARIS), "content"),
    "the second call": (
        TOOLS.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]"), answer("", PARIS, TIMED_CALL), "tool_calls[1]"
    ),
    "the second of two equal calls": (
        TOOLS.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]"),
        answer("", TIMED_CALL, TIMED_CALL), "tool_calls["
    ),
    "reasoning": (
        CHATML.replace("{% if add", "{# reasoning_content #}{% if add"), answer("Yes", reasoning_content="hm"),
        "reasoning_content",
    ),
}  # fmt: skip


@pytest.mark.parametrize("train_on", ["assistant", "all"])
@pytest.mark.parametrize("kind", LEAVING_OUT)
def test_what_a_template_leaves_out_is_named(kind: str, train_on: str, tmp_path: Path) -> None:
    template, message, part = LEAVING_OUT[kind]
    data = data_of(tmp_path, [{"messages": [ASKED, message]}], template, train_on=train_on)
    assert f"chats.jsonl:1: messages[1].{part}" in refusal(data)


def test_turns_outside_generation_tags(tmp_path: Path) -> None:
    """A turn without the tag is said; text between two tags is refused, as the model has to write it."""
    half = GENERATION.replace(
        "{%- generation %}{{ m.content", "{%- if m.content != 'Yes' %}{% generation %}{{ m.content"
    )
    half = half.replace(
        "{% endgeneration %}", "{% endgeneration %}{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}"
    )
    data = data_of(tmp_path, [{"messages": [ASKED, answer("Yes"), ASKED, answer("No")]}], half)
    assert trained(data) == ["No<|im_end|>\n"] or trained(data) == ["No<|im_end|>"]
    assert "outside the tag" in opened(data).summary
    gap = GENERATION.replace(
        "{{ m.content + '", "{{ m.content }}{% endgeneration %}{{ '</think>' }}{% generation %}{{ '"
    )
    (tmp_path / "gap").mkdir()
    assert "'</think>'" in refusal(data_of(tmp_path / "gap", [{"messages": [ASKED, answer("Yes")]}], gap))


def test_a_message_that_is_folded_into_another_cannot_be_excluded(tmp_path: Path) -> None:
    folding = "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% endif %}"
    folding += (
        "{% for m in messages if m.role != 'system' %}{{ '[INST] ' + (system or '') + m.content + '</s>' }}{% endfor %}"
    )
    messages = [{"role": "system", "content": "Be brief", "weight": 0}, ASKED, answer("Yes")]
    data = data_of(tmp_path, [{"messages": messages}], folding, train_on="all")
    assert "messages[0] cannot be excluded" in refusal(data)


def test_flags_of_a_prompt_that_the_response_repeats(tmp_path: Path) -> None:
    prompt = [{"role": "system", "content": "Be brief", "loss": False}, ASKED]
    completion = [{"role": "system", "content": "Be brief"}, ASKED, answer("Yes")]
    (text,) = trained(data_of(tmp_path, [{"prompt": prompt, "completion": completion}], CHATML, train_on="all"))
    assert "brief" not in text
    assert "weather" in text


THINKING = CHATML.replace("assistant\n' }}{% endif", "assistant\n<think>\n' }}{% endif")
EMPTY_REASONING = GENERATION.replace(
    "'<|im_start|>assistant\n' }}\n{%- gen", "'<|im_start|>assistant\n<think></think>' }}\n{%- gen"
)
OTHER_NAME = GENERATION.replace("{{ '<|im_start|>assistant\n' }}{% endif", "{{ '<|im_start|>model\n' }}{% endif")
PROMPTS: dict[str, tuple[str, list[str]]] = {
    "a prompt that opens reasoning": (THINKING, ["<think>\\n'", "reasoning_content"]),
    "the same with tags": (
        GENERATION.replace("{{ '<|im_start|>assistant\n' }}{% endif", "{{ '<|im_start|>assistant\n<think>' }}{% endif"),
        ["<think>'", "reasoning_content"],
    ),
    "empty reasoning before the tag": (EMPTY_REASONING, ["'<think></think>'", "generation"]),
    "a prompt with another name": (OTHER_NAME, ["'<|im_start|>model\\n'", "'<|im_start|>ass"]),
}


@pytest.mark.parametrize("kind", PROMPTS)
def test_a_turn_that_inference_never_shows_is_refused(kind: str, tmp_path: Path) -> None:
    """With the response of a pair, and with what the generation prompt has in its place."""
    template, named = PROMPTS[kind]
    assert template not in (CHATML, GENERATION)
    message = refusal(
        data_of(tmp_path, [{"prompt": [ASKED], "chosen": [answer("Yes")], "rejected": [answer("No")]}], template)
    )
    assert "chats.jsonl:1: chosen: messages[1]" in message
    assert all(words in message for words in named)


def test_a_message_can_be_excluded_where_its_prefix_alone_is_rejected(tmp_path: Path) -> None:
    strict = "{% if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}"
    strict += "{{ raise_exception('No user query found in messages.') }}{% endif %}" + CHATML
    messages = [{"role": "system", "content": "Be brief", "weight": 0}, *conversation("Hi", "Yes")]
    expected = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes<|im_end|>\n"
    for number, template in enumerate((CHATML, strict)):
        (tmp_path / str(number)).mkdir()
        data = data_of(tmp_path / str(number), [{"messages": messages}], template, train_on="all")
        assert trained(data) == [expected]


def test_showing_chats_names_the_setting_that_helps(tmp_path: Path) -> None:
    path = write_records(tmp_path / "chats.jsonl", [{"messages": conversation("Hi", "Yes", "Bye", "No")}])
    model = write_tokenizer(tmp_path / "model", QWEN3)
    ended = meshtrainer("prepare", path, "--tokenizer", model, "--show", "1")
    assert ended.code == 2
    assert "data.train_on=last" in ended.err


# ---------------------------------------------------------------------------------------------------------------
# Pairs, special tokens, and data that change


def test_pairs_that_are_equal_once_truncated_are_not_used(tmp_path: Path) -> None:
    long = {"prompt": [ASKED], "chosen": [answer("Hi " * 40 + "Yes")], "rejected": [answer("Hi " * 40 + "No")]}
    good = {"prompt": [ASKED], "chosen": [answer("Yes")], "rejected": [answer("No")]}
    same = {"prompt": [ASKED], "chosen": [answer("Yes")], "rejected": [answer("Yes ")]}
    trimming = CHATML.replace("m['content'] +", "m['content'] | trim +")
    data = data_of(tmp_path, [good, long, same, good], trimming, seq_len=48, too_long="truncate")
    assert len(trained(data)) == 4
    assert "2 pairs are not used" in opened(data).summary
    assert "chats.jsonl:2, chats.jsonl:3" in opened(data).summary
    (tmp_path / "all").mkdir()
    assert "same tokens" in refusal(data_of(tmp_path / "all", [long] * 3, trimming, seq_len=48, too_long="truncate"))


def test_special_tokens_that_messages_may_spell_out(tmp_path: Path) -> None:
    chats = [{"messages": [ASKED, answer("[INST] Yes <s>")]}, {"prompt": "Hi", "completion": "[INST]"}]
    for number, record in enumerate(chats):
        folder = tmp_path / str(number)
        folder.mkdir()
        plain = data_of(folder, [record])
        assert 'data.special_tokens=["' in opened(plain).summary
        accepting = data_of(folder, [record], special_tokens=("[INST]",))
        vocabulary = tokenizers.Tokenizer.from_file(f"{plain.tokenizer}/tokenizer.json")
        for data, is_token in ((plain, False), (accepting, True)):
            (targets,) = read_all(opened(data))["targets"]
            assert (vocabulary.token_to_id("[INST]") in targets) is is_token
            assert vocabulary.token_to_id("<s>") not in targets
    with pytest.raises(UserError) as caught:
        opened(data_of(tmp_path, chats[:1], special_tokens=("[INTS]",)))
    assert "[INST]" in str(caught.value)
    assert "data.special_tokens" in str(caught.value)


def test_special_tokens_in_escaped_json_are_text(tmp_path: Path) -> None:
    """Also if the template writes JSON in ASCII only."""
    template = CHATML.replace("m['content'] +", "(m['content'] | tojson(ensure_ascii=true)) +")
    texts = [
        trained(data_of(tmp_path, [{"messages": [ASKED, answer(text)]}], template)) for text in ("Yes", "<|im_end|>")
    ]
    assert texts == [['"Yes"<|im_end|>'], ['"<|im_end|>"<|im_end|>']]


def test_special_tokens_in_the_names_of_arguments_are_text(tmp_path: Path) -> None:
    data = data_of(tmp_path, [{"messages": [ASKED, answer("", call({"<|im_end|>": "Paris"}))]}])
    (targets,) = read_all(opened(data))["targets"]
    end = tokenizers.Tokenizer.from_file(f"{data.tokenizer}/tokenizer.json").token_to_id("<|im_end|>")
    assert (targets == end).sum() == 1


def test_prompts_are_rendered_like_training_data(tmp_path: Path) -> None:
    """With the arguments of calls in the form that the template takes, and without nulls."""
    model = str(write_tokenizer(tmp_path / "model", TOOLS))
    prompts = ChatPrompts(model, "--prompts", "prompts.jsonl")
    objects = prompts.tokens([ASKED, answer("", PARIS), SUNNY])
    assert prompts.tokens([ASKED, answer("", call('{"city": "Paris"}')), SUNNY]) == objects
    assert prompts.tokens([ASKED, answer("", call({"city": "Paris", "type": None})), SUNNY]) == objects


@pytest.mark.parametrize("source", ["chat", "tokens"])
def test_data_that_changed_at_equal_size_and_time_are_read_again(source: str, tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    digests = set()
    for word in ("Yes", "Bye"):
        record = {"messages": [ASKED, answer(word)]} if source == "chat" else {"text": f"{word} now " * 100}
        write_records(path, [record])
        os.utime(path, ns=(10**18, 10**18))
        if source == "chat":
            data = data_of(tmp_path, [], path=path)
        else:
            data = DataSection(
                source="tokens", path=str(path), seq_len=16, cache_dir=str(tmp_path / "cache"), holdout=0.0
            )
        digests.add(read_all(opened(data))["targets"].tobytes())
    assert len(digests) == 2
