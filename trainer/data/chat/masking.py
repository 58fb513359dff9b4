"""Tokenizes conversations and computes loss masks: by default, the targets are the assistant's turns.

Unless it uses the `{% generation %}` tag, a template does not mark which part of its text the assistant wrote.  But the
conversation can be rendered twice: up to where the assistant starts to write (`add_generation_prompt`), and up to the
end of the assistant's turn.  If both renderings are prefixes of the full text, the assistant wrote what the second adds
to the first.  If they are not, the template does not start the turn with its generation prompt, or it renders a turn
differently when other turns follow: then the model would be trained on text that it never sees at inference time, and
no mask can correct that.

Some templates ignore `add_generation_prompt`.  Every client of such a model, including this project, then ends the
prompt before the header of the assistant's turn.  The model has to generate the header, so the header is a target.
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
from trainer.data.chat.template import REASONING_KEYS, ChatTemplate, RenderedChat
from trainer.data.tokenizer import FileTokenizer, Tokenizer, find_tokenizer, tokenizer_file
from trainer.stopping import raise_if_stop_requested


@dataclass(frozen=True)
class EncodedSample:
    """Token ids and loss mask of a conversation or completion, both of shape (num_tokens,).

    loss_mask: True for the tokens that are targets.
    literal_special_token: a special token that the conversation spells out as text, or "".  Such a token suggests that
        a chat template has already been applied to the file.
    """

    ids: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    literal_special_token: str = ""

    def truncated(self, num_tokens: int, only_last_token: bool) -> EncodedSample:
        """Return the first `num_tokens` tokens; `literal_special_token` is not kept.

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

    @property
    def identity(self) -> list[Any]:
        """JSON values that determine the encoding: two encoders with the same identity give the same results."""
        template = self._template
        return [self.tokenizer.name, self._train_on, [template.sources, template.tokens] if template else None]

    def encode(self, sample: Sample, max_tokens: int | None = None) -> EncodedSample:
        """Encode a conversation or a completion.  Raises BadChat.

        max_tokens: the mask may be wrong from this token on, since the caller truncates the rest.  Masking a turn
            renders everything before it again, so a conversation of 20,000 turns would otherwise take minutes.
        """
        if isinstance(sample, Conversation):
            text, ids, _, loss_mask = self._encode_with_spans(sample, max_tokens)
            return EncodedSample(ids, loss_mask, self.tokenizer.find_literal_special_token(text))
        # Prompt and completion are encoded separately, so that the prompt has the same tokens as at inference time.
        plain = self.tokenizer.plain
        prompt = np.array([*plain.start_ids, *plain.encode(sample.prompt)], np.int64)
        completion = np.array([*plain.encode(sample.completion), *plain.end_ids], np.int64)
        num_tokens = len(prompt) + len(completion)
        loss_mask = np.arange(num_tokens) >= (0 if self._train_on == "all" else len(prompt))
        loss_mask = last_token_mask(num_tokens) if self.targets_only_last_token else loss_mask
        literal_special_token = self.tokenizer.find_special_token(sample.prompt + sample.completion)
        return EncodedSample(np.concatenate([prompt, completion]), loss_mask, literal_special_token)

    @property
    def targets_only_last_token(self) -> bool:
        """True if the last token, where a reward or classification head scores the conversation, is the only target."""
        return self._train_on == "end"

    @property
    def has_template(self) -> bool:
        """True if there is a chat template."""
        return self._template is not None

    def notes(self) -> list[str]:
        """Return notes for the user about unusual properties of the chat template."""
        template = self._template
        if template is None:
            return []
        system, user = {"role": "system", "content": "Hi"}, {"role": "user", "content": "Hi"}
        response = {"role": "assistant", "content": "Hello"}
        for prompt_messages in ([user], [system, user]):
            try:
                prompt = template.render(prompt_messages, add_generation_prompt=True).text
                full = template.render([*prompt_messages, response]).text
                encoded = Encoder(self.tokenizer, template, "last").encode(Conversation([*prompt_messages, response]))
            except BadChat:  # a template may require a system message, or reject one
                continue
            notes = []
            header = full[len(prompt) : full.rfind("Hello")] if "Hello" in full[len(prompt) :] else ""
            if prompt == template.render(prompt_messages).text and header.strip():
                notes.append(
                    f"the chat template ignores add_generation_prompt: the model learns to write {header!r} itself, as "
                    "it has to at inference time"
                )
            targets = encoded.ids[encoded.loss_mask]
            has_response = len(targets) and "Hello" in full  # a template may mark only some turns, or alter the text
            added_ids = self.tokenizer.added_tokens.values()
            if has_response and self._train_on != "all" and int(targets[-1]) not in added_ids:
                end = full[full.rfind("Hello") + 5 :].strip()
                notes.append(
                    f"warning: the chat template ends turns with {end!r}, which is not a single token: generation "
                    "does not stop there"
                )
            return notes
        return []

    def pieces(self, sample: Sample) -> list[tuple[str, bool]]:
        """Return (text, is_target) for each piece of the text, for display.  Raises BadChat."""
        if isinstance(sample, Completion):
            completion = sample.completion + "".join(map(self.tokenizer.token_text, self.tokenizer.plain.end_ids))
            if self.targets_only_last_token:
                text, last = sample.prompt + completion, self.tokenizer.token_text(int(self.encode(sample).ids[-1]))
                return [(text.removesuffix(last), False), (last, True)]
            return [(sample.prompt, self._train_on == "all"), (completion, True)]
        text, _, spans, loss_mask = self._encode_with_spans(sample)
        changes = [0, *(np.flatnonzero(np.diff(loss_mask)) + 1).tolist()]
        starts = [0, *spans[changes[1:], 0].tolist(), len(text)]
        return [
            (text[start:stop].replace(QUOTE, ""), bool(loss_mask[change]))
            for change, start, stop in zip(changes, starts[:-1], starts[1:], strict=True)
        ]

    def _encode_with_spans(
        self, chat: Conversation, max_tokens: int | None = None
    ) -> tuple[str, NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """Return a conversation's text, its ids, the character span of each id, and the loss mask.

        max_tokens: the mask may be wrong after this many ids; see `encode`.
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
        ids, spans = self.tokenizer.encode(full.text)
        is_in_turn = np.zeros(len(ids), bool)
        needed_chars = len(full.text) if max_tokens is None or len(ids) <= max_tokens else int(spans[max_tokens, 0])
        with template.shared_limits():
            for turn in self._turns(chat):
                raise_if_stop_requested()
                turn_spans = _message_spans(template, chat, full, turn)
                for start, end in turn_spans:
                    is_in_turn |= (spans[:, 0] < end) & (spans[:, 1] > start)
                if turn_spans and turn_spans[0][0] >= needed_chars:
                    break
        if self.targets_only_last_token:
            return full.text, ids, spans, last_token_mask(len(ids))
        return full.text, ids, spans, ~is_in_turn if self._train_on == "all" else is_in_turn

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


def _check_support(chat: Conversation, template: ChatTemplate) -> None:
    """Raise BadChat if the template would silently omit tools, tool calls or reasoning."""
    if chat.tools and not template.reads_tools:
        raise BadChat("has tools, which the chat template does not support", "data.chat_template", fix=_FIX_NO_SUPPORT)
    calls = [number for number, message in enumerate(chat.messages) if message.get("tool_calls")]
    if calls and not template.mentions(["tool_calls"]):
        rule = f"messages[{calls[0]}].tool_calls: the chat template does not support tool calls"
        raise BadChat(rule, "data.chat_template", fix=_FIX_NO_SUPPORT)
    reasoning = [(number, key) for number, m in enumerate(chat.messages) for key in REASONING_KEYS if m.get(key)]
    if reasoning and not template.mentions(REASONING_KEYS):
        number, key = reasoning[0]
        rule = f"messages[{number}].{key}: the chat template does not support it"
        raise BadChat(rule, "data.chat_template", fix=f"{_FIX_NO_SUPPORT}, or remove {key} from the records")


_FIX_NO_TEMPLATE = "data.chat_template=chatml, or a .jinja file"

_FIX_NO_SUPPORT = "give a .jinja file that supports it"


def _check_all_included(chat: Conversation, text: str) -> None:
    """Raise BadChat if the rendered text lacks the content of a message; the assistant's are not checked."""
    for number, message in enumerate(chat.messages):
        if message["role"] == "assistant":
            continue
        content = message.get("content") or ""
        as_json = json.dumps(content.strip(), ensure_ascii=False)[1:-1]
        if as_json not in text and not all(line.strip() in text for line in content.splitlines()):  # indented lines
            rule = f"messages[{number}].role={message['role']!r}: the chat template omits this message"
            raise BadChat(rule, "data.chat_template", fix="give a .jinja file that includes it")


def _message_spans(
    template: ChatTemplate, chat: Conversation, full: RenderedChat, number: int
) -> list[tuple[int, int]]:
    """Return the character spans of a message in the full text; for the assistant, only of the text that it generates.

    Raises BadChat if the template renders the message, or the text before it, differently when other turns follow.
    """
    if chat.messages[number]["role"] == "assistant":
        return _assistant_spans(template, chat, full, number)
    text_before, text_with_turn = (
        template.render(chat.messages[:end], chat.tools).text if end else "" for end in (number, number + 1)
    )
    if not (full.text.startswith(text_before) and full.text.startswith(text_with_turn)):
        raise _changed_turn_error(number)
    return [(len(text_before), len(text_with_turn))]


def _assistant_spans(
    template: ChatTemplate, chat: Conversation, full: RenderedChat, turn: int
) -> list[tuple[int, int]]:
    """Return the (start, end) character spans that the assistant generates in a turn, including the end-of-turn token.

    A span starts at the end of the prompt that a client would render (`add_generation_prompt`), so that training and
    generation see the same context.  Raises BadChat if the template renders the turn, or the text before it,
    differently when other turns follow.
    """
    text_before = template.render(chat.messages[:turn], chat.tools).text
    text_with_turn = full.text
    if turn + 1 < len(chat.messages):
        text_with_turn = template.render(chat.messages[: turn + 1], chat.tools).text
    end = _end_of_turn(template, chat, text_with_turn, turn)
    if not full.text.startswith(text_with_turn[:end]):
        raise _changed_turn_error(turn)
    prompt = template.render(chat.messages[:turn], chat.tools, add_generation_prompt=True).text
    if template.marks_generation:
        if not full.text.startswith(text_before.rstrip()):
            raise _changed_turn_error(turn)
        first = len(text_before.rstrip())
        spans = [(start, min(stop, end)) for start, stop in full.assistant_spans if first <= start < end]
        if not spans:
            return []
        spans[-1] = (spans[-1][0], end)
        if prompt == text_before:  # no generation prompt: the model has to generate the header outside the tag as well
            spans[0] = (len(text_before), spans[0][1])
        return spans
    if not full.text.startswith(prompt):
        if not full.text.startswith(text_before):
            raise _changed_turn_error(turn)
        rule = f"messages[{turn}]: the chat template does not start this turn with its generation prompt"
        raise BadChat(rule, "data.chat_template", fix="mark the targets with {% generation %} in a .jinja file")
    return [(len(prompt), end)]


def _end_of_turn(template: ChatTemplate, chat: Conversation, text: str, turn: int) -> int:
    """Return the end of a text's last turn: after its end-of-turn token, before trailing white space.

    Raises BadChat if only white space follows the message: responses contain white space too, so generation could not
    stop there.
    """
    end = len(text.rstrip())
    content = (chat.messages[turn].get("content") or "").rstrip()
    if content and text[:end].endswith(content):
        # A response such as ">" also matches the end of "<|im_end|>"; a marker rendered instead of it does not.
        message = {**chat.messages[turn], "content": _MARKER}
        if template.render([*chat.messages[:turn], message], chat.tools).text.rstrip().endswith(_MARKER):
            rule = (
                f"messages[{turn}]: the chat template does not end this turn with a token (only white space, or "
                "nothing, follows the message), so the model cannot learn to stop"
            )
            raise BadChat(rule, "data.chat_template", fix="end it with a token, such as {{ eos_token }}")
    return end


_MARKER = "\U000f5151"
"""Stands in for a message's content: a character of the private use area, which real text almost never contains."""


def _changed_turn_error(turn: int) -> BadChat:
    rule = (
        f"messages[{turn}]: the chat template renders this turn differently when other turns follow: the model would "
        "be trained on text that it never sees later"
    )
    return BadChat(rule, "data.train_on", legal="last")


# ---------------------------------------------------------------------------------------------------------------
# Tokenizing rendered chats
#
# `trainer.data.tokenizer` never turns text into special tokens.  A chat template, in contrast, writes special tokens as
# text, and they must be recognized.  A special token that is spelled out in a message must still be encoded as text, so
# `quoted` hides it from the template and the tokenizer.


QUOTE = "\U000f5150"
"""A character of the private use area, inserted into the spelling of a special token so that it is not recognized."""


class ChatTokenizer:
    """Tokenizer that recognizes special tokens in a text, and returns the character span of each id.

    plain: the same tokenizer, except that it encodes special tokens as text.
    """

    def __init__(self, setting: str, key: str = "data.tokenizer") -> None:
        self.plain: Tokenizer = find_tokenizer(setting, key)
        self._content: dict[str, Any] = {}  # empty for `bytes`, which has no special tokens
        if setting != "bytes":
            self._content = json.loads(tokenizer_file(setting).read_bytes())
            # A post-processor may exclude white space from the tokens' spans.  It would also add special tokens, which
            # the template already writes.
            self._content["post_processor"] = None
        # The library's ids: a file may list one token twice, and then the library keeps the id that the vocabulary has.
        added = self.plain.library.get_added_tokens_decoder() if isinstance(self.plain, FileTokenizer) else {}
        self.added_tokens: dict[str, int] = {token.content: token_id for token_id, token in added.items()}
        """The id of each token that is not ordinary text, such as the end-of-turn token."""
        special = [token.content for token in added.values() if token.special]
        self._special_tokens = sorted(filter(None, special), key=len, reverse=True)  # the longest one must match
        self._special_pattern = re.compile("|".join(map(re.escape, self._special_tokens)) or "(?!)")

    @property
    def vocab_size(self) -> int:
        """Exclusive upper bound of the ids."""
        return self.plain.vocab_size

    @property
    def name(self) -> str:
        """Identifies the tokenizer: two tokenizers with the same name give the same ids."""
        return f"chat-{self.plain.name}"

    def quoted(self, value: Any) -> Any:
        """Return a message or any other JSON value, with QUOTE inserted into each special token that it spells out."""
        if isinstance(value, str):
            return self._special_pattern.sub(
                lambda match: match[0][:1] + QUOTE + match[0][1:], value.replace(QUOTE, "")
            )
        if isinstance(value, Mapping):
            return {key: self.quoted(item) for key, item in value.items()}
        return [self.quoted(item) for item in value] if isinstance(value, (list, tuple)) else value

    def find_special_token(self, text: str) -> str:
        """Return the first special token that is spelled out in a text, or ""."""
        match = self._special_pattern.search(text)
        return match[0] if match else ""

    def find_literal_special_token(self, text: str) -> str:
        """Return a special token that the template writes and that a message also spells out, or ""."""
        if QUOTE not in text:
            return ""
        rendered = (token for token in self._special_tokens if token in text)
        return next((token for token in rendered if f"{token[:1]}{QUOTE}{token[1:]}" in text), "")

    def token_text(self, token_id: int) -> str:
        """Return the text of an id, which may be a special token."""
        return (
            self.plain.decode([token_id]) if not self._content else str(self._special_tokenizer.id_to_token(token_id))
        )

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
        for match in re.finditer(f"{self._special_pattern.pattern}|$", text):
            parts += [
                self._encode_quoted(text[position : match.start()], position),
                self._encode(match[0], match.start()),
            ]
            position = match.end()
        return np.concatenate([ids for ids, _ in parts]), np.concatenate([spans for _, spans in parts])

    def _encode(self, text: str, start: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        encoding = self._special_tokenizer.encode(text, add_special_tokens=False)
        return np.array(encoding.ids, np.int64), np.array(encoding.offsets, np.int64).reshape(-1, 2) + start

    def _encode_quoted(self, text: str, start: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        is_text = np.array([character != QUOTE for character in text], bool)
        original_offsets = np.append(np.flatnonzero(is_text), len(text))
        encoding = self._plain_tokenizer.encode(text.replace(QUOTE, ""), add_special_tokens=False)
        spans = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        return np.array(encoding.ids, np.int64), original_offsets[spans] + start

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
