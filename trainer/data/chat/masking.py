"""Computes the loss mask of a conversation: the assistant's text and the token that ends its turn are targets.

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
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.data.chat.conversation import BadChat, Completion, Conversation, Sample
from trainer.data.chat.template import REASONING_KEYS, ChatTemplate, Rendered
from trainer.data.chat.tokens import QUOTE, ChatTokenizer
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
        return (
            self._encode_completion(sample) if isinstance(sample, Completion) else self._encode_chat(sample, max_tokens)
        )

    def _encode_completion(self, sample: Completion) -> Encoded:
        """Encode prompt and completion separately, so that the prompt's tokens are the same as at inference time."""
        plain = self.tokenizer.plain
        prompt = np.array([*plain.start_ids, *plain.encode(sample.prompt)], np.int64)
        completion = np.array([*plain.encode(sample.completion), *plain.end_ids], np.int64)
        trained = np.arange(len(prompt) + len(completion)) >= (0 if self._train_on == "all" else len(prompt))
        spelled = self.tokenizer.spelled_in(sample.prompt + sample.completion)
        return Encoded(np.concatenate([prompt, completion]), trained, spelled)

    def _encode_chat(self, chat: Conversation, max_tokens: int | None) -> Encoded:
        text, ids, _, trained = self._encode_with_spans(chat, max_tokens)
        return Encoded(ids, trained, self.tokenizer.spelled_by_content(text))

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
        turns = chat.excluded if is_all_trained else self._turns(chat)
        loss_mask = np.zeros(len(ids), bool)
        end_of_needed = len(full.text) if max_tokens is None or len(ids) <= max_tokens else int(places[max_tokens, 0])
        with template.limits_for_many():
            for turn in turns:
                stop_if_asked()
                spans = _message_spans(template, chat, full, turn)
                for start, end in spans:
                    loss_mask |= (places[:, 0] < end) & (places[:, 1] > start)
                if spans and spans[0][0] >= end_of_needed:
                    break
        return full.text, ids, places, ~loss_mask if is_all_trained else loss_mask

    def _turns(self, chat: Conversation) -> list[int]:
        turns = chat.assistant_turns
        if self._train_on == "last":
            last = max((i for i, message in enumerate(chat.messages) if message["role"] == "assistant"), default=-1)
            return [turn for turn in turns if turn == last]
        if self._train_on == "completion":
            last_user = max((i for i, message in enumerate(chat.messages) if message["role"] == "user"), default=-1)
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
        content = message.get("content") or ""
        if message["role"] != "assistant" and not _contains_message(content, text):
            rule = f"messages[{number}].role={message['role']!r}: the chat template leaves this message out"
            raise BadChat(rule, "data.chat_template", fix="give a .jinja file that includes it")


def _contains_message(content: str, text: str) -> bool:
    """Return whether the text contains a message: verbatim, JSON-escaped, or with its lines indented."""
    as_json = json.dumps(content.strip(), ensure_ascii=False)[1:-1]
    return as_json in text or all(line.strip() in text for line in content.splitlines())


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
        raise _lacks_generation_prompt(turn) if full.text.startswith(before) else _changes_later(turn)
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


def _lacks_generation_prompt(turn: int) -> BadChat:
    rule = f"messages[{turn}]: the chat template does not start this turn with its generation prompt"
    return BadChat(rule, "data.chat_template", fix="mark the targets with {% generation %} in a .jinja file")
