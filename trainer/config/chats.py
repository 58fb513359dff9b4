"""The rules of `data.source=chat`."""

from __future__ import annotations

from pathlib import Path

from trainer.config.auto import MODEL
from trainer.config.schema import RunConfig
from trainer.errors import setting_error

_OF_CHATS: dict[str, object] = {
    "format": "auto",
    "columns": None,
    "chat_template": MODEL,
    "train_on": "assistant",
    "too_long": "drop",
}
_OF_CHATS |= {"trim_rows": False}
"""Keys that say something of chats alone, and their defaults."""


def check_chats(config: RunConfig) -> None:
    """Raise UserError for settings of chats that cannot be, or that stand where there are none."""
    data = config.data
    if data.source != "chat":
        for name, default in _OF_CHATS.items():
            if getattr(data, name) != default:
                rule = f"only applies to data.source=chat, not {data.source}"
                raise setting_error(f"data.{name}", getattr(data, name), rule, default)
        return
    if not data.path:
        rule = "data.source=chat needs a file of conversations"
        raise setting_error("data.path", data.path, rule, example="chats.jsonl")
    if data.tokenizer == MODEL:
        rule = "neither model.path nor train.init_from is a folder"
        raise setting_error("data.tokenizer", MODEL, rule, fix="give model.path=<Hugging Face folder>")
    if data.chat_template != MODEL and not Path(data.chat_template).expanduser().is_file():
        rule = "must be model, or a Jinja file"
        meant = MODEL if data.chat_template in ("auto", "tokenizer", "default") else None
        raise setting_error("data.chat_template", data.chat_template, rule, meant=meant)
