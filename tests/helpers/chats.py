"""Tokenizers with a few hundred readable tokens, chat templates, and conversations with their expected tokens.

Each template renders the format of one model family. The expected tokens of each conversation are written by hand:
tokens that are trained on begin with a star, `_` is a space, and `~` is a newline.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SPECIAL = [
    "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<|endoftext|>", "<unk>",
]  # fmt: skip
ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
"""Added tokens that are not special, as in Qwen3."""

_TEXT = """system user assistant model tool Be brief Hi Yes No Hello there two and is four five What Sum Bye so now add
a b name arguments role content parameters type function get weather city Paris sunny It in hm thinking carefully tools
description string required properties object Question Answer im_start im_end 1 2 3 4 5"""
WORDS = _TEXT.split()
MARKS = list("_~ \n{}[]\":,.?!<>|/()+=-'")


def write_tokenizer(folder: Path, template: str | None, special: Sequence[str] = SPECIAL, **config: Any) -> Path:
    """Write a tokenizer whose tokens are words, or single characters for other text; return its folder."""
    from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

    words = [*special, *ADDED, *WORDS, *MARKS, "<unk>", "null"]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(dict.fromkeys(words))}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\w+|\s|[^\w\s]"), "isolated")
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ADDED])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


@dataclass(frozen=True)
class Family:
    """A chat template, its tokenizer's settings, and a conversation with its expected tokens."""

    template: str
    messages: list[dict[str, Any]]
    tokens: str
    config: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] = field(default_factory=list)
    train_on: str = "assistant"

    @property
    def truth(self) -> list[tuple[str, bool]]:
        """The text of each token, and whether it is trained on."""
        words = [(word.removeprefix("*"), word.startswith("*")) for word in self.tokens.split()]
        return [({"_": " ", "~": "\n"}.get(text, text), trained) for text, trained in words]


def conversation(*texts: str, system: str | None = None) -> list[dict[str, Any]]:
    """Return a conversation in which user and assistant alternate; the user says the first text."""
    turns = [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(texts)]
    return turns if system is None else [{"role": "system", "content": system}, *turns]


CHATML = """\
{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

LLAMA3 = """\
{{ bos_token }}{% for m in messages %}
{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

QWEN3 = """\
{% set ns = namespace(last=-1) %}
{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{% for m in messages %}
{% if m.role == 'assistant' and loop.index0 > ns.last %}
{{ '<|im_start|>assistant\n<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' + m.content + '<|im_end|>\n' }}
{%- else %}
{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

GEMMA = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for m in messages %}
{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' + m['content'] | trim -}}
{{ '<end_of_turn>\n' }}{% endfor %}
{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"""

MISTRAL = """\
{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}
{%- elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + eos_token }}
{%- else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"""

TOOLS = """\
{% if tools %}{{ '<|im_start|>system\n' }}{% for t in tools %}{{ t | tojson }}{% endfor %}
{{ '<|im_end|>\n' }}{% endif %}
{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.content %}{{ m.content }}{% endif %}
{% for call in m.tool_calls or [] %}{{ '<tool_call>' }}{{ call.function | tojson }}{{ '</tool_call>' }}{% endfor %}
{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

GENERATION = """\
{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}
{%- generation %}{{ m.content + '<|im_end|>\n' }}{% endgeneration %}
{%- else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

PLAIN = """\
{% for m in messages %}{{ ('Question: ' if m.role == 'user' else 'Answer: ') + m.content + '</s>' }}{% endfor %}"""
"""Without a generation prompt."""

_CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}

FAMILIES = {
    "chatml": Family(
        CHATML,
        conversation("Hi", "Hello there", "Bye", "Bye now", system="Be brief"),
        "<|im_start|> system ~ Be _ brief <|im_end|> ~ <|im_start|> user ~ Hi <|im_end|> ~ "
        "<|im_start|> assistant ~ *Hello *_ *there *<|im_end|> ~ <|im_start|> user ~ Bye <|im_end|> ~ "
        "<|im_start|> assistant ~ *Bye *_ *now *<|im_end|> ~",
    ),
    "llama3": Family(
        LLAMA3,
        conversation("Hi", " Hello there ", "Bye", "Bye", system="Be brief"),
        "<|begin_of_text|> <|start_header_id|> system <|end_header_id|> ~ ~ Be _ brief <|eot_id|> "
        "<|start_header_id|> user <|end_header_id|> ~ ~ Hi <|eot_id|> "
        "<|start_header_id|> assistant <|end_header_id|> ~ ~ *Hello *_ *there *<|eot_id|> "
        "<|start_header_id|> user <|end_header_id|> ~ ~ Bye <|eot_id|> "
        "<|start_header_id|> assistant <|end_header_id|> ~ ~ *Bye *<|eot_id|>",
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    ),
    "qwen3 thinking": Family(
        QWEN3,
        [*conversation("Hi"), {"role": "assistant", "content": "Yes", "reasoning_content": "hm"}],
        "<|im_start|> user ~ Hi <|im_end|> ~ "
        "<|im_start|> assistant ~ *<think> *~ *hm *~ *</think> *~ *~ *Yes *<|im_end|> ~",
        {"eos_token": "<|im_end|>"},
    ),
    "qwen3 last turn": Family(
        QWEN3,
        [*conversation("Hi", "Yes", "Bye"), {"role": "assistant", "content": "No", "thinking": "hm"}],
        "<|im_start|> user ~ Hi <|im_end|> ~ <|im_start|> assistant ~ Yes <|im_end|> ~ "
        "<|im_start|> user ~ Bye <|im_end|> ~ "
        "<|im_start|> assistant ~ *<think> *~ *hm *~ *</think> *~ *~ *No *<|im_end|> ~",
        {"eos_token": "<|im_end|>"},
        train_on="last",
    ),
    "gemma": Family(
        GEMMA,
        conversation("Hi", "Hello there ", "Bye", "Bye"),
        "<bos> <start_of_turn> user ~ Hi <end_of_turn> ~ <start_of_turn> model ~ *Hello *_ *there *<end_of_turn> ~ "
        "<start_of_turn> user ~ Bye <end_of_turn> ~ <start_of_turn> model ~ *Bye *<end_of_turn> ~",
        {"bos_token": "<bos>", "eos_token": "<end_of_turn>"},
    ),
    "mistral": Family(
        MISTRAL,
        conversation("Hi", "Hello there", "Bye", "Bye"),
        "<s> [INST] _ Hi _ [/INST] *_ *Hello *_ *there *</s> [INST] _ Bye _ [/INST] *_ *Bye *</s>",
        {"bos_token": "<s>"},
    ),
    "tools": Family(
        TOOLS,
        [
            *conversation("weather in Paris ?"),
            {"role": "assistant", "content": "", "tool_calls": [_CALL]},
            {"role": "tool", "content": "sunny"},
            {"role": "assistant", "content": "It is sunny"},
        ],
        '<|im_start|> system ~ { " type " : _ " function " , _ " function " : _ { " name " : _ " weather " } } '
        "<|im_end|> ~ <|im_start|> user ~ weather _ in _ Paris _ ? <|im_end|> ~ "
        '<|im_start|> assistant ~ *<tool_call> *{ *" *name *" *: *_ *" *weather *" *, *_ *" *arguments *" *: *_ '
        '*{ *" *city *" *: *_ *" *Paris *" *} *} *</tool_call> *<|im_end|> ~ '
        "<|im_start|> tool ~ sunny <|im_end|> ~ <|im_start|> assistant ~ *It *_ *is *_ *sunny *<|im_end|> ~",
        tools=[{"type": "function", "function": {"name": "weather"}}],
    ),
    "generation": Family(
        GENERATION,
        conversation("Hi", "Hello there", "Bye", "Bye", system="Be brief"),
        "<|im_start|> system ~ Be _ brief <|im_end|> ~ <|im_start|> user ~ Hi <|im_end|> ~ "
        "<|im_start|> assistant ~ *Hello *_ *there *<|im_end|> ~ <|im_start|> user ~ Bye <|im_end|> ~ "
        "<|im_start|> assistant ~ *Bye *<|im_end|> ~",
    ),
    "generation without its prompt": Family(
        GENERATION.partition("\n{% if add_generation_prompt")[0],
        conversation("Hi", "Hello there", "Bye", "Bye"),
        "<|im_start|> user ~ Hi <|im_end|> ~ *<|im_start|> *assistant *~ *Hello *_ *there *<|im_end|> ~ "
        "<|im_start|> user ~ Bye <|im_end|> ~ *<|im_start|> *assistant *~ *Bye *<|im_end|> ~",
    ),
    "chatml without a generation prompt": Family(
        CHATML.partition("\n{% if add_generation_prompt")[0],
        conversation("Hi", "Hello there", "Bye", "Bye"),
        "<|im_start|> user ~ Hi <|im_end|> ~ *<|im_start|> *assistant *~ *Hello *_ *there *<|im_end|> ~ "
        "<|im_start|> user ~ Bye <|im_end|> ~ *<|im_start|> *assistant *~ *Bye *<|im_end|> ~",
    ),
    "no generation prompt": Family(
        PLAIN,
        conversation("Hi", "Hello Answer", "Bye", "No"),
        "Question : _ Hi </s> *Answer *: *_ *Hello *_ *Answer *</s> Question : _ Bye </s> *Answer *: *_ *No *</s>",
    ),
}
"""All families, and variants of some. Without a generation prompt the header is a target."""
