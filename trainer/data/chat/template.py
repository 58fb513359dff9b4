"""Loads and renders chat templates, which turn a conversation into the text that a model reads.

A template is a Jinja program published with the model.  It runs in Jinja's sandbox, and its input is plain JSON.  It
can use the filters, functions, `generation` tag and special tokens that transformers offers.  The rendered text is the
same as in transformers, with two exceptions: `strftime_now` returns a fixed date by default, and messages are adapted
(see `ChatTemplate.render`).  It is an error to set an attribute whose name begins with `_` on a Jinja `namespace`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trainer.config.rules import CHATML, CHATML_TEMPLATE
from trainer.data.chat.formats import REASONING_KEYS, BadChat, Message
from trainer.data.chat.tokenizer import QUOTE
from trainer.errors import setting_error
from trainer.files import read_json

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Keys of tokenizer_config.json that hold special tokens for templates, besides `extra_special_tokens`."""

DEFAULT_DATE = datetime(2024, 7, 26)
"""The default date of `strftime_now`, which is also the default date in Llama 3.1's template."""


@dataclass(frozen=True)
class RenderedChat:
    """A rendered conversation: its text, and the (start, end) character spans marked as the assistant's, if any."""

    text: str
    assistant_spans: tuple[tuple[int, int], ...] = ()


class ChatTemplate:
    """A compiled chat template.  Raises jinja2.TemplateSyntaxError if a source is not valid Jinja.

    templates: Jinja sources by name: `default`, and optionally `tool_use` for conversations with tools.
    tokens: special tokens, keyed by the names that templates use for them, for example {"eos_token": "</s>"}.
    now: returns the current time, for templates that print the date.  By default, the date is fixed, so that training
        data do not change from day to day.
    """

    def __init__(
        self, templates: Mapping[str, str], tokens: Mapping[str, str], now: Callable[[], datetime] | None = None
    ) -> None:
        self.sources, self.tokens, self._now = dict(templates), dict(tokens), now
        self._environment = _make_environment(now or (lambda: DEFAULT_DATE))
        generation = self._environment.extensions[_GenerationTag.identifier]
        assert isinstance(generation, _GenerationTag)
        self._generation = generation
        self._compiled = {name: self._environment.from_string(text) for name, text in self.sources.items()}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the arguments: compiled templates cannot be pickled, so each loader worker compiles its own."""
        return type(self), (self.sources, self.tokens, self._now)

    @cached_property
    def marks_generation(self) -> bool:
        """True if the template, or the one for tools, marks the assistant's text with `{% generation %}`."""
        return any(
            node.name == "_record_span" and node.identifier == _GenerationTag.identifier
            for text in self.sources.values()
            for node in self._environment.parse(text).find_all(nodes.ExtensionAttribute)
        )

    @cached_property
    def reads_tools(self) -> bool:
        """True if the template refers to `tools`."""
        return any("tools" in meta.find_undeclared_variables(self._environment.parse(t)) for t in self.sources.values())

    def mentions(self, names: Iterable[str]) -> bool:
        """Return whether the template contains one of `names`, such as the keys of a message."""
        return any(name in text for text in self.sources.values() for name in names)

    @cached_property
    def names(self) -> frozenset[str]:
        """Every attribute and text constant in the template, among them the keys of a message that it reads by name."""
        names: set[str] = set()
        for text in self.sources.values():
            for node in self._environment.parse(text).find_all((nodes.Getattr, nodes.Const)):
                name = node.attr if isinstance(node, nodes.Getattr) else getattr(node, "value", None)
                if isinstance(name, str):
                    names.add(name)
        return frozenset(names)

    def render(
        self, messages: Sequence[Message], tools: Sequence[Any] = (), add_generation_prompt: bool = False
    ) -> RenderedChat:
        """Render `messages`; with `add_generation_prompt`, end with the header of the assistant's next message.

        Null values in messages are left out, and reasoning is passed under both of its usual keys.

        Raises BadChat.  If the template itself rejects the messages, its error message is included.
        """
        template = self._compiled.get("tool_use" if tools else "default", self._compiled["default"])
        without_nones = [{key: value for key, value in message.items() if value is not None} for message in messages]
        with_reasoning = list(map(_with_reasoning_keys, without_nones))
        values = {"messages": with_reasoning, "tools": list(tools) or None, "documents": None}
        pieces: list[str] = []
        self._generation.begin(pieces)
        try:
            for piece in template.generate(**self.tokens, **values, add_generation_prompt=add_generation_prompt):
                pieces.append(piece)
        except jinja2.TemplateError as error:
            raise BadChat(f"the chat template rejects it ({error})", "data.chat_template") from error
        except Exception as error:  # a template can raise any Python exception, such as ZeroDivisionError
            rule = f"the chat template fails on it ({type(error).__name__}: {error})"
            raise BadChat(rule, "data.chat_template") from error
        finally:
            marked = self._generation.end()
        text = "".join(pieces)
        if not text.isascii() and _LONE_SURROGATE.search(text):
            raise BadChat("the chat template writes text that is not valid Unicode", "data.chat_template")
        if any(not text.startswith(part, start) for start, part in marked):
            rule = "the chat template has {% generation %} in an unsupported place: in a macro, or in {% set %}"
            raise BadChat(rule, "data.chat_template")
        return RenderedChat(text, tuple((start, start + len(part)) for start, part in marked))


_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
"""Matches an unpaired surrogate, which is not a valid character."""

_FIX_OTHER_TEMPLATE = "use a different template, in a .jinja file"


def _with_reasoning_keys(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its reasoning, if any, under both of the keys that templates usually read."""
    reasoning = next((message[name] for name in REASONING_KEYS if name in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


# ---------------------------------------------------------------------------------------------------------------
# Where templates come from


def find_template(setting: str, tokenizer: str, key: str = "data.chat_template") -> ChatTemplate | None:
    """Load a chat template.

    setting: its name, the value of `data.chat_template`: `model` for the one in the tokenizer's folder, `chatml`, or a
        Jinja file.
    tokenizer: the value of `data.tokenizer`, a tokenizer.json or its folder.

    Returns None if `setting` is `model` and the tokenizer's folder has no template.  Raises UserError that names the
    setting `key` if the template cannot be read or compiled.
    """
    folder = _folder_of(tokenizer)
    config = _read_json(folder / "tokenizer_config.json", key) if folder else {}
    tokens = _special_tokens(config)
    if setting == CHATML:
        templates = {"default": CHATML_TEMPLATE}
    elif setting != "model":
        templates = {"default": _read_template(Path(setting).expanduser(), key, setting)}
    else:
        templates = _read_templates(folder, config, key) if folder else {}
        if "default" not in templates:
            return None
    if not templates["default"].strip():
        raise setting_error(key, setting, "the template is empty", fix=_FIX_OTHER_TEMPLATE)
    try:
        return ChatTemplate(templates, tokens)
    except Exception as error:  # usually TemplateSyntaxError, but compiling may raise others, such as RecursionError
        line = f"line {error.lineno}: " if isinstance(error, jinja2.TemplateSyntaxError) else ""
        rule = f"is not valid Jinja ({line}{error})"
        raise setting_error(key, setting, rule, fix="correct it, or give another .jinja file") from error


def _read_template(path: Path, key: str, setting: str) -> str:
    """Return the text of a template file.  Raises UserError."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        rule = f"{path.name} is not UTF-8 ({error.reason})"
        raise setting_error(key, setting, rule, fix="save it as UTF-8") from error
    except OSError as error:
        rule = f"must be model, chatml, or a Jinja file ({path.name}: {error.strerror})"
        raise setting_error(key, setting, rule, proposal="chat.jinja") from error


def template_path(tokenizer: str) -> Path | None:
    """Return the file that contains a tokenizer's default chat template, or None if it has none.

    tokenizer: the value of `data.tokenizer`, a tokenizer.json or its folder.
    """
    folder = _folder_of(tokenizer)
    if folder is None:
        return None
    file, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    if file.is_file():
        return file
    return config if "default" in _read_templates(folder, _read_json(config, "model"), "model") else None


def _folder_of(tokenizer: str) -> Path | None:
    path = Path(tokenizer).expanduser()
    return path if path.is_dir() else path.parent if path.is_file() else None


def _read_templates(folder: Path, config: Mapping[str, Any], key: str) -> dict[str, str]:
    """Return the templates in a tokenizer's folder by name; .jinja files take precedence over tokenizer_config.json."""
    configured = config.get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(configured, list):
        templates = {str(entry.get("name")): entry.get("template") for entry in configured if isinstance(entry, dict)}  # type: ignore[misc]
    elif configured is not None:
        templates = {"default": configured}
    if not all(isinstance(text, str) for text in templates.values()) or (configured and not templates):
        rule = f"chat_template in {folder / 'tokenizer_config.json'} must be text, or a list of names and templates"
        raise setting_error(key, "model", rule, fix=_FIX_OTHER_TEMPLATE)
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    return {**templates, **{name: _read_template(path, key, "model") for name, path in files.items()}}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    extra = config.get("extra_special_tokens")
    named = {**{name: config.get(name) for name in _SPECIAL_TOKENS}, **(extra if isinstance(extra, dict) else {})}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _read_json(path: Path, key: str) -> dict[str, Any]:
    try:
        content = read_json(path)
        return content if isinstance(content, dict) else {}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise setting_error(key, "model", f"{path} cannot be read ({error})") from error


# ---------------------------------------------------------------------------------------------------------------
# The Jinja environment of templates


class _GenerationTag(Extension):
    """Implements the `{% generation %}` tag, which encloses the assistant's text, and records where that text is."""

    tags = {"generation"}

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self._pieces: list[str] | None = None
        self._spans_found: list[tuple[int, str]] = []

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_record_span"), [], [], body).set_lineno(line)

    def begin(self, pieces: list[str]) -> None:
        """Start recording; the caller appends the rendered text to `pieces`."""
        self._pieces, self._spans_found = pieces, []

    def end(self) -> list[tuple[int, str]]:
        """Stop recording; return the start offset and the text of each marked part."""
        self._pieces = None
        return self._spans_found

    def _record_span(self, caller: Callable[[], str]) -> str:
        text = caller()
        if self._pieces is not None:
            self._spans_found.append((sum(map(len, self._pieces)), text))
        return text


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace, but without private names, which could be used to escape the sandbox."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"namespace names must not start with '_': {name!r}")
        super().__setitem__(name, value)


def _make_environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    extensions = [_GenerationTag, "jinja2.ext.loopcontrols"]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_raise_exception, namespace=_Namespace)
    environment.globals["strftime_now"] = lambda date_format: now().strftime(date_format)
    return environment


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return plain JSON: Jinja's built-in filter would escape it for HTML.  Special tokens stay quoted."""
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return text.replace(json.dumps(QUOTE)[1:-1], QUOTE) if ensure_ascii else text


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
