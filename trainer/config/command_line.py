"""Parses the command line; generates the output of `--help` and `--why`, and shell completion scripts.

This module does not import torch.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from trainer.config.files import recipe_description, recipe_files
from trainer.config.keys import declared_keys
from trainer.config.messages import DASHES, type_name, unexpected_argument_error, unknown_option_error
from trainer.config.schema import SUBSECTIONS, RunConfig, plain_lists
from trainer.errors import UserError, choice_error, nearest, printable, setting_error
from trainer.objective import all_objectives
from trainer.registry import all_models

# ---------------------------------------------------------------------------------------------------------------
# Arguments

_MAX_PROCESSES = 1024
"""Upper limit on `nproc`; no single machine runs this many ranks."""
ALLOW_IMPORT = "--allow-import"
_OPTIONS = ("--help", "--version", "--print-config", "--why", "--dry-run")


@dataclass(frozen=True)
class Arguments:
    """The parsed command-line arguments.  `recipe` and `nproc` are None if they are not given."""

    recipe: str | None = None
    overrides: list[str] = field(default_factory=list)
    """The arguments of the form key=value, except `recipe` and `nproc`."""
    nproc: int | None = None
    options: frozenset[str] = frozenset()
    allow_import: list[str] = field(default_factory=list)
    """Modules that may be imported if the stored configuration of a run names them."""
    sections: list[str] = field(default_factory=list)
    """Sections to describe with `--help`; empty for all sections, or if `--help` is not given."""

    def has_option(self, option: str) -> bool:
        """Return whether an option such as `--help` was given."""
        return option in self.options


def parse(argv: Sequence[str]) -> Arguments:
    """Parse the command line.  If a key is given twice, the last value applies.

    Raises UserError for an unknown option, a malformed argument, or `--why` without `--print-config`, `--help` or
    `--version`.
    """
    argv, assignments = list(argv), dict[str, str]()
    options, overrides, sections = set(), [], []
    argv, allow_import = split_allow_import(argv)
    wants_help = "--help" in argv or "-h" in argv
    for index, argument in enumerate(argv):
        key, equals, value = argument.partition("=")
        if argument in (*_OPTIONS, "-h"):
            options.add("--help" if argument == "-h" else argument)
        elif argument.startswith(DASHES):
            raise unknown_option_error(argument, _OPTIONS, declared_keys())
        elif key in ("recipe", "nproc") and equals:
            assignments[key] = value
        elif wants_help and not equals:
            sections.append(argument)
        elif not equals or not key:
            has_recipe = any(word.startswith("recipe=") for word in argv)
            raise unexpected_argument_error(argv, index, recipe_files(), has_recipe, _OPTIONS)
        else:
            overrides.append(argument)
    nproc = _parse_nproc(assignments["nproc"]) if "nproc" in assignments else None
    if "--why" in options and options.isdisjoint(("--print-config", "--help", "--version")):
        raise UserError("--why: explains the output of --print-config\n  to fix: add --print-config, or leave it out")
    return Arguments(assignments.get("recipe"), overrides, nproc, frozenset(options), allow_import, sections)


def split_allow_import(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split off `--allow-import MODULE`, which may be repeated.  Return the other arguments, and the modules.

    Raises UserError if a module's name is missing.
    """
    others, modules, arguments = list[str](), list[str](), iter(argv)
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name != ALLOW_IMPORT:
            others.append(argument)
            continue
        module = value if equals else next(arguments, "")
        if not module or module.startswith("-") or "=" in module:
            raise UserError(f"{ALLOW_IMPORT}: needs the name of a module\n  for example: {ALLOW_IMPORT} my_models")
        modules.append(module)
    return others, modules


def missing_recipe_error(usage: str, overrides: Collection[str]) -> UserError:
    """Return the error for a command line without a recipe.  `usage` is included in the message."""
    files = sorted(recipe_files())
    settings = dict(override.partition("=")[::2] for override in overrides)
    suggestion = nearest(settings.get("model.name", ""), files) if "model.name" in settings else None
    proposal = f"recipe={suggestion or 'llama_small'}"
    advice = f"did you mean {proposal}?" if suggestion else f"for example: {proposal}"
    return UserError(f"recipe=NAME is missing\n  {advice}\n{usage}\nrecipes: {', '.join(files)}", proposal)


def _parse_nproc(text: str) -> int:
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
  prepare, plan, data, checkpoints, evaluate, generate, export, report
shell completion: eval "$(meshtrainer completion bash)", or zsh
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
            recipes = all_models() if config is None else [config.spec]
            parts += [
                _section_help(f"model (model.name={r.name})", r.config, declared_keys(r.config), config)
                for r in recipes
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
    keys = {k: f for k, f in declared.items() if k.startswith(f"{section}.")}
    docstring = (owner.__doc__ or "").partition("\n")[0]
    lines = [f"{title}: {docstring}"]
    for key, item in keys.items():
        meaning = item.metadata.get("meaning", "a registered model" if key == "model.name" else "")
        default = "(none)" if item.default is dataclasses.MISSING else _format(item.default)
        current_value = "" if config is None else f"; here {_format(operator.attrgetter(key)(config))}"
        lines.append(f"  {key}  [{type_name(item.type)}; default {default}{current_value}]\n      {meaning}")
    return "\n".join(lines) + "\n"


def _format(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[" + ", ".join(map(str, value)) + "]"
    return str(value) if value != "" else "(empty)"


# ---------------------------------------------------------------------------------------------------------------
# --print-config --why

_MAX_COLUMNS = 100
_MAX_INDENT = 36
"""The last column at which aligned comments may start.  After a longer value, the comment follows directly."""


def explained_yaml(config: RunConfig, origins: Mapping[str, str]) -> str:
    """Return `config.to_yaml()` with a comment on each non-default value that says where the value came from.

    origins: `Resolution.origins`, from `load_with_origins`.

    Comments are aligned, except after a long value.  A comment that would extend past column 100, or into a multi-line
    value, goes above its key.  The text remains a valid recipe file.
    """
    text = config.to_yaml()
    lines, keys = text.rstrip("\n").split("\n"), declared_keys(type(config.model), type(config.objective))
    comments: list[tuple[int, int | None, str]] = []
    for section, values in yaml.compose(text).value:
        for key, name, value in _yaml_nodes(section.value, values):
            current = operator.attrgetter(key)(config)
            item = keys[key]
            factory = item.default_factory
            default = item.default if factory is dataclasses.MISSING else factory()
            if key != "model.name" and plain_lists(current) == plain_lists(default):
                continue
            first_line: int = name.start_mark.line
            last_line: int | None = first_line
            if isinstance(value, yaml.ScalarNode):  # no comments inside multi-line strings
                last_line = None if value.style in ("|", ">") else value.end_mark.line
            comments.append((first_line, last_line, _origin_comment(origins.get(key, "unknown"))))
    widths = [len(lines[last_line]) + 2 for _, last_line, _ in comments if last_line is not None]
    indent = max((width for width in widths if width <= _MAX_INDENT), default=0)
    lines_above: dict[int, str] = {}
    for first_line, last_line, comment in comments:
        line = "" if last_line is None else f"{lines[last_line] + '  ':<{indent}}{comment}"
        if last_line is None or len(line) > _MAX_COLUMNS:
            lines_above[first_line] = f"  {comment}"
        else:
            lines[last_line] = line
    return "".join(
        f"{lines_above[number]}\n{line}\n" if number in lines_above else f"{line}\n"
        for number, line in enumerate(lines)
    )


def _yaml_nodes(prefix: str, values: yaml.MappingNode) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
    """Yield each key of a section with the YAML nodes of its name and of its value."""
    for name, value in values.value:
        key = f"{prefix}.{name.value}"
        if key in SUBSECTIONS:
            yield from _yaml_nodes(key, value)
        else:
            yield key, name, value


def _origin_comment(origin: str) -> str:
    """Return an origin as a comment on one short line, even if a path in it contains line breaks."""
    text = f"# {' '.join(printable(origin).split())}"
    max_len = _MAX_COLUMNS - 2
    return text if len(text) <= max_len else f"{text[: max_len // 2]}...{text[3 - max_len + max_len // 2 :]}"


# ---------------------------------------------------------------------------------------------------------------
# Shell completion

_BASH = """\
_meshtrainer() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} key=
    [[ $word == "=" ]] && word= key=${{COMP_WORDS[COMP_CWORD-1]}}
    [[ ${{COMP_WORDS[COMP_CWORD-1]}} == "=" ]] && key=${{COMP_WORDS[COMP_CWORD-2]}}
    [[ $key == recipe ]] && COMPREPLY=($(compgen -W "{recipes}" -- "$word"))
    [[ -n $key ]] && return
    COMPREPLY=($(compgen -W "{words}" -- "$word"))
    [[ ${{COMPREPLY[0]-}} == *= ]] && compopt -o nospace
}}
complete -o default -F _meshtrainer meshtrainer
"""
_ZSH = """\
#compdef meshtrainer
_meshtrainer() {{ compadd -S '' -- {words}; _files }}
compdef _meshtrainer meshtrainer
"""


def completion_script(shell: str, commands: Iterable[str]) -> str:
    """Return the completion script for bash, to load with `eval "$(meshtrainer completion bash)"`, or for zsh.

    Raises UserError if the shell is missing or unknown.
    """
    scripts = {"bash": _BASH, "zsh": _ZSH}
    if not shell:
        raise UserError("completion: the shell is missing\n  for example: meshtrainer completion bash")
    if shell not in scripts:
        raise choice_error("completion", shell, sorted(scripts))
    words = [*commands, *(f"recipe={name}" for name in recipe_files()), "nproc="]
    words += [f"{key}=" for key in declared_keys()]
    words += [*_OPTIONS, ALLOW_IMPORT]
    return scripts[shell].format(words=" ".join(words), recipes=" ".join(recipe_files()))
