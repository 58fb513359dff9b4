"""Finds and reads recipe files: the built-in ones in conf/, the user's own, and the stored configurations of runs."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from trainer.config.keys import EMPTY_VALUE_PROBLEM, declared_keys, expand_subsection
from trainer.config.messages import unknown_key_error
from trainer.config.schema import RunConfig
from trainer.config.stored import CONFIG
from trainer.errors import UserError, choice_error, nearest, setting_error
from trainer.registry import load_models

_STARTING_POINT = "the output of python -m trainer.run recipe=llama_small --print-config"


def find_recipe_file(recipe: str) -> Path:
    """Return the YAML file that `recipe` refers to.  Raises UserError if there is none."""
    if not recipe:
        raise setting_error("recipe", recipe, EMPTY_VALUE_PROBLEM, proposal="llama_small")
    if recipe.endswith((".yaml", ".yml")) and not Path(recipe).is_dir():
        path = Path(recipe)
        if not path.is_file():
            suggestion = nearest(path.stem, recipe_files())
            fix = "" if suggestion else f"give its path relative to {os.getcwd()}, or start from {_STARTING_POINT}"
            raise setting_error("recipe", recipe, "no such file", proposal=suggestion, fix=fix)
        return path
    files = recipe_files()
    if recipe in files:
        return files[recipe]
    if Path(recipe).suffix in (".json", ".toml"):
        raise setting_error("recipe", recipe, "recipe files are YAML", fix=f"start from {_STARTING_POINT}")
    if Path(recipe).is_dir() and not (Path(recipe) / CONFIG).is_file():
        rule = f"is a folder, but not a run folder: it has no {CONFIG}"
        yaml_file = next(iter(sorted(Path(recipe).glob("*.y*ml"))), None)
        raise setting_error("recipe", recipe, rule, proposal=yaml_file or "llama_small")
    if Path(recipe).is_dir():
        return Path(recipe) / CONFIG
    if os.sep in recipe:
        fix = f"give a run folder, a path ending in .yaml, or one of {', '.join(sorted(files))}"
        problem = "is neither a .yaml file nor a run folder" if Path(recipe).exists() else "no such file or folder"
        raise setting_error("recipe", recipe, problem, fix=fix)
    raise choice_error("recipe", recipe, sorted(files), "a path ending in .yaml, a run folder, or one of")


def recipe_files() -> dict[str, Path]:
    """Return the files of the built-in recipes, by name."""
    folder = Path(str(resources.files("trainer.conf")))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def recipe_description(path: Path) -> str:
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
        fix = f"correct{line.replace(',', '')} or start from {_STARTING_POINT}"
        raise setting_error("recipe", path, rule, fix=fix) from error
    except UnicodeDecodeError as error:
        raise setting_error("recipe", path, "is not UTF-8 text", fix="save it as UTF-8 in your editor") from error
    except (OSError, OmegaConfBaseException) as error:
        rule = f"cannot be read: {error}"
        raise setting_error("recipe", path, rule, fix="give a readable file") from error
    if not isinstance(tree, dict):
        rule = "must contain sections such as `train:` with keys below them"
        raise setting_error("recipe", path, rule, fix=f"start from {_STARTING_POINT}")
    return {str(key): value for key, value in tree.items()}


def keys_of_sections(tree: Mapping[str, Any], path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the keys of a recipe file's sections, as section.key, with their values.

    path: the file, for messages.  Raises UserError for an unknown or malformed section.
    """
    sections = [f.name for f in dataclasses.fields(RunConfig)]
    for section, values in tree.items():
        if section not in sections:
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
            yield from expand_subsection(f"{section}.{key}", value)


def missing_model_error(values: Mapping[str, Any], path: Path) -> UserError:
    """Return the error for a recipe file that names no model, or for an unknown key in the file if there is one."""
    load_models()
    undetermined = ("model.", "objective.")  # the keys of these sections depend on the model and the objective
    legal = {key: item for key, item in declared_keys().items() if not key.startswith(undetermined)}
    for key, value in values.items():
        if not key.startswith(undetermined) and key not in legal:
            return unknown_key_error(key, value, legal, f" (in {path})")
    fix = "start the file with `recipe: llama_small`, or set a model: `model: {name: llama}`"
    return setting_error("model.name", None, f"{path} must name a registered model", fix=fix)
