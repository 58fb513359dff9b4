"""Messages for mistakes in recipe files and arguments: unknown keys and options, and values of the wrong type.

Messages suggest the key or value that was probably meant, or say what to do.  A wrong suggestion is worse than none:
only a key that exists for the model is suggested, and only a value that its type allows.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import typing
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal

from trainer.config.declare import union_members
from trainer.config.schema import TYPED_BY_OTHERS
from trainer.errors import UserError, as_argument, as_typed, choice_error, nearest, setting_error
from trainer.urls import without_credentials

# ---------------------------------------------------------------------------------------------------------------
# Unknown keys, options and arguments

_OTHER_NAMES = {
    "learning_rate": "optim.lr",
    "optimizer": "optim.name",
    "weight_decay": "optim.weight_decay",
    "gradient_clip_val": "optim.max_grad_norm",
    "lr_scheduler_type": "schedule.name",
    "steps": "train.steps",
    "max_steps": "train.steps",
    "num_train_epochs": "train.epochs",
    "batch_size": "train.micro_batch_size",
    "per_device_train_batch_size": "train.micro_batch_size",
    "gradient_checkpointing": "train.activation_checkpoint",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep_last",
    "resume_from_checkpoint": "checkpoint.resume",
    "eval_steps": "eval.every",
    "logging_steps": "log.every",
    "output_dir": "run.dir",
    "seed": "run.seed",
    "model_name_or_path": "model.path",
    "dataset": "data.path",
    "max_seq_length": "data.seq_len",
    "val_set_size": "data.holdout",
    "lora_r": "lora.rank",
    "num_processes": "nproc",
    "devices": "nproc",
}
"""Names that other trainers use for our settings.  docs/migrating.md has more."""

DASHES = ("-", "\u2013", "\u2014")
"""The prefix of an option, and the dashes that word processors substitute for it."""


def unknown_key_error(
    key: str, value: Any, legal: Mapping[str, dataclasses.Field[Any]], where: str = "", model: str = ""
) -> UserError:
    """Return the error for an unknown key.

    where: the file that contains the key, as text to append to the message; empty for the command line.
    model: the name of the model whose keys are in `legal`.
    """
    section = key.partition(".")[0]
    rule = f"no such key{where}"
    if section == "model" and model:
        rule = f"model.name={model} has no such setting{where}"
    parent = key.rpartition(".")[0]
    if parent in legal and any(typing.get_origin(option) is dict for option in union_members(legal[parent].type)):
        fix = f"set the whole mapping: {parent}='{{{key.rpartition('.')[2]}: {value}, ...}}'"
        return setting_error(key, value, f"{rule}: {parent} is one mapping", fix=fix)
    if key == "model.path":  # of a model that this package builds itself
        fix = "set model.name=auto to build the model in that folder, or train.init_from to load weights alone"
        return setting_error(key, value, rule, fix=fix)
    meant = similar_key(key, legal)
    if meant is None:
        topic = f" {section}" if any(each.startswith(f"{section}.") for each in legal) else ""
        return setting_error(key, value, rule, fix=f"see python -m trainer.run --help{topic}")
    advice, proposal = _did_you_mean(meant, value, legal)
    return UserError(f"{setting_error(key, value, rule)}\n  {advice}", proposal)


def _did_you_mean(key: str, value: Any, legal: Mapping[str, dataclasses.Field[Any]]) -> tuple[str, str]:
    """Return the advice to set `key`, and the argument that it proposes; empty if the key does not take the value."""
    if key in legal:
        value = legal[key].metadata.get("aliases", {}).get(str(value).lower(), value)
        words = _choices(legal[key].type)
        if words and value not in words:
            return f"did you mean {key}, which is {type_name(legal[key].type)}?", ""
    return f"did you mean {as_typed(key, value)}?", as_argument(key, value)


def _choices(hint: Any) -> list[str]:
    """Return the words of a key that takes nothing else but perhaps null, or an empty list."""
    words: list[str] = []
    for option in union_members(hint):
        if typing.get_origin(option) is Literal:
            words += typing.get_args(option)
        elif option is not type(None):
            return []
    return words


def similar_key(key: str, legal: Collection[str]) -> str | None:
    """Return the key that was probably meant by an unknown one, or None.  `nproc` is also a possible answer."""
    plain = key.lower().replace("-", "_")
    if plain in legal:
        return plain
    if not re.fullmatch(r"[\w.]+", plain):  # for example with typographic quotes
        return None
    section, _, name = plain.rpartition(".")
    if not section and f"{name}.name" in legal:
        return f"{name}.name"
    by_name: dict[str, list[str]] = {}
    for each in legal:
        by_name.setdefault(each.partition(".")[2], []).append(each)
    joined = by_name.get(f"{section}_{name}", [])
    if len(joined) == 1:
        return joined[0]
    siblings = [each for each in legal if each.startswith(f"{section}.")]
    if not siblings or section == "train":
        other = _OTHER_NAMES.get(name)
        if other in legal or other == "nproc":
            return other
    similar = difflib.get_close_matches(name, [each.partition(".")[2] for each in siblings], n=1, cutoff=0.8)
    if similar:
        return f"{section}.{similar[0]}"
    same = by_name.get(name, [])
    if len(same) == 1 and ("_" in name or name == "lr"):
        return same[0]
    if not section:
        near = difflib.get_close_matches(name, by_name, n=1, cutoff=0.85)
        if near and len(by_name[near[0]]) == 1:
            return by_name[near[0]][0]
    return None


def unknown_option_error(
    option: str, options: Iterable[str], legal: Mapping[str, dataclasses.Field[Any]], others: Collection[str] = ()
) -> UserError:
    """Return the error for an argument that begins with a dash but is not an option.

    legal: the configuration keys.
    others: what else the command takes as NAME=VALUE.
    """
    rule = f"{without_credentials(option)}: no such option"
    name, equals, value = option.lstrip("".join(DASHES)).partition("=")
    is_key = name in {*legal, *others, "recipe", "nproc"} or name.startswith(TYPED_BY_OTHERS)
    meant = name if is_key else similar_key(name, legal)
    if meant is not None and not equals:
        return UserError(f"{rule}\n  to fix: settings are written without dashes, as {meant}=VALUE")
    if meant is not None:
        advice, proposal = _did_you_mean(meant, value, legal)
        return UserError(f"{rule}\n  {advice}", proposal)
    similar = difflib.get_close_matches(name, [each.lstrip("-") for each in options], n=1, cutoff=0.7)
    if similar:
        return UserError(f"{rule}\n  did you mean --{similar[0]}?", f"--{similar[0]}")
    return UserError(f"{rule}\n  to fix: see --help")


def unexpected_argument_error(
    word: str, recipes: Collection[str], has_recipe: bool, options: Collection[str] = ()
) -> UserError:
    """Return the error for an argument that is not of the form key=value."""
    rule = f"{without_credentials(word)!r}: an argument has the form section.key=value; quote a value with spaces"
    recipe = difflib.get_close_matches(word, recipes, n=1, cutoff=1.0 if has_recipe else 0.75)
    if recipe:
        return UserError(f"{rule}\n  did you mean recipe={recipe[0]}?", f"recipe={recipe[0]}")
    option = difflib.get_close_matches(f"--{word.replace('_', '-')}", options, n=1, cutoff=0.85)
    if option:
        return UserError(f"{rule}\n  did you mean {option[0]}?", option[0])
    return UserError(f"{rule}\n  for example: train.steps=100 'data.path={{web: a.jsonl, code: b/*.bin}}'")


# ---------------------------------------------------------------------------------------------------------------
# Values of the wrong type


def wrong_value_error(key: str, given: Any, value: Any, field: dataclasses.Field[Any], where: str = "") -> UserError:
    """Return the error for a value that is not of the key's type.

    given: the value as it was typed.
    where: the file that contains the value, as text to append to the message; empty for the command line.
    """
    aliases = field.metadata.get("aliases", {})
    if words := _choices(field.type):
        return choice_error(key, value, words, aliases=aliases)
    options = union_members(field.type)
    rule = f"must be {field.metadata.get('form', type_name(field.type))}{where}"
    if str(value).lower() in aliases:
        return setting_error(key, given, rule, aliases[str(value).lower()])
    number = _whole_number(value) if int in options else None
    if number is not None:
        at_least = field.metadata.get("at_least", number)
        at_most = field.metadata.get("at_most", number)
        return setting_error(key, given, rule, min(max(number, at_least), at_most))
    if any(_is_item_of(value, option) for option in options):
        return setting_error(key, given, rule, [value])
    proposal = nearest(value, words_of(options)) or example_value(key, field)
    fix = "" if proposal is not None else f"see python -m trainer.run --help {key.partition('.')[0]}"
    return setting_error(key, given, rule, proposal, fix=fix)


def _is_item_of(value: Any, hint: Any) -> bool:
    """Return whether a value is an item of a list, of any length, that a key takes."""
    items = typing.get_args(hint)
    has_any_length = typing.get_origin(hint) is list or (typing.get_origin(hint) is tuple and Ellipsis in items)
    return has_any_length and type(value) is items[0]


def words_of(options: Iterable[Any]) -> list[str]:
    """Return the words that a key takes besides values of other types."""
    return [word for option in options for word in typing.get_args(option) if isinstance(word, str)]


def _whole_number(value: Any) -> int | None:
    """Return the whole number that is nearest to a number, which may be text such as 1e3; None for anything else."""
    if isinstance(value, bool):
        return None
    try:
        return round(float(value))
    except (TypeError, ValueError, OverflowError):
        return None


def example_value(key: str, field: dataclasses.Field[Any]) -> Any:
    """Return an example value for a key, or None.

    A key of a model has none: its values must fit each other.
    """
    if key.startswith("model."):
        return None
    default = None if field.default is dataclasses.MISSING else field.default
    return field.metadata.get("example", default)


def type_name(hint: Any) -> str:
    """Return a type in words, as error messages and `--help` show it."""
    names = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        type(None): "null",
        Any: "a value",
    }
    if typing.get_origin(hint) is Literal:
        return " or ".join(map(str, typing.get_args(hint)))
    if typing.get_origin(hint) is list:
        return f"a list of {type_name(typing.get_args(hint)[0])}"
    if typing.get_origin(hint) is dict:
        value = typing.get_args(hint)[1]
        return "{name: " + ("..." if value is Any else type_name(value)) + "}"
    if typing.get_origin(hint) is tuple:
        items = typing.get_args(hint)
        several = {int: "whole numbers", float: "numbers"}.get(items[0])
        if Ellipsis in items:
            return f"a list of {several or type_name(items[0])}"
        return f"a list of {len(items)} {several or f'x {type_name(items[0])}'}"
    options = union_members(hint)
    if len(options) > 1:
        return " or ".join(type_name(option) for option in options)
    return names.get(hint, getattr(hint, "__name__", str(hint)))
