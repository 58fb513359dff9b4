"""The text of `--help`: usage, recipes, and every key with type, default and meaning.  Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from trainer.config import RunConfig, declared_keys, description, recipe_files, type_name
from trainer.errors import UserError, nearest
from trainer.recipe import all_recipes

USAGE = """\
usage: python -m trainer.run recipe=NAME [section.key=value ...] [nproc=N]

  recipe=NAME          one of the recipes below, a path ending in .yaml, or the folder of a run
  section.key=value    overrides one value, written as in YAML; text is taken as it stands
  nproc=N              starts N local worker processes; without it, one, or those of torchrun or srun
  --print-config       checks the resolved configuration, prints it as YAML and exits
  --dry-run            starts, short of the first step: builds the model, opens the data, plans; leaves nothing behind
  --help [SECTION]     prints this, or the keys of one section, and exits; with recipe=NAME also the values there
  --version            prints the version and exits

exit codes: 0 finished, 2 a mistake in what was asked, 75 stopped on request (run it again), 1 anything else
"""

_COMMANDS = """\
other commands, each with --help: python -m trainer.prepare, .plan, .checkpoints, .evaluate,
.generate, .export, .report
"""

_MOST_USED = ("run", "data", "train", "optim", "schedule", "mesh", "fsdp", "eval", "checkpoint", "log")
"""Sections in the order of the help: the others follow, models last."""


def recipe_list() -> str:
    """Return the recipes that come with the package, a line each."""
    files = recipe_files()
    width = max(map(len, files))
    lines = [f"  {name:<{width}}  {description(path)}" for name, path in files.items()]
    return "recipes:\n" + "\n".join(lines) + "\n"


def full_help(sections: Sequence[str] = (), config: RunConfig | None = None) -> str:
    """Return usage, recipes and all keys, the models' own included; or the keys of `sections` alone.

    With a configuration each key shows the value that it has there, and `model` the fields of that model.  Raises
    UserError for a section that there is none of.
    """
    known = [section.name for section in dataclasses.fields(RunConfig)]
    for name in sections:
        if name not in known:
            best = nearest(name, known)
            meant = f"did you mean --help {best}?" if best else f"the sections: {', '.join(known)}"
            raise UserError(f"--help {name}: no such section\n  {meant}")
    parts = [] if sections else [USAGE, recipe_list(), _COMMANDS]
    for name in sections or sorted(known, key=_order):
        if name != "model":
            parts.append(_section(name, type(getattr(RunConfig(), name)), None, config))
        else:
            recipes = all_recipes() if config is None else [config.recipe]
            parts += [_section(f"model (model.name={r.name})", r.config, r.config, config) for r in recipes]
    return "\n".join(parts)


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
