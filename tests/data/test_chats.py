"""Chats: the loss mask of every token, refused conversations, formats of files, packing, and what is said of them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.chats import CHATML, FAMILIES, GENERATION, QWEN3, Family, conversation, write_tokenizer
from tests.helpers.commands import meshtrainer
from tests.helpers.data import read_all, write_records
from trainer import UserError, load_config
from trainer.config.rules import check_config
from trainer.config.schema import DataSection
from trainer.data.opening import open_source, resolve_from_data
from trainer.data.source import IGNORE, Source

tokenizers = pytest.importorskip("tokenizers", reason="a chat model's tokenizer is read with the library `tokenizers`")

Marked = list[tuple[str, bool]]
"""The text of each token, and whether it is trained on."""


def data_of(folder: Path, records: list[Any], **settings: Any) -> DataSection:
    """Return the data settings for a file of chats."""
    path = write_records(folder / "chats.jsonl", records)
    defaults = {"path": str(path), "cache_dir": str(folder / "cache"), "seq_len": 64}
    if "tokenizer" not in settings:
        settings["tokenizer"] = str(write_tokenizer(folder / "model", CHATML))
    return DataSection(source="chat", **{**defaults, **settings})


def texts_of(data: DataSection) -> Any:
    """Return a function that gives the text of a token, by the library `tokenizers`."""
    return tokenizers.Tokenizer.from_file(f"{data.tokenizer}/tokenizer.json").id_to_token


def without_end(tokens: Marked) -> Marked:
    """Return tokens without those at the end that are not trained on: a sample need not hold them."""
    last = max((place for place, (_, is_trained) in enumerate(tokens) if is_trained), default=-1)
    return tokens[: last + 1]


def marked(folder: Path, family: Family, messages: Any = None, tools: Any = None, **settings: Any) -> Marked:
    """Return the tokens of a conversation up to the last that is trained on, as a run has them."""
    model = write_tokenizer(folder / "model", family.template, **family.config)
    record = {"messages": messages or family.messages, **({"tools": tools} if tools else {})}
    own = {"train_on": family.train_on, "seq_len": 256, "documents": "apart", **settings}
    data = data_of(folder, [record], tokenizer=str(model), **own)
    batch = read_all(open_source(data, None, "train"))
    (tokens,), (targets,), text = batch["tokens"], batch["targets"], texts_of(data)
    count = int(np.flatnonzero(targets != IGNORE)[-1]) + 1
    is_trained = [False, *(targets[:count] != IGNORE).tolist()]
    kept = targets[: count - 1] != IGNORE
    assert np.array_equal(targets[: count - 1][kept], tokens[1:count][kept]), "a target is the next token"
    ids = [*tokens[:count].tolist(), int(targets[count - 1])]
    return list(zip(map(text, ids), is_trained, strict=True))


# ---------------------------------------------------------------------------------------------------------------
# Which tokens are trained on


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_mask_equals_the_one_written_by_hand(family: str, tmp_path: Path) -> None:
    case = FAMILIES[family]
    assert marked(tmp_path, case, tools=case.tools) == without_end(case.truth)


def test_templates_are_rendered_as_transformers_renders_them(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    for name, case in FAMILIES.items():
        found = marked(tmp_path / name, case, tools=case.tools) if (tmp_path / name).mkdir() is None else []
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / name / "model")
        ids = theirs.apply_chat_template(case.messages, tools=case.tools or None, return_dict=False)
        text = tokenizers.Tokenizer.from_file(str(tmp_path / name / "model" / "tokenizer.json")).id_to_token
        assert [token for token, _ in found] == [text(number) for number in ids][: len(found)], name


def test_roles_that_are_trained_on(tmp_path: Path) -> None:
    chatml = FAMILIES["chatml"]

    def trained(messages: Any, train_on: str) -> int:
        return sum(is_trained for _, is_trained in marked(tmp_path, chatml, messages, train_on=train_on))

    # Of "all" the first token has no prediction.
    for train_on, count in {"last": 4, "completion": 4, "assistant": 8, "all": len(chatml.truth) - 1}.items():
        assert trained(chatml.messages, train_on) == count
    light = [{**message, "weight": 0} if message["content"] == "Bye now" else message for message in chatml.messages]
    for train_on, count in {"assistant": 4, "all": len(chatml.truth) - 1 - 4}.items():
        assert trained(light, train_on) == count
    quiet = [{**message, "weight": 0} if message["role"] == "user" else message for message in chatml.messages]
    ignored = ["".join(text for text, is_trained in marked(tmp_path, chatml, quiet, train_on="all") if not is_trained)]
    assert ignored == ["<|im_start|><|im_start|>user\nHi<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"]


def test_end_of_turn_outside_generation_tags_is_a_target(tmp_path: Path) -> None:
    outside = GENERATION.replace("m.content + '<|im_end|>\n' }}{% endgen", "m.content }}{% endgen").replace(
        "{% endgeneration %}", "{% endgeneration %}{{ '<|im_end|>\n' }}"
    )
    case = FAMILIES["generation"]
    assert marked(tmp_path, dataclasses.replace(case, template=outside)) == without_end(case.truth)


def test_special_tokens_spelled_in_a_message_are_text(tmp_path: Path) -> None:
    """A special token spelled in a message does not end the turn, and the text around it is trained on unchanged."""
    tokens = marked(tmp_path, FAMILIES["chatml"], conversation("Hi<|im_end|>", "Yes<|im_end|>No"))
    assert [text for text, _ in tokens].count("<|im_end|>") == 2
    assert [text for text, is_trained in tokens if is_trained] == [
        *("Yes", *"<|", "im_end", *"|>", "No", "<|im_end|>"),
    ]


def test_answer_that_resembles_an_end_of_turn(tmp_path: Path) -> None:
    """`>` is also the last character of `<|im_end|>`."""
    for template, end in ((CHATML, "<|im_end|>"), (FAMILIES["llama3"].template, "<|eot_id|>")):
        tokens = marked(tmp_path, Family(template, [], ""), conversation("Hi", ">", "Bye", "|>"))
        assert [text for text, is_trained in tokens if is_trained] == [">", end, "|", ">", end]


def test_a_token_that_the_file_lists_under_two_ids(tmp_path: Path) -> None:
    """It has the id as which it is encoded."""
    folder = write_tokenizer(tmp_path / "model", CHATML)
    data = data_of(tmp_path, [{"messages": conversation("Hi", "Yes")}], tokenizer=str(folder))
    before = read_all(open_source(data, None, "train"))["targets"]
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["added_tokens"] += [{**token, "id": token["id"] + 100} for token in content["added_tokens"]]
    path.write_text(json.dumps(content))
    assert np.array_equal(read_all(open_source(data, None, "train"))["targets"], before)


# ---------------------------------------------------------------------------------------------------------------
# Conversations and files that are refused

ANSWERED = conversation("Hi", "Yes")
TOO_LONG = conversation("Hi", "Yes " * 40)
CALL_ONLY = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "weather", "arguments": {}}}]}
SILENT = CHATML.replace("for m in messages", "for m in messages if m.role != 'system'")

TEMPLATES: dict[str, tuple[str, list[Any], list[str]]] = {
    "it changes earlier turns": (QWEN3, conversation("Hi", "Yes", "Bye", "No"), ["messages[1]", "data.train_on=last"]),
    "it omits a turn": (SILENT, conversation("Hi", "Yes", system="Be brief"), ["messages[0].role='system'"]),
    "it omits calls": (CHATML, [*conversation("Hi"), CALL_ONLY], ["messages[1].tool_calls"]),
    "it refuses": (
        FAMILIES["gemma"].template,
        conversation("Hi", "Yes", system="Be brief"),
        ["System role not supported"],
    ),
    **{
        f"a turn ends in {end!r}": (
            f"{{% for m in messages %}}{{{{ m.role + ' ' + m.content + {end!r} }}}}{{% endfor %}}",
            conversation("Hi", "Yes", "Bye", "No"),
            [],
        )
        for end in ("", "\n", " ")
    },
}
"""A template, a conversation that it cannot be used for, and what the message names.

A turn that ends in white space has no end: the model would never stop."""


@pytest.mark.parametrize("kind", TEMPLATES)
def test_template_that_does_not_fit_is_refused(kind: str, tmp_path: Path) -> None:
    template, messages, named = TEMPLATES[kind]
    with pytest.raises(UserError) as caught:
        marked(tmp_path, Family(template, messages, ""))
    assert all(words in str(caught.value) for words in [*named, "chats.jsonl:1"])


BAD: dict[str, tuple[Any, str, list[str]]] = {
    "not JSON": ("{", "data.path=", []),
    "no object": ("[]", "data.path=", []),
    "too deep": (f'{{"messages": {"[" * 200_000}{"]" * 200_000}}}', "data.path=", []),
    "deeper than a template reads": (
        f'{{"messages": [{{"role": "user", "content": "Hi", "name": {"[" * 700}{"]" * 700}}}]}}',
        "data.path=",
        [],
    ),
    "another format": ({"text": "Hi"}, "data.columns=", ["messages", "text"]),
    "two formats in one file": (
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}]},
        "data.path=",
        ["messages", "sharegpt"],
    ),
    "null": ({"messages": None}, "data.path=", ["messages"]),
    "no list": ({"messages": "Hi"}, "data.path=", ["messages"]),
    "no message": ({"messages": []}, "data.path=", ["messages=[]"]),
    "no role": ({"messages": [{"content": "Hi"}]}, "data.path=", ["messages[0]", "role"]),
    "unknown role": (
        {"messages": [*ANSWERED, {"role": "bot", "content": "Hi"}]},
        "data.path=",
        ["messages[2].role='bot'", "assistant"],
    ),
    "no content": ({"messages": [{"role": "user"}]}, "data.path=", ["messages[0]", "content"]),
    "empty content": (
        {"messages": [*ANSWERED[:1], {"role": "assistant", "content": " "}]},
        "data.path=",
        ["messages[1].content=' '"],
    ),
    "content that is no text": ({"messages": [{"role": "user", "content": 5}]}, "data.path=", ["messages[0].content"]),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        "data.path=",
        ["messages[0].content[0].type='image'"],
    ),
    "tools without support": (
        {"messages": ANSWERED, "tools": [{"name": "weather"}]},
        "data.chat_template=model: ",
        ["tools"],
    ),
    "reasoning without a place": (
        {"messages": [*ANSWERED[:1], {**ANSWERED[1], "reasoning_content": "hm"}]},
        "data.chat_template=model: ",
        ["messages[1].reasoning_content"],
    ),
    "a system prompt beside the messages": ({"messages": ANSWERED, "system": "Be brief"}, "data.path=", ["system"]),
    "a call of nothing": (
        {"messages": [*ANSWERED[:1], {"role": "assistant", "tool_calls": [{"function": {}}]}]},
        "data.path=",
        ["messages[1].tool_calls[0]"],
    ),
    "weight": ({"messages": [*ANSWERED[:1], {**ANSWERED[1], "weight": 2}]}, "data.path=", ["messages[1].weight=2"]),
    "nothing to train on": ({"messages": ANSWERED[:1]}, "data.path=", ["25.0% of 4"]),
    "too long": ({"messages": TOO_LONG}, "data.seq_len=32: ", ["91", "data.seq_len=90"]),
}
"""The third line of a file, how the message begins, and what it names beside the line."""


@pytest.mark.parametrize("kind", BAD)
def test_bad_chat_is_refused_with_its_line_and_setting(kind: str, tmp_path: Path) -> None:
    record, beginning, named = BAD[kind]
    good = {"messages": ANSWERED}
    data = data_of(tmp_path, [good, good, record, good], seq_len=32, too_long="error")
    with pytest.raises(UserError) as caught:
        open_source(data, None, "train")
    message = str(caught.value)
    assert message.startswith(beginning)
    assert all(words in message for words in [*named, "chats.jsonl:3"]), message
    assert not list((tmp_path / "cache").rglob("*.bin")), "nothing is left behind"


PAIRS: dict[str, dict[str, Any]] = {
    "chosen": {"prompt": "Hi", "chosen": "Yes", "rejected": "Yes"},
    "chosen must": {"prompt": "Hi", "chosen": 5, "rejected": "No"},
    "chosen begins": {"prompt": "Hi", "chosen": conversation("Bye", "No"), "rejected": "No"},
    "rejected": {"chosen": conversation("Hi", "Yes"), "rejected": conversation("Bye", "No")},
    "history": {"instruction": "Hi", "output": "Yes", "history": 5},
}
"""Records with something wrong in the key with which their names begin."""


@pytest.mark.parametrize("kind", PAIRS)
def test_bad_record_of_another_format_is_refused_with_its_line(kind: str, tmp_path: Path) -> None:
    good = {"prompt": "Hi", "chosen": "Yes", "rejected": "No"}
    if kind == "history":
        good = {"instruction": "Hi", "output": "Yes"}
    with pytest.raises(UserError) as caught:
        open_source(data_of(tmp_path, [good, PAIRS[kind]]), None, "train")
    assert str(caught.value).startswith("data.path=")
    assert "chats.jsonl:2" in str(caught.value)
    assert kind.partition(" ")[0] in str(caught.value)


def test_bad_text_in_parquet_is_refused_with_its_row(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="parquet is read with the library `pyarrow`")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = pyarrow.array([b"Hi", b"Bye", b"\xff"]).view(pyarrow.string())
    table = pyarrow.table({"prompt": texts, "completion": pyarrow.array(["Yes", "No", "now"])})
    parquet.write_table(table, tmp_path / "chats.parquet")
    with pytest.raises(UserError) as caught:
        open_source(data_of(tmp_path, [], path=str(tmp_path / "chats.parquet")), None, "train")
    assert "chats.parquet:3" in str(caught.value)


def asked(folder: Path) -> str:
    return str(write_records(folder / "asked.jsonl", [{"question": "Hi", "answer": "Yes"}]))


MISTAKES: dict[str, tuple[dict[str, Any], str, str]] = {
    "no file": ({"path": "/nowhere/chats.jsonl"}, "data.path=/nowhere/chats.jsonl: ", ""),
    "no template": ({"tokenizer": "{bare}"}, "data.chat_template=model: ", "data.chat_template=chatml"),
    "keys of no format": ({"path": "{asked}"}, "data.format=auto: ", "data.columns='{prompt: question, completion: "),
    "columns of too few keys": ({"path": "{asked}", "columns": {"prompt": "question"}}, "data.columns=", ""),
    "unknown column": ({"columns": {"message": "a"}}, "data.columns=", "messages"),
}
"""Settings, how the message begins, and what it advises."""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_wrong_settings_for_chats(mistake: str, tmp_path: Path) -> None:
    settings, beginning, advice = MISTAKES[mistake]
    places = {"{asked}": asked(tmp_path), "{bare}": str(write_tokenizer(tmp_path / "bare", None))}
    own = {key: places.get(value, value) if isinstance(value, str) else value for key, value in settings.items()}
    with pytest.raises(UserError) as caught:
        open_source(data_of(tmp_path, [{"messages": ANSWERED}], **own), None, "train")
    assert str(caught.value).startswith(beginning)
    assert advice in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "beginning", "proposal"),
    [
        (["data.source=chat"], "data.path=null: ", None),
        (["data.source=chat", "data.path=x.jsonl", "data.tokenizer=model"], "data.tokenizer=model: ", None),
        (
            ["data.source=chat", "data.path=x.jsonl", "data.columns={prompt:question, completion:answer}"],
            "data.columns=",
            "data.columns={messages: dialog}",
        ),
        (["data.source=chat", "data.path=x.jsonl", "data.columns=question"], "data.columns=", None),
        (["data.source=stdlib", "data.train_on=last"], "data.train_on=last: ", None),
        (["data.source=chat", "data.path=x.jsonl", "train.steps=2", "train.epochs=1"], "train.epochs=1: ", None),
    ],
)
def test_settings_that_no_file_could_make_right(settings: list[str], beginning: str, proposal: str | None) -> None:
    with pytest.raises(UserError) as caught:
        check_config(load_config("llama_small", settings), 1, 1)
    assert str(caught.value).startswith(beginning)
    assert proposal is None or caught.value.proposal == proposal


def test_a_vocabulary_that_is_too_small(tmp_path: Path) -> None:
    data = data_of(tmp_path, [{"messages": ANSWERED}])
    size = tokenizers.Tokenizer.from_file(f"{data.tokenizer}/tokenizer.json").get_vocab_size()
    with pytest.raises(UserError) as caught:
        open_source(data, size - 1, "train")
    assert str(caught.value).startswith(f"model.vocab_size={size - 1}: ")
    assert f"model.vocab_size={size}" in str(caught.value)
    assert len(open_source(data, size, "train")) == 1


def test_pairs_are_refused_without_a_preference_loss(tmp_path: Path) -> None:
    data = data_of(tmp_path, [{"prompt": "Hi", "chosen": "Yes", "rejected": "No"}] * 9)
    own = ["data.source=chat", f"data.path={data.path}", f"data.tokenizer={data.tokenizer}", "model.vocab_size=512"]
    more = [f"data.cache_dir={data.cache_dir}", f"run.dir={tmp_path / 'run'}", "data.seq_len=32"]
    ended = meshtrainer("run", "recipe=llama_small", *own, *more)
    assert (ended.code, ended.out) == (2, "")
    assert "data.format=preference: " in ended.err
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------------------------------------------------------
# Formats


def trained_texts(source: Source, data: DataSection) -> list[str]:
    """Return the decoded targets of each row."""
    text = texts_of(data)
    return ["".join(map(text, row[row != IGNORE].tolist())) for row in read_all(source)["targets"]]


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


@pytest.mark.parametrize("kind", FORMATS)
def test_formats(kind: str, tmp_path: Path) -> None:
    record, expected = FORMATS[kind]
    data = data_of(tmp_path, [record])
    source = open_source(data, None, "train")
    assert trained_texts(source, data) == expected
    first = read_all(source)["tokens"][0].tolist()
    said_first = "".join(map(texts_of(data), first)).partition("<|im_start|>assistant")[0]
    assert said_first.count("Hi") <= 1, "nothing is said twice"
    assert open_source(data, None, "train").fingerprint == source.fingerprint, "from the cache"


def test_sources_of_a_mixture_may_have_different_formats(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}]
    messages = write_records(tmp_path / "messages.jsonl", [{"messages": conversation("Hi", "Yes")}] * 40)
    sharegpt = write_records(tmp_path / "sharegpt.jsonl", [{"conversations": turns}] * 40)
    data = data_of(tmp_path, [], path={"a": str(messages), "b": str(sharegpt)})
    mixture: Any = open_source(data, None, "train")
    first, second = (trained_texts(source, data) for source in mixture.sources.values())
    assert first == second
    assert first[0].startswith("Yes<|im_end|>")


def test_columns_of_ones_own_and_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="parquet is read with the library `pyarrow`")
    parquet = pytest.importorskip("pyarrow.parquet")
    chats = [{"dialog": conversation("Hi", "Yes")}, {"dialog": conversation("Bye", "No", system="Be brief")}]
    data = data_of(tmp_path, chats, columns={"messages": "dialog"}, documents="apart")
    parquet.write_table(pyarrow.Table.from_pylist(chats), tmp_path / "chats.parquet")
    for each in (data, dataclasses.replace(data, path=str(tmp_path / "chats.parquet"))):
        assert trained_texts(open_source(each, None, "train"), each) == ["Yes<|im_end|>", "No<|im_end|>"]


# ---------------------------------------------------------------------------------------------------------------
# Long conversations, and what is said of the data


def test_long_chats_are_dropped_or_truncated_and_empty_ones_named(tmp_path: Path) -> None:
    short, long, mute = {"messages": ANSWERED}, {"messages": TOO_LONG}, {"messages": ANSWERED[:1]}
    records = [short] * 148 + [long, mute]
    for too_long, samples, lost, trained in (("drop", 148, 91, 148 * 2), ("truncate", 149, 91 - 65, 148 * 2 + 65 - 9)):
        source = open_source(data_of(tmp_path, records, too_long=too_long, documents="apart"), None, "train")
        assert len(source) == samples
        assert "chats.jsonl:150" in source.summary
        everything, kept = 148 * 12 + 91, 148 * 12 + 91 - lost
        assert source.facts["dropped_share" if too_long == "drop" else "truncated_share"] == lost / everything
        assert source.facts["trained_share"] == trained / kept, "of what is trained on"


def test_data_of_which_most_would_be_dropped_are_refused(tmp_path: Path) -> None:
    """Unless the user allows dropping, or truncates; the message names a length that keeps the conversations."""
    data = data_of(tmp_path, [{"messages": ANSWERED}] * 4 + [{"messages": TOO_LONG}] * 6, seq_len=32)
    with pytest.raises(UserError) as caught:
        open_source(data, None, "train")
    assert str(caught.value).startswith("data.seq_len=32: 6 of 10 ")
    for advice in ("data.seq_len=128", "data.too_long=drop", "truncate"):
        assert advice in str(caught.value)
    for too_long, share in (("drop", 2 / 12), ("truncate", 0.7)):
        source = open_source(dataclasses.replace(data, too_long=too_long), None, "train")
        assert source.facts["trained_share"] == pytest.approx(share, abs=0.1)
    assert len(open_source(dataclasses.replace(data, seq_len=128), None, "train")) > 0


def test_dropping_some_of_the_data_is_said(tmp_path: Path) -> None:
    """If they are more than the exceptional few, with a length that keeps most, and one that keeps all."""
    longer = [{"messages": conversation("Hi", "Yes " * number)} for number in (40, 400)]
    data = data_of(tmp_path, [{"messages": ANSWERED}] * 160 + longer[:1] * 4 + longer[1:])
    warning = open_source(data, None, "train").summary.splitlines()[1]
    assert warning.startswith("warning: 5 of 165 ")
    assert "data.seq_len=128" in warning
    assert "data.seq_len=832" in warning
    few = data_of(tmp_path, [{"messages": ANSWERED}] * 999 + longer[:1])
    assert "warning: " not in open_source(few, None, "train").summary


def test_pairs_and_held_out_chats_are_dropped_like_chats(tmp_path: Path) -> None:
    answers = [{"chosen": "Yes", "rejected": "No"}] * 4 + [{"chosen": "Yes " * 40, "rejected": "No"}] * 6
    with pytest.raises(UserError) as caught:
        open_source(data_of(tmp_path, [{"prompt": "Hi", **answer} for answer in answers]), None, "train")
    assert str(caught.value).startswith("data.seq_len=64: 6 of 10 ")
    chats = write_records(tmp_path / "held_out.jsonl", [{"messages": TOO_LONG}] * 2 + [{"messages": ANSWERED}])
    with pytest.raises(UserError) as caught:
        open_source(data_of(tmp_path, [{"messages": ANSWERED}] * 4, eval_path=str(chats)), None, "eval")
    assert all(words in str(caught.value) for words in ("2 of 3 ", "data.eval_path"))


CHAT, PLAIN = {"messages": ANSWERED}, {"prompt": "Hi", "completion": " Yes"}
WRITTEN_OUT = {"messages": conversation("<|im_start|>user\nHi<|im_end|>", "Yes")}
UNUSUAL: dict[str, tuple[str | None, list[Any], list[str]]] = {
    "plain text beside a template": (CHATML, [PLAIN, PLAIN], ["note: 2 "]),
    "a template applied twice": (
        CHATML,
        [CHAT, WRITTEN_OUT, CHAT, WRITTEN_OUT],
        ["warning: ", "<|im_end|> in 2 ", "chats.jsonl:4"],
    ),
    "plain text that spells a template": (
        None,
        [{"prompt": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "completion": "Yes"}],
        ["<|im_start|>"],
    ),
    "a header that the model writes": (
        CHATML.partition("\n{% if add_generation_prompt")[0],
        [CHAT],
        ["add_generation_prompt", "<|im_start|>"],
    ),
    "a token that the template never writes": (
        CHATML,
        [{"messages": conversation("What is [INST]?", "Yes")}, CHAT],
        ["warning: ", "50.0%", 'data.special_tokens=["[INST]"]'],
    ),
}
USUAL: list[tuple[str | None, Any]] = [
    (CHATML, CHAT),
    (None, PLAIN),
]


def said_of(folder: Path, template: str | None, records: list[Any]) -> list[str]:
    data = data_of(folder, records, tokenizer=str(write_tokenizer(folder / "own", template)))
    return open_source(data, None, "train").summary.splitlines()[1:]


@pytest.mark.parametrize("kind", UNUSUAL)
def test_unusual_chats_and_templates_are_reported(kind: str, tmp_path: Path) -> None:
    template, records, named = UNUSUAL[kind]
    (line,) = said_of(tmp_path, template, records)
    assert all(words in line for words in named), line


def test_nothing_is_reported_of_usual_ones(tmp_path: Path) -> None:
    for number, (template, record) in enumerate(USUAL):
        (tmp_path / str(number)).mkdir()
        assert said_of(tmp_path / str(number), template, [record]) == []


# ---------------------------------------------------------------------------------------------------------------
# Packed and held out


def test_each_conversation_is_packed_once_and_held_out_by_content(tmp_path: Path) -> None:
    records = [{"messages": conversation(f"{a} {b}", "Yes " * a)} for a in range(1, 6) for b in range(1, 6)]
    data = data_of(tmp_path, records, holdout=0.2)
    train, held_out = open_source(data, None, "train"), open_source(data, None, "eval")
    assert held_out is not None
    found_rows = read_all(train)
    own = [
        np.sum(row == number)
        for row, targets in zip(found_rows["documents"], found_rows["targets"], strict=True)
        for number in np.unique(row)
        if np.any(targets[row == number] != IGNORE)
    ]
    assert train.attended == np.square(own).sum() / found_rows["tokens"].size
    alone = open_source(dataclasses.replace(data, documents="apart", holdout=0.0), None, "train")
    found = [text for source in (train, held_out) for text in trained_texts(source, data)]
    ends = "<|im_end|>"
    assert sorted("".join(found).split(ends)) == sorted("".join(trained_texts(alone, data)).split(ends))
    again = open_source(data_of(tmp_path, records[::-1], holdout=0.2), None, "eval")
    assert again is not None
    assert sorted("".join(trained_texts(again, data))) == sorted("".join(trained_texts(held_out, data)))


def test_each_packed_conversation_is_a_document_of_its_own(tmp_path: Path) -> None:
    """So that they do not see each other."""
    counts = [1, 2, 3, 4, 9, 9]
    data = data_of(tmp_path, [{"messages": conversation("Hi", "Yes " * count)} for count in counts])
    batch, text, found = read_all(open_source(data, None, "train")), texts_of(data), []
    for documents, tokens, targets in zip(batch["documents"], batch["tokens"], batch["targets"], strict=True):
        for number in np.unique(documents[targets != IGNORE]):
            own = np.flatnonzero(documents == number)
            assert (np.diff(own) == 1).all()
            said = "".join(map(text, tokens[own].tolist()))
            assert said.startswith("<|im_start|>user\nHi<|im_end|>")
            found.append(said.count("Yes"))
    assert sorted(found) == counts


def test_duplicates_of_held_out_chats_are_not_trained_on(tmp_path: Path) -> None:
    records = [{"messages": conversation(f"{a} {b}", "Yes")} for a in range(1, 6) for b in range(1, 4)]
    for number, order in enumerate((records * 2, [record for record in records for _ in range(2)])):
        (tmp_path / str(number)).mkdir()
        data = data_of(tmp_path / str(number), order, holdout=0.3, documents="apart")
        train, held_out = open_source(data, None, "train"), open_source(data, None, "eval")
        assert held_out is not None
        assert len(train) + len(held_out) == 30
        assert (len(train) % 2, len(held_out) % 2) == (0, 0)
        rows = [read_all(source)["tokens"].tolist() for source in (train, held_out)]
        assert not any(row in rows[0] for row in rows[1])
    (tmp_path / "alike").mkdir()


def test_too_few_chats_for_their_hashes_hold_out_the_last_rows(tmp_path: Path) -> None:
    data = data_of(tmp_path, [{"messages": ANSWERED}] * 4, holdout=0.1, documents="apart")
    train, held_out = open_source(data, None, "train"), open_source(data, None, "eval")
    assert held_out is not None
    assert (len(train), len(held_out)) == (3, 1)


def test_chats_in_several_pieces_are_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows and the report are those of a single piece, with the lines of the whole file."""
    records = [{"messages": conversation("Hi", "Yes " * (1 + number % 25))} for number in range(160)]
    records[29]["messages"][0]["time"] = records[99]["messages"][0]["time"] = "now"
    records[134] = {"messages": conversation("Hi")}
    data = data_of(tmp_path, records, documents="apart")
    whole: Any = open_source(data, None, "train")
    monkeypatch.setattr("trainer.data.records.MAX_PIECE_BYTES", 500)
    pieces: Any = open_source(dataclasses.replace(data, cache_dir=str(tmp_path / "pieces")), None, "train")
    assert len(pieces.shards) > 10
    assert pieces.summary == whole.summary
    assert "time in 2 conversations (first: chats.jsonl:30)" in pieces.summary
    assert "no targets in chats.jsonl:135" in pieces.summary
    assert all((read_all(pieces)[name] == entry).all() for name, entry in read_all(whole).items())
    records[137]["messages"][1]["weight"] = 2
    with pytest.raises(UserError, match=r"chats\.jsonl:138: "):
        open_source(data_of(tmp_path, records), None, "train")


def test_columns_that_nobody_reads_may_hold_times_in_nanoseconds(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    times = pyarrow.array([1, 2], pyarrow.timestamp("ns"))
    table = pyarrow.table({"prompt": ["Hi", "Bye"], "completion": ["Yes", "No"], "at": times})
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "chats.parquet")
    data = data_of(tmp_path, [], path=str(tmp_path / "chats.parquet"), documents="apart")
    assert len(open_source(data, None, "train")) == 2


def test_rows_of_a_mixture_of_chats_are_trimmed_to_the_longest(tmp_path: Path) -> None:
    own = []
    for name, size in (("a", 1), ("b", 120)):
        path = write_records(tmp_path / f"{name}.jsonl", [{"messages": conversation("Hi", "Yes " * size)}] * 3)
        own.append(f"{name}: {path}")
    data = data_of(tmp_path, [{"messages": ANSWERED}])
    settings = ["data.source=chat", f"data.path={{{', '.join(own)}}}", f"data.tokenizer={data.tokenizer}"]
    settings += [
        "data.trim_rows=true",
        "data.seq_len=1024",
        "model.vocab_size=512",
        "train.steps=1",
        "data.holdout=0.1",
    ]
    trimmed = resolve_from_data(load_config("llama_small", [*settings, f"data.cache_dir={tmp_path / 'cache'}"]))
    assert 120 < trimmed.data.seq_len < 1024


def test_row_length_is_limited_by_the_model(tmp_path: Path) -> None:
    data = data_of(tmp_path, [{"messages": ANSWERED}])
    own = ["data.source=chat", f"data.path={data.path}", f"data.tokenizer={data.tokenizer}", "model.vocab_size=512"]
    assert load_config("gpt2", [*own, "model.max_seq_len=24"]).data.seq_len == 24
    with pytest.raises(UserError) as caught:
        check_config(load_config("gpt2", [*own, "model.max_seq_len=24", "data.seq_len=48"]), 1, 1)
    assert caught.value.proposal == "data.seq_len=24"


# ---------------------------------------------------------------------------------------------------------------
# Shown


def test_show_marks_targets_and_writes_nothing(tmp_path: Path) -> None:
    call = [{"from": "human", "value": "weather ?"}, CALL, {"from": "observation", "value": "sunny"}]
    chat = {"conversations": [*call, {"from": "gpt", "value": "It is sunny"}]}
    path = write_records(tmp_path / "chats.jsonl", [chat, chat, chat])
    folder = write_tokenizer(tmp_path / "model", FAMILIES["tools"].template)
    ended = meshtrainer("prepare", path, "--tokenizer", folder, "--show", "2")
    assert ended.code == 0
    assert "chats.jsonl:2" in ended.out
    assert "chats.jsonl:3" not in ended.out
    assert '⟪<tool_call>{"name": "weather", "arguments": {}}</tool_call><|im_end|>⟫' in ended.out
    assert "<|im_start|>assistant\n⟪It is sunny<|im_end|>⟫\n" in ended.out
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["chats.jsonl", "model"]
