"""Chats: each token's mask by hand, what is refused, the formats, packing, and a run from a file of chats."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tokenizers", reason="a chat model's tokenizer is read with the library `tokenizers`")

from tests.chats import CHATML, FAMILIES, GENERATION, QWEN3, Family, said, write_tokenizer
from trainer.data.chat.conversation import BadChat, Conversation
from trainer.data.chat.masking import Encoder
from trainer.data.chat.template import find_template
from trainer.data.chat.tokens import ChatTokenizer


def encoder_of(folder: Path, family: Family) -> Encoder:
    write_tokenizer(folder, family.template, **family.config)
    return Encoder(ChatTokenizer(str(folder)), find_template("model", str(folder)), family.train_on)


def marked(encoder: Encoder, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> list[tuple[str, bool]]:
    encoded = encoder.encode(Conversation(messages, tools or ()))
    texts = [encoder.tokenizer.text_of(number) for number in encoded.ids.tolist()]
    return list(zip(texts, encoded.trained.tolist(), strict=True))


@pytest.mark.parametrize("family", list(FAMILIES))
def test_each_token_is_trained_on_or_not_as_by_hand(family: str, tmp_path: Path) -> None:
    case = FAMILIES[family]
    assert marked(encoder_of(tmp_path, case), case.messages, case.tools) == case.truth


def test_templates_are_rendered_as_transformers_renders_them(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    for name, case in FAMILIES.items():
        encoder = encoder_of(tmp_path / name, case)
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / name)
        ids = theirs.apply_chat_template(case.messages, tools=case.tools or None, return_dict=False)
        assert encoder.encode(Conversation(case.messages, case.tools)).ids.tolist() == ids, name


# ---------------------------------------------------------------------------------------------------------------
# What is refused


def refused(folder: Path, template: str, messages: list[dict[str, Any]], **settings: Any) -> BadChat:
    with pytest.raises(BadChat) as caught:
        marked(encoder_of(folder, Family(template, [], "", **settings)), messages)
    return caught.value


def test_a_turn_that_is_shown_otherwise_later_is_refused(tmp_path: Path) -> None:
    error = refused(tmp_path, QWEN3, said("Hi", "Yes", "Bye", "No"))
    assert "messages[1]" in str(error)
    assert (error.key, error.legal) == ("data.train_on", "last")


def test_what_a_template_leaves_out_is_refused(tmp_path: Path) -> None:
    silent = CHATML.replace("for m in messages", "for m in messages if m.role != 'system'")
    assert "messages[0].role='system'" in str(refused(tmp_path, silent, said("Hi", "Yes", system="Be brief")))
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "weather", "arguments": {}}}]}
    assert "messages[1].tool_calls" in str(refused(tmp_path, CHATML, [*said("Hi"), call]))


def test_a_turn_that_nothing_ends_is_refused(tmp_path: Path) -> None:
    endless = "{% for m in messages %}{{ m.role + ' ' + m.content }}{% endfor %}"
    assert "ends this turn with nothing" in str(refused(tmp_path, endless, said("Hi", "Yes")))


def test_a_template_refuses_in_its_own_words(tmp_path: Path) -> None:
    gemma = FAMILIES["gemma"].template
    assert "System role not supported" in str(refused(tmp_path, gemma, said("Hi", "Yes", system="Be brief")))


def test_a_template_runs_in_a_sandbox(tmp_path: Path) -> None:
    escape = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    assert "unsafe" in str(refused(tmp_path, escape, said("Hi", "Yes")))


# ---------------------------------------------------------------------------------------------------------------
# What is trained on


def test_whose_turns_are_trained_on(tmp_path: Path) -> None:
    chatml = FAMILIES["chatml"]
    for train_on, trained in {"last": 4, "completion": 4, "assistant": 8, "all": len(chatml.truth)}.items():
        encoder = encoder_of(tmp_path, dataclasses.replace(chatml, train_on=train_on))
        assert sum(is_trained for _, is_trained in marked(encoder, chatml.messages)) == trained
    light = [{**message, "weight": 0} if message["content"] == "Bye now" else message for message in chatml.messages]
    assert sum(is_trained for _, is_trained in marked(encoder_of(tmp_path, chatml), light)) == 4


def test_generation_tags_without_the_end_of_turn_teach_it_all_the_same(tmp_path: Path) -> None:
    outside = GENERATION.replace("m.content + '<|im_end|>\n' }}{% endgen", "m.content }}{% endgen").replace(
        "{% endgeneration %}", "{% endgeneration %}{{ '<|im_end|>\n' }}"
    )
    case = FAMILIES["generation"]
    assert marked(encoder_of(tmp_path, dataclasses.replace(case, template=outside)), case.messages) == case.truth


def test_what_a_message_spells_is_text(tmp_path: Path) -> None:
    """A special token in a message ends no turn, and what stands around it is trained on as it stands."""
    tokens = marked(encoder_of(tmp_path, FAMILIES["chatml"]), said("Hi<|im_end|>", "Yes<|im_end|>No"))
    texts = [text for text, _ in tokens]
    assert texts.count("<|im_end|>") == 2
    trained = [text for text, is_trained in tokens if is_trained]
    assert trained == ["Yes", *"<|", "im_end", *"|>", "No", "<|im_end|>"]
