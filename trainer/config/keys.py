"""The keys of the configuration: their typed tree, and the conversion of values from files and the command line."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import operator
import os
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.config.declare import check_number, union_members
from trainer.config.messages import (
    example_value,
    type_name,
    unexpected_argument_error,
    unknown_key_error,
    words_of,
    wrong_value_error,
)
from trainer.config.schema import SUBSECTIONS, TYPED_BY_OTHERS, RunConfig
from trainer.errors import UserError, setting_error
from trainer.objective import Tokens

COMMAND_LINE = "command line"
"""The origin of values from the command line."""

FREE_TEXT = ("run.on_end", "log.prompts")
"""Keys whose text may contain anything, also what looks like credentials in a URL."""

EMPTY_VALUE_PROBLEM = "is empty, perhaps from an unset shell variable"
"""The part of an error message that says what is wrong with an empty value."""


def declared_keys(model: type | None = None, objective: type = Tokens) -> dict[str, dataclasses.Field[Any]]:
    """Return a mapping from each key to its dataclass field, whose `metadata` is what `declare` was given.

    model: the dataclass of the `model` section; None leaves out that section's keys.
    objective: the dataclass of the `objective` section.
    """
    return dict(_declared_keys(model, objective))  # type: ignore[arg-type]  # classes can be hashed


@functools.cache
def _declared_keys(model: type | None, objective: type) -> Mapping[str, dataclasses.Field[Any]]:
    keys: dict[str, dataclasses.Field[Any]] = {}

    def add(prefix: str, owner: type) -> None:
        hints = typing.get_type_hints(owner)
        for item in dataclasses.fields(owner):
            key = f"{prefix}.{item.name}"
            if key in SUBSECTIONS:
                add(key, hints[item.name])
            elif not item.metadata.get("is_computed"):
                item.type = hints[item.name]
                keys[key] = item

    schema = RunConfig(model=model)
    selected = {"model": model, "objective": objective}
    for section in dataclasses.fields(RunConfig):
        owner = selected[section.name] if section.name in selected else type(getattr(schema, section.name))
        if owner is not None:
            add(section.name, owner)
    return keys


def flat_values(config: RunConfig) -> dict[str, Any]:
    """Return the value of every key of a configuration."""
    return {key: operator.attrgetter(key)(config) for key in declared_keys(type(config.model), type(config.objective))}


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


# ---------------------------------------------------------------------------------------------------------------
# The command line


def split_overrides(overrides: Sequence[str]) -> dict[str, str]:
    """Return the keys on the command line, each with its value as text.  Of a key given twice, the last value counts.

    Raises UserError for an argument that is not of the form key=value.
    """
    assignments: dict[str, str] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise unexpected_argument_error(override, (), has_recipe=True)
        if key in SUBSECTIONS:
            for name, value in expand_subsection(key, _yaml_value(key, text)):
                assignments[name] = value if isinstance(value, str) else json.dumps(value)
        else:
            assignments[key] = text
    return assignments


def parse_text(key: str, text: str, hint: Any) -> Any:
    """Return the value of a key on the command line: the text itself if the key takes only text, otherwise as in YAML.

    If a key takes either text or a mapping, the value is a mapping only if the text is one in YAML.  Raises UserError
    for text that is not valid YAML, for a number that YAML would read in another base, and for empty text unless it is
    for a model's key.
    """
    options = union_members(hint)
    is_nullable = type(None) in options
    if not text and not key.startswith("model."):
        fix = "" if is_nullable else "leave it out, or give a value"
        raise setting_error(key, text, EMPTY_VALUE_PROBLEM, "null" if is_nullable else None, fix=fix)
    if {int, float} & set(options) and re.fullmatch(r"[+-]?(0[\d_]*\d|\d+(:\d+)+(\.\d*)?)", text):
        rule = f"must be {type_name(hint)}: with a leading zero or a colon it would be read in base 8 or 60"  # YAML 1.1
        decimal = None if ":" in text else int(text)
        raise setting_error(key, text, rule, decimal, fix="write one number" if decimal is None else "")
    if is_nullable and text in ("null", "~"):
        return None
    if all(option is str or typing.get_origin(option) is Literal or option is type(None) for option in options):
        return text
    may_be_text = str in options and any(typing.get_origin(option) is dict for option in options)
    try:
        value = _yaml_value(key, text)
    except UserError:
        if may_be_text:
            return text
        raise
    return text if may_be_text and not isinstance(value, dict) else value


def _yaml_value(key: str, text: str) -> Any:
    """Return the value of text in YAML.  Raises UserError if it is not valid, or has a number in another base in it."""
    try:
        value = OmegaConf.to_container(OmegaConf.create(f"value: {text}"), resolve=False)["value"]  # type: ignore[index, call-overload]
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        raise setting_error(key, text, "is not a valid YAML value") from error
    if isinstance(value, (list, dict)) and (number := find_other_base(text)) is not None:
        rule = f"{number.value} would be read in base 8 or 60"
        raise setting_error(key, text, rule, fix="write it in decimal, or in quotes if it is text")
    return value


_OTHER_BASE = re.compile(r"[+-]?(0[0-7_]+|\d+(:\d+)+(\.\d*)?)")
"""Numbers that YAML 1.1 reads in base 8 or 60."""


def find_other_base(text: str) -> yaml.ScalarNode | None:
    """Return the first number in YAML text, such as 010 or 1:30, that YAML reads in base 8 or 60; None if none is."""
    if not re.search(rf"(^|[\s\[{{,]){_OTHER_BASE.pattern}\s*([,\]}}#]|$)", text, re.MULTILINE):
        return None  # nothing looks like one, so that the text need not be parsed again
    nodes = [yaml.compose(text)]
    while nodes:
        node = nodes.pop(0)
        if isinstance(node, yaml.MappingNode):
            nodes += [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            nodes += node.value
        elif node.style is None and _OTHER_BASE.fullmatch(node.value):
            return node
    return None


# ---------------------------------------------------------------------------------------------------------------
# The typed tree


@functools.cache
def default_tree(model: type, objective: type) -> DictConfig:
    """Return the tree of all defaults.  Callers must copy it; copying takes a fifth as long as building the tree."""
    tree = OmegaConf.structured(RunConfig(model=model, objective=objective))
    keys = (*(section.name for section in dataclasses.fields(RunConfig)), *SUBSECTIONS)
    for node in (tree, *(OmegaConf.select(tree, key) for key in keys)):
        OmegaConf.set_readonly(node, False)
    assert isinstance(tree, DictConfig)
    return tree


def typed_config(
    values: Mapping[str, Any], origins: Mapping[str, str], texts: Mapping[str, str], model: type, objective: type
) -> RunConfig:
    """Return the configuration with these values by key, and defaults for all other keys.

    origins: the file that sets each key, or COMMAND_LINE.
    texts: the values of the command line as they were typed, for messages.

    Raises UserError for an unknown key, a wrong type, a value outside its limits, or a reference that has no value.
    """
    tree = copy.deepcopy(default_tree(model, objective))
    declared = declared_keys(model, objective)
    for key, value in values.items():
        shown = texts.get(key, value)
        where = "" if origins[key] == COMMAND_LINE else f" (in {origins[key]})"
        if key not in declared:
            raise unknown_key_error(key, shown, declared, where, str(values.get("model.name") or ""))
        hint = declared[key].type
        if origins[key] == COMMAND_LINE and key.startswith(TYPED_BY_OTHERS):
            value = parse_text(key, value, hint)
        for text in _texts(value):
            _reject_resolvers(key, text, where)
            if _ESCAPED.search(text) and not _takes_text(hint):  # OmegaConf would not check its type
                raise wrong_value_error(key, shown, value, declared[key], where)
        if isinstance(value, str) and value.startswith("~/"):  # shells do not expand ~ after an equals sign
            value = os.path.expanduser(value)
        options = union_members(hint)
        words = words_of(options)
        if value is False and "off" in words:  # YAML 1.1 reads a bare `off` as a boolean
            value = "off"
        try:
            if type(value) is int and float in options and int not in options:  # a union does not convert numbers
                value = float(value)
            OmegaConf.update(tree, key, value, merge=False)
        except (OmegaConfBaseException, ValueError, TypeError, OverflowError) as error:
            raise wrong_value_error(key, shown, value, declared[key], where) from error
    try:
        config = OmegaConf.to_object(tree)
    except OmegaConfBaseException as error:
        place = str(error.full_key)
        key = next((each for each in values if f"{place}.".startswith((f"{each}.", f"{each}["))), place)
        rule = f"cannot be resolved ({str(error).splitlines()[0]})"
        fix = r"write the value itself, refer to a key such as ${run.seed}, or write \${ for plain text"
        raise setting_error(key, texts.get(key, values.get(key)), rule, fix=fix) from error
    assert isinstance(config, RunConfig)
    _check_limits(config)
    return config


_KEY_REFERENCE = re.compile(r"\$\{[\w.\[\]]+\}")
"""The only supported interpolation: the value of another key."""
_ESCAPED = re.compile(r"(?<!\\)(?:\\\\)*\\\$\{")
"""Plain text `${`, after an odd number of backslashes."""


def _texts(value: Any) -> Iterator[str]:
    """Yield the value if it is text, or all texts in it."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, tuple, Mapping)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(item)


def _reject_resolvers(key: str, text: str, where: str) -> None:
    """Raise UserError for OmegaConf resolvers: a configuration must not run code or read the environment."""
    if "${" in _KEY_REFERENCE.sub("", _ESCAPED.sub("", text)):
        rule = f"can only refer to another key, as in ${{section.key}}; resolvers are not supported{where}"
        raise setting_error(key, text, rule, fix=f"write the value itself, or set it on the command line: {key}=...")


def _takes_text(hint: Any) -> bool:
    """Return whether a key takes any text, perhaps inside a list or mapping."""
    if hint in (str, Any):
        return True
    return typing.get_origin(hint) is not Literal and any(_takes_text(part) for part in typing.get_args(hint))


def _check_limits(config: RunConfig) -> None:
    """Raise UserError for a value outside the limits, or unlike the pattern, that `declare` gives for its key."""
    declared = declared_keys(type(config.model), type(config.objective))
    for key, value in flat_values(config).items():
        metadata = declared[key].metadata
        for number in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(number, (int, float)) and not isinstance(number, bool):
                check_number(key, value, number, metadata, functools.partial(example_value, key, declared[key]))
        if "pattern" in metadata and isinstance(value, str) and not re.fullmatch(metadata["pattern"], value):
            raise setting_error(key, value, f"must be {metadata['form']}", metadata.get("example"))
