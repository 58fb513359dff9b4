"""Chats: the loss mask of every token, rejected conversations, file formats, packing, and a run on a chat file."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tokenizers", reason="a chat model's tokenizer is read with the library `tokenizers`")

from tests.helpers.chats import CHATML, FAMILIES, GENERATION, QWEN3, Family, conversation, write_tokenizer
from tests.helpers.launch import merged
from trainer import UserError, load_config, prepare, run
from trainer.config import DataSection, check_config
from trainer.config.changes import compare_configs
from trainer.data.chat.formats import BadChat, Completion, Conversation
from trainer.data.chat.masking import ChatTokenizer, Encoder
from trainer.data.chat.source import ChatSource
from trainer.data.chat.template import find_template
from trainer.data.opening import open_source
from trainer.data.packing import best_fit
from trainer.data.source import IGNORE, Source, as_mapping


def encoder_of(folder: Path, family: Family) -> Encoder:
    write_tokenizer(folder, family.template, **family.config)
    return Encoder(ChatTokenizer(str(folder)), find_template("model", str(folder)), family.train_on)


def marked(encoder: Encoder, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> list[tuple[str, bool]]:
    encoded = encoder.encode(Conversation(messages, tools or ()))
    texts = [encoder.tokenizer.token_text(number) for number in encoded.ids.tolist()]
    return list(zip(texts, encoded.loss_mask.tolist(), strict=True))


@pytest.mark.parametrize("family", list(FAMILIES))
def test_loss_mask_equals_the_one_written_by_hand(family: str, tmp_path: Path) -> None:
    case = FAMILIES[family]
    assert marked(encoder_of(tmp_path, case), case.messages, case.tools) == case.truth


def test_templates_are_rendered_as_transformers_renders_them(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    for name, case in FAMILIES.items():
        encoder = encoder_of(tmp_path / name, case)
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / name)
        ids = theirs.apply_chat_template(case.messages, tools=case.tools or None, return_dict=False)
        assert encoder.encode(Conversation(case.messages, case.tools)).ids.tolist() == ids, name


def test_a_token_that_the_file_lists_under_two_ids_has_the_one_it_is_encoded_as(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "model", CHATML)
    expected = ChatTokenizer(str(folder)).added_tokens
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["added_tokens"] += [{**token, "id": token["id"] + 100} for token in content["added_tokens"]]
    path.write_text(json.dumps(content))
    tokenizer = ChatTokenizer(str(folder))
    assert tokenizer.added_tokens == expected
    assert all(tokenizer.encode(text)[0].tolist() == [token_id] for text, token_id in expected.items())


# ---------------------------------------------------------------------------------------------------------------
# Rejected conversations


def refused(folder: Path, template: str, messages: list[dict[str, Any]], **settings: Any) -> BadChat:
    with pytest.raises(BadChat) as caught:
        marked(encoder_of(folder, Family(template, [], "", **settings)), messages)
    return caught.value


def test_template_that_changes_earlier_turns_is_rejected(tmp_path: Path) -> None:
    error = refused(tmp_path, QWEN3, conversation("Hi", "Yes", "Bye", "No"))
    assert "messages[1]" in str(error)
    assert (error.key, error.legal) == ("data.train_on", "last")


def test_template_that_omits_a_turn_is_rejected(tmp_path: Path) -> None:
    silent = CHATML.replace("for m in messages", "for m in messages if m.role != 'system'")
    assert "messages[0].role='system'" in str(refused(tmp_path, silent, conversation("Hi", "Yes", system="Be brief")))
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "weather", "arguments": {}}}]}
    assert "messages[1].tool_calls" in str(refused(tmp_path, CHATML, [*conversation("Hi"), call]))


def test_turn_without_an_end_marker_is_rejected(tmp_path: Path) -> None:
    """Also a turn that ends with white space only, which an answer may contain: generation would never stop."""
    for end in ("", "\n", "\n\n", " ", "\t"):
        endless = f"{{% for m in messages %}}{{{{ m.role + ' ' + m.content + {end!r} }}}}{{% endfor %}}"
        for chat in (conversation("Hi", "Yes"), conversation("Hi", "Yes", "Bye", "No")):
            assert "does not end this turn with a token" in str(refused(tmp_path, endless, chat)), repr(end)


def test_answer_that_resembles_an_end_of_turn(tmp_path: Path) -> None:
    """`>` is also the last character of `<|im_end|>`."""
    for template in (CHATML, FAMILIES["llama3"].template):
        family = Family(template, [], "")
        tokens = marked(encoder_of(tmp_path, family), conversation("Hi", ">", "Bye", "|>"))
        end = "<|im_end|>" if template == CHATML else "<|eot_id|>"
        assert [text for text, is_trained in tokens if is_trained] == [">", end, "|", ">", end]


def test_error_raised_by_a_template_is_shown(tmp_path: Path) -> None:
    gemma = FAMILIES["gemma"].template
    assert "System role not supported" in str(refused(tmp_path, gemma, conversation("Hi", "Yes", system="Be brief")))


def test_a_template_runs_in_a_sandbox(tmp_path: Path) -> None:
    escape = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    assert "unsafe" in str(refused(tmp_path, escape, conversation("Hi", "Yes")))


# ---------------------------------------------------------------------------------------------------------------
# Targets


def test_roles_that_are_trained_on(tmp_path: Path) -> None:
    chatml = FAMILIES["chatml"]
    for train_on, trained in {"last": 4, "completion": 4, "assistant": 8, "all": len(chatml.truth)}.items():
        encoder = encoder_of(tmp_path, dataclasses.replace(chatml, train_on=train_on))
        assert sum(is_trained for _, is_trained in marked(encoder, chatml.messages)) == trained
    light = [{**message, "weight": 0} if message["content"] == "Bye now" else message for message in chatml.messages]
    for train_on, trained in {"last": 0, "completion": 0, "assistant": 4, "all": len(chatml.truth) - 4}.items():
        encoder = encoder_of(tmp_path, dataclasses.replace(chatml, train_on=train_on))
        assert sum(is_trained for _, is_trained in marked(encoder, light)) == trained
    quiet = [{**message, "weight": 0} if message["role"] == "user" else message for message in chatml.messages]
    ignored = ["".join(text for text, is_trained in marked(encoder, quiet) if not is_trained)]
    assert ignored == ["<|im_start|>user\nHi<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"]


def test_end_of_turn_outside_generation_tags_is_a_target(tmp_path: Path) -> None:
    outside = GENERATION.replace("m.content + '<|im_end|>\n' }}{% endgen", "m.content }}{% endgen").replace(
        "{% endgeneration %}", "{% endgeneration %}{{ '<|im_end|>\n' }}"
    )
    case = FAMILIES["generation"]
    assert marked(encoder_of(tmp_path, dataclasses.replace(case, template=outside)), case.messages) == case.truth


def test_special_tokens_spelled_in_a_message_are_text(tmp_path: Path) -> None:
    """A special token spelled in a message does not end the turn, and the text around it is trained on unchanged."""
    tokens = marked(encoder_of(tmp_path, FAMILIES["chatml"]), conversation("Hi<|im_end|>", "Yes<|im_end|>No"))
    texts = [text for text, _ in tokens]
    assert texts.count("<|im_end|>") == 2
    trained = [text for text, is_trained in tokens if is_trained]
    assert trained == ["Yes", *"<|", "im_end", *"|>", "No", "<|im_end|>"]


# ---------------------------------------------------------------------------------------------------------------
# Files


ANSWERED = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
TOO_LONG = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes " * 40}]

# The third line of a file, further settings, and text that the error message must contain.
BAD = {
    "not JSON": ("{", [], ["data.path=", "chats.jsonl:3: is not JSON"]),
    "no object": ("[]", [], ["data.path=", "chats.jsonl:3: must be a JSON object, not a list"]),
    "another format": ({"text": "Hi"}, [], ["data.columns=", "chats.jsonl:3: has no key 'messages'; its keys: text"]),
    "no list": ({"messages": "Hi"}, [], ["data.path=", "chats.jsonl:3: messages must be a list of messages, not text"]),
    "no message": ({"messages": []}, [], ["data.path=", "chats.jsonl:3: messages=[] has no messages"]),
    "no role": ({"messages": [{"content": "Hi"}]}, [], ["data.path=", "chats.jsonl:3: messages[0] has no 'role'"]),
    "unknown role": (
        {"messages": [*ANSWERED, {"role": "bot", "content": "Hi"}]},
        [],
        ["data.path=", "chats.jsonl:3: messages[2].role='bot'; nearest: assistant"],
    ),
    "null": ({"messages": None}, [], ["data.path=", "chats.jsonl:3: 'messages' is null", "remove the record"]),
    "too deep": (f'{{"messages": {"[" * 200_000}{"]" * 200_000}}}', [], ["data.path=", "chats.jsonl:3: is not JSON"]),
    "deeper than a template reads": (
        f'{{"messages": [{{"role": "user", "content": "Hi", "name": {"[" * 700}{"]" * 700}}}]}}',
        [],
        ["data.path=", "chats.jsonl:3: is nested too deeply"],
    ),
    "no content": ({"messages": [{"role": "user"}]}, [], ["data.path=", "chats.jsonl:3: messages[0] has no 'content'"]),
    "empty content": (
        {"messages": [*ANSWERED[:1], {"role": "assistant", "content": " "}]},
        [],
        ["data.path=", "chats.jsonl:3: messages[1].content=' ' is empty"],
    ),
    "content that is no text": (
        {"messages": [{"role": "user", "content": 5}]},
        [],
        ["data.path=", "chats.jsonl:3: messages[0].content must be text, not a number"],
    ),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        [],
        ["data.path=", "chats.jsonl:3: messages[0].content[0].type='image': only text"],
    ),
    "tools without support": (
        {"messages": ANSWERED, "tools": [{"name": "weather"}]},
        [],
        ["data.chat_template=model: chats.jsonl:3: has tools, which the chat template does not support"],
    ),
    "calls without support": (
        {"messages": [*ANSWERED[:1], {"role": "assistant", "tool_calls": [{"function": {"name": "weather"}}]}]},
        [],
        ["data.chat_template=model: chats.jsonl:3: messages[1].tool_calls"],
    ),
    "reasoning without a place": (
        {"messages": [*ANSWERED[:1], {**ANSWERED[1], "reasoning_content": "hm"}]},
        [],
        ["data.chat_template=model: chats.jsonl:3: messages[1].reasoning_content: the chat template does not support"],
    ),
    "a system prompt beside the messages": (
        {"messages": ANSWERED, "system": "You are a pirate."},
        [],
        ["data.path=", "chats.jsonl:3: has the key 'system' next to 'messages'", "the first message"],
    ),
    "two formats in one file": (
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}]},
        [],
        [
            "data.path=",
            "chats.jsonl:3: has no key 'messages'",
            "the format sharegpt, while the first record has the format messages",
            "make each format a source of a mixture",
        ],
    ),
    "a call of nothing": (
        {"messages": [*ANSWERED[:1], {"role": "assistant", "tool_calls": [{"function": {}}]}]},
        [],
        ["data.path=", "chats.jsonl:3: messages[1].tool_calls[0] does not name a function"],
    ),
    "weight": (
        {"messages": [*ANSWERED[:1], {**ANSWERED[1], "weight": 2}]},
        [],
        ["data.path=", "chats.jsonl:3: messages[1].weight=2 must be 0 or 1"],
    ),
    "nothing to train on": (
        {"messages": ANSWERED[:1]},
        [],
        ["data.path=", "25.0% of 4 conversations have no targets, more than 1%: chats.jsonl:3"],
    ),
    "too long": (
        {"messages": TOO_LONG},
        ["data.too_long=error"],
        ["data.seq_len=32: chats.jsonl:3: has 91 tokens, but a sequence fits only 33", "data.seq_len=90"],
    ),
}


def write_lines(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(f"{record if isinstance(record, str) else json.dumps(record)}\n" for record in records))
    return path


@pytest.fixture(autouse=True)
def _nothing_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every run that is not rejected fail at once."""
    monkeypatch.setattr(run, "run_trainer", lambda *given: pytest.fail("nothing was wrong"))


def chat_settings(folder: Path, *settings: str) -> list[str]:
    return [
        "recipe=llama_small",
        "model.vocab_size=512",
        "data.source=chat",
        "data.seq_len=32",
        f"data.cache_dir={folder / 'cache'}",
        f"run.dir={folder / 'run'}",
        *settings,
    ]


@pytest.mark.parametrize("kind", list(BAD))
def test_bad_chat_is_rejected_with_its_line_and_setting(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record, settings, expected = BAD[kind]
    good = {"messages": ANSWERED}
    path = write_lines(tmp_path / "chats.jsonl", [good, good, record, good])
    folder = write_tokenizer(tmp_path / "model", CHATML)
    assert run.main(chat_settings(tmp_path, f"data.path={path}", f"data.tokenizer={folder}", *settings)) == 2
    stdout, stderr = capsys.readouterr()
    assert (stdout, stderr.count("error:")) == ("", 1)
    assert all(text in stderr for text in expected), stderr
    assert not (tmp_path / "run").exists()
    assert not list((tmp_path / "cache").glob("*chat*")), "nothing is left behind"


MISTAKES = {
    "no file": (["data.path=/nowhere/chats.jsonl"], ["data.path=/nowhere/chats.jsonl", "no such file"]),
    "no path": ([], ["data.path=null", "chats.jsonl"]),
    "no template": (["data.path={chats}", "data.tokenizer={bare}"], ["data.chat_template=model", ".jinja"]),
    "template that is not there": (["data.path={chats}", "data.chat_template=a.jinja"], ["data.chat_template=a.jinja"]),
    "template that is none": (["data.path={chats}", "data.chat_template={broken}"], ["data.chat_template=", "line 1"]),
    "tokenizer of no model": (["data.path={chats}", "data.tokenizer=model"], ["data.tokenizer=model", "model.path"]),
    "columns without spaces": (
        ["data.path={chats}", "data.columns={prompt:question, completion:answer}"],
        ["data.columns=", "did you mean 'data.columns={prompt: question, completion: answer}'?"],
    ),
    "columns that are a name": (
        ["data.path={chats}", "data.columns=question"],
        ["for example: 'data.columns={messages: dialog}'"],
    ),
    "keys of no format": (
        ["data.path={asked}"],
        ["data.format=auto", "its keys: question, answer", "data.columns='{prompt: question, completion: answer}'"],
    ),
    "columns of too few keys": (["data.path={asked}", "data.columns={prompt: question}"], ["data.columns=", "formats"]),
    "unknown column": (["data.path={chats}", "data.columns={message: a}"], ["data.columns=", "messages"]),
    "key without chats": (["data.source=stdlib", "data.train_on=last"], ["data.train_on=last", "data.source=chat"]),
    "steps and epochs": (["data.path={chats}", "train.steps=2", "train.epochs=1"], ["train.epochs=1", "train.steps=2"]),
    "everything held out": (
        ["data.path={chats}", "data.holdout=0.999"],
        ["data.holdout=0.999: leaves no conversations to train on"],
    ),
    "vocabulary too small": (["data.path={chats}", "model.vocab_size=40"], ["model.vocab_size=40", "=1"]),
}


@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_wrong_settings_for_chats(mistake: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = {
        "chats": write_lines(tmp_path / "chats.jsonl", [{"messages": ANSWERED}]),
        "asked": write_lines(tmp_path / "asked.jsonl", [{"question": "Hi", "answer": "Yes"}]),
        "bare": write_tokenizer(tmp_path / "bare", None),
        "broken": write_lines(tmp_path / "broken.jinja", ["{% for %}"]),
    }
    settings, expected = MISTAKES[mistake]
    for name, place in places.items():
        settings = [setting.replace(f"{{{name}}}", str(place)) for setting in settings]
    folder = write_tokenizer(tmp_path / "model", CHATML)
    assert run.main(merged(chat_settings(tmp_path, f"data.tokenizer={folder}"), settings)) == 2
    stderr = capsys.readouterr().err
    assert stderr.count("error:") == 1
    assert all(text in stderr for text in expected), stderr


def test_pairs_are_rejected_without_a_preference_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_lines(tmp_path / "pairs.jsonl", [{"prompt": "Hi", "chosen": "Yes", "rejected": "No"}])
    folder = write_tokenizer(tmp_path / "model", CHATML)
    assert run.main(chat_settings(tmp_path, f"data.path={path}", f"data.tokenizer={folder}")) == 2
    assert "data.format=preference: rejected responses would be trained on" in capsys.readouterr().err


def data_of(folder: Path, records: list[Any], **settings: Any) -> DataSection:
    path = write_lines(folder / "chats.jsonl", records)
    defaults = {"tokenizer": str(write_tokenizer(folder / "model", CHATML)), "cache_dir": str(folder / "cache")}
    return DataSection(source="chat", seq_len=64, **{"path": str(path), **defaults, **settings})


def trained_texts(source: Source, data: DataSection) -> list[str]:
    """Return the decoded targets of each sample."""
    tokenizer = ChatTokenizer(data.tokenizer)
    targets = as_mapping(source.batch(np.arange(len(source))))["targets"]
    return ["".join(map(tokenizer.token_text, row[row != IGNORE].tolist())) for row in targets]


def test_sources_of_a_mixture_may_have_different_formats(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}]
    messages = write_lines(tmp_path / "messages.jsonl", [{"messages": conversation("Hi", "Yes")}] * 40)
    sharegpt = write_lines(tmp_path / "sharegpt.jsonl", [{"conversations": turns}] * 40)
    data = data_of(tmp_path, [], path={"a": str(messages), "b": str(sharegpt)})
    mixture = open_source(data, None, "train")
    first, second = (trained_texts(source, data) for source in mixture.sources.values())  # type: ignore[attr-defined]
    assert first == second
    assert first[0].startswith("Yes<|im_end|>")


CALL = {"from": "function_call", "value": '{"name": "weather", "arguments": {}}'}
FORMATS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "messages": ({"messages": conversation("Hi", "Yes", "Bye", "No")}, ["Yes<|im_end|>No<|im_end|>"]),
    "parts": ({"messages": [*ANSWERED[:1], {"role": "assistant", "content": [{"type": "text", "text": "No"}]}]},
              ["No<|im_end|>"]),
    "sharegpt": ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}],
                  "system": "Be brief"}, ["Yes<|im_end|>"]),
    "alpaca": ({"instruction": "Sum", "input": "two and two", "output": "four", "history": [["Hi", "Yes"]]},
               ["Yes<|im_end|>four<|im_end|>"]),
    "completion": ({"prompt": "two and two is", "completion": " four"}, [" four</s>"]),
    "completion of messages": ({"prompt": conversation("Hi", "Yes", "Bye"), "completion": conversation("a", "No")[1:]},
                               ["No<|im_end|>"]),
    "preference": ({"prompt": "Hi", "chosen": [{"role": "assistant", "content": "Yes"}],
                    "rejected": [{"role": "assistant", "content": "No"}]}, ["Yes<|im_end|>", "No<|im_end|>"]),
    "preference of texts": ({"prompt": "Hi", "chosen": " Yes", "rejected": " No"}, [" Yes</s>", " No</s>"]),
    "preference of chats": (
        {"chosen": conversation("Hi", "Yes", "Bye", "now"), "rejected": conversation("Hi", "Yes", "Bye", "so")},
        ["now<|im_end|>", "so<|im_end|>"]),
    "a prompt said again, behind a system message": (
        {"prompt": "Hi",
         "chosen": conversation("Hi", "Yes", system="Be brief"),
         "rejected": conversation("Hi", "No", system="Be brief")},
        ["Yes<|im_end|>", "No<|im_end|>"]),
    "a prompt said again, with other white space": (
        {"prompt": "Hi", "chosen": conversation("Hi ", "Yes"), "rejected": conversation("Hi ", "No")},
        ["Yes<|im_end|>", "No<|im_end|>"]),
    "a prompt that is the last of several": (
        {"prompt": "Bye", "chosen": conversation("Hi", "Yes", "Bye", "now"),
         "rejected": conversation("Hi", "Yes", "Bye", "so")},
        ["now<|im_end|>", "so<|im_end|>"]),
    "a prompt said again, with a null": (
        {"prompt": conversation("Hi"), "completion": [{**ANSWERED[0], "name": None}, ANSWERED[1]]}, ["Yes<|im_end|>"]),
    "an excluded turn of ShareGPT": (
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes", "weight": 0},
                           {"from": "human", "value": "Bye"}, {"from": "gpt", "value": "No"}]}, ["No<|im_end|>"]),
    "ShareGPT with roles": ({"conversations": ANSWERED}, ["Yes<|im_end|>"]),
}  # fmt: skip


@pytest.mark.parametrize("kind", list(FORMATS))
def test_formats(kind: str, tmp_path: Path) -> None:
    record, expected = FORMATS[kind]
    data = data_of(tmp_path, [record])
    source = open_source(data, None, "train")
    assert trained_texts(source, data) == expected
    first = as_mapping(source.batch(np.arange(1)))["tokens"][0].tolist()
    said_first = "".join(map(ChatTokenizer(data.tokenizer).token_text, first)).partition("<|im_start|>assistant")[0]
    assert said_first.count("Hi") <= 1, "nothing is said twice"
    again = open_source(dataclasses.replace(data, tokenizer=data.tokenizer), None, "train")
    assert again.fingerprint == source.fingerprint, "from the cache"


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"prompt": "Hi", "chosen": "Yes", "rejected": "Yes"}, "chosen and rejected are identical"),
        ({"prompt": "Hi", "chosen": 5, "rejected": "No"}, "chosen must be text or a list of messages, not a number"),
        (
            {"prompt": "Hi", "chosen": conversation("Bye", "No"), "rejected": "No"},
            "chosen begins with a user message, but does not",
        ),
        (
            {"chosen": conversation("Hi", "Yes"), "rejected": conversation("Bye", "No")},
            "chosen and rejected must have the same",
        ),
    ],
)
def test_invalid_pairs(record: dict[str, Any], says: str, tmp_path: Path) -> None:
    good = {"prompt": "Hi", "chosen": "Yes", "rejected": "No"}
    with pytest.raises(UserError, match=f"^data\\.path=.*chats.jsonl:2: {says}"):
        open_source(data_of(tmp_path, [good, record]), None, "train")


def test_history_that_is_not_a_list_is_rejected(tmp_path: Path) -> None:
    record = {"instruction": "Hi", "output": "Yes", "history": 5}
    with pytest.raises(UserError, match=r"chats.jsonl:1: history must be a list of .*, not a number"):
        open_source(data_of(tmp_path, [record]), None, "train")


def test_invalid_text_in_parquet_is_rejected_with_its_row(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="parquet is read with the library `pyarrow`")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = pyarrow.array([b"Hi", b"Bye", b"\xff"]).view(pyarrow.string())
    table = pyarrow.table({"prompt": texts, "completion": pyarrow.array(["Yes", "No", "now"])})
    parquet.write_table(table, tmp_path / "chats.parquet")
    data = dataclasses.replace(data_of(tmp_path, []), path=str(tmp_path / "chats.parquet"))
    with pytest.raises(UserError, match=r"^data\.path=.*: chats\.parquet:3: is not UTF-8"):
        open_source(data, None, "train")


def test_custom_columns_and_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="parquet is read with the library `pyarrow`")
    parquet = pytest.importorskip("pyarrow.parquet")
    chats = [{"dialog": conversation("Hi", "Yes")}, {"dialog": conversation("Bye", "No", system="Be brief")}]
    data = data_of(tmp_path, chats, columns={"messages": "dialog"}, pack=False)
    parquet.write_table(pyarrow.Table.from_pylist(chats), tmp_path / "chats.parquet")
    from_parquet = dataclasses.replace(data, path=str(tmp_path / "chats.parquet"))
    for each in (data, from_parquet):
        assert trained_texts(open_source(each, None, "train"), each) == ["Yes<|im_end|>", "No<|im_end|>"]


def test_long_chats_are_dropped_or_truncated_and_empty_ones_named(tmp_path: Path) -> None:
    short, long, mute = {"messages": ANSWERED}, {"messages": TOO_LONG}, {"messages": ANSWERED[:1]}
    records = [short] * 148 + [long, mute]
    for too_long, samples, lost, trained in (("drop", 148, 91, 148 * 2), ("truncate", 149, 91 - 65, 148 * 2 + 65 - 9)):
        data = data_of(tmp_path, records, too_long=too_long, pack=False)
        source = open_source(data, None, "train")
        assert isinstance(source, ChatSource)
        assert len(source) == samples
        assert source.report.unused == ["chats.jsonl:150"]
        everything, kept, shares = 148 * 12 + 91, 148 * 12 + 91 - lost, source.report.shares
        assert shares["dropped_share" if too_long == "drop" else "truncated_share"] == lost / everything
        assert shares["trained_share"] == trained / kept, "of what is trained on"


def test_a_run_that_would_drop_most_of_the_data_does_not_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless the user allows dropping, or truncates; the message suggests a length that keeps the conversations."""
    path = write_lines(tmp_path / "chats.jsonl", [{"messages": ANSWERED}] * 4 + [{"messages": TOO_LONG}] * 6)
    folder = write_tokenizer(tmp_path / "model", CHATML)
    settings = chat_settings(tmp_path, f"data.path={path}", f"data.tokenizer={folder}")
    assert run.main(settings) == 2
    stderr = capsys.readouterr().err
    assert "data.seq_len=32: 6 of 10 conversations (91.9% of the tokens) are longer than a sequence" in stderr
    assert all(text in stderr for text in ("data.seq_len=128 keeps them all", "data.too_long=drop", "=truncate"))
    config = load_config(settings[0].partition("=")[2], settings[1:])
    for too_long in ("drop", "truncate"):
        data = dataclasses.replace(config.data, too_long=too_long)
        assert open_source(data, None, "train").facts["trained_share"] == pytest.approx(
            2 / 12 if too_long == "drop" else 0.7, abs=0.1
        )
    assert len(open_source(dataclasses.replace(config.data, seq_len=128), None, "train")) > 0


def test_a_run_from_before_auto_is_resumed(tmp_path: Path) -> None:
    """Its configuration has data.too_long=drop, the default at that time, even for data other than chats."""
    chats = load_config("llama_small", chat_settings(tmp_path, "data.path=chats.jsonl")[1:])
    text = load_config("llama_small", [f"run.dir={tmp_path / 'run'}"])
    for config in (chats, text):
        stored = config.to_yaml().replace("too_long: auto", "too_long: drop")
        assert stored != config.to_yaml()
        assert compare_configs(config, stored) == ([], [])
        assert compare_configs(config, stored.replace("too_long: drop", "too_long: truncate"))[0]
    check_config(dataclasses.replace(text, data=dataclasses.replace(text.data, too_long="drop")), 1, 1)


def test_a_run_that_drops_some_of_the_data_warns(tmp_path: Path) -> None:
    """It drops more than the exceptional few; of the suggested lengths, the shorter one keeps most conversations."""
    longer = [{"messages": [ANSWERED[0], {"role": "assistant", "content": "Yes " * number}]} for number in (40, 400)]
    data = data_of(tmp_path, [{"messages": ANSWERED}] * 160 + longer[:1] * 4 + longer[1:])
    source = open_source(data, None, "train")
    first, warning = source.summary.splitlines()
    assert first.startswith("165 conversations, 16.7% of the tokens are targets, 5 dropped as too long (")
    assert warning.startswith("warning: 5 of 165 conversations (")
    assert warning.endswith("are not trained on; data.seq_len=128 keeps 95% of them, and data.seq_len=832 all")
    few = dataclasses.replace(data_of(tmp_path, [{"messages": ANSWERED}] * 999 + longer[:1]))
    assert "warning" not in open_source(few, None, "train").summary


def test_pairs_and_held_out_chats_are_dropped_like_chats(tmp_path: Path) -> None:
    answers = [{"chosen": "Yes", "rejected": "No"}] * 4 + [{"chosen": "Yes " * 40, "rejected": "No"}] * 6
    data = data_of(tmp_path, [{"prompt": "Hi", **answer} for answer in answers])
    with pytest.raises(UserError, match=r"data\.seq_len=64: 6 of 10 pairs"):
        open_source(data, None, "train")
    short = data_of(tmp_path, [{"messages": ANSWERED}] * 4)
    chats = write_lines(tmp_path / "held_out.jsonl", [{"messages": TOO_LONG}] * 2 + [{"messages": ANSWERED}])
    with pytest.raises(UserError, match=r"2 of 3 conversations .* of data\.eval_path are longer"):
        open_source(dataclasses.replace(short, eval_path=str(chats)), None, "eval")


def test_unusual_properties_of_chats_are_reported(tmp_path: Path) -> None:
    """Plain text without a template, a template applied twice, a generated header, turns that end in text."""

    def lines_of(template: str | None, *records: dict[str, Any], **settings: Any) -> list[str]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        model = write_tokenizer(folder / "own", template)
        return open_source(
            data_of(folder, list(records), tokenizer=str(model), **settings), None, "train"
        ).summary.splitlines()[1:]

    chat, plain = {"messages": ANSWERED}, {"prompt": "Hi", "completion": " Yes"}
    assert lines_of(CHATML, chat) == []
    assert lines_of(None, plain) == []
    (line,) = lines_of(CHATML, plain, plain)
    assert line.startswith("note: 2 conversations are plain text and used without the chat template")
    twice = {"messages": conversation("<|im_start|>user\nHi<|im_end|>", "Yes")}
    (line,) = lines_of(CHATML, chat, twice, chat, twice)
    assert line.startswith("warning: 2 conversations spell out <|im_")
    assert "(chats.jsonl:2, chats.jsonl:4)" in line
    assert lines_of(CHATML, {"messages": conversation("What is [INST]?", "Yes")}) == [], (
        "a token that the template never writes"
    )
    (line,) = lines_of(None, {"prompt": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "completion": "Yes"})
    assert "1 conversations spell out <|im_start|>" in line
    (line,) = lines_of(CHATML.partition("\n{% if add_generation_prompt")[0], chat)
    assert line.startswith(
        "the chat template ignores add_generation_prompt: the model learns to write '<|im_start|>assi"
    )
    (line,) = lines_of(CHATML.replace("<|im_end|>", " now"), chat)
    assert line.startswith("warning: the chat template ends turns with 'now', which is not a single token")
    (line,) = lines_of("{% for m in messages %}{{ m.role + ':' + m.content + '</s>' }}{% endfor %}", chat)
    assert "'assistant:'" in line


def test_each_conversation_is_packed_once_and_held_out_by_content(tmp_path: Path) -> None:
    records = [{"messages": conversation(f"{a} {b}", "Yes " * a)} for a in range(1, 6) for b in range(1, 6)]
    data = data_of(tmp_path, records, holdout=0.2)
    train, held_out = open_source(data, None, "train"), open_source(data, None, "eval")
    assert held_out is not None
    found_rows = as_mapping(train.batch(np.arange(len(train))))
    own = [
        np.sum(row == number)
        for row, targets in zip(found_rows["documents"], found_rows["targets"], strict=True)
        for number in np.unique(row)
        if np.any(targets[row == number] != IGNORE)
    ]
    assert train.attended == np.square(own).sum() / found_rows["tokens"].size
    alone = open_source(dataclasses.replace(data, pack=False, holdout=0.0), None, "train")
    found = [text for source in (train, held_out) for text in trained_texts(source, data)]
    ends = "<|im_end|>"
    assert sorted("".join(found).split(ends)) == sorted("".join(trained_texts(alone, data)).split(ends))
    other = data_of(tmp_path, list(reversed(records)), holdout=0.2)
    again = open_source(other, None, "eval")
    assert again is not None
    assert sorted("".join(trained_texts(again, data))) == sorted("".join(trained_texts(held_out, data)))


def test_duplicates_of_held_out_chats_are_not_trained_on(tmp_path: Path) -> None:
    """A tiny `holdout` holds out one distinct conversation, the one with the lowest hash, with all its duplicates."""
    records = [{"messages": conversation(f"{a} {b}", "Yes")} for a in range(1, 6) for b in range(1, 4)]
    for number, order in enumerate((records * 2, [record for record in records for _ in range(2)])):
        (tmp_path / str(number)).mkdir()
        data = data_of(tmp_path / str(number), order, holdout=1e-9, pack=False)
        train, held_out = open_source(data, None, "train"), open_source(data, None, "eval")
        assert held_out is not None
        assert (len(train), len(held_out)) == (28, 2)
        rows = [as_mapping(source.batch(np.arange(len(source))))["tokens"].tolist() for source in (train, held_out)]
        assert not any(row in rows[0] for row in rows[1])
    (tmp_path / "alike").mkdir()
    alike = data_of(tmp_path / "alike", records[:1] * 4, holdout=0.1, pack=False)
    assert len(open_source(alike, None, "train")) == 4
    assert open_source(alike, None, "eval") is None, "there is nothing but twins"


def test_best_fit_wastes_at_most_two_percent() -> None:
    lengths = np.random.default_rng(0).integers(1, 33, 500)
    order, starts = best_fit(lengths, 64)
    assert sorted(order.tolist()) == list(range(500))
    filled = np.add.reduceat(lengths[order], starts[:-1])
    assert filled.max() <= 64
    assert len(filled) <= 1.02 * lengths.sum() / 64


def test_show_marks_targets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = [{"from": "human", "value": "weather ?"}, CALL, {"from": "observation", "value": "sunny"}]
    chat = {"conversations": [*call, {"from": "gpt", "value": "It is sunny"}]}
    path = write_lines(tmp_path / "chats.jsonl", [chat, chat, chat])
    folder = write_tokenizer(tmp_path / "model", FAMILIES["tools"].template)
    assert prepare.command_line([str(path), "--tokenizer", str(folder), "--show", "2"]) == 0
    shown = capsys.readouterr().out
    assert "chats.jsonl:2" in shown
    assert "chats.jsonl:3" not in shown
    assert '⟪<tool_call>{"name": "weather", "arguments": {}}</tool_call><|im_end|>⟫' in shown
    assert "<|im_start|>assistant\n⟪It is sunny<|im_end|>⟫\n" in shown
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["chats.jsonl", "model"]


def test_show_marks_the_last_token_if_it_is_the_only_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [
        ({"prompt": "weather ?", "completion": "It is sunny"}, Completion("weather ?", "It is sunny")),
        ({"messages": ANSWERED}, Conversation(ANSWERED)),
    ]
    folder = write_tokenizer(tmp_path / "model", CHATML)
    encoder = Encoder(ChatTokenizer(str(folder)), find_template("model", str(folder)), "end")
    for record, sample in records:
        path = write_lines(tmp_path / "records.jsonl", [record])
        given = [str(path), "--tokenizer", str(folder), "--train-on", "end", "--show", "1"]
        assert prepare.command_line(given) == 0
        shown = capsys.readouterr().out
        (target,) = re.findall("⟪(.*?)⟫", shown, re.DOTALL)
        assert target == encoder.tokenizer.token_text(int(encoder.encode(sample).ids[-1]))


def test_row_length_is_limited_by_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_lines(tmp_path / "chats.jsonl", [{"messages": ANSWERED}])
    folder = write_tokenizer(tmp_path / "model", CHATML)
    gpt2 = ["model.max_seq_len=24", "model.vocab_size=512", "data.source=chat", f"data.path={path}"]
    settings = [*gpt2, f"data.tokenizer={folder}", f"run.dir={tmp_path / 'run'}"]
    assert load_config("gpt2", settings).data.seq_len == 24
    assert run.main(["recipe=gpt2", *settings, "data.seq_len=48"]) == 2
    assert "data.seq_len=24" in capsys.readouterr().err
