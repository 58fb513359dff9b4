"""Reads recipe files and stored configurations with OmegaConf; declares the keys, and converts and checks values."""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
import os
import re
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from trainer.config.messages import (
    example_value,
    suggest_value,
    type_name,
    unexpected_argument,
    unknown_key_error,
)
from trainer.config.pretrained import DeclaredModel
from trainer.config.schema import SUBSECTIONS, RunConfig
from trainer.errors import UserError, as_typed, choice_error, is_masked, masked, masked_command, nearest, setting_error
from trainer.objective import Tokens
from trainer.recipe import check_import, check_number, load_recipes, union_members

CONFIG = "config.yaml"
"""The stored configuration of a run or of a checkpoint, in its folder."""
_EXAMPLE_FILE = "the output of python -m trainer.run recipe=llama_small --print-config"
_EMPTY_VALUE = "is empty, perhaps from an unset shell variable"

# ---------------------------------------------------------------------------------------------------------------
# Recipe files


def find_recipe_file(recipe: str) -> Path:
    """Return the path of the YAML file that `recipe` refers to.  Raises UserError, with a suggestion, if none does."""
    if not recipe:
        raise setting_error("recipe", recipe, _EMPTY_VALUE, example="llama_small")
    if recipe.endswith((".yaml", ".yml")) and not Path(recipe).is_dir():
        path = Path(recipe)
        if not path.is_file():
            suggestion = nearest(path.stem, recipe_files())
            fix = "" if suggestion else f"give its path relative to {os.getcwd()}, or start from {_EXAMPLE_FILE}"
            raise setting_error("recipe", recipe, "no such file", meant=suggestion, fix=fix)
        return path
    files = recipe_files()
    if recipe in files:
        return files[recipe]
    if Path(recipe).suffix in (".json", ".toml"):
        raise setting_error("recipe", recipe, "recipe files are YAML", fix=f"start from {_EXAMPLE_FILE}")
    if Path(recipe).is_dir() and not (Path(recipe) / CONFIG).is_file():
        rule = f"is a folder, but not a run folder: it has no {CONFIG}"
        yaml_file = next(iter(sorted(Path(recipe).glob("*.y*ml"))), None)
        raise setting_error("recipe", recipe, rule, example=yaml_file or "llama_small")
    if Path(recipe).is_dir():
        return Path(recipe) / CONFIG
    if os.sep in recipe:
        fix = f"give a run folder, a path ending in .yaml, or one of {', '.join(sorted(files))}"
        raise setting_error("recipe", recipe, "no such file or folder", fix=fix)
    raise choice_error("recipe", recipe, sorted(files), "a path ending in .yaml, a run folder, or one of")


def recipe_files() -> dict[str, Path]:
    """Return the files of the built-in recipes, by name."""
    folder = Path(str(resources.files("trainer.conf")))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def description(path: Path) -> str:
    """Return the description of a recipe: the comment on the first line of its file."""
    first_line = path.read_text().partition("\n")[0]
    return first_line.lstrip("# ").strip()


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the contents of a YAML file by section, unchecked.  Raises UserError if it cannot be read."""
    try:
        tree = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f", line {where.line + 1}" if where else ""
        if where and "\t" in "".join(path.read_text().splitlines()[where.line : where.line + 1]):
            fix = "indent with spaces"
            raise setting_error("recipe", path, f"is not valid YAML{line}: it contains a tab", fix=fix) from error
        rule = f"is not valid YAML{line}: {getattr(error, 'problem', error)}"
        fix = f"correct{line.replace(',', '')} or start from {_EXAMPLE_FILE}"
        raise setting_error("recipe", path, rule, fix=fix) from error
    except UnicodeDecodeError as error:
        raise setting_error("recipe", path, "is not UTF-8 text", fix="save it as UTF-8 in your editor") from error
    except (OSError, OmegaConfBaseException) as error:
        rule = f"cannot be read: {error}"
        raise setting_error("recipe", path, rule, fix="give a readable file") from error
    if not isinstance(tree, dict):
        rule = "must contain sections such as `train:` with keys below them"
        raise setting_error("recipe", path, rule, fix=f"start from {_EXAMPLE_FILE}")
    return {str(key): value for key, value in tree.items()}


OLD_SECTION = "dpo"
"""The old section for DPO settings.  Before there were other objectives, every run stored it.

In recipe files and on the command line, `resolve.objective_section` reads it."""


def keys_of_sections(tree: Mapping[str, Any], path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the keys of a recipe file's sections, as section.key, with their values.

    path: the file, for messages.  Raises UserError for unknown and malformed sections.
    """
    sections = [f.name for f in dataclasses.fields(RunConfig)]
    for section, values in tree.items():
        if section not in (*sections, OLD_SECTION):
            if values is None and not section.isidentifier():  # a line without a colon
                rule = f"must contain sections with keys below them, not {section!r}"
                fix = "write each key as `key: value`, as in `recipe: llama_small`"
                raise setting_error("recipe", path, rule, fix=fix)
            name, _, key = section.partition(".")
            suggestion = name if name in sections else nearest(name, sections)
            fix = f"write `{suggestion}:`{f' with `{key}: {values}` below it' if key else ''}" if suggestion else ""
            advice = f"the sections are {', '.join(sections)}"
            raise setting_error(section, "...", f"no such section (in {path})", fix=fix or advice)
        if values is None:
            continue
        if not isinstance(values, Mapping):
            rule = f"a section holds keys, not a value (in {path})"
            fix = f"write each key on its own line below `{section}:`, indented, as `key: value`"
            raise setting_error(section, values, rule, fix=fix)
        for key, value in values.items():
            yield from expand(f"{section}.{key}", value)


def expand(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the keys of a subsection with their values, or `key` itself if it is not a subsection."""
    if key not in SUBSECTIONS:
        yield key, value
    elif isinstance(value, Mapping):
        yield from ((f"{key}.{name}", item) for name, item in value.items())
    else:
        raise setting_error(key, value, "is a section of keys", fix=f"set one of its keys, such as {key}.lr=0.02")


def missing_model_error(values: Mapping[str, Any], path: Path) -> UserError:
    """Return the error for a file without a model, or for an unknown key in it, which is reported first."""
    load_recipes()
    unknown = ("model.", "objective.")  # what they hold depends on a choice that has not been made
    known = {key: item for key, item in declared_keys().items() if not key.startswith(unknown)}
    for key, value in values.items():
        if not key.startswith(unknown) and key not in known:
            return unknown_key_error(key, value, known, f" (in {path})")
    fix = "start the file with `recipe: llama_small`, or set a model: `model: {name: llama}`"
    return setting_error("model.name", None, f"{path} must name a registered model", fix=fix)


# ---------------------------------------------------------------------------------------------------------------
# Configurations stored in runs and checkpoints, which are recognized by their files

_RUN_FILES = ("status.json", "metrics.jsonl")


def is_run(folder: Path) -> bool:
    """Return whether `folder` is a run folder, with the status or metrics of a run."""
    return any((folder / name).is_file() for name in _RUN_FILES)


def is_checkpoint(folder: Path) -> bool:
    """Return whether `folder` is a checkpoint's folder."""
    return (folder / "manifest.json").is_file()


def is_written_by_run(path: Path) -> bool:
    """Return whether a run has written this recipe file, to its folder or a checkpoint."""
    return path.name == CONFIG and (is_run(path.parent) or is_checkpoint(path.parent))


def run_of_best(path: str) -> str | None:
    """Return RUN if `path` has the form RUN/best, which means the run's best checkpoint; else None.

    RUN is a folder or URL.  A path that exists is taken literally, and the result is None.
    """
    run, slash, name = path.rstrip("/").rpartition("/")
    is_best = name == "best" and slash and run and not Path(path).exists()
    return run if is_best else None


def check_imports(values: Mapping[str, Any], assignments: Collection[str], allow_import: Collection[str]) -> None:
    """Raise UserError if a configuration written by a run names a module that the user has not allowed to import.

    A key that is also given on the command line (`assignments`) is trusted.
    """
    for section, name in (("model", "name"), ("fsdp", "wrap"), ("train", "objective")):
        key, settings = f"{section}.{name}", values.get(section)
        value = settings.get(name) if isinstance(settings, Mapping) else None
        if isinstance(value, str) and ":" in value and not value.startswith("size:") and key not in assignments:
            check_import(key, value, allow_import)


def refuse_masked(key: str, value: Any, path: Path) -> None:
    """Raise UserError for a value with masked secrets in a run's stored configuration."""
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else [value]
    if not any(map(is_masked, items)):
        return
    if key == "run.on_end":
        rule = f"is not stored (in {path}), as it may hold secrets; give the command on the command line again"
        raise setting_error(key, value, rule, fix="run.on_end=COMMAND, or run.on_end=null for none")
    rule = f"its credentials are not stored (in {path}); give the complete URL on the command line"
    raise setting_error(key, value, rule)


def read_stored(text: str, origin: str = "config.yaml") -> dict[str, Any]:
    """Return a stored configuration by section, without interpolating or importing anything.

    Credentials are masked, since files from older versions may contain them.
    """
    try:
        tree = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except (YAMLError, OmegaConfBaseException, ValueError) as error:
        raise UserError(f"{origin}: not a configuration ({error})") from error
    if not isinstance(tree, dict):
        raise UserError(f"{origin}: not a configuration")
    stored = {str(key): masked(value) for key, value in tree.items()}
    run = stored.get("run")
    if isinstance(run, dict) and isinstance(run.get("on_end"), str):
        run["on_end"] = masked_command(run["on_end"])
    dpo_section = stored.pop(OLD_SECTION, None)
    if section_of(stored, "train").get("objective") == OLD_SECTION and dpo_section is not None:
        stored["objective"] = dpo_section
    return stored


def read_run_config(folder: Path) -> Mapping[str, Any]:
    """Return the configuration stored in a run folder, or an empty mapping if it cannot be read."""
    try:
        return read_stored((folder / CONFIG).read_text())
    except (OSError, ValueError, UserError):
        return {}


def section_of(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section of a parsed configuration; empty if there is none or it has no keys."""
    section = tree.get(name)
    return section if isinstance(section, Mapping) else {}


def declared_model(text: str, name: str, where: str) -> DeclaredModel | None:
    """Return the model fields in a configuration written by `to_yaml`; None if its model is not of recipe `name`.

    Imports nothing that the text names.
    """
    try:
        tree = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except (YAMLError, OmegaConfBaseException, ValueError) as error:
        raise UserError(f"train.init_from: {where}: not a configuration ({error})") from error
    fields = tree.get("model") if isinstance(tree, dict) else None
    if not isinstance(fields, dict) or str(fields.pop("name", None)).rpartition(":")[2] != name:
        return None
    if "${" in str(fields):
        raise UserError(f"train.init_from: {where}: its model section refers to values outside of it")
    return DeclaredModel(where, {str(field): value for field, value in fields.items()})


# ---------------------------------------------------------------------------------------------------------------
# Keys, their types and their limits


def declared_keys(model: type | None = None, objective: type = Tokens) -> dict[str, dataclasses.Field[Any]]:
    """Return every configuration key with its dataclass field; `metadata` holds the meaning and the limits."""
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

    schema, chosen = RunConfig(model=model), {"model": model, "objective": objective}
    for section in dataclasses.fields(RunConfig):
        owner = chosen[section.name] if section.name in chosen else type(getattr(schema, section.name))
        if owner is not None:
            add(section.name, owner)
    return keys


@functools.cache
def default_tree(model: type, objective: type) -> DictConfig:
    """Return the tree of all defaults, for copying: building a tree takes five times as long as copying one."""
    tree = OmegaConf.structured(RunConfig(model=model, objective=objective))
    keys = (*(section.name for section in dataclasses.fields(RunConfig)), *SUBSECTIONS)
    for node in (tree, *(OmegaConf.select(tree, key) for key in keys)):
        OmegaConf.set_readonly(node, False)
    assert isinstance(tree, DictConfig)
    return tree


def split_overrides(overrides: Sequence[str]) -> dict[str, str]:
    """Return the keys on the command line with their texts.  Raises UserError for arguments that are not key=value."""
    assignments: dict[str, str] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise unexpected_argument([override], 0, (), has_recipe=True)
        if text.startswith("="):
            rule = "an argument has the form section.key=value"
            raise UserError(f"{override!r}: {rule}\n  did you mean {as_typed(key, text.lstrip('='))}?")
        if key in SUBSECTIONS:
            for name, value in expand(key, OmegaConf.to_container(OmegaConf.create(f"value: {text}"))["value"]):  # type: ignore[index, call-overload]
                assignments[name] = value if isinstance(value, str) else json.dumps(value)
        else:
            assignments[key] = text
    return assignments


def parse_override(key: str, text: str, hint: Any) -> Any:
    """Return the value of a command-line override: verbatim for keys of type text, otherwise parsed as YAML.

    For a key that takes text or a mapping, the value is a mapping if YAML parses it as one.
    """
    options = union_members(hint)
    if not text and not key.startswith("model."):
        example = "null" if type(None) in options else None
        raise setting_error(
            key, text, _EMPTY_VALUE, example=example, fix="" if example else "leave it out, or give a value"
        )
    if {int, float} & set(options) and re.fullmatch(r"[+-]?(0[\d_]*\d|\d+(:\d+)+(\.\d*)?)", text):
        rule = f"must be {type_name(hint)}: a leading zero or a colon would be read in base 8 or 60"  # YAML 1.1
        meant = None if ":" in text else int(text)
        raise setting_error(key, text, rule, meant=meant, fix="" if meant is not None else "write one number")
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
    tree: Any, known_keys: Mapping[str, dataclasses.Field[Any]], key: str, value: Any, where: str, typed_value: str = ""
) -> None:
    """Set one key of the typed tree.  Raises UserError for an unknown key, or a value of the wrong type.

    where: the file that sets it, as text to append to messages.  typed_value: the value as the user typed it.
    """
    if key not in known_keys:
        raise unknown_key_error(key, value, known_keys, where, str(OmegaConf.select(tree, "model.name") or ""))
    hint = known_keys[key].type
    choices = [
        choice for option in union_members(hint) for choice in typing.get_args(option) if isinstance(choice, str)
    ]
    _refuse_resolvers(key, value, where)
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
            raise setting_error(key, value, rule, meant=suggestion) from error
        raise setting_error(key, typed_value or value, rule, **suggest_value(value, hint, known_keys[key])) from error


_OTHER_KEY = re.compile(r"(?<!\\)\$\{[\w.\[\]]+\}")
"""The only supported interpolation: the value of another key."""


def _refuse_resolvers(key: str, value: Any, where: str) -> None:
    """Raise UserError for OmegaConf resolvers: a configuration must not run code or read the environment."""
    if isinstance(value, (list, tuple, Mapping)):
        for item in value.values() if isinstance(value, Mapping) else value:
            _refuse_resolvers(key, item, where)
    elif isinstance(value, str) and "${" in _OTHER_KEY.sub("", value):
        rule = f"${{...}} can only refer to another key, as ${{section.key}}{where}, not call a resolver"
        raise setting_error(key, value, rule, fix=f"write the value itself, or give it on the command line: {key}=...")


def check_limits(config: RunConfig) -> None:
    """Raise UserError for a number outside the limits that the schema or the model's recipe declares."""
    for key, item in declared_keys(type(config.model), type(config.objective)).items():
        value = operator.attrgetter(key)(config)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, (int, float)) and not isinstance(number, bool):
                check_number(key, value, number, item.metadata, partial(example_value, item))
