"""The text of `--help`: usage, recipes, and every key with type, default and meaning.  Does not import torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from trainer.config import RunConfig, declared_keys, description, recipe_files, type_name
from trainer.errors import UserError, nearest
from trainer.recipe import all_recipes

USAGE = """\
usage: python -m trainer.run recipe=NAME [section.key=value ...] [nproc=N]

  recipe=NAME          one of the recipes below, a path ending in .yaml, or a run folder
  section.key=value    sets one value, written as in YAML; strings need no quotes
  nproc=N              starts N local processes; default: one, or those started by torchrun or srun
  --print-config       checks the resolved configuration, prints it as YAML and exits
  --dry-run            starts up, but does not train: builds the model, opens the data, plans; leaves no files behind
  --allow-import M     lets a run in recipe= import its own module M; may be repeated
  --help [SECTION]     prints this, or one section, and exits; with recipe=NAME also shows the recipe's values
  --version            prints the version and exits

exit codes: 0 finished, 2 a mistake in the input, 75 stopped on request (run it again to resume), 1 anything else
"""

_COMMANDS = """\
other commands, as `python -m trainer.COMMAND` or `meshtrainer COMMAND`, each with --help:
  prepare, plan, data, checkpoints, evaluate, generate, export, report
shell completion: eval "$(meshtrainer completion bash)", or zsh
"""

_MOST_USED = ("run", "data", "train", "optim", "schedule", "mesh", "fsdp", "eval", "checkpoint", "log")
"""The sections that the help lists first, in this order."""


def recipe_list() -> str:
    """Return the list of built-in recipes, one per line."""
    files = recipe_files()
    width = max(map(len, files))
    lines = [f"  {name:<{width}}  {description(path)}" for name, path in files.items()]
    return "recipes:\n" + "\n".join(lines) + "\n"


def full_help(sections: Sequence[str] = (), config: RunConfig | None = None) -> str:
    """Return the usage, the recipes and all keys, including those of every model; or only the keys of `sections`.

    With a configuration, each key also shows its value there, and `model` lists the fields of that model only.  Raises
    UserError for an unknown section.
    """
    known = [section.name for section in dataclasses.fields(RunConfig)]
    for name in sections:
        if name not in known:
            best = _section_of(name) or nearest(name, known)
            meant = f"did you mean --help {best}?" if best else f"the sections are: {', '.join(known)}"
            raise UserError(f"--help {name}: no such section\n  {meant}")
    parts = [] if sections else [USAGE, recipe_list(), _COMMANDS]
    for name in sections or sorted(known, key=_order):
        if name != "model":
            parts.append(_section(name, type(getattr(RunConfig(), name)), None, config))
        else:
            recipes = all_recipes() if config is None else [config.recipe]
            parts += [_section(f"model (model.name={r.name})", r.config, r.config, config) for r in recipes]
    return "\n".join(parts)


def _section_of(name: str) -> str | None:
    """Return the section of a key, which may be given without its section; None if there is no such key."""
    return next((key.partition(".")[0] for key in declared_keys() if name in (key, key.partition(".")[2])), None)


def _order(section: str) -> int:
    return _MOST_USED.index(section) if section in _MOST_USED else len(_MOST_USED)


def _section(title: str, owner: type, model: type | None, config: RunConfig | None) -> str:
    prefix = "model" if model else title
    keys = {k: f for k, f in declared_keys(model).items() if k.startswith(f"{prefix}.")}
    doc = (owner.__doc__ or "").partition("\n")[0]
    lines = [f"{title}: {doc}"]
    for key, item in keys.items():
        meaning = item.metadata.get("meaning", "a registered model" if key == "model.name" else "")
        default = "(none)" if item.default is dataclasses.MISSING else _written(item.default)
        here = "" if config is None else f"; here {_written(getattr(getattr(config, prefix), key.partition('.')[2]))}"
        lines.append(f"  {key}  [{type_name(item.type)}; default {default}{here}]\n      {meaning}")
    return "\n".join(lines) + "\n"


def _written(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[" + ", ".join(map(str, value)) + "]"
    return str(value) if value != "" else "(empty)"
