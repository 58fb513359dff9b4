"""Tokenizes conversations and computes their loss mask: the targets are the assistant's text and the token that ends
its turn.

Unless it uses the tag `{% generation %}`, a template does not mark which part of its text the assistant wrote.  But the
conversation can be rendered up to where the assistant starts writing (`add_generation_prompt`), and up to the end of
its turn.  If both are prefixes of the full text, the span between them is what the model would have to generate.  If
they are not, the template renders a turn differently once it is in the past: the model would be trained on text that it
never sees at inference time, and no mask can correct that.

Some templates ignore `add_generation_prompt`.  Every client of such a model, including this project, then ends the
prompt before the header of the assistant's turn.  So the model has to generate the header as well, and the header is a
target.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.data.chat.formats import BadChat, Completion, Conversation, Sample
from trainer.data.chat.template import REASONING_KEYS, ChatTemplate, Rendered
from trainer.data.tokenizer import Tokenizer, find_tokenizer, tokenizer_file
from trainer.stopping import stop_if_asked


@dataclass(frozen=True)
class Encoded:
    """Token ids and loss mask of a conversation, both of shape (num_tokens,).

    spelled: a special token that is spelled out in the text, a sign that a chat template has already been applied to
        the file; empty if there is none.
    """

    ids: NDArray[np.int64]
    trained: NDArray[np.bool_]
    spelled: str = ""


class Encoder:
    """Encodes conversations as token ids with a loss mask.

    train_on: `assistant`, all assistant turns; `last`, the last assistant turn; `completion`, the assistant turns after
        the last user message; `all`, every token.  Messages of weight 0 are never trained on.
    setting: the value of `data.chat_template`, for error messages.
    """

    def __init__(
        self, tokenizer: ChatTokenizer, template: ChatTemplate | None, train_on: str, setting: str = "model"
    ) -> None:
        self.tokenizer, self.setting = tokenizer, setting
        self._template, self._train_on = template, train_on

    @property
    def identity(self) -> list[Any]:
        """JSON values that determine the encoding; encoders that differ in any way have a different identity."""
        template = self._template
        return [self.tokenizer.name, self._train_on, [template.sources, template.tokens] if template else None]

    def encode(self, sample: Sample, max_tokens: int | None = None) -> Encoded:
        """Encode a conversation or a completion.  Raises BadChat.

        max_tokens: tokens from this index on may be left out of the mask, because they will be truncated.  Masking a
            turn renders everything before it again, so a conversation of 20,000 turns would take minutes otherwise.
        """
        if isinstance(sample, Conversation):
            text, ids, _, trained = self._encode_with_spans(sample, max_tokens)
            return Encoded(ids, trained, self.tokenizer.spelled_by_content(text))
        # Prompt and completion are encoded separately, so that the prompt's tokens are the same as at inference time.
        plain = self.tokenizer.plain
        prompt = np.array([*plain.start_ids, *plain.encode(sample.prompt)], np.int64)
        completion = np.array([*plain.encode(sample.completion), *plain.end_ids], np.int64)
        trained = np.arange(len(prompt) + len(completion)) >= (0 if self._train_on == "all" else len(prompt))
        spelled = self.tokenizer.spelled_in(sample.prompt + sample.completion)
        return Encoded(np.concatenate([prompt, completion]), trained, spelled)

    @property
    def has_template(self) -> bool:
        """True if there is a chat template."""
        return self._template is not None

    def notes(self) -> list[str]:
        """Return one line for each peculiarity of the chat template that users should know about."""
        template = self._template
        if template is None:
            return []
        system, asked = {"role": "system", "content": "Hi"}, {"role": "user", "content": "Hi"}
        answer = {"role": "assistant", "content": "Hello"}
        for before in ([asked], [system, asked]):
            try:
                prompt = template.render(before, prompts=True).text
                full = template.render([*before, answer]).text
                encoded = Encoder(self.tokenizer, template, "last").encode(Conversation([*before, answer]))
            except BadChat:  # a template may require a system message, or reject one
                continue
            notes = []
            header = full[len(prompt) : full.rfind("Hello")] if "Hello" in full[len(prompt) :] else ""
            if prompt == template.render(before).text and header.strip():
                notes.append(
                    f"the chat template ignores add_generation_prompt: the model learns to write {header!r} itself, as "
                    "every client will make it do"
                )
            targets = encoded.ids[encoded.trained]
            is_shown = len(targets) and "Hello" in full  # a template may mark only some turns, or alter the text
            if is_shown and self._train_on != "all" and not self.tokenizer.is_added(int(targets[-1])):
                end = full[full.rfind("Hello") + 5 :].strip()
                notes.append(
                    f"warning: the chat template ends turns with {end!r}, which is not a token of its own: generation "
                    "does not stop there"
                )
            return notes
        return []

    def pieces(self, sample: Sample) -> list[tuple[str, bool]]:
        """Return the text as pieces, each with whether it is trained on.  Raises BadChat."""
        if isinstance(sample, Completion):
            plain = self.tokenizer.plain
            ends = "".join(map(self.tokenizer.text_of, plain.end_ids))
            return [(sample.prompt, self._train_on == "all"), (sample.completion + ends, True)]
        text, _, places, trained = self._encode_with_spans(sample)
        changes = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist()]
        starts = [0, *places[changes[1:], 0].tolist(), len(text)]
        return [
            (text[start:stop].replace(QUOTE, ""), bool(trained[change]))
            for change, start, stop in zip(changes, starts[:-1], starts[1:], strict=True)
        ]

    def _encode_with_spans(
        self, chat: Conversation, max_tokens: int | None = None
    ) -> tuple[str, NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """Return a conversation's text, its ids, the character span of each id, and the loss mask.

        Turns that start after the first `max_tokens` ids are skipped.
        """
        template = self._template
        if template is None:
            raise BadChat(
                "needs a chat template, and the tokenizer has none", "data.chat_template", fix=_FIX_NO_TEMPLATE
            )
        _check_support(chat, template)
        quoted = self.tokenizer.quoted
        try:
            chat = replace(chat, messages=quoted(chat.messages), tools=quoted(chat.tools))
            full = template.render(chat.messages, chat.tools)
        except RecursionError as error:
            raise BadChat("is nested too deeply", fix="remove the record") from error
        _check_all_included(chat, full.text)
        ids, places = self.tokenizer.encode(full.text)
        is_all_trained = self._train_on == "all"
        loss_mask = np.zeros(len(ids), bool)
        end_of_needed = len(full.text) if max_tokens is None or len(ids) <= max_tokens else int(places[max_tokens, 0])
        with template.limits_for_many():
            for turn in self._turns(chat):
                stop_if_asked()
                spans = _message_spans(template, chat, full, turn)
                for start, end in spans:
                    loss_mask |= (places[:, 0] < end) & (places[:, 1] > start)
                if spans and spans[0][0] >= end_of_needed:
                    break
        return full.text, ids, places, ~loss_mask if is_all_trained else loss_mask

    def _turns(self, chat: Conversation) -> list[int]:
        """Return the indices of the messages to train on; for `all`, of those not to train on."""
        weights = [message.get("weight", 1) for message in chat.messages]
        if self._train_on == "all":
            return [number for number, weight in enumerate(weights) if weight == 0]
        roles = [message["role"] for message in chat.messages]
        turns = [
            number for number in range(chat.first, len(roles)) if roles[number] == "assistant" and weights[number] != 0
        ]
        if self._train_on == "last":
            last = max((number for number, role in enumerate(roles) if role == "assistant"), default=-1)
            return [turn for turn in turns if turn == last]
        if self._train_on == "completion":
            last_user = max((number for number, role in enumerate(roles) if role == "user"), default=-1)
            return [turn for turn in turns if turn > last_user]
        return turns


def _check_support(chat: Conversation, template: ChatTemplate) -> None:
    """Raise BadChat for tools, tool calls or reasoning that the template would silently omit."""
    if chat.tools and not template.reads_tools:
        raise BadChat("has tools, which the chat template does not support", "data.chat_template", fix=_FIX_NO_TOOLS)
    calls = [number for number, message in enumerate(chat.messages) if message.get("tool_calls")]
    if calls and not template.reads_tool_calls:
        rule = f"messages[{calls[0]}].tool_calls: the chat template does not support tool calls"
        raise BadChat(rule, "data.chat_template", fix=_FIX_NO_TOOLS)
    thoughts = [(number, key) for number, m in enumerate(chat.messages) for key in REASONING_KEYS if m.get(key)]
    if thoughts and not template.reads_reasoning:
        number, key = thoughts[0]
        rule = f"messages[{number}].{key}: the chat template has no place for it"
        raise BadChat(rule, "data.chat_template", fix=f"{_FIX_NO_TOOLS}, or remove {key} from the records")


_FIX_NO_TEMPLATE = "data.chat_template=chatml, or a .jinja file"

_FIX_NO_TOOLS = "give a .jinja file that has one"


def _check_all_included(chat: Conversation, text: str) -> None:
    """Raise BadChat if the template omitted a message."""
    for number, message in enumerate(chat.messages):
        if message["role"] == "assistant":
            continue
        content = message.get("content") or ""
        as_json = json.dumps(content.strip(), ensure_ascii=False)[1:-1]
        if as_json not in text and not all(line.strip() in text for line in content.splitlines()):  # indented lines
            rule = f"messages[{number}].role={message['role']!r}: the chat template leaves this message out"
            raise BadChat(rule, "data.chat_template", fix="give a .jinja file that includes it")


def _message_spans(template: ChatTemplate, chat: Conversation, full: Rendered, number: int) -> list[tuple[int, int]]:
    """Return the character spans of a message in the full text; for the assistant, of the text that it generates.

    Raises BadChat; see `_assistant_spans`.
    """
    if chat.messages[number]["role"] == "assistant":
        return _assistant_spans(template, chat, full, number)
    before, through = (
        template.render(chat.messages[:end], chat.tools).text if end else "" for end in (number, number + 1)
    )
    if not (full.text.startswith(before) and full.text.startswith(through)):
        raise _changes_later(number)
    return [(len(before), len(through))]


def _assistant_spans(template: ChatTemplate, chat: Conversation, full: Rendered, turn: int) -> list[tuple[int, int]]:
    """Return the (start, end) character spans that the assistant generates in a turn, including the end-of-turn token.

    A span starts at the end of the prompt that a client would render (`add_generation_prompt`), so that training and
    generation see the same context.  Raises BadChat if the template renders the turn, or the text before it,
    differently once other turns follow.
    """
    before = template.render(chat.messages[:turn], chat.tools).text
    through = full.text
    if turn + 1 < len(chat.messages):
        through = template.render(chat.messages[: turn + 1], chat.tools).text
    end = _end_of_turn(template, chat, through, turn)
    if not full.text.startswith(through[:end]):
        raise _changes_later(turn)
    prompt = template.render(chat.messages[:turn], chat.tools, prompts=True).text
    if template.has_generation:
        if not full.text.startswith(before.rstrip()):
            raise _changes_later(turn)
        spans = [(start, min(stop, end)) for start, stop in full.generated if len(before.rstrip()) <= start < end]
        if not spans:
            return []
        spans[-1] = (spans[-1][0], end)
        if prompt == before:  # no generation prompt: the model has to generate the header outside the tag as well
            spans[0] = (len(before), spans[0][1])
        return spans
    if not full.text.startswith(prompt):
        if not full.text.startswith(before):
            raise _changes_later(turn)
        rule = f"messages[{turn}]: the chat template does not start this turn with its generation prompt"
        raise BadChat(rule, "data.chat_template", fix="mark the targets with {% generation %} in a .jinja file")
    return [(len(prompt), end)]


def _end_of_turn(template: ChatTemplate, chat: Conversation, text: str, turn: int) -> int:
    """Return the end of a text's last turn: after its end-of-turn token, before trailing white space.

    Raises BadChat if nothing but white space follows the message: an answer may contain white space itself, so
    generation could not stop there.
    """
    end = len(text.rstrip())
    content = (chat.messages[turn].get("content") or "").rstrip()
    if content and text[:end].endswith(content):
        # An answer such as ">" also matches the end of "<|im_end|>": rendering a marker in its place resolves this.
        message = {**chat.messages[turn], "content": _MARK}
        if template.render([*chat.messages[:turn], message], chat.tools).text.rstrip().endswith(_MARK):
            rule = (
                f"messages[{turn}]: the chat template does not end this turn with a token (only white space, or "
                "nothing, follows the message), so the model cannot learn to stop"
            )
            raise BadChat(rule, "data.chat_template", fix="end it with a token, such as {{ eos_token }}")
    return end


_MARK = "\U000f5151"
"""Placeholder content: a character of the private use area, which does not occur elsewhere in the text."""


def _changes_later(turn: int) -> BadChat:
    rule = (
        f"messages[{turn}]: the chat template shows this turn differently once others follow, so the text trained on "
    )
    return BadChat(f"{rule}would not be what the model sees later", "data.train_on", legal="last")


# ---------------------------------------------------------------------------------------------------------------
# Tokenizing rendered chats
#
# For plain text, `trainer.data.tokenizer` never produces special tokens.  A chat template, in contrast, spells out
# special tokens that must be recognized.  A special token spelled in a message must still be encoded as text: `quoted`
# hides it from the template and the tokenizer.


QUOTE = "\U000f5150"
"""A character of the private use area, inserted into the spelling of a special token so that it is not recognized."""


class ChatTokenizer:
    """Tokenizer that recognizes special tokens spelled in a text, and returns the character span of each id.

    plain: the same tokenizer without recognition of special tokens.
    """

    def __init__(self, setting: str, key: str = "data.tokenizer") -> None:
        self.plain: Tokenizer = find_tokenizer(setting, key)
        self._content: dict[str, Any] = {}  # empty for `bytes`, which has no special tokens
        if setting != "bytes":
            self._content = json.loads(tokenizer_file(setting).read_bytes())
            # It would trim white space from the tokens' spans, and the template already writes the special tokens.
            self._content["post_processor"] = None
        special = [token["content"] for token in self._content.get("added_tokens", ()) if token.get("special")]
        longest_first = sorted(filter(None, special), key=len, reverse=True)
        self._special_tokens = longest_first
        self._special_pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    @property
    def vocab_size(self) -> int:
        """Exclusive upper bound of the ids."""
        return self.plain.vocab_size

    @property
    def name(self) -> str:
        """Identifies the tokenizer; tokenizers that produce different ids have different names."""
        return f"chat-{self.plain.name}"

    def quoted(self, value: Any) -> Any:
        """Return a message, or any JSON value, with QUOTE inserted into every special token that it spells."""
        if isinstance(value, str):
            return self._special_pattern.sub(
                lambda found: found[0][:1] + QUOTE + found[0][1:], value.replace(QUOTE, "")
            )
        if isinstance(value, Mapping):
            return {key: self.quoted(item) for key, item in value.items()}
        return [self.quoted(item) for item in value] if isinstance(value, (list, tuple)) else value

    def spelled_in(self, text: str) -> str:
        """Return the first special token that a text spells, or an empty string."""
        found = self._special_pattern.search(text)
        return found[0] if found else ""

    def spelled_by_content(self, text: str) -> str:
        """Return a special token that both the template and a message spell, or an empty string."""
        if QUOTE not in text:
            return ""
        rendered = (token for token in self._special_tokens if token in text)
        return next((token for token in rendered if f"{token[:1]}{QUOTE}{token[1:]}" in text), "")

    def is_added(self, number: int) -> bool:
        """Return whether an id belongs to an added token, such as an end of turn, rather than to a piece of text."""
        return any(token["id"] == number for token in self._content.get("added_tokens", ()))

    def has(self, text: str) -> bool:
        """Return whether a text is an added token."""
        return any(token["content"] == text for token in self._content.get("added_tokens", ()))

    def text_of(self, number: int) -> str:
        """Return the text of one id, which may be a special token."""
        return self.plain.decode([number]) if not self._content else str(self._special_tokenizer.id_to_token(number))

    def encode(self, text: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the ids of a text, and the (start, end) character span of each, of shape (num_ids, 2).

        Quoted special tokens are encoded as text; QUOTE itself counts as a character in the spans.
        """
        if not self._content:
            ids = np.frombuffer(text.encode(), np.uint8).astype(np.int64)
            starts = np.repeat(np.arange(len(text)), [len(character.encode()) for character in text])
            return ids, np.stack([starts, starts + 1], axis=1)
        if QUOTE not in text:
            return self._encode(text, 0)
        parts, position = [], 0
        for found in re.finditer(f"{self._special_pattern.pattern}|$", text):
            parts += [
                self._encode_quoted(text[position : found.start()], position),
                self._encode(found[0], found.start()),
            ]
            position = found.end()
        return np.concatenate([ids for ids, _ in parts]), np.concatenate([spans for _, spans in parts])

    def _encode(self, text: str, start: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        found = self._special_tokenizer.encode(text, add_special_tokens=False)
        return np.array(found.ids, np.int64), np.array(found.offsets, np.int64).reshape(-1, 2) + start

    def _encode_quoted(self, text: str, start: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        is_text = np.array([character != QUOTE for character in text], bool)
        original_offsets = np.append(np.flatnonzero(is_text), len(text))
        found = self._plain_tokenizer.encode(text.replace(QUOTE, ""), add_special_tokens=False)
        spans = np.array(found.offsets, np.int64).reshape(-1, 2)
        return np.array(found.ids, np.int64), original_offsets[spans] + start

    @cached_property
    def _special_tokenizer(self) -> Any:
        return _tokenizer_of(self._content)

    @cached_property
    def _plain_tokenizer(self) -> Any:
        tokenizer = _tokenizer_of(self._content)
        tokenizer.encode_special_tokens = True
        return tokenizer


def _tokenizer_of(content: Mapping[str, Any]) -> Any:
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
