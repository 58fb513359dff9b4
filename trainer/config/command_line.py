"""Parses the command line, and generates the output of `--help`.

This module does not import torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from trainer.config.files import recipe_description, recipe_files
from trainer.config.keys import declared_keys
from trainer.config.messages import DASHES, type_name, unexpected_argument_error, unknown_option_error
from trainer.config.schema import RunConfig
from trainer.errors import CommandParser, UserError, nearest, setting_error, yaml_scalar
from trainer.objective import all_objectives
from trainer.registry import all_models

# ---------------------------------------------------------------------------------------------------------------
# Arguments

_MAX_PROCESSES = 1024
"""Upper limit on `nproc`; no single machine runs this many ranks."""
ALLOW_IMPORT = "--allow-import"


@dataclass(frozen=True)
class Arguments:
    """The parsed command-line arguments.  `recipe` and `nproc` are None if they are not given."""

    recipe: str | None = None
    overrides: list[str] = field(default_factory=list)
    """The arguments of the form key=value, except `recipe` and `nproc`."""
    nproc: int | None = None
    options: frozenset[str] = frozenset()
    """The options that take no value, such as `--help`."""
    allow_import: list[str] = field(default_factory=list)
    """Modules that may be imported if the stored configuration of a run names them."""
    sections: list[str] = field(default_factory=list)
    """Sections to describe with `--help`; empty for all sections, or if `--help` is not given."""


class SettingsParser(CommandParser):
    """A parser of a command that takes settings (NAME=VALUE) beside its options, in any order.

    names: what the command takes as NAME=VALUE besides the configuration keys, `recipe` and `nproc`.

    Unlike other parsers it raises UserError for a mistake, because several ranks may find the same one.
    """

    def __init__(
        self, prog: str, description: str | None = None, names: Sequence[str] = (), add_help: bool = True
    ) -> None:
        self._options: list[str] = []
        super().__init__(prog, description, add_help)
        self._names = names
        self.add_argument("words", nargs="*", help=argparse.SUPPRESS)
        self.add_allow_import()

    def add_argument(self, *names: Any, **settings: Any) -> argparse.Action:
        """Add an option, and remember its names for messages about unknown ones."""
        action = super().add_argument(*names, **settings)
        self._options += action.option_strings
        return action

    def error(self, message: str) -> NoReturn:
        """Raise UserError."""
        raise UserError(f"{message.removeprefix('argument ')}\n  to fix: see {self.prog} --help")

    def format_help(self) -> str:
        """Return the description, which explains the options too."""
        return self.description or ""

    def parse_settings(self, argv: Sequence[str]) -> tuple[argparse.Namespace, dict[str, str], list[str]]:
        """Return the options, `recipe`, `nproc` and the other `names` that are given, and the overrides of keys.

        The last value of a repeated name applies.  Words without an equals sign are in `words` of the options, for
        `refuse_words`.  Raises UserError for an unknown option or a wrong value of an option.
        """
        options, unknown = self.parse_known_intermixed_args(list(argv))
        settings = [word for word in options.words if _is_setting(word)]
        options.words = [word for word in options.words if word not in settings]
        for word in (*unknown, *options.words):
            if word.startswith(DASHES):
                raise unknown_option_error(word, self._options, declared_keys(), self._names)
        named: dict[str, str] = {}
        overrides = []
        for word in settings:
            name, _, value = word.partition("=")
            if name in ("recipe", "nproc", *self._names):
                named[name] = value
            else:
                overrides.append(word)
        return options, named, overrides

    def refuse_words(self, words: Sequence[str], has_recipe: bool) -> None:
        """Raise UserError if there are words that are neither options nor settings."""
        if words:
            raise unexpected_argument_error(words[0], recipe_files(), has_recipe, self._options)


def _is_setting(word: str) -> bool:
    """Return whether a word has the form NAME=VALUE; a path or URL may contain an equals sign too."""
    name, equals, _ = word.partition("=")
    return bool(name and equals) and "/" not in name and not name.startswith(DASHES)


def parse(argv: Sequence[str]) -> Arguments:
    """Parse the command line of `trainer.run`.  If a key is given twice, the last value applies.

    Raises UserError for an unknown option, a malformed argument, or `--why` without `--print-config`, `--help` or
    `--version`.
    """
    parser = SettingsParser("python -m trainer.run", add_help=False)
    for names in (["--help", "-h"], ["--version"], ["--print-config"], ["--why"], ["--dry-run"]):
        parser.add_argument(*names, dest="options", action="append_const", const=names[0], default=[])
    found, named, overrides = parser.parse_settings(argv)
    options = frozenset(found.options)
    if "--help" not in options:
        parser.refuse_words(found.words, "recipe" in named)
    nproc = parse_nproc(named.get("nproc"))
    if "--why" in options and options.isdisjoint(("--print-config", "--help", "--version")):
        raise UserError("--why: explains the output of --print-config\n  to fix: add --print-config, or leave it out")
    return Arguments(named.get("recipe"), overrides, nproc, options, found.allow_import, found.words)


def missing_recipe_error(usage: str, overrides: Collection[str]) -> UserError:
    """Return the error for a command line without a recipe.  `usage` is included in the message."""
    files = sorted(recipe_files())
    settings = dict(override.partition("=")[::2] for override in overrides)
    suggestion = nearest(settings.get("model.name", ""), files) if "model.name" in settings else None
    proposal = f"recipe={suggestion or 'llama_small'}"
    advice = f"did you mean {proposal}?" if suggestion else f"for example: {proposal}"
    return UserError(f"recipe=NAME is missing\n  {advice}\n{usage}\nrecipes: {', '.join(files)}", proposal)


def parse_nproc(text: str | None) -> int | None:
    """Return the number of processes; None if it is not given.  Raises UserError for anything but a number."""
    if text is None:
        return None
    rule = f"must be a number of processes, from 1 to {_MAX_PROCESSES}"
    if not text.isdecimal() or len(text) > 9:
        raise setting_error("nproc", text, rule, proposal=1)
    if not 1 <= int(text) <= _MAX_PROCESSES:
        raise setting_error("nproc", text, rule, min(max(1, int(text)), _MAX_PROCESSES))
    return int(text)


# ---------------------------------------------------------------------------------------------------------------
# --help

USAGE = """\
usage: python -m trainer.run recipe=NAME [section.key=value ...] [nproc=N]

  recipe=NAME          one of the recipes below, a path ending in .yaml, or a run folder
  section.key=value    sets one value, written as in YAML; strings need no quotes
  nproc=N              starts N local processes; default: one, or those started by torchrun or srun
  --print-config       checks the resolved configuration, prints it as YAML and exits
  --why                with --print-config: a comment on each value that is not a default says where it came from
  --dry-run            starts up, but does not train: builds the model, opens the data, plans; leaves no files behind
  --allow-import M     allows importing module M if the run folder given as recipe= refers to it; may be repeated
  --help [SECTION]     prints this, or one section, and exits; with recipe=NAME also shows the recipe's values
  --version            prints the version and exits

exit codes: 0 finished, 2 a mistake in the input, 75 stopped on request (run it again to resume), 1 anything else
"""

_COMMANDS = """\
other commands, as `python -m trainer.COMMAND` or `meshtrainer COMMAND`, each with --help:
  plan, prepare, data, evaluate, generate, export, checkpoints, report, init
"""

_MOST_USED = ("run", "data", "train", "optim", "schedule", "mesh", "fsdp", "eval", "checkpoint", "log")
"""Sections that `--help` lists first, in this order."""


def recipe_list() -> str:
    """Return the list of built-in recipes, one per line."""
    files = recipe_files()
    width = max(map(len, files))
    lines = [f"  {name:<{width}}  {recipe_description(path)}" for name, path in files.items()]
    return "recipes:\n" + "\n".join(lines) + "\n"


def full_help(sections: Sequence[str] = (), config: RunConfig | None = None) -> str:
    """Return the usage, the recipes and all keys, including those of every model and objective.

    sections: the sections to list instead; empty for everything.
    config: if given, the text also shows each key's value in this configuration, and lists only its own model and
        objective.

    Raises UserError for an unknown section.
    """
    all_sections = [section.name for section in dataclasses.fields(RunConfig)]
    for name in sections:
        if name not in all_sections:
            sections_of_key = (key.partition(".")[0] for key in declared_keys() if name in (key, key.partition(".")[2]))
            suggestion = next(sections_of_key, None) or nearest(name, all_sections)
            advice = (
                f"did you mean --help {suggestion}?" if suggestion else f"the sections are: {', '.join(all_sections)}"
            )
            raise UserError(f"--help {name}: no such section\n  {advice}")
    parts = [] if sections else [USAGE, recipe_list(), _COMMANDS]
    all_sections.sort(key=lambda name: _MOST_USED.index(name) if name in _MOST_USED else len(_MOST_USED))
    for name in sections or all_sections:
        if name == "model":
            specs = all_models() if config is None else [config.spec]
            parts += [
                _section_help(f"model (model.name={spec.name})", spec.config, declared_keys(spec.config), config)
                for spec in specs
            ]
        elif name == "objective":
            objectives = all_objectives() if config is None else {config.train.objective: type(config.objective)}
            parts += [
                _section_help(f"objective (train.objective={kind})", owner, declared_keys(objective=owner), config)
                for kind, owner in objectives.items()
            ]
        else:
            parts.append(_section_help(name, type(getattr(RunConfig(), name)), declared_keys(), config))
    return "\n".join(parts)


def _section_help(
    title: str, owner: type, declared: Mapping[str, dataclasses.Field[Any]], config: RunConfig | None
) -> str:
    section = title.partition(" ")[0]
    keys = {key: item for key, item in declared.items() if key.startswith(f"{section}.")}
    docstring = (owner.__doc__ or "").partition("\n")[0]
    lines = [f"{title}: {docstring}"]
    for key, item in keys.items():
        meaning = item.metadata.get("meaning", "a registered model" if key == "model.name" else "")
        default = "(none)" if item.default is dataclasses.MISSING else _format(item.default)
        current_value = "" if config is None else f"; here {_format(operator.attrgetter(key)(config))}"
        needs = f" (needs {item.metadata['needs']})" if "needs" in item.metadata else ""
        lines.append(f"  {key}  [{type_name(item.type)}; default {default}{current_value}]\n      {meaning}{needs}")
    return "\n".join(lines) + "\n"


def _format(value: object) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(map(str, value)) + "]"
    return yaml_scalar(value) or "(empty)"
