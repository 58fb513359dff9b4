"""Parses the command line of a run: the recipe, overrides, the number of processes, and options."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from trainer.config.load import declared_keys, recipe_files
from trainer.config.suggestions import DASHES, unexpected_argument, unknown_option
from trainer.errors import UserError, nearest, setting_error

_MAX_PROCESSES = 1024
"""More processes than any machine can run."""
ALLOW_IMPORT = "--allow-import"
_OPTIONS = ("--help", "--version", "--print-config", "--dry-run")


@dataclass(frozen=True)
class Arguments:
    """The arguments of the command line."""

    recipe: str | None = None
    overrides: list[str] = field(default_factory=list)
    nproc: int | None = None
    options: frozenset[str] = frozenset()
    allow_import: list[str] = field(default_factory=list)
    """Modules that may be imported because the run in `recipe` names them."""
    sections: list[str] = field(default_factory=list)
    """Sections for which `--help` is requested; empty for all."""

    def asks_for(self, option: str) -> bool:
        """Return whether an option such as `--help` was given."""
        return option in self.options


def parse(argv: Sequence[str]) -> Arguments:
    """Parse the command line.  If a key is given twice, the last value applies.

    Raises UserError for an argument of an unknown form.
    """
    argv, named = list(argv), dict[str, str]()
    options, overrides, sections = set(), [], []
    argv, allow_import = split_allow_import(argv)
    wants_help = "--help" in argv or "-h" in argv
    for place, argument in enumerate(argv):
        key, equals, value = argument.partition("=")
        if argument in (*_OPTIONS, "-h"):
            options.add("--help" if argument == "-h" else argument)
        elif argument.startswith(DASHES):
            raise unknown_option(argument, _OPTIONS, declared_keys())
        elif key in ("recipe", "nproc") and equals:
            named[key] = value
        elif wants_help and not equals:
            sections.append(argument)
        elif not equals or not key:
            has_recipe = any(word.startswith("recipe=") for word in argv)
            raise unexpected_argument(argv, place, recipe_files(), has_recipe, _OPTIONS)
        else:
            overrides.append(argument)
    nproc = _parse_nproc(named["nproc"]) if "nproc" in named else None
    return Arguments(named.get("recipe"), overrides, nproc, frozenset(options), allow_import, sections)


def split_allow_import(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the other arguments, and the modules named by `--allow-import MODULE`, which may be repeated."""
    rest, modules, words = list[str](), list[str](), iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        if name != ALLOW_IMPORT:
            rest.append(word)
            continue
        module = value if equals else next(words, "")
        if not module or module.startswith("-") or "=" in module:
            raise UserError(f"{ALLOW_IMPORT}: needs the name of a module\n  for example: {ALLOW_IMPORT} my_models")
        modules.append(module)
    return rest, modules


def no_recipe(usage: str, overrides: Collection[str]) -> UserError:
    """Return the error for a command line without a recipe.  `usage` is included in the message."""
    files = sorted(recipe_files())
    given = dict(override.partition("=")[::2] for override in overrides)
    meant = nearest(given.get("model.name", ""), files) if "model.name" in given else None
    advice = f"did you mean recipe={meant}?" if meant else "for example: recipe=llama_small"
    return UserError(f"recipe=NAME is missing\n  {advice}\n{usage}\nrecipes: {', '.join(files)}")


def _parse_nproc(text: str) -> int:
    rule = f"must be a number of processes, from 1 to {_MAX_PROCESSES}"
    if not text.isdecimal() or len(text) > 9:
        raise setting_error("nproc", text, rule, example=1)
    if not 1 <= int(text) <= _MAX_PROCESSES:
        raise setting_error("nproc", text, rule, min(max(1, int(text)), _MAX_PROCESSES))
    return int(text)
