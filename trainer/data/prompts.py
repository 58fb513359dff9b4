"""Encodes prompts: text to continue, or a user message in a chat template."""

from __future__ import annotations

from contextlib import suppress

from trainer.data.tokenizer import Tokenizer
from trainer.errors import setting_error


def prompt_tokens(text: str, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of a text at the start of a document.  If there are none, return the end-of-document token."""
    return [*tokenizer.start_ids, *tokenizer.encode(text).tolist()] or [tokenizer.end_id]


def chat_end_ids(tokenizer: str, template: str = "model") -> set[int]:
    """Return the tokens at which generation by a chat model stops.

    These are the tokenizer's end-of-document token, which ends completions, and the token with which the template ends
    the assistant's turns, if that is a special token.

    tokenizer, template: the values of `data.tokenizer` and `data.chat_template`.  Raises UserError if one cannot be
        read.
    """
    from trainer.data.chat.conversation import BadChat, Conversation
    from trainer.data.chat.masking import Encoder
    from trainer.data.chat.template import find_template
    from trainer.data.chat.tokens import ChatTokenizer

    found, of_chats = find_template(template, tokenizer), ChatTokenizer(tokenizer)
    ends, system = {of_chats.plain.end_id}, {"role": "system", "content": "Hi"}
    exchange = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hi"}]
    for messages in (exchange, [system, *exchange]) if found is not None else ():
        with suppress(BadChat):  # a template may require a system message, or refuse one
            encoded = Encoder(of_chats, found, "last").encode(Conversation(messages))
            ends |= {int(last) for last in encoded.ids[encoded.trained][-1:] if of_chats.is_added(int(last))}
    return ends


def chat_prompt_tokens(text: str, tokenizer: str, key: str, template: str = "model") -> list[int]:
    """Return the tokens of a user's message, rendered with the chat template and its generation prompt.

    key: the setting or option to name in errors.
    template: the value of `data.chat_template`.

    Raises UserError if there is no template.
    """
    try:
        from trainer.data.chat.template import find_template
    except ImportError as error:
        raise setting_error(key, text, f"needs the library {error.name}: pip install {error.name}") from error
    from trainer.data.chat.conversation import BadChat
    from trainer.data.chat.tokens import ChatTokenizer

    found, of_chats = find_template(template, tokenizer, key=key), ChatTokenizer(tokenizer)
    if found is None:
        raise setting_error(key, text, f"data.tokenizer={tokenizer} has no chat template", fix="--prompt TEXT")
    message = {"role": "user", "content": of_chats.quoted(text)}
    try:
        rendered = found.render([message], prompts=True).text
    except BadChat as error:
        raise setting_error(key, text, str(error), fix=error.fix) from error
    ids, _ = of_chats.encode(rendered)
    return [int(number) for number in ids]
