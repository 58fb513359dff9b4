"""Tokenizes conversations and computes loss masks: by default, the targets are the assistant's turns.

Unless it uses the `{% generation %}` tag, a template does not mark which part of its text the assistant wrote.  But the
conversation can be rendered twice: up to where the assistant starts to write (`add_generation_prompt`), and up to the
end of the assistant's turn.  If both renderings are prefixes of the full text, the assistant wrote what the second adds
to the first.  If they are not, the template does not start the turn with its generation prompt, or it renders a turn
differently when other turns follow: then the model would be trained on text that it never sees at inference time, and
no mask can correct that.

Some templates ignore `add_generation_prompt`.  Every client of such a model, including this project, then ends the
prompt before the header of the assistant's turn.  The model has to generate the header, so the header is a target.

The last target of every turn is a token at which generation stops: the token with which the template ends the turn, or
else the token with which the next message begins; see `turn_ends.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.data.chat.calls import (
    ArgumentsForm,
    convert_arguments,
    find_arguments_form,
    find_missing_part,
    marked,
    marked_tools,
    omission_error,
)
from trainer.data.chat.formats import REASONING_KEYS, BadChat, Completion, Conversation, Message, Notice, Sample
from trainer.data.chat.template import ChatTemplate, RenderedChat
from trainer.data.chat.tokenizer import QUOTE, ChatTokenizer
from trainer.data.chat.turn_ends import TurnEnds, common_length, without_end_error


@dataclass(frozen=True)
class EncodedSample:
    """Token ids and loss mask of a conversation or completion, both of shape (num_tokens,).

    loss_mask: True for the tokens that are targets.
    notices: what the user should know about the sample.
    """

    ids: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    notices: frozenset[Notice] = frozenset()

    def truncated(self, num_tokens: int, only_last_token: bool) -> EncodedSample:
        """Return the first `num_tokens` tokens, without the notices.

        only_last_token: if True, the last of these tokens becomes the only target; otherwise the targets are kept.
        """
        loss_mask = self.loss_mask[:num_tokens]
        return EncodedSample(self.ids[:num_tokens], last_token_mask(len(loss_mask)) if only_last_token else loss_mask)


def last_token_mask(num_tokens: int) -> NDArray[np.bool_]:
    """Return a mask of `num_tokens` tokens that selects only the last one."""
    return np.arange(num_tokens) == num_tokens - 1


class Encoder:
    """Encodes conversations as token ids with a loss mask.

    train_on: the targets are the tokens of all assistant turns (`assistant`), of the last one (`last`), or of those
        after the last user message (`completion`); all tokens (`all`); or only the last token (`end`).  Except with
        `end`, no token of a message with weight 0 is a target.  In a `Completion`, the targets are all tokens (`all`),
        only the last token (`end`), or otherwise the tokens of the completion but not of the prompt.
    template_name: the value of `data.chat_template`, for error messages.
    """

    def __init__(
        self, tokenizer: ChatTokenizer, template: ChatTemplate | None, train_on: str, template_name: str = "model"
    ) -> None:
        self.tokenizer, self.template_name = tokenizer, template_name
        self._template, self._train_on = template, train_on
        self._arguments_forms: dict[bool, ArgumentsForm] = {}
        self._unread_keys: dict[tuple[str, str], bool] = {}
        self._missing_parts: dict[tuple[Any, ...], str] = {}
        self._known_turn_ends: TurnEnds | None = None

    @property
    def identity(self) -> list[Any]:
        """JSON values that determine the encoding: two encoders with the same identity give the same results."""
        template = self._template
        return [
            [self.tokenizer.name, sorted(self.tokenizer.accepted)],
            self._train_on,
            [template.sources, template.tokens] if template else None,
        ]

    def encode(self, sample: Sample, max_tokens: int | None = None) -> EncodedSample:
        """Encode a conversation or a completion.  Raises BadChat.

        max_tokens: the mask may be wrong from this token on, since the caller truncates the rest.  Masking a turn
            renders everything before it again, so a conversation of 20,000 turns would otherwise take minutes.
        """
        if isinstance(sample, Conversation):
            encoded = self._encode_conversation(sample, max_tokens)
            return EncodedSample(encoded.ids, encoded.loss_mask, encoded.notices)
        # Prompt and completion are encoded separately, so that the prompt has the same tokens as at inference time.
        plain = self.tokenizer.plain
        prompt = np.array([*plain.start_ids, *self.tokenizer.encode_message(sample.prompt)], np.int64)
        completion = np.array([*self.tokenizer.encode_message(sample.completion), *plain.end_ids], np.int64)
        num_tokens = len(prompt) + len(completion)
        loss_mask = np.arange(num_tokens) >= (0 if self._train_on == "all" else len(prompt))
        loss_mask = last_token_mask(num_tokens) if self.targets_only_last_token else loss_mask
        spelled_out = self.tokenizer.find_special_tokens(sample.prompt + sample.completion)
        notices: set[Notice] = {("read as text", token) for token in spelled_out}
        return EncodedSample(np.concatenate([prompt, completion]), loss_mask, frozenset(notices))

    def encode_prompt(self, chat: Conversation) -> list[int]:
        """Return the ids of a conversation for the assistant to continue.  Raises BadChat."""
        template = self._require_template()
        prepared = self._prepare(template, chat)
        text = template.render(prepared.messages, prepared.tools, add_generation_prompt=True).text
        ids: list[int] = self.tokenizer.encode(text)[0].tolist()
        return ids

    @property
    def stop_tokens(self) -> Mapping[str, int]:
        """The tokens at which generation stops; see `TurnEnds.stop_tokens`.  Requires a chat template."""
        return self._turn_ends(self._require_template()).stop_tokens

    @property
    def targets_only_last_token(self) -> bool:
        """True if the last token, where a reward or classification head scores the conversation, is the only target."""
        return self._train_on == "end"

    @property
    def has_template(self) -> bool:
        """True if there is a chat template."""
        return self._template is not None

    def notes(self) -> list[str]:
        """Return notes about a chat template that ignores `add_generation_prompt`, or ends turns without a token."""
        template = self._template
        if template is None:
            return []
        notes = []
        if self._train_on not in ("all", "end") and (text := self._turn_ends(template).closing_text):
            notes.append(
                f"warning: the chat template ends turns with {text!r}, which is not a token of "
                f"data.tokenizer={self.tokenizer.plain.name}: generation does not stop there"
            )
        system, user = {"role": "system", "content": "Hi"}, {"role": "user", "content": "Hi"}
        for prompt_messages in ([user], [system, user]):
            try:
                prompt = template.render(prompt_messages, add_generation_prompt=True).text
                full = template.render([*prompt_messages, {"role": "assistant", "content": "Hello"}]).text
            except BadChat:  # a template may require a system message, or reject one
                continue
            header = full[len(prompt) : full.rfind("Hello")] if "Hello" in full[len(prompt) :] else ""
            if prompt == template.render(prompt_messages).text and header.strip():
                notes.append(
                    f"the chat template ignores add_generation_prompt: the model learns to write {header!r} itself, as "
                    "it has to at inference time"
                )
            break
        return notes

    def pieces(self, sample: Sample) -> list[tuple[str, bool]]:
        """Return (text, is_target) for each piece of the text, for display.  Raises BadChat."""
        if isinstance(sample, Completion):
            completion = sample.completion + "".join(map(self.tokenizer.token_text, self.tokenizer.plain.end_ids))
            if self.targets_only_last_token:
                text, last = sample.prompt + completion, self.tokenizer.token_text(int(self.encode(sample).ids[-1]))
                return [(text.removesuffix(last), False), (last, True)]
            return [(sample.prompt, self._train_on == "all"), (completion, True)]
        encoded = self._encode_conversation(sample)
        changes = [0, *(np.flatnonzero(np.diff(encoded.loss_mask)) + 1).tolist()]
        starts = [0, *encoded.spans[changes[1:], 0].tolist(), len(encoded.text)]
        return [
            (encoded.text[start:stop].replace(QUOTE, ""), bool(encoded.loss_mask[change]))
            for change, start, stop in zip(changes, starts[:-1], starts[1:], strict=True)
        ]

    def _encode_conversation(self, chat: Conversation, max_tokens: int | None = None) -> _EncodedConversation:
        """Render and tokenize a conversation.

        max_tokens: the mask may be wrong after this many ids; see `encode`.
        """
        template = self._require_template()
        prepared = self._prepare(template, chat)
        full = template.render(prepared.messages, prepared.tools)
        unread_keys = self._find_unread_keys(template, prepared, full)
        self._check_included(template, prepared, full.text)
        if not self.targets_only_last_token:
            full = replace(full, text=self._turn_ends(template).complete(prepared, full.text))
        ids, spans = self.tokenizer.encode(full.text)
        is_in_turn, has_untagged_turn = np.zeros(len(ids), bool), False
        needed_chars = len(full.text) if max_tokens is None or len(ids) <= max_tokens else int(spans[max_tokens, 0])
        for turn in self._turns(prepared):
            turn_spans = self._message_spans(template, prepared, full, turn)
            has_untagged_turn |= not turn_spans
            for start, end in turn_spans:
                is_in_turn |= (spans[:, 0] < end) & (spans[:, 1] > start)
            if turn_spans and turn_spans[0][0] >= needed_chars:
                break
        if self.targets_only_last_token:
            loss_mask = last_token_mask(len(ids))
        else:
            loss_mask = ~is_in_turn if self._train_on == "all" else is_in_turn
        notices: set[Notice] = {("unread key", key) for key in unread_keys}
        for token in self.tokenizer.find_quoted_tokens(full.text):
            notices.add(("spelled out" if token in full.text else "read as text", token))
        if converted_to := self._converted_to(chat, prepared):
            notices.add(("converted arguments", converted_to))
        if has_untagged_turn:
            notices.add(("untagged turn", "{% generation %}"))
        for role in self._roles_flagged_in_vain(chat):
            notices.add(("flag without effect", role))
        return _EncodedConversation(full.text, ids, spans, loss_mask, frozenset(notices))

    def _require_template(self) -> ChatTemplate:
        if self._template is None:
            raise BadChat(
                "needs a chat template, and the tokenizer has none", "data.chat_template", fix=_FIX_NO_TEMPLATE
            )
        return self._template

    def _turn_ends(self, template: ChatTemplate) -> TurnEnds:
        if self._known_turn_ends is None:
            self._known_turn_ends = TurnEnds(self.tokenizer, template, partial(self._prepare, template))
        return self._known_turn_ends

    def _prepare(self, template: ChatTemplate, chat: Conversation) -> Conversation:
        """Return a conversation as the template takes it: with converted arguments and quoted special tokens."""
        _check_support(chat, template)
        messages: Sequence[Message] = chat.messages
        if any(message.get("tool_calls") for message in messages):
            has_tools = bool(chat.tools)
            if has_tools not in self._arguments_forms:
                self._arguments_forms[has_tools] = find_arguments_form(template, chat)
            messages = convert_arguments(messages, self._arguments_forms[has_tools])
        return replace(chat, messages=self.tokenizer.quoted(messages), tools=self.tokenizer.quoted(chat.tools))

    # -- what the template leaves out --

    def _check_included(self, template: ChatTemplate, chat: Conversation, text: str) -> None:
        """Raise BadChat if the rendered text lacks a tool, or a part of a message.

        Of the assistant's messages, only those that are trained on are checked: some templates omit the reasoning of
        earlier turns, at inference time as well.
        """
        roles = [message["role"] for message in chat.messages]
        if chat.tools and self._find_missing(("tools", tuple(roles[:2]), roles[-1]), template, chat, None):
            rule = "has tools, which the chat template does not write in this conversation"
            raise BadChat(rule, "data.chat_template", fix=_FIX_NO_SUPPORT)
        targets = range(len(roles)) if self._train_on == "all" else self._turns(chat)
        for number, message in enumerate(chat.messages):
            if message["role"] == "assistant" and number not in targets:
                continue
            is_whole = message["role"] != "assistant" or self._train_on == "all"
            part = (find_missing_part(message, text) if is_whole else "") or self._find_missing(
                (
                    *(message["role"], roles[number - 1] if number else "", number == len(roles) - 1, bool(chat.tools)),
                    *(bool(message["content"]), any(message.get(key) for key in REASONING_KEYS)),
                    *(len(message.get("tool_calls", ())), is_whole),
                ),
                template,
                chat if is_whole else replace(chat, messages=chat.messages[: number + 1]),
                number,
            )
            if part and message["role"] != "assistant":
                rule = f"messages[{number}].role={message['role']!r}: the chat template omits this message"
                raise BadChat(rule, "data.chat_template", fix="give a .jinja file that includes it")
            if part:
                raise omission_error(number, part)

    def _find_missing(
        self, shape: tuple[Any, ...], template: ChatTemplate, chat: Conversation, number: int | None
    ) -> str:
        """Return which part of a message the template leaves out, or "": a part of `marked`, or a tool if it is None.

        Found out once for each shape of a message, by rendering the first one with other texts.
        """
        if shape not in self._missing_parts:
            messages, tools = list(chat.messages), chat.tools
            if number is None:
                tools, names = marked_tools(tools)
                texts = {name: name for name in names}
            else:
                messages[number], texts = marked(messages[number])
            missing = ""
            with suppress(BadChat):  # a template may reject such texts
                rendered = template.render(messages, tools).text
                missing = next((part for part, text in texts.items() if text not in rendered), "")
            self._missing_parts[shape] = missing
        return self._missing_parts[shape]

    # -- notices --

    def _find_unread_keys(self, template: ChatTemplate, chat: Conversation, full: RenderedChat) -> set[str]:
        """Return the keys of messages that the template does not read.

        A key that the template does not name may still be read, by a template that writes messages as a whole.  So the
        first conversation with such a key is also rendered without it.
        """
        unread_keys = set()
        for number, message in enumerate(chat.messages):
            for key in message.keys() - _KNOWN_KEYS - template.names:
                place = (message["role"], key)
                if place not in self._unread_keys:
                    shorter = {name: value for name, value in message.items() if name != key}
                    others = [*chat.messages[:number], shorter, *chat.messages[number + 1 :]]
                    self._unread_keys[place] = template.render(others, chat.tools).text == full.text
                if self._unread_keys[place]:
                    unread_keys.add(key)
        return unread_keys

    def _converted_to(self, chat: Conversation, prepared: Conversation) -> str:
        """Return the form to which arguments of calls were converted, or "" if none were."""
        for message, converted in zip(chat.messages, prepared.messages, strict=True):
            for call, new_call in zip(message.get("tool_calls", ()), converted.get("tool_calls", ()), strict=True):
                arguments, new = (each.get("function", each).get("arguments") for each in (call, new_call))
                if arguments and isinstance(arguments, str) != isinstance(new, str):
                    return "text" if isinstance(new, str) else "objects"
        return ""

    def _roles_flagged_in_vain(self, chat: Conversation) -> set[str]:
        if self._train_on in ("all", "end"):
            return set()
        flagged = {number for number, message in enumerate(chat.messages) if message.get("weight") == 1}
        return {chat.messages[number]["role"] for number in flagged.difference(self._turns(chat))}

    # -- which characters are targets --

    def _turns(self, chat: Conversation) -> list[int]:
        """Return the indices of the messages to train on; for `all`, those of the messages to exclude."""
        if self.targets_only_last_token:
            return []
        weights = [message.get("weight", 1) for message in chat.messages]
        if self._train_on == "all":
            return [number for number, weight in enumerate(weights) if weight == 0]
        roles = [message["role"] for message in chat.messages]
        turns = [
            number
            for number in range(chat.first_trainable, len(roles))
            if roles[number] == "assistant" and weights[number] != 0
        ]
        if self._train_on == "last":
            last = max((number for number, role in enumerate(roles) if role == "assistant"), default=-1)
            return [turn for turn in turns if turn == last]
        if self._train_on == "completion":
            last_user = max((number for number, role in enumerate(roles) if role == "user"), default=-1)
            return [turn for turn in turns if turn > last_user]
        return turns

    def _message_spans(
        self, template: ChatTemplate, chat: Conversation, full: RenderedChat, number: int
    ) -> list[tuple[int, int]]:
        """Return a message's character spans in the full text; for the assistant, only of the text that it generates.

        Raises BadChat if the template renders the message, or the text before it, differently when other turns follow.
        """
        if chat.messages[number]["role"] == "assistant":
            return self._assistant_spans(template, chat, full, number)
        start, end = (_end_of_messages(template, chat, full, count) for count in (number, number + 1))
        if find_missing_part(chat.messages[number], full.text[start:end]):
            rule = f"messages[{number}] cannot be excluded: the chat template writes it as a part of another message"
            raise BadChat(rule, "data.chat_template", fix="give a .jinja file that writes it apart")
        return [(start, end)]

    def _assistant_spans(
        self, template: ChatTemplate, chat: Conversation, full: RenderedChat, turn: int
    ) -> list[tuple[int, int]]:
        """Return the (start, end) character spans that the assistant generates in a turn, including the stop token.

        A span starts at the end of the prompt that a client would render (`add_generation_prompt`), so that training
        and generation see the same context.  Raises BadChat if the template renders the turn, or the text before it,
        differently when other turns follow, omits a part of it, or does not end it.
        """
        text_before = template.render(chat.messages[:turn], chat.tools).text if turn else ""
        text_with_turn = full.text
        if turn + 1 < len(chat.messages):
            text_with_turn = template.render(chat.messages[: turn + 1], chat.tools).text
        prompt = template.render(chat.messages[:turn], chat.tools, add_generation_prompt=True).text
        turn_ends = self._turn_ends(template)
        end_without_space = len(text_with_turn.rstrip())
        turn_end = turn_ends.find(text_with_turn, len(prompt), end_without_space) or end_without_space
        if not full.text.startswith(text_with_turn[:turn_end]):
            raise _changed_turn_error(turn)
        if not full.text.startswith(prompt):
            if not full.text.startswith(text_before):
                raise _changed_turn_error(turn)
            raise _prompt_error(turn, chat.messages[turn], prompt[len(text_before) :], full.text[len(text_before) :])
        stop_end = turn_ends.find(full.text, len(prompt), turn_end)
        if stop_end is None:
            raise without_end_error(turn, text_with_turn)
        turn_start = common_length(text_before.rstrip(), full.text)
        if missing_part := find_missing_part(chat.messages[turn], full.text[turn_start:stop_end]):
            raise omission_error(turn, missing_part)
        if not template.marks_generation:
            return [(len(prompt), stop_end)]
        tagged = [(start, min(end, turn_end)) for start, end in full.assistant_spans if turn_start <= start < turn_end]
        if not tagged:
            return [(len(prompt), stop_end)] if self._train_on == "all" else []
        tagged[-1] = (tagged[-1][0], stop_end)
        if prompt == text_before:  # no generation prompt: the model has to generate the header outside the tag as well
            tagged[0] = (len(text_before), tagged[0][1])
        gap_starts = [len(prompt), *(end for _, end in tagged[:-1])]
        for gap_start, (gap_end, _) in zip(gap_starts, tagged, strict=True):
            gap = full.text[gap_start:gap_end]
            if gap.strip():
                rule = f"messages[{turn}]: {gap!r} is outside {{% generation %}}, but the model has to write it"
                fix = "include it in the block, or before the first block in the generation prompt"
                raise BadChat(rule, "data.chat_template", fix=fix)
        return tagged


@dataclass(frozen=True)
class _EncodedConversation:
    """A rendered and tokenized conversation: its text, its ids, the character span of each id, and the loss mask."""

    text: str
    ids: NDArray[np.int64]
    spans: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    notices: frozenset[Notice]


_KNOWN_KEYS = frozenset(("role", "content", "weight", "tool_calls", *REASONING_KEYS))
"""Keys of messages for which there are checks of their own."""


def _end_of_messages(template: ChatTemplate, chat: Conversation, full: RenderedChat, count: int) -> int:
    """Return where the first `count` messages end in the full text.

    Some templates reject a conversation without the user's first message.  Then the message after these is included,
    and its header and content are subtracted.

    Raises BadChat if the template renders the messages differently when others follow.
    """
    if count == 0:
        return 0
    try:
        text = template.render(chat.messages[:count], chat.tools).text
    except BadChat:
        if count == len(chat.messages) or chat.messages[count]["role"] != "user":
            raise
        marked = {**chat.messages[count], "content": _MARKER}
        answer = {"role": "assistant", "content": "Hi"}
        with_header = template.render([*chat.messages[:count], marked], chat.tools).text.partition(_MARKER)[0]
        exchange = template.render([marked, answer], chat.tools).text
        longer = template.render([marked, answer, marked], chat.tools).text
        header = longer[len(exchange) :].partition(_MARKER)[0]
        if not longer.startswith(exchange) or not with_header.endswith(header):
            raise
        text = with_header.removesuffix(header)
    if not full.text.startswith(text):
        raise _changed_turn_error(count - 1)
    return len(text)


_MARKER = "\U000f5151"
"""Stands in for a message's content: a character of the private use area, which real text almost never contains."""


def _check_support(chat: Conversation, template: ChatTemplate) -> None:
    """Raise BadChat if the template would silently omit tools, tool calls or reasoning."""
    if chat.tools and not template.reads_tools:
        raise BadChat("has tools, which the chat template does not support", "data.chat_template", fix=_FIX_NO_SUPPORT)
    calls = [number for number, message in enumerate(chat.messages) if message.get("tool_calls")]
    if calls and not template.mentions(["tool_calls"]):
        rule = f"messages[{calls[0]}].tool_calls: the chat template does not support tool calls"
        raise BadChat(rule, "data.chat_template", fix=_FIX_NO_SUPPORT)
    for number, message in enumerate(chat.messages):
        given = {key: message[key] for key in REASONING_KEYS if message.get(key)}
        if len(set(map(str, given.values()))) > 1:
            rule = f"messages[{number}]: {' and '.join(given)} differ, but mean the same"
            raise BadChat(rule, fix="keep one of them")
    reasoning = [(number, key) for number, m in enumerate(chat.messages) for key in REASONING_KEYS if m.get(key)]
    if reasoning and not template.mentions(REASONING_KEYS):
        number, key = reasoning[0]
        rule = f"messages[{number}].{key}: the chat template does not support it"
        raise BadChat(rule, "data.chat_template", fix=f"{_FIX_NO_SUPPORT}, or remove {key} from the records")


_FIX_NO_TEMPLATE = "data.chat_template=chatml, or a .jinja file"

_FIX_NO_SUPPORT = "give a .jinja file that supports it"


def _prompt_error(number: int, message: Message, prompt: str, turn: str) -> BadChat:
    """Return the error for a turn that does not start with the generation prompt; both without the text before them."""
    shown_turn = turn[: len(prompt)] + ("..." if len(turn) > len(prompt) else "")
    rule = (
        f"messages[{number}]: the generation prompt is {prompt!r}, but this turn starts with {shown_turn!r}, so the "
        "model would be trained in a context that it never sees later"
    )
    fix = "give a .jinja file in which the turn starts with the generation prompt"
    if "think" in prompt and not any(message.get(key) for key in REASONING_KEYS):
        fix = f"add the turn's reasoning, as {REASONING_KEYS[0]}, or {fix}"
    return BadChat(rule, "data.chat_template", fix=fix)


def _changed_turn_error(turn: int) -> BadChat:
    rule = (
        f"messages[{turn}]: the chat template renders this turn differently when other turns follow: the model would "
        "be trained on text that it never sees later"
    )
    return BadChat(rule, "data.train_on", proposal="last")
