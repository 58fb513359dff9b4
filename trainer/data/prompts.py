"""Encodes prompts: text to continue, or a user's message in a chat template."""

from __future__ import annotations

from contextlib import suppress

from trainer.data.tokenizer import Tokenizer
from trainer.errors import setting_error


def prompt_tokens(text: str, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of a document that begins with `text`; if there are none, the end-of-document token."""
    return [*tokenizer.start_ids, *tokenizer.encode(text).tolist()] or [tokenizer.end_id]


def chat_end_ids(tokenizer: str, template: str = "model") -> set[int]:
    """Return the tokens at which generation with a chat model stops.

    These are the tokenizer's end-of-document token, which ends completions, and the token that ends the assistant's
    turns in the template, if it is a special token.

    tokenizer, template: the values of `data.tokenizer` and `data.chat_template`.

    Raises UserError if the tokenizer or the template cannot be read.
    """
    from trainer.data.chat.formats import BadChat, Conversation
    from trainer.data.chat.masking import ChatTokenizer, Encoder
    from trainer.data.chat.template import find_template

    chat_template, chat_tokenizer = find_template(template, tokenizer), ChatTokenizer(tokenizer)
    end_ids, system = {chat_tokenizer.plain.end_id}, {"role": "system", "content": "Hi"}
    exchange = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hi"}]
    for messages in (exchange, [system, *exchange]) if chat_template is not None else ():
        with suppress(BadChat):  # a template may require a system message, or reject one
            encoded = Encoder(chat_tokenizer, chat_template, "last").encode(Conversation(messages))
            last_targets = encoded.ids[encoded.trained][-1:].tolist()
            end_ids |= {last for last in last_targets if chat_tokenizer.is_added(last)}
    return end_ids


def chat_prompt_tokens(text: str, tokenizer: str, key: str, template: str = "model") -> list[int]:
    """Return the tokens of a user's message, rendered with the chat template and its generation prompt.

    key: the setting or option to name in errors.
    template: the value of `data.chat_template`.

    Raises UserError if there is no template.
    """
    try:
        from trainer.data.chat.template import find_template
    except ImportError as error:
        raise setting_error(key, text, f"needs the {error.name} library: pip install {error.name}") from error
    from trainer.data.chat.formats import BadChat
    from trainer.data.chat.masking import ChatTokenizer

    chat_template, chat_tokenizer = find_template(template, tokenizer, key=key), ChatTokenizer(tokenizer)
    if chat_template is None:
        raise setting_error(key, text, f"data.tokenizer={tokenizer} has no chat template", fix="--prompt TEXT")
    message = {"role": "user", "content": chat_tokenizer.quoted(text)}
    try:
        rendered = chat_template.render([message], prompts=True).text
    except BadChat as error:
        raise setting_error(key, text, str(error), fix=error.fix) from error
    ids, _ = chat_tokenizer.encode(rendered)
    return [int(token) for token in ids]
