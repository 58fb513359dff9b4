"""Chat templates of thirteen model families, written after what the families document, with their stop tokens.

`tests/helpers/chats.py` has templates for the masks of single tokens; these are for turns with text, calls and reasoning.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# ruff: noqa: E501 - lines of templates and of what they write


@dataclass(frozen=True)
class ChatFamily:
    """A template, the special tokens that it writes, the tokens at which the family's models stop, and its turns.

    turns: what the model writes in each kind of turn, `text`, `call`, `two calls`, `both` (text and a call) and
        `reasoning` (reasoning and text); `!PART` if the template cannot write the turn, with the part that is refused.
    """

    template: str
    special: str
    stops: tuple[str, ...]
    turns: dict[str, str]
    config: dict[str, Any] = field(default_factory=dict)


WEATHER = '{"name": "weather", "arguments": {"city": "Paris"}}'
TIME = '{"name": "time", "arguments": {"zone": "CET"}}'

_QWEN_TURNS = """\
{%- if m.tool_calls %}{% for call in m.tool_calls %}{% set f = call.function if call.function else call %}
{%- if not loop.first or m.content %}{{ '\n' }}{% endif %}{{ '<tool_call>\n{"name": "' + f.name + '", "arguments": ' }}
{%- ARGUMENTS %}{{ '}\n</tool_call>' }}{% endfor %}{% endif %}"""
_QWEN = """\
{% if tools %}{{ '<|im_start|>system\n' }}{% for t in tools %}{{ t | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}
{%- elif m.role == 'assistant' %}
{{- '<|im_start|>assistant\n' }}REASONING{{ m.content }}TURNS{{ '<|im_end|>\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
_QWEN_CALL, _QWEN_TIME = f"<tool_call>\n{WEATHER}\n</tool_call>", f"<tool_call>\n{TIME}\n</tool_call>"
_QWEN_END = "<|im_end|>"

_LLAMA = """\
{{ bos_token }}{% if tools %}{{ '<|start_header_id|>system<|end_header_id|>\n\n' + (tools | tojson) + '<|eot_id|>' }}{% endif %}
{%- for m in messages %}
{%- if m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception('only single tool-calls at once!') }}{% endif %}
{%- set f = m.tool_calls[0].function %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{{- '{"name": "' + f.name + '", "parameters": ' + (f.arguments | tojson) + '}<|eot_id|>' }}
{%- elif m.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + (m.content | tojson) + '<|eot_id|>' }}
{%- else %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

_MISTRAL = """\
{{ bos_token }}{% if tools %}{{ '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS]{"content": ' + (m.content | tojson) + '}[/TOOL_RESULTS]' }}
{%- elif m.tool_calls %}{{ '[TOOL_CALLS][' }}{% for call in m.tool_calls %}
{%- if call.id is not defined or call.id | length != 9 %}{{ raise_exception('ids of calls have 9 characters') }}{% endif %}
{%- set function = call.function | tojson %}{{ ', ' if not loop.first }}{{ function[:-1] + ', "id": "' + call.id + '"}' }}
{%- endfor %}{{ ']' + eos_token }}
{%- elif m.role == 'assistant' %}{{ m.content + eos_token }}
{%- else %}{{ raise_exception('Only user, assistant and tool roles are supported!') }}{% endif %}{% endfor %}"""

_GPT_OSS = """\
{{ '<|start|>system<|message|>Be helpful<|end|>' }}
{%- if tools %}{{ '<|start|>developer<|message|>' + (tools | tojson) + '<|end|>' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- if m.tool_calls %}{% set f = m.tool_calls[0].function %}
{%- if m.content and m.thinking %}{{ raise_exception('Cannot pass both content and thinking') }}{% endif %}
{%- if m.content or m.thinking %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + (m.content or m.thinking) + '<|end|>' }}{% endif %}
{{- '<|start|>assistant to=functions.' + f.name + '<|channel|>commentary json<|message|>' + (f.arguments | tojson) }}
{{- '<|call|>' }}
{%- elif loop.last and not add_generation_prompt %}
{%- if m.thinking %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}
{%- else %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{% endif %}
{%- elif m.role == 'tool' %}
{{- '<|start|>functions.' + (m.name or 'weather') + ' to=assistant<|channel|>commentary<|message|>' }}
{{- (m.content | tojson) + '<|end|>' }}
{%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""

_DEEPSEEK = """\
{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}
{%- if m.role == 'system' %}{{ m.content }}
{%- elif m.role == 'user' %}{{ '<|User|>' + m.content }}
{%- elif m.role == 'tool' %}
{{- '<|tool_outputs_begin|><|tool_output_begin|>' + m.content + '<|tool_output_end|><|tool_outputs_end|>' }}
{%- elif m.tool_calls %}{{ '<|Assistant|>' + m.content + '<|tool_calls_begin|>' }}{% for call in m.tool_calls %}
{{- '\n' if not loop.first }}{{ '<|tool_call_begin|>' + call.type + '<|tool_sep|>' + call.function.name + '\n```json\n' }}
{{- call.function.arguments + '\n```<|tool_call_end|>' }}{% endfor %}{{ '<|tool_calls_end|><|end_of_sentence|>' }}
{%- else %}{{ '<|Assistant|>' + m.content + '<|end_of_sentence|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|Assistant|>' }}{% endif %}"""

_GLM = """\
{{ '[gMASK]<sop>' }}{% if tools %}{{ '<|system|>\n' + (tools | tojson) }}{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{ '<|assistant|>' }}
{%- if loop.index0 > ns.last and m.reasoning_content %}{{ '\n<think>' + m.reasoning_content + '</think>' }}
{%- else %}{{ '\n<think></think>' }}{% endif %}
{%- if m.content %}{{ '\n' + m.content }}{% endif %}
{%- for call in m.tool_calls or [] %}{{ '\n<tool_call>' + call.function.name + '\n' }}
{%- for key, value in call.function.arguments.items() %}
{{- '<arg_key>' + key + '</arg_key>\n<arg_value>' + value + '</arg_value>\n' }}{% endfor %}{{ '</tool_call>' }}{% endfor %}
{%- elif m.role == 'tool' %}{{ '<|observation|>\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- else %}{{ '<|' + m.role + '|>\n' + m.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""

_GEMMA = """\
{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim + '<end_of_turn>\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

_GRANITE = """\
{% if tools %}{{ '<|start_of_role|>tools<|end_of_role|>' + (tools | tojson) + '<|end_of_text|>\n' }}{% endif %}
{%- for m in messages %}{% set text = m.content %}
{%- if m.tool_calls %}{% set text = '<|tool_call|>' + (m.tool_calls | map(attribute='function') | list | tojson) %}{% endif %}
{{- '<|start_of_role|>' + m.role + '<|end_of_role|>' + text + '<|end_of_text|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}"""

_PHI = """\
{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if loop.first and tools %}{{ tools | tojson }}{% endif %}{{ m.content }}
{%- if m.tool_calls %}{{ '<|tool_call|>' + (m.tool_calls | map(attribute='function') | list | tojson) + '<|/tool_call|>' }}
{%- endif %}{{ '<|end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"""

_KIMI = """\
{% if tools %}{{ '<|im_system|>tool_declare<|im_middle|>' + (tools | tojson) + '<|im_end|>' }}{% endif %}
{%- for m in messages %}
{{- '<|im_' + ('system' if m.role == 'tool' else m.role) + '|>' + m.role + '<|im_middle|>' + m.content }}
{%- if m.tool_calls %}{{ '<|tool_calls_section_begin|>' }}{% for call in m.tool_calls %}
{{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' }}
{%- if call.function.arguments is string %}{{ call.function.arguments }}{% else %}{{ call.function.arguments | tojson }}
{%- endif %}{{ '<|tool_call_end|>' }}{% endfor %}{{ '<|tool_calls_section_end|>' }}{% endif %}{{ '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}"""

_LFM = """\
{{ bos_token }}{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.tool_calls %}{{ '<|tool_call_start|>[' }}{% for call in m.tool_calls %}
{{- ', ' if not loop.first }}{{ call.function.name + '(' }}{% for key, value in call.function.arguments.items() %}
{{- ', ' if not loop.first }}{{ key + '="' + value + '"' }}{% endfor %}{{ ')' }}{% endfor %}{{ ']<|tool_call_end|>' }}{% endif %}
{{- m.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

_COMMAND = """\
{{ bos_token }}{% if tools %}{{ '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' + (tools | tojson) + '<|END_OF_TURN_TOKEN|>' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}
{%- if m.tool_calls %}{% if m.content %}{{ '<|START_THINKING|>' + m.content + '<|END_THINKING|>' }}{% endif %}
{{- '<|START_ACTION|>[' }}{% for call in m.tool_calls %}{{ ', ' if not loop.first }}
{{- '{"tool_call_id": "' + loop.index0 | string + '", "tool_name": "' + call.function.name + '", "parameters": ' }}
{{- call.function.arguments | tojson }}{{ '}' }}{% endfor %}{{ ']<|END_ACTION|>' }}
{%- else %}{{ '<|START_RESPONSE|>' + m.content + '<|END_RESPONSE|>' }}{% endif %}{{ '<|END_OF_TURN_TOKEN|>' }}
{%- else %}{{ '<|START_OF_TURN_TOKEN|><|' + ('USER' if m.role == 'user' else 'SYSTEM') + '_TOKEN|>' }}
{{- m.content + '<|END_OF_TURN_TOKEN|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"""


def _qwen(arguments: str, reasoning: str) -> str:
    turns = _QWEN_TURNS.replace("ARGUMENTS", f"if true %}}{arguments}{{% endif").replace("{%- if true", "{%- if true")
    return _QWEN.replace("TURNS", turns).replace("REASONING", reasoning)


NO_CALLS = "!has tools"
NO_REASONING = "!reasoning_content"

CHAT_FAMILIES = {
    "qwen2.5": ChatFamily(
        _qwen("{{ f.arguments | tojson }}", ""),
        "<|im_start|> <|im_end|> <|endoftext|>",
        ("<|im_end|>",),
        {
            "text": f"Yes{_QWEN_END}",
            "call": f"{_QWEN_CALL}{_QWEN_END}",
            "two calls": f"{_QWEN_CALL}\n{_QWEN_TIME}{_QWEN_END}",
            "both": f"Yes\n{_QWEN_CALL}{_QWEN_END}",
            "reasoning": NO_REASONING,
        },
        {"eos_token": "<|im_end|>"},
    ),
    "qwen3": ChatFamily(
        _qwen(
            "{% if f.arguments is string %}{{ f.arguments }}{% else %}{{ f.arguments | tojson }}{% endif %}",
            "{% if m.reasoning_content and loop.index0 > ns.last %}"
            "{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}",
        ),
        "<|im_start|> <|im_end|> <|endoftext|>",
        ("<|im_end|>",),
        {
            "text": f"Yes{_QWEN_END}",
            "call": f"{_QWEN_CALL}{_QWEN_END}",
            "two calls": f"{_QWEN_CALL}\n{_QWEN_TIME}{_QWEN_END}",
            "both": f"Yes\n{_QWEN_CALL}{_QWEN_END}",
            "reasoning": f"<think>\nhm\n</think>\n\nYes{_QWEN_END}",
        },
        {"eos_token": "<|im_end|>"},
    ),
    "llama3.1": ChatFamily(
        _LLAMA,
        "<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|>",
        ("<|eot_id|>",),
        {
            "text": "Yes<|eot_id|>",
            "call": '{"name": "weather", "parameters": {"city": "Paris"}}<|eot_id|>',
            "two calls": "!only single tool-calls",
            "both": "!content",
            "reasoning": NO_REASONING,
        },
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    ),
    "mistral": ChatFamily(
        _MISTRAL,
        "<s> </s> [INST] [/INST] [TOOL_CALLS] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS]",
        ("</s>",),
        {
            "text": "Yes</s>",
            "call": f'[TOOL_CALLS][{WEATHER[:-1]}, "id": "call00000"}}]</s>',
            "two calls": f'[TOOL_CALLS][{WEATHER[:-1]}, "id": "call00000"}}, {TIME[:-1]}, "id": "call00001"}}]</s>',
            "both": "!content",
            "reasoning": NO_REASONING,
        },
        {"bos_token": "<s>", "eos_token": "</s>"},
    ),
    "gpt-oss": ChatFamily(
        _GPT_OSS,
        "<|start|> <|message|> <|end|> <|channel|> <|call|> <|return|>",
        ("<|call|>", "<|return|>"),
        {
            "text": "<|channel|>final<|message|>Yes<|return|>",
            "call": ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>',
            "two calls": "!tool_calls[1]",
            "both": "<|channel|>analysis<|message|>Yes<|end|><|start|>assistant to=functions.weather"
            '<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>',
            "reasoning": "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes<|return|>",
        },
        {"eos_token": "<|return|>"},
    ),
    "deepseek": ChatFamily(
        _DEEPSEEK,
        "<|begin_of_sentence|> <|end_of_sentence|> <|User|> <|Assistant|> <|tool_calls_begin|> <|tool_calls_end|> "
        "<|tool_call_begin|> <|tool_call_end|> <|tool_sep|> <|tool_outputs_begin|> <|tool_outputs_end|> "
        "<|tool_output_begin|> <|tool_output_end|>",
        ("<|end_of_sentence|>",),
        {
            "text": "Yes<|end_of_sentence|>",
            "call": '<|tool_calls_begin|><|tool_call_begin|>function<|tool_sep|>weather\n```json\n{"city": "Paris"}\n```'
            "<|tool_call_end|><|tool_calls_end|><|end_of_sentence|>",
            "two calls": "<|tool_calls_begin|><|tool_call_begin|>function<|tool_sep|>weather\n```json\n"
            '{"city": "Paris"}\n```<|tool_call_end|>\n<|tool_call_begin|>function<|tool_sep|>time\n```json\n'
            '{"zone": "CET"}\n```<|tool_call_end|><|tool_calls_end|><|end_of_sentence|>',
            "both": "Yes<|tool_calls_begin|><|tool_call_begin|>function<|tool_sep|>weather\n```json\n"
            '{"city": "Paris"}\n```<|tool_call_end|><|tool_calls_end|><|end_of_sentence|>',
            "reasoning": NO_REASONING,
        },
        {"bos_token": "<|begin_of_sentence|>", "eos_token": "<|end_of_sentence|>"},
    ),
    "glm": ChatFamily(
        _GLM,
        "[gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|> <|endoftext|>",
        ("<|user|>", "<|observation|>"),
        {
            "text": "\n<think></think>\nYes<|user|>",
            "call": "\n<think></think>\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
            "</tool_call><|observation|>",
            "two calls": "\n<think></think>\n<tool_call>weather\n<arg_key>city</arg_key>\n"
            "<arg_value>Paris</arg_value>\n</tool_call>\n<tool_call>time\n<arg_key>zone</arg_key>\n"
            "<arg_value>CET</arg_value>\n</tool_call><|observation|>",
            "both": "\n<think></think>\nYes\n<tool_call>weather\n<arg_key>city</arg_key>\n"
            "<arg_value>Paris</arg_value>\n</tool_call><|observation|>",
            "reasoning": "\n<think>hm</think>\nYes<|user|>",
        },
        {"eos_token": "<|endoftext|>"},
    ),
    "gemma": ChatFamily(
        _GEMMA,
        "<bos> <start_of_turn> <end_of_turn>",
        ("<end_of_turn>",),
        {
            "text": "Yes<end_of_turn>",
            "call": NO_CALLS,
            "two calls": NO_CALLS,
            "both": NO_CALLS,
            "reasoning": NO_REASONING,
        },
        {"bos_token": "<bos>", "eos_token": "<end_of_turn>"},
    ),
    "granite": ChatFamily(
        _GRANITE,
        "<|start_of_role|> <|end_of_role|> <|end_of_text|> <|tool_call|>",
        ("<|end_of_text|>",),
        {
            "text": "Yes<|end_of_text|>",
            "call": f"<|tool_call|>[{WEATHER}]<|end_of_text|>",
            "two calls": f"<|tool_call|>[{WEATHER}, {TIME}]<|end_of_text|>",
            "both": "!content",
            "reasoning": NO_REASONING,
        },
        {"eos_token": "<|end_of_text|>"},
    ),
    "phi": ChatFamily(
        _PHI,
        "<|user|> <|assistant|> <|end|> <|tool_call|> <|/tool_call|> <|tool|> <|endoftext|>",
        ("<|end|>", "<|endoftext|>"),
        {
            "text": "Yes<|end|><|endoftext|>",
            "call": f"<|tool_call|>[{WEATHER}]<|/tool_call|><|end|><|endoftext|>",
            "two calls": f"<|tool_call|>[{WEATHER}, {TIME}]<|/tool_call|><|end|><|endoftext|>",
            "both": f"Yes<|tool_call|>[{WEATHER}]<|/tool_call|><|end|><|endoftext|>",
            "reasoning": NO_REASONING,
        },
        {"eos_token": "<|endoftext|>"},
    ),
    "kimi": ChatFamily(
        _KIMI,
        "<|im_system|> <|im_user|> <|im_assistant|> <|im_middle|> <|im_end|> <|tool_calls_section_begin|> "
        "<|tool_calls_section_end|> <|tool_call_begin|> <|tool_call_argument_begin|> <|tool_call_end|> [EOS]",
        ("<|im_end|>",),
        {
            "text": "Yes<|im_end|>",
            "call": "!tool_calls[0]",  # it names a function by the call's id, such as functions.weather:0
            "two calls": "!tool_calls[0]",
            "both": "!tool_calls[0]",
            "reasoning": NO_REASONING,
        },
        {"eos_token": "[EOS]"},
    ),
    "lfm2": ChatFamily(
        _LFM,
        "<|startoftext|> <|im_start|> <|im_end|> <|tool_call_start|> <|tool_call_end|>",
        ("<|im_end|>",),
        {
            "text": "Yes<|im_end|>",
            "call": '<|tool_call_start|>[weather(city="Paris")]<|tool_call_end|><|im_end|>',
            "two calls": '<|tool_call_start|>[weather(city="Paris"), time(zone="CET")]<|tool_call_end|><|im_end|>',
            "both": '<|tool_call_start|>[weather(city="Paris")]<|tool_call_end|>Yes<|im_end|>',
            "reasoning": NO_REASONING,
        },
        {"bos_token": "<|startoftext|>", "eos_token": "<|im_end|>"},
    ),
    "command-r": ChatFamily(
        _COMMAND,
        "<BOS_TOKEN> <|START_OF_TURN_TOKEN|> <|END_OF_TURN_TOKEN|> <|SYSTEM_TOKEN|> <|USER_TOKEN|> <|CHATBOT_TOKEN|> "
        "<|START_ACTION|> <|END_ACTION|> <|START_RESPONSE|> <|END_RESPONSE|> <|START_THINKING|> <|END_THINKING|>",
        ("<|END_OF_TURN_TOKEN|>",),
        {
            "text": "<|START_RESPONSE|>Yes<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
            "call": '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Paris"}}]'
            "<|END_ACTION|><|END_OF_TURN_TOKEN|>",
            "two calls": '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Paris"}}, '
            '{"tool_call_id": "1", "tool_name": "time", "parameters": {"zone": "CET"}}]<|END_ACTION|><|END_OF_TURN_TOKEN|>',
            "both": "<|START_THINKING|>Yes<|END_THINKING|><|START_ACTION|>"
            '[{"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Paris"}}]<|END_ACTION|>'
            "<|END_OF_TURN_TOKEN|>",
            "reasoning": NO_REASONING,
        },
        {"bos_token": "<BOS_TOKEN>", "eos_token": "<|END_OF_TURN_TOKEN|>"},
    ),
}
