"""The text of `--help`: usage, recipes, and every key with type, default and meaning.  Imports no torch."""

from __future__ import annotations

import dataclasses

from trainer.config import RunConfig, declared_keys, description, recipe_files, type_name
from trainer.recipe import all_recipes

USAGE = """\
usage: python -m trainer.run recipe=NAME [section.key=value ...] [nproc=N]

  recipe=NAME          one of the recipes below, a path ending in .yaml, or the folder of a run
  section.key=value    overrides one value, written as in YAML; text is taken as it stands
  nproc=N              starts N local worker processes; without it, one, or those of torchrun or srun
  --print-config       checks the resolved configuration, prints it as YAML and exits
  --help               prints this and exits
"""


def recipe_list() -> str:
    """Return the recipes that come with the package, a line each."""
    files = recipe_files()
    width = max(map(len, files))
    lines = [f"  {name:<{width}}  {description(path)}" for name, path in files.items()]
    return "recipes:\n" + "\n".join(lines) + "\n"


def full_help() -> str:
    """Return usage, recipes and all keys, the models' own included."""
    parts = [USAGE, recipe_list()]
    for section in dataclasses.fields(RunConfig):
        if section.name == "model":
            for recipe in all_recipes():
                parts.append(_section(f"model (model.name={recipe.name})", recipe.config, recipe.config))
        else:
            parts.append(_section(section.name, section.default_factory, None))  # type: ignore[arg-type]
    return "\n".join(parts)


def _section(title: str, owner: type, model: type | None) -> str:
    prefix = "model" if model else title
    keys = {k: f for k, f in declared_keys(model).items() if k.startswith(f"{prefix}.")}
    doc = (owner.__doc__ or "").partition("\n")[0]
    lines = [f"{title}: {doc}"]
    for key, item in keys.items():
        meaning = item.metadata.get("meaning", "a registered model" if key == "model.name" else "")
        default = "(none)" if item.default is dataclasses.MISSING else _written(item.default)
        lines.append(f"  {key}  [{type_name(item.type)}; default {default}]\n      {meaning}")
    return "\n".join(lines) + "\n"


def _written(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[" + ", ".join(map(str, value)) + "]"
    return str(value) if value != "" else "(empty)"
