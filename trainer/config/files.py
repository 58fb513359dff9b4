"""Finds and reads recipe files: the built-in ones in conf/, the user's own, and the stored configurations of runs.

The configurations that runs store in their folders and checkpoints are untrusted data: a module that one of them names
is imported only with the user's permission.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.config.keys import EMPTY_VALUE_PROBLEM, declared_keys, expand_subsection, find_other_base
from trainer.config.messages import unknown_key_error
from trainer.config.model_folder import DeclaredModel
from trainer.config.schema import TYPED_BY_OTHERS, RunConfig
from trainer.errors import UserError, choice_error, nearest, setting_error
from trainer.registry import check_import

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
    if Path(recipe).is_dir() and not ((Path(recipe) / CONFIG).is_file() and is_written_by_run(Path(recipe) / CONFIG)):
        rule = f"is a folder, but neither a run folder nor a checkpoint with its {CONFIG}"
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
    except yaml.YAMLError as error:
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
    if (number := find_other_base(path.read_text())) is not None:
        rule = f"line {number.start_mark.line + 1}: YAML reads {number.value} as a number in base 8 or 60"
        fix = f"write it in decimal, or with quotes if it is text: '{number.value}'"
        raise setting_error("recipe", path, rule, fix=fix)
    if not isinstance(tree, dict):
        rule = "must contain sections such as `train:` with keys below them"
        raise setting_error("recipe", path, rule, fix=f"start from {_STARTING_POINT}")
    return {str(key): value for key, value in tree.items()}


def keys_of_sections(tree: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
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


def missing_model_error(values: Mapping[str, Any], path: str) -> UserError:
    """Return the error for a recipe file that names no model, or for an unknown key in the file if there is one."""
    legal = {key: item for key, item in declared_keys().items() if not key.startswith(TYPED_BY_OTHERS)}
    for key, value in values.items():
        if not key.startswith(TYPED_BY_OTHERS) and key not in legal:
            return unknown_key_error(key, value, legal, f" (in {path})")
    fix = "start the file with `recipe: llama_small`, or set a model: `model: {name: llama}`"
    return setting_error("model.name", None, f"{path} must name a registered model", fix=fix)


# ---------------------------------------------------------------------------------------------------------------
# Stored configurations

CONFIG = "config.yaml"
"""File name of the stored configuration in a run folder or a checkpoint."""

_RUN_FILES = ("status.json", "metrics.jsonl")


def is_run(folder: Path) -> bool:
    """Return whether `folder` is a run folder: it has the status or the metrics of a run."""
    return any((folder / name).is_file() for name in _RUN_FILES)


def is_checkpoint(folder: Path) -> bool:
    """Return whether `folder` has the manifest of a checkpoint."""
    return (folder / "manifest.json").is_file()


def is_written_by_run(path: Path) -> bool:
    """Return whether `path` is a `config.yaml` that a run wrote into its folder or into a checkpoint."""
    return path.name == CONFIG and (is_run(path.parent) or is_checkpoint(path.parent))


def is_another_run(run_dir: str, folder: Path) -> bool:
    """Return whether the folder `run_dir`, recorded in the files of `folder`, holds a run and is another folder.

    If so, `folder` is a copy of that run.  If `run_dir` no longer holds a run, that run was moved to `folder`.
    """
    other = Path(run_dir)
    try:
        return is_run(other) and not other.samefile(folder)
    except OSError:
        return other.absolute() != folder.absolute()


def run_from_best_path(path: str) -> str | None:
    """Return RUN if `path` has the form RUN/best, which means the run's best checkpoint; otherwise None.

    RUN is a folder or URL.  A path that exists is taken literally: the result is then None.
    """
    run, slash, name = path.rstrip("/").rpartition("/")
    is_best = name == "best" and slash and run and not Path(path).exists()
    return run if is_best else None


def check_imports(sections: Mapping[str, Any], command_line: Collection[str], allow_import: Collection[str]) -> None:
    """Raise UserError if an untrusted configuration names a module whose import the user has not allowed.

    A reference to another key might become such a name, and is refused too.

    sections: the configuration, by section.
    command_line: the keys on the command line, which are trusted.
    """
    for section, name in (("model", "name"), ("fsdp", "wrap"), ("train", "objective")):
        key = f"{section}.{name}"
        value = section_of(sections, section).get(name)
        if isinstance(value, str) and "${" in value:
            raise setting_error(key, value, "refers to another key, which a run never stores", fix="write the value")
        if isinstance(value, str) and ":" in value and not value.startswith("size:") and key not in command_line:
            check_import(key, value, allow_import)


def check_command(sections: Mapping[str, Any], command_line: Collection[str]) -> None:
    """Raise UserError if an untrusted configuration has a command to run, unless the command line sets it too."""
    command = section_of(sections, "run").get("on_end")
    if command is not None and "run.on_end" not in command_line:
        rule = "the configuration of a run names this command, which is run only if you give it too"
        raise setting_error(
            "run.on_end", command, rule, fix="give run.on_end on the command line; run.on_end=null: none"
        )


def read_stored(text: str, origin: str = CONFIG) -> dict[str, Any]:
    """Return a stored configuration by section, without resolving references or importing anything.

    Raises UserError, which names `origin`, if the text is not a configuration.
    """
    try:
        tree = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        raise UserError(f"{origin}: not a configuration ({error})") from error
    if not isinstance(tree, dict):
        raise UserError(f"{origin}: not a configuration")
    return {str(key): value for key, value in tree.items()}


def read_run_config(folder: Path) -> Mapping[str, Any]:
    """Return the configuration stored in a run folder, or an empty mapping if it cannot be read."""
    try:
        return read_stored((folder / CONFIG).read_text())
    except (OSError, ValueError, UserError):
        return {}


def section_of(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section of a parsed configuration; empty if it is missing or has no keys."""
    section = tree.get(name)
    return section if isinstance(section, Mapping) else {}


def declared_model(text: str, name: str, where: str) -> DeclaredModel | None:
    """Return the model fields in a configuration that a run has stored; None if its model spec is not `name`.

    Imports nothing that the text names.  Raises UserError, which names `where`, if the text is not a configuration.
    """
    stored = read_stored(text, f"train.init_from: {where}")
    fields = {str(field): value for field, value in section_of(stored, "model").items()}
    if str(fields.pop("name", None)).rpartition(":")[2] != name:
        return None
    if "${" in str(fields):
        raise UserError(f"train.init_from: {where}: its model section refers to values outside of it")
    return DeclaredModel(where, fields)
