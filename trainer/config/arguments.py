"""The command line of a run, sorted: the recipe, overrides, the number of processes, and what else is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from trainer.errors import UserError, nearest, setting_error

_MAX_PROCESSES = 1024
"""More than any machine has room for."""
_OPTIONS = ("--help", "--version", "--print-config", "--dry-run")


@dataclass(frozen=True)
class Arguments:
    """The arguments of the command line."""

    recipe: str | None = None
    overrides: list[str] = field(default_factory=list)
    nproc: int | None = None
    options: frozenset[str] = frozenset()
    sections: list[str] = field(default_factory=list)
    """Sections that `--help` is asked about; empty for all."""

    def asks_for(self, option: str) -> bool:
        """Return whether an option such as `--help` is given."""
        return option in self.options


def parse(argv: Sequence[str]) -> Arguments:
    """Sort the arguments; of a key given twice the last value holds.

    Raises UserError for an argument that is none of the known forms.
    """
    named: dict[str, str] = {}
    options, overrides, sections = set(), [], []
    wants_help = "--help" in argv or "-h" in argv
    for argument in argv:
        key, equals, value = argument.partition("=")
        if argument in (*_OPTIONS, "-h"):
            options.add("--help" if argument == "-h" else argument)
        elif argument.startswith("-"):
            raise UserError(f"{argument}: no such option\n  {_instead_of(argument)}")
        elif key in ("recipe", "nproc") and equals:
            named[key] = value
        elif wants_help and not equals:
            sections.append(argument)
        else:
            overrides.append(argument)
    nproc = _parse_nproc(named["nproc"]) if "nproc" in named else None
    return Arguments(named.get("recipe"), overrides, nproc, frozenset(options), sections)


def _instead_of(option: str) -> str:
    """Return what is to be said of an option that there is none of."""
    name = option.lstrip("-")
    if name.partition("=")[0] in ("recipe", "nproc"):
        return f"did you mean {name if '=' in name else f'{name}=...'}?"
    if "=" in name or "." in name:
        return f"to fix: keys are written without dashes, as {name if '=' in name else f'{name}=...'}"
    best = nearest(name, [known.lstrip("-") for known in _OPTIONS])
    return f"did you mean --{best}?" if best else "to fix: see --help"


def _parse_nproc(text: str) -> int:
    rule = f"must be a number of processes, from 1 to {_MAX_PROCESSES}"
    if not text.isdecimal() or len(text) > 9:
        raise setting_error("nproc", text, rule, example=1)
    if not 1 <= int(text) <= _MAX_PROCESSES:
        raise setting_error("nproc", text, rule, min(max(1, int(text)), _MAX_PROCESSES))
    return int(text)
