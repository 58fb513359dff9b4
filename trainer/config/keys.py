"""Lists the configuration's keys, parses their values from the command line, and checks types and limits."""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
import os
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from trainer.config.declare import check_number, union_members
from trainer.config.messages import (
    example_value,
    suggest_value,
    type_name,
    unexpected_argument_error,
    unknown_key_error,
)
from trainer.config.schema import SUBSECTIONS, RunConfig
from trainer.errors import UserError, as_argument, as_typed, choice_error, setting_error
from trainer.objective import Tokens

EMPTY_VALUE_PROBLEM = "is empty, perhaps from an unset shell variable"
"""The part of an error message that says what is wrong with an empty value."""


def declared_keys(model: type | None = None, objective: type = Tokens) -> dict[str, dataclasses.Field[Any]]:
    """Return a mapping from each key to its dataclass field, whose `metadata` has the key's help text and limits.

    model: the dataclass of the `model` section; None leaves out that section's keys.
    objective: the dataclass of the `objective` section.
    """
    return dict(_declared_keys(model, objective))


@functools.cache
def _declared_keys(model: type | None, objective: type) -> Mapping[str, dataclasses.Field[Any]]:
    keys: dict[str, dataclasses.Field[Any]] = {}

    def add(prefix: str, owner: type) -> None:
        hints = typing.get_type_hints(owner)
        for item in dataclasses.fields(owner):
            key = f"{prefix}.{item.name}"
            if key in SUBSECTIONS:
                add(key, hints[item.name])
            else:
                item.type = hints[item.name]
                keys[key] = item

    schema, selected = RunConfig(model=model), {"model": model, "objective": objective}
    for section in dataclasses.fields(RunConfig):
        owner = selected[section.name] if section.name in selected else type(getattr(schema, section.name))
        if owner is not None:
            add(section.name, owner)
    return keys


def expand_subsection(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the keys of a subsection with their values, or `key` with its value if `key` is not a subsection.

    Raises UserError for a subsection whose value is not a mapping.
    """
    if key not in SUBSECTIONS:
        yield key, value
    elif isinstance(value, Mapping):
        yield from ((f"{key}.{name}", item) for name, item in value.items())
    else:
        raise setting_error(key, value, "is a section of keys", fix=f"set one of its keys, such as {key}.lr=0.02")


@functools.cache
def default_tree(model: type, objective: type) -> DictConfig:
    """Return the tree of all defaults.  Callers must copy it; copying takes a fifth as long as building the tree."""
    tree = OmegaConf.structured(RunConfig(model=model, objective=objective))
    keys = (*(section.name for section in dataclasses.fields(RunConfig)), *SUBSECTIONS)
    for node in (tree, *(OmegaConf.select(tree, key) for key in keys)):
        OmegaConf.set_readonly(node, False)
    assert isinstance(tree, DictConfig)
    return tree


def split_overrides(overrides: Sequence[str]) -> dict[str, str]:
    """Return the keys on the command line, each with its value as text.

    Raises UserError for an argument that is not of the form key=value.
    """
    assignments: dict[str, str] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise unexpected_argument_error([override], 0, (), has_recipe=True)
        if text.startswith("="):
            rule, value = "an argument has the form section.key=value", text.lstrip("=")
            message = f"{override!r}: {rule}\n  did you mean {as_typed(key, value)}?"
            raise UserError(message, as_argument(key, value))
        if key in SUBSECTIONS:
            content: Any = OmegaConf.to_container(OmegaConf.create(f"value: {text}"))
            for name, value in expand_subsection(key, content["value"]):
                assignments[name] = value if isinstance(value, str) else json.dumps(value)
        else:
            assignments[key] = text
    return assignments


def parse_override(key: str, text: str, hint: Any) -> Any:
    """Return the value of a command-line override: the text itself if the key takes text, otherwise parsed as YAML.

    If a key takes either text or a mapping, the value is a mapping only if the text is one in YAML.  Raises UserError
    for text that is not valid YAML, for a number that YAML would read in another base, and for empty text unless it is
    for a model's key.
    """
    options = union_members(hint)
    if not text and not key.startswith("model."):
        example = "null" if type(None) in options else None
        raise setting_error(
            key, text, EMPTY_VALUE_PROBLEM, proposal=example, fix="" if example else "leave it out, or give a value"
        )
    if {int, float} & set(options) and re.fullmatch(r"[+-]?(0[\d_]*\d|\d+(:\d+)+(\.\d*)?)", text):
        rule = f"must be {type_name(hint)}: with a leading zero or a colon it would be read in base 8 or 60"  # YAML 1.1
        meant = None if ":" in text else int(text)
        raise setting_error(key, text, rule, proposal=meant, fix="" if meant is not None else "write one number")
    if type(None) in options and text in ("null", "~"):
        return None
    if all(option is str or typing.get_origin(option) is Literal or option is type(None) for option in options):
        return text
    may_be_text = str in options and any(typing.get_origin(option) is dict for option in options)
    try:
        value = OmegaConf.to_container(OmegaConf.create(f"value: {text}"), resolve=False)["value"]  # type: ignore[index, call-overload]
    except (YAMLError, OmegaConfBaseException, ValueError) as error:
        if may_be_text:
            return text
        raise setting_error(key, text, "is not a valid YAML value") from error
    return text if may_be_text and not isinstance(value, dict) else value


def assign(
    tree: Any, known_keys: Mapping[str, dataclasses.Field[Any]], key: str, value: Any, where: str, text: str = ""
) -> None:
    """Set one key of the typed tree.  Raises UserError for an unknown key, a value of the wrong type, or a resolver.

    where: the file that sets the key, as text to append to messages; empty for the command line.
    text: the value as the user typed it.
    """
    if key not in known_keys:
        raise unknown_key_error(key, value, known_keys, where, str(OmegaConf.select(tree, "model.name") or ""))
    hint = known_keys[key].type
    choices = [
        choice for option in union_members(hint) for choice in typing.get_args(option) if isinstance(choice, str)
    ]
    _reject_resolvers(key, value, where)
    if isinstance(value, str) and value.startswith("~/"):  # shells do not expand ~ after an equals sign
        value = os.path.expanduser(value)
    if value is False and "off" in choices:  # YAML 1.1 reads a bare `off` as a boolean
        value = "off"
    try:
        OmegaConf.update(tree, key, value, merge=False)
    except (OmegaConfBaseException, ValueError, TypeError, OverflowError) as error:
        if choices:
            raise choice_error(key, value, choices, aliases=known_keys[key].metadata.get("aliases")) from error
        rule = f"must be {known_keys[key].metadata.get('form', type_name(hint))}{where}"
        suggestion = known_keys[key].metadata.get("aliases", {}).get(str(value).lower())
        if suggestion is not None:
            raise setting_error(key, value, rule, proposal=suggestion) from error
        raise setting_error(key, text or value, rule, **suggest_value(value, hint, known_keys[key])) from error


_KEY_REFERENCE = re.compile(r"(?<!\\)\$\{[\w.\[\]]+\}")
"""The only supported interpolation: the value of another key."""


def _reject_resolvers(key: str, value: Any, where: str) -> None:
    """Raise UserError for OmegaConf resolvers: a configuration must not run code or read the environment."""
    if isinstance(value, (list, tuple, Mapping)):
        for item in value.values() if isinstance(value, Mapping) else value:
            _reject_resolvers(key, item, where)
    elif isinstance(value, str) and "${" in _KEY_REFERENCE.sub("", value):
        rule = f"can only refer to another key, as in ${{section.key}}; resolvers are not supported{where}"
        raise setting_error(key, value, rule, fix=f"write the value itself, or set it on the command line: {key}=...")


def check_limits(config: RunConfig) -> None:
    """Raise UserError for a number outside the limits that the schema or the model's recipe declares."""
    for key, item in declared_keys(type(config.model), type(config.objective)).items():
        value = operator.attrgetter(key)(config)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, (int, float)) and not isinstance(number, bool):
                check_number(key, value, number, item.metadata, partial(example_value, item))
