"""Recipe files that inherit with `recipe: PARENT`: their values override those of the parent.

Knows YAML as plain dictionaries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainer.config.run_paths import CONFIG, is_run
from trainer.errors import setting_error

PARENT = "recipe"
_OF_THE_RUN = {"run": ("name", "dir"), "checkpoint": ("dir", "resume")}
"""What a run's configuration says of that run alone."""


def merge_parents(
    tree: Mapping[str, Any], path: Path, find: Callable[[str], Path], read: Callable[[Path], Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the sections of the recipe file at `path`, those of its parents below them.

    A parent is written as on the command line: the name of a recipe, a path (from the file's own folder), or the folder
    of a run, of which the settings are taken, not its name, folder and checkpoints.  A file that names another model
    than its parent takes none of the parent's model fields.  `find` returns the file of a recipe, `read` what is in it.

    Raises UserError for a parent that there is none of, and for files that are each other's parents.
    """
    found, seen = dict(tree), [path.resolve()]
    while (parent := found.pop(PARENT, None)) is not None:
        rule = f"must be a recipe, a path ending in .yaml, or a run folder (in {seen[-1]})"
        if not isinstance(parent, str):
            raise setting_error(PARENT, parent, rule, example="llama_small")
        beside = seen[-1].parent / parent
        above = find(str(beside) if beside.exists() else parent).resolve()
        if above in seen:
            rule = f"is its own parent, through {', '.join(map(str, seen))}"
            raise setting_error(PARENT, parent, rule, fix="start one of them from another recipe, such as llama_small")
        found = _over(_settings(read(above), above), found)
        seen.append(above)
    return found


def _settings(tree: Mapping[str, Any], path: Path) -> dict[str, Any]:
    if path.name != CONFIG or not is_run(path.parent):
        return dict(tree)
    return {
        section: {key: value for key, value in values.items() if key not in _OF_THE_RUN.get(section, ())}
        if isinstance(values, Mapping)
        else values
        for section, values in tree.items()
    }


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for section, values in above.items():
        under = merged.get(section)
        if not isinstance(values, Mapping) or not isinstance(under, Mapping):
            merged[section] = under if values is None else values
        elif section == "model" and values.get("name", under.get("name")) != under.get("name"):
            merged[section] = dict(values)
        else:
            merged[section] = {**under, **values}
    return merged
