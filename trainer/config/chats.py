"""Rules for the settings of `data.source=chat`."""

from __future__ import annotations

from pathlib import Path

from trainer.config.auto_model import MODEL
from trainer.config.schema import RunConfig
from trainer.errors import nearest, setting_error

CHATML = "chatml"
CHATML_TEMPLATE = """\
{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
"""The built-in chat template, for base models without one."""

_CHAT_DEFAULTS: dict[str, object] = {
    "format": "auto",
    "columns": None,
    "chat_template": MODEL,
    "train_on": "assistant",
    "too_long": "auto",
}
_CHAT_DEFAULTS |= {"trim_rows": False}
"""Keys that only apply to chats, with their defaults."""


def check_chats(config: RunConfig) -> None:
    """Raise UserError for invalid chat settings, or chat settings with another `data.source`."""
    data = config.data
    if data.source != "chat":
        for name, default in _CHAT_DEFAULTS.items():
            was_default = (name, getattr(data, name)) == ("too_long", "drop")  # stored by runs older than `auto`
            if getattr(data, name) != default and not was_default:
                rule = f"only applies to data.source=chat, not {data.source}"
                raise setting_error(f"data.{name}", getattr(data, name), rule, default)
        return
    if not data.path:
        rule = "data.source=chat needs a file of conversations"
        raise setting_error("data.path", data.path, rule, example="chats.jsonl")
    if data.tokenizer == MODEL:
        rule = "neither model.path nor train.init_from is a folder"
        raise setting_error("data.tokenizer", MODEL, rule, fix="give model.path=<Hugging Face folder>")
    _check_template(data.chat_template)


def _check_template(setting: str) -> None:
    path = Path(setting).expanduser()
    if setting in (MODEL, CHATML) or path.is_file():
        return
    found = "is a folder" if path.is_dir() else "no such file" if path.suffix or "/" in setting else "unknown name"
    rule = f"{found}; must be model, chatml, or a Jinja file"
    meant = MODEL if setting in ("auto", "tokenizer", "default") else nearest(setting, (CHATML, MODEL))
    example = None if meant else "chat_template.jinja"
    raise setting_error("data.chat_template", setting, rule, meant=meant, example=example)
