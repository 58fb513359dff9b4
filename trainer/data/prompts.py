"""Prompts as tokens: of a text that is continued, or of a message that is answered by a chat template."""

from __future__ import annotations

from trainer.data.tokenizer import Tokenizer
from trainer.errors import setting_error


def tokens_of_prompt(text: str, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of a text as documents begin; of none, what comes before a document."""
    return [*tokenizer.start_ids, *tokenizer.encode(text).tolist()] or [tokenizer.end_id]


def tokens_of_chat(text: str, tokenizer: str, key: str, template: str = "model") -> list[int]:
    """Return the tokens of a user's message up to where the assistant answers, by the tokenizer's chat template.

    key: the setting that asks for it.  template: what `data.chat_template` names.  Raises UserError if there is none.
    """
    try:
        from trainer.data.chat.template import find_template
    except ImportError as error:
        raise setting_error(key, text, f"needs the library {error.name}: pip install {error.name}") from error
    from trainer.data.chat.tokens import ChatTokenizer

    found, of_chats = find_template(template, tokenizer, key=key), ChatTokenizer(tokenizer)
    if found is None:
        raise setting_error(key, text, f"data.tokenizer={tokenizer} has no chat template", fix="--prompt TEXT")
    message = {"role": "user", "content": of_chats.quoted(text)}
    ids, _ = of_chats.encode(found.render([message], prompts=True).text)
    return [int(number) for number in ids]
