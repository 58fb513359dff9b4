"""Reads and encodes prompts: text to continue, or a conversation rendered with a chat template."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.data.records import RECORD_KINDS, FilePart, InputFile
from trainer.data.tokenizer import Tokenizer
from trainer.errors import importing, setting_error


def prompt_tokens(
    text: str, tokenizer: Tokenizer, setting: str = "bytes", special_tokens: Sequence[str] = ()
) -> list[int]:
    """Return the tokenizer's start tokens and the tokens of `text`, or the end-of-document token if both are empty.

    setting, special_tokens: the values of `data.tokenizer` and `data.special_tokens`.
    """
    ids = tokenizer.encode(text)
    if special_tokens:
        from trainer.data.chat.tokenizer import ChatTokenizer

        ids = ChatTokenizer(setting, accepted=special_tokens).encode_message(text)
    return [*tokenizer.start_ids, *ids.tolist()] or [tokenizer.end_id]


def chat_stop_ids(tokenizer: str, template: str = "model") -> set[int]:
    """Return the tokens at which generation with a chat model stops; see `Encoder.stop_tokens`.

    tokenizer: the value of `data.tokenizer`.
    template: the value of `data.chat_template`.

    Raises UserError if the tokenizer or the template cannot be read, or if a library that templates need is missing.
    """
    with importing("data.chat_template", template):
        from trainer.data.chat.masking import Encoder
        from trainer.data.chat.template import find_template
        from trainer.data.chat.tokenizer import ChatTokenizer

    chat_tokenizer, chat_template = ChatTokenizer(tokenizer), find_template(template, tokenizer)
    stop_ids = {chat_tokenizer.plain.end_id}
    if chat_template is not None:
        stop_ids.update(Encoder(chat_tokenizer, chat_template, "last").stop_tokens.values())
    return stop_ids


def chat_prompt_tokens(
    text: str, tokenizer: str, key: str, template: str = "model", special_tokens: Sequence[str] = ()
) -> list[int]:
    """Return the tokens of a user message rendered with the chat template, including the generation prompt.

    text: the user message.
    tokenizer, template, special_tokens: the values of `data.tokenizer`, `data.chat_template`, `data.special_tokens`.
    key: the setting or option that contains the message, for error messages.

    Raises UserError in the same cases as `ChatPrompts`, and if the template rejects the message.
    """
    return ChatPrompts(tokenizer, key, text, template, special_tokens).tokens([{"role": "user", "content": text}])


class ChatPrompts:
    """Encodes conversations for the model to answer, rendered with a chat template and its generation prompt.

    Messages, calls and tools are treated as in training data.
    """

    def __init__(
        self, tokenizer: str, key: str, value: object, template: str = "model", special_tokens: Sequence[str] = ()
    ) -> None:
        """Load the template and the tokenizer.

        tokenizer, template, special_tokens: the values of `data.tokenizer`, `data.chat_template`,
            `data.special_tokens`.
        key: the setting or option to name in error messages.
        value: its value, for error messages.

        Raises UserError if there is no template, if the template or the tokenizer cannot be read, or if a library that
        templates need is missing.
        """
        with importing(key, value):
            from trainer.data.chat.masking import Encoder
            from trainer.data.chat.template import find_template
            from trainer.data.chat.tokenizer import ChatTokenizer

        chat_template = find_template(template, tokenizer, key=key)
        if chat_template is None:
            raise setting_error(key, value, f"data.tokenizer={tokenizer} has no chat template", fix="--prompt TEXT")
        self._encoder = Encoder(ChatTokenizer(tokenizer, accepted=special_tokens), chat_template, "all")
        self._key, self._value = key, value

    def tokens(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = ()) -> list[int]:
        """Return the tokens of a conversation.  Raises UserError if it is invalid or the template rejects it."""
        from trainer.data.chat.formats import BadChat, Conversation, Format

        try:
            chat = Format("messages").read({"messages": list(messages), "tools": tools})
            assert isinstance(chat, Conversation)
            return self._encoder.encode_prompt(chat)
        except BadChat as error:
            raise setting_error(self._key, self._value, str(error), fix=error.fix) from error


def read_prompts(path: Path, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (location, record) for each prompt in a file; locations are for error messages.

    In a file of records, such as .jsonl, .parquet or another file type that `data.source=chat` reads, each record has
    `prompt` (text) or `messages` (as in `data.format=messages`); all other keys are kept.  In any other file, every
    nonblank line is a prompt.

    Raises UserError, naming `key`, if the file cannot be read, or if a record has no valid prompt.
    """
    file = InputFile.from_path(str(path), key)
    if file is not None and file.kind in RECORD_KINDS:
        yield from _read_prompt_records(file)
        return
    try:
        with open(path, encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"{path.name}:{number}", {"prompt": line.rstrip("\n")}
    except OSError as error:
        rule = f"cannot be read ({error.strerror or error})"
        raise setting_error(key, path, rule, fix="check the path, or give another file") from error
    except UnicodeDecodeError as error:
        raise setting_error(key, path, f"is not UTF-8 ({error.reason})", fix="convert it to UTF-8") from error


def _read_prompt_records(file: InputFile) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (location, record) for each record of a file; see `read_prompts`."""
    from trainer.data.chat.formats import BadChat, Format, location_of, read_objects

    part = FilePart(file)
    for number, record in read_objects(part):
        location = location_of(part, number)
        try:
            json.dumps(record)
            if "messages" in record:
                Format("messages").read(record)
            elif not isinstance(record.get("prompt"), str):
                raise BadChat("needs `prompt` (text) or `messages`", fix='write lines such as {"prompt": "Hi"}')
        except TypeError as error:  # dates and bytes in parquet files
            rule = f"{location}: cannot be copied to the output, which is JSON ({error})"
            fix = "leave the column out, or store it as text"
            raise setting_error(file.key, file.path, rule, fix=fix) from error
        except BadChat as error:
            raise setting_error(file.key, file.path, f"{location}: {error}", fix=error.fix) from error
        yield location, dict(record)
